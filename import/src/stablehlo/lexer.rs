//! Tokens of MLIR text, and parse errors.
//!
//! Tokens borrow from the text and none is allocated, since a large model is megabytes of text. The lexer is
//! `Copy`, so that the parser can try a form and backtrack.

use std::fmt;

/// A position in the text: 1-based line, and 1-based column in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Place {
    pub line: u32,
    pub column: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// A parse error: the text is not MLIR that this importer reads. The caller prepends the file name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    #[error("{place}: expected {expected}, found {found}")]
    Expected { place: Place, expected: &'static str, found: Box<str> },
    #[error("{place}: this string has no closing quote on its line")]
    OpenString { place: Place },
    #[error("{place}: this number is too large")]
    NumberTooLarge { place: Place },
    #[error("{place}: nested more than {MAX_DEPTH} levels deep")]
    TooDeep { place: Place },
    #[error("{place}: the rows of this literal have different lengths")]
    RaggedLiteral { place: Place },
    #[error("{place}: {names} results are named, but the type has {types}")]
    ResultCount { place: Place, names: u64, types: usize },
    #[error("{place}: function @{name} is defined twice")]
    DuplicateFunction { place: Place, name: Box<str> },
}

/// Maximum nesting of regions, attributes, types and locations. Printers stay far below it, and no input can
/// overflow the stack.
pub(super) const MAX_DEPTH: u32 = 128;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Token<'a> {
    /// `stablehlo.add`, `func.func`, `tensor`, `true`.
    Word(&'a str),
    /// `%name`, without the `%`.
    Value(&'a str),
    /// `@name` or `@"name"`, without the `@` and the quotes.
    Symbol(&'a str),
    /// `#name`, without the `#`.
    Hash(&'a str),
    /// `!name`, without the `!`.
    Bang(&'a str),
    /// `^name`, without the `^`.
    Caret(&'a str),
    /// Decimal digits or `0x` and hexadecimal digits; a sign is a token of its own.
    Integer(&'a str),
    Float(&'a str),
    /// The text between the quotes, escapes not yet replaced.
    String(&'a str),
    Punctuation(u8),
    Arrow,
    End,
}

/// A token and its place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lexed<'a> {
    pub token: Token<'a>,
    pub start: usize,
    pub end: usize,
    pub place: Place,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Lexer<'a> {
    text: &'a str,
    position: usize,
    line: u32,
    line_start: usize,
}

impl<'a> Lexer<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Lexer { text, position: 0, line: 1, line_start: 0 }
    }

    /// Continues at `position`, which must be on the current line.
    pub(crate) fn seek(&mut self, position: usize) {
        self.position = position;
    }

    pub(crate) fn slice(&self, start: usize, end: usize) -> &'a str {
        self.text.get(start..end).unwrap_or("")
    }

    pub(crate) fn byte(&self, position: usize) -> u8 {
        // Zero is not an MLIR character, so it can mark the end of the text.
        self.text.as_bytes().get(position).copied().unwrap_or(0)
    }

    pub(crate) fn place(&self, position: usize) -> Place {
        let column = position.saturating_sub(self.line_start) + 1;
        Place { line: self.line, column: u32::try_from(column).unwrap_or(u32::MAX) }
    }

    pub(crate) fn next(&mut self) -> Result<Lexed<'a>, ParseError> {
        self.skip_blank();
        let start = self.position;
        let place = self.place(start);
        let byte = self.byte(start);
        let token = match byte {
            0 if start >= self.text.len() => Token::End,
            b'a'..=b'z' | b'A'..=b'Z' | b'_' => {
                self.position = self.run(start + 1, is_word);
                Token::Word(self.slice(start, self.position))
            }
            b'%' => Token::Value(self.suffix(start)?),
            b'#' => Token::Hash(self.suffix(start)?),
            b'!' => Token::Bang(self.suffix(start)?),
            b'^' => Token::Caret(self.suffix(start)?),
            b'@' if self.byte(start + 1) == b'"' => Token::Symbol(self.string(start + 1)?),
            b'@' => Token::Symbol(self.suffix(start)?),
            b'"' => Token::String(self.string(start)?),
            b'0'..=b'9' => self.number(start),
            b'-' if self.byte(start + 1) == b'>' => {
                self.position = start + 2;
                Token::Arrow
            }
            b'(' | b')' | b'{' | b'}' | b'[' | b']' | b'<' | b'>' | b',' | b':' | b'=' | b'-' | b'+' | b'*' | b'?'
            | b'/' | b'|' => {
                self.position = start + 1;
                Token::Punctuation(byte)
            }
            _ => return Err(self.unexpected(start, "MLIR text")),
        };
        Ok(Lexed { token, start, end: self.position, place })
    }

    /// The number of decimal digits at `position`.
    pub(crate) fn digits(&self, position: usize) -> usize {
        self.run(position, |byte| byte.is_ascii_digit()) - position
    }

    fn unexpected(&self, position: usize, expected: &'static str) -> ParseError {
        let found = match self.text.get(position..).and_then(|rest| rest.chars().next()) {
            Some(char) => format!("{char:?}"),
            None => "the end of the file".to_owned(),
        };
        ParseError::Expected { place: self.place(position), expected, found: found.into() }
    }

    /// Skips white space, comments and the `{-# ... #-}` block that carries external resources.
    fn skip_blank(&mut self) {
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.position) {
            match byte {
                b'\n' => {
                    self.position += 1;
                    self.new_line();
                }
                b' ' | b'\t' | b'\r' => self.position += 1,
                b'/' if self.byte(self.position + 1) == b'/' => {
                    let rest = &bytes[self.position..];
                    self.position += rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
                }
                b'{' if bytes[self.position..].starts_with(b"{-#") => {
                    while self.position < bytes.len() && !bytes[self.position..].starts_with(b"#-}") {
                        self.position += 1;
                        if bytes[self.position - 1] == b'\n' {
                            self.new_line();
                        }
                    }
                    self.position = bytes.len().min(self.position + 3);
                }
                _ => return,
            }
        }
    }

    fn new_line(&mut self) {
        self.line = self.line.saturating_add(1);
        self.line_start = self.position;
    }

    fn run(&self, start: usize, accept: fn(u8) -> bool) -> usize {
        let rest = self.text.as_bytes().get(start..).unwrap_or(&[]);
        start + rest.iter().position(|&b| !accept(b)).unwrap_or(rest.len())
    }

    /// The name after a one-byte sigil.
    fn suffix(&mut self, start: usize) -> Result<&'a str, ParseError> {
        let mut end = self.run(start + 1, |b| is_word(b) || b == b'-');
        // In `%0->` the dash belongs to the arrow.
        if self.byte(end) == b'>' && self.byte(end - 1) == b'-' {
            end -= 1;
        }
        if end == start + 1 {
            return Err(self.unexpected(end, "a name"));
        }
        self.position = end;
        Ok(self.slice(start + 1, end))
    }

    fn string(&mut self, quote: usize) -> Result<&'a str, ParseError> {
        let bytes = self.text.as_bytes();
        let mut end = quote + 1;
        loop {
            match bytes.get(end) {
                Some(b'"') => break,
                Some(b'\\') => end += 2,
                Some(b'\n') | None => {
                    return Err(ParseError::OpenString { place: self.place(quote) });
                }
                Some(_) => end += 1,
            }
        }
        self.position = end + 1;
        Ok(self.slice(quote + 1, end))
    }

    fn number(&mut self, start: usize) -> Token<'a> {
        if self.byte(start) == b'0' && self.byte(start + 1) == b'x' && self.byte(start + 2).is_ascii_hexdigit() {
            self.position = self.run(start + 2, |b| b.is_ascii_hexdigit());
            return Token::Integer(self.slice(start, self.position));
        }
        let is_digit = |b: u8| b.is_ascii_digit();
        let mut end = self.run(start, is_digit);
        if self.byte(end) != b'.' {
            self.position = end;
            return Token::Integer(self.slice(start, end));
        }
        end = self.run(end + 1, is_digit);
        if matches!(self.byte(end), b'e' | b'E') {
            let sign = usize::from(matches!(self.byte(end + 1), b'+' | b'-'));
            if self.byte(end + 1 + sign).is_ascii_digit() {
                end = self.run(end + 1 + sign, is_digit);
            }
        }
        self.position = end;
        Token::Float(self.slice(start, end))
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'.')
}

impl Token<'_> {
    /// The name of this token in error messages. Long tokens are truncated.
    pub(crate) fn describe(&self) -> Box<str> {
        let (sigil, name) = match *self {
            Token::Word(name) | Token::Integer(name) | Token::Float(name) => ("", name),
            Token::Value(name) => ("%", name),
            Token::Symbol(name) => ("@", name),
            Token::Hash(name) => ("#", name),
            Token::Bang(name) => ("!", name),
            Token::Caret(name) => ("^", name),
            Token::String(_) => return "a string".into(),
            Token::Punctuation(byte) => return format!("'{}'", char::from(byte)).into(),
            Token::Arrow => return "'->'".into(),
            Token::End => return "the end of the file".into(),
        };
        // Names are ASCII, but quoted symbols may not be, so the cut is at a character and not at a byte.
        match name.char_indices().nth(40) {
            Some((cut, _)) => format!("'{sigil}{}...'", &name[..cut]).into(),
            None => format!("'{sigil}{name}'").into(),
        }
    }
}

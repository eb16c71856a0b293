//! A reader of Python recipes as text: assignments, keyword arguments and default values of parameters that are
//! literals. Nothing is executed.

use super::{Given, Setting, SyntaxProblem};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    Number(Value),
    Text(String),
    /// Punctuation, of one or two characters.
    Mark(&'static str),
    /// The end of a statement.
    End,
}

/// The longest first.
const MARKS: [&str; 38] = [
    "**", "//", "==", "!=", "<=", ">=", "->", ":=", "+=", "-=", "*=", "/=", "|=", "&=", "<<", ">>", "(", ")", "[", "]",
    "{", "}", ",", ":", ".", "=", "+", "-", "*", "/", "%", "|", "&", "<", ">", "@", "~", ";",
];
/// The deepest nesting that is read.
const DEEPEST: usize = 64;

/// The settings of a recipe.
pub fn settings(text: &str) -> Result<Vec<Setting>, SyntaxProblem> {
    let tokens = tokens(text)?;
    let mut reader = Reader { tokens: &tokens, at: 0, variables: BTreeMap::new(), settings: Vec::new() };
    while reader.at < tokens.len() {
        reader.statement();
    }
    Ok(reader.settings)
}

fn tokens(text: &str) -> Result<Vec<(Token, usize)>, SyntaxProblem> {
    let (mut found, mut line, mut depth) = (Vec::new(), 1, 0_usize);
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        if c == '\n' {
            if depth == 0 {
                found.push((Token::End, line));
            }
            line += 1;
            rest = after;
        } else if c == '\\' && after.starts_with('\n') {
            line += 1;
            rest = &after[1..];
        } else if c.is_whitespace() {
            rest = after;
        } else if c == '#' {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else if c.is_alphabetic() || c == '_' {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            let (name, after) = rest.split_at(end);
            // A prefix of a text.
            if name.len() <= 2 && after.starts_with(['"', '\'']) {
                let (value, after, lines) = quoted(after, line)?;
                found.push((
                    if name.contains(['f', 'F']) { Token::Name(format!("f'{value}'")) } else { Token::Text(value) },
                    line,
                ));
                (rest, line) = (after, line + lines);
                continue;
            }
            found.push((Token::Name(name.to_string()), line));
            rest = after;
        } else if c == '"' || c == '\'' {
            let (value, after, lines) = quoted(rest, line)?;
            found.push((Token::Text(value), line));
            (rest, line) = (after, line + lines);
        } else if c.is_ascii_digit() || c == '.' && after.starts_with(|c: char| c.is_ascii_digit()) {
            let mut end = 0;
            for (i, c) in rest.char_indices() {
                let is_sign = "+-".contains(c) && rest[..i].ends_with(['e', 'E']) && !rest.starts_with("0x");
                if !(c.is_alphanumeric() || c == '.' || c == '_' || is_sign) {
                    break;
                }
                end = i + c.len_utf8();
            }
            found.push((Token::Number(number(&rest[..end])), line));
            rest = &rest[end..];
        } else if let Some(mark) = MARKS.iter().find(|mark| rest.starts_with(**mark)) {
            match *mark {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                _ => {}
            }
            found.push((Token::Mark(mark), line));
            rest = &rest[mark.len()..];
        } else {
            rest = after;
        }
    }
    found.push((Token::End, line));
    Ok(found)
}

fn number(text: &str) -> Value {
    let plain = text.replace('_', "");
    match plain.parse::<i64>() {
        Ok(whole) => Value::from(whole),
        Err(_) => plain.parse::<f64>().map_or(Value::String(text.to_string()), Value::from),
    }
}

/// A quoted text, what follows it, and the number of its line ends.
fn quoted(text: &str, line: usize) -> Result<(String, &str, usize), SyntaxProblem> {
    let quote = &text[..1];
    let triple = quote.repeat(3);
    let (open, is_long) = if text.starts_with(&triple) { (triple.as_str(), true) } else { (quote, false) };
    let mut value = String::new();
    let mut rest = &text[open.len()..];
    let mut lines = 0;
    loop {
        if let Some(after) = rest.strip_prefix(open) {
            return Ok((value, after, lines));
        }
        let Some(c) = rest.chars().next().filter(|&c| is_long || c != '\n') else {
            return Err(SyntaxProblem::at(line, "a text that begins here does not end"));
        };
        rest = &rest[c.len_utf8()..];
        lines += usize::from(c == '\n');
        if c == '\\' {
            let Some(next) = rest.chars().next() else { continue };
            rest = &rest[next.len_utf8()..];
            lines += usize::from(next == '\n');
            value.push(next);
        } else {
            value.push(c);
        }
    }
}

struct Reader<'a> {
    tokens: &'a [(Token, usize)],
    at: usize,
    variables: BTreeMap<String, Value>,
    settings: Vec<Setting>,
}

impl Reader<'_> {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn line(&self) -> usize {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(_, line)| *line)
    }

    fn is(&self, mark: &str) -> bool {
        self.peek()
            == Some(&Token::Mark(match MARKS.iter().find(|known| **known == mark) {
                Some(known) => known,
                None => return false,
            }))
    }

    fn skip(&mut self, mark: &str) -> bool {
        let found = self.is(mark);
        self.at += usize::from(found);
        found
    }

    /// Names with dots between.
    fn dotted(&mut self) -> Vec<String> {
        let mut names = Vec::new();
        while let Some(Token::Name(name)) = self.peek() {
            names.push(name.clone());
            self.at += 1;
            if !self.is(".") {
                break;
            }
            self.at += 1;
        }
        names
    }

    fn statement(&mut self) {
        let line = self.line();
        if let Some(Token::Name(word)) = self.peek()
            && ["def", "class", "async"].contains(&word.as_str())
        {
            // Default values of parameters are settings, and so is what follows on lines of their own.
            while !matches!(self.peek(), None | Some(Token::End)) && !self.is("(") {
                self.at += 1;
            }
            if self.skip("(") {
                self.arguments(&mut Vec::new(), true, 0);
            }
            self.skip_to_end();
            return;
        }
        let start = self.at;
        let path = self.dotted();
        if self.is(":") {
            self.at += 1;
            self.annotation();
        }
        if !path.is_empty() && self.skip("=") {
            let is_loose = path.len() == 1;
            if is_loose && let Some(value) = self.ahead() {
                self.variables.insert(path[0].clone(), value);
            }
            self.value(&path, line, is_loose, 0);
            self.skip_to_end();
            return;
        }
        // Calls anywhere in the statement.
        self.at = start;
        while !matches!(self.peek(), None | Some(Token::End)) {
            match self.peek() {
                Some(Token::Name(_)) => {
                    let names = self.dotted();
                    if self.skip("(") {
                        let is_loose = !is_class(&names);
                        self.arguments(&mut Vec::new(), is_loose, 0);
                    }
                }
                _ => self.at += 1,
            }
        }
        self.skip_to_end();
    }

    /// Skips the type of a variable or parameter.
    fn annotation(&mut self) {
        let mut depth = 0;
        while let Some(token) = self.peek() {
            match token {
                Token::End if depth == 0 => return,
                Token::Mark("(" | "[" | "{") => depth += 1,
                Token::Mark(")" | "]" | "}" | "," | "=") if depth == 0 => return,
                Token::Mark(")" | "]" | "}") => depth -= 1,
                _ => {}
            }
            self.at += 1;
        }
    }

    fn skip_to_end(&mut self) {
        while let Some(token) = self.peek() {
            let is_end = *token == Token::End;
            self.at += 1;
            if is_end {
                return;
            }
        }
    }

    /// Keyword arguments up to the closing bracket, which is skipped.
    fn arguments(&mut self, path: &mut Vec<String>, is_loose: bool, depth: usize) {
        loop {
            let line = self.line();
            match self.peek() {
                None => return,
                Some(Token::Mark(")" | "]" | "}")) => {
                    self.at += 1;
                    return;
                }
                Some(Token::Mark(",") | Token::End) => self.at += 1,
                Some(Token::Name(name)) => {
                    let (name, start) = (name.clone(), self.at);
                    self.at += 1;
                    if self.skip(":") {
                        self.annotation();
                    }
                    if self.skip("=") {
                        path.push(name);
                        let path_of = path.clone();
                        self.value(&path_of, line, is_loose, depth + 1);
                        path.pop();
                    } else {
                        self.at = start;
                        self.positional(path, is_loose, depth);
                    }
                }
                Some(_) => self.positional(path, is_loose, depth),
            }
        }
    }

    /// Skips an argument without a name, but for calls in it.
    fn positional(&mut self, path: &mut Vec<String>, is_loose: bool, depth: usize) {
        let start = self.at;
        while let Some(token) = self.peek() {
            match token {
                Token::Mark("," | ")" | "]" | "}") => break,
                Token::Mark("(" | "[" | "{") => {
                    self.at += 1;
                    if depth < DEEPEST { self.arguments(path, is_loose, depth + 1) } else { self.skip_to_close() }
                }
                Token::Name(_) => {
                    let names = self.dotted();
                    if self.skip("(") {
                        let is_loose = !is_class(&names);
                        if depth < DEEPEST { self.arguments(path, is_loose, depth + 1) } else { self.skip_to_close() }
                    }
                }
                _ => self.at += 1,
            }
        }
        if self.at == start {
            self.at += 1;
        }
    }

    /// Skips to behind the bracket that closes the present one.
    fn skip_to_close(&mut self) {
        let mut depth = 1;
        while let Some(token) = self.peek() {
            match token {
                Token::Mark("(" | "[" | "{") => depth += 1,
                Token::Mark(")" | "]" | "}") => depth -= 1,
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return;
            }
        }
    }

    /// The literal that follows, without reading on.
    fn ahead(&mut self) -> Option<Value> {
        let start = self.at;
        let value = self.literal(0).filter(|_| self.ends());
        self.at = start;
        value
    }

    /// True at the end of an expression.
    fn ends(&self) -> bool {
        matches!(self.peek(), None | Some(Token::End | Token::Mark("," | ")" | "]" | "}" | ";")))
    }

    /// Reads the value of a name up to the end of the expression.
    fn value(&mut self, path: &[String], line: usize, is_loose: bool, depth: usize) {
        let start = self.at;
        if let Some(value) = self.ahead() {
            let given = Given::Literal(value);
            self.settings.push(Setting { path: path.to_vec(), given, line, is_loose });
            let _ = self.literal(0);
            return;
        }
        let callee = self.dotted();
        if !callee.is_empty() && self.is("(") && depth < DEEPEST {
            self.at += 1;
            let name = callee.last().cloned().unwrap_or_default();
            let given = Given::Called(if name == "Config" { callee.join(".") } else { name });
            self.settings.push(Setting { path: path.to_vec(), given, line, is_loose });
            self.arguments(&mut path.to_vec(), !is_class(&callee), depth + 1);
            if self.ends() {
                return;
            }
        } else {
            self.at = start;
        }
        let from = self.at;
        let mut open = 0;
        while let Some(token) = self.peek() {
            match token {
                Token::End if open == 0 => break,
                Token::Mark("(" | "[" | "{") => open += 1,
                Token::Mark("," | ")" | "]" | "}") if open == 0 => break,
                Token::Mark(")" | "]" | "}") => open -= 1,
                _ => {}
            }
            self.at += 1;
        }
        if from == start {
            let text: Vec<String> = self.tokens[start..self.at].iter().take(8).map(|(t, _)| words(t)).collect();
            let given = Given::Expression(text.concat());
            self.settings.push(Setting { path: path.to_vec(), given, line, is_loose });
        }
    }

    /// A literal: a number, a text, a truth value, nothing, a list or a dictionary of these, a known variable, or a
    /// product or sum of whole numbers.
    fn literal(&mut self, depth: usize) -> Option<Value> {
        let mut value = self.atom(depth)?;
        while let Some(Token::Mark(mark @ ("*" | "//" | "/" | "+" | "-" | "**"))) = self.peek() {
            let mark = *mark;
            self.at += 1;
            let (left, right) = (value.as_i64()?, self.atom(depth)?.as_i64()?);
            value = Value::from(match mark {
                "*" => left.checked_mul(right)?,
                "//" => left.checked_div(right)?,
                "/" if right != 0 && left % right == 0 => left / right,
                "+" => left.checked_add(right)?,
                "-" => left.checked_sub(right)?,
                "**" => left.checked_pow(u32::try_from(right).ok()?)?,
                _ => return None,
            });
        }
        Some(value)
    }

    fn atom(&mut self, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        let token = self.peek()?.clone();
        self.at += 1;
        match token {
            Token::Number(value) => Some(value),
            Token::Text(mut text) => {
                // Texts side by side are one.
                while let Some(Token::Text(more)) = self.peek() {
                    text += more;
                    self.at += 1;
                }
                Some(Value::String(text))
            }
            Token::Name(name) => match name.as_str() {
                "True" => Some(Value::Bool(true)),
                "False" => Some(Value::Bool(false)),
                "None" => Some(Value::Null),
                // Data types keep their names.
                "torch" | "jnp" if self.is(".") => {
                    let names = self.dotted_after();
                    (!self.is("(")).then_some(Value::String(names))
                }
                _ => self.variables.get(&name).cloned(),
            },
            Token::Mark("-") => match self.atom(depth + 1)? {
                Value::Number(n) => Some(
                    n.as_i64()
                        .map_or_else(|| Value::from(-n.as_f64().unwrap_or(0.0)), |n| Value::from(n.wrapping_neg())),
                ),
                _ => None,
            },
            Token::Mark(open @ ("(" | "[")) => {
                let close = if open == "(" { ")" } else { "]" };
                let mut list = Vec::new();
                let mut commas = 0;
                while !self.skip(close) {
                    list.push(self.literal(depth + 1)?);
                    if self.skip(",") {
                        commas += 1;
                    } else if !self.is(close) {
                        return None;
                    }
                }
                match list.len() {
                    1 if open == "(" && commas == 0 => list.pop(),
                    _ => Some(Value::Array(list)),
                }
            }
            Token::Mark("{") => {
                let mut map = Map::new();
                while !self.skip("}") {
                    let name = self.literal(depth + 1)?;
                    if !self.skip(":") {
                        return None;
                    }
                    let name = name.as_str().map_or_else(|| name.to_string(), String::from);
                    map.insert(name, self.literal(depth + 1)?);
                    if !self.skip(",") && !self.is("}") {
                        return None;
                    }
                }
                Some(Value::Object(map))
            }
            _ => None,
        }
    }

    /// The last of the names after a dot.
    fn dotted_after(&mut self) -> String {
        self.skip(".");
        self.dotted().pop().unwrap_or_default()
    }
}

/// Returns true if a call makes an object with named options.
fn is_class(names: &[String]) -> bool {
    names.last().is_some_and(|name| {
        name.starts_with(|c: char| c.is_uppercase()) || name == "dict" || name.to_lowercase().ends_with("config")
    })
}

fn words(token: &Token) -> String {
    match token {
        Token::Name(name) => name.clone(),
        Token::Number(value) => value.to_string(),
        Token::Text(text) => format!("{text:?}"),
        Token::Mark(mark) => mark.to_string(),
        Token::End => String::new(),
    }
}

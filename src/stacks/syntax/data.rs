//! Readers of data files: JSON, TOML and the part of YAML that configurations use. Mappings become paths of names, and
//! lists of plain values become one value.

use super::{Given, Setting, SyntaxProblem, scalar};
use serde_json::{Map, Value};

/// The deepest nesting that is read.
const DEEPEST: usize = 64;

/// The settings of a JSON text.
pub fn json(text: &str) -> Result<Vec<Setting>, SyntaxProblem> {
    let mut flow = Flow { whole: Some(text), ..Flow::new(text, 1) };
    let mut settings = Vec::new();
    flow.entries(&mut Vec::new(), &mut settings, 0)?;
    flow.blank();
    match flow.peek() {
        None => Ok(settings),
        Some(c) => Err(flow.problem(format!("expected the end, found `{c}`"))),
    }
}

/// Reads what stands in brackets and braces, with the line of each value.
struct Flow<'a> {
    /// The whole file, if the reader began at its start: problems then have columns.
    whole: Option<&'a str>,
    rest: &'a str,
    line: usize,
}

impl<'a> Flow<'a> {
    fn new(text: &'a str, line: usize) -> Flow<'a> {
        Flow { whole: None, rest: text, line }
    }

    fn problem(&self, problem: impl Into<String>) -> SyntaxProblem {
        self.problem_at(self.line, self.rest, problem)
    }

    /// A problem at a line, and at what was left of the text there.
    fn problem_at(&self, line: usize, rest: &str, problem: impl Into<String>) -> SyntaxProblem {
        match self.whole {
            Some(whole) => SyntaxProblem::behind(whole, whole.len() - rest.len(), problem),
            None => SyntaxProblem::at(line, problem),
        }
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.rest = &self.rest[c.len_utf8()..];
        self.line += usize::from(c == '\n');
        Some(c)
    }

    /// Skips white space and comments.
    fn blank(&mut self) {
        while let Some(c) = self.peek() {
            if c == '#' || self.rest.starts_with("//") {
                while self.peek().is_some_and(|c| c != '\n') {
                    self.take();
                }
            } else if c.is_whitespace() {
                self.take();
            } else {
                break;
            }
        }
    }

    fn expect(&mut self, wanted: char) -> Result<(), SyntaxProblem> {
        self.blank();
        match self.peek() {
            Some(c) if c == wanted => {
                self.take();
                Ok(())
            }
            Some(c) => Err(self.problem(format!("expected `{wanted}`, found `{c}`"))),
            None => Err(self.problem(format!("expected `{wanted}`, found the end"))),
        }
    }

    /// The settings of a mapping, or the value that stands here.
    fn entries(
        &mut self,
        path: &mut Vec<String>,
        settings: &mut Vec<Setting>,
        depth: usize,
    ) -> Result<(), SyntaxProblem> {
        self.blank();
        let line = self.line;
        if self.peek() != Some('{') {
            let value = self.value(depth)?;
            settings.push(Setting { path: path.clone(), given: Given::Literal(value), line, is_loose: false });
            return Ok(());
        }
        if depth > DEEPEST {
            return Err(self.problem("is nested too deeply"));
        }
        self.take();
        loop {
            self.blank();
            if self.peek() == Some('}') {
                self.take();
                return Ok(());
            }
            let name = self.word(":")?;
            self.expect(':')?;
            path.push(name);
            self.entries(path, settings, depth + 1)?;
            path.pop();
            self.blank();
            if self.peek() != Some('}') {
                self.expect(',')?;
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, SyntaxProblem> {
        self.blank();
        if depth > DEEPEST {
            return Err(self.problem("is nested too deeply"));
        }
        match self.peek() {
            Some('[') => {
                self.take();
                let mut list = Vec::new();
                loop {
                    self.blank();
                    if self.peek() == Some(']') {
                        self.take();
                        return Ok(Value::Array(list));
                    }
                    list.push(self.value(depth + 1)?);
                    self.blank();
                    if self.peek() != Some(']') {
                        self.expect(',')?;
                    }
                }
            }
            Some('{') => {
                self.take();
                let mut map = Map::new();
                loop {
                    self.blank();
                    if self.peek() == Some('}') {
                        self.take();
                        return Ok(Value::Object(map));
                    }
                    let name = self.word(":")?;
                    self.expect(':')?;
                    map.insert(name, self.value(depth + 1)?);
                    self.blank();
                    if self.peek() != Some('}') {
                        self.expect(',')?;
                    }
                }
            }
            Some('"' | '\'') => Ok(Value::String(self.word("")?)),
            _ => self.word("").map(|word| scalar(&word)),
        }
    }

    /// A quoted text, or a bare one up to punctuation or one of `ends`.
    fn word(&mut self, ends: &str) -> Result<String, SyntaxProblem> {
        self.blank();
        let mut word = String::new();
        if let Some(quote @ ('"' | '\'')) = self.peek() {
            let (line, rest) = (self.line, self.rest);
            self.take();
            loop {
                match self.take() {
                    None => return Err(self.problem_at(line, rest, "a text that begins here does not end")),
                    Some(c) if c == quote => return Ok(word),
                    Some('\\') if quote == '"' => word.extend(self.take()),
                    Some(c) => word.push(c),
                }
            }
        }
        while let Some(c) = self.peek().filter(|&c| !",]}{[\n".contains(c) && !ends.contains(c)) {
            word.push(c);
            self.take();
        }
        let word = word.trim().to_string();
        if word.is_empty() {
            let found = self.peek().map_or("the end".to_string(), |c| format!("`{c}`"));
            return Err(self.problem(format!("expected a value, found {found}")));
        }
        Ok(word)
    }
}

/// A line of YAML.
struct Line<'a> {
    indent: usize,
    text: &'a str,
    number: usize,
}

/// The settings of a YAML text. Anchors, aliases and tags are expressions.
pub fn yaml(text: &str) -> Result<Vec<Setting>, SyntaxProblem> {
    let line = |(i, line): (usize, &'_ str)| {
        let indent = line.len() - line.trim_start().len();
        (indent, i + 1)
    };
    let lines: Vec<Line<'_>> = text
        .lines()
        .enumerate()
        .map(|(i, whole)| {
            let (indent, number) = line((i, whole));
            Line { indent, text: without_comment(whole).trim(), number }
        })
        .filter(|line| !line.text.is_empty() && line.text != "---" && !line.text.starts_with('%'))
        .collect();
    let mut block = Block { lines, at: 0, settings: Vec::new() };
    while let Some(line) = block.lines.get(block.at) {
        let (indent, number, before) = (line.indent, line.number, block.at);
        block.of(indent, &mut Vec::new(), 0)?;
        if block.at == before || block.at < block.lines.len() {
            let number = block.lines.get(block.at).map_or(number, |line| line.number);
            return Err(SyntaxProblem::at(number, "this line is indented unlike those above it"));
        }
    }
    Ok(block.settings)
}

/// A line up to a comment, which follows white space and stands in no quotes.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (i, c) in line.char_indices() {
        match (quote, c) {
            (None, '#') if before.is_whitespace() => return &line[..i],
            (None, '"' | '\'') if !before.is_alphanumeric() => quote = Some(c),
            (Some(open), c) if c == open => quote = None,
            _ => {}
        }
        before = c;
    }
    line
}

/// The name and the rest of `name: rest`.
fn entry(text: &str) -> Option<(String, &str)> {
    let open = text.chars().next().filter(|c| "\"'".contains(*c));
    let end = match open {
        Some(quote) => 1 + text[1..].find(quote)? + 1,
        None => text.match_indices(':').map(|(i, _)| i).find(|i| {
            let next = text[i + 1..].chars().next();
            next.is_none_or(char::is_whitespace)
        })?,
    };
    let rest = text[end..].trim_start().strip_prefix(':')?;
    if !rest.is_empty() && !rest.starts_with(char::is_whitespace) {
        return None;
    }
    let name = text[..end].trim().trim_matches(['"', '\'']).trim_start_matches("--");
    Some((name.to_string(), rest.trim()))
}

struct Block<'a> {
    lines: Vec<Line<'a>>,
    at: usize,
    settings: Vec<Setting>,
}

impl Block<'_> {
    fn push(&mut self, path: &[String], given: Given, line: usize) {
        self.settings.push(Setting { path: path.to_vec(), given, line, is_loose: false });
    }

    /// Reads the lines at one indentation.
    fn of(&mut self, indent: usize, path: &mut Vec<String>, depth: usize) -> Result<(), SyntaxProblem> {
        let mut items = 0;
        let mut list: Option<(Vec<Value>, usize)> = None;
        while let Some(line) = self.lines.get(self.at).filter(|line| line.indent == indent) {
            let (text, number) = (line.text, line.number);
            if depth > DEEPEST {
                return Err(SyntaxProblem::at(number, "is nested too deeply"));
            }
            let item = text.strip_prefix('-').filter(|rest| rest.is_empty() || rest.starts_with(' '));
            match item {
                Some(rest) if entry(rest.trim_start()).is_some() && !rest.trim_start().starts_with(['{', '[']) => {
                    // A mapping in a list: its lines are indented as its first entry is.
                    let inner = rest.trim_start();
                    let line = &mut self.lines[self.at];
                    line.indent = indent + (text.len() - inner.len());
                    line.text = inner;
                    let inner_indent = line.indent;
                    path.push(items.to_string());
                    self.of(inner_indent, path, depth + 1)?;
                    path.pop();
                }
                Some(rest) => {
                    self.at += 1;
                    let value = match rest.trim() {
                        "" => Value::Null,
                        rest => Flow::new(rest, number).value(depth)?,
                    };
                    list.get_or_insert_with(|| (Vec::new(), number)).0.push(value);
                }
                None => {
                    let Some((name, rest)) = entry(text) else {
                        return Err(SyntaxProblem::at(number, "expected `name: value`"));
                    };
                    self.at += 1;
                    path.push(name);
                    self.value(indent, rest, number, path, depth)?;
                    path.pop();
                }
            }
            items += 1;
        }
        if let Some((list, number)) = list {
            self.push(path, Given::Literal(Value::Array(list)), number);
        }
        Ok(())
    }

    /// Reads what follows a name.
    fn value(
        &mut self,
        indent: usize,
        rest: &str,
        number: usize,
        path: &mut Vec<String>,
        depth: usize,
    ) -> Result<(), SyntaxProblem> {
        let next = self.lines.get(self.at);
        match rest.chars().next() {
            None => match next {
                Some(next) if next.indent > indent || next.indent == indent && next.text.starts_with("- ") => {
                    let inner = next.indent;
                    if inner > indent {
                        return self.of(inner, path, depth + 1);
                    }
                    self.list_beside(inner, path, depth)
                }
                _ => {
                    self.push(path, Given::Literal(Value::Null), number);
                    Ok(())
                }
            },
            // A text of several lines.
            Some('|' | '>') => {
                let mut text = String::new();
                while let Some(line) = self.lines.get(self.at).filter(|line| line.indent > indent) {
                    text = text + line.text + "\n";
                    self.at += 1;
                }
                self.push(path, Given::Literal(Value::String(text)), number);
                Ok(())
            }
            Some('&' | '*' | '!') => {
                self.push(path, Given::Expression(rest.to_string()), number);
                Ok(())
            }
            Some('{' | '[') => {
                // It may continue on the next lines.
                let mut text = rest.to_string();
                while text.matches(['{', '[']).count() > text.matches(['}', ']']).count() {
                    let Some(line) = self.lines.get(self.at) else { break };
                    text = text + "\n" + line.text;
                    self.at += 1;
                }
                Flow::new(&text, number).entries(path, &mut self.settings, depth + 1)
            }
            Some('"' | '\'') => {
                let value = Flow::new(rest, number).value(depth)?;
                self.push(path, Given::Literal(value), number);
                Ok(())
            }
            Some(_) if rest.contains("${") || rest.contains("{{") => {
                self.push(path, Given::Expression(rest.to_string()), number);
                Ok(())
            }
            Some(_) => {
                self.push(path, Given::Literal(scalar(rest)), number);
                Ok(())
            }
        }
    }

    /// A list at the indentation of its name.
    fn list_beside(&mut self, indent: usize, path: &mut Vec<String>, depth: usize) -> Result<(), SyntaxProblem> {
        let from = self.at;
        let is_item = |line: &Line<'_>| line.indent > indent || line.indent == indent && line.text.starts_with('-');
        let count = self.lines[from..].iter().take_while(|line| is_item(line)).count();
        // Its lines are read as if they were indented, so that the mapping around them does not end.
        for line in &mut self.lines[from..from + count] {
            line.indent += 1;
        }
        self.of(indent + 1, path, depth + 1)
    }
}

/// The settings of a TOML text.
pub fn toml(text: &str) -> Result<Vec<Setting>, SyntaxProblem> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        SyntaxProblem::behind(text, error.span().map_or(0, |span| span.start), error.message())
    })?;
    let mut settings = Vec::new();
    of_table(text, &table, &mut Vec::new(), &mut settings);
    settings.sort_by_key(|setting| setting.line);
    Ok(settings)
}

fn of_table(text: &str, table: &toml::Table, path: &mut Vec<String>, settings: &mut Vec<Setting>) {
    for (name, value) in table {
        path.push(name.clone());
        match value {
            toml::Value::Table(inner) => of_table(text, inner, path, settings),
            value => {
                let literal = serde_json::to_value(value).unwrap_or(Value::Null);
                let line = line_of(text, path);
                settings.push(Setting { path: path.clone(), given: Given::Literal(literal), line, is_loose: false });
            }
        }
        path.pop();
    }
}

/// The line of a name in a TOML text: below the heading of its table.
fn line_of(text: &str, path: &[String]) -> usize {
    let (name, tables) = path.split_last().map_or(("", path), |(name, tables)| (name.as_str(), tables));
    let heading = format!("[{}]", tables.join("."));
    let start = match tables.is_empty() {
        true => 0,
        false => text.lines().position(|line| line.trim().starts_with(&heading)).unwrap_or(0),
    };
    let is_entry = |line: &str| line.trim_start().strip_prefix(name).is_some_and(|l| l.trim_start().starts_with('='));
    text.lines().skip(start).position(is_entry).map_or(start + 1, |at| start + at + 1)
}

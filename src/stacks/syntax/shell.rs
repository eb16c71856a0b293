//! A reader of shell scripts and command lines: options with their values, and variables that the script sets.

use super::{Given, Setting, SyntaxProblem, scalar};
use serde_json::Value;
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

/// The deepest nesting of options in variables that is read.
const DEEPEST: usize = 4;

/// The most bytes of text that variables expand to. Each may hold another twice, so that their lengths double by lines.
const MOST_EXPANDED: usize = 1 << 20;

/// A word of a script, with quotes removed. A separator ends the values of an option.
enum Word {
    /// The text, its line, and true if it follows a line's start or a separator.
    Text(String, usize, bool),
    Separator,
}

/// The options of a script.
pub fn settings(text: &str) -> Result<Vec<Setting>, SyntaxProblem> {
    let mut variables: BTreeMap<String, String> = BTreeMap::new();
    let mut settings = options(text, &mut variables, &mut { MOST_EXPANDED }, 0)?;
    settings.extend(of_launcher(&variables, text));
    Ok(settings)
}

/// Reads a part of a script. Texts of options that a variable holds are parts of their own. `left`: bytes to which
/// variables may still expand.
fn options(
    text: &str,
    variables: &mut BTreeMap<String, String>,
    left: &mut usize,
    depth: usize,
) -> Result<Vec<Setting>, SyntaxProblem> {
    let (settings, held) = (Vec::new(), Vec::new());
    let mut reader = Reader { variables, left, depth, settings, held, option: None };
    for word in words(text)? {
        match word {
            Word::Separator => reader.finish(),
            Word::Text(word, line, is_first) => reader.word(&word, line, is_first)?,
        }
    }
    reader.finish();
    let Reader { mut settings, held, .. } = reader;
    settings.extend(held);
    Ok(settings)
}

struct Reader<'a> {
    variables: &'a mut BTreeMap<String, String>,
    left: &'a mut usize,
    depth: usize,
    settings: Vec<Setting>,
    /// Options in texts that variables hold.
    held: Vec<Setting>,
    /// An option, with its line and the values so far.
    option: Option<(String, usize, Vec<String>)>,
}

impl Reader<'_> {
    /// A word with its variables replaced, whose growth is taken from what is left.
    fn expanded(&mut self, word: &str, line: usize) -> Result<String, SyntaxProblem> {
        let text = substituted(word, self.variables, 0);
        let grown = text.len().saturating_sub(word.len());
        let too_long = || SyntaxProblem::at(line, format!("its variables expand to more than {MOST_EXPANDED} bytes"));
        *self.left = self.left.checked_sub(grown).ok_or_else(too_long)?;
        Ok(text)
    }

    /// Ends the values of an option.
    fn finish(&mut self) {
        if let Some((name, line, values)) = self.option.take() {
            let path = name.split('.').map(String::from).collect();
            self.settings.push(Setting { path, given: given(values), line, is_loose: false });
        }
    }

    /// An option with one value.
    fn set(&mut self, name: &str, line: usize, value: String) {
        self.finish();
        self.option = Some((name.to_string(), line, vec![value]));
        self.finish();
    }

    fn word(&mut self, raw: &str, line: usize, is_first: bool) -> Result<(), SyntaxProblem> {
        let word = self.expanded(raw, line)?;
        if raw.strip_prefix("--").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_alphabetic())) {
            self.begin(&word, line);
            return Ok(());
        }
        let assigned = raw.split_once('=').filter(|(name, _)| is_name(name));
        match (assigned, &mut self.option) {
            (Some((name, value)), _) if is_first || name.chars().all(|c| !c.is_ascii_lowercase()) => {
                self.assign(name, value, line)?;
            }
            // `key=value`, as some programs take their options.
            (Some((name, value)), None) => {
                let value = self.expanded(value, line)?;
                self.set(name, line, value);
            }
            (None, None) if raw.contains('=') && !raw.starts_with(['-', '$']) => {
                let (name, value) = word.split_once('=').unwrap_or((&word, ""));
                self.set(name, line, value.to_string());
            }
            // `-x` is an option of a launcher.
            (None, Some(_)) if raw.starts_with('-') && raw[1..].starts_with(|c: char| c.is_ascii_alphabetic()) => {
                self.finish();
            }
            // The program that a launcher starts, and its options in a variable.
            (_, Some((_, _, values)))
                if word.ends_with(".py") || raw.contains("[@]") || raw.starts_with('$') && !values.is_empty() =>
            {
                self.finish();
            }
            (_, Some((_, _, values))) => values.push(word),
            _ => {}
        }
        Ok(())
    }

    /// Begins an option. It and its values may stand in one pair of quotes.
    fn begin(&mut self, word: &str, line: usize) {
        self.finish();
        let mut parts = word.trim_start_matches("--").split_whitespace().map(String::from);
        let name = parts.next().unwrap_or_default();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        // A pattern of the script's own options, not one that it gives.
        if !name.split('=').next().unwrap_or("").chars().all(is_plain) {
            return;
        }
        self.option = Some(match name.split_once('=') {
            Some((name, value)) => (name.to_string(), line, vec![value.to_string()]),
            None => (name, line, parts.collect()),
        });
        if word.contains('=') {
            self.finish();
        }
    }

    /// Sets a variable, which may hold a text of options.
    fn assign(&mut self, name: &str, value: &str, line: usize) -> Result<(), SyntaxProblem> {
        self.finish();
        if value.split_whitespace().any(|word| word.starts_with("--")) && self.depth < DEEPEST {
            let inner = options(value, self.variables, self.left, self.depth + 1).unwrap_or_default();
            self.held.extend(inner.into_iter().map(|s| Setting { line: s.line + line - 1, ..s }));
        }
        let value = self.expanded(value, line)?;
        self.variables.insert(name.to_string(), value);
        Ok(())
    }
}

/// Variables that people give a script's launcher, which say how many devices there are.
fn of_launcher(variables: &BTreeMap<String, String>, text: &str) -> Vec<Setting> {
    const NAMES: [&str; 8] =
        ["GPUS_PER_NODE", "NPROC_PER_NODE", "NNODES", "NUM_NODES", "WORLD_SIZE", "SLURM_NNODES", "NUM_GPUS", "NGPU"];
    let line = |name: &str| text.lines().position(|line| line.contains(name)).map_or(1, |at| at + 1);
    let of = |name: &&str| {
        let given = given(vec![variables.get(*name)?.clone()]);
        Some(Setting { path: vec![name.to_string()], given, line: line(name), is_loose: true })
    };
    NAMES.iter().filter_map(of).collect()
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn given(values: Vec<String>) -> Given {
    let unknown = values.iter().find(|value| value.contains('$') || value.contains('`'));
    if let Some(unknown) = unknown {
        return Given::Expression(unknown.clone());
    }
    Given::Literal(match values.as_slice() {
        [] => Value::Bool(true),
        [one] => scalar(one),
        several => Value::Array(several.iter().map(|value| scalar(value)).collect()),
    })
}

/// The words of a script.
fn words(text: &str) -> Result<Vec<Word>, SyntaxProblem> {
    let mut scanner = Scanner {
        chars: text.chars().peekable(),
        found: Vec::new(),
        word: String::new(),
        started: false,
        line: 1,
        begun: 1,
        first: true,
        in_array: 0,
        quote: None,
    };
    while let Some(c) = scanner.chars.next() {
        if !scanner.started {
            scanner.begun = scanner.line;
        }
        scanner.line += usize::from(c == '\n');
        match scanner.quote {
            Some((open, _)) => scanner.quoted(c, open),
            None => scanner.plain(c),
        }
    }
    if let Some((_, line)) = scanner.quote {
        return Err(SyntaxProblem::at(line, "a quote that begins here does not end"));
    }
    scanner.end();
    Ok(scanner.found)
}

struct Scanner<'a> {
    chars: Peekable<Chars<'a>>,
    found: Vec<Word>,
    word: String,
    /// A word has begun, be it empty.
    started: bool,
    line: usize,
    /// The line of the word.
    begun: usize,
    /// The word follows a line's start or a separator.
    first: bool,
    in_array: u32,
    /// The quote that is open, and its line.
    quote: Option<(char, usize)>,
}

impl Scanner<'_> {
    fn end(&mut self) {
        if std::mem::take(&mut self.started) {
            // `export` sets variables as well.
            let stays = self.first && self.word == "export";
            self.found.push(Word::Text(std::mem::take(&mut self.word), self.begun, self.first));
            self.first = stays;
        }
    }

    fn separate(&mut self) {
        self.end();
        self.found.push(Word::Separator);
    }

    fn push(&mut self, c: char) {
        self.word.push(c);
        self.started = true;
    }

    fn quoted(&mut self, c: char, open: char) {
        if c == open {
            self.quote = None;
        } else if (open, c) == ('"', '\\') {
            let next = self.chars.next();
            self.line += usize::from(next == Some('\n'));
            // Ends of lines are kept, for the numbers of lines of options in the text.
            self.word.extend(next);
        } else {
            self.word.push(c);
        }
    }

    fn plain(&mut self, c: char) {
        match c {
            '\'' | '"' => (self.quote, self.started) = (Some((c, self.line)), true),
            // `${...}` and `$((...))` are one word.
            '$' if matches!(self.chars.peek(), Some('{' | '(')) => {
                self.started = true;
                let inner = expansion(&mut self.chars);
                self.line += inner.matches('\n').count();
                self.word += &inner;
            }
            '\\' => match self.chars.next() {
                Some('\n') => {
                    self.line += 1;
                    self.end();
                }
                Some(next) => self.push(next),
                None => {}
            },
            '#' if !self.started => while self.chars.next_if(|&c| c != '\n').is_some() {},
            '(' if self.word.ends_with('=') || self.word.is_empty() => {
                (self.word, self.started) = (String::new(), false);
                self.in_array += 1;
                self.found.push(Word::Separator);
                self.first = false;
            }
            ')' if self.in_array > 0 => {
                self.separate();
                self.in_array -= 1;
            }
            '\n' | ';' | '|' | '&' if self.in_array == 0 => {
                self.separate();
                self.first = true;
            }
            c if c.is_whitespace() => self.end(),
            c => self.push(c),
        }
    }
}

/// The rest of `${...}` or `$(...)`, with the sign before it.
fn expansion(chars: &mut Peekable<Chars<'_>>) -> String {
    let (mut text, mut depth) = (String::from("$"), 0);
    for c in chars {
        text.push(c);
        depth += i32::from("{(".contains(c)) - i32::from("})".contains(c));
        if depth <= 0 {
            break;
        }
    }
    text
}

/// Replaces variables that the script sets, with defaults and whole-number arithmetic. What is unknown stays.
fn substituted(word: &str, variables: &BTreeMap<String, String>, depth: usize) -> String {
    let Some((before, rest)) = word.split_once('$').filter(|_| depth < 32) else { return word.to_string() };
    let more = |rest: &str| substituted(rest, variables, depth + 1);
    if let Some(inner) = rest.strip_prefix("((") {
        let Some((sum, after)) = inner.split_once("))") else { return word.to_string() };
        let value = arithmetic(&more(sum), variables).map_or(format!("$(({sum}))"), |value| value.to_string());
        return before.to_string() + &value + &more(after);
    }
    if let Some(inner) = rest.strip_prefix('{') {
        let Some((name, after)) = inner.split_once('}') else { return word.to_string() };
        let (name, default) = match name.split_once(":-").or_else(|| name.split_once('-')) {
            Some((name, default)) => (name, Some(default)),
            None => (name, None),
        };
        let value = variables.get(name).cloned().or_else(|| default.map(&more));
        return before.to_string() + &value.unwrap_or_else(|| format!("${name}")) + &more(after);
    }
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
    let (name, after) = rest.split_at(end);
    let value = variables.get(name).cloned().unwrap_or_else(|| format!("${name}"));
    // Unknown names are not looked at again.
    before.to_string() + &value + &if end == 0 { after.to_string() } else { more(after) }
}

/// The value of a sum of products of whole numbers and variables.
fn arithmetic(text: &str, variables: &BTreeMap<String, String>) -> Option<i64> {
    let spaced: String =
        text.chars().flat_map(|c| if "+-*/%()".contains(c) { vec![' ', c, ' '] } else { vec![c] }).collect();
    let mut words: Vec<&str> = spaced.split_whitespace().collect();
    words.reverse();
    let value = sum(&mut words, variables, 0)?;
    words.is_empty().then_some(value)
}

fn sum(words: &mut Vec<&str>, variables: &BTreeMap<String, String>, depth: usize) -> Option<i64> {
    let mut value = product(words, variables, depth)?;
    while let Some(&sign @ ("+" | "-")) = words.last() {
        words.pop();
        let next = product(words, variables, depth)?;
        value = if sign == "+" { value.checked_add(next)? } else { value.checked_sub(next)? };
    }
    Some(value)
}

fn product(words: &mut Vec<&str>, variables: &BTreeMap<String, String>, depth: usize) -> Option<i64> {
    let mut value = factor(words, variables, depth)?;
    while let Some(&sign @ ("*" | "/" | "%")) = words.last() {
        words.pop();
        let next = factor(words, variables, depth)?;
        value = match sign {
            "*" => value.checked_mul(next)?,
            "/" => value.checked_div(next)?,
            _ => value.checked_rem(next)?,
        };
    }
    Some(value)
}

fn factor(words: &mut Vec<&str>, variables: &BTreeMap<String, String>, depth: usize) -> Option<i64> {
    let word = words.pop()?;
    if word == "(" && depth < 64 {
        let value = sum(words, variables, depth + 1)?;
        return (words.pop()? == ")").then_some(value);
    }
    word.parse().ok().or_else(|| variables.get(word)?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_double_are_refused_by_their_line() {
        let doubled = (1..40).map(|i| format!("V{i}=$V{0}$V{0}\n", i - 1));
        let script = |lines: usize| {
            let end = format!("train --name $V{}\n", lines - 1);
            ["V0=xxxxxxxx\n".to_string()].into_iter().chain(doubled.clone().take(lines - 1)).chain([end]).collect()
        };
        let few: String = script(8);
        assert_eq!(settings(&few).expect("a script").last().expect("an option").path, ["name"]);
        let many: String = script(40);
        let problem = settings(&many).expect_err("it is refused");
        assert_eq!(problem.problem, "its variables expand to more than 1048576 bytes");
        assert!((15..20).contains(&problem.line), "{}", problem.line);
    }
}

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

/// A word with its variables replaced, whose growth is taken from what is `left`.
fn expanded(
    word: &str,
    variables: &BTreeMap<String, String>,
    left: &mut usize,
    line: usize,
) -> Result<String, SyntaxProblem> {
    let text = substituted(word, variables, 0);
    let grown = text.len().saturating_sub(word.len());
    let too_long = || SyntaxProblem::at(line, format!("its variables expand to more than {MOST_EXPANDED} bytes"));
    *left = left.checked_sub(grown).ok_or_else(too_long)?;
    Ok(text)
}

/// Reads a part of a script. Texts of options that a variable holds are parts of their own. `left`: bytes to which
/// variables may still expand.
fn options(
    text: &str,
    variables: &mut BTreeMap<String, String>,
    left: &mut usize,
    depth: usize,
) -> Result<Vec<Setting>, SyntaxProblem> {
    let mut settings: Vec<Setting> = Vec::new();
    let mut held: Vec<Setting> = Vec::new();
    let mut option: Option<(String, usize, Vec<String>)> = None;
    let mut finish = |option: &mut Option<(String, usize, Vec<String>)>| {
        if let Some((name, line, values)) = option.take() {
            let path = name.split('.').map(String::from).collect();
            settings.push(Setting { path, given: given(values), line, is_loose: false });
        }
    };
    for word in words(text)? {
        let Word::Text(word, line, is_first) = word else {
            finish(&mut option);
            continue;
        };
        let raw = word.clone();
        let word = expanded(&word, variables, left, line)?;
        let named = raw.strip_prefix("--").filter(|rest| rest.starts_with(|c: char| c.is_ascii_alphabetic()));
        if named.is_some() {
            finish(&mut option);
            // An option and its values may stand in one pair of quotes.
            let mut parts = word.trim_start_matches("--").split_whitespace().map(String::from);
            let name = parts.next().unwrap_or_default();
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            // A pattern of the script's own options, not one that it gives.
            if !name.split('=').next().unwrap_or("").chars().all(is_plain) {
                continue;
            }
            option = Some(match name.split_once('=') {
                Some((name, value)) => (name.to_string(), line, vec![value.to_string()]),
                None => (name, line, parts.collect()),
            });
            if word.contains('=') {
                finish(&mut option);
            }
            continue;
        }
        let assigned = raw.split_once('=').filter(|(name, _)| is_name(name));
        match (assigned, &mut option) {
            (Some((name, value)), _) if is_first || name.chars().all(|c| !c.is_ascii_lowercase()) => {
                finish(&mut option);
                if value.split_whitespace().any(|word| word.starts_with("--")) && depth < DEEPEST {
                    let inner = options(value, variables, left, depth + 1).unwrap_or_default();
                    held.extend(inner.into_iter().map(|s| Setting { line: s.line + line - 1, ..s }));
                }
                let value = expanded(value, variables, left, line)?;
                variables.insert(name.to_string(), value);
            }
            // `key=value`, as some programs take their options.
            (Some((name, value)), None) => {
                option = Some((name.to_string(), line, vec![expanded(value, variables, left, line)?]));
                finish(&mut option);
            }
            (None, None) if raw.contains('=') && !raw.starts_with(['-', '$']) => {
                let (name, value) = word.split_once('=').unwrap_or((&word, ""));
                option = Some((name.to_string(), line, vec![value.to_string()]));
                finish(&mut option);
            }
            // `-x` is an option of a launcher.
            (None, Some(_)) if raw.starts_with('-') && raw[1..].starts_with(|c: char| c.is_ascii_alphabetic()) => {
                finish(&mut option);
            }
            // The program that a launcher starts, and its options in a variable.
            (_, Some((_, _, values)))
                if word.ends_with(".py") || raw.contains("[@]") || raw.starts_with('$') && !values.is_empty() =>
            {
                finish(&mut option);
            }
            (_, Some((_, _, values))) => values.push(word),
            _ => {}
        }
    }
    finish(&mut option);
    settings.extend(held);
    Ok(settings)
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
    let mut found = Vec::new();
    let (mut word, mut started, mut line, mut begun, mut first) = (String::new(), false, 1, 1, true);
    let mut in_array = 0;
    let mut chars = text.chars().peekable();
    let mut quote: Option<(char, usize)> = None;
    let end = |found: &mut Vec<Word>, word: &mut String, started: &mut bool, begun: usize, first: &mut bool| {
        if std::mem::take(started) {
            // `export` sets variables as well.
            let stays = *first && word == "export";
            found.push(Word::Text(std::mem::take(word), begun, *first));
            *first = stays;
        }
    };
    while let Some(c) = chars.next() {
        if !started {
            begun = line;
        }
        line += usize::from(c == '\n');
        match (quote, c) {
            (Some((open, _)), c) if c == open => quote = None,
            (Some(('"', _)), '\\') => {
                let next = chars.next();
                line += usize::from(next == Some('\n'));
                // Ends of lines are kept, for the numbers of lines of options in the text.
                word.extend(next);
            }
            (Some(_), c) => word.push(c),
            (None, '\'' | '"') => (quote, started) = (Some((c, line)), true),
            // `${...}` and `$((...))` are one word.
            (None, '$') if matches!(chars.peek(), Some('{' | '(')) => {
                started = true;
                let inner = expansion(&mut chars);
                line += inner.matches('\n').count();
                word += &inner;
            }
            (None, '\\') => match chars.next() {
                Some('\n') => {
                    line += 1;
                    end(&mut found, &mut word, &mut started, begun, &mut first);
                }
                Some(next) => {
                    word.push(next);
                    started = true;
                }
                None => {}
            },
            (None, '#') if !started => {
                while chars.peek().is_some_and(|&c| c != '\n') {
                    chars.next();
                }
            }
            (None, '(') if word.ends_with('=') || word.is_empty() => {
                (word, started) = (String::new(), false);
                in_array += 1;
                found.push(Word::Separator);
                first = false;
            }
            (None, ')') if in_array > 0 => {
                end(&mut found, &mut word, &mut started, begun, &mut first);
                in_array -= 1;
                found.push(Word::Separator);
            }
            (None, '\n' | ';' | '|' | '&') if in_array == 0 => {
                end(&mut found, &mut word, &mut started, begun, &mut first);
                found.push(Word::Separator);
                first = true;
            }
            (None, c) if c.is_whitespace() => end(&mut found, &mut word, &mut started, begun, &mut first),
            (None, c) => {
                word.push(c);
                started = true;
            }
        }
    }
    if let Some((_, line)) = quote {
        return Err(SyntaxProblem::at(line, "a quote that begins here does not end"));
    }
    if started {
        found.push(Word::Text(word, begun, first));
    }
    Ok(found)
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

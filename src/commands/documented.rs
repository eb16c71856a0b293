//! Tests that this program accepts every command that a page, a document or a message shows.

use crate::Cli;
use crate::commands::vocabulary::with_names;
use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::path::{Path, PathBuf};

/// The files under a folder of the project.
fn files(folder: &str, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    while let Some(path) = pending.pop() {
        if path.is_dir() {
            let skipped = path.ends_with("dist") || path.ends_with("node_modules");
            let entries = std::fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path());
            pending.extend(entries.filter(|_| !skipped));
        } else if path.extension().is_some_and(|e| extensions.iter().any(|known| e == *known)) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The command lines in a text: lines of code blocks that start with the program's name, text between backticks, and
/// `code` elements of class `command` in a page's program.
fn commands(path: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let is_markdown = path.extension().is_some_and(|e| e == "md");
    let joined = text.replace("\\\n", " ");
    for line in joined.lines() {
        let shell = line.trim_start().trim_start_matches("$ ");
        let launched = ["mpirun", "srun", "torchrun"].iter().any(|launcher| shell.starts_with(launcher));
        if is_markdown && (shell.starts_with("altiplano ") || launched) {
            found.extend(shell.split_once("altiplano ").map(|(_, rest)| rest.to_string()));
        } else if let Some((_, rest)) = line.split_once("class=\"command\">altiplano ") {
            found.extend(rest.split_once("</code>").map(|(command, _)| command.to_string()));
        }
    }
    // A command may continue on the next line of a comment.
    let joined: String =
        joined.lines().filter(|line| !line.trim_start().starts_with("```")).map(|l| l.to_string() + "\n").collect();
    let flat = joined.replace("\n///", " ").replace("\n//!", " ").replace("\n//", " ").replace('\n', " ");
    let between = flat.split('`').skip(1).step_by(2).filter_map(|code| code.strip_prefix("altiplano "));
    found.extend(between.map(String::from));
    found
}

/// The words of a command line, up to shell redirections; `{...}` of a program and `...` match anything.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let (mut quote, mut depth) = (None, 0);
    for c in command.chars() {
        match (c, quote) {
            ('{', None) => depth += 1,
            ('}', None) => {
                depth -= 1;
                words.last_mut().expect("a word").push('X');
            }
            _ if depth > 0 => {}
            ('\'' | '"', None) => quote = Some(c),
            (c, Some(q)) if c == q => quote = None,
            ('|' | '>' | '&' | ';' | '#' | '<', None) => break,
            (' ', None) => words.push(String::new()),
            _ => words.last_mut().expect("a word").push(c),
        }
    }
    words.retain(|word| !word.is_empty() && !word.starts_with("..") && word != "…");
    words
}

/// The reason why a command line is invalid, if it is.
fn problem(command: &str) -> Option<String> {
    let mut line = vec!["altiplano".to_string()];
    line.extend(words(command));
    let error = with_names(Cli::command()).try_get_matches_from(&line).err()?;
    let value = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) => value.as_str(),
        _ => "",
    };
    // A placeholder in a document: a value in capitals, or everything after the first words.
    let open = value.is_empty() || !value.chars().any(|c| c.is_ascii_lowercase());
    match error.kind() {
        ErrorKind::MissingRequiredArgument | ErrorKind::MissingSubcommand => None,
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => None,
        ErrorKind::InvalidValue | ErrorKind::ValueValidation | ErrorKind::WrongNumberOfValues if open => None,
        _ => Some(error.to_string().lines().next().unwrap_or("").to_string()),
    }
}

#[test]
fn commands_that_are_shown_are_commands() {
    let mut all = files("docs", &["md"]);
    all.extend(files("src", &["rs", "tsx", "md"]));
    for folder in ["ir/src", "planner/src", "runtime/src", "cost_models/src"] {
        all.extend(files(folder, &["rs"]));
    }
    for file in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "fuzz/README.md"] {
        all.push(Path::new(env!("CARGO_MANIFEST_DIR")).join(file));
    }
    let this = Path::new(file!()).file_name();
    let mut checked = 0;
    let mut wrong = Vec::new();
    for path in all.iter().filter(|path| path.file_name() != this) {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        for command in commands(path, &text) {
            checked += 1;
            if let Some(problem) = problem(&command) {
                wrong.push(format!("{}: `altiplano {command}`: {problem}", path.display()));
            }
        }
    }
    assert!(checked > 100, "{checked} commands were found, too few to be all");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_is_no_command_is_found() {
    assert!(problem("inspect PLAN --why 'a'").is_some());
    assert!(problem("plna model.mlir").is_some());
    assert!(problem("plan model.mlir --schedule 2f2b").is_some());
    assert_eq!(problem("plan MODEL --dp N -o PLAN | less"), None);
    assert_eq!(words("why PLAN --param {quoted(name)}"), ["why", "PLAN", "--param", "X"]);
}

//! Tests that this program accepts every command that a page, a document or a message shows, and that
//! every link in a document leads to a file and a heading that exist.

use crate::Cli;
use crate::commands::vocabulary::with_names;
use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::collections::BTreeSet;
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

/// Words that may stand before a command.
const LAUNCHERS: [&str; 4] = ["mpirun", "srun", "torchrun", "benches/hosts.sh"];

/// The command lines in a text: lines of code blocks that start with the program's name, text between backticks, and
/// `code` elements of class `command` in a page's program.
fn commands(path: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let is_markdown = path.extension().is_some_and(|e| e == "md");
    let joined = text.replace("\\\n", " ");
    for line in joined.lines() {
        let shell = line.trim_start().trim_start_matches(['$', '#']).trim_start();
        let launched = LAUNCHERS.iter().any(|launcher| shell.starts_with(launcher));
        if is_markdown && (shell.starts_with("altiplano ") || launched) {
            found.extend(shell.split_once("altiplano ").map(|(_, rest)| rest.to_string()));
        } else if is_markdown && let Some(arguments) = shell.strip_prefix("cargo run --release -- ") {
            found.push(arguments.to_string());
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

/// The documents that stand alone, and the pages in `docs`.
fn documents() -> Vec<PathBuf> {
    let names = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    names.iter().map(|name| root.join(name)).chain(files("docs", &["md"])).collect()
}

/// The lines of a document outside of its code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_fenced = false;
    text.lines().filter(move |line| {
        let is_fence = line.starts_with("```");
        is_fenced ^= is_fence;
        !is_fenced && !is_fence && !line.starts_with("    ")
    })
}

/// The targets of the links and pictures in a document.
fn links(text: &str) -> Vec<String> {
    let without_code = |line: &str| line.split('`').step_by(2).collect::<String>();
    let flat: String = prose(text).map(|line| without_code(line) + " ").collect();
    let targets = flat.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.to_string()).collect()
}

/// The anchors that GitHub gives to the headings of a document.
fn anchors(text: &str) -> BTreeSet<String> {
    let anchor = |heading: &str| {
        let heading = heading.to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    let headings = prose(text).filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

/// Why a link in a document leads nowhere, if it does not.
fn broken(document: &Path, link: &str) -> Option<String> {
    if link.contains("://") {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() { document.to_path_buf() } else { document.with_file_name("").join(path) };
    if !target.exists() {
        return Some(format!("{}: no file '{path}'", document.display()));
    }
    let text = || std::fs::read_to_string(&target).unwrap_or_default();
    let leads_somewhere = anchor.is_empty() || anchors(&text()).contains(anchor);
    (!leads_somewhere).then(|| format!("{}: no heading '#{anchor}' in '{}'", document.display(), target.display()))
}

#[test]
fn links_lead_to_files_and_headings() {
    let (mut checked, mut wrong) = (0, Vec::new());
    for document in documents() {
        let text = std::fs::read_to_string(&document).expect("a document");
        for link in links(&text) {
            checked += 1;
            wrong.extend(broken(&document, &link));
        }
    }
    assert!(checked > 150, "{checked} links were found, too few to be all");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn pages_are_in_the_index() {
    let index =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/README.md")).expect("the index");
    let listed: BTreeSet<String> = links(&index).into_iter().collect();
    for page in files("docs", &["md", "json"]) {
        let name = page.file_name().expect("a name").to_string_lossy().into_owned();
        assert!(name == "README.md" || listed.contains(&name), "docs/README.md does not list {name}");
    }
}

/// The program that the README shows is a part of the example that it names.
#[test]
fn the_readme_shows_the_example() {
    let read = |name: &str| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).expect(name);
    let (readme, example) = (read("README.md"), read("examples/plan_and_train.rs"));
    let (_, rest) = readme.split_once("```rust\n").expect("a program");
    let (program, _) = rest.split_once("```").expect("its end");
    let mut lines = example.lines();
    for line in program.lines().filter(|line| !line.is_empty()) {
        assert!(lines.any(|other| other == line), "'{line}' is not in the example, or not in this order");
    }
    assert!(program.contains("load_model") && program.contains("train("), "{program}");
}

#[test]
fn broken_links_are_found() {
    let text =
        "# A page\n\n## It's `here` ✓\n\n[a](README.md) ![b](no.png) [c](#its-here-) `[d](no.md)`\n\n    [e](no.md)\n";
    assert_eq!(links(text), ["README.md", "no.png", "#its-here-"]);
    assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), ["a-page", "its-here-"]);
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    assert_eq!(broken(&readme, "ARCHITECTURE.md#glossary"), None);
    assert!(broken(&readme, "ARCHITECTURE.md#nothing").is_some());
    assert!(broken(&readme, "docs/nothing.md").is_some());
}

#[test]
fn what_is_no_command_is_found() {
    assert!(problem("inspect PLAN --why 'a'").is_some());
    assert!(problem("plna model.mlir").is_some());
    assert!(problem("plan model.mlir --schedule 2f2b").is_some());
    assert_eq!(problem("plan MODEL --dp N -o PLAN | less"), None);
    assert_eq!(words("why PLAN --param {quoted(name)}"), ["why", "PLAN", "--param", "X"]);
    let page = "    $ altiplano plan a\n    # altiplano run b\n    benches/hosts.sh mpi 2 altiplano run c\n    cargo run --release -- demo\n";
    assert_eq!(commands(Path::new("page.md"), page), ["plan a", "run b", "run c", "demo"]);
}

//! The subcommands, and their shared output functions.

pub mod advise;
pub mod bench_input;
pub mod calibrate;
pub mod certify;
pub mod checkpoint;
pub mod clusters;
pub mod compare;
pub mod completions;
pub mod config;
pub mod demo;
pub mod devices;
#[cfg(test)]
mod documented;
pub mod export;
pub mod fidelity;
pub mod fixed;
pub mod import;
pub mod inspect;
pub mod judge;
pub mod man;
pub mod options;
pub mod overwrite;
pub mod plan;
pub mod probe;
pub mod profile;
pub mod prove;
pub mod ranks;
pub mod rate;
pub mod run;
pub mod scale;
pub mod serve;
pub mod show;
pub mod simulate;
pub mod trials;
pub mod verify;
pub mod vocabulary;
pub mod why;
pub mod why_not;

use crate::progress::Bar;
use altiplano::ir::plan::{MadeBy, Plan};
use altiplano::planner::{PlanFailure, Progress, Request};
use altiplano::suggestions::{Explained, failure_json, fixes, shortage};
use altiplano::{Error, Look, Warning, answer_as, by_cluster, load_plan, printable, report_as};
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// Saves the results of a search for later ones, if requested. A failure costs only time, so it is a warning.
pub(crate) fn keep_searches(request: &Request) {
    let Some(cache) = &request.cache else { return };
    if let Err(error) = cache.save() {
        let file = cache.file().map(|file| format!("{}: ", file.display())).unwrap_or_default();
        complain!("warning: {file}{error}; the search results are not cached");
    }
}

/// The look of text on stdout. On a terminal it has the terminal's width, and colours unless NO_COLOR or a terminal
/// without them forbids it. Otherwise it is plain.
fn look() -> Look {
    let term = console::Term::stdout();
    if !term.is_term() {
        return Look::PLAIN;
    }
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    Look { width: term.size_checked().map(|(_, columns)| columns.into()), colour: !is_set("NO_COLOR") && !dumb }
}

/// Number of lines of the terminal, if stdout is one.
fn lines_of_terminal() -> Option<usize> {
    let term = console::Term::stdout();
    if term.is_term() { term.size_checked().map(|(lines, _)| lines.into()) } else { None }
}

/// The report of a plan as stdout shows it. If it is longer than the terminal, it repeats its first lines at the end.
fn report_for_stdout(plan: &Plan) -> String {
    let look = look();
    let mut text = report_as(plan, look);
    if lines_of_terminal().is_some_and(|lines| text.lines().count() >= lines) {
        text.push_str(&format!("\n\n{}", answer_as(plan, look)));
    }
    text
}

/// Quotes arguments as a command line for a shell.
fn command_line(arguments: impl Iterator<Item = String>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+%".contains(c);
    let quoted = |word: String| match !word.is_empty() && word.chars().all(plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', r"'\''")),
    };
    let words: Vec<String> = std::iter::once("altiplano".to_string()).chain(arguments).map(quoted).collect();
    words.join(" ")
}

/// The program's version and the command that determines a plan.
fn made_by() -> MadeBy {
    let command = command_line(what_decides(std::env::args().skip(1)).into_iter());
    MadeBy { version: env!("CARGO_PKG_VERSION").to_string(), command }
}

/// Removes options that decide nothing about a plan: where results go, how they are shown, and if they are proved.
fn what_decides(arguments: impl Iterator<Item = String>) -> Vec<String> {
    const FILES: [&str; 5] = ["-o", "--output", "--html", "--from", "--cache"];
    let mut kept = Vec::new();
    let mut arguments = arguments.peekable();
    while let Some(word) = arguments.next() {
        let name = word.split('=').next().unwrap_or("");
        match word.as_str() {
            "--json" | "--prove" => {}
            _ if FILES.contains(&word.as_str()) => drop(arguments.next()),
            _ if FILES.contains(&name) || word.starts_with("-o") => {}
            _ => kept.push(word),
        }
    }
    kept
}

/// Prints a line to stdout. A reader that has closed it changes neither what is written to files nor the exit code.
fn say(text: impl Display) -> Result<(), Error> {
    match print(text) {
        Err(Error::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}

/// Prints a line to stdout, or fails.
fn print(text: impl Display) -> Result<(), Error> {
    let mut text = text.to_string();
    // Files and programs get what they ask for, to the byte.
    if console::Term::stdout().is_term() {
        text = printable(&text).into_owned();
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Error::Output)
}

/// Prints the remarks on a model to stderr.
fn warn(warnings: &[Warning]) {
    for warning in warnings {
        complain!("{}: {warning}", if warning.is_note() { "note" } else { "warning" });
    }
}

/// Loads a plan for comparison with other plans. Since a measured profile cannot price those, the cluster's figures
/// predict all of them.
fn load_to_ask(file: &Path) -> Result<Plan, Error> {
    let plan = load_plan(file)?;
    if let Some(measured) = &plan.profile {
        complain!(
            "note: the plan was predicted by the {measured}; here the cluster's figures predict it, as all other plans"
        );
    }
    by_cluster(plan)
}

/// The explanation of a failed search: what is short or in conflict, and which changes were planned and work.
fn explained(request: &Request, error: &Error, progress: &dyn Progress) -> Option<Explained> {
    let Error::Plan(failure) = error else { return None };
    match **failure {
        PlanFailure::Memory { ref closest, .. } => {
            closest.as_ref().and_then(|closest| shortage(request, closest, progress).ok()).map(Explained::Memory)
        }
        _ => Some(Explained::Choices(fixes(request, progress))),
    }
}

/// Explains a failed search on stderr: what is short or in conflict, and which changes were planned and work. With
/// `json`, prints it as JSON to stdout.
fn explain_failure(request: &Request, error: &Error, bar: &Bar, json: bool) -> Result<(), Error> {
    let Error::Plan(_) = error else { return Ok(()) };
    let explained = explained(request, error, bar);
    if json {
        return bar.suspend(|| say(failure_json(error, explained.as_ref())));
    }
    match explained {
        Some(Explained::Memory(shortage)) => bar.suspend(|| complain!("{shortage}")),
        Some(Explained::Choices(fixes)) if !fixes.is_empty() => {
            let lines: Vec<String> = fixes.iter().map(|fix| format!("\n  {fix}")).collect();
            bar.suspend(|| complain!("changes with which there is a plan, fastest first:{}", lines.concat()));
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_where_results_go_decides_nothing() {
        let of = |line: &str| what_decides(line.split(' ').map(String::from)).join(" ");
        let asked = "plan m.json --cluster dgx-h100:4 --tp=2";
        assert_eq!(of(asked), asked);
        assert_eq!(of("plan -o p.json m.json --json --cluster dgx-h100:4 --cache dir --tp=2 --html=page"), asked);
        assert_eq!(
            command_line(["plan", "a b", "it's"].map(String::from).into_iter()),
            r"altiplano plan 'a b' 'it'\''s'"
        );
    }
}

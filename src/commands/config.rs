//! `run --config FILE`: the options of a run in a TOML file. They have the same names as on the command line, which
//! takes precedence.
//!
//! The file's keys are looked up in the command's own definition, and its values are parsed as if they had been typed.
//! So no option has two meanings.

use crate::commands::vocabulary::instead;
use altiplano::{Error, Names, OptionsProblem, read_bytes};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// An option in a file.
struct Entry {
    key: String,
    /// Position of its value, in bytes.
    at: usize,
    arguments: Vec<String>,
}

/// Parses a command line, with the options that a file adds to it.
pub(crate) fn matches(command: Command, arguments: Vec<OsString>) -> Result<ArgMatches, Error> {
    let given = match command.clone().try_get_matches_from(&arguments) {
        Ok(given) => given,
        Err(error) if error.kind() == ErrorKind::UnknownArgument => match instead(&error) {
            Some(problem) => return Err(Error::NoSuchOption { problem }),
            None => error.exit(),
        },
        // The missing argument may be in the file. If it is not, the second parse, with the file, reports it.
        Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => {
            let lenient = command.clone().mut_subcommand("run", |run| run.ignore_errors(true)).ignore_errors(true);
            let given = lenient.try_get_matches_from(&arguments).unwrap_or_else(|_| error.exit());
            let has_file = |run: &ArgMatches| run.get_one::<PathBuf>("config").is_some();
            if given.subcommand_matches("run").is_none_or(|run| !has_file(run)) {
                error.exit();
            }
            given
        }
        Err(error) => error.exit(),
    };
    let Some(("run", run)) = given.subcommand() else { return Ok(given) };
    let Some(file) = run.get_one::<PathBuf>("config") else { return Ok(given) };
    let text = String::from_utf8_lossy(&read_bytes(file)?).into_owned();
    let definition = command.find_subcommand("run").cloned().unwrap_or_default();
    let entries = entries(&definition, file, &text)?;
    let typed = |entry: &&Entry| {
        let argument = definition.get_arguments().find(|a| is_named(a, &entry.key));
        argument.is_some_and(|a| run.value_source(a.get_id().as_str()) == Some(ValueSource::CommandLine))
    };
    let added: Vec<&Entry> = entries.iter().filter(|entry| !typed(entry)).collect();
    // Options follow the name of the subcommand, before any `--`.
    let behind = arguments.iter().position(|a| a == "run").map_or(arguments.len(), |at| at + 1);
    let mut all = arguments[..behind].to_vec();
    all.extend(added.iter().flat_map(|entry| &entry.arguments).map(OsString::from));
    all.extend_from_slice(&arguments[behind..]);
    command.try_get_matches_from(all).map_err(|error| {
        let of_option = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(option)) => {
                let name = option.trim_start_matches('-').split([' ', '=', '[']).next().unwrap_or("");
                added.iter().find(|entry| entry.key == name)
            }
            _ => None,
        };
        let Some(entry) = of_option else { error.exit() };
        let said = error.to_string();
        let said = said.lines().next().unwrap_or("").trim_start_matches("error: ").to_string();
        at(file, &text, entry.at, OptionsProblem::Refused { said })
    })
}

/// Reads the options in a file, as arguments.
fn entries(run: &Command, file: &Path, text: &str) -> Result<Vec<Entry>, Error> {
    let table = DeTable::parse(text).map_err(|error| {
        let place = error.span().map_or(text.len(), |span| span.start);
        at(file, text, place, OptionsProblem::Toml(Box::new(error)))
    })?;
    let mut entries = Vec::new();
    for (key, value) in table.get_ref() {
        let name = key.get_ref().to_string();
        let known = |a: &&clap::Arg| is_named(a, &name) && !["config", "help"].contains(&name.as_str());
        let Some(argument) = run.get_arguments().find(known) else {
            let near = near(run, &name);
            return Err(at(file, text, key.span().start, OptionsProblem::Unknown { name, near }));
        };
        let place = value.span().start;
        let refused = |problem| at(file, text, place, problem);
        let is_flag = !matches!(argument.get_action(), ArgAction::Set | ArgAction::Append);
        let takes_none = is_flag || argument.get_num_args().is_some_and(|range| range.min_values() == 0);
        let one = |value: &DeValue<'_>| match value {
            DeValue::Boolean(true) if takes_none => Ok(Some(format!("--{name}"))),
            DeValue::Boolean(false) if takes_none => Ok(None),
            _ if is_flag => Err(refused(OptionsProblem::NotAFlag { name: name.clone() })),
            DeValue::String(text) => Ok(Some(format!("--{name}={text}"))),
            DeValue::Integer(number) if number.radix() == 10 => Ok(Some(format!("--{name}={}", number.as_str()))),
            DeValue::Float(number) => Ok(Some(format!("--{name}={}", number.as_str()))),
            _ => Err(refused(OptionsProblem::NoValue { name: name.clone() })),
        };
        let arguments: Result<Vec<Option<String>>, Error> = match value.get_ref() {
            DeValue::Array(values) if matches!(argument.get_action(), ArgAction::Append) => {
                values.iter().map(|value| one(value.get_ref())).collect()
            }
            value => one(value).map(|argument| vec![argument]),
        };
        entries.push(Entry { key: name.clone(), at: place, arguments: arguments?.into_iter().flatten().collect() });
    }
    Ok(entries)
}

/// Returns whether an option has a name, its own or one of other software.
fn is_named(argument: &clap::Arg, name: &str) -> bool {
    argument.get_long() == Some(name) || argument.get_all_aliases().is_some_and(|others| others.contains(&name))
}

/// Options whose names begin in the same way.
fn near(run: &Command, name: &str) -> Names {
    let start: String = name.chars().take(3).collect();
    let all = run.get_arguments().filter_map(|a| a.get_long());
    Names(all.filter(|long| long.starts_with(&start)).map(String::from).collect())
}

fn at(file: &Path, text: &str, place: usize, problem: OptionsProblem) -> Error {
    let before = &text.as_bytes()[..place.min(text.len())];
    let line = 1 + before.iter().filter(|&&b| b == b'\n').count();
    let column = 1 + before.iter().rev().take_while(|&&b| b != b'\n').count();
    Error::Options { file: file.to_path_buf(), line, column, problem: Box::new(problem) }
}

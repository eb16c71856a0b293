//! Parameters as options: a method takes the options of a command, by their names with `_` for `-`. They become a command
//! line that the command's own definition parses, so that no option has two meanings.

use crate::commands::serve::failure::Failure;
use crate::commands::vocabulary::{instead, with_names};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Args, Command};
use serde_json::{Map, Number, Value, json};

/// The definition of a method's parameters, with the names of other software.
pub fn definition<T: Args>(name: &'static str) -> Command {
    let command = T::augment_args(Command::new(name));
    with_names(command.no_binary_name(true).disable_help_flag(true).disable_version_flag(true))
}

/// Returns whether a command has an option of this name.
pub fn has(command: &Command, name: &str) -> bool {
    command.get_arguments().any(|arg| arg.get_long() == Some(name))
}

/// The command line of parameters. `null` and `false` leave an option out, `true` is a flag, a list gives an option
/// several times, or once with commas where it may be given once, and an object gives `NAME=VALUE` of each entry.
///
/// # Errors
/// If a parameter has no name or value that an option can have.
pub fn command_line(command: &Command, params: &Map<String, Value>) -> Result<Vec<String>, Failure> {
    let (mut options, mut places) = (Vec::new(), Vec::new());
    let positional: Vec<&Arg> = command.get_arguments().filter(|arg| arg.is_positional()).collect();
    for (key, value) in params {
        if key.is_empty() || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
            return Err(Failure::params(format!("'{key}' is no name of a parameter")));
        }
        let name = key.replace('_', "-");
        let of_place = |arg: &&Arg| arg.get_id() == key.as_str();
        let is_file = ["plan", "model", "file"].contains(&key.as_str()) && positional.len() == 1;
        if let Some(at) = positional.iter().position(of_place).or(is_file.then_some(0)) {
            match value {
                Value::Null => {}
                Value::String(text) => places.push((at, text.clone())),
                Value::Array(texts)
                    if matches!(positional[at].get_action(), ArgAction::Append)
                        && texts.iter().all(Value::is_string) =>
                {
                    places.extend(texts.iter().filter_map(Value::as_str).map(|text| (at, text.to_string())));
                }
                _ => return Err(Failure::params(format!("{key}: expected a string")).with("place", key.as_str())),
            }
            continue;
        }
        let refused = |problem: &str| Failure::params(format!("{key}: {problem}")).with("place", key.as_str());
        let text_of = |value: &Value| match value {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(text_of_number(number)),
            _ => Err(refused("expected strings or numbers in it")),
        };
        let repeats = command
            .get_arguments()
            .find(|arg| arg.get_long() == Some(&*name))
            .is_none_or(|arg| matches!(arg.get_action(), ArgAction::Append));
        match value {
            Value::Null | Value::Bool(false) => {}
            Value::Bool(true) => options.push(format!("--{name}")),
            Value::Array(values) => {
                let values = values.iter().map(text_of).collect::<Result<Vec<_>, _>>()?;
                match repeats {
                    true => options.extend(values.iter().map(|value| format!("--{name}={value}"))),
                    false => options.push(format!("--{name}={}", values.join(","))),
                }
            }
            Value::Object(entries) => {
                for (entry, value) in entries {
                    let value = match value {
                        Value::Null => "none".to_string(),
                        value => text_of(value)?,
                    };
                    options.push(format!("--{name}={entry}={value}"));
                }
            }
            value => options.push(format!("--{name}={}", text_of(value)?)),
        }
    }
    // Those of one place keep their order.
    places.sort_by_key(|place| place.0);
    // Behind `--` nothing is an option.
    options.push("--".into());
    options.extend(places.into_iter().map(|(_, text)| text));
    Ok(options)
}

/// A number as an option takes it. Some writers of JSON print whole numbers as `2.0`.
fn text_of_number(number: &Number) -> String {
    match number.as_f64() {
        Some(value) if number.is_f64() && value.fract() == 0.0 && value.abs() < 1e15 => format!("{value:.0}"),
        _ => number.to_string(),
    }
}

/// Parses a command line.
///
/// # Errors
/// If the command does not take it, in clap's words.
pub fn matches(command: &Command, line: &[String]) -> Result<ArgMatches, Failure> {
    command.clone().try_get_matches_from(line).map_err(|error| {
        let other = (error.kind() == ErrorKind::UnknownArgument).then(|| instead(&error)).flatten();
        let message = other.unwrap_or_else(|| words(&error));
        let option = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(option)) => option.clone(),
            Some(ContextValue::Strings(options)) => options.first().cloned().unwrap_or_default(),
            _ => return Failure::params(message),
        };
        let name = option.trim_start_matches(['-', '<']).split([' ', '=', '[']).next().unwrap_or("");
        Failure::params(message).with("place", name.trim_matches(['<', '>']).replace('-', "_").to_lowercase())
    })
}

/// The first paragraph of clap's message, on one line, and its tips, without those on quoting for a shell.
fn words(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.trim_start_matches("error: ").lines().take_while(|line| !line.starts_with("Usage:"));
    let is_of_shell = |line: &str| line.trim_start().starts_with("tip: to pass '");
    let said =
        lines.filter(|line| !line.trim().is_empty() && !line.starts_with("For more information") && !is_of_shell(line));
    said.map(str::trim).collect::<Vec<_>>().join("; ").replace(":; ", ": ")
}

/// The JSON schema of a method's parameters.
pub fn schema(command: &Command, without: &[&str]) -> Value {
    let shown = |arg: &&Arg| !arg.is_hide_set() && !without.contains(&arg.get_id().as_str());
    let mut properties = Map::new();
    let mut required = Vec::new();
    for arg in command.get_arguments().filter(shown) {
        let name = arg.get_long().unwrap_or(arg.get_id().as_str()).replace('-', "_");
        let mut property = schema_of(arg);
        if let Some(help) = arg.get_help() {
            property["description"] = json!(help.to_string());
        }
        if arg.is_required_set() {
            required.push(name.clone());
        }
        properties.insert(name, property);
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn schema_of(arg: &Arg) -> Value {
    let values = arg.get_possible_values();
    let names: Vec<&str> = values.iter().filter(|value| !value.is_hide_set()).map(|value| value.get_name()).collect();
    let counts = arg.get_value_names().is_some_and(|names| names.len() == 1 && names[0] == "N");
    match arg.get_action() {
        ArgAction::SetTrue => json!({"type": "boolean"}),
        ArgAction::Append => json!({"type": ["array", "string", "object"], "items": {"type": ["string", "number"]}}),
        _ if !names.is_empty() => json!({"type": "string", "enum": names}),
        _ if arg.is_positional() => json!({"type": "string"}),
        _ if counts => json!({"type": "integer", "minimum": 0}),
        _ => json!({"type": ["string", "number"]}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::plan::Plan;
    use crate::commands::why::Why;
    use clap::FromArgMatches;

    fn line(params: Value) -> Result<Vec<String>, String> {
        let Value::Object(params) = params else { panic!("an object") };
        command_line(&definition::<Plan>("plan"), &params).map_err(|failure| failure.json()["message"].to_string())
    }

    #[test]
    fn parameters_are_the_command_line_of_the_same_names() {
        let params = json!({
            "model": "m.json", "tp": 8, "global_batch": 64, "as_written": true, "ignore_shardings": false, "loss": null,
            "size": {"batch": 8}, "batch_dim": {"x": 1, "y": null}, "freeze": ["a", "b*"], "clip_norm": 1.5,
            "pp": 2.0, "cluster": ["dgx-a100", 2],
        });
        let mut got = line(params).expect("known parameters");
        assert_eq!(got.split_off(got.len() - 2), ["--", "m.json"]);
        got.sort();
        let mut expected = [
            "--as-written",
            "--batch-dim=x=1",
            "--batch-dim=y=none",
            "--clip-norm=1.5",
            "--cluster=dgx-a100,2",
            "--freeze=a",
            "--freeze=b*",
            "--global-batch=64",
            "--pp=2",
            "--size=batch=8",
            "--tp=8",
        ];
        expected.sort_unstable();
        assert_eq!(got, expected);
    }

    #[test]
    fn values_cannot_become_options() {
        let got = line(json!({"model": "--cluster=x"})).expect("a name");
        assert_eq!(got, ["--", "--cluster=x"]);
        let command = definition::<Plan>("plan");
        let matches = matches(&command, &got).expect("a model of that name");
        let plan = Plan::from_arg_matches(&matches).expect("a plan");
        assert_eq!(plan.model.to_str(), Some("--cluster=x"));
        assert!(line(json!({"tp=2 --pp": 1})).is_err());
        assert!(line(json!({"tp": {"a": []}})).is_err());
        assert!(line(json!({"model": 3})).is_err());
    }

    #[test]
    fn refusals_name_the_parameter() {
        let command = definition::<Plan>("plan");
        for (params, place) in [
            (json!({"model": "m", "tp": "many"}), "tp"),
            (json!({"model": "m", "global_batches": 4}), "global_batches"),
            (json!({"model": "m", "sequence_parallel": true}), "sequence_parallel"),
            (json!({"model": "m", "precision": "f8"}), "precision"),
            (json!({"tp": 2}), "model"),
        ] {
            let Value::Object(params) = params else { panic!("an object") };
            let line = command_line(&command, &params).expect("names and values");
            let failure = matches(&command, &line).expect_err("no such parameter");
            assert_eq!(failure.data()["place"], place, "{}", failure.data()["error"]);
            assert!(!failure.data()["error"].to_string().contains("use '--"), "{}", failure.data()["error"]);
        }
        let command = definition::<Why>("why");
        let line = command_line(&command, &Map::from_iter([("plan".into(), json!("p"))])).expect("a plan");
        assert_eq!(matches(&command, &line).expect_err("a subject is missing").data()["place"], "param");
    }

    #[test]
    fn schemas_have_types_and_words() {
        let schema = schema(&definition::<Plan>("plan"), &["frontier"]);
        assert_eq!(schema["required"], json!(["model"]));
        assert_eq!(schema["properties"]["tp"]["type"], "integer");
        assert_eq!(schema["properties"]["recompute"]["enum"], json!(["none", "selective", "full"]));
        assert_eq!(schema["properties"]["frontier"], Value::Null);
        let all = schema["properties"].as_object().expect("an object");
        assert!(all.values().all(|property| property["description"].is_string()));
    }
}

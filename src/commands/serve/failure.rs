//! Failures as answers: the codes of JSON-RPC, and the fields that `--json` prints where a command fails.

use altiplano::Error;
use altiplano::suggestions::{Explained, failure_json};
use serde_json::{Map, Value, json};
use std::path::Path;

const PARSE_ERROR: i64 = -32700;
const INVALID_REQUEST: i64 = -32600;
const METHOD_NOT_FOUND: i64 = -32601;
const INVALID_PARAMS: i64 = -32602;
const INTERNAL_ERROR: i64 = -32603;
/// Codes that JSON-RPC leaves to servers: unusable options or input, work that failed, and too many calls.
const UNUSABLE: i64 = -32001;
const FAILED: i64 = -32002;
const BUSY: i64 = -32003;

/// An answer that says why there is no result.
#[derive(Debug)]
pub struct Failure {
    code: i64,
    kind: &'static str,
    message: String,
    /// Further fields of `data`.
    fields: Map<String, Value>,
}

impl Failure {
    fn new(code: i64, kind: &'static str, message: impl Into<String>) -> Failure {
        Failure { code, kind, message: message.into(), fields: Map::new() }
    }

    pub fn not_json(error: &serde_json::Error) -> Failure {
        Failure::new(PARSE_ERROR, "protocol", format!("the line is not JSON: {error}"))
    }

    pub fn line_too_long() -> Failure {
        let most = super::lines::MOST_BYTES;
        Failure::new(PARSE_ERROR, "protocol", format!("the line is longer than {most} bytes; it was skipped"))
    }

    pub fn invalid(problem: &str) -> Failure {
        Failure::new(INVALID_REQUEST, "protocol", problem)
    }

    pub fn no_method(name: &str) -> Failure {
        let message = format!("there is no method '{name}'; `methods` lists all");
        Failure::new(METHOD_NOT_FOUND, "protocol", message)
    }

    /// Parameters that a method does not take so.
    pub fn params(message: impl Into<String>) -> Failure {
        Failure::new(INVALID_PARAMS, "option", message)
    }

    pub fn busy(most: usize) -> Failure {
        Failure::new(BUSY, "busy", format!("{most} calls run already; wait for one, or cancel it"))
    }

    pub fn internal() -> Failure {
        Failure::new(INTERNAL_ERROR, "internal", "a defect of Altiplano; stderr has its place")
    }

    /// The failure of a search, with its explanation.
    pub fn explained(error: &Error, explained: Option<&Explained>) -> Failure {
        let mut failure = Failure::from_error(error);
        if let Ok(Value::Object(fields)) = serde_json::from_str(&failure_json(error, explained)) {
            failure.fields.extend(fields);
        }
        failure
    }

    pub fn from_error(error: &Error) -> Failure {
        let code = if error.is_usage() { UNUSABLE } else { FAILED };
        Failure::new(code, error.kind(), error.to_string())
    }

    /// Adds a field to `data`.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Failure {
        self.fields.insert(name.to_string(), value.into());
        self
    }

    /// True if the message itself is at fault, not what it asks for.
    pub fn is_of_protocol(&self) -> bool {
        self.kind == "protocol"
    }

    /// The fields of `data`: `kind`, `error`, `place`, `exit_code`, and those of the failure's explanation.
    pub fn data(&self) -> Value {
        let exit_code = if self.code == FAILED { 1 } else { 2 };
        let mut data = Map::new();
        data.insert("kind".into(), json!(self.kind));
        data.insert("error".into(), json!(self.message));
        data.insert("place".into(), json!(place(&self.message)));
        data.insert("exit_code".into(), json!(exit_code));
        data.extend(self.fields.clone());
        Value::Object(data)
    }

    pub fn json(&self) -> Value {
        json!({"code": self.code, "message": self.message, "data": self.data()})
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::from_error(&error)
    }
}

/// The place that a message starts with: an option (`--tp`), or a file with line and column where it has them.
fn place(message: &str) -> Option<&str> {
    let (before, _) = message.split_once(": ")?;
    if before.starts_with("--") {
        return before.split_whitespace().next();
    }
    // The message follows a file's line and column directly, or a file's name.
    // A cluster's count of nodes looks like a line.
    if before.starts_with("cluster ") {
        return None;
    }
    let is_name = !before.contains(char::is_whitespace) && before.contains(['.', '/']);
    let is_place =
        before.rsplit(':').next().is_some_and(|last| !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit()));
    (is_place || is_name || Path::new(before).is_file()).then_some(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_their_place_first() {
        assert_eq!(place("--dp: the cluster's 8 devices are no multiple of it"), Some("--dp"));
        assert_eq!(place("--tape 9: the plan has the ranks 0 to 3"), Some("--tape"));
        assert_eq!(place("m.mlir:3:5: unknown op"), Some("m.mlir:3:5"));
        assert_eq!(
            place(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml: is no model")),
            Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        );
        assert_eq!(place("none.mlir: No such file"), Some("none.mlir"));
        assert_eq!(place("cluster none:3: there is no such preset"), None);
        assert_eq!(place("no plan fits in memory: the best needs more"), None);
    }
}

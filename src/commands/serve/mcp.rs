//! The Model Context Protocol over the same lines: agents see the methods as tools.

use crate::commands::serve::failure::Failure;
use serde_json::{Map, Value, json};

/// Versions of the protocol in which tools are called alike. The last is offered to clients of other versions.
const VERSIONS: [&str; 3] = ["2024-11-05", "2025-03-26", "2025-06-18"];

const INSTRUCTIONS: &str = "Plans how the training of a model is split over devices. `load_model` reads a model once and returns a handle; `plan` searches for the fastest split, `judge` predicts degrees that you give in milliseconds, `why`, `why_not` and `advise` explain a plan.";

/// The answer to the first message of a client.
pub fn initialize(params: &Map<String, Value>) -> Value {
    let asked = params.get("protocolVersion").and_then(Value::as_str);
    let version = asked.filter(|asked| VERSIONS.contains(asked)).unwrap_or(VERSIONS[VERSIONS.len() - 1]);
    json!({
        "protocolVersion": version,
        "capabilities": {"tools": {"listChanged": false}},
        "serverInfo": {"name": "altiplano", "version": env!("CARGO_PKG_VERSION")},
        "instructions": INSTRUCTIONS,
    })
}

/// The token by which a client wants to hear of progress.
pub fn progress_token(params: &Map<String, Value>) -> Option<Value> {
    params.get("_meta")?.get("progressToken").cloned()
}

/// Calls a tool. A method that fails is a result too, which the agent reads; an unknown tool is an error of the
/// protocol.
pub fn call(
    params: &Map<String, Value>,
    answer: impl FnOnce(&str, &Map<String, Value>) -> Result<Value, Failure>,
) -> Result<Value, Failure> {
    let Some(name) = params.get("name").and_then(Value::as_str) else {
        return Err(Failure::params("name: expected the name of a tool"));
    };
    let arguments = match params.get("arguments") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(_) => return Err(Failure::params("arguments: expected an object")),
    };
    let (content, is_error) = match answer(name, &arguments) {
        Ok(result) => (result, false),
        Err(failure) if failure.is_of_protocol() => return Err(failure),
        Err(failure) => (failure.data(), true),
    };
    Ok(json!({
        "content": [{"type": "text", "text": text(&content)}],
        "structuredContent": content,
        "isError": is_error,
    }))
}

/// The text of a result: its own, if it has no other part, else its JSON.
fn text(content: &Value) -> String {
    match content.as_object() {
        Some(fields) if fields.len() == 1 => match fields.get("text") {
            Some(Value::String(text)) => text.clone(),
            _ => content.to_string(),
        },
        _ => content.to_string(),
    }
}

//! Checks documents against the schemas in `docs/`, for the keywords that these use. An unknown keyword is an error, so
//! that a schema cannot require more than is checked.

use serde_json::Value;

/// Every violation of `schema` by `value`, each with a path.
pub(crate) fn violations(schema: &Value, root: &Value, value: &Value, path: &str) -> Vec<String> {
    let Some(keywords) = schema.as_object() else {
        return if schema == &Value::Bool(false) { vec![format!("{path} is not allowed")] } else { Vec::new() };
    };
    let mut found = Vec::new();
    for (keyword, rule) in keywords {
        let mut fail = |holds: bool| {
            if !holds {
                found.push(format!("{path}: {keyword} {rule}"));
            }
        };
        match keyword.as_str() {
            "$schema" | "$id" | "$defs" | "title" | "description" | "examples" | "then" | "else" => {}
            "$ref" => {
                let target = rule.as_str().and_then(|r| root.pointer(r.trim_start_matches('#')));
                match target {
                    Some(target) => found.extend(violations(target, root, value, path)),
                    None => fail(false),
                }
            }
            "type" => fail(is_of_type(value, rule)),
            "const" => fail(value == rule),
            "enum" => fail(rule.as_array().is_some_and(|all| all.contains(value))),
            "minimum" => fail(value.as_f64().zip(rule.as_f64()).is_none_or(|(v, least)| v >= least)),
            "maximum" => fail(value.as_f64().zip(rule.as_f64()).is_none_or(|(v, most)| v <= most)),
            "minItems" => fail(value.as_array().zip(rule.as_u64()).is_none_or(|(v, n)| v.len() as u64 >= n)),
            "maxItems" => fail(value.as_array().zip(rule.as_u64()).is_none_or(|(v, n)| v.len() as u64 <= n)),
            "required" => {
                let has = |key: &Value| key.as_str().is_some_and(|k| value.get(k).is_some());
                fail(!value.is_object() || rule.as_array().is_some_and(|keys| keys.iter().all(has)));
            }
            "properties" => {
                for (key, rule) in rule.as_object().into_iter().flatten() {
                    if let Some(inner) = value.get(key) {
                        found.extend(violations(rule, root, inner, &format!("{path}.{key}")));
                    }
                }
            }
            "additionalProperties" => {
                for (key, inner) in value.as_object().into_iter().flatten() {
                    match schema["properties"].get(key) {
                        Some(_) => {}
                        None if rule == &Value::Bool(false) => found.push(format!("{path}: unknown key '{key}'")),
                        None => found.extend(violations(rule, root, inner, &format!("{path}.{key}"))),
                    }
                }
            }
            "items" => {
                let first = schema["prefixItems"].as_array().map_or(0, Vec::len);
                for (i, item) in value.as_array().into_iter().flatten().enumerate().skip(first) {
                    found.extend(violations(rule, root, item, &format!("{path}[{i}]")));
                }
            }
            "prefixItems" => {
                for (i, (rule, item)) in rule.as_array().into_iter().flatten().zip(list(value)).enumerate() {
                    found.extend(violations(rule, root, item, &format!("{path}[{i}]")));
                }
            }
            "allOf" => {
                for rule in rule.as_array().into_iter().flatten() {
                    found.extend(violations(rule, root, value, path));
                }
            }
            "oneOf" => {
                let holds = |rule: &&Value| violations(rule, root, value, path).is_empty();
                fail(rule.as_array().into_iter().flatten().filter(holds).count() == 1);
            }
            "if" => {
                let branch = if violations(rule, root, value, path).is_empty() { "then" } else { "else" };
                if let Some(rule) = schema.get(branch) {
                    found.extend(violations(rule, root, value, path));
                }
            }
            other => panic!("the schema uses the keyword {other}, which this check does not know"),
        }
    }
    found
}

/// Returns true if a value has the type that a schema names.
fn is_of_type(value: &Value, name: &Value) -> bool {
    match name.as_str() {
        Some("null") => value.is_null(),
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("boolean") => value.is_boolean(),
        Some("string") => value.is_string(),
        Some("number") => value.is_number(),
        Some("integer") => value.is_i64() || value.is_u64(),
        _ => panic!("unknown type {name}"),
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

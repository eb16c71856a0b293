//! Answers that are kept. Models and plans with handles never change, so an equal question about one has the same answer.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The last answers, up to a total weight. The older half goes at once.
pub struct Answers<T> {
    most: usize,
    kept: Mutex<Kept<T>>,
}

struct Kept<T> {
    new: BTreeMap<String, T>,
    old: BTreeMap<String, T>,
    /// Weight of `new`.
    weight: usize,
}

impl<T: Clone> Answers<T> {
    /// Keeps answers of twice the weight `half` at most.
    pub fn new(half: usize) -> Answers<T> {
        let kept = Kept { new: BTreeMap::new(), old: BTreeMap::new(), weight: 0 };
        Answers { most: half, kept: Mutex::new(kept) }
    }

    /// The answer that is known to a question.
    pub fn get(&self, question: &str) -> Option<T> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.new.get(question).or_else(|| kept.old.get(question)).cloned()
    }

    /// Keeps an answer, if it is not too heavy to leave room for others.
    pub fn keep(&self, question: String, answer: T, weight: usize) {
        let weight = weight + question.len();
        if weight > self.most / 4 {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.weight + weight > self.most {
            kept.old = std::mem::take(&mut kept.new);
            kept.weight = 0;
        }
        if kept.new.insert(question, answer).is_none() {
            kept.weight += weight;
        }
    }
}

/// The text of a question whose answer may be kept: it is about a handle, reads no other file and writes none. `line` is
/// the question as a command line, and `switches` are what it has beside it.
pub fn question(method: &str, line: &[String], switches: [bool; 2]) -> Option<String> {
    let (options, places) = line.split_at(line.iter().position(|word| word == "--")?);
    let is_handle = |place: &String| {
        let number = place.strip_prefix("model:").or(place.strip_prefix("plan:"));
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    };
    let writes = |option: &String| ["--output", "--html", "--trace"].iter().any(|name| option.starts_with(name));
    let is_file = |option: &String| option.split('=').skip(1).any(|value| Path::new(value).exists());
    let answers_alike = places[1..].iter().all(is_handle) && !options.iter().any(|o| writes(o) || is_file(o));
    answers_alike.then(|| format!("{method}\0{switches:?}\0{}", line.join("\0")))
}

/// About how many bytes an answer has in memory.
pub fn weight(answer: &Value) -> usize {
    // A map's entry has a key, a value, and its part of a node.
    const EACH: usize = 64;
    EACH + match answer {
        Value::String(text) => text.len(),
        Value::Array(parts) => parts.iter().map(weight).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + weight(value)).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_answers_go_first() {
        let answers: Answers<usize> = Answers::new(64);
        let ask = |n: usize| answers.get(&n.to_string());
        for n in 0..8 {
            answers.keep(n.to_string(), n, 9);
        }
        // Six of them are half.
        assert_eq!((0..8).filter_map(ask).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7]);
        for n in 8..13 {
            answers.keep(n.to_string(), n, 8);
        }
        assert_eq!((0..13).filter_map(ask).collect::<Vec<_>>(), [6, 7, 8, 9, 10, 11, 12]);
        answers.keep("heavy".into(), 1, 20);
        assert_eq!(answers.get("heavy"), None);
    }

    #[test]
    fn only_questions_about_handles_are_kept() {
        let line = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let key = |words: &[&str]| question("judge", &line(words), [false, true]);
        assert!(key(&["--tp=8", "--", "model:3"]).is_some());
        assert_ne!(key(&["--tp=8", "--", "model:3"]), key(&["--tp=8", "--", "model:4"]));
        assert_ne!(key(&["--tp=8", "--", "model:3"]), key(&["--", "model:3"]));
        assert_eq!(key(&["--tp=8", "--", "model.json"]), None);
        assert_eq!(key(&["--output=new.json", "--", "plan:3"]), None);
        assert_eq!(key(&[concat!("--cluster=", env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "--", "model:3"]), None);
    }

    #[test]
    fn weights_grow_with_answers() {
        let [one, two] = [serde_json::json!({"a": "b"}), serde_json::json!({"a": "b", "c": [1, 2]})];
        assert!(weight(&two) > weight(&one) + 64);
    }
}

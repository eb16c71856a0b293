//! The fields of a config, with errors that name them.

use super::error::ConfigError;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;

/// The largest size that a config or an option may state, so that a product of two fits 64 bits.
pub(crate) const MAX_SIZE: u64 = 1 << 31;

/// The longest sequence.
pub(crate) const MAX_SEQUENCE: u64 = 1 << 24;

/// The largest number of layers. A file with more is wrong rather than large.
const MAX_LAYERS: u64 = 4096;

/// An object of the config. A null field counts as missing.
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// The path of the object, with a dot at the end. Empty for the config itself.
    path: String,
    /// The aliases of fields, as pairs of a name and its alias.
    aliases: &'static [(&'static str, &'static str)],
    /// The fields that were read, with their paths.
    asked: Rc<RefCell<BTreeSet<String>>>,
    /// The sizes that the config does not state, with their defaults.
    assumed: Rc<RefCell<Vec<(String, u64)>>>,
}

/// Fields that do not affect the graph of a training step. They concern the origin of a file, special ids of the
/// tokenizer, weight initialisation, text generation, further outputs of a call, and caches.
const ASIDE: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "directionality",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "eos_token_id",
    "experts_implementation",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "mask_token_id",
    "max_length",
    "max_new_tokens",
    "min_length",
    "model_type",
    "n_ctx",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
];

/// Prefixes of fields about model parts that the models here do not have.
const ASIDE_PREFIXES: &[&str] = &["pooler_", "summary_"];

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>, aliases: &'static [(&'static str, &'static str)]) -> Self {
        Fields { map, path: String::new(), aliases, asked: Rc::default(), assumed: Rc::default() }
    }

    /// The fields of the part of the config at `path`.
    pub(crate) fn of_part(map: &'a Map<String, Value>, path: &str) -> Self {
        Fields { path: format!("{path}."), ..Fields::new(map, &[]) }
    }

    /// The same fields with these aliases.
    pub(crate) fn with_aliases(self, aliases: &'static [(&'static str, &'static str)]) -> Self {
        Fields { aliases, ..self }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(self.field(key));
        if let Some(value) = self.map.get(key) {
            return Some(value).filter(|v| !v.is_null());
        }
        let others = self.aliases.iter().filter(|(name, _)| *name == key);
        others.map(|(_, other)| *other).find_map(|other| {
            let value = self.map.get(other).filter(|v| !v.is_null())?;
            self.asked.borrow_mut().insert(self.field(other));
            Some(value)
        })
    }

    /// Returns true if the field is present and null, which some defaults distinguish from a missing one.
    pub(crate) fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// Returns true if the field is a word where a number may be, such as `auto`.
    pub(crate) fn is_word(&self, key: &str) -> bool {
        self.get(key).is_some_and(Value::is_string)
    }

    /// The sizes that the config does not state, in reading order.
    pub(crate) fn assumed(&self) -> Vec<(String, u64)> {
        self.assumed.borrow().clone()
    }

    /// Marks fields as read that follow from others, or that concern variants of a family that are not built.
    pub(crate) fn ignore(&self, keys: &[&str]) {
        self.asked.borrow_mut().extend(keys.iter().map(|key| self.field(key)));
    }

    /// The fields that nothing read and that may affect the model. Fields that are off, empty or known to be irrelevant
    /// are excluded.
    pub(crate) fn unread(&self) -> Vec<String> {
        let asked = self.asked.borrow();
        let says = |value: &Value| match value {
            Value::Null => false,
            Value::Bool(b) => *b,
            Value::Number(n) => n.as_f64() != Some(0.0),
            Value::String(text) => !text.is_empty(),
            Value::Array(all) => !all.is_empty(),
            Value::Object(map) => !map.is_empty(),
        };
        let aside = |key: &str| ASIDE.contains(&key) || ASIDE_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
        let unread = |(key, value): &(&String, &Value)| says(value) && !aside(key) && !asked.contains(&self.field(key));
        self.map.iter().filter(unread).map(|(key, _)| self.field(key)).collect()
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    fn field(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| ConfigError::Missing { field: self.field(key) })
    }

    /// The error for a field with an unexpected value.
    pub(crate) fn expected(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        let found = self.get(key).map_or("nothing".to_string(), short);
        ConfigError::Expected { field: self.field(key), expected: expected.into(), found }
    }

    /// The error for a word that is not supported.
    pub(crate) fn unsupported(&self, key: &str, supported: &[&'static str]) -> ConfigError {
        let found = self.get(key).map_or("nothing".to_string(), short);
        ConfigError::Unsupported { field: self.field(key), found, supported: supported.to_vec() }
    }

    fn whole(&self, key: &str, least: u64, most: u64) -> Result<Option<u64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().filter(|n| (least..=most).contains(n));
        let number = number.ok_or_else(|| self.expected(key, format!("a whole number from {least} to {most}")))?;
        Ok(Some(number))
    }

    /// A positive size.
    pub(crate) fn size(&self, key: &str) -> Result<u64, ConfigError> {
        let size = self.whole(key, 1, MAX_SIZE)?;
        self.required(key, size)
    }

    pub(crate) fn size_or(&self, key: &str, default: u64) -> Result<u64, ConfigError> {
        Ok(self.whole(key, 1, MAX_SIZE)?.unwrap_or(default))
    }

    /// An optional size.
    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        self.whole(key, 1, MAX_SIZE)
    }

    /// A number that may be zero.
    pub(crate) fn count_or(&self, key: &str, default: u64) -> Result<u64, ConfigError> {
        Ok(self.whole(key, 0, MAX_SIZE)?.unwrap_or(default))
    }

    /// A main size of the model. If the config does not state it, the default is used and recorded.
    pub(crate) fn main_size(&self, key: &str, default: u64) -> Result<u64, ConfigError> {
        self.main(key, default, MAX_SIZE)
    }

    pub(crate) fn main_layers(&self, key: &str, default: u64) -> Result<u64, ConfigError> {
        self.main(key, default, MAX_LAYERS)
    }

    fn main(&self, key: &str, default: u64, most: u64) -> Result<u64, ConfigError> {
        Ok(self.whole(key, 1, most)?.unwrap_or_else(|| {
            self.assumed.borrow_mut().push((self.field(key), default));
            default
        }))
    }

    pub(crate) fn layers_or(&self, key: &str, default: u64) -> Result<u64, ConfigError> {
        Ok(self.whole(key, 1, MAX_LAYERS)?.unwrap_or(default))
    }

    /// Returns an error unless `value`, which `key` states, is a multiple of the number that `by` states.
    pub(crate) fn divides(&self, key: &str, value: u64, by: &'static str, of: u64) -> Result<(), ConfigError> {
        match value.is_multiple_of(of) {
            true => Ok(()),
            false => Err(ConfigError::Indivisible { field: self.field(key), value, by, of }),
        }
    }

    /// Returns an error if `value`, which `key` states, is more than the number that `by` states.
    pub(crate) fn at_most(&self, key: &str, value: u64, by: &'static str, of: u64) -> Result<(), ConfigError> {
        match value <= of {
            true => Ok(()),
            false => Err(ConfigError::MoreThan { field: self.field(key), value, by, of }),
        }
    }

    /// A number above zero.
    pub(crate) fn positive(&self, key: &str) -> Result<f64, ConfigError> {
        self.required(key, self.get(key))?;
        self.positive_or(key, 1.0)
    }

    pub(crate) fn positive_or(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.as_f64().filter(|n| *n > 0.0 && n.is_finite());
        number.ok_or_else(|| self.expected(key, "a number above 0"))
    }

    /// Any finite number.
    pub(crate) fn number_or(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().filter(|n| n.is_finite()).ok_or_else(|| self.expected(key, "a number"))
    }

    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.expected(key, "true or false"))
    }

    pub(crate) fn word(&self, key: &str) -> Result<String, ConfigError> {
        self.required(key, self.get(key))?;
        self.word_or(key, "")
    }

    pub(crate) fn word_or(&self, key: &str, default: &str) -> Result<String, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default.to_string()) };
        value.as_str().map(str::to_string).ok_or_else(|| self.expected(key, "a word"))
    }

    /// A list of words.
    pub(crate) fn words(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let words = value.as_array().and_then(|all| all.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        words.map(Some).ok_or_else(|| self.expected(key, "a list of words"))
    }

    /// A list of numbers.
    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers = value.as_array().and_then(|all| all.iter().map(Value::as_f64).collect::<Option<Vec<_>>>());
        numbers.map(Some).ok_or_else(|| self.expected(key, "a list of numbers"))
    }

    /// A word for each of the layers, or `default` if the config does not list any.
    pub(crate) fn of_layers(
        &self,
        key: &str,
        layers: u64,
        default: impl Fn(u64) -> &'static str,
    ) -> Result<Vec<&'a str>, ConfigError> {
        match self.words(key)? {
            None => Ok((0..layers).map(default).collect()),
            Some(words) if words.len() as u64 == layers => Ok(words),
            Some(words) => Err(self.expected_found(key, format!("a word for each of {layers} layers"), words.len())),
        }
    }

    fn expected_found(&self, key: &str, expected: String, found: usize) -> ConfigError {
        ConfigError::Expected { field: self.field(key), expected, found: found.to_string() }
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.expected(key, "an object"))?;
        let path = format!("{}{key}.", self.path);
        Ok(Some(Fields { map, path, aliases: self.aliases, asked: self.asked.clone(), assumed: self.assumed.clone() }))
    }

    /// The number of entries of an object.
    pub(crate) fn entries(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        Ok(self.object(key)?.map(|object| object.map.len() as u64))
    }
}

/// A config's fields, and the first one that occurs twice. A duplicate is an error, because it is ambiguous.
pub(crate) struct Keys {
    pub map: Map<String, Value>,
    pub twice: Option<String>,
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Keys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Keys, A::Error> {
                let mut keys = Keys { map: Map::new(), twice: None };
                while let Some((key, value)) = from.next_entry::<String, Value>()? {
                    if keys.map.insert(key.clone(), value).is_some() {
                        keys.twice.get_or_insert(key);
                    }
                }
                Ok(keys)
            }
        }
        from.deserialize_map(Fields)
    }
}

/// A value as JSON, truncated if long.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

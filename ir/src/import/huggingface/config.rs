//! Fields of a config, read with errors that name them.

use super::error::ConfigError;
use serde_json::{Map, Value};

/// The largest size that a config or an option may state, so that the product of two fits 64 bits.
pub const MAX_SIZE: u64 = 1 << 31;

/// The longest sequence.
pub const MAX_SEQUENCE: u64 = 1 << 24;

/// The most layers: beyond that a file is wrong, not large.
pub const MAX_LAYERS: u64 = 4096;

/// An object of the config. A field that is null is as one that is missing.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// What leads to the object, with a dot at the end; empty for the config itself.
    path: String,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Fields { map, path: String::new() }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    fn field(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| ConfigError::Missing { field: self.field(key) })
    }

    fn expected(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        let found = self.get(key).map_or("nothing".to_string(), short);
        ConfigError::Expected { field: self.field(key), expected: expected.into(), found }
    }

    /// A word that is none of those supported.
    pub fn unsupported(&self, key: &str, supported: &[&'static str]) -> ConfigError {
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
    pub fn size(&self, key: &str) -> Result<u64, ConfigError> {
        let size = self.whole(key, 1, MAX_SIZE)?;
        self.required(key, size)
    }

    pub fn size_or(&self, key: &str, default: u64) -> Result<u64, ConfigError> {
        Ok(self.whole(key, 1, MAX_SIZE)?.unwrap_or(default))
    }

    /// A size of which there may be none.
    pub fn optional_size(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        self.whole(key, 1, MAX_SIZE)
    }

    /// A number that may be zero.
    pub fn count_or(&self, key: &str, default: u64) -> Result<u64, ConfigError> {
        Ok(self.whole(key, 0, MAX_SIZE)?.unwrap_or(default))
    }

    pub fn layers(&self, key: &str) -> Result<u64, ConfigError> {
        let layers = self.whole(key, 1, MAX_LAYERS)?;
        self.required(key, layers)
    }

    pub fn layers_or(&self, key: &str, default: u64) -> Result<u64, ConfigError> {
        Ok(self.whole(key, 1, MAX_LAYERS)?.unwrap_or(default))
    }

    /// `size / parts` where that is whole.
    pub fn part(&self, key: &str, parts_key: &'static str) -> Result<u64, ConfigError> {
        let (value, of) = (self.size(key)?, self.size(parts_key)?);
        self.divides(key, value, parts_key, of)?;
        Ok(value / of)
    }

    /// An error unless `value`, which `key` states, is a multiple of what `by` states.
    pub fn divides(&self, key: &str, value: u64, by: &'static str, of: u64) -> Result<(), ConfigError> {
        match value.is_multiple_of(of) {
            true => Ok(()),
            false => Err(ConfigError::Indivisible { field: self.field(key), value, by, of }),
        }
    }

    /// An error where `value`, which `key` states, is more than what `by` states.
    pub fn at_most(&self, key: &str, value: u64, by: &'static str, of: u64) -> Result<(), ConfigError> {
        match value <= of {
            true => Ok(()),
            false => Err(ConfigError::MoreThan { field: self.field(key), value, by, of }),
        }
    }

    /// A number above zero.
    pub fn positive(&self, key: &str) -> Result<f64, ConfigError> {
        self.required(key, self.get(key))?;
        self.positive_or(key, 1.0)
    }

    pub fn positive_or(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.as_f64().filter(|n| *n > 0.0 && n.is_finite());
        number.ok_or_else(|| self.expected(key, "a number above 0"))
    }

    /// A number that may be zero or less.
    pub fn number_or(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().filter(|n| n.is_finite()).ok_or_else(|| self.expected(key, "a number"))
    }

    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.expected(key, "true or false"))
    }

    pub fn word(&self, key: &str) -> Result<String, ConfigError> {
        self.required(key, self.get(key))?;
        self.word_or(key, "")
    }

    pub fn word_or(&self, key: &str, default: &str) -> Result<String, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default.to_string()) };
        value.as_str().map(str::to_string).ok_or_else(|| self.expected(key, "a word"))
    }

    /// A list of words.
    pub fn words(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let words = value.as_array().and_then(|all| all.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        words.map(Some).ok_or_else(|| self.expected(key, "a list of words"))
    }

    pub fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.expected(key, "an object"))?;
        Ok(Some(Fields { map, path: format!("{}{key}.", self.path) }))
    }

    /// How many entries an object has.
    pub fn entries(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        Ok(self.object(key)?.map(|object| object.map.len() as u64))
    }
}

/// A value as it is written, cut where it is long.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

//! The values that a layer's backward pass recomputes instead of keeping them from the forward pass.
//!
//! A stage chooses this for each of its layers, since recomputing part of them usually frees enough memory. In files it
//! is one word if all layers are alike, and otherwise a list of words.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The extent of recomputation in a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Only values that cost almost nothing: elementwise results and broadcasts.
    #[default]
    None,
    /// Also products that are larger than their factors, such as attention scores. They take much memory for little
    /// work (Korthikanti et al. 2022, section 5).
    Selective,
    /// Everything that does not leave the layer (Chen et al. 2016).
    Full,
}

impl Recompute {
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        })
    }
}

/// The recomputation in each layer of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Form", untagged)]
pub enum Recomputation {
    Alike(Recompute),
    /// One entry per layer, from the stage's first on. They are not all the same.
    ByLayer(Vec<Recompute>),
}

/// The form in plan files.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected none, selective, full, or a list of one of them for each layer")]
enum Form {
    Alike(Recompute),
    ByLayer(Vec<Recompute>),
    /// The boolean form of older files.
    Whole(bool),
}

impl From<Form> for Recomputation {
    fn from(form: Form) -> Recomputation {
        match form {
            Form::Alike(level) => Recomputation::Alike(level),
            Form::ByLayer(levels) => levels.into(),
            Form::Whole(whole) => Recomputation::Alike(if whole { Recompute::Full } else { Recompute::None }),
        }
    }
}

impl From<Vec<Recompute>> for Recomputation {
    fn from(levels: Vec<Recompute>) -> Recomputation {
        match levels.as_slice() {
            [first, rest @ ..] if rest.iter().all(|l| l == first) => Recomputation::Alike(*first),
            _ => Recomputation::ByLayer(levels),
        }
    }
}

impl Default for Recomputation {
    fn default() -> Recomputation {
        Recomputation::Alike(Recompute::None)
    }
}

impl Recomputation {
    /// The recomputation in the stage's layer `index`, counted from its first.
    pub fn of(&self, index: usize) -> Recompute {
        match self {
            Recomputation::Alike(level) => *level,
            Recomputation::ByLayer(levels) => levels.get(index).copied().unwrap_or_default(),
        }
    }

    /// The same for a stage of `layers` layers, except that the last of them keeps everything.
    pub fn keeping_last(&self, layers: usize) -> Recomputation {
        let level = |i: usize| if i + 1 == layers { Recompute::None } else { self.of(i) };
        (0..layers).map(level).collect::<Vec<_>>().into()
    }

    /// The largest extent of recomputation in any layer.
    pub fn most(&self) -> Recompute {
        match self {
            Recomputation::Alike(level) => *level,
            Recomputation::ByLayer(levels) => levels.iter().copied().max().unwrap_or_default(),
        }
    }

    /// The smallest extent of recomputation in any layer.
    pub fn least(&self) -> Recompute {
        match self {
            Recomputation::Alike(level) => *level,
            Recomputation::ByLayer(levels) => levels.iter().copied().min().unwrap_or_default(),
        }
    }
}

/// `full`, or `full in 3 of 8 layers, else selective`.
impl fmt::Display for Recomputation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let levels = match self {
            Recomputation::Alike(level) => return level.fmt(f),
            Recomputation::ByLayer(levels) => levels,
        };
        let least = self.least();
        for level in Recompute::ALL.into_iter().rev().filter(|&level| level > least) {
            let count = levels.iter().filter(|l| **l == level).count();
            if count > 0 {
                write!(f, "{level} in {count} of {} layers, ", levels.len())?;
            }
        }
        write!(f, "else {least}")
    }
}

#[cfg(test)]
mod tests {
    use super::Recompute::{Full, None, Selective};
    use super::*;

    #[test]
    fn forms_are_read_and_written() {
        let written = |levels: Vec<Recompute>| serde_json::to_string(&Recomputation::from(levels)).unwrap();
        assert_eq!(written(vec![Full, Full]), "\"full\"");
        assert_eq!(written(vec![Full, Selective]), "[\"full\",\"selective\"]");
        let read = |text: &str| serde_json::from_str::<Recomputation>(text);
        assert_eq!(read("true").unwrap(), Recomputation::Alike(Full));
        assert_eq!(read("\"none\"").unwrap(), Recomputation::default());
        assert_eq!(read("[\"full\",\"none\"]").unwrap(), Recomputation::ByLayer(vec![Full, None]));
        assert!(read("\"some\"").unwrap_err().to_string().contains("none, selective, full"));
    }

    #[test]
    fn a_last_layer_keeps_everything() {
        let keeping = |levels: Vec<Recompute>| Recomputation::from(levels.clone()).keeping_last(levels.len());
        assert_eq!(keeping(vec![Full, Selective, Full]), Recomputation::ByLayer(vec![Full, Selective, None]));
        assert_eq!(keeping(vec![Full]), Recomputation::default());
    }

    #[test]
    fn words_count_layers() {
        assert_eq!(
            Recomputation::from(vec![Full, Selective, Selective]).to_string(),
            "full in 1 of 3 layers, else selective"
        );
        assert_eq!(Recomputation::from(vec![Selective; 3]).to_string(), "selective");
    }
}

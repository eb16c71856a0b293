//! What a layer's backward pass computes again instead of keeping it since the forward pass.
//!
//! A stage says it of each of its layers, since memory mostly runs short by less than all of them hold. In files it is one word where
//! all layers are alike and a list of words otherwise.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How much of a layer is computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// What costs next to nothing: elementwise results and broadcasts.
    #[default]
    None,
    /// Also products that are larger than their factors, as attention scores are: they hold much for little work (Korthikanti et al.
    /// 2022, section 5).
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

/// What each layer of a stage computes again.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Form", untagged)]
pub enum Recomputation {
    Alike(Recompute),
    /// By layer, from the stage's first on; not all the same.
    ByLayer(Vec<Recompute>),
}

/// What plan files hold.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected none, selective, full, or a list of one of them for each layer")]
enum Form {
    Alike(Recompute),
    ByLayer(Vec<Recompute>),
    /// Of files from before there were words for it.
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
    /// Of the stage's layer `index`, counted from its first.
    pub fn of(&self, index: usize) -> Recompute {
        match self {
            Recomputation::Alike(level) => *level,
            Recomputation::ByLayer(levels) => levels.get(index).copied().unwrap_or_default(),
        }
    }

    /// The same for a stage of so many layers, but that the last of them keeps everything.
    pub fn keeping_last(&self, layers: usize) -> Recomputation {
        let level = |i: usize| if i + 1 == layers { Recompute::None } else { self.of(i) };
        (0..layers).map(level).collect::<Vec<_>>().into()
    }

    /// The most that any layer computes again.
    pub fn most(&self) -> Recompute {
        match self {
            Recomputation::Alike(level) => *level,
            Recomputation::ByLayer(levels) => levels.iter().copied().max().unwrap_or_default(),
        }
    }

    /// The least.
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

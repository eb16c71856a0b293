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
    /// Also the [`Modules`] that the plan's execution states. By default these are products that are larger than their
    /// factors, such as attention scores: they take much memory for little work (Korthikanti et al. 2022, section 5).
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

/// A part of a layer that selective recomputation repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Module {
    /// Products that are larger than their factors: attention scores.
    AttentionCore,
    /// Every second product with a weight, and everything that is no product: torchtitan's selective checkpointing.
    SecondProducts,
    /// Products that turn a compressed query, key or value into one for each head, as in multi-head latent attention.
    UpProjections,
    /// Feed-forward layers without experts.
    Mlp,
    /// Feed-forward layers that every token visits beside its experts.
    SharedExperts,
    /// Feed-forward layers with experts: router, exchange of tokens, experts and shared experts.
    Experts,
}

impl Module {
    pub const ALL: [Module; 6] = [
        Module::AttentionCore,
        Module::SecondProducts,
        Module::UpProjections,
        Module::Mlp,
        Module::SharedExperts,
        Module::Experts,
    ];

    /// The name in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Module::AttentionCore => "attention-core",
            Module::SecondProducts => "second-products",
            Module::UpProjections => "up-projections",
            Module::Mlp => "mlp",
            Module::SharedExperts => "shared-experts",
            Module::Experts => "experts",
        }
    }

    /// The name that Megatron-LM's `--recompute-modules` has for it, if it has one.
    pub fn megatron(self) -> Option<&'static str> {
        match self {
            Module::AttentionCore => Some("core_attn"),
            Module::SecondProducts => None,
            Module::UpProjections => Some("mla_up_proj"),
            Module::Mlp => Some("mlp"),
            Module::SharedExperts => Some("shared_experts"),
            Module::Experts => Some("moe"),
        }
    }

    /// The module of a name, which may be Megatron-LM's.
    pub fn parse(name: &str) -> Option<Module> {
        Module::ALL.into_iter().find(|module| module.name() == name || module.megatron() == Some(name))
    }

    /// The values that are recomputed, in words.
    pub fn words(self) -> &'static str {
        match self {
            Module::AttentionCore => "attention scores",
            Module::SecondProducts => "every second product",
            Module::UpProjections => "up projections of latent attention",
            Module::Mlp => "feed-forward layers without experts",
            Module::SharedExperts => "shared experts",
            Module::Experts => "layers of experts",
        }
    }
}

/// A set of modules. The default is the core of attention.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "ModulesForm", into = "Vec<Module>")]
pub struct Modules(u8);

/// The forms in plan files.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a list of attention-core, second-products, up-projections, mlp, shared-experts or experts"
)]
enum ModulesForm {
    List(Vec<Module>),
    /// The boolean form of older files: true if every second product is recomputed.
    SecondProducts(bool),
}

impl From<ModulesForm> for Modules {
    fn from(form: ModulesForm) -> Modules {
        match form {
            ModulesForm::List(modules) => modules.into_iter().collect(),
            ModulesForm::SecondProducts(true) => Modules::default().with(Module::SecondProducts),
            ModulesForm::SecondProducts(false) => Modules::default(),
        }
    }
}

impl From<Modules> for Vec<Module> {
    fn from(modules: Modules) -> Vec<Module> {
        modules.iter().collect()
    }
}

impl Modules {
    pub const NONE: Modules = Modules(0);

    #[must_use]
    pub fn with(self, module: Module) -> Modules {
        Modules(self.0 | 1 << module as u8)
    }

    #[must_use]
    pub fn without(self, module: Module) -> Modules {
        Modules(self.0 & !(1 << module as u8))
    }

    pub fn contains(self, module: Module) -> bool {
        self.0 >> module as u8 & 1 == 1
    }

    /// True if the sets have a module in common.
    pub fn intersects(self, other: Modules) -> bool {
        self.0 & other.0 != 0
    }

    #[must_use]
    pub fn union(self, other: Modules) -> Modules {
        Modules(self.0 | other.0)
    }

    #[must_use]
    pub fn intersection(self, other: Modules) -> Modules {
        Modules(self.0 & other.0)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn iter(self) -> impl Iterator<Item = Module> {
        Module::ALL.into_iter().filter(move |&module| self.contains(module))
    }

    /// The values that are recomputed, in words, such as `attention scores and shared experts`.
    pub fn words(self) -> String {
        let words: Vec<&str> = self.iter().map(Module::words).collect();
        match words.as_slice() {
            [] => "nothing".to_string(),
            [only] => only.to_string(),
            [first @ .., last] => format!("{} and {last}", first.join(", ")),
        }
    }
}

impl Default for Modules {
    fn default() -> Modules {
        Modules::NONE.with(Module::AttentionCore)
    }
}

impl FromIterator<Module> for Modules {
    fn from_iter<I: IntoIterator<Item = Module>>(modules: I) -> Modules {
        modules.into_iter().fold(Modules::NONE, Modules::with)
    }
}

impl fmt::Debug for Modules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// The names, separated by commas.
impl fmt::Display for Modules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.iter().map(Module::name).collect::<Vec<_>>().join(","))
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

    /// True if a layer recomputes selectively.
    pub fn selects(&self) -> bool {
        match self {
            Recomputation::Alike(level) => *level == Recompute::Selective,
            Recomputation::ByLayer(levels) => levels.contains(&Recompute::Selective),
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
    fn modules_are_read_and_written() {
        let modules = Modules::default().with(Module::Experts);
        let text = serde_json::to_string(&modules).unwrap();
        assert_eq!(text, "[\"attention-core\",\"experts\"]");
        assert_eq!(serde_json::from_str::<Modules>(&text).unwrap(), modules);
        assert_eq!(modules.to_string(), "attention-core,experts");
        assert_eq!(modules.words(), "attention scores and layers of experts");
        for module in Module::ALL {
            assert_eq!(serde_json::to_string(&module).unwrap(), format!("\"{}\"", module.name()));
        }
        // Older files have a flag for second products.
        let old = |text: &str| serde_json::from_str::<Modules>(text).unwrap();
        assert_eq!(old("true"), Modules::default().with(Module::SecondProducts));
        assert_eq!(old("false"), Modules::default());
        let error = serde_json::from_str::<Modules>("[\"mpl\"]").unwrap_err().to_string();
        assert!(Module::ALL.iter().all(|module| error.contains(module.name())), "{error}");
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

//! Stacks that are configured rather than programmed. Each has a table of knobs, which reads a configuration file into
//! the description that all stacks share ([`Configuration`]) and writes one from it. `altiplano export` writes plans
//! with these tables, and `altiplano judge` reads what people run.

mod accelerate;
pub mod configuration;
mod deepspeed;
pub mod judge;
mod layout;
mod maxtext;
mod megatron;
mod megatron_bridge;
mod model;
mod of_plan;
mod predict;
pub mod syntax;
mod torchtitan;
mod transformers;
mod write;

#[cfg(test)]
mod target_tests;
#[cfg(test)]
mod tests;

pub use configuration::{Configuration, Misfit};
pub use write::{Written, export};

use crate::error::Names;
use altiplano_ir::plan::Target;
use serde_json::Value;
use syntax::{Given, Setting, Syntax, SyntaxProblem};

/// A stack: what its files are like, and its knobs.
pub struct Stack {
    pub name: &'static str,
    /// The version that the tables were written for.
    pub version: &'static str,
    /// The software whose execution the planner knows that runs most like this stack.
    pub target: Target,
    /// True if degrees of replicas and shards say what is sharded, rather than a level of ZeRO.
    pub shards_by_degree: bool,
    /// The syntax of files that are written.
    pub syntax: Syntax,
    pub knobs: &'static [Knob],
    /// Knobs without influence on speed and memory, or with an influence that the planner does not see and that is
    /// small. A name that ends with `*` stands for all that begin so.
    pub ignored: &'static [&'static str],
    /// Names that only files of this stack have.
    pub marks: &'static [&'static str],
    /// Fills in the stack's defaults after all knobs are read.
    pub defaults: fn(&mut Configuration),
    /// Brings a configuration to the nearest one that the stack can say, where its price tells enough.
    pub round: fn(&mut Configuration),
    /// The first thing of a configuration that the stack cannot say, with the option that changes it.
    pub limit: fn(&Configuration) -> Option<Unsayable>,
    /// Writes a file.
    pub text: fn(&write::Page<'_>) -> String,
    /// The command that starts a job with the file.
    pub start: fn(&write::Page<'_>) -> String,
}

/// A knob of a stack.
pub struct Knob {
    /// The name in the stack's own words; for nested settings the last names with dots between.
    pub name: &'static str,
    /// Sets the knob's part of a configuration.
    pub read: fn(&mut Configuration, &Value) -> Result<(), String>,
    /// The knob's value, if a written file has the knob.
    pub write: fn(&Configuration) -> Option<Value>,
}

/// A part of a plan that a stack cannot say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unsayable {
    pub problem: &'static str,
    /// The option of `altiplano plan` that changes it.
    pub option: &'static str,
}

/// The reason why a file of a stack cannot be read, or a plan not be written as one.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StackProblem {
    #[error("{0}")]
    Syntax(SyntaxProblem),
    #[error("no knob of a known stack is in the file; say which one it is with --stack {}", STACKS.map(|s| s.name).join("|"))]
    UnknownStack,
    #[error("{}", refusals(.stack, .settings))]
    Knobs { stack: &'static str, settings: Vec<(String, usize, String)> },
    #[error("{0}")]
    Misfit(#[from] Misfit),
    #[error("{problem}; plan with {option}")]
    Unsayable { problem: &'static str, option: &'static str },
    #[error("the plan cannot be said: {misfit}; plan with {}", .misfit.option())]
    Unsettled { misfit: Misfit },
    #[error(
        "experts in {ep} parts cannot be dealt out to {dp} replicas of {tp} tensor-parallel devices; plan with another --ep"
    )]
    Experts { ep: u32, dp: u32, tp: u32 },
    #[error("{0}")]
    Plan(&'static str),
    #[error("the model is not described well enough: {} is missing; give its file with --model", .0)]
    Model(&'static str),
    #[error("the file does not describe the model; give its file with --model")]
    NoModel,
    #[error("the number of devices is not stated; give --cluster, such as --cluster dgx-h100:4")]
    NoCluster,
    #[error("the options {0} are not known to the stack")]
    Options(Names),
}

fn refusals(stack: &str, settings: &[(String, usize, String)]) -> String {
    let lines = settings.iter().map(|(name, line, problem)| format!("\n  line {line}: {name}: {problem}"));
    format!("knobs of {stack} that cannot be predicted:{}", lines.collect::<Vec<_>>().concat())
}

/// All stacks.
pub const STACKS: [&Stack; 7] = [
    &megatron::MEGATRON,
    &megatron_bridge::MEGATRON_BRIDGE,
    &deepspeed::DEEPSPEED,
    &accelerate::ACCELERATE,
    &transformers::TRANSFORMERS,
    &torchtitan::TORCHTITAN,
    &maxtext::MAXTEXT,
];

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Stack {
    /// The stack with this name.
    pub fn named(name: &str) -> Option<&'static Stack> {
        STACKS.into_iter().find(|stack| stack.name == name)
    }

    fn knob(&self, setting: &Setting) -> Option<&'static Knob> {
        self.knobs.iter().find(|knob| is_named(setting, knob.name))
    }

    fn is_ignored(&self, setting: &Setting) -> bool {
        self.ignored.iter().any(|ignored| match ignored.strip_suffix('*') {
            Some(start) => setting.path.iter().any(|name| normal(name).starts_with(&normal(start))),
            None => is_named(setting, ignored),
        })
    }

    /// Reads settings into a configuration.
    ///
    /// # Errors
    /// [`StackProblem::Knobs`] names every knob that is unknown or whose value cannot be predicted.
    pub fn read(&self, settings: &[Setting]) -> Result<Configuration, StackProblem> {
        let mut configuration = Configuration::default();
        let mut refused = Vec::new();
        for setting in settings {
            let mut refuse = |problem: String| refused.push((self.spelled(&setting.path), setting.line, problem));
            match (self.knob(setting), &setting.given) {
                (None, Given::Called(_)) => {}
                (None, _) if setting.is_loose || self.is_ignored(setting) => {}
                (None, _) => refuse("is unknown, and may change speed or memory".into()),
                (Some(_), Given::Expression(_) | Given::Called(_)) if setting.is_loose => {}
                (Some(_), Given::Expression(text)) => refuse(format!("is `{text}`, which the file does not say")),
                (Some(knob), Given::Called(name)) => {
                    (knob.read)(&mut configuration, &Value::String(name.clone())).unwrap_or_else(refuse);
                }
                (Some(knob), Given::Literal(value)) => {
                    (knob.read)(&mut configuration, value).unwrap_or_else(refuse);
                }
            }
        }
        if !refused.is_empty() {
            return Err(StackProblem::Knobs { stack: self.name, settings: refused });
        }
        (self.defaults)(&mut configuration);
        Ok(configuration)
    }

    /// The knobs that a written file has, with their values.
    pub fn settings(&self, configuration: &Configuration) -> Vec<(&'static str, Value)> {
        self.knobs.iter().filter_map(|knob| Some((knob.name, (knob.write)(configuration)?))).collect()
    }

    /// A knob as people type it.
    pub fn spelled(&self, path: &[String]) -> String {
        let name = path.join(".");
        if self.syntax == Syntax::Shell { format!("--{}", name.trim_start_matches("--")) } else { name }
    }

    /// A knob with its value as people type it.
    pub fn set(&self, name: &str, value: &Value) -> String {
        match (self.syntax, value) {
            (Syntax::Shell, Value::Bool(true)) => format!("--{name}"),
            (Syntax::Shell, Value::String(text)) if text.contains(['|', '*', '(']) => format!("--{name} '{text}'"),
            (Syntax::Shell, Value::String(text)) => format!("--{name} {text}"),
            (Syntax::Shell, Value::Array(values)) => {
                let words: Vec<String> = values.iter().map(bare).collect();
                format!("--{name} {}", words.join(" "))
            }
            (Syntax::Shell, value) => format!("--{name} {value}"),
            (Syntax::Json, value) => format!("\"{name}\": {value}"),
            (Syntax::Python, value) => format!("{name}={}", write::python(value)),
            (_, value) => format!("{name}: {}", write::scalar(value)),
        }
    }
}

/// A value without the quotes of a text.
fn bare(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), String::from)
}

/// The settings of a text, and the stack whose knobs it has most of.
///
/// # Errors
/// [`StackProblem`] if the text cannot be read, or if it has no knob of any stack.
pub fn recognised(text: &str, asked: Option<&'static Stack>) -> Result<(&'static Stack, Vec<Setting>), StackProblem> {
    let settings = Syntax::of(text).settings(text).map_err(StackProblem::Syntax)?;
    if let Some(stack) = asked {
        return Ok((stack, settings));
    }
    let score = |stack: &&'static Stack| {
        let marks = settings.iter().filter(|s| stack.marks.iter().any(|mark| is_marked(s, mark))).count();
        let named = stack.marks.iter().filter(|mark| text.contains(**mark)).count();
        let known = settings.iter().filter(|s| stack.knob(s).is_some()).count();
        (marks * 8 + named * 4) * usize::from(known > 0) + known
    };
    let best = STACKS.into_iter().rev().max_by_key(score).filter(|stack| score(stack) > 0);
    best.map(|stack| (stack, settings)).ok_or(StackProblem::UnknownStack)
}

/// Names are compared without case, dashes and leading dashes.
fn normal(name: &str) -> String {
    name.trim_start_matches('-').replace('-', "_").to_lowercase()
}

/// True if the last names of a setting are those of a knob.
fn is_named(setting: &Setting, name: &str) -> bool {
    let wanted: Vec<&str> = name.split('.').collect();
    setting.path.len() >= wanted.len()
        && wanted.iter().rev().zip(setting.path.iter().rev()).all(|(wanted, name)| normal(wanted) == normal(name))
}

fn is_marked(setting: &Setting, mark: &str) -> bool {
    setting.path.iter().any(|name| normal(name) == normal(mark))
        || matches!(&setting.given, Given::Called(name) if name == mark)
}

/// A whole number of at least 0.
fn whole(value: &Value) -> Result<u64, String> {
    value.as_u64().ok_or_else(|| format!("is {}, not a whole number", bare(value)))
}

/// A whole number that fits 32 bits.
fn count(value: &Value) -> Result<u32, String> {
    whole(value)?.try_into().map_err(|_| format!("is {}, which is too large", bare(value)))
}

fn truth(value: &Value) -> Result<bool, String> {
    match value {
        Value::Bool(truth) => Ok(*truth),
        Value::String(text) if ["true", "false", "True", "False"].contains(&text.as_str()) => {
            Ok(text.eq_ignore_ascii_case("true"))
        }
        Value::Number(number) if number.as_u64() == Some(0) || number.as_u64() == Some(1) => {
            Ok(number.as_u64() == Some(1))
        }
        Value::Null => Ok(false),
        value => Err(format!("is {}, neither true nor false", bare(value))),
    }
}

/// One of several words.
fn word<T: Copy>(value: &Value, words: &[(&str, T)]) -> Result<T, String> {
    let given = bare(value);
    let found = words.iter().find(|(word, _)| word.eq_ignore_ascii_case(&given));
    found.map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        format!("is {given}, and only {} can be predicted", known.join(", "))
    })
}

/// A knob that only reads.
macro_rules! reads {
    ($name:expr, $read:expr) => {
        $crate::stacks::Knob { name: $name, read: $read, write: |_| None }
    };
}

/// A knob of one whole number that is a field of the configuration.
macro_rules! number {
    ($name:expr, $($field:ident).+) => {
        $crate::stacks::Knob {
            name: $name,
            read: |c, v| {
                // Nothing, and the -1 of some stacks, leave it open.
                if !v.is_null() && v.as_i64() != Some(-1) {
                    let wide = $crate::stacks::whole(v)?;
                    c.$($field).+ = Some(wide.try_into().map_err(|_| format!("is {wide}, which is too large"))?);
                }
                Ok(())
            },
            write: |c| c.$($field).+.map(serde_json::Value::from),
        }
    };
}

/// A knob of one whole number that only reads.
macro_rules! reads_number {
    ($name:expr, $($field:ident).+) => {
        $crate::stacks::Knob { write: |_| None, ..$crate::stacks::number!($name, $($field).+) }
    };
}

/// A knob that is on or off, a field of the configuration, and only reads.
macro_rules! reads_flag {
    ($name:expr, $($field:ident).+) => {
        $crate::stacks::reads!($name, |c, v| {
            c.$($field).+ |= $crate::stacks::truth(v)?;
            Ok(())
        })
    };
}

/// A knob that adds a note if it is on: the prediction does not see it.
macro_rules! noted {
    ($name:expr, $note:expr) => {
        $crate::stacks::reads!($name, |c, v| {
            let is_off = v.is_null() || v.as_bool() == Some(false) || v.as_u64() == Some(0);
            if !is_off {
                c.notes.push(format!("{}: {}", $name, $note));
            }
            Ok(())
        })
    };
}

/// A knob that the planner cannot predict unless it is off.
macro_rules! refused {
    ($name:expr, $why:expr) => {
        $crate::stacks::reads!($name, |_, v| {
            let is_off = v.is_null()
                || v.as_bool() == Some(false)
                || v.as_u64() == Some(0)
                || v.as_str().is_some_and(|word| word.is_empty() || word.eq_ignore_ascii_case("none"));
            if is_off { Ok(()) } else { Err($why.to_string()) }
        })
    };
}

pub(crate) use {noted, number, reads, reads_flag, reads_number, refused};

//! Proves that the programs of a plan compute what one device computes: the loss, every updated parameter and all
//! optimizer state, for all inputs, over the reals and with the order of additions free.
//!
//! The reference is the step of one device, made from the plan's graph and optimizer alone ([`mod@reference`]). Every local
//! value of a program is related to a value of the reference ([`rules`], [`body`]), and bodies are joined through
//! buffers, transfers and the schedule ([`step`]). The crate knows nothing of the planner that wrote the programs.

#![forbid(unsafe_code)]

pub mod body;
pub mod derivation;
pub mod layout;
pub mod numerics;
pub mod pair;
pub mod reference;
pub mod rules;
pub mod schedule;
pub mod step;
pub mod term;

use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{BufferId, Programs};
use std::fmt;

/// The version of the rules. A certificate of another version counts no more.
pub const VERSION: u32 = 2;

/// The size of a proof.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proof {
    /// Local values that were related to values of the reference.
    pub values: usize,
    /// Values of the reference.
    pub reference_values: usize,
    pub bodies: usize,
    pub transfers: usize,
    /// Parameters whose new value is proved, counted once, and tensors of optimizer state.
    pub parameters: usize,
    pub states: usize,
}

/// The reason why a proof ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The value differs from the reference.
    Differs,
    /// The rules relate it to no value of the reference: it differs, or a rule is missing.
    Unrelated,
    /// No rule covers what the plan asks for.
    NoRule,
}

/// The place where a proof ends, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Gap {
    pub kind: Kind,
    /// The position of the program, and the name of its body.
    pub program: Option<u32>,
    pub body: Option<String>,
    pub value: Option<ValueId>,
    pub buffer: Option<BufferId>,
    /// The expected value and the one that is there, in words.
    pub text: String,
}

impl Gap {
    fn new(kind: Kind, text: String) -> Gap {
        Gap { kind, program: None, body: None, value: None, buffer: None, text }
    }

    fn of_program(self, program: u32) -> Gap {
        Gap { program: Some(program), ..self }
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(program) = self.program {
            write!(f, "program {program}")?;
        }
        if let Some(body) = &self.body {
            write!(f, ", {body}")?;
        }
        if let Some(value) = self.value {
            write!(f, ", {value}")?;
        }
        if let Some(buffer) = self.buffer {
            write!(f, ", {buffer}")?;
        }
        let separator = if self.program.is_some() { ": " } else { "" };
        write!(f, "{separator}{}", self.text)
    }
}

/// Proves a plan's programs.
pub fn prove(plan: &Plan, programs: &Programs) -> Result<Proof, Gap> {
    step::prove(plan, programs, &mut |_, _| ())
}

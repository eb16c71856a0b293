//! Proofs as lists of steps: how the values of a stage's forward pass follow from parameters and inputs.

use crate::Gap;
pub use crate::body::derivation::Step;
use crate::step;
use altiplano_ir::expand::expand;
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{Phase, Programs};
use std::collections::{BTreeMap, BTreeSet};

/// The steps of a stage's forward body.
#[derive(Clone, Debug, PartialEq)]
pub struct Derivation {
    pub stage: u32,
    pub steps: Vec<Step>,
    /// The position of the step at which each value of the plan's graph is reached.
    pub values: BTreeMap<ValueId, u32>,
}

/// Proves a plan's programs, and keeps the steps of the forward bodies of some stages.
pub fn derive(plan: &Plan, programs: &Programs, stages: &BTreeSet<u32>) -> Result<Vec<Derivation>, Gap> {
    let expanded = expand(&plan.graph);
    let mut derivations = Vec::new();
    step::prove(plan, programs, &mut |body, examined| {
        if body.phase != Phase::Forward || !stages.contains(&body.stage) {
            return;
        }
        let (steps, of_term) = examined.steps();
        let step = |v: ValueId| of_term.get(&examined.term_of(expanded.values[v.index()])).copied();
        let values = plan.graph.values().filter_map(|v| Some((v, step(v)?))).collect();
        derivations.push(Derivation { stage: body.stage, steps, values });
    })?;
    Ok(derivations)
}

//! The steps of a plan's proof: how each value of a layer is a part of a value of one device.

use crate::Error;
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::Programs;
use altiplano_prover::derivation::{Derivation, derive};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A step: the op, the rule, the value of one device, the layout in which a device has its part, and the steps before.
#[derive(Serialize)]
struct Fact {
    op: &'static str,
    rule: &'static str,
    of: String,
    layout: String,
    from: Vec<usize>,
}

/// The steps of one layer. Those without `from` are parameters, inputs, constants and values of other layers.
#[derive(Default, Serialize)]
#[serde(transparent)]
pub struct FactsOfLayer(Vec<Fact>);

/// The steps of the forward passes of all stages; none if the plan has no proof.
pub struct Facts(BTreeMap<u32, Derivation>);

impl Facts {
    pub fn new(plan: &Plan, programs: &Programs) -> Result<Facts, Error> {
        if plan.proof.is_none() {
            return Ok(Facts(BTreeMap::new()));
        }
        let stages = (0..plan.stages.len() as u32).collect();
        let derivations = derive(plan, programs, &stages).map_err(|gap| Error::Unproved { gap: Box::new(gap) })?;
        Ok(Facts(derivations.into_iter().map(|derivation| (derivation.stage, derivation)).collect()))
    }

    /// The steps of a layer, and the step of each of its values that the stage lays out.
    pub fn of_layer(&self, stage: u32, members: &[ValueId]) -> (FactsOfLayer, Vec<Option<usize>>) {
        let Some(derivation) = self.0.get(&stage) else { return (FactsOfLayer::default(), vec![None; members.len()]) };
        let reached: Vec<Option<u32>> = members.iter().map(|v| derivation.values.get(v).copied()).collect();
        let elsewhere = |(v, _): &(&ValueId, &u32)| members.binary_search(v).is_err();
        let given: BTreeSet<u32> = derivation.values.iter().filter(elsewhere).map(|(_, &step)| step).collect();
        // Steps go from lower to higher positions, so those that are needed are found from the last one back.
        let mut needed: BTreeMap<u32, usize> = reached.iter().flatten().map(|&step| (step, 0)).collect();
        let mut pending: Vec<u32> = needed.keys().copied().collect();
        while let Some(step) = pending.pop() {
            let before = &derivation.steps[step as usize].from;
            for &from in before.iter().filter(|_| !given.contains(&step)) {
                if needed.insert(from, 0).is_none() {
                    pending.push(from);
                }
            }
        }
        for (at, number) in needed.values_mut().enumerate() {
            *number = at;
        }
        let fact = |step: &u32| {
            let known = &derivation.steps[*step as usize];
            let is_given = given.contains(step);
            let before = known.from.iter().filter(|_| !is_given);
            Fact {
                op: known.op,
                rule: if is_given && !known.from.is_empty() { "another layer" } else { known.rule },
                of: known.of.clone(),
                layout: known.layout.clone(),
                from: before.map(|from| needed[from]).collect(),
            }
        };
        let facts = needed.keys().map(fact).collect();
        let of_values = reached.iter().map(|step| step.map(|step| needed[&step])).collect();
        (FactsOfLayer(facts), of_values)
    }
}

//! Explains the layouts of a bounded number of values. Among values that differ only in the numbers in their names, on
//! equal meshes, the first stands for all. The largest values come first.

use super::numberless;
use crate::Error;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Plan, Stage, Storage, ValueSharding};
use altiplano_planner::explain::layouts::{Why, why_in};
use rayon::prelude::*;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Maximum numbers of parameters, and of results of products and lookups.
const MOST_PARAMETERS: usize = 16;
const MOST_ACTIVATIONS: usize = 16;
/// Maximum number of nodes of all stages together that are solved again. One question is always answered.
const MOST_NODES: usize = 24_000;
/// Maximum number of layouts per question.
const MOST_LAYOUTS: usize = 12;

#[derive(Serialize)]
pub struct Questions {
    answers: Vec<Answer>,
    /// Number of distinct values left to the command line.
    left_out: usize,
    /// The answer for each kind of value.
    #[serde(skip)]
    numbers: BTreeMap<Key, usize>,
}

/// The key of values with the same question: whether they are parameters, their name without numbers, type, and layout.
type Key = (bool, String, String, String);

/// The possible layouts of a value in a stage.
#[derive(Serialize)]
struct Answer {
    name: String,
    is_parameter: bool,
    /// Number of values that differ only in a number in their names, this one included.
    alike: usize,
    stage: usize,
    ty: String,
    /// Predicted seconds of a microbatch, and peak bytes relative to the device's memory.
    microbatch_s: f64,
    peak_bytes: u64,
    device_bytes: u64,
    layouts: Vec<Choice>,
    more_layouts: usize,
}

/// A layout, with the estimates of the search; `null` seconds if another constraint rules it out.
#[derive(Serialize)]
struct Choice {
    layout: String,
    chosen: bool,
    in_place_s: f64,
    whole_s: f64,
    others: usize,
    over_bytes: u64,
}

/// Values with the same question.
struct Asked {
    key: Key,
    value: ValueId,
    name: String,
    is_parameter: bool,
    stage: usize,
    alike: usize,
    bytes: u64,
}

impl Questions {
    pub fn new(plan: &Plan) -> Result<Questions, Error> {
        let mut asked = distinct(plan);
        asked.sort_by_key(|a| (Reverse(a.bytes), a.value, a.stage));
        let (parameters, activations): (Vec<Asked>, Vec<Asked>) = asked.into_iter().partition(|a| a.is_parameter);
        let num_asked = parameters.len() + activations.len();
        // Alternate between both kinds, largest first, until their stages together are too large to solve again.
        let mut chosen: Vec<(usize, Asked)> = parameters.into_iter().enumerate().take(MOST_PARAMETERS).collect();
        chosen.extend(activations.into_iter().enumerate().take(MOST_ACTIVATIONS));
        chosen.sort_by_key(|(rank, asked)| (*rank, !asked.is_parameter));
        let mut num_nodes = 0;
        chosen.retain(|(rank, asked)| {
            num_nodes += plan.stages[asked.stage].shardings.len();
            (*rank, asked.is_parameter) == (0, true) || num_nodes <= MOST_NODES
        });
        chosen.sort_by_key(|(rank, asked)| (!asked.is_parameter, *rank));
        let left_out = num_asked - chosen.len();
        let found = chosen.par_iter().map(|(_, asked)| {
            let here = why_in(plan, asked.value, |stage| stage == asked.stage)?.pop();
            Ok(here.map(|why| (asked.key.clone(), answer(plan, asked, why))))
        });
        let found: Vec<Option<(Key, Answer)>> = found.collect::<Result<_, Error>>()?;
        let (mut answers, mut numbers) = (Vec::new(), BTreeMap::new());
        for (key, answer) in found.into_iter().flatten() {
            numbers.insert(key, answers.len());
            answers.push(answer);
        }
        Ok(Questions { answers, left_out, numbers })
    }

    /// The answer for a parameter of a stage, if there is one.
    pub(crate) fn of_parameter(
        &self,
        plan: &Plan,
        stage: &Stage,
        v: ValueId,
        name: &str,
        storage: &Storage,
    ) -> Option<usize> {
        self.numbers.get(&key_of_parameter(plan, stage, v, name, storage)).copied()
    }

    /// The same for a computed value.
    pub(crate) fn of_value(&self, plan: &Plan, stage: &Stage, v: ValueId, value: &ValueSharding) -> Option<usize> {
        self.numbers.get(&key_of_value(plan, stage, v, value)).copied()
    }
}

fn key_of_value(plan: &Plan, stage: &Stage, v: ValueId, value: &ValueSharding) -> Key {
    let layout = format!("{} {}", stage.mesh, value.sharding);
    (false, numberless(&value.name), plan.graph.ty(v).to_string(), layout)
}

fn key_of_parameter(plan: &Plan, stage: &Stage, v: ValueId, name: &str, storage: &Storage) -> Key {
    let layouts = [&storage.parameter, &storage.gradient, &storage.state];
    let layout = layouts.map(|s| s.display(&stage.mesh).to_string()).join(" ");
    (true, numberless(name), plan.graph.ty(v).to_string(), format!("{} {layout}", stage.mesh))
}

fn answer(plan: &Plan, asked: &Asked, why: Why) -> Answer {
    let more_layouts = why.layouts.len().saturating_sub(MOST_LAYOUTS);
    let layouts = why.layouts.into_iter().take(MOST_LAYOUTS).map(|l| Choice {
        layout: l.layout,
        chosen: l.chosen,
        in_place_s: l.in_place_s,
        whole_s: l.whole_s,
        others: l.others,
        over_bytes: l.over_bytes,
    });
    Answer {
        name: asked.name.clone(),
        is_parameter: asked.is_parameter,
        alike: asked.alike,
        stage: asked.stage,
        ty: plan.graph.ty(asked.value).to_string(),
        microbatch_s: why.microbatch_s,
        peak_bytes: why.peak_bytes,
        device_bytes: why.device_bytes,
        layouts: layouts.collect(),
        more_layouts,
    }
}

/// Candidate questions: the first of all values with the same name except for numbers, type and layout.
fn distinct(plan: &Plan) -> Vec<Asked> {
    let mut found: BTreeMap<Key, Asked> = BTreeMap::new();
    let mut add = |v: ValueId, name: &str, stage: usize, key: Key| {
        let (is_parameter, bytes) = (key.0, plan.graph.ty(v).bytes());
        let new = Asked { key: key.clone(), value: v, name: name.to_string(), is_parameter, stage, alike: 0, bytes };
        found.entry(key).or_insert(new).alike += 1;
    };
    for (i, stage) in plan.stages.iter().enumerate().filter(|(_, s)| s.mesh.num_devices() > 1) {
        for (v, name) in plan.graph.parameters() {
            let Some(storage) = stage.parameters.get(name) else { continue };
            add(v, name, i, key_of_parameter(plan, stage, v, name, storage));
        }
        for (&v, value) in stage.shardings.iter().filter(|(v, value)| is_asked(plan, **v) && !value.name.is_empty()) {
            add(v, &value.name, i, key_of_value(plan, stage, v, value));
        }
    }
    found.into_values().collect()
}

/// Returns whether a value's layout determines those of values computed from it.
pub(crate) fn is_asked(plan: &Plan, v: ValueId) -> bool {
    let node = plan.graph.node(v);
    node.ty.rank() > 0 && (node.op.is_contraction() || matches!(node.op, Op::Gather(_)))
}

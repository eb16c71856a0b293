//! The parameters in the plan's layouts. Each has one row per stage that stores it, with the bytes per device of the
//! parameter, its gradient and its optimizer state.

use super::questions::Questions;
use crate::report::words;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{BufferId, BufferKind, Programs};
use serde::Serialize;
use std::collections::BTreeMap;

/// The rows, and a table of their texts, to which they refer by number.
#[derive(Serialize)]
pub(crate) struct Parameters {
    texts: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    name: String,
    stage: usize,
    shape: Vec<u64>,
    dtype: usize,
    /// The layout in words, and the shardings of the parameter, its accumulated gradient and its state in the plan's
    /// notation.
    layout: usize,
    sharding: usize,
    gradient: usize,
    state: usize,
    zero: Option<u8>,
    local_bytes: u64,
    gradient_bytes: u64,
    state_bytes: u64,
    /// The number of the question about its layout, if the page answers it.
    why: Option<usize>,
}

impl Parameters {
    pub(crate) fn new(plan: &Plan, programs: &Programs, questions: &Questions) -> Parameters {
        let users = plan.graph.users();
        let mut texts = Vec::new();
        let mut known: BTreeMap<String, usize> = BTreeMap::new();
        let mut text = |text: String| {
            let new = known.len();
            *known.entry(text).or_insert_with_key(|text| {
                texts.push(text.clone());
                new
            })
        };
        let mut rows = Vec::new();
        for (i, stage) in plan.stages.iter().enumerate() {
            let held = held_bytes(plan, programs, i);
            for (v, name) in plan.graph.parameters() {
                let Some(storage) = stage.parameters.get(name) else { continue };
                let ty = plan.graph.ty(v);
                let [local_bytes, gradient_bytes, state_bytes] = held.get(name).copied().unwrap_or_default();
                rows.push(Row {
                    name: name.to_string(),
                    stage: i,
                    shape: ty.shape.to_vec(),
                    dtype: text(ty.dtype.to_string()),
                    layout: text(words::parameter(plan, stage, v, storage, &users)),
                    sharding: text(storage.parameter.display(&stage.mesh).to_string()),
                    gradient: text(storage.gradient.display(&stage.mesh).to_string()),
                    state: text(storage.state.display(&stage.mesh).to_string()),
                    zero: words::level(plan, stage, v, storage, &users),
                    local_bytes,
                    gradient_bytes,
                    state_bytes,
                    why: questions.of_parameter(plan, stage, v, name, storage),
                });
            }
        }
        Parameters { texts, rows }
    }
}

/// Bytes per device of a stage for each parameter, its accumulated gradient and its state.
fn held_bytes<'a>(plan: &Plan, programs: &'a Programs, stage: usize) -> BTreeMap<&'a str, [u64; 3]> {
    let program = &programs.programs[plan.lane_of(stage)];
    let mut held: BTreeMap<&str, [u64; 3]> = BTreeMap::new();
    for (id, buffer) in (0u32..).map(BufferId).zip(&program.buffers) {
        let (name, of) = match &buffer.kind {
            BufferKind::Parameter { name } => (name, 0),
            BufferKind::Accumulator { parameter } => (parameter, 1),
            BufferKind::State { parameter, .. } => (parameter, 2),
            _ => continue,
        };
        // Offloaded buffers are not on the device.
        if buffer.stage as usize == stage && !buffer.host {
            held.entry(name).or_default()[of] += program.local_bytes(id);
        }
    }
    held
}

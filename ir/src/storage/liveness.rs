//! The liveness of stored values: when they die, which results take over the storage of a dying operand, and the
//! resulting bytes.

use super::{Step, Steps};
use crate::graph::ValueId;

/// Fills in `dies`, `in_place` and `transient_bytes`.
pub fn assign<K>(body: &mut Steps<K>) {
    let mut last_use = vec![None; body.num_values];
    for (i, step) in body.steps.iter().enumerate() {
        for v in step.inputs.iter().copied().chain(step.outputs.iter().map(|o| o.value)) {
            last_use[v.index()] = Some(i);
        }
    }
    for &(_, v) in &body.writes {
        last_use[v.index()] = None;
    }
    for (v, last) in last_use.iter().enumerate() {
        if let Some(i) = last {
            body.steps[*i].dies.push(ValueId(v as u32));
        }
    }
    // The body may overwrite its own results, and buffers that it replaces or frees.
    let mut owned = vec![true; body.num_values];
    let mut bytes = vec![0u64; body.num_values];
    for leaf in &body.leaves {
        owned[leaf.value.index()] = leaf.owned;
        bytes[leaf.value.index()] = leaf.bytes;
    }
    let (mut held, mut peak) = (0i64, 0i64);
    // True for values that die at a step and may be overwritten there.
    let mut dying = vec![false; body.num_values];
    for step in &mut body.steps {
        for output in &step.outputs {
            bytes[output.value.index()] = output.bytes;
        }
        for v in step.dies.iter().filter(|v| owned[v.index()]) {
            dying[v.index()] = true;
        }
        let placed = choose_in_place(step, &mut dying, &bytes);
        for (output, in_place) in step.outputs.iter().zip(placed) {
            held += if in_place { 0 } else { output.bytes as i64 };
        }
        peak = peak.max(held + step.workspace_bytes as i64);
        for v in &step.dies {
            if std::mem::take(&mut dying[v.index()]) {
                held -= bytes[v.index()] as i64;
            }
        }
    }
    body.transient_bytes = peak.max(0) as u64;
}

/// Pairs outputs with dying inputs of the same size, which then no longer count as dying. Returns for each output
/// whether it has one.
fn choose_in_place<K>(step: &mut Step<K>, dying: &mut [bool], bytes: &[u64]) -> Vec<bool> {
    let mut placed = vec![false; step.outputs.len()];
    for &(output, v) in &step.replaceable {
        let same = bytes[v.index()] == bytes[step.outputs[output].value.index()];
        if same && !placed[output] && dying[v.index()] {
            dying[v.index()] = false;
            placed[output] = true;
            step.in_place.push((output, v));
        }
    }
    placed
}

//! When stored values die, which results take over the storage of a dying operand, and the bytes that follow from it.

use crate::collective::chunk_elements;
use crate::element::Class;
use crate::kernel::chain::Source;
use crate::step::{Compiled, Kernel, Step};
use altiplano_ir::graph::ValueId;
use altiplano_ir::reshard::Collective;

/// Fills in `dies`, `in_place` and `transient_bytes`.
pub(crate) fn assign(compiled: &mut Compiled) {
    let mut last_use = vec![None; compiled.num_values];
    for (i, step) in compiled.steps.iter().enumerate() {
        for v in step.inputs.iter().copied().chain(step.outputs.iter().map(|o| o.value)) {
            last_use[v.index()] = Some(i);
        }
    }
    for &(_, v) in &compiled.writes {
        last_use[v.index()] = None;
    }
    for (v, last) in last_use.iter().enumerate() {
        if let Some(i) = last {
            compiled.steps[*i].dies.push(ValueId(v as u32));
        }
    }
    // What the body may overwrite: its own results, and buffers that it replaces or frees.
    let mut owned = vec![true; compiled.num_values];
    let mut bytes = vec![0u64; compiled.num_values];
    for leaf in &compiled.leaves {
        owned[leaf.value.index()] = leaf.owned;
        bytes[leaf.value.index()] = leaf.bytes;
    }
    let (mut held, mut peak) = (0i64, 0i64);
    for step in &mut compiled.steps {
        for output in &step.outputs {
            bytes[output.value.index()] = output.bytes();
        }
        choose_in_place(step, &owned, &bytes);
        for (i, output) in step.outputs.iter().enumerate() {
            if !step.in_place.iter().any(|p| p.0 == i) {
                held += output.bytes() as i64;
            }
        }
        peak = peak.max(held + workspace_bytes(step) as i64);
        for v in &step.dies {
            if owned[v.index()] && !step.in_place.iter().any(|p| p.1 == *v) {
                held -= bytes[v.index()] as i64;
            }
        }
    }
    compiled.transient_bytes = peak.max(0) as u64;
}

/// Pairs outputs with dying inputs of the same size and format that are read at the same positions.
fn choose_in_place(step: &mut Step, owned: &[bool], bytes: &[u64]) {
    let dies = |v: ValueId| step.dies.contains(&v) && owned[v.index()];
    match &mut step.kernel {
        Kernel::Chain(chain) => {
            for store in &chain.stores {
                let size = bytes[step.outputs[store.output].value.index()];
                let whole: &[(usize, usize)] = if chain.elements == 1 { &[] } else { &[(chain.elements, 1)] };
                let suits = |(i, &v): (usize, &ValueId)| {
                    let mut loads = chain.loads.iter().filter(|l| l.source == Source::Input(i)).peekable();
                    dies(v)
                        && bytes[v.index()] == size
                        && !step.in_place.iter().any(|p| p.1 == v)
                        && loads.peek().is_some()
                        && loads.all(|l| l.class == store.class && l.offset == 0 && l.runs == whole)
                };
                let Some((i, &v)) = step.inputs.iter().enumerate().find(|&c| suits(c)) else { continue };
                step.in_place.push((store.output, v));
                for load in chain.loads.iter_mut().filter(|l| l.source == Source::Input(i)) {
                    load.source = Source::InPlace(store.output);
                }
            }
        }
        Kernel::Scatter { .. } if dies(step.inputs[0]) && !step.inputs[1..].contains(&step.inputs[0]) => {
            step.in_place.push((0, step.inputs[0]));
        }
        Kernel::Dot(dot) if dot.accumulate => step.in_place.push((0, step.inputs[2])),
        Kernel::Collective { collective: Collective::AllReduce { .. } | Collective::KeepFirst { .. }, .. }
            if dies(step.inputs[0]) =>
        {
            step.in_place.push((0, step.inputs[0]));
        }
        _ => {}
    }
}

/// Bytes that a step needs while it runs, beyond its inputs and outputs.
pub(crate) fn workspace_bytes(step: &Step) -> u64 {
    match &step.kernel {
        Kernel::Dot(dot) => dot.workspace_bytes(),
        Kernel::Convolution(conv) => conv.workspace_bytes(),
        Kernel::ScatterAdd { lookup, dtype, .. } => lookup.workspace_bytes(Class::of(*dtype)),
        Kernel::Collective { collective: Collective::AllReduce { .. }, shape, group_size, .. } => {
            let class = step.outputs[0].class();
            (class.bytes() * chunk_elements(shape.iter().product(), *group_size)) as u64
        }
        _ => 0,
    }
}

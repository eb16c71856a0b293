//! The kernels that a plan's programs launch on NVIDIA GPUs, as one CUDA source: what NVRTC compiles there.
//!
//! Equal kernels are there once, with the bodies that launch them. Matmuls and convolutions are those of libraries; what else has no
//! text yet is named at the end.

use altiplano_ir::kernels::kernels;
use altiplano_ir::program::Programs;
use altiplano_runtime::loops::{cuda, launches};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// One CUDA source with all kernels of all programs.
pub fn kernels_text(programs: &Programs) -> String {
    // By name: who launches it, what it computes, how it is launched, and the text.
    let mut texts: BTreeMap<String, (BTreeSet<String>, String, cuda::Text)> = BTreeMap::new();
    let mut missing: BTreeMap<String, u64> = BTreeMap::new();
    for body in programs.programs.iter().flat_map(|p| &p.bodies) {
        let written: BTreeSet<_> = body.writes.iter().map(|w| w.1).collect();
        for kernel in kernels(&body.graph, &written, false) {
            let made = match launches(&body.graph, &kernel) {
                Ok(made) => made,
                Err(why) => {
                    *missing.entry(why.op.to_string()).or_default() += 1;
                    continue;
                }
            };
            let ops: BTreeSet<&str> = kernel.nodes.iter().map(|&v| body.graph.node(v).op.name()).collect();
            let ops = ops.into_iter().collect::<Vec<_>>().join(", ");
            for launch in made {
                match cuda::text(&launch) {
                    Ok(text) => {
                        let known = texts.entry(text.name.clone());
                        known.or_insert_with(|| (BTreeSet::new(), ops.clone(), text)).0.insert(body.name.clone());
                    }
                    Err(why) => *missing.entry(why.to_string()).or_default() += 1,
                }
            }
        }
    }
    let mut out = format!("// {} kernels\n\n{}", texts.len(), cuda::PRELUDE);
    for (bodies, ops, text) in texts.values() {
        let bodies = bodies.iter().cloned().collect::<Vec<_>>().join(", ");
        let (x, y) = text.threads;
        let _ = write!(out, "\n// {bodies}\n// {ops}\n// {} blocks of {x} x {y} threads\n{}", text.blocks, text.source);
    }
    for (what, count) in missing {
        let _ = write!(out, "\n// no text: {what} ({count})");
    }
    out.truncate(out.trim_end().len());
    out
}

//! Prints the kernels that a plan's programs launch on NVIDIA GPUs as one CUDA source, the input of NVRTC.
//!
//! Equal kernels appear once, with the bodies that launch them. Matmuls are a library's; kernels that gather and copy
//! for them are included. Ops without a text are listed at the end.

use altiplano_ir::program::Programs;
use altiplano_runtime::loops::cuda;
use altiplano_runtime::tape::{Launched, Options, Unprepared, launched_by, ordered};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// One CUDA source with all kernels of all programs.
pub fn kernels_text(programs: &Programs) -> String {
    // By name: the launching bodies, the computation, the launch configuration, and the text.
    let mut texts: BTreeMap<String, (BTreeSet<String>, String, cuda::Text)> = BTreeMap::new();
    let mut missing: BTreeMap<String, u64> = BTreeMap::new();
    for program in &programs.programs {
        let kernels = ordered(program, Options::default().gathers_ahead);
        let (launched, without) = launched_by(program, &kernels);
        for Unprepared::Op { op, .. } in without {
            *missing.entry(op.to_string()).or_default() += 1;
        }
        for Launched { body, node, launch } in launched {
            let (body, of_body) = (&program.bodies[body], &kernels[body]);
            let kernel = of_body.iter().find(|kernel| kernel.nodes.last() == Some(&node));
            let alone = [node];
            let nodes = kernel.map_or(&alone[..], |kernel| &kernel.nodes);
            let ops: BTreeSet<&str> = nodes.iter().map(|&v| body.graph.node(v).op.name()).collect();
            let ops = ops.into_iter().collect::<Vec<_>>().join(", ");
            match cuda::text(&launch) {
                Ok(text) => {
                    let known = texts.entry(text.name.clone());
                    known.or_insert_with(|| (BTreeSet::new(), ops, text)).0.insert(body.name.clone());
                }
                Err(why) => *missing.entry(why.to_string()).or_default() += 1,
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

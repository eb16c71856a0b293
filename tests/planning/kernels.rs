//! The kernels of real plans as loop programs: on every device they compute the programs' nodes, and their text is
//! deterministic.

use crate::common::{Scratch, succeeds};
use altiplano::ir::graph::{Graph, ValueId};
use altiplano::ir::interpret::run_mesh;
use altiplano::ir::kernels::{Kernel, KernelKind, kernels};
use altiplano::ir::mesh::Mesh;
use altiplano::ir::tensor::Tensor;
use altiplano::ir::types::TensorType;
use altiplano::runtime::loops::interpret::{Memory, run};
use altiplano::runtime::loops::{Coordinate, Source, launches};
use altiplano::{kernels_text, load_plan, programs};
use std::collections::BTreeSet;

/// Synthetic elements: small integers, and reals for which roots and logarithms are defined.
fn values(ty: &TensorType, seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    Tensor::from_fn(ty.clone(), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let unit = (state >> 40) as f64 / (1u64 << 24) as f64;
        if ty.dtype.is_float() { 0.25 + unit } else { ty.dtype.wrap((unit * 3.0).floor()) }
    })
}

/// Compares a kernel's launches with its nodes on each device of the mesh; returns false if it has none.
fn agrees(graph: &Graph, kernel: &Kernel, mesh: &Mesh) -> bool {
    if !matches!(kernel.kind, KernelKind::Fused { .. } | KernelKind::Indexed) {
        return false;
    }
    let made = launches(graph, kernel).unwrap_or_else(|why| panic!("{why}"));
    let (part, map) = kernel.part(graph);
    let given = |v: ValueId, device: u32| values(part.ty(v), u64::from(v.0 + 1000 * device) + 1);
    let expected = run_mesh(&part, mesh, given);
    for device in 0..mesh.num_devices() {
        let mut memory = Memory::new();
        for (&v, &here) in &map {
            let of_device = &expected[here.index()][device as usize];
            match part.node(here).op.is_leaf() {
                true => memory.insert(Source::Value(v), of_device.data.clone()),
                false => memory.insert(Source::Constant(v), of_device.data.clone()),
            };
        }
        for launch in &made {
            let at = mesh.coordinates(device);
            let along = |coordinate: &Coordinate| match coordinate {
                Coordinate::Along(axes) => mesh.index_along(axes, &at),
                Coordinate::Start => panic!("no kernel of nodes has tiles"),
            };
            let coordinates: Vec<u64> = launch.coordinates.iter().map(along).collect();
            run(launch, &coordinates, &mut memory);
        }
        for w in &kernel.writes {
            let (expected, got) = (&expected[map[w].index()][device as usize].data, &memory[&Source::Value(*w)]);
            let near = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-9 * a.abs().max(1.0);
            let wrong = expected.iter().zip(got).position(|(&a, &b)| !near(a, b));
            assert!(wrong.is_none() && expected.len() == got.len(), "{w} = {}: {wrong:?}", graph.node(*w).op.name());
        }
    }
    true
}

#[test]
fn kernels_compute_what_their_nodes_do() {
    let scratch = Scratch::new();
    let path = scratch.path("plan.json").display().to_string();
    let model = "examples/models/gpt-small-demo.mlir";
    let mut compared = 0;
    for degrees in [&["--dp", "2", "--tp", "2"][..], &["--pp", "2", "--tp", "2", "--zero", "3", "--recompute", "full"]]
    {
        let fixed =
            ["plan", model, "--cluster", "local:4", "--global-batch", "4", "--num-microbatches", "2", "-o", &path];
        succeeds(&[&fixed[..], degrees].concat());
        let plan = load_plan(path.as_ref()).expect("a plan that was just written");
        let programs = programs(&plan).expect("a plan has programs");
        let text = kernels_text(&programs);
        assert_eq!(text, kernels_text(&programs));
        assert!(!text.contains("no text"), "{}", text.lines().last().unwrap_or_default());
        // Equal layers share kernels, so test each once.
        let mut seen: BTreeSet<String> = BTreeSet::new();
        for program in &programs.programs {
            for body in &program.bodies {
                let written: BTreeSet<ValueId> = body.writes.iter().map(|w| w.1).collect();
                for kernel in kernels(&body.graph, &written, false) {
                    let text = |v: &ValueId| format!("{:?} {}", body.graph.node(*v).op, body.graph.ty(*v));
                    let all: Vec<String> = kernel.nodes.iter().map(text).collect();
                    let large = kernel.reads.iter().any(|r| body.graph.ty(r.0).elements() > 1 << 17);
                    if !large && seen.insert(all.join(", ")) {
                        compared += usize::from(agrees(&body.graph, &kernel, &program.mesh));
                    }
                }
            }
        }
    }
    assert!(compared > 60, "{compared} kernels were compared");
}

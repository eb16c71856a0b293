//! Programs whose bodies are joined for a compiler train as those whose bodies are apart.

use crate::common::steps::{Tensors, batch_of};
use crate::common::{Scratch, planned};
use altiplano::ImportOptions;
use altiplano::ir::plan::Plan;
use altiplano::ir::program::Programs;
use altiplano::runtime::{Options, Session};
use altiplano::training::{Training, scalars, start};
use altiplano_xla::join::joined;
use std::path::PathBuf;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 13, "n_positions": 4, "n_embd": 8, "n_layer": 4, "n_head": 4}"#;

/// Losses and weights of three steps on CPU workers.
fn trained(plan: &Plan, programs: &Programs, weights: &Tensors) -> (Vec<f64>, Tensors) {
    let mut session = Session::new(programs, &Options::default()).expect("it runs");
    weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
    let step = |session: &mut Session, number| session.step(&batch_of(plan, number), &scalars(1e-2, number));
    let losses = (1..=3).map(|number| step(&mut session, number).expect("a step").loss).collect();
    let after = weights.keys().map(|name| (name.clone(), session.parameter(name).expect("a parameter"))).collect();
    (losses, after)
}

/// The number of bodies of all programs.
fn bodies(programs: &Programs) -> usize {
    programs.programs.iter().map(|program| program.bodies.len()).sum()
}

#[test]
fn joined_bodies_train_bit_for_bit_as_bodies_apart() {
    let scratch = Scratch::new();
    let file = PathBuf::from(scratch.file("gpt2.json", GPT2));
    let import = ImportOptions { batch: Some(16), sequence: Some(4), ..ImportOptions::default() };
    for (words, joins) in [
        ("local:1", true),
        ("local:2 dp2 tp1 pp1 zero1", true),
        ("local:2 dp2 tp1 pp1 clip", true),
        ("local:2 dp2 tp1 pp1 micro4", true),
        ("local:4 dp2 tp1 pp2 zb micro4", false),
        ("local:2 dp1 tp1 pp2 virtual2 micro4", true),
    ] {
        let plan = planned(&file, &import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let apart = altiplano::programs(&plan).expect("programs");
        let (weights, _) = start(&plan, &Training::default()).expect("weights");
        let mut together = apart.clone();
        together.programs.iter_mut().for_each(|program| *program = joined(program));
        assert_eq!(bodies(&together) < bodies(&apart), joins, "{words}");
        assert!(trained(&plan, &together, &weights) == trained(&plan, &apart, &weights), "{words}: results differ");
    }
}

#[test]
fn steps_that_overlap_are_left_alone() {
    let scratch = Scratch::new();
    let file = PathBuf::from(scratch.file("gpt2.json", GPT2));
    let import = ImportOptions { batch: Some(16), sequence: Some(4), ..ImportOptions::default() };
    let plan = planned(&file, &import, "local:2 dp1 tp1 pp2 micro4 pipedream").expect("a plan");
    let programs = altiplano::programs(&plan).expect("programs");
    assert!(programs.programs.iter().all(|program| joined(program) == *program));
}

//! Plans that are proved, and planted bugs that are not.

mod campaign;
#[path = "../common/mod.rs"]
mod common;
mod mutations;
mod numerics;
mod pairs;

use altiplano::ir::graph::{Graph, ValueId};
use altiplano::ir::plan::Plan;
use altiplano::ir::program::Programs;
use altiplano::programs;
use altiplano_prover::{Gap, prove};
use common::{DEMO, Scratch, altiplano, succeeds};
use mutations::{Mutant, Place, equal, mutants, results};

/// The demo model under many plans.
const OF_DEMO: [&[&str]; 15] = [
    &["--cluster", "local:1"],
    &["--dp", "4"],
    &["--tp", "4"],
    &["--cluster", "local:8", "--dp", "2", "--tp", "2", "--pp", "2"],
    &["--dp", "4", "--zero", "1"],
    &["--dp", "4", "--zero", "2", "--clip-norm", "1"],
    &["--dp", "4", "--zero", "3"],
    &["--dp", "4", "--recompute", "full"],
    &["--pp", "2", "--schedule", "gpipe", "--num-microbatches", "4"],
    &["--pp", "2", "--schedule", "zb-h1", "--num-microbatches", "4", "--clip-norm", "1"],
    &["--pp", "2", "--schedule", "zb-v", "--num-microbatches", "4"],
    &["--pp", "2", "--schedule", "dualpipe-v", "--num-microbatches", "4"],
    &["--pp", "2", "--virtual-stages", "2", "--num-microbatches", "4"],
    &["--tp", "2", "--optimizer", "lamb"],
    &["--dp", "2", "--tp", "2", "--loss-scale", "dynamic", "--clip-norm", "1"],
];

/// Models with other ops: windows, experts, convolutions, a loss that is weighted over the whole batch.
const OF_MODELS: [(&str, &[&str]); 7] = [
    ("windows", &["--tp", "4"]),
    ("moe-switch", &["--tp", "4"]),
    ("moe-sorted", &["--dp", "4"]),
    ("resnet", &["--dp", "4"]),
    ("unet", &["--tp", "4"]),
    ("weighted", &["--dp", "2", "--num-microbatches", "2"]),
    ("state-space", &["--tp", "2"]),
];

/// A plan that the command line makes.
fn planned(model: &str, options: &[&str]) -> (Plan, Programs) {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let mut arguments = vec!["plan", model, "-o", &file];
    arguments.extend(options);
    if !options.contains(&"--cluster") {
        arguments.extend(["--cluster", "local:4"]);
    }
    succeeds(&arguments);
    let plan = altiplano::load_plan(file.as_ref()).expect("a plan");
    let programs = programs(&plan).expect("programs");
    (plan, programs)
}

fn model(name: &str) -> String {
    format!("{}/tests/models/{name}.mlir", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn plans_of_the_demo_model_are_proved() {
    for options in OF_DEMO {
        let (plan, programs) = planned(DEMO, options);
        let proof = prove(&plan, &programs).unwrap_or_else(|gap| panic!("{options:?}: {gap}"));
        assert!(proof.parameters >= plan.graph.trained_parameters().count(), "{options:?}: {proof:?}");
    }
}

#[test]
fn plans_of_other_models_are_proved() {
    for (name, options) in OF_MODELS {
        let (plan, programs) = planned(&model(name), options);
        prove(&plan, &programs).unwrap_or_else(|gap| panic!("{name} with {options:?}: {gap}"));
    }
}

/// A recurrent cell that starts from zeros, and a parameter that the loss does not depend on.
const CELL: &str = r#"module @cell {
  func.func public @main(%arg0: tensor<8x8xf32> loc("params['forget']"), %arg1: tensor<8x8xf32> loc("params['new']"), %arg2: tensor<8xf32> loc("params['unused']"), %arg3: tensor<16x8xf32> loc("x")) -> tensor<f32> {
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %h = stablehlo.constant dense<0.0> : tensor<16x8xf32>
    %0 = stablehlo.dot_general %arg3, %arg0, contracting_dims = [1] x [0] : (tensor<16x8xf32>, tensor<8x8xf32>) -> tensor<16x8xf32>
    %1 = stablehlo.logistic %0 : tensor<16x8xf32>
    %2 = stablehlo.dot_general %arg3, %arg1, contracting_dims = [1] x [0] : (tensor<16x8xf32>, tensor<8x8xf32>) -> tensor<16x8xf32>
    %3 = stablehlo.tanh %2 : tensor<16x8xf32>
    %4 = stablehlo.multiply %1, %h : tensor<16x8xf32>
    %5 = stablehlo.add %4, %3 : tensor<16x8xf32>
    %6 = stablehlo.multiply %1, %5 : tensor<16x8xf32>
    %7 = stablehlo.add %6, %3 : tensor<16x8xf32>
    %8 = stablehlo.multiply %7, %7 : tensor<16x8xf32>
    %9 = stablehlo.reduce(%8 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<16x8xf32>, tensor<f32>) -> tensor<f32>
    return %9 : tensor<f32>
  }
}
"#;

#[test]
fn zeros_are_proved_to_be_zeros() {
    let scratch = Scratch::new();
    let cell = scratch.file("cell.mlir", CELL);
    for options in
        [&["--cluster", "local:1"][..], &["--dp", "2"], &["--tp", "2"], &["--dp", "2", "--num-microbatches", "2"]]
    {
        let options = [options, &["--as-written"]].concat();
        let (plan, programs) = planned(&cell, &options);
        let proof = prove(&plan, &programs).unwrap_or_else(|gap| panic!("{options:?}: {gap}"));
        assert!(proof.parameters >= 3, "{options:?}: {proof:?}");
    }
}

/// The cotangents of chunks are slices of one number, the scale of the loss, in all elements.
#[test]
fn losses_in_chunks_are_proved_when_they_are_scaled() {
    let scratch = Scratch::new();
    let config =
        r#"{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 512}"#;
    let file = scratch.file("config.json", config);
    for degrees in [&["--dp", "8"][..], &["--dp", "4", "--tp", "2"], &["--dp", "2", "--pp", "2", "--tp", "2"]] {
        let of_model = ["--seq", "64", "--cluster", "p3.16xlarge:1", "--global-batch", "64"];
        let options = [&of_model[..], &["--precision", "f16", "--loss-chunks", "4"], degrees].concat();
        let (plan, programs) = planned(&file, &options);
        assert!(plan.loss_scale.is_some(), "{options:?}");
        prove(&plan, &programs).unwrap_or_else(|gap| panic!("{options:?}: {gap}"));
    }
}

/// BERT looks up masked positions in a table that a layer norm computes after residual connections.
#[test]
fn lookups_in_computed_tables_are_proved() {
    let scratch = Scratch::new();
    let config = r#"{"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 64}"#;
    let model = scratch.file("config.json", config);
    for options in [
        &["--tp", "2"][..],
        &["--dp", "2"],
        &["--tp", "2", "--precision", "bf16"],
        &["--dp", "2", "--precision", "f16"],
    ] {
        let options = [&["--seq", "8", "--global-batch", "8"], options].concat();
        let (plan, programs) = planned(&model, &options);
        prove(&plan, &programs).unwrap_or_else(|gap| panic!("{options:?}: {gap}"));
    }
}

/// Returns true if `of` is among the values that `v` is computed from by at most `steps` ops.
fn within(graph: &Graph, v: ValueId, of: ValueId, steps: usize) -> bool {
    v == of || steps > 0 && graph.node(v).operands.iter().any(|o| within(graph, *o, of, steps - 1))
}

/// Returns true if a gap names a planted bug: the changed op, or one at most two ops from it; the changed buffer or the one
/// that it is confused with, or an op at most two ops from where it is read; the program of the changed call.
fn is_located(mutant: &Mutant, before: &Programs, gap: &Gap) -> bool {
    let (program, body) = match mutant.place {
        Place::Schedule { program } => return gap.program.is_none_or(|p| p as usize == program),
        Place::Value { program, body, .. } | Place::Buffer { program, body, .. } => (program, body),
    };
    let (old, new) = (&before.programs[program].bodies[body], &mutant.programs.programs[program].bodies[body]);
    if let Place::Buffer { buffer, other, .. } = mutant.place
        && gap.program == Some(program as u32)
        && gap.buffer.is_some_and(|named| named == buffer || Some(named) == other)
    {
        return true;
    }
    if gap.program != Some(program as u32) || gap.body.as_ref() != Some(&new.name) {
        return false;
    }
    let near = |value: ValueId| {
        let operands = &new.graph.node(value).operands;
        // Where an op was dropped, its place is that which it had.
        let dropped = |v| old.graph.len() == new.graph.len() && within(&old.graph, v, value, 2);
        let is_near = |v| within(&new.graph, v, value, 2) || operands.iter().any(|o| within(&new.graph, v, *o, 1));
        gap.value.is_some_and(|v| is_near(v) || dropped(v))
    };
    match mutant.place {
        Place::Value { value, .. } => near(value),
        Place::Buffer { buffer, .. } => {
            let mut read = new.reads.iter().chain(&old.reads).filter(|r| r.1 == buffer);
            read.any(|r| gap.value.is_some_and(|v| within(&new.graph, v, r.0, 2)))
        }
        Place::Schedule { .. } => false,
    }
}

/// No planted bug is proved, and most are found where they are. A mutant whose results the interpreter cannot tell from
/// the program's is no bug.
#[test]
fn planted_bugs_are_not_proved() {
    let (mut planted, mut located) = (0, 0);
    let plans: [(&str, &[&str]); 4] = [
        (DEMO, OF_DEMO[3]),
        (DEMO, OF_DEMO[9]),
        (&model("moe-switch"), &["--tp", "4"]),
        (&model("weighted"), &["--dp", "2", "--num-microbatches", "2"]),
    ];
    for (name, options) in plans {
        let (plan, programs) = planned(name, options);
        prove(&plan, &programs).unwrap_or_else(|gap| panic!("{name} with {options:?}: {gap}"));
        mutants(&programs, 3, |mutant| match prove(&plan, &mutant.programs) {
            Ok(_) => {
                let (Place::Value { program, body, .. } | Place::Buffer { program, body, .. }) = mutant.place else {
                    panic!("{name}: proved with {} in {:?}", mutant.what, mutant.place);
                };
                let (old, new) = (&programs.programs[program], &mutant.programs.programs[program]);
                let same = equal(&results(old, &old.bodies[body]), &results(new, &new.bodies[body]));
                assert!(same, "{name}: proved with {} in {:?}", mutant.what, mutant.place);
            }
            Err(gap) => {
                planted += 1;
                let found = is_located(&mutant, &programs, &gap);
                located += usize::from(found);
                if !found {
                    println!("elsewhere: {} in {:?}: {gap}", mutant.what, mutant.place);
                }
            }
        });
    }
    assert!(planted >= 500, "only {planted} bugs were planted");
    assert!(located * 100 >= planted * 95, "only {located} of {planted} bugs were located");
}

#[test]
fn a_plan_keeps_its_proof_until_it_changes() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--cluster", "local:4", "--dp", "2", "--tp", "2", "-o", &file]);
    let said = succeeds(&["prove", &file, "-o", &file]);
    assert!(said.contains("proved in") && said.contains("not covered: rounding"), "{said}");
    let text = succeeds(&["inspect", &file]);
    assert!(text.contains("\nProof\nproved in"), "{text}");
    let plan = altiplano::load_plan(file.as_ref()).expect("a plan");
    assert!(plan.proof.is_some());
    let other = Plan { model: "another".into(), ..plan.clone() };
    std::fs::write(&file, other.to_json()).expect("a file");
    assert!(altiplano::load_plan(file.as_ref()).expect("a plan").proof.is_none());
    let mut other = plan;
    other.proof.as_mut().expect("a proof").rules += 1;
    std::fs::write(&file, other.to_json()).expect("a file");
    assert!(altiplano::load_plan(file.as_ref()).expect("a plan").proof.is_none());
}

/// Late gradients are not what one device computes in a step, so such a plan is not proved.
#[test]
fn a_plan_without_a_rule_is_not_proved() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let options = ["--pp", "2", "--schedule", "pipedream", "--num-microbatches", "4"];
    succeeds(&[&["plan", DEMO, "--cluster", "local:2", "-o", &file], &options[..]].concat());
    let output = altiplano(&["prove", &file, "-o", &file]);
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    assert!(output.stderr.starts_with("error: not proved: there is no rule for gradients"), "{}", output.stderr);
    assert!(altiplano::load_plan(file.as_ref()).expect("a plan").proof.is_none());
    assert_eq!(altiplano(&["prove", DEMO]).code, Some(2));
}

#[test]
fn plan_proves_what_it_writes() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let said = succeeds(&["plan", DEMO, "--cluster", "local:4", "--tp", "2", "--prove", "-o", &file]);
    assert!(said.contains("\nProof\nproved in"), "{said}");
    let plan = altiplano::load_plan(file.as_ref()).expect("a plan");
    assert!(plan.proof.is_some());
    let command = plan.made_by.expect("a command").command;
    assert!(!command.contains("--prove"), "{command}");
    let json = succeeds(&["plan", DEMO, "--cluster", "local:4", "--tp", "2", "--prove", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert!(json["proof"]["values"].as_u64() > Some(100), "{}", json["proof"]);
}

#[test]
fn plan_writes_what_it_cannot_prove_and_says_so_once() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let options = ["--pp", "2", "--schedule", "pipedream", "--num-microbatches", "4"];
    let output = altiplano(&[&["plan", DEMO, "--cluster", "local:2", "--prove", "-o", &file], &options[..]].concat());
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    assert_eq!(output.stderr.matches("not proved").count(), 1, "{}", output.stderr);
    assert!(output.stdout.contains("Stages") && !output.stdout.contains("proved in"), "{}", output.stdout);
    assert!(altiplano::load_plan(file.as_ref()).expect("a plan").proof.is_none());
    let output = altiplano(&["plan", DEMO, "--cluster", "local:2", "--prove", "--frontier"]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
}

//! A plan computes what one device computes, and what JAX recorded: plan, lower, run, compare, through the command line.

mod common;

use altiplano::ir::batch::LossKind;
use altiplano::planner::Silent;
use common::{DEMO, Scratch, shared_model, succeeds};

/// The ways to split that are always checked, and what the planner chooses itself.
const PLANS: [&[&str]; 10] = [
    &["--dp", "4"],
    &["--tp", "4"],
    &["--pp", "4"],
    &["--dp", "2", "--tp", "2"],
    &["--dp", "2", "--pp", "2"],
    &["--tp", "2", "--pp", "2"],
    &["--cluster", "local:8", "--dp", "2", "--tp", "2", "--pp", "2"],
    &["--cluster", "local:1"],
    &["--cluster", "local:4"],
    &["--cluster", "local:8"],
];

/// Other choices that change what is computed where.
const CHOICES: [&[&str]; 8] = [
    &["--dp", "4", "--zero", "1"],
    &["--dp", "4", "--zero", "2"],
    &["--dp", "4", "--zero", "3"],
    &["--dp", "4", "--recompute", "full"],
    &["--pp", "2", "--schedule", "gpipe", "--num-microbatches", "4"],
    &["--pp", "4", "--num-microbatches", "8", "--optimizer", "sgd"],
    &["--tp", "2", "--optimizer", "adam", "--global-batch", "16"],
    &["--cluster", "local:3", "--global-batch", "12"],
];

fn agrees(model: &str, options: &[&str], expect: Option<&str>) {
    let mut arguments = vec!["verify", model];
    arguments.extend(options);
    arguments.extend(expect.iter().flat_map(|file| ["--expect", file]));
    let said = succeeds(&arguments);
    assert!(said.contains("the numbers agree"), "{said}");
    assert!(!said.contains("DIFFERS"), "{said}");
}

#[test]
fn the_demo_model_under_every_plan() {
    for options in PLANS {
        agrees(DEMO, options, None);
    }
}

#[test]
fn the_demo_model_under_other_choices() {
    for options in CHOICES {
        agrees(DEMO, options, None);
    }
}

#[test]
fn a_plan_file_stands_alone() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--dp", "2", "--pp", "2", "-o", &file]);
    agrees(&file, &[], None);
}

#[test]
fn a_loss_that_is_not_what_the_plan_calls_it_is_caught() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--pp", "2", "--num-microbatches", "4", "-o", &file]);
    let mut plan = altiplano::load_plan(file.as_ref()).expect("the plan");
    let training = altiplano::training::Training { steps: 1, learning_rate: 1e-3, ..Default::default() };
    for (loss, agrees) in [(LossKind::Mean, true), (LossKind::Sum, false)] {
        plan.loss = loss;
        let verified = altiplano::verify::verify(&plan, &training, None, None, &Silent).expect("both run");
        assert_eq!(verified.failure().is_none(), agrees, "{verified:?}");
    }
}

#[test]
fn half_precision() {
    agrees(DEMO, &["--precision", "bf16", "--dp", "2", "--tp", "2"], None);
}

/// What workers hold is never much more than the plan said, and not much less.
#[test]
fn memory_is_as_predicted() {
    let convolutions = shared_model("wresnet-tiny.mlir");
    for model in [Some(DEMO), convolutions.as_deref()].into_iter().flatten() {
        for options in PLANS.into_iter().filter(|options| !options.contains(&"local:8")) {
            let said = succeeds(&[&["run", model, "--steps", "1"], options].concat());
            let line = said.lines().find(|line| line.starts_with("peak memory")).expect("the line on memory");
            let words: Vec<&str> = line.split_whitespace().collect();
            let before = |word: &str| -> f64 {
                let at = words.iter().position(|w| w.starts_with(word)).expect(word);
                assert_eq!(words[at - 1], "MB", "{line}");
                words[at - 2].parse().expect("a number of megabytes")
            };
            let ratio = before("held") / before("predicted");
            assert!((0.8..1.02).contains(&ratio), "{model} {options:?}: {line}");
        }
    }
}

#[test]
fn gpt2_tiny_as_jax_computes_it() {
    recorded("gpt2-tiny");
}

#[test]
fn llama_tiny_as_jax_computes_it() {
    recorded("llama-tiny");
}

fn recorded(name: &str) {
    let (Some(model), Some(expect)) =
        (shared_model(&format!("{name}.mlir")), shared_model(&format!("{name}.expected.safetensors")))
    else {
        return;
    };
    for options in PLANS {
        agrees(&model, options, Some(&expect));
    }
}

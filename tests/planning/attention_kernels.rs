//! Attention in the bodies of plans is found for compilers that have kernels for it.

use crate::common::{Scratch, planned};
use altiplano::ImportOptions;
use altiplano::ir::attention::{Backward, Dim, Forward, Mask, Pass, WIDEST, find};
use altiplano::ir::plan::{AttentionKernels, Plan};
use altiplano::ir::program::Program;
use altiplano_cost_models::Roofline;
use altiplano_cost_models::kernels::KernelKind;
use altiplano_planner::predict::timing::work;
use altiplano_xla::program::{begun_sums, body_text};
use std::path::PathBuf;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 64, "n_positions": 128, "n_embd": 64, "n_layer": 4, "n_head": 4}"#;
const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}"#;
const BERT: &str = r#"{"model_type": "bert", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}"#;

/// A plan for a model with 16 samples of 128 tokens.
fn plan_of(config: &str, words: &str) -> Plan {
    let scratch = Scratch::new();
    let file = PathBuf::from(scratch.file("model.json", config));
    let import = ImportOptions { batch: Some(16), sequence: Some(128), ..ImportOptions::default() };
    planned(&file, &import, words).unwrap_or_else(|error| panic!("{words}: {error}"))
}

/// The passes of all programs of a plan.
fn passes(config: &str, words: &str) -> (Vec<Forward>, Vec<Backward>) {
    let programs = altiplano::programs(&plan_of(config, words)).expect("programs");
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    programs.programs.iter().for_each(|program| every_operand_is_printed(program, words));
    for pass in programs.programs.iter().flat_map(|program| find(program, WIDEST)).flatten() {
        match pass {
            Pass::Forward(pass) => forward.push(pass),
            Pass::Backward(pass) => backward.push(pass),
        }
    }
    (forward, backward)
}

/// Ops that kernels replace are not printed, so that nothing may use them.
fn every_operand_is_printed(program: &Program, words: &str) {
    for ((body, passes), begun) in program.bodies.iter().zip(find(program, WIDEST)).zip(begun_sums(program)) {
        let text = body_text(program, body, &begun, &passes);
        assert!(text.matches("__cudnn$fmha").count() >= passes.len(), "{words}: {}", body.name);
        let lacks = |line: &&str| ["( ", "(,", ", ,", " , ", ", :"].iter().any(|gap| line.contains(gap));
        assert_eq!(text.lines().find(lacks), None, "{words}: {}", body.name);
    }
}

#[test]
fn attention_of_every_layer_is_found_forward_and_backward() {
    for config in [GPT2, LLAMA] {
        let plans = [
            ("dgx-h100:1/1 bf16", [4].as_slice()),
            ("dgx-h100:1/1 bf16 micro4", &[4]),
            ("dgx-h100:1/2 bf16 dp2 tp1 pp1 zero3", &[4]),
            ("dgx-h100:1/2 bf16 dp1 tp2 pp1", &[2]),
            ("dgx-h100:1/4 bf16 dp2 tp1 pp2 micro4 selective", &[4]),
            // Some samples or some heads on each device.
            ("dgx-h100:1/4 f16 dp1 tp2 pp2 micro4 zb", &[4, 2]),
        ];
        for (words, heads) in plans {
            // Keys and values of so few heads go around a ring, whose rounds are no kernels.
            if config == LLAMA && words.contains("tp2") {
                continue;
            }
            let (forward, backward) = passes(config, words);
            assert_eq!((forward.len(), backward.len()), (4, 4), "{words}");
            let sizes = forward[0].of.sizes;
            assert_eq!((sizes.queries, sizes.keys, sizes.width), (128, 128, 16), "{words}");
            assert!(heads.contains(&(sizes.key_heads * sizes.group)), "{words}");
            assert!(forward.iter().all(|pass| pass.of.mask == Mask::Causal && pass.of.scale == 0.25), "{words}");
            // With weight gradients apart, outputs are read by the body of these alone.
            let again = backward.iter().any(|pass| pass.forward.is_none());
            assert_eq!(again, words.ends_with("zb"), "{words}: forward passes are computed again");
        }
    }
}

/// Queries, keys and values of a model with biases are computed again in the backward pass, after the gradient of values.
#[test]
fn attention_of_values_that_are_made_late_is_found() {
    let (forward, backward) = passes(BERT, "dgx-h100:1/1 bf16");
    assert_eq!((forward.len(), backward.len()), (2, 2));
    assert!(forward.iter().all(|pass| pass.of.mask == Mask::All) && backward.iter().all(|pass| pass.forward.is_some()));
}

#[test]
fn attention_over_a_window_is_found_with_a_mask_of_queries_and_keys() {
    let window = LLAMA.replace("llama\"", "mistral\", \"sliding_window\": 24");
    let (forward, backward) = passes(&window, "dgx-h100:1/2 bf16 dp2 tp1 pp1");
    assert_eq!((forward.len(), backward.len()), (4, 4));
    assert!(backward.iter().all(|pass| pass.forward.is_some()), "forward passes are found again");
    for of in forward.iter().map(|pass| &pass.of).chain(backward.iter().map(|pass| &pass.of)) {
        let Mask::Seen { of, varies } = &of.mask else { panic!("a mask that is no window: {:?}", of.mask) };
        let along = of.dims.iter().zip(varies).filter(|(_, varies)| **varies);
        assert_eq!(along.map(|(dim, _)| *dim).collect::<Vec<_>>(), [Dim::Query, Dim::Key]);
    }
}

#[test]
fn attention_that_is_recomputed_is_found_in_the_backward_pass() {
    let (forward, backward) = passes(GPT2, "dgx-h100:1/1 bf16 recompute");
    assert_eq!(backward.len(), 4);
    assert!(forward.len() > 4, "{} forward passes", forward.len());
}

#[test]
fn attention_without_kernels_is_left_alone() {
    let programs = altiplano::programs(&plan_of(GPT2, "dgx-h100:1/1 bf16")).expect("programs");
    // Heads have 16 elements.
    let count = |widest: u64| find(&programs.programs[0], widest).iter().flatten().count();
    assert_eq!([count(16), count(8)], [8, 0]);
    // Kernels take 16-bit types.
    assert_eq!(passes(GPT2, "dgx-h100:1/1"), (Vec::new(), Vec::new()));
}

#[test]
fn attention_that_is_not_trained_has_forward_passes_alone() {
    let (forward, backward) = passes(LLAMA, "dgx-h100:1/1 bf16 inference");
    assert_eq!((forward.len(), backward.len()), (4, 0));
}

/// Kernels of attention that are expected of a model with software's kernels.
fn expected(config: &str, software: AttentionKernels) -> usize {
    let mut plan = plan_of(config, "dgx-h100:1/1 bf16");
    plan.execution.attention = software;
    let programs = altiplano::programs(&plan).expect("programs");
    let cost = Roofline::new(plan.cluster.groups[0].device.clone());
    let work = work(&programs.programs[0], 0, &plan.execution, &cost);
    let kernels = work.iter().flat_map(|body| &body.kernels);
    kernels.filter(|kernel| matches!(kernel.kind, KernelKind::Attention(_))).count()
}

#[test]
fn predictions_for_xla_have_the_kernels_that_its_programs_call() {
    let [newest, cudnn] = [AttentionKernels::Newest, AttentionKernels::Cudnn];
    assert_eq!(expected(LLAMA, cudnn), expected(LLAMA, newest));
    // cuDNN has no cap on scores.
    let capped = LLAMA.replace("llama\"", "gemma2\", \"head_dim\": 16");
    assert!(expected(&capped, newest) > 0);
    assert_eq!(expected(&capped, cudnn), 0);
}

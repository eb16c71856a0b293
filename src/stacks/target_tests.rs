//! Files of plans that were searched for the stack: they state what was planned, and what the stack demands beside it.

use super::judge::{How, judge_text};
use super::tests::{base, import, model};
use super::*;
use crate::plan;
use altiplano_cost_models::Rooflines;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::{Offload, Plan, Target};
use altiplano_planner::features::parallelism::splits_tokens_between_products;
use altiplano_planner::predict::predict_plan;
use altiplano_planner::{Request, Silent};
use std::path::Path;

fn planned(family: &str, target: Target, change: impl Fn(&mut Request)) -> Plan {
    let mut request = base(family);
    (request.baselines, request.target) = (false, target);
    change(&mut request);
    let plan = plan(&request, &Silent).unwrap_or_else(|e| panic!("{family} for {}: {e}", target.name()));
    // Plan files are refused if their predictions do not follow from the plan.
    let anew = predict_plan(plan.clone(), &Rooflines::of(&plan.cluster)).expect("a prediction");
    assert!(anew.predicted == plan.predicted && anew.stages == plan.stages, "{family} for {}", target.name());
    plan
}

/// Megatron-LM trains experts beside tensor parallelism only with `--sequence-parallel`.
#[test]
fn plans_with_experts_and_tensor_parallelism_split_tokens_as_their_files_say() {
    type Change = fn(&mut Request);
    let changes: [Change; 4] = [
        |r| (r.degrees.tp, r.degrees.ep) = (Some(2), Some(4)),
        // All devices of a stage divide the experts.
        |r| (r.degrees.tp, r.degrees.ep, r.degrees.pp) = (Some(2), Some(4), Some(2)),
        |r| (r.degrees.tp, r.degrees.ep, r.degrees.pp, r.degrees.zero) = (Some(4), Some(4), Some(2), Some(0)),
        |r| (r.degrees.tp, r.degrees.ep) = (Some(2), Some(1)),
    ];
    for change in changes {
        for (target, stack) in [
            (Target::Megatron, &megatron::MEGATRON),
            (Target::Megatron, &megatron_bridge::MEGATRON_BRIDGE),
            (Target::Torchtitan, &torchtitan::TORCHTITAN),
        ] {
            let plan = planned("experts", target, change);
            let written = export(&plan, stack).unwrap_or_else(|e| panic!("{}: {e}", stack.name));
            let (here, there) = (plan.predicted.step_time_s, written.prediction.step_s());
            assert!((there / here - 1.0).abs() < 0.03, "{}: {here} s, as written {there} s", stack.name);
            assert_eq!(written.configuration.sequence_parallel, Some(true), "{}", written.text);
            let says = |name: &str| written.text.contains(name);
            if stack.name == "megatron" {
                assert!(says("--sequence-parallel"), "{}", written.text);
                // The default gathers the tokens of all devices.
                let exchanges = written.configuration.ep() > 1;
                assert_eq!(says("--moe-token-dispatcher-type alltoall"), exchanges, "{}", written.text);
            }
        }
    }
    // A plan that was searched for no stack keeps tokens whole, but the stack does not.
    let plan = planned("experts", Target::Altiplano, |r| (r.degrees.tp, r.degrees.pp) = (Some(2), Some(1)));
    let written = export(&plan, &megatron::MEGATRON).expect("options");
    assert!(written.text.contains("--sequence-parallel"), "{}", written.text);
}

/// Layers of several kinds are dealt out to stages one by one, and each kind of model has its script.
#[test]
fn models_with_layers_of_several_kinds_are_written_as_planned() {
    let models = [
        ("hybrid", None, 8, "pretrain_mamba.py"),
        ("hybrid", Some(2), 8, "pretrain_mamba.py"),
        ("t5", None, 16, "pretrain_t5.py"),
        ("bert", None, 4, "pretrain_bert.py"),
        ("llama", Some(2), 8, "pretrain_gpt.py"),
    ];
    for (family, virtual_stages, layers, script) in models {
        let plan = planned(family, Target::Megatron, |r| {
            (r.degrees.pp, r.degrees.virtual_stages) = (Some(2), virtual_stages);
        });
        let written = export(&plan, &megatron::MEGATRON).unwrap_or_else(|e| panic!("{family}: {e}"));
        let (here, there) = (plan.predicted.step_time_s, written.prediction.step_s());
        assert!((there / here - 1.0).abs() < 0.01, "{family}: {here} s, as written {there} s");
        // Stages of equally many layers need no layout.
        let is_dealt = |dealt: &Vec<u32>| (dealt.len(), dealt.iter().sum()) == (plan.stages.len(), layers);
        assert!(written.configuration.layout.as_ref().is_none_or(is_dealt), "{family}: {}", written.text);
        assert!(written.text.contains(script), "{family}: {}", written.text);
    }
}

/// Devices that split samples between products in place of positions send and hold as much as sequence parallelism.
#[test]
fn samples_that_are_split_between_products_are_sequence_parallelism() {
    let plan = planned("long", Target::Megatron, |r| (r.degrees.tp, r.degrees.cp) = (Some(2), Some(2)));
    let written = export(&plan, &megatron::MEGATRON).expect("options");
    assert_eq!(written.notes, Vec::<String>::new(), "{}", written.text);
    assert_eq!(written.text.contains("--sequence-parallel"), splits_tokens_between_products(&plan.graph, &plan.stages));
    assert!(written.text.contains("--cp-comm-type all_gather"), "{}", written.text);
    assert!(written.text.contains("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun"), "{}", written.text);
}

/// torchtitan deals experts out to devices that shard, so that storage without shards leaves replicas whole experts.
#[test]
fn replicas_for_torchtitan_divide_experts_only_if_they_shard() {
    for zero in [None, Some(0), Some(2)] {
        let plan = planned("experts", Target::Torchtitan, |r| r.degrees.zero = zero);
        let written = export(&plan, &torchtitan::TORCHTITAN).unwrap_or_else(|e| panic!("{zero:?}: {e}"));
        let divides = written.configuration.ep() > written.configuration.tp();
        assert!(!divides || written.configuration.zero != Some(0), "{zero:?}: {}", written.text);
    }
}

/// megatron/training/arguments.py stops without these.
#[test]
fn options_that_megatron_demands_beside_others_are_written() {
    let sharded = planned("wide", Target::Megatron, |r| (r.degrees.zero, r.degrees.pp) = (Some(3), Some(1)));
    let text = export(&sharded, &megatron::MEGATRON).expect("options").text;
    assert!(text.contains("--use-megatron-fsdp") && text.contains("--ckpt-format fsdp_dtensor"), "{text}");
    assert!(!text.contains("CUDA_DEVICE_MAX_CONNECTIONS"), "{text}");
    let text = export(&sharded, &megatron_bridge::MEGATRON_BRIDGE).expect("a recipe").text;
    assert!(text.contains("config.checkpoint.ckpt_format = \"fsdp_dtensor\""), "{text}");

    let offload = Offload { optimizer: true, ..Offload::default() };
    let away = planned("wide", Target::Megatron, |r| (r.offload, r.degrees.zero) = (Some(offload), Some(1)));
    let text = export(&away, &megatron::MEGATRON).expect("options").text;
    assert!(text.contains("--optimizer-cpu-offload") && text.contains("--use-precision-aware-optimizer"), "{text}");
    let text = export(&away, &megatron_bridge::MEGATRON_BRIDGE).expect("a recipe").text;
    assert!(text.contains("config.optimizer.optimizer_offload_fraction = 1.0"), "{text}");
    assert!(text.contains("config.optimizer.use_precision_aware_optimizer = True"), "{text}");
    let alone = planned("wide", Target::Megatron, |r| {
        (r.offload, r.degrees.tp, r.degrees.pp) = (Some(offload), Some(4), Some(2));
    });
    assert_eq!(alone.stages[0].zero, 0, "a single replica shards nothing");
    let written = export(&alone, &megatron::MEGATRON).expect("options");
    assert!(written.text.contains("--use-distributed-optimizer"), "{}", written.text);
    let (here, there) = (alone.predicted.step_time_s, written.prediction.step_s());
    assert!((there / here - 1.0).abs() < 1e-3, "{here} s, as written {there} s");
    let whole = planned("wide", Target::Megatron, |r| {
        (r.offload, r.degrees.zero, r.degrees.dp) = (Some(offload), Some(0), Some(4));
    });
    let error = export(&whole, &megatron::MEGATRON).expect_err("a refusal").to_string();
    assert!(error.contains("distributed optimizer only; plan with --zero 1"), "{error}");
}

#[test]
fn configurations_that_megatron_refuses_are_said_to_be() {
    let judged = |options: &str| {
        let how = How {
            model: Some(model("experts")),
            import: import(),
            cluster: Some("dgx-a100:1".into()),
            only_predict: true,
            ..How::default()
        };
        let text = format!("torchrun pretrain_gpt.py --bf16 --micro-batch-size 1 --global-batch-size 64 {options}");
        judge_text(Path::new("run.sh"), &text, &how)
    };
    let refused = |options: &str, problem: &str| {
        let error = judged(options).err().unwrap_or_else(|| panic!("{options} is judged")).to_string();
        assert!(error.contains(problem), "{options}: {error}");
    };
    let parts = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4";
    refused(
        &format!("{parts} --expert-tensor-parallel-size 4"),
        "experts in 4 parts on 4 tensor-parallel devices each",
    );
    let each = judged(&format!("{parts} --expert-tensor-parallel-size 2")).expect("8 devices hold 4 parts of 2");
    assert!(each.notes.iter().any(|note| note.contains("allgather")), "{:?}", each.notes);
    let exchanged = judged(&format!("{parts} --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"));
    assert_eq!(exchanged.expect("a configuration").notes, Vec::<String>::new());
    // Without parts, nothing is sent to experts.
    let whole = judged("--tensor-model-parallel-size 2 --moe-token-dispatcher-type allgather");
    assert_eq!(whole.expect("a configuration").notes, Vec::<String>::new());
    let beside =
        judged("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap").expect("a configuration");
    assert_eq!(beside.notes, Vec::<String>::new());
    let alone = judged("--tensor-model-parallel-size 2 --tp-comm-overlap").expect("a configuration");
    assert!(alone.notes.iter().any(|note| note.contains("only with sequence parallelism")), "{:?}", alone.notes);
}

/// Changes of a knob come with those that Megatron demands beside them.
#[test]
fn suggested_changes_are_those_that_megatron_runs() {
    let how = How { model: Some(model("experts")), import: import(), ..How::default() };
    let how = How { cluster: Some("dgx-a100:1".into()), ..how };
    let degrees = "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --use-distributed-optimizer";
    let text = format!("torchrun pretrain_gpt.py --bf16 --micro-batch-size 1 --global-batch-size 64 {degrees}");
    let judged = judge_text(Path::new("run.sh"), &text, &how).expect("a configuration");
    assert!(judged.tried > 4, "{}", judged.tried);
    for change in &judged.changes {
        assert_eq!((judged.stack.limit)(&change.configuration), None, "{:?}", change.words);
    }
}

#[test]
fn precision_is_said_once() {
    for (precision, option) in [(DType::BF16, "--bf16"), (DType::F16, "--fp16"), (DType::F32, "")] {
        let mut plan = planned("llama", Target::Megatron, |_| ());
        if precision != DType::BF16 {
            let import = crate::ImportOptions { precision: Some(precision), ..import() };
            let loaded = crate::load_model(&model("llama"), &import).expect("a model");
            let mut request = crate::request(&loaded, crate::load_cluster("dgx-a100:1").expect("a cluster"));
            (request.batch.global, request.target, request.baselines) = (Some(64), Target::Megatron, false);
            plan = crate::plan(&request, &Silent).expect("a plan");
        }
        let text = export(&plan, &megatron::MEGATRON).expect("options").text;
        for known in ["--bf16", "--fp16"] {
            assert_eq!(text.matches(known).count(), usize::from(known == option), "{precision:?}: {text}");
        }
    }
}

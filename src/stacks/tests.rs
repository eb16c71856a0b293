//! Files of all stacks, there and back.

use super::judge::{How, Judgement, judge_text};
use super::*;
use crate::simulate::Simulation;
use crate::{ImportOptions, load_cluster, load_model, plan, request};
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::{Offload, Plan, Schedule, Target, Update};
use altiplano_ir::recompute::{Module, Modules, Recompute};
use altiplano_planner::explain::account::{accounts, of_lanes};
use altiplano_planner::explain::neighbours::neighbours;
use altiplano_planner::features::overlaps::with_overlaps;
use altiplano_planner::features::parallelism::parallelism;
use altiplano_planner::features::scaled_products::with_scaled_factors;
use altiplano_planner::features::target::execution;
use altiplano_planner::predict::predict_plan;
use altiplano_planner::search::fixed_degrees::Degrees;
use altiplano_planner::search::layout::Layout;
use altiplano_planner::search::stated::{Stated, predict_stated};
use altiplano_planner::{Request, Silent};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::Duration;

const CLUSTER: &str = "dgx-a100:1";

/// A decoder of four to eight layers, as a config of Transformers.
pub(super) fn model(family: &str) -> PathBuf {
    let config = match family {
        "gpt2" => {
            r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 8, "vocab_size": 500, "n_positions": 64}"#
        }
        // Its router adds a bias, which is an input without samples, to the score of each expert.
        "biased" => {
            r#"{"model_type": "glm4_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
                "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8,
                "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                "first_k_dense_replace": 0, "norm_topk_prob": true, "routed_scaling_factor": 1.0,
                "vocab_size": 512, "max_position_embeddings": 64}"#
        }
        // Its parameters take longer to send than a message takes to start.
        "large" => {
            r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 4,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 64}"#
        }
        // Its products take longer than their launches.
        "long" => {
            r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 4,
                "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 512, "max_position_embeddings": 2048}"#
        }
        // Most of its bytes are inside blocks.
        "wide" => {
            r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 4,
                "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64}"#
        }
        "llama" => {
            r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
                "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 64}"#
        }
        "hybrid" => {
            r#"{"model_type": "bamba", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
                "num_attention_heads": 8, "num_key_value_heads": 8, "attn_layer_indices": [2, 5], "mamba_n_heads": 8,
                "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "vocab_size": 512}"#
        }
        "t5" => r#"{"model_type": "t5", "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 8, "num_heads": 8}"#,
        "bert" => r#"{"model_type": "bert", "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 4}"#,
        "experts" => {
            r#"{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 4,
                "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "vocab_size": 512, "max_position_embeddings": 2048}"#
        }
        _ => {
            r#"{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
                "num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "vocab_size": 512, "max_position_embeddings": 64}"#
        }
    };
    let folder = std::env::temp_dir().join(format!("altiplano-stacks-{}-{family}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("config.json");
    if !file.exists() {
        let part = folder.join(format!("part-{:?}", std::thread::current().id()));
        std::fs::write(&part, config).expect("a config");
        std::fs::rename(part, &file).expect("a config");
    }
    file
}

pub(super) fn import() -> ImportOptions {
    ImportOptions { sequence: Some(64), batch: Some(64), precision: Some(DType::BF16), ..ImportOptions::default() }
}

/// Experts take long samples, so that their exchange takes longer than its start.
fn import_of(family: &str) -> ImportOptions {
    ImportOptions { sequence: Some(if matches!(family, "experts" | "long" | "t5") { 2048 } else { 64 }), ..import() }
}

pub(super) fn base(family: &str) -> Request {
    let model = load_model(&model(family), &import_of(family)).expect("a model");
    let mut request = request(&model, load_cluster(CLUSTER).expect("a cluster"));
    request.batch.global = Some(64);
    request.training.loss_scale = None;
    request
}

/// The plan that software runs with these choices.
fn configured(stack: &Stack, family: &str, change: impl Fn(&mut Stated)) -> Plan {
    configured_under(stack, family, None, change)
}

/// The same under a schedule.
fn configured_under(stack: &Stack, family: &str, schedule: Option<Schedule>, change: impl Fn(&mut Stated)) -> Plan {
    let mut request = Request { schedule, ..base(family) };
    let mut stated = Stated {
        degrees: Degrees {
            dp: 2,
            tp: 2,
            cp: 1,
            stages: 2,
            virtual_stages: 1,
            num_microbatches: 4,
            zero: 1,
            recompute: Recompute::None,
            layout: Layout::Even,
            experts: 1,
            groups: 1,
            sequence: false,
        },
        ep: 1,
        etp: None,
        blocks: None,
        full_blocks: None,
        splits_positions: true,
    };
    change(&mut stated);
    let zero = Some(stated.degrees.zero);
    request.execution = execution(stack.target, &request.cluster, &request.graph, zero);
    request.target = if stack.target == Target::Megatron { Target::Megatron } else { Target::Altiplano };
    let request =
        if stack.target == Target::Megatron { with_scaled_factors(&request) } else { Cow::Borrowed(&request) };
    let costs = altiplano_cost_models::Rooflines::of(&request.cluster);
    predict_stated(&request, &stated, &costs).expect("a plan")
}

/// Judges a written file, with what its stack leaves to the program.
fn judged(written: &Written, stack: &'static Stack, family: &str) -> Judgement {
    let c = &written.configuration;
    let says = |name: &str| stack.knobs.iter().any(|knob| knob.name.ends_with(name));
    let how = How {
        model: Some(model(family)),
        import: ImportOptions { precision: None, ..import_of(family) },
        cluster: Some(match written.prediction.plan.num_devices() {
            8 => CLUSTER.into(),
            some => format!("dgx-a100/{some}"),
        }),
        micro_batch: c.micro_batch.filter(|_| stack.name == "accelerate"),
        global_batch: c.global_batch.filter(|_| !says("global-batch-size") && !says("global_batch_size")),
        recompute: c.recompute.filter(|_| !write::has_recomputation(stack, c)),
        optimizer: c.optimizer.clone().filter(|_| stack.name == "accelerate"),
        only_predict: true,
        ..How::default()
    };
    judge_text(Path::new("written"), &written.text, &how)
        .unwrap_or_else(|e| panic!("{}: {e}\n{}", stack.name, written.text))
}

/// A written file predicts what it says that it predicts. Returns what the stack cannot say, if it is that.
fn round_trip(plan: &Plan, stack: &'static Stack, family: &str) -> Option<String> {
    let written = match export(plan, stack) {
        Ok(written) => written,
        Err(error) => {
            assert_eq!(error.exit_code(), 2, "{error}");
            return Some(error.to_string());
        }
    };
    let judged = judged(&written, stack, family);
    let of = |prediction: &predict::Prediction| (prediction.step_s(), prediction.peak_bytes());
    let [there, back] = [of(&written.prediction), of(&judged.prediction)];
    let what = || format!("{}: {:?}\n{}\n{:?}", stack.name, written.notes, written.text, judged.configuration);
    assert_eq!(there, back, "{}", what());
    None
}

/// With one tensor-parallel device an expert, tensor-parallel devices hold different experts, whatever the router reads.
#[test]
fn experts_are_dealt_out_as_stated() {
    for family in ["mixtral", "biased"] {
        let plan = configured(&megatron::MEGATRON, family, |s| (s.ep, s.etp, s.degrees.sequence) = (4, Some(1), true));
        for stage in parallelism(&plan) {
            assert_eq!((stage.data, stage.expert, stage.within_expert), (2, 4, 1), "{family}");
        }
    }
}

#[test]
fn plans_for_megatron_come_back_as_they_were() {
    type Change = fn(&mut Stated);
    let changes: [(&str, Change); 10] = [
        ("llama", |_| ()),
        ("wide", |s| s.degrees.sequence = true),
        ("wide", |s| s.splits_positions = false),
        ("llama", |s| s.blocks = Some(vec![3, 5])),
        ("llama", |s| (s.degrees.stages, s.degrees.virtual_stages) = (4, 2)),
        ("llama", |s| s.degrees.recompute = Recompute::Full),
        ("llama", |s| s.full_blocks = Some(2)),
        ("llama", |s| s.splits_positions = false),
        ("llama", |s| (s.degrees.dp, s.degrees.tp, s.degrees.stages, s.degrees.zero) = (4, 1, 2, 0)),
        ("mixtral", |s| (s.degrees.dp, s.degrees.tp, s.degrees.stages, s.ep) = (4, 1, 2, 4)),
    ];
    for (family, change) in changes {
        let plan = configured(&megatron::MEGATRON, family, change);
        for stack in [&megatron::MEGATRON, &megatron_bridge::MEGATRON_BRIDGE] {
            let written = export(&plan, stack).unwrap_or_else(|e| panic!("{e}"));
            // A stack says a plan that was made for it without a note.
            assert_eq!(written.notes, Vec::<String>::new(), "{}", written.text);
            assert_eq!(written.prediction.step_s().to_bits(), plan.predicted.step_time_s.to_bits());
            assert_eq!(round_trip(&plan, stack, family), None);
        }
    }
}

#[test]
fn searched_plans_come_back_as_they_are_written() {
    type Change = fn(&mut Request);
    let changes: [(&str, Change); 5] = [
        ("llama", |_| ()),
        ("llama", |r| (r.degrees.pp, r.degrees.tp) = (Some(2), Some(2))),
        ("llama", |r| (r.degrees.zero, r.degrees.pp, r.recompute) = (Some(3), Some(1), Some(Recompute::Full))),
        ("llama", |r| (r.schedule, r.degrees.pp) = (Some(Schedule::ZbH1), Some(4))),
        ("mixtral", |r| (r.degrees.ep, r.degrees.pp) = (Some(4), Some(1))),
    ];
    let mut said: std::collections::BTreeMap<&str, u32> = Default::default();
    for (family, change) in changes {
        let mut request = base(family);
        (request.baselines, request.allow_microbatch_semantics) = (false, true);
        change(&mut request);
        let plan = plan(&request, &Silent).expect("a plan");
        for stack in STACKS {
            match round_trip(&plan, stack, family) {
                None => *said.entry(stack.name).or_default() += 1,
                Some(refusal) => assert!(refusal.contains("; plan with"), "{refusal}"),
            }
        }
    }
    // Every stack can say some of them.
    assert_eq!(said.len(), STACKS.len(), "{said:?}");
}

/// torchtitan runs `zb-v` by the name that PyTorch gives it; Megatron-LM interleaves the same stages.
#[test]
fn a_pipeline_in_a_v_is_said_by_the_stack_that_runs_it() {
    let mut request = base("llama");
    (request.baselines, request.target) = (false, Target::Torchtitan);
    (request.schedule, request.degrees.pp, request.degrees.tp) = (Some(Schedule::ZbV), Some(2), Some(2));
    // Megatron-LM interleaves no fewer microbatches than lanes.
    request.batch.num_microbatches = Some(2);
    let plan = plan(&request, &Silent).expect("a plan");
    assert_eq!((plan.schedule, plan.virtual_stages), (Schedule::ZbV, 2));
    let written = export(&plan, &torchtitan::TORCHTITAN).expect("a recipe");
    assert!(written.text.contains("ZBVZeroBubble"), "{}", written.text);
    assert!(written.notes.iter().all(|note| !note.contains("schedule")), "{:?}", written.notes);
    assert_eq!(written.prediction.plan.placement, altiplano_ir::plan::Placement::V);
    assert_eq!(round_trip(&plan, &torchtitan::TORCHTITAN, "llama"), None);
    let written = export(&plan, &megatron::MEGATRON).expect("a recipe");
    assert!(written.notes.iter().any(|note| note.contains("schedule zb-v to 1f1b")), "{:?}", written.notes);
    // Three stages a device form no V.
    let three = "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = \"ZBVZeroBubble\"\n\
                 pipeline_parallel_layers_per_stage = 1\n";
    let how = How { model: Some(model("llama")), import: import(), cluster: Some(CLUSTER.into()), ..How::default() };
    let error = judge_text(Path::new("three.toml"), three, &how).err().expect("a refusal").to_string();
    assert!(error.contains("cannot be dealt out"), "{error}");
}

#[test]
fn rounding_has_its_price() {
    let plan = configured(&torchtitan::TORCHTITAN, "llama", |s| (s.degrees.stages, s.degrees.dp) = (1, 4));
    // FSDP shards gradients with the state.
    let written = export(&plan, &torchtitan::TORCHTITAN).expect("a recipe");
    let note = &written.notes[0];
    assert!(note.starts_with("rounded: ZeRO level 1 to 2"), "{note}");
    assert!(note.contains(" a step in place of ") && note.contains(" on a device in place of "), "{note}");
}

#[test]
fn what_a_stack_cannot_say_is_refused_with_the_option() {
    let plan = configured(&megatron::MEGATRON, "llama", |_| ());
    let refusal = |stack: &'static Stack, change: fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        export(&plan, stack).expect_err("a refusal").to_string()
    };
    let table: [(&'static Stack, fn(&mut Plan), &str); 8] = [
        (&deepspeed::DEEPSPEED, |_| (), "--pp 1"),
        (&accelerate::ACCELERATE, |_| (), "--pp 1"),
        (&maxtext::MAXTEXT, |_| (), "--pp 1"),
        (&transformers::TRANSFORMERS, |_| (), "--pp 1"),
        (&megatron::MEGATRON, |p| p.update = Update::Stale, "--update synchronous"),
        (&megatron::MEGATRON, |p| p.schedule = Schedule::PipeDream, "--schedule 1f1b"),
        (
            &torchtitan::TORCHTITAN,
            |p| p.stages.iter_mut().for_each(|s| s.offload = Offload::OPTIMIZER),
            "--offload none",
        ),
        (
            &megatron::MEGATRON,
            |p| p.optimizer = altiplano_ir::optimizer::Optimizer::parse("lamb").unwrap(),
            "--optimizer adamw",
        ),
    ];
    for (stack, change, option) in table {
        let said = refusal(stack, change);
        assert!(
            said.starts_with(&format!("--to {}: ", stack.name)) && said.ends_with(&format!("; plan with {option}")),
            "{said}"
        );
    }
}

fn megatron_text(more: &str) -> String {
    format!(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 8 \\\n  --seq-length 64 --max-position-embeddings 64 --vocab-size 512 --bf16 \\\n  --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 {more}\n"
    )
}

fn how() -> How {
    How { within: Duration::from_secs(60), ..How::default() }
}

#[test]
fn a_command_line_is_judged_in_its_own_words() {
    let text = megatron_text(
        "--tensor-model-parallel-size 8 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    );
    let judgement = judge_text(Path::new("run.sh"), &text, &how()).expect("a judgement");
    assert_eq!(judgement.stack.name, "megatron");
    assert!(judgement.prediction.fits());
    let best = &judgement.changes[0];
    assert!(best.step_s < judgement.prediction.step_s());
    let words: Vec<&String> = judgement.changes.iter().flat_map(|change| &change.words).collect();
    assert!(words.iter().any(|w| w.starts_with("set `--tensor-model-parallel-size")), "{words:?}");
    assert!(words.iter().any(|w| *w == "remove `--recompute-granularity`"), "{words:?}");
    // Together they are faster than alone.
    let together = judgement.together.as_ref().expect("several changes help");
    assert!(together.step_s < best.step_s);
    // A change that is made is predicted as it was said.
    let made = megatron_text("--tensor-model-parallel-size 8");
    let again = judge_text(Path::new("run.sh"), &made, &how()).expect("a judgement");
    let said = judgement.changes.iter().find(|c| c.words.iter().all(|w| w.contains("recompute"))).expect("the change");
    assert_eq!(said.step_s, again.prediction.step_s());
}

#[test]
fn modules_of_selective_recomputation_are_read_predicted_and_said() {
    let of = |more: &str| judge_text(Path::new("run.sh"), &megatron_text(more), &how()).expect("a judgement");
    let peak = |judgement: &Judgement| judgement.prediction.peak_bytes();
    let kept = of("");
    let selective = |words: &str| of(&format!("--recompute-granularity selective --recompute-modules {words}"));
    let with = selective("core_attn mlp moe_act");
    let modules = Modules::default().with(Module::Mlp);
    assert_eq!(with.configuration.recompute_modules, Some(modules));
    assert_eq!(with.prediction.plan.execution.recompute_modules, modules);
    assert!(!with.notes.iter().any(|note| note.contains("recompute-modules")), "{:?}", with.notes);
    assert!(peak(&with) < peak(&kept) && with.prediction.step_s() > kept.prediction.step_s());
    // A model without experts has nothing of theirs to recompute.
    let without = selective("moe shared_experts");
    assert_eq!((peak(&without), without.prediction.step_s()), (peak(&kept), kept.prediction.step_s()));
    let unknown = selective("core_attn unheard_of");
    assert!(unknown.notes.iter().any(|note| note.contains("unheard_of")), "{:?}", unknown.notes);
    // The stack's own words say how to keep what is recomputed without need.
    let words: Vec<&String> = with.changes.iter().flat_map(|change| &change.words).collect();
    assert!(words.iter().any(|w| w.starts_with("set `--recompute-modules core_attn`")), "{words:?}");
}

#[test]
fn sequence_parallelism_keeps_less() {
    let peak = |more: &str| {
        let text = megatron_text(&format!("--tensor-model-parallel-size 8 {more}"));
        let text =
            text.replace("--hidden-size 64", "--hidden-size 4096").replace("--seq-length 64", "--seq-length 2048");
        let text = text.replace("embeddings 64", "embeddings 2048");
        let judgement = judge_text(Path::new("run.sh"), &text, &How { only_predict: true, ..how() });
        judgement.expect("a judgement").prediction.peak_bytes()
    };
    assert!(peak("--sequence-parallel") < peak(""));
}

#[test]
fn a_measured_step_corrects_the_rest() {
    let text = megatron_text("--tensor-model-parallel-size 8");
    let judgement = judge_text(Path::new("run.sh"), &text, &how()).expect("a judgement");
    let measured = 2.0 * judgement.prediction.step_s();
    let json = judgement.json(Some(measured));
    assert_eq!(json["correction"], 2.0);
    let first = &judgement.changes[0];
    let corrected = json["changes"][0]["step_time_s"].as_f64().expect("seconds");
    assert!((corrected / (2.0 * first.step_s) - 1.0).abs() < 1e-12);
    assert!(
        judgement.text(Some(measured)).contains("100 % slower than predicted"),
        "{}",
        judgement.text(Some(measured))
    );
}

#[test]
fn unknown_knobs_are_named_by_line() {
    let text = megatron_text("--fp4-format e2m1 \\\n  --turbo-mode 3 --pipeline-model-parallel-size $PP");
    let error = judge_text(Path::new("run.sh"), &text, &how()).err().expect("a refusal");
    assert_eq!(error.exit_code(), 2);
    let said = error.to_string();
    for line in [
        "run.sh: knobs of megatron that cannot be predicted:",
        "line 3: --fp4-format: products in 4 bits cannot be predicted",
        "line 4: --turbo-mode: is unknown, and may change speed or memory",
        "line 4: --pipeline-model-parallel-size: is `$PP`, which the file does not say",
    ] {
        assert!(said.contains(line), "{said}");
    }
    let refused = |text: &str, problem: &str| {
        let error = judge_text(Path::new("f"), text, &how()).err().expect("a refusal");
        assert!(error.to_string().contains(problem), "{error}");
        assert_eq!(error.exit_code(), 2);
    };
    refused("nothing here", "--stack megatron|");
    refused("{\"train_batch_size\": }", "f:1:22: expected a value, found `}`");
    refused("{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 1}}", "--cluster");
    refused(
        &megatron_text("--tensor-model-parallel-size 3"),
        "3 devices at a time, which do not divide the cluster's 8",
    );
    refused(&megatron_text("").replace("--vocab-size 512", ""), "--vocab-size");
    refused(&megatron_text("").replace("--global-batch-size 64", "--global-batch-size 7"), "7 samples");
}

#[test]
fn stacks_are_found_by_their_knobs() {
    let table = [
        ("{\"train_micro_batch_size_per_gpu\": 4, \"zero_optimization\": {\"stage\": 2}}", "deepspeed"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: 8\n", "accelerate"),
        ("[parallelism]\ntensor_parallel_degree = 2\n[training]\nlocal_batch_size = 4\n", "torchtitan"),
        ("per_device_batch_size: 4\nici_fsdp_parallelism: 8\nremat_policy: 'full'\n", "maxtext"),
        ("python3 -m MaxText.train base.yml ici_fsdp_parallelism=8 per_device_batch_size=4", "maxtext"),
        (
            "def f():\n    cfg.model.tensor_model_parallel_size = 2\n    cfg.train.micro_batch_size = 1\n",
            "megatron-bridge",
        ),
        ("DistributedConfig(tp_size=2)\n", "transformers"),
        ("MODEL_ARGS:\n  --tensor-model-parallel-size: 2\n  --num-layers: 4\n", "megatron"),
        ("torchrun train.py --tensor-model-parallel-size 2", "megatron"),
    ];
    for (text, name) in table {
        let (stack, settings) = recognised(text, None).expect("a stack");
        assert_eq!(stack.name, name, "{text}");
        assert!(stack.read(&settings).is_ok(), "{text}: {:?}", stack.read(&settings).err());
    }
}

#[test]
fn knobs_are_read_into_one_description() {
    let read = |text: &str| {
        let (stack, settings) = recognised(text, None).expect("a stack");
        stack.read(&settings).expect("a configuration")
    };
    let c = read(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n  fsdp_activation_checkpointing: true\n",
    );
    assert_eq!((c.zero, c.shards_by_node, c.recompute, c.devices), (Some(3), true, Some(Recompute::Full), Some(16)));
    let c = read(
        "[parallelism]\ndata_parallel_shard_degree = -1\npipeline_parallel_degree = 4\npipeline_parallel_schedule = \"Interleaved1F1B\"\n[training]\nlocal_batch_size = 8\n[activation_checkpoint]\nmode = \"selective\"\n",
    );
    assert_eq!((c.pp, c.virtual_stages, c.micro_batch, c.zero), (Some(4), Some(2), Some(1), Some(2)));
    assert_eq!((c.recompute, c.shard, c.precision), (Some(Recompute::Selective), None, Some(DType::BF16)));
    let c = read(
        "{\"train_batch_size\": 64, \"bf16\": {\"enabled\": true}, \"zero_optimization\": {\"stage\": 2, \"offload_optimizer\": {\"device\": \"cpu\"}}}",
    );
    assert_eq!((c.global_batch, c.zero, c.offload), (Some(64), Some(2), Offload::OPTIMIZER));
    let c = read(&megatron_text(
        "--use-distributed-optimizer --num-experts 8 --moe-layer-freq '([0]*3+[1]*5)' --moe-ffn-hidden-size 64",
    ));
    assert_eq!((c.zero, c.sequence_parallel, c.clip_norm), (Some(1), Some(false), Some(1.0)));
    assert_eq!(c.model.expert_layers, Some([&[false; 3][..], &[true; 5]].concat()));
    let c = read("per_device_batch_size: 4\nici_fsdp_parallelism: 8\ndcn_data_parallelism: 2\nremat_policy: minimal\n");
    assert_eq!((c.replicate, c.shard, c.device_batch, c.zero), (Some(2), Some(8), Some(4.0), Some(3)));
}

/// Groups of replicas on their nodes gather parameters there, which takes less time and more memory.
#[test]
fn replicas_in_groups_send_and_hold_as_groups_do() {
    let judged = |more: &str| {
        let text = format!(
            "[parallelism]\n{more}\n[training]\nlocal_batch_size = 1\nglobal_batch_size = 64\n[activation_checkpoint]\nmode = \"full\"\n"
        );
        let how = How {
            model: Some(model("large")),
            import: ImportOptions { precision: None, ..import() },
            cluster: Some("p3.16xlarge:4".into()),
            ..how()
        };
        judge_text(Path::new("recipe.toml"), &text, &how).expect("a judgement")
    };
    let whole = judged("data_parallel_replicate_degree = 1\ndata_parallel_shard_degree = 32");
    let groups = judged("data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 8");
    assert!(groups.prediction.step_s() < whole.prediction.step_s());
    assert!(groups.prediction.peak_bytes() > whole.prediction.peak_bytes());
    // The change is found, and predicted as it is judged.
    let knob = "set `parallelism.data_parallel_replicate_degree=4`";
    let change = whole.changes.iter().find(|change| change.words.iter().any(|word| word == knob)).expect("the change");
    assert_eq!((change.step_s, change.peak_bytes), (groups.prediction.step_s(), groups.prediction.peak_bytes()));
}

/// A generator of numbers for choices of tests.
struct Choices(u64);

impl Choices {
    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all[(self.0 >> 33) as usize % all.len()].clone()
    }
}

/// A plan of the search with random options.
fn searched(choices: &mut Choices, family: &str) -> Option<Plan> {
    let mut request = base(family);
    (request.baselines, request.allow_microbatch_semantics) = (false, true);
    request.degrees.pp = choices.of(&[None, Some(1), Some(1), Some(2), Some(4)]);
    request.degrees.tp = choices.of(&[None, Some(1), Some(2), Some(4)]);
    request.degrees.cp = choices.of(&[None, None, None, Some(2)]);
    request.degrees.zero = choices.of(&[None, Some(0), Some(1), Some(2), Some(3)]);
    request.degrees.ep = if family == "mixtral" { choices.of(&[None, Some(2), Some(4)]) } else { None };
    request.degrees.virtual_stages = choices.of(&[None, None, Some(2)]);
    request.recompute = choices.of(&[None, Some(Recompute::None), Some(Recompute::Selective), Some(Recompute::Full)]);
    let named = [Schedule::GPipe, Schedule::ZbH1, Schedule::ZbV, Schedule::PipeDream].map(Some);
    request.schedule = choices.of(&[&[None, None], &named[..]].concat());
    request.offload =
        choices.of(&[Some(Offload::NONE), Some(Offload::NONE), Some(Offload::OPTIMIZER), Some(Offload::ALL)]);
    request.target = choices.of(&Target::ALL);
    if matches!(request.target, Target::Altiplano | Target::Megatron) {
        let more = Modules::default().with(Module::Mlp);
        request.recompute_modules = choices.of(&[None, Some(more), Some(more.with(Module::Experts))]);
    }
    request.training.clip_norm = choices.of(&[None, Some(1.0)]);
    request.batch.global = choices.of(&[Some(16), Some(64), Some(48)]);
    plan(&request, &Silent).ok()
}

/// A plan with random degrees, as software is configured.
fn stated(choices: &mut Choices, family: &str) -> Option<Plan> {
    let mut request = base(family);
    let [tp, lanes, cp, virtual_stages] =
        [choices.of(&[1, 1, 2, 4]), choices.of(&[1, 1, 2, 4]), choices.of(&[1, 1, 1, 2]), choices.of(&[1, 1, 2])];
    // As many microbatches as keep all lanes busy.
    let num_microbatches = choices.of(&[1, 2, 4, 8]);
    let virtual_stages = if lanes > 1 && num_microbatches % lanes == 0 { virtual_stages } else { 1 };
    let dp = 8 / (tp * lanes * cp);
    let blocks = match (family, lanes * virtual_stages) {
        ("llama", 2) => choices.of(&[None, Some(vec![3, 5]), Some(vec![7, 1])]),
        ("llama", 4) => choices.of(&[None, Some(vec![1, 3, 3, 1]), Some(vec![2, 2, 3, 1])]),
        _ => None,
    };
    let splits_positions = choices.of(&[true, true, false]);
    let stated = Stated {
        degrees: Degrees {
            dp,
            tp,
            cp,
            stages: lanes * virtual_stages,
            virtual_stages,
            num_microbatches,
            zero: choices.of(&[0, 1, 2, 3]),
            recompute: choices.of(&Recompute::ALL),
            layout: Layout::Even,
            experts: 1,
            groups: choices.of(&[1, 1, 2]),
            sequence: tp > 1 && splits_positions && choices.of(&[true, false]),
        },
        ep: if family == "mixtral" { choices.of(&[1, 2, 4]) } else { 1 },
        etp: choices.of(&[None, Some(1), Some(tp)]),
        blocks,
        full_blocks: choices.of(&[None, None, Some(0), Some(1), Some(2)]),
        splits_positions,
    };
    let target = choices.of(&Target::ALL);
    request.execution = execution(target, &request.cluster, &request.graph, Some(stated.degrees.zero));
    request.target = if target == Target::Megatron { target } else { Target::Altiplano };
    request.schedule = match virtual_stages {
        2 => choices.of(&[None, Some(Schedule::ZbV)]),
        _ => choices.of(&[None, None, Some(Schedule::GPipe), Some(Schedule::ZbH1)]),
    };
    request.offload =
        choices.of(&[Some(Offload::NONE), Some(Offload::NONE), Some(Offload::OPTIMIZER), Some(Offload::ALL)]);
    request.training.clip_norm = choices.of(&[None, Some(1.0)]);
    let optimizer = choices.of(&["adamw", "adamw", "adam", "sgd", "lamb"]);
    request.training.optimizer = altiplano_ir::optimizer::Optimizer::parse(optimizer).expect("an optimizer");
    let costs = altiplano_cost_models::Rooflines::of(&request.cluster);
    (dp > 0).then(|| predict_stated(&request, &stated, &costs).ok())?
}

/// A module of a plan, or one line about what the target cannot say.
fn module(plan: &Plan, to: crate::export::Stack) -> Option<String> {
    match crate::export::export(plan, to) {
        Ok(exported) => {
            let hash = crate::export::fingerprint(&plan.to_json());
            assert!(exported.text.contains(&hash), "{}: the plan's hash is missing", to.name());
            None
        }
        Err(error) => {
            assert_eq!(error.exit_code(), 2, "{error}");
            Some(error.to_string())
        }
    }
}

/// Stacks with a setting for products in 8 bits say so and predict them again; the others refuse.
#[test]
fn products_in_8_bits_are_written_or_refused() {
    let import = ImportOptions { precision: Some(DType::F8E4M3FN), ..import() };
    let model = load_model(&model("llama"), &import).expect("a model");
    let mut request = request(&model, load_cluster("dgx-h100:1").expect("a cluster"));
    (request.batch.global, request.degrees.dp) = (Some(64), Some(8));
    let plan = plan(&request, &Silent).expect("a plan");
    for stack in STACKS {
        let words = match stack.name {
            "megatron" => "--fp8-format hybrid",
            "megatron-bridge" => "bf16_with_fp8_current_scaling_mixed",
            "maxtext" => "quantization: fp8",
            _ => {
                let refusal = export(&plan, stack).expect_err("a refusal").to_string();
                assert!(refusal.contains("--precision bf16"), "{}: {refusal}", stack.name);
                continue;
            }
        };
        let written = export(&plan, stack).unwrap_or_else(|e| panic!("{}: {e}", stack.name));
        assert!(written.text.contains(words), "{}", written.text);
        let settings = recognised(&written.text, Some(stack)).expect("settings").1;
        let read = stack.read(&settings).expect("what was written");
        assert_eq!((read.eight_bit, read.precision), (true, Some(DType::BF16)), "{}", stack.name);
    }
}

/// Each random plan is written for every target as a file that predicts what it says, or refused in one line.
/// `STACKS_PLANS` sets the number of plans; every eighth is searched, and modules are written of as many.
#[test]
fn random_plans_are_written_or_refused() {
    let count = std::env::var("STACKS_PLANS").ok().and_then(|n| n.parse().ok()).unwrap_or(24);
    let mut choices = Choices(36);
    let mut outcomes: std::collections::BTreeMap<String, u32> = Default::default();
    let mut plans = 0;
    let mut refusals: std::collections::BTreeMap<String, u32> = Default::default();
    let mut refused = |name: &str, refusal: Option<String>| {
        let outcome = if refusal.is_some() { "refused" } else { "written" };
        *outcomes.entry(format!("{name}: {outcome}")).or_default() += 1;
        if let Some(refusal) = refusal {
            assert!(!refusal.contains('\n') && refusal.contains("plan"), "{refusal}");
            *refusals.entry(refusal).or_default() += 1;
        }
    };
    while plans < count {
        let family = choices.of(&["llama", "llama", "mixtral", "gpt2", "wide"]);
        let made = if plans % 8 == 0 { searched(&mut choices, family) } else { stated(&mut choices, family) };
        let Some(plan) = made else { continue };
        for stack in STACKS {
            refused(stack.name, round_trip(&plan, stack, family));
        }
        if plans % 8 < 2 {
            use crate::export::Stack;
            for to in [Stack::Jax, Stack::StableHlo, Stack::Torch] {
                refused(to.name(), module(&plan, to));
            }
        }
        plans += 1;
    }
    println!("{outcomes:#?}\n{refusals:#?}");
    let names = STACKS.iter().map(|stack| stack.name).chain(["jax", "stablehlo", "torch"]);
    let missing: Vec<&str> = names.filter(|name| !outcomes.contains_key(&format!("{name}: written"))).collect();
    assert!(missing.is_empty(), "{missing:?}: {outcomes:?}");
}

/// Public configurations are read, or refused with what is at fault by name.
#[test]
fn public_configurations_are_read_or_refused() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/judged");
    let table = std::fs::read_to_string(folder.join("cases.csv")).expect("the list of cases");
    let mut refused = Vec::new();
    let files: Vec<&str> = table.lines().skip(1).filter_map(|line| line.split(',').next()).collect();
    for file in &files {
        let text = std::fs::read_to_string(folder.join(file)).expect("a configuration");
        let (stack, settings) = recognised(&text, None).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(file.starts_with(stack.name.trim_start_matches("megatron-")), "{file} is read as of {}", stack.name);
        if let Err(error) = stack.read(&settings) {
            refused.push(format!("{file}: {error}"));
        }
    }
    assert!(files.len() >= 30);
    let expected = [
        ("megatron-deepspeed-moe.sh", "--moe-expert-parallel-size"),
        ("accelerate-deepspeed.yaml", "deepspeed_config.deepspeed_config_file"),
    ];
    assert_eq!(refused.len(), expected.len(), "{refused:#?}");
    for (file, knob) in expected {
        let said = refused.iter().find(|line| line.starts_with(file)).unwrap_or_else(|| panic!("{file}: {refused:#?}"));
        assert!(said.contains(knob), "{said}");
    }
}

/// The search may share most parameters among replicas in a stage for which no level of ZeRO was asked.
#[test]
fn the_level_of_zero_is_that_of_the_layouts() {
    let mut request = base("wide");
    (request.degrees.dp, request.degrees.zero) = (Some(8), Some(3));
    let mut plan = plan(&request, &Silent).expect("a plan");
    plan.stages.iter_mut().for_each(|stage| stage.zero = 0);
    assert_eq!(of_plan::configuration(&plan).expect("a configuration").zero, Some(3));
    let answer = crate::report::answer(&plan);
    assert!(answer.starts_with("DP 8 (FSDP) x TP 1"), "{answer}");
}

/// Passes side by side hide the exchange between experts. Megatron-LM says them in a pipeline of several stages a device, and
/// torchtitan under DualPipeV, which overlaps them unless it is told otherwise.
#[test]
fn passes_side_by_side_are_said_and_predicted() {
    let costs = |plan: &Plan| altiplano_cost_models::Rooflines::of(&plan.cluster);
    let with_experts = |stack, schedule, level, pairs_passes| {
        let mut plan = configured_under(stack, "experts", Some(schedule), |s| {
            (s.degrees.stages, s.degrees.virtual_stages, s.ep) = (4, 2, 2);
            (s.degrees.tp, s.degrees.dp, s.degrees.zero, s.degrees.recompute) = (1, 4, 1, level);
        });
        plan.execution.pairs_passes = pairs_passes;
        predict_plan(plan.clone(), &costs(&plan)).expect("a prediction")
    };
    for (stack, schedule, knob) in [
        (&megatron::MEGATRON, Schedule::OneFOneB, "--overlap-moe-expert-parallel-comm"),
        (&megatron_bridge::MEGATRON_BRIDGE, Schedule::OneFOneB, "overlap_moe_expert_parallel_comm = True"),
        (&torchtitan::TORCHTITAN, Schedule::DualPipeV, "pipeline_parallel_expert_parallel_overlap=True"),
    ] {
        let [alone, beside] = [false, true].map(|pairs| with_experts(stack, schedule, Recompute::None, pairs));
        // Pairs of DualPipeV wait for each other, which costs more here than the few of them save.
        let faster = beside.predicted.step_time_s < alone.predicted.step_time_s;
        assert_eq!(faster, schedule == Schedule::OneFOneB, "{}", stack.name);
        for (plan, says) in [(&alone, false), (&beside, true)] {
            let written = export(plan, stack).expect("a configuration");
            let text = written.text.replace('"', "");
            assert_eq!(text.contains(knob), says, "{}: {text}", stack.name);
            // Megatron-Bridge refuses to run shared experts beside their exchange as well, and a recipe may have no overlaps.
            for needed in ["moe_shared_expert_overlap = False", "if config.comm_overlap is None"] {
                let is_bridge = stack.name == megatron_bridge::MEGATRON_BRIDGE.name;
                assert_eq!(text.contains(needed), says && is_bridge, "{}: {text}", stack.name);
            }
            assert_eq!(round_trip(plan, stack, "experts"), None);
        }
        // The search takes the faster one if its target can run it.
        let target = if schedule == Schedule::DualPipeV { Target::Torchtitan } else { Target::Megatron };
        let searched = |target| with_overlaps(Plan { target, ..alone.clone() }, &costs(&alone)).expect("a plan");
        let gains = beside.predicted.step_time_s * 1.02 < alone.predicted.step_time_s;
        let found = searched(target);
        assert_eq!(found.execution.pairs_passes, gains, "{}", stack.name);
        let anew = predict_plan(found.clone(), &costs(&found)).expect("a prediction");
        assert!(anew.predicted == found.predicted && anew.stages == found.stages, "{}", stack.name);
        assert!(!searched(Target::Altiplano).execution.pairs_passes);
        // They save communication, and the parts of a step still add up to it.
        let accounts = accounts(&beside, &costs(&beside)).expect("accounts");
        for account in of_lanes(&beside, &accounts) {
            assert!((account.sum_s() / beside.predicted.step_time_s - 1.0).abs() < 1e-9, "{account:?}");
        }
        let communication_s = |plan: &Plan| plan.stages.iter().map(|s| s.predicted.communication_s).sum::<f64>();
        assert!(communication_s(&beside) < communication_s(&alone));
    }
    // Neither overlaps passes beside full recomputation.
    let full = with_experts(&megatron::MEGATRON, Schedule::OneFOneB, Recompute::Full, true);
    let written = export(&full, &megatron::MEGATRON).expect("a configuration");
    assert!(!written.text.contains("overlap-moe"), "{}", written.text);
    // A file that asks for it nevertheless is predicted without, which a note says.
    let text = written.text.replace("--micro-batch-size", "--overlap-moe-expert-parallel-comm --micro-batch-size");
    let how = How {
        model: Some(model("experts")),
        import: import_of("experts"),
        cluster: Some(CLUSTER.into()),
        only_predict: true,
        ..How::default()
    };
    let asked = judge_text(Path::new("asked.sh"), &text, &how).expect("a judgement");
    assert!(asked.notes.iter().any(|note| note.contains("side by side")), "{:?}", asked.notes);
    assert_eq!(asked.prediction.step_s(), written.prediction.step_s());
    // The plans that `why` compares this one with have their passes side by side as well.
    let beside = with_experts(&megatron::MEGATRON, Schedule::OneFOneB, Recompute::None, true);
    let compared = neighbours(&beside, 0).expect("neighbours");
    assert!(compared.iter().filter_map(|n| n.plan.as_ref().ok()).all(|plan| plan.execution.pairs_passes));
}

/// Devices that split positions have an axis of their own, also where tensor-parallel devices split positions as well.
#[test]
fn context_parallelism_is_written_as_planned() {
    for (cp, tp) in [(2, 1), (2, 2), (4, 2)] {
        let mut request = base("long");
        (request.baselines, request.target) = (false, Target::Megatron);
        (request.degrees.cp, request.degrees.tp, request.degrees.pp) = (Some(cp), Some(tp), Some(1));
        // Software lays a single microbatch out in its own way, which an export says.
        request.batch.num_microbatches = Some(2);
        let plan = plan(&request, &Silent).expect("a plan");
        let written = export(&plan, &megatron::MEGATRON).expect("a configuration");
        for words in [format!("--context-parallel-size {cp}"), format!("--tensor-model-parallel-size {tp}")] {
            assert!(written.text.contains(&words), "{words}: {}", written.text);
        }
        let [planned, as_written] = [plan.predicted.step_time_s, written.prediction.step_s()];
        assert!((as_written / planned - 1.0).abs() < 1e-6, "cp {cp}, tp {tp}: {as_written} in place of {planned}");
        // Its neighbours have layouts that such software runs, but for a head this small, which need not be split.
        for neighbour in neighbours(&plan, 0).expect("neighbours") {
            let Ok(plan) = neighbour.plan else { continue };
            let degrees = parallelism(&plan)[0];
            assert!(degrees.agreement > 0.99, "{}: {degrees:?}", neighbour.change);
        }
    }
}

/// Devices that split features exchange activations beside products, where software can do that: inside a node.
#[test]
fn transfers_beside_products_are_planned_and_said() {
    let planned = |target: Target, cluster: &str, tp: u32| {
        let mut request = base("long");
        request.cluster = load_cluster(cluster).expect("a cluster");
        (request.baselines, request.target) = (false, target);
        (request.degrees.tp, request.degrees.pp) = (Some(tp), Some(1));
        plan(&request, &Silent).expect("a plan")
    };
    for (target, stack, knob) in [
        (Target::Megatron, &megatron::MEGATRON, "--tp-comm-overlap"),
        (Target::Megatron, &megatron_bridge::MEGATRON_BRIDGE, "tp_comm_overlap = True"),
        (Target::Torchtitan, &torchtitan::TORCHTITAN, "enable_async_tensor_parallel = True"),
    ] {
        let beside = planned(target, CLUSTER, 4);
        assert!(beside.execution.overlaps_tensor_parallel, "{}", stack.name);
        let costs = altiplano_cost_models::Rooflines::of(&beside.cluster);
        let execution = altiplano_ir::plan::Execution { overlaps_tensor_parallel: false, ..beside.execution };
        let alone = predict_plan(Plan { execution, ..beside.clone() }, &costs).expect("a prediction");
        assert!(beside.predicted.step_time_s * 1.02 < alone.predicted.step_time_s, "{}", stack.name);
        for (plan, says) in [(&alone, false), (&beside, true)] {
            let written = export(plan, stack).expect("a configuration");
            assert_eq!(written.text.contains(knob), says, "{}: {}", stack.name, written.text);
            let makes = written.text.contains("if config.comm_overlap is None");
            assert_eq!(makes, says && stack.name == megatron_bridge::MEGATRON_BRIDGE.name, "{}", written.text);
            let simulated = Simulation::new(plan.clone(), None).expect("a simulation").text();
            assert_eq!(simulated.contains("transfers beside products"), says, "{simulated}");
            assert_eq!(round_trip(plan, stack, "long"), None);
        }
    }
    for (target, cluster, tp) in
        [(Target::Megatron, CLUSTER, 1), (Target::Megatron, "dgx-a100:2", 16), (Target::Altiplano, CLUSTER, 4)]
    {
        assert!(!planned(target, cluster, tp).execution.overlaps_tensor_parallel, "{target:?} on {cluster}");
    }
}

/// DeepEP sends a token once to each node that has experts for it, so that less crosses between nodes and no less inside.
#[test]
fn tokens_that_are_sent_once_take_less_time_between_nodes_only() {
    let judged = |cluster: &str, text: &str| {
        let how = How {
            model: Some(model("experts")),
            import: import_of("experts"),
            cluster: Some(cluster.into()),
            only_predict: true,
            ..How::default()
        };
        judge_text(Path::new("job.sh"), text, &how).expect("a judgement")
    };
    let text = |tp: u32, dispatcher: &str| {
        format!(
            "--tensor-model-parallel-size {tp} --expert-model-parallel-size 4 --expert-tensor-parallel-size {tp} \
             --sequence-parallel --micro-batch-size 1 --global-batch-size 64 --bf16 --moe-token-dispatcher-type {dispatcher}"
        )
    };
    let [each, once] = ["alltoall", "flex"].map(|how| judged("dgx-a100:4", &text(8, how)));
    assert!(once.prediction.step_s() < each.prediction.step_s(), "{:?}", each.prediction.step_s());
    let [each, inside] = ["alltoall", "flex"].map(|how| judged("dgx-a100:1", &text(2, how)));
    assert_eq!(inside.prediction.step_s(), each.prediction.step_s());
    // The written file says it, and says what it predicts.
    let written = export(&once.prediction.plan, &megatron::MEGATRON).expect("a configuration");
    assert!(written.text.contains("--moe-flex-dispatcher-backend deepep"), "{}", written.text);
    assert_eq!(judged("dgx-a100:4", &written.text).prediction.step_s(), written.prediction.step_s());
    // A recipe that names the library has the dispatcher, and a dump of all settings names both.
    let bridge = |lines: &[&str]| {
        let lines: Vec<String> = lines.iter().map(|line| format!("    config.{line}\n")).collect();
        let text = format!("def recipe(config):\n    config.model.tensor_model_parallel_size = 8\n{}", lines.concat());
        let (stack, settings) = recognised(&text, Some(&megatron_bridge::MEGATRON_BRIDGE)).expect("settings");
        stack.read(&settings).expect("a configuration").sends_tokens_once
    };
    let library = "moe_flex_dispatcher_backend = \"hybridep\"";
    assert_eq!(bridge(&[library]), Some(true));
    for other in ["moe_token_dispatcher_type = \"alltoall\"", "model.moe_token_dispatcher_type = \"alltoall\""] {
        for lines in [[library, other], [other, library]] {
            assert_eq!(bridge(&lines), Some(false), "{lines:?}");
        }
    }
    assert_eq!(bridge(&["model.moe_token_dispatcher_type = None"]), Some(false));
    // Older versions have another option for it.
    let deepep = judged("dgx-a100:4", &text(8, "flex --moe-enable-deepep"));
    assert_eq!(deepep.prediction.step_s(), once.prediction.step_s());
}

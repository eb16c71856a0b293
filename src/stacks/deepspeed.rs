//! DeepSpeed: a JSON file. It says nothing about recomputation, which the model's own code asks for.

use super::write::Page;
use super::{Configuration, Knob, Stack, Unsayable, bare, noted, number, reads, reads_number, refused, truth};
use crate::stacks::syntax::Syntax;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::{Schedule, Target};
use serde_json::{Map, Value, json};

pub static DEEPSPEED: Stack = Stack {
    name: "deepspeed",
    version: "deepspeed 0.19",
    target: Target::Fsdp,
    shards_by_degree: false,
    syntax: Syntax::Json,
    knobs: KNOBS,
    ignored: IGNORED,
    marks: &["zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"],
    defaults,
    round,
    limit,
    text,
    start: |page| format!("deepspeed {} train.py --deepspeed_config FILE", page.launcher("--num_nodes", "--num_gpus")),
};

const KNOBS: &[Knob] = &[
    number!("train_batch_size", global_batch),
    number!("train_micro_batch_size_per_gpu", micro_batch),
    number!("gradient_accumulation_steps", accumulation),
    Knob {
        name: "zero_optimization.stage",
        read: |c, v| {
            c.zero = Some(super::word(v, &[("0", 0), ("1", 1), ("2", 2), ("3", 3)])?);
            Ok(())
        },
        write: |c| Some(Value::from(c.zero.unwrap_or(0))),
    },
    Knob {
        name: "zero_optimization.overlap_comm",
        read: |c, v| {
            c.overlap = Some(truth(v)?);
            Ok(())
        },
        write: |c| (c.zero.unwrap_or(0) > 0).then_some(Value::Bool(true)),
    },
    Knob {
        name: "zero_optimization.offload_optimizer.device",
        read: |c, v| {
            c.offload.optimizer = match bare(v).as_str() {
                "cpu" => true,
                "none" | "null" => false,
                other => return Err(format!("is {other}, and only cpu and none can be predicted")),
            };
            Ok(())
        },
        write: |c| c.offload.optimizer.then_some(Value::from("cpu")),
    },
    reads!("zero_optimization.offload_param.device", |_, v| match bare(v).as_str() {
        "none" | "null" => Ok(()),
        other => Err(format!("is {other}: parameters in host memory cannot be predicted")),
    }),
    reads!("zero_optimization.cpu_offload", |c, v| {
        c.offload.optimizer = truth(v)?;
        Ok(())
    }),
    Knob {
        name: "zero_hpz_partition_size",
        read: |_, v| match v.as_u64() {
            Some(0 | 1) | None => Ok(()),
            Some(_) => Err("is more than 1: copies of parameters within nodes cannot be predicted".into()),
        },
        write: |_| None,
    },
    reads!("mics_shard_size", |c, v| {
        c.shard = v.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0);
        Ok(())
    }),
    Knob {
        name: "tensor_parallel.autotp_size",
        read: |c, v| (number!("", tp).read)(c, v),
        write: |c| c.tp.filter(|&tp| tp > 1).map(Value::from),
    },
    reads_number!("sequence_parallel_size", cp),
    Knob {
        name: "bf16.enabled",
        read: |c, v| {
            c.precision = if is_on(v)? { Some(DType::BF16) } else { c.precision };
            Ok(())
        },
        write: |c| (c.precision == Some(DType::BF16)).then_some(Value::Bool(true)),
    },
    Knob {
        name: "fp16.enabled",
        read: |c, v| {
            c.precision = if is_on(v)? { Some(DType::F16) } else { c.precision };
            Ok(())
        },
        write: |c| (c.precision == Some(DType::F16)).then_some(Value::Bool(true)),
    },
    Knob {
        name: "gradient_clipping",
        read: |c, v| {
            c.clip_norm = v.as_f64();
            Ok(())
        },
        // Without it, DeepSpeed clips at 1.
        write: |c| Some(Value::from(c.clip_norm.unwrap_or(0.0))),
    },
    Knob {
        name: "optimizer.type",
        read: |c, v| {
            let known = [
                ("Adam", "adam"),
                ("AdamW", "adamw"),
                ("FusedAdam", "adamw"),
                ("DeepSpeedCPUAdam", "adamw"),
                ("Lamb", "lamb"),
                ("SGD", "sgd"),
            ];
            c.optimizer = Some(super::word(v, &known)?.to_string());
            Ok(())
        },
        write: |c| match c.optimizer.as_deref() {
            Some("adam") => Some(Value::from("Adam")),
            Some("lamb") => Some(Value::from("Lamb")),
            Some("sgd") => Some(Value::from("SGD")),
            _ => Some(Value::from("AdamW")),
        },
    },
    noted!("zero_quantized_weights", "gathered parameters have their own type"),
    noted!("zero_quantized_gradients", "reduced gradients have their own type"),
    refused!("compression_training", "cannot be predicted"),
    refused!("sparse_attention", "cannot be predicted"),
    refused!("curriculum_learning.enabled", "changes the length of samples and cannot be predicted"),
    refused!("data_efficiency.enabled", "changes the length of samples and cannot be predicted"),
    refused!("progressive_layer_drop.enabled", "leaves layers out and cannot be predicted"),
    refused!("sparse_gradients", "cannot be predicted"),
    refused!("moe.enabled", "cannot be predicted: the program decides on experts"),
];

/// Sizes of buffers, and settings of the loss, of logs and of tuning.
const IGNORED: &[&str] = &[
    "scheduler*",
    "steps_per_print",
    "wall_clock_breakdown",
    "optimizer.params*",
    "params",
    "tensorboard*",
    "wandb*",
    "csv_monitor*",
    "comms_logger*",
    "flops_profiler*",
    "dump_state",
    "loss_scale*",
    "initial_scale_power",
    "hysteresis",
    "min_loss_scale",
    "auto_cast",
    "zero_allow_untested_optimizer",
    "allgather_bucket_size",
    "reduce_bucket_size",
    "allgather_partitions",
    "reduce_scatter",
    "contiguous_gradients",
    "sub_group_size",
    "stage3_*",
    "round_robin_gradients",
    "offload_optimizer*",
    "offload_param*",
    "elastic_checkpoint",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "prescale_gradients",
    "gradient_predivide_factor",
    "communication_data_type",
    "activation_checkpointing*",
    "aio*",
    "autotuning*",
    "checkpoint*",
    "data_types*",
    "gather_16bit_weights_on_model_save",
    "zero_force_ds_cpu_optimizer",
    "memory_breakdown",
    "seed",
    "disable_allgather",
    "amp*",
    "tensor_parallel*",
    "fp16*",
    "bf16*",
    "comment",
    "_comment",
    "elasticity*",
    "compile*",
    "use_multi_rank_bucket_allreduce",
    "leaf_module",
    "legacy_stage1",
    "grad_hooks",
    "fp32_allreduce",
    "_altiplano*",
    "monitor_config*",
    "dataloader_drop_last",
    "curriculum_learning*",
    "data_efficiency*",
    "progressive_layer_drop*",
    "loco_param*",
    "param_persistence_threshold",
    "timers*",
    "eigenvalue*",
    "hybrid_engine*",
    "num_gpus",
    "zero_optimization",
];

/// `auto` is for the program to fill in, as Transformers does with its default.
fn is_on(v: &Value) -> Result<bool, String> {
    if bare(v) == "auto" { Ok(true) } else { truth(v) }
}

fn defaults(c: &mut Configuration) {
    c.zero = c.zero.or(Some(0));
    c.precision = c.precision.or(Some(DType::F32));
    c.clip_by_default(1.0);
    if c.overlap.is_none() {
        c.overlap = Some(c.zero == Some(3));
    }
    // Two of three batch sizes give the third.
    if let (Some(global), None, None) = (c.global_batch, c.micro_batch, c.accumulation) {
        c.notes.push(format!("train_batch_size: {global} samples are one pass, since nothing says otherwise"));
    }
}

fn round(c: &mut Configuration) {
    // ZeRO shards over all replicas.
    (c.replicate, c.shard) = (Some(1), c.shard.map(|shard| shard * c.replicate.unwrap_or(1)));
    c.drop_even_layout();
    c.schedule = c.schedule.filter(|s| !s.trains()).or(Some(Schedule::OneFOneB));
    c.sequence_parallel = None;
    c.recomputed_layers = None;
    c.overlap = Some(c.zero.unwrap_or(0) > 0);
}

fn limit(c: &Configuration) -> Option<Unsayable> {
    let unsayable = |problem, option| Some(Unsayable { problem, option });
    match () {
        () if c.pp() > 1 => unsayable("DeepSpeed's pipelines are programs, not settings", "--pp 1"),
        () if c.cp() > 1 => unsayable("DeepSpeed's sequence parallelism is a program, not a setting", "--cp 1"),
        () if c.ep() > 1 => unsayable("DeepSpeed's expert parallelism is a program, not a setting", "--ep 1"),
        () if c.tp() > 1 && c.zero == Some(3) => {
            unsayable("DeepSpeed combines tensor parallelism only with ZeRO levels up to 2", "--zero 2")
        }
        () if c.offload.activations => unsayable("DeepSpeed's settings offload no activations", "--offload none"),
        () if c.offload.optimizer && c.zero == Some(0) => {
            unsayable("DeepSpeed offloads the optimizer only with ZeRO", "--zero 1")
        }
        () if !matches!(c.optimizer.as_deref(), None | Some("adam" | "adamw" | "lamb" | "sgd")) => {
            unsayable("DeepSpeed has the optimizers adam, adamw, lamb and sgd", "--optimizer adamw")
        }
        () => None,
    }
}

fn text(page: &Page<'_>) -> String {
    let mut root = Map::new();
    let lines: Vec<Value> = page.heading("").lines().map(Value::from).collect();
    root.insert("_altiplano".into(), Value::Array(lines));
    for (name, value) in &page.settings {
        let mut at = &mut root;
        let mut names = name.split('.').peekable();
        while let Some(name) = names.next() {
            match names.peek() {
                None => drop(at.insert(name.into(), value.clone())),
                Some(_) => {
                    let Value::Object(inner) = at.entry(name).or_insert_with(|| json!({})) else { break };
                    at = inner;
                }
            }
        }
    }
    format!("{:#}\n", Value::Object(root))
}

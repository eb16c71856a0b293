//! torchtitan: a recipe in Python that sets fields of a `Trainer.Config`. Older files are TOML with the same names.

use super::write::{Page, python};
use super::{
    Configuration, Knob, Stack, Unsayable, bare, megatron, noted, number, reads, reads_flag, reads_number, refused,
    truth, word,
};
use crate::stacks::syntax::Syntax;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::{Schedule, Target};
use altiplano_ir::recompute::Recompute;
use serde_json::{Value, json};
use std::fmt::Write;

pub static TORCHTITAN: Stack = Stack {
    name: "torchtitan",
    version: "torchtitan 0.3.0",
    target: Target::Torchtitan,
    shards_by_degree: true,
    syntax: Syntax::Python,
    knobs: KNOBS,
    ignored: IGNORED,
    marks: &[
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "local_batch_size",
        "model_registry",
        "torchtitan",
        "data_parallel_replicate_degree",
    ],
    defaults,
    round,
    limit,
    text,
    start: |page| {
        format!("torchrun {} -m torchtitan.train ...  # with a config that altiplano(config) returns", page.torchrun())
    },
};

const KNOBS: &[Knob] = &[
    number!("parallelism.data_parallel_replicate_degree", replicate),
    number!("parallelism.data_parallel_shard_degree", shard),
    Knob {
        name: "parallelism.fsdp_reshard_after_forward",
        read: |c, v| {
            c.zero = word(v, &[("default", None), ("always", Some(3)), ("never", Some(2))])?;
            Ok(())
        },
        write: |c| match c.zero? {
            3 => Some(Value::from("always")),
            2 => Some(Value::from("never")),
            _ => None,
        },
    },
    number!("parallelism.tensor_parallel_degree", tp),
    Knob {
        name: "parallelism.enable_sequence_parallel",
        read: |c, v| {
            c.sequence_parallel = Some(truth(v)?);
            Ok(())
        },
        write: |c| (c.tp() > 1).then(|| Value::Bool(c.sequence_parallel != Some(false))),
    },
    number!("parallelism.context_parallel_degree", cp),
    number!("parallelism.pipeline_parallel_degree", pp),
    Knob {
        name: "parallelism.pipeline_parallel_schedule",
        read: |c, v| {
            let known = [
                ("1F1B", Schedule::OneFOneB),
                ("Interleaved1F1B", Schedule::OneFOneB),
                ("GPipe", Schedule::GPipe),
                ("ZBVZeroBubble", Schedule::ZbV),
                ("DualPipeV", Schedule::DualPipeV),
            ];
            c.schedule = Some(word(v, &known)?);
            let name = bare(v).to_lowercase();
            c.interleaves = ["interleaved1f1b", "zbvzerobubble", "dualpipev"].contains(&name.as_str());
            Ok(())
        },
        write: |c| {
            (c.pp() > 1).then(|| {
                Value::from(match c.schedule {
                    Some(Schedule::GPipe) => "GPipe",
                    Some(Schedule::ZbV) => "ZBVZeroBubble",
                    Some(Schedule::DualPipeV) => "DualPipeV",
                    _ if c.virtual_stages() > 1 => "Interleaved1F1B",
                    _ => "1F1B",
                })
            })
        },
    },
    Knob {
        name: "parallelism.pipeline_parallel_expert_parallel_overlap",
        read: |c, v| {
            c.pairs_passes = Some(truth(v)?);
            Ok(())
        },
        write: |c| {
            let may_pair = c.schedule == Some(Schedule::DualPipeV) && c.pp() > 1 && c.ep() > 1;
            may_pair.then(|| Value::Bool(c.pairs_passes == Some(true)))
        },
    },
    Knob { name: "parallelism.module_fqns_per_model_part", read: read_parts, write: write_parts },
    reads!("parallelism.pipeline_parallel_layers_per_stage", |c, v| {
        c.layers_per_virtual_stage = if v.is_null() { None } else { Some(super::count(v)?) };
        Ok(())
    }),
    reads!("parallelism.pipeline_parallel_first_stage_less_layers", |c, v| {
        c.counted_ends[0] = word(v, &[("0", false), ("1", true)])?;
        Ok(())
    }),
    reads!("parallelism.pipeline_parallel_last_stage_less_layers", |c, v| {
        c.counted_ends[1] = word(v, &[("0", false), ("1", true)])?;
        Ok(())
    }),
    Knob {
        name: "parallelism.pipeline_parallel_microbatch_size",
        read: |c, v| (number!("", micro_batch).read)(c, v),
        write: |c| c.micro_batch.filter(|_| c.pp() > 1).map(Value::from),
    },
    number!("parallelism.expert_parallel_degree", ep),
    reads!("parallelism.expert_parallel_comm_backend", |c, v| {
        let kinds = [("deepep", true), ("hybridep", true), ("standard", false), ("minimal_async_ep", false)];
        c.sends_tokens_once = if v.is_null() { c.sends_tokens_once } else { Some(word(v, &kinds)?) };
        Ok(())
    }),
    reads_number!("parallelism.expert_tensor_parallel_degree", etp),
    Knob {
        name: "training.local_batch_size",
        read: |c, v| (number!("", local_batch).read)(c, v),
        write: |c| c.local_batch.or(c.micro_batch).map(Value::from),
    },
    reads_number!("training.batch_size", local_batch),
    number!("training.global_batch_size", global_batch),
    reads_number!("training.seq_len", sequence),
    Knob {
        name: "training.max_norm",
        read: |c, v| {
            c.clip_norm = v.as_f64();
            Ok(())
        },
        write: |c| c.clip_norm.map(Value::from),
    },
    reads!("training.enable_cpu_offload", |c, v| {
        if truth(v)? {
            c.offload.optimizer = true;
            c.notes.push("enable_cpu_offload: only the optimizer's state is predicted in host memory".into());
        }
        Ok(())
    }),
    Knob {
        name: "training.mixed_precision_param",
        read: |c, v| {
            c.precision = Some(word(v, &[("bfloat16", DType::BF16), ("float32", DType::F32)])?);
            Ok(())
        },
        write: |c| match c.precision? {
            DType::BF16 => Some(Value::from("bfloat16")),
            _ => Some(Value::from("float32")),
        },
    },
    noted!("training.dtype", "the master copy of parameters is in f32"),
    Knob {
        name: "activation_checkpoint",
        read: |c, v| {
            let known = [
                ("FullAC.Config", Recompute::Full),
                ("SelectiveAC.Config", Recompute::Selective),
                ("FullAC", Recompute::Full),
                ("SelectiveAC", Recompute::Selective),
            ];
            c.recompute = Some(if v.is_null() { Recompute::None } else { word(v, &known)? });
            Ok(())
        },
        write: |_| None,
    },
    reads!("activation_checkpoint.mode", |c, v| {
        let known = [("none", Recompute::None), ("selective", Recompute::Selective), ("full", Recompute::Full)];
        c.recompute = Some(word(v, &known)?);
        Ok(())
    }),
    reads!("activation_checkpoint.selective_ac_option", |c, v| {
        if bare(v) != "op" {
            c.notes.push(format!("selective_ac_option: {} is predicted as op", bare(v)));
        }
        Ok(())
    }),
    reads!("optimizer.name", |c, v| {
        c.optimizer = Some(word(v, &[("AdamW", "adamw"), ("Adam", "adam")])?.to_string());
        Ok(())
    }),
    reads_number!("nproc_per_node", devices_per_node),
    reads_number!("nnodes", nodes),
    reads_number!("ngpu", devices_per_node),
    Knob {
        // A compiler puts transfers beside products.
        write: megatron::write_beside_products,
        ..noted!("compile.enable", "kernels of a compiler are not predicted")
    },
    Knob {
        name: "compile.enable_async_tensor_parallel",
        read: megatron::read_beside_products,
        write: megatron::write_beside_products,
    },
    reads!("parallelism.enable_async_tensor_parallel", megatron::read_beside_products),
    reads!("model.converters", converters),
    reads!("converters", converters),
    // Before converters.
    reads_flag!("float8.enable_float8_linear", eight_bit),
    refused!("parallelism.pipeline_parallel_schedule_csv", "an order of passes in a file cannot be predicted"),
    refused!("pipeline_parallel_split_points", "name the modules of each stage by module_fqns_per_model_part"),
];

const IGNORED: &[&str] = &[
    "job*",
    "profiling*",
    "metrics*",
    "lr_scheduler*",
    "checkpoint*",
    "comm*",
    "debug*",
    "validation*",
    "validator*",
    "dataloader*",
    "experimental*",
    "model.name",
    "model.flavor",
    "model.tokenizer_path",
    "model.hf_assets_path",
    "model.print_after_conversion",
    "model_spec*",
    "hf_assets_path",
    "loss*",
    "steps",
    "optimizer*",
    "dataset*",
    "warmup_steps",
    "seed",
    "deterministic",
    "activation_checkpoint*",
    "mixed_precision_reduce",
    "gc_*",
    "float8*",
    "quantize*",
    "compile*",
    "memory_estimation*",
    "fault_tolerance*",
    "spmd_backend",
    "context_parallel_*",
    "disable_loss_parallel",
    "disable_cuda_graphs",
    "tp_gemm_backend",
    "attn_backend",
    "profiler*",
    "module",
    "config",
    "quantize*",
    "mx*",
    "training.dataset*",
    "training.steps",
    "enable_compiled_autograd",
    "context_parallel_rotate_method",
    "tokenizer*",
    "symm_mem*",
    "debug_moe*",
    "rdzv*",
    "role",
    "tee",
    "local-ranks-filter",
    "training.deterministic",
    "training.seed",
    "training.debug_moe_force_load_balance",
    "job.config_file",
];

/// Modules of each stage by name: layers are counted.
fn read_parts(c: &mut Configuration, v: &Value) -> Result<(), String> {
    let Value::Array(parts) = v else {
        return if v.is_null() { Ok(()) } else { Err("is no list of lists of modules".into()) };
    };
    let layers = |part: &Value| {
        let names = part.as_array().into_iter().flatten();
        names.filter(|name| name.as_str().is_some_and(|name| name.starts_with("layers."))).count() as u32
    };
    c.layout = Some(parts.iter().map(layers).collect());
    Ok(())
}

fn write_parts(c: &Configuration) -> Option<Value> {
    let layout = c.layout.as_ref().filter(|_| c.pp() > 1)?;
    let mut next = 0;
    let part = |(at, count): (usize, &u32)| {
        let first = (at == 0).then(|| "tok_embeddings".to_string());
        let layers = (next..next + count).map(|layer| format!("layers.{layer}"));
        let last = (at + 1 == layout.len()).then(|| ["norm".to_string(), "lm_head".to_string()]);
        let names: Vec<String> = first.into_iter().chain(layers).chain(last.into_iter().flatten()).collect();
        next += count;
        json!(names)
    };
    Some(Value::Array(layout.iter().enumerate().map(part).collect()))
}

/// The converter of linear layers to 8-bit products.
const FLOAT8: &str = "quantize.linear.float8";

/// Reads the list of converters. That of 8-bit products also had the name `float8`.
fn converters(c: &mut Configuration, v: &Value) -> Result<(), String> {
    let names = match v {
        Value::Array(names) => names.iter().map(bare).collect(),
        Value::Null => Vec::new(),
        name => bare(name).split(',').map(|name| name.trim().to_string()).filter(|name| !name.is_empty()).collect(),
    };
    for name in names {
        match name.as_str() {
            FLOAT8 | "float8" => c.eight_bit = true,
            "quantize.linear.mx" | "mx" => {
                c.eight_bit = true;
                c.notes.push(format!("converters: {name} is predicted as {FLOAT8}"));
            }
            _ => return Err(format!("has {name}, and only {FLOAT8} can be predicted")),
        }
    }
    Ok(())
}

fn defaults(c: &mut Configuration) {
    c.precision = c.precision.or(Some(DType::BF16));
    c.local_batch = c.local_batch.or(Some(8));
    c.sequence_parallel = c.sequence_parallel.or(Some(true));
    c.overlaps_tensor_parallel = c.overlaps_tensor_parallel.or(Some(false));
    c.clip_by_default(1.0);
    c.sequence = c.sequence.or(Some(2048));
    if c.pp() > 1 {
        c.micro_batch = c.micro_batch.or(Some(1));
        if c.interleaves && c.virtual_stages.is_none() && c.layout.is_none() && c.layers_per_virtual_stage.is_none() {
            c.virtual_stages = Some(2);
        }
        // Each end of the model counts as a layer where torchtitan deals them out.
        if c.layout.is_none() && c.layers_per_virtual_stage.is_none() {
            c.deals_ends = true;
        }
    } else {
        c.micro_batch = c.local_batch;
    }
    // Unless told otherwise, it overlaps the exchange of experts.
    let pairs = c.schedule == Some(Schedule::DualPipeV) && c.pp() > 1 && c.ep() > 1;
    c.pairs_passes = Some(pairs && c.pairs_passes != Some(false));
    // One replica has nothing to shard.
    let shards = c.shard != Some(1) || c.cp() > 1;
    c.zero = match (shards, c.zero) {
        (false, _) => Some(0),
        (true, None) => Some(usual_level(c)),
        (true, zero) => zero,
    };
}

/// The level of sharded storage unless told otherwise.
fn usual_level(c: &Configuration) -> u8 {
    if c.pp() > 1 { 2 } else { 3 }
}

fn round(c: &mut Configuration) {
    c.round_adam();
    c.schedule = match c.schedule {
        Some(Schedule::GPipe) if c.virtual_stages() == 1 => Some(Schedule::GPipe),
        Some(schedule) if schedule.virtual_stages() == Some(c.virtual_stages()) => Some(schedule),
        Some(schedule) if !schedule.trains() => Some(schedule),
        _ => Some(Schedule::OneFOneB),
    };
    c.recomputed_layers = None;
    let pairs =
        c.schedule == Some(Schedule::DualPipeV) && c.ep() > 1 && c.recompute.unwrap_or_default() == Recompute::None;
    c.pairs_passes = Some(pairs && c.pairs_passes == Some(true));
    if c.zero == Some(1) {
        c.zero = Some(2);
    }
    if c.zero == Some(0) {
        (c.replicate, c.shard) = (c.shard.map(|shard| shard * c.replicate.unwrap_or(1)), Some(1));
        // Devices that split positions always shard among themselves.
        if c.cp() > 1 {
            c.zero = Some(usual_level(c));
        }
    }
    c.overlap = None;
    c.clip_norm = c.clip_norm.or(Some(1.0));
}

fn limit(c: &Configuration) -> Option<Unsayable> {
    let unsayable = |problem, option| Some(Unsayable { problem, option });
    let region = [c.shard.unwrap_or(1), c.cp(), c.tp()].iter().fold(1_u64, |all, &d| all.saturating_mul(d.into()));
    match () {
        () if c.ep() > 1 && region % u64::from(c.ep()) != 0 => {
            unsayable("expert parallelism must divide the devices that shard, split positions and features", "--ep 1")
        }
        () if !c.offload.is_none() => unsayable(
            "torchtitan offloads parameters with the optimizer's state, and both at once only",
            "--offload none",
        ),
        () if !matches!(c.optimizer.as_deref(), None | Some("adam" | "adamw")) => {
            unsayable("torchtitan's recipes have the optimizers adam and adamw", "--optimizer adamw")
        }
        () if c.precision == Some(DType::F16) => unsayable("torchtitan does not compute in f16", "--precision bf16"),
        () => None,
    }
}

fn text(page: &Page<'_>) -> String {
    let c = page.configuration;
    let of = |start: &str| {
        let named = page.settings.iter().filter_map(|(name, value)| Some((name.strip_prefix(start)?, value)));
        named.collect::<Vec<_>>()
    };
    let mut body = String::from("    config.parallelism = ParallelismConfig(\n");
    for (name, value) in of("parallelism.") {
        // Writing to a string does not fail.
        let _ = writeln!(body, "        {name}={},", python(value));
    }
    body += "    )\n";
    for part in ["training", "compile"] {
        for (name, value) in of(&format!("{part}.")) {
            let _ = writeln!(body, "    config.{part}.{name} = {}", python(value));
        }
    }
    let (import, policy) = match c.recompute.unwrap_or_default() {
        Recompute::None => ("", "None"),
        Recompute::Selective => ("SelectiveAC", "SelectiveAC.Config()"),
        Recompute::Full => ("FullAC", "FullAC.Config()"),
    };
    let _ = writeln!(body, "    config.activation_checkpoint = {policy}");
    let import = match import {
        "" => String::new(),
        name => format!("from torchtitan.distributed.activation_checkpoint import {name}\n"),
    };
    format!(
        "{}\nfrom torchtitan.config import ParallelismConfig\n{import}\n\ndef altiplano(config):\n    \"\"\"Sets the plan's choices in a Trainer.Config, such as a function of a config registry returns.\"\"\"\n{body}    return config\n",
        page.heading("# ")
    )
}

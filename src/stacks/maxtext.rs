//! MaxText: a YAML file of options that stand over those of `base.yml`, or the same as words of a command line.

use super::write::{Page, yaml};
use super::{Configuration, Knob, Stack, Unsayable, bare, noted, reads, reads_number, refused, word};
use crate::stacks::syntax::Syntax;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::{Schedule, Target};
use altiplano_ir::recompute::Recompute;
use serde_json::Value;

pub static MAXTEXT: Stack = Stack {
    name: "maxtext",
    version: "maxtext 0.2.5",
    target: Target::Xla,
    shards_by_degree: true,
    syntax: Syntax::Yaml,
    knobs: KNOBS,
    ignored: IGNORED,
    marks: &[
        "ici_fsdp_parallelism",
        "ici_tensor_parallelism",
        "dcn_data_parallelism",
        "per_device_batch_size",
        "MaxText",
        "base_emb_dim",
    ],
    defaults,
    round,
    limit,
    text: |page: &Page<'_>| {
        // The command takes one file, which may name another one.
        yaml(page).replacen("\n\n", "\n\nbase_config: base.yml\n", 1)
    },
    start: |_| "python3 -m maxtext.trainers.pre_train.train FILE model_name=...".to_string(),
};

/// A knob of one degree within or between nodes. Both multiply.
macro_rules! degree {
    ($name:expr, $field:ident) => {
        reads!($name, |c, v| {
            if v.as_i64() != Some(-1) {
                let degree = super::count(v)?;
                c.$field = Some(c.$field.unwrap_or(1).checked_mul(degree).ok_or("is too large")?);
            }
            Ok(())
        })
    };
}

const KNOBS: &[Knob] = &[
    degree!("dcn_data_parallelism", replicate),
    degree!("dcn_fsdp_parallelism", shard),
    degree!("dcn_tensor_parallelism", tp),
    degree!("dcn_context_parallelism", cp),
    degree!("dcn_expert_parallelism", ep),
    degree!("dcn_pipeline_parallelism", pp),
    Knob { write: |c| Some(Value::from(c.replicate.unwrap_or(1))), ..degree!("ici_data_parallelism", replicate) },
    Knob {
        write: |c| Some(Value::from(c.shard.unwrap_or(1) / c.ep().max(1))),
        ..degree!("ici_fsdp_parallelism", shard)
    },
    Knob { write: |c| Some(Value::from(c.tp())), ..degree!("ici_tensor_parallelism", tp) },
    degree!("ici_tensor_sequence_parallelism", tp),
    Knob { write: |c| Some(Value::from(c.cp())), ..degree!("ici_context_parallelism", cp) },
    degree!("ici_sequence_parallelism", cp),
    Knob { write: |c| Some(Value::from(c.ep())), ..degree!("ici_expert_parallelism", ep) },
    Knob { write: |c| Some(Value::from(c.pp())), ..degree!("ici_pipeline_parallelism", pp) },
    Knob {
        name: "per_device_batch_size",
        read: |c, v| {
            c.device_batch = Some(v.as_f64().filter(|size| *size > 0.0).ok_or("is no positive number")?);
            Ok(())
        },
        write: |c| c.device_batch.map(Value::from),
    },
    Knob {
        name: "gradient_accumulation_steps",
        read: |c, v| {
            c.accumulation = Some(super::count(v)?);
            Ok(())
        },
        write: |c| c.accumulation.map(Value::from),
    },
    reads_number!("num_pipeline_microbatches", pipeline_microbatches),
    reads_number!("num_pipeline_repeats", virtual_stages),
    reads_number!("num_layers_per_pipeline_stage", layers_per_virtual_stage),
    Knob {
        name: "remat_policy",
        read: |c, v| {
            let known = [
                ("full", Recompute::Full),
                ("minimal", Recompute::Selective),
                ("minimal_with_context", Recompute::None),
                ("minimal_flash", Recompute::None),
            ];
            c.recompute = Some(word(v, &known)?);
            Ok(())
        },
        write: |c| {
            Some(Value::from(match c.recompute.unwrap_or_default() {
                Recompute::None => "minimal_with_context",
                Recompute::Selective => "minimal",
                Recompute::Full => "full",
            }))
        },
    },
    Knob {
        name: "dtype",
        read: |c, v| {
            c.precision =
                Some(word(v, &[("bfloat16", DType::BF16), ("float16", DType::F16), ("float32", DType::F32)])?);
            Ok(())
        },
        write: |c| {
            Some(Value::from(match c.precision? {
                DType::BF16 => "bfloat16",
                DType::F16 => "float16",
                _ => "float32",
            }))
        },
    },
    Knob {
        name: "optimizer_memory_host_offload",
        read: |c, v| {
            c.offload.optimizer = super::truth(v)?;
            Ok(())
        },
        write: |c| c.offload.optimizer.then_some(Value::Bool(true)),
    },
    reads_number!("max_target_length", sequence),
    Knob {
        name: "opt_type",
        read: |c, v| {
            c.optimizer = Some(word(v, &[("adamw", "adamw"), ("adam_pax", "adamw"), ("sgd", "sgd")])?.to_string());
            Ok(())
        },
        write: |c| Some(Value::from(if c.optimizer.as_deref() == Some("sgd") { "sgd" } else { "adamw" })),
    },
    Knob {
        name: "gradient_clipping_threshold",
        read: |c, v| {
            c.clip_norm = v.as_f64();
            Ok(())
        },
        write: |c| Some(Value::from(c.clip_norm.unwrap_or(0.0))),
    },
    reads!("attention", |c, v| {
        c.fused_attention = if bare(v) == "dot_product" { Some(false) } else { None };
        Ok(())
    }),
    // The model.
    reads_number!("base_emb_dim", model.hidden),
    reads_number!("base_num_query_heads", model.heads),
    reads_number!("base_num_kv_heads", model.kv_heads),
    reads_number!("base_mlp_dim", model.inner),
    reads_number!("base_num_decoder_layers", model.layers),
    reads_number!("head_dim", model.head_size),
    reads_number!("vocab_size", model.vocabulary),
    reads!("logits_via_embedding", |c, v| {
        c.model.untied = !super::truth(v)?;
        Ok(())
    }),
    reads!("decoder_block", |c, v| {
        word(v, &[("llama2", ()), ("mistral", ())])?;
        (c.model.gated, c.model.rms_norm, c.model.rotary) = (true, true, true);
        (c.model.grouped_queries, c.model.untied) = (true, true);
        Ok(())
    }),
    noted!("pipeline_fsdp_ag_once", "parameters are gathered for each microbatch"),
    noted!("shard_exp_on_fsdp", "experts are split as the planner finds best"),
    noted!("context_parallel_load_balance", "positions are split evenly"),
    Knob {
        name: "quantization",
        read: |c, v| {
            c.eight_bit =
                !v.is_null() && word(v, &[("", false), ("fp8", true), ("nanoo_fp8", true), ("fp8_full", true)])?;
            Ok(())
        },
        write: |c| c.eight_bit.then(|| Value::from("fp8")),
    },
    refused!("parameter_memory_host_offload", "parameters in host memory cannot be predicted"),
    reads!("use_qwix_quantization", |_, v| super::truth(v).map(|_| ())),
];

const IGNORED: &[&str] = &[
    "run_name",
    "base_output_directory",
    "dataset_*",
    "steps",
    "enable_checkpointing",
    "hf_*",
    "tokenizer_*",
    "tfds_*",
    "grain_*",
    "eval_*",
    "learning_rate*",
    "log_*",
    "profiler*",
    "model_name",
    "base_config",
    "enable_profiler",
    "async_checkpointing",
    "checkpoint_*",
    "hardware",
    "use_iota_embed",
    "scan_layers",
    "enable_goodput_recording",
    "monitor_goodput",
    "enable_emergency_checkpoint",
    "gcs_metrics",
    "save_config_to_gcs",
    "skip_first_n_steps_for_profiler",
    "packing",
    "reuse_example_batch",
    "sa_*",
    "xla_*",
    "weight_dtype",
    "logits_dot_in_fp32",
    "tensors_on_device",
    "cosine_*",
    "warmup_*",
    "adam_*",
    "normalization_layer_epsilon",
    "rope_*",
    "mlp_activations",
    "max_prefill*",
    "dropout_rate",
    "enable_dropout",
    "custom_mesh*",
    "shardy",
    "vertical_offload",
    "jax_cache_dir",
    "upload_all_profiler_results",
    "metrics_file",
    "load_parameters_path",
    "tokenize_*",
    "trainable_position_size",
    "capacity_factor",
    "megablox",
    "sparse_matmul",
    "dcn_autoregressive*",
    "ici_autoregressive*",
    "dcn_fsdp_transpose*",
    "ici_fsdp_transpose*",
    "dcn_sequence_parallelism",
    "allow_split_physical_axes",
    "num_slices",
    "compile_topology*",
    "per_device_eval*",
    "goodput_*",
    "use_vertex_tensorboard",
    "vertex_*",
    "z_loss_multiplier",
    "mesh_axes",
    "logical_axis_rules",
    "data_sharding",
    "dcn_tensor_transpose*",
    "ici_tensor_transpose*",
    "ici_diloco*",
    "dcn_diloco*",
    "context_parallel_strategy",
    "ici_context_autoregressive*",
    "dcn_context_autoregressive*",
];

fn defaults(c: &mut Configuration) {
    c.precision = c.precision.or(Some(DType::BF16));
    c.recompute = c.recompute.or(Some(Recompute::Full));
    c.sequence = c.sequence.or(Some(2048));
    c.clip_by_default(1.0);
    c.device_batch = c.device_batch.or(Some(12.0));
    // Devices of different experts have samples of their own.
    if let Some(ep) = c.ep.filter(|&ep| ep > 1) {
        c.shard = c.shard.map(|shard| shard.saturating_mul(ep));
    }
    // Devices that no stated axis uses become shards.
    c.zero = Some(if c.shard == Some(1) { 0 } else { 3 });
    if let Some(parts) = c.pipeline_microbatches.filter(|_| c.pp() > 1) {
        // One pass is cut into these.
        let whole = c.accumulation.unwrap_or(1).max(1);
        c.device_batch = c.device_batch.map(|size| size / parts as f64);
        c.accumulation = u32::try_from(parts).ok().and_then(|parts| parts.checked_mul(whole));
    }
}

fn round(c: &mut Configuration) {
    c.round_adam();
    c.drop_even_layout();
    c.schedule = c.schedule.filter(|s| !s.trains()).or(Some(Schedule::OneFOneB));
    c.sequence_parallel = None;
    c.recomputed_layers = None;
    c.overlap = None;
    if c.shard == Some(1) {
        c.zero = Some(0);
    }
    // Sharded storage is that of parameters with all that belongs to them.
    if c.zero.is_some_and(|zero| zero > 0) {
        c.zero = Some(3);
    } else {
        (c.replicate, c.shard) = (c.shard.map(|shard| shard * c.replicate.unwrap_or(1)), Some(1));
    }
    let devices = c.devices_of_replica() as f64;
    c.device_batch = c.micro_batch.map(|samples| samples as f64 / devices);
}

fn limit(c: &Configuration) -> Option<Unsayable> {
    let unsayable = |problem, option| Some(Unsayable { problem, option });
    match () {
        () if c.pp() > 1 => {
            unsayable("MaxText's pipelines go through all stages in a loop, which no plan here does", "--pp 1")
        }
        () if c.ep() > 1 && c.shard.unwrap_or(1) % c.ep() != 0 => {
            unsayable("in MaxText, devices of different experts have samples and shards of their own", "--zero 3")
        }
        () if c.offload.activations => unsayable("MaxText offloads activations by their names", "--offload none"),
        () if !matches!(c.optimizer.as_deref(), None | Some("adam" | "adamw" | "sgd")) => {
            unsayable("MaxText has the optimizers adamw and sgd", "--optimizer adamw")
        }
        () => None,
    }
}

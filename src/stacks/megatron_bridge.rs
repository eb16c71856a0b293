//! Megatron-Bridge: a recipe in Python that sets fields of a `ConfigContainer`.

use super::megatron;
use super::write::{Page, assignments, python};
use super::{Knob, Stack, layout, noted, number, reads, reads_number, truth, word};
use crate::stacks::syntax::Syntax;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::Target;
use altiplano_ir::recompute::Recompute;
use serde_json::Value;

pub static MEGATRON_BRIDGE: Stack = Stack {
    name: "megatron-bridge",
    version: "megatron-core 0.16.1",
    target: Target::Megatron,
    shards_by_degree: false,
    syntax: Syntax::Python,
    knobs: KNOBS,
    ignored: IGNORED,
    marks: &["tensor_model_parallel_size", "pipeline_model_parallel_size", "ConfigContainer", "megatron.bridge"],
    defaults: megatron::defaults,
    round: megatron::round,
    limit: megatron::limit,
    text,
    start: |page| format!("torchrun {} train.py  # which passes altiplano(config) to pretrain", page.torchrun()),
};

const KNOBS: &[Knob] = &[
    number!("model.tensor_model_parallel_size", tp),
    Knob {
        name: "model.sequence_parallel",
        read: |c, v| {
            c.sequence_parallel = Some(truth(v)?);
            Ok(())
        },
        write: |c| Some(Value::Bool(c.sequence_parallel == Some(true) && c.tp() > 1)),
    },
    number!("model.pipeline_model_parallel_size", pp),
    Knob {
        name: "model.virtual_pipeline_model_parallel_size",
        read: |c, v| (number!("", virtual_stages).read)(c, v),
        write: |c| (c.virtual_stages() > 1 && c.layout.is_none()).then(|| Value::from(c.virtual_stages())),
    },
    Knob {
        name: "model.pipeline_model_parallel_layout",
        read: |c, v| {
            // Nested lists have a word for each layer.
            let Value::Array(stages) = v else {
                if v.is_null() {
                    return Ok(());
                }
                c.layout = Some(layout::parse(&super::bare(v))?.layers);
                return Ok(());
            };
            let decoders = |stage: &Value| {
                let words = stage.as_array().into_iter().flatten();
                words.filter(|word| word.as_str().is_some_and(|word| ["decoder", "t"].contains(&word))).count() as u32
            };
            c.layout = Some(stages.iter().map(decoders).collect());
            Ok(())
        },
        write: |c| c.layout.as_ref().map(|layers| Value::from(layout::print(layers))),
    },
    reads!("model.num_layers_in_first_pipeline_stage", |c, v| {
        c.ends[0] = if v.is_null() { None } else { Some(super::count(v)?) };
        Ok(())
    }),
    reads!("model.num_layers_in_last_pipeline_stage", |c, v| {
        c.ends[1] = if v.is_null() { None } else { Some(super::count(v)?) };
        Ok(())
    }),
    reads!("model.account_for_embedding_in_pipeline_split", |c, v| {
        c.counted_ends[0] = truth(v)?;
        Ok(())
    }),
    reads!("model.account_for_loss_in_pipeline_split", |c, v| {
        c.counted_ends[1] = truth(v)?;
        Ok(())
    }),
    number!("model.context_parallel_size", cp),
    Knob { name: "model.cp_comm_type", read: megatron::read_gathering, write: megatron::write_gathering },
    number!("model.expert_model_parallel_size", ep),
    number!("model.expert_tensor_parallel_size", etp),
    Knob {
        name: "model.recompute_granularity",
        read: |c, v| {
            if !v.is_null() {
                let known = [("full", Recompute::Full), ("selective", Recompute::Selective)];
                c.recompute = Some(word(v, &known)?);
            }
            Ok(())
        },
        write: |c| match c.recompute? {
            Recompute::None => Some(Value::Null),
            Recompute::Selective => Some(Value::from("selective")),
            Recompute::Full => Some(Value::from("full")),
        },
    },
    Knob {
        name: "model.recompute_method",
        read: |c, v| {
            c.recompute_block = if v.is_null() { None } else { Some(word(v, &[("uniform", false), ("block", true)])?) };
            Ok(())
        },
        write: |c| {
            let is_full = c.recompute == Some(Recompute::Full);
            is_full.then(|| Value::from(if c.recomputed_layers.is_some() { "block" } else { "uniform" }))
        },
    },
    Knob {
        name: "model.recompute_num_layers",
        read: |c, v| (number!("", recomputed_layers).read)(c, v),
        write: |c| (c.recompute == Some(Recompute::Full)).then(|| Value::from(c.recomputed_layers.unwrap_or(1))),
    },
    Knob {
        name: "model.recompute_modules",
        read: |c, v| {
            let knob = megatron::KNOBS.iter().find(|knob| knob.name == "recompute-modules");
            knob.map_or(Ok(()), |knob| (knob.read)(c, v))
        },
        write: |c| megatron::module_words(c).map(Value::from),
    },
    number!("train.micro_batch_size", micro_batch),
    number!("train.global_batch_size", global_batch),
    Knob {
        name: "ddp.use_distributed_optimizer",
        read: |c, v| {
            c.zero = if truth(v)? { Some(c.zero.unwrap_or(0).max(1)) } else { c.zero };
            Ok(())
        },
        write: |c| Some(Value::Bool(c.zero.unwrap_or(0) > 0)),
    },
    Knob {
        name: "optimizer.use_distributed_optimizer",
        read: |c, v| {
            c.zero = if truth(v)? { Some(c.zero.unwrap_or(0).max(1)) } else { c.zero };
            Ok(())
        },
        write: |c| Some(Value::Bool(c.zero.unwrap_or(0) > 0)),
    },
    Knob {
        name: "ddp.num_distributed_optimizer_instances",
        read: |c, v| (number!("", replicate).read)(c, v),
        write: |c| c.replicate.filter(|&groups| groups > 1 && c.zero.unwrap_or(0) > 0).map(Value::from),
    },
    Knob {
        name: "ddp.overlap_grad_reduce",
        read: |c, v| {
            c.overlap = Some(truth(v)?);
            Ok(())
        },
        write: |c| Some(Value::Bool(c.overlap == Some(true))),
    },
    Knob {
        name: "ddp.overlap_param_gather",
        read: |_, v| truth(v).map(|_| ()),
        write: |c| Some(Value::Bool(c.overlap == Some(true) && c.zero.unwrap_or(0) > 0)),
    },
    Knob {
        name: "model.moe_token_dispatcher_type",
        read: megatron::read_dispatcher,
        write: megatron::write_dispatcher,
    },
    Knob { name: "model.moe_flex_dispatcher_backend", read: megatron::read_backend, write: megatron::write_backend },
    reads!("moe_token_dispatcher_type", megatron::read_dispatcher),
    // A recipe that names the library has the dispatcher, unless it names another.
    reads!("moe_flex_dispatcher_backend", |c, v| {
        c.sends_tokens_once = c.sends_tokens_once.or((!v.is_null()).then_some(true));
        megatron::read_backend(c, v)
    }),
    Knob {
        name: "comm_overlap.overlap_moe_expert_parallel_comm",
        read: |c, v| {
            c.pairs_passes = Some(truth(v)?);
            Ok(())
        },
        write: |c| (c.pairs_passes == Some(true)).then_some(Value::Bool(true)),
    },
    // The library refuses to run both, and some recipes ask for this one.
    Knob {
        name: "model.moe_shared_expert_overlap",
        read: |_, v| truth(v).map(|_| ()),
        write: |c| (c.pairs_passes == Some(true)).then_some(Value::Bool(false)),
    },
    Knob {
        name: "ddp.use_megatron_fsdp",
        read: |_, v| truth(v).map(|_| ()),
        write: |c| (c.zero.unwrap_or(0) > 1).then_some(Value::Bool(true)),
    },
    Knob {
        name: "checkpoint.ckpt_format",
        read: |_, _| Ok(()),
        write: |c| (c.zero.unwrap_or(0) > 1).then(|| Value::from("fsdp_dtensor")),
    },
    Knob {
        name: "ddp.data_parallel_sharding_strategy",
        read: |c, v| {
            let levels = [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3)];
            c.zero = Some(word(v, &levels)?);
            Ok(())
        },
        write: |c| match c.zero? {
            2 => Some(Value::from("optim_grads")),
            3 => Some(Value::from("optim_grads_params")),
            _ => None,
        },
    },
    reads_number!("model.seq_length", sequence),
    reads_number!("dataset.sequence_length", sequence),
    reads_number!("dataset.seq_length", sequence),
    Knob {
        name: "mixed_precision",
        read: |c, v| {
            let known = [
                ("bf16_mixed", (DType::BF16, None)),
                ("bf16", (DType::BF16, None)),
                ("fp16_mixed", (DType::F16, None)),
                ("fp16", (DType::F16, None)),
                ("bf16_with_fp8_current_scaling_mixed", (DType::BF16, Some("tensorwise"))),
                ("bf16_with_fp8_delayed_scaling_mixed", (DType::BF16, Some("delayed"))),
                ("bf16_with_fp8_subchannel_scaling_mixed", (DType::BF16, Some("blockwise"))),
                ("bf16_with_mxfp8_mixed", (DType::BF16, Some("mxfp8"))),
            ];
            let (precision, recipe) = word(v, &known)?;
            (c.precision, c.eight_bit) = (Some(precision), recipe.is_some());
            recipe.map_or(Ok(()), |recipe| megatron::recipe(c, &Value::from(recipe)))
        },
        write: |c| match c.precision? {
            DType::BF16 if c.eight_bit => Some(Value::from("bf16_with_fp8_current_scaling_mixed")),
            DType::BF16 => Some(Value::from("bf16_mixed")),
            DType::F16 => Some(Value::from("fp16_mixed")),
            _ => None,
        },
    },
    Knob {
        name: "optimizer.clip_grad",
        read: |c, v| {
            c.clip_norm = v.as_f64();
            Ok(())
        },
        write: |c| Some(c.clip_norm.map_or(Value::from(0.0), Value::from)),
    },
    Knob {
        name: "optimizer.optimizer",
        read: |c, v| {
            c.optimizer = Some(word(v, &[("adam", "adamw"), ("adamw", "adamw"), ("sgd", "sgd")])?.to_string());
            Ok(())
        },
        write: |c| Some(Value::from(if c.optimizer.as_deref() == Some("sgd") { "sgd" } else { "adam" })),
    },
    Knob {
        name: "optimizer.optimizer_cpu_offload",
        read: |c, v| {
            c.offload.optimizer = truth(v)?;
            Ok(())
        },
        write: |c| c.offload.optimizer.then_some(Value::Bool(true)),
    },
    // Unlike the command line of Megatron-LM, the library offloads nothing by default.
    Knob {
        name: "optimizer.optimizer_offload_fraction",
        read: |c, v| match v.as_f64() {
            Some(part) if part > 0.0 && part < 1.0 => {
                Err("offloads a part of the state, which cannot be predicted".into())
            }
            Some(0.0) => {
                c.offload.optimizer = false;
                Ok(())
            }
            _ => Ok(()),
        },
        write: |c| c.offload.optimizer.then(|| Value::from(1.0)),
    },
    Knob {
        name: "optimizer.use_precision_aware_optimizer",
        read: |_, v| truth(v).map(|_| ()),
        write: |c| c.offload.optimizer.then_some(Value::Bool(true)),
    },
    // Arguments of recipe functions.
    reads_number!("tensor_model_parallel_size", tp),
    reads_number!("pipeline_model_parallel_size", pp),
    reads_number!("virtual_pipeline_model_parallel_size", virtual_stages),
    reads_number!("context_parallel_size", cp),
    reads_number!("expert_model_parallel_size", ep),
    reads_number!("expert_tensor_parallel_size", etp),
    reads_number!("micro_batch_size", micro_batch),
    reads_number!("global_batch_size", global_batch),
    reads_number!("seq_length", sequence),
    reads!("sequence_parallel", |c, v| {
        c.sequence_parallel = Some(truth(v)?);
        Ok(())
    }),
    reads_number!("num_gpus", devices),
    reads_number!("num_nodes", nodes),
    reads_number!("gpus_per_node", devices_per_node),
    // The model.
    reads_number!("model.num_layers", model.layers),
    Knob {
        name: "comm_overlap.tp_comm_overlap",
        read: megatron::read_beside_products,
        write: megatron::write_beside_products,
    },
    noted!("model.mtp_num_layers", "layers that predict further tokens are left out"),
    reads!("model.fp8", megatron::eight_bit),
    reads!("fp8_recipe", megatron::recipe),
];

const IGNORED: &[&str] = &[
    "tokenizer*",
    "logger*",
    "checkpoint*",
    "scheduler*",
    "rng*",
    "dataset*",
    "train_iters",
    "eval_*",
    "log_*",
    "lr*",
    "min_lr",
    "weight_decay",
    "adam_*",
    "dist*",
    "profiling*",
    "rerun*",
    "ft*",
    "straggler*",
    "nvrx*",
    "manual_gc*",
    "comm_overlap*",
    "hf_path",
    "peft*",
    "name",
    "dir",
    "model.gradient_accumulation_fusion",
    "cross_entropy_*",
    "moe_*",
    "apply_rope_fusion",
    "transformer_impl",
    "cuda_graph_*",
    "check_for_*",
    "grad_reduce_in_fp32",
    "average_in_collective",
    "pipeline_dtype",
    "params_dtype",
    "enable_cuda_graph",
    "use_te_rng_tracker",
    "data_paths",
    "mock",
    "blend*",
    "wandb*",
    "align_*",
    "main_*_dtype",
    "exp_avg*",
    "fp8_param_gather",
    "use_mcore*",
    "init_method_std",
    "mtp_loss_scaling_factor",
    "wgrad_*",
    "warmup*",
    "decay*",
    "seed",
    "attention_backend",
    "bias_*",
    "gated_linear_unit",
    "model.qk_layernorm",
    "position_embedding_type",
];

fn text(page: &Page<'_>) -> String {
    let body = assignments(page, "    config.", python);
    let cut = page
        .configuration
        .layout
        .as_ref()
        .map_or(String::new(), |layers| format!("    # Decoder layers of each stage: {layers:?}.\n"));
    // A recipe may leave out this part of the container.
    let (import, overlap) = match page.settings.iter().any(|(name, _)| name.starts_with("comm_overlap.")) {
        true => (
            "from megatron.bridge.training.comm_overlap import CommOverlapConfig\n\n",
            "    if config.comm_overlap is None:\n        config.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)\n",
        ),
        false => ("", ""),
    };
    format!(
        "{}\n{import}\ndef altiplano(config):\n    \"\"\"Sets the plan's choices in a ConfigContainer, such as a recipe of megatron.bridge returns.\"\"\"\n{overlap}{cut}{body}    return config\n",
        page.heading("# ")
    )
}

//! Megatron-LM: options of a command line. The knobs are also those of Megatron-DeepSpeed where the names agree.

use super::write::{Page, shell};
use super::{
    Configuration, Knob, Stack, Unsayable, bare, layout, noted, number, reads, reads_flag, reads_number, refused,
    truth, word,
};
use crate::stacks::syntax::Syntax;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Graph;
use altiplano_ir::op::{Function, Op};
use altiplano_ir::plan::{Offload, Schedule, Target};
use altiplano_ir::recompute::{Module, Modules, Recompute};
use serde_json::Value;

pub static MEGATRON: Stack = Stack {
    name: "megatron",
    version: "megatron-core 0.16.1",
    target: Target::Megatron,
    shards_by_degree: false,
    syntax: Syntax::Shell,
    knobs: KNOBS,
    ignored: IGNORED,
    marks: &["tensor-model-parallel-size", "pipeline-model-parallel-size", "num-attention-heads", "pretrain_gpt"],
    defaults: |c| {
        if c.ep() > 1 && c.sends_tokens_once.is_none() {
            c.notes.push(GATHERS_TOKENS.into());
        }
        defaults(c);
    },
    round,
    limit,
    text: |page| shell(page, "MEGATRON_ARGS"),
    start,
};

/// Megatron asks for one queue of kernels, so that transfers start before the products that they overlap with. Sharded
/// storage and passes side by side want several (megatron/training/arguments.py).
fn start(page: &Page<'_>) -> String {
    let c = page.configuration;
    let queues = (c.tp() > 1 || c.cp() > 1) && c.zero.unwrap_or(0) < 2 && c.pairs_passes != Some(true);
    let environment = if queues { "CUDA_DEVICE_MAX_CONNECTIONS=1 " } else { "" };
    let script = script(&page.plan.graph);
    format!("{environment}torchrun {} {script} \"${{MEGATRON_ARGS[@]}}\" ...", page.torchrun())
}

/// Megatron's script for a kind of model. Attention under a mask of its own counts as causal.
fn script(graph: &Graph) -> &'static str {
    let (mut scans, mut convolves, mut images) = (false, false, false);
    let (mut causal, mut both_ways) = (false, false);
    for node in &graph.nodes {
        match &node.op {
            Op::Convolution(_) if node.ty.rank() > 3 => images = true,
            Op::Convolution(_) => convolves = true,
            Op::Composite(composite) => match composite.function {
                Function::SelectiveScan => scans = true,
                Function::Attention { causal: true, .. } => causal = true,
                Function::Attention { .. } if node.operands.len() > 3 => causal = true,
                Function::Attention { .. } => both_ways = true,
                _ => {}
            },
            _ => {}
        }
    }
    match (causal, both_ways) {
        _ if scans => "pretrain_mamba.py",
        _ if images => "pretrain_vision_classify.py",
        (true, true) => "pretrain_t5.py",
        (false, true) => "pretrain_bert.py",
        // Decoders whose layers are state spaces convolve over positions.
        _ if convolves => "pretrain_mamba.py",
        _ => "pretrain_gpt.py",
    }
}

const GATHERS_TOKENS: &str = "moe-token-dispatcher-type: allgather, the default, is predicted as alltoall";

/// Parallelism, batch and memory, which Megatron-Bridge names alike.
pub const KNOBS: &[Knob] = &[
    number!("tensor-model-parallel-size", tp),
    Knob {
        name: "sequence-parallel",
        read: |c, v| {
            c.sequence_parallel = Some(truth(v)?);
            Ok(())
        },
        write: |c| (c.sequence_parallel == Some(true) && c.tp() > 1).then_some(Value::Bool(true)),
    },
    number!("pipeline-model-parallel-size", pp),
    Knob { name: "pipeline-model-parallel-layout", read: read_layout, write: write_layout },
    Knob {
        name: "num-virtual-stages-per-pipeline-rank",
        read: |c, v| (number!("", virtual_stages).read)(c, v),
        write: |c| (c.virtual_stages() > 1 && c.layout.is_none()).then(|| Value::from(c.virtual_stages())),
    },
    reads_number!("num-layers-per-virtual-pipeline-stage", layers_per_virtual_stage),
    reads!("decoder-first-pipeline-num-layers", |c, v| {
        c.ends[0] = Some(super::count(v)?);
        Ok(())
    }),
    reads!("decoder-last-pipeline-num-layers", |c, v| {
        c.ends[1] = Some(super::count(v)?);
        Ok(())
    }),
    reads!("account-for-embedding-in-pipeline-split", |c, v| {
        c.counted_ends[0] = truth(v)?;
        Ok(())
    }),
    reads!("account-for-loss-in-pipeline-split", |c, v| {
        c.counted_ends[1] = truth(v)?;
        Ok(())
    }),
    number!("context-parallel-size", cp),
    Knob { name: "cp-comm-type", read: read_gathering, write: write_gathering },
    Knob {
        name: "expert-model-parallel-size",
        read: |c, v| (number!("", ep).read)(c, v),
        write: |c| c.ep.filter(|&ep| ep > 1).map(Value::from),
    },
    Knob {
        name: "expert-tensor-parallel-size",
        read: |c, v| (number!("", etp).read)(c, v),
        write: |c| c.etp.filter(|_| c.ep() > 1).map(Value::from),
    },
    number!("micro-batch-size", micro_batch),
    number!("global-batch-size", global_batch),
    Knob {
        name: "use-distributed-optimizer",
        read: |c, v| {
            c.zero = if truth(v)? { Some(c.zero.unwrap_or(0).max(1)) } else { c.zero };
            Ok(())
        },
        write: |c| (c.zero.unwrap_or(0) > 0).then_some(Value::Bool(true)),
    },
    Knob {
        name: "num-distributed-optimizer-instances",
        read: |c, v| (number!("", replicate).read)(c, v),
        write: |c| c.replicate.filter(|&groups| groups > 1 && c.zero.unwrap_or(0) > 0).map(Value::from),
    },
    Knob {
        name: "overlap-grad-reduce",
        read: |c, v| {
            c.overlap = Some(truth(v)?);
            Ok(())
        },
        write: |c| (c.overlap == Some(true)).then_some(Value::Bool(true)),
    },
    Knob {
        name: "overlap-param-gather",
        read: |_, v| truth(v).map(|_| ()),
        write: |c| (c.overlap == Some(true) && c.zero.unwrap_or(0) > 0).then_some(Value::Bool(true)),
    },
    Knob {
        name: "use-megatron-fsdp",
        read: |_, v| truth(v).map(|_| ()),
        write: |c| (c.zero.unwrap_or(0) > 1).then_some(Value::Bool(true)),
    },
    // The only format in which it saves what is sharded so.
    Knob {
        name: "ckpt-format",
        read: |_, _| Ok(()),
        write: |c| (c.zero.unwrap_or(0) > 1).then(|| Value::from("fsdp_dtensor")),
    },
    Knob {
        name: "data-parallel-sharding-strategy",
        read: |c, v| {
            let levels = [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3)];
            c.zero = Some(word(v, &levels)?);
            Ok(())
        },
        write: |c| {
            let name = match c.zero? {
                2 => "optim_grads",
                3 => "optim_grads_params",
                _ => return None,
            };
            Some(Value::from(name))
        },
    },
    Knob {
        name: "overlap-moe-expert-parallel-comm",
        read: |c, v| {
            c.pairs_passes = Some(truth(v)?);
            Ok(())
        },
        write: |c| (c.pairs_passes == Some(true)).then_some(Value::Bool(true)),
    },
    Knob { name: "moe-token-dispatcher-type", read: read_dispatcher, write: write_dispatcher },
    Knob { name: "moe-flex-dispatcher-backend", read: read_backend, write: write_backend },
    reads!("moe-enable-deepep", |c, v| {
        c.sends_tokens_once = if truth(v)? { Some(true) } else { c.sends_tokens_once };
        Ok(())
    }),
    Knob { name: "recompute-granularity", read: read_granularity, write: write_granularity },
    Knob {
        name: "recompute-method",
        read: |c, v| {
            // All layers are recomputed in groups of some, or the first layers of each stage one by one.
            let is_block = word(v, &[("uniform", false), ("block", true)])?;
            c.recompute_block = Some(is_block);
            Ok(())
        },
        write: |c| {
            let is_full = c.recompute == Some(Recompute::Full);
            is_full.then(|| Value::from(if c.recomputed_layers.is_some() { "block" } else { "uniform" }))
        },
    },
    Knob {
        name: "recompute-num-layers",
        read: |c, v| {
            c.recomputed_layers = Some(super::count(v)?);
            Ok(())
        },
        write: |c| (c.recompute == Some(Recompute::Full)).then(|| Value::from(c.recomputed_layers.unwrap_or(1))),
    },
    Knob {
        name: "recompute-modules",
        read: read_modules,
        write: |c| {
            let words = module_words(c)?;
            Some(Value::from(words.join(" ")))
        },
    },
    reads!("recompute-activations", |c, v| {
        c.recompute = if truth(v)? { Some(Recompute::Selective) } else { c.recompute };
        Ok(())
    }),
    Knob {
        name: "bf16",
        read: |c, v| {
            c.precision = if truth(v)? { Some(DType::BF16) } else { c.precision };
            Ok(())
        },
        write: |c| (c.precision == Some(DType::BF16)).then_some(Value::Bool(true)),
    },
    Knob {
        name: "fp16",
        read: |c, v| {
            c.precision = if truth(v)? { Some(DType::F16) } else { c.precision };
            Ok(())
        },
        write: |c| (c.precision == Some(DType::F16)).then_some(Value::Bool(true)),
    },
    Knob {
        name: "optimizer",
        read: read_optimizer,
        write: |c| Some(Value::from(if c.optimizer.as_deref() == Some("sgd") { "sgd" } else { "adam" })),
    },
    Knob {
        name: "optimizer-cpu-offload",
        read: |c, v| {
            c.offload = Offload { optimizer: truth(v)?, ..c.offload };
            Ok(())
        },
        write: |c| c.offload.optimizer.then_some(Value::Bool(true)),
    },
    // Offloading needs its code, with state in f32 as by default.
    Knob {
        name: "use-precision-aware-optimizer",
        read: |_, v| truth(v).map(|_| ()),
        write: |c| c.offload.optimizer.then_some(Value::Bool(true)),
    },
    Knob {
        name: "cpu-offloading",
        read: |c, v| {
            c.offload = Offload { activations: truth(v)?, ..c.offload };
            Ok(())
        },
        write: |_| None,
    },
    Knob {
        name: "clip-grad",
        read: |c, v| {
            c.clip_norm = Some(v.as_f64().ok_or("is not a number")?);
            Ok(())
        },
        write: |c| Some(c.clip_norm.map_or(Value::from(0.0), Value::from)),
    },
    Knob { name: "seq-length", read: |c, v| (number!("", sequence).read)(c, v), write: |_| None },
    // Devices, as launchers and scripts state them.
    reads_number!("nproc-per-node", devices_per_node),
    reads_number!("gpus-per-node", devices_per_node),
    reads_number!("num-gpus", devices_per_node),
    reads_number!("ngpu", devices_per_node),
    reads_number!("nnodes", nodes),
    reads_number!("num-nodes", nodes),
    reads_number!("slurm-nnodes", nodes),
    reads_number!("world-size", devices),
    // Older names and those of Megatron-DeepSpeed.
    reads_number!("model-parallel-size", tp),
    reads_number!("zero-stage", zero),
    reads_number!("ds-sequence-parallel-size", cp),
    noted!("deterministic-mode", "kernels are the fastest, deterministic or not"),
    reads!("checkpoint-activations", |c, v| {
        c.recompute = if truth(v)? { Some(Recompute::Full) } else { c.recompute };
        Ok(())
    }),
    reads!("deepspeed-activation-checkpointing", |_, v| truth(v).map(|_| ())),
    // The model.
    reads_number!("num-layers", model.layers),
    reads_number!("hidden-size", model.hidden),
    reads_number!("num-attention-heads", model.heads),
    reads_number!("num-query-groups", model.kv_heads),
    reads_number!("num-key-value-heads", model.kv_heads),
    reads_number!("kv-channels", model.head_size),
    reads_number!("ffn-hidden-size", model.inner),
    reads_number!("vocab-size", model.vocabulary),
    reads_number!("padded-vocab-size", model.vocabulary),
    reads_number!("max-position-embeddings", model.positions),
    reads_flag!("swiglu", model.gated),
    reads_flag!("group-query-attention", model.grouped_queries),
    reads_flag!("untie-embeddings-and-output-weights", model.untied),
    reads_flag!("squared-relu", model.squared_relu),
    reads_flag!("disable-bias-linear", model.no_bias),
    reads_flag!("add-qkv-bias", model.qkv_bias),
    reads_flag!("qk-layernorm", model.qk_norm),
    reads_flag!("use-rotary-position-embeddings", model.rotary),
    reads!("position-embedding-type", |c, v| {
        let known = [("rope", true), ("yarn", true), ("learned_absolute", false), ("none", true)];
        c.model.rotary = word(v, &known)?;
        Ok(())
    }),
    reads!("normalization", |c, v| {
        c.model.rms_norm = word(v, &[("RMSNorm", true), ("LayerNorm", false)])?;
        Ok(())
    }),
    reads_number!("num-experts", model.experts),
    reads_number!("moe-router-topk", model.experts_per_token),
    reads_number!("moe-ffn-hidden-size", model.expert_inner),
    reads_number!("moe-shared-expert-intermediate-size", model.shared_inner),
    reads!("moe-expert-capacity-factor", |c, v| {
        c.model.capacity_factor = v.as_f64();
        Ok(())
    }),
    Knob { name: "moe-layer-freq", read: read_expert_layers, write: |_| None },
    reads_flag!("multi-latent-attention", model.latent),
    reads_number!("q-lora-rank", model.q_rank),
    reads_number!("kv-lora-rank", model.kv_rank),
    reads_number!("qk-head-dim", model.qk_head),
    reads_number!("qk-pos-emb-head-dim", model.qk_rope_head),
    reads_number!("v-head-dim", model.v_head),
    Knob { name: "tokenizer-type", read: read_tokenizer, write: |_| None },
    reads!("transformer-impl", |c, v| {
        let is_local = word(v, &[("local", true), ("transformer_engine", false), ("inference_optimized", false)])?;
        c.fused_attention = if is_local && c.fused_attention.is_none() { Some(false) } else { c.fused_attention };
        Ok(())
    }),
    reads!("use-flash-attn", |c, v| {
        c.fused_attention = if truth(v)? { Some(true) } else { c.fused_attention };
        Ok(())
    }),
    reads!("attention-backend", |c, v| {
        let backends = [("flash", true), ("fused", true), ("auto", true), ("unfused", false), ("local", false)];
        c.fused_attention = Some(word(v, &backends)?).filter(|fused| !fused);
        Ok(())
    }),
    // Choices that the prediction leaves out.
    Knob { name: "tp-comm-overlap", read: read_beside_products, write: write_beside_products },
    noted!("mtp-num-layers", "layers that predict further tokens are left out"),
    noted!("hierarchical-context-parallel-sizes", "the way in which context parallelism sends keys is the planner's"),
    noted!("outer-dp-sharding-strategy", "parameters are sharded over all replicas"),
    noted!("microbatch-group-size-per-virtual-pipeline-stage", "microbatches take turns as by default"),
    noted!("cuda-graph-impl", "the overhead of launching kernels is left out anyway"),
    noted!("enable-cuda-graph", "the overhead of launching kernels is left out anyway"),
    noted!("external-cuda-graph", "the overhead of launching kernels is left out anyway"),
    noted!("exp-avg-dtype", "the optimizer's state is in f32"),
    noted!("exp-avg-sq-dtype", "the optimizer's state is in f32"),
    noted!("main-params-dtype", "the optimizer's state is in f32"),
    noted!("delay-wgrad-compute", "gradients of weights are computed with those of inputs"),
    noted!("window-size", "attention sees all positions"),
    noted!("accumulate-allreduce-grads-in-fp32", "gradients are summed in f32 anyway"),
    Knob { name: "fp8-format", read: eight_bit, write: |c| c.eight_bit.then(|| Value::from("hybrid")) },
    reads!("fp8", eight_bit),
    Knob { name: "fp8-recipe", read: recipe, write: |c| c.eight_bit.then(|| Value::from("tensorwise")) },
    Knob {
        name: "fp8-param-gather",
        read: |_, v| truth(v).map(|_| ()),
        write: |c| (c.eight_bit && c.zero.unwrap_or(0) > 0).then_some(Value::Bool(true)),
    },
    noted!("first-last-layers-bf16", "the first and the last layer multiply in 8 bits like the others"),
    refused!("fp4-format", "products in 4 bits cannot be predicted"),
    refused!("fine-grained-activation-offloading", "offloading of single modules cannot be predicted"),
    refused!("hybrid-override-pattern", "the model is no plain decoder: give its file with --model"),
    refused!("hybrid-layer-pattern", "the model is no plain decoder: give its file with --model"),
    refused!("encoder-num-layers", "the model is no plain decoder: give its file with --model"),
    refused!("retro-add-retriever", "the model is no plain decoder: give its file with --model"),
    refused!("use-tp-pp-dp-mapping", "this order of devices cannot be predicted"),
    refused!("enable-gloo-process-groups-offload", "cannot be predicted"),
];

/// Options without influence on a step, or with a small one.
pub const IGNORED: &[&str] = &[
    "lr*",
    "min-lr",
    "weight-decay*",
    "adam-*",
    "log-*",
    "save*",
    "load*",
    "data-*",
    "train-*",
    "eval-*",
    "split",
    "tensorboard-*",
    "wandb-*",
    "tokenizer-*",
    "vocab-file",
    "merge-file",
    "init-method-*",
    "dropout",
    "attention-dropout",
    "hidden-dropout",
    "exit-*",
    "seed",
    "distributed-*",
    "master-*",
    "node-rank",
    "rdzv*",
    "rotary-*",
    "rope-*",
    "use-mcore-models",
    "no-masked-softmax-fusion",
    "no-bias-*",
    "no-load-*",
    "no-save-*",
    "no-position-embedding",
    "no-gradient-accumulation-fusion",
    "no-async-tensor-model-parallel-allreduce",
    "no-rope-fusion",
    "override-*",
    "use-checkpoint-*",
    "ckpt-*",
    "dist-ckpt-*",
    "async-save",
    "manual-gc*",
    "timing-*",
    "profile*",
    "use-pytorch-profiler",
    "apply-layernorm-1p",
    "norm-epsilon",
    "layernorm-epsilon",
    "make-vocab-size-divisible-by",
    "moe-aux-loss-coeff",
    "moe-router-*",
    "moe-z-loss-coeff",
    "moe-token-*",
    "moe-grouped-gemm",
    "moe-permute-fusion",
    "moe-pad-*",
    "moe-shared-expert-overlap",
    "moe-shared-expert-gate",
    "moe-use-*",
    "moe-deepep-*",
    "moe-hybridep-*",
    "moe-per-layer-logging",
    "moe-extended-tp",
    "bias-*",
    "attention-softmax-in-fp32",
    "no-create-attention-mask-in-dataloader",
    "create-attention-mask-in-dataloader",
    "mock-data",
    "dataloader-*",
    "num-workers",
    "legacy-*",
    "mscale*",
    "beta-*",
    "original-max-position-embeddings",
    "initial-loss-scale",
    "loss-scale*",
    "hysteresis",
    "min-loss-scale",
    "sft*",
    "cross-entropy-*",
    "use-fused-weighted-squared-relu",
    "mmap-warmup",
    "override-opt*",
    "start-weight-decay",
    "end-weight-decay",
    "weight-decay-incr-style",
    "te-rng-tracker",
    "inference-*",
    "kv-*-quant*",
    "grad-reduce-in-bf16",
    "ddp-*",
    "no-*check*",
    "calculate-per-token-loss",
    "mtp-loss-scaling-factor",
    "qk-clip*",
    "check-for-*",
    "rerun-mode",
    "result-rejected-tracker*",
    "empty-unused-memory-level",
    "disable-straggler-on-startup",
    "deepspeed",
    "deepspeed-config",
    "deepspeed_config",
    "no-pipeline-parallel",
    "rampup-batch-size",
    "iters",
    "transformer-pipeline-model-parallel-size",
    "group",
    "hostfile",
    "use-hf*",
    "sequence-length-*",
    "max-restarts",
    "tee",
    "redirects",
    "local-ranks-filter",
    "output-*",
    "ntasks*",
    "time",
    "partition",
    "account",
    "job-name",
    "container-*",
    "exclusive",
    "mem",
    "gres",
    "dependency",
    "comment",
    "mpi",
    "export",
    "overcommit",
    "ft-*",
    "nvidia-*",
    "test-mode",
    "use-persistent-ckpt-worker",
    "auto-detect-ckpt-format",
    "finetune",
    "apply-query-key-layer-scaling",
    "attention-mask-in-softmax-fusion",
    "fp32-residual-connection",
    "transformer-engine*",
    "no-contiguous-buffers*",
    "cuda-graph-scope",
    "cuda-graph-*",
    "high-priority-stream-groups",
    "enable-experimental",
    "decoupled-*",
    "main-grads-dtype",
    "main-params-dtype",
    "exp-avg-dtype",
    "exp-avg-sq-dtype",
    "use-transformer-engine-op-fuser",
    "fp8-*",
    "fp4-*",
    "num-layers-at-*-in-bf16",
    "keep-fp8-*",
    "reuse-grad-buf-*",
    "force-*",
    "use-sharp*",
    "sharp-*",
];

fn read_layout(c: &mut Configuration, v: &Value) -> Result<(), String> {
    if v.is_null() {
        return Ok(());
    }
    let found = layout::parse(&bare(v))?;
    if found.further > 0 {
        c.notes.push("pipeline-model-parallel-layout: layers that predict further tokens are left out".into());
    }
    c.layout = Some(found.layers);
    Ok(())
}

fn write_layout(c: &Configuration) -> Option<Value> {
    c.layout.as_ref().map(|layers| Value::from(layout::print(layers)))
}

fn read_granularity(c: &mut Configuration, v: &Value) -> Result<(), String> {
    if v.is_null() {
        return Ok(());
    }
    c.recompute = Some(word(v, &[("full", Recompute::Full), ("selective", Recompute::Selective)])?);
    Ok(())
}

fn write_granularity(c: &Configuration) -> Option<Value> {
    match c.recompute? {
        Recompute::None => None,
        Recompute::Selective => Some(Value::from("selective")),
        Recompute::Full => Some(Value::from("full")),
    }
}

/// Modules whose outputs every prediction recomputes: elementwise results and norms.
const ALWAYS: [&str; 2] = ["moe_act", "layernorm"];

/// Megatron-LM's words for the modules that selective recomputation repeats; `None` if nothing is recomputed so.
pub(super) fn module_words(c: &Configuration) -> Option<Vec<&'static str>> {
    let modules = c.recompute_modules.unwrap_or_default();
    (c.recompute == Some(Recompute::Selective)).then(|| modules.iter().filter_map(Module::megatron).collect())
}

/// Modules that are not known are left out with a note.
fn read_modules(c: &mut Configuration, v: &Value) -> Result<(), String> {
    let words: Vec<String> = match v {
        Value::Null => return Ok(()),
        Value::Array(words) => words.iter().map(bare).collect(),
        word => bare(word).split([',', ' ']).filter(|w| !w.is_empty()).map(String::from).collect(),
    };
    let known = |word: &str| Module::ALL.into_iter().find(|module| module.megatron() == Some(word));
    let is_other = |w: &&str| !ALWAYS.contains(w) && known(w).is_none();
    let others: Vec<&str> = words.iter().map(String::as_str).filter(is_other).collect();
    if !others.is_empty() {
        c.notes.push(format!(
            "recompute-modules: the prediction keeps the values of {}, which takes more memory and less time",
            others.join(", ")
        ));
    }
    c.recompute_modules = Some(words.iter().filter_map(|word| known(word)).collect());
    Ok(())
}

fn read_optimizer(c: &mut Configuration, v: &Value) -> Result<(), String> {
    c.optimizer = Some(word(v, &[("adam", "adamw"), ("adamw", "adamw"), ("sgd", "sgd")])?.to_string());
    Ok(())
}

fn read_expert_layers(c: &mut Configuration, v: &Value) -> Result<(), String> {
    let text = bare(v).replace(' ', "");
    if let Ok(every) = text.parse::<u32>() {
        c.model.expert_layers = (every > 1).then(|| (0..every).map(|i| i == 0).collect());
        return Ok(());
    }
    // `[0]*3+[1]*58`, or a list.
    let mut layers: Vec<bool> = Vec::new();
    for part in text.trim_matches(['(', ')']).split('+') {
        let (list, times) = part.split_once("]*").unwrap_or((part, "1"));
        let times: usize = times.parse().map_err(|_| "is no list of layers")?;
        let flags: Vec<bool> = list.trim_matches(['[', ']']).split(',').map(|word| word == "1").collect();
        if layers.len().saturating_add(flags.len().saturating_mul(times)) > 1 << 16 {
            return Err("has too many layers".into());
        }
        layers.extend(flags.repeat(times));
    }
    c.model.expert_layers = Some(layers);
    Ok(())
}

fn read_tokenizer(c: &mut Configuration, v: &Value) -> Result<(), String> {
    // Sizes of the vocabularies that these names stand for.
    let size = match bare(v).as_str() {
        "GPT2BPETokenizer" => 50_257,
        "Llama2Tokenizer" => 32_000,
        "Llama3Tokenizer" => 128_256,
        _ => return Ok(()),
    };
    if c.model.vocabulary.is_none() {
        c.model.assumed_vocabulary = Some(size);
    }
    Ok(())
}

/// Reads the format of 8-bit products: activations and weights are `e4m3`, and gradients `e5m2` in the hybrid one.
pub fn eight_bit(c: &mut Configuration, v: &Value) -> Result<(), String> {
    let is_off = v.is_null() || v.as_bool() == Some(false) || bare(v).eq_ignore_ascii_case("none");
    c.eight_bit = !is_off && word(v, &[("hybrid", true), ("e4m3", true)])?;
    Ok(())
}

/// Reads whether transfers of tensor-parallel devices run beside products.
pub fn read_beside_products(c: &mut Configuration, v: &Value) -> Result<(), String> {
    c.overlaps_tensor_parallel = Some(truth(v)?);
    Ok(())
}

pub fn write_beside_products(c: &Configuration) -> Option<Value> {
    (c.overlaps_tensor_parallel == Some(true)).then_some(Value::Bool(true))
}

/// Reads how tokens get to their experts.
pub fn read_dispatcher(c: &mut Configuration, v: &Value) -> Result<(), String> {
    let kinds = [("flex", true), ("alltoall", false), ("alltoall_seq", false), ("allgather", false)];
    c.sends_tokens_once = if v.is_null() { c.sends_tokens_once } else { Some(word(v, &kinds)?) };
    if bare(v).eq_ignore_ascii_case("allgather") {
        c.notes.push(GATHERS_TOKENS.into());
    }
    Ok(())
}

/// The default of Megatron-LM gathers the tokens of all devices.
pub fn write_dispatcher(c: &Configuration) -> Option<Value> {
    let once = c.sends_tokens_once == Some(true);
    (c.ep() > 1).then(|| Value::from(if once { "flex" } else { "alltoall" }))
}

/// Reads how devices that split positions get the keys of others, as one word or one for each layer.
pub fn read_gathering(c: &mut Configuration, v: &Value) -> Result<(), String> {
    let gathers = |v: &Value| ["all_gather", "allgather"].contains(&bare(v).as_str());
    let is_planned = v.is_null() || gathers(v) || v.as_array().is_some_and(|each| each.iter().all(gathers));
    if !is_planned {
        c.notes.push(format!("cp-comm-type: {} is predicted as all_gather", bare(v)));
    }
    Ok(())
}

pub fn write_gathering(c: &Configuration) -> Option<Value> {
    (c.cp() > 1).then(|| Value::from("all_gather"))
}

/// Reads the library of the dispatcher `flex`; either sends a token once to a node.
pub fn read_backend(_: &mut Configuration, v: &Value) -> Result<(), String> {
    if v.is_null() { Ok(()) } else { word(v, &[("deepep", ()), ("hybridep", ())]) }
}

pub fn write_backend(c: &Configuration) -> Option<Value> {
    (c.sends_tokens_once == Some(true)).then(|| Value::from("deepep"))
}

/// Reads how 8-bit products are scaled.
pub fn recipe(c: &mut Configuration, v: &Value) -> Result<(), String> {
    if !word(v, &[("tensorwise", true), ("delayed", false), ("blockwise", false), ("mxfp8", false)])? {
        c.notes.push(format!("fp8-recipe: {} is predicted as tensorwise scaling", bare(v)));
    }
    Ok(())
}

pub fn defaults(c: &mut Configuration) {
    // The layout stands beside the rest, and says the number of stages.
    if let (Some(layout), None) = (&c.layout, c.pp) {
        c.pp = Some(layout.len() as u32);
    }
    if c.ep() > 1 {
        // Unless it is stated, experts are split as all layers are.
        c.etp = c.etp.or(Some(c.tp()));
    } else {
        c.notes.retain(|note| note != GATHERS_TOKENS);
    }
    c.sequence_parallel = c.sequence_parallel.or(Some(false));
    c.overlap = c.overlap.or(Some(false));
    c.pairs_passes = c.pairs_passes.or(Some(false));
    c.overlaps_tensor_parallel = c.overlaps_tensor_parallel.or(Some(false));
    c.sends_tokens_once = c.sends_tokens_once.or(Some(false));
    c.clip_by_default(1.0);
    c.precision = c.precision.or(Some(DType::F32));
    c.micro_batch = c.micro_batch.or(Some(1));
    match c.recompute {
        Some(Recompute::Full) if c.recompute_block == Some(true) => {}
        Some(Recompute::Full) => {
            if c.recomputed_layers.is_some_and(|n| n > 1) {
                c.notes
                    .push("recompute-num-layers: the inputs of every layer are kept, which takes more memory".into());
            }
            c.recomputed_layers = None;
        }
        Some(Recompute::Selective) if c.recompute_modules.is_some_and(Modules::is_empty) => {
            (c.recompute, c.recomputed_layers) = (Some(Recompute::None), None);
        }
        _ => c.recomputed_layers = None,
    }
}

pub fn round(c: &mut Configuration) {
    c.recompute_modules = c.recompute_modules.map(|modules| modules.without(Module::SecondProducts));
    if c.recompute == Some(Recompute::Selective) && c.recompute_modules.is_some_and(Modules::is_empty) {
        c.recompute_modules = None;
    }
    c.round_adam();
    c.drop_even_layout();
    // Offloading needs the distributed optimizer, which keeps the same for a single replica.
    let replicas = c.shard.unwrap_or(1).saturating_mul(c.replicate.unwrap_or(1)).saturating_mul(c.cp());
    if c.offload.optimizer && replicas == 1 {
        c.zero = c.zero.max(Some(1));
    }
    // The schedules are 1f1b and its interleaved form.
    c.schedule = c.schedule.filter(|s| !s.trains()).or(Some(Schedule::OneFOneB));
    if c.recomputed_layers.is_some() && c.recompute == Some(Recompute::Selective) {
        c.recompute = Some(Recompute::Full);
    }
    c.overlap = Some(c.zero.unwrap_or(0) > 0);
    let pairs = c.ep() > 1 && c.recompute != Some(Recompute::Full) && c.order().can_pair(c.virtual_stages(), c.pp());
    c.pairs_passes = Some(c.pairs_passes == Some(true) && pairs);
    c.sends_tokens_once = Some(c.sends_tokens_once == Some(true) && c.ep() > 1);
    let splits_tokens = c.tp() > 1 && c.sequence_parallel == Some(true);
    c.overlaps_tensor_parallel = Some(c.overlaps_tensor_parallel == Some(true) && splits_tokens);
}

pub fn limit(c: &Configuration) -> Option<Unsayable> {
    let unsayable = |problem, option| Some(Unsayable { problem, option });
    match () {
        () if c.offload.activations => unsayable(
            "Megatron offloads activations only with Transformer Engine and one pipeline stage",
            "--offload none",
        ),
        () if !matches!(c.optimizer.as_deref(), None | Some("adam" | "adamw" | "sgd")) => {
            unsayable("Megatron has the optimizers adam and sgd", "--optimizer adamw")
        }
        () if c.ep() > 1 && c.tp() > 1 && c.sequence_parallel != Some(true) => {
            unsayable("Megatron trains experts beside tensor parallelism only with sequence parallelism", "--tp 1")
        }
        () if c.overlaps_tensor_parallel == Some(true) && c.sequence_parallel != Some(true) => {
            unsayable("Megatron overlaps transfers with products only with sequence parallelism", "--tp 1")
        }
        () if c.offload.optimizer && c.optimizer.as_deref() == Some("sgd") => {
            unsayable("Megatron offloads the state of Adam only", "--offload none")
        }
        () if c.offload.optimizer && c.zero.unwrap_or(0) == 0 => {
            unsayable("Megatron offloads the state of its distributed optimizer only", "--zero 1")
        }
        () if c.pp() > 1 && c.zero.unwrap_or(0) > 1 => {
            unsayable("Megatron's FSDP shards gradients and parameters without a pipeline", "--zero 1")
        }
        () => None,
    }
}

//! Transformers: a Python module with a `DistributedConfig` and arguments of the `Trainer`.

use super::write::{Page, python};
use super::{
    Configuration, Knob, Stack, Unsayable, accelerate, bare, noted, number, reads, reads_number, refused, truth, word,
};
use crate::stacks::syntax::Syntax;
use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::AxisId;
use altiplano_ir::plan::{Plan, Target};
use altiplano_ir::recompute::Recompute;
use serde_json::Value;
use std::collections::BTreeMap;

pub static TRANSFORMERS: Stack = Stack {
    name: "transformers",
    version: "transformers 5.24",
    target: Target::Fsdp,
    shards_by_degree: true,
    syntax: Syntax::Python,
    knobs: KNOBS,
    ignored: IGNORED,
    marks: &["DistributedConfig", "TrainingArguments", "per_device_train_batch_size", "tp_plan"],
    defaults,
    round,
    limit,
    text,
    start: |page| {
        format!(
            "torchrun {} train.py  # which loads the model with from_pretrained(..., distributed_config=DISTRIBUTED)",
            page.torchrun()
        )
    },
};

const KNOBS: &[Knob] = &[
    number!("tp_size", tp),
    Knob { name: "fsdp_size", read: |c, v| (number!("", shard).read)(c, v), write: |c| c.shard.map(Value::from) },
    number!("dp_replicate_size", replicate),
    number!("pp_size", pp),
    Knob {
        name: "ep_size",
        read: |c, v| (number!("", ep).read)(c, v),
        write: |c| c.ep.filter(|&ep| ep > 1).map(Value::from),
    },
    Knob {
        name: "enable_sequence_parallel",
        read: |c, v| {
            c.sequence_parallel = Some(truth(v)?);
            Ok(())
        },
        write: |_| None,
    },
    Knob {
        name: "fsdp_plan",
        read: |c, v| {
            let Some(rules) = v.as_object() else { return Ok(()) };
            let keeps = rules.values().all(|rule| bare(rule) == "keep_full_weight");
            c.zero = if keeps && !rules.is_empty() { Some(2) } else { Some(3) };
            Ok(())
        },
        write: |c| {
            let rule = match c.zero? {
                2 => "keep_full_weight",
                3 => "free_full_weight",
                _ => return None,
            };
            Some(serde_json::json!({"layers.*": rule}))
        },
    },
    reads!("fsdp_cpu_offload", |c, v| {
        if truth(v)? {
            c.offload.optimizer = true;
            c.notes.push("fsdp_cpu_offload: only the optimizer's state is predicted in host memory".into());
        }
        Ok(())
    }),
    reads!("tp_plan", |_, _| Ok(())),
    reads!("ep_plan", |_, _| Ok(())),
    Knob {
        name: "per_device_train_batch_size",
        read: |c, v| (number!("", micro_batch).read)(c, v),
        write: |c| c.micro_batch.map(Value::from),
    },
    number!("gradient_accumulation_steps", accumulation),
    Knob {
        name: "gradient_checkpointing",
        read: |c, v| {
            c.recompute = Some(if truth(v)? { Recompute::Full } else { Recompute::None });
            Ok(())
        },
        write: |c| Some(Value::Bool(c.recompute == Some(Recompute::Full))),
    },
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
        name: "max_grad_norm",
        read: |c, v| {
            c.clip_norm = v.as_f64();
            Ok(())
        },
        write: |c| Some(Value::from(c.clip_norm.unwrap_or(0.0))),
    },
    Knob {
        name: "optim",
        read: |c, v| {
            let known = [
                ("adamw_torch", "adamw"),
                ("adamw_torch_fused", "adamw"),
                ("adamw_hf", "adamw"),
                ("adamw_apex_fused", "adamw"),
                ("sgd", "sgd"),
                ("rmsprop", "rmsprop"),
                ("adagrad", "adagrad"),
            ];
            c.optimizer = Some(word(v, &known)?.to_string());
            Ok(())
        },
        write: |c| {
            Some(Value::from(match c.optimizer.as_deref() {
                None | Some("adam" | "adamw") => "adamw_torch",
                Some("sgd") => "sgd",
                Some("rmsprop") => "rmsprop",
                Some(_) => "adagrad",
            }))
        },
    },
    reads!("fsdp", |c, v| {
        let words = bare(v);
        let level = |word: &str| words.split([' ', ',']).any(|w| w == word);
        c.zero = match () {
            () if level("full_shard") => Some(3),
            () if level("shard_grad_op") => Some(2),
            () if words.is_empty() || level("no_shard") => c.zero,
            () => return Err(format!("is {words}, and only full_shard, shard_grad_op and no_shard can be predicted")),
        };
        if level("offload") {
            c.offload.optimizer = true;
        }
        Ok(())
    }),
    reads_number!("max_length", sequence),
    reads_number!("max_seq_length", sequence),
    reads!("attn_implementation", |c, v| {
        c.fused_attention = if bare(v) == "eager" { Some(false) } else { None };
        Ok(())
    }),
    reads!("torch_dtype", dtype),
    reads!("dtype", dtype),
    noted!("torch_compile", "kernels of a compiler are not predicted"),
    refused!("deepspeed", "give that file instead: it has the settings"),
    refused!("load_in_8bit", "weights in 8 bits cannot be predicted"),
    refused!("load_in_4bit", "weights in 4 bits cannot be predicted"),
    refused!("peft_config", "adapters cannot be predicted: give the model with --freeze"),
    refused!("packing", "samples of changing length cannot be predicted"),
];

const IGNORED: &[&str] = &[
    "output_dir",
    "learning_rate",
    "weight_decay",
    "adam_*",
    "num_train_epochs",
    "max_steps",
    "lr_scheduler_*",
    "warmup_*",
    "log*",
    "save_*",
    "eval_*",
    "per_device_eval_batch_size",
    "seed",
    "data_seed",
    "dataloader_*",
    "report_to",
    "run_name",
    "remove_unused_columns",
    "push_to_hub*",
    "hub_*",
    "overwrite_output_dir",
    "do_train",
    "do_eval",
    "do_predict",
    "ddp_*",
    "fsdp_config*",
    "gradient_checkpointing_kwargs*",
    "use_reentrant",
    "local_rank",
    "model_name_or_path",
    "trust_remote_code",
    "device_map",
    "tokenizer",
    "args",
    "train_dataset",
    "eval_dataset",
    "model",
    "data_collator",
    "distributed_config",
    "logging_*",
    "fsdp_mixed_precision",
    "tf32",
    "enable_expert_parallel",
    "ep_implementation",
    "disable_tqdm",
    "use_cache",
    "include_*",
    "label_*",
    "metric_for_best_model",
    "load_best_model_at_end",
    "greater_is_better",
    "callbacks",
    "processing_class",
    "padding*",
    "truncation",
    "return_tensors",
    "batched",
    "split",
    "num_proc",
    "mlm",
    "text",
    "name",
    "path",
    "backend",
    "lr",
];

fn dtype(c: &mut Configuration, v: &Value) -> Result<(), String> {
    let known = [("bfloat16", DType::BF16), ("float16", DType::F16), ("float32", DType::F32), ("auto", DType::F32)];
    let found = word(v, &known)?;
    c.precision = c.precision.or(Some(found).filter(|_| bare(v) != "auto"));
    Ok(())
}

fn defaults(c: &mut Configuration) {
    c.precision = c.precision.or(Some(DType::F32));
    c.clip_by_default(1.0);
    c.micro_batch = c.micro_batch.or(Some(8));
    c.accumulation = c.accumulation.or(Some(1));
    if c.zero.is_none() {
        c.zero = Some(if c.shard.is_some_and(|shard| shard > 1) { 3 } else { 0 });
    }
}

fn round(c: &mut Configuration) {
    c.round_adam();
    c.drop_even_layout();
    let clip_norm = c.clip_norm;
    accelerate::round(c);
    c.clip_norm = clip_norm;
}

fn limit(c: &Configuration) -> Option<Unsayable> {
    let unsayable = |problem, option| Some(Unsayable { problem, option });
    let dp = c.replicate.unwrap_or(1).saturating_mul(c.shard.unwrap_or(1));
    match () {
        () if c.pp() > 1 && dp > 1 => unsayable(
            "Transformers combines pipelines with tensor parallelism only, not with data parallelism",
            "--pp 1",
        ),
        () if c.virtual_stages() > 1 => unsayable("Transformers has one stage on each device", "--virtual-stages 1"),
        () if c.layout.is_some() => unsayable("Transformers deals layers out evenly", "--target megatron"),
        () if c.cp() > 1 => unsayable("DistributedConfig has no context parallelism", "--cp 1"),
        () if c.ep() > 1 && c.ep() % c.tp() != 0 => {
            unsayable("expert parallelism must be a multiple of tensor parallelism", "--tp 1")
        }
        () if c.ep() > 1 && u64::from(dp) * u64::from(c.tp()) % u64::from(c.ep()) != 0 => {
            unsayable("expert parallelism must divide the devices that shard", "--ep 1")
        }
        () if !c.offload.is_none() => {
            unsayable("FSDP offloads parameters with the optimizer's state, and both at once only", "--offload none")
        }
        () if !matches!(c.optimizer.as_deref(), None | Some("adam" | "adamw" | "sgd" | "rmsprop" | "adagrad")) => {
            unsayable("the Trainer has no such optimizer", "--optimizer adamw")
        }
        () => None,
    }
}

/// Styles of the modules that the plan splits, by pattern, if they are the pairs that Transformers knows: columns
/// before rows. `None` if the plan splits modules otherwise.
fn styles(plan: &Plan) -> Option<BTreeMap<String, &'static str>> {
    const COLUMNS: [&str; 8] = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "w1", "w3"];
    const ROWS: [&str; 5] = ["o_proj", "down_proj", "fc2", "w2", "dense_4h_to_h"];
    let mut found = BTreeMap::new();
    for stage in &plan.stages {
        let tensor = AxisId(stage.mesh.axes.len().saturating_sub(1) as u8);
        for (name, storage) in &stage.parameters {
            let Some(module) = name.strip_suffix(".weight") else { continue };
            let last = module.rsplit('.').next().unwrap_or("");
            let splits = |dim: usize| {
                let of_dim = storage.parameter.dims.get(dim);
                of_dim.is_some_and(|dim| dim.axes().any(|axis| axis == tensor))
            };
            let wanted = match () {
                () if COLUMNS.contains(&last) => ("colwise", 0),
                () if ROWS.contains(&last) => ("rowwise", 1),
                () => continue,
            };
            if storage.parameter.dims.len() != 2 || !splits(wanted.1) {
                return None;
            }
            let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            let pattern: Vec<&str> = module.split('.').map(|part| if is_number(part) { "*" } else { part }).collect();
            found.insert(pattern.join("."), wanted.0);
        }
    }
    Some(found).filter(|found| !found.is_empty())
}

fn text(page: &Page<'_>) -> String {
    const TRAINING: [&str; 7] = [
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "bf16",
        "fp16",
        "max_grad_norm",
        "optim",
    ];
    let line = |(name, value): &(&'static str, Value)| format!("    {name}={},\n", python(value));
    let (training, mesh): (Vec<_>, Vec<_>) = page.settings.iter().partition(|(name, _)| TRAINING.contains(name));
    let lines = |settings: Vec<&(&'static str, Value)>| settings.into_iter().map(line).collect::<String>();
    let plan = match page.configuration.tp() {
        1 => String::new(),
        _ => match styles(page.plan) {
            Some(styles) => {
                let rules = styles.iter().map(|(name, style)| format!("        {name:?}: {style:?},\n"));
                format!("    tp_plan={{\n{}    }},\n", rules.collect::<String>())
            }
            // The model's own plan stands in for layouts that have no names here.
            None => "    tp_plan=\"auto\",\n".to_string(),
        },
    };
    format!(
        "{}\nfrom transformers.distributed import DistributedConfig\n\nDISTRIBUTED = DistributedConfig(\n{}{plan})\n\n# Arguments of transformers.TrainingArguments.\nTRAINING = dict(\n{})\n",
        page.heading("# "),
        lines(mesh),
        lines(training)
    )
}

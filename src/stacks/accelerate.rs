//! Accelerate: the YAML file of `accelerate launch`, with FSDP2 and its parallelism config. Batches and recomputation
//! by the model are the program's.

use super::write::yaml;
use super::{Configuration, Knob, Stack, Unsayable, bare, noted, number, reads, reads_number, refused, truth, word};
use crate::stacks::syntax::Syntax;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::{Schedule, Target};
use altiplano_ir::recompute::Recompute;
use serde_json::Value;

pub static ACCELERATE: Stack = Stack {
    name: "accelerate",
    version: "accelerate 1.15",
    target: Target::Fsdp,
    shards_by_degree: true,
    syntax: Syntax::Yaml,
    knobs: KNOBS,
    ignored: IGNORED,
    marks: &["fsdp_config", "distributed_type", "num_processes", "parallelism_config", "compute_environment"],
    defaults,
    round,
    limit,
    text: yaml,
    start: |page| {
        let c = page.configuration;
        format!(
            "accelerate launch --config_file FILE train.py, with {} samples a device and pass and {} passes a step",
            c.micro_batch.unwrap_or(1),
            page.num_microbatches
        )
    },
};

const KNOBS: &[Knob] = &[
    Knob { name: "compute_environment", read: |_, _| Ok(()), write: |_| Some(Value::from("LOCAL_MACHINE")) },
    Knob {
        name: "distributed_type",
        read: |c, v| {
            // The rest of the file decides how FSDP and DeepSpeed shard.
            let known = [("FSDP", 3_u8), ("MULTI_GPU", 0), ("NO", 0), ("DEEPSPEED", 0), ("MEGATRON_LM", 0)];
            let level = word(v, &known)?;
            c.zero = c.zero.or(Some(level));
            Ok(())
        },
        write: |c| {
            Some(Value::from(if c.zero == Some(0) && c.tp() == 1 && c.cp() == 1 { "MULTI_GPU" } else { "FSDP" }))
        },
    },
    Knob { name: "num_machines", read: |_, v| super::count(v).map(|_| ()), write: |c| c.nodes.map(Value::from) },
    number!("num_processes", devices),
    Knob {
        name: "mixed_precision",
        read: |c, v| {
            let known = [("no", None), ("false", None), ("bf16", Some(DType::BF16)), ("fp16", Some(DType::F16))];
            c.precision = word(v, &known)?;
            Ok(())
        },
        write: |c| {
            Some(Value::from(match c.precision {
                Some(DType::BF16) => "bf16",
                Some(DType::F16) => "fp16",
                _ => "no",
            }))
        },
    },
    // Not in files, but in what people add to them.
    reads_number!("gradient_accumulation_steps", accumulation),
    reads!("use_parallelism_config", |_, _| Ok(())),
    Knob {
        name: "parallelism_config.parallelism_config_dp_replicate_size",
        read: |c, v| (number!("", replicate).read)(c, v),
        write: |c| c.replicate.filter(|_| has_mesh(c)).map(Value::from),
    },
    Knob {
        name: "parallelism_config.parallelism_config_dp_shard_size",
        read: |c, v| (number!("", shard).read)(c, v),
        write: |c| c.shard.filter(|_| has_mesh(c)).map(Value::from),
    },
    Knob {
        name: "parallelism_config.parallelism_config_tp_size",
        read: |c, v| (number!("", tp).read)(c, v),
        write: |c| c.tp.filter(|_| has_mesh(c)).map(Value::from),
    },
    Knob {
        name: "parallelism_config.parallelism_config_cp_size",
        read: |c, v| (number!("", cp).read)(c, v),
        write: |c| c.cp.filter(|_| has_mesh(c)).map(Value::from),
    },
    noted!("parallelism_config_cp_comm_strategy", "the way in which context parallelism sends keys is the planner's"),
    reads_number!("parallelism_config_sp_size", cp),
    Knob {
        name: "fsdp_config.fsdp_version",
        read: |_, v| super::count(v).map(|_| ()),
        write: |c| is_fsdp(c).then(|| Value::from(2)),
    },
    Knob {
        name: "fsdp_config.fsdp_reshard_after_forward",
        read: |c, v| {
            let strategies = [("true", 3), ("false", 2), ("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0)];
            c.zero = Some(word(v, &strategies)?);
            Ok(())
        },
        write: |c| is_fsdp(c).then(|| Value::Bool(c.zero == Some(3))),
    },
    reads!("fsdp_config.fsdp_sharding_strategy", |c, v| {
        let strategies = [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), ("1", 3), ("2", 2), ("3", 0)];
        c.zero = match bare(v).as_str() {
            "HYBRID_SHARD" | "4" => {
                c.shards_by_node = true;
                Some(3)
            }
            "HYBRID_SHARD_ZERO2" | "5" => {
                c.shards_by_node = true;
                Some(2)
            }
            _ => Some(word(v, &strategies)?),
        };
        Ok(())
    }),
    Knob {
        name: "fsdp_config.fsdp_activation_checkpointing",
        read: |c, v| {
            c.recompute = if truth(v)? { Some(Recompute::Full) } else { c.recompute };
            Ok(())
        },
        write: |c| is_fsdp(c).then(|| Value::Bool(c.recompute == Some(Recompute::Full))),
    },
    Knob {
        name: "fsdp_config.fsdp_offload_params",
        read: |c, v| {
            if truth(v)? {
                c.offload.optimizer = true;
                c.notes.push("fsdp_offload_params: only the optimizer's state is predicted in host memory".into());
            }
            Ok(())
        },
        write: |c| is_fsdp(c).then_some(Value::Bool(false)),
    },
    Knob {
        name: "fsdp_config.fsdp_auto_wrap_policy",
        read: |c, v| {
            if bare(v) == "SIZE_BASED_WRAP" {
                c.notes.push("fsdp_auto_wrap_policy: parameters are gathered block by block".into());
            }
            Ok(())
        },
        write: |c| is_fsdp(c).then(|| Value::from("TRANSFORMER_BASED_WRAP")),
    },
    Knob {
        name: "fsdp_config.fsdp_state_dict_type",
        read: |_, _| Ok(()),
        write: |c| is_fsdp(c).then(|| Value::from("SHARDED_STATE_DICT")),
    },
    reads!("deepspeed_config.zero_stage", |c, v| {
        c.zero = Some(super::word(v, &[("0", 0), ("1", 1), ("2", 2), ("3", 3)])?);
        Ok(())
    }),
    reads_number!("deepspeed_config.gradient_accumulation_steps", accumulation),
    reads!("deepspeed_config.offload_optimizer_device", |c, v| {
        c.offload.optimizer = word(v, &[("none", false), ("cpu", true)])?;
        Ok(())
    }),
    reads!("deepspeed_config.offload_param_device", |_, v| {
        word(v, &[("none", ())]).map_err(|_| "parameters in host memory cannot be predicted".to_string())
    }),
    reads!("deepspeed_config.gradient_clipping", |c, v| {
        c.clip_norm = v.as_f64();
        Ok(())
    }),
    reads_number!("megatron_lm_config.megatron_lm_tp_degree", tp),
    reads_number!("megatron_lm_config.megatron_lm_pp_degree", pp),
    reads_number!("megatron_lm_config.megatron_lm_num_micro_batches", accumulation),
    reads!("megatron_lm_config.megatron_lm_recompute_activations", |c, v| {
        c.recompute = if truth(v)? { Some(Recompute::Selective) } else { c.recompute };
        Ok(())
    }),
    reads!("megatron_lm_config.megatron_lm_sequence_parallelism", |c, v| {
        c.sequence_parallel = Some(truth(v)?);
        Ok(())
    }),
    reads!("megatron_lm_config.megatron_lm_use_distributed_optimizer", |c, v| {
        c.zero = if truth(v)? { Some(1) } else { Some(0) };
        Ok(())
    }),
    reads!("megatron_lm_config.megatron_lm_gradient_clipping", |c, v| {
        c.clip_norm = v.as_f64();
        Ok(())
    }),
    reads!("downcast_bf16", |_, v| word(v, &[("no", ()), ("false", ())]).map_err(|_| "is for TPUs".to_string())),
    reads!("use_cpu", |_, v| match truth(v)? {
        false => Ok(()),
        true => Err("training on CPUs is not what the cluster's devices do".into()),
    }),
    refused!("deepspeed_config.deepspeed_config_file", "give that file instead: it has the settings"),
    refused!("fp8_config", "products in 8 bits cannot be predicted"),
    refused!("tpu_use_cluster", "TPUs cannot be predicted"),
];

const IGNORED: &[&str] = &[
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "tpu_*",
    "debug",
    "enable_cpu_affinity",
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "fsdp_backward_prefetch*",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params",
    "gpu_ids",
    "dynamo_*",
    "command_file",
    "commands",
    "tpu_*",
    "main_process*",
    "parallelism_config_*_backend",
    "log_*",
    "dynamo_config*",
    "mpirun_config*",
    "ipex_config*",
    "fsdp_offload_params",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "megatron_lm_config",
    "fsdp_config",
    "deepspeed_config",
    "parallelism_config",
    "parallelism_config_cp_backend",
    "parallelism_config_sp_backend",
    "deepspeed_moe_layer_cls_names",
];

/// True if the file states a mesh.
fn has_mesh(c: &Configuration) -> bool {
    is_fsdp(c)
}

fn is_fsdp(c: &Configuration) -> bool {
    c.zero != Some(0) || c.tp() > 1 || c.cp() > 1
}

fn defaults(c: &mut Configuration) {
    c.zero = c.zero.or(Some(0));
    c.precision = c.precision.or(Some(DType::F32));
    if c.shard.is_some() && c.zero == Some(0) && c.shard != Some(1) {
        c.zero = Some(3);
    }
    // FSDP shards over devices that split positions as well.
    if c.shard == Some(1) && c.cp() == 1 {
        c.zero = Some(0);
    }
}

pub(super) fn round(c: &mut Configuration) {
    c.drop_even_layout();
    c.schedule = c.schedule.filter(|s| !s.trains()).or(Some(Schedule::OneFOneB));
    c.sequence_parallel = None;
    c.recomputed_layers = None;
    c.recompute = match c.recompute {
        Some(Recompute::Selective) => Some(Recompute::Full),
        other => other,
    };
    // FSDP2 shards gradients with the optimizer's state.
    if c.zero == Some(1) {
        c.zero = Some(2);
    }
    if c.zero == Some(0) {
        (c.replicate, c.shard) = (c.shard.map(|shard| shard * c.replicate.unwrap_or(1)), Some(1));
    }
    c.clip_norm = None;
    c.overlap = None;
}

fn limit(c: &Configuration) -> Option<Unsayable> {
    let unsayable = |problem, option| Some(Unsayable { problem, option });
    match () {
        () if c.pp() > 1 => unsayable("FSDP has no pipelines", "--pp 1"),
        () if c.ep() > 1 => unsayable("Accelerate has no expert parallelism", "--ep 1"),
        () if c.cp() > 1 && c.zero == Some(0) => unsayable("context parallelism in Accelerate needs FSDP", "--zero 3"),
        () if !c.offload.is_none() => {
            unsayable("FSDP offloads parameters with the optimizer's state, and both at once only", "--offload none")
        }
        () => None,
    }
}

//! Option names of other software: those of Megatron-LM, DeepSpeed, torchtitan and the Trainer of Transformers are
//! accepted, with `-` or `_` between words. For options without a counterpart, the error suggests an equivalent.

use clap::builder::Str;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};

/// Options, and their names in other software.
const NAMES: &[(&str, &[&str])] = &[
    ("dp", &["data-parallel-size", "data-parallel-degree", "dp-size"]),
    ("tp", &["tensor-model-parallel-size", "tensor-parallel-size", "tensor-parallel-degree", "tp-size", "autotp-size"]),
    ("pp", &["pipeline-model-parallel-size", "pipeline-parallel-size", "pipeline-parallel-degree", "pp-size"]),
    ("cp", &["context-parallel-size", "context-parallel-degree", "cp-size"]),
    ("ep", &["expert-model-parallel-size", "expert-parallel-size", "expert-parallel-degree", "ep-size"]),
    ("virtual-stages", &["num-virtual-stages-per-pipeline-rank", "virtual-pipeline-model-parallel-size"]),
    ("global-batch", &["global-batch-size", "train-batch-size"]),
    (
        "micro-batch-size",
        &[
            "train-micro-batch-size-per-gpu",
            "micro-batch-size-per-gpu",
            "per-device-train-batch-size",
            "local-batch-size",
        ],
    ),
    ("num-microbatches", &["gradient-accumulation-steps"]),
    ("seq", &["seq-length", "seq-len", "sequence-length", "max-seq-len"]),
    ("zero", &["zero-stage"]),
    ("recompute", &["recompute-granularity"]),
    ("clip-norm", &["clip-grad", "gradient-clipping", "max-grad-norm"]),
    ("beta1", &["adam-beta1"]),
    ("beta2", &["adam-beta2"]),
    ("epsilon", &["adam-eps", "adam-epsilon"]),
    ("lr", &["learning-rate"]),
];

/// Options of other software without a counterpart, and the equivalents to suggest.
const INSTEAD: &[(&str, &str)] = &[
    ("sequence-parallel", "positions are split between tensor-parallel products wherever that is faster; leave it out"),
    ("use-distributed-optimizer", "--zero 1 shards the optimizer's state"),
    ("use-megatron-fsdp", "--target megatron --zero 2 shards gradients as well as state, and --zero 3 parameters too"),
    ("data-parallel-sharding-strategy", "--zero 0 is no_shard, 1 optim, 2 optim_grads and 3 optim_grads_params"),
    ("fsdp-reshard-after-forward", "--zero 3 gathers parameters for each pass (always), --zero 2 keeps them (never)"),
    (
        "pipeline-model-parallel-layout",
        "--target megatron searches the layers of each stage, and --pp fixes how many there are",
    ),
    ("decoder-first-pipeline-num-layers", "--target megatron searches the layers of each stage; leave it out"),
    ("decoder-last-pipeline-num-layers", "--target megatron searches the layers of each stage; leave it out"),
    ("expert-tensor-parallel-size", "--ep N deals experts out, and what is left of --tp splits them; leave it out"),
    (
        "cp-comm-type",
        "--cp N gathers keys and values (allgather); --ring N without --cp sends them around a ring (p2p)",
    ),
    ("num-layers-per-virtual-pipeline-stage", "--virtual-stages N says how many stages share devices"),
    ("use-flash-attn", "attention is one kernel wherever the software of --target has one; leave it out"),
    (
        "data-parallel-replicate-degree",
        "parameters are sharded over all replicas: --dp N --zero 3, or --zero 0 for none",
    ),
    ("fsdp", "--target fsdp plans for PyTorch FSDP, and --zero 3 shards parameters for any target"),
    (
        "deepspeed",
        "--target deepspeed plans for it; its settings are --zero N, --micro-batch-size N, --gradient-accumulation-steps N",
    ),
];

/// Adds the names of other software to a command.
pub(crate) fn with_names(command: Command) -> Command {
    command.mut_args(named).mut_subcommands(with_names)
}

fn named(arg: Arg) -> Arg {
    let Some(long) = arg.get_long().map(String::from) else { return arg };
    let others = NAMES.iter().find(|(ours, _)| *ours == long).map_or(&[][..], |(_, theirs)| theirs);
    let mut all: Vec<String> = others.iter().map(ToString::to_string).collect();
    all.extend(
        others.iter().copied().chain([long.as_str()]).filter(|name| name.contains('-')).map(|n| n.replace('-', "_")),
    );
    arg.aliases(all.into_iter().map(Str::from))
}

/// The suggestion for an unknown option that other software has.
pub(crate) fn instead(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else { return None };
    let name = given.trim_start_matches('-').split('=').next().unwrap_or("").replace('_', "-");
    let (_, what) = INSTEAD.iter().find(|(theirs, _)| *theirs == name)?;
    Some(format!("{given} is no option here: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory;

    #[test]
    fn every_name_is_of_an_option_and_of_one() {
        let command = with_names(Cli::command());
        command.clone().debug_assert();
        let plan = command.find_subcommand("plan").expect("a command");
        let run = command.find_subcommand("run").expect("a command");
        for (ours, theirs) in NAMES {
            let of = |command: &Command| command.get_arguments().any(|arg| arg.get_long() == Some(ours));
            assert!(of(plan) || of(run), "--{ours}");
            for name in theirs.iter() {
                let spelled = [name.to_string(), name.replace('-', "_")];
                for name in spelled {
                    let value = if *ours == "recompute" {
                        "full"
                    } else if ours.starts_with("beta") {
                        "0.5"
                    } else {
                        "2"
                    };
                    let which = if of(plan) { "plan" } else { "run" };
                    let line = ["altiplano", which, "m", &format!("--{name}"), value];
                    let matches =
                        command.clone().try_get_matches_from(line).unwrap_or_else(|e| panic!("--{name}: {e}"));
                    let (_, matches) = matches.subcommand().expect("a command");
                    let id = ours.replace('-', "_");
                    assert!(matches.value_source(&id) == Some(clap::parser::ValueSource::CommandLine), "--{name}");
                }
            }
        }
    }

    #[test]
    fn what_others_have_is_answered_with_what_does_the_same() {
        for (name, _) in INSTEAD {
            for name in [name.to_string(), name.replace('-', "_")] {
                let line = ["altiplano".to_string(), "plan".into(), "m".into(), format!("--{name}")];
                let error = with_names(Cli::command()).try_get_matches_from(line).expect_err("no such option");
                assert!(
                    instead(&error).is_some_and(|text| text.starts_with(&format!("--{name} is no option"))),
                    "{name}"
                );
            }
        }
    }
}

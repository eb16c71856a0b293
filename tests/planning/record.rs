//! A record of plans: the checksum of each plan file, and its predicted step. A refactoring leaves the record as it is. A change of
//! prices or of the search shows in it, as a difference to look at.

use crate::common::{DEMO, Scratch, altiplano, golden};
use rayon::prelude::*;
use serde_json::Value;

const DEMO_OPTIONS: [&str; 28] = [
    "--cluster local:1",
    "--cluster local:4",
    "--cluster local:6 --global-batch 12",
    "--cluster 1xH100 --precision bf16",
    "--cluster p3.16xlarge:1 --global-batch 256",
    "--cluster p3.16xlarge:2 --global-batch 256 --dp 4 --tp 2 --pp 2",
    "--cluster dgx-a100:1 --precision bf16 --zero 3",
    "--cluster dgx-h100:1 --precision bf16 --target fsdp",
    "--cluster dgx-h100:1 --precision bf16 --target megatron",
    "--cluster dgx-h100:1 --precision bf16 --target xla",
    "--cluster examples/clusters/two-kinds.toml --global-batch 64",
    "--cluster examples/clusters/workstation.toml --global-batch 64",
    "--dp 4 --zero 1 --clip-norm 1",
    "--dp 2 --tp 2 --recompute full",
    "--dp 1 --tp 4 --global-batch 1",
    "--pp 2 --schedule gpipe --num-microbatches 4",
    "--pp 2 --schedule zb-h1 --num-microbatches 4",
    "--pp 2 --schedule zb-v --num-microbatches 4",
    "--pp 2 --schedule dualpipe-v --num-microbatches 4",
    "--pp 2 --virtual-stages 2 --num-microbatches 4",
    "--pp 2 --schedule pipedream --optimizer sgd",
    "--dp 4 --update stale",
    "--dp 2 --precision f16",
    "--dp 2 --offload all",
    "--dp 2 --freeze params['h0']*",
    "--cluster local:4 --parameter-servers 1 --global-batch 12",
    "--cluster local:4 --loss none",
    "--cluster local:4 --search alpa --optimizer lamb",
];

const MODELS: [&str; 9] = [
    "resnet",
    "unet",
    "moe-sorted",
    "scanned-remat",
    "scanned-step",
    "flax-dropout",
    "state-space",
    "weighted",
    "windows",
];

const MODEL_OPTIONS: [&str; 2] = ["--cluster local:4", "--cluster dgx-a100:1 --global-batch 64"];

/// Published configs of `benches/configs`, with options.
const CONFIGS: [(&str, &str); 6] = [
    ("gpt2-xl", "--cluster dgx-a100:1 --precision bf16 --global-batch 64 --num-microbatches 2"),
    ("llama-3.2-1b", "--cluster dgx-h100:1 --seq 2048 --global-batch 64 --zero 3 --pp 1 --num-microbatches 1"),
    ("olmoe-1b-7b", "--cluster dgx-h100:1 --seq 1024 --global-batch 64 --dp 8 --tp 1 --pp 1 --num-microbatches 1"),
    ("llama-3.2-1b", "--cluster 1xH100 --seq 2048 --global-batch 4 --num-microbatches 2 --loss-chunks 4"),
    ("bert-large", "--cluster dgx-a100:1 --global-batch 64 --dp 4 --tp 2 --pp 1 --num-microbatches 1"),
    ("vit-huge", "--cluster dgx-a100:2 --global-batch 128 --dp 16 --tp 1 --pp 1 --num-microbatches 1"),
];

/// The line of the record for a model under options.
fn line(name: &str, model: &str, options: &str) -> String {
    let mut arguments = vec!["plan", model, "--json"];
    arguments.extend(options.split(' '));
    let output = altiplano(&arguments);
    let summary = match serde_json::from_str::<Value>(&output.stdout) {
        Ok(mut plan) => {
            // The version and the command are no part of what was decided.
            plan.as_object_mut().expect("a plan is an object").remove("made_by");
            let seconds = plan["predicted"]["step_time_s"].as_f64().expect("a predicted step");
            format!("{:08x}  {seconds:.6} s", crc32fast::hash(plan.to_string().as_bytes()))
        }
        Err(_) => output.stderr.lines().last().unwrap_or_default().to_string(),
    };
    format!("{summary}  {name} {options}")
}

#[test]
fn plans_are_those_of_the_record() {
    let scratch = Scratch::new();
    let mut pairs: Vec<(String, String, &str)> =
        DEMO_OPTIONS.iter().map(|options| ("demo".into(), DEMO.into(), *options)).collect();
    for name in MODELS {
        let file = format!("{}/tests/models/{name}.mlir", env!("CARGO_MANIFEST_DIR"));
        pairs.extend(MODEL_OPTIONS.iter().map(|options| (name.into(), file.clone(), *options)));
    }
    let configs = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/huggingface.jsonl");
    let configs = std::fs::read_to_string(configs).expect("the published configs");
    let configs: Vec<Value> =
        configs.lines().map(|line| serde_json::from_str(line).expect("a config a line")).collect();
    for (name, options) in CONFIGS {
        let config = configs.iter().find(|config| config["name"] == name).expect("a published config");
        pairs.push((name.into(), scratch.file(&format!("{name}.json"), config["config"].to_string()), options));
    }
    let record: Vec<String> = pairs.par_iter().map(|(name, model, options)| line(name, model, options)).collect();
    golden("plans.txt", &record.join("\n"));
}

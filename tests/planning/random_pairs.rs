//! Random models on random clusters. For any pair, the search returns a valid plan that fits, or the reason why there
//! is none. The plan is the same each time and with any number of threads.

use altiplano::cost_models::preset;
use altiplano::ir::cluster::{Cluster, Group};
use altiplano::planner::{PlanFailure, Silent, plan};
use altiplano::{ImportOptions, model_of, request};
use serde_json::json;
use std::path::Path;

/// A counter-based generator, good enough to pick sizes.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        // SplitMix64 (Steele et al. 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % n
    }

    fn of<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize].clone()
    }
}

/// A config of a random family, from toys to several billion parameters.
fn config(random: &mut Random) -> serde_json::Value {
    let head = random.of(&[16, 32, 64, 128]);
    let heads = random.of(&[2, 3, 4, 6, 8, 12, 16, 25]);
    let hidden = head * heads;
    let layers = random.of(&[1, 2, 3, 5, 8, 12, 24]);
    let vocabulary = random.of(&[97, 512, 1000, 32_000, 50_257]);
    let tied = random.below(2) == 0;
    match random.below(3) {
        0 => json!({
            "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 256,
            "vocab_size": vocabulary, "tie_word_embeddings": tied,
        }),
        1 => json!({
            "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": if heads % 2 == 0 { heads / 2 } else { heads }, "intermediate_size": 3 * hidden,
            "vocab_size": vocabulary, "max_position_embeddings": 512, "tie_word_embeddings": tied,
        }),
        _ => json!({
            "model_type": "mixtral", "num_hidden_layers": layers.min(4), "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 2 * hidden,
            "vocab_size": vocabulary, "max_position_embeddings": 256, "num_local_experts": random.of(&[2, 4, 6]),
            "num_experts_per_tok": 2, "tie_word_embeddings": tied,
        }),
    }
}

/// One to four nodes of any size, with scaled memory and links of a known device.
fn cluster(random: &mut Random) -> Cluster {
    let base = random.of(&["dgx-a100:1", "p3.16xlarge:1", "dgx-h100:1", "local:4"]);
    let mut cluster = preset(base).expect("a preset");
    vary(&mut cluster.groups[0], random);
    cluster.name = format!("{base}, changed");
    cluster
}

fn vary(group: &mut Group, random: &mut Random) {
    group.nodes = random.of(&[1, 1, 2, 3, 4]);
    group.devices_per_node = random.of(&[1, 2, 3, 4, 5, 6, 7, 8]);
    // From a small fraction of the device's memory to all of it.
    let smaller = random.below(10);
    group.device.memory_bytes = (group.device.memory_bytes >> smaller).max(1 << 20);
    if let Some(reserved) = &mut group.device.reserved {
        reserved.context_bytes >>= smaller;
        reserved.communication_bytes >>= smaller;
        reserved.allocator_bytes >>= smaller;
    }
    group.inter_node.bytes_per_s *= random.of(&[0.1, 1.0, 4.0]);
    group.intra_node.bytes_per_s *= random.of(&[0.1, 1.0, 2.0]);
}

fn check(seed: u64) {
    let mut random = Random(seed);
    let config = config(&mut random);
    let options = ImportOptions { sequence: Some(random.of(&[16, 64, 128])), ..ImportOptions::default() };
    let model = model_of(Path::new("config.json"), config.to_string().as_bytes(), &options)
        .unwrap_or_else(|error| panic!("pair {seed}: {config}: {error}"));
    let mut wanted = request(&model, cluster(&mut random));
    wanted.batch.global = Some(random.of(&[1, 2, 6, 8, 12, 32, 96]));
    wanted.baselines = random.below(4) == 0;
    let of = |cluster: &Cluster| {
        let group = &cluster.groups[0];
        format!("{} x {} of {} bytes", group.nodes, group.devices_per_node, group.device.memory_bytes)
    };
    let pair = format!("pair {seed}: {config} on {}, batch {:?}", of(&wanted.cluster), wanted.batch.global);
    let with_threads = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| plan(&wanted, &Silent))
    };
    match (with_threads(1), with_threads(3)) {
        (Ok(first), Ok(second)) => {
            assert!(first.verify().is_empty(), "{pair}: {:?}", first.verify());
            let limit = wanted.cluster.usable_bytes(&wanted.cluster.groups[0]);
            let peak = first.predicted.peak_bytes.iter().copied().max().unwrap_or(0);
            assert!(peak <= limit, "{pair}: a plan that needs {peak} bytes");
            let step_s = first.predicted.step_time_s;
            assert!(step_s.is_finite() && step_s > 0.0, "{pair}: {step_s} s");
            let predicted = &first.predicted;
            assert!(predicted.lower_bound_s <= step_s, "{pair}: faster than its bound");
            assert!(predicted.mfu > 0.0 && predicted.mfu <= 1.0, "{pair}: an MFU of {}", predicted.mfu);
            assert!(
                (predicted.lower_bound_s / step_s - predicted.mfu).abs() < 1e-9,
                "{pair}: other FLOPs in MFU and bound"
            );
            assert!(first.to_json() == second.to_json(), "{pair}: two threads gave another plan");
        }
        (Err(first), Err(second)) => {
            assert_eq!(first.to_string(), second.to_string(), "{pair}");
            let known = matches!(first, PlanFailure::Memory { .. } | PlanFailure::NoCombination);
            assert!(known, "{pair}: {first}");
        }
        (first, second) => panic!("{pair}: {:?} and {:?}", first.err(), second.err()),
    }
}

#[test]
fn random_models_on_random_clusters() {
    (0..40).for_each(check);
}

/// Takes about ten minutes.
#[test]
#[ignore = "slow: the same for a thousand pairs"]
fn a_thousand_random_models_on_random_clusters() {
    (1000..2000).for_each(check);
}

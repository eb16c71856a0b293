#![no_main]

use altiplano::ir::graph::Graph;
use altiplano::ir::plan::graph_hash;
use altiplano::{Format, plan_of, programs, report};
use altiplano_fuzz::{mutate_tokens, refused};
use libfuzzer_sys::{Corpus, fuzz_mutator, fuzz_target};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// The document with the hash that belongs to the graph in it: whoever forges a plan forges the hash too, and behind it
/// there is more to reach.
fn forged(data: &[u8]) -> Option<String> {
    let mut document: Value = serde_json::from_slice(data).ok()?;
    let graph = Graph::deserialize(document.get("graph")?).ok()?;
    *document.get_mut("graph_hash")? = Value::String(graph_hash(&graph));
    Some(document.to_string())
}

fn read(data: &[u8]) {
    match plan_of(Path::new("plan.json"), data) {
        Ok(plan) => {
            let _ = report(&plan);
            if let Err(error) = programs(&plan) {
                panic!("a plan that was read has no programs: {error}");
            }
        }
        Err(error) => refused(&error),
    }
}

fuzz_target!(|data: &[u8]| -> Corpus {
    if Format::of(data) != Format::PlanJson {
        return Corpus::Reject;
    }
    read(data);
    if let Some(text) = forged(data) {
        read(text.as_bytes());
    }
    Corpus::Keep
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| { mutate_tokens(data, size, max_size, seed) });

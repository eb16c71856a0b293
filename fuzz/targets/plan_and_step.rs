//! A small model goes all the way: it is planned for four workers with drawn options, the plan is written and read
//! back, and one step of it runs.

#![no_main]

use altiplano::ir::graph::Graph;
use altiplano::planner::Silent;
use altiplano::training::{Training, train};
use altiplano::{Error, Format, ImportOptions, load_cluster, model_of, plan, plan_of, request};
use altiplano_fuzz::{mutate_tokens, refused};
use libfuzzer_sys::{Corpus, fuzz_mutator, fuzz_target};
use std::path::Path;

/// Limits, so that a step takes milliseconds.
const MOST_NODES: usize = 300;
const MOST_ELEMENTS: u64 = 100_000;
const MOST_FLOP: u64 = 20_000_000;

fn is_small(graph: &Graph) -> bool {
    let mut flop = 0u64;
    graph.nodes.len() <= MOST_NODES
        && graph.values().all(|value| {
            flop = flop.saturating_add(graph.flop(value));
            graph.ty(value).elements() <= MOST_ELEMENTS && flop <= MOST_FLOP
        })
}

fuzz_target!(|data: &[u8]| -> Corpus {
    // The first bytes are options; what follows is a model.
    let Some((options, text)) = data.split_at_checked(4) else { return Corpus::Reject };
    if ![Format::StableHlo, Format::GraphJson].contains(&Format::of(text)) {
        return Corpus::Reject;
    }
    let Ok(model) = model_of(Path::new("model"), text, &ImportOptions::default()) else { return Corpus::Reject };
    if !is_small(&model.graph) {
        return Corpus::Reject;
    }
    let mut asked = request(&model, load_cluster("local:4").expect("a preset"));
    let degree = |byte: u8| [None, Some(1), Some(2), Some(4)][usize::from(byte % 4)];
    asked.degrees.dp = degree(options[0]);
    asked.degrees.tp = degree(options[0] / 4);
    asked.degrees.pp = degree(options[0] / 16);
    asked.degrees.zero = [None, Some(1), Some(2), Some(3)][usize::from(options[1] % 4)];
    asked.batch.num_microbatches = [None, Some(1), Some(2), Some(4)][usize::from(options[2] % 4)];
    asked.allow_microbatch_semantics = options[3] % 2 == 1;
    asked.pad = options[3] & 2 != 0;
    let found = match plan(&asked, &Silent) {
        Ok(found) => found,
        Err(error) => {
            refused(&error.into());
            return Corpus::Keep;
        }
    };
    let read = match plan_of(Path::new("plan.json"), found.to_json().as_bytes()) {
        Ok(read) => read,
        Err(error) => panic!("a plan that was written is not read: {error}"),
    };
    let training = Training { steps: 1, learning_rate: 1e-3, ..Training::default() };
    match train(&read, &training, |_| Ok(())) {
        Ok(_) | Err(Error::Diverged { .. } | Error::NaN { .. }) => {}
        Err(error) => refused(&error),
    }
    Corpus::Keep
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let head = size.min(4);
    let (options, text) = data.split_at_mut(head);
    if let Some(byte) = options.get_mut(seed as usize % 8) {
        *byte = (seed >> 8) as u8;
        return size;
    }
    head + mutate_tokens(text, size - head, max_size - head, seed)
});

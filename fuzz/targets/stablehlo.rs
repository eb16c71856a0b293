#![no_main]

use altiplano::Format;
use altiplano_fuzz::{corpus, mutate_tokens, ways};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| -> libfuzzer_sys::Corpus { corpus(ways::model(data, Format::StableHlo)) });

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| { mutate_tokens(data, size, max_size, seed) });

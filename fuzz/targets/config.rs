#![no_main]

use altiplano::Format;
use altiplano_fuzz::{mutate_tokens, read_model};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| -> libfuzzer_sys::Corpus { read_model(data, Format::HuggingFaceConfig) });

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| { mutate_tokens(data, size, max_size, seed) });

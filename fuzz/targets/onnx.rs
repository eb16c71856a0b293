#![no_main]

use altiplano_fuzz::{corpus, onnx, ways};
use libfuzzer_sys::{fuzz_crossover, fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| -> libfuzzer_sys::Corpus { corpus(ways::onnx(data)) });

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| { onnx::mutate(data, size, max_size, seed) });

fuzz_crossover!(|data: &[u8], other: &[u8], out: &mut [u8], seed: u32| { onnx::cross_over(data, other, out, seed) });

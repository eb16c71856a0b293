#![no_main]

use altiplano_fuzz::{corpus, mutate_tokens, ways};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| -> libfuzzer_sys::Corpus { corpus(ways::other_file(data)) });

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    // The kind stays, or else most changes would be lost on another reader.
    let head = size.min(1);
    head + mutate_tokens(&mut data[head..], size - head, max_size - head, seed)
});

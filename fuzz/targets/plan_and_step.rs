#![no_main]

use altiplano_fuzz::{corpus, mutate_tokens, ways};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| -> libfuzzer_sys::Corpus { corpus(ways::plan_and_step(data)) });

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let head = size.min(4);
    let (options, text) = data.split_at_mut(head);
    if let Some(byte) = options.get_mut(seed as usize % 8) {
        *byte = (seed >> 8) as u8;
        return size;
    }
    head + mutate_tokens(text, size - head, max_size - head, seed)
});

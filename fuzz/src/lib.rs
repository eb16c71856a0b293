//! Shared code of the fuzz targets: the command line's path from a file's bytes onwards, and text mutations
//! by token. These get past a parser more often than mutations of bytes.

pub mod onnx;
pub mod ways;

use libfuzzer_sys::Corpus;

/// libFuzzer's word for an input that is worth keeping, or is not.
pub fn corpus(is_kept: bool) -> Corpus {
    if is_kept { Corpus::Keep } else { Corpus::Reject }
}

/// A small deterministic generator (xorshift, Marsaglia 2003), since a mutation must follow from its seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn of(seed: u32) -> Random {
        Random(u64::from(seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n.max(1)
    }
}

/// Words, numbers and strings whole, everything else a character each.
fn tokens(text: &[u8]) -> Vec<&[u8]> {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b"_.%@#-+".contains(&b);
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let length = match rest[0] {
            b'"' => rest[1..].iter().position(|&b| b == b'"' || b == b'\n').map_or(1, |end| end + 2),
            b if is_word(b) => rest.iter().position(|&b| !is_word(b)).unwrap_or(rest.len()),
            b' ' => rest.iter().position(|&b| b != b' ').unwrap_or(rest.len()),
            _ => 1,
        };
        tokens.push(&rest[..length]);
        at += length;
    }
    tokens
}

const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "7",
    "8",
    "16",
    "64",
    "1000",
    "65536",
    "-1",
    "-2",
    "4294967296",
    "9223372036854775807",
    "1e30",
];

/// Changes a few tokens of `data[..size]`: drops, repeats, swaps or replaces one by another of the text or by a number.
/// Every fourth time the change is libFuzzer's own.
pub fn mutate_tokens(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut random = Random::of(seed);
    if random.below(4) == 0 || size == 0 {
        return libfuzzer_sys::fuzzer_mutate(data, size, max_size);
    }
    let text = data[..size].to_vec();
    let mut tokens: Vec<&[u8]> = tokens(&text);
    for _ in 0..=random.below(3) {
        if tokens.is_empty() {
            break;
        }
        let (at, other) = (random.below(tokens.len()), random.below(tokens.len()));
        // Most tokens are blanks and marks; what says something is a word.
        let at = (0..8).map(|_| random.below(tokens.len())).find(|&i| tokens[i].len() > 1).unwrap_or(at);
        let is_number = tokens[at].iter().all(|b| b.is_ascii_digit() || *b == b'-');
        match random.below(6) {
            0 => drop(tokens.remove(at)),
            1 => tokens.insert(other, tokens[at]),
            2 => tokens.swap(at, other),
            _ if is_number => tokens[at] = NUMBERS[random.below(NUMBERS.len())].as_bytes(),
            // Another word of the same first letter or mark is likely to be of the same kind.
            _ => {
                let alike: Vec<&[u8]> = tokens.iter().copied().filter(|t| t[0] == tokens[at][0]).collect();
                tokens[at] = alike[random.below(alike.len())];
            }
        }
    }
    let changed = tokens.concat();
    let size = changed.len().min(max_size).min(data.len());
    data[..size].copy_from_slice(&changed[..size]);
    size
}

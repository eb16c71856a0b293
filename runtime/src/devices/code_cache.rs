//! Compiled code in a folder, under the hash of everything that it depends on. A cached file also holds that key and a
//! checksum. So neither a hash collision nor a truncated file is taken for code.

use crate::files;
use std::path::{Path, PathBuf};

/// A folder of compiled code, created on demand.
#[derive(Clone, Debug)]
pub(super) struct CodeCache {
    pub folder: PathBuf,
    /// The ending of its files.
    pub extension: &'static str,
}

/// The first bytes of a cached file, with the version of its format.
const MAGIC: &[u8] = b"altiplano kernel 1\n";

impl CodeCache {
    fn file(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{:032x}.{}", hash(key.as_bytes()), self.extension))
    }

    /// The code of a key, if its file is complete and has the same key.
    pub fn find(&self, key: &str) -> Option<Vec<u8>> {
        kept(&self.file(key), key)
    }

    /// Writes the code of a key atomically: a reader sees all of it, or the old content.
    pub fn keep(&self, key: &str, code: &[u8]) -> std::io::Result<()> {
        let rest = [&(key.len() as u64).to_le_bytes(), key.as_bytes(), code].concat();
        let bytes = [MAGIC, &hash(&rest).to_le_bytes(), &rest].concat();
        std::fs::create_dir_all(&self.folder)?;
        files::replace(&self.file(key), &bytes)
    }
}

fn kept(file: &Path, key: &str) -> Option<Vec<u8>> {
    let bytes = files::read(file).ok()?;
    let (checksum, rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<16>()?;
    if u128::from_le_bytes(*checksum) != hash(rest) {
        return None;
    }
    let (length, rest) = rest.split_first_chunk::<8>()?;
    let (found, code) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    (found == key.as_bytes()).then(|| code.to_vec())
}

/// FNV-1a of 128 bits.
fn hash(bytes: &[u8]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(OFFSET, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_reference() {
        // From the test suite of FNV's authors.
        assert_eq!(hash(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hash(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}

//! The memory that reading a file may take. It follows from the file's size, so that a small file cannot take all.

/// Bytes that any file may take.
const FLOOR: u64 = 256 << 20;

/// Bytes of memory for each byte of a file. Text of many short values takes about 16, and a compressed entry is seldom a
/// quarter of what it holds.
const RATE: u64 = 64;

/// Memory that is left for a file. Each format charges what it is about to allocate.
#[derive(Clone, Debug)]
pub struct Budget {
    file: u64,
    most: u64,
    left: u64,
}

/// The error of a file that would take much more memory than its size explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "reading it would take more than {most} bytes of memory, which is out of proportion to the {file} bytes of the file"
)]
pub struct OutOfProportion {
    pub file: u64,
    pub most: u64,
}

impl Budget {
    /// The budget of a file of `bytes` bytes.
    pub fn of(bytes: usize) -> Budget {
        let file = bytes as u64;
        let most = file.saturating_mul(RATE).saturating_add(FLOOR);
        Budget { file, most, left: most }
    }

    /// Bytes that were charged.
    #[cfg(test)]
    pub fn spent(&self) -> u64 {
        self.most - self.left
    }

    /// Takes bytes from what is left.
    pub fn charge(&mut self, bytes: u64) -> Result<(), OutOfProportion> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(OutOfProportion { file: self.file, most: self.most }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_grows_with_the_file_and_is_spent_once() {
        let mut budget = Budget::of(1000);
        let most = 64_000 + (256 << 20);
        assert_eq!(budget.charge(most - 1), Ok(()));
        assert_eq!(budget.charge(2), Err(OutOfProportion { file: 1000, most }));
        assert_eq!(budget.charge(1), Ok(()));
        assert_eq!(Budget::of(usize::MAX).charge(u64::MAX), Ok(()));
    }
}

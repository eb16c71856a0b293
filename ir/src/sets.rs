//! Disjoint sets of numbers.

/// A partition of `0..n` into sets, each named by its least number.
pub(crate) struct Sets(Vec<usize>);

impl Sets {
    /// The numbers below `n`, each alone.
    pub(crate) fn new(n: usize) -> Sets {
        Sets((0..n).collect())
    }

    pub(crate) fn find(&mut self, mut x: usize) -> usize {
        while self.0[x] != x {
            self.0[x] = self.0[self.0[x]];
            x = self.0[x];
        }
        x
    }

    pub(crate) fn merge(&mut self, a: usize, b: usize) {
        let (a, b) = (self.find(a), self.find(b));
        self.0[a.max(b)] = a.min(b);
    }
}

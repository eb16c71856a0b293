//! Repetition in a sequence. Models consist of equal layers, and this module finds their period.

/// A run of equal periods: elements `first + r * period + i` are equal for all `r < count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repetition {
    /// The position of its first element.
    pub first: usize,
    /// The elements of a period.
    pub period: usize,
    /// The number of periods.
    pub count: usize,
}

/// Replaces equal strings by equal small numbers.
pub fn numbered(signature: &[String]) -> Vec<usize> {
    let mut names: Vec<&String> = signature.iter().collect();
    names.sort();
    names.dedup();
    signature.iter().map(|s| names.binary_search(&s).unwrap_or(0)).collect()
}

/// The longest accepted repetition: the one that covers most, and among those the one with the shortest period.
pub fn longest(ids: &[usize], accept: impl Fn(Repetition) -> bool) -> Option<Repetition> {
    let n = ids.len();
    let mut best: Option<Repetition> = None;
    let covered = |r: Repetition| r.period * r.count;
    for period in 1..=n / 2 {
        let mut run = 0;
        for i in 0..=n - period {
            if i + period < n && ids[i] == ids[i + period] {
                run += 1;
                continue;
            }
            let found = Repetition { first: i - run, period, count: run / period + 1 };
            if run >= period && best.is_none_or(|b| covered(found) > covered(b)) && accept(found) {
                best = Some(found);
            }
            run = 0;
        }
        // A period that covers everything cannot be beaten by a longer one.
        if best.is_some_and(|b| covered(b) + b.period > n) {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_period() {
        let found = |word: &str, least: usize| {
            let ids = numbered(&word.chars().map(|c| c.to_string()).collect::<Vec<_>>());
            longest(&ids, |r| r.period >= least).map(|r| (r.first, r.period, r.count))
        };
        assert_eq!(found("abcabcabcx", 1), Some((0, 3, 3)));
        assert_eq!(found("xaaaa", 1), Some((1, 1, 4)));
        assert_eq!(found("xaaaa", 2), Some((1, 2, 2)));
        assert_eq!(found("eaabaabaabh", 1), Some((1, 3, 3)));
        assert_eq!(found("abcdef", 1), None);
        assert_eq!(found("a", 1), None);
    }
}

//! Device counts of several groups as one mixed-radix number, with the first group as the last digit. Adding devices of
//! a group adds a constant, as long as the digit does not overflow. With one group, the number is the number of
//! devices.

use std::ops::Range;

/// The numbers from no device to all devices of every group.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Counts {
    /// Devices of each group, in its own units.
    budgets: Vec<usize>,
    /// For each group, the amount that one of its units adds; at the end, the count of numbers.
    strides: Vec<usize>,
}

impl Counts {
    /// Returns `None` if the numbers do not fit into memory.
    pub(super) fn of(budgets: Vec<usize>) -> Option<Self> {
        let mut strides = vec![1usize];
        for &budget in &budgets {
            let last = strides[strides.len() - 1];
            strides.push(last.checked_mul(budget.checked_add(1)?)?);
        }
        Some(Counts { budgets, strides })
    }

    pub(super) fn width(&self) -> usize {
        self.strides[self.budgets.len()]
    }

    /// Total units of all groups.
    pub(super) fn sum(&self) -> usize {
        self.budgets.iter().sum()
    }

    /// The amount that `units` of a group add to a number.
    pub(super) fn shift(&self, group: usize, units: usize) -> usize {
        units * self.strides[group]
    }

    /// The number minus `units` of a group, if it has that many.
    pub(super) fn without(&self, number: usize, group: usize, units: usize) -> Option<usize> {
        let digit = number / self.strides[group] % (self.budgets[group] + 1);
        (units <= digit).then(|| number - self.shift(group, units))
    }

    /// One more than the largest number to which `units` can still be added, of any groups.
    pub(super) fn end_before(&self, mut units: usize) -> usize {
        let mut end = self.width();
        for (&budget, &stride) in self.budgets.iter().zip(&self.strides) {
            let taken = units.min(budget);
            end -= taken * stride;
            units -= taken;
        }
        if units == 0 { end } else { 0 }
    }

    /// Calls `run` for the parts of a range of numbers to which `units` of a group can be added, with the amount they
    /// add.
    pub(super) fn for_each_run(
        &self,
        group: usize,
        units: usize,
        within: Range<usize>,
        mut run: impl FnMut(Range<usize>, usize),
    ) {
        if units > self.budgets[group] {
            return;
        }
        let (shift, cycle) = (self.shift(group, units), self.strides[group + 1]);
        let mut start = within.start - within.start % cycle;
        while start < within.end {
            let part = start.max(within.start)..(start + cycle - shift).min(within.end);
            if part.start < part.end {
                run(part, shift);
            }
            start += cycle;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Counts;
    use proptest::prelude::*;

    proptest! {
        /// Compares with explicit digits.
        #[test]
        fn numbers_are_their_digits(
            budgets in prop::collection::vec(0usize..5, 1..4),
            group in any::<prop::sample::Index>(),
            units in 0usize..6,
            ends in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let counts = Counts::of(budgets.clone()).expect("small");
            let group = group.index(budgets.len());
            let digits = |number: usize| {
                let mut rest = number;
                budgets.iter().map(|b| { let digit = rest % (b + 1); rest /= b + 1; digit }).collect::<Vec<_>>()
            };
            let within = ends.0.index(counts.width())..ends.1.index(counts.width() + 1);
            let mut found = Vec::new();
            counts.for_each_run(group, units, within.clone(), |run, shift| found.extend(run.map(|n| (n, n + shift))));
            let mut expect = Vec::new();
            for number in within {
                let mut sum = digits(number);
                sum[group] += units;
                if sum[group] <= budgets[group] {
                    let target = (0..counts.width()).find(|&n| digits(n) == sum).expect("a number");
                    prop_assert_eq!(counts.without(target, group, units), Some(number));
                    expect.push((number, target));
                }
            }
            prop_assert_eq!(found, expect);
            let left = |number: usize| counts.sum() - digits(number).iter().sum::<usize>();
            let end = (0..counts.width()).rev().find(|&n| left(n) >= units).map_or(0, |n| n + 1);
            prop_assert_eq!(counts.end_before(units), end);
        }
    }
}

//! Recompute fractions: how much of a stage is recomputed, in the search's terms. A fraction of its layers is
//! recomputed fully, whatever their number, and the others less. If memory runs short by little, few layers pay for it.

use altiplano_ir::plan::Execution;
use altiplano_ir::recompute::{Recomputation, Recompute};

/// The first layers of a stage, a fraction `full.0 / full.1` of all, are recomputed fully. The others are recomputed as
/// `others` says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecomputeFraction {
    full: (u32, u32),
    others: Recompute,
}

/// The search tries fractions in quarters of a stage's layers.
const PARTS: u32 = 4;

impl RecomputeFraction {
    /// The same level for all layers.
    pub const fn uniform(level: Recompute) -> RecomputeFraction {
        match level {
            Recompute::Full => RecomputeFraction { full: (1, 1), others: Recompute::Full },
            others => RecomputeFraction { full: (0, 1), others },
        }
    }

    /// The fraction that the recomputation of a stage with this many layers has.
    pub fn of(recomputation: &Recomputation, layers: usize) -> RecomputeFraction {
        let full = (0..layers).filter(|&i| recomputation.of(i) == Recompute::Full).count();
        let others = (0..layers).map(|i| recomputation.of(i)).filter(|&level| level != Recompute::Full).max();
        match others {
            Some(others) if full == 0 => RecomputeFraction::uniform(others),
            Some(others) => RecomputeFraction { full: (full as u32, layers.max(1) as u32), others },
            None => RecomputeFraction::uniform(recomputation.most()),
        }
    }

    /// The choices of the search: all levels, and mixtures if `mixed`. Products that a runtime never keeps are not
    /// recomputed to save memory.
    pub fn choices(given: Option<Recompute>, execution: &Execution, mixed: bool) -> Vec<RecomputeFraction> {
        if let Some(level) = given {
            return vec![RecomputeFraction::uniform(level)];
        }
        let others = if execution.fused_attention { Recompute::None } else { Recompute::Selective };
        let mut choices = vec![RecomputeFraction::uniform(Recompute::None)];
        choices.extend(execution.has_selective().then_some(RecomputeFraction::uniform(Recompute::Selective)));
        choices.extend((1..PARTS).filter(|_| mixed).map(|part| RecomputeFraction { full: (part, PARTS), others }));
        choices.push(RecomputeFraction::uniform(Recompute::Full));
        choices
    }

    /// Number of a stage's layers that are recomputed fully.
    pub fn full_layers(self, layers: usize) -> usize {
        (layers * self.full.0 as usize).div_ceil(self.full.1 as usize)
    }

    /// Shares of a stage's layers that are recomputed fully, and selectively.
    pub fn shares(self, layers: usize) -> (f64, f64) {
        let full = self.full_layers(layers) as f64 / layers.max(1) as f64;
        (full, if self.others == Recompute::Selective { 1.0 - full } else { 0.0 })
    }

    /// Returns true if all layers of the stage have one level, or if this fraction gives fewer full layers than all of
    /// them and more than the next smaller fraction.
    pub fn is_distinct(self, layers: usize) -> bool {
        let (part, of) = self.full;
        let smaller = || RecomputeFraction { full: (part.saturating_sub(1), of), ..self }.full_layers(layers);
        of == 1 || (smaller() + 1..layers).contains(&self.full_layers(layers))
    }

    /// The level of each layer of a stage.
    pub fn levels(self, layers: usize) -> Recomputation {
        let full = self.full_layers(layers);
        let level = |i: usize| if i < full { Recompute::Full } else { self.others };
        (0..layers).map(level).collect::<Vec<_>>().into()
    }
}

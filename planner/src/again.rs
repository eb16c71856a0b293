//! How much of a stage is computed again, in the terms of the search: a part of its layers wholly, whatever their number, and of the
//! others more or less. Where memory runs short by little, few layers pay for it.

use altiplano_ir::plan::Execution;
use altiplano_ir::recompute::{Recomputation, Recompute};

/// The first `full.0` of every `full.1` layers are computed again wholly, of the others as much as `others` says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Again {
    full: (u32, u32),
    others: Recompute,
}

/// Parts of a stage's layers, in quarters, that the search tries to compute again.
const PARTS: u32 = 4;

impl Again {
    /// All layers alike.
    pub const fn alike(level: Recompute) -> Again {
        match level {
            Recompute::Full => Again { full: (1, 1), others: Recompute::Full },
            others => Again { full: (0, 1), others },
        }
    }

    /// As a stage of so many layers says.
    pub fn of(recomputation: &Recomputation, layers: usize) -> Again {
        let full = (0..layers).filter(|&i| recomputation.of(i) == Recompute::Full).count();
        let others = (0..layers).map(|i| recomputation.of(i)).filter(|&level| level != Recompute::Full).max();
        match others {
            Some(others) => Again { full: (full as u32, layers.max(1) as u32), others },
            None => Again::alike(recomputation.most()),
        }
    }

    /// What the search tries: all levels, and mixtures where `mixed`. Products that a runtime never keeps are not computed again to
    /// save memory.
    pub fn choices(given: Option<Recompute>, execution: &Execution, mixed: bool) -> Vec<Again> {
        if let Some(level) = given {
            return vec![Again::alike(level)];
        }
        let others = if execution.fused_attention { Recompute::None } else { Recompute::Selective };
        let mut choices = vec![Again::alike(Recompute::None)];
        choices.extend(execution.has_selective().then_some(Again::alike(Recompute::Selective)));
        choices.extend((1..PARTS).filter(|_| mixed).map(|part| Again { full: (part, PARTS), others }));
        choices.push(Again::alike(Recompute::Full));
        choices
    }

    /// How many of a stage's layers are computed again wholly.
    pub fn full_layers(self, layers: usize) -> usize {
        (layers * self.full.0 as usize).div_ceil(self.full.1 as usize)
    }

    /// The parts of a stage's layers that are computed again wholly, and selectively.
    pub fn shares(self, layers: usize) -> (f64, f64) {
        let full = self.full_layers(layers) as f64 / layers.max(1) as f64;
        (full, if self.others == Recompute::Selective { 1.0 - full } else { 0.0 })
    }

    /// Whether a stage of so many layers is not all computed again by this part, nor as much of it by a smaller one.
    pub fn is_distinct(self, layers: usize) -> bool {
        let (part, of) = self.full;
        let smaller = || Again { full: (part.saturating_sub(1), of), ..self }.full_layers(layers);
        of == 1 || (smaller() + 1..layers).contains(&self.full_layers(layers))
    }

    /// What each layer of a stage computes again.
    pub fn levels(self, layers: usize) -> Recomputation {
        let full = self.full_layers(layers);
        let level = |i: usize| if i < full { Recompute::Full } else { self.others };
        (0..layers).map(level).collect::<Vec<_>>().into()
    }
}

//! Sharding rules and strategies: the one idea of the project.
//!
//! An op's rule names its loop factors and says which dimension of each operand and of the result each
//! factor indexes, as einsum does. A strategy assigns mesh axes to factors. The shardings that operands must
//! have, the sharding of the result, local shapes, and hence cost, communication and the local program
//! follow from rule and strategy with no further code per op.

use crate::mesh::{AxisId, Mesh};
use crate::op::Reducer;
use crate::sharding::{Axes, DimLayout, Segment, Sharding};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

/// What splitting a factor over an axis means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorKind {
    /// Iterations are independent: operands and result are split alike.
    Parallel,
    /// The factor is summed (or otherwise reduced) away: the result is partial over the axis.
    Reduction(Reducer),
    /// The op needs all of it on each device.
    Whole,
}

/// One loop of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor {
    pub size: u64,
    pub kind: FactorKind,
}

/// The factors of an op, and for each dimension of each operand and of the result the factors it is made of,
/// major first. The sizes of a dimension's factors multiply to its size.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ShardingRule {
    pub factors: Vec<Factor>,
    pub operands: Vec<Vec<Vec<u8>>>,
    pub result: Vec<Vec<u8>>,
    /// Sets of operands in which the op is jointly linear: if these are partial sums over an axis (and the
    /// others replicated over it), so is the result.
    pub linear: Vec<Vec<u8>>,
    /// Factors along which the op computes positions from a device's coordinates (an iota's count, the rows of
    /// a split table): these are split into contiguous blocks only, never with `outer > 1`.
    pub contiguous: Vec<u8>,
    /// Dimensions that windows slide over.
    pub windows: Vec<Window>,
}

/// A factor that is split when one of `followers` is, into as many equal blocks: the op reads its own block of it and edges
/// of the neighbouring ones, which [`crate::op::Operator::local`] fetches (a halo exchange).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    pub factor: u8,
    pub followers: Vec<u8>,
}

/// What one mesh axis does in an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AxisUse {
    /// Every device along the axis does the same.
    Replicated,
    /// The axis splits a factor. With `outer > 1` the factor is seen as `outer` blocks, each split.
    Factor { factor: u8, outer: u64 },
    /// The axis carries a partial sum through the operands of `ShardingRule::linear[set]`.
    Partial { set: u8 },
}

/// An assignment of mesh axes to an op's factors, one entry per axis of the mesh. Where several axes
/// split one factor, the first is the major one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Strategy(pub Vec<AxisUse>);

impl Strategy {
    /// Every device does all of it.
    pub fn replicated(mesh: &Mesh) -> Self {
        Strategy(vec![AxisUse::Replicated; mesh.axes.len()])
    }

    /// The axes that split each of an op's factors, major first.
    pub fn factor_axes(&self, num_factors: usize) -> Vec<Vec<AxisId>> {
        let mut axes = vec![Vec::new(); num_factors];
        for (axis, use_) in (0..).map(AxisId).zip(&self.0) {
            if let AxisUse::Factor { factor, .. } = use_ {
                axes[*factor as usize].push(axis);
            }
        }
        axes
    }
}

/// The shardings that follow from a rule and a strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpShardings {
    pub operands: Vec<Sharding>,
    pub result: Sharding,
}

impl ShardingRule {
    /// Whether splitting `factor` splits operand `operand`.
    pub fn splits_operand(&self, operand: usize, factor: u8) -> bool {
        let follows = |f: &u8| self.windows.iter().any(|w| w.factor == *f && w.followers.contains(&factor));
        self.operands[operand].iter().flatten().any(|f| *f == factor || follows(f))
    }

    /// Adds a factor and returns its index.
    pub fn factor(&mut self, size: u64, kind: FactorKind) -> u8 {
        self.factors.push(Factor { size, kind });
        (self.factors.len() - 1) as u8
    }

    /// A rule in which operand and result dimensions correspond one to one (elementwise ops).
    pub fn elementwise(shape: &[u64], num_operands: usize, linear: Vec<Vec<u8>>) -> Self {
        let mut rule = ShardingRule { linear, ..Default::default() };
        let dims: Vec<Vec<u8>> = shape.iter().map(|&d| vec![rule.factor(d, FactorKind::Parallel)]).collect();
        rule.operands = vec![dims.clone(); num_operands];
        rule.result = dims;
        rule
    }

    /// Whether this op may be run with `strategy` on `mesh`: factors exist, are not needed whole, and divide.
    pub fn allows(&self, strategy: &Strategy, mesh: &Mesh) -> bool {
        if strategy.0.len() != mesh.axes.len() {
            return false;
        }
        let mut left: Vec<u64> = self.factors.iter().map(|f| f.size).collect();
        let mut outer_of = vec![0u64; self.factors.len()];
        let splits_evenly = |window: &Window| {
            let uses = || {
                strategy.0.iter().zip(mesh.axis_ids()).filter_map(|(u, axis)| match u {
                    AxisUse::Factor { factor, outer } if window.followers.contains(factor) => {
                        Some((factor, outer, axis))
                    }
                    _ => None,
                })
            };
            let parts: u64 = uses().map(|(_, _, axis)| mesh.size(axis)).product();
            let first = uses().next();
            uses().all(|(factor, &outer, _)| outer == 1 && first.is_some_and(|f| f.0 == factor))
                && self.factors[window.factor as usize].size.is_multiple_of(parts)
        };
        if !self.windows.iter().all(splits_evenly) {
            return false;
        }
        strategy.0.iter().zip(mesh.axis_ids()).all(|(use_, axis)| match *use_ {
            AxisUse::Replicated => true,
            AxisUse::Partial { set } => (set as usize) < self.linear.len(),
            AxisUse::Factor { factor, outer } => {
                let f = factor as usize;
                let Some(info) = self.factors.get(f) else { return false };
                let strided = outer > 1 && self.contiguous.contains(&factor);
                if info.kind == FactorKind::Whole || outer == 0 || info.size % outer != 0 || strided {
                    return false;
                }
                if outer_of[f] == 0 {
                    outer_of[f] = outer;
                    left[f] = info.size / outer;
                }
                let n = mesh.size(axis);
                let fits = outer_of[f] == outer && left[f].is_multiple_of(n);
                left[f] /= n;
                fits
            }
        })
    }

    /// The sharding each operand must have and the one the result gets. `strategy` must be allowed.
    pub fn shardings(&self, strategy: &Strategy, mesh: &Mesh) -> OpShardings {
        let mut splits: SmallVec<[(u64, Axes); 8]> = smallvec![(1, Axes::new()); self.factors.len()];
        for (use_, axis) in strategy.0.iter().zip(mesh.axis_ids()) {
            if let AxisUse::Factor { factor, outer } = *use_ {
                splits[factor as usize].0 = outer;
                splits[factor as usize].1.push(axis);
            }
        }
        for window in &self.windows {
            let follower = window.followers.iter().find(|&&f| !splits[f as usize].1.is_empty());
            if let Some(&follower) = follower {
                splits[window.factor as usize] = splits[follower as usize].clone();
            }
        }
        let layout = |factors: &Vec<u8>| {
            let segments = factors.iter().flat_map(|&f| {
                let (outer, axes) = &splits[f as usize];
                let size = self.factors[f as usize].size;
                let outer_segment = (*outer > 1).then_some(Segment { size: *outer, axes: Axes::new() });
                outer_segment.into_iter().chain([Segment { size: size / outer, axes: axes.clone() }])
            });
            DimLayout::from_segments(segments, mesh)
        };
        let operand = |(index, dims): (usize, &Vec<Vec<u8>>)| {
            let mut sharding = Sharding { dims: dims.iter().map(layout).collect(), partial: Vec::new() };
            for (use_, axis) in strategy.0.iter().zip(mesh.axis_ids()) {
                if let AxisUse::Partial { set } = *use_
                    && self.linear[set as usize].contains(&(index as u8))
                {
                    sharding.partial.push((axis, Reducer::Sum));
                }
            }
            sharding
        };
        let mut result = Sharding { dims: self.result.iter().map(layout).collect(), partial: Vec::new() };
        for (use_, axis) in strategy.0.iter().zip(mesh.axis_ids()) {
            match *use_ {
                AxisUse::Replicated => {}
                AxisUse::Partial { .. } => result.partial.push((axis, Reducer::Sum)),
                AxisUse::Factor { factor, .. } => {
                    if let FactorKind::Reduction(reducer) = self.factors[factor as usize].kind {
                        result.partial.push((axis, reducer));
                    }
                }
            }
        }
        OpShardings { operands: self.operands.iter().enumerate().map(operand).collect(), result }
    }

    /// All allowed strategies on `mesh`, in a fixed order. `outers` lists for each factor the block counts
    /// to consider besides 1 (see [`AxisUse::Factor`]); `partial` includes partial sums passing through.
    pub fn strategies(&self, mesh: &Mesh, outers: &[Vec<u64>], partial: bool) -> Vec<Strategy> {
        let mut uses = vec![AxisUse::Replicated];
        for (f, factor) in self.factors.iter().enumerate() {
            if factor.kind != FactorKind::Whole && factor.size > 1 {
                uses.push(AxisUse::Factor { factor: f as u8, outer: 1 });
                let more = outers.get(f).into_iter().flatten().filter(|&&o| o > 1);
                uses.extend(more.map(|&outer| AxisUse::Factor { factor: f as u8, outer }));
            }
        }
        if partial {
            uses.extend((0..self.linear.len()).map(|s| AxisUse::Partial { set: s as u8 }));
        }
        let mut all = vec![Vec::new()];
        for axis in mesh.axis_ids() {
            let choices: &[AxisUse] = if mesh.size(axis) == 1 { &uses[..1] } else { &uses };
            all = all
                .iter()
                .flat_map(|s: &Vec<AxisUse>| choices.iter().map(move |&u| s.iter().copied().chain([u]).collect()))
                .collect();
        }
        all.into_iter().map(Strategy).filter(|s| self.allows(s, mesh)).collect()
    }
}

//! Sharding rules and strategies: the one idea of the project.
//!
//! The rule of an op names its loop factors. It says which dimension of each operand and of the result each factor
//! indexes, as einsum does. A strategy assigns mesh axes to factors.
//!
//! Rule and strategy determine the shardings of operands and result, and the local shapes. From these follow the cost,
//! the communication and the local program, with no further code per op.

use crate::mesh::{AxisId, Mesh};
use crate::op::Reducer;
use crate::sharding::{Axes, DimLayout, Segment, Sharding};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

/// The effect of splitting a factor over an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorKind {
    /// Iterations are independent. Operands and result are split alike.
    Parallel,
    /// The op reduces the factor away, for example by a sum. The result is partial over the axis.
    Reduction(Reducer),
    /// Each device needs the entire factor.
    Whole,
}

/// One loop of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor {
    pub size: u64,
    pub kind: FactorKind,
}

/// The loop factors of an op, and the factors that make up each dimension of its operands and result.
///
/// Factors of a dimension are listed major first, and their sizes multiply to its size.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ShardingRule {
    pub factors: Vec<Factor>,
    pub operands: Vec<Vec<Vec<u8>>>,
    pub result: Vec<Vec<u8>>,
    /// Sets of operands in which the op is jointly linear. If the operands of a set are partial sums over an axis, and
    /// the others are replicated over it, then the result is a partial sum too.
    pub linear: Vec<Vec<u8>>,
    /// Factors whose positions the op computes from a device's coordinates, such as an iota's count or the rows of a
    /// split table. They are split into contiguous blocks only, never with `outer > 1`.
    pub contiguous: Vec<u8>,
    /// Dimensions that windows slide over.
    pub windows: Vec<Window>,
}

/// A factor that is split into as many equal blocks as one of its `followers`. The op reads its own block and the edges
/// of neighbouring blocks. [`crate::op::Operator::local`] fetches these edges (a halo exchange).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    pub factor: u8,
    pub followers: Vec<u8>,
}

/// The role of one mesh axis in an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AxisUse {
    /// All devices along the axis do the same work.
    Replicated,
    /// The axis splits a factor. With `outer > 1` the factor is seen as `outer` blocks, and each block is split.
    Factor { factor: u8, outer: u64 },
    /// The axis carries a partial sum through the operands of `ShardingRule::linear[set]`.
    Partial { set: u8 },
}

/// An assignment of mesh axes to the factors of an op, with one entry per mesh axis. If several axes split one factor,
/// the first is the major one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Strategy(pub Vec<AxisUse>);

impl Strategy {
    /// The strategy in which every device does all the work.
    pub fn replicated(mesh: &Mesh) -> Self {
        Strategy(vec![AxisUse::Replicated; mesh.axes.len()])
    }

    /// The axes that split each factor, major first.
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
    /// Returns true if splitting `factor` splits the operand, directly or through a window.
    pub fn splits_operand(&self, operand: usize, factor: u8) -> bool {
        let follows = |f: &u8| self.windows.iter().any(|w| w.factor == *f && w.followers.contains(&factor));
        self.operands[operand].iter().flatten().any(|f| *f == factor || follows(f))
    }

    /// Adds a factor and returns its index.
    pub fn factor(&mut self, size: u64, kind: FactorKind) -> u8 {
        self.factors.push(Factor { size, kind });
        (self.factors.len() - 1) as u8
    }

    /// The rule of an elementwise op: operand and result dimensions correspond one to one.
    pub fn elementwise(shape: &[u64], num_operands: usize, linear: Vec<Vec<u8>>) -> Self {
        let mut rule = ShardingRule { linear, ..Default::default() };
        let dims: Vec<Vec<u8>> = shape.iter().map(|&d| vec![rule.factor(d, FactorKind::Parallel)]).collect();
        rule.operands = vec![dims.clone(); num_operands];
        rule.result = dims;
        rule
    }

    /// Returns true if the op can run with `strategy` on `mesh`. Each factor that is split must exist, must not be
    /// needed whole, and must divide evenly.
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

    /// The sharding that each operand needs, and the sharding of the result. `strategy` must be allowed.
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
            if let [f] = factors[..]
                && let (1, axes) = &splits[f as usize]
            {
                return DimLayout::split(self.factors[f as usize].size, axes.iter().copied());
            }
            let segments = factors.iter().flat_map(|&f| {
                let (outer, axes) = &splits[f as usize];
                let size = self.factors[f as usize].size;
                let outer_segment = (*outer > 1).then_some(Segment { size: *outer, axes: Axes::new() });
                outer_segment.into_iter().chain([Segment { size: size / outer, axes: Axes::from_slice(axes) }])
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

    /// All allowed strategies on `mesh`, in a fixed order. `outers` lists for each factor the block counts to consider
    /// besides 1 (see [`AxisUse::Factor`]). With `partial`, strategies may pass partial sums through the op.
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

//! Loss scaling: the loss is multiplied by a number before it is differentiated, so that gradients which are too small for f16 do not
//! become zero, and gradients are divided by it before anything is made of them. A step whose gradients are not finite then changes
//! nothing but the scale, which is found while training goes on (Micikevicius et al. 2018, section 3.2).
//!
//! The scale is state of the training step, and how it changes is part of the update, so that whatever executes programs scales alike.
//!
//! Every stage computes the scale from the same count of gradients that are not finite. A skipped step selects the old values, so executors
//! know nothing of it.

use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::literal::Literal;
use crate::op::{Binary, Direction, Op, Reducer, Unary};
use crate::types::TensorType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a scale that is found starts, and after how many steps without overflow it grows: the defaults of PyTorch's `GradScaler`.
pub const INITIAL: f64 = 65536.0;
pub const INTERVAL: u32 = 2000;
/// By which it grows, and shrinks where gradients overflow.
pub const FACTOR: f64 = 2.0;

/// Slots of [`crate::program::ALL_PARAMETERS`], which start at 0 as all state does: the scale of the next step, 0 where that is the
/// initial one;
pub const SCALE: &str = "loss scale";
/// the steps since it changed;
pub const UNCHANGED_STEPS: &str = "steps since the loss scale changed";
/// and the steps of the run that were skipped.
pub const SKIPPED_STEPS: &str = "skipped steps";

/// By what a loss is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum LossScale {
    /// By this in every step.
    Fixed(f64),
    /// By what gradients allow: half of it after a step that was skipped, twice as much after `interval` steps that were not.
    Dynamic { initial: f64, interval: u32 },
}

/// The state of loss scaling in a graph that updates parameters: f32 scalars.
#[derive(Clone, Copy, Debug)]
pub struct ScaleState {
    pub skipped: ValueId,
    /// The steps since a dynamic scale changed.
    pub unchanged: Option<ValueId>,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale::Dynamic { initial: INITIAL, interval: INTERVAL }
    }
}

impl LossScale {
    /// What a model is trained with unless something else is asked for: a scale that is found where something that depends on a
    /// parameter is f16. The other float types have numbers as small as gradients are.
    pub fn of_model(graph: &Graph) -> Option<LossScale> {
        let trained = graph.depends_on(|v| graph.is_trained(v));
        let is_small = |v: ValueId| trained[v.index()] && graph.ty(v).dtype == DType::F16;
        graph.values().any(is_small).then(LossScale::default)
    }

    /// Whether there can be such a scale where gradients are so many steps late: the next step begins before they have told whether
    /// the scale was too large.
    pub fn is_of_staleness(&self, staleness: u32) -> bool {
        matches!(self, LossScale::Fixed(_)) || staleness == 0
    }

    /// The names of the state that there is, each an f32 scalar that is the same on all devices.
    pub fn slots(&self) -> &'static [&'static str] {
        match self {
            LossScale::Fixed(_) => &[SKIPPED_STEPS],
            LossScale::Dynamic { .. } => &[SKIPPED_STEPS, SCALE, UNCHANGED_STEPS],
        }
    }

    /// The largest scale of a loss of this type: a power of two that it has, whose inverse is a normal number of single precision.
    pub fn most(loss: DType) -> f64 {
        let greatest = loss.float_format().map_or(f64::MAX, |format| format.greatest());
        greatest.log2().floor().min(-f64::from(f32::MIN_POSITIVE).log2()).exp2()
    }

    /// What is wrong with the scale for a loss of this type.
    pub fn problem(&self, loss: DType) -> Option<&'static str> {
        match *self {
            LossScale::Fixed(scale) if !(scale >= f64::from(f32::MIN_POSITIVE) && scale <= Self::most(loss)) => {
                Some("must be above 0, and no larger than the largest power of two of the loss's type")
            }
            LossScale::Dynamic { initial, .. } if !(initial.is_finite() && initial >= f64::from(f32::MIN_POSITIVE)) => {
                Some("must start at a finite number above 0")
            }
            LossScale::Dynamic { interval: 0, .. } => Some("must have an interval of one step or more"),
            _ => None,
        }
    }

    /// The scale of the first step of a loss of this type.
    pub fn first(&self, loss: DType) -> f64 {
        match *self {
            LossScale::Fixed(scale) => scale,
            LossScale::Dynamic { initial, .. } => initial.min(Self::most(loss)),
        }
    }

    /// The scale of a step, an f32 scalar; `kept` is the state of that name, which a dynamic scale has.
    pub fn now(&self, graph: &mut Graph, kept: Option<ValueId>, loss: DType) -> ValueId {
        let first = graph.constant(Literal::splat(TensorType::scalar(DType::F32), self.first(loss)));
        let Some(kept) = kept else { return first };
        let zero = graph.splat_like(kept, 0.0);
        let is_kept = graph.compare(Direction::Gt, kept, zero);
        graph.select(is_kept, kept, first)
    }

    /// The state after a step with the scale `now`, in the order of [`LossScale::slots`]; `overflows` is a boolean scalar.
    pub fn after(
        &self,
        graph: &mut Graph,
        state: ScaleState,
        now: ValueId,
        overflows: ValueId,
        loss: DType,
    ) -> Vec<ValueId> {
        let one = graph.splat_like(state.skipped, 1.0);
        let zero = graph.splat_like(state.skipped, 0.0);
        let more = graph.select(overflows, one, zero);
        let skipped = graph.add(state.skipped, more);
        let (&LossScale::Dynamic { interval, .. }, Some(unchanged)) = (self, state.unchanged) else {
            return vec![skipped];
        };
        let passed = graph.add(unchanged, one);
        let passed = graph.select(overflows, zero, passed);
        let interval = graph.splat_like(passed, f64::from(interval));
        let grows = graph.compare(Direction::Ge, passed, interval);
        let scaled = |graph: &mut Graph, factor: f64, bound: f64, by: Binary| {
            let factor = graph.splat_like(now, factor);
            let scaled = graph.mul(now, factor);
            let bound = graph.splat_like(now, bound);
            graph.emit(Op::Binary(by), &[scaled, bound])
        };
        let larger = scaled(graph, FACTOR, Self::most(loss), Binary::Minimum);
        // Never 0, which is where a scale starts.
        let smaller = scaled(graph, 1.0 / FACTOR, f64::from(f32::MIN_POSITIVE), Binary::Maximum);
        let grown = graph.select(grows, larger, now);
        let scale = graph.select(overflows, smaller, grown);
        vec![skipped, scale, graph.select(grows, zero, passed)]
    }
}

/// How many elements of a local tensor are no finite numbers, as an f32 scalar. Unlike a sum of squares, which overflows itself where
/// gradients are large, it is above 0 where one of them is not finite and nowhere else.
pub fn overflows(graph: &mut Graph, x: ValueId) -> ValueId {
    let finite = graph.unary(Unary::IsFinite, x);
    let shape = graph.shape(x).to_vec();
    let like = TensorType { dtype: DType::F32, shape };
    let [none, one] = [0.0, 1.0].map(|value| graph.constant(Literal::splat(like.clone(), value)));
    let count = graph.select(finite, none, one);
    let dims: Vec<usize> = (0..like.rank()).collect();
    graph.reduce(count, Reducer::Sum, &dims)
}

impl fmt::Display for LossScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LossScale::Fixed(scale) => write!(f, "{scale}"),
            LossScale::Dynamic { initial, .. } => write!(f, "dynamic from {initial}"),
        }
    }
}

#[cfg(test)]
#[path = "loss_scale_tests.rs"]
mod tests;

//! Loss scaling. The loss is multiplied by a scale before differentiation, so that gradients too small for f16 do not
//! become zero. Gradients are divided by the scale before any use. A step with non-finite gradients changes nothing but
//! the scale, which is thus found during training (Micikevicius et al. 2018, section 3.2).
//!
//! The scale is state of the training step, and the update changes it. So every executor of programs scales alike.
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

/// The initial value of a dynamic scale, and the number of steps without overflow after which it grows. These are the
/// defaults of PyTorch's `GradScaler`.
pub const INITIAL: f64 = 65536.0;
pub const INTERVAL: u32 = 2000;
/// The factor by which a scale grows, and shrinks if gradients overflow.
const FACTOR: f64 = 2.0;

/// Slot of [`crate::program::ALL_PARAMETERS`]: the scale of the next step. Like all state it starts at 0, which stands
/// for the initial scale.
pub const SCALE: &str = "loss scale";
/// Slot of [`crate::program::ALL_PARAMETERS`]: the steps since the scale changed.
pub const UNCHANGED_STEPS: &str = "steps since the loss scale changed";
/// Slot of [`crate::program::ALL_PARAMETERS`]: the skipped steps of the run.
pub const SKIPPED_STEPS: &str = "skipped steps";

/// The scale of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum LossScale {
    /// The same scale in every step.
    Fixed(f64),
    /// A scale that adapts to gradients. It is halved after a skipped step, and doubled after `interval` steps without
    /// one.
    Dynamic { initial: f64, interval: u32 },
}

/// The state of loss scaling in a graph that updates parameters, as f32 scalars.
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
    /// The default for training a model: a dynamic scale if a value that depends on a parameter is f16. The other float
    /// types can represent small gradients.
    pub fn of_model(graph: &Graph) -> Option<LossScale> {
        let trained = graph.depends_on(|v| graph.is_trained(v));
        let is_small = |v: ValueId| trained[v.index()] && graph.ty(v).dtype == DType::F16;
        graph.values().any(is_small).then(LossScale::default)
    }

    /// Returns true if the scale works with gradients that are `staleness` steps late. A dynamic scale does not,
    /// because the next step begins before it is known if the scale was too large.
    pub fn is_of_staleness(&self, staleness: u32) -> bool {
        matches!(self, LossScale::Fixed(_)) || staleness == 0
    }

    /// The names of the scale's state, each an f32 scalar that is the same on all devices.
    pub fn slots(&self) -> &'static [&'static str] {
        match self {
            LossScale::Fixed(_) => &[SKIPPED_STEPS],
            LossScale::Dynamic { .. } => &[SKIPPED_STEPS, SCALE, UNCHANGED_STEPS],
        }
    }

    /// The largest scale of a loss of this type: a power of two in its range, whose inverse is a normal f32.
    pub(crate) fn most(loss: DType) -> f64 {
        let greatest = loss.float_format().map_or(f64::MAX, |format| format.greatest());
        greatest.log2().floor().min(-f64::from(f32::MIN_POSITIVE).log2()).exp2()
    }

    /// The problem of the scale for a loss of this type, if any.
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

    /// The scale of the first step for a loss of this type.
    pub fn first(&self, loss: DType) -> f64 {
        match *self {
            LossScale::Fixed(scale) => scale,
            LossScale::Dynamic { initial, .. } => initial.min(Self::most(loss)),
        }
    }

    /// The scale of a step as an f32 scalar. `kept` is the state of that name, which a dynamic scale has.
    pub fn now(&self, graph: &mut Graph, kept: Option<ValueId>, loss: DType) -> ValueId {
        let first = graph.constant(Literal::splat(TensorType::scalar(DType::F32), self.first(loss)));
        let Some(kept) = kept else { return first };
        let zero = graph.splat_like(kept, 0.0);
        let is_kept = graph.compare(Direction::Gt, kept, zero);
        graph.select(is_kept, kept, first)
    }

    /// The state after a step with the scale `now`, in the order of [`LossScale::slots`]. `overflows` is a boolean
    /// scalar.
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
        // Never 0, which stands for the initial scale.
        let smaller = scaled(graph, 1.0 / FACTOR, f64::from(f32::MIN_POSITIVE), Binary::Maximum);
        let grown = graph.select(grows, larger, now);
        let scale = graph.select(overflows, smaller, grown);
        vec![skipped, scale, graph.select(grows, zero, passed)]
    }
}

/// The number of non-finite elements of a local tensor, as an f32 scalar. A sum of squares would not do, because it
/// overflows itself if gradients are large.
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

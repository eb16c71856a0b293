//! Mixtures of experts: each token goes to the few experts that a router scores highest for it (Shazeer et al. 2017).
//!
//! Every sequence is routed by itself, so that a batch can be cut into microbatches, and every expert takes at most
//! `capacity` of its tokens, in their order (GShard, Lepikhin et al. 2020): what each would get were all chosen alike,
//! times the capacity factor. An expert's tokens are looked up, and what it makes of them is added back where they came
//! from, so no work goes into products with zeros. The weights of all experts are one tensor; splitting its first
//! dimension is expert parallelism.

use super::blocks::{Activation, Block, Builder};
use super::error::{ConfigError, Note};
use crate::array;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{ArgSort, Binary, DotGeneral, Gather, GatherDims, Op, OutOfBounds, ScatterAdd};

/// Tokens for each expert beyond what an even spread gives, as Switch Transformers (Fedus et al. 2021) have it in training.
const CAPACITY_FACTOR: f64 = 1.25;

/// Sizes of the experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    pub count: u64,
    /// How many each token goes to.
    pub chosen: u64,
    pub width: u64,
    pub activation: Activation,
}

impl Experts {
    /// What the experts make of `x`, `[B, S, hidden]`: the sum over those chosen for each token, times its gate. `gates`
    /// is `[B, S, experts]` and zero for experts that are not chosen, which `chosen` says.
    pub fn build(&self, b: &mut Builder, x: ValueId, gates: ValueId, chosen: ValueId) -> Block {
        let [batch, tokens, hidden] = b.graph.shape(x)[..] else {
            return Err(array::ShapeError::Attribute("experts take three dimensions").into());
        };
        let capacity = self.capacity(b, tokens);
        b.within("experts", |b| {
            let gate_up = b.weight("gate_up_proj", &[self.count, 2 * self.width, hidden])?;
            let down = b.weight("down_proj", &[self.count, hidden, self.width])?;
            let g = &mut b.graph;
            // The positions of an expert's tokens before all others, both in their order.
            let passed_by = array::unary(g, crate::op::Unary::Not, chosen)?;
            let passed_by = array::permute(g, passed_by, &[0, 2, 1])?;
            let key = g.convert(passed_by, DType::I32);
            let order = g.push(Op::ArgSort(ArgSort { dim: 2, descending: vec![false] }), &[key])?;
            let slots = array::slice_dim(g, order, 2, 0, capacity as i64, 1)?;

            let taken =
                g.push(Op::Gather(Gather { dims: rows(hidden), out_of_bounds: OutOfBounds::Clamp }), &[x, slots])?;
            // [B, E, C, hidden] with [E, 2 width, hidden]: [E, B, C, 2 width].
            let both = g.push(Op::DotGeneral(per_expert([1, 0], [3, 2])), &[taken, gate_up])?;
            let parts = array::split(g, both, 3, &[self.width, self.width])?;
            let gate = self.activation.apply(g, parts[0])?;
            let inner = array::binary(g, Binary::Multiply, gate, parts[1])?;
            let made = g.push(Op::DotGeneral(per_expert([0, 0], [3, 2])), &[inner, down])?;
            let made = array::permute(g, made, &[1, 0, 2, 3])?;

            let gates = array::permute(g, gates, &[0, 2, 1])?;
            let gates = array::take_along(g, gates, 2, slots, false)?;
            let gates = array::unsqueeze(g, gates, 3)?;
            let gates = g.convert(gates, b.dtype);
            let weighted = array::binary(g, Binary::Multiply, made, gates)?;
            let back = ScatterAdd { dims: rows(hidden), shape: vec![batch, tokens, hidden] };
            Ok(g.push(Op::ScatterAdd(back), &[slots, weighted])?)
        })
    }

    /// Tokens of a sequence that an expert takes.
    fn capacity(&self, b: &mut Builder, tokens: u64) -> u64 {
        let factor = b.options.capacity_factor.unwrap_or(CAPACITY_FACTOR);
        let even = tokens as f64 * self.chosen as f64 / self.count as f64;
        let capacity = ((even * factor).ceil() as u64).clamp(1, tokens);
        let all = self.count as f64 / self.chosen as f64;
        let note = Note::Capacity { tokens: capacity, sequence: tokens, factor, all };
        if capacity < tokens && !b.notes.contains(&note) {
            b.notes.push(note);
        }
        capacity
    }
}

/// Rows of `[B, S, hidden]` at `[B, E, C]` positions of the same sample: `[B, E, C, hidden]`.
fn rows(hidden: u64) -> GatherDims {
    GatherDims {
        offset_dims: vec![3],
        collapsed_slice_dims: vec![1],
        operand_batching_dims: vec![0],
        indices_batching_dims: vec![0],
        start_index_map: vec![1],
        index_vector_dim: 3,
        slice_sizes: vec![1, 1, hidden],
    }
}

fn per_expert(batch: [usize; 2], contract: [usize; 2]) -> DotGeneral {
    DotGeneral {
        lhs_batch: vec![batch[0]],
        rhs_batch: vec![batch[1]],
        lhs_contract: vec![contract[0]],
        rhs_contract: vec![contract[1]],
    }
}

/// `x` where `keep` holds and zero elsewhere.
pub fn where_chosen(g: &mut Graph, keep: ValueId, x: ValueId) -> array::Built {
    let zero = array::full_like(g, x, 0.0)?;
    array::select(g, keep, x, zero)
}

/// Scores of `[.., experts]` over their sum.
pub fn normalised(g: &mut Graph, scores: ValueId, least: f64) -> array::Built {
    let last = g.shape(scores).len() - 1;
    let mut total = array::sum(g, scores, &[last], true)?;
    if least != 0.0 {
        total = array::with_number(g, Binary::Add, total, least)?;
    }
    array::binary(g, Binary::Divide, scores, total)
}

/// Scores of the experts for each token, in f32: `[B, S, experts]`.
pub fn router_logits(b: &mut Builder, x: ValueId, experts: u64) -> Block {
    b.within("gate", |b| {
        let hidden = b.graph.shape(x).last().copied().unwrap_or(1);
        let weight = b.weight("weight", &[experts, hidden])?;
        let g = &mut b.graph;
        let (x, weight) = (wide(g, x), wide(g, weight));
        Ok::<_, ConfigError>(array::linear(g, x, weight, None)?)
    })
}

fn wide(g: &mut Graph, x: ValueId) -> ValueId {
    if g.ty(x).dtype.bytes() < DType::F32.bytes() { g.convert(x, DType::F32) } else { x }
}

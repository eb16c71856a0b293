//! State spaces of Mamba-2 (Dao and Gu 2024). Each head has a state that decays by its own factor at each token and
//! takes up the token's values. Each token reads the state with its own query.
//!
//! As in the paper's algorithm, a sequence is divided into chunks. Within a chunk, tokens see each other as in
//! attention, with decays as the mask. A chunk's contribution to the state is a matrix product, and so is that of the
//! earlier chunks. So all work is in matrix products, and no step waits for the previous one.

use super::blocks::{Activation, Block, Builder, Norm};
use altiplano_ir::array::{self, Conv};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Direction, DotGeneral, Op, Reducer, Unary};

/// The sizes of a state space.
#[derive(Clone, Debug)]
pub(crate) struct StateSpace {
    pub heads: u64,
    pub head_width: u64,
    /// The numbers of state per number of a head.
    pub state: u64,
    /// The number of groups of heads that share the projections that write and read the state.
    pub groups: u64,
    /// The number of tokens that the convolution before the state space sees.
    pub kernel: u64,
    pub chunk: u64,
    pub bias: bool,
    pub conv_bias: bool,
    pub activation: Activation,
    pub eps: f64,
    /// The limits to which steps are clamped.
    pub step_limits: (f64, f64),
}

impl StateSpace {
    /// The width of all heads.
    fn inner(&self) -> u64 {
        self.heads * self.head_width
    }

    /// Builds the state space for `x`, which is `[B, S, hidden]`.
    pub(crate) fn build(&self, b: &mut Builder, x: ValueId) -> Block {
        let [batch, tokens, hidden] = b.graph.shape(x)[..] else {
            return Err(array::ShapeError::Attribute("state spaces take three dimensions").into());
        };
        let (inner, shared) = (self.inner(), self.groups * self.state);
        let projected = b.linear("in_proj", x, 2 * inner + 2 * shared + self.heads, self.bias)?;
        let parts = array::split(&mut b.graph, projected, 2, &[inner, inner + 2 * shared, self.heads])?;
        let (gate, mixed, step) = (parts[0], parts[1], parts[2]);
        let mixed = b.within("conv1d", |b| {
            let mixed = causal_convolution(b, mixed, self.kernel, self.conv_bias)?;
            Ok(self.activation.apply(&mut b.graph, mixed)?)
        })?;
        let parts = array::split(&mut b.graph, mixed, 2, &[inner, shared, shared])?;

        let bias = b.weight("dt_bias", &[self.heads])?;
        let decay = b.weight("A_log", &[self.heads])?;
        let skip = b.weight("D", &[self.heads])?;
        let g = &mut b.graph;
        let step = array::binary(g, Binary::Add, step, bias)?;
        let step = in_f32(g, step);
        let step = array::softplus(g, step, 1.0, f64::INFINITY)?;
        let (least, most) = self.step_limits;
        let step = array::clamp(g, step, Some(least).filter(|l| *l > 0.0), Some(most).filter(|m| m.is_finite()))?;
        let rate = in_f32(g, decay);
        let rate = array::unary(g, Unary::Exponential, rate)?;
        let rate = array::unary(g, Unary::Negate, rate)?;

        let heads = array::reshape(g, parts[0], &[batch, tokens, self.heads, self.head_width])?;
        let read = self.scanned(g, [heads, parts[1], parts[2]], step, rate)?;
        let skip = array::reshape(g, skip, &[self.heads, 1])?;
        let skipped = array::binary(g, Binary::Multiply, heads, skip)?;
        let read = array::binary(g, Binary::Add, read, skipped)?;
        let read = array::reshape(g, read, &[batch, tokens, inner])?;
        let normed = b.within("norm", |b| self.gated_norm(b, read, gate))?;
        b.linear("out_proj", normed, hidden, self.bias)
    }

    /// The values that each token reads from the state: `[B, S, heads, width]`. `[values, taken, asked]` are
    /// `[B, S, heads, width]` and twice `[B, S, groups * state]`, `step` is `[B, S, heads]`, and `rate` is `[heads]`.
    fn scanned(&self, g: &mut Graph, parts: [ValueId; 3], step: ValueId, rate: ValueId) -> array::Built {
        let [values, taken, asked] = parts;
        let [batch, tokens, heads, width] = g.shape(values)[..] else {
            return Err(array::ShapeError::Attribute("state spaces take four dimensions"));
        };
        let dtype = g.ty(values).dtype;
        let chunk = self.chunk.min(tokens);
        let chunks = tokens.div_ceil(chunk);
        let groups = [self.groups, heads / self.groups.max(1)];
        let in_chunks = |g: &mut Graph, x: ValueId, rest: &[u64]| {
            let missing = (chunks * chunk - tokens) as i64;
            let rank = g.shape(x).len();
            let (low, mut high) = (vec![0; rank], vec![0; rank]);
            high[1] = missing;
            let x = if missing > 0 { array::pad(g, x, &low, &high, 0.0)? } else { x };
            array::reshape(g, x, &[&[batch, chunks, chunk], rest].concat())
        };
        let moved = {
            let step = array::unsqueeze(g, step, 3)?;
            let step = array::convert(g, step, dtype)?;
            array::binary(g, Binary::Multiply, values, step)?
        };
        let moved = in_chunks(g, moved, &[groups[0], groups[1], width])?;
        let (taken, asked) =
            (in_chunks(g, taken, &[self.groups, self.state])?, in_chunks(g, asked, &[self.groups, self.state])?);
        // The logarithms of decays, summed within each chunk: [B, groups, heads of one, chunks, chunk].
        let decays = array::binary(g, Binary::Multiply, step, rate)?;
        let decays = in_chunks(g, decays, &groups)?;
        let decays = array::permute(g, decays, &[0, 3, 4, 1, 2])?;
        let sums = array::cumulative(g, decays, Reducer::Sum, 4, false)?;

        // Interactions within a chunk.
        let scores = product(g, asked, taken, [&[0, 1, 3], &[0, 1, 3]], [4, 4])?;
        let scores = array::unsqueeze(g, scores, 3)?;
        let between = differences(g, sums, sums, Direction::Ge)?;
        let between = array::permute(g, between, &[0, 3, 1, 2, 4, 5])?;
        let between = array::convert(g, between, dtype)?;
        let weights = array::binary(g, Binary::Multiply, scores, between)?;
        // [B, chunks, groups, heads, chunk, width].
        let mut read = product(g, weights, moved, [&[0, 1, 2, 3], &[0, 1, 3, 4]], [5, 2])?;

        if chunks > 1 {
            // The contribution of each chunk: [B, chunks, groups, heads, width, state].
            let total = array::select_dim(g, sums, 4, -1)?;
            let last = array::unsqueeze(g, total, 4)?;
            let left = array::binary(g, Binary::Subtract, last, sums)?;
            let left = array::unary(g, Unary::Exponential, left)?;
            let left = array::permute(g, left, &[0, 3, 4, 1, 2])?;
            let left = array::unsqueeze(g, left, 5)?;
            let left = array::convert(g, left, dtype)?;
            let kept = array::binary(g, Binary::Multiply, moved, left)?;
            let states = product(g, kept, taken, [&[0, 1, 3], &[0, 1, 3]], [2, 2])?;
            // The state before each chunk: [B, groups, heads, chunks, width, state].
            let ends = array::cumulative(g, total, Reducer::Sum, 3, false)?;
            let starts = array::binary(g, Binary::Subtract, ends, total)?;
            let passed = differences(g, starts, ends, Direction::Gt)?;
            let passed = array::convert(g, passed, dtype)?;
            let states = product(g, passed, states, [&[0, 1, 2], &[0, 2, 3]], [4, 1])?;
            // [B, chunks, groups, chunk, heads, width].
            let before = product(g, asked, states, [&[0, 1, 3], &[0, 3, 1]], [4, 5])?;
            let before = array::permute(g, before, &[0, 1, 2, 4, 3, 5])?;
            let since = array::unary(g, Unary::Exponential, sums)?;
            let since = array::permute(g, since, &[0, 3, 1, 2, 4])?;
            let since = array::unsqueeze(g, since, 5)?;
            let since = array::convert(g, since, dtype)?;
            let before = array::binary(g, Binary::Multiply, before, since)?;
            read = array::binary(g, Binary::Add, read, before)?;
        }
        let read = array::permute(g, read, &[0, 1, 4, 2, 3, 5])?;
        let read = array::reshape(g, read, &[batch, chunks * chunk, heads, width])?;
        array::slice_dim(g, read, 1, 0, tokens as i64, 1)
    }

    /// An RMS norm of each group's part of `x silu(gate)`.
    fn gated_norm(&self, b: &mut Builder, x: ValueId, gate: ValueId) -> Block {
        let weight = b.weight("weight", &[self.inner()])?;
        let g = &mut b.graph;
        let shape = g.shape(x).to_vec();
        let gate = array::silu(g, gate)?;
        let x = array::binary(g, Binary::Multiply, x, gate)?;
        let x = array::reshape(g, x, &[shape[0], shape[1], self.groups, shape[2] / self.groups.max(1)])?;
        let x = Norm::rms(self.eps).apply(g, x, None, None)?;
        let x = array::reshape(g, x, &shape)?;
        Ok(array::binary(g, Binary::Multiply, x, weight)?)
    }
}

/// A convolution over the last `kernel` tokens of each feature of `[B, S, features]`.
pub(crate) fn causal_convolution(b: &mut Builder, x: ValueId, kernel: u64, bias: bool) -> Block {
    let features = b.graph.shape(x)[2];
    let weight = b.weight("weight", &[features, 1, kernel])?;
    let bias = if bias { Some(b.weight("bias", &[features])?) } else { None };
    let conv = Conv {
        stride: vec![1],
        pad_low: vec![kernel as i64 - 1],
        pad_high: vec![0],
        dilation: vec![1],
        groups: features,
        ..Conv::default()
    };
    let g = &mut b.graph;
    let x = array::permute(g, x, &[0, 2, 1])?;
    let x = array::convolution(g, x, weight, bias, &conv)?;
    Ok(array::permute(g, x, &[0, 2, 1])?)
}

/// Converts to f32 at least, in which decays are computed.
fn in_f32(g: &mut Graph, x: ValueId) -> ValueId {
    if g.ty(x).dtype.bytes() < DType::F32.bytes() { g.convert(x, DType::F32) } else { x }
}

/// `exp(a - b)` for each element of the last dimension of `a` with each of `b`'s, if their positions compare as
/// `which`. Zero elsewhere: `[.., A, B]`.
fn differences(g: &mut Graph, a: ValueId, b: ValueId, which: Direction) -> array::Built {
    let rank = g.shape(a).len();
    let (rows, columns) = (g.shape(a)[rank - 1], g.shape(b)[rank - 1]);
    let a = array::unsqueeze(g, a, rank as i64)?;
    let b = array::unsqueeze(g, b, rank as i64 - 1)?;
    let difference = array::binary(g, Binary::Subtract, a, b)?;
    let row = array::iota(g, &[rows, columns], 0, DType::I32)?;
    let column = array::iota(g, &[rows, columns], 1, DType::I32)?;
    let seen = array::compare(g, which, row, column)?;
    let hidden = array::full_like(g, difference, f64::NEG_INFINITY)?;
    let difference = array::select(g, seen, difference, hidden)?;
    array::unary(g, Unary::Exponential, difference)
}

fn product(g: &mut Graph, a: ValueId, b: ValueId, batch: [&[usize]; 2], contracted: [usize; 2]) -> array::Built {
    let dot = DotGeneral {
        lhs_batch: batch[0].to_vec(),
        rhs_batch: batch[1].to_vec(),
        lhs_contract: vec![contracted[0]],
        rhs_contract: vec![contracted[1]],
    };
    g.push(Op::DotGeneral(dot), &[a, b])
}

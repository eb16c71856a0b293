//! Mixtures of experts: each token goes to the few experts that a router scores highest for it (Shazeer et al. 2017).
//!
//! Every sequence is routed by itself, so that a batch can be divided into microbatches. Every expert takes at most
//! `capacity` tokens of a sequence, in order (GShard, Lepikhin et al. 2020). The capacity is an even share of the
//! tokens, times the capacity factor.
//!
//! An expert's tokens are looked up, and its results are added back at their positions, so no work goes into products
//! with zeros. The weights of all experts are one tensor. Splitting its first dimension is expert parallelism.

use super::blocks::{Activation, Block, Builder};
use super::error::{ConfigError, Note};
use super::feed::{Feed, Gated, Plain};
use altiplano_ir::array;
use altiplano_ir::cluster::Routing;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{ArgSort, Binary, DotGeneral, Gather, GatherDims, Op, OutOfBounds, ScatterAdd};

/// The tokens per expert relative to an even spread, as in the training of Switch Transformers (Fedus et al. 2021).
const CAPACITY_FACTOR: f64 = 1.25;

/// A layer of experts: the router, the experts, and an optional shared perceptron.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mixture {
    pub router: Router,
    pub experts: Experts,
    pub shared: Option<Shared>,
}

/// The selection and weighting of experts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Router {
    pub name: &'static str,
    pub bias: bool,
    pub scores: Scores,
    /// True if a buffer `e_score_correction_bias`, which balances the load, is added to the scores for selection.
    pub balanced: bool,
    /// Experts are chosen from the groups whose two best experts score highest: the number of groups, and of chosen
    /// groups.
    pub groups: (u64, u64),
    /// If present, gates are divided by their sum plus this number.
    pub normalise: Option<f64>,
    /// The factor of the gates.
    pub scale: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scores {
    Softmax,
    Sigmoid,
}

impl Router {
    /// A softmax over all experts. The chosen gates sum to one if `normalise` is true.
    pub(crate) fn softmax(name: &'static str, normalise: bool) -> Router {
        Router {
            name,
            bias: false,
            scores: Scores::Softmax,
            balanced: false,
            groups: (1, 1),
            normalise: normalise.then_some(0.0),
            scale: 1.0,
        }
    }
}

/// A perceptron that every token goes through in addition to its experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shared {
    pub name: &'static str,
    pub width: u64,
    /// A linear layer whose sigmoid scales the perceptron.
    pub gate: Option<&'static str>,
}

/// The sizes of the experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Experts {
    pub count: u64,
    /// The number of experts that each token goes to.
    pub chosen: u64,
    pub width: u64,
    pub gating: Gating,
    /// True if weights are `[experts, in, out]`, false if `[experts, out, in]`.
    pub transposed: bool,
    pub bias: bool,
    /// True if the gate scales an expert's input, false if it scales its output.
    pub weigh_inputs: bool,
}

/// The function between the two matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Gating {
    /// `activation(gate) up`, where the gate is the first half.
    Halves(Activation),
    /// `gate sigmoid(alpha gate) (up + 1)`, both clamped at a limit. Gate and up alternate.
    Clamped { alpha: f64, limit: f64 },
    /// `activation(up)`: there is no gate.
    Ungated(Activation),
}

impl Mixture {
    /// Builds the layer for `x`, which is `[B, S, hidden]`.
    pub(crate) fn build(&self, b: &mut Builder, x: ValueId) -> Block {
        let (groups, chosen_groups) = self.router.groups;
        b.routing = Some(Routing { chosen: self.experts.chosen, groups, chosen_groups });
        let (gates, chosen) = self.gates(b, x)?;
        let routed = self.experts.build(b, x, gates, chosen)?;
        let Some(shared) = &self.shared else { return Ok(routed) };
        let feed = match self.experts.gating {
            Gating::Halves(activation) => Feed::Gated(Gated::new(shared.width, activation)),
            Gating::Ungated(activation) => Feed::Plain(Plain::new(shared.width, activation)),
            Gating::Clamped { .. } => return Ok(routed),
        };
        let mut made = b.within(shared.name, |b| feed.build(b, x))?;
        if let Some(gate) = shared.gate {
            let gate = b.linear(gate, x, 1, false)?;
            let gate = array::sigmoid(&mut b.graph, gate)?;
            made = b.multiply(gate, made)?;
        }
        b.add(routed, made)
    }

    /// The gate of each expert, zero if it is not chosen, and a boolean, true if it is: `[B, S, experts]` each.
    fn gates(&self, b: &mut Builder, x: ValueId) -> Result<(ValueId, ValueId), ConfigError> {
        let (router, experts) = (&self.router, &self.experts);
        let logits = router.logits(b, x, experts.count)?;
        let balance = match router.balanced {
            true => Some(b.within(router.name, |b| b.buffer("e_score_correction_bias", &[experts.count], DType::F32))?),
            false => None,
        };
        let g = &mut b.graph;
        let scores = match router.scores {
            Scores::Softmax => array::softmax(g, logits, 2)?,
            Scores::Sigmoid => array::sigmoid(g, logits)?,
        };
        let mut compared = scores;
        if let Some(balance) = balance {
            let balance = g.convert(balance, g.ty(logits).dtype);
            compared = array::binary(g, Binary::Add, scores, balance)?;
        }
        if router.groups.0 > 1 {
            compared = in_best_groups(g, compared, router.groups.0, router.groups.1)?;
        }
        let chosen = array::among_greatest(g, compared, 2, experts.chosen)?;
        let mut gates = where_chosen(g, chosen, scores)?;
        if let Some(least) = router.normalise {
            gates = normalised(g, gates, least)?;
        }
        if router.scale != 1.0 {
            gates = array::with_number(g, Binary::Multiply, gates, router.scale)?;
        }
        Ok((gates, chosen))
    }
}

impl Router {
    /// The raw scores of the experts for each token, at least in f32: `[B, S, experts]`.
    fn logits(&self, b: &mut Builder, x: ValueId, experts: u64) -> Block {
        b.within(self.name, |b| {
            let hidden = b.graph.shape(x).last().copied().unwrap_or(1);
            let weight = b.weight("weight", &[experts, hidden])?;
            let bias = if self.bias { Some(b.weight("bias", &[experts])?) } else { None };
            let g = &mut b.graph;
            let (x, weight) = (wide(g, x), wide(g, weight));
            let bias = bias.map(|bias| wide(g, bias));
            Ok::<_, ConfigError>(array::linear(g, x, weight, bias)?)
        })
    }
}

/// The scores of experts in the best groups, and minus infinity for others.
fn in_best_groups(g: &mut Graph, scores: ValueId, groups: u64, kept: u64) -> array::Built {
    let shape = g.shape(scores).to_vec();
    let [batch, tokens, count] = shape[..] else {
        return Err(array::ShapeError::Attribute("routing takes three dimensions"));
    };
    let each = count / groups.max(1);
    let grouped = array::reshape(g, scores, &[batch, tokens, groups, each])?;
    let best = array::among_greatest(g, grouped, 3, each.min(2))?;
    let best = where_chosen(g, best, grouped)?;
    let of_group = array::sum(g, best, &[3], false)?;
    let kept = array::among_greatest(g, of_group, 2, kept)?;
    let kept = array::unsqueeze(g, kept, 3)?;
    let never = array::full_like(g, grouped, f64::NEG_INFINITY)?;
    let allowed = array::select(g, kept, grouped, never)?;
    array::reshape(g, allowed, &shape)
}

impl Experts {
    /// Experts with one matrix for gate and up and one for down, as in most families.
    pub(crate) fn new(count: u64, chosen: u64, width: u64, activation: Activation) -> Experts {
        let gating = Gating::Halves(activation);
        Experts { count, chosen, width, gating, transposed: false, bias: false, weigh_inputs: false }
    }

    /// The experts' results for `x`, `[B, S, hidden]`: the sum over those chosen for each token, weighted by their
    /// gates. `gates` is `[B, S, experts]` and zero for experts that are not chosen. `chosen` is true for those that
    /// are.
    pub(crate) fn build(&self, b: &mut Builder, x: ValueId, gates: ValueId, chosen: ValueId) -> Block {
        let [batch, tokens, hidden] = b.graph.shape(x)[..] else {
            return Err(array::ShapeError::Attribute("experts take three dimensions").into());
        };
        let capacity = self.capacity(b, tokens);
        b.within("experts", |b| {
            let (first, width) = match self.gating {
                Gating::Ungated(_) => ("up_proj", self.width),
                _ => ("gate_up_proj", 2 * self.width),
            };
            let (first, first_bias) = self.weights(b, first, hidden, width)?;
            let (down, last_bias) = self.weights(b, "down_proj", self.width, hidden)?;
            let contracted = if self.transposed { 1 } else { 2 };
            let g = &mut b.graph;
            // The positions of an expert's tokens come before all others, both in order.
            let passed_by = array::unary(g, altiplano_ir::op::Unary::Not, chosen)?;
            let passed_by = array::permute(g, passed_by, &[0, 2, 1])?;
            let key = g.convert(passed_by, DType::I32);
            let order = g.push(Op::ArgSort(ArgSort { dim: 2, descending: vec![false] }), &[key])?;
            let slots = array::slice_dim(g, order, 2, 0, capacity as i64, 1)?;

            let mut taken =
                g.push(Op::Gather(Gather { dims: rows(hidden), out_of_bounds: OutOfBounds::Clamp }), &[x, slots])?;
            if self.weigh_inputs {
                let gates = taken_gates(g, gates, slots, b.dtype)?;
                taken = array::binary(g, Binary::Multiply, taken, gates)?;
            }
            // [B, E, C, hidden] with [E, wide, hidden]: [E, B, C, wide].
            let wide = g.push(Op::DotGeneral(per_expert([1, 0], [3, contracted])), &[taken, first])?;
            let wide = with_bias(g, wide, first_bias)?;
            let inner = self.gating.apply(g, wide, self.width)?;
            let made = g.push(Op::DotGeneral(per_expert([0, 0], [3, contracted])), &[inner, down])?;
            let made = with_bias(g, made, last_bias)?;
            let mut made = array::permute(g, made, &[1, 0, 2, 3])?;
            if !self.weigh_inputs {
                let gates = taken_gates(g, gates, slots, b.dtype)?;
                made = array::binary(g, Binary::Multiply, made, gates)?;
            }
            let back = ScatterAdd { dims: rows(hidden), shape: vec![batch, tokens, hidden] };
            Ok(g.push(Op::ScatterAdd(back), &[slots, made])?)
        })
    }

    /// The matrices `name` of all experts, and their biases.
    fn weights(
        &self,
        b: &mut Builder,
        name: &str,
        input: u64,
        output: u64,
    ) -> Result<(ValueId, Option<ValueId>), ConfigError> {
        let sizes = if self.transposed { [input, output] } else { [output, input] };
        let matrices = b.weight(name, &[self.count, sizes[0], sizes[1]])?;
        let bias = if self.bias { Some(b.weight(&format!("{name}_bias"), &[self.count, output])?) } else { None };
        Ok((matrices, bias))
    }

    /// The number of tokens of a sequence that an expert takes.
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

impl Gating {
    /// Combines `both`, which is `[.., 2 width]`, or `[.., width]` without a gate.
    fn apply(self, g: &mut Graph, both: ValueId, width: u64) -> array::Built {
        let last = g.shape(both).len().saturating_sub(1);
        match self {
            Gating::Halves(activation) => {
                let parts = array::split(g, both, last, &[width, width])?;
                let gate = activation.apply(g, parts[0])?;
                array::binary(g, Binary::Multiply, gate, parts[1])
            }
            Gating::Ungated(activation) => activation.apply(g, both),
            Gating::Clamped { alpha, limit } => {
                let pairs = [&g.shape(both)[..last], &[width, 2]].concat();
                let pairs = array::reshape(g, both, &pairs)?;
                let gate = array::select_dim(g, pairs, last + 1, 0)?;
                let up = array::select_dim(g, pairs, last + 1, 1)?;
                let gate = array::clamp(g, gate, None, Some(limit))?;
                let up = array::clamp(g, up, Some(-limit), Some(limit))?;
                let sharper = array::with_number(g, Binary::Multiply, gate, alpha)?;
                let open = array::sigmoid(g, sharper)?;
                let gate = array::binary(g, Binary::Multiply, gate, open)?;
                let up = array::with_number(g, Binary::Add, up, 1.0)?;
                array::binary(g, Binary::Multiply, up, gate)
            }
        }
    }
}

/// `x` of `[E, B, C, out]` plus biases of `[E, out]`.
fn with_bias(g: &mut Graph, x: ValueId, bias: Option<ValueId>) -> array::Built {
    let Some(bias) = bias else { return Ok(x) };
    let sizes = [g.shape(bias)[0], 1, 1, g.shape(bias)[1]];
    let bias = array::reshape(g, bias, &sizes)?;
    array::binary(g, Binary::Add, x, bias)
}

/// The gates of the tokens that experts take: `[B, E, C, 1]`.
fn taken_gates(g: &mut Graph, gates: ValueId, slots: ValueId, dtype: DType) -> array::Built {
    let gates = array::permute(g, gates, &[0, 2, 1])?;
    let gates = array::take_along(g, gates, 2, slots, false)?;
    let gates = array::unsqueeze(g, gates, 3)?;
    Ok(g.convert(gates, dtype))
}

/// The rows of `[B, S, hidden]` at `[B, E, C]` positions of the same sample: `[B, E, C, hidden]`.
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

/// `x` where `keep` is true, and zero elsewhere.
fn where_chosen(g: &mut Graph, keep: ValueId, x: ValueId) -> array::Built {
    let zero = array::full_like(g, x, 0.0)?;
    array::select(g, keep, x, zero)
}

/// The scores of `[.., experts]` divided by their sum.
fn normalised(g: &mut Graph, scores: ValueId, least: f64) -> array::Built {
    let last = g.shape(scores).len() - 1;
    let mut total = array::sum(g, scores, &[last], true)?;
    if least != 0.0 {
        total = array::with_number(g, Binary::Add, total, least)?;
    }
    array::binary(g, Binary::Divide, scores, total)
}

fn wide(g: &mut Graph, x: ValueId) -> ValueId {
    if g.ty(x).dtype.bytes() < DType::F32.bytes() { g.convert(x, DType::F32) } else { x }
}

//! Softmax attention in the bodies of a program, for compilers that have a kernel for it.
//!
//! Bodies have attention as products, elementwise ops and reductions. It is found by these ops, forward and backward,
//! in 16-bit types. A mask other than the causal one reaches a kernel as a bias in the dimensions along which it differs.
//! The kernel's statistic of a row is the logarithm of the sum of its exponentials, where bodies keep the row's maximum
//! and its sum. Weights are `exp(score - maximum) / sum`, so the statistic in place of the maximum and 1 in place of the
//! sum give the same weights.

use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction, DotGeneral, Op, Reducer, Unary};
use crate::program::{Body, BufferId, Program};
use std::collections::{BTreeMap, BTreeSet};

/// Most elements of a head that the kernels have on GPUs from sm_90 on, and half as many on those before.
pub const WIDEST: u64 = 256;

/// The most ops in a chain between queries, keys, values or masks and what a forward pass has left of them.
const DEPTH: usize = 32;

/// The meaning of a dimension. Queries' heads are those of keys times groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dim {
    Batch,
    Head,
    Group,
    Query,
    Key,
    Width,
}

/// A value, and what its dimensions are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labelled {
    pub value: ValueId,
    pub dims: Vec<Dim>,
}

impl Labelled {
    /// The size along a dimension; 1 if the value has no such dimension.
    fn size(&self, g: &Graph, dim: Dim) -> u64 {
        self.dims.iter().position(|d| *d == dim).map_or(1, |at| g.shape(self.value)[at])
    }
}

/// The sizes of attention. Queries have `key_heads * group` heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub batch: u64,
    pub key_heads: u64,
    pub group: u64,
    pub queries: u64,
    pub keys: u64,
    pub width: u64,
}

/// The keys that queries see.
#[derive(Clone, Debug, PartialEq)]
pub enum Mask {
    All,
    /// Query `i` sees the keys up to `i`.
    Causal,
    /// True where a key is seen, in the dimensions of the scores. It may differ along those that `varies` marks.
    Seen {
        of: Labelled,
        varies: Vec<bool>,
    },
}

/// `softmax(scale * q k^T) v` by batch and head, over the keys that the mask shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub sizes: Sizes,
    pub dtype: DType,
    pub scale: f64,
    pub mask: Mask,
    pub q: Labelled,
    pub k: Labelled,
    pub v: Labelled,
}

/// The maxima of the scores' rows and the sums of their exponentials, `[batch, key head, query, group]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statistics {
    pub maximum: ValueId,
    pub sum: ValueId,
}

/// A forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward {
    pub of: Attention,
    pub output: Labelled,
    pub statistics: Statistics,
}

/// A backward pass, from the gradient of the output to those of queries, keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Backward {
    pub of: Attention,
    pub gradient: Labelled,
    /// The output of the forward pass and its statistics. If absent, the forward pass is computed again.
    pub forward: Option<(Labelled, Statistics)>,
    pub results: [Labelled; 3],
}

/// One pass of attention in a body.
#[derive(Clone, Debug, PartialEq)]
pub enum Pass {
    Forward(Forward),
    Backward(Backward),
}

impl Pass {
    /// The values that the pass computes.
    pub fn computes(&self) -> Vec<ValueId> {
        match self {
            Pass::Forward(pass) => vec![pass.output.value, pass.statistics.maximum, pass.statistics.sum],
            Pass::Backward(pass) => pass.results.iter().map(|result| result.value).collect(),
        }
    }

    /// The values that the pass needs.
    pub fn reads(&self) -> Vec<ValueId> {
        let of = match self {
            Pass::Forward(pass) => &pass.of,
            Pass::Backward(pass) => &pass.of,
        };
        let mut reads = vec![of.q.value, of.k.value, of.v.value];
        if let Mask::Seen { of, .. } = &of.mask {
            reads.push(of.value);
        }
        if let Pass::Backward(pass) = self {
            reads.push(pass.gradient.value);
            if let Some((output, Statistics { maximum, sum })) = &pass.forward {
                reads.extend([output.value, *maximum, *sum]);
            }
        }
        reads
    }

    /// The value at which the pass is computed. Its operands may come later.
    pub fn position(&self) -> ValueId {
        match self {
            Pass::Forward(pass) => pass.output.value,
            Pass::Backward(pass) => first_result(&pass.results),
        }
    }
}

fn first_result(results: &[Labelled; 3]) -> ValueId {
    results.iter().map(|result| result.value).min().unwrap_or(results[0].value)
}

/// The passes of each body of a program whose heads have at most `widest` elements.
pub fn find(program: &Program, widest: u64) -> Vec<Vec<Pass>> {
    let found: Vec<Found> = program.bodies.iter().map(|body| Found::new(body, widest)).collect();
    let kept: Vec<Vec<&Forward>> = (0..found.len())
        .map(|at| found[at].forward.iter().filter(|pass| is_kept(&found, at, pass)).collect())
        .collect();
    let passes = |at: usize| {
        let backward = found[at].backward.iter().filter_map(|pass| found[at].linked(pass, &found, &kept, at));
        kept[at].iter().map(|&pass| Pass::Forward(pass.clone())).chain(backward.map(Pass::Backward)).collect()
    };
    (0..found.len()).map(passes).collect()
}

/// Returns true if all that reads the statistics of a forward pass computes weights with them.
fn is_kept(found: &[Found], at: usize, pass: &Forward) -> bool {
    let Statistics { maximum, sum } = pass.statistics;
    if !found[at].only_weighs(pass.statistics) {
        return false;
    }
    let written = |value| found[at].buffers.get(&value).copied();
    let (maximum, sum) = (written(maximum), written(sum));
    let readers = found.iter().enumerate().filter(|(body, _)| *body != at);
    readers.flat_map(|(_, body)| body.reads.iter().map(move |read| (body, read))).all(|(body, &(leaf, buffer))| {
        let is_statistic = Some(buffer) == maximum || Some(buffer) == sum;
        let pair = |weights: &Weights| {
            let Statistics { maximum: top, sum: total } = weights.statistics;
            [top, total].contains(&leaf)
                && body.buffers.get(&top).copied() == maximum
                && body.buffers.get(&total).copied() == sum
        };
        !is_statistic || body.weights.iter().any(|weights| pair(weights) && body.only_weighs(weights.statistics))
    })
}

/// The weights of attention before they multiply values.
#[derive(Clone, Debug)]
struct Weights {
    scale: f64,
    mask: Mask,
    q: Labelled,
    k: Labelled,
    /// The dimensions of the scores.
    dims: Vec<Dim>,
    /// Scores after scaling and masking.
    masked: ValueId,
    seen: Option<ValueId>,
    powers: ValueId,
    weights: ValueId,
    statistics: Statistics,
    /// True if this body sums the exponentials.
    is_whole: bool,
}

/// A backward pass without the results of its forward pass.
struct Unlinked {
    of: Attention,
    weights: Weights,
    gradient: Labelled,
    results: [Labelled; 3],
}

/// All passes of a body, before those of other bodies are known.
struct Found<'a> {
    graph: &'a Graph,
    reads: &'a [(ValueId, BufferId)],
    users: Vec<Vec<ValueId>>,
    /// The buffers of leaves and of results.
    buffers: BTreeMap<ValueId, BufferId>,
    weights: Vec<Weights>,
    forward: Vec<Forward>,
    backward: Vec<Unlinked>,
}

impl<'a> Found<'a> {
    fn new(body: &'a Body, widest: u64) -> Found<'a> {
        let graph = &body.graph;
        let written = body.writes.iter().map(|&(id, value)| (value, id));
        let buffers = body.reads.iter().copied().chain(written).collect();
        let mut found = Found {
            graph,
            reads: &body.reads,
            users: graph.users(),
            buffers,
            weights: Vec::new(),
            forward: Vec::new(),
            backward: Vec::new(),
        };
        let is_narrow = |weights: &Weights| weights.q.size(graph, Dim::Width) <= widest;
        found.weights = graph.values().filter_map(|v| weights(graph, v)).filter(is_narrow).collect();
        found.forward = found.weights.iter().filter_map(|weights| found.forward_of(weights)).collect();
        found.backward = found.weights.iter().filter_map(|weights| found.backward_of(weights)).collect();
        found
    }

    /// The products that a value is a factor of, through changes of type.
    fn products(&self, value: ValueId) -> impl Iterator<Item = (ValueId, &DotGeneral, bool)> {
        let converted = |v: &ValueId| matches!(self.graph.node(*v).op, Op::Convert(_));
        let narrow = self.users[value.index()].iter().copied().filter(converted);
        let all: Vec<ValueId> = std::iter::once(value).chain(narrow).collect();
        let products = all.into_iter().flat_map(|v| self.users[v.index()].iter().map(move |&user| (v, user)));
        let products: BTreeSet<(ValueId, ValueId)> = products.collect();
        products.into_iter().filter_map(|(v, user)| match &self.graph.node(user).op {
            Op::DotGeneral(op) => Some((user, op, self.graph.node(user).operands[0] == v)),
            _ => None,
        })
    }

    /// The product of weights and values, of 16 bits.
    fn forward_of(&self, weights: &Weights) -> Option<Forward> {
        let g = self.graph;
        let mut products = self.products(weights.weights).filter(|(_, _, is_left)| *is_left);
        let (output, v, dims) = products.find_map(|(output, op, _)| {
            let rhs = g.node(output).operands[1];
            let v = labels_of_factor(op, &weights.dims, g.shape(rhs).len(), &[Dim::Width])?;
            let dims = product(op, &weights.dims, &v)?;
            (op.lhs_contract.iter().all(|&d| weights.dims[d] == Dim::Key)).then_some((output, v, dims))
        })?;
        let v = Labelled { value: g.node(output).operands[1], dims: v };
        let of = attention(g, weights, v)?;
        let whole = weights.is_whole && g.ty(output).dtype == of.dtype;
        whole.then_some(Forward { of, output: Labelled { value: output, dims }, statistics: weights.statistics })
    }

    /// The products that give the gradients of queries, keys and values.
    fn backward_of(&self, weights: &Weights) -> Option<Unlinked> {
        let g = self.graph;
        // The gradient of values: weights and the gradient of the output, summed over queries.
        let (dv, of, gradient, dv_dims) = self.products(weights.weights).find_map(|(dv, op, is_left)| {
            let summed = |d: &usize| matches!(weights.dims[*d], Dim::Query | Dim::Group);
            if !is_left || op.lhs_contract.is_empty() || !op.lhs_contract.iter().all(summed) {
                return None;
            }
            let gradient = g.node(dv).operands[1];
            let dims = labels_of_factor(op, &weights.dims, g.shape(gradient).len(), &[Dim::Width])?;
            let gradient = Labelled { value: gradient, dims: dims.clone() };
            // The gradient of weights: the gradient of the output and values.
            let (v, _) = self.gradient_of_weights(weights, &gradient)?;
            Some((dv, attention(g, weights, v)?, gradient, product(op, &weights.dims, &dims)?))
        })?;
        let (_, dp) = self.gradient_of_weights(weights, &gradient)?;
        let ds = self.gradient_of_scores(weights, dp)?;
        let of_scores = |is_left: bool, other: &Labelled| {
            self.products(ds).find_map(|(value, op, left)| {
                let node = g.node(value);
                let at = node.operands[usize::from(is_left)];
                let dims = match is_left {
                    true => product(op, &weights.dims, &other.dims),
                    false => product(op, &other.dims, &weights.dims),
                };
                (left == is_left && at == other.value).then_some(Labelled { value, dims: dims? })
            })
        };
        let dq = of_scores(true, &of.k)?;
        let dk = of_scores(false, &of.q)?;
        let results = [dq, dk, Labelled { value: dv, dims: dv_dims }];
        let narrow = results.iter().map(|x| x.value).chain([gradient.value]).all(|x| g.ty(x).dtype == of.dtype);
        narrow.then_some(Unlinked { of, weights: weights.clone(), gradient, results })
    }

    /// The values and the product of them with the gradient of the output, in the dimensions of the scores.
    fn gradient_of_weights(&self, weights: &Weights, gradient: &Labelled) -> Option<(Labelled, ValueId)> {
        let g = self.graph;
        self.products(gradient.value).find_map(|(value, op, is_left)| {
            let v = g.node(value).operands[1];
            let dims = labels_of_factor(op, &gradient.dims, g.shape(v).len(), &[Dim::Key])?;
            let scores = product(op, &gradient.dims, &dims)?;
            (is_left && scores == weights.dims).then_some((Labelled { value: v, dims }, value))
        })
    }

    /// `scale * weights * (dp - sum(dp * weights))` where keys are seen, as differentiation of the softmax writes it:
    /// the gradient of a quotient, of its sum, and of the exponentials.
    fn gradient_of_scores(&self, weights: &Weights, dp: ValueId) -> Option<ValueId> {
        let g = self.graph;
        let next = |from: ValueId, accept: &dyn Fn(ValueId) -> bool| {
            self.users[from.index()].iter().copied().find(|&user| accept(user))
        };
        let wide = next(dp, &|v| matches!(g.node(v).op, Op::Convert(_))).unwrap_or(dp);
        let quotient = next(wide, &|v| {
            binary(g, v, Binary::Divide).is_some_and(|[a, b]| a == wide && row(g, b) == Some(weights.statistics.sum))
        })?;
        let mean = |v: ValueId| {
            let sum = row(g, v)?;
            let terms = reduced(g, sum, Reducer::Sum)?;
            let Op::Unary(Unary::Negate) = g.node(terms).op else { return None };
            let factors = binary(g, g.node(terms).operands[0], Binary::Multiply)?;
            is_pair(factors, quotient, weights.weights).then_some(())
        };
        let centred = next(quotient, &|v| {
            binary(g, v, Binary::Add)
                .is_some_and(|[a, b]| (a == quotient && mean(b).is_some()) || (b == quotient && mean(a).is_some()))
        })?;
        let mut ds = next(centred, &|v| {
            binary(g, v, Binary::Multiply).is_some_and(|factors| is_pair(factors, centred, weights.powers))
        })?;
        if let Some(seen) = weights.seen {
            ds = next(ds, &|v| {
                let node = g.node(v);
                let zero = || splat(g, node.operands[2]) == Some(0.0);
                matches!(node.op, Op::Select(_)) && node.operands[0] == seen && node.operands[1] == ds && zero()
            })?;
        }
        if weights.scale == 1.0 {
            return Some(ds);
        }
        next(ds, &|v| {
            let scale = |x| splat(g, x) == Some(weights.scale);
            binary(g, v, Binary::Multiply).is_some_and(|[a, b]| (a == ds && scale(b)) || (b == ds && scale(a)))
        })
    }

    /// Returns true if all that uses statistics computes weights or their gradients with them.
    fn only_weighs(&self, statistics: Statistics) -> bool {
        let weights = self.weights.iter().filter(|weights| weights.statistics == statistics);
        let of_weights: BTreeSet<ValueId> = weights.flat_map(|w| [w.masked, w.powers]).collect();
        let is_product = |v: ValueId| matches!(self.graph.node(narrow(self.graph, v)).op, Op::DotGeneral(_));
        let takes = |user: ValueId, row: ValueId| {
            let [left, right] = *self.graph.node(user).operands else { return false };
            match self.graph.node(user).op {
                Op::Binary(Binary::Subtract) => right == row && of_weights.contains(&left),
                Op::Binary(Binary::Divide) => right == row && (of_weights.contains(&left) || is_product(left)),
                _ => false,
            }
        };
        let mut open = vec![statistics.maximum, statistics.sum];
        while let Some(value) = open.pop() {
            for &user in &self.users[value.index()] {
                match self.graph.node(user).op {
                    Op::Reshape(_) | Op::BroadcastInDim(_) => open.push(user),
                    _ if takes(user, value) => {}
                    _ => return false,
                }
            }
        }
        true
    }

    /// A backward pass with the results of its forward pass, which is in this body or in another one.
    fn linked(&self, pass: &Unlinked, found: &[Found], kept: &[Vec<&Forward>], at: usize) -> Option<Backward> {
        let statistics = pass.weights.statistics;
        let forward = if pass.weights.is_whole {
            let here = kept[at].iter().find(|forward| forward.statistics == statistics);
            here.map(|forward| (forward.output.clone(), statistics))
        } else {
            let (body, forward) = (0..found.len()).find_map(|body| {
                let is_same = |f: &&&Forward| self.is_forward_of(pass, &found[body], f);
                Some((body, *kept[body].iter().find(is_same)?))
            })?;
            let output = found[body].output_buffer(&forward.output);
            let leaf = self.reads.iter().find(|(_, buffer)| Some(*buffer) == output).map(|(leaf, _)| *leaf);
            let dims = vec![Dim::Batch, Dim::Query, Dim::Head, Dim::Group, Dim::Width];
            leaf.map(|value| (Labelled { value, dims }, statistics))
        };
        let Unlinked { of, gradient, results, .. } = pass;
        Some(Backward { of: of.clone(), gradient: gradient.clone(), forward, results: results.clone() })
    }

    /// Returns true if the statistics of a backward pass are those of a forward pass of another body over the same queries,
    /// keys and values.
    fn is_forward_of(&self, pass: &Unlinked, other: &Found, forward: &Forward) -> bool {
        let mut known = BTreeMap::new();
        let mut same = |a: ValueId, b: ValueId| self.is_same((a, b), other, DEPTH, &mut known);
        let (a, b) = (&pass.of, &forward.of);
        let of = (a.sizes, a.scale) == (b.sizes, b.scale);
        let masks = match (&a.mask, &b.mask) {
            (Mask::Seen { of: x, .. }, Mask::Seen { of: y, .. }) => x.dims == y.dims && same(x.value, y.value),
            (x, y) => x == y,
        };
        let (s, t) = (pass.weights.statistics, forward.statistics);
        let pairs = [(&a.q, &b.q), (&a.k, &b.k), (&a.v, &b.v)];
        of && masks
            && same(s.maximum, t.maximum)
            && same(s.sum, t.sum)
            && pairs.iter().all(|(a, b)| a.dims == b.dims && same(a.value, b.value))
    }

    /// Returns true if a value is that of another body: by their buffers, or by equal ops of such values. `known` are the
    /// answers so far.
    fn is_same(
        &self,
        pair: (ValueId, ValueId),
        other: &Found,
        depth: usize,
        known: &mut BTreeMap<(ValueId, ValueId), bool>,
    ) -> bool {
        if let Some(&answer) = known.get(&pair) {
            return answer;
        }
        let answer = match (self.buffer(pair.0), other.buffer(pair.1)) {
            (Some(a), Some(b)) => a == b,
            _ => {
                let (x, y) = (self.graph.node(pair.0), other.graph.node(pair.1));
                let alike = depth > 0 && (&x.op, &x.ty) == (&y.op, &y.ty) && x.operands.len() == y.operands.len();
                let mut pairs = x.operands.iter().copied().zip(y.operands.iter().copied());
                alike && !x.op.is_leaf() && pairs.all(|pair| self.is_same(pair, other, depth - 1, known))
            }
        };
        known.insert(pair, answer);
        answer
    }

    /// The buffer whose elements a value has, in their order.
    fn buffer(&self, value: ValueId) -> Option<BufferId> {
        let buffer = self.buffers.get(&value).copied();
        buffer.or_else(|| match self.graph.node(value).op {
            Op::Reshape(_) => self.buffer(self.graph.node(value).operands[0]),
            _ => None,
        })
    }

    /// The buffer that has the elements of an output, ordered by sample, query and head.
    fn output_buffer(&self, output: &Labelled) -> Option<BufferId> {
        let mut open = vec![(output.value, Some(output.dims.clone()))];
        while let Some((value, dims)) = open.pop() {
            let ordered = dims.as_ref().is_none_or(|dims| dims.is_sorted_by_key(|dim| order(*dim)));
            if let (true, Some(&buffer)) = (ordered, self.buffers.get(&value)) {
                return Some(buffer);
            }
            for &user in &self.users[value.index()] {
                match (&self.graph.node(user).op, &dims) {
                    (Op::Transpose(op), Some(dims)) => {
                        open.push((user, Some(op.permutation.iter().map(|&d| dims[d]).collect())));
                    }
                    (Op::Reshape(_), _) if ordered => open.push((user, None)),
                    _ => {}
                }
            }
        }
        None
    }
}

/// The order of dimensions in the operands of kernels.
pub fn order(dim: Dim) -> usize {
    match dim {
        Dim::Batch => 0,
        Dim::Query | Dim::Key => 1,
        Dim::Head => 2,
        Dim::Group => 3,
        Dim::Width => 4,
    }
}

/// Attention with these weights and values, if the kernels have it.
fn attention(g: &Graph, weights: &Weights, v: Labelled) -> Option<Attention> {
    let (q, k) = (weights.q.clone(), weights.k.clone());
    let sizes = Sizes {
        batch: q.size(g, Dim::Batch),
        key_heads: k.size(g, Dim::Head),
        group: q.size(g, Dim::Group),
        queries: q.size(g, Dim::Query),
        keys: k.size(g, Dim::Key),
        width: q.size(g, Dim::Width),
    };
    let dtype = g.ty(q.value).dtype;
    let same = [&k, &v].iter().all(|x| g.ty(x.value).dtype == dtype) && v.size(g, Dim::Width) == sizes.width;
    let fits = sizes.width.is_multiple_of(8) && g.ty(q.value).elements() > 0;
    // Biases are exact enough in this type, and kernels take even lengths with them.
    let has_bias = matches!(weights.mask, Mask::Seen { .. });
    let even = sizes.queries.is_multiple_of(2) && sizes.keys.is_multiple_of(2);
    let fits = fits && (!has_bias || dtype == DType::BF16 && even);
    let (scale, mask) = (weights.scale, weights.mask.clone());
    (dtype.is_half() && same && fits).then_some(Attention { sizes, dtype, scale, mask, q, k, v })
}

/// Weights that a value divides by their sum.
fn weights(g: &Graph, value: ValueId) -> Option<Weights> {
    let [powers, sums] = binary(g, value, Binary::Divide)?;
    let Op::Unary(Unary::Exponential) = g.node(powers).op else { return None };
    let [masked, maxima] = binary(g, g.node(powers).operands[0], Binary::Subtract)?;
    let statistics = Statistics { maximum: row(g, maxima)?, sum: row(g, sums)? };
    let summed_here = reduced(g, statistics.sum, Reducer::Sum) == Some(powers);
    let from_here = reduced(g, statistics.maximum, Reducer::Max) == Some(masked);
    let is_whole = summed_here && from_here;
    let is_kept = [statistics.maximum, statistics.sum].iter().all(|&v| g.node(v).op.is_leaf());
    let wide = [statistics.maximum, statistics.sum].iter().all(|&v| g.ty(v).dtype == DType::F32);
    if !wide || !(is_whole || is_kept) {
        return None;
    }
    let (seen, scaled) = match &g.node(masked).op {
        Op::Select(_) => {
            let [seen, scores, hidden] = *g.node(masked).operands else { return None };
            splat(g, hidden).filter(|&hidden| hidden <= -1e30)?;
            (Some(seen), scores)
        }
        _ => (None, masked),
    };
    let (scale, scores) = match binary(g, scaled, Binary::Multiply) {
        Some([a, b]) => splat(g, b).map(|scale| (scale, a)).or_else(|| splat(g, a).map(|scale| (scale, b)))?,
        None => (1.0, scaled),
    };
    let scores = narrow(g, scores);
    let Op::DotGeneral(op) = &g.node(scores).op else { return None };
    let [q, k] = *g.node(scores).operands else { return None };
    let (q_dims, k_dims) = labels_of_scores(op, g.shape(q).len(), g.shape(k).len())?;
    let dims = product(op, &q_dims, &k_dims)?;
    let query = dims.iter().position(|dim| *dim == Dim::Query)?;
    let mask = match seen {
        None => Mask::All,
        Some(seen) if is_causal(g, seen, query) => Mask::Causal,
        Some(value) => {
            let varies = varies(g, value, DEPTH, &mut BTreeMap::new());
            Mask::Seen { of: Labelled { value, dims: dims.clone() }, varies }
        }
    };
    Some(Weights {
        scale,
        mask,
        q: Labelled { value: q, dims: q_dims },
        k: Labelled { value: k, dims: k_dims },
        dims,
        masked,
        seen,
        powers,
        weights: value,
        statistics,
        is_whole,
    })
}

/// The dimensions of queries and keys, by the product that gives their scores.
fn labels_of_scores(op: &DotGeneral, q_rank: usize, k_rank: usize) -> Option<(Vec<Dim>, Vec<Dim>)> {
    let (mut q, mut k) = (vec![Dim::Width; q_rank], vec![Dim::Width; k_rank]);
    let ([q_batch, q_head], [k_batch, k_head]) = (&op.lhs_batch[..], &op.rhs_batch[..]) else { return None };
    (q[*q_batch], q[*q_head], k[*k_batch], k[*k_head]) = (Dim::Batch, Dim::Head, Dim::Batch, Dim::Head);
    match op.lhs_free(q_rank)[..] {
        [query] => q[query] = Dim::Query,
        [query, group] => (q[query], q[group]) = (Dim::Query, Dim::Group),
        _ => return None,
    }
    let [key] = op.rhs_free(k_rank)[..] else { return None };
    k[key] = Dim::Key;
    (op.lhs_contract.len() == 1).then_some((q, k))
}

/// The dimensions of the right factor, by those of the left one. Its own dimensions get the labels of `free`.
fn labels_of_factor(op: &DotGeneral, left: &[Dim], rank: usize, free: &[Dim]) -> Option<Vec<Dim>> {
    let mut labels: Vec<Option<Dim>> = vec![None; rank];
    let pairs = op.lhs_batch.iter().zip(&op.rhs_batch).chain(op.lhs_contract.iter().zip(&op.rhs_contract));
    for (&l, &r) in pairs {
        labels[r] = Some(*left.get(l)?);
    }
    let own = op.rhs_free(rank);
    if own.len() != free.len() {
        return None;
    }
    own.iter().zip(free).for_each(|(&at, &dim)| labels[at] = Some(dim));
    labels.into_iter().collect()
}

/// The dimensions of a product. `None` if dimensions run together that mean different things.
fn product(op: &DotGeneral, left: &[Dim], right: &[Dim]) -> Option<Vec<Dim>> {
    let mut pairs = op.lhs_batch.iter().zip(&op.rhs_batch).chain(op.lhs_contract.iter().zip(&op.rhs_contract));
    if !pairs.all(|(&l, &r)| left.get(l).is_some() && left.get(l) == right.get(r)) {
        return None;
    }
    let free = op.lhs_free(left.len()).into_iter().map(|d| left[d]);
    let batch = op.lhs_batch.iter().map(|&d| left[d]);
    let dims: Vec<Dim> = batch.chain(free).chain(op.rhs_free(right.len()).into_iter().map(|d| right[d])).collect();
    let distinct: BTreeSet<Dim> = dims.iter().copied().collect();
    (distinct.len() == dims.len()).then_some(dims)
}

/// Returns true if a mask shows key `i` and those before it to query `i`.
fn is_causal(g: &Graph, mask: ValueId, query: usize) -> bool {
    let key = g.shape(mask).len() - 1;
    // For each dimension of the value, the dimension of the mask that it runs along.
    let mut along: Vec<Option<usize>> = (0..=key).map(Some).collect();
    let mut value = mask;
    loop {
        let node = g.node(value);
        match &node.op {
            Op::BroadcastInDim(op) => {
                along = op.dims.iter().map(|&d| along.get(d).copied().flatten()).collect();
                value = node.operands[0];
            }
            Op::Reshape(_) => {
                let (from, to) = (g.shape(node.operands[0]), g.shape(value));
                let sized = |shape: &[u64]| shape.iter().copied().filter(|&size| size != 1).collect::<Vec<_>>();
                if sized(from) != sized(to) {
                    return false;
                }
                let mut kept = (0..to.len()).filter(|&d| to[d] != 1).map(|d| along[d]);
                along = from.iter().map(|&size| if size == 1 { None } else { kept.next().flatten() }).collect();
                value = node.operands[0];
            }
            Op::Compare(op) => {
                let runs = |v: ValueId, dim: usize| match &g.node(v).op {
                    Op::Iota(iota) => along.get(iota.dim).copied().flatten() == Some(dim),
                    _ => false,
                };
                let [left, right] = *node.operands else { return false };
                return match op.direction {
                    Direction::Ge => runs(left, query) && runs(right, key),
                    Direction::Le => runs(left, key) && runs(right, query),
                    _ => false,
                };
            }
            _ => return false,
        }
    }
}

/// The dimensions of a value along which its elements may differ. `known` are the answers so far.
fn varies(g: &Graph, value: ValueId, depth: usize, known: &mut BTreeMap<ValueId, Vec<bool>>) -> Vec<bool> {
    if let Some(answer) = known.get(&value) {
        return answer.clone();
    }
    let (node, shape) = (g.node(value), g.shape(value));
    let all = || shape.iter().map(|&size| size > 1).collect::<Vec<bool>>();
    let mut along = vec![false; shape.len()];
    match &node.op {
        _ if depth == 0 => along = all(),
        Op::Iota(op) => along[op.dim] = true,
        Op::Constant(literal) if literal.as_splat().is_some() => {}
        Op::BroadcastInDim(op) => {
            let of_operand = varies(g, node.operands[0], depth - 1, known);
            op.dims.iter().zip(of_operand).for_each(|(&d, varies)| along[d] = varies);
        }
        op if op.is_elementwise() => {
            for &operand in &node.operands {
                let of_operand = varies(g, operand, depth - 1, known);
                along.iter_mut().zip(of_operand).for_each(|(varies, operand)| *varies |= operand);
            }
        }
        _ => along = all(),
    }
    known.insert(value, along.clone());
    along
}

/// The value with one element for each row that is spread along the last dimension.
fn row(g: &Graph, value: ValueId) -> Option<ValueId> {
    let mut node = g.node(value);
    let Op::BroadcastInDim(op) = &node.op else { return None };
    let (last, mut from) = (op.shape.len().checked_sub(1)?, node.operands[0]);
    let rows: u64 = op.shape[..last].iter().product();
    let shape = g.shape(from);
    let is_row = op.dims.iter().zip(shape).all(|(&d, &size)| size == 1 || (d < last && op.shape[d] == size));
    if !is_row || !op.dims.is_sorted() || g.ty(from).elements() != rows {
        return None;
    }
    loop {
        node = g.node(from);
        match node.op {
            Op::Reshape(_) => from = node.operands[0],
            _ => return Some(from),
        }
    }
}

/// The operand of a reduction along the last dimension.
fn reduced(g: &Graph, value: ValueId, reducer: Reducer) -> Option<ValueId> {
    let node = g.node(value);
    let Op::Reduce(op) = &node.op else { return None };
    let last = g.shape(node.operands[0]).len().checked_sub(1)?;
    (op.reducer == reducer && op.dims == [last]).then_some(node.operands[0])
}

/// The value before changes of type.
fn narrow(g: &Graph, value: ValueId) -> ValueId {
    match g.node(value).op {
        Op::Convert(_) => narrow(g, g.node(value).operands[0]),
        _ => value,
    }
}

fn binary(g: &Graph, value: ValueId, op: Binary) -> Option<[ValueId; 2]> {
    let node = g.node(value);
    match node.op {
        Op::Binary(found) if found == op => (*node.operands).try_into().ok(),
        _ => None,
    }
}

fn is_pair(factors: [ValueId; 2], a: ValueId, b: ValueId) -> bool {
    factors == [a, b] || factors == [b, a]
}

/// The number that all elements of a constant are.
fn splat(g: &Graph, value: ValueId) -> Option<f64> {
    let node = g.node(value);
    match &node.op {
        Op::Constant(literal) => literal.as_splat(),
        Op::BroadcastInDim(_) | Op::Reshape(_) => splat(g, node.operands[0]),
        _ => None,
    }
}

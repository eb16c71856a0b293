//! Padding of sizes that devices do not divide: with eight devices, a vocabulary of 50257 becomes one of 50264.
//!
//! A size that may have any number of elements (see [`crate::downscale`]) is rounded up everywhere at once. If an op would
//! notice the additional elements, they are masked by a value without effect: zero in a sum, the smallest number in a
//! softmax. The result is an ordinary graph with the same semantics as the model. Parameters are zero in their padding
//! and stay so, because no gradient reaches it.

use crate::downscale::atoms::{Atom, Sizing};
use crate::downscale::sizes::{Dim, Sizes};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::{Literal, Values};
use altiplano_ir::op::{Binary, Composite, Direction, Function, Iota, Op, OutOfBounds, Reducer, Slice, Unary, gcd};
use altiplano_ir::padding::{Extent, Extents, Padding, is_padded};
use altiplano_ir::rule::FactorKind;
use altiplano_ir::types::{MAX_ELEMENTS, TensorType};
use std::collections::{BTreeMap, BTreeSet};

/// A padded graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Padded {
    /// The larger graph.
    pub graph: Graph,
    /// The value here of each value of the model.
    pub map: Vec<ValueId>,
    /// The padded parameters.
    pub parameters: BTreeMap<String, Extents>,
}

/// The largest growth of a size that has no divisor in common with the devices of a node.
const MOST: f64 = 0.2;

/// Padded forms of the model. The first pads only sizes that grow slightly. The second also pads sizes that have no
/// divisor in common with `near`, to a multiple of `near`. The list is empty if there is nothing to pad.
///
/// `near` is a number of devices, such as those of a node. A size that grows slightly becomes a multiple of
/// `near * unit` that `all` devices divide. If that is too much growth, it becomes a multiple of `near * unit`, of
/// `near`, or of `unit`.
pub fn variants(graph: &Graph, [unit, near, all]: [u64; 3]) -> Vec<Padded> {
    let good = near.saturating_mul(unit);
    if good <= 1 {
        return Vec::new();
    }
    let mut sizes = Sizes::of(graph);
    fix_what_cannot_grow(&mut sizes, graph);
    let free = major_atoms_of_parameters(&sizes, graph);
    let grown = |size: u64, by: u64| size.checked_next_multiple_of(by).unwrap_or(u64::MAX);
    let growth = |size: u64, by: u64| grown(size, by) as f64 / size as f64 - 1.0;
    let mut little = BTreeMap::new();
    let mut more = BTreeMap::new();
    let multiples = [common_multiple(all, good), good, near, unit];
    for &atom in &free {
        let size = sizes.atoms.size(atom);
        if size.is_multiple_of(good) {
            continue;
        }
        match multiples.into_iter().find(|&by| by > 1 && growth(size, by) <= Padding::SLIGHT) {
            Some(by) if !size.is_multiple_of(by) => {
                little.insert(atom, grown(size, by));
            }
            None if near > 1 && gcd(size, near) == 1 && growth(size, near) <= MOST => {
                more.insert(atom, grown(size, near));
            }
            _ => {}
        }
    }
    let both: BTreeMap<Atom, u64> = little.iter().chain(&more).map(|(&a, &size)| (a, size)).collect();
    let mut goals = vec![little, both];
    goals.retain(|goal| !goal.is_empty());
    goals.dedup();
    goals.into_iter().filter_map(|goal| padded(graph, &sizes, goal)).collect()
}

/// The least common multiple, saturating.
pub fn common_multiple(a: u64, b: u64) -> u64 {
    a.saturating_mul(b / gcd(a, b).max(1)).max(1)
}

/// The atoms by which parameters' dimensions can be split: the major free one of each dimension. Only parameters of
/// several dimensions count.
fn major_atoms_of_parameters(sizes: &Sizes, graph: &Graph) -> BTreeSet<Atom> {
    let in_sums = sizes.atoms.in_sums();
    let dims = graph.parameters().filter(|(v, _)| graph.shape(*v).len() > 1);
    let dims = dims.flat_map(|(v, _)| (0..graph.shape(v).len()).map(move |d| Dim(v, d)));
    let major = dims.filter_map(|dim| sizes.leaves(dim).into_iter().find(|&atom| sizes.atoms.is_free(atom)));
    major.filter(|atom| !in_sums.contains(atom)).collect()
}

/// Fixes sizes along which an op computes something else if there are more elements, and sizes that are visible
/// outside.
fn fix_what_cannot_grow(sizes: &mut Sizes, graph: &Graph) {
    let all = |sizes: &mut Sizes, v: ValueId| {
        (0..graph.shape(v).len()).for_each(|d| {
            sizes.fix(Dim(v, d));
        });
    };
    graph.outputs.iter().for_each(|&v| all(sizes, v));
    for v in graph.values() {
        let node = graph.node(v);
        match &node.op {
            Op::Input(_) => all(sizes, v),
            Op::Constant(literal) if literal.as_splat().is_none() => all(sizes, v),
            // If padding of a minor factor came in between, elements would have other positions.
            Op::Iota(op) => fix_minor(sizes, Dim(v, op.dim)),
            op if op.is_elementwise() => {}
            Op::Parameter(_)
            | Op::Constant(_)
            | Op::BroadcastInDim(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Reduce(_)
            | Op::DotGeneral(_) => {}
            Op::Convolution(op) if op.feature_groups.max(op.batch_groups) <= 1 => {
                op.lhs.spatial.iter().for_each(|&d| _ = sizes.fix(Dim(node.operands[0], d)));
                op.rhs.spatial.iter().for_each(|&d| _ = sizes.fix(Dim(node.operands[1], d)));
                op.result.spatial.iter().for_each(|&d| _ = sizes.fix(Dim(v, d)));
            }
            Op::Gather(op) => {
                let table = node.operands[0];
                for (d, &size) in graph.shape(table).iter().enumerate() {
                    if op.dims.start_index_map == [d] && op.dims.collapsed_slice_dims.contains(&d) {
                        fix_minor(sizes, Dim(table, d));
                    } else if op.dims.start_index_map.contains(&d) || op.dims.slice_sizes[d] != size {
                        sizes.fix(Dim(table, d));
                    }
                }
            }
            Op::Composite(op) => match &op.function {
                Function::GeluErf | Function::GeluTanh | Function::Silu => {}
                Function::Softmax { .. } | Function::LogSoftmax { .. } | Function::Gates { .. } => {}
                Function::CrossEntropy { dim } => fix_minor(sizes, Dim(node.operands[0], *dim)),
                _ => {
                    for (k, dims) in mixed_dims(op, &graph.operand_types(v)).into_iter().enumerate() {
                        dims.into_iter().for_each(|d| _ = sizes.fix(Dim(node.operands[k], d)));
                    }
                }
            },
            Op::Slice(op) => {
                let from = node.operands[0];
                for d in (0..graph.shape(v).len()).filter(|&d| !keeps_blocks(op, d, graph.shape(from)[d])) {
                    sizes.fix(Dim(from, d));
                    sizes.fix(Dim(v, d));
                }
            }
            Op::Concatenate(op) => {
                let size = |o: &ValueId| graph.shape(*o)[op.dim];
                if node.operands.iter().any(|o| size(o) != size(&node.operands[0])) {
                    node.operands.iter().chain([&v]).for_each(|&o| _ = sizes.fix(Dim(o, op.dim)));
                }
            }
            // Any other op allows padding of the dimensions that it does not look into.
            _ => {
                for (k, &o) in node.operands.iter().enumerate() {
                    mixed(graph, v, k).into_iter().for_each(|d| _ = sizes.fix(Dim(o, d)));
                }
                new_dims(graph, v).into_iter().for_each(|d| _ = sizes.fix(Dim(v, d)));
            }
        }
    }
}

/// Returns true if a slice takes all of a dimension of this size, or one of a few long blocks, which may become longer.
fn keeps_blocks(op: &Slice, dim: usize, size: u64) -> bool {
    let kept = op.limit[dim] - op.start[dim];
    let aligned = |n: u64| kept > 0 && n.is_multiple_of(kept);
    kept == size || op.stride[dim] == 1 && aligned(size) && aligned(op.start[dim]) && kept >= size / kept
}

/// Fixes all factors of a dimension except the major one.
fn fix_minor(sizes: &mut Sizes, dim: Dim) {
    sizes.leaves(dim).into_iter().skip(1).for_each(|atom| {
        sizes.atoms.fix(&[atom]);
    });
}

/// The dimensions of an operand along which an op does not treat all elements alike.
fn mixed(graph: &Graph, v: ValueId, operand: usize) -> Vec<usize> {
    let rule = graph.rule(v);
    let passes = |f: &u8| {
        rule.factors[usize::from(*f)].kind == FactorKind::Parallel && rule.result.iter().any(|dim| dim.contains(f))
    };
    let window = |f: &u8| rule.windows.iter().any(|w| w.factor == *f || w.followers.contains(f));
    let is_mixed = |dim: &[u8]| dim.iter().any(|f| !passes(f) || window(f) || rule.contiguous.contains(f));
    (0..rule.operands[operand].len()).filter(|&d| is_mixed(&rule.operands[operand][d])).collect()
}

/// The dimensions of the result that stem from no operand.
fn new_dims(graph: &Graph, v: ValueId) -> Vec<usize> {
    let rule = graph.rule(v);
    let known = |f: &u8| rule.operands.iter().flatten().any(|dim| dim.contains(f));
    (0..rule.result.len()).filter(|&d| !rule.result[d].iter().all(known)).collect()
}

/// For each operand of a composite, the dimensions along which its decomposition does not treat all elements alike.
fn mixed_dims(op: &Composite, operands: &[&TensorType]) -> Vec<Vec<usize>> {
    let Ok(body) = op.body(operands) else {
        return operands.iter().map(|ty| (0..ty.rank()).collect()).collect();
    };
    let graph = &body.graph;
    let sizes = Sizes::of(graph);
    let mut found: BTreeSet<Atom> = BTreeSet::new();
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    for v in graph.values() {
        for (k, &o) in graph.node(v).operands.iter().enumerate().filter(|(_, o)| varies[o.index()]) {
            found.extend(mixed(graph, v, k).into_iter().flat_map(|d| sizes.leaves(Dim(o, d))));
        }
        if let Op::Iota(iota) = &graph.node(v).op {
            found.extend(sizes.leaves(Dim(v, iota.dim)));
        }
    }
    let of = |leaf: ValueId| {
        let is_mixed = |d: &usize| sizes.leaves(Dim(leaf, *d)).iter().any(|atom| found.contains(atom));
        (0..graph.shape(leaf).len()).filter(is_mixed).collect()
    };
    graph.values().filter(|&v| matches!(graph.node(v).op, Op::Input(_))).map(of).collect()
}

/// The known facts about the padding of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Beyond {
    /// All elements have this value. This includes constants.
    All(f64),
    /// The elements are finite.
    Some,
}

const ZERO: Beyond = Beyond::All(0.0);

/// The graph with these sizes of atoms. `None` if an op cannot take them.
fn padded(graph: &Graph, sizes: &Sizes, goal: BTreeMap<Atom, u64>) -> Option<Padded> {
    let larger = sizes.rebuilt(graph, &Sizing::Exactly(goal.clone())).ok()?;
    if larger.nodes.iter().any(|node| node.ty.elements() > MAX_ELEMENTS) {
        return None;
    }
    let extents = |v: ValueId| {
        let dim = |d: usize| {
            let mut dim: Vec<Extent> = Vec::new();
            for atom in sizes.leaves(Dim(v, d)) {
                let size = sizes.atoms.size(atom);
                let padded = goal.get(&atom).copied().unwrap_or(size);
                match dim.last_mut() {
                    // A block whose own elements come first forms one factor with its repetitions.
                    Some(last) if padded == size => {
                        last.size *= size;
                        last.padded *= size;
                    }
                    _ => dim.push(Extent { size, padded }),
                }
            }
            if dim.is_empty() {
                dim.push(Extent { size: graph.shape(v)[d], padded: graph.shape(v)[d] });
            }
            dim
        };
        Extents((0..graph.shape(v).len()).map(dim).collect())
    };
    let extents: Vec<Extents> = graph.values().map(extents).collect();
    // Sizes that are sums of others were not followed.
    if graph.values().any(|v| extents[v.index()].padded_shape() != larger.shape(v)) {
        return None;
    }
    let to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut masking = Masking { extents, larger, to, map: Vec::new(), beyond: Vec::new(), masks: BTreeMap::new() };
    for v in graph.values() {
        masking.take(v);
    }
    let Masking { extents, mut to, map, .. } = masking;
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to.take_pins(graph, |v| Some(map[v.index()]));
    let parameters = graph.parameters().map(|(v, name)| (String::from(name), extents[v.index()].clone()));
    let parameters = parameters.filter(|(_, extents)| extents.is_padded()).collect();
    Some(Padded { graph: to, map, parameters })
}

/// A number whose exponential is negligible beside any other, whatever is subtracted from it.
fn negligible(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => -30_000.0,
        _ => -1e30,
    }
}

/// The pass over a padded graph that masks padding where an op would notice it.
struct Masking {
    extents: Vec<Extents>,
    larger: Graph,
    to: Graph,
    map: Vec<ValueId>,
    beyond: Vec<Beyond>,
    /// For a dimension, a boolean for each element that is true for the model's own.
    masks: BTreeMap<Vec<Extent>, ValueId>,
}

impl Masking {
    fn take(&mut self, v: ValueId) {
        let mut node = self.larger.node(v).clone();
        let was = std::mem::take(&mut node.operands);
        node.operands = was.iter().map(|o| self.map[o.index()]).collect();
        let beyond = self.adapted(v, &was, &mut node);
        self.map.push(self.to.append(node));
        self.beyond.push(beyond);
    }

    /// Masks the operands of a node where necessary. Returns the facts about its result.
    fn adapted(&mut self, v: ValueId, was: &[ValueId], node: &mut Node) -> Beyond {
        let op = node.op.clone();
        let of = |masking: &Masking, k: usize| masking.beyond[was[k].index()];
        match &op {
            Op::Parameter(_) => ZERO,
            Op::Constant(Literal { values: Values::Splat(value), .. }) => Beyond::All(value.0),
            Op::Unary(unary) => {
                let dtype = self.larger.ty(was[0]).dtype;
                let known = self.made_safe(was, node, 0, dtype, safe_for(*unary), |x| is_smooth(*unary, x));
                known.map_or(Beyond::Some, |x| all(unary.apply(x, dtype)))
            }
            Op::Binary(binary) => self.binary(*binary, was, node),
            Op::Compare(compare) => match (of(self, 0), of(self, 1)) {
                (Beyond::All(a), Beyond::All(b)) => all(f64::from(u8::from(compare.direction.holds(a, b)))),
                _ => Beyond::Some,
            },
            Op::Select(_) if of(self, 1) == of(self, 2) => of(self, 1),
            Op::Convert(_) | Op::ReducePrecision(_) => match of(self, 0) {
                ZERO => ZERO,
                Beyond::All(x) if node.ty.dtype.is_float() => Beyond::All(x),
                _ => Beyond::Some,
            },
            Op::BroadcastInDim(op) => {
                let constant = matches!(self.to.node(self.map[was[0].index()]).op, Op::Constant(_));
                let repeats = |d: usize| {
                    let from = op.dims.iter().position(|&to| to == d);
                    from.is_none_or(|k| self.larger.shape(was[0])[k] != self.larger.shape(v)[d])
                };
                let dims = &self.extents[v.index()].0;
                let own = (0..dims.len()).all(|d| !is_padded(&dims[d]) || !repeats(d));
                if own || constant { of(self, 0) } else { Beyond::Some }
            }
            Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) | Op::Reverse(_) => of(self, 0),
            Op::Concatenate(_) => {
                let first = of(self, 0);
                if (0..was.len()).all(|k| of(self, k) == first) { first } else { Beyond::Some }
            }
            Op::Reduce(op) => {
                let dtype = self.larger.ty(was[0]).dtype;
                self.mask(was, node, 0, &op.dims, op.reducer.neutral(dtype));
                match (of(self, 0), op.reducer) {
                    (ZERO, Reducer::Sum) => ZERO,
                    _ => Beyond::Some,
                }
            }
            Op::DotGeneral(op) => {
                for (k, dims) in [&op.lhs_contract, &op.rhs_contract].into_iter().enumerate() {
                    if of(self, k) != ZERO {
                        self.mask(was, node, k, dims, 0.0);
                    }
                }
                let free = [op.lhs_free(self.larger.shape(was[0]).len()), op.rhs_free(self.larger.shape(was[1]).len())];
                self.product(was, [&op.lhs_batch, &op.rhs_batch], [&free[0], &free[1]])
            }
            Op::Convolution(op) => {
                for (k, dim) in [op.lhs.feature, op.rhs.input].into_iter().enumerate() {
                    if of(self, k) != ZERO {
                        self.mask(was, node, k, &[dim], 0.0);
                    }
                }
                self.product(was, [&[], &[]], [&[op.lhs.batch], &[op.rhs.output]])
            }
            Op::Gather(op) => {
                if let [row] = op.dims.start_index_map[..] {
                    self.lookup(was, node, row, op.out_of_bounds);
                }
                if self.extents[was[1].index()].is_padded() { Beyond::Some } else { of(self, 0) }
            }
            Op::Composite(op) => self.composite(&op.function, was, node),
            _ => Beyond::Some,
        }
    }

    fn composite(&mut self, function: &Function, was: &[ValueId], node: &mut Node) -> Beyond {
        let is_zero = |k: usize| self.beyond[was[k].index()] == ZERO;
        match function {
            Function::Softmax { dim } => self.softmax(was, node, *dim, ZERO),
            Function::LogSoftmax { dim } | Function::CrossEntropy { dim } => {
                self.softmax(was, node, *dim, Beyond::Some)
            }
            Function::Gates { .. } => self.softmax(was, node, self.larger.shape(was[0]).len() - 1, ZERO),
            // Query heads without keys and values of their own share those of others.
            Function::Attention { .. } if is_zero(2) && self.grown(was[0]) == self.grown(was[2]) => ZERO,
            Function::Rotary { .. } | Function::GeluErf | Function::GeluTanh | Function::Silu if is_zero(0) => ZERO,
            Function::BatchNorm { .. } if is_zero(1) && is_zero(2) => ZERO,
            _ => Beyond::Some,
        }
    }

    /// The number of padded factors of a value.
    fn grown(&self, v: ValueId) -> usize {
        self.extents[v.index()].0.iter().flatten().filter(|e| e.size != e.padded).count()
    }

    fn binary(&mut self, op: Binary, was: &[ValueId], node: &mut Node) -> Beyond {
        let dtype = self.larger.ty(was[0]).dtype;
        let known = |masking: &Masking, k: usize| match masking.beyond[was[k].index()] {
            Beyond::All(x) => Some(x),
            Beyond::Some => None,
        };
        let (a, b) = match op {
            Binary::Divide | Binary::Remainder if dtype.is_float() => {
                let b = self.made_safe(was, node, 1, dtype, Some(1.0), |x| x != 0.0);
                (known(self, 0), b)
            }
            Binary::Power | Binary::Atan2 if dtype.is_float() => {
                let a = self.made_safe(was, node, 0, dtype, Some(1.0), |x| x > 0.0);
                (a, self.made_safe(was, node, 1, dtype, Some(1.0), |_| true))
            }
            _ => (known(self, 0), known(self, 1)),
        };
        match (a, b) {
            (Some(a), Some(b)) => all(op.apply(a, b, dtype)),
            (Some(0.0), None) | (None, Some(0.0)) if op == Binary::Multiply => ZERO,
            _ => Beyond::Some,
        }
    }

    /// Masks an operand with a value at which a function and its derivative are finite, unless the known values are
    /// safe already. Returns the value of the padding afterwards.
    fn made_safe(
        &mut self,
        was: &[ValueId],
        node: &mut Node,
        operand: usize,
        dtype: DType,
        safe: Option<f64>,
        is_safe: impl Fn(f64) -> bool,
    ) -> Option<f64> {
        let known = match self.beyond[was[operand].index()] {
            Beyond::All(x) => Some(x),
            Beyond::Some => None,
        };
        if !dtype.is_float() || !self.extents[was[operand].index()].is_padded() {
            return known;
        }
        match (known, safe) {
            (Some(x), _) if is_safe(x) => Some(x),
            (_, None) => known,
            (_, Some(safe)) => {
                let safe = if safe == f64::NEG_INFINITY { negligible(dtype) } else { safe };
                let dims: Vec<usize> = (0..self.larger.shape(was[operand]).len()).collect();
                self.mask(was, node, operand, &dims, safe);
                Some(safe)
            }
        }
    }

    /// The padding of a product. If only one side has a padded dimension, the padding is zero only if that side is zero
    /// there.
    fn product(&self, was: &[ValueId], both: [&[usize]; 2], alone: [&[usize]; 2]) -> Beyond {
        let zero = |k: usize| self.beyond[was[k].index()] == ZERO;
        let padded = |k: usize, dims: &[usize]| dims.iter().any(|&d| is_padded(&self.extents[was[k].index()].0[d]));
        let together = !padded(0, both[0]) || zero(0) || zero(1);
        let apart = (0..2).all(|k| !padded(k, alone[k]) || zero(k));
        if together && apart { ZERO } else { Beyond::Some }
    }

    /// Classes are compared by their exponentials, so those in the padding are masked to have none.
    fn softmax(&mut self, was: &[ValueId], node: &mut Node, dim: usize, result: Beyond) -> Beyond {
        let dtype = self.larger.ty(was[0]).dtype;
        let grows = is_padded(&self.extents[was[0].index()].0[dim]);
        self.mask(was, node, 0, &[dim], negligible(dtype));
        if grows { result } else { Beyond::Some }
    }

    /// Keeps indices that were outside the table outside the padded one.
    fn lookup(&mut self, was: &[ValueId], node: &mut Node, row: usize, beyond: OutOfBounds) {
        let [extent] = self.extents[was[0].index()].0[row][..] else { return };
        let indices = node.operands[1];
        let ty = self.to.ty(indices).clone();
        let greatest = Reducer::Min.neutral(ty.dtype);
        if extent.size == extent.padded || greatest < extent.size as f64 {
            return;
        }
        let batch_dims = self.to.node(indices).batch_dims;
        let first = self.to.len();
        node.operands[1] = match beyond {
            OutOfBounds::Clamp => {
                let last = self.to.splat_like(indices, (extent.size - 1) as f64);
                self.to.emit(Op::Binary(Binary::Minimum), &[indices, last])
            }
            OutOfBounds::Zero => {
                let end = self.to.splat_like(indices, extent.size as f64);
                let inside = self.to.compare(Direction::Lt, indices, end);
                let outside = self.to.splat_like(indices, greatest);
                self.to.select(inside, indices, outside)
            }
        };
        self.to.nodes[first..].iter_mut().for_each(|node| node.batch_dims = batch_dims);
    }

    /// Writes `fill` into the padding of an operand along these dimensions.
    fn mask(&mut self, was: &[ValueId], node: &mut Node, operand: usize, dims: &[usize], fill: f64) {
        let extents = &self.extents[was[operand].index()].0;
        let padded: Vec<(usize, Vec<Extent>)> =
            dims.iter().filter(|&&d| is_padded(&extents[d])).map(|&d| (d, extents[d].clone())).collect();
        let value = node.operands[operand];
        let (ty, batch_dims) = (self.to.ty(value).clone(), self.to.node(value).batch_dims);
        for (d, extents) in padded {
            let own = self.own_elements(&extents);
            let first = self.to.len();
            let masked = node.operands[operand];
            let own = self.to.broadcast(own, &ty.shape, &[d]);
            let fill = self.to.splat_like(masked, fill);
            node.operands[operand] = self.to.select(own, masked, fill);
            self.to.nodes[first..].iter_mut().for_each(|node| node.batch_dims = batch_dims);
        }
    }

    /// A boolean for each element along a dimension, true for the model's own.
    fn own_elements(&mut self, extents: &[Extent]) -> ValueId {
        if let Some(&known) = self.masks.get(extents) {
            return known;
        }
        let size: u64 = extents.iter().map(|e| e.padded).product();
        let dtype = if size <= i32::MAX as u64 { DType::I32 } else { DType::I64 };
        let ty = TensorType::new(dtype, [size]);
        let place = self.to.emit(Op::Iota(Iota { ty, dim: 0 }), &[]);
        let mut own: Option<ValueId> = None;
        let mut minor = 1;
        for (i, extent) in extents.iter().enumerate().rev() {
            if extent.size != extent.padded {
                // Padding of the major factor comes after all own elements. Padding of other factors comes within each
                // block.
                let mut at = place;
                if i > 0 {
                    let block = self.to.splat_like(place, (extent.padded * minor) as f64);
                    at = self.to.emit(Op::Binary(Binary::Remainder), &[place, block]);
                }
                let end = self.to.splat_like(at, (extent.size * minor) as f64);
                let inside = self.to.compare(Direction::Lt, at, end);
                own = Some(own.map_or(inside, |own| self.to.emit(Op::Binary(Binary::And), &[own, inside])));
            }
            minor *= extent.padded;
        }
        let own = own.unwrap_or(place);
        self.masks.insert(extents.to_vec(), own);
        own
    }
}

/// The fact that all elements are `x`.
fn all(x: f64) -> Beyond {
    if x.is_finite() { Beyond::All(x) } else { Beyond::Some }
}

/// An operand at which a function is smooth, for functions that are not smooth everywhere. `-inf` stands for the
/// smallest number.
fn safe_for(op: Unary) -> Option<f64> {
    match op {
        Unary::Exponential | Unary::ExponentialMinusOne => Some(f64::NEG_INFINITY),
        Unary::Log | Unary::LogPlusOne | Unary::Sqrt | Unary::Rsqrt | Unary::Cbrt | Unary::Tan => Some(1.0),
        _ => None,
    }
}

/// Returns true if a function and its derivative are finite at `x`.
fn is_smooth(op: Unary, x: f64) -> bool {
    match op {
        Unary::Exponential | Unary::ExponentialMinusOne => x <= 1.0,
        Unary::Log | Unary::Sqrt | Unary::Rsqrt => x > 0.0,
        Unary::LogPlusOne => x > -1.0,
        Unary::Cbrt => x != 0.0,
        Unary::Tan => x.abs() < 1.0,
        _ => true,
    }
}

#[cfg(test)]
#[path = "padding_tests.rs"]
mod tests;

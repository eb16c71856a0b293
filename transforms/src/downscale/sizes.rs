//! The relations between the sizes of a graph. Dimensions that a factor of an op indexes have one size. Ops that cut,
//! pad, join or slide windows relate sizes in further ways, which sharding rules do not describe.

use crate::downscale::atoms::{Atom, Atoms, Resized, Sizing};
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::{Literal, Values};
use altiplano_ir::op::{Concatenate, GatherDims, Op, Operator, Pad, Slice, WindowDim};
use altiplano_ir::rule::{FactorKind, ShardingRule};
use std::collections::BTreeSet;

/// The sizes of all values, as far as they may change.
pub(crate) struct Sizes {
    pub atoms: Atoms,
    /// For each value and dimension, its atoms, major first.
    dims: Vec<Vec<Vec<Atom>>>,
}

/// A dimension of a value.
#[derive(Clone, Copy)]
pub(crate) struct Dim(pub ValueId, pub usize);

/// The dimensions of a node that a special relation describes: the operand (`None` for the result) and the dimension.
type Described = BTreeSet<(Option<usize>, usize)>;

impl Sizes {
    /// Relates all sizes. The batch keeps its size, which is chosen elsewhere.
    pub(crate) fn of(graph: &Graph) -> Sizes {
        let mut atoms = Atoms::default();
        let dims = graph.values().map(|v| graph.shape(v).iter().map(|&d| atoms.dimension(d)).collect()).collect();
        let mut sizes = Sizes { atoms, dims };
        for v in graph.values() {
            sizes.relate(graph, v);
        }
        for (v, _) in graph.inputs() {
            for d in (0..graph.shape(v).len()).filter(|&d| graph.node(v).batch_dims >> d & 1 == 1) {
                sizes.atoms.fix(&sizes.dims[v.index()][d]);
            }
        }
        sizes.dims.iter().flatten().for_each(|dim| sizes.atoms.weigh(dim));
        sizes
    }

    fn relate(&mut self, graph: &Graph, v: ValueId) {
        let node = graph.node(v);
        if matches!(node.op, Op::Constant(_)) {
            return;
        }
        let mut described = Described::new();
        match &node.op {
            Op::Slice(op) => self.slice(graph, v, op, &mut described),
            Op::Pad(op) => self.pad(graph, v, op, &mut described),
            Op::Concatenate(op) => self.concatenate(graph, v, op, &mut described),
            Op::ReduceWindow(op) => {
                for (d, window) in op.window.iter().enumerate() {
                    self.window(graph, Dim(node.operands[0], d), Dim(v, d), window);
                    described.extend([(Some(0), d), (None, d)]);
                }
            }
            Op::SelectAndScatter(op) => {
                for (d, window) in op.window.iter().enumerate() {
                    self.window(graph, Dim(node.operands[0], d), Dim(node.operands[1], d), window);
                    self.equate(Dim(node.operands[0], d), Dim(v, d));
                    described.extend([(Some(0), d), (Some(1), d), (None, d)]);
                }
            }
            Op::Convolution(op) => {
                for (i, window) in op.window.iter().enumerate() {
                    let (from, to) = (op.lhs.spatial[i], op.result.spatial[i]);
                    self.window(graph, Dim(node.operands[0], from), Dim(v, to), window);
                    self.fix(Dim(node.operands[1], op.rhs.spatial[i]));
                    described.extend([(Some(0), from), (Some(1), op.rhs.spatial[i]), (None, to)]);
                }
            }
            Op::Gather(op) => self.table(node.operands[0], &op.dims),
            Op::Scatter(op) => self.table(node.operands[0], &op.dims),
            Op::ScatterAdd(op) => self.table(v, &op.dims),
            _ => {}
        }
        let table = match &node.op {
            Op::Gather(_) | Op::Scatter(_) => Some(Some(0)),
            Op::ScatterAdd(_) => Some(None),
            _ => None,
        };
        self.follow(&graph.rule(v), v, node, &described, table);
    }

    /// Equates dimensions of one factor. If an op needs a factor whole and only one tensor has it, the rule does not
    /// describe its relation to other sizes, so it is fixed. Rows of a `table` are an exception, and may become fewer.
    fn follow(
        &mut self,
        rule: &ShardingRule,
        v: ValueId,
        node: &Node,
        described: &Described,
        table: Option<Option<usize>>,
    ) {
        let operands = node.operands.iter().enumerate().map(|(i, &o)| (Some(i), o, &rule.operands[i]));
        let tensors: Vec<_> = operands.chain([(None, v, &rule.result)]).collect();
        let mut seen_in: Vec<BTreeSet<Option<usize>>> = vec![BTreeSet::new(); rule.factors.len()];
        for (tensor, _, dims) in &tensors {
            dims.iter().flatten().for_each(|&f| {
                seen_in[f as usize].insert(*tensor);
            });
        }
        let factors: Vec<Vec<Atom>> = rule.factors.iter().map(|f| self.atoms.dimension(f.size)).collect();
        for (tensor, value, dims) in &tensors {
            for (d, dim) in dims.iter().enumerate().filter(|(d, _)| !described.contains(&(*tensor, *d))) {
                let parts: Vec<Atom> = dim.iter().flat_map(|&f| factors[f as usize].iter().copied()).collect();
                self.atoms.equate(&self.dims[value.index()][d], &parts);
                for &f in dim {
                    let alone = seen_in[f as usize].len() == 1 && table != Some(*tensor);
                    if rule.factors[f as usize].kind == FactorKind::Whole && alone {
                        self.atoms.fix(&factors[f as usize]);
                    }
                }
            }
        }
    }

    fn dim(&self, dim: Dim) -> Vec<Atom> {
        self.dims[dim.0.index()][dim.1].clone()
    }

    fn equate(&mut self, a: Dim, b: Dim) {
        self.atoms.equate(&self.dim(a), &self.dim(b));
    }

    /// The leaf atoms of a dimension, major first.
    pub(crate) fn leaves(&self, dim: Dim) -> Vec<Atom> {
        self.atoms.leaves(&self.dims[dim.0.index()][dim.1])
    }

    /// Fixes the size of a dimension. Returns true if it could have changed.
    pub(crate) fn fix(&mut self, dim: Dim) -> bool {
        self.atoms.fix(&self.dim(dim))
    }

    /// Relates a part to a larger dimension. It is one of a few long blocks, all but a few elements at the ends, or a
    /// few elements.
    fn part(&mut self, part: Dim, size: u64, whole: Dim, total: u64, start: u64) {
        let blocks = total.checked_div(size).unwrap_or(0);
        if size == total {
            self.equate(part, whole);
        } else if size > 0 && total.is_multiple_of(size) && start.is_multiple_of(size) && size >= blocks {
            let count = self.atoms.dimension(blocks);
            self.atoms.fix(&count);
            self.atoms.equate(&self.dim(whole), &[count, self.dim(part)].concat());
        } else if size > total / 2 {
            self.atoms.sum(&self.dim(part), &[self.dim(whole)]);
        } else {
            self.fix(part);
            self.atoms.at_least(&self.dim(whole), size);
        }
    }

    fn slice(&mut self, graph: &Graph, v: ValueId, op: &Slice, described: &mut Described) {
        let from = graph.node(v).operands[0];
        for (d, (&kept, &total)) in graph.shape(v).iter().zip(graph.shape(from)).enumerate() {
            described.extend([(Some(0), d), (None, d)]);
            if op.stride[d] == 1 {
                self.part(Dim(v, d), kept, Dim(from, d), total, op.start[d]);
            } else if op.stride[d].checked_mul(kept) == Some(total) {
                let stride = self.atoms.dimension(op.stride[d]);
                self.atoms.fix(&stride);
                self.atoms.equate(&self.dim(Dim(from, d)), &[self.dim(Dim(v, d)), stride].concat());
            } else {
                self.fix(Dim(v, d));
                self.fix(Dim(from, d));
            }
        }
    }

    fn pad(&mut self, graph: &Graph, v: ValueId, op: &Pad, described: &mut Described) {
        let from = graph.node(v).operands[0];
        for (d, (&size, &total)) in graph.shape(from).iter().zip(graph.shape(v)).enumerate() {
            described.extend([(Some(0), d), (None, d)]);
            let (part, whole) = (Dim(from, d), Dim(v, d));
            let blocks = op.low[d] >= 0 && op.high[d] >= 0 && size > 0 && (op.low[d] as u64).is_multiple_of(size);
            match op.interior[d] {
                0 if size > total / 2 && total > size / 2 => self.atoms.sum(&self.dim(whole), &[self.dim(part)]),
                0 if blocks && total.is_multiple_of(size) && size >= total / size => {
                    self.part(part, size, whole, total, op.low[d] as u64);
                }
                _ => {
                    self.fix(part);
                    self.fix(whole);
                }
            }
        }
    }

    /// Equal pieces are blocks. Of unequal pieces, each keeps its size except those that make up most of the result.
    fn concatenate(&mut self, graph: &Graph, v: ValueId, op: &Concatenate, described: &mut Described) {
        let operands = &graph.node(v).operands;
        let sizes: Vec<u64> = operands.iter().map(|&o| graph.shape(o)[op.dim]).collect();
        if sizes.windows(2).all(|pair| pair[0] == pair[1]) {
            return;
        }
        described.insert((None, op.dim));
        described.extend((0..operands.len()).map(|i| (Some(i), op.dim)));
        let terms: Vec<Vec<Atom>> = operands.iter().map(|&o| self.dim(Dim(o, op.dim))).collect();
        self.atoms.sum(&self.dim(Dim(v, op.dim)), &terms);
    }

    /// Sizes before and after a window that are in proportion stay so. A window that moves by single steps subtracts a
    /// constant.
    fn window(&mut self, graph: &Graph, from: Dim, to: Dim, window: &WindowDim) {
        let [n, m] = [from, to].map(|Dim(v, d)| graph.shape(v)[d]);
        if window.follows_result(n, m) {
            let [stride, dilation] = [window.stride, window.base_dilation].map(|s| {
                let factor = self.atoms.dimension(s);
                self.atoms.fix(&factor);
                factor
            });
            self.atoms.equate(&[self.dim(from), dilation].concat(), &[self.dim(to), stride].concat());
        } else if window.stride == 1 && window.base_dilation == 1 && m > n / 2 {
            self.atoms.sum(&self.dim(to), &[self.dim(from)]);
        } else {
            self.fix(from);
            self.fix(to);
        }
    }

    /// A table keeps at least the rows of one of its slices.
    fn table(&mut self, table: ValueId, dims: &GatherDims) {
        for (d, &slice) in dims.slice_sizes.iter().enumerate() {
            if dims.start_index_map.contains(&d) {
                self.atoms.at_least(&self.dim(Dim(table, d)), slice);
            }
        }
    }

    /// The graph in which no free size is larger than `most`. If an op cannot be rewritten for it, its sizes stay.
    pub(crate) fn capped(&mut self, graph: &Graph, most: u64) -> Graph {
        let goal = Sizing::AtMost(most);
        loop {
            match self.rebuilt(graph, &goal) {
                Ok(reduced) => return reduced,
                Err(failed) => {
                    let mut changed = false;
                    for v in failed {
                        for &value in graph.node(v).operands.iter().chain([&v]) {
                            for d in 0..graph.shape(value).len() {
                                changed |= self.fix(Dim(value, d));
                            }
                        }
                    }
                    if !changed {
                        return graph.clone();
                    }
                }
            }
        }
    }

    /// The graph with other sizes, node by node, or the nodes whose ops do not produce these sizes.
    pub(crate) fn rebuilt(&self, graph: &Graph, goal: &Sizing) -> Result<Graph, Vec<ValueId>> {
        let mut to = Graph {
            name: graph.name.clone(),
            batch: graph.batch,
            outputs: graph.outputs.clone(),
            pins: graph.pins.clone(),
            ..Default::default()
        };
        let mut failed = Vec::new();
        let mut resized = self.atoms.resized(goal);
        for v in graph.values() {
            let node = graph.node(v);
            let shape: Option<Vec<u64>> = self.dims[v.index()].iter().map(|d| resized.size(d)).collect();
            let Some(shape) = shape else {
                failed.push(v);
                to.append(node.clone());
                continue;
            };
            let ty = node.ty.with_shape(shape);
            let operands: Vec<&[u64]> = node.operands.iter().map(|&o| to.shape(o)).collect();
            let op = match &node.op {
                _ if ty == node.ty && node.operands.iter().all(|&o| to.shape(o) == graph.shape(o)) => node.op.clone(),
                Op::Constant(Literal { values: Values::Dense(values), batch_power, .. }) => {
                    let kept = self.kept(v, &mut resized);
                    let values: Vec<f64> = kept.iter().map(|&i| values[i].0).collect();
                    Op::Constant(Literal { batch_power: *batch_power, ..Literal::dense(ty.clone(), values) })
                }
                op => op.resized(&operands, &ty.shape),
            };
            let types: Vec<_> = node.operands.iter().map(|&o| to.ty(o)).collect();
            if op.infer(&types).as_ref() != Ok(&ty) {
                failed.push(v);
            }
            to.append(Node { op, ty, ..node.clone() });
        }
        if failed.is_empty() { Ok(to) } else { Err(failed) }
    }

    /// The row-major positions of the remaining elements of a value: the first ones of every atom.
    fn kept(&self, v: ValueId, resized: &mut Resized<'_>) -> Vec<usize> {
        let mut kept = vec![0];
        for atom in self.dims[v.index()].iter().flat_map(|dim| self.atoms.leaves(dim)) {
            let size = self.atoms.size(atom) as usize;
            let left = resized.size(&[atom]).unwrap_or(0) as usize;
            kept = kept.iter().flat_map(|&i| (0..left).map(move |j| i * size + j)).collect();
        }
        kept
    }
}

//! Turns a body into steps: views cost nothing, elementwise ops are fused into chains, and every stored value is
//! released after its last use or handed on to the result that replaces it.
//!
//! A group of elementwise nodes stays open until something outside of it needs one of its values; whatever joins
//! before that is computed in the same pass. Groups therefore never depend on each other in a circle.

use crate::element::Class;
use crate::fuse;
use crate::host::HostTensor;
use crate::kernel::bitcast::Bitcast;
use crate::kernel::convolution::Conv;
use crate::kernel::copy::Copy;
use crate::kernel::dot::Dot;
use crate::kernel::gather::Lookup;
use crate::kernel::reduce::Reduction;
use crate::kernel::rows::{Reversal, RowOrder, RowScan};
use crate::kernel::window::Pooling;
use crate::liveness;
use crate::step::{Compiled, Kernel, Leaf, Output, Step};
use crate::view::{View, row_major, sizes};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Values;
use altiplano_ir::op::{Binary, DotGeneral, GatherDims, Op, Operator, OutOfBounds, Pad, Reduce};
use altiplano_ir::program::{Body, BufferId};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use std::sync::Arc;

/// Nodes after which a group is closed although more could join, so that its operands do not live on for long.
const WINDOW: u32 = 64;

/// Members of a group, at most.
const MAX_MEMBERS: usize = 128;

/// Where the elements of a node's value are.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Splat(f64),
    View(View),
}

/// Elementwise nodes computed in one pass, and reductions of their rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Group {
    pub elements: usize,
    pub members: Vec<ValueId>,
    /// Reduction nodes with the length of a row.
    pub reductions: Vec<(ValueId, usize)>,
    last_joined: u32,
    /// The last node that might still join.
    joinable_until: u32,
    open: bool,
}

pub(crate) struct Compiler<'g> {
    pub graph: &'g Graph,
    needed: Vec<bool>,
    written: Vec<bool>,
    users: Vec<Vec<ValueId>>,
    /// The last elementwise op or reduction that reads a value in order; 0 where none does.
    last_fusible_user: Vec<u32>,
    places: Vec<Option<Place>>,
    /// Elements of each stored value.
    stored_elements: Vec<usize>,
    groups: Vec<Group>,
    group_of: Vec<Option<usize>>,
    /// Leaves whose storage the body may overwrite.
    owned: Vec<bool>,
    steps: Vec<Step>,
}

/// Compiles a body whose graph has passed `verify`.
pub fn compile(body: &Body) -> Compiled {
    let graph = &body.graph;
    let mut written = vec![false; graph.len()];
    body.writes.iter().for_each(|w| written[w.1.index()] = true);
    let mut needed = written.clone();
    for v in graph.values().rev().filter(|v| !graph.node(*v).op.is_leaf()) {
        if needed[v.index()] {
            graph.node(v).operands.iter().for_each(|o| needed[o.index()] = true);
        }
    }
    let mut users = graph.users();
    users.iter_mut().for_each(|list| list.retain(|u| needed[u.index()]));
    let mut last_fusible_user = vec![0; graph.len()];
    for v in graph.values().rev() {
        let reach = |u: &ValueId| match &graph.node(*u).op {
            _ if is_elementwise(graph, *u) => u.0,
            Op::Reduce(_) => u.0,
            Op::Reshape(_) => last_fusible_user[u.index()],
            _ => 0,
        };
        last_fusible_user[v.index()] = users[v.index()].iter().map(reach).max().unwrap_or(0);
    }
    let replaced = |b: &BufferId| body.frees.contains(b) || body.writes.iter().any(|w| w.0 == *b);
    let mut owned = vec![false; graph.len()];
    body.reads.iter().for_each(|(v, b)| owned[v.index()] = replaced(b));
    let mut compiler = Compiler {
        graph,
        needed,
        written,
        users,
        last_fusible_user,
        places: vec![None; graph.len()],
        stored_elements: graph.nodes.iter().map(|n| n.ty.elements() as usize).collect(),
        groups: Vec::new(),
        group_of: vec![None; graph.len()],
        owned,
        steps: Vec::new(),
    };
    for v in graph.values() {
        if compiler.needed[v.index()] && compiler.places[v.index()].is_none() {
            compiler.node(v);
        }
        compiler.close_where(|g| g.joinable_until <= v.0 || v.0 >= g.last_joined + WINDOW);
    }
    compiler.close_where(|_| true);
    let writes: Vec<(BufferId, ValueId)> = body.writes.iter().map(|&(b, v)| (b, compiler.stored(v))).collect();
    let leaf = |&(value, buffer): &(ValueId, BufferId)| {
        let ty = graph.ty(value);
        Leaf { value, buffer, owned: replaced(&buffer), bytes: ty.elements() * Class::of(ty.dtype).bytes() as u64 }
    };
    let mut compiled = Compiled {
        name: body.name.clone(),
        num_values: compiler.places.len(),
        steps: compiler.steps,
        leaves: body.reads.iter().map(leaf).collect(),
        writes,
        frees: body.frees.clone(),
        transient_bytes: 0,
    };
    liveness::assign(&mut compiled);
    compiled
}

/// The most bytes that a body holds beyond those held when it starts: results, temporaries and workspace.
pub fn body_transient_bytes(body: &Body) -> u64 {
    compile(body).transient_bytes
}

/// Whether a node can be part of a chain: also a cast of bits that keeps the number of elements.
fn is_elementwise(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    let same_width = || graph.ty(node.operands[0]).dtype.width() == node.ty.dtype.width();
    node.op.is_elementwise() || matches!(node.op, Op::BitcastConvert(_)) && same_width()
}

/// A value of the reference semantics rounded to how it is stored.
fn round(value: f64, dtype: DType) -> f64 {
    HostTensor::from_f64(TensorType::scalar(dtype), &[value]).to_f64()[0]
}

impl Compiler<'_> {
    /// The place of a node that was compiled before.
    pub(crate) fn place(&self, v: ValueId) -> &Place {
        match &self.places[v.index()] {
            Some(place) => place,
            None => unreachable!("operands of needed nodes are needed and come first"),
        }
    }

    fn class(&self, v: ValueId) -> Class {
        Class::of(self.graph.ty(v).dtype)
    }

    /// Whether a member's value is read by anything that is not in its group.
    pub(crate) fn is_needed_outside(&self, v: ValueId, group: &Group) -> bool {
        let inside = |u: &ValueId| group.members.contains(u) || group.reductions.iter().any(|r| r.0 == *u);
        self.written[v.index()]
            || self.users[v.index()].iter().any(|u| match &self.graph.node(*u).op {
                _ if inside(u) => false,
                Op::Reshape(_) => self.is_needed_outside(*u, group),
                _ => true,
            })
    }

    /// A new stored value that stands for no node.
    fn fresh(&mut self, elements: usize) -> ValueId {
        self.places.push(None);
        self.stored_elements.push(elements);
        self.group_of.push(None);
        ValueId((self.places.len() - 1) as u32)
    }

    fn step(&mut self, node: ValueId, kernel: Kernel, inputs: Vec<ValueId>, output: Output) {
        let (in_place, dies, members) = (Vec::new(), Vec::new(), Vec::new());
        self.steps.push(Step { node, members, kernel, inputs, outputs: vec![output], in_place, dies });
    }

    /// Makes a step whose result is all of `v` in row-major order.
    fn whole_step(&mut self, v: ValueId, kernel: Kernel, inputs: Vec<ValueId>) {
        let dtype = self.graph.ty(v).dtype;
        let output = Output { value: v, dtype, elements: self.stored_elements[v.index()] };
        self.step(v, kernel, inputs, output);
        self.places[v.index()] = Some(Place::View(View::whole(v, sizes(self.graph.shape(v)))));
    }

    fn node(&mut self, v: ValueId) {
        let node = self.graph.node(v);
        let shape = sizes(&node.ty.shape);
        let operand = node.operands.first().copied();
        match &node.op {
            Op::Parameter(_) | Op::Input(_) => self.places[v.index()] = Some(Place::View(View::whole(v, shape))),
            Op::Constant(literal) => match &literal.values {
                Values::Splat(x) => self.places[v.index()] = Some(Place::Splat(round(x.0, node.ty.dtype))),
                Values::Dense(values) => {
                    let data: Vec<f64> = values.iter().map(|r| r.0).collect();
                    let data = HostTensor::from_f64(node.ty.clone(), &data).data;
                    self.whole_step(v, Kernel::Dense(Arc::new(data)), Vec::new());
                }
            },
            Op::Iota(op) => {
                // One row is stored, all others are views of it.
                let mut strides = vec![0; shape.len()];
                strides[op.dim] = 1;
                self.stored_elements[v.index()] = shape[op.dim];
                let output = Output { value: v, dtype: node.ty.dtype, elements: shape[op.dim] };
                self.step(v, Kernel::Iota(node.ty.dtype), Vec::new(), output);
                self.places[v.index()] = Some(Place::View(View { root: v, offset: 0, shape, strides }));
            }
            Op::BroadcastInDim(_) | Op::Transpose(_) | Op::Slice(_) | Op::Reshape(_) => {
                if let Some(o) = operand {
                    self.view(v, o);
                }
            }
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Convert(_) => self.elementwise(v),
            Op::ReducePrecision(_) | Op::Threefry(_) => self.elementwise(v),
            Op::BitcastConvert(_) if is_elementwise(self.graph, v) => self.elementwise(v),
            Op::BitcastConvert(op) => {
                let from = self.graph.ty(node.operands[0]).dtype;
                let input = self.stored(node.operands[0]);
                self.whole_step(v, Kernel::Bitcast(Bitcast { from, to: op.dtype }), vec![input]);
            }
            Op::Reverse(op) => {
                let input = self.stored(node.operands[0]);
                self.whole_step(v, Kernel::Reverse(Reversal::new(&shape, &op.dims)), vec![input]);
            }
            Op::Cumulative(op) => {
                let input = self.stored_in_rows(node.operands[0], op.dim);
                let (reducer, reverse, dtype) = (op.reducer, op.reverse, node.ty.dtype);
                let kernel = Kernel::Cumulative(RowScan { row: shape[op.dim], reducer, reverse, dtype });
                self.step_in_rows(v, op.dim, kernel, vec![input]);
            }
            Op::ArgSort(op) => {
                let inputs = node.operands.iter().map(|&o| self.stored_in_rows(o, op.dim)).collect();
                let dtypes = node.operands.iter().map(|&o| self.graph.ty(o).dtype);
                let keys = dtypes.zip(op.descending.iter().copied()).collect();
                self.step_in_rows(v, op.dim, Kernel::ArgSort(RowOrder { row: shape[op.dim], keys }), inputs);
            }
            Op::Reduce(op) => self.reduce(v, op),
            Op::DotGeneral(op) => self.dot(v, op),
            Op::Convolution(op) => {
                let (lhs, rhs) = (self.view_of(node.operands[0]), self.view_of(node.operands[1]));
                let conv = Conv::new(op, self.class(v), &lhs, &rhs, &shape, &row_major(&shape));
                self.whole_step(v, Kernel::Convolution(conv), vec![lhs.root, rhs.root]);
            }
            Op::ReduceWindow(op) => {
                let x = self.stored(node.operands[0]);
                let operand = sizes(self.graph.shape(node.operands[0]));
                let pooling = Pooling::new(node.ty.dtype, &op.window, &operand, &shape);
                self.whole_step(v, Kernel::ReduceWindow { pooling, reducer: op.reducer }, vec![x]);
            }
            Op::SelectAndScatter(op) => {
                let inputs = vec![self.stored(node.operands[0]), self.stored(node.operands[1])];
                let source = sizes(self.graph.shape(node.operands[1]));
                let pooling = Pooling::new(node.ty.dtype, &op.window, &shape, &source);
                self.whole_step(v, Kernel::SelectAndScatter { pooling, select: op.select }, inputs);
            }
            Op::Concatenate(op) => {
                let target = row_major(&shape);
                let mut copies = Vec::new();
                let mut inputs = Vec::new();
                let mut at = 0;
                for &o in &node.operands {
                    let view = self.view_of(o);
                    copies.push(copy_into(&view, at * target[op.dim], &target));
                    inputs.push(view.root);
                    at += view.shape[op.dim];
                }
                self.whole_step(v, Kernel::Concatenate(copies), inputs);
            }
            Op::Pad(op) => {
                let view = self.view_of(node.operands[0]);
                let value = self.stored(node.operands[1]);
                self.whole_step(v, Kernel::Pad(pad_copy(op, &view, &shape)), vec![view.root, value]);
            }
            Op::Gather(op) => {
                let (lookup, inputs) = self.lookup(&op.dims, node.operands[0], node.operands[1], v);
                let clamp = op.out_of_bounds == OutOfBounds::Clamp;
                self.whole_step(v, Kernel::Gather { lookup, index: self.class(node.operands[1]), clamp }, inputs);
            }
            Op::ScatterAdd(op) => {
                let (indices, updates) = (node.operands[0], node.operands[1]);
                let [i, u] = [indices, updates].map(|o| self.stored(o));
                let shapes =
                    [node.ty.shape.as_slice(), self.graph.shape(indices), self.graph.shape(updates)].map(sizes);
                let lookup = Lookup::new(&op.dims, &shapes[0], &shapes[1], &shapes[2]);
                let kernel = Kernel::ScatterAdd { lookup, index: self.class(indices), dtype: node.ty.dtype };
                self.whole_step(v, kernel, vec![i, u]);
            }
            Op::Scatter(op) => {
                let shapes: Vec<Vec<usize>> = node.operands.iter().map(|&o| sizes(self.graph.shape(o))).collect();
                let inputs: Vec<ValueId> = node.operands.iter().map(|&o| self.stored(o)).collect();
                let kernel = Kernel::Scatter {
                    lookup: Lookup::new(&op.dims, &shapes[0], &shapes[1], &shapes[2]),
                    index: self.class(node.operands[1]),
                    dtype: node.ty.dtype,
                    combine: op.combine,
                };
                self.whole_step(v, kernel, inputs);
            }
            // Refused before: see `check`.
            Op::Composite(_) => {}
            Op::Collective(op) => {
                let input = self.stored(node.operands[0]);
                let kernel = Kernel::Collective {
                    collective: op.collective.clone(),
                    dtype: node.ty.dtype,
                    shape: sizes(self.graph.shape(node.operands[0])),
                    group_size: op.mesh.product(op.collective.axes()) as usize,
                };
                self.whole_step(v, kernel, vec![input]);
            }
            Op::AxisIndex(op) => {
                self.whole_step(v, Kernel::AxisIndex { axes: op.axes.clone(), dtype: op.dtype }, Vec::new());
            }
        }
    }

    /// A node that only names elements of its operand `o` anew.
    fn view(&mut self, v: ValueId, o: ValueId) {
        let node = self.graph.node(v);
        let place = match (self.place(o), &node.op) {
            (Place::Splat(x), _) => Place::Splat(*x),
            (Place::View(view), Op::BroadcastInDim(op)) => Place::View(view.broadcast(&op.shape, &op.dims)),
            (Place::View(view), Op::Transpose(op)) => Place::View(view.transpose(&op.permutation)),
            (Place::View(view), Op::Slice(op)) => Place::View(view.slice(&op.start, &op.stride, &node.ty.shape)),
            (Place::View(view), _) => match view.reshape(&node.ty.shape) {
                Some(view) => Place::View(view),
                None => {
                    let root = self.stored(o);
                    Place::View(View::whole(root, sizes(&node.ty.shape)))
                }
            },
        };
        self.places[v.index()] = Some(place);
    }

    /// The stored tensor that is exactly the value `v`, row major; made now where there is none.
    fn stored(&mut self, v: ValueId) -> ValueId {
        let (dtype, shape) = (self.graph.ty(v).dtype, sizes(self.graph.shape(v)));
        let elements: usize = shape.iter().product();
        let root = match self.place(v).clone() {
            Place::View(view) => {
                self.close_group_of(view.root);
                if view.is_all_of(self.stored_elements[view.root.index()]) {
                    return view.root;
                }
                self.copied(v, &view)
            }
            Place::Splat(value) => {
                let root = self.fresh(elements);
                self.step(v, Kernel::Fill { value, dtype }, Vec::new(), Output { value: root, dtype, elements });
                root
            }
        };
        self.places[v.index()] = Some(Place::View(View::whole(root, shape)));
        root
    }

    /// A row-major copy of a view of elements of `v`.
    fn copied(&mut self, v: ValueId, view: &View) -> ValueId {
        let elements = view.elements();
        let root = self.fresh(elements);
        let copy = copy_into(view, 0, &row_major(&view.shape));
        let output = Output { value: root, dtype: self.graph.ty(v).dtype, elements };
        self.step(v, Kernel::Copy(copy), vec![view.root], output);
        root
    }

    /// The value of `v` stored with dimension `dim` as the last one.
    fn stored_in_rows(&mut self, v: ValueId, dim: usize) -> ValueId {
        let view = self.view_of(v);
        let view = view.transpose(&last(dim, view.shape.len()));
        if view.is_all_of(self.stored_elements[view.root.index()]) { view.root } else { self.copied(v, &view) }
    }

    /// Makes a step whose result is `v` stored with dimension `dim` as the last one.
    fn step_in_rows(&mut self, v: ValueId, dim: usize, kernel: Kernel, inputs: Vec<ValueId>) {
        self.whole_step(v, kernel, inputs);
        let shape = sizes(self.graph.shape(v));
        let order = last(dim, shape.len());
        let stored: Vec<usize> = order.iter().map(|&d| shape[d]).collect();
        let mut strides = vec![0; shape.len()];
        for (&d, stride) in order.iter().zip(row_major(&stored)) {
            strides[d] = stride;
        }
        self.places[v.index()] = Some(Place::View(View { root: v, offset: 0, shape, strides }));
    }

    /// A view of the value of `v`, whose root is computed by now.
    fn view_of(&mut self, v: ValueId) -> View {
        match self.place(v).clone() {
            Place::View(view) => {
                self.close_group_of(view.root);
                view
            }
            Place::Splat(value) => {
                // A single element, repeated by strides of zero.
                let root = self.fresh(1);
                let dtype = self.graph.ty(v).dtype;
                self.step(v, Kernel::Fill { value, dtype }, Vec::new(), Output { value: root, dtype, elements: 1 });
                View::whole(root, Vec::new()).broadcast(self.graph.shape(v), &[])
            }
        }
    }

    fn elementwise(&mut self, v: ValueId) {
        let node = self.graph.node(v);
        let splats: Option<Vec<Tensor>> = node
            .operands
            .iter()
            .map(|&o| match self.place(o) {
                Place::Splat(x) => Some(Tensor::scalar(self.graph.ty(o).dtype, *x)),
                Place::View(_) => None,
            })
            .collect();
        if let Some(splats) = splats {
            let folded = node.op.eval(&splats.iter().collect::<Vec<_>>(), &TensorType::scalar(node.ty.dtype));
            self.places[v.index()] = Some(Place::Splat(round(folded.data[0], node.ty.dtype)));
            return;
        }
        let elements = node.ty.elements() as usize;
        for &o in &node.operands {
            if self.member_group(o).is_none() {
                self.prepare_load(o);
            }
        }
        // What was prepared may have closed groups, so membership is asked again.
        let mut joined: Option<usize> = None;
        for &o in &node.operands {
            let Some(g) = self.member_group(o) else { continue };
            match joined {
                Some(first) if first != g => {
                    if self.can_merge(first, g) {
                        self.merge(first, g);
                    } else {
                        self.close(g);
                    }
                }
                _ => joined = Some(g),
            }
        }
        let g = match joined {
            Some(g) if self.groups[g].members.len() < MAX_MEMBERS => g,
            other => {
                other.into_iter().for_each(|g| self.close(g));
                self.groups.push(Group { elements, open: true, ..Default::default() });
                self.groups.len() - 1
            }
        };
        self.places[v.index()] = Some(Place::View(View::whole(v, sizes(&node.ty.shape))));
        self.group_of[v.index()] = Some(g);
        let reach = self.last_fusible_user[v.index()];
        let group = &mut self.groups[g];
        group.members.push(v);
        group.last_joined = v.0;
        group.joinable_until = group.joinable_until.max(reach);
    }

    /// The open group that computes `o`, where its elements are read there in order.
    fn member_group(&self, o: ValueId) -> Option<usize> {
        let Place::View(view) = self.place(o) else { return None };
        let g = self.group_of[view.root.index()]?;
        let member = self.groups[g].members.contains(&view.root);
        (self.groups[g].open && member && view.is_all_of(self.stored_elements[view.root.index()])).then_some(g)
    }

    /// Sees to it that `o` can be read by a chain: computed, and not element by element across a large tensor.
    fn prepare_load(&mut self, o: ValueId) {
        let Place::View(view) = self.place(o).clone() else { return };
        self.close_group_of(view.root);
        if let Some(&(size, stride)) = view.runs().last()
            && stride > 1
            && size >= 8
            && view.elements() >= 4096
        {
            self.stored(o);
        }
    }

    fn can_merge(&self, a: usize, b: usize) -> bool {
        let rows = |g: usize| self.groups[g].reductions.first().map(|r| r.1);
        let fits = self.groups[a].members.len() + self.groups[b].members.len() < MAX_MEMBERS;
        fits && match (rows(a), rows(b)) {
            (Some(x), Some(y)) => x == y,
            _ => true,
        }
    }

    /// Moves all of group `b` into `a`.
    fn merge(&mut self, a: usize, b: usize) {
        let from = std::mem::take(&mut self.groups[b]);
        from.members.iter().for_each(|m| self.group_of[m.index()] = Some(a));
        from.reductions.iter().for_each(|r| self.group_of[r.0.index()] = Some(a));
        let group = &mut self.groups[a];
        group.members.extend(from.members);
        group.members.sort();
        group.reductions.extend(from.reductions);
        group.joinable_until = group.joinable_until.max(from.joinable_until);
        group.last_joined = group.last_joined.max(from.last_joined);
    }

    fn reduce(&mut self, v: ValueId, op: &Reduce) {
        let o = self.graph.node(v).operands[0];
        let ty = self.graph.ty(o);
        let kept = ty.rank() - op.dims.len();
        let row: usize = op.dims.iter().map(|&d| ty.shape[d] as usize).product();
        let elements = ty.elements() as usize;
        let rows_together = op.dims.iter().all(|&d| d >= kept) && row > 1 && elements > 0;
        let joined = self
            .member_group(o)
            .filter(|&g| rows_together && self.groups[g].reductions.first().is_none_or(|r| r.1 == row));
        let view = Place::View(View::whole(v, sizes(self.graph.shape(v))));
        if let Some(g) = joined {
            self.places[v.index()] = Some(view);
            self.group_of[v.index()] = Some(g);
            self.groups[g].reductions.push((v, row));
            return;
        }
        let from = self.view_of(o);
        let in_rows = from.runs().last().is_some_and(|r| r.1 <= 1);
        if rows_together && in_rows {
            self.places[o.index()] = Some(Place::View(from));
            self.places[v.index()] = Some(view);
            self.groups.push(Group { elements, open: true, reductions: vec![(v, row)], ..Default::default() });
            let g = self.groups.len() - 1;
            self.group_of[v.index()] = Some(g);
            self.close(g);
            return;
        }
        let kernel = Kernel::Reduce(Reduction::new(&from, &op.dims, op.reducer, ty.dtype));
        self.whole_step(v, kernel, vec![from.root]);
    }

    fn dot(&mut self, v: ValueId, op: &DotGeneral) {
        let node = self.graph.node(v);
        let lhs = self.view_of(node.operands[0]);
        let rhs = self.view_of(node.operands[1]);
        let shape = sizes(&node.ty.shape);
        // A product that is only read transposed is written transposed.
        let transposed = match self.users[v.index()].as_slice() {
            [only] if !self.written[v.index()] => match &self.graph.node(*only).op {
                Op::Transpose(t) => Some(&t.permutation),
                _ => None,
            },
            _ => None,
        };
        let mut strides = row_major(&shape);
        if let Some(permutation) = transposed {
            let stored: Vec<usize> = permutation.iter().map(|&d| shape[d]).collect();
            for (&d, stride) in permutation.iter().zip(row_major(&stored)) {
                strides[d] = stride;
            }
        }
        let mut dot = Dot::new(op, self.class(v), &lhs, &rhs, &strides);
        let mut inputs = vec![lhs.root, rhs.root];
        if let Some((sum, accumulator)) = self.accumulation(v) {
            dot.accumulate = true;
            inputs.push(accumulator);
            self.places[sum.index()] = Some(Place::View(View::whole(v, sizes(self.graph.shape(sum)))));
        }
        self.whole_step(v, Kernel::Dot(dot), inputs);
        self.places[v.index()] = Some(Place::View(View { root: v, offset: 0, shape, strides }));
    }

    /// A product that is only added to a leaf whose buffer the body replaces (a gradient accumulator): the sum, and
    /// the leaf. The product then adds to the leaf's storage and needs none of its own.
    fn accumulation(&self, product: ValueId) -> Option<(ValueId, ValueId)> {
        let mut v = product;
        loop {
            let &[user] = self.users[v.index()].as_slice() else { return None };
            let node = self.graph.node(user);
            match &node.op {
                _ if self.written[v.index()] => return None,
                // Written transposed; after a reshape it could not be.
                Op::Transpose(_) if v == product => {}
                Op::Reshape(_) => {}
                Op::Binary(Binary::Add) => {
                    let other = *node.operands.iter().find(|o| **o != v)?;
                    let suits = self.owned[other.index()] && self.users[other.index()] == [user];
                    return (suits && !self.written[other.index()]).then_some((user, other));
                }
                _ => return None,
            }
            v = user;
        }
    }

    fn lookup(&mut self, dims: &GatherDims, table: ValueId, indices: ValueId, rows: ValueId) -> (Lookup, Vec<ValueId>) {
        let shapes = [table, indices, rows].map(|v| sizes(self.graph.shape(v)));
        let inputs = vec![self.stored(table), self.stored(indices)];
        (Lookup::new(dims, &shapes[0], &shapes[1], &shapes[2]), inputs)
    }

    /// Computes the group of a stored value now, since something reads it.
    fn close_group_of(&mut self, root: ValueId) {
        if let Some(g) = self.group_of[root.index()] {
            self.close(g);
        }
    }

    fn close_where(&mut self, done: impl Fn(&Group) -> bool) {
        // Open groups are few and recent.
        let first = self.groups.iter().position(|g| g.open).unwrap_or(self.groups.len());
        for g in first..self.groups.len() {
            if self.groups[g].open && done(&self.groups[g]) {
                self.close(g);
            }
        }
    }

    fn close(&mut self, g: usize) {
        if !std::mem::take(&mut self.groups[g].open) {
            return;
        }
        let group = std::mem::take(&mut self.groups[g]);
        let (chain, inputs, outputs) = fuse::build(self, &group);
        let mut members: Vec<ValueId> =
            group.members.iter().copied().chain(group.reductions.iter().map(|r| r.0)).collect();
        members.sort_unstable();
        if let Some(&node) = members.last().filter(|_| !outputs.is_empty()) {
            let (kernel, in_place, dies) = (Kernel::Chain(chain), Vec::new(), Vec::new());
            self.steps.push(Step { node, members, kernel, inputs, outputs, in_place, dies });
        }
    }
}

/// All dimensions in order, but `dim` last.
fn last(dim: usize, rank: usize) -> Vec<usize> {
    (0..rank).filter(|&d| d != dim).chain([dim]).collect()
}

/// A copy of a view to a row-major place in a larger tensor.
fn copy_into(view: &View, target_offset: usize, target: &[usize]) -> Copy {
    let dims = view.shape.iter().zip(&view.strides).zip(target).map(|((&n, &s), &t)| (n, s, t));
    Copy::new(view.offset, target_offset, dims)
}

/// The part of a padding's operand that ends up in its result.
fn pad_copy(op: &Pad, view: &View, shape: &[usize]) -> Copy {
    let target = row_major(shape);
    let (mut source_offset, mut target_offset) = (view.offset, 0);
    let mut dims = Vec::with_capacity(shape.len());
    for d in 0..shape.len() {
        let (low, pitch) = (op.low[d], op.interior[d] as i64 + 1);
        // Indices i with 0 <= low + i * pitch < shape[d].
        let first = if low >= 0 { 0 } else { (-low + pitch - 1) / pitch };
        let end = (shape[d] as i64 - low + pitch - 1).div_euclid(pitch).clamp(0, view.shape[d] as i64);
        let n = (end - first).max(0) as usize;
        if n > 0 {
            source_offset += first as usize * view.strides[d];
            target_offset += (low + first * pitch) as usize * target[d];
        }
        dims.push((n, view.strides[d], target[d] * pitch as usize));
    }
    Copy::new(source_offset, target_offset, dims)
}

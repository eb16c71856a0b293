//! Compiles a body into steps. Views cost nothing, and elementwise ops are fused into chains. Every stored value is
//! released after its last use, or its storage is taken over by the result that replaces it.
//!
//! A group of elementwise nodes stays open until a node outside needs one of its values. Nodes that join before that
//! are computed in the same pass. So groups never depend on each other in a cycle.

use super::liveness;
use super::view::{View, row_major, sizes};
use super::{Class, Group, Leaf, Output, Place, Step, Steps, Work};
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::literal::Values;
use crate::op::{Binary, Convolution, Op, Operator, Reduce};
use crate::program::{Body, BufferId};
use crate::reshard::Collective;
use crate::tensor::Tensor;
use crate::types::TensorType;

/// The number of nodes after which a group is closed although more could join. It limits how long the group's operands
/// live.
const WINDOW: u32 = 64;

/// The largest number of members in a group.
const MAX_MEMBERS: usize = 128;

/// A group that more nodes may join.
#[derive(Clone, Debug, Default)]
struct Open {
    group: Group,
    last_joined: u32,
    /// The last node that may still join.
    joinable_until: u32,
    open: bool,
}

struct Compiler<'g> {
    graph: &'g Graph,
    needed: Vec<bool>,
    written: Vec<bool>,
    users: Vec<Vec<ValueId>>,
    /// The last elementwise op or reduction that reads a value in order, or 0 if none does.
    last_fusible_user: Vec<u32>,
    places: Vec<Option<Place>>,
    /// The number of elements of each stored value.
    stored_elements: Vec<usize>,
    groups: Vec<Open>,
    group_of: Vec<Option<usize>>,
    /// For each leaf, true if the body may overwrite its storage.
    owned: Vec<bool>,
    steps: Vec<Step<Work>>,
}

/// The steps in which the CPU runtime runs a body, whose graph must have passed `verify`.
pub fn compile(body: &Body) -> Steps<Work> {
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
    let host = super::in_host(graph);
    let leaf = |&(value, buffer): &(ValueId, BufferId)| {
        let ty = graph.ty(value);
        let bytes = if host[value.index()] { 0 } else { ty.elements() * Class::of(ty.dtype).bytes() as u64 };
        Leaf { value, buffer, owned: replaced(&buffer), bytes }
    };
    let mut steps = Steps {
        name: body.name.clone(),
        num_values: compiler.places.len(),
        steps: compiler.steps,
        leaves: body.reads.iter().map(leaf).collect(),
        writes,
        frees: body.frees.clone(),
        transient_bytes: 0,
    };
    liveness::assign(&mut steps);
    steps
}

/// Returns true if a node can be part of a chain. This includes bit casts that keep the number of elements.
fn is_elementwise(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    let same_width = || graph.ty(node.operands[0]).dtype.width() == node.ty.dtype.width();
    node.op.is_elementwise() || matches!(node.op, Op::BitcastConvert(_)) && same_width()
}

/// Rounds a value of the reference semantics to its storage format.
fn round(value: f64, dtype: DType) -> f64 {
    if dtype == DType::F64 { f64::from(value as f32) } else { dtype.round(value) }
}

impl Compiler<'_> {
    /// The place of a node that has been compiled.
    fn place(&self, v: ValueId) -> &Place {
        match &self.places[v.index()] {
            Some(place) => place,
            None => unreachable!("operands of needed nodes are needed and come first"),
        }
    }

    fn class(&self, v: ValueId) -> Class {
        Class::of(self.graph.ty(v).dtype)
    }

    /// Returns true if a node outside the group reads the member's value.
    fn is_needed_outside(&self, v: ValueId, group: &Group) -> bool {
        let inside = |u: &ValueId| group.members.contains(u) || group.reductions.iter().any(|r| r.0 == *u);
        self.written[v.index()]
            || self.users[v.index()].iter().any(|u| match &self.graph.node(*u).op {
                _ if inside(u) => false,
                Op::Reshape(_) => self.is_needed_outside(*u, group),
                _ => true,
            })
    }

    /// A new stored value that belongs to no node.
    fn fresh(&mut self, elements: usize) -> ValueId {
        self.places.push(None);
        self.stored_elements.push(elements);
        self.group_of.push(None);
        ValueId((self.places.len() - 1) as u32)
    }

    fn step(&mut self, node: ValueId, kernel: Work, inputs: Vec<ValueId>, output: Output) {
        self.push(node, kernel, inputs, vec![output], Vec::new());
    }

    fn push(
        &mut self,
        node: ValueId,
        kernel: Work,
        inputs: Vec<ValueId>,
        outputs: Vec<Output>,
        replaceable: Vec<(usize, ValueId)>,
    ) {
        let workspace_bytes = self.workspace_bytes(node, &kernel);
        let mut members: Vec<ValueId> = match &kernel {
            Work::Chain(group) => group.members.iter().copied().chain(group.reductions.iter().map(|r| r.0)).collect(),
            _ => Vec::new(),
        };
        members.sort_unstable();
        let (in_place, dies) = (Vec::new(), Vec::new());
        self.steps.push(Step { node, members, kernel, inputs, outputs, workspace_bytes, replaceable, in_place, dies });
    }

    /// Adds a step whose result is all of `v` in row-major order.
    fn whole_step(&mut self, v: ValueId, kernel: Work, inputs: Vec<ValueId>) {
        self.replacing_step(v, kernel, inputs, None);
    }

    /// [`Self::whole_step`] with a result that may take over the storage of an input.
    fn replacing_step(&mut self, v: ValueId, kernel: Work, inputs: Vec<ValueId>, replaceable: Option<ValueId>) {
        let mut output = Output::new(v, self.graph.ty(v).dtype, self.stored_elements[v.index()]);
        if self.graph.node(v).op.stores_in_host() {
            output = Output { bytes: 0, host: true, ..output };
        }
        let replaceable = replaceable.into_iter().map(|input| (0, input)).collect();
        self.push(v, kernel, inputs, vec![output], replaceable);
        self.places[v.index()] = Some(Place::View(View::whole(v, sizes(self.graph.shape(v)))));
    }

    /// The workspace of a step: single-precision copies of narrower values, tiles of convolutions, and the part of an
    /// all-reduce that a device computes.
    fn workspace_bytes(&self, v: ValueId, kernel: &Work) -> u64 {
        let node = self.graph.node(v);
        let class = self.class(v);
        let widened = !class.is_integer() && class != Class::F32;
        let elements = self.stored_elements[v.index()];
        let copies = |lhs: &View, rhs: &View| match widened {
            true => lhs.end() - lhs.offset + rhs.end() - rhs.offset + elements,
            false => 0,
        };
        let words = match (kernel, &node.op) {
            (Work::Dot { lhs, rhs, .. }, _) => copies(lhs, rhs),
            (Work::Convolution { lhs, rhs }, Op::Convolution(op)) => {
                let tiles = if class.is_integer() { [0; 3] } else { tiles(op, &rhs.shape, &node.ty.shape) };
                tiles.iter().sum::<u64>() as usize + copies(lhs, rhs)
            }
            (Work::Node, Op::ScatterAdd(_)) if widened => elements,
            (Work::Node, Op::GroupedDot(_) | Op::GroupedOuter(_)) => {
                let types = self.graph.operand_types(v);
                let of = |rows: &TensorType| rows.elements() as usize;
                match &node.op {
                    // The rows of one group, their results, and the group's matrix in single precision.
                    Op::GroupedDot(_) => {
                        let matrix = types[1].shape[1..].iter().product::<u64>() as usize;
                        of(types[0]) + elements + if widened { matrix } else { 0 }
                    }
                    _ => {
                        let matrix = node.ty.shape[1..].iter().product::<u64>() as usize;
                        of(types[0]) + of(types[1]) + if widened { matrix } else { 0 }
                    }
                }
            }
            _ => 0,
        };
        4 * words as u64
    }

    fn node(&mut self, v: ValueId) {
        let node = self.graph.node(v);
        let shape = sizes(&node.ty.shape);
        let operand = node.operands.first().copied();
        match &node.op {
            Op::Parameter(_) | Op::Input(_) => self.places[v.index()] = Some(Place::View(View::whole(v, shape))),
            Op::Constant(literal) => match &literal.values {
                Values::Splat(x) => self.places[v.index()] = Some(Place::Splat(round(x.0, node.ty.dtype))),
                Values::Dense(_) => self.whole_step(v, Work::Node, Vec::new()),
            },
            Op::Iota(op) => {
                // Only one row is stored, and all others are views of it.
                let mut strides = vec![0; shape.len()];
                strides[op.dim] = 1;
                self.stored_elements[v.index()] = shape[op.dim];
                let output = Output::new(v, node.ty.dtype, shape[op.dim]);
                self.step(v, Work::Node, Vec::new(), output);
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
            Op::Cumulative(op) => {
                let input = self.stored_in_rows(node.operands[0], op.dim);
                self.step_in_rows(v, op.dim, vec![input]);
            }
            Op::ArgSort(op) => {
                let inputs = node.operands.iter().map(|&o| self.stored_in_rows(o, op.dim)).collect();
                self.step_in_rows(v, op.dim, inputs);
            }
            Op::Reduce(op) => self.reduce(v, op),
            Op::DotGeneral(_) => self.dot(v),
            Op::Convolution(_) => {
                let (lhs, rhs) = (self.view_of(node.operands[0]), self.view_of(node.operands[1]));
                let inputs = vec![lhs.root, rhs.root];
                self.whole_step(v, Work::Convolution { lhs, rhs }, inputs);
            }
            Op::Concatenate(_) => {
                let views: Vec<View> = node.operands.iter().map(|&o| self.view_of(o)).collect();
                let inputs = views.iter().map(|view| view.root).collect();
                self.whole_step(v, Work::Concatenate(views), inputs);
            }
            Op::Pad(_) => {
                let view = self.view_of(node.operands[0]);
                let inputs = vec![view.root, self.stored(node.operands[1])];
                self.whole_step(v, Work::Pad(view), inputs);
            }
            // The runtime refuses programs with composites.
            Op::Composite(_) => {}
            // Steps run in order, so there is nothing to wait for.
            Op::HostCopy(_) => {
                let input = self.stored(node.operands[0]);
                self.whole_step(v, Work::Node, vec![input]);
            }
            _ => {
                let inputs: Vec<ValueId> = node.operands.iter().map(|&o| self.stored(o)).collect();
                let replaceable = match &node.op {
                    Op::Scatter(_) if !inputs[1..].contains(&inputs[0]) => Some(inputs[0]),
                    Op::Collective(op) => match op.collective {
                        Collective::AllReduce { .. } | Collective::KeepFirst { .. } => Some(inputs[0]),
                        _ => None,
                    },
                    _ => None,
                };
                self.replacing_step(v, Work::Node, inputs, replaceable);
            }
        }
    }

    /// Compiles a node that only renames elements of its operand `o`.
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

    /// The stored tensor that is exactly the value `v`, in row-major order. It is made now if there is none.
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
                self.step(v, Work::Fill(value), Vec::new(), Output::new(root, dtype, elements));
                root
            }
        };
        self.places[v.index()] = Some(Place::View(View::whole(root, shape)));
        root
    }

    /// Adds a row-major copy of a view of elements of `v`.
    fn copied(&mut self, v: ValueId, view: &View) -> ValueId {
        let elements = view.elements();
        let root = self.fresh(elements);
        let output = Output::new(root, self.graph.ty(v).dtype, elements);
        self.step(v, Work::Copy(view.clone()), vec![view.root], output);
        root
    }

    /// The value of `v`, stored with dimension `dim` last.
    fn stored_in_rows(&mut self, v: ValueId, dim: usize) -> ValueId {
        let view = self.view_of(v);
        let view = view.transpose(&last(dim, view.shape.len()));
        if view.is_all_of(self.stored_elements[view.root.index()]) { view.root } else { self.copied(v, &view) }
    }

    /// Adds a step whose result is `v`, stored with dimension `dim` last.
    fn step_in_rows(&mut self, v: ValueId, dim: usize, inputs: Vec<ValueId>) {
        self.whole_step(v, Work::Node, inputs);
        let shape = sizes(self.graph.shape(v));
        let order = last(dim, shape.len());
        let stored: Vec<usize> = order.iter().map(|&d| shape[d]).collect();
        let mut strides = vec![0; shape.len()];
        for (&d, stride) in order.iter().zip(row_major(&stored)) {
            strides[d] = stride;
        }
        self.places[v.index()] = Some(Place::View(View { root: v, offset: 0, shape, strides }));
    }

    /// A view of the value of `v`, after computing its root.
    fn view_of(&mut self, v: ValueId) -> View {
        match self.place(v).clone() {
            Place::View(view) => {
                self.close_group_of(view.root);
                view
            }
            Place::Splat(value) => {
                // A single element, repeated by zero strides.
                let root = self.fresh(1);
                let dtype = self.graph.ty(v).dtype;
                self.step(v, Work::Fill(value), Vec::new(), Output::new(root, dtype, 1));
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
        // Preparation may have closed groups, so look up the memberships again.
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
            Some(g) if self.groups[g].group.members.len() < MAX_MEMBERS => g,
            other => {
                other.into_iter().for_each(|g| self.close(g));
                let group = Group { elements, ..Default::default() };
                self.groups.push(Open { group, open: true, ..Default::default() });
                self.groups.len() - 1
            }
        };
        self.places[v.index()] = Some(Place::View(View::whole(v, sizes(&node.ty.shape))));
        self.group_of[v.index()] = Some(g);
        let reach = self.last_fusible_user[v.index()];
        let open = &mut self.groups[g];
        open.group.members.push(v);
        open.last_joined = v.0;
        open.joinable_until = open.joinable_until.max(reach);
    }

    /// The open group that computes `o`, if it reads the elements of `o` in order.
    fn member_group(&self, o: ValueId) -> Option<usize> {
        let Place::View(view) = self.place(o) else { return None };
        let g = self.group_of[view.root.index()]?;
        let member = self.groups[g].group.members.contains(&view.root);
        (self.groups[g].open && member && view.is_all_of(self.stored_elements[view.root.index()])).then_some(g)
    }

    /// Prepares `o` for a chain: computes it, and copies it if it is large and the chain would read it with a stride.
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
        let (a, b) = (&self.groups[a].group, &self.groups[b].group);
        let rows = |group: &Group| group.reductions.first().map(|r| r.1);
        let fits = a.members.len() + b.members.len() < MAX_MEMBERS;
        fits && match (rows(a), rows(b)) {
            (Some(x), Some(y)) => x == y,
            _ => true,
        }
    }

    /// Moves all members of group `b` into `a`.
    fn merge(&mut self, a: usize, b: usize) {
        let from = std::mem::take(&mut self.groups[b]);
        from.group.members.iter().for_each(|m| self.group_of[m.index()] = Some(a));
        from.group.reductions.iter().for_each(|r| self.group_of[r.0.index()] = Some(a));
        let into = &mut self.groups[a];
        into.group.members.extend(from.group.members);
        into.group.members.sort();
        into.group.reductions.extend(from.group.reductions);
        into.joinable_until = into.joinable_until.max(from.joinable_until);
        into.last_joined = into.last_joined.max(from.last_joined);
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
            .filter(|&g| rows_together && self.groups[g].group.reductions.first().is_none_or(|r| r.1 == row));
        let view = Place::View(View::whole(v, sizes(self.graph.shape(v))));
        if let Some(g) = joined {
            self.places[v.index()] = Some(view);
            self.group_of[v.index()] = Some(g);
            self.groups[g].group.reductions.push((v, row));
            return;
        }
        let from = self.view_of(o);
        let in_rows = from.runs().last().is_some_and(|r| r.1 <= 1);
        if rows_together && in_rows {
            self.places[o.index()] = Some(Place::View(from));
            self.places[v.index()] = Some(view);
            let group = Group { elements, reductions: vec![(v, row)], ..Default::default() };
            self.groups.push(Open { group, open: true, ..Default::default() });
            let g = self.groups.len() - 1;
            self.group_of[v.index()] = Some(g);
            self.close(g);
            return;
        }
        let inputs = vec![from.root];
        self.whole_step(v, Work::Reduce(from), inputs);
    }

    fn dot(&mut self, v: ValueId) {
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
        let mut inputs = vec![lhs.root, rhs.root];
        let accumulation = self.accumulation(v);
        if let Some((sum, accumulator)) = accumulation {
            inputs.push(accumulator);
            self.places[sum.index()] = Some(Place::View(View::whole(v, sizes(self.graph.shape(sum)))));
        }
        let accumulate = accumulation.is_some();
        let kernel = Work::Dot { lhs, rhs, strides: strides.clone(), accumulate };
        self.replacing_step(v, kernel, inputs, accumulation.map(|a| a.1));
        self.places[v.index()] = Some(Place::View(View { root: v, offset: 0, shape, strides }));
    }

    /// If a product is only added to a leaf whose buffer the body replaces (a gradient accumulator), the sum and the
    /// leaf. The product then accumulates into the leaf's storage and needs none of its own.
    fn accumulation(&self, product: ValueId) -> Option<(ValueId, ValueId)> {
        let mut v = product;
        loop {
            let &[user] = self.users[v.index()].as_slice() else { return None };
            let node = self.graph.node(user);
            match &node.op {
                _ if self.written[v.index()] => return None,
                // The product can be written transposed, but not after a reshape.
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

    /// Computes the group of a stored value now, because a node reads it.
    fn close_group_of(&mut self, root: ValueId) {
        if let Some(g) = self.group_of[root.index()] {
            self.close(g);
        }
    }

    fn close_where(&mut self, done: impl Fn(&Open) -> bool) {
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
        let mut group = std::mem::take(&mut self.groups[g]).group;
        let Some(node) = group.members.iter().copied().chain(group.reductions.iter().map(|r| r.0)).max() else {
            return;
        };
        let readers = group.members.iter().chain(group.reductions.iter().map(|r| &r.0));
        let operands: Vec<ValueId> = readers.flat_map(|v| &self.graph.node(*v).operands).copied().collect();
        group.places = operands.iter().map(|&o| (o, self.place(o).clone())).collect();
        let mut inputs: Vec<ValueId> = Vec::new();
        for o in &operands {
            if let Place::View(view) = &group.places[o]
                && !group.members.contains(&view.root)
                && !inputs.contains(&view.root)
            {
                inputs.push(view.root);
            }
        }
        let stores = group.members.iter().filter(|v| self.is_needed_outside(**v, &group));
        let stores: Vec<Output> = stores.map(|&v| Output::new(v, self.graph.ty(v).dtype, group.elements)).collect();
        let replaceable = self.replaceable(&group, &inputs, &stores);
        let mut outputs = stores;
        for &(v, _) in &group.reductions {
            let ty = self.graph.ty(v);
            outputs.push(Output::new(v, ty.dtype, ty.elements() as usize));
        }
        if !outputs.is_empty() {
            self.push(node, Work::Chain(group), inputs, outputs, replaceable);
        }
    }

    /// The inputs that a chain reads in the format and at the positions of its outputs. An output may overwrite such an
    /// input block by block.
    fn replaceable(&self, group: &Group, inputs: &[ValueId], stores: &[Output]) -> Vec<(usize, ValueId)> {
        let in_order = |view: &View| {
            let runs = view.runs();
            view.offset == 0 && if group.elements == 1 { runs.is_empty() } else { runs == [(group.elements, 1)] }
        };
        let mut found = Vec::new();
        for (i, store) in stores.iter().enumerate() {
            for &input in inputs {
                let mut loads = group.places.iter().filter_map(|(o, place)| match place {
                    Place::View(view) if view.root == input => Some((self.class(*o), view)),
                    _ => None,
                });
                if loads.all(|(class, view)| class == store.class() && in_order(view)) {
                    found.push((i, input));
                }
            }
        }
        found
    }
}

/// The elements of the matrices that a convolution works on.
fn tiles(op: &Convolution, kernel: &[usize], result: &[u64]) -> [u64; 3] {
    let kernel: Vec<u64> = kernel.iter().map(|&n| n as u64).collect();
    op.workspace(&kernel, result)
}

/// All dimensions in order, with `dim` moved to the end.
fn last(dim: usize, rank: usize) -> Vec<usize> {
    (0..rank).filter(|&d| d != dim).chain([dim]).collect()
}

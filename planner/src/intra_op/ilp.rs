//! States a run of nodes on one mesh as a pairwise problem.
//!
//! Variables are the strategies of the nodes, the layouts of parameters with the sharding of their storage, and
//! the layouts of values from outside. Each value with several users also has a relay: one materialised layout
//! for all users, so that a shared reshard is paid once. Prices are seconds per microbatch, forward and
//! backward, and seconds per step. A price depends on little, so similar pairs share a table, and stating takes
//! time in proportion to the nodes.

use super::dims::CountedDims;
use super::space::{Choice, LayoutId, Space, Spaces, batch_layout};
use super::stage_cost::StageCost;
use crate::lower::alike::Alike;
use crate::lower::repeat::grows;
use crate::predict::memory::copies_of_parameter;
use crate::predict::timing::{copy_s, host_copy_s, update_s};
use altiplano_cost_models::timeline::Price;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Execution, Offload};
use altiplano_ir::recompute::{Module, Modules};
use altiplano_ir::types::TensorType;
use altiplano_solver::{self as solve, Problem};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::hash::Hash;
use std::ops::Range;
use std::rc::Rc;

/// Properties of the whole forward graph that are known before any layer is stated.
pub struct Model<'a> {
    pub graph: &'a Graph,
    /// Layer of each node; `None` for leaves and constants.
    pub layer_of: &'a [Option<u32>],
    pub users: &'a [Vec<ValueId>],
    /// True for values that have a cotangent.
    pub needs_gradient: &'a [bool],
    /// Nodes with equal ops on equal types.
    pub alike: &'a Alike,
    /// The dimensions of values that count samples, tokens or experts.
    pub dims: &'a CountedDims,
    /// See [`super::dims::block_counts`].
    pub blocks: &'a [Vec<Vec<u64>>],
    /// True for values that are saved for the backward pass, unless expensive values are recomputed.
    pub saved: &'a [bool],
    /// True for values that full recomputation repeats.
    pub repeated: &'a [bool],
    /// The modules of each value, by which selective recomputation repeats it.
    pub modules: &'a [Modules],
    /// The optimizer; `None` without training.
    pub optimizer: Option<&'a Optimizer>,
    /// The placement of optimizer state and activations in device or host memory.
    pub offload: Offload,
}

impl Model<'_> {
    /// The nodes of a range that belong to a layer.
    pub fn nodes(&self, range: &Range<u32>) -> Vec<ValueId> {
        range.clone().map(ValueId).filter(|v| self.layer_of[v.index()].is_some()).collect()
    }

    /// True if a value is a result of the step: the loss, or any output without training.
    pub fn is_result(&self, v: ValueId) -> bool {
        let results = if self.optimizer.is_some() { &self.graph.outputs[..1] } else { &self.graph.outputs };
        results.contains(&v)
    }
}

/// The storage of a parameter: the layout for computation, and the sharding beyond it over the axes that this
/// layout leaves free. The levels are those of ZeRO: 1 shards optimizer state, 2 also gradients, 3 also the
/// parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kept {
    pub layout: LayoutId,
    pub level: u8,
}

/// The layouts in which a parameter, its gradient (apart from partial sums) and its optimizer state rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rests {
    pub parameter: LayoutId,
    pub gradient: LayoutId,
    pub state: LayoutId,
}

impl Kept {
    pub fn rests(self, spaces: &mut Spaces<'_>) -> Rests {
        let finest = if self.level >= 1 { spaces.storage_layout(self.layout) } else { self.layout };
        let from = |level: u8| if self.level >= level { finest } else { self.layout };
        Rests { parameter: from(3), gradient: from(2), state: from(1) }
    }
}

/// The layout in which a user needs a value, and the layout in which its cotangent returns.
pub type Form = (LayoutId, LayoutId);

/// A variable of the problem.
#[derive(Clone, Debug)]
pub enum Variable {
    Node(ValueId, Rc<Space>),
    Parameter(ValueId, Vec<Kept>),
    /// Layouts in which a value enters, or in which the main value leaves.
    In(ValueId, Vec<LayoutId>),
    Out(Vec<LayoutId>),
    /// Materialised layouts of a value, each with the layout in which its cotangent is collected.
    Relay(ValueId, Vec<Form>),
}

/// The treatment of values that cross the ends of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// The widest entering value and the widest leaving value have variables, by which runs are joined. The
    /// other values rest split over the batch.
    Joined,
    /// Every entering value may have any layout, and every leaving value leaves as it rests.
    Open,
}

/// A choice of the source of a pair, reduced to the properties that determine prices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The layout of the value, and the layout in which its cotangent is needed.
    Value(LayoutId, LayoutId),
    Parameter(Kept),
}

/// A pairwise cost: a table over distinct keys of both sides.
pub struct Pair {
    pub from: usize,
    pub to: usize,
    from_key: Vec<usize>,
    to_key: Vec<usize>,
    terms: Rc<Table>,
}

/// StageCost by the keys of both sides.
pub type Table = Vec<Vec<StageCost>>;

/// All inputs of a table, on one mesh and for one way of training: the size of the value, its role in the backward
/// pass, whether full recomputation repeats its use, and the keys.
pub type TableKey = (Size, Backward, bool, Vec<Source>, Vec<Form>);

/// The part of a value's type that prices depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Size {
    dtype: DType,
    elements: u64,
}

impl Size {
    fn of(ty: &TensorType) -> Size {
        Size { dtype: ty.dtype, elements: ty.elements() }
    }

    fn bytes(self) -> u64 {
        self.bytes_as(self.dtype)
    }

    fn cotangent_bytes(self) -> u64 {
        self.bytes_as(self.dtype.cotangent())
    }

    /// The bytes of as many elements of another type.
    fn bytes_as(self, dtype: DType) -> u64 {
        self.elements.saturating_mul(dtype.bytes())
    }
}

/// The role of a value in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backward {
    None,
    /// The value has no gradient, but the gradients of its users read it.
    Read,
    Gradient,
}

/// A user of a value: a node's operand, or the exit of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum User {
    Operand(usize, usize),
    Out(usize),
}

/// The problem of a run of nodes: its variables and their costs.
pub struct Ilp {
    pub variables: Vec<Variable>,
    pub unary: Vec<Vec<StageCost>>,
    pub pairs: Vec<Pair>,
    /// The variable of each value, its users within the run, and the relay that serves them, if any.
    pub variable_of: BTreeMap<ValueId, usize>,
    pub uses: BTreeMap<ValueId, Vec<User>>,
    pub relays: BTreeMap<ValueId, usize>,
    /// Largest temporary, in bytes: a few of the largest local values.
    pub transient_bytes: f64,
}

/// States the problem of the nodes `range`. Each parameter may be sharded at any of `levels`.
pub fn state(
    model: &Model<'_>,
    range: Range<u32>,
    spaces: &mut Spaces<'_>,
    levels: &[u8],
    execution: &Execution,
    ends: Ends,
) -> Ilp {
    // A bucket is no larger than all that it is for.
    let all_bytes: u64 = model.graph.trained_parameters().map(|(v, _)| model.graph.ty(v).bytes()).sum();
    let mut builder = Builder {
        model,
        spaces,
        levels,
        execution,
        bucket_bytes: execution.bucket_bytes.min(all_bytes),
        ends,
        variables: Vec::new(),
        unary: Vec::new(),
        pairs: Vec::new(),
        variable_of: BTreeMap::new(),
        uses: BTreeMap::new(),
        relays: BTreeMap::new(),
        leaves: Vec::new(),
    };
    let transient_bytes = builder.state(range);
    let Builder { variables, mut unary, pairs, variable_of, uses, relays, .. } = builder;
    if model.optimizer.is_none() {
        unary.iter_mut().flatten().for_each(|terms| *terms = terms.forward_only());
    }
    Ilp { variables, unary, pairs, variable_of, uses, relays, transient_bytes }
}

impl Ilp {
    /// The problem that minimises the sum of an objective over the choices, without a memory limit.
    pub fn problem(&self, objective: impl Fn(&StageCost) -> f64) -> Problem {
        let node =
            |terms: &Vec<StageCost>| solve::Node { cost: terms.iter().map(&objective).collect(), holds: Vec::new() };
        let mut small: FxHashMap<*const Table, Vec<Vec<f64>>> = FxHashMap::default();
        let mut edges = Vec::with_capacity(self.pairs.len());
        for p in &self.pairs {
            let table = small
                .entry(Rc::as_ptr(&p.terms))
                .or_insert_with(|| p.terms.iter().map(|row| row.iter().map(&objective).collect()).collect());
            let mut cost = Vec::with_capacity(p.from_key.len() * p.to_key.len());
            for &f in &p.from_key {
                cost.extend(p.to_key.iter().map(|&t| table[f][t]));
            }
            edges.push(solve::Edge { from: p.from, to: p.to, cost });
        }
        Problem { nodes: self.unary.iter().map(node).collect(), edges, limit_bytes: None }
    }

    /// The sum of all terms of a choice.
    pub fn cost(&self, choice: &[usize]) -> StageCost {
        let mut terms = StageCost::default();
        self.unary.iter().zip(choice).for_each(|(t, &c)| terms += t[c]);
        self.pairs.iter().for_each(|p| terms += p.terms[p.from_key[choice[p.from]]][p.to_key[choice[p.to]]]);
        terms
    }

    /// The chosen strategy of each node, and the chosen storage of each parameter.
    pub fn chosen(&self, choice: &[usize]) -> (Vec<(ValueId, Choice)>, Vec<(ValueId, Kept)>) {
        let (mut strategies, mut parameters) = (Vec::new(), Vec::new());
        for (variable, &c) in self.variables.iter().zip(choice) {
            match variable {
                Variable::Node(v, space) => strategies.push((*v, space.choices[c].clone())),
                Variable::Parameter(p, kept) => parameters.push((*p, kept[c])),
                _ => {}
            }
        }
        (strategies, parameters)
    }
}

struct Builder<'m, 's, 'p> {
    model: &'m Model<'m>,
    spaces: &'s mut Spaces<'p>,
    levels: &'m [u8],
    execution: &'m Execution,
    /// The bytes that collectives of once a step send together.
    bucket_bytes: u64,
    ends: Ends,
    variables: Vec<Variable>,
    unary: Vec<Vec<StageCost>>,
    pairs: Vec<Pair>,
    variable_of: BTreeMap<ValueId, usize>,
    uses: BTreeMap<ValueId, Vec<User>>,
    relays: BTreeMap<ValueId, usize>,
    /// True if the value of a variable leaves as it rests, and its users are served from there.
    leaves: Vec<bool>,
}

impl Builder<'_, '_, '_> {
    fn add(&mut self, variable: Variable, terms: Vec<StageCost>) -> usize {
        self.variables.push(variable);
        self.unary.push(terms);
        self.leaves.push(false);
        self.variables.len() - 1
    }

    fn state(&mut self, range: Range<u32>) -> f64 {
        let nodes = self.model.nodes(&range);
        let leaving = self.state_ends(&range, &nodes);
        let mut transient = 0.0f64;
        for &v in &nodes {
            transient = transient.max(self.state_node(v));
        }
        for &v in &nodes {
            self.state_operands(v, range.start);
        }
        for v in leaving {
            let id = self.variable_of[&v];
            match self.ends {
                Ends::Joined => self.fixed(v, User::Operand(id, 0), false),
                Ends::Open => self.let_out(v, id),
            }
        }
        for &v in nodes.iter().filter(|v| self.model.is_result(**v)) {
            let id = self.variable_of[&v];
            if !self.leaves[id] {
                self.let_out(v, id);
            }
        }
        for (v, users) in std::mem::take(&mut self.uses) {
            let source = self.variable_of[&v];
            match users.as_slice() {
                [user] => self.connect(v, source, *user),
                many => {
                    let mut forms: Vec<Form> = many.iter().flat_map(|u| self.forms(*u)).collect();
                    forms.sort_unstable();
                    forms.dedup();
                    let terms = vec![StageCost::default(); forms.len()];
                    let relay = self.add(Variable::Relay(v, forms), terms);
                    self.relays.insert(v, relay);
                    self.connect(v, source, User::Out(relay));
                    many.iter().for_each(|u| self.connect(v, relay, *u));
                }
            }
            self.uses.insert(v, users);
        }
        transient
    }

    /// States the variables of values that cross the ends, and returns the leaving values without a variable.
    fn state_ends(&mut self, range: &Range<u32>, nodes: &[ValueId]) -> Vec<ValueId> {
        let Model { graph, layer_of, users, .. } = *self.model;
        let mut entering: Vec<ValueId> = nodes
            .iter()
            .flat_map(|&v| graph.node(v).operands.iter().copied())
            .filter(|o| layer_of[o.index()].is_some() && o.0 < range.start)
            .collect();
        entering.sort();
        entering.dedup();
        // A value that passes through, made before this run and used after it, crosses both ends.
        let passes = |v: &ValueId| users[v.index()].iter().any(|u| u.0 >= range.end && layer_of[u.index()].is_some());
        if self.ends == Ends::Open {
            for v in entering {
                self.state_entering(v);
            }
            return nodes.iter().copied().filter(passes).collect();
        }
        let widest =
            |values: &[ValueId]| values.iter().copied().max_by_key(|&v| (graph.ty(v).bytes(), std::cmp::Reverse(v.0)));
        let main_in = widest(&entering);
        let leaving: Vec<ValueId> = nodes.iter().copied().filter(passes).collect();
        let main_out = widest(&leaving).or_else(|| main_in.filter(passes));
        if let Some(v) = main_in {
            self.state_entering(v);
        }
        if let Some(v) = main_out {
            let layouts = self.spaces.boundary_layouts(graph.ty(v), graph.node(v).batch_dims);
            let terms = vec![StageCost::default(); layouts.len()];
            let id = self.add(Variable::Out(layouts), terms);
            self.uses.entry(v).or_default().push(User::Out(id));
        }
        leaving.into_iter().filter(|v| Some(*v) != main_out).collect()
    }

    fn state_entering(&mut self, v: ValueId) {
        let graph = self.model.graph;
        let layouts = self.spaces.boundary_layouts(graph.ty(v), graph.node(v).batch_dims);
        let terms = layouts
            .iter()
            .map(|&l| {
                let bytes = self.spaces.local_bytes(graph.ty(v).dtype, l) as f64;
                StageCost { kept_bytes: bytes, entering_bytes: bytes, ..StageCost::default() }
            })
            .collect();
        let id = self.add(Variable::In(v, layouts), terms);
        self.variable_of.insert(v, id);
    }

    /// States the variable of a node, and returns a lower bound on the bytes that it needs while it runs.
    fn state_node(&mut self, v: ValueId) -> f64 {
        let Model { graph, needs_gradient, saved, repeated, modules, .. } = *self.model;
        let space = self.spaces.of(self.model, v);
        let wanted = graph.node(v).operands.iter().filter(|o| needs_gradient[o.index()]).count();
        // The next run counts the bytes of the value that enters it.
        let leaves = self.uses.get(&v).is_some_and(|uses| uses.iter().any(|u| matches!(u, User::Out(_))));
        let kept = saved[v.index()] && !leaves;
        let grows = kept && grows(graph, v);
        let selective = self.execution.recompute_modules;
        let again = !leaves && modules[v.index()].intersects(selective);
        let mut least = f64::INFINITY;
        let terms = space
            .choices
            .iter()
            .map(|c| {
                let bytes = self.spaces.local_bytes(graph.ty(v).dtype, c.resting) as f64;
                let fused = self.execution.fused_attention;
                least = least.min(c.inside.map_or(bytes, |inside| inside.largest(fused).max(bytes)));
                let backward_s = c.inside.map_or(c.forward_s * wanted as f64, |inside| inside.backward_s);
                let backward_s = if needs_gradient[v.index()] { backward_s } else { 0.0 };
                let kept_bytes = c.inside.map_or(if kept { bytes } else { 0.0 }, |inside| inside.kept_bytes);
                let (growing_s, growing_bytes) = match c.inside {
                    Some(inside) => (inside.growing_s, inside.growing_bytes),
                    None if grows => (c.forward_s, bytes),
                    None => (0.0, 0.0),
                };
                let (kept_bytes, growing_s, growing_bytes) = match () {
                    () if self.execution.fused_attention => (kept_bytes - growing_bytes, 0.0, 0.0),
                    () if selective.contains(Module::AttentionCore) => (kept_bytes, growing_s, growing_bytes),
                    () => (kept_bytes, 0.0, 0.0),
                };
                let (growing_s, growing_bytes) = match again {
                    true => (c.forward_s, kept_bytes),
                    false => (growing_s, growing_bytes),
                };
                let forward_s = if self.honours_pins(v, c.resting) { c.forward_s } else { f64::INFINITY };
                let backward_issue_s = c.inside.map_or(c.issue_s * wanted as f64, |inside| inside.backward_issue_s);
                let backward_issue_s = if needs_gradient[v.index()] { backward_issue_s } else { 0.0 };
                let forward_issue_s = c.issue_s;
                StageCost {
                    forward_s,
                    backward_s,
                    forward_issue_s,
                    backward_issue_s,
                    kept_bytes,
                    growing_bytes,
                    growing_s,
                    again_s: if repeated[v.index()] { forward_s } else { 0.0 },
                    ..StageCost::default()
                }
            })
            .collect();
        let id = self.add(Variable::Node(v, space), terms);
        self.variable_of.insert(v, id);
        // A forward value, its cotangent if it is trained, and one more value of its size are alive at once.
        if self.model.optimizer.is_some() { 3.0 * least } else { 2.0 * least }
    }

    fn state_operands(&mut self, v: ValueId, start: u32) {
        let Model { graph, layer_of, .. } = *self.model;
        let id = self.variable_of[&v];
        for (k, &o) in graph.node(v).operands.iter().enumerate() {
            match &graph.node(o).op {
                Op::Parameter(_) => {
                    if !self.variable_of.contains_key(&o) {
                        self.state_parameter(o);
                    }
                    self.uses.entry(o).or_default().push(User::Operand(id, k));
                }
                _ if self.variable_of.contains_key(&o) => self.uses.entry(o).or_default().push(User::Operand(id, k)),
                _ if layer_of[o.index()].is_some() => {
                    debug_assert!(o.0 < start && self.ends == Ends::Joined, "{o} has no variable");
                    self.fixed(o, User::Operand(id, k), true);
                }
                _ => {}
            }
        }
    }

    fn state_parameter(&mut self, p: ValueId) {
        let Model { graph, blocks, .. } = *self.model;
        let experts = self.spaces.dims_of_experts(self.model, p);
        let layouts = self.spaces.parameter_layouts(graph.ty(p), &blocks[p.index()], experts);
        let mut kept: Vec<Kept> = Vec::with_capacity(layouts.len() * self.levels.len());
        for &layout in &layouts {
            let whole = self.spaces.storage_layout(layout) == layout;
            // If no axis is left to shard over, all levels are equal.
            let levels = if whole { &self.levels[..1] } else { self.levels };
            let stored = levels.iter().map(|&level| Kept { layout, level });
            match graph.is_trained(p) {
                true => kept.extend(stored),
                // A frozen parameter has no gradient or state, so only level 3 differs.
                false => stored.for_each(|k| {
                    let same = |known: &Kept| known.layout == layout && (known.level >= 3) == (k.level >= 3);
                    if !kept.iter().any(same) {
                        kept.push(k);
                    }
                }),
            }
        }
        let trained = graph.is_trained(p);
        let terms = kept.iter().map(|&k| match self.honours_pins(p, k.layout) {
            true => self.parameter_terms(graph.ty(p), trained, k),
            false => StageCost::FORBIDDEN,
        });
        let terms = terms.collect();
        let id = self.add(Variable::Parameter(p, kept), terms);
        self.variable_of.insert(p, id);
    }

    /// True if a value's layout agrees with the pins of the model's author.
    fn honours_pins(&self, v: ValueId, layout: LayoutId) -> bool {
        self.model.graph.pins_of(v).iter().all(|pin| pin.allows(self.spaces.layout(layout), self.spaces.mesh()))
    }

    /// The per-step cost and the bytes of a parameter with this storage.
    fn parameter_terms(&mut self, ty: &TensorType, trained: bool, kept: Kept) -> StageCost {
        let rests = kept.rests(self.spaces);
        let gradient = self.execution.accumulator_dtype(ty.dtype);
        let copies = copies_of_parameter(ty.dtype, self.spaces.prices.cost.device().kind);
        let parameter_bytes = (copies * self.spaces.local_bytes(ty.dtype, rests.parameter)) as f64;
        let Some(optimizer) = self.model.optimizer.filter(|_| trained) else {
            return StageCost { static_bytes: parameter_bytes, ..StageCost::default() };
        };
        let elements = self.spaces.local_elements(rests.state) as f64;
        let state_bytes = elements * optimizer.state_bytes_per_element(ty.dtype) as f64;
        // The update reads gradient, parameter and state and writes parameter and state.
        let traffic = 2.0 * state_bytes + elements * (gradient.bytes() + 2 * ty.dtype.bytes()) as f64;
        let mut update_s = update_s(self.spaces.prices.cost, traffic);
        // Offloaded state is loaded and stored while other parameters are updated.
        let held_bytes = if self.model.offload.optimizer {
            update_s = update_s.max(host_copy_s(self.spaces.prices.cost, state_bytes));
            0.0
        } else {
            state_bytes
        };
        let gradient_bytes = self.spaces.local_bytes(gradient, rests.gradient) as f64;
        StageCost {
            step_s: update_s + self.spaces.stored_s(ty.bytes(), rests.state, rests.parameter, self.bucket_bytes),
            static_bytes: parameter_bytes + gradient_bytes + held_bytes,
            ..StageCost::default()
        }
    }

    /// The forms that a user's choices need.
    fn forms(&self, user: User) -> Vec<Form> {
        match user {
            User::Operand(id, k) => match &self.variables[id] {
                Variable::Node(_, space) => space.choices.iter().map(|c| (c.operands[k], c.cotangents[k])).collect(),
                _ => Vec::new(),
            },
            User::Out(id) => match &self.variables[id] {
                Variable::Out(layouts) => layouts.iter().map(|&l| (l, l)).collect(),
                Variable::Relay(_, forms) => forms.clone(),
                _ => Vec::new(),
            },
        }
    }

    /// The [`Source`] of each choice of a variable.
    fn sources(&self, source: usize) -> Vec<Source> {
        match &self.variables[source] {
            Variable::Node(_, space) => {
                let leaves = self.leaves[source];
                let offered = |c: &Choice| Source::Value(if leaves { c.resting } else { c.result }, c.resting);
                space.choices.iter().map(offered).collect()
            }
            Variable::Parameter(_, kept) => kept.iter().map(|&k| Source::Parameter(k)).collect(),
            Variable::In(_, layouts) | Variable::Out(layouts) => layouts.iter().map(|&l| Source::Value(l, l)).collect(),
            Variable::Relay(_, forms) => forms.iter().map(|&(layout, back)| Source::Value(layout, back)).collect(),
        }
    }

    /// States the cost between the source of `v`, or its relay, and one user.
    fn connect(&mut self, v: ValueId, source: usize, user: User) {
        let (User::Operand(target, _) | User::Out(target)) = user;
        let (from_keys, from_key) = distinct(&self.sources(source));
        let (to_keys, to_key) = distinct(&self.forms(user));
        let size = Size::of(self.model.graph.ty(v));
        let backward = self.backward(v);
        let again = self.is_repeated(v, target);
        let key = (size, backward, again, from_keys, to_keys);
        let terms = match self.spaces.tables.get(&key) {
            Some(known) => known.clone(),
            None => {
                let (.., from_keys, to_keys) = &key;
                let price = |f: Source, t: Form, builder: &mut Self| {
                    let terms = builder.price(size, backward, f, t);
                    StageCost { again_s: if again { terms.forward_s } else { 0.0 }, ..terms }
                };
                let row = |&f: &Source| to_keys.iter().map(|&t| price(f, t, self)).collect();
                let table: Rc<Table> = Rc::new(from_keys.iter().map(row).collect());
                self.spaces.tables.insert(key, table.clone());
                table
            }
        };
        self.pairs.push(Pair { from: source, to: target, from_key, to_key, terms });
    }

    /// True if full recomputation brings a value to the layout that a user needs again.
    fn is_repeated(&self, v: ValueId, user: usize) -> bool {
        let Model { users, repeated, .. } = *self.model;
        match &self.variables[user] {
            Variable::Node(u, _) => repeated[u.index()],
            Variable::Relay(..) => users[v.index()].iter().any(|u| repeated[u.index()]),
            _ => false,
        }
    }

    /// The role of a value in the backward pass.
    fn backward(&self, v: ValueId) -> Backward {
        let Model { graph, needs_gradient, users, .. } = *self.model;
        match needs_gradient[v.index()] || graph.is_trained(v) {
            true => Backward::Gradient,
            false if users[v.index()].iter().any(|u| needs_gradient[u.index()]) => Backward::Read,
            false => Backward::None,
        }
    }

    fn price(&mut self, size: Size, backward: Backward, from: Source, (to, cotangent): Form) -> StageCost {
        let terms = match from {
            Source::Parameter(kept) => self.parameter_use(size, backward, kept, to, cotangent),
            Source::Value(layout, resting) => {
                let back = (backward == Backward::Gradient).then_some((cotangent, resting));
                there_and_back(self.spaces, size, (layout, to), back)
            }
        };
        if self.model.optimizer.is_some() { terms } else { terms.forward_only() }
    }

    /// The terms of a parameter with this storage, used in layout `to` by an op that gives its gradient as
    /// `cotangent`.
    fn parameter_use(
        &mut self,
        size: Size,
        backward: Backward,
        kept: Kept,
        to: LayoutId,
        cotangent: LayoutId,
    ) -> StageCost {
        let (rests, bytes) = (kept.rests(self.spaces), size.bytes());
        if backward != Backward::Gradient {
            let gathered = self.spaces.reshard(bytes, rests.parameter, to);
            let again = if backward == Backward::Read { gathered } else { Price::default() };
            return StageCost {
                forward_sent_s: gathered.seconds,
                forward_issue_s: gathered.issue_s,
                backward_sent_s: again.seconds,
                backward_issue_s: again.issue_s,
                ..StageCost::default()
            };
        }
        let accumulator = match kept.level {
            0 | 1 => self.spaces.with_partial_of(kept.layout, cotangent),
            _ => rests.gradient,
        };
        let reduced_bytes = size.cotangent_bytes();
        let mut gathered = self.spaces.reshard(bytes, rests.parameter, to);
        let mut reduced = match kept.level {
            0 | 1 => self.spaces.reshard(reduced_bytes, cotangent, accumulator),
            _ => self.spaces.reduced_into_storage(reduced_bytes, cotangent, accumulator),
        };
        let unit_bytes = self.execution.unit_bytes;
        let (mut copied_forward_s, mut copied_back_s) = (0.0, 0.0);
        if unit_bytes > 0 {
            // The whole block is sent through one buffer, with copies to and from it.
            let mut in_unit = |sent: &mut Price, dtype: DType, from, to, layout| {
                if sent.seconds <= 0.0 || !sent.seconds.is_finite() {
                    return 0.0;
                }
                sent.seconds = self.spaces.stored_s(size.bytes_as(dtype), from, to, unit_bytes);
                copy_s(self.spaces.prices.cost, self.spaces.local_bytes(dtype, layout) as f64)
            };
            copied_forward_s = in_unit(&mut gathered, size.dtype, rests.parameter, to, to);
            copied_back_s =
                copied_forward_s + in_unit(&mut reduced, size.dtype.cotangent(), cotangent, accumulator, cotangent);
        }
        // The forward pass prefetches parameters.
        let both_s = gathered.seconds + reduced.seconds;
        let (queued_s, sent_s) = if gathered.seconds > 0.0 { (both_s, 0.0) } else { (0.0, both_s) };
        let sum_bytes = size.bytes_as(self.execution.accumulator_dtype(size.dtype));
        StageCost {
            forward_s: copied_forward_s,
            forward_sent_s: gathered.seconds,
            forward_issue_s: gathered.issue_s,
            backward_s: copied_back_s,
            backward_sent_s: sent_s,
            queued_s,
            backward_issue_s: gathered.issue_s + reduced.issue_s,
            step_s: self.spaces.stored_s(sum_bytes, accumulator, rests.state, self.bucket_bytes),
            ..StageCost::default()
        }
    }

    /// States a value that crosses the ends without a variable. It rests split over the batch.
    fn fixed(&mut self, v: ValueId, user: User, enters: bool) {
        let graph = self.model.graph;
        let ty = graph.ty(v);
        let rest = batch_layout(ty, graph.node(v).batch_dims, self.spaces.mesh());
        let rest = self.spaces.intern(rest);
        let gradient = self.model.needs_gradient[v.index()];
        let User::Operand(id, _) = user else { return };
        let pairs: Vec<Form> = match &self.variables[id] {
            _ if enters => self.forms(user),
            Variable::Node(_, space) => space.choices.iter().map(|c| (c.result, c.resting)).collect(),
            _ => Vec::new(),
        };
        for (c, (layout, other)) in pairs.into_iter().enumerate() {
            let (there, back) = if enters { ((rest, layout), (other, rest)) } else { ((layout, rest), (rest, other)) };
            let terms = there_and_back(self.spaces, Size::of(ty), there, gradient.then_some(back));
            let again_s = if enters && self.is_repeated(v, id) { terms.forward_s } else { 0.0 };
            self.unary[id][c] += StageCost { again_s, ..terms };
        }
    }

    /// States a value that leaves as it rests. Partial sums are reduced first, also for users within the run.
    fn let_out(&mut self, v: ValueId, id: usize) {
        let Variable::Node(_, space) = &self.variables[id] else { return };
        let space = space.clone();
        let size = Size::of(self.model.graph.ty(v));
        for (terms, c) in self.unary[id].iter_mut().zip(&space.choices) {
            *terms += there_and_back(self.spaces, size, (c.result, c.resting), None);
        }
        self.leaves[id] = true;
    }
}

/// The terms to reshard a value, and to reshard its cotangent back if it has one.
fn there_and_back(
    spaces: &mut Spaces<'_>,
    size: Size,
    there: (LayoutId, LayoutId),
    back: Option<(LayoutId, LayoutId)>,
) -> StageCost {
    let forward = spaces.reshard(size.bytes(), there.0, there.1);
    let backward = back.map_or(Price::default(), |(from, to)| spaces.reshard(size.cotangent_bytes(), from, to));
    StageCost {
        forward_s: forward.seconds,
        backward_s: backward.seconds,
        forward_issue_s: forward.issue_s,
        backward_issue_s: backward.issue_s,
        ..StageCost::default()
    }
}

/// The distinct items of a list in first-seen order, and the position of each item among them.
fn distinct<T: Copy + Eq + Hash>(items: &[T]) -> (Vec<T>, Vec<usize>) {
    let mut seen: FxHashMap<T, usize> = FxHashMap::default();
    let mut keys = Vec::new();
    let mut positions = Vec::with_capacity(items.len());
    for &item in items {
        positions.push(*seen.entry(item).or_insert_with(|| {
            keys.push(item);
            keys.len() - 1
        }));
    }
    (keys, positions)
}

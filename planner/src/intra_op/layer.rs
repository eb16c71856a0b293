//! One layer on one mesh as an integer program.
//!
//! Variables are the strategies of the layer's nodes, the layouts of its parameters, the layouts in which the main value
//! enters and leaves the layer, and for each value with several users a relay: one materialised layout from which
//! all users are served, so that a shared reshard is paid once. Costs are seconds per microbatch, forward and
//! backward, plus the once-per-step share of gradient reduction and update divided by the number of
//! microbatches. Everything but the two boundary variables is eliminated; what remains is a table over boundary layouts,
//! and layers are put together from those.

use super::solve::{self, BoundaryTable, Options, Problem, SolveError};
use super::space::{Choice, LayoutId, Space, Spaces, batch_layout, factor_blocks};
use crate::lower::is_kept;
use crate::timing::update_s;
use altiplano_cost_models::timeline::Price;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::Execution;
use altiplano_ir::types::TensorType;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::{Add, AddAssign, Range};
use std::rc::Rc;

/// What is known of the whole forward graph before any layer is looked at.
pub struct Model<'a> {
    pub graph: &'a Graph,
    /// Layer of each node; `None` for leaves and constants.
    pub layer_of: &'a [Option<u32>],
    pub users: &'a [Vec<ValueId>],
    /// Values that have a cotangent.
    pub needs_gradient: &'a [bool],
    /// See [`super::space::block_counts`].
    pub blocks: &'a [Vec<Vec<u64>>],
    /// `None`: nothing is trained.
    pub optimizer: Option<&'a Optimizer>,
}

/// How a stage is run, beside its shardings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Variant {
    /// ZeRO level, 0 to 3.
    pub zero: u8,
    /// Prefer layouts that keep less, even if that takes time.
    pub lean: bool,
    /// Microbatches per step: what per-step costs are divided by.
    pub num_microbatches: u32,
    /// How gradients are summed.
    pub execution: Execution,
}

/// Cost of a choice or a pair of choices, by kind. Bytes are local.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// Of the device, with what the next op waits for.
    pub forward_s: f64,
    pub backward_s: f64,
    /// Of what is sent while the device computes: parameters on the way to their use, gradients on the way from it.
    pub forward_sent_s: f64,
    pub backward_sent_s: f64,
    /// Of the host, which issues kernels ahead of the device.
    pub forward_issue_s: f64,
    pub backward_issue_s: f64,
    /// Once per step.
    pub step_s: f64,
    /// Parameters, gradients and optimizer state.
    pub static_bytes: f64,
    /// Kept from forward to backward for each microbatch, if nothing is recomputed.
    pub kept_bytes: f64,
    /// Of those, what enters the layer: kept even if everything is recomputed.
    pub entering_bytes: f64,
}

impl Add for Terms {
    type Output = Terms;
    fn add(self, o: Terms) -> Terms {
        Terms {
            forward_s: self.forward_s + o.forward_s,
            backward_s: self.backward_s + o.backward_s,
            forward_sent_s: self.forward_sent_s + o.forward_sent_s,
            backward_sent_s: self.backward_sent_s + o.backward_sent_s,
            forward_issue_s: self.forward_issue_s + o.forward_issue_s,
            backward_issue_s: self.backward_issue_s + o.backward_issue_s,
            step_s: self.step_s + o.step_s,
            static_bytes: self.static_bytes + o.static_bytes,
            kept_bytes: self.kept_bytes + o.kept_bytes,
            entering_bytes: self.entering_bytes + o.entering_bytes,
        }
    }
}

impl Terms {
    /// What is left where nothing is trained: no gradients, no updates, and nothing kept for them.
    fn forward_only(&self) -> Terms {
        Terms {
            forward_s: self.forward_s,
            forward_sent_s: self.forward_sent_s,
            forward_issue_s: self.forward_issue_s,
            static_bytes: self.static_bytes,
            ..Terms::default()
        }
    }

    /// What a layer's program minimises, in seconds per microbatch: a sum, although the streams of a device run side by side
    /// and the longest decides. What is sent meanwhile counts as if it were hidden as often as not, and the host not at all,
    /// since it issues as many kernels for one layout as for another.
    pub fn objective_s(&self, num_microbatches: u32) -> f64 {
        self.forward_s
            + self.backward_s
            + 0.5 * (self.forward_sent_s + self.backward_sent_s)
            + self.step_s / num_microbatches as f64
    }

    /// Seconds of a microbatch's forward, and of its backward with the forward repeated for it or not: those of the stream
    /// that takes longest, or on a runtime that does one thing after the other, of all.
    pub fn passes_s(&self, recompute: bool, in_order: bool) -> (f64, f64) {
        let again = |seconds: f64| if recompute { seconds } else { 0.0 };
        let whole = |device_s: f64, sent_s: f64, issue_s: f64| match in_order {
            true => device_s + sent_s,
            false => device_s.max(sent_s).max(issue_s),
        };
        let backward_s = self.backward_s + again(self.forward_s);
        let backward_issue_s = self.backward_issue_s + again(self.forward_issue_s);
        (
            whole(self.forward_s, self.forward_sent_s, self.forward_issue_s),
            whole(backward_s, self.backward_sent_s, backward_issue_s),
        )
    }
}

impl AddAssign for Terms {
    fn add_assign(&mut self, o: Terms) {
        *self = *self + o;
    }
}

/// What a variable of the program stands for.
#[derive(Clone, Debug)]
enum Variable {
    Node(ValueId, Rc<Space>),
    /// Layouts of a parameter before storage sharding.
    Parameter(ValueId, Vec<LayoutId>),
    /// Layouts in which the main value enters or leaves.
    In(Vec<LayoutId>),
    Out(Vec<LayoutId>),
    /// A materialised layout of a value and the layout in which its cotangent is collected.
    Relay(Vec<(LayoutId, LayoutId)>),
}

/// A pairwise cost: a table over distinct keys of both sides.
struct Pair {
    from: usize,
    to: usize,
    from_key: Vec<usize>,
    to_key: Vec<usize>,
    terms: Vec<Vec<Terms>>,
}

/// A solved layer.
pub struct LayerTable {
    pub in_layouts: Vec<LayoutId>,
    pub out_layouts: Vec<LayoutId>,
    /// Objective and terms by entering and leaving layout (index 0 where there is none).
    pub entries: Vec<Vec<Option<(f64, Terms)>>>,
    /// Largest temporary, in bytes: a few of the largest local values.
    pub transient_bytes: f64,
    variables: Vec<Variable>,
    table: BoundaryTable,
    has_in: bool,
    has_out: bool,
}

/// Strategies and parameter layouts of a layer for one pair of boundary layouts.
pub struct LayerChoice {
    pub strategies: Vec<(ValueId, Choice)>,
    pub parameters: Vec<(ValueId, LayoutId)>,
}

/// Seconds that keeping one byte is worth in lean variants: as if holding a full device memory cost
/// [`LEAN_FULL_MEMORY_S`].
const LEAN_FULL_MEMORY_S: f64 = 1.0;

/// The program of one layer, stated but not solved.
pub struct LayerProgram {
    pub problem: Problem,
    variables: Vec<Variable>,
    unary: Vec<Vec<Terms>>,
    pairs: Vec<Pair>,
    has_in: bool,
    has_out: bool,
    transient_bytes: f64,
}

/// States the program of the nodes `range`.
pub fn state_layer(model: &Model<'_>, range: Range<u32>, spaces: &mut Spaces<'_>, variant: Variant) -> LayerProgram {
    let mut builder = Builder { model, spaces, variant, variables: Vec::new(), unary: Vec::new(), pairs: Vec::new() };
    let (has_in, has_out, transient_bytes) = builder.state(range);
    let Builder { variables, mut unary, mut pairs, variant, spaces, .. } = builder;
    if model.optimizer.is_none() {
        let of_pairs = pairs.iter_mut().flat_map(|p| &mut p.terms);
        unary.iter_mut().chain(of_pairs).flatten().for_each(|terms| *terms = terms.forward_only());
    }

    let lean_s_per_byte =
        if variant.lean { LEAN_FULL_MEMORY_S / spaces.prices.cost.device().memory_bytes.max(1) as f64 } else { 0.0 };
    let objective =
        |t: &Terms| t.objective_s(variant.num_microbatches) + lean_s_per_byte * (t.kept_bytes + t.static_bytes);
    let problem = Problem {
        nodes: unary
            .iter()
            .map(|terms| solve::Node { cost: terms.iter().map(objective).collect(), holds: Vec::new() })
            .collect(),
        edges: pairs
            .iter()
            .map(|p| {
                let small: Vec<Vec<f64>> = p.terms.iter().map(|row| row.iter().map(objective).collect()).collect();
                let cost = p
                    .from_key
                    .iter()
                    .flat_map(|&f| p.to_key.iter().map(|&t| small[f][t]).collect::<Vec<_>>())
                    .collect();
                solve::Edge { from: p.from, to: p.to, cost }
            })
            .collect(),
        limit_bytes: None,
    };
    LayerProgram { problem, variables, unary, pairs, has_in, has_out, transient_bytes }
}

/// States the program of the nodes `range` and eliminates all but its boundary.
pub fn solve_layer(
    model: &Model<'_>,
    range: Range<u32>,
    spaces: &mut Spaces<'_>,
    variant: Variant,
) -> Result<LayerTable, SolveError> {
    let LayerProgram { problem, variables, unary, pairs, has_in, has_out, transient_bytes } =
        state_layer(model, range, spaces, variant);
    let keep: Vec<usize> = variables
        .iter()
        .enumerate()
        .filter(|(_, v)| matches!(v, Variable::In(_) | Variable::Out(_)))
        .map(|(i, _)| i)
        .collect();
    let table = solve::boundary_table(&problem, &keep, &Options::default())?;
    let layouts = |wanted: bool| {
        variables.iter().find_map(|v| match v {
            Variable::In(l) if wanted => Some(l.clone()),
            Variable::Out(l) if !wanted => Some(l.clone()),
            _ => None,
        })
    };
    let in_layouts = layouts(true).unwrap_or_default();
    let out_layouts = layouts(false).unwrap_or_default();
    let mut solved =
        LayerTable { in_layouts, out_layouts, entries: Vec::new(), transient_bytes, variables, table, has_in, has_out };
    for i in 0..solved.in_layouts.len().max(1) {
        let mut row = Vec::new();
        for o in 0..solved.out_layouts.len().max(1) {
            let kept = solved.kept(i, o);
            let cost = solved.table.cost(&kept);
            row.push(cost.is_finite().then(|| {
                let choice = solved.table.choice(&kept);
                let mut terms = Terms::default();
                unary.iter().zip(&choice).for_each(|(t, &c)| terms += t[c]);
                pairs.iter().for_each(|p| terms += p.terms[p.from_key[choice[p.from]]][p.to_key[choice[p.to]]]);
                (cost, terms)
            }));
        }
        solved.entries.push(row);
    }
    Ok(solved)
}

impl LayerTable {
    fn kept(&self, i: usize, o: usize) -> Vec<usize> {
        let mut kept = Vec::new();
        // In the order of the variables: the entering one is stated first.
        if self.has_in {
            kept.push(i);
        }
        if self.has_out {
            kept.push(o);
        }
        kept
    }

    /// What to do in this layer when its main value enters in layout `i` and leaves in layout `o`.
    pub fn choice(&self, i: usize, o: usize) -> LayerChoice {
        let choice = self.table.choice(&self.kept(i, o));
        let mut strategies = Vec::new();
        let mut parameters = Vec::new();
        for (variable, &c) in self.variables.iter().zip(&choice) {
            match variable {
                Variable::Node(v, space) => strategies.push((*v, space.choices[c].clone())),
                Variable::Parameter(p, layouts) => parameters.push((*p, layouts[c])),
                _ => {}
            }
        }
        LayerChoice { strategies, parameters }
    }
}

struct Builder<'m, 's, 'p> {
    model: &'m Model<'m>,
    spaces: &'s mut Spaces<'p>,
    variant: Variant,
    variables: Vec<Variable>,
    unary: Vec<Vec<Terms>>,
    pairs: Vec<Pair>,
}

/// A user of a value: a node's operand, or the way out of the layer.
#[derive(Clone, Copy)]
enum User {
    Operand(usize, usize),
    Out(usize),
}

impl Builder<'_, '_, '_> {
    fn add(&mut self, variable: Variable, terms: Vec<Terms>) -> usize {
        self.variables.push(variable);
        self.unary.push(terms);
        self.variables.len() - 1
    }

    fn state(&mut self, range: Range<u32>) -> (bool, bool, f64) {
        let Model { graph, layer_of, users, needs_gradient, blocks, .. } = *self.model;
        let inside = |v: ValueId| range.contains(&v.0) && layer_of[v.index()].is_some();
        let nodes: Vec<ValueId> = range.clone().map(ValueId).filter(|&v| inside(v)).collect();

        // Values that cross the boundary; the widest is the main one, the others rest split over the batch.
        let mut entering: Vec<ValueId> = nodes
            .iter()
            .flat_map(|&v| graph.node(v).operands.iter().copied())
            .filter(|o| layer_of[o.index()].is_some() && o.0 < range.start)
            .collect();
        // A value that passes by, made before this layer and used after it, crosses both boundaries.
        let passes = |v: &ValueId| users[v.index()].iter().any(|u| u.0 >= range.end && layer_of[u.index()].is_some());
        entering.sort();
        entering.dedup();
        let widest =
            |values: &[ValueId]| values.iter().copied().max_by_key(|&v| (graph.ty(v).bytes(), std::cmp::Reverse(v.0)));
        let main_in = widest(&entering);
        let leaving: Vec<ValueId> = nodes.iter().copied().filter(passes).collect();
        let main_out = widest(&leaving).or_else(|| main_in.filter(passes));

        let mut variable_of: BTreeMap<ValueId, usize> = BTreeMap::new();
        let mut uses: BTreeMap<ValueId, Vec<User>> = BTreeMap::new();
        if let Some(v) = main_in {
            let layouts = self.spaces.boundary_layouts(graph.ty(v), graph.node(v).batch_dims);
            let terms = layouts
                .iter()
                .map(|&l| {
                    let bytes = self.spaces.local_bytes(graph.ty(v), l) as f64;
                    Terms { kept_bytes: bytes, entering_bytes: bytes, ..Terms::default() }
                })
                .collect();
            let id = self.add(Variable::In(layouts), terms);
            variable_of.insert(v, id);
        }
        if let Some(v) = main_out {
            let layouts = self.spaces.boundary_layouts(graph.ty(v), graph.node(v).batch_dims);
            let terms = vec![Terms::default(); layouts.len()];
            let id = self.add(Variable::Out(layouts), terms);
            uses.entry(v).or_default().push(User::Out(id));
        }
        let mut transient = 0.0f64;
        for &v in &nodes {
            let outers = factor_blocks(graph, v, blocks);
            let space = self.spaces.of(graph, v, &outers);
            let wanted = graph.node(v).operands.iter().filter(|o| needs_gradient[o.index()]).count();
            let kept = is_kept(&graph.node(v).op);
            let mut least = f64::INFINITY;
            let terms = space
                .choices
                .iter()
                .map(|c| {
                    let bytes = self.spaces.local_bytes(graph.ty(v), c.resting) as f64;
                    least = least.min(c.inside.map_or(bytes, |inside| inside.largest_bytes.max(bytes)));
                    let backward_s = c.inside.map_or(c.forward_s * wanted as f64, |inside| inside.backward_s);
                    let backward_s = if needs_gradient[v.index()] { backward_s } else { 0.0 };
                    let kept_bytes = c.inside.map_or(if kept { bytes } else { 0.0 }, |inside| inside.kept_bytes);
                    let forward_s = if self.honours_pins(v, c.resting) { c.forward_s } else { f64::INFINITY };
                    let backward_issue_s = c.inside.map_or(c.issue_s * wanted as f64, |inside| inside.backward_issue_s);
                    let backward_issue_s = if needs_gradient[v.index()] { backward_issue_s } else { 0.0 };
                    let forward_issue_s = c.issue_s;
                    Terms { forward_s, backward_s, forward_issue_s, backward_issue_s, kept_bytes, ..Terms::default() }
                })
                .collect();
            // A forward value, its cotangent where there is one, and one more of its size are alive at once.
            transient = transient.max(if self.model.optimizer.is_some() { 3.0 } else { 2.0 } * least);
            let id = self.add(Variable::Node(v, space), terms);
            variable_of.insert(v, id);
        }
        for &v in &nodes {
            let id = variable_of[&v];
            for (k, &o) in graph.node(v).operands.iter().enumerate() {
                match &graph.node(o).op {
                    Op::Parameter(_) => {
                        if let Entry::Vacant(entry) = variable_of.entry(o) {
                            let layouts = self.spaces.parameter_layouts(graph.ty(o), &blocks[o.index()]);
                            let forbidden = Terms { forward_s: f64::INFINITY, ..Terms::default() };
                            let terms = layouts.iter().map(|&l| match self.honours_pins(o, l) {
                                true => self.parameter_terms(graph.ty(o), l),
                                false => forbidden,
                            });
                            let terms = terms.collect();
                            entry.insert(self.add(Variable::Parameter(o, layouts), terms));
                        }
                        uses.entry(o).or_default().push(User::Operand(id, k));
                    }
                    _ if variable_of.contains_key(&o) => uses.entry(o).or_default().push(User::Operand(id, k)),
                    _ if layer_of[o.index()].is_some() => self.fixed(o, User::Operand(id, k), true),
                    _ => {}
                }
            }
        }
        for v in leaving.into_iter().filter(|v| Some(*v) != main_out) {
            self.fixed(v, User::Operand(variable_of[&v], 0), false);
        }
        for (v, users) in uses {
            let source = variable_of[&v];
            match users.as_slice() {
                [user] => self.connect(v, source, *user),
                many => {
                    let mut forms: Vec<(LayoutId, LayoutId)> = many.iter().flat_map(|u| self.forms(*u)).collect();
                    forms.sort_unstable();
                    forms.dedup();
                    let terms = vec![Terms::default(); forms.len()];
                    let relay = self.add(Variable::Relay(forms), terms);
                    self.connect(v, source, User::Out(relay));
                    many.iter().for_each(|u| self.serve(v, relay, *u));
                }
            }
        }
        (main_in.is_some(), main_out.is_some(), transient)
    }

    /// Whether a value's layout is what the model's author asked for.
    fn honours_pins(&self, v: ValueId, layout: LayoutId) -> bool {
        self.model.graph.pins_of(v).iter().all(|pin| pin.allows(self.spaces.layout(layout), self.spaces.mesh()))
    }

    /// Once-per-step cost and bytes of a parameter whose compute layout is `layout`.
    fn parameter_terms(&mut self, ty: &TensorType, layout: LayoutId) -> Terms {
        let zero = self.variant.zero;
        let state = if zero >= 1 { self.spaces.storage_layout(layout) } else { layout };
        let (at_rest, gradient) = (if zero == 3 { state } else { layout }, if zero >= 2 { state } else { layout });
        let gradient_ty = self.variant.execution.accumulator(ty);
        let Some(optimizer) = self.model.optimizer else {
            let static_bytes = self.spaces.local_bytes(ty, at_rest) as f64;
            return Terms { static_bytes, ..Terms::default() };
        };
        let elements = self.spaces.local_bytes(&ty.with_dtype(DType::U8), state) as f64;
        let state_bytes = elements * optimizer.state_bytes_per_element(ty.dtype) as f64;
        // The update reads gradient, parameter and state and writes parameter and state.
        let traffic = 2.0 * state_bytes + elements * (gradient_ty.dtype.bytes() + 2 * ty.dtype.bytes()) as f64;
        let bucket_bytes = self.variant.execution.bucket_bytes;
        Terms {
            step_s: update_s(self.spaces.prices.cost, traffic) + self.spaces.stored_s(ty, state, at_rest, bucket_bytes),
            static_bytes: self.spaces.local_bytes(ty, at_rest) as f64
                + self.spaces.local_bytes(&gradient_ty, gradient) as f64
                + state_bytes,
            ..Terms::default()
        }
    }

    /// The (layout, cotangent layout) pairs of a user's choices.
    fn forms(&self, user: User) -> Vec<(LayoutId, LayoutId)> {
        match user {
            User::Operand(id, k) => match &self.variables[id] {
                Variable::Node(_, space) => space.choices.iter().map(|c| (c.operands[k], c.cotangents[k])).collect(),
                _ => Vec::new(),
            },
            User::Out(id) => match &self.variables[id] {
                Variable::Out(layouts) => layouts.iter().map(|&l| (l, l)).collect(),
                Variable::Relay(forms) => forms.clone(),
                _ => Vec::new(),
            },
        }
    }

    /// The (layout, resting layout) pairs of a source's choices.
    fn sources(&self, source: usize) -> Vec<(LayoutId, LayoutId)> {
        match &self.variables[source] {
            Variable::Node(_, space) => space.choices.iter().map(|c| (c.result, c.resting)).collect(),
            Variable::Parameter(_, layouts) | Variable::In(layouts) | Variable::Out(layouts) => {
                layouts.iter().map(|&l| (l, l)).collect()
            }
            Variable::Relay(forms) => forms.clone(),
        }
    }

    /// The cost between the source of `v` and one user (or relay).
    fn connect(&mut self, v: ValueId, source: usize, user: User) {
        let ty = self.model.graph.ty(v).clone();
        let gradient = self.model.needs_gradient[v.index()];
        let parameter = matches!(self.variables[source], Variable::Parameter(..));
        let (from, to) = (self.sources(source), self.forms(user));
        self.pair(source, user, from, to, |spaces, variant, (from, resting), (to, cotangent)| {
            if parameter {
                return parameter_use(spaces, variant, &ty, from, to, cotangent);
            }
            there_and_back(spaces, &ty, (from, to), gradient.then_some((cotangent, resting)))
        });
    }

    /// The cost between a relay and one user.
    fn serve(&mut self, v: ValueId, relay: usize, user: User) {
        let ty = self.model.graph.ty(v).clone();
        let gradient = self.model.needs_gradient[v.index()];
        let (from, to) = (self.sources(relay), self.forms(user));
        self.pair(relay, user, from, to, |spaces, _, (layout, collected), (to, cotangent)| {
            there_and_back(spaces, &ty, (layout, to), gradient.then_some((cotangent, collected)))
        });
    }

    /// A value that crosses the boundary beside the main one: it rests split over the batch.
    fn fixed(&mut self, v: ValueId, user: User, enters: bool) {
        let graph = self.model.graph;
        let ty = graph.ty(v).clone();
        let rest = batch_layout(&ty, graph.node(v).batch_dims, self.spaces.mesh());
        let rest = self.spaces.intern(rest);
        let gradient = self.model.needs_gradient[v.index()];
        let User::Operand(id, _) = user else { return };
        let pairs = if enters { self.forms(user) } else { self.sources(id) };
        for (c, (layout, other)) in pairs.into_iter().enumerate() {
            let (there, back) = if enters { ((rest, layout), (other, rest)) } else { ((layout, rest), (rest, other)) };
            self.unary[id][c] += there_and_back(self.spaces, &ty, there, gradient.then_some(back));
        }
    }

    fn pair(
        &mut self,
        source: usize,
        user: User,
        from: Vec<(LayoutId, LayoutId)>,
        to: Vec<(LayoutId, LayoutId)>,
        price: impl Fn(&mut Spaces<'_>, Variant, (LayoutId, LayoutId), (LayoutId, LayoutId)) -> Terms,
    ) {
        let (User::Operand(target, _) | User::Out(target)) = user;
        let (from_keys, from_key) = distinct(&from);
        let (to_keys, to_key) = distinct(&to);
        let terms = from_keys
            .iter()
            .map(|&f| to_keys.iter().map(|&t| price(self.spaces, self.variant, f, t)).collect())
            .collect();
        self.pairs.push(Pair { from: source, to: target, from_key, to_key, terms });
    }
}

/// A value brought from one layout to another, and its cotangent, where it has one, back.
fn there_and_back(
    spaces: &mut Spaces<'_>,
    ty: &TensorType,
    there: (LayoutId, LayoutId),
    back: Option<(LayoutId, LayoutId)>,
) -> Terms {
    let forward = spaces.reshard(ty, there.0, there.1);
    let backward = back.map_or(Price::default(), |(from, to)| spaces.reshard(ty, from, to));
    Terms {
        forward_s: forward.seconds,
        backward_s: backward.seconds,
        forward_issue_s: forward.issue_s,
        backward_issue_s: backward.issue_s,
        ..Terms::default()
    }
}

/// A parameter of layout `layout` used in layout `to` by an op that gives its gradient as `cotangent`.
fn parameter_use(
    spaces: &mut Spaces<'_>,
    variant: Variant,
    ty: &TensorType,
    layout: LayoutId,
    to: LayoutId,
    cotangent: LayoutId,
) -> Terms {
    let state = if variant.zero >= 1 { spaces.storage_layout(layout) } else { layout };
    let at_rest = if variant.zero == 3 { state } else { layout };
    let accumulator = if variant.zero >= 2 { state } else { spaces.with_partial_of(layout, cotangent) };
    let gradient_ty = variant.execution.accumulator(ty);
    let (gathered, reduced) = (spaces.reshard(ty, at_rest, to), spaces.reshard(ty, cotangent, accumulator));
    // Forward, parameters are gathered ahead of their use. Backward, each gather queues behind the reduction of the gradient
    // before it, so that both are waited for.
    let both_s = gathered.seconds + reduced.seconds;
    let (waited_s, sent_s) = if gathered.seconds > 0.0 { (both_s, 0.0) } else { (0.0, both_s) };
    Terms {
        forward_sent_s: gathered.seconds,
        forward_issue_s: gathered.issue_s,
        backward_s: waited_s,
        backward_sent_s: sent_s,
        backward_issue_s: gathered.issue_s + reduced.issue_s,
        step_s: spaces.stored_s(&gradient_ty, accumulator, state, variant.execution.bucket_bytes),
        ..Terms::default()
    }
}

/// The distinct items of a list in first-seen order, and the position of each item among them.
fn distinct(items: &[(LayoutId, LayoutId)]) -> (Vec<(LayoutId, LayoutId)>, Vec<usize>) {
    let mut seen: BTreeMap<(LayoutId, LayoutId), usize> = BTreeMap::new();
    let mut keys = Vec::new();
    let positions = items
        .iter()
        .map(|&item| {
            *seen.entry(item).or_insert_with(|| {
                keys.push(item);
                keys.len() - 1
            })
        })
        .collect();
    (keys, positions)
}

//! One stage's bodies: forward, backward, reduction and update, and the buffers between them.
//!
//! Gradients are accumulated over microbatches in buffers whose sharding may stay partial until the end of the step. A
//! parameter that several stages use has a copy on each; its gradients are exchanged once a step, and all copies update
//! alike. Values that depend on no parameter and no input, and counts of random bits, are computed where they are used
//! and never sent. The backward pass of a ring fetches keys and values again, the last round first, so that no device
//! holds all keys.

mod activations;
mod layers;
mod offload;
mod passes;
mod server;
mod totals;
mod update;

use super::body::BodyBuilder;
use super::choose::Available;
use super::repeat::Repeats;
use super::{Cut, StageContext, by_layout};
use crate::features::modules::modules;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Op, Roll};
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind, Transfer, TransferId};
use altiplano_ir::recompute::Module;
use altiplano_ir::rule::OpShardings;
use altiplano_ir::sharding::Sharding;
use altiplano_ir::types::TensorType;
use layers::Layers;
use passes::Accumulation;
use rustc_hash::FxHashMap;
pub use server::{Server, lower_server, weights_alone};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// A stage's bodies and the buffers that it exchanges with other stages.
pub struct Lowered {
    pub buffers: Vec<Buffer>,
    pub forward: Body,
    pub backward: Body,
    /// The gradients of weights, if the schedule runs them apart.
    pub weights: Option<Body>,
    pub reduce: Body,
    /// This stage's share of sums over all gradients, if any are wanted.
    pub norm: Option<Body>,
    pub update: Body,
    /// Sums over all microbatches, if the forward body reads any.
    pub totals: Option<Body>,
    pub boundary: Boundary,
    /// The numbers of layers whose forward pass, and whose backward pass, repeats that of an equal layer.
    pub repeated: [usize; 2],
}

/// The buffers that a stage exchanges with others.
#[derive(Clone, Default)]
pub struct Boundary {
    /// Forward values that later stages need, and their buffers.
    pub sends_forward: BTreeMap<ValueId, BufferId>,
    pub receives_forward: BTreeMap<ValueId, BufferId>,
    /// Cotangents of received values, for the stages that sent the values.
    pub sends_backward: BTreeMap<ValueId, BufferId>,
    /// Cotangents from later stages, by value and stage.
    pub receives_backward: BTreeMap<(ValueId, u32), BufferId>,
    /// Reduced gradients of tied parameters for the other holders, and those received from them.
    pub sends_tied: BTreeMap<ValueId, BufferId>,
    pub receives_tied: BTreeMap<(ValueId, u32), BufferId>,
    /// This stage's shares of sums over all gradients, and those received from others, by sum and stage.
    pub sends_shares: Vec<BufferId>,
    pub receives_shares: BTreeMap<(u32, u32), BufferId>,
}

impl Boundary {
    /// The boundary of an equal stage that lies `further` stages on, or back. `of` maps this stage's values to the other's.
    pub fn moved(&self, of: impl Fn(ValueId) -> ValueId, further: i32) -> Boundary {
        let moved = |stage: u32| stage.wrapping_add_signed(further);
        // Shares come from all stages except the stage itself, which is another one here.
        let stages: BTreeSet<u32> = self.receives_shares.keys().map(|(_, stage)| *stage).collect();
        let own = moved((0..).find(|stage| !stages.contains(stage)).unwrap_or(0));
        let sums = 0..self.sends_shares.len() as u32;
        let others = sums.flat_map(|sum| (0..=stages.len() as u32).filter(|s| *s != own).map(move |s| (sum, s)));
        let receives_shares = others.zip(self.receives_shares.values().copied()).collect();
        let values = |map: &BTreeMap<ValueId, BufferId>| map.iter().map(|(&v, &b)| (of(v), b)).collect();
        let by_stage = |map: &BTreeMap<(ValueId, u32), BufferId>| {
            map.iter().map(|(&(v, stage), &b)| ((of(v), moved(stage)), b)).collect()
        };
        Boundary {
            sends_forward: values(&self.sends_forward),
            receives_forward: values(&self.receives_forward),
            sends_backward: values(&self.sends_backward),
            receives_backward: by_stage(&self.receives_backward),
            sends_tied: values(&self.sends_tied),
            receives_tied: by_stage(&self.receives_tied),
            sends_shares: self.sends_shares.clone(),
            receives_shares,
        }
    }
}

/// Transfers by payload: (value, source stage, target stage).
#[derive(Default)]
pub struct Links {
    pub forward: BTreeMap<(ValueId, u32, u32), TransferId>,
    pub backward: BTreeMap<(ValueId, u32, u32), TransferId>,
    pub tied: BTreeMap<(ValueId, u32, u32), TransferId>,
    /// By sum, source stage and target stage.
    pub shares: BTreeMap<(u32, u32, u32), TransferId>,
}

impl Lowered {
    /// The accumulators of gradients and the buffers of parameters, by parameter name.
    pub fn held(&self) -> [BTreeMap<&str, BufferId>; 2] {
        let (mut gradients, mut parameters) = (BTreeMap::new(), BTreeMap::new());
        for (id, buffer) in (0u32..).map(BufferId).zip(&self.buffers) {
            match &buffer.kind {
                BufferKind::Accumulator { parameter } => drop(gradients.insert(parameter.as_str(), id)),
                BufferKind::Parameter { name } => drop(parameters.insert(name.as_str(), id)),
                _ => {}
            }
        }
        [gradients, parameters]
    }

    /// Numbers the stage's buffers from `first` on, after those of the stages that share its devices.
    pub fn number_from(&mut self, first: u32) {
        let bodies = [&mut self.forward, &mut self.backward, &mut self.reduce, &mut self.update];
        for body in bodies.into_iter().chain(&mut self.weights).chain(&mut self.norm).chain(&mut self.totals) {
            let (reads, writes) = (body.reads.iter_mut().map(|r| &mut r.1), body.writes.iter_mut().map(|w| &mut w.0));
            reads.chain(writes).chain(&mut body.frees).for_each(|b| b.0 += first);
        }
        let Boundary {
            sends_forward,
            receives_forward,
            sends_backward,
            receives_backward,
            sends_tied,
            receives_tied,
            sends_shares,
            receives_shares,
        } = &mut self.boundary;
        sends_shares.iter_mut().chain(receives_shares.values_mut()).for_each(|b| b.0 += first);
        let of_values = [sends_forward, receives_forward, sends_backward, sends_tied];
        of_values.into_iter().flat_map(BTreeMap::values_mut).for_each(|b| b.0 += first);
        let of_stages = [receives_backward, receives_tied];
        of_stages.into_iter().flat_map(BTreeMap::values_mut).for_each(|b| b.0 += first);
    }
}

/// State while one stage is lowered.
struct StageLowering<'a> {
    cx: &'a StageContext<'a>,
    buffers: Vec<Buffer>,
    parameters: BTreeMap<ValueId, BufferId>,
    inputs: BTreeMap<(ValueId, Sharding), BufferId>,
    received: BTreeMap<ValueId, BufferId>,
    /// Layouts of forward values that are kept for the backward body.
    saved: BTreeMap<ValueId, Vec<(Sharding, BufferId)>>,
    /// Layouts of saved values and of inputs, in the order in which buffers were made for them.
    made_in_order: Vec<(ValueId, Sharding, BufferId)>,
    /// Forward values that the backward body recomputes.
    again: BTreeSet<ValueId>,
    /// The state of loss scaling, by slot.
    scaling: BTreeMap<&'static str, BufferId>,
    /// Sums over all microbatches, by value.
    totals: BTreeMap<ValueId, BufferId>,
    /// See [`Lowered::repeated`].
    repeated: [usize; 2],
}

/// Lowers one stage on its own.
pub fn lower_stage(cx: &StageContext<'_>) -> Lowered {
    let mut lowering = StageLowering::new(cx, computed_again(cx));
    let layers = Layers::new(cx);
    let forward = lowering.forward(&layers);
    lowering.complete(forward, layers)
}

impl<'a> StageLowering<'a> {
    /// Starts lowering a stage: its parameters get buffers.
    fn new(cx: &'a StageContext<'a>, again: BTreeSet<ValueId>) -> Self {
        let mut lowering = StageLowering {
            cx,
            buffers: Vec::new(),
            parameters: BTreeMap::new(),
            inputs: BTreeMap::new(),
            received: BTreeMap::new(),
            saved: BTreeMap::new(),
            made_in_order: Vec::new(),
            again,
            scaling: BTreeMap::new(),
            totals: BTreeMap::new(),
            repeated: [0; 2],
        };
        lowering.declare_leaves();
        lowering
    }

    fn buffer(&mut self, name: String, kind: BufferKind, ty: TensorType, sharding: Sharding) -> BufferId {
        let extents = match &kind {
            BufferKind::Parameter { name: of }
            | BufferKind::State { parameter: of, .. }
            | BufferKind::Accumulator { parameter: of } => self.cx.plan.extents(of),
            _ => None,
        };
        let extents = extents.filter(|extents| extents.padded_shape() == ty.shape).cloned();
        self.buffers.push(Buffer { name, stage: self.cx.index, kind, ty, sharding, extents, host: false });
        BufferId((self.buffers.len() - 1) as u32)
    }

    fn declare_leaves(&mut self) {
        let cx = self.cx;
        for (p, name) in cx.graph.parameters() {
            if let Some(storage) = cx.stage.parameters.get(name) {
                let kind = BufferKind::Parameter { name: name.to_string() };
                let ty = cx.graph.ty(p).clone();
                let id = self.buffer(name.to_string(), kind, ty, storage.parameter.clone());
                self.parameters.insert(p, id);
            }
        }
        for (&v, sharding) in &cx.stage.receives {
            let ty = cx.graph.ty(v).clone();
            let id = self.buffer(format!("{v} received"), BufferKind::Value, ty, sharding.clone());
            self.received.insert(v, id);
        }
    }

    /// Makes `v` available in `b` if it is a leaf or a received value. Returns true if it is.
    fn fetch_outer(&mut self, b: &mut BodyBuilder<'a>, v: ValueId, to: &Sharding) -> bool {
        let graph = &self.cx.graph;
        let ty = graph.ty(v);
        if let Some(&buffer) = self.parameters.get(&v).or_else(|| self.received.get(&v)) {
            let sharding = self.buffers[buffer.0 as usize].sharding.clone();
            let local = b.read(buffer, &sharding, ty);
            b.define(v, sharding, local);
            return true;
        }
        if !matches!(graph.node(v).op, Op::Input(_)) {
            return false;
        }
        // The host splits an input into any layout for free.
        let whole = to.reduced();
        let buffer = match self.inputs.get(&(v, whole.clone())) {
            Some(&buffer) => buffer,
            None => self.input(v, whole.clone()),
        };
        let local = b.read(buffer, &whole, ty);
        b.define(v, whole, local);
        true
    }

    fn forward(&mut self, layers: &Layers<'a>) -> BodyBuilder<'a> {
        let cx = self.cx;
        let mut b = BodyBuilder::new(cx, format!("stage{} forward", cx.index), cx.nodes.len());
        self.walk(&mut b, layers, None, &mut Accumulation::default(), &mut |lowering, b, _, nodes| {
            nodes.iter().for_each(|v| lowering.emit_forward(b, *v));
        });
        b
    }

    fn emit_forward(&mut self, b: &mut BodyBuilder<'a>, v: ValueId) {
        let cx = self.cx;
        let shardings = cx.shardings(v);
        if cx.graph.is_total(v) && cx.plan.num_microbatches > 1 {
            return self.total(b, v, &shardings.result);
        }
        for (&o, to) in cx.graph.node(v).operands.iter().zip(&shardings.operands) {
            self.fetch_outer(b, o, to);
        }
        b.emit(v, cx.rule(v), cx.strategy(v), &shardings);
    }

    /// Makes a value of the forward graph available in the backward body, as close to layout `to` as possible. What is
    /// recomputed for it comes first, in an order of its own stack: a chain of ops is as long as the model.
    fn fetch(&mut self, b: &mut BodyBuilder<'a>, forward: &BodyBuilder<'a>, v: ValueId, to: &Sharding) {
        enum Task<'a> {
            Fetch(ValueId, Cow<'a, Sharding>),
            Emit(ValueId, Rc<OpShardings>),
        }
        let cx = self.cx;
        let mut tasks = vec![Task::Fetch(v, Cow::Borrowed(to))];
        while let Some(task) = tasks.pop() {
            match task {
                Task::Emit(v, shardings) => {
                    let (rule, strategy) = (cx.rule(v), cx.strategy(v));
                    match self.rolled_from(v) {
                        Some((from, roll)) => b.emit_as(v, &Op::Roll(roll), &[from], rule, strategy, &shardings),
                        None => b.emit(v, rule, strategy, &shardings),
                    }
                }
                Task::Fetch(v, to) => {
                    let is_known = v.index() >= cx.training.num_forward || cx.is_constant(v);
                    if is_known || b.layouts(v).iter().any(|(s, _)| *s == *to) || self.fetch_outer(b, v, &to) {
                        continue;
                    }
                    if !self.again.contains(&v) {
                        self.fetch_saved(b, forward, v, &to);
                    } else if b.layouts(v).is_empty() {
                        let shardings = cx.shardings(v);
                        let operands: Vec<ValueId> = match self.rolled_from(v) {
                            Some((from, _)) => vec![from],
                            None => cx.graph.node(v).operands.to_vec(),
                        };
                        let layouts = shardings.operands.clone();
                        tasks.push(Task::Emit(v, shardings));
                        let operands = operands.into_iter().zip(layouts).rev();
                        tasks.extend(operands.map(|(o, to)| Task::Fetch(o, Cow::Owned(to))));
                    }
                }
            }
        }
    }

    /// Reads a saved value of the forward pass in the backward body.
    fn fetch_saved(&mut self, b: &mut BodyBuilder<'a>, forward: &BodyBuilder<'a>, v: ValueId, to: &Sharding) {
        let cx = self.cx;
        // Read the saved value whose layout is cheapest to reshard to `to`; the smallest among equals.
        let ty = cx.graph.ty(v);
        let price = |s: &Sharding| (cx.reshard_s(ty, s, to), s.local_bytes(ty, &cx.mesh));
        let best = forward
            .layouts(v)
            .iter()
            .filter(|(s, _)| !s.is_partial() || forward.layouts(v).iter().all(|(s, _)| s.is_partial()))
            .map(|(s, _)| (price(s), s))
            .min_by(|a, b| a.0.0.total_cmp(&b.0.0).then(a.0.1.cmp(&b.0.1)));
        let Some(sharding) = best.map(|(_, sharding)| sharding.clone()) else { return };
        let buffer = self.saved_as(v, &sharding).unwrap_or_else(|| self.save(v, sharding.clone()));
        let local = b.read(buffer, &sharding, ty);
        b.define(v, sharding, local);
    }

    /// The buffer that keeps a layout of a forward value for the backward body.
    fn saved_as(&self, v: ValueId, sharding: &Sharding) -> Option<BufferId> {
        self.saved.get(&v)?.iter().find(|(s, _)| s == sharding).map(|(_, buffer)| *buffer)
    }

    /// Makes a buffer for an input in one layout.
    fn input(&mut self, v: ValueId, sharding: Sharding) -> BufferId {
        let (name, ty) = (input_name(self.cx, v).to_string(), self.cx.graph.ty(v).clone());
        let buffer = self.buffer(name.clone(), BufferKind::Input { name }, ty, sharding.clone());
        self.inputs.insert((v, sharding.clone()), buffer);
        self.made_in_order.push((v, sharding, buffer));
        buffer
    }

    fn save(&mut self, v: ValueId, sharding: Sharding) -> BufferId {
        let ty = self.cx.graph.ty(v).clone();
        let buffer = self.buffer(format!("{v} saved"), BufferKind::Value, ty, sharding.clone());
        self.saved.entry(v).or_default().push((sharding.clone(), buffer));
        self.made_in_order.push((v, sharding, buffer));
        buffer
    }

    /// The source of a chain of rolls, and their total shift. The backward pass begins with the last round of a ring,
    /// so it fetches each block directly from its owner. Passing blocks through all devices in between would hold them
    /// all at once.
    fn rolled_from(&self, v: ValueId) -> Option<(ValueId, Roll)> {
        let cx = self.cx;
        let Op::Roll(roll) = &cx.graph.node(v).op else { return None };
        let (mut from, mut roll) = (cx.graph.node(v).operands[0], roll.clone());
        let size = cx.graph.shape(v)[roll.dim].max(1);
        while let Op::Roll(before) = &cx.graph.node(from).op
            && before.dim == roll.dim
            && self.again.contains(&from)
            && cx.strategy(from) == cx.strategy(v)
        {
            roll.by = (roll.by % size + before.by % size) % size;
            from = cx.graph.node(from).operands[0];
        }
        Some((from, roll))
    }

    /// The layouts in which an operand of a backward op is available.
    fn available(&self, b: &BodyBuilder<'a>, forward: &BodyBuilder<'a>, v: ValueId) -> Available {
        let cx = self.cx;
        if cx.is_constant(v) {
            return Available::Any;
        }
        let mut layouts: Vec<&Sharding> = b.layouts(v).iter().map(|(s, _)| s).collect();
        if v.index() < cx.training.num_forward {
            match &cx.graph.node(v).op {
                Op::Input(_) => return Available::Any,
                Op::Parameter(_) => {
                    layouts.extend(self.parameters.get(&v).map(|b| &self.buffers[b.0 as usize].sharding));
                    layouts.extend(forward.layouts(v).iter().map(|(s, _)| s));
                }
                _ if self.again.contains(&v) => layouts.push(&forward.layouts(v)[0].0),
                _ => layouts.extend(forward.layouts(v).iter().map(|(s, _)| s)),
            }
        }
        let mut distinct: Vec<Sharding> = Vec::with_capacity(layouts.len());
        for layout in layouts {
            if !distinct.contains(layout) {
                distinct.push(layout.clone());
            }
        }
        Available::Layouts(distinct)
    }

    /// The sum of this stage's contributions to the cotangent of `v` and of `received`, in layout `to`.
    fn cotangent(
        &mut self,
        b: &mut BodyBuilder<'a>,
        v: ValueId,
        to: &Sharding,
        received: &[BufferId],
    ) -> Option<ValueId> {
        let cx = self.cx;
        let ty = cx.training.graph.ty(v).clone();
        let here = |user: ValueId| cx.stage_of[user.index()] == Some(cx.index);
        let mut parts: Vec<(Sharding, ValueId)> = Vec::new();
        for &(user, value) in cx.training.contributions[v.index()].iter().filter(|(user, _)| here(*user)) {
            if cx.is_constant(value) {
                parts.push((to.clone(), b.want(value, to)));
            } else if let Some((sharding, local)) =
                b.layouts(value).iter().find(|(s, _)| s == to).or(b.layouts(value).first())
            {
                parts.push((sharding.clone(), *local));
            } else {
                debug_assert!(false, "the contribution of {user} to {v} was not emitted");
            }
        }
        for &buffer in received {
            let local = b.read(buffer, to, &ty);
            parts.push((to.clone(), local));
        }
        // Equal layouts are added first, partial sums included, so that one collective serves all of them.
        let mut total: Option<ValueId> = None;
        for (sharding, locals) in by_layout(parts) {
            let sum = locals.into_iter().reduce(|a, c| b.graph.add(a, c))?;
            let sum = b.reshard(sum, &sharding, to);
            total = Some(match total {
                Some(t) => b.graph.add(t, sum),
                None => sum,
            });
        }
        total
    }

    /// The layout of a cotangent that may stay partial: that of a parameter's conversion or broadcast, through which
    /// partial sums pass to the accumulator. All parts of the cotangent must have that layout.
    fn left_partial(&self, b: &BodyBuilder<'a>, v: ValueId) -> Option<Sharding> {
        let cx = self.cx;
        if !is_of_parameter(cx, v) {
            return None;
        }
        if cx.users[v.index()].iter().any(|u| cx.stage_of[u.index()] != Some(cx.index)) {
            return None;
        }
        let mut layouts = cx.training.contributions[v.index()].iter().map(|(_, value)| match b.layouts(*value) {
            [(sharding, _)] if !cx.is_constant(*value) => Some(sharding.clone()),
            _ => None,
        });
        let first = layouts.next()??;
        let resting = cx.resting(v);
        (first.reduced() == resting && layouts.all(|l| l.as_ref() == Some(&first))).then_some(first)
    }

    /// Buffers in which gradients are summed over microbatches.
    fn accumulators(&mut self) -> BTreeMap<ValueId, BufferId> {
        let cx = self.cx;
        let mut accumulators = BTreeMap::new();
        for (p, name) in cx.graph.trained_parameters().filter(|_| cx.plan.schedule.trains()) {
            let Some(storage) = cx.stage.parameters.get(name) else { continue };
            let ty = cx.plan.execution.accumulator(cx.graph.ty(p));
            let kind = BufferKind::Accumulator { parameter: name.to_string() };
            accumulators.insert(p, self.buffer(format!("gradient of {name}"), kind, ty, storage.gradient.clone()));
        }
        accumulators
    }
}

/// Returns true if a value is a parameter, or derived from one by conversions, broadcasts and other linear ops alone.
fn is_of_parameter(cx: &StageContext<'_>, v: ValueId) -> bool {
    let graph = &cx.training.graph;
    let mut at = v;
    while !matches!(graph.node(at).op, Op::Parameter(_)) {
        match graph.node(at).operands.as_slice() {
            &[operand] if cx.rule(at).linear.iter().any(|set| set == &[0]) => at = operand,
            _ => return false,
        }
    }
    true
}

/// Maps backward values to the forward value whose cotangent they are a part of, if the part is brought to the layout
/// in which that value rests. Broadcasts from which such a part is computed elementwise are included.
fn parts_of(cx: &StageContext<'_>) -> FxHashMap<ValueId, ValueId> {
    let here = |v: &ValueId| !is_of_parameter(cx, *v);
    let of = |v: ValueId| cx.training.contributions[v.index()].iter().map(move |(_, part)| (*part, v));
    let mut parts: FxHashMap<ValueId, ValueId> = cx.nodes.iter().copied().filter(here).flat_map(of).collect();
    let graph = &cx.training.graph;
    // An operand of an elementwise op is wanted in the layout of the result.
    let mut wanted = parts.clone();
    for n in cx.nodes.iter().flat_map(|v| cx.owned[v.index()].iter().rev()) {
        let Some(&of) = wanted.get(n).filter(|_| graph.node(*n).op.is_elementwise()) else { continue };
        for o in graph.node(*n).operands.iter().filter(|o| o.index() >= cx.training.num_forward) {
            wanted.entry(*o).or_insert(of);
            if matches!(graph.node(*o).op, Op::BroadcastInDim(_)) {
                parts.entry(*o).or_insert(of);
            }
        }
    }
    parts
}

fn input_name<'a>(cx: &'a StageContext<'_>, v: ValueId) -> &'a str {
    match &cx.graph.node(v).op {
        Op::Input(input) => &input.name,
        _ => "",
    }
}

fn parameter_name<'a>(cx: &'a StageContext<'_>, p: ValueId) -> &'a str {
    match &cx.graph.node(p).op {
        Op::Parameter(parameter) => &parameter.name,
        _ => "",
    }
}

/// The stages that hold a parameter.
fn holders(cx: &StageContext<'_>, p: ValueId) -> Vec<u32> {
    let name = parameter_name(cx, p);
    (0..).zip(&cx.plan.stages).filter(|(_, s)| s.parameters.contains_key(name)).map(|(i, _)| i).collect()
}

/// The stages with a user that contributes to the cotangent of `v`.
fn stages_of_contributions(cx: &StageContext<'_>, v: ValueId) -> BTreeSet<u32> {
    cx.training.contributions[v.index()].iter().filter_map(|(user, _)| cx.stage_of[user.index()]).collect()
}

/// Forward values of this stage that the backward body recomputes.
pub(super) fn computed_again(cx: &StageContext<'_>) -> BTreeSet<ValueId> {
    let execution = &cx.plan.execution;
    let selects =
        cx.stage.recompute.selects() && !execution.recompute_modules.without(Module::AttentionCore).is_empty();
    let repeats = Repeats {
        graph: cx.graph,
        layer_of: cx.layer_of,
        users: cx.users,
        recompute: &|layer| cx.stage.recomputes(layer),
        fused_attention: execution.fused_attention,
        always: cx.recomputed,
        selective: execution.recompute_modules,
        modules: if selects { cx.modules.get_or_init(|| modules(cx.graph, cx.layer_of, cx.users)) } else { &[] },
    };
    repeats.of(cx.nodes.iter().copied())
}

/// Creates the transfers between stages, from the program of one lane to that of another or to itself.
pub fn connect(cut: &Cut<'_>, boundaries: &[Boundary], transfers: &mut Vec<Transfer>) -> Links {
    let mut links = Links::default();
    let mut link = |source: (u32, BufferId), target: (u32, BufferId)| {
        let of_lane = |(stage, buffer): (u32, BufferId)| (cut.plan.lane_of(stage as usize) as u32, buffer);
        transfers.push(Transfer { source: of_lane(source), target: of_lane(target) });
        TransferId((transfers.len() - 1) as u32)
    };
    for (t, receiver) in (0u32..).zip(boundaries) {
        for (&v, &buffer) in &receiver.receives_forward {
            if let Some(s) = cut.stage_of[v.index()]
                && let Some(&source) = boundaries[s as usize].sends_forward.get(&v)
            {
                links.forward.insert((v, s, t), link((s, source), (t, buffer)));
            }
        }
        for (&(v, s), &buffer) in &receiver.receives_backward {
            if let Some(&source) = boundaries[s as usize].sends_backward.get(&v) {
                links.backward.insert((v, s, t), link((s, source), (t, buffer)));
            }
        }
        for (&(sum, s), &buffer) in &receiver.receives_shares {
            if let Some(&source) = boundaries[s as usize].sends_shares.get(sum as usize) {
                links.shares.insert((sum, s, t), link((s, source), (t, buffer)));
            }
        }
        for (&(p, s), &buffer) in &receiver.receives_tied {
            if let Some(&source) = boundaries[s as usize].sends_tied.get(&p) {
                links.tied.insert((p, s, t), link((s, source), (t, buffer)));
            }
        }
    }
    links
}

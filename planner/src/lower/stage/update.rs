//! A stage's work once a step: reduction of gradients, sums over all of them, and the optimizer's update of its shards.
//!
//! A sum over a tensor adds the local shards over the axes that split it. A sum over all parameters adds each device's
//! share over all devices of the stage, in which a value that several devices hold counts once. Then the stages send
//! each other their shares, and all add them in the order of stages, so that copies of a parameter update alike to the
//! bit.

use super::offload::Window;
use super::{BodyBuilder, StageContext, StageLowering, holders, parameter_name};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::loss_scale::{self, ScaleState};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Direction, HostCopy, HostRoute, Op, Reducer};
use altiplano_ir::optimizer::{self, Given, Optimizer, clip_factor, squares};
use altiplano_ir::program::{
    ALL_PARAMETERS, Body, Buffer, BufferId, BufferKind, GRADIENT_SQUARES, GRADIENT_VARIANCE, MEASURED_SQUARES,
    OVERFLOWS, Phase,
};
use altiplano_ir::reshard::Collective;
use altiplano_ir::sharding::Sharding;
use altiplano_ir::types::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// The possible sums over all gradients.
const SUMS: [&str; 4] = [GRADIENT_SQUARES, GRADIENT_VARIANCE, MEASURED_SQUARES, OVERFLOWS];

/// Buffers of a stage's accumulated gradients. Each parameter has one or more buffers to add up, and a flag that is
/// true if they are freed once read.
pub struct Gradients(BTreeMap<ValueId, (Vec<BufferId>, bool)>);

/// A stage's contribution to sums over all gradients.
pub struct Shares {
    pub body: Body,
    /// The sums that the plan wants.
    sums: Vec<&'static str>,
    /// Buffers of this stage's shares, and by sum and stage those of the others.
    pub own: Vec<BufferId>,
    pub others: BTreeMap<(u32, u32), BufferId>,
}

/// Variance of the gradient between equal parts of the batch, summed over parameters and microbatches (McCandlish et
/// al. 2018, appendix A.1).
///
/// Let the batch's gradient `g` be the sum of `n` parts. Each part times `n` is the gradient of an `n`-th of the batch.
/// Then `a = (n sum |part|^2 - |g|^2) / (n - 1)` has the expectation of the variance of `g`, summed over elements. It
/// is linear in squares, so parameters may have different numbers of parts. This type collects its first term.
pub struct Variance {
    pub buffer: BufferId,
    /// Axes along which devices work on different samples.
    samples: Vec<AxisId>,
    num_microbatches: u64,
    pub sum: Option<ValueId>,
}

impl Gradients {
    pub fn accumulated(
        accumulators: &BTreeMap<ValueId, BufferId>,
        own: &BTreeMap<ValueId, BufferId>,
        others: &BTreeMap<(ValueId, u32), BufferId>,
        stage: u32,
    ) -> Gradients {
        let found = |(&p, &accumulator): (&ValueId, &BufferId)| match own.get(&p) {
            None => (p, (vec![accumulator], false)),
            Some(&mine) => {
                let mut parts: BTreeMap<u32, BufferId> = BTreeMap::from([(stage, mine)]);
                parts.extend(others.iter().filter(|((q, _), _)| *q == p).map(|((_, s), &b)| (*s, b)));
                // In the order of stages, so that all holders compute the same bits.
                (p, (parts.into_values().collect(), true))
            }
        };
        Gradients(accumulators.iter().map(found).collect())
    }
}

impl Gradients {
    /// Gradients that arrive whole, in one buffer each. Reading does not free the buffers.
    pub fn received(buffers: &BTreeMap<ValueId, BufferId>) -> Gradients {
        Gradients(buffers.iter().map(|(&p, &buffer)| (p, (vec![buffer], false))).collect())
    }
}

impl Variance {
    /// Adds one microbatch's gradient of a parameter.
    pub fn add(&mut self, b: &mut BodyBuilder<'_>, p: ValueId, gradient: ValueId, sharding: &Sharding) {
        let Some((n, kept)) = self.parts(b.stage, p, sharding) else { return };
        let gradient = b.reshard(gradient, sharding, &kept);
        // If several devices hold equal parts, each adds its share.
        let devices = u64::from(b.stage.mesh.num_devices());
        let holding = b.stage.mesh.product(&kept.split_axes().chain(partial_axes(&kept)).collect::<Vec<_>>());
        let factor = n / (n - 1.0) * holding as f64 / devices as f64;
        let square = squares(&mut b.graph, gradient, factor.sqrt());
        self.sum = Some(match self.sum {
            Some(sum) => b.graph.add(sum, square),
            None => square,
        });
    }

    /// The number of parts of the batch in which a parameter's gradient is seen, and the layout in which a device's
    /// part covers its samples alone. Other sums, as over tokens, are completed. `None` if there is one part, or if
    /// other stages have parts of the same samples.
    fn parts(&self, cx: &StageContext<'_>, p: ValueId, gradient: &Sharding) -> Option<(f64, Sharding)> {
        let mut kept = gradient.clone();
        kept.partial.retain(|axis| self.samples.contains(&axis.0));
        let n = self.num_microbatches * cx.mesh.product(&partial_axes(&kept).collect::<Vec<_>>());
        (n > 1 && holders(cx, p).len() == 1).then_some((n as f64, kept))
    }
}

fn partial_axes(sharding: &Sharding) -> impl Iterator<Item = AxisId> + '_ {
    sharding.partial.iter().map(|p| p.0)
}

/// Axes that split the batch dimension of some value, and no other dimension of any value that has one.
fn axes_of_samples(cx: &StageContext<'_>) -> Vec<AxisId> {
    let (mut batch, mut other) = (BTreeSet::new(), BTreeSet::new());
    for &v in cx.nodes {
        let marked = cx.graph.node(v).batch_dims;
        for (d, dim) in cx.resting(v).dims.iter().enumerate().filter(|_| marked != 0) {
            let of = if marked >> d & 1 == 1 { &mut batch } else { &mut other };
            of.extend(dim.axes());
        }
    }
    batch.difference(&other).copied().collect()
}

/// Sums a local scalar over the devices along some axes.
fn all_reduced(graph: &mut Graph, x: ValueId, axes: Vec<AxisId>, mesh: &Mesh) -> ValueId {
    if mesh.product(&axes) == 1 {
        return x;
    }
    let collective = Collective::AllReduce { axes, reducer: Reducer::Sum };
    graph.emit(Op::collective(collective, mesh), &[x])
}

/// Cancels a step whose gradients are not finite.
struct Skip {
    /// A boolean scalar.
    when: ValueId,
    /// Number of steps that were skipped before this one.
    skipped: ValueId,
}

impl Skip {
    fn unless(&self, graph: &mut Graph, old: ValueId, new: ValueId) -> ValueId {
        let shape = graph.shape(new).to_vec();
        let when = graph.broadcast_scalar(self.when, &shape);
        graph.select(when, old, new)
    }
}

/// The optimizer for a parameter, which may be exempt from weight decay.
fn optimizer_of(cx: &StageContext<'_>, p: ValueId) -> Optimizer {
    let mut optimizer = cx.plan.optimizer;
    if let Op::Parameter(parameter) = &cx.graph.node(p).op
        && parameter.no_decay
        && let Some(decay) = optimizer.setting("weight_decay")
    {
        *decay = 0.0;
    }
    optimizer
}

/// One divided by a scalar.
fn inverse(graph: &mut Graph, x: ValueId) -> ValueId {
    let one = graph.splat_like(x, 1.0);
    graph.div(one, x)
}

/// A tensor times an f32 scalar, in single precision.
fn scaled(graph: &mut Graph, x: ValueId, factor: ValueId) -> ValueId {
    let (x, shape) = (graph.convert(x, DType::F32), graph.shape(x).to_vec());
    let factor = graph.broadcast_scalar(factor, &shape);
    graph.mul(x, factor)
}

/// The optimizer state of a stage's parameters in the order of their updates. It is read in place, or loaded from the
/// host ahead of its update and stored there afterwards.
struct States<'p> {
    parameters: &'p [ValueId],
    /// The window, if state is in host memory.
    window: Option<Window>,
    buffers: Vec<Vec<BufferId>>,
    values: Vec<Vec<ValueId>>,
    /// The last value that each update stored in the host.
    stored: Vec<Option<ValueId>>,
}

impl<'p> States<'p> {
    fn new(cx: &StageContext<'_>, parameters: &'p [ValueId]) -> Self {
        let bytes = |p: &ValueId| {
            let ty = cx.graph.ty(*p);
            let slots = cx.plan.optimizer.slots(ty.dtype).len() as u64;
            let state = &cx.stage.parameters[parameter_name(cx, *p)].state;
            slots * state.local_bytes(&ty.with_dtype(Optimizer::state_type(ty.dtype)), &cx.mesh)
        };
        let window = cx.stage.offload.optimizer.then(|| Window::new(&parameters.iter().map(bytes).collect::<Vec<_>>()));
        States { parameters, window, buffers: Vec::new(), values: Vec::new(), stored: vec![None; parameters.len()] }
    }

    /// The state of the `i`-th parameter on the device, before its update.
    fn of<'a>(&mut self, lowering: &mut StageLowering<'a>, b: &mut BodyBuilder<'a>, i: usize) -> Vec<ValueId> {
        while self.values.len() <= i || self.window.as_ref().is_some_and(|w| w.is_due(self.values.len(), i)) {
            self.bring(lowering, b);
        }
        self.values[i].clone()
    }

    /// Reads the state of the next parameter.
    fn bring<'a>(&mut self, lowering: &mut StageLowering<'a>, b: &mut BodyBuilder<'a>) {
        let (cx, i) = (lowering.cx, self.values.len());
        let (name, ty) = (parameter_name(cx, self.parameters[i]), cx.graph.ty(self.parameters[i]));
        let (state, dtype) = (&cx.stage.parameters[name].state, ty.dtype);
        let ty = ty.with_dtype(Optimizer::state_type(dtype));
        let back = self.window.as_ref().and_then(|w| w.waits_for(i));
        let gate = back.and_then(|last| self.stored[..=last].iter().rev().find_map(|v| *v));
        let (mut buffers, mut values) = (Vec::new(), Vec::new());
        for slot in cx.plan.optimizer.slots(dtype) {
            let kind = BufferKind::State { parameter: name.to_string(), slot: slot.to_string() };
            let buffer = lowering.buffer(format!("{slot} of {name}"), kind, ty.clone(), state.clone());
            let mut value = b.read(buffer, state, &ty);
            if self.window.is_some() {
                lowering.buffers[buffer.0 as usize].host = true;
                let operands: Vec<ValueId> = [Some(value), gate].into_iter().flatten().collect();
                value = b.graph.emit(Op::HostCopy(HostCopy { route: HostRoute::Load }), &operands);
            }
            buffers.push(buffer);
            values.push(value);
        }
        self.buffers.push(buffers);
        self.values.push(values);
    }

    /// The new values of the buffers that hold the `i`-th parameter's state.
    fn renewed(&mut self, b: &mut BodyBuilder<'_>, i: usize, mut new: Vec<ValueId>) -> Vec<(BufferId, ValueId)> {
        if self.window.is_some() {
            for value in &mut new {
                *value = b.graph.emit(Op::HostCopy(HostCopy { route: HostRoute::Store }), &[*value]);
            }
            self.stored[i] = new.last().copied();
        }
        self.buffers[i].iter().copied().zip(new).collect()
    }
}

impl<'a> StageLowering<'a> {
    /// Factor that turns the sum of a gradient over microbatches into the step's gradient.
    fn gradient_scale(&self) -> f64 {
        match self.cx.plan.loss {
            altiplano_ir::batch::LossKind::Sum => 1.0,
            _ => 1.0 / f64::from(self.cx.plan.microbatches_of_update()),
        }
    }

    /// The accumulator of the step's gradient variance, in which each device has its own share.
    pub(super) fn variance_accumulator(&mut self) -> Option<Variance> {
        let cx = self.cx;
        if !cx.plan.schedule.trains() || !cx.plan.measure_noise {
            return None;
        }
        let mut sharding = Sharding::replicated(&[]);
        let sum = |axis| (axis, Reducer::Sum);
        sharding.partial = cx.mesh.axis_ids().filter(|a| cx.mesh.size(*a) > 1).map(sum).collect();
        let kind = BufferKind::Accumulator { parameter: ALL_PARAMETERS.to_string() };
        let buffer = self.buffer(GRADIENT_VARIANCE.to_string(), kind, TensorType::scalar(DType::F32), sharding);
        let num_microbatches = u64::from(cx.plan.num_microbatches);
        Some(Variance { buffer, samples: axes_of_samples(cx), num_microbatches, sum: None })
    }

    /// Reduces the gradients of parameters that other stages hold as well, for the exchange. Returns the body, the
    /// buffers of this stage's own gradients, and those of the other stages'.
    pub(super) fn reduce(
        &mut self,
        accumulators: &BTreeMap<ValueId, BufferId>,
    ) -> (Body, BTreeMap<ValueId, BufferId>, BTreeMap<(ValueId, u32), BufferId>) {
        let cx = self.cx;
        let mut b = BodyBuilder::new(cx, format!("stage{} reduce", cx.index), accumulators.len());
        let mut writes = Vec::new();
        let mut own = BTreeMap::new();
        let mut receives = BTreeMap::new();
        for (&p, &accumulator) in accumulators {
            let others = holders(cx, p).into_iter().filter(|&s| s != cx.index).collect::<Vec<_>>();
            if others.is_empty() {
                continue;
            }
            let Buffer { ty, sharding, .. } = self.buffers[accumulator.0 as usize].clone();
            let name = parameter_name(cx, p);
            let state = cx.stage.parameters[name].state.clone();
            let sum = b.read(accumulator, &sharding, &ty);
            let reduced = b.reshard(sum, &sharding, &state);
            let buffer =
                self.buffer(format!("reduced gradient of {name}"), BufferKind::Value, ty.clone(), state.clone());
            writes.push((buffer, reduced));
            own.insert(p, buffer);
            for stage in others {
                let label = format!("gradient of {name} from stage{stage}");
                receives.insert((p, stage), self.buffer(label, BufferKind::Value, ty.clone(), state.clone()));
            }
        }
        let (graph, reads, writes) = b.finish(writes);
        let name = format!("stage{} reduce", cx.index);
        let body = Body { name, stage: cx.index, phase: Phase::Reduce, graph, reads, writes, frees: Vec::new() };
        (body, own, receives)
    }

    /// The gradient of a parameter in the layout of its state. Adds buffers that were read for the last time to
    /// `frees`.
    fn gradient(
        &self,
        b: &mut BodyBuilder<'a>,
        gradients: &Gradients,
        p: ValueId,
        frees: &mut Vec<BufferId>,
    ) -> ValueId {
        let (parts, once) = &gradients.0[&p];
        let state = &self.cx.stage.parameters[parameter_name(self.cx, p)].state;
        let mut sum: Option<ValueId> = None;
        for &part in parts {
            let Buffer { ty, sharding, .. } = &self.buffers[part.0 as usize];
            let local = b.read(part, sharding, ty);
            let local = b.reshard(local, sharding, state);
            sum = Some(sum.map_or(local, |sum| b.graph.add(sum, local)));
        }
        if *once {
            frees.extend(parts);
        }
        // Every parameter has an accumulator.
        sum.unwrap_or_else(|| unreachable!("{p} has a gradient"))
    }

    /// This stage's shares of the sums over all gradients that the plan wants. Afterwards, `gradients` refers to
    /// reduced gradients.
    pub(super) fn norm(&mut self, gradients: &mut Gradients, variance: Option<&Variance>) -> Option<Shares> {
        let cx = self.cx;
        let measures = variance.is_some();
        // In the order of `SUMS`.
        let wanted = [cx.plan.clip_norm.is_some() || measures, measures, measures, cx.plan.loss_scale.is_some()];
        if !cx.updates.here || !wanted.contains(&true) {
            return None;
        }
        let mut b = BodyBuilder::new(cx, format!("stage{} norm", cx.index), 8 * gradients.0.len());
        let unscale = self.scale(&mut b).map(|scale| inverse(&mut b.graph, scale));
        let scale = self.gradient_scale();
        let (mut writes, mut frees) = (Vec::new(), Vec::new());
        let mut sums = [None; SUMS.len()];
        let mut add = |b: &mut BodyBuilder<'a>, sum: usize, term: ValueId| {
            sums[sum] = Some(sums[sum].map_or(term, |s| b.graph.add(s, term)));
        };
        for p in gradients.0.keys().copied().collect::<Vec<_>>() {
            let name = parameter_name(cx, p);
            let storage = &cx.stage.parameters[name];
            let (parts, _) = &gradients.0[&p];
            let is_whole = parts.len() == 1 && self.buffers[parts[0].0 as usize].sharding == storage.state;
            let gradient = self.gradient(&mut b, gradients, p, &mut frees);
            if !is_whole {
                let label = format!("whole gradient of {name}");
                let ty = cx.plan.execution.accumulator(cx.graph.ty(p));
                let buffer = self.buffer(label, BufferKind::Value, ty, storage.state.clone());
                writes.push((buffer, gradient));
                gradients.0.insert(p, (vec![buffer], true));
            }
            // If several stages hold a parameter, the first counts it.
            if holders(cx, p).first() != Some(&cx.index) {
                continue;
            }
            let holding = cx.mesh.product(&storage.state.split_axes().collect::<Vec<_>>()) as f64;
            let replicas = f64::from(cx.mesh.num_devices()) / holding;
            if wanted[3] {
                let overflows = loss_scale::overflows(&mut b.graph, gradient);
                add(&mut b, 3, overflows);
            }
            if !wanted[0] {
                continue;
            }
            // Unscale before squaring: a scaled gradient may be too large.
            let gradient = unscale.map_or(gradient, |unscale| scaled(&mut b.graph, gradient, unscale));
            let square = squares(&mut b.graph, gradient, scale / replicas.sqrt());
            add(&mut b, 0, square);
            if let Some((n, _)) = variance.and_then(|v| v.parts(cx, p, &storage.gradient)) {
                add(&mut b, 2, square);
                let factor = b.graph.splat_like(square, -1.0 / (n - 1.0));
                let of_mean = b.graph.mul(square, factor);
                add(&mut b, 1, of_mean);
            }
        }
        if let Some(variance) = variance {
            let Buffer { ty, sharding, .. } = self.buffers[variance.buffer.0 as usize].clone();
            let local = b.read(variance.buffer, &sharding, &ty);
            let factor = b.graph.splat_like(local, scale * scale);
            let mut local = b.graph.mul(local, factor);
            for unscale in [unscale, unscale].into_iter().flatten() {
                local = b.graph.mul(local, unscale);
            }
            add(&mut b, 1, local);
        }
        let (scalar, whole) = (TensorType::scalar(DType::F32), Sharding::replicated(&[]));
        let (mut own, mut others) = (Vec::new(), BTreeMap::new());
        let of_plan = SUMS.into_iter().zip(sums).zip(wanted).filter(|(_, wanted)| *wanted).map(|(sum, _)| sum);
        let of_plan: Vec<(&'static str, Option<ValueId>)> = of_plan.collect();
        for (sum, &(name, share)) in (0..).zip(&of_plan) {
            // A stage without parameters of its own contributes nothing.
            let nothing = || Literal::splat(scalar.clone(), 0.0);
            let share = share.unwrap_or_else(|| b.graph.constant(nothing()));
            let share = all_reduced(&mut b.graph, share, cx.mesh.axis_ids().collect(), &cx.mesh);
            let label = |stage: u32| format!("{name} of stage{stage}");
            let mine = self.buffer(label(cx.updates.peer), BufferKind::Value, scalar.clone(), whole.clone());
            writes.push((mine, share));
            own.push(mine);
            for stage in (0..cx.updates.peers).filter(|s| *s != cx.updates.peer) {
                let buffer = self.buffer(label(stage), BufferKind::Value, scalar.clone(), whole.clone());
                others.insert((sum, stage), buffer);
            }
        }
        let (graph, reads, writes) = b.finish(writes);
        let name = format!("stage{} norm", cx.index);
        let body = Body { name, stage: cx.index, phase: Phase::Norm, graph, reads, writes, frees };
        Some(Shares { body, sums: of_plan.into_iter().map(|(name, _)| name).collect(), own, others })
    }

    /// The sums over all gradients, which are also kept for the host.
    fn sums(
        &mut self,
        b: &mut BodyBuilder<'a>,
        shares: &Shares,
        writes: &mut Vec<(BufferId, ValueId)>,
        frees: &mut Vec<BufferId>,
    ) -> BTreeMap<&'static str, ValueId> {
        let (scalar, whole) = (TensorType::scalar(DType::F32), Sharding::replicated(&[]));
        let mut sums = BTreeMap::new();
        for ((i, &name), &own) in (0u32..).zip(&shares.sums).zip(&shares.own) {
            let mut parts: BTreeMap<u32, BufferId> = BTreeMap::from([(self.cx.updates.peer, own)]);
            parts.extend(shares.others.iter().filter(|((sum, _), _)| *sum == i).map(|((_, stage), &b)| (*stage, b)));
            let mut total: Option<ValueId> = None;
            for part in parts.values() {
                let share = b.read(*part, &whole, &scalar);
                total = Some(total.map_or(share, |total| b.graph.add(total, share)));
            }
            frees.extend(parts.values());
            let Some(total) = total else { continue };
            let kind = BufferKind::State { parameter: ALL_PARAMETERS.to_string(), slot: name.to_string() };
            let kept = self.buffer(name.to_string(), kind, scalar.clone(), whole.clone());
            // A device keeps the written value, so it must be a copy of a received one.
            let one = b.graph.splat_like(total, 1.0);
            let copy = b.graph.mul(total, one);
            writes.push((kept, copy));
            sums.insert(name, total);
        }
        sums
    }

    /// A scalar that is given for each step.
    pub(super) fn scalar(&mut self, name: &str) -> BufferId {
        let kind = BufferKind::Scalar { name: name.to_string() };
        self.buffer(name.to_string(), kind, TensorType::scalar(DType::F32), Sharding::replicated(&[]))
    }

    /// Reads the loss-scaling state of this name in a body.
    fn scaling(&mut self, b: &mut BodyBuilder<'a>, slot: &'static str) -> (BufferId, ValueId) {
        let (scalar, whole) = (TensorType::scalar(DType::F32), Sharding::replicated(&[]));
        let buffer = match self.scaling.get(slot) {
            Some(&buffer) => buffer,
            None => {
                let kind = BufferKind::State { parameter: ALL_PARAMETERS.to_string(), slot: slot.to_string() };
                let buffer = self.buffer(slot.to_string(), kind, scalar.clone(), whole.clone());
                self.scaling.insert(slot, buffer);
                buffer
            }
        };
        (buffer, b.read(buffer, &whole, &scalar))
    }

    /// The scale of this step's loss, an f32 scalar; `None` if the loss is not scaled.
    fn scale(&mut self, b: &mut BodyBuilder<'a>) -> Option<ValueId> {
        let of_plan = self.cx.plan.loss_scale.filter(|_| self.cx.plan.schedule.trains())?;
        let is_kept = of_plan.slots().contains(&loss_scale::SCALE);
        let kept = is_kept.then(|| self.scaling(b, loss_scale::SCALE).1);
        Some(of_plan.now(&mut b.graph, kept, self.loss_type()))
    }

    fn loss_type(&self) -> DType {
        let training = self.cx.training;
        training.graph.ty(training.loss).dtype
    }

    /// The cotangent of the loss, in the loss's type.
    pub(super) fn scaled_seed(&mut self, b: &mut BodyBuilder<'a>) -> ValueId {
        let one = || Literal::splat(TensorType::scalar(DType::F32), 1.0);
        let scale = self.scale(b).unwrap_or_else(|| b.graph.constant(one()));
        b.graph.convert(scale, self.loss_type())
    }

    /// Emits the condition under which this step changes nothing (`overflows` counts gradients that are not finite) and
    /// the next state of loss scaling. `None` if the loss is not scaled.
    fn skip(
        &mut self,
        b: &mut BodyBuilder<'a>,
        overflows: ValueId,
        writes: &mut Vec<(BufferId, ValueId)>,
    ) -> Option<Skip> {
        let (of_plan, now) = (self.cx.plan.loss_scale?, self.scale(b)?);
        let none = b.graph.splat_like(overflows, 0.0);
        let when = b.graph.compare(Direction::Gt, overflows, none);
        let slots = of_plan.slots();
        let kept: Vec<(BufferId, ValueId)> = slots.iter().map(|slot| self.scaling(b, slot)).collect();
        let read = |name: &str| slots.iter().position(|slot| *slot == name).map(|i| kept[i].1);
        let skipped = read(loss_scale::SKIPPED_STEPS)?;
        let state = ScaleState { skipped, unchanged: read(loss_scale::UNCHANGED_STEPS) };
        let after = of_plan.after(&mut b.graph, state, now, when, self.loss_type());
        writes.extend(kept.iter().map(|kept| kept.0).zip(after));
        Some(Skip { when, skipped })
    }

    /// The optimizer's step on this stage's shards. `number` is the buffer of the update's number, if that differs from
    /// the step's.
    pub(super) fn update(
        &mut self,
        accumulators: &BTreeMap<ValueId, BufferId>,
        gradients: &Gradients,
        shares: Option<&Shares>,
        number: Option<BufferId>,
    ) -> Body {
        let cx = self.cx;
        let mut b = BodyBuilder::new(cx, format!("stage{} update", cx.index), 20 * accumulators.len());
        let mut writes = Vec::new();
        let mut frees: Vec<BufferId> = Vec::new();
        let mut parameters: Vec<ValueId> =
            if cx.updates.here { accumulators.keys().copied().collect() } else { Vec::new() };
        if cx.stage.offload.optimizer {
            // Backward passes first complete the gradients of parameters that are used last.
            parameters.reverse();
        }
        let mut states = States::new(cx, &parameters);
        let leaves = cx.updates.here.then(|| {
            let (scalar, whole) = (TensorType::scalar(DType::F32), Sharding::replicated(&[]));
            let buffers = [self.scalar("learning_rate"), number.unwrap_or_else(|| self.scalar("step"))];
            buffers.map(|buffer| b.read(buffer, &whole, &scalar))
        });
        let sums = shares.map(|shares| self.sums(&mut b, shares, &mut writes, &mut frees)).unwrap_or_default();
        let most = cx.plan.clip_norm.zip(sums.get(GRADIENT_SQUARES));
        let clip = most.map(|(most, squares)| clip_factor(&mut b.graph, *squares, most));
        let skip = sums.get(OVERFLOWS).and_then(|&overflows| self.skip(&mut b, overflows, &mut writes));
        let unscale = self.scale(&mut b).map(|scale| inverse(&mut b.graph, scale));
        let factor = match (clip, unscale) {
            (Some(clip), Some(unscale)) => Some(b.graph.mul(clip, unscale)),
            (clip, unscale) => clip.or(unscale),
        };
        // Averages over steps count only steps that were not skipped.
        let made = |skip: &Skip| leaves.map(|[rate, step]| [rate, b.graph.sub(step, skip.skipped)]);
        let leaves = skip.as_ref().map_or(leaves, made);
        for (i, &p) in parameters.iter().enumerate() {
            let Some([learning_rate, step]) = leaves else { break };
            let name = parameter_name(cx, p).to_string();
            let storage = &cx.stage.parameters[&name];
            let gradient = self.gradient(&mut b, gradients, p, &mut frees);
            let ty = cx.graph.ty(p);
            let parameter_buffer = self.parameters[&p];
            let parameter = b.read(parameter_buffer, &storage.parameter, ty);
            let parameter = b.reshard(parameter, &storage.parameter, &storage.state);
            let old = states.of(self, &mut b, i);
            let axes: Vec<AxisId> = storage.state.split_axes().collect();
            let whole = |graph: &mut Graph, x: ValueId| all_reduced(graph, x, axes.clone(), &cx.mesh);
            let given = Given {
                parameter,
                gradient,
                gradient_scale: self.gradient_scale(),
                factor,
                states: &old,
                learning_rate,
                step,
                whole: &whole,
            };
            let optimizer = optimizer_of(cx, p);
            let mut new = optimizer::update(&mut b.graph, &optimizer, &given);
            if let Some(skip) = &skip {
                new.parameter = skip.unless(&mut b.graph, parameter, new.parameter);
                for (new, &old) in new.states.iter_mut().zip(&old) {
                    *new = skip.unless(&mut b.graph, old, *new);
                }
            }
            let whole = b.reshard(new.parameter, &storage.state, &storage.parameter);
            writes.push((parameter_buffer, whole));
            writes.extend(states.renewed(&mut b, i, new.states));
        }
        let (graph, reads, writes) = b.finish(writes);
        let name = format!("stage{} update", cx.index);
        Body { name, stage: cx.index, phase: Phase::Update, graph, reads, writes, frees }
    }
}

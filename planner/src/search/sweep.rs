//! Plans of software that runs only uniform configurations: all of them estimated, and the promising ones predicted.
//!
//! Megatron-LM and its kin split a model by degrees: a number of replicas, tensor-parallel devices and pipeline stages,
//! and a microbatch size. Activations may be recomputed, and the optimizer's state may be sharded. A cluster has some
//! thousands of such configurations, few enough to add up the costs of their layers, and to predict those that may be the
//! best. The result is the best that such software can do, and a bound that a wider search must not be slower than.

use super::choice::{fits, peak_bytes};
use super::estimate::{Estimate, estimates};
use super::expectations::Expectations;
use super::layout::Layout;
use super::memory_bound::Lasting;
use crate::explain::alternatives;
use crate::features::parallelism::expert_products;
use crate::features::pins::pin_positions;
use crate::features::stacks::{Stack, stack};
use crate::features::target::{execution_at, one_group};
use crate::intra_op::layer::MemoryPrice;
use crate::layers::cache::at_microbatches;
use crate::layers::graph::LayeredGraph;
use crate::predict::predict_with;
use crate::request::{PlanFailure, Progress, Request};
use crate::search::fixed_degrees::{Degrees, finely_layered, fixed_of};
use altiplano_cost_models::Costs;
use altiplano_ir::batch::LossKind;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::gcd;
use altiplano_ir::plan::{Placement, Plan, Schedule, Stage, is_countable};
use altiplano_ir::recompute::Recompute;
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The degrees that a sweep covers.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    /// Samples per replica and microbatch.
    pub micro_batches: Vec<u64>,
    pub recompute: Vec<Recompute>,
    pub zero: Vec<u8>,
    /// Stages on the same devices.
    pub virtual_stages: Vec<u32>,
    /// If layers dealt out evenly just do not fit, or are too few, other layouts of them are tried.
    pub uneven: bool,
    /// Bytes count as well as seconds: configurations that can only be leaner, and no faster, are predicted as well.
    pub for_bytes: bool,
}

impl Default for Space {
    fn default() -> Self {
        Space {
            micro_batches: vec![1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64],
            recompute: Recompute::ALL.to_vec(),
            zero: vec![0, 1],
            virtual_stages: vec![1, 2],
            uneven: false,
            for_bytes: false,
        }
    }
}

/// True if the plans of a request have the same degrees on all stages and are swept.
pub fn is_uniform(request: &Request) -> bool {
    let asks = |degree: Option<u32>| degree.is_some_and(|degree| degree > 1);
    stack(request.target).uniform || asks(request.degrees.cp) || asks(request.degrees.groups)
}

/// A configuration and its plan.
#[derive(Clone, Debug)]
pub struct Swept {
    pub degrees: Degrees,
    pub plan: Plan,
}

/// Predicts the plan of a configuration. `request.graph` may have any batch; it is brought to the microbatch of the
/// degrees.
pub fn configured(request: &Request, degrees: &Degrees, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    one_group(request, "--baseline", request.target.name())?;
    Configurations::new(request).configured(degrees, costs)
}

/// One model at the microbatch sizes that configurations ask for. Requests that share it differ only in cluster, batch
/// and choices that leave the graph as it is.
#[derive(Default)]
pub struct ConfigurationCache {
    known: Mutex<BTreeMap<SizeKey, Arc<OnceLock<Option<LayeredGraph>>>>>,
}

/// Samples of a microbatch, and the degrees of context and expert parallelism, whose pins are part of the graph.
type SizeKey = (u64, Option<u32>, Option<u32>);

impl ConfigurationCache {
    /// Most sizes that are kept. Beyond it, all are made anew.
    const MOST: usize = 32;

    fn cell(&self, key: SizeKey) -> Arc<OnceLock<Option<LayeredGraph>>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= Self::MOST && !known.contains_key(&key) {
            known.clear();
        }
        known.entry(key).or_default().clone()
    }
}

/// A request whose configurations are predicted.
pub(super) struct Configurations<'a> {
    pub request: &'a Request,
    cache: Arc<ConfigurationCache>,
    /// Tokens are split between products for the memory that it saves.
    saves_memory: bool,
}

impl<'a> Configurations<'a> {
    pub fn new(request: &'a Request) -> Self {
        Configurations::among(request, &Arc::default())
    }

    pub(super) fn among(request: &'a Request, cache: &Arc<ConfigurationCache>) -> Self {
        Configurations { request, cache: cache.clone(), saves_memory: false }
    }

    fn memory(&self, degrees: &Degrees) -> MemoryPrice {
        if self.saves_memory && degrees.sequence { MemoryPrice::Large } else { MemoryPrice::None }
    }

    /// The model at a number of microbatches, if the batch divides into them.
    fn at(&self, count: u32) -> Arc<OnceLock<Option<LayeredGraph>>> {
        let given = self.request.degrees;
        let samples = match self.request.graph.batch {
            0 => 0,
            _ => self.request.global_batch_size() / u64::from(count),
        };
        let cell = self.cache.cell((samples, given.cp, given.ep));
        cell.get_or_init(|| {
            let mut graph = at_microbatches(self.request, count)?;
            if let Some(cp) = given.cp {
                pin_positions(Arc::make_mut(&mut graph), cp);
            }
            Some(finely_layered(&Request { graph, ..self.request.clone() }))
        });
        cell
    }

    /// Predicts the plan of a configuration.
    pub fn configured(&self, degrees: &Degrees, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
        self.assembled(degrees, costs, |plan, layered| {
            predict_with(plan, layered, costs, self.request.cache.as_deref())
        })
    }

    /// Like [`Configurations::configured`]; `None` if weights and optimizer state alone need more memory than a device
    /// has, which takes no prediction to know.
    pub fn configured_unless_too_large(
        &self,
        degrees: &Degrees,
        costs: &dyn Costs,
    ) -> Result<Option<Plan>, PlanFailure> {
        self.assembled(degrees, costs, |plan, layered| {
            let is_too_large = is_too_large(&plan);
            if is_too_large && !cfg!(debug_assertions) {
                return Ok(None);
            }
            let plan = predict_with(plan, layered, costs, self.request.cache.as_deref())?;
            debug_assert!(!is_too_large || !fits(&plan), "{degrees:?}");
            Ok(Some(plan))
        })
    }

    /// Passes on the plan of a configuration without predictions, and the model's layers.
    fn assembled<T>(
        &self,
        degrees: &Degrees,
        costs: &dyn Costs,
        then: impl FnOnce(Plan, &LayeredGraph) -> Result<T, PlanFailure>,
    ) -> Result<T, PlanFailure> {
        let cell = self.at(degrees.num_microbatches);
        let layered = cell.get().and_then(Option::as_ref).ok_or(PlanFailure::NoCombination)?;
        let execution = execution_at(self.request, degrees.zero);
        let request = Request { graph: layered.graph.clone(), execution, ..self.request.clone() };
        then(fixed_of(&request, layered, degrees, self.memory(degrees), costs)?, layered)
    }

    /// Estimates configurations that differ in recomputation, storage and the layers of their stages only. They have the
    /// same execution ([`Configurations::executed_as`]).
    pub fn estimates(&self, alike: &[Degrees], costs: &dyn Costs) -> Vec<Option<Estimate>> {
        let Some(first) = alike.first() else { return Vec::new() };
        let cell = self.at(first.num_microbatches);
        let Some(layered) = cell.get().and_then(Option::as_ref) else { return vec![None; alike.len()] };
        let execution = execution_at(self.request, first.zero);
        let request = Request { graph: layered.graph.clone(), execution, ..self.request.clone() };
        estimates(&request, layered, alike, self.memory(first), costs)
    }

    /// The least ZeRO level whose configurations are executed as those at each level.
    pub fn executed_as(&self) -> [u8; 4] {
        let executions = [0, 1, 2, 3].map(|level| execution_at(self.request, level));
        let first = |level: u8| (0..level).find(|&l| executions[usize::from(l)] == executions[usize::from(level)]);
        [0, 1, 2, 3].map(|level| first(level).unwrap_or(level))
    }

    /// Layouts for the stages of a configuration, those with the least work of any device first.
    pub fn layouts(&self, degrees: &Degrees) -> Vec<Layout> {
        let cell = self.at(degrees.num_microbatches);
        let Some(layered) = cell.get().and_then(Option::as_ref) else { return Vec::new() };
        let lanes = degrees.stages / degrees.virtual_stages.max(1);
        let placement = self.request.schedule.map_or(Placement::Loop, Schedule::placement);
        Layout::ranked(layered, degrees.stages, lanes, placement, degrees.num_microbatches)
    }
}

/// Returns true if the weights and the optimizer's state of some stage exceed the memory of its devices.
fn is_too_large(plan: &Plan) -> bool {
    let held = |stage: &Stage| -> u64 {
        let of = |(p, name): (ValueId, &str)| {
            let (Some(storage), ty) = (stage.parameters.get(name), plan.graph.ty(p)) else { return 0 };
            let weights = storage.parameter.local_bytes(ty, &stage.mesh);
            if plan.graph.is_frozen(p) || !plan.schedule.trains() {
                return weights;
            }
            let each = plan.optimizer.state_bytes_per_element(ty.dtype);
            weights + storage.state.local_bytes(ty, &stage.mesh) / ty.dtype.bytes() * each
        };
        plan.graph.parameters().map(of).sum()
    };
    plan.stages.iter().any(|stage| stage.offload.is_none() && held(stage) > plan.usable_bytes(stage))
}

/// Returns configurations on all devices that fit, fastest first: the best, and others that were expected to be near it.
/// Degrees that the request fixes are kept; tensor parallelism stays within a node.
///
/// # Errors
/// [`PlanFailure::Memory`] with the least memory that any of them needs, or [`PlanFailure::NoCombination`] if there is
/// none.
pub fn sweep(
    request: &Request,
    space: &Space,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<Vec<Swept>, PlanFailure> {
    sweep_of(&Configurations::new(request), space, costs, progress)
}

/// Like [`sweep`], with what other configurations of the request share.
pub(super) fn sweep_of(
    configurations: &Configurations<'_>,
    space: &Space,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<Vec<Swept>, PlanFailure> {
    let all = all_configurations(configurations.request, space);
    let mut expectations = Expectations::new(configurations, space.for_bytes, costs);
    let lasting = Lasting::of(configurations.request);
    let open: Vec<Degrees> = all.iter().filter(|degrees| lasting.may_fit(degrees)).copied().collect();
    let mut found = expectations.explore(&open, progress);
    let mut shapes: BTreeMap<([u32; 3], u32), Vec<Degrees>> = BTreeMap::new();
    all.into_iter().for_each(|degrees| shapes.entry(shape(&degrees)).or_default().push(degrees));
    let lean = |d: &Degrees| (d.virtual_stages, Reverse(d.recompute), Reverse(d.zero), Reverse(d.num_microbatches));
    let leanest: Vec<Degrees> = shapes.into_values().filter_map(|list| list.into_iter().min_by_key(lean)).collect();
    if space.uneven {
        let fits = |degrees: &&Degrees| found.iter().any(|swept: &Swept| shape(&swept.degrees) == shape(degrees));
        let others = leanest.iter().filter(|degrees| !fits(degrees));
        let others = others.filter(|degrees| lasting.may_fit(degrees));
        let others: Vec<Degrees> = others.flat_map(|degrees| other_layouts(configurations, degrees)).collect();
        found.extend(expectations.explore(&others, progress));
    }
    if found.is_empty() {
        found = closest(configurations, &leanest, costs)?;
    }
    found.sort_by(|a, b| a.plan.predicted.step_time_s.total_cmp(&b.plan.predicted.step_time_s));
    Ok(found)
}

/// The leanest configurations, predicted. Returns those that fit, against expectations.
fn closest(
    configurations: &Configurations<'_>,
    leanest: &[Degrees],
    costs: &dyn Costs,
) -> Result<Vec<Swept>, PlanFailure> {
    let predicted = leanest.par_iter().map(|degrees| {
        let plan = configurations.configured(degrees, costs).ok()?;
        Some(Swept { degrees: *degrees, plan })
    });
    let predicted = predicted.collect::<Vec<_>>().into_iter().flatten();
    let (found, too_large): (Vec<Swept>, Vec<Swept>) = predicted.partition(|swept| fits(&swept.plan));
    if !found.is_empty() {
        return Ok(found);
    }
    let least = too_large.into_iter().map(|swept| swept.plan).min_by_key(peak_bytes);
    Err(least.map_or(PlanFailure::NoCombination, |plan| {
        let shape = alternatives::shape(&plan);
        let detail = format!("{shape}, the leanest of {} combinations of dp, tp and pp", leanest.len());
        PlanFailure::of_closest(plan, detail)
    }))
}

/// Layouts that are tried in place of an even one.
const OTHER_LAYOUTS: usize = 3;

/// The same configuration with other layouts of its layers and with sequence parallelism, for layers that do not fit, or
/// are too few, when dealt out evenly.
fn other_layouts(configurations: &Configurations<'_>, degrees: &Degrees) -> Vec<Degrees> {
    let layouts = if degrees.stages > 1 { configurations.layouts(degrees) } else { Vec::new() };
    let layouts = layouts.into_iter().filter(|&layout| layout != Layout::Even).take(OTHER_LAYOUTS);
    let sequence = (degrees.tp > 1 && !degrees.sequence && stack(configurations.request.target).sequence)
        .then_some(Degrees { sequence: true, ..*degrees });
    layouts.map(|layout| Degrees { layout, ..*degrees }).chain(sequence).collect()
}

/// Most configurations that [`climb`] predicts.
const MOST_TRIED: usize = 40;
/// Number of configurations after which a climb gives up if none fits.
const MOST_UNFIT: usize = 16;
/// With fewer than this, a climb cannot go far.
const FEWEST_TRIED: usize = 6;
/// Total graph nodes of all predicted configurations.
const NODES_TRIED: usize = 60_000;
/// Layouts of layers that are tried under `zb-v`.
const LAYOUTS_IN_A_V: usize = 2;

/// Climbs from the configuration most like `start`, each time to the best of those that differ in one thing, until none
/// is better. Returns the plans that fit, in no order. The search adds up prices of layers, whose errors may exceed the
/// difference of two configurations. Uniform configurations are quick to predict.
pub fn climb(request: &Request, start: &Plan, costs: &dyn Costs, progress: &dyn Progress) -> Vec<Plan> {
    let most = MOST_TRIED.min(NODES_TRIED / request.graph.len().max(1));
    let all = all_configurations(request, &Space { virtual_stages: vec![1, 2, 4], ..Space::default() });
    if most < FEWEST_TRIED || all.is_empty() || request.cluster.groups.len() > 1 {
        return Vec::new();
    }
    let of_start = Degrees {
        dp: 1,
        tp: start.stages[0].mesh.axes.last().map_or(1, |axis| axis.size),
        cp: 1,
        stages: start.stages.len() as u32,
        virtual_stages: start.virtual_stages,
        num_microbatches: start.num_microbatches,
        zero: start.stages[0].zero.min(1),
        recompute: start.stages.iter().map(|s| s.recompute.most()).max().unwrap_or_default(),
        layout: Layout::Even,
        experts: 1,
        groups: 1,
        sequence: false,
    };
    let lasting = Lasting::of(request);
    let all: Vec<Degrees> = all.into_iter().filter(|degrees| lasting.may_fit(degrees)).collect();
    let nearest = all.iter().min_by(|a, b| distance(a, &of_start).total_cmp(&distance(b, &of_start)));
    let Some(mut at) = nearest.copied() else { return Vec::new() };
    let configurations = Configurations { saves_memory: true, ..Configurations::new(request) };
    let mut tried: Vec<Degrees> = Vec::new();
    let mut expectations = Expectations::new(&configurations, false, costs);
    let mut fitting = Vec::new();
    // By how much it exceeds memory, then by seconds.
    let mut best = (f64::INFINITY, f64::INFINITY);
    loop {
        let mut next: Vec<Degrees> = if tried.is_empty() { vec![at] } else { neighbours(&at, &all) };
        next.iter_mut().for_each(|d| d.sequence = at.sequence && d.tp > 1);
        if !tried.is_empty() && at.tp > 1 && stack(request.target).sequence {
            next.insert(0, Degrees { sequence: !at.sequence, ..at });
        }
        if !tried.is_empty() && at.zero > 0 && stack(request.target).groups && request.degrees.groups.is_none() {
            let groups = if at.groups > 1 { 1 } else { at.groups_of_nodes(&request.cluster) };
            next.push(Degrees { groups, ..at });
        }
        next.retain(|d| !tried.contains(d));
        next.truncate(most.saturating_sub(tried.len()));
        tried.extend(&next);
        // Beside a configuration that fits, those that do not are no better.
        expectations.estimate(&next);
        if best.0 <= 1.0 {
            next.retain(|d| expectations.is_near(d, best.1));
        }
        let predicted = expectations.predict(&next);
        let mut better = false;
        for Swept { degrees, plan } in predicted {
            let over = |s: &Stage| s.predicted.peak_bytes as f64 / plan.usable_bytes(s) as f64;
            let over = plan.stages.iter().map(over).fold(1.0, f64::max);
            let here = (over, plan.predicted.step_time_s);
            let is_better = here < best;
            if is_better {
                (best, at, better) = (here, degrees, true);
            }
            // Groups hold more than all replicas together, so that only speed speaks for them.
            if fits(&plan) && (degrees.groups == 1 || is_better) {
                fitting.push(plan);
            }
        }
        let hopeless = fitting.is_empty() && tried.len() >= MOST_UNFIT;
        if !better || hopeless || progress.stopped() {
            break;
        }
    }
    if !fitting.is_empty() && !progress.stopped() {
        fitting.extend(in_a_v(&configurations, &at, costs));
    }
    fitting
}

/// The pipeline with given degrees under `zb-v`, which has other stages, at its level of recomputation and those below.
/// Returns the plans that fit.
fn in_a_v(configurations: &Configurations<'_>, degrees: &Degrees, costs: &dyn Costs) -> Vec<Plan> {
    let request = &Request { schedule: Some(Schedule::ZbV), ..configurations.request.clone() };
    let (lanes, shared) = (degrees.stages / degrees.virtual_stages.max(1), request.degrees.virtual_stages);
    let runs = stack(request.target).schedules.contains(&Schedule::ZbV) && shared.is_none_or(|count| count == 2);
    if lanes < 2 || !runs {
        return Vec::new();
    }
    let configurations = Configurations::among(request, &configurations.cache);
    let is_open = |level: &Recompute| request.recompute.map_or(*level <= degrees.recompute, |given| given == *level);
    // The first lane has both ends of the model, so that fewer layers on them may be faster.
    let folded = Degrees { stages: 2 * lanes, virtual_stages: 2, ..*degrees };
    let layouts: Vec<Layout> = configurations.layouts(&folded).into_iter().take(LAYOUTS_IN_A_V).collect();
    let levels = Recompute::ALL.into_iter().filter(is_open);
    let all = levels.flat_map(|recompute| layouts.iter().map(move |&layout| Degrees { recompute, layout, ..folded }));
    let all: Vec<Degrees> = all.collect();
    let predicted = all.par_iter().map(|degrees| configurations.configured(degrees, costs).ok().filter(fits));
    predicted.collect::<Vec<_>>().into_iter().flatten().collect()
}

/// Replicas, tensor-parallel devices and lanes.
pub(super) fn devices(degrees: &Degrees) -> [u32; 3] {
    [degrees.dp, degrees.tp, degrees.stages / degrees.virtual_stages.max(1)]
}

/// The devices, and the replicas that divide the experts.
pub(super) fn shape(degrees: &Degrees) -> ([u32; 3], u32) {
    (devices(degrees), degrees.experts)
}

/// Number of things in which two configurations differ, where a factor of two counts as one.
pub(super) fn distance(a: &Degrees, b: &Degrees) -> f64 {
    let lanes = |d: &Degrees| d.stages / d.virtual_stages.max(1);
    let factor = |a: u32, b: u32| (f64::from(a.max(1)) / f64::from(b.max(1))).log2().abs();
    let differs = |differs: bool| f64::from(u8::from(differs));
    factor(a.tp, b.tp)
        + factor(lanes(a), lanes(b))
        + factor(a.num_microbatches, b.num_microbatches)
        + factor(a.experts, b.experts)
        + differs(a.virtual_stages != b.virtual_stages)
        + differs(a.zero != b.zero)
        + differs(a.recompute != b.recompute)
        + differs(a.layout != b.layout)
        + differs(a.sequence != b.sequence)
        + differs(a.groups != b.groups)
}

/// Configurations that differ from one in one thing: the next larger or smaller number of tensor-parallel devices, of
/// lanes with that or instead of it, or of microbatches, or one of the options. Dependent values, such as a microbatch
/// size that the replicas divide, are as near as possible.
fn neighbours(at: &Degrees, all: &[Degrees]) -> Vec<Degrees> {
    let lanes = |d: &Degrees| d.stages / d.virtual_stages.max(1);
    let options = |d: &Degrees| (d.virtual_stages, d.zero, d.recompute);
    // The next values of something above and below that of `at`.
    let next = |value: &dyn Fn(&Degrees) -> u32, within: &dyn Fn(&Degrees) -> bool| -> Vec<u32> {
        let values = || all.iter().filter(|d| within(d)).map(value);
        let above = values().filter(|v| *v > value(at)).min();
        let below = values().filter(|v| *v < value(at)).max();
        above.into_iter().chain(below).collect()
    };
    let tps = next(&|d| d.tp, &|_| true);
    let depths = next(&lanes, &|_| true);
    let mut shapes: Vec<(u32, u32)> = tps.iter().map(|&tp| (tp, lanes(at))).collect();
    shapes.extend(depths.iter().map(|&pp| (at.tp, pp)));
    shapes.extend(tps.iter().flat_map(|&tp| depths.iter().map(move |&pp| (tp, pp))).filter(|&(tp, pp)| {
        // The same number of replicas.
        u64::from(tp) * u64::from(pp) == u64::from(at.tp) * u64::from(lanes(at))
    }));
    let mut found: Vec<Degrees> = Vec::new();
    let mut add = |wanted: &dyn Fn(&Degrees) -> bool| {
        let nearest = all.iter().filter(|d| wanted(d)).min_by(|a, b| distance(a, at).total_cmp(&distance(b, at)));
        found.extend(nearest.filter(|d| *d != at));
    };
    for (tp, pp) in shapes {
        add(&|d| (d.tp, lanes(d)) == (tp, pp) && options(d) == options(at));
    }
    let same_shape = |d: &Degrees| (d.tp, lanes(d)) == (at.tp, lanes(at));
    for count in next(&|d| d.num_microbatches, &|d| same_shape(d) && options(d) == options(at)) {
        add(&|d| same_shape(d) && options(d) == options(at) && d.num_microbatches == count);
    }
    // The next level of recomputation that some configuration has.
    let next_level = |d: &Degrees| {
        let between = |other: &Degrees| {
            let (low, high) = (at.recompute.min(d.recompute), at.recompute.max(d.recompute));
            same_shape(other) && low < other.recompute && other.recompute < high
        };
        d.recompute != at.recompute && !all.iter().any(between)
    };
    for recompute in Recompute::ALL {
        let level = |d: &Degrees| d.recompute == recompute && next_level(d);
        add(&|d| same_shape(d) && level(d) && (d.virtual_stages, d.zero) == (at.virtual_stages, at.zero));
    }
    add(&|d| same_shape(d) && options(d) == (at.virtual_stages, 1 - at.zero.min(1), at.recompute));
    let shared = |d: &Degrees| same_shape(d) && (d.zero, d.recompute) == (at.zero, at.recompute);
    for virtual_stages in next(&|d| d.virtual_stages, &shared) {
        add(&|d| shared(d) && d.virtual_stages == virtual_stages);
    }
    found
}

/// All configurations that use every device, with layers dealt out evenly.
pub(super) fn all_configurations(request: &Request, space: &Space) -> Vec<Degrees> {
    let grid = Grid { request, space, stack: stack(request.target), cp: request.degrees.cp.unwrap_or(1).max(1) };
    let mut all = Vec::new();
    for (dp, tp, stages) in grid.shapes() {
        for num_microbatches in grid.microbatches(dp) {
            for recompute in grid.recomputations() {
                for zero in grid.levels(dp, tp, stages) {
                    for virtual_stages in grid.turns(stages, num_microbatches) {
                        let (stages, layout) = (stages.saturating_mul(virtual_stages), Layout::Even);
                        let (cp, experts, groups, sequence) = (grid.cp, 1, 1, false);
                        if is_countable(num_microbatches, stages as usize) {
                            all.push(Degrees {
                                dp,
                                tp,
                                cp,
                                stages,
                                virtual_stages,
                                num_microbatches,
                                zero,
                                recompute,
                                layout,
                                experts,
                                groups,
                                sequence,
                            });
                        }
                    }
                }
            }
        }
    }
    // Degrees that leave one replica shard nothing, and are for requests that leave no other.
    let shards = |d: &Degrees| d.dp * d.cp > 1;
    if request.degrees.zero.is_some_and(|level| level > 0) && all.iter().any(shards) {
        all.retain(shards);
    }
    if let Some(groups) = request.degrees.groups {
        all.retain(|d| groups > 0 && d.dp.is_multiple_of(groups) && (d.zero > 0 || groups == 1));
        all.iter_mut().for_each(|d| d.groups = groups);
    }
    with_experts(request, &mut all);
    all
}

/// The choices of uniform configurations, one after the other.
struct Grid<'a> {
    request: &'a Request,
    space: &'a Space,
    stack: Stack,
    cp: u32,
}

impl Grid<'_> {
    /// Replicas, devices of tensor parallelism and stages, which together take all devices.
    fn shapes(&self) -> Vec<(u32, u32, u32)> {
        let (degrees, group) = (&self.request.degrees, &self.request.cluster.groups[0]);
        let devices = self.request.cluster.num_devices() / self.cp;
        let divisors = |n: u32| (1..=n).filter(move |d| n % d == 0);
        let given = |degree: Option<u32>, value: u32| degree.is_none_or(|d| d == value);
        // Tensor parallelism stays within a node unless it is asked for.
        let within = divisors(group.devices_per_node).filter(|&tp| given(degrees.tp, tp) && devices % tp == 0);
        let beyond = degrees.tp.filter(|&tp| tp > group.devices_per_node && devices % tp == 0);
        let mut shapes = Vec::new();
        for tp in within.chain(beyond).filter(|&tp| tp == 1 || self.stack.tensor) {
            let depths = divisors(devices / tp).filter(|&pp| given(degrees.pp, pp));
            let shape = |stages| (devices / tp / stages, tp, stages);
            let possible = depths.filter(|&pp| pp == 1 || self.stack.pipelines).map(shape);
            shapes.extend(possible.filter(|&(dp, ..)| given(degrees.dp, dp)));
        }
        shapes
    }

    /// Numbers of microbatches for so many replicas.
    fn microbatches(&self, dp: u32) -> Vec<u32> {
        let Request { batch, graph, loss, .. } = self.request;
        let (dp, global) = (u64::from(dp).max(1), self.request.global_batch_size());
        // A graph that keeps its traced batch runs as often as requested.
        let is_traced = graph.batch == 0;
        // If the loss is no mean over samples, more microbatches would train something else.
        let whole = *loss == LossKind::Other && !self.request.allow_microbatch_semantics && !is_traced;
        // A given size need not be among those that are tried.
        let asked = batch.microbatch.or(batch.num_microbatches.map(|n| global / u64::from(n).max(1)));
        let sizes = match asked.filter(|_| !is_traced) {
            Some(samples) => vec![samples / dp],
            None if whole => vec![global / dp],
            None if is_traced => vec![1],
            None => self.space.micro_batches.clone(),
        };
        let count = |size: u64| {
            let together = if is_traced { 1 } else { size * dp };
            let fits = size > 0 && global % together == 0 && batch.microbatch.is_none_or(|m| m == together);
            let count = u32::try_from(global / together.max(1)).ok().filter(|_| fits)?;
            ((!whole || count == 1) && batch.num_microbatches.is_none_or(|n| n == count)).then_some(count)
        };
        sizes.into_iter().filter_map(count).collect()
    }

    fn recomputations(&self) -> impl Iterator<Item = Recompute> {
        // Fused attention recomputes its products anyway, so selective recomputation is no choice.
        let possible = |r: &Recompute| match self.request.recompute {
            Some(given) => given == *r,
            None => *r != Recompute::Selective || self.request.execution.has_selective(),
        };
        self.space.recompute.iter().copied().filter(possible)
    }

    /// Levels of ZeRO.
    fn levels(&self, dp: u32, tp: u32, stages: u32) -> Vec<u8> {
        // A single replica stores all itself, whatever the level.
        let alone = dp == 1 && self.cp == 1;
        let asked = self.request.degrees.zero.map(|level| vec![level]);
        let levels = match (asked, alone) {
            (Some(_), true) => vec![0],
            (None, true) => self.space.zero.iter().copied().filter(|&level| level == 0).collect(),
            (asked, false) => asked.unwrap_or(self.space.zero.clone()),
        };
        levels.into_iter().filter(|&level| alone || self.stack.shards(level, tp, stages)).collect()
    }

    /// Numbers of stages that share devices.
    fn turns(&self, lanes: u32, num_microbatches: u32) -> Vec<u32> {
        let given = self.request.degrees.virtual_stages.map(|v| vec![v.max(1)]);
        let schedule = self.request.schedule.unwrap_or(Schedule::OneFOneB);
        let mut all = given.unwrap_or(self.space.virtual_stages.clone());
        all.retain(|&v| (v == 1 || lanes > 1) && schedule.can_share(v, num_microbatches.into(), lanes));
        all
    }
}

/// Adds configurations that deal experts out to replicas: as `--ep` asks, or as software with expert parallelism may. Those
/// of software that splits tokens beside experts all do.
fn with_experts(request: &Request, all: &mut Vec<Degrees>) {
    let stack = stack(request.target);
    let products = expert_products(&request.graph);
    let counts = products.iter().map(|&(v, dim)| request.graph.shape(v)[dim]);
    let Some(count) = counts.reduce(gcd) else { return };
    if stack.sequence_with_experts {
        all.iter_mut().for_each(|d| d.sequence = d.tp > 1);
    }
    let over = |d: &Degrees| match request.degrees.ep {
        _ if stack.experts_shard && d.zero == 0 => Vec::new(),
        Some(ep) => d.replicas_of_experts(ep),
        None if stack.uniform && stack.experts => {
            let most = gcd(d.dp.into(), count) as u32;
            (2..=most).filter(|experts| most.is_multiple_of(*experts)).collect()
        }
        None => Vec::new(),
    };
    let mut added = Vec::new();
    for degrees in all.iter() {
        let choices = over(degrees).into_iter().filter(|&experts| experts > 1);
        added.extend(choices.map(|experts| Degrees { experts, ..*degrees }));
    }
    all.extend(added);
}

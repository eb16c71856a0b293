//! The best plan of software that runs one set of degrees on all stages.
//!
//! A sweep predicts all degrees with layers dealt out evenly. From its best configurations, a climb varies how layers
//! are dealt out, how many stages share devices, sequence parallelism, and the rest with them.

use super::choice::fits;
use super::expectations::Expectations;
use super::fixed_degrees::Degrees;
use super::layout::Layout;
use super::sweep::{Configurations, Space, Swept, all_configurations, devices, shape, sweep_of};
use crate::explain::alternatives;
use crate::features::overlaps;
use crate::features::stacks::stack;
use crate::request::{PlanFailure, Progress, Request};
use altiplano_cost_models::Costs;
use altiplano_ir::plan::{Plan, Stage, Target};
use rayon::prelude::*;

/// Meshes and numbers of lanes from which a climb starts.
const STARTS: usize = 4;
/// A shape whose best even configuration is slower than the best of all by this factor is left alone.
const FAR_BEHIND: f64 = 1.6;
/// Layouts of one number of stages that a climb tries at once.
const LAYOUTS: usize = 2;
/// Most stages on the same devices.
const MOST_SHARED: u32 = 16;
/// Total graph nodes of all configurations that one climb predicts.
const NODES_CLIMBED: usize = 120_000;
/// Fewest configurations that one climb may predict.
const FEWEST_CLIMBED: usize = 12;

/// The best configuration that the target runs, with the next ones as alternatives.
pub fn best(request: &Request, costs: &dyn Costs, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    let mut plans = overlaps::best_with_overlaps(all(request, false, costs, progress)?, costs)?;
    let mut best = plans.remove(0);
    best.alternatives = alternatives::alternatives(&best, &plans);
    Ok(best)
}

/// The configurations that the target runs and that fit, fastest first; at least one. `for_bytes`: see [`Space`].
pub(super) fn all(
    request: &Request,
    for_bytes: bool,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<Vec<Plan>, PlanFailure> {
    let stack = stack(request.target);
    let mut space = Space { zero: stack.zero.to_vec(), for_bytes, ..Space::default() };
    if request.target == Target::Altiplano {
        space.zero.retain(|&level| level != 2);
    }
    if !stack.virtual_stages {
        space.virtual_stages = vec![1];
    }
    space.uneven = stack.uneven;
    let known = Configurations::new(request);
    let mut found = sweep_of(&known, &space, costs, progress)?;
    if stack.uniform {
        found.extend(with_layouts(&known, &space, &found, costs, progress));
        found.sort_by(|a, b| a.plan.predicted.step_time_s.total_cmp(&b.plan.predicted.step_time_s));
    }
    Ok(found.into_iter().map(|swept| swept.plan).collect())
}

/// The degrees of a pipeline whose stages are alike, with other layouts of its layers. Layers are cut more finely than in
/// a search over stages, so that those at the ends have fewer. Returns the plans that fit.
pub(super) fn laid_out(request: &Request, plan: &Plan, costs: &dyn Costs) -> Vec<Plan> {
    let Some(degrees) = degrees_of(plan) else { return Vec::new() };
    let known = Configurations::new(request);
    let layouts = known.layouts(&degrees).into_iter().take(LAYOUTS);
    let layouts: Vec<Degrees> = layouts.map(|layout| Degrees { layout, ..degrees }).collect();
    let predicted = layouts.par_iter().map(|degrees| known.configured(degrees, costs).ok().filter(fits));
    predicted.collect::<Vec<_>>().into_iter().flatten().collect()
}

/// The degrees of a pipeline whose stages have the same replicas and tensor-parallel devices, storage and recomputation.
fn degrees_of(plan: &Plan) -> Option<Degrees> {
    let first = plan.stages.first().filter(|_| plan.stages.len() > 1)?;
    let [data, tensor] = first.mesh.axes.as_slice() else { return None };
    let level = |stage: &Stage| stage.recompute.most();
    let whole = |stage: &Stage| stage.layers.clone().all(|layer| stage.recomputes(layer) == level(stage));
    let alike = |stage: &Stage| {
        (&stage.mesh, stage.zero, level(stage)) == (&first.mesh, first.zero, level(first)) && whole(stage)
    };
    let is_plain = (data.name.as_str(), tensor.name.as_str()) == ("data", "tensor") && plan.padding.is_none();
    (is_plain && plan.stages.iter().all(alike)).then(|| Degrees {
        dp: data.size,
        tp: tensor.size,
        cp: 1,
        stages: plan.stages.len() as u32,
        virtual_stages: plan.virtual_stages,
        num_microbatches: plan.num_microbatches,
        zero: first.zero,
        recompute: level(first),
        layout: Layout::Even,
        experts: 1,
        groups: 1,
        sequence: tensor.size > 1,
    })
}

/// Climbs from the best configuration of each promising pipeline. `swept` is sorted by time.
fn with_layouts(
    known: &Configurations<'_>,
    space: &Space,
    swept: &[Swept],
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Vec<Swept> {
    let request = known.request;
    let most_s = swept.first().map_or(0.0, |best| FAR_BEHIND * best.plan.predicted.step_time_s);
    let mut starts: Vec<&Swept> = Vec::new();
    let varies =
        |s: &&Swept| s.degrees.stages > 1 || s.degrees.tp > 1 || s.degrees.groups_of_nodes(&request.cluster) > 1;
    for candidate in swept.iter().filter(varies).filter(|s| s.plan.predicted.step_time_s <= most_s) {
        if starts.len() < STARTS && starts.iter().all(|start| devices(&start.degrees) != devices(&candidate.degrees)) {
            starts.push(candidate);
        }
    }
    let shared = if stack(request.target).virtual_stages { (1..=MOST_SHARED).collect() } else { vec![1] };
    let all = all_configurations(request, &Space { virtual_stages: shared, ..space.clone() });
    let climbed = starts.par_iter().map(|start| climb(known, &all, space, start, costs, progress));
    climbed.collect::<Vec<_>>().into_iter().flatten().collect()
}

/// Goes to the best configuration that differs in one thing until none is better. `start` is the best of its shape in a
/// sweep over `swept_space`. Returns all others that fit.
fn climb(
    known: &Configurations<'_>,
    all: &[Degrees],
    swept_space: &Space,
    start: &Swept,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Vec<Swept> {
    let mut left = (NODES_CLIMBED / start.plan.graph.len().max(1)).max(FEWEST_CLIMBED);
    let alike: Vec<Degrees> = all.iter().filter(|d| shape(d) == shape(&start.degrees)).copied().collect();
    let (mut at, mut best_s) = (start.degrees, start.plan.predicted.step_time_s);
    let mut tried = vec![at];
    let mut fitting: Vec<Swept> = Vec::new();
    let mut expectations = Expectations::new(known, false, costs);
    expectations.estimate(&[at]);
    expectations.know(&at, &start.plan);
    loop {
        let mut next = around(known, &alike, &at);
        next.retain(|degrees| !tried.contains(degrees) && !is_swept(known.request, degrees, swept_space, &alike));
        tried.extend(&next);
        expectations.estimate(&next);
        next.retain(|degrees| expectations.is_near(degrees, best_s));
        next.truncate(left);
        left -= next.len();
        let mut better = false;
        for swept in expectations.predict(&next).into_iter().filter(|swept| fits(&swept.plan)) {
            let step_s = swept.plan.predicted.step_time_s;
            if step_s < best_s {
                (at, best_s, better) = (swept.degrees, step_s, true);
            }
            fitting.push(swept);
        }
        if !better || left == 0 || progress.stopped() {
            return fitting;
        }
    }
}

/// True if a sweep over a space has a configuration. The best of a shape is known then. `alike` are swept, with more
/// stages that share devices.
fn is_swept(request: &Request, degrees: &Degrees, space: &Space, alike: &[Degrees]) -> bool {
    degrees.layout == Layout::Even
        && alike.iter().any(|swept| swept.sequence == degrees.sequence)
        && degrees.groups == request.degrees.groups.unwrap_or(1)
        && space.virtual_stages.contains(&degrees.virtual_stages)
}

/// Configurations of the same shape that differ in one thing: in the layout of layers, in sequence parallelism, in the
/// next larger or smaller number of stages that share devices or of microbatches, in storage, in its groups, or in
/// recomputation. This one fits, so that repeating more is not worth trying.
fn around(known: &Configurations<'_>, alike: &[Degrees], at: &Degrees) -> Vec<Degrees> {
    let stack = stack(known.request.target);
    let layouts = |degrees: Degrees| {
        let ranked = if stack.uneven { known.layouts(&degrees) } else { vec![Layout::Even] };
        let ranked = ranked.into_iter().take(LAYOUTS);
        ranked.map(move |layout| Degrees { layout, sequence: at.sequence, groups: at.groups, ..degrees })
    };
    let others = |d: &Degrees| (d.virtual_stages, d.num_microbatches, d.zero, d.recompute);
    let (shared, count, zero, recompute) = others(at);
    let next = |value: fn(&Degrees) -> u32, differ: &dyn Fn(&&Degrees) -> bool| {
        let above = alike.iter().filter(differ).filter(|d| value(d) > value(at)).min_by_key(|d| value(d));
        let below = alike.iter().filter(differ).filter(|d| value(d) < value(at)).max_by_key(|d| value(d));
        above.into_iter().chain(below).copied().collect::<Vec<_>>()
    };
    let mut found: Vec<Degrees> = if at.stages > 1 { layouts(*at).collect() } else { Vec::new() };
    for degrees in
        next(|d| d.virtual_stages, &|d| (d.num_microbatches, d.zero, d.recompute) == (count, zero, recompute))
    {
        found.extend(layouts(degrees));
    }
    let same = |degrees: &Degrees| Degrees { layout: at.layout, sequence: at.sequence, groups: at.groups, ..*degrees };
    // Sequence parallelism keeps less, so that less has to be recomputed. Some software leaves no choice.
    if at.tp > 1 && stack.sequence && alike.iter().any(|d| !d.sequence) {
        let levels = alike.iter().filter(|d| (d.virtual_stages, d.num_microbatches, d.zero) == (shared, count, zero));
        let levels = levels.filter(|d| at.sequence || d.recompute <= recompute);
        found.extend(levels.map(|d| Degrees { layout: at.layout, sequence: !at.sequence, groups: at.groups, ..*d }));
    }
    let counts =
        next(|d| d.num_microbatches, &|d| (d.virtual_stages, d.zero, d.recompute) == (shared, zero, recompute));
    found.extend(counts.iter().map(same));
    let options = alike.iter().filter(|d| (d.virtual_stages, d.num_microbatches) == (shared, count));
    let no_leaner = |d: &&Degrees| d.zero == zero && d.recompute <= recompute || d.recompute == recompute;
    found.extend(options.filter(no_leaner).map(same));
    if stack.groups && zero > 0 && known.request.degrees.groups.is_none() {
        let groups = if at.groups > 1 { 1 } else { at.groups_of_nodes(&known.request.cluster) };
        found.push(Degrees { groups, ..*at });
    }
    found
}

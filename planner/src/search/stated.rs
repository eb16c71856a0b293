//! Configurations as training software states them: degrees that hold for the whole model, repeated layers by stage, and
//! the part of each stage that is recomputed. They are read from files of that software and predicted like any plan.

use super::choice::fits;
use super::fixed_degrees::{Degrees, dealt, dealt_evenly, finely_layered, of_stages, repeated};
use crate::features::padding::{padded, with_padding};
use crate::features::pins::{pin_positions, with_pins};
use crate::features::target::one_group;
use crate::intra_op::layer::MemoryPrice;
use crate::intra_op::recompute_fraction::RecomputeFraction;
use crate::layers::cache::at_microbatches;
use crate::layers::cluster_finely;
use crate::layers::graph::LayeredGraph;
use crate::predict::predict_with;
use crate::request::{PlanFailure, Request};
use crate::search::baselines::LARGE_MODEL;
use altiplano_cost_models::Costs;
use altiplano_ir::graph::{Graph, Pin, PinnedDim, ValueId};
use altiplano_ir::plan::Plan;
use altiplano_ir::recompute::{Recomputation, Recompute};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// A stated configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Stated {
    pub degrees: Degrees,
    /// Degree of expert parallelism.
    pub ep: u32,
    /// Devices that split the features of an expert, if that is stated. They are tensor-parallel ones.
    pub etp: Option<u32>,
    /// Repeated layers of each stage, in the order of the model. `None` deals them out evenly.
    pub blocks: Option<Vec<u32>>,
    /// Number of a stage's first repeated layers that are recomputed fully, if not all. The others follow `degrees`.
    pub full_blocks: Option<u32>,
    /// False if values between layers are whole on all tensor-parallel devices (no sequence parallelism). Otherwise
    /// the search decides.
    pub splits_positions: bool,
}

/// Predicts a stated configuration. `request.graph` may have any batch; it is brought to the microbatch of the degrees.
/// The caller checks that the plan fits.
///
/// # Errors
/// [`PlanFailure`] if the cluster has several groups, or if devices, samples or layers cannot be divided so.
pub fn predict_stated(request: &Request, stated: &Stated, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    one_group(request, "--target", request.target.name())?;
    let Degrees { dp, tp, cp, stages, virtual_stages, zero, .. } = stated.degrees;
    let mut request = request.clone();
    let given = &mut request.degrees;
    (given.dp, given.tp, given.zero) = (Some(dp), Some(tp), Some(zero));
    (given.pp, given.virtual_stages) = (Some(stages / virtual_stages.max(1)), Some(virtual_stages));
    // A degree of 1 asks for nothing.
    (given.cp, given.ep) = (Some(cp).filter(|&cp| cp > 1), Some(stated.ep).filter(|&ep| ep > 1));
    let request = &with_pins(&request)?;
    // Software pads what its devices do not divide, as the search does.
    if request.graph.len() > LARGE_MODEL || request.has_gpus() {
        let slight = padded(request).into_iter().next().filter(|(_, padding)| padding.is_slight());
        if let Some((larger, padding)) = slight
            && let Ok(plan) = unpadded(&larger, stated, costs)
            && fits(&plan)
        {
            return Ok(with_padding(plan, &padding));
        }
    }
    unpadded(request, stated, costs)
}

/// Number of blocks of a model, which stages divide among them.
pub fn num_blocks(request: &Request) -> u32 {
    blocks(&finely_layered(request)).len() as u32
}

/// The layer in which each block of a model begins, in order. Blocks are what its parameters' names number from 0, if
/// that finds as many as layers of the most common kind: software deals those out to stages, of whatever kinds they are.
fn blocks(layered: &LayeredGraph) -> Vec<usize> {
    let mut begins: BTreeMap<&str, BTreeMap<u32, usize>> = BTreeMap::new();
    for (v, name) in layered.graph.parameters() {
        let Some((start, number)) = numbered(name) else { continue };
        let of_users = layered.users[v.index()].iter().filter_map(|user| layered.layer_of[user.index()]);
        let Some(layer) = of_users.min() else { continue };
        let begin = begins.entry(start).or_default().entry(number).or_insert(usize::MAX);
        *begin = (*begin).min(layer as usize);
    }
    let counted = begins.into_values().filter(|numbers| numbers.contains_key(&0));
    let mut named: Vec<usize> = counted.flat_map(BTreeMap::into_values).collect();
    named.sort_unstable();
    let alike = repeated(&layered.kinds);
    if named.len() < alike.len() { alike } else { named }
}

/// The name up to the first number, and that number: `model.layers.` and 3 of `model.layers.3.mlp.weight`.
fn numbered(name: &str) -> Option<(&str, u32)> {
    let first = name.find(|c: char| c.is_ascii_digit())?;
    let digits = name[first..].find(|c: char| !c.is_ascii_digit()).unwrap_or(name.len() - first);
    Some((&name[..first], name[first..first + digits].parse().ok()?))
}

/// Blocks of each stage of a plan, and how many of them it recomputes at each level. A block that is cut counts where it
/// begins.
pub fn blocks_of(plan: &Plan) -> Vec<(u32, [u32; 3])> {
    let positions = blocks(&LayeredGraph::of_plan(plan));
    let of_stage = |stage: &altiplano_ir::plan::Stage| {
        let own = positions.iter().filter(|&&l| stage.layers.contains(&(l as u32)));
        own.fold((0, [0; 3]), |(count, mut levels), &l| {
            levels[stage.recomputes(l as u32) as usize] += 1;
            (count + 1, levels)
        })
    };
    plan.stages.iter().map(of_stage).collect()
}

fn unpadded(request: &Request, stated: &Stated, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let degrees = &stated.degrees;
    let mut graph = at_microbatches(request, degrees.num_microbatches).ok_or(PlanFailure::NoCombination)?;
    if let Some(cp) = request.degrees.cp {
        pin_positions(Arc::make_mut(&mut graph), cp);
    }
    if !stated.splits_positions && degrees.tp > 1 && degrees.cp <= 1 {
        pin_whole(Arc::make_mut(&mut graph), degrees.dp);
    }
    let request = Request { graph, ..request.clone() };
    let layered = finely_layered(&request);
    let stages = stages(&layered, stated)?;
    let predicted = |degrees: &Degrees| {
        let plan = of_stages(&request, &layered, degrees, stages.clone(), MemoryPrice::None, costs)?;
        predict_with(plan, &layered, costs, request.cache.as_deref())
    };
    if let Some(experts) = stated.replicas_of_experts()
        && let Ok(plan) = predicted(&Degrees { experts, ..*degrees })
    {
        return Ok(plan);
    }
    degrees.best_for_experts(Some(stated.ep), predicted)
}

impl Stated {
    /// Replicas that divide the experts, if it is stated how many devices share an expert: experts are dealt out to the
    /// innermost devices first.
    fn replicas_of_experts(&self) -> Option<u32> {
        let each = self.degrees.tp.checked_mul(self.degrees.cp)?;
        let devices = self.ep.checked_mul(self.etp?).filter(|_| self.ep > 1)?;
        devices.is_multiple_of(each).then(|| devices / each)
    }
}

/// The layers of each stage and the part of them that is recomputed.
fn stages(layered: &LayeredGraph, stated: &Stated) -> Result<Vec<(Range<usize>, RecomputeFraction)>, PlanFailure> {
    let (positions, num_stages) = (blocks(layered), stated.degrees.stages);
    let too_few = || PlanFailure::TooFewLayers { layers: positions.len() as u32, stages: num_stages };
    let runs = match &stated.blocks {
        None => dealt_evenly(layered.kinds.len(), &positions, num_stages as usize),
        Some(counts) => dealt(layered.kinds.len(), &positions, &in_repeated(counts, positions.len())),
    };
    let fraction = |run: &Range<usize>| match stated.full_blocks {
        None => RecomputeFraction::uniform(stated.degrees.recompute),
        Some(count) => {
            // The layers up to the first block that is kept.
            let own: Vec<usize> = positions.iter().copied().filter(|l| run.contains(l)).collect();
            let end = if count == 0 { run.start } else { own.get(count as usize).copied().unwrap_or(run.end) };
            let level = |l: usize| if l < end { Recompute::Full } else { stated.degrees.recompute };
            let levels: Recomputation = run.clone().map(level).collect::<Vec<_>>().into();
            RecomputeFraction::of(&levels, run.len())
        }
    };
    let runs = runs.ok_or_else(too_few)?;
    Ok(runs.into_iter().map(|run| (run.clone(), fraction(&run))).collect())
}

/// The counts of layers by stage as counts of the most common kind. Layers of other kinds, such as dense ones before
/// those with experts, come first. If a repeated unit has several layers, stages have whole units.
fn in_repeated(counts: &[u32], repeated: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = counts.iter().map(|&count| count as usize).collect();
    let all: usize = counts.iter().sum();
    if repeated > 0 && all > repeated && all.is_multiple_of(repeated) {
        let unit = all / repeated;
        if counts.iter().all(|count| count.is_multiple_of(unit)) {
            return counts.iter().map(|count| count / unit).collect();
        }
    }
    let mut others = all.saturating_sub(repeated);
    for count in &mut counts {
        let before = others.min(*count);
        (*count, others) = (*count - before, others - before);
    }
    counts
}

/// Keeps values that pass between layers whole but for their samples, of which each replica has its own.
fn pin_whole(graph: &mut Graph, replicas: u32) {
    let layered = LayeredGraph::new(graph.clone(), cluster_finely(graph, usize::MAX), &[], true);
    let passed: BTreeSet<ValueId> = layered.layers.iter().flat_map(|l| l.entering.iter().copied()).collect();
    for value in passed {
        let node = graph.node(value);
        if !node.ty.dtype.is_float() || node.ty.rank() != 3 {
            continue;
        }
        let dims = (0..node.ty.rank()).map(|d| PinnedDim {
            axes: if node.batch_dims >> d & 1 == 1 { vec!["data".to_string()] } else { Vec::new() },
            open: false,
        });
        let (mesh, dims) = (vec![("data".to_string(), u64::from(replicas))], dims.collect());
        graph.pin(Pin { value, mesh, dims });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_other_kinds_come_first() {
        assert_eq!(in_repeated(&[2, 2, 1], 5), [2, 2, 1]);
        assert_eq!(in_repeated(&[4, 4, 3], 8), [1, 4, 3]);
        assert_eq!(in_repeated(&[6, 4, 4, 2], 8), [3, 2, 2, 1]);
        assert_eq!(in_repeated(&[1, 3], 2), [0, 2]);
    }

    #[test]
    fn stages_are_cut_by_counts() {
        // A layer before, five repeated ones with something in between, and a head.
        let kinds = [0, 1, 1, 2, 1, 1, 1, 3];
        let positions = repeated(&kinds);
        assert_eq!(positions, [1, 2, 4, 5, 6]);
        assert_eq!(dealt(8, &positions, &[1, 3, 1]), Some(vec![0..2, 2..6, 6..8]));
        assert_eq!(dealt(8, &positions, &[2, 3, 0]), Some(vec![0..4, 4..7, 7..8]));
        assert_eq!(dealt(8, &positions, &[2, 2]), None);
        assert_eq!(dealt(7, &positions, &[2, 3, 0]), None);
    }
}

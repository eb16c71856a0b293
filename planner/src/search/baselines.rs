//! The plain ways to parallelise, as a comparison for the chosen plan.

use super::choice::fits;
use super::closest::leanest;
use super::context::SearchContext;
use super::fitting::plans_that_fit;
use super::predictor::Calibration;
use super::space::SearchSpace;
use crate::count;
use crate::explain::alternatives::recomputed;
use crate::inter_op::search::num_devices;
use crate::layers;
use crate::request::{GivenDegrees, Muted, PlanFailure};
use altiplano_ir::plan::{Alternative, Plan, Target};
use altiplano_ir::recompute::Recompute;
use rayon::prelude::*;

/// Nodes from which on predicting a plan of a single stage takes seconds.
pub const LARGE_MODEL: usize = 8_000;
/// Baselines whose estimate is this many times slower than the best plan are not predicted in a large model. In others,
/// only one such candidate is.
const FAR_BEHIND: f64 = 4.0;

/// A plain way to parallelise, and its best plan that fits, else the leanest.
pub struct Baseline {
    name: &'static str,
    plan: Result<Plan, PlanFailure>,
}

/// Predicts the baselines, if the request asks for them. In a large model, baselines that do not fit or are far behind
/// `best_s` are reported from the search's estimates alone.
pub fn predict_all(cx: &SearchContext<'_>, best_s: Option<f64>) -> Vec<Baseline> {
    if cx.progress.stopped() || !cx.request.baselines {
        return Vec::new();
    }
    let spaces = spaces(cx);
    cx.progress.step("baselines", 0, spaces.len());
    let predict = |(name, space): (&'static str, SearchSpace)| {
        let quietly = Muted(cx.progress);
        let cx = SearchContext { space: &space, progress: &quietly, ..*cx };
        let large = cx.request.graph.len() > LARGE_MODEL;
        let far_s = best_s.map_or(f64::INFINITY, |best_s| FAR_BEHIND * best_s);
        let calibration = match large {
            true => Calibration::up_to(far_s),
            false => Calibration::one_beyond(far_s),
        };
        let far = PlanFailure::FarBehind { times: FAR_BEHIND };
        let mut plan = plans_that_fit(&cx, calibration).and_then(|plans| plans.into_iter().next().ok_or(far));
        if !large && matches!(plan, Err(PlanFailure::Memory { .. })) {
            plan = leanest(&cx);
        }
        Baseline { name, plan }
    };
    spaces.into_par_iter().map(predict).collect()
}

impl Baseline {
    /// The line of the baseline among the alternatives of a plan.
    pub fn line(&self, cx: &SearchContext<'_>) -> Alternative {
        let name = self.name.into();
        match &self.plan {
            Ok(plan) => Alternative {
                name,
                predicted: Some(plan.predicted.clone()),
                fits: fits(plan),
                detail: degrees(cx, plan),
            },
            Err(failure) => Alternative { name, predicted: None, fits: false, detail: failure.to_string() },
        }
    }

    /// The plan, if it fits and may be chosen. Predictions decide, so a baseline may become the plan.
    pub fn candidate(self, cx: &SearchContext<'_>) -> Option<Plan> {
        self.plan.ok().filter(|plan| fits(plan) && cx.request.allows(plan) && !cx.space.alpa)
    }
}

fn degrees(cx: &SearchContext<'_>, plan: &Plan) -> String {
    let mesh = &plan.stages[0].mesh;
    format!(
        "dp{} tp{} pp{}, {}{}{}",
        mesh.axes[0].size,
        mesh.axes[1].size,
        plan.stages.len(),
        count(plan.num_microbatches, "microbatch", "microbatches"),
        recomputed(plan),
        match cx.space.only_group.map(|group| &plan.cluster.groups[group]) {
            Some(group) => format!(", on the {} x {} alone", group.num_devices(), group.device.name),
            None => String::new(),
        }
    )
}

/// The search spaces of the baselines, on the whole cluster or on one of its groups. There are none over several groups.
fn spaces(cx: &SearchContext<'_>) -> Vec<(&'static str, SearchSpace)> {
    let (request, space) = (cx.request, cx.space);
    if space.only_group.is_none() && request.cluster.groups.len() > 1 {
        return Vec::new();
    }
    let n = num_devices(cx) as u32;
    // Replicas that share a sample repeat its work, so use microbatches that the replicas divide if there are any.
    let global = request.global_batch_size();
    let counts = |dp: u32| {
        let even = |c: &u32| request.graph.batch != 0 && global / *c as u64 % dp as u64 == 0;
        let counts: Vec<u32> = space.num_microbatches.iter().copied().filter(even).collect();
        if counts.is_empty() { space.num_microbatches.clone() } else { counts }
    };
    let with = |dp: u32, tp: u32, pp: u32, zero: u8| SearchSpace {
        num_microbatches: counts(dp),
        degrees: GivenDegrees {
            dp: Some(dp),
            tp: Some(tp),
            pp: Some(pp),
            zero: Some(zero),
            virtual_stages: Some(1),
            ..space.degrees
        },
        zero_bubble: false,
        all_devices: true,
        recompute: if request.trains() { request.recompute } else { Some(Recompute::None) },
        alpa: false,
        ..space.clone()
    };
    let layers = layers::cluster(&request.graph).len() as u32 - 1;
    let depth = (1..=n.min(layers)).rev().find(|d| n % d == 0).unwrap_or(1);
    let mut plain = vec![
        ("data parallel", with(n, 1, 1, 0)),
        ("ZeRO-1", with(n, 1, 1, 1)),
        ("FSDP", with(n, 1, 1, 3)),
        ("tensor parallel", with(1, n, 1, 0)),
        ("pipeline", with(n / depth, 1, depth, 0)),
    ];
    // Targets without pipelines have no pipeline to compare with.
    plain.retain(|(_, space)| !matches!(request.target, Target::Fsdp | Target::Xla) || space.degrees.pp == Some(1));
    plain.retain(|(_, space)| request.target != Target::Fsdp || space.degrees.zero != Some(1));
    // Without training there is no optimizer state to shard.
    plain.retain(|(_, space)| request.trains() || space.degrees.zero != Some(1));
    plain
}

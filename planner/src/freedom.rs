//! The search spaces of requests and of the plain baselines.

use crate::inter_op::search::{Freedom, num_devices};
use crate::inter_op::submesh::shapes;
use crate::layers;
use crate::request::{PlanFailure, Request, SearchKind};
use altiplano_ir::batch::LossKind;
use altiplano_ir::cluster::Group;
use altiplano_ir::plan::{Goal, Plan, Schedule, Target};
use altiplano_ir::recompute::Recompute;

/// Returns true if a baseline respects what the user fixed.
pub fn allowed(request: &Request, plan: &Plan) -> bool {
    let mesh_is = |axis: usize, degree: Option<u32>| {
        degree.is_none_or(|d| plan.stages.iter().all(|s| s.mesh.axes[axis].size == d))
    };
    mesh_is(0, request.dp)
        && mesh_is(1, request.tp)
        && request.pp.is_none_or(|pp| plan.num_lanes() as u32 == pp)
        && request.virtual_stages.is_none_or(|v| plan.virtual_stages == v)
        && request.zero.is_none_or(|z| plan.stages.iter().all(|s| s.zero == z))
}

pub fn global_batch(request: &Request) -> u64 {
    let given = request.global_batch.or(match (request.microbatch, request.num_microbatches) {
        (Some(size), Some(count)) => Some(size * count as u64),
        _ => None,
    });
    given.unwrap_or(request.graph.batch.max(1))
}

/// Derives the search space that the request leaves open. Contradictory options are errors.
pub fn freedom(request: &Request) -> Result<Freedom, PlanFailure> {
    let devices = request.cluster.num_devices();
    let invalid = |option, value: u64, problem| Err(PlanFailure::Option { option, value, problem });
    for (option, value) in [("dp", request.dp), ("tp", request.tp), ("pp", request.pp)] {
        if value == Some(0) {
            return invalid(option, 0, "must be at least 1");
        }
    }
    let shared = request.virtual_stages.unwrap_or(1);
    if shared == 0 {
        return invalid("virtual-stages", 0, "must be at least 1");
    }
    if shared > 1 && request.schedule.is_some_and(|s| s != Schedule::OneFOneB) {
        return invalid("virtual-stages", shared.into(), "goes with the schedule 1f1b only");
    }
    if shared > 1 && (devices == 1 || request.pp == Some(1)) {
        return invalid("virtual-stages", shared.into(), "needs a pipeline over two blocks of devices or more");
    }
    if request.zero.is_some_and(|z| z > 3) {
        return invalid("zero", request.zero.unwrap_or(0) as u64, "must be 0, 1, 2 or 3");
    }
    let cp = request.cp.unwrap_or(1);
    if let (Some(dp), Some(tp), Some(pp)) = (request.dp, request.tp, request.pp) {
        let product = dp as u64 * tp as u64 * pp as u64 * u64::from(cp);
        if product != devices as u64 {
            return Err(PlanFailure::Degrees { dp, tp, pp, cp, product, devices });
        }
    }
    let given: u64 = [request.dp, request.tp, request.pp, Some(cp)].into_iter().flatten().map(u64::from).product();
    let several = request.cluster.groups.len() > 1;
    if given > devices as u64 || !several && devices as u64 % given != 0 {
        let (dp, tp, pp) = (request.dp.unwrap_or(1), request.tp.unwrap_or(1), request.pp.unwrap_or(1));
        return Err(PlanFailure::Degrees { dp, tp, pp, cp, product: given, devices });
    }
    if several {
        // With several groups, stages may differ in size, but each lies in one group.
        let of_stage = request.dp.unwrap_or(1) as u64 * request.tp.unwrap_or(1) as u64;
        let holds = |g: &Group| shapes(g.nodes, g.devices_per_node).iter().any(|s| s.num_devices() % of_stage == 0);
        if !request.cluster.groups.iter().any(holds) {
            let groups = request.cluster.groups.iter().map(Group::num_devices).collect();
            return Err(PlanFailure::StageOverGroups { of_stage, groups });
        }
    }
    // Two fixed degrees fix the third.
    let rest = (devices as u64 / given) as u32;
    let (mut dp, mut tp, mut pp) = (request.dp, request.tp, request.pp);
    match (dp, tp, pp) {
        _ if several => {}
        (None, Some(_), Some(_)) => dp = Some(rest),
        (Some(_), None, Some(_)) => tp = Some(rest),
        (Some(_), Some(_), None) => pp = Some(rest),
        _ => {}
    }

    let global = global_batch(request);
    if global == 0 {
        return invalid("global-batch", 0, "must be at least 1");
    }
    if request.num_microbatches == Some(0) {
        return invalid("num-microbatches", 0, "must be at least 1");
    }
    if request.microbatch == Some(0) {
        return invalid("microbatch", 0, "must be at least 1");
    }
    let scales = request.graph.batch != 0;
    let counts: Vec<u32> = match (request.microbatch, request.num_microbatches) {
        (Some(size), _) if !scales && size != 1 => {
            return invalid("microbatch", size, "cannot be set: the graph keeps to the size it was traced at");
        }
        (_, Some(count)) if !scales && count as u64 != global && request.global_batch.is_some() => {
            return invalid(
                "num-microbatches",
                count as u64,
                "is not --global-batch: the graph keeps to the size it was traced at",
            );
        }
        (_, Some(count)) if !scales => vec![count],
        (Some(size), Some(count)) if size.checked_mul(count as u64) != Some(global) => {
            return invalid("microbatch", size, "times --num-microbatches is not --global-batch");
        }
        (_, Some(count)) if global % count as u64 != 0 => {
            return invalid("num-microbatches", count as u64, "does not divide the global batch");
        }
        (_, Some(count)) => vec![count],
        (Some(size), None) if global % size != 0 => {
            return invalid("microbatch", size, "does not divide the global batch");
        }
        (Some(size), None) => vec![u32::try_from(global / size).unwrap_or(u32::MAX)],
        (None, None) if !scales => vec![u32::try_from(global).unwrap_or(u32::MAX)],
        (None, None) if request.loss == LossKind::Other && !request.allow_microbatch_semantics => vec![1],
        (None, None) => {
            // Divisors at least a factor of 1.5 apart.
            let mut counts: Vec<u32> = Vec::new();
            for count in (1..=global.min(4096) as u32).filter(|c| global % *c as u64 == 0) {
                if counts.last().is_none_or(|&l| count as f64 >= 1.5 * l as f64) {
                    counts.push(count);
                }
            }
            counts
        }
    };
    if request.loss == LossKind::Other && !request.allow_microbatch_semantics && counts != [1] && scales {
        return invalid(
            "num-microbatches",
            counts[0] as u64,
            "would change the loss, which is not a mean over samples; --allow-microbatch-semantics permits it",
        );
    }
    let alpa = request.search == SearchKind::Alpa;
    Ok(Freedom {
        dp,
        tp,
        pp,
        zero: request.zero.or(alpa.then_some(ALPA_ZERO)),
        recompute: if request.trains() {
            request.recompute.or(alpa.then_some(Recompute::Full))
        } else {
            Some(Recompute::None)
        },
        schedules: request.schedule.map_or(vec![Schedule::OneFOneB], |s| vec![s]),
        virtual_stages: request.virtual_stages,
        zero_bubble: request.schedule.is_none(),
        num_microbatches: counts,
        memory_bytes: request.cluster.groups.iter().map(|g| request.cluster.usable_bytes(g)).collect(),
        only_group: None,
        lean: false,
        all_devices: dp.is_some() && tp.is_some() && pp.is_some() || alpa,
        alpa,
        streams: request.goal == Goal::Throughput,
    })
}

/// Alpa turns gradient reductions into reduce-scatters where it can, and updates the remaining shard on each device
/// (section 4.2, "post-ILP optimization").
const ALPA_ZERO: u8 = 2;

/// Search spaces of the plain ways to parallelise, on the whole cluster or on one of its groups. There are none over
/// several groups.
pub fn baselines(request: &Request, freedom: &Freedom) -> Vec<(&'static str, Freedom)> {
    if freedom.only_group.is_none() && request.cluster.groups.len() > 1 {
        return Vec::new();
    }
    let n = num_devices(request, freedom) as u32;
    // Replicas that share a sample repeat its work, so use microbatches that the replicas divide if there are any.
    let global = global_batch(request);
    let counts = |dp: u32| {
        let even = |c: &u32| request.graph.batch != 0 && global / *c as u64 % dp as u64 == 0;
        let counts: Vec<u32> = freedom.num_microbatches.iter().copied().filter(even).collect();
        if counts.is_empty() { freedom.num_microbatches.clone() } else { counts }
    };
    let with = |dp: u32, tp: u32, pp: u32, zero: u8| Freedom {
        num_microbatches: counts(dp),
        dp: Some(dp),
        tp: Some(tp),
        pp: Some(pp),
        zero: Some(zero),
        virtual_stages: Some(1),
        zero_bubble: false,
        all_devices: true,
        recompute: if request.trains() { request.recompute } else { Some(Recompute::None) },
        alpa: false,
        ..freedom.clone()
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
    plain.retain(|(_, freedom)| !matches!(request.target, Target::Fsdp | Target::Xla) || freedom.pp == Some(1));
    plain.retain(|(_, freedom)| request.target != Target::Fsdp || freedom.zero != Some(1));
    // Without training there is no optimizer state to shard.
    plain.retain(|(_, freedom)| request.trains() || freedom.zero != Some(1));
    plain
}

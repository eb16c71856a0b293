//! Search spaces: the choices that a request leaves open.

use crate::features::stacks::stack;
use crate::features::stages::list;
use crate::inter_op::submesh::shapes;
use crate::request::{GivenDegrees, PlanFailure, Request, SearchKind};
use crate::search::sweep::is_uniform;
use altiplano_ir::batch::LossKind;
use altiplano_ir::cluster::Group;
use altiplano_ir::plan::{Goal, Schedule, is_countable};
use altiplano_ir::recompute::Recompute;

/// The choices that a search has. A baseline fixes choices that another search leaves open.
#[derive(Clone, Debug)]
pub struct SearchSpace {
    pub degrees: GivenDegrees,
    pub recompute: Option<Recompute>,
    /// Schedules of pipelines whose stages have devices of their own.
    pub schedules: Vec<Schedule>,
    /// Schedules of pipelines whose stages share devices.
    pub shared: Vec<Schedule>,
    /// Also predict pipelines found for `1f1b` under `zb-h1`.
    pub zero_bubble: bool,
    /// Numbers of microbatches to try.
    pub num_microbatches: Vec<u32>,
    /// Every device must be used, even if fewer are faster.
    pub all_devices: bool,
    /// Memory of a device that stages may use, by group.
    pub memory_bytes: Vec<u64>,
    /// The only group whose devices stages may use.
    pub only_group: Option<usize>,
    /// Prefer layouts that keep less memory, even if they take longer.
    pub lean: bool,
    /// [`crate::SearchKind::Alpa`].
    pub alpa: bool,
    /// Batches follow each other without waiting, so throughput counts, not latency.
    pub streams: bool,
}

/// Alpa turns gradient reductions into reduce-scatters where it can, and updates the remaining shard on each device
/// (section 4.2, "post-ILP optimization").
const ALPA_ZERO: u8 = 2;

impl SearchSpace {
    /// The space that a request leaves open.
    ///
    /// # Errors
    /// If options contradict each other, the model or the cluster.
    pub fn from_request(request: &Request) -> Result<SearchSpace, PlanFailure> {
        check_options(request)?;
        let degrees = degrees(request)?;
        let num_microbatches = with_enough_microbatches(request, degrees, microbatch_counts(request)?)?;
        let alpa = request.search == SearchKind::Alpa;
        let of_target = stack(request.target).schedules;
        let shared: Vec<Schedule> = match request.schedule {
            None => vec![Schedule::OneFOneB, Schedule::ZbV],
            Some(schedule) => vec![schedule],
        };
        // The search has no formula for lanes of several stages, and cuts such a pipeline from what it priced for others.
        let plain = request.schedule.filter(|schedule| schedule.virtual_stages().is_none());
        Ok(SearchSpace {
            shared: shared.into_iter().filter(|s| has_shared(*s) && of_target.contains(s)).collect(),
            degrees: GivenDegrees { zero: request.degrees.zero.or(alpa.then_some(ALPA_ZERO)), ..degrees },
            recompute: match request.trains() {
                true => request.recompute.or(alpa.then_some(Recompute::Full)),
                false => Some(Recompute::None),
            },
            schedules: vec![plain.unwrap_or(Schedule::OneFOneB)],
            zero_bubble: request.schedule.is_none(),
            num_microbatches,
            memory_bytes: request.cluster.groups.iter().map(|g| request.cluster.usable_bytes(g)).collect(),
            only_group: None,
            lean: false,
            all_devices: degrees.are_all_given() || alpa,
            alpa,
            streams: request.goal == Goal::Throughput,
        })
    }

    /// Number of steps that are priced together, as if they ran without a wait between them.
    pub fn steps_together(&self) -> u32 {
        // With this many steps, filling and draining the pipeline becomes negligible.
        if self.streams { 1 << 12 } else { 1 }
    }

    /// True if stages may lie in a group.
    pub fn allows(&self, group: usize) -> bool {
        self.only_group.is_none_or(|only| only == group)
    }
}

/// True if several stages of a lane may follow a schedule.
fn has_shared(schedule: Schedule) -> bool {
    schedule == Schedule::OneFOneB || schedule.virtual_stages().is_some()
}

fn invalid<T>(option: &'static str, value: impl Into<u64>, problem: &'static str) -> Result<T, PlanFailure> {
    Err(PlanFailure::Option { option, value: value.into(), problem })
}

/// The numbers of microbatches that the schedule runs: `dualpipe-v` needs one for each stage.
fn with_enough_microbatches(
    request: &Request,
    degrees: GivenDegrees,
    mut counts: Vec<u32>,
) -> Result<Vec<u32>, PlanFailure> {
    if request.schedule == Some(Schedule::DualPipeV) {
        let (most, lanes) = (counts.iter().copied().max().unwrap_or(0), degrees.pp.unwrap_or(2));
        counts.retain(|&count| Schedule::DualPipeV.can_share(2, count.into(), lanes));
        if counts.is_empty() {
            let problem = "must be at least the number of stages under the schedule dualpipe-v, which is 4 or more";
            return invalid("num-microbatches", most, problem);
        }
    }
    Ok(counts)
}

fn check_options(request: &Request) -> Result<(), PlanFailure> {
    let devices = request.cluster.num_devices();
    request.degrees.expect_positive()?;
    let shared = request.degrees.virtual_stages.unwrap_or(1);
    if shared > 1 && request.schedule.is_some_and(|s| !has_shared(s)) {
        return invalid("virtual-stages", shared, "goes with the schedules 1f1b, zb-v and dualpipe-v only");
    }
    if request.schedule.and_then(Schedule::virtual_stages).is_some_and(|count| count != shared) {
        return invalid("virtual-stages", shared, "must be 2 under the schedules zb-v and dualpipe-v");
    }
    let lanes = if devices == 1 { Some(1) } else { request.degrees.pp };
    if lanes == Some(1) && request.schedule.is_some_and(|s| s.virtual_stages().is_some()) {
        let problem = "must be 2 or more under the schedules zb-v and dualpipe-v, which need two devices at least";
        return invalid("pp", 1u32, problem);
    }
    if shared > 1 && lanes == Some(1) {
        return invalid("virtual-stages", shared, "needs a pipeline over two blocks of devices or more");
    }
    if let Some(groups) = request.degrees.groups {
        // Each stage has a multiple of the groups.
        if !devices.is_multiple_of(groups) {
            return invalid("dp-replicate", groups, "must divide the number of devices");
        }
        if request.degrees.dp.is_some_and(|dp| !dp.is_multiple_of(groups)) {
            return invalid("dp-replicate", groups, "must divide --dp");
        }
    }
    match request.degrees.zero {
        Some(zero) if zero > 3 => invalid("zero", zero, "must be 0, 1, 2 or 3"),
        _ => Ok(()),
    }
}

/// The degrees of data, tensor and pipeline parallelism that the request fixes. Two fixed degrees fix the third.
fn degrees(request: &Request) -> Result<GivenDegrees, PlanFailure> {
    let devices = request.cluster.num_devices();
    let cp = request.degrees.cp.unwrap_or(1);
    let GivenDegrees { mut dp, mut tp, mut pp, .. } = request.degrees;
    let refused = |product: u64| {
        let (dp, tp, pp) = (dp.unwrap_or(1), tp.unwrap_or(1), pp.unwrap_or(1));
        Err(PlanFailure::Degrees { dp, tp, pp, cp, product, devices })
    };
    let given: u64 = [dp, tp, pp, Some(cp)].into_iter().flatten().map(u64::from).product();
    if dp.is_some() && tp.is_some() && pp.is_some() && given != u64::from(devices) && request.stages.devices.is_empty()
    {
        return refused(given);
    }
    let several = request.cluster.groups.len() > 1;
    let of_stages = &request.stages.devices;
    if let Some(&size) = of_stages.iter().find(|&&size| !may_have(request, size)) {
        let problem = format!("a stage of {size} devices cannot have --dp {} and --tp {}", or_any(dp), or_any(tp));
        return Err(PlanFailure::Stages { option: "stage-devices", given: list(of_stages), problem });
    }
    // Stages of a pipeline may differ in size if nothing else is asked of them.
    let may_differ = several || !of_stages.is_empty() || (dp, tp) == (None, None) && !is_uniform(request);
    if given > u64::from(devices) && of_stages.is_empty() || !may_differ && u64::from(devices) % given != 0 {
        return refused(given);
    }
    if several {
        // With several groups, stages may differ in size, but each lies in one group.
        let of_stage = u64::from(dp.unwrap_or(1)) * u64::from(tp.unwrap_or(1));
        let holds = |g: &Group| shapes(g.nodes, g.devices_per_node).iter().any(|s| s.num_devices() % of_stage == 0);
        if !request.cluster.groups.iter().any(holds) {
            let groups = request.cluster.groups.iter().map(Group::num_devices).collect();
            return Err(PlanFailure::StageOverGroups { of_stage, groups });
        }
        return Ok(request.degrees);
    }
    if !of_stages.is_empty() {
        return Ok(request.degrees);
    }
    let rest = (u64::from(devices) / given) as u32;
    match (dp, tp, pp) {
        (None, Some(_), Some(_)) => dp = Some(rest),
        (Some(_), None, Some(_)) => tp = Some(rest),
        (Some(_), Some(_), None) => pp = Some(rest),
        _ => {}
    }
    Ok(GivenDegrees { dp, tp, pp, ..request.degrees })
}

/// True if a stage of this many devices can have the given degrees of data and tensor parallelism.
fn may_have(request: &Request, devices: u32) -> bool {
    let GivenDegrees { dp, tp, .. } = request.degrees;
    let of_stage = u64::from(dp.unwrap_or(1)) * u64::from(tp.unwrap_or(1));
    match dp.and(tp) {
        Some(_) => u64::from(devices) == of_stage,
        None => u64::from(devices).is_multiple_of(of_stage.max(1)),
    }
}

fn or_any(degree: Option<u32>) -> String {
    degree.map_or("any".to_string(), |degree| degree.to_string())
}

/// The counts that a plan can have on one stage. Fails if there are none.
fn countable(counts: Vec<u32>) -> Result<Vec<u32>, PlanFailure> {
    let Some(&least) = counts.iter().min() else { return Ok(counts) };
    if !is_countable(least, 1) {
        return invalid("num-microbatches", least, "microbatches are more than a step may have, which is 1048576");
    }
    Ok(counts.into_iter().filter(|&count| is_countable(count, 1)).collect())
}

/// The numbers of microbatches to try.
fn microbatch_counts(request: &Request) -> Result<Vec<u32>, PlanFailure> {
    let global = request.global_batch_size();
    if global == 0 {
        return invalid("global-batch", 0u64, "must be at least 1");
    }
    if request.batch.num_microbatches == Some(0) {
        return invalid("num-microbatches", 0u64, "must be at least 1");
    }
    if request.batch.microbatch == Some(0) {
        return invalid("microbatch", 0u64, "must be at least 1");
    }
    let scales = request.graph.batch != 0;
    let counts: Vec<u32> = match (request.batch.microbatch, request.batch.num_microbatches) {
        (Some(size), _) if !scales && size != 1 => {
            return invalid("microbatch", size, "cannot be set: the graph keeps to the size it was traced at");
        }
        (_, Some(count)) if !scales && count as u64 != global && request.batch.global.is_some() => {
            return invalid(
                "num-microbatches",
                count,
                "is not --global-batch: the graph keeps to the size it was traced at",
            );
        }
        (_, Some(count)) if !scales => vec![count],
        (Some(size), Some(count)) if size.checked_mul(count as u64) != Some(global) => {
            return invalid("microbatch", size, "times --num-microbatches is not --global-batch");
        }
        (_, Some(count)) if global % count as u64 != 0 => {
            return invalid("num-microbatches", count, "does not divide the global batch");
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
    let counts = countable(counts)?;
    if request.loss == LossKind::Other && !request.allow_microbatch_semantics && counts != [1] && scales {
        return invalid(
            "num-microbatches",
            counts[0],
            "would change the loss, which is not a mean over samples; --allow-microbatch-semantics permits it",
        );
    }
    Ok(counts)
}

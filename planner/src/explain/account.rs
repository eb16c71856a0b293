//! Where the seconds of a step go on the devices of each stage: computation by kind of op, exposed collectives by mesh
//! axes, transfers to other stages, the update, the host, and waiting. These are the parts that [`crate::predict`] adds
//! up, in more detail; for one lane of a pipeline they add up to the step.

use crate::lower::DedupedPrograms;
use crate::predict::timing::{BodyWork, StageTiming};
use crate::predict::{hidden_parts, played, timings_of, work_of};
use crate::programs;
use crate::request::PlanFailure;
use altiplano_cost_models::Costs;
use altiplano_cost_models::kernels::KernelKind;
use altiplano_cost_models::pipeline::{Order, StageTimes};
use altiplano_cost_models::timeline::Played;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::Phase;
use altiplano_ir::reshard::Collective;
use std::collections::BTreeMap;
use std::fmt;

/// An activity of a device in a step.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    Matmuls,
    Attention,
    Convolutions,
    /// Ops that stream through memory, several in one kernel.
    Elementwise,
    Lookups,
    Sorts,
    /// The device waits for the host to issue a kernel.
    Issuing,
    /// New parameters from gradients, once a step.
    Update,
    /// Exposed communication: `all_reduce` over `tensor`.
    Collective {
        name: &'static str,
        axes: String,
    },
    /// Exposed copies between the host's memory and the device, such as optimizer state for the update.
    HostCopies,
    /// Transfers to other stages.
    Transfers,
    /// Gradients to parameter servers, and weights from them.
    Servers,
    /// Transfers to other stages that overlap with computation. Their seconds are negative, since they are counted
    /// twice.
    Overlapping,
    /// Waiting for other stages.
    Waiting,
}

impl Work {
    /// The activity of a kernel.
    pub fn of(kind: &KernelKind, sent: Option<&Collective>, mesh: &Mesh) -> Work {
        match (kind, sent) {
            (_, Some(collective)) => Work::collective(collective, mesh),
            (KernelKind::Matmul(_), _) => Work::Matmuls,
            (KernelKind::Attention(_), _) => Work::Attention,
            (KernelKind::Convolution { .. }, _) => Work::Convolutions,
            (KernelKind::Fused { .. } | KernelKind::Collective, _) => Work::Elementwise,
            (KernelKind::HostCopy(_), _) => Work::HostCopies,
            (KernelKind::Indexed, _) => Work::Lookups,
            (KernelKind::Sort { .. }, _) => Work::Sorts,
        }
    }

    fn collective(collective: &Collective, mesh: &Mesh) -> Work {
        let axes: Vec<&str> = collective.axes().iter().map(|&a| mesh.name(a)).collect();
        Work::Collective { name: collective.name(), axes: axes.join("+") }
    }

    /// The part of a stage's prediction that includes the activity.
    pub fn part(&self) -> Part {
        match self {
            Work::Collective { .. } | Work::HostCopies | Work::Transfers | Work::Servers | Work::Overlapping => {
                Part::Communicating
            }
            Work::Waiting => Part::Waiting,
            _ => Part::Computing,
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Work::Matmuls => "matmuls",
            Work::Attention => "attention",
            Work::Convolutions => "convolutions",
            Work::Elementwise => "elementwise ops",
            Work::Lookups => "lookups",
            Work::Sorts => "sorts",
            Work::Issuing => "issuing kernels",
            Work::Update => "update",
            Work::Collective { name, axes } => return write!(f, "{name} over {axes}"),
            Work::HostCopies => "copies from and to the host",
            Work::Transfers => "transfers to other stages",
            Work::Servers => "pushes to servers and pulls",
            Work::Overlapping => "of these, while computing",
            Work::Waiting => "waiting",
        })
    }
}

/// The three parts of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Computing,
    Communicating,
    Waiting,
}

impl Part {
    pub const ALL: [Part; 3] = [Part::Computing, Part::Communicating, Part::Waiting];

    pub fn name(self) -> &'static str {
        match self {
            Part::Computing => "computing",
            Part::Communicating => "communicating",
            Part::Waiting => "waiting",
        }
    }
}

/// Seconds of a step by activity.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account(pub BTreeMap<Work, f64>);

impl Account {
    /// Adds seconds to an activity, if they are positive.
    pub fn add(&mut self, work: Work, seconds: f64) {
        if seconds > 0.0 {
            *self.0.entry(work).or_default() += seconds;
        }
    }

    pub fn sum_s(&self) -> f64 {
        self.0.values().sum()
    }

    pub fn part_s(&self, part: Part) -> f64 {
        self.0.iter().filter(|(work, _)| work.part() == part).map(|(_, s)| s).sum()
    }

    /// Activities and their seconds, longest first.
    pub fn sorted(&self) -> Vec<(&Work, f64)> {
        let mut all: Vec<(&Work, f64)> = self.0.iter().map(|(work, &s)| (work, s)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(b.0)));
        all
    }

    /// Adds the activities of another stage on the same devices. Both stages wait at the same time, so waiting is not
    /// added.
    fn beside(mut self, other: &Account) -> Account {
        for (work, &s) in other.0.iter().filter(|(work, _)| **work != Work::Waiting) {
            *self.0.entry(work.clone()).or_default() += s;
        }
        self
    }
}

/// The account of each stage of a plan, in order.
pub fn accounts(plan: &Plan, costs: &dyn Costs) -> Result<Vec<Account>, PlanFailure> {
    let programs = programs(plan)?;
    let whole = DedupedPrograms::whole(&programs);
    let work = work_of(plan, &whole, costs);
    let timings = timings_of(plan, &whole, &work, costs);
    Ok(accounts_of(plan, &work, &timings))
}

/// Like [`accounts`], for work and times that are already known.
pub fn accounts_of(plan: &Plan, work: &[Vec<BodyWork>], timings: &[(StageTimes, StageTiming)]) -> Vec<Account> {
    let timeline = played(plan, timings, &Order::of(plan), &mut |_, _, _, _| {});
    let hidden = hidden_parts(plan, timings, &timeline);
    let batches = f64::from(plan.microbatches_of_worker());
    let of_stage = |(i, bodies): (usize, &Vec<BodyWork>)| {
        let (times, timing) = &timings[i];
        let mesh = &plan.stages[i].mesh;
        let mut account = Account::default();
        for body in bodies {
            let played = match body.phase {
                Phase::Forward => &timing.forward,
                Phase::Backward => &timing.backward,
                Phase::Weights => &timing.weights,
                Phase::Totals | Phase::Reduce | Phase::Norm | Phase::Update => continue,
            };
            for (work, s) in of_body(body, played, mesh).0 {
                let is_hidden = work.part() == Part::Communicating;
                let part = if is_hidden { 1.0 - hidden[plan.lane_of(i)] } else { 1.0 };
                account.add(work, batches * part * s);
            }
        }
        let update_s = timing.finish_compute_s.min(timing.finish_s);
        account.add(Work::Update, update_s);
        // Communication at the end of a step overlaps with other work. The exposed seconds are shared in proportion to
        // bytes.
        let mut sent = Account::default();
        for body in bodies.iter().filter(|b| matches!(b.phase, Phase::Reduce | Phase::Norm | Phase::Update)) {
            let collectives = body.sent.iter().flatten();
            collectives.for_each(|(c, operand, result)| {
                sent.add(Work::collective(c, mesh), *operand.max(result) as f64);
            });
            let copies = body.kernels.iter().filter(|k| matches!(k.kind, KernelKind::HostCopy(_)));
            copies.for_each(|copy| sent.add(Work::HostCopies, copy.read_bytes as f64));
        }
        let bytes = sent.sum_s();
        let exposed_s = timing.finish_s - update_s;
        match bytes > 0.0 {
            true => sent.0.into_iter().for_each(|(work, b)| account.add(work, exposed_s * b / bytes)),
            false => account.add(Work::Issuing, exposed_s),
        }
        account.add(Work::Transfers, batches * (times.transfer_forward_s + times.transfer_backward_s));
        let exchanged = if plan.servers.is_some() { Work::Servers } else { Work::Transfers };
        account.add(exchanged, times.step_s - timing.finish_s - timing.waits_s);
        account.add(Work::Waiting, timing.waits_s);
        account
    };
    let mut accounts: Vec<Account> = work.iter().enumerate().map(of_stage).collect();
    for (lane, played) in timeline.stages.iter().enumerate() {
        let mut whole_s: f64 = plan.stages_of(lane).map(|i| accounts[i].sum_s()).sum();
        // On a shared machine, stages run faster whenever others wait.
        if plan.stages_of(lane).any(|i| !timings[i].1.shared.is_empty()) {
            let part = played.busy_s / whole_s.max(f64::MIN_POSITIVE);
            plan.stages_of(lane).for_each(|i| accounts[i].0.values_mut().for_each(|s| *s *= part));
            whole_s *= part;
        }
        let sends_s = |account: &Account| account.0.get(&Work::Transfers).copied().unwrap_or(0.0);
        let sent_s: f64 = plan.stages_of(lane).map(|i| sends_s(&accounts[i])).sum();
        for i in plan.stages_of(lane) {
            match timeline.step_s - whole_s {
                rest if rest.abs() <= ROUNDING * timeline.step_s => {}
                // The lane's transfers overlap with its computing. They are divided by the seconds that each stage sends.
                over if over < 0.0 => {
                    let part =
                        if sent_s > 0.0 { sends_s(&accounts[i]) / sent_s } else { 1.0 / plan.virtual_stages as f64 };
                    *accounts[i].0.entry(Work::Overlapping).or_default() += part * over;
                }
                waiting => accounts[i].add(Work::Waiting, waiting),
            }
        }
    }
    accounts
}

/// The account of each lane's devices, which adds up all of their stages.
pub fn of_lanes(plan: &Plan, accounts: &[Account]) -> Vec<Account> {
    let lane = |lane: usize| {
        let mut stages = plan.stages_of(lane);
        let first = stages.next().and_then(|i| accounts.get(i)).cloned().unwrap_or_default();
        stages.filter_map(|i| accounts.get(i)).fold(first, Account::beside)
    };
    (0..plan.num_lanes()).map(lane).collect()
}

/// The lane that waits least, which decides the step time.
pub fn busiest(lanes: &[Account]) -> usize {
    let waits = |i: usize| lanes[i].part_s(Part::Waiting);
    (0..lanes.len()).min_by(|&a, &b| waits(a).total_cmp(&waits(b))).unwrap_or(0)
}

/// The account of one call of a body. Each moment belongs to the kernel that computes then, else to the collective in
/// flight, else to the host.
fn of_body(body: &BodyWork, played: &Played, mesh: &Mesh) -> Account {
    let work = |i: usize| Work::of(&body.kernels[i].kind, body.sent[i].as_ref().map(|s| &s.0), mesh);
    let spans = |sends: bool| {
        let of_kind = move |i: &usize| body.kernels[*i].kind.communicates() == sends;
        let mut all: Vec<(f64, f64, usize)> = (0..body.kernels.len().min(played.spans.len()))
            .filter(of_kind)
            .map(|i| (played.spans[i].0, played.spans[i].1, i))
            .collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all
    };
    let mut account = Account::default();
    let sent = spans(true);
    let mut next = 0;
    // Nothing is computed from `from` to `to`.
    let mut idle = |from: f64, to: f64, account: &mut Account| {
        let mut at = from;
        while at < to {
            while sent.get(next).is_some_and(|s| s.1 <= at) {
                next += 1;
            }
            let until = match sent.get(next) {
                Some(&(start, end, i)) if start <= at => {
                    account.add(work(i), end.min(to) - at);
                    end
                }
                Some(&(start, ..)) => {
                    account.add(Work::Issuing, start.min(to) - at);
                    start
                }
                None => {
                    account.add(Work::Issuing, to - at);
                    to
                }
            };
            at = until.min(to);
        }
    };
    let mut at = 0.0f64;
    for (start, end, i) in spans(false) {
        idle(at, start, &mut account);
        account.add(work(i), end - start.max(at));
        at = at.max(end);
    }
    idle(at, played.seconds, &mut account);
    account
}

/// Relative rounding error of a step's sum of parts.
const ROUNDING: f64 = 1e-12;

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_cost_models::kernels::Kernel;

    #[test]
    fn every_moment_of_a_body_is_counted_once() {
        let collective = || Kernel::moving(KernelKind::Collective, 0);
        let fused = || Kernel::moving(KernelKind::Fused { operations: 0.0 }, 0);
        let lookup = || Kernel::moving(KernelKind::Indexed, 0);
        let axes = vec![altiplano_ir::mesh::AxisId(1)];
        let gather = Collective::AllGather { axes, dim: 0, outer: 1 };
        let sent = vec![None, Some((gather.clone(), 4, 8)), None, Some((gather, 4, 8))];
        let body = BodyWork::made_of(Phase::Forward, vec![fused(), collective(), lookup(), collective()], sent);
        // Computing from 1 to 3 and 6 to 7, sending from 2 to 5 and 8 to 9, and the host still busy until 10.
        let spans = vec![(1.0, 3.0), (2.0, 5.0), (6.0, 7.0), (8.0, 9.0)];
        let played = Played { seconds: 10.0, spans, ..Played::default() };
        let account = of_body(&body, &played, &Mesh::new(&[("data", 2), ("tensor", 2)]));
        let found: Vec<(String, f64)> = account.sorted().iter().map(|(w, s)| (w.to_string(), *s)).collect();
        let expected =
            [("issuing kernels", 4.0), ("all_gather over tensor", 3.0), ("elementwise ops", 2.0), ("lookups", 1.0)];
        assert_eq!(found, expected.map(|(w, s)| (w.to_string(), s)));
        assert_eq!(account.sum_s(), played.seconds);
    }
}

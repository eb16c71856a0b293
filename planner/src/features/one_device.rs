//! Chooses one GPU if more GPUs gain little.
//!
//! A small model spends its time on launches and transfers. A pipeline over eight devices may be predicted to be 14 %
//! faster than one of them. That is within the prediction error between kinds of plans, and seven devices could do
//! something else. So the plan uses one device unless all together are faster by more than that. The faster plan stays
//! among the alternatives, and [`fastest`](crate::Request::fastest) takes it.

use crate::explain::alternatives;
use crate::request::{GivenDegrees, Muted, SearchKind};
use crate::search::choice::fits;
use crate::search::context::SearchContext;
use crate::search::fitting::plans_that_fit;
use crate::search::predictor::Calibration;
use crate::search::space::SearchSpace;
use altiplano_ir::cluster::DeviceKind;
use altiplano_ir::plan::{Alternative, Plan, Target};

/// Speedup that several devices must have over one. Predictions of plans on different numbers of devices differ from
/// measured steps by up to about as much (benches/results/fidelity.md).
pub const ENOUGH: f64 = 1.2;

/// Name of the alternative for a faster plan on more devices.
pub const FASTER: &str = "faster";

/// Returns the plan on one device, if it should replace `plan`.
pub fn instead_of(cx: &SearchContext<'_>, plan: &Plan) -> Option<Plan> {
    let SearchContext { request, space, progress, .. } = *cx;
    let [group] = request.cluster.groups.as_slice() else { return None };
    let given = [
        request.degrees.dp,
        request.degrees.tp,
        request.degrees.pp,
        request.degrees.virtual_stages,
        request.degrees.cp,
        request.degrees.ep,
        request.degrees.groups,
    ];
    let asked = given.iter().any(Option::is_some) || request.degrees.zero.is_some() || !request.graph.pins.is_empty();
    let ours = request.target == Target::Altiplano && request.search == SearchKind::Whole;
    let is_open = !request.fastest && !asked && ours && !space.streams && request.servers.is_none();
    if !is_open || group.device.kind != DeviceKind::Gpu || plan.num_devices() <= 1 || progress.stopped() {
        return None;
    }
    let most_s = plan.predicted.step_time_s * ENOUGH;
    if plan.predicted.lower_bound_s * f64::from(request.cluster.num_devices()) > most_s {
        return None;
    }
    let alone = SearchSpace {
        degrees: GivenDegrees {
            dp: Some(1),
            tp: Some(1),
            pp: Some(1),
            virtual_stages: Some(1),
            zero: Some(0),
            ..space.degrees
        },
        zero_bubble: false,
        all_devices: false,
        ..space.clone()
    };
    let quietly = Muted(progress);
    let alone = SearchContext { space: &alone, progress: &quietly, ..*cx };
    let plans = plans_that_fit(&alone, Calibration::default()).ok()?;
    let of_one = plans.into_iter().find(|plan| plan.num_devices() == 1 && fits(plan))?;
    (of_one.predicted.step_time_s <= most_s).then_some(of_one)
}

/// The alternative for a faster plan on more devices.
pub fn line(plan: &Plan, of_one: &Plan) -> Alternative {
    let gain = 100.0 * (of_one.predicted.step_time_s / plan.predicted.step_time_s - 1.0);
    Alternative {
        name: FASTER.into(),
        predicted: Some(plan.predicted.clone()),
        fits: true,
        detail: format!("{}; {gain:.0} % faster on {} devices", alternatives::shape(plan), plan.num_devices()),
    }
}

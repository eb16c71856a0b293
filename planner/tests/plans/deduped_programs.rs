//! Equal lanes of a pipeline are lowered and timed once. A prediction from such a deduped equals the one from all
//! programs.

use crate::support::networks::{convolutional, mixture_of_experts, skipping};
use crate::support::transformer;
use altiplano_cost_models::{Rooflines, preset};
use altiplano_ir::batch::{LossKind, find_batch};
use altiplano_ir::graph::Graph;
use altiplano_ir::plan::{Plan, Schedule};
use altiplano_ir::recompute::Recompute;
use altiplano_ir::simplify::simplify;
use altiplano_planner::lower::{DedupedPrograms, TrainingGraphs, lower_deduped, lowered_node_by_node, repeated_layers};
use altiplano_planner::predict::predict;
use altiplano_planner::{Request, Silent, plan, programs};

fn request(traced: &Graph, loss: LossKind, cluster: &str) -> Request {
    let batched = find_batch(traced, &[Some(0), Some(0)]);
    let mut request =
        Request::new(&traced.name, simplify(&batched.graph), loss, preset(cluster).expect("a known preset"));
    request.baselines = false;
    request
}

/// Compares both predictions of a plan, also with an exchange of norms. Returns the number of lanes that are written
/// out.
fn check(plan: &Plan) -> usize {
    let clipped = Plan { clip_norm: Some(1.0), measure_noise: true, ..plan.clone() };
    let written = check_one(plan);
    assert_eq!(check_one(&clipped), written);
    written
}

fn check_one(plan: &Plan) -> usize {
    let costs = Rooflines::of(&plan.cluster);
    let whole = programs(plan).expect("a predicted plan is lowered");
    let mut by_all = plan.clone();
    predict(&mut by_all, &DedupedPrograms::whole(&whole), &costs);
    let derived = TrainingGraphs::of(plan).expect("differentiable");
    // Equal layers of a stage are lowered once as well. The programs are those in which none is.
    assert_eq!(whole, lowered_node_by_node(plan, &derived, &Rooflines::of(&plan.cluster)));
    let deduped = lower_deduped(plan, &derived, &costs, true);
    let mut by_sketch = plan.clone();
    predict(&mut by_sketch, &deduped, &costs);
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-12 * a.abs().max(b.abs());
    for (a, b) in by_all.stages.iter().zip(&by_sketch.stages) {
        let seconds = |s: &altiplano_ir::plan::Stage| {
            let p = &s.predicted;
            [p.forward_s, p.backward_s, p.step_s, p.compute_s, p.communication_s]
        };
        assert!(
            seconds(a).into_iter().zip(seconds(b)).all(|(a, b)| near(a, b)),
            "{:?}\n{:?}",
            a.predicted,
            b.predicted
        );
        assert_eq!((a.predicted.peak_bytes, &a.predicted.memory), (b.predicted.peak_bytes, &b.predicted.memory));
    }
    assert!(near(by_all.predicted.step_time_s, by_sketch.predicted.step_time_s));
    // The same is sent between the same stages.
    let sent = |deduped: &DedupedPrograms<'_>| {
        let all = (0..deduped.programs.transfers.len() as u32).map(altiplano_ir::program::TransferId);
        let mut all: Vec<(u32, u32)> = all.map(|t| deduped.stages_of(t)).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(sent(&deduped), sent(&DedupedPrograms::whole(&whole)));
    let schedule = |s: &DedupedPrograms<'_>| s.programs.programs.iter().map(|p| p.schedule.len()).collect::<Vec<_>>();
    assert_eq!(schedule(&deduped), schedule(&DedupedPrograms::whole(&whole)));
    deduped.same_as.iter().enumerate().filter(|(lane, like)| lane == *like).count()
}

/// All stages of a transformer between the first and the last run the same.
#[test]
fn middle_stages_are_lowered_once() {
    for (schedule, recompute) in [
        (Schedule::OneFOneB, Recompute::None),
        (Schedule::GPipe, Recompute::Full),
        (Schedule::ZbH1, Recompute::Selective),
        (Schedule::PipeDream, Recompute::None),
    ] {
        for (dp, tp) in [(1, 1), (2, 1), (1, 2)] {
            let mut request = request(&transformer(8), LossKind::Mean, &format!("dgx-a100:1/{}", 4 * dp * tp));
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(4));
            (request.schedule, request.recompute, request.batch.num_microbatches) =
                (Some(schedule), Some(recompute), Some(4));
            let plan = plan(&request, &Silent).expect("a plan");
            assert!(check(&plan) < 4, "{schedule:?} {recompute} dp{dp} tp{tp}");
        }
    }
}

/// One of the equal layers of a stage is lowered, or two if the first begins with the values that the stage receives.
#[test]
fn equal_layers_are_lowered_once() {
    for (zero, tp, recompute, pp) in [
        (0, 1, Recompute::None, 1),
        (0, 1, Recompute::None, 2),
        (1, 2, Recompute::Selective, 1),
        (1, 2, Recompute::Selective, 2),
        (2, 1, Recompute::Full, 1),
    ] {
        let mut request = request(&transformer(8), LossKind::Mean, &format!("dgx-a100:1/{}", 2 * tp * pp));
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(2), Some(tp), Some(pp));
        (request.degrees.zero, request.recompute, request.batch.num_microbatches) =
            (Some(zero), Some(recompute), Some(4));
        // Stages that share devices have too few layers to repeat.
        request.degrees.virtual_stages = Some(1);
        let plan = plan(&request, &Silent).expect("a plan");
        check(&plan);
        let graphs = TrainingGraphs::of(&plan).expect("differentiable");
        let [forward, backward] = repeated_layers(&plan, &graphs, &Rooflines::of(&plan.cluster));
        let least = 8 - 2 * pp as usize - 2;
        assert!(forward.min(backward) >= least, "{forward}, {backward} of {:?}, zero {zero}, pp {pp}", plan.layers);
    }
}

#[test]
fn stages_that_share_devices() {
    let mut request = request(&transformer(8), LossKind::Mean, "dgx-a100:1/4");
    (request.degrees.pp, request.degrees.virtual_stages, request.batch.num_microbatches) = (Some(4), Some(2), Some(4));
    let plan = plan(&request, &Silent).expect("a plan");
    assert_eq!(plan.stages.len(), 8);
    check(&plan);
}

/// Equal lanes that form a V: what is `n` stages later on the way down is `n` stages earlier on the way up.
#[test]
fn stages_that_form_a_v() {
    let [zb, dual] = [Schedule::ZbV, Schedule::DualPipeV];
    for (tied, layers, schedule) in [(true, 16, zb), (false, 16, zb), (true, 19, zb), (false, 16, dual)] {
        let network = if tied { transformer(layers) } else { skipping(layers) };
        let mut request = request(&network, LossKind::Mean, "dgx-a100:1/4");
        (request.degrees.pp, request.schedule, request.batch.num_microbatches) =
            (Some(4), Some(schedule), Some(if schedule == dual { 8 } else { 4 }));
        request.batch.global = (schedule == dual).then_some(8);
        let plan = plan(&request, &Silent).expect("a plan");
        assert_eq!((plan.stages.len(), plan.lane_of(7)), (8, 0));
        check(&plan);
    }
}

/// Networks with and without equal lanes: values that skip stages, experts, convolutions, inference, stages of several
/// sizes.
#[test]
fn any_network() {
    let networks = [
        (skipping(8), LossKind::Mean),
        (mixture_of_experts(4), LossKind::Mean),
        (convolutional(4, false), LossKind::Mean),
        (transformer(6), LossKind::Mean),
    ];
    for (network, loss) in networks {
        for pp in [None, Some(2), Some(3), Some(6)] {
            for cluster in ["dgx-a100:1/6", "p3.16xlarge:2", "dgx-h100:1/3"] {
                let mut request = request(&network, loss, cluster);
                request.degrees.pp = pp;
                if let Ok(plan) = plan(&request, &Silent) {
                    check(&plan);
                }
            }
        }
    }
}

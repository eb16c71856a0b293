//! Every plan computes what one device computes: loss, gradients and updated weights.

use crate::support::networks::{convolutional, language_head, mixture_of_experts, skipping};
use crate::support::{check, check_plan, transformer, weighted};
use altiplano_cost_models::{Rooflines, preset};
use altiplano_ir::batch::{LossKind, find_batch};
use altiplano_ir::graph::Graph;
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Plan, Schedule};
use altiplano_ir::program::{BufferId, BufferKind, Phase};
use altiplano_ir::recompute::{Module, Modules, Recomputation, Recompute};
use altiplano_ir::simplify::simplify;
use altiplano_planner::features::chunked_loss::LossChunks;
use altiplano_planner::features::modules::modules_of;
use altiplano_planner::search::fixed_degrees::Degrees;
use altiplano_planner::search::layout::Layout;
use altiplano_planner::search::stated::{Stated, predict_stated};
use altiplano_planner::search::sweep::configured;
use altiplano_planner::{Request, Silent, plan, programs};

fn request(cluster: &str) -> Request {
    request_of(&transformer(2), LossKind::Mean, cluster)
}

fn request_of(traced: &Graph, loss: LossKind, cluster: &str) -> Request {
    let batched = find_batch(traced, &[Some(0), Some(0)]);
    assert_eq!((batched.loss, &batched.doubt), (loss, &None));
    let graph = simplify(&batched.graph);
    let mut request = Request::new(&traced.name, graph, batched.loss, preset(cluster).expect("a known preset"));
    request.training.optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    request.baselines = false;
    request
}

#[test]
fn every_combination_of_degrees() {
    for (dp, tp, pp) in [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)] {
        let mut request = request(&format!("local:{}", dp * tp * pp));
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
        let plan = check(&request);
        assert_eq!(plan.num_lanes() as u32, pp);
        assert!(plan.stages.iter().all(|s| s.mesh.num_devices() == dp * tp));
    }
}

/// Logits in chunks give the losses and gradients of whole logits, with weights of either orientation. A device never
/// holds more than one chunk of them.
#[test]
fn logits_in_chunks_compute_the_same() {
    for (dp, tp, microbatches) in [(1, 1, 2), (4, 1, 1), (1, 4, 1), (2, 2, 2)] {
        for (contract, chunks, recompute) in [(0, 2, Recompute::None), (1, 4, Recompute::Full)] {
            let graph = language_head(contract);
            // The kind of loss is detected before composites are recognised.
            let mut request = request_of(&graph, LossKind::Other, &format!("local:{}", dp * tp));
            request.loss = LossKind::Mean;
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(1));
            (request.loss_chunks, request.recompute) = (LossChunks::Count(chunks), Some(recompute));
            request.batch.num_microbatches = Some(microbatches);
            let plan = check(&request);
            assert!(plan.graph.to_string().contains("linear_cross_entropy"), "{}", plan.graph);
            let classes = 24 / u64::from(tp);
            // So small a model is faster with the whole batch on each device than with gradients to reduce.
            let chunk = plan.microbatch * 12 / chunks * 24;
            let programs = programs(&plan).expect("programs");
            let nodes = programs.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.graph.nodes);
            let logits =
                nodes.filter(|n| n.ty.shape.len() == 3 && n.ty.shape.last().is_some_and(|&d| d >= classes && d != 6));
            assert!(logits.clone().next().is_some());
            assert!(logits.map(|n| n.ty.elements()).all(|elements| elements <= chunk), "{dp} {tp}");
        }
    }
}

/// Frozen parameters have no gradient and stay as they are, whether a stage trains some of its parameters, none or all.
#[test]
fn frozen_parameters_stay_as_they_are() {
    let tensors = transformer(2).parameters().count();
    let frozen: [&dyn Fn(usize) -> bool; 3] = [&|i| i % 2 == 0, &|i| i < tensors / 2, &|i| i + 2 < tensors];
    for is_frozen in frozen {
        let mut network = transformer(2);
        let parameters: Vec<_> = network.parameters().map(|(v, _)| v).collect();
        for v in parameters.into_iter().enumerate().filter(|(i, _)| is_frozen(*i)).map(|(_, v)| v) {
            if let Op::Parameter(parameter) = &mut network.nodes[v.index()].op {
                parameter.frozen = true;
            }
        }
        let way = |dp, tp, pp| {
            let mut request = request_of(&network, LossKind::Mean, &format!("local:{}", dp * tp * pp));
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
            request
        };
        for (dp, tp, pp) in [(1, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)] {
            check(&way(dp, tp, pp));
        }
        for zero in [0, 2, 3] {
            let mut request = way(2, 1, 2);
            (request.degrees.zero, request.batch.num_microbatches) = (Some(zero), Some(2));
            check(&request);
        }
        let all = request_of(&transformer(2), LossKind::Mean, "local:1");
        let held = |request: &Request| check(request).predicted.peak_bytes[0];
        assert!(held(&way(1, 1, 1)) < held(&all), "what is frozen has no gradient in memory");
        for schedule in [Schedule::ZbH1, Schedule::PipeDream] {
            let mut request = way(1, 1, 3);
            (request.schedule, request.batch.num_microbatches) = (Some(schedule), Some(4));
            check(&request);
        }
    }
}

/// Layers of several blocks each, whose tables are put together from those of blocks.
#[test]
fn more_blocks_than_layers() {
    for (dp, tp, pp) in [(2, 1, 2), (1, 2, 2), (1, 4, 1)] {
        let mut request = request_of(&transformer(70), LossKind::Mean, "local:4");
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
        let plan = check(&request);
        assert!(plan.num_layers() < 70);
    }
    // Two values pass between blocks here, so layers are solved as wholes.
    let mut request = request_of(&skipping(140), LossKind::Mean, "local:2");
    request.degrees.pp = Some(2);
    assert!(check(&request).num_layers() < 140);
}

/// Convolutions with and without batch statistics, and experts, in which each degree splits something else.
#[test]
fn other_kinds_of_networks() {
    let networks = [
        (convolutional(3, true), LossKind::Other),
        (convolutional(3, false), LossKind::Mean),
        (mixture_of_experts(2), LossKind::Mean),
    ];
    for (network, loss) in networks {
        for (dp, tp, pp) in [(4, 1, 1), (1, 4, 1), (1, 1, 3), (2, 2, 1), (2, 1, 2), (1, 2, 2)] {
            let mut request = request_of(&network, loss, &format!("local:{}", dp * tp * pp));
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
            check(&request);
            if loss == LossKind::Mean && dp < 4 {
                request.batch.num_microbatches = Some(2);
                check(&request);
            }
        }
        check(&request_of(&network, loss, "local:4"));
    }
}

#[test]
fn every_way_to_store_and_to_recompute() {
    for zero in 0..=3 {
        for recompute in Recompute::ALL {
            let mut request = request("local:4");
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(2), Some(1), Some(2));
            (request.degrees.zero, request.recompute, request.batch.num_microbatches) =
                (Some(zero), Some(recompute), Some(2));
            let plan = check(&request);
            assert!(plan.stages.iter().all(|s| s.zero == zero && s.recompute == Recomputation::Alike(recompute)));
        }
    }
}

/// Selective recomputation of any module computes the same, and each module that a model has frees memory.
#[test]
fn every_module_can_be_recomputed() {
    for (network, own) in [(transformer(3), Module::Mlp), (mixture_of_experts(3), Module::Experts)] {
        assert!(modules_of(&simplify(&network)).contains(own));
        for (dp, tp, pp) in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)] {
            let peak = |modules: Option<Modules>| {
                let mut request = request_of(&network, LossKind::Mean, &format!("local:{}", dp * tp * pp));
                (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
                request.recompute = Some(if modules.is_some() { Recompute::Selective } else { Recompute::None });
                request.recompute_modules = modules;
                let plan = check(&request);
                assert_eq!(plan.execution.recompute_modules, modules.unwrap_or_default());
                plan.predicted.peak_bytes.iter().max().copied()
            };
            let kept = peak(None);
            assert!(peak(Some(Modules::NONE.with(own))) < kept, "{own:?} dp{dp} tp{tp} pp{pp}");
            peak(Some(Module::ALL.into_iter().collect()));
        }
    }
}

/// Degrees of a plan of one stage.
fn degrees(dp: u32, tp: u32, zero: u8) -> Degrees {
    Degrees {
        dp,
        tp,
        cp: 1,
        stages: 1,
        virtual_stages: 1,
        num_microbatches: 1,
        zero,
        recompute: Recompute::None,
        layout: Layout::Even,
        experts: 1,
        groups: 1,
        sequence: tp > 1,
    }
}

/// Each group of replicas holds all that the replicas inside of it share: two groups of two hold twice as much as four
/// replicas that share.
#[test]
fn groups_of_replicas_hold_all_state() {
    for (zero, tp) in [(1, 1), (2, 1), (3, 1), (3, 2)] {
        let request = request(&format!("local:{}", 4 * tp));
        let costs = Rooflines::of(&request.cluster);
        let plans = [1, 2].map(|groups| {
            let plan = configured(&request, &Degrees { groups, ..degrees(4, tp, zero) }, &costs).expect("a plan");
            check_plan(&request, &plan);
            plan
        });
        let held = |plan: &Plan| -> u64 {
            let bytes = |(p, name): (_, &str)| {
                plan.stages[0].parameters[name].state.local_bytes(plan.graph.ty(p), &plan.stages[0].mesh)
            };
            plan.graph.parameters().map(bytes).sum()
        };
        let [over_all, in_groups] = plans.each_ref().map(held);
        assert!(over_all < in_groups && in_groups <= 2 * over_all, "{over_all} {in_groups}");
        assert_eq!(plans[1].stages[0].mesh.axes[0].size, 2);
    }
}

/// Experts are dealt out to some of the replicas, and to these with tensor-parallel devices.
#[test]
fn some_replicas_divide_the_experts() {
    let request = request_of(&mixture_of_experts(2), LossKind::Mean, "local:4");
    let costs = Rooflines::of(&request.cluster);
    let parts = |plan: &Plan| {
        let up = plan.stages[0].parameters.iter().find(|(name, _)| name.ends_with("up")).expect("experts").1;
        up.parameter.dims[0].axes().map(|axis| plan.stages[0].mesh.size(axis)).product::<u64>()
    };
    for (dp, tp, ep, etp) in [(4, 1, 2, 1), (4, 1, 4, 1), (2, 2, 2, 2), (2, 2, 4, 1), (2, 2, 2, 1)] {
        let stated = Stated {
            degrees: degrees(dp, tp, 0),
            ep,
            etp: Some(etp),
            blocks: None,
            full_blocks: None,
            splits_positions: true,
        };
        let plan =
            predict_stated(&request, &stated, &costs).unwrap_or_else(|e| panic!("dp{dp} tp{tp} ep{ep} etp{etp}: {e}"));
        check_plan(&request, &plan);
        assert_eq!(parts(&plan), u64::from(ep), "{}", plan.stages[0].mesh);
    }
}

/// Means that are divided by a count of the whole batch. Microbatches and replicas have parts of that count.
#[test]
fn weighted_means_accumulate_over_microbatches() {
    let network = weighted(4);
    let request = |cluster: &str, (dp, tp, pp): (u32, u32, u32), microbatches: u32| {
        let mut request = request_of(&network, LossKind::Mean, cluster);
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
        request.batch.num_microbatches = Some(microbatches);
        request
    };
    let called = |plan: &Plan| {
        let programs = programs(plan).expect("programs").programs;
        programs.iter().flat_map(|p| &p.bodies).filter(|body| body.phase == Phase::Totals).count()
    };
    for degrees in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)] {
        let devices = degrees.0 * degrees.1 * degrees.2;
        for microbatches in [1, 2] {
            let plan = check(&request(&format!("local:{devices}"), degrees, microbatches));
            // One stage has the loss, and one microbatch has nothing to add up.
            assert_eq!(called(&plan), usize::from(microbatches > 1));
        }
    }
    let mut stored = request("local:2", (2, 1, 1), 2);
    (stored.degrees.zero, stored.recompute) = (Some(3), Some(Recompute::Full));
    check(&stored);
    for schedule in [Schedule::GPipe, Schedule::ZbH1, Schedule::PipeDream] {
        let mut request = request("local:2", (1, 1, 2), 4);
        request.schedule = Some(schedule);
        assert_eq!(check(&request).schedule, schedule);
    }
    let mut sharing = request("local:2", (1, 1, 2), 4);
    sharing.degrees.virtual_stages = Some(2);
    check(&sharing);
}

/// A device that lacks a little memory recomputes some layers, not all.
#[test]
fn as_much_is_recomputed_as_must_be() {
    let of = |recompute: Option<Recompute>, memory_bytes: Option<u64>| {
        let mut request = request_of(&transformer(12), LossKind::Mean, "local:2");
        (request.degrees.pp, request.degrees.virtual_stages, request.schedule) =
            (Some(2), Some(1), Some(Schedule::OneFOneB));
        (request.batch.num_microbatches, request.recompute) = (Some(4), recompute);
        let device = &mut request.cluster.groups[0].device;
        device.memory_bytes = memory_bytes.unwrap_or(device.memory_bytes);
        request
    };
    let peak = |plan: &Plan| plan.predicted.peak_bytes.iter().copied().max().unwrap();
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let [kept, full] = [Recompute::None, Recompute::Full].map(|r| check(&of(Some(r), None)));
    assert!(peak(&full) < peak(&kept) && step_s(&kept) < step_s(&full));
    let between = check(&of(None, Some((peak(&kept) + 2 * peak(&full)) / 3)));
    assert!(step_s(&between) < step_s(&full), "{} and {}", step_s(&between), step_s(&full));
    assert!(between.stages.iter().any(|s| s.recompute.least() < Recompute::Full));
    let mixed = between.stages.iter().any(|s| matches!(s.recompute, Recomputation::ByLayer(_)));
    let of_stages = between.stages.iter().map(|s| s.recompute.to_string()).collect::<Vec<_>>();
    assert!(mixed, "{of_stages:?}");
    assert_eq!(Plan::from_json(&between.to_json()).unwrap(), between);
}

#[test]
fn all_schedules_and_many_microbatches() {
    for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::PipeDream] {
        let mut request = request("local:3");
        (request.degrees.pp, request.schedule, request.batch.num_microbatches) = (Some(3), Some(schedule), Some(4));
        assert_eq!(check(&request).schedule, schedule);
    }
}

/// Stages that share devices, with microbatches that fill all groups and others that do not. The transformer's token
/// table is on the first and the last stage.
#[test]
fn stages_that_share_devices() {
    for (cluster, dp, tp, pp, shared, microbatches) in [
        ("local:2", 1, 1, 2, 2, 4),
        ("local:2", 1, 1, 2, 3, 2),
        ("local:2", 1, 1, 2, 2, 1),
        ("local:3", 1, 1, 3, 2, 4),
        ("local:4", 2, 1, 2, 2, 2),
        ("local:4", 1, 2, 2, 3, 4),
    ] {
        for (zero, recompute) in [(0, Recompute::None), (3, Recompute::Full)] {
            let mut request = request_of(&transformer(5), LossKind::Mean, cluster);
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
            (request.degrees.virtual_stages, request.batch.num_microbatches) = (Some(shared), Some(microbatches));
            (request.degrees.zero, request.recompute) = (Some(zero), Some(recompute));
            let plan = check(&request);
            assert_eq!((plan.virtual_stages, plan.stages.len() as u32), (shared, pp * shared));
            assert_eq!(plan.num_lanes() as u32, pp);
        }
    }
}

/// Lanes whose two stages form a V: the last lane hands values to itself, and the first has both ends of the model.
#[test]
fn stages_that_form_a_v() {
    for (cluster, dp, tp, pp, microbatches) in [
        ("local:2", 1, 1, 2, 1),
        ("local:2", 1, 1, 2, 4),
        ("local:3", 1, 1, 3, 4),
        ("local:4", 2, 1, 2, 2),
        ("local:4", 1, 2, 2, 4),
    ] {
        let cases = [
            (Schedule::ZbV, 0, Recompute::None),
            (Schedule::ZbV, 3, Recompute::Full),
            (Schedule::DualPipeV, 0, Recompute::Full),
        ];
        for (schedule, zero, recompute) in cases {
            if !schedule.can_share(2, microbatches.into(), pp) {
                continue;
            }
            let mut request = request_of(&transformer(5), LossKind::Mean, cluster);
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
            (request.schedule, request.batch.num_microbatches) = (Some(schedule), Some(microbatches));
            (request.degrees.zero, request.recompute) = (Some(zero), Some(recompute));
            let plan = check(&request);
            assert_eq!((plan.schedule, plan.num_lanes() as u32, plan.virtual_stages), (schedule, pp, 2));
            assert_eq!(plan.stages[0].devices, plan.stages[2 * pp as usize - 1].devices);
            assert_eq!(Plan::from_json(&plan.to_json()).unwrap(), plan);
        }
    }
}

/// Gradients of weights run apart from the cotangents that earlier stages wait for, however a stage is split and
/// whatever it keeps.
#[test]
fn gradients_of_weights_apart() {
    for (network, dp, tp, microbatches) in [
        (transformer(4), 1, 1, 4),
        (transformer(3), 2, 1, 2),
        (transformer(3), 1, 2, 4),
        (mixture_of_experts(2), 1, 1, 2),
        (skipping(6), 2, 1, 2),
    ] {
        for (zero, recompute) in [(0, Recompute::None), (1, Recompute::Full), (3, Recompute::Selective)] {
            let mut request = request_of(&network, LossKind::Mean, &format!("local:{}", 3 * dp * tp));
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(3));
            (request.schedule, request.batch.num_microbatches) = (Some(Schedule::ZbH1), Some(microbatches));
            (request.degrees.zero, request.recompute) = (Some(zero), Some(recompute));
            let plan = check(&request);
            assert_eq!(plan.schedule, Schedule::ZbH1);
            let programs = programs(&plan).expect("programs");
            let mut both = 0;
            for (stage, program) in (0..).zip(&programs.programs) {
                let body = |phase: Phase| &program.bodies[program.body_of(stage, phase).expect("a body") as usize];
                let (backward, weights) = (body(Phase::Backward), body(Phase::Weights));
                let sums = |b: &(BufferId, _)| matches!(program.buffer(b.0).kind, BufferKind::Accumulator { .. });
                assert!(!backward.writes.iter().any(sums) && weights.writes.iter().all(sums));
                both += usize::from(!backward.writes.is_empty() && !weights.writes.is_empty());
            }
            // Nobody waits for the first stage, and the last may have no weights.
            assert!(both > 0, "nothing is split");
        }
    }
}

/// Values that skip stages, to their own devices and to others.
#[test]
fn skips_between_stages_that_share_devices() {
    let network = skipping(8);
    let mut request = request_of(&network, LossKind::Mean, "local:2");
    (request.degrees.pp, request.degrees.virtual_stages, request.batch.num_microbatches) = (Some(2), Some(4), Some(4));
    let plan = check(&request);
    let programs = programs(&plan).expect("programs");
    let (to_itself, to_others): (Vec<_>, Vec<_>) = programs.transfers.iter().partition(|t| t.source.0 == t.target.0);
    assert!(!to_itself.is_empty() && !to_others.is_empty(), "{to_itself:?} {to_others:?}");
}

#[test]
fn what_the_search_chooses() {
    for cluster in ["local:1", "local:2", "local:3", "local:4", "local:8"] {
        let mut request = request(cluster);
        check(&request);
        request.batch.global = Some(16);
        check(&request);
    }
}

#[test]
fn the_same_request_gives_the_same_plan_to_the_byte() {
    let first = plan(&request("local:8"), &Silent).expect("a plan").to_json();
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    let second = alone.install(|| plan(&request("local:8"), &Silent).expect("a plan").to_json());
    assert!(first == second, "plans differ between runs or numbers of threads");
}

#[test]
fn contradictions_and_impossible_requests_are_refused() {
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = request("local:4");
        change(&mut request);
        match plan(&request, &Silent) {
            Err(failure) => (failure.is_usage(), failure.to_string()),
            Ok(_) => panic!("an impossible request was planned"),
        }
    };
    for (change, expected) in [
        (&(|r: &mut Request| r.degrees.dp = Some(3)) as &dyn Fn(&mut Request), "--dp 3"),
        (&|r| r.degrees.pp = Some(0), "--pp"),
        (&|r| r.batch.num_microbatches = Some(3), "does not divide"),
        (&|r| r.batch.microbatch = Some(3), "does not divide"),
        (
            &|r| (r.batch.microbatch, r.batch.num_microbatches, r.batch.global) = (Some(2), Some(2), Some(8)),
            "--global-batch",
        ),
        (&|r| r.degrees.zero = Some(4), "--zero"),
        (&|r| r.degrees.virtual_stages = Some(0), "--virtual-stages"),
        (
            &|r| (r.degrees.virtual_stages, r.schedule) = (Some(2), Some(Schedule::GPipe)),
            "1f1b, zb-v and dualpipe-v only",
        ),
        (&|r| (r.degrees.virtual_stages, r.schedule) = (Some(3), Some(Schedule::ZbV)), "must be 2"),
        (&|r| (r.degrees.virtual_stages, r.schedule) = (Some(4), Some(Schedule::DualPipeV)), "must be 2"),
        (&|r| (r.degrees.pp, r.schedule) = (Some(1), Some(Schedule::ZbV)), "--pp: 1 must be 2 or more"),
        (&|r| (r.degrees.virtual_stages, r.degrees.pp) = (Some(2), Some(1)), "two blocks"),
        (&|r| (r.degrees.virtual_stages, r.degrees.pp) = (Some(9), Some(2)), "too few for 18"),
    ] {
        let (usage, message) = refused(change);
        assert!(usage && message.contains(expected), "{message}");
    }
    let (usage, message) = refused(&|r| r.cluster.groups[0].device.memory_bytes = 1000);
    assert!(!usage && message.contains("more than the 1.00 kB"), "{message}");
    let (_, message) = refused(&|r| {
        r.cluster = preset("local:8").expect("a known preset");
        r.degrees.pp = Some(8);
    });
    assert!(message.contains("too few for 8"), "{message}");
}

//! Clusters of several groups of nodes: one plan over different devices, each stage in one group.

use crate::support::{check, transformer};
use altiplano_cost_models::preset;
use altiplano_ir::batch::{LossKind, find_batch};
use altiplano_ir::cluster::{BetweenGroups, Cluster};
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Plan, PlanError};
use altiplano_ir::simplify::simplify;
use altiplano_planner::{PlanFailure, Request, Silent, plan};

/// Groups of presets with a link between them.
fn cluster(presets: &[&str], bytes_per_s: f64) -> Cluster {
    let groups = presets.iter().flat_map(|text| preset(text).expect("a known preset").groups).collect();
    let between_groups = Some(BetweenGroups { bytes_per_s, latency_s: 1e-5 });
    Cluster { name: "several".into(), groups, between_groups, storage: None }
}

fn request(cluster: Cluster) -> Request {
    let traced = transformer(4);
    let batched = find_batch(&traced, &[Some(0), Some(0)]);
    let mut request = Request::new(&traced.name, simplify(&batched.graph), LossKind::Mean, cluster);
    request.training.optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    request.baselines = false;
    request
}

/// Every device must be used, so both groups have stages. The plan computes what one device computes.
#[test]
fn a_plan_over_two_groups_computes_the_same() {
    for (presets, dp, tp, pp) in [
        (["local:1", "local:2"], 1, 1, 3),
        (["local:2", "local:2"], 2, 1, 2),
        (["local:2", "local:4"], 1, 2, 3),
        (["dgx-a100:1/2", "p3.16xlarge:1/2"], 2, 1, 2),
    ] {
        let mut request = request(cluster(&presets, 1e10));
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
        let plan = check(&request);
        let groups: Vec<u32> = plan.stages.iter().map(|s| s.group).collect();
        assert!(groups.contains(&0) && groups.contains(&1), "{presets:?}: {groups:?}");
        for stage in &plan.stages {
            let of_group = plan.cluster.devices_of(stage.group as usize);
            assert!(stage.devices.iter().all(|d| of_group.contains(d)), "{:?} in {of_group:?}", stage.devices);
        }
    }
}

/// By the predictions, a second group never makes a plan slower. Predictions within 2 % of each other count as equal,
/// and then fewer devices win.
#[test]
fn more_groups_are_never_slower() {
    for presets in [["dgx-a100:1/2", "p3.16xlarge:1"], ["p3.16xlarge:1/2", "dgx-h100:1/1"], ["local:2", "local:3"]] {
        for bytes_per_s in [1e7, 1e10] {
            let both = cluster(&presets, bytes_per_s);
            let whole = check(&request(both.clone())).predicted.step_time_s;
            for group in both.groups {
                let name = format!("{} x {}", group.num_devices(), group.device.name);
                let alone = Cluster { name: name.clone(), groups: vec![group], between_groups: None, storage: None };
                let alone = plan(&request(alone), &Silent).expect("a plan").predicted.step_time_s;
                assert!(whole <= alone * 1.02, "{whole} on {presets:?}, {alone} on {name}");
            }
        }
    }
}

/// A pipeline over two groups pays if neither group has the memory. Each stage keeps to the memory of its own devices.
#[test]
fn a_model_that_only_both_groups_hold() {
    let mut both = cluster(&["local:1", "local:1"], 1e10);
    let alone = |group: usize, memory_bytes: u64| {
        let mut one = cluster(&["local:1"], 1e10);
        one.groups[0] = both.groups[group].clone();
        one.groups[0].device.memory_bytes = memory_bytes;
        plan(&request(one), &Silent)
    };
    let needed = alone(0, 1 << 40).expect("a plan").predicted.peak_bytes[0];
    // The largest memory that is known to be too small for the whole model.
    let (mut fails, mut fits) = (0, needed);
    while fits - fails > needed / 64 {
        let middle = fails + (fits - fails) / 2;
        if alone(0, middle).is_ok() { fits = middle } else { fails = middle }
    }
    both.groups[0].device.memory_bytes = fails * 19 / 20;
    both.groups[1].device.memory_bytes = fails * 9 / 10;
    let limits: Vec<u64> = both.groups.iter().map(|g| g.device.memory_bytes).collect();
    let plan = check(&request(both));
    assert_eq!(plan.stages.len(), 2);
    for stage in &plan.stages {
        assert!(stage.predicted.peak_bytes <= limits[stage.group as usize]);
    }
}

#[test]
fn degrees_that_no_group_holds_are_refused() {
    let refused = |dp, tp, pp| {
        let mut request = request(cluster(&["local:2", "local:4"], 1e10));
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (dp, tp, pp);
        let failure = plan(&request, &Silent).expect_err("no plan");
        assert!(failure.is_usage(), "{failure}");
        failure
    };
    for (dp, tp, pp) in
        [(Some(5), None, None), (None, Some(5), None), (Some(6), Some(1), Some(1)), (Some(3), Some(2), None)]
    {
        let failure = refused(dp, tp, pp);
        assert!(matches!(failure, PlanFailure::StageOverGroups { .. }), "{failure}");
    }
    assert!(matches!(refused(Some(2), Some(1), Some(2)), PlanFailure::Degrees { product: 4, devices: 6, .. }));
}

/// A fixed degree holds for every stage. Free degrees may differ between the groups.
#[test]
fn a_degree_holds_for_stages_in_both_groups() {
    let mut request = request(cluster(&["local:2", "local:4"], 1e10));
    (request.degrees.tp, request.degrees.pp) = (Some(2), Some(2));
    let plan = check(&request);
    assert_eq!(plan.stages.len(), 2);
    assert!(plan.stages.iter().all(|s| s.mesh.axes[1].size == 2));
}

#[test]
fn a_stage_with_devices_of_another_group_is_refused() {
    let mut request = request(cluster(&["local:1", "local:1"], 1e10));
    (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(1), Some(1), Some(2));
    let good = plan(&request, &Silent).expect("a plan");
    let broken = |change: &dyn Fn(&mut Plan)| {
        let mut plan = good.clone();
        change(&mut plan);
        let errors = plan.verify().into_iter().map(|error| match error {
            PlanError::Invalid { path, .. } => path,
            other => other.to_string(),
        });
        errors.collect::<Vec<_>>()
    };
    assert_eq!(broken(&|_| {}), [""; 0]);
    let other = 1 - good.stages[0].group;
    assert_eq!(broken(&|p| p.stages[0].group = other), ["stages[0].devices"]);
    assert_eq!(broken(&|p| p.stages[1].group = 2), ["stages[1].group"]);
    assert_eq!(broken(&|p| p.cluster.between_groups = None), ["cluster.between_groups"]);
    assert_eq!(broken(&|p| p.cluster.groups[1].nodes = u32::MAX), ["cluster.groups"]);
}

use super::*;

#[test]
fn counts_of_nodes_are_read() {
    let good =
        [("4,1,2", vec![1, 2, 4]), ("1,2,4,...,64", vec![1, 2, 4, 8, 16, 32, 64]), ("3,...,20", vec![3, 6, 12, 20])];
    for (text, counts) in good {
        assert_eq!(node_counts(text).ok(), Some(counts), "{text}");
    }
    for bad in ["", "0", "1,1", "1,2,...,2", "4294967296", "-1", "1.5", "...,4", "1,...", "1,...,...,8", "1,,2", "x"] {
        let error = node_counts(bad).expect_err(bad);
        assert!(error.is_usage() && error.to_string().starts_with("--nodes"), "{bad}: {error}");
    }
}

/// A row with these hours, on nodes of one device.
fn row(nodes: u32, hours: f64) -> Row {
    let training = Training {
        steps: 1.0,
        samples: 1.0,
        hours,
        wait_hours: None,
        device_hours: hours * f64::from(nodes),
        price: None,
        kwh: None,
        formula_hours: None,
    };
    let point = Point {
        nodes_used: nodes,
        devices: nodes,
        devices_used: nodes,
        global_batch: 1,
        local_batch: 1.0,
        step_time_s: 1.0,
        samples_per_s: 1.0,
        mfu: 0.5,
        device_flop_per_s: 1.0,
        recomputed: false,
        peak_bytes: 0,
        how: String::new(),
        efficiency: 1.0,
        input: None,
        parts: Vec::new(),
        change: None,
        training: Some(training),
        on_front: false,
    };
    Row { nodes, devices: nodes, plan: Err(PlanFailure::NoCombination), point: Some(point) }
}

#[test]
fn the_front_and_the_count_to_take() {
    // Time x device-hours: 10000, 6050, 5184, 8712, 17424.
    let mut rows = vec![row(1, 100.0), row(2, 55.0), row(4, 36.0), row(8, 33.0), row(16, 33.0)];
    mark_front(&mut rows);
    let front: Vec<u32> =
        rows.iter().filter(|r| r.point.as_ref().is_some_and(|p| p.on_front)).map(|r| r.nodes).collect();
    assert_eq!(front, [1, 2, 4, 8]);
    let take = |hours| recommended(&rows, hours).map(|r| (r.nodes, r.rule));
    assert_eq!(take(None), Some((4, Rule::Knee)));
    assert_eq!(take(Some(60.0)), Some((2, Rule::WithinHours)));
    assert_eq!(take(Some(34.0)), Some((8, Rule::WithinHours)));
    assert_eq!(take(Some(1.0)), Some((8, Rule::Fastest)));
    assert_eq!(recommended(&[], None), None);
}

#[test]
fn what_changed_most_is_named() {
    let of = |parts: &[(&str, f64)]| sorted(parts.iter().map(|(what, s)| (what.to_string(), *s)).collect());
    let base = of(&[("computing", 10.0), ("waiting", 1.0)]);
    let more = change(&base, &of(&[("computing", 9.0), ("waiting", 2.0), ("sending", 4.0)])).expect("a change");
    assert_eq!((more.what.as_str(), more.device_s, more.part), ("sending", 4.0, 0.8));
    let less = change(&base, &of(&[("computing", 7.0), ("waiting", 1.5)])).expect("a change");
    assert_eq!((less.what.as_str(), less.device_s, less.part), ("computing", -3.0, 1.0));
    assert_eq!(change(&base, &base), None);
}

#[test]
fn waits_for_nodes_count_as_time() {
    let mut rows = vec![row(1, 100.0), row(2, 55.0), row(4, 36.0), row(8, 33.0)];
    let waits = [0.0, 0.0, 10.0, 60.0];
    for (row, wait) in rows.iter_mut().zip(waits) {
        row.point.as_mut().and_then(|p| p.training.as_mut()).expect("training").wait_hours = Some(wait);
    }
    mark_front(&mut rows);
    let on_front: Vec<bool> = rows.iter().filter_map(|r| r.point.as_ref()).map(|p| p.on_front).collect();
    assert_eq!(on_front, [true, true, true, false], "8 nodes are done after 93 hours, 4 after 46");
    let take = |hours| recommended(&rows, hours).map(|r| (r.nodes, r.rule));
    // Time x device-hours: 10000, 6050, 46 x 144 = 6624, 93 x 264.
    assert_eq!(take(None), Some((2, Rule::Knee)));
    assert_eq!(take(Some(50.0)), Some((4, Rule::WithinHours)));
    assert_eq!(take(Some(40.0)), Some((4, Rule::Fastest)), "36 hours begin after 10");
}

/// Sixteen nodes of eight devices, each with one network card of 10 GB/s; 128 device-seconds of computation per step.
#[test]
fn exchanges_are_priced_by_their_definitions() {
    let mut group = altiplano_cost_models::preset("dgx-a100:16").expect("a cluster").groups.remove(0);
    (group.inter_node.nics, group.inter_node.bytes_per_s) = (1, 10e9);
    let mut point = row(16, 1.0).point.expect("a point");
    let spent = |what: &str, device_s: f64| Spent { what: what.into(), device_s, part: 0.5 };
    (point.global_batch, point.devices, point.devices_used) = (64, 128, 128);
    // A step computes for 1 s, and communicates for 0.1 s over tensor and 0.4 s over data.
    point.step_time_s = 1.5;
    point.parts = vec![
        spent("computing", 2.0),
        spent("all_reduce over data, over the network", 0.6),
        spent("reduce_scatter over data2+tensor, over the network", 0.2),
        spent("all_gather over tensor, over the links within a node", 0.2),
    ];
    let of =
        |point: &Point, nodes: u32, bytes: u64, jitter: f64| exchange::exchanges(&group, nodes, point, bytes, jitter);
    let names = ["synchronous", "one step late", "synchronous servers", "asynchronous servers"];
    for jitter in [0.0, 0.1] {
        let found = of(&point, 16, 100_000_000, jitter);
        assert_eq!(found.iter().map(|way| way.name).collect::<Vec<_>>(), names);
        let late = |workers: f64| 128.0 / workers * (1.0 + jitter * arithmetic::expected_maximum(workers as u64));
        let into = |k: f64| 8.0 * (16.0 - k) / k * 1e8 / 10e9;
        let of_node = 8.0 * 1e8 / 10e9;
        // The minimum over all numbers of servers.
        let least = |seconds: &dyn Fn(f64) -> f64| (1..16).map(|k| seconds(f64::from(k))).fold(f64::MAX, f64::min);
        let expected = [
            late(128.0) + 0.5,
            late(128.0) + 0.1,
            least(&|k| late((16.0 - k) * 8.0) + 2.0 * into(k).max(of_node)),
            least(&|k| (128.0 / ((16.0 - k) * 8.0) + 2.0 * of_node).max(into(k))),
        ];
        for (way, expected) in found.iter().zip(expected) {
            assert!((way.step_time_s - expected).abs() < 1e-12, "{way:?}: {expected}");
        }
        assert_eq!(found[1].staleness, 1.0);
        assert_eq!(found[3].staleness, f64::from(found[3].workers - 1));
        assert!(found[0].staleness == 0.0 && found[2].staleness == 0.0);
    }
    // If an exchange takes longer than the computation, it determines the step time, one step late.
    point.step_time_s = 8.0;
    point.parts[1].device_s = 13.8;
    assert!((of(&point, 16, 0, 0.0)[1].step_time_s - 7.0).abs() < 1e-12);
    // With nothing to send, one server suffices. With nothing to compute and all waiting, there are as many servers as
    // workers.
    assert!(of(&point, 16, 0, 0.0)[2..].iter().all(|way| way.servers == Some(1)));
    point.parts.clear();
    let idle = of(&point, 16, 100_000_000, 0.0);
    assert_eq!(idle.iter().map(|way| way.servers).collect::<Vec<_>>(), [None, Some(8), Some(6)]);
    assert_eq!(of(&point, 1, 100_000_000, 0.0).len(), 1, "a node has none left for servers");
}

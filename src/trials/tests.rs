use super::packing::{Placed, Series, end_s, lower_bound_s, pack};
use super::*;

/// Fails if two trials share a device, or a block is none.
fn check(sizes: &[usize], devices: usize, series: &[Series], placed: &[Placed]) {
    for (s, of) in series.iter().enumerate() {
        assert_eq!(placed.iter().filter(|trial| trial.series == s).count(), of.count);
    }
    for (i, a) in placed.iter().enumerate() {
        let end = a.first_device + sizes[a.size];
        assert!(a.first_device.is_multiple_of(sizes[a.size]) && end <= devices, "{a:?}");
        let seconds = series[a.series].seconds[a.size].expect("it runs there");
        assert!((a.end_s - a.start_s - seconds).abs() < 1e-9 * a.end_s.max(1.0), "{a:?}");
        for b in &placed[i + 1..] {
            let apart = b.first_device >= end || b.first_device + sizes[b.size] <= a.first_device;
            assert!(apart || b.start_s >= a.end_s - 1e-9 || a.start_s >= b.end_s - 1e-9, "{a:?} and {b:?}");
        }
    }
}

/// The earliest end over all sizes of all trials and all orders in which they take the block that is free first.
fn exhaustive_s(sizes: &[usize], free_s: &mut [f64], left: &mut [usize], series: &[Series], least_s: &mut f64) {
    let last_s = free_s.iter().copied().fold(0.0, f64::max);
    if last_s >= *least_s {
        return;
    }
    if left.iter().all(|&count| count == 0) {
        *least_s = last_s;
        return;
    }
    for s in 0..series.len() {
        if left[s] == 0 {
            continue;
        }
        left[s] -= 1;
        for (size, seconds) in series[s].seconds.iter().enumerate() {
            let Some(seconds) = seconds else { continue };
            for first in (0..free_s.len()).step_by(sizes[size]) {
                let block = first..first + sizes[size];
                let before = free_s[block.clone()].to_vec();
                let start_s = before.iter().copied().fold(0.0, f64::max);
                free_s[block.clone()].fill(start_s + seconds);
                exhaustive_s(sizes, free_s, left, series, least_s);
                free_s[block].copy_from_slice(&before);
            }
        }
        left[s] += 1;
    }
}

#[test]
fn the_last_trials_take_the_devices_that_others_leave() {
    // Ten trials on eight devices: two of them take four devices each, before the others take one each.
    let (sizes, series) =
        ([1, 2, 4, 8], [Series { count: 10, seconds: vec![Some(10.0), Some(5.5), Some(3.0), Some(2.0)] }]);
    let placed = pack(&sizes, 8, &series);
    check(&sizes, 8, &series, &placed);
    assert!((end_s(&placed) - 13.0).abs() < 1e-9, "{placed:?}");
    assert_eq!(lower_bound_s(&sizes, 8, &series), 12.5);
    // A trial that runs on all devices alone has them in turn.
    let series = [Series { count: 3, seconds: vec![None, None, None, Some(2.0)] }];
    assert_eq!(end_s(&pack(&sizes, 8, &series)), 6.0);
    // Many trials are dealt out as fast as few.
    let series = [Series { count: 20_000, seconds: vec![Some(10.0), Some(5.5), Some(3.0), Some(2.0)] }];
    assert_eq!(end_s(&pack(&sizes, 8, &series)), 25_000.0);
}

#[test]
fn packings_of_small_cases_are_near_the_best() {
    let mut state = 7u64;
    let mut draw = move |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let (mut best, mut over) = (0, 0.0f64);
    const CASES: usize = 200;
    for _ in 0..CASES {
        let sizes: &[usize] = if draw(2) == 0 { &[1, 2, 4] } else { &[1, 2, 3, 6] };
        let devices = sizes[sizes.len() - 1];
        let mut one = || {
            let (work, fixed) = (1.0 + draw(100) as f64, draw(30) as f64);
            let mut seconds: Vec<Option<f64>> = sizes.iter().map(|&size| Some(work / size as f64 + fixed)).collect();
            // Small blocks may lack the memory.
            (0..draw(sizes.len() as u64) as usize).for_each(|size| seconds[size] = None);
            Series { count: 1 + draw(2) as usize, seconds }
        };
        let series = [one(), one()];
        let placed = pack(sizes, devices, &series);
        check(sizes, devices, &series, &placed);
        let mut least_s = f64::INFINITY;
        let mut left: Vec<usize> = series.iter().map(|of| of.count).collect();
        exhaustive_s(sizes, &mut vec![0.0; devices], &mut left, &series, &mut least_s);
        let found_s = end_s(&placed);
        assert!(found_s >= least_s * (1.0 - 1e-9) && least_s >= lower_bound_s(sizes, devices, &series) * (1.0 - 1e-9));
        best += usize::from(found_s <= least_s * (1.0 + 1e-9));
        over = over.max(found_s / least_s - 1.0);
    }
    assert!(best >= CASES * 95 / 100 && over <= 0.1, "{best} of {CASES} are the best, others up to {over} longer");
}

#[test]
fn blocks_divide_nodes_and_their_devices() {
    assert_eq!(block_sizes(4, 8), [1, 2, 4, 8, 16, 32]);
    assert_eq!(block_sizes(1, 6), [1, 2, 3, 6]);
    assert_eq!(block_sizes(3, 1), [1, 3]);
}

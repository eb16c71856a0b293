use super::*;
use proptest::prelude::*;

fn profile(series: Vec<Series>) -> Profile {
    Profile {
        format: FORMAT.into(),
        version: VERSION,
        device: "cpu-worker".into(),
        machine: Machine { processor: "a processor".into(), cores: 2, gpus: false },
        measured_at: "2026-11-22T01:30:00Z".into(),
        altiplano: "0.1.0".into(),
        seconds: 1.5,
        outliers: Outliers { samples: 70, outliers: 1, largest: 2.5 },
        ranks: Some(MeasuredRanks { nodes: 2, on_node: 4, measured_at: "2026-11-23T05:50:00Z".into() }),
        slower_shared: vec![(4, 2.1), (8, 4.5)],
        series,
    }
}

fn series(family: &str, axes: Vec<Vec<f64>>, seconds: Vec<f64>) -> Series {
    Series { family: family.into(), dtype: DType::F32, threads: 1, load: 1, axes, seconds }
}

/// A series over one to three axes of one to four sizes, with times that rise.
fn any_series() -> impl Strategy<Value = Series> {
    let axis = proptest::collection::vec(0.1f64..3.0, 1..5).prop_map(|steps| {
        let rising = steps.iter().scan(1.0, |at: &mut f64, s| {
            *at *= 1.0 + s;
            Some(*at)
        });
        rising.collect::<Vec<f64>>()
    });
    let axes = proptest::collection::vec(axis, 1..4);
    axes.prop_flat_map(|axes| {
        let points = axes.iter().map(Vec::len).product::<usize>();
        (Just(axes), proptest::collection::vec(1e-7f64..1e-2, points))
    })
    .prop_map(|(axes, seconds)| {
        let mut found = series("loop", axes, seconds);
        found.make_monotone();
        found
    })
}

proptest! {
    #[test]
    fn points_are_exact(found in any_series()) {
        let lengths: Vec<usize> = found.axes.iter().map(Vec::len).collect();
        for (i, &seconds) in found.seconds.iter().enumerate() {
            let (mut rest, mut size) = (i, vec![0.0; lengths.len()]);
            for d in (0..lengths.len()).rev() {
                size[d] = found.axes[d][rest % lengths[d]];
                rest /= lengths[d];
            }
            prop_assert_eq!(found.time(&size), Priced { seconds, outside: 1.0 });
        }
    }

    #[test]
    fn more_never_takes_less(
        found in any_series(),
        sizes in proptest::collection::vec((0.2f64..300.0, 1.0f64..3.0), 3),
        along in 0usize..3,
    ) {
        let less: Vec<f64> = sizes.iter().map(|s| s.0).take(found.axes.len()).collect();
        let mut more = less.clone();
        let d = along % more.len();
        more[d] *= sizes[d].1;
        let (a, b) = (found.time(&less).seconds, found.time(&more).seconds);
        // Logarithms are rounded.
        prop_assert!(b >= a * (1.0 - 1e-12), "{a} at {less:?}, {b} at {more:?}");
    }

    #[test]
    fn what_was_written_is_read(found in any_series()) {
        let before = profile(vec![found]);
        prop_assert_eq!(Profile::from_json(&before.to_json()), Ok(before));
    }
}

#[test]
fn beyond_the_ends_the_nearest_is_scaled_and_said() {
    let found = series("loop", vec![vec![10.0, 1000.0]], vec![1e-6, 1e-4]);
    assert_eq!(found.time(&[4000.0]), Priced { seconds: 4e-4, outside: 4.0 });
    assert_eq!(found.time(&[5.0]), Priced { seconds: 1e-6, outside: 2.0 });
    // Halfway between in the logarithm.
    let between = found.time(&[100.0]);
    assert!((between.seconds - 1e-5).abs() < 1e-15 && between.outside == 1.0, "{between:?}");
}

#[test]
fn terms_are_priced_by_threads_and_load() {
    let of = |threads: u32, load: u32, seconds: f64| Series {
        threads,
        load,
        ..series("loop", vec![vec![1.0, 100.0]], vec![seconds, 100.0 * seconds])
    };
    let lookup = Lookup::new(profile(vec![of(1, 1, 1.0), of(1, 2, 1.5), of(2, 2, 0.6)]));
    let term = |threads: u32| Term { times: 3.0, threads, ..Term::once("loop", DType::F32, [10.0]) };
    let price =
        |threads: u32, load: u32| lookup.price(&term(threads), load).map(|p| (p.seconds * 100.0).round() / 100.0);
    assert_eq!(price(1, 1), Some(30.0));
    assert_eq!(price(1, 2), Some(45.0));
    assert_eq!(price(2, 2), Some(18.0));
    // Four threads on two cores are as measured; six are between four and eight; sixteen take turns.
    assert_eq!(price(1, 4), Some(94.5));
    assert_eq!(price(1, 6), Some(148.5));
    assert_eq!(price(1, 16), Some(405.0));
    // An unmeasured number of threads takes the nearest one, and the answer says so.
    assert_eq!(lookup.price(&term(4), 4).map(|p| p.outside), Some(2.0));
    assert_eq!(lookup.price(&Term::once("other", DType::F32, [1.0]), 1), None);
    assert_eq!(lookup.price(&Term::once("loop", DType::BF16, [1.0]), 1), None);
    assert_eq!(lookup.price(&Term::once("other", DType::F32, [0.0]), 1).map(|p| p.seconds), Some(0.0));
}

#[test]
fn wrong_files_are_refused_with_the_place() {
    let good = profile(vec![series("loop", vec![vec![1.0, 2.0]], vec![1e-6, 2e-6])]).to_json();
    assert!(Profile::from_json(&good).is_ok());
    let check = |from: &str, to: &str, expected: &str| {
        assert!(good.contains(from), "{from} is not in {good}");
        let error = Profile::from_json(&good.replacen(from, to, 1)).expect_err(to).to_string();
        assert!(error.contains(expected), "{to}: {error}");
    };
    check(
        "\"format\":\"altiplano.profile\"",
        "\"format\":\"altiplano.plan\"",
        "format: expected \"altiplano.profile\"",
    );
    check("\"version\":1", "\"version\":7", "version: this build reads version 1, the file has 7");
    check("\"device\":", "\"color\":1,\"device\":", "1:");
    check("\"threads\":1", "\"thread\":1", "unknown field `thread`");
    check("2e-6", "-2e-6", "series[0].seconds[1]: must be positive and at most 1e6");
    check("2e-6", "0.0", "series[0].seconds[1]: must be positive and at most 1e6");
    check("2e-6", "\"fast\"", "invalid type: string \"fast\"");
    check("2e-6", "NaN", "2:");
    check("2e-6", "5e-7", "series[0].seconds[1]: is less than that of a smaller size");
    check("[1.0,2.0]", "[2.0,1.0]", "series[0].axes[0]: must be positive sizes of at most 1e18 that rise");
    check("[1.0,2.0]", "[-1.0,2.0]", "series[0].axes[0]: must be positive sizes of at most 1e18 that rise");
    check("[1.0,2.0]", "[]", "series[0].axes[0]: must hold at least one size");
    check("[1.0,2.0]", "[1.0,2.0,3.0]", "series[0].seconds: must hold a time for each point");
    check("\"threads\":1", "\"threads\":2", "series[0].load: must be at least `threads`");
    check("[4,2.1]", "[4,0.5]", "slower_shared: must rise");
    check("\"cores\":2", "\"cores\":0", "machine.cores: must be at least 1");
    let empty = profile(Vec::new()).to_json();
    assert_eq!(
        Profile::from_json(&empty).map_err(|e| e.to_string()),
        Err("series: must hold at least one series".into())
    );
    let one = series("loop", vec![vec![1.0]], vec![1e-6]);
    let twice = profile(vec![one.clone(), one]).to_json();
    let error = Profile::from_json(&twice).map_err(|e| e.to_string());
    assert!(error.is_err_and(|e| e.starts_with("series[1]: is of the same family")));
    assert!(Profile::from_json("{").is_err_and(|e| matches!(e, ProfileError::Json { line: 1, .. })));
}

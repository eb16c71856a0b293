//! Bounds of rounding errors against measured errors of random sums, in the types and the order of a plan's programs.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use crate::planned;
use altiplano::ir::dtype::DType;
use altiplano::ir::graph::ValueId;
use altiplano::ir::op::{Op, Reducer};
use altiplano::ir::program::Body;
use altiplano::ir::reshard::Collective;
use altiplano_prover::numerics::{Of, Part, Place, Sum, probable, sums, unit, worst_case};

/// Pseudo-random numbers in `0..1`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A sum with its rounding error: as computed, exact, and of magnitudes.
#[derive(Clone, Copy, Default)]
struct Measured {
    computed: f64,
    exact: f64,
    magnitude: f64,
}

/// Adds random numbers in the parts of a sum, the last part outermost, and rounds as each part does.
fn added(parts: &[Part], random: &mut Random, sample: &dyn Fn(f64) -> f64) -> Measured {
    let Some((part, inner)) = parts.split_last() else {
        let x = DType::F32.round(sample(random.next()));
        return Measured { computed: x, exact: x, magnitude: x.abs() };
    };
    let mut sum = Measured::default();
    for _ in 0..part.summands {
        let next = added(inner, random, sample);
        sum.computed = part.dtype.round(sum.computed + next.computed);
        sum.exact += next.exact;
        sum.magnitude += next.magnitude;
    }
    sum
}

/// The largest relative error of some random sums.
fn measured(parts: &[Part], sample: &dyn Fn(f64) -> f64) -> f64 {
    let mut random = Random(7);
    let error = |of: Measured| (of.computed - of.exact).abs() / of.magnitude;
    (0..8).map(|_| error(added(parts, &mut random, sample))).fold(0.0, f64::max)
}

/// The gradients' sum that rounds most in a plan of the demo model.
fn worst_gradient(options: &[&str]) -> Sum {
    let (_, programs) = planned(DEMO, options);
    let gradients = sums(&programs).into_iter().filter(|sum| sum.of == Of::Gradients);
    gradients.max_by(|a, b| probable(&a.parts).total_cmp(&probable(&b.parts))).expect("gradients are summed")
}

const BF16_SUMS: &[&str] = &[
    "--dp",
    "2",
    "--target",
    "deepspeed",
    "--precision",
    "bf16",
    "--num-microbatches",
    "128",
    "--global-batch",
    "256",
];
const F32_SUMS: &[&str] = &["--dp", "2", "--precision", "bf16", "--num-microbatches", "128", "--global-batch", "256"];

fn part(sum: &Sum, place: Place) -> Part {
    *sum.parts.iter().rev().find(|part| part.place == place).expect("a part")
}

#[test]
fn sums_are_followed_over_microbatches_and_devices() {
    for (options, dtype) in [(BF16_SUMS, DType::BF16), (F32_SUMS, DType::F32)] {
        let sum = worst_gradient(options);
        assert_eq!(part(&sum, Place::Microbatches), Part { place: Place::Microbatches, dtype, summands: 128 });
        assert_eq!(part(&sum, Place::Devices), Part { place: Place::Devices, dtype, summands: 2 });
        let own: u64 = sum.parts.iter().filter(|p| p.place != Place::Rounding).map(|p| p.summands).product();
        assert_eq!(own, sum.one_device[0].summands, "{sum:?}");
    }
    // Row-parallel products are rounded to the activations' type before devices add them.
    let (_, programs) = planned(DEMO, F32_SUMS);
    let split = |sum: &Sum| sum.of == Of::Activations && sum.parts.iter().any(|p| p.place == Place::Rounding);
    let sum = sums(&programs).into_iter().find(split).expect("split contractions");
    assert_eq!(part(&sum, Place::Devices), Part { place: Place::Devices, dtype: DType::BF16, summands: 2 });
}

#[test]
fn measured_errors_are_below_the_worst_case() {
    let samples: [(&str, &dyn Fn(f64) -> f64); 3] =
        [("like summands", &|x| 1.0 + x), ("of both signs", &|x| x - 0.5), ("of many sizes", &|x| (20.0 * x).exp2())];
    for options in [BF16_SUMS, F32_SUMS] {
        let sum = worst_gradient(options);
        for (name, sample) in samples {
            for parts in [&sum.parts, &sum.one_device] {
                let (error, bound) = (measured(parts, sample), worst_case(parts));
                assert!(error <= bound, "{name}: {error} in {parts:?}, at most {bound}");
            }
        }
        // The statement about precision is about what happens: numbers of one size lose as much as is said.
        let [plan, one] = [&sum.parts, &sum.one_device].map(|parts| measured(parts, &|x| 1.0 + x));
        assert_eq!(sum.loses_precision(), plan > 8.0 * one, "{plan} beside {one} in {:?}", sum.parts);
    }
}

#[test]
fn bounds_are_those_of_the_literature() {
    let of = |dtype, summands| [Part { place: Place::Devices, dtype, summands }];
    assert_eq!(unit(DType::BF16), 1.0 / 256.0);
    assert_eq!(unit(DType::F32), f64::from(f32::EPSILON) / 2.0);
    // gamma(n) = n u / (1 - n u) with n = 64 additions.
    let gamma = worst_case(&of(DType::BF16, 65));
    assert!((gamma - 0.25 / 0.75).abs() < 1e-12, "{gamma}");
    assert!((probable(&of(DType::BF16, 65)) - 8.0 / 256.0).abs() < 1e-12);
    assert_eq!(worst_case(&of(DType::BF16, 257)), f64::INFINITY);
    // 256 ones are 256 in bf16, and so are 1000.
    let ones = (0..1000).fold(0.0, |sum: f64, _| DType::BF16.round(sum + 1.0));
    assert_eq!(ones, 256.0);
}

#[test]
fn prove_prints_sums_and_warns_of_those_that_lose_precision() {
    let scratch = Scratch::new();
    for (options, warned) in [(BF16_SUMS, true), (F32_SUMS, false)] {
        let file = scratch.path("plan.json").display().to_string();
        succeeds(&[&["plan", DEMO, "--cluster", "local:4", "-o", &file], options].concat());
        let output = altiplano(&["prove", &file]);
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        assert!(output.stdout.contains("\nRounding of sums"), "{}", output.stdout);
        let warning = "warning: gradients are summed over 128 microbatches in bf16";
        assert_eq!(output.stderr.contains(warning), warned, "{}", output.stderr);
        let json: serde_json::Value = serde_json::from_str(&succeeds(&["prove", &file, "--json"])).expect("JSON");
        let sums = json["rounding"]["sums"].as_array().expect("sums").clone();
        assert_eq!(sums.iter().any(|sum| sum["loses_precision"] == true), warned, "{sums:?}");
    }
}

/// The collectives of a body that add up lookups in a table that is split by rows.
fn lookups(body: &Body) -> Vec<ValueId> {
    let graph = &body.graph;
    let is_sum = |v: &ValueId| match &graph.node(*v).op {
        Op::Collective(op) => {
            let (Collective::AllReduce { reducer, .. } | Collective::ReduceScatter { reducer, .. }) = &op.collective
            else {
                return false;
            };
            *reducer == Reducer::Sum && matches!(graph.node(graph.node(*v).operands[0]).op, Op::Gather(_))
        }
        _ => false,
    };
    graph.values().filter(is_sum).collect()
}

#[test]
fn lookups_in_split_tables_round_nothing() {
    let (_, programs) = planned(DEMO, &["--tp", "4", "--pin", "params['wte']=[{tensor}, {}]"]);
    let bodies = programs.programs.iter().flat_map(|program| &program.bodies);
    let names: Vec<String> = bodies
        .flat_map(|body| lookups(body).into_iter().map(|v| format!("{v} ({})", body.graph.node(v).name)))
        .collect();
    assert!(!names.is_empty(), "the table is not split");
    for sum in sums(&programs) {
        assert!(!names.contains(&sum.name) && sum.parts.len() > 1, "{sum:?}");
    }
}

//! Compares the scale with PyTorch's `GradScaler`, over sequences of steps with and without overflow.

use super::*;
use crate::interpret;
use crate::optimizer::leaf;
use crate::tensor::Tensor;

/// Runs the state over steps, some of which overflow. Returns after each the scale, the steps since it changed, and the
/// skipped steps.
fn run(scale: LossScale, loss: DType, overflows: &[bool]) -> Vec<[f64; 3]> {
    let scalar = TensorType::scalar(DType::F32);
    let mut graph = Graph::new("scale");
    let [kept, unchanged, skipped] = ["scale", "unchanged", "skipped"].map(|n| leaf(&mut graph, n, scalar.clone()));
    let overflow = leaf(&mut graph, "overflow", TensorType::scalar(DType::Bool));
    let is_found = scale.slots().len() > 1;
    let now = scale.now(&mut graph, is_found.then_some(kept), loss);
    let state = ScaleState { skipped, unchanged: is_found.then_some(unchanged) };
    let after = scale.after(&mut graph, state, now, overflow, loss);
    assert_eq!(after.len(), scale.slots().len());
    graph.outputs = after;
    assert_eq!(graph.verify(), vec![]);
    let mut state = [0.0; 3];
    let mut seen = Vec::new();
    for &overflow in overflows {
        let value = |v: ValueId| match v.index() {
            3 => Tensor::scalar(DType::Bool, f64::from(u8::from(overflow))),
            i => Tensor::scalar(DType::F32, state[i]),
        };
        let results = interpret::run(&graph, &value);
        for (slot, result) in scale.slots().iter().zip(results) {
            let place = match *slot {
                SCALE => 0,
                UNCHANGED_STEPS => 1,
                _ => 2,
            };
            state[place] = result.data[0];
        }
        seen.push(state);
    }
    seen
}

/// `update` of `torch.amp.GradScaler` with a growth factor of 2 and a backoff factor of 0.5 (torch 2.15 on a CPU). Each
/// entry is the scale and the growth tracker after a step.
#[test]
fn a_scale_is_found_as_pytorch_finds_it() {
    let steps = [true, true, false, false, false, true, false, false, false, false, false, false, true];
    let torch = [
        [32768.0, 0.0],
        [16384.0, 0.0],
        [16384.0, 1.0],
        [16384.0, 2.0],
        [32768.0, 0.0],
        [16384.0, 0.0],
        [16384.0, 1.0],
        [16384.0, 2.0],
        [32768.0, 0.0],
        [32768.0, 1.0],
        [32768.0, 2.0],
        [65536.0, 0.0],
        [32768.0, 0.0],
    ];
    let ours = run(LossScale::Dynamic { initial: INITIAL, interval: 3 }, DType::F32, &steps);
    let skipped = [1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 4].map(f64::from);
    let expected = torch.iter().zip(skipped).map(|([scale, unchanged], skipped)| [*scale, *unchanged, skipped]);
    assert_eq!(ours, expected.collect::<Vec<_>>());
}

#[test]
fn a_scale_stays_a_number_of_the_losss_type() {
    // 65536 is infinity in f16, so the seed would overflow.
    let half =
        run(LossScale::Dynamic { initial: INITIAL, interval: 1 }, DType::F16, &[false, true, false, false, false]);
    assert_eq!(half.iter().map(|state| state[0]).collect::<Vec<_>>(), [32768.0, 16384.0, 32768.0, 32768.0, 32768.0]);
    let down = run(LossScale::default(), DType::F32, &[true; 200]);
    assert_eq!(down.last().expect("steps")[0], f64::from(f32::MIN_POSITIVE));
    let up = run(LossScale::Dynamic { initial: INITIAL, interval: 1 }, DType::F32, &[false; 200]);
    assert_eq!(up.last().expect("steps")[0], 1.0 / f64::from(f32::MIN_POSITIVE));
}

#[test]
fn a_fixed_scale_counts_what_is_skipped() {
    let seen = run(LossScale::Fixed(128.0), DType::F16, &[false, true, false, true]);
    assert_eq!(seen.iter().map(|s| s[2]).collect::<Vec<_>>(), [0.0, 1.0, 1.0, 2.0]);
}

#[test]
fn only_what_is_not_finite_overflows() {
    let count = |values: &[f64]| {
        let mut graph = Graph::new("overflows");
        let ty = TensorType::new(DType::F32, [values.len() as u64]);
        let x = leaf(&mut graph, "x", ty.clone());
        graph.outputs = vec![overflows(&mut graph, x)];
        interpret::run(&graph, &|_| Tensor::new(ty.clone(), values.to_vec()))[0].data[0]
    };
    // The sum of their squares would overflow in single precision.
    assert_eq!(count(&[3e38, -3e38, 0.0]), 0.0);
    assert_eq!(count(&[1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN]), 3.0);
}

#[test]
fn what_scales_there_are() {
    assert!(LossScale::Fixed(65536.0).problem(DType::F16).is_some());
    assert_eq!(LossScale::Fixed(65536.0).problem(DType::F32), None);
    assert!(LossScale::Fixed(0.0).problem(DType::F32).is_some());
    assert!(LossScale::Fixed(f64::NAN).problem(DType::F32).is_some());
    assert!(LossScale::Dynamic { initial: 1.0, interval: 0 }.problem(DType::F32).is_some());
    assert_eq!(LossScale::default().problem(DType::F16), None);
}

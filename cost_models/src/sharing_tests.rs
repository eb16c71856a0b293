use super::*;
use crate::pipeline::simulate_order;
use altiplano_ir::plan::Schedule;
use proptest::prelude::*;

fn times(forward_s: f64, backward_s: f64, step_s: f64) -> StageTimes {
    StageTimes { forward_s, backward_s, step_s, ..StageTimes::default() }
}

fn ignore(_: usize, _: PipelineCall, _: f64, _: f64) {}

proptest! {
    /// If devices do not slow each other down, the machine might as well not be shared.
    #[test]
    fn without_slowing_it_is_the_plain_pipeline(
        stages in proptest::collection::vec((0.1f64..3.0, 0.1f64..3.0, 0.0f64..1.0), 1..5),
        transfers in proptest::collection::vec((0.0f64..4.0, 0.0f64..4.0), 5),
        at_once: bool,
        microbatches in 1u32..7,
        gpipe: bool,
    ) {
        let schedule = if gpipe { Schedule::GPipe } else { Schedule::OneFOneB };
        let order = Order::new(schedule, stages.len(), microbatches);
        let sent = |(times, (f, b)): (StageTimes, (f64, f64))| match at_once {
            true => times,
            false => StageTimes { transfer_forward_s: f, transfer_backward_s: b, ..times },
        };
        let plain = stages.iter().map(|&(f, b, s)| times(f, b, s)).zip(transfers);
        let plain: Vec<StageTimes> = plain.map(sent).collect();
        let all = stages.len() as u32;
        let shared: Vec<SharedStage> =
            plain.iter().map(|&t| SharedStage { devices: 1, times: vec![(1, t), (all.max(2), t)] }).collect();
        let (a, b) = (simulate_order(&plain, &order, &mut ignore), simulate_shared(&shared, &order, &mut ignore));
        prop_assert!((a.step_s - b.step_s).abs() < 1e-9 * a.step_s, "{} {}", a.step_s, b.step_s);
        for (x, y) in a.stages.iter().zip(&b.stages) {
            prop_assert!((x.busy_s - y.busy_s).abs() < 1e-9 * a.step_s, "{x:?} {y:?}");
        }
    }

    /// On one core, all work is done one after the other, in any order.
    #[test]
    fn one_core_is_never_idle_and_never_twice_as_fast(
        stages in proptest::collection::vec((0.1f64..3.0, 0.1f64..3.0), 1..5),
        microbatches in 1u32..7,
    ) {
        let order = Order::new(Schedule::OneFOneB, stages.len(), microbatches);
        let shared: Vec<SharedStage> = stages
            .iter()
            .map(|&(f, b)| SharedStage {
                devices: 1,
                times: (1..=stages.len() as u32).map(|n| (n, times(f64::from(n) * f, f64::from(n) * b, 0.0))).collect(),
            })
            .collect();
        let work: f64 = f64::from(microbatches) * stages.iter().map(|&(f, b)| f + b).sum::<f64>();
        let played = simulate_shared(&shared, &order, &mut ignore);
        prop_assert!((played.step_s - work).abs() < 1e-9 * work, "{} {work}", played.step_s);
    }
}

#[test]
fn times_are_linear_between_numbers_of_devices() {
    let stage = SharedStage { devices: 2, times: vec![(2, times(1.0, 2.0, 0.0)), (4, times(3.0, 4.0, 0.0))] };
    let forward = Doing::Call(0, PipelineCall::Forward { microbatch: 0 });
    let seconds: Vec<f64> = [1, 2, 3, 4, 8].iter().map(|&n| stage.seconds(forward, n)).collect();
    assert_eq!(seconds, [1.0, 1.0, 2.0, 3.0, 6.0]);
}

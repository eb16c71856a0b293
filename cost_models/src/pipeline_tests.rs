//! The pipeline simulator against closed forms, lower bounds, and a second way to compute the same longest path.

use super::*;
use PipelineCall::{Backward, Forward, Update, Weights};
use proptest::prelude::*;

const SCHEDULES: [Schedule; 2] = [Schedule::GPipe, Schedule::OneFOneB];

fn calls(schedule: Schedule, stage: usize, num_stages: usize, num_microbatches: u32) -> Vec<PipelineCall> {
    Order::new(schedule, num_stages, num_microbatches).calls(stage).map(|(_, call)| call).collect()
}

fn order(schedule: Schedule, stage: usize, num_stages: usize, num_microbatches: u32) -> String {
    let text = |call: PipelineCall| match call {
        Forward { microbatch } => format!("F{microbatch}"),
        Backward { microbatch } => format!("B{microbatch}"),
        Weights { microbatch } => format!("W{microbatch}"),
        Update { step } => format!("U{step}"),
    };
    calls(schedule, stage, num_stages, num_microbatches).into_iter().map(text).collect::<Vec<_>>().join(" ")
}

#[test]
fn orders() {
    assert_eq!(order(Schedule::GPipe, 0, 2, 3), "F0 F1 F2 B0 B1 B2");
    assert_eq!(order(Schedule::OneFOneB, 0, 2, 3), "F0 F1 B0 F2 B1 B2");
    assert_eq!(order(Schedule::OneFOneB, 1, 2, 3), "F0 B0 F1 B1 F2 B2");
    assert_eq!(order(Schedule::OneFOneB, 0, 4, 2), "F0 F1 B0 B1", "more stages than microbatches");
    assert_eq!(order(Schedule::OneFOneB, 0, 1, 0), "");
    assert_eq!(order(Schedule::Forward, 1, 2, 3), "F0 F1 F2");
    assert_eq!(order(Schedule::ZbH1, 0, 2, 3), "F0 F1 B0 W0 F2 B1 W1 B2 W2");
    assert_eq!(order(Schedule::ZbH1, 1, 2, 3), "F0 B0 F1 B1 W0 F2 B2 W1 W2");
    assert_eq!(order(Schedule::ZbH1, 2, 4, 1), "F0 B0 W0");
}

/// Without a flush, the calls of `1f1b` continue over steps. As many backwards are late as there are later stages.
#[test]
fn pipedream_goes_on_over_steps() {
    let text = |lane: usize, num_stages: usize, num_microbatches: u32, steps: u32| {
        let order = Order { steps, ..Order::new(Schedule::PipeDream, num_stages, num_microbatches) };
        let text = |(_, call)| match call {
            Forward { microbatch } => format!("F{microbatch}"),
            Backward { microbatch } => format!("B{microbatch}"),
            Weights { microbatch } => format!("W{microbatch}"),
            Update { step } => format!("U{step}"),
        };
        order.calls(lane).map(text).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(text(0, 2, 3, 1), order(Schedule::OneFOneB, 0, 2, 3));
    assert_eq!(text(0, 2, 3, 2), "F0 F1 B0 F2 B1 F3 B2 U0 F4 B3 F5 B4 B5");
    assert_eq!(text(1, 2, 3, 2), "F0 B0 F1 B1 F2 B2 U0 F3 B3 F4 B4 F5 B5");
    assert_eq!(text(0, 3, 1, 3), "F0 F1 B0 U0 F2 B1 U1 B2", "fewer microbatches than stages");
    let late = |lane: usize, stages: usize, batches: u32| Order::new(Schedule::PipeDream, stages, batches).late(lane);
    assert_eq!(
        (late(0, 4, 8), late(3, 4, 8), late(0, 4, 2), late(0, 1, 8)),
        (vec![1, 2, 3], vec![], vec![1, 2], vec![])
    );
    // A step's own calls, with the calls that remain of the previous step at their stated places, form the endless
    // order.
    for (stages, batches) in [(2, 2), (3, 5), (4, 4), (4, 3), (5, 2)] {
        for lane in 0..stages {
            let order = Order::new(Schedule::PipeDream, stages, batches);
            let (one, late) = (order.calls(lane).map(|c| c.1).collect::<Vec<_>>(), order.late(lane));
            let (prompt, left) = one.split_at(one.len() - late.len());
            let mut merged = prompt.to_vec();
            let shifted = |call: &PipelineCall, by: u32| match *call {
                Forward { microbatch } => Forward { microbatch: microbatch + by },
                Backward { microbatch } => Backward { microbatch: microbatch + by },
                other => other,
            };
            let mut of_before = late.iter().zip(left).peekable();
            for (done, call) in (1..).zip(prompt) {
                merged.push(shifted(call, batches));
                while let Some((_, left)) = of_before.next_if(|(after, _)| **after == done) {
                    merged.push(*left);
                }
            }
            merged.extend(left.iter().map(|call| shifted(call, batches)));
            let two = Order { steps: 2, ..order.clone() };
            let endless: Vec<_> = two.calls(lane).map(|c| c.1).filter(|c| !matches!(c, Update { .. })).collect();
            assert_eq!(merged, endless, "{stages} stages, {batches} microbatches, lane {lane}");
        }
    }
}

/// In steady state, no stage waits if one is slowest and there are enough microbatches; a step is then the slowest
/// stage's work. With too few microbatches there are bubbles, but fewer than with a flush.
#[test]
fn pipedream_has_no_bubble() {
    let stage = |forward_s, backward_s, step_s| StageTimes { forward_s, backward_s, step_s, ..Default::default() };
    let steady = |stages: &[StageTimes], microbatches: u32| {
        let order = Order::new(Schedule::PipeDream, stages.len(), microbatches);
        in_steady_state(&order, |order| simulate_order(stages, order, &mut |_, _, _, _| {}))
    };
    let equal = steady(&[stage(1.0, 2.0, 0.0); 4], 8);
    assert!((equal.step_s - 24.0).abs() < 1e-9 && equal.stages.iter().all(|s| s.bubble_s.abs() < 1e-9), "{equal:?}");
    let uneven = [stage(1.0, 2.0, 0.5), stage(1.5, 2.5, 0.25), stage(0.5, 1.0, 0.0)];
    let played = steady(&uneven, 6);
    assert!((played.step_s - (6.0 * 4.0 + 0.25)).abs() < 1e-9, "{played:?}");
    assert!(played.stages[1].bubble_s < 1e-9 && (played.stages[2].bubble_s - (24.25 - 9.0)).abs() < 1e-9);
    for microbatches in [1, 2, 3, 8] {
        let (without, with) = (steady(&uneven, microbatches), simulate(&uneven, microbatches, Schedule::OneFOneB));
        assert!(without.step_s < with.step_s, "{microbatches}: {} {}", without.step_s, with.step_s);
        let least = f64::from(microbatches) * 4.0 + 0.25;
        assert!(without.step_s >= least - 1e-9, "{microbatches}: {}", without.step_s);
    }
    assert!(steady(&[stage(1.0, 2.0, 0.0); 4], 1).step_s > 3.0);
}

#[test]
fn forwards_alone_stream_through_the_stages() {
    let stage = StageTimes { forward_s: 2.0, backward_s: 7.0, transfer_forward_s: 1.0, ..Default::default() };
    // The first microbatch passes three stages and two links. Each further one is a forward later.
    assert_eq!(simulate(&[stage; 3], 5, Schedule::Forward).step_s, 3.0 * 2.0 + 2.0 + 4.0 * 2.0);
}

#[test]
fn equal_stages_take_the_closed_form() {
    for schedule in SCHEDULES {
        for (s, b) in [(1, 1), (1, 5), (2, 1), (2, 8), (4, 3), (4, 4), (5, 17), (8, 64)] {
            let times = StageTimes { forward_s: 1.0, backward_s: 2.0, step_s: 0.5, ..Default::default() };
            let timeline = simulate(&vec![times; s], b, schedule);
            let expect = (s as f64 - 1.0 + f64::from(b)) * 3.0;
            assert_eq!(timeline.step_s, expect + 0.5, "{schedule:?} {s} stages {b} microbatches");
            for stage in &timeline.stages {
                assert_eq!(stage.busy_s, 3.0 * f64::from(b) + 0.5);
                assert_eq!(stage.bubble_s, (s as f64 - 1.0) * 3.0);
            }
        }
    }
}

#[test]
fn transfers_are_waited_for_and_share_a_link() {
    let stage = StageTimes { forward_s: 1.0, backward_s: 1.0, ..Default::default() };
    let sender = StageTimes { transfer_forward_s: 10.0, ..stage };
    let receiver = StageTimes { transfer_backward_s: 5.0, ..stage };
    // One microbatch: 1 + 10 + 1 + 1 + 5 + 1.
    assert_eq!(simulate(&[sender, receiver], 1, Schedule::OneFOneB).step_s, 19.0);
    // Two, all forwards first: the second arrives at 21, its forward ends at 22; backwards end at 23 and 24, the first
    // arrives at 28, the second after it at 33, and takes 1 more.
    assert_eq!(simulate(&[sender, receiver], 2, Schedule::GPipe).step_s, 34.0);
}

#[test]
fn the_last_to_update_ends_the_step() {
    let stage = StageTimes { forward_s: 1.0, backward_s: 1.0, ..Default::default() };
    // The last stage is done at 3, the first at 4.
    let late = StageTimes { step_s: 7.0, ..stage };
    assert_eq!(simulate(&[stage, late], 1, Schedule::GPipe).step_s, 10.0);
    assert_eq!(simulate(&[late, stage], 1, Schedule::GPipe).step_s, 11.0);
}

#[test]
fn nothing_to_do() {
    assert_eq!(simulate(&[], 4, Schedule::GPipe), Timeline::default());
    let times = StageTimes { forward_s: 1.0, backward_s: 1.0, step_s: 0.25, ..Default::default() };
    assert_eq!(simulate(&[times; 2], 0, Schedule::OneFOneB).step_s, 0.25);
}

#[test]
fn many_stages_and_microbatches_are_played_in_full() {
    let times = StageTimes { forward_s: 1.0, backward_s: 2.0, ..Default::default() };
    for schedule in SCHEDULES {
        assert_eq!(simulate(&vec![times; 64], 512, schedule).step_s, (63.0 + 512.0) * 3.0);
    }
}

/// The end of the step by relaxing every dependency until nothing changes. It is slow, and shares only the rules with
/// the simulator.
fn longest_path(stages: &[StageTimes], num_microbatches: u32, schedule: Schedule) -> f64 {
    let (s, b) = (stages.len(), num_microbatches as usize);
    // End of each call and arrival of each transfer, [stage][kind of call][microbatch].
    let mut end = vec![[vec![0.0f64; b], vec![0.0f64; b], vec![0.0f64; b]]; s];
    let mut arrival = end.clone();
    loop {
        let before = (end.clone(), arrival.clone());
        for stage in 0..s {
            let times = stages[stage];
            let (mut free, mut sent) = (0.0f64, [0.0f64; 3]);
            for call in calls(schedule, stage, s, num_microbatches) {
                let (direction, m) = match call {
                    Forward { microbatch } => (0, microbatch as usize),
                    Backward { microbatch } => (1, microbatch as usize),
                    Weights { microbatch } => (2, microbatch as usize),
                    Update { .. } => continue,
                };
                let (ready, seconds, transfer) = match direction {
                    0 if stage == 0 => (0.0, times.forward_s, times.transfer_forward_s),
                    0 => (arrival[stage - 1][0][m], times.forward_s, times.transfer_forward_s),
                    2 => (end[stage][1][m], times.weights_s, 0.0),
                    _ if stage == s - 1 => (end[stage][0][m], times.backward_s, times.transfer_backward_s),
                    _ => (arrival[stage + 1][1][m], times.backward_s, times.transfer_backward_s),
                };
                free = free.max(ready) + seconds;
                end[stage][direction][m] = free;
                sent[direction] = sent[direction].max(free) + transfer;
                arrival[stage][direction][m] = sent[direction];
            }
        }
        if before == (end.clone(), arrival.clone()) {
            break;
        }
    }
    let last = |stage: usize| end[stage].iter().flatten().copied().fold(0.0, f64::max) + stages[stage].step_s;
    (0..s).map(last).fold(0.0, f64::max)
}

fn stage_times() -> impl Strategy<Value = StageTimes> {
    let seconds = || (0u32..40).prop_map(|n| f64::from(n) / 8.0);
    (seconds(), seconds(), seconds(), seconds(), seconds(), seconds()).prop_map(|(f, b, w, tf, tb, step_s)| {
        StageTimes {
            forward_s: f,
            backward_s: b,
            weights_s: w,
            transfer_forward_s: tf,
            transfer_backward_s: tb,
            step_s,
        }
    })
}

proptest! {
    #[test]
    fn equals_the_longest_path(stages in prop::collection::vec(stage_times(), 1..6), b in 1u32..9) {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1] {
            prop_assert_eq!(simulate(&stages, b, schedule).step_s, longest_path(&stages, b, schedule));
        }
    }

    #[test]
    fn no_step_beats_its_work_or_its_critical_path(
        stages in prop::collection::vec(stage_times(), 1..9),
        b in 1u32..20,
    ) {
        for schedule in SCHEDULES {
            let timeline = simulate(&stages, b, schedule);
            let mut way_in = 0.0;
            let mut way_out = 0.0;
            for (s, times) in stages.iter().enumerate() {
                // A stage's work, after the first microbatch has come in and before the last has gone back out.
                let work = f64::from(b) * (times.forward_s + times.backward_s);
                let least = way_in + work + (way_out + stages[0].step_s).max(times.step_s);
                prop_assert!(timeline.step_s >= least - 1e-9, "{:?} stage {}", schedule, s);
                prop_assert!((timeline.stages[s].busy_s - work - times.step_s).abs() < 1e-9);
                let sum = timeline.stages[s].busy_s + timeline.stages[s].bubble_s;
                prop_assert!((sum - timeline.step_s).abs() < 1e-9);
                way_in += times.forward_s + times.transfer_forward_s;
                way_out += times.backward_s + stages.get(s + 1).map_or(0.0, |next| next.transfer_backward_s);
            }
        }
    }

    #[test]
    fn more_work_or_microbatches_never_take_less(
        stages in prop::collection::vec(stage_times(), 1..7),
        b in 1u32..12,
        slower in 0usize..7,
    ) {
        for schedule in SCHEDULES {
            let step_s = simulate(&stages, b, schedule).step_s;
            prop_assert!(simulate(&stages, b + 1, schedule).step_s >= step_s);
            let mut worse = stages.clone();
            let at = slower % worse.len();
            worse[at].forward_s += 1.0;
            worse[at].transfer_backward_s += 1.0;
            prop_assert!(simulate(&worse, b, schedule).step_s >= step_s);
        }
    }
}

/// Every stage runs each microbatch forward and backward once, forward first, under any interleaving.
#[test]
fn interleaved_lanes_make_every_call_once_and_finish() {
    for (lanes, virtual_stages, num_microbatches) in
        [(2, 2, 4), (4, 3, 8), (4, 2, 6), (3, 5, 3), (8, 12, 64), (2, 3, 1), (5, 2, 7)]
    {
        let num_stages = lanes * virtual_stages;
        let order = Order::new(Schedule::OneFOneB, num_stages, num_microbatches).sharing(virtual_stages);
        let stage = StageTimes { forward_s: 1.0, backward_s: 2.0, step_s: 0.5, ..StageTimes::default() };
        let mut made = std::collections::BTreeMap::new();
        let timeline = simulate_order(&vec![stage; num_stages], &order, &mut |s, call, start, end| {
            let (microbatch, backward) = match call {
                PipelineCall::Forward { microbatch } => (microbatch, false),
                PipelineCall::Backward { microbatch } => (microbatch, true),
                PipelineCall::Weights { .. } => panic!("1f1b runs no gradients of weights apart"),
                Update { .. } => panic!("one step is followed by no other"),
            };
            assert!(made.insert((s, microbatch, backward), (start, end)).is_none());
        });
        assert_eq!(
            made.len(),
            2 * num_stages * num_microbatches as usize,
            "{lanes} {virtual_stages} {num_microbatches}"
        );
        for (&(s, m, backward), &(start, _)) in &made {
            let before = match (backward, s) {
                (false, 0) => continue,
                (false, s) => made[&(s - 1, m, false)].1,
                (true, s) if s + 1 == num_stages => made[&(s, m, false)].1,
                (true, s) => made[&(s + 1, m, true)].1,
            };
            assert!(start >= before - 1e-9);
        }
        let busy = 3.0 * (virtual_stages as u32 * num_microbatches) as f64 + 0.5 * virtual_stages as f64;
        assert!(timeline.step_s >= busy - 1e-9 && timeline.stages.iter().all(|l| (l.busy_s - busy).abs() < 1e-6));
    }
}

/// Narayanan et al. 2021, section 2.2.2: with `v` stages per lane, the bubble is `(p - 1) (f + b) / v` for a lane's
/// whole stages.
#[test]
fn interleaving_shrinks_the_bubble_by_the_stages_of_a_lane() {
    let bubble = |virtual_stages: usize| {
        let (lanes, m) = (4, 8);
        let part = 1.0 / virtual_stages as f64;
        let stage = StageTimes { forward_s: part, backward_s: 2.0 * part, ..StageTimes::default() };
        let num_stages = lanes * virtual_stages;
        let order = Order::new(Schedule::OneFOneB, num_stages, m).sharing(virtual_stages);
        simulate_order(&vec![stage; num_stages], &order, &mut |_, _, _, _| {}).step_s - 3.0 * m as f64
    };
    assert!((bubble(1) - 9.0).abs() < 1e-9);
    assert!((bubble(3) - 3.0).abs() < 1e-9, "{}", bubble(3));
}

/// Each call occurs once, and gradients of weights follow their backward. No stage holds more microbatches than there
/// are stages.
#[test]
fn zero_bubble_lanes_make_every_call_once() {
    for (num_stages, microbatches) in [(1, 3), (2, 4), (3, 5), (4, 2), (4, 8), (5, 3), (8, 32), (3, 0)] {
        for stage in 0..num_stages {
            let calls = calls(Schedule::ZbH1, stage, num_stages, microbatches);
            let at = |call: PipelineCall| calls.iter().position(|c| *c == call).expect("every call is made");
            for microbatch in 0..microbatches {
                assert!(at(Forward { microbatch }) < at(Backward { microbatch }));
                assert!(at(Backward { microbatch }) < at(Weights { microbatch }));
            }
            assert_eq!(calls.len() as u32, 3 * microbatches);
            let order = Order::new(Schedule::ZbH1, num_stages, microbatches);
            assert_eq!(order.in_flight(stage), microbatches.min(num_stages as u32), "{num_stages} {microbatches}");
        }
    }
}

/// Qi et al. 2023, table 1: the bubble of ZB-H1 is `(p - 1) (f + b - w)` for equal stages whose gradients of weights
/// take no longer than those of inputs. That of 1F1B is `(p - 1) (f + b + w)`.
#[test]
fn zero_bubble_fills_the_bubble_with_gradients_of_weights() {
    for (stages, microbatches) in [(2, 4), (3, 5), (4, 4), (4, 8), (8, 32)] {
        for (f, b, w) in [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 2.0, 1.0), (1.0, 1.5, 0.5)] {
            let bubble = |schedule: Schedule| {
                let (backward_s, weights_s) = if schedule == Schedule::ZbH1 { (b, w) } else { (b + w, 0.0) };
                let times = StageTimes { forward_s: f, backward_s, weights_s, ..StageTimes::default() };
                simulate(&vec![times; stages], microbatches, schedule).step_s - f64::from(microbatches) * (f + b + w)
            };
            let turns = stages as f64 - 1.0;
            assert!((bubble(Schedule::OneFOneB) - turns * (f + b + w)).abs() < 1e-9);
            assert!((bubble(Schedule::ZbH1) - turns * (f + b - w)).abs() < 1e-9, "{stages} {microbatches} {f} {b} {w}");
        }
    }
}

/// Stages that meet before the update wait for the last gradient. Here that is the first stage's, whose update is the
/// shorter one.
#[test]
fn stages_that_meet_update_after_the_last_gradient() {
    let stage = |step_s: f64| StageTimes { forward_s: 1.0, backward_s: 2.0, step_s, ..StageTimes::default() };
    let stages = [stage(1.0), stage(4.0)];
    let order = Order::new(Schedule::OneFOneB, 2, 3);
    let step_s = |order: &Order| simulate_order(&stages, order, &mut |_, _, _, _| {}).step_s;
    // The last backward ends after 12 s on the first stage and after 10 s on the second.
    assert_eq!(step_s(&order), 14.0);
    assert_eq!(step_s(&Order { meets: true, ..order.clone() }), 16.0);
}

/// ZB-V on calls of equal length (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4): lanes wait
/// only for their first microbatch and for the end, and each holds `p` microbatches of both its stages, as the first lane
/// does under `1f1b`.
#[test]
fn zero_bubble_v_has_no_bubble_in_the_memory_of_1f1b() {
    assert_eq!(
        Vec::<String>::from(Order::new(Schedule::ZbV, 4, 3).written()),
        [
            "F0 F0 F0 F3 B3 W3 F3 B3 W3 B0 W0 F3 B3 W3 B0 W0 B0 W0",
            "F1 F2 F1 F2 B2 W2 F1 B1 W1 F2 B2 W2 B1 B2 B1 W1 W2 W1"
        ]
    );
    for lanes in 1..8usize {
        for microbatches in 1..24u32 {
            let order = Order::new(Schedule::ZbV, 2 * lanes, microbatches);
            assert_eq!((order.num_lanes(), order.virtual_stages), (lanes, 2));
            let lane_of: Vec<usize> = (0..2 * lanes).map(|s| order.placement.lane_of(s, lanes)).collect();
            assert_eq!(order.written().problem(lanes, &lane_of, microbatches), None, "{lanes} {microbatches}");
            for lane in 0..lanes {
                let most = order.held_bytes(lane, &[1, 1]);
                assert!(most <= 2 * lanes as u64, "{most} on {lanes} lanes, {microbatches} microbatches");
            }
            // Others that do without a rule for lanes.
            for schedule in [Schedule::GPipe, Schedule::Forward] {
                let other = Order { schedule, found: None, ..order.clone() };
                let calls = other.written();
                let forwards = calls.lanes.iter().flatten().filter(|call| call.pass == Pass::Forward).count();
                assert_eq!(forwards, 2 * lanes * microbatches as usize);
                if schedule.trains() {
                    assert_eq!(calls.problem(lanes, &lane_of, microbatches), None, "{lanes} {microbatches}");
                }
            }
            let times = StageTimes { forward_s: 1.0, backward_s: 1.0, weights_s: 1.0, ..StageTimes::default() };
            let simulated = simulate_order(&vec![times; 2 * lanes], &order, &mut |_, _, _, _| {});
            if microbatches as usize >= 2 * lanes - 1 {
                assert_eq!(
                    simulated.step_s,
                    f64::from(6 * microbatches) + (lanes - 1) as f64,
                    "{lanes} {microbatches}"
                );
            }
        }
    }
}

/// DualPipeV on calls of equal length, as its authors state it for DualPipe (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
/// table 2, with half as many lanes as stages): the lane that waits longest waits `(p - 1) (F&B + B - 3W)`, where `F&B` are a
/// forward and a backward pass side by side and `B` is a whole backward pass. Lanes hold `2p + 1` activations.
#[test]
fn dual_pipe_v_has_the_bubble_and_the_memory_that_its_authors_state() {
    let order =
        |lanes: usize, microbatches| Order { pairs: true, ..Order::new(Schedule::DualPipeV, 2 * lanes, microbatches) };
    // PyTorch's ScheduleDualPipeV for two lanes and four microbatches.
    assert_eq!(
        Vec::<String>::from(order(2, 4).written()),
        [
            "F0 F0 F0 F3 B3 W3 F3 F0 B3 W3 F3 B0 W0 B3 W3 F3 B0 W0 B3 W3 B0 W0 B0 W0",
            "F1 F2 F1 F2 F1 B2 W2 F2 B1 W1 F1 B2 W2 F2 B1 W1 B2 W2 B1 W1 B2 B1 W2 W1"
        ]
    );
    let together = |lane| (0..24).filter(|&at| order(2, 4).together(lane, at) == 3).collect::<Vec<_>>();
    assert_eq!([together(0), together(1)], [[7, 10, 15], [7, 10, 13]]);
    let [forward_s, backward_s, weights_s] = [1.0, 1.0, 1.0];
    let times = StageTimes { forward_s, backward_s, weights_s, ..StageTimes::default() };
    for lanes in 1..8usize {
        let lane_of: Vec<usize> = (0..2 * lanes).map(|s| Placement::V.lane_of(s, lanes)).collect();
        // Fewer microbatches than stages leave out calls.
        for microbatches in 1..2 * lanes as u32 {
            assert_eq!(order(lanes, microbatches).written().problem(lanes, &lane_of, microbatches), None);
        }
        for microbatches in 2 * lanes as u32..2 * lanes as u32 + 9 {
            let order = order(lanes, microbatches);
            assert_eq!(order.written().problem(lanes, &lane_of, microbatches), None, "{lanes} {microbatches}");
            assert!((0..lanes).all(|lane| order.held_bytes(lane, &[1, 1]) == 2 * lanes as u64 + 1));
            for paired_s in [2.0, 2.5, 3.0] {
                let order = order.clone().pairing(vec![vec![paired_s; 2]; 2 * lanes]);
                let simulated = simulate_order(&vec![times; 2 * lanes], &order, &mut |_, _, _, _| {});
                let stated_s = (lanes - 1) as f64 * (paired_s + backward_s + weights_s - 3.0 * weights_s);
                let waits = simulated.stages.iter().map(|lane| lane.bubble_s);
                assert_eq!(waits.clone().fold(0.0, f64::max), stated_s, "{lanes} {microbatches} {paired_s}");
                // If passes gain nothing side by side, all lanes wait as long.
                assert!(paired_s < 3.0 || waits.into_iter().all(|waits_s| waits_s == stated_s));
            }
        }
    }
}

/// Passes side by side need one more forward pass ahead, so that no backward pass waits for the forward pass beside it.
#[test]
fn passes_of_1f1b_run_side_by_side() {
    let order = |lanes: usize, shared: usize, microbatches, pairs| Order {
        pairs,
        ..Order::new(Schedule::OneFOneB, lanes * shared, microbatches).sharing(shared)
    };
    assert_eq!(Vec::<String>::from(order(1, 1, 3, true).written()), ["F0 F0 B0 F0 B0 B0"]);
    let times = StageTimes { forward_s: 1.0, backward_s: 2.0, ..StageTimes::default() };
    for (lanes, shared, microbatches) in
        (1..6).flat_map(|l| (1..4).flat_map(move |v| [1, 2, 3, 4, 6, 8, 12, 24].map(|m| (l, v, m))))
    {
        let case = format!("{lanes} lanes of {shared} stages, {microbatches} microbatches");
        let [alone, paired] = [false, true].map(|pairs| order(lanes, shared, microbatches, pairs));
        let lane_of: Vec<usize> = (0..shared * lanes).map(|s| s % lanes).collect();
        assert_eq!(paired.written().problem(lanes, &lane_of, microbatches), None, "{case}");
        let stages = vec![times; lanes * shared];
        let step_s = |order: &Order, spans: &mut Vec<(f64, f64)>| {
            simulate_order(&stages, order, &mut |_, _, start, end| spans.push((start, end))).step_s
        };
        // Each call is made once, and those of a pair share its time.
        let mut spans = Vec::new();
        let beside = paired.clone().pairing(vec![vec![2.0; shared]; lanes * shared]);
        let beside_s = step_s(&beside, &mut spans);
        assert_eq!(spans.len(), 2 * shared * lanes * microbatches as usize, "{case}");
        assert!(spans.iter().all(|(start, end)| start < end && *end <= beside_s), "{case}");
        // The seconds that pairs save exceed those that lanes wait for the passes beside theirs.
        let alone_s = step_s(&alone, &mut Vec::new());
        assert!(beside_s <= alone_s, "{case}: {beside_s} {alone_s}");
        if lanes == 1 {
            let pairs = f64::from(microbatches * shared as u32) - shared as f64;
            assert_eq!(alone_s - beside_s, pairs, "{case}");
        }
    }
}

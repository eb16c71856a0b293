//! Streams simulated by hand, and the bounds that no simulation may break.

use super::*;
use proptest::prelude::*;

fn task(stream: Stream, seconds: f64, after: &[u32]) -> Task {
    Task { stream, channel: 0, seconds, issue_s: 0.0, after: after.to_vec(), ready_s: f64::NEG_INFINITY }
}

#[test]
fn what_does_not_wait_is_hidden() {
    // Compute for 3, send for 4 meanwhile, then compute for 1 on the received data.
    let tasks = [
        task(Stream::Compute, 1.0, &[]),
        task(Stream::Communication, 4.0, &[0]),
        task(Stream::Compute, 2.0, &[]),
        task(Stream::Compute, 1.0, &[1]),
    ];
    let played = play(&tasks, Host::FREE);
    assert_eq!(played.seconds, 6.0);
    assert_eq!((played.compute_s, played.communication_s, played.exposed_s), (4.0, 4.0, 2.0));
}

#[test]
fn a_part_of_the_device_sends() {
    // Two of 4 seconds of sending overlap computation, and take a quarter of the device then.
    let tasks = [
        task(Stream::Compute, 1.0, &[]),
        task(Stream::Communication, 4.0, &[0]),
        task(Stream::Compute, 2.0, &[]),
        task(Stream::Compute, 1.0, &[1]),
    ];
    let played = play(&tasks, Host::FREE);
    let shared = played.clone().shared(0.25);
    assert_eq!((played.seconds, shared.seconds), (6.0, 6.5));
    assert_eq!((shared.compute_s, shared.spans[3].1), (4.5, 6.5));
    assert_eq!(played.clone().shared(0.0), played);
    // Exposed communication slows nothing.
    let alone = play(&tasks[..2], Host::FREE);
    assert_eq!(alone.clone().shared(0.25), alone);
}

#[test]
fn a_slow_host_is_what_small_kernels_take() {
    let tasks: Vec<Task> = (0..10).map(|_| Task { issue_s: 1.0, ..task(Stream::Compute, 0.1, &[]) }).collect();
    let played = play(&tasks, Host::FREE);
    assert!((played.seconds - 10.1).abs() < 1e-12 && played.host_s == 10.0);
}

#[test]
fn a_host_that_is_ahead_hides_its_own_time() {
    let small: Vec<Task> = (0..10).map(|_| Task { issue_s: 1.0, ..task(Stream::Compute, 0.1, &[]) }).collect();
    // The device is busy with a large kernel long after the host has issued it.
    let before = play(&[Task { issue_s: 1.0, ..task(Stream::Compute, 5.0, &[]) }], Host::FREE);
    assert_eq!((before.seconds, before.ahead_s), (6.0, [0.0, 5.0]));
    let played = play(&small, Host { ahead_s: before.ahead_s[1], ..Host::FREE });
    assert_eq!(played.host_s, 10.0);
    assert!((played.seconds - 5.1).abs() < 1e-12, "{played:?}");
    // Simulating both together gives the same.
    let large = Task { issue_s: 1.0, ..task(Stream::Compute, 5.0, &[]) };
    let both: Vec<Task> = [large].into_iter().chain(small).collect();
    assert!((play(&both, Host::FREE).seconds - before.seconds - played.seconds).abs() < 1e-12);
}

#[test]
fn a_host_that_waits_for_the_device_is_soon_caught_up_with() {
    // A long kernel, then short ones. With two queued, the host issues the second short one when the long one is done.
    let long = Task { issue_s: 1.0, ..task(Stream::Compute, 10.0, &[]) };
    let short = Task { issue_s: 1.0, ..task(Stream::Compute, 0.5, &[]) };
    let tasks = [long, short.clone(), short.clone(), short];
    let seconds = |queued: usize| play(&tasks, Host { queued, ..Host::FREE }).seconds;
    assert_eq!([1, 2, 3].map(seconds), [15.5, 13.5, 12.5]);
    assert_eq!((seconds(4), seconds(usize::MAX)), (12.5, 12.5));
    // Loads from outside and gradients in transit do not wait for the host's turn.
    let mut tasks = tasks.to_vec();
    tasks.push(task(Stream::Communication, 3.0, &[]));
    tasks.push(task(Stream::Gradients, 2.0, &[0]));
    let played = play(&tasks, Host { queued: 1, ..Host::FREE });
    assert_eq!((played.spans[4], played.spans[5]), ((0.0, 3.0), (11.0, 13.0)));
}

#[test]
fn two_streams_that_send_at_once_are_exposed_once() {
    let tasks = [task(Stream::Communication, 3.0, &[]), task(Stream::Gradients, 5.0, &[])];
    let played = play(&tasks, Host::FREE);
    assert_eq!((played.seconds, played.exposed_s, played.communication_s), (5.0, 5.0, 8.0));
}

proptest! {
    #[test]
    fn no_play_beats_its_critical_path_or_its_streams(
        list in prop::collection::vec((0u8..3, 0.0f64..1.0, 0.0f64..0.2, prop::collection::vec(0usize..1000, 0..3)), 1..60),
    ) {
        let tasks: Vec<Task> = list
            .iter()
            .enumerate()
            .map(|(i, (stream, seconds, issue_s, after))| Task {
                channel: 0,
                stream: [Stream::Compute, Stream::Communication, Stream::Gradients][*stream as usize],
                seconds: *seconds,
                issue_s: *issue_s,
                after: if i == 0 { Vec::new() } else { after.iter().map(|a| (a % i) as u32).collect() },
                ready_s: f64::NEG_INFINITY,
            })
            .collect();
        let played = play(&tasks, Host::FREE);
        let mut before = f64::INFINITY;
        for queued in 1..6 {
            let held_up = play(&tasks, Host { queued, ..Host::FREE }).seconds;
            prop_assert!(held_up <= before && held_up >= played.seconds, "{queued} queued: {held_up} s");
            before = held_up;
        }
        // Beside another pass, neither is faster than alone, and no stream does two things at once.
        let beside = play_beside([&tasks, &tasks], Host::FREE);
        prop_assert!(beside.seconds >= played.seconds && beside.seconds >= 2.0 * played.compute_s - 1e-9);
        prop_assert!(played.spans.iter().chain(&played.spans).zip(&beside.spans).all(|(alone, both)| both.0 >= alone.0));
        let mut path: Vec<f64> = Vec::new();
        for task in &tasks {
            let before = task.after.iter().map(|&a| path[a as usize]).fold(0.0, f64::max);
            path.push(before + task.seconds);
        }
        let longest = path.iter().copied().fold(0.0, f64::max);
        prop_assert!(played.seconds >= longest - 1e-9);
        for stream in [Stream::Compute, Stream::Communication, Stream::Gradients] {
            let busy: f64 = tasks.iter().filter(|t| t.stream == stream).map(|t| t.seconds).sum();
            prop_assert!(played.seconds >= busy - 1e-9);
        }
        let all: f64 = tasks.iter().map(|t| t.seconds + t.issue_s).sum();
        prop_assert!(played.seconds <= all + 1e-9);
        prop_assert!(played.exposed_s <= played.communication_s + 1e-9);
    }
}

#[test]
fn one_pass_computes_while_the_other_sends() {
    // Each pass computes, sends and computes. Alone it takes 4 seconds, of which it waits for 2.
    let pass =
        || [task(Stream::Compute, 1.0, &[]), task(Stream::Communication, 2.0, &[0]), task(Stream::Compute, 1.0, &[1])];
    let (one, other) = (pass(), pass());
    let played = play_beside([&one, &other], Host::FREE);
    assert_eq!(play(&one, Host::FREE).seconds, 4.0);
    // The second pass computes first while the first sends, and then sends behind it.
    let spans = [(0.0, 1.0), (1.0, 3.0), (3.0, 4.0), (1.0, 2.0), (3.0, 5.0), (5.0, 6.0)];
    assert_eq!(played.spans, spans);
    assert_eq!((played.seconds, played.compute_s, played.communication_s, played.exposed_s), (6.0, 4.0, 4.0, 2.0));
    // Over other links, the second pass need not wait for what the first sends.
    let apart = other.clone().map(|task| Task { channel: 1, ..task });
    let played = play_beside([&one, &apart], Host::FREE);
    assert_eq!((played.seconds, played.exposed_s), (5.0, 1.0));
    // Beside nothing, a pass takes what it takes alone.
    assert_eq!(play_beside([&one, &[]], Host::FREE), play(&one, Host::FREE));
    assert_eq!(play_beside([&[], &one], Host::FREE), play(&one, Host::FREE));
}

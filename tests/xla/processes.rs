//! Several processes, each with whole stages on its own devices of XLA.

use crate::GPT2;
use crate::common::processes::{Ended, Process, losses, processes};
use crate::common::{Scratch, succeeds};
use std::path::Path;

fn plan(scratch: &Scratch, cluster: &str, degrees: &[&str]) -> String {
    let model = scratch.file("gpt2.json", GPT2);
    let file =
        scratch.path(&format!("plan-{cluster}{}.json", degrees.concat()).replace('/', "-")).display().to_string();
    let fixed = ["plan", &model, "--seq", "4", "--global-batch", "16", "--cluster", cluster, "-o", &file];
    succeeds(&[&fixed, degrees].concat());
    file
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn processes_train_as_one_does() {
    let scratch = Scratch::new();
    let ids: Vec<u8> = (0..23 * 16 + 1u32).flat_map(|i| ((i * i + 3 * i) % 13).to_le_bytes()[..2].to_vec()).collect();
    let data = scratch.file("ids.u16", ids);
    let interleaved = ["--tp", "2", "--pp", "2", "--virtual-stages", "2", "--num-microbatches", "4"];
    let cases: [(&str, &[&str], u32); 6] = [
        ("local:4", &["--tp", "2", "--pp", "2", "--num-microbatches", "4", "--clip-norm", "0.5"], 2),
        ("local:4", &interleaved, 2),
        ("local:4", &["--dp", "2", "--tp", "1", "--pp", "2", "--schedule", "zb-h1", "--num-microbatches", "4"], 2),
        ("local:4", &["--dp", "2", "--tp", "1", "--pp", "2", "--schedule", "zb-v", "--num-microbatches", "4"], 2),
        ("local:8", &["--tp", "2", "--pp", "4", "--num-microbatches", "8"], 4),
        // Two stages for each process.
        ("local:4", &["--tp", "1", "--pp", "4", "--num-microbatches", "4", "--update", "stale"], 2),
    ];
    for (at, (cluster, degrees, count)) in cases.into_iter().enumerate() {
        let plan = plan(&scratch, cluster, degrees);
        let trained = |name: &str, steps: &str, count: u32| {
            let file = |kind: &str| scratch.path(&format!("{kind}-{name}-{at}")).display().to_string();
            let metrics = file("metrics");
            let folder = file("checkpoints");
            let mut all = vec!["run", &plan, "--device", "xla:cpu", "--steps", steps, "--lr", "0.01", "--data", &data];
            all.extend(["--eval-data", &data, "--eval-every", "2", "--eval-steps", "2", "--metrics", &metrics]);
            all.extend(["--checkpoint", &folder, "--checkpoint-every", "2", "--resume"]);
            let started = match count {
                1 => vec![Process::start(&scratch, (0, 1), &[&all[..], &["--engine", "threads"]].concat())],
                _ => processes(&scratch, count, &all),
            };
            for (rank, process) in started.into_iter().enumerate() {
                let ended = process.end();
                assert_eq!(ended.code, Some(0), "{cluster} {degrees:?}, {name}: {ended:?}");
                assert_eq!(rank == 0, ended.stdout.contains("step"), "the first speaks for all: {ended:?}");
            }
            metrics
        };
        trained("several", "2", count);
        let several = trained("several", "4", count);
        let one = trained("one", "4", 1);
        let [one, several] = [one, several].map(|file| losses(Path::new(&file)));
        assert_eq!((one.len(), &one), (6, &several), "{cluster} {degrees:?}");
    }
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn a_lost_process_ends_the_others_with_one_message() {
    let scratch = Scratch::new();
    let plan = plan(&scratch, "local:8", &["--tp", "2", "--pp", "4", "--num-microbatches", "8"]);
    let mut all = processes(&scratch, 4, &["run", &plan, "--device", "xla:cpu", "--steps", "100000"]);
    all[0].wait_for("step   20");
    let lost = all.remove(2);
    lost.signal("KILL");
    let killed = std::time::Instant::now();
    let ended: Vec<Ended> = all.into_iter().map(Process::end).collect();
    assert!(killed.elapsed().as_secs_f64() < 10.0, "{ended:?}");
    lost.end();
    assert!(ended.iter().all(|ended| ended.code == Some(1)), "{ended:?}");
    let said: Vec<&str> = ended.iter().flat_map(|ended| ended.stderr.lines()).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("rank 2 on ") && said[0].contains(" is gone; it was last "), "{said:?}");
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn a_stage_of_several_processes_is_refused() {
    let scratch = Scratch::new();
    let plan = plan(&scratch, "local:4", &["--tp", "4", "--pp", "1"]);
    let all = processes(&scratch, 2, &["run", &plan, "--device", "xla:cpu", "--steps", "2"]);
    let ended: Vec<Ended> = all.into_iter().map(Process::end).collect();
    assert!(ended.iter().all(|ended| ended.code == Some(2)), "{ended:?}");
    let said: Vec<&str> = ended.iter().flat_map(|ended| ended.stderr.lines()).collect();
    assert!(said.len() == 1 && said[0].contains("stage 0 are in 2 processes"), "{said:?}");
}

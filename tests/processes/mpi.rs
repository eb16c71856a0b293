//! Plans run by MPI ranks. Losses and checkpoints equal those of threads, bit by bit if sums are in order. If a rank
//! fails, all end with one message and exit code. Ranks with emulated GPUs train like threads. Needs the feature `mpi`
//! and `mpirun`.

use crate::common::{DEMO, Scratch, emulator, shared_model, succeeds};
use altiplano::cost_models::profile::Profile;
use altiplano::load_plan;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The output and exit of `mpirun`.
struct Said {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    seconds: f64,
}

/// Ranks that were started together.
struct Ranks {
    child: Child,
    scratch: Scratch,
    start: Instant,
}

impl Ranks {
    fn start(count: u32, arguments: &[&str]) -> Ranks {
        Ranks::start_with(&[], count, arguments)
    }

    fn start_with(of_mpirun: &[&str], count: u32, arguments: &[&str]) -> Ranks {
        let scratch = Scratch::new();
        let file = |name: &str| std::fs::File::create(scratch.path(name)).expect("a file in the scratch directory");
        let child = Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "-q"])
            .args(of_mpirun)
            // There are more ranks than cores: those that wait leave their core to the others.
            .env("OMPI_MCA_mpi_yield_when_idle", "1")
            .arg("-n")
            .arg(count.to_string())
            .arg(env!("CARGO_BIN_EXE_altiplano"))
            .args(arguments)
            .args(["--engine", "mpi"])
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .expect("mpirun starts");
        Ranks { child, scratch, start: Instant::now() }
    }

    fn stdout(&self) -> String {
        std::fs::read_to_string(self.scratch.path("stdout")).unwrap_or_default()
    }

    /// Waits until the first rank's output contains a text.
    fn wait_for(&mut self, said: &str) {
        while !self.stdout().contains(said) {
            assert!(self.start.elapsed() < Duration::from_secs(120), "never said {said}: {}", self.stdout());
            assert!(self.child.try_wait().expect("it can be waited for").is_none(), "ended: {}", self.stdout());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The processes, by rank.
    fn pids(&self) -> Vec<u32> {
        let parent = self.child.id().to_string();
        let field = |pid: &str| -> Option<(String, usize)> {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.to_string();
            let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
            let text = String::from_utf8_lossy(&environment).into_owned();
            let rank = text.split('\0').find_map(|v| v.strip_prefix("OMPI_COMM_WORLD_RANK="))?.parse().ok()?;
            Some((parent, rank))
        };
        let mut found: Vec<(usize, u32)> = Vec::new();
        for entry in std::fs::read_dir("/proc").expect("a list of processes").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let (Ok(pid), Some((of, rank))) = (name.parse(), field(&name))
                && of == parent
            {
                found.push((rank, pid));
            }
        }
        found.sort_unstable();
        found.into_iter().map(|f| f.1).collect()
    }

    fn end(mut self) -> Said {
        let start = Instant::now();
        let code = loop {
            match self.child.try_wait().expect("it can be waited for") {
                Some(status) => break status.code(),
                None if start.elapsed() > Duration::from_secs(120) => {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    panic!("the ranks hang: {}", self.stdout());
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let stderr = std::fs::read_to_string(self.scratch.path("stderr")).unwrap_or_default();
        Said { code, stdout: self.stdout(), stderr, seconds: start.elapsed().as_secs_f64() }
    }
}

fn signal(name: &str, pid: u32) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()), "kill -{name} {pid}");
}

/// Returns whether `mpirun` is installed; prints a notice if not, so that a skipped test is visible.
fn has_mpirun() -> bool {
    let found = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if found.is_err() {
        eprintln!("SKIPPED: there is no mpirun");
    }
    found.is_ok()
}

fn plan(scratch: &Scratch, model: &str, devices: u32, degrees: &[&str]) -> String {
    let file = scratch.path(&format!("plan-{devices}{}.json", degrees.concat())).display().to_string();
    let cluster = format!("local:{devices}");
    succeeds(&[&["plan", model, "--cluster", &cluster, "-o", &file], degrees].concat());
    file
}

/// The losses of a run from its metrics.
fn losses(metrics: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(metrics).expect("metrics");
    let loss = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        value["loss"].as_f64().expect("a loss")
    };
    text.lines().map(loss).collect()
}

/// Steps of a comparison. Gradients that are late show in the third.
const STEPS: usize = 5;

/// The order in which ranks add the terms of a sum.
#[derive(Debug, PartialEq)]
enum Sums {
    /// As threads do.
    InOrder,
    /// As MPI does.
    Any,
}

/// Trains a plan on threads and on ranks, once for each order of sums.
fn check(model: &str, devices: u32, degrees: &[&str], orders: &[Sums]) {
    let scratch = Scratch::new();
    let plan = plan(&scratch, model, devices, degrees);
    // Without degrees a plan may use fewer devices.
    let devices = load_plan(Path::new(&plan)).expect("a plan").num_devices();
    let metrics = |name: &str| scratch.path(name).display().to_string();
    let threads = metrics("threads");
    let run = |file: &str| -> Vec<String> {
        let words = ["run", &plan, "--steps", &STEPS.to_string(), "--metrics", file];
        words.map(str::to_string).to_vec()
    };
    succeeds(&run(&threads));
    let expected = losses(Path::new(&threads));
    assert_eq!(expected.len(), STEPS);
    for order in orders {
        let ranks = metrics(&format!("{order:?}"));
        let arguments = run(&ranks);
        let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        arguments.extend((*order == Sums::InOrder).then_some("--reduce-in-order"));
        let said = Ranks::start(devices, &arguments).end();
        assert_eq!(said.code, Some(0), "{degrees:?}: {}{}", said.stdout, said.stderr);
        let found = losses(Path::new(&ranks));
        match order {
            Sums::InOrder => {
                let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{model} {degrees:?}\n{found:?}\n{expected:?}");
            }
            Sums::Any => {
                for (step, (a, b)) in found.iter().zip(&expected).enumerate() {
                    assert!((a - b).abs() <= 1e-4 * b.abs().max(1e-3), "{model} {degrees:?}, step {step}: {a} and {b}");
                }
            }
        }
    }
}

const TWO: [&[&str]; 4] = [&["--dp", "2"], &["--tp", "2"], &["--pp", "2"], &["--dp", "2", "--zero", "3"]];
const FOUR: [&[&str]; 6] = [
    &["--dp", "4"],
    &["--tp", "4"],
    &["--dp", "2", "--tp", "2"],
    &["--dp", "2", "--pp", "2", "--schedule", "gpipe"],
    &["--tp", "2", "--pp", "2", "--num-microbatches", "4"],
    &["--dp", "4", "--zero", "2"],
];

/// With gradients that are one step late.
const LATE: [&[&str]; 3] = [
    &["--dp", "1", "--pp", "4", "--num-microbatches", "4", "--schedule", "pipedream"],
    &["--dp", "2", "--pp", "2", "--num-microbatches", "2", "--schedule", "pipedream", "--clip-norm", "0.5"],
    &["--dp", "4", "--update", "stale"],
];

/// Parameter servers, synchronous and asynchronous.
const SERVERS: [&[&str]; 3] = [
    &["--parameter-servers", "1", "--global-batch", "6"],
    &["--parameter-servers", "2", "--num-microbatches", "4", "--clip-norm", "0.5"],
    &["--parameter-servers", "1", "--asynchronous", "--global-batch", "6"],
];

#[test]
fn ranks_train_the_demo_as_threads_do() {
    if has_mpirun() {
        TWO.iter().for_each(|degrees| check(DEMO, 2, degrees, &[Sums::InOrder]));
        for degrees in FOUR.iter().chain(&LATE).chain(&SERVERS) {
            check(DEMO, 4, degrees, &[Sums::InOrder]);
        }
    }
}

/// One plan for each kind of collective, and for each way in which messages are in flight between steps.
#[test]
fn sums_in_any_order_differ_from_those_of_threads_by_rounding() {
    if has_mpirun() {
        for degrees in
            [&["--dp", "4"][..], &["--tp", "4"], &["--dp", "4", "--zero", "3"], FOUR[4], LATE[1], LATE[2], SERVERS[2]]
        {
            check(DEMO, 4, degrees, &[Sums::Any]);
        }
    }
}

/// Held-out losses equal those of threads, whatever the plan and whatever is in flight between its steps.
#[test]
fn ranks_look_at_held_out_data_as_threads_do() {
    if !has_mpirun() {
        return;
    }
    let scratch = Scratch::new();
    let ids: Vec<u8> = (0..3000u32).flat_map(|i| ((i * i * 31 + 7 * i) % 1000).to_le_bytes()[..2].to_vec()).collect();
    let data = scratch.file("ids.u16", &ids);
    let others: [&[&str]; 3] = [&["--dp", "2", "--pp", "2"], &["--tp", "4"], &["--dp", "4", "--zero", "3"]];
    for degrees in others.into_iter().chain(LATE).chain(SERVERS) {
        let plan = plan(&scratch, DEMO, 4, degrees);
        let run = |file: &str| -> Vec<String> {
            let words = ["run", &plan, "--steps", "6", "--data", &data, "--eval-data", &data, "--eval-every", "2"];
            words.iter().chain(&["--eval-steps", "2", "--metrics", file]).map(|s| s.to_string()).collect()
        };
        let metrics = |name: &str| scratch.path(name).display().to_string();
        let (threads, ranks) = (metrics("threads"), metrics("ranks"));
        succeeds(&run(&threads));
        let mut arguments = run(&ranks);
        arguments.push("--reduce-in-order".to_string());
        let said = Ranks::start(4, &arguments.iter().map(String::as_str).collect::<Vec<_>>()).end();
        assert_eq!(said.code, Some(0), "{degrees:?}: {}{}", said.stdout, said.stderr);
        let found = |file: &str, key: &str| -> Vec<f64> {
            let text = std::fs::read_to_string(file).expect("metrics");
            let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
            lines.filter_map(|line| line[key].as_f64()).collect()
        };
        assert_eq!(found(&ranks, "eval_loss").len(), 3, "{degrees:?}");
        for key in ["eval_loss", "loss"] {
            assert_eq!(found(&ranks, key), found(&threads, key), "{degrees:?}");
        }
    }
}

#[test]
fn ranks_train_other_architectures_as_threads_do() {
    if !has_mpirun() {
        return;
    }
    let own = |name: &str| Some(format!("{}/tests/models/{name}", env!("CARGO_MANIFEST_DIR")));
    // These include halos, expert exchanges and random bits.
    let models = [
        own("unet.mlir"),
        own("moe-sorted.mlir"),
        shared_model("gpt2-tiny.mlir"),
        shared_model("moe-tiny.mlir"),
        shared_model("wresnet-tiny.mlir"),
    ];
    for model in models.into_iter().flatten() {
        for degrees in [&["--dp", "2"][..], &["--tp", "2"], &["--pp", "2"]] {
            check(&model, 2, degrees, &[Sums::InOrder]);
        }
        check(&model, 4, &["--dp", "2", "--tp", "2"], &[Sums::InOrder, Sums::Any]);
    }
}

/// The checkpoint folders of a run, each with its files.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for checkpoint in std::fs::read_dir(folder).expect("a folder").flatten().filter(|e| e.path().is_dir()) {
        for file in std::fs::read_dir(checkpoint.path()).expect("a checkpoint").flatten() {
            let name = file.path().strip_prefix(folder).expect("it lies there").to_path_buf();
            found.push((name, std::fs::read(file.path()).expect("a readable file")));
        }
    }
    found.sort();
    found
}

#[test]
fn checkpoints_of_ranks_are_those_of_threads_and_any_plan_goes_on_from_them() {
    if !has_mpirun() {
        return;
    }
    let scratch = Scratch::new();
    let (four, two): (&[&str], &[&str]) = (&["--dp", "2", "--pp", "2"], &["--dp", "2", "--zero", "2"]);
    let late = [[four, &["--schedule", "pipedream"]].concat(), [two, &["--update", "stale"]].concat()];
    let servers = ["--parameter-servers", "2"];
    let over = [servers.to_vec(), two.to_vec()];
    let asynchronous =
        [[&servers[..], &["--asynchronous"]].concat(), vec!["--parameter-servers", "1", "--asynchronous"]];
    let prompt = [four.to_vec(), two.to_vec()];
    for (name, [first, then]) in [("prompt", prompt), ("late", late), ("over", over), ("asynchronous", asynchronous)] {
        let four = plan(&scratch, DEMO, 4, &first);
        let two = plan(&scratch, DEMO, 2, &then);
        let folder = |of: &str| scratch.path(&format!("{name}-{of}")).display().to_string();
        let (threads, ranks) = (folder("threads"), folder("ranks"));
        let run = |plan: &str, steps: &str, to: &str, ranks: u32, more: &[&str]| {
            let arguments = [&["run", plan, "--steps", steps, "--checkpoint", to], more].concat();
            if ranks == 0 {
                succeeds(&arguments);
            } else {
                let said = Ranks::start(ranks, &[&arguments[..], &["--reduce-in-order"]].concat()).end();
                assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
            }
        };
        for (to, count) in [(&threads, [0, 0]), (&ranks, [4, 2])] {
            run(&four, "4", to, count[0], &["--checkpoint-every", "2"]);
            run(&two, "6", to, count[1], &["--resume"]);
        }
        let (expected, found) = (files(Path::new(&threads)), files(Path::new(&ranks)));
        assert!(expected.len() >= 6, "{expected:?}");
        assert!(found == expected, "a file differs");
    }
}

#[test]
fn what_does_not_fit_is_said_once() {
    if !has_mpirun() {
        return;
    }
    let scratch = Scratch::new();
    let plan = plan(&scratch, DEMO, 2, &["--dp", "2"]);
    let two_hosts = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/cluster/two-hosts.toml");
    let cluster = std::fs::read_to_string(two_hosts).expect("a cluster");
    let cluster = scratch.file("cluster.toml", cluster.replace("devices_per_node = 2", "devices_per_node = 1"));
    let nodes = scratch.path("nodes.json").display().to_string();
    succeeds(&["plan", DEMO, "--cluster", &cluster, "--dp", "2", "-o", &nodes]);
    let cases: [(u32, Vec<&str>, &str, i32); 5] = [
        (3, vec!["run", &plan], "the plan has 2 devices, but 3 ranks were started", 2),
        (1, vec!["run", &plan], "the plan has 2 devices, but 1 ranks were started", 2),
        (2, vec!["run", &nodes], "--ranks-anywhere", 2),
        (2, vec!["run", DEMO], "takes a plan file", 2),
        (2, vec!["run", &plan, "--data", "/no/such/file.npy"], "/no/such/file.npy", 2),
    ];
    for (count, arguments, expected, code) in cases {
        let said = Ranks::start(count, &arguments).end();
        let errors: Vec<&str> = said.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!((said.code, errors.len()), (Some(code), 1), "{arguments:?}: {}", said.stderr);
        assert!(errors[0].contains(expected), "{errors:?} has no {expected}");
        assert!(said.seconds < 20.0);
    }
    let anywhere = Ranks::start(2, &["run", &nodes, "--ranks-anywhere", "--steps", "2"]).end();
    assert_eq!(anywhere.code, Some(0), "{}", anywhere.stderr);
}

#[test]
fn a_rank_that_is_lost_ends_all_with_one_message() {
    if !has_mpirun() {
        return;
    }
    let scratch = Scratch::new();
    let plan = plan(&scratch, DEMO, 2, &["--pp", "2"]);
    for (name, victim) in [("KILL", 0), ("KILL", 1), ("STOP", 0), ("STOP", 1)] {
        let mut ranks = Ranks::start(2, &["run", &plan, "--steps", "100000"]);
        ranks.wait_for("step    2");
        // A heartbeat reports a rank's activity twice a second.
        std::thread::sleep(Duration::from_secs(1));
        let pids = ranks.pids();
        assert_eq!(pids.len(), 2);
        signal(name, pids[victim]);
        let said = ranks.end();
        let errors: Vec<&str> = said.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{name} {victim}: {}", said.stderr);
        assert!(errors[0].starts_with(&format!("error: rank {victim} on ")), "{errors:?}");
        assert!(errors[0].contains("it was last in step"), "{errors:?}");
        assert!(said.seconds < 10.0 && said.code != Some(0), "{} s", said.seconds);
        for pid in pids {
            // An ended process may remain listed until its exit code is read.
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            assert!(stat.is_empty() || stat.contains(") Z "), "{pid} is left: {stat}");
        }
    }
}

#[test]
fn a_signal_writes_a_checkpoint_first() {
    if !has_mpirun() {
        return;
    }
    let scratch = Scratch::new();
    let plan = plan(&scratch, DEMO, 2, &["--dp", "2"]);
    for to_all in [false, true] {
        let folder = scratch.path(if to_all { "all" } else { "one" }).display().to_string();
        // mpirun gives its ranks a second, which is too short for a step on a busy machine.
        let patient = ["--mca", "odls_base_sigkill_timeout", "8"];
        let mut ranks = Ranks::start_with(&patient, 2, &["run", &plan, "--steps", "100000", "--checkpoint", &folder]);
        ranks.wait_for("step    2");
        signal("TERM", if to_all { ranks.child.id() } else { ranks.pids()[1] });
        let said = ranks.end();
        assert!(said.stdout.contains("checkpoint of step"), "{}{}", said.stdout, said.stderr);
        assert!(said.stderr.contains("error: ended by a signal after step"), "{}", said.stderr);
        // mpirun's own exit code after a signal is its own affair.
        assert!(to_all || said.code == Some(143), "{:?}", said.code);
        assert!(files(Path::new(&folder)).len() >= 2);
    }
}

/// The first rank writes all measurements into the profile of a node. It is used for plans, and runs are compared with
/// it.
#[test]
fn links_are_measured_by_ranks_and_used() {
    if !has_mpirun() {
        return;
    }
    let scratch = Scratch::new();
    let file = |name: &str| scratch.path(name).display().to_string();
    let (node, linked) = (file("node.json"), file("linked.json"));
    succeeds(&["profile", "--quick", "-o", &node]);
    let alone = Ranks::start(1, &["profile", "--quick", "--add-to", &node, "-o", &linked]).end();
    assert_eq!(alone.code, Some(2), "{}", alone.stderr);
    assert!(alone.stderr.contains("start at least two"), "{}", alone.stderr);
    let said = Ranks::start(2, &["profile", "--quick", "--add-to", &node, "-o", &linked]).end();
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let read =
        |name: &str| Profile::from_json(&std::fs::read_to_string(name).expect("a profile")).expect("it is whole");
    let (before, after) = (read(&node), read(&linked));
    let ranks = after.ranks.as_ref().expect("links were measured");
    assert_eq!((ranks.nodes, ranks.on_node), (1, 2));
    let of = |profile: &Profile, family: &str| -> Vec<(u32, Vec<f64>)> {
        let series = profile.series.iter().filter(|series| series.family == family);
        series.map(|series| (series.threads, series.seconds.clone())).collect()
    };
    for family in ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "halo", "shift"] {
        let (threads, ranks) = (of(&before, family), of(&after, family));
        assert_eq!(ranks.iter().map(|r| r.0).collect::<Vec<_>>(), [2], "{family}");
        assert_ne!(threads, ranks, "{family} is of ranks");
    }
    assert_eq!(of(&after, "message").len(), 1);
    assert!(of(&after, "message_across").is_empty(), "there is one node");
    assert_eq!(of(&before, "matmul_nn"), of(&after, "matmul_nn"));
    let plan = file("plan.json");
    let said = succeeds(&["plan", DEMO, "--cluster", "local:2", "--dp", "2", "--profile", &linked, "-o", &plan]);
    assert!(said.contains("with links of 1 x 2 ranks"), "{said}");
    let ran = Ranks::start(2, &["run", &plan, "--steps", "1", "--profile", &linked]).end();
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains("/step, by the measured profile of"), "{}", ran.stdout);
}

/// GPUs of ranks communicate through NCCL. Their hosts coordinate over MPI or, if MPI only starts them, like any
/// processes.
#[test]
fn ranks_train_on_gpus_as_threads_do() {
    let scratch = Scratch::new();
    if !has_mpirun() || emulator(&scratch, 2).is_none() {
        return;
    }
    let config =
        r#"{"model_type": "gpt2", "vocab_size": 13, "n_positions": 4, "n_embd": 8, "n_layer": 2, "n_head": 2}"#;
    let model = scratch.file("gpt2.json", config);
    let degrees = ["--seq", "4", "--global-batch", "8", "--dp", "2", "--tp", "1", "--pp", "1", "--zero", "1"];
    let plan = plan(&scratch, &model, 2, &degrees);
    let folder = scratch.path("").display().to_string();
    let cache = scratch.path("cache").display().to_string();
    let run = |engine: &str, start: &[&str], more: &[&str]| {
        let metrics = scratch.path(engine);
        let mut words = start.to_vec();
        words.extend([env!("CARGO_BIN_EXE_altiplano"), "run", &plan, "--device", "cuda", "--steps", "4"]);
        words.extend(["--engine", engine]);
        let output = Command::new(words[0])
            .args(&words[1..])
            .arg("--metrics")
            .arg(&metrics)
            .args(more)
            .env("ALTIPLANO_CUDA", &folder)
            .env("XDG_CACHE_HOME", &cache)
            .env("EMULATED_NCCL", &folder)
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{engine}: {}", String::from_utf8_lossy(&output.stderr));
        losses(&metrics)
    };
    let mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-q", "-n", "2"];
    let threads = run("threads", &[], &[]);
    assert_eq!(threads.len(), 4);
    assert_eq!(run("mpi", &mpirun, &[]), threads);
    assert_eq!(run("processes", &mpirun, &["--rendezvous", &folder]), threads);
}

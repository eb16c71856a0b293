//! Checkpoints: any plan reads another plan's checkpoint bit by bit, no fault of a run or its files destroys a complete
//! checkpoint, and a killed run resumes seamlessly.

use crate::common::{DEMO, Output, Scratch, altiplano, planned, succeeds};
use altiplano::ImportOptions;
use altiplano::ir::dtype::DType;
use altiplano::ir::plan::Plan;
use altiplano::runtime::data::synthetic;
use altiplano::runtime::{HostTensor, Session};
use altiplano::training::Training;
use altiplano::training::checkpoint::{Checkpoints, DataState, Folder, Manifest, Writer, list, load, newest, verify};
use altiplano::training::team::Team;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Plans of the demo model with different degrees, microbatches and storage.
const PLANS: [&str; 15] = [
    "local:1",
    "local:1 micro4",
    "local:2 dp2",
    "local:2 tp2",
    "local:2 dp2 zero3",
    "local:2 pp2 micro2",
    "local:2 pp2 micro4 gpipe",
    "local:4 dp2 tp2 zero1",
    "local:4 tp4",
    "local:4 dp4 zero2",
    "local:4 pp2 tp2 micro4",
    "local:4 dp2 pp2 micro2 zero3",
    "local:1 offload",
    "local:4 dp2 pp2 micro2 zero1 offload",
    "local:2 pp2 micro4 offload away",
];

/// Options shared by both plans of a pair: the type of the weights, and the optimizer.
const KINDS: [&str; 3] = ["", "bf16", "sgd"];

type Tensors = BTreeMap<(String, Option<String>), HostTensor>;

/// All parameters and state of a session.
fn held(plan: &Plan, session: &mut Session) -> Tensors {
    let mut tensors = Tensors::new();
    for (v, name) in plan.graph.parameters() {
        tensors.insert((name.to_string(), None), session.parameter(name).expect("a parameter"));
        for slot in plan.optimizer.slots(plan.graph.ty(v).dtype) {
            let state = session.state(name, slot).expect("state");
            tensors.insert((name.to_string(), Some(slot.to_string())), state);
        }
    }
    tensors
}

/// A session whose tensors all have different values.
fn filled(plan: &Plan, seed: u64) -> Session {
    let mut session = Team::Alone.session(plan, &Training::default()).expect("a session");
    for (v, name) in plan.graph.parameters() {
        let ty = plan.graph.ty(v);
        session.load_parameter(name, &synthetic(name, ty, 2, seed)).expect("it loads");
        for slot in plan.optimizer.slots(ty.dtype) {
            let state = synthetic(&format!("{slot} {name}"), &ty.with_dtype(DType::F32), 2, seed);
            session.load_state(name, slot, &state).expect("it loads");
        }
    }
    session
}

fn write(plan: &Plan, session: &mut Session, options: &Checkpoints, step: u64) {
    let mut writer = Writer::new(Folder::open(options).expect("the folder"));
    writer.start(plan, session, Manifest::new(plan, step, DataState::default())).expect("it starts");
    writer.finish().expect("one was started").result.expect("it is written");
}

fn check_pairs(count: u64, seed: u64) {
    let mut random = seed;
    let mut below = |n: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % n
    };
    let mut plans: BTreeMap<String, Plan> = BTreeMap::new();
    for pair in 0..count {
        let kind = KINDS[below(3)];
        let [a, b] = [0; 2].map(|_| format!("{} {kind}", PLANS[below(PLANS.len())]));
        for words in [&a, &b] {
            let make = || planned(Path::new(DEMO), &ImportOptions::default(), words).expect("a plan");
            plans.entry(words.clone()).or_insert_with(make);
        }
        let scratch = Scratch::new();
        let shard_bytes = [1, 100_000, 1 << 30][below(3)];
        let options = Checkpoints { shard_bytes, ..Checkpoints::new(scratch.path("checkpoints")) };
        let mut written = filled(&plans[&a], pair);
        let expected = held(&plans[&a], &mut written);
        write(&plans[&a], &mut written, &options, 7);
        let (manifest, place) = newest(&options.folder, |_| Ok(())).expect("it is read").expect("there is one");
        assert!(manifest.expect_fits(&plans[&b]).is_ok(), "{a} -> {b}");
        if shard_bytes == 1 {
            assert_eq!(manifest.files.len(), expected.len(), "a file for each tensor");
        }
        let mut session = Team::Alone.session(&plans[&b], &Training::default()).expect("a session");
        load(&plans[&b], &mut session, &manifest, &place).expect("it loads");
        let found = held(&plans[&b], &mut session);
        assert!(found == expected, "pair {pair}: {a} -> {b}");
    }
}

#[test]
fn any_plan_reads_what_another_wrote() {
    check_pairs(30, 1);
}

#[test]
#[ignore = "slow: the same for 500 pairs"]
fn five_hundred_pairs_of_plans() {
    check_pairs(500, 2);
}

/// Runs the demo with additional options.
fn run(words: &[&str]) -> Output {
    altiplano(&[&["run", DEMO, "--cluster", "local:1"], words].concat())
}

/// The files of a checkpoint and their contents.
fn content(place: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(place).expect("a folder").map(|entry| entry.expect("an entry"));
    let named = |entry: std::fs::DirEntry| {
        (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).expect("a file"))
    };
    files.map(named).collect()
}

/// A run that is repeatedly killed (`kill -9`) ends with the same bits as an undisturbed one. There is a checkpoint
/// after each step, so many are killed during a write.
fn check_kills(kills: &[u64], words: &[&str]) {
    let scratch = Scratch::new();
    let (whole, killed) = (scratch.path("whole"), scratch.path("killed"));
    let ids: Vec<u8> = (0..4000u32).flat_map(|i| ((i * i + 7 * i) as u16 % 512).to_le_bytes()).collect();
    let data = scratch.file("ids.u16", ids);
    let metrics = |folder: &Path| folder.with_extension("jsonl");
    let arguments = |folder: &Path| {
        let every = ["--checkpoint-every", "1", "--keep", "3", "--resume", "--data", &data, "--shuffle=5"];
        let rate = ["--lr-schedule", "cosine", "--lr-warmup", "4", "--lr", "0.01"];
        let mut all: Vec<String> = ["run", DEMO, "--steps", "20"]
            .into_iter()
            .chain(every)
            .chain(rate)
            .chain(words.iter().copied())
            .map(String::from)
            .collect();
        all.extend(["--checkpoint".to_string(), folder.display().to_string()]);
        all.extend(["--metrics".to_string(), metrics(folder).display().to_string()]);
        all
    };
    // The loss and the rate of each step, as bits.
    let course = |folder: &Path| -> Vec<[u64; 3]> {
        let text = std::fs::read_to_string(metrics(folder)).expect("metrics");
        let line = |line: &str| {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let bits = |key: &str| line[key].as_f64().expect("a number").to_bits();
            [line["step"].as_u64().expect("a step"), bits("loss"), bits("learning_rate")]
        };
        text.lines().map(line).collect()
    };
    succeeds(&arguments(&whole));
    for &milliseconds in kills {
        let mut child = Command::new(env!("CARGO_BIN_EXE_altiplano"))
            .args(arguments(&killed))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        std::thread::sleep(Duration::from_millis(milliseconds));
        let _ = child.kill();
        let _ = child.wait();
        for found in list(&killed).unwrap_or_default() {
            verify(&found.place).unwrap_or_else(|error| panic!("after {milliseconds} ms: {error}"));
        }
    }
    let output = altiplano(&arguments(&killed));
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(!output.stderr.contains("warning"), "{}", output.stderr);
    let last = "step-000020";
    assert!(content(&whole.join(last)) == content(&killed.join(last)), "{words:?}");
    assert_eq!(list(&killed).expect("checkpoints").len(), 3);
    assert_eq!(course(&whole).iter().map(|line| line[0]).collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
    assert_eq!(course(&whole), course(&killed));
    let left: Vec<String> = content_names(&killed);
    assert!(left.iter().all(|name| !name.contains(".part")), "{left:?}");
}

fn content_names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn killed_runs_go_on_as_if_they_had_not_been() {
    // The moments vary on purpose; they must not change the result.
    let moment = |least: u64| least + u64::from(std::process::id()) * 7 % 700;
    check_kills(&[moment(1200), moment(2000)], &["--cluster", "local:2", "--dp", "2"]);
}

#[test]
#[ignore = "slow: many kills under several plans"]
fn many_kills_under_several_plans() {
    for words in [&["--cluster", "local:1"][..], &["--cluster", "local:4", "--pp", "2", "--tp", "2"]] {
        for round in 0..6 {
            check_kills(&[700 + 311 * round, 1300 + 97 * round, 2111 - 53 * round, 900], words);
        }
    }
}

/// Damage to a checkpoint's files: the run warns, resumes from the previous one, and leaves that untouched.
#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let scratch = Scratch::new();
    let folder = scratch.path("checkpoints");
    let folder_text = folder.display().to_string();
    let first = run(&["--steps", "2", "--checkpoint", &folder_text, "--checkpoint-every", "1"]);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    let (good, newest) = (folder.join("step-000001"), folder.join("step-000002"));
    let (before, whole) = (content(&good), content(&newest));
    let restore = || {
        let _ = std::fs::remove_dir_all(&newest);
        std::fs::create_dir_all(&newest).expect("a folder");
        whole.iter().for_each(|(name, bytes)| std::fs::write(newest.join(name), bytes).expect("a file"));
    };
    let (shard, manifest) = (newest.join("tensors-00000.safetensors"), newest.join("manifest.json"));
    let flipped = |file: &Path, at: usize| {
        let mut bytes = std::fs::read(file).expect("a file");
        bytes[at] ^= 4;
        std::fs::write(file, bytes).expect("a file");
    };
    let last_step =
        |text: &str, from: &str, to: &str| std::fs::write(&manifest, text.replace(from, to)).expect("a file");
    let text = String::from_utf8(whole["manifest.json"].clone()).expect("text");
    let damages: [(&dyn Fn(), &str); 8] = [
        (&|| flipped(&shard, 5_000_000), "checksum does not hold"),
        (&|| flipped(&shard, 3), "checksum does not hold"),
        (&|| std::fs::write(&shard, &whole["tensors-00000.safetensors"][..1000]).expect("a file"), "has 1000 bytes"),
        (&|| std::fs::remove_file(&shard).expect("a file"), "is missing"),
        (&|| std::fs::remove_file(&manifest).expect("a file"), "'manifest.json' is missing"),
        (&|| last_step(&text, "\"step\": 2", "\"step\": 3"), "manifest was changed or damaged"),
        (&|| std::fs::write(&manifest, "{\"format\": 1}").expect("a file"), "not a checkpoint"),
        (&|| std::fs::write(&manifest, &text[..100]).expect("a file"), "not a checkpoint"),
    ];
    for (damage, expected) in damages {
        restore();
        damage();
        let output = run(&["--steps", "1", "--checkpoint", &folder_text, "--resume"]);
        assert_eq!(output.code, Some(0), "{expected}: {}", output.stderr);
        assert!(output.stderr.contains("warning: ") && output.stderr.contains(expected), "{}", output.stderr);
        assert!(output.stdout.contains("step-000001 has all 1 steps"), "{}", output.stdout);
        assert!(content(&good) == before, "{expected}");
    }
    // When the run reaches the step again, it replaces the damaged checkpoint.
    let output = run(&["--steps", "2", "--checkpoint", &folder_text, "--resume"]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(content(&newest) == whole && content(&good) == before);
    let names = content_names(&folder);
    assert_eq!(names.len(), 3, "{names:?}");

    // A checkpoint of a newer version is not damaged, and resuming from an older one would lose work.
    let newer = Manifest { version: 3, ..verify(&newest).expect("it is whole") };
    std::fs::write(&manifest, newer.to_json()).expect("a file");
    let output = run(&["--steps", "3", "--checkpoint", &folder_text, "--resume"]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
    assert!(output.stderr.contains("has version 3"), "{}", output.stderr);

    // If none is complete, the run does not start over by itself.
    restore();
    flipped(&shard, 77);
    flipped(&good.join("tensors-00000.safetensors"), 77);
    let output = run(&["--steps", "3", "--checkpoint", &folder_text, "--resume"]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
    assert!(output.stderr.contains("none of 2 checkpoints is complete"), "{}", output.stderr);
    let output = altiplano(&["checkpoint", &folder_text]);
    assert_eq!(output.stdout.matches("checksum does not hold").count(), 2, "{}", output.stdout);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
}

#[test]
fn what_does_not_fit_is_refused() {
    let scratch = Scratch::new();
    let folder = scratch.path("checkpoints");
    let text = folder.display().to_string();
    let file = scratch.file("file", "");
    let refused = |output: Output, expected: &str| {
        assert_eq!(output.code, Some(2), "{expected}: {}{}", output.stdout, output.stderr);
        assert!(output.stderr.contains(expected), "{}", output.stderr);
    };
    refused(run(&["--checkpoint", &file]), "file: ");
    refused(run(&["--checkpoint", &format!("{file}/below")]), "below: ");
    let missing = run(&["--steps", "1", "--checkpoint", &text, "--resume"]);
    assert_eq!(missing.code, Some(0), "{}", missing.stderr);
    assert!(missing.stdout.contains("no checkpoint yet: starting from the beginning"), "{}", missing.stdout);
    let before = content(&folder.join("step-000001"));
    refused(run(&["--checkpoint", &text]), "add --resume to continue");
    refused(run(&["--checkpoint", &text, "--resume", "--optimizer", "sgd"]), "of another optimizer");
    refused(run(&["--checkpoint", &text, "--resume", "--beta2", "0.95"]), "of another optimizer");
    refused(
        run(&["--checkpoint", &text, "--resume", "--clip-norm", "2.5"]),
        "this run has gradients clipped at norm 2.5",
    );
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/moe-sorted.mlir");
    refused(altiplano(&["run", other, "--cluster", "local:1", "--checkpoint", &text, "--resume"]), "of another model");
    refused(run(&["--checkpoint", &text, "--resume", "--precision", "bf16"]), "of another model");
    // A run that locks the folder keeps others out; a stale lock file has no effect.
    let held = Folder::open(&Checkpoints { resume: true, ..Checkpoints::new(&folder) }).expect("the folder");
    refused(run(&["--checkpoint", &text, "--resume"]), &format!("another run (process {})", std::process::id()));
    drop(held);
    std::fs::create_dir(folder.join("step-000009.part")).expect("a folder");
    let output = run(&["--steps", "1", "--checkpoint", &text, "--resume"]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(!folder.join("step-000009.part").exists());
    assert!(content(&folder.join("step-000001")) == before);

    let weights = scratch.path("weights.safetensors").display().to_string();
    let said = succeeds(&["checkpoint", &text, "-o", &weights]);
    assert!(said.contains("52 tensors of 'gpt-small-demo' after step 1"), "{said}");
    let from = run(&["--steps", "1", "--weights", &weights]);
    assert_eq!(from.code, Some(0), "{}", from.stderr);
    refused(altiplano(&["checkpoint", &scratch.path("none").display().to_string()]), "none");
}

/// A checkpoint that cannot be written is reported, and affects neither the run nor earlier checkpoints.
#[test]
fn a_checkpoint_that_cannot_be_written_costs_nothing_else() {
    let scratch = Scratch::new();
    let plan = planned(Path::new(DEMO), &ImportOptions::default(), "local:1").expect("a plan");
    let options = Checkpoints { resume: true, ..Checkpoints::new(scratch.path("checkpoints")) };
    let mut session = filled(&plan, 3);
    write(&plan, &mut session, &options, 1);
    let before = content(&options.folder.join("step-000001"));
    let mut writer = Writer::new(Folder::open(&options).expect("the folder"));
    // A file in the way stands for any error of the system.
    std::fs::write(options.folder.join("step-000002.part"), "").expect("a file");
    writer.start(&plan, &mut session, Manifest::new(&plan, 2, DataState::default())).expect("it starts");
    let written = writer.finish().expect("one was started");
    assert_eq!(written.step, 2);
    let error = written.result.expect_err("there is a file in the way").to_string();
    assert!(error.contains("step-000002.part"), "{error}");
    assert!(content(&options.folder.join("step-000001")) == before);
    std::fs::remove_file(options.folder.join("step-000002.part")).expect("a file");
    writer.start(&plan, &mut session, Manifest::new(&plan, 3, DataState::default())).expect("it starts");
    assert!(writer.finish().expect("one was started").result.is_ok());
}

/// On a separate disk that is too small. Needs a system that lets this process mount one.
#[test]
fn a_full_disk_costs_nothing_else() {
    let scratch = Scratch::new();
    let folder = scratch.path("disk");
    std::fs::create_dir(&folder).expect("a folder");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=16m", "tmpfs"])
        .arg(&folder)
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        eprintln!("SKIPPED: no file system can be mounted here");
        return;
    }
    let text = folder.display().to_string();
    let output = run(&["--steps", "3", "--checkpoint", &text, "--checkpoint-every", "1"]);
    let left = list(&folder).map(|found| found.into_iter().map(|f| verify(&f.place).is_ok()).collect::<Vec<_>>());
    let _ = Command::new("umount").arg(&folder).status();
    // The first of the checkpoints of 11 MB each fits, and the run completes without the others.
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    assert!(output.stdout.contains("step    3"), "{}", output.stdout);
    assert!(output.stderr.contains("no checkpoint of step 2 was written"), "{}", output.stderr);
    assert_eq!(left.expect("checkpoints"), [true]);
}

/// As `altiplano run | head`: the steps done are in a checkpoint, and the exit code is that of a failure.
#[test]
fn a_closed_stdout_ends_a_run_with_a_checkpoint() {
    let scratch = Scratch::new();
    let folder = scratch.path("checkpoints");
    let mut child = Command::new(env!("CARGO_BIN_EXE_altiplano"))
        .args(["run", DEMO, "--cluster", "local:2", "--dp", "2", "--steps", "100000", "--checkpoint"])
        .arg(&folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("step    2") {
        line.clear();
        assert!(stdout.read_line(&mut line).expect("a line") > 0, "the run ended");
    }
    drop(stdout);
    let output = child.wait_with_output().expect("a status");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let found = list(&folder).expect("checkpoints");
    assert_eq!(found.len(), 1, "{said}");
    let manifest = verify(&found[0].place).expect("it is whole");
    assert!(manifest.step >= 2, "{said}");
    assert!(
        said.contains(&format!("the run ended after step {}, whose checkpoint is written", manifest.step)),
        "{said}"
    );
}

/// Metrics that fail in mid-run end with a warning, and training goes on.
#[test]
fn metrics_that_cannot_be_written_cost_nothing_else() {
    let scratch = Scratch::new();
    let folder = scratch.path("checkpoints").display().to_string();
    let output = run(&["--steps", "3", "--checkpoint", &folder, "--metrics", "/dev/full"]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert_eq!(output.stderr.matches("no more metrics are written").count(), 1, "{}", output.stderr);
    assert!(output.stdout.contains("checkpoint of step 3"), "{}", output.stdout);
}

/// A folder without a checkpoint starts a run anew. The metrics of the former run are kept.
#[test]
fn metrics_are_copied_before_they_are_cut() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let metrics = path("metrics.jsonl");
    let of_run = |folder: &str, steps: &str| {
        let output = run(&["--steps", steps, "--checkpoint", &path(folder), "--resume", "--metrics", &metrics]);
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        output.stderr
    };
    of_run("checkpoints", "2");
    let former = std::fs::read_to_string(&metrics).expect("metrics");
    assert!(!of_run("checkpoints", "3").contains("former content"));
    let longer = std::fs::read_to_string(&metrics).expect("metrics");
    assert!(longer.starts_with(&former) && longer.lines().count() == 3, "{longer}");
    let said = of_run("chekpoints", "1");
    assert!(said.contains("metrics.jsonl.1 has its former content"), "{said}");
    assert_eq!(std::fs::read_to_string(path("metrics.jsonl.1")).expect("a copy"), longer);
    assert_eq!(std::fs::read_to_string(&metrics).expect("metrics").lines().count(), 1);
}

/// Returns whether this process was started with a signal ignored, as `nohup` and background jobs are. Its children
/// ignore it too.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).map(str::trim);
    mask.and_then(|mask| u64::from_str_radix(mask, 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(unix)]
#[test]
fn signals_end_a_run_with_a_checkpoint() {
    for (signal, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129), ("-USR1", 138), ("-XCPU", 152), ("-USR2", 140)]
    {
        if is_ignored(code - 128) {
            eprintln!("SKIPPED: these tests were started with signal {} ignored", code - 128);
            continue;
        }
        let scratch = Scratch::new();
        let (folder, out) = (scratch.path("checkpoints"), scratch.path("out"));
        let mut child = Command::new(env!("CARGO_BIN_EXE_altiplano"))
            .args(["run", DEMO, "--cluster", "local:1", "--steps", "100000", "--signal", "usr2", "--checkpoint"])
            .arg(&folder)
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&out).expect("a file"))
            // Nor does a message that cannot be written change the exit code.
            .stderr(std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a device"))
            .spawn()
            .expect("the binary starts");
        let said = || std::fs::read_to_string(&out).unwrap_or_default();
        while !said().contains("step    2") {
            assert!(child.try_wait().expect("a status").is_none(), "{}", said());
            std::thread::sleep(Duration::from_millis(10));
        }
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        assert_eq!(child.wait().expect("a status").code(), Some(code), "{signal}");
        let found = list(&folder).expect("checkpoints");
        assert_eq!(found.len(), 1, "{signal}");
        let manifest = verify(&found[0].place).expect("it is whole");
        assert!(said().contains(&format!("checkpoint of step {}: ", manifest.step)), "{}", said());
    }
}

#[test]
fn other_data_is_noticed_when_a_run_goes_on() {
    let scratch = Scratch::new();
    let folder = scratch.path("run").display().to_string();
    let ids = |step: u32| -> Vec<u8> { (0..80_000u32).flat_map(|i| ((i * step) as u16 % 512).to_le_bytes()).collect() };
    // It differs only in its last byte.
    let mut almost = ids(7);
    *almost.last_mut().expect("a byte") ^= 1;
    let (data, moved) = (scratch.file("ids.u16", ids(7)), scratch.file("moved.u16", ids(7)));
    let others = [scratch.file("almost.u16", almost), scratch.file("longer.u16", [ids(7), ids(1)].concat())];
    let go_on = |steps: &str, data: &[&str]| {
        run(&[&["--global-batch", "2", "--checkpoint", &folder, "--resume", "--steps", steps][..], data].concat())
    };
    assert_eq!(go_on("1", &["--data", &data]).code, Some(0));
    for other in &others {
        let output = go_on("2", &["--data", other]);
        assert_eq!(output.code, Some(2), "{}", output.stderr);
        let named = |file: &str| output.stderr.contains(&format!("'{file}' ("));
        assert!(named(&data) && named(other), "{}", output.stderr);
    }
    let output = go_on("2", &[]);
    assert!(output.code == Some(2) && output.stderr.contains("has synthetic batches;"), "{}", output.stderr);
    let output = go_on("2", &["--data", &moved]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
}

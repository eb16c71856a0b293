//! Faults of the system at every single call of a short run: a library that is loaded before the system's makes the
//! n-th one fail, or kills the process there. Exit codes, messages and checkpoints are checked, and a run that resumes
//! afterwards ends with the same bits as an undisturbed one. The same for kills at random moments, and for memory that
//! the system refuses.

use crate::common::{Output, Scratch, altiplano, altiplano_with};
use altiplano::training::checkpoint::{list, newest, verify};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A model whose steps take microseconds.
const TINY: &str = r#"module @tiny {
  func.func public @main(%arg0: tensor<4x2xf32> loc("params['w']"), %arg1: tensor<8x4xf32> loc("x")) -> tensor<f32> {
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.dot_general %arg1, %arg0, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x2xf32>) -> tensor<8x2xf32>
    %1 = stablehlo.multiply %0, %0 : tensor<8x2xf32>
    %2 = stablehlo.reduce(%1 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x2xf32>, tensor<f32>) -> tensor<f32>
    return %2 : tensor<f32>
  }
}
"#;

/// The folder of the files on which calls are counted.
const UNDER: &str = "run-under-faults";

/// Errors of the system: no space, I/O, no permission, interrupted, too many files.
const ERRORS: [&str; 5] = ["28", "5", "13", "4", "24"];

/// A model, and a library of faults.
struct Trial {
    scratch: Scratch,
    model: String,
    library: PathBuf,
    /// Options of the plan.
    plan: &'static [&'static str],
}

/// The outcome of a run: its output, and the number of calls that were counted.
struct Tried {
    output: Output,
    calls: u64,
}

impl Trial {
    fn new() -> Trial {
        let scratch = Scratch::new();
        let library = scratch.path("faults.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/training/faults/preload.c");
        let options = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"];
        let built = Command::new("cc").args(options).arg(&library).arg(source).status();
        assert!(built.expect("a C compiler").success());
        let model = scratch.file("tiny.mlir", TINY);
        Trial { scratch, model, library, plan: &["--cluster", "local:1"] }
    }

    fn folder(&self) -> PathBuf {
        self.scratch.path(UNDER)
    }

    fn checkpoints(&self) -> PathBuf {
        self.folder().join("checkpoints")
    }

    /// Three steps with a checkpoint after each, of which two are kept.
    fn arguments(&self) -> Vec<String> {
        let (checkpoints, metrics) = (self.checkpoints(), self.folder().join("metrics.jsonl"));
        let [checkpoints, metrics] = [checkpoints, metrics].map(|path| path.display().to_string());
        let arguments = [&["run", &self.model, "--steps", "3", "--resume", "--keep", "2"], self.plan].concat();
        let files = ["--checkpoint", &checkpoints, "--checkpoint-every", "1", "--metrics", &metrics];
        arguments.into_iter().chain(files).map(String::from).collect()
    }

    fn run(&self, fault: &str, at: u64) -> Tried {
        self.run_as(&self.arguments(), fault, at, &[])
    }

    /// Runs a command with more variables for the library.
    fn run_as(&self, arguments: &[String], fault: &str, at: u64, more: &[(&str, &str)]) -> Tried {
        if fault.is_empty() {
            return Tried { output: altiplano(arguments), calls: 0 };
        }
        let (log, number) = (self.scratch.path("calls"), at.to_string());
        let _ = std::fs::remove_file(&log);
        let variables = [
            ("LD_PRELOAD", self.library.to_str().expect("a path")),
            ("FAULT", fault),
            ("FAULT_AT", &number),
            ("FAULT_UNDER", UNDER),
            ("FAULT_LOG", log.to_str().expect("a path")),
            // Printing one takes memory, which may be refused.
            ("RUST_BACKTRACE", "0"),
        ];
        let output = altiplano_with(&[&variables, more].concat(), arguments);
        let count = std::fs::read(&log).expect("the library was loaded");
        Tried { output, calls: u64::from_le_bytes(count.try_into().expect("eight bytes")) }
    }

    fn clear(&self) {
        let _ = std::fs::remove_dir_all(self.folder());
        std::fs::create_dir(self.folder()).expect("a folder");
    }

    /// The files of all checkpoints.
    fn content(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut content = BTreeMap::new();
        for found in list(&self.checkpoints()).expect("checkpoints") {
            for file in std::fs::read_dir(&found.place).expect("a folder") {
                let file = file.expect("an entry").path();
                content.insert(file.clone(), std::fs::read(file).expect("a file"));
            }
        }
        content
    }

    /// The newest step with a whole checkpoint; 0 if there is none.
    fn newest(&self) -> u64 {
        let is_there = self.checkpoints().exists();
        let found = if is_there { newest(&self.checkpoints(), |_| Ok(())).ok().flatten() } else { None };
        found.map_or(0, |(manifest, _)| manifest.step)
    }

    /// Resumes without faults, and expects the bits of an undisturbed run.
    fn expect_resumed(&self, whole: &BTreeMap<PathBuf, Vec<u8>>, what: &str) {
        let Output { code, stdout, stderr } = self.run("", 0).output;
        assert_eq!(code, Some(0), "{what}: {stdout}{stderr}");
        assert!(!stderr.contains("warning: "), "{what}: nothing was damaged: {stderr}");
        let found = self.content();
        let last = |content: &BTreeMap<PathBuf, Vec<u8>>| -> BTreeMap<PathBuf, Vec<u8>> {
            content.iter().filter(|(file, _)| is_of_last(file)).map(|(f, b)| (f.clone(), b.clone())).collect()
        };
        assert!(last(&found) == last(whole) && last(whole).len() == 2, "{what}: {:?}", found.keys());
        list(&self.checkpoints()).expect("checkpoints").iter().for_each(|found| {
            verify(&found.place).unwrap_or_else(|error| panic!("{what}: {error}"));
        });
    }
}

fn is_of_last(file: &Path) -> bool {
    file.parent().is_some_and(|folder| folder.ends_with("step-000003"))
}

/// The steps whose checkpoints a run has announced.
fn announced(stdout: &str) -> u64 {
    let steps = stdout.lines().filter_map(|line| line.trim().strip_prefix("checkpoint of step ")?.split(':').next());
    steps.filter_map(|step| step.parse().ok()).max().unwrap_or(0)
}

/// An undisturbed run: its checkpoints, and the number of its calls.
fn undisturbed(trial: &Trial) -> (BTreeMap<PathBuf, Vec<u8>>, u64) {
    trial.clear();
    let Tried { output, calls } = trial.run("5", u64::MAX >> 1);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert_eq!(announced(&output.stdout), 3, "{}", output.stdout);
    assert!(calls > 40, "{calls} calls were counted");
    (trial.content(), calls)
}

fn check_kill(trial: &Trial, whole: &BTreeMap<PathBuf, Vec<u8>>, at: u64) {
    trial.clear();
    let what = format!("killed at call {at}");
    let Output { code, stdout, .. } = trial.run("kill", at).output;
    assert_eq!(code, None, "{what}");
    let kept = trial.newest();
    assert!(kept >= announced(&stdout), "{what}: step {kept} is the newest, but {stdout}");
    trial.expect_resumed(whole, &what);
    let metrics = std::fs::read_to_string(trial.folder().join("metrics.jsonl")).expect("metrics");
    let steps: Vec<&str> = metrics.lines().filter_map(|line| line.get(..9)).collect();
    assert_eq!(steps, ["{\"step\":1", "{\"step\":2", "{\"step\":3"], "{what}");
}

fn check_error(trial: &Trial, whole: &BTreeMap<PathBuf, Vec<u8>>, error: &str, at: u64) {
    trial.clear();
    let what = format!("error {error} at call {at}");
    let Output { code, stdout, stderr } = trial.run(error, at).output;
    let said = stderr.contains("error: ") || stderr.contains("warning: ");
    match code {
        Some(0) => assert_eq!(trial.newest(), 3, "{what}: {stdout}{stderr}"),
        Some(1 | 2) => assert!(said, "{what}: {stdout}{stderr}"),
        _ => panic!("{what} ends with {code:?}: {stdout}{stderr}"),
    }
    assert!(!stderr.contains("panicked"), "{what}: {stderr}");
    // Steps that were done are in a checkpoint, unless that was what failed.
    let kept = trial.newest();
    assert!(kept >= announced(&stdout), "{what}: step {kept} is the newest, but {stdout}");
    trial.expect_resumed(whole, &what);
}

#[test]
fn a_run_that_is_killed_at_any_call_resumes_with_the_same_bits() {
    let trial = Trial::new();
    let (whole, calls) = undisturbed(&trial);
    (1..=calls).for_each(|at| check_kill(&trial, &whole, at));
    eprintln!("{calls} kills");
}

#[test]
fn an_error_of_any_call_costs_no_checkpoint() {
    let trial = Trial::new();
    let (whole, calls) = undisturbed(&trial);
    (1..=calls).for_each(|at| check_error(&trial, &whole, ERRORS[at as usize % ERRORS.len()], at));
    eprintln!("{calls} errors");
}

#[test]
#[ignore = "slow: every error at every call"]
fn every_error_of_every_call_costs_no_checkpoint() {
    for plan in [&["--cluster", "local:1"][..], &["--cluster", "local:2", "--dp", "2", "--zero", "1"]] {
        let trial = Trial { plan, ..Trial::new() };
        let (whole, calls) = undisturbed(&trial);
        for error in ERRORS.into_iter().chain(["short"]) {
            (1..=calls).for_each(|at| check_error(&trial, &whole, error, at));
        }
        eprintln!("{} errors of {plan:?}", calls * (ERRORS.len() + 1) as u64);
    }
}

/// Kills a run after so long, and resumes it. Returns whether it was still running.
fn check_kill_after(trial: &Trial, whole: &BTreeMap<PathBuf, Vec<u8>>, delay: Duration) -> bool {
    trial.clear();
    let said = trial.scratch.path("said");
    let mut child = Command::new(env!("CARGO_BIN_EXE_altiplano"))
        .args(trial.arguments())
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&said).expect("a file"))
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts");
    std::thread::sleep(delay);
    child.kill().expect("a signal");
    let was_killed = child.wait().expect("it ends").code().is_none();
    let what = format!("killed after {delay:?}");
    let kept = trial.newest();
    let stdout = std::fs::read_to_string(&said).expect("text");
    assert!(kept >= announced(&stdout), "{what}: step {kept} is the newest, but {stdout}");
    trial.expect_resumed(whole, &what);
    was_killed
}

/// Kills runs until so many were killed before they ended. The moments are spread over the time that a run takes.
fn check_moments(kills: u32) {
    let trial = Trial::new();
    let (whole, _) = undisturbed(&trial);
    trial.clear();
    let start = Instant::now();
    assert_eq!(trial.run("", 0).output.code, Some(0));
    let takes = start.elapsed();
    // Steps of the golden ratio cover an interval evenly, in no order.
    let moment = |i: u32| takes.mul_f64((f64::from(i) * 0.618_033_988_749_895).fract());
    let killed = (0..).filter(|&i| check_kill_after(&trial, &whole, moment(i)));
    assert_eq!(killed.take(kills as usize).count(), kills as usize);
}

#[test]
fn a_run_that_is_killed_at_any_moment_resumes_with_the_same_bits() {
    check_moments(10);
}

#[test]
#[ignore = "slow: 1000 runs"]
fn a_thousand_runs_that_are_killed_resume_with_the_same_bits() {
    check_moments(1000);
}

#[test]
fn refused_memory_costs_no_checkpoint() {
    let trial = Trial::new();
    let (whole, _) = undisturbed(&trial);
    trial.clear();
    let requests = trial.run("memory", u64::MAX >> 1).calls;
    assert!(requests > 5, "{requests} requests were counted");
    for at in 1..=requests {
        trial.clear();
        let Output { code, stdout, stderr } = trial.run("memory", at).output;
        // The standard library aborts where it cannot start a thread.
        assert!(code != Some(0) || trial.newest() == 3, "request {at}: {stdout}{stderr}");
        assert!(code == Some(0) || !stderr.is_empty(), "request {at} ends with {code:?} and no word");
        let kept = trial.newest();
        assert!(kept >= announced(&stdout), "request {at}: step {kept} is the newest, but {stdout}");
        trial.expect_resumed(&whole, &format!("request {at}"));
    }
}

#[test]
fn short_writes_lose_nothing() {
    let trial = Trial::new();
    let (whole, calls) = undisturbed(&trial);
    for at in 1..=calls {
        trial.clear();
        let output = trial.run("short", at).output;
        assert_eq!(output.code, Some(0), "call {at}: {}", output.stderr);
        assert!(trial.content() == whole, "call {at}");
    }
}

/// Plans, pages and traces are flushed before they take their names, so that none is ever a part of one.
#[test]
fn files_that_users_name_are_old_or_whole_after_any_error() {
    let trial = Trial::new();
    let path = |name: &str| trial.folder().join(name).display().to_string();
    let (plan, page, trace) = (path("plan.json"), path("page.html"), path("trace.json"));
    let model = [trial.model.as_str(), "--cluster", "local:1"];
    let cases = [
        ([&["plan"], &model[..], &["-o", &plan, "--html", &page]].concat(), vec![&plan, &page]),
        ([&["run"], &model[..], &["--steps", "1", "--trace", &trace]].concat(), vec![&trace]),
    ];
    for (command, files) in cases {
        let command: Vec<String> = command.into_iter().map(String::from).collect();
        let tried = |at: u64, more: &[(&str, &str)]| {
            trial.clear();
            files.iter().for_each(|file| std::fs::write(file, "old").expect("a file"));
            trial.run_as(&command, "5", at, more)
        };
        let is_new = |file: &String| std::fs::read_to_string(file).expect("a file") != "old";
        let mut all = Vec::new();
        for more in [&[][..], &[("FAULT_ONLY", "fsync")]] {
            let calls = tried(u64::MAX >> 1, more).calls;
            let whole: Vec<u64> = files.iter().map(|file| std::fs::metadata(file).expect("a file").len()).collect();
            assert!(files.iter().all(|file| is_new(file)), "{command:?}");
            let failed = (1..=calls).filter(|&at| {
                let Output { code, stderr, .. } = tried(at, more).output;
                for (file, whole) in files.iter().zip(&whole) {
                    let length = std::fs::metadata(file).expect("a file").len();
                    // Times in a trace have different digits.
                    assert!(!is_new(file) || length * 2 > *whole, "call {at}: {file} has {length} of {whole} bytes");
                }
                let is_done = files.iter().all(|file| is_new(file));
                assert_eq!(code == Some(0), is_done, "call {at} ends with {code:?}: {stderr}");
                !is_done
            });
            all.push(failed.count());
        }
        assert!(all[1] == files.len() && all[0] > all[1], "{command:?} fails at {all:?} calls");
    }
}

/// The folder of a run of version 1 of the format.
fn of_version_1(scratch: &Scratch) -> PathBuf {
    let place = scratch.path("old/step-000001");
    std::fs::create_dir_all(&place).expect("a folder");
    for name in ["manifest.json", "tensors-00000.safetensors"] {
        let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/checkpoint-1/step-000001").join(name);
        std::fs::copy(kept, place.join(name)).expect("a file");
    }
    place
}

#[test]
fn checkpoints_of_version_1_are_read_and_verified() {
    let scratch = Scratch::new();
    let model = scratch.file("tiny.mlir", TINY);
    let place = of_version_1(&scratch);
    let folder = scratch.path("old").display().to_string();
    let run = |steps: &str| {
        let fixed = ["run", &model, "--cluster", "local:1", "--clip-norm", "0.5", "--resume", "--checkpoint", &folder];
        altiplano(&[&fixed[..], &["--steps", steps]].concat())
    };
    let output = run("2");
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(output.stdout.contains("step    2") && !output.stdout.contains("step    1"), "{}", output.stdout);
    let manifest = verify(&scratch.path("old/step-000002")).expect("it is whole");
    assert_eq!((manifest.version, manifest.files[0].crc32.as_ref()), (2, None));
    assert_eq!(manifest.files[0].xxh3.as_ref().map(String::len), Some(32));
    // Its old checksums still hold, or do not.
    assert!(verify(&place).is_ok());
    for name in ["manifest.json", "tensors-00000.safetensors"] {
        let whole = std::fs::read(place.join(name)).expect("a file");
        for at in [70, whole.len() / 2, whole.len() - 20] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(place.join(name), &bytes).expect("a file");
            assert!(verify(&place).is_err(), "{name} at {at}");
        }
        std::fs::write(place.join(name), &whole).expect("a file");
    }
}

/// One bit that flips in any byte of a manifest makes the checkpoint a damaged one, not one of a newer version, and the
/// checkpoint before it is taken with one warning.
#[test]
fn any_flipped_bit_of_a_manifest_is_damage() {
    let trial = Trial::new();
    undisturbed(&trial);
    let manifest = trial.checkpoints().join("step-000003/manifest.json");
    let whole = std::fs::read(&manifest).expect("a manifest");
    for at in 0..whole.len() {
        for bit in [0, 1, 2, 4] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            std::fs::write(&manifest, &bytes).expect("a file");
            let mut damaged = Vec::new();
            let found = newest(&trial.checkpoints(), |error| {
                damaged.push(error.to_string());
                Ok(())
            });
            let (found, _) = found.unwrap_or_else(|error| panic!("bit {bit} of byte {at}: {error}")).expect("an older");
            assert_eq!((found.step, damaged.len()), (2, 1), "bit {bit} of byte {at}: {damaged:?}");
        }
    }
    let text = String::from_utf8(whole).expect("text");
    std::fs::write(&manifest, text.replace("\"version\": 2", "\"version\": 3")).expect("a file");
    let output = trial.run("", 0).output;
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert_eq!(output.stderr.matches("warning: ").count(), 1, "{}", output.stderr);
    assert!(output.stderr.contains("its checksum does not hold"), "{}", output.stderr);
    assert_eq!(std::fs::read_to_string(&manifest).expect("it is written again"), text);
}

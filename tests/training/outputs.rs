//! Faults of what a run has beside its trained state: a terminal that is gone, disks that are full, data that is cut
//! short. No step that was done is lost, and the exit code says what failed.

use crate::common::{DEMO, Scratch};
use altiplano::training::checkpoint::{list, verify};
use std::fs::{File, OpenOptions};
use std::io::pipe;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A run of the demo model, with its checkpoints and its words in files.
struct Started {
    child: Child,
    scratch: Scratch,
}

/// How a run ended.
struct Ended {
    code: Option<i32>,
    stderr: String,
    /// The steps of whole checkpoints.
    kept: Vec<u64>,
}

fn command(scratch: &Scratch, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_altiplano"));
    command
        .args(["run", DEMO, "--cluster", "local:2", "--dp", "2", "--checkpoint"])
        .arg(scratch.path("checkpoints"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(File::create(scratch.path("stdout")).expect("a file"))
        .stderr(File::create(scratch.path("stderr")).expect("a file"));
    command
}

fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").expect("a device")
}

/// A pipe that nobody reads.
fn unread() -> Stdio {
    pipe().expect("a pipe").1.into()
}

impl Started {
    fn new(scratch: Scratch, mut command: Command) -> Started {
        Started { child: command.spawn().expect("the binary starts"), scratch }
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.scratch.path(name)).unwrap_or_default()
    }

    fn wait_for(&mut self, name: &str, said: &str) {
        while !self.text(name).contains(said) {
            let ended = self.child.try_wait().expect("a status");
            assert!(ended.is_none(), "never said {said}: {}{}", self.text("stdout"), self.text("stderr"));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ended(mut self) -> Ended {
        let code = self.child.wait().expect("a status").code();
        let stderr = self.text("stderr");
        assert!(!stderr.contains("panicked"), "{stderr}");
        let found = list(&self.scratch.path("checkpoints")).unwrap_or_default();
        let kept = found.iter().map(|found| verify(&found.place).expect("it is whole").step).collect();
        Ended { code, stderr, kept }
    }
}

/// Token ids for a run.
fn tokens(scratch: &Scratch, name: &str) -> PathBuf {
    let ids: Vec<u8> = (0..80_000u32).flat_map(|i| (i as u16 % 512).to_le_bytes()).collect();
    scratch.file(name, ids).into()
}

fn cut(file: &PathBuf) {
    OpenOptions::new().write(true).open(file).and_then(|file| file.set_len(0)).expect("it is cut");
}

#[test]
fn a_run_whose_output_is_gone_at_its_start_fails() {
    for is_full in [false, true] {
        let scratch = Scratch::new();
        let mut command = command(&scratch, &["--steps", "2"]);
        command.stdout(if is_full { full().into() } else { unread() });
        let ended = Started::new(scratch, command).ended();
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains("error: writing to standard output"), "{}", ended.stderr);
    }
}

#[test]
fn warnings_that_nobody_can_read_end_no_run() {
    let scratch = Scratch::new();
    let mut command = command(&scratch, &["--steps", "3", "--metrics", "/dev/full"]);
    command.stderr(full());
    let ended = Started::new(scratch, command).ended();
    assert_eq!((ended.code, ended.kept), (Some(0), vec![3]));
}

#[test]
fn data_that_is_cut_in_mid_run_ends_it_with_a_checkpoint() {
    let scratch = Scratch::new();
    let data = tokens(&scratch, "ids.u16");
    let command = command(&scratch, &["--steps", "100000", "--data", &data.display().to_string()]);
    let mut run = Started::new(scratch, command);
    run.wait_for("stdout", "step    2");
    cut(&data);
    let ended = run.ended();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let [step] = ended.kept[..] else { panic!("{:?}: {}", ended.kept, ended.stderr) };
    let said = format!("the run ended after step {step}, whose checkpoint is written");
    assert!(step >= 2 && ended.stderr.contains("ids.u16") && ended.stderr.contains(&said), "{}", ended.stderr);
}

#[test]
fn held_out_data_that_is_cut_in_mid_run_ends_only_evaluation() {
    let scratch = Scratch::new();
    let held_out = tokens(&scratch, "held-out.u16");
    let file = held_out.display().to_string();
    let options = ["--eval-data", &file, "--eval-every", "1", "--eval-steps", "1", "--steps", "100000"];
    let command = command(&scratch, &options);
    let mut run = Started::new(scratch, command);
    run.wait_for("stdout", "held out, after step 2");
    cut(&held_out);
    run.wait_for("stderr", "no evaluation after step");
    let said = run.text("stdout");
    let last = said.lines().rev().find_map(|line| line.strip_prefix("step ")?.split_whitespace().next());
    let last: u64 = last.and_then(|number| number.parse().ok()).expect("a step");
    run.wait_for("stdout", &format!("step {:>4}", last + 3));
    let sent = Command::new("kill").args(["-TERM", &run.child.id().to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()));
    let ended = run.ended();
    assert_eq!(ended.code, Some(143), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("no evaluation after step").count(), 1, "{}", ended.stderr);
    assert!(matches!(ended.kept[..], [step] if step >= last + 3), "{:?}", ended.kept);
}

#[test]
fn a_trace_that_cannot_be_written_costs_no_checkpoint() {
    let scratch = Scratch::new();
    let command = command(&scratch, &["--steps", "2", "--trace", "/dev/full"]);
    let ended = Started::new(scratch, command).ended();
    assert!(ended.code.is_some_and(|code| code > 0) && ended.stderr.contains("/dev/full"), "{}", ended.stderr);
    assert_eq!(ended.kept, [2]);
}

#[test]
fn a_damaged_checkpoint_fails_its_verification_whether_that_is_read_or_not() {
    let scratch = Scratch::new();
    let folder = scratch.path("checkpoints");
    let manifest = folder.join("step-000001/manifest.json");
    std::fs::create_dir_all(manifest.parent().expect("a folder")).expect("a folder");
    std::fs::write(&manifest, "{}").expect("a file");
    for out in [Stdio::null(), unread()] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_altiplano"));
        command.arg("checkpoint").arg(&folder).stdout(out).stderr(Stdio::null());
        assert_eq!(command.status().expect("the binary starts").code(), Some(2));
    }
}

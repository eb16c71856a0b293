//! Several processes of one run, as a launcher starts them.

use super::Scratch;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// One of several processes, with files for its output.
pub struct Process {
    pub child: Child,
    name: PathBuf,
    pub start: Instant,
}

/// The exit of a process.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub seconds: f64,
}

impl Process {
    /// Starts rank `rank` of `size`, with torchrun's variables.
    pub fn start(scratch: &Scratch, place: (u32, u32), arguments: &[&str]) -> Process {
        Process::start_with(scratch, place, &[], arguments)
    }

    /// As [`Process::start`], with more variables.
    pub fn start_with(
        scratch: &Scratch,
        (rank, size): (u32, u32),
        variables: &[(&str, &str)],
        arguments: &[&str],
    ) -> Process {
        let name = (0..).map(|i| scratch.path(&format!("said-{rank}-{i}"))).find(|name| !name.exists());
        let name = name.expect("a name");
        let file = |name: PathBuf| std::fs::File::create(name).expect("a file in the scratch directory");
        let child = Command::new(env!("CARGO_BIN_EXE_altiplano"))
            .args(arguments)
            .envs(variables.iter().copied())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("ALTIPLANO_CUDA", scratch.path(""))
            .env("XDG_CACHE_HOME", scratch.path("cache"))
            .env("EMULATED_NCCL", scratch.path(""))
            .stdin(Stdio::null())
            .stdout(file(name.clone()))
            .stderr(file(name.with_extension("stderr")))
            .spawn()
            .expect("the binary starts");
        Process { child, name, start: Instant::now() }
    }

    pub fn stdout(&self) -> String {
        std::fs::read_to_string(&self.name).unwrap_or_default()
    }

    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill -{name}");
    }

    /// Waits until the output contains a text.
    pub fn wait_for(&mut self, said: &str) {
        while !self.stdout().contains(said) {
            assert!(self.start.elapsed() < Duration::from_secs(120), "never said {said}: {}", self.stdout());
            assert!(self.child.try_wait().expect("it can be waited for").is_none(), "ended: {}", self.stdout());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn end(mut self) -> Ended {
        while self.child.try_wait().expect("it can be waited for").is_none() {
            if self.start.elapsed() > Duration::from_secs(120) {
                self.signal("KILL");
                panic!("it hangs: {}", self.stdout());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let code = self.child.wait().expect("it can be waited for").code();
        let stderr = std::fs::read_to_string(self.name.with_extension("stderr")).unwrap_or_default();
        Ended { code, stdout: self.stdout(), stderr, seconds: self.start.elapsed().as_secs_f64() }
    }
}

/// Starts all processes of a run.
pub fn processes(scratch: &Scratch, count: u32, arguments: &[&str]) -> Vec<Process> {
    let directory = scratch.path("meeting").display().to_string();
    let all = [arguments, &["--rendezvous", &directory, "--lost-after", "2"]].concat();
    (0..count).map(|rank| Process::start(scratch, (rank, count), &all)).collect()
}

/// The losses in a file of metrics, those of evaluations too.
pub fn losses(metrics: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(metrics).expect("metrics");
    let loss = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        line.get("loss").or_else(|| line.get("eval_loss"))?.as_f64()
    };
    text.lines().map(|line| loss(line).expect("a loss")).collect()
}

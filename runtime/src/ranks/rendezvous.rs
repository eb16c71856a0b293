//! Rendezvous without MPI: processes that a launcher started on several hosts find each other through a shared
//! directory.
//!
//! The first process writes a file with its address; the others connect and identify themselves. A stale file has a
//! token that no listener knows, so it is ignored. A process that reaches the first process of another run gets an
//! error. Nothing else goes through the directory, since cluster file systems show files late.

use crate::error::{RendezvousError, RuntimeError, WatchError};
use crate::ranks::call::Call;
use crate::ranks::connect::{Hello, Hub, Listen, Network, host_name};
use crate::ranks::gather::{First, Member, Met, Other, Surroundings};
use crate::ranks::hub::HubLinks;
use crate::ranks::watch::{Ends, Peer, Watch};
use crate::ranks::world::World;
use std::io::{Error, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A process's place in the run, from the launcher's environment variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    pub size: usize,
    /// Identifies the run among others in the same directory, if the launcher provides it.
    pub run: Option<String>,
    /// A directory that all hosts usually share.
    pub shared: Option<PathBuf>,
    /// True if the launcher says that all processes are on this host.
    pub is_local: bool,
}

/// The most processes of a run. A larger number is a mistake, and would be allocated for.
const MOST_PROCESSES: usize = 1 << 16;

/// The directory of a rendezvous, and its time limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    pub directory: PathBuf,
    pub timeout: Duration,
    /// The network in which to listen [default: the loopback interface if all processes are on this host, else all].
    pub listen: Option<Network>,
}

/// A launcher's variables.
struct Launcher {
    rank: &'static str,
    size: &'static str,
    /// The number of processes on this host.
    local: &'static str,
    /// Those that identify a run.
    run: &'static [&'static str],
}

const LAUNCHERS: [Launcher; 4] = [
    // torchrun, and Kubernetes operators.
    Launcher {
        rank: "RANK",
        size: "WORLD_SIZE",
        local: "LOCAL_WORLD_SIZE",
        run: &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_SIZE",
        run: &["PMIX_NAMESPACE"],
    },
    // Hydra, which starts processes of MPICH and Intel MPI.
    Launcher { rank: "PMI_RANK", size: "PMI_SIZE", local: "MPI_LOCALNRANKS", run: &[] },
    // A step of srun. A batch script has the task count of its job, though it is one process. All tasks of a step that
    // has one node are on it, and their number is written without a factor `(x2)`.
    Launcher {
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local: "SLURM_STEP_TASKS_PER_NODE",
        run: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
    },
];

impl Place {
    /// Reads the variables of the first launcher that has set any; `None` if no launcher has.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Place>, RendezvousError> {
        for Launcher { rank, size, local, run: of_run } in LAUNCHERS {
            let (Some(of_rank), Some(of_size)) = (variable(rank), variable(size)) else { continue };
            let number = |name, value: &str| {
                let problem = "a number is expected";
                value.trim().parse().map_err(|_| RendezvousError::Variable { name, value: value.to_string(), problem })
            };
            let (number_of_rank, number_of_all) = (number(rank, &of_rank)?, number(size, &of_size)?);
            let is_local = variable(local).is_some_and(|local| local.trim().parse() == Ok(number_of_all));
            let at = Place { rank: number_of_rank, size: number_of_all, run: None, shared: None, is_local };
            if at.size > MOST_PROCESSES {
                let problem = "a run has at most 65536 processes";
                return Err(RendezvousError::Variable { name: size, value: of_size, problem });
            }
            if at.rank >= at.size {
                let problem = "ranks are numbered from 0 to one less than their count";
                return Err(RendezvousError::Variable { name: rank, value: of_rank, problem });
            }
            let run: Vec<String> = of_run.iter().filter_map(|name| variable(name)).collect();
            let run = Some(run.join("-")).filter(|run| !run.is_empty());
            let submitted = variable("SLURM_SUBMIT_DIR").filter(|_| rank == "SLURM_PROCID");
            let shared = submitted.map(|folder| Path::new(&folder).join(".altiplano-rendezvous"));
            return Ok(Some(Place { run, shared, ..at }));
        }
        Ok(None)
    }

    /// The file in which the first process of the run publishes its address.
    fn file(&self, directory: &Path) -> PathBuf {
        let allowed = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
        let run = self.run.iter().map(|run| format!("-{}", run.chars().map(allowed).collect::<String>()));
        directory.join(format!("rank-0{}", run.collect::<String>()))
    }
}

/// Polling interval.
const TURN: Duration = Duration::from_millis(20);

/// The shared directory, and connections over TCP. A request is answered before it returns.
struct OverTcp {
    file: PathBuf,
    /// Where the first process listens.
    hub: Option<Hub>,
    answer: Option<Result<TcpStream, WatchError>>,
}

impl Surroundings for OverTcp {
    type Stream = TcpStream;

    fn call(&mut self) -> Option<Call> {
        Call::read(&self.file)
    }

    fn publish(&mut self, call: &Call) -> Result<(), Error> {
        call.write(&self.file)
    }

    fn ask(&mut self, call: &Call, hello: &Hello) {
        let unblocked = |stream: TcpStream| match stream.set_nonblocking(true) {
            Ok(()) => Ok(stream),
            Err(error) => Err(WatchError::Listen(error)),
        };
        self.answer = Some(call.address.connect(hello).and_then(unblocked));
    }

    fn answer(&mut self) -> Option<Result<TcpStream, WatchError>> {
        self.answer.take()
    }

    fn greeted(&mut self) -> Result<Option<(Hello, TcpStream)>, Error> {
        let Some(hub) = &self.hub else { return Ok(None) };
        let next = hub.next()?;
        next.iter().try_for_each(|(_, stream)| stream.set_nonblocking(true))?;
        Ok(next)
    }
}

/// Waits until all processes of the run have found each other, then starts to watch them.
pub fn meet(place: &Place, rendezvous: &Rendezvous, lost_after: Duration, ends: Ends) -> Result<World, RuntimeError> {
    let Rendezvous { directory, timeout, listen } = rendezvous;
    let within = listen.map(Listen::Within);
    let listens = |is_local| within.unwrap_or(if is_local { Listen::Loopback } else { Listen::Everywhere });
    let &Place { rank, size, is_local, .. } = place;
    let (pid, host, directory) = (std::process::id(), host_name(), directory.clone());
    let file = place.file(&directory);
    let me = Member { rank, size, pid, host, directory, timeout: *timeout, start: Instant::now() };
    let Met { hosts, watch, words } = match rank {
        0 => gather(me, file, listens(is_local))?,
        _ => join(me, file).map_err(|error| RuntimeError::Rendezvous(Box::new(error)))?,
    };
    let first_on = |host: &String| hosts.iter().position(|other| other == host).unwrap_or(0);
    let nodes: Vec<usize> = hosts.iter().map(first_on).collect();
    let at = listens(nodes.iter().all(|&node| node == 0));
    let peers = hosts.iter().cloned().enumerate().map(|(rank, host)| Peer { rank, host }).collect();
    let watch_error = |error: WatchError| RuntimeError::Watch(Box::new(error));
    let hub_links = HubLinks::new(rank, size, words).map_err(|error| watch_error(WatchError::Listen(error)))?;
    let watch = Watch::start(rank, peers, watch, lost_after, ends).map_err(watch_error)?;
    World::new(Box::new(hub_links), watch, nodes, at)
}

/// Waits for all others as the first process, and tells them the outcome.
fn gather(me: Member, file: PathBuf, listen: Listen) -> Result<Met<TcpStream>, RuntimeError> {
    let hub = Hub::listen(listen).map_err(|error| RuntimeError::Watch(Box::new(error)))?;
    let call = Call { address: hub.address.clone(), pid: me.pid, host: me.host.clone() };
    let around = OverTcp { file: file.clone(), hub: Some(hub), answer: None };
    let mut first = First::new(me, around, call.clone());
    let done = loop {
        match first.turn(Instant::now()) {
            Ok(false) => std::thread::sleep(TURN),
            Ok(true) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    // Remove the file, so that no other process finds it. By now it may belong to another run.
    if Call::read(&file) == Some(call) {
        let _ = std::fs::remove_file(&file);
    }
    let (met, message) = first.end(done.is_ok());
    for mut stream in &met.words {
        // The watch notices a process that is gone now.
        let _ = stream.set_nonblocking(false).and_then(|()| stream.write_all(&message));
    }
    done.map(|()| met).map_err(|error| RuntimeError::Rendezvous(Box::new(error)))
}

/// Waits for the first process and the others.
fn join(me: Member, file: PathBuf) -> Result<Met<TcpStream>, RendezvousError> {
    let mut other = Other::new(me, OverTcp { file, hub: None, answer: None });
    loop {
        match other.turn(Instant::now())? {
            Some(met) => return Ok(met),
            None => std::thread::sleep(TURN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<Place>, RendezvousError> {
        Place::of(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn launchers_say_who_a_process_is() {
        let place = |rank, size, run: Option<&str>| {
            let run = run.map(String::from);
            Some(Place { rank, size, run, shared: None, is_local: false })
        };
        assert_eq!(of(&[("HOME", "/root")]).expect("nothing"), None);
        assert_eq!(of(&[("RANK", "2"), ("WORLD_SIZE", "4")]).expect("a place"), place(2, 4, None));
        // The variables of a job step's mpirun take precedence over those of Slurm, which started the process.
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_JOB_ID", "9")];
        let ompi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_NAMESPACE", "77")];
        assert_eq!(of(&[&slurm[..], &ompi].concat()).expect("a place"), place(1, 2, Some("77")));
        let step = [("SLURM_STEP_ID", "3"), ("SLURM_SUBMIT_DIR", "/home/u")];
        let found = of(&[&slurm[..], &step].concat()).expect("a place").expect("a place");
        assert_eq!((found.run.as_deref(), found.shared), (Some("9-3"), Some("/home/u/.altiplano-rendezvous".into())));
        // A batch script is no step.
        assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]).expect("nothing"), None);
        let local = |text| of(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", text)]);
        assert_eq!(
            ["2", "1"].map(|text| local(text).expect("a place").map(|place| place.is_local)),
            [Some(true), Some(false)]
        );
        let cases = [
            ("x", "2", "a number"),
            ("1", "-1", "a number"),
            ("2", "2", "numbered from 0"),
            ("0", "18446744073709551615", "at most 65536"),
        ];
        for (rank, size, problem) in cases {
            let error = of(&[("RANK", rank), ("WORLD_SIZE", size)]).expect_err("it is refused").to_string();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn names_of_runs_stay_in_the_directory() {
        let place = Place { rank: 1, size: 2, run: Some("../a b/7".to_string()), shared: None, is_local: false };
        assert_eq!(place.file(Path::new("d")), Path::new("d/rank-0-.._a_b_7"));
    }
}

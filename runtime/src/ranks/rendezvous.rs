//! Rendezvous without MPI: processes that a launcher started on several hosts find each other through a shared
//! directory.
//!
//! The first process writes a file with its address; the others connect and identify themselves. A stale file has a
//! token that no listener knows, so it is ignored. A process that reaches the first process of another run gets an
//! error. Nothing else goes through the directory, since cluster file systems show files late.

use crate::error::{RendezvousError, RuntimeError, WatchError};
use crate::files;
use crate::ranks::connect::{Address, Channel, Hello, Hub, Listen, Network, host_name};
use crate::ranks::hub::HubLinks;
use crate::ranks::watch::{Ends, Peer, Watch};
use crate::ranks::world::World;
use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
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

/// The content of the first process's file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Call {
    address: Address,
    pid: u32,
    host: String,
}

/// The first line of the file, with the version of the protocol on the connections.
const TITLE: &str = "altiplano rendezvous 2";

/// Limit on the length of the file.
const LONGEST_CALL: u64 = 1 << 16;

/// Polling interval.
const TURN: Duration = Duration::from_millis(20);
/// Extra time for the first process to report a timeout to all.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// The final message of the first process: all are there, with their hosts, or there is no run.
const GO: u8 = 1;
/// Bytes of a host's name and the end of its line.
const LONGEST_HOST: usize = 256;
const ENDED: u8 = 0;

impl Call {
    fn encode(&self) -> String {
        format!("{TITLE}\n{}\n{}\n{}\n", self.address.encode(), self.pid, self.host)
    }

    fn decode(text: &str) -> Option<Call> {
        let mut lines = text.lines();
        lines.next().filter(|&title| title == TITLE)?;
        let (address, pid) = (Address::decode(lines.next()?)?, lines.next()?.parse().ok()?);
        Some(Call { address, pid, host: lines.next()?.to_string() })
    }

    /// Reads the file, if it is there, complete, and this user's alone.
    fn read(file: &Path) -> Option<Call> {
        let open = files::open(file).ok()?;
        // Other writers could name another hub, and other readers could join.
        let found = open.metadata().ok()?;
        if found.uid() != nix::unistd::geteuid().as_raw() || found.mode() & 0o077 != 0 {
            return None;
        }
        let mut text = String::new();
        open.take(LONGEST_CALL).read_to_string(&mut text).ok()?;
        Call::decode(&text)
    }

    /// Writes the file atomically: a reader sees the old file or the complete new one. Only this user can read it, and
    /// enter folders that are created for it.
    fn write(&self, file: &Path) -> std::io::Result<()> {
        let folder = file.parent().unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut beside = tempfile::Builder::new().prefix(".rank-0.").tempfile_in(folder)?;
        beside.write_all(self.encode().as_bytes())?;
        beside.as_file().sync_all()?;
        beside.persist(file).map(drop).map_err(|error| error.error)
    }
}

/// One process during the rendezvous.
struct Meeting<'a> {
    place: &'a Place,
    directory: &'a Path,
    timeout: Duration,
    start: Instant,
    host: String,
    listen: Listen,
}

/// The hosts by rank, and this process's connections for the watch and for words.
struct Met {
    hosts: Vec<String>,
    watch: Vec<(usize, TcpStream)>,
    words: Vec<TcpStream>,
}

/// Waits until all processes of the run have found each other, then starts to watch them.
pub fn meet(place: &Place, rendezvous: &Rendezvous, lost_after: Duration, ends: Ends) -> Result<World, RuntimeError> {
    let Rendezvous { directory, timeout, listen } = rendezvous;
    let within = listen.map(Listen::Within);
    let listens = |is_local| within.unwrap_or(if is_local { Listen::Loopback } else { Listen::Everywhere });
    let (start, host, listen) = (Instant::now(), host_name(), listens(place.is_local));
    let meeting = Meeting { place, directory, timeout: *timeout, start, host, listen };
    let failed = |error| RuntimeError::Rendezvous(Box::new(error));
    let Met { hosts, watch, words } = match place.rank {
        0 => meeting.as_first()?,
        _ => meeting.as_other().map_err(failed)?,
    };
    let first_on = |host: &String| hosts.iter().position(|other| other == host).unwrap_or(0);
    let nodes: Vec<usize> = hosts.iter().map(first_on).collect();
    let at = listens(nodes.iter().all(|&node| node == 0));
    let peers = hosts.iter().cloned().enumerate().map(|(rank, host)| Peer { rank, host }).collect();
    let watch_error = |error: WatchError| RuntimeError::Watch(Box::new(error));
    let hub_links =
        HubLinks::new(place.rank, place.size, words).map_err(|error| watch_error(WatchError::Listen(error)))?;
    let watch = Watch::start(place.rank, peers, watch, lost_after, ends).map_err(watch_error)?;
    World::new(Box::new(hub_links), watch, nodes, at)
}

impl Meeting<'_> {
    fn hello(&self, channel: Channel) -> Hello {
        let Place { rank, size, .. } = *self.place;
        Hello { channel, rank, size, pid: std::process::id(), host: self.host.clone() }
    }

    fn is_over(&self) -> bool {
        self.start.elapsed() > self.timeout
    }

    fn as_first(&self) -> Result<Met, RuntimeError> {
        let failed = |error| RuntimeError::Rendezvous(Box::new(error));
        let file = self.place.file(self.directory);
        if let Some(Call { address, pid, host }) = Call::read(&file)
            && address.connect(&self.hello(Channel::Probe)).is_ok()
        {
            return Err(failed(RendezvousError::Taken { directory: self.directory.to_path_buf(), pid, host }));
        }
        let hub = Hub::listen(self.listen).map_err(|error| RuntimeError::Watch(Box::new(error)))?;
        let call = Call { address: hub.address.clone(), pid: std::process::id(), host: self.host.clone() };
        call.write(&file).map_err(|error| {
            let (host, directory) = (self.host.clone(), self.directory.to_path_buf());
            failed(RendezvousError::Write { rank: 0, host, directory, error })
        })?;
        let mut come = BTreeMap::new();
        let done = self.wait_for_all(&hub, &call, &file, &mut come);
        // Remove the file, so that no other process finds it. By now it may belong to another run.
        if Call::read(&file).as_ref() == Some(&call) {
            let _ = std::fs::remove_file(&file);
        }
        let mut hosts = vec![self.host.clone(); self.place.size];
        for ((rank, _), (hello, _)) in &come {
            hosts[*rank].clone_from(&hello.host);
        }
        let (mut watch, mut words) = (Vec::new(), Vec::new());
        for ((rank, channel), (_, stream)) in come {
            match channel {
                Channel::Words => words.push(stream),
                _ => watch.push((rank, stream)),
            }
        }
        let said = if done.is_ok() { verdict(GO, &hosts.join("\n")) } else { verdict(ENDED, "") };
        let told = words.iter().try_for_each(|mut stream| {
            stream.set_nonblocking(false)?;
            stream.write_all(&said)
        });
        done.map_err(failed)?;
        // The watch notices a process that is gone now.
        drop(told);
        Ok(Met { hosts, watch, words })
    }

    /// Accepts connections until all ranks have both of theirs.
    fn wait_for_all(
        &self,
        hub: &Hub,
        call: &Call,
        file: &Path,
        come: &mut BTreeMap<(usize, Channel), (Hello, TcpStream)>,
    ) -> Result<(), RendezvousError> {
        let size = self.place.size;
        let directory = || self.directory.to_path_buf();
        while come.len() < 2 * (size - 1) {
            let next = hub.next().map_err(|error| RendezvousError::Listen { host: self.host.clone(), error })?;
            if let Some((hello, stream)) = next {
                let Hello { channel, rank, size: found, .. } = hello;
                if channel == Channel::Probe {
                    continue;
                }
                // Tell a refused process that there is no run.
                let refused = || (&stream).write_all(&verdict(ENDED, ""));
                if found != size || rank >= size {
                    let _ = refused();
                    let host = hello.host;
                    return Err(RendezvousError::Size { rank, host, found, size, directory: directory() });
                }
                let earlier = match (rank, come.get(&(rank, channel))) {
                    (0, _) => Some((call.pid, call.host.clone())),
                    (_, earlier) => earlier.map(|(earlier, _)| (earlier.pid, earlier.host.clone())),
                };
                let second = (hello.pid, hello.host.clone());
                // A process that did not receive the answer in time connects again.
                if let Some(first) = earlier.filter(|first| *first != second) {
                    let _ = refused();
                    return Err(RendezvousError::Twice { rank, directory: directory(), first, second });
                }
                come.insert((rank, channel), (hello, stream));
                continue;
            }
            // No process sends anything at this stage, so data means a closed connection.
            if let Some((hello, _)) = come.values().find(|(_, stream)| is_heard(stream)) {
                let (rank, host) = (hello.rank, hello.host.clone());
                return Err(RendezvousError::Gone { rank, host, size, directory: directory() });
            }
            match Call::read(file) {
                Some(other) if other != *call => {
                    let Call { pid, host, .. } = other;
                    return Err(RendezvousError::Taken { directory: directory(), pid, host });
                }
                _ => {}
            }
            if self.is_over() {
                let is_whole = |rank| [Channel::Watch, Channel::Words].iter().all(|&c| come.contains_key(&(rank, c)));
                let missing = (1..size).filter(|&rank| !is_whole(rank)).collect();
                let seconds = self.timeout.as_secs();
                return Err(RendezvousError::Missing { missing, size, directory: directory(), seconds });
            }
            std::thread::sleep(TURN);
        }
        Ok(())
    }

    fn as_other(&self) -> Result<Met, RendezvousError> {
        let file = self.place.file(self.directory);
        let mut found: Option<(Call, WatchError)> = None;
        loop {
            if let Some(call) = Call::read(&file) {
                match call.address.connect(&self.hello(Channel::Words)) {
                    Ok(words) => {
                        let watch = self.second_connection(&call, &words);
                        return self.wait_for_first(call, watch, words);
                    }
                    // The file may be stale until this run's first process has written its own.
                    Err(error) => found = Some((call, error)),
                }
            }
            if self.is_over() {
                let (rank, host, directory) = (self.place.rank, self.host.clone(), self.directory.to_path_buf());
                let seconds = self.timeout.as_secs();
                return Err(match found {
                    None => RendezvousError::NoFirst { rank, host, directory, seconds },
                    Some((call, error)) => self.unreachable(call, error),
                });
            }
            std::thread::sleep(TURN);
        }
    }

    /// Opens the connection for the watch, unless the first process has announced on the other that there is no run.
    fn second_connection(&self, call: &Call, words: &TcpStream) -> Result<TcpStream, WatchError> {
        loop {
            match call.address.connect(&self.hello(Channel::Watch)) {
                Err(WatchError::Join { .. }) if !self.is_over() && !is_heard(words) => std::thread::sleep(TURN),
                done => return done,
            }
        }
    }

    fn unreachable(&self, call: Call, error: WatchError) -> RendezvousError {
        RendezvousError::Unreachable {
            rank: self.place.rank,
            host: self.host.clone(),
            directory: self.directory.to_path_buf(),
            seconds: self.start.elapsed().as_secs(),
            first_host: call.host,
            first_pid: call.pid,
            error: Box::new(error),
        }
    }

    /// Waits for the other processes after the first process has accepted this one.
    fn wait_for_first(
        &self,
        call: Call,
        watch: Result<TcpStream, WatchError>,
        mut words: TcpStream,
    ) -> Result<Met, RendezvousError> {
        let longest = self.place.size.saturating_mul(LONGEST_HOST);
        let limit = words.set_read_timeout(Some(self.timeout.saturating_add(LAST_WORDS)));
        let heard = limit.and_then(|()| heard(&mut words, longest));
        match heard {
            Ok((GO, text)) => {
                let hosts: Vec<String> = text.split('\n').map(String::from).collect();
                match watch {
                    Ok(watch) if hosts.len() == self.place.size => {
                        Ok(Met { hosts, watch: vec![(0, watch)], words: vec![words] })
                    }
                    Ok(_) => Err(self.unreachable(call, WatchError::NoAddress)),
                    Err(error) => Err(self.unreachable(call, error)),
                }
            }
            Ok(_) => Err(RendezvousError::Ended),
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
                let host = call.address.hosts.first().copied().unwrap_or([0, 0, 0, 0].into());
                Err(self.unreachable(call, WatchError::Join { host, error: ErrorKind::TimedOut.into() }))
            }
            Err(_) => {
                let (size, directory) = (self.place.size, self.directory.to_path_buf());
                Err(RendezvousError::Gone { rank: 0, host: call.host, size, directory })
            }
        }
    }
}

/// Encodes the final message of the first process, with its length.
fn verdict(kind: u8, text: &str) -> Vec<u8> {
    [&[kind][..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

/// Reads such a message with a text of at most `longest` bytes.
fn heard(from: &mut TcpStream, longest: usize) -> Result<(u8, String), Error> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if length > longest {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length];
    from.read_exact(&mut text)?;
    Ok((head[0], String::from_utf8_lossy(&text).into_owned()))
}

/// Returns whether there is something to read, be it only the end of the connection.
fn is_heard(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let back = stream.set_nonblocking(false);
    match looked.and(back) {
        Ok(()) => true,
        Err(error) => ![ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

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

    #[test]
    fn calls_are_read_as_they_were_written() {
        let address = Address { hosts: vec!["10.0.0.7".parse().expect("an address")], port: 4, token: [9; 16] };
        let call = Call { address, pid: 17, host: "node-b".to_string() };
        assert_eq!(Call::decode(&call.encode()), Some(call.clone()));
        for cut in ["altiplano rendezvous 1", "", "altiplano rendezvous 2\n"] {
            assert_eq!(Call::decode(cut), None);
        }
        let folder = std::env::temp_dir().join(format!("altiplano-call-{}", std::process::id()));
        let file = folder.join("deeper/rank-0");
        call.write(&file).expect("it is written");
        assert_eq!(Call::read(&file), Some(call));
        // Nobody else may know the token, and a file of which others could know it is not believed.
        let mode = |path: &Path| std::fs::metadata(path).expect("it is there").mode() & 0o777;
        assert_eq!([mode(&file), mode(&folder), mode(&folder.join("deeper"))], [0o600, 0o700, 0o700]);
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).expect("it is ours");
        assert_eq!(Call::read(&file), None);
        assert_eq!(std::fs::read_dir(folder.join("deeper")).expect("a folder").count(), 1);
        std::fs::remove_dir_all(folder).expect("it goes");
    }
}

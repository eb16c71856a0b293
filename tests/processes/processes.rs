//! GPUs of several processes without MPI. Processes started by a launcher find each other through a directory, or
//! report in one line why not. They train like the threads of one process, bit by bit, each on its part of the data,
//! and end together. The GPUs are emulated and communicate through files.

use crate::common::processes::{Ended, Process, losses, processes};
use crate::common::{Scratch, emulator, succeeds};
use altiplano::load_plan;
use altiplano::planner::programs;
use altiplano::runtime::layout::mark_rows;
use altiplano::training::{Batches, DataOptions};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 13, "n_positions": 4, "n_embd": 8, "n_layer": 2, "n_head": 2}"#;

fn plan(scratch: &Scratch, cluster: &str, degrees: &[&str]) -> String {
    let model = scratch.file("gpt2.json", GPT2);
    let name = scratch.path(&format!("plan-{cluster}-{}.json", degrees.concat()).replace('/', "-"));
    let file = name.display().to_string();
    let fixed = ["plan", &model, "--seq", "4", "--global-batch", "8", "--cluster", cluster, "-o", &file];
    succeeds(&[&fixed, degrees].concat());
    file
}

/// Starts a process that only looks for the others: its plan does not exist.
fn looks(scratch: &Scratch, place: (u32, u32), directory: &str, timeout: &str) -> Process {
    let options = ["--rendezvous", directory, "--rendezvous-timeout", timeout];
    let fixed = ["run", "no-such-plan.json", "--device", "cuda", "--engine", "processes"];
    Process::start(scratch, place, &[&fixed[..], &options].concat())
}

fn refused(ended: &Ended, parts: &[&str]) {
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    parts.iter().for_each(|part| assert!(ended.stderr.contains(part), "'{part}': {ended:?}"));
}

/// Waits until the first process has published its address in the directory.
fn wait_for_call(directory: &Path) {
    let start = Instant::now();
    while !directory.join("rank-0").exists() {
        assert!(start.elapsed() < Duration::from_secs(30), "no call");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// On one machine nobody else can connect, whatever the addresses of that machine are.
#[test]
fn the_first_process_listens_where_it_is_told() {
    let scratch = Scratch::new();
    let cases = [
        ("one-machine", &[("LOCAL_WORLD_SIZE", "2")][..], &[][..]),
        ("loopback", &[], &["--listen", "127.0.0.0/8"]),
        ("several", &[("LOCAL_WORLD_SIZE", "1")], &[]),
    ];
    for (name, variables, listen) in cases {
        let directory = scratch.path(name);
        let text = directory.display().to_string();
        let fixed = ["run", "no-such-plan.json", "--device", "cuda", "--engine", "processes", "--rendezvous", &text];
        let mut first = Process::start_with(&scratch, (0, 2), variables, &[&fixed, listen].concat());
        wait_for_call(&directory);
        let call = std::fs::read_to_string(directory.join("rank-0")).expect("a call");
        // Its second line has a token, a port and the hosts.
        let hosts: Vec<&str> = call.lines().nth(1).expect("an address").split_whitespace().skip(2).collect();
        assert_eq!(hosts == ["127.0.0.1"], name != "several", "{name}: {hosts:?}");
        first.child.kill().and_then(|()| first.child.wait()).expect("it ends");
    }
    let directory = scratch.path("nowhere").display().to_string();
    let options = ["--device", "cuda", "--engine", "processes", "--rendezvous", &directory, "--listen", "0.0.0.1"];
    let nowhere = Process::start(&scratch, (0, 2), &[&["run", "no-such-plan.json"][..], &options].concat());
    refused(&nowhere.end(), &["0.0.0.1"]);
}

#[test]
fn who_does_not_come_is_named_to_the_user_once() {
    let scratch = Scratch::new();
    let directory = scratch.path("meeting").display().to_string();
    // The last of three never arrives; the second arrives before the first.
    let second = looks(&scratch, (1, 3), &directory, "30");
    std::thread::sleep(Duration::from_millis(300));
    let first = looks(&scratch, (0, 3), &directory, "2");
    let (first, second) = (first.end(), second.end());
    refused(&first, &["rank 2 (of 3 processes) did not arrive at", &directory, "within 2 s", "--rendezvous-timeout"]);
    assert!(first.seconds < 20.0, "{first:?}");
    // The first process reports it for all.
    assert_eq!((second.code, second.stderr.as_str()), (Some(2), ""), "{second:?}");
    assert_eq!(std::fs::read_dir(&directory).expect("a folder").count(), 0, "nothing is left");
    // Without the first, none reports for the others.
    refused(
        &looks(&scratch, (1, 2), &directory, "1").end(),
        &["rank 1 on ", "no address of rank 0", &directory, "1 s"],
    );
}

#[test]
fn what_an_earlier_run_left_is_passed_over() {
    let scratch = Scratch::new();
    let directory = scratch.path("meeting");
    let name = directory.display().to_string();
    // The first process of an earlier run was killed and left its file.
    let mut killed = looks(&scratch, (0, 2), &name, "60");
    wait_for_call(&directory);
    killed.signal("KILL");
    killed.child.wait().expect("it can be waited for");
    assert!(directory.join("rank-0").exists());
    let alone = looks(&scratch, (1, 2), &name, "1").end();
    refused(&alone, &["rank 1 on ", "could not reach rank 0", &name, "an earlier run"]);
    // A process that arrives early waits for this run's first.
    let second = looks(&scratch, (1, 2), &name, "60");
    std::thread::sleep(Duration::from_millis(300));
    let first = looks(&scratch, (0, 2), &name, "60");
    for (rank, process) in [(0, first), (1, second)] {
        // They have met, and one of them, the first, reports that the plan is missing.
        let ended = process.end();
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(rank == 1 || ended.stderr.contains("no-such-plan.json"), "{ended:?}");
    }
}

#[test]
fn two_runs_in_one_directory_are_told_apart() {
    let scratch = Scratch::new();
    let directory = scratch.path("meeting");
    let name = directory.display().to_string();
    let first = looks(&scratch, (0, 3), &name, "60");
    wait_for_call(&directory);
    let pid = format!("process {}", first.child.id());
    refused(
        &looks(&scratch, (0, 3), &name, "60").end(),
        &["is the rendezvous of another run", &pid, "its own directory"],
    );
    // The run keeps waiting, and the processes of the other run get the error.
    let second = looks(&scratch, (1, 3), &name, "60");
    while std::fs::read_dir(&directory).is_ok() && second.start.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let of_other = looks(&scratch, (1, 3), &name, "60");
    let pids = [format!("process {}", second.child.id()), format!("process {}", of_other.child.id())];
    refused(&first.end(), &["claim rank 1", &pids[0], &pids[1], "its own rendezvous directory"]);
    assert_eq!(second.end().code, Some(2));
    assert_eq!(of_other.end().code, Some(2));
}

#[test]
fn processes_that_do_not_fit_are_named() {
    let scratch = Scratch::new();
    let directory = scratch.path("meeting");
    let name = directory.display().to_string();
    let first = looks(&scratch, (0, 2), &name, "60");
    wait_for_call(&directory);
    let of_four = looks(&scratch, (3, 4), &name, "60");
    refused(&first.end(), &["rank 3 on ", "was started as one of 4, rank 0 as one of 2"]);
    assert_eq!(of_four.end().code, Some(2), "the first has said why");
    refused(&looks(&scratch, (2, 2), &name, "1").end(), &["RANK is '2'", "numbered from 0"]);
    // A path that cannot be a directory.
    let file = scratch.file("a-file", "");
    refused(&looks(&scratch, (0, 2), &file, "1").end(), &["rank 0 on ", "cannot write", &file, "--rendezvous"]);
    // A process that joined and was killed while it waited.
    let first = looks(&scratch, (0, 3), &name, "60");
    wait_for_call(&directory);
    let second = looks(&scratch, (1, 3), &name, "60");
    std::thread::sleep(Duration::from_millis(500));
    second.signal("KILL");
    refused(&first.end(), &["rank 1 on ", "ended before all 3 processes had arrived", &name]);
    second.end();
    // The first process is killed, so none reports for the others.
    let first = looks(&scratch, (0, 3), &name, "60");
    wait_for_call(&directory);
    let second = looks(&scratch, (1, 3), &name, "60");
    std::thread::sleep(Duration::from_millis(500));
    first.signal("KILL");
    refused(&second.end(), &["rank 0 on ", "ended before all 3 processes had arrived", &name]);
    first.end();
    // Options without an effect.
    let started = |arguments: &[&str]| {
        let bare = Command::new(env!("CARGO_BIN_EXE_altiplano")).args(["run", "p.json"]).args(arguments).output();
        String::from_utf8_lossy(&bare.expect("the binary starts").stderr).into_owned()
    };
    assert!(started(&["--device", "cuda", "--engine", "processes"]).contains("srun, mpirun or torchrun"));
    assert!(started(&["--engine", "processes"]).contains("needs --device cuda or xla"));
    assert!(started(&["--rendezvous", "d"]).contains("--rendezvous"));
    let no_directory = Process::start(&scratch, (1, 2), &["run", "p.json", "--device", "cuda"]).end();
    refused(&no_directory, &["rank 1 of 2 cannot find the others", "--rendezvous DIR"]);
}

/// The files of the newest checkpoint.
fn checkpoint(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut steps: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("checkpoints").flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    steps.sort();
    let files = std::fs::read_dir(steps.last().expect("a checkpoint")).expect("its files").flatten();
    let file = |e: std::fs::DirEntry| {
        (e.file_name().to_string_lossy().into_owned(), std::fs::read(e.path()).expect("a readable file"))
    };
    let mut files: Vec<_> = files.map(file).collect();
    files.sort();
    files
}

/// Token ids in the format of a data file.
fn ids(count: u32) -> Vec<u8> {
    (0..count).flat_map(|i| ((i * i + 3 * i) % 13).to_le_bytes()[..2].to_vec()).collect()
}

/// A device reads only the rows of a batch that its program uses.
#[test]
fn each_device_reads_its_own_part_of_the_data() {
    let scratch = Scratch::new();
    let file = PathBuf::from(scratch.file("ids.u16", ids(23 * 4 + 1)));
    let data = DataOptions { file: Some(file), token_type: None, shuffle: Some(3) };
    // For each plan, how often each row is read of the input that is split most.
    let cases: [(&str, &[&str], usize); 4] = [
        ("local:4", &["--dp", "4", "--tp", "1", "--pp", "1", "--zero", "3"], 1),
        ("local:4", &["--dp", "4", "--tp", "1", "--pp", "1", "--num-microbatches", "2"], 1),
        ("local:4", &["--dp", "2", "--tp", "2", "--pp", "1"], 2),
        ("local:4", &["--dp", "2", "--tp", "1", "--pp", "2", "--num-microbatches", "2"], 1),
    ];
    for (cluster, degrees, times) in cases {
        let plan = load_plan(Path::new(&plan(&scratch, cluster, degrees))).expect("a plan");
        let programs = programs(&plan).expect("programs");
        let new = || Batches::with_state(&plan, &data, 0, &BTreeMap::new()).expect("batches");
        let mut all = new();
        let whole: Vec<_> = (0..3).map(|_| all.take().expect("a batch")).collect();
        // By input, the number of devices that read each row of a batch.
        let mut readers: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for program in &programs.programs {
            for position in 0..program.devices.len() as u32 {
                let marked = |input: &str, dim: usize, rows: usize| {
                    let mut read = vec![false; rows];
                    mark_rows(program, position, input, dim, &mut read);
                    Some(read)
                };
                let mut own = new();
                own.read_only(marked);
                let mut bytes = 0;
                for (number, batch) in whole.iter().enumerate() {
                    for (name, part) in own.take().expect("a batch") {
                        let rows = part.ty.shape[0] as usize;
                        let marked = marked(&name, 0, rows).expect("rows");
                        let each = part.ty.elements() as usize / rows;
                        let kept = |(i, x): (usize, f64)| if marked[i / each] { x } else { 0.0 };
                        let expected: Vec<f64> = batch[&name].to_f64().into_iter().enumerate().map(kept).collect();
                        assert_eq!(part.to_f64(), expected, "{degrees:?}, '{name}' at {position}");
                        // Ids have two bytes.
                        bytes += 2 * each as u64 * marked.iter().filter(|&&marked| marked).count() as u64;
                        let readers = readers.entry(name).or_insert_with(|| vec![0; rows]);
                        let count = |(readers, marked): (&mut usize, bool)| *readers += usize::from(marked);
                        readers.iter_mut().zip(marked).filter(|_| number == 0).for_each(count);
                    }
                }
                assert_eq!(own.bytes_read(), bytes, "{degrees:?}, device {position}");
                assert!(bytes < all.bytes_read(), "{degrees:?}: device {position} reads all");
            }
        }
        assert_eq!(readers.len(), 2, "{degrees:?}: {readers:?}");
        assert!(readers.values().flatten().all(|&readers| readers > 0), "{degrees:?}: {readers:?}");
        assert!(readers.values().any(|rows| rows.iter().all(|&count| count == times)), "{degrees:?}: {readers:?}");
    }
}

#[test]
fn processes_train_as_threads_of_one_do() {
    let scratch = Scratch::new();
    if emulator(&scratch, 4).is_none() {
        return;
    }
    let data = scratch.file("ids.u16", ids(23 * 4 + 1));
    // One GPU per process, of those that each sees on the host; stages in separate processes; two GPUs per process.
    let cases: [(&str, &[&str], u32); 3] = [
        ("local:2", &["--dp", "2", "--tp", "1", "--pp", "1", "--zero", "3"], 2),
        ("local:2", &["--dp", "1", "--tp", "1", "--pp", "2", "--num-microbatches", "4"], 2),
        ("local:4", &["--dp", "2", "--tp", "2", "--pp", "1", "--clip-norm", "0.5"], 2),
    ];
    for (at, (cluster, degrees, count)) in cases.into_iter().enumerate() {
        let plan = plan(&scratch, cluster, degrees);
        let file = |name: &str| scratch.path(&format!("{name}-{at}")).display().to_string();
        let run = |name: &str, steps: &'static str| -> Vec<String> {
            let (metrics, folder) = (file(&format!("metrics-{name}")), file(&format!("checkpoints-{name}")));
            let all = ["run", &plan, "--device", "cuda", "--steps", steps, "--lr", "0.01"];
            let more = ["--metrics", &metrics, "--checkpoint", &folder, "--checkpoint-every", "2", "--resume"];
            let more = [&more[..], &["--data", &data, "--shuffle"]].concat();
            all.iter().chain(&more).map(|s| s.to_string()).collect()
        };
        let borrowed = |all: &[String]| all.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
        let start = |name: &str, steps, alone: bool| {
            let all = borrowed(&run(name, steps));
            let arguments: Vec<&str> = all.split('\n').collect();
            let started = match alone {
                // Threads ignore launchers.
                true => {
                    vec![Process::start(&scratch, (0, 1), &[&arguments[..], &["--engine", "threads"]].concat())]
                }
                false => processes(&scratch, count, &arguments),
            };
            for (rank, process) in started.into_iter().enumerate() {
                let ended = process.end();
                assert_eq!(ended.code, Some(0), "{cluster} {degrees:?}, {name}: {ended:?}");
                assert_eq!(rank == 0, ended.stdout.contains("step"), "the first speaks for all: {ended:?}");
            }
        };
        start("threads", "4", true);
        start("processes", "3", false);
        start("processes", "4", false);
        let (threads, found) = (losses(file("metrics-threads").as_ref()), losses(file("metrics-processes").as_ref()));
        assert_eq!((threads.len(), &threads), (4, &found), "{cluster} {degrees:?}");
        let of = |name: &str| checkpoint(file(&format!("checkpoints-{name}")).as_ref());
        let (threads, found) = (of("threads"), of("processes"));
        assert!(threads.iter().any(|(name, _)| name.ends_with(".safetensors")));
        assert_eq!(threads, found, "{cluster} {degrees:?}");
    }
}

/// The addresses and ports at which a process listens, in hexadecimal, as Linux lists them.
fn listens_at(process: &Process) -> Vec<String> {
    let folder = PathBuf::from(format!("/proc/{}", process.child.id()));
    let files = std::fs::read_dir(folder.join("fd")).expect("its open files").flatten();
    let sockets: Vec<PathBuf> = files.filter_map(|file| std::fs::read_link(file.path()).ok()).collect();
    let tables = ["net/tcp", "net/tcp6"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap_or_default());
    let listening = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let socket = PathBuf::from(format!("socket:[{}]", fields.get(9)?));
        (fields[3] == "0A" && sockets.contains(&socket)).then(|| fields[1].to_string())
    };
    tables.iter().flat_map(|table| table.lines()).filter_map(listening).collect()
}

/// On one machine neither the first process nor those that would take its place can be reached from elsewhere.
#[test]
fn all_processes_of_one_machine_listen_on_its_loopback() {
    let scratch = Scratch::new();
    if emulator(&scratch, 1).is_none() {
        return;
    }
    let plan = plan(&scratch, "local:2", &["--dp", "2", "--tp", "1", "--pp", "1"]);
    let mut all = processes(&scratch, 2, &["run", &plan, "--device", "cuda", "--steps", "100000"]);
    all[0].wait_for("step    2");
    for (rank, process) in all.iter().enumerate() {
        let addresses = listens_at(process);
        // 127.0.0.1, its lowest byte first.
        let are_local = addresses.iter().all(|address| address.starts_with("0100007F:"));
        assert!(!addresses.is_empty() && are_local, "rank {rank}: {addresses:?}");
    }
    for process in all {
        process.signal("KILL");
        process.end();
    }
}

#[test]
fn who_is_lost_or_told_to_end_ends_all() {
    let scratch = Scratch::new();
    if emulator(&scratch, 1).is_none() {
        return;
    }
    let plan = plan(&scratch, "local:2", &["--dp", "2", "--tp", "1", "--pp", "1"]);
    let checkpoints = scratch.path("checkpoints").display().to_string();
    let run = ["run", &plan, "--device", "cuda", "--steps", "100000", "--checkpoint", &checkpoints];
    let started = || {
        let mut all = processes(&scratch, 2, &run);
        all[0].wait_for("step   20");
        (all.remove(0), all.remove(0))
    };
    let (first, second) = started();
    second.signal("KILL");
    let ended = first.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("rank 1 on ") && ended.stderr.contains(" is gone; it was last "), "{ended:?}");
    assert!(ended.stderr.contains(" step "), "{ended:?}");
    second.end();
    // A stopped process is detected by its silence.
    let (first, second) = started();
    second.signal("STOP");
    let ended = first.end();
    second.signal("CONT");
    assert_eq!((ended.code, second.end().code), (Some(1), Some(1)), "{ended:?}");
    let parts = ["rank 1 on ", "has been silent for 2 s", "rank 0 on ", " waits in ", " among devices 0, 1"];
    parts.iter().for_each(|part| assert!(ended.stderr.contains(part), "'{part}': {ended:?}"));
    // A process that receives a signal ends all others, after a checkpoint.
    let (first, second) = started();
    second.signal("TERM");
    let (first, second) = (first.end(), second.end());
    assert_eq!((first.code, second.code), (Some(143), Some(143)), "{first:?} {second:?}");
    assert!(first.stdout.contains("checkpoint of step"), "{first:?}");
    // Processes with different plans fail before anything runs.
    let other = plan.replace(".json", "-other.json");
    let text = std::fs::read_to_string(&plan).expect("a plan").replacen("gpt2", "gpt3", 1);
    std::fs::write(&other, text).expect("a plan");
    let directory = scratch.path("meeting").display().to_string();
    let as_rank = |rank, plan: &str| {
        let all = ["run", plan, "--device", "cuda", "--rendezvous", &directory];
        Process::start(&scratch, (rank, 2), &all)
    };
    let both = [as_rank(0, &plan), as_rank(1, &other)].map(Process::end);
    assert_eq!(both.each_ref().map(|ended| ended.code), [Some(2), Some(2)], "{both:?}");
    assert!(both[0].stderr.contains("rank 1 has another plan than rank 0"), "{both:?}");
}

/// The remaining processes must end by themselves, since nothing else ends them.
#[test]
fn one_of_the_others_says_that_the_first_is_lost() {
    let scratch = Scratch::new();
    if emulator(&scratch, 1).is_none() {
        return;
    }
    let plan = plan(&scratch, "local:4", &["--dp", "4", "--tp", "1", "--pp", "1"]);
    for (signal, how) in [("KILL", "is gone"), ("STOP", "has been silent for 2 s")] {
        let mut all = processes(&scratch, 4, &["run", &plan, "--device", "cuda", "--steps", "100000"]);
        all[0].wait_for("step   20");
        all[0].signal(signal);
        let first = all.remove(0);
        let others: Vec<Ended> = all.into_iter().map(Process::end).collect();
        first.signal("KILL");
        first.end();
        assert!(others.iter().all(|ended| ended.code == Some(1)), "{others:?}");
        let errors: Vec<&str> = others.iter().flat_map(|ended| ended.stderr.lines()).collect();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(errors[0].starts_with("error: rank 0 on ") && errors[0].contains(how), "{errors:?}");
        assert!(others[0].stderr.contains(errors[0]), "{others:?}");
    }
}

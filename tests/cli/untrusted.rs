//! Files that nobody vouches for: each is answered in seconds and within the memory that its size explains, or refused
//! with one error.

use crate::common::{DEMO, Output, Scratch, altiplano, shared, succeeds};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Expects exit code 2, one error with all of `expect`, and both soon.
fn refused(arguments: &[&str], expect: &[&str]) {
    let start = Instant::now();
    let Output { code, stderr, .. } = altiplano(arguments);
    assert_eq!(code, Some(2), "{arguments:?}\n{stderr}");
    assert_eq!(stderr.matches("error: ").count(), 1, "{arguments:?}\n{stderr}");
    expect.iter().for_each(|part| assert!(stderr.contains(part), "{arguments:?} should say '{part}': {stderr}"));
    assert!(start.elapsed() < Duration::from_secs(20), "{arguments:?} took {:?}", start.elapsed());
}

/// A plan of two stages with this many microbatches of two samples.
fn plan_of(scratch: &Scratch, microbatches: u64) -> String {
    let whole = scratch.path("whole.json").display().to_string();
    if !Path::new(&whole).exists() {
        let degrees = ["--dp", "1", "--tp", "1", "--pp", "2", "--global-batch", "8", "--microbatch", "2"];
        succeeds(&[&["plan", DEMO, "--cluster", "local:2", "-o", &whole][..], &degrees].concat());
    }
    let text = std::fs::read_to_string(&whole).expect("a plan");
    let mut plan: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(plan["microbatch"], 2);
    plan["num_microbatches"] = microbatches.into();
    plan["global_batch"] = (2 * microbatches).into();
    // With a profile, predictions are not made again.
    plan["profile"] = "whatever a stranger says".into();
    scratch.file(&format!("plan-{microbatches}.json"), plan.to_string())
}

#[test]
fn plans_with_a_million_microbatches_are_refused_with_the_limit() {
    let scratch = Scratch::new();
    let html = scratch.path("page.html").display().to_string();
    let mut plans: Vec<String> = [1_000_000, u64::from(u32::MAX)].map(|n| plan_of(&scratch, n)).into();
    plans.extend(shared("cases/robust/plan-1e6-microbatches.json").map(|file| file.display().to_string()));
    for plan in &plans {
        let limit = ["num_microbatches", "times the number of stages must be at most 1048576"];
        let commands: [&[&str]; 6] = [
            &["run", plan, "--steps", "1"],
            &["simulate", plan],
            &["why", plan, "--stage", "0"],
            &["compare", plan, "--baseline", "dp=2"],
            &["inspect", plan, "--html", &html],
            &["verify", plan],
        ];
        commands.iter().for_each(|command| refused(command, &limit));
    }
    let of_model = ["plan", DEMO, "--cluster", "local:2", "--global-batch", "4194304", "--microbatch", "1"];
    refused(&of_model, &["--num-microbatches: 4194304", "1048576"]);
    // Plans within the limit are answered.
    let plan = plan_of(&scratch, 1 << 14);
    succeeds(&["simulate", &plan]);
    succeeds(&["inspect", &plan, "--html", &html]);
}

#[test]
fn pipes_folders_devices_and_endless_files_are_refused() {
    let scratch = Scratch::new();
    let pipe = scratch.path("pipe.toml").display().to_string();
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let endless = scratch.path("endless").display().to_string();
    std::fs::File::create(&endless).and_then(|file| file.set_len(1 << 42)).expect("a sparse file");
    let folder = scratch.path("folder.toml");
    std::fs::create_dir(&folder).expect("a folder");
    let folder = folder.display().to_string();
    let kinds = [(&*pipe, "is a pipe"), ("/dev/zero", "is a device"), (&endless, "bytes of memory are available")];
    for (file, problem) in kinds {
        for command in ["plan", "show", "import", "inspect", "run", "verify", "simulate"] {
            refused(&[command, file], &[file, problem]);
        }
        refused(&["run", DEMO, "--cluster", "local:1", "--weights", file], &[file, problem]);
        refused(&["probe", "--gpus", file], &[file, problem]);
    }
    for (file, problem) in [(&*pipe, "is a pipe"), (&folder, "is a directory")] {
        refused(&["plan", DEMO, "--cluster", file], &[file, problem]);
    }
    refused(&["run", DEMO, "--cluster", "local:1", "--data", &pipe], &[&pipe]);
    // A pipe of this process's own is read, as shells pass `<(...)`.
    let model = std::fs::File::open(DEMO).expect("the model");
    let mut cat = Command::new("cat").stdin(model).stdout(std::process::Stdio::piped()).spawn().expect("cat runs");
    let piped = Command::new(env!("CARGO_BIN_EXE_altiplano"))
        .args(["show", "/dev/stdin"])
        .stdin(cat.stdout.take().expect("a pipe"))
        .output()
        .expect("the binary starts");
    assert!(cat.wait().expect("it ends").success());
    assert!(piped.status.success(), "{}", String::from_utf8_lossy(&piped.stderr));
}

#[test]
fn an_output_never_replaces_an_input() {
    let scratch = Scratch::new();
    let model = scratch.file("model.mlir", std::fs::read(DEMO).expect("the model"));
    let link = scratch.path("link.json");
    std::os::unix::fs::symlink(&model, &link).expect("a link");
    let link = link.display().to_string();
    let problem = "is a file that the command reads";
    refused(&["plan", &model, "--cluster", "local:1", "-o", &model], &["--output", problem]);
    refused(&["plan", &model, "--cluster", "local:1", "-o", &link], &["--output", problem]);
    refused(&["plan", &model, "--cluster", "local:1", "--html", &model], &["--html", problem]);
    refused(&["run", &model, "--cluster", "local:1", "--metrics", &model], &["--metrics", problem]);
    assert_eq!(std::fs::read(&model).expect("the model"), std::fs::read(DEMO).expect("the model"));
    // A former plan may be replaced by the one that is compared with it.
    let plan = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", &model, "--cluster", "local:1", "-o", &plan]);
    succeeds(&["plan", &model, "--cluster", "local:1", "-o", &plan, "--from", &plan]);
}

#[test]
fn files_cannot_write_to_the_terminal() {
    let scratch = Scratch::new();
    let text = std::fs::read_to_string(DEMO).expect("the model");
    let file = scratch.file("model.mlir", text.replacen("stablehlo.tanh", "\"stablehlo.\u{1b}]0;title\u{7}\"", 1));
    let Output { code, stderr, .. } = altiplano(&["plan", &file]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(!stderr.contains(['\u{1b}', '\u{7}']), "{stderr:?}");
    // The name of a file is not ours either.
    let Output { stderr, .. } = altiplano(&["plan", "no\u{1b}[2Jfile"]);
    assert!(stderr.contains("no\\u{1b}[2Jfile") && !stderr.contains('\u{1b}'), "{stderr:?}");
}

/// On a terminal, which `script` makes; files and pipes get what is there.
#[cfg(target_os = "linux")]
#[test]
fn answers_cannot_write_to_the_terminal() {
    let scratch = Scratch::new();
    let cluster = succeeds(&["show", "local:1"]);
    let cluster = scratch.file("cluster.toml", cluster.replacen("name = \"", "name = \"\\u001b]0;title\\u0007", 1));
    assert!(succeeds(&["plan", DEMO, "--cluster", &cluster]).contains("\u{1b}]0;title"));
    let command = format!("'{}' plan '{DEMO}' --cluster '{cluster}'", env!("CARGO_BIN_EXE_altiplano"));
    let Ok(output) = Command::new("script").args(["-qec", &command, "/dev/null"]).stdin(Stdio::null()).output() else {
        eprintln!("SKIPPED: there is no `script` to make a terminal");
        return;
    };
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("\\u{1b}]0;title\\u{7}") && !said.contains("\u{1b}]"), "{said:?}");
}

#[test]
fn scripts_whose_variables_double_are_refused() {
    let scratch = Scratch::new();
    let doubled: String = (1..40).map(|i| format!("V{i}=$V{0}$V{0}\n", i - 1)).collect();
    let script = format!("V0=x\n{doubled}python pretrain_gpt.py --tensor-model-parallel-size 2 --name $V39\n");
    let file = scratch.file("laughs.sh", script);
    refused(&["judge", &file, "--model", DEMO, "--cluster", "local:4"], &["variables expand to more than"]);
}

#[test]
fn deeply_nested_files_are_refused() {
    let scratch = Scratch::new();
    let deep = |open: &str| open.repeat(200_000);
    let regions = format!("module @m {{ {} }}", deep("func.func @f() { "));
    let files = [
        ("json", deep("[")),
        ("graph.json", format!("{{\"format\": \"altiplano.graph\", \"nodes\": {}", deep("{\"a\":["))),
        ("plan.json", format!("{{\"format\": \"altiplano.plan\", \"stages\": {}", deep("[{\"a\":"))),
        ("toml", format!("name = {}", deep("["))),
        ("mlir", regions),
        ("type.mlir", format!("module @m {{ func.func @main(%a: {}", deep("tuple<"))),
        ("onnx", { "\u{8}\u{8}".to_string() + &deep(":\u{7f}\u{a}\u{7f}*\u{7f}2\u{7f}") }),
    ];
    for (name, text) in files {
        let file = scratch.file(&format!("deep.{name}"), text);
        refused(&["plan", &file, "--cluster", "local:1"], &["deep."]);
    }
    let cluster = scratch.file("cluster.toml", format!("a{} = 1", deep(".a")));
    refused(&["plan", DEMO, "--cluster", &cluster], &["cluster.toml"]);
}

/// Numbers that would overflow, or be allocated for.
#[test]
fn ranges_of_numbers_are_bounded() {
    for arguments in [["--rendezvous-timeout", "18446744073709551615"], ["--lost-after", "18446744073709551615"]] {
        let Output { code, stderr, .. } = altiplano(&[&["run", "p.json"][..], &arguments].concat());
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains("604800"), "{stderr}");
    }
}

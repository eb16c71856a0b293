//! The command line with valid input: each subcommand end to end on the model that ships with the project.

use crate::common::{DEMO, Scratch, altiplano, altiplano_with, succeeds};
use serde_json::Value;
use std::io::Write;
use std::process::{Command, Stdio};

/// The README's first example.
#[test]
fn the_demo_trains_alike_on_four_workers_and_on_one() {
    let text = succeeds(&["demo"]);
    assert!(text.trim_end().ends_with("The losses agree."), "{text}");
}

/// The words of a command line, in which quotes hold some together.
fn words(command: &str) -> Vec<String> {
    let parts = command.split('\'').enumerate();
    parts
        .flat_map(|(i, part)| match i % 2 {
            0 => part.split_whitespace().map(String::from).collect(),
            _ => vec![part.to_string()],
        })
        .collect()
}

#[test]
fn commands_of_the_readme_run() {
    let scratch = Scratch::new();
    std::fs::copy(DEMO, scratch.path("model.mlir")).expect("a model");
    let config =
        r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 1024}"#;
    scratch.file("config.json", config);
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).expect("the README");
    // Files that PyTorch writes are not here.
    let commands = readme.lines().filter_map(|line| line.strip_prefix("    $ altiplano "));
    let commands: Vec<&str> = commands.filter(|c| !c.contains("model.pt2") && !c.contains("model.onnx")).collect();
    for command in &commands {
        let in_scratch = |word: String| {
            let is_file =
                [".json", ".html", ".mlir", ".py", ".sh"].iter().any(|end| word.ends_with(end)) && !word.contains('/');
            if is_file {
                scratch.path(&word).display().to_string()
            } else {
                word.replace("examples/models/gpt-small-demo.mlir", DEMO)
            }
        };
        let words: Vec<String> = words(command).into_iter().map(in_scratch).collect();
        succeeds(&words.iter().map(String::as_str).collect::<Vec<_>>());
    }
    assert!(commands.len() >= 9, "{commands:?}");
    for file in ["plan.json", "plan.html", "layouts.py"] {
        assert!(scratch.path(file).exists(), "{file}");
    }
}

#[test]
fn a_plan_is_written_inspected_and_the_same_twice() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let (first, second) = (path("first.json"), path("second.json"));
    let report = succeeds(&["plan", DEMO, "-o", &first]);
    assert_eq!(succeeds(&["plan", DEMO, "-o", &second]), report);
    let read = |file: &str| std::fs::read_to_string(file).expect("the plan file");
    assert_eq!(read(&first), read(&second));

    assert_eq!(succeeds(&["inspect", &first]), report);
    assert_eq!(succeeds(&["show", &first]), report);
    for part in ["data parallel", "ZeRO-1", "FSDP", "tensor parallel", "pipeline", "chosen", "mesh<", "optimizer state"]
    {
        assert!(report.contains(part), "the report should mention '{part}':\n{report}");
    }
    let json: Value = serde_json::from_str(&succeeds(&["inspect", &first, "--json"])).expect("one JSON document");
    let keys = [
        "format",
        "version",
        "graph_hash",
        "cluster",
        "global_batch",
        "num_microbatches",
        "schedule",
        "optimizer",
        "graph",
        "stages",
        "predicted",
    ];
    for key in keys {
        assert!(!json[key].is_null(), "{key}");
    }
    assert!(json["predicted"]["step_time_s"].as_f64() >= json["predicted"]["lower_bound_s"].as_f64());
    assert!(json["predicted"]["step_time_s"].as_f64() <= json["predicted"]["lower_bound_s"].as_f64().map(|s| 10.0 * s));
    assert_eq!(json, serde_json::from_str::<Value>(&succeeds(&["plan", DEMO, "--json"])).expect("JSON"));
    let programs = succeeds(&["inspect", &first, "--programs"]);
    assert!(programs.contains("schedule") && programs.contains("dot_general"));
}

#[test]
fn what_is_fixed_stays_fixed() {
    let options = ["--dp", "2", "--tp", "1", "--pp", "2", "--num-microbatches", "4", "--schedule", "gpipe"];
    let more = ["--recompute", "full", "--zero", "0", "--optimizer", "sgd", "--global-batch", "16", "--json"];
    let arguments: Vec<&str> = ["plan", DEMO].into_iter().chain(options).chain(more).collect();
    let plan: Value = serde_json::from_str(&succeeds(&arguments)).expect("JSON");
    assert_eq!(plan["stages"].as_array().map(Vec::len), Some(2));
    assert_eq!(plan["num_microbatches"], 4);
    assert_eq!(plan["global_batch"], 16);
    assert_eq!(plan["schedule"], "gpipe");
    for stage in plan["stages"].as_array().into_iter().flatten() {
        assert_eq!(stage["mesh"]["axes"][0]["size"], 2);
        assert_eq!(stage["recompute"], "full");
        assert_eq!(stage["zero"], 0);
    }
}

#[test]
fn timings_are_beside_the_report_and_count_the_phases_of_a_search() {
    let words = ["plan", DEMO, "--cluster", "p3.16xlarge:1", "--global-batch", "64"];
    let plain = altiplano(&words);
    let timed = altiplano(&[&words[..], &["--timings"]].concat());
    assert_eq!((timed.code, &timed.stdout), (Some(0), &plain.stdout));
    let counted = |unit: &str| {
        let line = timed.stderr.lines().find(|line| line.trim_end().ends_with(unit));
        let number = line.and_then(|line| line.strip_suffix(unit)?.split_whitespace().last()?.parse::<u64>().ok());
        number.unwrap_or_else(|| panic!("{unit}: {}", timed.stderr))
    };
    assert_eq!(counted("models read"), 1);
    assert_eq!(counted("plans lowered"), counted("plans followed through memory"));
    assert!(counted("tables of layers solved") >= counted("microbatch sizes cut into layers"), "{}", timed.stderr);
}

#[test]
fn a_model_survives_the_graph_format() {
    let scratch = Scratch::new();
    let graph = scratch.path("graph.json").display().to_string();
    succeeds(&["import", DEMO, "-o", &graph]);
    assert_eq!(succeeds(&["show", DEMO]), succeeds(&["show", &graph]));
    let plan = |model: &str| -> Value {
        let mut plan: Value = serde_json::from_str(&succeeds(&["plan", model, "--json"])).expect("JSON");
        assert_eq!(plan["made_by"]["command"], format!("altiplano plan {model}"));
        assert_eq!(plan["made_by"]["version"], env!("CARGO_PKG_VERSION"));
        (plan["model"], plan["made_by"]) = (Value::Null, Value::Null);
        plan
    };
    assert_eq!(plan(DEMO), plan(&graph));
}

#[test]
fn clusters_are_listed_and_shown() {
    let list = succeeds(&["clusters"]);
    for name in ["local", "p3.16xlarge", "dgx-a100", "dgx-h100"] {
        assert!(list.contains(name));
    }
    let scratch = Scratch::new();
    let file = scratch.file("cluster.toml", succeeds(&["show", "dgx-a100:2"]));
    assert_eq!(succeeds(&["show", &file]), succeeds(&["show", "dgx-a100:2"]));
}

#[test]
fn training_lowers_the_loss() {
    let text = succeeds(&["run", DEMO, "--steps", "4", "--lr", "0.003"]);
    let losses: Vec<f64> =
        text.lines().filter_map(|l| l.split_once("loss ")?.1.split_whitespace().next()?.parse().ok()).collect();
    assert_eq!(losses.len(), 4, "{text}");
    assert!(text.contains("samples/s") && text.contains("peak memory"), "{text}");
    assert!((losses[0] - 1024f64.ln()).abs() < 0.2, "an untrained model guesses: {losses:?}");
    assert!(losses[3] < losses[0], "the loss should fall: {losses:?}");
}

#[test]
fn what_is_missing_for_gpus_is_told_with_how_to_get_it() {
    let text = succeeds(&["devices"]);
    for part in ["cpu      usable", "cuda     ", "driver", "nvrtc", "cublasLt", "nccl"] {
        assert!(text.contains(part), "'{part}' is missing:\n{text}");
    }
    let document: Value = serde_json::from_str(&succeeds(&["devices", "--json"])).expect("JSON");
    if document["cuda"]["usable"] == true {
        eprintln!("SKIPPED: this machine lacks nothing");
        return;
    }
    let problem = document["cuda"]["problem"].as_str().expect("a problem");
    for command in ["run", "verify"] {
        let output = altiplano(&[command, DEMO, "--device", "cuda"]);
        assert_eq!(output.code, Some(2), "{}{}", output.stdout, output.stderr);
        assert_eq!(output.stderr.trim_end(), format!("error: {problem}"), "one line, before any work is done");
    }
}

#[test]
fn no_memory_is_exit_code_1_and_says_how_much() {
    let scratch = Scratch::new();
    let tiny = succeeds(&["show", "local:4"])
        + "\n[device.\"tiny\"]\nmemory_bytes = 1e6\nmemory_bytes_per_s = 1e9\npeak_flops = { f32 = 1e9 }\n";
    let file = scratch.file("tiny.toml", tiny.replace("\"cpu-worker\"", "\"tiny\""));
    let output = altiplano(&["plan", DEMO, "--cluster", &file]);
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    for part in ["memory", "more than", "tiny"] {
        assert!(output.stderr.contains(part), "{}", output.stderr);
    }
}

const TINY: &str =
    r#"{"model_type": "gpt2", "vocab_size": 13, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 2}"#;

#[cfg(unix)]
#[test]
fn what_is_written_to_stays_what_it_was() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name);
    let import = |to: &std::path::Path| succeeds(&["import", DEMO, "-o", &to.display().to_string()]);
    let text = succeeds(&["import", DEMO]);
    let holds_it =
        |file: &std::path::Path| std::fs::read_to_string(file).expect("the graph").trim_end() == text.trim_end();

    let file = path("file.json");
    std::fs::write(&file, "old").expect("a file");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).expect("its mode");
    let link = path("link.json");
    std::os::unix::fs::symlink("file.json", &link).expect("a link");
    import(&link);
    assert!(std::fs::symlink_metadata(&link).expect("the link").is_symlink());
    assert!(holds_it(&file));
    assert_eq!(std::fs::metadata(&file).expect("the file").permissions().mode() & 0o777, 0o640);

    let nowhere = path("nowhere.json");
    std::os::unix::fs::symlink("new.json", &nowhere).expect("a link");
    import(&nowhere);
    assert!(std::fs::symlink_metadata(&nowhere).expect("the link").is_symlink() && holds_it(&path("new.json")));

    let pipe = path("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read_to_string(pipe).expect("what is written to the pipe")
    });
    import(&pipe);
    assert_eq!(reader.join().expect("the reader").trim_end(), text.trim_end());
    assert!(std::fs::symlink_metadata(&pipe).expect("the pipe").file_type().is_fifo());

    // Writes to a device through a link in a directory other than /dev.
    let null = path("null");
    std::os::unix::fs::symlink("/dev/null", &null).expect("a link");
    import(&null);
    assert!(std::fs::metadata("/dev/null").expect("the device").file_type().is_char_device());

    // The same for tensors, which another function writes.
    let values = path("values.safetensors");
    let to_values = path("to-values");
    std::os::unix::fs::symlink("values.safetensors", &to_values).expect("a link");
    let config = scratch.file("config.json", TINY);
    for to in [&values, &to_values, &null] {
        let to = to.display().to_string();
        succeeds(&["run", &config, "--cluster", "local:1", "--loss", "none", "--output", &to]);
    }
    assert!(std::fs::symlink_metadata(&to_values).expect("the link").is_symlink());
    assert!(!altiplano::runtime::data::read(&values).expect("tensors").is_empty());
    assert!(std::fs::metadata("/dev/null").expect("the device").file_type().is_char_device());
    let left: Vec<_> = std::fs::read_dir(path("")).expect("the directory").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 9, "nothing else is left behind: {left:?}");
}

#[cfg(unix)]
#[test]
fn a_pipe_is_read_once() {
    let cluster = succeeds(&["show", "local:2"]);
    let model = std::fs::read_to_string(DEMO).expect("the model");
    for (text, expect) in [(cluster.clone(), cluster.as_str()), (model, &succeeds(&["show", DEMO]))] {
        let mut shown = Command::new(env!("CARGO_BIN_EXE_altiplano"));
        shown.args(["show", "/dev/stdin"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shown = shown.spawn().expect("the binary starts");
        let mut pipe = shown.stdin.take().expect("a pipe");
        let writer = std::thread::spawn(move || pipe.write_all(text.as_bytes()));
        let output = shown.wait_with_output().expect("the binary ends");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expect);
        writer.join().expect("the writer").expect("the pipe was read");
    }
}

#[test]
fn idle_devices_are_mentioned() {
    // Far too many for a batch of 8 samples.
    let plain = ["--schedule", "1f1b", "--virtual-stages", "1"];
    let few = succeeds(&[&["plan", DEMO, "--cluster", "dgx-a100:2"], &plain[..]].concat());
    let said = few.lines().find(|l| l.starts_with("  devices used    "));
    assert!(said.is_some_and(|l| l.contains(" of 16; ")), "{few}");
    assert!(!succeeds(&["plan", DEMO, "--dp", "4"]).contains("devices used"));
}

#[test]
fn nothing_is_called_agreement_that_is_none() {
    let scratch = Scratch::new();
    // The derivative of sign is zero, so no weight is compared; and 0 / 0 is NaN.
    let model = |body: &str| {
        format!(
            "module @m {{\n  func.func public @main(%arg0: tensor<4xf32> loc(\"params\"), %arg1: tensor<2x4xf32> loc(\"x\")) -> tensor<f32> {{\n{body}\n    return %9 : tensor<f32>\n  }}\n}}\n"
        )
    };
    let zero = model(
        "    %c = stablehlo.constant dense<0.0> : tensor<f32>\n    %0 = stablehlo.sign %arg0 : tensor<4xf32>\n    %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>\n    %2 = stablehlo.multiply %1, %arg1 : tensor<2x4xf32>\n    %9 = stablehlo.reduce(%2 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x4xf32>, tensor<f32>) -> tensor<f32>",
    );
    let file = scratch.file("zero.mlir", zero);
    let output = altiplano(&["verify", &file, "--dp", "2", "--cluster", "local:2"]);
    assert_eq!(output.code, Some(0), "{}{}", output.stdout, output.stderr);
    assert!(output.stderr.contains("all gradients are zero"), "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("updated weights  not compared"), "{}", output.stdout);
    let nan = model(
        "    %c = stablehlo.constant dense<0.0> : tensor<f32>\n    %0 = stablehlo.subtract %arg0, %arg0 : tensor<4xf32>\n    %1 = stablehlo.divide %0, %0 : tensor<4xf32>\n    %b = stablehlo.broadcast_in_dim %1, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>\n    %2 = stablehlo.multiply %b, %arg1 : tensor<2x4xf32>\n    %9 = stablehlo.reduce(%2 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x4xf32>, tensor<f32>) -> tensor<f32>",
    );
    let file = scratch.file("nan.mlir", nan);
    let output = altiplano(&["verify", &file, "--cluster", "local:2"]);
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    assert!(output.stderr.contains("on both sides"), "{}{}", output.stdout, output.stderr);
    let output = altiplano(&["run", &file, "--cluster", "local:2"]);
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    assert!(output.stderr.contains("the weights or the data"), "{}{}", output.stdout, output.stderr);
    let output = altiplano(&["run", &file, "--cluster", "local:2", "--check-nan"]);
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    for part in ["step 1: device ", "made a NaN from inputs without NaN", "divide"] {
        assert!(output.stderr.contains(part), "'{part}' is missing: {}", output.stderr);
    }
}

#[test]
fn what_is_pinned_is_laid_out_so() {
    let fixed = ["plan", DEMO, "--dp", "2", "--tp", "2", "--pp", "1", "--json"];
    let layouts = |pins: &[&str]| {
        let pins = pins.iter().flat_map(|pin| ["--pin", *pin]);
        let arguments: Vec<&str> = fixed.into_iter().chain(pins).collect();
        let plan: Value = serde_json::from_str(&succeeds(&arguments)).expect("JSON");
        (0..4)
            .map(|h| plan["stages"][0]["parameters"][format!("params['h{h}']['fc']['w']")]["parameter"].clone())
            .collect::<Vec<_>>()
    };
    let [rows, columns] = ["params['h*']['fc']['w']=[{tensor}, {}]", "params['h*']['fc']['w']=[{}, {tensor}]"]
        .map(|pin| layouts(&[pin, "params['h*']['out']['b']=[{}]"]));
    assert!(rows.iter().all(|l| *l == rows[0]) && columns.iter().all(|l| *l == columns[0]), "{rows:?} {columns:?}");
    assert_ne!(rows, columns);
    assert!(!rows[0].is_null());
}

#[test]
fn where_nothing_fits_it_is_told_what_and_what_would_help() {
    let scratch = Scratch::new();
    let cluster = scratch.path("small.toml").display().to_string();
    // A device with a third of the memory for the demo model's parameters, gradients and state.
    let device = "[device.small]\nmemory_bytes = 1e7\nmemory_bytes_per_s = 1e11\npeak_flops = { f32 = 1e12 }\n";
    let write = |nodes: u32| {
        let group = format!("[[group]]\nnodes = {nodes}\ndevices_per_node = 1\ndevice = \"small\"\n");
        let links = "intra_node = { kind = \"pcie\", bytes_per_s = 1e10, latency_s = 1e-5 }\n\
                     inter_node = { bytes_per_s = 1e10, nics = 1, latency_s = 1e-5 }\n";
        std::fs::write(&cluster, format!("name = \"small\"\n{group}{links}{device}")).expect("a file");
    };
    write(1);
    let output = altiplano(&["plan", DEMO, "--cluster", &cluster]);
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    for part in ["the closest plan holds", "of 10.0 MB in", "optimizer state", "devices with", "no plan fits in memory"]
    {
        assert!(output.stderr.contains(part), "'{part}' is missing:\n{}", output.stderr);
    }
    // The message, the explanation and the suggestion describe one plan.
    let number = |before: &str, after: &str| -> String {
        let (_, rest) = output.stderr.split_once(before).unwrap_or_else(|| panic!("'{before}': {}", output.stderr));
        rest.split_once(after).expect("a number").0.to_string()
    };
    let needed = number("no plan fits in memory: the best needs ", " per device");
    assert_eq!(number("the closest plan holds ", " of 10.0 MB"), needed);
    let megabytes: f64 = number("  devices with ", " MB").parse().expect("megabytes");
    let text = std::fs::read_to_string(&cluster).expect("the cluster");
    let larger = scratch.file("larger.toml", text.replace("1e7", &format!("{:e}", megabytes * 1.005e6)));
    assert!(megabytes > 10.0 && succeeds(&["plan", DEMO, "--cluster", &larger]).contains("chosen"));
    // The suggestion works.
    let line = output.stderr.lines().find(|line| line.ends_with(" per device") && line.contains(" times the nodes"));
    let times = line.and_then(|line| line.split_whitespace().next()).and_then(|n| n.parse().ok());
    write(times.expect("more nodes are advised"));
    assert!(succeeds(&["plan", DEMO, "--cluster", &cluster]).contains("chosen"));
}

/// The plan of a command line, and the answer at the start of its report.
fn plan_and_answer(options: &[&str]) -> (Value, String) {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let report = succeeds(&[&["plan", "-o", &file], options].concat());
    let plan = serde_json::from_str(&std::fs::read_to_string(file).expect("the plan")).expect("JSON");
    (plan, report.lines().next().unwrap_or("").to_string())
}

#[test]
fn the_answer_comes_first_in_the_words_of_those_who_set_degrees() {
    let (plan, answer) = plan_and_answer(&[DEMO, "--dp", "2", "--pp", "2", "--global-batch", "16", "--zero", "1"]);
    let microbatches = plan["num_microbatches"].as_u64().expect("a count");
    let each = plan["microbatch"].as_u64().expect("samples") / 2;
    let begins = format!(
        "DP 2 (ZeRO-1) x TP 1 x PP 2 x CP 1 x EP 1, micro-batch {each} a worker, {microbatches} microbatches, recompute "
    );
    assert!(answer.starts_with(&begins), "{answer}");
    let tokens = plan["predicted"]["samples_per_s"].as_f64().expect("samples") * 64.0 / 4.0;
    assert!(answer.contains(&format!(" {:.2}k tokens/s/worker, ", tokens / 1e3)), "{answer}");
    assert!(answer.contains(" GFLOP/s/worker, ") && answer.ends_with(" of 6.44 GB"), "{answer}");
    let (_, answer) = plan_and_answer(&[DEMO, "--dp", "2", "--tp", "2", "--zero", "0"]);
    assert!(answer.starts_with("DP 2 x TP 2 x PP 1 x CP 1 x EP 1"), "{answer}");
    // Throughput is in samples if no tokens are looked up.
    let scratch = Scratch::new();
    let (_, answer) = plan_and_answer(&[&scratch.file("mixed.mlir", crate::common::MIXED), "--dp", "2"]);
    assert!(answer.contains(" samples/s, "), "{answer}");
    // Warnings go to stderr, after the answer.
    let output = altiplano(&["plan", DEMO, "--target", "fsdp", "--cluster", "4xA100-80"]);
    assert!(output.stdout.starts_with("DP 4 (") && !output.stdout.contains("ZeRO-1"), "{}", output.stdout);
    assert!(output.stdout.contains("for PyTorch FSDP"), "{}", output.stdout);
    // The target may follow from the model's format, and is printed.
    let output = altiplano(&["plan", DEMO, "--target", "auto", "--cluster", "4xA100-80"]);
    assert!(output.stdout.contains("for JAX on XLA"), "{}", output.stdout);
    assert!(output.stderr.contains("planning for --target xla, since the model is StableHLO"), "{}", output.stderr);
}

#[test]
fn one_gpu_is_enough_where_more_gain_little() {
    let options = [DEMO, "--cluster", "dgx-h100:1"];
    let (plan, answer) = plan_and_answer(&options);
    assert!(answer.contains("1 of 8 GPUs"), "{answer}");
    let (fastest, _) = plan_and_answer(&[&options[..], &["--prefer", "fastest"]].concat());
    let step_s = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().expect("seconds");
    let (one_s, most_s) = (step_s(&plan), 1.2 * step_s(&fastest));
    assert!(step_s(&fastest) < one_s && one_s <= most_s, "{one_s} {most_s}");
    let named = plan["alternatives"].as_array().into_iter().flatten().find(|line| line["name"] == "faster");
    assert_eq!(named.map(step_s), Some(step_s(&fastest)));
    // An explicit request is not simplified.
    assert!(!plan_and_answer(&[&options[..], &["--dp", "8"]].concat()).1.contains("1 of 8"));
}

#[test]
fn degrees_and_batches_are_taken_by_the_names_that_others_have() {
    let given = [
        "--tensor-model-parallel-size=1",
        "--pipeline_parallel_degree=2",
        "--data-parallel-size=2",
        "--train_batch_size=16",
        "--gradient_accumulation_steps=4",
    ];
    let (mut theirs, _) = plan_and_answer(&[&[DEMO][..], &given].concat());
    let ours = ["--tp=1", "--pp=2", "--dp=2", "--global-batch=16", "--num-microbatches=4"];
    let (mut known, _) = plan_and_answer(&[&[DEMO][..], &ours].concat());
    (theirs["made_by"], known["made_by"]) = (Value::Null, Value::Null);
    assert_eq!(theirs, known);
    let sharded = plan_and_answer(&[DEMO, "--data_parallel_shard_degree", "4"]).1;
    assert!(sharded.starts_with("DP 4 (FSDP) x TP 1 "), "{sharded}");
    let scratch = Scratch::new();
    let options = "pipeline_parallel_degree = 2\ntensor-model-parallel-size = 1\ndp = 2\nsteps = 1\n";
    let text = succeeds(&["run", DEMO, "--config", &scratch.file("options.toml", options)]);
    assert!(text.contains("2 stages of mesh<data=2, tensor=1>"), "{text}");
    let refused = altiplano(&["plan", DEMO, "--use-distributed-optimizer"]);
    assert_eq!((refused.code, refused.stderr.contains("--zero 1")), (Some(2), true), "{}", refused.stderr);
}

#[test]
fn a_micro_batch_is_of_each_replica() {
    let (plan, answer) = plan_and_answer(&[DEMO, "--micro-batch-size", "2", "--global-batch", "32"]);
    assert!(answer.contains(" micro-batch 2 a "), "{answer}");
    let replicas = plan["stages"][0]["mesh"]["axes"][0]["size"].as_u64().expect("a degree");
    assert_eq!(plan["microbatch"].as_u64(), Some(2 * replicas));
    let (plan, _) = plan_and_answer(&[DEMO, "--micro-batch-size", "2", "--dp", "4"]);
    assert_eq!((plan["microbatch"].as_u64(), plan["global_batch"].as_u64()), (Some(8), Some(8)));
    let words = ["plan", DEMO, "--micro-batch-size", "3", "--global-batch", "32"];
    for words in [words.to_vec(), [&words[..], &["--dp", "4"]].concat()] {
        let refused = altiplano(&words);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        let said = "--micro-batch-size: 3 times the number of replicas does not divide the global batch";
        assert!(refused.stderr.contains(said), "{}", refused.stderr);
    }
}

/// A small model with four experts.
const EXPERTS: &str = r#"{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256,
    "max_position_embeddings": 64}"#;

#[test]
fn experts_and_positions_are_split_as_is_asked() {
    let scratch = Scratch::new();
    let config = scratch.file("config.json", EXPERTS);
    let fixed = [config.as_str(), "--seq", "64", "--global-batch", "8", "--cluster", "4xA100-80"];
    for ep in ["1", "2", "4"] {
        let (_, answer) = plan_and_answer(&[&fixed[..], &["--ep", ep]].concat());
        assert!(answer.contains(&format!(" x EP {ep},")), "--ep {ep}: {answer}");
    }
    // Replicas distribute experts among themselves, as in other software.
    let (_, answer) = plan_and_answer(&[&fixed[..], &["--dp", "4", "--ep", "4"]].concat());
    assert!(answer.starts_with("DP 4") && answer.contains(" x EP 4,"), "{answer}");
    for cp in ["1", "2"] {
        let (_, answer) = plan_and_answer(&[&fixed[..], &["--context-parallel-size", cp, "--dp", "2"]].concat());
        assert!(answer.contains(&format!(" x CP {cp} ")), "--cp {cp}: {answer}");
    }
    for (options, expected) in [
        (["--ep", "3"], "does not divide the number of experts"),
        (["--cp", "3"], "are no multiple of it"),
        (["--dp-replicate", "3"], "--dp-replicate: 3 must divide the number of devices"),
    ] {
        let refused = altiplano(&[&["plan"], &fixed[..], &options[..]].concat());
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        assert!(refused.stderr.contains(expected), "{options:?}: {}", refused.stderr);
    }
    let refused = altiplano(&["plan", DEMO, "--ep", "2"]);
    assert!(refused.stderr.contains("is for models with experts"), "{}", refused.stderr);
}

#[test]
fn a_launcher_does_not_start_as_many_trainings() {
    let launchers = [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("RANK", "WORLD_SIZE"),
    ];
    for (rank, size) in launchers {
        let output = altiplano_with(&[(rank, "1"), (size, "4")], &["run", DEMO, "--steps", "1"]);
        assert_eq!(output.code, Some(2), "{}{}", output.stdout, output.stderr);
        let typed = format!("mpirun -n 4 altiplano run {DEMO} --steps 1 --engine mpi");
        assert!(output.stderr.contains(&typed) && output.stdout.is_empty(), "{}", output.stderr);
        // A single process is no launch, and `--engine threads` is an explicit choice.
        for (size_of, more) in [("1", &[][..]), ("4", &["--engine", "threads"])] {
            let output = altiplano_with(&[(rank, "0"), (size, size_of)], &[&["run", "nowhere.json"], more].concat());
            assert!(output.stderr.contains("nowhere.json"), "{}", output.stderr);
        }
    }
    let output = altiplano_with(&[("RANK", "0"), ("WORLD_SIZE", "2")], &["profile", "--quick"]);
    assert!(output.stderr.contains("mpirun -n 2 altiplano profile --quick --engine mpi"), "{}", output.stderr);
}

//! The command line where all is well: each subcommand end to end on the model that ships with the project.

mod common;

use common::{DEMO, Scratch, altiplano, succeeds};
use serde_json::Value;

/// What the README promises first.
#[test]
fn the_demo_trains_alike_on_four_workers_and_on_one() {
    let text = succeeds(&["demo"]);
    assert!(text.trim_end().ends_with("The losses agree."), "{text}");
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
fn a_model_survives_the_graph_format() {
    let scratch = Scratch::new();
    let graph = scratch.path("graph.json").display().to_string();
    succeeds(&["import", DEMO, "-o", &graph]);
    assert_eq!(succeeds(&["show", DEMO]), succeeds(&["show", &graph]));
    let plan = |model: &str| -> Value {
        let mut plan: Value = serde_json::from_str(&succeeds(&["plan", model, "--json"])).expect("JSON");
        plan["model"] = Value::Null;
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

    // Through a link in a directory that is not /dev, to a device.
    let null = path("null");
    std::os::unix::fs::symlink("/dev/null", &null).expect("a link");
    import(&null);
    assert!(std::fs::metadata("/dev/null").expect("the device").file_type().is_char_device());
    let left: Vec<_> = std::fs::read_dir(path("")).expect("the directory").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 6, "nothing else is left behind: {left:?}");
}

#[cfg(unix)]
#[test]
fn a_pipe_is_read_once() {
    let scratch = Scratch::new();
    let pipe = scratch.path("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    let cluster = succeeds(&["show", "local:2"]);
    let model = std::fs::read_to_string(DEMO).expect("the model");
    for (text, expect) in [(cluster.clone(), cluster.as_str()), (model, &succeeds(&["show", DEMO]))] {
        let writer = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::fs::write(pipe, text)
        });
        assert_eq!(succeeds(&["show", &pipe.display().to_string()]), expect);
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
    // The derivative of sign is zero, so that no weight is compared; and 0 / 0 is no number.
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
    for part in ["step 1: device ", "made a NaN of numbers", "divide"] {
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
    // A device that holds a third of the demo model's parameters, gradients and state.
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
    for part in
        ["what comes closest holds", "of 10.0 MB in", "optimizer state", "devices with", "no plan fits in memory"]
    {
        assert!(output.stderr.contains(part), "'{part}' is missing:\n{}", output.stderr);
    }
    // What is advised works.
    let line = output.stderr.lines().find(|line| line.ends_with(" per device") && line.contains(" times the nodes"));
    let times = line.and_then(|line| line.split_whitespace().next()).and_then(|n| n.parse().ok());
    write(times.expect("more nodes are advised"));
    assert!(succeeds(&["plan", DEMO, "--cluster", &cluster]).contains("chosen"));
}

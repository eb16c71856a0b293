//! For any invalid input, the command line prints one clear message that names the place, and exits with code 2.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::pipe;
use std::process::{Command, Stdio};

/// Runs a command and expects exit code 2 and a message with all of `expect`.
fn refused(arguments: &[&str], expect: &[&str]) {
    let output = altiplano(arguments);
    let said = &output.stderr;
    assert_eq!(output.code, Some(2), "{arguments:?}\n{}{said}", output.stdout.lines().next().unwrap_or_default());
    assert!(!said.contains("panicked"), "{arguments:?}\n{said}");
    let error = said.lines().find(|l| l.starts_with("error: ")).unwrap_or_else(|| panic!("{arguments:?}\n{said}"));
    for part in expect {
        assert!(said.contains(part), "{arguments:?} should say '{part}', but says\n{error}\n{said}");
    }
}

fn demo() -> String {
    std::fs::read_to_string(DEMO).expect("the demo model")
}

#[test]
fn stablehlo_files() {
    let scratch = Scratch::new();
    let whole = demo();
    let function = |body: &str| format!("module @m {{\n  func.func public @main({body}\n  }}\n}}\n");
    let cases = [
        ("empty", String::new(), "empty.mlir:1:1: "),
        ("blank", "\n\n  \n".to_string(), "blank.mlir:1:1: "),
        ("truncated", whole[..whole.len() / 3].to_string(), "truncated.mlir:"),
        ("short", "module @m {".to_string(), "short.mlir:1:"),
        ("unknown", whole.replacen("stablehlo.tanh", "stablehlo.frobnicate", 1), "stablehlo.frobnicate"),
        (
            "shapes",
            function(
                "%arg0: tensor<2xf32> loc(\"params\"), %arg1: tensor<3xf32> loc(\"x\")) -> tensor<2xf32> {\n    %0 = stablehlo.add %arg0, %arg1 : tensor<2xf32>\n    return %0 : tensor<2xf32>",
            ),
            "shapes.mlir:3:",
        ),
        (
            "undefined",
            function(
                "%arg0: tensor<2xf32>) -> tensor<2xf32> {\n    %0 = stablehlo.add %arg0, %1 : tensor<2xf32>\n    %1 = stablehlo.tanh %0 : tensor<2xf32>\n    return %1 : tensor<2xf32>",
            ),
            "undefined.mlir:3:",
        ),
        (
            "huge",
            function(
                "%arg0: tensor<1000000000x1000000000xf32>) -> tensor<1000000000x1000000000xf32> {\n    return %arg0 : tensor<1000000000x1000000000xf32>",
            ),
            "huge.mlir:2:",
        ),
        ("deep", format!("module @m attributes {{a = {}}} {{}}", "[".repeat(100_000)), "deep.mlir:1:"),
    ];
    for (name, text, place) in cases {
        let file = scratch.file(&format!("{name}.mlir"), text);
        for command in ["plan", "show", "import", "run", "verify"] {
            refused(&[command, &file], &[place]);
        }
    }
}

/// `y = x w`, its mean the loss.
fn graph() -> Value {
    json!({"format": "altiplano.graph", "version": 1, "name": "mlp", "nodes": [
        {"op": "input", "attributes": {"name": "x"}, "type": {"dtype": "f32", "shape": [8, 16]}},
        {"op": "parameter", "attributes": {"name": "w"}, "type": {"dtype": "f32", "shape": [16, 4]}},
        {"op": "dot_general", "operands": [0, 1], "attributes": {"lhs_contract": [1], "rhs_contract": [0]}},
        {"op": "reduce", "operands": [2], "attributes": {"reducer": "sum", "dims": [0, 1]}}],
        "outputs": [3]})
}

/// The document with one value replaced.
fn edited(document: &Value, pointer: &str, value: Value) -> String {
    let mut document = document.clone();
    *document.pointer_mut(pointer).unwrap_or_else(|| panic!("there is no {pointer}")) = value;
    document.to_string()
}

#[test]
fn graph_files() {
    let scratch = Scratch::new();
    let good = scratch.file("good.json", graph().to_string());
    succeeds(&["show", &good]);
    let deep = format!("{{\"format\": \"altiplano.graph\", \"version\": 1, \"nodes\": {}", "[".repeat(100_000));
    let text = graph().to_string();
    let cases = [
        ("truncated", text[..text.len() / 2].to_string(), "truncated.json:1:"),
        ("deep", deep, "deep.json:1:"),
        ("cycle", edited(&graph(), "/nodes/2/operands", json!([0, 3])), "nodes[2].operands[1]"),
        ("self", edited(&graph(), "/nodes/2/operands", json!([2, 1])), "nodes[2].operands[0]"),
        ("unknown", edited(&graph(), "/nodes/3/op", json!("sort")), "nodes[3].op"),
        ("shapes", edited(&graph(), "/nodes/1/type/shape", json!([15, 4])), "nodes[2]"),
        ("huge", edited(&graph(), "/nodes/0/type/shape", json!([1_000_000_000, 1_000_000_000])), "nodes[0]"),
        ("negative", edited(&graph(), "/nodes/0/type/shape", json!([-8, 16])), "nodes[0].type.shape[0]"),
        ("outputs", edited(&graph(), "/outputs", json!([7])), "outputs[0]"),
        ("version", edited(&graph(), "/version", json!(99)), "version"),
        ("format", edited(&graph(), "/format", json!("something")), "format"),
    ];
    for (name, text, place) in cases {
        let file = scratch.file(&format!("{name}.json"), text);
        refused(&["plan", &file], &[&format!("{name}.json:"), place]);
    }
    let vector = scratch.file("vector.json", edited(&graph(), "/outputs", json!([2])));
    refused(&["plan", &vector], &["scalar"]);
    let mut unclear = graph();
    unclear["nodes"][1]["attributes"]["name"] = json!("z");
    let untrained = scratch.file("untrained.json", edited(&unclear, "/nodes/1/op", json!("input")));
    refused(&["plan", &untrained], &["untrained.json", "--params", "f32[16,4]"]);
}

#[test]
fn other_files() {
    let scratch = Scratch::new();
    let cases: [(&str, &[u8], &str); 7] = [
        ("model.onnx", b"\x08\x0a\x12\x07pytorch\x1a\x06", "not a complete ONNX file"),
        ("model.pt2", b"PK\x03\x04\x00\x00\xff", "the zip archive has no end"),
        ("config.json", b"{\"model_type\": \"gpt2\", \"n_layer\": -12}", "n_layer: expected a whole number"),
        ("bytecode.mlir", b"ML\xefR\x0dMLIR", "MLIR bytecode, which cannot be read; convert it to text"),
        ("text.mlir", b"hello", "text.mlir:1:1"),
        ("noise.mlir", b"\xff\xfe\x00\x01", "noise.mlir"),
        ("cluster.toml", b"name = \"mine\"\n[[group]]\n", "--cluster"),
    ];
    for (name, bytes, expect) in cases {
        let file = scratch.file(name, bytes);
        refused(&["plan", &file], &[name, expect]);
    }
    refused(&["plan", "no-such-file.mlir"], &["no-such-file.mlir"]);
    refused(&["show", "no-such-file.mlir"], &["no-such-file.mlir"]);
    refused(&["inspect", "no-such-file.json"], &["no-such-file.json"]);
    refused(&["inspect", DEMO], &["plan"]);
    let folder = scratch.path("").display().to_string();
    refused(&["plan", &folder], &[&folder]);
}

#[test]
fn clusters() {
    let scratch = Scratch::new();
    let good = "name = \"mine\"\n[[group]]\nnodes = 1\ndevices_per_node = 4\ndevice = \"A100-SXM-80GB\"\nintra_node = { bytes_per_s = 3e11, latency_s = 3e-6 }\n";
    let file = scratch.file("good.toml", good);
    succeeds(&["plan", DEMO, "--cluster", &file]);
    let cases = [
        ("nodes", good.replace("nodes = 1", "nodes = 0"), "nodes.toml:3:"),
        ("devices", good.replace("devices_per_node = 4", "devices_per_node = 0"), "devices.toml:4:"),
        ("bandwidth", good.replace("3e11", "-3e11"), "bandwidth.toml:6:"),
        ("latency", good.replace("3e-6", "-3e-6"), "latency.toml:6:"),
        ("nan", good.replace("3e11", "nan"), "nan.toml:6:"),
        ("device", good.replace("A100-SXM-80GB", "A100-SXM-80G"), "device.toml:5:"),
        ("key", good.replace("latency_s", "latency"), "key.toml:6:"),
        ("truncated", good[..good.len() - 20].to_string(), "truncated.toml:6:"),
        ("none", "name = \"mine\"\n".to_string(), "none.toml"),
        ("empty", String::new(), "empty.toml"),
    ];
    for (name, text, place) in cases {
        let file = scratch.file(&format!("{name}.toml"), text);
        refused(&["plan", DEMO, "--cluster", &file], &[place]);
    }
    let directory = scratch.path("").display().to_string();
    refused(&["plan", DEMO, "--cluster", &directory], &[&directory, "directory"]);
    for path in ["/nonexistent.toml", "/nonexistent", "nonexistent/cluster"] {
        refused(&["plan", DEMO, "--cluster", path], &[path, "No such file"]);
    }
    refused(&["plan", DEMO, "--cluster", "local:1/x"], &["local:1/x", "devices of a node"]);
    for preset in ["local:0", "local:-1", "local:99999999999", "dgx-a100:x", "dgx-a10:2", "no-such.toml", ""] {
        refused(&["plan", DEMO, "--cluster", preset], &[preset]);
    }
}

/// The line as an export without debug information prints it.
fn without_location(line: &str) -> String {
    let (first, rest) = line.split_once(" loc(").unwrap_or((line, ""));
    let rest = rest.split(" loc(").map(|part| part.split_once(')').map_or("", |(_, after)| after));
    std::iter::once(first).chain(rest).collect()
}

#[test]
fn options() {
    let lines = demo();
    let unnamed: Vec<String> = lines.lines().filter(|l| !l.starts_with("#loc")).map(without_location).collect();
    let scratch = Scratch::new();
    let unnamed = scratch.file("unnamed.mlir", unnamed.join("\n"));
    refused(&["plan", &unnamed], &["--params", "--inputs", "f32[1024,128]", "i32[8,64]"]);
    succeeds(&["plan", &unnamed, "--params", "0-51"]);
    succeeds(&["plan", &unnamed, "--inputs", "52,53"]);
    refused(&["plan", &unnamed, "--params", "0-60"], &["0-60"]);
    refused(&["plan", &unnamed, "--params", "0-53"], &["floats"]);
    let cases: [(&[&str], &str); 18] = [
        (&["--params", "nothing"], "nothing"),
        (&["--batch-dim", "tokens"], "NAME=DIM"),
        (&["--batch-dim", "nothing=0"], "nothing"),
        (&["--batch-dim", "tokens=7"], "tokens"),
        (&["--stop-gradient", "nothing"], "nothing"),
        (&["--also", "no-such-file.mlir"], "no-such-file.mlir"),
        (&["--also", DEMO], "same sizes"),
        (&["--dp", "3"], "--dp"),
        (&["--dp", "0"], "dp"),
        (&["--dp", "2", "--tp", "2", "--pp", "2"], "8 devices"),
        (&["--pp", "4294967295"], "pp"),
        (&["--microbatch", "3"], "microbatch"),
        (&["--num-microbatches", "3"], "microbatches"),
        (&["--microbatch", "2", "--num-microbatches", "2", "--global-batch", "8"], "microbatch"),
        (&["--global-batch", "0"], "batch"),
        (&["--zero", "4"], "zero"),
        (&["--schedule", "sideways"], "sideways"),
        (&["--precision", "int8"], "int8"),
    ];
    for (options, expect) in cases {
        let arguments: Vec<&str> = ["plan", DEMO].into_iter().chain(options.iter().copied()).collect();
        refused(&arguments, &[expect]);
    }
}

#[test]
fn learning_rates_and_steps() {
    for rate in ["nan", "inf", "-inf", "-1", "-1e-3", "x"] {
        refused(&["run", DEMO, "--lr", rate], &["--lr"]);
        refused(&["verify", DEMO, "--lr", rate], &["--lr"]);
    }
    refused(&["demo", "--steps", "0"], &["--steps"]);
}

#[test]
fn plan_files() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "-o", &file, "--dp", "2", "--pp", "2"]);
    let text = std::fs::read_to_string(&file).expect("the plan");
    let plan: Value = serde_json::from_str(&text).expect("a plan is JSON");
    let other = scratch.path("other.json").display().to_string();
    succeeds(&["plan", DEMO, "-o", &other, "--global-batch", "16", "--num-microbatches", "2"]);
    let other: Value = serde_json::from_str(&std::fs::read_to_string(&other).expect("the plan")).expect("JSON");

    let first = plan["stages"][0]["shardings"].as_object().and_then(|s| s.keys().next()).expect("a sharding").clone();
    let cases = [
        ("truncated", text[..text.len() / 2].to_string(), "truncated.json:"),
        ("another graph", edited(&plan, "/graph", other["graph"].clone()), "another graph"),
        ("hash", edited(&plan, "/graph_hash", json!("0")), "graph_hash"),
        ("format", edited(&plan, "/format", json!("altiplano.graph")), "format"),
        ("version", edited(&plan, "/version", json!(2)), "version"),
        ("microbatches", edited(&plan, "/num_microbatches", json!(3)), "microbatch"),
        ("no microbatches", edited(&plan, "/num_microbatches", json!(0)), "microbatch"),
        ("device", edited(&plan, "/stages/0/devices/0", json!(99)), "stages[0].devices"),
        ("shared device", edited(&plan, "/stages/1/devices/0", json!(0)), "stages[1].devices"),
        ("mesh", edited(&plan, "/stages/0/mesh/axes/0/size", json!(7)), "stages[0].mesh"),
        ("layers", edited(&plan, "/layers/1", json!(100_000)), "layers"),
        ("stages", edited(&plan, "/stages", json!([])), "stages"),
        ("zero", edited(&plan, "/stages/0/zero", json!(9)), "stages[0].zero"),
        ("solved", edited(&plan, "/stages/0/solved/cost_s", json!(-1.0)), "stages[0].solved"),
        ("faster", edited(&plan, "/predicted/step_time_s", json!(1e-3)), "predicted"),
        ("smaller", edited(&plan, "/stages/1/predicted/peak_bytes", json!(1)), "stages[1].predicted"),
        (
            "sharding",
            edited(&plan, &format!("/stages/0/shardings/{first}/sharding"), json!("[{nowhere}]")),
            &format!("stages[0].shardings.{first}"),
        ),
        (
            "strategy",
            edited(&plan, &format!("/stages/0/shardings/{first}/strategy"), json!([])),
            &format!("stages[0].shardings.{first}.strategy"),
        ),
    ];
    for (name, text, place) in cases {
        let file = scratch.file(&format!("{name}.json"), text);
        for command in ["inspect", "run", "verify", "show"] {
            refused(&[command, &file], &[&format!("{name}.json:"), place]);
        }
    }
    // A model instead of a plan, and options without anything to plan.
    refused(&["run", &file, "--dp", "4"], &["plan"]);
    refused(&["plan", &file], &["plan"]);
}

#[test]
fn data_files() {
    let scratch = Scratch::new();
    let file = scratch.file("weights.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\xff{}");
    refused(&["run", DEMO, "--steps", "1", "--weights", &file], &["weights.safetensors"]);
    refused(&["run", DEMO, "--steps", "1", "--data", &file], &["weights.safetensors"]);
    refused(&["verify", DEMO, "--expect", &file], &["weights.safetensors"]);
    let empty = scratch.file("empty.safetensors", b"\x02\0\0\0\0\0\0\0{}");
    refused(&["run", DEMO, "--steps", "1", "--data", &empty], &["tokens"]);
    refused(&["run", DEMO, "--steps", "1", "--weights", &empty], &["params"]);
    refused(&["run", DEMO, "--data", "no-such-file.npy"], &["no-such-file.npy"]);
    let other = scratch.file("data.csv", "1,2,3");
    refused(&["run", DEMO, "--data", &other], &["data.csv"]);
    refused(&["run", DEMO, "--cluster", "local:65", "--dp", "65"], &[]);
}

#[test]
fn pins_of_what_is_not_there() {
    let cases: &[(&[&str], &str)] = &[
        (&["--tp", "4", "--pin", "params['h*']['nothing']=[{tensor}]"], "no parameter or value has such a name"),
        (&["--tp", "3", "--pin", "params['h0']['fc']['w']=[{}, {tensor}]"], "dimension 1 of 'params['h0']['fc']['w']'"),
        (&["--tp", "4", "--pin", "params['h0']['fc']['w']=[{tensor}]"], "is f32[128,512], and the sharding is of 1"),
        (&["--pin", "params['h0']['fc']['w']=[{}, {tensor}]"], "give it by --tp"),
        (&["--tp", "4", "--pin", "params['h0']['fc']['w']=[{}, {x}]"], "there is no axis `x`"),
        (&["--pin", "params['h0']['fc']['w']=[{}, {tensor}"], "expected PATTERN="),
    ];
    for (options, expected) in cases {
        for command in ["plan", "run", "verify"] {
            let arguments: Vec<&str> = [command, DEMO].iter().chain(*options).copied().collect();
            refused(&arguments, &["--pin", expected]);
        }
    }
}

#[test]
fn rings_that_cannot_be() {
    let cases = [
        ("some", "expected a number of blocks, auto or none"),
        ("1", "must be between 2 and 64"),
        ("65", "must be between 2 and 64"),
        // The number of positions is a power of two.
        ("63", "what no attention of the model can be cut into"),
    ];
    for (blocks, expected) in cases {
        for command in ["plan", "run", "verify"] {
            refused(&[command, DEMO, "--ring", blocks], &["--ring", expected]);
        }
    }
}

#[test]
fn loss_chunks_that_cannot_be() {
    let cases = [
        ("some", "expected a number of chunks, auto or none"),
        ("1", "must be between 2 and 256"),
        ("257", "must be between 2 and 256"),
        // The number of positions is a power of two.
        ("63", "what no cross-entropy over a linear layer of the model can be cut into"),
    ];
    for (chunks, expected) in cases {
        for command in ["plan", "run", "verify"] {
            refused(&[command, DEMO, "--loss-chunks", chunks], &["--loss-chunks", expected]);
        }
    }
}

/// On GPUs fused attention stores no scores; here they would exceed the memory of any machine.
#[test]
fn what_this_machine_has_no_room_for_is_refused_before_it_runs() {
    let scratch = Scratch::new();
    let config = r#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 4194304}"#;
    let config = scratch.file("config.json", config);
    for command in ["run", "verify"] {
        let said = altiplano(&[command, &config, "--seq", "524288", "--cluster", "dgx-h100:1"]);
        assert_eq!(said.code, Some(2), "{}", said.stderr);
        let error = said.stderr.lines().find(|line| line.starts_with("error: ")).expect("an error");
        assert!(error.contains("would need") && error.contains("--seq"), "{error}");
    }
}

/// The depth of a model is that of no recursion.
#[test]
fn chains_of_thousands_of_ops_are_planned() {
    let scratch = Scratch::new();
    let op = |i: usize| match i {
        0 => "  %1 = stablehlo.tanh %a : tensor<f32>\n".to_string(),
        i => format!("  %{} = stablehlo.tanh %{i} : tensor<f32>\n", i + 1),
    };
    let ops: String = (0..4000).map(op).collect();
    let text = format!(
        "module @m {{\n func.func public @main(%a: tensor<f32>) -> tensor<f32> {{\n{ops}  return %4000 : tensor<f32>\n }}\n}}\n"
    );
    let file = scratch.file("chain.mlir", text);
    assert!(succeeds(&["plan", &file, "--params", "0", "--cluster", "local:1"]).contains("1 stage"));
}

#[test]
fn files_that_are_cut_off_say_where_they_end() {
    let scratch = Scratch::new();
    for (text, place) in [("{", "1:1: "), ("{\n", "2:1: "), ("{\"format\": \"altiplano.plan\",\n \"ver", "2:5: ")] {
        let file = scratch.file("cut.json", text);
        for command in ["inspect", "prove", "verify", "show"] {
            refused(&[command, &file], &[&format!("cut.json:{place}"), "it ends here"]);
        }
    }
    let config = scratch.file("config.json", "{\"model_type\": \"llama\",\n \"hidden_size\": ");
    for options in [&[] as &[&str], &["--seq", "8"], &["--capacity-factor", "2"], &["--size", "n=8"]] {
        let plan = [&["plan", config.as_str(), "--cluster", "local:1"], options].concat();
        refused(&plan, &["config.json:2:16: ", "it ends here"]);
    }
}

/// As `altiplano ... | head` and `2> /dev/full`: files are written and exit codes mean what they mean elsewhere.
#[test]
fn outputs_that_nobody_reads_change_neither_files_nor_exit_codes() {
    let scratch = Scratch::new();
    let started = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_altiplano"));
        command.args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
        // A pipe that nobody reads.
        command.stdout(pipe().expect("a pipe").1);
        command
    };
    let code = |mut command: Command| command.status().expect("the binary starts").code();
    let file = scratch.path("plan.json").display().to_string();
    assert_eq!(code(started(&["plan", DEMO, "--cluster", "local:2", "-o", &file])), Some(0));
    succeeds(&["inspect", &file]);
    for wrong in [&["plan", "no-such-file.mlir"][..], &["plan", DEMO, "--no-such-option"]] {
        let mut command = started(wrong);
        command.stderr(OpenOptions::new().write(true).open("/dev/full").expect("a device"));
        assert_eq!(code(command), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_batch_that_is_too_large_names_a_value() {
    let scratch = Scratch::new();
    let config =
        json!({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 1000});
    let file = scratch.file("config.json", config.to_string());
    let expect =
        ["--global-batch: ", " 99999999999999 samples: the size of the input 'input_ids', i32[2,64] for 2 samples"];
    refused(&["plan", &file, "--seq", "64", "--cluster", "local:4", "--global-batch", "99999999999999"], &expect);
}

//! Models given as `config.json`, models without a loss, and models that are run without training, from the command
//! line.

use crate::common::{Scratch, altiplano, shared_model, succeeds};
use serde_json::Value;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}"#;
const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2}"#;

fn run(arguments: &[&str], options: &str) -> String {
    succeeds(&arguments.iter().copied().chain(options.split_whitespace()).collect::<Vec<_>>())
}

#[test]
fn a_config_is_planned_trained_and_verified() {
    let scratch = Scratch::new();
    for (name, config) in [("gpt2.json", GPT2), ("mixtral.json", MIXTRAL)] {
        let config = scratch.file(name, config);
        for plan in ["--dp 2", "--tp 2", "--pp 2", "--cluster local:4"] {
            let said = run(&["verify", &config, "--global-batch", "4", "--seq", "8"], plan);
            assert!(said.contains("the numbers agree"), "{said}");
        }
    }
}

#[test]
fn the_gates_of_a_layer_are_one_op() {
    let scratch = Scratch::new();
    let config = scratch.file("mixtral.json", MIXTRAL);
    let shown = run(&["show", &config], "--seq 8");
    assert_eq!(shown.matches(" = gates(").count(), 2, "{shown}");
    assert!(!shown.contains(" = softmax("), "{shown}");
}

#[test]
fn the_batch_is_the_one_that_is_asked_for() {
    let scratch = Scratch::new();
    let config = scratch.file("config.json", GPT2);
    let check = |options: &str, batch: u64, microbatches: u64| {
        let plan: Value = serde_json::from_str(&run(&["plan", &config, "--json"], options)).expect("JSON");
        assert_eq!(
            (&plan["global_batch"], &plan["num_microbatches"]),
            (&batch.into(), &microbatches.into()),
            "{options}"
        );
    };
    check("--cluster local:1 --num-microbatches 1", 1, 1);
    check("--global-batch 12 --microbatch 3", 12, 4);
    check("--microbatch 3 --num-microbatches 2", 6, 2);
    check("--microbatch 3", 3, 1);
}

#[test]
fn what_is_taken_for_granted_is_said() {
    let scratch = Scratch::new();
    let said = |name: &str, content: &str, command: &str, options: &[&str]| {
        let config = scratch.file(name, content);
        altiplano(&[&[command, &config], options].concat())
    };
    let one_sample = "note: the batch is set to one sample; change it by --global-batch N";
    assert!(said("a.json", GPT2, "plan", &[]).stderr.contains(one_sample));
    assert!(!said("a.json", GPT2, "plan", &["--global-batch", "4"]).stderr.contains(one_sample));
    assert!(!said("a.json", GPT2, "show", &[]).stderr.contains(one_sample));
    let other = GPT2.replace("\"gpt2\"", "\"gpt2\", \"architectures\": [\"GPT2ForTokenClassification\"]");
    assert!(
        said("b.json", &other, "plan", &[]).stderr.contains("note: architectures: a GPT2ForTokenClassification has")
    );
    // Some editors write a byte-order mark.
    assert_eq!(said("c.json", &format!("\u{feff}{GPT2}"), "show", &[]).code, Some(0));
    for (content, expected) in [
        ("{\"hidden_size\": 64}", "model_type: is missing"),
        (&GPT2.replace("n_head", "n_layer"), "n_layer: is there twice"),
    ] {
        let output = said("d.json", content, "show", &[]);
        assert!(output.code == Some(2) && output.stderr.contains(expected), "{}", output.stderr);
    }
}

#[test]
fn a_folder_is_its_config() {
    let scratch = Scratch::new();
    let folder = scratch.path("models/Tiny-1.5");
    std::fs::create_dir_all(&folder).expect("a folder");
    let refused = altiplano(&["plan", &folder.display().to_string()]);
    assert!(refused.code == Some(2) && refused.stderr.contains("Tiny-1.5: a folder without a config.json"));
    std::fs::write(folder.join("adapter_config.json"), "{}").expect("a file");
    let refused = altiplano(&["show", &folder.display().to_string()]);
    assert!(refused.code == Some(2) && refused.stderr.contains("give the folder of the model that it adapts"));
    std::fs::write(folder.join("config.json"), GPT2).expect("a file");
    let of_folder = run(&["show", &folder.display().to_string()], "--seq 8");
    let of_file = run(&["show", &folder.join("config.json").display().to_string()], "--seq 8");
    assert!(of_folder.contains("Tiny-1.5") || of_folder == of_file, "{of_folder}");
    std::fs::write(folder.join("config.json"), GPT2.replace("61", "-61")).expect("a file");
    let refused = altiplano(&["plan", &folder.display().to_string()]);
    assert!(
        refused.code == Some(2) && refused.stderr.contains("config.json: vocab_size: expected"),
        "{}",
        refused.stderr
    );
}

/// A result that is no loss causes no warning about an odd loss.
#[test]
fn a_model_without_a_loss_is_shown_without_complaint() {
    let scratch = Scratch::new();
    let config = scratch.file("config.json", GPT2);
    let graph = scratch.path("graph.json").display().to_string();
    run(&["import", &config, "-o", &graph], "--seq 8 --loss none");
    let shown = altiplano(&["show", &graph]);
    assert_eq!((shown.code, shown.stderr.as_str()), (Some(0), ""));
}

/// A loss attached to the results of a config's model equals the model's own loss.
#[test]
fn a_loss_is_attached() {
    let scratch = Scratch::new();
    let config = scratch.file("config.json", GPT2);
    let graph = scratch.path("graph.json").display().to_string();
    run(&["import", &config, "-o", &graph], "--seq 8 --loss none");
    let loss = |model: &str, options: &str| {
        let said = run(&["verify", model, "--global-batch", "4"], options);
        said.lines().find(|l| l.starts_with("loss ")).expect("a loss").to_string()
    };
    let own = loss(&config, "--seq 8");
    assert_eq!(loss(&graph, "--loss cross-entropy"), own);
    assert_eq!(loss(&config, "--seq 8 --loss cross-entropy"), own);
    assert_ne!(loss(&graph, "--loss mse"), own);

    let output = altiplano(&["plan", &graph]);
    let error = output.stderr;
    assert_eq!(output.code, Some(2), "{error}");
    for part in ["f32[1,8,61], no scalar and so no loss", "--loss cross-entropy", "--loss mse", "--loss none"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_model_is_run_without_training() {
    let scratch = Scratch::new();
    for (name, config) in [("gpt2.json", GPT2), ("mixtral.json", MIXTRAL)] {
        let config = scratch.file(name, config);
        let model = [&config, "--seq", "8", "--loss", "none", "--global-batch", "8"];
        for plan in
            ["--dp 2", "--tp 2", "--pp 2", "--pp 2 --num-microbatches 4", "--dp 4 --zero 3", "--cluster local:4"]
        {
            let said = run(&[&["verify"], model.as_slice()].concat(), plan);
            assert!(said.contains("results          agrees") && !said.contains("loss"), "{said}");
        }
        let report = run(&[&["plan"], model.as_slice()].concat(), "--cluster dgx-a100:1");
        assert!(report.contains("run, not trained") && report.contains("s/batch"), "{report}");
        for part in ["optimizer", "gradients", "ZeRO-1", "backward"] {
            assert!(!report.contains(part), "there should be no '{part}':\n{report}");
        }
        let results = scratch.path("results.safetensors");
        let output = results.display().to_string();
        let said = run(&[&["run"], model.as_slice(), &["--output", &output]].concat(), "--steps 2 --pp 2");
        assert!(said.contains("batch    2") && said.contains("samples/s"), "{said}");
        let tensors = altiplano::runtime::data::read_safetensors(&results).expect("results");
        assert_eq!(tensors["result/0"].ty.shape, [8, 8, 61]);
    }
}

/// Checkpoints of a model without its head omit the model's name from tensor names.
#[test]
fn weights_load_from_checkpoints_with_and_without_a_head() {
    let scratch = Scratch::new();
    let config = scratch.file("config.json", GPT2);
    let model = altiplano::load_model(config.as_ref(), &Default::default()).expect("a model");
    let path = |name: &str| scratch.path(name).display().to_string();
    let save = |name: &str, rename: &dyn Fn(&str) -> String| {
        let tensor = |(v, name): (_, &str)| {
            let ty = model.graph.ty(v).clone();
            let values: Vec<f64> = (0..ty.elements()).map(|i| (i % 7) as f64 / 7.0 - 0.4).collect();
            (rename(name), altiplano::runtime::HostTensor::from_f64(ty, &values))
        };
        let tensors = model.graph.parameters().map(tensor).collect();
        altiplano::runtime::data::write_safetensors(path(name).as_ref(), &tensors).expect("a file");
        run(&["verify", &config, "--weights", &path(name)], "--global-batch 2 --seq 8 --cluster local:1")
    };
    let whole = save("whole.safetensors", &str::to_string);
    let headless = save("headless.safetensors", &|name| name.trim_start_matches("transformer.").to_string());
    assert_eq!(whole, headless);
    let output = altiplano(&["verify", &config, "--weights", &path("none.safetensors")]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
    assert_ne!(whole, run(&["verify", &config], "--global-batch 2 --seq 8 --cluster local:1"));
}

/// GPT-2 small as exported by JAX, and from its config. Memory is compared only with fixed storage of state: among
/// plans whose predictions agree within half a percent, either may be the leaner.
#[test]
fn a_config_plans_like_an_export() {
    let Some(exported) = shared_model("gpt2-small.mlir") else { return };
    let scratch = Scratch::new();
    let config = r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}"#;
    let config = scratch.file("config.json", config);
    let free = "--cluster dgx-a100:1";
    for options in [
        free,
        "--cluster dgx-a100:1 --zero 0",
        "--cluster dgx-a100:2 --pp 4 --dp 4",
        "--cluster p3.16xlarge:1 --dp 4 --tp 2",
    ] {
        let predicted = |model: &str| {
            let said = run(&["plan", model, "--json", "--global-batch", "64"], options);
            let plan: Value = serde_json::from_str(&said).expect("JSON");
            let bytes = plan["predicted"]["peak_bytes"].as_array().expect("a list").iter().filter_map(Value::as_f64);
            [plan["predicted"]["step_time_s"].as_f64().expect("seconds"), bytes.fold(0.0, f64::max)]
        };
        let compared = if options == free { 1 } else { 2 };
        for (ours, theirs) in predicted(&config).into_iter().zip(predicted(&exported)).take(compared) {
            assert!((ours / theirs - 1.0).abs() < 0.02, "{options}: {ours} and {theirs}");
        }
    }
}

/// Training takes at least half of the parameters' memory in addition.
#[test]
fn running_needs_less_than_training() {
    let scratch = Scratch::new();
    let config = scratch.file("config.json", GPT2);
    let predicted = |options: &str| {
        let plan: Value = serde_json::from_str(&run(&["plan", &config, "--json"], options)).expect("JSON");
        let peak = plan["predicted"]["peak_bytes"][0].as_f64().expect("bytes");
        (peak, plan["predicted"]["step_time_s"].as_f64().expect("seconds"))
    };
    let trained = predicted("--cluster local:1 --global-batch 8 --num-microbatches 1");
    let run = predicted("--cluster local:1 --global-batch 8 --num-microbatches 1 --loss none");
    assert!(run.0 < 0.5 * trained.0 && run.1 < 0.5 * trained.1, "{run:?} {trained:?}");
}

#[test]
fn options_that_do_not_go_together_are_told() {
    let scratch = Scratch::new();
    let config = scratch.file("config.json", GPT2);
    let check = |arguments: &[&str], expected: &str| {
        let output = altiplano(arguments);
        let error = output.stderr;
        assert_eq!(output.code, Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    };
    check(&["plan", &config, "--loss", "none", "--optimizer", "sgd"], "--optimizer: is a training option");
    check(&["plan", &config, "--loss", "none", "--zero", "1"], "--zero: is a training option");
    check(&["run", &config, "--output", "x.safetensors"], "--output: a training step has no results");
    check(&["plan", crate::common::DEMO, "--seq", "8"], "--seq: applies only to Hugging Face configs");
    check(&["plan", &config, "--size", "batch=8"], "--size: applies only to files that leave sizes open");
    check(&["plan", &config, "--seq", "17"], "--seq: 17 tokens are more than the 16 positions");
    let nothing = scratch.file("notes.txt", "hello");
    check(&["plan", &nothing], "torch.export.save");
}

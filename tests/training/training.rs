//! Training end to end: data files, learning-rate schedules, metrics and options files, from the command line.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::ir::optimizer::Optimizer;
use std::path::Path;

/// The lines of a metrics file.
fn metrics(file: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(file).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn ids(count: u32) -> Vec<u8> {
    (0..count).flat_map(|i| ((i * i + 7 * i) as u16 % 512).to_le_bytes()).collect()
}

/// The same ids as raw numbers and as NumPy arrays give the same losses. Shuffling changes them, but equally under any
/// plan.
#[test]
fn files_of_ids_are_trained_on() {
    let scratch = Scratch::new();
    let bytes = ids(3000);
    let raw = scratch.file("ids.u16", &bytes);
    let bin = scratch.file("ids.bin", &bytes);
    let header = format!("{:<117}\n", "{'descr': '<u2', 'fortran_order': False, 'shape': (3000,), }");
    let npy = scratch.file("ids.npy", [&b"\x93NUMPY\x01\x00\x76\x00"[..], header.as_bytes(), &bytes].concat());
    let losses = |words: &[&str]| -> Vec<f64> {
        let file = scratch.path("metrics.jsonl");
        let file_text = file.display().to_string();
        let said = succeeds(&[&["run", DEMO, "--steps", "6", "--metrics", &file_text], words].concat());
        assert!(said.contains("waiting for data: ") && said.contains("'tokens' takes"), "{said}");
        metrics(&file).iter().map(|line| line["loss"].as_f64().expect("a loss")).collect()
    };
    let one = ["--cluster", "local:1"];
    let as_they_come = losses(&[&["--data", &raw], &one[..]].concat());
    assert_eq!(as_they_come, losses(&[&["--data", &npy], &one[..]].concat()));
    assert_eq!(as_they_come, losses(&[&["--data", &bin, "--token-type", "u16"], &one[..]].concat()));
    let shuffled = losses(&[&["--data", &raw, "--shuffle"], &one[..]].concat());
    assert_ne!(as_they_come, shuffled);
    let two = losses(&["--data", &raw, "--shuffle=0", "--cluster", "local:2", "--pp", "2"]);
    assert!(two.iter().zip(&shuffled).all(|(a, b)| (a - b).abs() < 1e-4), "{two:?} {shuffled:?}");

    let refused = |words: &[&str], expected: &str| {
        let output = altiplano(&[&["run", DEMO, "--steps", "2"], words].concat());
        assert_eq!(output.code, Some(2), "{}{}", output.stdout, output.stderr);
        assert!(output.stderr.contains(expected), "{}", output.stderr);
    };
    refused(&["--data", &bin], "by --token-type u16|u32");
    refused(&["--data", &scratch.file("few.u16", &bytes[..200])], "fewer than the 8 of one batch");
    refused(&["--data", &scratch.file("odd.u16", &bytes[..201])], "no multiple of its element size");
    refused(&["--data", &scratch.file("large.u16", bytes.iter().map(|_| 255).collect::<Vec<u8>>())], "holds 65535");
    std::fs::create_dir(scratch.path("empty")).expect("a folder");
    refused(&["--data", &scratch.path("empty").display().to_string()], "no .safetensors file");
}

/// Options in a file act as if typed, and typed options take precedence.
#[test]
fn options_come_from_a_file() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let data = scratch.file("ids.u16", ids(3000));
    let text = format!(
        "# A run.\nsteps = 5\nlr = 0.01\nlr-schedule = \"linear\"\nlr-warmup = 2\ndata = '{data}'\nshuffle = true\ncluster = \"local:2\"\ndp = 2\nmetrics = '{}'\nresume = false\npin = []\n",
        path("a.jsonl")
    );
    let config = scratch.file("train.toml", &text);
    succeeds(&["run", DEMO, "--config", &config]);
    succeeds(&["run", "--config", &config, DEMO, "--steps", "3", "--lr-steps=5", "--metrics", &path("b.jsonl")]);
    let typed = ["--lr-schedule", "linear", "--lr-warmup", "2", "--shuffle", "--cluster", "local:2", "--dp", "2"];
    let rest = ["run", DEMO, "--steps", "5", "--lr", "0.01", "--data", &data, "--metrics", &path("c.jsonl")];
    succeeds(&[&rest[..], &typed].concat());
    let course = |name: &str| -> Vec<(serde_json::Value, serde_json::Value)> {
        metrics(&scratch.path(name)).iter().map(|line| (line["loss"].clone(), line["learning_rate"].clone())).collect()
    };
    assert_eq!(course("a.jsonl"), course("c.jsonl"));
    assert_eq!(course("a.jsonl")[..3], course("b.jsonl"));
    let rates: Vec<f64> = course("a.jsonl").iter().map(|line| line.1.as_f64().expect("a rate")).collect();
    let expected = [0.005, 0.01, 0.01 * 2.0 / 3.0, 0.01 / 3.0, 0.0];
    assert!(rates.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{rates:?}");

    // An option may require another one that is in the file.
    let folder = path("checkpoints");
    let with = scratch.file("with.toml", format!("steps = 1\ncheckpoint = '{folder}'\n"));
    succeeds(&["run", DEMO, "--config", &with]);
    let said = succeeds(&["run", DEMO, "--config", &with, "--resume"]);
    assert!(said.contains("has all 1 steps"), "{said}");
    let without = scratch.file("without.toml", "steps = 1\n");
    for words in [&["run", DEMO, "--config", &without, "--resume"][..], &["run", DEMO, "--resume"], &["run"]] {
        assert_eq!(altiplano(words).code, Some(2), "{words:?}");
    }

    for (text, place) in [
        ("steps = 5\nsteeps = 4\n", ":2:1: `run` has no option 'steeps'; similar names are 'steps'"),
        ("steps = 5\n\nlr = \"fast\"\n", ":3:6: invalid value 'fast' for '--lr <X>'"),
        ("steps = [5]\n", ":1:9: 'steps' takes a string or a number"),
        ("steps = 5\nresume = 3\n", ":2:10: 'resume' is true or false"),
        ("steps = \n", ":1:9: "),
        ("[data]\nfile = \"x\"\n", ":1:1: 'data' takes a string or a number"),
        ("config = \"train.toml\"\n", ":1:1: `run` has no option 'config'"),
        ("lr-schedule = \"exponential\"\n", "--lr-final: an exponential never falls to 0"),
        ("lr-schedule = \"step\"\n", "--lr-every: "),
    ] {
        let output = altiplano(&["run", DEMO, "--config", &scratch.file("bad.toml", text)]);
        assert_eq!(output.code, Some(2), "{text}: {}", output.stderr);
        assert!(output.stderr.contains(place), "{text}: {}", output.stderr);
    }
    let output = altiplano(&["run", DEMO, "--config", &path("none.toml")]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
}

/// Evaluation does not affect training, and every plan finds the same held-out loss. On training data, the loss before
/// a step is that of the step.
#[test]
fn held_out_data_is_looked_at() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let data = scratch.file("ids.u16", ids(3000));
    // Exactly one batch of 8 samples of 64 tokens.
    let one_batch = scratch.file("one.u16", &ids(513)[..]);
    let run = |name: &str, words: &[&str]| -> Vec<serde_json::Value> {
        let file = path(name);
        succeeds(&[&["run", DEMO, "--steps", "5", "--metrics", &file], words].concat());
        metrics(Path::new(&file))
    };
    let of = |lines: &[serde_json::Value], key: &str| -> Vec<f64> {
        lines.iter().filter_map(|line| line[key].as_f64()).collect()
    };
    let near = |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4 * b);
    let eval = ["--eval-data", &one_batch, "--eval-every", "2", "--eval-steps", "1"];
    let one = run("one.jsonl", &[&["--data", &data, "--cluster", "local:1"][..], &eval].concat());
    assert_eq!(of(&one, "step"), [1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0, 5.0]);
    assert_eq!(of(&one, "eval_loss").len(), 3);
    let plain = run("plain.jsonl", &["--data", &data, "--cluster", "local:1"]);
    assert_eq!(of(&plain, "loss"), of(&one, "loss"));
    for words in [
        &["--cluster", "local:2", "--pp", "2"][..],
        &["--cluster", "local:4", "--dp", "4", "--zero", "3"],
        &["--cluster", "local:4", "--tp", "2", "--pp", "2", "--schedule", "zb-h1"],
        &["--cluster", "local:2", "--pp", "2", "--virtual-stages", "2", "--num-microbatches", "4"],
        &["--cluster", "local:6", "--parameter-servers", "2"],
    ] {
        let many = run("many.jsonl", &[&["--data", &data], words, &eval].concat());
        assert!(near(&of(&many, "eval_loss"), &of(&one, "eval_loss")), "{words:?}: {many:?}");
    }
    // On the training batch, the loss after a step is the one from which the next step starts.
    let every = ["--data", &one_batch, "--eval-data", &one_batch, "--eval-every", "1", "--eval-steps", "3"];
    let known = run("known.jsonl", &[&every[..], &["--cluster", "local:2"]].concat());
    assert!(near(&of(&known, "eval_loss")[..4], &of(&known, "loss")[1..]), "{known:?}");
    // Asynchronous servers have newer weights than workers: those in a checkpoint.
    let (folder, weights) = (path("checkpoints"), path("weights.safetensors"));
    let asynchronous = ["--cluster", "local:6", "--parameter-servers", "2", "--asynchronous", "--checkpoint", &folder];
    let newest = run("newest.jsonl", &[&["--data", &data][..], &asynchronous, &eval].concat());
    succeeds(&["checkpoint", &folder, "-o", &weights]);
    let from = run("from.jsonl", &["--data", &one_batch, "--cluster", "local:1", "--weights", &weights]);
    let (found, expected) = (of(&newest, "eval_loss")[2], of(&from, "loss")[0]);
    assert!((found - expected).abs() < 1e-6 * expected, "{found} and {expected}");

    let output = altiplano(&["run", DEMO, "--loss", "none", "--eval-data", &one_batch]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
    assert_eq!(altiplano(&["run", DEMO, "--eval-every", "3"]).code, Some(2));
}

/// Metrics include gradient norms and the noise scale, which needs a batch of several parts.
#[test]
fn norms_and_noise_are_measured() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let data = scratch.file("ids.u16", ids(6000));
    let file = path("noise.jsonl");
    let rest = ["--steps", "40", "--data", &data, "--shuffle", "--optimizer", "lamb", "--metrics", &file];
    let cluster = ["--cluster", "local:2", "--dp", "2", "--zero", "0", "--measure-noise-scale", "--clip-norm", "1"];
    let said = succeeds(&[&["run", DEMO][..], &rest, &cluster].concat());
    assert!(said.contains("gradient noise scale: "), "{said}");
    let lines = metrics(Path::new(&file));
    assert!(lines.iter().all(|line| line["gradient_norm"].as_f64().is_some_and(|norm| norm > 0.0)), "{lines:?}");
    let output = altiplano(&["run", DEMO, "--cluster", "local:1", "--num-microbatches", "1", "--measure-noise-scale"]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
    assert!(output.stderr.contains("needs several microbatches"), "{}", output.stderr);
    let output = altiplano(&["run", DEMO, "--clip-norm", "0"]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);

    // A plan stores its clipping norm.
    let plan = path("plan.json");
    succeeds(&["plan", DEMO, "--clip-norm", "0.5", "--optimizer", "lars", "-o", &plan]);
    assert!(succeeds(&["inspect", &plan]).contains("optimizer lars, gradients clipped at norm 0.5"));
    assert!(succeeds(&["inspect", &plan, "--programs"]).contains("stage0 norm"));
    let verified = succeeds(&["verify", DEMO, "--dp", "2", "--pp", "2", "--optimizer", "lamb", "--clip-norm", "0.5"]);
    assert!(verified.contains("the numbers agree"), "{verified}");
}

/// Optimizer settings are options and keys of a file; settings that an optimizer lacks are rejected.
#[test]
fn settings_of_optimizers_are_options() {
    let scratch = Scratch::new();
    let options: [(&str, &[(&str, f64)]); 7] = [
        ("sgd", &[("momentum", 0.5), ("weight-decay", 0.1)]),
        ("adamw", &[("beta1", 0.5), ("beta2", 0.75), ("epsilon", 0.5), ("weight-decay", 0.25)]),
        ("rmsprop", &[("decay", 0.5), ("epsilon", 0.25), ("momentum", 0.75)]),
        ("adagrad", &[("epsilon", 0.25)]),
        ("adadelta", &[("rho", 0.5), ("epsilon", 0.25)]),
        ("larc", &[("trust", 0.5), ("momentum", 0.25)]),
        ("lamb", &[("beta2", 0.5), ("epsilon", 0.25)]),
    ];
    let file = scratch.path("plan.json").display().to_string();
    for (optimizer, settings) in options {
        let typed: Vec<String> = settings.iter().map(|(name, x)| format!("--{name}={x}")).collect();
        let typed: Vec<&str> = typed.iter().map(String::as_str).collect();
        let fixed = ["plan", DEMO, "--cluster", "local:1", "--optimizer", optimizer, "-o", &file];
        succeeds(&[&fixed[..], &typed].concat());
        let plan: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&file).expect("a plan")).expect("JSON");
        for (name, x) in settings {
            assert_eq!(plan["optimizer"][optimizer][name.replace('-', "_")], *x, "{optimizer}: {name}");
        }
        assert!(
            Optimizer::parse(optimizer)
                .is_some_and(|mut o| { settings.iter().all(|(name, _)| o.setting(&name.replace('-', "_")).is_some()) })
        );
    }
    // One step of SGD shows the effect of its decay.
    let config =
        scratch.file("train.toml", "optimizer = \"sgd\"\nweight-decay = 0.5\nmomentum = 0.0\nsteps = 2\nlr = 0.5\n");
    let lines =
        |said: String| said.lines().filter(|l| l.starts_with("step ")).map(|l| l[..24].to_string()).collect::<Vec<_>>();
    let of_file = lines(succeeds(&["run", DEMO, "--cluster", "local:1", "--config", &config]));
    let plain = lines(succeeds(&["run", DEMO, "--cluster", "local:1", "--config", &config, "--weight-decay", "0"]));
    assert_eq!(of_file[0], plain[0]);
    assert_ne!(of_file[1], plain[1]);
    let refused: [(&[&str], &str); 6] = [
        (&["--optimizer", "sgd", "--beta1", "0.5"], "--beta1: the optimizer has no such setting"),
        (&["--momentum", "0.5"], "--momentum: the optimizer has no such setting"),
        (&["--optimizer", "adagrad", "--trust", "0.5"], "--trust: the optimizer has no such setting"),
        (&["--beta1", "1"], "below 1"),
        (&["--epsilon", "0"], "above 0"),
        (&["--loss", "none", "--weight-decay", "0.1"], "--weight-decay"),
    ];
    for (options, part) in refused {
        let output = altiplano(&[&["run", DEMO][..], options].concat());
        assert_eq!(output.code, Some(2), "{options:?}");
        assert!(output.stderr.contains(part), "{options:?}: {}", output.stderr);
    }
}

#[test]
fn a_recommendation_is_run() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    for (optimizer, taken) in [("sgd", "sgd"), ("adamw", "adamw"), ("lamb", "lamb")] {
        let config = path("train.toml");
        succeeds(
            &[
                &["scale", DEMO, "--cluster", "p3.16xlarge", "--nodes", "1", "--global-batch", "16", "--samples", "64"]
                    [..],
                &["--learning-rate", "1e-3", "--base-batch", "4", "--optimizer", optimizer, "--write-config", &config],
            ]
            .concat(),
        );
        let text = std::fs::read_to_string(&config).expect("the config");
        let expected = if optimizer == "sgd" { "lr = 0.004 " } else { "lr = 0.002 " };
        assert!(text.contains(expected) && text.contains("global-batch = 16\n"), "{text}");
        assert!(text.contains(&format!("optimizer = \"{taken}\"\n")) && text.contains("\nlr-warmup = "), "{text}");
        let said = succeeds(&["run", DEMO, "--config", &config, "--cluster", "local:2"]);
        assert!(said.contains("step    4  loss"), "{said}");
    }
    let config = path("bare.toml");
    succeeds(&["scale", DEMO, "--cluster", "p3.16xlarge", "--nodes", "1", "--write-config", &config]);
    succeeds(&["run", DEMO, "--config", &config, "--cluster", "local:1", "--steps", "1"]);
}

#[test]
fn input_is_read_without_training() {
    let scratch = Scratch::new();
    let data = scratch.file("ids.u16", ids(3000));
    let said = succeeds(&["bench-input", DEMO, "--cluster", "local:1", "--data", &data, "--shuffle", "--batches", "7"]);
    assert!(said.contains("opened 1 file in ") && said.contains("read 7 batches of 8 samples in "), "{said}");
    assert!(said.contains(" samples/s, "), "{said}");
    let output = altiplano(&["bench-input", DEMO, "--cluster", "local:1"]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
}

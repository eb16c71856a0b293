//! Stages given by hand: by numbers and names of blocks, and of unequal sizes. Such plans compute what one device does.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::ir::plan::Plan;
use altiplano::load_plan;

/// A model whose parameters have dotted names.
const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 64, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}"#;

fn planned(model: &str, options: &[&str]) -> Plan {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&[&["plan", model, "-o", &file], options].concat());
    load_plan(file.as_ref()).expect("a plan")
}

/// Three blocks, and a classifier with a number in its name.
const NETWORK: &str = r#"module @network {
  func.func public @main(%arg0: tensor<8x8xf32> loc("params['body.0.weight']"), %arg1: tensor<8x8xf32> loc("params['body.1.weight']"), %arg2: tensor<8x8xf32> loc("params['body.2.weight']"), %arg3: tensor<8x4xf32> loc("params['classifier.1.weight']"), %arg4: tensor<16x8xf32> loc("x"), %arg5: tensor<16x4xf32> loc("t")) -> tensor<f32> {
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.dot_general %arg4, %arg0, contracting_dims = [1] x [0] : (tensor<16x8xf32>, tensor<8x8xf32>) -> tensor<16x8xf32>
    %1 = stablehlo.tanh %0 : tensor<16x8xf32>
    %2 = stablehlo.dot_general %1, %arg1, contracting_dims = [1] x [0] : (tensor<16x8xf32>, tensor<8x8xf32>) -> tensor<16x8xf32>
    %3 = stablehlo.tanh %2 : tensor<16x8xf32>
    %4 = stablehlo.dot_general %3, %arg2, contracting_dims = [1] x [0] : (tensor<16x8xf32>, tensor<8x8xf32>) -> tensor<16x8xf32>
    %5 = stablehlo.tanh %4 : tensor<16x8xf32>
    %6 = stablehlo.dot_general %5, %arg3, contracting_dims = [1] x [0] : (tensor<16x8xf32>, tensor<8x4xf32>) -> tensor<16x4xf32>
    %7 = stablehlo.subtract %6, %arg5 : tensor<16x4xf32>
    %8 = stablehlo.multiply %7, %7 : tensor<16x4xf32>
    %9 = stablehlo.reduce(%8 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<16x4xf32>, tensor<f32>) -> tensor<f32>
    return %9 : tensor<f32>
  }
}
"#;

/// Devices and layers of each stage.
fn shape(plan: &Plan) -> (Vec<usize>, Vec<usize>) {
    plan.stages.iter().map(|stage| (stage.devices.len(), stage.layers.len())).unzip()
}

/// The number of the stage that holds each parameter of a block.
fn stages_of(plan: &Plan, block: &str) -> Vec<usize> {
    let holds = |stage: usize| plan.stages[stage].parameters.keys().any(|name| name.contains(block));
    (0..plan.stages.len()).filter(|&stage| holds(stage)).collect()
}

#[test]
fn blocks_by_number_and_by_name_give_the_same_stages() {
    let options = ["--cluster", "local:2", "--num-microbatches", "2"];
    let by_number = planned(DEMO, &[&options[..], &["--stages", "0,1-3"]].concat());
    let by_name = planned(DEMO, &[&options[..], &["--stages", "h0,h1-h3"]].concat());
    assert_eq!(by_number.layers, by_name.layers);
    assert_eq!(by_number.stages, by_name.stages);
    assert_eq!(stages_of(&by_name, "'h0'"), [0]);
    for block in ["'h1'", "'h2'", "'h3'"] {
        assert_eq!(stages_of(&by_name, block), [1], "{block}");
    }
}

/// Two unlike products, whose parameters have names without a path: a model without blocks.
const TWO: &str = r#"module @two {
  func.func public @main(%arg0: tensor<8x6xf32> loc("params['a']"), %arg1: tensor<6x4xf32> loc("params['b']"), %arg2: tensor<16x8xf32> loc("x")) -> tensor<f32> {
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.dot_general %arg2, %arg0, contracting_dims = [1] x [0] : (tensor<16x8xf32>, tensor<8x6xf32>) -> tensor<16x6xf32>
    %1 = stablehlo.tanh %0 : tensor<16x6xf32>
    %2 = stablehlo.dot_general %1, %arg1, contracting_dims = [1] x [0] : (tensor<16x6xf32>, tensor<6x4xf32>) -> tensor<16x4xf32>
    %3 = stablehlo.multiply %2, %2 : tensor<16x4xf32>
    %4 = stablehlo.reduce(%3 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<16x4xf32>, tensor<f32>) -> tensor<f32>
    return %4 : tensor<f32>
  }
}
"#;

#[test]
fn models_without_blocks_are_cut_by_names_of_parameters() {
    let scratch = Scratch::new();
    let two = scratch.file("two.mlir", TWO);
    let plan = planned(&two, &["--cluster", "local:2", "--stages", "a,b"]);
    assert_eq!((stages_of(&plan, "'a'"), stages_of(&plan, "'b'")), (vec![0], vec![1]));
    for (stages, problem) in
        [("a-b,b", "b is in the stage before"), ("b,a", "a is in the stage before"), ("0,1", "no blocks")]
    {
        let output = altiplano(&["plan", &two, "--cluster", "local:2", "--stages", stages]);
        assert_eq!(output.code, Some(2), "{stages}: {}", output.stderr);
        assert!(output.stderr.contains(problem), "{stages}: {}", output.stderr);
    }
}

#[test]
fn what_is_no_block_goes_with_its_neighbours() {
    let scratch = Scratch::new();
    let network = scratch.file("network.mlir", NETWORK);
    let plan = planned(&network, &["--cluster", "local:2", "--stages", "body.0,body.1-body.2"]);
    assert_eq!(stages_of(&plan, "body.0"), [0]);
    assert_eq!(stages_of(&plan, "classifier"), [1]);
    // A classifier with a number is a block too, where blocks are counted.
    let plan = planned(&network, &["--cluster", "local:2", "--stages", "0-1,2-3"]);
    assert_eq!((stages_of(&plan, "body.1"), stages_of(&plan, "body.2")), (vec![0], vec![1]));
}

#[test]
fn stages_have_the_devices_that_are_given() {
    let plan = planned(DEMO, &["--cluster", "local:3", "--stages", "0,1-3", "--stage-devices", "1,2"]);
    assert_eq!(shape(&plan).0, [1, 2]);
    assert_eq!(stages_of(&plan, "'h0'"), [0]);
    // The search cuts the model where only devices are given.
    let plan = planned(DEMO, &["--cluster", "local:4", "--stage-devices", "3,1"]);
    assert_eq!(shape(&plan).0, [3, 1]);
    let plan = planned(DEMO, &["--cluster", "local:4", "--stage-devices", "1,3", "--tp", "1"]);
    assert_eq!(shape(&plan).0, [1, 3]);
    assert!(plan.stages.iter().all(|stage| stage.mesh.axes[1].size == 1));
}

#[test]
fn stages_of_a_given_number_may_differ_in_size() {
    let plan = planned(DEMO, &["--cluster", "local:3", "--pp", "2", "--global-batch", "12"]);
    let mut sizes = shape(&plan).0;
    sizes.sort_unstable();
    assert_eq!(sizes, [1, 2]);
}

#[test]
fn given_stages_compute_what_one_device_does() {
    let scratch = Scratch::new();
    let llama = scratch.file("config.json", LLAMA);
    let of_config = ["--seq", "64", "--global-batch", "8"];
    let cases: [(&str, &[&str], &[&str]); 4] = [
        (DEMO, &["--cluster", "local:3"], &["--stages", "0-2,3", "--stage-devices", "2,1"]),
        (
            DEMO,
            &["--cluster", "local:6"],
            &["--stages", "0,1,2-3", "--stage-devices", "1,2,3", "--num-microbatches", "4"],
        ),
        (&llama, &of_config, &["--cluster", "local:4", "--stages", "layers.0-layers.3,layers.4-layers.5"]),
        (&llama, &of_config, &["--cluster", "local:4", "--stage-devices", "1,3", "--zero", "3"]),
    ];
    for (model, options, stages) in cases {
        let output = altiplano(&[&["verify", model], options, stages].concat());
        assert_eq!(output.code, Some(0), "{stages:?}: {}{}", output.stdout, output.stderr);
    }
}

#[test]
fn stages_that_cannot_be_are_refused() {
    let refused = |options: &[&str], problem: &str| {
        let cluster: &[&str] = if options.contains(&"--cluster") { &[] } else { &["--cluster", "local:4"] };
        let output = altiplano(&[&["plan", DEMO][..], options, cluster].concat());
        assert_eq!(output.code, Some(2), "{options:?}: {}", output.stderr);
        assert!(output.stderr.contains(problem), "{options:?}: {}", output.stderr);
    };
    refused(&["--stages", "0-1,3"], "begins with params.h3, but params.h2 comes next");
    refused(&["--stages", "0-1"], "params.h2 is in no stage; the model has 4, params.h0 to params.h3");
    refused(&["--stages", "0-1,2-9"], "--stages 9: is no block; the model has 4");
    refused(&["--stages", "h0-h1,h2-h7"], "h7: is in the name of no parameter");
    refused(&["--stages", "0-1,2-3", "--pp", "3"], "--pp: 3 is not the number of stages");
    refused(&["--stages", "0-1,2-3", "--stage-devices", "1"], "one number for each of the 2 stages");
    refused(&["--stages", "0-1,2-3", "--stage-devices", "2,3"], "is 5 devices, but the cluster has 4");
    refused(&["--stages", "0-1,2-3", "--stage-devices", "0,4"], "each stage needs a device");
    refused(&["--stages", "h1-h3"], "begins with params.h1, but params.h0 comes next");
    refused(&["--stages", "0-1,1-3"], "begins with params.h1, but params.h2 comes next");
    refused(&["--stages", "0-3,h3"], "h3 is in the stage before");
    refused(&["--stages", "1-0,2-3"], "0 comes before 1");
    refused(&["--cluster", "dgx-a100:2", "--stage-devices", "3,8"], "3 devices are neither a part of a node");
    refused(&["--stage-devices", "1,3", "--tp", "2"], "a stage of 1 devices cannot have");
    refused(&["--stages", "0-1,2-3", "--virtual-stages", "2"], "virtual-stages");
    refused(&["--stages", "0-1,2-3", "--target", "megatron"], "has stages of equal size only");
    refused(&["--stages", "0-"], "is no stage");
}

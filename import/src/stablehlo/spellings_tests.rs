//! Functions as frameworks print them. Each must become its composite, whatever surrounds it.

use crate::stablehlo;
use altiplano_ir::graph::Graph;
use altiplano_ir::simplify::simplify;
use altiplano_transforms::rewrite::rewrite;

/// Checks the names of the ops that this function body is rewritten to, without leaves, constants and data movement.
fn check(arguments: &str, results: &str, body: &str, expected: &[&str]) {
    let text = format!("func.func @main({arguments}) -> ({results}) {{\n{body}\n}}");
    let graph = match stablehlo::import(&text) {
        Ok(imported) => simplify(&imported.graph),
        Err(error) => panic!("{error}\n{text}"),
    };
    let rewritten = rewrite(&graph, &[]);
    let mut names = work(&rewritten);
    names.sort_unstable();
    assert_eq!(names, expected, "{graph}\n{rewritten}");
}

fn work(graph: &Graph) -> Vec<&'static str> {
    let moving = ["constant", "iota", "reshape", "transpose", "broadcast_in_dim"];
    let nodes = graph.nodes.iter().filter(|n| !n.op.is_leaf()).map(|n| n.op.name());
    nodes.filter(|name| !moving.contains(name)).collect()
}

/// Flax: the variance is a difference of means, each feature's factor comes first, and running statistics are updated.
const FLAX: &str = "
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %n = stablehlo.constant dense<36.0> : tensor<8xf32>
    %zeros = stablehlo.constant dense<0.0> : tensor<8xf32>
    %eps = stablehlo.constant dense<1.0e-05> : tensor<1x1x1x8xf32>
    %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<4x3x3x8xf32>, tensor<f32>) -> tensor<8xf32>
    %mean = stablehlo.divide %sum, %n : tensor<8xf32>
    %square = stablehlo.multiply %x, %x : tensor<4x3x3x8xf32>
    %squares = stablehlo.reduce(%square init: %zero) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<4x3x3x8xf32>, tensor<f32>) -> tensor<8xf32>
    %mean2 = stablehlo.divide %squares, %n : tensor<8xf32>
    %of_mean = stablehlo.multiply %mean, %mean : tensor<8xf32>
    %less = stablehlo.subtract %mean2, %of_mean : tensor<8xf32>
    %var = stablehlo.maximum %zeros, %less : tensor<8xf32>
    %mean4 = stablehlo.broadcast_in_dim %mean, dims = [3] : (tensor<8xf32>) -> tensor<1x1x1x8xf32>
    %means = stablehlo.broadcast_in_dim %mean4, dims = [0, 1, 2, 3] : (tensor<1x1x1x8xf32>) -> tensor<4x3x3x8xf32>
    %centred = stablehlo.subtract %x, %means : tensor<4x3x3x8xf32>
    %var4 = stablehlo.broadcast_in_dim %var, dims = [3] : (tensor<8xf32>) -> tensor<1x1x1x8xf32>
    %safe = stablehlo.add %var4, %eps : tensor<1x1x1x8xf32>
    %root = stablehlo.rsqrt %safe : tensor<1x1x1x8xf32>
    %w4 = stablehlo.broadcast_in_dim %w, dims = [3] : (tensor<8xf32>) -> tensor<1x1x1x8xf32>
    %factor = stablehlo.multiply %root, %w4 : tensor<1x1x1x8xf32>
    %factors = stablehlo.broadcast_in_dim %factor, dims = [0, 1, 2, 3] : (tensor<1x1x1x8xf32>) -> tensor<4x3x3x8xf32>
    %scaled = stablehlo.multiply %centred, %factors : tensor<4x3x3x8xf32>
    %b4 = stablehlo.broadcast_in_dim %b, dims = [3] : (tensor<8xf32>) -> tensor<1x1x1x8xf32>
    %biases = stablehlo.broadcast_in_dim %b4, dims = [0, 1, 2, 3] : (tensor<1x1x1x8xf32>) -> tensor<4x3x3x8xf32>
    %y = stablehlo.add %scaled, %biases : tensor<4x3x3x8xf32>";

#[test]
fn batch_norms_of_flax() {
    let arguments = "%x: tensor<4x3x3x8xf32>, %w: tensor<8xf32>, %b: tensor<8xf32>";
    let body = format!("{FLAX}\nreturn %y : tensor<4x3x3x8xf32>");
    check(arguments, "tensor<4x3x3x8xf32>", &body, &["batch_norm"]);
    let moved = format!(
        "{FLAX}
        %keep = stablehlo.constant dense<0.9> : tensor<8xf32>
        %move = stablehlo.constant dense<0.1> : tensor<8xf32>
        %kept = stablehlo.multiply %run, %keep : tensor<8xf32>
        %new = stablehlo.multiply %mean, %move : tensor<8xf32>
        %running = stablehlo.add %kept, %new : tensor<8xf32>
        return %y, %running : tensor<4x3x3x8xf32>, tensor<8xf32>"
    );
    let results = "tensor<4x3x3x8xf32>, tensor<8xf32>";
    let expected = ["add", "batch_norm", "mean", "multiply", "multiply"];
    check(&format!("{arguments}, %run: tensor<8xf32>"), results, &moved, &expected);
}

/// PyTorch, with features second: with given statistics, and with those of the batch.
#[test]
fn batch_norms_of_torch() {
    let rest = "
        %eps = stablehlo.constant dense<1.0e-05> : tensor<8xf32>
        %means = stablehlo.broadcast_in_dim %mean, dims = [1] : (tensor<8xf32>) -> tensor<4x8x3x3xf32>
        %centred = stablehlo.subtract %x, %means : tensor<4x8x3x3xf32>
        %safe = stablehlo.add %var, %eps : tensor<8xf32>
        %root = stablehlo.sqrt %safe : tensor<8xf32>
        %roots = stablehlo.broadcast_in_dim %root, dims = [1] : (tensor<8xf32>) -> tensor<4x8x3x3xf32>
        %ws = stablehlo.broadcast_in_dim %w, dims = [1] : (tensor<8xf32>) -> tensor<4x8x3x3xf32>
        %bs = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<8xf32>) -> tensor<4x8x3x3xf32>
        %normed = stablehlo.divide %centred, %roots : tensor<4x8x3x3xf32>
        %scaled = stablehlo.multiply %normed, %ws : tensor<4x8x3x3xf32>
        %y = stablehlo.add %scaled, %bs : tensor<4x8x3x3xf32>
        return %y : tensor<4x8x3x3xf32>";
    let arguments = "%x: tensor<4x8x3x3xf32>, %w: tensor<8xf32>, %b: tensor<8xf32>";
    let given = format!("{arguments}, %mean: tensor<8xf32>, %var: tensor<8xf32>");
    check(&given, "tensor<4x8x3x3xf32>", rest, &["batch_norm"]);
    let own = format!(
        "%zero = stablehlo.constant dense<0.0> : tensor<f32>
        %n = stablehlo.constant dense<36.0> : tensor<8xf32>
        %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0, 2, 3] : (tensor<4x8x3x3xf32>, tensor<f32>) -> tensor<8xf32>
        %mean = stablehlo.divide %sum, %n : tensor<8xf32>
        %m = stablehlo.broadcast_in_dim %mean, dims = [1] : (tensor<8xf32>) -> tensor<4x8x3x3xf32>
        %d = stablehlo.subtract %x, %m : tensor<4x8x3x3xf32>
        %d2 = stablehlo.multiply %d, %d : tensor<4x8x3x3xf32>
        %sum2 = stablehlo.reduce(%d2 init: %zero) applies stablehlo.add across dimensions = [0, 2, 3] : (tensor<4x8x3x3xf32>, tensor<f32>) -> tensor<8xf32>
        %var = stablehlo.divide %sum2, %n : tensor<8xf32>
        {rest}"
    );
    check(arguments, "tensor<4x8x3x3xf32>", &own, &["batch_norm"]);
}

/// A router in JAX: the greatest values of a softmax divided by their sum, and their positions.
#[test]
fn gates_of_jax() {
    let body = "
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %least = stablehlo.constant dense<0xFF800000> : tensor<f32>
        %most = stablehlo.reduce(%x init: %least) applies stablehlo.maximum across dimensions = [1] : (tensor<6x4xf32>, tensor<f32>) -> tensor<6xf32>
        %m = stablehlo.broadcast_in_dim %most, dims = [0] : (tensor<6xf32>) -> tensor<6x4xf32>
        %below = stablehlo.subtract %x, %m : tensor<6x4xf32>
        %e = stablehlo.exponential %below : tensor<6x4xf32>
        %s = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<6x4xf32>, tensor<f32>) -> tensor<6xf32>
        %sb = stablehlo.broadcast_in_dim %s, dims = [0] : (tensor<6xf32>) -> tensor<6x4xf32>
        %p = stablehlo.divide %e, %sb : tensor<6x4xf32>
        %best:2 = chlo.top_k(%p, k = 2) : tensor<6x4xf32> -> (tensor<6x2xf32>, tensor<6x2xi32>)
        %t = stablehlo.reduce(%best#0 init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<6x2xf32>, tensor<f32>) -> tensor<6xf32>
        %tb = stablehlo.broadcast_in_dim %t, dims = [0] : (tensor<6xf32>) -> tensor<6x2xf32>
        %w = stablehlo.divide %best#0, %tb : tensor<6x2xf32>
        return %w, %best#1 : tensor<6x2xf32>, tensor<6x2xi32>";
    let expected = ["arg_sort", "gates", "gather", "slice"];
    check("%x: tensor<6x4xf32>", "tensor<6x2xf32>, tensor<6x2xi32>", body, &expected);
}

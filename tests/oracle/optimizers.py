"""Optimizers beside PyTorch's: 20 steps of a small network in f32, by `altiplano run` and by torch.optim, from the same weights on
the same batches. Weights must agree within 1e-5 of each tensor's norm.

    optimizers.py ALTIPLANO FOLDER
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

STEPS, BATCH, TOLERANCE = 20, 8, 1e-5

# A network of two layers with a mean of squares as its loss; the batch is the first dimension of x and y.
MODEL = """module @mlp {
  func.func public @main(%arg0: tensor<5xf32> loc("b1"), %arg1: tensor<3xf32> loc("b2"), %arg2: tensor<4x5xf32> loc("w1"),
      %arg3: tensor<5x3xf32> loc("w2"), %arg4: tensor<8x4xf32> loc("x"), %arg5: tensor<8x3xf32> loc("y")) -> tensor<f32> {
    %0 = stablehlo.dot_general %arg4, %arg2, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x5xf32>) -> tensor<8x5xf32>
    %1 = stablehlo.broadcast_in_dim %arg0, dims = [1] : (tensor<5xf32>) -> tensor<8x5xf32>
    %2 = stablehlo.add %0, %1 : tensor<8x5xf32>
    %3 = stablehlo.tanh %2 : tensor<8x5xf32>
    %4 = stablehlo.dot_general %3, %arg3, contracting_dims = [1] x [0] : (tensor<8x5xf32>, tensor<5x3xf32>) -> tensor<8x3xf32>
    %5 = stablehlo.broadcast_in_dim %arg1, dims = [1] : (tensor<3xf32>) -> tensor<8x3xf32>
    %6 = stablehlo.add %4, %5 : tensor<8x3xf32>
    %7 = stablehlo.subtract %6, %arg5 : tensor<8x3xf32>
    %8 = stablehlo.multiply %7, %7 : tensor<8x3xf32>
    %cst = stablehlo.constant dense<0.0> : tensor<f32>
    %9 = stablehlo.reduce(%8 init: %cst) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x3xf32>, tensor<f32>) -> tensor<f32>
    %cst_0 = stablehlo.constant dense<24.0> : tensor<f32>
    %10 = stablehlo.divide %9, %cst_0 : tensor<f32>
    return %10 : tensor<f32>
  }
}
"""

# Name, the rate, our options, PyTorch's class and its arguments.
CASES = [
    ("sgd", 0.1, ["--momentum", "0"], torch.optim.SGD, {}),
    ("sgd", 0.05, ["--momentum", "0.9"], torch.optim.SGD, {"momentum": 0.9}),
    (
        "sgd",
        0.05,
        ["--momentum", "0.8", "--weight-decay", "0.1"],
        torch.optim.SGD,
        {"momentum": 0.8, "weight_decay": 0.1},
    ),
    ("adam", 0.01, [], torch.optim.Adam, {}),
    (
        "adam",
        0.01,
        ["--beta1", "0.8", "--beta2", "0.95", "--epsilon", "1e-6", "--weight-decay", "0.1"],
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    ),
    ("adamw", 0.01, [], torch.optim.AdamW, {}),
    ("adamw", 0.01, ["--weight-decay", "0.2"], torch.optim.AdamW, {"weight_decay": 0.2}),
    ("rmsprop", 0.01, [], torch.optim.RMSprop, {}),
    (
        "rmsprop",
        0.01,
        ["--decay", "0.9", "--momentum", "0.5", "--weight-decay", "0.1"],
        torch.optim.RMSprop,
        {"alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1},
    ),
    ("adagrad", 0.05, [], torch.optim.Adagrad, {}),
    ("adagrad", 0.05, ["--weight-decay", "0.1"], torch.optim.Adagrad, {"weight_decay": 0.1}),
    ("adadelta", 1.0, [], torch.optim.Adadelta, {"rho": 0.95}),
    (
        "adadelta",
        1.0,
        ["--rho", "0.9", "--epsilon", "1e-5", "--weight-decay", "0.1"],
        torch.optim.Adadelta,
        {"rho": 0.9, "eps": 1e-5, "weight_decay": 0.1},
    ),
]

# The second norm is one that gradients have at no step, so that nothing is scaled.
CLIPS = [None, 0.05, 100.0]
PLANS = [["--cluster", "local:1"], ["--cluster", "local:2", "--dp", "2"]]


def theirs(weights, data, rate, optimizer, arguments, clip):
    """The weights after all steps, by PyTorch."""
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in weights.items()}
    steps = optimizer(parameters.values(), lr=rate, **arguments)
    for step in range(STEPS):
        x, y = (torch.from_numpy(data[name][step * BATCH : (step + 1) * BATCH]) for name in ("x", "y"))
        steps.zero_grad()
        hidden = torch.tanh(x @ parameters["w1"] + parameters["b1"])
        loss = ((hidden @ parameters["w2"] + parameters["b2"] - y) ** 2).mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        steps.step()
    return {name: value.detach().numpy() for name, value in parameters.items()}


def ours(altiplano, folder, number, options):
    """The weights after all steps, by `altiplano run`."""
    checkpoints, file = folder / f"checkpoints{number}", folder / f"weights{number}.safetensors"
    given = ["--params", "b1,b2,w1,w2", "--weights", folder / "start.safetensors", "--data", folder / "data.safetensors"]
    run = [altiplano, "run", folder / "model.mlir", *given, "--steps", str(STEPS), "--checkpoint", checkpoints, *options]
    for command in (run, [altiplano, "checkpoint", checkpoints, "-o", file]):
        said = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if said.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: {said.stderr}")
    return load_file(file)


def main():
    altiplano, folder = Path(sys.argv[1]), Path(sys.argv[2])
    random = np.random.default_rng(7)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    weights = {"b1": 0.1 * normal(5), "b2": 0.1 * normal(3), "w1": 0.5 * normal(4, 5), "w2": 0.5 * normal(5, 3)}
    data = {"x": normal(STEPS * BATCH, 4), "y": normal(STEPS * BATCH, 3)}
    (folder / "model.mlir").write_text(MODEL)
    save_file(weights, folder / "start.safetensors")
    save_file(data, folder / "data.safetensors")
    failed, number = 0, 0
    for name, rate, settings, optimizer, arguments in CASES:
        for clip in CLIPS:
            expected = theirs(weights, data, rate, optimizer, arguments, clip)
            for plan in PLANS:
                number += 1
                clipping = [] if clip is None else ["--clip-norm", str(clip)]
                options = ["--optimizer", name, "--lr", str(rate), *settings, *clipping, *plan]
                found = ours(altiplano, folder, number, options)
                off = max(
                    float(np.linalg.norm(found[tensor] - value) / np.linalg.norm(value))
                    for tensor, value in expected.items()
                )
                verdict = "ok    " if off <= TOLERANCE else "FAILED"
                failed += off > TOLERANCE
                print(f"{verdict}  {' '.join(options)}: {off:.1e}")
    sys.exit(1 if failed else 0)


main()

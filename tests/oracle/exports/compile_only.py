"""Compiles exported JAX plans for H100s that are not there, and sets the collectives and the memory that XLA chose beside
those of the plan. Prints a table in Markdown.

    compile_only.py ALTIPLANO FOLDER [CASE]...

It needs JAX's plugin for CUDA and NVIDIA's compiler, without a driver: jax-cuda12-plugin and jax-cuda12-pjrt of JAX's
version, and nvidia-cuda-nvcc-cu12, all installed with --no-deps.
"""

import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path


def skipped(why):
    print(f"SKIPPED tests/oracle exports: plans are not compiled for GPUs: {why}")
    sys.exit(0)


try:
    import nvidia.cuda_nvcc
except ImportError:
    skipped("nvidia-cuda-nvcc-cu12 is not installed")

NVCC = Path(next(iter(nvidia.cuda_nvcc.__path__)))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PATH"] = f"{NVCC}/bin:" + os.environ["PATH"]
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={NVCC}"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# Properties of a device that is not there, which the compiler asks for. The figures are those that XLA prints for this device.
H100 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
GPT = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50304,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 16,
}
ONE = ["--pp", "1", "--num-microbatches", "1", "--ring", "none", "--loss-chunks", "none"]
# Model, nodes of eight H100s, samples, options.
CASES = {
    "gpt2-dp8": (GPT, 1, 64, [*ONE, "--dp", "8", "--zero", "0"]),
    "gpt2-dp8-zero1": (GPT, 1, 64, [*ONE, "--dp", "8", "--zero", "1"]),
    "gpt2-dp2-tp4": (GPT, 1, 64, [*ONE, "--dp", "2", "--tp", "4"]),
    "gpt2-searched": (GPT, 1, 64, ONE),
    "llama-fsdp32": (LLAMA, 4, 64, [*ONE, "--dp", "32", "--zero", "3"]),
    "llama-dp8-tp8": (LLAMA, 8, 64, [*ONE, "--dp", "8", "--tp", "8", "--zero", "1"]),
    "llama-dp32-tp8": (LLAMA, 32, 256, [*ONE, "--dp", "32", "--tp", "8", "--zero", "1", "--recompute", "selective"]),
    "mixtral-dp8-ep8": (MIXTRAL, 1, 32, [*ONE, "--dp", "8", "--ep", "8"]),
    "mixtral-searched": (MIXTRAL, 2, 64, ONE),
    "llama-pp2-tp8": (LLAMA, 2, 32, ["--pp", "2", "--tp", "8", "--num-microbatches", "4", "--ring", "none", "--loss-chunks", "none"]),
    "gpt2-pp4-dp4": (GPT, 2, 64, ["--pp", "4", "--dp", "4", "--num-microbatches", "8", "--schedule", "zb-h1", "--loss-chunks", "none"]),
}
KINDS = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1}
BYTES |= {"i64": 8, "i32": 4, "bool": 1}
# The plan's names of collectives, and XLA's.
NAMES = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
NAMES |= {"all_to_all": "all-to-all", "shift": "collective-permute", "halo": "collective-permute"}


def sizes(text):
    """The bytes of all tensors of a type."""
    total = 0
    for dtype, shape in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", text):
        count = 1
        for size in filter(None, shape.split(",")):
            count *= int(size)
        total += count * BYTES.get(dtype, 4)
    return total


def of_plan(text, program=None):
    """Number and bytes of results of each kind of collective that a device runs in a step, by the plan's programs. Of
    several programs only one is counted."""
    programs = re.split(r"^program \d+ on ", text, flags=re.M)[1:]
    found = collections.Counter()
    body, of_body = None, collections.defaultdict(collections.Counter)
    for line in programs[program or 0].splitlines():
        if header := re.match(r"  body \d+ '(.*)' \(", line):
            body = header[1]
        elif line.startswith("  schedule"):
            body = None
        elif body and (op := re.match(r"\s+%\d+: (\S+) = (\w+)\(", line)):
            if op[2] in NAMES:
                of_body[body][NAMES[op[2]], "count"] += 1
                of_body[body][NAMES[op[2]], "bytes"] += sizes(op[1])
        elif body is None and (run := re.match(r"    run (.*?)(?: \[\d+\])?$", line)):
            found.update(of_body[run[1]])
    return found


def of_hlo(text):
    """The same of a compiled module. What loops repeat is counted each time."""
    computations, name = {}, None
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = header[1]
            computations[name] = []
            if line.startswith("ENTRY"):
                computations[None] = computations[name]
        elif name:
            computations[name].append(line)

    def counted(name):
        found = collections.Counter()
        for line in computations.get(name, []):
            op = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z0-9\-]*)\(", line)
            if not op:
                continue
            kind = op[2].removesuffix("-done")
            if kind in KINDS:
                found[kind, "count"] += 1
                found[kind, "bytes"] += sizes(op[1])
            times = 1
            if op[2] == "while":
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                times = int(trips[1]) if trips else 1
            if op[2] in ("while", "call", "conditional", "async-start"):
                for inner in re.findall(r"(?:body|to_apply|calls|called_computation)=%?([\w.\-]+)", line):
                    for key, value in counted(inner).items():
                        found[key] += times * value
        return found

    return counted(None)


def leaves(plan):
    """Parameters and inputs with their types at microbatch size."""
    dtypes = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "i64": "int32", "bool": "bool"}
    found = {"parameter": {}, "input": {}}
    for node in plan["graph"]["nodes"]:
        for kind in found:
            if isinstance(node["op"], dict) and kind in node["op"]:
                ty = node["op"][kind]["ty"]
                found[kind][node["op"][kind]["name"]] = jax.ShapeDtypeStruct(ty["shape"], dtypes[ty["dtype"]])
    return found["parameter"], found["input"]


class Adam:
    """The optimizer whose state the plan has, in single precision."""

    @staticmethod
    def init(params):
        zeros = lambda: jax.tree.map(lambda p: jnp.zeros(p.shape, "float32"), params)
        return {"m": zeros(), "v": zeros()}

    @staticmethod
    def update(gradients, state, params):
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradients)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["v"], gradients)
        return jax.tree.map(lambda m, v: -1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v), {"m": m, "v": v}


def compiled_step(module, plan, devices):
    """The compiled step of a plan of one stage."""
    mesh = module.mesh(devices)
    params, inputs = leaves(plan)
    for name, (dim, rows) in module.BATCH_DIMS.items():
        shape = list(inputs[name].shape)
        shape[dim] = rows * module.GLOBAL_BATCH
        inputs[name] = jax.ShapeDtypeStruct(shape, inputs[name].dtype)
    state = jax.eval_shape(Adam.init, params)
    return module.train_step(Adam, mesh, params, state, inputs).lower(params, state, inputs).compile()


def compiled_stage(module, plan, devices):
    """The compiled forward and backward pass of the first stage of a pipeline."""
    meshes = module.mesh(devices)
    stage, mesh = module.Stage(0, meshes[0]), meshes[0]
    params, inputs = leaves(plan)
    placed = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    params = {name: placed(params[name], spec) for name, spec in module.PARAMETERS[0].items()}
    inputs = {name: placed(inputs[name], spec) for name, spec in module.INPUTS[0].items()}
    forward = stage.forward.lower(params, inputs)
    results, pull = jax.eval_shape(stage.forward, params, inputs)
    cotangents = {key: [placed(results[key], module.SENDS[0][key])] * len(back) for key, back in stage.back.items()}
    sums = {name: placed(jax.ShapeDtypeStruct(p.shape, "float32"), module.GRADIENTS[0][name]) for name, p in params.items()}
    forward = forward.compile()
    shardings = forward.output_shardings[1]
    pull = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), pull, shardings)
    return forward, stage.backward.lower(pull, cotangents, sums).compile()


def shown(found):
    parts = [f"{found[kind, 'count']} {kind} {found[kind, 'bytes'] / 1e6:.4g} MB" for kind in KINDS if found[kind, "count"]]
    return ", ".join(parts) or "none"


def case(name, altiplano, folder):
    config, nodes, batch, options = CASES[name]
    model, file = folder / f"{config['model_type']}.json", folder / f"{name}.plan.json"
    model.write_text(json.dumps(config))
    said = ["--seq", "1024", "--global-batch", str(batch), "--cluster", f"dgx-h100:{nodes}", "--precision", "bf16"]
    subprocess.run([altiplano, "plan", model, *said, *options, "-o", file], check=True, capture_output=True)
    path = folder / (name.replace("-", "_") + ".py")
    subprocess.run([altiplano, "export", file, "--to", "jax", "-o", path], check=True, capture_output=True)
    programs = subprocess.run([altiplano, "inspect", file, "--programs"], check=True, capture_output=True, text=True).stdout
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plan = json.loads(file.read_text())
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H100, topology=f"1x{nodes}x8"
    )
    began = time.monotonic()
    if len(plan["stages"]) == 1:
        step = compiled_step(module, plan, topology.devices)
        chosen, peak = of_hlo(step.as_text()), step.memory_analysis().peak_memory_in_bytes
    else:
        passes = compiled_stage(module, plan, topology.devices)
        chosen, peak = collections.Counter(), None
        for one in passes:
            for key, value in of_hlo(one.as_text()).items():
                chosen[key] += module.MICROBATCHES * value
    seconds = time.monotonic() - began
    planned_peak = plan["predicted"]["peak_bytes"][0] / 1e9
    memory = f"{planned_peak:.3g} / {peak / 1e9:.3g}" if peak else f"{planned_peak:.3g} / -"
    print(f"| {name} | {8 * nodes} | {shown(of_plan(programs))} | {shown(chosen)} | {memory} | {seconds:.0f} |", flush=True)


def main():
    altiplano, folder = sys.argv[1], Path(sys.argv[2])
    try:
        topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x8")
    except Exception as error:
        skipped(f"jax has no plugin for CUDA ({str(error).splitlines()[0]})")
    print("| plan | H100s | collectives of the plan | collectives of XLA | peak GB, plan / XLA | compiled in s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in sys.argv[3:] or CASES:
        case(name, altiplano, folder)


if __name__ == "__main__":
    main()

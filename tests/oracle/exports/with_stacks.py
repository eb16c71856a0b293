"""Files that `altiplano export` writes for configured stacks, read by these stacks themselves: Megatron's own classes accept
degrees and layouts, and so do torchtitan's, Accelerate's and DeepSpeed's. Models with exported plans train on processes of
Transformers, Accelerate, DeepSpeed and torchtitan as on one device (`trained.py`). What is not installed is skipped, visibly.

    with_stacks.py ALTIPLANO FOLDER
"""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 512}
LLAMA = {**SIZES, "model_type": "llama", "num_key_value_heads": 8, "max_position_embeddings": 64}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
# A name, a model, the options of the plan, and the stacks that can say it.
PLANS = [
    ("dp", LLAMA, "--dp 8 --tp 1 --pp 1 --zero 3", "megatron torchtitan accelerate deepspeed transformers"),
    ("tp", LLAMA, "--dp 4 --tp 2 --pp 1 --zero 2", "megatron torchtitan accelerate deepspeed transformers"),
    ("full", LLAMA, "--dp 4 --tp 2 --pp 1 --zero 3 --recompute full", "megatron torchtitan accelerate transformers"),
    ("pp", LLAMA, "--dp 2 --tp 2 --pp 2 --num-microbatches 4 --zero 1 --target megatron", "megatron torchtitan"),
    ("interleaved", LLAMA, "--dp 2 --tp 1 --pp 4 --virtual-stages 2 --num-microbatches 8 --target megatron", "megatron torchtitan"),
    ("uneven", {**LLAMA, "num_hidden_layers": 7}, "--dp 2 --tp 2 --pp 2 --num-microbatches 4 --target megatron", "megatron torchtitan"),
    ("searched", LLAMA, "--pp 3 --cluster dgx-a100/6", "megatron torchtitan"),
    ("cp", LLAMA, "--dp 4 --tp 1 --pp 1 --cp 2 --zero 1", "megatron torchtitan accelerate"),
    ("ep", MIXTRAL, "--dp 4 --tp 1 --pp 1 --ep 4 --zero 1 --cluster dgx-a100/4", "megatron torchtitan transformers"),
]
SUFFIXES = {"megatron": "sh", "torchtitan": "py", "accelerate": "yaml", "deepspeed": "json", "transformers": "py"}


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        # The first error of a launched process is the cause.
        of_worker = [line for line in done.stderr.splitlines() if line.startswith("[rank0]")]
        error = "\n".join(of_worker[-12:]) or done.stderr[-2000:]
        raise AssertionError(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{error}")
    return done.stdout


def written(altiplano, folder, name, model, options, stack):
    config = folder / f"{name}.json"
    config.write_text(json.dumps(model))
    plan = folder / f"{name}.plan.json"
    if not plan.exists():
        cluster = [] if "--cluster" in options else ["--cluster", "dgx-a100:1"]
        batch = ["--seq", 64, "--global-batch", 48 if "searched" in name else 64, "--precision", "bf16", "--allow-microbatch-semantics"]
        run(altiplano, "plan", config, *batch, *cluster, *options.split(), "-o", plan)
    file = folder / f"{name}_{stack}.{SUFFIXES[stack]}"
    run(altiplano, "export", plan, "--to", stack, "-o", file)
    return file


def module(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def options(file):
    """The options of a file for Megatron, by their names."""
    words = subprocess.run(["bash", "-c", f"source {file}; printf '%s\\n' \"${{MEGATRON_ARGS[@]}}\""], capture_output=True, text=True).stdout
    found, name = {}, None
    for word in words.splitlines():
        if word.startswith("--"):
            name = word[2:]
            found[name] = True
        else:
            found[name] = int(word) if word.isdigit() else word
    return found


def megatron(file, model):
    import torch
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = options(file)
    names = {
        "tensor-model-parallel-size": "tensor_model_parallel_size",
        "pipeline-model-parallel-size": "pipeline_model_parallel_size",
        "context-parallel-size": "context_parallel_size",
        "expert-model-parallel-size": "expert_model_parallel_size",
        "expert-tensor-parallel-size": "expert_tensor_parallel_size",
        "sequence-parallel": "sequence_parallel",
        "recompute-granularity": "recompute_granularity",
        "recompute-method": "recompute_method",
        "recompute-num-layers": "recompute_num_layers",
        "bf16": "bf16",
    }
    arguments = {names[name]: value for name, value in given.items() if name in names}
    layout, pp = given.get("pipeline-model-parallel-layout"), given["pipeline-model-parallel-size"]
    shared = given.get("num-virtual-stages-per-pipeline-rank")
    if layout:
        parsed = PipelineParallelLayerLayout(layout, pp)
        parsed.validate_layer_layout(model["num_hidden_layers"], None)
        arguments["pipeline_model_parallel_layout"] = parsed
        shared = parsed.virtual_pipeline_model_parallel_size
    if shared and shared > 1:
        arguments["virtual_pipeline_model_parallel_size"] = shared
    config = TransformerConfig(
        num_layers=model["num_hidden_layers"],
        hidden_size=model["hidden_size"],
        num_attention_heads=model["num_attention_heads"],
        num_moe_experts=model.get("num_local_experts"),
        pipeline_dtype=torch.bfloat16,
        add_bias_linear=False,
        **arguments,
    )
    assert config.tensor_model_parallel_size == given["tensor-model-parallel-size"]


def torchtitan(file, _):
    from torchtitan.config import ParallelismConfig, TrainingConfig

    config = types.SimpleNamespace(parallelism=None, training=TrainingConfig(), activation_checkpoint=None)
    config = module(file).altiplano(config)
    assert isinstance(config.parallelism, ParallelismConfig)
    batch = config.parallelism.data_parallel_replicate_degree * config.parallelism.data_parallel_shard_degree * config.training.local_batch_size
    assert config.training.global_batch_size % batch == 0
    if config.parallelism.pipeline_parallel_degree > 1:
        assert config.training.local_batch_size % config.parallelism.pipeline_parallel_microbatch_size == 0


def accelerate(file, _):
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig

    config = load_config_from_file(str(file))
    mesh = {name.removeprefix("parallelism_config_"): value for name, value in yaml.safe_load(file.read_text())["parallelism_config"].items()}
    total = ParallelismConfig(**mesh).total_size
    assert total == config.num_processes, (total, config.num_processes)
    assert config.fsdp_config["fsdp_version"] == 2


def deepspeed(file, _):
    # The batch arithmetic needs the number of processes that the plan has.
    import deepspeed.runtime.config as runtime

    given = json.loads(file.read_text())
    replicas = given["train_batch_size"] // given["train_micro_batch_size_per_gpu"] // given["gradient_accumulation_steps"]
    runtime.dist = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_: replicas)
    config = runtime.DeepSpeedConfig(str(file))
    assert config.zero_config.stage == given["zero_optimization"]["stage"]
    assert config.gradient_accumulation_steps == given["gradient_accumulation_steps"]


def transformers(file, _):
    from transformers.distributed import DistributedConfig

    loaded = module(file)
    assert isinstance(loaded.DISTRIBUTED, DistributedConfig)
    assert loaded.TRAINING["gradient_accumulation_steps"] >= 1


CHECKS = {"megatron": megatron, "torchtitan": torchtitan, "accelerate": accelerate, "deepspeed": deepspeed, "transformers": transformers}
PACKAGES = {"megatron": "megatron.core", "deepspeed": "deepspeed", "torchtitan": "torchtitan", "accelerate": "accelerate", "transformers": "transformers"}

WORKER = """
import sys, torch, torch.distributed as dist
from transformers import LlamaForCausalLM
sys.path.insert(0, sys.argv[1])
from {module} import DISTRIBUTED
torch.set_num_threads(1)
dist.init_process_group('gloo')
model = LlamaForCausalLM.from_pretrained(sys.argv[2], distributed_config=DISTRIBUTED)
batch = torch.arange(128).reshape(2, 64) % 512
def loss_and_gradient(model):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    whole = lambda t: (t.full_tensor() if hasattr(t, 'full_tensor') else t).detach()
    return whole(loss), {{name: whole(p.grad) for name, p in model.named_parameters()}}
loss, gradient = loss_and_gradient(model)
one, expected = loss_and_gradient(LlamaForCausalLM.from_pretrained(sys.argv[2]))
assert abs(float(loss - one)) <= 1e-5 * abs(float(one)), (float(loss), float(one))
split = [name for name, p in model.named_parameters() if hasattr(p, 'placements') and any(q.is_shard() for q in p.placements)]
assert len(split) >= 7 * 8, split
for name in expected:
    error = (gradient[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)
    assert error <= 1e-4, (name, float(error))
if dist.get_rank() == 0:
    print('loss', float(loss), 'and of one device', float(one))
dist.destroy_process_group()
"""


def trained_on_two(altiplano, folder):
    """The loss and gradients of a plan for two devices, on two processes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})).save_pretrained(folder / "tiny")
    file = written(altiplano, folder, "two", LLAMA, "--dp 1 --tp 2 --pp 1 --target megatron --cluster dgx-a100/2", "transformers")
    worker = folder / "worker.py"
    worker.write_text(WORKER.format(module=file.stem))
    run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", 29533, worker, folder, folder / "tiny")


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SHORT = {**LLAMA, "num_hidden_layers": 4}
# Plans that are trained: a name, a model, the options of the plan and the number of its devices.
TRAINED = {
    "accelerate": [
        ("dp", SHORT, "--dp 2 --zero 0", 2),
        ("zero2", GPT2, "--dp 2 --zero 2 --num-microbatches 2", 2),
        ("fsdp", SHORT, "--dp 2 --zero 3", 2),
        ("fsdp-experts", {**MIXTRAL, "num_hidden_layers": 2}, "--dp 2 --zero 3 --recompute full", 2),
    ],
    "deepspeed": [
        ("dp", SHORT, "--dp 2 --zero 0", 2),
        ("zero1", GPT2, "--dp 2 --zero 1 --num-microbatches 2", 2),
        ("zero2", {**MIXTRAL, "num_hidden_layers": 2}, "--dp 2 --zero 2", 2),
        ("zero3", SHORT, "--dp 2 --zero 3 --num-microbatches 2", 2),
    ],
    "torchtitan": [
        ("fsdp", SHORT, "--dp 2 --zero 3 --num-microbatches 2 --recompute full", 2),
        ("tp", SHORT, "--dp 1 --tp 2", 2),
        ("pp", SHORT, "--dp 2 --pp 2 --zero 2 --num-microbatches 4 --virtual-stages 1", 4),
        ("interleaved", SHORT, "--dp 1 --pp 2 --virtual-stages 2 --num-microbatches 4", 2),
    ],
}


def untrained(model, folder):
    """A model with random weights, as Transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).save_pretrained(folder)
    return folder


def trained(altiplano, folder, stack, name, model, given, processes):
    """Trains a plan in a stack, which starts the processes."""
    config, plan = folder / f"{stack}-{name}.json", folder / f"{stack}-{name}.plan.json"
    config.write_text(json.dumps(model))
    fixed = "".join(f" --{degree} 1" for degree in ("tp", "pp") if f"--{degree} " not in given)
    batch = ["--global-batch", 8, "--allow-microbatch-semantics", "--seq", 64]
    target = ["--target", "torchtitan"] if stack == "torchtitan" else []
    run(altiplano, "plan", config, *batch, *target, "--cluster", f"dgx-a100/{processes}", *given.split(), *fixed.split(), "-o", plan)
    file = folder / f"{stack}-{name}.{SUFFIXES[stack]}"
    run(altiplano, "export", plan, "--to", stack, "-o", file)
    worker = Path(__file__).parent / "trained.py"
    told = json.loads(plan.read_text())
    environment = {"PASSES": told["num_microbatches"], "SAMPLES": told["global_batch"], "DS_ACCELERATOR": "cpu"}
    os.environ.update({name: str(value) for name, value in environment.items()})
    port = 29540 + os.getpid() % 400
    if stack == "accelerate":
        # CPU processes, of the number that the file states.
        file.write_text(file.read_text() + "use_cpu: true\n")
        launch = ["accelerate.commands.launch", "--config_file", file, "--main_process_port", port]
    else:
        launch = ["torch.distributed.run", "--nproc-per-node", processes, "--master-port", port]
    layers_or_weights = model["num_hidden_layers"] if stack == "torchtitan" else untrained(model, folder / f"{stack}-{name}")
    run(sys.executable, "-m", *launch, worker, stack, file, layers_or_weights)


def main():
    altiplano, folder = sys.argv[1], Path(sys.argv[2])
    failed = False
    for stack, check in CHECKS.items():
        try:
            found = importlib.util.find_spec(PACKAGES[stack])
        except ImportError:
            found = None
        if found is None:
            print(f"SKIPPED tests/oracle configs: {sys.executable} has no {PACKAGES[stack]}")
            continue
        for name, model, given, stacks in PLANS:
            if stack not in stacks.split():
                continue
            try:
                check(written(altiplano, folder, name, model, given, stack), model)
                print(f"ok           {stack} accepts {name}")
            except Exception as error:
                failed = True
                print(f"FAILED       {stack} {name}: {type(error).__name__}: {error}")
        for name, model, given, processes in TRAINED.get(stack, []):
            try:
                trained(altiplano, folder, stack, name, model, given, processes)
                print(f"ok           {stack} trains {name} on {processes} processes as on one", flush=True)
            except Exception as error:
                failed = True
                print(f"FAILED       {stack} trains {name}: {error}")
        if stack == "transformers":
            try:
                trained_on_two(altiplano, folder)
                print("ok           transformers trains on two processes as on one")
            except Exception as error:
                failed = True
                print(f"FAILED       transformers on two processes: {error}")
    sys.exit(failed)


main()

"""Two steps of training with files that `altiplano export` writes for Accelerate, DeepSpeed and torchtitan, on CPU processes that these stacks
start: losses and gradients equal those of one device, and parameters are split as the plan says. `with_stacks.py` starts the processes, each
of which runs this file with the name of the stack, the exported file and the folder of the model.
"""

import importlib.util
import os
import sys
import types

STEPS, POSITIONS, VOCABULARY = 2, 64, 512
# An epsilon that keeps the rounding of small gradients from deciding the update.
ADAMW = {"lr": 1e-3, "eps": 1e-3}
MOST_OF_LOSS, MOST_OF_GRADIENT = 1e-5, 1e-4


def samples(step, count):
    """The same data on every process."""
    import torch

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (count, POSITIONS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def part(batch, index, count):
    return {name: values.chunk(count)[index] for name, values in batch.items()}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def named(model):
    """Parameters by the model's own names, without those of wrappers."""
    return [(name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), p) for name, p in model.named_parameters()]


def compare(step, loss, gradients, expected_loss, expected):
    """Stops if a loss or a gradient differs from that of one device."""
    assert abs(float(loss) - float(expected_loss)) <= MOST_OF_LOSS * abs(float(expected_loss)), (step, float(loss), float(expected_loss))
    for name, gradient in gradients.items():
        error = float((gradient - expected[name]).norm() / expected[name].norm().clamp_min(1e-12))
        assert error <= MOST_OF_GRADIENT, (step, name, error)


def on_one(model, optimizer, batch):
    """The loss and gradients of a step on one device."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return loss.detach(), gradients


def two_models(folder, adamw):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    split, one = (AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train() for _ in range(2))
    # Keys that a pass leaves would be there when it is computed again.
    split.config.use_cache = False
    return split, one, torch.optim.AdamW(split.parameters(), **adamw), torch.optim.AdamW(one.parameters(), **adamw)


def accelerate(file, folder):
    import torch
    import torch.distributed as dist
    import yaml
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    given = yaml.safe_load(open(file))
    is_fsdp = given["distributed_type"] == "FSDP"
    if is_fsdp:
        # Accelerate offers FSDP only for accelerators. Its CPU processes pass for such.
        PartialState._prepare_backend = lambda self, cpu, sagemaker_dp=False, backend=None: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    passes = int(os.environ["PASSES"])
    accelerator = Accelerator(cpu=not is_fsdp, gradient_accumulation_steps=passes)
    split, one, optimizer, plain = two_models(folder, ADAMW)
    split, optimizer = accelerator.prepare(split, optimizer)
    placed = [p.placements for _, p in split.named_parameters() if hasattr(p, "placements")]
    assert accelerator.is_fsdp2 == is_fsdp and bool(placed) == is_fsdp, placed
    for step in range(STEPS):
        batch = samples(step, int(os.environ["SAMPLES"]))
        mine, mean = part(batch, dist.get_rank(), dist.get_world_size()), torch.zeros(())
        for index in range(passes):
            with accelerator.accumulate(split):
                loss = split(**part(mine, index, passes)).loss
                accelerator.backward(loss)
                mean += loss.detach() / passes / dist.get_world_size()
                if accelerator.sync_gradients:
                    gradients = {name: whole(p.grad) for name, p in named(split)}
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(mean)
        compare(step, mean, gradients, *on_one(one, plain, batch))


def deepspeed(file, folder):
    import torch
    import torch.distributed as dist
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    # Without kernels that a compiler would have to build: gloo sends, and PyTorch's AdamW updates.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    split, one, optimizer, plain = two_models(folder, {"lr": ADAMW["lr"]})
    engine, _, _, _ = deepspeed.initialize(model=split, optimizer=optimizer, config=file)
    passes, size = engine.gradient_accumulation_steps(), engine.train_batch_size()
    assert size == passes * engine.train_micro_batch_size_per_gpu() * dist.get_world_size()
    for step in range(STEPS):
        batch = samples(step, size)
        mine, mean = part(batch, dist.get_rank(), dist.get_world_size()), torch.zeros(())
        for index in range(passes):
            loss = engine(**part(mine, index, passes)).loss
            engine.backward(loss)
            mean += loss.detach() / passes / dist.get_world_size()
            if engine.is_gradient_accumulation_boundary():
                gradients = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
            engine.step()
        dist.all_reduce(mean)
        compare(step, mean, gradients, *on_one(one, plain, batch))


def decoder(layers):
    """A Llama of torchtitan."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    width, heads = 64, 8
    rope = ComplexRoPE.Config(dim=width // heads, max_seq_len=POSITIONS, theta=10000.0)
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=width, param_init=llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=width, out_features=VOCABULARY, param_init=llama3._output_linear_init(width)),
        layers=llama3._build_llama3_layers(
            n_layers=layers, dim=width, n_heads=heads, hidden_dim=2 * width, fuse_qkv=True, rope=rope, attn_backend="flex"
        ),
    )
    for layer in config.layers:
        # The one attention that CPUs run without a compiler.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def initialised(model):
    import torch

    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def recipe(file):
    """What an exported recipe sets, with its part of a `Trainer.Config`."""
    from torchtitan.config import TrainingConfig

    spec = importlib.util.spec_from_file_location("recipe", file)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    training = TrainingConfig(seq_len=POSITIONS, dtype="float32")
    return loaded.altiplano(types.SimpleNamespace(parallelism=None, training=training, activation_checkpoint=None))


def parts_of(config, dims, one, layers, loss_of):
    """The parts of a model that this process has, with the weights of the whole `one`, and the schedule of a pipeline."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import parallelize_llama
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    described = decoder(layers)
    set_llama3_sharding_config(described, enable_sp=config.parallelism.enable_sequence_parallel)
    with torch.device("meta"):
        model = described.build()
    common = {"parallel_dims": dims, "training": config.training, "parallelism": config.parallelism, "compile_config": CompileConfig()}
    common |= {"ac_config": config.activation_checkpoint, "dump_folder": "."}
    if dims.pp_enabled:
        more = {"device": torch.device("cpu"), "model_config": described, "parallelize_fn": parallelize_llama, "loss_fn": loss_of}
        schedule, parts, _, _ = pipeline_llm(model, **common, **more)
    else:
        schedule, parts = None, [parallelize_llama(model, **common)]
    initial = dict(one.named_parameters())
    for own in parts:
        initialised(own)
        for module in own.modules():
            if isinstance(module, FSDPModule):
                # Gloo has no sum that scales.
                module.set_force_sum_reduction_for_comms(True)
        for name, p in named(own):
            value = initial[name].detach()
            with torch.no_grad():
                p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)
    return schedule, parts


def torchtitan(file, layers):
    import torch
    import torch.distributed as dist
    import torchtitan.tools.utils

    # Registers the backend of axes of one device.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    torchtitan.tools.utils.device_type = "cpu"
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import get_spmd_context

    torch.set_num_threads(1)
    layers = int(layers)
    config = recipe(file)
    dist.init_process_group("gloo")
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    size, groups = config.training.global_batch_size, dims.dp_replicate * dims.dp_shard
    tokens = torch.tensor(size * POSITIONS)
    loss_of = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY).build(compile_config=CompileConfig())
    torch.manual_seed(0)
    one = initialised(decoder(layers).build())
    schedule, parts = parts_of(config, dims, one, layers, loss_of)
    check_placements(dims, parts)
    optimizers = [torch.optim.AdamW(model.parameters(), **ADAMW) for model in [*parts, one]]
    mesh = dims.get_optional_mesh("batch")
    index = mesh.get_local_rank() if mesh is not None else 0
    for step in range(STEPS):
        text = torch.randint(0, VOCABULARY, (size, POSITIONS + 1), generator=torch.Generator().manual_seed(step))
        inputs, labels = text[:, :-1], text[:, 1:]
        mine = list(zip(*(whole.chunk(groups)[index].split(config.training.local_batch_size) for whole in (inputs, labels))))
        loss = torch.zeros(())
        for own_inputs, own_labels in mine:
            with get_spmd_context(parallel_dims=dims)():
                loss += pass_of(schedule, parts, own_inputs, own_labels, config, loss_of, tokens)
        dist.all_reduce(loss)
        # Devices of tensor parallelism have the same loss.
        loss /= dims.tp
        expected = torch.nn.functional.cross_entropy(one(inputs).flatten(0, 1), labels.flatten())
        expected.backward()
        gradients = {name: whole(p.grad) for own in parts for name, p in named(own)}
        compare(step, loss, gradients, expected, {name: p.grad for name, p in one.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_placements(dims, parts):
    """Parameters are split over the devices that share them, and kept by groups of them."""
    placements = {p.placements for own in parts for _, p in own.named_parameters()}
    sharded = {any(q.is_shard() for q in of) for of in placements}
    assert sharded == {True} or dims.dp_shard * dims.tp == 1, placements
    if dims.dp_replicate > 1:
        assert all(any(q.is_replicate() for q in of) for of in placements), placements


def pass_of(schedule, parts, inputs, labels, config, loss_of, tokens):
    """The loss of one pass forward and backward, if this process computes it, else nothing."""
    import torch

    if schedule is None:
        loss, _ = loss_of(parts[0](inputs), labels, tokens)
        loss.backward()
        return loss.detach()
    size = config.parallelism.pipeline_parallel_microbatch_size
    names = [name for own in parts for name, _ in own.named_parameters()]
    first, last = any(n.startswith("tok_embeddings") for n in names), any(n.startswith("lm_head") for n in names)
    losses = [] if last else None
    microbatches = [(piece,) for piece in inputs.split(size)]
    schedule.step(
        arg_mbs=microbatches if first else None,
        kwarg_mbs=[{} for _ in microbatches],
        target_mbs=list(labels.split(size)) if last else None,
        losses=losses,
        loss_kwargs={"global_valid_tokens": tokens},
        return_outputs=False,
    )
    return torch.stack(losses).sum().detach() if last else torch.zeros(())


if __name__ == "__main__":
    stack, file, model = sys.argv[1:4]
    {"accelerate": accelerate, "deepspeed": deepspeed, "torchtitan": torchtitan}[stack](file, model)
    import torch.distributed as dist

    dist.destroy_process_group()

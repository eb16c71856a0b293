"""Models of Transformers, timm, torchvision, Flax and JAX through the Python package: one call plans each, and the plan trains on
four CPU processes or devices of the host. Losses must equal those of one device.

    package_models.py [torch|jax|MODEL]...

Models of libraries that are not installed are skipped, visibly.
"""

import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
# Threads of a loaded machine may meet late in a collective, which XLA by default takes for a deadlock after 40 s.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"

import altiplano

STEPS, RATE, TOLERANCE = 2, 0.1, 1e-5
HIDDEN, VOCABULARY, SEQUENCE, BATCH, CLASSES, EXPERTS = 32, 64, 16, 8, 10, 4
PLANS = {"searched": {}, "dp2-tp2": {"dp": 2, "tp": 2}, "zero3": {"dp": 4, "zero": 3}}


# PyTorch: a function that makes the module and its inputs by name; the last input is that of the loss.


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    return language_model(GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQUENCE}
    return language_model(LlamaForCausalLM(LlamaConfig(**sizes, **heads)))


def language_model(module):
    import torch

    module.config.use_cache = False
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1))
    return Logits(module), {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def Logits(module):
    """The module as a function of tokens alone, which returns logits."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = module

        def forward(self, tokens):
            return self.model(input_ids=tokens).logits

    return Model()


def vit():
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": HIDDEN, "depth": 2, "num_heads": 4, "num_classes": CLASSES}
    return timm.models.vision_transformer.VisionTransformer(**sizes), images()


def resnet():
    import torchvision

    # Batch normalization makes the loss no mean of samples, so each plan of it computes with the whole batch.
    block = torchvision.models.resnet.BasicBlock
    return torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES), images()


def images():
    import torch

    return {"x": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(CLASSES, (BATCH,))}


TORCH = {"gpt2": gpt2, "llama": llama, "vit": vit, "resnet": resnet}


def made(name):
    import torch

    torch.manual_seed(1)
    return TORCH[name]()


def torch_loss(module, labels, **inputs):
    import torch.nn.functional as F

    result = module(*inputs.values())
    return F.cross_entropy(result.reshape(-1, result.shape[-1]), labels.reshape(-1))


def on_one_device(name):
    import torch

    module, inputs = made(name)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = torch_loss(module, **inputs)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def worker(name, file):
    """One process of a job: trains a model with the plan in a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    plan = altiplano.load(file)
    module, inputs = made(name)
    exported = plan.exported("torch")
    mesh = exported.mesh("cpu")
    module = plan.parallelize(module, mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    part = exported.shard_inputs(inputs, mesh)
    found = [float(exported.train_step(module, optimizer, part, mesh, torch_loss)) for _ in range(STEPS)]
    if dist.get_rank() == 0:
        print("losses", *found, flush=True)
    dist.destroy_process_group()


def with_torch(name, options, folder):
    module, inputs = made(name)
    example = {key: value for key, value in inputs.items() if key != "labels"}
    plan = altiplano.plan(
        module, tuple(example.values()), cluster="local:4", loss="cross-entropy", pp=1, optimizer="sgd", pad="none", **options
    )
    plan.save(folder / "plan.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", __file__, "--worker", name]
    done = subprocess.run([*command, str(folder / "plan.json")], capture_output=True, text=True, timeout=400)
    said = next((line for line in done.stdout.splitlines() if line.startswith("losses ")), None)
    assert said, done.stderr[-2000:]
    return plan, [float(word) for word in said.split()[1:]], on_one_device(name)


# JAX: a function that makes the loss, its parameters, and its inputs by name.


def cross_entropy(logits, labels):
    import jax
    import jax.numpy as jnp

    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def drawn(shapes):
    import jax
    import numpy as np

    random = np.random.default_rng(1)
    draw = lambda shape: (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def text():
    import numpy as np

    ids = np.random.default_rng(2).integers(0, VOCABULARY, (BATCH, SEQUENCE + 1)).astype(np.int32)
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def flax_transformer():
    import flax.linen as nn
    import jax

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCABULARY, HIDDEN)(tokens)
            for _ in range(2):
                x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
                x = x + nn.Dense(HIDDEN)(nn.gelu(nn.Dense(4 * HIDDEN)(nn.LayerNorm()(x))))
            return nn.Dense(VOCABULARY)(x)

    module, batch = Transformer(), text()
    params = module.init(jax.random.key(0), batch["tokens"])
    return lambda params, tokens, labels: cross_entropy(module.apply(params, tokens), labels), params, batch


def experts():
    import jax
    import jax.numpy as jnp

    shapes = {
        "embed": (VOCABULARY, HIDDEN),
        "router": (HIDDEN, EXPERTS),
        "up": (EXPERTS, HIDDEN, 2 * HIDDEN),
        "down": (EXPERTS, 2 * HIDDEN, HIDDEN),
    }

    def loss(params, tokens, labels):
        x = params["embed"][tokens]
        gates = jax.nn.softmax(x @ params["router"])
        top = gates * (gates >= jnp.sort(gates, axis=-1)[..., -2:-1])
        hidden = jax.nn.gelu(jnp.einsum("bsh,ehf->bsef", x, params["up"]))
        x = x + jnp.einsum("bsef,efh,bse->bsh", hidden, params["down"], top)
        return cross_entropy(x @ params["embed"].T, labels)

    return loss, drawn(shapes), text()


def u_net():
    import jax
    import jax.numpy as jnp
    import numpy as np

    shapes = {"in": (3, 3, 3, 8), "down": (3, 3, 8, 16), "up": (3, 3, 16, 8), "out": (3, 3, 16, 3)}
    axes = ("NHWC", "HWIO", "NHWC")
    conv = lambda x, w, stride=1: jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=axes)

    def loss(params, images, targets):
        wide = jax.nn.relu(conv(images, params["in"]))
        deep = jax.nn.relu(conv(wide, params["down"], 2))
        back = jnp.repeat(jnp.repeat(deep, 2, axis=1), 2, axis=2)
        out = conv(jnp.concatenate([wide, conv(back, params["up"])], axis=-1), params["out"])
        return ((out - targets) ** 2).mean()

    random = np.random.default_rng(3)
    batch = {name: random.standard_normal((BATCH, 16, 16, 3)).astype(np.float32) for name in ("images", "targets")}
    return loss, drawn(shapes), batch


JAX = {"flax-transformer": flax_transformer, "experts": experts, "u-net": u_net}


class Sgd:
    def init(self, params):
        return ()

    def update(self, gradients, state, params=None):
        import jax

        return jax.tree.map(lambda g: -RATE * g, gradients), state


def with_jax(name, options, folder):
    import jax

    loss, params, batch = JAX[name]()
    expected, alone = [], params
    for _ in range(STEPS):
        value, gradients = jax.value_and_grad(loss)(alone, **batch)
        alone = jax.tree.map(lambda p, g: p - RATE * g, alone, gradients)
        expected.append(float(value))
    plan = altiplano.plan(
        loss, {"params": params, **batch}, cluster="local:4", pp=1, optimizer="sgd", pad="none", **options
    )
    step, here, state = plan.jit(Sgd(), params, batch)
    found = []
    for _ in range(STEPS):
        here, state, value = step(here, state, batch)
        found.append(float(value))
    return plan, found, expected


def tried(name, plan_name, options, folder):
    """Returns true unless a model's plan cannot be had, or trains otherwise than one device."""
    case = f"{name}/{plan_name}"
    try:
        plan, found, expected = (with_torch if name in TORCH else with_jax)(name, options, folder)
    except ModuleNotFoundError as error:
        print(f"SKIPPED      {case}: {error}", flush=True)
        return True
    except (altiplano.NoPlan, altiplano.OptionError) as error:
        # A model need not have plans of all degrees, but has the one that the search finds.
        print(f"{'FAILED ' if not options else 'no plan'}      {case}: {error.message}", flush=True)
        return bool(options)
    except Exception as error:
        traceback.print_exc()
        print(f"FAILED       {case}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        return False
    off = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    agrees = off <= TOLERANCE
    how = " ".join(f"{degree} {n}" for degree, n in plan.degrees.items() if n > 1)
    print(f"{'ok    ' if agrees else 'FAILED'}       {case}: {how or 'one device'}, losses {off:.1e} off", flush=True)
    return agrees


def main(wanted):
    wanted = wanted or [*TORCH, *JAX]
    names = [name for name in [*TORCH, *JAX] if name in wanted or ("torch" if name in TORCH else "jax") in wanted]
    all_agree = True
    for name in names:
        for plan_name, options in PLANS.items():
            with tempfile.TemporaryDirectory() as folder:
                all_agree &= tried(name, plan_name, options, Path(folder))
    return 0 if all_agree else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))

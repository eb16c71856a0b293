"""Writes small models of many architectures as torch.export saves them, with the loss and the gradients of a batch that PyTorch
computes: NAME.pt2 and NAME.safetensors.

    python torch_models.py DIRECTORY [SUBSTRING...]        only models whose names have one of the substrings

Models are those of transformers and torchvision with small configurations, where these are installed, and some written here.
Each is exported with its loss, and with an open batch where it can be. Weights, batch and gradients are named as in the graph.
"""

import logging
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)


class WithLoss(nn.Module):
    """The loss of a model: what it returns as such, or a function of its result."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch):
        return self.loss(self.model, *batch)


def language(**options):
    def loss(model, tokens, labels):
        logits = model(input_ids=tokens, **options).logits
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

    return loss


def own_loss(model, tokens, labels):
    return model(input_ids=tokens, labels=labels, use_cache=False).loss


def classes(model, x, labels):
    result = model(x)
    result = getattr(result, "logits", result)
    return F.cross_entropy(result, labels)


def pixels(model, x, labels):
    result = model(x)
    return F.cross_entropy(result["out"] if isinstance(result, dict) else result, labels)


def ids(batch=4, length=12, vocabulary=40):
    return torch.randint(0, vocabulary, (batch, length))


def text_batch(**options):
    return ids(**options), ids(**options)


def images(size=32, classes=5, batch=4, channels=3):
    return torch.randn(batch, channels, size, size), torch.randint(0, classes, (batch,))


def transformers_models():
    import transformers as t

    size = dict(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    grouped = size | dict(num_key_value_heads=2, max_position_embeddings=32)
    gpt2 = t.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    no_cache = dict(use_cache=False)
    yield "gpt2", lambda: t.GPT2LMHeadModel(gpt2), own_loss, text_batch
    yield "llama", lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped)), language(**no_cache), text_batch
    yield "llama_loss", lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped)), own_loss, text_batch
    yield "mistral", lambda: t.MistralForCausalLM(t.MistralConfig(**grouped, sliding_window=4)), language(**no_cache), text_batch
    yield "qwen2", lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**grouped)), language(**no_cache), text_batch
    yield "qwen3", lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**grouped, head_dim=8)), language(**no_cache), text_batch
    yield "gemma2", lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**grouped, head_dim=8)), language(**no_cache), text_batch
    yield "phi3", lambda: t.Phi3ForCausalLM(t.Phi3Config(**grouped, pad_token_id=0)), language(**no_cache), text_batch
    yield "gpt_neox", lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**size, max_position_embeddings=32)), language(**no_cache), text_batch
    yield "opt", lambda: t.OPTForCausalLM(t.OPTConfig(vocab_size=40, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=16, max_position_embeddings=32, dropout=0.0)), language(**no_cache), text_batch
    yield "mixtral", lambda: t.MixtralForCausalLM(t.MixtralConfig(**grouped, num_local_experts=4)), language(**no_cache), text_batch
    bert = dict(max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    yield "bert", lambda: t.BertForMaskedLM(t.BertConfig(**size, **bert)), language(), text_batch
    yield "roberta", lambda: t.RobertaForMaskedLM(t.RobertaConfig(**size, **bert)), language(), text_batch
    yield "distilbert", lambda: t.DistilBertForMaskedLM(t.DistilBertConfig(vocab_size=40, dim=16, hidden_dim=32, n_layers=2, n_heads=4, max_position_embeddings=32, dropout=0, attention_dropout=0)), language(), text_batch
    yield "t5", lambda: t.T5ForConditionalGeneration(t.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)), own_loss, text_batch
    yield "vit", lambda: t.ViTForImageClassification(t.ViTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=5)), classes, images


def torchvision_models():
    from torchvision import models as m

    yield "resnet18", lambda: m.resnet18(num_classes=5), classes, images
    yield "resnet_eval", lambda: m.resnet18(num_classes=5).eval(), classes, images
    # Of a few positions, batch statistics of so many layers are ill-conditioned.
    yield "mobilenet_v2_eval", lambda: m.mobilenet_v2(num_classes=5, width_mult=0.25, dropout=0), classes, images
    yield "mobilenet_v3", lambda: m.mobilenet_v3_small(num_classes=5, width_mult=0.25, dropout=0.0), classes, images
    yield "efficientnet", lambda: m.efficientnet_b0(num_classes=5, dropout=0.0, stochastic_depth_prob=0.0).eval(), classes, images
    yield "convnext", lambda: m.convnext.ConvNeXt([m.convnext.CNBlockConfig(8, 16, 1), m.convnext.CNBlockConfig(16, None, 1)], num_classes=5, stochastic_depth_prob=0.0), classes, images
    yield "swin", lambda: m.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=5, stochastic_depth_prob=0.0), classes, images
    yield "vision_transformer", lambda: m.VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=5), classes, images


class Block(nn.Module):
    def __init__(self, before, behind):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(before, behind, 3, padding=1), nn.BatchNorm2d(behind), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.one(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = Block(3, 6), Block(6, 12), Block(12, 12)
        self.up = nn.ConvTranspose2d(12, 12, 2, stride=2)
        self.up2, self.up1, self.head = Block(24, 6), Block(12, 6), nn.Conv2d(6, 5, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.up(self.middle(F.max_pool2d(two, 2)))
        x = self.up2(torch.cat([x, two], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up1(torch.cat([x, one], 1)))


class Pyramid(nn.Module):
    """Dilated convolutions side by side and a pooled branch, as DeepLab has them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.branches = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.pooled, self.head = nn.Conv2d(8, 4, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        size = x.shape[-2:]
        x = self.stem(x)
        pooled = F.interpolate(self.pooled(F.adaptive_avg_pool2d(x, 1)), size=x.shape[-2:], mode="bilinear")
        x = torch.cat([branch(x) for branch in self.branches] + [pooled], 1)
        return F.interpolate(self.head(F.relu_(x)), size=size, mode="bilinear", align_corners=True)


class Experts(nn.Module):
    """Top-2 of four experts, each applied to all tokens and weighted."""

    def __init__(self):
        super().__init__()
        self.embedding, self.gate = nn.Embedding(40, 16), nn.Linear(16, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) / 4), nn.Parameter(torch.randn(4, 32, 16) / 6)

    def forward(self, tokens):
        x = self.embedding(tokens)
        top, chosen = self.gate(x).softmax(-1).topk(2)
        shares = torch.zeros(*x.shape[:2], 4).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        hidden = F.gelu(torch.einsum("bsd,edf->besf", x, self.up))
        x = x + torch.einsum("besf,efd,bse->bsd", hidden, self.down, shares)
        return x @ self.embedding.weight.T


def logits_loss(model, tokens, labels):
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def segments():
    return torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4, 16, 16))


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(40, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 40))


def own_models():
    yield "unet", UNet, pixels, segments
    yield "pyramid", Pyramid, pixels, segments
    yield "experts", Experts, logits_loss, text_batch
    yield "encoder", encoder, logits_loss, text_batch


def all_models():
    for family in (own_models, transformers_models, torchvision_models):
        try:
            yield from family()
        except ImportError as missing:
            print(f"SKIPPED      {family.__name__}: {missing}")


def export(model, batch):
    """With an open batch; a model that is for one size of it is exported for that."""
    shapes = {"batch": tuple({0: torch.export.Dim("batch")} for _ in batch)}
    try:
        return torch.export.export(model, batch, dynamic_shapes=shapes, strict=False)
    except Exception:
        return torch.export.export(model, batch, strict=False)


def write(name, directory):
    found = next(entry for entry in all_models() if entry[0] == name)
    _, make, loss, batch = found
    torch.manual_seed(len(name))
    model, batch = make(), batch()
    if name == "vit" or "eval" in name:
        model = model.eval()
    model = WithLoss(model, loss)
    for parameter in model.parameters():
        # Biases and gains away from where nothing depends on them.
        parameter.data += 0.05 * torch.randn_like(parameter)
    state = {n: b.clone() for n, b in model.named_buffers()}
    program = export(model, batch)
    torch.export.save(program, f"{directory}/{name}.pt2")
    value = model(*batch)
    value.backward()
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    tensors = {"loss": value.detach(), "tolerance": torch.tensor([1e-3, 1e-4])} | {f"input/{n}": x for n, x in zip(names, batch)}
    tensors |= {f"input/{n}": b for n, b in state.items()}
    most = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for n, p in model.named_parameters(remove_duplicate=False):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        # What is zero but for rounding is compared with the size of the others.
        own = max(float(gradient.abs().max()), 1e-30)
        tensors |= {n: p.detach(), f"grad/{n}": gradient}
        tensors[f"tolerance/grad/{n}"] = torch.tensor([1e-3, max(1e-4, 1e-6 * most / own)])
    save_file({n: x.contiguous().clone() for n, x in tensors.items()}, f"{directory}/{name}.safetensors")


def attempt(name, directory):
    try:
        write(name, directory)
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}".splitlines()[0]


def main(directory, wanted):
    names = [entry[0] for entry in all_models() if not wanted or any(word in entry[0] for word in wanted)]
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        failed = [line for line in pool.map(attempt, names, [directory] * len(names)) if line]
    print("\n".join([f"NOT WRITTEN  {line}" for line in failed] + [f"{len(names) - len(failed)} models"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

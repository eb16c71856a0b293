"""Records losses and gradients of small Transformers models, for comparison with the graphs of their configs.

    python hf_configs.py FOLDER

writes NAME.json, NAME.safetensors (weights, the batch as input/NAME, loss, gradients as grad/NAME) and NAME.options
(what the config does not say) for each case. Weights have the names of published checkpoints.
"""

import json
import sys
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import save_file

BATCH, TOKENS, VOCABULARY = 4, 12, 61

DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN_ROPE = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=0.7,
    original_max_position_embeddings=16,
)
DEEPSEEK = DECODER | dict(
    num_key_value_heads=4,
    moe_intermediate_size=8,
    n_routed_experts=8,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_rope_head_dim=4,
    qk_nope_head_dim=6,
    v_head_dim=5,
)
GPT2 = dict(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=4)
BERT = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
T5 = dict(
    vocab_size=VOCABULARY,
    d_model=16,
    d_kv=6,
    d_ff=24,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
)
VIT = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=24,
    patch_size=8,
    num_labels=5,
)

# Name, class of the config, class of the model, sizes, options of the command.
CASES = [
    ("gpt2", hf.GPT2Config, hf.GPT2LMHeadModel, GPT2, ""),
    (
        "gpt2-untied",
        hf.GPT2Config,
        hf.GPT2LMHeadModel,
        GPT2 | dict(tie_word_embeddings=False, n_inner=20, scale_attn_by_inverse_layer_idx=True),
        "",
    ),
    ("llama", hf.LlamaConfig, hf.LlamaForCausalLM, DECODER, ""),
    (
        "llama3",
        hf.LlamaConfig,
        hf.LlamaForCausalLM,
        DECODER | dict(head_dim=8, tie_word_embeddings=True, attention_bias=True, rope_parameters=LLAMA3_ROPE),
        "",
    ),
    ("llama-yarn", hf.LlamaConfig, hf.LlamaForCausalLM, DECODER | dict(rope_parameters=YARN_ROPE), ""),
    ("mistral", hf.MistralConfig, hf.MistralForCausalLM, DECODER | dict(sliding_window=5), ""),
    ("qwen2", hf.Qwen2Config, hf.Qwen2ForCausalLM, DECODER, ""),
    (
        "qwen2-window",
        hf.Qwen2Config,
        hf.Qwen2ForCausalLM,
        DECODER | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "",
    ),
    ("qwen3", hf.Qwen3Config, hf.Qwen3ForCausalLM, DECODER | dict(head_dim=6), ""),
    (
        "mixtral",
        hf.MixtralConfig,
        hf.MixtralForCausalLM,
        DECODER | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        "--capacity-factor 2",
    ),
    ("deepseek", hf.DeepseekV3Config, hf.DeepseekV3ForCausalLM, DEEPSEEK, "--capacity-factor 3"),
    (
        "deepseek-yarn",
        hf.DeepseekV3Config,
        hf.DeepseekV3ForCausalLM,
        DEEPSEEK | dict(q_lora_rank=None, rope_parameters=YARN_ROPE, norm_topk_prob=False),
        "--capacity-factor 3",
    ),
    ("bert", hf.BertConfig, hf.BertForMaskedLM, BERT, ""),
    ("t5", hf.T5Config, hf.T5ForConditionalGeneration, T5, ""),
    (
        "t5-v1.1",
        hf.T5Config,
        hf.T5ForConditionalGeneration,
        T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        "",
    ),
    ("vit", hf.ViTConfig, hf.ViTForImageClassification, VIT, ""),
]


def ids(*shape):
    # Token 0 is BERT's padding, whose row gets no gradient from a lookup.
    return torch.randint(1, VOCABULARY, shape)


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def causal(model):
    batch = dict(input_ids=ids(BATCH, TOKENS), labels=ids(BATCH, TOKENS))
    return batch, cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def masked(model):
    count = round(0.15 * TOKENS)
    places = torch.stack([torch.randperm(TOKENS)[:count].sort().values for _ in range(BATCH)])
    batch = dict(
        input_ids=ids(BATCH, TOKENS),
        token_type_ids=torch.randint(0, 2, (BATCH, TOKENS)),
        masked_positions=places,
        labels=ids(BATCH, count),
    )
    labels = torch.full((BATCH, TOKENS), -100).scatter(1, places, batch["labels"])
    # Transformers' own loss: a mean over what is not -100.
    output = model(input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"], labels=labels)
    return batch, output.loss


def translation(model):
    batch = dict(
        input_ids=ids(BATCH, TOKENS), decoder_input_ids=ids(BATCH, TOKENS), labels=ids(BATCH, TOKENS)
    )
    return batch, model(**batch).loss


def image(model):
    size = model.config.image_size
    batch = dict(
        pixel_values=torch.randn(BATCH, 3, size, size),
        labels=torch.randint(0, model.config.num_labels, (BATCH,)),
    )
    return batch, model(**batch).loss


def task(kind):
    return {"bert": masked, "t5": translation, "vit": image}.get(kind, causal)


def published(name):
    """The name in checkpoints of what newer versions of Transformers hold under another name."""
    if not name.startswith("vit.layers."):
        return name
    for new, old in [
        ("vit.layers.", "vit.encoder.layer."),
        ("attention.q_proj", "attention.attention.query"),
        ("attention.k_proj", "attention.attention.key"),
        ("attention.v_proj", "attention.attention.value"),
        ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
    ]:
        name = name.replace(new, old)
    return name


def record(folder, name, config_class, model_class, sizes, options):
    torch.manual_seed(0)
    config = config_class(**sizes)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    batch, loss = task(config.model_type)(model)
    loss.backward()
    tensors = {"loss": loss.detach()}
    for key, value in batch.items():
        tensors[f"input/{key}"] = value if value.is_floating_point() else value.to(torch.int32)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            tensors[f"input/{key}"] = buffer
    for key, parameter in model.named_parameters():
        tensors[published(key)] = parameter.detach()
        if parameter.grad is not None:
            tensors[f"grad/{published(key)}"] = parameter.grad
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(config.to_dict(), indent=1, default=str))
    sequence = "" if config.model_type == "vit" else f"--seq {TOKENS} "
    (folder / f"{name}.options").write_text(f"--global-batch {BATCH} {sequence}{options}")


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    for case in CASES:
        record(Path(sys.argv[1]), *case)

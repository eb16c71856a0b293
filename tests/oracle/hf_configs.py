"""Records losses and gradients of small Transformers models, for comparison with the graphs of their configs.

    python hf_configs.py FOLDER [CASE]...

writes NAME.json, NAME.safetensors (weights, the batch as input/NAME, loss, gradients as grad/NAME) and NAME.options
(what the config does not say) for each case, or those that are named. Weights have the names of published checkpoints.
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

NEOX = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)
EXPERTS = DECODER | dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8)
GRANITE = dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0)
LONG_ROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0, 1.5],
    long_factor=[2.0, 3.0],
    original_max_position_embeddings=8,
)
STATES = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=2,
    num_heads=4,
    head_dim=8,
    state_size=6,
    n_groups=2,
    chunk_size=5,
)
NEMOTRON = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=32,
    mamba_num_heads=4,
    mamba_head_dim=8,
    ssm_state_size=6,
    n_groups=2,
    chunk_size=5,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    moe_shared_expert_intermediate_size=12,
)
HYBRID = DECODER | dict(
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_d_state=6,
    mamba_n_groups=2,
    mamba_chunk_size=5,
)

MAMBA = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=3)
JAMBA = DECODER | dict(
    num_hidden_layers=4,
    mamba_d_state=3,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=4,
    expert_layer_offset=1,
    num_experts=4,
)
ZAMBA2 = DECODER | dict(
    num_hidden_layers=5,
    num_key_value_heads=4,
    layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
    mamba_d_state=6,
    n_mamba_heads=4,
    mamba_ngroups=2,
    chunk_size=5,
    num_mem_blocks=2,
    adapter_rank=3,
)

SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
PAIR = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)


def model(kind):
    return getattr(hf, f"{kind}Config"), getattr(hf, f"{kind}ForCausalLM")


def text(kind):
    return getattr(hf, f"{kind}TextConfig"), getattr(hf, f"{kind}ForCausalLM")


# Name, classes of config and model, sizes, options of the command.
CASES = [
    ("gpt2", (hf.GPT2Config, hf.GPT2LMHeadModel), GPT2, ""),
    (
        "gpt2-untied",
        (hf.GPT2Config, hf.GPT2LMHeadModel),
        GPT2 | dict(tie_word_embeddings=False, n_inner=20, scale_attn_by_inverse_layer_idx=True),
        "",
    ),
    ("llama", model("Llama"), DECODER, ""),
    (
        "llama3",
        model("Llama"),
        DECODER | dict(head_dim=8, tie_word_embeddings=True, attention_bias=True, rope_parameters=LLAMA3_ROPE),
        "",
    ),
    ("llama-yarn", model("Llama"), DECODER | dict(rope_parameters=YARN_ROPE), ""),
    ("mistral", model("Mistral"), DECODER | dict(sliding_window=5), ""),
    ("qwen2", model("Qwen2"), DECODER, ""),
    (
        "qwen2-window",
        model("Qwen2"),
        DECODER | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "",
    ),
    ("qwen3", model("Qwen3"), DECODER | dict(head_dim=6), ""),
    (
        "mixtral",
        model("Mixtral"),
        DECODER | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        "--capacity-factor 2",
    ),
    ("deepseek", model("DeepseekV3"), DEEPSEEK, "--capacity-factor 3"),
    (
        "deepseek-yarn",
        model("DeepseekV3"),
        DEEPSEEK | dict(q_lora_rank=None, rope_parameters=YARN_ROPE, norm_topk_prob=False),
        "--capacity-factor 3",
    ),
    ("qwen2-moe", model("Qwen2Moe"), EXPERTS | dict(shared_expert_intermediate_size=10), "--capacity-factor 3"),
    (
        "qwen3-moe",
        model("Qwen3Moe"),
        EXPERTS | dict(head_dim=6, norm_topk_prob=True, mlp_only_layers=[0]),
        "--capacity-factor 3",
    ),
    ("olmoe", model("Olmoe"), DECODER | dict(num_experts=8, num_experts_per_tok=3), "--capacity-factor 3"),
    (
        "granitemoe",
        model("GraniteMoe"),
        DECODER | GRANITE | dict(num_local_experts=4, num_experts_per_tok=2),
        "--capacity-factor 2",
    ),
    (
        "gpt-oss",
        model("GptOss"),
        DECODER | dict(head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
        "--capacity-factor 2",
    ),
    (
        "llama4",
        text("Llama4"),
        DECODER
        | dict(
            head_dim=6,
            intermediate_size_mlp=20,
            num_hidden_layers=4,
            num_local_experts=4,
            attention_chunk_size=5,
            interleave_moe_layer_step=2,
            floor_scale=4,
        ),
        "--capacity-factor 4",
    ),
    (
        "glm4-moe",
        model("Glm4Moe"),
        DECODER
        | dict(
            head_dim=8,
            moe_intermediate_size=8,
            n_routed_experts=8,
            num_experts_per_tok=3,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        ),
        "--capacity-factor 3",
    ),
    ("gemma", model("Gemma"), DECODER | dict(head_dim=6), ""),
    ("gemma2", model("Gemma2"), DECODER | dict(head_dim=6, sliding_window=5, query_pre_attn_scalar=9), ""),
    (
        "gemma3",
        text("Gemma3"),
        DECODER
        | dict(
            head_dim=6,
            sliding_window=5,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "",
    ),
    ("phi3", model("Phi3"), DECODER | dict(pad_token_id=0), ""),
    ("phi3-long", model("Phi3"), DECODER | dict(pad_token_id=0, rope_parameters=LONG_ROPE, original_max_position_embeddings=8), ""),
    ("phi", model("Phi"), DECODER | dict(qk_layernorm=True), ""),
    ("glm", model("Glm"), DECODER | dict(head_dim=8, pad_token_id=0), ""),
    ("glm4", model("Glm4"), DECODER | dict(head_dim=8, pad_token_id=0), ""),
    ("olmo", model("Olmo"), DECODER | dict(clip_qkv=0.5), ""),
    ("olmo2", model("Olmo2"), DECODER, ""),
    ("olmo3", model("Olmo3"), DECODER | dict(sliding_window=5, num_hidden_layers=4), ""),
    ("cohere", model("Cohere"), DECODER | dict(use_qk_norm=True), ""),
    ("cohere2", model("Cohere2"), DECODER | dict(sliding_window=5, num_hidden_layers=4), ""),
    ("granite", model("Granite"), DECODER | GRANITE, ""),
    ("nemotron", model("Nemotron"), DECODER | dict(head_dim=8), ""),
    ("smollm3", model("SmolLM3"), DECODER | dict(num_hidden_layers=4, pad_token_id=0), ""),
    ("ernie", model("Ernie4_5"), DECODER | dict(head_dim=8, use_bias=True), ""),
    ("starcoder2", model("Starcoder2"), DECODER | dict(sliding_window=5), ""),
    ("stablelm", model("StableLm"), DECODER | dict(partial_rotary_factor=0.5, use_qkv_bias=True), ""),
    (
        "stablelm-parallel",
        model("StableLm"),
        DECODER | dict(partial_rotary_factor=0.5, use_parallel_residual=True, qk_layernorm=True),
        "",
    ),
    ("gptj", model("GPTJ"), GPT2 | dict(rotary_dim=2), ""),
    ("gpt-neox", model("GPTNeoX"), NEOX, ""),
    ("gpt-neox-sequential", model("GPTNeoX"), NEOX | dict(use_parallel_residual=False, rotary_pct=0.5), ""),
    ("falcon", model("Falcon"), NEOX | dict(num_attention_heads=4), ""),
    ("falcon-40b", model("Falcon"), NEOX | dict(num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True), ""),
    (
        "falcon-rw",
        model("Falcon"),
        NEOX | dict(num_attention_heads=3, hidden_size=12, alibi=True, multi_query=False, parallel_attn=False, bias=True),
        "",
    ),
    ("bloom", model("Bloom"), dict(vocab_size=VOCABULARY, hidden_size=18, n_layer=2, n_head=3), ""),
    ("mpt", model("Mpt"), dict(vocab_size=VOCABULARY, d_model=18, n_layers=2, n_heads=3, max_seq_len=32), ""),
    (
        "opt",
        model("OPT"),
        dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, ffn_dim=24, num_attention_heads=4,
            max_position_embeddings=32, word_embed_proj_dim=16),
        "",
    ),
    (
        "opt-350m",
        model("OPT"),
        dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, ffn_dim=24, num_attention_heads=4,
            max_position_embeddings=32, word_embed_proj_dim=8, do_layer_norm_before=False),
        "",
    ),
    ("mamba2", model("Mamba2"), STATES, ""),
    ("mamba2-chunk", model("Mamba2"), STATES | dict(chunk_size=64, tie_word_embeddings=True), ""),
    ("mamba", model("Mamba"), MAMBA, ""),
    (
        "mamba-biased",
        model("Mamba"),
        MAMBA | dict(use_bias=True, use_conv_bias=False, time_step_rank=2, expand=3, tie_word_embeddings=False),
        "",
    ),
    ("falcon-mamba", model("FalconMamba"), MAMBA, ""),
    ("jamba", model("Jamba"), JAMBA, "--capacity-factor 2"),
    ("jamba-dense", model("Jamba"), JAMBA | dict(num_experts=1, num_experts_per_tok=1, mamba_proj_bias=True), ""),
    ("zamba2", model("Zamba2"), ZAMBA2, ""),
    (
        "zamba2-adapters",
        model("Zamba2"),
        ZAMBA2 | dict(use_shared_attention_adapter=True, use_mem_rope=True, add_bias_linear=True),
        "",
    ),
    ("bamba", model("Bamba"), HYBRID | dict(attn_layer_indices=[1]), ""),
    (
        "nemotron-h",
        model("NemotronH"),
        NEMOTRON | dict(layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"], mlp_bias=True),
        "",
    ),
    (
        "nemotron-3",
        model("NemotronH"),
        NEMOTRON | dict(layers_block_type=["linear_attention", "moe", "full_attention"], n_group=2, routed_scaling_factor=1.5),
        "--capacity-factor 2",
    ),
    (
        "granite4",
        model("GraniteMoeHybrid"),
        HYBRID | GRANITE | dict(layer_types=["linear_attention", "full_attention"], shared_intermediate_size=10, num_local_experts=4),
        "--capacity-factor 2",
    ),
    (
        "granite4-dense",
        model("GraniteMoeHybrid"),
        HYBRID | GRANITE
        | dict(layer_types=["linear_attention", "full_attention"], num_local_experts=0, position_embedding_type="rope"),
        "",
    ),
    ("bert", (hf.BertConfig, hf.BertForMaskedLM), BERT, ""),
    ("t5", (hf.T5Config, hf.T5ForConditionalGeneration), T5, ""),
    (
        "t5-v1.1",
        (hf.T5Config, hf.T5ForConditionalGeneration),
        T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        "",
    ),
    ("vit", (hf.ViTConfig, hf.ViTForImageClassification), VIT, ""),
    (
        "modernbert",
        (hf.ModernBertConfig, hf.ModernBertForMaskedLM),
        BERT | dict(local_attention=6, num_hidden_layers=3, pad_token_id=0),
        "",
    ),
    (
        "whisper",
        (hf.WhisperConfig, hf.WhisperForConditionalGeneration),
        dict(
            vocab_size=VOCABULARY,
            d_model=16,
            num_mel_bins=5,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=9,
            max_target_positions=16,
            **SPECIAL,
        ),
        "",
    ),
    (
        "clip",
        (hf.CLIPConfig, hf.CLIPModel),
        dict(
            text_config=PAIR | dict(vocab_size=VOCABULARY, max_position_embeddings=16, eos_token_id=7, bos_token_id=1),
            vision_config=PAIR | dict(image_size=16, patch_size=8),
            projection_dim=6,
        ),
        "",
    ),
    (
        "siglip",
        (hf.SiglipConfig, hf.SiglipModel),
        dict(
            text_config=PAIR | dict(vocab_size=VOCABULARY, max_position_embeddings=16),
            vision_config=PAIR | dict(image_size=16, patch_size=8),
        ),
        "",
    ),
]


def ids(*shape):
    # Tokens 0 and 1 are the padding of some models, whose row gets no gradient from a lookup.
    return torch.randint(2, VOCABULARY, shape)


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def causal(model):
    batch = dict(input_ids=ids(BATCH, TOKENS), labels=ids(BATCH, TOKENS))
    return batch, cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def masked(model):
    count = round(0.15 * TOKENS)
    places = torch.stack([torch.randperm(TOKENS)[:count].sort().values for _ in range(BATCH)])
    text = dict(input_ids=ids(BATCH, TOKENS))
    if model.config.model_type == "bert":
        text["token_type_ids"] = torch.randint(0, 2, (BATCH, TOKENS))
    batch = text | dict(masked_positions=places, labels=ids(BATCH, count))
    labels = torch.full((BATCH, TOKENS), -100).scatter(1, places, batch["labels"])
    # Transformers' own loss: a mean over what is not -100.
    return batch, model(**text, labels=labels).loss


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


def transcription(model):
    frames = 2 * model.config.max_source_positions
    batch = dict(
        input_features=torch.randn(BATCH, model.config.num_mel_bins, frames),
        decoder_input_ids=ids(BATCH, TOKENS),
        labels=ids(BATCH, TOKENS),
    )
    return batch, model(**batch).loss


def pairs(model):
    size = model.config.vision_config.image_size
    batch = dict(input_ids=ids(BATCH, TOKENS), pixel_values=torch.randn(BATCH, 3, size, size))
    # Every text has its end somewhere.
    batch["input_ids"][:, 5] = 7
    return batch, model(**batch, return_loss=True).loss


def task(kind):
    tasks = {
        "bert": masked,
        "clip": pairs,
        "modernbert": masked,
        "siglip": pairs,
        "t5": translation,
        "vit": image,
        "whisper": transcription,
    }
    return tasks.get(kind, causal)


# Names in published checkpoints of what newer versions of Transformers hold under other names.
PUBLISHED = {
    "vit": [
        ("vit.layers.", "vit.encoder.layer."),
        ("attention.q_proj", "attention.attention.query"),
        ("attention.k_proj", "attention.attention.key"),
        ("attention.v_proj", "attention.attention.value"),
        ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
    ],
    "gpt_neox": [("lm_head.", "embed_out.")],
}


def published(kind, name):
    if kind == "vit" and not name.startswith("vit.layers."):
        return name
    for new, old in PUBLISHED.get(kind, []):
        name = name.replace(new, old)
    return name


def record(folder, name, classes, sizes, options):
    torch.manual_seed(0)
    config_class, model_class = classes
    config = config_class(**sizes)
    # Falcon adds its biases twice where attention is written out.
    config._attn_implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
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
        key = published(config.model_type, key)
        if not parameter.requires_grad:
            tensors[f"input/{key}"] = parameter.detach()
            continue
        tensors[key] = parameter.detach()
        if parameter.grad is not None:
            tensors[f"grad/{key}"] = parameter.grad
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(config.to_dict(), indent=1, default=str))
    sequence = "" if config.model_type == "vit" else f"--seq {TOKENS} "
    (folder / f"{name}.options").write_text(f"--global-batch {BATCH} {sequence}{options}")


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    wanted = set(sys.argv[2:])
    for case in CASES:
        if not wanted or case[0] in wanted:
            record(Path(sys.argv[1]), *case)

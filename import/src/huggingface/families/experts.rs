//! Decoders whose layers are mixtures of experts.

use super::llama::{clip, is_part, multipliers, qk_norms, turned_layers};
use crate::huggingface::attention::{NormOver, QkNorm, Span};
use crate::huggingface::blocks::{Activation, Builder, Norm};
use crate::huggingface::config::Fields;
use crate::huggingface::decoder::{Decoder, Defaults, Feed, Gated, Mixer};
use crate::huggingface::error::ConfigError;
use crate::huggingface::latent::Latent;
use crate::huggingface::moe::{Experts, Gating, Mixture, Router, Scores, Shared};
use crate::huggingface::rope::{Rope, sharpness};
use altiplano_ir::array::RotaryHalves;

/// The name of a field with a number, and the number of a config without it.
pub(super) type Counted = (&'static str, u64);

/// The number of experts and the number chosen by each token.
pub(super) fn counts(fields: &Fields<'_>, count: Counted, chosen: Counted) -> Result<(u64, u64), ConfigError> {
    // Without `output_router_logits`, there is no load-balancing loss.
    fields.ignore(&["router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise"]);
    if fields.flag_or("output_router_logits", false)? {
        return Err(fields.unsupported("output_router_logits", &["false"]));
    }
    let sizes = (fields.main_size(count.0, count.1)?, fields.main_size(chosen.0, chosen.1)?);
    fields.at_most(chosen.0, sizes.1, count.0, sizes.0)?;
    Ok(sizes)
}

/// Gives these experts to all layers for which `which` holds.
pub(super) fn mix(decoder: &mut Decoder, name: &'static str, mixture: &Mixture, which: impl Fn(u64) -> bool) {
    decoder.each(|i, layer| {
        if which(i) {
            layer.feeds = vec![(name, Feed::Mixture(mixture.clone()))];
        }
    });
}

/// Mixtral (Jiang et al. 2024).
pub(crate) fn mixtral(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { inner: 14_336, kv_heads: Some(8), positions: 131_072, eps: 1e-5, ..Defaults::LLAMA };
    let mut decoder = Decoder::llama(fields, b, &Defaults { theta: 1e6, ..defaults })?;
    let (count, chosen) = counts(fields, ("num_local_experts", 8), ("num_experts_per_tok", 2))?;
    let (width, activation) = (fields.size_or("intermediate_size", defaults.inner)?, activation(fields)?);
    let experts = Experts::new(count, chosen, width, activation);
    mix(&mut decoder, "mlp", &Mixture { router: Router::softmax("gate", true), experts, shared: None }, |_| true);
    let window = fields.optional_size("sliding_window")?;
    decoder.each_attention(|_, attention| attention.span = Span::causal(window));
    decoder.build(b)
}

fn activation(fields: &Fields<'_>) -> Result<Activation, ConfigError> {
    Activation::read(fields, "hidden_act", "silu")
}

/// The layers with experts in Qwen's models: one in every few, except those that are listed as dense.
fn sparse_layers(fields: &Fields<'_>) -> Result<impl Fn(u64) -> bool, ConfigError> {
    let step = fields.size_or("decoder_sparse_step", 1)?;
    let dense = fields.numbers("mlp_only_layers")?.unwrap_or_default();
    Ok(move |i: u64| (i + 1).is_multiple_of(step) && !dense.contains(&(i as f64)))
}

/// Qwen1.5 and Qwen2 with experts, and a shared perceptron with its own gate.
pub(crate) fn qwen2_moe(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 151_936, hidden: 2048, inner: 5632, layers: 24, ..Defaults::LLAMA };
    let defaults = Defaults { heads: 16, kv_heads: Some(16), positions: 32_768, ..defaults };
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    let bias = fields.flag_or("qkv_bias", true)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, false));
    let (count, chosen) = counts(fields, ("num_experts", 60), ("num_experts_per_tok", 4))?;
    let width = fields.main_size("moe_intermediate_size", 1408)?;
    let shared = fields.main_size("shared_expert_intermediate_size", 5632)?;
    let mixture = Mixture {
        router: Router::softmax("gate", fields.flag_or("norm_topk_prob", false)?),
        experts: Experts::new(count, chosen, width, activation(fields)?),
        shared: Some(Shared { name: "shared_expert", width: shared, gate: Some("shared_expert_gate") }),
    };
    mix(&mut decoder, "mlp", &mixture, sparse_layers(fields)?);
    let used = fields.flag_or("use_sliding_window", false)?;
    let window = Some(fields.count_or("sliding_window", 4096)?).filter(|window| used && *window > 0);
    let last = fields.count_or("max_window_layers", 28)?;
    let default = |i: u64| match used && i % 2 == 0 && i < last {
        true => "sliding_attention",
        false => "full_attention",
    };
    let kinds = fields.of_layers("layer_types", decoder.layers.len() as u64, default)?;
    decoder.slide(&kinds, window);
    decoder.build(b)
}

/// Qwen3 with experts.
pub(crate) fn qwen3_moe(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 151_936, hidden: 2048, inner: 6144, layers: 24, ..Defaults::LLAMA };
    let mut defaults = Defaults { kv_heads: Some(4), positions: 32_768, ..defaults };
    let (mut count, mut chosen, mut width) = (128, 8, 768);
    let part = is_part(fields)?;
    if part {
        defaults = Defaults { inner: 5632, heads: 16, kv_heads: Some(16), positions: 128_000, ..defaults };
        defaults.theta = 500_000.0;
        (count, chosen, width) = (60, 4, 1408);
    }
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    let bias = fields.flag_or("attention_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    qk_norms(&mut decoder, NormOver::Head);
    let (count, chosen) = counts(fields, ("num_experts", count), ("num_experts_per_tok", chosen))?;
    let width = fields.main_size("moe_intermediate_size", width)?;
    let mixture = Mixture {
        // For models of images and text, the config does not state that gates are normalised.
        router: Router::softmax("gate", fields.flag_or("norm_topk_prob", part)?),
        experts: Experts::new(count, chosen, width, activation(fields)?),
        shared: None,
    };
    mix(&mut decoder, "mlp", &mixture, sparse_layers(fields)?);
    let used = fields.flag_or("use_sliding_window", false)?;
    let window = Some(fields.count_or("sliding_window", 4096)?).filter(|window| used && *window > 0);
    decoder.each_attention(|_, attention| attention.span = Span::causal(window));
    fields.ignore(&["max_window_layers"]);
    decoder.build(b)
}

/// OLMoE (Muennighoff et al. 2024): norms over all queries and all keys of a token.
pub(crate) fn olmoe(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 50_304, hidden: 2048, inner: 2048, layers: 16, ..Defaults::LLAMA };
    let mut decoder = Decoder::llama(fields, b, &Defaults { heads: 16, positions: 4096, eps: 1e-5, ..defaults })?;
    let bias = fields.flag_or("attention_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    qk_norms(&mut decoder, NormOver::All);
    clip(fields, &mut decoder)?;
    let (count, chosen) = counts(fields, ("num_experts", 64), ("num_experts_per_tok", 8))?;
    let width = fields.size_or("intermediate_size", defaults.inner)?;
    let mixture = Mixture {
        router: Router::softmax("gate", fields.flag_or("norm_topk_prob", false)?),
        experts: Experts::new(count, chosen, width, activation(fields)?),
        shared: None,
    };
    mix(&mut decoder, "mlp", &mixture, |_| true);
    decoder.build(b)
}

/// Granite 3 with experts.
pub(crate) fn granitemoe(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = Decoder::llama(fields, b, &Defaults::LLAMA)?;
    let bias = fields.flag_or("attention_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    multipliers(fields, &mut decoder)?;
    let (count, chosen) = counts(fields, ("num_local_experts", 8), ("num_experts_per_tok", 2))?;
    let width = fields.size_or("intermediate_size", Defaults::LLAMA.inner)?;
    let experts = Experts::new(count, chosen, width, activation(fields)?);
    let mixture = Mixture { router: Router::softmax("router", true), experts, shared: None };
    mix(&mut decoder, "block_sparse_moe", &mixture, |_| true);
    decoder.build(b)
}

/// gpt-oss (OpenAI 2025): attention sinks, windows in every other layer, and experts with clamped gates.
pub(crate) fn gpt_oss(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults {
        vocabulary: 201_088,
        hidden: 2880,
        inner: 2880,
        layers: 36,
        heads: 64,
        kv_heads: Some(8),
        head_width: Some(64),
        positions: 131_072,
        eps: 1e-5,
        theta: 150_000.0,
        ..Defaults::LLAMA
    };
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    let bias = fields.flag_or("attention_bias", true)?;
    decoder.each_attention(|_, attention| {
        *attention = attention.clone().with_biases(bias, bias);
        attention.sinks = true;
    });
    if !fields.has("rope_parameters") && !fields.has("rope_scaling") {
        let stretched = serde_json::json!({"rope_type": "yarn", "factor": 32.0, "truncate": false,
            "original_max_position_embeddings": 4096});
        let map = stretched.as_object().cloned().unwrap_or_default();
        let theta = fields.positive_or("rope_theta", defaults.theta)?;
        let width = 2 * decoder.ropes.first().map_or(0, |rope| rope.frequencies.len() as u64);
        let stretched = Fields::new(&map, &[]);
        decoder.ropes = vec![Rope::of(fields, Some(&stretched), "head_dim", width, theta, 1.0)?.0];
    }
    let (count, chosen) = counts(fields, ("num_local_experts", 128), ("num_experts_per_tok", 4))?;
    fields.ignore(&["experts_per_token", "initial_context_length"]);
    let (alpha, limit) = (fields.positive_or("swiglu_alpha", 1.702)?, fields.positive_or("swiglu_limit", 7.0)?);
    let mixture = Mixture {
        router: Router { bias: true, ..Router::softmax("router", true) },
        experts: Experts {
            count,
            chosen,
            width: fields.size_or("intermediate_size", defaults.inner)?,
            gating: Gating::Clamped { alpha, limit },
            transposed: true,
            bias: true,
            weigh_inputs: false,
        },
        shared: None,
    };
    mix(&mut decoder, "mlp", &mixture, |_| true);
    let default = |i: u64| if i % 2 == 0 { "sliding_attention" } else { "full_attention" };
    let kinds = fields.of_layers("layer_types", decoder.layers.len() as u64, default)?;
    let window = super::llama::window_or(fields, 128)?;
    decoder.slide(&kinds, window);
    decoder.build(b)
}

/// The text model of Llama 4 (Meta 2025). Layers with positions attend within chunks, and layers without see all
/// tokens. One in every few layers has experts and a shared perceptron.
pub(crate) fn llama4(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults {
        vocabulary: 202_048,
        hidden: 5120,
        inner: 8192,
        layers: 48,
        heads: 40,
        kv_heads: Some(8),
        head_width: Some(128),
        positions: 131_072,
        eps: 1e-5,
        theta: 500_000.0,
        ..Defaults::LLAMA
    };
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    decoder.halves = RotaryHalves::Interleaved;
    let bias = fields.flag_or("attention_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    let turned = turned_layers(fields, &mut decoder)?;
    let chunk = fields.optional_size("attention_chunk_size")?;
    let chunk = chunk.or((!fields.is_null("attention_chunk_size")).then_some(8192));
    let default = |i: u64| match turned[i as usize] && chunk.is_some() {
        true => "chunked_attention",
        false => "full_attention",
    };
    let kinds = fields.of_layers("layer_types", decoder.layers.len() as u64, default)?;
    let norm = fields.flag_or("use_qk_norm", true)?.then(|| QkNorm {
        names: ["qk_norm", "qk_norm"],
        norm: Norm { weight: false, ..Norm::rms(decoder.layers.first().map_or(1e-5, |layer| layer.norm.eps)) },
        over: NormOver::Head,
        after_rotary: true,
    });
    let temperature = crate::huggingface::attention::Temperature {
        floor: fields.positive_or("floor_scale", 8192.0)?,
        scale: fields.positive_or("attn_scale", 0.1)?,
    };
    let tuned = fields.flag_or("attn_temperature_tuning", true)?;
    decoder.each_attention(|i, attention| {
        let turns = attention.rotary.is_some();
        attention.qk_norm = norm.filter(|_| turns);
        attention.temperature = Some(temperature).filter(|_| tuned && !turns);
        attention.span = match chunk.filter(|_| kinds[i as usize] == "chunked_attention") {
            Some(chunk) => Span::Chunk { chunk },
            None => Span::Causal,
        };
    });

    let (count, chosen) = counts(fields, ("num_local_experts", 16), ("num_experts_per_tok", 1))?;
    let width = fields.size_or("intermediate_size", defaults.inner)?;
    let dense_width = fields.size_or("intermediate_size_mlp", 16_384)?;
    let activation = activation(fields)?;
    let mixture = Mixture {
        router: Router { scores: Scores::Sigmoid, ..Router::softmax("router", false) },
        experts: Experts { transposed: true, weigh_inputs: true, ..Experts::new(count, chosen, width, activation) },
        shared: Some(Shared { name: "shared_expert", width, gate: None }),
    };
    let step = fields.size_or("interleave_moe_layer_step", 1)?;
    let listed = fields.numbers("moe_layers")?;
    decoder.each(|i, layer| {
        let sparse = match &listed {
            Some(listed) => listed.contains(&(i as f64)),
            None => (i + 1).is_multiple_of(step),
        };
        let feed = match sparse {
            true => Feed::Mixture(mixture.clone()),
            false => Feed::Gated(Gated::new(dense_width, activation)),
        };
        layer.feeds = vec![("feed_forward", feed)];
    });
    // A setting of a compression tool.
    fields.ignore(&["for_llm_compressor"]);
    decoder.build(b)
}

/// A router by sigmoids with a balancing buffer, the number of experts, and the number that each token is sent to. `count` and
/// `groups` are the defaults of a config without these fields.
pub(crate) fn sigmoid_router(
    fields: &Fields<'_>,
    count: (u64, u64),
    groups: (u64, u64),
    scale: f64,
) -> Result<(Router, u64, u64), ConfigError> {
    let (count, chosen) = counts(fields, ("n_routed_experts", count.0), ("num_experts_per_tok", count.1))?;
    let groups = (fields.size_or("n_group", groups.0)?, fields.size_or("topk_group", groups.1)?);
    fields.divides("n_routed_experts", count, "n_group", groups.0)?;
    fields.at_most("topk_group", groups.1, "n_group", groups.0)?;
    fields.at_most("num_experts_per_tok", chosen, "n_routed_experts", count / groups.0 * groups.1)?;
    let router = Router {
        scores: Scores::Sigmoid,
        balanced: true,
        groups,
        normalise: fields.flag_or("norm_topk_prob", true)?.then_some(1e-20),
        scale: fields.positive_or("routed_scaling_factor", scale)?,
        ..Router::softmax("gate", false)
    };
    Ok((router, count, chosen))
}

/// Experts in groups, chosen by a sigmoid, with a shared perceptron. The first layers have no experts.
fn sigmoid_experts(
    fields: &Fields<'_>,
    decoder: &mut Decoder,
    count: u64,
    width: u64,
    groups: (u64, u64),
    scale: f64,
    dense: u64,
) -> Result<(), ConfigError> {
    let (router, count, chosen) = sigmoid_router(fields, (count, 8), groups, scale)?;
    let width = fields.main_size("moe_intermediate_size", width)?;
    let shared = fields.count_or("n_shared_experts", 1)?;
    let mixture = Mixture {
        router,
        experts: Experts::new(count, chosen, width, activation(fields)?),
        shared: (shared > 0).then_some(Shared { name: "shared_experts", width: width * shared, gate: None }),
    };
    let dense = fields.count_or("first_k_dense_replace", dense)?;
    mix(decoder, "mlp", &mixture, |i| i >= dense);
    // The layer that predicts later tokens is not part of Transformers' model. The words below name the variants built
    // here.
    fields.ignore(&["num_nextn_predict_layers", "num_mtp_layers", "ep_size", "moe_layer_freq"]);
    for (key, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if fields.word_or(key, known)? != known {
            return Err(fields.unsupported(key, &[known]));
        }
    }
    Ok(())
}

/// DeepSeek-V3 (DeepSeek-AI 2024) and Kimi K2: latent attention, and experts in groups with shared ones.
pub(crate) fn deepseek_v3(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults {
        vocabulary: 129_280,
        hidden: 7168,
        inner: 18_432,
        layers: 61,
        heads: 128,
        // Latent attention has its own heads, so this width is irrelevant.
        head_width: Some(64),
        positions: 4096,
        ..Defaults::LLAMA
    };
    fields.ignore(&["head_dim", "num_key_value_heads", "qk_head_dim"]);
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    let eps = decoder.layers.first().map_or(1e-6, |layer| layer.norm.eps);
    let mut latent = Latent::read(fields, eps)?;
    let (rope, part) = Rope::read_part(fields, "qk_rope_head_dim", latent.turned, defaults.theta, 1.0)?;
    if part.is_some() {
        return Err(fields.unsupported("partial_rotary_factor", &["1"]));
    }
    // Scores are sharpened by the square: once for queries and once for keys.
    let sharper = rope.stretch.filter(|(_, all)| *all != 0.0).map_or(1.0, |(factor, all)| sharpness(factor, all));
    latent.scale *= sharper * sharper;
    decoder.ropes = vec![rope];
    decoder.each(|_, layer| layer.mixer.1 = Mixer::Latent(latent.clone()));
    // Pairs are interleaved as in the original, unless the config says that the matrices were permuted.
    let interleaved = fields.flag_or("rope_interleave", true)?;
    decoder.halves = if interleaved { RotaryHalves::Interleaved } else { RotaryHalves::Split };
    sigmoid_experts(fields, &mut decoder, 256, 2048, (8, 4), 2.5, 3)?;
    decoder.build(b)
}

/// GLM-4.5 and its successors: grouped attention with positions in half of each head, and experts like DeepSeek-V3's.
pub(crate) fn glm4_moe(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults {
        vocabulary: 151_552,
        inner: 10_944,
        layers: 46,
        heads: 96,
        kv_heads: Some(8),
        positions: 131_072,
        eps: 1e-5,
        partial: 0.5,
        ..Defaults::LLAMA
    };
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    let bias = fields.flag_or("attention_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, false));
    if fields.flag_or("use_qk_norm", false)? {
        qk_norms(&mut decoder, NormOver::Head);
    }
    sigmoid_experts(fields, &mut decoder, 128, 1408, (1, 1), 1.0, 1)?;
    decoder.build(b)
}

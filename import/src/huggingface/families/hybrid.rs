//! Mamba-2, and decoders that mix its state spaces with attention and perceptrons.

use super::experts::sigmoid_router;
use super::llama::multipliers;
use super::mamba::{Stacked, stacked};
use crate::huggingface::attention::SelfAttention;
use crate::huggingface::blocks::{Activation, Builder, Norm};
use crate::huggingface::config::{Fields, MAX_SIZE};
use crate::huggingface::decoder::{
    Around, Decoder, Defaults, Embedding, Feed, GateUp, Gated, Head, Layer, Mixer, Names, Order, Plain,
};
use crate::huggingface::error::ConfigError;
use crate::huggingface::moe::{Experts, Gating, Mixture, Router, Shared};
use crate::huggingface::state_space::StateSpace;
use altiplano_ir::array::RotaryHalves;

/// The limits to which `key` clamps the steps of a state space.
fn step_limits(fields: &Fields<'_>, key: &str) -> Result<(f64, f64), ConfigError> {
    match fields.numbers(key)?.as_deref() {
        None => Ok((0.0, f64::INFINITY)),
        // JSON has no infinity, so a large number stands for it.
        Some([least, most]) if least <= most => Ok((*least, if *most > 1e300 { f64::INFINITY } else { *most })),
        Some(_) => Err(fields.expected(key, "the least and the greatest step")),
    }
}

/// Checks that the width of all heads of a state space, and that of its shared projections, fit the widest layer.
fn bounded(fields: &Fields<'_>, keys: [&str; 2], inner: u64, shared: u64) -> Result<(), ConfigError> {
    fields.at_most(keys[0], inner, "the widest layer", MAX_SIZE)?;
    fields.at_most(keys[1], shared, "the widest layer", MAX_SIZE)
}

/// Mamba-2 (Dao and Gu 2024): state spaces only.
pub(crate) fn mamba2(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let hidden = fields.main_size("hidden_size", 4096)?;
    let heads = fields.main_size("num_heads", 128)?;
    let head_width = fields.size_or("head_dim", 64)?;
    let inner = fields.size_or("expand", 2)? * hidden;
    if inner != heads * head_width {
        return Err(fields.expected("num_heads", format!("{inner} (hidden_size times expand) over head_dim")));
    }
    let eps = fields.positive_or("layer_norm_epsilon", 1e-5)?;
    let mixer = StateSpace {
        heads,
        head_width,
        state: fields.size_or("state_size", 128)?,
        groups: fields.size_or("n_groups", 8)?,
        kernel: fields.size_or("conv_kernel", 4)?,
        chunk: fields.size_or("chunk_size", 256)?,
        bias: fields.flag_or("use_bias", false)?,
        conv_bias: fields.flag_or("use_conv_bias", true)?,
        activation: Activation::read(fields, "hidden_act", "silu")?,
        eps,
        step_limits: step_limits(fields, "time_step_limit")?,
    };
    fields.divides("num_heads", heads, "n_groups", mixer.groups)?;
    bounded(fields, ["expand", "state_size"], inner, mixer.groups * mixer.state)?;
    // Fields about weight initialisation.
    fields.ignore(&["rescale_prenorm_residual", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor"]);
    fields.ignore(&["time_step_scale", "time_step_init_scheme", "rms_norm", "norm_before_gate"]);
    let norm = Norm::rms(eps);
    let defaults = Stacked { layers: 64, vocabulary: 32_768, tied: false };
    stacked(fields, b, Mixer::StateSpace(mixer), norm, hidden, defaults)
}

/// The state space of a hybrid, whose fields begin with `mamba_`.
fn state_space(fields: &Fields<'_>, hidden: u64, eps: f64) -> Result<StateSpace, ConfigError> {
    let heads = fields.size_or("mamba_n_heads", 128)?;
    let inner = fields.size_or("mamba_expand", 2)? * hidden;
    fields.divides("mamba_expand", inner, "mamba_n_heads", heads)?;
    let head_width = match fields.is_word("mamba_d_head") {
        true => inner / heads,
        false => fields.size_or("mamba_d_head", inner / heads)?,
    };
    if head_width * heads != inner {
        return Err(fields.expected("mamba_d_head", format!("{inner} (hidden_size times mamba_expand) over {heads}")));
    }
    let groups = fields.size_or("mamba_n_groups", 1)?;
    fields.divides("mamba_n_heads", heads, "mamba_n_groups", groups)?;
    let state = fields.size_or("mamba_d_state", 256)?;
    bounded(fields, ["mamba_expand", "mamba_d_state"], inner, groups * state)?;
    Ok(StateSpace {
        heads,
        head_width,
        state,
        groups,
        kernel: fields.size_or("mamba_d_conv", 4)?,
        chunk: fields.size_or("mamba_chunk_size", 256)?,
        bias: fields.flag_or("mamba_proj_bias", false)?,
        conv_bias: fields.flag_or("mamba_conv_bias", true)?,
        activation: Activation::read(fields, "hidden_act", "silu")?,
        eps,
        step_limits: step_limits(fields, "time_step_limit")?,
    })
}

/// Bamba (IBM, Princeton and UIUC 2024): attention in a few layers.
pub(crate) fn bamba(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 128_000, inner: 14_336, kv_heads: Some(8), eps: 1e-5, ..Defaults::LLAMA };
    let mut decoder = Decoder::llama(fields, b, &Defaults { positions: 262_144, partial: 0.5, ..defaults })?;
    let (bias, mlp_bias) = (fields.flag_or("attention_bias", false)?, fields.flag_or("mlp_bias", false)?);
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    decoder.each_gated(|gated| gated.bias = mlp_bias);
    let eps = decoder.final_norm.map_or(1e-5, |norm| norm.eps);
    let mixer = state_space(fields, decoder.hidden, eps)?;
    let attends = fields.numbers("attn_layer_indices")?.unwrap_or_default();
    fields.ignore(&["layer_types", "layers_block_type", "num_logits_to_keep", "z_loss_coefficient"]);
    decoder.each(|i, layer| {
        if !attends.contains(&(i as f64)) {
            layer.mixer = ("mamba", Mixer::StateSpace(mixer.clone()));
        }
        layer.order = Order::before("input_layernorm", "pre_ff_layernorm");
        layer.feeds.iter_mut().for_each(|feed| feed.0 = "feed_forward");
    });
    decoder.names.final_norm = "final_layernorm";
    decoder.build(b)
}

/// Granite 4 (IBM 2025): attention in a few layers, with or without experts, and a shared perceptron.
pub(crate) fn granitemoehybrid(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = Decoder::llama(fields, b, &Defaults::LLAMA)?;
    let bias = fields.flag_or("attention_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    multipliers(fields, &mut decoder)?;
    let turned = match fields.word_or("position_embedding_type", "none")?.as_str() {
        "rope" => true,
        "none" | "nope" => false,
        _ => return Err(fields.unsupported("position_embedding_type", &["rope", "nope"])),
    };
    let eps = decoder.final_norm.map_or(1e-6, |norm| norm.eps);
    let mixer = state_space(fields, decoder.hidden, eps)?;
    let activation = Activation::read(fields, "hidden_act", "silu")?;
    let layers = decoder.layers.len() as u64;
    let kinds = fields.of_layers("layer_types", layers, |_| "linear_attention")?;
    let width = fields.main_size("shared_intermediate_size", 1024)?;
    let shared =
        Gated { first: GateUp::Joined("input_linear"), down: "output_linear", ..Gated::new(width, activation) };
    let count = fields.count_or("num_local_experts", 8)?;
    let mixture = match count {
        0 => None,
        count => {
            let chosen = fields.main_size("num_experts_per_tok", 2)?;
            fields.at_most("num_experts_per_tok", chosen, "num_local_experts", count)?;
            let width = fields.size_or("intermediate_size", Defaults::LLAMA.inner)?;
            let experts = Experts::new(count, chosen, width, activation);
            Some(Mixture { router: Router::softmax("router", true), experts, shared: None })
        }
    };
    fields.ignore(&["router_aux_loss_coef", "normalization_function", "init_method", "embedding_multiplier"]);
    if count == 0 {
        fields.ignore(&["num_experts_per_tok", "intermediate_size"]);
    }
    for (i, layer) in decoder.layers.iter_mut().enumerate() {
        match kinds[i] {
            "attention" | "full_attention" => {}
            "mamba" | "linear_attention" => layer.mixer = ("mamba", Mixer::StateSpace(mixer.clone())),
            _ => return Err(fields.unsupported("layer_types", &["attention", "mamba"])),
        }
        let experts = mixture.clone().map(|mixture| ("block_sparse_moe", Feed::Mixture(mixture)));
        layer.feeds = experts.into_iter().chain([("shared_mlp", Feed::Gated(shared))]).collect();
    }
    if !turned {
        decoder.each_attention(|_, attention| attention.rotary = None);
    }
    decoder.build(b)
}

/// Nemotron-H and Nemotron 3 (NVIDIA 2025): each layer is one of a state space, attention without positions, a perceptron, and
/// experts without gates.
pub(crate) fn nemotron_h(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let hidden = fields.main_size("hidden_size", 4096)?;
    let eps = fields.positive_or("layer_norm_epsilon", 1e-5)?;
    let state_space = nemotron_state_space(fields, eps)?;
    let defaults = Defaults { kv_heads: Some(8), head_width: Some(128), ..Defaults::LLAMA };
    let attention = SelfAttention::read(fields, hidden, &defaults)?;
    let activation = Activation::read(fields, "mlp_hidden_act", "relu2")?;
    let mut feed = Plain::new(fields.main_size("intermediate_size", 21_504)?, activation);
    feed.matrix.bias = fields.flag_or("mlp_bias", false)?;

    // A list of words, or a letter for each layer.
    let letters = fields.word_or("hybrid_override_pattern", "")?;
    let of_letter = |letter| match letter {
        'M' => "linear_attention",
        '*' => "full_attention",
        '-' => "mlp",
        'E' => "moe",
        _ => "",
    };
    let kinds: Vec<&str> = match fields.words("layer_types")? {
        Some(words) => words,
        None if letters.is_empty() => vec!["linear_attention", "moe", "full_attention", "mlp"],
        None => letters.chars().map(of_letter).collect(),
    };
    let mixture = match kinds.contains(&"moe") {
        true => Some(ungated_experts(fields, activation)?),
        false => None,
    };
    let norm = Norm::rms(eps);
    let wide = fields.flag_or("residual_in_fp32", false)?;
    let layer = |kind: &&str| {
        let (mixer, feed) = match (*kind, &mixture) {
            ("linear_attention" | "mamba", _) => (Mixer::StateSpace(state_space.clone()), None),
            ("full_attention" | "attention", _) => (Mixer::attention(attention.clone()), None),
            ("mlp", _) => (Mixer::Nothing, Some(Feed::Plain(feed))),
            ("moe", Some(mixture)) => (Mixer::Nothing, Some(Feed::Mixture(mixture.clone()))),
            _ => {
                let key = if letters.is_empty() { "layer_types" } else { "hybrid_override_pattern" };
                return Err(
                    fields.unsupported(key, &["linear_attention (M)", "full_attention (*)", "mlp (-)", "moe (E)"])
                );
            }
        };
        let order = Order::Sequential { mixer: Around::before("norm"), feed: Around::before("norm") };
        let feeds = feed.into_iter().map(|feed| ("mixer", feed)).collect();
        Ok(Layer { mixer: ("mixer", mixer), feeds, order, norm, residual: 1.0, wide })
    };
    let layers = kinds.iter().map(layer).collect::<Result<Vec<_>, ConfigError>>()?;
    // Their number is that of the kinds, their head is never the table of embeddings, and steps are limited by the least alone.
    fields.ignore(&["num_hidden_layers", "tie_word_embeddings", "time_step_limit", "time_step_max", "time_step_floor"]);
    fields.ignore(&["expand", "mamba_proj_bias", "attention_bias", "sliding_window", "rescale_prenorm_residual"]);
    fields.ignore(&[
        "num_logits_to_keep",
        "num_nextn_predict_layers",
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
    ]);
    fields.ignore(&["mamba_ssm_cache_dtype", "use_mamba_kernels", "moe_shared_expert_overlap"]);
    b.without_dropout(fields, &["attention_dropout", "hidden_dropout"])?;
    let decoder = Decoder {
        names: Names { embedding: "embeddings", final_norm: "norm_f", ..Names::LLAMA },
        vocabulary: fields.main_size("vocab_size", 131_072)?,
        hidden,
        positions: fields.size_or("max_position_embeddings", 4096)?,
        embedding: Embedding::default(),
        ropes: Vec::new(),
        halves: RotaryHalves::Split,
        layers,
        final_norm: Some(norm),
        head: Head { tied: false, bias: false, scale: 1.0, cap: None },
    };
    decoder.build(b)
}

fn nemotron_state_space(fields: &Fields<'_>, eps: f64) -> Result<StateSpace, ConfigError> {
    let heads = fields.main_size("mamba_num_heads", 128)?;
    let head_width = fields.size_or("mamba_head_dim", 64)?;
    let groups = fields.size_or("n_groups", 8)?;
    fields.divides("mamba_num_heads", heads, "n_groups", groups)?;
    let state = fields.size_or("ssm_state_size", 128)?;
    bounded(fields, ["mamba_head_dim", "ssm_state_size"], heads * head_width, groups * state)?;
    Ok(StateSpace {
        heads,
        head_width,
        state,
        groups,
        kernel: fields.size_or("conv_kernel", 4)?,
        chunk: fields.size_or("chunk_size", 128)?,
        bias: fields.flag_or("use_bias", false)?,
        conv_bias: fields.flag_or("use_conv_bias", true)?,
        activation: Activation::read(fields, "mamba_hidden_act", "silu")?,
        eps,
        step_limits: (fields.positive_or("time_step_min", 0.001)?, f64::INFINITY),
    })
}

/// The experts of Nemotron 3, beside a shared perceptron.
fn ungated_experts(fields: &Fields<'_>, activation: Activation) -> Result<Mixture, ConfigError> {
    if fields.optional_size("moe_latent_size")?.is_some() {
        return Err(fields.unsupported("moe_latent_size", &["null"]));
    }
    let (router, count, chosen) = sigmoid_router(fields, (8, 2), (1, 1), 1.0)?;
    let width = fields.main_size("moe_intermediate_size", 7688)?;
    let experts = Experts { gating: Gating::Ungated(activation), ..Experts::new(count, chosen, width, activation) };
    let width = fields.size_or("moe_shared_expert_intermediate_size", 7688)?;
    fields.ignore(&["n_shared_experts"]);
    Ok(Mixture { router, experts, shared: Some(Shared { name: "shared_experts", width, gate: None }) })
}

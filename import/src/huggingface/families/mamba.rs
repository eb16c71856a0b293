//! Mamba and Falcon Mamba, and Jamba, which mixes its state spaces with attention and experts.

use super::experts::{counts, mix};
use crate::huggingface::blocks::{Activation, Builder, Norm};
use crate::huggingface::config::{Fields, MAX_SIZE};
use crate::huggingface::decoder::{Around, Decoder, Defaults, Embedding, Head, Layer, Mixer, Names, Order};
use crate::huggingface::error::ConfigError;
use crate::huggingface::moe::{Experts, Mixture, Router};
use crate::huggingface::selective::Selective;
use altiplano_ir::array::RotaryHalves;

/// The field's number, or a sixteenth of the model's width.
fn step_rank(fields: &Fields<'_>, key: &str, hidden: u64) -> Result<u64, ConfigError> {
    if fields.is_word(key) && fields.word(key)? != "auto" {
        return Err(fields.expected(key, "a size, or \"auto\""));
    }
    if fields.is_word(key) { Ok(hidden.div_ceil(16)) } else { fields.size_or(key, hidden.div_ceil(16)) }
}

/// Checks that the features and their states fit the widest layer.
fn bounded(fields: &Fields<'_>, keys: [&'static str; 2], mixer: &Selective) -> Result<(), ConfigError> {
    fields.at_most(keys[0], mixer.inner, "the widest layer", MAX_SIZE)?;
    fields.at_most(keys[1], mixer.state, "the widest layer", MAX_SIZE)
}

/// Mamba (Gu and Dao 2023).
pub(crate) fn mamba(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    state_spaces(fields, b, None)
}

/// Falcon Mamba (TII 2024): norms without weights inside the state space.
pub(crate) fn falcon_mamba(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let eps = fields.positive_or("mixer_rms_eps", 1e-6)?;
    state_spaces(fields, b, Some(Norm { weight: false, ..Norm::rms(eps) }))
}

/// A decoder of state spaces alone, with this norm inside them.
fn state_spaces(fields: &Fields<'_>, b: &mut Builder, inside: Option<Norm>) -> Result<(), ConfigError> {
    let hidden = fields.main_size("hidden_size", 768)?;
    let mixer = Selective {
        inner: fields.size_or("expand", 2)? * hidden,
        state: fields.size_or("state_size", 16)?,
        rank: step_rank(fields, "time_step_rank", hidden)?,
        kernel: fields.size_or("conv_kernel", 4)?,
        bias: fields.flag_or("use_bias", false)?,
        conv_bias: fields.flag_or("use_conv_bias", true)?,
        activation: Activation::read(fields, "hidden_act", "silu")?,
        norm: inside,
    };
    bounded(fields, ["expand", "state_size"], &mixer)?;
    // The first few follow from others, and the rest are about weight initialisation and implementations.
    fields.ignore(&["intermediate_size", "d_inner", "d_model", "n_layer", "ssm_cfg", "pad_vocab_size_multiple"]);
    fields.ignore(&["rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor"]);
    fields.ignore(&["time_step_scale", "time_step_init_scheme", "rms_norm", "fused_add_norm"]);
    fields.ignore(&["use_mambapy", "use_associative_scan"]);
    let norm = Norm::rms(fields.positive_or("layer_norm_epsilon", 1e-5)?);
    let defaults = Stacked { layers: 32, vocabulary: 50_280, tied: true };
    stacked(fields, b, Mixer::Selective(mixer), norm, hidden, defaults)
}

/// Sizes of a config without them.
pub(super) struct Stacked {
    pub layers: u64,
    pub vocabulary: u64,
    pub tied: bool,
}

/// Builds a decoder whose layers are a norm and a mixer each.
pub(super) fn stacked(
    fields: &Fields<'_>,
    b: &mut Builder,
    mixer: Mixer,
    norm: Norm,
    hidden: u64,
    defaults: Stacked,
) -> Result<(), ConfigError> {
    let layer = Layer {
        mixer: ("mixer", mixer),
        feeds: Vec::new(),
        order: Order::Sequential { mixer: Around::before("norm"), feed: Around::default() },
        norm,
        residual: 1.0,
        wide: fields.flag_or("residual_in_fp32", true)?,
    };
    let layers = fields.main_layers("num_hidden_layers", defaults.layers)?;
    let decoder = Decoder {
        names: Names {
            model: "backbone",
            embedding: "embeddings",
            layers: "layers",
            final_norm: "norm_f",
            head: "lm_head",
        },
        vocabulary: fields.main_size("vocab_size", defaults.vocabulary)?,
        hidden,
        // There is no limit. This is the length that the models were trained on.
        positions: 2048,
        embedding: Embedding::default(),
        ropes: Vec::new(),
        halves: RotaryHalves::Split,
        layers: vec![layer; layers as usize],
        final_norm: Some(norm),
        head: Head { tied: fields.flag_or("tie_word_embeddings", defaults.tied)?, bias: false, scale: 1.0, cap: None },
    };
    decoder.build(b)
}

/// Jamba (AI21 2024): attention without positions in a few layers, experts in some, and norms inside state spaces.
pub(crate) fn jamba(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 65_536, inner: 14_336, kv_heads: Some(8), ..Defaults::LLAMA };
    let mut decoder = Decoder::llama(fields, b, &Defaults { positions: 262_144, ..defaults })?;
    let norm = decoder.layers.first().map_or(Norm::rms(1e-6), |layer| layer.norm);
    let mixer = Selective {
        inner: fields.size_or("mamba_expand", 2)? * decoder.hidden,
        state: fields.size_or("mamba_d_state", 16)?,
        rank: step_rank(fields, "mamba_dt_rank", decoder.hidden)?,
        kernel: fields.size_or("mamba_d_conv", 4)?,
        bias: fields.flag_or("mamba_proj_bias", false)?,
        conv_bias: fields.flag_or("mamba_conv_bias", true)?,
        activation: Activation::read(fields, "hidden_act", "silu")?,
        norm: Some(norm),
    };
    bounded(fields, ["mamba_expand", "mamba_d_state"], &mixer)?;
    let (every, first) = (fields.size_or("attn_layer_period", 8)?, fields.count_or("attn_layer_offset", 4)?);
    fields.ignore(&["use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep"]);
    fields.ignore(&["layers_block_type", "layer_types", "layers_num_experts", "mamba_inner_layernorms"]);
    decoder.each(|i, layer| {
        if i % every != first {
            layer.mixer = ("mamba", Mixer::Selective(mixer.clone()));
        }
        layer.order = Order::before("input_layernorm", "pre_ff_layernorm");
        layer.feeds.iter_mut().for_each(|feed| feed.0 = "feed_forward");
    });
    let (every, first) = (fields.size_or("expert_layer_period", 2)?, fields.count_or("expert_layer_offset", 1)?);
    let (count, chosen) = counts(fields, ("num_experts", 16), ("num_experts_per_tok", 2))?;
    if count > 1 {
        let width = fields.size_or("intermediate_size", defaults.inner)?;
        let experts = Experts::new(count, chosen, width, mixer.activation);
        let mixture = Mixture { router: Router::softmax("router", false), experts, shared: None };
        mix(&mut decoder, "feed_forward", &mixture, |i| i % every == first);
    }
    decoder.each_attention(|_, attention| attention.rotary = None);
    decoder.names.final_norm = "final_layernorm";
    decoder.build(b)
}

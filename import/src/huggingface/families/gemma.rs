//! Gemma 1 to 3 (Gemma team 2024, 2025). Embeddings are scaled by the root of the width, and RMS norms store their
//! weight minus one. From Gemma 2 on, norms surround each part and most layers have windows. Gemma 2 caps scores, and
//! Gemma 3 has norms of queries and keys.

use super::llama::{qk_norms, window_or};
use crate::huggingface::attention::NormOver;
use crate::huggingface::blocks::{Activation, Builder, Norm};
use crate::huggingface::config::Fields;
use crate::huggingface::decoder::{Around, Decoder, Defaults, Order};
use crate::huggingface::error::ConfigError;

const DEFAULTS: Defaults = Defaults {
    vocabulary: 256_000,
    hidden: 2304,
    inner: 9216,
    layers: 26,
    heads: 8,
    kv_heads: Some(4),
    head_width: Some(256),
    positions: 8192,
    activation: "gelu_pytorch_tanh",
    tied: true,
    ..Defaults::LLAMA
};

fn decoder(fields: &Fields<'_>, b: &mut Builder, defaults: &Defaults) -> Result<Decoder, ConfigError> {
    let norm = Norm { less_one: true, ..Norm::rms(fields.positive_or("rms_norm_eps", defaults.eps)?) };
    let mut decoder = Decoder::with_norm(fields, b, defaults, norm)?;
    if fields.flag_or("use_bidirectional_attention", false)? {
        return Err(fields.unsupported("use_bidirectional_attention", &["false"]));
    }
    let bias = fields.flag_or("attention_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    decoder.embedding.scale = Some((decoder.hidden as f64).sqrt());
    Ok(decoder)
}

pub(crate) fn gemma(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { hidden: 3072, inner: 24_576, layers: 28, heads: 16, kv_heads: Some(16), ..DEFAULTS };
    let mut decoder = decoder(fields, b, &defaults)?;
    // Configs with `gelu` mean its tanh approximation, with which the models were trained.
    decoder.each_gated(|gated| {
        if gated.activation == Activation::GeluErf {
            gated.activation = Activation::GeluTanh;
        }
    });
    fields.ignore(&["hidden_activation"]);
    decoder.build(b)
}

/// The common settings of Gemma 2 and 3. One in every `period` layers sees all tokens.
fn newer(fields: &Fields<'_>, decoder: &mut Decoder, period: u64) -> Result<Vec<bool>, ConfigError> {
    decoder.each(|_, layer| {
        layer.order = Order::Sequential {
            mixer: Around::both("input_layernorm", "post_attention_layernorm"),
            feed: Around::both("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        };
    });
    let scale = 1.0 / fields.positive_or("query_pre_attn_scalar", 256.0)?.sqrt();
    decoder.each_attention(|_, attention| attention.scale = Some(scale));
    let default = |i: u64| if (i + 1).is_multiple_of(period) { "full_attention" } else { "sliding_attention" };
    let kinds = fields.of_layers("layer_types", decoder.layers.len() as u64, default)?;
    let window = window_or(fields, 4096)?;
    decoder.slide(&kinds, window);
    Ok(kinds.iter().map(|kind| *kind == "sliding_attention").collect())
}

pub(crate) fn gemma2(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = decoder(fields, b, &DEFAULTS)?;
    newer(fields, &mut decoder, 2)?;
    let cap = cap_or(fields, "attn_logit_softcapping", Some(50.0))?;
    decoder.each_attention(|_, attention| attention.cap = cap);
    decoder.head.cap = cap_or(fields, "final_logit_softcapping", Some(30.0))?;
    decoder.build(b)
}

pub(crate) fn gemma3(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 262_208, positions: 131_072, theta: 1e6, ..DEFAULTS };
    let mut decoder = decoder(fields, b, &defaults)?;
    let period = fields.size_or("sliding_window_pattern", 6)?;
    let slides = newer(fields, &mut decoder, period)?;
    qk_norms(&mut decoder, NormOver::Head);
    // Transformers' model does not cap the scores, whatever the config says.
    fields.ignore(&["attn_logit_softcapping"]);
    decoder.head.cap = cap_or(fields, "final_logit_softcapping", None)?;

    // Layers with a window have faster angles, which are never stretched.
    let local = fields.positive_or("rope_local_base_freq", 10_000.0)?;
    decoder.ropes_by_span(fields, &slides, [defaults.theta, local])?;
    decoder.build(b)
}

/// The number at which `key` caps. `None` if the config says null.
fn cap_or(fields: &Fields<'_>, key: &str, default: Option<f64>) -> Result<Option<f64>, ConfigError> {
    match (fields.has(key), fields.is_null(key)) {
        (true, _) => fields.positive(key).map(Some),
        (_, true) => Ok(None),
        _ => Ok(default),
    }
}

//! Cohere's Command R and R7B. Both parts of a layer run in parallel under one layer norm without bias. Rotary pairs
//! are interleaved, and logits are scaled.

use super::llama::window_or;
use crate::huggingface::attention::{NormOver, QkNorm, Span};
use crate::huggingface::blocks::{Builder, Norm};
use crate::huggingface::config::Fields;
use crate::huggingface::decoder::{Decoder, Defaults, Order};
use crate::huggingface::error::ConfigError;
use altiplano_ir::array::RotaryHalves;

const DEFAULTS: Defaults = Defaults {
    vocabulary: 256_000,
    hidden: 8192,
    inner: 22_528,
    layers: 40,
    heads: 64,
    positions: 8192,
    tied: true,
    ..Defaults::LLAMA
};

fn decoder(fields: &Fields<'_>, b: &mut Builder, theta: f64) -> Result<Decoder, ConfigError> {
    let norm = Norm { bias: false, ..Norm::layer(fields.positive_or("layer_norm_eps", 1e-5)?) };
    let mut decoder = Decoder::with_norm(fields, b, &Defaults { theta, ..DEFAULTS }, norm)?;
    let bias = fields.flag_or("attention_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    decoder.halves = RotaryHalves::Interleaved;
    decoder.each(|_, layer| layer.order = Order::Parallel { mixer: "input_layernorm", feed: None });
    decoder.head.scale = fields.positive_or("logit_scale", 0.0625)?;
    Ok(decoder)
}

pub(crate) fn cohere(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = decoder(fields, b, 500_000.0)?;
    if fields.flag_or("use_qk_norm", false)? {
        let Some(norm) = decoder.final_norm else { return decoder.build(b) };
        let names = ["q_norm", "k_norm"];
        let qk_norm = QkNorm { names, norm, over: NormOver::EachHead, after_rotary: false };
        decoder.each_attention(|_, attention| attention.qk_norm = Some(qk_norm));
    }
    decoder.build(b)
}

/// Only layers with a window have positions.
pub(crate) fn cohere2(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = decoder(fields, b, 10_000.0)?;
    let period = fields.size_or("sliding_window_pattern", 4)?;
    let default = |i: u64| if (i + 1).is_multiple_of(period) { "full_attention" } else { "sliding_attention" };
    let kinds = fields.of_layers("layer_types", decoder.layers.len() as u64, default)?;
    let window = window_or(fields, 4096)?;
    decoder.slide(&kinds, window);
    decoder.each_attention(|i, attention| {
        let slides = kinds[i as usize] == "sliding_attention" && window.is_some();
        attention.rotary = attention.rotary.filter(|_| slides);
        if !slides {
            attention.span = Span::Causal;
        }
    });
    decoder.build(b)
}

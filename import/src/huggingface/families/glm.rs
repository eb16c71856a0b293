//! GLM-4 (GLM team 2024): joined gates, biases of q, k and v, and interleaved rotary pairs in half of each head. The
//! newer GLM-4 has norms around each part.

use crate::huggingface::blocks::Builder;
use crate::huggingface::config::Fields;
use crate::huggingface::decoder::{Around, Decoder, Defaults, Order};
use crate::huggingface::error::ConfigError;
use altiplano_ir::array::RotaryHalves;

pub(crate) fn glm(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let around = fields.word_or("model_type", "")? == "glm4";
    let mut decoder = Decoder::llama(
        fields,
        b,
        &Defaults {
            vocabulary: 151_552,
            inner: 13_696,
            layers: 40,
            kv_heads: Some(2),
            head_width: Some(128),
            positions: 131_072,
            eps: 1.5625e-7,
            partial: 0.5,
            ..Defaults::LLAMA
        },
    )?;
    decoder.halves = RotaryHalves::Interleaved;
    let bias = fields.flag_or("attention_bias", true)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, false));
    decoder.join_gates();
    if around {
        decoder.each(|_, layer| {
            layer.order = Order::Sequential {
                mixer: Around::both("input_layernorm", "post_self_attn_layernorm"),
                feed: Around::both("post_attention_layernorm", "post_mlp_layernorm"),
            };
        });
    }
    decoder.build(b)
}

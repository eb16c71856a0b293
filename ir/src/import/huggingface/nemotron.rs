//! Nemotron-4 (Parmar et al. 2024): decoders whose perceptrons square a ReLU and have no gate, with layer norms whose weight
//! is stored less one, and rotary positions in a part of each head.

use super::attention::GroupedAttention;
use super::blocks::{Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use super::rope::Rope;
use crate::array::{self, RotaryHalves};
use crate::dtype::DType;
use crate::op::Binary;

pub fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let (vocabulary, hidden) = (fields.size("vocab_size")?, fields.size("hidden_size")?);
    let layers = fields.layers("num_hidden_layers")?;
    let width = fields.size("intermediate_size")?;
    let eps = fields.positive_or("norm_eps", 1e-5)?;
    let tied = fields.flag_or("tie_word_embeddings", false)?;
    let (bias, mlp_bias) = (fields.flag_or("attention_bias", false)?, fields.flag_or("mlp_bias", false)?);
    let activation = fields.word_or("hidden_act", "relu2")?;
    if activation != "relu2" {
        return Err(fields.unsupported("hidden_act", &["relu2"]));
    }
    let part = fields.number_or("partial_rotary_factor", 0.5)?;
    let mut attention = GroupedAttention::read(fields)?;
    attention.bias = (bias, bias);
    let turned = (attention.head_width as f64 * part) as u64;
    attention.turned = Some(turned).filter(|t| *t < attention.head_width);
    let rope = Rope::read(fields, "head_dim", attention.turned.unwrap_or(attention.head_width))?;
    b.without_dropout(fields, &["attention_dropout", "hidden_dropout"])?;

    let tokens = b.sequence(fields.size_or("max_position_embeddings", super::DEFAULT_SEQUENCE)?);
    let ids = b.input("input_ids", &[tokens], DType::I32)?;
    let (x, table) = b.within("model", |b| {
        let table = b.table("embed_tokens", vocabulary, hidden)?;
        let mut x = b.within("embed_tokens", |b| Ok(array::embedding(&mut b.graph, table, ids)?))?;
        let angles = rope.angles(b, tokens, RotaryHalves::Split)?;
        for index in 0..layers {
            x = b.within(&format!("layers.{index}"), |b| {
                let normed = layer_norm_1p(b, "input_layernorm", x, eps)?;
                let mixed = b.within("self_attn", |b| attention.build(b, normed, &angles))?;
                let x = b.add(x, mixed)?;
                let normed = layer_norm_1p(b, "post_attention_layernorm", x, eps)?;
                let made = b.within("mlp", |b| {
                    let wide = b.linear("up_proj", normed, width, mlp_bias)?;
                    let kept = array::relu(&mut b.graph, wide)?;
                    let squared = b.multiply(kept, kept)?;
                    b.linear("down_proj", squared, hidden, mlp_bias)
                })?;
                b.add(x, made)
            })?;
        }
        Ok((layer_norm_1p(b, "norm", x, eps)?, table))
    })?;
    b.token_loss(x, tied.then_some(table), vocabulary)
}

fn layer_norm_1p(b: &mut Builder, name: &str, x: crate::graph::ValueId, eps: f64) -> Block {
    b.within(name, |b| {
        let width = b.graph.shape(x).last().copied().unwrap_or(1);
        let (weight, bias) = (b.weight("weight", &[width])?, b.weight("bias", &[width])?);
        let weight = array::with_number(&mut b.graph, Binary::Add, weight, 1.0)?;
        Ok(array::layer_norm(&mut b.graph, x, 1, Some(weight), Some(bias), eps)?)
    })
}

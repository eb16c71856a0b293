//! GPT-2 (Radford et al. 2019). Its linear layers are `[in, out]`, and q, k and v are one.

use super::attention::{merge_heads, split_heads};
use super::blocks::{Activation, Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use crate::array::{self, Attention};
use crate::dtype::DType;
use crate::graph::ValueId;

pub fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let (vocabulary, hidden) = (fields.size_or("vocab_size", 50_257)?, fields.size("n_embd")?);
    let positions = fields.size_or("n_positions", 1024)?;
    let layers = fields.layers("n_layer")?;
    let heads = fields.size("n_head")?;
    let head_width = fields.part("n_embd", "n_head")?;
    let inner = fields.size_or("n_inner", 4 * hidden)?;
    let activation = Activation::read(fields, "activation_function", "gelu_new")?;
    let eps = fields.positive_or("layer_norm_epsilon", 1e-5)?;
    let by_root = fields.flag_or("scale_attn_weights", true)?;
    let by_layer = fields.flag_or("scale_attn_by_inverse_layer_idx", false)?;
    let tied = fields.flag_or("tie_word_embeddings", true)?;
    b.without_dropout(fields, &["resid_pdrop", "embd_pdrop", "attn_pdrop"])?;
    let tokens = b.learned_sequence("n_positions", positions)?;
    let ids = b.input("input_ids", &[tokens], DType::I32)?;

    let (x, table) = b.within("transformer", |b| {
        let table = b.table("wte", vocabulary, hidden)?;
        let token = b.within("wte", |b| Ok(array::embedding(&mut b.graph, table, ids)?))?;
        let position = b.table("wpe", positions, hidden)?;
        let position = array::slice_dim(&mut b.graph, position, 0, 0, tokens as i64, 1)?;
        let mut x = b.add(token, position)?;
        for index in 0..layers {
            let root = if by_root { (head_width as f64).sqrt() } else { 1.0 };
            let scale = 1.0 / if by_layer { root * (index + 1) as f64 } else { root };
            x = b.within(&format!("h.{index}"), |b| {
                let normed = b.layer_norm("ln_1", x, eps)?;
                let mixed = b.within("attn", |b| attention(b, normed, heads, scale))?;
                let x = b.add(x, mixed)?;
                let normed = b.layer_norm("ln_2", x, eps)?;
                let made = b.within("mlp", |b| {
                    let wide = matrix(b, "c_fc", normed, inner)?;
                    let wide = activation.apply(&mut b.graph, wide)?;
                    matrix(b, "c_proj", wide, hidden)
                })?;
                b.add(x, made)
            })?;
        }
        Ok((b.layer_norm("ln_f", x, eps)?, table))
    })?;
    b.token_loss(x, tied.then_some(table), vocabulary)
}

fn attention(b: &mut Builder, x: ValueId, heads: u64, scale: f64) -> Block {
    let hidden = b.graph.shape(x)[2];
    let qkv = matrix(b, "c_attn", x, 3 * hidden)?;
    let g = &mut b.graph;
    let parts = array::split(g, qkv, 2, &[hidden; 3])?;
    let (q, k, v) =
        (split_heads(g, parts[0], heads)?, split_heads(g, parts[1], heads)?, split_heads(g, parts[2], heads)?);
    let mixed = array::attention(g, q, k, v, &Attention { scale: Some(scale), causal: true, mask: None })?;
    let merged = merge_heads(g, mixed)?;
    matrix(b, "c_proj", merged, hidden)
}

/// `x weight + bias` with a weight of `[in, out]`.
fn matrix(b: &mut Builder, name: &str, x: ValueId, out: u64) -> Block {
    b.within(name, |b| {
        let input = b.graph.shape(x)[2];
        let (weight, bias) = (b.weight("weight", &[input, out])?, b.weight("bias", &[out])?);
        let y = array::contract(&mut b.graph, x, weight, 2, 0)?;
        b.add(y, bias)
    })
}

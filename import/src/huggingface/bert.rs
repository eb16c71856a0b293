//! BERT (Devlin et al. 2018) with its head for masked tokens. As in its pretraining, a sample has a fixed number of
//! masked positions, 15 percent, which an input lists. Only these positions go through the head, and the loss is a mean
//! over samples.

use super::attention::{merge_heads, split_heads};
use super::blocks::{Activation, Block, Builder};
use super::config::Fields;
use super::error::{ConfigError, Note};
use altiplano_ir::array::{self, Attention};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Gather, GatherDims, Op, OutOfBounds};

pub(crate) fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let (vocabulary, hidden) = (fields.main_size("vocab_size", 30_522)?, fields.main_size("hidden_size", 768)?);
    let positions = fields.size_or("max_position_embeddings", 512)?;
    let kinds = fields.size_or("type_vocab_size", 2)?;
    let layers = fields.main_layers("num_hidden_layers", 12)?;
    let heads = fields.main_size("num_attention_heads", 12)?;
    fields.divides("hidden_size", hidden, "num_attention_heads", heads)?;
    let inner = fields.main_size("intermediate_size", 3072)?;
    let activation = Activation::read(fields, "hidden_act", "gelu")?;
    let eps = fields.positive_or("layer_norm_eps", 1e-12)?;
    let kind = fields.word_or("position_embedding_type", "absolute")?;
    if kind != "absolute" {
        return Err(fields.unsupported("position_embedding_type", &["absolute"]));
    }
    b.without_dropout(fields, &["hidden_dropout_prob", "attention_probs_dropout_prob"])?;
    let tokens = b.learned_sequence("max_position_embeddings", positions)?;
    let ids = b.input("input_ids", &[tokens], DType::I32)?;
    let token_types = b.input("token_type_ids", &[tokens], DType::I32)?;
    let places = masked_places(b, tokens)?;

    let (x, table) = b.within("bert", |b| {
        let (mut x, table) = b.within("embeddings", |b| {
            let table = b.table("word_embeddings", vocabulary, hidden)?;
            let word = array::embedding(&mut b.graph, table, ids)?;
            let kind = b.table("token_type_embeddings", kinds, hidden)?;
            let kind = array::embedding(&mut b.graph, kind, token_types)?;
            let position = b.table("position_embeddings", positions, hidden)?;
            let position = array::slice_dim(&mut b.graph, position, 0, 0, tokens as i64, 1)?;
            let sum = b.add(word, kind)?;
            let sum = b.add(sum, position)?;
            Ok((b.layer_norm("LayerNorm", sum, eps)?, table))
        })?;
        for index in 0..layers {
            x = b.within(&format!("encoder.layer.{index}"), |b| {
                let mixed = b.within("attention", |b| {
                    let mixed = b.within("self", |b| attention(b, x, heads, true))?;
                    b.within("output", |b| output(b, mixed, x, hidden, eps))
                })?;
                let wide = b.linear("intermediate.dense", mixed, inner, true)?;
                let wide = activation.apply(&mut b.graph, wide)?;
                b.within("output", |b| output(b, wide, mixed, hidden, eps))
            })?;
        }
        Ok((x, table))
    })?;
    let logits = b.within("cls.predictions", |b| {
        let x = at_places(b, x, places)?;
        let x = b.within("transform", |b| {
            let x = b.linear("dense", x, hidden, true)?;
            let x = activation.apply(&mut b.graph, x)?;
            b.layer_norm("LayerNorm", x, eps)
        })?;
        let head = match fields.flag_or("tie_word_embeddings", true)? {
            true => table,
            false => b.table("decoder", vocabulary, hidden)?,
        };
        let bias = b.weight("bias", &[vocabulary])?;
        Ok(array::linear(&mut b.graph, x, head, Some(bias))?)
    })?;
    b.loss(logits)
}

/// The rows of `[B, S, hidden]` at `[B, masked]` positions of the same sample.
pub(crate) fn at_places(b: &mut Builder, x: ValueId, places: ValueId) -> Block {
    let hidden = b.graph.shape(x).last().copied().unwrap_or(1);
    let dims = GatherDims {
        offset_dims: vec![2],
        collapsed_slice_dims: vec![1],
        operand_batching_dims: vec![0],
        indices_batching_dims: vec![0],
        start_index_map: vec![1],
        index_vector_dim: 2,
        slice_sizes: vec![1, 1, hidden],
    };
    let gather = Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp });
    Ok(b.graph.push(gather, &[x, places])?)
}

/// The input with a sample's masked positions, for a model of masked tokens.
pub(crate) fn masked_places(b: &mut Builder, tokens: u64) -> Block {
    let masked = ((tokens as f64 * 0.15).round() as u64).max(1);
    b.notes.push(Note::Masked { positions: masked, sequence: tokens });
    b.input("masked_positions", &[masked], DType::I32)
}

/// Attention among all tokens, of matrices named `query`, `key` and `value`.
pub(super) fn attention(b: &mut Builder, x: ValueId, heads: u64, bias: bool) -> Block {
    let hidden = b.graph.shape(x)[2];
    let mut projected = |name: &str| {
        let y = b.linear(name, x, hidden, bias)?;
        Ok::<_, ConfigError>(split_heads(&mut b.graph, y, heads)?)
    };
    let (q, k, v) = (projected("query")?, projected("key")?, projected("value")?);
    let mixed = array::attention(&mut b.graph, q, k, v, &Attention::default())?;
    Ok(merge_heads(&mut b.graph, mixed)?)
}

/// A matrix back to the model's width, the residual, and a norm of their sum.
fn output(b: &mut Builder, x: ValueId, before: ValueId, hidden: u64, eps: f64) -> Block {
    let y = b.linear("dense", x, hidden, true)?;
    let sum = b.add(y, before)?;
    b.layer_norm("LayerNorm", sum, eps)
}

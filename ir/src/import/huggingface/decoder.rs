//! Decoders of the Llama kind: norms before each part, grouped attention with rotary positions, a gated perceptron.
//!
//! Llama (Touvron et al. 2023), Mistral with a window of attention (Jiang et al. 2023), Qwen2 with biases of q, k and v,
//! Qwen3 with norms of queries and keys, and Mixtral, whose perceptrons are mixtures of experts (Jiang et al. 2024).

use super::attention::GroupedAttention;
use super::blocks::{Activation, Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use super::moe::{self, Experts};
use super::rope::Rope;
use crate::array::{self, RotaryHalves};
use crate::dtype::DType;
use crate::graph::ValueId;

/// What follows the attention of a layer.
enum Part {
    Gated { width: u64, activation: Activation, bias: bool },
    Mixture(Experts),
}

pub fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let family = fields.word("model_type")?;
    let layers = fields.layers("num_hidden_layers")?;
    let eps = fields.positive_or("rms_norm_eps", 1e-6)?;
    let mut attention = GroupedAttention::read(fields)?;
    let bias = fields.flag_or("attention_bias", false)?;
    attention.bias = if family == "qwen2" { (true, false) } else { (bias, bias) };
    attention.qk_norm = (family == "qwen3").then_some(eps);
    let windows = windows(fields, &family, layers)?;
    let activation = Activation::read(fields, "hidden_act", "silu")?;
    let width = fields.size("intermediate_size")?;
    let part = match family.as_str() {
        "mixtral" => {
            // Without `output_router_logits` there is no such loss.
            fields.ignore(&["router_aux_loss_coef"]);
            let (count, chosen) = (fields.size("num_local_experts")?, fields.size("num_experts_per_tok")?);
            fields.at_most("num_experts_per_tok", chosen, "num_local_experts", count)?;
            Part::Mixture(Experts { count, chosen, width, activation })
        }
        _ => Part::Gated { width, activation, bias: fields.flag_or("mlp_bias", false)? },
    };
    let rope = Rope::read(fields, "head_dim", attention.head_width)?;

    b.without_dropout(fields, &["attention_dropout"])?;
    causal_model(fields, b, &rope, RotaryHalves::Split, layers, |b, index, x, angles| {
        let attention = GroupedAttention { window: windows[index], ..attention.clone() };
        let normed = b.rms_norm("input_layernorm", x, eps)?;
        let mixed = b.within("self_attn", |b| attention.build(b, normed, angles))?;
        let x = b.add(x, mixed)?;
        let normed = b.rms_norm("post_attention_layernorm", x, eps)?;
        let made = b.within("mlp", |b| match &part {
            Part::Gated { width, activation, bias } => b.gated_mlp(normed, *width, *activation, *bias),
            Part::Mixture(experts) => mixture(b, normed, experts),
        })?;
        b.add(x, made)
    })
}

/// Embeddings, `layers` times `layer`, a norm and a head, with the loss of the next token. `layer` gets its number, what
/// the one before gave, and the rotary angles.
pub fn causal_model(
    fields: &Fields<'_>,
    b: &mut Builder,
    rope: &Rope,
    halves: RotaryHalves,
    layers: u64,
    mut layer: impl FnMut(&mut Builder, usize, ValueId, &super::rope::Angles) -> Block,
) -> Result<(), ConfigError> {
    let (vocabulary, hidden) = (fields.size("vocab_size")?, fields.size("hidden_size")?);
    let eps = fields.positive_or("rms_norm_eps", 1e-6)?;
    let tied = fields.flag_or("tie_word_embeddings", false)?;
    let tokens = b.sequence(fields.size_or("max_position_embeddings", super::DEFAULT_SEQUENCE)?);
    let ids = b.input("input_ids", &[tokens], DType::I32)?;
    let (x, table) = b.within("model", |b| {
        let table = b.table("embed_tokens", vocabulary, hidden)?;
        let mut x = b.within("embed_tokens", |b| Ok(array::embedding(&mut b.graph, table, ids)?))?;
        let angles = rope.angles(b, tokens, halves)?;
        for index in 0..layers {
            x = b.within(&format!("layers.{index}"), |b| layer(b, index as usize, x, &angles))?;
        }
        Ok((b.rms_norm("norm", x, eps)?, table))
    })?;
    b.token_loss(x, tied.then_some(table), vocabulary)
}

/// How many tokens each layer sees at most.
fn windows(fields: &Fields<'_>, family: &str, layers: u64) -> Result<Vec<Option<u64>>, ConfigError> {
    let window = match family {
        "llama" => None,
        // Qwen's configs state a window that most of them do not use.
        "qwen2" | "qwen3" if !fields.flag_or("use_sliding_window", false)? => None,
        _ => fields.optional_size("sliding_window")?,
    };
    let first = match family {
        "qwen2" | "qwen3" => fields.count_or("max_window_layers", 28)?,
        _ => 0,
    };
    let kinds = fields.words("layer_types")?;
    let of_layer = |index: u64| {
        let slides = match &kinds {
            Some(kinds) => kinds.get(index as usize) == Some(&"sliding_attention"),
            None => index >= first,
        };
        window.filter(|_| slides)
    };
    Ok((0..layers).map(of_layer).collect())
}

/// Mixtral's layer of experts: gates are the softmax over those chosen.
fn mixture(b: &mut Builder, x: ValueId, experts: &Experts) -> Block {
    let logits = moe::router_logits(b, x, experts.count)?;
    let g = &mut b.graph;
    let scores = array::softmax(g, logits, 2)?;
    let chosen = array::among_greatest(g, scores, 2, experts.chosen)?;
    let kept = moe::where_chosen(g, chosen, scores)?;
    let gates = moe::normalised(g, kept, 0.0)?;
    experts.build(b, x, gates, chosen)
}

//! T5 (Raffel et al. 2019): an encoder and a decoder whose positions are biases of the scores, by distance.

use super::attention::{merge_heads, split_heads};
use super::blocks::{Activation, Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use altiplano_ir::array::{self, Attention};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::Binary;
use altiplano_ir::types::TensorType;

/// The largest distance whose bucket is listed in the graph.
const MAX_DISTANCE: u64 = 1 << 15;

/// The sizes that all blocks share.
struct Sizes {
    model: u64,
    heads: u64,
    head_width: u64,
    inner: u64,
    activation: Activation,
    gated: bool,
    eps: f64,
    buckets: u64,
    max_distance: u64,
}

pub(crate) fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    fields.ignore(&["dense_act_fn", "is_gated_act"]);
    let vocabulary = fields.main_size("vocab_size", 32_128)?;
    let encoder_layers = fields.main_layers("num_layers", 6)?;
    let decoder_layers = fields.layers_or("num_decoder_layers", encoder_layers)?;
    let sizes = Sizes::read(fields)?;
    let tied = fields.flag_or("tie_word_embeddings", true)?;
    b.without_dropout(fields, &["dropout_rate"])?;
    let tokens = b.sequence(fields.size_or("n_positions", 512)?);
    let ids = b.input("input_ids", &[tokens], DType::I32)?;
    let decoder_ids = b.input("decoder_input_ids", &[tokens], DType::I32)?;

    let table = b.table("shared", vocabulary, sizes.model)?;
    let mut embedded = |ids| b.within("shared", |b| Ok(array::embedding(&mut b.graph, table, ids)?));
    let (x, y) = (embedded(ids)?, embedded(decoder_ids)?);
    let memory = b.within("encoder", |b| sizes.stack(b, x, encoder_layers, None))?;
    let mut y = b.within("decoder", |b| sizes.stack(b, y, decoder_layers, Some(memory)))?;
    if tied && fields.flag_or("scale_decoder_outputs", true)? {
        // Tied tables have the scale that embeddings need, which is too large for a head.
        let scale = 1.0 / (sizes.model as f64).sqrt();
        y = b.within("lm_head", |b| Ok(array::with_number(&mut b.graph, Binary::Multiply, y, scale)?))?;
    }
    let logits = b.head("lm_head", y, tied.then_some(table), vocabulary, false)?;
    b.loss(logits)
}

impl Sizes {
    fn read(fields: &Fields<'_>) -> Result<Sizes, ConfigError> {
        let key = "feed_forward_proj";
        let (gated, activation) = match fields.word_or(key, "relu")?.as_str() {
            "relu" => (false, Activation::Relu),
            "gated-gelu" => (true, Activation::GeluTanh),
            "gated-silu" => (true, Activation::Silu),
            _ => return Err(fields.unsupported(key, &["relu", "gated-gelu", "gated-silu"])),
        };
        let buckets = fields.size_or("relative_attention_num_buckets", 32)?;
        let max_distance = fields.size_or("relative_attention_max_distance", 128)?;
        // Half of the buckets of each direction cover a single distance each.
        fields.divides("relative_attention_num_buckets", buckets, "four", 4)?;
        fields.at_most("relative_attention_max_distance", max_distance, "what is listed", MAX_DISTANCE)?;
        fields.at_most("relative_attention_num_buckets", buckets, "relative_attention_max_distance", max_distance)?;
        Ok(Sizes {
            model: fields.main_size("d_model", 512)?,
            heads: fields.main_size("num_heads", 8)?,
            head_width: fields.main_size("d_kv", 64)?,
            inner: fields.main_size("d_ff", 2048)?,
            activation,
            gated,
            eps: fields.positive_or("layer_norm_epsilon", 1e-6)?,
            buckets,
            max_distance,
        })
    }

    /// All blocks of the encoder, or with a memory, those of the decoder.
    fn stack(&self, b: &mut Builder, x: ValueId, layers: u64, memory: Option<ValueId>) -> Block {
        let tokens = b.graph.shape(x)[1];
        let bias = b.within("block.0.layer.0.SelfAttention", |b| self.position_bias(b, tokens, memory.is_none()))?;
        let own = Attention { scale: Some(1.0), causal: memory.is_some(), mask: Some(bias) };
        let other = Attention { scale: Some(1.0), causal: false, mask: None };
        let mut x = x;
        for index in 0..layers {
            x = b.within(&format!("block.{index}"), |b| {
                let mut x = b.within("layer.0", |b| self.attention(b, "SelfAttention", x, None, &own))?;
                if let Some(memory) = memory {
                    x = b.within("layer.1", |b| self.attention(b, "EncDecAttention", x, Some(memory), &other))?;
                }
                let last = if memory.is_some() { "layer.2" } else { "layer.1" };
                b.within(last, |b| self.perceptron(b, x))
            })?;
        }
        b.rms_norm("final_layer_norm", x, self.eps)
    }

    /// `x` plus its attention to itself or to `memory`.
    fn attention(&self, b: &mut Builder, name: &str, x: ValueId, memory: Option<ValueId>, how: &Attention) -> Block {
        let normed = b.rms_norm("layer_norm", x, self.eps)?;
        let mixed = b.within(name, |b| {
            let mut projected = |name: &str, x| {
                let y = b.linear(name, x, self.heads * self.head_width, false)?;
                Ok::<_, ConfigError>(split_heads(&mut b.graph, y, self.heads)?)
            };
            let keys = memory.unwrap_or(normed);
            let (q, k, v) = (projected("q", normed)?, projected("k", keys)?, projected("v", keys)?);
            let mixed = array::attention(&mut b.graph, q, k, v, how)?;
            let merged = merge_heads(&mut b.graph, mixed)?;
            b.linear("o", merged, self.model, false)
        })?;
        b.add(x, mixed)
    }

    fn perceptron(&self, b: &mut Builder, x: ValueId) -> Block {
        let normed = b.rms_norm("layer_norm", x, self.eps)?;
        let made = b.within("DenseReluDense", |b| {
            let first = b.linear(if self.gated { "wi_0" } else { "wi" }, normed, self.inner, false)?;
            let mut wide = self.activation.apply(&mut b.graph, first)?;
            if self.gated {
                let up = b.linear("wi_1", normed, self.inner, false)?;
                wide = b.multiply(wide, up)?;
            }
            b.linear("wo", wide, self.model, false)
        })?;
        b.add(x, made)
    }

    /// `[heads, tokens, tokens]`: a learnt number for each head and bucket of distances. All distances from the
    /// greatest one on share a bucket. So distances are clamped there, and the remaining ones have their bucket in a
    /// list.
    fn position_bias(&self, b: &mut Builder, tokens: u64, both_directions: bool) -> Block {
        let table = b.table("relative_attention_bias", self.buckets, self.heads)?;
        let far = self.max_distance as i64;
        let g = &mut b.graph;
        let listed: Vec<f64> = (-far..=far).map(|d| self.bucket(d, both_directions) as f64).collect();
        let ty = TensorType::new(DType::I32, [listed.len() as u64]);
        let buckets = g.constant(Literal::dense(ty, listed));
        let by_distance = array::embedding(g, table, buckets)?;
        let query = array::iota(g, &[tokens, tokens], 0, DType::I32)?;
        let key = array::iota(g, &[tokens, tokens], 1, DType::I32)?;
        let distance = array::binary(g, Binary::Subtract, key, query)?;
        let near = array::clamp(g, distance, Some(-far as f64), Some(far as f64))?;
        let index = array::with_number(g, Binary::Add, near, far as f64)?;
        let bias = array::embedding(g, by_distance, index)?;
        Ok(array::permute(g, bias, &[2, 0, 1])?)
    }

    /// The bucket of a key that is `distance` positions after its query. Each direction has half of the buckets, or
    /// keys before the query have all. Half of these cover a single distance each, and the others cover distances that
    /// grow exponentially. The logarithm is taken in f32, as in the training of the checkpoints.
    fn bucket(&self, distance: i64, both_directions: bool) -> u64 {
        let (buckets, first, apart) = match both_directions {
            true => (self.buckets / 2, if distance > 0 { self.buckets / 2 } else { 0 }, distance.unsigned_abs()),
            false => (self.buckets, 0, (-distance).max(0).unsigned_abs()),
        };
        let single = buckets / 2;
        if apart < single {
            return first + apart;
        }
        let greatest = libm::log(self.max_distance as f64 / single as f64) as f32;
        let share = libm::logf(apart as f32 / single as f32) / greatest;
        first + (single + (share * (buckets - single) as f32) as u64).min(buckets - 1)
    }
}

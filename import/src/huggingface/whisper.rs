//! Whisper (Radford et al. 2022): an encoder of spectrograms after two convolutions, and a text decoder that attends to
//! it.

use super::attention::{SelfAttention, Span};
use super::blocks::{Activation, Block, Builder, Matrix, Norm};
use super::config::Fields;
use super::error::ConfigError;
use super::feed::Plain;
use altiplano_ir::array::{self, Conv};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;

/// The sizes of the encoder's or the decoder's blocks.
struct Blocks {
    layers: u64,
    attention: SelfAttention,
    feed: Plain,
    norm: Norm,
}

impl Blocks {
    fn read(
        fields: &Fields<'_>,
        hidden: u64,
        keys: [&'static str; 3],
        activation: Activation,
    ) -> Result<Blocks, ConfigError> {
        let [layers, heads_key, inner] = keys;
        let heads = fields.main_size(heads_key, 6)?;
        fields.divides("d_model", hidden, heads_key, heads)?;
        let mut attention = SelfAttention::new(heads, heads, hidden / heads).with_biases(true, true);
        (attention.output, attention.unbiased_keys) = ("out_proj", true);
        let matrix = Matrix { bias: true, transposed: false };
        let feed = Plain { up: "fc1", down: "fc2", width: fields.main_size(inner, 1536)?, activation, matrix };
        Ok(Blocks { layers: fields.main_layers(layers, 4)?, attention, feed, norm: Norm::layer(1e-5) })
    }

    /// All blocks of the encoder, or with a memory, those of the decoder.
    fn build(&self, b: &mut Builder, x: ValueId, memory: Option<ValueId>) -> Block {
        let mut x = x;
        let span = if memory.is_some() { Span::Causal } else { Span::All };
        let (own, other) = (
            SelfAttention { span, ..self.attention.clone() },
            SelfAttention { span: Span::All, ..self.attention.clone() },
        );
        for index in 0..self.layers {
            x = b.within(&format!("layers.{index}"), |b| {
                let normed = b.norm("self_attn_layer_norm", x, &self.norm)?;
                let mixed = b.within("self_attn", |b| own.build(b, normed, &[]))?;
                let mut x = b.add(x, mixed)?;
                if let Some(memory) = memory {
                    let normed = b.norm("encoder_attn_layer_norm", x, &self.norm)?;
                    let mixed = b.within("encoder_attn", |b| other.build_to(b, normed, memory, &[]))?;
                    x = b.add(x, mixed)?;
                }
                let normed = b.norm("final_layer_norm", x, &self.norm)?;
                let made = self.feed.build(b, normed)?;
                b.add(x, made)
            })?;
        }
        b.norm("layer_norm", x, &self.norm)
    }
}

pub(crate) fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let (vocabulary, hidden) = (fields.main_size("vocab_size", 51_865)?, fields.main_size("d_model", 384)?);
    let bins = fields.size_or("num_mel_bins", 80)?;
    let activation = Activation::read(fields, "activation_function", "gelu")?;
    let encoder =
        Blocks::read(fields, hidden, ["encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"], activation)?;
    let decoder =
        Blocks::read(fields, hidden, ["decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"], activation)?;
    let frames = fields.size_or("max_source_positions", 1500)?;
    let positions = fields.size_or("max_target_positions", 448)?;
    b.without_dropout(fields, &["dropout", "attention_dropout", "activation_dropout"])?;
    b.without_dropout(fields, &["encoder_layerdrop", "decoder_layerdrop"])?;
    if fields.flag_or("apply_spec_augment", false)? {
        return Err(fields.unsupported("apply_spec_augment", &["false"]));
    }
    // Transformers applies no scale, whatever `scale_embedding` says. The other fields concern masked spectrograms,
    // classifiers and text generation.
    fields.ignore(&[
        "scale_embedding",
        "num_hidden_layers",
        "init_std",
        "use_weighted_layer_sum",
        "classifier_proj_size",
    ]);
    fields.ignore(&["mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob"]);
    fields.ignore(&["mask_feature_length", "mask_feature_min_masks", "median_filter_width", "alignment_heads"]);

    let tokens = b.learned_sequence("max_target_positions", positions)?;
    let sound = b.input("input_features", &[bins, 2 * frames], b.dtype)?;
    let ids = b.input("decoder_input_ids", &[tokens], DType::I32)?;
    let (y, table) = b.within("model", |b| {
        let memory = b.within("encoder", |b| {
            let x = convolved(b, "conv1", sound, hidden, 1)?;
            let x = convolved(b, "conv2", x, hidden, 2)?;
            let x = array::permute(&mut b.graph, x, &[0, 2, 1])?;
            // Sines and cosines that are not trained.
            let rows = b.within("embed_positions", |b| b.buffer("weight", &[frames, hidden], b.dtype))?;
            let x = b.add(x, rows)?;
            encoder.build(b, x, None)
        })?;
        b.within("decoder", |b| {
            let table = b.table("embed_tokens", vocabulary, hidden)?;
            let x = b.within("embed_tokens", |b| Ok(array::embedding(&mut b.graph, table, ids)?))?;
            let rows = b.table("embed_positions", positions, hidden)?;
            let rows = array::slice_dim(&mut b.graph, rows, 0, 0, tokens as i64, 1)?;
            let x = b.add(x, rows)?;
            Ok((decoder.build(b, x, Some(memory))?, table))
        })
    })?;
    let tied = fields.flag_or("tie_word_embeddings", true)?;
    let logits = b.head("proj_out", y, tied.then_some(table), vocabulary, false)?;
    b.loss(logits)
}

/// A convolution of `[B, C, S]` over three positions, followed by a gelu.
fn convolved(b: &mut Builder, name: &str, x: ValueId, out: u64, stride: u64) -> Block {
    b.within(name, |b| {
        let channels = b.graph.shape(x)[1];
        let (weight, bias) = (b.weight("weight", &[out, channels, 3])?, b.weight("bias", &[out])?);
        let (stride, pad) = (vec![stride], vec![1]);
        let conv =
            Conv { stride, pad_low: pad.clone(), pad_high: pad, dilation: vec![1], groups: 1, ..Conv::default() };
        let x = array::convolution(&mut b.graph, x, weight, Some(bias), &conv)?;
        Ok(array::gelu_erf(&mut b.graph, x)?)
    })
}

//! Vision Transformers (Dosovitskiy et al. 2020) that classify images.

use super::bert::attention;
use super::blocks::{Activation, Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use altiplano_ir::array::{self, Conv};
use altiplano_ir::graph::ValueId;

pub(crate) fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    if b.options.sequence.is_some() {
        return Err(ConfigError::NoSequence);
    }
    // A field of models that reconstruct masked patches.
    fields.ignore(&["encoder_stride"]);
    let hidden = fields.main_size("hidden_size", 768)?;
    let layers = fields.main_layers("num_hidden_layers", 12)?;
    let heads = fields.main_size("num_attention_heads", 12)?;
    fields.divides("hidden_size", hidden, "num_attention_heads", heads)?;
    let inner = fields.main_size("intermediate_size", 3072)?;
    let activation = Activation::read(fields, "hidden_act", "gelu")?;
    let eps = fields.positive_or("layer_norm_eps", 1e-12)?;
    let bias = fields.flag_or("qkv_bias", true)?;
    let (image, patch) = (fields.size_or("image_size", 224)?, fields.size_or("patch_size", 16)?);
    fields.divides("image_size", image, "patch_size", patch)?;
    let channels = fields.size_or("num_channels", 3)?;
    let classes = match fields.entries("id2label")? {
        Some(classes) if classes > 0 => classes,
        _ => fields.size_or("num_labels", 2)?,
    };
    b.without_dropout(fields, &["hidden_dropout_prob", "attention_probs_dropout_prob"])?;
    let pixels = b.input("pixel_values", &[channels, image, image], b.dtype)?;

    let x = b.within("vit", |b| {
        let mut x = b.within("embeddings", |b| embeddings(b, pixels, hidden, patch))?;
        for index in 0..layers {
            x = b.within(&format!("encoder.layer.{index}"), |b| {
                let normed = b.layer_norm("layernorm_before", x, eps)?;
                let mixed = b.within("attention", |b| {
                    let mixed = b.within("attention", |b| attention(b, normed, heads, bias))?;
                    b.linear("output.dense", mixed, hidden, true)
                })?;
                let x = b.add(x, mixed)?;
                let normed = b.layer_norm("layernorm_after", x, eps)?;
                let wide = b.linear("intermediate.dense", normed, inner, true)?;
                let wide = activation.apply(&mut b.graph, wide)?;
                let made = b.linear("output.dense", wide, hidden, true)?;
                b.add(x, made)
            })?;
        }
        b.layer_norm("layernorm", x, eps)
    })?;
    let summary = b.within("classifier", |b| Ok(array::select_dim(&mut b.graph, x, 1, 0)?))?;
    let logits = b.linear("classifier", summary, classes, true)?;
    b.loss(logits)
}

/// Patches as tokens after a class token, plus positions: `[B, patches + 1, hidden]`.
fn embeddings(b: &mut Builder, pixels: ValueId, hidden: u64, patch: u64) -> Block {
    let [batch, channels, height, width] = b.graph.shape(pixels)[..] else {
        return Err(array::ShapeError::Attribute("images have four dimensions").into());
    };
    let patches = (height / patch) * (width / patch);
    let class = b.weight("cls_token", &[1, 1, hidden])?;
    let positions = b.weight("position_embeddings", &[1, patches + 1, hidden])?;
    let tokens = b.within("patch_embeddings.projection", |b| {
        let kernel = b.weight("weight", &[hidden, channels, patch, patch])?;
        let bias = b.weight("bias", &[hidden])?;
        let (none, step) = (vec![0; 2], vec![patch; 2]);
        let conv = Conv {
            stride: step,
            pad_low: none.clone(),
            pad_high: none,
            dilation: vec![1; 2],
            groups: 1,
            ..Conv::default()
        };
        Ok(array::convolution(&mut b.graph, pixels, kernel, Some(bias), &conv)?)
    })?;
    let g = &mut b.graph;
    let tokens = array::reshape(g, tokens, &[batch, hidden, patches])?;
    let tokens = array::permute(g, tokens, &[0, 2, 1])?;
    let class = array::broadcast_to(g, class, &[batch, 1, hidden])?;
    let x = array::concat(g, &[class, tokens], 1)?;
    b.add(x, positions)
}

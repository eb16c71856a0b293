//! CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023): an image encoder and a text encoder. They are trained to
//! map both halves of a pair to the same direction. Their losses compare all samples of a batch with each other.

use super::attention::{SelfAttention, Span, merge_heads, split_heads};
use super::blocks::{Activation, Block, Builder, Matrix, Norm};
use super::config::Fields;
use super::decoder::{Layer, Mixer, Order};
use super::error::ConfigError;
use super::feed::{Feed, Plain};
use altiplano_ir::array::{self, Attention, Conv};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Direction, Unary};

/// The sizes of one of the two encoders.
struct Encoder {
    hidden: u64,
    heads: u64,
    layers: u64,
    layer: Layer,
    norm: Norm,
    width: u64,
    activation: Activation,
}

/// The defaults of Transformers for an encoder's config.
struct Defaults {
    hidden: u64,
    inner: u64,
    heads: u64,
    activation: &'static str,
    eps: f64,
}

impl Encoder {
    fn read(fields: &Fields<'_>, b: &mut Builder, span: Span, d: Defaults) -> Result<Encoder, ConfigError> {
        let hidden = fields.main_size("hidden_size", d.hidden)?;
        let layers = fields.main_layers("num_hidden_layers", 12)?;
        let heads = fields.main_size("num_attention_heads", d.heads)?;
        fields.divides("hidden_size", hidden, "num_attention_heads", heads)?;
        let width = fields.main_size("intermediate_size", d.inner)?;
        let activation = Activation::read(fields, "hidden_act", d.activation)?;
        let norm = Norm::layer(fields.positive_or("layer_norm_eps", d.eps)?);
        b.without_dropout(fields, &["attention_dropout", "dropout"])?;
        let mut attention = SelfAttention::new(heads, heads, hidden / heads).with_biases(true, true);
        (attention.output, attention.span) = ("out_proj", span);
        let matrix = Matrix { bias: true, transposed: false };
        let layer = Layer {
            mixer: ("self_attn", Mixer::attention(attention)),
            feeds: vec![("mlp", Feed::Plain(Plain { up: "fc1", down: "fc2", width, activation, matrix }))],
            order: Order::before("layer_norm1", "layer_norm2"),
            norm,
            residual: 1.0,
            wide: false,
        };
        Ok(Encoder { hidden, heads, layers, layer, norm, width, activation })
    }

    fn build(&self, b: &mut Builder, x: ValueId) -> Block {
        let mut x = x;
        for index in 0..self.layers {
            x = b.within(&format!("encoder.layers.{index}"), |b| self.layer.build(b, x, &[]))?;
        }
        Ok(x)
    }
}

/// The embeddings of a text's ids with learnt positions: `[B, S, hidden]`.
fn text_embeddings(b: &mut Builder, ids: ValueId, vocabulary: u64, positions: u64, hidden: u64) -> Block {
    b.within("embeddings", |b| {
        let tokens = b.graph.shape(ids)[1] as i64;
        let table = b.table("token_embedding", vocabulary, hidden)?;
        let x = b.within("token_embedding", |b| Ok(array::embedding(&mut b.graph, table, ids)?))?;
        let rows = b.table("position_embedding", positions, hidden)?;
        let rows = array::slice_dim(&mut b.graph, rows, 0, 0, tokens, 1)?;
        b.add(x, rows)
    })
}

/// The patches of an image as tokens with learnt positions, after a class token if there is one.
fn image_embeddings(b: &mut Builder, pixels: ValueId, hidden: u64, patch: u64, class: bool) -> Block {
    let [batch, channels, height, width] = b.graph.shape(pixels)[..] else {
        return Err(array::ShapeError::Attribute("images have four dimensions").into());
    };
    let patches = (height / patch) * (width / patch);
    b.within("embeddings", |b| {
        let first = if class { Some(b.weight("class_embedding", &[hidden])?) } else { None };
        let tokens = b.within("patch_embedding", |b| {
            let kernel = b.weight("weight", &[hidden, channels, patch, patch])?;
            let bias = if class { None } else { Some(b.weight("bias", &[hidden])?) };
            let conv = Conv {
                stride: vec![patch; 2],
                pad_low: vec![0; 2],
                pad_high: vec![0; 2],
                dilation: vec![1; 2],
                groups: 1,
                ..Conv::default()
            };
            Ok(array::convolution(&mut b.graph, pixels, kernel, bias, &conv)?)
        })?;
        let rows = b.table("position_embedding", patches + u64::from(class), hidden)?;
        let g = &mut b.graph;
        let tokens = array::reshape(g, tokens, &[batch, hidden, patches])?;
        let mut x = array::permute(g, tokens, &[0, 2, 1])?;
        if let Some(first) = first {
            let first = array::broadcast_to(g, first, &[batch, 1, hidden])?;
            x = array::concat(g, &[first, x], 1)?;
        }
        b.add(x, rows)
    })
}

/// The image input. `fields` give its sizes.
fn image_input(fields: &Fields<'_>, b: &mut Builder, patch: u64) -> Result<(ValueId, u64), ConfigError> {
    let (image, patch) = (fields.size_or("image_size", 224)?, fields.size_or("patch_size", patch)?);
    // Pixels beyond the last whole patch are ignored.
    fields.at_most("patch_size", patch, "image_size", image)?;
    let channels = fields.size_or("num_channels", 3)?;
    let dtype = b.dtype;
    Ok((b.input("pixel_values", &[channels, image, image], dtype)?, patch))
}

/// `x / |x|` over the last dimension.
fn direction(b: &mut Builder, x: ValueId) -> Block {
    let g = &mut b.graph;
    let square = array::binary(g, Binary::Multiply, x, x)?;
    let last = g.shape(x).len() - 1;
    let length = array::sum(g, square, &[last], true)?;
    let length = array::unary(g, Unary::Sqrt, length)?;
    Ok(array::binary(g, Binary::Divide, x, length)?)
}

/// The similarity of each text (rows) to each image (columns), times the learnt factor `logit_scale`.
fn similarities(b: &mut Builder, texts: ValueId, images: ValueId, scale_shape: &[u64]) -> Block {
    let (texts, images) = (direction(b, texts)?, direction(b, images)?);
    let scale = b.weight("logit_scale", scale_shape)?;
    let g = &mut b.graph;
    let logits = array::linear(g, texts, images, None)?;
    let scale = array::unary(g, Unary::Exponential, scale)?;
    Ok(array::binary(g, Binary::Multiply, logits, scale)?)
}

fn parts<'a>(fields: &Fields<'a>) -> Result<[Fields<'a>; 2], ConfigError> {
    let part = |key: &str| {
        let found = fields.object(key)?;
        found.ok_or_else(|| ConfigError::Missing { field: key.to_string() })
    };
    // Older configs repeat their parts.
    fields.ignore(&["text_config_dict", "vision_config_dict", "logit_scale_init_value"]);
    Ok([part("text_config")?, part("vision_config")?])
}

pub(crate) fn clip(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let [text, vision] = parts(fields)?;
    let projection = fields.size_or("projection_dim", 512)?;
    let (eps, activation) = (1e-5, "quick_gelu");
    let text_defaults = Defaults { hidden: 512, inner: 2048, heads: 8, activation, eps };
    let encoder = Encoder::read(&text, b, Span::Causal, text_defaults)?;
    let image_defaults = Defaults { hidden: 768, inner: 3072, heads: 12, activation, eps };
    let image_encoder = Encoder::read(&vision, b, Span::All, image_defaults)?;
    let vocabulary = text.main_size("vocab_size", 49_408)?;
    let positions = text.size_or("max_position_embeddings", 77)?;
    let end = text.count_or("eos_token_id", 49_407)?;
    let tokens = b.learned_sequence("text_config.max_position_embeddings", positions)?;
    let ids = b.input("input_ids", &[tokens], DType::I32)?;
    let (pixels, patch) = image_input(&vision, b, 32)?;

    let texts = b.within("text_model", |b| {
        let x = text_embeddings(b, ids, vocabulary, positions, encoder.hidden)?;
        let x = encoder.build(b, x)?;
        let x = b.norm("final_layer_norm", x, &encoder.norm)?;
        // The position of the end of text. In configs of the first checkpoints, it is the greatest id, whatever they
        // state.
        let g = &mut b.graph;
        let is_end = match end {
            2 => ids,
            end => {
                let end = array::full_like(g, ids, end as f64)?;
                let is_end = array::compare(g, Direction::Eq, ids, end)?;
                g.convert(is_end, DType::I32)
            }
        };
        let place = array::arg_max(g, is_end, 1, true, false)?;
        let x = super::bert::at_places(b, x, place)?;
        Ok(array::select_dim(&mut b.graph, x, 1, 0)?)
    })?;
    let images = b.within("vision_model", |b| {
        let x = image_embeddings(b, pixels, image_encoder.hidden, patch, true)?;
        // The checkpoints misspell this name.
        let x = b.norm("pre_layrnorm", x, &image_encoder.norm)?;
        let x = image_encoder.build(b, x)?;
        let x = array::select_dim(&mut b.graph, x, 1, 0)?;
        b.norm("post_layernorm", x, &image_encoder.norm)
    })?;
    let images = b.linear("visual_projection", images, projection, false)?;
    let texts = b.linear("text_projection", texts, projection, false)?;
    let logits = similarities(b, texts, images, &[])?;
    if b.options.without_loss {
        b.graph.outputs = vec![logits];
        return Ok(());
    }
    b.within("loss", |b| {
        // Each text belongs to the image of its own sample, and vice versa.
        let g = &mut b.graph;
        let batch = g.shape(logits)[0];
        let labels = array::iota(g, &[batch], 0, DType::I32)?;
        let of_texts = array::cross_entropy(g, logits, labels, 1)?;
        let of_images = array::permute(g, logits, &[1, 0])?;
        let of_images = array::cross_entropy(g, of_images, labels, 1)?;
        let both = array::binary(g, Binary::Add, of_texts, of_images)?;
        b.graph.outputs = vec![array::with_number(&mut b.graph, Binary::Multiply, both, 0.5)?];
        Ok(())
    })
}

pub(crate) fn siglip(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let [text, vision] = parts(fields)?;
    let defaults = || Defaults { hidden: 768, inner: 3072, heads: 12, activation: "gelu_pytorch_tanh", eps: 1e-6 };
    let encoder = Encoder::read(&text, b, Span::All, defaults())?;
    let image_encoder = Encoder::read(&vision, b, Span::All, defaults())?;
    let vocabulary = text.main_size("vocab_size", 32_000)?;
    let positions = text.size_or("max_position_embeddings", 64)?;
    let projection = text.size_or("projection_size", encoder.hidden)?;
    if !vision.flag_or("vision_use_head", true)? {
        return Err(vision.unsupported("vision_use_head", &["true"]));
    }
    let tokens = b.learned_sequence("text_config.max_position_embeddings", positions)?;
    let ids = b.input("input_ids", &[tokens], DType::I32)?;
    let (pixels, patch) = image_input(&vision, b, 16)?;

    let texts = b.within("text_model", |b| {
        let x = text_embeddings(b, ids, vocabulary, positions, encoder.hidden)?;
        let x = encoder.build(b, x)?;
        let x = b.norm("final_layer_norm", x, &encoder.norm)?;
        let last = array::select_dim(&mut b.graph, x, 1, -1)?;
        b.linear("head", last, projection, true)
    })?;
    let images = b.within("vision_model", |b| {
        let x = image_embeddings(b, pixels, image_encoder.hidden, patch, false)?;
        let x = image_encoder.build(b, x)?;
        let x = b.norm("post_layernorm", x, &image_encoder.norm)?;
        b.within("head", |b| pooled(b, x, &image_encoder))
    })?;
    let logits = similarities(b, texts, images, &[1])?;
    let bias = b.weight("logit_bias", &[1])?;
    let logits = b.add(logits, bias)?;
    if b.options.without_loss {
        b.graph.outputs = vec![logits];
        return Ok(());
    }
    b.within("loss", |b| {
        // Pairs of one sample should be similar and all others dissimilar: -log sigmoid(logit) or -log sigmoid(-logit).
        let g = &mut b.graph;
        let batch = g.shape(logits)[0];
        let row = array::iota(g, &[batch, batch], 0, DType::I32)?;
        let column = array::iota(g, &[batch, batch], 1, DType::I32)?;
        let pair = array::compare(g, Direction::Eq, row, column)?;
        let negative = array::unary(g, Unary::Negate, logits)?;
        let wrong = array::select(g, pair, negative, logits)?;
        let losses = array::in_f32(g, wrong, |g, x| array::softplus(g, x, 1.0, f64::INFINITY))?;
        let of_sample = array::sum(g, losses, &[1], false)?;
        b.graph.outputs = vec![array::mean(&mut b.graph, of_sample, &[0], false)?];
        Ok(())
    })
}

/// Attention of one learnt query over all tokens, followed by a perceptron: `[B, hidden]`.
fn pooled(b: &mut Builder, x: ValueId, encoder: &Encoder) -> Block {
    let (batch, hidden) = (b.graph.shape(x)[0], encoder.hidden);
    let heads = encoder.heads;
    let probe = b.weight("probe", &[1, 1, hidden])?;
    let mixed = b.within("attention", |b| {
        let weights = b.weight("in_proj_weight", &[3 * hidden, hidden])?;
        let biases = b.weight("in_proj_bias", &[3 * hidden])?;
        let g = &mut b.graph;
        let (weights, biases) = (array::split(g, weights, 0, &[hidden; 3])?, array::split(g, biases, 0, &[hidden; 3])?);
        let probe = array::broadcast_to(g, probe, &[batch, 1, hidden])?;
        let projected = |g: &mut _, x, i: usize| {
            let y = array::linear(g, x, weights[i], Some(biases[i]))?;
            split_heads(g, y, heads)
        };
        let (q, k, v) = (projected(g, probe, 0)?, projected(g, x, 1)?, projected(g, x, 2)?);
        let mixed = array::attention(g, q, k, v, &Attention::default())?;
        let merged = merge_heads(g, mixed)?;
        b.linear("out_proj", merged, hidden, true)
    })?;
    let normed = b.norm("layernorm", mixed, &encoder.norm)?;
    let matrix = Matrix { bias: true, transposed: false };
    let feed = Plain { up: "fc1", down: "fc2", width: encoder.width, activation: encoder.activation, matrix };
    let made = b.within("mlp", |b| feed.build(b, normed))?;
    let sum = b.add(mixed, made)?;
    Ok(array::select_dim(&mut b.graph, sum, 1, 0)?)
}

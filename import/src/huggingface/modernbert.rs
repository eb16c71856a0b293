//! ModernBERT (Warner et al. 2024): an encoder with rotary positions, gated perceptrons and windows in most layers. Its
//! head for masked tokens is described in [`super::bert`].

use super::attention::{Projections, Rotary, SelfAttention, Span};
use super::bert::{at_places, masked_places};
use super::blocks::{Activation, Builder, Norm};
use super::config::Fields;
use super::decoder::{Around, Layer, Mixer, Order};
use super::error::ConfigError;
use super::feed::{Feed, GateUp, Gated};
use super::rope::Rope;
use altiplano_ir::array::{self, RotaryHalves};
use altiplano_ir::dtype::DType;

pub(crate) fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let (vocabulary, hidden) = (fields.main_size("vocab_size", 50_368)?, fields.main_size("hidden_size", 768)?);
    let layers = fields.main_layers("num_hidden_layers", 22)?;
    let heads = fields.main_size("num_attention_heads", 12)?;
    fields.divides("hidden_size", hidden, "num_attention_heads", heads)?;
    let width = hidden / heads;
    let norm = Norm { bias: fields.flag_or("norm_bias", false)?, ..Norm::layer(fields.positive_or("norm_eps", 1e-5)?) };
    let inner = fields.main_size("intermediate_size", 1152)?;
    let activation = Activation::read(fields, "hidden_activation", "gelu")?;
    let bias = fields.flag_or("attention_bias", false)?;
    let window = fields.size_or("local_attention", 128)? / 2;
    let period = fields.size_or("global_attn_every_n_layers", 3)?;
    let default = |i: u64| if i.is_multiple_of(period) { "full_attention" } else { "sliding_attention" };
    let kinds = fields.of_layers("layer_types", layers, default)?;
    let ropes = ropes(fields, width)?;
    let head_bias = fields.flag_or("classifier_bias", false)?;
    let head_activation = Activation::read(fields, "classifier_activation", "gelu")?;
    b.without_dropout(fields, &["attention_dropout", "embedding_dropout", "mlp_dropout"])?;
    // Fields about classifiers, the search for masked tokens, and weight initialisation.
    fields.ignore(&["classifier_dropout", "classifier_pooling", "sparse_prediction", "sparse_pred_ignore_index"]);
    fields.ignore(&[
        "deterministic_flash_attn",
        "initializer_cutoff_factor",
        "reference_compile",
        "repad_logits_with_grad",
    ]);
    fields.ignore(&["position_embedding_type", "layer_norm_eps"]);

    let positions = fields.size_or("max_position_embeddings", 8192)?;
    let tokens = b.sequence(positions);
    let ids = b.input("input_ids", &[tokens], DType::I32)?;
    let places = masked_places(b, tokens)?;
    let mut attention = SelfAttention::new(heads, heads, width).with_biases(bias, bias);
    (attention.projections, attention.output) = (Projections::Blocks("Wqkv"), "Wo");
    let gated = Gated {
        first: GateUp::Joined("Wi"),
        down: "Wo",
        bias: fields.flag_or("mlp_bias", false)?,
        ..Gated::new(inner, activation)
    };
    let (x, table) = b.within("model", |b| {
        let (mut x, table) = b.within("embeddings", |b| {
            let table = b.table("tok_embeddings", vocabulary, hidden)?;
            let x = b.within("tok_embeddings", |b| Ok(array::embedding(&mut b.graph, table, ids)?))?;
            Ok((b.norm("norm", x, &norm)?, table))
        })?;
        let angles = ropes.iter().map(|rope| rope.angles(b, tokens, RotaryHalves::Split));
        let angles: Vec<_> = angles.collect::<Result<_, _>>()?;
        for index in 0..layers {
            let near = kinds[index as usize] == "sliding_attention";
            let rotary = Some(Rotary { kind: usize::from(near), part: None });
            let span = if near { Span::Near { distance: window } } else { Span::All };
            let attention = SelfAttention { rotary, span, ..attention.clone() };
            // The embeddings before the first layer have a norm already.
            let before = Around { before: (index > 0).then_some("attn_norm"), ..Around::default() };
            let layer = Layer {
                mixer: ("attn", Mixer::attention(attention)),
                feeds: vec![("mlp", Feed::Gated(gated))],
                order: Order::Sequential { mixer: before, feed: Around::before("mlp_norm") },
                norm,
                residual: 1.0,
                wide: false,
            };
            x = b.within(&format!("layers.{index}"), |b| layer.build(b, x, &angles))?;
        }
        Ok((b.norm("final_norm", x, &norm)?, table))
    })?;
    let x = b.within("head", |b| {
        let x = at_places(b, x, places)?;
        let x = b.linear("dense", x, hidden, head_bias)?;
        let x = head_activation.apply(&mut b.graph, x)?;
        b.norm("norm", x, &norm)
    })?;
    let tied = fields.flag_or("tie_word_embeddings", true)?;
    let bias = fields.flag_or("decoder_bias", true)?;
    let logits = b.head("decoder", x, tied.then_some(table), vocabulary, bias)?;
    b.loss(logits)
}

/// The positions of layers that see everything, and of those that see a window.
fn ropes(fields: &Fields<'_>, width: u64) -> Result<Vec<Rope>, ConfigError> {
    let new = fields.object("rope_parameters")?;
    let ropes =
        [("full_attention", "global_rope_theta", 160_000.0), ("sliding_attention", "local_rope_theta", 10_000.0)];
    let ropes = ropes.into_iter().map(|(kind, key, theta)| {
        let own = new.as_ref().map_or(Ok(None), |new| new.object(kind))?;
        Ok(Rope::of(fields, own.as_ref(), "hidden_size", width, fields.positive_or(key, theta)?, 1.0)?.0)
    });
    ropes.collect()
}

//! Llama and the families that differ from it in a few settings.

use crate::huggingface::attention::{MAX_OWN, NormOver, QkNorm, Span};
use crate::huggingface::blocks::{Builder, Matrix, Norm};
use crate::huggingface::config::Fields;
use crate::huggingface::decoder::{Around, Decoder, Defaults, Feed, Order, Plain};
use crate::huggingface::error::ConfigError;

/// Llama 1 to 3 (Touvron et al. 2023).
pub(crate) fn llama(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = Decoder::llama(fields, b, &Defaults::LLAMA)?;
    biases(fields, &mut decoder)?;
    decoder.build(b)
}

/// Adds the biases that `attention_bias` and `mlp_bias` ask for.
fn biases(fields: &Fields<'_>, decoder: &mut Decoder) -> Result<(), ConfigError> {
    let (bias, mlp_bias) = (fields.flag_or("attention_bias", false)?, fields.flag_or("mlp_bias", false)?);
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    decoder.each_gated(|gated| gated.bias = mlp_bias);
    Ok(())
}

/// Mistral (Jiang et al. 2023): all layers have a window.
pub(crate) fn mistral(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { inner: 14_336, kv_heads: Some(8), positions: 131_072, ..Defaults::LLAMA };
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    let window = window_or(fields, 4096)?;
    decoder.each_attention(|_, attention| attention.span = Span::causal(window));
    decoder.build(b)
}

/// Qwen2 and Qwen2.5: biases of q, k and v, and optionally a window in the layers from `max_window_layers` on.
pub(crate) fn qwen2(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 151_936, inner: 22_016, positions: 32_768, ..Defaults::LLAMA };
    let mut defaults = Defaults { kv_heads: Some(32), ..defaults };
    if is_part(fields)? {
        // The sizes of the decoders in Qwen2-VL and Qwen2.5-VL.
        let (vocabulary, hidden, inner, layers, heads) = (152_064, 8192, 29_568, 80, 64);
        let sizes = Defaults { vocabulary, hidden, inner, layers, heads, kv_heads: Some(8), ..defaults };
        defaults = Defaults { eps: 1e-5, theta: 1e6, ..sizes };
    }
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(true, false));
    qwen_windows(fields, &mut decoder)?;
    decoder.build(b)
}

/// Qwen3: norms of queries and keys.
pub(crate) fn qwen3(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 151_936, inner: 22_016, positions: 32_768, ..Defaults::LLAMA };
    let mut defaults = Defaults { kv_heads: Some(32), head_width: Some(128), ..defaults };
    if is_part(fields)? {
        defaults = Defaults { positions: 128_000, theta: 500_000.0, ..defaults };
    }
    let mut decoder = Decoder::llama(fields, b, &defaults)?;
    biases(fields, &mut decoder)?;
    qk_norms(&mut decoder, NormOver::Head);
    qwen_windows(fields, &mut decoder)?;
    decoder.build(b)
}

/// Returns true if the fields are those of a decoder in a model of images and text.
pub(crate) fn is_part(fields: &Fields<'_>) -> Result<bool, ConfigError> {
    Ok(fields.word_or("model_type", "")?.contains("_vl"))
}

/// Adds norms `q_norm` and `k_norm` of the same kind as the layer's own.
pub(crate) fn qk_norms(decoder: &mut Decoder, over: NormOver) {
    let Some(norm) = decoder.layers.first().map(|layer| layer.norm) else { return };
    let qk_norm = QkNorm { names: ["q_norm", "k_norm"], norm, over, after_rotary: false };
    decoder.each_attention(|_, attention| attention.qk_norm = Some(qk_norm));
}

fn qwen_windows(fields: &Fields<'_>, decoder: &mut Decoder) -> Result<(), ConfigError> {
    // Most configs state a window that they do not use.
    let used = fields.flag_or("use_sliding_window", false)?;
    let window = window_or(fields, 4096)?.filter(|_| used);
    let first = fields.count_or("max_window_layers", 28)?;
    let default = |i| if window.is_some() && i >= first { "sliding_attention" } else { "full_attention" };
    let kinds = fields.of_layers("layer_types", decoder.layers.len() as u64, default)?;
    decoder.slide(&kinds, window);
    Ok(())
}

/// `sliding_window`, or `default` if it is missing, or `None` if it is null.
pub(crate) fn window_or(fields: &Fields<'_>, default: u64) -> Result<Option<u64>, ConfigError> {
    let stated = fields.optional_size("sliding_window")?;
    Ok(stated.or((!fields.is_null("sliding_window")).then_some(default)))
}

/// SmolLM3: every fourth layer has no positions.
pub(crate) fn smollm3(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = Decoder::llama(
        fields,
        b,
        &Defaults {
            vocabulary: 128_256,
            hidden: 2048,
            layers: 36,
            heads: 16,
            kv_heads: Some(4),
            positions: 32_768,
            theta: 2e6,
            tied: true,
            ..Defaults::LLAMA
        },
    )?;
    biases(fields, &mut decoder)?;
    let turned = turned_layers(fields, &mut decoder)?;
    let used = fields.flag_or("use_sliding_window", false)?;
    let window = fields.optional_size("sliding_window")?.filter(|_| used);
    let default = |i: u64| if window.is_some() && !turned[i as usize] { "sliding_attention" } else { "full_attention" };
    let kinds = fields.of_layers("layer_types", decoder.layers.len() as u64, default)?;
    decoder.slide(&kinds, window);
    decoder.build(b)
}

/// Removes positions from the layers that `no_rope_layers` marks with 0. Returns for each layer if it has positions.
pub(crate) fn turned_layers(fields: &Fields<'_>, decoder: &mut Decoder) -> Result<Vec<bool>, ConfigError> {
    let layers = decoder.layers.len();
    let interval = fields.size_or("no_rope_layer_interval", 4)?;
    let turned = match fields.numbers("no_rope_layers")?.filter(|listed| !listed.is_empty()) {
        None => (1..=layers as u64).map(|i| !i.is_multiple_of(interval)).collect(),
        Some(listed) if listed.len() == layers => listed.iter().map(|n| *n != 0.0).collect::<Vec<bool>>(),
        Some(_) => return Err(fields.expected("no_rope_layers", format!("a number for each of {layers} layers"))),
    };
    decoder.each_attention(|i, attention| attention.rotary = attention.rotary.filter(|_| turned[i as usize]));
    Ok(turned)
}

/// Ernie 4.5: interleaved rotary pairs.
pub(crate) fn ernie4_5(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = Decoder::llama(
        fields,
        b,
        &Defaults {
            vocabulary: 103_424,
            hidden: 1024,
            inner: 3072,
            layers: 18,
            heads: 16,
            kv_heads: Some(2),
            head_width: Some(128),
            positions: 131_072,
            eps: 1e-5,
            theta: 500_000.0,
            tied: true,
            ..Defaults::LLAMA
        },
    )?;
    let bias = fields.flag_or("use_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    decoder.each_gated(|gated| gated.bias = bias);
    decoder.halves = altiplano_ir::array::RotaryHalves::Interleaved;
    decoder.build(b)
}

/// Phi-3 and Phi-4: joined matrices.
pub(crate) fn phi3(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let defaults = Defaults { vocabulary: 32_064, hidden: 3072, inner: 8192, positions: 4096, ..Defaults::LLAMA };
    let mut decoder = Decoder::llama(fields, b, &Defaults { eps: 1e-5, ..defaults })?;
    decoder.join_matrices();
    let window = fields.optional_size("sliding_window")?;
    decoder.each_attention(|_, attention| attention.span = Span::causal(window));
    decoder.build(b)
}

/// OLMo (Groeneveld et al. 2024): layer norms without weights.
pub(crate) fn olmo(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let norm = Norm { weight: false, bias: false, ..Norm::layer(1e-5) };
    let defaults = Defaults { vocabulary: 50_304, ..Defaults::LLAMA };
    let mut decoder = Decoder::with_norm(fields, b, &defaults, norm)?;
    biases(fields, &mut decoder)?;
    clip(fields, &mut decoder)?;
    decoder.build(b)
}

/// Sets the limit to which `clip_qkv` clamps the projections.
pub(crate) fn clip(fields: &Fields<'_>, decoder: &mut Decoder) -> Result<(), ConfigError> {
    if fields.has("clip_qkv") {
        let most = fields.positive("clip_qkv")?;
        decoder.each_attention(|_, attention| attention.clip = Some(most));
    }
    Ok(())
}

/// OLMo 2 and 3 (OLMo team 2024): norms of each part's result, and of all queries and all keys of a token.
pub(crate) fn olmo2(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let newer = fields.word_or("model_type", "")? == "olmo3";
    let defaults = Defaults { vocabulary: 50_304, eps: 1e-5, ..Defaults::LLAMA };
    let theta = if newer { 500_000.0 } else { defaults.theta };
    let mut decoder = Decoder::llama(fields, b, &Defaults { theta, ..defaults })?;
    biases(fields, &mut decoder)?;
    qk_norms(&mut decoder, NormOver::All);
    decoder.each(|_, layer| {
        layer.order = Order::Sequential {
            mixer: Around::after("post_attention_layernorm"),
            feed: Around::after("post_feedforward_layernorm"),
        };
    });
    if newer {
        let default = |i: u64| if (i + 1).is_multiple_of(4) { "full_attention" } else { "sliding_attention" };
        let kinds = fields.of_layers("layer_types", decoder.layers.len() as u64, default)?;
        let window = window_or(fields, 4096)?;
        decoder.slide(&kinds, window);
        let slides: Vec<bool> = kinds.iter().map(|kind| *kind == "sliding_attention").collect();
        let theta = fields.positive_or("rope_theta", theta)?;
        decoder.ropes_by_span(fields, &slides, [theta, theta])?;
    }
    decoder.build(b)
}

/// Granite: factors of the embeddings, of the scores, of results added to the residual stream, and of the logits.
pub(crate) fn granite(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let mut decoder = Decoder::llama(fields, b, &Defaults::LLAMA)?;
    biases(fields, &mut decoder)?;
    multipliers(fields, &mut decoder)?;
    decoder.build(b)
}

/// Sets the factors of Granite.
pub(crate) fn multipliers(fields: &Fields<'_>, decoder: &mut Decoder) -> Result<(), ConfigError> {
    decoder.embedding.scale = Some(fields.positive_or("embedding_multiplier", 1.0)?);
    decoder.head.scale = 1.0 / fields.positive_or("logits_scaling", 1.0)?;
    let (scores, residual) =
        (fields.positive_or("attention_multiplier", 1.0)?, fields.positive_or("residual_multiplier", 1.0)?);
    decoder.each_attention(|_, attention| attention.scale = Some(scores));
    decoder.each(|_, layer| layer.residual = residual);
    Ok(())
}

/// Nemotron-4 (Parmar et al. 2024): perceptrons with a squared ReLU and no gate, layer norms that store their weight
/// minus one, and rotary positions in a part of each head.
pub(crate) fn nemotron(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let norm = Norm { less_one: true, ..Norm::layer(fields.positive_or("norm_eps", 1e-5)?) };
    let defaults = Defaults { vocabulary: 256_000, hidden: 6144, inner: 24_576, heads: 48, ..Defaults::LLAMA };
    let defaults = Defaults { positions: 4096, activation: "relu2", partial: 0.5, ..defaults };
    let mut decoder = Decoder::with_norm(fields, b, &defaults, norm)?;
    biases(fields, &mut decoder)?;
    decoder.plain_feeds("up_proj", "down_proj");
    decoder.build(b)
}

/// StarCoder2 (Lozhkov et al. 2024): layer norms, perceptrons without a gate, and biases.
pub(crate) fn starcoder2(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let norm = Norm::layer(fields.positive_or("norm_epsilon", 1e-5)?);
    let defaults = Defaults { vocabulary: 49_152, hidden: 3072, inner: 12_288, layers: 30, ..Defaults::LLAMA };
    let defaults = Defaults { heads: 24, kv_heads: Some(2), activation: "gelu_pytorch_tanh", ..defaults };
    let mut decoder = Decoder::with_norm(fields, b, &Defaults { positions: 4096, tied: true, ..defaults }, norm)?;
    b.without_dropout(fields, &["residual_dropout", "embedding_dropout"])?;
    let bias = fields.flag_or("use_bias", true)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, bias));
    decoder.each_gated(|gated| gated.bias = bias);
    decoder.plain_feeds("c_fc", "c_proj");
    let window = fields.optional_size("sliding_window")?;
    decoder.each_attention(|_, attention| attention.span = Span::causal(window));
    decoder.build(b)
}

/// StableLM: layer norms, and rotary positions in a part of each head. The larger models run both parts of a layer in
/// parallel.
pub(crate) fn stablelm(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let norm = Norm::layer(fields.positive_or("layer_norm_eps", 1e-5)?);
    let defaults = Defaults { vocabulary: 50_304, hidden: 2560, inner: 6912, kv_heads: Some(32), ..Defaults::LLAMA };
    let mut decoder = Decoder::with_norm(fields, b, &Defaults { positions: 4096, partial: 0.25, ..defaults }, norm)?;
    let bias = fields.flag_or("use_qkv_bias", false)?;
    decoder.each_attention(|_, attention| *attention = attention.clone().with_biases(bias, false));
    if fields.flag_or("qk_layernorm", false)? {
        let heads = fields.size_or("num_attention_heads", defaults.heads)?;
        fields.at_most("num_attention_heads", heads, "the most heads with norms of their own", MAX_OWN)?;
        let (names, norm) = (["q_layernorm", "k_layernorm"], Norm { bias: false, ..norm });
        let qk_norm = QkNorm { names, norm, over: NormOver::Modules, after_rotary: false };
        decoder.each_attention(|_, attention| attention.qk_norm = Some(qk_norm));
    }
    if fields.flag_or("use_parallel_residual", false)? {
        decoder.each(|_, layer| layer.order = Order::Parallel { mixer: "input_layernorm", feed: None });
    }
    decoder.build(b)
}

/// Phi-1 and Phi-2: both parts of a layer in parallel under one norm, and biases everywhere.
pub(crate) fn phi(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let norm = Norm::layer(fields.positive_or("layer_norm_eps", 1e-5)?);
    let defaults = Defaults { vocabulary: 51_200, hidden: 2048, inner: 8192, layers: 24, ..Defaults::LLAMA };
    let defaults = Defaults { activation: "gelu_new", partial: 0.5, ..defaults };
    let mut decoder = Decoder::with_norm(fields, b, &defaults, norm)?;
    decoder.each_attention(|_, attention| {
        *attention = attention.clone().with_biases(true, true);
        attention.output = "dense";
    });
    if fields.flag_or("qk_layernorm", false)? {
        let names = ["q_layernorm", "k_layernorm"];
        let qk_norm = QkNorm { names, norm, over: NormOver::Head, after_rotary: false };
        decoder.each_attention(|_, attention| attention.qk_norm = Some(qk_norm));
    }
    decoder.each_gated(|gated| gated.bias = true);
    decoder.plain_feeds("fc1", "fc2");
    decoder.each(|_, layer| layer.order = Order::Parallel { mixer: "input_layernorm", feed: None });
    decoder.names.final_norm = "final_layernorm";
    decoder.head.bias = true;
    decoder.build(b)
}

impl Decoder {
    /// Removes the gate from each perceptron and names its two matrices.
    fn plain_feeds(&mut self, up: &'static str, down: &'static str) {
        self.each(|_, layer| {
            for (_, feed) in &mut layer.feeds {
                if let Feed::Gated(gated) = *feed {
                    let matrix = Matrix { bias: gated.bias, transposed: false };
                    *feed = Feed::Plain(Plain { up, down, width: gated.width, activation: gated.activation, matrix });
                }
            }
        });
    }
}

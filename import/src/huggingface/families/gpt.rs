//! GPT-2 and the decoders between it and Llama. They have layer norms, perceptrons without a gate, their own names, and
//! learnt positions, linear biases or rotary positions.

use crate::huggingface::attention::{Alibi, MAX_OWN, Projections, Rotary, SelfAttention};
use crate::huggingface::blocks::{Activation, Builder, Matrix, Norm};
use crate::huggingface::config::Fields;
use crate::huggingface::decoder::{
    Around, Decoder, Embedding, Feed, Head, Layer, Mixer, Names, Order, Plain, Positions,
};
use crate::huggingface::error::ConfigError;
use crate::huggingface::rope::Rope;
use altiplano_ir::array::RotaryHalves;
use altiplano_ir::dtype::DType;

/// The sizes of a decoder of this kind.
struct Sizes {
    vocabulary: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    positions: u64,
}

impl Sizes {
    fn head_width(&self, fields: &Fields<'_>, key: &str, heads_key: &'static str) -> Result<u64, ConfigError> {
        fields.at_most(heads_key, self.heads, "the most heads of such a model", MAX_OWN)?;
        fields.divides(key, self.hidden, heads_key, self.heads)?;
        Ok(self.hidden / self.heads)
    }

    /// A decoder with a layer norm before each part and a tied head.
    fn decoder(&self, names: Names, mixer: (&'static str, Mixer), feed: Plain, norm: Norm) -> Decoder {
        let layer = Layer {
            mixer,
            feeds: vec![("mlp", Feed::Plain(feed))],
            order: Order::before("ln_1", "ln_2"),
            norm,
            residual: 1.0,
            wide: false,
        };
        Decoder {
            names,
            vocabulary: self.vocabulary,
            hidden: self.hidden,
            positions: self.positions,
            embedding: Embedding::default(),
            ropes: Vec::new(),
            halves: RotaryHalves::Split,
            layers: vec![layer; self.layers as usize],
            final_norm: Some(norm),
            head: Head { tied: true, bias: false, scale: 1.0, cap: None },
        }
    }
}

/// GPT-2 (Radford et al. 2019). Its linear layers are `[in, out]`, and q, k and v are joined.
pub(crate) fn gpt2(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let sizes = Sizes {
        vocabulary: fields.main_size("vocab_size", 50_257)?,
        hidden: fields.main_size("n_embd", 768)?,
        layers: fields.main_layers("n_layer", 12)?,
        heads: fields.main_size("n_head", 12)?,
        positions: fields.size_or("n_positions", 1024)?,
    };
    let head_width = sizes.head_width(fields, "n_embd", "n_head")?;
    let matrix = Matrix { bias: true, transposed: true };
    let mut attention = SelfAttention::new(sizes.heads, sizes.heads, head_width);
    (attention.projections, attention.output) = (Projections::Blocks("c_attn"), "c_proj");
    attention.matrices = [matrix; 2];
    let feed = Plain {
        up: "c_fc",
        down: "c_proj",
        width: fields.size_or("n_inner", 4 * sizes.hidden)?,
        activation: Activation::read(fields, "activation_function", "gelu_new")?,
        matrix,
    };
    let norm = Norm::layer(fields.positive_or("layer_norm_epsilon", 1e-5)?);
    let by_root = fields.flag_or("scale_attn_weights", true)?;
    let by_layer = fields.flag_or("scale_attn_by_inverse_layer_idx", false)?;
    b.without_dropout(fields, &["resid_pdrop", "embd_pdrop", "attn_pdrop"])?;
    let mut decoder = sizes.decoder(Names::GPT, ("attn", Mixer::attention(attention)), feed, norm);
    decoder.embedding.positions = Some(Positions { name: "wpe", field: "n_positions", offset: 0 });
    decoder.each_attention(|i, attention| {
        let root = if by_root { (head_width as f64).sqrt() } else { 1.0 };
        attention.scale = Some(1.0 / if by_layer { root * (i + 1) as f64 } else { root });
    });
    decoder.head.tied = fields.flag_or("tie_word_embeddings", true)?;
    decoder.build(b)
}

/// GPT-J (Wang and Komatsuzaki 2021): both parts in parallel under one norm, with rotary positions in a part of each
/// head.
pub(crate) fn gptj(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let sizes = Sizes {
        vocabulary: fields.main_size("vocab_size", 50_400)?,
        hidden: fields.main_size("n_embd", 4096)?,
        layers: fields.main_layers("n_layer", 28)?,
        heads: fields.main_size("n_head", 16)?,
        positions: fields.size_or("n_positions", 2048)?,
    };
    let head_width = sizes.head_width(fields, "n_embd", "n_head")?;
    let rotary = match fields.is_null("rotary_dim") {
        true => sizes.hidden,
        false => fields.size_or("rotary_dim", 64)?,
    };
    fields.at_most("rotary_dim", rotary, "the width of a head", head_width)?;
    let rope = Rope::plain(fields, "rotary_dim", rotary, 10_000.0)?;
    let mut attention = SelfAttention::new(sizes.heads, sizes.heads, head_width);
    attention.output = "out_proj";
    attention.rotary = Some(Rotary { kind: 0, part: Some(rotary).filter(|r| *r < head_width) });
    let feed = Plain {
        up: "fc_in",
        down: "fc_out",
        width: fields.size_or("n_inner", 4 * sizes.hidden)?,
        activation: Activation::read(fields, "activation_function", "gelu_new")?,
        matrix: Matrix { bias: true, transposed: false },
    };
    let norm = Norm::layer(fields.positive_or("layer_norm_epsilon", 1e-5)?);
    b.without_dropout(fields, &["resid_pdrop", "embd_pdrop", "attn_pdrop"])?;
    let mut decoder = sizes.decoder(Names::GPT, ("attn", Mixer::attention(attention)), feed, norm);
    (decoder.ropes, decoder.halves) = (vec![rope], RotaryHalves::Interleaved);
    decoder.each(|_, layer| layer.order = Order::Parallel { mixer: "ln_1", feed: None });
    decoder.head.tied = fields.flag_or("tie_word_embeddings", false)?;
    decoder.head.bias = true;
    decoder.build(b)
}

/// GPT-NeoX and Pythia (Black et al. 2022): both parts in parallel, each under its own norm.
pub(crate) fn gpt_neox(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let sizes = Sizes {
        vocabulary: fields.main_size("vocab_size", 50_432)?,
        hidden: fields.main_size("hidden_size", 6144)?,
        layers: fields.main_layers("num_hidden_layers", 44)?,
        heads: fields.main_size("num_attention_heads", 64)?,
        positions: fields.size_or("max_position_embeddings", 2048)?,
    };
    let head_width = sizes.head_width(fields, "hidden_size", "num_attention_heads")?;
    let mut attention = SelfAttention::new(sizes.heads, sizes.heads, head_width);
    (attention.projections, attention.output) = (Projections::Groups("query_key_value"), "dense");
    let bias = fields.flag_or("attention_bias", true)?;
    let mut attention = attention.with_biases(bias, bias);
    let theta = fields.positive_or("rotary_emb_base", 10_000.0)?;
    let partial = fields.positive_or("rotary_pct", 0.25)?;
    let (rope, part) = Rope::read_part(fields, "rotary_pct", head_width, theta, partial)?;
    attention.rotary = Some(Rotary { kind: 0, part });
    let feed = Plain {
        up: "dense_h_to_4h",
        down: "dense_4h_to_h",
        width: fields.main_size("intermediate_size", 24_576)?,
        activation: Activation::read(fields, "hidden_act", "gelu")?,
        matrix: Matrix { bias: true, transposed: false },
    };
    let norm = Norm::layer(fields.positive_or("layer_norm_eps", 1e-5)?);
    b.without_dropout(fields, &["attention_dropout", "hidden_dropout"])?;
    fields.ignore(&["classifier_dropout"]);
    let names = Names {
        model: "gpt_neox",
        embedding: "embed_in",
        layers: "layers",
        final_norm: "final_layer_norm",
        head: "embed_out",
    };
    let parallel = fields.flag_or("use_parallel_residual", true)?;
    let mut decoder = sizes.decoder(names, ("attention", Mixer::attention(attention)), feed, norm);
    decoder.ropes = vec![rope];
    decoder.each(|_, layer| {
        let (mixer, feed) = ("input_layernorm", "post_attention_layernorm");
        layer.order = match parallel {
            true => Order::Parallel { mixer, feed: Some(feed) },
            false => Order::before(mixer, feed),
        };
    });
    decoder.head.tied = fields.flag_or("tie_word_embeddings", false)?;
    decoder.build(b)
}

/// Falcon (Almazrouei et al. 2023): joined projections whose keys have one head or a few, and both parts in parallel.
pub(crate) fn falcon(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let sizes = Sizes {
        vocabulary: fields.main_size("vocab_size", 65_024)?,
        hidden: fields.main_size("hidden_size", 4544)?,
        layers: fields.main_layers("num_hidden_layers", 32)?,
        heads: fields.main_size("num_attention_heads", 71)?,
        positions: fields.size_or("max_position_embeddings", 2048)?,
    };
    let head_width = sizes.head_width(fields, "hidden_size", "num_attention_heads")?;
    let newer = fields.flag_or("new_decoder_architecture", false)?;
    let multi_query = fields.flag_or("multi_query", true)?;
    let stated = fields.size_or("num_kv_heads", sizes.heads)?;
    let kv_heads = match (newer, multi_query) {
        (false, true) => 1,
        (true, _) => stated,
        // The joined matrix has as many keys as queries.
        (false, false) => sizes.heads,
    };
    fields.divides("num_attention_heads", sizes.heads, "num_kv_heads", kv_heads)?;
    let bias = fields.flag_or("bias", false)?;
    let mut attention = SelfAttention::new(sizes.heads, kv_heads, head_width).with_biases(bias, bias);
    (attention.projections, attention.output) = (Projections::Groups("query_key_value"), "dense");
    let mut ropes = Vec::new();
    if fields.flag_or("alibi", false)? {
        let slopes = Alibi::slopes(sizes.heads);
        attention.alibi = Some(Alibi { slopes, dtype: Some(DType::BF16), scaled: true });
        fields.ignore(&["rope_theta", "rope_scaling", "rope_parameters"]);
    } else {
        let (rope, part) = Rope::read_part(fields, "hidden_size", head_width, 10_000.0, 1.0)?;
        attention.rotary = Some(Rotary { kind: 0, part });
        ropes.push(rope);
    }
    let feed = Plain {
        up: "dense_h_to_4h",
        down: "dense_4h_to_h",
        width: fields.size_or("ffn_hidden_size", 4 * sizes.hidden)?,
        activation: Activation::read(fields, "activation", "gelu")?,
        matrix: Matrix { bias, transposed: false },
    };
    let norm = Norm::layer(fields.positive_or("layer_norm_epsilon", 1e-5)?);
    b.without_dropout(fields, &["attention_dropout", "hidden_dropout"])?;
    let parallel = fields.flag_or("parallel_attn", true)?;
    let norms = fields.optional_size("num_ln_in_parallel_attn")?.unwrap_or(if newer { 2 } else { 1 });
    let order = match (parallel, newer && norms == 2) {
        (true, true) => Order::Parallel { mixer: "ln_attn", feed: Some("ln_mlp") },
        (true, false) => Order::Parallel { mixer: "input_layernorm", feed: None },
        (false, false) => Order::before("input_layernorm", "post_attention_layernorm"),
        (false, true) => return Err(fields.unsupported("parallel_attn", &["true"])),
    };
    let names = Names { embedding: "word_embeddings", ..Names::GPT };
    let mut decoder = sizes.decoder(names, ("self_attention", Mixer::attention(attention)), feed, norm);
    decoder.ropes = ropes;
    decoder.each(|_, layer| layer.order = order);
    decoder.head.tied = fields.flag_or("tie_word_embeddings", true)?;
    decoder.build(b)
}

/// BLOOM (Scao et al. 2022): linear biases, and a norm of the embeddings.
pub(crate) fn bloom(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let sizes = Sizes {
        vocabulary: fields.main_size("vocab_size", 250_880)?,
        hidden: fields.main_size("hidden_size", 64)?,
        layers: fields.main_layers("n_layer", 2)?,
        heads: fields.main_size("n_head", 8)?,
        // There is no limit. This is the length that the models were trained on.
        positions: fields.size_or("seq_length", 2048)?,
    };
    let head_width = sizes.head_width(fields, "hidden_size", "n_head")?;
    let mut attention = SelfAttention::new(sizes.heads, sizes.heads, head_width).with_biases(true, true);
    (attention.projections, attention.output) = (Projections::Groups("query_key_value"), "dense");
    attention.alibi = Some(Alibi { slopes: Alibi::slopes(sizes.heads), dtype: None, scaled: false });
    let feed = Plain {
        up: "dense_h_to_4h",
        down: "dense_4h_to_h",
        width: 4 * sizes.hidden,
        activation: Activation::GeluTanh,
        matrix: Matrix { bias: true, transposed: false },
    };
    if fields.flag_or("apply_residual_connection_post_layernorm", false)? {
        return Err(fields.unsupported("apply_residual_connection_post_layernorm", &["false"]));
    }
    // Fields about how the checkpoints were written and trained.
    let aside = ["attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi"];
    fields.ignore(&aside);
    fields.ignore(&["skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id", "n_inner"]);
    let norm = Norm::layer(fields.positive_or("layer_norm_epsilon", 1e-5)?);
    b.without_dropout(fields, &["attention_dropout", "hidden_dropout"])?;
    let names = Names { embedding: "word_embeddings", ..Names::GPT };
    let mut decoder = sizes.decoder(names, ("self_attention", Mixer::attention(attention)), feed, norm);
    decoder.embedding.norm = Some(("word_embeddings_layernorm", norm));
    decoder.each(|_, layer| layer.order = Order::before("input_layernorm", "post_attention_layernorm"));
    decoder.head.tied = fields.flag_or("tie_word_embeddings", true)?;
    decoder.build(b)
}

/// MPT (MosaicML 2023): linear biases of the scores, and no bias of any matrix or norm.
pub(crate) fn mpt(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let sizes = Sizes {
        vocabulary: fields.main_size("vocab_size", 50_368)?,
        hidden: fields.main_size("d_model", 2048)?,
        layers: fields.main_layers("n_layers", 24)?,
        heads: fields.main_size("n_heads", 16)?,
        positions: fields.size_or("max_seq_len", 2048)?,
    };
    let head_width = sizes.head_width(fields, "d_model", "n_heads")?;
    let mut attention = SelfAttention::new(sizes.heads, sizes.heads, head_width);
    (attention.projections, attention.output) = (Projections::Blocks("Wqkv"), "out_proj");
    let own = fields.object("attn_config")?;
    let mut most = 8.0;
    if let Some(own) = &own {
        for key in ["prefix_lm", "qk_ln"] {
            if own.flag_or(key, false)? {
                return Err(own.unsupported(key, &["false"]));
            }
        }
        if own.word_or("attn_type", "multihead_attention")? != "multihead_attention" {
            return Err(own.unsupported("attn_type", &["multihead_attention"]));
        }
        if own.has("clip_qkv") {
            attention.clip = Some(own.positive("clip_qkv")?);
        }
        if own.has("softmax_scale") {
            attention.scale = Some(own.positive("softmax_scale")?);
        }
        most = own.positive_or("alibi_bias_max", 8.0)?;
        own.ignore(&["attn_impl", "attn_uses_sequence_id", "alibi"]);
        b.without_dropout(own, &["attn_pdrop"])?;
    }
    // Transformers adds linear biases whatever the config says.
    attention.alibi = Some(Alibi { slopes: Alibi::slopes_to(sizes.heads, most), dtype: None, scaled: false });
    let feed = Plain {
        up: "up_proj",
        down: "down_proj",
        width: 4 * sizes.hidden,
        activation: Activation::GeluErf,
        matrix: Matrix::default(),
    };
    // Transformers' model does not depend on these fields.
    fields.ignore(&["expansion_ratio", "learned_pos_emb", "no_bias", "norm_type", "embedding_fraction", "init_device"]);
    fields.ignore(&["logit_scale", "init_config", "tokenizer_name", "verbose", "fc_type", "ffn_config"]);
    let norm = Norm { bias: false, ..Norm::layer(fields.positive_or("layer_norm_epsilon", 1e-5)?) };
    b.without_dropout(fields, &["emb_pdrop", "resid_pdrop"])?;
    let names = Names { layers: "blocks", final_norm: "norm_f", ..Names::GPT };
    let mut decoder = sizes.decoder(names, ("attn", Mixer::attention(attention)), feed, norm);
    decoder.each(|_, layer| {
        layer.order = Order::before("norm_1", "norm_2");
        layer.feeds.iter_mut().for_each(|feed| feed.0 = "ffn");
    });
    decoder.head.tied = fields.flag_or("tie_word_embeddings", true)?;
    decoder.build(b)
}

/// OPT (Zhang et al. 2022): learnt positions, whose table has two rows before the first position.
pub(crate) fn opt(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let sizes = Sizes {
        vocabulary: fields.main_size("vocab_size", 50_272)?,
        hidden: fields.main_size("hidden_size", 768)?,
        layers: fields.main_layers("num_hidden_layers", 12)?,
        heads: fields.main_size("num_attention_heads", 12)?,
        positions: fields.size_or("max_position_embeddings", 2048)?,
    };
    let head_width = sizes.head_width(fields, "hidden_size", "num_attention_heads")?;
    let bias = fields.flag_or("enable_bias", true)?;
    let mut attention = SelfAttention::new(sizes.heads, sizes.heads, head_width).with_biases(bias, bias);
    attention.output = "out_proj";
    let feed = Plain {
        up: "fc1",
        down: "fc2",
        width: fields.main_size("ffn_dim", 3072)?,
        activation: Activation::read(fields, "activation_function", "relu")?,
        matrix: Matrix { bias, transposed: false },
    };
    let affine = fields.flag_or("layer_norm_elementwise_affine", true)?;
    let norm = Norm { weight: affine, bias: affine, ..Norm::layer(1e-5) };
    b.without_dropout(fields, &["dropout", "attention_dropout", "layerdrop", "activation_dropout"])?;
    fields.ignore(&["init_std", "word_embed_proj_dim"]);
    let before = fields.flag_or("do_layer_norm_before", true)?;
    let width = fields.size_or("word_embed_proj_dim", sizes.hidden)?;
    let names = Names {
        model: "model.decoder",
        embedding: "embed_tokens",
        layers: "layers",
        final_norm: "final_layer_norm",
        head: "lm_head",
    };
    let mut decoder = sizes.decoder(names, ("self_attn", Mixer::attention(attention)), feed, norm);
    decoder.embedding.positions =
        Some(Positions { name: "embed_positions", field: "max_position_embeddings", offset: 2 });
    decoder.embedding.width = Some(width).filter(|width| *width != sizes.hidden);
    let (mixer, feed) = ("self_attn_layer_norm", "final_layer_norm");
    let of_sum = |name| Around { of_sum: Some(name), ..Around::default() };
    decoder.each(|_, layer| {
        layer.order = match before {
            true => Order::before(mixer, feed),
            false => Order::Sequential { mixer: of_sum(mixer), feed: of_sum(feed) },
        };
        layer.feeds.iter_mut().for_each(|feed| feed.0 = "");
    });
    decoder.final_norm = decoder.final_norm.filter(|_| before);
    if fields.flag_or("_remove_final_layer_norm", false)? {
        decoder.final_norm = None;
    }
    decoder.head.tied = fields.flag_or("tie_word_embeddings", true)?;
    decoder.build(b)
}

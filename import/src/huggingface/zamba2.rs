//! Zamba2 (Glorioso et al. 2024): state spaces of Mamba-2, and a few blocks of attention and perceptron that many
//! layers share. A block reads the embeddings beside the layer's input. Each layer adds adapters of its own to it.

use super::attention::{merge_heads, split_heads};
use super::blocks::{Activation, Block, Builder, Norm};
use super::config::{Fields, MAX_SIZE};
use super::error::ConfigError;
use super::rope::{Angles, Rope};
use super::state_space::StateSpace;
use altiplano_ir::array::{self, Attention, RotaryHalves};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;

/// The sizes of the shared blocks.
struct Shared {
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_width: u64,
    width: u64,
    activation: Activation,
    bias: bool,
    /// The rank of adapters.
    rank: u64,
    /// True if attention has adapters too, false if only the perceptron has.
    attention_adapters: bool,
    norm: Norm,
}

pub(crate) fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    let hidden = fields.main_size("hidden_size", 2560)?;
    let inner = fields.size_or("mamba_expand", 2)? * hidden;
    let heads = fields.size_or("n_mamba_heads", 8)?;
    fields.divides("mamba_expand", inner, "n_mamba_heads", heads)?;
    let bias = fields.flag_or("add_bias_linear", false)?;
    let mixer = StateSpace {
        heads,
        head_width: inner / heads,
        state: fields.size_or("mamba_d_state", 64)?,
        groups: fields.size_or("mamba_ngroups", 1)?,
        kernel: fields.size_or("mamba_d_conv", 4)?,
        chunk: fields.size_or("chunk_size", 256)?,
        bias,
        conv_bias: true,
        activation: Activation::Silu,
        eps: 1e-5,
        step_limits: (fields.positive_or("time_step_min", 0.001)?, f64::INFINITY),
    };
    fields.divides("n_mamba_heads", heads, "mamba_ngroups", mixer.groups)?;
    fields.at_most("mamba_expand", inner, "the widest layer", MAX_SIZE)?;
    fields.at_most("mamba_d_state", mixer.groups * mixer.state, "the widest layer", MAX_SIZE)?;

    let norm = Norm::rms(fields.positive_or("rms_norm_eps", 1e-5)?);
    let shared = Shared::read(fields, hidden, bias, norm)?;
    if fields.flag_or("use_long_context", false)? {
        return Err(fields.unsupported("use_long_context", &["false"]));
    }
    let rope = match fields.flag_or("use_mem_rope", false)? {
        true => Some(Rope::read_part(fields, "num_attention_heads", shared.head_width, 10_000.0, 1.0)?.0),
        false => None,
    };
    let blocks = fields.size_or("num_mem_blocks", 1)? as usize;
    let layers = fields.main_layers("num_hidden_layers", 54)?;
    let kinds = fields.of_layers("layers_block_type", layers, |i| match i {
        6 | 12 | 18 | 24 | 30 | 36 | 42 | 47 | 51 => "hybrid",
        _ => "linear_attention",
    })?;
    if kinds.iter().any(|kind| !["hybrid", "mamba", "linear_attention"].contains(kind)) {
        return Err(fields.unsupported("layers_block_type", &["linear_attention", "hybrid"]));
    }
    fields.ignore(&["use_conv_bias", "mamba_headdim", "attention_hidden_size", "attention_head_dim", "kv_channels"]);
    fields.ignore(&["num_query_groups", "ffn_hidden_size", "hybrid_layer_ids", "use_shared_mlp_adapter"]);
    fields.ignore(&["time_step_max", "time_step_floor", "time_step_limit", "use_mamba_kernels", "use_mem_eff_path"]);
    fields.ignore(&["num_logits_to_keep"]);
    b.without_dropout(fields, &["attention_dropout"])?;
    let vocabulary = fields.main_size("vocab_size", 32_000)?;
    // Without tied embeddings, Transformers ties no blocks either. No published model is like that.
    if !fields.flag_or("tie_word_embeddings", true)? {
        return Err(fields.unsupported("tie_word_embeddings", &["true"]));
    }
    let positions = fields.size_or("max_position_embeddings", 4096)?;

    let tokens = b.sequence(positions);
    let ids = b.input("input_ids", &[tokens], DType::I32)?;
    let (x, table) = b.within("model", |b| {
        let table = b.table("embed_tokens", vocabulary, hidden)?;
        let embedded = b.within("embed_tokens", |b| Ok(array::embedding(&mut b.graph, table, ids)?))?;
        let angles = rope.map(|rope| rope.angles(b, tokens, RotaryHalves::Split)).transpose()?;
        let hybrids: Vec<usize> = (0..kinds.len()).filter(|&i| kinds[i] == "hybrid").collect();
        let mut x = embedded;
        for index in 0..kinds.len() {
            let Some(number) = hybrids.iter().position(|&i| i == index) else {
                x = b.within(&format!("layers.{index}"), |b| mixed(b, &mixer, &norm, x, None))?;
                continue;
            };
            let of_first = format!("model.layers.{}.shared_transformer", hybrids[number % blocks]);
            x = b.within(&format!("layers.{index}"), |b| {
                let made = b.within("shared_transformer", |b| {
                    b.with_weights_of(&of_first, |b| shared.build(b, [x, embedded], number, angles.as_ref()))
                })?;
                let made = b.linear("linear", made, hidden, false)?;
                b.within("mamba_decoder", |b| mixed(b, &mixer, &norm, x, Some(made)))
            })?;
        }
        Ok((b.norm("final_layernorm", x, &norm)?, table))
    })?;
    let logits = b.head("lm_head", x, Some(table), vocabulary, false)?;
    b.loss(logits)
}

/// `x` plus a state space of it, or of its sum with `more`.
fn mixed(b: &mut Builder, mixer: &StateSpace, norm: &Norm, x: ValueId, more: Option<ValueId>) -> Block {
    let sum = more.map_or(Ok(x), |more| b.add(x, more))?;
    let normed = b.norm("input_layernorm", sum, norm)?;
    let made = b.within("mamba", |b| mixer.build(b, normed))?;
    b.add(x, made)
}

impl Shared {
    fn read(fields: &Fields<'_>, hidden: u64, bias: bool, norm: Norm) -> Result<Shared, ConfigError> {
        let heads = fields.main_size("num_attention_heads", 32)?;
        fields.divides("hidden_size", 2 * hidden, "num_attention_heads", heads)?;
        let shared = Shared {
            hidden,
            heads,
            kv_heads: fields.optional_size("num_key_value_heads")?.unwrap_or(heads),
            head_width: 2 * hidden / heads,
            width: fields.optional_size("intermediate_size")?.unwrap_or(4 * hidden),
            activation: Activation::read(fields, "hidden_act", "gelu")?,
            bias,
            rank: fields.size_or("adapter_rank", 128)?,
            attention_adapters: fields.flag_or("use_shared_attention_adapter", false)?,
            norm,
        };
        fields.divides("num_attention_heads", heads, "num_key_value_heads", shared.kv_heads)?;
        if shared.attention_adapters && shared.kv_heads != heads {
            return Err(fields.expected("num_key_value_heads", "the number of heads, for adapters of attention"));
        }
        Ok(shared)
    }

    /// Builds the block for `x` and the embeddings, with the adapters of the layer that is `number` among those with
    /// such a block.
    fn build(&self, b: &mut Builder, [x, embedded]: [ValueId; 2], number: usize, angles: Option<&Angles>) -> Block {
        let both = array::concat(&mut b.graph, &[x, embedded], 2)?;
        let normed = b.norm("input_layernorm", both, &self.norm)?;
        let attended = b.within("self_attn", |b| self.attend(b, normed, number, angles))?;
        let normed = b.norm("pre_ff_layernorm", attended, &self.norm)?;
        b.within("feed_forward", |b| {
            let plain = b.linear("gate_up_proj", normed, 2 * self.width, self.bias)?;
            let wide = self.adapted(b, "gate_up_proj_adapter_list", number, normed, plain)?;
            let parts = array::split(&mut b.graph, wide, 2, &[self.width; 2])?;
            let gate = self.activation.apply(&mut b.graph, parts[0])?;
            let inner = b.multiply(gate, parts[1])?;
            b.linear("down_proj", inner, self.hidden, self.bias)
        })
    }

    /// Attention of `x`, `[B, S, 2 hidden]`, to the width of the model.
    fn attend(&self, b: &mut Builder, x: ValueId, number: usize, angles: Option<&Angles>) -> Block {
        let mut parts = Vec::with_capacity(3);
        for (letter, heads) in [("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)] {
            let mut y = b.linear(&format!("{letter}_proj"), x, heads * self.head_width, false)?;
            if self.attention_adapters {
                y = self.adapted(b, &format!("linear_{letter}_adapter_list"), number, x, y)?;
            }
            let y = split_heads(&mut b.graph, y, heads)?;
            parts.push(angles.filter(|_| letter != "v").map_or(Ok(y), |angles| angles.turn(b, y))?);
        }
        // Half of a head's width counts, since half of the features are embeddings.
        let scale = Some((self.head_width as f64 / 2.0).sqrt().recip());
        let how = Attention { scale, causal: true, mask: None };
        let mixed = array::attention(&mut b.graph, parts[0], parts[1], parts[2], &how)?;
        let merged = merge_heads(&mut b.graph, mixed)?;
        b.linear("o_proj", merged, self.hidden, false)
    }

    /// `y` plus the adapter of `x` that `name` lists for a layer.
    fn adapted(&self, b: &mut Builder, name: &str, number: usize, x: ValueId, y: ValueId) -> Block {
        let out = b.graph.shape(y).last().copied().unwrap_or(1);
        let adapter = b.within(&format!("{name}.{number}"), |b| {
            let low = b.linear("0", x, self.rank, false)?;
            b.linear("1", low, out, false)
        })?;
        b.add(y, adapter)
    }
}

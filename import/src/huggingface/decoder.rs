//! Text decoders: a single description, whose settings are the differences between families, and its graph.
//!
//! A layer mixes tokens (by attention, latent attention or a state space), and passes each token through perceptrons or
//! experts. It adds both results to its input, sequentially or in parallel, with norms before, after or around each
//! part. The families in [`super::families`] only map a config to this description.

use super::attention::{Projections, Rotary, SelfAttention, Span};
use super::blocks::{Activation, Block, Builder, Norm};
use super::config::Fields;
use super::error::ConfigError;
pub(crate) use super::feed::{Feed, GateUp, Gated, Plain};
use super::latent::Latent;
use super::rope::{Angles, Rope};
use super::selective::Selective;
use super::state_space::StateSpace;
use altiplano_ir::array::{self, RotaryHalves};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Binary;

/// A decoder with a head for the next token.
pub(crate) struct Decoder {
    pub names: Names,
    pub vocabulary: u64,
    pub hidden: u64,
    /// The number of tokens that the model is made for.
    pub positions: u64,
    pub embedding: Embedding,
    /// The kinds of rotary angles. Layers refer to them by index.
    pub ropes: Vec<Rope>,
    pub halves: RotaryHalves,
    pub layers: Vec<Layer>,
    pub final_norm: Option<Norm>,
    pub head: Head,
}

/// The names of modules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    /// The model without its head.
    pub model: &'static str,
    pub embedding: &'static str,
    pub layers: &'static str,
    pub final_norm: &'static str,
    pub head: &'static str,
}

impl Names {
    pub(crate) const LLAMA: Names =
        Names { model: "model", embedding: "embed_tokens", layers: "layers", final_norm: "norm", head: "lm_head" };
    pub(crate) const GPT: Names =
        Names { model: "transformer", embedding: "wte", layers: "h", final_norm: "ln_f", head: "lm_head" };
}

/// The path from token ids to the input of the first layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Embedding {
    pub scale: Option<f64>,
    /// The width of the table if it differs from the model's. `project_in` and `project_out` convert between both.
    pub width: Option<u64>,
    pub norm: Option<(&'static str, Norm)>,
    pub positions: Option<Positions>,
}

/// A table of learnt positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Positions {
    pub name: &'static str,
    /// The field with the number of positions.
    pub field: &'static str,
    /// The number of rows before that of the first position.
    pub offset: u64,
}

/// The path from the last layer's result to logits.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// True if the weight is the embedding table.
    pub tied: bool,
    pub bias: bool,
    /// The factor of the logits.
    pub scale: f64,
    /// If present, logits are `cap tanh(logits / cap)`.
    pub cap: Option<f64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Layer {
    /// The token mixer, with the name of its module.
    pub mixer: (&'static str, Mixer),
    /// The parts that each token goes through, with the names of their modules. Their results are added.
    pub feeds: Vec<(&'static str, Feed)>,
    pub order: Order,
    pub norm: Norm,
    /// The factor of results that are added to the residual stream.
    pub residual: f64,
    /// True if the residual stream is at least f32.
    pub wide: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum Mixer {
    Attention(Box<SelfAttention>),
    Latent(Latent),
    StateSpace(StateSpace),
    Selective(Selective),
    /// Tokens stay apart; the layer has feeds alone.
    Nothing,
}

impl Mixer {
    pub(crate) fn attention(attention: SelfAttention) -> Mixer {
        Mixer::Attention(Box::new(attention))
    }
}

/// The order of the two parts of a layer, with the names of their norms.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    Sequential {
        mixer: Around,
        feed: Around,
    },
    /// Both parts get the same input, under one norm or under one norm each.
    Parallel {
        mixer: &'static str,
        feed: Option<&'static str>,
    },
}

/// Names of the norms around one part.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Around {
    /// The norm of the part's input.
    pub before: Option<&'static str>,
    /// The norm of the part's result.
    pub after: Option<&'static str>,
    /// The norm of the residual stream after the result is added.
    pub of_sum: Option<&'static str>,
}

impl Around {
    pub(crate) const fn before(name: &'static str) -> Around {
        Around { before: Some(name), after: None, of_sum: None }
    }

    pub(crate) const fn after(name: &'static str) -> Around {
        Around { before: None, after: Some(name), of_sum: None }
    }

    pub(crate) const fn both(before: &'static str, after: &'static str) -> Around {
        Around { before: Some(before), after: Some(after), of_sum: None }
    }
}

impl Order {
    /// A norm before each part.
    pub(crate) const fn before(mixer: &'static str, feed: &'static str) -> Order {
        Order::Sequential { mixer: Around::before(mixer), feed: Around::before(feed) }
    }
}

/// The defaults of Transformers for configs of the Llama kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub vocabulary: u64,
    pub hidden: u64,
    pub inner: u64,
    pub layers: u64,
    pub heads: u64,
    /// By default, the number of heads.
    pub kv_heads: Option<u64>,
    /// By default, the model's width divided by its heads.
    pub head_width: Option<u64>,
    pub positions: u64,
    pub activation: &'static str,
    pub eps: f64,
    pub theta: f64,
    /// The fraction of a head that is rotated.
    pub partial: f64,
    pub tied: bool,
}

impl Defaults {
    /// The defaults of Llama, which many families start from.
    pub(crate) const LLAMA: Defaults = Defaults {
        vocabulary: 32_000,
        hidden: 4096,
        inner: 11_008,
        layers: 32,
        heads: 32,
        kv_heads: None,
        head_width: None,
        positions: 2048,
        activation: "silu",
        eps: 1e-6,
        theta: 10_000.0,
        partial: 1.0,
        tied: false,
    };
}

impl Decoder {
    /// A decoder of the Llama kind (Touvron et al. 2023): RMS norms before each part, grouped attention with rotary
    /// positions, and gated perceptrons.
    pub(crate) fn llama(fields: &Fields<'_>, b: &mut Builder, d: &Defaults) -> Result<Decoder, ConfigError> {
        let norm = Norm::rms(fields.positive_or("rms_norm_eps", d.eps)?);
        Decoder::with_norm(fields, b, d, norm)
    }

    /// The same with another norm.
    pub(crate) fn with_norm(
        fields: &Fields<'_>,
        b: &mut Builder,
        d: &Defaults,
        norm: Norm,
    ) -> Result<Decoder, ConfigError> {
        let hidden = fields.main_size("hidden_size", d.hidden)?;
        let mut attention = SelfAttention::read(fields, hidden, d)?;
        let rope = attention.read_rope(fields, d)?;
        let width = fields.main_size("intermediate_size", d.inner)?;
        let activation = Activation::read(fields, "hidden_act", d.activation)?;
        let layer = Layer {
            mixer: ("self_attn", Mixer::attention(attention)),
            feeds: vec![("mlp", Feed::Gated(Gated::new(width, activation)))],
            order: Order::before("input_layernorm", "post_attention_layernorm"),
            norm,
            residual: 1.0,
            wide: false,
        };
        let layers = fields.main_layers("num_hidden_layers", d.layers)?;
        b.without_dropout(fields, &["attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"])?;
        Ok(Decoder {
            names: Names::LLAMA,
            vocabulary: fields.main_size("vocab_size", d.vocabulary)?,
            hidden,
            positions: fields.size_or("max_position_embeddings", d.positions)?,
            embedding: Embedding::default(),
            ropes: vec![rope],
            halves: RotaryHalves::Split,
            layers: vec![layer; layers as usize],
            final_norm: Some(norm),
            head: Head { tied: fields.flag_or("tie_word_embeddings", d.tied)?, bias: false, scale: 1.0, cap: None },
        })
    }

    /// Changes each layer. `change` gets its number.
    pub(crate) fn each(&mut self, mut change: impl FnMut(u64, &mut Layer)) {
        (0..).zip(&mut self.layers).for_each(|(i, layer)| change(i, layer));
    }

    /// Changes each layer's attention.
    pub(crate) fn each_attention(&mut self, mut change: impl FnMut(u64, &mut SelfAttention)) {
        self.each(|i, layer| {
            if let Mixer::Attention(attention) = &mut layer.mixer.1 {
                change(i, attention);
            }
        });
    }

    /// Changes each layer's gated perceptron.
    pub(crate) fn each_gated(&mut self, mut change: impl FnMut(&mut Gated)) {
        self.each(|_, layer| {
            for (_, feed) in &mut layer.feeds {
                if let Feed::Gated(gated) = feed {
                    change(gated);
                }
            }
        });
    }

    /// Joins q, k and v, and gate and up, as Phi-3 does.
    pub(crate) fn join_matrices(&mut self) {
        self.each_attention(|_, attention| attention.projections = Projections::Blocks("qkv_proj"));
        self.join_gates();
    }

    pub(crate) fn join_gates(&mut self) {
        self.each_gated(|gated| gated.first = GateUp::Joined("gate_up_proj"));
    }

    /// Gives a window of `window` tokens to layers of the kind `sliding_attention`.
    pub(crate) fn slide(&mut self, kinds: &[&str], window: Option<u64>) {
        self.each_attention(|i, attention| {
            let slides = kinds.get(i as usize) == Some(&"sliding_attention");
            attention.span = Span::causal(window.filter(|_| slides));
        });
    }

    /// Sets separate angles for layers that see all tokens and for layers with a window. The latter are stretched only
    /// if an object of their own says so. `thetas` are the defaults.
    pub(crate) fn ropes_by_span(
        &mut self,
        fields: &Fields<'_>,
        slides: &[bool],
        thetas: [f64; 2],
    ) -> Result<(), ConfigError> {
        let width = 2 * self.ropes.first().map_or(0, |rope| rope.frequencies.len() as u64);
        let new = fields.object("rope_parameters")?;
        let own = |kind: &str| new.as_ref().map_or(Ok(None), |new| new.object(kind));
        let (all, near) = (own("full_attention")?, own("sliding_attention")?);
        if all.is_some() || near.is_some() {
            self.ropes = vec![Rope::of(fields, all.as_ref(), "head_dim", width, thetas[0], 1.0)?.0];
        }
        self.ropes.push(Rope::of(fields, near.as_ref(), "head_dim", width, thetas[1], 1.0)?.0);
        self.each_attention(|i, attention| {
            if let Some(rotary) = &mut attention.rotary {
                rotary.kind = usize::from(slides[i as usize]);
            }
        });
        Ok(())
    }

    /// Builds the graph with its loss.
    pub(crate) fn build(&self, b: &mut Builder) -> Result<(), ConfigError> {
        let tokens = match self.embedding.positions {
            Some(positions) => b.learned_sequence(positions.field, self.positions)?,
            None => b.sequence(self.positions),
        };
        let ids = b.input("input_ids", &[tokens], DType::I32)?;
        let (x, table) = b.within(self.names.model, |b| {
            let (mut x, table) = self.embedded(b, ids, tokens)?;
            let angles: Vec<Angles> =
                self.ropes.iter().map(|rope| rope.angles(b, tokens, self.halves)).collect::<Result<_, _>>()?;
            for (index, layer) in self.layers.iter().enumerate() {
                x = b.within(&format!("{}.{index}", self.names.layers), |b| layer.build(b, x, &angles))?;
            }
            x = array::convert(&mut b.graph, x, b.dtype)?;
            if let Some(norm) = &self.final_norm {
                x = b.norm(self.names.final_norm, x, norm)?;
            }
            if let Some(width) = self.embedding.width {
                x = b.linear("project_out", x, width, false)?;
            }
            Ok((x, table))
        })?;
        // Scale the input of the head instead of the logits, which are larger.
        let x = b.within(self.names.head, |b| times(b, x, self.head.scale))?;
        let mut logits =
            b.head(self.names.head, x, self.head.tied.then_some(table), self.vocabulary, self.head.bias)?;
        if let Some(cap) = self.head.cap {
            logits = b.within(self.names.head, |b| Ok(array::capped(&mut b.graph, logits, cap)?))?;
        }
        b.loss(logits)
    }

    /// The input of the first layer, and the embedding table.
    fn embedded(&self, b: &mut Builder, ids: ValueId, tokens: u64) -> Result<(ValueId, ValueId), ConfigError> {
        let how = &self.embedding;
        let table = b.table(self.names.embedding, self.vocabulary, how.width.unwrap_or(self.hidden))?;
        let mut x = b.within(self.names.embedding, |b| {
            let x = array::embedding(&mut b.graph, table, ids)?;
            times(b, x, how.scale.unwrap_or(1.0))
        })?;
        if how.width.is_some() {
            x = b.linear("project_in", x, self.hidden, false)?;
        }
        if let Some(Positions { name, offset, .. }) = how.positions {
            let rows = b.table(name, self.positions + offset, self.hidden)?;
            let (first, end) = (offset as i64, (offset + tokens) as i64);
            let rows = array::slice_dim(&mut b.graph, rows, 0, first, end, 1)?;
            x = b.add(x, rows)?;
        }
        if let Some((name, norm)) = &how.norm {
            x = b.norm(name, x, norm)?;
        }
        Ok((x, table))
    }
}

/// `x` times a number.
fn times(b: &mut Builder, x: ValueId, factor: f64) -> Block {
    if factor == 1.0 { Ok(x) } else { Ok(array::with_number(&mut b.graph, Binary::Multiply, x, factor)?) }
}

impl Layer {
    /// Builds the layer for `x`, which is `[B, S, hidden]`.
    pub(crate) fn build(&self, b: &mut Builder, x: ValueId, angles: &[Angles]) -> Block {
        match self.order {
            Order::Sequential { mixer, feed } => {
                let x = match self.mixer.1 {
                    Mixer::Nothing => x,
                    _ => self.part(b, x, mixer, |b, x| self.mix(b, x, angles))?,
                };
                if self.feeds.is_empty() { Ok(x) } else { self.part(b, x, feed, |b, x| self.feed(b, x)) }
            }
            Order::Parallel { mixer, feed } => {
                let normed = b.norm(mixer, x, &self.norm)?;
                let other = feed.map_or(Ok(normed), |feed| b.norm(feed, x, &self.norm))?;
                let mixed = self.mix(b, normed, angles)?;
                let fed = self.feed(b, other)?;
                let both = b.add(mixed, fed)?;
                b.add(x, both)
            }
        }
    }

    /// The residual stream after one part, with its norms.
    fn part(
        &self,
        b: &mut Builder,
        x: ValueId,
        around: Around,
        build: impl FnOnce(&mut Builder, ValueId) -> Block,
    ) -> Block {
        let normed = |b: &mut Builder, name: Option<&str>, x| name.map_or(Ok(x), |name| b.norm(name, x, &self.norm));
        let narrow = array::convert(&mut b.graph, x, b.dtype)?;
        let before = normed(b, around.before, narrow)?;
        let made = build(b, before)?;
        let made = normed(b, around.after, made)?;
        let mut made = times(b, made, self.residual)?;
        let mut x = x;
        if self.wide && b.dtype.bytes() < DType::F32.bytes() {
            (x, made) = (b.graph.convert(x, DType::F32), b.graph.convert(made, DType::F32));
        }
        let sum = b.add(x, made)?;
        normed(b, around.of_sum, sum)
    }

    fn mix(&self, b: &mut Builder, x: ValueId, angles: &[Angles]) -> Block {
        b.within(self.mixer.0, |b| match &self.mixer.1 {
            Mixer::Attention(attention) => attention.build(b, x, angles),
            Mixer::Latent(latent) => latent.build(b, x, &angles[0]),
            Mixer::StateSpace(mixer) => mixer.build(b, x),
            Mixer::Selective(mixer) => mixer.build(b, x),
            Mixer::Nothing => Ok(x),
        })
    }

    fn feed(&self, b: &mut Builder, x: ValueId) -> Block {
        let mut sum = None;
        for (name, feed) in &self.feeds {
            let made = b.within(name, |b| feed.build(b, x))?;
            sum = Some(sum.map_or(Ok(made), |sum| b.add(sum, made))?);
        }
        Ok(sum.unwrap_or(x))
    }
}

impl SelfAttention {
    /// Reads the sizes, which most families name alike. The matrices are those of Llama.
    pub(crate) fn read(fields: &Fields<'_>, hidden: u64, d: &Defaults) -> Result<Self, ConfigError> {
        let heads = fields.main_size("num_attention_heads", d.heads)?;
        let kv_default = d.kv_heads.filter(|_| !fields.is_null("num_key_value_heads")).unwrap_or(heads);
        let kv_heads = fields.size_or("num_key_value_heads", kv_default)?;
        fields.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
        let width = d.head_width.filter(|_| !fields.is_null("head_dim"));
        let head_width = match fields.optional_size("head_dim")?.or(width) {
            Some(width) => width,
            None => {
                fields.divides("hidden_size", hidden, "num_attention_heads", heads)?;
                hidden / heads
            }
        };
        Ok(SelfAttention::new(heads, kv_heads, head_width))
    }

    /// Reads the rotary positions and applies them to queries and keys.
    fn read_rope(&mut self, fields: &Fields<'_>, d: &Defaults) -> Result<Rope, ConfigError> {
        let (rope, part) = Rope::read_part(fields, "head_dim", self.head_width, d.theta, d.partial)?;
        self.rotary = Some(Rotary { kind: 0, part });
        Ok(rope)
    }
}

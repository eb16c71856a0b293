//! Self-attention of decoders and encoders: projections, norms and rotation of queries, keys and values, visible keys,
//! and the treatment of scores.

use super::blocks::{Block, Builder, Matrix, Norm};
use super::error::ConfigError;
use super::rope::Angles;
use altiplano_ir::array::{self, Attention};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Binary, Direction, Unary};
use altiplano_ir::types::TensorType;

/// `[B, S, heads * width]` to `[B, heads, S, width]`.
pub(crate) fn split_heads(g: &mut Graph, x: ValueId, heads: u64) -> array::Built {
    let [b, s, features] = g.shape(x)[..] else {
        return Err(array::ShapeError::Attribute("heads are taken from three dimensions"));
    };
    let x = array::reshape(g, x, &[b, s, heads, features / heads.max(1)])?;
    array::permute(g, x, &[0, 2, 1, 3])
}

/// The inverse of [`split_heads`].
pub(crate) fn merge_heads(g: &mut Graph, x: ValueId) -> array::Built {
    let [b, heads, s, width] = g.shape(x)[..] else {
        return Err(array::ShapeError::Attribute("heads are four dimensions"));
    };
    let x = array::permute(g, x, &[0, 2, 1, 3])?;
    array::reshape(g, x, &[b, s, heads * width])
}

/// The keys that a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    /// All keys.
    All,
    /// Keys up to `distance` away on both sides.
    Near { distance: u64 },
    /// The query's own position and the keys before it.
    Causal,
    /// The query's own position and the keys before it, `window` in total.
    Window { window: u64 },
    /// The query's own position and the keys before it in the same chunk.
    Chunk { chunk: u64 },
}

impl Span {
    /// A causal span, with a window if there is one.
    pub(crate) fn causal(window: Option<u64>) -> Span {
        window.map_or(Span::Causal, |window| Span::Window { window })
    }

    /// The causal option of an attention over `tokens` tokens. A span that is neither full nor causal also has a mask.
    fn over(self, g: &mut Graph, tokens: u64) -> Result<(bool, Option<ValueId>), array::ShapeError> {
        match self {
            Span::All => Ok((false, None)),
            Span::Near { distance } if distance + 1 >= tokens => Ok((false, None)),
            Span::Causal => Ok((true, None)),
            Span::Window { window: size } | Span::Chunk { chunk: size } if size >= tokens => Ok((true, None)),
            span => Ok((false, Some(span.mask(g, tokens)?))),
        }
    }

    /// `[S, S]` booleans, true if a query sees a key.
    fn mask(self, g: &mut Graph, tokens: u64) -> array::Built {
        let query = array::iota(g, &[tokens, tokens], 0, DType::I32)?;
        let key = array::iota(g, &[tokens, tokens], 1, DType::I32)?;
        let distance = array::binary(g, Binary::Subtract, query, key)?;
        let than = |g: &mut Graph, direction, x, number: f64| {
            let number = array::full_like(g, x, number)?;
            array::compare(g, direction, x, number)
        };
        match self {
            Span::All => than(g, Direction::Lt, distance, tokens as f64),
            Span::Causal => than(g, Direction::Ge, distance, 0.0),
            Span::Near { distance: far } => {
                let apart = array::unary(g, Unary::Abs, distance)?;
                than(g, Direction::Le, apart, far as f64)
            }
            Span::Window { window } => {
                let behind = than(g, Direction::Ge, distance, 0.0)?;
                let near = than(g, Direction::Lt, distance, window as f64)?;
                array::binary(g, Binary::And, behind, near)
            }
            Span::Chunk { chunk } => {
                let behind = than(g, Direction::Ge, distance, 0.0)?;
                let query = array::with_number(g, Binary::Divide, query, chunk as f64)?;
                let key = array::with_number(g, Binary::Divide, key, chunk as f64)?;
                let same = array::compare(g, Direction::Eq, query, key)?;
                array::binary(g, Binary::And, behind, same)
            }
        }
    }
}

/// The linear layers of queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Projections {
    /// One layer each.
    Apart([&'static str; 3]),
    /// One layer, whose outputs are all queries, then all keys, then all values.
    Blocks(&'static str),
    /// One layer, whose outputs are, for each head of the keys, its queries, its key and its value.
    Groups(&'static str),
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct QkNorm {
    pub names: [&'static str; 2],
    pub norm: Norm,
    pub over: NormOver,
    /// True if the norms come after the rotary positions, false if before.
    pub after_rotary: bool,
}

/// The dimensions that a norm of queries or keys covers, and its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormOver {
    /// Each head, with weights that all heads share.
    Head,
    /// Each head, with weights `[heads, width]`.
    EachHead,
    /// Each head, with weights `norms.N` of its own.
    Modules,
    /// All heads together.
    All,
}

/// Linear biases of the scores (Press et al. 2022): a slope for each head, times the key's position.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Alibi {
    pub slopes: Vec<f64>,
    /// The precision in which the biases are computed. If absent, that of the scores.
    pub dtype: Option<DType>,
    /// True if the biases are scaled with the scores.
    pub scaled: bool,
}

/// The largest number of heads with constants of their own in the graph, such as slopes or norms.
pub(crate) const MAX_OWN: u64 = 1 << 14;

impl Alibi {
    /// The slopes of BLOOM: powers of two for a power of two of heads. The remaining heads use every other slope of
    /// twice as many.
    pub(crate) fn slopes(heads: u64) -> Vec<f64> {
        let whole = 1u64 << heads.max(1).ilog2();
        let base = |of: u64| libm::exp2(-libm::exp2(3.0 - libm::log2(of as f64)));
        let first = (1..=whole).map(|i| libm::pow(base(whole), i as f64));
        let rest = (0..heads - whole).map(|i| libm::pow(base(2 * whole), (2 * i + 1) as f64));
        first.chain(rest).collect()
    }

    /// The slopes of MPT. If the number of heads is not a power of two, every other slope comes first.
    pub(crate) fn slopes_to(heads: u64, most: f64) -> Vec<f64> {
        let whole = heads.max(1).next_power_of_two();
        let slope = |i: u64| libm::exp2(-(i as f64) * most / whole as f64);
        let odd = (1..=whole).filter(|i| whole == heads || i % 2 == 0);
        let even = (1..=whole).filter(|i| whole != heads && i % 2 == 1);
        odd.chain(even).map(slope).take(heads as usize).collect()
    }

    /// `[heads, 1, S]`.
    fn biases(&self, b: &mut Builder, tokens: u64, scale: f64) -> Block {
        let dtype = self.dtype.unwrap_or(DType::F32);
        let g = &mut b.graph;
        let ty = TensorType::new(dtype, [self.slopes.len() as u64, 1, 1]);
        let slopes = g.constant(Literal::dense(ty, self.slopes.iter().map(|&s| dtype.round(s)).collect()));
        let position = array::iota(g, &[1, 1, tokens], 2, DType::I32)?;
        let position = array::convert(g, position, dtype)?;
        let biases = array::binary(g, Binary::Multiply, slopes, position)?;
        let biases = array::convert(g, biases, DType::F32)?;
        Ok(if self.scaled { array::with_number(g, Binary::Multiply, biases, scale)? } else { biases })
    }
}

/// Rotary positions of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rotary {
    /// The index of the layer's kind of angles in the model.
    pub kind: usize,
    /// The rotated width of each head, if it is not all.
    pub part: Option<u64>,
}

/// Queries that grow with the logarithm of their position, in steps of `floor` positions (Llama 4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Temperature {
    pub floor: f64,
    pub scale: f64,
}

/// Self-attention with four matrices. Keys and values may have fewer heads than queries.
#[derive(Clone, Debug)]
pub(crate) struct SelfAttention {
    pub heads: u64,
    pub kv_heads: u64,
    pub head_width: u64,
    pub projections: Projections,
    pub output: &'static str,
    /// The storage of the matrices of q, k and v, and of the output's matrix.
    pub matrices: [Matrix; 2],
    /// True if keys have no bias even if q and v have one.
    pub unbiased_keys: bool,
    pub qk_norm: Option<QkNorm>,
    pub rotary: Option<Rotary>,
    pub temperature: Option<Temperature>,
    pub alibi: Option<Alibi>,
    pub span: Span,
    /// The factor of the scores, by default `1 / sqrt(head_width)`.
    pub scale: Option<f64>,
    /// If present, scores are `cap tanh(scores / cap)`.
    pub cap: Option<f64>,
    /// The limit to which the projections are clamped.
    pub clip: Option<f64>,
    /// True if each head has a learnt score that takes weight and contributes nothing.
    pub sinks: bool,
}

impl SelfAttention {
    pub(crate) fn new(heads: u64, kv_heads: u64, head_width: u64) -> Self {
        SelfAttention {
            heads,
            kv_heads,
            head_width,
            projections: Projections::Apart(["q_proj", "k_proj", "v_proj"]),
            output: "o_proj",
            matrices: [Matrix::default(); 2],
            unbiased_keys: false,
            qk_norm: None,
            rotary: None,
            temperature: None,
            alibi: None,
            span: Span::Causal,
            scale: None,
            cap: None,
            clip: None,
            sinks: false,
        }
    }

    /// Sets whether q, k and v have biases, and whether the output has one.
    pub(crate) fn with_biases(mut self, inputs: bool, output: bool) -> Self {
        (self.matrices[0].bias, self.matrices[1].bias) = (inputs, output);
        self
    }

    /// Builds the attention of `x`, which is `[B, S, hidden]`.
    pub(crate) fn build(&self, b: &mut Builder, x: ValueId, angles: &[Angles]) -> Block {
        self.build_to(b, x, x, angles)
    }

    /// The same with keys and values of `memory`, `[B, T, hidden]`, which every query sees in full.
    pub(crate) fn build_to(&self, b: &mut Builder, x: ValueId, memory: ValueId, angles: &[Angles]) -> Block {
        let (tokens, hidden) = (b.graph.shape(x)[1], b.graph.shape(x)[2]);
        let [mut q, mut k, v] = self.projected(b, x, memory)?;
        if let Some(norm) = self.qk_norm.filter(|norm| !norm.after_rotary) {
            (q, k) = (self.normed(b, 0, &norm, q)?, self.normed(b, 1, &norm, k)?);
        }
        if let Some(rotary) = self.rotary {
            (q, k) = (self.turned(b, q, rotary, angles)?, self.turned(b, k, rotary, angles)?);
        }
        if let Some(norm) = self.qk_norm.filter(|norm| norm.after_rotary) {
            (q, k) = (self.normed(b, 0, &norm, q)?, self.normed(b, 1, &norm, k)?);
        }
        if let Some(temperature) = self.temperature.filter(|t| tokens as f64 >= t.floor) {
            q = temperature.scale(b, q, tokens)?;
        }
        let scale = self.scale.unwrap_or(1.0 / (self.head_width as f64).sqrt());
        let (causal, mut mask) = self.span.over(&mut b.graph, tokens)?;
        if let Some(alibi) = &self.alibi {
            // Position biases are only used under a causal mask, so there is no other mask.
            mask = Some(alibi.biases(b, tokens, scale)?);
        }
        let mixed = match self.cap.is_some() || self.sinks {
            true => self.written_out(b, [q, k, v], scale, causal, mask)?,
            false => array::attention(&mut b.graph, q, k, v, &Attention { scale: Some(scale), causal, mask })?,
        };
        let merged = merge_heads(&mut b.graph, mixed)?;
        b.matrix(self.output, merged, hidden, self.matrices[1])
    }

    /// The queries, keys and values: `[B, heads, S, width]`.
    fn projected(&self, b: &mut Builder, x: ValueId, memory: ValueId) -> Result<[ValueId; 3], ConfigError> {
        let [batch, tokens, _] = b.graph.shape(x)[..] else {
            return Err(array::ShapeError::Attribute("attention takes three dimensions").into());
        };
        let heads = [self.heads, self.kv_heads, self.kv_heads];
        let widths = heads.map(|heads| heads * self.head_width);
        let all = |b: &mut Builder, name: &str| {
            let y = b.matrix(name, x, widths.iter().sum(), self.matrices[0])?;
            self.clipped(b, y)
        };
        let parts = match self.projections {
            Projections::Apart(names) => {
                let mut parts = Vec::new();
                for (i, name) in names.into_iter().enumerate() {
                    let bias = self.matrices[0].bias && !(self.unbiased_keys && i == 1);
                    let matrix = Matrix { bias, ..self.matrices[0] };
                    let mut y = b.matrix(name, if i == 0 { x } else { memory }, widths[i], matrix)?;
                    if let Some(norm) = self.qk_norm.filter(|norm| norm.over == NormOver::All && i < 2) {
                        y = b.norm(norm.names[i], y, &norm.norm)?;
                    }
                    parts.push(self.clipped(b, y)?);
                }
                parts
            }
            Projections::Blocks(name) => {
                let y = all(b, name)?;
                array::split(&mut b.graph, y, 2, &widths)?
            }
            Projections::Groups(name) => {
                let y = all(b, name)?;
                let (g, group) = (&mut b.graph, self.heads / self.kv_heads.max(1) * self.head_width);
                let each = group + 2 * self.head_width;
                let y = array::reshape(g, y, &[batch, tokens, self.kv_heads, each])?;
                let parts = array::split(g, y, 3, &[group, self.head_width, self.head_width])?;
                let flat = |(part, width)| array::reshape(g, part, &[batch, tokens, width]);
                parts.into_iter().zip(widths).map(flat).collect::<Result<_, _>>()?
            }
        };
        let mut split = heads.into_iter().zip(parts).map(|(heads, part)| split_heads(&mut b.graph, part, heads));
        let mut next = || split.next().unwrap_or(Err(array::ShapeError::Attribute("attention has three projections")));
        Ok([next()?, next()?, next()?])
    }

    fn clipped(&self, b: &mut Builder, x: ValueId) -> Block {
        match self.clip {
            Some(most) => Ok(array::clamp(&mut b.graph, x, Some(-most), Some(most))?),
            None => Ok(x),
        }
    }

    /// Applies the norm of queries (0) or keys (1) to `x` of `[B, heads, S, width]`.
    fn normed(&self, b: &mut Builder, which: usize, how: &QkNorm, x: ValueId) -> Block {
        let (heads, name) = (b.graph.shape(x)[1], how.names[which]);
        let weights = |b: &mut Builder| match how.over {
            NormOver::EachHead => b.weight("weight", &[heads, self.head_width]),
            _ => {
                let each: Result<Vec<_>, ConfigError> = (0..heads)
                    .map(|i| b.within(&format!("norms.{i}"), |b| b.weight("weight", &[self.head_width])))
                    .collect();
                Ok(array::stack(&mut b.graph, &each?, 0)?)
            }
        };
        match how.over {
            NormOver::All => Ok(x),
            NormOver::Head => b.norm(name, x, &how.norm),
            NormOver::EachHead | NormOver::Modules => b.within(name, |b| {
                let weight = weights(b)?;
                let g = &mut b.graph;
                let weight = array::unsqueeze(g, weight, 1)?;
                let plain = how.norm.apply(g, x, None, None)?;
                Ok(array::binary(g, Binary::Multiply, plain, weight)?)
            }),
        }
    }

    /// Rotates `[B, heads, S, width]`, or the first part of each head.
    fn turned(&self, b: &mut Builder, x: ValueId, rotary: Rotary, angles: &[Angles]) -> Block {
        let angles = &angles[rotary.kind];
        let Some(part) = rotary.part else { return angles.turn(b, x) };
        let first = array::slice_dim(&mut b.graph, x, 3, 0, part as i64, 1)?;
        let rest = array::slice_dim(&mut b.graph, x, 3, part as i64, self.head_width as i64, 1)?;
        let first = angles.turn(b, first)?;
        Ok(array::concat(&mut b.graph, &[first, rest], 3)?)
    }

    /// Attention with capped scores, or with scores that compete with sinks.
    fn written_out(
        &self,
        b: &mut Builder,
        parts: [ValueId; 3],
        scale: f64,
        causal: bool,
        mask: Option<ValueId>,
    ) -> Block {
        let sinks = if self.sinks { Some(b.weight("sinks", &[self.heads])?) } else { None };
        let g = &mut b.graph;
        let [q, k, v] = parts.map(|x| array::permute(g, x, &[0, 2, 1, 3]));
        let (q, k, v) = (q?, k?, v?);
        let mut scores = array::attention_scores(g, q, k, scale)?;
        if let Some(cap) = self.cap {
            scores = array::capped(g, scores, cap)?;
        }
        let scores = array::masked_scores(g, scores, mask, causal)?;
        let last = g.shape(scores).len() - 1;
        let weights = match sinks {
            None => array::softmax(g, scores, last)?,
            Some(sinks) => {
                let group = self.heads / self.kv_heads.max(1);
                let shape = if last == 4 { vec![self.kv_heads, 1, group, 1] } else { vec![self.heads, 1, 1] };
                let sinks = array::reshape(g, sinks, &shape)?;
                let sinks = array::convert(g, sinks, g.ty(scores).dtype)?;
                array::softmax_beside(g, scores, last, sinks)?
            }
        };
        let [batch, tokens, ..] = g.shape(q)[..] else {
            return Err(array::ShapeError::Attribute("attention takes four dimensions").into());
        };
        let mixed = array::attend(g, weights, v, [batch, tokens, self.heads, self.head_width])?;
        Ok(array::permute(g, mixed, &[0, 2, 1, 3])?)
    }
}

impl Temperature {
    /// `[B, heads, S, width]`, with each position scaled by `1 + scale ln(1 + floor((position + 1) / floor))`.
    fn scale(&self, b: &mut Builder, q: ValueId, tokens: u64) -> Block {
        let g = &mut b.graph;
        let position = array::iota(g, &[tokens, 1], 0, DType::F32)?;
        let counted = array::with_number(g, Binary::Add, position, 1.0)?;
        let steps = array::with_number(g, Binary::Divide, counted, self.floor)?;
        let steps = array::unary(g, Unary::Floor, steps)?;
        let growth = array::unary(g, Unary::LogPlusOne, steps)?;
        let growth = array::with_number(g, Binary::Multiply, growth, self.scale)?;
        let factor = array::with_number(g, Binary::Add, growth, 1.0)?;
        let factor = array::convert(g, factor, g.ty(q).dtype)?;
        Ok(array::binary(g, Binary::Multiply, q, factor)?)
    }
}

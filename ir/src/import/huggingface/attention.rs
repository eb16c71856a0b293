//! Attention as decoders and encoders have it: heads of one matrix, grouped keys, rotary positions, windows.

use super::blocks::{Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use super::rope::Angles;
use crate::array::{self, Attention};
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction};

/// `[B, S, heads * width]` as `[B, heads, S, width]`.
pub fn split_heads(g: &mut Graph, x: ValueId, heads: u64) -> array::Built {
    let [b, s, features] = g.shape(x)[..] else {
        return Err(array::ShapeError::Attribute("heads are taken from three dimensions"));
    };
    let x = array::reshape(g, x, &[b, s, heads, features / heads.max(1)])?;
    array::permute(g, x, &[0, 2, 1, 3])
}

/// The inverse of [`split_heads`].
pub fn merge_heads(g: &mut Graph, x: ValueId) -> array::Built {
    let [b, heads, s, width] = g.shape(x)[..] else {
        return Err(array::ShapeError::Attribute("heads are four dimensions"));
    };
    let x = array::permute(g, x, &[0, 2, 1, 3])?;
    array::reshape(g, x, &[b, s, heads * width])
}

/// Each of so many tokens sees those before it and itself, with a window only the last so many.
pub fn causal(b: &mut Builder, tokens: u64, window: Option<u64>) -> Result<Attention, ConfigError> {
    match window.filter(|&window| window < tokens) {
        None => Ok(Attention { causal: true, ..Attention::default() }),
        Some(window) => {
            let mask = window_mask(&mut b.graph, tokens, window)?;
            Ok(Attention { mask: Some(mask), ..Attention::default() })
        }
    }
}

/// `[S, S]` booleans: query `s` sees keys `s - window + 1 ..= s`.
fn window_mask(g: &mut Graph, tokens: u64, window: u64) -> array::Built {
    let query = array::iota(g, &[tokens, tokens], 0, DType::I32)?;
    let key = array::iota(g, &[tokens, tokens], 1, DType::I32)?;
    let distance = array::binary(g, Binary::Subtract, query, key)?;
    let (zero, window) = (array::full_like(g, distance, 0.0)?, array::full_like(g, distance, window as f64)?);
    let behind = array::compare(g, Direction::Ge, distance, zero)?;
    let near = array::compare(g, Direction::Lt, distance, window)?;
    array::binary(g, Binary::And, behind, near)
}

/// Self-attention of a decoder with four matrices, of which those of keys and values may have fewer heads.
#[derive(Clone, Debug)]
pub struct GroupedAttention {
    pub heads: u64,
    pub kv_heads: u64,
    pub head_width: u64,
    /// Whether q, k and v have biases, and o.
    pub bias: (bool, bool),
    /// Epsilon of the norms of queries and keys within each head, where there are any.
    pub qk_norm: Option<f64>,
    /// How many tokens each sees at most.
    pub window: Option<u64>,
    /// How much of each head rotary positions turn, where it is not all.
    pub turned: Option<u64>,
}

impl GroupedAttention {
    /// The sizes, which families name alike.
    pub fn read(fields: &Fields<'_>) -> Result<GroupedAttention, ConfigError> {
        let heads = fields.size("num_attention_heads")?;
        let kv_heads = fields.size_or("num_key_value_heads", heads)?;
        fields.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
        let head_width = match fields.optional_size("head_dim")? {
            Some(width) => width,
            None => fields.part("hidden_size", "num_attention_heads")?,
        };
        Ok(GroupedAttention {
            heads,
            kv_heads,
            head_width,
            bias: (false, false),
            qk_norm: None,
            window: None,
            turned: None,
        })
    }

    /// `x` is `[B, S, hidden]`.
    pub fn build(&self, b: &mut Builder, x: ValueId, angles: &Angles) -> Block {
        let (tokens, hidden) = (b.graph.shape(x)[1], b.graph.shape(x)[2]);
        let mut projected = |name: &str, heads: u64| {
            let y = b.linear(name, x, heads * self.head_width, self.bias.0)?;
            Ok::<_, ConfigError>(split_heads(&mut b.graph, y, heads)?)
        };
        let mut q = projected("q_proj", self.heads)?;
        let mut k = projected("k_proj", self.kv_heads)?;
        let v = projected("v_proj", self.kv_heads)?;
        if let Some(eps) = self.qk_norm {
            (q, k) = (b.rms_norm("q_norm", q, eps)?, b.rms_norm("k_norm", k, eps)?);
        }
        let (q, k) = (self.turn(b, q, angles)?, self.turn(b, k, angles)?);
        let how = causal(b, tokens, self.window)?;
        let mixed = array::attention(&mut b.graph, q, k, v, &how)?;
        let merged = merge_heads(&mut b.graph, mixed)?;
        b.linear("o_proj", merged, hidden, self.bias.1)
    }

    /// Turns `[B, heads, S, width]`, or the first part of each head.
    fn turn(&self, b: &mut Builder, x: ValueId, angles: &Angles) -> Block {
        let Some(turned) = self.turned else { return angles.turn(b, x) };
        let first = array::slice_dim(&mut b.graph, x, 3, 0, turned as i64, 1)?;
        let rest = array::slice_dim(&mut b.graph, x, 3, turned as i64, self.head_width as i64, 1)?;
        let first = angles.turn(b, first)?;
        Ok(array::concat(&mut b.graph, &[first, rest], 3)?)
    }
}

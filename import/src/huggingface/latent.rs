//! Latent attention (DeepSeek-AI 2024). The keys and values of all heads come from one narrow vector per token. Each
//! query and key has a part with positions beside the rest.

use super::attention::{merge_heads, split_heads};
use super::blocks::{Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use super::rope::Angles;
use altiplano_ir::array::{self, Attention};
use altiplano_ir::graph::ValueId;

/// The sizes of latent attention. The queries and keys of a head have a part with positions and one without.
#[derive(Clone, Debug)]
pub(crate) struct Latent {
    heads: u64,
    /// The width of the latent queries, if there are any.
    q_rank: Option<u64>,
    kv_rank: u64,
    plain: u64,
    pub turned: u64,
    value: u64,
    pub scale: f64,
    eps: f64,
    bias: bool,
}

impl Latent {
    pub(crate) fn read(fields: &Fields<'_>, eps: f64) -> Result<Latent, ConfigError> {
        let (plain, turned) = (fields.size_or("qk_nope_head_dim", 128)?, fields.size_or("qk_rope_head_dim", 64)?);
        let no_rank = fields.is_null("q_lora_rank");
        Ok(Latent {
            heads: fields.main_size("num_attention_heads", 128)?,
            q_rank: fields.optional_size("q_lora_rank")?.or((!no_rank).then_some(1536)),
            kv_rank: fields.size_or("kv_lora_rank", 512)?,
            plain,
            turned,
            value: fields.size_or("v_head_dim", 128)?,
            scale: 1.0 / ((plain + turned) as f64).sqrt(),
            eps,
            bias: fields.flag_or("attention_bias", false)?,
        })
    }

    pub(crate) fn build(&self, b: &mut Builder, x: ValueId, angles: &Angles) -> Block {
        let [batch, tokens, hidden] = b.graph.shape(x)[..] else {
            return Err(array::ShapeError::Attribute("attention takes three dimensions").into());
        };
        let width = self.heads * (self.plain + self.turned);
        let q = match self.q_rank {
            None => b.linear("q_proj", x, width, false)?,
            Some(rank) => {
                let low = b.linear("q_a_proj", x, rank, self.bias)?;
                let low = b.rms_norm("q_a_layernorm", low, self.eps)?;
                b.linear("q_b_proj", low, width, false)?
            }
        };
        let q = split_heads(&mut b.graph, q, self.heads)?;
        let q = array::split(&mut b.graph, q, 3, &[self.plain, self.turned])?;

        let low = b.linear("kv_a_proj_with_mqa", x, self.kv_rank + self.turned, self.bias)?;
        let low = array::split(&mut b.graph, low, 2, &[self.kv_rank, self.turned])?;
        let latent = b.rms_norm("kv_a_layernorm", low[0], self.eps)?;
        let kv = b.linear("kv_b_proj", latent, self.heads * (self.plain + self.value), false)?;
        let kv = split_heads(&mut b.graph, kv, self.heads)?;
        let kv = array::split(&mut b.graph, kv, 3, &[self.plain, self.value])?;

        // All heads share the part of the keys with positions.
        let shared = array::unsqueeze(&mut b.graph, low[1], 1)?;
        let (q_turned, k_turned) = (angles.turn(b, q[1])?, angles.turn(b, shared)?);
        let g = &mut b.graph;
        let k_turned = array::broadcast_to(g, k_turned, &[batch, self.heads, tokens, self.turned])?;
        let q = array::concat(g, &[q[0], q_turned], 3)?;
        let k = array::concat(g, &[kv[0], k_turned], 3)?;
        let how = Attention { scale: Some(self.scale), causal: true, mask: None };
        let mixed = array::attention(g, q, k, kv[1], &how)?;
        let merged = merge_heads(g, mixed)?;
        b.linear("o_proj", merged, hidden, self.bias)
    }
}

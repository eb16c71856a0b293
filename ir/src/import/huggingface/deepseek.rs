//! DeepSeek-V3 (DeepSeek-AI 2024): latent attention, and experts in groups beside shared ones. The layer that predicts
//! tokens further ahead in the published checkpoint is no part of it, as in Transformers.

use super::attention::{merge_heads, split_heads};
use super::blocks::{Activation, Block, Builder};
use super::config::Fields;
use super::decoder::causal_model;
use super::error::ConfigError;
use super::moe::{self, Experts};
use super::rope::{Angles, Rope, sharpness};
use crate::array::{self, Attention, RotaryHalves};
use crate::dtype::DType;
use crate::graph::ValueId;

/// Sizes of latent attention: queries and keys of a head have a part with positions and one without.
struct Latent {
    heads: u64,
    /// Width of the latent queries, where there are any.
    q_rank: Option<u64>,
    kv_rank: u64,
    plain: u64,
    turned: u64,
    value: u64,
    scale: f64,
    eps: f64,
    bias: bool,
}

struct Router {
    experts: Experts,
    groups: u64,
    chosen_groups: u64,
    normalise: bool,
    scale: f64,
    /// Width of the perceptron that every token goes through as well.
    shared: u64,
}

pub fn build(fields: &Fields<'_>, b: &mut Builder) -> Result<(), ConfigError> {
    fields.ignore(&["head_dim", "num_key_value_heads", "qk_head_dim"]);
    let layers = fields.layers("num_hidden_layers")?;
    let eps = fields.positive_or("rms_norm_eps", 1e-6)?;
    let latent = Latent::read(fields, eps)?;
    let rope = Rope::read(fields, "qk_rope_head_dim", latent.turned)?;
    // Scores are sharpened by the square, once for queries and once for keys.
    let sharper = rope.stretch.filter(|(_, all)| *all != 0.0).map_or(1.0, |(factor, all)| sharpness(factor, all));
    let latent = Latent { scale: latent.scale * sharper * sharper, ..latent };
    let dense_layers = fields.count_or("first_k_dense_replace", 0)?;
    let width = fields.size("intermediate_size")?;
    let activation = Activation::read(fields, "hidden_act", "silu")?;
    let router = if dense_layers < layers { Some(Router::read(fields, activation)?) } else { None };
    // Pairs lie as the original has them unless the config says that the matrices were permuted.
    let interleaved = fields.flag_or("rope_interleave", true)?;
    let halves = if interleaved { RotaryHalves::Interleaved } else { RotaryHalves::Split };

    b.without_dropout(fields, &["attention_dropout"])?;
    causal_model(fields, b, &rope, halves, layers, |b, index, x, angles| {
        let normed = b.rms_norm("input_layernorm", x, eps)?;
        let mixed = b.within("self_attn", |b| latent.build(b, normed, angles))?;
        let x = b.add(x, mixed)?;
        let normed = b.rms_norm("post_attention_layernorm", x, eps)?;
        let made = b.within("mlp", |b| match &router {
            Some(router) if index as u64 >= dense_layers => router.build(b, normed),
            _ => b.gated_mlp(normed, width, activation, false),
        })?;
        b.add(x, made)
    })
}

impl Latent {
    fn read(fields: &Fields<'_>, eps: f64) -> Result<Latent, ConfigError> {
        let (plain, turned) = (fields.size("qk_nope_head_dim")?, fields.size("qk_rope_head_dim")?);
        Ok(Latent {
            heads: fields.size("num_attention_heads")?,
            q_rank: fields.optional_size("q_lora_rank")?,
            kv_rank: fields.size("kv_lora_rank")?,
            plain,
            turned,
            value: fields.size("v_head_dim")?,
            scale: 1.0 / ((plain + turned) as f64).sqrt(),
            eps,
            bias: fields.flag_or("attention_bias", false)?,
        })
    }

    fn build(&self, b: &mut Builder, x: ValueId, angles: &Angles) -> Block {
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

        // All heads share the part of the keys that has positions.
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

impl Router {
    fn read(fields: &Fields<'_>, activation: Activation) -> Result<Router, ConfigError> {
        let (count, chosen) = (fields.size("n_routed_experts")?, fields.size("num_experts_per_tok")?);
        let (groups, chosen_groups) = (fields.size_or("n_group", 1)?, fields.size_or("topk_group", 1)?);
        fields.divides("n_routed_experts", count, "n_group", groups)?;
        fields.at_most("topk_group", chosen_groups, "n_group", groups)?;
        fields.at_most("num_experts_per_tok", chosen, "n_routed_experts", count / groups * chosen_groups)?;
        let width = fields.size("moe_intermediate_size")?;
        Ok(Router {
            experts: Experts { count, chosen, width, activation },
            groups,
            chosen_groups,
            normalise: fields.flag_or("norm_topk_prob", true)?,
            scale: fields.positive_or("routed_scaling_factor", 1.0)?,
            shared: width * fields.count_or("n_shared_experts", 0)?,
        })
    }

    /// Experts are chosen by a sigmoid of their scores plus a bias that balances their load, among the groups whose best
    /// two are best; gates are the scores without the bias.
    fn build(&self, b: &mut Builder, x: ValueId) -> Block {
        let experts = &self.experts;
        let logits = moe::router_logits(b, x, experts.count)?;
        let bias = b.within("gate", |b| b.buffer("e_score_correction_bias", &[experts.count], DType::F32))?;
        let g = &mut b.graph;
        let bias = g.convert(bias, g.ty(logits).dtype);
        let scores = array::sigmoid(g, logits)?;
        let balanced = array::binary(g, crate::op::Binary::Add, scores, bias)?;
        let allowed = if self.groups > 1 { self.in_best_groups(g, balanced)? } else { balanced };
        let chosen = array::among_greatest(g, allowed, 2, experts.chosen)?;
        let mut gates = moe::where_chosen(g, chosen, scores)?;
        if self.normalise {
            gates = moe::normalised(g, gates, 1e-20)?;
        }
        let gates = array::with_number(g, crate::op::Binary::Multiply, gates, self.scale)?;
        let routed = experts.build(b, x, gates, chosen)?;
        if self.shared == 0 {
            return Ok(routed);
        }
        let shared = b.within("shared_experts", |b| b.gated_mlp(x, self.shared, experts.activation, false))?;
        b.add(routed, shared)
    }

    /// The scores of experts whose group is among the best, and minus infinity for others.
    fn in_best_groups(&self, g: &mut crate::graph::Graph, scores: ValueId) -> array::Built {
        let shape = g.shape(scores).to_vec();
        let [batch, tokens, count] = shape[..] else {
            return Err(array::ShapeError::Attribute("routing takes three dimensions"));
        };
        let each = count / self.groups;
        let grouped = array::reshape(g, scores, &[batch, tokens, self.groups, each])?;
        let best = array::among_greatest(g, grouped, 3, each.min(2))?;
        let best = moe::where_chosen(g, best, grouped)?;
        let of_group = array::sum(g, best, &[3], false)?;
        let kept = array::among_greatest(g, of_group, 2, self.chosen_groups)?;
        let kept = array::unsqueeze(g, kept, 3)?;
        let never = array::full_like(g, grouped, f64::NEG_INFINITY)?;
        let allowed = array::select(g, kept, grouped, never)?;
        array::reshape(g, allowed, &shape)
    }
}

//! Rotary positions (Su et al. 2021) and the ways in which configs stretch them to longer contexts.

use super::blocks::{Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use crate::array::{self, RotaryHalves};
use crate::dtype::DType;
use crate::graph::ValueId;
use crate::literal::Literal;
use crate::op::{Binary, Unary};
use crate::types::TensorType;
use std::f64::consts::TAU;

/// The most frequencies, which are constants of the graph.
const MAX_FREQUENCIES: u64 = 1 << 15;

const KINDS: &[&str] = &["default", "linear", "dynamic", "llama3", "yarn"];

/// Angles a position, and a factor of the cosines and sines.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians a position for each pair of a head.
    pub frequencies: Vec<f64>,
    /// What the cosines and sines are scaled by.
    pub attention_factor: f64,
    /// `factor` and `mscale_all_dim` of yarn, with which DeepSeek scales its scores too.
    pub stretch: Option<(f64, f64)>,
}

impl Rope {
    /// Reads `rope_theta` and `rope_scaling`, or `rope_parameters` as newer configs have them, for heads of `width`.
    pub fn read(fields: &Fields<'_>, key: &str, width: u64) -> Result<Rope, ConfigError> {
        fields.divides(key, width, "a pair", 2)?;
        fields.at_most(key, width, "what rotary positions are made for", 2 * MAX_FREQUENCIES)?;
        let new = fields.object("rope_parameters")?;
        let old = fields.object("rope_scaling")?;
        let theta = fields.positive_or("rope_theta", 10_000.0)?;
        let theta = match &new {
            Some(new) => new.positive_or("rope_theta", theta)?,
            None => theta,
        };
        let inverse: Vec<f64> = (0..width / 2).map(|i| 1.0 / libm::pow(theta, (2 * i) as f64 / width as f64)).collect();
        let plain = Rope { frequencies: inverse, attention_factor: 1.0, stretch: None };
        let Some(scaling) = new.or(old) else { return Ok(plain) };
        let kind_key = if scaling.has("rope_type") { "rope_type" } else { "type" };
        match scaling.word_or(kind_key, "default")?.as_str() {
            // The dynamic kind changes frequencies only beyond the positions that the model is made for.
            "default" | "dynamic" => Ok(plain),
            "linear" => {
                let factor = scaling.positive("factor")?;
                Ok(Rope { frequencies: plain.frequencies.iter().map(|f| f / factor).collect(), ..plain })
            }
            "llama3" => llama3(plain, &scaling),
            "yarn" => yarn(plain, theta, fields, &scaling),
            _ => Err(scaling.unsupported(kind_key, KINDS)),
        }
    }

    /// Cosines and sines of `[positions, width]` for pairs of halves, `[positions, width / 2]` for interleaved ones.
    pub fn angles(&self, b: &mut Builder, positions: u64, halves: RotaryHalves) -> Result<Angles, ConfigError> {
        b.within("rotary_emb", |b| {
            let (dtype, g) = (b.dtype, &mut b.graph);
            let ty = TensorType::new(DType::F32, [self.frequencies.len() as u64]);
            let rounded = self.frequencies.iter().map(|&f| DType::F32.round(f)).collect();
            let frequencies = g.constant(Literal::dense(ty, rounded));
            let position = array::iota(g, &[positions, 1], 0, DType::F32)?;
            let mut angles = array::binary(g, Binary::Multiply, position, frequencies)?;
            if halves == RotaryHalves::Split {
                angles = array::concat(g, &[angles, angles], 1)?;
            }
            let mut wave = |op| {
                let mut wave = array::unary(g, op, angles)?;
                if self.attention_factor != 1.0 {
                    wave = array::with_number(g, Binary::Multiply, wave, self.attention_factor)?;
                }
                array::convert(g, wave, dtype)
            };
            Ok(Angles { cosine: wave(Unary::Cosine)?, sine: wave(Unary::Sine)?, halves })
        })
    }
}

/// What turns queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct Angles {
    cosine: ValueId,
    sine: ValueId,
    halves: RotaryHalves,
}

impl Angles {
    /// `x` of `[.., positions, width]` turned.
    pub fn turn(&self, b: &mut Builder, x: ValueId) -> Block {
        Ok(array::rotary(&mut b.graph, x, self.cosine, self.sine, self.halves)?)
    }
}

/// Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1, model card and code).
fn llama3(plain: Rope, scaling: &Fields<'_>) -> Result<Rope, ConfigError> {
    let factor = scaling.positive("factor")?;
    let low = scaling.positive_or("low_freq_factor", 1.0)?;
    let high = scaling.positive_or("high_freq_factor", 4.0)?;
    let context = scaling.size("original_max_position_embeddings")? as f64;
    let stretched = |f: f64| {
        let turns = context * f / TAU;
        if turns < low {
            f / factor
        } else if turns > high {
            f
        } else {
            let kept = (turns - low) / (high - low);
            (1.0 - kept) * f / factor + kept * f
        }
    };
    Ok(Rope { frequencies: plain.frequencies.iter().map(|&f| stretched(f)).collect(), ..plain })
}

/// Peng et al. 2023: frequencies that turn often within the original context are kept, those that turn rarely are
/// stretched, with a linear ramp over the pairs between, and the attention is sharpened by `0.1 ln(factor) + 1`.
fn yarn(plain: Rope, theta: f64, fields: &Fields<'_>, scaling: &Fields<'_>) -> Result<Rope, ConfigError> {
    let factor = scaling.positive("factor")?;
    let context = match scaling.optional_size("original_max_position_embeddings")? {
        Some(context) => context,
        None => fields.size("max_position_embeddings")?,
    } as f64;
    let (fast, slow) = (scaling.positive_or("beta_fast", 32.0)?, scaling.positive_or("beta_slow", 1.0)?);
    let (mscale, all) = (scaling.number_or("mscale", 0.0)?, scaling.number_or("mscale_all_dim", 0.0)?);
    let relative = mscale != 0.0 && all != 0.0;
    let usual = if relative { sharpness(factor, mscale) / sharpness(factor, all) } else { sharpness(factor, 1.0) };
    let attention_factor = scaling.positive_or("attention_factor", usual)?;
    let pairs = plain.frequencies.len();
    let width = 2.0 * pairs as f64;
    // The pair whose wave turns so many times within the context.
    let pair = |turns: f64| width * libm::log(context / (turns * TAU)) / (2.0 * libm::log(theta));
    let (mut first, mut last) = (pair(fast), pair(slow));
    if scaling.flag_or("truncate", true)? {
        (first, last) = (first.floor(), last.ceil());
    }
    let (first, mut last) = (first.max(0.0), last.min(width - 1.0));
    if first == last {
        last += 0.001;
    }
    let blended = |(i, &f): (usize, &f64)| {
        let stretched = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
        f / factor * stretched + f * (1.0 - stretched)
    };
    let frequencies = plain.frequencies.iter().enumerate().map(blended).collect();
    Ok(Rope { frequencies, attention_factor, stretch: Some((factor, all)) })
}

/// How much sharper attention over a context that is `factor` times as long should be.
pub fn sharpness(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * libm::log(factor) + 1.0 }
}

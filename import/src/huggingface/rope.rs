//! Rotary positions (Su et al. 2021), and their stretching to longer contexts in configs.

use super::blocks::{Block, Builder};
use super::config::Fields;
use super::error::ConfigError;
use altiplano_ir::array::{self, RotaryHalves};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Binary, Unary};
use altiplano_ir::types::TensorType;
use std::f64::consts::TAU;

/// The largest number of frequencies, which are constants of the graph.
const MAX_FREQUENCIES: u64 = 1 << 15;

const KINDS: &[&str] = &["default", "linear", "dynamic", "llama3", "longrope", "yarn"];

/// The angles per position, and a factor of the cosines and sines.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rope {
    /// The radians per position for each pair of a head.
    pub frequencies: Vec<f64>,
    /// The factor of the cosines and sines.
    pub attention_factor: f64,
    /// `factor` and `mscale_all_dim` of yarn, with which DeepSeek scales its scores too.
    pub stretch: Option<(f64, f64)>,
    /// The frequencies for sequences of more than this many tokens.
    pub longer: Option<(u64, Vec<f64>)>,
}

impl Rope {
    /// Frequencies that are powers of `theta`, for heads of `width`.
    pub(crate) fn plain(fields: &Fields<'_>, key: &str, width: u64, theta: f64) -> Result<Rope, ConfigError> {
        fields.divides(key, width, "a pair", 2)?;
        fields.at_most(key, width, "what rotary positions are made for", 2 * MAX_FREQUENCIES)?;
        let frequencies = (0..width / 2).map(|i| 1.0 / libm::pow(theta, (2 * i) as f64 / width as f64)).collect();
        Ok(Rope { frequencies, attention_factor: 1.0, stretch: None, longer: None })
    }

    /// Reads `rope_theta` and `rope_scaling`, or `rope_parameters` of newer configs, for heads of `width`. `theta` and
    /// `partial` are defaults.
    pub(crate) fn read_part(
        fields: &Fields<'_>,
        key: &str,
        width: u64,
        theta: f64,
        partial: f64,
    ) -> Result<(Rope, Option<u64>), ConfigError> {
        let new = fields.object("rope_parameters")?;
        let scaling = match fields.object("rope_scaling")? {
            Some(old) if new.is_none() => Some(old),
            _ => new,
        };
        let theta = fields.positive_or("rope_theta", theta)?;
        let partial = fields.positive_or("partial_rotary_factor", partial)?;
        Rope::of(fields, scaling.as_ref(), key, width, theta, partial)
    }

    /// The same with `scaling` as the object that describes the stretching. Also returns the rotated width of a head,
    /// if it is not all.
    pub(crate) fn of(
        fields: &Fields<'_>,
        scaling: Option<&Fields<'_>>,
        key: &str,
        width: u64,
        theta: f64,
        partial: f64,
    ) -> Result<(Rope, Option<u64>), ConfigError> {
        let (theta, partial) = match scaling {
            Some(s) => (s.positive_or("rope_theta", theta)?, s.positive_or("partial_rotary_factor", partial)?),
            None => (theta, partial),
        };
        let turned = ((width as f64 * partial) as u64).clamp(1, width);
        let part = Some(turned).filter(|turned| *turned < width);
        let plain = Rope::plain(fields, key, turned, theta)?;
        let Some(scaling) = scaling else { return Ok((plain, part)) };
        let kind_key = if scaling.has("rope_type") { "rope_type" } else { "type" };
        let rope = match scaling.word_or(kind_key, "default")?.as_str() {
            // The dynamic kind changes frequencies only beyond the model's number of positions. The kind `mrope`
            // concerns positions in images, of which there are none.
            "default" | "dynamic" | "mrope" => plain,
            "linear" => {
                let factor = scaling.positive("factor")?;
                Rope { frequencies: plain.frequencies.iter().map(|f| f / factor).collect(), ..plain }
            }
            "llama3" => llama3(plain, fields, scaling)?,
            "longrope" | "su" => longrope(plain, fields, scaling)?,
            "yarn" => yarn(plain, theta, fields, scaling)?,
            _ => return Err(scaling.unsupported(kind_key, KINDS)),
        };
        Ok((rope, part))
    }

    /// The cosines and sines: `[positions, width]` for pairs of halves, `[positions, width / 2]` for interleaved ones.
    pub(crate) fn angles(&self, b: &mut Builder, positions: u64, halves: RotaryHalves) -> Result<Angles, ConfigError> {
        b.within("rotary_emb", |b| {
            let (dtype, g) = (b.dtype, &mut b.graph);
            let frequencies = match &self.longer {
                Some((limit, longer)) if positions > *limit => longer,
                _ => &self.frequencies,
            };
            let ty = TensorType::new(DType::F32, [frequencies.len() as u64]);
            let rounded = frequencies.iter().map(|&f| DType::F32.round(f)).collect();
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

/// The cosines and sines that rotate queries and keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Angles {
    cosine: ValueId,
    sine: ValueId,
    halves: RotaryHalves,
}

impl Angles {
    /// Rotates `x` of `[.., positions, width]`.
    pub(crate) fn turn(&self, b: &mut Builder, x: ValueId) -> Block {
        Ok(array::rotary(&mut b.graph, x, self.cosine, self.sine, self.halves)?)
    }
}

/// Stretches long waves by the factor, keeps short ones, and blends those in between (Llama 3.1, model card and code).
fn llama3(plain: Rope, fields: &Fields<'_>, scaling: &Fields<'_>) -> Result<Rope, ConfigError> {
    let factor = scaling.positive("factor")?;
    let low = scaling.positive_or("low_freq_factor", 1.0)?;
    let high = scaling.positive_or("high_freq_factor", 4.0)?;
    let context = original_positions(fields, scaling)? as f64;
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

/// YaRN (Peng et al. 2023). Frequencies with many turns within the original context are kept, and those with few are
/// stretched. Pairs in between follow a linear ramp. Attention is sharpened by `0.1 ln(factor) + 1`.
fn yarn(plain: Rope, theta: f64, fields: &Fields<'_>, scaling: &Fields<'_>) -> Result<Rope, ConfigError> {
    let factor = scaling.positive("factor")?;
    let context = original_positions(fields, scaling)? as f64;
    let (fast, slow) = (scaling.positive_or("beta_fast", 32.0)?, scaling.positive_or("beta_slow", 1.0)?);
    let (mscale, all) = (scaling.number_or("mscale", 0.0)?, scaling.number_or("mscale_all_dim", 0.0)?);
    let relative = mscale != 0.0 && all != 0.0;
    let usual = if relative { sharpness(factor, mscale) / sharpness(factor, all) } else { sharpness(factor, 1.0) };
    let attention_factor = scaling.positive_or("attention_factor", usual)?;
    let pairs = plain.frequencies.len();
    let width = 2.0 * pairs as f64;
    // The pair whose wave turns this many times within the context.
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
    Ok(Rope { frequencies, attention_factor, stretch: Some((factor, all)), longer: None })
}

/// LongRoPE (Ding et al. 2024). Each frequency has one factor for contexts of the original length, and another beyond.
fn longrope(plain: Rope, fields: &Fields<'_>, scaling: &Fields<'_>) -> Result<Rope, ConfigError> {
    let context = original_positions(fields, scaling)?;
    let stretched = |key: &str| {
        let factors = scaling.numbers(key)?.unwrap_or_default();
        let fits = factors.len() == plain.frequencies.len() && factors.iter().all(|f| *f > 0.0 && f.is_finite());
        let expected = || format!("{} numbers above 0", plain.frequencies.len());
        let factors = Some(factors).filter(|_| fits).ok_or_else(|| scaling.expected(key, expected()))?;
        Ok::<Vec<f64>, ConfigError>(plain.frequencies.iter().zip(factors).map(|(f, factor)| f / factor).collect())
    };
    let positions = fields.size_or("max_position_embeddings", context)?;
    let factor = scaling.positive_or("factor", positions as f64 / context as f64)?;
    let usual = match factor > 1.0 {
        true => (1.0 + libm::log(factor) / libm::log(context as f64)).sqrt(),
        false => 1.0,
    };
    let attention_factor = scaling.positive_or("attention_factor", usual)?;
    let longer = Some((context, stretched("long_factor")?));
    Ok(Rope { frequencies: stretched("short_factor")?, attention_factor, stretch: None, longer })
}

/// The number of positions of a model before its angles were stretched.
fn original_positions(fields: &Fields<'_>, scaling: &Fields<'_>) -> Result<u64, ConfigError> {
    let key = "original_max_position_embeddings";
    match fields.optional_size(key)?.or(scaling.optional_size(key)?) {
        Some(positions) => Ok(positions),
        None => fields.size("max_position_embeddings"),
    }
}

/// The sharpening of attention for a context that is `factor` times as long.
pub(crate) fn sharpness(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * libm::log(factor) + 1.0 }
}

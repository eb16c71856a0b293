//! Options of the learning-rate schedule.

use altiplano::Error;
use altiplano::training::rate::{RateSchedule, Shape};
use clap::{Args, ValueEnum};

/// The learning-rate schedule; --lr is its peak.
#[derive(Args, Clone, Debug)]
pub(crate) struct Rate {
    /// Decay of the learning rate after the warm-up
    #[arg(long, value_name = "SHAPE", value_enum, default_value_t = ShapeName::Constant)]
    lr_schedule: ShapeName,
    /// Steps of the warm-up to --lr
    #[arg(long, value_name = "N", default_value_t = 0)]
    lr_warmup: u64,
    /// The step that reaches --lr-final [default: --steps]
    #[arg(long, value_name = "N")]
    lr_steps: Option<u64>,
    /// Final learning rate
    #[arg(long, value_name = "X", value_parser = not_negative, default_value_t = 0.0)]
    lr_final: f64,
    /// Steps between two drops of `step`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    lr_every: Option<u64>,
    /// Factor of each drop of `step`
    #[arg(long, value_name = "X", value_parser = not_negative, default_value_t = 0.1)]
    lr_factor: f64,
    /// Exponent of `polynomial`
    #[arg(long, value_name = "X", value_parser = not_negative, default_value_t = 2.0)]
    lr_power: f64,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum ShapeName {
    Constant,
    Linear,
    Step,
    Exponential,
    Polynomial,
    Cosine,
    Inverse,
    InverseSqrt,
}

impl Rate {
    /// The schedule for a run of `steps` steps.
    pub(crate) fn schedule(&self, steps: u64) -> Result<RateSchedule, Error> {
        let shape = match self.lr_schedule {
            ShapeName::Constant => Shape::Constant,
            ShapeName::Linear => Shape::Linear,
            ShapeName::Step => Shape::Step,
            ShapeName::Exponential => Shape::Exponential,
            ShapeName::Polynomial => Shape::Polynomial,
            ShapeName::Cosine => Shape::Cosine,
            ShapeName::Inverse => Shape::Inverse,
            ShapeName::InverseSqrt => Shape::InverseSqrt,
        };
        if shape == Shape::Exponential && self.lr_final <= 0.0 {
            let problem = "an exponential never falls to 0: give the rate that it reaches at --lr-steps";
            return Err(Error::Option { option: "--lr-final", problem });
        }
        if shape == Shape::Step && self.lr_every.is_none() {
            let problem = "is required: it gives the steps between two drops of `step`";
            return Err(Error::Option { option: "--lr-every", problem });
        }
        Ok(RateSchedule {
            shape,
            warmup_steps: self.lr_warmup,
            total_steps: self.lr_steps.unwrap_or(steps),
            final_rate: self.lr_final,
            every: self.lr_every.unwrap_or(1),
            factor: self.lr_factor,
            power: self.lr_power,
        })
    }
}

fn not_negative(text: &str) -> Result<f64, &'static str> {
    let number: f64 = text.parse().map_err(|_| "expected a number")?;
    if number.is_finite() && number >= 0.0 { Ok(number) } else { Err("expected a finite number, 0 or more") }
}

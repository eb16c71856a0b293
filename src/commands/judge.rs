//! `altiplano judge CONFIG`: predicts a configuration that people run today, and the changes that would help.

use crate::commands::options::ModelOptions;
use crate::commands::{say, warn};
use altiplano::Error;
use altiplano::compare::duration;
use altiplano::ir::optimizer::Optimizer;
use altiplano::ir::recompute::Recompute;
use altiplano::stacks::judge::{How, judge};
use altiplano::stacks::{STACKS, Stack};
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// Predict a configuration of Megatron, DeepSpeed, torchtitan and the like, and the changes of its knobs that help
#[derive(Args)]
pub(crate) struct Judge {
    /// A configuration as people have it: a script or command line with options, YAML, JSON, TOML, or a Python recipe
    #[arg(value_name = "CONFIG")]
    config: PathBuf,
    /// The model: a file as `altiplano plan` takes it [default: as the configuration's options describe it]
    #[arg(long, value_name = "MODEL", help_heading = "Model")]
    model: Option<PathBuf>,
    #[command(flatten)]
    options: ModelOptions,
    /// A preset with a count or a TOML file [default: DGX H100 with the devices that the configuration states]
    #[arg(long, value_name = "CLUSTER", help_heading = "Cluster and batch")]
    cluster: Option<String>,
    /// The software of the configuration [default: by the knobs in it]
    #[arg(long, value_parser = PossibleValuesParser::new(STACKS.map(|stack| stack.name)))]
    stack: Option<String>,
    /// Samples per step, in place of what the configuration says
    #[arg(long, value_name = "N", help_heading = "Cluster and batch")]
    global_batch: Option<u64>,
    /// Samples per microbatch and replica, in place of what the configuration says
    #[arg(long, value_name = "N", help_heading = "Cluster and batch")]
    micro_batch_size: Option<u64>,
    /// Recomputation by the model's code, in place of what the configuration says
    #[arg(long, value_enum, help_heading = "Memory")]
    recompute: Option<Level>,
    /// Optimizer, in place of what the configuration says [default: adamw]
    #[arg(long, value_parser = PossibleValuesParser::new(Optimizer::NAMES))]
    optimizer: Option<String>,
    /// Measured step time of the configuration (5.3s, 830ms), which corrects all others
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    measured: Option<f64>,
    /// Seconds for trying several changes together; results then depend on the machine
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    within: f64,
    /// Print JSON (docs/judgement.schema.json)
    #[arg(long)]
    json: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Level {
    None,
    /// The core of attention, or every second product where the software does so
    Selective,
    /// All layers
    Full,
}

fn seconds(text: &str) -> Result<f64, &'static str> {
    let value: f64 = text.parse().map_err(|_| "expected a number")?;
    if (0.0..=1e9).contains(&value) { Ok(value) } else { Err("expected a number from 0 to 1e9") }
}

impl Judge {
    pub(crate) fn run(self) -> Result<(), Error> {
        let how = How {
            stack: self.stack.as_deref().and_then(Stack::named),
            model: self.model,
            import: self.options.import(),
            cluster: self.cluster,
            micro_batch: self.micro_batch_size,
            global_batch: self.global_batch,
            recompute: self.recompute.map(|level| match level {
                Level::None => Recompute::None,
                Level::Selective => Recompute::Selective,
                Level::Full => Recompute::Full,
            }),
            fused_attention: None,
            optimizer: self.optimizer,
            only_predict: false,
            within: Duration::from_secs_f64(self.within),
        };
        let judgement = judge(&self.config, &how)?;
        if self.json {
            say(format!("{:#}", judgement.json(self.measured)))?;
        } else {
            say(judgement.text(self.measured))?;
        }
        warn(&judgement.warnings);
        Ok(())
    }
}

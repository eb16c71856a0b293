//! `altiplano clusters`: lists the presets.

use crate::commands::say;
use altiplano::Error;
use altiplano::cost_models::presets;
use clap::Args;

/// List the cluster presets
#[derive(Args)]
pub(crate) struct Clusters {}

impl Clusters {
    pub(crate) fn run(self) -> Result<(), Error> {
        let presets = presets();
        let width = presets.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, description) in presets {
            say(format!("{name:width$}  {description}"))?;
        }
        say(
            "\nNAME:N takes N nodes (local:N: N workers), NAME:1/n the first n devices of one node;\n8xA100-80 is a node of eight devices with its usual links, 4x8xA100-80 four of them;\n`altiplano probe` describes this machine, `altiplano show NAME:N` prints one as a TOML file, which --cluster takes too.",
        )
    }
}

//! `altiplano import MODEL -o graph.json`: converts a model to the project's own graph format.

use crate::commands::options::ModelOptions;
use crate::commands::{say, warn};
use altiplano::{Error, load_all_results, write_file};
use altiplano_ir::json;
use clap::Args;
use std::path::PathBuf;

/// Convert a model to altiplano.graph JSON, with its parameters and batch identified
#[derive(Args)]
pub(crate) struct Import {
    /// A model: StableHLO text as JAX prints it, a torch.export archive (.pt2), ONNX, a Hugging Face config.json, or
    /// altiplano.graph JSON
    model: PathBuf,
    #[command(flatten)]
    options: ModelOptions,
    /// Write the graph to this file instead of stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Import {
    pub(crate) fn run(self) -> Result<(), Error> {
        let options = self.options.import();
        if !options.stop_gradients.is_empty() {
            let problem = "a graph file cannot store it; give it to plan, run or verify instead";
            return Err(Error::Option { option: "--stop-gradient", problem });
        }
        let model = load_all_results(&self.model, &options)?;
        warn(&model.warnings);
        let text = json::write(&model.graph);
        match &self.output {
            Some(file) => write_file(file, &text),
            None => say(text.trim_end()),
        }
    }
}

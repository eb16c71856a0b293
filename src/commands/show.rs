//! `altiplano show FILE`: prints a model, a cluster or a plan as text.

use crate::commands::options::ModelOptions;
use crate::commands::{report_for_stdout, say, warn};
use altiplano::cost_models::toml_file::print;
use altiplano::ir::dot::to_dot;
use altiplano::{Error, Format, cluster_of, load_cluster, model_of, plan_of, read_bytes};
use clap::Args;
use std::path::Path;

/// Print a model's graph, a cluster or a plan as text
#[derive(Args)]
pub(crate) struct Show {
    /// A model, a plan, a cluster's TOML file, or a cluster preset (dgx-a100:2)
    file: String,
    /// Print a model's graph in the DOT language instead
    #[arg(long)]
    dot: bool,
    #[command(flatten)]
    options: ModelOptions,
}

impl Show {
    pub(crate) fn run(self) -> Result<(), Error> {
        let path = Path::new(&self.file);
        if !path.exists() {
            return match load_cluster(&self.file) {
                Ok(cluster) => say(print(&cluster).trim_end()),
                // If the argument looks like a path, report the error of the file.
                Err(Error::Cluster { .. }) if is_path(path) => read_bytes(path).map(|_| ()),
                Err(error) => Err(error),
            };
        }
        let bytes = read_bytes(path)?;
        match Format::of(&bytes) {
            Format::PlanJson => say(report_for_stdout(&plan_of(path, &bytes)?)),
            Format::ClusterToml => say(print(&cluster_of(path, &String::from_utf8_lossy(&bytes))?).trim_end()),
            _ => {
                let model = model_of(path, &bytes, &self.options.import())?;
                warn(&model.warnings);
                let text = if self.dot { to_dot(&model.graph) } else { model.graph.to_string() };
                say(text.trim_end())
            }
        }
    }
}

fn is_path(path: &Path) -> bool {
    let known = ["mlir", "json", "toml", "onnx", "pt2", "txt"];
    path.extension().is_some_and(|e| known.iter().any(|k| e == *k))
}

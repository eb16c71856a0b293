//! `altiplano prove PLAN`: proves that a plan computes what one device computes, without running it. `altiplano prove
//! ONE.mlir RANKS.mlir` proves the same of programs that others wrote.

use crate::commands::say;
use altiplano::ir::plan::Plan;
use altiplano::pairs::{PairOptions, load_pair, pair_text};
use altiplano::prove::{Proved, proof_text, prove};
use altiplano::{Error, expect_writable, load_plan, one_line, write_file};
use clap::Args;
use std::path::{Path, PathBuf};

/// Prove at full size that a plan's programs compute what one device computes, without running them
///
/// With a second file, prove that the StableHLO program of each rank (JAX's shard_map) computes what the sequential
/// StableHLO program in the first file computes. The exit code is 0 if it is proved, 1 if not, 2 for unusable input.
#[derive(Args)]
pub(crate) struct Prove {
    /// A plan file, written by `altiplano plan -o`, or a sequential StableHLO program
    pub plan: PathBuf,
    /// The StableHLO program of each rank, with its collectives; the first file is the sequential program
    #[arg(value_name = "RANKS")]
    pub ranks: Option<PathBuf>,
    /// The mesh of a program of each rank without a shard_map, major axis first: data=2,model=4
    #[arg(long, value_name = "AXES", requires = "ranks")]
    mesh: Option<String>,
    /// The layout of an argument or a result of such a program; others are whole on every device. Repeatable:
    /// 'arg0=[{data}, {}]', 'result0=[{}]'
    #[arg(long = "layout", value_name = "NAME=LAYOUT", requires = "mesh")]
    layouts: Vec<String>,
    /// Write the plan with its proof to this file; it may be the plan's own
    #[arg(short, long, value_name = "PLAN", conflicts_with = "ranks")]
    pub output: Option<PathBuf>,
    /// Print the proof and all sums as JSON (docs/proofs.md)
    #[arg(long)]
    json: bool,
}

impl Prove {
    pub(crate) fn run(self) -> Result<(), Error> {
        if let Some(ranks) = &self.ranks {
            return self.pair(ranks);
        }
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        let mut plan = load_plan(&self.plan)?;
        if !self.json {
            say(format!("{}: {}", plan.model, one_line(&plan)))?;
        }
        let (text, warnings) = self.answer(&mut plan)?;
        say(text)?;
        warnings.iter().for_each(|warning| complain!("warning: {warning}"));
        match &self.output {
            Some(file) => write_file(file, &plan.to_json()),
            None => Ok(()),
        }
    }

    /// Proves that a program of each rank computes what the sequential one does.
    fn pair(&self, ranks: &Path) -> Result<(), Error> {
        let options = PairOptions { mesh: self.mesh.clone(), layouts: self.layouts.clone() };
        let loaded = load_pair(&self.plan, ranks, &options)?;
        let unproved = |gap| Error::UnprovedPair { file: ranks.to_path_buf(), gap: Box::new(gap) };
        let proof = loaded.prove().map_err(unproved)?;
        match self.json {
            true => say(serde_json::json!({
                "proved": true,
                "values": proof.values,
                "sequential_values": proof.reference_values,
                "results": loaded.ranks.outputs.len(),
            })),
            false => say(pair_text(&loaded, &proof)),
        }
    }

    /// Proves a loaded plan. Returns the proof as text, and warnings about sums that lose precision.
    fn answer(&self, plan: &mut Plan) -> Result<(String, Vec<String>), Error> {
        let Proved { certificate, rounding } = prove(plan)?.map_err(|gap| Error::Unproved { gap: Box::new(gap) })?;
        let text = match self.json {
            true => {
                let mut json = serde_json::to_value(&certificate).unwrap_or_default();
                json["rounding"] = rounding.json();
                serde_json::to_string_pretty(&json).unwrap_or_default()
            }
            false => [proof_text(plan, &certificate), rounding.text()].join("\n\n").trim_end().to_string(),
        };
        plan.proof = Some(certificate);
        Ok((text, rounding.warnings()))
    }
}

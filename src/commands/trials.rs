//! `altiplano trials MODEL...`: packs many trainings onto a cluster.

use crate::commands::options::{ModelOptions, PlanOptions};
use crate::commands::{explain_failure, made_by, say};
use crate::progress::Bar;
use altiplano::planner::Request;
use altiplano::trials::{Asked, Trials as Found, plan_name, trials, trials_json, trials_text};
use altiplano::{Error, write_file};
use clap::Args;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Pack many trainings onto a cluster: how many devices each gets, which take turns, and when all are done
#[derive(Args)]
pub(crate) struct Trials {
    /// Models, as for `altiplano plan`; all options hold for each of them
    #[arg(required = true, value_name = "MODEL")]
    pub models: Vec<PathBuf>,
    #[command(flatten)]
    pub options: ModelOptions,
    #[command(flatten)]
    pub plan: PlanOptions,
    /// Number of trials; with several models one for each of them, as 8,4, or the same for all
    #[arg(long, value_name = "K", value_delimiter = ',', required = true)]
    count: Vec<usize>,
    /// Optimizer steps of a trial; with several models one for each of them, or the same for all
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1000")]
    steps: Vec<u64>,
    /// Write the plans and trials.json to this folder, created if missing
    #[arg(short, long, value_name = "DIR", help_heading = "Output")]
    output: Option<PathBuf>,
    /// Print JSON (docs/trials.schema.json)
    #[arg(long, help_heading = "Output")]
    json: bool,
}

impl Trials {
    pub(crate) fn run(self) -> Result<(), Error> {
        let request = |model: &PathBuf| self.plan.request(model, &self.options);
        let asked = self.asked(self.models.iter().map(request).collect::<Result<_, Error>>()?)?;
        let largest = asked[0].request.clone();
        let bar = Bar::stoppable();
        let found = match trials(asked, &|request| self.plan.plan(request, &bar)) {
            Ok(found) => found,
            Err(error) => {
                // The error does not tell which of several models it is about.
                if self.models.len() == 1 && !error.is_usage() {
                    explain_failure(&largest, &error, &bar, self.json)?;
                }
                return Err(error);
            }
        };
        drop(bar);
        say(self.answer(&found)?)
    }

    /// The trials of each model, of which this has the request.
    pub(crate) fn asked(&self, requests: Vec<Request>) -> Result<Vec<Asked>, Error> {
        let counts = each(&self.count, requests.len(), "--count")?;
        let steps = each(&self.steps, requests.len(), "--steps")?;
        let asked = requests.into_iter().zip(counts).zip(steps);
        Ok(asked.map(|((request, count), steps)| Asked { request, count, steps }).collect())
    }

    /// The trials in words or as JSON. Plans are written if the options say so.
    pub(crate) fn answer(&self, found: &Found) -> Result<String, Error> {
        self.output.as_deref().map_or(Ok(()), |folder| write(folder, found))?;
        Ok(if self.json { trials_json(found) } else { trials_text(found) })
    }
}

/// The number for each model.
fn each<T: Copy>(given: &[T], models: usize, option: &'static str) -> Result<Vec<T>, Error> {
    match given {
        [one] => Ok(vec![*one; models]),
        all if all.len() == models => Ok(all.to_vec()),
        _ => Err(Error::Option { option, problem: "give one number, or one for each model" }),
    }
}

/// Writes the plans that trials run, and when and where each does.
fn write(folder: &Path, found: &Found) -> Result<(), Error> {
    std::fs::create_dir_all(folder).map_err(|error| Error::Write { file: folder.to_path_buf(), error })?;
    let used: BTreeSet<(usize, usize)> = found.placed.iter().map(|trial| (trial.series, trial.size)).collect();
    for (model, size) in used {
        let Some(mut plan) = found.models[model].plans[size].clone() else { continue };
        plan.made_by = Some(made_by());
        write_file(&folder.join(plan_name(found, model, found.sizes[size])), &plan.to_json())?;
    }
    write_file(&folder.join("trials.json"), &trials_json(found))
}

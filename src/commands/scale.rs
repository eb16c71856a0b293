//! `altiplano scale MODEL`: recommends a number of nodes, with the training time and cost.

use crate::commands::options::{ModelOptions, PlanOptions};
use crate::commands::{explain_failure, keep_searches, say};
use crate::progress::Bar;
use altiplano::planner::{Progress, Request};
use altiplano::scale::{
    BaseRate, Growth, Length, Question, QueueWaits, Samples, Scaling, node_counts, sample_bytes, sample_tokens,
    scaling, scaling_html, scaling_json, scaling_text, train_config,
};
use altiplano::units::seconds;
use altiplano::{Error, expect_writable, read_bytes, write_file};
use clap::Args;
use std::path::PathBuf;
use std::time::Instant;

/// Plan for several numbers of nodes: throughput, training time, cost, and a recommendation
#[derive(Args)]
pub(crate) struct Scale {
    /// A model, as for `altiplano plan`
    pub model: PathBuf,
    #[command(flatten)]
    pub options: ModelOptions,
    #[command(flatten)]
    pub plan: PlanOptions,
    /// Numbers of nodes, which override that of --cluster; 1,2,4,...,64 doubles from 4 to 64
    #[arg(long, value_name = "COUNTS")]
    nodes: String,
    /// Weak scaling: the batch grows with the nodes, from --global-batch at the smallest number
    #[arg(long, conflicts_with = "strong")]
    weak: bool,
    /// Strong scaling: the batch stays the same [default]
    #[arg(long)]
    strong: bool,
    /// Samples per epoch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// Number of epochs [default: 1]
    #[arg(long, value_name = "E", value_parser = positive, requires = "samples")]
    epochs: Option<f64>,
    /// Number of training tokens, instead of samples: 300e9
    #[arg(long, value_name = "T", value_parser = positive, conflicts_with = "samples")]
    tokens: Option<f64>,
    /// Recommend the fewest device-hours among those done within this many hours
    #[arg(long, value_name = "H", value_parser = positive)]
    max_hours: Option<f64>,
    /// Gradient noise scale in samples (McCandlish et al. 2018): --samples or --tokens then hold for the smallest
    /// batch, and larger ones need more
    #[arg(long, value_name = "SAMPLES", value_parser = positive)]
    noise_scale: Option<f64>,
    /// A learning rate that works with --base-batch, to be scaled to other batches
    #[arg(long, value_name = "RATE", value_parser = positive, requires = "base_batch")]
    learning_rate: Option<f64>,
    /// The batch of --learning-rate
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), requires = "learning_rate")]
    base_batch: Option<u64>,
    /// Stored bytes per sample; needs [storage] in the cluster file [default: as the model takes it]
    #[arg(long, value_name = "BYTES", value_parser = positive)]
    sample_bytes: Option<f64>,
    /// Samples per file, each of which is opened once [default: 1]
    #[arg(long, value_name = "N", value_parser = positive)]
    samples_per_file: Option<f64>,
    /// CSV table of queue waits with the columns nodes and hours, added to the time
    #[arg(long, value_name = "FILE.csv")]
    queue_waits: Option<PathBuf>,
    /// Standard deviation of workers' step times, as a fraction of their computing time [default: 0]
    #[arg(long, value_name = "F", value_parser = jitter)]
    jitter: Option<f64>,
    /// Write a self-contained HTML page to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the recommendation as options for `altiplano run --config`
    #[arg(long, value_name = "FILE")]
    write_config: Option<PathBuf>,
    /// Print JSON (docs/scale.schema.json)
    #[arg(long)]
    json: bool,
}

fn positive(text: &str) -> Result<f64, &'static str> {
    let value: f64 = text.parse().map_err(|_| "expected a number")?;
    if value > 0.0 && value <= 1e18 { Ok(value) } else { Err("expected a number above 0, at most 1e18") }
}

fn jitter(text: &str) -> Result<f64, &'static str> {
    let value: f64 = text.parse().map_err(|_| "expected a number")?;
    if (0.0..=10.0).contains(&value) { Ok(value) } else { Err("expected a number from 0 to 10") }
}

impl Scale {
    pub(crate) fn run(self) -> Result<(), Error> {
        let question = self.checked()?;
        let request = self.plan.request(&self.model, &self.options)?;
        let question = self.question(question, &request)?;
        let bar = Bar::stoppable();
        let start = Instant::now();
        let found = match self.found(&request, &question, &bar)? {
            Ok(found) => found,
            Err((largest, error)) => {
                if !error.is_usage() {
                    explain_failure(&largest, &error, &bar, self.json)?;
                }
                return Err(error);
            }
        };
        drop(bar);
        complain!("planned for {} counts of nodes in {}", found.rows.len(), seconds(start.elapsed().as_secs_f64()));
        say(self.answer(&found)?)
    }

    /// The numbers of nodes, if the options go together.
    pub(crate) fn checked(&self) -> Result<Vec<u32>, Error> {
        let nodes = node_counts(&self.nodes)?;
        [&self.write_config, &self.html].into_iter().flatten().try_for_each(|file| expect_writable(file))?;
        if self.queue_waits.is_some() && self.samples.is_none() && self.tokens.is_none() {
            return Err(Error::Option { option: "--queue-waits", problem: "needs --samples or --tokens to train on" });
        }
        if self.max_hours.is_some() && self.samples.is_none() && self.tokens.is_none() {
            return Err(Error::Option { option: "--max-hours", problem: "needs --samples or --tokens to train on" });
        }
        self.plan.expect_no_profile()?;
        Ok(nodes)
    }

    /// Plans for all numbers of nodes. If none has a plan, the request and the failure of the largest, which comes
    /// closest.
    pub(crate) fn found(
        &self,
        request: &Request,
        question: &Question,
        progress: &dyn Progress,
    ) -> Result<Result<Scaling, (Box<Request>, Error)>, Error> {
        let found = scaling(request, question, progress);
        keep_searches(request);
        let mut found = found?;
        if found.rows.iter().all(|row| row.point.is_none()) {
            let Some(first) = found.rows.pop() else {
                return Err(Error::Option { option: "--nodes", problem: "cancelled before any count had a plan" });
            };
            if let Err(failure) = first.plan {
                let mut largest = request.clone();
                largest.cluster.groups[0].nodes = first.nodes;
                return Ok(Err((Box::new(largest), failure.into())));
            }
        }
        Ok(Ok(found))
    }

    /// The recommendation. Files are written if the options say so.
    pub(crate) fn answer(&self, found: &Scaling) -> Result<String, Error> {
        if let Some(file) = &self.write_config {
            let problem = "no count of nodes has a plan to be written";
            let text = train_config(found).ok_or(Error::Option { option: "--write-config", problem })?;
            write_file(file, &text)?;
        }
        if let Some(file) = &self.html {
            write_file(file, &scaling_html(found))?;
        }
        Ok(if self.json { format!("{:#}", scaling_json(found)) } else { scaling_text(found) })
    }

    /// The question about a request.
    pub(crate) fn question(&self, nodes: Vec<u32>, request: &Request) -> Result<Question, Error> {
        let graph = &request.graph;
        let length = match (self.samples, self.tokens) {
            (Some(in_epoch), _) => {
                let samples = in_epoch as f64 * self.epochs.unwrap_or(1.0);
                let tokens = sample_tokens(graph).map(|each| samples * each as f64);
                Some(Length { in_epoch: Some(in_epoch), samples, tokens })
            }
            (None, Some(tokens)) => {
                let problem = "the model has no input of tokens (integers, samples x positions); say --samples";
                let each = sample_tokens(graph).ok_or(Error::Option { option: "--tokens", problem })?;
                // Every token is read once.
                let samples = (tokens / each as f64).ceil();
                Some(Length { in_epoch: Some(samples as u64), samples, tokens: Some(tokens) })
            }
            (None, None) => None,
        };
        let asked = self.sample_bytes.is_some() || self.samples_per_file.is_some();
        if asked && request.cluster.storage.is_none() {
            let problem = "the cluster does not describe the storage of samples; add [storage] to its file";
            return Err(Error::Option { option: "--sample-bytes", problem });
        }
        let samples = request.cluster.storage.map(|_| Samples {
            bytes: self.sample_bytes.unwrap_or_else(|| sample_bytes(graph)),
            per_file: self.samples_per_file.unwrap_or(1.0),
            in_epoch: length.and_then(|length| length.in_epoch),
        });
        let base_rate = self.learning_rate.zip(self.base_batch).map(|(rate, batch)| BaseRate { rate, batch });
        let growth = if self.weak { Growth::Weak } else { Growth::Strong };
        let (noise_scale, max_hours) = (self.noise_scale, self.max_hours);
        let read = |file: &PathBuf| {
            let waits = QueueWaits::read(&read_bytes(file)?, file)?;
            waits.expect_within(&nodes, file).map(|()| waits)
        };
        let queue_waits = self.queue_waits.as_ref().map(read).transpose()?;
        let jitter = self.jitter.unwrap_or(0.0);
        Ok(Question { nodes, growth, length, noise_scale, max_hours, samples, base_rate, queue_waits, jitter })
    }
}

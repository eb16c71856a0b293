//! `altiplano judge`: predicts a configuration as people have it, says what limits it, and tries the changes of its
//! knobs that they could make.

use super::predict::{Prediction, Predictor};
use super::syntax::Setting;
use super::{Configuration, Stack, StackProblem, Unsayable, model, recognised};
use crate::advice::Limits;
use crate::error::Error;
use crate::model::{ImportOptions, Model, Warning, model_of, read_bytes};
use crate::simulate::Simulation;
use crate::units::{bytes, digits, percent, seconds};
use crate::{load_cluster, request};
use altiplano_ir::cluster::Cluster;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::Target;
use altiplano_ir::recompute::{Modules, Recompute};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Choices that a file leaves open, and those to judge in place of its own.
#[derive(Clone, Debug, Default)]
pub struct How {
    /// The stack, if its name is given.
    pub stack: Option<&'static Stack>,
    /// The file of the model.
    pub model: Option<PathBuf>,
    pub import: ImportOptions,
    pub cluster: Option<String>,
    pub micro_batch: Option<u64>,
    pub global_batch: Option<u64>,
    pub recompute: Option<Recompute>,
    pub fused_attention: Option<bool>,
    /// The optimizer, by a name of this project.
    pub optimizer: Option<String>,
    /// Try no changes.
    pub only_predict: bool,
    /// Time for trying several changes together.
    pub within: Duration,
}

/// A configuration and what the planner says about it.
pub struct Judgement {
    pub stack: &'static Stack,
    pub configuration: Configuration,
    pub prediction: Prediction,
    pub limits: Limits,
    /// Changes of single knobs that help, best first.
    pub changes: Vec<Change>,
    /// The best changes together, if several help.
    pub together: Option<Change>,
    /// Number of changes that were predicted.
    pub tried: usize,
    pub notes: Vec<String>,
    pub warnings: Vec<Warning>,
}

/// A change of knobs and its prediction.
#[derive(Clone, Debug)]
pub struct Change {
    /// The knobs as people type them: "set `--tensor-model-parallel-size 4`".
    pub words: Vec<String>,
    pub step_s: f64,
    pub peak_bytes: u64,
    pub fits: bool,
    pub(super) configuration: Configuration,
}

/// Reads and judges a configuration.
///
/// # Errors
/// [`Error::Stack`] with the file if it cannot be read or lacks something, or what the importer of models says.
pub fn judge(file: &Path, how: &How) -> Result<Judgement, Error> {
    let text = String::from_utf8_lossy(&read_bytes(file)?).into_owned();
    judge_text(file, &text, how)
}

/// As [`judge`], for a text that is already in memory.
pub fn judge_text(file: &Path, text: &str, how: &How) -> Result<Judgement, Error> {
    let refused = |problem| Error::Stack { file: Some(file.to_path_buf()), problem: Box::new(problem) };
    let (stack, settings) = recognised(text, how.stack).map_err(refused)?;
    let mut configuration = read(stack, &settings, how).map_err(refused)?;
    let mut notes = std::mem::take(&mut configuration.notes);
    let cluster = cluster(&configuration, how, &mut notes).map_err(|error| in_file(error, file))?;
    let model = model(&mut configuration, how, &mut notes).map_err(|error| in_file(error, file))?;
    let mut request = request(&model, cluster);
    if configuration.sends_tokens_once == Some(true) && configuration.ep() > 1 && model.routing.is_none() {
        notes.push("the model does not say how many experts a token goes to: predicted with a copy for each".into());
    }
    request.cluster.groups.iter_mut().for_each(|group| group.dispatch = model.routing);
    let predictor = Predictor::new(stack, request);
    let prediction = predictor.predict(&configuration).map_err(|error| in_file(error, file))?;
    if configuration.pairs_passes == Some(true) && !prediction.plan.execution.pairs_passes {
        notes.push(
            "passes of two microbatches do not run side by side here, as this stack needs experts on several devices for it, less \
             recomputation, or several stages a device: predicted one after the other"
                .into(),
        );
    }
    if let Some(Unsayable { problem, .. }) = (stack.limit)(&configuration) {
        notes.push(problem.into());
    }
    let limits = Limits::new(&Simulation::new(prediction.plan.clone(), None)?);
    let mut judgement = Judgement {
        stack,
        configuration,
        prediction,
        limits,
        changes: Vec::new(),
        together: None,
        tried: 0,
        notes,
        warnings: model.warnings,
    };
    if !how.only_predict {
        judgement.try_changes(&predictor, how.within);
    }
    Ok(judgement)
}

/// Names the file in an error about its content.
fn in_file(error: Error, file: &Path) -> Error {
    match error {
        Error::Stack { problem, .. } => Error::Stack { file: Some(file.to_path_buf()), problem },
        other => other,
    }
}

fn read(stack: &Stack, settings: &[Setting], how: &How) -> Result<Configuration, StackProblem> {
    let mut c = stack.read(settings)?;
    if let Some(size) = how.micro_batch {
        (c.micro_batch, c.device_batch) = (Some(size), None);
        c.local_batch = c.local_batch.filter(|_| c.pp() > 1);
    }
    c.global_batch = how.global_batch.or(c.global_batch);
    if how.recompute.is_some() {
        (c.recompute, c.recomputed_layers) = (how.recompute, None);
    }
    c.fused_attention = how.fused_attention.or(c.fused_attention);
    c.optimizer = how.optimizer.clone().or(c.optimizer);
    Ok(c)
}

/// The cluster that is given, or DGX H100s with as many devices as the file states.
fn cluster(c: &Configuration, how: &How, notes: &mut Vec<String>) -> Result<Cluster, Error> {
    if let Some(text) = &how.cluster {
        return load_cluster(text);
    }
    let devices = c.stated_devices().or_else(|| {
        let replicas = c.replicate.unwrap_or(1).checked_mul(c.shard?)?;
        u32::try_from(c.devices_of_replica().checked_mul(replicas.into())?).ok()
    });
    let no_cluster = || Error::Stack { file: None, problem: Box::new(StackProblem::NoCluster) };
    let devices = devices.filter(|&devices| devices > 0).ok_or_else(no_cluster)?;
    let text = match devices {
        1..8 => format!("dgx-h100/{devices}"),
        _ => format!("dgx-h100:{}", devices.div_ceil(8)),
    };
    notes.push(format!("no cluster is given: predicted on {text}"));
    load_cluster(&text)
}

fn model(c: &mut Configuration, how: &How, notes: &mut Vec<String>) -> Result<Model, Error> {
    let mut import = how.import.clone();
    let precision = if c.eight_bit { Some(DType::F8E4M3FN) } else { c.precision };
    import.precision = import.precision.or(precision);
    // Experts are told from samples by their numbers, so one sample is too few.
    let batch = c.global_batch.filter(|&samples| samples > 1).or(Some(SAMPLES));
    if let Some(file) = &how.model {
        let bytes = read_bytes(file)?;
        if crate::model::Format::of(&bytes) == crate::model::Format::HuggingFaceConfig {
            import.sequence = import.sequence.or(c.sequence);
            import.batch = import.batch.or(batch);
        }
        // The file of the model knows its layers; the stack's options describe them again.
        c.model.layers = c.model.layers.filter(|_| c.layout.is_none());
        return model_of(file, &bytes, &import);
    }
    import.sequence = import.sequence.or(c.sequence);
    import.batch = import.batch.or(batch);
    import.capacity_factor = import.capacity_factor.or(c.model.capacity_factor);
    let of = |problem: StackProblem| Error::Stack { file: None, problem: Box::new(problem) };
    let config = model::config(&c.model, import.sequence).map_err(of)?;
    if c.model.vocabulary.is_none() {
        notes.push(format!(
            "the vocabulary is taken to have {} words, as that of the tokenizer",
            c.model.assumed_vocabulary.unwrap_or(0)
        ));
    }
    model_of(Path::new("model.json"), config.as_bytes(), &import)
}

/// A configuration that may be judged in place of another one.
type Edit = Box<dyn Fn(&mut Configuration) + Sync + Send>;

/// Changes of one knob each, with those that follow from it.
///
/// `modules` are those that selective recomputation may repeat.
fn edits(c: &Configuration, cluster: &Cluster, modules: Modules) -> Vec<Edit> {
    let devices = cluster.num_devices();
    let mut edits: Vec<Edit> = Vec::new();
    let dp = c.replicas(devices).unwrap_or(1);
    type Degree = fn(&mut Configuration) -> &mut Option<u32>;
    let degrees: [(Degree, u32); 3] = [(|c| &mut c.tp, c.tp()), (|c| &mut c.pp, c.pp()), (|c| &mut c.cp, c.cp())];
    for (i, (degree, value)) in degrees.into_iter().enumerate() {
        // From or to replicas.
        if dp % 2 == 0 {
            edits.push(Box::new(move |c| *degree(c) = Some(value * 2)));
        }
        if value % 2 == 0 {
            edits.push(Box::new(move |c| *degree(c) = Some(value / 2)));
            for (j, (other, current)) in degrees.into_iter().enumerate() {
                if i != j {
                    edits.push(Box::new(move |c| (*degree(c), *other(c)) = (Some(value / 2), Some(current * 2))));
                }
            }
        }
    }
    let ep = c.ep();
    if c.model.experts.is_some() || ep > 1 {
        edits.push(Box::new(move |c| c.ep = Some(ep * 2)));
        if ep % 2 == 0 {
            edits.push(Box::new(move |c| c.ep = Some(ep / 2)));
        }
    }
    if let Some(size) = c.micro_batch {
        edits.push(Box::new(move |c| c.micro_batch = Some(size * 2)));
        if size % 2 == 0 {
            edits.push(Box::new(move |c| c.micro_batch = Some(size / 2)));
        }
    }
    for level in Recompute::ALL {
        if level != c.recompute.unwrap_or_default() || c.recomputed_layers.is_some() {
            edits.push(Box::new(move |c| (c.recompute, c.recomputed_layers) = (Some(level), None)));
        }
    }
    let selected = match c.recompute {
        Some(Recompute::Selective) if c.recomputed_layers.is_none() => c.recompute_modules.unwrap_or_default(),
        _ => Modules::NONE,
    };
    for module in modules.iter() {
        let next = if selected.contains(module) { selected.without(module) } else { selected.with(module) };
        if !next.is_empty() {
            edits.push(Box::new(move |c| {
                (c.recompute, c.recomputed_layers) = (Some(Recompute::Selective), None);
                c.recompute_modules = Some(next);
            }));
        }
    }
    for level in (0..=3).filter(|&level| Some(level) != c.zero) {
        edits.push(Box::new(move |c| c.zero = Some(level)));
    }
    // Groups of replicas, such as the nodes, that each hold all that is sharded.
    if let Some(groups) = c.replicate.filter(|_| c.zero != Some(0)) {
        let nodes = cluster.groups.iter().map(|group| group.nodes).sum();
        let counts = [groups * 2, groups / 2, nodes, 1];
        for count in counts.into_iter().filter(|&n| n > 0 && n != groups && n < dp && dp % n == 0) {
            edits.push(Box::new(move |c| c.replicate = Some(count)));
        }
    }
    if c.tp() > 1 && c.sequence_parallel.is_some() {
        edits.push(Box::new(|c| c.sequence_parallel = c.sequence_parallel.map(|on| !on)));
    }
    if c.tp() > 1 && c.overlaps_tensor_parallel.is_some() {
        edits.push(Box::new(|c| c.overlaps_tensor_parallel = c.overlaps_tensor_parallel.map(|on| !on)));
    }
    if c.overlap == Some(false) {
        edits.push(Box::new(|c| c.overlap = Some(true)));
    }
    if c.sends_tokens_once.is_some() && c.ep() > 1 {
        edits.push(Box::new(|c| c.sends_tokens_once = c.sends_tokens_once.map(|once| !once)));
    }
    if c.pairs_passes.is_some() && c.ep() > 1 {
        edits.push(Box::new(|c| c.pairs_passes = c.pairs_passes.map(|on| !on)));
    }
    if c.pp() > 1 && c.layout.is_none() {
        let shared = c.virtual_stages();
        let counts = [Some(shared * 2), Some(shared / 2).filter(|&n| n > 0)];
        for count in counts.into_iter().flatten() {
            edits.push(Box::new(move |c| c.virtual_stages = Some(count)));
        }
    }
    edits
}

impl Judgement {
    /// Predicts changes, and keeps those that help.
    fn try_changes(&mut self, predictor: &Predictor<'_>, within: Duration) {
        let end = Instant::now() + within;
        let Some(start) = self.settled(predictor) else { return };
        let singles = self.predicted(predictor, &start, &start);
        self.tried = singles.len();
        let now = (self.prediction.fits(), self.prediction.step_s());
        let helps = |change: &Change| match now {
            (true, step_s) => change.fits && change.step_s < step_s * (1.0 - LEAST_GAIN),
            (false, _) => change.fits || change.peak_bytes < self.prediction.peak_bytes(),
        };
        self.changes = singles.into_iter().filter(helps).collect();
        // One thing after the other, while each helps.
        let Some(first) = self.changes.first() else { return };
        let (mut best, mut steps) = (first.clone(), 1);
        while steps < MOST_TOGETHER && Instant::now() < end {
            let next = self.predicted(predictor, &best.configuration, &start);
            self.tried += next.len();
            let Some(next) = next.into_iter().next().filter(|next| better(next, &best)) else { break };
            (best, steps) = (next, steps + 1);
        }
        if steps > 1 {
            self.together = Some(best);
        }
    }

    /// The configuration with all batches written out, so that changes say only what they change.
    fn settled(&self, predictor: &Predictor<'_>) -> Option<Configuration> {
        let mut c = self.configuration.clone();
        let plan = &self.prediction.plan;
        let dp = c.replicas(predictor.request.cluster.num_devices()).ok()?;
        c.global_batch = Some(plan.global_batch);
        c.micro_batch = Some(plan.microbatch / u64::from(dp.max(1)));
        c.virtual_stages = Some(plan.virtual_stages);
        (c.layers_per_virtual_stage, c.pipeline_microbatches) = (None, None);
        Some(c)
    }

    /// Changes of one knob of `from`, described against `start`, best first.
    fn predicted(&self, predictor: &Predictor<'_>, from: &Configuration, start: &Configuration) -> Vec<Change> {
        let devices = predictor.request.cluster.num_devices();
        let modules = predictor.modules(self.prediction.plan.execution);
        let change = |edit: &Edit| {
            let mut c = from.clone();
            edit(&mut c);
            let c = follow(self.stack, c, from, devices)?;
            if (self.stack.limit)(&c).is_some() || c.zero != from.zero && !says_zero(self.stack, &c) {
                return None;
            }
            let words = words(self.stack, start, &c);
            if words.is_empty() {
                return None;
            }
            let prediction = predictor.predict(&c).ok()?;
            let (step_s, peak_bytes, fits) = (prediction.step_s(), prediction.peak_bytes(), prediction.fits());
            Some(Change { words, step_s, peak_bytes, fits, configuration: c })
        };
        let mut changes: Vec<Change> =
            edits(from, &predictor.request.cluster, modules).par_iter().filter_map(change).collect();
        changes.sort_by(|a, b| {
            let over = |c: &Change| if c.fits { (false, 0) } else { (true, c.peak_bytes) };
            over(a).cmp(&over(b)).then(a.step_s.total_cmp(&b.step_s)).then(a.words.len().cmp(&b.words.len()))
        });
        changes
    }

    /// Seconds a step, corrected by a measured step.
    fn corrected(&self, step_s: f64, measured_s: Option<f64>) -> f64 {
        measured_s.map_or(step_s, |measured| step_s * measured / self.prediction.step_s())
    }

    /// The judgement in words.
    pub fn text(&self, measured_s: Option<f64>) -> String {
        let (plan, prediction) = (&self.prediction.plan, &self.prediction);
        let mut out = String::new();
        let (cluster, devices) = (&plan.cluster, plan.num_devices());
        let device = &cluster.groups[0].device.name;
        let mut line = |text: String| {
            // Writing to a string does not fail.
            let _ = writeln!(out, "{text}");
        };
        line(format!("'{}' by {} on {devices} x {device} of {}", plan.model, self.stack.name, cluster.name));
        line(format!("  {}\n", crate::one_line(plan)));
        let tokens = self.tokens().map_or(String::new(), |tokens| {
            let rate = tokens as f64 * plan.predicted.samples_per_s / f64::from(devices.max(1));
            format!(", {} tokens/s a device", digits(rate))
        });
        line(format!(
            "  predicted {} a step of {} samples{tokens}, {} of the devices' peak (MFU)",
            seconds(prediction.step_s()),
            plan.global_batch,
            percent(plan.predicted.mfu)
        ));
        let (peak, usable) = (prediction.peak_bytes(), prediction.usable_bytes());
        let verdict = if prediction.fits() { "it fits" } else { "it does not fit" };
        line(format!("  {} on the fullest device, of {} that tensors can use: {verdict}", bytes(peak), bytes(usable)));
        if let Some(measured) = measured_s {
            let off = measured / prediction.step_s();
            let how = if off >= 1.0 { "slower" } else { "faster" };
            line(format!(
                "  measured {}: {} {how} than predicted; seconds below are corrected by as much",
                seconds(measured),
                percent((off - 1.0).abs())
            ));
        }
        line("\nLimits".into());
        self.limits.lines().into_iter().for_each(|text| line(format!("  {text}")));
        line("\nChanges".into());
        let now_s = prediction.step_s();
        let said = |change: &Change| {
            let gain = now_s / change.step_s;
            let fits = match (change.fits, prediction.fits()) {
                (true, false) => ", and it fits",
                (false, _) => ", and it does not fit yet",
                _ => "",
            };
            format!(
                "  {}: {gain:.2}x, {} a step, {} on a device{fits}",
                change.words.join(", "),
                seconds(self.corrected(change.step_s, measured_s)),
                bytes(change.peak_bytes)
            )
        };
        self.changes.iter().take(MOST_SHOWN).for_each(|change| line(said(change)));
        match &self.together {
            Some(change) => line(format!("  together, one after the other:\n{}", said(change))),
            None if self.changes.is_empty() && self.tried > 0 => {
                line(format!("  none of {} changes of single knobs helps", self.tried));
            }
            None if self.tried == 0 => line("  none were tried".into()),
            None => {}
        }
        if !self.notes.is_empty() {
            line("\nNotes".into());
            self.notes.iter().for_each(|note| line(format!("  {note}")));
        }
        out.trim_end().to_string()
    }

    /// Tokens of a sample, if the model takes tokens.
    fn tokens(&self) -> Option<u64> {
        let (graph, _) = self.prediction.plan.own();
        let inputs = graph.inputs().map(|(v, _)| graph.ty(v));
        let tokens = inputs.filter(|ty| !ty.dtype.is_float() && ty.rank() == 2).map(|ty| ty.shape[1]);
        tokens.max()
    }

    /// The judgement as JSON (`docs/judgement.schema.json`).
    pub fn json(&self, measured_s: Option<f64>) -> Value {
        let prediction = &self.prediction;
        let change = |change: &Change| {
            json!({
                "change": change.words,
                "step_time_s": self.corrected(change.step_s, measured_s),
                "times_as_fast": prediction.step_s() / change.step_s,
                "peak_bytes": change.peak_bytes,
                "fits": change.fits,
            })
        };
        let plan = &prediction.plan;
        let settings = self.stack.settings(&self.configuration);
        json!({
            "format": "altiplano.judgement",
            "version": 1,
            "stack": self.stack.name,
            "written_for": self.stack.version,
            "model": plan.model,
            "cluster": plan.cluster.name,
            "devices": plan.num_devices(),
            "settings": settings.into_iter().map(|(name, value)| json!({"name": name, "value": value})).collect::<Vec<_>>(),
            "step_time_s": prediction.step_s(),
            "global_batch": plan.global_batch,
            "tokens_per_s_and_device": self.tokens().map(|t| t as f64 * plan.predicted.samples_per_s / f64::from(plan.num_devices().max(1))),
            "mfu": plan.predicted.mfu,
            "peak_bytes": prediction.peak_bytes(),
            "usable_bytes": prediction.usable_bytes(),
            "fits": prediction.fits(),
            "measured_s": measured_s,
            "correction": measured_s.map(|measured| measured / prediction.step_s()),
            "limits": json!(self.limits),
            "changes": self.changes.iter().map(change).collect::<Vec<_>>(),
            "together": self.together.as_ref().map(change),
            "tried": self.tried,
            "notes": self.notes,
        })
    }
}

/// Samples of the graph of a model if the global batch is not known yet.
const SAMPLES: u64 = 64;
/// Least gain of a change that is worth its line.
const LEAST_GAIN: f64 = 0.005;
/// Most changes that are tried together.
const MOST_TOGETHER: usize = 4;
/// Most changes that the text lists.
const MOST_SHOWN: usize = 8;

fn better(a: &Change, b: &Change) -> bool {
    match (a.fits, b.fits) {
        (true, true) => a.step_s < b.step_s * (1.0 - LEAST_GAIN),
        (false, false) => a.peak_bytes < b.peak_bytes,
        (fits, _) => fits,
    }
}

/// Brings the knobs that depend on others in line after a change. `None` if that is impossible.
fn follow(stack: &Stack, mut c: Configuration, from: &Configuration, devices: u32) -> Option<Configuration> {
    let stated = c.shard.take();
    let shards = c.zero != Some(0);
    // Groups of replicas that no longer divide them, or replicas that now shard or stop doing so.
    if stack.shards_by_degree && (!shards || from.zero == Some(0)) || c.replicas(devices).is_err() {
        c.replicate = None;
    }
    let dp = c.replicas(devices).ok()?;
    if stack.shards_by_degree && !shards {
        (c.replicate, c.shard) = (Some(dp), Some(1));
    } else if stated.is_some() {
        c.shard = Some(dp / c.replicate.unwrap_or(1).max(1));
        c.replicate = c.replicate.or(from.replicate.map(|_| 1));
    }
    if from.tp() > 1 && c.etp == from.tp {
        c.etp = c.tp;
    }
    // Megatron demands sequence parallelism beside both.
    if stack.target == Target::Megatron && c.tp() > 1 && (c.ep() > 1 || c.overlaps_tensor_parallel == Some(true)) {
        c.sequence_parallel = Some(true);
    }
    let region = u64::from(dp) * u64::from(c.tp()) * u64::from(c.cp());
    if c.ep() > 1 && region % u64::from(c.ep()) != 0 {
        return None;
    }
    if c.pp() != from.pp() {
        (c.layout, c.ends) = (None, [None; 2]);
        if c.pp() == 1 {
            c.virtual_stages = Some(1);
        }
    }
    // The largest microbatch that divides what a replica gets, if the degrees change.
    let of_replica = c.global_batch?.checked_div(dp.into()).filter(|&samples| samples > 0)?;
    if c.global_batch? % u64::from(dp) != 0 {
        return None;
    }
    let size = c.micro_batch?;
    if c.micro_batch != from.micro_batch && of_replica % size != 0 {
        return None;
    }
    let size = (1..=size.min(of_replica)).rev().find(|size| of_replica % size == 0)?;
    let count = of_replica / size;
    c.micro_batch = Some(size);
    c.accumulation = c.accumulation.map(|_| u32::try_from(count).unwrap_or(u32::MAX));
    c.local_batch = c.local_batch.map(|_| if c.pp() > 1 { of_replica } else { size });
    c.device_batch = c.device_batch.map(|_| size as f64 / c.devices_of_replica() as f64);
    c.order().can_share(c.virtual_stages(), count, c.pp()).then_some(c)
}

/// True if a stack's file with this configuration states its level of sharded storage.
fn says_zero(stack: &Stack, c: &Configuration) -> bool {
    let mut rounded = c.clone();
    (stack.round)(&mut rounded);
    rounded.zero == c.zero
}

/// The knobs that differ, as people type them.
fn words(stack: &Stack, before: &Configuration, after: &Configuration) -> Vec<String> {
    let [old, new] = [stack.settings(before), stack.settings(after)];
    let of = |settings: &[(&'static str, Value)], name: &str| {
        settings.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
    };
    let mut words: Vec<String> = Vec::new();
    for (name, value) in &new {
        if of(&old, name).as_ref() != Some(value) {
            words.push(format!("set `{}`", stack.set(name, value)));
        }
    }
    for (name, _) in &old {
        if of(&new, name).is_none() {
            words.push(format!("remove `{}`", stack.spelled(&[name.to_string()])));
        }
    }
    // The program or its command says what the file leaves open.
    let is_said = |change: &dyn Fn(&mut Configuration)| {
        let mut changed = after.clone();
        change(&mut changed);
        stack.settings(&changed) != new
    };
    if before.micro_batch != after.micro_batch && !is_said(&|c| c.micro_batch = c.micro_batch.map(|n| n + 1)) {
        let size = after.micro_batch.unwrap_or(1);
        let is_of_devices = after.device_batch.is_some();
        if !is_of_devices {
            words.push(format!("take {size} samples a device and pass"));
        }
    }
    let level = |c: &Configuration| c.recompute.unwrap_or_default();
    if level(before) != level(after) && words.is_empty() {
        words.push(match (stack.name, level(after)) {
            ("torchtitan", Recompute::None) => "set `activation_checkpoint=None`".into(),
            ("torchtitan", Recompute::Selective) => "set `activation_checkpoint=SelectiveAC.Config()`".into(),
            ("torchtitan", Recompute::Full) => "set `activation_checkpoint=FullAC.Config()`".into(),
            (_, Recompute::None) => "recompute nothing in the model's code".into(),
            (_, Recompute::Selective) => "recompute the core of attention in the model's code".into(),
            (_, Recompute::Full) => "recompute all layers in the model's code (checkpointing)".into(),
        });
    }
    words
}

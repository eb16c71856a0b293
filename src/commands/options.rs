//! Options shared by several subcommands, and their translation for the library.

use crate::commands::fixed::FixedOptions;
use crate::commands::ranks::Kind;
use crate::commands::{keep_searches, warn};
use crate::progress::Bar;
use altiplano::cost_models::profile::Profile;
use altiplano::ir::dtype::DType;
use altiplano::ir::loss_scale::{self, LossScale};
use altiplano::ir::optimizer::Optimizer;
use altiplano::ir::plan::{MfuConvention, Plan, Schedule, Target, Update};
use altiplano::measured_costs::{frontier_by, load_profile, plan_by, repredict, uncovered};
use altiplano::planner::features::chunked_loss::LossChunks;
use altiplano::planner::features::rings::Ring;
use altiplano::planner::search::pareto::Point;
use altiplano::planner::{OverServers, Progress, Request, SearchKind};
use altiplano::runtime::devices::cuda::{CudaOptions, Search, Survey};
use altiplano::runtime::devices::xla::XlaOptions;
use altiplano::training::{DataOptions, Training};
use altiplano::{
    Error, Format, GivenStep, ImportOptions, Model, Warning, load_cluster, load_devices, model_of, open_cache, plan_of,
    read_bytes,
};
use altiplano_transforms::downscale::Goal;
use altiplano_xla::pjrt::{Platform, find, find_any, site_packages};
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Options of reading a model.
#[derive(Args, Clone, Debug, Default, PartialEq)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelOptions {
    /// Trained arguments, by position, range, name or pattern (0-11, params, params['h*, *lora*); if the file marks its
    /// parameters, all others are frozen
    #[arg(long, value_delimiter = ',', value_name = "ARGUMENTS")]
    params: Vec<String>,
    /// Arguments that are not trained: the batch and other inputs of each step
    #[arg(long, value_delimiter = ',', value_name = "ARGUMENTS")]
    inputs: Vec<String>,
    /// Frozen parameters, selected as for --params: no gradient, no optimizer state, no update
    #[arg(long, value_delimiter = ',', value_name = "ARGUMENTS")]
    freeze: Vec<String>,
    /// Parameters excluded from weight decay, selected as for --params
    #[arg(long, value_delimiter = ',', value_name = "ARGUMENTS")]
    no_decay: Vec<String>,
    /// Batch dimension of an input, or none [default: 0 for every input]
    #[arg(long, value_parser = batch_dim, value_name = "NAME=DIM|none")]
    batch_dim: Vec<(String, Option<usize>)>,
    /// The same model traced at another batch size, to determine what scales with the batch
    #[arg(long, value_name = "FILE")]
    also: Option<PathBuf>,
    /// Stop the gradient at this value: a name or number from `altiplano show`
    #[arg(long, value_name = "NAME")]
    stop_gradient: Vec<String>,
    /// The result that is the loss, by name or position [default: the one named loss, or the first]; for a model
    /// without a loss: cross-entropy (new input `labels`), mse (new input `targets`), or none to run it without
    /// training
    #[arg(long, value_name = "RESULT")]
    loss: Option<String>,
    /// Ignore the shardings that the model states (with_sharding_constraint and the like)
    #[arg(long)]
    ignore_shardings: bool,
    /// Plan the ops as the file has them, without recognising softmax, attention and the like
    #[arg(long)]
    as_written: bool,
    /// Floating-point type for training [default: as traced]
    #[arg(long)]
    precision: Option<Precision>,
    /// Short for --precision bf16
    #[arg(long, hide = true, conflicts_with_all = ["precision", "fp16"])]
    bf16: bool,
    /// Short for --precision f16
    #[arg(long, hide = true, conflicts_with = "precision")]
    fp16: bool,
    /// Tokens per sample, for a Hugging Face config [default: its positions, at most 4096]
    #[arg(long, value_name = "N")]
    seq: Option<u64>,
    /// Tokens per expert, for a Hugging Face config, as a multiple of an even share [default: 1.25]
    #[arg(long, value_name = "X")]
    capacity_factor: Option<f64>,
    /// Value of a size that the file leaves open, such as batch or sequence_length
    #[arg(long, value_parser = size, value_name = "NAME=N")]
    size: Vec<(String, u64)>,
    /// Downscale the model: fewer layers and smaller sizes, up to this number of parameters [default: 4M]
    #[arg(long, value_name = "PARAMETERS", num_args = 0..=1, require_equals = true, default_missing_value = "4M", value_parser = parameters)]
    reduce: Option<u64>,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Precision {
    F32,
    Bf16,
    F16,
    /// bf16, and 8 bits for products of weights
    Fp8,
}

/// Parses a number of parameters, such as `4M` or `200k`.
fn parameters(text: &str) -> Result<u64, &'static str> {
    let units = [("k", 1_000), ("M", 1_000_000), ("B", 1_000_000_000), ("", 1)];
    let (digits, unit) =
        units.into_iter().find_map(|(u, n)| Some((text.strip_suffix(u)?, n))).ok_or("expected a number")?;
    let number: f64 = digits.parse().map_err(|_| "expected a number such as 4M or 200k")?;
    let parameters = number * unit as f64;
    if (1.0..1e18).contains(&parameters) { Ok(parameters as u64) } else { Err("expected at least 1 parameter") }
}

/// Parses a learning rate; 0 runs steps without changing the weights.
fn learning_rate(text: &str) -> Result<f64, &'static str> {
    not_negative(text)
}

fn not_negative(text: &str) -> Result<f64, &'static str> {
    let number: f64 = text.parse().map_err(|_| "expected a number")?;
    if number.is_finite() && number >= 0.0 { Ok(number) } else { Err("expected a finite number, 0 or more") }
}

/// Parses a decay factor of an average.
fn below_one(text: &str) -> Result<f64, &'static str> {
    let number: f64 = text.parse().map_err(|_| "expected a number")?;
    if (0.0..1.0).contains(&number) { Ok(number) } else { Err("expected a number of at least 0 and below 1") }
}

/// Parses a number above 0.
fn positive(text: &str) -> Result<f64, &'static str> {
    let number: f64 = text.parse().map_err(|_| "expected a number")?;
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err("expected a finite number above 0") }
}

/// A loss scale; `None` if it is off.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scaling(Option<LossScale>);

fn scaling(text: &str) -> Result<Scaling, &'static str> {
    let mut parts = text.split(':');
    let scale = match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some("off"), None, ..) => return Ok(Scaling(None)),
        (Some("dynamic"), initial, interval, None) => {
            let initial = initial.map_or(Ok(loss_scale::INITIAL), positive)?;
            let interval = interval.map_or(Ok(loss_scale::INTERVAL), str::parse);
            LossScale::Dynamic { initial, interval: interval.map_err(|_| "STEPS must be a whole number")? }
        }
        (Some(fixed), None, ..) => {
            let expected = "expected dynamic, dynamic:INITIAL:STEPS, a number above 0, or off";
            LossScale::Fixed(positive(fixed).map_err(|_| expected)?)
        }
        _ => return Err("expected dynamic, dynamic:INITIAL:STEPS, a number above 0, or off"),
    };
    // Single precision covers the numbers of every type of loss.
    scale.problem(DType::F32).map_or(Ok(Scaling(Some(scale))), Err)
}

impl Scaling {
    /// The loss scale for a plan with this type of loss, if it is possible.
    fn of(self, loss: DType, is_late: bool) -> Result<Option<LossScale>, Error> {
        let option = "--loss-scale";
        if let Some(problem) = self.0.and_then(|scale| scale.problem(loss)) {
            return Err(Error::Option { option, problem });
        }
        if self.0.is_some_and(|scale| !scale.is_of_staleness(is_late.into())) {
            let problem = "is found from the gradients of the previous step, which are not known in time if gradients are late (--schedule pipedream, --update stale); give a fixed number";
            return Err(Error::Option { option, problem });
        }
        Ok(self.0)
    }
}

fn size(text: &str) -> Result<(String, u64), &'static str> {
    let (name, value) = text.rsplit_once('=').ok_or("expected NAME=N")?;
    let value = value.parse().map_err(|_| "N must be a whole number")?;
    Ok((name.to_string(), value))
}

fn batch_dim(text: &str) -> Result<(String, Option<usize>), &'static str> {
    let (name, dim) = text.rsplit_once('=').ok_or("expected NAME=DIM or NAME=none")?;
    match dim {
        "none" => Ok((name.to_string(), None)),
        _ => Ok((name.to_string(), Some(dim.parse().map_err(|_| "DIM must be a whole number or `none`")?))),
    }
}

impl ModelOptions {
    /// The precision, by either option.
    fn precision(&self) -> Option<Precision> {
        match (self.bf16, self.fp16) {
            (true, _) => Some(Precision::Bf16),
            (_, true) => Some(Precision::F16),
            _ => self.precision,
        }
    }

    pub(crate) fn import(&self) -> ImportOptions {
        ImportOptions {
            params: self.params.clone(),
            inputs: self.inputs.clone(),
            freeze: self.freeze.clone(),
            no_decay: self.no_decay.clone(),
            batch_dims: self.batch_dim.clone(),
            also: self.also.clone(),
            stop_gradients: self.stop_gradient.clone(),
            loss: self.loss.clone(),
            ignore_shardings: self.ignore_shardings,
            as_written: self.as_written,
            pins: Vec::new(),
            axis_sizes: [None, None],
            precision: self.precision().map(|p| match p {
                Precision::F32 => DType::F32,
                Precision::Bf16 => DType::BF16,
                Precision::F16 => DType::F16,
                Precision::Fp8 => DType::F8E4M3FN,
            }),
            sequence: self.seq,
            batch: None,
            capacity_factor: self.capacity_factor,
            sizes: self.size.clone(),
            reduce: self.reduce.map(|parameters| Goal { parameters, ..Goal::default() }),
        }
    }
}

/// The target of a plan, and its fixed choices. Everything else is searched.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub(crate) struct PlanOptions {
    /// A preset with a count (local:4, p3.16xlarge:8, dgx-a100:16) or a TOML file [default: local:4]
    #[arg(long, value_name = "CLUSTER", help_heading = "Cluster and batch")]
    cluster: Option<String>,
    /// A devices file of `altiplano calibrate`, which replaces catalogue devices of the same names
    #[arg(long, value_name = "FILE", help_heading = "Cluster and batch")]
    devices: Option<PathBuf>,
    /// Samples per optimizer step [default: the traced batch]
    #[arg(long, value_name = "N", help_heading = "Cluster and batch")]
    global_batch: Option<u64>,
    #[command(flatten)]
    pub fixed: FixedOptions,
    /// Optimizer, with the settings of its paper [default: adamw]
    #[arg(long, value_parser = PossibleValuesParser::new(Optimizer::NAMES), help_heading = "Optimizer")]
    optimizer: Option<String>,
    #[command(flatten)]
    settings: OptimizerSettings,
    /// Clip the gradient norm of all parameters together to this value
    #[arg(long, value_name = "NORM", value_parser = positive, help_heading = "Optimizer")]
    clip_norm: Option<f64>,
    /// Scale the loss for gradients too small for f16: dynamic, dynamic:INITIAL, dynamic:INITIAL:STEPS (grows after
    /// STEPS steps without overflow), a fixed number, or off [default: dynamic:65536:2000 for f16, else off]
    #[arg(long, value_name = "SCALE", value_parser = scaling, help_heading = "Optimizer")]
    loss_scale: Option<Scaling>,
    /// Use the last N devices as parameter servers that hold the weights; all others are workers with a replica of the
    /// model each
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    parameter_servers: Option<u32>,
    /// Let servers update after each worker's push, without waiting for others; gradients are late by as many updates
    /// as there are other workers
    #[arg(long, requires = "parameter_servers", help_heading = "Parallelism")]
    asynchronous: bool,
    /// Predict plans by a profile that `altiplano profile` measured on this machine
    #[arg(long, value_name = "FILE", help_heading = "Cluster and batch")]
    profile: Option<PathBuf>,
    /// Plan for what this software can run, as it runs it [default: altiplano]
    #[arg(long, help_heading = "Target")]
    target: Option<TargetName>,
    /// Treat attention as one kernel that never writes its scores [default: auto, by the target's software, the model's
    /// heads and the devices]
    #[arg(long, value_name = "auto|yes|no", value_enum, help_heading = "Target")]
    fused_attention: Option<FusedName>,
    /// Attention FLOPs in the MFU: those that masks leave (computed), or all, as PaLM and Megatron-LM count (full)
    /// [default: computed]
    #[arg(long, value_enum, help_heading = "Target")]
    mfu_convention: Option<ConventionName>,
    /// Prefer the fastest plan, or one GPU if more are hardly faster [default: simplest]
    #[arg(long, help_heading = "Search")]
    prefer: Option<Preference>,
    /// Search only Alpa's space, for comparison
    #[arg(long, help_heading = "Search")]
    search: Option<SearchName>,
    /// Pad sizes that devices do not divide, such as a vocabulary of 50257 to 50304, if the plan is then faster
    /// [default: auto]
    #[arg(long, help_heading = "Search")]
    pad: Option<PadName>,
    /// Send keys and values of attention around a ring: if the plan is then better (auto), never (none), or in this
    /// number of blocks wherever possible [default: auto]
    #[arg(long, value_parser = ring, value_name = "N|auto|none", help_heading = "Memory")]
    ring: Option<Ring>,
    /// Compute the logits of a cross-entropy in chunks of positions to save memory: if the plan is then better (auto),
    /// never (none), or in this number of chunks wherever possible [default: auto]
    #[arg(long, value_parser = loss_chunks, value_name = "N|auto|none", help_heading = "Memory")]
    loss_chunks: Option<LossChunks>,
    /// Allow microbatches although the loss is no mean or sum over samples
    #[arg(long, help_heading = "Cluster and batch")]
    allow_microbatch_semantics: bool,
    /// Cache search results in this folder and reuse them: the plan is the same, and later searches of similar models
    /// are faster
    #[arg(long, value_name = "DIR", help_heading = "Search")]
    cache: Option<PathBuf>,
}

/// Optimizer settings that override those of its paper.
#[derive(Args, Clone, Debug, Default, PartialEq)]
#[command(next_help_heading = "Optimizer")]
pub(crate) struct OptimizerSettings {
    /// Momentum of sgd, rmsprop, lars and larc
    #[arg(long, value_name = "X", value_parser = below_one)]
    momentum: Option<f64>,
    /// Decay of the gradient average per step, of adam, adamw and lamb
    #[arg(long, value_name = "X", value_parser = below_one)]
    beta1: Option<f64>,
    /// Decay of the average of squares per step, of adam, adamw and lamb
    #[arg(long, value_name = "X", value_parser = below_one)]
    beta2: Option<f64>,
    /// Constant added to roots of averages, of all but sgd, lars and larc
    #[arg(long, value_name = "X", value_parser = positive)]
    epsilon: Option<f64>,
    /// Weight decay
    #[arg(long, value_name = "X", value_parser = not_negative)]
    weight_decay: Option<f64>,
    /// Decay of the average of squares per step, of rmsprop
    #[arg(long, value_name = "X", value_parser = below_one)]
    decay: Option<f64>,
    /// Decay of the averages per step, of adadelta
    #[arg(long, value_name = "X", value_parser = below_one)]
    rho: Option<f64>,
    /// Trust coefficient: factor of the ratio of norms, of lars and larc
    #[arg(long, value_name = "X", value_parser = positive)]
    trust: Option<f64>,
}

impl OptimizerSettings {
    /// The given options as typed, the settings that they set, and their values.
    fn given(&self) -> impl Iterator<Item = (&'static str, &'static str, f64)> + use<> {
        let all = [
            ("--momentum", "momentum", self.momentum),
            ("--beta1", "beta1", self.beta1),
            ("--beta2", "beta2", self.beta2),
            ("--epsilon", "epsilon", self.epsilon),
            ("--weight-decay", "weight_decay", self.weight_decay),
            ("--decay", "decay", self.decay),
            ("--rho", "rho", self.rho),
            ("--trust", "trust", self.trust),
        ];
        all.into_iter().filter_map(|(option, name, value)| Some((option, name, value?)))
    }

    /// Applies the given settings.
    ///
    /// # Errors
    /// Fails if the optimizer lacks a setting.
    fn set(&self, optimizer: &mut Optimizer) -> Result<(), Error> {
        for (option, name, value) in self.given() {
            let problem =
                "the optimizer has no such setting; see --help for those that have it, or choose another --optimizer";
            *optimizer.setting(name).ok_or(Error::Option { option, problem })? = value;
        }
        Ok(())
    }
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum TargetName {
    Altiplano,
    Megatron,
    Fsdp,
    Xla,
    Torchtitan,
    Deepspeed,
    /// By the file: fsdp for torch.export archives, xla for StableHLO, else altiplano
    Auto,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum FusedName {
    Auto,
    Yes,
    No,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum ConventionName {
    Computed,
    Full,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum PadName {
    Auto,
    None,
}

fn ring(text: &str) -> Result<Ring, String> {
    match text {
        "auto" => Ok(Ring::Auto),
        "none" => Ok(Ring::None),
        _ => text.parse().map(Ring::Blocks).map_err(|_| "expected a number of blocks, auto or none".to_string()),
    }
}

fn loss_chunks(text: &str) -> Result<LossChunks, String> {
    match text {
        "auto" => Ok(LossChunks::Auto),
        "none" => Ok(LossChunks::None),
        _ => text.parse().map(LossChunks::Count).map_err(|_| "expected a number of chunks, auto or none".to_string()),
    }
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Preference {
    Simplest,
    Fastest,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum SearchName {
    Whole,
    Alpa,
}

impl PlanOptions {
    /// Plans a model, by the profile if there is one.
    pub(crate) fn plan(&self, request: &Request, progress: &dyn Progress) -> Result<Plan, Error> {
        let profile = self.profile.as_deref().map(load_profile).transpose()?;
        let plan = plan_by(request, profile.as_ref(), progress);
        keep_searches(request);
        let plan = plan?;
        say_uncovered(&plan, profile.as_ref())?;
        Ok(plan)
    }

    /// The Pareto frontier of plans in seconds, bytes, devices and price.
    pub(crate) fn frontier(&self, request: &Request, progress: &dyn Progress) -> Result<Vec<Point>, Error> {
        let profile = self.profile.as_deref().map(load_profile).transpose()?;
        let points = frontier_by(request, profile.as_ref(), progress);
        keep_searches(request);
        points
    }

    /// Fails if a profile is given, for plans on other machines, which it does not cover.
    pub(crate) fn expect_no_profile(&self) -> Result<(), Error> {
        match self.profile {
            Some(_) => {
                Err(Error::Option { option: "--profile", problem: "covers only this machine, not several nodes" })
            }
            None => Ok(()),
        }
    }

    /// The planning request of a model file with these options.
    pub(crate) fn request(&self, model: &Path, options: &ModelOptions) -> Result<Request, Error> {
        let (request, warnings) = self.request_quietly(model, options)?;
        warn(&warnings);
        Ok(request)
    }

    /// As [`Self::request`], but returns the remarks on the model for the caller to print.
    pub(crate) fn request_quietly(
        &self,
        model: &Path,
        options: &ModelOptions,
    ) -> Result<(Request, Vec<Warning>), Error> {
        let (request, _, warnings) = self.request_of(model, &read_bytes(model)?, options)?;
        Ok((request, warnings))
    }

    /// As [`Self::request`], for a model file that is already in memory.
    fn request_of(
        &self,
        file: &Path,
        bytes: &[u8],
        options: &ModelOptions,
    ) -> Result<(Request, Arc<Model>, Vec<Warning>), Error> {
        self.request_by(file, Format::of(bytes), options, |import| model_of(file, bytes, import).map(Arc::new))
    }

    /// As [`Self::request`], for a model file that `read` imports.
    pub(crate) fn request_by(
        &self,
        file: &Path,
        format: Format,
        options: &ModelOptions,
        read: impl FnOnce(&ImportOptions) -> Result<Arc<Model>, Error>,
    ) -> Result<(Request, Arc<Model>, Vec<Warning>), Error> {
        let mut cluster = load_cluster(self.cluster.as_deref().unwrap_or("local:4"))?;
        if let Some(file) = &self.devices {
            let devices = load_devices(file)?;
            if !devices.apply(&mut cluster) {
                let (file, names) = (file.display(), devices.names().collect::<Vec<_>>().join(", "));
                let found: Vec<&str> = cluster.groups.iter().map(|g| g.device.name.as_str()).collect();
                complain!(
                    "warning: {file}: it describes {names}, but the cluster has {}; it has no effect",
                    found.join(", ")
                );
            }
        }
        let FixedOptions { tp, pin, .. } = &self.fixed;
        // Only pins have axes of fixed sizes.
        let sizes = if pin.is_empty() { [None, None] } else { [self.fixed.replicas(), *tp] };
        let asked = self.batch_of_model(format);
        let model = read(&ImportOptions { batch: asked, pins: pin.clone(), axis_sizes: sizes, ..options.import() })?;
        let mut warnings = model.warnings.clone();
        if asked.is_none() && format == Format::HuggingFaceConfig {
            warnings.push(Warning::OneSample);
        }
        let ty = model.graph.ty(model.graph.outputs[0]);
        if !model.inference && (ty.rank() != 0 || !ty.dtype.is_float()) {
            return Err(Error::NoLoss { file: file.to_path_buf(), ty: ty.clone() });
        }
        if let Some(update) = model.unknown_update.filter(|_| self.optimizer.is_none()) {
            return Err(Error::UnknownUpdate { file: file.to_path_buf(), update });
        }
        let mut request = altiplano::request(&model, cluster);
        request.batch.global = self.global_batch;
        self.fixed.fix(&mut request)?;
        self.set_training(&mut request, !model.inference, ty.dtype)?;
        request.target = self.target_of(format);
        self.set_space(&mut request)?;
        Ok((request, model, warnings))
    }

    /// The same options without fixed choices.
    pub(crate) fn with_open_choices(&self) -> PlanOptions {
        PlanOptions { fixed: FixedOptions::default(), ..self.clone() }
    }

    /// The files that describe the cluster, with the times of their last change.
    pub fn files(&self) -> Vec<(PathBuf, Option<SystemTime>)> {
        let files = self.cluster.iter().map(PathBuf::from).chain(self.devices.clone());
        let changed = |file: &Path| std::fs::metadata(file).and_then(|of| of.modified()).ok();
        files.map(|file| (file.clone(), changed(&file))).collect()
    }

    /// The batch of a config's model, if one is given. Other files have a batch of their own.
    pub(crate) fn batch_of_model(&self, format: Format) -> Option<u64> {
        let asked = self.global_batch.or(self.fixed.together()).filter(|&batch| batch > 0);
        asked.filter(|_| format == Format::HuggingFaceConfig)
    }

    /// Sets how a step changes the weights, if the model is trained, for a loss of type `dtype`.
    fn set_training(&self, request: &mut Request, trains: bool, dtype: DType) -> Result<(), Error> {
        if !trains {
            let given = [
                ("--optimizer", self.optimizer.is_some()),
                ("--clip-norm", self.clip_norm.is_some()),
                ("--loss-scale", self.loss_scale.is_some()),
            ];
            let given = given.into_iter().filter(|(_, given)| *given).map(|(option, _)| option);
            if let Some(option) = given.chain(self.settings.given().map(|(option, ..)| option)).next() {
                return Err(Error::Option { option, problem: OF_TRAINING });
            }
        }
        if let Some(scaling) = self.loss_scale {
            let is_late = request.training.update == Update::Stale || request.schedule == Some(Schedule::PipeDream);
            request.training.loss_scale = scaling.of(dtype, is_late)?;
        }
        request.training.optimizer =
            self.optimizer.as_deref().and_then(Optimizer::parse).unwrap_or(request.training.optimizer);
        self.settings.set(&mut request.training.optimizer)?;
        request.training.clip_norm = self.clip_norm.or(request.training.clip_norm);
        Ok(())
    }

    /// The software that runs the plan. `auto` takes it from the format of the model.
    fn target_of(&self, format: Format) -> Target {
        match self.target {
            None | Some(TargetName::Altiplano) => Target::Altiplano,
            Some(TargetName::Megatron) => Target::Megatron,
            Some(TargetName::Fsdp) => Target::Fsdp,
            Some(TargetName::Xla) => Target::Xla,
            Some(TargetName::Torchtitan) => Target::Torchtitan,
            Some(TargetName::Deepspeed) => Target::Deepspeed,
            Some(TargetName::Auto) => {
                let (target, kind) = match format {
                    Format::TorchExport => (Target::Fsdp, "a torch.export archive"),
                    Format::StableHlo => (Target::Xla, "StableHLO, as JAX writes it"),
                    _ => (Target::Altiplano, "in no framework's own format"),
                };
                complain!("note: planning for --target {}, since the model is {kind}", target.name());
                target
            }
        }
    }

    /// Sets what is searched, and what a plan may be like.
    fn set_space(&self, request: &mut Request) -> Result<(), Error> {
        if request.target != Target::Altiplano {
            let problem = "must be synchronous with --target: no other software trains with late gradients";
            let late = [("--schedule", request.schedule == Some(Schedule::PipeDream))];
            let late = late.into_iter().chain([("--update", request.training.update == Update::Stale)]);
            if let Some((option, _)) = late.into_iter().find(|(_, given)| *given) {
                return Err(Error::Option { option, problem });
            }
        }
        request.fused_attention = match self.fused_attention {
            None | Some(FusedName::Auto) => None,
            Some(FusedName::No) => Some(false),
            Some(FusedName::Yes) if request.cluster.groups.iter().all(|g| g.device.kind.is_gpu()) => Some(true),
            Some(FusedName::Yes) => {
                let problem = "yes needs GPUs: CPU workers write attention scores";
                return Err(Error::Option { option: "--fused-attention", problem });
            }
        };
        request.mfu_convention = match self.mfu_convention {
            None | Some(ConventionName::Computed) => MfuConvention::Computed,
            Some(ConventionName::Full) => MfuConvention::Full,
        };
        request.fastest = self.prefer == Some(Preference::Fastest);
        request.pad = self.pad != Some(PadName::None);
        request.ring = self.ring.unwrap_or_default();
        request.loss_chunks = self.loss_chunks.unwrap_or_default();
        if self.search == Some(SearchName::Alpa) {
            request.search = SearchKind::Alpa;
        }
        request.servers = self.parameter_servers.map(|count| OverServers { count, asynchronous: self.asynchronous });
        if request.servers.is_some() && self.search.is_some() {
            let problem = "conflicts with --parameter-servers, which leaves nothing to search";
            return Err(Error::Option { option: "--search", problem });
        }
        request.allow_microbatch_semantics = self.allow_microbatch_semantics;
        request.cache = self.cache.as_deref().map(open_cache).transpose()?;
        Ok(())
    }
}

pub(crate) const OF_TRAINING: &str = "is a training option, but --loss none does not train";

/// Predicts a plan by the profile in a file.
pub(crate) fn predict_by(plan: &mut Plan, file: &Path) -> Result<Profile, Error> {
    let profile = load_profile(file)?;
    repredict(plan, &profile)?;
    say_uncovered(plan, Some(&profile))?;
    Ok(profile)
}

/// Warns on stderr about the parts of a plan that a profile does not cover.
fn say_uncovered(plan: &Plan, profile: Option<&Profile>) -> Result<(), Error> {
    if let Some(profile) = profile {
        uncovered(plan, profile)?.iter().for_each(|line| complain!("warning: {line}"));
    }
    Ok(())
}

/// A plan file, or a model file with the options to plan it.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanOrModel {
    /// A plan (altiplano.plan JSON), or a model to plan first (StableHLO text, .pt2, ONNX, config.json or
    /// altiplano.graph JSON)
    #[arg(value_name = "PLAN|MODEL")]
    pub file: PathBuf,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    plan: PlanOptions,
}

impl PlanOrModel {
    /// Fails unless the file is a plan, which all ranks must share; a plan that each finds anew may differ.
    pub(crate) fn expect_plan(&self, option: &'static str) -> Result<(), Error> {
        if Format::of(&read_bytes(&self.file)?) == Format::PlanJson {
            return Ok(());
        }
        Err(Error::Option { option, problem: "takes a plan file, which `altiplano plan MODEL -o PLAN` writes" })
    }

    /// The measured profile for predictions, if given.
    pub(crate) fn profile(&self) -> Result<Option<Profile>, Error> {
        self.plan.profile.as_deref().map(load_profile).transpose()
    }

    /// The plan in the file, or one planned for its model, without the table of alternatives. Also the training step of
    /// a model that is one.
    pub(crate) fn plan_and_step(&self) -> Result<(Plan, Option<GivenStep>), Error> {
        let bytes = read_bytes(&self.file)?;
        if Format::of(&bytes) == Format::PlanJson {
            let of_plan =
                PlanOptions { profile: None, clip_norm: None, loss_scale: None, cache: None, ..self.plan.clone() };
            let fixed = self.model != ModelOptions::default() || of_plan != PlanOptions::default();
            if fixed {
                return Err(Error::Option {
                    option: "PLAN",
                    problem: "a plan file already has a cluster, a model and degrees; planning options need a model file",
                });
            }
            let mut plan = plan_of(&self.file, &bytes)?;
            if self.plan.clip_norm.is_some() && !plan.schedule.trains() {
                return Err(Error::Option { option: "--clip-norm", problem: OF_TRAINING });
            }
            plan.clip_norm = self.plan.clip_norm.or(plan.clip_norm);
            if self.plan.loss_scale.is_some() && !plan.schedule.trains() {
                return Err(Error::Option { option: "--loss-scale", problem: OF_TRAINING });
            }
            if let Some(scaling) = self.plan.loss_scale {
                let loss = plan.graph.ty(plan.graph.outputs[0]).dtype;
                plan.loss_scale = scaling.of(loss, plan.staleness() > 0)?;
            }
            if plan.servers.is_some() && plan.loss_scale.is_some() {
                let problem = "conflicts with parameter servers, which do not tell workers when to change it";
                return Err(Error::Option { option: "--loss-scale", problem });
            }
            if plan.updates_of_step() > 1 && plan.clip_norm.is_some() {
                let problem = "needs the norm of all gradients at once, but the plan's servers update after each push";
                return Err(Error::Option { option: "--clip-norm", problem });
            }
            if let Some(file) = &self.plan.profile {
                predict_by(&mut plan, file)?;
            }
            return Ok((plan, None));
        }
        let (mut request, model, warnings) = self.plan.request_of(&self.file, &bytes, &self.model)?;
        warn(&warnings);
        request.baselines = false;
        let bar = Bar::new();
        Ok((self.plan.plan(&request, &bar)?, model.given.clone()))
    }
}

/// Options of how a run starts and what it trains on.
#[derive(Args, Clone)]
pub(crate) struct Start {
    /// Batches: .safetensors with tensors named after the inputs, a folder of such files, .npy, or token ids (.u16,
    /// .u32) [default: synthetic]
    #[arg(long, value_name = "FILE|DIR")]
    data: Option<PathBuf>,
    /// Type of the ids in a --data file of bare little-endian ids
    #[arg(long, value_name = "TYPE", requires = "data", value_enum)]
    token_type: Option<TokenType>,
    /// Shuffle samples with this seed, differently in each epoch [default seed: 0]
    #[arg(long, value_name = "SEED", requires = "data", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    shuffle: Option<u64>,
    /// Start from these weights: .safetensors with tensors named after the parameters, or an ONNX model
    #[arg(long, value_name = "FILE", conflicts_with = "init")]
    weights: Option<PathBuf>,
    /// Initialise weights with this seed
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    init: u64,
    /// Learning rate [default: that of the model's training step, or 0.001]
    #[arg(long, value_name = "X", value_parser = learning_rate, allow_hyphen_values = true)]
    lr: Option<f64>,
    /// Devices to run on; `altiplano devices` lists them
    #[arg(long, value_name = "DEVICE", value_enum, default_value_t = DeviceKind::Cpu)]
    device: DeviceKind,
    /// The PJRT plugin of `--device xla` [default: that of ALTIPLANO_PJRT_PLUGIN or of the Python environment]
    #[arg(long, value_name = "FILE", requires = "device")]
    plugin: Option<PathBuf>,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum TokenType {
    U16,
    U32,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
pub(crate) enum DeviceKind {
    Cpu,
    Cuda,
    /// The devices of a PJRT plugin of XLA, whatever they are
    Xla,
    /// CPU devices of XLA, by a PJRT plugin
    #[value(name = "xla:cpu")]
    XlaCpu,
    /// NVIDIA's GPUs by XLA
    #[value(name = "xla:cuda")]
    XlaCuda,
    /// AMD's GPUs by XLA
    #[value(name = "xla:rocm")]
    XlaRocm,
    /// TPUs
    #[value(name = "xla:tpu")]
    XlaTpu,
}

impl Start {
    /// The options of GPUs, if requested. Unusable GPUs are an error before anything is planned.
    pub(crate) fn cuda(&self) -> Result<Option<CudaOptions>, Error> {
        (self.kind() == Kind::Gpus).then(gpus).transpose()
    }

    /// The plugin of XLA's devices, if these are requested: the one that is named, or the one that is found.
    pub(crate) fn xla(&self) -> Result<Option<XlaOptions>, Error> {
        self.device.xla(self.plugin.as_deref())
    }

    pub(crate) fn kind(&self) -> Kind {
        self.device.kind()
    }

    /// Fails if GPUs are requested for work that does not run on them.
    pub(crate) fn expect_no_cuda(&self) -> Result<(), Error> {
        if self.kind() != Kind::Gpus {
            return Ok(());
        }
        Err(Error::Option {
            option: "--device",
            problem: "only plans that train run on GPUs so far, with `run` and `verify`",
        })
    }

    /// `step` is the training step from which the model was extracted, if any.
    pub(crate) fn training(self, steps: u64, step: Option<&GivenStep>) -> Training {
        let learning_rate = self.lr.or(step.and_then(|s| s.learning_rate)).unwrap_or(1e-3);
        Training {
            steps,
            learning_rate,
            seed: self.init,
            weights: self.weights,
            data: DataOptions {
                file: self.data,
                token_type: self.token_type.map(|token| match token {
                    TokenType::U16 => DType::U16,
                    TokenType::U32 => DType::U32,
                }),
                shuffle: self.shuffle,
            },
            ..Training::default()
        }
    }
}

impl DeviceKind {
    /// The plugin of XLA's devices, if they are of XLA: the one that is named, or the one that is found.
    pub(crate) fn xla(self, plugin: Option<&Path>) -> Result<Option<XlaOptions>, Error> {
        let platform = match self {
            DeviceKind::Cpu | DeviceKind::Cuda if plugin.is_some() => {
                let problem = "applies only to XLA's devices; it needs --device xla";
                return Err(Error::Option { option: "--plugin", problem });
            }
            DeviceKind::Cpu | DeviceKind::Cuda => return Ok(None),
            DeviceKind::Xla => None,
            DeviceKind::XlaCpu => Some(Platform::Cpu),
            DeviceKind::XlaCuda => Some(Platform::Cuda),
            DeviceKind::XlaRocm => Some(Platform::Rocm),
            DeviceKind::XlaTpu => Some(Platform::Tpu),
        };
        let plugin = match platform {
            Some(platform) => find(plugin, platform)?,
            None => find_any(plugin)?,
        };
        Ok(Some(XlaOptions {
            plugin,
            platform,
            check_nan: false,
            record: false,
            memory_bytes: None,
            cache: program_cache(),
        }))
    }

    pub(crate) fn kind(self) -> Kind {
        match self {
            DeviceKind::Cpu => Kind::Cpus,
            DeviceKind::Cuda => Kind::Gpus,
            _ => Kind::Xla,
        }
    }
}

/// The GPUs of this machine.
///
/// # Errors
/// Fails if programs cannot run on them.
pub(crate) fn gpus() -> Result<CudaOptions, Error> {
    let search = cuda_search();
    Survey::of(&search).usable()?;
    Ok(CudaOptions { search, cache: kernel_cache(), ..CudaOptions::default() })
}

/// The folder of compiled kernels in the user's cache folder, if there is one.
fn kernel_cache() -> Option<PathBuf> {
    Some(user_cache()?.join("altiplano/kernels"))
}

/// The folder of programs that XLA compiled. There is none if `XLA_FLAGS` changes what XLA compiles.
fn program_cache() -> Option<PathBuf> {
    std::env::var_os("XLA_FLAGS").is_none().then(user_cache)?.map(|folder| folder.join("altiplano/programs"))
}

fn user_cache() -> Option<PathBuf> {
    let of_user = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let caches = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    caches.or_else(of_user)
}

/// Locations of CUDA's libraries: first `ALTIPLANO_CUDA`, then the Python environment in use.
pub(crate) fn cuda_search() -> Search {
    let mut folders: Vec<PathBuf> =
        std::env::var_os("ALTIPLANO_CUDA").map(|all| std::env::split_paths(&all).collect()).unwrap_or_default();
    folders.extend(site_packages());
    Search { folders }
}

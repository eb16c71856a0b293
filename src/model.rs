//! Turns a file into a model that can be planned. The format is recognised by content. Arguments become parameters and
//! inputs, the sizes that scale with the batch are found, and the graph is simplified.

mod file;

pub use file::{Format, read_bytes};

use crate::arguments::{self, Role, Stated};
use crate::error::{Error, Names};
use crate::loss::{self, Attached};
use crate::pins::{self, NamedPin};
use crate::precision::with_precision;
use crate::units::smaller;
use altiplano_import::{huggingface, onnx, stablehlo};
use altiplano_ir::batch::{Batched, Coupling, Doubt, LossKind, find_batch, rebatch, settle};
use altiplano_ir::cluster::Routing;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::names::stack_of;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Downscaling;
use altiplano_ir::simplify::simplify;
use altiplano_planner::timings::{Phase, part_of, timed};
use altiplano_transforms::accumulation::part_of_batch;
use altiplano_transforms::downscale::{Goal, downscale};
use altiplano_transforms::eight_bit::in_eight_bits;
use altiplano_transforms::experts;
use altiplano_transforms::losses_of_step::{joined, other_losses};
use altiplano_transforms::rewrite::rewrite;
use altiplano_transforms::training_step::{self, Fitted, TrainingStep};
use altiplano_transforms::unstack::unstack;
use file::{Read, SEVERAL, graph_of, name_of};
use std::path::{Path, PathBuf};

/// Import options: facts that a model file does not contain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportOptions {
    /// Trained arguments, inputs of each step, and frozen parameters; see [`arguments::Stated`].
    pub params: Vec<String>,
    pub inputs: Vec<String>,
    pub freeze: Vec<String>,
    /// Parameters excluded from weight decay, selected in the same way.
    pub no_decay: Vec<String>,
    /// The batch dimension of an input, or `None` if it has none. Default: dimension 0 of each.
    pub batch_dims: Vec<(String, Option<usize>)>,
    /// The same model traced at another batch size, which determines what scales with the batch.
    pub also: Option<PathBuf>,
    /// Values through which no gradient flows: names of leaves or ops, or `%12`.
    pub stop_gradients: Vec<String>,
    /// The result that is the loss, by name or position. Default: the result named `loss`, or the first. The words
    /// `cross-entropy` and `mse` attach a loss to a model without one, and `none` plans to run it without training.
    pub loss: Option<String>,
    /// Ignore the layouts that the model requests.
    pub ignore_shardings: bool,
    /// Layouts that the user requests, and the fixed sizes of the axes `data` and `tensor`, if any.
    pub pins: Vec<NamedPin>,
    pub axis_sizes: [Option<u32>; 2],
    /// Plan the ops of the file without recognising composites.
    pub as_written: bool,
    /// Floating-point type of the computation; default: the traced types.
    pub precision: Option<DType>,
    /// Tokens per sample of a config's model; default: chosen by [`huggingface`].
    pub sequence: Option<u64>,
    /// Samples per batch of a config's model; default: one.
    pub batch: Option<u64>,
    /// Capacity factor of the experts of a config's model; see [`huggingface::ConfigOptions::capacity_factor`].
    pub capacity_factor: Option<f64>,
    /// Values of sizes that the file leaves open, by name.
    pub sizes: Vec<(String, u64)>,
    /// Downscale the model to this size.
    pub reduce: Option<Goal>,
}

impl ImportOptions {
    /// The loss to attach to a model without one.
    fn attached(&self) -> Option<Attached> {
        self.loss.as_deref().and_then(Attached::of)
    }
}

/// A model that can be planned.
#[derive(Clone, Debug)]
pub struct Model {
    /// File name without its extension.
    pub name: String,
    /// Forward graph, simplified, with its batch found. Its first output is the loss.
    pub graph: Graph,
    /// True if the model is run and not trained: its outputs are its results.
    pub inference: bool,
    pub loss: LossKind,
    /// The reason why the graph keeps its traced batch, if it does.
    pub doubt: Option<Doubt>,
    pub stop_gradients: Vec<ValueId>,
    /// The optimizer of a whole training step, with its learning rate.
    pub optimizer: Option<Fitted>,
    /// For a whole training step with an unknown update, a description of what is unknown.
    pub unknown_update: Option<&'static str>,
    /// The gradients of a whole training step as it computes them itself.
    pub given: Option<GivenStep>,
    /// The reduction relative to the model in the file.
    pub reduction: Option<Downscaling>,
    /// How tokens are routed to experts, if the file says so.
    pub routing: Option<Routing>,
    /// Remarks on the import for the user.
    pub warnings: Vec<Warning>,
}

/// The loss and the gradients of a whole training step, for comparison with a plan's.
#[derive(Clone, Debug)]
pub struct GivenStep {
    /// A graph whose outputs are the loss and a gradient for each of `parameters`.
    pub graph: Graph,
    /// Parameter names of the function, in which the layers of a loop are stacked.
    pub parameters: Vec<String>,
    /// The learning rate of the first step, if the optimizer is known.
    pub learning_rate: Option<f64>,
}

/// A remark on an import that does not stop it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Warning {
    #[error("{doubt}; the batch stays as traced. {remedy}")]
    Batch { doubt: Doubt, remedy: String },
    #[error("{}", describe_step(*.losses, *.parameters, [*.frozen, *.no_decay], .optimizer, *.changed))]
    TrainingStep {
        losses: usize,
        parameters: usize,
        frozen: usize,
        no_decay: usize,
        optimizer: Option<Fitted>,
        changed: bool,
    },
    #[error("the model returns {0} values; the first is taken as the loss, the others are dropped")]
    OtherResults(usize),
    #[error(
        "the loss is no mean or sum over samples{}, so the batch is not split into microbatches unless --allow-microbatch-semantics",
        .0.as_ref().map_or(String::new(), |coupling| format!(", since {coupling} makes samples depend on each other or on their positions"))
    )]
    LossKind(Option<Coupling>),
    #[error("{0}")]
    Config(huggingface::Note),
    #[error("{0}")]
    Onnx(onnx::Note),
    #[error("{0}")]
    StableHlo(stablehlo::Note),
    #[error(
        "the program was decomposed (run_decompositions), which drops detach and no_grad: gradients flow where the model may stop them; export without it, or say where with --stop-gradient NAME"
    )]
    Decomposed,
    #[error("the file leaves sizes open, which are set to {}; change them by --size NAME=N", .0.join(", "))]
    OpenSizes(Vec<String>),
    #[error("the batch is set to one sample; change it by --global-batch N")]
    OneSample,
    #[error(
        "the file has version {found} of torch.export's format, but {known} is the newest supported one: parts of it may be misread"
    )]
    Newer { found: i64, known: i64 },
    #[error("reduced: {}", smaller(.0))]
    Reduced(Downscaling),
}

impl Warning {
    /// Returns whether the remark is only information, as opposed to a warning.
    pub fn is_note(&self) -> bool {
        matches!(
            self,
            Warning::TrainingStep { optimizer: Some(_), .. }
                | Warning::Config(_)
                | Warning::Onnx(onnx::Note::ToldApart { .. } | onnx::Note::Restored { .. })
                | Warning::Onnx(onnx::Note::SameForEverySample { .. } | onnx::Note::Counts { .. })
                | Warning::OpenSizes(_)
                | Warning::OneSample
                | Warning::Reduced(_)
        )
    }
}

fn describe_step(
    losses: usize,
    parameters: usize,
    [frozen, no_decay]: [usize; 2],
    optimizer: &Option<Fitted>,
    changed: bool,
) -> String {
    let update = match optimizer {
        Some(f) => {
            let schedule = if f.scheduled { " that follows a schedule" } else { "" };
            let clip = f.clip_norm.map_or(String::new(), |most| format!(", with gradients clipped at norm {most}"));
            let mask = match no_decay {
                0 => String::new(),
                n => format!(", with {n} parameter{} left out of weight decay", if n == 1 { "" } else { "s" }),
            };
            format!("{} with a learning rate of {}{schedule}{clip}{mask}", f.optimizer.name(), f.learning_rate)
        }
        None => unknown_update(changed).to_string(),
    };
    let s = if parameters == 1 { "" } else { "s" };
    let frozen = match frozen {
        0 => String::new(),
        n => format!(" ({n} more stay as they are)"),
    };
    let (loss, planned) = match losses {
        1 => ("a loss".to_string(), "Its loss is planned"),
        n => (
            format!("{n} losses with parameters of their own"),
            "Their sum is planned, in which no loss trains the parameters of another",
        ),
    };
    format!(
        "the function is a whole training step: {loss}, gradients of {parameters} parameter{s}{frozen} and {update}. {planned}, and the plan's own gradients and updates replace the step's"
    )
}

/// Describes an update that matches no known optimizer.
fn unknown_update(changed: bool) -> &'static str {
    match changed {
        true => {
            "gradients that are changed before the update by more than a clip of their norm, which a plan leaves out"
        }
        false => "an update that is none of the known optimizers",
    }
}

/// Reads a model file.
///
/// ```no_run
/// let model = altiplano::load_model("gpt.mlir".as_ref(), &altiplano::ImportOptions::default())?;
/// println!("{} parameters", model.graph.parameters().count());
/// # Ok::<(), altiplano::Error>(())
/// ```
pub fn load_model(file: &Path, options: &ImportOptions) -> Result<Model, Error> {
    model_of(file, &read_bytes(file)?, options)
}

/// As [`load_model`], for a file that is already in memory; a pipe can be read only once.
pub fn model_of(file: &Path, bytes: &[u8], options: &ImportOptions) -> Result<Model, Error> {
    let read = |options: &ImportOptions| loss_of(file, traced(file, bytes, options)?, options);
    timed(Phase::Import, || load(file, read(options)?, read, options, false))
}

/// As [`load_model`], but with all results of the function, not only the loss: the output of `altiplano import`.
pub fn load_all_results(file: &Path, options: &ImportOptions) -> Result<Model, Error> {
    let bytes = read_bytes(file)?;
    let read = |options: &ImportOptions| {
        let Traced { graph, aside, .. } = traced(file, &bytes, options)?;
        Ok(Loss { states: states(&graph), graph, step: None, losses: 1, aside })
    };
    load(file, read(options)?, read, options, true)
}

/// A graph as read, and its leaves in the function's order.
struct Traced {
    graph: Graph,
    arguments: Vec<ValueId>,
    /// The function's names of its results, if it has any.
    results: Vec<Option<String>>,
    aside: Aside,
}

/// Other findings of reading a file.
#[derive(Default)]
struct Aside {
    /// Assumptions made.
    notes: Vec<Warning>,
    /// Samples per batch, if the graph was built with another number.
    batch: Option<u64>,
    /// Inputs without a batch that are stored with the model.
    buffers: Vec<String>,
    /// Sizes that give the same graph with another batch, if the file leaves its batch open.
    other_sizes: Option<Vec<(String, u64)>>,
    /// How tokens are routed to experts.
    routing: Option<Routing>,
}

/// The part of a file that is planned: the loss, the step to which it belongs, and inputs that the function returns
/// updated.
struct Loss {
    graph: Graph,
    step: Option<(TrainingStep, GivenStep)>,
    /// The number of losses whose sum it is.
    losses: usize,
    states: Vec<String>,
    aside: Aside,
}

fn leaf_name(graph: &Graph, v: ValueId) -> String {
    match &graph.node(v).op {
        Op::Input(input) => input.name.clone(),
        Op::Parameter(parameter) => parameter.name.clone(),
        _ => String::new(),
    }
}

fn role(graph: &Graph, v: ValueId) -> Role {
    match &graph.node(v).op {
        Op::Parameter(parameter) if parameter.frozen => Role::Frozen,
        Op::Parameter(_) => Role::Trained,
        _ => Role::Given,
    }
}

/// Leaves that the function returns updated.
fn states(graph: &Graph) -> Vec<String> {
    training_step::updated_leaves(graph).into_iter().map(|v| leaf_name(graph, v)).collect()
}

/// Extracts the loss of a whole training step, and the rest of the step. Any other graph is kept whole. Losses with
/// parameters of their own become their sum. Other steps with several losses are rejected: their gradients are not
/// those of one. So are those of which the user names a loss.
fn loss_of(file: &Path, traced: Traced, options: &ImportOptions) -> Result<Loss, Error> {
    let Traced { mut graph, arguments, results, mut aside } = traced;
    let chosen = !options.params.is_empty()
        || !options.inputs.is_empty()
        || !options.no_decay.is_empty()
        || options.attached().is_some();
    let step =
        if chosen || graph.outputs.len() < 2 { None } else { training_step::recognise(&graph, &arguments, &results) };
    // The layers of a loop are planned like separate ones, but the experts of a layer stay together.
    let states = states(&graph);
    let Some(mut step) = step else {
        return Ok(Loss { graph: unstack(&experts::recognise(&graph)), step: None, losses: 1, states, aside });
    };
    let others = other_losses(&graph, &arguments, &step);
    let all = match options.loss.is_none() && !others.is_empty() {
        true => joined(&graph, &arguments, &step, &others),
        false => None,
    };
    let losses = 1 + others.len();
    if let Some(all) = all {
        (graph, step) = all;
    } else if let Some(other) = others.first() {
        let name = |at: Option<usize>| {
            let said = at.and_then(|at| results.get(at).cloned().flatten());
            said.unwrap_or_else(|| at.map_or(String::new(), |at| at.to_string()))
        };
        return Err(Error::SeveralLosses {
            file: file.to_path_buf(),
            loss: name(graph.outputs.iter().position(|o| *o == step.loss)),
            other: name(Some(other.output)),
            parameters: Names(other.parameters.iter().map(|p| leaf_name(&graph, *p)).collect()),
        });
    }
    let compared = step.parameters.iter().filter(|p| p.gradient.is_some());
    let parameters = compared.map(|p| leaf_name(&graph, p.parameter)).collect();
    let learning_rate = step.optimizer.map(|f| f.learning_rate);
    let given = GivenStep { graph: step.gradient_graph(&graph), parameters, learning_rate };
    let mut loss = step.loss_graph(&graph);
    // A plan has its own microbatches.
    if let Some((part, batch)) = part_of_batch(&loss) {
        loss = part;
        aside.batch = aside.batch.or(Some(batch));
    }
    Ok(Loss { graph: unstack(&experts::recognise(&loss)), step: Some((step, given)), losses, states, aside })
}

fn load(
    file: &Path,
    Loss { graph: traced, step, losses, mut states, aside }: Loss,
    read: impl Fn(&ImportOptions) -> Result<Loss, Error>,
    options: &ImportOptions,
    all_results: bool,
) -> Result<Model, Error> {
    let results = traced.outputs.len();
    states.extend(aside.buffers);
    let batched = batched(file, &traced, aside.other_sizes, &states, read, options)?;
    let Batched { mut graph, mut loss, coupling, doubt } = batched;
    let inference = options.attached() == Some(Attached::Nothing);
    if inference {
        // If each result belongs to a sample, concatenate those of the microbatches.
        let by_sample = graph.outputs.iter().all(|o| graph.node(*o).batch_dims != 0);
        loss = if by_sample { LossKind::Mean } else { LossKind::Other };
    }
    if let Some(batch) = aside.batch {
        graph = rebatch(&graph, batch).map_err(|value| Error::rebatch(&graph, batch, value))?;
    }
    if !all_results && !inference {
        graph.outputs.truncate(1);
    }
    // A downscaled model uses single precision, since rounding would hide mistakes.
    if let Some(precision) = options.precision.or(options.reduce.map(|_| DType::F32)) {
        graph = with_precision(&graph, precision.cotangent()).map_err(|error| Error::Precision { error })?;
    }
    let graph = timed(Phase::Rewriting, || simplify(&graph));
    // Keep values with a stopped gradient. A number names a value of the printed graph, which exists anyway.
    let named: Vec<String> = options.stop_gradients.iter().filter(|name| !name.starts_with('%')).cloned().collect();
    let kept = find_values(&graph, &named)?;
    let rewritten = || part_of(Phase::Rewriting, || rewrite(&graph, &kept));
    let mut graph = if options.as_written { graph } else { rewritten() };
    pins::apply(&mut graph, &options.pins, options.axis_sizes)?;
    let mut graph = graph.with_free_pins();
    if options.precision.is_some_and(DType::is_eight_bit_float) {
        let eight_bit = in_eight_bits(&graph).map_err(|error| Error::Precision { error })?;
        graph = eight_bit.ok_or(Error::NoProductsInEightBits)?;
    }
    let mut stop_gradients = find_values(&graph, &options.stop_gradients)?;
    let mut reduction = None;
    if let Some(goal) = &options.reduce {
        let reduced = downscale(&graph, goal);
        stop_gradients = stop_gradients.into_iter().filter_map(|v| reduced.map[v.index()]).collect();
        stop_gradients.sort();
        stop_gradients.dedup();
        graph = reduced.graph;
        reduction = Some(reduced.downscaling);
    }
    let mut warnings: Vec<Warning> = aside.notes;
    let optimizer = step.as_ref().and_then(|(s, _)| s.optimizer);
    let unknown_update = step.as_ref().filter(|(s, _)| s.optimizer.is_none()).map(|(s, _)| unknown_update(s.changed));
    warnings.extend(step.as_ref().map(|(s, _)| Warning::TrainingStep {
        losses,
        parameters: s.parameters.len(),
        frozen: s.frozen.len(),
        no_decay: s.no_decay.len(),
        optimizer,
        changed: s.changed,
    }));
    // The step's own gradients are those of the model before any reduction.
    let given = step.map(|(_, given)| given).filter(|_| reduction.is_none());
    // Warn about other results only for a loss; planning anything else is rejected.
    let result = graph.ty(graph.outputs[0]);
    let trains = !inference && result.rank() == 0 && result.dtype.is_float();
    warnings.extend((results > 1 && !all_results && trains).then_some(Warning::OtherResults(results)));
    warnings.extend(reduction.map(Warning::Reduced));
    warnings.extend(doubt.clone().map(|doubt| Warning::Batch { doubt, remedy: batch_remedy(file, &traced, options) }));
    warnings.extend((loss == LossKind::Other && doubt.is_none() && trains).then_some(Warning::LossKind(coupling)));
    Ok(Model {
        name: name_of(file),
        stop_gradients,
        graph,
        inference,
        loss,
        doubt,
        optimizer,
        unknown_update,
        given,
        reduction,
        routing: aside.routing,
        warnings,
    })
}

/// Finds what scales with the batch: by a second graph if there is one, else by trying dimensions of the inputs.
fn batched(
    file: &Path,
    traced: &Graph,
    other_sizes: Option<Vec<(String, u64)>>,
    states: &[String],
    read: impl Fn(&ImportOptions) -> Result<Loss, Error>,
    options: &ImportOptions,
) -> Result<Batched, Error> {
    // If a file leaves its batch open, two graphs determine what scales with it.
    let settled = match other_sizes.filter(|_| options.also.is_none() && options.batch_dims.is_empty()) {
        Some(sizes) => settle(traced, &read(&ImportOptions { sizes, ..options.clone() })?.graph).ok(),
        None => None,
    };
    Ok(match (&options.also, settled) {
        (None, Some(settled)) => settled,
        (None, None) => first_without_doubt(traced, &batch_dims(traced, &options.batch_dims, states)?, options),
        (Some(also), _) => {
            let second = loss_of(also, read_traced(also, options)?, options)?.graph;
            settle(traced, &second).map_err(|error| Error::Settle {
                file: file.to_path_buf(),
                also: also.clone(),
                error: Box::new(error),
            })?
        }
    })
}

/// Suggests options if it is unclear which sizes scale with the batch. It names the assumed batch dimension, and how to
/// state or demonstrate another.
fn batch_remedy(file: &Path, graph: &Graph, options: &ImportOptions) -> String {
    let batched = |(v, name): (ValueId, &str)| {
        let said = options.batch_dims.iter().rev().find(|(n, _)| n == name).map(|(_, dim)| *dim);
        let dim = said.unwrap_or((graph.ty(v).rank() > 0).then_some(0))?;
        Some((name.to_string(), dim, *graph.shape(v).get(dim)?))
    };
    let Some((name, dim, size)) = graph.inputs().find_map(batched) else { return String::new() };
    let ending = file.extension().map_or(String::new(), |e| format!(".{}", e.to_string_lossy()));
    let open = match ending.as_str() {
        ".pt2" => format!(
            ", or leave it open: torch.export.export(model, inputs, dynamic_shapes={{'{name}': {{{dim}: torch.export.Dim('batch', min=2)}}, ..}})"
        ),
        ".mlir" => ", or leave it open: jax.export with jax.export.symbolic_shape('batch')".to_string(),
        ".onnx" => format!(", or leave it open: dynamic_axes={{'{name}': {{{dim}: 'batch'}}}}"),
        _ => String::new(),
    };
    format!(
        "Dimension {dim} of '{name}' ({size}) is assumed to be the batch; name another with --batch-dim {name}=DIM, give the model traced at another batch size too (--also OTHER{ending}){open}"
    )
}

/// Reads the traced graph with its parameters identified, and nothing else changed.
fn read_traced(file: &Path, options: &ImportOptions) -> Result<Traced, Error> {
    traced(file, &read_bytes(file)?, options)
}

fn traced(file: &Path, bytes: &[u8], options: &ImportOptions) -> Result<Traced, Error> {
    let Read { mut graph, arguments, mut results, mut aside } = graph_of(file, bytes, options)?;
    if options.ignore_shardings {
        graph.pins.clear();
    }
    let attached = options.attached();
    if attached.is_none() {
        loss_first(&mut graph, &mut results, options.loss.as_deref())?;
    }
    if let Some(error) = graph.verify().into_iter().next() {
        return Err(Error::Graph { file: file.to_path_buf(), error: Box::new(error) });
    }
    let values: Vec<ValueId> = arguments.iter().map(|a| a.value).collect();
    let said = graph.parameters().next().is_some();
    let wrong = |error| Error::Arguments { file: file.to_path_buf(), error: Box::new(error) };
    let stated = Stated { params: &options.params, inputs: &options.inputs, freeze: &options.freeze };
    let known = |graph: &Graph| -> Vec<Role> { arguments.iter().map(|a| role(graph, a.value)).collect() };
    let chosen = !options.params.is_empty() || !options.inputs.is_empty() || attached.is_some();
    if !said && !chosen {
        // A whole training step itself shows what it trains.
        let freeze = Stated { freeze: &options.freeze, ..Stated::default() };
        // Weights that it does not return updated are recognised by name alone.
        let updated = training_step::updated_leaves(&graph);
        let mut roles = known(&graph);
        for (role, argument) in roles.iter_mut().zip(&arguments) {
            if !updated.contains(&argument.value) && arguments::is_frozen_by_name(argument) {
                *role = Role::Frozen;
            }
        }
        let frozen = arguments::roles(&arguments, Some(&roles), freeze).map_err(wrong)?;
        let step = arguments::with_roles(&graph, &arguments, &frozen);
        if options.no_decay.is_empty() && training_step::recognise(&step, &values, &results).is_some() {
            return Ok(Traced { graph: step, arguments: values, results, aside });
        }
    }
    let said = said.then(|| known(&graph));
    let roles = arguments::roles(&arguments, said.as_deref(), stated).map_err(wrong)?;
    let mut graph = arguments::with_roles(&graph, &arguments, &roles);
    arguments::without_decay(&mut graph, &arguments, &options.no_decay).map_err(wrong)?;
    attach(&mut graph, attached, &mut aside.batch)?;
    Ok(Traced { graph, arguments: values, results, aside })
}

/// Attaches a loss if requested. With a batch of one sample, the batch sizes of the attached part could not be
/// recognised. So the graph is first scaled to several samples, if possible, and `batch` restores it.
fn attach(graph: &mut Graph, attached: Option<Attached>, batch: &mut Option<u64>) -> Result<(), Error> {
    let Some(attached) = attached else { return Ok(()) };
    if graph.batch == 1
        && let Ok(several) = rebatch(graph, SEVERAL)
    {
        *graph = several;
        *batch = batch.or(Some(1));
    }
    loss::attach(graph, attached)
}

/// Moves the loss before the other results: the one that the user names or, among several scalars, the one that the
/// function calls a loss.
fn loss_first(graph: &mut Graph, results: &mut [Option<String>], said: Option<&str>) -> Result<(), Error> {
    let key =
        |name: &str| name.trim_end_matches(['\'', ']', '"']).rsplit(['\'', '[', '.', '"']).next().map(str::to_string);
    let scalar = |i: &usize| graph.ty(graph.outputs[*i]).rank() == 0 && graph.ty(graph.outputs[*i]).dtype.is_float();
    let named = |i: &usize, wanted: &str| matches!(results.get(*i), Some(Some(name)) if name == wanted || key(name).as_deref() == Some(wanted));
    let mut all = 0..graph.outputs.len();
    let at = match said {
        None => {
            let called = |word: &&str| all.clone().find(|i| scalar(i) && named(i, word));
            let mut scalars = all.clone().filter(scalar);
            let only = scalars.next().filter(|_| scalars.next().is_none());
            ["loss", "total_loss"].iter().find_map(called).or(only)
        }
        Some(said) => {
            let position = said.parse::<usize>().ok().filter(|&i| i < graph.outputs.len());
            let found = all.find(|i| named(i, said)).or(position);
            Some(found.ok_or_else(|| {
                let results =
                    (0..).zip(results.iter()).map(|(i, name)| name.clone().unwrap_or(format!("{i}"))).collect();
                Error::UnknownResult { name: said.to_string(), results: Names(results) }
            })?)
        }
    };
    if let Some(at) = at.filter(|&at| at > 0) {
        graph.outputs[..=at].rotate_right(1);
        results[..=at].rotate_right(1);
    }
    Ok(())
}

/// Determines what scales with the batch. A graph file's own statement takes precedence if it covers more than the
/// analysis.
fn found_batch(graph: &Graph, dims: &[Option<usize>], options: &ImportOptions) -> Batched {
    let found = find_batch(graph, dims);
    match &found.doubt {
        Some(doubt) if graph.batch != 0 && options.batch_dims.is_empty() => {
            let loss = if matches!(doubt, Doubt::BatchOfOne { .. }) { LossKind::Mean } else { found.loss };
            Batched { graph: graph.clone(), loss, coupling: None, doubt: None }
        }
        _ => found,
    }
}

/// The batch dimension of each input, as assignments to try in order. The user's statement comes first, then the
/// file's, then the first dimension.
///
/// Some inputs have no batch dimension: scalars, random keys of JAX (two or four `u32`), and state that the function
/// returns. If sizes differ, not all inputs have the batch. Then the most frequent size wins, and the others (masks,
/// tables of positions) have none.
fn batch_dims(
    graph: &Graph,
    said: &[(String, Option<usize>)],
    states: &[String],
) -> Result<Vec<Vec<Option<usize>>>, Error> {
    let is_meant = |said: &str, name: &str| match said.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => said == name || said == arguments::group(name),
    };
    for (wanted, dim) in said {
        let mut meant = graph.inputs().filter(|(_, name)| is_meant(wanted, name)).peekable();
        if meant.peek().is_none() {
            let inputs = Names(graph.inputs().map(|(_, n)| n.to_string()).collect());
            return Err(Error::UnknownInput { name: wanted.clone(), inputs });
        }
        for (v, name) in meant {
            if let Some(dim) = dim.filter(|&d| d >= graph.shape(v).len()) {
                return Err(Error::NoSuchDimension { name: name.to_string(), ty: graph.ty(v).clone(), dim });
            }
        }
    }
    let given = |name: &str| said.iter().rev().find(|(n, _)| is_meant(n, name)).map(|(_, dim)| *dim);
    let default = |(v, name): (ValueId, &str)| {
        let ty = graph.ty(v);
        let is_key = ty.dtype == DType::U32 && matches!(ty.shape.as_slice(), [2] | [4]);
        let marked = graph.node(v).batch_dims;
        match graph.batch {
            0 => (ty.rank() > 0 && !is_key && !states.iter().any(|s| s == name)).then_some(0),
            _ => (marked != 0).then_some(marked.trailing_zeros() as usize),
        }
    };
    let all: Vec<Option<usize>> = graph.inputs().map(|i| given(i.1).unwrap_or_else(|| default(i))).collect();
    let size = |(v, dim): (ValueId, Option<usize>)| dim.map(|d| graph.shape(v)[d]);
    let named: Vec<u64> = graph.inputs().filter_map(|(v, name)| size((v, given(name)?))).collect();
    // Sizes in order of first appearance, each with its number of inputs.
    let mut sizes: Vec<(u64, usize)> = Vec::new();
    for found in graph.inputs().zip(&all).filter_map(|((v, _), dim)| size((v, *dim))) {
        match sizes.iter_mut().find(|(known, _)| *known == found) {
            Some((_, count)) => *count += 1,
            None => sizes.push((found, 1)),
        }
    }
    if graph.batch != 0 || sizes.len() < 2 {
        return Ok(vec![all]);
    }
    sizes.sort_by_key(|&(size, count)| (size == 1, std::cmp::Reverse(count)));
    sizes.retain(|(size, _)| named.is_empty() || named.contains(size));
    let only = |wanted: u64| {
        let inputs = graph.inputs().zip(&all);
        let one = |((v, name), dim): ((ValueId, &str), &Option<usize>)| match given(name) {
            Some(dim) => dim,
            None => dim.filter(|_| size((v, *dim)) == Some(wanted)),
        };
        inputs.map(one).collect::<Vec<_>>()
    };
    let mut tries: Vec<Vec<Option<usize>>> = sizes.iter().map(|&(size, _)| only(size)).collect();
    tries.push(all.clone());
    Ok(tries)
}

/// The batch under the first assignment that is unambiguous. Assignments that make the loss one over samples come
/// first.
fn first_without_doubt(graph: &Graph, tries: &[Vec<Option<usize>>], options: &ImportOptions) -> Batched {
    let mut found: Vec<Batched> = Vec::new();
    for dims in tries {
        let batched = found_batch(graph, dims, options);
        if batched.doubt.is_none() && batched.loss != LossKind::Other {
            return batched;
        }
        found.push(batched);
    }
    let at = found.iter().position(|b| b.doubt.is_none()).unwrap_or(found.len() - 1);
    found.swap_remove(at)
}

/// Finds values by name: `%12`, a leaf's name, an op's name or its last part.
fn find_values(graph: &Graph, names: &[String]) -> Result<Vec<ValueId>, Error> {
    let mut found = Vec::new();
    for name in names {
        let number = name.strip_prefix('%').and_then(|n| n.parse::<u32>().ok());
        let before = found.len();
        for v in graph.values() {
            let node = graph.node(v);
            let leaf = match &node.op {
                Op::Parameter(p) => p.name == *name || stack_of(&p.name).is_some_and(|(stack, _)| stack == name),
                Op::Input(i) => i.name == *name,
                _ => false,
            };
            let op = node.name == *name || node.name.ends_with(&format!("/{name}"));
            if number == Some(v.0) || leaf || (op && !name.is_empty()) {
                found.push(v);
            }
        }
        if found.len() == before {
            return Err(Error::UnknownValue { name: name.clone() });
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loop over the rows of `w`, as `lax.scan` over stacked layers is printed.
    #[test]
    fn stacked_layers_become_parameters() {
        let text = r#"func.func @main(%w: tensor<3x4xf32> loc("params['w']"), %x: tensor<2x4xf32> loc("x")) -> tensor<f32> {
            %zero = stablehlo.constant dense<0> : tensor<i32>
            %one = stablehlo.constant dense<1> : tensor<i32>
            %end = stablehlo.constant dense<3> : tensor<i32>
            %0:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, tensor<2x4xf32>
            cond {
              %1 = stablehlo.compare LT, %i, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
              stablehlo.return %1 : tensor<i1>
            } do {
              %1 = stablehlo.dynamic_slice %w, %i, %zero, sizes = [1, 4] : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>
              %2 = stablehlo.reshape %1 : (tensor<1x4xf32>) -> tensor<4xf32>
              %3 = stablehlo.broadcast_in_dim %2, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>
              %4 = stablehlo.multiply %h, %3 : tensor<2x4xf32>
              %5 = stablehlo.add %i, %one : tensor<i32>
              stablehlo.return %5, %4 : tensor<i32>, tensor<2x4xf32>
            }
            %f = stablehlo.constant dense<0.0> : tensor<f32>
            %6 = stablehlo.reduce(%0#1 init: %f) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x4xf32>, tensor<f32>) -> tensor<f32>
            return %6 : tensor<f32>
          }"#;
        let options = ImportOptions { stop_gradients: vec!["params['w']".into()], ..Default::default() };
        let model = model_of("stacked.mlir".as_ref(), text.as_bytes(), &options).unwrap();
        let types: Vec<String> = model.graph.parameters().map(|(v, n)| format!("{n}: {}", model.graph.ty(v))).collect();
        assert_eq!(types, ["params['w'][0]: f32[4]", "params['w'][1]: f32[4]", "params['w'][2]: f32[4]"]);
        let names = ["broadcast_in_dim", "multiply", "reduce"];
        let ops: Vec<&str> = model.graph.nodes.iter().map(|n| n.op.name()).filter(|n| !names.contains(n)).collect();
        assert_eq!(ops, ["parameter", "parameter", "parameter", "input"]);
        // The name of a stack selects all of its rows.
        assert_eq!(model.stop_gradients.len(), 3);
    }

    #[test]
    fn a_batch_in_doubt_says_what_to_type() {
        let text = r#"func.func @main(%w: tensor<4x4xf32> loc("params['w']"), %x: tensor<1x4xf32> loc("x")) -> tensor<f32> {
            %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<1x4xf32>, tensor<4x4xf32>) -> tensor<1x4xf32>
            %f = stablehlo.constant dense<0.0> : tensor<f32>
            %1 = stablehlo.reduce(%0 init: %f) applies stablehlo.add across dimensions = [0, 1] : (tensor<1x4xf32>, tensor<f32>) -> tensor<f32>
            return %1 : tensor<f32>
          }"#;
        let model = model_of("one.mlir".as_ref(), text.as_bytes(), &ImportOptions::default()).unwrap();
        let warning = model.warnings.iter().find(|w| matches!(w, Warning::Batch { .. })).expect("a doubt").to_string();
        for part in ["Dimension 0 of 'x' (1)", "--batch-dim x=DIM", "--also OTHER.mlir", "jax.export.symbolic_shape"] {
            assert!(warning.contains(part), "{part}: {warning}");
        }
    }

    #[test]
    fn formats_are_recognised_by_content() {
        let cases: [(&[u8], Format); 18] = [
            (b"module @jit_f {", Format::StableHlo),
            (b"#loc1 = loc(\"x\")\nmodule {", Format::StableHlo),
            (b"// a comment\nmodule", Format::StableHlo),
            (b"{\"format\": \"altiplano.graph\"}", Format::GraphJson),
            (b"{\"nodes\": []}", Format::GraphJson),
            (b"{\"version\": 1, \"format\": \"altiplano.plan\"}", Format::PlanJson),
            (b"{\"format\": \"altiplano.plan\", \"vers", Format::PlanJson),
            (b"{\"model_type\": \"gpt2\"}", Format::HuggingFaceConfig),
            (b"{\"hidden_size\": 64}", Format::HuggingFaceConfig),
            (b"{\"model_type\": \"gpt2\", \"model_type\": \"gpt2\"}", Format::HuggingFaceConfig),
            (b"{\"model_type\": \"gpt2\", \"nodes\": []}", Format::GraphJson),
            (b"PK\x03\x04..", Format::TorchExport),
            (b"\x08\x0a\x12\x07pytorch", Format::Onnx),
            (b"\x08\x0a\xff\x07pytorch", Format::Onnx),
            (b"ML\xefR\x01", Format::MlirBytecode),
            (b"\x18\0\0\0\xff\x01ML\xefR\rStableHLO_v1.14.1\0", Format::JaxExport),
            (b"# mine\nname = \"x\"\n[[group]]", Format::ClusterToml),
            (b"hello", Format::Unknown),
        ];
        for (bytes, format) in cases {
            assert_eq!(Format::of(bytes), format, "{}", String::from_utf8_lossy(bytes));
        }
    }
}

//! Plans as programs of other software, for `altiplano export`. The general part is here: the refusal of plans that no
//! target can say yet, the layouts of a plan's one stage, and the price of rounding them.

mod jax;
mod stablehlo;

use crate::error::{Error, Names};
use crate::units::{bytes, plural};
use altiplano_cost_models::Rooflines;
use altiplano_ir::autodiff::AutodiffError;
use altiplano_ir::batch::LossKind;
use altiplano_ir::graph::ValueId;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{Function, Op};
use altiplano_ir::plan::{Plan, Schedule, Stage, Update};
use altiplano_ir::program::{Buffer, BufferKind, Program};
use altiplano_ir::recompute::{Recomputation, Recompute};
use altiplano_ir::sharding::Sharding;
use altiplano_planner::{predict_plan, programs};

/// Software that a plan can be exported to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    Jax,
    StableHlo,
}

impl Stack {
    pub fn name(self) -> &'static str {
        match self {
            Stack::Jax => "jax",
            Stack::StableHlo => "stablehlo",
        }
    }
}

/// An exported plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Exported {
    pub text: String,
    /// The choices of the plan that the text leaves out or rounds, each with its price where it has one.
    pub notes: Vec<String>,
}

/// The reason why a target cannot say a plan.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ExportProblem {
    #[error("the plan has {} pipeline stages, and an exported module has one; plan with --pp 1", .0)]
    Stages(usize),
    #[error("the plan trains nothing (--loss none), and an exported module is a training step; plan with a loss")]
    TrainsNothing,
    #[error("the plan's gradients are late ({0}); plan with --schedule 1f1b and --update synchronous")]
    Late(&'static str),
    #[error("the plan has parameter servers; plan without --parameter-servers")]
    Servers,
    #[error("the plan keeps {0} in host memory; plan with --offload none")]
    Offload(&'static str),
    #[error(
        "the plan pads {0}, and the model's own arrays cannot be split so; plan with degrees that divide their sizes"
    )]
    Padding(Names),
    #[error(
        "the plan computes logits in {0} chunks, which the model's own code does not; plan with --loss-chunks none"
    )]
    Chunks(u64),
    #[error(
        "the plan's attention passes blocks around rings, which the model's own code does not; plan with --ring none"
    )]
    Rings,
    #[error(
        "the loss of {} is no mean or sum of theirs, so their gradients cannot be accumulated; plan with --num-microbatches 1", plural(u64::from(*.0), "microbatch")
    )]
    Microbatches(u32),
    #[error(
        "input '{0}' grows with the batch in several dimensions and cannot be cut into microbatches; plan with --num-microbatches 1"
    )]
    SeveralBatchDimensions(String),
    #[error("{0}")]
    Gradients(AutodiffError),
}

/// Writes a plan as a program of other software.
pub fn export(plan: &Plan, to: Stack) -> Result<Exported, Error> {
    let refused = |problem| Error::Export { to: to.name(), problem: Box::new(problem) };
    let stage = sayable(plan).map_err(refused)?;
    let lowered = programs(plan)?;
    let inputs = lowered.programs.iter().flat_map(|program| &program.buffers);
    let layouts = Layouts {
        plan,
        stage,
        program: &lowered.programs[0],
        inputs: inputs.filter_map(|buffer| Input::of(plan, buffer)).collect(),
    };
    if plan.num_microbatches > 1
        && let Some(input) = layouts.inputs.iter().find(|input| input.batch_dims.len() > 1)
    {
        return Err(refused(ExportProblem::SeveralBatchDimensions(input.name.to_string())));
    }
    match to {
        Stack::Jax => jax::module(&layouts),
        Stack::StableHlo => stablehlo::module(&layouts),
    }
}

/// The one stage of a plan that all targets can say.
fn sayable(plan: &Plan) -> Result<&Stage, ExportProblem> {
    let [stage] = plan.stages.as_slice() else { return Err(ExportProblem::Stages(plan.stages.len())) };
    match () {
        _ if !plan.schedule.trains() => Err(ExportProblem::TrainsNothing),
        _ if plan.schedule == Schedule::PipeDream => Err(ExportProblem::Late("--schedule pipedream")),
        _ if plan.update == Update::Stale => Err(ExportProblem::Late("--update stale")),
        _ if plan.servers.is_some() => Err(ExportProblem::Servers),
        _ if !stage.offload.is_none() => Err(ExportProblem::Offload(stage.offload.words())),
        _ if plan.padding.is_some() => Err(ExportProblem::Padding(padded(plan))),
        _ if plan.num_microbatches > 1 && plan.loss == LossKind::Other => {
            Err(ExportProblem::Microbatches(plan.num_microbatches))
        }
        _ => plan.graph.nodes.iter().find_map(|node| rewritten(&node.op)).map_or(Ok(stage), Err),
    }
}

/// The change of the model's graph that an op of the plan shows.
fn rewritten(op: &Op) -> Option<ExportProblem> {
    let Op::Composite(op) = op else { return None };
    match op.function {
        Function::LinearCrossEntropy { chunks, .. } => Some(ExportProblem::Chunks(chunks)),
        Function::Attention { blocks: 2.., .. } => Some(ExportProblem::Rings),
        _ => None,
    }
}

/// The leaves whose sizes the plan pads, or the whole model if only other values are padded.
fn padded(plan: &Plan) -> Names {
    let (own, _) = plan.own();
    let named = |graph: &altiplano_ir::graph::Graph, v: ValueId| match &graph.node(v).op {
        Op::Parameter(op) => Some((op.name.clone(), op.ty.shape.clone())),
        Op::Input(op) => Some((op.name.clone(), op.ty.shape.clone())),
        _ => None,
    };
    let leaves: Vec<_> = own.values().filter_map(|v| named(own, v)).collect();
    let changed = plan.graph.values().filter_map(|v| named(&plan.graph, v)).filter(|leaf| !leaves.contains(leaf));
    let names: Vec<String> = changed.map(|(name, _)| name).collect();
    Names(if names.is_empty() { vec![plan.model.clone()] } else { names })
}

/// An input of the model and its layout.
struct Input<'a> {
    name: &'a str,
    sharding: &'a Sharding,
    /// The dimensions that grow with the batch, each with its size for one sample.
    batch_dims: Vec<(usize, u64)>,
}

impl<'a> Input<'a> {
    fn of(plan: &Plan, buffer: &'a Buffer) -> Option<Input<'a>> {
        let BufferKind::Input { name } = &buffer.kind else { return None };
        let leaf = |v: &ValueId| matches!(&plan.graph.node(*v).op, Op::Input(op) if op.name == *name);
        let node = plan.graph.node(plan.graph.values().find(leaf)?);
        let grows = (0..node.ty.shape.len()).filter(|dim| node.batch_dims >> dim & 1 == 1);
        let batch_dims = grows.map(|dim| (dim, node.ty.shape[dim] / plan.microbatch.max(1))).collect();
        Some(Input { name, sharding: &buffer.sharding, batch_dims })
    }
}

/// A plan's one stage as a target sees it.
struct Layouts<'a> {
    plan: &'a Plan,
    stage: &'a Stage,
    program: &'a Program,
    inputs: Vec<Input<'a>>,
}

impl Layouts<'_> {
    fn mesh(&self) -> &Mesh {
        &self.stage.mesh
    }

    /// The version of the program and the fingerprint of the plan.
    fn origin(&self) -> String {
        format!("Altiplano {}, plan {}", env!("CARGO_PKG_VERSION"), fingerprint(&self.plan.to_json()))
    }

    /// The names of parameters that training does not change.
    fn frozen(&self) -> impl Iterator<Item = &str> {
        self.plan.graph.nodes.iter().filter_map(|node| match &node.op {
            Op::Parameter(op) if op.frozen => Some(op.name.as_str()),
            _ => None,
        })
    }

    /// A note on the values that `rounded` stores in more than their part, with the bytes that it costs. `why` says
    /// that the target cannot split them so.
    fn rounding(&self, rounded: impl Fn(&Sharding) -> Sharding, why: &str) -> Option<String> {
        let (mut extra, mut names) = (0, Vec::new());
        for buffer in &self.program.buffers {
            let name = match &buffer.kind {
                BufferKind::Parameter { name } | BufferKind::Input { name } => name,
                BufferKind::State { parameter, .. } | BufferKind::Accumulator { parameter } => parameter,
                _ => continue,
            };
            let stored = rounded(&buffer.sharding).local_bytes(&buffer.ty, self.mesh());
            let planned = buffer.sharding.local_bytes(&buffer.ty, self.mesh());
            if stored > planned {
                extra += stored - planned;
                if !names.contains(name) {
                    names.push(name.clone());
                }
            }
        }
        (!names.is_empty()).then(|| format!("{}: {why}; {} more on each device", Names(names), bytes(extra)))
    }

    /// A note on recomputation, which no module asks for: the model's own code does.
    fn recomputation(&self) -> Result<Option<String>, Error> {
        let recompute = &self.stage.recompute;
        if recompute.most() == Recompute::None {
            return Ok(None);
        }
        let mut keeping = self.plan.clone();
        keeping.stages[0].recompute = Recomputation::Alike(Recompute::None);
        let keeping = predict_plan(keeping, &Rooflines::of(&self.plan.cluster))?;
        let peak = |plan: &Plan| plan.predicted.peak_bytes.first().copied().unwrap_or(0);
        let extra = peak(&keeping).saturating_sub(peak(self.plan));
        Ok(Some(format!(
            "recomputation ({recompute}) is left to the model's code; without it {} more on each device",
            bytes(extra)
        )))
    }

    /// Notes on choices about the update, which the user's optimizer makes.
    fn update(&self) -> Vec<String> {
        let plan = self.plan;
        let mut notes = vec![format!("the optimizer is the caller's: the plan has {}", plan.optimizer.name())];
        notes
            .extend(plan.clip_norm.map(|norm| format!("clipping of the gradient's norm at {norm} is the optimizer's")));
        notes.extend(plan.loss_scale.as_ref().map(|_| "the scale of the loss (f16) is left out".to_string()));
        notes.extend(plan.measure_noise.then(|| "the gradient's noise is not measured".to_string()));
        notes
    }
}

/// A 128-bit FNV-1a hash, as 32 hex digits.
fn fingerprint(text: &str) -> String {
    let hash = |h: u128, byte: u8| (h ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    format!("{:032x}", text.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, hash))
}

#[cfg(test)]
mod tests;

//! A plan's forward pass as lowering sees it, for programs that other software runs: without composites, with the
//! layout of every value, and with the values that the backward pass keeps.

use super::stage::computed_again;
use super::{Cut, TrainingGraphs};
use crate::request::PlanFailure;
use altiplano_cost_models::Rooflines;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::plan::{Plan, Stage};
use altiplano_ir::sharding::Sharding;
use altiplano_ir::softmax_max::irrelevant_maxima;
use std::collections::BTreeSet;

/// The forward pass of all stages of a plan.
#[derive(Clone, Debug)]
pub struct Forward {
    /// The model at microbatch size, without composites.
    pub graph: Graph,
    /// The layer of each value. `None` for leaves and for values that depend on no leaf.
    pub layer_of: Vec<Option<u32>>,
    /// For each value, true if no gradient flows through it.
    pub stopped: Vec<bool>,
    pub stages: Vec<ForwardStage>,
}

/// The forward pass of one stage.
#[derive(Clone, Debug)]
pub struct ForwardStage {
    /// The plan's stage, in terms of the graph without composites.
    pub stage: Stage,
    /// The mesh of the stage's devices, whose axes have one name on all stages that share them.
    pub mesh: Mesh,
    /// The stage's values, in order.
    pub nodes: Vec<ValueId>,
    /// The values that the backward pass recomputes. It keeps all others that it needs.
    pub recomputed: BTreeSet<ValueId>,
}

impl Forward {
    /// The layout of a value that leaves a stage, with nothing left to reduce.
    pub fn resting(&self, stage: usize, value: ValueId) -> Sharding {
        let ForwardStage { stage, mesh, .. } = &self.stages[stage];
        match stage.shardings.get(&value) {
            Some(known) => self.graph.rule(value).shardings(&known.strategy, mesh).result.reduced(),
            None => Sharding::replicated(self.graph.shape(value)),
        }
    }
}

/// The forward pass of a plan.
///
/// # Errors
/// If the model has no derivative.
pub fn forward(plan: &Plan) -> Result<Forward, PlanFailure> {
    let graphs = TrainingGraphs::of(plan)?;
    let cut = Cut::new(plan, &graphs);
    let costs = Rooflines::of(&plan.cluster);
    let stage = |index: usize| {
        let cx = cut.context(index, &costs);
        ForwardStage {
            recomputed: computed_again(&cx),
            mesh: cx.mesh.clone(),
            nodes: cx.nodes.to_vec(),
            stage: cx.stage,
        }
    };
    let graph = &graphs.expanded.graph;
    let mut stopped = irrelevant_maxima(graph);
    plan.stop_gradients.iter().for_each(|v| stopped[graphs.expanded.values[v.index()].index()] = true);
    Ok(Forward {
        stages: (0..plan.stages.len()).map(stage).collect(),
        layer_of: cut.layer_of.clone(),
        stopped,
        graph: graph.clone(),
    })
}

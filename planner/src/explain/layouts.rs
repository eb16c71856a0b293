//! Explains the layout of a value in a plan. Every other layout of the value, or way of storing the parameter, is
//! compared with the chosen one: with the rest of its stage as it is, and with the rest chosen anew. Prices are those
//! of the stage's problem ([`crate::intra_op::stage`]), by which shardings are chosen. A plan that differs only in this
//! layout is predicted like any plan.

use crate::intra_op::ilp::{Model, Variable};
use crate::intra_op::space::{AxisRoles, Spaces};
use crate::intra_op::stage::{Demand, StageProgram, StageSolution, gradient_readers, state_stage};
use crate::layers::graph::LayeredGraph;
use crate::lower::{Fusion, Prices};
use crate::predict::predict_with;
use crate::refine::{as_given, as_given_but, levels, with_solution};
use crate::request::PlanFailure;
use altiplano_cost_models::{Costs, Rooflines};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Plan;
use altiplano_solver::{Options, Problem, SolveError, alternatives};
use rayon::prelude::*;

/// One layout of a value, or one way of storing a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// The sharding, and for a parameter how much further its storage is sharded.
    pub layout: String,
    pub chosen: bool,
    /// Seconds per microbatch of the op itself, forward and backward, or of keeping the parameter.
    pub own_s: f64,
    /// Seconds per microbatch to reshard between it and its neighbours as they are; infinite if they forbid it.
    pub moving_s: f64,
    /// Extra seconds per microbatch of the stage, with all else as it is; infinite if something else forbids it.
    pub in_place_s: f64,
    /// Extra seconds with all else chosen anew; infinite if nothing goes with it.
    pub whole_s: f64,
    /// Number of other choices that change then.
    pub others: usize,
    /// Bytes beyond a device's memory at the fullest point, with all else as it is: the predicted peak of the plan, and
    /// the bytes that the layout adds by the problem's estimate.
    pub over_bytes: u64,
    /// Prediction of the plan with this layout and all else as it is, if it was made.
    pub predicted: Option<LayoutPrediction>,
}

/// Prediction of a plan with one layout changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayoutPrediction {
    pub step_s: f64,
    /// Peak bytes of the stage's devices.
    pub peak_bytes: u64,
}

/// A value in one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Why {
    pub stage: usize,
    /// Estimated seconds per microbatch of the stage as it is, by the prices of its problem, which ignore overlap.
    pub cost_s: f64,
    /// Predicted seconds per microbatch, forward and backward.
    pub microbatch_s: f64,
    /// Predicted peak bytes of a device, and the bytes that it has.
    pub peak_bytes: u64,
    pub device_bytes: u64,
    /// The moment of that peak: the name of the value that is computed or updated then.
    pub fullest: String,
    /// Text of the pin that the plan's graph or `--pin` puts on the value.
    pub pin: Option<String>,
    /// The chosen layout first, then the others by their cost over the whole.
    pub layouts: Vec<Layout>,
}

/// Effort for each alternative. Most stages need a small part of it.
const OPTIONS: Options = Options { time_limit_s: f64::INFINITY, effort: 0.5, gap: 1e-4 };

/// Most layouts that are predicted, the best by the estimate first.
const MOST_PREDICTED: usize = 12;

/// Explains the value in each stage that has it, with predictions. Empty if no stage decides on it.
pub fn why(plan: &Plan, value: ValueId) -> Result<Vec<Why>, PlanFailure> {
    asked(plan, value, |_| true, true)
}

/// Like [`why`], in the `wanted` stages, by the problem's prices alone.
pub fn why_in(plan: &Plan, value: ValueId, wanted: impl Fn(usize) -> bool) -> Result<Vec<Why>, PlanFailure> {
    asked(plan, value, wanted, false)
}

fn asked(plan: &Plan, value: ValueId, wanted: impl Fn(usize) -> bool, predict: bool) -> Result<Vec<Why>, PlanFailure> {
    let layered = LayeredGraph::of_plan(plan);
    let readers = match plan.schedule.trains() {
        true => gradient_readers(&plan.graph, &plan.stop_gradients)?,
        false => Vec::new(),
    };
    let costs = Rooflines::of(&plan.cluster);
    let question = Question { plan, value, layered: &layered, readers: &readers, costs: &costs };
    let stages = (0..plan.stages.len()).filter(|&stage| wanted(stage));
    Ok(stages.filter_map(|stage| question.of_stage(stage, predict)).collect())
}

/// A value of a plan, whose layouts are asked for.
struct Question<'a> {
    plan: &'a Plan,
    value: ValueId,
    layered: &'a LayeredGraph,
    readers: &'a [Vec<ValueId>],
    costs: &'a Rooflines,
}

impl Question<'_> {
    /// The layouts of the value in a stage; `None` if the stage does not have it.
    fn of_stage(&self, index: usize, predict: bool) -> Option<Why> {
        let Question { plan, value, layered, .. } = *self;
        let stage = &plan.stages[index];
        let name = parameter_name(plan, value);
        if !stage.shardings.contains_key(&value) && !name.is_some_and(|n| stage.parameters.contains_key(n)) {
            return None;
        }
        let trains = plan.schedule.trains();
        let group = plan.group_of(stage);
        let prices = Prices::new(self.costs.of_group(stage.group), group, stage.submesh, &stage.mesh)
            .fused(Fusion::of(&plan.execution));
        let mut spaces = Spaces::new(&prices, AxisRoles::default()).including(stage);
        let demand = Demand::of(plan, index, levels(None, stage.mesh.num_devices(), trains, plan.target));
        let model = Model { offload: stage.offload, ..layered.model(trains.then_some(&plan.optimizer)) };
        let range = plan.layers[stage.layers.start as usize]..plan.layers[stage.layers.end as usize];
        let nodes = model.nodes(&range);
        let mut program = state_stage(&model, self.readers, range, &mut spaces, &demand);
        let is_it = |variable: &Variable| match variable {
            Variable::Node(v, _) | Variable::Parameter(v, _) => *v == value,
            _ => false,
        };
        let at = program.ilp.variables.iter().position(is_it)?;
        let given = as_given(&program, &plan.graph, stage, &mut spaces)?;
        // Other layouts may use the memory that the plan is predicted to leave free, beyond the problem's estimate of
        // the plan.
        let (peak_bytes, device_bytes) = (stage.predicted.peak_bytes, plan.cluster.usable_bytes(group));
        program.problem.limit_bytes = Some(given.most_bytes + device_bytes.saturating_sub(peak_bytes));
        let mut layouts = layouts_of(&program, &given, at, &spaces)?;
        if predict {
            // The prediction decides whether it fits.
            program.problem.limit_bytes = None;
            self.predict(index, &program, at, &mut spaces, &mut layouts);
        }
        Some(Why {
            stage: index,
            cost_s: given.cost_s,
            microbatch_s: stage.predicted.forward_s + stage.predicted.backward_s,
            peak_bytes,
            device_bytes,
            fullest: fullest(plan, &program, &given, &nodes),
            pin: plan.graph.pins.iter().find(|pin| pin.value == value).map(ToString::to_string),
            layouts: layouts.into_iter().map(|(layout, _)| layout).collect(),
        })
    }

    /// Predicts the plan with each of the best layouts in place of the chosen one.
    fn predict(
        &self,
        index: usize,
        program: &StageProgram,
        at: usize,
        spaces: &mut Spaces<'_>,
        layouts: &mut [(Layout, usize)],
    ) {
        let Question { plan, layered, costs, .. } = *self;
        let stage = &plan.stages[index];
        let mut others: Vec<(usize, Plan)> = Vec::new();
        for (i, (layout, strategy)) in layouts.iter().enumerate().take(MOST_PREDICTED) {
            if layout.chosen || layout.in_place_s == f64::INFINITY {
                continue;
            }
            let other = as_given_but(program, &plan.graph, stage, spaces, Some((at, *strategy)));
            let Some(other) = other else { continue };
            let mut changed = plan.clone();
            changed.stages[index] = with_solution(layered, spaces, stage, other);
            others.push((i, changed));
        }
        let predicted: Vec<(usize, LayoutPrediction)> = others
            .into_par_iter()
            .filter_map(|(i, changed)| {
                let plan = predict_with(changed, layered, costs, None).ok()?;
                let peak_bytes = plan.stages[index].predicted.peak_bytes;
                Some((i, LayoutPrediction { step_s: plan.predicted.step_time_s, peak_bytes }))
            })
            .collect();
        predicted.into_iter().for_each(|(i, predicted)| layouts[i].0.predicted = Some(predicted));
    }
}

/// The layouts that a variable may take, the chosen one first, then by cost, each with its strategy. `None` if the plan
/// is no solution of the problem.
fn layouts_of(
    program: &StageProgram,
    given: &StageSolution,
    at: usize,
    spaces: &Spaces<'_>,
) -> Option<Vec<(Layout, usize)>> {
    let all = match alternatives(&program.problem, &given.choice, at, &OPTIONS) {
        Ok(all) => all,
        Err(SolveError::Malformed { .. } | SolveError::Infeasible) => return None,
        Err(_) => Vec::new(),
    };
    let text = |strategy: usize| match &program.ilp.variables[at] {
        Variable::Node(_, space) => spaces.layout(space.choices[strategy].result).display(spaces.mesh()).to_string(),
        Variable::Parameter(_, kept) => {
            let layout = spaces.layout(kept[strategy].layout).display(spaces.mesh());
            let stored = ["whole", "ZeRO-1", "ZeRO-2", "ZeRO-3"][usize::from(kept[strategy].level.min(3))];
            format!("{layout} {stored}")
        }
        _ => String::new(),
    };
    let mut layouts: Vec<(Layout, usize)> = Vec::new();
    for other in all {
        let new = Layout {
            layout: text(other.strategy),
            chosen: other.strategy == given.choice[at],
            own_s: program.problem.nodes[at].cost[other.strategy],
            moving_s: moving_s(&program.problem, &given.choice, at, other.strategy),
            in_place_s: other.in_place - given.cost_s,
            whole_s: other.whole - given.cost_s,
            others: other.others,
            over_bytes: other.over.map_or(0, |(_, bytes)| bytes),
            predicted: None,
        };
        let new = (new, other.strategy);
        // Several strategies may give one layout. The cheapest represents them, unless one of them is the chosen one.
        match layouts.iter_mut().find(|(l, _)| l.layout == new.0.layout) {
            Some(known) if !known.0.chosen && (new.0.chosen || new.0.whole_s < known.0.whole_s) => *known = new,
            Some(_) => {}
            None => layouts.push(new),
        }
    }
    layouts.sort_by(|(a, _), (b, _)| b.chosen.cmp(&a.chosen).then(a.whole_s.total_cmp(&b.whole_s)));
    Some(layouts)
}

/// The point of the step at which the stage holds most, in words.
fn fullest(plan: &Plan, program: &StageProgram, given: &StageSolution, nodes: &[ValueId]) -> String {
    let named = |v: ValueId| match (parameter_name(plan, v), plan.graph.node(v).name.as_str()) {
        (Some(name), _) => name.to_string(),
        (_, "") => format!("{v} ({})", plan.graph.node(v).op.name()),
        (_, name) => name.to_string(),
    };
    let point = program.most_bytes(&given.choice).1 as usize;
    match point.checked_sub(nodes.len()) {
        None => format!("the forward of {}", named(nodes[point])),
        Some(back) if back < nodes.len() => format!("the backward of {}", named(nodes[nodes.len() - 1 - back])),
        Some(back) => {
            let parameters = program.ilp.variables.iter().filter_map(|v| match v {
                Variable::Parameter(p, _) => Some(*p),
                _ => None,
            });
            let updated = parameters.clone().nth(back - nodes.len());
            updated.map_or("the update".to_string(), |p| format!("the update of {}", named(p)))
        }
    }
}

fn parameter_name(plan: &Plan, value: ValueId) -> Option<&str> {
    match &plan.graph.node(value).op {
        Op::Parameter(p) => Some(&p.name),
        _ => None,
    }
}

/// Cost of the edges between a node of a problem and its neighbours, if the node takes another strategy.
fn moving_s(problem: &Problem, choice: &[usize], node: usize, strategy: usize) -> f64 {
    let taken = |n: usize| if n == node { strategy } else { choice[n] };
    let incident = problem.edges.iter().filter(|e| e.from == node || e.to == node);
    incident.map(|e| e.cost[taken(e.from) * problem.nodes[e.to].cost.len() + taken(e.to)]).sum()
}

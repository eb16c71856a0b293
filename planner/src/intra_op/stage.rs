//! States a run of layers on one mesh as one integer program: a whole stage, up to the whole model.
//!
//! The nodes are stated as for a layer (`ilp`), with three differences. Nothing is fixed at the
//! borders of layers, every parameter has its own storage sharding, and the problem includes the bytes that are
//! held at every point of a step. A solution gives all shardings of a stage, with a bound on its distance from
//! the optimum.
//!
//! The points of a step are the nodes of the forward pass, the same nodes in reverse order for the backward
//! pass, and the updates of the parameters. A value is held from the node that makes it to the last node that
//! needs it. If the backward pass reads it, it is held once for each microbatch in flight. This is an estimate:
//! lowering decides the actual program, and [`crate::predict`] gives the final prediction.

use super::ilp::{Ends, Ilp, Kept, Model, User, Variable, state};
use super::space::{Choice, LayoutId, Space, Spaces};
use super::stage_cost::StageCost;
use crate::intra_op::recompute_fraction::RecomputeFraction;
use crate::lower::CompositeCost;
use crate::lower::repeat::Repeats;
use crate::predict::memory::copies_of_parameter;
use altiplano_cost_models::pipeline::Order;
use altiplano_ir::autodiff::{AutodiffError, differentiate};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::plan::{Execution, Plan};
use altiplano_ir::recompute::{Recomputation, Recompute};
use altiplano_ir::rule::Strategy;
use altiplano_solver::{self as solve, Holding, Options, Problem, SolveError};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The settings of a stage other than its shardings.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// ZeRO levels that a parameter may be stored at, lowest first.
    pub levels: Vec<u8>,
    /// Microbatches per step. Per-step costs are divided by this number.
    pub num_microbatches: u32,
    /// Microbatches whose activations are held at the same time.
    pub in_flight: u32,
    pub recompute: Recomputation,
    pub first_layer: u32,
    pub execution: Execution,
}

impl Demand {
    /// The settings of a plan for one of its stages, whose parameters may be stored at any of `levels`.
    pub fn of(plan: &Plan, stage: usize, levels: Vec<u8>) -> Demand {
        Demand {
            levels,
            num_microbatches: plan.num_microbatches,
            in_flight: Order::of(plan).in_flight(stage),
            recompute: plan.stages[stage].recompute.clone(),
            first_layer: plan.stages[stage].layers.start,
            execution: plan.execution,
        }
    }

    fn recomputes(&self, layer: u32) -> Recompute {
        self.recompute.of(layer.saturating_sub(self.first_layer) as usize)
    }
}

/// A stage's problem, stated but not solved.
pub struct StageProgram {
    pub ilp: Ilp,
    /// The problem, with the held bytes at each point but without a limit.
    pub problem: Problem,
    /// Points of a step.
    pub num_points: u32,
}

/// A solved stage.
#[derive(Clone, Debug)]
pub struct StageSolution {
    pub strategies: Vec<(ValueId, Choice)>,
    pub parameters: Vec<(ValueId, Kept)>,
    /// Layouts in which values from earlier stages arrive.
    pub receives: Vec<(ValueId, LayoutId)>,
    /// Seconds per microbatch, including its share of the per-step costs.
    pub cost_s: f64,
    /// A lower bound on the cost of any shardings.
    pub lower_bound_s: f64,
    /// The maximum of the held bytes over all points.
    pub most_bytes: u64,
    /// The choice for each node of the problem.
    pub choice: Vec<usize>,
}

/// The nodes whose gradients read each value of a forward graph.
pub fn gradient_readers(graph: &Graph, stops: &[ValueId]) -> Result<Vec<Vec<ValueId>>, AutodiffError> {
    let training = differentiate(graph, stops)?;
    let mut readers: Vec<BTreeSet<ValueId>> = vec![BTreeSet::new(); graph.len()];
    for n in training.graph.values().skip(training.num_forward) {
        for o in training.graph.node(n).operands.iter().filter(|o| o.index() < training.num_forward) {
            readers[o.index()].insert(training.owner[n.index()]);
        }
    }
    Ok(readers.into_iter().map(|set| set.into_iter().collect()).collect())
}

/// States the problem of the nodes `range`. `readers` are the [`gradient_readers`] of the graph, empty without
/// training.
pub fn state_stage(
    model: &Model<'_>,
    readers: &[Vec<ValueId>],
    range: Range<u32>,
    spaces: &mut Spaces<'_>,
    demand: &Demand,
) -> StageProgram {
    let ilp = state(model, range.clone(), spaces, &demand.levels, &demand.execution, Ends::Open);
    let nodes = model.nodes(&range);
    let layers: BTreeSet<u32> = nodes.iter().filter_map(|v| model.layer_of[v.index()]).collect();
    let fraction = RecomputeFraction::of(&demand.recompute, layers.len());
    let mut problem =
        ilp.problem(|t: &StageCost| t.objective_s(demand.num_microbatches) + t.recompute_s(fraction, layers.len()));
    let trains = model.optimizer.is_some();
    let num_nodes = nodes.len() as u32;
    let updates = ilp.variables.iter().filter(|v| matches!(v, Variable::Parameter(..))).count() as u32;
    let num_points = if trains { 2 * num_nodes + updates } else { num_nodes };
    let mut lives = Lives {
        model,
        spaces,
        demand,
        ilp: &ilp,
        position: nodes.iter().copied().zip(0..).collect(),
        num_nodes,
        num_points,
        num_updates: 0,
        trains,
        holds: vec![Vec::new(); ilp.variables.len()],
    };
    lives.find(&nodes, readers);
    for (node, holds) in problem.nodes.iter_mut().zip(lives.holds) {
        node.holds = holds;
    }
    StageProgram { ilp, problem, num_points }
}

impl StageProgram {
    /// Finds the best shardings that hold at most `limit_bytes` at every point.
    pub fn solve(&self, limit_bytes: Option<u64>, options: &Options) -> Result<StageSolution, SolveError> {
        self.solution(&Problem { limit_bytes, ..self.problem.clone() }, options)
    }

    /// [`StageProgram::solve`] with given strategies of nodes and storage of parameters. It chooses only the
    /// remaining variables.
    pub fn solve_given(
        &self,
        strategy: impl Fn(ValueId) -> Option<Strategy>,
        kept: impl Fn(ValueId, Kept) -> bool,
        options: &Options,
    ) -> Result<StageSolution, SolveError> {
        let mut problem = self.problem.clone();
        for (node, variable) in problem.nodes.iter_mut().zip(&self.ilp.variables) {
            let mut keep = |allowed: &dyn Fn(usize) -> bool| {
                node.cost.iter_mut().enumerate().filter(|(c, _)| !allowed(*c)).for_each(|(_, s)| *s = f64::INFINITY);
            };
            match variable {
                Variable::Node(v, space) => {
                    let wanted = strategy(*v);
                    keep(&|c| wanted.as_ref() == Some(&space.choices[c].strategy));
                }
                Variable::Parameter(p, choices) => keep(&|c| kept(*p, choices[c])),
                _ => {}
            }
        }
        self.solution(&problem, options)
    }

    fn solution(&self, problem: &Problem, options: &Options) -> Result<StageSolution, SolveError> {
        let solution = solve::solve(problem, options)?;
        let (strategies, parameters) = self.ilp.chosen(&solution.choice);
        let entering = self.ilp.variables.iter().zip(&solution.choice).filter_map(|(variable, &c)| match variable {
            Variable::In(v, layouts) => Some((*v, layouts[c])),
            _ => None,
        });
        Ok(StageSolution {
            strategies,
            parameters,
            receives: entering.collect(),
            cost_s: solution.cost,
            lower_bound_s: solution.lower_bound,
            most_bytes: self.most_bytes(&solution.choice).0,
            choice: solution.choice,
        })
    }

    /// The maximum of the bytes that a choice holds, and the first point with that maximum.
    pub fn most_bytes(&self, choice: &[usize]) -> (u64, u32) {
        let fullest =
            solve::held(&self.problem, choice).into_iter().max_by_key(|&(point, bytes)| (bytes, Reverse(point)));
        fullest.map_or((0, 0), |(point, bytes)| (bytes, point))
    }

    /// All ways to keep each parameter.
    pub fn kept(&self) -> impl Iterator<Item = (ValueId, Kept)> {
        self.ilp.variables.iter().flat_map(|variable| match variable {
            Variable::Parameter(p, kept) => kept.iter().map(|&k| (*p, k)).collect(),
            _ => Vec::new(),
        })
    }

    /// The number of entries in all tables between two nodes.
    pub fn num_entries(&self) -> usize {
        self.problem.edges.iter().map(|e| e.cost.len()).sum()
    }
}

/// Finds the live range and the bytes of each value.
struct Lives<'a, 's, 'p> {
    model: &'a Model<'a>,
    spaces: &'s mut Spaces<'p>,
    demand: &'a Demand,
    ilp: &'a Ilp,
    position: BTreeMap<ValueId, u32>,
    num_nodes: u32,
    num_points: u32,
    /// The number of parameters whose updates have a point so far.
    num_updates: u32,
    trains: bool,
    holds: Vec<Vec<Holding>>,
}

/// Positions of the last and the first node whose gradients need a value. The backward pass holds it between
/// them.
#[derive(Clone, Copy)]
struct Read {
    last: u32,
    first: u32,
    /// True if a gradient reads the value itself, not only values that are recomputed from it.
    by_gradient: bool,
}

impl Lives<'_, '_, '_> {
    fn hold(&mut self, variable: usize, live: Range<u32>, bytes: Vec<u64>) {
        if live.start < live.end && bytes.iter().any(|&b| b > 0) {
            self.holds[variable].push(Holding { live, bytes });
        }
    }

    /// The point of the backward pass for the node at a position.
    fn back(&self, position: u32) -> u32 {
        2 * self.num_nodes - 1 - position
    }

    fn find(&mut self, nodes: &[ValueId], readers: &[Vec<ValueId>]) {
        let repeats = Repeats {
            graph: self.model.graph,
            layer_of: self.model.layer_of,
            users: self.model.users,
            recompute: &|layer| self.demand.recomputes(layer),
            fused_attention: self.demand.execution.fused_attention,
            always: &[],
            selective: self.demand.execution.recompute_modules,
            modules: self.model.modules,
        };
        let again = if self.trains { repeats.of(nodes.iter().copied()) } else { BTreeSet::new() };
        let read = if self.trains { self.read_back(nodes, &again, readers) } else { BTreeMap::new() };
        for (id, variable) in self.ilp.variables.iter().enumerate() {
            match variable {
                Variable::Node(v, space) => {
                    self.node(*v, id, space, again.contains(v), read.get(v).copied());
                    self.inside(*v, id, space, repeats.is_cheap(*v));
                }
                Variable::In(v, layouts) => self.entering(*v, id, layouts, read.get(v).copied()),
                Variable::Parameter(p, kept) => self.parameter(*p, id, kept),
                Variable::Relay(..) | Variable::Out(_) => {}
            }
        }
    }

    /// The nodes at which the backward pass needs each value, for a gradient or for a recomputation on behalf
    /// of one.
    fn read_back(
        &self,
        nodes: &[ValueId],
        again: &BTreeSet<ValueId>,
        readers: &[Vec<ValueId>],
    ) -> BTreeMap<ValueId, Read> {
        let mut read: BTreeMap<ValueId, Read> = BTreeMap::new();
        let merge = |read: &mut BTreeMap<ValueId, Read>, v: ValueId, new: Read| {
            let known = read.entry(v).or_insert(new);
            *known = Read {
                last: known.last.max(new.last),
                first: known.first.min(new.first),
                by_gradient: known.by_gradient || new.by_gradient,
            };
        };
        for (v, readers) in self.model.graph.values().zip(readers) {
            for at in readers.iter().filter_map(|r| self.position.get(r)) {
                merge(&mut read, v, Read { last: *at, first: *at, by_gradient: true });
            }
        }
        for v in nodes.iter().rev().filter(|v| again.contains(v)) {
            let Some(&at) = read.get(v) else { continue };
            for &o in &self.model.graph.node(*v).operands {
                // A recomputed value is made when it is first needed.
                merge(&mut read, o, Read { last: at.last, first: at.last, by_gradient: false });
            }
        }
        read
    }

    /// Holds the values of a node: its result, the copies that its users read, and its cotangent.
    fn node(&mut self, v: ValueId, id: usize, space: &Space, again: bool, read: Option<Read>) {
        let graph = self.model.graph;
        let dtype = graph.ty(v).dtype;
        let at = self.position[&v];
        let own: Vec<u64> = space.choices.iter().map(|c| self.spaces.local_bytes(dtype, c.resting)).collect();
        let users: Vec<u32> =
            self.model.users[v.index()].iter().filter_map(|u| self.position.get(u)).copied().collect();
        let last_user = users.iter().copied().max().unwrap_or(at);
        let leaves =
            self.model.users[v.index()].iter().any(|u| !self.position.contains_key(u)) || self.model.is_result(v);
        let saved = read.filter(|_| !again);
        // A chain of elementwise ops is one pass over memory, so its intermediate values are not stored.
        let elementwise = |v: ValueId| graph.node(v).op.is_elementwise();
        let flows = elementwise(v)
            && !leaves
            && saved.is_none()
            && matches!(self.model.users[v.index()].as_slice(), [user] if elementwise(*user));

        let uses = self.ilp.uses.get(&v).map_or(&[][..], Vec::as_slice);
        // The variable that holds the copy for users, the bytes of that copy, and the point from which it
        // replaces the result.
        let (holder, copies, from) = match (self.ilp.relays.get(&v), uses) {
            (Some(&relay), _) => match &self.ilp.variables[relay] {
                Variable::Relay(_, forms) => {
                    (relay, forms.iter().map(|f| self.spaces.local_bytes(dtype, f.0)).collect(), at + 1)
                }
                _ => (id, own.clone(), at + 1),
            },
            (None, &[User::Operand(user, k)]) => match &self.ilp.variables[user] {
                Variable::Node(u, space) => {
                    let copies = space.choices.iter().map(|c| self.spaces.local_bytes(dtype, c.operands[k])).collect();
                    (user, copies, self.position[u] + 1)
                }
                _ => (id, own.clone(), at + 1),
            },
            _ => (id, own.clone(), at + 1),
        };
        if !flows {
            // Values for later stages are held until the forward pass ends.
            self.hold(id, at..if leaves { self.num_nodes.max(from) } else { from }, own.clone());
            match saved {
                Some(read) => self.saved(holder, from..last_user + 1, read, copies),
                None => self.hold(holder, from..last_user + 1, copies),
            }
            // A value that is only recomputed on the way to another is freed at once.
            if let Some(read) = read.filter(|r| again && r.by_gradient) {
                self.hold(id, self.back(read.last)..self.back(read.first) + 1, own.clone());
            }
        }
        if self.trains && self.model.needs_gradient[v.index()] && !flows {
            self.hold(id, self.back(last_user)..self.back(at) + 1, own);
        }
    }

    /// Holds the temporaries of a composite while it runs, and the values inside that its gradient needs.
    /// `cheap` is true if its result is not one of those.
    fn inside(&mut self, v: ValueId, id: usize, space: &Space, cheap: bool) {
        let at = self.position[&v];
        let dtype = self.model.graph.ty(v).dtype;
        let of = |bytes: &dyn Fn(&Choice, f64) -> f64, spaces: &Spaces<'_>| -> Vec<u64> {
            let own = |c: &Choice| spaces.local_bytes(dtype, c.resting) as f64;
            space.choices.iter().map(|c| bytes(c, own(c)).max(0.0) as u64).collect()
        };
        let fused = self.demand.execution.fused_attention;
        let largest = of(&|c, _| c.inside.map_or(0.0, |inside| inside.largest(fused)), self.spaces);
        self.hold(id, at..at + 1, largest.clone());
        if !self.trains {
            return;
        }
        self.hold(id, self.back(at)..self.back(at) + 1, largest.iter().map(|b| 2 * b).collect());
        let level = self.model.layer_of[v.index()].map_or(Recompute::None, |layer| self.demand.recomputes(layer));
        let products = fused || level >= Recompute::Selective;
        let inside_bytes =
            |inside: CompositeCost| inside.kept_bytes - if products { inside.growing_bytes } else { 0.0 };
        let kept = of(
            &|c, own| c.inside.map_or(0.0, |inside| inside_bytes(inside) - if cheap { 0.0 } else { own }),
            self.spaces,
        );
        if level == Recompute::Full {
            self.hold(id, self.back(at)..self.back(at) + 1, kept);
        } else {
            self.saved(id, at..at + 1, Read { first: at, last: at, by_gradient: true }, kept);
        }
    }

    fn entering(&mut self, v: ValueId, id: usize, layouts: &[LayoutId], read: Option<Read>) {
        let dtype = self.model.graph.ty(v).dtype;
        let own: Vec<u64> = layouts.iter().map(|&l| self.spaces.local_bytes(dtype, l)).collect();
        let last_user = self.model.users[v.index()].iter().filter_map(|u| self.position.get(u)).copied().max();
        let last_user = last_user.unwrap_or(0);
        match read {
            Some(read) => self.saved(id, 0..last_user + 1, read, own.clone()),
            None => self.hold(id, 0..last_user + 1, own.clone()),
        }
        if self.trains && self.model.needs_gradient[v.index()] {
            // The cotangent of an entering value is sent when the backward pass has ended.
            self.hold(id, self.back(last_user)..2 * self.num_nodes, own);
        }
    }

    /// Holds a value that the forward pass makes at the start of `used`, last uses at its end, and saves for the
    /// backward pass. It is held once per microbatch in flight. With offloaded activations, it is held only while
    /// it is used, and while one more node runs to bring it back.
    fn saved(&mut self, id: usize, used: Range<u32>, read: Read, bytes: Vec<u64>) {
        let end = self.back(read.first) + 1;
        if self.model.offload.activations {
            let begin = self.back(read.last).saturating_sub(1).max(used.end);
            self.hold(id, used, bytes.clone());
            self.hold(id, begin..end, bytes);
            return;
        }
        let others = u64::from(self.demand.in_flight.saturating_sub(1));
        if others > 0 {
            self.hold(id, 0..2 * self.num_nodes, bytes.iter().map(|b| b.saturating_mul(others)).collect());
        }
        self.hold(id, used.start..end, bytes);
    }

    /// Holds the persistent bytes of a parameter, its gathered copies, and the buffers of its update.
    fn parameter(&mut self, p: ValueId, id: usize, kept: &[Kept]) {
        let dtype = self.model.graph.ty(p).dtype;
        let trained = self.model.graph.is_trained(p);
        let gradient_dtype = self.demand.execution.accumulator_dtype(dtype);
        let mut lasting = Vec::with_capacity(kept.len());
        let mut gathered = Vec::with_capacity(kept.len());
        let mut scattered = Vec::with_capacity(kept.len());
        let mut updated = Vec::with_capacity(kept.len());
        for &k in kept {
            let rests = k.rests(self.spaces);
            let whole = self.spaces.local_bytes(dtype, k.layout);
            let copies = copies_of_parameter(dtype, self.spaces.prices.cost.device().kind);
            let parameter = copies * self.spaces.local_bytes(dtype, rests.parameter);
            gathered.push(if rests.parameter == k.layout { 0 } else { whole });
            let Some(optimizer) = self.model.optimizer.filter(|_| trained) else {
                lasting.push(parameter);
                continue;
            };
            let gradient = self.spaces.local_bytes(gradient_dtype, rests.gradient);
            let reduced = self.spaces.local_bytes(gradient_dtype, rests.state);
            let elements = self.spaces.local_elements(rests.state);
            let state = elements * optimizer.state_bytes_per_element(dtype);
            // Offloaded state is on the device during the update, with that of the next parameter.
            let (lasts, brought) = if self.model.offload.optimizer { (0, 2 * state) } else { (state, 0) };
            lasting.push(parameter + gradient + lasts);
            scattered.push(if rests.gradient == k.layout { 0 } else { whole });
            // The update reduces the gradient to a shard, and gathers the updated shards.
            let scattered_now = if rests.gradient == rests.state { 0 } else { reduced };
            let gathered_then = if rests.parameter == rests.state { 0 } else { parameter };
            updated.push(scattered_now + gathered_then + brought);
        }
        self.hold(id, 0..self.num_points, lasting);
        let users: Vec<u32> =
            self.model.users[p.index()].iter().filter_map(|u| self.position.get(u)).copied().collect();
        let (Some(&first), Some(&last)) = (users.iter().min(), users.iter().max()) else { return };
        self.hold(id, first..last + 1, gathered.clone());
        if self.trains && !trained {
            // The parameter is gathered again for the gradients that read it.
            let read = |u: &&ValueId| self.model.needs_gradient[u.index()];
            let users = self.model.users[p.index()].iter().filter(read);
            let users: Vec<u32> = users.filter_map(|u| self.position.get(u)).copied().collect();
            if let (Some(&first), Some(&last)) = (users.iter().min(), users.iter().max()) {
                self.hold(id, self.back(last)..self.back(first) + 1, gathered);
            }
        } else if self.trains {
            self.hold(id, self.back(last)..self.back(first) + 1, gathered);
            // A gradient is held unsharded until it is scattered.
            self.hold(id, self.back(last)..self.back(first) + 1, scattered);
            let at = 2 * self.num_nodes + self.num_updates;
            self.hold(id, at..at + 1, updated);
            self.num_updates += 1;
        }
    }
}

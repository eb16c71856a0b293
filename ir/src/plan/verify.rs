//! Checks everything in a plan that a file could get wrong. Each part reports all of its problems; parts that build on
//! a wrong one are left out.

use super::{Goal, Placement, Plan, PlanError, Schedule, Stage, Target, Update, graph_hash, is_countable};
use crate::cluster::{BetweenGroups, Group};
use crate::graph::ValueId;
use crate::op::Op;
use crate::recompute::Recomputation;
use std::collections::BTreeSet;

/// The problems found so far.
#[derive(Default)]
struct Problems(Vec<PlanError>);

impl Problems {
    fn add(&mut self, path: impl Into<String>, problem: &'static str) {
        self.0.push(PlanError::Invalid { path: path.into(), problem });
    }

    /// Adds the problem unless `holds`. Returns `holds`.
    fn require(&mut self, holds: bool, path: &str, problem: &'static str) -> bool {
        if !holds {
            self.add(path, problem);
        }
        holds
    }
}

/// A duration: finite and not negative.
fn is_wait(seconds: f64) -> bool {
    seconds.is_finite() && seconds >= 0.0
}

/// A rate: finite and positive.
fn is_rate(per_second: f64) -> bool {
    per_second.is_finite() && per_second > 0.0
}

impl Plan {
    /// Returns all inconsistencies.
    pub fn verify(&self) -> Vec<PlanError> {
        let of_graph = self.graph.verify();
        if !of_graph.is_empty() {
            return of_graph.into_iter().map(|error| PlanError::Graph { error }).collect();
        }
        let actual = graph_hash(&self.graph);
        if actual != self.graph_hash {
            return vec![PlanError::GraphHash { declared: self.graph_hash.clone(), actual }];
        }
        let mut problems = Problems::default();
        self.verify_gradients(&mut problems);
        let counted = self.verify_cluster(&mut problems);
        if counted {
            self.verify_batch(&mut problems);
        }
        if counted && self.verify_layers(&mut problems) {
            self.verify_schedule(&mut problems);
            self.verify_stages(&mut problems);
        }
        problems.0
    }

    fn verify_gradients(&self, problems: &mut Problems) {
        let clips = self.clip_norm.is_none_or(is_rate);
        problems.require(clips, "clip_norm", "must be a finite number above 0");
        let loss = self.graph.outputs.first().map(|&loss| self.graph.ty(loss).dtype);
        if let Some(problem) = self.loss_scale.zip(loss).and_then(|(scale, loss)| scale.problem(loss)) {
            problems.add("loss_scale", problem);
        }
        let in_time = self.loss_scale.is_none_or(|scale| scale.is_of_staleness(self.staleness()));
        let problem = "is found from gradients of the step before, which here are late";
        problems.require(in_time, "loss_scale", problem);
    }

    /// Returns false if devices cannot be counted.
    fn verify_cluster(&self, problems: &mut Problems) -> bool {
        for (i, group) in self.cluster.groups.iter().enumerate() {
            if !is_possible(group) {
                let problem = "counts, sizes and rates must be positive, waits not negative";
                problems.add(format!("cluster.groups[{i}]"), problem);
            }
        }
        let sizes = self.cluster.groups.iter().map(|g| g.nodes.checked_mul(g.devices_per_node));
        let counted = sizes.reduce(|sum, size| sum?.checked_add(size?)).flatten().is_some();
        let problem = "must have one device or more, as many as can be counted";
        if !problems.require(counted, "cluster.groups", problem) {
            return false;
        }
        let link = |link: &BetweenGroups| is_rate(link.bytes_per_s) && is_wait(link.latency_s);
        let linked = self.cluster.between_groups.as_ref().map_or(self.cluster.groups.len() == 1, link);
        let problem = "must give several groups a positive rate and a wait that is not negative";
        problems.require(linked, "cluster.between_groups", problem);
        true
    }

    fn verify_batch(&self, problems: &mut Problems) {
        let known = self.stop_gradients.iter().all(|v| v.index() < self.graph.len());
        problems.require(known, "stop_gradients", "names no value of the graph");
        if let Some(problem) = self.padding.as_ref().and_then(|padding| padding.problem(&self.graph)) {
            problems.add("padding", problem);
        }
        problems.require(self.num_microbatches > 0, "num_microbatches", "must be at least 1");
        let countable = is_countable(self.num_microbatches, self.stages.len());
        problems.require(countable, "num_microbatches", "times the number of stages must be at most 1048576");
        let samples = self.microbatch.checked_mul(self.num_microbatches.into());
        let divided =
            self.graph.batch == 0 || self.graph.batch == self.microbatch && samples == Some(self.global_batch);
        let problem = "microbatch x num_microbatches must be global_batch, at which the graph is written";
        problems.require(divided, "microbatch", problem);
    }

    /// Returns false if layers, stages and lanes do not fit together.
    fn verify_layers(&self, problems: &mut Problems) -> bool {
        let rises = self.layers.len() >= 2 && self.layers.windows(2).all(|w| w[0] < w[1]);
        let whole = rises && self.layers.last() == Some(&(self.graph.len() as u32));
        if !problems.require(whole, "layers", "must rise from the first node to the number of nodes") {
            return false;
        }
        let contiguous = self.stages.windows(2).all(|w| w[0].layers.end == w[1].layers.start)
            && self.stages.first().is_some_and(|s| s.layers.start == 0)
            && self.stages.last().is_some_and(|s| s.layers.end == self.num_layers())
            && self.stages.iter().all(|s| s.layers.start < s.layers.end);
        if !problems.require(contiguous, "stages", "must hold every layer once, in order") {
            return false;
        }
        let shared = self.virtual_stages as usize;
        let divides = shared > 0 && self.stages.len().is_multiple_of(shared);
        problems.require(divides, "virtual_stages", "must be at least 1 and divide the number of stages")
    }

    fn verify_schedule(&self, problems: &mut Problems) {
        let trains = self.schedule.trains();
        let plain = |schedule| self.virtual_stages == 1 || self.schedule != schedule;
        problems.require(plain(Schedule::ZbH1), "virtual_stages", "must be 1 under the schedule zb-h1");
        problems.require(plain(Schedule::PipeDream), "virtual_stages", "must be 1 under the schedule pipedream");
        let folded = self.virtual_stages == 2 && self.placement == Placement::V;
        let problem = "must be 2 under the schedules zb-v and dualpipe-v, with the placement v";
        problems.require(folded || self.schedule.placement() == Placement::Loop, "virtual_stages", problem);
        let enough = self.schedule != Schedule::DualPipeV || self.num_microbatches as usize >= self.stages.len();
        problems.require(
            enough,
            "num_microbatches",
            "must be at least the number of stages under the schedule dualpipe-v",
        );
        let pairs = self.schedule.can_pair(self.virtual_stages, self.num_lanes() as u32);
        let problem = "needs the schedule dualpipe-v, or 1f1b with one stage in all or several a lane";
        problems.require(pairs || !self.execution.pairs_passes, "execution.pairs_passes", problem);
        let loops = self.placement == Placement::Loop || self.schedule != Schedule::OneFOneB;
        problems.require(loops, "placement", "must be loop under the schedule 1f1b");
        self.verify_order(problems);
        let runs_alone = self.goal != Goal::Throughput || !trains;
        problems.require(runs_alone, "goal", "is of models that are run alone, and the plan trains this one");
        let updates = self.update != Update::Stale || trains;
        problems.require(updates, "update", "is of training, and the plan runs the model alone");
        let in_time = self.staleness() == 0 || self.target == Target::Altiplano;
        problems.require(in_time, "target", "does not train with late gradients");
        let has_pipelines = !matches!(self.target, Target::Fsdp | Target::Xla) || self.stages.len() == 1;
        problems.require(has_pipelines, "target", "runs no pipelines, and the plan has several stages");
        for (path, problem) in self.problems_of_servers() {
            let path = if path.is_empty() { "servers".to_string() } else { format!("servers.{path}") };
            problems.add(path, problem);
        }
    }

    /// Checks the plan's own order of calls, if there is one.
    fn verify_order(&self, problems: &mut Problems) {
        let is_own = self.schedule == Schedule::Found;
        let problem = "must be there under the schedule found, and under no other";
        if !problems.require(self.order.is_some() == is_own, "order", problem) {
            return;
        }
        // Late gradients run among the next step's calls, whose places depend on the schedule.
        let in_time = !is_own || self.update == Update::Synchronous;
        problems.require(in_time, "update", "must be synchronous under the schedule found");
        let Some(order) = &self.order else { return };
        if !is_countable(self.num_microbatches, self.stages.len()) {
            return;
        }
        let lane_of: Vec<usize> = (0..self.stages.len()).map(|stage| self.lane_of(stage)).collect();
        if let Some(problem) = order.problem(self.num_lanes(), &lane_of, self.num_microbatches) {
            problems.add("order", problem);
        }
    }

    fn verify_stages(&self, problems: &mut Problems) {
        let layer_of = self.layer_of();
        let mut used = BTreeSet::new();
        for (i, stage) in self.stages.iter().enumerate() {
            let mut of_stage = Problems::default();
            if self.verify_devices(i, &mut used, &mut of_stage) {
                self.verify_choices(stage, &mut of_stage);
                self.verify_shardings(stage, &layer_of, &mut of_stage);
                self.verify_storage(stage, &mut of_stage);
                self.verify_operands(stage, &layer_of, &mut of_stage);
            }
            let named = |error| match error {
                PlanError::Invalid { path, problem } => {
                    PlanError::Invalid { path: format!("stages[{i}].{path}"), problem }
                }
                error => error,
            };
            problems.0.extend(of_stage.0.into_iter().map(named));
        }
    }

    /// Returns false if the stage has no mesh on devices of the cluster.
    fn verify_devices(&self, i: usize, used: &mut BTreeSet<u32>, problems: &mut Problems) -> bool {
        let stage = &self.stages[i];
        let count = stage.mesh.axes.iter().try_fold(1u32, |n, a| n.checked_mul(a.size));
        let covers = count == Some(stage.devices.len() as u32) && !stage.devices.is_empty();
        if !problems.require(covers, "mesh", "must have as many positions as the stage has devices") {
            return false;
        }
        let known = (stage.group as usize) < self.cluster.groups.len();
        if !problems.require(known, "group", "names a group that the cluster does not have") {
            return false;
        }
        let of_group = self.cluster.devices_of(stage.group as usize);
        for &device in &stage.devices {
            if device >= self.cluster.num_devices() {
                problems.add("devices", "names a device that the cluster does not have");
            } else if !of_group.contains(&device) {
                problems.add("devices", "names a device of another group than the stage's");
            } else if i < self.num_lanes() && !used.insert(device) {
                problems.add("devices", "a device may serve one stage only, or the stages of one lane");
            }
        }
        let lane = &self.stages[self.lane_of(i)];
        let sizes = |s: &Stage| s.mesh.axes.iter().map(|a| a.size).collect::<Vec<u32>>();
        if stage.devices != lane.devices || stage.submesh != lane.submesh {
            problems.add("devices", "must be those of the first stage of its lane, in its submesh");
        } else if sizes(stage) != sizes(lane) {
            problems.add("mesh", "must have the sizes of the first stage of its lane");
        }
        true
    }

    fn verify_choices(&self, stage: &Stage, problems: &mut Problems) {
        problems.require(stage.zero <= 3, "zero", "must be 0, 1, 2 or 3");
        let offloads = !stage.offload.is_none();
        let problem = "must be none where servers hold the state and workers keep their activations";
        problems.require(!offloads || self.servers.is_none(), "offload", problem);
        let problem = "is of training, and the plan runs the model alone";
        problems.require(!offloads || self.schedule.trains(), "offload", problem);
        let levels = match &stage.recompute {
            Recomputation::ByLayer(levels) => levels.len() == stage.layers.len(),
            _ => true,
        };
        problems.require(levels, "recompute", "must be one word, or one for each of the stage's layers");
        let bounded =
            stage.solved.is_none_or(|s| is_wait(s.cost_s) && is_wait(s.lower_bound_s) && s.lower_bound_s <= s.cost_s);
        problems.require(bounded, "solved", "must be seconds, not negative, and the bound no more than the cost");
    }

    fn verify_shardings(&self, stage: &Stage, layer_of: &[Option<u32>], problems: &mut Problems) {
        for (v, layer) in self.graph.values().zip(layer_of) {
            let inside = layer.is_some_and(|l| stage.layers.contains(&l));
            let here = |what: &str| format!("shardings.{}{what}", v.0);
            let Some(value) = stage.shardings.get(&v) else {
                if inside {
                    problems.add(here(""), "is missing");
                }
                continue;
            };
            let rule = self.graph.rule(v);
            if !inside {
                problems.add(here(""), "is not in a layer of this stage");
            } else if !rule.allows(&value.strategy, &stage.mesh) {
                problems.add(here(".strategy"), "is not allowed by the op's sharding rule");
            } else {
                let result = rule.shardings(&value.strategy, &stage.mesh).result;
                if result.display(&stage.mesh).to_string() != value.sharding {
                    problems.add(here(".sharding"), "does not agree with its strategy");
                }
            }
        }
        if let Some((v, _)) = stage.shardings.last_key_value()
            && v.index() >= self.graph.len()
        {
            problems.add(format!("shardings.{}", v.0), "names no value of the graph");
        }
    }

    fn verify_storage(&self, stage: &Stage, problems: &mut Problems) {
        for (name, storage) in &stage.parameters {
            let here = || format!("parameters.{name}");
            let Some((p, _)) = self.graph.parameters().find(|(_, n)| n == name) else {
                problems.add(here(), "names no parameter of the graph");
                continue;
            };
            let shape = self.graph.shape(p);
            let mut all = [&storage.parameter, &storage.gradient, &storage.state].into_iter();
            let valid = all.all(|s| s.is_valid(shape, &stage.mesh));
            if !valid || storage.parameter.is_partial() || storage.state.is_partial() {
                problems.add(here(), "is not a valid storage sharding");
            }
        }
        for (v, sharding) in &stage.receives {
            let known = v.index() < self.graph.len();
            if !known || sharding.is_partial() || !sharding.is_valid(self.graph.shape(*v), &stage.mesh) {
                problems.add(format!("receives.{}", v.0), "is not a valid sharding of a value");
            }
        }
    }

    /// Checks that each operand is computed, held or received by the stage.
    fn verify_operands(&self, stage: &Stage, layer_of: &[Option<u32>], problems: &mut Problems) {
        let is_missing = |o: ValueId| match &self.graph.node(o).op {
            Op::Parameter(p) => !stage.parameters.contains_key(&p.name),
            _ => {
                let earlier = layer_of[o.index()].is_some_and(|l| l < stage.layers.start);
                earlier && !stage.receives.contains_key(&o)
            }
        };
        for (v, layer) in self.graph.values().zip(layer_of) {
            if !layer.is_some_and(|l| stage.layers.contains(&l)) {
                continue;
            }
            for _ in self.graph.node(v).operands.iter().filter(|&&o| is_missing(o)) {
                let problem = "uses a value that the stage neither holds nor receives";
                problems.add(format!("shardings.{}", v.0), problem);
            }
        }
    }
}

/// True if counts, sizes and rates of a group are positive and no wait is negative.
fn is_possible(group: &Group) -> bool {
    let Group { device, intra_node, inter_node, .. } = group;
    let links = is_rate(intra_node.bytes_per_s) && is_rate(inter_node.bytes_per_s);
    let waits = is_wait(intra_node.latency_s) && is_wait(inter_node.latency_s) && is_wait(device.launch_s);
    let rates = is_rate(device.memory_bytes_per_s)
        && device.peak_flops.values().all(|&p| is_rate(p))
        && device.host_bytes_per_s.is_none_or(is_rate);
    let counts = group.nodes > 0 && group.devices_per_node > 0 && inter_node.nics > 0;
    let sizes = device.memory_bytes > 0 && group.host_memory_bytes != Some(0);
    let routes = group.dispatch.is_none_or(|routing| {
        routing.chosen > 0 && routing.chosen_groups > 0 && routing.chosen_groups <= routing.groups
    });
    links && waits && rates && counts && sizes && routes
}

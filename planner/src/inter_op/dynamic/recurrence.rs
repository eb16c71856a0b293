//! The recurrence: a query compiled to arcs, its values, and the path from a value back to the stages.

use altiplano_ir::op::gcd;
use std::ops::Range;

use super::counts::Counts;
use super::{Candidate, NoStages, Query, StageTable, tolerance};

/// A layer range on a block with at least one candidate, after a stage in some group.
#[derive(Debug, Clone)]
pub(super) struct Arc {
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) block: usize,
    /// The node that the arc leads to.
    to: usize,
    group: usize,
    /// Devices in the units of its group.
    units: usize,
    devices: u64,
    /// Indices into `Space::choices`.
    pub(super) choices: Range<usize>,
}

/// Arcs sorted by their start node, end and block.
#[derive(Debug, Default)]
pub(super) struct Arcs {
    list: Vec<Arc>,
    /// `list[starts[n]..starts[n + 1]]` start at node `n`.
    starts: Vec<usize>,
}

impl Arcs {
    fn starting_at(&self, node: usize) -> &[Arc] {
        &self.list[self.starts[node]..self.starts[node + 1]]
    }
}

/// A candidate. Its memory becomes the largest number of stages, from its own to the last, with which it fits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub(super) microbatch_s: f64,
    pub(super) step_s: f64,
    pub(super) max_position: u32,
    pub(super) id: u32,
}

/// One stage of a solution.
#[derive(Debug, Clone, Copy)]
pub(super) struct Leg {
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) block: usize,
    pub(super) choice: Choice,
}

/// Upper limits on every stage of a solution.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) microbatch_s: f64,
    pub(super) step_s: f64,
}

/// The input, compiled for one query.
///
/// The recurrence runs over nodes: a layer, and the group of the stage before it. The first layer has no stage before
/// it, so only its first node counts.
pub(super) struct Space {
    pub(super) num_layers: usize,
    /// Number of groups that stages can be in.
    num_groups: usize,
    /// Devices left, in units of the greatest common divisor of the sizes of a group's blocks.
    counts: Counts,
    pub(super) all_devices: bool,
    pub(super) num_stages: Option<usize>,
    /// See [`Query::devices`].
    devices: Vec<u64>,
    /// Upper bound on the number of stages.
    pub(super) max_stages: usize,
    /// From this many stages to the end, memory no longer depends on the number.
    pub(super) saturation: usize,
    pub(super) num_microbatches: u32,
    pub(super) relative_tolerance: f64,
    pub(super) arcs: Arcs,
    /// Each arc's choices, fastest first, none dominated by another.
    pub(super) choices: Vec<Choice>,
}

impl Space {
    /// Returns `None` if the cluster has no devices, no usable block or no layers. Without `check_memory`, every
    /// candidate is kept and fits everywhere.
    pub(super) fn new(table: &StageTable, query: &Query, blocks: &[usize], check_memory: bool) -> Option<Self> {
        let blocks = usable_blocks(table, query, blocks);
        let (units, counts) = units(table, query, &blocks)?;
        let groups: Vec<usize> = (0..units.len()).filter(|&group| units[group] > 0).collect();
        if groups.is_empty() || table.num_layers == 0 {
            return None;
        }
        let max_stages = match query.num_stages {
            Some(n) => usize::try_from(n).ok()?,
            None => table.num_layers.min(counts.sum()),
        };
        if max_stages == 0 || max_stages > table.num_layers.min(counts.sum()) {
            return None;
        }
        let mut space = Space {
            num_layers: table.num_layers,
            num_groups: groups.len(),
            counts,
            all_devices: query.all_devices,
            num_stages: query.num_stages.map(|_| max_stages),
            devices: query.devices.clone(),
            max_stages,
            saturation: 1,
            num_microbatches: query.num_microbatches.max(1),
            relative_tolerance: tolerance(query),
            arcs: Arcs::default(),
            choices: Vec::new(),
        };
        let max_position = |candidate: &Candidate, group: usize| {
            let limit_bytes = query.rooms[group].device_memory_bytes;
            if check_memory { max_position(candidate, query, limit_bytes, max_stages as u32) } else { u32::MAX }
        };
        for (first, &before) in (0..table.num_layers).flat_map(|first| groups.iter().map(move |group| (first, group))) {
            space.arcs.starts.push(space.arcs.list.len());
            if first == 0 && before != groups[0] {
                continue;
            }
            for end in first + 1..=table.num_layers {
                for &block in &blocks {
                    let start = space.choices.len();
                    let group = table.blocks[block].group;
                    let entering_s = table.entering_s(first, block, before);
                    space.add_choices(table.candidates(first, end, block), entering_s, &|c| max_position(c, group));
                    if space.choices.len() > start {
                        let position = groups.iter().position(|&g| g == group)?;
                        space.arcs.list.push(Arc {
                            first,
                            end,
                            block,
                            to: end * groups.len() + position,
                            group,
                            units: (table.blocks[block].shape.num_devices() / units[group]) as usize,
                            devices: table.blocks[block].shape.num_devices(),
                            choices: start..space.choices.len(),
                        });
                    }
                }
            }
        }
        space.arcs.starts.push(space.arcs.list.len());
        space.saturation = space
            .choices
            .iter()
            .filter(|choice| choice.max_position != u32::MAX)
            .map(|choice| choice.max_position as usize + 1)
            .max()
            .unwrap_or(1);
        Some(space)
    }

    /// Appends the candidates that can be chosen at all, fastest first, without those that an earlier one beats in
    /// time, step and memory.
    fn add_choices(&mut self, candidates: &[Candidate], entering_s: f64, max_position: &impl Fn(&Candidate) -> u32) {
        let start = self.choices.len();
        let usable = candidates.iter().filter(|c| c.has_times());
        self.choices.extend(usable.map(|candidate| Choice {
            microbatch_s: candidate.microbatch_s + entering_s,
            step_s: candidate.step_s,
            max_position: max_position(candidate),
            id: candidate.id,
        }));
        self.choices[start..].sort_by(|a, b| {
            a.microbatch_s
                .total_cmp(&b.microbatch_s)
                .then(a.step_s.total_cmp(&b.step_s))
                .then(b.max_position.cmp(&a.max_position))
                .then(a.id.cmp(&b.id))
        });
        let mut kept = start;
        for i in start..self.choices.len() {
            let choice = self.choices[i];
            let beaten = self.choices[start..kept]
                .iter()
                .any(|better| better.step_s <= choice.step_s && better.max_position >= choice.max_position);
            if choice.max_position > 0 && !beaten {
                self.choices[kept] = choice;
                kept += 1;
            }
        }
        self.choices.truncate(kept);
    }

    /// The fastest choice of an arc within the limits, with `position` stages from it to the end.
    pub(super) fn pick(&self, arc: &Arc, limits: Limits, position: usize) -> Option<Choice> {
        self.choices[arc.choices.clone()]
            .iter()
            .take_while(|choice| choice.microbatch_s <= limits.microbatch_s)
            .find(|choice| choice.step_s <= limits.step_s && choice.max_position as usize >= position)
            .copied()
    }

    /// True if a stage with `position` stages from it to the end may be on the block of an arc.
    pub(super) fn may_be_at(&self, arc: &Arc, position: usize) -> bool {
        let stage = self.devices.len().checked_sub(position).and_then(|stage| self.devices.get(stage));
        self.devices.is_empty() || stage == Some(&arc.devices)
    }

    /// The arcs with at least one choice within the limits.
    pub(super) fn arcs_within(&self, limits: Limits) -> Arcs {
        let mut within = Arcs::default();
        for node in 0..self.num_layers * self.num_groups {
            within.starts.push(within.list.len());
            let arcs = self.arcs.starting_at(node).iter();
            let arcs = arcs.filter(|arc| self.pick(arc, limits, 1).is_some());
            within.list.extend(arcs.cloned());
        }
        within.starts.push(within.list.len());
        within
    }
}

/// Indices of the blocks that fit the cluster.
pub(super) fn usable_blocks(table: &StageTable, query: &Query, blocks: &[usize]) -> Vec<usize> {
    let usable = |&i: &usize| {
        let block = table.blocks[i];
        let room = query.rooms.get(block.group);
        room.is_some_and(|room| block.shape.is_block_of(room.nodes, room.devices_per_node))
    };
    blocks.iter().copied().filter(usable).collect()
}

/// For each group the greatest common divisor of its blocks' sizes, zero if it has none, and the counts of such units.
/// Returns `None` if every device must be used and cannot be.
pub(super) fn units(table: &StageTable, query: &Query, blocks: &[usize]) -> Option<(Vec<u64>, Counts)> {
    let mut units = vec![0; query.rooms.len()];
    for &i in blocks {
        let block = table.blocks[i];
        units[block.group] = gcd(units[block.group], block.shape.num_devices());
    }
    let budget = |(room, &unit): (&super::Room, &u64)| {
        let total = room.num_devices();
        let even = if unit == 0 { total == 0 } else { total.is_multiple_of(unit) };
        let whole = even || !query.all_devices;
        if whole { usize::try_from(total.checked_div(unit).unwrap_or(0)).ok() } else { None }
    };
    let budgets: Option<Vec<usize>> = query.rooms.iter().zip(&units).map(budget).collect();
    Some((units, Counts::of(budgets?)?))
}

/// The largest number of stages from this one to the last with which the candidate fits: 0 if it never fits, `u32::MAX`
/// if it fits with all `max_stages`.
fn max_position(candidate: &Candidate, query: &Query, limit_bytes: u64, max_stages: u32) -> u32 {
    let fits = |position: u32| {
        let held = query.schedule.in_flight(query.num_microbatches.max(1), position, 0);
        candidate.peak_bytes(held) <= limit_bytes
    };
    if fits(max_stages) {
        return u32::MAX;
    }
    // Bisection: `in_flight` never falls with the position. `low` fits or is 0, `high` does not fit.
    let (mut low, mut high) = (0, max_stages);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

/// Values of the recurrence: `row(s, n)[d]` is the least cost of the layers from that of node `n` on, in exactly `s`
/// stages on `d` device units (see [`Counts`]). `d` is exact if all devices must be used, else an upper limit. If
/// `saturating`, the last level stands for its own number of stages and every larger one.
pub(super) struct Costs {
    num_nodes: usize,
    width: usize,
    levels: usize,
    saturating: bool,
    rows: Vec<f64>,
    /// For each node, the minimum of the last two levels: the rest after a stage of the last level if `saturating`.
    joined: Vec<f64>,
}

impl Costs {
    fn row(&self, level: usize, node: usize) -> &[f64] {
        let start = (level * self.num_nodes + node) * self.width;
        &self.rows[start..start + self.width]
    }

    /// Costs of the rest after a stage of `level` that leads to `node`.
    fn rest(&self, level: usize, node: usize) -> &[f64] {
        if self.saturating && level == self.levels {
            &self.joined[node * self.width..(node + 1) * self.width]
        } else {
            self.row(level - 1, node)
        }
    }
}

/// Lower bounds on the cost before a layer, and the cost above which a solution is of no interest.
pub(super) struct Prune {
    /// Pairs of a number of stages and prefix costs, the smallest number first. They hold if every stage of the prefix
    /// has at least that many stages to the end.
    pub(super) prefixes: Vec<(usize, Vec<f64>)>,
    pub(super) cap: f64,
}

impl Prune {
    /// The sharpest bound on the cost before a stage with `level` stages to the end.
    fn before(&self, level: usize) -> Option<&[f64]> {
        let valid = |(position, _): &&(usize, Vec<f64>)| *position <= level + 1;
        let sharpest = self.prefixes.iter().take_while(valid).last();
        sharpest.map(|(_, prefix)| prefix.as_slice())
    }
}

impl Space {
    /// Computes the recurrence. `cost` is that of an arc with the given number of stages to the end (infinite: not
    /// possible). `join` adds it to the cost of the rest; both `+` and `max` make sense.
    pub(super) fn costs(
        &self,
        arcs: &Arcs,
        levels: usize,
        saturating: bool,
        cost: impl Fn(&Arc, usize) -> f64,
        join: impl Fn(f64, f64) -> f64,
        prune: Option<Prune>,
    ) -> Costs {
        let (layers, width) = (self.num_layers, self.counts.width());
        let (first_end, num_nodes) = (layers * self.num_groups, (layers + 1) * self.num_groups);
        let level_len = num_nodes * width;
        let (mut costs, mut live) = self.without_stages(levels, saturating);
        for level in 1..=levels {
            let last = saturating && level == levels;
            let bound = prune.as_ref().and_then(|prune| Some((prune.before(level)?, prune.cap)));
            costs.rows.resize((level + 1) * level_len, f64::INFINITY);
            let (done, current) = costs.rows.split_at_mut(level * level_len);
            let previous = &done[(level - 1) * level_len..];
            let mut new_live: Vec<Range<usize>> = vec![0..0; num_nodes];
            if last {
                if levels > 1 {
                    costs.joined.copy_from_slice(previous);
                } else {
                    new_live[first_end..].clone_from_slice(&live[first_end..]);
                }
            }
            for node in (0..first_end).rev() {
                let layer = node / self.num_groups;
                let row = &mut current[node * width..(node + 1) * width];
                // Stages before this one need a layer and a device each.
                let before = match self.num_stages {
                    Some(n) if !saturating => n - level,
                    _ => usize::from(layer > 0),
                };
                let possible = layer >= before && (layer == 0 || before > 0) && layers - layer >= level;
                if possible {
                    let limit = self.counts.end_before(before);
                    for arc in arcs.starting_at(node) {
                        let (rest, known) = if last {
                            (costs.joined.as_slice(), join_ranges(&live[arc.to], &new_live[arc.to]))
                        } else {
                            (previous, live[arc.to].clone())
                        };
                        let end = known.end.min(limit.saturating_sub(self.counts.shift(arc.group, arc.units)));
                        if known.start >= end {
                            continue;
                        }
                        let cost = cost(arc, level);
                        if cost < f64::INFINITY {
                            let rest = &rest[arc.to * width..];
                            self.put_before(arc, rest, known.start..end, row, |rest| join(rest, cost));
                        }
                    }
                    if let Some((prefix, cap)) = bound {
                        let prefix = &prefix[node * width..(node + 1) * width];
                        drop_above(row, prefix, cap);
                    }
                    new_live[node] = finite_part(row);
                }
                if last {
                    let joined = &mut costs.joined[node * width..(node + 1) * width];
                    for (joined, &value) in joined.iter_mut().zip(row.iter()) {
                        *joined = joined.min(value);
                    }
                }
            }
            live = new_live;
            if level < levels && live.iter().all(Range::is_empty) {
                // Nothing remains that another stage could be put in front of.
                costs.levels = level;
                costs.saturating = false;
                break;
            }
        }
        costs
    }

    /// The costs of no stages, and for each node the part of its row that is finite.
    fn without_stages(&self, levels: usize, saturating: bool) -> (Costs, Vec<Range<usize>>) {
        let width = self.counts.width();
        let (first_end, num_nodes) = (self.num_layers * self.num_groups, (self.num_layers + 1) * self.num_groups);
        let no_layers_left = if self.all_devices { 1 } else { width };
        let mut rows = vec![f64::INFINITY; num_nodes * width];
        for row in rows[first_end * width..].chunks_mut(width) {
            row[..no_layers_left].fill(0.0);
        }
        let mut joined = vec![f64::INFINITY; if saturating { rows.len() } else { 0 }];
        if saturating && levels == 1 {
            joined[first_end * width..].copy_from_slice(&rows[first_end * width..]);
        }
        let mut live = vec![0..0; num_nodes];
        live[first_end..].fill(0..no_layers_left);
        (Costs { num_nodes, width, levels, saturating, rows, joined }, live)
    }

    /// Puts the stage of an arc before the rest, whose costs are those of `rest` within `known`. Keeps the lower cost of
    /// each entry of `row`.
    fn put_before(&self, arc: &Arc, rest: &[f64], known: Range<usize>, row: &mut [f64], join: impl Fn(f64) -> f64) {
        self.counts.for_each_run(arc.group, arc.units, known, |run, shift| {
            let target = &mut row[run.start + shift..run.end + shift];
            for (target, &rest) in target.iter_mut().zip(&rest[run]) {
                let joined = join(rest);
                *target = if joined < *target { joined } else { *target };
            }
        });
    }

    /// Per node and device units, the least cost of the layers before it, for any number of stages. It is infinite if
    /// the rest takes the sum above the cap. `after` is a saturated single level of [`Space::costs`].
    pub(super) fn prefix_costs(
        &self,
        arcs: &Arcs,
        cost: impl Fn(&Arc) -> f64,
        after: Option<(&Costs, f64)>,
    ) -> Vec<f64> {
        let width = self.counts.width();
        let num_nodes = (self.num_layers + 1) * self.num_groups;
        let mut costs = vec![f64::INFINITY; num_nodes * width];
        let nothing_placed = if self.all_devices { 1 } else { width };
        costs[..nothing_placed].fill(0.0);
        for node in 0..self.num_layers * self.num_groups {
            let (sources, targets) = costs.split_at_mut((node + 1) * width);
            let source = &mut sources[node * width..];
            if let Some((after, cap)) = after {
                drop_above(source, after.row(1, node), cap);
            }
            let live = finite_part(source);
            if live.is_empty() {
                continue;
            }
            for arc in arcs.starting_at(node) {
                let arc_cost = cost(arc);
                if arc_cost == f64::INFINITY {
                    continue;
                }
                let target = &mut targets[(arc.to - node - 1) * width..][..width];
                self.counts.for_each_run(arc.group, arc.units, live.clone(), |run, shift| {
                    let target = &mut target[run.start + shift..run.end + shift];
                    for (target, &before) in target.iter_mut().zip(&source[run]) {
                        let joined = before + arc_cost;
                        *target = if joined < *target { joined } else { *target };
                    }
                });
            }
        }
        costs
    }

    /// The least cost of all layers, and the number of stages (or level) that has it.
    pub(super) fn cheapest(&self, costs: &Costs) -> Option<(f64, usize)> {
        let levels = match self.num_stages {
            Some(n) if !costs.saturating => n..=n.min(costs.levels),
            _ => 1..=costs.levels,
        };
        levels
            .map(|level| (costs.row(level, 0)[self.counts.width() - 1], level))
            .filter(|(cost, _)| *cost < f64::INFINITY)
            .min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// The arcs of the cheapest solution with their levels: at each node the first arc whose cost is
    /// within `slack` of the least.
    pub(super) fn walk<'a>(
        &self,
        arcs: &'a Arcs,
        costs: &Costs,
        level: usize,
        cost: impl Fn(&Arc, usize) -> f64,
        join: impl Fn(f64, f64) -> f64,
        slack: f64,
    ) -> Vec<(&'a Arc, usize)> {
        let (mut level, mut node, mut devices) = (level, 0, self.counts.width() - 1);
        let mut path = Vec::new();
        while node < self.num_layers * self.num_groups {
            let goal = costs.row(level, node)[devices] + slack;
            let step = arcs.starting_at(node).iter().find_map(|arc| {
                let left = self.counts.without(devices, arc.group, arc.units)?;
                let rest = costs.rest(level, arc.to)[left];
                (rest < f64::INFINITY && join(rest, cost(arc, level)) <= goal).then_some((arc, left))
            });
            let Some((arc, left)) = step else {
                debug_assert!(false, "a finite cost comes from some arc");
                return Vec::new();
            };
            path.push((arc, level));
            (node, devices) = (arc.to, left);
            let stays = costs.saturating
                && level == costs.levels
                && costs.row(level, node)[devices] < costs.row(level - 1, node)[devices];
            if !stays {
                level -= 1;
            }
        }
        path
    }
}

fn join_ranges(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    if a.is_empty() {
        b.clone()
    } else if b.is_empty() {
        a.clone()
    } else {
        a.start.min(b.start)..a.end.max(b.end)
    }
}

/// Removes values that exceed the cap together with the value of the opposite side, which gets all other devices.
fn drop_above(row: &mut [f64], opposite: &[f64], cap: f64) {
    for (value, &other) in row.iter_mut().zip(opposite.iter().rev()) {
        if *value + other > cap {
            *value = f64::INFINITY;
        }
    }
}

/// The range from the first to the last finite value.
fn finite_part(row: &[f64]) -> Range<usize> {
    let is_finite = |value: &f64| *value < f64::INFINITY;
    match (row.iter().position(is_finite), row.iter().rposition(is_finite)) {
        (Some(first), Some(last)) => first..last + 1,
        _ => 0..0,
    }
}

impl Space {
    /// The fullest stage of the plan whose fullest stage is least full, as a share of its device's memory. Uses the
    /// same recurrence with the maximum of those shares instead of the sum of times. Returns `None` if there is no plan
    /// however large the memory.
    pub(super) fn least_memory(&self, table: &StageTable, query: &Query) -> Option<NoStages> {
        let held = |position: usize| query.schedule.in_flight(self.num_microbatches, position as u32, 0);
        let limit = |arc: &Arc| query.rooms[arc.group].device_memory_bytes;
        let bytes = |arc: &Arc, position: usize| -> u64 {
            table
                .candidates(arc.first, arc.end, arc.block)
                .iter()
                .filter(|c| c.has_times())
                .map(|candidate| candidate.peak_bytes(held(position)))
                .min()
                .unwrap_or(u64::MAX)
        };
        // Exact as `f64` up to 2^53 bytes, which is 9 PB.
        let cost = |arc: &Arc, position: usize| match self.may_be_at(arc, position) {
            true => bytes(arc, position) as f64 / limit(arc).max(1) as f64,
            false => f64::INFINITY,
        };
        let (levels, saturating) = match self.num_stages {
            Some(n) => (n, false),
            None => {
                let full = held(self.max_stages);
                let same = (1..=self.max_stages).find(|&position| held(position) == full);
                (same.unwrap_or(self.max_stages), true)
            }
        };
        let costs = self.costs(&self.arcs, levels, saturating, cost, f64::max, None);
        let (_, level) = self.cheapest(&costs)?;
        let path = self.walk(&self.arcs, &costs, level, cost, f64::max, 0.0);
        let num_stages = path.len();
        let part = |&(stage, arc): &(usize, &Arc)| cost(arc, num_stages - stage);
        let (stage, arc) = path
            .iter()
            .enumerate()
            .map(|(stage, (arc, _))| (stage, *arc))
            .max_by(|a, b| part(a).total_cmp(&part(b)).then(b.0.cmp(&a.0)))?;
        let (required_bytes, limit_bytes) = (bytes(arc, num_stages - stage), limit(arc));
        (required_bytes > limit_bytes).then(|| NoStages::Memory {
            required_bytes,
            limit_bytes,
            layers: arc.first..arc.end,
            block: table.blocks[arc.block],
            stage: stage as u32,
            num_stages: num_stages as u32,
            in_flight: held(num_stages - stage),
        })
    }
}

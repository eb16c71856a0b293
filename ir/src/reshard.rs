//! Conversion from one sharding to another by collectives.
//!
//! A short list of collectives repairs a mismatch between two shardings of a value. The layouts alone determine it.
//! Axes that must go are gathered, exchanged or reduced, minor-most first. Axes that must come are sliced in. The
//! planner prices exactly this list, and the runtime executes exactly this list.

use crate::mesh::{AxisId, Mesh};
use crate::op::Reducer;
use crate::sharding::{Axes, DimLayout, Segment, Sharding};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;

/// A dimension that a collective splits or joins within each of `outer` equal blocks.
#[derive(Clone, Copy, Debug)]
pub struct BlockedDim {
    pub dim: usize,
    pub outer: u64,
}

impl BlockedDim {
    /// The dimension as a [`Collective`] names it.
    pub fn new(dim: u8, outer: u64) -> BlockedDim {
        BlockedDim { dim: usize::from(dim), outer }
    }
}

/// One collective on local tensors. A dimension is seen as `outer` blocks. Gathers concatenate and slices cut within
/// each block, which keeps the order of layouts with several segments. Groups are ordered by position along `axes`,
/// major first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Each device gets the reduction of all operands.
    AllReduce { axes: Vec<AxisId>, reducer: Reducer },
    /// Each device gets its slice of the reduction.
    ReduceScatter { axes: Vec<AxisId>, reducer: Reducer, dim: u8, outer: u64 },
    /// Each device gets all slices.
    AllGather { axes: Vec<AxisId>, dim: u8, outer: u64 },
    /// Each device sends slices of `split_dim` and concatenates the slices that it receives along `concat_dim`.
    AllToAll { axes: Vec<AxisId>, split_dim: u8, split_outer: u64, concat_dim: u8, concat_outer: u64 },
    /// Each device keeps its slice; nothing is sent.
    LocalSlice { axes: Vec<AxisId>, dim: u8, outer: u64 },
    /// The device at position 0 along `axes` keeps its values, and the others take the reducer's neutral element. A
    /// replicated value becomes a partial one. Nothing is sent.
    KeepFirst { axes: Vec<AxisId>, reducer: Reducer },
    /// Each device gets its block of `dim`, extended by the `low` elements before it and the `high` elements after it.
    /// These come from as many neighbours as hold them. Beyond the ends of the dimension lies the reducer's neutral
    /// element.
    Halo { axes: Vec<AxisId>, dim: u8, low: u64, high: u64, reducer: Reducer },
    /// Each device gets the value of the device `by` places after it in its group, wrapping around at the end. This is
    /// one round of a ring.
    Shift { axes: Vec<AxisId>, by: u64 },
}

impl Collective {
    pub fn axes(&self) -> &[AxisId] {
        match self {
            Collective::AllReduce { axes, .. }
            | Collective::ReduceScatter { axes, .. }
            | Collective::AllGather { axes, .. }
            | Collective::AllToAll { axes, .. }
            | Collective::LocalSlice { axes, .. }
            | Collective::KeepFirst { axes, .. }
            | Collective::Halo { axes, .. }
            | Collective::Shift { axes, .. } => axes,
        }
    }

    pub fn axes_mut(&mut self) -> &mut Vec<AxisId> {
        match self {
            Collective::AllReduce { axes, .. }
            | Collective::ReduceScatter { axes, .. }
            | Collective::AllGather { axes, .. }
            | Collective::AllToAll { axes, .. }
            | Collective::LocalSlice { axes, .. }
            | Collective::KeepFirst { axes, .. }
            | Collective::Halo { axes, .. }
            | Collective::Shift { axes, .. } => axes,
        }
    }

    /// The same collective with each axis replaced.
    pub fn renamed(&self, by: impl Fn(AxisId) -> AxisId) -> Collective {
        let mut renamed = self.clone();
        renamed.axes_mut().iter_mut().for_each(|axis| *axis = by(*axis));
        renamed
    }

    /// Returns true if devices send anything to each other.
    pub fn communicates(&self) -> bool {
        !matches!(self, Collective::LocalSlice { .. } | Collective::KeepFirst { .. })
    }

    pub fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce { .. } => "all_reduce",
            Collective::ReduceScatter { .. } => "reduce_scatter",
            Collective::AllGather { .. } => "all_gather",
            Collective::AllToAll { .. } => "all_to_all",
            Collective::LocalSlice { .. } => "local_slice",
            Collective::KeepFirst { .. } => "keep_first",
            Collective::Halo { .. } => "halo",
            Collective::Shift { .. } => "shift",
        }
    }

    /// The elements that a device copies into another order before and after the collective, when a collective library
    /// runs it. Such a library sends and receives the part of each peer as one contiguous run.
    pub(crate) fn rearranged_elements(&self, operand: &[u64], mesh: &Mesh) -> [u64; 2] {
        let result = self.result_shape(operand, mesh);
        let all = |shape: &[u64]| shape.iter().product::<u64>();
        // A single part, or parts of the first dimension, are contiguous already.
        let is_run = |dim: u8, outer: u64| outer == 1 && all(&operand[..usize::from(dim)]) == 1;
        let unless = |is_run: bool, elements: u64| if is_run { 0 } else { elements };
        match *self {
            Collective::ReduceScatter { dim, outer, .. } => [unless(is_run(dim, outer), all(operand)), 0],
            Collective::AllGather { dim, outer, .. } => [0, unless(is_run(dim, outer), all(&result))],
            Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } => {
                let mut part = operand.to_vec();
                part[usize::from(split_dim)] /= mesh.product(self.axes());
                let joined = concat_outer == 1 && all(&part[..usize::from(concat_dim)]) == 1;
                [unless(is_run(split_dim, split_outer), all(operand)), unless(joined, all(&result))]
            }
            Collective::Halo { .. } => [0, all(operand).saturating_mul(mesh.product(self.axes()))],
            Collective::AllReduce { .. }
            | Collective::LocalSlice { .. }
            | Collective::KeepFirst { .. }
            | Collective::Shift { .. } => [0, 0],
        }
    }

    /// The local shape of the result.
    pub fn result_shape(&self, operand: &[u64], mesh: &Mesh) -> Vec<u64> {
        let n = mesh.product(self.axes());
        let mut shape = operand.to_vec();
        match self {
            Collective::AllReduce { .. } | Collective::KeepFirst { .. } | Collective::Shift { .. } => {}
            Collective::ReduceScatter { dim, .. } | Collective::LocalSlice { dim, .. } => shape[*dim as usize] /= n,
            Collective::AllGather { dim, .. } => shape[*dim as usize] = shape[*dim as usize].saturating_mul(n),
            Collective::AllToAll { split_dim, concat_dim, .. } => {
                shape[*split_dim as usize] /= n;
                shape[*concat_dim as usize] = shape[*concat_dim as usize].saturating_mul(n);
            }
            Collective::Halo { dim, low, high, .. } => {
                let size = &mut shape[*dim as usize];
                *size = size.saturating_add(*low).saturating_add(*high);
            }
        }
        shape
    }
}

/// A collective and the sharding after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub collective: Collective,
    pub result: Sharding,
}

/// The collectives that turn a value of sharding `from` into one of sharding `to`, in order. The list is empty if the
/// two are equal. Both shardings must be valid for the same shape on `mesh`.
pub fn reshard(from: &Sharding, to: &Sharding, mesh: &Mesh) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    if from == to {
        return steps;
    }
    let mut now = from.clone();

    // Slice replicated axes that the target splits first: everything after it gets smaller.
    push_free_axes(&mut now, to, mesh, &mut steps);

    // Reduce partial axes. Where possible, reduce-scatter straight into the dimension where the target wants the axis.
    // Such axes come first, so that the others reduce only a part of the value.
    let scatter = |now: &Sharding, axis: AxisId| {
        (0..now.dims.len()).find_map(|dim| match now.dims[dim].next_split(&to.dims[dim], mesh) {
            Some((next, a, outer)) if a == axis => Some((dim, next, outer)),
            _ => None,
        })
    };
    let to_reduce = |now: &Sharding| {
        let mut open = now.partial.iter().filter(|p| !to.partial.contains(p));
        open.clone().find(|(axis, _)| scatter(now, *axis).is_some()).or_else(|| open.next()).copied()
    };
    while let Some((axis, reducer)) = to_reduce(&now) {
        let scatter = scatter(&now, axis);
        now.partial.retain(|p| p.0 != axis);
        let axes = vec![axis];
        let collective = match scatter {
            Some((dim, next, outer)) => {
                now.dims[dim] = next;
                Collective::ReduceScatter { axes, reducer, dim: dim as u8, outer }
            }
            None => Collective::AllReduce { axes, reducer },
        };
        record(&mut steps, collective, &now);
        push_free_axes(&mut now, to, mesh, &mut steps);
    }

    // Exchange axes in the wrong dimension into the right one, or gather them.
    while let Some(dim) = (0..now.dims.len()).find(|&d| !now.dims[d].is_refined_by(&to.dims[d], mesh)) {
        let Some((next, axis, outer)) = now.dims[dim].pop(mesh) else { break };
        let mut gathered = now.clone();
        gathered.dims[dim] = next;
        let exchange = (0..now.dims.len()).find_map(|d| match gathered.dims[d].next_split(&to.dims[d], mesh) {
            Some((next, a, outer)) if a == axis && d != dim => Some((d, next, outer)),
            _ => None,
        });
        now = gathered;
        let axes = vec![axis];
        let collective = match exchange {
            Some((split_dim, next, split_outer)) => {
                now.dims[split_dim] = next;
                Collective::AllToAll {
                    axes,
                    split_dim: split_dim as u8,
                    split_outer,
                    concat_dim: dim as u8,
                    concat_outer: outer,
                }
            }
            None => Collective::AllGather { axes, dim: dim as u8, outer },
        };
        record(&mut steps, collective, &now);
        push_free_axes(&mut now, to, mesh, &mut steps);
    }

    // Make replicated values partial where the target is partial.
    for &(axis, reducer) in &to.partial {
        if !now.partial.contains(&(axis, reducer)) {
            now.partial.push((axis, reducer));
            now.partial.sort();
            record(&mut steps, Collective::KeepFirst { axes: vec![axis], reducer }, &now);
        }
    }
    debug_assert_eq!(&now, to, "reshard must reach its target");
    steps
}

/// One collective of a reshard, independent of the sizes of the tensor and, where no dimension has several segments, of
/// the mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    pub collective: Collective,
    /// The axes over which the operand and the result are split.
    operand_axes: Axes,
    result_axes: Axes,
}

impl Leg {
    /// The numbers of devices over which the operand and the result are split.
    pub fn parts(&self, mesh: &Mesh) -> [u64; 2] {
        [mesh.product(&self.operand_axes), mesh.product(&self.result_axes)]
    }
}

/// The number of a pattern of layouts. The collectives between two layouts depend on their patterns alone. Numbers are
/// those of one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    number: u32,
    of_thread: PhantomData<*const ()>,
}

/// The patterns and reshards that a thread has met.
#[derive(Default)]
struct Known {
    patterns: FxHashMap<Vec<u64>, Pattern>,
    next: u32,
    legs: FxHashMap<[Pattern; 2], Rc<[Leg]>>,
    key: Vec<u64>,
}

thread_local! {
    static KNOWN: RefCell<Known> = RefCell::default();
}

/// The largest number of remembered patterns, and of remembered reshards.
const MOST_KNOWN: usize = 1 << 20;

impl Pattern {
    /// The pattern of a layout on a mesh.
    pub fn of(sharding: &Sharding, mesh: &Mesh) -> Pattern {
        KNOWN.with_borrow_mut(|Known { patterns, next, key, .. }| {
            key.clear();
            // Mesh sizes only decide where a segment ends within a dimension.
            if sharding.has_several_segments() {
                key.extend(mesh.axes.iter().map(|a| u64::from(a.size)));
            }
            key.push(u64::MAX);
            sharding.pattern(key);
            if let Some(&known) = patterns.get(key.as_slice()) {
                return known;
            }
            if patterns.len() == MOST_KNOWN {
                patterns.clear();
            }
            let new = Pattern { number: *next, of_thread: PhantomData };
            *next += 1;
            patterns.insert(key.clone(), new);
            new
        })
    }
}

/// The collectives of [`reshard`], from a cache by the patterns of both layouts. A search asks for millions of reshards,
/// and the same few patterns recur in values of all sizes on all meshes.
pub fn legs(patterns: [Pattern; 2], from: &Sharding, to: &Sharding, mesh: &Mesh) -> Rc<[Leg]> {
    KNOWN.with_borrow_mut(|Known { legs, .. }| {
        if let Some(legs) = legs.get(&patterns) {
            return legs.clone();
        }
        let mut operand_axes: Axes = from.split_axes().collect();
        let leg = |step: Step| {
            let result_axes: Axes = step.result.split_axes().collect();
            let operand_axes = std::mem::replace(&mut operand_axes, result_axes.clone());
            Leg { collective: step.collective, operand_axes, result_axes }
        };
        let new: Rc<[Leg]> = reshard(from, to, mesh).into_iter().map(leg).collect();
        if legs.len() == MOST_KNOWN {
            legs.clear();
        }
        legs.insert(patterns, new.clone());
        new
    })
}

/// Slices in every axis that is replicated now and that the target wants next in some dimension.
fn push_free_axes(now: &mut Sharding, to: &Sharding, mesh: &Mesh, steps: &mut Vec<Step>) {
    let mut dim = 0;
    while dim < now.dims.len() {
        match now.dims[dim].next_split(&to.dims[dim], mesh) {
            Some((next, axis, outer)) if !uses(now, axis) => {
                now.dims[dim] = next;
                record(steps, Collective::LocalSlice { axes: vec![axis], dim: dim as u8, outer }, now);
                dim = 0;
            }
            _ => dim += 1,
        }
    }
}

fn uses(sharding: &Sharding, axis: AxisId) -> bool {
    sharding.split_axes().any(|a| a == axis) || sharding.partial.iter().any(|p| p.0 == axis)
}

/// Appends a step. Merges it with the previous step if that is the same collective over another axis.
fn record(steps: &mut Vec<Step>, collective: Collective, now: &Sharding) {
    if let Some(last) = steps.last_mut() {
        let merged = match (&mut last.collective, &collective) {
            (Collective::AllReduce { axes, reducer }, Collective::AllReduce { axes: more, reducer: r })
            | (Collective::KeepFirst { axes, reducer }, Collective::KeepFirst { axes: more, reducer: r })
                if reducer == r =>
            {
                axes.extend(more);
                axes.sort();
                true
            }
            _ => false,
        };
        if merged {
            last.result = now.clone();
            return;
        }
    }
    steps.push(Step { collective, result: now.clone() });
}

/// The sharding that also splits the last segment of dimension `dim` over `axis`, if that divides evenly.
pub fn split_further(sharding: &Sharding, dim: usize, axis: AxisId, mesh: &Mesh) -> Option<Sharding> {
    if uses(sharding, axis) {
        return None;
    }
    let mut segments: Vec<Segment> = sharding.dims[dim].segments().to_vec();
    let last = segments.last_mut()?;
    last.axes.push(axis);
    if last.size % mesh.product(&last.axes) != 0 {
        return None;
    }
    let mut finer = sharding.clone();
    finer.dims[dim] = DimLayout::from_segments(segments, mesh);
    Some(finer)
}

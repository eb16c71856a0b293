//! Ownership of buffers: the programs of a session with their ranks, and the buffers that hold parameters and state. It
//! is the same for all sessions, wherever their devices are.

use crate::compile::compile;
use crate::device::Plan;
use crate::element::Element;
use crate::error::RuntimeError;
use crate::host::{HostData, HostTensor};
use crate::layout::{Selection, held_indices, is_replica, summand_of};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::Reducer;
use altiplano_ir::program::{Buffer, BufferId, BufferKind, Program, Programs, TransferId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// The programs of a session. Ranks number the devices of all programs in order.
#[derive(Clone)]
pub(crate) struct Roster {
    pub plans: Vec<Arc<Plan>>,
    pub loss_is_mean: bool,
}

/// A program and one of its buffers.
pub(crate) type Holder = (usize, BufferId);

impl Roster {
    /// Compiles the bodies of the programs for which `runs` holds.
    pub(crate) fn new(programs: &Programs, check_nan: bool, runs: impl Fn(usize) -> bool) -> Roster {
        let first_rank = first_ranks(programs);
        let transfers: Vec<_> = (0..programs.transfers.len() as u32)
            .map(|t| (programs.transfers[t as usize].clone(), Arc::new(programs.messages(TransferId(t)))))
            .collect();
        let plan = |(index, program): (usize, &Program)| {
            Arc::new(Plan {
                index: index as u32,
                bodies: if runs(index) { program.bodies.iter().map(compile).collect() } else { Vec::new() },
                program: program.clone(),
                transfers: transfers.clone(),
                first_rank: first_rank.clone(),
                num_microbatches: programs.num_microbatches,
                check_nan,
            })
        };
        let plans = programs.programs.iter().enumerate().map(plan).collect();
        Roster { plans, loss_is_mean: programs.loss_is_mean }
    }

    /// The ranks of a program's devices.
    pub(crate) fn ranks(&self, p: usize) -> Range<usize> {
        let first = self.plans[p].first_rank[p];
        first..first + self.plans[p].program.devices.len()
    }

    pub(crate) fn num_ranks(&self) -> usize {
        self.plans.len().checked_sub(1).map_or(0, |last| self.ranks(last).end)
    }

    /// The program that a rank runs.
    pub(crate) fn program_of(&self, rank: usize) -> usize {
        (0..self.plans.len()).rposition(|p| self.ranks(p).start <= rank).unwrap_or(0)
    }

    /// The buffers for which `wanted` holds, with the program of each.
    fn buffers(&self, wanted: impl Fn(&BufferKind) -> bool) -> Vec<Holder> {
        let mut found = Vec::new();
        for (p, plan) in self.plans.iter().enumerate() {
            for (b, buffer) in plan.program.buffers.iter().enumerate() {
                if wanted(&buffer.kind) {
                    found.push((p, BufferId(b as u32)));
                }
            }
        }
        found
    }

    /// The buffers that hold a parameter, starting with the one that is updated.
    pub(crate) fn parameter(&self, name: &str) -> Result<Vec<Holder>, RuntimeError> {
        let mut holders = self.buffers(|kind| matches!(kind, BufferKind::Parameter { name: n } if n == name));
        // Copies received from other programs are never newer.
        holders.sort_by_key(|&(p, buffer)| !self.plans[p].program.writes(buffer));
        let unknown = || RuntimeError::UnknownParameter { name: name.to_string() };
        if holders.is_empty() { Err(unknown()) } else { Ok(holders) }
    }

    /// The buffers that hold the unrounded master copy of a parameter.
    pub(crate) fn masters(&self, name: &str) -> Vec<Holder> {
        self.buffers(
            |kind| matches!(kind, BufferKind::State { parameter, slot } if parameter == name && slot == "master"),
        )
    }

    pub(crate) fn state(&self, parameter: &str, slot: &str) -> Result<Vec<Holder>, RuntimeError> {
        let holders = self
            .buffers(|kind| matches!(kind, BufferKind::State { parameter: p, slot: s } if p == parameter && s == slot));
        let unknown = || RuntimeError::UnknownState { parameter: parameter.to_string(), slot: slot.to_string() };
        if holders.is_empty() { Err(unknown()) } else { Ok(holders) }
    }

    pub(crate) fn accumulator(&self, name: &str) -> Result<Vec<Holder>, RuntimeError> {
        let holders = self.buffers(|kind| matches!(kind, BufferKind::Accumulator { parameter } if parameter == name));
        let unknown = || RuntimeError::UnknownParameter { name: name.to_string() };
        if holders.is_empty() { Err(unknown()) } else { Ok(holders) }
    }

    /// Casts a tensor to the types of the wanted holders. It must fit all holders.
    pub(crate) fn cast(
        &self,
        name: &str,
        holders: &[Holder],
        tensor: &HostTensor,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Vec<(Holder, Arc<HostTensor>)>, RuntimeError> {
        tensor.check()?;
        let mut casts: BTreeMap<DType, Arc<HostTensor>> = BTreeMap::new();
        let mut all = Vec::new();
        for &(p, b) in holders {
            let buffer = self.plans[p].program.buffer(b);
            let expected = buffer.own_type();
            let floats = expected.dtype.is_float() && tensor.ty.dtype.is_float();
            if expected.shape != tensor.ty.shape || !(floats || expected.dtype == tensor.ty.dtype) {
                return Err(RuntimeError::TensorType { name: name.to_string(), expected, found: tensor.ty.clone() });
            }
            if wanted(p) {
                let cast = casts.entry(expected.dtype).or_insert_with(|| {
                    let cast = tensor.cast(expected.dtype);
                    Arc::new(cast.as_in(buffer).into_owned())
                });
                all.push(((p, b), cast.clone()));
            }
        }
        Ok(all)
    }

    /// Names of all parameters.
    pub(crate) fn parameters(&self) -> BTreeSet<String> {
        let buffers = self.plans.iter().flat_map(|p| &p.program.buffers);
        let name = |b: &Buffer| if let BufferKind::Parameter { name } = &b.kind { Some(name.clone()) } else { None };
        buffers.filter_map(name).collect()
    }

    /// Parameter and slot of all optimizer state.
    pub(crate) fn states(&self) -> BTreeSet<(String, String)> {
        let buffers = self.plans.iter().flat_map(|p| &p.program.buffers);
        let name = |b: &Buffer| match &b.kind {
            BufferKind::State { parameter, slot } => Some((parameter.clone(), slot.clone())),
            _ => None,
        };
        buffers.filter_map(name).collect()
    }
}

/// Rank of the first device of each program.
pub(crate) fn first_ranks(programs: &Programs) -> Vec<usize> {
    let sizes = programs.programs.iter().map(|program| program.devices.len());
    sizes.scan(0, |next, size| Some(std::mem::replace(next, *next + size))).collect()
}

impl Plan {
    /// Returns whether an earlier rank of the program holds the same part of a buffer.
    pub fn repeats(&self, buffer: BufferId, rank: usize) -> bool {
        let coordinates = self.coordinates(rank);
        is_replica(&self.program.buffer(buffer).sharding, &self.program.mesh, &coordinates)
    }

    fn coordinates(&self, rank: usize) -> Vec<u32> {
        self.program.mesh.coordinates((rank - self.first_rank[self.index as usize]) as u32)
    }

    /// Writes one device's part of a buffer into the whole tensor, unless another device has the same part.
    pub(crate) fn place_part(&self, buffer: BufferId, rank: usize, part: &HostData, whole: &mut HostTensor) {
        if self.repeats(buffer, rank) {
            return;
        }
        let sharding = &self.program.buffer(buffer).sharding;
        let coordinates = self.coordinates(rank);
        let shape: Vec<usize> = whole.ty.shape.iter().map(|&d| d as usize).collect();
        let selection = Selection::new(&shape, &held_indices(sharding, &self.program.mesh, &coordinates));
        put(&selection, part, &mut whole.data, summand_of(sharding, &coordinates));
    }
}

/// Writes a part into the whole tensor, or reduces it into the existing elements.
fn put(selection: &Selection, part: &HostData, whole: &mut HostData, reducer: Option<Reducer>) {
    fn typed<T: Element>(selection: &Selection, part: &[T], whole: &mut [T], reducer: Option<Reducer>) {
        match reducer {
            None => selection.write(part, whole),
            Some(reducer) => selection.combine(part, whole, reducer),
        }
    }
    match (part, whole) {
        (HostData::F32(p), HostData::F32(w)) => typed(selection, p, w, reducer),
        (HostData::F16(p), HostData::F16(w)) => typed(selection, p, w, reducer),
        (HostData::BF16(p), HostData::BF16(w)) => typed(selection, p, w, reducer),
        (HostData::I32(p), HostData::I32(w)) => typed(selection, p, w, reducer),
        (HostData::I64(p), HostData::I64(w)) => typed(selection, p, w, reducer),
        (HostData::Bool(p), HostData::Bool(w)) => typed(selection, p, w, reducer),
        _ => {}
    }
}

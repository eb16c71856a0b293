//! Values that move between stages: copied between devices of this process where parts stay whole, and else cut and
//! joined on the host, also for stages of other processes.

use super::Fault;
use super::bytes::read;
use super::compile::Compiler;
use super::stage::Spread;
use crate::error::KernelError;
use crate::layout::{Selection, held_indices};
use altiplano_ir::program::{Message, Program, Transfer};
use altiplano_ir::types::TensorType;
use altiplano_xla::pjrt::PjrtError;
use bytemuck::{Pod, cast_slice};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A part of the value that goes from a source device to one or more target devices.
struct Cut {
    source: usize,
    indices: Vec<Vec<u64>>,
    /// Positions of targets, each with the place of the part in what the target holds.
    to: Vec<(usize, Vec<Vec<u64>>)>,
}

/// A transfer between two lists of the client's devices. Those of another process are not in its list.
pub(super) struct Link {
    /// The source of each target, if all get the whole part of one source device.
    whole: Option<Vec<usize>>,
    cuts: Vec<Cut>,
    /// The types of the parts on a source and on a target device.
    types: [TensorType; 2],
    targets: Vec<usize>,
    sources: Vec<usize>,
}

impl Link {
    /// `of` gives a program and the client's devices of it.
    pub(super) fn new<'a>(
        transfer: &Transfer,
        messages: &[Message],
        of: impl Fn(u32) -> (&'a Program, Vec<usize>),
    ) -> Link {
        let end = |(program, buffer)| {
            let (program, devices): (&Program, _) = of(program);
            let described = program.buffer(buffer);
            (described.sharding.local_type(&described.ty, &program.mesh), devices)
        };
        let ((source, sources), (target, targets)) = (end(transfer.source), end(transfer.target));
        let is_whole = |indices: &[Vec<u64>], ty: &TensorType| {
            indices.iter().zip(&ty.shape).all(|(list, &size)| list.iter().copied().eq(0..size))
        };
        let only = |device: usize| {
            let mut ours = messages.iter().filter(|message| message.target as usize == device);
            let (first, more) = (ours.next()?, ours.next());
            let whole = is_whole(&first.source_indices, &source) && is_whole(&first.target_indices, &target);
            (whole && more.is_none()).then_some(first.source as usize)
        };
        let whole = (0..targets.len()).map(only).collect();
        let (program, _) = of(transfer.source.0);
        let sharding = &program.buffer(transfer.source.1).sharding;
        let mut cuts: BTreeMap<_, Cut> = BTreeMap::new();
        for message in messages {
            // Devices that hold the same send it once.
            let held = held_indices(sharding, &program.mesh, &program.mesh.coordinates(message.source));
            let new =
                || Cut { source: message.source as usize, indices: message.source_indices.clone(), to: Vec::new() };
            let cut = cuts.entry((held, &message.source_indices)).or_insert_with(new);
            cut.to.push((message.target as usize, message.target_indices.clone()));
        }
        Link { whole, cuts: cuts.into_values().collect(), types: [source, target], targets, sources }
    }

    /// The value on the devices of the target, which are of this process as those of the source.
    pub(super) fn carry(&self, compiler: &Compiler, from: &Spread) -> Result<Spread, Fault> {
        let Some(whole) = &self.whole else { return self.unpack(compiler, &self.pack(from)?) };
        let copy = |(&source, &to): (&usize, &usize)| match self.sources[source] == to {
            true => Ok(from[source].clone()),
            false => from[source].copy_to(to).map(Arc::new),
        };
        Ok(whole.iter().zip(&self.targets).map(copy).collect::<Result<Spread, PjrtError>>()?)
    }

    /// The parts that move, one after another.
    pub(super) fn pack(&self, from: &Spread) -> Result<Vec<u8>, PjrtError> {
        match self.types[0].dtype.bytes() {
            8 => self.cut::<u64>(from),
            4 => self.cut::<u32>(from),
            2 => self.cut::<u16>(from),
            _ => self.cut::<u8>(from),
        }
    }

    /// The value on the devices of the target, which are of this process, out of what [`Link::pack`] gave in another one.
    pub(super) fn unpack(&self, compiler: &Compiler, bytes: &[u8]) -> Result<Spread, Fault> {
        match self.types[1].dtype.bytes() {
            8 => self.join::<u64>(compiler, bytes),
            4 => self.join::<u32>(compiler, bytes),
            2 => self.join::<u16>(compiler, bytes),
            _ => self.join::<u8>(compiler, bytes),
        }
    }

    fn cut<T: Pod>(&self, from: &Spread) -> Result<Vec<u8>, PjrtError> {
        let shape = dims(&self.types[0]);
        let mut parts: BTreeMap<usize, Vec<T>> = BTreeMap::new();
        let mut packed = Vec::new();
        for Cut { source, indices, .. } in &self.cuts {
            if !parts.contains_key(source) {
                parts.insert(*source, read(&from[*source].to_host()?));
            }
            let selected = Selection::new(&shape, indices);
            let mut words = vec![T::zeroed(); selected.elements()];
            selected.read(&parts[source], &mut words);
            packed.extend_from_slice(cast_slice(&words));
        }
        Ok(packed)
    }

    fn join<T: Pod>(&self, compiler: &Compiler, bytes: &[u8]) -> Result<Spread, Fault> {
        let shape = dims(&self.types[1]);
        let elements = |cut: &Cut| cut.indices.iter().map(Vec::len).product::<usize>();
        let expected = self.cuts.iter().map(elements).sum::<usize>() * size_of::<T>();
        if expected != bytes.len() {
            return Err(Fault::Kernel(KernelError::MessageSize { expected, found: bytes.len() }));
        }
        let mut wholes = vec![vec![T::zeroed(); self.types[1].elements() as usize]; self.targets.len()];
        let mut rest = bytes;
        for cut in &self.cuts {
            let (part, after) = rest.split_at(elements(cut) * size_of::<T>());
            let words: Vec<T> = read(part);
            for (target, indices) in &cut.to {
                Selection::new(&shape, indices).write(&words, &mut wholes[*target]);
            }
            rest = after;
        }
        let sent = |(whole, &to): (&Vec<T>, &usize)| {
            compiler.client.buffer(cast_slice(whole), &self.types[1], to).map(Arc::new)
        };
        Ok(wholes.iter().zip(&self.targets).map(sent).collect::<Result<Spread, PjrtError>>()?)
    }
}

fn dims(ty: &TensorType) -> Vec<usize> {
    ty.shape.iter().map(|&size| size as usize).collect()
}

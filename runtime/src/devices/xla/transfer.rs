//! Values that move between stages.

use super::bytes::read;
use super::compile::Compiler;
use super::stage::Spread;
use crate::layout::Selection;
use altiplano_ir::program::{Message, Program, Transfer};
use altiplano_ir::types::TensorType;
use altiplano_xla::pjrt::PjrtError;
use bytemuck::{Pod, cast_slice};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// The way of a transfer.
enum Route {
    /// Each device gets the whole part of one source device.
    Whole(Vec<usize>),
    /// Parts are cut and joined on the host.
    Parts(Arc<Vec<Message>>),
}

/// A transfer between two lists of the client's devices.
pub(super) struct Link {
    route: Route,
    /// The types of the parts on a source and on a target device.
    types: [TensorType; 2],
    targets: Vec<usize>,
    sources: Vec<usize>,
}

impl Link {
    /// `of` gives a program and the client's devices of it.
    pub(super) fn new<'a>(
        transfer: &Transfer,
        messages: &Arc<Vec<Message>>,
        of: impl Fn(u32) -> (&'a Program, Vec<usize>),
    ) -> Link {
        let end = |(program, buffer)| {
            let (program, devices): (&Program, _) = of(program);
            let buffer = program.buffer(buffer);
            (buffer.sharding.local_type(&buffer.ty, &program.mesh), devices)
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
        let whole: Option<Vec<usize>> = (0..targets.len()).map(only).collect();
        let route = whole.map_or_else(|| Route::Parts(messages.clone()), Route::Whole);
        Link { route, types: [source, target], targets, sources }
    }

    /// The value on the devices of the target.
    pub(super) fn carry(&self, compiler: &Compiler, from: &Spread) -> Result<Spread, PjrtError> {
        match &self.route {
            Route::Whole(sources) => {
                let copy = |(&source, &to): (&usize, &usize)| match self.sources[source] == to {
                    true => Ok(from[source].clone()),
                    false => from[source].copy_to(to).map(Arc::new),
                };
                sources.iter().zip(&self.targets).map(copy).collect()
            }
            Route::Parts(messages) => match self.types[0].dtype.bytes() {
                8 => self.join::<u64>(messages, compiler, from),
                4 => self.join::<u32>(messages, compiler, from),
                2 => self.join::<u16>(messages, compiler, from),
                _ => self.join::<u8>(messages, compiler, from),
            },
        }
    }

    /// Copies the source's parts to the host, joins those of the target there, and copies them to its devices.
    fn join<T: Pod>(&self, messages: &[Message], compiler: &Compiler, from: &Spread) -> Result<Spread, PjrtError> {
        let mut parts: BTreeMap<u32, Vec<T>> = BTreeMap::new();
        for message in messages {
            if let Entry::Vacant(place) = parts.entry(message.source) {
                place.insert(read(&from[message.source as usize].to_host()?));
            }
        }
        let shapes = self.types.each_ref().map(|ty| ty.shape.iter().map(|&d| d as usize).collect::<Vec<_>>());
        let made = |(device, &to): (usize, &usize)| {
            let mut whole = vec![T::zeroed(); self.types[1].elements() as usize];
            for message in messages.iter().filter(|message| message.target as usize == device) {
                let cut = Selection::new(&shapes[0], &message.source_indices);
                let mut words = vec![T::zeroed(); cut.elements()];
                cut.read(&parts[&message.source], &mut words);
                Selection::new(&shapes[1], &message.target_indices).write(&words, &mut whole);
            }
            compiler.client.buffer(cast_slice(&whole), &self.types[1], to).map(Arc::new)
        };
        self.targets.iter().enumerate().map(made).collect()
    }
}

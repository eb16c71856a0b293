//! Collectives of devices that are processes, if sums need not follow the order of the group. MPI's own collective is
//! used if it has one for the type. Otherwise members send each other pieces, so that none receives more than its part.

use crate::arena::Storage;
use crate::collective::{
    Blocks, Edges, Exchange, Halo, Member, exchange, expect_bytes, fill_neutral, own, reduce, words_of,
};
use crate::element::{Class, with_class, with_width};
use crate::error::KernelError;
use crate::kernel::copy::Copy;
use crate::mpi::sys::{Communicator, fits};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::Reducer;
use altiplano_ir::reshard::{BlockedDim, Collective};
use std::sync::Arc;

/// The outcome of trying to run a collective by MPI.
pub(crate) enum Ran {
    Done(Storage),
    /// The collective must run as among threads; here is its operand.
    NotHere(Arc<Storage>),
}

/// Bytes in words of eight, to which all formats are aligned.
struct Bytes {
    words: Vec<u64>,
    bytes: usize,
}

impl Bytes {
    fn new(bytes: usize) -> Bytes {
        Bytes { words: vec![0; bytes.div_ceil(8)], bytes }
    }

    fn slice<T: bytemuck::Pod>(&self) -> &[T] {
        &bytemuck::cast_slice(&self.words)[..self.bytes / size_of::<T>()]
    }

    fn slice_mut<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes / size_of::<T>()]
    }
}

impl Member<'_> {
    /// Runs a collective over MPI, if this is a rank and need not reduce in order.
    pub(crate) fn run_by_mpi(
        &mut self,
        collective: &Collective,
        dtype: DType,
        shape: &[usize],
        operand: Arc<Storage>,
        in_place: bool,
    ) -> Result<Ran, KernelError> {
        let n = self.ranks.len();
        let group = match self.mailbox.ranks() {
            Some(wire) if n > 1 && !wire.in_order => wire.group(&self.ranks)?,
            _ => return Ok(Ran::NotHere(operand)),
        };
        let class = Class::of(dtype);
        let elements: usize = shape.iter().product();
        let whole = operand.bytes() * n;
        match collective {
            Collective::AllReduce { reducer, .. } => self.sum_all(&group, *reducer, dtype, operand, in_place),
            Collective::ReduceScatter { reducer, dim, outer, .. } => {
                let blocks = Blocks::of_part(shape, *dim, *outer, n);
                let mut parts = Bytes::new(operand.bytes());
                with_width!(class, T => for i in 0..n {
                    let dims = [(blocks.count, blocks.length * n, blocks.length), (blocks.length, 1, 1)];
                    let part = &mut parts.slice_mut::<T>()[i * elements / n..][..elements / n];
                    Copy::new(i * blocks.length, 0, dims).run(operand.slice::<T>(), part);
                });
                let mut result = operand.arena().allocate(class, elements / n)?;
                if dtype == DType::F32 && *reducer == Reducer::Sum && fits(elements) {
                    group.reduce_scatter_sum(parts.slice(), result.slice_mut())?;
                } else {
                    self.reduce_part(&parts, dtype, *reducer, &mut result)?;
                }
                Ok(Ran::Done(result))
            }
            Collective::AllGather { dim, outer, .. } if fits(whole) => {
                let blocks = Blocks::of_whole(shape, *dim, *outer);
                let mut result = operand.arena().allocate(class, elements * n)?;
                if blocks.count == 1 {
                    group.all_gather(operand.slice(), result.slice_mut())?;
                    return Ok(Ran::Done(result));
                }
                let mut parts = Bytes::new(whole);
                group.all_gather(operand.slice(), parts.slice_mut())?;
                with_width!(class, T => for i in 0..n {
                    let dims = [(blocks.count, blocks.length, blocks.length * n), (blocks.length, 1, 1)];
                    let part = &parts.slice::<T>()[i * elements..][..elements];
                    Copy::new(0, i * blocks.length, dims).run(part, result.slice_mut::<T>());
                });
                Ok(Ran::Done(result))
            }
            Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } if fits(operand.bytes()) => {
                let split = BlockedDim::new(*split_dim, *split_outer);
                let concat = BlockedDim::new(*concat_dim, *concat_outer);
                let (mut sent, mut got) = (Bytes::new(operand.bytes()), Bytes::new(operand.bytes()));
                let mut result = operand.arena().allocate(class, elements)?;
                let size = elements / n;
                with_width!(class, T => {
                    for to in 0..n {
                        let Exchange { cut, .. } = exchange(shape, split, concat, n, to, self.me);
                        cut.run(operand.slice::<T>(), &mut sent.slice_mut::<T>()[to * size..][..size]);
                    }
                    group.all_to_all(sent.slice(), got.slice_mut())?;
                    for from in 0..n {
                        let Exchange { join, .. } = exchange(shape, split, concat, n, self.me, from);
                        join.run(&got.slice::<T>()[from * size..][..size], result.slice_mut::<T>());
                    }
                });
                Ok(Ran::Done(result))
            }
            Collective::Halo { dim, low, high, reducer, .. } => {
                let halo = Halo { dim: usize::from(*dim), low: *low, high: *high, reducer: *reducer };
                Ok(Ran::Done(self.halo(&halo, dtype, shape, &operand)?))
            }
            _ => Ok(Ran::NotHere(operand)),
        }
    }

    fn sum_all(
        &self,
        group: &Communicator,
        reducer: Reducer,
        dtype: DType,
        operand: Arc<Storage>,
        in_place: bool,
    ) -> Result<Ran, KernelError> {
        let class = Class::of(dtype);
        let elements = operand.bytes() / class.bytes();
        if dtype == DType::F32 && reducer == Reducer::Sum && fits(elements) {
            let result = if in_place {
                // The sums replace the terms, of which MPI needs a copy.
                let mut result = own(operand, class, true)?;
                let terms = result.slice::<f32>().to_vec();
                group.all_reduce_sum(&terms, result.slice_mut())?;
                result
            } else {
                let mut result = operand.arena().allocate(class, elements)?;
                group.all_reduce_sum(operand.slice(), result.slice_mut())?;
                result
            };
            return Ok(Ran::Done(result));
        }
        Ok(Ran::NotHere(operand))
    }

    /// Reduces the parts for this member, in the order of the group.
    fn reduce_part(
        &mut self,
        parts: &Bytes,
        dtype: DType,
        reducer: Reducer,
        target: &mut Storage,
    ) -> Result<(), KernelError> {
        let size = target.bytes();
        let pieces = self.exchange_pieces(|to| words_of(&parts.slice::<u8>()[to * size..][..size]))?;
        for piece in &pieces {
            expect_bytes(bytemuck::cast_slice(piece), size)?;
        }
        with_class!(Class::of(dtype), T => {
            let target = target.slice_mut::<T>();
            let slices: Vec<&[T]> = pieces.iter().map(|p| &bytemuck::cast_slice::<u64, T>(p)[..target.len()]).collect();
            reduce(&slices, 0, target, reducer, dtype);
        });
        Ok(())
    }

    /// Halo exchange: each member sends the edges of its block that others need.
    fn halo(&mut self, halo: &Halo, dtype: DType, shape: &[usize], operand: &Storage) -> Result<Storage, KernelError> {
        let class = Class::of(dtype);
        let (me, edges) = (self.me, Edges::new(halo, shape, self.ranks.len()));
        let mut result = operand.arena().allocate(class, edges.elements())?;
        if edges.reach_beyond(me) {
            fill_neutral(&mut result, halo.reducer, dtype);
        }
        let pieces = self.exchange_pieces(|to| {
            let Some(edge) = edges.part(to, me) else { return Vec::new() };
            let mut piece = Bytes::new(edges.elements_of(&edge) * class.bytes());
            with_width!(class, T => edge.cut().run(operand.slice::<T>(), piece.slice_mut::<T>()));
            piece.words
        })?;
        for (from, piece) in pieces.iter().enumerate() {
            let Some(edge) = edges.part(me, from) else { continue };
            expect_bytes(bytemuck::cast_slice(piece), edges.elements_of(&edge) * class.bytes())?;
            with_width!(class, T => edge.join().run(bytemuck::cast_slice::<u64, T>(piece), result.slice_mut::<T>()));
        }
        Ok(result)
    }
}

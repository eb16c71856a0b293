//! Collectives among devices.
//!
//! Members that are threads of one process share their tensors. They read them in the order of the group, so that all
//! get the same bits, and signal each other when they are done. In an all-reduce, the member that reduces a block
//! writes it to the results of all. Afterwards every device owns its tensors alone again, and their contents do not
//! depend on timing.
//!
//! Members that are processes send copies instead, or leave the collective to MPI.

use crate::arena::{Arena, Storage};
use crate::element::{Class, Element, integer_from_f64, with_class, with_width};
use crate::error::KernelError;
use crate::kernel::copy::Copy;
use crate::kernel::instruction::{float_reducer, integer_binary};
use crate::mailbox::{Mailbox, Payload, Tag};
use crate::shared_tensor::SharedTensor;
use crate::view::row_major;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::Reducer;
use altiplano_ir::reshard::{BlockedDim, Collective};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A device's place in the group of a collective.
pub struct Member<'a> {
    pub mailbox: &'a mut Mailbox,
    /// Ranks of the members, in the order of the group.
    pub ranks: Vec<usize>,
    /// Position of this device among them.
    pub me: usize,
}

/// Sets every element to the neutral element of the reducer.
pub(crate) fn fill_neutral(storage: &mut Storage, reducer: Reducer, dtype: DType) {
    let neutral = reducer.neutral(dtype);
    let class = Class::of(dtype);
    with_class!(class, T => {
        let value = if class.is_integer() {
            T::from_i64(integer_from_f64(neutral, dtype))
        } else {
            T::from_f32(neutral as f32)
        };
        storage.slice_mut::<T>().fill(value);
    });
}

impl Member<'_> {
    fn share(&mut self, tensor: &Arc<Storage>) -> Result<Vec<Arc<Storage>>, KernelError> {
        let copies = self.mailbox.copies();
        for (i, &rank) in self.ranks.iter().enumerate() {
            if i != self.me {
                let payload = match copies {
                    true => Payload::Words(tensor.words().to_vec()),
                    false => Payload::Shared(tensor.clone()),
                };
                self.mailbox.send(rank, Tag::Collective, payload);
            }
        }
        // Received data does not count as memory of this device, just as shared tensors do not.
        let arena = Arena::new(None);
        let mut all = Vec::with_capacity(self.ranks.len());
        for i in 0..self.ranks.len() {
            if i == self.me {
                all.push(tensor.clone());
                continue;
            }
            match self.mailbox.receive(self.ranks[i], Tag::Collective)? {
                Payload::Shared(storage) => all.push(storage),
                Payload::Words(words) => all.push(Arc::new(arena.adopt(words, tensor.bytes())?)),
                Payload::SharedTensor(_) | Payload::Done => return Err(KernelError::Disconnected),
            }
        }
        Ok(all)
    }

    /// Waits until no member reads the tensors that this device shared. Drop what was received before calling it.
    fn done(&mut self) -> Result<(), KernelError> {
        if self.mailbox.copies() {
            return Ok(());
        }
        for (i, &rank) in self.ranks.iter().enumerate() {
            if i != self.me {
                self.mailbox.send(rank, Tag::Collective, Payload::Done);
            }
        }
        for i in 0..self.ranks.len() {
            if i != self.me {
                match self.mailbox.receive(self.ranks[i], Tag::Collective)? {
                    Payload::Done => {}
                    _ => return Err(KernelError::Disconnected),
                }
            }
        }
        Ok(())
    }

    /// For a shift by `by` places: the member that receives this one's operand, and the member that this one receives
    /// from.
    fn shifted(&self, by: u64) -> (usize, usize) {
        let n = self.ranks.len();
        let by = (by % n as u64) as usize;
        ((self.me + n - by) % n, (self.me + by) % n)
    }

    /// Runs a collective on an operand of `shape`. With `in_place`, the operand's storage becomes the result.
    pub fn run(
        &mut self,
        collective: &Collective,
        dtype: DType,
        shape: &[usize],
        operand: Arc<Storage>,
        in_place: bool,
    ) -> Result<Storage, KernelError> {
        let class = Class::of(dtype);
        let n = self.ranks.len();
        let arena = operand.arena().clone();
        let elements: usize = shape.iter().product();
        #[cfg(feature = "mpi")]
        let operand = match self.run_by_mpi(collective, dtype, shape, operand, in_place)? {
            crate::mpi::collective::Ran::Done(result) => return Ok(result),
            crate::mpi::collective::Ran::NotHere(operand) => operand,
        };
        match collective {
            Collective::AllReduce { .. } if n == 1 => own(operand, class, in_place),
            Collective::AllReduce { reducer, .. } => self.all_reduce(*reducer, dtype, elements, operand, in_place),
            Collective::ReduceScatter { reducer, dim, outer, .. } => {
                let result = arena.allocate(class, elements / n)?;
                self.reduce_scatter(*reducer, dtype, &Blocks::of_part(shape, *dim, *outer, n), &operand, result)
            }
            Collective::AllGather { dim, outer, .. } => {
                let result = arena.allocate(class, elements * n)?;
                let blocks = Blocks::of_whole(shape, *dim, *outer);
                let dims = [(blocks.count, blocks.length, blocks.length * n), (blocks.length, 1, 1)];
                self.copied(class, &operand, result, |which| Some(Copy::new(0, which * blocks.length, dims)))
            }
            Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } => {
                let mut result = arena.allocate(class, elements)?;
                let (split, concat) =
                    (BlockedDim::new(*split_dim, *split_outer), BlockedDim::new(*concat_dim, *concat_outer));
                let operands = self.share(&operand)?;
                for (which, part) in operands.iter().enumerate() {
                    let Exchange { cut, join, both } = exchange(shape, split, concat, n, self.me, which);
                    with_width!(class, T => match &both {
                        Some(copy) => copy.run(part.slice::<T>(), result.slice_mut::<T>()),
                        None => {
                            let mut between = vec![0 as T; elements / n];
                            cut.run(part.slice::<T>(), &mut between);
                            join.run(&between, result.slice_mut::<T>());
                        }
                    });
                }
                drop(operands);
                self.done()?;
                Ok(result)
            }
            Collective::LocalSlice { dim, outer, .. } => {
                let mut result = arena.allocate(class, elements / n)?;
                let blocks = Blocks::of_part(shape, *dim, *outer, n);
                let dims = [(blocks.count, blocks.length * n, blocks.length), (blocks.length, 1, 1)];
                let copy = Copy::new(self.me * blocks.length, 0, dims);
                with_width!(class, T => copy.run(operand.slice::<T>(), result.slice_mut::<T>()));
                Ok(result)
            }
            Collective::KeepFirst { reducer, .. } => {
                let mut result = own(operand, class, in_place)?;
                if self.me != 0 {
                    fill_neutral(&mut result, *reducer, dtype);
                }
                Ok(result)
            }
            Collective::Shift { by, .. } => self.shift(*by, class, &operand, arena.allocate(class, elements)?),
            Collective::Halo { dim, low, high, reducer, .. } => {
                let halo = Halo { dim: usize::from(*dim), low: *low, high: *high, reducer: *reducer };
                let edges = Edges::new(&halo, shape, n);
                let mut result = arena.allocate(class, edges.elements())?;
                if edges.reach_beyond(self.me) {
                    fill_neutral(&mut result, halo.reducer, dtype);
                }
                let me = self.me;
                self.copied(class, &operand, result, |which| edges.part(me, which).map(|part| part.copy()))
            }
        }
    }

    /// Shares the operand, and copies from each member's operand into the result.
    fn copied(
        &mut self,
        class: Class,
        operand: &Arc<Storage>,
        mut result: Storage,
        copy: impl Fn(usize) -> Option<Copy>,
    ) -> Result<Storage, KernelError> {
        let operands = self.share(operand)?;
        for (which, part) in operands.iter().enumerate() {
            if let Some(copy) = copy(which) {
                with_width!(class, T => copy.run(part.slice::<T>(), result.slice_mut::<T>()));
            }
        }
        drop(operands);
        self.done()?;
        Ok(result)
    }

    fn reduce_scatter(
        &mut self,
        reducer: Reducer,
        dtype: DType,
        blocks: &Blocks,
        operand: &Arc<Storage>,
        mut result: Storage,
    ) -> Result<Storage, KernelError> {
        let operands = self.share(operand)?;
        with_class!(Class::of(dtype), T => {
            let slices: Vec<&[T]> = operands.iter().map(|o| o.slice()).collect();
            let target = result.slice_mut::<T>();
            for block in 0..blocks.count {
                let first = (block * slices.len() + self.me) * blocks.length;
                let part = &mut target[block * blocks.length..(block + 1) * blocks.length];
                reduce(&slices, first, part, reducer, dtype);
            }
        });
        drop(operands);
        self.done()?;
        Ok(result)
    }

    /// Each member shares its operand with one other and copies that of another.
    fn shift(
        &mut self,
        by: u64,
        class: Class,
        operand: &Arc<Storage>,
        mut result: Storage,
    ) -> Result<Storage, KernelError> {
        let (to, from) = self.shifted(by);
        if from == self.me {
            with_width!(class, T => result.slice_mut::<T>().copy_from_slice(operand.slice::<T>()));
            return Ok(result);
        }
        let payload = match self.mailbox.copies() {
            true => Payload::Words(operand.words().to_vec()),
            false => Payload::Shared(operand.clone()),
        };
        self.mailbox.send(self.ranks[to], Tag::Collective, payload);
        match self.mailbox.receive(self.ranks[from], Tag::Collective)? {
            Payload::Shared(lent) => {
                with_width!(class, T => result.slice_mut::<T>().copy_from_slice(lent.slice::<T>()));
            }
            Payload::Words(words) => {
                let bytes = bytemuck::cast_slice::<u64, u8>(&words);
                expect_bytes(bytes, operand.bytes())?;
                result.slice_mut::<u8>()[..operand.bytes()].copy_from_slice(&bytes[..operand.bytes()]);
            }
            Payload::SharedTensor(_) | Payload::Done => return Err(KernelError::Disconnected),
        }
        if !self.mailbox.copies() {
            self.mailbox.send(self.ranks[from], Tag::Collective, Payload::Done);
            let Payload::Done = self.mailbox.receive(self.ranks[to], Tag::Collective)? else {
                return Err(KernelError::Disconnected);
            };
        }
        Ok(result)
    }

    /// Members take blocks from a common queue: each reduces the next block of all operands and writes it to all
    /// results. So a member that waits for a core keeps no other waiting for its share of the work.
    fn all_reduce(
        &mut self,
        reducer: Reducer,
        dtype: DType,
        elements: usize,
        operand: Arc<Storage>,
        in_place: bool,
    ) -> Result<Storage, KernelError> {
        if self.mailbox.copies() {
            return self.all_reduce_copies(reducer, dtype, elements, operand, in_place);
        }
        let class = Class::of(dtype);
        let (operand, result) = if in_place {
            (None, own(operand, class, true)?)
        } else {
            let result = operand.arena().allocate(class, elements)?;
            (Some(operand), result)
        };
        let mine = Arc::new(Terms { operand, result: SharedTensor::new(result), taken: AtomicUsize::new(0) });
        for (i, &rank) in self.ranks.iter().enumerate() {
            if i != self.me {
                self.mailbox.send(rank, Tag::Collective, Payload::SharedTensor(mine.clone()));
            }
        }
        let mut all = Vec::with_capacity(self.ranks.len());
        for (i, &rank) in self.ranks.iter().enumerate() {
            if i == self.me {
                all.push(mine.clone());
                continue;
            }
            match self.mailbox.receive(rank, Tag::Collective)? {
                Payload::SharedTensor(terms) => all.push(terms),
                _ => return Err(KernelError::Disconnected),
            }
        }
        let size = taken_at_once(elements, self.ranks.len());
        let next = || {
            let block = all.first()?.taken.fetch_add(1, Ordering::Relaxed);
            let start = block.checked_mul(size).filter(|&start| start < elements)?;
            Some(start..(start + size).min(elements))
        };
        with_class!(class, T => while let Some(range) = next() {
            let operands: Vec<Option<&[T]>> =
                all.iter().map(|t| t.operand.as_ref().map(|o| &o.slice::<T>()[range.clone()])).collect();
            // SAFETY: no other member takes this block of the results, since the shared counter gives out each number
            // once. No member reads the results until all have signalled that they are done.
            let mut results: Vec<&mut [T]> =
                all.iter().map(|t| unsafe { t.result.part::<T>(range.clone()) }).collect();
            reduce_to_all(&operands, &mut results, reducer, dtype);
        });
        drop(all);
        self.done()?;
        match Arc::try_unwrap(mine) {
            Ok(terms) => Ok(terms.result.take_back()),
            // All others dropped their references before they signalled that they were done.
            Err(_) => Err(KernelError::Disconnected),
        }
    }

    /// All-reduce by messages: members send each other the terms of their parts, then the reduced parts.
    fn all_reduce_copies(
        &mut self,
        reducer: Reducer,
        dtype: DType,
        elements: usize,
        operand: Arc<Storage>,
        in_place: bool,
    ) -> Result<Storage, KernelError> {
        let class = Class::of(dtype);
        let (n, me, size) = (self.ranks.len(), self.me, class.bytes());
        let bytes = |i: usize| {
            let range = range_of(elements, n, i);
            range.start * size..range.end * size
        };
        let mut result = own(operand, class, in_place)?;
        let pieces = self.exchange_pieces(|to| words_of(&result.slice::<u8>()[bytes(to)]))?;
        for piece in &pieces {
            expect_bytes(bytemuck::cast_slice(piece), bytes(me).len())?;
        }
        with_class!(class, T => {
            let target = &mut result.slice_mut::<T>()[range_of(elements, n, me)];
            let slices: Vec<&[T]> = pieces.iter().map(|p| &bytemuck::cast_slice::<u64, T>(p)[..target.len()]).collect();
            reduce(&slices, 0, target, reducer, dtype);
        });
        let mine = words_of(&result.slice::<u8>()[bytes(me)]);
        for (i, words) in self.exchange_pieces(|_| mine.clone())?.into_iter().enumerate() {
            let piece = bytemuck::cast_slice::<u64, u8>(&words);
            expect_bytes(piece, bytes(i).len())?;
            result.slice_mut::<u8>()[bytes(i)].copy_from_slice(&piece[..bytes(i).len()]);
        }
        Ok(result)
    }

    /// Sends a piece to each member and receives one from each. Pairs with nothing to exchange send no message.
    pub(crate) fn exchange_pieces(&mut self, piece: impl Fn(usize) -> Vec<u64>) -> Result<Vec<Vec<u64>>, KernelError> {
        for (i, &rank) in self.ranks.iter().enumerate() {
            if i != self.me {
                self.mailbox.send(rank, Tag::Collective, Payload::Words(piece(i)));
            }
        }
        let mut pieces = Vec::with_capacity(self.ranks.len());
        for (i, &rank) in self.ranks.iter().enumerate() {
            if i == self.me {
                pieces.push(piece(i));
                continue;
            }
            match self.mailbox.receive(rank, Tag::Collective)? {
                Payload::Words(words) => pieces.push(words),
                _ => return Err(KernelError::Disconnected),
            }
        }
        Ok(pieces)
    }
}

/// The tensors that a member of an all-reduce shares with the others.
#[derive(Debug)]
pub struct Terms {
    /// The operand; absent if it lies in the storage of the result.
    operand: Option<Arc<Storage>>,
    result: SharedTensor,
    /// Number of blocks taken so far. All members use the counter of the group's first member.
    taken: AtomicUsize,
}

/// Block size of an all-reduce of `elements` among `n` members. Blocks are small enough that late members find some
/// left and none waits long for the last, and large enough that taking one is cheap.
fn taken_at_once(elements: usize, n: usize) -> usize {
    elements.div_ceil(4 * n).next_multiple_of(LANES).clamp(1 << 12, 1 << 15)
}

/// The elements that member `i` of `n` reduces. Ranges start at multiples of sixteen elements. So they are whole words
/// in every format, and two members rarely write to the same cache line.
pub(crate) fn range_of(elements: usize, n: usize, i: usize) -> Range<usize> {
    let size = elements.div_ceil(n).next_multiple_of(16);
    (i * size).min(elements)..((i + 1) * size).min(elements)
}

/// Packs bytes into words of eight, padded with zeros.
pub(crate) fn words_of(bytes: &[u8]) -> Vec<u64> {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

pub(crate) fn expect_bytes(found: &[u8], expected: usize) -> Result<(), KernelError> {
    if found.len() == expected.next_multiple_of(8) || found.len() == expected {
        return Ok(());
    }
    Err(KernelError::MessageSize { expected, found: found.len() })
}

/// Takes the storage out of its `Arc` if this is the only reference, and copies it otherwise.
pub(crate) fn own(storage: Arc<Storage>, class: Class, take: bool) -> Result<Storage, KernelError> {
    if !take {
        return storage.duplicate(class);
    }
    match Arc::try_unwrap(storage) {
        Ok(storage) => Ok(storage),
        Err(shared) => shared.duplicate(class),
    }
}

/// A dimension as `count` runs of `length` elements that belong to one member.
pub(crate) struct Blocks {
    pub count: usize,
    pub length: usize,
}

impl Blocks {
    /// The runs of one of `n` parts of dimension `dim`, cut within each of its `outer` blocks.
    pub(crate) fn of_part(shape: &[usize], dim: u8, outer: u64, n: usize) -> Blocks {
        let (dim, outer) = (dim as usize, outer as usize);
        let before: usize = shape[..dim].iter().product();
        let after: usize = shape[dim + 1..].iter().product();
        Blocks { count: before * outer, length: shape[dim] / n / outer * after }
    }

    /// The runs of a tensor that is itself such a part.
    pub(crate) fn of_whole(shape: &[usize], dim: u8, outer: u64) -> Blocks {
        Blocks::of_part(shape, dim, outer, 1)
    }
}

/// The elements that a block takes from its neighbours along a dimension, and the neutral element beyond the ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Halo {
    pub dim: usize,
    /// Elements before and after the block.
    pub low: u64,
    pub high: u64,
    pub reducer: Reducer,
}

/// The sizes of a halo exchange among `n` members.
pub(crate) struct Edges {
    n: usize,
    /// Elements of a block along the dimension, and before it in the result.
    block: usize,
    low: usize,
    /// Elements of the result along the dimension.
    length: usize,
    outer: usize,
    inner: usize,
}

/// The part of a block that another member's result needs, along the dimension.
pub(crate) struct Edge<'a> {
    edges: &'a Edges,
    /// Its start in the block and in the result.
    from: usize,
    to: usize,
    pub length: usize,
}

impl Edges {
    pub(crate) fn new(halo: &Halo, shape: &[usize], n: usize) -> Edges {
        let (block, low) = (shape[halo.dim], halo.low as usize);
        let length = low + block + halo.high as usize;
        let (outer, inner) = (shape[..halo.dim].iter().product(), shape[halo.dim + 1..].iter().product());
        Edges { n, block, low, length, outer, inner }
    }

    /// The elements of a result.
    pub(crate) fn elements(&self) -> usize {
        self.outer * self.length * self.inner
    }

    /// The elements of a message of one edge.
    #[cfg(feature = "mpi")]
    pub(crate) fn elements_of(&self, edge: &Edge<'_>) -> usize {
        self.outer * edge.length * self.inner
    }

    /// Where a member's result begins, in elements of the dimension.
    fn begin(&self, me: usize) -> isize {
        (me * self.block) as isize - self.low as isize
    }

    /// Returns true if a member's result reaches beyond the ends of the dimension.
    pub(crate) fn reach_beyond(&self, me: usize) -> bool {
        let begin = self.begin(me);
        begin < 0 || begin + self.length as isize > (self.n * self.block) as isize
    }

    /// The part of member `which`'s block that the result of member `me` needs.
    pub(crate) fn part(&self, me: usize, which: usize) -> Option<Edge<'_>> {
        let (begin, start) = (self.begin(me), which * self.block);
        let first = begin.max(start as isize);
        let last = (begin + self.length as isize).min((start + self.block) as isize);
        let (from, to) = (first.saturating_sub_unsigned(start) as usize, (first - begin) as usize);
        (first < last).then(|| Edge { edges: self, from, to, length: (last - first) as usize })
    }
}

impl Edge<'_> {
    /// From a block into a result.
    pub(crate) fn copy(&self) -> Copy {
        let Edges { block, length, outer, inner, .. } = *self.edges;
        let dims = [(outer, block * inner, length * inner), (self.length * inner, 1, 1)];
        Copy::new(self.from * inner, self.to * inner, dims)
    }

    /// From a block into a message.
    #[cfg(feature = "mpi")]
    pub(crate) fn cut(&self) -> Copy {
        let Edges { block, outer, inner, .. } = *self.edges;
        let run = self.length * inner;
        Copy::new(self.from * inner, 0, [(outer, block * inner, run), (run, 1, 1)])
    }

    /// From a message into a result.
    #[cfg(feature = "mpi")]
    pub(crate) fn join(&self) -> Copy {
        let Edges { length, outer, inner, .. } = *self.edges;
        let run = self.length * inner;
        Copy::new(0, self.to * inner, [(outer, run, length * inner), (run, 1, 1)])
    }
}

/// Copies from member `which`'s operand into the result of member `me`.
pub(crate) struct Exchange {
    /// From the operand into a message.
    pub cut: Copy,
    /// From a message into the result.
    pub join: Copy,
    /// Directly from operand to result, unless both dimensions are the same.
    pub both: Option<Copy>,
}

pub(crate) fn exchange(
    shape: &[usize],
    split: BlockedDim,
    concat: BlockedDim,
    n: usize,
    me: usize,
    which: usize,
) -> Exchange {
    let (split_outer, concat_outer) = (split.outer as usize, concat.outer as usize);
    let (split, concat) = (split.dim, concat.dim);
    let mut part = shape.to_vec();
    part[split] /= n;
    let mut joined = part.clone();
    joined[concat] *= n;
    let (source, between, target) = (row_major(shape), row_major(&part), row_major(&joined));
    let inner = part[split] / split_outer;
    let cut_offset = me * inner * source[split];
    let run = part[concat] / concat_outer;
    let join_offset = which * run * target[concat];
    let mut cut = Vec::new();
    let mut join = Vec::new();
    let mut both = Vec::new();
    for (d, &size) in part.iter().enumerate() {
        let (s, b, t) = (source[d], between[d], target[d]);
        if d == split {
            cut.extend([(split_outer, n * inner * s, inner * b), (inner, s, b)]);
            both.extend([(split_outer, n * inner * s, inner * t), (inner, s, t)]);
        } else {
            cut.push((size, s, b));
        }
        if d == concat {
            join.extend([(concat_outer, run * b, n * run * t), (run, b, t)]);
            both.extend([(concat_outer, run * s, n * run * t), (run, s, t)]);
        } else {
            join.push((size, b, t));
        }
        if d != split && d != concat {
            both.push((size, s, t));
        }
    }
    let both = (split != concat).then(|| Copy::new(cut_offset, join_offset, both));
    Exchange { cut: Copy::new(cut_offset, 0, cut), join: Copy::new(0, join_offset, join), both }
}

/// Elements per pass: they fit into the L1 cache.
const BLOCK: usize = 512;

/// `target[i]` is the reduction of `operands[..][first + i]`, in the order of the operands.
pub(crate) fn reduce<T: Element>(operands: &[&[T]], first: usize, target: &mut [T], reducer: Reducer, dtype: DType) {
    for (b, part) in target.chunks_mut(BLOCK).enumerate() {
        let range = first + b * BLOCK..first + b * BLOCK + part.len();
        reduce_block(|k| &operands[k][range.clone()], operands.len(), reducer, dtype, part);
    }
}

/// Every `results[..][i]` becomes the reduction of `operands[..][i]`, in order. An absent operand lies in its member's
/// result.
fn reduce_to_all<T: Element>(operands: &[Option<&[T]>], results: &mut [&mut [T]], reducer: Reducer, dtype: DType) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, for which the function is compiled.
        unsafe { reduce_to_all_avx2(operands, results, reducer, dtype) };
        return;
    }
    reduce_blocks_to_all(operands, results, reducer, dtype);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn reduce_to_all_avx2<T: Element>(operands: &[Option<&[T]>], results: &mut [&mut [T]], reducer: Reducer, dtype: DType) {
    reduce_blocks_to_all(operands, results, reducer, dtype);
}

#[inline(always)]
fn reduce_blocks_to_all<T: Element>(
    operands: &[Option<&[T]>],
    results: &mut [&mut [T]],
    reducer: Reducer,
    dtype: DType,
) {
    let length = results.first().map_or(0, |r| r.len());
    let sums = !Class::of(dtype).is_integer() && float_reducer(reducer, dtype) == Reducer::Sum;
    let first = if sums { sum_lanes_to_all(operands, results) } else { 0 };
    let mut block = [T::zeroed(); BLOCK];
    for start in (first..length).step_by(BLOCK) {
        let range = start..(start + BLOCK).min(length);
        let block = &mut block[..range.len()];
        let term = |k: usize| operands[k].map_or(&results[k][range.clone()], |o| &o[range.clone()]);
        reduce_block(term, operands.len(), reducer, dtype, block);
        results.iter_mut().for_each(|r| r[range.clone()].copy_from_slice(block));
    }
}

/// Elements summed in registers at a time.
const LANES: usize = 32;

/// Sums with one pass per term and result over the L1 cache, fast enough to saturate memory. Returns the number of
/// elements done: all but fewer than [`LANES`].
#[inline(always)]
fn sum_lanes_to_all<T: Element>(operands: &[Option<&[T]>], results: &mut [&mut [T]]) -> usize {
    let length = results.first().map_or(0, |r| r.len());
    let whole = length / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        let mut sums = [0.0f32; LANES];
        for (k, operand) in operands.iter().enumerate() {
            let term = operand.map_or(&results[k][start..start + LANES], |o| &o[start..start + LANES]);
            let pairs = sums.iter_mut().zip(term);
            match k {
                0 => pairs.for_each(|(s, x)| *s = x.to_f32()),
                _ => pairs.for_each(|(s, x)| *s += x.to_f32()),
            }
        }
        for result in results.iter_mut() {
            result[start..start + LANES].iter_mut().zip(&sums).for_each(|(r, &s)| *r = T::from_f32(s));
        }
    }
    whole
}

/// `target[i]` is the reduction of `term(..)[i]` over `terms` terms, in order. All have at most [`BLOCK`] elements.
#[inline(always)]
fn reduce_block<'a, T: Element>(
    term: impl Fn(usize) -> &'a [T],
    terms: usize,
    reducer: Reducer,
    dtype: DType,
    target: &mut [T],
) {
    if Class::of(dtype).is_integer() {
        for (i, t) in target.iter_mut().enumerate() {
            let terms = (0..terms).map(|k| term(k)[i].to_i64());
            let sum = terms.reduce(|x, y| integer_binary(reducer.combine(), x, y, dtype));
            *t = T::from_i64(sum.unwrap_or(0));
        }
        return;
    }
    let float = float_reducer(reducer, dtype);
    let mut sums = [0.0f32; BLOCK];
    for k in 0..terms {
        let pairs = sums.iter_mut().zip(term(k));
        match float {
            _ if k == 0 => pairs.for_each(|(s, x)| *s = x.to_f32()),
            Reducer::Sum => pairs.for_each(|(s, x)| *s += x.to_f32()),
            Reducer::Product => pairs.for_each(|(s, x)| *s *= x.to_f32()),
            Reducer::Max | Reducer::Or => pairs.for_each(|(s, x)| {
                let x = x.to_f32();
                *s = if *s > x || s.is_nan() { *s } else { x };
            }),
            Reducer::Min | Reducer::And => pairs.for_each(|(s, x)| {
                let x = x.to_f32();
                *s = if *s < x || s.is_nan() { *s } else { x };
            }),
        }
    }
    target.iter_mut().zip(sums).for_each(|(t, s)| *t = T::from_f32(s));
}

//! The kernels that a device launches for a straight-line graph: which ops run in one pass over memory, and what each
//! pass reads and writes.
//!
//! Matmuls, convolutions, lookups and sorts are kernels of their own. Between two of them, all elementwise ops and all
//! reductions of rows that fit on the chip form one kernel. Hand-written softmax, norm and activation kernels work like
//! this, and compilers fuse like this. Reshapes, slices, transposes and broadcasts are read through. They cost nothing
//! unless a matmul needs a layout that no strides describe. A value that later kernels need is kept or recomputed,
//! whichever moves fewer bytes.
//!
//! If the software has fused attention, one kernel computes a product that is larger than its factors, the elementwise
//! ops on it, and the products that consume it. It never writes the large values (Dao et al. 2022, FlashAttention).
//!
//! Each node has a *level*: that of its operands, plus one on an edge that is a barrier. A kernel is a connected set of
//! nodes of one level, so kernels never depend on each other in a cycle. The barriers are:
//!
//! * edges into or out of a kernel of its own;
//! * edges out of a reduction that needs every row;
//! * edges where rows of several growing products are combined, such as the rounds of ring attention, which are kernels
//!   of their own;
//! * reshapes that change no shape, by which a graph asks for values to be made one after the other.

use crate::dtype::DType;
use crate::graph::{Graph, Node, ValueId};
use crate::op::{HostCopy, HostRoute, Op, Operator, Reduce};
use crate::optimizer::leaf;
use crate::sets::Sets;
use crate::target::AttentionKernels;
use crate::types::TensorType;
use crate::visible::{Mask, TILE, form, unknown_leaf, visible};
use crate::work::{Called, Work};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// The bytes of an f32 row that a kernel keeps on the chip between reducing and using it. They are the registers of a
/// thread block, 64 Ki of 4 bytes, less those for addresses and operands.
pub const ROW_BYTES: u64 = 128 << 10;

/// The largest number of values that a value is recomputed from. Beyond that, it is kept.
const MAX_SOURCES: usize = 8;

/// One launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    pub kind: KernelKind,
    /// The nodes that the kernel computes, in graph order.
    pub nodes: Vec<ValueId>,
    /// The values of earlier kernels and leaves of the body that the kernel reads, with the bytes read of each.
    pub reads: Vec<(ValueId, u64)>,
    /// The values that the kernel writes to memory.
    pub writes: Vec<ValueId>,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// The work that a runtime does for the kernel, if known.
    pub work: Option<Work>,
}

impl Kernel {
    /// A kernel of which only the kind and the bytes it moves are known.
    pub fn moving(kind: KernelKind, bytes: u64) -> Kernel {
        let (nodes, reads, writes) = (Vec::new(), Vec::new(), Vec::new());
        Kernel { kind, nodes, reads, writes, read_bytes: bytes, written_bytes: 0, work: None }
    }

    /// The kernel's computation as a graph of its own, whose inputs are the values that it reads. Also returns the
    /// value there of each value of `graph`.
    pub fn part(&self, graph: &Graph) -> (Graph, BTreeMap<ValueId, ValueId>) {
        let reads: BTreeSet<ValueId> = self.reads.iter().map(|r| r.0).collect();
        let mut needed = vec![false; graph.len()];
        self.writes.iter().for_each(|w| needed[w.index()] = true);
        for v in graph.values().rev().filter(|v| !reads.contains(v)) {
            if needed[v.index()] {
                graph.node(v).operands.iter().for_each(|o| needed[o.index()] = true);
            }
        }
        let (mut part, mut map) = (Graph::new(graph.name.clone()), BTreeMap::new());
        for v in graph.values().filter(|v| needed[v.index()]) {
            let node = graph.node(v);
            let new = match reads.contains(&v) || node.op.is_leaf() {
                true => leaf(&mut part, v.to_string(), node.ty.clone()),
                false => part.append(Node { operands: node.operands.iter().map(|o| map[o]).collect(), ..node.clone() }),
            };
            map.insert(v, new);
        }
        (part, map)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelKind {
    Matmul(Matmul),
    Convolution {
        flop: f64,
        dtype: DType,
    },
    /// Elementwise ops and reductions of rows. `operations` are scalar ones, and a transcendental counts as
    /// `TRANSCENDENTAL`.
    Fused {
        operations: f64,
    },
    /// Products around large values that stay on the chip.
    Attention(Attention),
    /// Lookups, scatters and windows.
    Indexed,
    /// A sort with this many passes over keys and positions.
    Sort {
        passes: u64,
    },
    /// A transfer between devices.
    Collective,
    /// A transfer between a device and host memory.
    HostCopy(HostRoute),
}

impl KernelKind {
    /// Returns true if the kernel transfers data from or to a device, which can compute meanwhile.
    pub fn communicates(&self) -> bool {
        matches!(self, KernelKind::Collective | KernelKind::HostCopy(_))
    }
}

/// Fused attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// The operations of its products without masking.
    pub flop: f64,
    /// The fraction of the tiles that is computed. A mask hides the others whatever the data.
    pub share: f64,
    /// The length of a row of the large values.
    pub keys: u64,
    /// The number of tiles of [`TILE`] queries or less, over all samples and heads. Each runs on one multiprocessor.
    pub tiles: u64,
    /// True if more than one of its products makes large values, as in backward passes, which make gradients of scores
    /// beside the scores.
    pub backward: bool,
    pub dtype: DType,
    pub software: AttentionKernels,
}

/// `batch` products of `[m, k]` and `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matmul {
    pub batch: u64,
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub dtype: DType,
    /// The alignment of every row of operands and result, in elements. It is the greatest power of two that divides
    /// their rows, at most 8 (16 bytes of half precision, which tensor cores load at once).
    pub aligned: u64,
}

impl Matmul {
    /// The operations of the product. They are an f64, since those of a matmul that no device could hold do not fit
    /// into 64 bits.
    pub fn flop(&self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// The times that software which trains in 8 bits reads a tensor and writes its 8-bit form. It reads once for the largest
/// value, from which the scale follows, and once to convert. It writes rows, and columns beside them, since the products
/// of a backward pass sum over other dimensions (Transformer Engine, per-tensor current scaling).
pub const PASSES_TO_EIGHT_BITS: u64 = 2;

/// Returns true if an op converts to 8-bit floats from a wider type, which takes [`PASSES_TO_EIGHT_BITS`].
pub fn converts_to_eight_bits(op: &Op, operands: &[&TensorType]) -> bool {
    let Op::Convert(convert) = op else { return false };
    convert.dtype.is_eight_bit_float() && operands.iter().any(|from| !from.dtype.is_eight_bit_float())
}

/// The scalar operations of an exponential, a root or a division on vector units. Special functions run at a quarter of
/// the rate of multiplications on NVIDIA devices (CUDA programming guide, arithmetic throughput), and need a few
/// operations around them.
const TRANSCENDENTAL: f64 = 8.0;

/// The role of a node in kernels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// A value that exists before the body runs.
    Leaf,
    /// A value known at compile time: constants, positions, masks.
    Constant,
    /// A view of its operand.
    Alias,
    /// An elementwise op.
    Map,
    /// A reduction whose rows stay on the chip.
    Row,
    /// A reduction that later kernels wait for.
    Reduction,
    /// A kernel of its own.
    Alone,
}

/// The kernels of a body's graph, in an order in which they can run. `written` are the values that the body writes to
/// buffers.
pub fn kernels(graph: &Graph, written: &BTreeSet<ValueId>, fused_attention: bool) -> Vec<Kernel> {
    kernels_where(graph, written, &mut |_| fused_attention)
}

/// The kernels of a body's graph. Kernels around large products are joined only if `fuses` returns true for the joined
/// kernel.
pub fn kernels_where(
    graph: &Graph,
    written: &BTreeSet<ValueId>,
    fuses: &mut dyn FnMut(&Kernel) -> bool,
) -> Vec<Kernel> {
    // Values that go to the host must be laid out in memory, like values that stay.
    let stored = graph.nodes.iter().filter(|node| node.op.stores_in_host()).map(|node| node.operands[0]);
    let written = &written.iter().copied().chain(stored).collect();
    let roles = roles(graph, written);
    let source = sources(graph, &roles);
    let barriers = barriers(graph, &roles);
    let group = groups(graph, &roles, &source, &barriers);
    let kept = kept(graph, &roles, &source, &barriers, &group, written);
    let mut members: Vec<Vec<ValueId>> = vec![Vec::new(); graph.len()];
    for v in graph.values().filter(|v| computes(roles[v.index()])) {
        members[group[v.index()] as usize].push(v);
    }
    let made = members.into_iter().filter_map(|nodes| kernel(graph, nodes, &roles, &source, &group, &kept));
    let made: Vec<Kernel> = made.collect();
    let made = with_products_fused(graph, &roles, &source, written, in_order(graph, made), fuses);
    in_order(graph, made)
}

/// The kernel for a call of a runtime, with the kind it would have on a device without measurements.
pub fn of_runtime(graph: &Graph, call: Called) -> Kernel {
    let named = call.nodes.last().copied().unwrap_or(ValueId(0));
    let node = graph.node(named);
    let contraction = call.nodes.iter().copied().find(|v| graph.node(*v).op.is_contraction());
    let kind = match (&node.op, contraction) {
        (_, Some(v)) => {
            let dtype = graph.ty(graph.node(v).operands[0]).dtype;
            KernelKind::Convolution { flop: graph.flop(v) as f64, dtype }
        }
        (Op::ArgSort(_), _) => {
            KernelKind::Sort { passes: graph.operand_types(named).iter().map(|t| t.dtype.bytes()).sum() }
        }
        (Op::Collective(c), _) if c.collective.communicates() => KernelKind::Collective,
        (Op::HostCopy(HostCopy { route }), _) => KernelKind::HostCopy(*route),
        (op, _) if op.is_elementwise() || matches!(op, Op::Reduce(_)) => {
            KernelKind::Fused { operations: call.nodes.iter().map(|&v| operations(graph, v)).sum() }
        }
        _ => KernelKind::Indexed,
    };
    let bytes = |values: &[(ValueId, u64)]| values.iter().map(|v| v.1).sum();
    let (read_bytes, written_bytes) = (bytes(&call.reads), bytes(&call.writes));
    let writes = call.writes.iter().map(|w| w.0).collect();
    Kernel { kind, nodes: call.nodes, reads: call.reads, writes, read_bytes, written_bytes, work: Some(call.work) }
}

/// Joins the kernels around growing products ([`crate::op::DotGeneral::grows`]). Kernels are connected by such
/// products, or by values of their size that are computed from them elementwise, if a product contracts these again.
///
/// Kernels that use the large values before and after another result is computed from them stay separate. This happens
/// in a backward pass whose forward pass is recomputed in the same body. Each such kernel recomputes the large values.
fn with_products_fused(
    graph: &Graph,
    roles: &[Role],
    source: &[(ValueId, u64)],
    written: &BTreeSet<ValueId>,
    kernels: Vec<Kernel>,
    fuses: &mut dyn FnMut(&Kernel) -> bool,
) -> Vec<Kernel> {
    let mut maker: Vec<Option<usize>> = vec![None; graph.len()];
    for (i, kernel) in kernels.iter().enumerate() {
        kernel.nodes.iter().for_each(|n| maker[n.index()] = Some(i));
    }
    let large = large_values(graph, roles, source, written);
    let shares = Shares { graph, known: RefCell::default() };
    let products = Products { graph, roles, source, kernels: &kernels, maker, large, shares };
    let component = products.components();
    let mut members = vec![0u32; kernels.len()];
    component.iter().for_each(|&c| members[c] += 1);
    let depth = products.depths(&component, &members);
    let mut groups: BTreeMap<(usize, u32), Vec<usize>> = BTreeMap::new();
    for i in 0..kernels.len() {
        groups.entry((component[i], depth[i])).or_default().push(i);
    }
    let mut replaced = vec![false; kernels.len()];
    let mut fused: Vec<Kernel> = Vec::new();
    for c in (0..kernels.len()).filter(|&c| members[c] > 1) {
        // Join all connected kernels or none: a value that one kernel no longer writes would be read there by another.
        let of_component = groups.range((c, 0)..=(c, u32::MAX)).map(|(_, of_group)| products.joined(of_group));
        let of_component: Vec<Kernel> = of_component.filter(|kernel| !kernel.writes.is_empty()).collect();
        if of_component.iter().all(&mut *fuses) {
            fused.extend(of_component);
            groups.range((c, 0)..=(c, u32::MAX)).flat_map(|(_, of_group)| of_group).for_each(|&i| replaced[i] = true);
        }
    }
    let kept = kernels.into_iter().zip(replaced).filter(|(_, replaced)| !replaced).map(|(kernel, _)| kernel);
    kept.chain(fused).collect()
}

/// Growing products, and the values of their size that are computed from them elementwise. None of them leaves the body.
fn large_values(
    graph: &Graph,
    roles: &[Role],
    source: &[(ValueId, u64)],
    written: &BTreeSet<ValueId>,
) -> BTreeSet<ValueId> {
    let mut large: BTreeSet<ValueId> = BTreeSet::new();
    let elements = |v: ValueId| graph.ty(v).elements();
    for v in graph.values().filter(|v| computes(roles[v.index()]) && !written.contains(v)) {
        let mut operands = graph.node(v).operands.iter().map(|o| source[o.index()].0);
        let is_large = match (&graph.node(v).op, roles[v.index()]) {
            (Op::DotGeneral(_), _) => grows(graph, v),
            (_, Role::Map) => operands.any(|o| large.contains(&o) && elements(o) == elements(v)),
            _ => false,
        };
        if is_large {
            large.insert(v);
        }
    }
    large
}

/// The kernels around growing products.
struct Products<'a> {
    graph: &'a Graph,
    roles: &'a [Role],
    source: &'a [(ValueId, u64)],
    kernels: &'a [Kernel],
    /// The kernel that computes each value.
    maker: Vec<Option<usize>>,
    large: BTreeSet<ValueId>,
    shares: Shares<'a>,
}

impl Products<'_> {
    /// For each kernel, the first of those that it is connected with.
    fn components(&self) -> Vec<usize> {
        let mut joined = Sets::new(self.kernels.len());
        for (i, kernel) in self.kernels.iter().enumerate() {
            let large = kernel.reads.iter().filter(|(read, _)| self.large.contains(read));
            large.filter_map(|(read, _)| self.maker[read.index()]).for_each(|m| joined.merge(m, i));
        }
        let mut component: Vec<usize> = (0..self.kernels.len()).map(|i| joined.find(i)).collect();
        // Only if a product contracts large values again can a kernel avoid writing them. Kernels that merely map them,
        // like the gates of experts with few terms, are not one launch.
        let sums_up = |kernel: &&Kernel| {
            let is_small = |v: &ValueId| matches!(self.graph.node(*v).op, Op::DotGeneral(_)) && !self.large.contains(v);
            kernel.nodes.iter().any(is_small) && kernel.reads.iter().any(|(read, _)| self.large.contains(read))
        };
        let summed: BTreeSet<usize> =
            self.kernels.iter().zip(&component).filter(|(kernel, _)| sums_up(kernel)).map(|(_, &c)| c).collect();
        for (i, c) in component.iter_mut().enumerate().filter(|(_, c)| !summed.contains(c)) {
            *c = i;
        }
        component
    }

    /// The number of connected groups that each kernel's inputs passed through. It grows by one on each edge that leaves
    /// such a group.
    fn depths(&self, component: &[usize], members: &[u32]) -> Vec<u32> {
        let mut depth = vec![0u32; self.kernels.len()];
        for (i, kernel) in self.kernels.iter().enumerate() {
            let of_read = |&(read, _): &(ValueId, u64)| {
                let m = self.maker[read.index()].filter(|&m| self.kernels[m].writes.contains(&read))?;
                let leaves = members[component[m]] > 1 && component[m] != component[i];
                Some(depth[m] + u32::from(leaves))
            };
            depth[i] = kernel.reads.iter().filter_map(of_read).max().unwrap_or(0);
        }
        depth
    }

    /// One kernel for a group of connected ones.
    fn joined(&self, of_group: &[usize]) -> Kernel {
        let (graph, kernels) = (self.graph, self.kernels);
        // Recompute large values of earlier kernels, but only from values in memory.
        let mut again: BTreeSet<usize> = of_group.iter().copied().collect();
        let mut open: Vec<usize> = of_group.to_vec();
        while let Some(i) = open.pop() {
            for (read, _) in kernels[i].reads.iter().filter(|(r, _)| self.large.contains(r)) {
                open.extend(self.maker[read.index()].filter(|m| again.insert(*m)));
            }
        }
        let is_own = |i: &usize| of_group.contains(i);
        let own = || again.iter().filter(|i| is_own(i)).map(|&i| &kernels[i]);
        let before = || again.iter().filter(|i| !is_own(i)).map(|&i| &kernels[i]);
        let small = |v: &ValueId| !self.large.contains(v);
        let in_memory: BTreeSet<ValueId> = before().flat_map(|k| &k.writes).copied().filter(small).collect();
        let writes: Vec<ValueId> = own().flat_map(|k| &k.writes).copied().filter(small).collect();
        let is_again =
            |v: &ValueId| self.maker[v.index()].is_some_and(|m| again.contains(&m)) && !in_memory.contains(v);
        let mut reads: Vec<(ValueId, u64)> = Vec::new();
        let kept = in_memory.iter().map(|&v| (v, graph.ty(v).bytes()));
        for (read, bytes) in again.iter().flat_map(|&i| kernels[i].reads.iter().copied()).chain(kept) {
            match reads.iter_mut().find(|(r, _)| *r == read) {
                _ if is_again(&read) => {}
                Some((_, known)) => *known = (*known).max(bytes),
                None => reads.push((read, bytes)),
            }
        }
        // Keep only those nodes of earlier kernels that the large values depend on. None of them lies before `first`.
        let of_again = || again.iter().flat_map(|&i| kernels[i].nodes.iter().copied());
        let asked = || of_again().chain(writes.iter().copied()).map(ValueId::index);
        let first = asked().chain(reads.iter().map(|r| r.0.index())).min().unwrap_or(0);
        let mut needed = vec![false; asked().max().map_or(0, |last| last + 1 - first)];
        let need = |needed: &mut [bool], v: ValueId| {
            if let Some(needed) = v.index().checked_sub(first).and_then(|at| needed.get_mut(at)) {
                *needed = true;
            }
        };
        own().flat_map(|k| &k.nodes).chain(&writes).for_each(|v| need(&mut needed, *v));
        for at in (0..needed.len()).rev() {
            let v = ValueId((first + at) as u32);
            if needed[at] && !reads.iter().any(|r| r.0 == v) {
                graph.node(v).operands.iter().for_each(|o| need(&mut needed, *o));
            }
        }
        let is_needed = |v: &ValueId| v.index().checked_sub(first).and_then(|at| needed.get(at)).is_some_and(|n| *n);
        reads.retain(|(r, _)| is_needed(r));
        let mut nodes: Vec<ValueId> = of_again().filter(|n| is_needed(n) && !reads.iter().any(|r| r.0 == *n)).collect();
        nodes.sort_unstable();
        let kind = KernelKind::Attention(self.attention(&nodes, again.iter().map(|&i| &kernels[i])));
        let read_bytes = reads.iter().map(|r| r.1).sum();
        let written_bytes = writes.iter().map(|w| graph.ty(*w).bytes()).sum();
        Kernel { kind, nodes, reads, writes, read_bytes, written_bytes, work: None }
    }

    /// The work of a kernel that computes `nodes`, which `kernels` computed before.
    fn attention<'k>(&self, nodes: &[ValueId], kernels: impl Iterator<Item = &'k Kernel>) -> Attention {
        let graph = self.graph;
        let products = kernels.filter_map(|kernel| match &kernel.kind {
            KernelKind::Matmul(matmul) if nodes.contains(&kernel.nodes[0]) => Some((matmul.flop(), matmul.dtype)),
            _ => None,
        });
        let (flop, dtype) = products.fold((0.0, DType::F32), |(sum, _), (flop, dtype)| (sum + flop, dtype));
        // Tiles that a mask hides in every position are not computed.
        let is_constant = |o: ValueId| self.roles[self.source[o.index()].0.index()] == Role::Constant;
        let selects = nodes.iter().filter(|v| matches!(graph.node(**v).op, Op::Select(_)));
        let share = selects.map(|&v| self.shares.of(Mask::of_select(graph, v, is_constant))).fold(1.0, f64::min);
        let grown = || nodes.iter().copied().filter(|&n| grows(graph, n));
        let keys = grown().filter_map(|n| graph.shape(n).last().copied()).max().unwrap_or(1);
        let tiles = grown().map(|n| tiles_of_queries(graph.shape(n))).max().unwrap_or(1);
        let (backward, software) = (grown().count() > 1, AttentionKernels::default());
        Attention { flop, share, keys, tiles, backward, dtype, software }
    }
}

/// The tiles of queries of scores, `[.., queries, keys]`.
fn tiles_of_queries(scores: &[u64]) -> u64 {
    let outer = &scores[..scores.len().saturating_sub(1)];
    let queries = outer.last().copied().unwrap_or(1);
    outer[..outer.len().saturating_sub(1)].iter().product::<u64>().max(1) * queries.div_ceil(TILE).max(1)
}

/// The visible fractions of a body's masks. Layers have equal masks of their own, and only one of them is examined.
struct Shares<'a> {
    graph: &'a Graph,
    known: RefCell<BTreeMap<(bool, String), f64>>,
}

impl Shares<'_> {
    fn of(&self, mask: Mask) -> f64 {
        let form = (mask.shows, form(self.graph, mask.value));
        if let Some(&known) = self.known.borrow().get(&form) {
            return known;
        }
        let share = visible(self.graph, mask, TILE, &unknown_leaf);
        self.known.borrow_mut().insert(form, share);
        share
    }
}

/// Returns true if a value is a product that is larger than its factors ([`crate::op::DotGeneral::grows`]).
fn grows(graph: &Graph, v: ValueId) -> bool {
    let shape = |i: usize| graph.shape(graph.node(v).operands[i]);
    matches!(&graph.node(v).op, Op::DotGeneral(dot) if dot.grows(shape(0), shape(1), graph.shape(v)))
}

fn computes(role: Role) -> bool {
    matches!(role, Role::Map | Role::Row | Role::Reduction | Role::Alone)
}

fn roles(graph: &Graph, written: &BTreeSet<ValueId>) -> Vec<Role> {
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    // True for values whose elements lie in memory in their own order.
    let mut contiguous = vec![true; graph.len()];
    let mut roles = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let operand = || node.operands[0];
        let role = match &node.op {
            op if op.is_leaf() => Role::Leaf,
            _ if !varies[v.index()] => Role::Constant,
            Op::Reshape(_) => {
                let view = contiguous[operand().index()] || only_splits(graph.shape(operand()), &node.ty.shape);
                if view { Role::Alias } else { Role::Map }
            }
            Op::Slice(_) | Op::Transpose(_) | Op::BroadcastInDim(_) => Role::Alias,
            Op::Collective(c) if !c.collective.communicates() => Role::Alias,
            Op::Microbatches(_) => Role::Alias,
            Op::Reduce(reduce) => {
                let shape = graph.shape(operand());
                let row: u64 = reduce.dims.iter().map(|&d| shape[d]).product();
                if sums_rows(reduce, shape) && row.saturating_mul(4) <= ROW_BYTES { Role::Row } else { Role::Reduction }
            }
            Op::DotGeneral(_)
            | Op::Convolution(_)
            | Op::Gather(_)
            | Op::ScatterAdd(_)
            | Op::GroupedDot(_)
            | Op::GroupedOuter(_)
            | Op::Scatter(_)
            | Op::ReduceWindow(_)
            | Op::SelectAndScatter(_)
            | Op::ArgSort(_)
            | Op::Cumulative(_)
            | Op::Collective(_)
            | Op::HostCopy(_)
            | Op::Composite(_) => Role::Alone,
            op if converts_to_eight_bits(op, &graph.operand_types(v)) => Role::Alone,
            _ => Role::Map,
        };
        // A value that leaves the body must be laid out in memory.
        let role = if role == Role::Alias && written.contains(&v) { Role::Map } else { role };
        contiguous[v.index()] = match role {
            Role::Alias => matches!(node.op, Op::Reshape(_)) && contiguous[operand().index()],
            _ => true,
        };
        roles.push(role);
    }
    roles
}

/// Returns true if a reduction is over the last dimensions, whose elements are neighbours.
fn sums_rows(reduce: &Reduce, shape: &[u64]) -> bool {
    let last_kept = (0..shape.len()).rev().find(|d| shape[*d] > 1 && !reduce.dims.contains(d));
    reduce.dims.iter().all(|&d| shape[d] == 1 || last_kept.is_none_or(|k| k < d))
}

/// Returns true if a reshape keeps or splits each dimension, so that strides describe the result for any strides of the
/// operand.
fn only_splits(from: &[u64], to: &[u64]) -> bool {
    let mut to = to.iter().filter(|&&d| d != 1);
    from.iter().filter(|&&d| d != 1).all(|&size| {
        let mut product = 1;
        while product < size {
            match to.next() {
                Some(&d) => product *= d,
                None => return false,
            }
        }
        product == size
    })
}

/// The computed value or leaf that each value is read from, through aliases, and the bytes that are read of it.
fn sources(graph: &Graph, roles: &[Role]) -> Vec<(ValueId, u64)> {
    let mut source: Vec<(ValueId, u64)> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let bytes = graph.ty(v).bytes();
        source.push(match roles[v.index()] {
            Role::Alias => {
                let (s, of_operand) = source[graph.node(v).operands[0].index()];
                (s, bytes.min(of_operand))
            }
            _ => (v, bytes),
        });
    }
    source
}

/// The number of barriers between each value and its source ([`sources`]): reshapes that change no shape.
fn barriers(graph: &Graph, roles: &[Role]) -> Vec<u32> {
    let mut barriers = vec![0; graph.len()];
    for v in graph.values().filter(|v| roles[v.index()] == Role::Alias) {
        let operand = graph.node(v).operands[0];
        let same = matches!(graph.node(v).op, Op::Reshape(_)) && graph.shape(v) == graph.shape(operand);
        barriers[v.index()] = barriers[operand.index()] + u32::from(same);
    }
    barriers
}

/// The kernel of each computed node, identified by one of its nodes.
fn groups(graph: &Graph, roles: &[Role], source: &[(ValueId, u64)], barriers: &[u32]) -> Vec<u32> {
    let mut level = vec![0u32; graph.len()];
    let mut parent: Vec<u32> = (0..graph.len() as u32).collect();
    fn find(parent: &mut [u32], mut at: u32) -> u32 {
        while parent[at as usize] != at {
            parent[at as usize] = parent[parent[at as usize] as usize];
            at = parent[at as usize];
        }
        at
    }
    // The growing product that a kernel's value is computed from.
    let mut made_of: Vec<Option<ValueId>> = vec![None; graph.len()];
    for v in graph.values().filter(|v| computes(roles[v.index()])) {
        let alone = roles[v.index()] == Role::Alone;
        let operands: SmallVec<[ValueId; 4]> = graph.node(v).operands.iter().map(|o| source[o.index()].0).collect();
        let mut at = graph.node(v).operands.iter().map(|o| barriers[o.index()]).max().unwrap_or(0);
        for (o, direct) in operands.iter().zip(&graph.node(v).operands).filter(|(o, _)| computes(roles[o.index()])) {
            let barrier = alone || matches!(roles[o.index()], Role::Alone | Role::Reduction);
            at = at.max(level[o.index()] + u32::from(barrier) + barriers[direct.index()]);
        }
        if grows(graph, v) {
            made_of[v.index()] = Some(v);
        } else if !alone {
            let here = |o: &&ValueId| roles[o.index()] == Role::Alone || level[o.index()] == at;
            let mut of: SmallVec<[ValueId; 4]> =
                operands.iter().filter(here).filter_map(|o| made_of[o.index()]).collect();
            of.dedup();
            match of[..] {
                [first, second, ..]
                    if graph.ty(v).elements() < graph.ty(first).elements().max(graph.ty(second).elements()) =>
                {
                    at += 1
                }
                _ => made_of[v.index()] = of.first().copied(),
            }
        }
        level[v.index()] = at;
        if alone {
            continue;
        }
        for o in operands.iter().filter(|o| matches!(roles[o.index()], Role::Map | Role::Row)) {
            if level[o.index()] == at {
                let (a, b) = (find(&mut parent, o.0), find(&mut parent, v.0));
                parent[b as usize] = a;
            }
        }
    }
    (0..graph.len() as u32).map(|v| find(&mut parent, v)).collect()
}

/// The values that are kept in memory, and for each other value those that it is recomputed from.
struct Kept {
    kept: Vec<bool>,
    sources: Vec<Vec<ValueId>>,
}

fn kept(
    graph: &Graph,
    roles: &[Role],
    source: &[(ValueId, u64)],
    barriers: &[u32],
    group: &[u32],
    written: &BTreeSet<ValueId>,
) -> Kept {
    let mut into_alone = vec![false; graph.len()];
    // The other kernels that read each value.
    let mut readers: Vec<Vec<u32>> = vec![Vec::new(); graph.len()];
    for v in graph.values().filter(|v| computes(roles[v.index()])) {
        for direct in &graph.node(v).operands {
            let o = source[direct.index()].0.index();
            into_alone[o] |= roles[v.index()] == Role::Alone || barriers[direct.index()] > 0;
            let reader = group[v.index()];
            if group[o] != reader && !readers[o].contains(&reader) {
                readers[o].push(reader);
            }
        }
    }
    let of_columns = of_columns(graph);
    let crosses: Vec<bool> = readers.iter().map(|r| !r.is_empty()).collect();
    let mut kept: Vec<bool> = roles.iter().map(|r| matches!(r, Role::Leaf | Role::Alone | Role::Reduction)).collect();
    let mut sources: Vec<Vec<ValueId>> = vec![Vec::new(); graph.len()];
    for v in graph.values() {
        let i = v.index();
        if !matches!(roles[i], Role::Map | Role::Row) {
            continue;
        }
        if written.contains(&v) || into_alone[i] {
            kept[i] = true;
            continue;
        }
        if roles[i] == Role::Row {
            // The result has few bytes, so recomputing it is never worth a pass over the rows.
            kept[i] = crosses[i];
            continue;
        }
        let mut from: Vec<ValueId> = Vec::new();
        for o in &graph.node(v).operands {
            let o = source[o.index()].0;
            let of_operand = match roles[o.index()] {
                Role::Constant => continue,
                Role::Map if !kept[o.index()] => sources[o.index()].as_slice(),
                _ => &[o],
            };
            for s in of_operand {
                if !from.contains(s) {
                    from.push(*s);
                }
            }
        }
        let bytes = |sources: &mut dyn Iterator<Item = &ValueId>| sources.map(|s| graph.ty(*s).bytes()).sum::<u64>();
        let (all, own) = (bytes(&mut from.iter()), graph.ty(v).bytes());
        // Statistics of columns stay in the caches while rows stream by, however many rows there are.
        let rows = bytes(&mut from.iter().filter(|s| !of_columns[s.index()]));
        let moves_more = match rows <= own {
            true => moves_more(all, own, readers[i].len()),
            false => crosses[i],
        };
        if from.len() > MAX_SOURCES || moves_more {
            kept[i] = true;
        } else {
            // A recomputed value that depends on a row's reduction needs that reduction in memory.
            if crosses[i] {
                for s in from.iter().filter(|s| roles[s.index()] == Role::Row) {
                    kept[s.index()] = true;
                }
            }
            sources[i] = from;
        }
    }
    Kept { kept, sources }
}

/// Marks the results of reductions over rows, which have an element for each column, and what is computed from them
/// element by element or by collectives.
fn of_columns(graph: &Graph) -> Vec<bool> {
    let mut found = vec![false; graph.len()];
    for v in graph.values() {
        let node = graph.node(v);
        let like = |o: &ValueId| found[o.index()] && graph.ty(*o).elements() == node.ty.elements();
        found[v.index()] = match &node.op {
            Op::Reduce(reduce) if !sums_rows(reduce, graph.shape(node.operands[0])) => true,
            op if op.is_elementwise() || matches!(op, Op::Collective(_) | Op::Reshape(_)) => {
                node.operands.iter().any(like)
            }
            _ => false,
        };
    }
    found
}

/// Returns true if recomputing a value of `own` bytes in each of its `readers` moves as many bytes as keeping it, or
/// more. Keeping it writes it once. Recomputing it reads its sources of `from` bytes where the value would be read.
fn moves_more(from: u64, own: u64, readers: usize) -> bool {
    from > own && (from - own).saturating_mul(readers as u64) >= own
}

fn kernel(
    graph: &Graph,
    nodes: Vec<ValueId>,
    roles: &[Role],
    source: &[(ValueId, u64)],
    group: &[u32],
    kept: &Kept,
) -> Option<Kernel> {
    let first = *nodes.first()?;
    let writes: Vec<ValueId> = nodes.iter().copied().filter(|v| kept.kept[v.index()]).collect();
    if writes.is_empty() {
        return None;
    }
    let mut reads: Vec<(ValueId, u64)> = Vec::new();
    let mut read = |v: ValueId, bytes: u64| match reads.iter_mut().find(|(r, _)| *r == v) {
        Some((_, known)) => *known = (*known).max(bytes),
        None => reads.push((v, bytes)),
    };
    for &v in &nodes {
        let node = graph.node(v);
        for (position, o) in node.operands.iter().enumerate() {
            let (s, bytes) = source[o.index()];
            // A lookup reads only the selected rows of a table.
            let bytes = match (&node.op, position) {
                // A copy waits for this operand but does not read it.
                (Op::HostCopy(_), 1) => 0,
                (Op::Gather(_), 0) => bytes.min(node.ty.elements() * graph.ty(*o).dtype.bytes()),
                _ => bytes,
            };
            let inside = computes(roles[s.index()]) && group[s.index()] == group[first.index()];
            if inside || roles[s.index()] == Role::Constant {
                continue;
            }
            if kept.kept[s.index()] {
                read(s, bytes);
                continue;
            }
            for &f in &kept.sources[s.index()] {
                if !computes(roles[f.index()]) || group[f.index()] != group[first.index()] {
                    read(f, graph.ty(f).bytes());
                }
            }
        }
    }
    let passes = if converts_to_eight_bits(&graph.node(first).op, &graph.operand_types(first)) {
        PASSES_TO_EIGHT_BITS
    } else {
        1
    };
    let read_bytes = passes * reads.iter().map(|r| r.1).sum::<u64>();
    let written_bytes = passes * writes.iter().map(|w| graph.ty(*w).bytes()).sum::<u64>();
    let kind = kind(graph, &nodes, source);
    Some(Kernel { kind, nodes, reads, writes, read_bytes, written_bytes, work: None })
}

fn kind(graph: &Graph, nodes: &[ValueId], source: &[(ValueId, u64)]) -> KernelKind {
    let v = nodes[0];
    let node = graph.node(v);
    match &node.op {
        Op::DotGeneral(dot) => {
            let (lhs, rhs) = (graph.shape(node.operands[0]), graph.shape(node.operands[1]));
            let size = |shape: &[u64], dims: &[usize]| dims.iter().map(|&d| shape[d]).product::<u64>();
            let (batch, k) = (size(lhs, &dot.lhs_batch), size(lhs, &dot.lhs_contract));
            let rest = |shape: &[u64]| shape.iter().product::<u64>() / (batch * k).max(1);
            let row = |v: ValueId| graph.shape(v).last().copied().unwrap_or(1);
            let rows = [row(source[node.operands[0].index()].0), row(source[node.operands[1].index()].0), row(v)];
            let aligned = rows.iter().map(|r| 1 << r.trailing_zeros().min(3)).min().unwrap_or(1);
            let dtype = graph.ty(node.operands[0]).dtype;
            KernelKind::Matmul(Matmul { batch, m: rest(lhs), n: rest(rhs), k, dtype, aligned })
        }
        Op::GroupedDot(_) | Op::GroupedOuter(_) => {
            let matrices =
                if matches!(node.op, Op::GroupedDot(_)) { graph.shape(node.operands[1]) } else { &node.ty.shape };
            let flop = node.op.flop(&graph.operand_types(v), &node.ty);
            let (batch, terms, columns) = (matrices[0].max(1), matrices[1], matrices[2]);
            // Rows are assumed to be spread evenly.
            let rows = flop.div_ceil(2 * batch * (terms * columns).max(1));
            let [m, n, k] = match &node.op {
                Op::GroupedOuter(_) => [terms, columns, rows],
                Op::GroupedDot(dot) if dot.contract == 2 => [rows, terms, columns],
                _ => [rows, columns, terms],
            };
            let aligned = [terms, columns].iter().map(|r| 1 << r.trailing_zeros().min(3)).min().unwrap_or(1);
            let dtype = graph.ty(node.operands[0]).dtype;
            KernelKind::Matmul(Matmul { batch, m, n, k, dtype, aligned })
        }
        Op::Convolution(_) => {
            let flop = node.op.flop(&graph.operand_types(v), &node.ty) as f64;
            KernelKind::Convolution { flop, dtype: graph.ty(node.operands[0]).dtype }
        }
        Op::ArgSort(_) => KernelKind::Sort { passes: graph.operand_types(v).iter().map(|t| t.dtype.bytes()).sum() },
        Op::Collective(c) if c.collective.communicates() => KernelKind::Collective,
        Op::HostCopy(HostCopy { route }) => KernelKind::HostCopy(*route),
        Op::Gather(_)
        | Op::ScatterAdd(_)
        | Op::Scatter(_)
        | Op::ReduceWindow(_)
        | Op::SelectAndScatter(_)
        | Op::Cumulative(_) => KernelKind::Indexed,
        _ => KernelKind::Fused { operations: nodes.iter().map(|&v| operations(graph, v)).sum() },
    }
}

fn operations(graph: &Graph, v: ValueId) -> f64 {
    use crate::op::{Binary, Unary};
    let node = graph.node(v);
    let elements = node.operands.iter().map(|o| graph.ty(*o).elements()).fold(node.ty.elements(), u64::max);
    let each = match &node.op {
        Op::Unary(Unary::Negate | Unary::Abs | Unary::Not | Unary::Sign | Unary::StopGradient) => 1.0,
        Op::Unary(_) | Op::Binary(Binary::Divide | Binary::Power | Binary::Remainder) => TRANSCENDENTAL,
        // The 20 rounds of Threefry (Salmon et al. 2011).
        Op::Threefry(_) => 80.0,
        _ => 1.0,
    };
    each * elements as f64
}

/// An order in which every kernel runs after those that it reads from. Where this leaves a choice, it is the order of
/// the graph.
fn in_order(graph: &Graph, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let mut maker: Vec<Option<u32>> = vec![None; graph.len()];
    for (i, kernel) in kernels.iter().enumerate() {
        kernel.writes.iter().for_each(|w| maker[w.index()] = Some(i as u32));
    }
    let mut waits: Vec<u32> = vec![0; kernels.len()];
    let mut users: Vec<Vec<u32>> = vec![Vec::new(); kernels.len()];
    for (i, kernel) in kernels.iter().enumerate() {
        for m in kernel.reads.iter().filter_map(|(r, _)| maker[r.index()]) {
            waits[i] += 1;
            users[m as usize].push(i as u32);
        }
    }
    let last = |i: u32| kernels[i as usize].nodes.last().copied();
    let mut ready: BinaryHeap<_> =
        (0..kernels.len() as u32).filter(|&i| waits[i as usize] == 0).map(|i| Reverse((last(i), i))).collect();
    let mut order: Vec<u32> = Vec::with_capacity(kernels.len());
    while let Some(Reverse((_, i))) = ready.pop() {
        order.push(i);
        for &u in &users[i as usize] {
            waits[u as usize] -= 1;
            if waits[u as usize] == 0 {
                ready.push(Reverse((last(u), u)));
            }
        }
    }
    let mut slots: Vec<Option<Kernel>> = kernels.into_iter().map(Some).collect();
    order.into_iter().filter_map(|i| slots[i as usize].take()).collect()
}

#[cfg(test)]
#[path = "kernels_tests.rs"]
mod tests;

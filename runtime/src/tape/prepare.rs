//! Turns the bodies of a program into pieces: the commands of their kernels on a device, before any placement.
//!
//! Loop programs come from [`crate::loops`]. Matmuls and collectives are described as libraries take them, with copies
//! before and after if they need another layout. Convolutions become both ([`super::convolved`]). Every device and
//! every microbatch uses the same pieces.

use super::convolved::convolution;
use super::strided::Strided;
use super::{Batch, CollectiveKind, LaunchId};
use crate::collective::Halo;
use crate::loops::{Launch, Scalar, Source, launches};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::kernels::{Kernel, KernelKind};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{DotGeneral, HostRoute, Op};
use altiplano_ir::program::{Body, Program};
use altiplano_ir::reshard::Collective;
use altiplano_ir::storage::gathered::TILE_BYTES;
use altiplano_ir::storage::view::View;
use altiplano_ir::storage::{Steps, launched};
use altiplano_ir::types::TensorType;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Limit on the separate library calls of one product; beyond it, the operands are copied.
const MAX_CALLS: u64 = 64;

/// Reasons why a program has no tape.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unprepared {
    #[error("body '{body}', {value}: no kernel computes '{op}' on a device")]
    Op { body: String, value: ValueId, op: &'static str },
}

/// The location of a piece's operand or result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    Value(ValueId),
    Constant(ValueId),
    /// Temporary data of this step.
    Scratch(u32),
}

/// A matrix at a known place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    pub place: Place,
    pub dtype: DType,
    pub from: u64,
    pub leading: u64,
    pub transposed: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    pub sizes: [u64; 3],
    pub operands: [Operand; 3],
    pub batches: Vec<Batch>,
    pub accumulate: bool,
}

/// A command whose regions are not assigned yet.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    Launch {
        launch: LaunchId,
        params: Vec<Place>,
        /// Start indices of the tile, for a launch that takes them.
        starts: Vec<u64>,
    },
    Matmul(Box<Product>),
    Collective {
        axes: Vec<AxisId>,
        kind: CollectiveKind,
        dtype: DType,
        elements: u64,
        from: Place,
        to: Place,
    },
    /// Sends equal parts from every member of a group to every other.
    AllToAll {
        axes: Vec<AxisId>,
        dtype: DType,
        elements: u64,
        from: Place,
        to: Place,
    },
    /// Sends the whole operand from every member of a group to the one `by` places before it.
    Shift {
        axes: Vec<AxisId>,
        by: u64,
        dtype: DType,
        elements: u64,
        from: Place,
        to: Place,
    },
    Fill {
        place: Place,
        value: f64,
    },
    Copy {
        from: Place,
        to: Place,
    },
    /// Copies between a device and the memory of its host.
    HostCopy {
        route: HostRoute,
        from: Place,
        to: Place,
    },
}

/// The pieces of a step, and the types of its scratch.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    pub pieces: Vec<Piece>,
    pub scratch: Vec<(DType, u64)>,
    /// Pairs of outputs and inputs that may share storage: each iteration reads a place before it writes it.
    pub may_share: BTreeSet<(ValueId, ValueId)>,
    /// Scratch shared by several launches of a kernel.
    named: BTreeMap<Source, Place>,
}

/// A body prepared for any device.
pub struct Prepared {
    pub steps: Steps<Pieces>,
    /// Types of the body's constants.
    pub constants: BTreeMap<ValueId, TensorType>,
}

/// Distinct launches.
#[derive(Default)]
pub struct Table {
    pub launches: Vec<Arc<Launch>>,
    known: HashMap<String, LaunchId>,
}

impl Table {
    /// Adds a launch, or finds an equal one. Parameters are known by position alone.
    pub fn add(&mut self, mut launch: Launch) -> LaunchId {
        for (param, i) in launch.params.iter_mut().zip(0..) {
            param.source = Source::Value(ValueId(i));
        }
        let Launch { params, coordinates, scalars, rows, spread, phases } = &launch;
        let key = format!("{params:?} {coordinates:?} {:?} {rows} {spread:?} {phases:?}", scalars.all);
        let next = LaunchId(self.launches.len() as u32);
        let id = *self.known.entry(key).or_insert(next);
        if id == next {
            self.launches.push(Arc::new(launch));
        }
        id
    }
}

/// Prepares a body with these kernels.
pub fn prepare(program: &Program, body: &Body, kernels: &[Kernel], table: &mut Table) -> Result<Prepared, Unprepared> {
    let graph = &body.graph;
    let steps = launched(program, body, kernels);
    let mut failure = None;
    let mut of_body = OfBody {
        graph,
        mesh: &program.mesh,
        table,
        varies: graph.depends_on(|v| graph.node(v).op.is_leaf()),
        constants: BTreeMap::new(),
    };
    let steps = steps.map(|step| match step.kernel {
        None => of_body.known(step.outputs[0].value),
        Some(k) => of_body.kernel(&kernels[k]).unwrap_or_else(|(value, op)| {
            failure.get_or_insert(Unprepared::Op { body: body.name.clone(), value, op });
            Pieces::default()
        }),
    });
    match failure {
        Some(failure) => Err(failure),
        None => Ok(Prepared { steps, constants: of_body.constants }),
    }
}

/// A loop program and the kernel that launches it: the number of the body, and the last node that the kernel makes.
#[derive(Clone, Debug, PartialEq)]
pub struct Launched {
    pub body: usize,
    pub node: ValueId,
    pub launch: Arc<Launch>,
}

/// All loop programs that a program's bodies launch, in the order of the tapes, including those that gather and copy
/// for libraries. The second list has the bodies and ops that have none.
pub fn launched_by(program: &Program, kernels: &[Vec<Kernel>]) -> (Vec<Launched>, Vec<Unprepared>) {
    let mut table = Table::default();
    let (mut all, mut missing) = (Vec::new(), Vec::new());
    for (at, (body, kernels)) in program.bodies.iter().zip(kernels).enumerate() {
        match prepare(program, body, kernels, &mut table) {
            Err(why) => missing.push(why),
            Ok(prepared) => {
                for step in &prepared.steps.steps {
                    let launches = step.kernel.pieces.iter().filter_map(|piece| match piece {
                        Piece::Launch { launch, .. } => Some(table.launches[launch.0 as usize].clone()),
                        _ => None,
                    });
                    all.extend(launches.map(|launch| Launched { body: at, node: step.node, launch }));
                }
            }
        }
    }
    (all, missing)
}

struct OfBody<'a> {
    graph: &'a Graph,
    mesh: &'a Mesh,
    table: &'a mut Table,
    varies: Vec<bool>,
    constants: BTreeMap<ValueId, TensorType>,
}

type Missing = (ValueId, &'static str);

impl OfBody<'_> {
    fn missing(&self, v: ValueId) -> Missing {
        (v, self.graph.node(v).op.name())
    }

    fn constant(&mut self, v: ValueId) -> Place {
        self.constants.insert(v, self.graph.ty(v).clone());
        Place::Constant(v)
    }

    /// A value that is known beforehand and that the body returns.
    fn known(&mut self, v: ValueId) -> Pieces {
        let to = Place::Value(v);
        let piece = match &self.graph.node(v).op {
            Op::Constant(literal) if literal.as_splat().is_some() => {
                Piece::Fill { place: to, value: literal.as_splat().unwrap_or(0.0) }
            }
            _ => Piece::Copy { from: self.constant(v), to },
        };
        Pieces { pieces: vec![piece], ..Pieces::default() }
    }

    fn kernel(&mut self, kernel: &Kernel) -> Result<Pieces, Missing> {
        let mut pieces = Pieces::default();
        let reads: BTreeSet<ValueId> = kernel.reads.iter().map(|r| r.0).collect();
        let v = kernel.nodes[0];
        let op = self.graph.node(v).op.clone();
        match (&kernel.kind, &op) {
            (KernelKind::Matmul(_), Op::DotGeneral(dot)) => self.product(&mut pieces, &reads, v, dot)?,
            (KernelKind::Convolution { .. }, Op::Convolution(op)) => {
                let operands = [0, 1].map(|i| self.graph.node(v).operands[i]);
                let [lhs, rhs] = operands;
                let places =
                    [self.whole(&mut pieces, &reads, lhs)?, self.whole(&mut pieces, &reads, rhs)?, Place::Value(v)];
                let types = [lhs, rhs, v].map(|v| self.graph.ty(v));
                convolution(self.table, &mut pieces, op, places, types, TILE_BYTES);
            }
            (KernelKind::HostCopy(route), _) => {
                let from = self.whole(&mut pieces, &reads, self.graph.node(v).operands[0])?;
                pieces.pieces.push(Piece::HostCopy { route: *route, from, to: Place::Value(v) });
            }
            (KernelKind::Collective, Op::Collective(op)) => {
                self.collective(&mut pieces, &reads, v, &op.collective)?;
            }
            _ => {
                let made = launches(self.graph, kernel).map_err(|why| (why.value, why.op))?;
                // All threads of a tile read its rows, so attention may not write in place.
                if !matches!(kernel.kind, KernelKind::Attention(_)) {
                    pieces.may_share = may_share(&made);
                }
                for launch in made {
                    self.launch(&mut pieces, &launch, kernel);
                }
            }
        }
        Ok(pieces)
    }

    fn launch(&mut self, pieces: &mut Pieces, launch: &Launch, kernel: &Kernel) {
        let mut params = Vec::with_capacity(launch.params.len());
        for param in &launch.params {
            params.push(match &param.source {
                Source::Constant(v) => self.constant(*v),
                Source::Value(v) if !param.written && !self.varies[v.index()] => self.constant(*v),
                Source::Value(v) => {
                    let stored = kernel.writes.contains(v) || kernel.reads.iter().any(|r| r.0 == *v);
                    if stored || self.graph.node(*v).op.is_leaf() {
                        Place::Value(*v)
                    } else {
                        // A reduction that a later launch of the kernel reads.
                        pieces.named(param.source.clone(), param.dtype, param.elements)
                    }
                }
                Source::Selected(_) => pieces.named(param.source.clone(), param.dtype, param.elements),
            });
        }
        let launch = self.table.add(launch.clone());
        pieces.pieces.push(Piece::Launch { launch, params, starts: Vec::new() });
    }

    /// The strided view of an operand, if strides describe it.
    fn view(&mut self, reads: &BTreeSet<ValueId>, v: ValueId) -> Option<(View, Place)> {
        let node = self.graph.node(v);
        let whole = || View::whole(v, node.ty.shape.iter().map(|&d| d as usize).collect());
        if reads.contains(&v) || node.op.is_leaf() {
            return Some((whole(), Place::Value(v)));
        }
        if !self.varies[v.index()] {
            return Some((whole(), self.constant(v)));
        }
        let (under, place) = self.view(reads, *node.operands.first()?)?;
        Some((under.through(&node.op, &node.ty.shape)?, place))
    }

    /// Makes a row-major copy of a value that no strides describe.
    fn computed(&mut self, pieces: &mut Pieces, reads: &BTreeSet<ValueId>, v: ValueId) -> Result<Place, Missing> {
        let kernel = Kernel {
            nodes: vec![v],
            reads: reads.iter().map(|&r| (r, self.graph.ty(r).bytes())).collect(),
            ..Kernel::moving(KernelKind::Fused { operations: 0.0 }, 0)
        };
        let kernel = Kernel { writes: vec![v], ..kernel };
        let place = pieces.scratch(self.graph.ty(v));
        for launch in launches(self.graph, &kernel).map_err(|why| (why.value, why.op))? {
            self.launch(pieces, &launch, &kernel);
            if let Some(Piece::Launch { params, .. }) = pieces.pieces.last_mut() {
                params.iter_mut().filter(|p| **p == Place::Value(v)).for_each(|p| *p = place);
            }
        }
        Ok(place)
    }

    fn copied(&mut self, pieces: &mut Pieces, view: &View, from: Place) -> Place {
        let (dtype, read) = match from {
            Place::Value(v) | Place::Constant(v) => (self.graph.ty(v).dtype, self.graph.ty(v).elements()),
            Place::Scratch(i) => pieces.scratch[i as usize],
        };
        let wide = |list: &[usize]| list.iter().map(|&n| n as u64).collect::<Vec<u64>>();
        let copy = Strided::gathered(wide(&view.shape), view.offset as u64, wide(&view.strides));
        let ty = TensorType::new(dtype, wide(&view.shape));
        let place = pieces.scratch(&ty);
        let launch = self.table.add(copy.launch(dtype, read, ty.elements()));
        pieces.pieces.push(Piece::Launch { launch, params: vec![from, place], starts: Vec::new() });
        place
    }

    /// Makes an operand available in row-major order.
    fn whole(&mut self, pieces: &mut Pieces, reads: &BTreeSet<ValueId>, v: ValueId) -> Result<Place, Missing> {
        match self.view(reads, v) {
            Some((view, place)) => {
                if view.is_all_of(self.graph.ty(view.root).elements() as usize) {
                    return Ok(place);
                }
                Ok(self.copied(pieces, &view, place))
            }
            None => self.computed(pieces, reads, v),
        }
    }

    fn product(
        &mut self,
        pieces: &mut Pieces,
        reads: &BTreeSet<ValueId>,
        v: ValueId,
        dot: &DotGeneral,
    ) -> Result<(), Missing> {
        let operands = [self.graph.node(v).operands[0], self.graph.node(v).operands[1]];
        let mut views: Vec<(View, Place)> = Vec::with_capacity(2);
        for o in operands {
            views.push(match self.view(reads, o) {
                Some(found) => found,
                None => {
                    let place = self.computed(pieces, reads, o)?;
                    (View::whole(o, self.graph.shape(o).iter().map(|&d| d as usize).collect()), place)
                }
            });
        }
        let result = self.graph.ty(v).clone();
        // Copy operands that a library cannot take: first those that are no strided matrices, then those that need too
        // many calls.
        for round in 0..3 {
            let found = [matrix(&views[0].0, &dot.lhs_batch, &dot.lhs_contract, false), {
                matrix(&views[1].0, &dot.rhs_batch, &dot.rhs_contract, true)
            }];
            let batches = match &found {
                [Some(lhs), Some(rhs)] => batches(lhs, rhs),
                _ => Vec::new(),
            };
            let calls: u64 = batches.iter().rev().skip(1).map(|b| b.count).product();
            if let [Some(lhs), Some(rhs)] = &found
                && (calls <= MAX_CALLS || round == 2)
            {
                let (m, k, n) = (lhs.rows, lhs.columns, rhs.columns);
                let operand = |matrix: &Laid, place: Place| Operand {
                    place,
                    dtype: result.dtype,
                    from: matrix.from,
                    leading: matrix.leading,
                    transposed: matrix.transposed,
                };
                let written =
                    Operand { place: Place::Value(v), dtype: result.dtype, from: 0, leading: n, transposed: false };
                let operands = [operand(lhs, views[0].1), operand(rhs, views[1].1), written];
                pieces.pieces.push(Piece::Matmul(Box::new(Product {
                    sizes: [m, n, k],
                    operands,
                    batches,
                    accumulate: false,
                })));
                return Ok(());
            }
            for (i, (view, place)) in views.iter_mut().enumerate() {
                if found[i].is_none() || round > 0 {
                    // Batch, free and contracted dimensions in turn, each contiguous.
                    let (batch, contract) = match i {
                        0 => (&dot.lhs_batch, &dot.lhs_contract),
                        _ => (&dot.rhs_batch, &dot.rhs_contract),
                    };
                    let order = order(view.shape.len(), batch, contract, i == 1);
                    let arranged = view.transpose(&order);
                    *place = self.copied(pieces, &arranged, *place);
                    let whole = View::whole(view.root, arranged.shape.clone());
                    let mut back = vec![0; order.len()];
                    order.iter().enumerate().for_each(|(i, &d)| back[d] = i);
                    *view = whole.transpose(&back);
                }
            }
        }
        Err(self.missing(v))
    }

    fn rearranged(
        &mut self,
        pieces: &mut Pieces,
        shape: &[u64],
        permutation: &[usize],
        dtype: DType,
        from: Place,
    ) -> Place {
        let copy = Strided::transposed(shape, permutation);
        let elements = shape.iter().product();
        let place = pieces.scratch(&TensorType::new(dtype, vec![elements]));
        let launch = self.table.add(copy.launch(dtype, elements, elements));
        pieces.pieces.push(Piece::Launch { launch, params: vec![from, place], starts: Vec::new() });
        place
    }

    /// Assembles consecutive parts into the result, block by block.
    fn joined(
        &mut self,
        pieces: &mut Pieces,
        [n, pre, outer, size, post]: [u64; 5],
        dtype: DType,
        from: Place,
        to: Place,
    ) {
        let copy = Strided::transposed(&[n, pre, outer, size, post], &[1, 2, 0, 3, 4]);
        let elements = n * pre * outer * size * post;
        let launch = self.table.add(copy.launch(dtype, elements, elements));
        pieces.pieces.push(Piece::Launch { launch, params: vec![from, to], starts: Vec::new() });
    }

    fn collective(
        &mut self,
        pieces: &mut Pieces,
        reads: &BTreeSet<ValueId>,
        v: ValueId,
        collective: &Collective,
    ) -> Result<(), Missing> {
        let operand = self.graph.node(v).operands[0];
        let (ty, result) = (self.graph.ty(operand).clone(), self.graph.ty(v).clone());
        let (dtype, to) = (ty.dtype, Place::Value(v));
        let from = self.whole(pieces, reads, operand)?;
        let n = self.mesh.product(collective.axes());
        let axes = collective.axes().to_vec();
        let around = |shape: &[u64], dim: u8| {
            let dim = usize::from(dim);
            (shape[..dim].iter().product::<u64>(), shape[dim], shape[dim + 1..].iter().product::<u64>())
        };
        match *collective {
            Collective::AllReduce { reducer, .. } => {
                let kind = CollectiveKind::AllReduce(reducer);
                pieces.pieces.push(Piece::Collective { axes, kind, dtype, elements: ty.elements(), from, to });
            }
            Collective::ReduceScatter { reducer, dim, outer, .. } => {
                let (pre, size, post) = around(&ty.shape, dim);
                let shape = [pre, outer, n, size / (outer * n), post];
                let from = match pre * outer {
                    1 => from,
                    _ => self.rearranged(pieces, &shape, &[2, 0, 1, 3, 4], dtype, from),
                };
                let kind = CollectiveKind::ReduceScatter(reducer);
                pieces.pieces.push(Piece::Collective { axes, kind, dtype, elements: result.elements(), from, to });
            }
            Collective::AllGather { dim, outer, .. } => {
                let (pre, size, post) = around(&ty.shape, dim);
                let (kind, elements) = (CollectiveKind::AllGather, ty.elements());
                let into = if pre * outer == 1 { to } else { pieces.scratch(&result) };
                pieces.pieces.push(Piece::Collective { axes, kind, dtype, elements, from, to: into });
                if into != to {
                    self.joined(pieces, [n, pre, outer, size / outer, post], dtype, into, to);
                }
            }
            Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } => {
                let (pre, size, post) = around(&ty.shape, split_dim);
                let shape = [pre, split_outer, n, size / (split_outer * n), post];
                let from = match pre * split_outer {
                    1 => from,
                    _ => self.rearranged(pieces, &shape, &[2, 0, 1, 3, 4], dtype, from),
                };
                let mut part = ty.shape.clone();
                part[usize::from(split_dim)] /= n;
                let (pre, size, post) = around(&part, concat_dim);
                let into = if pre * concat_outer == 1 { to } else { pieces.scratch(&result) };
                pieces.pieces.push(Piece::AllToAll { axes, dtype, elements: ty.elements() / n, from, to: into });
                if into != to {
                    self.joined(pieces, [n, pre, concat_outer, size / concat_outer, post], dtype, into, to);
                }
            }
            Collective::Shift { by, .. } => {
                pieces.pieces.push(Piece::Shift { axes, by: by % n, dtype, elements: ty.elements(), from, to });
            }
            Collective::Halo { dim, low, high, reducer, .. } => {
                let halo = Halo { dim: usize::from(dim), low, high, reducer };
                self.halo(pieces, &ty, &halo, axes, from, to);
            }
            Collective::LocalSlice { .. } | Collective::KeepFirst { .. } => return Err(self.missing(v)),
        }
        Ok(())
    }

    /// A halo exchange: all blocks are gathered, and each device takes its own and its surroundings.
    fn halo(&mut self, pieces: &mut Pieces, ty: &TensorType, halo: &Halo, axes: Vec<AxisId>, from: Place, to: Place) {
        let n = self.mesh.product(&axes);
        let gathered = pieces.scratch(&TensorType::new(ty.dtype, vec![n * ty.elements()]));
        let kind = CollectiveKind::AllGather;
        let (dtype, elements) = (ty.dtype, ty.elements());
        pieces.pieces.push(Piece::Collective { axes: axes.clone(), kind, dtype, elements, from, to: gathered });
        let launch = super::halo::launch(ty, halo, n, axes);
        let launch = self.table.add(launch);
        pieces.pieces.push(Piece::Launch { launch, params: vec![gathered, to], starts: Vec::new() });
    }
}

impl Pieces {
    pub fn scratch(&mut self, ty: &TensorType) -> Place {
        self.scratch.push((ty.dtype, ty.elements()));
        Place::Scratch(self.scratch.len() as u32 - 1)
    }

    fn named(&mut self, source: Source, dtype: DType, elements: u64) -> Place {
        match self.named.get(&source) {
            Some(&known) => known,
            None => {
                let place = self.scratch(&TensorType::new(dtype, vec![elements]));
                self.named.insert(source, place);
                place
            }
        }
    }
}

/// Orders batch, free and contracted dimensions; if rows are contracted, the contracted ones precede the free ones.
fn order(rank: usize, batch: &[usize], contract: &[usize], contracted_rows: bool) -> Vec<usize> {
    let free = (0..rank).filter(|d| !batch.contains(d) && !contract.contains(d));
    match contracted_rows {
        true => batch.iter().chain(contract).copied().chain(free).collect(),
        false => batch.iter().copied().chain(free).chain(contract.iter().copied()).collect(),
    }
}

/// The layout of the matrices of a batch.
struct Laid {
    rows: u64,
    columns: u64,
    from: u64,
    leading: u64,
    transposed: bool,
    /// Sizes and strides of batch dimensions.
    batch: Vec<(u64, u64)>,
}

/// Views an operand as a matrix with one stride for rows and one for columns, one of which is 1.
fn matrix(view: &View, batch: &[usize], contract: &[usize], contracted_rows: bool) -> Option<Laid> {
    let rank = view.shape.len();
    let free: Vec<usize> = (0..rank).filter(|d| !batch.contains(d) && !contract.contains(d)).collect();
    let (rows, columns) = if contracted_rows { (contract, &free[..]) } else { (&free[..], contract) };
    // Joins several dimensions into one.
    let joined = |dims: &[usize]| {
        let part = view.transpose(dims);
        match part.runs()[..] {
            [] => Some((1u64, None)),
            [(size, stride)] => Some((size as u64, Some(stride as u64))),
            _ => None,
        }
    };
    let ((rows, row), (columns, column)) = (joined(rows)?, joined(columns)?);
    let (leading, transposed) = match (row, column) {
        (row, None | Some(1)) if row.unwrap_or(columns) >= columns => (row.unwrap_or(columns), false),
        (None | Some(1), column) if column.unwrap_or(rows) >= rows => (column.unwrap_or(rows), true),
        _ => return None,
    };
    let batch = batch.iter().map(|&d| (view.shape[d] as u64, view.strides[d] as u64)).collect();
    Some(Laid { rows, columns, from: view.offset as u64, leading, transposed, batch })
}

/// Merges the batch dimensions of both operands into as few as possible.
fn batches(lhs: &Laid, rhs: &Laid) -> Vec<Batch> {
    let mut all: Vec<Batch> = Vec::new();
    let mut result = lhs.rows * rhs.columns;
    for (&(count, lhs), &(_, rhs)) in lhs.batch.iter().zip(&rhs.batch).rev() {
        if count == 1 {
            continue;
        }
        let batch = Batch { count, lhs, rhs, result };
        result *= count;
        match all.last_mut() {
            Some(inner) if (lhs, rhs) == (inner.lhs * inner.count, inner.rhs * inner.count) => inner.count *= count,
            _ => all.push(batch),
        }
    }
    all.reverse();
    all
}

/// Pairs of written and read values that may share storage. The last launch that reads the one writes the other, and
/// each iteration reads its place no later than it writes it.
fn may_share(launches: &[Launch]) -> BTreeSet<(ValueId, ValueId)> {
    let mut pairs = BTreeSet::new();
    for (i, launch) in launches.iter().enumerate() {
        let value = |p: &crate::loops::Param| if let Source::Value(v) = p.source { Some(v) } else { None };
        let later = |source: &Source| launches[i + 1..].iter().any(|l| l.params.iter().any(|p| p.source == *source));
        for (w, written) in launch.params.iter().enumerate().filter(|(_, p)| p.written) {
            let mut stores =
                launch.phases.iter().enumerate().flat_map(|(at, phase)| {
                    phase.stores.iter().filter(|s| s.param as usize == w).map(move |s| (at, s))
                });
            let Some((phase, store)) = stores.next() else { continue };
            let elsewhere = launches[..i].iter().any(|l| l.params.iter().any(|p| p.source == written.source));
            if stores.next().is_some() || store.combines.is_some() || elsewhere {
                continue;
            }
            for (r, read) in launch.params.iter().enumerate().filter(|(_, p)| !p.written) {
                let is_it = |var: &&crate::loops::Var| matches!(launch.scalars.get(**var), Scalar::Load { param, .. } if *param as usize == r);
                let loads = |phases: &[crate::loops::Phase]| -> Vec<crate::loops::Var> {
                    phases.iter().flat_map(|p| launch.needs(p)).collect()
                };
                let aligned = loads(&launch.phases)
                    .iter()
                    .filter(is_it)
                    .all(|var| matches!(launch.scalars.get(*var), Scalar::Load { index, .. } if *index == store.index));
                let after = loads(&launch.phases[phase + 1..]).iter().any(|var| is_it(&var));
                if aligned
                    && !after
                    && read.dtype.bytes() == written.dtype.bytes()
                    && !later(&read.source)
                    && let (Some(w), Some(r)) = (value(written), value(read))
                {
                    pairs.insert((w, r));
                }
            }
        }
    }
    pairs
}

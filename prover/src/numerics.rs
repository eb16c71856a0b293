//! The rounding of a plan's sums, which a proof over the reals says nothing about.
//!
//! One device computes a sum in one op: a contraction that accumulates in single precision and rounds its result once.
//! A plan adds in parts: on a device, then over microbatches, then over devices, each in a type of its own. [`sums`]
//! follows every sum of the programs through its parts, and [`Sum`] bounds the error of both ways.
//!
//! Errors are relative to the sum of the summands' magnitudes. A sum that passes each summand through `n` roundings of
//! unit `u` has an error of at most `gamma(n) = n u / (1 - n u)` in any order (Higham, Accuracy and Stability of
//! Numerical Algorithms, 2002, sections 3.1 and 4.2). If the roundings are independent with mean zero, the error is
//! about `sqrt(n) u` (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019).
//!
//! Sums that the graph itself writes as additions, such as residual connections and the blocks of a ring, are the same
//! on one device and are not counted.

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Op, Operator, OutOfBounds, Reducer, Unary};
use altiplano_ir::program::{ALL_PARAMETERS, Body, BufferId, BufferKind, Phase, Programs};
use altiplano_ir::reshard::Collective;
use altiplano_ir::rule::FactorKind;
use altiplano_ir::types::TensorType;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// A sum loses precision if its probable error is more than so many times that of one device.
///
/// Eight times is three bits of the result. It leaves five of the eight bits of bf16, and a running sum in bf16 that
/// goes on to 256 like summands stops growing. 64 additions in the type of a half-precision result reach it. Sums in
/// the type that one device accumulates in never do, whatever their length: adding in parts rounds no more often.
pub const WORSE_THAN_ONE_DEVICE: f64 = 8.0;

/// The place where summands are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// In one op on a device.
    Op,
    /// In an accumulator over the microbatches of a step.
    Microbatches,
    /// In a collective over devices.
    Devices,
    /// Nowhere: a conversion to a narrower type.
    Rounding,
}

impl Place {
    pub fn name(self) -> &'static str {
        match self {
            Place::Op => "op",
            Place::Microbatches => "microbatches",
            Place::Devices => "devices",
            Place::Rounding => "rounding",
        }
    }
}

/// A part of a sum: so many summands, added in a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Part {
    pub place: Place,
    pub dtype: DType,
    pub summands: u64,
}

/// The value that is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Of {
    /// Gradients of parameters.
    Gradients,
    /// Values of a forward pass, among them losses.
    Activations,
    /// Gradients of activations.
    ActivationGradients,
    /// Norms and other sums over all parameters.
    Totals,
}

impl Of {
    pub fn name(self) -> &'static str {
        match self {
            Of::Gradients => "gradients",
            Of::Activations => "activations",
            Of::ActivationGradients => "activation gradients",
            Of::Totals => "norms and totals",
        }
    }
}

/// A sum, or several that are added in the same way.
#[derive(Clone, Debug, PartialEq)]
pub struct Sum {
    pub of: Of,
    /// The parts in the order in which they are added.
    pub parts: Vec<Part>,
    /// The parts on one device.
    pub one_device: Vec<Part>,
    /// The number of such sums.
    pub count: usize,
    /// The program and the name of the body of the first one, and its name: a buffer's or a value's.
    pub program: u32,
    pub body: String,
    pub name: String,
}

impl Sum {
    /// Returns true if the sum is much less precise than that of one device; see [`WORSE_THAN_ONE_DEVICE`].
    pub fn loses_precision(&self) -> bool {
        probable(&self.parts) > WORSE_THAN_ONE_DEVICE * probable(&self.one_device)
    }
}

/// The unit roundoff of a type: half the distance from 1 to the next larger number. 0 for integers.
pub fn unit(dtype: DType) -> f64 {
    dtype.float_format().map_or(0.0, |format| 0.5f64.powi(format.mantissa_bits as i32 + 1))
}

/// The number of roundings that a summand passes through at most.
fn roundings(part: &Part) -> f64 {
    match part.place {
        // A product and all additions but one.
        Place::Op => part.summands as f64,
        Place::Microbatches | Place::Devices => part.summands.saturating_sub(1) as f64,
        Place::Rounding => 1.0,
    }
}

/// The worst-case error of a sum, relative to the sum of magnitudes. Infinite if the bound says nothing.
pub fn worst_case(parts: &[Part]) -> f64 {
    let growth = |part: &Part| {
        let nu = roundings(part) * unit(part.dtype);
        if nu < 1.0 { 1.0 / (1.0 - nu) } else { f64::INFINITY }
    };
    parts.iter().map(growth).product::<f64>() - 1.0
}

/// The error of a sum if its roundings are independent, relative to the sum of magnitudes.
pub fn probable(parts: &[Part]) -> f64 {
    parts.iter().map(|part| roundings(part) * unit(part.dtype).powi(2)).sum::<f64>().sqrt()
}

/// The type in which kernels accumulate the sums of an op.
fn accumulated_in(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// How a value came about as a sum.
#[derive(Clone, Debug, Default)]
struct Chain {
    parts: Vec<Part>,
    /// True if at most one device's summand is not zero, so that nothing is rounded.
    exact: bool,
    of_parameter: bool,
    /// The sum that this one goes on with.
    last: Option<usize>,
}

impl Chain {
    fn one_device(&self) -> Vec<Part> {
        let counts = self.parts.iter().filter(|part| part.place != Place::Rounding);
        let summands = counts.fold(1u64, |product, part| product.saturating_mul(part.summands));
        let first = self.parts.first().map_or(DType::F32, |part| part.dtype);
        let mut parts = op_parts(first, summands);
        // Conversions before gradients are accumulated are the model's own: one device rounds there too.
        let of_microbatch = self.parts.iter().take_while(|part| part.place != Place::Microbatches);
        parts.extend(of_microbatch.filter(|part| part.place == Place::Rounding));
        parts
    }

    fn with(mut self, place: Place, dtype: DType, summands: u64) -> Chain {
        self.parts.push(Part { place, dtype, summands });
        self
    }
}

/// The parts of an op's sum with a result of type `own`.
fn op_parts(own: DType, summands: u64) -> Vec<Part> {
    let dtype = accumulated_in(own);
    let rounding = Part { place: Place::Rounding, dtype: own, summands: 1 };
    let sum = Part { place: Place::Op, dtype, summands };
    [sum].into_iter().chain((own != dtype).then_some(rounding)).collect()
}

/// A sum that was found, unless another goes on with it.
struct Found {
    sum: Sum,
    goes_on: bool,
}

type Buffer = (u32, BufferId);

/// The search for sums in the programs of a plan.
struct Search<'a> {
    programs: &'a Programs,
    /// The body that writes a buffer, with the written value.
    writers: FxHashMap<Buffer, (usize, ValueId)>,
    sources: FxHashMap<Buffer, Buffer>,
    /// The chains of all values of a body; `None` while they are being found.
    bodies: BTreeMap<(u32, usize), Option<Vec<Chain>>>,
    found: Vec<Found>,
}

/// All sums of floats in the programs of a plan that are added in parts. Equal ones of one kind are counted together.
/// The programs must be well-formed, as those of a proved plan are.
pub fn sums(programs: &Programs) -> Vec<Sum> {
    let mut search = Search {
        programs,
        writers: FxHashMap::default(),
        sources: programs.transfers.iter().map(|t| (t.target, t.source)).collect(),
        bodies: BTreeMap::new(),
        found: Vec::new(),
    };
    for (number, program) in (0u32..).zip(&programs.programs) {
        for (at, body) in program.bodies.iter().enumerate() {
            // A body of microbatches adds to an accumulator before others read it.
            for &(buffer, v) in &body.writes {
                search.writers.entry((number, buffer)).or_insert((at, v));
            }
        }
    }
    for (number, program) in (0u32..).zip(&programs.programs) {
        for at in 0..program.bodies.len() {
            search.body(number, at);
        }
    }
    let mut merged: BTreeMap<(Of, Vec<Part>, Vec<Part>), Sum> = BTreeMap::new();
    for Found { sum, .. } in search.found.into_iter().filter(|found| !found.goes_on) {
        let key = (sum.of, sum.parts.clone(), sum.one_device.clone());
        merged.entry(key).and_modify(|known| known.count += 1).or_insert(sum);
    }
    merged.into_values().collect()
}

impl<'a> Search<'a> {
    fn body_of(&self, number: u32, at: usize) -> &'a Body {
        &self.programs.programs[number as usize].bodies[at]
    }

    /// Finds the chains of a body's values, unless they are known. Bodies that read each other's sums have none.
    fn body(&mut self, number: u32, at: usize) {
        if self.bodies.contains_key(&(number, at)) {
            return;
        }
        self.bodies.insert((number, at), None);
        let body = self.body_of(number, at);
        let added: BTreeMap<ValueId, BufferId> = body.reads.iter().copied().collect();
        let written: BTreeMap<ValueId, BufferId> = body.writes.iter().map(|&(buffer, v)| (v, buffer)).collect();
        let mut chains: Vec<Chain> = Vec::with_capacity(body.graph.len());
        for v in body.graph.values() {
            let chain = match (added.get(&v), written.get(&v)) {
                (Some(&buffer), _) => self.read(number, at, buffer),
                (None, Some(&buffer)) => match self.accumulated(number, body, v, buffer, &chains) {
                    Some(chain) => chain,
                    None => self.value(number, body, v, &chains),
                },
                (None, None) => self.value(number, body, v, &chains),
            };
            chains.push(chain);
        }
        self.bodies.insert((number, at), Some(chains));
    }

    /// The chain of a buffer that a body reads. Only accumulators and partial values go on with a sum.
    fn read(&mut self, number: u32, at: usize, buffer: BufferId) -> Chain {
        let mut place = (number, buffer);
        let mut steps = self.programs.transfers.len();
        while let Some(&source) = self.sources.get(&place).filter(|_| steps > 0) {
            place = source;
            steps -= 1;
        }
        let of = self.programs.programs[place.0 as usize].buffer(place.1);
        let goes_on = matches!(of.kind, BufferKind::Accumulator { .. })
            || matches!(of.kind, BufferKind::Value) && of.sharding.is_partial();
        let Some(&(writer, v)) = self.writers.get(&place).filter(|_| goes_on) else { return Chain::default() };
        if (place.0, writer) == (number, at) {
            return Chain::default();
        }
        self.body(place.0, writer);
        match &self.bodies[&(place.0, writer)] {
            Some(chains) => chains[v.index()].clone(),
            None => Chain::default(),
        }
    }

    /// The chain of a value that a body adds to an accumulator.
    fn accumulated(
        &mut self,
        number: u32,
        body: &Body,
        v: ValueId,
        buffer: BufferId,
        chains: &[Chain],
    ) -> Option<Chain> {
        let node = body.graph.node(v);
        let of_buffer = self.programs.programs[number as usize].buffer(buffer);
        let BufferKind::Accumulator { parameter } = &of_buffer.kind else { return None };
        let &[a, b] = node.operands.as_slice() else { return None };
        let is_sum_so_far = |x: ValueId| body.reads.contains(&(x, buffer));
        let added = match () {
            _ if node.op != Op::Binary(Binary::Add) || !body.phase.is_of_microbatch() => return None,
            _ if is_sum_so_far(a) => b,
            _ if is_sum_so_far(b) => a,
            _ => return None,
        };
        let mut chain = chains[added.index()].clone();
        chain.exact = false;
        chain.of_parameter = parameter != ALL_PARAMETERS;
        if self.programs.num_microbatches > 1 {
            chain = chain.with(Place::Microbatches, node.ty.dtype, u64::from(self.programs.num_microbatches));
        }
        Some(self.note(number, body, of_buffer.name.clone(), chain))
    }

    /// Notes a sum that is complete unless another goes on with it.
    fn note(&mut self, number: u32, body: &Body, name: String, mut chain: Chain) -> Chain {
        if let Some(last) = chain.last {
            self.found[last].goes_on = true;
        }
        let of = match body.phase {
            _ if chain.of_parameter => Of::Gradients,
            Phase::Totals | Phase::Norm | Phase::Update => Of::Totals,
            Phase::Forward => Of::Activations,
            Phase::Backward | Phase::Weights | Phase::Reduce => Of::ActivationGradients,
        };
        let sum = Sum {
            of,
            parts: chain.parts.clone(),
            one_device: chain.one_device(),
            count: 1,
            program: number,
            body: body.name.clone(),
            name,
        };
        chain.last = Some(self.found.len());
        let is_whole = sum.parts.iter().all(|part| matches!(part.place, Place::Op | Place::Rounding));
        self.found.push(Found { sum, goes_on: is_whole });
        chain
    }

    fn value(&mut self, number: u32, body: &Body, v: ValueId, chains: &[Chain]) -> Chain {
        let node = body.graph.node(v);
        if !node.ty.dtype.is_float() {
            return Chain::default();
        }
        let of = |x: &ValueId| chains.get(x.index()).cloned().unwrap_or_default();
        let mesh = &self.programs.programs[number as usize].mesh;
        match &node.op {
            Op::Collective(op) => {
                let chain = of(&node.operands[0]);
                match &op.collective {
                    Collective::AllReduce { axes, reducer: Reducer::Sum }
                    | Collective::ReduceScatter { axes, reducer: Reducer::Sum, .. }
                        if !chain.exact && mesh.product(axes) > 1 =>
                    {
                        let dtype = node.ty.dtype;
                        let chain = chain.with(Place::Devices, dtype, mesh.product(axes));
                        let name = if node.name.is_empty() { v.to_string() } else { format!("{v} ({})", node.name) };
                        self.note(number, body, name, chain)
                    }
                    Collective::KeepFirst { .. } => Chain { exact: true, ..Chain::default() },
                    _ => chain,
                }
            }
            Op::Gather(op) if op.out_of_bounds == OutOfBounds::Zero => Chain { exact: true, ..Chain::default() },
            Op::Convert(_) => {
                let (chain, from) = (of(&node.operands[0]), body.graph.ty(node.operands[0]).dtype);
                match unit(node.ty.dtype) > unit(from) && from.is_float() && !chain.parts.is_empty() {
                    true => chain.with(Place::Rounding, node.ty.dtype, 1),
                    false => chain,
                }
            }
            Op::Reshape(_) | Op::Transpose(_) | Op::BroadcastInDim(_) | Op::Slice(_) | Op::Pad(_) => {
                of(&node.operands[0])
            }
            Op::HostCopy(_) | Op::Reverse(_) | Op::Roll(_) | Op::Unary(Unary::Negate) => of(&node.operands[0]),
            Op::Binary(op @ (Binary::Multiply | Binary::Divide)) => match node.operands.as_slice() {
                [x, c] if is_constant(&body.graph, *c) => of(x),
                [c, x] if is_constant(&body.graph, *c) && *op == Binary::Multiply => of(x),
                _ => Chain::default(),
            },
            Op::Select(_) => longest(node.operands.iter().skip(1).map(of)),
            Op::Binary(Binary::Add | Binary::Subtract) | Op::Concatenate(_) => longest(node.operands.iter().map(of)),
            op => match summands(op, &body.graph.operand_types(v), &node.ty) {
                Some(summands) => Chain { parts: op_parts(node.ty.dtype, summands), ..Chain::default() },
                None => Chain::default(),
            },
        }
    }
}

/// The chain that rounds most. It is exact if all are.
fn longest(chains: impl Iterator<Item = Chain>) -> Chain {
    let mut longest: Option<Chain> = None;
    for chain in chains {
        let rounds_more = |known: &Chain| match known.exact == chain.exact {
            true => probable(&chain.parts) > probable(&known.parts),
            false => known.exact,
        };
        if longest.as_ref().is_none_or(rounds_more) {
            longest = Some(chain);
        }
    }
    longest.unwrap_or_default()
}

/// Returns true for a constant of one number, or a broadcast of it.
fn is_constant(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    match &node.op {
        Op::Constant(literal) => literal.as_splat().is_some(),
        Op::BroadcastInDim(_) | Op::Convert(_) => node.operands.iter().all(|o| is_constant(graph, *o)),
        _ => false,
    }
}

/// The number of summands of each element of an op's result. `None` if the op sums nothing.
fn summands(op: &Op, operands: &[&TensorType], result: &TensorType) -> Option<u64> {
    if op.is_leaf() || op.is_elementwise() || matches!(op, Op::Gather(_) | Op::Constant(_)) {
        return None;
    }
    let sizes: Vec<u64> = op
        .rule(operands, result)
        .factors
        .iter()
        .filter(|factor| factor.kind == FactorKind::Reduction(Reducer::Sum))
        .map(|factor| factor.size)
        .collect();
    (!sizes.is_empty()).then(|| sizes.iter().product())
}

/// The parameters that an update computes in 16 bits or less, without a master copy in single precision: changes below
/// a unit of the parameter are lost. Named once each.
pub fn updated_in_half(programs: &Programs) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for program in &programs.programs {
        for body in program.bodies.iter().filter(|body| body.phase == Phase::Update) {
            for &(buffer, v) in &body.writes {
                let of = program.buffer(buffer);
                if let BufferKind::Parameter { name } = &of.kind
                    && of.ty.dtype.is_half()
                    && is_computed_in_half(&body.graph, v)
                {
                    names.insert(name.clone());
                }
            }
        }
    }
    names
}

/// Returns true if a half-precision value is a result of half-precision arithmetic rather than a rounded wider one.
fn is_computed_in_half(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    match &node.op {
        _ if !node.ty.dtype.is_half() => false,
        Op::Binary(_) | Op::Unary(_) => true,
        op if op.is_leaf() => false,
        _ => node.operands.iter().any(|o| is_computed_in_half(graph, *o)),
    }
}

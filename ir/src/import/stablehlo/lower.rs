//! The meaning of each op as ops of the graph.
//!
//! Attributes are read here and nowhere else. What the graph writes in another way, such as a reduction that starts
//! from a value or a scatter into a tensor, becomes several nodes.

use super::convert::{Converter, ProblemKind, Reject};
use super::literal::{LiteralError, literal, tensor_type};
use super::syntax::{Attribute, Operation};
use crate::dtype::DType;
use crate::graph::ValueId;
use crate::op::{
    Binary, BroadcastInDim, Compare, Concatenate, Convert, Direction, DotGeneral, Gather, GatherDims, Iota, Op,
    OutOfBounds, Pad, Reduce, Reducer, Reshape, ScatterAdd, Select, Slice, Transpose, Unary,
};
use crate::types::TensorType;

pub(super) type Lowered = Result<Vec<ValueId>, Reject>;

impl Converter<'_, '_> {
    /// The results of an op. Calls are not ops here: the walk inlines them.
    pub fn lower(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let name = operation.name;
        match operation.dialect {
            "stablehlo" | "chlo" => {}
            // Hints about where values should live; the planner decides that itself.
            "sdy" if matches!(name, "sharding_constraint" | "reshard" | "propagation_barrier") => {
                return Ok(operands.to_vec());
            }
            _ => return Err(Reject::Unsupported("")),
        }
        if let Some(unary) = Unary::ALL.into_iter().find(|unary| unary.name() == name) {
            let [x] = exactly(operands)?;
            return self.one(Op::Unary(unary), &[x]);
        }
        if let Some(binary) = Binary::ALL.into_iter().find(|binary| binary.name() == name) {
            let [a, b] = exactly(operands)?;
            return self.one(Op::Binary(binary), &[a, b]);
        }
        match name {
            "optimization_barrier" => Ok(operands.to_vec()),
            "constant" => self.constant(operation),
            "iota" => {
                let ty = result_type(operation)?;
                self.one(Op::Iota(Iota { ty, dim: dim(operation, "iota_dimension")? }), operands)
            }
            "square" => {
                let [x] = exactly(operands)?;
                self.one(Op::Binary(Binary::Multiply), &[x, x])
            }
            "compare" => self.compare(operation, operands),
            "select" => self.select(operands),
            "clamp" => self.clamp(operands),
            "convert" => {
                let [x] = exactly(operands)?;
                Ok(vec![self.converted(x, result_type(operation)?.dtype)?])
            }
            "broadcast_in_dim" => {
                let [x] = exactly(operands)?;
                let dims = dims(operation, "broadcast_dimensions")?;
                Ok(vec![self.broadcast(x, result_type(operation)?.shape, dims)?])
            }
            "broadcast" => {
                let [x] = exactly(operands)?;
                let added = dims(operation, "broadcast_sizes")?.len();
                let rank = self.graph.ty(x).rank();
                Ok(vec![self.broadcast(x, result_type(operation)?.shape, (added..added + rank).collect())?])
            }
            "reshape" => {
                let [x] = exactly(operands)?;
                let shape = result_type(operation)?.shape;
                if shape == self.graph.shape(x) {
                    return Ok(vec![x]);
                }
                self.one(Op::Reshape(Reshape { shape }), &[x])
            }
            "transpose" => {
                let [x] = exactly(operands)?;
                let permutation = dims(operation, "permutation")?;
                if permutation.iter().copied().eq(0..self.graph.ty(x).rank()) {
                    return Ok(vec![x]);
                }
                self.one(Op::Transpose(Transpose { permutation }), &[x])
            }
            "slice" => {
                let [x] = exactly(operands)?;
                let start = sizes(operation, "start_indices")?;
                let limit = sizes(operation, "limit_indices")?;
                let stride = match operation.attribute("strides") {
                    Some(_) => sizes(operation, "strides")?,
                    None => vec![1; start.len()],
                };
                self.one(Op::Slice(Slice { start, limit, stride }), &[x])
            }
            "dynamic_slice" => self.dynamic_slice(operation, operands),
            "concatenate" => self.one(Op::Concatenate(Concatenate { dim: dim(operation, "dimension")? }), operands),
            "pad" => {
                let [x, value] = exactly(operands)?;
                let low = ints(operation, "edge_padding_low")?;
                let high = ints(operation, "edge_padding_high")?;
                let interior = sizes(operation, "interior_padding")?;
                self.one(Op::Pad(Pad { low, high, interior }), &[x, value])
            }
            "reduce" => self.reduce(operation, operands),
            "reduce_window" => self.reduce_window(operation, operands),
            "convolution" => self.convolution(operation, operands),
            "dot_general" | "dot" => self.dot(operation, operands),
            "gather" => self.gather(operation, operands),
            "scatter" => self.scatter(operation, operands),
            "custom_call" => self.custom_call(operation, operands),
            _ => Err(Reject::Unsupported("")),
        }
    }

    fn one(&mut self, op: Op, operands: &[ValueId]) -> Lowered {
        Ok(vec![self.push(op, operands)?])
    }

    fn constant(&mut self, operation: &Operation) -> Lowered {
        let dense = match operation.attribute("value") {
            Some(Attribute::Dense(dense)) => dense,
            Some(Attribute::Opaque(_)) => {
                return Err(Reject::Unsupported("whose values are not in the text"));
            }
            _ => return Err(attribute("value")),
        };
        let literal = literal(dense).map_err(|error| match error {
            LiteralError::Unsupported => Reject::Unsupported("of this element type"),
            LiteralError::Count => Reject::Invalid(ProblemKind::LiteralCount),
            LiteralError::Element => Reject::Invalid(ProblemKind::LiteralElement),
        })?;
        self.one(Op::Constant(literal), &[])
    }

    fn compare(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [a, b] = exactly(operands)?;
        let direction = match operation.attribute("comparison_direction").and_then(Attribute::as_word) {
            Some("EQ") => Direction::Eq,
            Some("NE") => Direction::Ne,
            Some("LT") => Direction::Lt,
            Some("LE") => Direction::Le,
            Some("GT") => Direction::Gt,
            Some("GE") => Direction::Ge,
            _ => return Err(attribute("comparison_direction")),
        };
        self.one(Op::Compare(Compare { direction }), &[a, b])
    }

    /// One predicate may choose for all elements.
    fn select(&mut self, operands: &[ValueId]) -> Lowered {
        let [predicate, on_true, on_false] = exactly(operands)?;
        let predicate = self.broadcast_scalar(predicate, on_true)?;
        self.one(Op::Select(Select {}), &[predicate, on_true, on_false])
    }

    /// `clamp(min, x, max)`; the bounds may be scalars.
    fn clamp(&mut self, operands: &[ValueId]) -> Lowered {
        let [low, x, high] = exactly(operands)?;
        let low = self.broadcast_scalar(low, x)?;
        let high = self.broadcast_scalar(high, x)?;
        let above = self.push(Op::Binary(Binary::Maximum), &[x, low])?;
        self.one(Op::Binary(Binary::Minimum), &[above, high])
    }

    /// A scalar in the shape of `like`; anything else as it is.
    fn broadcast_scalar(&mut self, x: ValueId, like: ValueId) -> Result<ValueId, Reject> {
        if self.graph.ty(x).rank() > 0 {
            return Ok(x);
        }
        let shape = self.graph.shape(like).to_vec();
        self.broadcast(x, shape, Vec::new())
    }

    fn broadcast(&mut self, x: ValueId, shape: Vec<u64>, dims: Vec<usize>) -> Result<ValueId, Reject> {
        if self.graph.shape(x) == shape && dims.iter().copied().eq(0..shape.len()) {
            return Ok(x);
        }
        Ok(self.push(Op::BroadcastInDim(BroadcastInDim { shape, dims }), &[x])?)
    }

    pub(super) fn converted(&mut self, x: ValueId, dtype: DType) -> Result<ValueId, Reject> {
        if self.graph.ty(x).dtype == dtype {
            return Ok(x);
        }
        Ok(self.push(Op::Convert(Convert { dtype }), &[x])?)
    }

    /// The value of all elements where it is known: of a constant, or of a constant that was broadcast.
    pub(super) fn splat(&self, mut value: ValueId) -> Option<f64> {
        loop {
            let node = self.graph.node(value);
            match &node.op {
                Op::Constant(literal) => return literal.as_splat(),
                Op::BroadcastInDim(_) | Op::Reshape(_) => value = *node.operands.first()?,
                _ => return None,
            }
        }
    }

    /// A slice whose start is constant; one that is not would need an op of its own.
    fn dynamic_slice(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let lengths = sizes(operation, "slice_sizes")?;
        let Some((&x, starts)) = operands.split_first() else {
            return Err(count(1, 0));
        };
        let shape = self.graph.shape(x).to_vec();
        if starts.len() != shape.len() || lengths.len() != shape.len() {
            return Err(count(shape.len() + 1, operands.len()));
        }
        let (mut start, mut limit) = (Vec::new(), Vec::new());
        for ((&at, &length), &size) in starts.iter().zip(&lengths).zip(&shape) {
            let at = self.splat(at).ok_or(Reject::Unsupported("from a computed position"))?;
            // Starts are moved so that the slice lies inside.
            let at = (at.max(0.0) as u64).min(size.saturating_sub(length));
            start.push(at);
            limit.push(at.saturating_add(length));
        }
        let stride = vec![1; shape.len()];
        self.one(Op::Slice(Slice { start, limit, stride }), &[x])
    }

    fn reduce(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let &[x, init] = operands else {
            return match operands.len() % 2 {
                0 => Err(Reject::Unsupported("of several operands")),
                _ => Err(count(2, operands.len())),
            };
        };
        let dims = dims(operation, "dimensions")?;
        let (ty, init_ty) = (self.graph.ty(x), self.graph.ty(init));
        if init_ty.rank() != 0 || init_ty.dtype != ty.dtype {
            let declared = format!("a scalar of {}", ty.dtype).into();
            return Err(Reject::Invalid(ProblemKind::OperandType { index: 1, declared, actual: init_ty.clone() }));
        }
        let reducer = reducer(operation, ty.dtype)
            .ok_or(Reject::Unsupported("with another function than add, multiply, maximum, minimum, and, or"))?;
        let neutral = reducer.neutral(ty.dtype);
        let reduced = match dims.is_empty() {
            true => x,
            false => self.push(Op::Reduce(Reduce { reducer, dims }), &[x])?,
        };
        if self.splat(init) == Some(neutral) {
            return Ok(vec![reduced]);
        }
        let init = self.broadcast_scalar(init, reduced)?;
        self.one(Op::Binary(reducer.combine()), &[reduced, init])
    }

    /// Element types of operands and result may differ: a product of half precision that is summed in single.
    fn dot(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [mut lhs, mut rhs] = exactly(operands)?;
        let dot = match operation.name {
            "dot" => DotGeneral {
                lhs_batch: Vec::new(),
                rhs_batch: Vec::new(),
                lhs_contract: vec![self.graph.ty(lhs).rank().saturating_sub(1)],
                rhs_contract: vec![0],
            },
            _ => DotGeneral {
                lhs_batch: optional_dims(operation, "lhs_batching_dimensions")?,
                rhs_batch: optional_dims(operation, "rhs_batching_dimensions")?,
                lhs_contract: optional_dims(operation, "lhs_contracting_dimensions")?,
                rhs_contract: optional_dims(operation, "rhs_contracting_dimensions")?,
            },
        };
        let dtype = result_type(operation)?.dtype;
        // The graph's dot has one element type. Converting the operands up keeps every digit of the wider sum.
        if dtype.bytes() >= self.graph.ty(lhs).dtype.bytes().max(self.graph.ty(rhs).dtype.bytes()) {
            lhs = self.converted(lhs, dtype)?;
            rhs = self.converted(rhs, dtype)?;
        }
        let product = self.push(Op::DotGeneral(dot), &[lhs, rhs])?;
        Ok(vec![self.converted(product, dtype)?])
    }

    fn gather(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [x, indices] = exactly(operands)?;
        let dims = GatherDims {
            offset_dims: optional_dims(operation, "offset_dims")?,
            collapsed_slice_dims: optional_dims(operation, "collapsed_slice_dims")?,
            operand_batching_dims: optional_dims(operation, "operand_batching_dims")?,
            indices_batching_dims: optional_dims(operation, "start_indices_batching_dims")?,
            start_index_map: optional_dims(operation, "start_index_map")?,
            index_vector_dim: optional_dim(operation, "index_vector_dim")?,
            slice_sizes: sizes(operation, "slice_sizes")?,
        };
        // StableHLO moves indices to where the slice lies inside; other behaviours are ops around it.
        self.one(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[x, indices])
    }

    /// Addition into a tensor: that tensor plus the scattered updates, or just these where it is zero.
    fn scatter(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let &[x, indices, updates] = operands else {
            return Err(Reject::Unsupported("of several operands"));
        };
        if operation.regions.first().and_then(|region| region.applies()) != Some("add") {
            return Err(Reject::Unsupported("other than addition"));
        }
        let shape = self.graph.shape(x).to_vec();
        let updates_shape = self.graph.shape(updates);
        let mut dims = GatherDims {
            offset_dims: optional_dims(operation, "update_window_dims")?,
            collapsed_slice_dims: optional_dims(operation, "inserted_window_dims")?,
            operand_batching_dims: optional_dims(operation, "input_batching_dims")?,
            indices_batching_dims: optional_dims(operation, "scatter_indices_batching_dims")?,
            start_index_map: optional_dims(operation, "scatter_dims_to_operand_dims")?,
            index_vector_dim: optional_dim(operation, "index_vector_dim")?,
            slice_sizes: Vec::new(),
        };
        // The windows have the sizes of the updates; dimensions without one have windows of a single element.
        let mut windows = dims.offset_dims.iter().map(|&dim| updates_shape.get(dim).copied());
        for dim in 0..shape.len() {
            let single = dims.collapsed_slice_dims.contains(&dim) || dims.operand_batching_dims.contains(&dim);
            let size = if single { Some(1) } else { windows.next().flatten() };
            dims.slice_sizes.push(size.ok_or_else(|| attribute("update_window_dims"))?);
        }
        let sum = self.push(Op::ScatterAdd(ScatterAdd { dims, shape }), &[indices, updates])?;
        if self.splat(x) == Some(0.0) {
            return Ok(vec![sum]);
        }
        self.one(Op::Binary(Binary::Add), &[x, sum])
    }

    fn custom_call(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let target = operation.attribute("call_target_name").and_then(Attribute::as_word);
        let unary = match target {
            Some("Sharding" | "annotate_device_placement") => return Ok(operands.to_vec()),
            Some("mhlo.erf") => Unary::Erf,
            Some("mhlo.tan") => Unary::Tan,
            _ => return Err(Reject::Unsupported("to another target than @Sharding")),
        };
        let [x] = exactly(operands)?;
        self.one(Op::Unary(unary), &[x])
    }
}

pub(super) fn exactly<const N: usize>(operands: &[ValueId]) -> Result<[ValueId; N], Reject> {
    operands.try_into().map_err(|_| count(N, operands.len()))
}

/// The standard reduction that an op names or whose region it has.
pub(super) fn reducer(operation: &Operation, dtype: DType) -> Option<Reducer> {
    let applied = operation.attribute("applies").and_then(Attribute::as_word);
    let applied = applied.or_else(|| operation.regions.first()?.applies());
    let boolean = dtype == DType::Bool;
    match applied? {
        "add" if boolean => Some(Reducer::Or),
        "multiply" if boolean => Some(Reducer::And),
        "add" => Some(Reducer::Sum),
        "multiply" => Some(Reducer::Product),
        "maximum" => Some(Reducer::Max),
        "minimum" => Some(Reducer::Min),
        "and" => Some(Reducer::And),
        "or" => Some(Reducer::Or),
        _ => None,
    }
}

fn count(expected: usize, found: usize) -> Reject {
    Reject::Invalid(ProblemKind::OperandCount { expected, found })
}

pub(super) fn attribute(name: &'static str) -> Reject {
    Reject::Invalid(ProblemKind::Attribute { name })
}

/// The type of the only result, for ops that do not follow from their operands.
pub(super) fn result_type(operation: &Operation) -> Result<TensorType, Reject> {
    match operation.result_types.as_slice() {
        [ty] => tensor_type(ty).ok_or(Reject::Unsupported("with a result of this type")),
        types => Err(Reject::Invalid(ProblemKind::ResultCount { expected: 1, found: types.len() })),
    }
}

pub(super) fn ints(operation: &Operation, name: &'static str) -> Result<Vec<i64>, Reject> {
    operation.attribute(name).and_then(Attribute::ints).ok_or_else(|| attribute(name))
}

pub(super) fn sizes(operation: &Operation, name: &'static str) -> Result<Vec<u64>, Reject> {
    let sizes: Result<Vec<u64>, _> = ints(operation, name)?.into_iter().map(u64::try_from).collect();
    sizes.map_err(|_| attribute(name))
}

fn dims(operation: &Operation, name: &'static str) -> Result<Vec<usize>, Reject> {
    let dims: Result<Vec<usize>, _> = ints(operation, name)?.into_iter().map(usize::try_from).collect();
    dims.map_err(|_| attribute(name))
}

fn dim(operation: &Operation, name: &'static str) -> Result<usize, Reject> {
    match dims(operation, name)?.as_slice() {
        [dim] => Ok(*dim),
        _ => Err(attribute(name)),
    }
}

/// Printers leave out dimension numbers that are empty or zero.
pub(super) fn optional_dims(operation: &Operation, name: &'static str) -> Result<Vec<usize>, Reject> {
    match operation.attribute(name) {
        Some(_) => dims(operation, name),
        None => Ok(Vec::new()),
    }
}

pub(super) fn optional_dim(operation: &Operation, name: &'static str) -> Result<usize, Reject> {
    match operation.attribute(name) {
        Some(_) => dim(operation, name),
        None => Ok(0),
    }
}

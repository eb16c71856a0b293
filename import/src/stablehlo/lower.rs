//! Lowers each op to ops of the graph.
//!
//! Attributes are read here and nowhere else. An op without a direct counterpart, such as a reduction from an
//! initial value or a scatter into a tensor, becomes several nodes.

use super::convert::{Converter, Scope};
use super::literal::{LiteralError, element_type, literal, tensor_type};
use super::report::{ProblemKind, Reject};
use super::syntax::{Attribute, Operation, Type};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{
    Binary, BitcastConvert, BroadcastInDim, Compare, Concatenate, Convert, Direction, Iota, Op, Operator, Pad,
    ReducePrecision, Reshape, Reverse, Select, Slice, Transpose, Unary,
};
use altiplano_ir::types::TensorType;

pub(super) type Lowered = Result<Vec<ValueId>, Reject>;

impl<'t, 'a> Converter<'t, 'a> {
    /// The results of an op. Calls do not come here: the walk inlines them.
    pub fn lower(&mut self, operation: &'t Operation<'a>, operands: &[ValueId], scope: &Scope<'_, 't>) -> Lowered {
        match operation.dialect {
            "stablehlo" | "chlo" => {}
            "sdy" => return self.sharding(operation, operands, scope),
            _ => return Err(Reject::Unsupported("")),
        }
        if super::complex::concerns(operation) {
            return self.complex_op(operation, operands, scope);
        }
        self.lower_op(operation, operands, scope)
    }

    /// [`Self::lower`] for a StableHLO op on real numbers.
    pub(crate) fn lower_op(
        &mut self,
        operation: &'t Operation<'a>,
        operands: &[ValueId],
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let name = operation.name;
        if let Some(unary) = Unary::ALL.into_iter().find(|unary| unary.name() == name) {
            let [x] = exactly(operands)?;
            return self.one(Op::Unary(unary), &[x]);
        }
        if let Some(binary) = Binary::ALL.into_iter().find(|binary| binary.name() == name) {
            let [a, b] = exactly(operands)?;
            if binary == Binary::Multiply
                && let Some(kept) = self.product_with_mask(a, b)?
            {
                return Ok(vec![kept]);
            }
            return self.one(Op::Binary(binary), &[a, b]);
        }
        match name {
            "optimization_barrier" => Ok(operands.to_vec()),
            "while" => self.while_loop(operation, operands, scope),
            "case" | "if" => self.branch(operation, operands, scope),
            "tuple" => {
                let tuple = self.opaque(operands);
                self.tuples.insert(tuple, operands.to_vec());
                Ok(vec![tuple])
            }
            "get_tuple_element" => {
                let [tuple] = exactly(operands)?;
                let index = dim(operation, "index")?;
                let element = self.tuples.get(&tuple).and_then(|elements| elements.get(index));
                element.map(|element| vec![*element]).ok_or_else(|| attribute("index"))
            }
            // These ops order effects, which a graph does not have.
            "after_all" | "create_token" => Ok(vec![self.opaque(&[])]),
            "constant" if operation.dialect == "stablehlo" => self.constant(operation),
            "iota" | "dynamic_iota" => {
                let mut ty = result_type(operation);
                if let (true, [shape]) = (name == "dynamic_iota", operands) {
                    let shape = self.known_shape(*shape)?;
                    ty = Ok(TensorType::new(result_dtype(operation)?, shape));
                }
                let ty = ty?;
                let operands = &[];
                self.one(Op::Iota(Iota { ty, dim: dim(operation, "iota_dimension")? }), operands)
            }
            "compare" => self.compare(operation, operands),
            "select" => self.select(operands),
            "clamp" => self.clamp(operands),
            "convert" => {
                let [x] = exactly(operands)?;
                Ok(vec![self.converted(x, result_dtype(operation)?)?])
            }
            "reduce_precision" => {
                let [x] = exactly(operands)?;
                let (exponent_bits, mantissa_bits) = precision(operation)?;
                self.one(Op::ReducePrecision(ReducePrecision { exponent_bits, mantissa_bits }), &[x])
            }
            "bitcast_convert" => {
                let [x] = exactly(operands)?;
                self.one(Op::BitcastConvert(BitcastConvert { dtype: result_dtype(operation)? }), &[x])
            }
            "dynamic_broadcast_in_dim" => {
                let [x, shape] = exactly(operands)?;
                let (dims, shape) = (dims(operation, "broadcast_dimensions")?, self.known_shape(shape)?);
                Ok(vec![self.broadcast(x, shape, dims)?])
            }
            "dynamic_reshape" => {
                let [x, shape] = exactly(operands)?;
                let shape = self.known_shape(shape)?;
                Ok(vec![self.reshaped(x, shape)?])
            }
            "get_dimension_size" => {
                let [x] = exactly(operands)?;
                let size =
                    *self.graph.shape(x).get(dim(operation, "dimension")?).ok_or_else(|| attribute("dimension"))?;
                let ty = TensorType::scalar(result_dtype(operation)?);
                self.one(Op::Constant(Literal::splat(ty, size as f64)), &[])
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
                Ok(vec![self.reshaped(x, result_type(operation)?.shape)?])
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
                self.slice(x, start, limit, stride)
            }
            "real_dynamic_slice" => {
                let [x, start, limit, stride] = exactly(operands)?;
                let (start, limit) = (self.known_shape(start)?, self.known_shape(limit)?);
                let stride = self.known_shape(stride)?;
                self.slice(x, start, limit, stride)
            }
            "dynamic_slice" => self.dynamic_slice(operation, operands),
            "dynamic_update_slice" => self.dynamic_update_slice(operands),
            "concatenate" => self.one(Op::Concatenate(Concatenate { dim: dim(operation, "dimension")? }), operands),
            "pad" => {
                let [x, value] = exactly(operands)?;
                let low = ints(operation, "edge_padding_low")?;
                let high = ints(operation, "edge_padding_high")?;
                let interior = sizes(operation, "interior_padding")?;
                self.one(Op::Pad(Pad { low, high, interior }), &[x, value])
            }
            "dynamic_pad" => {
                let [x, value, low, high, interior] = exactly(operands)?;
                let known = |ints: Option<Vec<i64>>| ints.ok_or(COMPUTED_SHAPE);
                let (low, high) = (known(self.known_ints(low))?, known(self.known_ints(high))?);
                let interior = self.known_shape(interior)?;
                self.one(Op::Pad(Pad { low, high, interior }), &[x, value])
            }
            "reverse" => {
                let [x] = exactly(operands)?;
                self.one(Op::Reverse(Reverse { dims: dims(operation, "dimensions")? }), &[x])
            }
            "reduce" => self.reduce(operation, operands, scope),
            "reduce_window" => self.reduce_window(operation, operands, scope),
            "select_and_scatter" => self.select_and_scatter(operation, operands),
            "dot_general" | "dot" => self.dot(operation, operands),
            "convolution" => self.convolution(operation, operands),
            "gather" | "dynamic_gather" => self.gather(operation, operands),
            "scatter" => self.scatter(operation, operands),
            "sort" => self.sort(operation, operands, scope),
            "top_k" => self.top_k(operation, operands),
            "ragged_dot" | "ragged_dot_general" => self.ragged_dot(operation, operands),
            "rng_bit_generator" => self.random_bits(operation, operands),
            "rng" => Err(Reject::Unsupported("whose numbers follow from no key; use jax.random")),
            "custom_call" => self.custom_call(operation, operands),
            // The parts of a real number are the number itself and zero.
            "real" | "conj" => Ok(vec![exactly::<1>(operands)?[0]]),
            "imag" => {
                let [x] = exactly(operands)?;
                Ok(vec![self.arrays(|g| altiplano_ir::array::full_like(g, x, 0.0))?])
            }
            "cholesky" => {
                let [x] = exactly(operands)?;
                let lower = operation.attribute("lower") != Some(&Attribute::Bool(false));
                Ok(vec![self.cholesky(x, lower)?])
            }
            "triangular_solve" => self.triangular_solve(operation, operands),
            "uniform_quantize" | "uniform_dequantize" => Err(QUANTIZED),
            "all_gather"
            | "all_reduce"
            | "all_to_all"
            | "collective_broadcast"
            | "collective_permute"
            | "reduce_scatter"
            | "partition_id"
            | "replica_id" => self.collective(operation, operands),
            "infeed" | "outfeed" | "send" | "recv" => {
                Err(Reject::Unsupported("programs of one device are planned, this is one of several"))
            }
            _ => self.function(operation, operands),
        }
    }

    pub fn one(&mut self, op: Op, operands: &[ValueId]) -> Lowered {
        Ok(vec![self.push(op, operands)?])
    }

    pub fn unary(&mut self, op: Unary, x: ValueId) -> Result<ValueId, Reject> {
        Ok(self.push(Op::Unary(op), &[x])?)
    }

    pub fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> Result<ValueId, Reject> {
        Ok(self.push(Op::Binary(op), &[a, b])?)
    }

    /// Reshapes a value, unless it already has this shape.
    pub fn reshaped(&mut self, x: ValueId, shape: Vec<u64>) -> Result<ValueId, Reject> {
        if self.graph.shape(x) == shape {
            return Ok(x);
        }
        Ok(self.push(Op::Reshape(Reshape { shape }), &[x])?)
    }

    fn slice(&mut self, x: ValueId, start: Vec<u64>, limit: Vec<u64>, stride: Vec<u64>) -> Lowered {
        let op = Slice { start: start.clone(), limit: limit.clone(), stride: stride.clone() };
        op.infer(&[self.graph.ty(x)])?;
        match stride.iter().all(|stride| *stride == 1) {
            true => Ok(vec![self.sliced(x, start, limit)?]),
            false => self.one(Op::Slice(op), &[x]),
        }
    }

    /// A shape given as a tensor. Its elements must follow from constants.
    fn known_shape(&mut self, shape: ValueId) -> Result<Vec<u64>, Reject> {
        let sizes = self.known_ints(shape).ok_or(COMPUTED_SHAPE)?;
        sizes.into_iter().map(|size| u64::try_from(size).map_err(|_| COMPUTED_SHAPE)).collect()
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

    pub fn compare(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [mut a, mut b] = exactly(operands)?;
        let direction = match operation.attribute("comparison_direction").and_then(Attribute::as_word) {
            Some("EQ") => Direction::Eq,
            Some("NE") => Direction::Ne,
            Some("LT") => Direction::Lt,
            Some("LE") => Direction::Le,
            Some("GT") => Direction::Gt,
            Some("GE") => Direction::Ge,
            _ => return Err(attribute("comparison_direction")),
        };
        let order = operation.attribute("compare_type").and_then(Attribute::as_word);
        if order == Some("TOTALORDER") && self.graph.ty(a).dtype.is_float() {
            (a, b) = (self.total_order(a)?, self.total_order(b)?);
        }
        self.one(Op::Compare(Compare { direction }), &[a, b])
    }

    /// Maps floats to integers in the total order: their bits, with those of negative numbers counted in
    /// reverse.
    fn total_order(&mut self, x: ValueId) -> Result<ValueId, Reject> {
        let ty = self.graph.ty(x).clone();
        let (bits, most) = match ty.dtype.bytes() {
            8 => (DType::I64, i64::MAX as f64),
            4 => (DType::I32, f64::from(i32::MAX)),
            2 => (DType::I16, f64::from(i16::MAX)),
            _ => (DType::I8, f64::from(i8::MAX)),
        };
        let word = self.cast(x, bits)?;
        let ty = ty.with_dtype(bits);
        let zero = self.push(Op::Constant(Literal::splat(ty.clone(), 0.0)), &[])?;
        let most = self.push(Op::Constant(Literal::splat(ty, most)), &[])?;
        let mirrored = self.binary(Binary::Xor, word, most)?;
        let negative = self.push(Op::Compare(Compare { direction: Direction::Lt }), &[word, zero])?;
        Ok(self.push(Op::Select(Select {}), &[negative, mirrored, word])?)
    }

    /// Lowers `select`. A scalar predicate applies to all elements.
    fn select(&mut self, operands: &[ValueId]) -> Lowered {
        let [predicate, on_true, on_false] = exactly(operands)?;
        let predicate = self.broadcast_scalar(predicate, on_true)?;
        if let Some(kept) = self.masked([predicate, on_true, on_false])? {
            return Ok(vec![kept]);
        }
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

    /// Broadcasts a scalar to the shape of `like`. Other values are returned unchanged.
    pub fn broadcast_scalar(&mut self, x: ValueId, like: ValueId) -> Result<ValueId, Reject> {
        if self.graph.ty(x).rank() > 0 {
            return Ok(x);
        }
        let shape = self.graph.shape(like).to_vec();
        self.broadcast(x, shape, Vec::new())
    }

    pub fn broadcast(&mut self, x: ValueId, shape: Vec<u64>, dims: Vec<usize>) -> Result<ValueId, Reject> {
        if self.graph.shape(x) == shape && dims.iter().copied().eq(0..shape.len()) {
            return Ok(x);
        }
        Ok(self.push(Op::BroadcastInDim(BroadcastInDim { shape, dims }), &[x])?)
    }

    pub fn converted(&mut self, x: ValueId, dtype: DType) -> Result<ValueId, Reject> {
        if self.graph.ty(x).dtype == dtype {
            return Ok(x);
        }
        Ok(self.push(Op::Convert(Convert { dtype }), &[x])?)
    }

    fn custom_call(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let target = operation.attribute("call_target_name").and_then(Attribute::as_word).unwrap_or_default();
        match target {
            "tpu_custom_call" => self.flash_attention(operation, operands),
            name if name.starts_with("__cudnn$fmha") => self.cudnn_attention(operation, operands),
            "lapack_spotrf_ffi" | "lapack_dpotrf_ffi" => self.lapack_cholesky(operation, operands),
            "lapack_strsm_ffi" | "lapack_dtrsm_ffi" => self.lapack_solve(operation, operands),
            // Sizes are fixed by now, so asserted conditions are known or implied.
            "shape_assertion" => Ok(Vec::new()),
            "Sharding" => self.sharding_call(operation, operands),
            "SPMDFullToShardShape" => self.full_to_shard(operation, operands),
            "SPMDShardToFullShape" => self.shard_to_full(operation, operands),
            "annotate_device_placement" => Ok(operands.to_vec()),
            // Names of the random bit generator on devices that have a kernel for it.
            "cu_threefry2x32" | "cu_threefry2x32_ffi" | "hip_threefry2x32" | "hip_threefry2x32_ffi" => {
                self.threefry(operands)
            }
            "mhlo.topk" => self.top_k(operation, operands),
            _ => match target.strip_prefix("mhlo.") {
                Some(name) => self.function_named(name, operands),
                None => Err(Reject::Unsupported("")),
            },
        }
    }
}

const QUANTIZED: Reject = Reject::Unsupported("quantized numbers");
const COMPUTED_SHAPE: Reject = Reject::Unsupported("with a shape that is computed");

pub(super) fn exactly<const N: usize>(operands: &[ValueId]) -> Result<[ValueId; N], Reject> {
    operands.try_into().map_err(|_| count(N, operands.len()))
}

pub(super) fn count(expected: usize, found: usize) -> Reject {
    Reject::Invalid(ProblemKind::OperandCount { expected, found })
}

pub(super) fn attribute(name: &'static str) -> Reject {
    Reject::Invalid(ProblemKind::Attribute { name })
}

/// The type of the only result, for ops whose operands do not determine it.
pub(super) fn result_type(operation: &Operation) -> Result<TensorType, Reject> {
    match operation.result_types.as_slice() {
        [ty] => tensor_type(ty).ok_or_else(|| no_type(ty)),
        types => Err(Reject::Invalid(ProblemKind::ResultCount { expected: 1, found: types.len() })),
    }
}

fn no_type(ty: &Type) -> Reject {
    match ty {
        Type::Tensor(ty) if ty.element.starts_with("!quant") => QUANTIZED,
        _ => Reject::Unsupported("with a result of this type"),
    }
}

pub(super) fn ints(operation: &Operation, name: &'static str) -> Result<Vec<i64>, Reject> {
    operation.attribute(name).and_then(Attribute::ints).ok_or_else(|| attribute(name))
}

pub(super) fn sizes(operation: &Operation, name: &'static str) -> Result<Vec<u64>, Reject> {
    let sizes: Result<Vec<u64>, _> = ints(operation, name)?.into_iter().map(u64::try_from).collect();
    sizes.map_err(|_| attribute(name))
}

pub(super) fn dims(operation: &Operation, name: &'static str) -> Result<Vec<usize>, Reject> {
    let dims: Result<Vec<usize>, _> = ints(operation, name)?.into_iter().map(usize::try_from).collect();
    dims.map_err(|_| attribute(name))
}

pub(super) fn dim(operation: &Operation, name: &'static str) -> Result<usize, Reject> {
    match dims(operation, name)?.as_slice() {
        [dim] => Ok(*dim),
        _ => Err(attribute(name)),
    }
}

/// Dimension numbers, which printers omit if they are empty or zero.
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

/// The element type of the only result, which is known even if its sizes are not.
pub(super) fn result_dtype(operation: &Operation) -> Result<DType, Reject> {
    match operation.result_types.as_slice() {
        [ty] => element_type(ty).ok_or_else(|| no_type(ty)),
        types => Err(Reject::Invalid(ProblemKind::ResultCount { expected: 1, found: types.len() })),
    }
}

/// Bits of the exponent and of the mantissa, from two attributes or from `format = e5m2`.
fn precision(operation: &Operation) -> Result<(u32, u32), Reject> {
    let bits = |name: &'static str| -> Result<u32, Reject> {
        u32::try_from(dim(operation, name)?).map_err(|_| attribute(name))
    };
    match operation.attribute("format").and_then(Attribute::as_word) {
        None => Ok((bits("exponent_bits")?, bits("mantissa_bits")?)),
        Some(format) => {
            let parts = format.strip_prefix('e').and_then(|rest| rest.split_once('m'));
            let parts = parts.and_then(|(e, m)| Some((e.parse().ok()?, m.parse().ok()?)));
            parts.ok_or_else(|| attribute("format"))
        }
    }
}

/// True if each element of the op's result depends only on the operands' elements at the same index.
pub(super) fn is_elementwise(operation: &Operation) -> bool {
    let name = operation.name;
    let structural = ["constant", "top_k", "ragged_dot", "constant_like"];
    match operation.dialect {
        "chlo" => !structural.contains(&name) && !name.starts_with("broadcast_"),
        "stablehlo" => {
            matches!(name, "compare" | "select" | "clamp" | "convert" | "reduce_precision" | "bitcast_convert")
                || Unary::ALL.iter().any(|unary| unary.name() == name)
                || Binary::ALL.iter().any(|binary| binary.name() == name)
        }
        _ => false,
    }
}

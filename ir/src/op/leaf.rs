//! Values from outside the graph (parameters, inputs), and values without operands (constants, iota).

use super::*;
use crate::literal::Values;
use crate::rule::FactorKind;

/// A weight, a leaf. Its value is state of the training run.
///
/// A frozen parameter has no gradient and no optimizer state, and no step changes it. It is stored, sharded, gathered,
/// loaded and saved like a trained one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameter {
    pub name: String,
    pub ty: TensorType,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// True if weight decay excludes the parameter, as is usual for biases and gains.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_decay: bool,
}

impl Parameter {
    /// A trained parameter.
    pub fn new(name: impl Into<String>, ty: TensorType) -> Parameter {
        Parameter { name: name.into(), ty, frozen: false, no_decay: false }
    }
}

/// A leaf that gets a new tensor each step, usually with a batch dimension.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Input {
    pub name: String,
    pub ty: TensorType,
}

/// Counts along one dimension: element `[i0, .., ik]` is `i_dim`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Iota {
    pub ty: TensorType,
    pub dim: usize,
}

/// The rule of a leaf: each dimension is a parallel factor.
fn leaf_rule(ty: &TensorType) -> ShardingRule {
    ShardingRule::elementwise(&ty.shape, 0, Vec::new())
}

impl Operator for Parameter {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 0)?;
        Ok(self.ty.clone())
    }
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        leaf_rule(result)
    }
    fn resized(&self, _: &[&[u64]], result: &[u64]) -> Op {
        Op::Parameter(Parameter { ty: self.ty.with_shape(result), ..self.clone() })
    }
    fn gradient(&self, _: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        Vec::new()
    }
    /// Zeros, as a placeholder. A leaf has no value of its own, and the interpreter supplies it.
    fn eval(&self, _: &[&Tensor], result: &TensorType) -> Tensor {
        Tensor::splat(result.clone(), 0.0)
    }
    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

impl Operator for Input {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 0)?;
        Ok(self.ty.clone())
    }
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        leaf_rule(result)
    }
    fn resized(&self, _: &[&[u64]], result: &[u64]) -> Op {
        Op::Input(Input { name: self.name.clone(), ty: self.ty.with_shape(result) })
    }
    fn gradient(&self, _: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        Vec::new()
    }
    fn eval(&self, _: &[&Tensor], result: &TensorType) -> Tensor {
        Tensor::splat(result.clone(), 0.0)
    }
    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

impl Operator for Literal {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 0)?;
        match &self.values {
            Values::Dense(v) if v.len() as u64 != self.ty.elements() => Err(ShapeError::SizesDiffer {
                what: "number of values",
                left: v.len() as u64,
                right: self.ty.elements(),
            }),
            _ => Ok(self.ty.clone()),
        }
    }
    /// A splat can be made in any layout. Other literals are made whole and sliced.
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        let mut rule = leaf_rule(result);
        if self.as_splat().is_none() {
            rule.factors.iter_mut().for_each(|f| f.kind = FactorKind::Whole);
        }
        rule
    }
    /// Resizes a splat only. A dense literal keeps its size, and its type then says so.
    fn resized(&self, _: &[&[u64]], result: &[u64]) -> Op {
        match self.values {
            Values::Splat(_) => Op::Constant(Literal { ty: self.ty.with_shape(result), ..self.clone() }),
            Values::Dense(_) => Op::Constant(self.clone()),
        }
    }
    fn gradient(&self, _: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        Vec::new()
    }
    fn eval(&self, _: &[&Tensor], _: &TensorType) -> Tensor {
        self.to_tensor()
    }
    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

impl Operator for Iota {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 0)?;
        expect_dims(&[self.dim], self.ty.rank())?;
        if self.ty.dtype == DType::Bool {
            return Err(ShapeError::DType { dtype: self.ty.dtype });
        }
        Ok(self.ty.clone())
    }
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        ShardingRule { contiguous: vec![self.dim as u8], ..leaf_rule(result) }
    }
    fn resized(&self, _: &[&[u64]], result: &[u64]) -> Op {
        Op::Iota(Iota { ty: self.ty.with_shape(result), dim: self.dim })
    }
    /// A device counts from its own offset along the axes that split the counted dimension.
    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let shape = cx.result_shape.clone();
        let count = cx.graph.emit(self.resized(&[], &shape), &[]);
        let axes = cx.factor_axes[self.dim].clone();
        if axes.is_empty() {
            return count;
        }
        let offset = cx.shard_offset(&axes, shape[self.dim], self.ty.dtype);
        let offset = cx.graph.broadcast_scalar(offset, &shape);
        cx.graph.emit(Op::Binary(Binary::Add), &[count, offset])
    }
    fn gradient(&self, _: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        Vec::new()
    }
    fn eval(&self, _: &[&Tensor], result: &TensorType) -> Tensor {
        Tensor::from_fn(result.clone(), |index| self.ty.dtype.wrap(index[self.dim] as f64))
    }
    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

impl Local<'_> {
    /// A scalar: this device's first global index along a dimension that is split over `axes` into blocks of
    /// `local_size`.
    pub(crate) fn shard_offset(&mut self, axes: &[AxisId], local_size: u64, dtype: DType) -> ValueId {
        let index = AxisIndex { axes: axes.to_vec(), mesh: self.mesh.clone(), dtype };
        let index = self.graph.emit(Op::AxisIndex(index), &[]);
        let size = self.graph.constant(Literal::splat(TensorType::scalar(dtype), local_size as f64));
        self.graph.emit(Op::Binary(Binary::Multiply), &[index, size])
    }
}

//! Ops of local graphs: collectives, copies between device and host memory, and a device's position on the mesh.
//!
//! They occur only in the programs that lowering writes, where every device of a mesh runs the same graph. The
//! reference interpreter runs all devices of a mesh together (see [`crate::interpret`]).

use super::*;

/// A [`Collective`] among the devices of `mesh`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CollectiveOp {
    pub collective: Collective,
    pub mesh: Mesh,
}

/// A scalar: this device's position along `axes` of `mesh`, major first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AxisIndex {
    pub axes: Vec<AxisId>,
    pub mesh: Mesh,
    pub dtype: DType,
}

/// The direction of a copy between device and host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostRoute {
    /// To the device. The operand is a leaf in host memory.
    Load,
    /// To the host. The result is in host memory, and only buffers there take it.
    Store,
}

/// Copies a tensor to the other memory. The optional second operand is not read. It is a value that must exist before
/// the copy begins, which limits the memory that a device holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostCopy {
    pub route: HostRoute,
}

/// Checks that axes are distinct axes of the mesh, and that the mesh has a valid number of devices.
fn expect_axes(axes: &[AxisId], mesh: &Mesh) -> Result<(), ShapeError> {
    let dims: Vec<usize> = axes.iter().map(|a| a.0 as usize).collect();
    expect_dims(&dims, mesh.axes.len())?;
    let devices = mesh.axes.iter().try_fold(1u32, |n, axis| n.checked_mul(axis.size));
    match devices {
        None | Some(0) => Err(ShapeError::Attribute("the mesh must have between 1 and 2^32 devices")),
        Some(_) => Ok(()),
    }
}

impl Operator for CollectiveOp {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        expect_axes(self.collective.axes(), &self.mesh)?;
        let shape = &operands[0].shape;
        let n = self.mesh.product(self.collective.axes());
        let divides = |dim: u8, outer: u64, parts: u64| match shape.get(dim as usize) {
            None => Err(ShapeError::DimOutOfRange { dim: dim as u64, rank: shape.len() }),
            Some(&d) => {
                let blocks = outer.saturating_mul(parts);
                if blocks > 0 && d % blocks == 0 {
                    return Ok(());
                }
                Err(ShapeError::SizesDiffer { what: "blocks of a collective", left: d, right: blocks })
            }
        };
        match &self.collective {
            Collective::AllReduce { .. } | Collective::KeepFirst { .. } | Collective::Shift { .. } => {}
            Collective::AllGather { dim, outer, .. } => divides(*dim, *outer, 1)?,
            Collective::Halo { dim, .. } => divides(*dim, 1, 1)?,
            Collective::ReduceScatter { dim, outer, .. } | Collective::LocalSlice { dim, outer, .. } => {
                divides(*dim, *outer, n)?;
            }
            Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } => {
                divides(*split_dim, *split_outer, n)?;
                divides(*concat_dim, *concat_outer, 1)?;
            }
        }
        Ok(operands[0].with_shape(self.collective.result_shape(shape, &self.mesh)))
    }
    fn rule(&self, _: &[&TensorType], _: &TensorType) -> ShardingRule {
        ShardingRule::default()
    }
    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Collective(self.clone())
    }
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        vec![None; cx.operands.len()]
    }
    /// The operand, since a device on its own sees nothing else. [`crate::interpret::run_mesh`] implements the real
    /// semantics.
    fn eval(&self, operands: &[&Tensor], _: &TensorType) -> Tensor {
        operands[0].clone()
    }
    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

impl Operator for HostCopy {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        match operands {
            [ty] | [ty, _] => Ok((*ty).clone()),
            _ => Err(ShapeError::OperandCount { expected: 1, found: operands.len() }),
        }
    }
    fn rule(&self, _: &[&TensorType], _: &TensorType) -> ShardingRule {
        ShardingRule::default()
    }
    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::HostCopy(self.clone())
    }
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        (0..cx.operands.len()).map(|i| (i == 0 && cx.wanted[i]).then_some(cx.cotangent)).collect()
    }
    fn eval(&self, operands: &[&Tensor], _: &TensorType) -> Tensor {
        operands[0].clone()
    }
    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

impl Operator for AxisIndex {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 0)?;
        expect_axes(&self.axes, &self.mesh)?;
        Ok(TensorType::scalar(self.dtype))
    }
    fn rule(&self, _: &[&TensorType], _: &TensorType) -> ShardingRule {
        ShardingRule::default()
    }
    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::AxisIndex(self.clone())
    }
    fn gradient(&self, _: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        Vec::new()
    }
    /// Position 0. [`crate::interpret::run_mesh`] gives each device its own position.
    fn eval(&self, _: &[&Tensor], result: &TensorType) -> Tensor {
        Tensor::splat(result.clone(), 0.0)
    }
    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

//! Changes the floating-point precision of a model before it is planned (`--precision`).

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node};
use altiplano_ir::literal::{Literal, Real, Values};
use altiplano_ir::op::{Convert, Input, Iota, Op, Operator, Parameter, ShapeError};
use altiplano_ir::simplify::rounded;
use altiplano_ir::types::TensorType;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Replaces every float type of the parameters by `precision`. Other types stay: a mixed-precision trace computes parts
/// in f32 on purpose.
///
/// Finite constants stay finite, so that a mask of -1e9 does not become an infinity whose difference is NaN.
pub(crate) fn with_precision(graph: &Graph, precision: DType) -> Result<Graph, ShapeError> {
    let replaced: BTreeSet<DType> = graph.parameters().map(|(v, _)| graph.ty(v).dtype).collect();
    let dtype = |old: DType| if old.is_float() && replaced.contains(&old) { precision } else { old };
    let retype = |ty: &TensorType| ty.with_dtype(dtype(ty.dtype));
    let mut to = Graph { nodes: Vec::with_capacity(graph.len()), ..graph.clone() };
    for v in graph.values() {
        let node = graph.node(v);
        let op = match &node.op {
            Op::Parameter(p) => Op::Parameter(Parameter { ty: retype(&p.ty), ..p.clone() }),
            Op::Input(i) => Op::Input(Input { name: i.name.clone(), ty: retype(&i.ty) }),
            Op::Iota(i) => Op::Iota(Iota { ty: retype(&i.ty), dim: i.dim }),
            Op::Convert(c) => Op::Convert(Convert { dtype: dtype(c.dtype) }),
            Op::Constant(l) => Op::Constant(literal(l, dtype(l.ty.dtype))),
            op => op.clone(),
        };
        let types: Vec<&TensorType> = node.operands.iter().map(|&o| to.ty(o)).collect();
        let ty = op.infer(&types)?;
        to.append(Node { op, ty, ..node.clone() });
    }
    Ok(to)
}

fn literal(from: &Literal, dtype: DType) -> Literal {
    let convert = |x: &Real| {
        let near = rounded(x.0, from.ty.dtype, dtype);
        let finite = if x.0.is_finite() && near.is_infinite() { largest(dtype).copysign(x.0) } else { near };
        Real(if from.ty.dtype == dtype { x.0 } else { finite })
    };
    let values = match &from.values {
        Values::Splat(x) => Values::Splat(convert(x)),
        Values::Dense(all) => Values::Dense(Arc::new(all.iter().map(convert).collect())),
    };
    Literal { ty: from.ty.with_dtype(dtype), values, batch_power: from.batch_power }
}

/// The largest finite value of a float type.
fn largest(dtype: DType) -> f64 {
    dtype.float_format().map_or(f64::MAX, |format| format.greatest())
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::op::Binary;

    #[test]
    fn constants_and_conversions_follow_the_parameters() {
        let mut graph = Graph::new("test");
        let ty = TensorType::new(DType::F32, [2]);
        let weights = graph.emit(Op::Parameter(Parameter::new("w", ty.clone())), &[]);
        let ids = graph.emit(Op::Input(Input { name: "ids".into(), ty: ty.with_dtype(DType::I32) }), &[]);
        let mask = graph.constant(Literal::splat(ty, -1e9));
        let ids = graph.convert(ids, DType::F32);
        let sum = graph.add(weights, mask);
        let sum = graph.add(sum, ids);
        let wide = graph.convert(sum, DType::F64);
        graph.outputs = vec![wide];

        let half = with_precision(&graph, DType::F16).unwrap();
        assert_eq!(half.verify(), []);
        assert_eq!(half.ty(weights).dtype, DType::F16);
        assert_eq!(half.ty(sum).dtype, DType::F16);
        assert_eq!(half.ty(wide).dtype, DType::F64);
        assert!(matches!(&half.node(mask).op, Op::Constant(l) if l.as_splat() == Some(-65504.0)));
        assert!(matches!(half.node(sum).op, Op::Binary(Binary::Add)));
    }
}

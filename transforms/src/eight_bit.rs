//! Products of weights in 8 bits, as Transformer Engine, torchao and Qwix train (`--precision fp8`).
//!
//! A weight that only multiplies activations becomes `f8e4m3fn`, and the activations are converted before each product.
//! Products of 8-bit floats give bf16, and so do their gradients ([`altiplano_ir::op::DotGeneral`]). Embeddings, norms,
//! attention and the products whose results a softmax or a loss reads (the head and routers) stay as they are.
//!
//! The scales that such software gives each tensor, so that its values fit the range of 8 bits, are not in the graph.
//! They cost passes over memory, which prices count (`altiplano_ir::kernels`).

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Convert, Function, Op, Operator, Parameter, ShapeError};

/// Sizes of a product in 8 bits are multiples of this: its tensor cores load rows of 16 bytes.
const MULTIPLE: u64 = 16;

/// Computes the products of a 16-bit model's weights in 8 bits. `None` if there is no such product.
///
/// # Errors
/// If an op does not accept its new operands, which is an error of this pass.
pub fn in_eight_bits(graph: &Graph) -> Result<Option<Graph>, ShapeError> {
    let weights = weights(graph);
    if !weights.contains(&true) {
        return Ok(None);
    }
    let mut to =
        Graph { nodes: Vec::with_capacity(graph.len()), outputs: Vec::new(), pins: Vec::new(), ..graph.clone() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    let mut converted: Vec<Option<ValueId>> = vec![None; graph.len()];
    for v in graph.values() {
        let node = graph.node(v);
        let mut operands: Vec<ValueId> = node.operands.iter().map(|o| map[o.index()]).collect();
        if let Some([x, weight]) = factors(graph, v)
            && weights[weight.index()]
        {
            let eight = *converted[x.index()].get_or_insert_with(|| {
                let (from, op) = (graph.node(x), Convert { dtype: DType::F8E4M3FN });
                let ty = from.ty.with_dtype(op.dtype);
                to.append(Node { op: Op::Convert(op), operands: vec![map[x.index()]], ty, ..from.clone() })
            });
            let of_x = node.operands.iter().zip(&mut operands).filter(|(old, _)| **old == x);
            of_x.for_each(|(_, operand)| *operand = eight);
        }
        let op = match &node.op {
            Op::Parameter(p) if weights[v.index()] => {
                Op::Parameter(Parameter { ty: p.ty.with_dtype(DType::F8E4M3FN), ..p.clone() })
            }
            op => op.clone(),
        };
        let types: Vec<_> = operands.iter().map(|&o| to.ty(o)).collect();
        let ty = op.infer(&types)?;
        map.push(to.append(Node { op, operands, ty, ..node.clone() }));
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to.take_pins(graph, |v| Some(map[v.index()]));
    Ok(Some(to))
}

/// The parameters that become 8-bit floats, and the views of them: those of 16 bits that nothing but products in 8 bits
/// read.
fn weights(graph: &Graph) -> Vec<bool> {
    let users = graph.users();
    let logits = logits(graph, &users);
    let varies = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
    let mut read_by_products = vec![false; graph.len()];
    for v in graph.values().rev() {
        let node = graph.node(v);
        let is_view = matches!(node.op, Op::Parameter(_) | Op::Reshape(_) | Op::Transpose(_));
        if !is_view || varies[v.index()] || node.ty.dtype.bytes() != 2 || !node.ty.dtype.is_float() {
            continue;
        }
        let suits = |u: &ValueId| match factors(graph, *u) {
            Some([x, weight]) => weight == v && varies[x.index()] && fits(graph, *u) && !logits[u.index()],
            None => read_by_products[u.index()],
        };
        let of = &users[v.index()];
        read_by_products[v.index()] = !of.is_empty() && of.iter().all(suits) && !graph.outputs.contains(&v);
    }
    // A view is one of a weight if its parameter is.
    let mut is_weight = vec![false; graph.len()];
    for v in graph.values() {
        let node = graph.node(v);
        let of_weight = match node.op {
            Op::Parameter(_) => true,
            _ => node.operands.first().is_some_and(|o| is_weight[o.index()]),
        };
        is_weight[v.index()] = read_by_products[v.index()] && of_weight;
    }
    is_weight
}

/// The activations and the weight that a product of both multiplies.
fn factors(graph: &Graph, v: ValueId) -> Option<[ValueId; 2]> {
    let node = graph.node(v);
    let is_view_of_parameter = |mut v: ValueId| {
        while matches!(graph.node(v).op, Op::Reshape(_) | Op::Transpose(_)) {
            v = graph.node(v).operands[0];
        }
        matches!(graph.node(v).op, Op::Parameter(_))
    };
    match &node.op {
        Op::DotGeneral(_) if is_view_of_parameter(node.operands[1]) => Some([node.operands[0], node.operands[1]]),
        Op::DotGeneral(_) if is_view_of_parameter(node.operands[0]) => Some([node.operands[1], node.operands[0]]),
        Op::GroupedDot(_) if is_view_of_parameter(node.operands[1]) => Some([node.operands[0], node.operands[1]]),
        _ => None,
    }
}

/// Returns true if the sizes of a weight's matrix are multiples of [`MULTIPLE`].
fn fits(graph: &Graph, product: ValueId) -> bool {
    let node = graph.node(product);
    let shape = |i: usize| graph.shape(node.operands[i]);
    let size = |shape: &[u64], dims: &[usize]| dims.iter().map(|&d| shape[d]).product::<u64>();
    let sizes = match &node.op {
        Op::DotGeneral(dot) => {
            let (lhs, rhs) = (shape(0), shape(1));
            let free = [size(lhs, &dot.lhs_free(lhs.len())), size(rhs, &dot.rhs_free(rhs.len()))];
            let of_weight = if factors(graph, product).is_some_and(|[x, _]| x == node.operands[0]) { 1 } else { 0 };
            vec![size(lhs, &dot.lhs_contract), free[of_weight]]
        }
        Op::GroupedDot(_) => shape(1)[1..].to_vec(),
        _ => Vec::new(),
    };
    sizes.iter().all(|size| size.is_multiple_of(MULTIPLE))
}

/// Marks the values that a softmax or a loss reads, perhaps after elementwise ops: the logits of classes, words or experts.
fn logits(graph: &Graph, users: &[Vec<ValueId>]) -> Vec<bool> {
    let chooses = |op: &Op| match op {
        Op::Composite(op) => matches!(
            op.function,
            Function::Softmax { .. }
                | Function::LogSoftmax { .. }
                | Function::Gates { .. }
                | Function::CrossEntropy { .. }
        ),
        op => matches!(op, Op::ArgSort(_)),
    };
    let passes_on = |op: &Op| {
        op.is_elementwise() || matches!(op, Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) | Op::Convert(_))
    };
    let mut logits = vec![false; graph.len()];
    for v in graph.values().rev() {
        let of = |u: &ValueId| chooses(&graph.node(*u).op) || passes_on(&graph.node(*u).op) && logits[u.index()];
        logits[v.index()] = users[v.index()].iter().any(of);
    }
    logits
}

#[cfg(test)]
#[path = "eight_bit_tests.rs"]
mod tests;

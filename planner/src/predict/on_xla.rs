//! The memory of a body where XLA compiles it, as far as it differs from that of the body's own steps: values that XLA
//! never stores, and workspace of ops that it rewrites.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Op, Unary};

pub(super) struct OnXla<'a> {
    graph: &'a Graph,
    users: Vec<Vec<ValueId>>,
}

impl OnXla<'_> {
    pub(super) fn new(graph: &Graph) -> OnXla<'_> {
        OnXla { graph, users: graph.users() }
    }

    /// Returns false if XLA computes the elements of a value where they are read. `is_written`: the value ends up in a
    /// buffer.
    pub(super) fn stores(&self, v: ValueId, is_written: bool) -> bool {
        // A copy has no node.
        v.index() >= self.graph.len() || !self.is_compared(v) && (is_written || !self.is_gathered(v))
    }

    /// Bytes that XLA takes for an op beside its operands and results.
    pub(super) fn workspace_bytes(&self, v: ValueId) -> u64 {
        let node = self.graph.node(v);
        match node.op {
            // XLA first finds the largest element of each window and its place, a number of 32 bits for each dimension.
            Op::SelectAndScatter(_) => {
                let windows = self.graph.ty(node.operands[1]);
                4 * windows.elements() * (1 + windows.rank() as u64)
            }
            _ => 0,
        }
    }

    /// Returns true if a value is elementwise, and gathers alone read it.
    fn is_gathered(&self, v: ValueId) -> bool {
        let (graph, users) = (self.graph, &self.users[v.index()]);
        let gathers =
            |user: &ValueId| matches!(graph.node(*user).op, Op::Gather(_)) && graph.node(*user).operands[0] == v;
        graph.node(v).op.is_elementwise() && !users.is_empty() && users.iter().all(gathers)
    }

    /// Returns true if a value is a scatter of one update a row, which becomes a comparison.
    fn is_compared(&self, v: ValueId) -> bool {
        let mut at = Some(v);
        while let Some(v) = at {
            let node = self.graph.node(v);
            at = match &node.op {
                Op::ScatterAdd(op) => return op.is_compared(self.graph.shape(node.operands[0])),
                Op::Convert(_) | Op::Unary(Unary::Negate) => node.operands.first().copied(),
                _ => None,
            };
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::op::{Extremum, Input, SelectAndScatter, WindowDim};
    use altiplano_ir::types::TensorType;

    #[test]
    fn the_gradient_of_a_maximum_takes_the_largest_elements_and_their_places() {
        let mut g = Graph::new("pooling");
        let mut input = |shape: [u64; 2]| {
            let ty = TensorType::new(DType::BF16, shape);
            g.emit(Op::Input(Input { name: "x".into(), ty }), &[])
        };
        let [x, source] = [input([8, 16]), input([8, 4])];
        let along = |size| WindowDim { size, stride: size, ..WindowDim::one() };
        let op = SelectAndScatter { select: Extremum::Max, window: [1, 4].map(along).to_vec() };
        let scattered = g.emit(Op::SelectAndScatter(op), &[x, source]);
        let xla = OnXla::new(&g);
        assert_eq!(xla.workspace_bytes(scattered), 8 * 4 * 3 * 4);
        assert_eq!(xla.workspace_bytes(x), 0);
    }
}

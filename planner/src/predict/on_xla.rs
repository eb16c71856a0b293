//! The memory of a body where XLA compiles it, as far as it differs from that of the body's own steps: values that XLA
//! never stores, workspace of ops that it rewrites, and parameters that it gathers ahead of their use.

use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Op, Unary};
use altiplano_ir::reshard::Collective;
use altiplano_ir::storage::Steps;
use rustc_hash::{FxHashMap, FxHashSet};

/// Bytes of an argument from which on programs for XLA let its gather wait for its turn.
const LARGE: u64 = 1 << 20;

/// Bytes of results to which XLA joins gathers, by default.
const MOST_JOINED: u64 = 30 << 20;

/// A value that is made of more values than this counts as stored.
const MOST_FUSED: usize = 256;

pub(super) struct OnXla<'a> {
    graph: &'a Graph,
    users: Vec<Vec<ValueId>>,
    /// Values that are not stored but computed wherever they are read.
    repeated: FxHashSet<ValueId>,
    /// Stored values that those are made of, with the last point at which they are read for that.
    sources: FxHashMap<ValueId, u32>,
}

impl<'a> OnXla<'a> {
    /// For a body that runs in these steps.
    pub(super) fn new(graph: &'a Graph, steps: &Steps<()>) -> OnXla<'a> {
        let (sources, repeated) = (FxHashMap::default(), FxHashSet::default());
        let mut xla = OnXla { graph, users: graph.users(), sources, repeated };
        xla.find_repeated(steps);
        xla
    }

    /// XLA fuses an elementwise value into all of its readers where reading the stored values that it is made of once more
    /// takes less time than storing it. These values then last until the last reader.
    fn find_repeated(&mut self, steps: &Steps<()>) {
        let mut dies: FxHashMap<ValueId, u32> = FxHashMap::default();
        for (point, step) in (1u32..).zip(&steps.steps) {
            dies.extend(step.dies.iter().chain(step.in_place.iter().map(|(_, v)| v)).map(|v| (*v, point)));
        }
        let mut stored: FxHashSet<ValueId> = steps.leaves.iter().map(|leaf| leaf.value).collect();
        for output in steps.steps.iter().flat_map(|step| &step.outputs) {
            let v = output.value;
            let last = dies.get(&v).filter(|_| v.index() < self.graph.len() && self.is_fused(v));
            match last.and_then(|last| Some((last, self.made_of(v, &stored)?))) {
                Some((&last, sources)) => {
                    self.repeated.insert(v);
                    for source in sources {
                        let until = self.sources.entry(source).or_default();
                        *until = last.max(*until);
                    }
                }
                None => _ = stored.insert(v),
            }
        }
    }

    /// Returns true if a value is elementwise, and what reads it can be fused with it.
    fn is_fused(&self, v: ValueId) -> bool {
        let fuses = |user: &ValueId| {
            let op = &self.graph.node(*user).op;
            op.is_elementwise() || matches!(op, Op::Reduce(_))
        };
        self.graph.node(v).op.is_elementwise() && self.users[v.index()].iter().all(fuses)
    }

    /// The stored values that an elementwise value is made of, if it reads fewer bytes of them than are written and read where
    /// the value is stored. Small ones, such as a value for each row, do not count.
    fn made_of(&self, v: ValueId, stored: &FxHashSet<ValueId>) -> Option<Vec<ValueId>> {
        let bytes = |v: ValueId| self.graph.ty(v).bytes();
        let (mut sources, mut total, mut open) = (Vec::new(), 0, vec![(v, None)]);
        let mut seen = FxHashSet::default();
        while let Some((at, part)) = open.pop() {
            if seen.len() > MOST_FUSED {
                return None;
            }
            for &operand in self.graph.node(at).operands.iter().filter(|o| seen.insert(**o)) {
                let read = part.unwrap_or(bytes(operand));
                match &self.graph.node(operand).op {
                    _ if stored.contains(&operand) => {
                        total += if 8 * read > bytes(v) { read } else { 0 };
                        if total >= 2 * bytes(v) {
                            return None;
                        }
                        sources.push(operand);
                    }
                    Op::Slice(_) | Op::Reshape(_) => open.push((operand, Some(read))),
                    Op::BroadcastInDim(_) | Op::Constant(_) | Op::Iota(_) => open.push((operand, None)),
                    op if op.is_elementwise() => open.push((operand, part)),
                    _ => return None,
                }
            }
        }
        Some(sources)
    }

    /// The last point at which a stored value is read, if the body's own steps last read it at `point`.
    pub(super) fn last_read(&self, v: ValueId, point: u32) -> u32 {
        self.sources.get(&v).map_or(point, |until| point.max(*until))
    }

    /// Returns false if XLA computes the elements of a value where they are read. `is_written`: the value ends up in a
    /// buffer.
    pub(super) fn stores(&self, v: ValueId, is_written: bool) -> bool {
        // A copy has no node.
        v.index() >= self.graph.len()
            || !self.is_compared(v) && (is_written || !self.is_gathered(v)) && !self.repeated.contains(&v)
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

    /// Bytes of gathered parameters that wait for their use. XLA joins small gathers of several layers to one.
    pub(super) fn joined_bytes(&self) -> u64 {
        let gathered = |node: &Node| {
            let Op::Collective(op) = &node.op else { return 0 };
            let is_gather = matches!(op.collective, Collective::AllGather { .. });
            let argument = self.graph.node(node.operands[0]);
            let joins = is_gather && argument.op.is_leaf() && argument.ty.bytes() < LARGE;
            if joins { node.ty.bytes() } else { 0 }
        };
        self.graph.nodes.iter().map(gathered).sum::<u64>().min(MOST_JOINED)
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
    use altiplano_ir::array::matmul;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::mesh::{AxisId, Mesh};
    use altiplano_ir::op::{Extremum, Input, Reducer, SelectAndScatter, WindowDim};
    use altiplano_ir::program::BufferId;
    use altiplano_ir::storage::{Leaf, Output, Step};
    use altiplano_ir::types::TensorType;

    fn input(g: &mut Graph, dtype: DType, shape: [u64; 2]) -> ValueId {
        g.emit(Op::Input(Input { name: "x".into(), ty: TensorType::new(dtype, shape) }), &[])
    }

    /// Steps that store all values but the inputs, and drop each after its last reader.
    fn steps_of(g: &Graph) -> Steps<()> {
        let users = g.users();
        let inner: Vec<ValueId> = g.values().filter(|v| !g.node(*v).op.is_leaf()).collect();
        let leaf = |value| Leaf { value, buffer: BufferId(0), owned: false, bytes: g.ty(value).bytes() };
        let step = |&v: &ValueId| Step {
            node: v,
            members: vec![v],
            kernel: (),
            inputs: g.node(v).operands.clone(),
            outputs: vec![Output::new(v, g.ty(v).dtype, g.ty(v).elements() as usize)],
            workspace_bytes: 0,
            replaceable: Vec::new(),
            in_place: Vec::new(),
            dies: g.values().filter(|o| users[o.index()].last() == Some(&v)).collect(),
        };
        Steps {
            name: String::new(),
            steps: inner.iter().map(step).collect(),
            leaves: g.values().filter(|v| g.node(*v).op.is_leaf()).map(leaf).collect(),
            writes: Vec::new(),
            frees: Vec::new(),
            num_values: g.len(),
            transient_bytes: 0,
        }
    }

    #[test]
    fn the_gradient_of_a_maximum_takes_the_largest_elements_and_their_places() {
        let mut g = Graph::new("pooling");
        let [x, source] = [[8, 16], [8, 4]].map(|shape| input(&mut g, DType::BF16, shape));
        let along = |size| WindowDim { size, stride: size, ..WindowDim::one() };
        let op = SelectAndScatter { select: Extremum::Max, window: [1, 4].map(along).to_vec() };
        let scattered = g.emit(Op::SelectAndScatter(op), &[x, source]);
        let xla = OnXla::new(&g, &steps_of(&g));
        assert_eq!(xla.workspace_bytes(scattered), 8 * 4 * 3 * 4);
        assert_eq!(xla.workspace_bytes(x), 0);
    }

    #[test]
    fn elementwise_values_that_products_do_not_read_are_fused_where_that_moves_fewer_bytes() {
        let mut g = Graph::new("fused");
        let [x, y] = [(); 2].map(|()| input(&mut g, DType::BF16, [64, 64]));
        let wide = g.convert(x, DType::F32);
        let both = g.add(x, y);
        let factor = g.unary(Unary::Tanh, x);
        let product = matmul(&mut g, factor, y).expect("a product");
        let squares = g.mul(wide, wide);
        let sums = [squares, both].map(|v| g.reduce(v, Reducer::Sum, &[0, 1]));
        g.outputs = [[product].as_slice(), &sums].concat();
        let steps = steps_of(&g);
        let xla = OnXla::new(&g, &steps);
        let stores = |v: ValueId| xla.stores(v, false);
        assert_eq!([wide, squares, both, factor].map(stores), [false, false, true, true]);
        // The reduction of the squares is the last to read what they are made of.
        let reduced = steps.steps.iter().position(|step| step.node == sums[0]).expect("a step") as u32 + 1;
        assert_eq!(xla.last_read(x, 1), reduced);
        assert_eq!(xla.last_read(y, 1), 1);
    }

    #[test]
    fn small_gathers_of_parameters_wait_for_their_use_together() {
        let mesh = Mesh::new(&[("data", 8)]);
        let gather = Collective::AllGather { axes: vec![AxisId(0)], dim: 0, outer: 1 };
        let joined = |shapes: &[[u64; 2]]| {
            let mut g = Graph::new("gathers");
            for shape in shapes {
                let x = input(&mut g, DType::BF16, *shape);
                g.emit(Op::collective(gather.clone(), &mesh), &[x]);
            }
            OnXla::new(&g, &steps_of(&g)).joined_bytes()
        };
        assert_eq!(joined(&[[128, 64], [64, 64]]), 8 * 2 * (128 + 64) * 64);
        // A large one is not joined, and many are joined up to a limit.
        assert_eq!(joined(&[[1024, 1024]]), 0);
        assert_eq!(joined(&[[512, 512]; 16]), 30 << 20);
    }
}

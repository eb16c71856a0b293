//! Facts about values that depend on no input: numbers, and masks that hide later positions.

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::interpret::{Allowance, run_all};
use altiplano_ir::op::{Binary, Direction, Op};
use altiplano_ir::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// The largest number of elements of a mask that is computed to inspect it.
const MAX_ELEMENTS: u64 = 1 << 22;

/// The limits of work for one mask and for all masks of a graph. A mask that takes more is like any other value.
const MAX_WORK: (u64, u64) = (1 << 27, 1 << 29);

/// The work that each op takes besides that of its elements.
const WORK_OF_OP: u64 = 1 << 10;

/// The largest depth of ops in a mask that is recognised without its elements.
const DEPTH: u32 = 512;

/// A number added to a score, at or below which the exponential vanishes.
const HIDDEN: f64 = -1e4;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fact {
    /// All elements are this number, which scales with the batch to the power `batch_power`.
    Number { value: f64, batch_power: i8 },
    /// A causal mask, repeated along all but two dimensions. It is true (or 0) where the position in `row` is at least
    /// that in `column`. Elsewhere it is false (or hides the score).
    Causal { row: usize, column: usize },
    /// A mask that hides nothing: true or 0 everywhere.
    Open,
    /// Each element is its own position in a dimension.
    Count { dim: usize },
}

pub(crate) struct Facts {
    constant: Vec<bool>,
    known: BTreeMap<ValueId, Fact>,
}

impl Facts {
    pub(crate) fn new(graph: &Graph) -> Facts {
        let constant: Vec<bool> = graph.depends_on(|v| graph.node(v).op.is_leaf()).into_iter().map(|d| !d).collect();
        let mut facts = Facts { constant, known: BTreeMap::new() };
        let users = graph.users();
        let mut masks = Masks {
            graph,
            affine: BTreeMap::new(),
            facts: BTreeMap::new(),
            depth: 0,
            allowance: Allowance::new(MAX_WORK.0, MAX_WORK.1),
        };
        for v in graph.values().filter(|&v| facts.constant[v.index()]) {
            if !users[v.index()].iter().any(|u| !facts.constant[u.index()]) {
                continue;
            }
            let fact = match &graph.node(v).op {
                Op::Constant(literal) if literal.as_splat().is_some() => {
                    literal.as_splat().map(|value| Fact::Number { value, batch_power: literal.batch_power })
                }
                _ => masks.fact(v),
            };
            if let Some(fact) = fact {
                facts.known.insert(v, fact);
            }
        }
        facts
    }

    /// Returns true if a value depends on no leaf.
    pub(crate) fn is_constant(&self, v: ValueId) -> bool {
        self.constant[v.index()]
    }

    pub(crate) fn of(&self, v: ValueId) -> Option<&Fact> {
        self.known.get(&v)
    }
}

/// A value that is a number plus a multiple of each index.
#[derive(Clone, Debug, PartialEq)]
struct Affine {
    start: f64,
    steps: Vec<f64>,
}

struct Masks<'a> {
    graph: &'a Graph,
    affine: BTreeMap<ValueId, Option<Affine>>,
    facts: BTreeMap<ValueId, Option<Fact>>,
    depth: u32,
    allowance: Allowance,
}

impl Masks<'_> {
    fn fact(&mut self, v: ValueId) -> Option<Fact> {
        if let Some(known) = self.facts.get(&v) {
            return known.clone();
        }
        let found = self.deeper(|masks| masks.find_fact(v));
        self.facts.insert(v, found.clone());
        found
    }

    fn find_fact(&mut self, v: ValueId) -> Option<Fact> {
        let (graph, ty) = (self.graph, self.graph.ty(v));
        if ty.dtype != DType::Bool && !ty.dtype.is_float() {
            let affine = self.affine(v).filter(|a| a.start == 0.0)?;
            let mut counted = (0..ty.rank()).filter(|&d| affine.steps[d] != 0.0);
            let dim = counted.next().filter(|&d| affine.steps[d] == 1.0 && counted.next().is_none())?;
            return Some(Fact::Count { dim });
        }
        // Repeated dimensions do not change the fact.
        match &graph.node(v).op {
            Op::BroadcastInDim(b) => match self.fact(graph.node(v).operands[0])? {
                Fact::Causal { row, column } => Some(Fact::Causal { row: b.dims[row], column: b.dims[column] }),
                fact => Some(fact),
            },
            Op::Reshape(_) => {
                let x = graph.node(v).operands[0];
                let counted = |shape: &[u64]| (0..shape.len()).filter(|&d| shape[d] != 1).collect::<Vec<usize>>();
                let (from, to) = (counted(graph.shape(x)), counted(&ty.shape));
                let alike = from.iter().map(|&d| graph.shape(x)[d]).eq(to.iter().map(|&d| ty.shape[d]));
                let moved = |d: usize| from.iter().position(|&f| f == d).map(|i| to[i]);
                match self.fact(x).filter(|_| alike)? {
                    Fact::Causal { row, column } => Some(Fact::Causal { row: moved(row)?, column: moved(column)? }),
                    fact => Some(fact),
                }
            }
            Op::Select(_) => {
                let [p, yes, no] = [0, 1, 2].map(|i| graph.node(v).operands[i]);
                let number = |x: ValueId| match &graph.node(x).op {
                    Op::Constant(literal) => literal.as_splat(),
                    _ => None,
                };
                let hides = number(yes) == Some(0.0) && number(no).is_some_and(|n| n <= HIDDEN) && ty.dtype.is_float();
                let repeats = number(yes) == Some(1.0) && number(no) == Some(0.0) && ty.dtype == DType::Bool;
                if hides || repeats { self.fact(p) } else { self.computed(v) }
            }
            Op::Binary(Binary::And) => {
                let [a, b] = [0, 1].map(|i| self.fact(graph.node(v).operands[i]));
                match (a, b) {
                    (Some(Fact::Open), other) | (other, Some(Fact::Open)) => other,
                    (Some(a), Some(b)) if a == b => Some(a),
                    _ => self.computed(v),
                }
            }
            _ => self.compared(v).or_else(|| self.computed(v)),
        }
    }

    /// Looks one op deeper, up to a limit.
    fn deeper<T>(&mut self, find: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == DEPTH {
            return None;
        }
        self.depth += 1;
        let found = find(self);
        self.depth -= 1;
        found
    }

    /// A mask by comparison of two indices.
    fn compared(&mut self, v: ValueId) -> Option<Fact> {
        let node = self.graph.node(v);
        let Op::Compare(compare) = &node.op else { return None };
        let (a, b) = (self.affine(node.operands[0])?, self.affine(node.operands[1])?);
        let (a, b, strict) = match compare.direction {
            Direction::Ge => (a, b, 0.0),
            Direction::Gt => (a, b, 1.0),
            Direction::Le => (b, a, 0.0),
            Direction::Lt => (b, a, 1.0),
            _ => return None,
        };
        let steps: Vec<f64> = a.steps.iter().zip(&b.steps).map(|(a, b)| a - b).collect();
        let only = |wanted: f64| {
            let mut dims = (0..steps.len()).filter(|&d| steps[d] == wanted);
            dims.next().filter(|_| dims.next().is_none())
        };
        let (row, column) = (only(1.0)?, only(-1.0)?);
        let others = (0..steps.len()).all(|d| d == row || d == column || steps[d] == 0.0);
        let start = a.start - b.start - strict;
        // Positions are integers, so the mask is causal if row - column + start >= 0 with -1 < start <= 0.
        (others && start <= 0.0 && start > -1.0).then_some(Fact::Causal { row, column })
    }

    fn affine(&mut self, v: ValueId) -> Option<Affine> {
        if let Some(known) = self.affine.get(&v) {
            return known.clone();
        }
        let found = self.deeper(|masks| masks.find_affine(v));
        self.affine.insert(v, found.clone());
        found
    }

    fn find_affine(&mut self, v: ValueId) -> Option<Affine> {
        let node = self.graph.node(v);
        let rank = node.ty.rank();
        let operand = |i: usize| node.operands[i];
        match &node.op {
            Op::Iota(iota) => {
                let steps = (0..rank).map(|d| if d == iota.dim { 1.0 } else { 0.0 }).collect();
                Some(Affine { start: 0.0, steps })
            }
            Op::Constant(literal) => literal.as_splat().map(|start| Affine { start, steps: vec![0.0; rank] }),
            Op::Convert(_) if node.ty.dtype != DType::Bool => self.affine(operand(0)),
            Op::BroadcastInDim(b) => {
                let x = self.affine(operand(0))?;
                let mut steps = vec![0.0; rank];
                for (d, &to) in b.dims.iter().enumerate() {
                    let size = self.graph.shape(operand(0))[d];
                    steps[to] = if size == 1 { 0.0 } else { x.steps[d] };
                }
                Some(Affine { start: x.start, steps })
            }
            Op::Transpose(t) => {
                let x = self.affine(operand(0))?;
                Some(Affine { start: x.start, steps: t.permutation.iter().map(|&d| x.steps[d]).collect() })
            }
            Op::Reshape(_) => {
                let (x, from) = (self.affine(operand(0))?, self.graph.shape(operand(0)));
                let mut left = (0..from.len()).filter(|&d| from[d] != 1).peekable();
                let mut steps = vec![0.0; rank];
                for (d, &size) in node.ty.shape.iter().enumerate().filter(|(_, s)| **s != 1) {
                    let same = left.next_if(|&l| from[l] == size)?;
                    steps[d] = x.steps[same];
                }
                left.next().is_none().then_some(Affine { start: x.start, steps })
            }
            Op::Slice(s) => {
                let x = self.affine(operand(0))?;
                let offset: f64 = x.steps.iter().zip(&s.start).map(|(step, &start)| step * start as f64).sum();
                let steps = x.steps.iter().zip(&s.stride).map(|(step, &stride)| step * stride as f64).collect();
                Some(Affine { start: x.start + offset, steps })
            }
            Op::Binary(op @ (Binary::Add | Binary::Subtract)) => {
                let (a, b) = (self.affine(operand(0))?, self.affine(operand(1))?);
                let sign = if *op == Binary::Add { 1.0 } else { -1.0 };
                let steps = a.steps.iter().zip(&b.steps).map(|(a, b)| a + sign * b).collect();
                Some(Affine { start: a.start + sign * b.start, steps })
            }
            _ => None,
        }
    }

    /// A mask recognised from its computed elements.
    fn computed(&mut self, v: ValueId) -> Option<Fact> {
        let shape = self.graph.shape(v);
        if shape.len() < 2 {
            return None;
        }
        let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let mask = self.value(v)?;
        let mut causal = true;
        let mut open = true;
        for (i, &x) in mask.data.iter().enumerate() {
            let (seen, hidden) =
                if mask.ty.dtype == DType::Bool { (x == 1.0, x == 0.0) } else { (x == 0.0, x <= HIDDEN) };
            let (row, column) = (i as u64 / columns % rows.max(1), i as u64 % columns);
            open &= seen;
            causal &= if row >= column { seen } else { hidden };
            if !open && !causal {
                return None;
            }
        }
        match (open, causal) {
            (true, _) => Some(Fact::Open),
            (false, true) => Some(Fact::Causal { row: shape.len() - 2, column: shape.len() - 1 }),
            _ => None,
        }
    }

    /// The value of a constant, if neither its size nor the work of computing it is large.
    fn value(&mut self, v: ValueId) -> Option<Tensor> {
        let graph = self.graph;
        if graph.ty(v).elements() > MAX_ELEMENTS {
            return None;
        }
        let mut needed = BTreeSet::new();
        let mut pending = vec![v];
        let (mut elements, mut work) = (0u64, 0u64);
        while let Some(u) = pending.pop() {
            if needed.insert(u) {
                elements = elements.saturating_add(graph.ty(u).elements());
                work = work.saturating_add(graph.work(u));
                if elements > 8 * MAX_ELEMENTS || !self.allowance.take(WORK_OF_OP) {
                    return None;
                }
                pending.extend(&graph.node(u).operands);
            }
        }
        if !self.allowance.take(work) {
            return None;
        }
        let mut part = Graph::new("mask");
        let mut map = BTreeMap::new();
        for u in needed {
            let node = graph.node(u);
            let operands = node.operands.iter().map(|o| map[o]).collect();
            map.insert(u, part.append(Node { operands, ..node.clone() }));
        }
        run_all(&part, |u| Tensor::splat(part.ty(u).clone(), f64::NAN)).pop()
    }
}

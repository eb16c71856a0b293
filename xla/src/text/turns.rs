//! Optimization barriers for ops that XLA would compute too early or too late.
//!
//! XLA orders the ops of a program itself. Those that need nothing but arguments can run at any time, so it recomputes
//! values of all layers when a backward pass begins, and keeps them until they are used. A barrier keeps the readers of an
//! argument behind a value that precedes them in the body's own order. Zeros that a scatter adds to wait in the same way.
//!
//! Results that only the end of the body needs can be computed at any time as well: gradients of parameters, and sums
//! over layers. XLA leaves them to the end, and keeps their operands until then. A barrier computes them before the next
//! value of that kind.
//!
//! Collectives that follow such results overlap with later layers. XLA joins many of them and leaves them to the end, so
//! that all gradients wait there. Barriers divide them into buckets, as data parallelism usually does: a bucket is done a
//! few products after it is full.
//!
//! The value is one that several products read, so that it is in memory whatever XLA fuses. XLA drops an operand of a
//! barrier whose result nothing reads, so that later readers of the value read that result. It may also let products
//! read a value before a change of its shape. The barrier therefore takes the value before that change.

use super::types::{list, tensor};
use super::{Printer, Value};
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::types::TensorType;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Bytes of an argument from which on it waits.
const LARGE: u64 = 1 << 20;

/// Bytes of operands with which a bucket of collectives is full. XLA's own limit, the same by default, counts results.
const BUCKET: u64 = 30 << 20;

/// A full bucket is done when this many further values that several products read are in memory.
const DUE: usize = 1;

pub(super) struct Turns<'a> {
    graph: &'a Graph,
    /// Arguments that nothing has read so far.
    waiting: BTreeSet<ValueId>,
    /// The value that [`Printer::latest`] is.
    latest: Option<ValueId>,
    /// True for values that several products read.
    is_materialised: Vec<bool>,
    /// True for values that products follow.
    leads_to_product: Vec<bool>,
    /// True for values of several collectives that no product follows. They are left to the end.
    is_late: Vec<bool>,
    /// Operand bytes of the collective that a value is the result of, or what becomes of that result alone.
    collected: Vec<Option<u64>>,
    /// True for the last values of that kind.
    ends_collective: Vec<bool>,
    /// Those that are printed, and not yet in a full bucket.
    bucket: Vec<ValueId>,
    /// Operand bytes of the bucket.
    bucket_bytes: u64,
    /// Full buckets, with the number of values in memory by which they are done.
    full: Vec<(usize, Vec<ValueId>)>,
    /// Number of values in memory so far.
    reached: usize,
    /// Results that no product follows and nothing has read so far.
    finished: BTreeSet<ValueId>,
}

impl<'a> Turns<'a> {
    /// `any`: something waits at all.
    pub(super) fn new(graph: &'a Graph, any: bool) -> Turns<'a> {
        let mut products = vec![0; graph.len()];
        for node in graph.nodes.iter().filter(|node| node.op.is_contraction()) {
            node.operands.iter().for_each(|o| products[o.index()] += 1);
        }
        let several = |(node, products): (&Node, u32)| any && products > 1 && !node.op.is_leaf();
        let is_materialised = graph.nodes.iter().zip(products).map(several).collect();
        // Without arguments that wait all values count as such, so that nothing is finished or late.
        let mut leads_to_product = vec![!any; graph.len()];
        for v in (0..graph.len()).rev() {
            let node = &graph.nodes[v];
            if leads_to_product[v] || node.op.is_contraction() {
                node.operands.iter().for_each(|o| leads_to_product[o.index()] = true);
            }
        }
        let mut is_late = vec![false; graph.len()];
        for v in 0..graph.len() {
            let Node { op, operands, .. } = &graph.nodes[v];
            let is_collective = matches!(op, Op::Collective(op) if op.collective.communicates());
            is_late[v] = !leads_to_product[v] && (is_collective || operands.iter().any(|o| is_late[o.index()]));
        }
        let collected = collected(graph, &is_late);
        let mut ends_collective: Vec<bool> = collected.iter().map(Option::is_some).collect();
        for v in (0..graph.len()).filter(|v| collected[*v].is_some()) {
            graph.nodes[v].operands.iter().for_each(|o| ends_collective[o.index()] = false);
            is_late[v] = false;
        }
        Turns {
            graph,
            waiting: BTreeSet::new(),
            latest: None,
            is_materialised,
            leads_to_product,
            is_late,
            collected,
            ends_collective,
            bucket: Vec::new(),
            bucket_bytes: 0,
            full: Vec::new(),
            reached: 0,
            finished: BTreeSet::new(),
        }
    }

    /// An order of printing. Collectives of buckets follow the first value after their operands that several products read,
    /// and values of several such collectives are at the end.
    pub(super) fn order(&self, order: Vec<ValueId>) -> Vec<ValueId> {
        let (late, order): (Vec<ValueId>, Vec<ValueId>) = order.into_iter().partition(|v| self.is_late[v.index()]);
        let (mut ordered, mut collectives) = (Vec::with_capacity(order.len() + late.len()), Vec::new());
        for v in order {
            if self.collected[v.index()].is_some() {
                collectives.push(v);
                continue;
            }
            ordered.push(v);
            if self.is_materialised[v.index()] {
                ordered.append(&mut collectives);
            }
        }
        ordered.into_iter().chain(collectives).chain(late).collect()
    }

    /// Lets an argument wait.
    pub(super) fn wait(&mut self, argument: ValueId, value: &Value) {
        if value.ty.bytes() >= LARGE {
            self.waiting.insert(argument);
        }
    }

    /// Puts the arguments that a node is the first to read behind the latest value that is in memory.
    pub(super) fn admit(&mut self, node: &Node, printer: &mut Printer, values: &mut [Value]) {
        for &operand in &node.operands {
            if self.waiting.remove(&operand) {
                values[operand.index()] = printer.in_turn(&values[operand.index()]);
            }
        }
        node.operands.iter().for_each(|operand| _ = self.finished.remove(operand));
        if let (Some(v), Some(passed)) = (self.latest, printer.passed.take()) {
            values[v.index()] = passed;
        }
    }

    /// Hears that a value is printed.
    pub(super) fn reach(&mut self, v: ValueId, printer: &mut Printer, values: &mut [Value]) {
        let is_printed = |v: ValueId| !values[v.index()].name.is_empty();
        if self.ends_collective[v.index()] && is_printed(v) {
            self.bucket.push(v);
            self.bucket_bytes += self.collected[v.index()].unwrap_or(0);
            if self.bucket_bytes >= BUCKET {
                self.full.push((self.reached + DUE, std::mem::take(&mut self.bucket)));
                self.bucket_bytes = 0;
            }
        } else if self.is_finished(v) && is_printed(v) {
            self.finished.insert(v);
        }
        if !self.is_materialised[v.index()] || !is_printed(v) {
            return;
        }
        // As it was before changes of shape, and of order if a product precedes these.
        let (mut latest, mut source) = (v, v);
        while let Node { op: op @ (Op::Reshape(_) | Op::Transpose(_)), operands, .. } = self.graph.node(source) {
            let is_direct = latest == source && matches!(op, Op::Reshape(_));
            source = operands[0];
            if is_printed(source) && (is_direct || self.graph.node(source).op.is_contraction()) {
                latest = source;
            }
        }
        self.latest = Some(latest);
        self.reached += 1;
        let mut together = std::mem::take(&mut self.finished);
        let due = self.full.partition_point(|(due, _)| *due <= self.reached);
        together.extend(self.full.drain(..due).flat_map(|(_, bucket)| bucket));
        together.remove(&v);
        if !together.is_empty() {
            together.insert(latest);
            printer.together(&together, values);
        }
        (printer.latest, printer.passed) = (Some(values[latest.index()].clone()), None);
    }

    /// Returns true for products and sums that no product follows, and for results of those.
    fn is_finished(&self, v: ValueId) -> bool {
        let Node { op, operands, .. } = self.graph.node(v);
        let is_sum = op.is_contraction() || matches!(op, Op::Reduce(_) | Op::ScatterAdd(_));
        let follows = || operands.iter().any(|o| !self.leads_to_product[o.index()]);
        let is_free = self.is_late[v.index()] || self.collected[v.index()].is_some();
        !self.leads_to_product[v.index()] && !is_free && !operands.is_empty() && (is_sum || follows())
    }
}

/// For each late collective its operand's bytes. Elementwise values, views and collectives that follow one of these, and no
/// other late value, are marked with the same bytes.
fn collected(graph: &Graph, is_late: &[bool]) -> Vec<Option<u64>> {
    let mut collected: Vec<Option<u64>> = vec![None; graph.len()];
    for v in (0..graph.len()).filter(|v| is_late[*v]) {
        let Node { op, operands, ty, .. } = &graph.nodes[v];
        let mut late = operands.iter().filter(|o| is_late[o.index()]);
        collected[v] = match (late.next(), late.next()) {
            (None, _) => Some(operands.iter().map(|o| graph.ty(*o).bytes()).sum()),
            (Some(one), None) => {
                let follows = graph.ty(*one).elements() == ty.elements() || matches!(op, Op::Collective(_));
                collected[one.index()].filter(|_| follows)
            }
            _ => None,
        };
    }
    collected
}

impl Printer {
    /// A value that is at hand when the latest value in memory is.
    fn in_turn(&mut self, value: &Value) -> Value {
        let Some(latest) = self.latest.clone() else { return value.clone() };
        let name = self.barrier(&[value, &latest]);
        self.passed = Some(Value { name: format!("{name}#1"), ..latest });
        Value { name: format!("{name}#0"), ty: value.ty.clone() }
    }

    /// Puts later readers of these behind all of them.
    fn together(&mut self, these: &BTreeSet<ValueId>, values: &mut [Value]) {
        let name = self.barrier(&these.iter().map(|v| &values[v.index()]).collect::<Vec<&Value>>());
        for (i, v) in these.iter().enumerate() {
            values[v.index()].name = format!("{name}#{i}");
        }
    }

    /// Prints a barrier. Its results are numbered as the values are.
    fn barrier(&mut self, of: &[&Value]) -> String {
        let name = self.fresh();
        let names: Vec<&str> = of.iter().map(|value| value.name.as_str()).collect();
        let types: Vec<String> = of.iter().map(|value| tensor(&value.ty)).collect();
        let (names, types) = (names.join(", "), types.join(", "));
        // Writing to a string does not fail.
        let _ = writeln!(self.body, "    {name}:{} = stablehlo.optimization_barrier {names} : {types}", of.len());
        name
    }

    /// Zeros that a large sum begins with, in turn.
    pub(super) fn zeros(&mut self, ty: &TensorType) -> Value {
        if self.latest.is_none() || ty.bytes() < LARGE {
            return self.splat(ty.clone(), 0.0);
        }
        let zero = self.splat(TensorType::scalar(ty.dtype), 0.0);
        let zero = self.in_turn(&zero);
        self.typed("broadcast_in_dim", &zero, &format!(", dims = {}", list([0usize; 0])), ty)
    }
}

//! Arguments that wait for their turn.
//!
//! XLA orders the ops of a program itself. Those that need nothing but arguments can run at any time, so it recomputes
//! values of all layers when a backward pass begins, and keeps them until they are used. An optimization barrier keeps the
//! readers of an argument behind a value that precedes them in the body's own order. The value is one that several
//! products read: it is in memory whatever XLA fuses.

use super::types::tensor;
use super::{Printer, Value};
use altiplano_ir::graph::{Graph, Node, ValueId};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Bytes of an argument from which on it waits.
const LARGE: u64 = 1 << 20;

pub(super) struct Turns {
    /// Arguments that nothing has read so far.
    waiting: BTreeSet<ValueId>,
    /// True for values that several products read.
    is_materialised: Vec<bool>,
    latest: Option<ValueId>,
}

impl Turns {
    pub(super) fn new(graph: &Graph) -> Turns {
        let mut products = vec![0; graph.len()];
        for node in graph.nodes.iter().filter(|node| node.op.is_contraction()) {
            node.operands.iter().for_each(|o| products[o.index()] += 1);
        }
        let several = |(node, products): (&Node, u32)| products > 1 && !node.op.is_leaf();
        let is_materialised = graph.nodes.iter().zip(products).map(several).collect();
        Turns { waiting: BTreeSet::new(), is_materialised, latest: None }
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
            let waits = self.waiting.remove(&operand);
            let Some(latest) = self.latest.filter(|_| waits) else { continue };
            let (argument, after) = (&values[operand.index()], &values[latest.index()]);
            let name = printer.fresh();
            let types = format!("{}, {}", tensor(&argument.ty), tensor(&after.ty));
            // Writing to a string does not fail.
            let _ = writeln!(
                printer.body,
                "    {name}:2 = stablehlo.optimization_barrier {}, {} : {types}",
                argument.name, after.name
            );
            values[operand.index()] = Value { name: format!("{name}#0"), ty: argument.ty.clone() };
        }
    }

    /// Hears that a value is printed.
    pub(super) fn reach(&mut self, v: ValueId, value: &Value) {
        if self.is_materialised[v.index()] && !value.name.is_empty() {
            self.latest = Some(v);
        }
    }
}

//! The facts of a body as a list of steps, for readers: each value with its op, the rule that was used and its layout.

use super::{Examined, has_local_form};
use crate::term::Term;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Op};
use rustc_hash::FxHashMap;

/// A local value of a body that is a part of a value of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub op: &'static str,
    /// The rule of docs/proofs.md, in one or two words.
    pub rule: &'static str,
    /// The value of one device.
    pub of: String,
    pub layout: String,
    /// The positions of the steps that it follows from.
    pub from: Vec<u32>,
}

impl Examined<'_> {
    /// The steps of all values with a fact, and the position of each term's first step. Values without a fact are passed
    /// over: facts that depend on them follow from their operands.
    pub fn steps(&self) -> (Vec<Step>, FxHashMap<Term, u32>) {
        let mut of_term: FxHashMap<Term, u32> = FxHashMap::default();
        let mut steps: Vec<Step> = Vec::new();
        let mut at: Vec<Option<u32>> = Vec::with_capacity(self.graph.len());
        // For values without a fact, the steps that they depend on.
        let mut through: Vec<Vec<u32>> = Vec::with_capacity(self.graph.len());
        for v in self.graph.values() {
            let node = self.graph.node(v);
            let sources = |o: &ValueId| match at.get(o.index()) {
                Some(Some(step)) => vec![*step],
                Some(None) => through[o.index()].clone(),
                None => Vec::new(),
            };
            let mut from: Vec<u32> = node.operands.iter().flat_map(sources).collect();
            from.sort_unstable();
            from.dedup();
            let Some(fact) = self.of(v).first() else {
                at.push(None);
                through.push(from);
                continue;
            };
            let partial = |s: &u32| steps[*s as usize].layout.contains("partial");
            let rule = rule_of(&node.op, from.iter().any(partial));
            let layout = fact.layout.text(self.mesh);
            let number = steps.len() as u32;
            at.push(Some(number));
            for fact in self.of(v) {
                of_term.entry(fact.term).or_insert(number);
            }
            through.push(Vec::new());
            steps.push(Step { op: node.op.name(), rule, of: self.terms.name(fact.term), layout, from });
        }
        (steps, of_term)
    }

    /// The term of a value of the reference's graph.
    pub fn term_of(&self, reference: ValueId) -> Term {
        self.terms.of_node(reference)
    }
}

/// The rule by which the fact about an op's result follows.
fn rule_of(op: &Op, from_partial: bool) -> &'static str {
    match op {
        Op::Input(_) => "declared",
        Op::Constant(_) => "free dimensions",
        Op::Iota(_) => "counts",
        Op::Collective(_) => "collectives",
        Op::Convert(_) | Op::HostCopy(_) => "the same value",
        Op::Binary(Binary::Add) => "sums",
        op if has_local_form(op) => "local form",
        _ if from_partial => "linearity",
        _ => "factors",
    }
}

//! The rule, local program and gradient of a composite, derived from its decomposition.
//!
//! The rules of the ops inside connect the dimensions of all values. Factors that index one dimension together form a
//! *class*, and a class is a factor of the composite. Splitting it splits every op inside that has it.
//!
//! A partial value inside is carried along as long as ops are linear in it and do not make it larger. Otherwise it is
//! reduced. So a softmax along a split dimension exchanges its maxima and its sums and nothing else.

use super::composite::Function;
use super::*;
use crate::reshard::reshard;
use crate::rule::{AxisUse, Factor, Strategy};
use crate::sets::Sets;
use crate::sharding::Sharding;

/// A composite's decomposition for operands of given types.
#[derive(Debug)]
pub struct Decomposition {
    /// The graph's leaves are the operands in order, and its output is the result.
    pub graph: Graph,
    pub rule: ShardingRule,
    leaves: Vec<ValueId>,
    /// For each value, true if it depends on no operand. Such values are computed where they are used.
    constant: Vec<bool>,
    /// For each factor of the rule, the role of an axis that splits it in every node.
    uses: Vec<Vec<AxisUse>>,
    /// For each value and dimension, the major factor of the rule in it.
    major: Vec<Vec<Option<u8>>>,
}

/// The classes of the factors of all nodes. A class is named by the index of one of its factors.
struct Classes {
    /// The index of each node's first factor.
    first: Vec<usize>,
    class: Vec<usize>,
    /// For each class, true if it cannot be split.
    fixed: Vec<bool>,
}

impl Classes {
    fn of(&self, v: ValueId, factor: u8) -> usize {
        self.class[self.first[v.index()] + factor as usize]
    }
}

/// The factors of a dimension with more than one iteration.
fn counted(rule: &ShardingRule, dim: &[u8]) -> Vec<u8> {
    dim.iter().copied().filter(|&f| rule.factors[f as usize].size != 1).collect()
}

impl Decomposition {
    pub fn new(function: &Function, operands: &[&TensorType]) -> Result<Decomposition, ShapeError> {
        let mut graph = Graph::new(function.name());
        let mut leaves = Vec::with_capacity(operands.len());
        for (i, &ty) in operands.iter().enumerate() {
            leaves.push(graph.push(Op::Input(Input { name: i.to_string(), ty: ty.clone() }), &[])?);
        }
        let result = function.build(&mut graph, &leaves)?;
        graph.outputs = vec![result];
        let constant: Vec<bool> = graph.depends_on(|v| graph.node(v).op.is_leaf()).into_iter().map(|d| !d).collect();
        let (rule, uses, major) = Default::default();
        let mut body = Decomposition { graph, rule, leaves, constant, uses, major };
        body.find_rule();
        Ok(body)
    }

    pub fn takes(&self, operands: &[&TensorType]) -> bool {
        operands.len() == self.leaves.len()
            && operands.iter().zip(&self.leaves).all(|(ty, &v)| *self.graph.ty(v) == **ty)
    }

    /// The index of the operand that a leaf stands for.
    pub fn operand_of(&self, leaf: ValueId) -> Option<usize> {
        self.leaves.iter().position(|&l| l == leaf)
    }

    pub fn result(&self) -> &TensorType {
        self.graph.ty(self.graph.outputs[0])
    }

    /// The rules of all nodes. The rule of a leaf has the factors that its users see in its dimensions.
    fn rules(&self) -> Vec<ShardingRule> {
        let mut rules: Vec<ShardingRule> = self.graph.values().map(|v| self.graph.rule(v)).collect();
        for v in self.graph.values() {
            for (k, &o) in self.graph.node(v).operands.iter().enumerate() {
                if !self.leaves.contains(&o) {
                    continue;
                }
                for d in 0..self.graph.shape(o).len() {
                    let seen: Vec<Factor> = counted(&rules[v.index()], &rules[v.index()].operands[k][d])
                        .iter()
                        .map(|&f| rules[v.index()].factors[f as usize])
                        .collect();
                    let leaf = &mut rules[o.index()];
                    if seen.len() > leaf.result[d].len() {
                        leaf.result[d] = seen.iter().map(|f| leaf.factor(f.size, FactorKind::Parallel)).collect();
                    }
                }
            }
        }
        rules
    }

    fn find_rule(&mut self) {
        let rules = self.rules();
        let classes = self.classes(&rules);
        let mut rule = ShardingRule::default();
        let mut factor_of: std::collections::BTreeMap<usize, u8> = std::collections::BTreeMap::new();
        let mut dims_of = |rule: &mut ShardingRule, v: ValueId| -> Vec<Vec<u8>> {
            let from = &rules[v.index()];
            let mut one = |f: &u8, rule: &mut ShardingRule| {
                let size = from.factors[*f as usize].size;
                *factor_of.entry(classes.of(v, *f)).or_insert_with(|| rule.factor(size, FactorKind::Parallel))
            };
            from.result.iter().map(|dim| counted(from, dim).iter().map(|f| one(f, rule)).collect()).collect()
        };
        rule.operands = self.leaves.iter().map(|&v| dims_of(&mut rule, v)).collect();
        rule.result = dims_of(&mut rule, self.graph.outputs[0]);
        for (&c, &factor) in &factor_of {
            let along = |v: ValueId| {
                (0..rules[v.index()].factors.len() as u8).filter(|&f| classes.of(v, f) == c).collect::<Vec<u8>>()
            };
            let along: Vec<Vec<u8>> = self.graph.values().map(along).collect();
            let found = if classes.fixed[c] { None } else { self.uses_along(&rules, &along) };
            // If a factor is neither in the result nor makes it partial, splitting it leaves all later work to every
            // device.
            let found = found.filter(|(_, left)| left.is_some() || rule.result.iter().flatten().any(|f| *f == factor));
            rule.factors[factor as usize].kind = match &found {
                None => FactorKind::Whole,
                Some((_, Some(reducer))) => FactorKind::Reduction(*reducer),
                Some((_, None)) => FactorKind::Parallel,
            };
            if self.is_contiguous(&rules, &along) {
                rule.contiguous.push(factor);
            }
            self.uses.resize(self.uses.len().max(factor as usize + 1), Vec::new());
            self.uses[factor as usize] = found.map(|(uses, _)| uses).unwrap_or_default();
        }
        let major = |v: ValueId, dim: &Vec<u8>| {
            let first = *counted(&rules[v.index()], dim).first()?;
            factor_of.get(&classes.of(v, first)).copied()
        };
        let of_value = |v: ValueId| rules[v.index()].result.iter().map(|dim| major(v, dim)).collect();
        self.major = self.graph.values().map(of_value).collect();
        self.rule = rule;
    }

    /// The classes of the factors of all nodes.
    fn classes(&self, rules: &[ShardingRule]) -> Classes {
        let mut first = Vec::with_capacity(rules.len());
        let mut total = 0;
        for rule in rules {
            first.push(total);
            total += rule.factors.len();
        }
        let mut sets = Sets::new(total);
        let mut whole = vec![false; total];
        for v in self.graph.values().filter(|v| !self.constant[v.index()]) {
            let rule = &rules[v.index()];
            let at = |f: u8| first[v.index()] + f as usize;
            for (f, factor) in rule.factors.iter().enumerate() {
                whole[at(f as u8)] |= factor.kind == FactorKind::Whole || !rule.windows.is_empty();
            }
            for (k, &o) in self.graph.node(v).operands.iter().enumerate() {
                if self.constant[o.index()] {
                    continue;
                }
                let from = &rules[o.index()];
                for (made, used) in from.result.iter().zip(&rule.operands[k]) {
                    let (made, used) = (counted(from, made), counted(rule, used));
                    let size = |rule: &ShardingRule, f: &u8| rule.factors[*f as usize].size;
                    // A repeated dimension of size 1 has a factor on one side only.
                    if made.is_empty() || used.is_empty() {
                        continue;
                    }
                    let alike =
                        made.len() == used.len() && made.iter().zip(&used).all(|(m, u)| size(from, m) == size(rule, u));
                    if alike {
                        made.iter().zip(&used).for_each(|(&m, &u)| sets.merge(first[o.index()] + m as usize, at(u)));
                    } else {
                        made.iter().for_each(|&m| whole[first[o.index()] + m as usize] = true);
                        used.iter().for_each(|&u| whole[at(u)] = true);
                    }
                }
            }
        }
        let class: Vec<usize> = (0..total).map(|i| sets.find(i)).collect();
        let mut fixed = vec![false; total];
        (0..total).filter(|&i| whole[i]).for_each(|i| fixed[class[i]] = true);
        Classes { first, class, fixed }
    }

    /// Returns true if splitting the factors `along` needs contiguous parts. Positions, and parts of constants that are
    /// not splats, depend on the device's place along the axis.
    fn is_contiguous(&self, rules: &[ShardingRule], along: &[Vec<u8>]) -> bool {
        let varied = |o: &ValueId| match &self.graph.node(*o).op {
            Op::Constant(literal) => literal.as_splat().is_none(),
            _ => true,
        };
        self.graph.values().any(|v| {
            let (node, rule) = (self.graph.node(v), &rules[v.index()]);
            let of_constant = |k: usize, f: &u8| {
                let o = node.operands[k];
                self.constant[o.index()] && varied(&o) && rule.operands[k].iter().flatten().any(|x| x == f)
            };
            let positions = |f: &u8| rule.contiguous.contains(f) || (0..node.operands.len()).any(|k| of_constant(k, f));
            !self.constant[v.index()] && along[v.index()].iter().any(positions)
        })
    }

    /// The batch dimensions of all values inside, derived from those of the operands and of the result.
    pub fn batch_dims(&self, operands: &[u32], result: u32) -> Vec<u32> {
        let outside = self.leaves.iter().zip(operands).map(|(&v, &marks)| (v, marks));
        let mut is_batch = vec![false; self.rule.factors.len()];
        for (v, marks) in outside.chain([(self.graph.outputs[0], result)]) {
            let marked = self.major[v.index()].iter().enumerate().filter(|(d, _)| marks >> d & 1 == 1);
            marked.filter_map(|(_, factor)| *factor).for_each(|f| is_batch[f as usize] = true);
        }
        let bits = |v: ValueId| {
            let scales = |factor: &Option<u8>| factor.is_some_and(|f| is_batch[f as usize]);
            let dims = self.major[v.index()].iter().enumerate().filter(|(_, f)| scales(f));
            if self.constant[v.index()] { 0 } else { dims.map(|(d, _)| 1 << d).sum() }
        };
        self.graph.values().map(bits).collect()
    }

    /// The role in each node of an axis that splits the factors `along`, and the reduction that the result then needs.
    /// `None` if a node would have to split two of its loops at once.
    fn uses_along(&self, rules: &[ShardingRule], along: &[Vec<u8>]) -> Option<(Vec<AxisUse>, Option<Reducer>)> {
        let mut uses = Vec::with_capacity(self.graph.len());
        let mut partial: Vec<Option<Reducer>> = Vec::with_capacity(self.graph.len());
        for v in self.graph.values() {
            let (node, rule) = (self.graph.node(v), &rules[v.index()]);
            let (use_, left) = match along[v.index()].as_slice() {
                _ if self.constant[v.index()] || node.op.is_leaf() => (AxisUse::Replicated, None),
                [] => {
                    let sums: Vec<u8> = (0..node.operands.len())
                        .filter(|&k| partial[node.operands[k].index()] == Some(Reducer::Sum))
                        .map(|k| k as u8)
                        .collect();
                    let elements = |k: usize| self.graph.ty(node.operands[k]).elements();
                    let largest = (0..node.operands.len()).map(elements).max().unwrap_or(0);
                    // A join of partial sums is no larger than they are together.
                    let together = sums.iter().map(|&k| elements(k.into())).sum();
                    let set = rule.linear.iter().position(|set| *set == sums);
                    match set.filter(|_| node.ty.elements() <= largest.max(together)) {
                        Some(set) if !sums.is_empty() => (AxisUse::Partial { set: set as u8 }, Some(Reducer::Sum)),
                        _ => (AxisUse::Replicated, None),
                    }
                }
                &[factor] => {
                    let left = match rule.factors[factor as usize].kind {
                        FactorKind::Reduction(reducer) => Some(reducer),
                        _ => None,
                    };
                    (AxisUse::Factor { factor, outer: 1 }, left)
                }
                _ => return None,
            };
            uses.push(use_);
            partial.push(left);
        }
        // Reduce a value where it arises if it must be reduced anyway, unless it gets smaller or is added to another
        // partial sum first. The backward pass then keeps the complete value and need not reduce it again.
        let users = self.graph.users();
        for v in self.graph.values().rev().filter(|v| !self.graph.outputs.contains(v)) {
            let AxisUse::Partial { set } = uses[v.index()] else { continue };
            let [operand] = rules[v.index()].linear[set as usize][..] else { continue };
            let from = self.graph.node(v).operands[operand as usize];
            let passed_on = users[v.index()].iter().any(|u| matches!(uses[u.index()], AxisUse::Partial { .. }));
            if !passed_on && self.graph.ty(v).elements() >= self.graph.ty(from).elements() {
                (uses[v.index()], partial[v.index()]) = (AxisUse::Replicated, None);
            }
        }
        Some((uses, partial[self.graph.outputs[0].index()]))
    }

    /// The strategy of a node inside, under a strategy of the composite.
    pub fn strategy(&self, v: ValueId, outer: &Strategy) -> Strategy {
        let inside = |use_: &AxisUse| match *use_ {
            AxisUse::Factor { factor, outer } => match self.uses[factor as usize].get(v.index()) {
                Some(&AxisUse::Factor { factor, .. }) => AxisUse::Factor { factor, outer },
                Some(&use_) => use_,
                None => AxisUse::Replicated,
            },
            _ => AxisUse::Replicated,
        };
        Strategy(outer.0.iter().map(inside).collect())
    }

    pub fn is_constant(&self, v: ValueId) -> bool {
        self.constant[v.index()]
    }

    /// Appends the body to a graph in place of a node with these operands. Returns the new value of each of the body's
    /// values.
    pub(crate) fn append_to(&self, graph: &mut Graph, operands: &[ValueId]) -> Vec<ValueId> {
        let mut map: Vec<ValueId> = Vec::with_capacity(self.graph.len());
        let mut given = operands.iter();
        for v in self.graph.values() {
            let node = self.graph.node(v);
            let value = match given.as_slice().first().filter(|_| node.op.is_leaf()) {
                Some(&operand) => {
                    given.next();
                    operand
                }
                None => {
                    let operands = node.operands.iter().map(|o| map[o.index()]).collect();
                    graph.append(Node { operands, ..node.clone() })
                }
            };
            map.push(value);
        }
        map
    }

    /// Emits one device's part: the local parts of the nodes inside, and the collectives between them.
    pub(super) fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let mesh = cx.mesh;
        let strategy = strategy_of(&cx.factor_axes, mesh);
        let of_composite = self.rule.shardings(&strategy, mesh);
        let mut have: Vec<(ValueId, Sharding)> = Vec::with_capacity(self.graph.len());
        for v in self.graph.values() {
            let node = self.graph.node(v);
            if let Some(k) = self.leaves.iter().position(|l| *l == v) {
                have.push((cx.operands[k], of_composite.operands[k].clone()));
                continue;
            }
            let (rule, strategy) = (self.graph.rule(v), self.strategy(v, &strategy));
            let shardings = rule.shardings(&strategy, mesh);
            let mut operands = Vec::with_capacity(node.operands.len());
            for (o, wanted) in node.operands.iter().zip(&shardings.operands) {
                let (mut value, from) = have[o.index()].clone();
                for step in reshard(&from, wanted, mesh) {
                    value = cx.graph.emit(Op::collective(step.collective, mesh), &[value]);
                }
                operands.push(value);
            }
            let local = node.op.local(&mut Local {
                graph: cx.graph,
                mesh,
                operands,
                operand_types: node.operands.iter().map(|&o| self.graph.ty(o).clone()).collect(),
                result_shape: shardings.result.local_shape(mesh),
                factor_axes: strategy.factor_axes(rule.factors.len()),
                fused_loss: cx.fused_loss,
            });
            have.push((local, shardings.result));
        }
        let (mut value, from) = have[self.graph.outputs[0].index()].clone();
        for step in reshard(&from, &of_composite.result, mesh) {
            value = cx.graph.emit(Op::collective(step.collective, mesh), &[value]);
        }
        value
    }

    /// Emits the decomposition again, and then its cotangents from the last node to the first.
    pub(super) fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let map = self.append_to(cx.graph, cx.operands);
        let irrelevant = crate::softmax_max::irrelevant_maxima(&self.graph);
        let mut varies = vec![false; self.graph.len()];
        for v in self.graph.values() {
            let node = self.graph.node(v);
            let wanted = self.leaves.iter().position(|l| *l == v).is_some_and(|k| cx.wanted[k]);
            let depends = wanted || node.operands.iter().any(|o| varies[o.index()]);
            varies[v.index()] = depends && node.ty.dtype.is_float() && !irrelevant[v.index()];
        }
        let mut cotangents: Vec<Option<ValueId>> = vec![None; self.graph.len()];
        cotangents[self.graph.outputs[0].index()] = Some(cx.cotangent);
        for v in self.graph.values().rev() {
            let node = self.graph.node(v);
            let Some(cotangent) = cotangents[v.index()].filter(|_| varies[v.index()] && !node.op.is_leaf()) else {
                continue;
            };
            let operands: Vec<ValueId> = node.operands.iter().map(|o| map[o.index()]).collect();
            let wanted: Vec<bool> = node.operands.iter().map(|o| varies[o.index()]).collect();
            let mut inner = Gradient {
                graph: cx.graph,
                operands: &operands,
                result: map[v.index()],
                cotangent,
                wanted: &wanted,
                fused_loss: cx.fused_loss,
            };
            let contributions = node.op.gradient(&mut inner);
            for ((o, contribution), _) in node.operands.iter().zip(contributions).zip(&wanted).filter(|(_, w)| **w) {
                let sum = match (cotangents[o.index()], contribution) {
                    (Some(so_far), Some(more)) => Some(cx.graph.add(so_far, more)),
                    (so_far, more) => so_far.or(more),
                };
                cotangents[o.index()] = sum;
            }
        }
        self.leaves.iter().map(|v| cotangents[v.index()]).collect()
    }
}

/// The strategy that splits factors over these axes. The number of blocks makes no difference to the emitted ops: where
/// it would, the rule asks for contiguous blocks.
fn strategy_of(factor_axes: &[Vec<AxisId>], mesh: &Mesh) -> Strategy {
    let mut uses = vec![AxisUse::Replicated; mesh.axes.len()];
    for (factor, axes) in factor_axes.iter().enumerate() {
        for axis in axes {
            uses[axis.0 as usize] = AxisUse::Factor { factor: factor as u8, outer: 1 };
        }
    }
    Strategy(uses)
}

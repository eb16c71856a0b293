//! The e-graph of a region: its terms, the facts about each class, and functions to inspect classes and to add to them.

use super::facts::Fact;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Node;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Binary, BroadcastInDim, Convert, DotGeneral, Op, Operator, Reducer, Reshape, Transpose, Unary};
use altiplano_ir::rule::ShardingRule;
use altiplano_ir::types::TensorType;
use egg::{Analysis, DidMerge, EGraph, Id, Language};
use std::collections::HashMap;
use std::rc::Rc;

/// An op, by its number in [`Terms`], applied to classes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Term {
    pub op: u32,
    pub children: Vec<Id>,
}

impl Language for Term {
    type Discriminant = u32;
    fn discriminant(&self) -> u32 {
        self.op
    }
    fn matches(&self, other: &Term) -> bool {
        self.op == other.op && self.children.len() == other.children.len()
    }
    fn children(&self) -> &[Id] {
        &self.children
    }
    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.children
    }
}

/// A value from outside the region.
#[derive(Clone, Debug)]
pub(crate) struct Leaf {
    pub ty: TensorType,
    pub batch_dims: u32,
    pub fact: Option<Fact>,
}

/// The meaning of a term's number.
#[derive(Debug)]
struct Meaning {
    /// The op, or the index of the leaf as `Err`.
    op: Result<Rc<Op>, usize>,
    data: Data,
}

/// The properties of a class, which all its terms share.
#[derive(Clone, Debug)]
pub(crate) struct Data {
    pub ty: Rc<TensorType>,
    pub batch_dims: u32,
    pub fact: Option<Fact>,
    /// The node of the region that the class comes from.
    pub name: Option<usize>,
}

/// The meanings of all term numbers.
#[derive(Debug, Default)]
pub(crate) struct Terms {
    meanings: Vec<Meaning>,
    numbers: HashMap<String, u32>,
    leaves: usize,
}

impl Analysis<Term> for Terms {
    type Data = Data;
    fn make(egraph: &mut EGraph<Term, Self>, term: &Term, _: Id) -> Data {
        egraph.analysis.meanings[term.op as usize].data.clone()
    }
    fn merge(&mut self, a: &mut Data, b: Data) -> DidMerge {
        debug_assert_eq!(a.ty, b.ty, "a rule made values of different types equal");
        let name = match (a.name, b.name) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let (batch_dims, fact) = (a.batch_dims | b.batch_dims, a.fact.clone().or(b.fact.clone()));
        let changed_a = name != a.name || batch_dims != a.batch_dims || fact.is_some() != a.fact.is_some();
        let changed_b = name != b.name || batch_dims != b.batch_dims || fact.is_some() != b.fact.is_some();
        *a = Data { ty: a.ty.clone(), batch_dims, fact, name };
        DidMerge(changed_a, changed_b)
    }
}

/// An op of a class, and its operands.
pub(crate) type Found = (Rc<Op>, Vec<Id>);

/// Matmuls that can be slices of a single one. This only pays if all or most of them are taken from it.
pub(crate) struct Stack {
    pub matmul: DotGeneral,
    pub x: Id,
    /// The class of each matmul, and the class of its slice of the whole.
    pub parts: Vec<(Id, Id)>,
}

pub(crate) struct Builder {
    pub egraph: EGraph<Term, Terms>,
    pub stacks: Vec<Stack>,
    /// The results of earlier additions. Rules ask for the same ones again in each round.
    added: HashMap<(String, Vec<Id>), Option<Id>>,
}

impl Builder {
    pub(crate) fn new() -> Builder {
        Builder { egraph: EGraph::new(Terms::default()), stacks: Vec::new(), added: HashMap::new() }
    }

    pub(crate) fn leaf(&mut self, leaf: Leaf) -> Id {
        let terms = &mut self.egraph.analysis;
        let Leaf { ty, batch_dims, fact } = leaf;
        let data = Data { ty: Rc::new(ty), batch_dims, fact, name: None };
        terms.meanings.push(Meaning { op: Err(terms.leaves), data });
        terms.leaves += 1;
        let op = terms.meanings.len() as u32 - 1;
        self.egraph.add(Term { op, children: Vec::new() })
    }

    /// Adds a node of the region, or a constant outside it.
    pub(crate) fn original(&mut self, node: &Node, children: &[Id], name: Option<usize>, fact: Option<&Fact>) -> Id {
        let ty = Rc::new(node.ty.clone());
        let id = self.term(&node.op, Data { ty, batch_dims: node.batch_dims, fact: None, name: None }, children);
        let class = self.egraph.find(id);
        let data = &mut self.egraph[class].data;
        data.name = data.name.or(name);
        data.fact = data.fact.take().or(fact.cloned());
        id
    }

    fn term(&mut self, op: &Op, mut data: Data, children: &[Id]) -> Id {
        if let Op::Constant(literal) = op
            && let Some(value) = literal.as_splat()
        {
            data.fact = Some(Fact::Number { value, batch_power: literal.batch_power });
        }
        let terms = &mut self.egraph.analysis;
        let key = format!("{op:?} {} {}", data.ty, data.batch_dims);
        let next = terms.meanings.len() as u32;
        let number = *terms.numbers.entry(key).or_insert(next);
        if number == next {
            terms.meanings.push(Meaning { op: Ok(Rc::new(op.clone())), data });
        }
        self.egraph.add(Term { op: number, children: children.to_vec() })
    }

    /// Adds an op. Returns `None` if it does not accept these operands.
    pub(crate) fn add(&mut self, op: impl Into<Op>, children: &[Id]) -> Option<Id> {
        let op = op.into();
        let children: Vec<Id> = children.iter().map(|&c| self.egraph.find(c)).collect();
        let key = (format!("{op:?}"), children);
        if let Some(known) = self.added.get(&key) {
            return *known;
        }
        let added = self.add_new(op, &key.1);
        self.added.insert(key, added);
        added
    }

    fn add_new(&mut self, op: Op, children: &[Id]) -> Option<Id> {
        let types: Vec<Rc<TensorType>> = children.iter().map(|&c| self.ty(c)).collect();
        let types: Vec<&TensorType> = types.iter().map(|t| &**t).collect();
        let ty = op.infer(&types).ok()?;
        let marks: Vec<u32> = children.iter().map(|&c| self.data(c).batch_dims).collect();
        let batch_dims = if marks.iter().all(|m| *m == 0) { 0 } else { carried(&op.rule(&types, &ty), &marks) };
        Some(self.term(&op, Data { ty: Rc::new(ty), batch_dims, fact: None, name: None }, children))
    }

    /// Records that two classes are equal. Values of different types are never equal, whatever a rule claims.
    pub(crate) fn union(&mut self, a: Id, b: Id) -> bool {
        self.ty(a) == self.ty(b) && self.egraph.union(a, b)
    }

    pub(crate) fn data(&self, id: Id) -> &Data {
        &self.egraph[self.egraph.find(id)].data
    }

    pub(crate) fn ty(&self, id: Id) -> Rc<TensorType> {
        self.data(id).ty.clone()
    }

    pub(crate) fn shape(&self, id: Id) -> Vec<u64> {
        self.data(id).ty.shape.clone()
    }

    pub(crate) fn same(&self, a: Id, b: Id) -> bool {
        self.egraph.find(a) == self.egraph.find(b)
    }

    /// The op of a term, or the index of its leaf as `Err`.
    pub(crate) fn meaning(&self, term: &Term) -> Result<Rc<Op>, usize> {
        self.egraph.analysis.meanings[term.op as usize].op.clone()
    }

    /// All ops of a class, oldest first.
    pub(crate) fn ops(&self, id: Id) -> Vec<Found> {
        let class = &self.egraph[self.egraph.find(id)];
        let mut terms: Vec<&Term> = class.nodes.iter().collect();
        terms.sort();
        terms.into_iter().filter_map(|t| self.meaning(t).ok().map(|op| (op, t.children.clone()))).collect()
    }

    /// The classes that have an op on a class, in order.
    pub(crate) fn users(&self, id: Id) -> Vec<Id> {
        let parents = self.egraph[self.egraph.find(id)].parents();
        let mut users: Vec<Id> = parents.map(|user| self.egraph.find(user)).collect();
        users.sort_unstable();
        users.dedup();
        users
    }

    /// The results of `f` for all ops of a class that it matches.
    pub(crate) fn find<T>(&self, id: Id, f: impl Fn(&Op, &[Id]) -> Option<T>) -> Vec<T> {
        self.ops(id).iter().filter_map(|(op, children)| f(op, children)).collect()
    }

    pub(crate) fn unary(&self, id: Id, wanted: Unary) -> Vec<Id> {
        self.find(id, |op, c| matches!(op, Op::Unary(u) if *u == wanted).then(|| c[0]))
    }

    pub(crate) fn binary(&self, id: Id, wanted: Binary) -> Vec<(Id, Id)> {
        self.find(id, |op, c| matches!(op, Op::Binary(b) if *b == wanted).then(|| (c[0], c[1])))
    }

    /// [`Builder::binary`] in either order.
    pub(crate) fn commuted(&self, id: Id, wanted: Binary) -> Vec<(Id, Id)> {
        self.binary(id, wanted).into_iter().flat_map(|(a, b)| [(a, b), (b, a)]).collect()
    }

    /// The number that all elements of a class have, if it does not depend on the batch.
    pub(crate) fn number(&self, id: Id) -> Option<f64> {
        match &self.data(id).fact {
            Some(Fact::Number { value, batch_power: 0 }) => Some(*value),
            _ => None,
        }
    }

    /// The class and those that it is converted from, between float types. They are equal except for rounding.
    pub(crate) fn unrounded(&self, id: Id) -> Vec<Id> {
        let mut all = vec![self.egraph.find(id)];
        let mut at = 0;
        while at < all.len() {
            let from = self.find(all[at], |op, c| matches!(op, Op::Convert(_)).then(|| c[0]));
            for x in from {
                let floats = self.ty(x).dtype.is_float() && self.ty(id).dtype.is_float();
                let x = self.egraph.find(x);
                if floats && !all.contains(&x) {
                    all.push(x);
                }
            }
            at += 1;
        }
        all
    }

    /// `(x, c)` if the class is `c x`.
    pub(crate) fn scaled(&self, id: Id) -> Vec<(Id, f64)> {
        let product = self.commuted(id, Binary::Multiply).into_iter().map(|(x, c)| (x, self.number(c)));
        let quotient = self.binary(id, Binary::Divide).into_iter().map(|(x, c)| (x, self.number(c).map(f64::recip)));
        product.chain(quotient).filter_map(|(x, c)| c.map(|c| (x, c))).collect()
    }

    /// `(x, dims)` if the class is a reduction of `x` over `dims`.
    pub(crate) fn reduced(&self, id: Id, reducer: Reducer) -> Vec<(Id, Vec<usize>)> {
        self.find(id, |op, c| match op {
            Op::Reduce(r) if r.reducer == reducer => Some((c[0], r.dims.clone())),
            _ => None,
        })
    }

    /// The class and those that it is reshaped from, if only dimensions of size 1 are added or removed.
    pub(crate) fn unsqueezed(&self, id: Id) -> Vec<Id> {
        let bare = |id: Id| self.shape(id).into_iter().filter(|&s| s != 1).collect::<Vec<u64>>();
        let from = self.find(id, |op, c| matches!(op, Op::Reshape(_)).then(|| c[0]));
        std::iter::once(id).chain(from.into_iter().filter(|&x| bare(x) == bare(id))).collect()
    }

    /// The values that the class repeats along exactly `dims`. Their shape lacks `dims`, or has size 1 there.
    pub(crate) fn statistics(&self, id: Id, dims: &[usize]) -> Vec<Id> {
        let shape = self.shape(id);
        let wanted: Vec<usize> = (0..shape.len()).filter(|d| !dims.contains(d) && shape[*d] != 1).collect();
        let repeated = self.find(id, |op, c| match op {
            Op::BroadcastInDim(b) => Some((c[0], b.dims.clone())),
            _ => None,
        });
        let mut all = Vec::new();
        for (x, to) in repeated {
            let from = self.shape(x);
            let kept: Vec<usize> = (0..from.len()).filter(|&d| from[d] != 1).map(|d| to[d]).collect();
            if kept == wanted {
                all.extend(self.unsqueezed(x));
            }
        }
        all
    }

    /// Returns true if the class is one number along `dims`, for each place in the other dimensions.
    pub(crate) fn is_statistic(&self, id: Id, dims: &[usize]) -> bool {
        self.number(id).is_some() || !self.statistics(id, dims).is_empty()
    }

    pub(crate) fn reshape(&mut self, x: Id, shape: &[u64]) -> Option<Id> {
        if self.shape(x) == shape {
            return Some(x);
        }
        self.add(Op::Reshape(Reshape { shape: shape.to_vec() }), &[x])
    }

    pub(crate) fn transpose(&mut self, x: Id, permutation: &[usize]) -> Option<Id> {
        if permutation.is_sorted() {
            return Some(x);
        }
        self.add(Op::Transpose(Transpose { permutation: permutation.to_vec() }), &[x])
    }

    /// `x` repeated to the shape of another value, with the batch dimensions of that value.
    pub(crate) fn broadcast(&mut self, x: Id, like: Id, dims: &[usize]) -> Option<Id> {
        let Data { ty, batch_dims, .. } = self.data(like).clone();
        if self.shape(x) == ty.shape && dims.is_sorted() {
            return Some(x);
        }
        let op = Op::BroadcastInDim(BroadcastInDim { shape: ty.shape.clone(), dims: dims.to_vec() });
        let ty = op.infer(&[&self.ty(x)]).ok()?;
        Some(self.term(&op, Data { ty: Rc::new(ty), batch_dims, fact: None, name: None }, &[x]))
    }

    pub(crate) fn convert(&mut self, x: Id, dtype: DType) -> Option<Id> {
        if self.ty(x).dtype == dtype {
            return Some(x);
        }
        self.add(Op::Convert(Convert { dtype }), &[x])
    }

    /// A number in the shape of another value, rounded to its type.
    pub(crate) fn filled(&mut self, like: Id, dtype: DType, number: f64) -> Id {
        let Data { ty, batch_dims, .. } = self.data(like).clone();
        let ty = ty.with_dtype(dtype);
        let literal = Literal::splat(ty.clone(), altiplano_ir::simplify::rounded(number, DType::F64, dtype));
        self.term(&Op::Constant(literal), Data { ty: Rc::new(ty), batch_dims, fact: None, name: None }, &[])
    }

    /// `c x`.
    pub(crate) fn times(&mut self, x: Id, c: f64) -> Option<Id> {
        if c == 1.0 {
            return Some(x);
        }
        let number = self.filled(x, self.ty(x).dtype, c);
        self.add(Op::Binary(Binary::Multiply), &[x, number])
    }
}

/// The batch dimensions of a result, derived from those of the operands. A dimension scales if its major factor does.
fn carried(rule: &ShardingRule, marks: &[u32]) -> u32 {
    let major = |dim: &Vec<u8>| dim.iter().copied().find(|&f| rule.factors[f as usize].size != 1);
    let mut scales = vec![false; rule.factors.len()];
    for (dims, marks) in rule.operands.iter().zip(marks) {
        for (_, dim) in dims.iter().enumerate().filter(|(d, _)| marks >> d & 1 == 1) {
            major(dim).into_iter().for_each(|f| scales[f as usize] = true);
        }
    }
    let dims = rule.result.iter().enumerate().filter(|(_, dim)| major(dim).is_some_and(|f| scales[f as usize]));
    dims.map(|(d, _)| 1 << d).sum()
}

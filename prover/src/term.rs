//! Global values as terms. Two values with one term are equal, over the reals and for all inputs.
//!
//! Terms are hash-consed: an op with equal attributes on equal terms is one term. The normal form knows that float
//! conversions change nothing, that addition is associative and commutative, and that constant factors pass through
//! products, sums over dimensions and sums over microbatches.

use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Binary, Direction, Microbatches, Op, Operator, Reduce, Reducer, Roll, Unary};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// A global value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Term(pub u32);

/// The operands of an op.
pub type Operands = SmallVec<[Term; 3]>;

/// The form of a term, which identifies it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Form {
    /// One number in all elements, of any shape, as the bits of an `f64`.
    Splat(u64),
    /// A value from outside.
    Leaf(String),
    /// A constant of several numbers, by its place in the list of literals.
    Dense(u32),
    /// An op on operands. The shapes are those of the result and, if an operand has none of its own, of the operands.
    Op(u32, Operands, Vec<Vec<u64>>),
    /// A sum of at least two multiples, or of one multiple other than 1, in the order of terms.
    Sum(Vec<(Term, u64)>),
    /// The sum of a value over all microbatches of a step.
    OverMicrobatches(Term),
}

/// An op of the reference on operands, with the term of its result.
#[derive(Clone, Debug)]
pub struct Application {
    pub op: Op,
    pub operand_types: Vec<TensorType>,
    pub ty: TensorType,
    pub result: Term,
    /// The node of [`Terms::graph`], if the op is one of that graph.
    pub origin: Option<ValueId>,
}

/// All terms, and the ops of the reference by their operands.
#[derive(Default)]
pub struct Terms {
    /// The forward and backward pass of the reference.
    pub graph: Arc<Graph>,
    of_graph: Vec<Term>,
    forms: Vec<Form>,
    shapes: Vec<Option<Vec<u64>>>,
    known: FxHashMap<Form, Term>,
    names: FxHashMap<Term, String>,
    /// Sums by the terms that they add.
    sums: FxHashMap<Vec<Term>, Vec<Term>>,
    ops: FxHashMap<String, u32>,
    op_of: Vec<Op>,
    /// Sums of counts that the reference compares.
    counts: Vec<Term>,
    literals: Vec<Literal>,
    applications: Vec<(Operands, Application)>,
    by_operands: FxHashMap<(&'static str, Operands), Vec<u32>>,
    by_result: FxHashMap<Term, Vec<u32>>,
    iotas: Vec<u32>,
    with_local_form: FxHashMap<Term, Vec<u32>>,
    microbatches: u32,
    /// True if factors are taken out of all linear ops, differences and quotients are sums and multiples, and names are
    /// places in a text. Programs that others wrote have factors in other places than the reference.
    linear: bool,
}

/// Constants of sums are compared up to this relative difference, which rounding of their products needs.
const CONSTANT_BITS: u32 = 14;

/// Returns true if constants differ by less than rounding of their products may make them differ.
fn is_close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= a.abs() / (1u64 << (52 - CONSTANT_BITS)) as f64
}

impl Terms {
    /// No terms, for steps of so many microbatches.
    pub fn new(microbatches: u32) -> Terms {
        Terms { microbatches, ..Terms::default() }
    }

    /// No terms, for a program that is compared with one that others wrote.
    pub fn of_pair() -> Terms {
        Terms { microbatches: 1, linear: true, ..Terms::default() }
    }

    fn intern(&mut self, form: Form, shape: Option<Vec<u64>>) -> Term {
        if let Some(&term) = self.known.get(&form) {
            return term;
        }
        let term = Term(self.forms.len() as u32);
        self.forms.push(form.clone());
        self.shapes.push(shape);
        self.known.insert(form, term);
        term
    }

    /// Keeps the forward and backward pass, whose nodes have these terms.
    pub fn keep_graph(&mut self, graph: Graph, values: Vec<Term>) {
        for (_, application) in &mut self.applications {
            application.origin = None;
        }
        for v in graph.values() {
            for &at in self.by_result.get(&values[v.index()]).into_iter().flatten() {
                let (_, application) = &mut self.applications[at as usize];
                if application.origin.is_none() && application.op == graph.node(v).op {
                    application.origin = Some(v);
                }
            }
        }
        self.graph = Arc::new(graph);
        self.of_graph = values;
    }

    /// The term of a node of [`Terms::graph`].
    pub fn of_node(&self, v: ValueId) -> Term {
        self.of_graph[v.index()]
    }

    /// The number of terms.
    pub fn len(&self) -> usize {
        self.forms.len()
    }

    /// Returns true if there are no terms.
    pub fn is_empty(&self) -> bool {
        self.forms.is_empty()
    }

    /// The constant with this number in all elements.
    pub fn splat(&mut self, value: f64) -> Term {
        self.intern(Form::Splat((value + 0.0).to_bits()), None)
    }

    /// The number in all elements, if the term is such a constant.
    pub fn as_splat(&self, term: Term) -> Option<f64> {
        match self.forms[term.0 as usize] {
            Form::Splat(bits) => Some(f64::from_bits(bits)),
            _ => None,
        }
    }

    /// A value from outside, such as a parameter.
    pub fn leaf(&mut self, name: String, shape: &[u64]) -> Term {
        let term = self.intern(Form::Leaf(name.clone()), Some(shape.to_vec()));
        self.names.entry(term).or_insert(name);
        term
    }

    /// A constant. Literals of one number have no shape.
    pub fn literal(&mut self, literal: &Literal) -> Term {
        if let Some(value) = literal.as_splat() {
            return self.splat(value);
        }
        let at = self.literals.iter().position(|l| l == literal).unwrap_or_else(|| {
            self.literals.push(literal.clone());
            self.literals.len() - 1
        });
        self.intern(Form::Dense(at as u32), Some(literal.ty.shape.clone()))
    }

    /// The shape of a term; `None` for constants of one number.
    pub fn shape(&self, term: Term) -> Option<&[u64]> {
        self.shapes[term.0 as usize].as_deref()
    }

    /// A name for messages.
    pub fn name(&self, term: Term) -> String {
        if let Some(name) = self.names.get(&term) {
            return name.clone();
        }
        match &self.forms[term.0 as usize] {
            Form::Splat(bits) => format!("the constant {}", f64::from_bits(*bits)),
            Form::Sum(parts) => {
                let shown: Vec<String> = parts.iter().take(3).map(|(t, c)| self.multiple(*t, *c)).collect();
                let more = if parts.len() > 3 { format!(" + {} more", parts.len() - 3) } else { String::new() };
                shown.join(" + ") + &more
            }
            Form::OverMicrobatches(of) => format!("sum over microbatches of {}", self.name(*of)),
            _ => "a value without a name".into(),
        }
    }

    fn multiple(&self, term: Term, factor: u64) -> String {
        match f64::from_bits(factor) {
            1.0 => self.name(term),
            factor => format!("{} x {}", factor as f32, self.name(term)),
        }
    }

    /// Names a term after the value that it first stands for.
    pub fn set_name(&mut self, term: Term, name: impl FnOnce() -> String) {
        self.names.entry(term).or_insert_with(name);
    }

    /// The multiples that a float term is the sum of. Constants are multiples of 1.
    fn parts(&mut self, term: Term) -> Vec<(Term, f64)> {
        match &self.forms[term.0 as usize] {
            Form::Sum(parts) => parts.iter().map(|&(t, c)| (t, f64::from_bits(c))).collect(),
            Form::Splat(bits) => {
                let value = f64::from_bits(*bits);
                if value.is_finite() { vec![(self.splat(1.0), value)] } else { vec![(term, 1.0)] }
            }
            _ => vec![(term, 1.0)],
        }
    }

    fn sum_of(&mut self, mut parts: Vec<(Term, f64)>) -> Term {
        parts.sort_by_key(|p| p.0);
        let mut merged: Vec<(Term, f64)> = Vec::with_capacity(parts.len());
        for (term, factor) in parts {
            match merged.last_mut() {
                Some(last) if last.0 == term => last.1 += factor,
                _ => merged.push((term, factor)),
            }
        }
        merged.retain(|p| p.1 != 0.0);
        let shape = merged.iter().find_map(|p| self.shapes[p.0.0 as usize].clone());
        match merged.as_slice() {
            [] => self.splat(0.0),
            &[(term, factor)] if self.as_splat(term) == Some(1.0) => self.splat(factor),
            &[(term, factor)] if is_close(factor, 1.0) => term,
            _ => {
                let exact = |c: f64| if is_close(c, 1.0) { 1.0 } else { c + 0.0 };
                let parts: Vec<(Term, u64)> = merged.iter().map(|&(t, c)| (t, exact(c).to_bits())).collect();
                self.interned_sum(parts, shape)
            }
        }
    }

    /// The sum with these factors, or a known one whose factors are as good as equal.
    fn interned_sum(&mut self, parts: Vec<(Term, u64)>, shape: Option<Vec<u64>>) -> Term {
        let of: Vec<Term> = parts.iter().map(|p| p.0).collect();
        let is_same = |&known: &Term| match &self.forms[known.0 as usize] {
            Form::Sum(have) => have.iter().zip(&parts).all(|(a, b)| is_close(f64::from_bits(a.1), f64::from_bits(b.1))),
            _ => false,
        };
        if let Some(&known) = self.sums.get(&of).and_then(|sums| sums.iter().find(|sum| is_same(sum))) {
            return known;
        }
        let term = self.intern(Form::Sum(parts), shape);
        self.sums.entry(of).or_default().push(term);
        term
    }

    /// The sum of float terms of one shape.
    pub fn add(&mut self, a: Term, b: Term) -> Term {
        let mut parts = self.parts(a);
        parts.extend(self.parts(b));
        self.sum_of(parts)
    }

    /// A multiple of a float term.
    pub fn scaled(&mut self, term: Term, factor: f64) -> Term {
        let parts = self.parts(term).into_iter().map(|(t, c)| (t, c * factor)).collect();
        self.sum_of(parts)
    }

    /// The sum of a float term over all microbatches.
    pub fn over_microbatches(&mut self, term: Term) -> Term {
        let mut sums = Vec::new();
        for (part, factor) in self.parts(term) {
            let shape = self.shapes[part.0 as usize].clone();
            sums.push((self.intern(Form::OverMicrobatches(part), shape), factor));
        }
        self.sum_of(sums)
    }

    /// A float term as a multiple of another, if it is no sum of several.
    fn multiple_of(&self, term: Term) -> (Term, f64) {
        match &self.forms[term.0 as usize] {
            Form::Sum(parts) if parts.len() == 1 => (parts[0].0, f64::from_bits(parts[0].1)),
            _ => (term, 1.0),
        }
    }

    /// A float term as a multiple of one that stands for all its multiples: of a sum, that with the first factor 1.
    fn base_of(&mut self, term: Term) -> (Term, f64) {
        match &self.forms[term.0 as usize] {
            Form::Sum(parts) if parts.len() > 1 => {
                let factor = f64::from_bits(parts[0].1);
                // A quotient by itself is 1 to the bit, which a product with the reciprocal may not be.
                let base: Vec<(Term, f64)> = parts.iter().map(|&(t, c)| (t, f64::from_bits(c) / factor)).collect();
                // Neither may a quotient overflow, nor vanish and with it a summand.
                match base.iter().all(|part| part.1.is_normal()) {
                    true => (self.sum_of(base), factor),
                    false => (term, 1.0),
                }
            }
            _ => self.multiple_of(term),
        }
    }

    /// Takes the factors of operands out of an op as far as it is linear, and returns the factor of the result.
    pub fn factored(&mut self, op: &Op, operands: &mut Operands, types: &[TensorType], ty: &TensorType) -> f64 {
        if !ty.dtype.is_float() || operands.is_empty() {
            return 1.0;
        }
        let types: Vec<&TensorType> = types.iter().collect();
        let mut sets = op.rule(&types, ty).linear;
        let divides = matches!(op, Op::Binary(Binary::Divide));
        if divides {
            sets.push(vec![1]);
        }
        let mut result = 1.0;
        for set in sets {
            let (mut based, mut zeros): (Vec<(usize, Term, f64)>, bool) = (Vec::new(), true);
            for i in set.iter().map(|&i| usize::from(i)) {
                match self.as_splat(operands[i]) {
                    Some(value) => zeros &= value == 0.0,
                    None => {
                        let (base, factor) = self.base_of(operands[i]);
                        based.push((i, base, factor));
                    }
                }
            }
            let Some(&(_, _, factor)) = based.first() else { continue };
            let common = based.iter().all(|b| is_close(b.2, factor));
            if factor == 1.0 || !zeros || !common || !factor.is_finite() || factor == 0.0 {
                continue;
            }
            for (i, base, _) in based {
                operands[i] = base;
            }
            result *= if divides && set == [1] { 1.0 / factor } else { factor };
        }
        result
    }

    /// The result of an op that the normal form of a pair of programs knows.
    fn linear_op(&mut self, op: &Op, operands: &[Term], types: &[&TensorType], ty: &TensorType) -> Option<Term> {
        if !self.linear || !ty.dtype.is_float() {
            return None;
        }
        match (op, operands) {
            (Op::Binary(Binary::Subtract), &[a, b]) => {
                let b = self.scaled(b, -1.0);
                return Some(self.add(a, b));
            }
            (Op::Unary(Unary::Negate), &[x]) => return Some(self.scaled(x, -1.0)),
            (Op::Binary(Binary::Divide), &[a, b]) => {
                if let Some(divisor) = self.as_splat(b).filter(|x| x.is_finite() && *x != 0.0) {
                    return Some(self.scaled(a, 1.0 / divisor));
                }
            }
            (Op::Reduce(Reduce { reducer: Reducer::Sum, dims }), &[x]) => {
                if let Some(value) = self.as_splat(x) {
                    let count: f64 = dims.iter().map(|&d| types[0].shape[d] as f64).product();
                    return Some(self.splat(value * count));
                }
            }
            _ => {}
        }
        if operands.iter().all(|&x| self.as_splat(x).is_some()) {
            return None;
        }
        let mut bases: Operands = operands.into();
        let owned: Vec<TensorType> = types.iter().map(|ty| (*ty).clone()).collect();
        let factor = self.factored(op, &mut bases, &owned, ty);
        if factor == 1.0 {
            return None;
        }
        let base = self.apply(op, &bases, types, ty);
        Some(self.scaled(base, factor))
    }

    /// The counts that a sum of positive multiples of counts consists of. Two such sums of the same counts have one sign.
    pub fn of_sign(&self, term: Term) -> Option<Vec<Term>> {
        let parts = match &self.forms[term.0 as usize] {
            Form::Sum(parts) => parts.clone(),
            Form::Splat(0) => Vec::new(),
            _ => vec![(term, 1f64.to_bits())],
        };
        let positive = |&(t, c): &(Term, u64)| (f64::from_bits(c) > 0.0 && self.is_count(t)).then_some(t);
        parts.iter().map(positive).collect()
    }

    /// Returns true if a term is a selection of 0 or 1, or a sum of such: it is never negative.
    fn is_count(&self, term: Term) -> bool {
        match &self.forms[term.0 as usize] {
            Form::Op(op, operands, _) => match (&self.op_of[*op as usize], operands.as_slice()) {
                (Op::Select(_), &[_, a, b]) => [a, b].iter().all(|&x| self.as_splat(x).is_some_and(|x| x >= 0.0)),
                (Op::Reduce(Reduce { reducer: Reducer::Sum, .. }), &[x]) => self.is_count(x),
                _ => false,
            },
            _ => false,
        }
    }

    /// The comparison of a count with 0 that the reference makes, if it compares a sum of the same counts.
    fn compared(&self, operands: &Operands) -> Option<Operands> {
        let &[count, zero] = operands.as_slice() else { return None };
        let sign = self.of_sign(count).filter(|_| self.as_splat(zero) == Some(0.0))?;
        let same = self.counts.iter().find(|&&other| self.of_sign(other).as_ref() == Some(&sign))?;
        Some([*same, zero].into_iter().collect())
    }

    /// If `term` is a sum that contains `part` once, the sum of all others.
    pub fn without(&mut self, term: Term, part: Term) -> Option<Term> {
        let mut parts = self.parts(term);
        let at = parts.iter().position(|p| *p == (part, 1.0))?;
        parts.remove(at);
        Some(self.sum_of(parts))
    }

    /// Returns true if a sum has some of the summands of another, and at least one if the other has any.
    pub fn is_part(&mut self, part: Term, whole: Term) -> bool {
        let (part, whole) = (self.parts(part), self.parts(whole));
        let some = whole.iter().all(|w| w.1 == 0.0) || part.iter().any(|p| p.1 != 0.0);
        some && part.iter().all(|p| p.1 == 0.0 || whole.contains(p))
    }

    /// The result of an op of the reference on terms.
    pub fn apply(&mut self, op: &Op, operands: &[Term], operand_types: &[&TensorType], ty: &TensorType) -> Term {
        let float = ty.dtype.is_float();
        match (op, operands) {
            (Op::HostCopy(_), _) => return operands[0],
            (Op::Convert(_), &[x]) if float && operand_types[0].dtype.is_float() => return x,
            (Op::Reshape(_), &[x]) if operand_types[0].shape == ty.shape => return x,
            (Op::Constant(literal), _) => return self.literal(literal),
            (Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_), &[x])
                if self.as_splat(x).is_some() =>
            {
                return x;
            }
            (Op::Binary(Binary::Add), &[a, b]) if float => return self.add(a, b),
            _ if self.linear => {
                if let Some(result) = self.linear_op(op, operands, operand_types, ty) {
                    return result;
                }
            }
            _ => {}
        }
        match (op, operands) {
            (Op::Binary(Binary::Multiply), &[a, b]) if float => return self.product(op, a, b, operand_types, ty),
            (Op::Reduce(Reduce { reducer: Reducer::Sum, .. }), &[x]) if float && self.as_splat(x).is_none() => {
                let (x, factor) = self.base_of(x);
                let sum = self.plain(op, &[x], operand_types, ty);
                return self.scaled(sum, factor);
            }
            (Op::Roll(roll), &[x]) => return self.rolled(roll, x, operand_types, ty),
            _ => {}
        }
        let numbers: Option<Vec<f64>> = operands.iter().map(|&x| self.as_splat(x)).collect();
        match numbers {
            Some(numbers) if op.is_elementwise() && !numbers.is_empty() => {
                let scalar = |(value, ty): (&f64, &&TensorType)| Tensor::scalar(ty.dtype, *value);
                let scalars: Vec<Tensor> = numbers.iter().zip(operand_types).map(scalar).collect();
                let value = op.eval(&scalars.iter().collect::<Vec<_>>(), &TensorType::scalar(ty.dtype));
                self.splat(value.data[0])
            }
            _ => self.plain(op, operands, operand_types, ty),
        }
    }

    /// The result of an op over microbatches: the ops that programs run in its place.
    fn of_all_microbatches(&mut self, op: Microbatches, x: Term, ty: &TensorType) -> Term {
        if self.microbatches <= 1 {
            return x;
        }
        let count = self.splat(f64::from(self.microbatches));
        let with_count = |terms: &mut Terms, x: Term, op: Binary| {
            let op = Op::Binary(op);
            let result = terms.apply(&op, &[x, count], &[ty, ty], ty);
            terms.record(&op, &[x, count], &[ty, ty], ty, result);
            result
        };
        match op {
            Microbatches::Times => with_count(self, x, Binary::Multiply),
            Microbatches::Sum => self.over_microbatches(x),
            Microbatches::Mean => {
                let sum = self.over_microbatches(x);
                with_count(self, sum, Binary::Divide)
            }
        }
    }

    fn product(&mut self, op: &Op, a: Term, b: Term, operand_types: &[&TensorType], ty: &TensorType) -> Term {
        match (self.as_splat(a), self.as_splat(b)) {
            (_, Some(factor)) if factor.is_finite() => return self.scaled(a, factor),
            (Some(factor), _) if factor.is_finite() => return self.scaled(b, factor),
            _ => {}
        }
        let ((a, left), (b, right)) = (self.base_of(a), self.base_of(b));
        let product = self.plain(op, &[a, b], operand_types, ty);
        self.scaled(product, left * right)
    }

    /// A roll of a roll is one roll.
    fn rolled(&mut self, roll: &Roll, x: Term, operand_types: &[&TensorType], ty: &TensorType) -> Term {
        let size = ty.shape[roll.dim].max(1);
        let before = self.by_result.get(&x).into_iter().flatten().find_map(|&at| {
            let (operands, application) = &self.applications[at as usize];
            match &application.op {
                Op::Roll(before) if before.dim == roll.dim => Some((operands[0], before.by)),
                _ => None,
            }
        });
        let (from, by) = match before {
            Some((from, by)) => (from, (by % size + roll.by % size) % size),
            None => (x, roll.by % size),
        };
        let op = Op::Roll(Roll { by, ..roll.clone() });
        let result = self.plain(&op, &[from], operand_types, ty);
        if from != x {
            self.record(&op, &[from], operand_types, ty, result);
        }
        result
    }

    fn plain(&mut self, op: &Op, operands: &[Term], operand_types: &[&TensorType], ty: &TensorType) -> Term {
        let name = format!("{op:?}");
        let next = self.ops.len() as u32;
        let at = *self.ops.entry(name).or_insert(next);
        if at == next {
            self.op_of.push(op.clone());
        }
        let mut shapes = vec![ty.shape.clone()];
        if operands.iter().any(|&x| self.as_splat(x).is_some()) {
            shapes.extend(operand_types.iter().map(|ty| ty.shape.clone()));
        }
        self.intern(Form::Op(at, operands.into(), shapes), Some(ty.shape.clone()))
    }

    /// Remembers that the reference applies an op to these operands.
    pub fn record(&mut self, op: &Op, operands: &[Term], operand_types: &[&TensorType], ty: &TensorType, result: Term) {
        let operands: Operands = operands.into();
        let types = || operand_types.iter().map(|t| (*t).clone()).collect::<Vec<_>>();
        let at = self.applications.len() as u32;
        let same = self.by_operands.entry((op.name(), operands.clone())).or_default();
        let is_known = |&at: &u32| {
            let known = &self.applications[at as usize].1;
            known.result == result && known.op == *op && known.ty == *ty && known.operand_types == types()
        };
        if same.iter().any(is_known) {
            return;
        }
        same.push(at);
        self.by_result.entry(result).or_default().push(at);
        if matches!(op, Op::Iota(_)) {
            self.iotas.push(at);
        }
        if matches!(op, Op::Compare(_)) && self.of_sign(operands[0]).is_some() {
            self.counts.push(operands[0]);
        }
        if crate::body::has_local_form(op) {
            for operand in &operands {
                self.with_local_form.entry(*operand).or_default().push(at);
            }
        }
        let application = Application { op: op.clone(), operand_types: types(), ty: ty.clone(), result, origin: None };
        self.applications.push((operands, application));
    }

    /// Remembers an op of the reference on operands without their factors.
    fn record_factored(&mut self, node: &Node, operands: &Operands, types: &[&TensorType]) {
        let (op, ty, node_name) = (&node.op, &node.ty, &node.name);
        if !self.linear {
            return;
        }
        let mut bases = operands.clone();
        let owned: Vec<TensorType> = types.iter().map(|ty| (*ty).clone()).collect();
        if self.factored(op, &mut bases, &owned, ty) != 1.0 {
            let base = self.apply(op, &bases, types, ty);
            self.record(op, &bases, types, ty, base);
            let name = || format!("a multiple of {} at {} of the sequential program", op.name(), node_name);
            self.set_name(base, name);
        }
    }

    /// The first summand whose factors differ in two terms, with both factors, in words.
    pub fn difference(&mut self, found: Term, wanted: Term) -> Option<String> {
        let (term, has, should) = self.odd_summands(found, wanted).into_iter().next()?;
        let name = self.name(term);
        (has != 0.0 && should != 0.0)
            .then(|| format!("it has {} times as much as it should of {name}", (has / should) as f32))
    }

    /// The summands whose factors differ in two terms, with both factors.
    pub fn odd_summands(&mut self, found: Term, wanted: Term) -> Vec<(Term, f64, f64)> {
        let (found, wanted) = (self.parts(found), self.parts(wanted));
        let of = |parts: &[(Term, f64)], term: Term| parts.iter().find(|p| p.0 == term).map_or(0.0, |p| p.1);
        let extra = found.iter().filter(|(term, _)| wanted.iter().all(|p| p.0 != *term));
        let all = wanted.iter().chain(extra).map(|p| (p.0, of(&found, p.0), of(&wanted, p.0)));
        all.filter(|(_, has, should)| !is_close(*has, *should)).collect()
    }

    /// The terms of which a term is a sum of multiples.
    pub fn summands(&mut self, term: Term) -> Vec<Term> {
        self.parts(term).into_iter().map(|part| part.0).collect()
    }

    /// The applications of ops of this name to these operands.
    pub fn applications(&self, op: &Op, operands: &Operands) -> Vec<u32> {
        let of = |operands: &Operands| self.by_operands.get(&(op.name(), operands.clone())).cloned();
        let greater = matches!(op, Op::Compare(compare) if compare.direction == Direction::Gt);
        let of_sign = || self.compared(operands).filter(|_| greater).and_then(|operands| of(&operands));
        of(operands).or_else(of_sign).unwrap_or_default()
    }

    /// Returns true if the reference applies ops of this name to some operands for which `wanted` holds.
    pub fn any(&self, op: &Op, wanted: impl Fn(&Operands) -> bool) -> bool {
        self.applications.iter().any(|(operands, of)| of.op.name() == op.name() && wanted(operands))
    }

    /// The applications with this result.
    pub fn applications_with(&self, result: Term) -> &[u32] {
        self.by_result.get(&result).map_or(&[], |all| all)
    }

    pub fn application(&self, at: u32) -> &(Operands, Application) {
        &self.applications[at as usize]
    }

    /// The applications to this term of ops whose parts take several local ops.
    pub fn with_local_form(&self, term: Term) -> &[u32] {
        self.with_local_form.get(&term).map_or(&[], |all| all)
    }

    /// The counts along a dimension that the reference contains.
    pub fn iotas(&self) -> &[u32] {
        &self.iotas
    }

    /// Adds the nodes of a graph of the reference from `first` on. `values` has the terms of the nodes before. Leaves
    /// must be among `values` or get a term from `leaf`.
    pub fn add_graph(
        &mut self,
        graph: &Graph,
        values: &mut Vec<Term>,
        mut leaf: impl FnMut(&mut Terms, &Op, &TensorType, u32) -> Option<Term>,
    ) {
        for at in values.len() as u32..graph.len() as u32 {
            let v = ValueId(at);
            let node = graph.node(v);
            if let Some(term) = leaf(self, &node.op, &node.ty, at) {
                values.push(term);
                continue;
            }
            let operands: Operands = node.operands.iter().map(|o| values[o.index()]).collect();
            let types = graph.operand_types(v);
            let result = match &node.op {
                Op::Microbatches(op) => self.of_all_microbatches(*op, operands[0], &node.ty),
                op => self.apply(op, &operands, &types, &node.ty),
            };
            if matches!(node.op, Op::Microbatches(_)) {
                values.push(result);
                continue;
            }
            if !matches!(node.op, Op::Constant(_) | Op::HostCopy(_)) && self.as_splat(result).is_none() {
                self.record(&node.op, &operands, &types, &node.ty, result);
                self.record_factored(node, &operands, &types);
            }
            let places = self.linear;
            self.set_name(result, || {
                if places {
                    return format!("{} at {} of the sequential program", node.op.name(), node.name);
                }
                format!(
                    "{v} = {}{}",
                    node.op.name(),
                    if node.name.is_empty() { String::new() } else { format!(" ({})", node.name) }
                )
            });
            values.push(result);
        }
    }
}

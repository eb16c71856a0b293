//! Facts about the values of one body, from those about the buffers that it reads.
//!
//! Ops are matched with the reference: an op on operands with known terms is the application of the reference to the
//! same terms, if its layouts and attributes allow it. A few ops compute parts of values by several local ops (lookups
//! in a split table, halos, rings). Their local form is built for the layouts at hand and compared with the body.

pub mod derivation;

use crate::layout::{Layout, local_size};
use crate::rules::{self, Given, Global};
use crate::term::{Application, Operands, Term, Terms};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Binary, Iota, Local, Op, Operator, Reduce, Reducer, Unary};
use altiplano_ir::program::{Body, BufferId, Phase};
use altiplano_ir::types::TensorType;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;

/// A term and the layout in which a local value is its part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fact {
    pub term: Term,
    pub layout: Layout,
}

/// The most facts about one value.
const MOST_FACTS: usize = 64;

/// A body under examination.
pub struct Examined<'a> {
    terms: &'a mut Terms,
    mesh: &'a Mesh,
    graph: &'a Graph,
    /// True in bodies that add up values of all parameters or update them, in which multiples and sums occur that the
    /// reference does not have.
    sums: bool,
    /// True in bodies of norms, all of whose sums are shares of one that the reference has.
    adds_up: bool,
    /// True if others wrote the program: it may have multiples, shares and ops that the reference does not have.
    pair: bool,
    fused_loss: bool,
    /// The number of each distinct local value.
    numbers: FxHashMap<(String, Vec<u32>), u32>,
    of_value: Vec<u32>,
    facts: Vec<Vec<Fact>>,
    types: Vec<TensorType>,
    /// The values of each term, for local forms.
    holders: FxHashMap<Term, Vec<u32>>,
    tried: FxHashSet<(u32, Vec<(u32, usize)>)>,
    /// The value at hand.
    at: ValueId,
    /// Values whose facts rest on shares (rule 8). They are right in few programs, so a gap names them.
    suspects: Vec<(ValueId, &'static str)>,
}

impl<'a> Examined<'a> {
    /// Examines a body. `read` has the facts about each buffer that it reads.
    pub fn new(
        terms: &'a mut Terms,
        mesh: &'a Mesh,
        body: &'a Body,
        fused_loss: bool,
        read: &dyn Fn(BufferId) -> Vec<Fact>,
    ) -> Examined<'a> {
        let mut examined = Examined::empty(terms, mesh, &body.graph);
        examined.sums = matches!(body.phase, Phase::Norm | Phase::Update | Phase::Totals);
        examined.adds_up = body.phase == Phase::Norm;
        examined.fused_loss = fused_loss;
        let buffers: FxHashMap<ValueId, BufferId> = body.reads.iter().copied().collect();
        examined.all(&|v| buffers.get(&v).map(|&buffer| read(buffer)));
        examined
    }

    /// Examines a program that others wrote. `read` has the facts about its leaves.
    pub fn of_pair(
        terms: &'a mut Terms,
        mesh: &'a Mesh,
        graph: &'a Graph,
        read: &dyn Fn(ValueId) -> Option<Vec<Fact>>,
    ) -> Examined<'a> {
        let mut examined = Examined::empty(terms, mesh, graph);
        (examined.sums, examined.pair) = (true, true);
        examined.all(read);
        examined
    }

    fn empty(terms: &'a mut Terms, mesh: &'a Mesh, graph: &'a Graph) -> Examined<'a> {
        Examined {
            terms,
            mesh,
            graph,
            sums: false,
            adds_up: false,
            pair: false,
            fused_loss: false,
            numbers: FxHashMap::default(),
            of_value: Vec::with_capacity(graph.len()),
            facts: Vec::new(),
            types: Vec::new(),
            holders: FxHashMap::default(),
            tried: FxHashSet::default(),
            at: ValueId(0),
            suspects: Vec::new(),
        }
    }

    /// Examines all values in order. `read` has the facts about the leaves that come from outside.
    fn all(&mut self, read: &dyn Fn(ValueId) -> Option<Vec<Fact>>) {
        let graph = self.graph;
        for v in graph.values() {
            self.at = v;
            if graph.node(v).operands.iter().any(|o| o.0 >= v.0) {
                // An ill-formed graph: nothing is known of the rest.
                let number = self.number((format!("ill-formed {v}"), Vec::new()), &graph.node(v).ty);
                self.of_value.push(number);
                continue;
            }
            let number = self.number_of(graph, v);
            self.of_value.push(number);
            if !self.facts[number as usize].is_empty() {
                continue;
            }
            let node = graph.node(v);
            let typed = node.op.infer(&graph.operand_types(v)).is_ok_and(|ty| ty == node.ty);
            let facts = match (read(v), &node.op) {
                _ if !typed => Vec::new(),
                (Some(facts), Op::Input(_)) => facts,
                (Some(_), _) => Vec::new(),
                (None, _) => self.examine(v),
            };
            self.add(number, facts);
        }
    }

    /// The facts about a value.
    pub fn of(&self, v: ValueId) -> &[Fact] {
        &self.facts[self.of_value[v.index()] as usize]
    }

    /// Explains why nothing is known of a value: the first value on the way to it that is not what it should be, and what
    /// is known of its operands. Values of the reference have terms below `known`.
    pub fn first_unknown(&self, v: ValueId, known: usize) -> (ValueId, String) {
        let positions = self.positions();
        let is_unknown = |v: ValueId| self.of(v).is_empty() && !positions[v.index()];
        let mut pending = vec![v];
        let mut seen = FxHashSet::default();
        let mut at = v;
        while let Some(next) = pending.pop() {
            if is_unknown(next) && seen.insert(next) {
                let operands = &self.graph.node(next).operands;
                if !operands.iter().any(|o| is_unknown(*o)) {
                    at = at.min(next);
                }
                pending.extend(operands);
            }
        }
        let communicates = matches!(self.graph.node(at).op, Op::Collective(_));
        let at = if self.pair || self.adds_up || communicates { at } else { self.first_new(at, known) };
        let at = self.pending_sum(at).or_else(|| self.position(at, &positions)).unwrap_or(at);
        (at, self.described(at))
    }

    /// The value where sums or multiples that one device does not compute began, on the way to a value.
    fn first_new(&self, mut at: ValueId, known: usize) -> ValueId {
        let is_new = |v: &ValueId| {
            let facts = self.of(*v);
            !facts.is_empty() && facts.iter().all(|f| f.term.0 as usize >= known)
        };
        while let Some(&before) = self.graph.node(at).operands.iter().find(|o| is_new(o)) {
            at = before;
        }
        at
    }

    /// For an op that adds a whole value and a partial sum, the value where the sum began that nothing reduced.
    fn pending_sum(&self, at: ValueId) -> Option<ValueId> {
        let is_partial =
            |v: ValueId| !self.of(v).is_empty() && self.of(v).iter().all(|fact| !fact.layout.partial.is_empty());
        let operands = &self.graph.node(at).operands;
        let whole = operands.iter().any(|o| self.of(*o).iter().any(|fact| fact.layout.partial.is_empty()));
        let mut from = operands.iter().copied().find(|o| whole && is_partial(*o))?;
        while let Some(&before) = self.graph.node(from).operands.iter().find(|o| is_partial(**o)) {
            from = before;
        }
        Some(from)
    }

    /// The value that computes a device's position for an op, if that is all that is unknown of the op's operands.
    fn position(&self, at: ValueId, positions: &[bool]) -> Option<ValueId> {
        let of_operands = |v: ValueId| {
            let operands = self.graph.node(v).operands.iter();
            operands.copied().find(|o| positions[o.index()] && self.of(*o).is_empty())
        };
        // Counts are unknown until a position is added to them.
        let counts = matches!(self.graph.node(at).op, Op::Iota(_));
        let uses = |user: &ValueId| self.graph.node(*user).operands.contains(&at);
        match counts {
            true => self.graph.values().skip(at.index()).filter(uses).find_map(of_operands),
            false => of_operands(at),
        }
    }

    /// The leaf that a value is computed from by ops of one operand that is no constant.
    pub fn leaf(&self, mut v: ValueId) -> Option<ValueId> {
        let is_constant =
            |o: &ValueId| self.of(*o).iter().any(|f| self.terms.as_splat(f.term).is_some_and(|x| x.is_finite()));
        loop {
            let node = self.graph.node(v);
            if matches!(node.op, Op::Input(_)) {
                return Some(v);
            }
            let mut varying = node.operands.iter().filter(|o| !is_constant(o));
            // Operands of an ill-formed graph may come later.
            let before = *varying.next().filter(|o| **o < v)?;
            if varying.any(|o| *o != before) {
                return None;
            }
            v = before;
        }
    }

    /// The leaf from which an operand of an unknown value is computed. Of several operands, the one whose place in the
    /// reference another value has beside the other operands.
    pub fn leaf_of_operand(&self, v: ValueId) -> Option<ValueId> {
        let node = self.graph.node(v);
        let leaves: Vec<(usize, ValueId)> =
            node.operands.iter().enumerate().filter_map(|(i, o)| Some((i, self.leaf(*o)?))).collect();
        let others_match = |place: usize, operands: &Operands| {
            let same = |(i, (o, term)): (usize, (&ValueId, &Term))| {
                i == place || self.of(*o).iter().any(|fact| fact.term == *term)
            };
            operands.len() == node.operands.len() && node.operands.iter().zip(operands).enumerate().all(same)
        };
        let replaceable = |(place, _): &&(usize, ValueId)| self.terms.any(&node.op, |of| others_match(*place, of));
        leaves.iter().find(replaceable).or(leaves.first()).map(|leaf| leaf.1)
    }

    /// The last product with a constant on the way to a value.
    pub fn scaled_at(&self, v: ValueId) -> Option<ValueId> {
        const MOST_OPS: usize = 8;
        let is_constant = |o: &ValueId| self.of(*o).iter().any(|f| self.terms.as_splat(f.term).is_some());
        let mut at = v;
        for _ in 0..MOST_OPS {
            let node = self.graph.node(at);
            let scales = matches!(node.op, Op::Binary(Binary::Multiply | Binary::Divide));
            if scales && node.operands.iter().any(is_constant) {
                return Some(at);
            }
            at = *node.operands.iter().find(|o| !is_constant(o))?;
        }
        None
    }

    /// The last value on the way to a value that sums copies, or adds a summand to a value that every device holds.
    pub fn suspect(&self, v: ValueId) -> Option<(ValueId, &'static str)> {
        let mut needed = vec![false; self.graph.len()];
        needed[v.index()] = true;
        for at in (0..=v.index()).rev() {
            if needed[at] {
                self.graph.nodes[at].operands.iter().for_each(|o| needed[o.index()] = true);
            }
        }
        self.suspects.iter().rev().find(|(at, _)| needed[at.index()]).copied()
    }

    /// The summand of a term whose factor is not the one wanted, in words.
    pub fn difference(&mut self, found: Term, wanted: Term) -> Option<String> {
        self.terms.difference(found, wanted)
    }

    /// A fact in words.
    pub fn fact_text(&self, fact: &Fact) -> String {
        format!("{} in {}", self.terms.name(fact.term), fact.layout.text(self.mesh))
    }

    /// The name of a value in messages: its place in the text, if others wrote it.
    pub fn label(&self, v: ValueId) -> String {
        match &self.graph.node(v).name {
            name if self.pair && !name.is_empty() => name.clone(),
            _ => v.to_string(),
        }
    }

    /// True for values that depend on nothing but a device's position.
    fn positions(&self) -> Vec<bool> {
        let mut positions: Vec<bool> = Vec::with_capacity(self.graph.len());
        for v in self.graph.values() {
            let node = self.graph.node(v);
            let constant = |o: &ValueId| matches!(self.graph.node(*o).op, Op::Constant(_));
            let operands = node.operands.iter().all(|o| constant(o) || positions.get(o.index()) == Some(&true));
            let some = node.operands.iter().any(|o| positions.get(o.index()) == Some(&true));
            positions.push(matches!(node.op, Op::AxisIndex(_)) || operands && some);
        }
        positions
    }

    /// The facts of an op's operands, and its result in words.
    fn described(&self, v: ValueId) -> String {
        let node = self.graph.node(v);
        let known = |o: &ValueId| match self.of(*o).first() {
            Some(fact) => format!("{} is {}", self.label(*o), self.fact_text(fact)),
            None => format!("{} is no part of a value of one device", self.label(*o)),
        };
        let operands: Vec<String> = node.operands.iter().map(known).collect();
        let of = if operands.is_empty() { String::new() } else { format!(": {}", operands.join("; ")) };
        format!("{} makes no part of a value of one device{of}", node.op.name())
    }

    fn number_of(&mut self, graph: &Graph, v: ValueId) -> u32 {
        let node = graph.node(v);
        let operands: Vec<u32> = node.operands.iter().map(|o| self.of_value[o.index()]).collect();
        let op = if node.op.is_leaf() { format!("leaf {v}") } else { written(&node.op) };
        self.number((op, operands), &node.ty)
    }

    fn number(&mut self, key: (String, Vec<u32>), ty: &TensorType) -> u32 {
        let next = self.facts.len() as u32;
        let number = *self.numbers.entry(key).or_insert(next);
        if number == next {
            self.facts.push(Vec::new());
            self.types.push(ty.clone());
        }
        number
    }

    fn add(&mut self, number: u32, facts: Vec<Fact>) {
        for fact in facts {
            let known = &mut self.facts[number as usize];
            if !known.contains(&fact) && known.len() < MOST_FACTS {
                self.holders.entry(fact.term).or_default().push(number);
                known.push(fact);
            }
        }
    }

    /// The facts about a value that follow from those about its operands.
    fn examine(&mut self, v: ValueId) -> Vec<Fact> {
        let node = self.graph.node(v);
        let operands: Vec<u32> = node.operands.iter().map(|o| self.of_value[o.index()]).collect();
        let float = node.ty.dtype.is_float();
        match &node.op {
            Op::Constant(literal) => {
                let (term, rank) = (self.terms.literal(literal), node.ty.rank());
                let layout =
                    if literal.as_splat().is_some() { Layout::free(rank) } else { Layout::whole(&node.ty.shape) };
                return vec![Fact { term, layout }];
            }
            Op::AxisIndex(_) | Op::Parameter(_) | Op::Input(_) => return Vec::new(),
            Op::HostCopy(_) => return self.facts[operands[0] as usize].clone(),
            Op::Convert(_) if float && self.types[operands[0] as usize].dtype.is_float() => {
                return self.facts[operands[0] as usize].clone();
            }
            Op::Iota(iota) => return self.counts(iota, &node.ty, &[]),
            Op::Collective(op) if op.mesh == *self.mesh => {
                let found = self.after_collective(&op.collective, operands[0]);
                if found.is_empty() {
                    // A round of a ring, or the edges of neighbours.
                    self.build_local_forms(v);
                    return self.of(v).to_vec();
                }
                return found;
            }
            Op::Collective(_) => return Vec::new(),
            Op::Unary(Unary::Negate) if float && self.pair => return self.multiples(operands[0], -1.0),
            Op::Binary(Binary::Subtract) if float && self.pair => {
                return self.sum([operands[0], operands[1]], [1.0, -1.0]);
            }
            Op::Binary(Binary::Add) if float => {
                let found = self.sum([operands[0], operands[1]], [1.0; 2]);
                return if found.is_empty() { self.shifted_count(&node.operands, &node.ty) } else { found };
            }
            Op::Binary(Binary::Multiply) if float && operands.iter().any(|&o| self.is_zero(o)) => {
                return vec![Fact { term: self.terms.splat(0.0), layout: Layout::free(node.ty.rank()) }];
            }
            _ => {}
        }
        let mut found = match node.op {
            _ if float && self.pair => self.constant_multiples(&node.op, &operands),
            Op::Reshape(_) if self.types[operands[0] as usize].shape == node.ty.shape => {
                self.facts[operands[0] as usize].clone()
            }
            _ => Vec::new(),
        };
        found.extend(self.applied(&node.op, &operands, &node.ty));
        if found.is_empty() && self.sums {
            found = self.unknown(&node.op, &operands, &node.ty);
        }
        if let (true, Op::Binary(Binary::Add)) = (found.is_empty(), &node.op) {
            found = self.shifted_count(&node.operands, &node.ty);
        }
        if found.is_empty() {
            self.build_local_forms(v);
            found = self.of(v).to_vec();
            if found.is_empty() {
                found = self.applied(&node.op, &operands, &node.ty);
            }
        }
        found
    }

    /// True if a value is zero on every device.
    fn is_zero(&self, number: u32) -> bool {
        let is_zero = |fact: &Fact| self.terms.as_splat(fact.term) == Some(0.0) && fact.layout.partial.is_empty();
        self.facts[number as usize].iter().any(is_zero)
    }

    fn after_collective(&mut self, op: &altiplano_ir::reshard::Collective, operand: u32) -> Vec<Fact> {
        let mut found = Vec::new();
        for fact in self.facts[operand as usize].clone() {
            let Some((layout, factor)) = rules::collective(op, &fact.layout, self.mesh) else { continue };
            let term = match factor {
                1.0 => fact.term,
                _ if self.shares(operand) => {
                    self.suspects.push((self.at, "sums equal values of several devices"));
                    self.terms.scaled(fact.term, factor)
                }
                _ => continue,
            };
            found.push(Fact { term, layout });
        }
        found
    }

    /// True if a value that several devices hold may count as a summand of its multiple (rule 8).
    fn shares(&self, number: u32) -> bool {
        let ty = &self.types[number as usize];
        ty.dtype.is_float() && (self.pair || self.sums && ty.rank() == 0)
    }

    /// The facts about the sum of multiples of two values.
    fn sum(&mut self, values: [u32; 2], of_each: [f64; 2]) -> Vec<Fact> {
        let mut found = Vec::new();
        let [a, b] = values;
        for x in self.facts[a as usize].clone() {
            for y in self.facts[b as usize].clone() {
                let (given_x, given_y) = (self.given(a, &x), self.given(b, &y));
                let shares = self.shares(a);
                let Some((layout, factors)) = rules::common(given_x, given_y, shares, self.mesh) else { continue };
                let mut terms = [x.term, y.term];
                if factors != [1.0; 2] {
                    self.suspects.push((self.at, "adds a summand to a value that every device holds"));
                }
                let factors = [factors[0] * of_each[0], factors[1] * of_each[1]];
                for (term, factor) in terms.iter_mut().zip(factors).filter(|(_, factor)| *factor != 1.0) {
                    *term = self.terms.scaled(*term, factor);
                }
                found.push(Fact { term: self.terms.add(terms[0], terms[1]), layout });
            }
        }
        found
    }

    /// The facts about a multiple of a value (rule 10).
    fn multiples(&mut self, number: u32, factor: f64) -> Vec<Fact> {
        let facts = self.facts[number as usize].clone();
        let scalable = facts.into_iter().filter(|fact| rules::is_scalable(&fact.layout));
        scalable.map(|fact| Fact { term: self.terms.scaled(fact.term, factor), ..fact }).collect()
    }

    /// The facts about a product with a constant, a quotient by one, or a sum of equal constants.
    fn constant_multiples(&mut self, op: &Op, operands: &[u32]) -> Vec<Fact> {
        let number = |o: u32| {
            let constant = |fact: &Fact| self.terms.as_splat(fact.term).filter(|_| fact.layout.partial.is_empty());
            self.facts[o as usize].iter().find_map(constant).filter(|x| x.is_finite())
        };
        match (op, operands) {
            (Op::Binary(Binary::Multiply), &[a, b]) => match (number(a), number(b)) {
                (_, Some(factor)) => self.multiples(a, factor),
                (Some(factor), _) => self.multiples(b, factor),
                _ => Vec::new(),
            },
            (Op::Binary(Binary::Divide), &[a, b]) => match number(b).filter(|x| *x != 0.0) {
                Some(divisor) => self.multiples(a, 1.0 / divisor),
                None => Vec::new(),
            },
            (Op::Reduce(reduce), &[x]) if reduce.reducer == Reducer::Sum => match number(x) {
                Some(value) => {
                    let shape = &self.types[x as usize].shape;
                    let count: f64 = reduce.dims.iter().map(|&d| shape[d] as f64).product();
                    let layout = Layout::free(shape.len() - reduce.dims.len());
                    vec![Fact { term: self.terms.splat(value * count), layout }]
                }
                None => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    fn given<'f>(&'f self, number: u32, fact: &'f Fact) -> Given<'f> {
        let is_zero = self.terms.as_splat(fact.term) == Some(0.0);
        Given { layout: &fact.layout, local: &self.types[number as usize].shape, is_zero }
    }

    /// All choices of one fact about each operand.
    fn choices(&self, operands: &[u32]) -> Vec<Vec<Fact>> {
        let mut all = vec![Vec::new()];
        for &operand in operands {
            let of_operand = &self.facts[operand as usize];
            all = all
                .iter()
                .flat_map(|chosen: &Vec<Fact>| {
                    of_operand.iter().map(move |fact| chosen.iter().chain([fact]).cloned().collect())
                })
                .take(MOST_FACTS * 4)
                .collect();
        }
        all
    }

    /// The facts that follow if the reference applies the same op to the operands' terms.
    fn applied(&mut self, op: &Op, operands: &[u32], ty: &TensorType) -> Vec<Fact> {
        let mut found = Vec::new();
        for facts in self.choices(operands) {
            let mut of: Operands = facts.iter().map(|f| f.term).collect();
            let constant = !of.is_empty() && of.iter().all(|&t| self.terms.as_splat(t).is_some());
            let moves = matches!(op, Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_));
            if constant && (op.is_elementwise() || moves) && facts.iter().all(|f| f.layout.partial.is_empty()) {
                let types: Vec<TensorType> = operands.iter().map(|&o| self.types[o as usize].clone()).collect();
                let term = self.terms.apply(op, &of, &types.iter().collect::<Vec<_>>(), ty);
                found.push(Fact { term, layout: Layout::free(ty.rank()) });
                continue;
            }
            let factor =
                if self.pair { self.terms.factored(op, &mut of, &self.local_types(operands), ty) } else { 1.0 };
            for at in self.terms.applications(op, &of) {
                let (_, application) = self.terms.application(at);
                if !has_local_form(&application.op) {
                    let (global_op, types, result) =
                        (application.op.clone(), application.operand_types.clone(), application.ty.clone());
                    let term = application.result;
                    let term = if factor == 1.0 { term } else { self.terms.scaled(term, factor) };
                    let layouts = self.layouts(op, operands, &facts, ty, (&global_op, &types, &result));
                    found.extend(layouts.into_iter().map(|layout| Fact { term, layout }));
                }
            }
        }
        found
    }

    /// The layouts of the result of a local op that is a part of a global one.
    fn layouts(
        &self,
        op: &Op,
        operands: &[u32],
        facts: &[Fact],
        ty: &TensorType,
        (global_op, types, result): (&Op, &[TensorType], &TensorType),
    ) -> Vec<Layout> {
        // Linearity depends on the element types at hand, not on those of an equal value.
        let with_types = |(of, &number): (&TensorType, &u32)| of.with_dtype(self.types[number as usize].dtype);
        let types: Vec<TensorType> = types.iter().zip(operands).map(with_types).collect();
        let result = result.with_dtype(ty.dtype);
        let global = Global { op: global_op, operands: &types, result: &result };
        let given: Vec<Given<'_>> = operands.iter().zip(facts).map(|(&o, fact)| self.given(o, fact)).collect();
        let Some(splits) = rules::splits(global, &given, self.mesh) else { return Vec::new() };
        let layouts = rules::results(global, &splits, &ty.shape, self.mesh);
        // Shapes fit by now, which resizing takes for granted.
        if layouts.is_empty() || !rules::is_resized(global, op, &given, &ty.shape) {
            return Vec::new();
        }
        layouts
    }

    fn local_types(&self, operands: &[u32]) -> Vec<TensorType> {
        operands.iter().map(|&o| self.types[o as usize].clone()).collect()
    }

    /// The facts about a value that the reference does not have: a multiple or a sum over all elements or, in a program of
    /// others, any op whose form does not depend on sizes.
    fn unknown(&mut self, op: &Op, operands: &[u32], ty: &TensorType) -> Vec<Fact> {
        let reduces = matches!(op, Op::Reduce(Reduce { reducer: Reducer::Sum, .. })) && ty.rank() == 0;
        let multiplies = matches!(op, Op::Binary(Binary::Multiply));
        let sizeless = matches!(op, Op::Reduce(_) | Op::Transpose(_) | Op::DotGeneral(_)) || op.is_elementwise();
        if !((reduces || multiplies) && ty.dtype.is_float() || self.pair && sizeless) {
            return Vec::new();
        }
        let mut found = Vec::new();
        for facts in self.choices(operands) {
            let shapes: Vec<Option<Vec<u64>>> =
                facts.iter().map(|f| self.terms.shape(f.term).map(<[u64]>::to_vec)).collect();
            let common = shapes.iter().flatten().next().filter(|_| op.is_elementwise()).cloned();
            let shapes: Option<Vec<Vec<u64>>> =
                shapes.into_iter().map(|shape| shape.or_else(|| common.clone())).collect();
            let Some(shapes) = shapes else { continue };
            let types: Vec<TensorType> =
                operands.iter().zip(shapes).map(|(&o, shape)| self.types[o as usize].with_shape(shape)).collect();
            let types: Vec<&TensorType> = types.iter().collect();
            let Ok(result) = op.infer(&types) else { continue };
            let owned: Vec<TensorType> = types.iter().map(|t| (*t).clone()).collect();
            let layouts = self.layouts(op, operands, &facts, ty, (op, &owned, &result));
            if layouts.is_empty() {
                continue;
            }
            let terms: Vec<Term> = facts.iter().map(|f| f.term).collect();
            let term = self.terms.apply(op, &terms, &types, &result);
            found.extend(layouts.into_iter().map(|layout| Fact { term, layout }));
        }
        found
    }

    /// The counts of the reference that a local count over `axes` is a part of.
    fn counts(&self, iota: &Iota, ty: &TensorType, axes: &[AxisId]) -> Vec<Fact> {
        let mut found = Vec::new();
        for &at in self.terms.iotas() {
            let (_, application) = self.terms.application(at);
            let Op::Iota(global) = &application.op else { continue };
            let (dim, size) = (iota.dim, ty.shape[iota.dim]);
            if global.dim != dim || global.ty.dtype != ty.dtype || global.ty.rank() != ty.rank() {
                continue;
            }
            if let Some(counted) = rules::counted(global.ty.shape[dim], size, axes, self.mesh) {
                let mut layout = Layout::free(ty.rank());
                layout.dims[dim] = Some(counted);
                found.push(Fact { term: application.result, layout });
            }
        }
        found
    }

    /// Recognises a count plus `axis_index * size`.
    fn shifted_count(&self, operands: &[ValueId], ty: &TensorType) -> Vec<Fact> {
        let &[count, offset] = operands else { return Vec::new() };
        let node = |v: ValueId| self.graph.node(v);
        let swapped = matches!(node(offset).op, Op::Iota(_));
        let (count, offset) = if swapped { (offset, count) } else { (count, offset) };
        let Op::Iota(iota) = &node(count).op else { return Vec::new() };
        let offset = match &node(offset).op {
            Op::BroadcastInDim(op) if op.dims.is_empty() => node(offset).operands[0],
            _ => offset,
        };
        let (Op::Binary(Binary::Multiply), &[index, size]) = (&node(offset).op, node(offset).operands.as_slice())
        else {
            return Vec::new();
        };
        match (&node(index).op, &node(size).op) {
            (Op::AxisIndex(index), Op::Constant(size))
                if index.mesh == *self.mesh && size.as_splat() == Some(ty.shape[iota.dim] as f64) =>
            {
                self.counts(iota, ty, &index.axes)
            }
            _ => Vec::new(),
        }
    }
}

/// Returns true if a part of an op's result is computed by more than the op itself.
pub fn has_local_form(op: &Op) -> bool {
    matches!(
        op,
        Op::Gather(_)
            | Op::Scatter(_)
            | Op::ScatterAdd(_)
            | Op::Convolution(_)
            | Op::ReduceWindow(_)
            | Op::Roll(_)
            | Op::GroupedDot(_)
            | Op::GroupedOuter(_)
    )
}

/// An op in words that tell it from any other.
fn written(op: &Op) -> String {
    format!("{op:?}")
}

/// Local forms.
impl Examined<'_> {
    /// Builds the local forms of all applications that a value could belong to: those that take a term which is among
    /// the sources of the value.
    fn build_local_forms(&mut self, v: ValueId) {
        // A local form may begin with ops that the reference has too, such as the limits of an index.
        const FAR: usize = 64;
        let mut sources = Vec::new();
        let mut pending: VecDeque<ValueId> = self.graph.node(v).operands.iter().copied().collect();
        let mut seen = FxHashSet::default();
        while let Some(source) = pending.pop_front().filter(|_| seen.len() < FAR) {
            if seen.insert(source) {
                sources.extend(self.of(source).iter().map(|f| f.term));
                pending.extend(&self.graph.node(source).operands);
            }
        }
        sources.sort_unstable();
        sources.dedup();
        let applications: Vec<u32> =
            sources.iter().flat_map(|&term| self.terms.with_local_form(term).to_vec()).collect();
        for at in applications {
            self.build_local_form(at);
        }
    }

    /// Builds the local forms of one application, for all layouts of its operands in this body.
    fn build_local_form(&mut self, at: u32) {
        let (terms, application) = self.terms.application(at).clone();
        let mut choices: Vec<Vec<(u32, usize)>> = vec![Vec::new()];
        for &term in &terms {
            let held = self.held(term);
            choices = choices
                .iter()
                .flat_map(|chosen| held.iter().map(move |h| chosen.iter().copied().chain([*h]).collect()))
                .take(256)
                .collect();
        }
        for chosen in choices {
            if self.tried.insert((at, chosen.clone())) {
                let facts: Vec<Fact> = chosen.iter().map(|&(n, i)| self.facts[n as usize][i].clone()).collect();
                let mut form = Form::default();
                let operands = chosen.iter().map(|c| form.leaf(c.0, &self.types[c.0 as usize])).collect();
                self.build(&application, form, operands, &facts);
            }
        }
        if let (Op::Gather(_), Some(origin), true) = (&application.op, application.origin, self.fused_loss) {
            self.build_lookup(at, &application, origin, terms[1]);
        }
    }

    /// The values with a fact about a term, and the position of the fact.
    fn held(&self, term: Term) -> Vec<(u32, usize)> {
        let mut held = Vec::new();
        for &number in self.holders.get(&term).into_iter().flatten() {
            let facts = self.facts[number as usize].iter().enumerate();
            held.extend(facts.filter(|(_, f)| f.term == term).map(|(i, _)| (number, i)));
        }
        held.sort_unstable();
        held.dedup();
        held
    }

    /// Builds the local forms of a lookup whose table is computed elementwise. The body computes the taken elements
    /// alone, so the table's part is written out from its source.
    fn build_lookup(&mut self, at: u32, application: &Application, origin: ValueId, indices: Term) {
        let reference = self.terms.graph.clone();
        let table = reference.node(origin).operands[0];
        let indices = self.held(indices);
        let sources = sources_of(&reference, table);
        let held = |source: &ValueId| {
            let held = self.held(self.terms.of_node(*source));
            held.into_iter().map(|(number, fact)| (*source, number, fact)).collect::<Vec<_>>()
        };
        for (source, number, fact) in sources.iter().flat_map(held).collect::<Vec<_>>() {
            let layout = self.facts[number as usize][fact].layout.clone();
            // Terms do not tell element types apart, which the local form must have as the reference has them.
            if self.types[number as usize].dtype != reference.ty(source).dtype {
                continue;
            }
            for &(index, of_index) in &indices {
                if !self.tried.insert((at, vec![(number, fact), (index, of_index), (u32::MAX, 0)])) {
                    continue;
                }
                let mut form = Form::default();
                let leaf = form.leaf(number, &self.types[number as usize]);
                let mut made = FxHashMap::from_iter([(source, leaf)]);
                let shape = self.types[number as usize].shape.clone();
                let Some(table) = self.write_out(&reference, &mut form, &mut made, table, &layout, &shape) else {
                    continue;
                };
                let index_leaf = form.leaf(index, &self.types[index as usize]);
                let term = self.terms.of_node(reference.node(origin).operands[0]);
                let facts = [Fact { term, layout: layout.clone() }, self.facts[index as usize][of_index].clone()];
                self.build(application, form, vec![table, index_leaf], &facts);
            }
        }
    }

    /// Writes out a part of a value that is computed elementwise from values of this body.
    fn write_out(
        &self,
        reference: &Graph,
        form: &mut Form,
        made: &mut FxHashMap<ValueId, ValueId>,
        v: ValueId,
        layout: &Layout,
        shape: &[u64],
    ) -> Option<ValueId> {
        if let Some(&known) = made.get(&v) {
            return Some(known);
        }
        let node = reference.node(v);
        let value = match &node.op {
            Op::Constant(literal) => {
                literal.as_splat()?;
                form.graph.emit(node.op.resized(&[], shape), &[])
            }
            Op::BroadcastInDim(op) => {
                let operand = node.operands[0];
                let size = reference.shape(operand);
                let dims = op.dims.iter().zip(size).map(|(&d, &size)| match size == node.ty.shape[d] {
                    true => layout.dims[d].clone(),
                    false => Some(altiplano_ir::sharding::DimLayout::whole(size)),
                });
                let wanted = Layout { dims: dims.collect(), partial: Vec::new() };
                let fits = |&(n, i): &(u32, usize)| {
                    let ty = &self.types[n as usize];
                    let fact = &self.facts[n as usize][i];
                    ty.dtype == node.ty.dtype && fact.layout.fits(&wanted, &ty.shape, self.mesh)
                };
                let (number, _) = self.held(self.terms.of_node(operand)).into_iter().find(fits)?;
                let operand = form.leaf(number, &self.types[number as usize]);
                form.graph.emit(node.op.resized(&[], shape), &[operand])
            }
            op if op.is_elementwise() && made.len() < 64 => {
                let operands: Option<Vec<ValueId>> =
                    node.operands.iter().map(|&o| self.write_out(reference, form, made, o, layout, shape)).collect();
                let operands = operands?;
                let types: Vec<&TensorType> = operands.iter().map(|&o| form.graph.ty(o)).collect();
                op.infer(&types).ok()?;
                form.graph.emit(op.clone(), &operands)
            }
            _ => return None,
        };
        made.insert(v, value);
        Some(value)
    }

    /// Builds the local form of an application on operands with these facts, and notes what its result is.
    fn build(&mut self, application: &Application, form: Form, operands: Vec<ValueId>, facts: &[Fact]) {
        let locals: Vec<TensorType> = operands.iter().map(|&o| form.graph.ty(o).clone()).collect();
        let with_types = |(ty, local): (&TensorType, &TensorType)| ty.with_dtype(local.dtype);
        let types: Vec<TensorType> = application.operand_types.iter().zip(&locals).map(with_types).collect();
        let Ok(result) = application.op.infer(&types.iter().collect::<Vec<_>>()) else { return };
        let global = Global { op: &application.op, operands: &types, result: &result };
        let is_zero = |fact: &Fact| self.terms.as_splat(fact.term) == Some(0.0);
        let given: Vec<Given<'_>> = locals
            .iter()
            .zip(facts)
            .map(|(ty, fact)| Given { layout: &fact.layout, local: &ty.shape, is_zero: is_zero(fact) })
            .collect();
        let Some(splits) = rules::splits(global, &given, self.mesh) else { return };
        for (layout, factor_axes) in rules::local_forms(&application.op, &splits, self.mesh) {
            let mut form = form.clone();
            let result_shape = layout.dims.iter().flatten().map(|d| local_size(d, self.mesh)).collect();
            let mut cx = Local {
                graph: &mut form.graph,
                mesh: self.mesh,
                operands: operands.clone(),
                operand_types: types.clone(),
                result_shape,
                factor_axes,
                fused_loss: self.fused_loss,
            };
            let made = application.op.local(&mut cx);
            let mut numbers: Vec<u32> = Vec::with_capacity(form.graph.len());
            for v in form.graph.values() {
                let node = form.graph.node(v);
                numbers.push(match form.leaves.get(&v) {
                    Some(&number) => number,
                    None => {
                        let operands = node.operands.iter().map(|o| numbers[o.index()]).collect();
                        self.number((written(&node.op), operands), &node.ty)
                    }
                });
            }
            self.add(numbers[made.index()], vec![Fact { term: application.result, layout }]);
        }
    }
}

/// A local form under construction.
#[derive(Clone, Default)]
struct Form {
    graph: Graph,
    /// The values of the body that its leaves stand for.
    leaves: FxHashMap<ValueId, u32>,
}

impl Form {
    fn leaf(&mut self, number: u32, ty: &TensorType) -> ValueId {
        let leaf = altiplano_ir::optimizer::leaf(&mut self.graph, number.to_string(), ty.clone());
        self.leaves.insert(leaf, number);
        leaf
    }
}

/// The values that a value is computed from elementwise, beside constants and broadcasts: its operand, the operand of
/// that, and so on. A body looks up elements of the first one that it computes as a whole.
fn sources_of(graph: &Graph, v: ValueId) -> Vec<ValueId> {
    let mut sources = Vec::new();
    let mut at = v;
    while graph.node(at).op.is_elementwise() {
        let aside = |o: &&ValueId| !matches!(graph.node(**o).op, Op::Constant(_) | Op::BroadcastInDim(_));
        let Some(&operand) = graph.node(at).operands.iter().find(aside) else { break };
        sources.push(operand);
        at = operand;
    }
    sources
}

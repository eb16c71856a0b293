//! The proof of a step: facts pass from body to body through buffers and transfers, and every result is compared with
//! the reference.

use crate::body::{Examined, Fact};
use crate::layout::Layout;
use crate::reference::{self, Reference};
use crate::schedule::{self, Calls};
use crate::term::Term;
use crate::{Gap, Kind, Proof};
use altiplano_ir::batch::LossKind;
use altiplano_ir::graph::ValueId;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind, OVERFLOWS, Phase, Program, Programs, TransferId};
use altiplano_ir::types::TensorType;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// A buffer of a program.
type Place = (u32, BufferId);

struct Step<'a> {
    plan: &'a Plan,
    programs: &'a Programs,
    calls: Calls,
    reference: Reference,
    /// Facts about values, and about complete sums over microbatches.
    facts: FxHashMap<Place, Vec<Fact>>,
    parameters: BTreeSet<String>,
    states: BTreeSet<(String, String)>,
    proof: Proof,
    /// For buffers without a fact, the gap of the body that writes them.
    gaps: FxHashMap<Place, Gap>,
    /// The summands of the norm of all gradients.
    summands: FxHashMap<Term, Summand<'a>>,
    /// For each buffer that the body at hand adds to, the one from which the summand comes.
    summed: FxHashMap<BufferId, BufferId>,
    /// The local types of values between bodies.
    types: FxHashMap<Place, TensorType>,
    /// The values that the body at hand compares with others.
    compared: Vec<Term>,
    observe: Observer<'a>,
}

/// A summand of a sum over all gradients.
struct Summand<'a> {
    program: u32,
    body: &'a Body,
    /// The last value that holds no more than the summand.
    held: ValueId,
    /// The last product with a constant on the way to it.
    scaled: ValueId,
}

/// Sees every body when it has been examined.
pub type Observer<'a> = &'a mut dyn FnMut(&Body, &Examined<'_>);

/// Proves the programs of a plan.
pub fn prove<'a>(plan: &'a Plan, programs: &'a Programs, observe: Observer<'a>) -> Result<Proof, Gap> {
    covered(plan)?;
    if programs.num_microbatches != plan.num_microbatches || programs.loss_is_mean != (plan.loss != LossKind::Sum) {
        let text = "the programs are for another number of microbatches or another loss than the plan";
        return Err(Gap::new(Kind::Differs, text.to_string()));
    }
    well_formed(programs)?;
    let calls = schedule::check(programs)?;
    let reference =
        Reference::new(plan).map_err(|error| Gap::new(Kind::NoRule, format!("the model has no gradient: {error}")))?;
    let mut step = Step {
        plan,
        programs,
        calls,
        reference,
        facts: FxHashMap::default(),
        parameters: BTreeSet::new(),
        states: BTreeSet::new(),
        proof: Proof::default(),
        gaps: FxHashMap::default(),
        summands: FxHashMap::default(),
        summed: FxHashMap::default(),
        types: FxHashMap::default(),
        compared: Vec::new(),
        observe,
    };
    step.proof.reference_values = step.reference.terms.len();
    step.all_bodies()?;
    step.complete()?;
    step.proof.parameters = step.parameters.len();
    step.proof.states = step.states.len();
    Ok(step.proof)
}

/// Checks that the rules cover what the plan asks for.
fn covered(plan: &Plan) -> Result<(), Gap> {
    let problem = match plan {
        _ if plan.servers.is_some() => "parameter servers",
        _ if plan.staleness() > 0 => "gradients that are a step late",
        _ if plan.measure_noise => "a measured gradient variance",
        _ => return Ok(()),
    };
    Err(Gap::new(Kind::NoRule, format!("there is no rule for {problem}")))
}

/// Checks that layouts and references of programs make sense.
fn well_formed(programs: &Programs) -> Result<(), Gap> {
    for (number, program) in (0u32..).zip(&programs.programs) {
        let wrong = |text: String| Err(Gap::new(Kind::Differs, text).of_program(number));
        let devices = program.mesh.axes.iter().try_fold(1u32, |n, axis| n.checked_mul(axis.size)).filter(|n| *n > 0);
        if devices.is_none_or(|n| program.devices.len() as u64 != u64::from(n)) {
            return wrong("has not as many devices as its mesh".into());
        }
        for (id, buffer) in (0u32..).map(BufferId).zip(&program.buffers) {
            let partial = buffer.sharding.is_partial()
                && !matches!(buffer.kind, BufferKind::Value | BufferKind::Accumulator { .. });
            if partial || !buffer.sharding.is_valid(&buffer.ty.shape, &program.mesh) {
                return wrong(format!("{id} ({}) has no valid layout", buffer.name));
            }
        }
        let known = |id: &BufferId| (id.0 as usize) < program.buffers.len();
        for body in &program.bodies {
            let of_values = body.reads.iter().map(|r| r.0).chain(body.writes.iter().map(|w| w.1));
            let of_buffers = body.reads.iter().map(|r| r.1).chain(body.writes.iter().map(|w| w.0));
            let values = of_values.into_iter().all(|v| v.index() < body.graph.len());
            if !values || !of_buffers.chain(body.frees.iter().copied()).all(|id| known(&id)) {
                return wrong(format!("{} names a value or buffer that does not exist", body.name));
            }
        }
    }
    let known = |(program, id): (u32, BufferId)| {
        programs.programs.get(program as usize).is_some_and(|p| (id.0 as usize) < p.buffers.len())
    };
    match programs.transfers.iter().all(|t| known(t.source) && known(t.target)) {
        true => Ok(()),
        false => Err(Gap::new(Kind::Differs, "a transfer names a buffer that does not exist".into())),
    }
}

impl<'a> Step<'a> {
    fn buffer(&self, (program, buffer): Place) -> &'a Buffer {
        self.programs.programs[program as usize].buffer(buffer)
    }

    fn mesh(&self, program: u32) -> &'a Mesh {
        &self.programs.programs[program as usize].mesh
    }

    fn declared(&self, place: Place) -> Layout {
        Layout::of(&self.buffer(place).sharding, self.mesh(place.0))
    }

    /// Examines bodies as soon as all that they read is known.
    fn all_bodies(&mut self) -> Result<(), Gap> {
        let programs: &'a Programs = self.programs;
        self.accumulators_without_gradients();
        let mut pending: Vec<(u32, &'a Body)> = Vec::new();
        for (number, program) in (0u32..).zip(&programs.programs) {
            let runs = program.bodies.iter().zip(&self.calls.runs[number as usize]);
            pending.extend(runs.filter(|(_, runs)| **runs).map(|(body, _)| (number, body)));
        }
        while !pending.is_empty() {
            let before = pending.len();
            let (ready, rest): (Vec<_>, Vec<_>) = pending.into_iter().partition(|(n, body)| self.is_ready(*n, body));
            for (number, body) in ready {
                self.body(number, body)?;
            }
            self.transfers()?;
            if rest.len() == before {
                return Err(self.missing(&rest));
            }
            pending = rest;
        }
        Ok(())
    }

    /// Accumulators are zero before a step, and stay so if nothing is added.
    fn accumulators_without_gradients(&mut self) {
        let zero = self.reference.terms.splat(0.0);
        for (number, program) in (0u32..).zip(&self.programs.programs) {
            for (id, buffer) in (0u32..).map(BufferId).zip(&program.buffers) {
                let received = self.programs.transfers.iter().any(|t| t.target == (number, id));
                if matches!(buffer.kind, BufferKind::Accumulator { .. }) && !program.writes(id) && !received {
                    let layout = Layout::free(buffer.ty.rank());
                    self.facts.insert((number, id), vec![Fact { term: zero, layout }]);
                }
            }
        }
    }

    fn is_ready(&self, number: u32, body: &Body) -> bool {
        body.reads.iter().all(|&(_, buffer)| match self.buffer((number, buffer)).kind {
            BufferKind::Value => self.facts.contains_key(&(number, buffer)),
            BufferKind::Accumulator { .. } => {
                self.facts.contains_key(&(number, buffer)) || body.writes.iter().any(|w| w.0 == buffer)
            }
            _ => true,
        })
    }

    /// The gap if no body can be examined any more.
    fn missing(&self, rest: &[(u32, &Body)]) -> Gap {
        for (number, body) in rest {
            let unknown = |b: &&(ValueId, BufferId)| {
                let place = (*number, b.1);
                matches!(self.buffer(place).kind, BufferKind::Value | BufferKind::Accumulator { .. })
                    && !self.facts.contains_key(&place)
            };
            if let Some((v, buffer)) = body.reads.iter().find(unknown) {
                let text = format!("nothing writes {}", self.buffer((*number, *buffer)).name);
                let gap = Gap {
                    body: Some(body.name.clone()),
                    value: Some(*v),
                    buffer: Some(*buffer),
                    ..Gap::new(Kind::Differs, text)
                };
                return gap.of_program(*number);
            }
        }
        Gap::new(Kind::Differs, "bodies wait for each other".into())
    }

    /// The leaf of the sum that an accumulator holds before a microbatch is added.
    fn sum_before(&mut self, (program, buffer): Place) -> Term {
        let shape = &self.programs.programs[program as usize].buffer(buffer).ty.shape;
        self.reference.terms.leaf(format!("sum so far in {buffer} of program {program}"), shape)
    }

    /// The facts about a buffer that a body reads.
    fn read(&mut self, place: Place, body: &Body) -> Vec<Fact> {
        let buffer = self.buffer(place);
        let shape = &buffer.ty.shape;
        let layout = self.declared(place);
        let terms = &mut self.reference.terms;
        let leaf = match &buffer.kind {
            BufferKind::Parameter { name } => terms.leaf(reference::parameter(name), shape),
            BufferKind::State { parameter, slot } => terms.leaf(reference::state(parameter, slot), shape),
            BufferKind::Input { name } => terms.leaf(reference::input(name), shape),
            BufferKind::Scalar { name } => terms.leaf(reference::scalar(name), shape),
            BufferKind::Accumulator { .. } if body.writes.iter().any(|w| w.0 == place.1) => self.sum_before(place),
            _ => return self.facts.get(&place).cloned().unwrap_or_default(),
        };
        let same_shape = self.reference.terms.shape(leaf) == Some(shape.as_slice());
        if same_shape { vec![Fact { term: leaf, layout }] } else { Vec::new() }
    }

    fn body(&mut self, number: u32, body: &'a Body) -> Result<(), Gap> {
        let program: &'a Program = &self.programs.programs[number as usize];
        let mut read: FxHashMap<BufferId, Vec<Fact>> = FxHashMap::default();
        for &(v, buffer) in &body.reads {
            let facts = self.read((number, buffer), body);
            let of_buffer = program.buffer(buffer);
            let declared = || of_buffer.sharding.local_type(&of_buffer.ty, &program.mesh);
            let local = self.types.get(&(number, buffer)).cloned().unwrap_or_else(declared);
            if local != *body.graph.ty(v) {
                let text = format!("reads {} in another shape", of_buffer.name);
                return Err(self.here(number, body, Some(v), Some(buffer), Kind::Differs, text));
            }
            read.insert(buffer, facts);
        }
        let known_terms = self.proof.reference_values;
        let examined =
            Examined::new(&mut self.reference.terms, &program.mesh, body, self.plan.execution.fused_loss, &|buffer| {
                read.get(&buffer).cloned().unwrap_or_default()
            });
        (self.observe)(body, &examined);
        let written: Vec<(BufferId, ValueId, Vec<Fact>)> =
            body.writes.iter().map(|&(buffer, v)| (buffer, v, examined.of(v).to_vec())).collect();
        let known = body.graph.values().filter(|v| !examined.of(*v).is_empty()).count();
        let of_buffer: FxHashMap<ValueId, BufferId> = body.reads.iter().copied().collect();
        let lost = |v: ValueId| {
            let (at, text) = examined.first_unknown(v, known_terms);
            (at, examined.leaf_of_operand(at).and_then(|leaf| of_buffer.get(&leaf)).copied(), text)
        };
        let lost: FxHashMap<ValueId, (ValueId, Option<BufferId>, String)> =
            written.iter().filter(|w| w.2.is_empty()).map(|(_, v, _)| (*v, lost(*v))).collect();
        let compares = body.graph.nodes.iter().filter(|n| matches!(n.op, Op::Compare(_)));
        let compared = compares.flat_map(|n| examined.of(n.operands[0]).iter().map(|f| f.term)).collect();
        let held: Vec<(ValueId, Term)> = match body.phase {
            Phase::Norm => body.graph.values().flat_map(|v| examined.of(v).iter().map(move |f| (v, f.term))).collect(),
            _ => Vec::new(),
        };
        let scaled: FxHashMap<ValueId, ValueId> =
            held.iter().filter_map(|(v, _)| Some((*v, examined.scaled_at(*v)?))).collect();
        // The buffers from which the summands of accumulators come.
        let summed = |v: ValueId| {
            let leaves = body.graph.node(v).operands.iter().filter_map(|o| examined.leaf(*o));
            leaves.filter_map(|leaf| of_buffer.get(&leaf).copied()).find(|id| !body.writes.iter().any(|w| w.0 == *id))
        };
        self.summed = match body.phase.is_of_microbatch() {
            true => body.writes.iter().filter_map(|w| Some((w.0, summed(w.1)?))).collect(),
            false => FxHashMap::default(),
        };
        self.compared = compared;
        for (v, term) in held {
            if let [summand] = self.reference.terms.summands(term)[..] {
                let at = Summand { program: number, body, held: v, scaled: scaled.get(&v).copied().unwrap_or(v) };
                self.summands.insert(summand, at);
            }
        }
        self.proof.values += known;
        self.proof.bodies += 1;
        for (buffer, v, facts) in written {
            let kind = &program.buffer(buffer).kind;
            if let Some((at, source, text)) = lost.get(&v) {
                let from = source.map(|id| format!("; an operand comes from {}", program.buffer(id).name));
                let text = format!("{text}{}", from.unwrap_or_default());
                let gap = self.here(number, body, Some(*at), *source, Kind::Unrelated, text);
                if !matches!(kind, BufferKind::Value) || !is_local(program.buffer(buffer)) {
                    return Err(gap);
                }
                self.gaps.insert((number, buffer), gap);
            }
            self.written(number, body, (buffer, v), facts)?;
        }
        Ok(())
    }

    fn here(
        &self,
        number: u32,
        body: &Body,
        value: Option<ValueId>,
        buffer: Option<BufferId>,
        kind: Kind,
        text: String,
    ) -> Gap {
        Gap { body: Some(body.name.clone()), value, buffer, ..Gap::new(kind, text) }.of_program(number)
    }

    /// Compares what a body writes with what the buffer should hold.
    fn written(
        &mut self,
        number: u32,
        body: &Body,
        (buffer, v): (BufferId, ValueId),
        facts: Vec<Fact>,
    ) -> Result<(), Gap> {
        let place = (number, buffer);
        let of_buffer = self.buffer(place);
        let wanted = of_buffer.sharding.local_type(&of_buffer.ty, self.mesh(number));
        if of_buffer.kind != BufferKind::Value && *body.graph.ty(v) != wanted {
            let text = format!("writes {} to {}, which holds {wanted}", body.graph.ty(v), of_buffer.name);
            return Err(self.here(number, body, Some(v), Some(buffer), Kind::Differs, text));
        }
        let expected = match &of_buffer.kind {
            BufferKind::Value => {
                self.facts.insert(place, facts);
                self.types.insert(place, body.graph.ty(v).clone());
                return Ok(());
            }
            BufferKind::Accumulator { .. } => return self.accumulated(place, body, v, facts),
            BufferKind::Loss => self.reference.loss,
            BufferKind::Output { index } => self.reference.outputs.get(*index as usize).copied(),
            BufferKind::Parameter { name } => {
                self.parameters.insert(format!("{number} {name}"));
                self.reference.parameters.get(name).copied()
            }
            BufferKind::State { parameter, slot } => {
                self.states.insert((format!("{number} {parameter}"), slot.clone()));
                self.reference.states.get(&(parameter.clone(), slot.clone())).copied()
            }
            BufferKind::Input { .. } | BufferKind::Scalar { .. } => None,
        };
        let Some(expected) = expected else {
            let text = format!("writes {}, which one device does not", of_buffer.name);
            return Err(self.here(number, body, Some(v), Some(buffer), Kind::Differs, text));
        };
        self.expect(place, body, v, &facts, expected)
    }

    /// Checks that one of the facts is the expected term in the declared layout.
    fn expect(&mut self, place: Place, body: &Body, v: ValueId, facts: &[Fact], expected: Term) -> Result<(), Gap> {
        let (wanted, mesh) = (self.declared(place), self.mesh(place.0));
        let local = body.graph.shape(v);
        // Devices may count an element once for each copy of it: only the sign of a count matters. The count that is
        // kept must be the one that decides.
        let counted = matches!(&self.buffer(place).kind, BufferKind::State { slot, .. } if slot == OVERFLOWS);
        let is_expected = |term: Term| match counted {
            true if !self.compared.contains(&term) => false,
            true => self
                .reference
                .terms
                .of_sign(term)
                .is_some_and(|sign| self.reference.terms.of_sign(expected) == Some(sign)),
            false => term == expected,
        };
        if facts.iter().any(|f| is_expected(f.term) && f.layout.fits(&wanted, local, mesh)) {
            return Ok(());
        }
        let name = |f: &Fact| format!("{} in {}", self.reference.terms.name(f.term), f.layout.text(mesh));
        let there = facts.first().map_or("nothing known".to_string(), name);
        let text = format!(
            "{} should be {} in {}, but is {there}",
            self.buffer(place).name,
            self.reference.terms.name(expected),
            wanted.text(mesh),
        );
        match facts.first().and_then(|fact| self.wrong_summand(fact.term, expected)) {
            Some((number, of_norm, at)) => {
                Err(self.here(number, of_norm, Some(at), Some(place.1), Kind::Differs, text))
            }
            None => Err(self.here(place.0, body, Some(v), Some(place.1), Kind::Differs, text)),
        }
    }

    /// The value of the body of a norm that makes a sum over all gradients wrong: that of the first summand with a wrong
    /// factor, or the written one if all summands of the body have the same wrong factor. `None` if those of all bodies
    /// have it, or the sum has none of a body's summands.
    fn wrong_summand(&mut self, found: Term, expected: Term) -> Option<(u32, &'a Body, ValueId)> {
        let odd = self.reference.terms.odd_summands(found, expected);
        let (first, has, should) = *odd.first()?;
        let at = self.summands.get(&first)?;
        let alike = |term: &Term| {
            let of = odd.iter().find(|of| of.0 == *term);
            of.is_some_and(|(_, h, s)| (h / s - has / should).abs() < 1e-9)
        };
        let all = self.reference.terms.summands(expected);
        let here = |term: &&Term| self.summands.get(*term).is_some_and(|of| of.program == at.program);
        let of_body = all.iter().filter(here).count();
        match of_body > 1 && all.iter().filter(here).all(alike) {
            true if has == 0.0 || all.len() > of_body && all.iter().all(alike) => None,
            true => Some((at.program, at.body, at.body.writes.last()?.1)),
            false => Some((at.program, at.body, if has == 0.0 { at.held } else { at.scaled })),
        }
    }

    /// A body that adds to an accumulator for every microbatch: the sum over all of them is known afterwards.
    fn accumulated(&mut self, place: Place, body: &Body, v: ValueId, facts: Vec<Fact>) -> Result<(), Gap> {
        let (before, wanted) = (self.sum_before(place), self.declared(place));
        let (mesh, local) = (self.mesh(place.0), body.graph.shape(v).to_vec());
        let is_read = body.reads.iter().any(|r| r.1 == place.1);
        let mut sums = Vec::new();
        for fact in facts.iter().filter(|f| is_read && f.layout.fits(&wanted, &local, mesh)) {
            if let Some(added) = self.reference.terms.without(fact.term, before) {
                if let BufferKind::Accumulator { parameter } = &self.buffer(place).kind
                    && let Some(&gradient) = self.reference.gradients.get(parameter)
                    && !self.reference.terms.is_part(added, gradient)
                {
                    let name = self.reference.terms.name(added);
                    let from = self.summed.get(&place.1).copied();
                    let name_of = |id: BufferId| format!(", but comes from {}", self.buffer((place.0, id)).name);
                    let comes = from.map(name_of).unwrap_or_default();
                    let text = format!("{name} is no part of the {}{comes}", self.buffer(place).name);
                    let buffer = from.unwrap_or(place.1);
                    return Err(self.here(place.0, body, Some(v), Some(buffer), Kind::Differs, text));
                }
                let term = self.reference.terms.over_microbatches(added);
                sums.push(Fact { term, layout: wanted.clone() });
            }
        }
        if sums.is_empty() || !body.phase.is_of_microbatch() {
            let text =
                format!("{} is not the sum so far and one summand in {}", self.buffer(place).name, wanted.text(mesh));
            return Err(self.here(place.0, body, Some(v), Some(place.1), Kind::Differs, text));
        }
        self.facts.insert(place, sums);
        Ok(())
    }

    /// Passes facts through the transfers whose source is known.
    fn transfers(&mut self) -> Result<(), Gap> {
        let mut changed = true;
        while changed {
            changed = false;
            for (at, transfer) in (0u32..).map(TransferId).zip(&self.programs.transfers) {
                if !self.calls.happens[at.0 as usize] || self.facts.contains_key(&transfer.target) {
                    continue;
                }
                let Some(facts) = self.facts.get(&transfer.source) else { continue };
                let (source, target) = (self.buffer(transfer.source), self.buffer(transfer.target));
                let declared = self.declared(transfer.source);
                let local = source.sharding.local_type(&source.ty, self.mesh(transfer.source.0));
                let layout = self.declared(transfer.target);
                let typed = self.types.get(&transfer.source) == Some(&local) && source.ty == target.ty;
                let fits = |f: &&Fact| f.layout.fits(&declared, &local.shape, self.mesh(transfer.source.0));
                let moved: Vec<Fact> =
                    facts.iter().filter(fits).map(|f| Fact { term: f.term, layout: layout.clone() }).collect();
                let whole = declared.partial.is_empty() && layout.partial.is_empty();
                if moved.is_empty() || !whole || !typed {
                    if let Some(gap) = self.gaps.get(&transfer.source) {
                        return Err(gap.clone());
                    }
                    let text = format!("{at} sends {}, which is not laid out as declared", source.name);
                    let (number, buffer) = transfer.source;
                    let writes = |body: &&Body| body.writes.iter().any(|w| w.0 == buffer);
                    let writer = self.programs.programs[number as usize].bodies.iter().find(writes);
                    let gap = Gap {
                        body: writer.map(|body| body.name.clone()),
                        value: writer.and_then(|body| body.writes.iter().find(|w| w.0 == buffer)).map(|w| w.1),
                        buffer: Some(buffer),
                        ..Gap::new(Kind::Differs, text)
                    };
                    return Err(gap.of_program(number));
                }
                self.proof.transfers += 1;
                self.facts.insert(transfer.target, moved);
                self.types
                    .insert(transfer.target, target.sharding.local_type(&target.ty, self.mesh(transfer.target.0)));
                changed = true;
            }
        }
        Ok(())
    }

    /// Checks that every result is there: a loss or all outputs, and the update of every copy of each parameter.
    fn complete(&self) -> Result<(), Gap> {
        let trains = self.plan.schedule.trains();
        let mut results = BTreeSet::new();
        for (number, program) in (0u32..).zip(&self.programs.programs) {
            for (id, buffer) in (0u32..).map(BufferId).zip(&program.buffers) {
                let written = self.is_written(number, program, id);
                let missing = match &buffer.kind {
                    BufferKind::Parameter { name } => {
                        results.insert(format!("parameter {name}"));
                        trains && self.reference.parameters.contains_key(name) && !written
                    }
                    BufferKind::State { .. } => !written,
                    BufferKind::Loss => !results.insert("loss".into()) || !written,
                    BufferKind::Output { index } => !results.insert(format!("output {index}")) || !written,
                    _ => false,
                };
                if missing {
                    let text = format!("{} is not updated, or there is more than one", buffer.name);
                    let gap = Gap { buffer: Some(id), ..Gap::new(Kind::Differs, text) };
                    return Err(gap.of_program(number));
                }
            }
        }
        let parameters = self.reference.parameters.keys().map(|name| format!("parameter {name}"));
        let outputs = (0..self.reference.outputs.len()).map(|i| format!("output {i}"));
        let wanted: Vec<String> = match trains {
            true => parameters.chain(["loss".to_string()]).collect(),
            false => outputs.collect(),
        };
        match wanted.into_iter().find(|w| !results.contains(w)) {
            Some(absent) => Err(Gap::new(Kind::Differs, format!("no program has {absent}"))),
            None => Ok(()),
        }
    }

    fn is_written(&self, number: u32, program: &Program, id: BufferId) -> bool {
        let runs = program.bodies.iter().zip(&self.calls.runs[number as usize]).filter(|(_, runs)| **runs);
        runs.filter(|(body, _)| body.writes.iter().any(|w| w.0 == id)).count() == 1
    }
}

/// Returns true if each device may have a value of its own in the buffer.
fn is_local(buffer: &Buffer) -> bool {
    buffer.kind == BufferKind::Value
}

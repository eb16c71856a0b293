//! Pairs of programs: a sequential one, and one that every device of a mesh runs on its parts of the same arguments.
//!
//! The terms are those of the sequential program. The per-rank program is examined as bodies of plans are, with the rules
//! for programs of others. If there is no proof and the programs are small, both are evaluated on random arguments, since
//! only different numbers show that programs differ.

use crate::body::{Examined, Fact};
use crate::layout::Layout;
use crate::term::{Term, Terms};
use crate::{Gap, Kind, Proof};
use altiplano_ir::expand::{Expanded, expand};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::{run, run_mesh, shard};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::Op;
use altiplano_ir::sharding::Sharding;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;

/// A local value that is a device's part of an argument or a result.
#[derive(Clone, Debug)]
pub struct Part {
    pub value: ValueId,
    /// The position of the argument, or of the result.
    pub whole: usize,
    pub sharding: Sharding,
}

/// A sequential program and the program of one rank. The results of both are the outputs of their graphs, in order.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    pub sequential: &'a Graph,
    /// The leaves of the sequential program, in the order of arguments.
    pub arguments: &'a [ValueId],
    pub ranks: &'a Graph,
    pub mesh: &'a Mesh,
    pub inputs: &'a [Part],
    /// One for each result.
    pub outputs: &'a [Part],
}

/// Both programs without composites.
struct Plain {
    sequential: Expanded,
    ranks: Expanded,
}

/// Proves that devices that run the per-rank program on their parts of the arguments get their parts of the results of
/// the sequential program: for all arguments, over the reals and with the order of additions free.
pub fn prove_pair(pair: &Pair<'_>) -> Result<Proof, Gap> {
    let plain = Plain { sequential: expand(pair.sequential), ranks: expand(pair.ranks) };
    match related(pair, &plain) {
        Ok(proof) => Ok(proof),
        Err(gap) => Err(with_numbers(pair, &plain, gap)),
    }
}

/// The proof, or the first place that the rules do not relate to the sequential program.
fn related(pair: &Pair<'_>, plain: &Plain) -> Result<Proof, Gap> {
    let mut terms = Terms::of_pair();
    let mut values = Vec::new();
    let graph = &plain.sequential.graph;
    terms.add_graph(graph, &mut values, |terms, op, ty, at| match op {
        Op::Input(input) => Some(terms.leaf(format!("argument {}", input.name), &ty.shape)),
        Op::Parameter(parameter) => Some(terms.leaf(format!("argument {}", parameter.name), &ty.shape)),
        op if op.is_leaf() && !matches!(op, Op::Constant(_) | Op::Iota(_)) => {
            Some(terms.leaf(format!("value {at}"), &ty.shape))
        }
        _ => None,
    });
    let argument = |at: usize| values[plain.sequential.values[pair.arguments[at].index()].index()];
    let results: Vec<Term> = graph.outputs.iter().map(|o| values[o.index()]).collect();
    let known = terms.len();
    let read = |v: ValueId| {
        let part = pair.inputs.iter().find(|part| plain.ranks.values[part.value.index()] == v)?;
        let layout = Layout::of(&part.sharding, pair.mesh);
        Some(vec![Fact { term: argument(part.whole), layout }])
    };
    let mut examined = Examined::of_pair(&mut terms, pair.mesh, &plain.ranks.graph, &read);
    for (part, &wanted) in pair.outputs.iter().zip(&results) {
        check_result(pair, plain, &mut examined, part, wanted, known)?;
    }
    let related = plain.ranks.graph.values().filter(|v| !examined.of(*v).is_empty()).count();
    Ok(Proof { values: related, reference_values: graph.len(), bodies: 1, ..Proof::default() })
}

/// Checks that a local result is the part of the sequential one that its layout says.
fn check_result(
    pair: &Pair<'_>,
    plain: &Plain,
    examined: &mut Examined<'_>,
    part: &Part,
    wanted: Term,
    known: usize,
) -> Result<(), Gap> {
    let v = plain.ranks.values[part.value.index()];
    let layout = Layout::of(&part.sharding, pair.mesh);
    let local = plain.ranks.graph.shape(v);
    let facts = examined.of(v);
    let gap = |examined: &Examined<'_>, at: ValueId, text: String| {
        let op = plain.ranks.graph.node(at).op.name();
        Err(Gap::new(Kind::Unrelated, format!("{} ({op}): {text}", examined.label(at))))
    };
    if facts.is_empty() {
        let (at, text) = examined.first_unknown(v, known);
        return gap(examined, at, text);
    }
    if facts.iter().any(|fact| fact.term == wanted && fact.layout.fits(&layout, local, pair.mesh)) {
        return Ok(());
    }
    let name = format!("result {}", part.whole);
    let wanted_fact = Fact { term: wanted, layout };
    let wanted_text = examined.fact_text(&wanted_fact);
    let close = facts.iter().find(|fact| fact.term == wanted).or(facts.first()).cloned();
    let found = close.as_ref().map_or_else(String::new, |fact| examined.fact_text(fact));
    let wrong = format!("{name} should be {wanted_text}, and is {found}");
    let factor = close.and_then(|fact| examined.difference(fact.term, wanted));
    let factor = factor.map_or_else(String::new, |text| format!("; {text}"));
    match examined.suspect(v) {
        Some((at, what)) => gap(examined, at, format!("{what}; {wrong}{factor}")),
        None => gap(examined, v, format!("{wrong}{factor}")),
    }
}

/// The most work that the search for different numbers takes: operations on all devices.
const MOST_WORK: u64 = 100_000_000;

/// A gap that says whether the results differ for random arguments.
fn with_numbers(pair: &Pair<'_>, plain: &Plain, gap: Gap) -> Gap {
    match (1..=2).find_map(|seed| differs(pair, plain, seed)) {
        Some(difference) => Gap { kind: Kind::Differs, text: format!("{}; {difference}", gap.text), ..gap },
        None => gap,
    }
}

/// The first result that differs for random arguments of this seed, in words. `None` also if the programs are too large
/// to evaluate.
pub fn difference(pair: &Pair<'_>, seed: u64) -> Option<String> {
    differs(pair, &Plain { sequential: expand(pair.sequential), ranks: expand(pair.ranks) }, seed)
}

fn differs(pair: &Pair<'_>, plain: &Plain, seed: u64) -> Option<String> {
    let work = |graph: &Graph| graph.values().map(|v| graph.work(v)).fold(0u64, u64::saturating_add);
    let all = work(&plain.ranks.graph).saturating_mul(u64::from(pair.mesh.num_devices()));
    if all.saturating_add(work(&plain.sequential.graph)) > MOST_WORK {
        return None;
    }
    let mut state = seed;
    let wholes: Vec<Tensor> = pair.arguments.iter().map(|&v| random(pair.sequential.ty(v), &mut state)).collect();
    let leaf = |v: ValueId| {
        let at = pair.arguments.iter().position(|a| plain.sequential.values[a.index()] == v);
        at.map_or_else(|| Tensor::splat(plain.sequential.graph.ty(v).clone(), 0.0), |at| wholes[at].clone())
    };
    let results = run(&plain.sequential.graph, leaf);
    let local = |v: ValueId, device: u32| {
        let part = pair.inputs.iter().find(|part| plain.ranks.values[part.value.index()] == v);
        match part {
            Some(part) => shard(&wholes[part.whole], &part.sharding, pair.mesh, device),
            None => Tensor::splat(plain.ranks.graph.ty(v).clone(), 0.0),
        }
    };
    let values = run_mesh(&plain.ranks.graph, pair.mesh, local);
    for (part, whole) in pair.outputs.iter().zip(&results) {
        for device in 0..pair.mesh.num_devices() {
            let wanted = shard(whole, &part.sharding, pair.mesh, device);
            let found = &values[plain.ranks.values[part.value.index()].index()][device as usize];
            let apart = |(a, b): &(&f64, &f64)| {
                a.is_finite() && b.is_finite() && (*a - *b).abs() > 1e-6 * (1.0 + a.abs() + b.abs())
            };
            if let Some((a, b)) = found.data.iter().zip(&wanted.data).find(apart) {
                let (name, at) = (part.whole, device);
                return Some(format!(
                    "for random arguments, result {name} of device {at} has {a:.6} where one device has {b:.6}"
                ));
            }
        }
    }
    None
}

/// Random numbers: floats in `-1..1`, and integers that small dimensions can be indexed with.
fn random(ty: &TensorType, state: &mut u64) -> Tensor {
    let mut next = || {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    let number = |x: f64| match ty.dtype {
        dtype if dtype.is_float() => x,
        altiplano_ir::dtype::DType::Bool => f64::from(x > 0.0),
        _ => (x.abs() * 8.0).floor(),
    };
    let data = (0..ty.elements()).map(|_| number(next())).collect();
    Tensor::new(ty.clone(), data)
}

//! Losses that are accumulated over parts of the batch, reduced to the loss of one part.
//!
//! A training step may itself loop over parts of its batch and accumulate their results, so that it fits in memory. A
//! plan has its own microbatches and should be free to choose others. When unrolled, such a loop is the same
//! computation on each part, and sums with a term for every part.
//!
//! This module identifies the parts by the input elements that they read, and gives equal computations equal numbers.
//! The result is the computation on the first part. Each sum is replaced by its equivalent for a part of any size.

use altiplano_ir::batch::{LossKind, find_batch};
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Binary, Input, Op};
use altiplano_ir::simplify::simplify;
use std::collections::{BTreeMap, BTreeSet};

/// A contiguous run of an input's elements, row major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    input: ValueId,
    start: u64,
    count: u64,
}

/// The dependence of a value on the parts of the batch.
#[derive(Clone, Debug, PartialEq)]
enum Form {
    /// The same for all parts.
    Shared { class: usize },
    /// A value of one part of the batch. Values of the same class are the same computation.
    Of { class: usize, part: u64 },
    /// A sum of values of one class over these parts.
    Sum { class: usize, parts: BTreeSet<u64> },
    /// Elements of inputs that are only read in parts.
    Cut,
}

/// The loss of one part of a batch, for a graph that sums it over equal parts, and the size of the whole batch. `None`
/// if the graph does not do so, or if the parts are neither means nor sums over their samples.
///
/// Example: for `x` of `[8, 3]`, `tanh(x[0:4]).mean() / 2 + tanh(x[4:8]).mean() / 2` becomes `tanh(x).mean()` for `x`
/// of `[4, 3]`, and 8.
pub fn part_of_batch(graph: &Graph) -> Option<(Graph, u64)> {
    if graph.batch != 0 {
        return None;
    }
    let graph = &simplify(graph);
    let runs = runs(graph);
    let (inputs, parts) = cut_inputs(graph, &runs)?;
    let forms = forms(graph, &runs, &inputs, parts)?;
    let is_whole = |o: &ValueId| matches!(forms[o.index()], Form::Shared { .. });
    graph.outputs.iter().all(is_whole).then_some(())?;
    let plain = rebuilt(graph, &runs, &forms, &inputs, parts, &BTreeMap::new())?;
    let mut factors = BTreeMap::new();
    for (&sum, &of_part) in &plain.sums {
        let alone = Graph { outputs: vec![of_part], pins: Vec::new(), ..plain.graph.clone() };
        let factor = match batched(&alone, &inputs, graph)? {
            LossKind::Sum => 1,
            LossKind::Mean => parts,
            LossKind::Other => return None,
        };
        factors.insert(sum, factor);
    }
    let part = rebuilt(graph, &runs, &forms, &inputs, parts, &factors)?.graph;
    (batched(&part, &inputs, graph)? != LossKind::Other).then_some(())?;
    let batch = graph.shape(*inputs.first()?)[0];
    Some((part, batch))
}

/// The kind of loss that the first output of a part's graph is. `None` if its batch is in doubt.
fn batched(part: &Graph, cut: &BTreeSet<ValueId>, graph: &Graph) -> Option<LossKind> {
    let dims: Vec<Option<usize>> = graph.inputs().map(|(v, _)| cut.contains(&v).then_some(0)).collect();
    let found = find_batch(part, &dims);
    found.doubt.is_none().then_some(found.loss)
}

/// For each value that consists of consecutive elements of an input, these elements.
fn runs(graph: &Graph) -> Vec<Option<Run>> {
    let mut runs: Vec<Option<Run>> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let run = match &node.op {
            Op::Input(_) if node.ty.rank() > 0 => Some(Run { input: v, start: 0, count: node.ty.elements() }),
            Op::Reshape(_) => runs[node.operands[0].index()],
            Op::Slice(slice) => {
                let shape = graph.shape(node.operands[0]);
                let taken = &node.ty.shape;
                let cut = (0..shape.len()).rev().find(|&d| taken[d] != shape[d]);
                // The slice is contiguous if all dimensions before the last cut one have one element, and all after it
                // are whole.
                let in_order = cut.is_none_or(|d| taken[..d].iter().all(|&n| n == 1));
                let strides = altiplano_ir::types::strides(shape);
                let first: u64 = slice.start.iter().zip(&strides).map(|(i, s)| i * s).sum();
                runs[node.operands[0].index()]
                    .filter(|_| in_order && slice.stride.iter().all(|&s| s == 1))
                    .map(|of| Run { start: of.start + first, count: node.ty.elements(), ..of })
            }
            _ => None,
        };
        runs.push(run);
    }
    runs
}

/// Returns true if a value only renames elements of an input.
fn names_elements(graph: &Graph, v: ValueId) -> bool {
    matches!(graph.node(v).op, Op::Reshape(_) | Op::Slice(_))
}

/// The inputs that are read in several equal parts, and the number of parts.
fn cut_inputs(graph: &Graph, runs: &[Option<Run>]) -> Option<(BTreeSet<ValueId>, u64)> {
    let mut read: BTreeMap<ValueId, BTreeSet<(u64, u64)>> = BTreeMap::new();
    for v in graph.values() {
        for &o in &graph.node(v).operands {
            let passed_on = runs[v.index()].is_some() && names_elements(graph, v);
            if let Some(run) = runs[o.index()].filter(|_| !passed_on) {
                read.entry(run.input).or_default().insert((run.start, run.count));
            }
        }
    }
    let mut parts = None;
    let mut inputs = BTreeSet::new();
    for (input, read) in read {
        let all = graph.ty(input).elements();
        let &(_, count) = read.first()?;
        if count == all {
            continue;
        }
        let number = (count > 0 && all % count == 0).then(|| all / count)?;
        let alike = read.iter().all(|&(start, n)| n == count && start % count == 0);
        if !alike || read.len() as u64 != number || graph.shape(input)[0] % number != 0 {
            return None;
        }
        if *parts.get_or_insert(number) != number {
            return None;
        }
        inputs.insert(input);
    }
    parts.map(|parts| (inputs, parts))
}

/// The form of each value. `None` if parts are mixed other than by sums over all of them.
fn forms(graph: &Graph, runs: &[Option<Run>], inputs: &BTreeSet<ValueId>, parts: u64) -> Option<Vec<Form>> {
    let mut classes: BTreeMap<(String, Vec<usize>), usize> = BTreeMap::new();
    let mut class = |what: String, operands: Vec<usize>| {
        let next = classes.len();
        *classes.entry((what, operands)).or_insert(next)
    };
    let mut forms: Vec<Form> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        if let Some(run) = runs[v.index()].filter(|run| inputs.contains(&run.input)) {
            let of_part = graph.ty(run.input).elements() / parts;
            forms.push(match run.count == of_part && run.start % of_part == 0 {
                true => Form::Of {
                    class: class(format!("{} {}", run.input, node.ty), Vec::new()),
                    part: run.start / of_part,
                },
                false => Form::Cut,
            });
            continue;
        }
        let operands: Vec<Form> = node.operands.iter().map(|o| forms[o.index()].clone()).collect();
        let terms = |form: &Form| match form {
            Form::Of { class, part } => Some((*class, BTreeSet::from([*part]))),
            Form::Sum { class, parts } => Some((*class, parts.clone())),
            _ => None,
        };
        if let (Op::Binary(Binary::Add), [a, b]) = (&node.op, operands.as_slice())
            && let (Some((of_a, mut in_a)), Some((of_b, in_b))) = (terms(a), terms(b))
            && of_a == of_b
            && in_a.is_disjoint(&in_b)
        {
            in_a.extend(in_b);
            forms.push(match in_a.len() as u64 == parts {
                true => Form::Shared { class: class("sum over all parts".to_string(), vec![of_a]) },
                false => Form::Sum { class: of_a, parts: in_a },
            });
            continue;
        }
        let mut part = None;
        let mut of_operands = Vec::with_capacity(operands.len());
        for form in operands {
            match form {
                Form::Shared { class } => of_operands.push(class),
                Form::Of { class, part: of } if *part.get_or_insert(of) == of => of_operands.push(class),
                _ => return None,
            }
        }
        let what = if node.op.is_leaf() { v.to_string() } else { format!("{:?} {}", node.op, node.ty) };
        let class = class(what, of_operands);
        forms.push(part.map_or(Form::Shared { class }, |part| Form::Of { class, part }));
    }
    Some(forms)
}

struct Rebuilt {
    graph: Graph,
    /// For each sum over all parts, the first part's term.
    sums: BTreeMap<ValueId, ValueId>,
}

/// The computation on the first part. A sum over all parts becomes the first part's term times its factor.
fn rebuilt(
    graph: &Graph,
    runs: &[Option<Run>],
    forms: &[Form],
    inputs: &BTreeSet<ValueId>,
    parts: u64,
    factors: &BTreeMap<ValueId, u64>,
) -> Option<Rebuilt> {
    let mut to = Graph { name: graph.name.clone(), ..Default::default() };
    let mut map: Vec<Option<ValueId>> = Vec::with_capacity(graph.len());
    // For each value that is a term or a sum of terms, the first part's term.
    let mut first: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut sums = BTreeMap::new();
    for v in graph.values() {
        let node = graph.node(v);
        let new = match (&node.op, &forms[v.index()]) {
            (Op::Input(input), _) if inputs.contains(&v) => {
                let mut ty = input.ty.clone();
                ty.shape[0] /= parts;
                let op = Op::Input(Input { name: input.name.clone(), ty: ty.clone() });
                Some(to.append(Node { op, ty, operands: Vec::new(), ..node.clone() }))
            }
            (_, Form::Of { part: 0, .. }) if runs[v.index()].is_some_and(|run| inputs.contains(&run.input)) => {
                let input = map[runs[v.index()]?.input.index()]?;
                Some(to.reshape(input, &node.ty.shape))
            }
            (_, Form::Of { part, .. }) if *part > 0 => None,
            (_, Form::Cut) => None,
            (_, form) => {
                let term = node.operands.iter().find_map(|o| match forms[o.index()] {
                    Form::Of { part: 0, .. } => map[o.index()],
                    _ => first.get(o).copied(),
                });
                let of_parts = |o: &ValueId| !matches!(forms[o.index()], Form::Shared { .. });
                let is_sum = matches!(form, Form::Shared { .. }) && node.operands.iter().any(of_parts);
                if matches!(form, Form::Sum { .. }) {
                    first.extend(term.map(|term| (v, term)));
                    None
                } else if is_sum {
                    let term = term?;
                    sums.insert(v, term);
                    let factor = factors.get(&v).copied().unwrap_or(1);
                    Some(match factor {
                        1 => term,
                        n => {
                            let n = to.splat_like(term, n as f64);
                            to.mul(term, n)
                        }
                    })
                } else {
                    let operands: Option<Vec<ValueId>> = node.operands.iter().map(|o| map[o.index()]).collect();
                    Some(to.append(Node { operands: operands?, ..node.clone() }))
                }
            }
        };
        map.push(new);
    }
    let outputs: Option<Vec<ValueId>> = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to.outputs = outputs?;
    to.take_pins(graph, |v| map[v.index()]);
    Some(Rebuilt { graph: to, sums })
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::batch::rebatch;
    use altiplano_ir::interpret;
    use altiplano_ir::tensor::Tensor;
    use altiplano_ir::text::parse;

    fn loss_of(graph: &Graph) -> f64 {
        let results = interpret::run(graph, |v| {
            let shape = graph.ty(v).clone();
            Tensor::new(shape.clone(), (0..shape.elements()).map(|i| (i as f64 * 0.7 + v.0 as f64).sin()).collect())
        });
        results[0].data[0]
    }

    /// A loss that `combine` computes from `x` and `m`, 8 samples in parts of two. `%A0` to `%A3` are sums of the
    /// parts' losses, and `%B0` to `%B3` are the parts' numbers of kept samples.
    fn accumulated(combine: &str) -> Graph {
        let mut text = String::from(
            "graph \"g\" batch=0 {\n%0: f32[3] = parameter \"w\"\n%1: f32[8,3] = input \"x\"\n%2: f32[8] = input \"m\"\n%3: f32[4,2,3] = reshape(%1)\n%4: f32[4,2] = reshape(%2)\n%5: f32[] = constant {\"value\":2.0}\n",
        );
        let mut at = 6;
        let mut combine = combine.to_string();
        for part in 0..4 {
            let mut node = |ty: &str, rest: String| {
                text += &format!("%{at}: {ty} = {rest}\n");
                at += 1;
                at - 1
            };
            let (from, to) = (part, part + 1);
            let x = node("f32[1,2,3]", format!("slice(%3) {{\"start\":[{from},0,0],\"limit\":[{to},2,3]}}"));
            let x = node("f32[2,3]", format!("reshape(%{x})"));
            let m = node("f32[1,2]", format!("slice(%4) {{\"start\":[{from},0],\"limit\":[{to},2]}}"));
            let m = node("f32[2]", format!("reshape(%{m})"));
            let y = node("f32[2]", format!("dot_general(%{x}, %0) {{\"lhs_contract\":[1],\"rhs_contract\":[0]}}"));
            let y = node("f32[2]", format!("tanh(%{y})"));
            let y = node("f32[2]", format!("multiply(%{y}, %{m})"));
            let sum = |of: usize| format!("reduce(%{of}) {{\"reducer\":\"sum\",\"dims\":[0]}}");
            let a = node("f32[]", sum(y));
            let b = node("f32[]", sum(m));
            let mean = node("f32[]", format!("divide(%{a}, %5)"));
            for (name, value) in [("%A", a), ("%B", b), ("%M", mean)] {
                combine = combine.replace(&format!("{name}{part}"), &format!("%{value}"));
            }
        }
        // The values that `combine` makes are numbered after those of the parts.
        for i in 0..combine.lines().count() {
            combine = combine.replace(&format!("%N{i} "), &format!("%{} ", at + i));
        }
        combine = combine.replace(" ,", ",").replace(" )", ")");
        for line in combine.lines() {
            text += &format!("%{at}: f32[] = {}\n", line.trim());
            at += 1;
        }
        text += &format!("}} -> (%{})", at - 1);
        parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    #[test]
    fn a_loss_over_parts_is_that_of_the_batch() {
        let sums = "add(%A0 , %A1 )\nadd(%N0 , %A2 )\nadd(%N1 , %A3 )\n";
        let counts = "add(%B0 , %B1 )\nadd(%B2 , %B3 )\nadd(%N3 , %N4 )\n";
        let means = "add(%M0 , %M1 )\nadd(%N0 , %M2 )\nadd(%N1 , %M3 )\n";
        for (combine, expected) in [
            (sums.to_string(), LossKind::Sum),
            (format!("{sums}{counts}divide(%N2 , %N5 )"), LossKind::Mean),
            (format!("{means}constant {{\"value\":4.0}}\ndivide(%N2 , %N3 )"), LossKind::Mean),
        ] {
            let graph = accumulated(&combine);
            let (part, batch) = part_of_batch(&graph).unwrap_or_else(|| panic!("{combine}"));
            assert_eq!(batch, 8);
            assert_eq!(part.inputs().map(|(v, _)| part.shape(v)[0]).collect::<Vec<_>>(), [2, 2], "{combine}");
            let found = find_batch(&part, &[Some(0), Some(0)]);
            assert_eq!((found.loss, &found.doubt), (expected, &None), "{combine}");
            let whole = rebatch(&found.graph, 8).expect("the whole batch");
            assert!((loss_of(&whole) - loss_of(&graph)).abs() < 1e-12, "{combine}");
        }
    }

    #[test]
    fn parts_that_differ_stay() {
        for combine in [
            // A part is missing, or counts twice.
            "add(%A0 , %A1 )\nadd(%N0 , %A2 )",
            "add(%A0 , %A1 )\nadd(%A2 , %A3 )\nadd(%N0 , %N1 )\nadd(%N2 , %A0 )",
            // Parts of different kinds, and a product of parts.
            "add(%A0 , %A1 )\nadd(%A2 , %B3 )\nadd(%N0 , %N1 )",
            "multiply(%A0 , %A1 )\nmultiply(%A2 , %A3 )\nadd(%N0 , %N1 )",
        ] {
            assert_eq!(part_of_batch(&accumulated(combine)), None, "{combine}");
        }
    }
}

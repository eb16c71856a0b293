//! Unstacking of parameters. A loop over layers has one parameter with the weights of all layers, and each iteration
//! reads a row. Split into rows, it is like a model with unrolled layers, and is planned as such.

use altiplano_ir::graph::{Graph, Node, Pin, ValueId};
use altiplano_ir::names::row_name;
use altiplano_ir::op::{Op, Operator, Parameter, Reshape, Slice};
use altiplano_ir::simplify::without_dead_nodes;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Replaces each parameter that is only used row by row, along dimension 0, by a parameter for each row without that
/// dimension. Elementwise ops in between are applied to the rows.
pub fn unstack(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    // A row of a stack of stacks is a stack itself.
    while let Some(unstacked) = unstack_once(&graph) {
        graph = unstacked;
    }
    graph
}

/// A value that holds rows of a stack.
#[derive(Clone)]
struct Rows {
    stack: ValueId,
    /// The rows of the stack in this value, in order.
    rows: Vec<u64>,
}

fn unstack_once(graph: &Graph) -> Option<Graph> {
    let stacks = stacks(graph);
    if stacks.is_empty() {
        return None;
    }
    let holds = rows_held(graph, &stacks);
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    // The value of each row of a value that holds several, made when it is first needed.
    let mut made: HashMap<(ValueId, u64), ValueId> = HashMap::new();
    for v in graph.values() {
        let node = graph.node(v);
        map.push(match (&node.op, holds.get(&v)) {
            (Op::Parameter(stack), Some(held)) if held.stack == v => {
                let mut first = None;
                for &row in &held.rows {
                    let ty = stack.ty.with_shape(&stack.ty.shape[1..]);
                    let name = row_name(&stack.name, row);
                    let op = Op::Parameter(Parameter { name: name.clone(), ty: ty.clone(), ..stack.clone() });
                    let value = to.append(Node { op, operands: Vec::new(), ty, batch_dims: 0, name });
                    first.get_or_insert(value);
                    made.insert((v, row), value);
                }
                first.unwrap_or(ValueId(0))
            }
            (_, Some(Rows { rows, .. })) if rows.len() == 1 && is_slice(node) => {
                let row = row_of(graph, v, rows[0], &mut made, &mut to);
                let op = Op::Reshape(Reshape { shape: node.ty.shape.clone() });
                let reshaped = to.emit(op, &[row]);
                node.name.clone_into(&mut to.nodes[reshaped.index()].name);
                reshaped
            }
            // Only the value's rows are used, and each is made at its use.
            (_, Some(_)) => ValueId(0),
            _ => {
                let operands: Vec<ValueId> = node.operands.iter().map(|o| map[o.index()]).collect();
                // Reshaping a row back to its own shape gives the row.
                let row = match (&node.op, operands.as_slice()) {
                    (Op::Reshape(_), [reshaped]) => unshaped(&to, *reshaped, &node.ty.shape),
                    _ => None,
                };
                row.unwrap_or_else(|| to.append(Node { operands, ..node.clone() }))
            }
        });
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    for pin in &graph.pins {
        match holds.get(&pin.value) {
            None => to.pin(Pin { value: map[pin.value.index()], ..pin.clone() }),
            // A pin of the stack applies to its rows, without the removed dimension.
            Some(held) if held.stack == pin.value => {
                for row in &held.rows {
                    let value = made[&(pin.value, *row)];
                    to.pin(Pin { value, dims: pin.dims[1..].to_vec(), ..pin.clone() });
                }
            }
            Some(_) => {}
        }
    }
    Some(without_dead_nodes(&to))
}

/// Row `row` of the stack in the form of `v`, without dimension 0.
fn row_of(graph: &Graph, v: ValueId, row: u64, made: &mut HashMap<(ValueId, u64), ValueId>, to: &mut Graph) -> ValueId {
    if let Some(&value) = made.get(&(v, row)) {
        return value;
    }
    let node = graph.node(v);
    let source = row_of(graph, node.operands[0], row, made, to);
    let value = if is_slice(node) {
        source
    } else {
        let shape = to.shape(source).to_vec();
        let op = node.op.resized(&[&shape], &shape);
        let value = to.emit(op, &[source]);
        node.name.clone_into(&mut to.nodes[value.index()].name);
        value
    };
    made.insert((v, row), value);
    value
}

/// The operand of a reshape, if it has this shape.
fn unshaped(graph: &Graph, v: ValueId, shape: &[u64]) -> Option<ValueId> {
    let node = graph.node(v);
    let source = *node.operands.first().filter(|_| matches!(node.op, Op::Reshape(_)))?;
    (graph.shape(source) == shape).then_some(source)
}

fn is_slice(node: &Node) -> bool {
    matches!(node.op, Op::Slice(_))
}

/// The parameters that are used only row by row.
fn stacks(graph: &Graph) -> BTreeSet<ValueId> {
    let users = graph.users();
    let outputs: BTreeSet<ValueId> = graph.outputs.iter().copied().collect();
    let names: BTreeSet<&str> =
        graph.parameters().map(|(_, name)| name).chain(graph.inputs().map(|(_, name)| name)).collect();
    let is_stack = |&stack: &ValueId| {
        let Op::Parameter(Parameter { name, ty, .. }) = &graph.node(stack).op else {
            return false;
        };
        // Layers are nodes, so a stack of layers has no more rows than the graph has nodes.
        let Some(&rows) = ty.shape.first().filter(|&&rows| rows <= graph.len() as u64) else { return false };
        let mut pending = vec![stack];
        let mut found = false;
        while let Some(v) = pending.pop() {
            // The layout of several rows at once can only be kept while they stay together.
            let mut pins = graph.pins.iter().filter(|pin| pin.value == v);
            if outputs.contains(&v) || !pins.all(|pin| v == stack && pin.dims[0].axes.is_empty()) {
                return false;
            }
            for &user in &users[v.index()] {
                let node = graph.node(user);
                match &node.op {
                    Op::Slice(slice) if whole_but_first(slice, graph.shape(v)) => match node.ty.shape[0] {
                        0 => return false,
                        1 => found = true,
                        _ => pending.push(user),
                    },
                    Op::Unary(_) | Op::Convert(_) | Op::ReducePrecision(_) => pending.push(user),
                    _ => return false,
                }
            }
        }
        found && (0..rows).all(|row| !names.contains(row_name(name, row).as_str()))
    };
    graph.parameters().map(|(v, _)| v).filter(is_stack).collect()
}

fn whole_but_first(slice: &Slice, shape: &[u64]) -> bool {
    (1..shape.len()).all(|d| slice.start[d] == 0 && slice.limit[d] == shape[d] && slice.stride[d] == 1)
}

/// The rows in each value that is derived from a stack, down to single rows.
fn rows_held(graph: &Graph, stacks: &BTreeSet<ValueId>) -> BTreeMap<ValueId, Rows> {
    let mut holds: BTreeMap<ValueId, Rows> = BTreeMap::new();
    for v in graph.values() {
        let node = graph.node(v);
        if stacks.contains(&v) {
            holds.insert(v, Rows { stack: v, rows: (0..graph.shape(v)[0]).collect() });
            continue;
        }
        let Some(held) = node.operands.first().and_then(|o| holds.get(o)) else { continue };
        // Once a row is sliced out, further ops do not concern the stack.
        if held.rows.len() == 1 && is_slice(graph.node(node.operands[0])) {
            continue;
        }
        let rows = match &node.op {
            Op::Slice(slice) => {
                let range = slice.start[0] as usize..slice.limit[0] as usize;
                held.rows[range].iter().copied().step_by(slice.stride[0] as usize).collect()
            }
            _ => held.rows.clone(),
        };
        let stack = held.stack;
        holds.insert(v, Rows { stack, rows });
    }
    holds
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::interpret;
    use altiplano_ir::names::stack_of;
    use altiplano_ir::tensor::Tensor;

    /// The outputs for parameters that count up, with rows equal to those of their stack.
    fn outputs(graph: &Graph) -> Vec<Tensor> {
        interpret::run(graph, |leaf| {
            let ty = graph.ty(leaf).clone();
            let mut first = 0;
            let mut elements = ty.elements();
            let mut name = match &graph.node(leaf).op {
                Op::Parameter(parameter) => parameter.name.as_str(),
                _ => "",
            };
            while let Some((stack, row)) = stack_of(name) {
                first += row * elements;
                elements *= 3;
                name = stack;
            }
            let data = (0..ty.elements()).map(|i| (first + i) as f64).collect();
            Tensor::new(ty, data)
        })
    }

    /// A table of which one row is read is not a stack of layers, however many rows it has.
    #[test]
    fn tables_are_no_stacks() {
        let mut graph = Graph::new("table");
        let ty = altiplano_ir::types::TensorType::new(altiplano_ir::dtype::DType::F32, [1 << 32, 2]);
        let table = graph.emit(Op::Parameter(Parameter::new("table", ty)), &[]);
        let slice = Slice { start: vec![7, 0], limit: vec![8, 2], stride: vec![1, 1] };
        let row = graph.emit(Op::Slice(slice), &[table]);
        graph.outputs = vec![row];
        assert_eq!(unstack(&graph), graph);
    }

    fn check(body: &str, parameters: &[&str]) {
        let text = format!("graph \"g\" {{\n{body}\n}}");
        let text = text.replace("\n}", "\n} -> (%9)");
        let graph = altiplano_ir::text::parse(&text).unwrap();
        let unstacked = unstack(&graph);
        assert_eq!(unstacked.verify(), [], "{text}");
        let names: Vec<&str> = unstacked.parameters().map(|(_, name)| name).collect();
        assert_eq!(names, parameters, "{text}");
        assert_eq!(outputs(&unstacked), outputs(&graph), "{text}");
    }

    #[test]
    fn parameters_used_by_rows_become_rows() {
        let slice =
            |start: u64, limit: u64| format!("{{\"start\":[{start},0],\"limit\":[{limit},2],\"stride\":[1,1]}}");
        let (first, second, both, third) = (slice(0, 1), slice(1, 2), slice(0, 2), slice(2, 3));
        let rest = "%7: f32[2] = reshape(%5)\n%8: f32[2] = reshape(%6)\n%9: f32[2] = add(%7, %8)";
        let of = |a: &str, b: &str, c: &str, d: &str, e: &str| {
            format!(
                "%0: f32[3,2] = parameter \"w\"\n%1: f32[3,2] = parameter \"v\"\n%2: {a}\n%3: {b}\n%4: {c}\n%5: {d}\n%6: {e}\n{rest}"
            )
        };
        // Two single rows, one of them through an elementwise function.
        check(
            &of(
                "f32[3,2] = exponential(%0)",
                &format!("f32[1,2] = slice(%2) {second}"),
                "f32[3,2] = negate(%1)",
                &format!("f32[1,2] = slice(%2) {third}"),
                "f32[1,2] = add(%3, %5)",
            ),
            &["w[0]", "w[1]", "w[2]", "v"],
        );
        // A row of two rows.
        check(
            &of(
                &format!("f32[2,2] = slice(%0) {both}"),
                &format!("f32[1,2] = slice(%2) {second}"),
                &format!("f32[1,2] = slice(%0) {first}"),
                "f32[1,2] = negate(%3)",
                "f32[1,2] = add(%3, %4)",
            ),
            &["w[0]", "w[1]", "w[2]", "v"],
        );
        // Two rows are used at once.
        check(
            &of(
                &format!("f32[2,2] = slice(%0) {both}"),
                "f32[2,2] = add(%2, %2)",
                &format!("f32[1,2] = slice(%0) {first}"),
                &format!("f32[1,2] = slice(%3) {first}"),
                "f32[1,2] = negate(%4)",
            ),
            &["w", "v"],
        );
    }

    #[test]
    fn stacks_of_stacks_and_pins() {
        let text = "graph \"g\" {
            %0: f32[3,3,2] = parameter \"w\"
            %1: f32[1,3,2] = slice(%0) {\"start\":[1,0,0],\"limit\":[2,3,2],\"stride\":[1,1,1]}
            %2: f32[3,2] = reshape(%1)
            %3: f32[1,2] = slice(%2) {\"start\":[2,0],\"limit\":[3,2],\"stride\":[1,1]}
            %4: f32[2] = reshape(%3)
            pin {\"value\":0,\"mesh\":[[\"x\",2]],\"dims\":[{},{},{\"axes\":[\"x\"]}]}
        } -> (%4)";
        let graph = altiplano_ir::text::parse(text).unwrap();
        let unstacked = unstack(&graph);
        assert_eq!(unstacked.verify(), []);
        assert_eq!(outputs(&unstacked), outputs(&graph));
        let names: Vec<&str> = unstacked.parameters().map(|(_, name)| name).collect();
        assert_eq!(names, ["w[0]", "w[1][0]", "w[1][1]", "w[1][2]", "w[2]"]);
        let pins: Vec<String> = unstacked.pins.iter().map(Pin::to_string).collect();
        let expected: Vec<String> = (0..5)
            .map(|v| match v {
                0 | 4 => format!("%{v} on mesh<x=2>: [{{}}, {{x}}]"),
                _ => format!("%{v} on mesh<x=2>: [{{x}}]"),
            })
            .collect();
        assert_eq!(pins, expected);
    }
}

//! Graphs in the DOT language, for Graphviz and other readers. Nodes carry op and type, and edges the operand number.

use crate::graph::{Graph, ValueId};
use crate::op::Op;
use petgraph::dot::{Config, Dot};
use petgraph::graph::DiGraph;

/// Converts the graph to a directed graph of petgraph. It has a node for each value and an edge from each operand to
/// its user, weighted with the operand's number. Node indices are value numbers.
fn to_petgraph(graph: &Graph) -> DiGraph<ValueId, usize> {
    let mut directed = DiGraph::with_capacity(graph.len(), graph.len());
    let nodes: Vec<_> = graph.values().map(|v| directed.add_node(v)).collect();
    for v in graph.values() {
        for (i, o) in graph.node(v).operands.iter().enumerate() {
            directed.add_edge(nodes[o.index()], nodes[v.index()], i);
        }
    }
    directed
}

/// The graph in the DOT language.
pub fn to_dot(graph: &Graph) -> String {
    let directed = to_petgraph(graph);
    let label = |_: &DiGraph<ValueId, usize>, (_, v): (petgraph::graph::NodeIndex, &ValueId)| {
        let node = graph.node(*v);
        let name = match &node.op {
            Op::Parameter(p) => p.name.as_str(),
            Op::Input(i) => i.name.as_str(),
            op => op.name(),
        };
        // Names come from the user's file: quotes and backslashes must not end the string.
        let name = name.replace('\\', "\\\\").replace('"', "\\\"");
        let shape = if node.op.is_leaf() { "box" } else { "ellipse" };
        format!("label = \"{v} {name}\\n{}\" shape = {shape}", node.ty)
    };
    let config = [Config::NodeNoLabel, Config::EdgeNoLabel];
    format!("{:?}", Dot::with_attr_getters(&directed, &config, &|_, _| String::new(), &label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_nodes_and_edges_and_escapes_names() {
        let text = "graph \"g\" batch=0 {\n  %0: f32[2] = parameter \"a\\\"b\"\n  %1: f32[2] = negate(%0)\n} -> (%1)";
        let dot = to_dot(&crate::text::parse(text).expect("a graph"));
        assert!(dot.contains("label = \"%0 a\\\"b\\nf32[2]\" shape = box"), "{dot}");
        assert!(dot.contains("0 -> 1"), "{dot}");
        assert_eq!(to_petgraph(&crate::text::parse(text).expect("a graph")).edge_count(), 1);
    }
}

//! Mutations of ONNX files by the message: a protocol buffer of damaged bytes is seldom one, and says little of the reader.

use crate::Random;
use altiplano::import::onnx::proto::{Attribute, Graph, Model, Node, Tensor};
use prost::Message;

const NUMBERS: [i64; 16] = [0, 1, 2, 3, 4, 7, 8, 16, 64, 1000, -1, -2, 65536, 1 << 32, i64::MAX, i64::MIN];

/// Changes a few things in the model of `data[..size]`; what is no model is changed as bytes, and so is every fourth model.
pub fn mutate(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut random = Random::of(seed);
    let model = Model::decode(&data[..size]);
    match model {
        Ok(mut model) if random.below(4) > 0 => {
            for _ in 0..=random.below(3) {
                change(&mut model, &mut random);
            }
            written(&model, data, max_size).unwrap_or(size)
        }
        _ => libfuzzer_sys::fuzzer_mutate(data, size, max_size),
    }
}

/// A model with a node or a tensor of another: how the ops of one seed come among the values of the next.
pub fn cross_over(data: &[u8], other: &[u8], out: &mut [u8], seed: u32) -> usize {
    let mut random = Random::of(seed);
    let (Ok(mut model), Ok(other)) = (Model::decode(data), Model::decode(other)) else { return 0 };
    let (Some(graph), Some(other)) = (&mut model.graph, other.graph) else { return 0 };
    if let Some(node) = one(&other.node, &mut random) {
        let mut node = node.clone();
        for input in &mut node.input {
            if let Some(name) = some_value(graph, &mut random) {
                *input = name;
            }
        }
        match random.below(2) {
            0 if !graph.node.is_empty() => {
                let at = random.below(graph.node.len());
                node.output.clone_from(&graph.node[at].output);
                graph.node[at] = node;
            }
            _ => graph.node.push(node),
        }
    }
    if let Some(tensor) = one(&other.initializer, &mut random).cloned() {
        let at = random.below(graph.initializer.len());
        match graph.initializer.get_mut(at) {
            Some(place) => *place = Tensor { name: place.name.clone(), ..tensor },
            None => graph.initializer.push(tensor),
        }
    }
    let most = out.len();
    written(&model, out, most).unwrap_or(0)
}

/// The bytes of the model at the beginning of `data`, where there is room for them.
fn written(model: &Model, data: &mut [u8], max_size: usize) -> Option<usize> {
    let bytes = model.encode_to_vec();
    let room = data.get_mut(..bytes.len()).filter(|_| bytes.len() <= max_size)?;
    room.copy_from_slice(&bytes);
    Some(bytes.len())
}

fn one<'a, T>(list: &'a [T], random: &mut Random) -> Option<&'a T> {
    list.get(random.below(list.len()))
}

fn some_value(graph: &Graph, random: &mut Random) -> Option<String> {
    match random.below(4) {
        0 => one(&graph.input, random).map(|value| value.name.clone()),
        1 => one(&graph.initializer, random).map(|tensor| tensor.name.clone()),
        2 => one(&graph.output, random).map(|value| value.name.clone()),
        _ => one(&one(&graph.node, random)?.output, random).cloned(),
    }
}

fn number(random: &mut Random) -> i64 {
    NUMBERS[random.below(NUMBERS.len())]
}

fn change(model: &mut Model, random: &mut Random) {
    if random.below(16) == 0
        && let Some(set) = model.opset_import.first_mut()
    {
        set.version = random.below(27) as i64;
    }
    let in_functions: usize = model.functions.iter().map(|f| f.node.len()).sum();
    if in_functions > 0 && random.below(2) == 0 {
        let at = random.below(model.functions.len());
        change_nodes(&mut model.functions[at].node, None, random);
    } else if let Some(graph) = &mut model.graph {
        change_graph(graph, random);
    }
}

fn change_graph(graph: &mut Graph, random: &mut Random) {
    let name = some_value(graph, random);
    let (tensors, inputs) = (graph.initializer.len(), graph.input.len());
    match random.below(8) {
        0 if tensors > 0 => change_tensor(&mut graph.initializer[random.below(tensors)], random),
        1 if inputs > 0 => {
            let input = &mut graph.input[random.below(inputs)];
            let Some(ty) = input.ty.as_mut().and_then(|ty| ty.tensor.as_mut()) else { return };
            if random.below(4) == 0 {
                ty.elem_type = random.below(27) as i32;
            }
            let Some(shape) = &mut ty.shape else { return };
            change_list(&mut shape.dim, random, |dim, random| match random.below(3) {
                0 => (dim.value, dim.param) = (None, Some("n".to_string())),
                _ => (dim.value, dim.param) = (Some(number(random)), None),
            });
        }
        2 if random.below(4) == 0 => change_list(&mut graph.output, random, |output, _| {
            output.name = name.unwrap_or_default();
        }),
        _ => change_nodes(&mut graph.node, name, random),
    }
}

fn change_nodes(nodes: &mut Vec<Node>, name: Option<String>, random: &mut Random) {
    if nodes.is_empty() {
        return;
    }
    let (at, other) = (random.below(nodes.len()), random.below(nodes.len()));
    let bodies = nodes[at].attribute.iter_mut().filter_map(|a| a.g.as_deref_mut());
    let mut bodies: Vec<&mut Graph> = bodies.collect();
    if !bodies.is_empty() && random.below(3) > 0 {
        let at = random.below(bodies.len());
        return change_graph(bodies[at], random);
    }
    match random.below(10) {
        0 => drop(nodes.remove(at)),
        1 => nodes.swap(at, other),
        2 => nodes[at].op_type = nodes[other].op_type.clone(),
        3 => nodes[at].attribute = nodes[other].attribute.clone(),
        4 => change_list(&mut nodes[at].output, random, |output, _| output.clear()),
        5 | 6 => change_list(&mut nodes[at].input, random, |input, _| *input = name.unwrap_or_default()),
        _ => change_list(&mut nodes[at].attribute, random, change_attribute),
    }
}

/// Drops, repeats, swaps or changes one of a list.
fn change_list<T: Clone>(list: &mut Vec<T>, random: &mut Random, change: impl FnOnce(&mut T, &mut Random)) {
    if list.is_empty() {
        return;
    }
    let (at, other) = (random.below(list.len()), random.below(list.len()));
    match random.below(8) {
        0 => drop(list.remove(at)),
        1 => list.insert(other, list[at].clone()),
        2 => list.swap(at, other),
        _ => change(&mut list[at], random),
    }
}

fn change_attribute(attribute: &mut Attribute, random: &mut Random) {
    if let Some(value) = &mut attribute.i {
        *value = number(random);
    }
    if let Some(value) = &mut attribute.f {
        *value = [0.0, -1.0, 0.5, 1e30, f32::NAN, f32::INFINITY][random.below(6)];
    }
    change_list(&mut attribute.ints, random, |value, random| *value = number(random));
    change_list(&mut attribute.floats, random, |value, random| *value = number(random) as f32);
    if let Some(tensor) = &mut attribute.t {
        change_tensor(tensor, random);
    }
}

fn change_tensor(tensor: &mut Tensor, random: &mut Random) {
    match random.below(6) {
        0 => tensor.data_type = random.below(27) as i32,
        1 => change_list(&mut tensor.dims, random, |size, random| *size = number(random)),
        2 => tensor.dims.push(random.below(4) as i64),
        _ if !tensor.int64_data.is_empty() => {
            change_list(&mut tensor.int64_data, random, |value, random| *value = number(random));
        }
        _ if tensor.raw_data.len() >= 8 => {
            // Integers are what shapes and positions are made of.
            let at = random.below(tensor.raw_data.len() / 8) * 8;
            tensor.raw_data[at..at + 8].copy_from_slice(&number(random).to_le_bytes());
        }
        _ => change_list(&mut tensor.float_data, random, |value, random| *value = number(random) as f32),
    }
}

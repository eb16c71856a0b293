//! Recurrent layers, written out step by step. Operands: the sequence `[T, B, I]`, weights `[directions, gates H, I]` and
//! `[directions, gates H, H]`, biases of both one after the other, lengths, and the first states `[directions, B, H]`.

use super::call::{Call, Many, attribute, bad_value};
use super::report::Reject;
use crate::array;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, ShapeError, Unary};

/// Longer sequences would make a graph that nobody can plan.
const MOST_STEPS: u64 = 4096;

type Built<T> = Result<T, ShapeError>;

/// One direction of a layer, with its parts cut out.
struct Layer {
    input: ValueId,
    recurrent: ValueId,
    /// Of the input's products and of the recurrent ones, both `[gates H]`.
    biases: Option<[ValueId; 2]>,
    /// Hidden and, of an LSTM, cell state, `[B, H]`.
    states: Vec<ValueId>,
    /// Weights of the cell state in the gates i, o, f, `[H]` each.
    peepholes: Option<[ValueId; 3]>,
    activations: Vec<Activation>,
    hidden: u64,
}

#[derive(Clone, Copy)]
enum Activation {
    Sigmoid,
    Tanh,
    Relu,
}

impl Activation {
    fn apply(self, g: &mut Graph, x: ValueId) -> Built<ValueId> {
        match self {
            Activation::Sigmoid => array::sigmoid(g, x),
            Activation::Tanh => array::unary(g, Unary::Tanh, x),
            Activation::Relu => array::relu(g, x),
        }
    }
}

/// One step: from the products of the input, `[B, gates H]`, to the new states.
type Step<'a> = &'a dyn Fn(&mut Graph, &Layer, ValueId, &[ValueId]) -> Built<Vec<ValueId>>;

pub fn rnn(c: &mut Call) -> Many {
    run(c, 1, &[Activation::Tanh], 1, &|g, layer, x, states| {
        let h = product(g, layer, states[0])?;
        let sum = array::binary(g, Binary::Add, x, h)?;
        Ok(vec![layer.activations[0].apply(g, sum)?])
    })
}

/// Cho et al. 2014. Gates are update, reset, hidden.
pub fn gru(c: &mut Call) -> Many {
    let reset_after = c.flag("linear_before_reset", false)?;
    run(c, 3, &[Activation::Sigmoid, Activation::Tanh], 1, &|g, layer, x, states| {
        let (n, h) = (layer.hidden, states[0]);
        let parts = array::split(g, x, 1, &[2 * n, n])?;
        let gates = |g: &mut Graph, from: u64, to: u64, h: ValueId| {
            let w = array::slice_dim(g, layer.recurrent, 0, (from * n) as i64, (to * n) as i64, 1)?;
            let bias = match layer.biases {
                Some([_, b]) => Some(array::slice_dim(g, b, 0, (from * n) as i64, (to * n) as i64, 1)?),
                None => None,
            };
            array::linear(g, h, w, bias)
        };
        let of_state = gates(g, 0, 2, h)?;
        let both = array::binary(g, Binary::Add, parts[0], of_state)?;
        let both = layer.activations[0].apply(g, both)?;
        let both = array::split(g, both, 1, &[n, n])?;
        let (update, reset) = (both[0], both[1]);
        let of_state = if reset_after {
            let linear = gates(g, 2, 3, h)?;
            array::binary(g, Binary::Multiply, reset, linear)?
        } else {
            let kept = array::binary(g, Binary::Multiply, reset, h)?;
            gates(g, 2, 3, kept)?
        };
        let sum = array::binary(g, Binary::Add, parts[1], of_state)?;
        let new = layer.activations[1].apply(g, sum)?;
        // (1 - z) new + z h
        let distance = array::binary(g, Binary::Subtract, h, new)?;
        let moved = array::binary(g, Binary::Multiply, update, distance)?;
        Ok(vec![array::binary(g, Binary::Add, new, moved)?])
    })
}

/// Hochreiter & Schmidhuber 1997. Gates are input, output, forget, cell.
pub fn lstm(c: &mut Call) -> Many {
    if c.flag("input_forget", false)? {
        return Err(Reject::Unsupported("with coupled gates"));
    }
    run(c, 4, &[Activation::Sigmoid, Activation::Tanh, Activation::Tanh], 2, &|g, layer, x, states| {
        let (h, cell) = (states[0], states[1]);
        let of_state = product(g, layer, h)?;
        let sums = array::binary(g, Binary::Add, x, of_state)?;
        let parts = array::split(g, sums, 1, &[layer.hidden; 4])?;
        let gate = |g: &mut Graph, part: ValueId, peephole: usize, cell: ValueId| {
            let sum = match layer.peepholes {
                Some(weights) => {
                    let seen = array::binary(g, Binary::Multiply, cell, weights[peephole])?;
                    array::binary(g, Binary::Add, part, seen)?
                }
                None => part,
            };
            layer.activations[0].apply(g, sum)
        };
        let input = gate(g, parts[0], 0, cell)?;
        let forget = gate(g, parts[2], 2, cell)?;
        let new = layer.activations[1].apply(g, parts[3])?;
        let kept = array::binary(g, Binary::Multiply, forget, cell)?;
        let added = array::binary(g, Binary::Multiply, input, new)?;
        let cell = array::binary(g, Binary::Add, kept, added)?;
        let output = gate(g, parts[1], 1, cell)?;
        let shown = layer.activations[2].apply(g, cell)?;
        Ok(vec![array::binary(g, Binary::Multiply, output, shown)?, cell])
    })
}

/// The recurrent products of all gates.
fn product(g: &mut Graph, layer: &Layer, h: ValueId) -> Built<ValueId> {
    array::linear(g, h, layer.recurrent, layer.biases.map(|[_, b]| b))
}

fn activations(c: &Call, directions: usize, default: &[Activation]) -> Result<Vec<Vec<Activation>>, Reject> {
    let Some(names) = c.texts("activations")? else { return Ok(vec![default.to_vec(); directions]) };
    let known = |name: &&str| match name.to_ascii_lowercase().as_str() {
        "sigmoid" => Ok(Activation::Sigmoid),
        "tanh" => Ok(Activation::Tanh),
        "relu" => Ok(Activation::Relu),
        _ => Err(Reject::Unsupported("with an unusual activation")),
    };
    let all: Vec<Activation> = names.iter().map(known).collect::<Result<_, _>>()?;
    if all.len() != directions * default.len() {
        return Err(attribute("activations"));
    }
    Ok(all.chunks(default.len()).map(<[Activation]>::to_vec).collect())
}

fn run(c: &mut Call, gates: u64, default: &[Activation], num_states: usize, step: Step) -> Many {
    let mut x = c.x(0)?;
    let batch_first = c.flag("layout", false)?;
    if c.rank(x) != 3 {
        return Err(bad_value(0));
    }
    if batch_first {
        x = array::permute(c.g(), x, &[1, 0, 2])?;
    }
    let [steps, samples, _] = <[u64; 3]>::try_from(c.shape(x)).map_err(|_| bad_value(0))?;
    if c.float_opt("clip")?.is_some() {
        return Err(Reject::Unsupported("with clipping"));
    }
    if c.opt(4).is_some() && !c.known(4).is_some_and(|l| l.data.iter().all(|&n| n == steps as f64)) {
        return Err(Reject::Unsupported("of sequences of different lengths"));
    }
    if steps == 0 || steps > MOST_STEPS {
        return Err(Reject::Unsupported("of no or more than 4096 steps"));
    }
    let directions = match c.text("direction", "forward")? {
        "forward" => vec![false],
        "reverse" => vec![true],
        "bidirectional" => vec![false, true],
        _ => return Err(attribute("direction")),
    };
    let activations = activations(c, directions.len(), default)?;
    let mut sequences = Vec::new();
    let mut lasts: Vec<Vec<ValueId>> = vec![Vec::new(); num_states];
    for (d, (&backwards, activations)) in directions.iter().zip(activations).enumerate() {
        let layer = layer(c, d as i64, gates, samples, num_states, batch_first, activations)?;
        let g = c.g();
        // The products of the input of all steps at once.
        let of_input = array::linear(g, x, layer.input, layer.biases.map(|[b, _]| b))?;
        let mut states = layer.states.clone();
        let mut row = Vec::with_capacity(steps as usize);
        for i in 0..steps {
            let at = if backwards { steps - 1 - i } else { i };
            let now = array::select_dim(g, of_input, 0, at as i64)?;
            states = step(g, &layer, now, &states)?;
            row.push(states[0]);
        }
        if backwards {
            row.reverse();
        }
        sequences.push(array::stack(g, &row, 0)?);
        states.into_iter().zip(&mut lasts).for_each(|(state, list)| list.push(state));
    }
    // [T, directions, B, H], or with the batch first [B, T, directions, H].
    let g = c.g();
    let mut results = vec![array::stack(g, &sequences, 1)?];
    if batch_first {
        results[0] = array::permute(g, results[0], &[2, 0, 1, 3])?;
    }
    for list in lasts {
        results.push(array::stack(g, &list, usize::from(batch_first))?);
    }
    Ok(results)
}

fn layer(
    c: &mut Call,
    direction: i64,
    gates: u64,
    samples: u64,
    num_states: usize,
    batch_first: bool,
    activations: Vec<Activation>,
) -> Result<Layer, Reject> {
    let part = |c: &mut Call, index: usize| -> Result<Option<ValueId>, Reject> {
        let Some(value) = c.opt(index) else { return Ok(None) };
        Ok(Some(array::select_dim(c.g(), value, 0, direction)?))
    };
    let (w, r) = (c.x(1)?, c.x(2)?);
    let (input, recurrent) = (array::select_dim(c.g(), w, 0, direction)?, array::select_dim(c.g(), r, 0, direction)?);
    let hidden = *c.shape(recurrent).last().ok_or(bad_value(2))?;
    let wide = hidden.checked_mul(gates).ok_or(bad_value(2))?;
    if c.shape(recurrent) != [wide, hidden] {
        return Err(bad_value(2));
    }
    let biases = match part(c, 3)? {
        None => None,
        Some(both) => {
            let parts = array::split(c.g(), both, 0, &[wide, wide])?;
            Some([parts[0], parts[1]])
        }
    };
    let mut states = Vec::new();
    let dtype = c.dtype(recurrent);
    for i in 0..num_states {
        states.push(match c.opt(5 + i) {
            None => array::full(c.g(), &[samples, hidden], 0.0, dtype)?,
            Some(state) => array::select_dim(c.g(), state, usize::from(batch_first), direction)?,
        });
    }
    let peepholes = match if num_states == 2 { part(c, 7)? } else { None } {
        None => None,
        Some(all) => {
            let parts = array::split(c.g(), all, 0, &[hidden; 3])?;
            Some([parts[0], parts[1], parts[2]])
        }
    };
    Ok(Layer { input, recurrent, biases, states, peepholes, activations, hidden })
}

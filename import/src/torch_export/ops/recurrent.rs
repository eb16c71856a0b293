//! Lowers recurrent layers and their cells, unrolled step by step.

use super::random::dropped;
use super::*;
use Lowering::Function;
use altiplano_ir::array::{Cell, Gate, MOST_STEPS, Recurrent};

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("lstm", Function(|c| layers(c, &lstm()))),
    ("gru", Function(|c| layers(c, &gru()))),
    ("rnn_tanh", Function(|c| layers(c, &Cell::Rnn { activation: Gate::Tanh }))),
    ("rnn_relu", Function(|c| layers(c, &Cell::Rnn { activation: Gate::Relu }))),
    ("lstm_cell", Function(|c| one_step(c, lstm()))),
    ("gru_cell", Function(|c| one_step(c, gru()))),
    ("rnn_tanh_cell", Function(|c| one_step(c, Cell::Rnn { activation: Gate::Tanh }))),
    ("rnn_relu_cell", Function(|c| one_step(c, Cell::Rnn { activation: Gate::Relu }))),
];

/// PyTorch's gates are input, forget, cell, output.
fn lstm() -> Cell {
    Cell::Lstm { order: [0, 3, 1, 2], gates: Gate::Sigmoid, activation: Gate::Tanh, shown: Gate::Tanh, peepholes: None }
}

/// PyTorch's gates are reset, update, new.
fn gru() -> Cell {
    Cell::Gru { update: 1, reset: 0, reset_after: true, gates: Gate::Sigmoid, activation: Gate::Tanh }
}

/// The initial states. An LSTM has two.
fn first_states(c: &mut Call<'_>) -> Result<Vec<ValueId>, Reject> {
    if c.is_tensor("hx") { Ok(vec![c.tensor("hx")?]) } else { c.tensors("hx") }
}

/// Stacked layers, each in one direction or both. `params` has the weights of input and state for each, and two
/// biases.
fn layers(c: &mut Call<'_>, cell: &Cell) -> Lowered {
    if c.has("batch_sizes") {
        return Err(Reject::Unsupported("of packed sequences"));
    }
    let (mut x, first, params) = (c.tensor("input")?, first_states(c)?, c.tensors("params")?);
    let (count, biased) = (c.size("num_layers")? as usize, c.bool("has_biases", true)?);
    let (batch_first, directions) = (c.bool("batch_first", false)?, 1 + usize::from(c.bool("bidirectional", false)?));
    let (p, train) = (c.float("dropout", 0.0)?, c.bool("train", false)?);
    let each = if biased { 4 } else { 2 };
    if first.len() != cell.states() || params.is_empty() || count.checked_mul(directions * each) != Some(params.len()) {
        return Err(Reject::Unsupported("with projections"));
    }
    if c.rank(x) != 3 {
        return problem("needs a sequence of three dimensions");
    }
    if batch_first {
        x = a::permute(c.g(), x, &[1, 0, 2])?;
    }
    if c.shape_of(x)[0] > MOST_STEPS {
        return Err(Reject::Unsupported("of more than 4096 steps"));
    }
    let mut lasts: Vec<Vec<ValueId>> = vec![Vec::new(); cell.states()];
    for (n, weights) in params.chunks(directions * each).enumerate() {
        if n > 0 && train && p > 0.0 {
            x = dropped(c, x, p)?;
        }
        let mut sequences = Vec::new();
        for (d, weights) in weights.chunks(each).enumerate() {
            let biases = if biased { Some([weights[2], weights[3]]) } else { None };
            let layer = Recurrent {
                cell: cell.clone(),
                input: weights[0],
                recurrent: weights[1],
                biases,
                backwards: d == 1,
                lengths: None,
            };
            let row = (n * directions + d) as i64;
            let first = first.iter().map(|&state| a::select_dim(c.g(), state, 0, row)).collect::<Result<_, _>>()?;
            let (sequence, last) = layer.run(c.g(), x, Some(first))?;
            sequences.push(sequence);
            lasts.iter_mut().zip(last).for_each(|(all, last)| all.push(last));
        }
        x = a::concat(c.g(), &sequences, 2)?;
    }
    if batch_first {
        x = a::permute(c.g(), x, &[1, 0, 2])?;
    }
    let mut results = vec![x];
    for states in lasts {
        results.push(a::stack(c.g(), &states, 0)?);
    }
    Ok(Out::Values(results))
}

/// A sequence of one step.
fn one_step(c: &mut Call<'_>, cell: Cell) -> Lowered {
    let (x, first) = (c.tensor("input")?, first_states(c)?);
    let (input, recurrent) = (c.tensor("w_ih")?, c.tensor("w_hh")?);
    let biases = match (c.maybe_tensor("b_ih")?, c.maybe_tensor("b_hh")?) {
        (Some(of_input), Some(of_state)) => Some([of_input, of_state]),
        _ => None,
    };
    if first.len() != cell.states() {
        return problem("has another number of states than its kind of cell");
    }
    let x = a::unsqueeze(c.g(), x, 0)?;
    let layer = Recurrent { cell, input, recurrent, biases, backwards: false, lengths: None };
    Ok(Out::Values(layer.run(c.g(), x, Some(first))?.1))
}

//! Recurrent layers. The operands are the sequence `[T, B, I]`, weights `[directions, gates H, I]` and
//! `[directions, gates H, H]`, the biases of both concatenated, lengths, and the initial states `[directions, B, H]`.

use super::call::{Call, Many, attribute, bad_value};
use super::report::Reject;
use altiplano_ir::array::{self, Cell, Gate, MOST_STEPS, Recurrent};
use altiplano_ir::graph::ValueId;

pub(crate) fn rnn(c: &mut Call) -> Many {
    run(c, &[Gate::Tanh], |_, _, given| Ok(Cell::Rnn { activation: given[0] }))
}

/// The gates are update, reset, hidden.
pub(crate) fn gru(c: &mut Call) -> Many {
    let reset_after = c.flag("linear_before_reset", false)?;
    run(c, &[Gate::Sigmoid, Gate::Tanh], |_, _, given| {
        Ok(Cell::Gru { update: 0, reset: 1, reset_after, gates: given[0], activation: given[1] })
    })
}

/// The gates are input, output, forget, cell.
pub(crate) fn lstm(c: &mut Call) -> Many {
    if c.flag("input_forget", false)? {
        return Err(Reject::Unsupported("with coupled gates"));
    }
    run(c, &[Gate::Sigmoid, Gate::Tanh, Gate::Tanh], |c, direction, given| {
        let peepholes = match part(c, 7, direction)? {
            None => None,
            Some(all) => {
                let hidden = c.shape(all).first().copied().unwrap_or(0) / 3;
                let parts = array::split(c.g(), all, 0, &[hidden; 3])?;
                Some([parts[0], parts[1], parts[2]])
            }
        };
        let [gates, activation, shown] = [given[0], given[1], given[2]];
        Ok(Cell::Lstm { order: [0, 1, 2, 3], gates, activation, shown, peepholes })
    })
}

fn activations(c: &Call, directions: usize, default: &[Gate]) -> Result<Vec<Vec<Gate>>, Reject> {
    let Some(names) = c.texts("activations")? else { return Ok(vec![default.to_vec(); directions]) };
    let known = |name: &&str| match name.to_ascii_lowercase().as_str() {
        "sigmoid" => Ok(Gate::Sigmoid),
        "tanh" => Ok(Gate::Tanh),
        "relu" => Ok(Gate::Relu),
        _ => Err(Reject::Unsupported("with an unusual activation")),
    };
    let all: Vec<Gate> = names.iter().map(known).collect::<Result<_, _>>()?;
    if all.len() != directions * default.len() {
        return Err(attribute("activations"));
    }
    Ok(all.chunks(default.len()).map(<[Gate]>::to_vec).collect())
}

fn run(c: &mut Call, default: &[Gate], cell: impl Fn(&mut Call, i64, &[Gate]) -> Result<Cell, Reject>) -> Many {
    let mut x = c.x(0)?;
    let batch_first = c.flag("layout", false)?;
    if c.rank(x) != 3 {
        return Err(bad_value(0));
    }
    if batch_first {
        x = array::permute(c.g(), x, &[1, 0, 2])?;
    }
    let steps = c.shape(x)[0];
    if c.float_opt("clip")?.is_some() {
        return Err(Reject::Unsupported("with clipping"));
    }
    let whole = c.known(4).is_some_and(|l| l.data.iter().all(|&n| n == steps as f64));
    let lengths = c.opt(4).filter(|_| !whole);
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
    let (mut sequences, mut lasts) = (Vec::new(), Vec::new());
    for (d, (&backwards, activations)) in (0..).zip(directions.iter().zip(activations)) {
        let cell = cell(c, d, &activations)?;
        let (w, r) = (c.x(1)?, c.x(2)?);
        let (input, recurrent) = (array::select_dim(c.g(), w, 0, d)?, array::select_dim(c.g(), r, 0, d)?);
        let hidden = *c.shape(recurrent).last().ok_or(bad_value(2))?;
        let wide = hidden.checked_mul(cell.gates()).ok_or(bad_value(2))?;
        if c.shape(recurrent) != [wide, hidden] {
            return Err(bad_value(2));
        }
        let biases = match part(c, 3, d)? {
            None => None,
            Some(both) => {
                let parts = array::split(c.g(), both, 0, &[wide, wide])?;
                Some([parts[0], parts[1]])
            }
        };
        let (samples, dtype) = (c.shape(x)[1], c.dtype(recurrent));
        let mut first = Vec::new();
        for i in 0..cell.states() {
            first.push(match c.opt(5 + i) {
                None => array::full(c.g(), &[samples, hidden], 0.0, dtype)?,
                Some(state) => array::select_dim(c.g(), state, usize::from(batch_first), d)?,
            });
        }
        let layer = Recurrent { cell, input, recurrent, biases, backwards, lengths };
        let (sequence, last) = layer.run(c.g(), x, Some(first))?;
        sequences.push(sequence);
        lasts.push(last);
    }
    // [T, directions, B, H], or [B, T, directions, H] with the batch first.
    let g = c.g();
    let mut results = vec![array::stack(g, &sequences, 1)?];
    if batch_first {
        results[0] = array::permute(g, results[0], &[2, 0, 1, 3])?;
    }
    for state in 0..lasts[0].len() {
        let all: Vec<ValueId> = lasts.iter().map(|last| last[state]).collect();
        results.push(array::stack(g, &all, usize::from(batch_first))?);
    }
    Ok(results)
}

/// The part of an operand for a direction.
fn part(c: &mut Call, index: usize, direction: i64) -> Result<Option<ValueId>, Reject> {
    let Some(value) = c.opt(index) else { return Ok(None) };
    Ok(Some(array::select_dim(c.g(), value, 0, direction)?))
}

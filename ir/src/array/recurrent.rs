//! Recurrent layers, unrolled step by step.

use super::{
    Built, ShapeError, binary, compare, full, full_like, linear, relu, select, select_dim, sigmoid, slice_dim,
};
use super::{split, stack, unary, unsqueeze};
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction, Unary};

/// The longest sequence. Longer ones would make graphs that are too large to plan.
pub const MOST_STEPS: u64 = 4096;

/// A function of the gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    Sigmoid,
    Tanh,
    Relu,
}

impl Gate {
    fn apply(self, g: &mut Graph, x: ValueId) -> Built {
        match self {
            Gate::Sigmoid => sigmoid(g, x),
            Gate::Tanh => unary(g, Unary::Tanh, x),
            Gate::Relu => relu(g, x),
        }
    }
}

/// The update of the state in a step. The weights of several gates lie one after the other, in an order that frameworks
/// choose.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// `h = f(W x + R h)`
    Rnn { activation: Gate },
    /// Cho et al. 2014. The last gate is that of the new state.
    Gru {
        /// The positions of the update gate, which keeps the state, and of the reset gate.
        update: usize,
        reset: usize,
        /// True if the reset gate applies to the recurrent product instead of the state before it.
        reset_after: bool,
        gates: Gate,
        activation: Gate,
    },
    /// Hochreiter & Schmidhuber 1997.
    Lstm {
        /// The positions of the gates input, output, forget and cell.
        order: [usize; 4],
        gates: Gate,
        activation: Gate,
        shown: Gate,
        /// The weights of the cell state in the gates input, output and forget, `[H]` each.
        peepholes: Option<[ValueId; 3]>,
    },
}

impl Cell {
    /// The number of gates, whose weights lie one after the other.
    pub fn gates(&self) -> u64 {
        match self {
            Cell::Rnn { .. } => 1,
            Cell::Gru { .. } => 3,
            Cell::Lstm { .. } => 4,
        }
    }

    /// The number of states: the hidden state, and for an LSTM also the cell state.
    pub fn states(&self) -> usize {
        if matches!(self, Cell::Lstm { .. }) { 2 } else { 1 }
    }
}

/// One direction of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrent {
    pub cell: Cell,
    /// The weights of the input, `[gates H, I]`, and of the state, `[gates H, H]`.
    pub input: ValueId,
    pub recurrent: ValueId,
    /// The biases of the input's and the state's products, `[gates H]` each.
    pub biases: Option<[ValueId; 2]>,
    /// True if the layer runs from the last step to the first.
    pub backwards: bool,
    /// The number of steps of each sample, `[B]`, or all if absent. In further steps, the state stays unchanged and the
    /// result is zero.
    pub lengths: Option<ValueId>,
}

impl Recurrent {
    /// Runs the layer over a sequence `[T, B, I]`. Returns the hidden states of all steps, `[T, B, H]`, and the states
    /// after the last one, `[B, H]`. The first states are zero if none are given.
    pub fn run(
        &self,
        g: &mut Graph,
        x: ValueId,
        first: Option<Vec<ValueId>>,
    ) -> Result<(ValueId, Vec<ValueId>), ShapeError> {
        let hidden = g.shape(self.recurrent).last().copied().unwrap_or(0);
        let wide = hidden.checked_mul(self.cell.gates());
        if g.shape(self.recurrent).len() != 2 || wide != Some(g.shape(self.recurrent)[0]) {
            return Err(ShapeError::Attribute("has recurrent weights that are not [gates H, H]"));
        }
        let [steps, samples, _] = g.shape(x)[..] else {
            return Err(ShapeError::Attribute("needs a sequence of three dimensions"));
        };
        if steps == 0 || steps > MOST_STEPS {
            return Err(ShapeError::Attribute("has no or more than 4096 steps"));
        }
        let dtype = g.ty(self.recurrent).dtype;
        let mut states = match first {
            Some(states) => states,
            None => {
                (0..self.cell.states()).map(|_| full(g, &[samples, hidden], 0.0, dtype)).collect::<Result<_, _>>()?
            }
        };
        // The products of the input, for all steps at once.
        let of_input = linear(g, x, self.input, self.biases.map(|[b, _]| b))?;
        let mut row = Vec::with_capacity(steps as usize);
        for i in 0..steps {
            let at = if self.backwards { steps - 1 - i } else { i };
            let now = select_dim(g, of_input, 0, at as i64)?;
            let next = self.step(g, now, &states, hidden)?;
            let Some(lengths) = self.lengths else {
                row.push(next[0]);
                states = next;
                continue;
            };
            let number = full_like(g, lengths, at as f64)?;
            let there = compare(g, Direction::Lt, number, lengths)?;
            let there = unsqueeze(g, there, 1)?;
            let zero = full_like(g, next[0], 0.0)?;
            row.push(select(g, there, next[0], zero)?);
            for (state, next) in states.iter_mut().zip(next) {
                *state = select(g, there, next, *state)?;
            }
        }
        if self.backwards {
            row.reverse();
        }
        Ok((stack(g, &row, 0)?, states))
    }

    /// Computes the new states from the products of the input, `[B, gates H]`.
    fn step(&self, g: &mut Graph, x: ValueId, states: &[ValueId], hidden: u64) -> Result<Vec<ValueId>, ShapeError> {
        let h = states[0];
        match &self.cell {
            Cell::Rnn { activation } => {
                let of_state = self.product(g, h, 0, hidden)?;
                let sum = binary(g, Binary::Add, x, of_state)?;
                Ok(vec![activation.apply(g, sum)?])
            }
            Cell::Gru { update, reset, reset_after, gates, activation } => {
                let parts = split(g, x, 1, &[2 * hidden, hidden])?;
                let of_state = self.product(g, h, 0, 2 * hidden)?;
                let both = binary(g, Binary::Add, parts[0], of_state)?;
                let both = gates.apply(g, both)?;
                let both = split(g, both, 1, &[hidden; 2])?;
                let (update, reset) = (both[*update], both[*reset]);
                let of_state = if *reset_after {
                    let linear = self.product(g, h, 2 * hidden, 3 * hidden)?;
                    binary(g, Binary::Multiply, reset, linear)?
                } else {
                    let kept = binary(g, Binary::Multiply, reset, h)?;
                    self.product(g, kept, 2 * hidden, 3 * hidden)?
                };
                let sum = binary(g, Binary::Add, parts[1], of_state)?;
                let new = activation.apply(g, sum)?;
                // (1 - z) new + z h
                let distance = binary(g, Binary::Subtract, h, new)?;
                let moved = binary(g, Binary::Multiply, update, distance)?;
                Ok(vec![binary(g, Binary::Add, new, moved)?])
            }
            Cell::Lstm { order, gates, activation, shown, peepholes } => {
                let cell = states[1];
                let of_state = self.product(g, h, 0, 4 * hidden)?;
                let sums = binary(g, Binary::Add, x, of_state)?;
                let parts = split(g, sums, 1, &[hidden; 4])?;
                let parts = order.map(|at| parts[at]);
                let gate = |g: &mut Graph, which: usize, cell: ValueId| {
                    let sum = match peepholes {
                        Some(weights) => {
                            let seen = binary(g, Binary::Multiply, cell, weights[which])?;
                            binary(g, Binary::Add, parts[which], seen)?
                        }
                        None => parts[which],
                    };
                    gates.apply(g, sum)
                };
                let (input, forget) = (gate(g, 0, cell)?, gate(g, 2, cell)?);
                let new = activation.apply(g, parts[3])?;
                let kept = binary(g, Binary::Multiply, forget, cell)?;
                let added = binary(g, Binary::Multiply, input, new)?;
                let cell = binary(g, Binary::Add, kept, added)?;
                let output = gate(g, 1, cell)?;
                let seen = shown.apply(g, cell)?;
                Ok(vec![binary(g, Binary::Multiply, output, seen)?, cell])
            }
        }
    }

    /// The product of a state with rows `from` to `to` of the recurrent weights.
    fn product(&self, g: &mut Graph, h: ValueId, from: u64, to: u64) -> Built {
        let all = from == 0 && to == g.shape(self.recurrent)[0];
        let mut rows = |v: ValueId| if all { Ok(v) } else { slice_dim(g, v, 0, from as i64, to as i64, 1) };
        let (weights, bias) = (rows(self.recurrent)?, self.biases.map(|[_, b]| rows(b)).transpose()?);
        linear(g, h, weights, bias)
    }
}

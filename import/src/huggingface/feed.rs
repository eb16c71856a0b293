//! The part of a layer that processes each token after the mixer: perceptrons with and without a gate, and mixtures of
//! experts.

use super::blocks::{Activation, Block, Builder, Matrix};
use super::moe::Mixture;
use altiplano_ir::array;
use altiplano_ir::graph::ValueId;

#[derive(Clone, Debug)]
pub(crate) enum Feed {
    Gated(Gated),
    Plain(Plain),
    Mixture(Mixture),
}

/// `down(activation(gate(x)) * up(x))`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gated {
    pub first: GateUp,
    pub down: &'static str,
    pub width: u64,
    pub activation: Activation,
    pub bias: bool,
}

/// The matrices of gate and up: one each, or one with both outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GateUp {
    Apart(&'static str, &'static str),
    Joined(&'static str),
}

/// `down(activation(up(x)))`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    pub up: &'static str,
    pub down: &'static str,
    pub width: u64,
    pub activation: Activation,
    pub matrix: Matrix,
}

impl Feed {
    /// Builds the part for `x`, which is `[B, S, hidden]`.
    pub(crate) fn build(&self, b: &mut Builder, x: ValueId) -> Block {
        match self {
            Feed::Gated(gated) => gated.build(b, x),
            Feed::Plain(plain) => plain.build(b, x),
            Feed::Mixture(mixture) => mixture.build(b, x),
        }
    }
}

impl Gated {
    /// A gated perceptron like Llama's.
    pub(crate) fn new(width: u64, activation: Activation) -> Gated {
        Gated { first: GateUp::Apart("gate_proj", "up_proj"), down: "down_proj", width, activation, bias: false }
    }

    pub(crate) fn build(&self, b: &mut Builder, x: ValueId) -> Block {
        let last = b.graph.shape(x).len().saturating_sub(1);
        let hidden = b.graph.shape(x).last().copied().unwrap_or(1);
        let (gate, up) = match self.first {
            GateUp::Apart(gate, up) => {
                (b.linear(gate, x, self.width, self.bias)?, b.linear(up, x, self.width, self.bias)?)
            }
            GateUp::Joined(name) => {
                let both = b.linear(name, x, 2 * self.width, self.bias)?;
                let parts = array::split(&mut b.graph, both, last, &[self.width; 2])?;
                (parts[0], parts[1])
            }
        };
        let gate = self.activation.apply(&mut b.graph, gate)?;
        let both = b.multiply(gate, up)?;
        b.linear(self.down, both, hidden, self.bias)
    }
}

impl Plain {
    /// One without biases, named as Llama's matrices are.
    pub(crate) fn new(width: u64, activation: Activation) -> Plain {
        Plain { up: "up_proj", down: "down_proj", width, activation, matrix: Matrix::default() }
    }

    pub(crate) fn build(&self, b: &mut Builder, x: ValueId) -> Block {
        let hidden = b.graph.shape(x).last().copied().unwrap_or(1);
        let wide = b.matrix(self.up, x, self.width, self.matrix)?;
        let wide = self.activation.apply(&mut b.graph, wide)?;
        b.matrix(self.down, wide, hidden, self.matrix)
    }
}

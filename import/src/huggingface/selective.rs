//! Selective state spaces of Mamba (Gu and Dao 2023). Each feature has a state of a few numbers, each with a decay of
//! its own. Every token sets the step for which they decay, and what they take up and give.

use super::blocks::{Activation, Block, Builder, Norm};
use super::state_space::causal_convolution;
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Unary};

/// The sizes of a selective state space.
#[derive(Clone, Debug)]
pub(crate) struct Selective {
    /// The number of features.
    pub inner: u64,
    /// The numbers of state of each feature.
    pub state: u64,
    /// The width from which steps are projected.
    pub rank: u64,
    /// The number of tokens that the convolution before the state space sees.
    pub kernel: u64,
    pub bias: bool,
    pub conv_bias: bool,
    pub activation: Activation,
    /// The norm of steps, of what states take up, and of what is asked of them.
    pub norm: Option<Norm>,
}

impl Selective {
    /// Builds the state space for `x`, which is `[B, S, hidden]`.
    pub(crate) fn build(&self, b: &mut Builder, x: ValueId) -> Block {
        let [_, _, hidden] = b.graph.shape(x)[..] else {
            return Err(array::ShapeError::Attribute("state spaces take three dimensions").into());
        };
        let projected = b.linear("in_proj", x, 2 * self.inner, self.bias)?;
        let parts = array::split(&mut b.graph, projected, 2, &[self.inner; 2])?;
        let (mixed, gate) = (parts[0], parts[1]);
        let mixed = b.within("conv1d", |b| {
            let mixed = causal_convolution(b, mixed, self.kernel, self.conv_bias)?;
            Ok(self.activation.apply(&mut b.graph, mixed)?)
        })?;
        let projected = b.linear("x_proj", mixed, self.rank + 2 * self.state, false)?;
        let parts = array::split(&mut b.graph, projected, 2, &[self.rank, self.state, self.state])?;
        let mut normed = Vec::with_capacity(parts.len());
        for (name, part) in ["dt_layernorm", "b_layernorm", "c_layernorm"].into_iter().zip(parts) {
            normed.push(self.norm.as_ref().map_or(Ok(part), |norm| b.norm(name, part, norm))?);
        }
        let (short, taken, asked) = (normed[0], normed[1], normed[2]);

        let step = b.within("dt_proj", |b| {
            let weight = b.weight("weight", &[self.inner, self.rank])?;
            let bias = b.weight("bias", &[self.inner])?;
            let g = &mut b.graph;
            let step = array::linear(g, short, weight, None)?;
            // Steps and decays are at least f32.
            let (step, bias) = (wide(g, step)?, wide(g, bias)?);
            let step = array::binary(g, Binary::Add, step, bias)?;
            Ok(array::softplus(g, step, 1.0, f64::INFINITY)?)
        })?;
        let decay = b.weight("A_log", &[self.inner, self.state])?;
        let skip = b.weight("D", &[self.inner])?;
        let g = &mut b.graph;
        let rate = wide(g, decay)?;
        let rate = array::unary(g, Unary::Exponential, rate)?;
        let rate = array::unary(g, Unary::Negate, rate)?;
        let read = array::selective_scan(g, [mixed, step, rate, taken, asked])?;
        let skipped = array::binary(g, Binary::Multiply, mixed, skip)?;
        let read = array::binary(g, Binary::Add, read, skipped)?;
        let gate = array::silu(g, gate)?;
        let read = array::binary(g, Binary::Multiply, read, gate)?;
        b.linear("out_proj", read, hidden, self.bias)
    }
}

fn wide(g: &mut altiplano_ir::graph::Graph, x: ValueId) -> array::Built {
    let narrow = g.ty(x).dtype.bytes() < DType::F32.bytes();
    if narrow { array::convert(g, x, DType::F32) } else { Ok(x) }
}

//! Tracks tensors that share memory, and the effect of changes in place on the others.
//!
//! A tensor is a base and a sequence of views: `x.transpose(0, 1)[2]` is the base of `x`, a permutation and a
//! slice. Ops of a graph have no memory, so a change in place makes a new value of the base by inverting the
//! views. A later read through another view of that base applies its views to the new value.

use super::report::{ProblemKind, Reject, other};
use altiplano_ir::array;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, ShapeError};
use altiplano_ir::types::TensorType;

/// A view of another tensor's memory.
#[derive(Clone, Debug, PartialEq)]
pub enum View {
    /// The same elements in the same order, with another shape.
    Reshape(Vec<u64>),
    Permute(Vec<usize>),
    /// Every `step`-th element of `dim` from `start` on, `count` in all.
    Slice {
        dim: usize,
        start: u64,
        count: u64,
        step: u64,
    },
    /// Repeated elements. A write through this view is undefined, so it is refused.
    Expand(Vec<u64>),
    /// The same elements, with the gradient stopped.
    Stop,
}

/// A tensor of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor(usize);

struct Base {
    value: ValueId,
    /// The number of changes in place.
    version: u32,
    /// Bases that may share this memory, where the program leaves that open.
    doubles: Vec<usize>,
    /// True if one of the doubles was changed, so that this base's value is uncertain.
    unknown: bool,
}

struct Seen {
    base: usize,
    views: Vec<View>,
    value: ValueId,
    version: u32,
}

#[derive(Default)]
pub struct Memory {
    bases: Vec<Base>,
    tensors: Vec<Seen>,
}

impl View {
    pub fn apply(&self, g: &mut Graph, x: ValueId) -> Result<ValueId, ShapeError> {
        match self {
            View::Reshape(shape) => array::reshape(g, x, shape),
            View::Permute(permutation) => array::permute(g, x, permutation),
            View::Slice { dim, start, count, step } => {
                let (start, step) = (*start as i64, *step);
                let end = if *count == 0 { start } else { start + ((count - 1) * step) as i64 + 1 };
                array::slice_dim(g, x, *dim, start, end, step)
            }
            View::Expand(shape) => array::broadcast_to(g, x, shape),
            View::Stop => array::stop_gradient(g, x),
        }
    }

    /// The operand `old` after the elements in this view were replaced with `new`.
    fn write(&self, g: &mut Graph, old: ValueId, new: ValueId) -> Result<ValueId, Reject> {
        let shape = g.shape(old).to_vec();
        match self {
            View::Reshape(_) => Ok(array::reshape(g, new, &shape)?),
            View::Permute(permutation) => {
                let mut inverse = vec![0; permutation.len()];
                permutation.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
                Ok(array::permute(g, new, &inverse)?)
            }
            View::Slice { dim, start, count, step } => replace_slice(g, old, new, *dim, *start, *count, *step),
            View::Expand(_) => {
                Err(other("changes a tensor in place whose elements are repeated; clone it in the model"))
            }
            View::Stop => Ok(behind_autograd(g, old, new)?),
        }
    }
}

/// The value `new` of a tensor that was changed without recording gradients. It gets the gradient of `old`,
/// since autograd does not see the change.
pub(crate) fn behind_autograd(g: &mut Graph, old: ValueId, new: ValueId) -> Result<ValueId, ShapeError> {
    let [new, stopped] = [new, old].map(|x| array::stop_gradient(g, x));
    // Exactly zero, with the gradient of `old`.
    let nothing = array::binary(g, Binary::Subtract, old, stopped?)?;
    array::binary(g, Binary::Add, new?, nothing)
}

/// `old`, with `new` in place of some elements of `dim`.
fn replace_slice(
    g: &mut Graph,
    old: ValueId,
    new: ValueId,
    dim: usize,
    start: u64,
    count: u64,
    step: u64,
) -> Result<ValueId, Reject> {
    let size = g.shape(old)[dim];
    if count == 0 {
        return Ok(old);
    }
    let end = start + (count - 1) * step + 1;
    if step == 1 {
        let before = array::slice_dim(g, old, dim, 0, start as i64, 1)?;
        let behind = array::slice_dim(g, old, dim, end as i64, size as i64, 1)?;
        let parts: Vec<ValueId> = [before, new, behind].into_iter().filter(|&p| g.shape(p)[dim] > 0).collect();
        return Ok(array::concat(g, &parts, dim)?);
    }
    // Spreads `new` over the dimension, and selects it at the positions of the slice.
    let rank = g.shape(old).len();
    let at = |value: i64| (0..rank).map(|d| if d == dim { value } else { 0 }).collect::<Vec<i64>>();
    let interior = (0..rank).map(|d| if d == dim { step - 1 } else { 0 }).collect();
    let zero = array::scalar(g, 0.0, g.ty(new).dtype)?;
    let spread = altiplano_ir::op::Pad { low: at(start as i64), high: at((size - end) as i64), interior };
    let spread = g.push(altiplano_ir::op::Op::Pad(spread), &[new, zero])?;
    let places = array::arange(g, size, 0.0, 1.0, altiplano_ir::dtype::DType::I32)?;
    let from = array::with_number(g, Binary::Subtract, places, start as f64)?;
    let rest = array::with_number(g, Binary::Remainder, from, step as f64)?;
    let zero = array::full_like(g, rest, 0.0)?;
    let on_step = array::compare(g, altiplano_ir::op::Direction::Eq, rest, zero)?;
    let after = array::compare(g, altiplano_ir::op::Direction::Ge, from, zero)?;
    let last = array::full_like(g, places, end as f64)?;
    let inside = array::compare(g, altiplano_ir::op::Direction::Lt, places, last)?;
    let hit = array::binary(g, Binary::And, on_step, after)?;
    let hit = array::binary(g, Binary::And, hit, inside)?;
    let mut column = vec![1; rank - dim];
    column[0] = size;
    let hit = array::reshape(g, hit, &column)?;
    Ok(array::select(g, hit, spread, old)?)
}

impl Memory {
    /// A tensor with its own memory.
    pub fn fresh(&mut self, value: ValueId) -> Tensor {
        self.bases.push(Base { value, version: 0, doubles: Vec::new(), unknown: false });
        self.tensors.push(Seen { base: self.bases.len() - 1, views: Vec::new(), value, version: 0 });
        Tensor(self.tensors.len() - 1)
    }

    /// The tensor's current value.
    pub fn read(&mut self, g: &mut Graph, tensor: Tensor) -> Result<ValueId, Reject> {
        let seen = &mut self.tensors[tensor.0];
        let base = &self.bases[seen.base];
        if base.unknown {
            return Err(ProblemKind::Aliased.into());
        }
        if seen.version != base.version {
            seen.value = seen.views.iter().try_fold(base.value, |x, view| view.apply(g, x))?;
            seen.version = base.version;
        }
        Ok(seen.value)
    }

    /// The value of the last read. It has the tensor's type.
    pub(crate) fn last_value(&self, tensor: Tensor) -> ValueId {
        self.tensors[tensor.0].value
    }

    /// Another view of a tensor's memory.
    pub fn view(&mut self, g: &mut Graph, tensor: Tensor, view: View) -> Result<Tensor, Reject> {
        let x = self.read(g, tensor)?;
        let value = view.apply(g, x)?;
        let seen = &self.tensors[tensor.0];
        let views = seen.views.iter().cloned().chain([view]).collect();
        self.tensors.push(Seen { base: seen.base, views, value, version: seen.version });
        Ok(Tensor(self.tensors.len() - 1))
    }

    /// A tensor that either shares memory with another, or has its own.
    pub(crate) fn maybe_view(&mut self, tensor: Tensor, value: ValueId) -> Tensor {
        let new = self.fresh(value);
        let (a, b) = (self.tensors[tensor.0].base, self.tensors[new.0].base);
        self.bases[a].doubles.push(b);
        self.bases[b].doubles.push(a);
        new
    }

    /// Changes a tensor in place, and all tensors that share its memory.
    pub fn write(&mut self, g: &mut Graph, tensor: Tensor, new: ValueId) -> Result<(), Reject> {
        self.read(g, tensor)?;
        let seen = &self.tensors[tensor.0];
        let at = seen.base;
        // Collects the operand of each view, then inverts the views from last to first.
        let mut operands = vec![self.bases[at].value];
        for view in &seen.views {
            let x = operands[operands.len() - 1];
            operands.push(view.apply(g, x)?);
        }
        let mut value = new;
        for (view, &old) in seen.views.iter().zip(&operands).rev() {
            value = view.write(g, old, value)?;
        }
        let declared: &TensorType = g.ty(self.bases[at].value);
        if g.ty(value) != declared {
            return Err(other("changes the type of a tensor in place"));
        }
        self.bases[at].value = value;
        self.bases[at].version += 1;
        let seen = &mut self.tensors[tensor.0];
        (seen.value, seen.version) = (new, self.bases[at].version);
        self.doubt(at);
        Ok(())
    }

    /// Marks all bases as unknown that may share memory with `base`, directly or through others.
    fn doubt(&mut self, base: usize) {
        let mut pending = self.bases[base].doubles.clone();
        while let Some(at) = pending.pop() {
            if at != base && !self.bases[at].unknown {
                self.bases[at].unknown = true;
                pending.extend(&self.bases[at].doubles);
            }
        }
    }
}

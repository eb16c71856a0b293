//! Halo exchange: a block with the edges of its neighbours, taken from all blocks.

use crate::collective::Halo;
use crate::loops::{Coordinate, Launch, Param, Phase, Scalar, Scalars, Source, Spread, Store};
use altiplano_ir::graph::ValueId;
use altiplano_ir::mesh::AxisId;
use altiplano_ir::types::{TensorType, strides};

/// The launch that reads `n` consecutive blocks and writes this device's, with its surroundings.
pub(crate) fn launch(block: &TensorType, halo: &Halo, n: u64, axes: Vec<AxisId>) -> Launch {
    let Halo { dim, low, high, reducer } = *halo;
    let (dtype, size) = (block.dtype, block.shape[dim]);
    let mut shape = block.shape.clone();
    shape[dim] += low + high;
    let rows: u64 = shape.iter().product();
    let mut scalars = Scalars::default();
    let row = scalars.counter(Scalar::Row, rows);
    let mut at = scalars.unravel(row, &shape);
    let me = scalars.counter(Scalar::Coordinate(0), n);
    let (start, before) = (scalars.times(me, size as i64), scalars.index(-(low as i64)));
    let start = scalars.add(start, before);
    let global = scalars.add(start, at[dim]);
    let guard = scalars.within(global, (n * size) as i64);
    let whole = scalars.clamp(global, (n * size) as i64 - 1);
    let of = scalars.quotient(whole, size as i64);
    at[dim] = scalars.remainder(whole, size as i64);
    let mut index = scalars.times(of, block.elements() as i64);
    for (&i, stride) in at.iter().zip(strides(&block.shape)) {
        let moved = scalars.times(i, stride as i64);
        index = scalars.add(index, moved);
    }
    let mut value = scalars.element(Scalar::Load { param: 0, index, guard, dtype });
    if let Some(guard) = guard {
        let neutral = scalars.element(Scalar::Number(reducer.neutral(dtype).to_bits(), dtype));
        value = scalars.element(Scalar::Select(dtype, [guard, value, neutral]));
    }
    let param = |i: u32, elements, written| Param { source: Source::Value(ValueId(i)), dtype, elements, written };
    let store = Store { param: 1, index: row, value, guard: None, combines: None };
    Launch {
        params: vec![param(0, n * block.elements(), false), param(1, rows, true)],
        coordinates: vec![Coordinate::Along(axes)],
        scalars,
        rows,
        spread: Spread::Thread,
        phases: vec![Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() }],
    }
}

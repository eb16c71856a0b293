//! Convolutions as loop programs: the gathers that build matrices for a library, and direct sums for convolutions that
//! do not pay as products.

use super::{Coordinate, Fold, Launch, Param, Phase, Scalar, Scalars, Source, Spread, Store, Var};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Convolution, Reducer};
use altiplano_ir::storage::gathered::{Along, Products, Tile};
use altiplano_ir::types::TensorType;

fn param(i: u32, dtype: DType, elements: u64, written: bool) -> Param {
    Param { source: Source::Value(ValueId(i)), dtype, elements, written }
}

/// The indices of one result and one term, by group.
#[derive(Clone, Debug)]
struct At {
    group: Var,
    batch: Var,
    input: Var,
    /// For each spatial dimension, the index in the result and in the window.
    spatial: Vec<(Var, Var)>,
}

impl At {
    fn new(scalars: &mut Scalars, op: &Convolution) -> At {
        let zero = scalars.index(0);
        At { group: zero, batch: zero, input: zero, spatial: vec![(zero, zero); op.window.len()] }
    }

    /// The position of the operand's element, and the condition under which it exists.
    fn operand(
        &self,
        scalars: &mut Scalars,
        op: &Convolution,
        lhs: &[u64],
        [inputs, batch]: [u64; 2],
    ) -> (Var, Option<Var>) {
        let (mut index, mut guard) = (vec![self.batch; lhs.len()], None);
        let of_group = |scalars: &mut Scalars, size: u64, at: Var| {
            let start = scalars.times(self.group, size as i64);
            scalars.add(start, at)
        };
        index[op.lhs.feature] = match op.feature_groups > 1 {
            true => of_group(scalars, inputs, self.input),
            false => self.input,
        };
        if op.batch_groups > 1 {
            index[op.lhs.batch] = of_group(scalars, batch, self.batch);
        }
        for ((window, &d), &(outer, inner)) in op.window.iter().zip(&op.lhs.spatial).zip(&self.spatial) {
            let (position, inside) = scalars.window(window, outer, inner, lhs[d]);
            guard = scalars.and(guard, inside);
            index[d] = position;
        }
        (scalars.position(&index, lhs), guard)
    }
}

/// The launch that reads a convolution's operand and writes a tile of the gathered matrix. Its two coordinates give the
/// start of the tile: a result and a term.
pub fn gather(op: &Convolution, products: &Products, tile: &Tile, lhs: &TensorType) -> Launch {
    let (results, terms) = (tile.results.1 - tile.results.0, tile.terms.1 - tile.terms.0);
    let rows = products.groups * results * terms;
    let mut scalars = Scalars::default();
    let row = scalars.counter(Scalar::Row, rows);
    let order = if products.terms_last { [results, terms] } else { [terms, results] };
    let index = scalars.unravel(row, &[products.groups, order[0], order[1]]);
    let (result, term) = if products.terms_last { (index[1], index[2]) } else { (index[2], index[1]) };
    let dims = [&products.before[..], &products.after[..]].concat();
    let sizes = |dims: &[(Along, u64)]| dims.iter().map(|d| d.1).collect::<Vec<u64>>();
    let (of_results, of_terms) = (sizes(&dims), sizes(&products.terms));
    // A tile that spans a whole dimension starts at zero.
    let mut coordinates = Vec::new();
    let mut started = |scalars: &mut Scalars, at: Var, part: u64, all: u64| match part == all {
        true => at,
        false => {
            coordinates.push(Coordinate::Start);
            let start = scalars.counter(Scalar::Coordinate(coordinates.len() as u32 - 1), all);
            scalars.add(start, at)
        }
    };
    let result = started(&mut scalars, result, results, of_results.iter().product());
    let term = started(&mut scalars, term, terms, of_terms.iter().product());
    let mut at = At { group: index[0], ..At::new(&mut scalars, op) };
    for (&(along, _), i) in dims.iter().zip(scalars.unravel(result, &of_results)) {
        match along {
            Along::Spatial(d) => at.spatial[d].0 = i,
            _ => at.batch = i,
        }
    }
    for (&(along, _), i) in products.terms.iter().zip(scalars.unravel(term, &of_terms)) {
        match along {
            Along::Spatial(d) => at.spatial[d].1 = i,
            _ => at.input = i,
        }
    }
    let size = |dims: &[(Along, u64)], wanted: Along| dims.iter().find(|d| d.0 == wanted).map_or(1, |d| d.1);
    let each = [size(&products.terms, Along::Input), size(&dims, Along::Batch)];
    let (index, guard) = at.operand(&mut scalars, op, &lhs.shape, each);
    let value = scalars.element(Scalar::Load { param: 0, index, guard, dtype: lhs.dtype });
    let store = Store { param: 1, index: row, value, guard: None, combines: None };
    Launch {
        params: vec![param(0, lhs.dtype, lhs.elements(), false), param(1, lhs.dtype, rows, true)],
        coordinates,
        scalars,
        rows,
        spread: Spread::Thread,
        phases: vec![Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() }],
    }
}

/// The launch that computes every result of a convolution directly, with sums in single precision or better.
pub fn direct(op: &Convolution, [lhs, rhs, result]: [&TensorType; 3]) -> Launch {
    let groups = op.feature_groups.max(op.batch_groups).max(1);
    let inputs = rhs.shape[op.rhs.input];
    let mut terms: Vec<u64> = op.window.iter().map(|w| w.size).collect();
    terms.push(inputs);
    let (rows, length) = (result.elements(), terms.iter().product::<u64>());
    let mut scalars = Scalars::default();
    let row = scalars.counter(Scalar::Row, rows);
    let step = scalars.counter(Scalar::Step, length);
    let (to, term) = (scalars.unravel(row, &result.shape), scalars.unravel(step, &terms));
    let feature = to[op.result.feature];
    let outputs = (rhs.shape[op.rhs.output] / groups).max(1);
    let at = At {
        group: scalars.quotient(feature, outputs as i64),
        batch: to[op.result.batch],
        input: term[op.window.len()],
        spatial: op.result.spatial.iter().zip(&term).map(|(&d, &inner)| (to[d], inner)).collect(),
    };
    let each = [inputs, result.shape[op.result.batch]];
    let (index, guard) = at.operand(&mut scalars, op, &lhs.shape, each);
    let mut with = vec![feature; rhs.shape.len()];
    with[op.rhs.input] = at.input;
    op.rhs.spatial.iter().zip(&term).for_each(|(&d, &inner)| with[d] = inner);
    let other = scalars.position(&with, &rhs.shape);
    let summed = if result.dtype.is_float() && result.dtype.bytes() < 4 { DType::F32 } else { result.dtype };
    let mut loaded = |param: u32, index: Var, guard: Option<Var>, dtype: DType| {
        let value = scalars.element(Scalar::Load { param, index, guard, dtype });
        if dtype == summed { value } else { scalars.element(Scalar::Convert { from: dtype, to: summed, value }) }
    };
    let factors = [loaded(0, index, guard, lhs.dtype), loaded(1, other, guard, rhs.dtype)];
    let value = scalars.element(Scalar::Binary(Binary::Multiply, summed, factors[0], factors[1]));
    let fold = Fold { value, reducer: Reducer::Sum, dtype: summed, slot: 0 };
    let mut sum = scalars.element(Scalar::Slot(0, summed));
    if summed != result.dtype {
        sum = scalars.element(Scalar::Convert { from: summed, to: result.dtype, value: sum });
    }
    let store = Store { param: 2, index: row, value: sum, guard: None, combines: None };
    Launch {
        params: vec![
            param(0, lhs.dtype, lhs.elements(), false),
            param(1, rhs.dtype, rhs.elements(), false),
            param(2, result.dtype, rows, true),
        ],
        coordinates: Vec::new(),
        scalars,
        rows,
        // Adjacent results read adjacent elements.
        spread: if length < super::build::BLOCK_ROW { Spread::Thread } else { Spread::Columns },
        phases: vec![
            Phase { length, folds: vec![fold], stores: Vec::new(), ..Phase::default() },
            Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() },
        ],
    }
}

/// The launch that converts its first parameter to the type of its second.
pub fn rounded(from: DType, to: DType, elements: u64) -> Launch {
    let mut scalars = Scalars::default();
    let row = scalars.counter(Scalar::Row, elements);
    let value = scalars.element(Scalar::Load { param: 0, index: row, guard: None, dtype: from });
    let value = scalars.element(Scalar::Convert { from, to, value });
    let store = Store { param: 1, index: row, value, guard: None, combines: None };
    Launch {
        params: vec![param(0, from, elements, false), param(1, to, elements, true)],
        coordinates: Vec::new(),
        scalars,
        rows: elements,
        spread: Spread::Thread,
        phases: vec![Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() }],
    }
}

//! Copies between strided layouts as loop programs. They rearrange values for libraries and messages, and put received
//! data in its place.

use crate::loops::{Launch, Param, Phase, Scalar, Scalars, Source, Spread, Store};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;

/// Element `[i0, i1, ..]` of `sizes` goes from `from_offset + sum(i * from)` to `to_offset + sum(i * to)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Strided {
    pub sizes: Vec<u64>,
    pub from_offset: u64,
    pub from: Vec<u64>,
    pub to_offset: u64,
    pub to: Vec<u64>,
}

impl Strided {
    /// A copy from the given strides to row-major order.
    pub(crate) fn gathered(sizes: Vec<u64>, from_offset: u64, from: Vec<u64>) -> Strided {
        let to = altiplano_ir::types::strides(&sizes);
        Strided { sizes, from_offset, from, to_offset: 0, to }
    }

    /// A copy that permutes the dimensions of a row-major tensor.
    pub(crate) fn transposed(shape: &[u64], permutation: &[usize]) -> Strided {
        let strides = altiplano_ir::types::strides(shape);
        let sizes = permutation.iter().map(|&d| shape[d]).collect();
        Strided::gathered(sizes, 0, permutation.iter().map(|&d| strides[d]).collect())
    }

    /// The launch that reads its first parameter, of `read` elements, and writes its second, of `written` elements.
    pub(crate) fn launch(&self, dtype: DType, read: u64, written: u64) -> Launch {
        let rows = self.sizes.iter().product();
        let mut scalars = Scalars::default();
        let row = scalars.counter(Scalar::Row, rows);
        let at = scalars.unravel(row, &self.sizes);
        let mut place = |offset: u64, strides: &[u64]| {
            let mut sum = scalars.index(offset as i64);
            for (&i, &stride) in at.iter().zip(strides) {
                let moved = scalars.times(i, stride as i64);
                sum = scalars.add(sum, moved);
            }
            sum
        };
        let (from, to) = (place(self.from_offset, &self.from), place(self.to_offset, &self.to));
        let value = scalars.element(Scalar::Load { param: 0, index: from, guard: None, dtype });
        let param = |i: u32, elements, written| Param { source: Source::Value(ValueId(i)), dtype, elements, written };
        let store = Store { param: 1, index: to, value, guard: None, combines: None };
        Launch {
            params: vec![param(0, read, false), param(1, written, true)],
            coordinates: Vec::new(),
            scalars,
            rows,
            spread: Spread::Thread,
            phases: vec![Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() }],
        }
    }
}

/// Copies between cross products of index lists of two row-major tensors. There is one copy for each combination of
/// runs in which both lists advance evenly.
pub(crate) fn crossed(from_shape: &[u64], from: &[Vec<u64>], to_shape: &[u64], to: &[Vec<u64>]) -> Vec<Strided> {
    let (from_strides, to_strides) = (altiplano_ir::types::strides(from_shape), altiplano_ir::types::strides(to_shape));
    let nothing = Strided { sizes: vec![], from_offset: 0, from: vec![], to_offset: 0, to: vec![] };
    let mut made = vec![nothing];
    for d in 0..from.len() {
        let runs = runs(&from[d], &to[d]);
        let with = |copy: &Strided| {
            let (from_stride, to_stride) = (from_strides[d], to_strides[d]);
            let one = |run: &Run| {
                let mut copy = copy.clone();
                copy.sizes.push(run.count);
                copy.from_offset += run.from.0 * from_stride;
                copy.from.push(run.from.1 * from_stride);
                copy.to_offset += run.to.0 * to_stride;
                copy.to.push(run.to.1 * to_stride);
                copy
            };
            runs.iter().map(one).collect::<Vec<_>>()
        };
        made = made.iter().flat_map(with).collect();
    }
    made
}

/// A run of `count` indices of two lists, each with its start and its step.
struct Run {
    count: u64,
    from: (u64, u64),
    to: (u64, u64),
}

fn runs(from: &[u64], to: &[u64]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut at = 0;
    while at < from.len() {
        let step = |list: &[u64], i: usize| list.get(i + 1).and_then(|next| next.checked_sub(list[i]));
        let steps = (step(from, at), step(to, at));
        let mut end = at + 1;
        while steps.0.is_some() && steps.1.is_some() && (step(from, end - 1), step(to, end - 1)) == steps {
            end += 1;
        }
        let (by_from, by_to) = (steps.0.unwrap_or(1), steps.1.unwrap_or(1));
        runs.push(Run { count: (end - at) as u64, from: (from[at], by_from), to: (to[at], by_to) });
        at = end;
    }
    runs
}

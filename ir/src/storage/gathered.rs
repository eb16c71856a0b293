//! Convolutions as matrix products, which is how GPUs compute them here. The elements that each result reads are a row
//! of one matrix, and the convolution's kernel is the other.
//!
//! If windows are single elements, the operand itself is the first matrix. Otherwise it is gathered tile by tile, so
//! that scratch memory stays bounded for any number of samples (Chellapilla et al. 2006; Chetlur et al. 2014, section
//! 3). The tiles, and thus the scratch, are decided here, both for the planner's memory prediction and for the devices
//! that run them.

use crate::dtype::DType;
use crate::op::Convolution;
use crate::types::strides;

/// The largest size of a tile in bytes. A tile is multiplied right after it is written, while it is still in the
/// second-level cache (40 MiB on A100, 50 MiB on H100 and H200, by NVIDIA's architecture papers).
pub const TILE_BYTES: u64 = 32 << 20;

/// The smallest number of outputs per group for which gathering pays. Tensor cores take at least eight.
const FEWEST_OUTPUTS: u64 = 8;

/// A dimension of the results, or of the elements that each of them reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    Batch,
    Input,
    /// A spatial dimension by its index: positions of the result, or of the window.
    Spatial(usize),
}

/// The strides of matrices in elements, with one matrix for each group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    pub from: u64,
    /// The stride between the matrices of groups.
    pub group: u64,
    /// The stride between positions before the features, if other positions lie after the features.
    pub batch: u64,
    /// The stride between results, or between outputs of the kernel.
    pub across: u64,
    /// The stride between terms of a sum.
    pub along: u64,
}

/// The results and terms of one product, as `from..to` of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub results: (u64, u64),
    pub terms: (u64, u64),
}

/// A convolution as matrix products.
#[derive(Clone, Debug, PartialEq)]
pub struct Products {
    pub groups: u64,
    /// The number of outputs in each group.
    pub outputs: u64,
    /// The dimensions of the results with their sizes, in memory order: those before the features, and those after.
    pub before: Vec<(Along, u64)>,
    pub after: Vec<(Along, u64)>,
    /// The contracted dimensions, in the kernel's order.
    pub terms: Vec<(Along, u64)>,
    /// The strides of the operand, if it is the matrix already.
    pub in_place: Option<Steps>,
    /// The strides of the kernel, or of its copy.
    pub kernel: Steps,
    /// The order of the kernel's dimensions in its copy, output features first. Present if no strides make the kernel a
    /// matrix.
    pub kernel_copy: Option<Vec<usize>>,
    /// True if a gathered tile stores the terms of a result contiguously, false if it stores the results of a term
    /// contiguously.
    pub terms_last: bool,
    pub tiles: Vec<Tile>,
    /// True if sums over several tiles are kept in single precision and rounded at the end.
    pub sums_apart: bool,
}

fn product(dims: &[(Along, u64)]) -> u64 {
    dims.iter().map(|d| d.1).product()
}

/// Dimensions merged into one. The stride is `None` for a single element, where it does not matter.
struct Line {
    size: u64,
    stride: Option<u64>,
}

/// Merges dimensions, given by size and stride, if possible.
fn joined(dims: impl IntoIterator<Item = (u64, u64)>) -> Option<Line> {
    let mut all = Line { size: 1, stride: None };
    for (size, stride) in dims.into_iter().filter(|d| d.0 != 1) {
        if all.stride.is_some_and(|outer| outer != stride * size) {
            return None;
        }
        all = Line { size: all.size * size, stride: Some(stride) };
    }
    Some(all)
}

/// The strides with which a library accepts a matrix, if it does. Neighbours in one direction must be contiguous, and
/// lines must not overlap.
fn as_matrix(rows: &Line, columns: &Line) -> Option<(u64, u64)> {
    let (by_row, by_column) = (rows.stride.unwrap_or(columns.size), columns.stride.unwrap_or(rows.size));
    match (rows.stride, columns.stride) {
        (_, None | Some(1)) if by_row >= columns.size => Some((by_row, 1)),
        (None | Some(1), _) if by_column >= rows.size => Some((1, by_column)),
        _ => None,
    }
}

impl Products {
    /// A convolution of tensors of these shapes, with tiles of at most `tile_bytes`. `None` if it is better to compute
    /// every result separately: for integers, and for groups with few outputs.
    pub fn of(op: &Convolution, shapes: [&[u64]; 3], dtype: DType, tile_bytes: u64) -> Option<Products> {
        let [lhs, rhs, result] = shapes;
        let groups = op.feature_groups.max(op.batch_groups).max(1);
        let outputs = rhs[op.rhs.output] / groups;
        let is_empty = shapes.iter().any(|s| s.contains(&0));
        if !dtype.is_float() || dtype.bytes() == 1 || is_empty || groups > 1 && outputs < FEWEST_OUTPUTS {
            return None;
        }
        let spatial = |dims: &[usize], d: usize| dims.iter().position(|&s| s == d).map_or(Along::Input, Along::Spatial);
        let of_result = |d: usize| match d == op.result.batch {
            true => (Along::Batch, result[d]),
            false => (spatial(&op.result.spatial, d), result[d]),
        };
        let mut before: Vec<(Along, u64)> = (0..op.result.feature).map(of_result).collect();
        let mut after: Vec<(Along, u64)> = (op.result.feature + 1..result.len()).map(of_result).collect();
        if product(&after) == 1 {
            before.append(&mut after);
        }
        let of_kernel = |d: usize| (d != op.rhs.output).then(|| (spatial(&op.rhs.spatial, d), rhs[d]));
        let terms: Vec<(Along, u64)> = (0..rhs.len()).filter_map(of_kernel).collect();
        let (kernel, kernel_copy) = kernel(op, rhs, outputs);
        let mut products = Products {
            groups,
            outputs,
            before,
            after,
            terms,
            in_place: None,
            kernel,
            kernel_copy,
            terms_last: terms_last(op, lhs, result),
            tiles: Vec::new(),
            sums_apart: false,
        };
        products.in_place = products.in_place(op, lhs, result);
        products.tiles = products.tiles(dtype.bytes(), if products.in_place.is_some() { u64::MAX } else { tile_bytes });
        products.sums_apart = dtype.bytes() == 2 && products.tiles.iter().any(|t| t.terms.0 > 0);
        Some(products)
    }

    pub fn num_before(&self) -> u64 {
        product(&self.before)
    }

    pub fn num_after(&self) -> u64 {
        product(&self.after)
    }

    pub fn num_terms(&self) -> u64 {
        product(&self.terms)
    }

    /// The scratch in elements: the kernel's copy, the largest tile, and sums in single precision. Each is zero if not
    /// needed.
    pub fn scratch(&self) -> [u64; 3] {
        let size = |t: &Tile| (t.results.1 - t.results.0) * (t.terms.1 - t.terms.0) * self.groups;
        let kernel = self.kernel_copy.as_ref().map_or(0, |_| self.groups * self.outputs * self.num_terms());
        let tile = if self.in_place.is_some() { 0 } else { self.tiles.iter().map(size).max().unwrap_or(0) };
        let results = self.num_before() * self.num_after() * self.groups * self.outputs;
        [kernel, tile, if self.sums_apart { results } else { 0 }]
    }

    /// The strides of the matrices in a gathered tile.
    pub fn gathered(&self, tile: &Tile) -> Steps {
        let (results, terms) = (tile.results.1 - tile.results.0, tile.terms.1 - tile.terms.0);
        let (across, along) = if self.terms_last { (terms, 1) } else { (1, results) };
        let batch = across * self.num_after().min(results);
        Steps { from: 0, group: results * terms, batch, across, along }
    }

    /// The strides of the results.
    pub fn results(&self, tile: &Tile) -> Steps {
        let features = self.groups * self.outputs;
        if self.after.is_empty() {
            let from = tile.results.0 * features;
            return Steps { from, group: self.outputs, batch: 0, across: features, along: 1 };
        }
        let after = self.num_after();
        let from = tile.results.0 / after * features * after + tile.results.0 % after;
        Steps { from, group: self.outputs * after, batch: features * after, across: 1, along: after }
    }

    /// The strides that make the operand the first matrix, if windows read no padding and strides describe their
    /// positions.
    fn in_place(&self, op: &Convolution, lhs: &[u64], result: &[u64]) -> Option<Steps> {
        let stride = strides(lhs);
        let mut from = 0;
        for (i, w) in op.window.iter().enumerate() {
            let (n, last) = (lhs[op.lhs.spatial[i]], result[op.result.spatial[i]] - 1);
            let reach = (last * w.stride + (w.size - 1) * w.window_dilation) as i64 - w.pad_low;
            if w.base_dilation != 1 || w.reversed && w.size > 1 || w.pad_low > 0 || reach >= n as i64 {
                return None;
            }
            from += w.pad_low.unsigned_abs() * stride[op.lhs.spatial[i]];
        }
        let of_result = |&(along, size): &(Along, u64)| match along {
            Along::Spatial(i) => (size, stride[op.lhs.spatial[i]] * op.window[i].stride),
            _ => (size, stride[op.lhs.batch]),
        };
        let of_term = |&(along, size): &(Along, u64)| match along {
            Along::Spatial(i) => (size, stride[op.lhs.spatial[i]] * op.window[i].window_dilation),
            _ => (size, stride[op.lhs.feature]),
        };
        let group = match op.batch_groups > 1 {
            true => stride[op.lhs.batch] * result[op.result.batch],
            false => stride[op.lhs.feature] * (lhs[op.lhs.feature] / self.groups),
        };
        let terms = joined(self.terms.iter().map(of_term))?;
        let (results, batch) = match self.after.is_empty() {
            true => (joined(self.before.iter().map(of_result))?, 0),
            false => {
                let before = joined(self.before.iter().map(of_result))?;
                (joined(self.after.iter().map(of_result))?, before.stride.unwrap_or(0))
            }
        };
        let (across, along) = as_matrix(&results, &terms)?;
        Some(Steps { from, group, batch, across, along })
    }

    fn tiles(&self, element_bytes: u64, tile_bytes: u64) -> Vec<Tile> {
        let (after, terms) = (self.num_after(), self.num_terms());
        let results = self.num_before() * after;
        let each = element_bytes * self.groups;
        let ranges = |from: u64, to: u64, size: u64| {
            (0..(to - from).div_ceil(size)).map(move |i| (from + i * size, (from + (i + 1) * size).min(to)))
        };
        let fitting = |others: u64| (tile_bytes / (others * each).max(1)).max(1);
        // Whole vectors of tensor cores, so that rows stay aligned.
        let aligned = |n: u64| if n > 8 { n / 8 * 8 } else { n };
        if results.saturating_mul(terms).saturating_mul(each) <= tile_bytes {
            return vec![Tile { results: (0, results), terms: (0, terms) }];
        }
        if terms > results {
            let all = ranges(0, terms, aligned(fitting(results)));
            return all.map(|terms| Tile { results: (0, results), terms }).collect();
        }
        let most = fitting(terms);
        let of = |results| Tile { results, terms: (0, terms) };
        match self.after.is_empty() {
            true => ranges(0, results, aligned(most)).map(of).collect(),
            // A tile has all positions after the features, or part of those of one product.
            false if most >= after => ranges(0, results, most / after * after).map(of).collect(),
            false => {
                let each = (0..self.num_before()).map(|i| (i * after, (i + 1) * after));
                each.flat_map(|(from, to)| ranges(from, to, aligned(most))).map(of).collect()
            }
        }
    }
}

/// The kernel as one matrix per group, and the order of its copy if a copy is necessary.
fn kernel(op: &Convolution, rhs: &[u64], outputs: u64) -> (Steps, Option<Vec<usize>>) {
    let stride = strides(rhs);
    let output = stride[op.rhs.output];
    let others: Vec<usize> = (0..rhs.len()).filter(|&d| d != op.rhs.output).collect();
    let across = Line { size: outputs, stride: (outputs > 1).then_some(output) };
    let laid = joined(others.iter().map(|&d| (rhs[d], stride[d]))).and_then(|terms| as_matrix(&across, &terms));
    match laid {
        Some((across, along)) => (Steps { from: 0, group: outputs * output, batch: 0, across, along }, None),
        None => {
            let terms: u64 = others.iter().map(|&d| rhs[d]).product();
            let order = [vec![op.rhs.output], others].concat();
            (Steps { from: 0, group: outputs * terms, batch: 0, across: terms, along: 1 }, Some(order))
        }
    }
}

/// Returns true if neighbours in the operand's memory are terms of one result rather than results. Consecutive threads
/// then read contiguous memory.
fn terms_last(op: &Convolution, lhs: &[u64], result: &[u64]) -> bool {
    let innermost = (0..lhs.len()).rev().find(|&d| lhs[d] > 1).unwrap_or(op.lhs.feature);
    match op.lhs.spatial.iter().position(|&d| d == innermost) {
        Some(i) => op.window[i].size > result[op.result.spatial[i]],
        None => innermost == op.lhs.feature,
    }
}

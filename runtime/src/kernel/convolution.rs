//! Convolutions as matrix products. The elements that a few hundred results read are gathered into a matrix (im2col).
//! It is multiplied by the kernel, as a matrix of window positions and inputs by outputs.
//!
//! If the operand is dilated, results fall into phases that read different window positions, and none of them reads the
//! zeros in between. So a transposed convolution costs no more than its non-zero terms.

use super::dot::{Sides, product_term};
use super::matrix::{Matrix, Strides, multiply};
use crate::arena::Storage;
use crate::element::{Class, Element, with_class};
use crate::error::KernelError;
use crate::thread_pool::{COPIED, PRODUCTS, spreads};
use crate::view::View;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Convolution, GATHERED_ROWS, WindowDim};
use altiplano_ir::work::{Term, Work};
use rayon::prelude::*;
use std::ops::Range;

/// Maximum number of rows of the gathered matrix.
const ROWS: usize = GATHERED_ROWS as usize;

/// A spatial dimension with its strides in lhs, rhs and result.
#[derive(Clone, Debug, PartialEq)]
struct Spatial {
    size: usize,
    result_size: usize,
    lhs: usize,
    rhs: usize,
    result: usize,
}

/// Results of one dimension that read the same window positions: `first + j * distance`, reading the operand's position
/// `at + j * step` at window position `k`, if that exists.
#[derive(Clone, Debug, PartialEq)]
struct DimPhase {
    first: usize,
    distance: usize,
    count: usize,
    step: isize,
    /// `(k, at)`.
    positions: Vec<(usize, isize)>,
}

/// Results that read the same window positions along all dimensions.
#[derive(Clone, Debug, PartialEq)]
struct Phase {
    dims: Vec<DimPhase>,
    /// Combinations of the dimensions' window positions, concatenated, and their number.
    positions: Vec<(usize, isize)>,
    num_positions: usize,
}

impl Phase {
    fn position(&self, i: usize) -> &[(usize, isize)] {
        &self.positions[i * self.dims.len()..(i + 1) * self.dims.len()]
    }

    /// Number of results of the phase in one image.
    fn count(&self) -> usize {
        self.dims.iter().map(|d| d.count).product()
    }
}

/// A compiled convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct Conv {
    class: Class,
    groups: usize,
    images: usize,
    inputs: usize,
    outputs: usize,
    spatial: Vec<Spatial>,
    phases: Vec<Phase>,
    lhs: Side,
    rhs: Side,
    /// Strides of images, outputs and groups in the result.
    result_image: usize,
    result_output: usize,
    result_group: usize,
    result_elements: usize,
    /// Elements of the gathered matrix, the kernel's matrix and the product.
    workspace: [usize; 3],
}

/// The layout of an operand.
#[derive(Clone, Debug, PartialEq)]
struct Side {
    offset: usize,
    end: usize,
    group: usize,
    /// Stride of images (lhs) or outputs (rhs).
    major: usize,
    input: usize,
}

fn phases(window: &WindowDim, result_size: usize) -> Vec<DimPhase> {
    let (stride, base) = (window.stride as i64, window.base_dilation as i64);
    let gcd = |mut a: i64, mut b: i64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let period = base / gcd(stride, base);
    let phase = |p: i64| {
        let k_at = |k: u64| {
            let at = p * stride + k as i64 * window.window_dilation as i64 - window.pad_low;
            let index = if window.reversed { window.size - 1 - k } else { k };
            (at.rem_euclid(base) == 0).then_some((index as usize, at.div_euclid(base) as isize))
        };
        DimPhase {
            first: p as usize,
            distance: period as usize,
            count: result_size.saturating_sub(p as usize).div_ceil(period as usize),
            step: (period * stride / base) as isize,
            positions: (0..window.size).filter_map(k_at).collect(),
        }
    };
    (0..period.min(result_size as i64)).map(phase).collect()
}

/// All combinations of the phases of several dimensions.
fn combined(dims: &[Vec<DimPhase>]) -> Vec<Phase> {
    let choices = |lengths: Vec<usize>| -> Vec<Vec<usize>> {
        lengths.iter().fold(vec![Vec::new()], |all: Vec<Vec<usize>>, &n| {
            all.iter().flat_map(|some| (0..n).map(move |i| [some.as_slice(), &[i]].concat())).collect()
        })
    };
    let phase = |chosen: Vec<usize>| {
        let dims: Vec<DimPhase> = chosen.iter().zip(dims).map(|(&i, phases)| phases[i].clone()).collect();
        let positions = choices(dims.iter().map(|d| d.positions.len()).collect());
        let num_positions = positions.len();
        let of_dims =
            |chosen: Vec<usize>| -> Vec<_> { chosen.iter().zip(&dims).map(|(&i, d)| d.positions[i]).collect() };
        Phase { positions: positions.into_iter().flat_map(of_dims).collect(), num_positions, dims }
    };
    choices(dims.iter().map(Vec::len).collect()).into_iter().map(phase).collect()
}

impl Conv {
    /// `result` holds the strides of the result's dimensions.
    pub fn new(op: &Convolution, class: Class, lhs: &View, rhs: &View, shape: &[usize], result: &[usize]) -> Conv {
        let groups = op.feature_groups.max(op.batch_groups) as usize;
        let images = shape[op.result.batch];
        let (inputs, outputs) = (rhs.shape[op.rhs.input], rhs.shape[op.rhs.output] / groups);
        let of_lhs =
            if op.batch_groups > 1 { images * lhs.strides[op.lhs.batch] } else { inputs * lhs.strides[op.lhs.feature] };
        let spatial = (0..op.window.len()).map(|i| {
            let (l, r, d) = (op.lhs.spatial[i], op.rhs.spatial[i], op.result.spatial[i]);
            Spatial {
                size: lhs.shape[l],
                result_size: shape[d],
                lhs: lhs.strides[l],
                rhs: rhs.strides[r],
                result: result[d],
            }
        });
        let of_dims: Vec<_> =
            op.window.iter().enumerate().map(|(i, w)| phases(w, shape[op.result.spatial[i]])).collect();
        let shapes = [&rhs.shape, shape].map(|shape| shape.iter().map(|&n| n as u64).collect::<Vec<_>>());
        let workspace = match class.is_integer() {
            true => [0; 3],
            false => op.workspace(&shapes[0], &shapes[1]).map(|n| n as usize),
        };
        let side =
            |view: &View, group, major, input| Side { offset: view.offset, end: view.end(), group, major, input };
        Conv {
            class,
            groups,
            images,
            inputs,
            outputs,
            spatial: spatial.collect(),
            phases: combined(&of_dims),
            lhs: side(lhs, of_lhs, lhs.strides[op.lhs.batch], lhs.strides[op.lhs.feature]),
            rhs: side(rhs, outputs * rhs.strides[op.rhs.output], rhs.strides[op.rhs.output], rhs.strides[op.rhs.input]),
            result_image: result[op.result.batch],
            result_output: result[op.result.feature],
            result_group: outputs * result[op.result.feature],
            result_elements: shape.iter().product(),
            workspace,
        }
    }

    /// Number of window positions gathered at a time.
    fn block(&self) -> usize {
        Convolution::gathered_positions(self.inputs as u64) as usize
    }

    fn is_depthwise(&self) -> bool {
        self.inputs == 1 && self.outputs == 1 && self.groups > 1
    }

    /// Bytes of the matrices, and of the single-precision copies that other formats need.
    pub fn workspace_bytes(&self) -> u64 {
        let copies = match self.class {
            Class::F32 | Class::I32 | Class::I64 => 0,
            _ => self.lhs.end - self.lhs.offset + self.rhs.end - self.rhs.offset + self.result_elements,
        };
        4 * (self.workspace.iter().sum::<usize>() + copies) as u64
    }

    /// The work of a run on at most `threads` threads: for each tile of results the gather, the products, and the
    /// writes of the results.
    pub fn work(&self, threads: usize) -> Work {
        let mut work = Work::new(1);
        let mut add = |term: Term, times: f64| work.add(Term { times, ..term });
        let groups = self.groups as f64;
        for phase in &self.phases {
            let positions = phase.num_positions;
            let results = phase.count() * self.images;
            if self.is_depthwise() {
                let visited = (results * positions) as f64;
                add(Term::once("conv_position", DType::F32, [visited]), 1.0);
                add(Term::once("multiply_add", DType::F32, [visited * groups]), 1.0);
                continue;
            }
            let kernel = positions * self.inputs * self.outputs;
            add(Term::once("copy_strided", DType::F32, [kernel as f64]), groups);
            for (rows, tiles) in parts_of(results, ROWS) {
                let tiles = tiles as f64 * groups;
                let out = rows * self.outputs;
                match self.result_output {
                    1 => add(Term::once("copy", DType::F32, [4.0 * out as f64]), tiles),
                    _ => add(Term::once("copy_strided", DType::F32, [out as f64]), tiles),
                }
                for (block, blocks) in parts_of(positions, self.block()) {
                    let times = tiles * blocks as f64;
                    let terms = block * self.inputs;
                    let (run, lhs) = match self.gathers_images() {
                        true => (self.images.min(rows), (rows, 1)),
                        false => (self.inputs, (1, terms)),
                    };
                    let sides = Sides { by_terms: lhs, by_columns: (1, self.outputs), result: (1, self.outputs) };
                    let large = spreads(threads, rows * self.outputs * terms, PRODUCTS);
                    let sizes = [rows, self.outputs, terms];
                    let product = product_term(sizes, sides, if large { threads } else { 1 });
                    add(Term { dtype: self.class.dtype(), ..product }, times);
                    let spread = spreads(threads, rows * terms, COPIED);
                    let share = times / if spread { threads as f64 } else { 1.0 };
                    let neighbours = if self.gathers_images() { self.lhs.major } else { self.lhs.input } == 1;
                    let gathered = (rows * terms) as f64;
                    add(Term::once("gather_run", DType::F32, [gathered / run.max(1) as f64]), share);
                    match neighbours {
                        true => add(Term::once("copy", DType::F32, [4.0 * gathered]), share),
                        false => add(Term::once("copy_strided", DType::F32, [gathered]), share),
                    }
                }
            }
        }
        work
    }

    pub fn run(&self, lhs: &Storage, rhs: &Storage, result: &mut Storage, threads: usize) -> Result<(), KernelError> {
        let arena = result.arena().clone();
        let [gathered, kernel, product] = self.workspace;
        let mut work = [
            arena.allocate(Class::F32, gathered)?,
            arena.allocate(Class::F32, kernel)?,
            arena.allocate(Class::F32, product)?,
        ];
        match self.class {
            Class::F32 => {
                let (l, r) = (&lhs.slice::<f32>()[self.lhs.offset..], &rhs.slice::<f32>()[self.rhs.offset..]);
                self.convolve(l, r, result.slice_mut(), &mut work, threads);
            }
            Class::I32 | Class::I64 => with_class!(self.class, T => {
                let (l, r) = (&lhs.slice::<T>()[self.lhs.offset..], &rhs.slice::<T>()[self.rhs.offset..]);
                let result = result.slice_mut::<T>();
                result.fill(T::from_i64(0));
                self.for_each_term(|d, l_at, r_at| {
                    let term = l[l_at].to_i64().wrapping_mul(r[r_at].to_i64());
                    result[d] = T::from_i64(result[d].to_i64().wrapping_add(term));
                });
            }),
            Class::F16 | Class::BF16 | Class::Bool => with_class!(self.class, T => {
                let widen = |from: &Storage, side: &Side| -> Result<Storage, KernelError> {
                    let mut wide = arena.allocate(Class::F32, side.end - side.offset)?;
                    let part = &from.slice::<T>()[side.offset..side.end];
                    wide.slice_mut::<f32>().iter_mut().zip(part).for_each(|(w, &x)| *w = Element::to_f32(x));
                    Ok(wide)
                };
                let (l, r) = (widen(lhs, &self.lhs)?, widen(rhs, &self.rhs)?);
                let mut wide = arena.allocate(Class::F32, self.result_elements)?;
                self.convolve(l.slice(), r.slice(), wide.slice_mut(), &mut work, threads);
                let narrow = result.slice_mut::<T>().iter_mut();
                narrow.zip(wide.slice::<f32>()).for_each(|(n, &x)| *n = <T as Element>::from_f32(x));
            }),
        }
        Ok(())
    }

    fn convolve(&self, lhs: &[f32], rhs: &[f32], result: &mut [f32], work: &mut [Storage; 3], threads: usize) {
        if self.is_depthwise() {
            return self.depthwise(lhs, rhs, result);
        }
        let [gathered, kernel, product] = work;
        let (gathered, product) = (gathered.slice_mut::<f32>(), product.slice_mut::<f32>());
        let mut places = Places::default();
        for group in 0..self.groups {
            for phase in &self.phases {
                // The kernel's matrix, terms by outputs.
                let kernel = kernel.slice_mut::<f32>();
                for i in 0..phase.num_positions {
                    let along = phase.position(i).iter().zip(&self.spatial);
                    let at = group * self.rhs.group + along.map(|(p, s)| p.0 * s.rhs).sum::<usize>();
                    for input in 0..self.inputs {
                        let row = &mut kernel[(i * self.inputs + input) * self.outputs..][..self.outputs];
                        let from = at + input * self.rhs.input;
                        row.iter_mut().enumerate().for_each(|(o, x)| *x = rhs[from + o * self.rhs.major]);
                    }
                }
                let total = phase.count() * self.images;
                for first in (0..total).step_by(ROWS) {
                    let n = ROWS.min(total - first);
                    let product = &mut product[..n * self.outputs];
                    if phase.num_positions == 0 || self.inputs == 0 {
                        product.fill(0.0);
                    }
                    places.fill(phase, first..first + n, self.images, self.gathers_images());
                    for start in (0..phase.num_positions).step_by(self.block()) {
                        let block = start..phase.num_positions.min(start + self.block());
                        let terms = block.len() * self.inputs;
                        if terms == 0 {
                            continue;
                        }
                        let strides = self.gather(lhs, group, phase, block, &places, gathered, threads);
                        let part = &kernel[start * self.inputs * self.outputs..];
                        let by_rows = Strides { row: self.outputs, column: 1 };
                        let lhs = Matrix { elements: &*gathered, strides };
                        let rhs = Matrix { elements: part, strides: by_rows };
                        let to = Matrix { elements: &mut *product, strides: by_rows };
                        multiply([n, self.outputs, terms], lhs, rhs, to, start > 0, threads);
                    }
                    for ((image, js), row) in places.iter().zip(product.chunks(self.outputs.max(1))) {
                        let at = group * self.result_group + self.result_at(image, js, phase);
                        if self.result_output == 1 {
                            result[at..at + self.outputs].copy_from_slice(row);
                        } else {
                            row.iter().enumerate().for_each(|(o, &x)| result[at + o * self.result_output] = x);
                        }
                    }
                }
            }
        }
    }

    fn result_at(&self, image: usize, js: &[usize], phase: &Phase) -> usize {
        let spatial = js.iter().zip(&phase.dims).zip(&self.spatial);
        image * self.result_image + spatial.map(|((j, p), s)| (p.first + j * p.distance) * s.result).sum::<usize>()
    }

    /// Returns whether images are closer together in memory than inputs, so that they are gathered side by side.
    fn gathers_images(&self) -> bool {
        self.images > 1 && (self.inputs == 1 || self.lhs.major < self.lhs.input)
    }

    /// Fills the matrix whose rows are `places` and whose columns are the window positions of `block` and the inputs.
    /// Rows are adjacent if images are.
    fn gather(
        &self,
        lhs: &[f32],
        group: usize,
        phase: &Phase,
        block: Range<usize>,
        places: &Places,
        gathered: &mut [f32],
        threads: usize,
    ) -> Strides {
        let (n, terms) = (places.len(), block.len() * self.inputs);
        // The operand's element of image 0 and input 0, unless it is padding.
        let source = |position: &[(usize, isize)], js: &[usize]| {
            let mut at = group * self.lhs.group;
            for (((_, first), &j), (p, s)) in position.iter().zip(js).zip(phase.dims.iter().zip(&self.spatial)) {
                let x = usize::try_from(first + j as isize * p.step).ok().filter(|&x| x < s.size)?;
                at += x * s.lhs;
            }
            Some(at)
        };
        let copy = |target: &mut [f32], from: Option<usize>, stride: usize| match from {
            None => target.fill(0.0),
            Some(at) if stride == 1 => target.copy_from_slice(&lhs[at..at + target.len()]),
            Some(at) => target.iter_mut().enumerate().for_each(|(i, x)| *x = lhs[at + i * stride]),
        };
        if self.gathers_images() {
            let column = |(k, column): (usize, &mut [f32])| {
                let (position, input) = (phase.position(block.start + k / self.inputs), k % self.inputs);
                let mut m = 0;
                while m < n {
                    let (image, js) = places.at(m);
                    let run = (self.images - image).min(n - m);
                    let from = source(position, js);
                    let from = from.map(|at| at + image * self.lhs.major + input * self.lhs.input);
                    copy(&mut column[m..m + run], from, self.lhs.major);
                    m += run;
                }
            };
            let columns = &mut gathered[..n * terms];
            if spreads(threads, n * terms, COPIED) {
                columns.par_chunks_mut(n).enumerate().for_each(column);
            } else {
                columns.chunks_mut(n).enumerate().for_each(column);
            }
            return Strides { row: 1, column: n };
        }
        let row = |(m, row): (usize, &mut [f32])| {
            let (image, js) = places.at(m);
            for (i, target) in block.clone().zip(row.chunks_mut(self.inputs)) {
                let from = source(phase.position(i), js).map(|at| at + image * self.lhs.major);
                copy(target, from, self.lhs.input);
            }
        };
        let rows = &mut gathered[..n * terms];
        if spreads(threads, n * terms, COPIED) {
            rows.par_chunks_mut(terms).enumerate().for_each(row);
        } else {
            rows.chunks_mut(terms).enumerate().for_each(row);
        }
        Strides { row: terms, column: 1 }
    }

    /// Gathers the operand of the first tile of results, as a run does for each tile.
    pub(crate) fn gather_tile(&self, lhs: &[f32], gathered: &mut [f32]) {
        let Some(phase) = self.phases.first() else { return };
        let mut places = Places::default();
        places.fill(phase, 0..ROWS.min(phase.count() * self.images), self.images, self.gathers_images());
        self.gather(lhs, 0, phase, 0..phase.num_positions.min(self.block()), &places, gathered, 1);
    }

    /// Convolutions with one input and one output in each group; groups run innermost.
    fn depthwise(&self, lhs: &[f32], rhs: &[f32], result: &mut [f32]) {
        result.fill(0.0);
        self.for_each_position(|to, from, with| {
            for g in 0..self.groups {
                let x = lhs[from + g * self.lhs.group] * rhs[with + g * self.rhs.group];
                result[to + g * self.result_group] += x;
            }
        });
    }

    /// Visits every term with its positions in result, lhs and rhs. For formats in which convolutions are rare and
    /// small.
    fn for_each_term(&self, mut visit: impl FnMut(usize, usize, usize)) {
        self.for_each_position(|to, from, with| {
            for g in 0..self.groups {
                for output in 0..self.outputs {
                    for input in 0..self.inputs {
                        visit(
                            to + g * self.result_group + output * self.result_output,
                            from + g * self.lhs.group + input * self.lhs.input,
                            with + g * self.rhs.group + output * self.rhs.major + input * self.rhs.input,
                        );
                    }
                }
            }
        });
    }

    /// Visits every pair of result and window position that reads an element, with positions in result, lhs and rhs for
    /// the first group, output and input.
    fn for_each_position(&self, mut visit: impl FnMut(usize, usize, usize)) {
        let mut places = Places::default();
        for phase in &self.phases {
            places.fill(phase, 0..phase.count() * self.images, self.images, false);
            for (image, js) in places.iter() {
                let to = self.result_at(image, js, phase);
                for i in 0..phase.num_positions {
                    let mut from = Some(image * self.lhs.major);
                    let mut with = 0;
                    let along = phase.position(i).iter().zip(js).zip(phase.dims.iter().zip(&self.spatial));
                    for ((&(k, first), &j), (p, s)) in along {
                        let x = usize::try_from(first + j as isize * p.step).ok().filter(|&x| x < s.size);
                        from = from.zip(x).map(|(from, x)| from + x * s.lhs);
                        with += k * s.rhs;
                    }
                    if let Some(from) = from {
                        visit(to, from, with);
                    }
                }
            }
        }
    }
}

/// Cuts a whole into equal parts and a remainder: their sizes, and the number of each.
fn parts_of(whole: usize, part: usize) -> impl Iterator<Item = (usize, usize)> {
    let last = (whole % part, 1);
    [(part, whole / part), last].into_iter().filter(|&(size, count)| size > 0 && count > 0)
}

/// Some results of a phase: for each its image, and its position along each spatial dimension.
#[derive(Default)]
struct Places {
    /// Length of an entry of `all`.
    each: usize,
    all: Vec<usize>,
}

impl Places {
    /// Sets the places of results by number, images innermost (`by_image`) or outermost.
    fn fill(&mut self, phase: &Phase, numbers: Range<usize>, images: usize, by_image: bool) {
        self.each = phase.dims.len() + 1;
        self.all.clear();
        if numbers.is_empty() {
            return;
        }
        // A number's mixed-radix digits; the last one changes fastest.
        let sizes: Vec<usize> = match by_image {
            true => phase.dims.iter().map(|d| d.count).chain([images]).collect(),
            false => [images].into_iter().chain(phase.dims.iter().map(|d| d.count)).collect(),
        };
        let mut digits = vec![0; self.each];
        let mut rest = numbers.start;
        for (digit, &size) in digits.iter_mut().zip(&sizes).rev() {
            *digit = rest % size;
            rest /= size;
        }
        for _ in numbers {
            match (by_image, digits.split_last()) {
                (true, Some((&image, js))) => {
                    self.all.push(image);
                    self.all.extend_from_slice(js);
                }
                _ => self.all.extend_from_slice(&digits),
            }
            for (digit, &size) in digits.iter_mut().zip(&sizes).rev() {
                *digit += 1;
                if *digit < size {
                    break;
                }
                *digit = 0;
            }
        }
    }

    fn len(&self) -> usize {
        self.all.len() / self.each.max(1)
    }

    fn at(&self, m: usize) -> (usize, &[usize]) {
        let place = &self.all[m * self.each..(m + 1) * self.each];
        (place[0], &place[1..])
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &[usize])> {
        self.all.chunks_exact(self.each.max(1)).map(|place| (place[0], &place[1..]))
    }
}

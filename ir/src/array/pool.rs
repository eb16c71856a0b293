//! Pooling over the last dimensions of `[.., spatial..]`.

use super::*;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Op, ReduceWindow, Reducer, WindowDim};

/// The movement of a pooling window over each of the last dimensions.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Pool {
    pub size: Vec<u64>,
    pub stride: Vec<u64>,
    pub pad_low: Vec<i64>,
    pub pad_high: Vec<i64>,
    pub dilation: Vec<u64>,
    /// True if windows that begin inside but end outside count too.
    pub ceil: bool,
}

impl Pool {
    /// The windows over all dimensions of a shape, including the padding that rounding up adds.
    fn windows(&self, shape: &[u64]) -> Result<Vec<WindowDim>, ShapeError> {
        let n = self.size.len();
        let entries = [self.stride.len(), self.pad_low.len(), self.pad_high.len(), self.dilation.len()];
        if shape.len() < n || entries.iter().any(|&e| e != n) {
            return Err(ShapeError::Attribute("the window must have an entry for each spatial dimension"));
        }
        let small = |v: &u64| (1..1 << 40).contains(v);
        let near = |v: &i64| v.unsigned_abs() < 1 << 40;
        if ![&self.size, &self.stride, &self.dilation].into_iter().flatten().all(small)
            || !self.pad_low.iter().chain(&self.pad_high).all(near)
        {
            return Err(ShapeError::Attribute("window, strides, dilations and padding must be of a sensible size"));
        }
        let leading = shape.len() - n;
        let window = |d: usize| {
            let Some(i) = d.checked_sub(leading) else { return WindowDim::one() };
            let (size, stride, dilation) = (self.size[i], self.stride[i] as i128, self.dilation[i]);
            let (low, mut high) = (self.pad_low[i], self.pad_high[i]);
            if self.ceil {
                let span = (size as i128 - 1) * dilation as i128 + 1;
                let room = shape[d] as i128 + low as i128 + high as i128 - span;
                let mut count = room.div_euclid(stride) + i128::from(room.rem_euclid(stride) > 0) + 1;
                // The last window must begin inside the operand, or in the padding before it.
                if (count - 1) * stride >= shape[d] as i128 + low as i128 {
                    count -= 1;
                }
                let more = (count - 1) * stride + span - (shape[d] as i128 + low as i128 + high as i128);
                high += more.max(0) as i64;
            }
            WindowDim {
                size,
                stride: self.stride[i],
                pad_low: low,
                pad_high: high,
                window_dilation: dilation,
                ..WindowDim::one()
            }
        };
        Ok((0..shape.len()).map(window).collect())
    }
}

fn reduce_window(g: &mut Graph, x: ValueId, reducer: Reducer, window: &[WindowDim]) -> Built {
    g.push(Op::ReduceWindow(ReduceWindow { reducer, window: window.to_vec() }), &[x])
}

pub fn max_pool(g: &mut Graph, x: ValueId, pool: &Pool) -> Built {
    let window = pool.windows(g.shape(x))?;
    reduce_window(g, x, Reducer::Max, &window)
}

/// The mean of each window. With `count_padding`, padding counts as elements, but never the padding that rounding up
/// adds.
pub fn avg_pool(g: &mut Graph, x: ValueId, pool: &Pool, count_padding: bool) -> Built {
    let shape = g.shape(x).to_vec();
    let window = pool.windows(&shape)?;
    let total = reduce_window(g, x, Reducer::Sum, &window)?;
    let plain = Pool { ceil: false, ..pool.clone() };
    let rounded_up = window != plain.windows(&shape)?;
    let padded = pool.pad_low.iter().chain(&pool.pad_high).any(|&p| p != 0);
    if !rounded_up && (count_padding || !padded) {
        return with_number(g, Binary::Divide, total, pool.size.iter().product::<u64>() as f64);
    }
    // The number of elements in each window, which is the same for all images and features.
    let leading = shape.len() - pool.size.len();
    let dtype = g.ty(x).dtype;
    let mut ones = full(g, &shape[leading..], 1.0, dtype)?;
    let mut windows = window[leading..].to_vec();
    if count_padding {
        ones = pad(g, ones, &pool.pad_low, &pool.pad_high, 1.0)?;
        for (w, (low, high)) in windows.iter_mut().zip(pool.pad_low.iter().zip(&pool.pad_high)) {
            (w.pad_low, w.pad_high) = (w.pad_low - low, w.pad_high - high);
        }
    }
    let counts = reduce_window(g, ones, Reducer::Sum, &windows)?;
    binary(g, Binary::Divide, total, counts)
}

/// The means of `sizes` parts of the last dimensions, as equal as possible. Part `i` of `n` elements in `k` parts
/// begins at `floor(i n / k)` and ends before `ceil((i + 1) n / k)`.
pub fn adaptive_avg_pool(g: &mut Graph, x: ValueId, sizes: &[u64]) -> Built {
    let shape = g.shape(x).to_vec();
    if shape.len() < sizes.len() || sizes.contains(&0) {
        return Err(ShapeError::Attribute("pooling needs a positive size for each spatial dimension"));
    }
    let leading = shape.len() - sizes.len();
    if sizes.iter().all(|&s| s == 1) {
        return mean(g, x, &(leading..shape.len()).collect::<Vec<_>>(), true);
    }
    if sizes.iter().zip(&shape[leading..]).all(|(k, n)| n.is_multiple_of(*k)) {
        let size: Vec<u64> = sizes.iter().zip(&shape[leading..]).map(|(k, n)| n / k).collect();
        let zeros = vec![0; sizes.len()];
        let pool = Pool {
            stride: size.clone(),
            pad_low: zeros.clone(),
            pad_high: zeros,
            dilation: vec![1; sizes.len()],
            size,
            ceil: false,
        };
        return avg_pool(g, x, &pool, true);
    }
    // Parts of different sizes use a matrix of shares for each dimension.
    let mut y = x;
    for (i, &k) in sizes.iter().enumerate() {
        let (d, n) = (leading + i, shape[leading + i]);
        if n.checked_mul(k).is_none_or(|elements| elements > 1 << 24) {
            return Err(ShapeError::TooLarge { shape: vec![n, k] });
        }
        let share = |(at, part): (u64, u64)| {
            let (from, to) = (part * n / k, ((part + 1) * n).div_ceil(k));
            if (from..to).contains(&at) { 1.0 / (to - from) as f64 } else { 0.0 }
        };
        let dtype = g.ty(x).dtype;
        let shares = (0..n).flat_map(|at| (0..k).map(move |part| (at, part))).map(share).map(|v| dtype.round(v));
        let ty = crate::types::TensorType::new(dtype, vec![n, k]);
        let matrix = g.constant(crate::literal::Literal::dense(ty, shares.collect()));
        y = contract(g, y, matrix, d, 0)?;
        y = move_dim(g, y, shape.len() - 1, d)?;
    }
    Ok(y)
}

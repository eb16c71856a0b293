//! Windows that slide over a dimension, shared by convolutions and pooling.
//!
//! Result position `o` and window position `k` read position `o * stride + k * window_dilation - pad_low` of the
//! operand, whose elements lie `base_dilation` apart. The formula is symmetric in `o` and `k`. So a device with one
//! block of either needs one contiguous part of the operand: its own block and the edges of neighbouring blocks.

use super::*;
use crate::rule::FactorKind;

/// The movement of a window along one dimension. Negative padding removes elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WindowDim {
    pub size: u64,
    pub stride: u64,
    pub pad_low: i64,
    pub pad_high: i64,
    pub base_dilation: u64,
    pub window_dilation: u64,
    /// True if the window's elements are taken from last to first.
    #[serde(default)]
    pub reversed: bool,
}

/// The elements to read from neighbouring blocks, and the padding that is left to do on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halo {
    pub low: u64,
    pub high: u64,
    pub pad_low: i64,
    pub pad_high: i64,
}

/// The limit of attributes. Larger values are an error of the file, and smaller ones cannot overflow.
const LIMIT: u64 = 1 << 40;

impl WindowDim {
    /// A window of one element, which passes the dimension through.
    pub fn one() -> WindowDim {
        WindowDim { stride: 1, size: 1, pad_low: 0, pad_high: 0, base_dilation: 1, window_dilation: 1, reversed: false }
    }

    pub fn is_one(&self) -> bool {
        WindowDim { reversed: false, ..*self } == WindowDim::one()
    }

    /// The distance from the first to the last of `n` elements that lie `dilation` apart, both included.
    fn span(n: u64, dilation: u64) -> i64 {
        if n == 0 { 0 } else { ((n - 1) * dilation) as i64 + 1 }
    }

    /// The size of the result for an operand of size `n`.
    pub fn result_size(&self, n: u64) -> Result<u64, ShapeError> {
        let small = |x: u64| x > 0 && x < LIMIT;
        let near = |x: i64| x.unsigned_abs() < LIMIT;
        let dilations = [self.stride, self.base_dilation, self.window_dilation];
        if !dilations.into_iter().all(small) || !near(self.pad_low) || !near(self.pad_high) {
            return Err(ShapeError::Attribute(
                "strides and dilations must be positive, and padding of a sensible size",
            ));
        }
        let fits = |n: u64, dilation: u64| n.checked_mul(dilation).is_some_and(|x| x < LIMIT);
        if !fits(n, self.base_dilation) || !fits(self.size, self.window_dilation) || self.size == 0 {
            return Err(ShapeError::Attribute("the window must have elements, and dilated sizes must be below 2^40"));
        }
        let padded = WindowDim::span(n, self.base_dilation) + self.pad_low + self.pad_high;
        let window = WindowDim::span(self.size, self.window_dilation);
        if padded < 0 {
            return Err(ShapeError::Attribute("negative padding cuts off more than there is"));
        }
        Ok(if padded < window { 0 } else { (padded - window) as u64 / self.stride + 1 })
    }

    /// The largest number of window positions at which one result meets elements of the operand rather than gaps of its
    /// dilation.
    pub(crate) fn positions_of_a_result(&self) -> u64 {
        // Positions that meet elements are as far apart as it takes for window steps to make up a whole dilation.
        let (mut a, mut b) = (self.base_dilation, self.window_dilation);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        self.size.div_ceil(self.base_dilation / a.max(1))
    }

    /// The operand's element at window position `k` of result position `o`. `None` for padding.
    pub fn source(&self, o: u64, k: u64, n: u64) -> Option<u64> {
        let k = if self.reversed { self.size - 1 - k } else { k };
        self.source_of_offset(o, k, n)
    }

    /// [`WindowDim::source`] for a window position counted from the low end, reversed or not.
    fn source_of_offset(&self, o: u64, k: u64, n: u64) -> Option<u64> {
        let at = (o * self.stride + k * self.window_dilation) as i64 - self.pad_low;
        let at = u64::try_from(at).ok()?;
        (at % self.base_dilation == 0 && at / self.base_dilation < n).then_some(at / self.base_dilation)
    }

    /// Returns true if equal blocks of the result need equal blocks of an operand of size `n`, plus edges.
    pub fn follows_result(&self, n: u64, result: u64) -> bool {
        result * self.stride == n * self.base_dilation
    }

    /// Returns true if equal blocks of the window need equal blocks of an operand of size `n`, plus edges.
    pub(crate) fn follows_window(&self, n: u64) -> bool {
        !self.reversed && self.size * self.window_dilation == n * self.base_dilation
    }

    /// The edges that a device with `result` positions, `self.size` window positions and `n` elements of the operand
    /// needs. All three must begin at the same place of the undilated, unpadded operand.
    pub fn halo(&self, n: u64, result: u64) -> Halo {
        let base = self.base_dilation as i64;
        let span = ((result - 1) * self.stride + (self.size - 1) * self.window_dilation) as i64 + 1;
        let low = (self.pad_low + base - 1).div_euclid(base).max(0);
        let last = span - 1 - self.pad_low;
        let high = (last.div_euclid(base) - (n as i64 - 1)).max(0);
        let pad_low = self.pad_low - low * base;
        let extended = WindowDim::span((low + n as i64 + high) as u64, self.base_dilation);
        Halo { low: low as u64, high: high as u64, pad_low, pad_high: span - extended - pad_low }
    }

    /// The window that carries cotangents of the result (of size `result`) back to the operand (of size `n`). It takes
    /// its elements in the opposite order.
    pub fn transposed(&self, n: u64, result: u64) -> WindowDim {
        let reach = ((self.size - 1) * self.window_dilation) as i64;
        let pad_low = reach - self.pad_low;
        let span = WindowDim::span(n, self.base_dilation) + reach;
        WindowDim {
            size: self.size,
            stride: self.base_dilation,
            pad_low,
            pad_high: span - WindowDim::span(result, self.stride) - pad_low,
            base_dilation: self.stride,
            window_dilation: self.window_dilation,
            reversed: !self.reversed,
        }
    }

    /// The window with the roles of result and window exchanged, over the same operand of size `n`. Its elements are
    /// the cotangents of the result (of size `result`), and its result has this window's elements.
    pub fn exchanged(&self, n: u64, result: u64) -> WindowDim {
        let span = ((self.size - 1) * self.window_dilation) as i64 + WindowDim::span(result, self.stride);
        WindowDim {
            size: result,
            stride: self.window_dilation,
            pad_low: self.pad_low,
            pad_high: span - WindowDim::span(n, self.base_dilation) - self.pad_low,
            base_dilation: self.base_dilation,
            window_dilation: self.stride,
            reversed: false,
        }
    }
}

/// Adds a factor for the operand's dimension `n` and one for the result's. They split together if the window allows it.
pub(super) fn window_factors(rule: &mut ShardingRule, window: &WindowDim, n: u64, result: u64) -> (u8, u8) {
    if window.is_one() {
        let f = rule.factor(n, FactorKind::Parallel);
        return (f, f);
    }
    let operand = rule.factor(n, FactorKind::Whole);
    let kind = if window.follows_result(n, result) { FactorKind::Parallel } else { FactorKind::Whole };
    let follower = rule.factor(result, kind);
    if kind == FactorKind::Parallel {
        rule.windows.push(crate::rule::Window { factor: operand, followers: vec![follower] });
    }
    (operand, follower)
}

impl Local<'_> {
    /// Operand 0 extended by the edges of neighbouring blocks that the window along `dim` reads, and the remaining
    /// window. `result` and `window.size` are local sizes. Beyond the ends of the dimension lies the neutral element.
    pub(super) fn with_halo(
        &mut self,
        dim: usize,
        axes: &[AxisId],
        window: &WindowDim,
        result: u64,
        reducer: Reducer,
    ) -> WindowDim {
        let halo = window.halo(self.graph.shape(self.operands[0])[dim], result);
        if halo.low + halo.high > 0 {
            let exchange =
                Collective::Halo { axes: axes.to_vec(), dim: dim as u8, low: halo.low, high: halo.high, reducer };
            self.operands[0] = self.graph.emit(Op::collective(exchange, self.mesh), &[self.operands[0]]);
        }
        WindowDim { pad_low: halo.pad_low, pad_high: halo.pad_high, ..*window }
    }
}

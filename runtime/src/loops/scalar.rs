//! Scalars of a loop program. Each is computed once from others, equal ones are shared, and indices are simplified as
//! they are made.
//!
//! Indices are non-negative integers, unless elements before the first may be cut off. Each has a known lower and upper
//! bound, which lets `(8 * i + j) / 8` simplify to `i`. So a chain of reshapes and slices becomes as short as a view
//! written by hand.

use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Binary, Direction, ThreefryWord, Unary, WindowDim};
use std::collections::HashMap;

/// A scalar, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Var(pub u32);

/// The computation of a scalar. Floats of at most 16 bits are computed in single precision, and rounded where they are
/// stored, converted or compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Scalar {
    /// The row, and the iteration of a phase.
    Row,
    Step,
    /// The result of a fold of an earlier phase.
    Slot(u32, DType),
    /// The device's position along some axes, or the start of a tile.
    Coordinate(u32),
    /// A constant index.
    Index(i64),
    /// A constant element, by the bits of an `f64`.
    Number(u64, DType),
    /// An element of a parameter; zero if the guard is false.
    Load {
        param: u32,
        index: Var,
        guard: Option<Var>,
        dtype: DType,
    },
    Add(Var, Var),
    Times(Var, i64),
    /// Quotients and remainders of indices that are not negative.
    Quotient(Var, i64),
    Remainder(Var, i64),
    /// True if an index is in `0..n`.
    Within(Var, i64),
    /// An index clamped to `0..=most`.
    Clamp(Var, i64),
    /// Converts an index to an element, and an element to an index.
    AsElement(Var, DType),
    AsIndex(Var, DType),
    And(Var, Var),
    Unary(Unary, DType, Var),
    Binary(Binary, DType, Var, Var),
    Compare(Direction, DType, Var, Var),
    Select(DType, [Var; 3]),
    Convert {
        from: DType,
        to: DType,
        value: Var,
    },
    Bitcast {
        from: DType,
        to: DType,
        value: Var,
    },
    ReducePrecision {
        exponent_bits: u32,
        mantissa_bits: u32,
        dtype: DType,
        value: Var,
    },
    Threefry(ThreefryWord, [Var; 4]),
}

impl Scalar {
    pub fn operands(&self) -> Vec<Var> {
        match *self {
            Scalar::Row | Scalar::Step | Scalar::Slot(..) | Scalar::Coordinate(_) => Vec::new(),
            Scalar::Index(_) | Scalar::Number(..) => Vec::new(),
            Scalar::Load { index, guard, .. } => [index].into_iter().chain(guard).collect(),
            Scalar::Add(a, b) | Scalar::And(a, b) | Scalar::Binary(_, _, a, b) | Scalar::Compare(_, _, a, b) => {
                vec![a, b]
            }
            Scalar::Times(a, _) | Scalar::Quotient(a, _) | Scalar::Remainder(a, _) | Scalar::Within(a, _) => vec![a],
            Scalar::Clamp(a, _) | Scalar::AsElement(a, _) | Scalar::AsIndex(a, _) | Scalar::Unary(_, _, a) => vec![a],
            Scalar::Convert { value, .. } | Scalar::Bitcast { value, .. } => vec![value],
            Scalar::ReducePrecision { value, .. } => vec![value],
            Scalar::Select(_, all) => all.to_vec(),
            Scalar::Threefry(_, all) => all.to_vec(),
        }
    }

    /// Returns whether it is an index, as opposed to an element or a boolean.
    pub(crate) fn is_index(&self) -> bool {
        matches!(
            self,
            Scalar::Row
                | Scalar::Step
                | Scalar::Coordinate(_)
                | Scalar::Index(_)
                | Scalar::Add(..)
                | Scalar::Times(..)
                | Scalar::Quotient(..)
                | Scalar::Remainder(..)
                | Scalar::Clamp(..)
                | Scalar::AsIndex(..)
        )
    }
}

/// All scalars of a launch, each after its operands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scalars {
    pub all: Vec<Scalar>,
    known: HashMap<Scalar, Var>,
    /// Lower and upper bound of each index.
    bounds: Vec<(i64, i64)>,
}

impl Scalars {
    pub fn get(&self, var: Var) -> &Scalar {
        &self.all[var.0 as usize]
    }

    /// The given scalars and all that they depend on, operands first.
    pub(crate) fn with_operands(&self, vars: impl IntoIterator<Item = Var>) -> Vec<Var> {
        let mut needed = vec![false; self.all.len()];
        vars.into_iter().for_each(|v| needed[v.0 as usize] = true);
        for at in (0..self.all.len()).rev() {
            if needed[at] {
                self.all[at].operands().iter().for_each(|o| needed[o.0 as usize] = true);
            }
        }
        (0..self.all.len() as u32).filter(|&at| needed[at as usize]).map(Var).collect()
    }

    fn bounds(&self, var: Var) -> (i64, i64) {
        self.bounds[var.0 as usize]
    }

    /// Adds a scalar, or finds an equal one. Only indices have `bounds`.
    fn push(&mut self, scalar: Scalar, bounds: (i64, i64)) -> Var {
        if let Some(&known) = self.known.get(&scalar) {
            return known;
        }
        let var = Var(self.all.len() as u32);
        self.all.push(scalar.clone());
        self.bounds.push(bounds);
        self.known.insert(scalar, var);
        var
    }

    /// Adds a scalar that is no index.
    pub fn element(&mut self, scalar: Scalar) -> Var {
        debug_assert!(!scalar.is_index(), "{scalar:?} has bounds");
        self.push(scalar, (i64::MIN, i64::MAX))
    }

    /// Adds a counter from zero below `count`: a row, a step, a coordinate.
    pub fn counter(&mut self, scalar: Scalar, count: u64) -> Var {
        match count {
            0 | 1 => self.index(0),
            count => self.push(scalar, (0, count as i64 - 1)),
        }
    }

    pub fn index(&mut self, value: i64) -> Var {
        self.push(Scalar::Index(value), (value, value))
    }

    fn as_index(&self, var: Var) -> Option<i64> {
        match self.get(var) {
            Scalar::Index(value) => Some(*value),
            _ => None,
        }
    }

    /// An element converted to an index, without known bounds.
    pub(crate) fn index_of(&mut self, value: Var, dtype: DType) -> Var {
        // A quarter of the range, so that sums do not overflow.
        self.push(Scalar::AsIndex(value, dtype), (i64::MIN / 4, i64::MAX / 4))
    }

    pub fn clamp(&mut self, a: Var, most: i64) -> Var {
        let (low, high) = self.bounds(a);
        if low >= 0 && high <= most {
            return a;
        }
        self.push(Scalar::Clamp(a, most), (low.clamp(0, most), high.clamp(0, most)))
    }

    /// The condition `0 <= a < n`, or `None` if it always holds.
    pub fn within(&mut self, a: Var, n: i64) -> Option<Var> {
        let (low, high) = self.bounds(a);
        (low < 0 || high >= n).then(|| self.element(Scalar::Within(a, n)))
    }

    /// The index at `position` of a dimension whose `size` elements are `dilation` apart, and the condition under which
    /// an element is there.
    pub(crate) fn spread_out(&mut self, position: Var, dilation: u64, size: u64) -> (Var, Option<Var>) {
        let dilation = dilation.max(1) as i64;
        let extent = (size as i64 - 1) * dilation + 1;
        let guard = self.within(position, extent);
        if dilation == 1 {
            return (position, guard);
        }
        let between = self.remainder(position, dilation);
        // The position is that of an element if the remainder is 0, the only one below 1.
        let exactly = self.within(between, 1);
        let guard = self.and(guard, exactly);
        (self.quotient(position, dilation), guard)
    }

    /// The index that a window reads in a dimension of `size` elements, at its position `inner` for result `outer`.
    /// Also the condition under which an element is there.
    pub fn window(&mut self, window: &WindowDim, outer: Var, inner: Var, size: u64) -> (Var, Option<Var>) {
        let inner = match window.reversed {
            true => {
                let back = self.times(inner, -1);
                let last = self.index(window.size as i64 - 1);
                self.add(last, back)
            }
            false => inner,
        };
        let moved = self.times(outer, window.stride as i64);
        let step = self.times(inner, window.window_dilation as i64);
        let low = self.index(-window.pad_low);
        let position = self.add(moved, step);
        let position = self.add(position, low);
        self.spread_out(position, window.base_dilation, size)
    }

    pub fn and(&mut self, a: Option<Var>, b: Option<Var>) -> Option<Var> {
        match (a, b) {
            (Some(a), Some(b)) if a != b => Some(self.element(Scalar::And(a.min(b), a.max(b)))),
            (a, b) => a.or(b),
        }
    }

    pub fn times(&mut self, a: Var, factor: i64) -> Var {
        match (self.get(a).clone(), factor) {
            (_, 0) => self.index(0),
            (_, 1) => a,
            (Scalar::Index(value), _) => self.index(value * factor),
            (Scalar::Times(inner, by), _) => self.times(inner, by * factor),
            (Scalar::Add(x, y), _) => {
                let (x, y) = (self.times(x, factor), self.times(y, factor));
                self.add(x, y)
            }
            _ => {
                let (low, high) = self.bounds(a);
                let ends = [low.saturating_mul(factor), high.saturating_mul(factor)];
                self.push(Scalar::Times(a, factor), (ends[0].min(ends[1]), ends[0].max(ends[1])))
            }
        }
    }

    /// The terms of a sum, constants last.
    fn terms(&self, a: Var, into: &mut Vec<Var>) {
        match self.get(a) {
            Scalar::Add(x, y) => {
                self.terms(*x, into);
                self.terms(*y, into);
            }
            _ => into.push(a),
        }
    }

    pub fn add(&mut self, a: Var, b: Var) -> Var {
        let mut terms = Vec::new();
        self.terms(a, &mut terms);
        self.terms(b, &mut terms);
        self.sum(terms)
    }

    fn sum(&mut self, terms: Vec<Var>) -> Var {
        let constant: i64 = terms.iter().filter_map(|&t| self.as_index(t)).sum();
        let mut terms: Vec<Var> = terms.into_iter().filter(|&t| self.as_index(t).is_none()).collect();
        // x / c * (c * k) + x % c * k is x * k.
        'joined: loop {
            for i in 0..terms.len() {
                let (rest, k) = self.factored(terms[i]);
                let Scalar::Remainder(x, c) = *self.get(rest) else { continue };
                let whole = self.quotient(x, c);
                let whole = self.times(whole, c.saturating_mul(k));
                if let Some(j) = terms.iter().position(|&t| t == whole) {
                    let joined = self.times(x, k);
                    terms.swap_remove(i.max(j));
                    terms.swap_remove(i.min(j));
                    self.terms(joined, &mut terms);
                    continue 'joined;
                }
            }
            break;
        }
        terms.sort_unstable();
        let mut sum: Option<Var> = None;
        for term in terms {
            sum = Some(match sum {
                None => term,
                Some(sum) => self.pushed_sum(sum, term),
            });
        }
        match (sum, constant) {
            (None, constant) => self.index(constant),
            (Some(sum), 0) => sum,
            (Some(sum), constant) => {
                let constant = self.index(constant);
                self.pushed_sum(sum, constant)
            }
        }
    }

    fn pushed_sum(&mut self, a: Var, b: Var) -> Var {
        let ((al, ah), (bl, bh)) = (self.bounds(a), self.bounds(b));
        self.push(Scalar::Add(a, b), (al.saturating_add(bl), ah.saturating_add(bh)))
    }

    /// Splits a term into a scalar and its factor.
    fn factored(&self, term: Var) -> (Var, i64) {
        match self.get(term) {
            Scalar::Times(inner, by) => (*inner, *by),
            _ => (term, 1),
        }
    }

    /// The terms of a sum that `divisor` divides, divided, and the others.
    fn split(&mut self, a: Var, divisor: i64) -> (Vec<Var>, Vec<Var>) {
        let mut terms = Vec::new();
        self.terms(a, &mut terms);
        let (mut divided, mut rest) = (Vec::new(), Vec::new());
        for term in terms {
            let (inner, by) = match self.as_index(term) {
                // The divisible part of a constant.
                Some(value) => {
                    divided.push(self.index(value.div_euclid(divisor)));
                    rest.push(self.index(value.rem_euclid(divisor)));
                    continue;
                }
                None => self.factored(term),
            };
            match by % divisor {
                0 => divided.push(self.times(inner, by / divisor)),
                _ => rest.push(term),
            }
        }
        (divided, rest)
    }

    /// Writes a sum as `k` times one index plus another in `0..k`, for some `k` that divides `divisor`.
    fn in_blocks(&mut self, a: Var, divisor: i64) -> Option<(Var, i64, Var)> {
        let mut terms = Vec::new();
        self.terms(a, &mut terms);
        let factors = terms.iter().map(|&t| self.factored(t).1).filter(|&k| k > 1 && k < divisor && divisor % k == 0);
        let mut factors: Vec<i64> = factors.collect();
        factors.sort_unstable();
        for k in factors.into_iter().rev() {
            let (blocks, rest) = self.split(a, k);
            let rest = self.sum(rest);
            let (low, high) = self.bounds(rest);
            if low >= 0 && high < k {
                return Some((self.sum(blocks), k, rest));
            }
        }
        None
    }

    /// `a / divisor`, rounded down, of an index that is not negative.
    pub fn quotient(&mut self, a: Var, divisor: i64) -> Var {
        let (low, high) = self.bounds(a);
        if divisor == 1 {
            return a;
        }
        if low >= 0 && high < divisor {
            return self.index(0);
        }
        let (divided, rest) = self.split(a, divisor);
        if !divided.is_empty() {
            let rest = self.sum(rest);
            if self.bounds(rest).0 >= 0 {
                let rest = if rest == a { None } else { Some(self.quotient(rest, divisor)) };
                if let Some(rest) = rest {
                    return self.sum(divided.into_iter().chain([rest]).collect());
                }
            }
        }
        if let Scalar::Quotient(inner, by) = *self.get(a) {
            return self.quotient(inner, by.saturating_mul(divisor));
        }
        if let Some((blocks, k, _)) = self.in_blocks(a, divisor)
            && self.bounds(blocks).0 >= 0
        {
            return self.quotient(blocks, divisor / k);
        }
        self.push(Scalar::Quotient(a, divisor), (low.div_euclid(divisor), high.div_euclid(divisor)))
    }

    /// `a % divisor` of an index that is not negative.
    pub fn remainder(&mut self, a: Var, divisor: i64) -> Var {
        let (low, high) = self.bounds(a);
        if divisor == 1 {
            return self.index(0);
        }
        if low >= 0 && high < divisor {
            return a;
        }
        let (divided, rest) = self.split(a, divisor);
        if !divided.is_empty() {
            let rest = self.sum(rest);
            if self.bounds(rest).0 >= 0 && rest != a {
                return self.remainder(rest, divisor);
            }
        }
        if let Scalar::Remainder(inner, by) = *self.get(a)
            && by % divisor == 0
        {
            return self.remainder(inner, divisor);
        }
        if let Some((blocks, k, rest)) = self.in_blocks(a, divisor)
            && self.bounds(blocks).0 >= 0
        {
            let within = self.remainder(blocks, divisor / k);
            let within = self.times(within, k);
            return self.add(within, rest);
        }
        self.push(Scalar::Remainder(a, divisor), (0, divisor - 1))
    }

    /// The row-major position of an element in a tensor of this shape.
    pub fn position(&mut self, index: &[Var], shape: &[u64]) -> Var {
        let mut terms = Vec::new();
        let mut stride = 1i64;
        for (&i, &size) in index.iter().zip(shape).rev() {
            terms.push(self.times(i, stride));
            stride = stride.saturating_mul(size.max(1) as i64);
        }
        let zero = self.index(0);
        let mut sum = zero;
        for term in terms.into_iter().rev() {
            sum = self.add(sum, term);
        }
        sum
    }

    /// The index of the element at a row-major position of a tensor of this shape.
    pub(crate) fn unravel(&mut self, position: Var, shape: &[u64]) -> Vec<Var> {
        let mut index = vec![position; shape.len()];
        let mut stride = 1i64;
        for (d, &size) in shape.iter().enumerate().rev() {
            let size = size.max(1) as i64;
            let at = self.quotient(position, stride);
            // The position is in bounds, so the first dimension needs no remainder.
            index[d] = if shape[..d].iter().all(|&s| s == 1) { at } else { self.remainder(at, size) };
            if size == 1 {
                index[d] = self.index(0);
            }
            stride = stride.saturating_mul(size);
        }
        index
    }
}

//! Lowers reductions of whole dimensions.
//!
//! The graph's own reducers are recognised, as is the search for the greatest element and its place. Any other
//! function is applied to halves of the tensor repeatedly: a reduction of `n` elements is a tree of ordinary
//! ops of depth `log n`.

use super::control::regions;
use super::convert::{Converter, Scope};
use super::lower::{Lowered, attribute, count, dims};
use super::report::{ProblemKind, Reject};
use super::syntax::{Attribute, Operation, Region};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Binary, Compare, Concatenate, Direction, Op, Reduce, Reducer, Select};
use altiplano_ir::types::TensorType;

impl<'t, 'a> Converter<'t, 'a> {
    pub fn reduce(&mut self, operation: &'t Operation<'a>, operands: &[ValueId], scope: &Scope<'_, 't>) -> Lowered {
        let n = self.check_inits(operands)?;
        let dims = dims(operation, "dimensions")?;
        let dtype = self.graph.ty(operands[0]).dtype;
        if n == 1
            && let Some(reducer) = reducer(operation, dtype)
        {
            let (x, init) = (operands[0], operands[1]);
            let reduced = match dims.is_empty() {
                true => x,
                false => self.push(Op::Reduce(Reduce { reducer, dims }), &[x])?,
            };
            return Ok(vec![self.with_init(reducer, reduced, init)?]);
        }
        // Printers name the op in place of a region that consists of one op.
        if let (1, [], Some(op)) = (n, operation.regions.as_slice(), applied(operation)) {
            let (mut x, init) = (operands[0], operands[1]);
            let shape = self.graph.shape(x).to_vec();
            if dims.iter().any(|&d| d >= shape.len()) {
                return Err(attribute("dimensions"));
            }
            let kept: Vec<u64> = (0..shape.len()).filter(|d| !dims.contains(d)).map(|d| shape[d]).collect();
            if dims.iter().any(|&d| shape[d] == 0) {
                return Ok(vec![self.broadcast(init, kept, Vec::new())?]);
            }
            for &dim in &dims {
                x = self.fold(op, x, dim)?;
            }
            let x = self.reshaped(x, kept)?;
            let init = self.broadcast_scalar(init, x)?;
            return Ok(vec![self.push(Op::Binary(op), &[init, x])?]);
        }
        let [region] = regions(operation)?;
        let (mut values, inits) = (operands[..n].to_vec(), &operands[n..]);
        let shape = self.graph.shape(values[0]).to_vec();
        if dims.iter().any(|&d| d >= shape.len()) || values.iter().any(|&v| self.graph.shape(v) != shape) {
            return Err(attribute("dimensions"));
        }
        let kept: Vec<u64> = (0..shape.len()).filter(|d| !dims.contains(d)).map(|d| shape[d]).collect();
        if dims.iter().any(|&d| shape[d] == 0) {
            return inits.iter().map(|&init| self.broadcast(init, kept.clone(), Vec::new())).collect();
        }
        if let (&[x, places], &[init, first], &[dim]) = (&values[..], inits, &dims[..]) {
            let counts = self.counts_along(places, dim);
            for (reducer, direction) in [(Reducer::Max, Direction::Gt), (Reducer::Min, Direction::Lt)] {
                let starts = self.is_neutral(reducer, init) && self.splat(first) == Some(0.0);
                if counts && starts && self.keeps_better(operation, region, [x, places], direction, scope)? {
                    return self.best_and_place(reducer, x, places, dim);
                }
            }
        }
        for &dim in &dims {
            values = self.reduce_dim(operation, region, values, dim, scope)?;
        }
        for value in &mut values {
            *value = self.reshaped(*value, kept.clone())?;
        }
        self.apply_inits(operation, region, inits, values, scope)
    }

    /// True if each element is its own position in `dim`.
    fn counts_along(&self, value: ValueId, dim: usize) -> bool {
        let node = self.graph.node(value);
        match &node.op {
            Op::Iota(iota) => iota.dim == dim,
            Op::BroadcastInDim(b) => {
                let of = self.graph.node(node.operands[0]);
                matches!(&of.op, Op::Iota(iota) if b.dims[iota.dim] == dim && of.ty.shape[iota.dim] == node.ty.shape[dim])
            }
            _ => false,
        }
    }

    /// True if a function of two elements and their places keeps the greater (or lesser) element, the first of
    /// equal ones, and NaN before any number. It is tested on pairs that distinguish these cases.
    fn keeps_better(
        &mut self,
        operation: &'t Operation<'a>,
        region: &'t Region<'a>,
        [x, places]: [ValueId; 2],
        better: Direction,
        scope: &Scope<'_, 't>,
    ) -> Result<bool, Reject> {
        let (float, int) = (self.graph.ty(x).dtype, self.graph.ty(places).dtype);
        if !float.is_float() || float.bytes() < DType::BF16.bytes() || int.is_float() || int == DType::Bool {
            return Ok(false);
        }
        let numbers = [f64::NEG_INFINITY, -2.5, -1.0, 0.0, 1.5, 3.0, f64::INFINITY, f64::NAN];
        let pairs: Vec<(f64, f64)> = numbers.iter().flat_map(|&a| numbers.iter().map(move |&b| (a, b))).collect();
        let count = pairs.len() as u64;
        // The first operand comes before the second.
        let columns = [
            (float, pairs.iter().map(|p| p.0).collect::<Vec<f64>>()),
            (int, vec![3.0; pairs.len()]),
            (float, pairs.iter().map(|p| p.1).collect()),
            (int, vec![5.0; pairs.len()]),
        ];
        let mut arguments = Vec::with_capacity(columns.len());
        for (dtype, data) in columns {
            let literal = Literal::dense(TensorType::new(dtype, [count]), data);
            arguments.push(self.push(Op::Constant(literal), &[])?);
        }
        let kept = self.apply(operation, region, arguments, 2, scope)?;
        let (Some(value), Some(place)) = (self.known(kept[0]), self.known(kept[1])) else { return Ok(false) };
        let same = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan();
        let is_right = |(i, &(a, b)): (usize, &(f64, f64))| {
            let second_is_better = if better == Direction::Gt { b > a } else { b < a };
            let (best, at) = if !a.is_nan() && (second_is_better || b.is_nan()) { (b, 5.0) } else { (a, 3.0) };
            same(value.data[i], best) && place.data[i] == at
        };
        Ok(pairs.iter().enumerate().all(is_right))
    }

    /// The greatest (or least) element along `dim`, and its first position.
    fn best_and_place(&mut self, reducer: Reducer, x: ValueId, places: ValueId, dim: usize) -> Lowered {
        let shape = self.graph.shape(x).to_vec();
        let best = self.push(Op::Reduce(Reduce { reducer, dims: vec![dim] }), &[x])?;
        let others = (0..shape.len()).filter(|&d| d != dim).collect();
        let everywhere = self.broadcast(best, shape.clone(), others)?;
        let is_best = self.push(Op::Compare(Compare { direction: Direction::Eq }), &[x, everywhere])?;
        let is_nan = self.push(Op::Compare(Compare { direction: Direction::Ne }), &[x, x])?;
        let is_best = self.binary(Binary::Or, is_best, is_nan)?;
        let beyond = Literal::splat(self.graph.ty(places).clone(), shape[dim] as f64);
        let beyond = self.push(Op::Constant(beyond), &[])?;
        let standing = self.push(Op::Select(Select {}), &[is_best, places, beyond])?;
        let first = self.push(Op::Reduce(Reduce { reducer: Reducer::Min, dims: vec![dim] }), &[standing])?;
        Ok(vec![best, first])
    }

    /// Combines halves along `dim` until one element is left. The op must be commutative and associative.
    fn fold(&mut self, op: Binary, mut x: ValueId, dim: usize) -> Result<ValueId, Reject> {
        loop {
            let size = self.graph.shape(x)[dim];
            let half = size / 2;
            if half == 0 {
                return Ok(x);
            }
            let (low, high) = (self.rows(x, dim, 0, half)?, self.rows(x, dim, half, 2 * half)?);
            let both = self.push(Op::Binary(op), &[low, high])?;
            x = match size % 2 {
                0 => both,
                _ => {
                    let rest = self.rows(x, dim, size - 1, size)?;
                    self.push(Op::Concatenate(Concatenate { dim }), &[both, rest])?
                }
            };
        }
    }

    /// Combines neighbours along `dim` until one element is left, which preserves the order of the elements.
    fn reduce_dim(
        &mut self,
        operation: &'t Operation<'a>,
        region: &'t Region<'a>,
        mut values: Vec<ValueId>,
        dim: usize,
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        loop {
            let shape = self.graph.shape(values[0]).to_vec();
            let (pairs, odd) = (shape[dim] / 2, shape[dim] % 2 == 1);
            if pairs == 0 {
                return Ok(values);
            }
            let mut paired = shape.clone();
            paired[dim] = pairs;
            paired.insert(dim + 1, 2);
            let (mut left, mut right, mut rest) = (Vec::new(), Vec::new(), Vec::new());
            for &value in &values {
                let even = self.rows(value, dim, 0, 2 * pairs)?;
                let even = self.reshaped(even, paired.clone())?;
                for (half, at) in [(&mut left, 0), (&mut right, 1)] {
                    let mut halved = shape.clone();
                    halved[dim] = pairs;
                    let rows = self.rows(even, dim + 1, at, at + 1)?;
                    half.push(self.reshaped(rows, halved)?);
                }
                if odd {
                    rest.push(self.rows(value, dim, shape[dim] - 1, shape[dim])?);
                }
            }
            let n = values.len();
            left.extend(right);
            values = self.apply(operation, region, left, n, scope)?;
            for (value, rest) in values.iter_mut().zip(rest) {
                *value = self.push(Op::Concatenate(Concatenate { dim }), &[*value, rest])?;
            }
        }
    }

    /// Applies the region to the initial values and the reduced values.
    pub(crate) fn apply_inits(
        &mut self,
        operation: &'t Operation<'a>,
        region: &'t Region<'a>,
        inits: &[ValueId],
        values: Vec<ValueId>,
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let mut arguments = Vec::with_capacity(2 * values.len());
        for (&init, &value) in inits.iter().zip(&values) {
            arguments.push(self.broadcast_scalar(init, value)?);
        }
        let n = values.len();
        arguments.extend(values);
        self.apply(operation, region, arguments, n, scope)
    }

    /// Checks that the second half of the operands are scalars of the types of the first half. Returns the
    /// length of a half.
    pub(crate) fn check_inits(&self, operands: &[ValueId]) -> Result<usize, Reject> {
        let n = operands.len() / 2;
        if n == 0 || operands.len() % 2 == 1 {
            return Err(count(2, operands.len()));
        }
        for position in 0..n {
            let (ty, init) = (self.graph.ty(operands[position]), self.graph.ty(operands[n + position]));
            if init.rank() != 0 || init.dtype != ty.dtype {
                let declared = format!("a scalar of {}", ty.dtype).into();
                let (index, actual) = (n + position, init.clone());
                return Err(Reject::Invalid(ProblemKind::OperandType { index, declared, actual }));
            }
        }
        Ok(n)
    }

    pub(crate) fn with_init(&mut self, reducer: Reducer, reduced: ValueId, init: ValueId) -> Result<ValueId, Reject> {
        if self.is_neutral(reducer, init) {
            return Ok(reduced);
        }
        let init = self.broadcast_scalar(init, reduced)?;
        self.binary(reducer.combine(), reduced, init)
    }

    pub(crate) fn is_neutral(&self, reducer: Reducer, init: ValueId) -> bool {
        self.splat(init) == Some(reducer.neutral(self.graph.ty(init).dtype))
    }

    /// A slice of the elements `from..to` of one dimension.
    pub fn rows(&mut self, x: ValueId, dim: usize, from: u64, to: u64) -> Result<ValueId, Reject> {
        let mut limit = self.graph.shape(x).to_vec();
        let mut start = vec![0; limit.len()];
        (start[dim], limit[dim]) = (from, to);
        self.sliced(x, start, limit)
    }
}

/// The reducer of the graph that equals the op's function.
pub(super) fn reducer(operation: &Operation, dtype: DType) -> Option<Reducer> {
    let applied = operation.attribute("applies").and_then(Attribute::as_word);
    let applied = applied.or_else(|| operation.regions.first()?.applies())?;
    let boolean = dtype == DType::Bool;
    Some(match applied {
        "add" | "or" | "maximum" if boolean => Reducer::Or,
        "multiply" | "and" | "minimum" if boolean => Reducer::And,
        "add" => Reducer::Sum,
        "multiply" => Reducer::Product,
        "maximum" => Reducer::Max,
        "minimum" => Reducer::Min,
        _ => return None,
    })
}

/// The binary op that is named in place of a region. Printers abbreviate only commutative ops.
fn applied(operation: &Operation) -> Option<Binary> {
    let word = operation.attribute("applies").and_then(Attribute::as_word)?;
    Binary::ALL.into_iter().find(|op| op.name() == word)
}

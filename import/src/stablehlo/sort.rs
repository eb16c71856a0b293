//! Lowers sorts, and the search for the largest elements.
//!
//! A sort's order is a comparator on pairs of scalars, written in one of many ways. The importer evaluates it
//! on all pairs of a few distinguishing values; it must agree with a lexicographic order of its keys.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::control::regions;
use super::convert::{Converter, Scope};
use super::lower::{Lowered, attribute, dim, exactly, ints};
use super::report::Reject;
use super::syntax::{Attribute, Operation, Region};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Node, ValueId};
use altiplano_ir::op::{ArgSort, Gather, GatherDims, Input, Iota, Op, OutOfBounds, Reshape};
use altiplano_ir::types::TensorType;

/// The maximum number of pairs of keys on which a comparator is tested.
const MOST_PROBES: usize = 5000;

impl<'t, 'a> Converter<'t, 'a> {
    pub fn sort(&mut self, operation: &'t Operation<'a>, operands: &[ValueId], scope: &Scope<'_, 't>) -> Lowered {
        let [region] = regions(operation)?;
        let Some(&first) = operands.first() else {
            return Err(super::lower::count(1, 0));
        };
        let shape = self.graph.shape(first).to_vec();
        let dim = match operation.attribute("dimension") {
            Some(_) => ints(operation, "dimension")?.first().copied().unwrap_or(-1),
            None => -1,
        };
        let dim = if dim < 0 { dim + shape.len() as i64 } else { dim };
        let dim = usize::try_from(dim).ok().filter(|dim| *dim < shape.len()).ok_or_else(|| attribute("dimension"))?;
        if operands.iter().any(|&o| self.graph.shape(o) != shape) {
            return Err(attribute("operands"));
        }
        let order = self.sort_order(operation, region, operands, scope)?;
        let order = order.ok_or(Reject::Unsupported("whose comparator is no lexicographic order"))?;
        let keys: Vec<ValueId> = order.iter().map(|&(key, _)| operands[key]).collect();
        let descending = order.iter().map(|&(_, descending)| descending).collect();
        let permutation = self.push(Op::ArgSort(ArgSort { dim, descending }), &keys)?;
        operands.iter().map(|&operand| self.taken(operand, permutation, dim)).collect()
    }

    /// Gathers the elements of `x` at these positions along `dim`.
    fn taken(&mut self, x: ValueId, positions: ValueId, dim: usize) -> Result<ValueId, Reject> {
        let shape = self.graph.shape(positions).to_vec();
        if let Op::Iota(iota) = &self.graph.node(x).op
            && iota.dim == dim
        {
            // A gather from positions returns the indices themselves.
            let dtype = iota.ty.dtype;
            return self.converted(positions, dtype);
        }
        let rank = shape.len();
        let mut vector = shape;
        vector.push(1);
        let indices = self.push(Op::Reshape(Reshape { shape: vector }), &[positions])?;
        let batch: Vec<usize> = (0..rank).filter(|&d| d != dim).collect();
        let dims = GatherDims {
            offset_dims: Vec::new(),
            collapsed_slice_dims: vec![dim],
            operand_batching_dims: batch.clone(),
            indices_batching_dims: batch,
            start_index_map: vec![dim],
            index_vector_dim: rank,
            slice_sizes: vec![1; rank],
        };
        Ok(self.push(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[x, indices])?)
    }

    /// The keys, most significant first, each with true if it is descending.
    fn sort_order(
        &mut self,
        operation: &'t Operation<'a>,
        region: &'t Region<'a>,
        operands: &[ValueId],
        scope: &Scope<'_, 't>,
    ) -> Result<Option<Vec<(usize, bool)>>, Reject> {
        // The region takes both elements of each operand next to each other.
        let mut arguments = Vec::with_capacity(2 * operands.len());
        for &operand in operands {
            let ty = TensorType::new(self.graph.ty(operand).dtype, [1]);
            for _ in 0..2 {
                arguments.push(self.probe(&ty));
            }
        }
        let [less] = self.apply(operation, region, arguments.clone(), 1, scope)?[..] else {
            return Ok(None);
        };
        let reached = self.reached(less);
        let keys: Vec<usize> = (0..operands.len())
            .filter(|k| reached.contains_key(&arguments[2 * k]) || reached.contains_key(&arguments[2 * k + 1]))
            .collect();
        let mut values: Vec<Vec<f64>> = keys.iter().map(|&k| probes(self.graph.ty(operands[k]).dtype)).collect();
        let pairs = |values: &[Vec<f64>]| values.iter().fold(1usize, |n, v| n.saturating_mul(v.len() * v.len()));
        while pairs(&values) > MOST_PROBES {
            let Some(longest) = values.iter_mut().max_by_key(|v| v.len()).filter(|v| v.len() > 2) else {
                return Ok(None);
            };
            longest.pop();
        }
        if keys.is_empty() {
            return Ok(None);
        }
        // All pairs of all keys, as one column of elements per argument.
        let total = pairs(&values);
        let mut columns: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); keys.len()];
        for pair in 0..total {
            let mut rest = pair;
            for (column, values) in columns.iter_mut().zip(&values) {
                let n = values.len();
                column.0.push(values[rest % n]);
                column.1.push(values[rest / n % n]);
                rest /= n * n;
            }
        }
        let mut given = BTreeMap::new();
        for (&key, (left, right)) in keys.iter().zip(&columns) {
            given.insert(arguments[2 * key], left.clone());
            given.insert(arguments[2 * key + 1], right.clone());
        }
        let Some(less) = self.elements_of(less, &given, &[1], total) else {
            return Ok(None);
        };
        let fits = |order: &[(usize, bool)], ignored: fn(f64, f64) -> bool| {
            (0..total).all(|pair| {
                let keys: Vec<(f64, f64)> = columns.iter().map(|(left, right)| (left[pair], right[pair])).collect();
                keys.iter().any(|&(left, right)| ignored(left, right)) || (less[pair] != 0.0) == is_less(&keys, order)
            })
        };
        // Comparators that ignore NaN, or that order zeros by sign, still order all other numbers as the graph
        // does.
        let ignored: [fn(f64, f64) -> bool; 3] = [
            |_, _| false,
            |a, b| a == 0.0 && b == 0.0 && a.is_sign_negative() != b.is_sign_negative(),
            |a, b| a.is_nan() || b.is_nan() || a == 0.0 && b == 0.0 && a.is_sign_negative() != b.is_sign_negative(),
        ];
        for ignored in ignored {
            for candidate in orders(keys.len()) {
                if fits(&candidate, ignored) {
                    return Ok(Some(candidate.into_iter().map(|(p, descending)| (keys[p], descending)).collect()));
                }
            }
        }
        Ok(None)
    }

    /// An input that stands for a value under test.
    pub fn probe(&mut self, ty: &TensorType) -> ValueId {
        let op = Op::Input(Input { name: String::new(), ty: ty.clone() });
        self.append(Node { op, operands: Vec::new(), ty: ty.clone(), batch_dims: 0, name: String::new() })
    }

    /// The `k` largest elements of the last dimension and their positions; equal elements stay in order.
    pub fn top_k(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [x] = exactly(operands)?;
        let nested = |name: &str| match operation.attribute("mhlo.attributes") {
            Some(Attribute::Dictionary(fields)) => fields.iter().find(|(key, _)| key == name).map(|(_, value)| value),
            _ => None,
        };
        let k = match nested("k") {
            Some(k) => k.as_int().and_then(|k| usize::try_from(k).ok()).ok_or_else(|| attribute("k"))?,
            None => dim(operation, "k")?,
        };
        let largest = nested("largest").and_then(Attribute::as_bool).unwrap_or(true);
        let rank = self.graph.ty(x).rank();
        let last = rank.checked_sub(1).ok_or_else(|| attribute("k"))?;
        if k as u64 > self.graph.shape(x)[last] {
            return Err(attribute("k"));
        }
        let order = self.push(Op::ArgSort(ArgSort { dim: last, descending: vec![largest] }), &[x])?;
        let first = self.rows(order, last, 0, k as u64)?;
        Ok(vec![self.taken(x, first, last)?, first])
    }

    /// Indices along one dimension.
    pub fn iota(&mut self, ty: TensorType, dim: usize) -> Result<ValueId, Reject> {
        Ok(self.push(Op::Iota(Iota { ty, dim }), &[])?)
    }
}

/// Returns true if the left ones of these keys come first in an order of their positions, each with true if descending.
fn is_less(keys: &[(f64, f64)], order: &[(usize, bool)]) -> bool {
    let this = |&(position, descending): &(usize, bool)| {
        let ordering = compare(keys[position].0, keys[position].1);
        if descending { ordering.reverse() } else { ordering }
    };
    order.iter().map(this).fold(Ordering::Equal, Ordering::then) == Ordering::Less
}

/// The order of the graph's sort: NaN is greater than any number, and zeros are equal.
fn compare(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// Values that distinguish orders, the most distinctive first.
fn probes(dtype: DType) -> Vec<f64> {
    match dtype {
        DType::Bool => vec![0.0, 1.0],
        _ if dtype.is_float() => vec![1.0, -2.0, f64::NAN, 0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, 2.0],
        _ if dtype.is_unsigned_integer() => vec![0.0, 1.0, 2.0, 3.0],
        _ => vec![0.0, 1.0, -2.0, 3.0, -1.0],
    }
}

/// All orders of `n` keys in all directions, ascending ones first.
fn orders(n: usize) -> Vec<Vec<(usize, bool)>> {
    let mut orders: Vec<Vec<(usize, bool)>> = vec![Vec::new()];
    for _ in 0..n {
        let longer = |order: &Vec<(usize, bool)>| {
            let mut longer = Vec::new();
            for key in (0..n).filter(|key| order.iter().all(|(used, _)| used != key)) {
                for descending in [false, true] {
                    longer.push([order.as_slice(), &[(key, descending)]].concat());
                }
            }
            longer
        };
        orders = orders.iter().flat_map(longer).collect();
    }
    orders
}

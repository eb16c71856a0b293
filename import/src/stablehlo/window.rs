//! Lowers ops with windows that slide over a tensor: convolution, pooling and its gradient, and cumulative
//! sums.

use super::control::regions;
use super::convert::{Converter, Scope};
use super::lower::{Lowered, attribute, count, dim, dims, exactly, optional_dims, sizes};
use super::reduction::reducer;
use super::report::Reject;
use super::syntax::{Operation, Region};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{
    Concatenate, Convolution, Cumulative, Extremum, ImageDims, KernelDims, Op, Pad, ReduceWindow, Reducer,
    SelectAndScatter, Slice, WindowDim,
};

/// Maximum size of windows for regions other than the reducers, which are applied once per element of a window.
const MOST_WINDOW_ELEMENTS: u64 = 256;

impl<'t, 'a> Converter<'t, 'a> {
    pub fn convolution(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [lhs, rhs] = exactly(operands)?;
        let spatial = optional_dims(operation, "kernel_spatial_dimensions")?;
        let image = |batch, feature, spatial| -> Result<ImageDims, Reject> {
            Ok(ImageDims {
                batch: dim(operation, batch)?,
                feature: dim(operation, feature)?,
                spatial: dims(operation, spatial)?,
            })
        };
        let kernel = KernelDims {
            input: dim(operation, "kernel_input_feature_dimension")?,
            output: dim(operation, "kernel_output_feature_dimension")?,
            spatial: spatial.clone(),
        };
        let optional = |name: &'static str, default: u64| match operation.attribute(name) {
            Some(_) => sizes(operation, name),
            None => Ok(vec![default; spatial.len()]),
        };
        let (stride, base) = (optional("window_strides", 1)?, optional("lhs_dilation", 1)?);
        let (dilation, reversal) = (optional("rhs_dilation", 1)?, optional("window_reversal", 0)?);
        let padding = match operation.attribute("padding") {
            Some(padding) => padding.ints().ok_or_else(|| attribute("padding"))?,
            None => vec![0; 2 * spatial.len()],
        };
        let lists = [&stride, &base, &dilation, &reversal];
        if lists.iter().any(|list| list.len() != spatial.len()) || padding.len() != 2 * spatial.len() {
            return Err(attribute("window_strides"));
        }
        let shape = self.graph.shape(rhs).to_vec();
        let mut window = Vec::with_capacity(spatial.len());
        for (d, &at) in spatial.iter().enumerate() {
            window.push(WindowDim {
                size: *shape.get(at).ok_or_else(|| attribute("kernel_spatial_dimensions"))?,
                stride: stride[d],
                pad_low: padding[2 * d],
                pad_high: padding[2 * d + 1],
                base_dilation: base[d],
                window_dilation: dilation[d],
                reversed: reversal[d] != 0,
            });
        }
        let groups = |name: &'static str| -> Result<u64, Reject> {
            match operation.attribute(name) {
                Some(_) => Ok(dim(operation, name)? as u64),
                None => Ok(1),
            }
        };
        let convolution = Convolution {
            lhs: image("input_batch_dimension", "input_feature_dimension", "input_spatial_dimensions")?,
            rhs: kernel,
            result: image("output_batch_dimension", "output_feature_dimension", "output_spatial_dimensions")?,
            window,
            feature_groups: groups("feature_group_count")?,
            batch_groups: groups("batch_group_count")?,
        };
        self.product(operation, Op::Convolution(convolution), lhs, rhs)
    }

    pub fn reduce_window(
        &mut self,
        operation: &'t Operation<'a>,
        operands: &[ValueId],
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let n = self.check_inits(operands)?;
        let shape = self.graph.shape(operands[0]).to_vec();
        let window = window(operation, shape.len())?;
        let reducer = match n {
            1 => reducer(operation, self.graph.ty(operands[0]).dtype),
            _ => None,
        };
        let values = operands[..n].to_vec();
        let inits = &operands[n..];
        if let Some((dim, reverse)) = cumulative(&window, &shape) {
            if let Some(reducer) = reducer {
                let sums = self.push(Op::Cumulative(Cumulative { reducer, dim, reverse }), &values)?;
                return Ok(vec![self.with_init(reducer, sums, inits[0])?]);
            }
            let [region] = regions(operation)?;
            let values = self.scan(operation, region, values, dim, reverse, scope)?;
            return self.apply_inits(operation, region, inits, values, scope);
        }
        if let Some(reducer) = reducer {
            let (mut x, mut window) = (values[0], window);
            if !self.is_neutral(reducer, inits[0]) {
                // The op pads with initial values, but the graph pads with neutral elements, so the padding is
                // explicit.
                x = self.padded(x, inits[0], &window)?;
                window.iter_mut().for_each(|w| (w.pad_low, w.pad_high, w.base_dilation) = (0, 0, 1));
            }
            let reduced = match window.iter().all(WindowDim::is_one) {
                true => x,
                false => self.push(Op::ReduceWindow(ReduceWindow { reducer, window }), &[x])?,
            };
            return Ok(vec![self.with_init(reducer, reduced, inits[0])?]);
        }
        let [region] = regions(operation)?;
        self.fold_windows(operation, region, values, inits, &window, scope)
    }

    /// Applies the region to the initial values and one slice per element of the window, in order.
    fn fold_windows(
        &mut self,
        operation: &'t Operation<'a>,
        region: &'t Region<'a>,
        values: Vec<ValueId>,
        inits: &[ValueId],
        window: &[WindowDim],
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let elements = window.iter().try_fold(1u64, |product, w| product.checked_mul(w.size));
        if elements.is_none_or(|elements| elements > MOST_WINDOW_ELEMENTS) {
            return Err(Reject::Unsupported("of large windows with another function than the usual reducers"));
        }
        let shape = self.graph.shape(values[0]).to_vec();
        let results: Result<Vec<u64>, _> = window.iter().zip(&shape).map(|(w, &size)| w.result_size(size)).collect();
        let results = results?;
        let mut padded = Vec::with_capacity(values.len());
        for (&value, &init) in values.iter().zip(inits) {
            padded.push(self.padded(value, init, window)?);
        }
        let mut folded: Vec<ValueId> = Vec::with_capacity(values.len());
        for &init in inits {
            folded.push(self.broadcast(init, results.clone(), Vec::new())?);
        }
        if results.contains(&0) {
            return Ok(folded);
        }
        let sizes: Vec<u64> = window.iter().map(|w| w.size).collect();
        let mut offsets = Vec::new();
        altiplano_ir::tensor::for_each_index(&sizes, |index| offsets.push(index.to_vec()));
        for offset in offsets {
            let start: Vec<u64> = offset.iter().zip(window).map(|(at, w)| at * w.window_dilation).collect();
            let span = |d: usize| (results[d] - 1) * window[d].stride + 1;
            let limit: Vec<u64> = (0..start.len()).map(|d| start[d] + span(d)).collect();
            let stride: Vec<u64> = window.iter().map(|w| w.stride).collect();
            let mut arguments = folded;
            for &value in &padded {
                let slice = Slice { start: start.clone(), limit: limit.clone(), stride: stride.clone() };
                arguments.push(self.push(Op::Slice(slice), &[value])?);
            }
            folded = self.apply(operation, region, arguments, values.len(), scope)?;
        }
        Ok(folded)
    }

    /// All partial results along a dimension, by doubling the distance over which elements are combined (Hillis
    /// & Steele 1986).
    fn scan(
        &mut self,
        operation: &'t Operation<'a>,
        region: &'t Region<'a>,
        mut values: Vec<ValueId>,
        dim: usize,
        reverse: bool,
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let size = self.graph.shape(values[0])[dim];
        let mut distance = 1;
        while distance < size {
            let (mut left, mut right, mut edge) = (Vec::new(), Vec::new(), Vec::new());
            for &value in &values {
                left.push(self.rows(value, dim, 0, size - distance)?);
                right.push(self.rows(value, dim, distance, size)?);
                edge.push(match reverse {
                    false => self.rows(value, dim, 0, distance)?,
                    true => self.rows(value, dim, size - distance, size)?,
                });
            }
            let n = values.len();
            left.extend(right);
            let combined = self.apply(operation, region, left, n, scope)?;
            for ((value, edge), combined) in values.iter_mut().zip(edge).zip(combined) {
                let parts = if reverse { [combined, edge] } else { [edge, combined] };
                *value = self.push(Op::Concatenate(Concatenate { dim }), &parts)?;
            }
            distance *= 2;
        }
        Ok(values)
    }

    fn padded(&mut self, x: ValueId, value: ValueId, window: &[WindowDim]) -> Result<ValueId, Reject> {
        let pad = Pad {
            low: window.iter().map(|w| w.pad_low).collect(),
            high: window.iter().map(|w| w.pad_high).collect(),
            interior: window.iter().map(|w| w.base_dilation.saturating_sub(1)).collect(),
        };
        if pad.low.iter().chain(&pad.high).all(|p| *p == 0) && pad.interior.iter().all(|p| *p == 0) {
            return Ok(x);
        }
        Ok(self.push(Op::Pad(pad), &[x, value])?)
    }

    /// Adds each element of the source to the selected element of its window.
    pub fn select_and_scatter(&mut self, operation: &'t Operation<'a>, operands: &[ValueId]) -> Lowered {
        let &[x, source, init] = operands else {
            return Err(count(3, operands.len()));
        };
        let [select, scatter] = regions(operation)?;
        let direction = select.compares();
        let select = match direction {
            Some("GE" | "GT") => Extremum::Max,
            Some("LE" | "LT") => Extremum::Min,
            _ => return Err(Reject::Unsupported("with another choice than the largest or the smallest")),
        };
        if scatter.applies() != Some("add") {
            return Err(Reject::Unsupported("other than addition"));
        }
        let window = window(operation, self.graph.ty(x).rank())?;
        let sums = self.push(Op::SelectAndScatter(SelectAndScatter { select, window }), &[x, source])?;
        Ok(vec![self.with_init(Reducer::Sum, sums, init)?])
    }
}

/// The window of a reduction, with an entry for each dimension.
fn window(operation: &Operation, rank: usize) -> Result<Vec<WindowDim>, Reject> {
    let size = sizes(operation, "window_dimensions")?;
    let optional = |name: &'static str| match operation.attribute(name) {
        Some(_) => sizes(operation, name),
        None => Ok(vec![1; rank]),
    };
    let stride = optional("window_strides")?;
    let (base, dilation) = (optional("base_dilations")?, optional("window_dilations")?);
    let padding = match operation.attribute("padding") {
        Some(padding) => padding.ints().ok_or_else(|| attribute("padding"))?,
        None => vec![0; 2 * rank],
    };
    if [&size, &stride, &base, &dilation].iter().any(|list| list.len() != rank) || padding.len() != 2 * rank {
        return Err(attribute("window_dimensions"));
    }
    let dim = |d: usize| WindowDim {
        size: size[d],
        stride: stride[d],
        pad_low: padding[2 * d],
        pad_high: padding[2 * d + 1],
        base_dilation: base[d],
        window_dilation: dilation[d],
        reversed: false,
    };
    Ok((0..rank).map(dim).collect())
}

/// The dimension in which each window reaches from one end to its own position. The flag is true if it starts
/// at the last end.
fn cumulative(window: &[WindowDim], shape: &[u64]) -> Option<(usize, bool)> {
    let mut wide = (0..window.len()).filter(|&d| !window[d].is_one());
    let (Some(dim), None) = (wide.next(), wide.next()) else { return None };
    let w = window[dim];
    let size = i64::try_from(shape[dim]).ok()?;
    let plain = w.stride == 1 && w.base_dilation == 1 && w.window_dilation == 1 && w.size == shape[dim];
    match (w.pad_low, w.pad_high) {
        (low, 0) if plain && low == size - 1 => Some((dim, false)),
        (0, high) if plain && high == size - 1 => Some((dim, true)),
        _ => None,
    }
}

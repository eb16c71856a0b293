//! Ops whose windows slide over a tensor: convolution, pooling, and the gradient of pooling.

use super::convert::{Converter, Reject};
use super::lower::{Lowered, attribute, exactly, ints, optional_dim, optional_dims, reducer, result_type, sizes};
use super::syntax::Operation;
use crate::graph::ValueId;
use crate::op::{Convolution, ImageDims, KernelDims, Op, ReduceWindow, WindowDim};

/// One integer for each of `n` dimensions; the default where the text leaves the attribute out.
fn each(operation: &Operation, name: &'static str, n: usize, default: i64) -> Result<Vec<i64>, Reject> {
    let values = match operation.attribute(name) {
        None => return Ok(vec![default; n]),
        Some(_) => ints(operation, name)?,
    };
    if values.len() == n { Ok(values) } else { Err(attribute(name)) }
}

/// The window of an op, given its sizes and the names of its attributes.
pub fn window(
    operation: &Operation,
    size: &[u64],
    [strides, base, dilations]: [&'static str; 3],
) -> Result<Vec<WindowDim>, Reject> {
    let n = size.len();
    let positive = |name: &'static str| -> Result<Vec<u64>, Reject> {
        let values: Result<Vec<u64>, _> = each(operation, name, n, 1)?.into_iter().map(u64::try_from).collect();
        values.map_err(|_| attribute(name))
    };
    let (stride, base, dilation) = (positive(strides)?, positive(base)?, positive(dilations)?);
    let padding = each(operation, "padding", 2 * n, 0)?;
    let reversed = each(operation, "window_reversal", n, 0)?;
    let dim = |i: usize| WindowDim {
        size: size[i],
        stride: stride[i],
        pad_low: padding[2 * i],
        pad_high: padding[2 * i + 1],
        base_dilation: base[i],
        window_dilation: dilation[i],
        reversed: reversed[i] != 0,
    };
    Ok((0..n).map(dim).collect())
}

impl Converter<'_, '_> {
    pub fn reduce_window(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [x, init] = exactly(operands)?;
        let dtype = self.graph.ty(x).dtype;
        let reducer = reducer(operation, dtype)
            .ok_or(Reject::Unsupported("with another function than add, multiply, maximum, minimum, and, or"))?;
        let size = sizes(operation, "window_dimensions")?;
        let window = window(operation, &size, ["window_strides", "base_dilations", "window_dilations"])?;
        if self.splat(init) != Some(reducer.neutral(dtype)) {
            return Err(Reject::Unsupported("that does not start from what its function leaves unchanged"));
        }
        Ok(vec![self.push(Op::ReduceWindow(ReduceWindow { reducer, window }), &[x])?])
    }

    pub fn convolution(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [mut lhs, mut rhs] = exactly(operands)?;
        let dim = |name| optional_dim(operation, name);
        let dims = |name| optional_dims(operation, name);
        let kernel = KernelDims {
            input: dim("kernel_input_feature_dimension")?,
            output: dim("kernel_output_feature_dimension")?,
            spatial: dims("kernel_spatial_dimensions")?,
        };
        let sizes = |d: &usize| self.graph.shape(rhs).get(*d).copied().ok_or_else(|| attribute("dimension_numbers"));
        let size = kernel.spatial.iter().map(sizes).collect::<Result<Vec<u64>, Reject>>()?;
        let groups = |name: &'static str| match operation.attribute(name) {
            None => Ok(1),
            Some(_) => match ints(operation, name)?.as_slice() {
                [n] => u64::try_from(*n).map_err(|_| attribute(name)),
                _ => Err(attribute(name)),
            },
        };
        let convolution = Convolution {
            lhs: ImageDims {
                batch: dim("input_batch_dimension")?,
                feature: dim("input_feature_dimension")?,
                spatial: dims("input_spatial_dimensions")?,
            },
            rhs: kernel,
            result: ImageDims {
                batch: dim("output_batch_dimension")?,
                feature: dim("output_feature_dimension")?,
                spatial: dims("output_spatial_dimensions")?,
            },
            window: window(operation, &size, ["window_strides", "lhs_dilation", "rhs_dilation"])?,
            feature_groups: groups("feature_group_count")?,
            batch_groups: groups("batch_group_count")?,
        };
        // The graph's convolution has one element type. Converting the operands up keeps every digit of a wider sum.
        let dtype = result_type(operation)?.dtype;
        if dtype.bytes() >= self.graph.ty(lhs).dtype.bytes().max(self.graph.ty(rhs).dtype.bytes()) {
            lhs = self.converted(lhs, dtype)?;
            rhs = self.converted(rhs, dtype)?;
        }
        let product = self.push(Op::Convolution(convolution), &[lhs, rhs])?;
        Ok(vec![self.converted(product, dtype)?])
    }
}

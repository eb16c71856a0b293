//! Pooling.

use super::call::{Call, Many, One, attribute, bad_value};
use super::contraction::{padding, spatial};
use super::report::Reject;
use altiplano_ir::array::{self, Pool};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Unary};

fn pool(c: &Call, x: ValueId) -> Result<Pool, Reject> {
    let shape = c.shape(x);
    if shape.len() < 3 {
        return Err(bad_value(0));
    }
    let n = shape.len() - 2;
    c.ints_opt("kernel_shape")?.ok_or(attribute("kernel_shape"))?;
    let size = spatial(c, "kernel_shape", n, 1)?;
    let (stride, dilation) = (spatial(c, "strides", n, 1)?, spatial(c, "dilations", n, 1)?);
    let (pad_low, pad_high) = padding(c, &shape[2..], &size, &stride, &dilation)?;
    let ceil = c.flag("ceil_mode", false)?;
    Ok(Pool { size, stride, pad_low, pad_high, dilation, ceil })
}

pub(crate) fn max(c: &mut Call) -> Many {
    let x = c.x(0)?;
    if c.wants(1) {
        return Err(Reject::Unsupported("that says where its maxima are"));
    }
    let pool = pool(c, x)?;
    Ok(vec![array::max_pool(c.g(), x, &pool)?])
}

pub(crate) fn average(c: &mut Call) -> One {
    let x = c.x(0)?;
    let pool = pool(c, x)?;
    let count_padding = c.flag("count_include_pad", false)?;
    Ok(array::avg_pool(c.g(), x, &pool, count_padding)?)
}

/// `(sum |x|^p)^(1/p)` of each window.
pub(crate) fn lp(c: &mut Call) -> One {
    let x = c.x(0)?;
    let pool = pool(c, x)?;
    if pool.ceil {
        return Err(Reject::Unsupported("that rounds up"));
    }
    let count = pool.size.iter().fold(1u64, |n, &s| n.saturating_mul(s)) as f64;
    let powers = power(c, x)?;
    let mean = array::avg_pool(c.g(), powers, &pool, true)?;
    let sum = array::with_number(c.g(), Binary::Multiply, mean, count)?;
    root(c, sum)
}

fn power(c: &mut Call, x: ValueId) -> One {
    let p = c.int("p", 2)? as f64;
    let size = array::unary(c.g(), Unary::Abs, x)?;
    Ok(array::with_number(c.g(), Binary::Power, size, p)?)
}

fn root(c: &mut Call, sum: ValueId) -> One {
    let p = c.int("p", 2)? as f64;
    Ok(array::with_number(c.g(), Binary::Power, sum, 1.0 / p)?)
}

fn image_dims(c: &Call, x: ValueId) -> Vec<usize> {
    (2..c.rank(x)).collect()
}

pub(crate) fn global_average(c: &mut Call) -> One {
    let x = c.x(0)?;
    let dims = image_dims(c, x);
    Ok(array::mean(c.g(), x, &dims, true)?)
}

pub(crate) fn global_max(c: &mut Call) -> One {
    let x = c.x(0)?;
    let dims = image_dims(c, x);
    Ok(array::max(c.g(), x, &dims, true)?)
}

pub(crate) fn global_lp(c: &mut Call) -> One {
    let x = c.x(0)?;
    let dims = image_dims(c, x);
    let powers = power(c, x)?;
    let sum = array::sum(c.g(), powers, &dims, true)?;
    root(c, sum)
}

//! Normalisations.

use super::call::{Call, Many, One, attribute, bad_value};
use super::report::Reject;
use altiplano_ir::array;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Direction, Unary};

/// The mean over `dims`, which remain, and the reciprocal of the standard deviation.
fn statistics(c: &mut Call, x: ValueId, dims: &[usize], epsilon: f64) -> Result<[ValueId; 2], Reject> {
    let g = c.g();
    let mean = array::mean(g, x, dims, true)?;
    let variance = array::variance(g, x, dims, 0.0, true)?;
    let safe = array::with_number(g, Binary::Add, variance, epsilon)?;
    Ok([mean, array::unary(g, Unary::Rsqrt, safe)?])
}

pub(crate) fn layer(c: &mut Call) -> Many {
    let x = c.x(0)?;
    let (dim, epsilon) = (c.axis("axis", -1, x)?, c.float("epsilon", 1e-5)?);
    let (weight, bias) = (c.opt(1), c.opt(2));
    let rank = c.rank(x);
    let mut results = vec![array::layer_norm(c.g(), x, rank - dim, weight, bias, epsilon)?];
    if c.wants(1) || c.wants(2) {
        results.extend(statistics(c, x, &(dim..rank).collect::<Vec<_>>(), epsilon)?);
    }
    Ok(results)
}

pub(crate) fn rms(c: &mut Call) -> One {
    let x = c.x(0)?;
    let (dim, epsilon) = (c.axis("axis", -1, x)?, c.float("epsilon", 1e-5)?);
    let (weight, dims) = (c.opt(1), c.rank(x) - dim);
    Ok(array::rms_norm(c.g(), x, dims, weight, epsilon)?)
}

/// The sum of the operands at these indices that are present, in order.
fn sum_of(c: &mut Call, indices: &[usize]) -> One {
    let mut total = c.x(indices[0])?;
    for &index in &indices[1..] {
        if let Some(x) = c.opt(index) {
            total = array::binary(c.g(), Binary::Add, total, x)?;
        }
    }
    Ok(total)
}

/// Operands x, skip, gamma, beta, bias.
pub(crate) fn skip_layer(c: &mut Call) -> Many {
    let epsilon = c.float("epsilon", 1e-12)?;
    let total = sum_of(c, &[0, 1, 4])?;
    let (weight, bias) = (c.opt(2), c.opt(3));
    let y = array::layer_norm(c.g(), total, 1, weight, bias, epsilon)?;
    skipped(c, y, total, epsilon)
}

/// Operands x, skip, gamma, bias.
pub(crate) fn skip_rms(c: &mut Call) -> Many {
    let epsilon = c.float("epsilon", 1e-12)?;
    let total = sum_of(c, &[0, 1, 3])?;
    let weight = c.opt(2);
    let y = array::rms_norm(c.g(), total, 1, weight, epsilon)?;
    skipped(c, y, total, epsilon)
}

fn skipped(c: &mut Call, y: ValueId, total: ValueId, epsilon: f64) -> Many {
    let mut results = vec![y];
    if c.wants(1) || c.wants(2) || c.wants(3) {
        let last = c.rank(total).saturating_sub(1);
        results.extend(statistics(c, total, &[last], epsilon)?);
        results.push(total);
    }
    Ok(results)
}

/// Batch norm with given statistics. In training, it uses those of the batch and updates the running ones.
pub(crate) fn batch(c: &mut Call) -> Many {
    let (x, weight, bias, mean, variance) = (c.x(0)?, c.x(1)?, c.x(2)?, c.x(3)?, c.x(4)?);
    let epsilon = c.float("epsilon", 1e-5)?;
    let training = if c.opset < 14 { c.wants(1) } else { c.flag("training_mode", false)? };
    let rank = c.rank(x);
    if rank < 2 {
        return Err(bad_value(0));
    }
    if !training {
        return Ok(vec![array::batch_norm(c.g(), x, 1, Some(weight), Some(bias), mean, variance, epsilon)?]);
    }
    let momentum = c.float("momentum", 0.9)?;
    let dims: Vec<usize> = (0..rank).filter(|&d| d != 1).collect();
    let g = c.g();
    let mut results = vec![array::batch_norm_training(g, x, 1, Some(weight), Some(bias), epsilon)?];
    let now = [array::mean(g, x, &dims, false)?, array::variance(g, x, &dims, 0.0, false)?];
    for (running, now) in [mean, variance].into_iter().zip(now) {
        let now = array::convert(g, now, g.ty(running).dtype)?;
        let kept = array::with_number(g, Binary::Multiply, running, momentum)?;
        let moved = array::with_number(g, Binary::Multiply, now, 1.0 - momentum)?;
        results.push(array::binary(g, Binary::Add, kept, moved)?);
    }
    Ok(results)
}

pub(crate) fn instance(c: &mut Call) -> One {
    let (x, weight, bias) = (c.x(0)?, c.x(1)?, c.x(2)?);
    let epsilon = c.float("epsilon", 1e-5)?;
    Ok(array::instance_norm(c.g(), x, Some(weight), Some(bias), epsilon)?)
}

/// Group norm. Before opset 21, there is one weight for each group.
pub(crate) fn group(c: &mut Call) -> One {
    let (x, weight, bias) = (c.x(0)?, c.x(1)?, c.x(2)?);
    let epsilon = c.float("epsilon", 1e-5)?;
    let groups = u64::try_from(c.int("num_groups", 0)?).ok().filter(|&g| g > 0).ok_or(attribute("num_groups"))?;
    let features = *c.shape(x).get(1).ok_or(bad_value(0))?;
    let mut each = [weight, bias];
    for value in &mut each {
        if c.shape(*value) == [groups] && groups != features && features.is_multiple_of(groups) {
            let column = array::unsqueeze(c.g(), *value, 1)?;
            let wide = array::broadcast_to(c.g(), column, &[groups, features / groups])?;
            *value = array::reshape(c.g(), wide, &[features])?;
        }
    }
    Ok(array::group_norm(c.g(), x, groups, Some(each[0]), Some(each[1]), epsilon)?)
}

/// Divides by the norm along an axis.
pub(crate) fn lp(c: &mut Call) -> One {
    let x = c.x(0)?;
    let dim = c.axis("axis", -1, x)?;
    let p = c.int("p", 2)?;
    let g = c.g();
    let norm = match p {
        1 => super::reduction::l1(g, x, &[dim], true)?,
        2 => super::reduction::l2(g, x, &[dim], true)?,
        _ => return Err(attribute("p")),
    };
    // Zeros stay zeros.
    let zero = array::full_like(g, norm, 0.0)?;
    let one = array::full_like(g, norm, 1.0)?;
    let nothing = array::compare(g, Direction::Eq, norm, zero)?;
    let safe = array::select(g, nothing, one, norm)?;
    Ok(array::binary(g, Binary::Divide, x, safe)?)
}

/// Local response normalisation (Krizhevsky et al. 2012): divides by a power of the squares of neighbouring features.
pub(crate) fn local_response(c: &mut Call) -> One {
    let x = c.x(0)?;
    let (alpha, beta, bias) = (c.float("alpha", 1e-4)?, c.float("beta", 0.75)?, c.float("bias", 1.0)?);
    let size = c.int_opt("size")?.filter(|s| (1..1 << 20).contains(s)).ok_or(attribute("size"))?;
    let rank = c.rank(x);
    if rank < 2 {
        return Err(bad_value(0));
    }
    let window = array::Pool {
        size: vec![size as u64],
        stride: vec![1],
        pad_low: vec![(size - 1) / 2],
        pad_high: vec![size / 2],
        dilation: vec![1],
        ceil: false,
    };
    let g = c.g();
    let square = array::binary(g, Binary::Multiply, x, x)?;
    let last = array::move_dim(g, square, 1, rank - 1)?;
    // A mean that counts missing elements as zeros is the sum divided by the size.
    let mean = array::avg_pool(g, last, &window, true)?;
    let mean = array::move_dim(g, mean, rank - 1, 1)?;
    let scaled = array::with_number(g, Binary::Multiply, mean, alpha)?;
    let safe = array::with_number(g, Binary::Add, scaled, bias)?;
    let power = array::with_number(g, Binary::Power, safe, beta)?;
    Ok(array::binary(g, Binary::Divide, x, power)?)
}

pub(crate) fn mean_variance(c: &mut Call) -> One {
    let x = c.x(0)?;
    let axes = c.ints_opt("axes")?.unwrap_or(&[0, 2, 3]);
    let dims = array::axes(axes, c.rank(x))?;
    let g = c.g();
    let mean = array::mean(g, x, &dims, true)?;
    let distance = array::binary(g, Binary::Subtract, x, mean)?;
    let variance = array::variance(g, x, &dims, 0.0, true)?;
    let deviation = array::unary(g, Unary::Sqrt, variance)?;
    let safe = array::with_number(g, Binary::Add, deviation, 1e-9)?;
    Ok(array::binary(g, Binary::Divide, distance, safe)?)
}

//! Resizing of images. Every dimension is resized separately, which interpolation along axes allows. A nearest element
//! is looked up, repeated or strided, and a weighted mean is a product with a matrix of weights.

use super::call::{Call, One, attribute, bad_value};
use super::report::Reject;
use altiplano_ir::array;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::types::TensorType;

/// The largest number of elements of a matrix of weights. Real resizes are smaller.
const MOST_SHARES: u64 = 1 << 24;

/// The change of one dimension.
struct Change {
    from: u64,
    to: u64,
    scale: f64,
}

pub(crate) fn upsample(c: &mut Call) -> One {
    let x = c.x(0)?;
    let scales = match c.floats_opt("scales")? {
        Some(scales) => scales,
        None => c.numbers_of(1)?.ok_or(attribute("scales"))?,
    };
    let dims: Vec<usize> = (0..c.rank(x)).collect();
    let changes = by_scales(c, x, &dims, &scales)?;
    let mode = c.text("mode", "nearest")?;
    apply(
        c,
        x,
        &dims,
        &changes,
        &How { mode, transform: "asymmetric", rounding: "floor", cubic: -0.75, exclude: false },
    )
}

pub(crate) fn resize(c: &mut Call) -> One {
    let x = c.x(0)?;
    let rank = c.rank(x);
    let dims: Vec<usize> = match c.ints_opt("axes")? {
        None => (0..rank).collect(),
        Some(axes) => axes.iter().map(|&a| array::axis(a, rank)).collect::<Result<_, _>>()?,
    };
    // Opset 10 had the scales in the place of today's region of interest.
    let (scales, sizes) = if c.opset < 11 {
        (c.numbers_of(1)?, None)
    } else {
        let some = |list: Option<Vec<f64>>| list.filter(|list| !list.is_empty());
        (some(c.numbers_of(2)?), some(c.numbers_of(3)?))
    };
    if c.flag("antialias", false)? {
        return Err(Reject::Unsupported("with antialiasing"));
    }
    let changes = match (scales, sizes) {
        (Some(scales), None) => by_scales(c, x, &dims, &scales)?,
        (None, Some(sizes)) => by_sizes(c, x, &dims, &sizes)?,
        _ => return Err(bad_value(2)),
    };
    let old = c.opset < 11;
    let how = How {
        mode: c.text("mode", "nearest")?,
        transform: c.text("coordinate_transformation_mode", if old { "asymmetric" } else { "half_pixel" })?,
        rounding: c.text("nearest_mode", if old { "floor" } else { "round_prefer_floor" })?,
        cubic: c.float("cubic_coeff_a", -0.75)?,
        exclude: c.flag("exclude_outside", false)?,
    };
    apply(c, x, &dims, &changes, &how)
}

fn by_scales(c: &Call, x: ValueId, dims: &[usize], scales: &[f64]) -> Result<Vec<Change>, Reject> {
    if scales.len() != dims.len() || scales.iter().any(|s| !(s.is_finite() && *s > 0.0)) {
        return Err(bad_value(2));
    }
    let shape = c.shape(x);
    let change =
        |(&d, &scale): (&usize, &f64)| Change { from: shape[d], to: (shape[d] as f64 * scale).floor() as u64, scale };
    Ok(dims.iter().zip(scales).map(change).collect())
}

fn by_sizes(c: &Call, x: ValueId, dims: &[usize], sizes: &[f64]) -> Result<Vec<Change>, Reject> {
    if sizes.len() != dims.len() || sizes.iter().any(|s| !(0.0..281e12).contains(s)) {
        return Err(bad_value(3));
    }
    let shape = c.shape(x);
    let ratios = || dims.iter().zip(sizes).map(|(&d, &s)| s / shape[d] as f64);
    let one = match c.text("keep_aspect_ratio_policy", "stretch")? {
        "stretch" => None,
        "not_larger" => Some(ratios().fold(f64::INFINITY, f64::min)),
        "not_smaller" => Some(ratios().fold(0.0, f64::max)),
        _ => return Err(attribute("keep_aspect_ratio_policy")),
    };
    let change = |(&d, &size): (&usize, &f64)| {
        let from = shape[d];
        let to = one.map_or(size, |scale| (scale * from as f64 + 0.5).floor());
        Change { from, to: to as u64, scale: one.unwrap_or(size / from as f64) }
    };
    Ok(dims.iter().zip(sizes).map(change).collect())
}

struct How<'a> {
    mode: &'a str,
    /// The mapping from a position of the result to one of the operand.
    transform: &'a str,
    rounding: &'a str,
    cubic: f64,
    /// True if elements beyond the edge have no weight, false if they have the edge's value.
    exclude: bool,
}

fn apply(c: &mut Call, x: ValueId, dims: &[usize], changes: &[Change], how: &How) -> One {
    let mut result = x;
    for (&dim, change) in dims.iter().zip(changes) {
        if change.from == change.to && change.scale == 1.0 {
            continue;
        }
        if change.from == 0 || change.to == 0 || change.to > 1 << 32 {
            return Err(bad_value(2));
        }
        result = if how.mode == "nearest" {
            nearest(c, result, dim, change, how)?
        } else {
            weighted(c, result, dim, change, how)?
        };
    }
    Ok(result)
}

/// The position of element `at` of the result in the operand. It is computed in f32 like in other runtimes, because
/// rounding often decides which of two elements is nearest.
fn position(at: u64, change: &Change, how: &How) -> Result<f64, Reject> {
    let (at, from, to, scale) = (at as f32, change.from as f32, change.to as f32, change.scale as f32);
    Ok(f64::from(match how.transform {
        "half_pixel" => (at + 0.5) / scale - 0.5,
        "half_pixel_symmetric" => {
            // The rounding of the size is split evenly between both sides.
            let adjustment = to / (scale * from);
            let centre = from / 2.0;
            centre * (1.0 - adjustment) + (at + 0.5) / scale - 0.5
        }
        "pytorch_half_pixel" if to > 1.0 => (at + 0.5) / scale - 0.5,
        "pytorch_half_pixel" => 0.0,
        "tf_half_pixel_for_nn" => (at + 0.5) / scale,
        "align_corners" if to > 1.0 => at * (from - 1.0) / (to - 1.0),
        "align_corners" => 0.0,
        "asymmetric" => at / scale,
        "tf_crop_and_resize" => return Err(Reject::Unsupported("of a region of interest")),
        _ => return Err(attribute("coordinate_transformation_mode")),
    }))
}

fn nearest(c: &mut Call, x: ValueId, dim: usize, change: &Change, how: &How) -> One {
    let (from, to) = (change.from, change.to);
    if to > MOST_SHARES {
        return Err(bad_value(2));
    }
    c.builder.table(c.node, to)?;
    let mut places = Vec::with_capacity(to as usize);
    for at in 0..to {
        let p = position(at, change, how)?;
        let place = match how.rounding {
            "round_prefer_floor" => (p - 0.5).ceil(),
            "round_prefer_ceil" => (p + 0.5).floor(),
            "floor" => p.floor(),
            "ceil" => p.ceil(),
            _ => return Err(attribute("nearest_mode")),
        };
        places.push(place.clamp(0.0, from as f64 - 1.0));
    }
    let shape = c.shape(x);
    let is = |f: &dyn Fn(u64) -> u64| places.iter().enumerate().all(|(i, &p)| p == f(i as u64) as f64);
    let g = c.g();
    if to.is_multiple_of(from) && is(&|i| i / (to / from)) {
        // Repeat each element.
        let mut wide = shape.clone();
        wide.insert(dim + 1, to / from);
        let column = array::unsqueeze(g, x, dim as i64 + 1)?;
        let repeated = array::broadcast_to(g, column, &wide)?;
        wide.remove(dim + 1);
        wide[dim] = to;
        return Ok(array::reshape(g, repeated, &wide)?);
    }
    if let Some(&first) = places.first()
        && from.is_multiple_of(to)
        && is(&|i| i * (from / to) + first as u64)
    {
        let last = first as i64 + ((to - 1) * (from / to)) as i64 + 1;
        return Ok(array::slice_dim(g, x, dim, first as i64, last, from / to)?);
    }
    let places = super::movement::integers(c, places);
    Ok(array::take(c.g(), x, dim, places, false)?)
}

/// The weights of the elements around a position, as pairs of a position and a weight. Positions may lie outside.
fn shares(p: f64, how: &How) -> Result<Vec<(f64, f64)>, Reject> {
    let low = p.floor();
    let t = p - low;
    match how.mode {
        "linear" => Ok(vec![(low, 1.0 - t), (low + 1.0, t)]),
        // Keys 1981.
        "cubic" => {
            let a = how.cubic;
            let near = |d: f64| ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0;
            let far = |d: f64| ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a;
            Ok(vec![(low - 1.0, far(1.0 + t)), (low, near(t)), (low + 1.0, near(1.0 - t)), (low + 2.0, far(2.0 - t))])
        }
        _ => Err(attribute("mode")),
    }
}

fn weighted(c: &mut Call, x: ValueId, dim: usize, change: &Change, how: &How) -> One {
    let (from, to) = (change.from, change.to);
    if from.checked_mul(to).is_none_or(|n| n > MOST_SHARES) {
        return Err(bad_value(2));
    }
    let dtype = c.dtype(x);
    if !dtype.is_float() {
        return Err(Reject::Unsupported("of integers"));
    }
    c.builder.table(c.node, from * to)?;
    let mut matrix = vec![0.0; (from * to) as usize];
    for at in 0..to {
        let list = shares(position(at, change, how)?, how)?;
        let inside = |place: f64| (0.0..from as f64).contains(&place);
        let total: f64 = list.iter().filter(|(place, _)| !how.exclude || inside(*place)).map(|(_, share)| share).sum();
        for (place, share) in list {
            if how.exclude && !inside(place) {
                continue;
            }
            let place = place.clamp(0.0, from as f64 - 1.0) as u64;
            matrix[(place * to + at) as usize] += share / total;
        }
    }
    matrix.iter_mut().for_each(|share| *share = dtype.round(*share));
    let g = c.g();
    let rank = g.shape(x).len();
    let matrix = g.constant(Literal::dense(TensorType::new(dtype, [from, to]), matrix));
    let y = array::contract(g, x, matrix, dim, 0)?;
    Ok(array::move_dim(g, y, rank - 1, dim)?)
}

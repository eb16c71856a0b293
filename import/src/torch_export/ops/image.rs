//! Lowers pooling and resampling of images.

use super::*;
use Lowering::Function;
use altiplano_ir::types::TensorType;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("max_pool1d", Function(max_pool)),
    ("max_pool2d", Function(max_pool)),
    ("max_pool3d", Function(max_pool)),
    ("max_pool2d_with_indices", Function(max_pool)),
    ("max_pool3d_with_indices", Function(max_pool)),
    ("avg_pool1d", Function(avg_pool)),
    ("avg_pool2d", Function(avg_pool)),
    ("avg_pool3d", Function(avg_pool)),
    ("adaptive_avg_pool1d", Function(adaptive_avg_pool)),
    ("adaptive_avg_pool2d", Function(adaptive_avg_pool)),
    ("adaptive_avg_pool3d", Function(adaptive_avg_pool)),
    ("_adaptive_avg_pool2d", Function(adaptive_avg_pool)),
    ("_adaptive_avg_pool3d", Function(adaptive_avg_pool)),
    ("adaptive_max_pool1d", Function(adaptive_max_pool)),
    ("adaptive_max_pool2d", Function(adaptive_max_pool)),
    ("upsample_nearest1d", Function(|c| resample(c, Kind::Nearest))),
    ("upsample_nearest2d", Function(|c| resample(c, Kind::Nearest))),
    ("upsample_nearest3d", Function(|c| resample(c, Kind::Nearest))),
    ("_upsample_nearest_exact1d", Function(|c| resample(c, Kind::NearestExact))),
    ("_upsample_nearest_exact2d", Function(|c| resample(c, Kind::NearestExact))),
    ("upsample_linear1d", Function(|c| resample(c, Kind::Linear))),
    ("upsample_bilinear2d", Function(|c| resample(c, Kind::Linear))),
    ("upsample_trilinear3d", Function(|c| resample(c, Kind::Linear))),
    ("upsample_bicubic2d", Function(|c| resample(c, Kind::Cubic))),
    ("im2col", Function(im2col)),
    ("col2im", Function(col2im)),
    ("pixel_shuffle", Function(pixel_shuffle)),
    ("pixel_unshuffle", Function(pixel_unshuffle)),
    ("channel_shuffle", Function(channel_shuffle)),
    ("native_channel_shuffle", Function(channel_shuffle)),
];

/// The number of spatial dimensions in an op's name (`1d`, `2d`, `3d`), or else 2.
fn spatial(name: &str) -> usize {
    let digit = |d: usize| name.contains(&format!("{d}d"));
    (1..=3).find(|&d| digit(d)).unwrap_or(2)
}

fn pool(c: &Call<'_>, n: usize) -> Result<a::Pool, Reject> {
    let size = c.sizes_per_dim("kernel_size", n, 1)?;
    let stride = match c.maybe_ints("stride")?.filter(|s| !s.is_empty()) {
        Some(_) => c.sizes_per_dim("stride", n, 1)?,
        None => size.clone(),
    };
    let pad = c.per_dim("padding", n, 0)?;
    let (dilation, ceil) = (c.sizes_per_dim("dilation", n, 1)?, c.bool("ceil_mode", false)?);
    Ok(a::Pool { size, stride, pad_low: pad.clone(), pad_high: pad, dilation, ceil })
}

fn max_pool(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let pool = pool(c, spatial(c.name))?;
    let y = a::max_pool(c.g(), x, &pool)?;
    with_unread_places(c, y)
}

/// Adds placeholders for the positions of the maxima. Only PyTorch's own gradients read them.
fn with_unread_places(c: &mut Call<'_>, y: ValueId) -> Lowered {
    let tensor = c.to.memory.fresh(y);
    let mut items = vec![super::super::call::Item::Tensor(tensor)];
    items.resize(c.declared.len().max(1), super::super::call::Item::Opaque);
    Ok(Out::Items(items))
}

fn avg_pool(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let pool = pool(c, spatial(c.name))?;
    let counts = c.bool("count_include_pad", true)?;
    if let Some(divisor) = c.maybe_float("divisor_override")? {
        let elements = pool.size.iter().product::<u64>() as f64;
        if !counts || pool.ceil {
            return Err(Reject::Unsupported("with another divisor beside padding"));
        }
        let y = a::avg_pool(c.g(), x, &pool, true)?;
        return value(number(c, Binary::Multiply, y, elements / divisor)?);
    }
    value(a::avg_pool(c.g(), x, &pool, counts)?)
}

fn output_size(c: &mut Call<'_>, x: ValueId) -> Result<Vec<u64>, Reject> {
    let n = spatial(c.name);
    let shape = c.shape_of(x);
    let own = shape.get(shape.len().saturating_sub(n)..).unwrap_or(&[]).to_vec();
    // A size that is omitted is that of the operand.
    let wanted = match c.get("output_size") {
        Some(super::super::call::Item::List(items)) => items
            .iter()
            .zip(&own)
            .map(|(item, &n)| match item {
                super::super::call::Item::Int(k) => u64::try_from(*k).ok(),
                super::super::call::Item::None => Some(n),
                _ => None,
            })
            .collect::<Option<Vec<u64>>>(),
        Some(super::super::call::Item::Int(k)) => u64::try_from(*k).ok().map(|k| vec![k; n]),
        _ => None,
    };
    let wanted = wanted.filter(|w| w.len() == n && own.len() == n);
    wanted.ok_or_else(|| other("has no size for each spatial dimension"))
}

fn adaptive_avg_pool(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let sizes = output_size(c, x)?;
    value(a::adaptive_avg_pool(c.g(), x, &sizes)?)
}

fn adaptive_max_pool(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let sizes = output_size(c, x)?;
    let shape = c.shape_of(x);
    let own = &shape[shape.len() - sizes.len()..];
    if sizes.iter().zip(own).any(|(&k, &n)| k == 0 || !n.is_multiple_of(k)) {
        return Err(Reject::Unsupported("to a size that does not divide the operand's"));
    }
    let size: Vec<u64> = sizes.iter().zip(own).map(|(k, n)| n / k).collect();
    let zeros = vec![0; sizes.len()];
    let dilation = vec![1; sizes.len()];
    let pool = a::Pool { stride: size.clone(), size, pad_low: zeros.clone(), pad_high: zeros, dilation, ceil: false };
    let y = a::max_pool(c.g(), x, &pool)?;
    with_unread_places(c, y)
}

/// The interpolation between the elements of an image.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Nearest,
    NearestExact,
    Linear,
    Cubic,
}

/// The requested spatial sizes, and the scale factors of positions if the program gives them.
fn resampled_sizes(c: &mut Call<'_>, own: &[u64]) -> Result<(Vec<u64>, Vec<Option<f64>>), Reject> {
    let n = own.len();
    let float = |item: &super::super::call::Item| match item {
        super::super::call::Item::Float(x) => Some(*x),
        super::super::call::Item::Int(x) => Some(*x as f64),
        _ => None,
    };
    let mut factors: Vec<Option<f64>> = match c.get("scale_factors") {
        Some(super::super::call::Item::List(items)) => items.iter().map(float).collect(),
        _ => Vec::new(),
    };
    let names: &[&str] = match n {
        1 => &["scales"],
        2 => &["scales_h", "scales_w"],
        _ => &["scales_d", "scales_h", "scales_w"],
    };
    if factors.is_empty() {
        factors = names.iter().map(|name| c.maybe_float(name)).collect::<Result<_, _>>()?;
    }
    factors.resize(n, None);
    if c.has("output_size") {
        let sizes = c.shape("output_size")?;
        return if sizes.len() == n { Ok((sizes, factors)) } else { Err(other("has no size for each dimension")) };
    }
    let size = |(factor, &n): (&Option<f64>, &u64)| {
        let size = (n as f64 * (*factor)?).floor();
        (1.0..1e9).contains(&size).then_some(size as u64)
    };
    let sizes: Option<Vec<u64>> = factors.iter().zip(own).map(size).collect();
    Ok((sizes.ok_or_else(|| other("has a scale that gives no size"))?, factors))
}

/// Resamples each spatial dimension separately, by a matrix whose rows hold the weights of each new element.
fn resample(c: &mut Call<'_>, kind: Kind) -> Lowered {
    let mut x = c.first()?;
    let n = spatial(c.name);
    let shape = c.shape_of(x);
    if shape.len() < n + 1 {
        return problem("resamples what is no image");
    }
    let leading = shape.len() - n;
    let (sizes, factors) = resampled_sizes(c, &shape[leading..])?;
    let corners = c.bool("align_corners", false)?;
    for (i, (&to, factor)) in sizes.iter().zip(factors).enumerate() {
        let dim = leading + i;
        let from = shape[dim];
        if from == 0 || to == 0 || from.saturating_mul(to) > 1 << 24 {
            return Err(altiplano_ir::op::ShapeError::TooLarge { shape: vec![from, to] }.into());
        }
        // Positions scale by the inverse of a given factor, or else by the ratio of the sizes.
        let scale = match (corners, factor) {
            (true, _) if to > 1 => (from - 1) as f64 / (to - 1) as f64,
            (true, _) => 0.0,
            (false, Some(factor)) if factor > 0.0 => 1.0 / factor,
            _ => from as f64 / to as f64,
        };
        if from == to && scale == 1.0 {
            continue;
        }
        x = match kind {
            Kind::Nearest | Kind::NearestExact => nearest(c, x, dim, from, to, scale, kind)?,
            _ => blended(c, x, dim, [from, to], scale, corners, kind)?,
        };
    }
    value(x)
}

fn nearest(
    c: &mut Call<'_>,
    x: ValueId,
    dim: usize,
    from: u64,
    to: u64,
    scale: f64,
    kind: Kind,
) -> Result<ValueId, Reject> {
    let half = if kind == Kind::NearestExact { 0.5 } else { 0.0 };
    // PyTorch computes positions in single precision.
    let place = |i: u64| (((i as f32 + half as f32) * scale as f32).floor() as u64).min(from - 1);
    let places: Vec<u64> = (0..to).map(place).collect();
    if to.is_multiple_of(from) && places.iter().enumerate().all(|(i, &p)| p == i as u64 / (to / from)) {
        let mut spread = c.shape_of(x);
        let rank = spread.len();
        spread.insert(dim + 1, to / from);
        let dims = (0..rank).map(|d| if d <= dim { d } else { d + 1 }).collect();
        let y = c.g().push(Op::BroadcastInDim(altiplano_ir::op::BroadcastInDim { shape: spread, dims }), &[x])?;
        return Ok(a::flatten(c.g(), y, dim as i64, dim as i64 + 1)?);
    }
    let ty = TensorType::new(DType::I32, [to]);
    let places = places.into_iter().map(|p| p as f64).collect();
    let places = c.g().constant(altiplano_ir::literal::Literal::dense(ty, places));
    Ok(a::take(c.g(), x, dim, places, false)?)
}

/// Keys' cubic convolution with a = -0.75, at a distance of at most two.
fn cubic(distance: f64) -> f64 {
    let (t, slope) = (distance.abs(), -0.75);
    if t <= 1.0 {
        ((slope + 2.0) * t - (slope + 3.0)) * t * t + 1.0
    } else {
        ((slope * t - 5.0 * slope) * t + 8.0 * slope) * t - 4.0 * slope
    }
}

fn blended(
    c: &mut Call<'_>,
    x: ValueId,
    dim: usize,
    [from, to]: [u64; 2],
    scale: f64,
    corners: bool,
    kind: Kind,
) -> Result<ValueId, Reject> {
    let mut shares = vec![0.0; (from * to) as usize];
    for i in 0..to {
        let mut at = if corners { i as f64 * scale } else { (i as f64 + 0.5) * scale - 0.5 };
        if kind == Kind::Linear {
            at = at.max(0.0);
        }
        let low = at.floor();
        let mut add = |place: f64, share: f64| {
            let place = place.clamp(0.0, (from - 1) as f64) as u64;
            shares[(place * to + i) as usize] += share;
        };
        match kind {
            Kind::Cubic => (-1..=2).for_each(|k| add(low + f64::from(k), cubic(at - low - f64::from(k)))),
            _ => {
                add(low, 1.0 - (at - low));
                add(low + 1.0, at - low);
            }
        }
    }
    let dtype = c.dtype_of(x);
    let shares = shares.into_iter().map(|s| dtype.round(s)).collect();
    let matrix = altiplano_ir::literal::Literal::dense(TensorType::new(dtype, [from, to]), shares);
    let matrix = c.g().constant(matrix);
    let y = a::contract(c.g(), x, matrix, dim, 0)?;
    let last = c.rank(y) - 1;
    Ok(a::move_dim(c.g(), y, last, dim)?)
}

/// Rearranges `[.., C r r, H, W]`: each block of `r r` features becomes a square of positions.
fn pixel_shuffle(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let r = c.size("upscale_factor")?;
    let square = r.saturating_mul(r);
    let [ref batch @ .., features, h, w] = shape[..] else { return problem("shuffles what is no image") };
    if square == 0 || !features.is_multiple_of(square) {
        return problem("has features that the square of the factor does not divide");
    }
    let n = batch.len();
    let split = [batch, &[features / square, r, r, h, w]].concat();
    let y = a::reshape(c.g(), x, &split)?;
    let order: Vec<usize> = (0..n).chain([n, n + 3, n + 1, n + 4, n + 2]).collect();
    let y = a::permute(c.g(), y, &order)?;
    value(a::reshape(c.g(), y, &[batch, &[features / square, h * r, w * r]].concat())?)
}

fn pixel_unshuffle(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let r = c.size("downscale_factor")?;
    let [ref batch @ .., features, h, w] = shape[..] else { return problem("shuffles what is no image") };
    if r == 0 || !h.is_multiple_of(r) || !w.is_multiple_of(r) {
        return problem("has positions that the factor does not divide");
    }
    let n = batch.len();
    let y = a::reshape(c.g(), x, &[batch, &[features, h / r, r, w / r, r]].concat())?;
    let order: Vec<usize> = (0..n).chain([n, n + 2, n + 4, n + 1, n + 3]).collect();
    let y = a::permute(c.g(), y, &order)?;
    let joined = features.saturating_mul(r).saturating_mul(r);
    value(a::reshape(c.g(), y, &[batch, &[joined, h / r, w / r]].concat())?)
}

fn channel_shuffle(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let groups = c.size("groups")?;
    if shape.len() < 3 || groups == 0 || !shape[1].is_multiple_of(groups) {
        return problem("has features that the groups do not divide");
    }
    let y = a::reshape(c.g(), x, &[&[shape[0], groups, shape[1] / groups], &shape[2..]].concat())?;
    let y = a::swap_dims(c.g(), y, 1, 2)?;
    value(a::reshape(c.g(), y, &shape)?)
}

/// Windows are unrolled tap by tap. Larger ones would make a graph that is too large to plan.
const MOST_TAPS: u64 = 4096;

/// A window that moves over two dimensions: for each its taps, dilation, padding, stride and positions.
struct Moving {
    taps: [u64; 2],
    dilation: [u64; 2],
    pad: [u64; 2],
    stride: [u64; 2],
    positions: [u64; 2],
}

impl Moving {
    /// The window of a call over an image of this size.
    fn of(c: &Call<'_>, image: [u64; 2]) -> Result<Moving, Reject> {
        let two = |name: &str, default: i64| -> Result<[u64; 2], Reject> {
            let all = c.sizes_per_dim(name, 2, default)?;
            Ok([all[0], all[1]])
        };
        let (taps, dilation) = (two("kernel_size", 1)?, two("dilation", 1)?);
        let (pad, stride) = (two("padding", 0)?, two("stride", 1)?);
        if taps[0].saturating_mul(taps[1]) > MOST_TAPS {
            return Err(Reject::Unsupported("with windows of more than 4096 elements"));
        }
        let position = |d: usize| {
            let reach = taps[d].checked_sub(1)?.checked_mul(dilation[d])?.checked_add(1)?;
            let whole = pad[d].checked_mul(2)?.checked_add(image[d])?;
            Some(whole.checked_sub(reach)?.checked_div(stride[d])? + 1)
        };
        match (position(0), position(1)) {
            (Some(h), Some(w)) => Ok(Moving { taps, dilation, pad, stride, positions: [h, w] }),
            _ => Err(other("has a window that does not fit the image")),
        }
    }

    /// The start of each tap in the padded image.
    fn starts(&self) -> impl Iterator<Item = [u64; 2]> + '_ {
        let [kh, kw] = self.taps;
        (0..kh * kw).map(move |tap| [tap / kw * self.dilation[0], tap % kw * self.dilation[1]])
    }
}

/// Rearranges `[N, C, H, W]` to `[N, C kh kw, positions]`: the elements in the window at each of its positions.
fn im2col(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let [ref batch @ .., features, h, w] = shape[..] else { return problem("unfolds what is no image") };
    let moving = Moving::of(c, [h, w])?;
    let rank = shape.len();
    let edge = |d: usize| if d + 2 >= rank { moving.pad[d + 2 - rank] as i64 } else { 0 };
    let pad: Vec<i64> = (0..rank).map(edge).collect();
    let x = a::pad(c.g(), x, &pad, &pad, 0.0)?;
    let mut taps = Vec::new();
    for start in moving.starts() {
        let mut tap = x;
        for (d, &from) in start.iter().enumerate() {
            let end = from + (moving.positions[d] - 1) * moving.stride[d] + 1;
            tap = a::slice_dim(c.g(), tap, rank - 2 + d, from as i64, end as i64, moving.stride[d])?;
        }
        taps.push(tap);
    }
    let all = a::stack(c.g(), &taps, rank - 2)?;
    let rows = features.saturating_mul(taps.len() as u64);
    value(a::reshape(c.g(), all, &[batch, &[rows, moving.positions.iter().product()]].concat())?)
}

/// The adjoint of [`im2col`]: each pixel is the sum of its elements over all windows.
fn col2im(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let &[h, w] = c.shape("output_size")?.as_slice() else { return problem("has no size of an image") };
    let [ref batch @ .., rows, columns] = shape[..] else { return problem("folds what is no matrix") };
    let moving = Moving::of(c, [h, w])?;
    let taps = moving.taps[0].saturating_mul(moving.taps[1]);
    if taps == 0 || !rows.is_multiple_of(taps) || moving.positions.iter().product::<u64>() != columns {
        return problem("has windows that do not fit the image");
    }
    let n = batch.len();
    let split = [batch, &[rows / taps, taps], &moving.positions].concat();
    let x = a::reshape(c.g(), x, &split)?;
    let zero = {
        let dtype = c.dtype_of(x);
        a::scalar(c.g(), 0.0, dtype)?
    };
    let mut sum: Option<ValueId> = None;
    for (at, start) in moving.starts().enumerate() {
        let tap = a::select_dim(c.g(), x, n + 1, at as i64)?;
        // Spreads the windows over the padded image, and then crops its edges.
        let (mut low, mut high, mut interior) = (vec![0; n + 3], vec![0; n + 3], vec![0; n + 3]);
        for (d, size) in [h, w].into_iter().enumerate() {
            let spread = (moving.positions[d] - 1) * moving.stride[d] + 1;
            low[n + 1 + d] = start[d] as i64 - moving.pad[d] as i64;
            high[n + 1 + d] = size as i64 - spread as i64 - low[n + 1 + d];
            interior[n + 1 + d] = moving.stride[d] - 1;
        }
        let placed = c.g().push(Op::Pad(altiplano_ir::op::Pad { low, high, interior }), &[tap, zero])?;
        sum = Some(match sum {
            Some(sum) => two(c, Binary::Add, sum, placed)?,
            None => placed,
        });
    }
    match sum {
        Some(sum) => value(sum),
        None => problem("has a window of nothing"),
    }
}

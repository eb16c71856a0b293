//! Lowers reads of images at data-dependent positions: grids, regions of interest, deformable convolutions.
//!
//! Each gathers the four (or sixteen) neighbours of every position and sums them with weights that follow from
//! the position. Gradients therefore reach the image, the positions and the weights.

use super::*;
use Lowering::Function;
use altiplano_ir::op::{Gather, GatherDims, OutOfBounds};

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("grid_sampler", Function(grid_sampler)),
    ("grid_sampler_2d", Function(grid_sampler)),
    ("grid_sampler_3d", Function(grid_sampler)),
    ("affine_grid_generator", Function(affine_grid)),
    ("torchvision.roi_align.default", Function(roi_align)),
    ("torchvision.deform_conv2d.default", Function(deform_conv)),
];

/// The treatment of positions outside an image.
#[derive(Clone, Copy, PartialEq)]
enum Outside {
    Zeros,
    Border,
    Reflection,
}

/// Adds a number to positions.
fn moved(c: &mut Call<'_>, x: ValueId, by: f64) -> Result<ValueId, Reject> {
    if by == 0.0 { Ok(x) } else { number(c, Binary::Add, x, by) }
}

fn times(c: &mut Call<'_>, x: ValueId, by: f64) -> Result<ValueId, Reject> {
    if by == 1.0 { Ok(x) } else { number(c, Binary::Multiply, x, by) }
}

/// Maps positions into an image of this size.
fn inside(c: &mut Call<'_>, at: ValueId, size: u64, outside: Outside, corners: bool) -> Result<ValueId, Reject> {
    let last = size as f64 - 1.0;
    match outside {
        Outside::Zeros => Ok(at),
        Outside::Border => Ok(a::clamp(c.g(), at, Some(0.0), Some(last))?),
        Outside::Reflection => {
            // Reflects at the centres of the edge pixels, or at their outer sides.
            let (low, span) = if corners { (0.0, last) } else { (-0.5, size as f64) };
            if span <= 0.0 {
                return Ok(a::full_like(c.g(), at, 0.0)?);
            }
            let from = moved(c, at, -low)?;
            let from = one(c, Unary::Abs, from)?;
            let turns = times(c, from, 1.0 / span)?;
            let turns = one(c, Unary::Floor, turns)?;
            let whole = times(c, turns, span)?;
            let rest = two(c, Binary::Subtract, from, whole)?;
            let forth = moved(c, rest, low)?;
            let back = one(c, Unary::Negate, rest)?;
            let back = moved(c, back, span + low)?;
            let half = times(c, turns, 0.5)?;
            let even = one(c, Unary::Floor, half)?;
            let is_even = a::compare(c.g(), Direction::Eq, half, even)?;
            let at = a::select(c.g(), is_even, forth, back)?;
            Ok(a::clamp(c.g(), at, Some(0.0), Some(last))?)
        }
    }
}

/// True where a position is inside the image or on its border.
fn is_inside(c: &mut Call<'_>, at: ValueId, size: u64) -> Result<ValueId, Reject> {
    let (zero, last) = (a::full_like(c.g(), at, 0.0)?, a::full_like(c.g(), at, size as f64 - 1.0)?);
    let after = a::compare(c.g(), Direction::Ge, at, zero)?;
    let before = a::compare(c.g(), Direction::Le, at, last)?;
    two(c, Binary::And, after, before)
}

/// Pixels of `[N, C, ..]` at integer positions `[N, P]` of each spatial dimension, as `[N, P, C]`. Positions
/// outside give zero.
fn pixels(c: &mut Call<'_>, image: ValueId, at: &[ValueId]) -> Result<ValueId, Reject> {
    let shape = c.shape_of(image);
    let mut vector = Vec::with_capacity(at.len());
    let mut seen: Option<ValueId> = None;
    for (&at, &size) in at.iter().zip(&shape[2..]) {
        let here = is_inside(c, at, size)?;
        seen = Some(match seen {
            Some(all) => two(c, Binary::And, all, here)?,
            None => here,
        });
        let clamped = a::clamp(c.g(), at, Some(0.0), Some(size as f64 - 1.0))?;
        let whole = a::convert(c.g(), clamped, DType::I64)?;
        vector.push(a::unsqueeze(c.g(), whole, -1)?);
    }
    let indices = a::concat(c.g(), &vector, 2)?;
    let spatial: Vec<usize> = (2..shape.len()).collect();
    let mut slice_sizes = vec![1; shape.len()];
    slice_sizes[1] = shape[1];
    let dims = GatherDims {
        offset_dims: vec![2],
        collapsed_slice_dims: spatial.clone(),
        operand_batching_dims: vec![0],
        indices_batching_dims: vec![0],
        start_index_map: spatial,
        index_vector_dim: 2,
        slice_sizes,
    };
    let found = c.g().push(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[image, indices])?;
    let Some(seen) = seen else { return Err(other("has no spatial dimension")) };
    let seen = a::unsqueeze(c.g(), seen, -1)?;
    let zero = a::full_like(c.g(), found, 0.0)?;
    Ok(a::select(c.g(), seen, found, zero)?)
}

/// The interpolation of the neighbours of positions `[N, P]`, as `[N, P, C]`.
fn linear(c: &mut Call<'_>, image: ValueId, at: &[ValueId]) -> Result<ValueId, Reject> {
    let mut sides = Vec::new();
    for &at in at {
        let low = one(c, Unary::Floor, at)?;
        let share = two(c, Binary::Subtract, at, low)?;
        let rest = times(c, share, -1.0)?;
        let rest = moved(c, rest, 1.0)?;
        let high = moved(c, low, 1.0)?;
        sides.push([(low, rest), (high, share)]);
    }
    let mut sum: Option<ValueId> = None;
    for corner in 0..1usize << at.len() {
        let chosen: Vec<_> = sides.iter().enumerate().map(|(d, side)| side[corner >> d & 1]).collect();
        let places: Vec<ValueId> = chosen.iter().map(|(at, _)| *at).collect();
        let found = pixels(c, image, &places)?;
        let mut weight = chosen[0].1;
        for (_, share) in &chosen[1..] {
            weight = two(c, Binary::Multiply, weight, *share)?;
        }
        let weight = a::unsqueeze(c.g(), weight, -1)?;
        let term = two(c, Binary::Multiply, found, weight)?;
        sum = Some(match sum {
            Some(sum) => two(c, Binary::Add, sum, term)?,
            None => term,
        });
    }
    sum.ok_or_else(|| other("has no spatial dimension"))
}

/// Weights of Keys' cubic convolution (a = -0.75) for two pixels on either side, at a distance of `t` from a
/// pixel.
fn cubic_weights(c: &mut Call<'_>, t: ValueId) -> Result<[ValueId; 4], Reject> {
    const SLOPE: f64 = -0.75;
    let polynomial = |c: &mut Call<'_>, x: ValueId, of: [f64; 4]| {
        let mut y = times(c, x, of[0])?;
        for k in &of[1..3] {
            y = moved(c, y, *k)?;
            y = two(c, Binary::Multiply, y, x)?;
        }
        moved(c, y, of[3])
    };
    let near = [SLOPE + 2.0, -(SLOPE + 3.0), 0.0, 1.0];
    let far = [SLOPE, -5.0 * SLOPE, 8.0 * SLOPE, -4.0 * SLOPE];
    let before = moved(c, t, 1.0)?;
    let after = times(c, t, -1.0)?;
    let (after, beyond) = (moved(c, after, 1.0)?, moved(c, after, 2.0)?);
    Ok([polynomial(c, before, far)?, polynomial(c, t, near)?, polynomial(c, after, near)?, polynomial(c, beyond, far)?])
}

fn cubic(
    c: &mut Call<'_>,
    image: ValueId,
    at: [ValueId; 2],
    outside: Outside,
    corners: bool,
) -> Result<ValueId, Reject> {
    let shape = c.shape_of(image);
    let mut taps = Vec::new();
    for (at, &size) in at.into_iter().zip(&shape[2..]) {
        let low = one(c, Unary::Floor, at)?;
        let share = two(c, Binary::Subtract, at, low)?;
        let weights = cubic_weights(c, share)?;
        let mut own = Vec::new();
        for (i, weight) in weights.into_iter().enumerate() {
            let place = moved(c, low, i as f64 - 1.0)?;
            own.push((inside(c, place, size, outside, corners)?, weight));
        }
        taps.push(own);
    }
    weighted(c, image, None, &taps[0], &taps[1])
}

/// The sum of pixels at all pairs of places, each with the product of its weights, in one image of several if `which`
/// says so.
fn weighted(
    c: &mut Call<'_>,
    image: ValueId,
    which: Option<ValueId>,
    rows: &[(ValueId, ValueId)],
    columns: &[(ValueId, ValueId)],
) -> Result<ValueId, Reject> {
    let mut sum: Option<ValueId> = None;
    for &(y, of_y) in rows {
        for &(x, of_x) in columns {
            let place: Vec<ValueId> = which.into_iter().chain([y, x]).collect();
            let found = pixels(c, image, &place)?;
            let weight = two(c, Binary::Multiply, of_y, of_x)?;
            let weight = a::unsqueeze(c.g(), weight, -1)?;
            let term = two(c, Binary::Multiply, found, weight)?;
            sum = Some(match sum {
                Some(sum) => two(c, Binary::Add, sum, term)?,
                None => term,
            });
        }
    }
    sum.ok_or_else(|| other("has no spatial dimension"))
}

/// Rearranges `[N, P, C]` to `[N, C, ..]`.
fn as_image(c: &mut Call<'_>, x: ValueId, sizes: &[u64]) -> Result<ValueId, Reject> {
    let shape = c.shape_of(x);
    let x = a::swap_dims(c.g(), x, 1, 2)?;
    Ok(a::reshape(c.g(), x, &[&[shape[0], shape[2]], sizes].concat())?)
}

/// Samples `[N, C, ..]` at the positions of a grid `[N, .., 2]`. Its coordinates are x before y, each in
/// `[-1, 1]` inside the image.
fn grid_sampler(c: &mut Call<'_>) -> Lowered {
    let (image, grid) = (c.tensor("input")?, c.tensor("grid")?);
    let outside = match c.int("padding_mode", 0)? {
        0 => Outside::Zeros,
        1 => Outside::Border,
        2 => Outside::Reflection,
        _ => return problem("has a padding that is none"),
    };
    let (mode, corners) = (c.int("interpolation_mode", 0)?, c.bool("align_corners", false)?);
    value(sampled(c, image, grid, mode, outside, corners)?)
}

fn sampled(
    c: &mut Call<'_>,
    image: ValueId,
    grid: ValueId,
    mode: i64,
    outside: Outside,
    corners: bool,
) -> Result<ValueId, Reject> {
    let (of_image, of_grid) = (c.shape_of(image), c.shape_of(grid));
    let n = of_image.len().saturating_sub(2);
    if n == 0 || of_grid.len() != n + 2 || of_grid[n + 1] != n as u64 || of_grid[0] != of_image[0] {
        return Err(other("has a grid that does not fit the image"));
    }
    let points: u64 = of_grid[1..=n].iter().product();
    let flat = a::reshape(c.g(), grid, &[of_grid[0], points, n as u64])?;
    let mut at = Vec::new();
    for (d, &size) in of_image[2..].iter().enumerate() {
        let x = a::select_dim(c.g(), flat, 2, (n - 1 - d) as i64)?;
        let n = size as f64;
        let x = if corners {
            let x = moved(c, x, 1.0)?;
            times(c, x, (n - 1.0) / 2.0)?
        } else {
            let x = times(c, x, n / 2.0)?;
            moved(c, x, (n - 1.0) / 2.0)?
        };
        at.push(x);
    }
    let y = if mode == 2 {
        let &[y, x] = at.as_slice() else { return Err(Reject::Unsupported("cubic in other than two dimensions")) };
        cubic(c, image, [y, x], outside, corners)?
    } else {
        for (x, &size) in at.iter_mut().zip(&of_image[2..]) {
            *x = inside(c, *x, size, outside, corners)?;
        }
        if mode == 1 {
            for x in &mut at {
                *x = one(c, Unary::RoundNearestEven, *x)?;
            }
            pixels(c, image, &at)?
        } else {
            linear(c, image, &at)?
        }
    };
    as_image(c, y, &of_grid[1..=n])
}

/// The positions of the pixels of an image under an affine map: `[N, 2, 3]` to `[N, H, W, 2]`.
fn affine_grid(c: &mut Call<'_>) -> Lowered {
    let theta = c.tensor("theta")?;
    let (size, corners) = (c.shape("size")?, c.bool("align_corners", false)?);
    let spatial = size.get(2..).unwrap_or(&[]).to_vec();
    let n = spatial.len();
    let dtype = c.dtype_of(theta);
    if n == 0 || c.shape_of(theta) != [size[0], n as u64, n as u64 + 1] {
        return problem("has a map that does not fit the image");
    }
    // x before y, and a one for the translation.
    let mut columns = Vec::new();
    for (d, &n) in spatial.iter().enumerate().rev() {
        let (start, step) = match corners {
            _ if n < 2 => (0.0, 0.0),
            true => (-1.0, 2.0 / (n as f64 - 1.0)),
            false => (1.0 / n as f64 - 1.0, 2.0 / n as f64),
        };
        let row = a::arange(c.g(), n, start, step, dtype)?;
        let mut shape = vec![1; spatial.len() + 1];
        shape[d] = n;
        let row = a::reshape(c.g(), row, &shape)?;
        let wide: Vec<u64> = spatial.iter().copied().chain([1]).collect();
        columns.push(a::broadcast_to(c.g(), row, &wide)?);
    }
    let wide: Vec<u64> = spatial.iter().copied().chain([1]).collect();
    columns.push(a::full(c.g(), &wide, 1.0, dtype)?);
    let points = a::concat(c.g(), &columns, n)?;
    // [.., n + 1] x [N, n, n + 1] -> [.., N, n]
    let grid = c.g().push(
        Op::DotGeneral(altiplano_ir::op::DotGeneral {
            lhs_batch: vec![],
            rhs_batch: vec![],
            lhs_contract: vec![n],
            rhs_contract: vec![2],
        }),
        &[points, theta],
    )?;
    value(a::move_dim(c.g(), grid, n, 0)?)
}

/// Resamples regions of images to one size: `[K, C, h, w]` from `[N, C, H, W]` and rows of image, x, y, x, y.
fn roi_align(c: &mut Call<'_>) -> Lowered {
    let (image, rois) = (c.tensor("input")?, c.tensor("rois")?);
    let (scale, ratio) = (c.float("spatial_scale", 1.0)?, c.int("sampling_ratio", -1)?);
    let (height, width) = (c.size("pooled_height")?, c.size("pooled_width")?);
    let aligned = c.bool("aligned", false)?;
    let Some(ratio) = u64::try_from(ratio).ok().filter(|&r| r > 0) else {
        return Err(Reject::Unsupported("whose number of samples depends on data; give a sampling_ratio above zero"));
    };
    let (of_image, of_rois) = (c.shape_of(image), c.shape_of(rois));
    let (&[_, features, h, w], &[count, 5]) = (of_image.as_slice(), of_rois.as_slice()) else {
        return problem("has regions or an image of another rank");
    };
    let dtype = c.dtype_of(rois);
    let column = |c: &mut Call<'_>, at: i64| a::slice_dim(c.g(), rois, 1, at, at + 1, 1);
    let which = column(c, 0)?;
    let offset = if aligned { -0.5 } else { 0.0 };
    let mut places = Vec::new();
    for (low, high, bins, size) in [(2, 4, height, h), (1, 3, width, w)] {
        let (low, high) = (column(c, low)?, column(c, high)?);
        let (low, high) = (times(c, low, scale)?, times(c, high, scale)?);
        let (low, high) = (moved(c, low, offset)?, moved(c, high, offset)?);
        let mut span = two(c, Binary::Subtract, high, low)?;
        if !aligned {
            span = a::clamp(c.g(), span, Some(1.0), None)?;
        }
        // The centre of each sample's part of a bin.
        let steps = a::arange(c.g(), bins * ratio, 0.5, 1.0, dtype)?;
        let steps = times(c, steps, 1.0 / (bins * ratio) as f64)?;
        let at = two(c, Binary::Multiply, span, steps)?;
        let at = two(c, Binary::Add, low, at)?;
        // Samples beyond the edge by more than a pixel are zero. Closer samples have the value of the edge.
        let (first, last) = (a::full_like(c.g(), at, -1.0)?, a::full_like(c.g(), at, size as f64)?);
        let after = a::compare(c.g(), Direction::Ge, at, first)?;
        let before = a::compare(c.g(), Direction::Le, at, last)?;
        let seen = two(c, Binary::And, after, before)?;
        let at = a::clamp(c.g(), at, Some(0.0), Some(size as f64 - 1.0))?;
        places.push((at, seen, bins * ratio));
    }
    let points = [count, places[0].2, places[1].2];
    let wide = |c: &mut Call<'_>, x: ValueId, dim: i64| {
        let x = a::unsqueeze(c.g(), x, dim)?;
        let x = a::broadcast_to(c.g(), x, &points)?;
        a::reshape(c.g(), x, &[1, points.iter().product()])
    };
    let (y, x) = (wide(c, places[0].0, 2)?, wide(c, places[1].0, 1)?);
    let (y_seen, x_seen) = (wide(c, places[0].1, 2)?, wide(c, places[1].1, 1)?);
    let which = a::unsqueeze(c.g(), which, 2)?;
    let which = a::broadcast_to(c.g(), which, &points)?;
    let which = a::reshape(c.g(), which, &[1, points.iter().product()])?;
    // Images become a third spatial dimension, with integer positions.
    let stacked = a::move_dim(c.g(), image, 1, 0)?;
    let stacked = a::unsqueeze(c.g(), stacked, 0)?;
    let mut sides = Vec::new();
    for at in [y, x] {
        let low = one(c, Unary::Floor, at)?;
        let share = two(c, Binary::Subtract, at, low)?;
        let rest = times(c, share, -1.0)?;
        sides.push([(low, moved(c, rest, 1.0)?), (moved(c, low, 1.0)?, share)]);
    }
    let sum = weighted(c, stacked, Some(which), &sides[0], &sides[1])?;
    let seen = two(c, Binary::And, y_seen, x_seen)?;
    let seen = a::unsqueeze(c.g(), seen, -1)?;
    let zero = a::full_like(c.g(), sum, 0.0)?;
    let sum = a::select(c.g(), seen, sum, zero)?;
    let split = a::reshape(c.g(), sum, &[count, height, ratio, width, ratio, features])?;
    let mean = a::mean(c.g(), split, &[2, 4], false)?;
    value(a::move_dim(c.g(), mean, 3, 1)?)
}

/// A convolution whose taps each have an offset and a weight (Dai and others 2017, Zhu and others 2019).
fn deform_conv(c: &mut Call<'_>) -> Lowered {
    let (image, weight, offset) = (c.tensor("input")?, c.tensor("weight")?, c.tensor("offset")?);
    let mask = if c.bool("use_mask", true)? { c.maybe_tensor("mask")? } else { None };
    let pair =
        |c: &Call<'_>, name: &str| Ok::<_, Reject>([c.size(&format!("{name}_h"))?, c.size(&format!("{name}_w"))?]);
    let (stride, pad, dilation) = (pair(c, "stride")?, pair(c, "pad")?, pair(c, "dilation")?);
    let (groups, offset_groups) = (c.size("groups")?, c.size("offset_groups")?);
    let (of_image, of_weight, of_offset) = (c.shape_of(image), c.shape_of(weight), c.shape_of(offset));
    let (&[n, features, _, _], &[outputs, each, kh, kw], &[_, _, oh, ow]) =
        (of_image.as_slice(), of_weight.as_slice(), of_offset.as_slice())
    else {
        return problem("has operands of another rank");
    };
    let taps = kh * kw;
    let fits = groups > 0 && offset_groups > 0 && features % offset_groups == 0 && features == groups * each;
    if !fits || of_offset[1] != 2 * taps * offset_groups || outputs % groups != 0 {
        return problem("has groups that do not fit");
    }
    let dtype = c.dtype_of(offset);
    let own = features / offset_groups;
    let offset = a::reshape(c.g(), offset, &[n * offset_groups, taps, 2, oh, ow])?;
    // The position of each tap without its offset.
    let mut at = Vec::new();
    for d in 0..2 {
        let (taps_here, size) = ([kh, kw][d], [oh, ow][d]);
        let start = a::arange(c.g(), size, -(pad[d] as f64), stride[d] as f64, dtype)?;
        let tap = a::arange(c.g(), taps_here, 0.0, dilation[d] as f64, dtype)?;
        let (tap_shape, start_shape) = match d {
            0 => ([kh, 1, 1, 1], [1, 1, oh, 1]),
            _ => ([1, kw, 1, 1], [1, 1, 1, ow]),
        };
        let (tap, start) = (a::reshape(c.g(), tap, &tap_shape)?, a::reshape(c.g(), start, &start_shape)?);
        let place = two(c, Binary::Add, tap, start)?;
        let place = a::broadcast_to(c.g(), place, &[kh, kw, oh, ow])?;
        let place = a::reshape(c.g(), place, &[taps, oh, ow])?;
        let by = a::select_dim(c.g(), offset, 2, d as i64)?;
        let place = two(c, Binary::Add, by, place)?;
        at.push(a::reshape(c.g(), place, &[n * offset_groups, taps * oh * ow])?);
    }
    let image = a::reshape(c.g(), image, &[n * offset_groups, own, of_image[2], of_image[3]])?;
    let mut found = linear(c, image, &at)?;
    if let Some(mask) = mask {
        let mask = a::reshape(c.g(), mask, &[n * offset_groups, taps * oh * ow, 1])?;
        found = two(c, Binary::Multiply, found, mask)?;
    }
    // [N, offset groups, taps, positions, own] -> [N, groups, each, taps, positions]
    let found = a::reshape(c.g(), found, &[n, offset_groups, taps, oh * ow, own])?;
    let found = a::permute(c.g(), found, &[0, 1, 4, 2, 3])?;
    let found = a::reshape(c.g(), found, &[n, groups, each * taps, oh * ow])?;
    let weight = a::reshape(c.g(), weight, &[groups, outputs / groups, each * taps])?;
    let y = a::matmul(c.g(), weight, found)?;
    let y = a::reshape(c.g(), y, &[n, outputs, oh, ow])?;
    value(match c.maybe_tensor("bias")? {
        Some(bias) => {
            let bias = a::reshape(c.g(), bias, &[outputs, 1, 1])?;
            two(c, Binary::Add, y, bias)?
        }
        None => y,
    })
}

//! Lowers Fourier transforms, and the ops of audio models that build on them.

use super::super::call::Item;
use super::super::complex::Found;
use super::*;
use Lowering::Function;
use altiplano_ir::array::complex::{self as k, Pair};
use altiplano_ir::array::fourier as f;
use altiplano_ir::literal::Literal;
use altiplano_ir::types::TensorType;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("fft_fftshift", Function(|c| shift(c, false))),
    ("fft_ifftshift", Function(|c| shift(c, true))),
    ("fft_fftfreq", Function(|c| frequencies(c, false))),
    ("fft_rfftfreq", Function(|c| frequencies(c, true))),
    ("hann_window", Function(|c| window(c, 0.5))),
    ("hamming_window", Function(|c| window(c, 0.54))),
];

/// Lowers transforms, which take or return complex numbers.
pub(crate) fn complex(c: &mut Call<'_>, name: &str) -> Result<Option<Found>, Reject> {
    let one = |c: &Call<'_>| Ok::<_, Reject>(vec![c.int("dim", -1)?]);
    let two = |c: &Call<'_>| Ok::<_, Reject>(c.maybe_ints("dim")?.unwrap_or(vec![-2, -1]));
    Ok(Some(match name {
        "fft_fft" | "fft_ifft" => of_complex(c, one(c)?, name == "fft_ifft")?,
        "fft_fft2" | "fft_ifft2" => of_complex(c, two(c)?, name == "fft_ifft2")?,
        "fft_fftn" | "fft_ifftn" => {
            let dims = all_dims(c)?;
            of_complex(c, dims, name == "fft_ifftn")?
        }
        "fft_rfft" => to_half(c, one(c)?)?,
        "fft_rfft2" => to_half(c, two(c)?)?,
        "fft_rfftn" => {
            let dims = all_dims(c)?;
            to_half(c, dims)?
        }
        "fft_irfft" => from_half(c, one(c)?)?,
        "fft_irfft2" => from_half(c, two(c)?)?,
        "fft_irfftn" => {
            let dims = all_dims(c)?;
            from_half(c, dims)?
        }
        "_fft_r2c" | "_fft_c2c" | "_fft_c2r" => decomposed(c, name)?,
        "stft" => stft(c)?,
        "istft" => istft(c)?,
        _ => return Ok(None),
    }))
}

/// The dimensions of a transform: the given ones, else as many of the last as there are sizes, else all.
fn all_dims(c: &mut Call<'_>) -> Result<Vec<i64>, Reject> {
    if let Some(dims) = c.maybe_ints("dim")? {
        return Ok(dims);
    }
    let (x, _) = c.spectral_operand("self")?;
    let count = c.maybe_ints("s")?.map_or(c.rank(x), |s| s.len()) as i64;
    Ok((-count..0).collect())
}

/// Requested sizes, by position in the list of dimensions. -1 keeps the operand's size.
fn wanted_sizes(c: &Call<'_>) -> Result<Vec<i64>, Reject> {
    match c.maybe_int("n")? {
        Some(n) => Ok(vec![n]),
        None => Ok(c.maybe_ints("s")?.unwrap_or_default()),
    }
}

/// The scale of a transform over `n` numbers.
fn factor(c: &Call<'_>, n: f64, inverse: bool) -> Result<f64, Reject> {
    match (c.text("norm").unwrap_or("backward"), inverse) {
        ("ortho", _) => Ok(1.0 / n.sqrt()),
        ("backward", true) | ("forward", false) => Ok(1.0 / n),
        ("backward", false) | ("forward", true) => Ok(1.0),
        _ => Err(other("has a norm that is none of backward, ortho and forward")),
    }
}

/// Truncates or zero-pads a dimension to this size.
fn resized(c: &mut Call<'_>, x: ValueId, dim: usize, size: u64) -> Result<ValueId, Reject> {
    let own = c.shape_of(x)[dim];
    if own >= size {
        return Ok(a::slice_dim(c.g(), x, dim, 0, size as i64, 1)?);
    }
    let rank = c.rank(x);
    let high: Vec<i64> = (0..rank).map(|d| if d == dim { (size - own) as i64 } else { 0 }).collect();
    Ok(a::pad(c.g(), x, &vec![0; rank], &high, 0.0)?)
}

type Parts = (ValueId, Option<ValueId>);

/// The operand, with each dimension resized as requested.
fn operand(c: &mut Call<'_>, dims: &[i64]) -> Result<(Parts, Vec<usize>), Reject> {
    let (mut re, mut im) = c.spectral_operand("self")?;
    let rank = c.rank(re);
    let dims = dims.iter().map(|&d| a::axis(d, rank)).collect::<Result<Vec<_>, _>>()?;
    for (&dim, size) in dims.iter().zip(wanted_sizes(c)?) {
        let Ok(size) = u64::try_from(size) else { continue };
        re = resized(c, re, dim, size)?;
        im = im.map(|im| resized(c, im, dim, size)).transpose()?;
    }
    Ok(((re, im), dims))
}

fn of_complex(c: &mut Call<'_>, dims: Vec<i64>, inverse: bool) -> Result<Found, Reject> {
    let (mut x, dims) = operand(c, &dims)?;
    let mut by = 1.0;
    for &dim in &dims {
        by *= factor(c, c.shape_of(x.0)[dim] as f64, inverse)?;
        let [re, im] = f::fourier(c.g(), k::Operand { re: x.0, im: x.1 }, dim, inverse)?;
        x = (re, Some(im));
    }
    let pair = match x {
        (re, Some(im)) => [re, im],
        (re, None) => k::of_real(c.g(), re)?,
    };
    Ok(Found::Pair(k::scaled_by(c.g(), pair, by)?))
}

/// Transforms real numbers. Only half of the results of the last dimension are computed.
fn to_half(c: &mut Call<'_>, dims: Vec<i64>) -> Result<Found, Reject> {
    let ((x, _), dims) = operand(c, &dims)?;
    let Some((&last, others)) = dims.split_last() else { return Err(other("transforms no dimension")) };
    let mut by = factor(c, c.shape_of(x)[last] as f64, false)?;
    let mut pair = f::real_fourier(c.g(), x, last)?;
    for &dim in others.iter().rev() {
        by *= factor(c, c.shape_of(pair[0])[dim] as f64, false)?;
        pair = f::fourier(c.g(), pair, dim, false)?;
    }
    Ok(Found::Pair(k::scaled_by(c.g(), pair, by)?))
}

/// Real numbers, from half of their transform along the last dimension.
fn from_half(c: &mut Call<'_>, dims: Vec<i64>) -> Result<Found, Reject> {
    let (mut re, im) = c.spectral_operand("self")?;
    let mut im = im.map_or_else(|| a::full_like(c.g(), re, 0.0), Ok)?;
    let rank = c.rank(re);
    let dims = dims.iter().map(|&d| a::axis(d, rank)).collect::<Result<Vec<_>, _>>()?;
    let mut sizes: Vec<Option<u64>> = wanted_sizes(c)?.into_iter().map(|n| u64::try_from(n).ok()).collect();
    sizes.resize(dims.len(), None);
    let (Some((&last, others)), Some(size)) = (
        dims.split_last(),
        sizes.pop().flatten().or_else(|| {
            let own = c.shape_of(re)[*dims.last()?];
            Some(2 * own.saturating_sub(1))
        }),
    ) else {
        return Err(other("transforms no dimension"));
    };
    let mut by = factor(c, size as f64, true)?;
    for (&dim, size) in others.iter().zip(sizes) {
        if let Some(size) = size {
            (re, im) = (resized(c, re, dim, size)?, resized(c, im, dim, size)?);
        }
        by *= factor(c, c.shape_of(re)[dim] as f64, true)?;
        [re, im] = f::fourier(c.g(), [re, im], dim, true)?;
    }
    let kept = size / 2 + 1;
    (re, im) = (resized(c, re, last, kept)?, resized(c, im, last, kept)?);
    let y = f::real_inverse(c.g(), [re, im], last, size)?;
    Ok(Found::Real(if by == 1.0 { y } else { number(c, Binary::Multiply, y, by)? }))
}

/// Lowers the ops that transforms become in decomposed programs, whose norm is a number.
fn decomposed(c: &mut Call<'_>, name: &str) -> Result<Found, Reject> {
    let x = c.spectral_operand("self")?;
    let rank = c.rank(x.0);
    let dims = c.ints("dim")?.iter().map(|&d| a::axis(d, rank)).collect::<Result<Vec<_>, _>>()?;
    let Some((&last, others)) = dims.split_last() else { return Err(other("transforms no dimension")) };
    let inverse = name == "_fft_c2r" || (name == "_fft_c2c" && !c.bool("forward", true)?);
    let (mut x, mut pair, mut n) = (x, None, 1.0);
    let size = match name {
        "_fft_c2r" => c.size("last_dim_size")?,
        _ => c.shape_of(x.0)[last],
    };
    if name == "_fft_r2c" {
        n *= size as f64;
        let whole = !c.bool("onesided", true)?;
        let half = if whole { f::fourier(c.g(), x.0, last, false)? } else { f::real_fourier(c.g(), x.0, last)? };
        x = (half[0], Some(half[1]));
        pair = Some(half);
    }
    let rest: Vec<usize> = if name == "_fft_c2c" { dims.clone() } else { others.to_vec() };
    for dim in rest {
        n *= c.shape_of(x.0)[dim] as f64;
        let done = f::fourier(c.g(), k::Operand { re: x.0, im: x.1 }, dim, inverse)?;
        x = (done[0], Some(done[1]));
        pair = Some(done);
    }
    let by = |n: f64, mode: i64| match mode {
        0 => Ok(1.0),
        1 => Ok(1.0 / n.sqrt()),
        2 => Ok(1.0 / n),
        _ => Err(other("has a normalization that is none")),
    };
    let mode = c.int("normalization", 0)?;
    if name == "_fft_c2r" {
        let (re, im) = (x.0, x.1.map_or_else(|| a::full_like(c.g(), x.0, 0.0), Ok)?);
        let kept = size / 2 + 1;
        let (re, im) = (resized(c, re, last, kept)?, resized(c, im, last, kept)?);
        let y = f::real_inverse(c.g(), [re, im], last, size)?;
        let by = by(n * size as f64, mode)?;
        return Ok(Found::Real(number(c, Binary::Multiply, y, by)?));
    }
    let pair: Pair = pair.ok_or_else(|| other("transforms no dimension"))?;
    Ok(Found::Pair(k::scaled_by(c.g(), pair, by(n, mode)?)?))
}

/// The window of a short-time transform, centred in `size` zeros.
fn framed_window(c: &mut Call<'_>, size: u64) -> Result<Option<ValueId>, Reject> {
    let Some(window) = c.maybe_tensor("window")? else { return Ok(None) };
    let own = c.to.graph.ty(window).elements();
    let low = size.saturating_sub(own) / 2;
    let high = size.saturating_sub(own + low);
    Ok(Some(a::pad(c.g(), window, &[low as i64], &[high as i64], 0.0)?))
}

/// Transforms overlapping frames: `[.., T]` to `[.., frequencies, frames]`.
fn stft(c: &mut Call<'_>) -> Result<Found, Reject> {
    let mut x = c.tensor("self")?;
    let size = c.size("n_fft")?;
    let hop = u64::try_from(c.int("hop_length", size as i64 / 4)?).unwrap_or(0);
    let length = c.int("win_length", size as i64)?;
    if c.has("win_length") && !c.has("window") && length != size as i64 {
        return Err(Reject::Unsupported("with a shorter frame and no window"));
    }
    let rank = c.rank(x);
    if rank == 0 || hop == 0 {
        return Err(other("has no frames"));
    }
    if c.bool("center", false)? {
        let half = size as i64 / 2;
        if c.text("pad_mode").unwrap_or("reflect") != "reflect" {
            return Err(Reject::Unsupported("padded in this mode"));
        }
        let now = c.shape_of(x)[rank - 1] as i64;
        if half >= now {
            return Err(other("is padded by more than it has"));
        }
        let edge = |c: &mut Call<'_>, from: i64, to: i64| {
            let part = a::slice_dim(c.g(), x, rank - 1, from, to, 1)?;
            a::flip(c.g(), part, &[rank - 1])
        };
        let (before, behind) = (edge(c, 1, half + 1)?, edge(c, now - 1 - half, now - 1)?);
        x = a::concat(c.g(), &[before, x, behind], rank - 1)?;
    }
    let total = c.shape_of(x)[rank - 1];
    if total < size {
        return Err(other("has frames that are longer than the signal"));
    }
    let frames = (total - size) / hop + 1;
    let start = a::arange(c.g(), frames, 0.0, hop as f64, DType::I32)?;
    let start = a::unsqueeze(c.g(), start, 1)?;
    let within = a::arange(c.g(), size, 0.0, 1.0, DType::I32)?;
    let at = two(c, Binary::Add, start, within)?;
    let mut cut = a::take(c.g(), x, rank - 1, at, false)?;
    if let Some(window) = framed_window(c, size)? {
        let dtype = c.dtype_of(cut);
        let window = a::convert(c.g(), window, dtype)?;
        cut = two(c, Binary::Multiply, cut, window)?;
    }
    let half = c.bool("onesided", true)?;
    let mut pair = match half {
        true => f::real_fourier(c.g(), cut, rank)?,
        false => f::fourier(c.g(), cut, rank, false)?,
    };
    if c.bool("normalized", false)? {
        pair = k::scaled_by(c.g(), pair, 1.0 / (size as f64).sqrt())?;
    }
    let turned = |c: &mut Call<'_>, part| a::swap_dims(c.g(), part, -1, -2);
    Ok(Found::Pair([turned(c, pair[0])?, turned(c, pair[1])?]))
}

/// Inverts [`stft`]: frames times the window, added up and divided by the sum of the window's squares.
fn istft(c: &mut Call<'_>) -> Result<Found, Reject> {
    let (re, im) = c.spectral_operand("self")?;
    let im = im.ok_or_else(|| other("is of no complex numbers"))?;
    let size = c.size("n_fft")?;
    let hop = u64::try_from(c.int("hop_length", size as i64 / 4)?).unwrap_or(0);
    if hop == 0 || !c.bool("onesided", true)? || c.bool("return_complex", false)? {
        return Err(Reject::Unsupported("of both sides"));
    }
    let turned = |c: &mut Call<'_>, part| a::swap_dims(c.g(), part, -1, -2);
    let pair = [turned(c, re)?, turned(c, im)?];
    let shape = c.shape_of(pair[0]);
    let [ref outer @ .., frames, _] = shape[..] else { return Err(other("has no frames")) };
    let outer = outer.to_vec();
    let y = f::real_inverse(c.g(), pair, shape.len() - 1, size)?;
    let by = if c.bool("normalized", false)? { (size as f64).sqrt() } else { 1.0 };
    let mut y = number(c, Binary::Multiply, y, by / size as f64)?;
    let dtype = c.dtype_of(y);
    let window = match framed_window(c, size)? {
        Some(window) => a::convert(c.g(), window, dtype)?,
        None => a::full(c.g(), &[size], 1.0, dtype)?,
    };
    y = two(c, Binary::Multiply, y, window)?;
    let squares = two(c, Binary::Multiply, window, window)?;
    let squares = a::broadcast_to(c.g(), squares, &[frames, size])?;
    let total = size + hop * frames.saturating_sub(1);
    let start = a::arange(c.g(), frames, 0.0, hop as f64, DType::I64)?;
    let start = a::unsqueeze(c.g(), start, 1)?;
    let within = a::arange(c.g(), size, 0.0, 1.0, DType::I64)?;
    let at = two(c, Binary::Add, start, within)?;
    let at = a::reshape(c.g(), at, &[frames * size, 1])?;
    let flat: Vec<u64> = outer.iter().copied().chain([frames * size]).collect();
    let y = a::reshape(c.g(), y, &flat)?;
    let squares = a::reshape(c.g(), squares, &[frames * size])?;
    let (y, weight) = (added_up(c, y, at, total)?, added_up(c, squares, at, total)?);
    // The divisor is one where no frame reaches.
    let zero = a::full_like(c.g(), weight, 1e-11)?;
    let none = a::compare(c.g(), Direction::Lt, weight, zero)?;
    let unit = a::full_like(c.g(), weight, 1.0)?;
    let weight = a::select(c.g(), none, unit, weight)?;
    let y = two(c, Binary::Divide, y, weight)?;
    let center = c.bool("center", true)?;
    let start = if center { size as i64 / 2 } else { 0 };
    let end = match c.maybe_int("length")? {
        Some(length) => start + length,
        None if center => total as i64 - size as i64 / 2,
        None => total as i64,
    };
    if end > total as i64 {
        return Err(Reject::Unsupported("to more than the frames give"));
    }
    let last = c.rank(y) - 1;
    Ok(Found::Real(a::slice_dim(c.g(), y, last, start, end, 1)?))
}

/// Adds the elements of the last dimension at these positions of `total`.
fn added_up(c: &mut Call<'_>, x: ValueId, at: ValueId, total: u64) -> Result<ValueId, Reject> {
    let mut shape = c.shape_of(x);
    let last = shape.len() - 1;
    shape[last] = total;
    let mut slice_sizes = shape.clone();
    slice_sizes[last] = 1;
    let dims = altiplano_ir::op::GatherDims {
        offset_dims: (0..last).collect(),
        collapsed_slice_dims: vec![last],
        operand_batching_dims: Vec::new(),
        indices_batching_dims: Vec::new(),
        start_index_map: vec![last],
        index_vector_dim: 1,
        slice_sizes,
    };
    Ok(c.g().push(Op::ScatterAdd(altiplano_ir::op::ScatterAdd { dims, shape }), &[at, x])?)
}

/// Moves the middle to the front, or back.
fn shift(c: &mut Call<'_>, back: bool) -> Lowered {
    let mut x = c.first()?;
    let rank = c.rank(x);
    for dim in c.dims("dim", rank)? {
        let size = c.shape_of(x)[dim] as i64;
        let cut = if back { size / 2 } else { size - size / 2 };
        let (front, behind) = (a::slice_dim(c.g(), x, dim, 0, cut, 1)?, a::slice_dim(c.g(), x, dim, cut, size, 1)?);
        x = a::concat(c.g(), &[behind, front], dim)?;
    }
    value(x)
}

fn frequencies(c: &mut Call<'_>, half: bool) -> Lowered {
    let (n, d) = (c.size("n")?, c.float("d", 1.0)?);
    let dtype = c.dtype("dtype")?.unwrap_or(c.declared_dtype(DEFAULT_FLOAT));
    if n == 0 || n > 1 << 20 {
        return problem("counts frequencies of nothing");
    }
    let whole = |i: u64| if half || i < n.div_ceil(2) { i as f64 } else { i as f64 - n as f64 };
    let count = if half { n / 2 + 1 } else { n };
    let data = (0..count).map(|i| dtype.round(whole(i) / (n as f64 * d))).collect();
    value(c.g().constant(Literal::dense(TensorType::new(dtype, [count]), data)))
}

/// `first - (1 - first) cos(2 pi i / n)`. A periodic window ends before it repeats.
fn window(c: &mut Call<'_>, first: f64) -> Lowered {
    let size = c.size("window_length")?;
    let dtype = c.dtype("dtype")?.unwrap_or(c.declared_dtype(DEFAULT_FLOAT));
    let alpha = c.float("alpha", first)?;
    let beta = c.float("beta", 1.0 - alpha)?;
    if size > 1 << 20 || c.arguments.iter().any(|(_, item)| matches!(item, Item::Missing)) {
        return problem("has no sensible size");
    }
    let n = if c.bool("periodic", true)? { size } else { size.saturating_sub(1) }.max(1) as f64;
    let at = |i: u64| if size == 1 { 1.0 } else { alpha - beta * (std::f64::consts::TAU * i as f64 / n).cos() };
    let data = (0..size).map(|i| dtype.round(at(i))).collect();
    value(c.g().constant(Literal::dense(TensorType::new(dtype, [size]), data)))
}

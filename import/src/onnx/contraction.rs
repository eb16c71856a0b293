//! Matrix products, einsum and convolutions.

use super::call::{Call, One, attribute, bad_value, sizes};
use super::report::Reject;
use altiplano_ir::array::{self, Conv};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, DotGeneral, Op};

pub(crate) fn matmul(c: &mut Call) -> One {
    let (a, b) = (c.x(0)?, c.x(1)?);
    Ok(array::matmul(c.g(), a, b)?)
}

/// `alpha A B + beta C`.
pub(crate) fn gemm(c: &mut Call) -> One {
    let (a, b) = (c.x(0)?, c.x(1)?);
    let (alpha, beta) = (c.float("alpha", 1.0)?, c.float("beta", 1.0)?);
    let (left, right) = (c.flag("transA", false)?, c.flag("transB", false)?);
    if c.rank(a) != 2 || c.rank(b) != 2 {
        return Err(bad_value(0));
    }
    let bias = c.opt(2);
    let g = c.g();
    let mut y = array::contract(g, a, b, usize::from(!left), usize::from(right))?;
    if alpha != 1.0 {
        y = array::with_number(g, Binary::Multiply, y, alpha)?;
    }
    let Some(mut bias) = bias.filter(|_| beta != 0.0) else { return Ok(y) };
    if beta != 1.0 {
        bias = array::with_number(g, Binary::Multiply, bias, beta)?;
    }
    Ok(array::binary(g, Binary::Add, y, bias)?)
}

pub(crate) fn fused_matmul(c: &mut Call) -> One {
    let (a, b) = (c.x(0)?, c.x(1)?);
    if c.flag("transBatchA", false)? || c.flag("transBatchB", false)? {
        return Err(Reject::Unsupported("with batch dimensions moved"));
    }
    let alpha = c.float("alpha", 1.0)?;
    let mut operands = [a, b];
    for (x, name) in operands.iter_mut().zip(["transA", "transB"]) {
        if c.flag(name, false)? && c.rank(*x) > 1 {
            *x = array::swap_dims(c.g(), *x, -2, -1)?;
        }
    }
    let y = array::matmul(c.g(), operands[0], operands[1])?;
    if alpha == 1.0 { Ok(y) } else { Ok(array::with_number(c.g(), Binary::Multiply, y, alpha)?) }
}

/// The first label of dimensions in an ellipsis, beyond those of letters. The last dimension has the last label.
const ELLIPSIS: u32 = 1 << 16;

/// The labels of an operand of this rank.
fn labels(term: &str, rank: usize) -> Option<Vec<u32>> {
    let term: String = term.chars().filter(|ch| !ch.is_whitespace()).collect();
    let letters =
        |part: &str| part.chars().map(|ch| ch.is_alphabetic().then_some(ch as u32)).collect::<Option<Vec<_>>>();
    let Some((before, after)) = term.split_once("...") else {
        return letters(&term).filter(|l| l.len() == rank);
    };
    let (before, after) = (letters(before)?, letters(after)?);
    let open = rank.checked_sub(before.len() + after.len())? as u32;
    Some([before, (0..open).map(|i| ELLIPSIS + 256 - open + i).collect(), after].concat())
}

pub(crate) fn einsum(c: &mut Call) -> One {
    let bad = || attribute("equation");
    let equation = c.text("equation", "")?;
    let (left, right) = equation.split_once("->").map_or((equation, None), |(l, r)| (l, Some(r)));
    let operands = c.all()?;
    let mut terms: Vec<(ValueId, Vec<u32>)> = Vec::new();
    for (term, &x) in left.split(',').zip(&operands) {
        terms.push((x, labels(term, c.rank(x)).ok_or_else(bad)?));
    }
    if terms.is_empty() || left.split(',').count() != operands.len() {
        return Err(bad());
    }
    let mut all: Vec<u32> = terms.iter().flat_map(|(_, l)| l.clone()).collect();
    all.sort_unstable();
    let mut once = all.clone();
    once.dedup();
    let open: Vec<u32> = once.iter().copied().filter(|&l| l >= ELLIPSIS).collect();
    let result: Vec<u32> = match right {
        // Labels that occur once, in alphabetical order, after the ellipsis.
        None => {
            let single = |l: &&u32| **l < ELLIPSIS && all.iter().filter(|a| a == l).count() == 1;
            open.iter().chain(once.iter().filter(single)).copied().collect()
        }
        Some(right) => {
            let dots = if right.contains("...") { open.len() } else { 0 };
            let letters = right.chars().filter(|ch| ch.is_alphabetic()).count();
            labels(right, letters + dots).ok_or_else(bad)?
        }
    };
    if result.iter().enumerate().any(|(i, l)| !once.contains(l) || result[..i].contains(l)) {
        return Err(bad());
    }
    for (_, labels) in &terms {
        if labels.iter().enumerate().any(|(i, l)| labels[..i].contains(l)) {
            return Err(Reject::Unsupported("that takes a diagonal"));
        }
    }
    // A dimension of size 1 that is larger in another operand is broadcast, so it is removed.
    let size_of = |c: &Call, terms: &[(ValueId, Vec<u32>)], label: u32| {
        let sizes = terms.iter().filter_map(|(x, l)| Some(c.shape(*x)[l.iter().position(|&m| m == label)?]));
        sizes.max().unwrap_or(1)
    };
    for &label in &once {
        let size = size_of(c, &terms, label);
        for term in &mut terms {
            let at = term.1.iter().position(|&l| l == label);
            if let Some(at) = at.filter(|&at| size != 1 && c.shape(term.0)[at] == 1) {
                term.0 = array::squeeze(c.g(), term.0, &[at])?;
                term.1.remove(at);
            }
        }
    }
    let mut terms = terms.into_iter();
    let Some(mut first) = terms.next() else { return Err(bad()) };
    let rest: Vec<(ValueId, Vec<u32>)> = terms.collect();
    for (i, second) in rest.iter().enumerate() {
        let later = |l: u32| result.contains(&l) || rest[i + 1..].iter().any(|(_, labels)| labels.contains(&l));
        first = contract_labels(c, &first, second, &later)?;
    }
    let gone: Vec<usize> = (0..first.1.len()).filter(|&d| !result.contains(&first.1[d])).collect();
    let value = array::sum(c.g(), first.0, &gone, false)?;
    let kept: Vec<u32> = first.1.iter().copied().filter(|l| result.contains(l)).collect();
    let order: Option<Vec<usize>> = result.iter().map(|l| kept.iter().position(|k| k == l)).collect();
    Ok(array::permute(c.g(), value, &order.ok_or_else(bad)?)?)
}

/// The product of two operands, summed over the labels that are not needed later.
fn contract_labels(
    c: &mut Call,
    left: &(ValueId, Vec<u32>),
    right: &(ValueId, Vec<u32>),
    later: &dyn Fn(u32) -> bool,
) -> Result<(ValueId, Vec<u32>), Reject> {
    let mut operands = [left.clone(), right.clone()];
    // First sum over labels that only one operand has and that are not needed later.
    for i in 0..2 {
        let other = operands[1 - i].1.clone();
        let (x, labels) = &mut operands[i];
        let alone = |l: u32| !other.contains(&l) && !later(l);
        let dims: Vec<usize> = (0..labels.len()).filter(|&d| alone(labels[d])).collect();
        *x = array::sum(c.g(), *x, &dims, false)?;
        labels.retain(|&l| !alone(l));
    }
    let [(a, left), (b, right)] = operands;
    let place = |labels: &[u32], l: u32| labels.iter().position(|&m| m == l).unwrap_or(0);
    let shared: Vec<u32> = left.iter().copied().filter(|l| right.contains(l)).collect();
    let (batch, contracted): (Vec<u32>, Vec<u32>) = shared.iter().partition(|&&l| later(l));
    let dims = |labels: &[u32], of: &[u32]| of.iter().map(|&l| place(labels, l)).collect::<Vec<_>>();
    let dot = DotGeneral {
        lhs_batch: dims(&left, &batch),
        rhs_batch: dims(&right, &batch),
        lhs_contract: dims(&left, &contracted),
        rhs_contract: dims(&right, &contracted),
    };
    let value = c.g().push(Op::DotGeneral(dot), &[a, b])?;
    let own = |labels: Vec<u32>| labels.into_iter().filter(|l| !shared.contains(l)).collect::<Vec<_>>();
    Ok((value, [batch, own(left), own(right)].concat()))
}

/// A list with an entry for each spatial dimension.
pub(crate) fn spatial(c: &Call, name: &'static str, n: usize, default: u64) -> Result<Vec<u64>, Reject> {
    match c.ints_opt(name)? {
        None => Ok(vec![default; n]),
        Some(list) if list.len() == n => sizes(list, name),
        Some(_) => Err(attribute(name)),
    }
}

/// The padding before and after each spatial dimension. It is explicit, or provides a window at each stride.
pub(crate) fn padding(
    c: &Call,
    image: &[u64],
    kernel: &[u64],
    stride: &[u64],
    dilation: &[u64],
) -> Result<(Vec<i64>, Vec<i64>), Reject> {
    let n = image.len();
    let upper = match c.text("auto_pad", "NOTSET")? {
        "NOTSET" | "" => {
            let pads = c.ints_opt("pads")?.map_or_else(|| vec![0; 2 * n], <[i64]>::to_vec);
            if pads.len() != 2 * n {
                return Err(attribute("pads"));
            }
            return Ok((pads[..n].to_vec(), pads[n..].to_vec()));
        }
        "VALID" => return Ok((vec![0; n], vec![0; n])),
        "SAME_UPPER" => true,
        "SAME_LOWER" => false,
        _ => return Err(attribute("auto_pad")),
    };
    let total = |i: usize| {
        let windows = image[i].div_ceil(stride[i].max(1)).saturating_sub(1) as i128;
        let reach = kernel[i].saturating_sub(1) as i128 * dilation[i] as i128 + 1;
        (windows * stride[i] as i128 + reach - image[i] as i128).clamp(0, 1 << 40) as i64
    };
    let (less, more): (Vec<i64>, Vec<i64>) = (0..n).map(total).map(|t| (t / 2, t - t / 2)).unzip();
    Ok(if upper { (less, more) } else { (more, less) })
}

/// The spatial sizes of image and kernel, which must have the same rank.
fn image_and_kernel(c: &Call, x: ValueId, w: ValueId) -> Result<(Vec<u64>, Vec<u64>), Reject> {
    let (image, kernel) = (c.shape(x), c.shape(w));
    if image.len() < 3 || image.len() != kernel.len() {
        return Err(bad_value(1));
    }
    let said = c.ints_opt("kernel_shape")?;
    if said.is_some_and(|s| s.len() != kernel.len() - 2 || s.iter().zip(&kernel[2..]).any(|(&s, &k)| s != k as i64)) {
        return Err(attribute("kernel_shape"));
    }
    Ok((image[2..].to_vec(), kernel[2..].to_vec()))
}

fn groups(c: &Call) -> Result<u64, Reject> {
    u64::try_from(c.int("group", 1)?).map_err(|_| attribute("group"))
}

pub(crate) fn conv(c: &mut Call) -> One {
    let (x, w, bias) = (c.x(0)?, c.x(1)?, c.opt(2));
    convolved(c, x, w, bias)
}

/// A convolution of these operands with the attributes of the node.
pub(crate) fn convolved(c: &mut Call, x: ValueId, w: ValueId, bias: Option<ValueId>) -> One {
    let (image, kernel) = image_and_kernel(c, x, w)?;
    let n = image.len();
    let (stride, dilation) = (spatial(c, "strides", n, 1)?, spatial(c, "dilations", n, 1)?);
    let (pad_low, pad_high) = padding(c, &image, &kernel, &stride, &dilation)?;
    let groups = groups(c)?;
    let conv = Conv { stride, pad_low, pad_high, dilation, groups, transposed: false, output_padding: vec![0; n] };
    Ok(array::convolution(c.g(), x, w, bias, &conv)?)
}

pub(crate) fn conv_transpose(c: &mut Call) -> One {
    let (x, w) = (c.x(0)?, c.x(1)?);
    let (image, kernel) = image_and_kernel(c, x, w)?;
    let n = image.len();
    let (stride, dilation) = (spatial(c, "strides", n, 1)?, spatial(c, "dilations", n, 1)?);
    let mut output_padding = spatial(c, "output_padding", n, 0)?;
    let auto = c.text("auto_pad", "NOTSET")?;
    let shape = match c.ints_opt("output_shape")? {
        // Some exporters list batch and features as well.
        Some(shape) if shape.len() >= n => Some(sizes(&shape[shape.len() - n..], "output_shape")?),
        Some(_) => return Err(attribute("output_shape")),
        None if auto.starts_with("SAME") => {
            Some(image.iter().zip(&stride).map(|(i, s)| i.saturating_mul(*s)).collect())
        }
        None => None,
    };
    let (mut pad_low, mut pad_high) = match shape {
        None => padding(c, &image, &kernel, &stride, &dilation)?,
        Some(_) => (vec![0; n], vec![0; n]),
    };
    for (i, &wanted) in shape.iter().flatten().enumerate() {
        let reach = kernel[i].saturating_sub(1) as i128 * dilation[i] as i128 + 1;
        let most = stride[i] as i128 * (image[i] as i128 - 1) + output_padding[i] as i128 + reach;
        let total = (most - wanted as i128).clamp(-(1 << 40), 1 << 40) as i64;
        if total < 0 {
            output_padding[i] = output_padding[i].saturating_add(total.unsigned_abs());
            continue;
        }
        (pad_low[i], pad_high[i]) = (total / 2, total - total / 2);
        if auto != "SAME_UPPER" {
            (pad_low[i], pad_high[i]) = (pad_high[i], pad_low[i]);
        }
    }
    let conv = Conv { stride, pad_low, pad_high, dilation, groups: groups(c)?, transposed: true, output_padding };
    let bias = c.opt(2);
    Ok(array::convolution(c.g(), x, w, bias, &conv)?)
}

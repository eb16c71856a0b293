//! Matrix products, convolutions and attention.

use super::*;
use Lowering::Function;
use altiplano_ir::op::DotGeneral;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("linear", Function(linear)),
    ("matmul", Function(|c| product(c, "self", "other"))),
    ("linalg_matmul", Function(|c| product(c, "self", "other"))),
    ("mm", Function(|c| product(c, "self", "mat2"))),
    ("bmm", Function(|c| product(c, "self", "mat2"))),
    ("mv", Function(|c| product(c, "self", "vec"))),
    ("dot", Function(|c| product(c, "self", "tensor"))),
    ("vdot", Function(|c| product(c, "self", "other"))),
    ("addmm", Function(|c| add_product(c, "mat1", "mat2"))),
    ("addmv", Function(|c| add_product(c, "mat", "vec"))),
    ("baddbmm", Function(|c| add_product(c, "batch1", "batch2"))),
    ("outer", Function(outer)),
    ("ger", Function(outer)),
    ("einsum", Function(einsum)),
    ("conv1d", Function(convolution)),
    ("conv2d", Function(convolution)),
    ("conv3d", Function(convolution)),
    ("conv_transpose1d", Function(convolution)),
    ("conv_transpose2d", Function(convolution)),
    ("conv_transpose3d", Function(convolution)),
    ("convolution", Function(convolution)),
    ("_convolution", Function(convolution)),
    ("scaled_dot_product_attention", Function(attention)),
    ("_scaled_dot_product_flash_attention_for_cpu", Function(attention)),
    ("_scaled_dot_product_efficient_attention", Function(attention)),
    ("_scaled_dot_product_flash_attention", Function(attention)),
    ("_grouped_mm", Function(grouped)),
    ("grouped_mm", Function(grouped)),
    // Transformers calls this function on devices for which PyTorch has no such op.
    ("transformers.grouped_mm_fallback.default", Function(grouped)),
];

/// An operand of a product, in the half-precision type of autocast if that is enabled.
fn factor(c: &mut Call<'_>, name: &str) -> Result<ValueId, Reject> {
    let x = c.tensor(name)?;
    cast(c, x)
}

fn cast(c: &mut Call<'_>, x: ValueId) -> Result<ValueId, Reject> {
    match c.to.autocast {
        Some(dtype) if c.dtype_of(x).is_float() && c.dtype_of(x) != DType::F64 => Ok(a::convert(c.g(), x, dtype)?),
        _ => Ok(x),
    }
}

fn maybe_factor(c: &mut Call<'_>, name: &str) -> Result<Option<ValueId>, Reject> {
    if c.has(name) { factor(c, name).map(Some) } else { Ok(None) }
}

fn linear(c: &mut Call<'_>) -> Lowered {
    let (x, w, bias) = (factor(c, "input")?, factor(c, "weight")?, maybe_factor(c, "bias")?);
    if c.rank(w) == 1 {
        let y = a::matmul(c.g(), x, w)?;
        return value(match bias {
            Some(bias) => two(c, Binary::Add, y, bias)?,
            None => y,
        });
    }
    value(a::linear(c.g(), x, w, bias)?)
}

fn product(c: &mut Call<'_>, left: &str, right: &str) -> Lowered {
    let (mut x, mut y) = (factor(c, left)?, factor(c, right)?);
    if let Some(dtype) = c.dtype("out_dtype")? {
        x = a::convert(c.g(), x, dtype)?;
        y = a::convert(c.g(), y, dtype)?;
    }
    value(a::matmul(c.g(), x, y)?)
}

/// `beta self + alpha left right`.
fn add_product(c: &mut Call<'_>, left: &str, right: &str) -> Lowered {
    let (x, y) = (factor(c, left)?, factor(c, right)?);
    let mut sum = a::matmul(c.g(), x, y)?;
    let (alpha, beta) = (c.float("alpha", 1.0)?, c.float("beta", 1.0)?);
    if alpha != 1.0 {
        sum = number(c, Binary::Multiply, sum, alpha)?;
    }
    if beta == 0.0 {
        return value(sum);
    }
    let mut rest = factor(c, "self")?;
    if beta != 1.0 {
        rest = number(c, Binary::Multiply, rest, beta)?;
    }
    value(two(c, Binary::Add, sum, rest)?)
}

fn outer(c: &mut Call<'_>) -> Lowered {
    let all = c.promoted(&["self", "vec2"], false)?;
    let column = a::unsqueeze(c.g(), all[0], 1)?;
    value(two(c, Binary::Multiply, column, all[1])?)
}

fn convolution(c: &mut Call<'_>) -> Lowered {
    let (x, w, bias) = (factor(c, "input")?, factor(c, "weight")?, maybe_factor(c, "bias")?);
    let n = c.rank(w).saturating_sub(2);
    let transposed = c.name.starts_with("conv_transpose") || c.bool("transposed", false)?;
    let stride = c.sizes_per_dim("stride", n, 1)?;
    let dilation = c.sizes_per_dim("dilation", n, 1)?;
    let groups = u64::try_from(c.int("groups", 1)?).unwrap_or(0);
    let (pad_low, pad_high) = match c.text("padding") {
        Some("same") => {
            let kernel = c.shape_of(w)[2..].to_vec();
            let total = |(&k, &d): (&u64, &u64)| (k.saturating_sub(1)).saturating_mul(d).min(1 << 40) as i64;
            let totals: Vec<i64> = kernel.iter().zip(&dilation).map(total).collect();
            (totals.iter().map(|t| t / 2).collect(), totals.iter().map(|t| t - t / 2).collect())
        }
        Some("valid") => (vec![0; n], vec![0; n]),
        Some(_) => return Err(Reject::Unsupported("with this padding")),
        None => (c.per_dim("padding", n, 0)?, c.per_dim("padding", n, 0)?),
    };
    let output_padding = c.sizes_per_dim("output_padding", n, 0)?;
    let conv = a::Conv { stride, pad_low, pad_high, dilation, groups, transposed, output_padding };
    // An image without a batch becomes a batch of one.
    let single = c.rank(x) == n + 1;
    let x = if single { a::unsqueeze(c.g(), x, 0)? } else { x };
    let y = a::convolution(c.g(), x, w, bias, &conv)?;
    value(if single { a::squeeze(c.g(), y, &[0])? } else { y })
}

fn attention(c: &mut Call<'_>) -> Lowered {
    let [q, k, v] = [factor(c, "query")?, factor(c, "key")?, factor(c, "value")?];
    let mask = match c.maybe_tensor("attn_mask")? {
        Some(mask) => Some(mask),
        None => c.maybe_tensor("attn_bias")?,
    };
    let how = a::Attention { scale: c.maybe_float("scale")?, causal: c.bool("is_causal", false)?, mask: None };
    let dropout = c.float("dropout_p", 0.0)?;
    let shape = c.shape_of(q);
    let rank = shape.len();
    if rank < 2 {
        return problem("attends over fewer than two dimensions");
    }
    // Leading dimensions before the heads are merged into the batch.
    let four = |c: &mut Call<'_>, x: ValueId| -> Result<ValueId, Reject> {
        let own = c.shape_of(x);
        let batch = own[..own.len().saturating_sub(3)].iter().product();
        let rest = &own[own.len().saturating_sub(3)..];
        let heads = if own.len() < 3 { 1 } else { rest[0] };
        let tail = &own[own.len() - 2..];
        Ok(a::reshape(c.g(), x, &[batch, heads, tail[0], tail[1]])?)
    };
    let mask = match mask {
        Some(mask) if rank > 4 => {
            let keys = c.shape_of(k)[rank - 2];
            let mut wide = shape.clone();
            wide[rank - 1] = keys;
            let mask = a::broadcast_to(c.g(), mask, &wide)?;
            Some(four(c, mask)?)
        }
        mask => mask,
    };
    let (q, k, v) = (four(c, q)?, four(c, k)?, four(c, v)?);
    // If the heads of keys and values were repeated for the queries, the original heads are used.
    let (k, v) = match (unrepeated(c, k), unrepeated(c, v)) {
        (Some(of_k), Some(of_v)) if c.shape_of(of_k)[1] == c.shape_of(of_v)[1] => (of_k, of_v),
        _ => (k, v),
    };
    let how = a::Attention { mask, ..how };
    let y = if dropout > 0.0 {
        // Positions before heads.
        let [q, k, v] = [q, k, v].map(|x| a::permute(c.g(), x, &[0, 2, 1, 3]));
        let (q, k, v) = (q?, k?, v?);
        let scale = how.scale.unwrap_or(1.0 / (c.shape_of(q)[3].max(1) as f64).sqrt());
        let weights = a::attention_weights(c.g(), q, k, how.mask, scale, how.causal)?;
        let weights = random::dropped(c, weights, dropout)?;
        let mut mixed = c.shape_of(q);
        mixed[3] = c.shape_of(v)[3];
        let [b, s, h, d] = mixed[..] else { return problem("attends over fewer than two dimensions") };
        let mixed = a::attend(c.g(), weights, v, [b, s, h, d])?;
        a::permute(c.g(), mixed, &[0, 2, 1, 3])?
    } else {
        a::attention(c.g(), q, k, v, &how)?
    };
    let mut result = shape;
    result[rank - 1] = c.shape_of(v)[3];
    let y = a::reshape(c.g(), y, &result)?;
    if c.name == "scaled_dot_product_attention" {
        return value(y);
    }
    let first = super::super::call::Item::Tensor(c.to.memory.fresh(y));
    let unread = c.declared.len().saturating_sub(1);
    Ok(Out::Items([vec![first], vec![super::super::call::Item::Opaque; unread]].concat()))
}

/// If the heads of `[B, H, T, D]` repeat those of a `[B, Hkv, T, D]`, returns the latter.
fn unrepeated(c: &Call<'_>, x: ValueId) -> Option<ValueId> {
    let graph = &c.to.graph;
    let (Op::Reshape(_), &[spread]) = (&graph.node(x).op, graph.node(x).operands.as_slice()) else { return None };
    let (Op::BroadcastInDim(op), &[heads]) = (&graph.node(spread).op, graph.node(spread).operands.as_slice()) else {
        return None;
    };
    let (&[b, h, t, d], &[b2, kv, each, t2, d2]) = (graph.shape(x), op.shape.as_slice()) else { return None };
    let same = (b, h, t, d) == (b2, kv * each, t2, d2) && op.dims == [0, 1, 3, 4];
    (same && graph.shape(heads) == [b, kv, t, d]).then_some(heads)
}

/// Multiplies consecutive groups of rows by one matrix each: `[rows, in]` and `[groups, in, out]`. The end of
/// each group is in `offs`.
fn grouped(c: &mut Call<'_>) -> Lowered {
    let named = |c: &Call<'_>, names: [&'static str; 3]| names.into_iter().find(|n| c.has(n)).unwrap_or(names[0]);
    let (rows_name, matrices) = (named(c, ["self", "mat_a", "input"]), named(c, ["mat2", "mat_b", "weight"]));
    let (x, w) = (factor(c, rows_name)?, factor(c, matrices)?);
    let ends = c.tensor("offs")?;
    let (of_x, of_w) = (c.shape_of(x), c.shape_of(w));
    let (&[rows, _], &[_, _, _]) = (of_x.as_slice(), of_w.as_slice()) else {
        return Err(Reject::Unsupported("other than rows by groups of matrices"));
    };
    let group = a::group_of_rows(c.g(), ends, rows)?;
    let y = a::grouped_dot(c.g(), x, w, group)?;
    value(match c.maybe_tensor("bias")? {
        Some(bias) => two(c, Binary::Add, y, bias)?,
        None => y,
    })
}

/// A tensor and the labels of its dimensions.
struct Labelled {
    value: ValueId,
    labels: Vec<u32>,
}

/// Labels of an operand or result. An ellipsis stands for `hidden` dimensions, which are numbered from the
/// right.
fn labels(text: &str, rank: Option<usize>, ellipsis: &mut usize) -> Option<Vec<u32>> {
    const HIDDEN: u32 = 1 << 24;
    let (before, behind) = match text.split_once("...") {
        Some((before, behind)) => (before, Some(behind)),
        None => (text, None),
    };
    let named = before.chars().count() + behind.map_or(0, |b| b.chars().count());
    let hidden = match (behind, rank) {
        (None, _) => 0,
        (Some(_), Some(rank)) => rank.checked_sub(named)?,
        (Some(_), None) => *ellipsis,
    };
    *ellipsis = (*ellipsis).max(hidden);
    let letters =
        |text: &str| text.chars().map(|c| c.is_ascii_alphabetic().then_some(c as u32)).collect::<Option<Vec<_>>>();
    let mut all = letters(before)?;
    all.extend((0..hidden).rev().map(|i| HIDDEN + i as u32));
    all.extend(letters(behind.unwrap_or(""))?);
    Some(all)
}

fn einsum(c: &mut Call<'_>) -> Lowered {
    let values = c.tensors("tensors")?;
    let Some(equation) = c.text("equation").map(|t| t.split_whitespace().collect::<String>()) else {
        return problem("has no equation");
    };
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left.to_string(), Some(right.to_string())),
        None => (equation, None),
    };
    let mut ellipsis = 0;
    let mut operands = Vec::new();
    for (part, &x) in left.split(',').zip(&values) {
        let rank = c.rank(x);
        let labels = labels(part, Some(rank), &mut ellipsis).filter(|l| l.len() == rank);
        let labels = labels.ok_or_else(|| other("has an equation that does not fit its operands"))?;
        operands.push(Labelled { value: cast(c, x)?, labels });
    }
    if operands.len() != values.len() || operands.is_empty() || left.split(',').count() != values.len() {
        return problem("has an equation that does not fit its operands");
    }
    let result = match right {
        Some(right) => labels(&right, None, &mut ellipsis),
        None => {
            // Hidden dimensions, then labels that occur once, in alphabetical order.
            let mut all: Vec<u32> = operands.iter().flat_map(|o| o.labels.clone()).collect();
            all.sort_unstable();
            let once = |&l: &u32| all.iter().filter(|&&m| m == l).count() == 1 && l < 1 << 24;
            let mut hidden: Vec<u32> = all.iter().copied().filter(|&l| l >= 1 << 24).collect();
            hidden.dedup();
            hidden.reverse();
            Some(hidden.into_iter().chain(all.iter().copied().filter(once)).collect())
        }
    };
    let Some(result) = result else { return problem("has an equation that cannot be read") };
    let mut operands = operands.into_iter();
    let Some(first) = operands.next() else { return problem("has no operands") };
    let mut so_far = first;
    let mut later: Vec<Labelled> = operands.collect();
    while !later.is_empty() {
        let next = later.remove(0);
        let needed: Vec<u32> = result.iter().chain(later.iter().flat_map(|o| &o.labels)).copied().collect();
        so_far = contracted(c, so_far, next, &needed)?;
    }
    so_far = summed(c, so_far, &result)?;
    let at = |l: &u32| so_far.labels.iter().position(|m| m == l);
    let permutation: Option<Vec<usize>> = result.iter().map(at).collect();
    let Some(permutation) = permutation else { return problem("names a result that no operand has") };
    value(a::permute(c.g(), so_far.value, &permutation)?)
}

/// Sums out the dimensions that are not needed, and merges repeated labels into one dimension.
fn summed(c: &mut Call<'_>, x: Labelled, needed: &[u32]) -> Result<Labelled, Reject> {
    for (i, label) in x.labels.iter().enumerate() {
        if x.labels[..i].contains(label) {
            return Err(Reject::Unsupported("of a diagonal"));
        }
    }
    let dims: Vec<usize> = (0..x.labels.len()).filter(|&d| !needed.contains(&x.labels[d])).collect();
    let value = a::sum(c.g(), x.value, &dims, false)?;
    Ok(Labelled { value, labels: x.labels.into_iter().filter(|l| needed.contains(l)).collect() })
}

/// The product of two operands, summed over labels that neither the result nor a later operand needs.
fn contracted(c: &mut Call<'_>, x: Labelled, y: Labelled, needed: &[u32]) -> Result<Labelled, Reject> {
    let wanted = |other: &[u32]| [needed, other].concat();
    let (of_x, of_y) = (wanted(&y.labels), wanted(&x.labels));
    let (x, y) = (summed(c, x, &of_x)?, summed(c, y, &of_y)?);
    // A size of one broadcasts to any size, so that dimension is dropped.
    let (x, y) = (without_ones(c, x, &y)?, y);
    let (y, x) = (without_ones(c, y, &x)?, x);
    let place = |labels: &[u32], l: u32| labels.iter().position(|&m| m == l);
    let mut dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![], rhs_contract: vec![] };
    let mut batch = Vec::new();
    for (d, &label) in x.labels.iter().enumerate() {
        let Some(at) = place(&y.labels, label) else { continue };
        if needed.contains(&label) {
            batch.push(label);
            dot.lhs_batch.push(d);
            dot.rhs_batch.push(at);
        } else {
            dot.lhs_contract.push(d);
            dot.rhs_contract.push(at);
        }
    }
    let shared = |l: &&u32| x.labels.contains(l) && y.labels.contains(l);
    let left = x.labels.iter().filter(|l| !shared(l));
    let right = y.labels.iter().filter(|l| !shared(l));
    let labels = batch.iter().chain(left).chain(right).copied().collect();
    let value = c.g().push(Op::DotGeneral(dot), &[x.value, y.value])?;
    Ok(Labelled { value, labels })
}

fn without_ones(c: &mut Call<'_>, x: Labelled, y: &Labelled) -> Result<Labelled, Reject> {
    let (own, theirs) = (c.shape_of(x.value), c.shape_of(y.value));
    let stretched = |d: &usize| {
        let other = y.labels.iter().position(|l| *l == x.labels[*d]).map(|at| theirs[at]);
        own[*d] == 1 && other.is_some_and(|n| n != 1)
    };
    let dims: Vec<usize> = (0..own.len()).filter(stretched).collect();
    let value = a::squeeze(c.g(), x.value, &dims)?;
    let labels = (0..own.len()).filter(|d| !dims.contains(d)).map(|d| x.labels[d]).collect();
    Ok(Labelled { value, labels })
}

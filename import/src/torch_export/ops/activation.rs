//! Activations, softmax and norms.

use super::*;
use Lowering::Function;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("relu", Function(|c| of(c, a::relu))),
    ("relu6", Function(|c| of(c, a::relu6))),
    ("silu", Function(|c| of(c, a::silu))),
    ("hardswish", Function(|c| of(c, a::hard_swish))),
    ("mish", Function(|c| of(c, a::mish))),
    ("hardsigmoid", Function(|c| of(c, |g, x| a::hard_sigmoid(g, x, 1.0 / 6.0, 0.5)))),
    ("selu", Function(|c| of(c, |g, x| a::elu(g, x, 1.673_263_242_354_377_2, 1.050_700_987_355_480_5, 1.0)))),
    ("gelu", Function(gelu)),
    ("elu", Function(elu)),
    ("celu", Function(celu)),
    ("hardtanh", Function(hardtanh)),
    ("leaky_relu", Function(leaky_relu)),
    ("rrelu", Function(rrelu)),
    ("prelu", Function(prelu)),
    ("_prelu_kernel", Function(prelu)),
    ("softplus", Function(softplus)),
    ("log_sigmoid", Function(log_sigmoid)),
    ("threshold", Function(threshold)),
    ("hardshrink", Function(|c| shrink(c, false))),
    ("softshrink", Function(|c| shrink(c, true))),
    ("glu", Function(glu)),
    ("logit", Function(logit)),
    ("softmax", Function(|c| soft(c, a::softmax))),
    ("_softmax", Function(|c| soft(c, a::softmax))),
    ("_safe_softmax", Function(|c| soft(c, a::softmax))),
    ("special_softmax", Function(|c| soft(c, a::softmax))),
    ("log_softmax", Function(|c| soft(c, a::log_softmax))),
    ("_log_softmax", Function(|c| soft(c, a::log_softmax))),
    ("special_log_softmax", Function(|c| soft(c, a::log_softmax))),
    ("layer_norm", Function(layer_norm)),
    ("native_layer_norm", Function(layer_norm)),
    ("rms_norm", Function(rms_norm)),
    ("_fused_rms_norm", Function(rms_norm)),
    ("group_norm", Function(group_norm)),
    ("native_group_norm", Function(group_norm)),
    ("instance_norm", Function(instance_norm)),
    ("batch_norm", Function(batch_norm)),
    ("native_batch_norm", Function(batch_norm)),
    ("_native_batch_norm_legit", Function(batch_norm)),
    ("_native_batch_norm_legit_functional", Function(batch_norm)),
    ("_native_batch_norm_legit_no_training", Function(batch_norm)),
    ("_batch_norm_no_update", Function(batch_norm)),
    ("_batch_norm_with_update", Function(batch_norm)),
    ("cudnn_batch_norm", Function(batch_norm)),
];

fn of(c: &mut Call<'_>, f: impl Fn(&mut altiplano_ir::graph::Graph, ValueId) -> a::Built) -> Lowered {
    let x = c.first()?;
    value(f(c.g(), x)?)
}

fn gelu(c: &mut Call<'_>) -> Lowered {
    let tanh = c.text("approximate") == Some("tanh");
    of(c, if tanh { a::gelu_tanh } else { a::gelu_erf })
}

fn elu(c: &mut Call<'_>) -> Lowered {
    let (alpha, scale, input) = (c.float("alpha", 1.0)?, c.float("scale", 1.0)?, c.float("input_scale", 1.0)?);
    of(c, |g, x| a::elu(g, x, alpha, scale, input))
}

fn celu(c: &mut Call<'_>) -> Lowered {
    let alpha = c.float("alpha", 1.0)?;
    of(c, |g, x| a::elu(g, x, alpha, 1.0, 1.0 / alpha))
}

fn hardtanh(c: &mut Call<'_>) -> Lowered {
    let (low, high) = (c.float("min_val", -1.0)?, c.float("max_val", 1.0)?);
    of(c, |g, x| a::clamp(g, x, Some(low), Some(high)))
}

fn leaky_relu(c: &mut Call<'_>) -> Lowered {
    let slope = c.float("negative_slope", 0.01)?;
    of(c, |g, x| a::leaky_relu(g, x, slope))
}

fn rrelu(c: &mut Call<'_>) -> Lowered {
    let (lower, upper) = (c.float("lower", 0.125)?, c.float("upper", 1.0 / 3.0)?);
    if c.bool("training", false)? {
        // Draws a random slope for each element.
        let x = c.first()?;
        let slopes = random::between(c, x, lower, upper)?;
        let low = two(c, Binary::Multiply, x, slopes)?;
        let zero = a::full_like(c.g(), x, 0.0)?;
        let positive = a::compare(c.g(), Direction::Ge, x, zero)?;
        return value(a::select(c.g(), positive, x, low)?);
    }
    let slope = (lower + upper) / 2.0;
    of(c, |g, x| a::leaky_relu(g, x, slope))
}

/// PReLU, with a slope for each feature in dimension 1.
fn prelu(c: &mut Call<'_>) -> Lowered {
    let (x, weight) = (c.first()?, c.tensor("weight")?);
    let shape = c.shape_of(x);
    let size = c.to.graph.ty(weight).elements();
    let mut slopes = vec![1; shape.len()];
    if size > 1 {
        match slopes.get_mut(1) {
            Some(features) => *features = size,
            None => return problem("has more slopes than features"),
        }
    }
    let weight = a::reshape(c.g(), weight, &slopes)?;
    let low = two(c, Binary::Multiply, x, weight)?;
    let zero = a::full_like(c.g(), x, 0.0)?;
    let positive = a::compare(c.g(), Direction::Gt, x, zero)?;
    value(a::select(c.g(), positive, x, low)?)
}

fn softplus(c: &mut Call<'_>) -> Lowered {
    let (beta, threshold) = (c.float("beta", 1.0)?, c.float("threshold", 20.0)?);
    of(c, |g, x| a::softplus(g, x, beta, threshold))
}

fn log_sigmoid(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let negative = one(c, Unary::Negate, x)?;
    let soft = a::softplus(c.g(), negative, 1.0, f64::INFINITY)?;
    value(one(c, Unary::Negate, soft)?)
}

fn threshold(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let (limit, put) = (c.float("threshold", 0.0)?, c.float("value", 0.0)?);
    let limit = a::full_like(c.g(), x, limit)?;
    let above = a::compare(c.g(), Direction::Gt, x, limit)?;
    let put = a::full_like(c.g(), x, put)?;
    value(a::select(c.g(), above, x, put)?)
}

fn shrink(c: &mut Call<'_>, soft: bool) -> Lowered {
    let x = c.first()?;
    let by = c.float("lambd", 0.5)?;
    let size = one(c, Unary::Abs, x)?;
    let limit = a::full_like(c.g(), x, by)?;
    let far = a::compare(c.g(), Direction::Gt, size, limit)?;
    let kept = match soft {
        true => {
            let sign = one(c, Unary::Sign, x)?;
            let less = number(c, Binary::Multiply, sign, by)?;
            two(c, Binary::Subtract, x, less)?
        }
        false => x,
    };
    let zero = a::full_like(c.g(), x, 0.0)?;
    value(a::select(c.g(), far, kept, zero)?)
}

fn glu(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let dim = c.dim("dim", -1, rank)?;
    let Some(&size) = c.shape_of(x).get(dim) else { return problem("splits a scalar") };
    let parts = a::split(c.g(), x, dim, &[size / 2, size - size / 2])?;
    let gate = one(c, Unary::Logistic, parts[1])?;
    value(two(c, Binary::Multiply, parts[0], gate)?)
}

fn logit(c: &mut Call<'_>) -> Lowered {
    let mut x = c.first()?;
    if let Some(eps) = c.maybe_float("eps")? {
        x = a::clamp(c.g(), x, Some(eps), Some(1.0 - eps))?;
    }
    let unit = a::full_like(c.g(), x, 1.0)?;
    let rest = two(c, Binary::Subtract, unit, x)?;
    let odds = two(c, Binary::Divide, x, rest)?;
    value(one(c, Unary::Log, odds)?)
}

fn soft(c: &mut Call<'_>, f: fn(&mut altiplano_ir::graph::Graph, ValueId, usize) -> a::Built) -> Lowered {
    let mut x = c.float_tensor()?;
    if let Some(dtype) = c.dtype("dtype")? {
        x = a::convert(c.g(), x, dtype)?;
    } else if c.bool("half_to_float", false)? {
        x = a::convert(c.g(), x, DType::F32)?;
    }
    let rank = c.rank(x);
    let dim = c.dim("dim", -1, rank)?;
    if rank == 0 {
        x = a::reshape(c.g(), x, &[1])?;
    }
    let y = f(c.g(), x, dim)?;
    if rank == 0 { value(a::reshape(c.g(), y, &[])?) } else { value(y) }
}

/// Adds placeholders for the statistics that PyTorch's core norms also return. Only PyTorch's own gradients
/// read them.
fn with_unread_statistics(c: &mut Call<'_>, y: ValueId) -> Lowered {
    let tensor = c.to.memory.fresh(y);
    let unread = c.declared.len().saturating_sub(1);
    let mut items = vec![super::super::call::Item::Tensor(tensor)];
    items.resize(unread + 1, super::super::call::Item::Opaque);
    Ok(Out::Items(items))
}

fn layer_norm(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let dims = c.ints("normalized_shape")?.len();
    let (weight, bias, eps) = (c.maybe_tensor("weight")?, c.maybe_tensor("bias")?, c.float("eps", 1e-5)?);
    let y = a::layer_norm(c.g(), x, dims, weight, bias, eps)?;
    with_unread_statistics(c, y)
}

fn rms_norm(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let dims = c.ints("normalized_shape")?.len();
    let weight = c.maybe_tensor("weight")?;
    let dtype = c.dtype_of(x);
    let smallest = dtype.float_format().map_or(f64::EPSILON, |f| 2f64.powi(-(f.mantissa_bits as i32)));
    let eps = c.float("eps", smallest)?;
    let y = a::rms_norm(c.g(), x, dims, weight, eps)?;
    let y = a::convert(c.g(), y, dtype)?;
    with_unread_statistics(c, y)
}

fn group_norm(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let groups = c.size(if c.has("num_groups") { "num_groups" } else { "group" })?;
    let (weight, bias, eps) = (c.maybe_tensor("weight")?, c.maybe_tensor("bias")?, c.float("eps", 1e-5)?);
    let y = a::group_norm(c.g(), x, groups, weight, bias, eps)?;
    with_unread_statistics(c, y)
}

fn instance_norm(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let (weight, bias, eps) = (c.maybe_tensor("weight")?, c.maybe_tensor("bias")?, c.float("eps", 1e-5)?);
    if !c.bool("use_input_stats", true)? {
        let (mean, variance) = (c.tensor("running_mean")?, c.tensor("running_var")?);
        return value(a::batch_norm(c.g(), x, 1, weight, bias, mean, variance, eps)?);
    }
    value(a::instance_norm(c.g(), x, weight, bias, eps)?)
}

/// Batch norm, with the statistics of the batch in training. The update of the running statistics is not part
/// of a step's loss.
fn batch_norm(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let name = c.name;
    let default = matches!(name, "_batch_norm_with_update" | "cudnn_batch_norm");
    let training = c.bool("training", default)? || !c.has("running_mean");
    let eps = if c.has("eps") { c.float("eps", 1e-5)? } else { c.float("epsilon", 1e-5)? };
    let (weight, bias) = (c.maybe_tensor("weight")?, c.maybe_tensor("bias")?);
    let y = if training {
        a::batch_norm_training(c.g(), x, 1, weight, bias, eps)?
    } else {
        let (mean, variance) = (c.tensor("running_mean")?, c.tensor("running_var")?);
        a::batch_norm(c.g(), x, 1, weight, bias, mean, variance, eps)?
    };
    with_unread_statistics(c, y)
}

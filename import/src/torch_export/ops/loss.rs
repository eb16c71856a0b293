//! Lowers losses.

use super::*;
use Lowering::Function;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("cross_entropy_loss", Function(cross_entropy)),
    ("nll_loss", Function(nll)),
    ("nll_loss2d", Function(nll)),
    ("nll_loss_nd", Function(nll)),
    ("nll_loss_forward", Function(nll)),
    ("nll_loss2d_forward", Function(nll)),
    ("mse_loss", Function(|c| distance(c, |c, d| two(c, Binary::Multiply, d, d)))),
    ("l1_loss", Function(|c| distance(c, |c, d| one(c, Unary::Abs, d)))),
    ("smooth_l1_loss", Function(smooth_l1)),
    ("huber_loss", Function(huber)),
    ("binary_cross_entropy", Function(binary_cross_entropy)),
    ("binary_cross_entropy_with_logits", Function(binary_cross_entropy_with_logits)),
    ("kl_div", Function(kl_div)),
    ("soft_margin_loss", Function(soft_margin)),
    ("cosine_similarity", Function(cosine_similarity)),
    ("pairwise_distance", Function(pairwise_distance)),
    ("triplet_margin_loss", Function(triplet_margin)),
    ("cosine_embedding_loss", Function(cosine_embedding)),
    ("margin_ranking_loss", Function(margin_ranking)),
    ("hinge_embedding_loss", Function(hinge_embedding)),
    ("poisson_nll_loss", Function(poisson_nll)),
];

const MEAN: i64 = 1;
const SUM: i64 = 2;

fn all_dims(c: &mut Call<'_>, x: ValueId) -> Vec<usize> {
    (0..c.rank(x)).collect()
}

fn reduced(c: &mut Call<'_>, x: ValueId) -> Lowered {
    let dims = all_dims(c, x);
    match c.int("reduction", MEAN)? {
        MEAN => value(a::mean(c.g(), x, &dims, false)?),
        SUM => value(a::sum(c.g(), x, &dims, false)?),
        _ => value(x),
    }
}

fn difference(c: &mut Call<'_>) -> Result<ValueId, Reject> {
    let both = c.promoted(&["self", "target"], true)?;
    two(c, Binary::Subtract, both[0], both[1])
}

fn distance(c: &mut Call<'_>, f: impl Fn(&mut Call<'_>, ValueId) -> Result<ValueId, Reject>) -> Lowered {
    let d = difference(c)?;
    let y = f(c, d)?;
    reduced(c, y)
}

/// A loss that is quadratic near zero, `square` times the squared difference. Beyond `edge` it is linear with
/// slope `slope`, lowered by `low` to be continuous.
fn rounded_corner(c: &mut Call<'_>, edge: f64, square: f64, slope: f64, low: f64) -> Lowered {
    let d = difference(c)?;
    let size = one(c, Unary::Abs, d)?;
    let limit = a::full_like(c.g(), size, edge)?;
    let near = a::compare(c.g(), Direction::Lt, size, limit)?;
    let parabola = two(c, Binary::Multiply, d, d)?;
    let parabola = number(c, Binary::Multiply, parabola, square)?;
    let line = number(c, Binary::Multiply, size, slope)?;
    let line = number(c, Binary::Subtract, line, low)?;
    let y = a::select(c.g(), near, parabola, line)?;
    reduced(c, y)
}

fn smooth_l1(c: &mut Call<'_>) -> Lowered {
    let beta = c.float("beta", 1.0)?;
    if beta == 0.0 {
        return distance(c, |c, d| one(c, Unary::Abs, d));
    }
    rounded_corner(c, beta, 0.5 / beta, 1.0, 0.5 * beta)
}

fn huber(c: &mut Call<'_>) -> Lowered {
    let delta = c.float("delta", 1.0)?;
    rounded_corner(c, delta, 0.5, delta, 0.5 * delta * delta)
}

fn cross_entropy(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let target = c.tensor("target")?;
    let (rank, dtype) = (c.rank(x), c.dtype_of(x));
    if rank == 0 {
        return problem("has no classes");
    }
    let dim = usize::from(rank > 1);
    let log = a::log_softmax(c.g(), x, dim)?;
    let smoothing = c.float("label_smoothing", 0.0)?;
    if c.dtype_of(target).is_float() && c.shape_of(target) == c.shape_of(x) {
        return of_probabilities(c, log, target, dim, smoothing);
    }
    let picked = Picked::new(c, log, target, dim)?;
    if smoothing == 0.0 {
        return picked.loss(c, dtype);
    }
    // Label smoothing adds a fraction of the mean over all classes.
    let classes = c.shape_of(log)[dim] as f64;
    let weighted = match per_class(c, log, dim)? {
        Some(weight) => two(c, Binary::Multiply, log, weight)?,
        None => log,
    };
    let spread = a::sum(c.g(), weighted, &[dim], false)?;
    let spread = one(c, Unary::Negate, spread)?;
    let spread = picked.kept(c, spread)?;
    let (hit, even) = (1.0 - smoothing, smoothing / classes);
    let hit = number(c, Binary::Multiply, picked.losses, hit)?;
    let even = number(c, Binary::Multiply, spread, even)?;
    let both = two(c, Binary::Add, hit, even)?;
    Picked { losses: both, ..picked }.loss(c, dtype)
}

/// The weight of each class, broadcastable to the logits.
fn per_class(c: &mut Call<'_>, log: ValueId, dim: usize) -> Result<Option<ValueId>, Reject> {
    let Some(weight) = c.maybe_tensor("weight")? else { return Ok(None) };
    let (rank, dtype) = (c.rank(log), c.dtype_of(log));
    let mut shape = vec![1; rank - dim];
    shape[0] = c.to.graph.ty(weight).elements();
    let weight = a::convert(c.g(), weight, dtype)?;
    Ok(Some(a::reshape(c.g(), weight, &shape)?))
}

fn of_probabilities(c: &mut Call<'_>, log: ValueId, target: ValueId, dim: usize, smoothing: f64) -> Lowered {
    let dtype = c.dtype_of(log);
    let mut target = a::convert(c.g(), target, dtype)?;
    if smoothing > 0.0 {
        let classes = c.shape_of(log)[dim] as f64;
        target = number(c, Binary::Multiply, target, 1.0 - smoothing)?;
        target = number(c, Binary::Add, target, smoothing / classes)?;
    }
    let mut terms = two(c, Binary::Multiply, log, target)?;
    if let Some(weight) = per_class(c, log, dim)? {
        terms = two(c, Binary::Multiply, terms, weight)?;
    }
    let total = a::sum(c.g(), terms, &[dim], false)?;
    let losses = one(c, Unary::Negate, total)?;
    // This is a mean over samples, not over elements.
    reduced(c, losses)
}

/// The losses of labels. Some labels may be ignored.
struct Picked {
    losses: ValueId,
    /// A mask of the labels that count; `None` if the program shows that all do.
    keep: Option<ValueId>,
    /// The weight of each label.
    weights: Option<ValueId>,
}

impl Picked {
    fn new(c: &mut Call<'_>, log: ValueId, target: ValueId, dim: usize) -> Result<Picked, Reject> {
        let dtype = c.dtype_of(log);
        let ignored = c.int("ignore_index", -100)?;
        let ignored_label = a::full_like(c.g(), target, ignored as f64)?;
        let keep = a::compare(c.g(), Direction::Ne, target, ignored_label)?;
        let zero = a::full_like(c.g(), target, 0.0)?;
        let label = a::select(c.g(), keep, target, zero)?;
        let at = a::unsqueeze(c.g(), label, dim as i64)?;
        let hit = a::take_along(c.g(), log, dim, at, false)?;
        let hit = a::squeeze(c.g(), hit, &[dim])?;
        let losses = one(c, Unary::Negate, hit)?;
        let weights = match c.maybe_tensor("weight")? {
            Some(weight) => {
                let weight = a::convert(c.g(), weight, dtype)?;
                Some(a::take(c.g(), weight, 0, label, false)?)
            }
            None => None,
        };
        let picked = Picked { losses, keep: Some(keep), weights };
        let losses = match weights {
            Some(weights) => two(c, Binary::Multiply, losses, weights)?,
            None => losses,
        };
        let losses = picked.kept(c, losses)?;
        Ok(Picked { losses, ..picked })
    }

    /// Zeros the elements of ignored labels.
    fn kept(&self, c: &mut Call<'_>, x: ValueId) -> Result<ValueId, Reject> {
        let Some(keep) = self.keep else { return Ok(x) };
        let zero = a::full_like(c.g(), x, 0.0)?;
        Ok(a::select(c.g(), keep, x, zero)?)
    }

    fn loss(self, c: &mut Call<'_>, dtype: DType) -> Lowered {
        let dims = all_dims(c, self.losses);
        let total = match c.int("reduction", MEAN)? {
            MEAN | SUM => a::sum(c.g(), self.losses, &dims, false)?,
            _ => return value(a::convert(c.g(), self.losses, dtype)?),
        };
        if c.int("reduction", MEAN)? == SUM {
            return value(a::convert(c.g(), total, dtype)?);
        }
        let like = c.dtype_of(total);
        let count = match (self.weights, self.keep) {
            (Some(weights), _) => {
                let weights = self.kept(c, weights)?;
                a::sum(c.g(), weights, &dims, false)?
            }
            (None, Some(keep)) => {
                let ones = a::convert(c.g(), keep, like)?;
                a::sum(c.g(), ones, &dims, false)?
            }
            (None, None) => {
                let n = c.to.graph.ty(self.losses).elements();
                a::scalar(c.g(), n as f64, like)?
            }
        };
        let mean = two(c, Binary::Divide, total, count)?;
        value(a::convert(c.g(), mean, dtype)?)
    }
}

/// The negative log-likelihood, from log-probabilities.
fn nll(c: &mut Call<'_>) -> Lowered {
    let log = c.first()?;
    let target = c.tensor("target")?;
    let (rank, dtype) = (c.rank(log), c.dtype_of(log));
    if rank == 0 {
        return problem("has no classes");
    }
    let picked = Picked::new(c, log, target, usize::from(rank > 1))?;
    match picked.loss(c, dtype)? {
        Out::Value(y) if c.name.ends_with("forward") => {
            let first = super::super::call::Item::Tensor(c.to.memory.fresh(y));
            Ok(Out::Items(vec![first, super::super::call::Item::Opaque]))
        }
        out => Ok(out),
    }
}

fn binary_cross_entropy(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "target"], true)?;
    let (p, t) = (both[0], both[1]);
    let unit = a::full_like(c.g(), p, 1.0)?;
    let (q, not_t) = (two(c, Binary::Subtract, unit, p)?, two(c, Binary::Subtract, unit, t)?);
    let mut sides = Vec::new();
    for (p, t) in [(p, t), (q, not_t)] {
        let log = one(c, Unary::Log, p)?;
        // PyTorch bounds logarithms from below.
        let log = number(c, Binary::Maximum, log, -100.0)?;
        sides.push(two(c, Binary::Multiply, t, log)?);
    }
    let sum = two(c, Binary::Add, sides[0], sides[1])?;
    let y = one(c, Unary::Negate, sum)?;
    weighted(c, y)
}

fn weighted(c: &mut Call<'_>, y: ValueId) -> Lowered {
    let y = match c.maybe_tensor("weight")? {
        Some(weight) => two(c, Binary::Multiply, y, weight)?,
        None => y,
    };
    reduced(c, y)
}

/// `(1 - t) x + (1 + (w - 1) t) softplus(-x)`, which does not overflow.
fn binary_cross_entropy_with_logits(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "target"], true)?;
    let (x, t) = (both[0], both[1]);
    let unit = a::full_like(c.g(), t, 1.0)?;
    let rest = two(c, Binary::Subtract, unit, t)?;
    let linear = two(c, Binary::Multiply, rest, x)?;
    let negative = one(c, Unary::Negate, x)?;
    let mut soft = a::softplus(c.g(), negative, 1.0, f64::INFINITY)?;
    if let Some(w) = c.maybe_tensor("pos_weight")? {
        let w = number(c, Binary::Subtract, w, 1.0)?;
        let more = two(c, Binary::Multiply, w, t)?;
        let more = number(c, Binary::Add, more, 1.0)?;
        soft = two(c, Binary::Multiply, soft, more)?;
    }
    let y = two(c, Binary::Add, linear, soft)?;
    weighted(c, y)
}

fn kl_div(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "target"], true)?;
    let (x, t) = (both[0], both[1]);
    let y = if c.bool("log_target", false)? {
        let p = one(c, Unary::Exponential, t)?;
        let apart = two(c, Binary::Subtract, t, x)?;
        two(c, Binary::Multiply, p, apart)?
    } else {
        let zero = a::full_like(c.g(), t, 0.0)?;
        let unit = a::full_like(c.g(), t, 1.0)?;
        let none = a::compare(c.g(), Direction::Eq, t, zero)?;
        let safe = a::select(c.g(), none, unit, t)?;
        let log = one(c, Unary::Log, safe)?;
        let apart = two(c, Binary::Subtract, log, x)?;
        two(c, Binary::Multiply, t, apart)?
    };
    reduced(c, y)
}

fn soft_margin(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "target"], true)?;
    let agreement = two(c, Binary::Multiply, both[0], both[1])?;
    let against = one(c, Unary::Negate, agreement)?;
    let y = a::softplus(c.g(), against, 1.0, f64::INFINITY)?;
    reduced(c, y)
}

fn cosine_similarity(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["x1", "x2"], true)?;
    let (x, y) = a::broadcast(c.g(), both[0], both[1])?;
    let rank = c.rank(x);
    let dim = c.dim("dim", 1, rank)?;
    let eps = c.float("eps", 1e-8)?;
    let product = two(c, Binary::Multiply, x, y)?;
    let mut result = a::sum(c.g(), product, &[dim], false)?;
    for v in [x, y] {
        let square = two(c, Binary::Multiply, v, v)?;
        let total = a::sum(c.g(), square, &[dim], false)?;
        let norm = one(c, Unary::Sqrt, total)?;
        let norm = number(c, Binary::Maximum, norm, eps)?;
        result = two(c, Binary::Divide, result, norm)?;
    }
    value(result)
}

fn pairwise_distance(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["x1", "x2"], true)?;
    let keep = c.bool("keepdim", false)?;
    value(distance_between(c, both[0], both[1], keep)?)
}

/// The norm of the difference along the last dimension.
fn distance_between(c: &mut Call<'_>, x: ValueId, y: ValueId, keep: bool) -> Result<ValueId, Reject> {
    let apart = two(c, Binary::Subtract, x, y)?;
    let apart = number(c, Binary::Add, apart, c.float("eps", 1e-6)?)?;
    if c.float("p", 2.0)? != 2.0 {
        return Err(Reject::Unsupported("of another order than 2"));
    }
    let square = two(c, Binary::Multiply, apart, apart)?;
    let Some(last) = c.rank(square).checked_sub(1) else { return problem("measures scalars") };
    let total = a::sum(c.g(), square, &[last], keep)?;
    one(c, Unary::Sqrt, total)
}

/// `max(x + margin, 0)`.
fn beyond_margin(c: &mut Call<'_>, x: ValueId, margin: f64) -> Result<ValueId, Reject> {
    let x = number(c, Binary::Add, x, margin)?;
    Ok(a::relu(c.g(), x)?)
}

fn triplet_margin(c: &mut Call<'_>) -> Lowered {
    let all = c.promoted(&["anchor", "positive", "negative"], true)?;
    let near = distance_between(c, all[0], all[1], false)?;
    let mut far = distance_between(c, all[0], all[2], false)?;
    if c.bool("swap", false)? {
        let other = distance_between(c, all[1], all[2], false)?;
        far = two(c, Binary::Minimum, far, other)?;
    }
    let apart = two(c, Binary::Subtract, near, far)?;
    let y = beyond_margin(c, apart, c.float("margin", 1.0)?)?;
    reduced(c, y)
}

/// `same` where the target is 1, `different` where it is -1.
fn by_sign(c: &mut Call<'_>, target: ValueId, [same, different]: [ValueId; 2]) -> Lowered {
    let mut sides = Vec::new();
    for (x, sign) in [(same, 1.0), (different, -1.0)] {
        let wanted = a::full_like(c.g(), target, sign)?;
        let chosen = a::compare(c.g(), Direction::Eq, target, wanted)?;
        let zero = a::full_like(c.g(), x, 0.0)?;
        sides.push(a::select(c.g(), chosen, x, zero)?);
    }
    let y = two(c, Binary::Add, sides[0], sides[1])?;
    reduced(c, y)
}

fn cosine_embedding(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["input1", "input2"], true)?;
    let (x, y) = a::broadcast(c.g(), both[0], both[1])?;
    let target = c.tensor("target")?;
    let dims = [c.rank(target)];
    let total = |c: &mut Call<'_>, x, y| {
        let product = two(c, Binary::Multiply, x, y)?;
        Ok::<_, Reject>(a::sum(c.g(), product, &dims, false)?)
    };
    let product = total(c, x, y)?;
    let mut sizes = Vec::new();
    for v in [x, y] {
        let square = total(c, v, v)?;
        sizes.push(number(c, Binary::Add, square, 1e-12)?);
    }
    let size = two(c, Binary::Multiply, sizes[0], sizes[1])?;
    let size = one(c, Unary::Sqrt, size)?;
    let cosine = two(c, Binary::Divide, product, size)?;
    let different = beyond_margin(c, cosine, -c.float("margin", 0.0)?)?;
    let unit = a::full_like(c.g(), cosine, 1.0)?;
    let same = two(c, Binary::Subtract, unit, cosine)?;
    by_sign(c, target, [same, different])
}

fn margin_ranking(c: &mut Call<'_>) -> Lowered {
    let all = c.promoted(&["input1", "input2", "target"], true)?;
    let apart = two(c, Binary::Subtract, all[1], all[0])?;
    let apart = two(c, Binary::Multiply, all[2], apart)?;
    let y = beyond_margin(c, apart, c.float("margin", 0.0)?)?;
    reduced(c, y)
}

fn hinge_embedding(c: &mut Call<'_>) -> Lowered {
    let (x, target) = (c.float_tensor()?, c.tensor("target")?);
    let negative = one(c, Unary::Negate, x)?;
    let different = beyond_margin(c, negative, c.float("margin", 1.0)?)?;
    by_sign(c, target, [x, different])
}

/// `exp(x) - t x`, or `x - t log(x + eps)`. If requested, adds Stirling's approximation of the factorial for
/// targets above 1.
fn poisson_nll(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["input", "target"], true)?;
    let (x, t) = (both[0], both[1]);
    let (mean, log) = if c.bool("log_input", true)? {
        (one(c, Unary::Exponential, x)?, x)
    } else {
        let above = number(c, Binary::Add, x, c.float("eps", 1e-8)?)?;
        (x, one(c, Unary::Log, above)?)
    };
    let gain = two(c, Binary::Multiply, t, log)?;
    let mut y = two(c, Binary::Subtract, mean, gain)?;
    if c.bool("full", false)? {
        let limit = a::full_like(c.g(), t, 1.0)?;
        let counts = a::compare(c.g(), Direction::Gt, t, limit)?;
        let safe = a::select(c.g(), counts, t, limit)?;
        let log = one(c, Unary::Log, safe)?;
        let half = number(c, Binary::Add, safe, 0.5)?;
        let power = two(c, Binary::Multiply, half, log)?;
        let factorial = two(c, Binary::Subtract, power, safe)?;
        let factorial = number(c, Binary::Add, factorial, (2.0 * std::f64::consts::PI).ln() / 2.0)?;
        let zero = a::full_like(c.g(), factorial, 0.0)?;
        let factorial = a::select(c.g(), counts, factorial, zero)?;
        y = two(c, Binary::Add, y, factorial)?;
    }
    reduced(c, y)
}

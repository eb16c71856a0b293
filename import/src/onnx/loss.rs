//! Losses of class scores.

use super::call::{Call, Many, One, attribute};
use super::report::Reject;
use altiplano_ir::array;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Direction, Unary};

pub(crate) fn softmax_cross_entropy(c: &mut Call) -> Many {
    let (scores, labels) = (c.x(0)?, c.x(1)?);
    let reduction = c.text("reduction", "mean")?;
    let plain = c.opt(2).is_none() && c.int_opt("ignore_index")?.is_none() && reduction == "mean";
    if plain && !c.wants(1) && c.rank(scores) > 1 {
        return Ok(vec![array::cross_entropy(c.g(), scores, labels, 1)?]);
    }
    let log = array::log_softmax(c.g(), scores, 1)?;
    let loss = of_log(c, log, labels)?;
    Ok(vec![loss, log])
}

pub(crate) fn negative_log_likelihood(c: &mut Call) -> One {
    let (log, labels) = (c.x(0)?, c.x(1)?);
    of_log(c, log, labels)
}

/// `-weight[label] log[label]`, without ignored labels. The mean is weighted.
fn of_log(c: &mut Call, log: ValueId, labels: ValueId) -> One {
    let reduction = c.text("reduction", "mean")?;
    let ignored = c.int_opt("ignore_index")?;
    let weights = c.opt(2);
    let dtype = c.dtype(log);
    let rank = c.rank(labels);
    if c.rank(log) < 2 {
        return Err(Reject::Invalid(altiplano_ir::op::ShapeError::Attribute("scores need a batch and classes").into()));
    }
    let g = c.g();
    let mut labels = labels;
    let mut kept: Option<ValueId> = None;
    if let Some(ignored) = ignored {
        let other = array::full_like(g, labels, ignored as f64)?;
        let seen = array::compare(g, Direction::Ne, labels, other)?;
        let zero = array::full_like(g, labels, 0.0)?;
        labels = array::select(g, seen, labels, zero)?;
        kept = Some(array::convert(g, seen, dtype)?);
    }
    let places = array::unsqueeze(g, labels, 1)?;
    let hit = array::take_along(g, log, 1, places, false)?;
    let hit = array::squeeze(g, hit, &[1])?;
    let mut loss = array::unary(g, Unary::Negate, hit)?;
    let mut counted = kept;
    if let Some(weights) = weights {
        let each = array::take(g, weights, 0, labels, false)?;
        counted = Some(match kept {
            Some(kept) => array::binary(g, Binary::Multiply, each, kept)?,
            None => each,
        });
    }
    if let Some(counted) = counted {
        loss = array::binary(g, Binary::Multiply, loss, counted)?;
    }
    let all: Vec<usize> = (0..rank).collect();
    Ok(match (reduction, counted) {
        ("none", _) => loss,
        ("sum", _) => array::sum(g, loss, &all, false)?,
        ("mean", None) => array::mean(g, loss, &all, false)?,
        ("mean", Some(counted)) => {
            let total = array::sum(g, loss, &all, false)?;
            let count = array::sum(g, counted, &all, false)?;
            array::binary(g, Binary::Divide, total, count)?
        }
        _ => return Err(attribute("reduction")),
    })
}

//! Branches and loops. If a condition is known, only the selected branch is used. Otherwise both branches are computed
//! and one result is selected. Loops with a known number of iterations are unrolled.

use super::call::{Call, Many, attribute, bad_value};
use super::report::{ProblemKind, Reject};
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;

pub(crate) fn branch(c: &mut Call) -> Many {
    let known = match c.known(0).as_deref().map(|t| t.data.as_slice()) {
        Some([only]) => Some(*only != 0.0),
        _ => None,
    };
    let taken = |c: &mut Call, name| {
        let body = c.subgraph(name)?;
        c.builder.find_unsupported(body);
        c.builder.run_body(c.node, body, &[], c.scope)
    };
    if let Some(condition) = known {
        return taken(c, if condition { "then_branch" } else { "else_branch" });
    }
    let condition = c.x(0)?;
    if c.g().ty(condition).elements() != 1 || c.dtype(condition) != DType::Bool {
        return Err(bad_value(0));
    }
    let condition = array::reshape(c.g(), condition, &[])?;
    let (ours, others) = (taken(c, "then_branch")?, taken(c, "else_branch")?);
    let same = ours.len() == others.len()
        && ours.iter().zip(&others).all(|(&x, &y)| c.builder.graph.ty(x) == c.builder.graph.ty(y));
    if !same {
        return Err(Reject::Unsupported("whose condition depends on data, with results of different shapes"));
    }
    ours.into_iter().zip(others).map(|(x, y)| Ok(array::select(c.g(), condition, x, y)?)).collect()
}

/// The known number of a scalar.
fn scalar(c: &mut Call, value: ValueId) -> Option<f64> {
    let known = c.builder.known.elements(&c.builder.graph, value)?;
    known.data.first().copied().filter(|_| known.data.len() == 1)
}

pub(crate) fn repeat(c: &mut Call) -> Many {
    let body = c.subgraph("body")?;
    let count = c.operands.len().saturating_sub(2);
    let mut carried: Vec<ValueId> = (2..c.operands.len()).map(|i| c.x(i)).collect::<Result<_, _>>()?;
    let scanned = body.output.len().checked_sub(1 + count);
    let scanned = scanned.ok_or(ProblemKind::Subgraph { found: body.output.len(), wanted: 1 + count })?;
    let endless = || Reject::Unsupported("whose end depends on data");
    let most = match c.opt(0) {
        Some(most) => scalar(c, most).ok_or_else(endless)?,
        None => f64::INFINITY,
    };
    let mut goes_on = match c.opt(1) {
        Some(condition) => scalar(c, condition).ok_or_else(endless)? != 0.0,
        None => true,
    };
    let mut rows: Vec<Vec<ValueId>> = vec![Vec::new(); scanned];
    let mut turn = 0.0;
    while goes_on && turn < most {
        let number = array::scalar(c.g(), turn, DType::I64)?;
        let going = array::scalar(c.g(), 1.0, DType::Bool)?;
        let inputs = [&[number, going], carried.as_slice()].concat();
        let outputs = c.builder.run_body(c.node, body, &inputs, c.scope)?;
        goes_on = scalar(c, outputs[0]).ok_or_else(endless)? != 0.0;
        carried = outputs[1..1 + count].to_vec();
        outputs[1 + count..].iter().zip(&mut rows).for_each(|(&value, row)| row.push(value));
        turn += 1.0;
    }
    for row in rows {
        if row.is_empty() {
            return Err(Reject::Unsupported("that collects results and has no turn"));
        }
        carried.push(array::stack(c.g(), &row, 0)?);
    }
    Ok(carried)
}

/// Iterates over the elements of one dimension of each scanned operand.
pub(crate) fn scan(c: &mut Call) -> Many {
    if c.opset < 9 {
        return Err(Reject::Unsupported("of opset 8"));
    }
    let body = c.subgraph("body")?;
    let operands = c.all()?;
    let scanned = usize::try_from(c.int("num_scan_inputs", 0)?).ok().filter(|&n| n > 0 && n <= operands.len());
    let scanned = scanned.ok_or(attribute("num_scan_inputs"))?;
    let states = operands.len() - scanned;
    let collected = body.output.len().checked_sub(states);
    let collected = collected.ok_or(ProblemKind::Subgraph { found: body.output.len(), wanted: states })?;
    let list = |c: &Call, name, n: usize| match c.ints_opt(name)? {
        None => Ok(vec![0; n]),
        Some(list) if list.len() == n => Ok(list.to_vec()),
        Some(_) => Err(attribute(name)),
    };
    let axes = list(c, "scan_input_axes", scanned)?;
    let backwards = list(c, "scan_input_directions", scanned)?;
    let result_axes = list(c, "scan_output_axes", collected)?;
    let result_backwards = list(c, "scan_output_directions", collected)?;
    let mut sources = Vec::with_capacity(scanned);
    for (i, &x) in operands[states..].iter().enumerate() {
        sources.push((x, array::axis(axes[i], c.rank(x))?, backwards[i] != 0));
    }
    let turns = c.shape(sources[0].0)[sources[0].1];
    if sources.iter().any(|&(x, dim, _)| c.shape(x)[dim] != turns) || turns == 0 {
        return Err(bad_value(states));
    }
    let mut carried = operands[..states].to_vec();
    let mut rows: Vec<Vec<ValueId>> = vec![Vec::new(); collected];
    for turn in 0..turns {
        let mut inputs = carried.clone();
        for &(x, dim, backwards) in &sources {
            let at = if backwards { turns - 1 - turn } else { turn };
            inputs.push(array::select_dim(c.g(), x, dim, at as i64)?);
        }
        let outputs = c.builder.run_body(c.node, body, &inputs, c.scope)?;
        carried = outputs[..states].to_vec();
        outputs[states..].iter().zip(&mut rows).for_each(|(&value, row)| row.push(value));
    }
    for (i, mut row) in rows.into_iter().enumerate() {
        if result_backwards[i] != 0 {
            row.reverse();
        }
        let dim = array::axis(result_axes[i], c.rank(row[0]) + 1)?;
        carried.push(array::stack(c.g(), &row, dim)?);
    }
    Ok(carried)
}

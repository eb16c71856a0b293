//! Strategies of backward ops, which follow from the forward ones.
//!
//! A backward op runs where its operands are. Each mesh axis may split a factor as some operand is split already. If no
//! operand has the factor, the axis may split it as the result is wanted. It may also carry an existing partial sum, or
//! be idle. Among these few choices, the one with the least communication and compute wins, including the reshard to
//! the cotangent of which the result is a part.
//!
//! Given the forward strategies, this reproduces known good choices: a column-parallel matmul's input gradient is a
//! partial sum, and its weight gradient stays in place. Equal situations get equal choices, so a layer is decided once.

use super::StageContext;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Reducer;
use altiplano_ir::rule::{AxisUse, ShardingRule, Strategy};
use altiplano_ir::sharding::{DimLayout, Sharding};

/// The layouts in which an operand is available.
#[derive(PartialEq, Eq, Hash)]
pub enum Available {
    /// A constant, free in any layout.
    Any,
    Layouts(Vec<Sharding>),
}

/// Chooses the cheapest strategy for a node whose operands are available as given. `wanted` is the wanted layout of the
/// result, if known.
pub fn choose(stage: &StageContext<'_>, value: ValueId, operands: &[Available], wanted: Option<&Sharding>) -> Strategy {
    let graph = &stage.training.graph;
    let rule = stage.rule(value);
    let mesh = &stage.mesh;
    let mut uses: Vec<Vec<AxisUse>> = vec![vec![AxisUse::Replicated]; mesh.axes.len()];
    let mut offer = |axis: usize, use_: AxisUse| {
        if !uses[axis].contains(&use_) {
            uses[axis].push(use_);
        }
    };
    for (k, available) in operands.iter().enumerate() {
        let Available::Layouts(layouts) = available else { continue };
        for layout in layouts {
            for (d, dim) in layout.dims.iter().enumerate() {
                for (axis, factor, outer) in splits(rule, &rule.operands[k][d], dim, stage) {
                    offer(axis, AxisUse::Factor { factor, outer });
                }
            }
            for &(axis, reducer) in &layout.partial {
                if reducer == Reducer::Sum {
                    for (set, _) in rule.linear.iter().enumerate().filter(|(_, s)| s.contains(&(k as u8))) {
                        offer(axis.0 as usize, AxisUse::Partial { set: set as u8 });
                    }
                }
            }
        }
    }
    // A factor that no operand has, such as the classes of a label's gradient, is computed in parts if parts are
    // wanted.
    let has = |f: &u8| rule.operands.iter().flatten().any(|dim| dim.contains(f));
    for (d, dim) in wanted.iter().flat_map(|to| to.dims.iter().enumerate()) {
        for (axis, factor, outer) in splits(rule, &rule.result[d], dim, stage) {
            if !has(&factor) {
                offer(axis, AxisUse::Factor { factor, outer });
            }
        }
    }
    let mut all: Vec<Vec<AxisUse>> = vec![Vec::new()];
    for options in &uses {
        all = all
            .iter()
            .flat_map(|s| options.iter().map(move |&u| s.iter().copied().chain([u]).collect::<Vec<_>>()))
            .collect();
    }
    let node = graph.node(value);
    let mut best: Option<(f64, Strategy)> = None;
    for strategy in all.into_iter().map(Strategy).filter(|s| rule.allows(s, mesh)) {
        let shardings = rule.shardings(&strategy, mesh);
        let mut seconds = stage.op_s(value, rule, &strategy, &shardings);
        for ((available, sharding), &o) in operands.iter().zip(&shardings.operands).zip(&node.operands) {
            if let Available::Layouts(layouts) = available {
                seconds +=
                    layouts.iter().map(|l| stage.reshard_s(graph.ty(o), l, sharding)).fold(f64::INFINITY, f64::min);
            }
        }
        seconds += wanted.map_or(0.0, |to| stage.reshard_s(&node.ty, &shardings.result, to));
        if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
            best = Some((seconds, strategy));
        }
    }
    best.map_or_else(|| Strategy::replicated(mesh), |(_, s)| s)
}

/// For each axis that splits `layout`, the factor that it splits and the number of blocks outside of the split.
fn splits(rule: &ShardingRule, factors: &[u8], layout: &DimLayout, stage: &StageContext<'_>) -> Vec<(usize, u8, u64)> {
    let mut found = Vec::new();
    let mut before = 1;
    for segment in layout.segments() {
        // The segment starts inside the factor whose blocks contain `before`; each axis moves on by its size.
        let mut at = before;
        for &axis in &segment.axes {
            let mut prefix = 1;
            for &f in factors {
                let size = rule.factors[f as usize].size;
                if at >= prefix && at < prefix * size && at % prefix == 0 {
                    // Contiguous splits of one factor by several axes share their outer block count.
                    let outer = if before > prefix { before / prefix } else { 1 };
                    let windows = rule.windows.iter().filter(|w| w.factor == f);
                    for &f in [f].iter().chain(windows.flat_map(|w| &w.followers)) {
                        found.push((axis.0 as usize, f, outer.max(1)));
                    }
                    break;
                }
                prefix *= size;
            }
            at *= stage.mesh.size(axis);
        }
        before *= segment.size;
    }
    found
}

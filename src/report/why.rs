//! Why a value is laid out as it is, in words.

use super::Grid;
use crate::Error;
use crate::pins::named;
use crate::units::{bytes, seconds};
use altiplano_ir::plan::Plan;
use altiplano_planner::why::{Layout, Why, why};

/// Values of a pattern that are explained at most: layers are alike.
const MOST_VALUES: usize = 3;
/// Layouts that are listed at most.
const MOST_LAYOUTS: usize = 12;

/// For every value of the plan's model whose name matches, what its other layouts would cost. `*` stands for anything.
///
/// # Errors
/// A pattern that matches nothing that the plan decides on.
pub fn why_text(plan: &Plan, pattern: &str) -> Result<String, Error> {
    let mut parts = Vec::new();
    let mut left_out = 0;
    for (value, name) in named(&plan.graph, pattern) {
        if parts.len() == MOST_VALUES {
            left_out += 1;
            continue;
        }
        let ty = plan.graph.ty(value);
        parts.extend(why(plan, value)?.iter().map(|why| explained(why, &format!("{name}: {ty}"))));
    }
    if parts.is_empty() {
        return Err(Error::Option {
            option: "--why",
            problem: "nothing that the plan decides on has such a name; `altiplano show PLAN` prints names",
        });
    }
    if left_out > 0 {
        parts.push(format!("{left_out} more of that name are left out"));
    }
    Ok(parts.join("\n\n"))
}

fn explained(why: &Why, what: &str) -> String {
    let share = |s: f64| match s {
        s if s == f64::INFINITY => "cannot be".to_string(),
        s if s.abs() <= 1e-9 * why.cost_s => "the same".to_string(),
        s => format!("{}{}", if s < 0.0 { "-" } else { "+" }, seconds(s.abs())),
    };
    let mut table = Grid::new(&["layout", "all else as it is", "all else anew", "others change", "memory"]);
    for layout in why.layouts.iter().take(MOST_LAYOUTS) {
        let Layout { layout, chosen, in_place_s, whole_s, others, over_bytes } = layout;
        let taken = if *chosen { "  <- taken" } else { "" };
        let memory = if *over_bytes > 0 { format!("{} too much", bytes(*over_bytes)) } else { "fits".into() };
        let others = if *whole_s == f64::INFINITY { String::new() } else { others.to_string() };
        table.row([format!("{layout}{taken}"), share(*in_place_s), share(*whole_s), others, memory]);
    }
    let rest = why.layouts.len().saturating_sub(MOST_LAYOUTS);
    let rest = if rest > 0 { format!("\n  and {rest} more layouts") } else { String::new() };
    format!(
        "stage{} {what}\n  a microbatch of the stage takes {} by the search's prices; its fullest point is estimated at {} of {}\n{}{rest}",
        why.stage,
        seconds(why.cost_s),
        bytes(why.most_bytes),
        bytes(why.limit_bytes),
        table.right()
    )
}

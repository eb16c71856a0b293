//! One layer on one mesh as an integer program.
//!
//! The layer's nodes are stated as a run ([`super::statement`]) whose parameters are all stored alike, and everything but the
//! layouts in which the main value enters and leaves is eliminated. Costs are seconds per microbatch, forward and backward,
//! plus the once-per-step share of gradient reduction and update divided by the number of microbatches. What remains is a table
//! over boundary layouts, and layers are put together from those.

use super::solve::{self, BoundaryTable, Options, Problem, SolveError};
use super::space::{Choice, LayoutId, Spaces};
use super::statement::{Ends, Kept, Model, Statement, Terms, Variable, state};
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Execution;
use std::ops::Range;

/// How a stage is run, beside its shardings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Variant {
    /// ZeRO level, 0 to 3.
    pub zero: u8,
    /// Prefer layouts that keep less, even if that takes time.
    pub lean: bool,
    /// Microbatches per step: what per-step costs are divided by.
    pub num_microbatches: u32,
    /// How gradients are summed.
    pub execution: Execution,
}

/// A solved layer.
pub struct LayerTable {
    pub in_layouts: Vec<LayoutId>,
    pub out_layouts: Vec<LayoutId>,
    /// Objective and terms by entering and leaving layout (index 0 where there is none).
    pub entries: Vec<Vec<Option<(f64, Terms)>>>,
    /// Largest temporary, in bytes: a few of the largest local values.
    pub transient_bytes: f64,
    statement: Statement,
    table: BoundaryTable,
    has_in: bool,
    has_out: bool,
}

/// Strategies and parameter layouts of a layer for one pair of boundary layouts.
pub struct LayerChoice {
    pub strategies: Vec<(ValueId, Choice)>,
    pub parameters: Vec<(ValueId, Kept)>,
}

/// Seconds that keeping one byte is worth in lean variants: as if holding a full device memory cost
/// [`LEAN_FULL_MEMORY_S`].
const LEAN_FULL_MEMORY_S: f64 = 1.0;

/// The program of one layer, stated but not solved.
pub struct LayerProgram {
    pub problem: Problem,
    statement: Statement,
}

/// States the program of the nodes `range`.
pub fn state_layer(model: &Model<'_>, range: Range<u32>, spaces: &mut Spaces<'_>, variant: Variant) -> LayerProgram {
    let statement = state(model, range, spaces, &[variant.zero], &variant.execution, Ends::Joined);
    let lean_s_per_byte =
        if variant.lean { LEAN_FULL_MEMORY_S / spaces.prices.cost.device().memory_bytes.max(1) as f64 } else { 0.0 };
    let problem = statement.problem(|t: &Terms| {
        t.objective_s(variant.num_microbatches) + lean_s_per_byte * (t.kept_bytes + t.static_bytes)
    });
    LayerProgram { problem, statement }
}

/// States the program of the nodes `range` and eliminates all but its boundary.
pub fn solve_layer(
    model: &Model<'_>,
    range: Range<u32>,
    spaces: &mut Spaces<'_>,
    variant: Variant,
) -> Result<LayerTable, SolveError> {
    let LayerProgram { problem, statement } = state_layer(model, range, spaces, variant);
    let variables = &statement.variables;
    let of_ends = |(_, v): &(usize, &Variable)| matches!(v, Variable::In(..) | Variable::Out(_));
    let keep: Vec<usize> = variables.iter().enumerate().filter(of_ends).map(|(i, _)| i).collect();
    let table = solve::boundary_table(&problem, &keep, &Options::default())?;
    let entering = variables.iter().find_map(|v| match v {
        Variable::In(_, layouts) => Some(layouts.clone()),
        _ => None,
    });
    let leaving = variables.iter().find_map(|v| match v {
        Variable::Out(layouts) => Some(layouts.clone()),
        _ => None,
    });
    let mut solved = LayerTable {
        has_in: entering.is_some(),
        has_out: leaving.is_some(),
        in_layouts: entering.unwrap_or_default(),
        out_layouts: leaving.unwrap_or_default(),
        entries: Vec::new(),
        transient_bytes: statement.transient_bytes,
        statement,
        table,
    };
    for i in 0..solved.in_layouts.len().max(1) {
        let mut row = Vec::new();
        for o in 0..solved.out_layouts.len().max(1) {
            let kept = solved.kept(i, o);
            let cost = solved.table.cost(&kept);
            row.push(cost.is_finite().then(|| (cost, solved.statement.terms(&solved.table.choice(&kept)))));
        }
        solved.entries.push(row);
    }
    Ok(solved)
}

impl LayerTable {
    fn kept(&self, i: usize, o: usize) -> Vec<usize> {
        let mut kept = Vec::new();
        // In the order of the variables: the entering one is stated first.
        if self.has_in {
            kept.push(i);
        }
        if self.has_out {
            kept.push(o);
        }
        kept
    }

    /// What to do in this layer when its main value enters in layout `i` and leaves in layout `o`.
    pub fn choice(&self, i: usize, o: usize) -> LayerChoice {
        let (strategies, parameters) = self.statement.chosen(&self.table.choice(&self.kept(i, o)));
        LayerChoice { strategies, parameters }
    }
}

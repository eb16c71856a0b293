//! States one layer on one mesh as an integer program.
//!
//! The layer's nodes are stated as a run (`ilp`) in which all parameters have the same storage.
//! All variables are eliminated except the layouts in which the main value enters and leaves. Costs are seconds
//! per microbatch, forward and backward. They include the per-step cost of gradient reduction and update,
//! divided by the number of microbatches. The result is a table over boundary layouts, from which layers are
//! joined.

use super::ilp::{Ends, Ilp, Kept, Model, Variable, state};
use super::space::{Choice, LayoutId, Spaces};
use super::stage_cost::StageCost;
use altiplano_ir::cluster::Device;
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Execution;
use altiplano_ir::sharding::Sharding;
use altiplano_solver::{self as solve, BoundaryTable, Options, Problem, SolveError};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::rc::Rc;

/// The price of memory in the choice of layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPrice {
    /// Nothing: the fastest layouts, as software has them whose degrees are given.
    None,
    /// Enough to choose between layouts that are about as fast. Without it, plans of deep pipelines that almost fit are lost.
    Small,
    /// Layouts that hold fewer bytes are preferred, even if they take more time.
    Large,
}

/// The settings of a stage other than its shardings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Variant {
    /// ZeRO level, 0 to 3.
    pub zero: u8,
    pub memory: MemoryPrice,
    /// Microbatches per step. Per-step costs are divided by this number.
    pub num_microbatches: u32,
    /// How gradients are summed.
    pub execution: Execution,
}

impl Variant {
    /// The objective of a layer: its seconds, and a price for what it holds in memory.
    pub fn objective_s(&self, terms: &StageCost, device: &Device) -> f64 {
        let s_per_byte = match self.memory {
            MemoryPrice::None => 0.0,
            MemoryPrice::Small => HELD_IS_READ / device.memory_bytes_per_s,
            MemoryPrice::Large => FULL_MEMORY_S / device.memory_bytes.max(1) as f64,
        };
        terms.objective_s(self.num_microbatches) + s_per_byte * (terms.kept_bytes + terms.static_bytes)
    }
}

/// A solved layer.
pub struct LayerTable {
    pub boundary: Rc<Boundary>,
    made: Made,
}

/// The costs of a layer by the layouts in which its main value enters and leaves. Joining layers needs nothing
/// else.
#[derive(Clone, Debug, PartialEq)]
pub struct Boundary {
    pub in_layouts: Vec<LayoutId>,
    pub out_layouts: Vec<LayoutId>,
    /// Objective and terms by entering and leaving layout. Index 0 is used if there is no such layout.
    pub entries: Vec<Vec<Option<(f64, StageCost)>>>,
    /// Largest temporary, in bytes: a few of the largest local values.
    pub transient_bytes: f64,
}

/// A [`Boundary`] with its layouts written out, for serialisation.
#[derive(Serialize, Deserialize)]
pub struct BoundaryRecord {
    in_layouts: Vec<Sharding>,
    out_layouts: Vec<Sharding>,
    entries: Vec<Vec<Option<(f64, StageCost)>>>,
    transient_bytes: f64,
}

/// The origin of a table.
enum Made {
    Solved(Box<Solved>),
    /// Joined from the tables of its parts.
    Joined {
        parts: Vec<Rc<LayerTable>>,
        entered: Entered,
    },
}

struct Solved {
    ilp: Ilp,
    table: BoundaryTable,
    has_in: bool,
    has_out: bool,
}

/// Strategies and parameter layouts of a layer for one pair of boundary layouts.
pub struct LayerChoice {
    pub strategies: Vec<(ValueId, Choice)>,
    pub parameters: Vec<(ValueId, Kept)>,
}

/// Seconds that a full device memory is worth at the large price.
const FULL_MEMORY_S: f64 = 1.0;
/// The part of the time to read a byte that it is worth at the small price.
const HELD_IS_READ: f64 = 0.4;
/// The relative gap of a table entry that is not worth closing, since prices are far less accurate.
const GAP: f64 = 1e-6;

/// The program of one layer, stated but not solved.
pub struct LayerProgram {
    pub problem: Problem,
    ilp: Ilp,
}

/// States the program of the nodes `range`.
pub fn state_layer(model: &Model<'_>, range: Range<u32>, spaces: &mut Spaces<'_>, variant: Variant) -> LayerProgram {
    let ilp = state(model, range, spaces, &[variant.zero], &variant.execution, Ends::Joined);
    let device = spaces.prices.cost.device();
    let problem = ilp.problem(|terms: &StageCost| variant.objective_s(terms, device));
    LayerProgram { problem, ilp }
}

/// States the program of the nodes `range` and eliminates all but its boundary.
pub fn solve_layer(
    model: &Model<'_>,
    range: Range<u32>,
    spaces: &mut Spaces<'_>,
    variant: Variant,
) -> Result<LayerTable, SolveError> {
    let LayerProgram { problem, ilp } = state_layer(model, range, spaces, variant);
    let variables = &ilp.variables;
    let of_ends = |(_, v): &(usize, &Variable)| matches!(v, Variable::In(..) | Variable::Out(_));
    let keep: Vec<usize> = variables.iter().enumerate().filter(of_ends).map(|(i, _)| i).collect();
    let table = solve::boundary_table(&problem, &keep, &Options { gap: GAP, ..Options::default() })?;
    let entering = variables.iter().find_map(|v| match v {
        Variable::In(_, layouts) => Some(layouts.clone()),
        _ => None,
    });
    let leaving = variables.iter().find_map(|v| match v {
        Variable::Out(layouts) => Some(layouts.clone()),
        _ => None,
    });
    let solved = Solved { has_in: entering.is_some(), has_out: leaving.is_some(), ilp, table };
    let (in_layouts, out_layouts) = (entering.unwrap_or_default(), leaving.unwrap_or_default());
    let entry = |i: usize, o: usize| {
        let kept = solved.kept(i, o);
        let cost = solved.table.cost(&kept);
        cost.is_finite().then(|| (cost, solved.ilp.cost(&solved.table.choice(&kept))))
    };
    let row = |i: usize| (0..out_layouts.len().max(1)).map(|o| entry(i, o)).collect();
    let entries = (0..in_layouts.len().max(1)).map(row).collect();
    let transient_bytes = solved.ilp.transient_bytes;
    let boundary = Rc::new(Boundary { in_layouts, out_layouts, entries, transient_bytes });
    Ok(LayerTable { boundary, made: Made::Solved(Box::new(solved)) })
}

impl Solved {
    fn kept(&self, i: usize, o: usize) -> Vec<usize> {
        let mut kept = Vec::new();
        // The variables are in order: the entering one is stated first.
        if self.has_in {
            kept.push(i);
        }
        if self.has_out {
            kept.push(o);
        }
        kept
    }
}

/// The layout in which each part is entered, by part after the first, entering and leaving layout of the joined
/// parts.
type Entered = Vec<Vec<Vec<usize>>>;

impl Boundary {
    /// Joins consecutive parts, each left in the layout in which the next is entered. `None` if the layouts
    /// between them differ.
    pub fn joined(parts: &[Rc<Boundary>]) -> Option<Boundary> {
        joined(parts).map(|(boundary, _)| boundary)
    }

    pub fn written(&self, spaces: &Spaces<'_>) -> BoundaryRecord {
        let shardings = |ids: &[LayoutId]| ids.iter().map(|&id| spaces.layout(id).clone()).collect();
        let Boundary { in_layouts, out_layouts, entries, transient_bytes } = self;
        BoundaryRecord {
            in_layouts: shardings(in_layouts),
            out_layouts: shardings(out_layouts),
            entries: entries.clone(),
            transient_bytes: *transient_bytes,
        }
    }

    pub fn read(record: BoundaryRecord, spaces: &mut Spaces<'_>) -> Boundary {
        let BoundaryRecord { in_layouts, out_layouts, entries, transient_bytes } = record;
        let mut ids = |shardings: Vec<Sharding>| shardings.into_iter().map(|s| spaces.intern(s)).collect();
        Boundary { in_layouts: ids(in_layouts), out_layouts: ids(out_layouts), entries, transient_bytes }
    }
}

/// [`Boundary::joined`], with the layout in which each part is entered.
fn joined(parts: &[Rc<Boundary>]) -> Option<(Boundary, Entered)> {
    let meet = |pair: &[Rc<Boundary>]| !pair[1].in_layouts.is_empty() && pair[0].out_layouts == pair[1].in_layouts;
    let (first, last) = (parts.first()?, parts.last()?);
    if !parts.windows(2).all(meet) {
        return None;
    }
    let (in_layouts, out_layouts) = (first.in_layouts.clone(), last.out_layouts.clone());
    let mut entries = first.entries.clone();
    let mut entered = Vec::with_capacity(parts.len() - 1);
    for part in &parts[1..] {
        let mut through = Vec::with_capacity(entries.len());
        for row in &mut entries {
            let (mut new, mut by) = (Vec::new(), Vec::new());
            for o in 0..part.out_layouts.len().max(1) {
                let way = |(m, so_far): (usize, &Option<(f64, StageCost)>)| {
                    let ((before, terms), (cost, more)) = ((*so_far)?, part.entries[m][o]?);
                    // Only the first part's entering value enters the joined layer.
                    Some((before + cost, terms + StageCost { entering_bytes: 0.0, ..more }, m))
                };
                let best = row.iter().enumerate().filter_map(way).min_by(|a, b| a.0.total_cmp(&b.0));
                new.push(best.map(|(cost, terms, _)| (cost, terms)));
                by.push(best.map_or(0, |b| b.2));
            }
            *row = new;
            through.push(by);
        }
        entered.push(through);
    }
    let transient_bytes = parts.iter().map(|part| part.transient_bytes).fold(0.0, f64::max);
    Some((Boundary { in_layouts, out_layouts, entries, transient_bytes }, entered))
}

impl LayerTable {
    /// Joins the tables of consecutive parts, see [`Boundary::joined`].
    pub fn joined(parts: Vec<Rc<LayerTable>>) -> Option<LayerTable> {
        let boundaries: Vec<Rc<Boundary>> = parts.iter().map(|part| part.boundary.clone()).collect();
        let (boundary, entered) = joined(&boundaries)?;
        Some(LayerTable { boundary: Rc::new(boundary), made: Made::Joined { parts, entered } })
    }

    /// The choices for each part of this layer if its main value enters in layout `i` and leaves in layout `o`.
    /// A layer that is not joined is its only part.
    pub fn choices(&self, i: usize, o: usize) -> Vec<LayerChoice> {
        let (parts, entered) = match &self.made {
            Made::Joined { parts, entered } => (parts, entered),
            Made::Solved(solved) => {
                let (strategies, parameters) = solved.ilp.chosen(&solved.table.choice(&solved.kept(i, o)));
                return vec![LayerChoice { strategies, parameters }];
            }
        };
        let mut choices = Vec::with_capacity(parts.len());
        let mut out = o;
        for (part, through) in parts[1..].iter().zip(entered).rev() {
            let m = through[i][out];
            choices.push(part.choices(m, out));
            out = m;
        }
        choices.push(parts[0].choices(i, out));
        choices.into_iter().rev().flatten().collect()
    }
}

//! The rounding of a plan's sums beside that of one device: a table, warnings, and JSON.

use crate::report::Grid;
use crate::units::plural;
use altiplano_ir::program::Programs;
use altiplano_prover::numerics::{self, Of, Part, Place, Sum, probable, updated_in_half, worst_case};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The sums of a plan that are added in parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Rounding {
    pub sums: Vec<Sum>,
    /// Parameters whose update is computed in 16 bits.
    pub updated_in_half: Vec<String>,
}

/// The most lines of a table.
const MOST_LINES: usize = 8;

impl Rounding {
    /// The sums of the programs of a proved plan.
    pub fn of(programs: &Programs) -> Rounding {
        Rounding { sums: numerics::sums(programs), updated_in_half: updated_in_half(programs).into_iter().collect() }
    }

    /// The sum of each kind and of each choice of types that loses most, with the number of sums like it.
    fn worst(&self) -> Vec<(usize, &Sum)> {
        let mut kinds: BTreeMap<(Of, Vec<(Place, &str)>), (usize, &Sum)> = BTreeMap::new();
        for sum in &self.sums {
            let types = sum.parts.iter().map(|part| (part.place, part.dtype.name())).collect();
            let worst = kinds.entry((sum.of, types)).or_insert((0, sum));
            worst.0 += sum.count;
            if loss(sum) > loss(worst.1) {
                worst.1 = sum;
            }
        }
        let mut worst: Vec<(usize, &Sum)> = kinds.into_values().collect();
        worst.sort_by(|a, b| loss(b.1).total_cmp(&loss(a.1)));
        worst
    }

    /// A table with one line for each kind of sum: the summands of its worst case by place and type, and the bounds of
    /// the plan and of one device. Empty if no sum is added in parts.
    pub fn text(&self) -> String {
        let worst = self.worst();
        if worst.is_empty() {
            return String::new();
        }
        let mut grid = Grid::new(&[
            "sums",
            "in an op",
            "microbatches",
            "devices",
            "worst case",
            "one device",
            "probable",
            "one device",
        ]);
        for (count, sum) in worst.iter().take(MOST_LINES) {
            let at = |place| {
                let part = sum.parts.iter().rev().find(|part| part.place == place);
                part.map_or("-".to_string(), |part| format!("{} {}", part.summands, part.dtype.name()))
            };
            grid.row([
                format!("{count} {}", sum.of.name()),
                at(Place::Op),
                at(Place::Microbatches),
                at(Place::Devices),
                error(worst_case(&sum.parts)),
                error(worst_case(&sum.one_device)),
                error(probable(&sum.parts)),
                error(probable(&sum.one_device)),
            ]);
        }
        let more = worst.len().saturating_sub(MOST_LINES);
        let more = if more > 0 { format!("\n  {more} more kinds: `--json`") } else { String::new() };
        format!("Rounding of sums, relative to the sum of magnitudes\n{}{more}", grid.right())
    }

    /// One warning for each kind of sum that is much less precise than on one device.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> = Vec::new();
        for (_, sum) in self.worst().into_iter().filter(|(_, sum)| sum.loses_precision()) {
            let added = |part: &&Part| matches!(part.place, Place::Microbatches | Place::Devices);
            let cost = |part: &Part| probable(&[*part]);
            let Some(part) = sum.parts.iter().filter(added).max_by(|a, b| cost(a).total_cmp(&cost(b))) else {
                continue;
            };
            warnings.push(format!(
                "{} are summed over {} {} in {}: a probable error of {}, {:.0} times that of one device (program {}, {}, {})",
                sum.of.name(),
                part.summands,
                part.place.name(),
                part.dtype.name(),
                error(probable(&sum.parts)),
                loss(sum),
                sum.program,
                sum.body,
                sum.name,
            ));
        }
        if let Some(first) = self.updated_in_half.first() {
            let count = plural(self.updated_in_half.len() as u64, "parameter");
            warnings.push(format!("{count} are updated in 16 bits, in which small changes are lost ({first})"));
        }
        warnings
    }

    /// All sums. Bounds that say nothing are `null`.
    pub fn json(&self) -> Value {
        let parts = |parts: &[Part]| -> Value {
            let part = |part: &Part| json!({"place": part.place.name(), "dtype": part.dtype.name(), "summands": part.summands});
            let number = |x: f64| if x.is_finite() { json!(x) } else { Value::Null };
            let all: Vec<Value> = parts.iter().map(part).collect();
            json!({"parts": all, "worst_case": number(worst_case(parts)), "probable": number(probable(parts))})
        };
        let sum = |sum: &Sum| {
            json!({
                "of": sum.of.name(), "count": sum.count, "program": sum.program, "body": sum.body, "name": sum.name,
                "plan": parts(&sum.parts), "one_device": parts(&sum.one_device), "loses_precision": sum.loses_precision(),
            })
        };
        let sums: Vec<Value> = self.sums.iter().map(sum).collect();
        json!({"sums": sums, "updated_in_half": self.updated_in_half})
    }
}

/// The probable error of a sum in units of that of one device.
fn loss(sum: &Sum) -> f64 {
    probable(&sum.parts) / probable(&sum.one_device)
}

fn error(x: f64) -> String {
    if x.is_finite() { format!("{x:.1e}") } else { "none".to_string() }
}

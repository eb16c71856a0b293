//! Draws a step as lines of characters: the timeline of each lane's devices, within the terminal's width.

use crate::simulate::{CallSpan, Simulation};
use crate::units::seconds;
use altiplano_ir::program::Phase;

/// Columns of a timeline if there is enough room.
const COLUMNS: usize = 80;
/// Minimum number of columns.
const FEWEST: usize = 20;
/// Maximum number of lanes drawn; of more lanes, an evenly spaced selection.
const LINES: usize = 16;

/// A line per lane and a legend, in lines of at most `room` characters.
pub(crate) fn timeline(simulation: &Simulation, room: Option<usize>) -> String {
    let plan = simulation.plan();
    let (step_s, lanes) = simulation.calls();
    let named: Vec<String> = (0..lanes.len()).map(|lane| plan.lane_name(lane)).collect();
    let shown: Vec<usize> = match lanes.len() {
        n if n <= LINES => (0..n).collect(),
        n => (0..LINES).map(|i| i * (n - 1) / (LINES - 1)).collect(),
    };
    let width = shown.iter().map(|&l| named[l].len()).max().unwrap_or(0);
    let columns = room.map_or(COLUMNS, |room| room.saturating_sub(width + 4).clamp(FEWEST, COLUMNS));
    let mut lines: Vec<String> =
        shown.iter().map(|&l| format!("  {:width$}  {}", named[l], drawn(&lanes[l], step_s, columns))).collect();
    if shown.len() < lanes.len() {
        lines.push(format!("  {} of {} lines", shown.len(), lanes.len()));
    }
    let kinds = match (plan.schedule.trains(), lanes.iter().flatten().any(|call| call.phase == Phase::Weights)) {
        (false, _) => "F forward",
        (true, false) => "F forward, B backward, U gradients reduced and update",
        (true, true) => "F forward, B backward, W gradients of weights, U gradients reduced and update",
    };
    lines.push(format!("  {kinds}, . waiting; a column is {}", seconds(step_s / columns as f64)));
    lines.join("\n")
}

fn letter(phase: Phase) -> char {
    match phase {
        Phase::Totals | Phase::Forward => 'F',
        Phase::Backward => 'B',
        Phase::Weights => 'W',
        Phase::Reduce | Phase::Norm | Phase::Update => 'U',
    }
}

/// Calls shorter than a column share columns. Each letter gets its share of the columns so far, so that a line has the
/// proportions of the step.
fn drawn(calls: &[CallSpan], step_s: f64, columns: usize) -> String {
    const LETTERS: [char; 5] = ['F', 'B', 'W', 'U', '.'];
    let column_s = step_s / columns as f64;
    let mut owed = [0.0f64; LETTERS.len()];
    let mut line = String::with_capacity(columns);
    let mut next = 0;
    for column in 0..columns {
        let (from, to) = (column as f64 * column_s, (column + 1) as f64 * column_s);
        while calls.get(next).is_some_and(|call| call.end_s <= from) {
            next += 1;
        }
        let mut part = [0.0f64; LETTERS.len()];
        for call in calls[next..].iter().take_while(|call| call.start_s < to) {
            let at = LETTERS.iter().position(|l| *l == letter(call.phase)).unwrap_or(0);
            part[at] += (call.end_s.min(to) - call.start_s.max(from)).max(0.0) / column_s;
        }
        let waits = LETTERS.len() - 1;
        part[waits] = (1.0 - part.iter().sum::<f64>()).max(0.0);
        // A letter is drawn only in columns in which its work occurs, however large its remaining share.
        let mut best = waits;
        for (i, owed) in owed.iter_mut().enumerate() {
            *owed += part[i];
        }
        for i in 0..LETTERS.len() {
            if part[i] > 0.0 && (part[best] == 0.0 || owed[i] > owed[best]) {
                best = i;
            }
        }
        owed[best] -= 1.0;
        line.push(LETTERS[best]);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_proportions_of_the_step() {
        let call = |phase, start_s: f64, end_s: f64| CallSpan { stage: 0, phase, microbatch: Some(0), start_s, end_s };
        let long =
            [call(Phase::Forward, 20.0, 40.0), call(Phase::Backward, 40.0, 70.0), call(Phase::Update, 70.0, 80.0)];
        let text = drawn(&long, 80.0, COLUMNS);
        assert_eq!(text, ".".repeat(20) + &"F".repeat(20) + &"B".repeat(30) + &"U".repeat(10));
        // A thousand alternating calls; backward ones take three times as long.
        let turns: Vec<CallSpan> = (0..1000)
            .flat_map(|i| {
                let at = f64::from(i) * 0.08;
                [call(Phase::Forward, at, at + 0.02), call(Phase::Backward, at + 0.02, at + 0.08)]
            })
            .collect();
        let text = drawn(&turns, 80.0, COLUMNS);
        let count = |letter: char| text.chars().filter(|c| *c == letter).count();
        assert!(count('F').abs_diff(20) <= 1 && count('B').abs_diff(60) <= 1, "{text}");
    }
}

//! An order of calls as data: what each lane of a pipeline runs, one call after the other. A file is untrusted, so
//! [`CallOrder::problem`] checks that an order has every call once and ends in no deadlock.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The part of a microbatch's work on a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    Forward,
    /// Gradients of inputs; those of weights too, unless the stage computes them apart.
    Backward,
    /// Gradients of weights.
    Weights,
}

impl Pass {
    /// The letter that stands for the pass in files.
    pub fn letter(self) -> char {
        match self {
            Pass::Forward => 'F',
            Pass::Backward => 'B',
            Pass::Weights => 'W',
        }
    }
}

/// A call of a stage. The `k`-th call of a pass is for microbatch `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Call {
    pub stage: u32,
    pub pass: Pass,
}

/// The calls of each lane, first to last. A file has a text for each lane, such as `F0 F0 B0 W0`: the pass, and the
/// stage that runs it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct CallOrder {
    pub lanes: Vec<Vec<Call>>,
}

/// A word that is not a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{word}` is not a call, which is F, B or W and the number of a stage")]
pub struct UnknownCall {
    pub word: String,
}

impl TryFrom<Vec<String>> for CallOrder {
    type Error = UnknownCall;

    fn try_from(lanes: Vec<String>) -> Result<CallOrder, UnknownCall> {
        let call = |word: &str| {
            let unknown = || UnknownCall { word: word.chars().take(20).collect() };
            let mut letters = word.chars();
            let pass = match letters.next() {
                Some('F') => Pass::Forward,
                Some('B') => Pass::Backward,
                Some('W') => Pass::Weights,
                _ => return Err(unknown()),
            };
            let digits = letters.as_str();
            let is_number = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
            let stage = digits.parse().ok().filter(|_| is_number).ok_or_else(unknown)?;
            Ok(Call { stage, pass })
        };
        let lane = |text: &String| text.split_ascii_whitespace().map(call).collect::<Result<Vec<Call>, UnknownCall>>();
        Ok(CallOrder { lanes: lanes.iter().map(lane).collect::<Result<_, _>>()? })
    }
}

impl From<CallOrder> for Vec<String> {
    fn from(order: CallOrder) -> Vec<String> {
        let text = |lane: &Vec<Call>| lane.iter().map(Call::to_string).collect::<Vec<_>>().join(" ");
        order.lanes.iter().map(text).collect()
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.pass.letter(), self.stage)
    }
}

impl CallOrder {
    /// Says why the order is none for `num_microbatches` on stages of which `lane_of` gives the lanes: a call is missing,
    /// of another lane, or one too many, or lanes wait for each other in a circle. Takes time in proportion to the calls.
    pub fn problem(&self, num_lanes: usize, lane_of: &[usize], num_microbatches: u32) -> Option<&'static str> {
        let stages = lane_of.len();
        if self.lanes.len() != num_lanes {
            return Some("must have the calls of every lane");
        }
        let mut total = vec![[0u32; 3]; stages];
        for (l, lane) in self.lanes.iter().enumerate() {
            for call in lane {
                let stage = call.stage as usize;
                if lane_of.get(stage) != Some(&l) {
                    return Some("has a call of a stage that is not on its lane");
                }
                let count = &mut total[stage][call.pass as usize];
                *count = count.saturating_add(1);
            }
        }
        let all = num_microbatches;
        let complete = |[forwards, backwards, weights]: &[u32; 3]| {
            *forwards == all && *backwards == all && (*weights == all || *weights == 0)
        };
        if !total.iter().all(complete) {
            return Some("must have each call of every stage once for each microbatch");
        }
        self.is_stuck(lane_of).then_some("has calls that wait for each other in a circle")
    }

    /// True if not all calls can be made. Every call must be of a stage in `lane_of`.
    fn is_stuck(&self, lane_of: &[usize]) -> bool {
        let stages = lane_of.len();
        let mut done = vec![[0u32; 3]; stages];
        let mut at = vec![0usize; self.lanes.len()];
        let mut runnable: Vec<usize> = (0..self.lanes.len()).collect();
        while let Some(l) = runnable.pop() {
            while let Some(call) = self.lanes[l].get(at[l]) {
                let s = call.stage as usize;
                let [forwards, backwards, weights] = done[s];
                let can_start = match call.pass {
                    Pass::Forward => s == 0 || done[s - 1][0] > forwards,
                    Pass::Backward => forwards > backwards && (s + 1 == stages || done[s + 1][1] > backwards),
                    Pass::Weights => backwards > weights,
                };
                if !can_start {
                    break;
                }
                done[s][call.pass as usize] += 1;
                at[l] += 1;
                match call.pass {
                    Pass::Forward if s + 1 < stages => runnable.push(lane_of[s + 1]),
                    Pass::Backward if s > 0 => runnable.push(lane_of[s - 1]),
                    _ => {}
                }
            }
        }
        at.iter().zip(&self.lanes).any(|(&at, lane)| at < lane.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(lanes: &[&str]) -> CallOrder {
        let lanes: Vec<String> = lanes.iter().map(ToString::to_string).collect();
        CallOrder::try_from(lanes).unwrap()
    }

    #[test]
    fn orders_are_texts_in_files() {
        let text = r#"["F0 F0 B0 W0 B0 W0","F1 B1 F1 B1"]"#;
        let order: CallOrder = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&order).unwrap(), text);
        assert_eq!(order.problem(2, &[0, 1], 2), None);
        for word in ["F", "X0", "F+1", "F-1", "F0B0", "F99999999999", "0"] {
            let found = CallOrder::try_from(vec![word.to_string()]).map_err(|e| e.word);
            assert_eq!(found, Err(word.to_string()));
        }
    }

    #[test]
    fn wrong_orders_are_refused() {
        let problem = |lanes: &[&str], count| order(lanes).problem(2, &[0, 1], count);
        for (lanes, problem_of) in [
            (&["F0 B0"][..], "every lane"),
            (&["F0 B0", "F1 B1", ""], "every lane"),
            (&["F0 B0", "F0 B1"], "not on its lane"),
            (&["F0 B0", "F1 B1 F7"], "not on its lane"),
            (&["F0 B0", "F1"], "once for each microbatch"),
            (&["F0 B0 F0 B0", "F1 B1"], "once for each microbatch"),
            (&["F0 B0", "F1 B1 W1 W1"], "once for each microbatch"),
            (&["B0 F0", "F1 B1"], "in a circle"),
            (&["F0 B0", "B1 F1"], "in a circle"),
            (&["F0 W0 B0", "F1 B1"], "in a circle"),
        ] {
            let found = problem(lanes, 1).unwrap_or_default();
            assert!(found.contains(problem_of), "{lanes:?}: {found}");
        }
        // Each lane waits for the other's second call.
        assert!(problem(&["F0 B0 F0 B0", "F1 F1 B1 B1"], 2).is_some_and(|p| p.contains("circle")));
        assert_eq!(problem(&["F0 F0 B0 B0", "F1 F1 B1 B1"], 2), None);
    }
}

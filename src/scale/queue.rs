//! Waiting times for nodes before training begins, from a table that users fill in from their cluster's queue. Waits
//! are interpolated between two rows and unknown outside them.

use crate::error::Error;
use serde::Deserialize;
use std::path::Path;

/// Waits for some numbers of nodes, sorted by these.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueWaits(Vec<Wait>);

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wait {
    nodes: u32,
    hours: f64,
}

/// Faults of a table of waits.
#[derive(Debug, thiserror::Error)]
pub enum QueueProblem {
    #[error("{0}; a table of waits has the columns nodes and hours")]
    Csv(#[from] csv::Error),
    #[error("{hours} hours is no valid wait")]
    Hours { hours: f64 },
    #[error("{nodes} nodes occur twice")]
    Twice { nodes: u32 },
    #[error("the wait for {nodes} nodes is unknown: the table covers {least} to {most}")]
    Beyond { nodes: u32, least: u32, most: u32 },
    #[error("the table has no rows")]
    Empty,
}

impl QueueWaits {
    /// Reads `nodes,hours` from CSV.
    ///
    /// # Errors
    /// Fails if a row is malformed, or if a number of nodes occurs twice.
    pub fn read(text: &[u8], file: &Path) -> Result<QueueWaits, Error> {
        QueueWaits::of_csv(text).map_err(|problem| problem.at(file))
    }

    fn of_csv(text: &[u8]) -> Result<QueueWaits, QueueProblem> {
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text);
        let mut waits = reader.deserialize().collect::<Result<Vec<Wait>, _>>()?;
        waits.sort_by_key(|wait| wait.nodes);
        if let Some(wrong) = waits.iter().find(|wait| !(0.0..=1e9).contains(&wait.hours)) {
            return Err(QueueProblem::Hours { hours: wrong.hours });
        }
        if let Some(pair) = waits.windows(2).find(|pair| pair[0].nodes == pair[1].nodes) {
            return Err(QueueProblem::Twice { nodes: pair[0].nodes });
        }
        if waits.is_empty() { Err(QueueProblem::Empty) } else { Ok(QueueWaits(waits)) }
    }

    /// Checks that all these numbers of nodes lie between the rows.
    ///
    /// # Errors
    /// Fails with the first that does not.
    pub fn expect_within(&self, nodes: &[u32], file: &Path) -> Result<(), Error> {
        let (Some(first), Some(last)) = (self.0.first(), self.0.last()) else { return Ok(()) };
        let (least, most) = (first.nodes, last.nodes);
        match nodes.iter().find(|nodes| !(least..=most).contains(nodes)) {
            Some(&nodes) => Err(QueueProblem::Beyond { nodes, least, most }.at(file)),
            None => Ok(()),
        }
    }

    /// Hours until a number of nodes is available, by linear interpolation; `None` outside the rows.
    pub fn hours(&self, nodes: u32) -> Option<f64> {
        let above = self.0.iter().position(|wait| wait.nodes >= nodes)?;
        let upper = self.0[above];
        if upper.nodes == nodes {
            return Some(upper.hours);
        }
        let lower = self.0[above.checked_sub(1)?];
        let share = f64::from(nodes - lower.nodes) / f64::from(upper.nodes - lower.nodes);
        Some(lower.hours + share * (upper.hours - lower.hours))
    }

    /// Returns whether the wait for this number was interpolated.
    pub(crate) fn is_between(&self, nodes: u32) -> bool {
        self.0.iter().all(|wait| wait.nodes != nodes)
    }
}

impl QueueProblem {
    fn at(self, file: &Path) -> Error {
        Error::QueueWaits { file: file.to_path_buf(), problem: Box::new(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_on_lines_between_rows() {
        let waits = QueueWaits::of_csv(b"nodes, hours\n16,20\n1,0.5\n4,2\n").expect("waits");
        for (nodes, hours) in [(1, 0.5), (2, 1.0), (4, 2.0), (8, 8.0), (16, 20.0)] {
            assert_eq!(waits.hours(nodes), Some(hours), "{nodes}");
            assert_eq!(waits.is_between(nodes), [2, 8].contains(&nodes));
        }
        assert_eq!((waits.hours(0), waits.hours(17)), (None, None));
        assert!(waits.expect_within(&[1, 16], Path::new("q.csv")).is_ok());
        let beyond = waits.expect_within(&[4, 17], Path::new("q.csv")).expect_err("17 are not known");
        assert!(
            beyond.is_usage() && beyond.to_string().contains("q.csv: the wait for 17 nodes is unknown"),
            "{beyond}"
        );
    }

    #[test]
    fn what_is_no_table_of_waits_is_refused() {
        let cases: [(&[u8], &str); 7] = [
            (b"", "no rows"),
            (b"nodes,hours\n", "no rows"),
            (b"nodes,hours\n1,2\n1,3\n", "1 nodes occur twice"),
            (b"nodes,hours\n1,-2\n", "-2 hours"),
            (b"nodes,hours\n1,NaN\n", "NaN hours"),
            (b"nodes,hours\n1,soon\n", "nodes and hours"),
            (b"nodes,days\n1,2\n", "nodes and hours"),
        ];
        for (text, part) in cases {
            let problem = QueueWaits::of_csv(text).expect_err(part).to_string();
            assert!(problem.contains(part), "{problem}");
        }
    }
}

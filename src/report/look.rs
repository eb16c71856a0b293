//! The width and colours of a report. Both follow the terminal. A file or a pipe gets plain, unwrapped lines, so that
//! the same plan gives the same text.

use std::fmt::Write;

/// The look of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Maximum number of columns of a line.
    pub width: Option<usize>,
    pub colour: bool,
}

/// Indentation of continued table lines.
const HANGING: usize = 6;
/// Minimum width at which a table is readable.
const NARROWEST: usize = 40;

impl Look {
    /// Unwrapped lines without colours.
    pub const PLAIN: Look = Look { width: None, colour: false };

    fn columns(self) -> Option<usize> {
        self.width.map(|width| width.max(NARROWEST))
    }

    /// Emphasises the answer that a reader looks for.
    pub(crate) fn strong(self, text: &str) -> String {
        if self.colour { format!("\u{1b}[1m{text}\u{1b}[0m") } else { text.to_string() }
    }

    /// Wraps a sentence.
    pub fn wrapped(self, text: &str) -> String {
        let Some(width) = self.columns() else { return text.to_string() };
        let mut out = String::new();
        let mut column = 0;
        for word in text.split(' ') {
            let length = word.chars().count();
            if column > 0 && column + 1 + length > width {
                out.push('\n');
                column = 0;
            }
            if column > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += length;
        }
        out
    }

    /// Formats a report whose titles start in the first column and whose tables are indented. Lines wider than the
    /// terminal continue below, broken between columns if possible.
    pub fn shown(self, text: &str) -> String {
        if self == Look::PLAIN {
            return text.to_string();
        }
        let mut out = String::with_capacity(text.len());
        for line in text.lines() {
            let is_title = line.starts_with(|c: char| c.is_alphabetic());
            let parts = self.parts(line);
            for (i, part) in parts.iter().enumerate() {
                // Writing to a string cannot fail.
                let _ = match (i, is_title && self.colour) {
                    (0, true) => writeln!(out, "\u{1b}[36m{part}\u{1b}[0m"),
                    (0, false) => writeln!(out, "{part}"),
                    _ => writeln!(out, "{:HANGING$}{part}", ""),
                };
            }
        }
        if !text.ends_with('\n') {
            out.pop();
        }
        out
    }

    /// Splits a line into pieces that fit.
    fn parts(self, line: &str) -> Vec<&str> {
        // Coloured lines are wrapped already.
        let Some(width) = self.columns().filter(|_| !line.contains('\u{1b}')) else { return vec![line] };
        let mut parts = Vec::new();
        let mut rest = line;
        loop {
            let room = if parts.is_empty() { width } else { width - HANGING };
            let Some((end, _)) = rest.char_indices().nth(room) else { break };
            let indent = rest.len() - rest.trim_start().len();
            // Break at the last gap between columns, or else between words.
            let (head, from) = (&rest[..end], indent.min(end));
            let within = |at: &usize| *at > from;
            let columns = head[from..].rfind("  ").map(|at| from + at).filter(|&at| at > end / 2);
            let words = head[from..].rfind(' ').map(|at| from + at);
            let gap = columns.or(words).filter(within);
            let at = gap.unwrap_or(end);
            parts.push(rest[..at].trim_end());
            rest = rest[at..].trim_start();
        }
        parts.push(rest);
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_on_between_columns() {
        let look = Look { width: Some(40), colour: false };
        let row = "  stage0  0-3     1x4      0-3      mesh<tensor=4, data=1>  full";
        let shown = look.shown(row);
        assert!(shown.lines().all(|line| line.chars().count() <= 40), "{shown}");
        let words = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<_>>();
        assert_eq!(words(&shown), words(row));
        assert!(shown.lines().nth(1).is_some_and(|line| line.starts_with("      mesh<")), "{shown}");
        assert_eq!(Look::PLAIN.shown(row), row);
        // A word longer than a line is cut.
        let long = "x".repeat(100);
        assert_eq!(look.shown(&long).replace(['\n', ' '], ""), long);
        assert_eq!(
            look.wrapped("one two three four five six seven eight nine ten"),
            "one two three four five six seven eight\nnine ten"
        );
    }

    #[test]
    fn titles_have_colour_and_nothing_else_changes() {
        let look = Look { width: None, colour: true };
        let text = "Stages\n  stage0  1\n";
        assert_eq!(look.shown(text), "\u{1b}[36mStages\u{1b}[0m\n  stage0  1\n");
    }
}

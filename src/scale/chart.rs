//! Draws lines and marked points over two axes as SVG. A scale is linear or logarithmic, with round ticks.

use crate::scale::page::escaped;
use crate::units::digits;
use std::fmt::Write;

/// Size of the picture and its margins, in pixels.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 44.0;

pub(super) struct Chart<'a> {
    pub title: &'a str,
    /// Names of the axes, the horizontal one first.
    pub axes: [&'a str; 2],
    pub logarithmic: [bool; 2],
    pub lines: Vec<Line<'a>>,
    pub marks: Vec<Mark>,
}

pub(super) struct Line<'a> {
    pub name: &'a str,
    /// Index of a colour of the page's style.
    pub hue: usize,
    pub points: Vec<(f64, f64)>,
}

pub(super) struct Mark {
    pub at: (f64, f64),
    pub label: String,
    /// True if the mark has a ring.
    pub chosen: bool,
    pub hollow: bool,
}

/// Maps numbers to pixels.
struct Axis {
    logarithmic: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis that covers all values; linear ones start at 0.
    fn new(values: impl Iterator<Item = f64> + Clone, logarithmic: bool, from: f64, to: f64) -> Axis {
        let most = values.clone().fold(f64::MIN, f64::max);
        let (low, high) = match logarithmic {
            true => (values.fold(f64::MAX, f64::min).ln(), most.ln()),
            false => (0.0, most),
        };
        // A single value is centred.
        let margin = if high - low > 1e-9 { (high - low) * 0.06 } else { 0.5 };
        Axis { logarithmic, low: if logarithmic { low - margin } else { low }, high: high + margin, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let value = if self.logarithmic { value.ln() } else { value };
        self.from + (self.to - self.from) * (value - self.low) / (self.high - self.low)
    }

    /// A handful of round numbers within the axis.
    fn ticks(&self) -> Vec<f64> {
        let multiples = |of: &[f64], powers: std::ops::Range<i32>| -> Vec<f64> {
            powers.flat_map(|power| of.iter().map(move |step| step * 10f64.powi(power))).collect()
        };
        let coarse = [1.0, 2.0, 5.0];
        if !self.logarithmic {
            let most = self.high / 4.0;
            let step = multiples(&coarse, -12..12).into_iter().find(|step| *step >= most).unwrap_or(most);
            return (0..8).map(|i| f64::from(i) * step).filter(|tick| *tick <= self.high).collect();
        }
        let within = |tick: &f64| (self.low..=self.high).contains(&tick.ln());
        let of = |steps: &[f64]| multiples(steps, -12..19).into_iter().filter(within).collect::<Vec<f64>>();
        let all = match of(&coarse) {
            few if few.len() < 3 => of(&[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]),
            enough => enough,
        };
        // Over many decades, every few ticks suffice.
        let every = all.len().div_ceil(8).max(1);
        all.into_iter().step_by(every).collect()
    }
}

impl Chart<'_> {
    /// The SVG; `None` if it would be empty, or if a number has no place on its axis.
    pub(crate) fn svg(&self) -> Option<String> {
        let all: Vec<(f64, f64)> =
            self.lines.iter().flat_map(|l| l.points.iter().copied()).chain(self.marks.iter().map(|m| m.at)).collect();
        let placed = |value: f64, logarithmic: bool| value.is_finite() && (value > 0.0 || !logarithmic);
        if all.is_empty() || !all.iter().all(|p| placed(p.0, self.logarithmic[0]) && placed(p.1, self.logarithmic[1])) {
            return None;
        }
        let across = Axis::new(all.iter().map(|p| p.0), self.logarithmic[0], LEFT, WIDTH - RIGHT);
        let up = Axis::new(all.iter().map(|p| p.1), self.logarithmic[1], HEIGHT - BOTTOM, TOP);
        let title = escaped(self.title);
        let mut out = format!(
            "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\n<title>{title}</title>\n"
        );
        // Writing to a string does not fail.
        for tick in across.ticks() {
            let (x, bottom) = (across.at(tick), HEIGHT - BOTTOM);
            _ = writeln!(out, "<path d=\"M{x:.1} {TOP}V{bottom}\" stroke=\"var(--grid)\"/>");
            _ = writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 16.0,
                number(tick)
            );
        }
        for tick in up.ticks() {
            let (y, right) = (up.at(tick), WIDTH - RIGHT);
            _ = writeln!(out, "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"var(--grid)\"/>");
            _ = writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                number(tick)
            );
        }
        let (middle, low) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 8.0);
        _ = writeln!(out, "<text x=\"{middle}\" y=\"{low}\" text-anchor=\"middle\">{}</text>", escaped(self.axes[0]));
        _ = writeln!(out, "<text x=\"4\" y=\"12\">{}</text>", escaped(self.axes[1]));
        for line in &self.lines {
            let points: Vec<String> =
                line.points.iter().map(|p| format!("{:.1},{:.1}", across.at(p.0), up.at(p.1))).collect();
            let (points, hue) = (points.join(" "), line.hue);
            _ = writeln!(
                out,
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"var(--hue{hue})\" stroke-width=\"2\"/>"
            );
        }
        for Mark { at, label, chosen, hollow } in &self.marks {
            let (x, y) = (across.at(at.0), up.at(at.1));
            let fill = if *hollow { "var(--paper)" } else { "var(--ink)" };
            _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{fill}\" stroke=\"var(--ink)\"/>");
            if *chosen {
                _ = writeln!(
                    out,
                    "<circle class=\"taken\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"9\" fill=\"none\" stroke=\"var(--accent)\" stroke-width=\"3\"/>"
                );
            }
            _ = writeln!(
                out,
                "<text class=\"point\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + 8.0,
                y - 8.0,
                escaped(label)
            );
        }
        out.push_str("</svg>\n");
        out.push_str("<ul class=\"legend\">\n");
        for Line { name, hue, .. } in &self.lines {
            _ = writeln!(out, "<li><i style=\"background: var(--hue{hue})\"></i>{}</li>", escaped(name));
        }
        out.push_str("</ul>\n");
        Some(out)
    }
}

/// A tick label, as short as possible.
fn number(value: f64) -> String {
    if (0.01..1e6).contains(&value) || value == 0.0 {
        let text = format!("{value:.2}");
        return text.trim_end_matches('0').trim_end_matches('.').to_string();
    }
    if value < 0.01 { format!("{value:.0e}") } else { digits(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_places() {
        let axis = Axis::new([1.0, 100.0].into_iter(), true, 0.0, 112.0);
        // 6 % of the range on both sides.
        for (value, place) in [(1.0, 6.0), (10.0, 56.0), (100.0, 106.0)] {
            assert!((axis.at(value) - place).abs() < 1e-9, "{value} is at {}", axis.at(value));
        }
        assert_eq!(axis.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        let narrow = Axis::new([2.5, 6.0].into_iter(), true, 0.0, 1.0);
        assert_eq!(narrow.ticks(), [3.0, 4.0, 5.0, 6.0]);
        let linear = Axis::new([0.5, 1.0].into_iter(), false, 0.0, 1.0);
        assert_eq!(linear.ticks(), [0.0, 0.5, 1.0]);
        assert_eq!(["0", "0.5", "1", "20", "200000"], [0.0, 0.5, 1.0, 20.0, 2e5].map(number));
    }

    #[test]
    fn what_has_no_place_is_not_drawn() {
        let chart = |points: Vec<(f64, f64)>| Chart {
            title: "t",
            axes: ["x", "y"],
            logarithmic: [true, false],
            lines: vec![Line { name: "<line>", hue: 0, points }],
            marks: Vec::new(),
        };
        assert!(chart(vec![]).svg().is_none() && chart(vec![(0.0, 1.0)]).svg().is_none());
        let one = chart(vec![(3.0, 1.0)]).svg().expect("a picture");
        assert!(one.contains("&lt;line&gt;") && !one.contains("NaN") && !one.contains("inf"), "{one}");
    }
}

//! Layouts that the user requests: patterns of names, and shardings as they are printed. `params*['w']=[{}, {tensor}]`
//! splits the columns of each such parameter. Requests become pins of the graph, as do shardings that a model states
//! itself.

use crate::error::Error;
use altiplano_ir::graph::{Graph, Pin, PinnedDim, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::types::TensorType;
use std::collections::BTreeSet;
use std::str::FromStr;

/// A layout for all parameters and values whose names match a pattern, in which `*` matches anything.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedPin {
    /// The text that the user wrote.
    text: String,
    pattern: String,
    dims: Vec<PinnedDim>,
}

/// Reasons why a pin is invalid.
#[derive(Debug, thiserror::Error)]
pub enum PinProblem {
    #[error("no parameter or value has such a name; `altiplano show MODEL` prints them")]
    MatchesNothing,
    #[error("'{name}' is {ty}, and the sharding is of {} dimensions", .dims)]
    Rank { name: String, ty: TensorType, dims: usize },
    #[error("dimension {dim} of '{name}', which is {ty}, does not divide by {parts}")]
    Divides { name: String, ty: TensorType, dim: usize, parts: u64 },
    #[error("the size of axis `{axis}` is unknown; give it by {option}")]
    NoSize { axis: &'static str, option: &'static str },
    #[error("there is no axis `{axis}`; the axes are `data` and `tensor`")]
    UnknownAxis { axis: String },
}

impl FromStr for NamedPin {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<NamedPin, &'static str> {
        const EXPECTED: &str = "expected PATTERN=[{AXIS, ...}, ...], a pair of braces for each dimension";
        let at = text.rfind("=[").ok_or(EXPECTED)?;
        let inside = text[at + 2..].trim_end().strip_suffix(']').ok_or(EXPECTED)?;
        let dims = dims(inside).ok_or(EXPECTED)?;
        let mut seen = BTreeSet::new();
        if dims.iter().flat_map(|d| &d.axes).any(|axis| !seen.insert(axis)) {
            return Err("an axis is named twice");
        }
        Ok(NamedPin { text: text.to_string(), pattern: text[..at].to_string(), dims })
    }
}

/// Parses `{data}, {}, {tensor, ?}`, where `?` lets further axes split the dimension.
fn dims(text: &str) -> Option<Vec<PinnedDim>> {
    let mut dims = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (inside, after) = rest.strip_prefix('{')?.split_once('}')?;
        let mut axes: Vec<String> = inside.split(',').map(|a| a.trim().to_string()).collect();
        if axes == [""] {
            axes.clear();
        }
        let open = axes.pop_if(|axis| axis == "?").is_some();
        if axes.iter().any(|a| a.is_empty() || a.contains(['?', '{', '[', ']'])) {
            return None;
        }
        dims.push(PinnedDim { axes, open });
        rest = match after.trim_start() {
            "" => "",
            more => more.strip_prefix(',').map(str::trim_start).filter(|m| !m.is_empty())?,
        };
    }
    Some(dims)
}

/// Returns whether a name matches a pattern, in which only `*` is special.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// The parameters and non-constant values whose names match a pattern.
pub fn named(graph: &Graph, pattern: &str) -> Vec<(ValueId, String)> {
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let name = |v: ValueId| match &graph.node(v).op {
        Op::Parameter(p) => Some(p.name.clone()),
        _ => Some(graph.node(v).name.clone()).filter(|name| !name.is_empty() && varies[v.index()]),
    };
    let named = graph.values().filter_map(|v| Some((v, name(v)?)));
    named.filter(|(_, name)| matches(pattern, name)).collect()
}

/// Names similar to `wanted`, nearest first. Among names that differ only in numbers, one is listed.
pub(crate) fn near<'a>(names: impl Iterator<Item = &'a str>, wanted: &str) -> Vec<String> {
    const SHOWN: usize = 3;
    let wanted = wanted.replace('*', "").to_lowercase();
    let mut seen = BTreeSet::new();
    let alike = |name: &&str| seen.insert(name.replace(|c: char| c.is_ascii_digit(), ""));
    let mut found: Vec<(usize, usize, &str)> =
        names.filter(alike).map(|name| (changes(&wanted, &name.to_lowercase()), name.len(), name)).collect();
    found.sort();
    found.into_iter().take(SHOWN).map(|(.., name)| name.to_string()).collect()
}

/// Minimum number of insertions, deletions and substitutions that turn `from` into some part of `to` (Sellers 1980).
fn changes(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row = vec![0; to.len() + 1];
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &b) in to.iter().enumerate() {
            let cost = (row[j] + 1).min(row[j + 1] + 1).min(diagonal + usize::from(a != b));
            diagonal = std::mem::replace(&mut row[j + 1], cost);
        }
    }
    row.into_iter().min().unwrap_or(0)
}

/// Adds the pins to a graph. `sizes` are the fixed sizes of the axes `data` and `tensor`, if any. A batch dimension may
/// have any size, since microbatches do.
pub fn apply(graph: &mut Graph, pins: &[NamedPin], sizes: [Option<u32>; 2]) -> Result<(), Error> {
    for pin in pins {
        let problem = |problem| Error::Pin { pin: pin.text.clone(), problem: Box::new(problem) };
        let mut mesh: Vec<(String, u64)> = Vec::new();
        for axis in pin.dims.iter().flat_map(|d| &d.axes) {
            let (axis, option, size) = match axis.as_str() {
                "data" => ("data", "--dp", sizes[0]),
                "tensor" => ("tensor", "--tp", sizes[1]),
                _ => return Err(problem(PinProblem::UnknownAxis { axis: axis.clone() })),
            };
            let size = size.ok_or_else(|| problem(PinProblem::NoSize { axis, option }))?;
            mesh.push((axis.to_string(), size as u64));
        }
        let found = named(graph, &pin.pattern);
        if found.is_empty() {
            return Err(problem(PinProblem::MatchesNothing));
        }
        for (value, name) in found {
            let (ty, batch_dims) = (graph.ty(value).clone(), graph.node(value).batch_dims);
            if ty.rank() != pin.dims.len() {
                return Err(problem(PinProblem::Rank { name, ty, dims: pin.dims.len() }));
            }
            for (dim, pinned) in pin.dims.iter().enumerate() {
                let of = |axis: &String| mesh.iter().find(|(name, _)| name == axis).map_or(1, |(_, size)| *size);
                let parts: u64 = pinned.axes.iter().map(of).product();
                if batch_dims >> dim & 1 == 0 && parts > 0 && ty.shape[dim] % parts != 0 {
                    return Err(problem(PinProblem::Divides { name, ty, dim, parts }));
                }
            }
            graph.pin(Pin { value, mesh: mesh.clone(), dims: pin.dims.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_all_of_a_name() {
        let cases = [
            ("w", "w", true),
            ("w", "ww", false),
            ("*", "", true),
            ("params['h*']['w']", "params['h12']['w']", true),
            ("params['h*']['w']", "params['h12']['b']", false),
            ("*w*", "a.w.b", true),
            ("a*a", "a", false),
            ("*ab*b", "abab", true),
        ];
        for (pattern, name, expected) in cases {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn near_names_are_those_with_it_inside_and_then_those_spelled_alike() {
        let names = ["params['h0']['fc']['w']", "params['h1']['fc']['w']", "params['wte']", "tokens"];
        let near = |wanted: &str| near(names.into_iter(), wanted);
        assert_eq!(near("wte"), ["params['wte']", "tokens", "params['h0']['fc']['w']"]);
        assert_eq!(near("fc')['w")[0], "params['h0']['fc']['w']");
        assert_eq!(near("parms['h*']['fc']['w']")[0], "params['h0']['fc']['w']");
        assert_eq!(near("token")[0], "tokens");
    }

    #[test]
    fn shardings_are_read_as_they_are_printed() {
        let pin: NamedPin = "p['w']=[{data, tensor}, {}, {?}]".parse().expect("a pin");
        assert_eq!(pin.pattern, "p['w']");
        let axes: Vec<(usize, bool)> = pin.dims.iter().map(|d| (d.axes.len(), d.open)).collect();
        assert_eq!(axes, [(2, false), (0, false), (0, true)]);
        for wrong in ["w", "w=", "w=[", "w=[data]", "w=[{data}", "w=[{data},]", "w=[{data},{data}]", "w=[{?, data}]"] {
            assert!(wrong.parse::<NamedPin>().is_err(), "{wrong}");
        }
        assert_eq!("loss=[]".parse::<NamedPin>().map(|p| p.dims.len()), Ok(0));
    }
}

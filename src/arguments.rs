//! Which arguments of an imported function are trained and which are the batch.
//!
//! A framework exports one flat list of arguments. Names tell them apart where there are names (`params['h0']['w']`,
//! `tokens`), options where there are none. A wrong guess would train the data, so what is not clear is asked.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Input, Op, Parameter};
use altiplano_ir::types::TensorType;
use std::fmt;

/// An argument of the model's function.
#[derive(Clone, Debug, PartialEq)]
pub struct Argument {
    /// The name that the file gives it, where it gives one.
    pub name: Option<String>,
    pub ty: TensorType,
    pub value: ValueId,
}

/// Why arguments cannot be told apart.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ArgumentError {
    #[error("--{option}: '{selection}' names no argument; the arguments are\n{list}")]
    NoSuchArgument { option: &'static str, selection: String, list: Listing },
    #[error("--{option}: '{selection}' is not a position, a range of positions (0-11) or a name")]
    Selection { option: &'static str, selection: String },
    #[error("argument {position} ('{name}') is named by both --params and --inputs")]
    Both { position: usize, name: String },
    #[error("argument {position} ('{name}') is named by neither --params nor --inputs")]
    Neither { position: usize, name: String },
    #[error("--params: argument {position} ('{name}') is {ty}, and only floats can be trained")]
    NotTrainable { position: usize, name: String, ty: TensorType },
    #[error(
        "it is not clear which arguments are trained; say so with --params or --inputs, by position, range or name (for example {example}). The arguments are\n{list}"
    )]
    Unclear { example: String, list: Listing },
}

/// The arguments, one a line.
#[derive(Clone, Debug, PartialEq)]
pub struct Listing(Vec<(String, TensorType)>);

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (name, ty)) in self.0.iter().enumerate() {
            if position > 0 {
                writeln!(f)?;
            }
            write!(f, "  {position:>4}  {name}  {ty}")?;
        }
        Ok(())
    }
}

/// Names of the first argument group that mean: trained.
const TRAINED: [&str; 9] = ["params", "param", "parameters", "weights", "weight", "w", "state", "variables", "model"];

/// Names that mean: part of the batch, or given anew for each step.
const GIVEN: [&str; 29] = [
    "tokens",
    "token",
    "labels",
    "label",
    "batch",
    "inputs",
    "input",
    "input_ids",
    "ids",
    "x",
    "y",
    "images",
    "image",
    "targets",
    "target",
    "mask",
    "attention_mask",
    "positions",
    "position_ids",
    "data",
    "key",
    "rng",
    "rngs",
    "seed",
    "features",
    "pixel_values",
    "example",
    "examples",
    "dropout_key",
];

/// For each argument whether it is trained. `params` and `inputs` select arguments by position (`3`), range (`0-11`),
/// whole name (`params['wte']`), group (`params`: the part before the first bracket, dot or slash) or prefix (`params['h0*`).
pub fn trained(arguments: &[Argument], params: &[String], inputs: &[String]) -> Result<Vec<bool>, ArgumentError> {
    let chosen = match (params, inputs) {
        ([], []) => by_name(arguments)?,
        (params, []) => select("params", params, arguments)?,
        ([], inputs) => {
            let given = select("inputs", inputs, arguments)?;
            given.iter().zip(arguments).map(|(given, a)| !given && a.ty.dtype.is_float()).collect()
        }
        (params, inputs) => {
            let trained = select("params", params, arguments)?;
            let given = select("inputs", inputs, arguments)?;
            for (position, argument) in arguments.iter().enumerate() {
                let name = display_name(position, argument);
                match (trained[position], given[position]) {
                    (true, true) => return Err(ArgumentError::Both { position, name }),
                    (false, false) => return Err(ArgumentError::Neither { position, name }),
                    _ => {}
                }
            }
            trained
        }
    };
    for (position, argument) in arguments.iter().enumerate().filter(|(i, _)| chosen[*i]) {
        if !argument.ty.dtype.is_float() {
            let name = display_name(position, argument);
            return Err(ArgumentError::NotTrainable { position, name, ty: argument.ty.clone() });
        }
    }
    Ok(chosen)
}

/// The graph in which the trained arguments are parameters.
pub fn with_parameters(graph: &Graph, arguments: &[Argument], trained: &[bool]) -> Graph {
    let mut graph = graph.clone();
    for (argument, trained) in arguments.iter().zip(trained) {
        let node = &mut graph.nodes[argument.value.index()];
        node.op = match (&node.op, trained) {
            (Op::Input(Input { name, ty }), true) => Op::Parameter(Parameter { name: name.clone(), ty: ty.clone() }),
            (Op::Parameter(Parameter { name, ty }), false) => Op::Input(Input { name: name.clone(), ty: ty.clone() }),
            (op, _) => op.clone(),
        };
    }
    graph
}

/// The first group is trained where its name says so, or where all other groups are named like a batch.
fn by_name(arguments: &[Argument]) -> Result<Vec<bool>, ArgumentError> {
    let groups: Option<Vec<&str>> = arguments.iter().map(|a| a.name.as_deref().map(group)).collect();
    let unclear = || ArgumentError::Unclear { example: example(arguments), list: listing(arguments) };
    let groups = groups.filter(|g| !g.is_empty()).ok_or_else(unclear)?;
    let is_trained = |i: usize, group: &str| groups[i] == group && arguments[i].ty.dtype.is_float();
    let all = |group: &str| (0..arguments.len()).map(|i| is_trained(i, group)).collect::<Vec<_>>();
    if let Some(name) = TRAINED.iter().find(|name| groups.contains(name)) {
        return Ok(all(name));
    }
    let first = groups[0];
    let rest_is_given = groups.iter().all(|g| *g == first || GIVEN.contains(g));
    let chosen = all(first);
    if rest_is_given && !GIVEN.contains(&first) && chosen.contains(&true) && groups.iter().any(|g| *g != first) {
        return Ok(chosen);
    }
    Err(unclear())
}

/// `params` of `params['h0']['w']`, `params.h0.w` or `params/h0/w`.
pub fn group(name: &str) -> &str {
    name.split(['[', '.', '/']).next().unwrap_or(name)
}

fn display_name(position: usize, argument: &Argument) -> String {
    argument.name.clone().unwrap_or_else(|| format!("arg{position}"))
}

fn listing(arguments: &[Argument]) -> Listing {
    Listing(arguments.iter().enumerate().map(|(i, a)| (display_name(i, a), a.ty.clone())).collect())
}

/// What the options would look like if the leading floats were what is trained.
fn example(arguments: &[Argument]) -> String {
    let floats = arguments.iter().take_while(|a| a.ty.dtype.is_float()).count();
    let range = |from: usize, to: usize| if from + 1 == to { from.to_string() } else { format!("{from}-{}", to - 1) };
    match floats {
        0 => "--params 0".to_string(),
        n if n == arguments.len() => format!("--params {}", range(0, (n - 1).max(1))),
        n => format!("--params {} --inputs {}", range(0, n), range(n, arguments.len())),
    }
}

fn select(option: &'static str, selections: &[String], arguments: &[Argument]) -> Result<Vec<bool>, ArgumentError> {
    let mut chosen = vec![false; arguments.len()];
    for text in selections {
        let selection = Selection::parse(text.trim())
            .ok_or_else(|| ArgumentError::Selection { option, selection: text.clone() })?;
        let mut found = false;
        for (position, argument) in arguments.iter().enumerate() {
            if selection.holds(position, &display_name(position, argument)) {
                chosen[position] = true;
                found = true;
            }
        }
        let beyond = matches!(selection, Selection::Positions(_, last) if last >= arguments.len());
        if !found || beyond {
            return Err(ArgumentError::NoSuchArgument { option, selection: text.clone(), list: listing(arguments) });
        }
    }
    Ok(chosen)
}

enum Selection<'a> {
    Positions(usize, usize),
    Prefix(&'a str),
    Name(&'a str),
}

impl<'a> Selection<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let position = |t: &str| t.parse::<usize>().ok();
        if text.is_empty() {
            None
        } else if text.bytes().all(|b| b.is_ascii_digit() || b == b'-') {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let (first, last) = (position(first)?, position(last)?);
            (first <= last).then_some(Selection::Positions(first, last))
        } else if let Some(prefix) = text.strip_suffix('*') {
            Some(Selection::Prefix(prefix))
        } else {
            Some(Selection::Name(text))
        }
    }

    fn holds(&self, position: usize, name: &str) -> bool {
        match *self {
            Selection::Positions(first, last) => (first..=last).contains(&position),
            Selection::Prefix(prefix) => name.starts_with(prefix),
            Selection::Name(wanted) => name == wanted || group(name) == wanted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;

    fn arguments(names: &[&str]) -> Vec<Argument> {
        let argument = |(i, name): (usize, &&str)| Argument {
            name: (!name.starts_with('?')).then(|| name.trim_end_matches('#').to_string()),
            ty: TensorType::new(if name.ends_with('#') { DType::I32 } else { DType::F32 }, [4, 2]),
            value: ValueId(i as u32),
        };
        names.iter().enumerate().map(argument).collect()
    }

    fn check(names: &[&str], params: &[&str], inputs: &[&str], expect: Option<&[bool]>) {
        let owned = |list: &[&str]| list.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        let result = trained(&arguments(names), &owned(params), &owned(inputs));
        assert_eq!(result.as_deref().ok(), expect, "{names:?} {params:?} {inputs:?}: {result:?}");
    }

    #[test]
    fn names_and_options_tell_arguments_apart() {
        check(&["params['a']", "params['b']", "tokens#"], &[], &[], Some(&[true, true, false]));
        check(&["net.a", "net.b", "tokens#", "labels"], &[], &[], Some(&[true, true, false, false]));
        check(&["params['step']#", "params['b']", "batch['x']"], &[], &[], Some(&[false, true, false]));
        // Nothing says that `p` is trained and `q` is not.
        check(&["p['a']", "q"], &[], &[], None);
        check(&["?", "?", "?#"], &[], &[], None);
        check(&["tokens#", "labels#"], &[], &[], None);
        check(&["?", "?", "?#"], &["0-1"], &[], Some(&[true, true, false]));
        check(&["?", "?", "?#"], &["0", "arg1"], &["2"], Some(&[true, true, false]));
        check(&["?", "?", "?#"], &[], &["2"], Some(&[true, true, false]));
        check(&["p['a']", "p['b']", "q"], &["p"], &[], Some(&[true, true, false]));
        check(&["p['a']", "p['b']", "q"], &["p['a*"], &["q", "1"], Some(&[true, false, false]));
        // Beyond the last, selected twice, left over, not a float, not a selection.
        check(&["?", "?"], &["0-2"], &[], None);
        check(&["?", "?"], &["0-1"], &["1"], None);
        check(&["?", "?"], &["0"], &["0"], None);
        check(&["?", "?#"], &["0-1"], &[], None);
        check(&["?", "?"], &["1-0"], &[], None);
        check(&["?", "?"], &[""], &[], None);
    }
}

//! Decides which arguments of an imported function are parameters and which are the batch.
//!
//! A framework exports one flat list of arguments. Their names tell the roles, if there are any (`params['h0']['w']`,
//! `tokens`); options do so otherwise. A wrong guess would train the data, so an unclear case is an error that asks the
//! user. Frozen weights are parameters as well: they are loaded, stored and saved like the others.

use crate::pins::matches;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Input, Op, Parameter};
use altiplano_ir::types::TensorType;
use std::collections::BTreeSet;
use std::fmt;

/// An argument of the model's function.
#[derive(Clone, Debug, PartialEq)]
pub struct Argument {
    /// The name in the file, if it has one.
    pub name: Option<String>,
    pub ty: TensorType,
    pub value: ValueId,
}

/// Reasons why the roles of arguments cannot be determined.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ArgumentError {
    #[error("--{option}: '{selection}' names no argument; the arguments are\n{list}")]
    NoSuchArgument { option: &'static str, selection: String, list: Listing },
    #[error("--{option}: '{selection}' is not a position, a range of positions (0-11) or a name")]
    Selection { option: &'static str, selection: String },
    #[error("argument {position} ('{name}') is named by {options}")]
    Contradiction { position: usize, name: String, options: &'static str },
    #[error("--{option}: argument {position} ('{name}') is {ty}, and only floats are parameters")]
    NotTrainable { option: &'static str, position: usize, name: String, ty: TensorType },
    #[error(
        "it is not clear which arguments are trained; say so with --params or --inputs, by position, range or name (for example {example}), and name weights that are not trained with --freeze. The arguments are\n{list}"
    )]
    Unclear { example: String, list: Listing },
}

/// The arguments, one per line.
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

/// Names of the first argument group that mark trained weights.
const TRAINED: [&str; 9] = ["params", "param", "parameters", "weights", "weight", "w", "state", "variables", "model"];

/// Names that mark parts of the batch, or other inputs of each step.
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

/// Names of argument groups that mark frozen weights.
const FROZEN: [&str; 6] = ["frozen", "frozen_params", "base", "base_params", "pretrained", "pretrained_params"];

/// The role of an argument in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A parameter that steps update.
    Trained,
    /// A parameter that no step updates.
    Frozen,
    /// An input of each step.
    Given,
}

/// The roles that the user states. Each entry selects arguments by position (`3`), range (`0-11`), whole name
/// (`params['wte']`), group (`params`: the part before the first bracket, dot or slash) or pattern (`*lora*`, where `*`
/// matches anything).
#[derive(Clone, Copy, Debug, Default)]
pub struct Stated<'a> {
    pub params: &'a [String],
    pub inputs: &'a [String],
    pub freeze: &'a [String],
}

/// Returns the role of each argument.
///
/// `known` holds the roles that the file states, if it does. Arguments that no option selects keep these, except that
/// `params` freezes all other parameters. Without `known`, names decide for arguments that no option selects.
///
/// # Errors
/// Fails with [`ArgumentError`] if a selection matches nothing, if two contradict each other, or if nothing marks the
/// trained arguments.
pub fn roles(arguments: &[Argument], known: Option<&[Role]>, stated: Stated<'_>) -> Result<Vec<Role>, ArgumentError> {
    let trained = select("params", stated.params, arguments)?;
    let given = select("inputs", stated.inputs, arguments)?;
    let frozen = select("freeze", stated.freeze, arguments)?;
    for (position, argument) in arguments.iter().enumerate() {
        let error = |options| {
            let name = display_name(position, argument);
            Err(ArgumentError::Contradiction { position, name, options })
        };
        match (trained[position], given[position], frozen[position]) {
            (true, true, _) => return error("both --params and --inputs"),
            (_, true, true) => return error("both --freeze and --inputs"),
            (false, false, false) if known.is_none() && !stated.params.is_empty() && !stated.inputs.is_empty() => {
                return error("neither --params nor --inputs");
            }
            _ => {}
        }
    }
    let is_float = |i: usize| arguments[i].ty.dtype.is_float();
    let mut roles: Vec<Role> = match known {
        Some(known) => known.to_vec(),
        None if !stated.params.is_empty() => vec![Role::Given; arguments.len()],
        None if !stated.inputs.is_empty() => {
            (0..arguments.len()).map(|i| if is_float(i) { Role::Trained } else { Role::Given }).collect()
        }
        None => {
            let others: Vec<usize> = (0..arguments.len()).filter(|&i| !frozen[i]).collect();
            let named: Vec<Argument> = others.iter().map(|&i| arguments[i].clone()).collect();
            let mut roles = vec![Role::Frozen; arguments.len()];
            let is_given = |a: &Argument| a.name.as_deref().is_some_and(|name| GIVEN.contains(&group(name)));
            let by_name = match frozen.contains(&true) && named.iter().all(is_given) {
                true => vec![Role::Given; named.len()],
                false => by_name(&named)?,
            };
            others.into_iter().zip(by_name).for_each(|(i, role)| roles[i] = role);
            roles
        }
    };
    for i in 0..arguments.len() {
        roles[i] = match roles[i] {
            _ if frozen[i] => Role::Frozen,
            _ if given[i] => Role::Given,
            _ if trained[i] => Role::Trained,
            Role::Trained if !stated.params.is_empty() => Role::Frozen,
            role => role,
        };
    }
    if known.is_none() && !stated.params.is_empty() && stated.inputs.is_empty() {
        // The remaining leaves of a tree of weights are weights.
        let group_of = |i: usize| arguments[i].name.as_deref().map(group);
        let trained: BTreeSet<&str> =
            (0..roles.len()).filter(|&i| roles[i] == Role::Trained).filter_map(group_of).collect();
        let weights = |i: usize| {
            let is_tree = |g: &str| arguments[i].name.as_deref() != Some(g);
            let is_left = roles[i] == Role::Given && is_float(i);
            is_left && group_of(i).is_some_and(|g| is_tree(g) && (FROZEN.contains(&g) || trained.contains(g)))
        };
        let left: Vec<usize> = (0..roles.len()).filter(|&i| weights(i)).collect();
        left.into_iter().for_each(|i| roles[i] = Role::Frozen);
    }
    let wrong = (0..roles.len()).find(|&i| roles[i] != Role::Given && !is_float(i) && (trained[i] || frozen[i]));
    match wrong {
        Some(position) => {
            let option = if trained[position] { "params" } else { "freeze" };
            let (name, ty) = (display_name(position, &arguments[position]), arguments[position].ty.clone());
            Err(ArgumentError::NotTrainable { option, position, name, ty })
        }
        None => Ok(roles),
    }
}

/// Rebuilds the graph with these roles of its arguments.
pub fn with_roles(graph: &Graph, arguments: &[Argument], roles: &[Role]) -> Graph {
    let mut graph = graph.clone();
    for (argument, role) in arguments.iter().zip(roles) {
        let node = &mut graph.nodes[argument.value.index()];
        let (Op::Input(Input { name, ty }) | Op::Parameter(Parameter { name, ty, .. })) = &node.op else { continue };
        let (name, ty) = (name.clone(), ty.clone());
        node.op = match role {
            Role::Given => Op::Input(Input { name, ty }),
            role => Op::Parameter(Parameter { frozen: *role == Role::Frozen, ..Parameter::new(name, ty) }),
        };
    }
    graph
}

/// True if the name of a leaf of a tree of weights marks the tree as frozen.
pub(crate) fn is_frozen_by_name(argument: &Argument) -> bool {
    let name = argument.name.as_deref().unwrap_or_default();
    argument.ty.dtype.is_float() && group(name) != name && FROZEN.contains(&group(name))
}

/// Excludes parameters from weight decay, selected as in [`Stated`].
///
/// # Errors
/// Fails with [`ArgumentError`] if a selection matches no parameter.
pub(crate) fn without_decay(
    graph: &mut Graph,
    arguments: &[Argument],
    selections: &[String],
) -> Result<(), ArgumentError> {
    let is_parameter = |a: &&Argument| matches!(graph.node(a.value).op, Op::Parameter(_));
    let parameters: Vec<Argument> = arguments.iter().filter(is_parameter).cloned().collect();
    let selected = select("no-decay", selections, &parameters)?;
    for (argument, _) in parameters.iter().zip(selected).filter(|(_, selected)| *selected) {
        if let Op::Parameter(parameter) = &mut graph.nodes[argument.value.index()].op {
            parameter.no_decay = true;
        }
    }
    Ok(())
}

/// Roles by name. The first group is trained if its name says so, or if all other groups are named like a batch.
fn by_name(arguments: &[Argument]) -> Result<Vec<Role>, ArgumentError> {
    let groups: Option<Vec<&str>> = arguments.iter().map(|a| a.name.as_deref().map(group)).collect();
    let unclear = || ArgumentError::Unclear { example: example(arguments), list: listing(arguments) };
    let groups = groups.filter(|g| !g.is_empty()).ok_or_else(unclear)?;
    let role = |i: usize, group: &str| match arguments[i].ty.dtype.is_float() {
        true if groups[i] == group => Role::Trained,
        true if FROZEN.contains(&groups[i]) => Role::Frozen,
        _ => Role::Given,
    };
    let all = |group: &str| (0..arguments.len()).map(|i| role(i, group)).collect::<Vec<_>>();
    if let Some(name) = TRAINED.iter().find(|name| groups.contains(name)) {
        return Ok(all(name));
    }
    let Some(&first) = groups.iter().find(|g| !FROZEN.contains(g)) else { return Err(unclear()) };
    let rest_is_given = groups.iter().all(|g| *g == first || GIVEN.contains(g) || FROZEN.contains(g));
    let chosen = all(first);
    if rest_is_given && !GIVEN.contains(&first) && chosen.contains(&Role::Trained) && groups.iter().any(|g| *g != first)
    {
        return Ok(chosen);
    }
    Err(unclear())
}

/// The group of a name: `params` in `params['h0']['w']`, `params.h0.w` or `params/h0/w`.
pub(crate) fn group(name: &str) -> &str {
    name.split(['[', '.', '/']).next().unwrap_or(name)
}

fn display_name(position: usize, argument: &Argument) -> String {
    argument.name.clone().unwrap_or_else(|| format!("arg{position}"))
}

fn listing(arguments: &[Argument]) -> Listing {
    Listing(arguments.iter().enumerate().map(|(i, a)| (display_name(i, a), a.ty.clone())).collect())
}

/// Example options, as if the leading float arguments were the trained ones.
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
    Pattern(&'a str),
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
        } else if text.contains('*') {
            Some(Selection::Pattern(text))
        } else {
            Some(Selection::Name(text))
        }
    }

    fn holds(&self, position: usize, name: &str) -> bool {
        match *self {
            Selection::Positions(first, last) => (first..=last).contains(&position),
            Selection::Pattern(pattern) => matches(pattern, name),
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

    fn owned(list: &[&str]) -> Vec<String> {
        list.iter().map(|s| s.to_string()).collect()
    }

    fn check(names: &[&str], params: &[&str], inputs: &[&str], expect: Option<&[bool]>) {
        let stated = Stated { params: &owned(params), inputs: &owned(inputs), freeze: &[] };
        let result = roles(&arguments(names), None, stated);
        let trained = result.as_ref().ok().map(|roles| roles.iter().map(|r| *r == Role::Trained).collect::<Vec<_>>());
        assert_eq!(trained.as_deref(), expect, "{names:?} {params:?} {inputs:?}: {result:?}");
    }

    #[test]
    fn weights_that_are_not_trained_are_frozen() {
        use Role::{Frozen, Given, Trained};
        let check = |names: &[&str],
                     known: Option<&[Role]>,
                     [params, inputs, freeze]: [&[&str]; 3],
                     expect: &[Role]| {
            let stated = Stated { params: &owned(params), inputs: &owned(inputs), freeze: &owned(freeze) };
            let found = roles(&arguments(names), known, stated);
            assert_eq!(found.as_deref().ok(), Some(expect), "{names:?} {params:?} {inputs:?} {freeze:?}: {found:?}");
        };
        let tree = ["p['a']", "p['lora_b']", "p['step']#", "x"];
        check(&tree, None, [&["*lora*"], &[], &[]], &[Frozen, Trained, Given, Given]);
        let floats = ["p['a']", "p['lora_b']", "x"];
        check(&floats, None, [&["p"], &[], &["p['a*"]], &[Frozen, Trained, Given]);
        check(&["adapters['a']", "base['w']", "x#"], None, [&[]; 3], &[Trained, Frozen, Given]);
        check(&["base['w']", "adapters['a']", "x#"], None, [&[]; 3], &[Frozen, Trained, Given]);
        check(&["params['a']", "net['w']", "x#"], None, [&[], &[], &["net"]], &[Trained, Frozen, Given]);
        check(&["?", "?", "?#"], None, [&["0"], &["2"], &["1"]], &[Trained, Frozen, Given]);
        // Roles that a file states hold unless an option contradicts them.
        let known: &[Role] = &[Trained, Trained, Frozen, Given];
        let names = ["a.w", "a.lora", "b.w", "x"];
        check(&names, Some(known), [&[]; 3], known);
        check(&names, Some(known), [&["*lora"], &[], &[]], &[Frozen, Trained, Frozen, Given]);
        check(&names, Some(known), [&["b"], &[], &[]], &[Frozen, Frozen, Trained, Given]);
        check(&names, Some(known), [&[], &["b"], &["a.w"]], &[Frozen, Trained, Given, Given]);
    }

    #[test]
    fn names_and_options_tell_arguments_apart() {
        check(&["params['a']", "params['b']", "tokens#"], &[], &[], Some(&[true, true, false]));
        check(&["net.a", "net.b", "tokens#", "labels"], &[], &[], Some(&[true, true, false, false]));
        check(&["params['step']#", "params['b']", "batch['x']"], &[], &[], Some(&[false, true, false]));
        // Nothing marks `p` as trained and `q` as not.
        check(&["p['a']", "q"], &[], &[], None);
        check(&["?", "?", "?#"], &[], &[], None);
        check(&["tokens#", "labels#"], &[], &[], None);
        check(&["?", "?", "?#"], &["0-1"], &[], Some(&[true, true, false]));
        check(&["?", "?", "?#"], &["0", "arg1"], &["2"], Some(&[true, true, false]));
        check(&["?", "?", "?#"], &[], &["2"], Some(&[true, true, false]));
        check(&["p['a']", "p['b']", "q"], &["p"], &[], Some(&[true, true, false]));
        check(&["p['a']", "p['b']", "q"], &["p['a*"], &["q", "1"], Some(&[true, false, false]));
        check(&["params['a']", "x"], &["params"], &["x"], Some(&[true, false]));
        // Selections past the end, of one argument twice, of too few arguments, of a non-float, and one that is
        // malformed.
        check(&["?", "?"], &["0-2"], &[], None);
        check(&["?", "?"], &["0-1"], &["1"], None);
        check(&["?", "?"], &["0"], &["0"], None);
        check(&["?", "?#"], &["0-1"], &[], None);
        check(&["?", "?"], &["1-0"], &[], None);
        check(&["?", "?"], &[""], &[], None);
    }
}

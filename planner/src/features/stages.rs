//! Stages of a pipeline given by hand: the blocks of the model in each, and its number of devices.
//!
//! A block is what parameters with a number in their path make up, such as `h.3` or `encoder.block.0`; in a model without
//! such names, it is a repetition in the graph. Embeddings before the first block belong to the first stage, a head
//! after the last to the last one. Shardings, microbatches and whatever else is not given are searched.

use crate::inter_op::submesh::SubmeshShape;
use crate::layers::{blocks, cluster_finely};
use crate::request::{PlanFailure, Request};
use crate::search::sweep;
use altiplano_ir::graph::Graph;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Plan;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Stages that the user gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GivenStages {
    /// The blocks of each stage. Empty if the search cuts the model.
    pub blocks: StageBlocks,
    /// The number of devices of each stage. Empty if the search decides.
    pub devices: Vec<u32>,
}

/// For each stage its first and its last block: `0-11,12-23` or `h.0-h.11,h.12-h.23`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StageBlocks(pub Vec<(BlockName, BlockName)>);

/// A block of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockName {
    /// Its position among all blocks.
    Number(u32),
    /// Parts of the name of a parameter in it: `h.3` is in `transformer.h.3.ln_1.weight`, and `h3` in
    /// `params['h3']['ln1']`.
    Name(String),
}

impl fmt::Display for StageBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stages: Vec<String> = self.0.iter().map(|(first, last)| format!("{first}-{last}")).collect();
        f.write_str(&stages.join(","))
    }
}

impl fmt::Display for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockName::Number(number) => number.fmt(f),
            BlockName::Name(name) => name.fmt(f),
        }
    }
}

/// A stage whose blocks cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no stage; write its first and last block, as in 0-11,12-23 or h.0-h.11,h.12-h.23")]
pub struct NoStage(String);

impl FromStr for StageBlocks {
    type Err = NoStage;

    fn from_str(text: &str) -> Result<StageBlocks, NoStage> {
        let block = |text: &str| match text.trim() {
            "" => None,
            text if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok().map(BlockName::Number),
            text => Some(BlockName::Name(text.to_string())),
        };
        let stage = |text: &str| {
            let (first, last) = text.split_once("..").or(text.split_once('-')).unwrap_or((text, text));
            block(first).zip(block(last)).ok_or_else(|| NoStage(text.to_string()))
        };
        text.split(',').map(stage).collect::<Result<_, _>>().map(StageBlocks)
    }
}

impl GivenStages {
    /// True if the search decides everything.
    pub fn is_empty(&self) -> bool {
        self.blocks.0.is_empty() && self.devices.is_empty()
    }

    /// The first node of each stage in a form of the model; empty if the search cuts it.
    ///
    /// # Errors
    /// If a block does not exist, or stages do not follow each other from the first block to the last.
    pub fn starts(&self, graph: &Graph) -> Result<Vec<u32>, PlanFailure> {
        let StageBlocks(stages) = &self.blocks;
        if stages.is_empty() {
            return Ok(Vec::new());
        }
        let blocks = Blocks::of(graph);
        let cuts = cluster_finely(graph, usize::MAX);
        let cut_before = |at: u32| cuts[cuts.partition_point(|&cut| cut <= at).saturating_sub(1)];
        let mut starts = vec![0];
        // The last block of the stage before, and the first node of that block or of the part that is named.
        let mut before: Option<(usize, u32)> = None;
        for (first, last) in stages {
            let stage = format!("{first}-{last}");
            let ((from, at), (to, end)) = (blocks.find(graph, first)?, blocks.find(graph, last)?);
            let next =
                before.map_or_else(|| blocks.of_kind(first, from, 0), |(last, _)| Some(last + 1)).unwrap_or(from);
            // Names may tell parts of blocks apart.
            let continues = matches!(first, BlockName::Name(_)) && before.is_some_and(|(last, _)| last == from);
            if end < at {
                return refused(&stage, format!("{last} comes before {first}"));
            }
            if from != next && !continues {
                let problem = match blocks.names.get(next) {
                    Some(name) => format!("begins with {}, but {name} comes next", blocks.names[from]),
                    None => format!("nothing is left: {} is the last block", blocks.names[next - 1]),
                };
                return refused(&stage, problem);
            }
            if let Some((_, end)) = before {
                if at <= end {
                    return refused(&stage, format!("{first} is in the stage before"));
                }
                let start = cut_before(at);
                let of_block = blocks.first.get(from).filter(|_| continues).map_or(0, |&first| cut_before(first));
                if start <= of_block.max(starts[starts.len() - 1]) {
                    return refused(&stage, format!("the model cannot be cut before {first}, but only between layers"));
                }
                starts.push(start);
            }
            before = Some((to, end));
        }
        let left = before.zip(stages.last()).and_then(|((last, _), (_, name))| blocks.of_kind(name, last, last + 1));
        match left.map(|left| &blocks.names[left]) {
            Some(name) => refused(&self.blocks.to_string(), format!("{name} is in no stage; {}", blocks.in_words())),
            None => Ok(starts),
        }
    }

    /// True if a plan has these stages.
    pub fn allow(&self, plan: &Plan) -> bool {
        let starts = || plan.stages.iter().map(|stage| plan.layers[stage.layers.start as usize]);
        let Ok(given) = self.starts(&plan.graph) else { return false };
        (given.is_empty() || starts().eq(given.iter().copied()))
            && (self.devices.is_empty()
                || plan.stages.iter().map(|stage| stage.devices.len()).eq(self.devices.iter().map(|&n| n as usize)))
    }

    /// The number of stages, if given.
    fn count(&self) -> Option<u32> {
        let given = [self.blocks.0.len(), self.devices.len()].into_iter().find(|&count| count > 0)?;
        u32::try_from(given).ok()
    }
}

/// Returns the request with the pipeline that its given stages ask for.
///
/// # Errors
/// If the stages contradict each other, the model, the cluster, other options or the target.
pub(crate) fn with_degrees(request: &Request) -> Result<Cow<'_, Request>, PlanFailure> {
    let given = &request.stages;
    let Some(count) = given.count() else { return Ok(Cow::Borrowed(request)) };
    given.starts(&request.graph)?;
    let devices = request.cluster.num_devices();
    let needed: u64 = given.devices.iter().map(|&n| u64::from(n)).sum();
    let of_devices =
        |problem: String| Err(PlanFailure::Stages { option: "stage-devices", given: list(&given.devices), problem });
    if !given.devices.is_empty() && given.devices.len() != count as usize {
        return of_devices(format!("must have one number for each of the {count} stages"));
    }
    if given.devices.contains(&0) {
        return of_devices("each stage needs a device".to_string());
    }
    let is_block = |&&size: &&u32| {
        let groups = &request.cluster.groups;
        groups.iter().any(|g| {
            SubmeshShape::of(size, g.devices_per_node).is_some_and(|s| s.is_block_of(g.nodes, g.devices_per_node))
        })
    };
    if let Some(size) = given.devices.iter().find(|size| !is_block(size)) {
        return of_devices(format!("{size} devices are neither a part of a node that divides it nor whole nodes"));
    }
    if needed > u64::from(devices) {
        return of_devices(format!("is {needed} devices, but the cluster has {devices}"));
    }
    let mut degrees = request.degrees;
    let option = |option, value: u32, problem| Err(PlanFailure::Option { option, value: value.into(), problem });
    match (degrees.pp, degrees.virtual_stages) {
        (Some(pp), _) if pp != count => return option("pp", pp, "is not the number of stages that are given"),
        (_, Some(shared)) if shared > 1 => {
            return option(
                "virtual-stages",
                shared,
                "does not go with stages that are given: each has devices of its own",
            );
        }
        _ => (degrees.pp, degrees.virtual_stages) = (Some(count), Some(1)),
    }
    let request = Request { degrees, ..request.clone() };
    if sweep::is_uniform(&request) {
        not_given(&request, request.target.name())?;
    }
    Ok(Cow::Owned(request))
}

/// Refuses given stages where a plan has equal ones.
///
/// # Errors
/// If stages are given.
pub(crate) fn not_given(request: &Request, target: &'static str) -> Result<(), PlanFailure> {
    let GivenStages { blocks, devices } = &request.stages;
    let (option, given) = match (blocks.0.is_empty(), devices.is_empty()) {
        (true, true) => return Ok(()),
        (false, _) => ("stages", blocks.to_string()),
        (true, false) => ("stage-devices", list(devices)),
    };
    let problem = "has stages of equal size only, with layers dealt out by its own rule".to_string();
    Err(PlanFailure::Lacks { target, option, given, problem })
}

/// Numbers with commas between.
pub(crate) fn list(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// A failure of the option that gives blocks.
fn refused<T>(given: &str, problem: String) -> Result<T, PlanFailure> {
    Err(PlanFailure::Stages { option: "stages", given: given.to_string(), problem })
}

/// The blocks of a model, in order.
struct Blocks {
    names: Vec<String>,
    /// The first node that combines a parameter of the block with other values.
    first: Vec<u32>,
}

impl Blocks {
    fn of(graph: &Graph) -> Blocks {
        let mut first: BTreeMap<String, u32> = BTreeMap::new();
        for (at, name) in uses(graph) {
            if let Some(block) = block_of(name) {
                let known = first.entry(block).or_insert(at);
                *known = at.min(*known);
            }
        }
        let mut found: Vec<(u32, String)> = first.into_iter().map(|(name, at)| (at, name)).collect();
        if found.len() < 2 {
            found = blocks(graph).into_iter().enumerate().map(|(i, at)| (at, format!("block {i}"))).collect();
        }
        found.sort();
        let (first, names) = found.into_iter().unzip();
        Blocks { names, first }
    }

    /// The number of a block or of the one that a parameter is in, and its first node.
    fn find(&self, graph: &Graph, block: &BlockName) -> Result<(usize, u32), PlanFailure> {
        match block {
            BlockName::Number(number) => match self.first.get(*number as usize) {
                Some(&at) => Ok((*number as usize, at)),
                None => refused(&block.to_string(), format!("is no block; {}", self.in_words())),
            },
            BlockName::Name(name) => {
                let wanted = words(name);
                let is_named = |name: &str| words(name).windows(wanted.len()).any(|part| part == wanted);
                let used = uses(graph).filter(|(_, name)| !wanted.is_empty() && is_named(name)).map(|(at, _)| at).min();
                let Some(at) = used else {
                    return refused(name, format!("is in the name of no parameter that is used; {}", self.in_words()));
                };
                Ok((self.first.partition_point(|&start| start <= at).saturating_sub(1), at))
            }
        }
    }

    /// The first block from number `from` on that must be in a stage: one of those that are counted like block `like`, if that is
    /// told by name. Others, such as a classifier after the blocks of a network, go with their neighbours.
    fn of_kind(&self, told: &BlockName, like: usize, from: usize) -> Option<usize> {
        let kind = |block: usize| self.names[block].trim_end_matches(|c: char| c.is_ascii_digit());
        let counts = |block: &usize| matches!(told, BlockName::Number(_)) || kind(*block) == kind(like);
        (from..self.names.len()).find(counts)
    }

    fn in_words(&self) -> String {
        match &self.names[..] {
            [] => "the model has no blocks; cut it by names of parameters".to_string(),
            [only] => format!("the model has one, {only}"),
            [first, .., last] => format!("the model has {}, {first} to {last}, counted from 0", self.names.len()),
        }
    }
}

/// Nodes that combine parameters with other values, each with the name of such a parameter.
fn uses(graph: &Graph) -> impl Iterator<Item = (u32, &str)> {
    // Values that are made of parameters and constants alone, such as casts, may come long before their use.
    let varies = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
    let mut made_of: Vec<Option<&str>> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let of_operands = || graph.node(v).operands.iter().find_map(|o| made_of[o.index()]);
        made_of.push(match &graph.node(v).op {
            Op::Parameter(parameter) => Some(&parameter.name),
            _ if varies[v.index()] => None,
            _ => of_operands(),
        });
    }
    graph.values().filter(move |v| varies[v.index()]).flat_map(move |v| {
        let names: Vec<&str> = graph.node(v).operands.iter().filter_map(|o| made_of[o.index()]).collect();
        names.into_iter().map(move |name| (v.0, name))
    })
}

/// The path of a parameter up to its first number, if the path goes on: `h.3` of `h.3.ln_1.weight`.
fn block_of(name: &str) -> Option<String> {
    let words = words(name);
    let at = words.iter().position(|word| word.bytes().any(|b| b.is_ascii_digit()))?;
    (at + 1 < words.len()).then(|| words[..=at].join("."))
}

/// The words of a parameter's name, with numbers as they are counted: `h003` is `h3`.
fn words(name: &str) -> Vec<String> {
    let of_word = |word: &str| {
        let mut counted = String::new();
        for c in word.chars() {
            // A zero before another digit counts nothing.
            let zeros = counted.len() - counted.trim_end_matches('0').len();
            let lone = zeros == 1 && !counted[..counted.len() - 1].ends_with(|c: char| c.is_ascii_digit());
            if c.is_ascii_digit() && lone {
                counted.pop();
            }
            counted.push(c);
        }
        counted
    };
    name.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).map(of_word).collect()
}

/// The starts of layers, with those of the given stages among them.
pub(crate) fn with_starts(request: &Request, mut layers: Vec<u32>) -> Vec<u32> {
    layers.extend(request.stages.starts(&request.graph).unwrap_or_default());
    layers.sort_unstable();
    layers.dedup();
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_stages_are_numbers_or_names() {
        let read = |text: &str| text.parse::<StageBlocks>().map(|StageBlocks(stages)| stages);
        let number = BlockName::Number;
        let name = |text: &str| BlockName::Name(text.to_string());
        assert_eq!(read("0-11,12-23"), Ok(vec![(number(0), number(11)), (number(12), number(23))]));
        assert_eq!(read("0, 1"), Ok(vec![(number(0), number(0)), (number(1), number(1))]));
        assert_eq!(read("h.0-h.1,h.2"), Ok(vec![(name("h.0"), name("h.1")), (name("h.2"), name("h.2"))]));
        assert_eq!(read("en-0..en-1"), Ok(vec![(name("en-0"), name("en-1"))]));
        for text in ["", "0-", ",1", "-1"] {
            assert!(read(text).is_err(), "{text}");
        }
        assert!(read("99999999999-1").is_err(), "a number that no block has");
    }

    #[test]
    fn blocks_are_paths_up_to_a_number() {
        assert_eq!(words("params['h003']['ln_1']"), ["params", "h3", "ln_1"]);
        assert_eq!(words("s0b00 h100 007 0 10b010"), ["s0b0", "h100", "7", "0", "10b10"]);
        assert_eq!(block_of("transformer.h.3.ln_1.weight").as_deref(), Some("transformer.h.3"));
        assert_eq!(block_of("params['h012']['qkv']").as_deref(), Some("params.h12"));
        assert_eq!(block_of("lm_head.weight"), None);
        assert_eq!(block_of("params['w1']"), None, "the number is that of a tensor");
    }
}

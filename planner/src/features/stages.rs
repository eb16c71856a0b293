//! Stages of a pipeline given by hand: the blocks of the model in each, and its number of devices.
//!
//! A block is a repetition in the model, such as a layer of a transformer, known by its number or by the name of a
//! parameter in it. Embeddings before the first block belong to the first stage, a head after the last to the last one.
//! Shardings, microbatches and whatever else is not given are searched.

use crate::layers::{blocks, cluster_finely};
use crate::request::{PlanFailure, Request};
use crate::search::sweep;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::plan::Plan;
use std::borrow::Cow;
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
        let blocks = blocks(graph);
        let number = |block: &BlockName| number_of(graph, &blocks, block);
        let mut starts = vec![0];
        let mut next = 0;
        for (first, last) in stages {
            let (from, to) = (number(first)?, number(last)?);
            if from != next || to < from {
                let problem = match from == next {
                    true => format!("ends before it begins, with block {to} of {}", blocks.len()),
                    false => format!("begins with block {from} of {}, but block {next} comes next", blocks.len()),
                };
                return refused(&format!("{first}-{last}"), problem);
            }
            next = to + 1;
            starts.extend(blocks.get(next).copied());
        }
        if next < blocks.len() {
            let (_, last) = &stages[stages.len() - 1];
            return refused(&last.to_string(), format!("is not the last block: the model has {}", blocks.len()));
        }
        Ok(starts)
    }

    /// True if a plan has these stages.
    pub fn allow(&self, plan: &Plan) -> bool {
        let starts = || plan.stages.iter().map(|stage| plan.layers[stage.layers.start as usize]);
        let given = self.starts(&plan.graph).unwrap_or_default();
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
    let list = given.devices.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let needed: u64 = given.devices.iter().map(|&n| u64::from(n)).sum();
    let of_devices =
        |problem: String| Err(PlanFailure::Stages { option: "stage-devices", given: list.clone(), problem });
    if !given.devices.is_empty() && given.devices.len() != count as usize {
        return of_devices(format!("must have one number for each of the {count} stages"));
    }
    if given.devices.contains(&0) {
        return of_devices("each stage needs a device".to_string());
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
        let problem = "runs stages of equal size only, with layers dealt out by its own rule".to_string();
        let (target, option) =
            (request.target.name(), if given.devices.is_empty() { "stages" } else { "stage-devices" });
        return Err(PlanFailure::Lacks { target, option, given: count.to_string(), problem });
    }
    Ok(Cow::Owned(request))
}

fn refused<T>(given: &str, problem: String) -> Result<T, PlanFailure> {
    Err(PlanFailure::Stages { option: "stages", given: given.to_string(), problem })
}

/// The number of a block.
fn number_of(graph: &Graph, blocks: &[u32], block: &BlockName) -> Result<usize, PlanFailure> {
    match block {
        BlockName::Number(number) => match *number as usize {
            number if number < blocks.len() => Ok(number),
            _ => refused(&block.to_string(), format!("is no block: the model has {}, counted from 0", blocks.len())),
        },
        BlockName::Name(name) => match first_use(graph, name) {
            Some(at) => Ok(blocks.partition_point(|&start| start <= at).saturating_sub(1)),
            None => refused(name, "is in the name of no parameter that the model uses".to_string()),
        },
    }
}

/// The first node that combines a parameter of this name with other values.
fn first_use(graph: &Graph, name: &str) -> Option<u32> {
    let wanted = segments(name);
    let is_named = |v: ValueId| match &graph.node(v).op {
        Op::Parameter(parameter) => segments(&parameter.name).windows(wanted.len()).any(|part| part == wanted),
        _ => false,
    };
    if wanted.is_empty() {
        return None;
    }
    // Values that are made of parameters and constants alone, such as casts, may come long before their use.
    let varies = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
    let of_name = graph.depends_on(is_named);
    let uses = |v: &ValueId| {
        varies[v.index()] && graph.node(*v).operands.iter().any(|o| of_name[o.index()] && !varies[o.index()])
    };
    graph.values().find(uses).map(|v| v.0)
}

/// The words of a parameter's name.
fn segments(name: &str) -> Vec<&str> {
    name.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect()
}

/// The starts of layers, with those of the given stages among them.
pub(crate) fn with_starts(request: &Request, mut layers: Vec<u32>) -> Vec<u32> {
    let given = request.stages.starts(&request.graph).unwrap_or_default();
    if given.is_empty() {
        return layers;
    }
    // Blocks begin where the finest layers do, unless a layer would have no work.
    let fine = cluster_finely(&request.graph, usize::MAX);
    layers.extend(given.into_iter().filter(|start| fine.contains(start)));
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
    fn names_match_by_whole_words() {
        assert_eq!(segments("params['h3']['ln_1']"), ["params", "h3", "ln_1"]);
        assert_eq!(segments("transformer.h.3.weight"), ["transformer", "h", "3", "weight"]);
    }
}

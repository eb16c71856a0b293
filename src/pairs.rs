//! Pairs of StableHLO programs, one sequential and one of each rank, and proofs that they compute the same.

use crate::error::Error;
use crate::model::{Format, read_bytes};
use crate::units::plural;
use altiplano_import::stablehlo::{Imported, RankOptions, RankProgram, import_ranks, import_whole};
use altiplano_ir::mesh::{Axis, Mesh};
use altiplano_ir::types::TensorType;
use altiplano_prover::pair::{Pair, Part, prove_pair};
use altiplano_prover::{Gap, Kind, Proof};
use std::path::Path;

/// The facts about a per-rank program that its text may lack, as options give them.
#[derive(Clone, Debug, Default)]
pub struct PairOptions {
    /// `data=2,model=4`.
    pub mesh: Option<String>,
    /// `NAME=[{data}, {}]`.
    pub layouts: Vec<String>,
}

/// A pair of programs, read and checked to have the same arguments and results.
pub struct LoadedPair {
    pub sequential: Imported,
    pub ranks: RankProgram,
    /// The leaves of the sequential program's arguments.
    arguments: Vec<altiplano_ir::graph::ValueId>,
    inputs: Vec<Part>,
    outputs: Vec<Part>,
}

impl LoadedPair {
    /// The pair as the prover takes it.
    pub fn pair(&self) -> Pair<'_> {
        Pair {
            sequential: &self.sequential.graph,
            arguments: &self.arguments,
            ranks: &self.ranks.graph,
            mesh: &self.ranks.mesh,
            inputs: &self.inputs,
            outputs: &self.outputs,
        }
    }

    /// Proves that the programs compute the same.
    pub fn prove(&self) -> Result<Proof, Gap> {
        prove_pair(&self.pair())
    }
}

/// Reads a sequential program and a program of each rank.
pub fn load_pair(sequential: &Path, ranks: &Path, options: &PairOptions) -> Result<LoadedPair, Error> {
    let text = read_stablehlo(sequential)?;
    let of_file = |file: &Path, error| Error::StableHlo { file: file.to_path_buf(), error: Box::new(error) };
    let one = import_whole(&text).map_err(|error| of_file(sequential, error))?;
    let rank_options = RankOptions {
        mesh: options.mesh.as_deref().map(mesh_of).transpose()?,
        layouts: options.layouts.iter().map(|text| layout_of(text)).collect::<Result<_, _>>()?,
        arguments: one.arguments.iter().map(|argument| argument.ty.clone()).collect(),
        results: one.graph.outputs.iter().map(|&o| one.graph.ty(o).clone()).collect(),
    };
    let text = read_stablehlo(ranks)?;
    let several = import_ranks(&text, &rank_options).map_err(|error| of_file(ranks, error))?;
    let refused = |problem: String| Error::Pair { file: ranks.to_path_buf(), problem };
    let names = |kind: &str, at: usize| format!("{kind} {at}");
    let bare = several.inputs.iter().all(|input| several.arguments.iter().any(|a| a.value == input.value));
    let whole: Vec<TensorType> = match bare {
        true if several.arguments.len() == one.arguments.len() => rank_options.arguments.clone(),
        _ => several.arguments.iter().map(|argument| argument.ty.clone()).collect(),
    };
    agree(&rank_options.arguments, &whole, |at| names("argument", at)).map_err(refused)?;
    let whole: Vec<TensorType> = several.outputs.iter().map(|output| output.ty.clone()).collect();
    agree(&rank_options.results, &whole, |at| names("result", at)).map_err(refused)?;
    let input = |input: &altiplano_import::stablehlo::RankInput| Part {
        value: input.value,
        whole: input.argument,
        sharding: input.sharding.clone(),
    };
    let outputs = several.outputs.iter().enumerate();
    let outputs = outputs.map(|(whole, o)| Part { value: o.value, whole, sharding: o.sharding.clone() });
    Ok(LoadedPair {
        arguments: one.arguments.iter().map(|argument| argument.value).collect(),
        inputs: several.inputs.iter().map(input).collect(),
        outputs: outputs.collect(),
        sequential: one,
        ranks: several,
    })
}

fn read_stablehlo(file: &Path) -> Result<String, Error> {
    let bytes = read_bytes(file)?;
    match (Format::of(&bytes), String::from_utf8(bytes)) {
        (Format::StableHlo, Ok(text)) => Ok(text),
        _ => {
            let problem = "this is no StableHLO text, which both programs of a pair must be".to_string();
            Err(Error::Pair { file: file.to_path_buf(), problem })
        }
    }
}

/// Checks that both programs have values of the same types.
fn agree(one: &[TensorType], several: &[TensorType], name: impl Fn(usize) -> String) -> Result<(), String> {
    if one.len() != several.len() {
        let kind = name(0).replace(" 0", "s");
        return Err(format!("has {} {kind}, the sequential program {}", several.len(), one.len()));
    }
    let differ = |(_, (a, b)): &(usize, (&TensorType, &TensorType))| a != b;
    match one.iter().zip(several).enumerate().find(differ) {
        Some((at, (one, several))) => Err(format!("{} is {several}, that of the sequential program {one}", name(at))),
        None => Ok(()),
    }
}

/// Reads `data=2,model=4`.
fn mesh_of(text: &str) -> Result<Mesh, Error> {
    let axis = |item: &str| {
        let (name, size) = item.split_once('=')?;
        let size = size.trim().parse().ok().filter(|size| *size > 0)?;
        let name = name.trim().to_string();
        (!name.is_empty()).then_some(Axis { name, size })
    };
    let axes: Option<Vec<Axis>> = text.split(',').map(axis).collect();
    let distinct = |axes: &Vec<Axis>| axes.iter().all(|a| axes.iter().filter(|b| b.name == a.name).count() == 1);
    let problem = "is not of the form data=2,model=4, with each axis once and major axes first";
    let axes = axes.filter(|axes| axes.len() <= 32 && distinct(axes));
    axes.map(|axes| Mesh { axes }).ok_or(Error::Option { option: "--mesh", problem })
}

/// Reads `NAME=[{data}, {}]`.
fn layout_of(text: &str) -> Result<(String, String), Error> {
    let problem = "is not of the form NAME=[{data}, {}]";
    let (name, layout) = text.rsplit_once('=').ok_or(Error::Option { option: "--layout", problem })?;
    Ok((name.trim().to_string(), layout.trim().to_string()))
}

/// A proof of a pair in words.
pub fn pair_text(loaded: &LoadedPair, proof: &Proof) -> String {
    let results = plural(loaded.outputs.len() as u64, "result");
    let mesh = &loaded.ranks.mesh;
    let values = plural(proof.values as u64, "local value");
    format!(
        "proved: every device of {mesh} gets its parts of {results} of the sequential program\n\
         for all arguments, over the reals and in any order of additions, at full size\n  \
         from {values}; assumed: the sharding rule of single ops, and collectives as StableHLO defines them\n  \
         not covered: rounding and overflow"
    )
}

/// The reason why there is no proof, in words.
pub fn pair_gap_text(file: &Path, gap: &Gap) -> String {
    let file = file.display();
    match gap.kind {
        Kind::Differs => format!("{file}: the programs differ; the proof ends at {gap}"),
        Kind::Unrelated | Kind::NoRule => {
            format!("{file}: not proved; the program is wrong, or a rule of the prover is missing, at {gap}")
        }
    }
}

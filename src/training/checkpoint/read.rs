//! Reads checkpoints: finds the newest complete one, and loads its tensors one file at a time, or its weights alone.

use crate::error::Error;
use crate::training::checkpoint::{CheckpointProblem, MANIFEST, Manifest, TensorOf, list, tensors_of, verify};
use altiplano_ir::plan::Plan;
use altiplano_runtime::data::read_safetensors;
use altiplano_runtime::{HostTensor, Session};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The newest complete checkpoint of a folder, and its place; `None` if there are no checkpoints. `on_damaged` receives
/// the errors of newer, damaged ones.
pub fn newest(
    folder: &Path,
    mut on_damaged: impl FnMut(&Error) -> Result<(), Error>,
) -> Result<Option<(Manifest, PathBuf)>, Error> {
    let found = list(folder)?;
    let mut first: Option<Error> = None;
    for checkpoint in found.iter().rev() {
        match verify(&checkpoint.place) {
            Ok(manifest) => return Ok(Some((manifest, checkpoint.place.clone()))),
            Err(Error::Checkpoint { place, problem }) if problem.is_damage() => {
                let error = Error::Checkpoint { place, problem };
                on_damaged(&error)?;
                first.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    match first {
        None => Ok(None),
        Some(newest) => {
            let problem = CheckpointProblem::NoneWhole { count: found.len() as u64, newest: Box::new(newest) };
            Err(problem.at(folder))
        }
    }
}

/// Visits all tensors of a verified checkpoint, with one file in memory at a time.
pub fn for_each_tensor(
    manifest: &Manifest,
    place: &Path,
    mut visit: impl FnMut(TensorOf<'_>, HostTensor) -> Result<(), Error>,
) -> Result<(), Error> {
    for shard in &manifest.files {
        for (key, tensor) in read_safetensors(&place.join(&shard.name))? {
            let unknown = || CheckpointProblem::Tensor { file: shard.name.clone(), tensor: key.clone() }.at(place);
            visit(TensorOf::of_key(&key).ok_or_else(unknown)?, tensor)?;
        }
    }
    Ok(())
}

/// Loads all parameters and state of a checkpoint, all of which must be present.
pub fn load(plan: &Plan, session: &mut Session, manifest: &Manifest, place: &Path) -> Result<(), Error> {
    let name = |of: TensorOf<'_>| match of {
        TensorOf::Parameter { name } => (name.to_string(), None),
        TensorOf::State { parameter, slot } => (parameter.to_string(), Some(slot.to_string())),
    };
    let mut missing: BTreeSet<(String, Option<String>)> = tensors_of(plan).map(name).collect();
    // Loading a parameter also sets its master copy, rounded; so the state must be loaded after all parameters.
    for of_state in [false, true] {
        for_each_tensor(manifest, place, |of, tensor| {
            match of {
                TensorOf::Parameter { name } if !of_state => {
                    missing.remove(&(name.to_string(), None));
                    session.load_parameter(name, &tensor)?;
                }
                TensorOf::State { parameter, slot } if of_state => {
                    missing.remove(&(parameter.to_string(), Some(slot.to_string())));
                    session.load_state(parameter, slot, &tensor)?;
                }
                _ => {}
            }
            Ok(())
        })?;
    }
    match missing.pop_first() {
        None => Ok(()),
        Some((parameter, slot)) => {
            let tensor = slot.map_or(parameter.clone(), |slot| format!("{slot} of {parameter}"));
            Err(CheckpointProblem::NoTensor { tensor }.at(place))
        }
    }
}

/// Loads the weights of a checkpoint, or of the newest complete one in a folder, with its manifest.
pub fn weights(
    place: &Path,
    on_damaged: impl FnMut(&Error) -> Result<(), Error>,
) -> Result<(Manifest, BTreeMap<String, HostTensor>), Error> {
    let (manifest, place) = if place.join(MANIFEST).exists() {
        (verify(place)?, place.to_path_buf())
    } else {
        newest(place, on_damaged)?.ok_or_else(|| CheckpointProblem::None.at(place))?
    };
    let mut weights = BTreeMap::new();
    for_each_tensor(&manifest, &place, |of, tensor| {
        if let TensorOf::Parameter { name } = of {
            weights.insert(name.to_string(), tensor);
        }
        Ok(())
    })?;
    Ok((manifest, weights))
}

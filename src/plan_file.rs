//! Plan files: verified when read, and written atomically.

use crate::error::Error;
use crate::model::{Format, read_bytes};
use crate::prove::drop_stale_proof;
use altiplano_cost_models::Rooflines;
use altiplano_ir::plan::{Plan, PlanError, Stage};
use altiplano_planner::cache::Cache;
use altiplano_planner::predict_plan;
use altiplano_runtime::files;
use serde::de::IgnoredAny;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

/// Reads and verifies a plan file. Predictions are recomputed, since they must follow from the rest of the plan.
pub fn load_plan(file: &Path) -> Result<Plan, Error> {
    plan_of(file, &read_bytes(file)?)
}

/// As [`load_plan`], for a file that is already in memory; a pipe can be read only once.
pub fn plan_of(file: &Path, bytes: &[u8]) -> Result<Plan, Error> {
    let refused = |error| Error::PlanFile { file: file.to_path_buf(), error: Box::new(error) };
    if Format::of(bytes) != Format::PlanJson {
        let begins = bytes.trim_ascii_start().first() == Some(&b'{');
        if let Some(error) = serde_json::from_slice::<IgnoredAny>(bytes).err().filter(|_| begins) {
            return Err(refused(PlanError::not_json(&error)));
        }
        return Err(Error::OtherArtefact {
            file: file.to_path_buf(),
            found: "no plan",
            advice: "write one with `altiplano plan MODEL -o plan.json`",
        });
    }
    let text = String::from_utf8_lossy(bytes);
    let mut plan = Plan::from_json(&text).map_err(refused)?;
    plan.drop_stale_certificate();
    drop_stale_proof(&mut plan);
    match mispredicted(&plan)? {
        None => Ok(plan),
        Some(path) => Err(refused(PlanError::Invalid { path, problem: EDITED })),
    }
}

const EDITED: &str = "does not follow from the plan: the file was edited, or written by another version";

/// The path of a prediction that this version would not make, if any.
fn mispredicted(plan: &Plan) -> Result<Option<String>, Error> {
    // The predictions of a measured profile depend on a file that is not at hand.
    if plan.profile.is_some() {
        return Ok(None);
    }
    let again = predict_plan(plan.clone(), &Rooflines::of(&plan.cluster))?;
    let differs = |(a, b): (&Stage, &Stage)| a.predicted != b.predicted;
    let stage = again.stages.iter().zip(&plan.stages).position(differs);
    let whole = (again.predicted != plan.predicted).then(|| "predicted".to_string());
    Ok(stage.map(|i| format!("stages[{i}].predicted")).or(whole))
}

/// Predicts a plan again by the figures of its cluster, without its measured profile.
pub fn by_cluster(mut plan: Plan) -> Result<Plan, Error> {
    match plan.profile.take() {
        Some(_) => {
            let cluster = plan.cluster.clone();
            Ok(predict_plan(plan, &Rooflines::of(&cluster))?)
        }
        None => Ok(plan),
    }
}

/// Writes a file by renaming a complete one over it, so that a reader never sees half of it. A link stays a link and a
/// device a device: their targets are written.
pub fn write_file(file: &Path, text: &str) -> Result<(), Error> {
    files::write(file, text.as_bytes()).map_err(|error| Error::Write { file: file.to_path_buf(), error })
}

/// Checks that a file could be written, before a long computation whose result goes there.
pub fn expect_writable(file: &Path) -> Result<(), Error> {
    let folder = file.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let error = match () {
        _ if file.is_dir() => std::io::Error::new(ErrorKind::IsADirectory, "is a folder"),
        _ if !folder.exists() => std::io::Error::new(ErrorKind::NotFound, "there is no such folder"),
        _ if !folder.is_dir() => std::io::Error::new(ErrorKind::NotADirectory, "what should be a folder is a file"),
        _ => return Ok(()),
    };
    Err(Error::NoPlace { file: file.to_path_buf(), error })
}

/// Opens the cache of earlier searches by this build of the program; creates the folder if necessary.
pub fn open_cache(folder: &Path) -> Result<Arc<Cache>, Error> {
    // Another build of the same version may price differently.
    let program = std::env::current_exe().and_then(std::fs::metadata);
    let build = program.and_then(|program| Ok((program.len(), program.modified()?))).ok();
    let build = format!("{} {build:?}", env!("CARGO_PKG_VERSION"));
    let cache = Cache::open(folder, &build).map_err(|error| Error::NoPlace { file: folder.to_path_buf(), error })?;
    Ok(Arc::new(cache))
}

//! Plan files: read with everything in them checked, written whole or not at all.

use crate::error::Error;
use crate::model::{Format, read_bytes};
use altiplano_cost_models::Rooflines;
use altiplano_ir::plan::{Plan, PlanError, Stage};
use altiplano_planner::cache::Cache;
use altiplano_planner::judged_again;
use std::fs::Permissions;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

/// Reads and verifies a plan file. What is predicted of the plan is computed again, since it must follow from the rest.
pub fn load_plan(file: &Path) -> Result<Plan, Error> {
    plan_of(file, &read_bytes(file)?)
}

/// [`load_plan`] of a file that was read already, which a pipe can be only once.
pub fn plan_of(file: &Path, bytes: &[u8]) -> Result<Plan, Error> {
    if Format::of(bytes) != Format::PlanJson {
        return Err(Error::OtherArtefact {
            file: file.to_path_buf(),
            found: "no plan",
            advice: "write one with `altiplano plan MODEL -o plan.json`",
        });
    }
    let text = String::from_utf8_lossy(bytes);
    let refused = |error| Error::PlanFile { file: file.to_path_buf(), error: Box::new(error) };
    let plan = Plan::from_json(&text).map_err(refused)?;
    match mispredicted(&plan)? {
        None => Ok(plan),
        Some(path) => Err(refused(PlanError::Invalid { path, problem: EDITED })),
    }
}

const EDITED: &str = "does not follow from the plan: the file was edited, or written by another version";

/// The path of a prediction that this version would not make.
fn mispredicted(plan: &Plan) -> Result<Option<String>, Error> {
    // What a measured profile predicts follows from a file that is elsewhere.
    if plan.profile.is_some() {
        return Ok(None);
    }
    let again = judged_again(plan.clone(), &Rooflines::of(&plan.cluster))?;
    let differs = |(a, b): (&Stage, &Stage)| a.predicted != b.predicted;
    let stage = again.stages.iter().zip(&plan.stages).position(differs);
    let whole = (again.predicted != plan.predicted).then(|| "predicted".to_string());
    Ok(stage.map(|i| format!("stages[{i}].predicted")).or(whole))
}

/// A plan as the figures of its cluster judge it, whatever measured profile did before.
pub fn by_cluster(mut plan: Plan) -> Result<Plan, Error> {
    match plan.profile.take() {
        Some(_) => {
            let cluster = plan.cluster.clone();
            Ok(judged_again(plan, &Rooflines::of(&cluster))?)
        }
        None => Ok(plan),
    }
}

/// Writes a file by renaming a complete one over it, so that a reader never sees half of it. A link stays a link and a
/// device a device: what they lead to is written.
pub fn write_file(file: &Path, text: &str) -> Result<(), Error> {
    // A link to nowhere does not resolve; opening it makes what it names.
    let target = file.canonicalize().unwrap_or(file.to_path_buf());
    let found = std::fs::symlink_metadata(&target).ok();
    // What is open there belongs to somebody who would not see it replaced.
    let is_open = ["/dev", "/proc"].iter().any(|directory| file.starts_with(directory));
    let written = match found {
        Some(found) if is_open || !found.is_file() => std::fs::write(&target, text),
        found => replace(&target, text, found.map(|f| f.permissions())),
    };
    written.map_err(|error| Error::Write { file: file.to_path_buf(), error })
}

/// Whether a file could be written as far as its folder says, to be asked before long work whose result goes there.
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

/// What earlier searches of this very program found, in a folder that is made where there is none.
pub fn open_cache(folder: &Path) -> Result<Arc<Cache>, Error> {
    // Another build may price otherwise without being of another version.
    let program = std::env::current_exe().and_then(std::fs::metadata);
    let build = program.and_then(|program| Ok((program.len(), program.modified()?))).ok();
    let build = format!("{} {build:?}", env!("CARGO_PKG_VERSION"));
    let cache = Cache::open(folder, &build).map_err(|error| Error::NoPlace { file: folder.to_path_buf(), error })?;
    Ok(Arc::new(cache))
}

/// Writes beside a file and renames over it.
fn replace(file: &Path, text: &str, permissions: Option<Permissions>) -> std::io::Result<()> {
    let mut name = file.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.part", std::process::id()));
    let part = file.with_file_name(name);
    let written = std::fs::write(&part, text)
        .and_then(|()| permissions.map_or(Ok(()), |p| std::fs::set_permissions(&part, p)))
        .and_then(|()| std::fs::rename(&part, file));
    written.inspect_err(|_| {
        // Nothing to clean up where the part was never made.
        let _ = std::fs::remove_file(&part);
    })
}

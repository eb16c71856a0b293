//! Plan files: read with everything in them checked, written whole or not at all.

use crate::error::Error;
use crate::model::{Format, read_bytes};
use altiplano_ir::plan::Plan;
use std::path::Path;

/// Reads and verifies a plan file.
pub fn load_plan(file: &Path) -> Result<Plan, Error> {
    let bytes = read_bytes(file)?;
    if Format::of(&bytes) != Format::PlanJson {
        return Err(Error::OtherArtefact {
            file: file.to_path_buf(),
            found: "no plan",
            advice: "write one with `altiplano plan MODEL -o plan.json`",
        });
    }
    let text = String::from_utf8_lossy(&bytes);
    Plan::from_json(&text).map_err(|error| Error::PlanFile { file: file.to_path_buf(), error })
}

/// Writes a file by renaming a complete one over it, so that a reader never sees half of it.
pub fn write_file(file: &Path, text: &str) -> Result<(), Error> {
    let mut name = file.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.part", std::process::id()));
    let part = file.with_file_name(name);
    let written = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, file));
    written.map_err(|error| {
        // Nothing to clean up where the part was never made.
        let _ = std::fs::remove_file(&part);
        Error::Write { file: file.to_path_buf(), error }
    })
}

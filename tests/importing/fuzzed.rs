//! The inputs that fuzzing has kept: each once made a target do something that no other had.

#[path = "../../fuzz/src/ways.rs"]
mod ways;

use altiplano::Format;
use rayon::prelude::*;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use zip::ZipArchive;

/// The kept inputs of a target, with their names.
fn kept(target: &str) -> Vec<(String, Vec<u8>)> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fuzz/kept/{target}.zip"));
    let mut archive = ZipArchive::new(File::open(&file).expect("kept inputs")).expect("an archive");
    let inputs = (0..archive.len()).map(|i| {
        let mut entry = archive.by_index(i).expect("an entry");
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).expect("a whole entry");
        (entry.name().expect("a name").into_owned(), bytes)
    });
    inputs.collect()
}

/// Goes a target's way with all that it has kept.
fn go(target: &str, way: impl Fn(&[u8]) -> bool + Sync) {
    let inputs = kept(target);
    let faults: Vec<&str> = inputs
        .par_iter()
        .filter(|(_, bytes)| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| way(bytes))).is_err())
        .map(|(name, _)| name.as_str())
        .collect();
    assert!(faults.is_empty(), "of {} inputs in fuzz/kept/{target}.zip these panic: {faults:?}", inputs.len());
    assert!(!inputs.is_empty());
}

#[test]
fn kept_models_are_read_or_refused() {
    go("stablehlo", |bytes| ways::model(bytes, Format::StableHlo));
    go("graph_json", |bytes| ways::model(bytes, Format::GraphJson));
    go("config", |bytes| ways::model(bytes, Format::HuggingFaceConfig));
}

#[test]
fn kept_onnx_models_are_read_or_refused() {
    go("onnx", ways::onnx);
}

#[test]
fn kept_programs_of_pytorch_are_read_or_refused() {
    go("torch_export", ways::torch_export);
}

#[test]
fn kept_plan_files_are_read_or_refused() {
    go("plan_file", ways::plan_file);
}

#[test]
fn kept_models_are_planned_and_run() {
    go("plan_and_step", ways::plan_and_step);
}

#[test]
fn kept_files_of_other_kinds_are_read_or_refused() {
    go("other_file", ways::other_file);
}

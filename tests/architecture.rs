//! Allowed dependencies between crates. The planner and the runtime do not know each other: they communicate by data in
//! `ir`.

use std::collections::BTreeSet;
use std::path::Path;

/// The crates of the workspace that each one may import.
const ALLOWED: [(&str, &[&str]); 8] = [
    ("ir", &[]),
    ("transforms", &["ir"]),
    ("import", &["ir", "transforms"]),
    ("cost_models", &["ir"]),
    ("solver", &[]),
    ("planner", &["ir", "transforms", "cost_models", "solver"]),
    ("runtime", &["ir"]),
    ("", &["ir", "transforms", "import", "cost_models", "solver", "planner", "runtime"]),
];

#[test]
fn crates_import_in_one_direction() {
    for (folder, allowed) in ALLOWED {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join("Cargo.toml");
        let text = std::fs::read_to_string(&file).expect("every crate has a Cargo.toml");
        let manifest: toml::Table = text.parse().expect("Cargo.toml is TOML");
        let mut imported = BTreeSet::new();
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let table = manifest.get(section).and_then(|s| s.as_table()).cloned().unwrap_or_default();
            imported.extend(table.keys().filter(|k| k.starts_with("altiplano")).cloned());
        }
        let allowed: BTreeSet<String> = allowed.iter().map(|a| format!("altiplano-{}", a.replace('_', "-"))).collect();
        let forbidden: Vec<_> = imported.difference(&allowed).collect();
        assert!(forbidden.is_empty(), "{} must not import {forbidden:?}", file.display());
    }
}

#[test]
fn files_stay_readable() {
    let mut pending = vec![Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()];
    while let Some(folder) = pending.pop() {
        for entry in std::fs::read_dir(&folder).expect("a readable folder").flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if path.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
                pending.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let lines = std::fs::read_to_string(&path).unwrap_or_default().lines().count();
                assert!(lines <= 900, "{} has {lines} lines; split it", path.display());
            }
        }
    }
}

//! Allowed dependencies between crates. The planner and the runtime do not know each other: they communicate by data in
//! `ir`.

use std::collections::BTreeSet;
use std::path::Path;

/// The crates of the workspace that each one may import.
const ALLOWED: [(&str, &[&str]); 10] = [
    ("ir", &[]),
    ("transforms", &["ir"]),
    ("import", &["ir", "transforms"]),
    ("cost_models", &["ir"]),
    ("solver", &[]),
    ("planner", &["ir", "transforms", "cost_models", "solver"]),
    ("prover", &["ir"]),
    ("runtime", &["ir", "xla"]),
    // Its tests read back what it prints.
    ("xla", &["ir", "import"]),
    ("", &["ir", "transforms", "import", "cost_models", "solver", "planner", "prover", "runtime", "xla"]),
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

/// The paths that documents name in backticks, with `{a, b}` written out.
fn named_paths(text: &str) -> Vec<String> {
    const TOP: [&str; 14] = [
        "ir",
        "transforms",
        "import",
        "cost_models",
        "solver",
        "planner",
        "prover",
        "runtime",
        "xla",
        "src",
        "tests",
        "benches",
        "examples",
        "fuzz",
    ];
    let mut paths = Vec::new();
    for quoted in text.split('`').skip(1).step_by(2) {
        let Some((top, _)) = quoted.split_once('/') else { continue };
        let plain = quoted.chars().all(|c| c.is_ascii_alphanumeric() || "/_-.{}, ".contains(c));
        if !TOP.contains(&top) || !plain || quoted.contains(' ') && !quoted.contains('{') {
            continue;
        }
        match (quoted.split_once('{'), quoted.rsplit_once('}')) {
            (Some((before, rest)), Some((_, after))) => {
                let inside = rest.split('}').next().unwrap_or_default();
                paths.extend(inside.split(',').map(|name| format!("{before}{}{after}", name.trim())));
            }
            _ => paths.push(quoted.to_string()),
        }
    }
    paths
}

#[test]
fn paths_in_documents_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages: Vec<_> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|page| root.join(page)).to_vec();
    let docs = std::fs::read_dir(root.join("docs")).expect("the folder of documents");
    pages.extend(docs.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "md")));
    let mut seen = 0;
    for page in pages {
        let text = std::fs::read_to_string(&page).expect("a readable page");
        for path in named_paths(&text) {
            let exists = root.join(&path).exists() || root.join(format!("{path}.rs")).exists();
            assert!(exists, "{} names {path}, which does not exist", page.display());
            seen += 1;
        }
    }
    assert!(seen > 100, "only {seen} paths were found");
}

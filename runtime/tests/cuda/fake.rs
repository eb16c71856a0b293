//! Folders with fake NVIDIA libraries.

use altiplano_runtime::devices::cuda::Search;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder that is removed with its value.
pub struct Folder(pub PathBuf);

impl Folder {
    /// Creates a folder; `name` must be unique to a test.
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("altiplano-cuda-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch folder");
        Folder(path)
    }

    pub fn search(&self) -> Search {
        Search { folders: vec![self.0.clone()] }
    }

    /// Compiles one of the sources beside this file into the folder. Without gcc it prints a notice and returns false.
    pub fn compile(&self, source: &str, library: &str, definitions: &[&str]) -> bool {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda").join(source);
        let compiled = Command::new("gcc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(self.0.join(library))
            .arg(&source)
            .args(definitions)
            .status();
        match &compiled {
            Ok(status) => assert!(status.success(), "{} compiles", source.display()),
            Err(error) => eprintln!("SKIPPED: there is no gcc: {error}"),
        }
        compiled.is_ok()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A folder with a fake driver of these definitions. Without gcc it prints a notice and returns `None`.
pub fn driver(name: &str, definitions: &[&str]) -> Option<Folder> {
    let folder = Folder::new(name);
    let defaults = ["-DVERSION=13000", "-DINIT=0", "-DDEVICES=2", "-DMAJOR=9"];
    let is_given = |d: &&&str| definitions.iter().any(|given| given.split('=').next() == d.split('=').next());
    let all: Vec<&str> = defaults.iter().filter(|d| !is_given(d)).chain(definitions).copied().collect();
    folder.compile("driver.c", "libcuda.so.1", &all).then_some(folder)
}

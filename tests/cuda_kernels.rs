//! The kernels of real plans, compiled by NVRTC as a GPU's executor has them, where NVRTC is: `tests/oracle/run kernels` installs it, and
//! `ALTIPLANO_CUDA` names a folder that has it.

mod common;

use altiplano::ir::kernels::kernels;
use altiplano::runtime::devices::cuda::{Architecture, Compiler, Search};
use altiplano::runtime::loops::cuda::{Text, text};
use altiplano::runtime::loops::launches;
use altiplano::{load_plan, programs};
use common::{DEMO, Scratch, succeeds};
use std::collections::BTreeSet;

/// All kernels of a plan's programs that have a text.
fn kernels_of(options: &[&str]) -> Vec<Text> {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json");
    succeeds(&[&["plan", DEMO, "-o", &file.display().to_string()], options].concat());
    let programs = programs(&load_plan(&file).expect("the plan is read")).expect("it has programs");
    let mut texts = Vec::new();
    for body in programs.programs.iter().flat_map(|p| &p.bodies) {
        let written: BTreeSet<_> = body.writes.iter().map(|w| w.1).collect();
        for kernel in kernels(&body.graph, &written, false) {
            let made = launches(&body.graph, &kernel).into_iter().flatten();
            texts.extend(made.filter_map(|launch| text(&launch).ok()));
        }
    }
    texts
}

#[test]
fn kernels_of_plans_compile_and_are_found_again() {
    let folders = std::env::var_os("ALTIPLANO_CUDA").map(|all| std::env::split_paths(&all).collect());
    let search = Search { folders: folders.unwrap_or_default() };
    let scratch = Scratch::new();
    let compiler = match Compiler::open(&search, Some(scratch.path("kernels"))) {
        Ok(compiler) => compiler,
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            return;
        }
    };
    for options in [&["--cluster", "local:4"][..], &["--tp", "2", "--pp", "2", "--precision", "bf16"]] {
        let texts = kernels_of(options);
        let distinct: BTreeSet<&str> = texts.iter().map(|text| text.name.as_str()).collect();
        assert!(distinct.len() > 10, "a model has more kernels: {distinct:?}");
        for (major, minor) in [(8, 0), (9, 0), (10, 0)] {
            let architecture = Architecture { major, minor };
            let made = compiler.compile(&texts, architecture).expect("all compile");
            assert_eq!(made.images.len(), distinct.len());
            assert!(made.images.values().all(|image| image.starts_with(b"\x7fELF")), "machine code is an ELF file");
            let again = compiler.compile(&texts, architecture).expect("all are found");
            assert_eq!((again.compiled, again.unkept, again.images == made.images), (0, 0, true));
            eprintln!("{options:?} for {architecture}: {} kernels, {} compiled", distinct.len(), made.compiled);
        }
    }
}

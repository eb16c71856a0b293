//! Compiles the kernels of real plans by NVRTC, as a GPU's executor does, if NVRTC is installed. `tests/oracle/run
//! kernels` installs it, and `ALTIPLANO_CUDA` names its folder.

use crate::common::{DEMO, Scratch, succeeds};
use altiplano::runtime::devices::cuda::{Architecture, Compiler, Search};
use altiplano::runtime::loops::cuda::{Text, text};
use altiplano::runtime::tape::{Options, launched_by, ordered};
use altiplano::{load_plan, programs};
use std::collections::BTreeSet;

/// All kernels of the programs of a model's plan.
fn kernels_of(model: &str, options: &[&str]) -> Vec<Text> {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json");
    succeeds(&[&["plan", model, "-o", &file.display().to_string()], options].concat());
    let programs = programs(&load_plan(&file).expect("the plan is read")).expect("it has programs");
    let mut texts = Vec::new();
    for program in &programs.programs {
        let kernels = ordered(program, Options::default().gathers_ahead);
        let (launched, missing) = launched_by(program, &kernels);
        assert_eq!(missing, []);
        texts.extend(launched.iter().map(|l| text(&l.launch).expect("a text")));
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
    let recorded = |name: &str| format!("{}/tests/models/{name}.mlir", env!("CARGO_MANIFEST_DIR"));
    let (resnet, sorted) = (recorded("resnet"), recorded("moe-sorted"));
    let architectures = [(8, 0), (9, 0), (10, 0)];
    let plans = [
        (DEMO, &["--cluster", "local:4"][..]),
        (DEMO, &["--tp", "2", "--pp", "2", "--precision", "bf16"]),
        (DEMO, &["--cluster", "local:2", "--dp", "2", "--precision", "f16"]),
        (&resnet, &["--cluster", "local:1"]),
        (&resnet, &["--cluster", "local:1", "--precision", "bf16"]),
        (&sorted, &["--cluster", "local:1"]),
        // Attention as one fused kernel.
        (DEMO, &["--cluster", "dgx-h100:1/1"]),
        (DEMO, &["--cluster", "dgx-h100:1/2", "--tp", "2", "--precision", "bf16"]),
    ];
    for (at, (model, options)) in plans.into_iter().enumerate() {
        let texts = kernels_of(model, options);
        let distinct: BTreeSet<&str> = texts.iter().map(|text| text.name.as_str()).collect();
        assert!(distinct.len() > 10, "a model has more kernels: {distinct:?}");
        // tests/oracle/kernels.py compiles such kernels for all architectures.
        let taken = if at == 0 { &architectures[..] } else { &architectures[at % 3..][..1] };
        for &(major, minor) in taken {
            let architecture = Architecture { major, minor };
            let made = compiler.compile(&texts, architecture).expect("all compile");
            assert_eq!(made.images.len(), distinct.len());
            assert!(made.images.values().all(|image| image.starts_with(b"\x7fELF")), "machine code is an ELF file");
            let again = compiler.compile(&texts, architecture).expect("all are found");
            assert_eq!((again.compiled, again.unkept, again.images == made.images), (0, 0, true));
            eprintln!("{model} {options:?} for {architecture}: {} kernels, {} compiled", distinct.len(), made.compiled);
        }
    }
}

//! Kernels are compiled once: checks of what the cache may return.

use crate::fake::Folder;
use altiplano_runtime::devices::cuda::{Architecture, Compiled, Compiler, CudaError};
use altiplano_runtime::loops::cuda::Text;
use std::path::Path;

const HOPPER: Architecture = Architecture { major: 9, minor: 0 };

fn kernel(name: &str) -> Text {
    let source = format!("extern \"C\" __global__ void {name}() {{}}\n");
    Text { name: name.to_string(), source, threads: (32, 1), blocks: 1, shared_bytes: 0 }
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut all: Vec<_> = std::fs::read_dir(folder).expect("the cache").flatten().map(|e| e.path()).collect();
    all.sort();
    all
}

#[test]
fn kernels_are_compiled_once_and_damage_is_noticed() {
    let folder = Folder::new("compile");
    if !folder.compile("nvrtc.c", "libnvrtc.so.13", &[]) {
        return;
    }
    let cache = folder.0.join("deep/kernels");
    let kernels = [kernel("one"), kernel("two"), kernel("one")];
    let compile = |architecture| {
        let compiler = Compiler::open(&folder.search(), Some(cache.clone())).expect("it opens");
        compiler.compile(&kernels, architecture).expect("it compiles")
    };
    let first = compile(HOPPER);
    assert_eq!((first.compiled, first.unkept, first.images.len()), (2, 0, 2));
    assert!(String::from_utf8_lossy(&first.images["two"]).ends_with(&kernel("two").source));
    let again = |what: &str, compiled: usize| {
        let got = compile(HOPPER);
        assert_eq!((got.compiled, &got.images), (compiled, &first.images), "{what}");
    };
    again("all are kept", 0);
    let kept = files(&cache);
    assert_eq!(kept.len(), 2, "nothing else is left behind: {kept:?}");

    let whole = std::fs::read(&kept[0]).expect("a file");
    for length in [0, 1, 20, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&kept[0], &whole[..length]).expect("a file");
        again("cut off", 1);
    }
    for at in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        std::fs::write(&kept[0], &damaged).expect("a file");
        again("damaged", 1);
    }
    std::fs::copy(&kept[1], &kept[0]).expect("a copy");
    again("another kernel's, as a collision would be", 1);
    again("whole again", 0);

    let older = compile(Architecture { major: 8, minor: 6 });
    assert_eq!(older.compiled, 2, "another architecture is another kernel");
}

#[test]
fn without_a_place_to_keep_kernels_all_still_works() {
    let folder = Folder::new("unkept");
    if !folder.compile("nvrtc.c", "libnvrtc.so.13", &[]) {
        return;
    }
    // A folder cannot be created at the path of a file, not even by root.
    let file = folder.0.join("file");
    std::fs::write(&file, "").expect("a file");
    for cache in [None, Some(file.join("kernels"))] {
        let compiler = Compiler::open(&folder.search(), cache).expect("it opens");
        let Compiled { images, compiled, unkept } = compiler.compile(&[kernel("one")], HOPPER).expect("it compiles");
        assert_eq!((images.len(), compiled, unkept), (1, 1, 1));
    }
}

#[test]
fn what_does_not_compile_is_named() {
    let folder = Folder::new("refused");
    if !folder.compile("nvrtc.c", "libnvrtc.so.13", &[]) {
        return;
    }
    let compiler = Compiler::open(&folder.search(), None).expect("it opens");
    let mut bad = kernel("bad");
    bad.source = "#error".into();
    let error = compiler.compile(&[kernel("good"), bad], HOPPER).expect_err("it is refused");
    assert_eq!(error, CudaError::Compile { kernel: "bad".into(), log: "kernel.cu(1): refused".into() });
    let error = compiler.compile(&[kernel("good")], Architecture { major: 7, minor: 0 }).expect_err("too old");
    assert!(error.to_string().contains("does not compile for sm_70"), "{error}");
}

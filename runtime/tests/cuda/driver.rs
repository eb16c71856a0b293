//! Error messages for drivers that are missing, broken, old or without GPUs. gcc compiles a fake driver.

use crate::fake::{Folder, driver};
use altiplano_runtime::devices::cuda::{CudaError, Driver, Kind, Survey};

/// The error of opening a driver and listing its GPUs, as text.
fn failure(name: &str, definitions: &[&str]) -> Option<String> {
    let folder = driver(name, definitions)?;
    let failed = Driver::open(&folder.search()).and_then(|driver| driver.gpus());
    Some(failed.expect_err(name).to_string())
}

#[test]
fn gpus_are_listed_as_the_driver_has_them() {
    let Some(folder) = driver("listed", &[]) else { return };
    let driver = Driver::open(&folder.search()).expect("the driver opens");
    assert_eq!((driver.found.kind, driver.found.version.to_string().as_str()), (Kind::Driver, "13.0"));
    assert_eq!(driver.found.file, folder.0.join("libcuda.so.1"));
    let gpus = driver.gpus().expect("there are some");
    assert_eq!(gpus.len(), 2);
    assert_eq!((gpus[1].index, gpus[1].name.as_str()), (1, "NVIDIA Fake 80GB"));
    assert_eq!((gpus[0].architecture.to_string().as_str(), gpus[0].multiprocessors), ("sm_90", 132));
    assert_eq!((gpus[0].memory_bytes, gpus[0].free_bytes), (80 << 30, Some(64 << 30)));
}

#[test]
fn failures_say_what_to_do() {
    let check = |name: &str, definitions: &[&str], parts: &[&str]| {
        let Some(text) = failure(name, definitions) else { return };
        assert!(!text.contains('\n'), "one line: {text}");
        for part in parts {
            assert!(text.contains(part), "{name}: '{part}' is missing: {text}");
        }
    };
    check("no-device", &["-DINIT=100"], &["finds no GPU", "CUDA_ERROR_NO_DEVICE", "container"]);
    check("none", &["-DDEVICES=0"], &["finds no GPU"]);
    check("old", &["-DVERSION=11040", "-DOLD"], &["CUDA 11.4", "12.0 or newer", "nvidia-driver"]);
    check("init", &["-DINIT=999"], &["cuInit failed", "CUDA_ERROR_UNKNOWN", "it is a fake"]);
    // A code that this driver cannot name, as a newer one may return.
    check("unknown", &["-DINIT=4711"], &["cuInit failed", "code 4711"]);
    check("functions", &["-DOLD"], &["libcuda.so.1: it has no function cuDeviceGetCount", "too old"]);
}

#[test]
fn a_file_that_is_no_library_is_said_to_be_none() {
    let folder = Folder::new("empty");
    let file = folder.0.join("libcuda.so.1");
    for content in ["", "not a library, although it is longer than the header of one would be: 0123456789"] {
        std::fs::write(&file, content).expect("a file");
        match Driver::open(&folder.search()) {
            Err(error @ CudaError::Unloadable { kind: Kind::Driver, .. }) => {
                let text = error.to_string();
                assert!(text.starts_with(&file.display().to_string()) && text.contains("nvidia-driver"), "{text}");
            }
            Ok(_) => eprintln!("SKIPPED: this machine has a driver of its own, which is taken instead"),
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn what_is_usable_needs_all_parts() {
    let Some(folder) = driver("parts", &[]) else { return };
    let mut survey = Survey::of(&folder.search());
    // Nothing runs without a compiler, regardless of the libraries on this machine.
    for (kind, found) in &mut survey.libraries {
        if *kind == Kind::Nvrtc {
            *found = Err(CudaError::MissingLibrary { kind: Kind::Nvrtc });
        }
    }
    let error = survey.usable().expect_err("no NVRTC");
    assert_eq!(error, CudaError::MissingLibrary { kind: Kind::Nvrtc });
    assert!(error.is_setup() && error.to_string().contains("pip install nvidia-cuda-nvrtc"), "{error}");

    let Some(folder) = driver("volta", &["-DMAJOR=6"]) else { return };
    let error = Survey::of(&folder.search()).usable().expect_err("Pascal");
    assert!(matches!(error, CudaError::UnsupportedArchitecture { .. }), "{error}");
    assert!(error.to_string().contains("sm_60") && error.to_string().contains("sm_70"), "{error}");
}

#[test]
fn a_compiler_newer_than_the_driver_is_said_to_be() {
    let survey = |name: &str, version: &str| {
        let folder = driver(name, &[version])?;
        folder.compile("nvrtc.c", "libnvrtc.so.13", &[]);
        let mut survey = Survey::of(&folder.search());
        // This test is not about the matmul library.
        survey.libraries.retain(|(kind, _)| matches!(kind, Kind::Driver | Kind::Nvrtc));
        Some(survey.usable().map(|gpus| gpus.len()))
    };
    let Some(older) = survey("older", "-DVERSION=12080") else { return };
    let text = older.expect_err("NVRTC 13 for a driver of CUDA 12").to_string();
    assert!(
        text.contains("for CUDA 13.0") && text.contains("for CUDA 12.8") && text.contains("a library of CUDA 12"),
        "{text}"
    );
    assert_eq!(survey("equal", "-DVERSION=13000"), Some(Ok(2)));
}

//! Locates CUDA's libraries: their names, their locations, and how to get a missing one.
//!
//! Wheels from PyPI hold a library under its versioned name alone, in a folder that no loader searches. So folders can
//! be given, and those of the active Python environment are among them.

use super::error::CudaError;
use std::fmt;
use std::path::{Path, PathBuf};

/// A CUDA library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Driver,
    Nvrtc,
    CublasLt,
    Nccl,
}

/// Locations that are searched before those of the system's loader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Folders of libraries, of a toolkit, or of Python packages.
    pub folders: Vec<PathBuf>,
}

/// A version, such as `12.8` or `2.28.9`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: Option<u32>,
}

/// A library that was found, as `altiplano devices` lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub kind: Kind,
    /// The file that was loaded, as far as the loader reports it.
    pub file: PathBuf,
    pub version: Version,
}

/// An open library. It is never closed, since CUDA's own threads run in it until the process ends.
#[derive(Clone, Debug)]
pub(super) struct Opened {
    pub kind: Kind,
    pub file: PathBuf,
    library: &'static libloading::Library,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [Kind::Driver, Kind::Nvrtc, Kind::CublasLt, Kind::Nccl];

    /// File names, in the order in which they are tried.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Kind::Driver => &["libcuda.so.1", "libcuda.so"],
            Kind::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Kind::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Kind::Nccl => &["libnccl.so.2", "libnccl.so"],
        }
    }

    pub fn title(self) -> &'static str {
        match self {
            Kind::Driver => "NVIDIA's driver (libcuda.so.1)",
            Kind::Nvrtc => "NVRTC (libnvrtc.so)",
            Kind::CublasLt => "cuBLASLt (libcublasLt.so)",
            Kind::Nccl => "NCCL (libnccl.so.2)",
        }
    }

    pub fn purpose(self) -> &'static str {
        match self {
            Kind::Driver => "it runs programs on GPUs",
            Kind::Nvrtc => "it compiles fused kernels",
            Kind::CublasLt => "it multiplies matrices",
            Kind::Nccl => "it joins several GPUs",
        }
    }

    /// Instructions for a missing library.
    pub fn remedy(self) -> &'static str {
        match self {
            Kind::Driver => {
                "install the driver, 525.60 or newer, from the distribution (nvidia-driver) or nvidia.com; in a container, start it with the GPUs (--gpus all)"
            }
            Kind::Nvrtc => {
                "`pip install nvidia-cuda-nvrtc` in the Python environment in use, or set ALTIPLANO_CUDA or LD_LIBRARY_PATH to the folder that has it"
            }
            Kind::CublasLt => {
                "`pip install nvidia-cublas` in the Python environment in use, or set ALTIPLANO_CUDA or LD_LIBRARY_PATH to the folder that has it"
            }
            Kind::Nccl => {
                "`pip install nvidia-nccl-cu13` in the Python environment in use, or set ALTIPLANO_CUDA or LD_LIBRARY_PATH to the folder that has it"
            }
        }
    }
}

impl Search {
    /// Opens a library: from the given folders, else from the loader's path, else from a toolkit's usual location.
    pub(super) fn open(&self, kind: Kind) -> Result<Opened, CudaError> {
        let mut unloadable = None;
        for candidate in self.candidates(kind.names()) {
            match load(&candidate) {
                Ok(library) => {
                    let file = loaded_from(&candidate).unwrap_or(candidate);
                    return Ok(Opened { kind, file, library });
                }
                Err(problem) if is_absent(&candidate, &problem) => {}
                Err(problem) => {
                    unloadable.get_or_insert(CudaError::Unloadable { kind, file: candidate, problem });
                }
            }
        }
        Err(unloadable.unwrap_or(CudaError::MissingLibrary { kind }))
    }

    /// Opens an optional library under one of these names.
    pub(super) fn open_if_there(&self, names: &[&str]) -> Option<&'static libloading::Library> {
        self.candidates(names).into_iter().find_map(|candidate| load(&candidate).ok())
    }

    /// Candidate files for these names, in the order in which they are tried.
    fn candidates(&self, names: &[&str]) -> Vec<PathBuf> {
        // Absolute paths, so that the loader looks for dependencies beside the library.
        let absolute = |folder: &PathBuf| std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
        let given = self.folders.iter().flat_map(|folder| places(&absolute(folder)));
        let usual = ["/usr/local/cuda/lib64", "/usr/lib/wsl/lib"].map(PathBuf::from);
        let named = || names.iter().map(PathBuf::from);
        let files = |folder: PathBuf| named().map(move |name| folder.join(name)).filter(|file| file.is_file());
        given.flat_map(files).chain(named()).chain(usual.into_iter().flat_map(files)).collect()
    }
}

impl Opened {
    /// The address of a function, as a function pointer of type `F`.
    ///
    /// # Safety
    /// `F` must be a pointer to an `extern "C"` function with the signature of the library's function of this name.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, CudaError> {
        // SAFETY: the caller guarantees the signature, and the library is never closed.
        let found = unsafe { self.library.get::<F>(name) };
        found.map(|symbol| *symbol).map_err(|_| CudaError::MissingFunction {
            kind: self.kind,
            file: self.file.clone(),
            function: name.to_string(),
        })
    }
}

impl Version {
    /// From CUDA's number: 12080 is 12.8.
    pub(super) fn of_cuda(number: i32) -> Version {
        let number = number.max(0) as u32;
        Version { major: number / 1000, minor: number % 1000 / 10, patch: None }
    }

    /// From NCCL's number, since 2.9: 22809 is 2.28.9.
    pub(super) fn of_nccl(number: i32) -> Version {
        let number = number.max(0) as u32;
        Version { major: number / 10_000, minor: number / 100 % 100, patch: Some(number % 100) }
    }

    /// From cuBLAS's number: 130100 is 13.1.0.
    pub(super) fn of_cublas(number: usize) -> Version {
        let number = u32::try_from(number).unwrap_or(0);
        Version { major: number / 10_000, minor: number / 100 % 100, patch: Some(number % 100) }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        self.patch.map_or(Ok(()), |patch| write!(f, ".{patch}"))
    }
}

/// Folders below `folder` that may hold libraries: itself, a toolkit's subfolders, and those of NVIDIA's Python
/// packages.
fn places(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![folder.to_path_buf(), folder.join("lib64"), folder.join("lib")];
    let packages = std::fs::read_dir(folder.join("nvidia")).into_iter().flatten().flatten();
    let mut packages: Vec<PathBuf> = packages.map(|entry| entry.path().join("lib")).collect();
    // Newest first: cu13 before cu12, and those without a version last.
    packages.sort_by(|a, b| b.cmp(a));
    found.append(&mut packages);
    found
}

/// Opens a file, and the libraries that it will later open by name.
fn load(file: &Path) -> Result<&'static libloading::Library, String> {
    // SAFETY: loading runs the library's initialisers. The user installed it as one of NVIDIA's, as for any program
    // that links it.
    let library = unsafe { libloading::Library::new(file) }.map_err(|error| told(&error))?;
    // NVRTC opens its builtins by name alone, which succeeds if they are open already.
    let folder = file.parent().filter(|folder| folder.is_absolute());
    for entry in folder.into_iter().flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten()) {
        let name = entry.file_name().to_string_lossy().into_owned();
        if file.to_string_lossy().contains("libnvrtc.so") && name.starts_with("libnvrtc-builtins.so") {
            // SAFETY: as above.
            if let Ok(builtins) = unsafe { libloading::Library::new(entry.path()) } {
                std::mem::forget(builtins);
            }
        }
    }
    Ok(Box::leak(Box::new(library)))
}

/// The loader's message, which `libloading` holds as the source of its error.
fn told(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |source| source.to_string())
}

/// Returns whether the file itself is missing, as opposed to one that fails to load or lacks a dependency.
fn is_absent(candidate: &Path, problem: &str) -> bool {
    let name = candidate.to_string_lossy();
    problem.strip_prefix(name.as_ref()).is_some_and(|rest| rest.contains("No such file"))
}

/// The path of a library opened by name, from the process's memory mappings on Linux.
fn loaded_from(candidate: &Path) -> Option<PathBuf> {
    if candidate.is_absolute() {
        return Some(candidate.to_path_buf());
    }
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let stem = candidate.to_str()?.split(".so").next()?;
    let path = |line: &str| line.find('/').map(|at| PathBuf::from(&line[at..]));
    let is_it =
        |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&format!("{stem}.so")));
    maps.lines().filter_map(path).find(is_it)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_their_makers_print_them() {
        assert_eq!(Version::of_cuda(12080).to_string(), "12.8");
        assert_eq!(Version::of_nccl(22809).to_string(), "2.28.9");
        assert_eq!(Version::of_cublas(130_100).to_string(), "13.1.0");
        assert!(Version::of_cuda(12080) < Version::of_cuda(13000));
    }

    #[test]
    fn a_library_that_is_not_there_is_told_from_one_that_cannot_be_loaded() {
        let file = Path::new("libcuda.so.1");
        let absent = "libcuda.so.1: cannot open shared object file: No such file or directory";
        assert!(is_absent(file, absent));
        assert!(!is_absent(file, "libnvidia-ml.so: cannot open shared object file: No such file or directory"));
        assert!(!is_absent(file, "libcuda.so.1: file too short"));
    }
}

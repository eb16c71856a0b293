//! Where plugins are: a file that is named, or a package in a Python environment.

use super::PjrtError;
use std::path::{Path, PathBuf};

/// Kinds of devices that plugins exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Platform {
    Cpu,
    Cuda,
    Rocm,
    Tpu,
}

/// The platforms, the packages of PyPI that bring a plugin, and its place in `site-packages`.
const PACKAGES: [(Platform, &str, &str); 6] = [
    (Platform::Cpu, "xla-cpu-pjrt", "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"),
    (Platform::Cpu, "lammps-jax-pjrt-cpu", "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so"),
    (Platform::Cuda, "jax-cuda13-pjrt", "jax_plugins/xla_cuda13/xla_cuda_plugin.so"),
    (Platform::Cuda, "jax-cuda12-pjrt", "jax_plugins/xla_cuda12/xla_cuda_plugin.so"),
    (Platform::Rocm, "jax-rocm7-pjrt", "jax_plugins/xla_rocm7/xla_rocm_plugin.so"),
    (Platform::Tpu, "libtpu", "libtpu/libtpu.so"),
];

impl Platform {
    pub fn name(self) -> &'static str {
        match self {
            Platform::Cpu => "cpu",
            Platform::Cuda => "cuda",
            Platform::Rocm => "rocm",
            Platform::Tpu => "tpu",
        }
    }
}

/// The plugin of a platform: the file that is named, the one in `ALTIPLANO_PJRT_PLUGIN`, or the one of a package in the
/// Python environment that `VIRTUAL_ENV` names.
pub fn find(named: Option<&Path>, platform: Platform) -> Result<PathBuf, PjrtError> {
    if let Some(named) = named {
        return Ok(named.to_path_buf());
    }
    if let Some(file) = std::env::var_os("ALTIPLANO_PJRT_PLUGIN").filter(|file| !file.is_empty()) {
        return Ok(file.into());
    }
    let environment = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    let found = environment.and_then(|folder| in_environment(&folder, platform));
    let package = PACKAGES.iter().find(|(of, ..)| *of == platform).map_or("", |(_, package, _)| package);
    found.ok_or(PjrtError::NotFound { platform: platform.name(), package })
}

/// The first plugin of a platform in a Python environment.
fn in_environment(folder: &Path, platform: Platform) -> Option<PathBuf> {
    let mut pythons: Vec<PathBuf> = std::fs::read_dir(folder.join("lib")).ok()?.flatten().map(|e| e.path()).collect();
    pythons.sort();
    let places = PACKAGES.iter().filter(|(of, ..)| *of == platform);
    let files = places.flat_map(|(.., place)| pythons.iter().map(move |p| p.join("site-packages").join(place)));
    files.into_iter().find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_found_in_its_environment() {
        let folder = std::env::temp_dir().join(format!("altiplano-pjrt-{}", std::process::id()));
        assert_eq!(in_environment(&folder, Platform::Cpu), None);
        let place = folder.join("lib/python3.11/site-packages/lammps_jax_pjrt_cpu");
        std::fs::create_dir_all(&place).expect("a folder");
        let file = place.join("pjrt_c_api_cpu_plugin.so");
        std::fs::write(&file, "").expect("a file");
        assert_eq!(in_environment(&folder, Platform::Cpu), Some(file));
        assert_eq!(in_environment(&folder, Platform::Tpu), None);
        std::fs::remove_dir_all(&folder).expect("the folder is removed");
    }
}

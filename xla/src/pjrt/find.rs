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
    pub const ALL: [Platform; 4] = [Platform::Cpu, Platform::Cuda, Platform::Rocm, Platform::Tpu];

    /// The packages of PyPI that bring a plugin for the platform.
    pub fn packages(self) -> impl Iterator<Item = &'static str> {
        PACKAGES.iter().filter(move |(of, ..)| *of == self).map(|(_, package, _)| *package)
    }

    pub fn name(self) -> &'static str {
        match self {
            Platform::Cpu => "cpu",
            Platform::Cuda => "cuda",
            Platform::Rocm => "rocm",
            Platform::Tpu => "tpu",
        }
    }
}

/// The folders of packages of the Python environment in use: the one that `VIRTUAL_ENV` or `CONDA_PREFIX` names, or else
/// that of the first `python3` on the path.
pub fn site_packages() -> Vec<PathBuf> {
    let named = std::env::var_os("VIRTUAL_ENV").or_else(|| std::env::var_os("CONDA_PREFIX"));
    match named {
        Some(environment) if environment.is_empty() => Vec::new(),
        Some(environment) => packages_of(Path::new(&environment)),
        None => {
            let folders = std::env::var_os("PATH").unwrap_or_default();
            let mut pythons = std::env::split_paths(&folders).filter(|folder| folder.join("python3").is_file());
            let prefix = pythons.next().and_then(|folder| Some(folder.parent()?.to_path_buf()));
            let mut found = prefix.as_deref().map(packages_of).unwrap_or_default();
            // Packages that a user or an administrator added to the system's Python.
            let own = std::env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
            found.extend(own.iter().map(PathBuf::as_path).chain([Path::new("/usr/local")]).flat_map(packages_of));
            found
        }
    }
}

/// The folders of packages below the prefix of a Python.
fn packages_of(prefix: &Path) -> Vec<PathBuf> {
    let versions = std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_python = |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python"));
    let mut pythons: Vec<PathBuf> = versions.filter(is_python).collect();
    pythons.sort();
    let folders = pythons.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name)));
    folders.filter(|folder| folder.is_dir()).collect()
}

/// The plugin of a platform: the file that is named, the one in `ALTIPLANO_PJRT_PLUGIN`, or the one of a package in the
/// Python environment in use.
pub fn find(named: Option<&Path>, platform: Platform) -> Result<PathBuf, PjrtError> {
    if let Some(named) = named {
        return Ok(named.to_path_buf());
    }
    if let Some(file) = std::env::var_os("ALTIPLANO_PJRT_PLUGIN").filter(|file| !file.is_empty()) {
        return Ok(file.into());
    }
    let package = PACKAGES.iter().find(|(of, ..)| *of == platform).map_or("", |(_, package, _)| package);
    among(&site_packages(), platform).ok_or(PjrtError::NotFound { platform: platform.name(), package })
}

/// A plugin of any platform: the file that is named, the one in `ALTIPLANO_PJRT_PLUGIN`, or one of a package, before that
/// of CPUs.
pub fn find_any(named: Option<&Path>) -> Result<PathBuf, PjrtError> {
    let order = [Platform::Cuda, Platform::Rocm, Platform::Tpu, Platform::Cpu];
    let mut found = order.into_iter().map(|platform| find(named, platform));
    found.find(Result::is_ok).unwrap_or_else(|| find(named, Platform::Cpu))
}

/// The first plugin of a platform in folders of packages.
fn among(folders: &[PathBuf], platform: Platform) -> Option<PathBuf> {
    let places = PACKAGES.iter().filter(|(of, ..)| *of == platform);
    places.flat_map(|(.., place)| folders.iter().map(move |folder| folder.join(place))).find(|file| file.is_file())
}

/// The package of PyPI that brought a plugin, with its version: `jax-cuda12-pjrt 0.10.2`. `None` for other files.
pub fn package(file: &Path) -> Option<String> {
    let file = file.canonicalize().ok()?;
    let (_, package, place) = PACKAGES.iter().find(|(.., place)| file.ends_with(place))?;
    let site = file.ancestors().nth(Path::new(place).components().count())?;
    let prefix = format!("{}-", package.replace('-', "_"));
    let folders = std::fs::read_dir(site).ok()?.flatten().map(|entry| entry.file_name());
    let names = folders.filter_map(|name| name.to_str().map(str::to_string));
    let version = |name: String| Some(name.strip_prefix(&prefix)?.strip_suffix(".dist-info")?.to_string());
    names.filter_map(version).next().map(|version| format!("{package} {version}"))
}

/// The platform of a plugin that a package brought. `None` for other files.
pub fn platform_of(file: &Path) -> Option<Platform> {
    let file = file.canonicalize().ok()?;
    PACKAGES.iter().find(|(.., place)| file.ends_with(place)).map(|(platform, ..)| *platform)
}

/// The plugins that are at hand: the one in `ALTIPLANO_PJRT_PLUGIN`, and those of packages in the Python environment in
/// use, each with its platform if that is known.
pub fn at_hand() -> Vec<(Option<Platform>, PathBuf)> {
    let named = std::env::var_os("ALTIPLANO_PJRT_PLUGIN").filter(|value| !value.is_empty()).map(PathBuf::from);
    let folders = site_packages();
    let of = |platform: Platform| Some((Some(platform), among(&folders, platform)?));
    named.into_iter().map(|file| (None, file)).chain(Platform::ALL.into_iter().filter_map(of)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_found_in_its_environment() {
        let folder = std::env::temp_dir().join(format!("altiplano-pjrt-{}", std::process::id()));
        assert_eq!(among(&packages_of(&folder), Platform::Cpu), None);
        let place = folder.join("lib/python3.11/site-packages/lammps_jax_pjrt_cpu");
        std::fs::create_dir_all(&place).expect("a folder");
        let file = place.join("pjrt_c_api_cpu_plugin.so");
        std::fs::write(&file, "").expect("a file");
        assert_eq!(package(&file), None);
        let information = folder.join("lib/python3.11/site-packages/lammps_jax_pjrt_cpu-0.3.1.dist-info");
        std::fs::create_dir_all(information).expect("a folder");
        assert_eq!(package(&file).as_deref(), Some("lammps-jax-pjrt-cpu 0.3.1"));
        assert_eq!(among(&packages_of(&folder), Platform::Cpu), Some(file));
        assert_eq!(among(&packages_of(&folder), Platform::Tpu), None);
        std::fs::remove_dir_all(&folder).expect("the folder is removed");
    }
}

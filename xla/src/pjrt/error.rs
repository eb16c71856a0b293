//! Errors of plugins.

use std::path::PathBuf;

/// The reason why a plugin cannot be used, or what it says itself.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PjrtError {
    #[error(
        "there is no PJRT plugin for {platform}: name one with --plugin FILE or in ALTIPLANO_PJRT_PLUGIN, or install {package} into the Python environment in use (VIRTUAL_ENV, or that of python3)"
    )]
    NotFound { platform: &'static str, package: &'static str },
    #[error("{}: cannot be opened as a PJRT plugin: {why}", path.display())]
    Open { path: PathBuf, why: String },
    #[error("{}: is a library but no PJRT plugin, because it has no function GetPjrtApi", path.display())]
    NotAPlugin { path: PathBuf },
    #[error("{}: has version {}.{} of PJRT's API, and this program needs 0.{least} or later with major version 0", path.display(), found.0, found.1)]
    Version { path: PathBuf, found: (i32, i32), least: i32 },
    #[error("{}: lacks {function} of PJRT's API", path.display())]
    Lacks { path: PathBuf, function: &'static str },
    #[error("XLA cannot {action}: {message}")]
    Refused { action: &'static str, message: String },
    #[error("device {device} does not exist; the client has {devices}")]
    NoDevice { device: usize, devices: usize },
    #[error("tensors of {0} cannot be sent to a device")]
    ElementType(&'static str),
    #[error("the data has {found} bytes, and the tensor {expected}")]
    Size { found: usize, expected: u64 },
    #[error("the program runs on {expected} devices, and there are arguments for {found}")]
    DeviceCount { found: usize, expected: usize },
}

//! The state of CUDA on this machine, and whether it suffices to run programs.

use super::driver::{Architecture, Driver, Gpu};
use super::error::CudaError;
use super::library::{Found, Kind, Search};

/// The GPUs and libraries of a machine, each with the error if it is missing.
#[derive(Clone, Debug, PartialEq)]
pub struct Survey {
    pub gpus: Result<Vec<Gpu>, CudaError>,
    /// Libraries in the order of `Kind::ALL`.
    pub libraries: Vec<(Kind, Result<Found, CudaError>)>,
}

impl Survey {
    /// Looks for all GPUs and libraries.
    pub fn of(search: &Search) -> Survey {
        Survey {
            gpus: Driver::open(search).and_then(|driver| driver.gpus()),
            libraries: Kind::ALL.map(|kind| (kind, search.find(kind))).to_vec(),
        }
    }

    /// The GPUs that can run programs, or the first obstacle. Several GPUs also need [`Kind::Nccl`]; one does not.
    pub fn usable(&self) -> Result<Vec<&Gpu>, CudaError> {
        let gpus = self.gpus.as_ref().map_err(CudaError::clone)?;
        let new_enough: Vec<&Gpu> = gpus.iter().filter(|gpu| gpu.architecture >= Architecture::OLDEST).collect();
        if let ([], Some(gpu)) = (new_enough.as_slice(), gpus.first()) {
            return Err(CudaError::UnsupportedArchitecture {
                index: gpu.index,
                name: gpu.name.clone(),
                found: gpu.architecture,
                needed: Architecture::OLDEST,
            });
        }
        let missing = |(kind, found): &(Kind, Result<Found, CudaError>)| {
            (*kind != Kind::Nccl || new_enough.len() > 1).then(|| found.as_ref().err().cloned()).flatten()
        };
        if let Some(error) = self.libraries.iter().find_map(missing) {
            return Err(error);
        }
        // An older driver cannot load machine code of a newer compiler.
        let found =
            |wanted: Kind| self.libraries.iter().find_map(|(_, f)| f.as_ref().ok().filter(|f| f.kind == wanted));
        match (found(Kind::Driver), found(Kind::Nvrtc)) {
            (Some(driver), Some(nvrtc)) if nvrtc.version.major > driver.version.major => {
                let (library, driver) = (nvrtc.version, driver.version);
                Err(CudaError::LibraryTooNew { file: nvrtc.file.clone(), library, driver })
            }
            _ => Ok(new_enough),
        }
    }
}

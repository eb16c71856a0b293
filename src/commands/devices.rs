//! `altiplano devices`: lists the devices that programs can run on, and how to get missing parts.

use crate::commands::options::cuda_search;
use crate::commands::probe::processors;
use crate::commands::say;
use altiplano::Error;
use altiplano::runtime::devices::cuda::{CudaError, Found, Gpu, Kind, Survey};
use altiplano::units::bytes;
use clap::Args;
use serde_json::{Value, json};

/// List the devices that plans can run on: the CPU, GPUs and their libraries, and how to get missing ones
#[derive(Args)]
pub(crate) struct Devices {
    /// Print JSON (docs/devices.schema.json)
    #[arg(long)]
    json: bool,
}

impl Devices {
    pub(crate) fn run(self) -> Result<(), Error> {
        let (cores, memory_bytes) = processors()?;
        let survey = Survey::of(&cuda_search());
        if self.json {
            return say(document(cores, memory_bytes, &survey));
        }
        say(format!(
            "cpu      usable: {cores} cores, {} of memory; with --cluster local:N, N workers share them",
            bytes(memory_bytes)
        ))?;
        match survey.usable() {
            Ok(gpus) => say(format!("cuda     usable: --device cuda, {} GPUs", gpus.len()))?,
            Err(error) => say(format!("cuda     not usable: {error}"))?,
        }
        for gpu in survey.gpus.iter().flatten() {
            say(format!("  {}", line(gpu)))?;
        }
        for (kind, found) in &survey.libraries {
            say(match found {
                Ok(Found { version, file, .. }) => format!("  {:<8} {version}  {}", name(*kind), file.display()),
                Err(error) => format!("  {:<8} {}", name(*kind), missing(*kind, error)),
            })?;
        }
        Ok(())
    }
}

/// The name of a library in a list.
fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Driver => "driver",
        Kind::Nvrtc => "nvrtc",
        Kind::CublasLt => "cublasLt",
        Kind::Nccl => "nccl",
    }
}

/// `GPU 0  NVIDIA H200  sm_90, 132 multiprocessors, 141 GB, of which 140 GB are free`
fn line(gpu: &Gpu) -> String {
    let Gpu { index, name, architecture, multiprocessors, memory_bytes, free_bytes } = gpu;
    let free = free_bytes.map(|free| format!(", of which {} are free", bytes(free))).unwrap_or_default();
    format!("GPU {index}  {name}  {architecture}, {multiprocessors} multiprocessors, {}{free}", bytes(*memory_bytes))
}

/// The problem of a missing library, without its name, which stands beside it already.
fn missing(kind: Kind, error: &CudaError) -> String {
    match error {
        CudaError::MissingLibrary { .. } => format!("missing, {}: {}", kind.purpose(), kind.remedy()),
        other => other.to_string(),
    }
}

fn document(cores: u32, memory_bytes: u64, survey: &Survey) -> Value {
    let gpu = |gpu: &Gpu| {
        json!({
            "index": gpu.index,
            "name": gpu.name,
            "architecture": gpu.architecture.to_string(),
            "multiprocessors": gpu.multiprocessors,
            "memory_bytes": gpu.memory_bytes,
            "free_bytes": gpu.free_bytes,
        })
    };
    let library = |(kind, found): &(Kind, Result<Found, CudaError>)| match found {
        Ok(found) => json!({
            "library": name(*kind),
            "version": found.version.to_string(),
            "file": found.file.display().to_string(),
            "problem": null,
        }),
        Err(error) => {
            json!({ "library": name(*kind), "version": null, "file": null, "problem": error.to_string() })
        }
    };
    let usable = survey.usable();
    json!({
        "format": "altiplano.devices",
        "version": 1,
        "cpu": { "cores": cores, "memory_bytes": memory_bytes },
        "cuda": {
            "usable": usable.is_ok(),
            "problem": usable.err().map(|error| error.to_string()),
            "gpus": survey.gpus.iter().flatten().map(gpu).collect::<Vec<_>>(),
            "libraries": survey.libraries.iter().map(library).collect::<Vec<_>>(),
        },
    })
}

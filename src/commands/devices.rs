//! `altiplano devices`: lists the devices that programs can run on, and how to get missing parts.

use crate::commands::options::cuda_search;
use crate::commands::probe::processors;
use crate::commands::say;
use altiplano::Error;
use altiplano::runtime::devices::cuda::{CudaError, Found, Gpu, Kind, Survey};
use altiplano::units::{bytes, plural};
use altiplano_xla::pjrt::{Platform, Plugin, at_hand};
use clap::Args;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

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
        say("xla      plugins of PJRT: --device xla, and `altiplano certify`")?;
        for plugin in plugins(&survey) {
            say(format!("  {:<8} {}", plugin.platform, plugin.line()))?;
        }
        Ok(())
    }
}

/// A plugin of PJRT, or a platform without one.
struct XlaPlugin {
    platform: &'static str,
    file: Option<PathBuf>,
    version: Option<String>,
    /// The devices that programs run on here.
    devices: Option<usize>,
    problem: Option<String>,
}

impl XlaPlugin {
    fn line(&self) -> String {
        let file = self.file.as_ref().map(|file| format!("  {}", file.display())).unwrap_or_default();
        let version = self.version.clone().unwrap_or_default();
        let devices = self.devices.map(|n| format!("; runs on {}", plural(n as u64, "device"))).unwrap_or_default();
        let problem = self.problem.as_ref().map(|problem| format!("; {problem}")).unwrap_or_default();
        format!("{version}{devices}{problem}{file}").trim_start_matches("; ").to_string()
    }
}

/// The plugins of all platforms. Devices are looked for only where the machine has some, since a plugin may wait long
/// for them.
fn plugins(survey: &Survey) -> Vec<XlaPlugin> {
    let at_hand = at_hand();
    let mut all: Vec<XlaPlugin> = at_hand.iter().map(|(platform, file)| plugin(*platform, file, survey)).collect();
    for platform in Platform::ALL {
        if !at_hand.iter().any(|(of, _)| *of == Some(platform)) {
            let packages: Vec<&str> = platform.packages().collect();
            let problem = format!("no plugin; pip install {}", packages.join(" or "));
            let platform = platform.name();
            all.push(XlaPlugin { platform, file: None, version: None, devices: None, problem: Some(problem) });
        }
    }
    all
}

fn plugin(platform: Option<Platform>, file: &Path, survey: &Survey) -> XlaPlugin {
    let name = platform.map_or("named", Platform::name);
    let found = XlaPlugin { platform: name, file: Some(file.into()), version: None, devices: None, problem: None };
    let opened = match Plugin::open_without_devices(file) {
        Ok(opened) => opened,
        Err(error) => return XlaPlugin { problem: Some(error.to_string()), ..found },
    };
    let version = Some(opened.described());
    let looks = match platform {
        Some(Platform::Cpu) => true,
        Some(Platform::Cuda) => survey.usable().is_ok(),
        _ => false,
    };
    if !looks {
        let problem = platform.map(|_| "no devices here, compiles only".to_string());
        return XlaPlugin { version, problem, ..found };
    }
    match opened.client(&[]) {
        Ok(client) => XlaPlugin { version, devices: Some(client.num_devices()), ..found },
        Err(error) => XlaPlugin { version, problem: Some(error.to_string()), ..found },
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
    let plugin = |plugin: XlaPlugin| {
        json!({
            "platform": plugin.platform,
            "version": plugin.version,
            "file": plugin.file.map(|file| file.display().to_string()),
            "devices": plugin.devices,
            "problem": plugin.problem,
        })
    };
    json!({
        "xla": plugins(survey).into_iter().map(plugin).collect::<Vec<_>>(),
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

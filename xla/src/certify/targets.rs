//! Devices that programs are compiled for although they are not there.

use super::CertifyError;
use crate::pjrt::{ClientOption, PjrtError, Platform, Plugin, Topology};
use altiplano_ir::attention::WIDEST;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A kind of device, by the name that users give it: `cuda:H100`, `tpu:v5e`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    pub platform: Platform,
    pub name: &'static str,
    /// Bytes of the device's memory.
    pub memory_bytes: u64,
    form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// The text of a `GpuTargetConfigProto`.
    Gpu(&'static str),
    /// Chips in a grid of so many dimensions, with so many chips a host and devices a chip.
    Tpu { dimensions: usize, chips: [u32; 3], cores: u32 },
}

const fn gpu(name: &'static str, memory_bytes: u64, text: &'static str) -> Target {
    Target { platform: Platform::Cuda, name, memory_bytes, form: Form::Gpu(text) }
}

const fn tpu(name: &'static str, gigabytes: u64, dimensions: usize, chips: [u32; 3], cores: u32) -> Target {
    Target {
        platform: Platform::Tpu,
        name,
        memory_bytes: gigabytes << 30,
        form: Form::Tpu { dimensions, chips, cores },
    }
}

/// Devices that are known. The memory of GPUs is that of their descriptions, that of TPUs of Google's data sheets.
pub const TARGETS: [Target; 8] = [
    gpu("A100", 85_100_068_864, include_str!("../../targets/a100.txtpb")),
    gpu("H100", 84_942_979_072, include_str!("../../targets/h100.txtpb")),
    gpu("H200", 151_397_597_184, include_str!("../../targets/h200.txtpb")),
    gpu("B200", 191_514_411_008, include_str!("../../targets/b200.txtpb")),
    tpu("v4", 32, 3, [2, 2, 1], 1),
    tpu("v5e", 16, 2, [2, 2, 1], 1),
    tpu("v5p", 95, 3, [2, 2, 1], 1),
    tpu("v6e", 32, 2, [2, 2, 1], 1),
];

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.platform.name(), self.name)
    }
}

impl Target {
    /// The target of a name like `cuda:H100`. Upper and lower case are alike.
    pub fn named(name: &str) -> Result<Target, CertifyError> {
        let known = || TARGETS.map(|target| target.to_string()).join(", ");
        let is_it = |target: &Target| target.to_string().eq_ignore_ascii_case(name);
        TARGETS.into_iter().find(is_it).ok_or_else(|| CertifyError::Target { name: name.to_string(), known: known() })
    }

    /// Most elements of a head for which there are kernels of attention.
    pub fn widest_head(&self) -> u64 {
        let is_early = |text: &str| text.contains("cuda_compute_capability { major: 8 ");
        match self.form {
            Form::Gpu(text) if is_early(text) => WIDEST / 2,
            _ => WIDEST,
        }
    }

    /// Describes so many nodes with so many devices each to a plugin.
    pub fn topology(&self, plugin: &Arc<Plugin>, nodes: u32, devices: u32) -> Result<Topology, CertifyError> {
        let made = match self.form {
            Form::Gpu(text) => {
                let option = |name: &str, value: String| ClientOption::Text(name.to_string(), value);
                let size = format!("1x{nodes}x{devices}");
                Topology::new(plugin, "", &[option("target_config", text.to_string()), option("topology", size)])
            }
            Form::Tpu { dimensions, chips, cores } => {
                let grid = grid((nodes * devices).div_ceil(cores), dimensions);
                let text: Vec<String> = grid.iter().map(u32::to_string).collect();
                let per_host: Vec<u32> = grid.iter().zip(chips).map(|(&g, c)| g.min(c)).collect();
                let mut bounds: Vec<i64> = per_host.into_iter().map(i64::from).collect();
                bounds.resize(3, 1);
                let option = ClientOption::Numbers("chips_per_host_bounds".to_string(), bounds);
                Topology::new(plugin, &format!("{}:{}", self.name, text.join("x")), &[option])
            }
        };
        let topology = made.map_err(|error| self.explained(plugin.path(), error))?;
        let platform = topology.platform()?;
        if !platform.eq_ignore_ascii_case(self.platform.name()) {
            return Err(self.wrong(plugin.path(), platform));
        }
        Ok(topology)
    }

    fn wrong(&self, plugin: &Path, found: String) -> CertifyError {
        CertifyError::Platform { path: plugin.to_path_buf(), found, target: self.to_string() }
    }

    /// A plugin of another platform does not know the description.
    fn explained(&self, plugin: &Path, error: PjrtError) -> CertifyError {
        match error {
            PjrtError::Refused { message, .. } => {
                CertifyError::Devices { path: plugin.to_path_buf(), target: self.to_string(), message }
            }
            other => other.into(),
        }
    }

    /// XLA's settings for compiling without devices, and those to try if they fail. Kernels are not timed, and CUDA's
    /// tools are those beside the plugin in its Python environment, if they are there. Without times XLA may choose
    /// tiles for a product that no kernel has; cuBLAS then computes all products.
    pub fn settings(&self, plugin: &Path) -> Vec<Vec<ClientOption>> {
        if self.platform != Platform::Cuda {
            return vec![Vec::new()];
        }
        let mut settings = vec![ClientOption::Number("xla_gpu_autotune_level".to_string(), 0)];
        let packages = plugin.canonicalize().ok().and_then(|path| path.ancestors().nth(3).map(Path::to_path_buf));
        let tools = ["cuda_nvcc", "cu13"].iter().filter_map(|name| Some(packages.as_ref()?.join("nvidia").join(name)));
        if let Some(found) = tools.into_iter().find(|folder| folder.join("nvvm").is_dir()) {
            let folder = found.display().to_string();
            settings.push(ClientOption::Text("xla_gpu_cuda_data_dir".to_string(), folder));
        }
        let library = ClientOption::Flag("xla_gpu_enable_triton_gemm".to_string(), false);
        vec![settings.clone(), settings.into_iter().chain([library]).collect()]
    }
}

/// The most even grid of so many chips whose sizes are powers of two where they can be, smallest first.
fn grid(chips: u32, dimensions: usize) -> Vec<u32> {
    let mut sizes = vec![1_u32; dimensions];
    let mut rest = chips.max(1);
    let mut factor = 2;
    let mut factors = Vec::new();
    while rest > 1 {
        if rest % factor == 0 {
            factors.push(factor);
            rest /= factor;
        } else {
            factor += 1;
        }
    }
    for factor in factors.into_iter().rev() {
        if let Some(least) = sizes.iter_mut().min() {
            *least *= factor;
        }
    }
    sizes.sort_unstable();
    // TPUs with three dimensions have their single layer last.
    if dimensions == 3 && sizes[0] == 1 {
        sizes.rotate_left(1);
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_users_and_others_are_refused_with_the_known_ones() {
        assert_eq!(Target::named("CUDA:h100").map(|t| t.to_string()), Ok("cuda:H100".to_string()));
        let error = Target::named("cuda:H1000").expect_err("no such GPU").to_string();
        assert!(error.starts_with("--for: there is no target 'cuda:H1000'; the targets are cuda:A100, "), "{error}");
    }

    #[test]
    fn wide_heads_have_kernels_on_gpus_after_the_a100() {
        let widest = |name: &str| Target::named(name).map(|target| target.widest_head());
        assert_eq!(["cuda:A100", "cuda:H100", "cuda:B200"].map(widest), [Ok(128), Ok(256), Ok(256)]);
    }

    #[test]
    fn descriptions_say_the_memory_that_the_table_says() {
        for target in TARGETS {
            if let Form::Gpu(text) = target.form {
                let line = format!("device_memory_size: {}\n", target.memory_bytes);
                assert!(text.contains(&line), "{target}");
            }
        }
    }

    #[test]
    fn chips_stand_in_an_even_grid() {
        assert_eq!(grid(16, 2), [4, 4]);
        assert_eq!(grid(8, 2), [2, 4]);
        assert_eq!(grid(4, 3), [2, 2, 1]);
        assert_eq!(grid(64, 3), [4, 4, 4]);
        assert_eq!(grid(12, 2), [3, 4]);
    }
}

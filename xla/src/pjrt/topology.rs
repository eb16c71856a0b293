//! Devices that are described rather than present, for which a plugin compiles.

#![allow(unsafe_code)]

use super::compiled::Compiled;
use super::options::named;
use super::plugin::{Plugin, list, text};
use super::sys::{self, Function, NamedValue};
use super::{ClientOption, Launch, PjrtError};
use std::ffi::c_void;
use std::sync::Arc;

/// A description of devices and of how they are connected.
#[derive(Debug)]
pub struct Topology {
    plugin: Arc<Plugin>,
    topology: *mut c_void,
}

// SAFETY: PJRT's descriptions are constant and may be used from any thread.
unsafe impl Send for Topology {}
// SAFETY: as above.
unsafe impl Sync for Topology {}

impl Drop for Topology {
    fn drop(&mut self) {
        let mut arguments = sys::TopologyDestroy { topology: self.topology, ..Default::default() };
        // Nobody waits for an error at the end.
        let _ = self.plugin.call("forget devices", Function::TopologyDestroy, &mut arguments);
    }
}

impl Topology {
    /// Describes devices to a plugin. TPUs have a name (`v5e:4x4`), and GPUs have options: `target_config`, the text of
    /// a `GpuTargetConfigProto`, and `topology`, `slices x hosts x devices`.
    pub fn new(plugin: &Arc<Plugin>, name: &str, options: &[ClientOption]) -> Result<Topology, PjrtError> {
        let options: Vec<NamedValue> = options.iter().map(named).collect();
        let mut arguments = sys::TopologyCreate {
            name: name.as_ptr().cast(),
            name_size: name.len(),
            options: options.as_ptr(),
            num_options: options.len(),
            ..Default::default()
        };
        plugin.call("describe devices", Function::TopologyCreate, &mut arguments)?;
        Ok(Topology { plugin: plugin.clone(), topology: arguments.topology })
    }

    /// The name of the platform, such as `cuda` or `tpu`.
    pub fn platform(&self) -> Result<String, PjrtError> {
        self.text(Function::TopologyPlatformName)
    }

    /// The version of the platform, in the plugin's own words.
    pub fn platform_version(&self) -> Result<String, PjrtError> {
        self.text(Function::TopologyPlatformVersion)
    }

    fn text(&self, function: Function) -> Result<String, PjrtError> {
        let mut arguments = sys::OwnedText { owner: self.topology, ..Default::default() };
        self.plugin.call("describe devices", function, &mut arguments)?;
        Ok(text(arguments.text, arguments.size))
    }

    /// The number of devices.
    pub fn num_devices(&self) -> Result<usize, PjrtError> {
        let mut arguments = sys::TopologyGetDevices { topology: self.topology, ..Default::default() };
        self.plugin.call("list devices", Function::TopologyGetDevices, &mut arguments)?;
        // SAFETY: the list lives as long as the description.
        Ok(unsafe { list(arguments.devices, arguments.count) }.len())
    }

    /// Compiles StableHLO text for the described devices, with XLA's own settings (`xla_gpu_autotune_level`).
    pub fn compile(&self, module: &str, launch: Launch, settings: &[ClientOption]) -> Result<Compiled, PjrtError> {
        let options = launch.encoded(settings, &[]);
        let program = sys::Program::of_text(module);
        let mut arguments = sys::Compile {
            topology: self.topology,
            program: &program,
            options: options.as_ptr().cast(),
            options_size: options.len(),
            ..Default::default()
        };
        self.plugin.call("compile the program", Function::Compile, &mut arguments)?;
        Ok(Compiled::new(self.plugin.clone(), arguments.executable))
    }
}

//! A compiled program: the memory that it takes, and its final form.

#![allow(unsafe_code)]

use super::PjrtError;
use super::plugin::{Plugin, list};
use super::sys::{self, Function};
use std::ffi::c_void;
use std::sync::Arc;

const ACTION: &str = "describe a program";

/// A program that is compiled, and bound to no devices.
#[derive(Debug)]
pub struct Compiled {
    plugin: Arc<Plugin>,
    executable: *mut c_void,
}

// SAFETY: PJRT's executables may be used from any thread.
unsafe impl Send for Compiled {}
// SAFETY: as above.
unsafe impl Sync for Compiled {}

impl Drop for Compiled {
    fn drop(&mut self) {
        let mut arguments = sys::ExecutableDestroy { executable: self.executable, ..Default::default() };
        // Nobody waits for an error at the end.
        let _ = self.plugin.call("forget a program", Function::ExecutableDestroy, &mut arguments);
    }
}

/// The bytes that a program takes on each device, as the compiler allocates them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub arguments: u64,
    pub outputs: u64,
    /// Outputs in the memory of donated arguments.
    pub aliased: u64,
    pub temporary: u64,
    pub code: u64,
}

impl Memory {
    /// The bytes that the program takes beside its arguments while it runs.
    pub fn beside_arguments(&self) -> u64 {
        self.outputs.saturating_sub(self.aliased) + self.temporary
    }
}

impl Compiled {
    pub(super) fn new(plugin: Arc<Plugin>, executable: *mut c_void) -> Compiled {
        Compiled { plugin, executable }
    }

    /// The number of the program's results.
    pub fn num_outputs(&self) -> Result<usize, PjrtError> {
        let mut arguments = sys::ExecutableNumOutputs { executable: self.executable, ..Default::default() };
        self.plugin.call(ACTION, Function::ExecutableNumOutputs, &mut arguments)?;
        Ok(arguments.count)
    }

    /// The compiler's own count of the memory that the program takes.
    pub fn memory(&self) -> Result<Memory, PjrtError> {
        let mut of = sys::ExecutableMemory { executable: self.executable, ..Default::default() };
        self.plugin.call(ACTION, Function::ExecutableGetCompiledMemoryStats, &mut of)?;
        let bytes = |count: i64| count.max(0) as u64;
        Ok(Memory {
            arguments: bytes(of.arguments),
            outputs: bytes(of.outputs),
            aliased: bytes(of.aliased),
            temporary: bytes(of.temporary),
            code: bytes(of.code),
        })
    }

    /// The program after the compiler's passes, as [`crate::hlo`] reads it.
    pub fn optimized(&self) -> Result<Vec<u8>, PjrtError> {
        let mut program = sys::Program::default();
        let ask = |program: &mut sys::Program| {
            let mut arguments =
                sys::ExecutableOptimizedProgram { executable: self.executable, program, ..Default::default() };
            self.plugin.call(ACTION, Function::ExecutableOptimizedProgram, &mut arguments)
        };
        // The first call tells the size, and the second writes.
        ask(&mut program)?;
        let mut bytes = vec![0u8; program.code_size];
        program.code = bytes.as_mut_ptr().cast();
        ask(&mut program)?;
        // SAFETY: the format is a text that the plugin owns.
        let format = unsafe { list(program.format.cast::<u8>(), program.format_size) };
        match format {
            b"hlo" => Ok(bytes),
            b"hlo_with_config" => Ok(crate::hlo::module_of(&bytes).unwrap_or_default()),
            other => {
                let message = format!("its form is '{}', not HLO", String::from_utf8_lossy(other));
                Err(PjrtError::Refused { action: "show the compiled program", message })
            }
        }
    }
}

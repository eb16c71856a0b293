//! A thin safe layer over PJRT's C API, the interface of XLA's plugins for CPUs, GPUs and TPUs.
//!
//! A [`Plugin`] is a shared library, opened at run time. It makes a [`Client`] with devices, which compiles StableHLO
//! text to an [`Executable`] and keeps tensors in [`Buffer`]s. Calls wait until they are done, except
//! [`Executable::launch`] and [`Buffer::copy_to`].

mod client;
mod compiled;
mod error;
mod find;
mod options;
mod plugin;
mod sys;
mod topology;

#[cfg(test)]
mod tests;

pub use client::{Buffer, Client, Executable, Launched};
pub use compiled::{Compiled, Memory};
pub use error::PjrtError;
pub use find::{Platform, at_hand, find, find_any, package, platform_of, site_packages};
pub use options::{ClientOption, Launch, Order};
pub use plugin::Plugin;
pub use topology::Topology;

use altiplano_ir::graph::Graph;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;

/// The elements of a tensor as devices hold them: row major, little endian, a byte for each boolean.
pub fn to_bytes(tensor: &Tensor) -> Vec<u8> {
    let dtype = tensor.ty.dtype;
    let size = dtype.bytes() as usize;
    let mut bytes = Vec::with_capacity(tensor.data.len() * size);
    for &value in &tensor.data {
        bytes.extend_from_slice(&dtype.to_bits(dtype.round(value)).to_le_bytes()[..size]);
    }
    bytes
}

/// The inverse of [`to_bytes`].
pub fn from_bytes(ty: &TensorType, bytes: &[u8]) -> Tensor {
    let size = ty.dtype.bytes() as usize;
    let element = |chunk: &[u8]| {
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(chunk);
        ty.dtype.from_bits(u64::from_le_bytes(wide))
    };
    Tensor::new(ty.clone(), bytes.chunks_exact(size).map(element).collect())
}

/// Compiles a graph for one device and runs it. `leaves` are the values of its leaves in order, and the result has its
/// outputs.
pub fn run(client: &Client, graph: &Graph, leaves: &[Tensor]) -> Result<Vec<Tensor>, PjrtError> {
    let text = crate::text::module(graph, &Default::default());
    let executable = client.compile(&text, Launch::default())?;
    let buffers: Result<Vec<Buffer>, PjrtError> =
        leaves.iter().map(|leaf| client.buffer(&to_bytes(leaf), &leaf.ty, 0)).collect();
    let buffers = buffers?;
    let results = executable.execute(&[buffers.iter().collect()])?;
    let outputs = graph.outputs.iter().zip(results.into_iter().flatten());
    outputs.map(|(&output, buffer)| Ok(from_bytes(graph.ty(output), &buffer.to_host()?))).collect()
}

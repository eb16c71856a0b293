//! Importers: from the formats that users have to a [`crate::graph::Graph`].

pub mod huggingface;
pub mod json;
pub mod onnx;
pub mod stablehlo;
pub mod torch_export;

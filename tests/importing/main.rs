//! Models of all formats, and the layers that they are cut into.

#[path = "../common/mod.rs"]
mod common;

mod fuzzed;
mod huggingface;
mod large_models;
mod layers;
mod onnx;
mod padding;

//! The CUDA edge without a GPU: libraries that gcc makes stand in for NVIDIA's.

mod compile;
mod driver;
mod fake;

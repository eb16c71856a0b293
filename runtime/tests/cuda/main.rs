//! Tests of the CUDA interface without a GPU: gcc compiles libraries in place of NVIDIA's.

mod compile;
mod driver;
mod fake;

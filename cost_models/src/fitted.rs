//! Constants of devices fitted on measured steps, and on which.

use crate::compute::Constants;

const A100: Constants = Constants {
    matmul_efficiency: 0.734,
    attention_efficiency: 0.5,
    memory_efficiency: 0.436,
    misaligned_loss: 0.182,
    dispatch_s: 72e-6,
    collective_dispatch_s: 0.2e-6,
    skew_s: 177e-6,
    tail_loss: 0.03,
    multiprocessors: 108.0,
    vector_flops: 19.5e12,
};

const V100: Constants = Constants {
    matmul_efficiency: 0.72,
    attention_efficiency: 0.5,
    memory_efficiency: 0.85,
    misaligned_loss: 0.3,
    dispatch_s: 10e-6,
    collective_dispatch_s: 0.0,
    skew_s: 20e-6,
    tail_loss: 0.5,
    multiprocessors: 80.0,
    vector_flops: 15.7e12,
};

const H100: Constants = Constants {
    matmul_efficiency: 0.72,
    attention_efficiency: 0.5,
    memory_efficiency: 0.85,
    misaligned_loss: 0.3,
    dispatch_s: 10e-6,
    collective_dispatch_s: 0.0,
    skew_s: 20e-6,
    tail_loss: 0.5,
    multiprocessors: 132.0,
    vector_flops: 67e12,
};

/// Devices whose software fuses attention: what is sold since Hopper is driven by libraries of that time.
pub const FUSE_ATTENTION: &[&str] = &["H100-SXM", "H100-PCIe", "H200", "B200"];

/// By name of the device.
pub const FITTED: &[(&str, Constants)] = &[
    ("V100-SXM2-16GB", V100),
    ("V100-SXM2-32GB", V100),
    ("A100-SXM-40GB", A100),
    ("A100-SXM-80GB", A100),
    ("A100-PCIe", A100),
    ("H100-SXM", H100),
    ("H200", H100),
];

//! Constants of devices fitted on measured steps. `altiplano calibrate TABLES...` starts from them and gains little
//! (benches/results/fidelity.md).
//!
//! They are as much of the software of their time as of the device: a V100's are those of XLA in 2021, an A100's of
//! Megatron-LM and Megatron-DeepSpeed in 2021 to 2023 (eager PyTorch, dropout, attention in parts), an H100's of NeMo in 2025
//! (fused attention, overlapped communication). Tile counts are multiprocessors of the datasheet, vector rates its f32 peak.

use altiplano_ir::cluster::Constants;

/// Fitted on Narayanan et al. 2021, table 1 (10 rows), and on the steps published with vTrain (Bang et al. 2024): 841 rows on one node,
/// 68 on 64 to 512 devices; `queued_kernels` by trial. Left: 3 %, 6 % and 6 % mean absolute error.
const A100: Constants = Constants {
    matmul_efficiency: 0.736,
    attention_efficiency: 0.502,
    memory_efficiency: 0.48,
    update_efficiency: 0.85,
    collective_efficiency: 0.78,
    misaligned_loss: 0.23,
    dispatch_s: 74e-6,
    collective_dispatch_s: 0.2e-6,
    queued_kernels: 40.0,
    skew_s: 460e-6,
    tail_loss: 0.44,
    multiprocessors: 108.0,
    vector_flops: 19.5e12,
};

/// Fitted on the GPT steps of Alpa's artifact (Zheng et al. 2022, 20 rows on 1 to 64 devices); `update_efficiency` and
/// `collective_efficiency`, which these hardly determine, are near those of A100. 3.5 % left.
const V100: Constants = Constants {
    matmul_efficiency: 0.7,
    attention_efficiency: 0.5,
    memory_efficiency: 0.56,
    update_efficiency: 0.8,
    collective_efficiency: 0.8,
    misaligned_loss: 0.3,
    dispatch_s: 5e-6,
    collective_dispatch_s: 0.0,
    queued_kernels: 0.0,
    skew_s: 600e-6,
    tail_loss: 0.03,
    multiprocessors: 80.0,
    vector_flops: 15.7e12,
};

/// Fitted on NVIDIA's benchmark recipes for DGX H100 (19 rows on 16 to 2,304 devices); 4 % left.
const H100: Constants = Constants {
    matmul_efficiency: 0.72,
    attention_efficiency: 0.79,
    memory_efficiency: 0.95,
    update_efficiency: 0.95,
    collective_efficiency: 1.0,
    misaligned_loss: 0.3,
    dispatch_s: 5e-6,
    collective_dispatch_s: 0.0,
    queued_kernels: 0.0,
    skew_s: 11e-6,
    tail_loss: 0.22,
    multiprocessors: 132.0,
    vector_flops: 67e12,
};

/// Devices whose software fuses attention: what is sold since Hopper is driven by libraries of that time.
pub const FUSE_ATTENTION: &[&str] = &["H100-SXM", "H100-PCIe", "H200", "B200"];

/// By name of the device. One of the same chip has the same constants.
pub const FITTED: &[(&str, Constants)] = &[
    ("V100-SXM2-16GB", V100),
    ("V100-SXM2-32GB", V100),
    ("V100-SXM3-32GB", V100),
    ("A100-SXM-40GB", A100),
    ("A100-SXM-80GB", A100),
    ("A100-PCIe", A100),
    ("A100-PCIe-40GB", A100),
    ("H100-SXM", H100),
    ("H100-PCIe", Constants { multiprocessors: 114.0, ..H100 }),
    ("H200", H100),
];

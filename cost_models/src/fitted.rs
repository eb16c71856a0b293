//! Constants of devices fitted on measured steps. `altiplano calibrate TABLES...` starts from them and gains little
//! (benches/results/fidelity.md).
//!
//! They are as much of the software of their time as of the device: a V100's are those of XLA in 2021, an A100's of
//! Megatron-LM and Megatron-DeepSpeed in 2021 to 2023 (eager PyTorch, dropout, attention in parts), an H100's of NeMo in 2025
//! (fused attention, overlapped communication). Tile counts are multiprocessors of the datasheet, vector rates its f32 peak.

use altiplano_ir::cluster::{Architecture, Constants};

/// Fitted on Narayanan et al. 2021, table 1 (10 rows), and on the steps published with vTrain (Bang et al. 2024): 841 rows on one node,
/// 68 on 64 to 512 devices; `queued_kernels` by trial. Left: 3 %, 6 % and 6 % mean absolute error.
const A100: Constants = Constants {
    matmul_efficiency: 0.736,
    attention_efficiency: 0.661,
    attention_backward_efficiency: 0.568,
    attention_fill: 60.0,
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
    attention_efficiency: 0.35,
    attention_backward_efficiency: 0.25,
    attention_fill: 90.0,
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

/// Fitted on NVIDIA's benchmark recipes for DGX H100 (19 rows on 16 to 2,304 devices), attention on its kernels ([`ATTENTION`]); 3.5 %
/// left. Matmuls of 8,192 rows and 4,096 columns and terms or more, measured alone, reach 0.77 (median, same source as attention's).
const H100: Constants = Constants {
    matmul_efficiency: 0.76,
    attention_efficiency: 0.684,
    attention_backward_efficiency: 0.581,
    attention_fill: 320.0,
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

/// What fused attention reaches, by the generation of a device: part of the peak forward and backward, and keys that a row takes
/// as long as beyond those in the tiles that it sees.
///
/// sm_80, sm_90 and sm_100 forward: fitted on kernels published with NVIDIA's AIConfigurator (2025; causal, bf16, heads of 128, rows of 512
/// and more that take a millisecond or longer, 3,600 rows; 6, 8 and 10 % mean absolute error left). Backward against forward, 0.86 and 0.85: Dao 2023 (FlashAttention-2, figures 4
/// and 5, causal, 16k) and Shah et al. 2024 (FlashAttention-3, figures 5 and 6). Ada runs the kernels of Ampere. Volta and Turing have
/// PyTorch's memory-efficient kernels, and AMD's devices those of Composable Kernel: estimates.
const ATTENTION: [(Architecture, f64, f64, f64); 6] = [
    (Architecture::Nvidia(100), 0.63, 0.535, 430.0),
    (Architecture::Nvidia(90), 0.684, 0.581, 320.0),
    (Architecture::Nvidia(80), 0.661, 0.568, 60.0),
    (Architecture::Nvidia(0), 0.35, 0.25, 90.0),
    (Architecture::Amd(0x940), 0.42, 0.30, 200.0),
    (Architecture::Amd(0), 0.45, 0.35, 90.0),
];

/// The same of FlashAttention-2, where it is slower than what a generation has: on sm_90, whose asynchronous products it does not use.
/// Shah et al. 2024 (FlashAttention-3, figures 5 and 6: heads of 128, 1k to 16k): forward with and without a causal mask and backward
/// without, of which these leave 4 and 2 %.
const FLASH_2: [(Architecture, f64, f64, f64); 1] = [(Architecture::Nvidia(90), 0.375, 0.325, 170.0)];

/// Rates of FlashAttention-2 on devices of a generation: forward, backward, and keys beyond those that a row sees; `None` where
/// that is what [`with_attention_of`] says.
pub fn flash_2(generation: Option<Architecture>) -> Option<[f64; 3]> {
    let found = FLASH_2.iter().find(|row| Some(row.0) == generation);
    found.map(|&(_, forward, backward, fill)| [forward, backward, fill])
}

/// Constants with those of attention that software reaches on devices of a generation.
pub fn with_attention_of(generation: Option<Architecture>, constants: Constants) -> Constants {
    let same_vendor = |known: Architecture, of: Architecture| {
        matches!(
            (known, of),
            (Architecture::Nvidia(_), Architecture::Nvidia(_)) | (Architecture::Amd(_), Architecture::Amd(_))
        )
    };
    let found = generation.and_then(|of| ATTENTION.iter().find(|row| same_vendor(row.0, of) && row.0 <= of));
    match found {
        Some(&(_, attention_efficiency, attention_backward_efficiency, attention_fill)) => {
            Constants { attention_efficiency, attention_backward_efficiency, attention_fill, ..constants }
        }
        None => constants,
    }
}

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

//! Constants of devices, fitted to measured steps. `altiplano calibrate TABLES...` starts from them and
//! improves them little (benches/results/fidelity.md).
//!
//! They describe the software of their time as much as the device. The V100 constants are for XLA in 2021. The
//! A100 constants are for Megatron-LM and Megatron-DeepSpeed in 2021 to 2023 (eager PyTorch, dropout, attention
//! in parts). The H100 constants are for NeMo in 2025 (fused attention, overlapped communication). Tile counts
//! are the multiprocessors of the datasheet, and vector rates its f32 peak.

use altiplano_ir::cluster::{Architecture, Constants};

/// Fitted to Narayanan et al. 2021, table 1 (10 rows), and to the steps published with vTrain (Bang et al.
/// 2024): 841 rows on one node, 68 on 64 to 512 devices. `queued_kernels` was found by trial. The mean absolute
/// errors are 3 %, 6 % and 6 %. `matmul_efficiency` is that of products measured alone (AIConfigurator, 2025, 3,553
/// rows, median error 7 %).
const A100: Constants = Constants {
    matmul_efficiency: 0.88,
    sustained_efficiency: 0.736 / 0.88,
    attention_efficiency: 0.679,
    attention_backward_efficiency: 0.584,
    attention_fill: 60.0,
    attention_tail: 1.67,
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

/// Fitted to the GPT steps of Alpa's artifact (Zheng et al. 2022, 20 rows on 1 to 64 devices), with an error of
/// 3.5 %. These hardly determine `update_efficiency` and `collective_efficiency`, which are near those of A100.
const V100: Constants = Constants {
    matmul_efficiency: 0.7,
    sustained_efficiency: 1.0,
    attention_efficiency: 0.35,
    attention_backward_efficiency: 0.25,
    attention_fill: 90.0,
    attention_tail: 0.0,
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

/// Fitted to NVIDIA's benchmark recipes for DGX H100 (19 rows on 16 to 2,304 devices). Attention and matmuls are fitted
/// to their kernels ([`ATTENTION`]), and `sustained_efficiency` to the steps.
const H100: Constants = Constants {
    matmul_efficiency: 0.81,
    sustained_efficiency: 0.95,
    attention_efficiency: 0.684,
    attention_backward_efficiency: 0.581,
    attention_fill: 300.0,
    attention_tail: 0.26,
    memory_efficiency: 0.95,
    update_efficiency: 0.95,
    collective_efficiency: 1.0,
    misaligned_loss: 0.3,
    dispatch_s: 5e-6,
    collective_dispatch_s: 0.0,
    queued_kernels: 0.0,
    skew_s: 11e-6,
    tail_loss: 0.15,
    multiprocessors: 132.0,
    vector_flops: 67e12,
};

/// Fitted to products and attention published with NVIDIA's AIConfigurator (2025). No steps are published: what
/// software adds is that of H100, and so is the part of the rate that steps sustain.
const B200: Constants = Constants {
    matmul_efficiency: 0.7,
    attention_efficiency: 0.608,
    attention_backward_efficiency: 0.517,
    attention_fill: 320.0,
    attention_tail: 1.45,
    tail_loss: 0.2,
    multiprocessors: 148.0,
    vector_flops: 75e12,
    ..H100
};

/// Rates of fused attention by device generation: the fraction of the peak forward and backward, the fixed cost of a
/// row, in keys beyond those in the tiles that it sees, and [`Constants::attention_tail`].
///
/// sm_80, sm_90 and sm_100 forward are fitted to half of the kernels published with NVIDIA's AIConfigurator (2025;
/// causal, bf16, heads of 128, 10,011 rows). The median errors are 3.8, 6.1 and 9.2 %, and 4.2, 6.3 and 8.8 % on the
/// other half. The ratios of backward to forward are 0.86 and 0.85, from Dao 2023 (FlashAttention-2, figures
/// 4 and 5, causal, 16k) and Shah et al. 2024 (FlashAttention-3, figures 5 and 6). Ada runs the kernels of
/// Ampere. Volta and Turing use PyTorch's memory-efficient kernels, and AMD's devices use Composable Kernel:
/// these rows are estimates.
const ATTENTION: [(Architecture, f64, f64, f64, f64); 6] = [
    (Architecture::Nvidia(100), 0.608, 0.517, 320.0, 1.45),
    (Architecture::Nvidia(90), 0.684, 0.581, 300.0, 0.26),
    (Architecture::Nvidia(80), 0.679, 0.584, 60.0, 1.67),
    (Architecture::Nvidia(0), 0.35, 0.25, 90.0, 0.0),
    (Architecture::Amd(0x940), 0.42, 0.30, 200.0, 0.0),
    (Architecture::Amd(0), 0.45, 0.35, 90.0, 0.0),
];

/// The same rates for FlashAttention-2 on generations with a faster kernel: sm_90, whose asynchronous products
/// it does not use. Source: Shah et al. 2024 (FlashAttention-3, figures 5 and 6: heads of 128, 1k to 16k),
/// forward with and without a causal mask, and backward without. The errors are 4 and 2 %.
const FLASH_2: [(Architecture, f64, f64, f64); 1] = [(Architecture::Nvidia(90), 0.375, 0.325, 170.0)];

/// Rates of FlashAttention-2 on a device generation: forward, backward, and the fixed cost of a row in keys.
/// `None` if they equal those of [`with_attention_of`].
pub fn flash_2(generation: Option<Architecture>) -> Option<[f64; 3]> {
    let found = FLASH_2.iter().find(|row| Some(row.0) == generation);
    found.map(|&(_, forward, backward, fill)| [forward, backward, fill])
}

/// Constants with the attention rates of a device generation.
pub fn with_attention_of(generation: Option<Architecture>, constants: Constants) -> Constants {
    let same_vendor = |known: Architecture, of: Architecture| {
        matches!(
            (known, of),
            (Architecture::Nvidia(_), Architecture::Nvidia(_)) | (Architecture::Amd(_), Architecture::Amd(_))
        )
    };
    let found = generation.and_then(|of| ATTENTION.iter().find(|row| same_vendor(row.0, of) && row.0 <= of));
    match found {
        Some(&(_, attention_efficiency, attention_backward_efficiency, attention_fill, attention_tail)) => Constants {
            attention_efficiency,
            attention_backward_efficiency,
            attention_fill,
            attention_tail,
            ..constants
        },
        None => constants,
    }
}

/// Constants by device name. Devices with the same chip have the same constants.
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
    ("B200", B200),
];

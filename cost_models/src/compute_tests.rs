//! Tests of kernel prices against hand calculations, and of properties that hold for any prices.

use super::*;
use crate::catalogue::device_names;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::AttentionKernels;
use proptest::prelude::*;

fn model(name: &str) -> Compute {
    Compute::new(catalogue::device(name).unwrap())
}

fn matmul(m: u64, n: u64, k: u64) -> Matmul {
    Matmul { batch: 1, m, n, k, dtype: DType::F16, aligned: 8 }
}

#[test]
fn a_wave_of_tiles_costs_what_a_tile_costs() {
    let mut a100 = model("A100-SXM-80GB");
    a100.constants.tail_loss = 1.0;
    // 108 tiles of 256 x 128 fill the device once. One more row of tiles needs a second wave.
    let one = a100.matmul_s(&matmul(256 * 108, 128, 4096));
    let by_hand = 2.0 * 256.0 * 128.0 * (4096.0 + AMPERE.fill) * 108.0 / (312e12 * a100.constants.matmul_efficiency);
    assert!((one / by_hand - 1.0).abs() < 1e-9, "{one} {by_hand}");
    assert!(a100.matmul_s(&matmul(256 * 109, 128, 4096)) > 1.4 * one);
}

#[test]
fn few_tiles_of_a_long_contraction_are_cut() {
    let a100 = model("A100-SXM-80GB");
    let (long, short) = (a100.matmul_s(&matmul(128, 128, 65536)), a100.matmul_s(&matmul(128, 128, 512)));
    // On one multiprocessor it would take 128 times as long.
    assert!(long < 40.0 * short, "{long} {short}");
}

#[test]
fn attention_of_one_head_leaves_multiprocessors_idle() {
    let compute = Compute::new(catalogue::device("H100-SXM").unwrap());
    let seconds = |heads: u64| {
        let flop = 4.0 * heads as f64 * 1024.0f64.powi(2) * 128.0;
        let (tiles, dtype, software) = (8 * heads, DType::BF16, AttentionKernels::Newest);
        compute.attention_s(&Attention { flop, share: 9.0 / 16.0, keys: 1024, tiles, backward: false, dtype, software })
    };
    // Eight tiles of 132 that could run, and as many as run at once: both take as long as the longest tile.
    assert!((seconds(16) / seconds(1) - 1.0).abs() < 1e-9);
    assert!(seconds(160) > 5.0 * (seconds(16) - ATTENTION_START_S));
    let by_hand = 4.0 * 128.0 * (1024.0 + compute.constants.attention_fill) * 128.0 * 132.0
        / (989.5e12 * compute.constants.attention_efficiency);
    assert!((seconds(1) / (by_hand + ATTENTION_START_S) - 1.0).abs() < 1e-9);
}

#[test]
fn kernels_alone_are_faster_than_in_steps() {
    let device = catalogue::device("H100-SXM").unwrap();
    let constants = catalogue::constants(&device.name);
    let [alone, steps] = [Compute::alone(device.clone(), constants), Compute::new(device)];
    let part = alone.matmul_s(&matmul(8192, 8192, 8192)) / steps.matmul_s(&matmul(8192, 8192, 8192));
    assert!((part / constants.sustained_efficiency - 1.0).abs() < 1e-9, "{part}");
}

#[test]
fn rows_out_of_line_cost_more() {
    let mut a100 = model("A100-SXM-80GB");
    a100.constants.misaligned_loss = 0.2;
    let of = |aligned| a100.matmul_s(&Matmul { aligned, ..matmul(4096, 4096, 4096) });
    assert!((of(1) / of(8) - 1.0 / 0.8f64.powi(3)).abs() < 1e-9);
    assert!(of(4) < of(2) && of(2) < of(1));
}

#[test]
fn the_last_of_many_comes_later_than_the_last_of_few() {
    let a100 = model("A100-SXM-80GB");
    assert_eq!(a100.waiting_s(1), 0.0);
    let waits: Vec<f64> = [2, 4, 8, 64, 65, 1024].iter().map(|&n| a100.waiting_s(n)).collect();
    assert!(waits.windows(2).all(|w| w[0] <= w[1]), "{waits:?}");
}

proptest! {
    #[test]
    fn more_work_never_costs_less_and_all_is_finite(
        m in 1u64..20_000, n in 1u64..20_000, k in 1u64..20_000, batch in 1u64..64, which in 0usize..64,
    ) {
        let names = device_names();
        let device = model(&names[which % names.len()]);
        let at = Matmul { batch, ..matmul(m, n, k) };
        let seconds = device.matmul_s(&at);
        prop_assert!(seconds.is_finite() && seconds > 0.0);
        // The rate does not exceed the peak.
        let peak = peak_flops(&device.device, DType::F16);
        prop_assert!(seconds >= at.flop() / peak * 0.999, "{seconds} {}", at.flop() / peak);
        let more = [Matmul { m: 2 * m, ..at }, Matmul { n: 2 * n, ..at }, Matmul { k: 2 * k, ..at }, Matmul { batch: 2 * batch, ..at }];
        for more in more {
            prop_assert!(device.matmul_s(&more) >= seconds * 0.999, "{more:?}");
        }
    }
}

/// Measured seconds of kernels published with NVIDIA's AIConfigurator (bf16, causal, heads of 128, at least 32
/// samples times heads).
#[test]
fn fused_attention_takes_what_was_measured() {
    let table = [
        // (device, batch, length, heads, milliseconds, tolerated part)
        ("A100-SXM-80GB", 4, 16384, 96, 132.622, 0.1),
        ("A100-SXM-80GB", 1, 16384, 96, 33.2847, 0.1),
    ];
    for (name, batch, length, heads, expect_ms, tolerance) in table {
        let compute = Compute::new(catalogue::device(name).unwrap());
        let tiles = f64::from(length) / 128.0;
        let flop = 4.0 * f64::from(batch * heads) * f64::from(length).powi(2) * 128.0;
        let share = (tiles + 1.0) / 2.0 / tiles;
        let attention = Attention {
            flop,
            share,
            keys: length as u64,
            tiles: (batch * heads) as u64 * (length as u64).div_ceil(128),
            backward: false,
            dtype: DType::BF16,
            software: AttentionKernels::Newest,
        };
        let ms = 1e3 * compute.attention_s(&attention);
        assert!((ms / expect_ms - 1.0).abs() < tolerance, "{name} {batch} x {length}: {ms} ms, measured {expect_ms}");
        // A backward pass has five products where a forward pass has two.
        let backward = Attention { flop: 2.5 * flop, backward: true, ..attention };
        let times = compute.attention_s(&backward) / compute.attention_s(&attention);
        assert!((2.5..3.5).contains(&times), "{times}");
        // A window of 1,024 takes far less time, but more than its fraction of the products.
        let window = Attention { share: (8.0 + 1.0) / tiles, ..attention };
        let times = compute.attention_s(&window) / compute.attention_s(&attention);
        assert!((0.12..0.25).contains(&times), "{times}");
    }
}

/// Clocks that NVIDIA guarantees for a 40 GB A100 under load: 1095 MHz within 400 W, 765 MHz within 250 W.
#[test]
fn clocks_follow_power_as_those_of_one_chip_at_two_limits_do() {
    let device = Device { power_limit_watts: Some(250.0), ..catalogue::device("A100-SXM-40GB").unwrap() };
    assert!((device.clock_part() / (765.0 / 1095.0) - 1.0).abs() < 0.01, "{}", device.clock_part());
}

/// Ring rounds in single precision wait for loads as often as rounds in half precision, but multiply far
/// longer.
#[test]
fn a_row_waits_for_bytes_and_not_for_products() {
    let mut compute = Compute::new(catalogue::device("H100-SXM").unwrap());
    // No tiles, of which the last would come late.
    compute.constants.multiprocessors = 0.0;
    let waits_s = |dtype: DType| {
        let of = |keys: u64, flop: f64| {
            let software = AttentionKernels::Newest;
            compute.attention_s(&Attention { flop, share: 1.0, keys, tiles: 1, backward: false, dtype, software })
        };
        4.0 * of(8192, 1e12) - of(32768, 4e12)
    };
    assert!((waits_s(DType::F32) / waits_s(DType::BF16) - 2.0).abs() < 1e-9);
}

/// FlashAttention-2 on H100, from Shah et al. 2024, figures 5 and 6: TFLOP/s with heads of 128 and 16k tokens
/// in total.
#[test]
fn flash_attention_2_takes_what_was_measured() {
    let compute = Compute::new(catalogue::device("H100-SXM").unwrap());
    let table = [
        // (length, forward, forward with a causal mask, backward)
        (2048u32, 362.0, 298.0, 291.0),
        (4096, 368.0, 319.0, 310.0),
        (8192, 370.0, 333.0, 318.0),
        (16384, 370.0, 335.0, 322.0),
    ];
    for (length, forward, causal, backward) in table {
        let length = f64::from(length);
        // 16 heads.
        let rows = 16.0 * 16384.0;
        let flop = 4.0 * rows * length * 128.0;
        let of = Attention {
            flop,
            share: 1.0,
            keys: length as u64,
            tiles: rows as u64 / 128,
            backward: false,
            dtype: DType::F16,
            software: AttentionKernels::Flash2,
        };
        let tiles = length / 128.0;
        let half = Attention { share: (tiles + 1.0) / 2.0 / tiles, ..of };
        let back = Attention { flop: 2.5 * flop, backward: true, ..of };
        for (attention, computed, expect) in
            [(of, flop, forward), (half, flop / 2.0, causal), (back, 2.5 * flop, backward)]
        {
            let rate = computed / compute.attention_s(&attention) / 1e12;
            assert!((rate / expect - 1.0).abs() < 0.08, "{length} {attention:?}: {rate}, measured {expect}");
        }
        let newest = Attention { software: AttentionKernels::Newest, ..of };
        assert!(compute.attention_s(&newest) < 0.7 * compute.attention_s(&of));
    }
    // The kernel was written for Ampere, and is no faster on devices whose constants are lower.
    let ampere = Compute::new(catalogue::device("A100-SXM-80GB").unwrap());
    assert_eq!(ampere.attention(AttentionKernels::Flash2), ampere.attention(AttentionKernels::Newest));
    let slow = Constants { attention_efficiency: 0.3, ..compute.constants };
    let slow = Compute::new(Device { constants: Some(slow), ..compute.device });
    assert_eq!(slow.attention(AttentionKernels::Flash2), slow.attention(AttentionKernels::Newest));
}

#[test]
fn a_power_limit_slows_what_multiplies_and_not_memory() {
    let device = catalogue::device("H100-SXM").unwrap();
    let full = Compute::new(device.clone());
    let limited = Compute::new(Device { power_limit_watts: Some(500.0), ..device.clone() });
    let part = limited.constants.matmul_efficiency / full.constants.matmul_efficiency;
    // The cube root of (500 - 300) of (700 - 300) W.
    assert!((part - 0.5f64.cbrt()).abs() < 1e-9, "{part}");
    assert_eq!(limited.memory_s(1e9), full.memory_s(1e9));
    let unlimited = Compute::new(Device { power_limit_watts: Some(900.0), ..device });
    assert_eq!(unlimited.constants, full.constants);
}

//! Seconds of the collectives in the alpha-beta model: `alpha` seconds of latency a hop, `beta` bytes/s. All are the
//! bandwidth-optimal ring algorithms (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations", 2009; Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
//! 2005), which is what NCCL runs for large messages.

use crate::link::AxisLink;

/// Seconds of a ring all-reduce of `bytes` on each of `n` devices: `2(n-1) alpha + 2(n-1)/n * bytes / beta`.
/// Zero for one device.
///
/// Example: 1e9 bytes over 4 devices at 1e9 bytes/s and 1e-6 s: `6e-6 + 1.5` seconds.
pub fn all_reduce_s(bytes: u64, link: &AxisLink) -> f64 {
    2.0 * pass_s(bytes, link.devices, link.bytes_per_s, link.latency_s)
}

/// Seconds of a ring all-gather whose result is `bytes` on each device: `(n-1) alpha + (n-1)/n * bytes / beta`.
pub fn all_gather_s(bytes: u64, link: &AxisLink) -> f64 {
    pass_s(bytes, link.devices, link.bytes_per_s, link.latency_s)
}

/// Seconds of a ring reduce-scatter whose operand is `bytes` on each device: an all-gather run backwards.
pub fn reduce_scatter_s(bytes: u64, link: &AxisLink) -> f64 {
    pass_s(bytes, link.devices, link.bytes_per_s, link.latency_s)
}

/// Seconds of an all-to-all (pairwise exchange) of `bytes` on each device, of which each sends all but its own n-th part:
/// `(n-1) alpha + (n-1)/n * bytes / beta`.
pub fn all_to_all_s(bytes: u64, link: &AxisLink) -> f64 {
    pass_s(bytes, link.devices, link.all_to_all_bytes_per_s, link.latency_s)
}

/// `n - 1` rounds, in each of which every device sends an n-th of `bytes`.
fn pass_s(bytes: u64, devices: u64, bytes_per_s: f64, latency_s: f64) -> f64 {
    if devices <= 1 {
        return 0.0;
    }
    let n = devices as f64;
    (n - 1.0) * latency_s + (n - 1.0) / n * bytes as f64 / bytes_per_s
}

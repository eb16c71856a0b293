//! Back-of-the-envelope formulas from the literature, for comparison with predictions. Each names its source, and its
//! tests use published numbers.

const DAY_S: f64 = 86_400.0;

/// Bytes per second that a central parameter server receives, and sends, if each worker has a gradient of
/// `gradient_bytes` every `gradient_s` seconds.
///
/// 256 workers with the 97.5 MiB of a ResNet-50, three times a second, are 73 GiB/s each way.
pub(crate) fn server_bytes_per_s(workers: u64, gradient_bytes: f64, gradient_s: f64) -> f64 {
    workers as f64 * gradient_bytes / gradient_s
}

/// Seconds for a number of operations at a rate.
pub(crate) fn seconds_of_flop(flop: f64, flop_per_s: f64) -> f64 {
    flop / flop_per_s
}

/// Operations per parameter and token: 2 forward, 4 backward, and 2 more if activations are recomputed.
pub(crate) fn flop_per_parameter_and_token(recomputed: bool) -> f64 {
    if recomputed { 8.0 } else { 6.0 }
}

/// Days to train a transformer of `parameters` on `tokens`, with `devices` that do `flop_per_s` each. It is `8 T P / (n
/// X)` if activations are recomputed (Narayanan et al. 2021, equation 4), else `6 T P / (n X)`.
pub(crate) fn training_days(tokens: f64, parameters: f64, devices: u64, flop_per_s: f64, recomputed: bool) -> f64 {
    let flop = flop_per_parameter_and_token(recomputed) * tokens * parameters;
    seconds_of_flop(flop, devices as f64 * flop_per_s) / DAY_S
}

/// The expected maximum of `n` independent standard normal numbers (Tippett 1925): the integral of `1 - F(x)^n -
/// F(-x)^n` over `x` from 0, where `F` is the normal distribution. It is 0 for one number and 1.539 for ten.
///
/// Workers that wait for each other in every step take as long as the slowest of them. If a step takes `m` with a
/// standard deviation of `s`, `n` of them take `m + s x` this.
pub(crate) fn expected_maximum(n: u64) -> f64 {
    // Beyond nine deviations the tail is negligible even for 2^53 numbers. Simpson's rule, with F accumulated along the
    // way.
    const STEPS: u32 = 9 * 256;
    const H: f64 = 1.0 / 256.0;
    let density = |x: f64| (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let n = n.max(1) as f64;
    // The upper tail keeps its precision where F itself is nearly 1.
    let rest = |above: f64| -(n * (-above).ln_1p()).exp_m1() - above.powf(n);
    let upper =
        |x: f64, above: f64| above - H / 12.0 * (density(x) + 4.0 * density(x + H / 4.0) + density(x + H / 2.0));
    let (mut above, mut sum) = (0.5, 0.0);
    for i in 0..STEPS {
        let x = f64::from(i) * H;
        let middle = upper(x, above);
        let end = upper(x + H / 2.0, middle).max(0.0);
        sum += H / 6.0 * (rest(above) + 4.0 * rest(middle.max(0.0)) + rest(end));
        above = end;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the closed forms for two and three, and with Tippett's table.
    #[test]
    fn the_slowest_of_many_is_as_slow_as_published() {
        let pi = std::f64::consts::PI;
        let known =
            [(1, 0.0), (2, 1.0 / pi.sqrt()), (3, 1.5 / pi.sqrt()), (10, 1.53875), (100, 2.50759), (1000, 3.24144)];
        for (n, expected) in known {
            let found = expected_maximum(n);
            assert!((found - expected).abs() < 1e-5, "{n}: {found}, not {expected}");
        }
        assert!((4.8..4.9).contains(&expected_maximum(1_000_000)));
    }

    #[test]
    fn a_central_server_needs_more_than_any_network_has() {
        let gib = f64::from(1 << 30);
        let resnet50 = 97.5 * f64::from(1 << 20);
        assert!((server_bytes_per_s(256, resnet50, 1.0 / 3.0) / gib - 73.1).abs() < 0.05);
    }

    #[test]
    fn gpt3_on_one_device_takes_a_century_and_a_half() {
        let years = seconds_of_flop(3.14e23, 6.7e13) / DAY_S / 365.25;
        assert!((years - 150.0).abs() < 3.0, "{years}");
    }

    /// Narayanan et al. 2021: section 5.1 (days of two models), and table 2 (300 billion tokens, with ZeRO-3 and with PTD-P).
    #[test]
    fn days_are_those_that_were_published() {
        // (parameters, tokens, devices, TFLOP/s per device, days)
        let table = [
            (175e9, 300e9, 1024, 140.0, 34.0),
            (1e12, 450e9, 3072, 163.0, 84.0),
            (174.6e9, 300e9, 384, 144.0, 90.0),
            (174.6e9, 300e9, 768, 88.0, 74.0),
            (174.6e9, 300e9, 1536, 44.0, 74.0),
            (529.6e9, 300e9, 640, 138.0, 169.0),
            (529.6e9, 300e9, 1120, 98.0, 137.0),
            (529.6e9, 300e9, 2240, 48.0, 140.0),
            (174.6e9, 300e9, 384, 153.0, 84.0),
            (174.6e9, 300e9, 768, 149.0, 43.0),
            (174.6e9, 300e9, 1536, 141.0, 23.0),
            (529.6e9, 300e9, 560, 171.0, 156.0),
            (529.6e9, 300e9, 1120, 167.0, 80.0),
            (529.6e9, 300e9, 2240, 159.0, 42.0),
        ];
        for (parameters, tokens, devices, tflops, days) in table {
            let ours = training_days(tokens, parameters, devices, tflops * 1e12, true);
            assert!((ours / days - 1.0).abs() < 0.05, "{parameters} on {devices}: {ours} days, published {days}");
            let plain = training_days(tokens, parameters, devices, tflops * 1e12, false);
            assert!((plain / ours - 0.75).abs() < 1e-12);
        }
    }
}

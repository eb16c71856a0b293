//! Prints quantities for people: three significant digits and a unit.

use altiplano_ir::plan::Downscaling;

/// Seconds, as in `1.23 ms`.
pub fn seconds(value: f64) -> String {
    match value {
        v if !v.is_finite() => "-".to_string(),
        // Below the resolution of any clock.
        v if v.abs() < 1e-12 => "0 s".to_string(),
        v if v < 1e-3 => format!("{} us", digits(v * 1e6)),
        v if v < 1.0 => format!("{} ms", digits(v * 1e3)),
        v => format!("{} s", digits(v)),
    }
}

/// Hours, as in `5.2 hours`, `34.1 days`.
pub(crate) fn duration(hours: f64) -> String {
    match hours {
        h if h < 1.0 => format!("{} minutes", digits(h * 60.0)),
        h if h < 48.0 => format!("{} hours", digits(h)),
        h => format!("{} days", digits(h / 24.0)),
    }
}

/// Bytes in decimal units, as in `1.23 GB`.
pub fn bytes(value: u64) -> String {
    match value {
        v if v < 1000 => format!("{v} B"),
        v if v < 1_000_000 => format!("{} kB", digits(v as f64 / 1e3)),
        v if v < 1_000_000_000 => format!("{} MB", digits(v as f64 / 1e6)),
        v if v < 1_000_000_000_000 => format!("{} GB", digits(v as f64 / 1e9)),
        v => format!("{} TB", digits(v as f64 / 1e12)),
    }
}

/// Bytes in binary units, as in `1.15 GiB`, in which device vendors count memory.
pub(crate) fn gibibytes(value: u64) -> String {
    const KI: f64 = 1024.0;
    match value as f64 {
        v if v < KI * KI => format!("{} KiB", digits(v / KI)),
        v if v < KI * KI * KI => format!("{} MiB", digits(v / KI / KI)),
        v if v < KI * KI * KI * KI => format!("{} GiB", digits(v / KI / KI / KI)),
        v => format!("{} TiB", digits(v / KI / KI / KI / KI)),
    }
}

/// A count, as in `124 M`.
pub(crate) fn count(value: u64) -> String {
    match value {
        v if v < 10_000 => v.to_string(),
        v if v < 1_000_000 => format!("{} k", digits(v as f64 / 1e3)),
        v if v < 1_000_000_000 => format!("{} M", digits(v as f64 / 1e6)),
        v => format!("{} G", digits(v as f64 / 1e9)),
    }
}

/// A reduction, as in `2 of 16 layers, 1.24 G -> 3.10 M parameters`.
pub(crate) fn smaller(reduction: &Downscaling) -> String {
    let (parameters, all) = reduction.parameters;
    let parameters = format!("{} -> {} parameters", count(all), count(parameters));
    match reduction.layers {
        (_, 0) => parameters,
        (layers, all) => format!("{layers} of {all} layers, {parameters}"),
    }
}

/// A count with its noun: `1 stage`, `2 stages`; `2 microbatches`.
pub fn plural(count: u64, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        n if what.ends_with("ch") => format!("{n} {what}es"),
        n => format!("{n} {what}s"),
    }
}

/// A fraction in percent, as in `41.3 %`.
pub fn percent(part: f64) -> String {
    format!("{} %", digits(part * 100.0))
}

/// Three significant digits, without an exponent.
pub fn digits(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_string();
    }
    // Print no negative zero.
    let value = if value == 0.0 { 0.0 } else { value };
    let magnitude = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    let decimals = (2 - magnitude).clamp(0, 6) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits() {
        assert_eq!(seconds(0.001234), "1.23 ms");
        assert_eq!(seconds(2.5e-7), "0.250 us");
        assert_eq!(seconds(123.4), "123 s");
        assert_eq!(bytes(6_442_450_944), "6.44 GB");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(gibibytes(69_300_000_000), "64.5 GiB");
        assert_eq!(gibibytes(2048), "2.00 KiB");
        assert_eq!(count(124_439_808), "124 M");
        assert_eq!(percent(0.4567), "45.7 %");
        assert_eq!(digits(0.0), "0.00");
        assert_eq!(digits(-0.0), "0.00");
        let reduction = Downscaling { layers: (2, 16), parameters: (3_100_000, 1_240_000_000) };
        assert_eq!(smaller(&reduction), "2 of 16 layers, 1.24 G -> 3.10 M parameters");
        assert_eq!(plural(1, "stage"), "1 stage");
        assert_eq!(plural(2, "microbatch"), "2 microbatches");
    }
}

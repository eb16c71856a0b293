//! The collectives against published measurements, which are not part of the project: `ALTIPLANO_SHARED` or
//! `../shared`. The mean absolute percentage error of each (table, devices, nodes) is printed and must not grow.

use super::{Operation, Priced, best};
use crate::catalogue::preset;
use crate::link::axis_link;
use altiplano_ir::mesh::{AxisId, Mesh};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The measurements file of this name. If it is missing, a line on the real stderr says what is skipped.
fn table(name: &str) -> Option<Vec<BTreeMap<String, String>>> {
    let default = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared"));
    let shared = std::env::var_os("ALTIPLANO_SHARED").map_or(default, PathBuf::from);
    let path = shared.join("reference/measured").join(name);
    let Ok(text) = std::fs::read_to_string(&path) else {
        use std::io::Write;
        let skipped = format!("SKIPPED: no {}; set ALTIPLANO_SHARED\n", path.display());
        let _ = std::io::stderr().write_all(skipped.as_bytes());
        return None;
    };
    let mut lines = text.lines().map(fields);
    let header = lines.next()?;
    Some(lines.map(|row| header.iter().cloned().zip(row).collect()).collect())
}

/// The fields of a line of CSV; a comma between quotation marks is part of a field.
fn fields(line: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => found.push(String::new()),
            c => found.last_mut().expect("never empty").push(c),
        }
    }
    found
}

struct Row {
    operation: Operation,
    hardware: String,
    devices: u32,
    nodes: u32,
    bytes: u64,
    measured_s: f64,
    /// True if in-switch reduction was turned off or rings were requested, as in the rows of 16 GiB that compare them.
    without_sharp: bool,
}

/// A row of either table. Some have a time, some only a bandwidth, per definition of nccl-tests.
fn row(row: &BTreeMap<String, String>) -> Row {
    let number = |key: &str| row.get(key).and_then(|text| text.parse::<f64>().ok());
    let operation = match row["collective"].replace('-', "_").as_str() {
        "all_reduce" => Operation::AllReduce,
        "all_gather" => Operation::AllGather,
        "reduce_scatter" => Operation::ReduceScatter,
        other => panic!("{other}"),
    };
    let (n, bytes) = (number("gpus").expect("gpus"), number("bytes").expect("bytes"));
    let factor = (n - 1.0) / n * if operation == Operation::AllReduce { 2.0 } else { 1.0 };
    let by_time = number("time_us").map(|us| us * 1e-6);
    let by_algorithm = number("algbw_GBps").filter(|b| *b > 0.0).map(|b| bytes / (b * 1e9));
    let by_bus = number("busbw_GBps").filter(|b| *b > 0.0).map(|b| bytes * factor / (b * 1e9));
    let algorithm = row.get("algo").map_or("", String::as_str);
    Row {
        operation,
        hardware: row["hardware"].clone(),
        devices: n as u32,
        nodes: row["nodes"].parse().expect("nodes"),
        bytes: bytes as u64,
        measured_s: by_time.or(by_algorithm).or(by_bus).expect("a time or a bandwidth"),
        without_sharp: algorithm.contains("off") || algorithm == "Ring" && bytes == f64::from(1u32 << 30) * 16.0,
    }
}

fn modelled(row: &Row) -> Priced {
    let machine = match row.hardware.as_str() {
        h if h.contains("V100") => "p3.16xlarge",
        h if h.contains("A100") => "dgx-a100",
        h if h.contains("H200") => "dgx-h200",
        h if h.contains("B200") => "p6-b200",
        other => panic!("{other}"),
    };
    let cluster = preset(&format!("{machine}:{}", row.nodes)).expect("a preset");
    let group = &cluster.groups[0];
    let mesh = Mesh::new(&[("a", row.devices)]);
    let mut link = axis_link(group, row.nodes, row.devices / row.nodes, &mesh, &[AxisId(0)]);
    let ring_only = crate::node_link::NodeLink { sharp: None, ..link.kind.clone() };
    if row.without_sharp {
        // Only a handful of rows leak this, and only until the test ends.
        link.kind = Box::leak(Box::new(ring_only));
    }
    best(row.operation, row.bytes, &link)
}

/// Mean absolute percentage error, mean percentage error, and rows.
fn errors<'a>(rows: impl Iterator<Item = &'a Row>) -> (f64, f64, usize) {
    let each: Vec<f64> = rows.map(|r| (modelled(r).seconds / r.measured_s - 1.0) * 100.0).collect();
    let mean = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, |a, b| a + b) / each.len().max(1) as f64;
    (mean(&mut each.iter().map(|e| e.abs())), mean(&mut each.iter().copied()), each.len())
}

/// Checks every (devices, nodes) of a table's hardware that contains `of` against its largest error in percent, for
/// messages of 1 MiB and more.
fn check(name: &str, of: &str, expect: &[((u32, u32), f64)]) {
    let Some(table) = table(name) else { return };
    let rows: Vec<Row> = table.iter().map(row).filter(|r| r.hardware.contains(of)).collect();
    let mut found: Vec<(u32, u32)> = rows.iter().map(|r| (r.devices, r.nodes)).collect();
    found.sort_unstable();
    found.dedup();
    assert_eq!(found, expect.iter().map(|e| e.0).collect::<Vec<_>>(), "{of}: every kind of row has a threshold");
    let mut too_large = Vec::new();
    for &((devices, nodes), most) in expect {
        let those = || rows.iter().filter(|r| (r.devices, r.nodes) == (devices, nodes));
        let large = |r: &&Row| r.bytes >= 1 << 20;
        let (error, bias, count) = errors(those().filter(large));
        let (doubled, _, doublings) = errors(those().filter(large).filter(|r| r.bytes.is_power_of_two()));
        let (small, _, smalls) = errors(those().filter(|r| r.bytes < 1 << 20));
        println!(
            "{of:5} devices {devices:2} nodes {nodes}: {error:5.1} % (bias {bias:+5.1}, {count} rows), powers of two {doubled:5.1} % \
             ({doublings}), below 1 MiB {small:5.1} % ({smalls})"
        );
        if error > most {
            too_large.push(format!("{of}, {devices} devices, {nodes} nodes: {error:.2} % is more than {most} %"));
        }
    }
    assert!(too_large.is_empty(), "{too_large:#?}");
}

#[test]
fn all_reduces_of_a100() {
    let at = |devices, most| ((devices, 1), most);
    let most = [at(2, 1.6), at(3, 1.5), at(4, 1.7), at(5, 1.9), at(6, 1.9), at(7, 2.1), at(8, 2.2)];
    check("nccl-allreduce-a100-v100.csv", "A100", &most);
    check("nccl-a100-h200-b200.csv", "A100", &[at(8, 9.6)]);
}

#[test]
fn all_reduces_of_v100() {
    let at = |devices, most| ((devices, 1), most);
    let most = [at(2, 1.5), at(3, 1.5), at(4, 6.0), at(5, 1.5), at(6, 2.0), at(7, 4.0), at(8, 1.5)];
    check("nccl-allreduce-a100-v100.csv", "V100", &most);
}

#[test]
fn collectives_of_h200_and_b200() {
    let at = |devices, nodes, most| ((devices, nodes), most);
    let h200 = [at(4, 1, 1.5), at(5, 1, 1.5), at(6, 1, 1.5), at(7, 1, 1.5), at(8, 1, 1.5)];
    check("nccl-a100-h200-b200.csv", "H200", &h200);
    // The rows of four nodes below 512 MiB are slow: 360 us and more for any message. Two such nodes take 51 us for the
    // shortest (dstackai/dstack pull request 3961). No constants fit both, and these follow the latter.
    let b200 = [at(4, 1, 1.5), at(5, 1, 3.5), at(6, 1, 1.5), at(7, 1, 1.5), at(8, 1, 6.5), at(32, 4, 35.0)];
    check("nccl-a100-h200-b200.csv", "B200", &b200);
}

/// Prints rows one by one, for fitting the constants: `cargo test ... -- --ignored --nocapture every_row`.
#[test]
#[ignore = "prints a table"]
fn every_row() {
    for name in ["nccl-allreduce-a100-v100.csv", "nccl-a100-h200-b200.csv"] {
        let Some(table) = table(name) else { return };
        for row in table.iter().map(row).filter(|r| r.bytes.is_power_of_two()) {
            let price = modelled(&row);
            println!(
                "{} {:?} {}x{} {:>6.2} MiB: measured {:>10.1} us, {:+6.1} %, {price}",
                &row.hardware[..row.hardware.len().min(20)],
                row.operation,
                row.nodes,
                row.devices / row.nodes,
                row.bytes as f64 / (1 << 20) as f64,
                row.measured_s * 1e6,
                (price.seconds / row.measured_s - 1.0) * 100.0,
            );
        }
    }
}

//! Tables of kernels that were measured alone: matrix products, fused attention, products of experts, and collectives
//! inside a node. A CSV file with a kernel a row, perhaps compressed by gzip; the columns tell the kind.
//! docs/simulation.md describes them.

use super::table::TableError;
use crate::{Error, load_cluster, read_bytes};
use altiplano_cost_models::collective::{Operation, best};
use altiplano_cost_models::compute::Compute;
use altiplano_cost_models::kernels::{Attention, Kernel, KernelKind, Matmul};
use altiplano_cost_models::{AxisLink, Devices, axis_link, catalogue};
use altiplano_ir::cluster::{Cluster, Constants, Device};
use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::plan::AttentionKernels;
use altiplano_ir::visible::TILE;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// A measured kernel, or several that run one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredKernel {
    pub line: u64,
    /// Rows of one subject are compared together: `bf16 products`.
    pub subject: String,
    /// The measured call, with its sizes.
    pub name: String,
    pub seconds: f64,
    pub device: Device,
    pub work: KernelWork,
}

/// The work of a measured kernel.
#[derive(Clone, Debug, PartialEq)]
pub enum KernelWork {
    Kernels(Vec<Kernel>),
    /// A collective of so many bytes over so many devices of a node.
    Collective {
        operation: Operation,
        bytes: u64,
        devices: u32,
        node: Box<Cluster>,
    },
}

impl MeasuredKernel {
    /// Seconds of the kernel alone, under constants of its device.
    pub fn predicted_s(&self, constants: Constants) -> f64 {
        match &self.work {
            KernelWork::Kernels(kernels) => {
                let compute = Compute::alone(self.device.clone(), constants);
                kernels.iter().map(|kernel| compute.kernel(kernel).seconds).sum()
            }
            KernelWork::Collective { operation, bytes, devices, node } => {
                let mesh = Mesh::new(&[("node", *devices)]);
                let link = axis_link(&node.groups[0], 1, *devices, &mesh, &[AxisId(0)]);
                let link = AxisLink { kind: link.kind.captured(), ..link };
                best(*operation, *bytes, &link).seconds
            }
        }
    }
}

/// A table of kernels.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTable {
    pub rows: Vec<MeasuredKernel>,
    /// Rows of systems that are not in the catalogue, by system.
    pub left_out: BTreeMap<String, usize>,
}

/// Errors of predictions for the rows of one device and subject, in percent of the measured time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelErrors {
    pub device: String,
    pub subject: String,
    pub rows: usize,
    pub median_percent: f64,
    /// The error that nine of ten rows do not exceed.
    pub tenth_percent: f64,
    /// Median signed error: above 0 if predictions are too slow.
    pub bias_percent: f64,
}

/// Systems by the names of the published tables, with the preset or node that has their devices and links.
const SYSTEMS: [(&str, &str); 5] = [
    ("a100_sxm", "dgx-a100:1"),
    ("h100_sxm", "dgx-h100:1"),
    ("h200_sxm", "dgx-h200:1"),
    ("b200_sxm", "dgx-b200:1"),
    ("l40s", "8xL40S"),
];

/// Columns that say how a row was measured, and not what.
const IGNORED: [&str; 5] = ["system", "framework", "version", "kernel_source", "nccl"];

/// The kinds of tables, with their columns.
const KINDS: [(Kind, &[&str]); 4] = [
    (Kind::Products, &["gemm_dtype", "m", "n", "k"]),
    (Kind::Attention, &["batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"]),
    (
        Kind::Experts,
        &[
            "distribution",
            "num_tokens",
            "hidden_size",
            "inter_size",
            "topk",
            "num_experts",
            "moe_tp_size",
            "moe_ep_size",
        ],
    ),
    (Kind::Collectives, &["op", "dtype", "gpus", "message"]),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Products,
    Attention,
    Experts,
    Collectives,
}

#[derive(Deserialize)]
struct Product {
    system: String,
    gemm_dtype: String,
    m: u64,
    n: u64,
    k: u64,
    latency_ms: f64,
}

#[derive(Deserialize)]
struct Attended {
    system: String,
    batch_size: u64,
    isl: u64,
    num_heads: u64,
    num_key_value_heads: u64,
    head_dim: u64,
    latency_ms: f64,
}

#[derive(Deserialize)]
struct Experts {
    system: String,
    distribution: String,
    num_tokens: u64,
    hidden_size: u64,
    inter_size: u64,
    topk: u64,
    num_experts: u64,
    moe_tp_size: u64,
    moe_ep_size: u64,
    latency_ms: f64,
}

#[derive(Deserialize)]
struct Sent {
    system: String,
    op: String,
    dtype: String,
    gpus: u32,
    message: u64,
    latency_ms: f64,
}

/// Reads a file, and decompresses it if it is a gzip file.
fn contents(file: &Path) -> Result<Vec<u8>, Error> {
    let bytes = read_bytes(file)?;
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    let mut out = Vec::new();
    flate2::read::GzDecoder::new(bytes.as_slice())
        .take(MOST_BYTES)
        .read_to_end(&mut out)
        .map_err(|error| Error::Read { file: file.to_path_buf(), error })?;
    Ok(out)
}

/// Upper limit on the bytes of a decompressed table.
const MOST_BYTES: u64 = 1 << 30;

/// Reads a table of kernels. `None` if the file has no column `latency_ms`, and so is no such table.
///
/// # Errors
/// Fails at the first fault, with its line: unknown or missing columns, and cells that are no sizes or times.
pub fn read_kernel_table(file: &Path, devices: &Devices) -> Result<Option<KernelTable>, Error> {
    // A pipe can be read only once, and then holds steps.
    if !file.is_file() {
        return Ok(None);
    }
    let bytes = contents(file)?;
    let at = |line: u64, error: TableError| Error::Row { file: file.to_path_buf(), line, error: Box::new(error) };
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(bytes.as_slice());
    let headers = match reader.headers() {
        Ok(headers) => headers.clone(),
        // Bytes that are no text are a fault of whoever reads them next.
        Err(_) => return Ok(None),
    };
    if !headers.iter().any(|column| column == "latency_ms") {
        return Ok(None);
    }
    let kind = kind(&headers).map_err(|e| at(1, e))?;
    let mut systems: BTreeMap<String, Option<Cluster>> = BTreeMap::new();
    let mut table = KernelTable { rows: Vec::new(), left_out: BTreeMap::new() };
    for record in reader.records() {
        let record = record.map_err(|e| at(1, e.into()))?;
        let line = record.position().map_or(0, |p| p.line());
        let (system, row) = row(kind, &record, &headers).map_err(|e| at(line, e))?;
        let known = SYSTEMS.iter().find(|(name, _)| *name == system).map(|(_, cluster)| *cluster);
        let node = systems.entry(system.clone()).or_insert_with(|| {
            let mut node = load_cluster(known?).ok()?;
            let _ = devices.apply(&mut node);
            Some(node)
        });
        match node {
            Some(node) => table.rows.push(row.on(node, line).map_err(|e| at(line, e))?),
            None => *table.left_out.entry(system).or_default() += 1,
        }
    }
    if table.rows.is_empty() {
        return Err(at(1, TableError::Empty));
    }
    Ok(Some(table))
}

/// The kind of table with these columns.
fn kind(headers: &csv::StringRecord) -> Result<Kind, TableError> {
    let has = |column: &&str| headers.iter().any(|h| h == *column);
    let found = KINDS.iter().find(|(_, columns)| columns.iter().any(has));
    let Some((kind, columns)) = found else {
        return Err(TableError::Columns {
            problem: "no column says what was measured",
            columns: "m, n, k; isl; num_tokens; message".into(),
        });
    };
    let required = || columns.iter().chain(&["system", "latency_ms"]);
    let missing: Vec<&str> = required().filter(|c| !has(c)).copied().collect();
    if !missing.is_empty() {
        return Err(TableError::Columns { problem: "missing columns", columns: missing.join(", ") });
    }
    let unknown: Vec<&str> =
        headers.iter().filter(|h| !IGNORED.contains(h) && !required().any(|column| column == h)).collect();
    match unknown.is_empty() {
        true => Ok(*kind),
        false => Err(TableError::Columns { problem: "unknown columns", columns: unknown.join(", ") }),
    }
}

/// The measurement of a row, before its system is known.
struct Measure {
    subject: String,
    name: String,
    seconds: f64,
    what: What,
}

enum What {
    Kernels(Vec<Kernel>),
    Collective { operation: Operation, bytes: u64, devices: u32 },
}

impl Measure {
    fn on(self, node: &Cluster, line: u64) -> Result<MeasuredKernel, TableError> {
        let group = &node.groups[0];
        let work = match self.what {
            What::Kernels(kernels) => KernelWork::Kernels(kernels),
            What::Collective { devices, .. } if devices > group.devices_per_node => {
                let found = devices.to_string();
                return Err(TableError::Value { column: "gpus", expected: "at most the devices of a node", found });
            }
            What::Collective { operation, bytes, devices } => {
                KernelWork::Collective { operation, bytes, devices, node: Box::new(node.clone()) }
            }
        };
        let (subject, name, seconds) = (self.subject, self.name, self.seconds);
        Ok(MeasuredKernel { line, subject, name, seconds, device: group.device.clone(), work })
    }
}

fn row(kind: Kind, record: &csv::StringRecord, headers: &csv::StringRecord) -> Result<(String, Measure), TableError> {
    let cell = |error| super::table::cell(error, record, headers);
    let (system, milliseconds, subject, name, what) = match kind {
        Kind::Products => {
            let Product { system, gemm_dtype, m, n, k, latency_ms } =
                record.deserialize(Some(headers)).map_err(cell)?;
            let dtype = dtype("gemm_dtype", &gemm_dtype)?;
            let kernel = product(1, sizes([("m", m), ("n", n), ("k", k)])?, dtype);
            (system, latency_ms, format!("{dtype} products"), format!("{m} x {n} x {k}"), What::Kernels(vec![kernel]))
        }
        Kind::Attention => {
            let row: Attended = record.deserialize(Some(headers)).map_err(cell)?;
            let name = format!("{} x {}, {} heads of {}", row.batch_size, row.isl, row.num_heads, row.head_dim);
            let what = What::Kernels(vec![attention(&row)?]);
            (row.system, row.latency_ms, format!("attention, heads of {}", row.head_dim), name, what)
        }
        Kind::Experts => {
            let row: Experts = record.deserialize(Some(headers)).map_err(cell)?;
            let balanced = if row.distribution == "balanced" { "balanced" } else { "skewed" };
            let name = format!("{} of {} experts, {} tokens", row.topk, row.num_experts, row.num_tokens);
            let what = What::Kernels(experts(&row)?);
            (row.system, row.latency_ms, format!("experts, {balanced}"), name, what)
        }
        Kind::Collectives => {
            let Sent { system, op, dtype: element, gpus, message, latency_ms } =
                record.deserialize(Some(headers)).map_err(cell)?;
            let operation = operation(&op)?;
            // Messages count elements.
            let [_, message, _] = sizes([("gpus", u64::from(gpus)), ("message", message), ("", 1)])?;
            let bytes = message.saturating_mul(dtype("dtype", &element)?.bytes());
            let name = format!("{bytes} bytes over {gpus}");
            (system, latency_ms, op, name, What::Collective { operation, bytes, devices: gpus })
        }
    };
    if !(milliseconds.is_finite() && milliseconds > 0.0) {
        let found = milliseconds.to_string();
        return Err(TableError::Value { column: "latency_ms", expected: "milliseconds above 0", found });
    }
    Ok((system, Measure { subject, name, seconds: 1e-3 * milliseconds, what }))
}

/// Sizes within what kernels can have.
fn sizes(named: [(&'static str, u64); 3]) -> Result<[u64; 3], TableError> {
    const MOST: u64 = 1 << 32;
    for (column, size) in named {
        if !(1..=MOST).contains(&size) {
            let expected = "a whole number from 1 to 4294967296";
            return Err(TableError::Value { column, expected, found: size.to_string() });
        }
    }
    Ok(named.map(|(_, size)| size))
}

fn dtype(column: &'static str, text: &str) -> Result<DType, TableError> {
    Ok(match text {
        "bfloat16" | "bf16" => DType::BF16,
        "half" | "float16" | "f16" => DType::F16,
        "float32" | "f32" => DType::F32,
        "fp8" => DType::F8E4M3FN,
        "int8" => DType::I8,
        _ => {
            let expected = "bfloat16, half, float32, fp8 or int8";
            return Err(TableError::Value { column, expected, found: text.to_string() });
        }
    })
}

fn operation(text: &str) -> Result<Operation, TableError> {
    Ok(match text {
        "all_reduce" => Operation::AllReduce,
        "all_gather" => Operation::AllGather,
        "reduce_scatter" => Operation::ReduceScatter,
        "alltoall" | "all_to_all" => Operation::AllToAll,
        _ => {
            let expected = "all_reduce, all_gather, reduce_scatter or alltoall";
            return Err(TableError::Value { column: "op", expected, found: text.to_string() });
        }
    })
}

/// Products of `[m, k]` and `[k, n]` whose results have 16 bits or more.
fn product(batch: u64, [m, n, k]: [u64; 3], dtype: DType) -> Kernel {
    let aligned = [n, k].iter().map(|row| 1 << row.trailing_zeros().min(3)).min().unwrap_or(1);
    let operands = dtype.bytes().saturating_mul(m.saturating_mul(k).saturating_add(n.saturating_mul(k)));
    let result = dtype.bytes().max(2).saturating_mul(m.saturating_mul(n));
    let bytes = batch.saturating_mul(operands.saturating_add(result));
    Kernel::moving(KernelKind::Matmul(Matmul { batch, m, n, k, dtype, aligned }), bytes)
}

/// Causal attention in bf16, forward.
fn attention(row: &Attended) -> Result<Kernel, TableError> {
    let [batch, keys, heads] = sizes([("batch_size", row.batch_size), ("isl", row.isl), ("num_heads", row.num_heads)])?;
    let [shared, width, _] =
        sizes([("num_key_value_heads", row.num_key_value_heads), ("head_dim", row.head_dim), ("", 1)])?;
    let rows = keys.div_ceil(TILE);
    let share = (rows + 1) as f64 / (2 * rows) as f64;
    let tiles = batch.saturating_mul(heads).saturating_mul(rows);
    let flop = 4.0 * batch as f64 * heads as f64 * (keys as f64).powi(2) * width as f64;
    let (dtype, software) = (DType::BF16, AttentionKernels::Newest);
    let kind = KernelKind::Attention(Attention { flop, share, keys, tiles, backward: false, dtype, software });
    let values = batch.saturating_mul(keys).saturating_mul(width).saturating_mul(2 * heads + 2 * shared);
    Ok(Kernel::moving(kind, values.saturating_mul(dtype.bytes())))
}

/// Gated perceptrons of the experts of one device: two products of all experts, and the gate between them. Tokens are
/// taken to be spread evenly.
fn experts(row: &Experts) -> Result<Vec<Kernel>, TableError> {
    let [tokens, hidden, wide] =
        sizes([("num_tokens", row.num_tokens), ("hidden_size", row.hidden_size), ("inter_size", row.inter_size)])?;
    let [chosen, count, tp] =
        sizes([("topk", row.topk), ("num_experts", row.num_experts), ("moe_tp_size", row.moe_tp_size)])?;
    let [ep, ..] = sizes([("moe_ep_size", row.moe_ep_size), ("", 1), ("", 1)])?;
    let (own, wide) = ((count / ep).max(1), (wide / tp).max(1));
    let each = tokens.saturating_mul(chosen).div_ceil(count).max(1);
    let elements = own.saturating_mul(each).saturating_mul(wide);
    let dtype = DType::BF16;
    let gate = KernelKind::Fused { operations: 10.0 * elements as f64 };
    Ok(vec![
        product(own, [each, 2 * wide, hidden], dtype),
        Kernel::moving(gate, elements.saturating_mul(3 * dtype.bytes())),
        product(own, [each, hidden, wide], dtype),
    ])
}

impl KernelTable {
    /// Errors by device and subject, under the constants of the catalogue or of devices given by files.
    pub fn errors(&self) -> Vec<KernelErrors> {
        let mut found: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
        for row in &self.rows {
            let constants = row.device.constants.unwrap_or_else(|| catalogue::constants_of(&row.device));
            let error = 100.0 * (row.predicted_s(constants) / row.seconds - 1.0);
            found.entry((&row.device.name, &row.subject)).or_default().push(error);
        }
        found.into_iter().map(|((device, subject), errors)| KernelErrors::of(device, subject, errors)).collect()
    }
}

impl KernelErrors {
    fn of(device: &str, subject: &str, mut signed: Vec<f64>) -> KernelErrors {
        let mut sizes: Vec<f64> = signed.iter().map(|e| e.abs()).collect();
        signed.sort_by(f64::total_cmp);
        sizes.sort_by(f64::total_cmp);
        let of = |sorted: &[f64], part: f64| sorted[((sorted.len() - 1) as f64 * part).round() as usize];
        KernelErrors {
            device: device.to_string(),
            subject: subject.to_string(),
            rows: sizes.len(),
            median_percent: of(&sizes, 0.5),
            tenth_percent: of(&sizes, 0.9),
            bias_percent: of(&signed, 0.5),
        }
    }
}

//! Tables of measured steps: CSV with a header and one measurement per row. docs/simulation.md describes the columns.

use crate::Error;
use altiplano_ir::recompute::Recompute;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// One measurement, as the table states it. Sizes are those of the whole model; empty cells are `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Line in the file, from 1.
    pub line: u64,
    pub group: String,
    pub model: RowModel,
    pub seq: u64,
    pub gpus: u32,
    pub cluster: String,
    pub tp: u32,
    pub pp: u32,
    pub dp: u32,
    pub cp: u32,
    /// Devices that share the experts of a layer.
    pub ep: u32,
    pub virtual_stages: u32,
    pub micro_batch: MicroBatch,
    pub global_batch: u64,
    pub schedule: String,
    pub recompute: String,
    /// The ZeRO level: replicas share optimizer state (1), also gradients (2), also parameters (3), or nothing (0).
    pub zero: u8,
    /// Tokens that an expert takes relative to an even spread.
    pub capacity: Option<f64>,
    pub dtype: String,
    /// True if the software fused attention; absent if the row does not say.
    pub fused_attention: Option<bool>,
    pub measured_step_s: f64,
    pub source: String,
}

/// The model of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum RowModel {
    /// A dense decoder, of a family that its name tells.
    Sizes { name: String, layers: u64, hidden: u64, heads: u64, kv_heads: Option<u64>, ffn: Option<u64>, vocab: u64 },
    /// A Hugging Face config, with another number of layers if given.
    Config { file: PathBuf, layers: Option<u64> },
}

impl RowModel {
    /// A name for messages.
    pub fn name(&self) -> String {
        match self {
            RowModel::Sizes { name, .. } => name.clone(),
            RowModel::Config { file, .. } => file.display().to_string(),
        }
    }
}

/// Samples per microbatch on each data-parallel replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatch {
    Of(u64),
    /// The fastest of several sizes was measured.
    Best,
}

impl Row {
    /// The recomputation that the row states.
    pub fn recomputes(&self) -> Recompute {
        match self.recompute.as_str() {
            "full" => Recompute::Full,
            "selective" => Recompute::Selective,
            _ => Recompute::None,
        }
    }

    /// The degrees in words: `tp2 pp4 dp1, microbatches of 2`.
    pub fn plan(&self) -> String {
        let [cp, ep] = [("cp", self.cp), ("ep", self.ep)].map(|(name, degree)| match degree {
            1 => String::new(),
            _ => format!(" {name}{degree}"),
        });
        let chunks = if self.virtual_stages > 1 { format!("x{}", self.virtual_stages) } else { String::new() };
        let of = match self.micro_batch {
            MicroBatch::Of(n) => n.to_string(),
            MicroBatch::Best => "any size".into(),
        };
        format!("tp{} pp{}{chunks} dp{}{cp}{ep}, microbatches of {of}", self.tp, self.pp, self.dp)
    }
}

/// Faults of a row.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("{0}")]
    Csv(#[from] csv::Error),
    #[error("{column}: {problem}")]
    Cell { column: String, problem: String },
    #[error("{column}: expected {expected}, found '{found}'")]
    Value { column: &'static str, expected: &'static str, found: String },
    #[error("tp {tp} x pp {pp} x dp {dp} x cp {cp} is not gpus {gpus}")]
    Degrees { tp: u32, pp: u32, dp: u32, cp: u32, gpus: u32 },
    #[error("global_batch {global_batch} is not divided by micro_batch {micro_batch} x dp {dp}")]
    Batch { global_batch: u64, micro_batch: u64, dp: u32 },
    #[error("{problem}: {columns}")]
    Columns { problem: &'static str, columns: String },
    #[error("the table has no rows")]
    Empty,
    #[error(transparent)]
    Model(#[from] Box<Error>),
}

#[derive(Deserialize)]
struct Raw {
    group: String,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    config: Option<PathBuf>,
    #[serde(default)]
    layers: Option<u64>,
    #[serde(default)]
    hidden: Option<u64>,
    #[serde(default)]
    heads: Option<u64>,
    #[serde(default)]
    kv_heads: Option<u64>,
    #[serde(default)]
    ffn: Option<u64>,
    seq: u64,
    #[serde(default)]
    vocab: Option<u64>,
    gpus: u32,
    cluster: String,
    tp: Option<u32>,
    pp: Option<u32>,
    dp: Option<u32>,
    #[serde(default)]
    cp: Option<u32>,
    #[serde(default)]
    ep: Option<u32>,
    #[serde(default)]
    virtual_stages: Option<u32>,
    micro_batch: String,
    global_batch: u64,
    #[serde(default)]
    schedule: String,
    #[serde(default)]
    recompute: String,
    #[serde(default)]
    sharded_optimizer: String,
    #[serde(default)]
    sharding: String,
    #[serde(default)]
    capacity: Option<f64>,
    #[serde(default)]
    dtype: String,
    #[serde(default)]
    fused_attention: String,
    measured_step_s: f64,
    #[serde(default)]
    source: String,
}

/// Reads a table. Its first fault is the error, with its line.
pub fn read_table(file: &Path) -> Result<Vec<Row>, Error> {
    let bytes = crate::read_bytes(file)?;
    let at = |line: u64, error: TableError| Error::Row { file: file.to_path_buf(), line, error: Box::new(error) };
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(bytes.as_slice());
    let headers = reader.headers().map_err(|e| at(1, e.into()))?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|e| at(e.position().map_or(1, |p| line_of(&bytes, p.byte())), e.into()))?;
        let line = record.position().map_or(0, |p| line_of(&bytes, p.byte()));
        let raw: Raw = record.deserialize(Some(&headers)).map_err(|e| at(line, cell(e, &record, &headers)))?;
        rows.push(row(raw, line, file).map_err(|e| at(line, e))?);
    }
    if rows.is_empty() {
        return Err(at(1, TableError::Empty));
    }
    Ok(rows)
}

/// The fault of a cell, with the name of its column.
pub(super) fn cell(error: csv::Error, record: &csv::StringRecord, headers: &csv::StringRecord) -> TableError {
    let csv::ErrorKind::Deserialize { err, .. } = error.kind() else { return error.into() };
    let Some(column) = err.field().and_then(|i| headers.get(i as usize)) else { return error.into() };
    let found = err.field().and_then(|i| record.get(i as usize)).unwrap_or_default();
    TableError::Cell { column: column.to_string(), problem: format!("{} '{found}'", err.kind()) }
}

/// The line, from 1, of the first character at or after a byte that is no line end. A record starts with the line end
/// of the one before.
fn line_of(bytes: &[u8], byte: u64) -> u64 {
    let at = (byte as usize).min(bytes.len());
    let start = at + bytes[at..].iter().take_while(|b| matches!(b, b'\n' | b'\r')).count();
    1 + bytes[..start].iter().filter(|b| **b == b'\n').count() as u64
}

/// Upper limit on sizes in a table, so that products of a few do not overflow.
const MOST: u64 = 1 << 24;

/// Upper limit on the microbatches of a step, each of which is simulated.
const MOST_MICROBATCHES: u64 = 1 << 16;

fn positive(column: &'static str, value: u64) -> Result<u64, TableError> {
    match value {
        1..=MOST => Ok(value),
        _ => Err(TableError::Value { column, expected: "a whole number from 1 to 16777216", found: value.to_string() }),
    }
}

/// The model of a row of a table in `file`, beside which configs lie.
fn model(raw: &Raw, file: &Path) -> Result<RowModel, TableError> {
    let checked = |column, value: Option<u64>| value.map(|n| positive(column, n)).transpose();
    let layers = checked("layers", raw.layers)?;
    if let Some(config) = raw.config.as_ref().filter(|config| !config.as_os_str().is_empty()) {
        let folder = file.parent().unwrap_or(Path::new(""));
        return Ok(RowModel::Config { file: folder.join(config), layers });
    }
    let stated = |column: &'static str, value: Option<u64>| {
        let missing = TableError::Value { column, expected: "a size, or a config", found: String::new() };
        positive(column, value.ok_or(missing)?)
    };
    Ok(RowModel::Sizes {
        name: raw.model.clone().unwrap_or_default(),
        layers: stated("layers", layers)?,
        hidden: stated("hidden", raw.hidden)?,
        heads: stated("heads", raw.heads)?,
        kv_heads: checked("kv_heads", raw.kv_heads)?,
        ffn: checked("ffn", raw.ffn)?,
        vocab: stated("vocab", raw.vocab)?,
    })
}

/// The ZeRO level, by either of two columns.
fn zero(raw: &Raw) -> Result<u8, TableError> {
    match (raw.sharded_optimizer.as_str(), raw.sharding.as_str()) {
        ("" | "0", "" | "none") => Ok(0),
        ("1", "") | ("" | "1", "optimizer") => Ok(1),
        ("" | "1", "gradients") => Ok(2),
        ("" | "1", "parameters") => Ok(3),
        ("" | "0" | "1", sharding) => Err(TableError::Value {
            column: "sharding",
            expected: "none, optimizer, gradients or parameters, as sharded_optimizer has it",
            found: sharding.to_string(),
        }),
        (found, _) => {
            Err(TableError::Value { column: "sharded_optimizer", expected: "0 or 1", found: found.to_string() })
        }
    }
}

fn row(raw: Raw, line: u64, file: &Path) -> Result<Row, TableError> {
    let (model, zero) = (model(&raw, file)?, zero(&raw)?);
    let degree = |column: &'static str, value: Option<u32>, default: Option<u32>| match value.or(default) {
        Some(n) => positive(column, u64::from(n)).map(|n| n as u32),
        None => Err(TableError::Value {
            column,
            expected: "a degree: only plans with stated degrees are predicted",
            found: String::new(),
        }),
    };
    let word = |column: &'static str, value: &str, words: &[&str], expected: &'static str| {
        if words.contains(&value) {
            Ok(value.to_string())
        } else {
            Err(TableError::Value { column, expected, found: value.to_string() })
        }
    };
    let micro_batch = match raw.micro_batch.as_str() {
        "best" => MicroBatch::Best,
        text => {
            let n = text.parse().ok().filter(|n| (1..=MOST).contains(n));
            MicroBatch::Of(n.ok_or(TableError::Value {
                column: "micro_batch",
                expected: "a whole number, or best",
                found: text.to_string(),
            })?)
        }
    };
    if !(raw.measured_step_s.is_finite() && raw.measured_step_s > 0.0) {
        return Err(TableError::Value {
            column: "measured_step_s",
            expected: "seconds above 0",
            found: raw.measured_step_s.to_string(),
        });
    }
    if let Some(capacity) = raw.capacity.filter(|c| !(c.is_finite() && *c > 0.0)) {
        let found = capacity.to_string();
        return Err(TableError::Value { column: "capacity", expected: "a number above 0", found });
    }
    let row = Row {
        line,
        model,
        zero,
        capacity: raw.capacity,
        seq: positive("seq", raw.seq)?,
        ep: degree("ep", raw.ep, Some(1))?,
        gpus: positive("gpus", u64::from(raw.gpus))? as u32,
        tp: degree("tp", raw.tp, None)?,
        pp: degree("pp", raw.pp, None)?,
        dp: degree("dp", raw.dp, None)?,
        cp: degree("cp", raw.cp, Some(1))?,
        virtual_stages: degree("virtual_stages", raw.virtual_stages, Some(1))?,
        micro_batch,
        global_batch: positive("global_batch", raw.global_batch)?,
        schedule: word(
            "schedule",
            &raw.schedule,
            &["", "1f1b", "gpipe", "interleaved-1f1b"],
            "1f1b, gpipe or interleaved-1f1b",
        )?,
        recompute: word("recompute", &raw.recompute, &["", "none", "selective", "full"], "none, selective or full")?,
        fused_attention: match word("fused_attention", &raw.fused_attention, &["", "0", "1"], "0 or 1")?.as_str() {
            "" => None,
            stated => Some(stated == "1"),
        },
        dtype: word("dtype", &raw.dtype, &["", "f32", "f16", "bf16"], "f32, f16 or bf16")?,
        measured_step_s: raw.measured_step_s,
        source: raw.source,
        group: raw.group,
        cluster: raw.cluster,
    };
    expect_consistent(&row)?;
    Ok(row)
}

/// Checks that the degrees of a row divide its devices and its batch.
fn expect_consistent(row: &Row) -> Result<(), TableError> {
    let devices = u64::from(row.tp) * u64::from(row.pp) * u64::from(row.dp);
    if devices.checked_mul(u64::from(row.cp)) != Some(u64::from(row.gpus)) {
        let Row { tp, pp, dp, cp, gpus, .. } = *row;
        return Err(TableError::Degrees { tp, pp, dp, cp, gpus });
    }
    if let MicroBatch::Of(micro_batch) = row.micro_batch
        && row.global_batch % (micro_batch * u64::from(row.dp)) != 0
    {
        return Err(TableError::Batch { global_batch: row.global_batch, micro_batch, dp: row.dp });
    }
    let smallest = if let MicroBatch::Of(micro_batch) = row.micro_batch { micro_batch } else { 1 };
    if row.global_batch / (smallest * u64::from(row.dp)) > MOST_MICROBATCHES {
        return Err(TableError::Value {
            column: "global_batch",
            expected: "at most 65536 microbatches on each replica",
            found: row.global_batch.to_string(),
        });
    }
    Ok(())
}

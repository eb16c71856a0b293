//! Reads kernels timed by PyTorch's profiler (`torch.profiler.profile(record_shapes=True)` and `export_chrome_trace`),
//! and those of `altiplano run --trace`, which describe themselves.
//!
//! A host op carries the shapes of its operands, and a kernel the number of the op that issued it. Matrix products and
//! ops that stream over memory once are priced like a plan's kernels. Other kernels are counted and left out. The
//! host's issue time is ignored, since an eager framework issues other kernels than a plan has.

use altiplano_cost_models::catalogue;
use altiplano_cost_models::kernels::{Kernel, KernelKind, Matmul};
use altiplano_cost_models::probe::{Gpu, catalogue_device};
use altiplano_ir::cluster::Device;
use altiplano_ir::dtype::DType;
use altiplano_ir::json;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::{BTreeMap, HashMap};
use thiserror::Error;

/// Faults of a trace.
#[derive(Debug, Error)]
pub enum TraceError {
    #[error("{line}:{column}: {error}")]
    Json { line: usize, column: usize, error: String },
    #[error("the trace names no device (`deviceProperties`); it is not of a GPU, or it is from another profiler")]
    NoDevice,
    #[error("the trace is of `{name}`, which is not in the catalogue of devices")]
    UnknownDevice { name: String },
    #[error("no kernel of the trace belongs to an op with shapes; record with `record_shapes=True`")]
    NoKernels,
    #[error("none of the trace's {ops} ops with kernels is a matmul or streams over memory")]
    NothingUsed { ops: usize },
    #[error("a kernel of {name} took {seconds:e} s, which is impossible")]
    Duration { name: String, seconds: f64 },
}

/// A kernel of some shape, with its median time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// `aten::mm [4096, 1024] [1024, 4096]`
    pub name: String,
    pub kernel: Kernel,
    pub times: usize,
    pub seconds: f64,
}

/// The measurements of a device in a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    pub device: Device,
    pub kernels: Vec<Timed>,
    /// Calls of ops that match no kernel of a plan, and their seconds.
    pub left_out: usize,
    pub left_out_s: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(default)]
    device_properties: Vec<Properties>,
    trace_events: Vec<Event>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Properties {
    name: String,
    #[serde(default)]
    total_global_mem: u64,
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    cat: String,
    #[serde(default)]
    name: String,
    /// Duration in microseconds.
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Arguments,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Arguments {
    #[serde(rename = "External id", alias = "external id")]
    external_id: Maybe<u64>,
    /// A shape per operand; for a list of tensors, a list of shapes.
    #[serde(rename = "Input Dims", alias = "Input dims")]
    shapes: Maybe<Vec<Maybe<Vec<u64>>>>,
    #[serde(rename = "Input type")]
    types: Maybe<Vec<Maybe<String>>>,
    /// Present in traces that this project wrote.
    kernel: Maybe<Described>,
}

/// A kernel's description of itself.
#[derive(Deserialize)]
struct Described {
    what: DescribedKind,
    read_bytes: u64,
    written_bytes: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum DescribedKind {
    Matmul { batch: u64, m: u64, n: u64, k: u64, dtype: DType, aligned: u64 },
    Elementwise { operations: f64 },
}

impl Described {
    /// The kernel, with a name that groups equal ones; `None` if the figures are impossible.
    fn kernel(&self) -> Option<(String, Kernel)> {
        self.read_bytes.checked_add(self.written_bytes)?;
        let (name, kind) = match self.what {
            DescribedKind::Matmul { batch, m, n, k, dtype, aligned } => {
                let name = format!("matmul {dtype} [{batch}, {m}, {k}] [{batch}, {k}, {n}]");
                ([1, 2, 4, 8].contains(&aligned))
                    .then_some((name, KernelKind::Matmul(Matmul { batch, m, n, k, dtype, aligned })))?
            }
            DescribedKind::Elementwise { operations } if operations >= 0.0 => {
                let name = format!("elementwise {operations:e} [{}, {}]", self.read_bytes, self.written_bytes);
                (name, KernelKind::Fused { operations })
            }
            DescribedKind::Elementwise { .. } => return None,
        };
        Some((name, kernel(kind, self.read_bytes, self.written_bytes)))
    }
}

/// A value of this type, or a different one that another kind of event has under this name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Maybe<T> {
    Is(T),
    Other(IgnoredAny),
}

impl<T> Default for Maybe<T> {
    fn default() -> Self {
        Maybe::Other(IgnoredAny)
    }
}

impl<T> Maybe<T> {
    fn is(&self) -> Option<&T> {
        match self {
            Maybe::Is(value) => Some(value),
            Maybe::Other(_) => None,
        }
    }
}

/// The bytes that an op writes in addition to those that it reads.
#[derive(Clone, Copy, PartialEq)]
enum Writes {
    /// A tensor like the largest operand.
    Largest,
    /// Few bytes: the op is a reduction.
    Little,
    /// Its first operand, which it does not read.
    First,
}

/// Ops that stream over memory once; in-place variants have an additional underscore.
const STREAMING: &[(&str, Writes)] = &[
    ("abs", Writes::Largest),
    ("add", Writes::Largest),
    ("addcdiv", Writes::Largest),
    ("addcmul", Writes::Largest),
    ("clamp", Writes::Largest),
    ("copy", Writes::First),
    ("cos", Writes::Largest),
    ("div", Writes::Largest),
    ("exp", Writes::Largest),
    ("fill", Writes::First),
    ("gelu", Writes::Largest),
    ("gelu_backward", Writes::Largest),
    ("log", Writes::Largest),
    ("masked_fill", Writes::Largest),
    ("mean", Writes::Little),
    ("mul", Writes::Largest),
    ("native_layer_norm", Writes::Largest),
    ("neg", Writes::Largest),
    ("pow", Writes::Largest),
    ("reciprocal", Writes::Largest),
    ("relu", Writes::Largest),
    ("rsqrt", Writes::Largest),
    ("rsub", Writes::Largest),
    ("sigmoid", Writes::Largest),
    ("sigmoid_backward", Writes::Largest),
    ("silu", Writes::Largest),
    ("silu_backward", Writes::Largest),
    ("sin", Writes::Largest),
    ("_softmax", Writes::Largest),
    ("_softmax_backward_data", Writes::Largest),
    ("_log_softmax", Writes::Largest),
    ("_log_softmax_backward_data", Writes::Largest),
    ("sqrt", Writes::Largest),
    ("sub", Writes::Largest),
    ("sum", Writes::Little),
    ("tanh", Writes::Largest),
    ("tanh_backward", Writes::Largest),
    ("threshold_backward", Writes::Largest),
    ("where", Writes::Largest),
    ("zero", Writes::First),
];

/// Upper limit on a kernel's time.
const LONGEST_S: f64 = 3600.0;

/// Reads a trace.
pub(crate) fn read_trace(text: &[u8]) -> Result<Trace, TraceError> {
    let file: File = serde_json::from_slice(text).map_err(|e| {
        let (line, column) = json::place(&e);
        TraceError::Json { line, column, error: json::message(&e) }
    })?;
    let Properties { name, total_global_mem } =
        file.device_properties.into_iter().next().ok_or(TraceError::NoDevice)?;
    let gpu = Gpu { name, memory_bytes: total_global_mem };
    let device = catalogue_device(&gpu)
        .or_else(|| catalogue::device(&gpu.name))
        .ok_or(TraceError::UnknownDevice { name: gpu.name })?;
    // Total time of the kernels of each op.
    let mut of_op: HashMap<u64, f64> = HashMap::new();
    for event in file.trace_events.iter().filter(|e| e.cat == "kernel" && e.dur > 0.0) {
        if let Some(&id) = event.args.external_id.is() {
            *of_op.entry(id).or_default() += event.dur * 1e-6;
        }
    }
    let mut groups: BTreeMap<String, (Kernel, Vec<f64>)> = BTreeMap::new();
    let (mut left_out, mut left_out_s) = (0, 0.0);
    for event in file.trace_events.iter().filter(|e| e.cat == "kernel" && e.dur > 0.0) {
        let Some((name, kernel)) = event.args.kernel.is().and_then(Described::kernel) else { continue };
        let seconds = event.dur * 1e-6;
        if seconds > LONGEST_S {
            return Err(TraceError::Duration { name: event.name.clone(), seconds });
        }
        groups.entry(name).or_insert_with(|| (kernel, Vec::new())).1.push(seconds);
    }
    for event in file.trace_events.iter().filter(|e| e.cat == "cpu_op") {
        let Some(seconds) = event.args.external_id.is().and_then(|id| of_op.remove(id)) else { continue };
        if seconds > LONGEST_S {
            return Err(TraceError::Duration { name: event.name.clone(), seconds });
        }
        match kernel_of(&event.name, &event.args) {
            Some(kernel) => {
                let shapes: Vec<String> = tensors(&event.args).iter().map(|(s, d)| format!("{d}{s:?}")).collect();
                let name = format!("{} {}", event.name, shapes.join(" "));
                groups.entry(name).or_insert_with(|| (kernel, Vec::new())).1.push(seconds);
            }
            None => (left_out, left_out_s) = (left_out + 1, left_out_s + seconds),
        }
    }
    if groups.is_empty() {
        return Err(if left_out > 0 { TraceError::NothingUsed { ops: left_out } } else { TraceError::NoKernels });
    }
    let timed = |(name, (kernel, mut times)): (String, (Kernel, Vec<f64>))| {
        times.sort_by(f64::total_cmp);
        Timed { name, kernel, times: times.len(), seconds: times[times.len() / 2] }
    };
    Ok(Trace { device, kernels: groups.into_iter().map(timed).collect(), left_out, left_out_s })
}

/// The tensor operands of an op with an element type of known size.
fn tensors(arguments: &Arguments) -> Vec<(&[u64], DType)> {
    let (Some(shapes), Some(types)) = (arguments.shapes.is(), arguments.types.is()) else { return Vec::new() };
    let both = shapes.iter().zip(types);
    both.filter_map(|(shape, dtype)| Some((shape.is()?.as_slice(), dtype_of(dtype.is()?)?))).collect()
}

/// A type by the profiler's name; numbers that are no tensors are called `Scalar`.
fn dtype_of(name: &str) -> Option<DType> {
    Some(match name {
        "double" => DType::F64,
        "float" => DType::F32,
        "c10::Half" => DType::F16,
        "c10::BFloat16" => DType::BF16,
        "long int" | "long" => DType::I64,
        "int" => DType::I32,
        "short int" | "short" => DType::I16,
        "signed char" => DType::I8,
        "unsigned char" => DType::U8,
        "bool" => DType::Bool,
        _ => return None,
    })
}

fn kernel_of(name: &str, arguments: &Arguments) -> Option<Kernel> {
    let name = name.strip_prefix("aten::")?;
    let tensors = tensors(arguments);
    let bytes =
        |(shape, dtype): &(&[u64], DType)| shape.iter().try_fold(dtype.bytes(), |product, &d| product.checked_mul(d));
    let factors = match name {
        "mm" | "bmm" => tensors.get(..2),
        "addmm" | "addmm_" | "baddbmm" | "baddbmm_" => tensors.get(1..3),
        _ => None,
    };
    if let Some(&[(lhs, dtype), (rhs, _)]) = factors {
        let (batch, m, k, n) = match (lhs, rhs) {
            (&[m, k], &[same, n]) if same == k => (1, m, k, n),
            (&[batch, m, k], &[_, same, n]) if same == k => (batch, m, k, n),
            _ => return None,
        };
        let read = tensors.iter().map(bytes).try_fold(0u64, |sum, b| sum.checked_add(b?))?;
        let written = [batch, m, n].iter().try_fold(dtype.bytes(), |product, &d| product.checked_mul(d))?;
        let aligned = 1 << k.trailing_zeros().min(n.trailing_zeros()).min(3);
        return Some(kernel(KernelKind::Matmul(Matmul { batch, m, n, k, dtype, aligned }), read, written));
    }
    let plain = |known: &str| name == known || name.strip_suffix('_') == Some(known);
    let writes = STREAMING.iter().find(|(known, _)| plain(known))?.1;
    let sizes = tensors.iter().map(bytes).collect::<Option<Vec<u64>>>()?;
    let all = sizes.iter().try_fold(0u64, |sum, &b| sum.checked_add(b))?;
    let (read, written) = match writes {
        Writes::Largest => (all, sizes.iter().copied().max()?),
        Writes::Little => (all, 0),
        Writes::First => (all - sizes.first()?, *sizes.first()?),
    };
    (read.checked_add(written)? > 0).then(|| kernel(KernelKind::Fused { operations: 0.0 }, read, written))
}

fn kernel(kind: KernelKind, read_bytes: u64, written_bytes: u64) -> Kernel {
    Kernel { kind, nodes: Vec::new(), reads: Vec::new(), writes: Vec::new(), read_bytes, written_bytes, work: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn op(id: u64, name: &str, shapes: Value, dtype: &str) -> Value {
        let types = vec![dtype; shapes.as_array().map_or(0, Vec::len)];
        json!({"ph": "X", "cat": "cpu_op", "name": name, "ts": 1.0, "dur": 5, "pid": 7, "tid": 7,
               "args": {"External id": id, "Input Dims": shapes, "Input type": types, "Record function id": 0}})
    }

    fn ran(id: u64, micros: f64) -> Value {
        json!({"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": micros, "args": {"External id": id, "stream": 7}})
    }

    fn trace(events: Vec<Value>) -> Vec<u8> {
        let device = json!([{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_899_345_920u64}]);
        json!({"schemaVersion": 1, "deviceProperties": device, "traceEvents": events}).to_string().into_bytes()
    }

    #[test]
    fn kernels_have_the_shapes_of_the_ops_that_issued_them() {
        let half = "c10::Half";
        let mut events = vec![
            json!({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}),
            op(1, "aten::addmm", json!([[768], [512, 1024], [1024, 768], [], []]), half),
            op(4, "aten::bmm", json!([[16, 128, 64], [16, 64, 132]]), half),
            op(5, "aten::copy_", json!([[1000], [1000], []]), "float"),
            op(6, "aten::sum", json!([[1000], [0], []]), "float"),
            op(7, "aten::index_put_", json!([[1000], [[3], [4]]]), "float"),
            op(8, "aten::add", json!([[1000], [1000]]), "float"),
        ];
        // The same op three times, once with two kernels and once slow.
        events.extend([2, 3].map(|id| op(id, "aten::addmm", json!([[768], [512, 1024], [1024, 768], [], []]), half)));
        events.extend(
            [(1, 20.0), (1, 5.0), (2, 24.0), (3, 90.0), (4, 7.0), (5, 3.0), (6, 2.0), (7, 9.0)].map(|(i, t)| ran(i, t)),
        );
        let found = read_trace(&trace(events)).unwrap();
        assert_eq!(found.device.name, "A100-SXM-80GB");
        assert_eq!((found.left_out, found.left_out_s), (1, 9e-6));
        let by_name = |name: &str| found.kernels.iter().find(|k| k.name.starts_with(name)).unwrap();
        let product = by_name("aten::addmm");
        let matmul = Matmul { batch: 1, m: 512, n: 768, k: 1024, dtype: DType::F16, aligned: 8 };
        assert_eq!(product.kernel.kind, KernelKind::Matmul(matmul));
        assert_eq!(product.times, 3);
        assert!((product.seconds - 25e-6).abs() < 1e-12);
        assert_eq!(product.kernel.written_bytes, 2 * 512 * 768);
        assert!(matches!(by_name("aten::bmm").kernel.kind, KernelKind::Matmul(Matmul { batch: 16, aligned: 4, .. })));
        let copied = &by_name("aten::copy_").kernel;
        assert_eq!((copied.read_bytes, copied.written_bytes), (4004, 4000));
        assert_eq!(by_name("aten::sum").kernel.written_bytes, 0);
        assert_eq!(found.kernels.len(), 4, "what no kernel belongs to was not measured");
    }

    #[test]
    fn what_is_wrong_with_a_trace_is_said() {
        let says = |text: &[u8], expect: &str| {
            let error = read_trace(text).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        says(b"{", "1:1: it ends here");
        says(b"[]", "1:2: invalid length");
        says(b"{\"traceEvents\": []}", "names no device");
        says(&trace(vec![]), "record_shapes=True");
        says(&trace(vec![op(1, "aten::mm", json!([]), "float"), ran(1, 3.0)]), "none of the trace's 1 ops");
        says(
            &trace(vec![op(1, "aten::add", json!([[3]]), "float"), ran(1, 1e300)]),
            "a kernel of aten::add took 1e294 s",
        );
        let other = String::from_utf8(trace(vec![])).unwrap().replace("A100-SXM4-80GB", "Q1");
        says(other.as_bytes(), "`NVIDIA Q1`, which is not in the catalogue");
        let huge = op(1, "aten::mm", json!([[u64::MAX, u64::MAX], [u64::MAX, 3]]), "float");
        says(&trace(vec![huge, ran(1, 3.0)]), "none of the trace's 1 ops");
    }
}

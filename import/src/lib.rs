//! Importers from users' formats to a [`Graph`](altiplano_ir::graph::Graph).

#![forbid(unsafe_code)]

mod budget;
pub mod huggingface;
pub mod onnx;
pub mod stablehlo;
pub mod torch_export;

pub use budget::OutOfProportion;

/// Lists each unsupported op of a file, and the first twenty problems, one per line. Ops that could not be read only
/// because they use these results are counted.
fn listed<U: std::fmt::Display, P: std::fmt::Display>(
    unsupported: &[U],
    problems: &[P],
    consequences: usize,
) -> String {
    const SHOWN: usize = 20;
    let mut lines = Vec::new();
    if !unsupported.is_empty() {
        lines.push("these operations are not supported:".to_string());
    }
    lines.extend(unsupported.iter().map(|entry| format!("  {entry}")));
    if !unsupported.is_empty() && !problems.is_empty() {
        lines.push("these operations contradict their operands:".into());
    }
    lines.extend(problems.iter().take(SHOWN).map(P::to_string));
    if problems.len() > SHOWN {
        lines.push(format!("and {} more such problems", problems.len() - SHOWN));
    }
    match consequences {
        0 => {}
        1 => lines.push("1 operation that uses their results was not looked at".into()),
        n => lines.push(format!("{n} operations that use their results were not looked at")),
    }
    lines.join("\n")
}

/// A size that a program leaves open.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenSize {
    pub symbol: String,
    pub value: u64,
    /// The dimensions of inputs that have this size.
    pub dims: Vec<(String, usize)>,
    /// True if neither the caller nor the file states the size, so that it was chosen.
    pub chosen: bool,
    pub least: Option<i64>,
    pub most: Option<i64>,
}

impl OpenSize {
    /// Returns true if `name` is the size's own name, or that of an input with its dimension: `tokens.0`.
    pub fn is_called(&self, name: &str) -> bool {
        self.symbol == name || self.dims.iter().any(|(input, dim)| name == format!("{input}.{dim}"))
    }
}

impl std::fmt::Display for OpenSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dims: Vec<String> = self.dims.iter().map(|(input, dim)| format!("{input}.{dim}")).collect();
        match dims.is_empty() {
            true => write!(f, "{}", self.symbol),
            false => write!(f, "{} ({})", self.symbol, dims.join(", ")),
        }
    }
}

/// A list of the open sizes of a program, for an error about one that is not among them.
fn known_sizes(known: &[String]) -> String {
    match known {
        [] => "all sizes of this program are fixed".to_string(),
        known => format!("the sizes that the program leaves open are {}", known.join(", ")),
    }
}

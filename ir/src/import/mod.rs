//! Importers: from the formats that users have to a [`crate::graph::Graph`].

pub mod huggingface;
pub mod json;
pub mod onnx;
pub mod stablehlo;
pub mod torch_export;

/// One line for each problem of a file, of which the first twenty are shown, and for each op in it that is not supported.
fn listed<U: std::fmt::Display, P: std::fmt::Display>(unsupported: &[U], problems: &[P]) -> String {
    const SHOWN: usize = 20;
    let mut lines: Vec<String> = problems.iter().take(SHOWN).map(P::to_string).collect();
    if problems.len() > SHOWN {
        lines.push(format!("and {} more such problems", problems.len() - SHOWN));
    }
    if !unsupported.is_empty() {
        lines.push("these operations are not supported:".into());
    }
    lines.extend(unsupported.iter().map(|entry| format!("  {entry}")));
    lines.join("\n")
}

//! Types, literals and attributes as MLIR writes them.

use altiplano_ir::dtype::DType;
use altiplano_ir::literal::{Literal, Values};
use altiplano_ir::types::TensorType;
use std::fmt::Display;

/// MLIR's name of an element type.
pub(super) fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::F8E4M3FN => "f8E4M3FN",
        DType::F8E5M2 => "f8E5M2",
        DType::F8E4M3 => "f8E4M3",
        DType::F8E3M4 => "f8E3M4",
        DType::F8E4M3FNUZ => "f8E4M3FNUZ",
        DType::F8E5M2FNUZ => "f8E5M2FNUZ",
        DType::F8E4M3B11FNUZ => "f8E4M3B11FNUZ",
        DType::F8E8M0FNU => "f8E8M0FNU",
        DType::U64 => "ui64",
        DType::U32 => "ui32",
        DType::U16 => "ui16",
        DType::U8 => "ui8",
        DType::U4 => "ui4",
        DType::U2 => "ui2",
        DType::Bool => "i1",
        other => other.name(),
    }
}

/// `tensor<4x6xf32>`
pub(super) fn tensor(ty: &TensorType) -> String {
    let sizes: String = ty.shape.iter().map(|size| format!("{size}x")).collect();
    format!("tensor<{sizes}{}>", element(ty.dtype))
}

/// `tensor<4xf32>, tensor<f32>`
pub(super) fn tensors<'a>(types: impl IntoIterator<Item = &'a TensorType>) -> String {
    types.into_iter().map(tensor).collect::<Vec<_>>().join(", ")
}

/// `[1, 2]`
pub(super) fn list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    format!("[{}]", items.join(", "))
}

/// `array<i64: 1, 2>`
pub(super) fn array<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() { "array<i64>".to_string() } else { format!("array<i64: {}>", items.join(", ")) }
}

/// `dense<[[0, 1]]> : tensor<1x2xi64>`
pub(super) fn pairs<T: Display>(pairs: &[(T, T)]) -> String {
    let rows: Vec<String> = pairs.iter().map(|(low, high)| format!("[{low}, {high}]")).collect();
    let rows = if rows.is_empty() { String::new() } else { format!("[{}]", rows.join(", ")) };
    format!("dense<{rows}> : tensor<{}x2xi64>", pairs.len())
}

/// A string with MLIR's escapes.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => quoted.extend(['\\', char::from(byte)]),
            b' '..=b'~' => quoted.push(char::from(byte)),
            _ => quoted.push_str(&format!("\\{byte:02X}")),
        }
    }
    quoted.push('"');
    quoted
}

/// One element, so that reading it gives the same bits.
fn scalar(value: f64, dtype: DType) -> String {
    if dtype == DType::Bool {
        return if value != 0.0 { "true".into() } else { "false".into() };
    }
    if !dtype.is_float() {
        return dtype.to_integer(value).min(i128::from(u64::MAX)).to_string();
    }
    let value = dtype.round(value);
    if !value.is_finite() {
        return format!("0x{:0width$X}", dtype.to_bits(value), width = dtype.width() as usize / 4);
    }
    // The shortest digits that give this `f64` again, with the point that MLIR asks for.
    let digits = format!("{value:e}");
    if digits.contains('.') { digits } else { digits.replacen('e', ".0e", 1) }
}

/// The elements of a literal as nested lists.
fn nested(values: &[String], shape: &[u64]) -> String {
    match shape.split_first() {
        None => values.first().cloned().unwrap_or_default(),
        Some((&size, rest)) => {
            let row = rest.iter().product::<u64>() as usize;
            let rows: Vec<String> = (0..size as usize).map(|i| nested(&values[i * row..(i + 1) * row], rest)).collect();
            format!("[{}]", rows.join(", "))
        }
    }
}

/// `dense<1.5> : tensor<4xf32>`
pub(super) fn literal(literal: &Literal) -> String {
    let (ty, dtype) = (tensor(&literal.ty), literal.ty.dtype);
    let elements = match &literal.values {
        _ if literal.ty.elements() == 0 => String::new(),
        Values::Splat(value) => scalar(value.0, dtype),
        Values::Dense(values) => {
            let values: Vec<String> = values.iter().map(|value| scalar(value.0, dtype)).collect();
            nested(&values, &literal.ty.shape)
        }
    };
    format!("dense<{elements}> : {ty}")
}

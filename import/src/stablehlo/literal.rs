//! Converts types and literals of MLIR to those of the graph.
//!
//! The graph computes its constants in `f64`. A literal is first rounded to its own element type, so that
//! `dense<0.1> : tensor<bf16>` is the number that the traced program used.

use super::syntax::{Dense, Elements, Scalar, TensorType as SyntaxTensor, Type};
use altiplano_ir::dtype::DType;
use altiplano_ir::literal::Literal;
use altiplano_ir::types::TensorType;

/// The reason that a literal has no value in the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LiteralError {
    /// Complex numbers, and tensors of types that the graph does not have.
    Unsupported,
    /// The number of elements differs from that of the type.
    Count,
    /// An element that its type cannot hold.
    Element,
}

/// The graph's type, if there is one: a ranked tensor of known sizes and of a number type.
pub(super) fn tensor_type(ty: &Type) -> Option<TensorType> {
    let Type::Tensor(SyntaxTensor { dims, ranked: true, element, .. }) = ty else {
        return None;
    };
    let shape: Option<Vec<u64>> = dims.iter().copied().collect();
    typed(element, shape?)
}

/// The graph's type of a tensor of this shape. Complex numbers are pairs along a last dimension.
fn typed(element: &str, mut shape: Vec<u64>) -> Option<TensorType> {
    let part = complex_part(element);
    shape.extend(part.map(|_| 2));
    let ty = TensorType::new(part.or_else(|| dtype(element))?, shape);
    ty.check().then_some(ty)
}

/// [`tensor_type`] of a tensor with open sizes, which `size` gives.
pub(super) fn tensor_type_with(ty: &Type, size: impl Fn(usize) -> Option<u64>) -> Option<TensorType> {
    let Type::Tensor(SyntaxTensor { dims, ranked: true, element, .. }) = ty else {
        return None;
    };
    let shape: Option<Vec<u64>> = dims.iter().enumerate().map(|(d, known)| known.or_else(|| size(d))).collect();
    typed(element, shape?)
}

/// The type of each part of a complex number.
fn complex_part(element: &str) -> Option<DType> {
    dtype(element.strip_prefix("complex<")?.strip_suffix('>')?)
}

/// The element type of a tensor of any shape.
pub(super) fn element_type(ty: &Type) -> Option<DType> {
    match ty {
        Type::Tensor(SyntaxTensor { element, .. }) => complex_part(element).or_else(|| dtype(element)),
        _ => None,
    }
}

/// True if `ty` is the MLIR form of `known`. A size that is left open matches any.
pub(super) fn same_type(ty: &Type, known: &TensorType) -> bool {
    match ty {
        Type::Tensor(SyntaxTensor { dims, ranked: true, element, .. }) => {
            let part = complex_part(element);
            let pairs = part.map(|_| &Some(2));
            dims.len() + usize::from(part.is_some()) == known.rank()
                && dims.iter().chain(pairs).zip(&known.shape).all(|(dim, size)| dim.is_none_or(|dim| dim == *size))
                && part.or_else(|| dtype(element)) == Some(known.dtype)
        }
        _ => false,
    }
}

fn dtype(element: &str) -> Option<DType> {
    Some(match element {
        "f64" => DType::F64,
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        "f8E4M3FN" => DType::F8E4M3FN,
        "f8E5M2" => DType::F8E5M2,
        "f8E4M3" => DType::F8E4M3,
        "f8E3M4" => DType::F8E3M4,
        "f8E4M3FNUZ" => DType::F8E4M3FNUZ,
        "f8E5M2FNUZ" => DType::F8E5M2FNUZ,
        "f8E4M3B11FNUZ" => DType::F8E4M3B11FNUZ,
        "f8E8M0FNU" => DType::F8E8M0FNU,
        "i64" | "si64" => DType::I64,
        "i32" | "si32" => DType::I32,
        "i16" | "si16" => DType::I16,
        "i8" | "si8" => DType::I8,
        "i4" | "si4" => DType::I4,
        "i2" | "si2" => DType::I2,
        "ui64" => DType::U64,
        "ui32" => DType::U32,
        "ui16" => DType::U16,
        "ui8" => DType::U8,
        "ui4" => DType::U4,
        "ui2" => DType::U2,
        "i1" => DType::Bool,
        _ => return None,
    })
}

pub(super) fn literal(dense: &Dense) -> Result<Literal, LiteralError> {
    let ty = tensor_type(&dense.ty).ok_or(LiteralError::Unsupported)?;
    if let Type::Tensor(SyntaxTensor { dims, element, .. }) = &dense.ty
        && complex_part(element).is_some()
    {
        return pairs(ty, dims.iter().flatten().copied().collect(), &dense.elements);
    }
    match &dense.elements {
        Elements::Splat(scalar) => {
            let value = element(*scalar, ty.dtype)?;
            Ok(Literal::splat(ty, value))
        }
        Elements::List { shape, values } => {
            // `dense<>` may stand for an empty tensor of any rank.
            let empty = values.is_empty() && ty.elements() == 0;
            if !empty && *shape != ty.shape {
                return Err(LiteralError::Count);
            }
            let values: Result<Vec<f64>, LiteralError> = values.iter().map(|value| element(*value, ty.dtype)).collect();
            let values = values?;
            if u64::try_from(values.len()) != Ok(ty.elements()) {
                return Err(LiteralError::Count);
            }
            Ok(Literal::dense(ty, values))
        }
        Elements::Hex(digits) => hexadecimal(ty, digits),
    }
}

/// A literal of complex numbers whose own shape is `shape`.
fn pairs(ty: TensorType, shape: Vec<u64>, elements: &Elements) -> Result<Literal, LiteralError> {
    let parts = |scalar: &Scalar| match *scalar {
        Scalar::Complex(re, im) => Ok([ty.dtype.round(re), ty.dtype.round(im)]),
        _ => Err(LiteralError::Element),
    };
    let count = shape.iter().product::<u64>() as usize;
    let values = match elements {
        Elements::Splat(scalar) => {
            let [re, im] = parts(scalar)?;
            if re == im && re.is_sign_positive() == im.is_sign_positive() {
                return Ok(Literal::splat(ty, re));
            }
            // A splat pair is expanded, so the number of elements is limited.
            if count > 1 << 16 {
                return Err(LiteralError::Unsupported);
            }
            [re, im].repeat(count)
        }
        Elements::List { shape: listed, values } => {
            if *listed != shape || values.len() != count {
                return Err(LiteralError::Count);
            }
            values.iter().map(parts).collect::<Result<Vec<_>, _>>()?.concat()
        }
        // The bytes of the parts alternate: real, then imaginary.
        Elements::Hex(digits) => return hexadecimal(ty, digits),
    };
    Ok(Literal::dense(ty, values))
}

/// The value of one element after rounding to its type.
fn element(scalar: Scalar, dtype: DType) -> Result<f64, LiteralError> {
    match scalar {
        Scalar::Complex(..) => Err(LiteralError::Unsupported),
        Scalar::Bool(value) if dtype == DType::Bool => Ok(f64::from(u8::from(value))),
        Scalar::Float(value) if dtype.is_float() => Ok(dtype.round(value)),
        Scalar::Bits(bits) if dtype.is_float() => {
            if dtype.width() < 64 && bits >> dtype.width() != 0 {
                return Err(LiteralError::Element);
            }
            Ok(dtype.from_bits(bits))
        }
        Scalar::Int(value) if dtype.is_float() => Ok(dtype.round(value as f64)),
        Scalar::Bool(_) | Scalar::Float(_) => Err(LiteralError::Element),
        Scalar::Int(value) => integer(value, dtype),
        Scalar::Bits(value) => integer(i128::from(value), dtype),
    }
}

/// Checks that an integer fits the width of the type, signed or unsigned: `i8` takes -128 to 255.
fn integer(value: i128, dtype: DType) -> Result<f64, LiteralError> {
    if dtype == DType::Bool {
        return match value {
            -1..=1 => Ok(f64::from(u8::from(value != 0))),
            _ => Err(LiteralError::Element),
        };
    }
    let bits = dtype.width();
    if value < -(1i128 << (bits - 1)) || value >= 1i128 << bits {
        return Err(LiteralError::Element);
    }
    Ok(dtype.from_bits(value as u64))
}

/// Decodes an element from little-endian bytes. 64-bit integers beyond 2^53 lose their last digits, since the
/// graph computes in `f64`.
fn from_bytes(bytes: &[u8], dtype: DType) -> f64 {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    dtype.from_bits(u64::from_le_bytes(wide))
}

/// Decodes `dense<"0x...">`: the bytes of all elements, or of one that is repeated. Booleans are packed eight
/// to a byte, or take a byte each.
fn hexadecimal(ty: TensorType, digits: &str) -> Result<Literal, LiteralError> {
    let nibble = |byte: u8| char::from(byte).to_digit(16).unwrap_or(0) as u8;
    let bytes: Vec<u8> = digits.as_bytes().chunks(2).map(|pair| nibble(pair[0]) * 16 + nibble(pair[1])).collect();
    let count = usize::try_from(ty.elements()).map_err(|_| LiteralError::Count)?;
    let size = ty.dtype.bytes() as usize;
    let packed = ty.dtype == DType::Bool && bytes.len() == count.div_ceil(8) && count > 1;
    if packed {
        let bit = |index: usize| f64::from(bytes[index / 8] >> (index % 8) & 1);
        return Ok(Literal::dense(ty, (0..count).map(bit).collect()));
    }
    if bytes.len() == size {
        let value = from_bytes(&bytes, ty.dtype);
        return Ok(Literal::splat(ty, value));
    }
    if count.checked_mul(size) != Some(bytes.len()) {
        return Err(LiteralError::Count);
    }
    let values = bytes.chunks(size).map(|element| from_bytes(element, ty.dtype)).collect();
    Ok(Literal::dense(ty, values))
}

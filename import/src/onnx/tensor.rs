//! The tensors of a file: their types, and their elements if these are inside the file.

use super::proto;
use altiplano_ir::dtype::DType;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;

/// An error in a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    #[error("element type {0} is not supported")]
    ElementType(i32),
    #[error("the size {0} is no size of a dimension")]
    Size(i64),
    #[error("shape {0:?} is larger than any tensor can be")]
    TooLarge(Vec<u64>),
    #[error("it has {found} elements or bytes, but its shape takes {expected}")]
    Length { expected: u64, found: u64 },
    #[error("its data is in another file")]
    External,
    #[error(
        "its data is said to be in '{0}'; only files in the model's own folder are read, by a path without `..`, drive or leading slash"
    )]
    Location(String),
    #[error("the offset or length of its data in another file is no number")]
    Place,
}

/// The position of a tensor's data in another file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct External {
    /// The path relative to the model's folder.
    pub location: String,
    pub offset: u64,
    /// The number of bytes. If absent, the data extends to the end of the file.
    pub length: Option<u64>,
}

/// The element type with this number in `TensorProto.DataType`.
pub(crate) fn dtype_of(number: i32) -> Result<DType, TensorError> {
    Ok(match number {
        1 => DType::F32,
        2 => DType::U8,
        3 => DType::I8,
        4 => DType::U16,
        5 => DType::I16,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        12 => DType::U32,
        13 => DType::U64,
        16 => DType::BF16,
        17 => DType::F8E4M3FN,
        18 => DType::F8E4M3FNUZ,
        19 => DType::F8E5M2,
        20 => DType::F8E5M2FNUZ,
        21 => DType::U4,
        22 => DType::I4,
        24 => DType::F8E8M0FNU,
        25 => DType::U2,
        26 => DType::I2,
        _ => return Err(TensorError::ElementType(number)),
    })
}

/// The type of a tensor. Its data may be missing.
pub(crate) fn type_of(tensor: &proto::Tensor) -> Result<TensorType, TensorError> {
    let size = |&d: &i64| u64::try_from(d).map_err(|_| TensorError::Size(d));
    let shape = tensor.dims.iter().map(size).collect::<Result<Vec<u64>, _>>()?;
    let ty = TensorType::new(dtype_of(tensor.data_type)?, shape);
    if ty.check() { Ok(ty) } else { Err(TensorError::TooLarge(ty.shape)) }
}

/// Returns true if the elements are in the file itself. Stripped files have neither data nor its position.
pub(crate) fn has_data(tensor: &proto::Tensor) -> bool {
    let elements = [
        tensor.raw_data.len(),
        tensor.float_data.len(),
        tensor.int32_data.len(),
        tensor.int64_data.len(),
        tensor.double_data.len(),
        tensor.uint64_data.len(),
    ];
    tensor.data_location == 0 && (tensor.dims.contains(&0) || elements.iter().any(|&n| n > 0))
}

/// The tensor with its elements.
pub(crate) fn elements_of(tensor: &proto::Tensor) -> Result<Tensor, TensorError> {
    let ty = type_of(tensor)?;
    if tensor.data_location != 0 {
        return Err(TensorError::External);
    }
    if !tensor.raw_data.is_empty() {
        return from_raw(ty, &tensor.raw_data);
    }
    let data: Vec<f64> = match ty.dtype {
        DType::F32 => tensor.float_data.iter().map(|&x| f64::from(x)).collect(),
        DType::F64 => tensor.double_data.clone(),
        DType::I64 => tensor.int64_data.iter().map(|&x| x as f64).collect(),
        DType::U32 | DType::U64 => tensor.uint64_data.iter().map(|&x| x as f64).collect(),
        // Elements narrower than a byte are packed, as in raw data.
        dtype if dtype.width() < 8 && dtype != DType::Bool => {
            let bytes: Vec<u8> = tensor.int32_data.iter().map(|&x| x as u8).collect();
            return from_raw(ty, &bytes);
        }
        dtype if dtype.is_float() => tensor.int32_data.iter().map(|&x| dtype.from_bits(x as u32 as u64)).collect(),
        dtype => tensor.int32_data.iter().map(|&x| dtype.wrap(f64::from(x))).collect(),
    };
    if data.len() as u64 != ty.elements() {
        return Err(TensorError::Length { expected: ty.elements(), found: data.len() as u64 });
    }
    Ok(Tensor::new(ty, data))
}

/// The number of elements in one byte.
fn packed(dtype: DType) -> u64 {
    if dtype == DType::Bool { 1 } else { u64::from(8 / dtype.width()).max(1) }
}

/// Checks that the number of bytes matches a tensor of this type.
pub(crate) fn check_raw(ty: &TensorType, bytes: &[u8]) -> Result<(), TensorError> {
    let expected = ty.elements().div_ceil(packed(ty.dtype)).saturating_mul(ty.dtype.bytes());
    let found = bytes.len() as u64;
    if found == expected { Ok(()) } else { Err(TensorError::Length { expected, found }) }
}

/// Decodes elements from little-endian bytes. Those narrower than a byte are packed, the first one in the lowest bits.
pub(crate) fn from_raw(ty: TensorType, bytes: &[u8]) -> Result<Tensor, TensorError> {
    let dtype = ty.dtype;
    check_raw(&ty, bytes)?;
    let packed = packed(dtype);
    let data: Vec<f64> = if packed > 1 {
        let parts = bytes.iter().flat_map(|b| (0..packed).map(move |i| u64::from(*b) >> (i * 8 / packed)));
        parts.map(|bits| dtype.from_bits(bits)).take(ty.elements() as usize).collect()
    } else {
        let width = dtype.bytes() as usize;
        let bits = |chunk: &[u8]| chunk.iter().rev().fold(0u64, |bits, &b| bits << 8 | u64::from(b));
        bytes.chunks_exact(width).map(|chunk| dtype.from_bits(bits(chunk))).collect()
    };
    Ok(Tensor::new(ty, data))
}

/// The position of a tensor's data, if it is in another file. Paths out of the model's folder are refused.
pub(crate) fn external_of(tensor: &proto::Tensor) -> Result<Option<External>, TensorError> {
    if tensor.data_location == 0 {
        return Ok(None);
    }
    let entry = |key: &str| tensor.external_data.iter().find(|p| p.key == key).map(|p| p.value.as_str());
    let number = |text: &str| text.trim().parse::<u64>().map_err(|_| TensorError::Place);
    let location = entry("location").unwrap_or_default().to_string();
    let path = std::path::Path::new(&location);
    let plain = |c: std::path::Component| matches!(c, std::path::Component::Normal(_) | std::path::Component::CurDir);
    // Files move between systems, so also refuse paths that leave the folder on another system.
    let foreign = location.contains(['\\', ':', '\0']);
    if location.is_empty() || foreign || !path.components().all(plain) {
        return Err(TensorError::Location(location));
    }
    let offset = entry("offset").map_or(Ok(0), number)?;
    let length = entry("length").map(number).transpose()?;
    Ok(Some(External { location, offset, length }))
}

//! Tensors of the host as the bytes that PJRT takes and gives: row major, little endian, a byte for each boolean.

use crate::element::Class;
use crate::host::{HostData, HostTensor};
use altiplano_ir::types::TensorType;
use altiplano_xla::pjrt::{from_bytes, to_bytes};
use std::borrow::Cow;

/// The bytes of a tensor. Most types are stored on the host as they are on devices.
pub(super) fn encode(tensor: &HostTensor) -> Cow<'_, [u8]> {
    let dtype = tensor.ty.dtype;
    let (width, stored) = (dtype.bytes() as usize, tensor.data.class().bytes());
    let bytes = tensor.data.as_bytes();
    if width == stored {
        return Cow::Borrowed(bytes);
    }
    if dtype.is_float() {
        return Cow::Owned(to_bytes(&tensor.to_reference()));
    }
    // A narrow integer is the low part of the stored one.
    Cow::Owned(bytes.chunks_exact(stored).flat_map(|element| &element[..width]).copied().collect())
}

/// The tensor of these bytes.
pub(super) fn decode(ty: &TensorType, bytes: &[u8]) -> HostTensor {
    let class = Class::of(ty.dtype);
    let (width, stored) = (ty.dtype.bytes() as usize, class.bytes());
    if width != stored && ty.dtype.is_float() {
        return HostTensor::from_reference(&from_bytes(ty, bytes));
    }
    if width == stored {
        return HostTensor { ty: ty.clone(), data: HostData::from_bytes(class, bytes) };
    }
    let mut wide = Vec::with_capacity(bytes.len() / width * stored);
    for element in bytes.chunks_exact(width) {
        let negative = ty.dtype.is_signed_integer() && element[width - 1] & 0x80 != 0;
        wide.extend_from_slice(element);
        wide.resize(wide.len() + stored - width, if negative { 0xff } else { 0 });
    }
    HostTensor { ty: ty.clone(), data: HostData::from_bytes(class, &wide) }
}

/// The words of these bytes, which may start anywhere.
pub(super) fn read<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;

    #[test]
    fn tensors_come_back_as_they_were_sent() {
        let check = |dtype: DType, values: &[f64], width: usize| {
            let tensor = HostTensor::from_f64(TensorType::new(dtype, [values.len() as u64]), values);
            let bytes = encode(&tensor);
            assert_eq!(bytes.len(), width * values.len(), "{dtype}");
            assert_eq!(bytes, to_bytes(&tensor.to_reference()), "{dtype}");
            assert_eq!(decode(&tensor.ty, &bytes), tensor, "{dtype}");
        };
        for (dtype, width) in [(DType::F64, 8), (DType::F32, 4), (DType::F16, 2), (DType::BF16, 2), (DType::F8E5M2, 1)]
        {
            check(dtype, &[0.0, 1.0, -3.0, 96.0, f64::NEG_INFINITY], width);
        }
        for (dtype, width) in [(DType::I64, 8), (DType::I32, 4), (DType::I16, 2), (DType::I8, 1)] {
            check(dtype, &[0.0, 1.0, -3.0, 96.0, -128.0], width);
        }
        for (dtype, width) in [(DType::U64, 8), (DType::U32, 4), (DType::U16, 2), (DType::U8, 1), (DType::Bool, 1)] {
            let top = if dtype == DType::Bool { 1.0 } else { 200.0 };
            check(dtype, &[0.0, 1.0, top], width);
        }
    }
}

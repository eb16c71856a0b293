//! Tensors outside any device: those loaded into a session and those read back from it.

use crate::element::{Class, Element, integer_from_f64, integer_to_f64, is_narrower_than_stored};
use crate::error::RuntimeError;
use crate::layout::Selection;
use altiplano_ir::dtype::DType;
use altiplano_ir::padding::Extents;
use altiplano_ir::program::Buffer;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use half::{bf16, f16};
use std::borrow::Cow;

/// Elements in row-major order, in the storage format of their type (see [`Class`]).
#[derive(Clone, Debug, PartialEq)]
pub enum HostData {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    Bool(Vec<u8>),
}

/// A whole tensor in host memory.
///
/// **Invariant** (checked by [`HostTensor::new`]): `data` has the format and the number of elements of `ty`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    pub ty: TensorType,
    pub data: HostData,
}

impl HostData {
    pub fn class(&self) -> Class {
        match self {
            HostData::F32(_) => Class::F32,
            HostData::F16(_) => Class::F16,
            HostData::BF16(_) => Class::BF16,
            HostData::I32(_) => Class::I32,
            HostData::I64(_) => Class::I64,
            HostData::Bool(_) => Class::Bool,
        }
    }

    pub fn len(&self) -> usize {
        match self {
            HostData::F32(v) => v.len(),
            HostData::F16(v) => v.len(),
            HostData::BF16(v) => v.len(),
            HostData::I32(v) => v.len(),
            HostData::I64(v) => v.len(),
            HostData::Bool(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as raw bytes in native order.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            HostData::F32(v) => bytemuck::cast_slice(v),
            HostData::F16(v) => bytemuck::cast_slice(v),
            HostData::BF16(v) => bytemuck::cast_slice(v),
            HostData::I32(v) => bytemuck::cast_slice(v),
            HostData::I64(v) => bytemuck::cast_slice(v),
            HostData::Bool(v) => v,
        }
    }

    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            HostData::F32(v) => bytemuck::cast_slice_mut(v),
            HostData::F16(v) => bytemuck::cast_slice_mut(v),
            HostData::BF16(v) => bytemuck::cast_slice_mut(v),
            HostData::I32(v) => bytemuck::cast_slice_mut(v),
            HostData::I64(v) => bytemuck::cast_slice_mut(v),
            HostData::Bool(v) => v,
        }
    }

    /// Decodes raw bytes in native order; an incomplete last element is dropped.
    pub fn from_bytes(class: Class, bytes: &[u8]) -> HostData {
        fn read<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
            bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
        }
        match class {
            Class::F32 => HostData::F32(read(bytes)),
            Class::F16 => HostData::F16(read(bytes)),
            Class::BF16 => HostData::BF16(read(bytes)),
            Class::I32 => HostData::I32(read(bytes)),
            Class::I64 => HostData::I64(read(bytes)),
            Class::Bool => HostData::Bool(read(bytes)),
        }
    }
}

impl HostTensor {
    pub fn new(ty: TensorType, data: HostData) -> Result<HostTensor, RuntimeError> {
        let tensor = HostTensor { ty, data };
        tensor.check()?;
        Ok(tensor)
    }

    /// Checks this type's invariant, which callers can break because the fields are public.
    pub fn check(&self) -> Result<(), RuntimeError> {
        let (expected, found) = (self.ty.elements(), self.data.len() as u64);
        if expected != found || self.data.class() != Class::of(self.ty.dtype) {
            return Err(RuntimeError::ValueCount { ty: self.ty.clone(), expected, found });
        }
        Ok(())
    }

    pub fn f32(shape: impl Into<Vec<u64>>, data: Vec<f32>) -> Result<HostTensor, RuntimeError> {
        HostTensor::new(TensorType::new(DType::F32, shape), HostData::F32(data))
    }

    pub fn i32(shape: impl Into<Vec<u64>>, data: Vec<i32>) -> Result<HostTensor, RuntimeError> {
        HostTensor::new(TensorType::new(DType::I32, shape), HostData::I32(data))
    }

    /// Rounds a tensor of the reference semantics to its type.
    pub fn from_reference(tensor: &Tensor) -> HostTensor {
        HostTensor::from_f64(tensor.ty.clone(), &tensor.data)
    }

    /// A tensor of `data`, rounded to the element type of `ty`.
    pub fn from_f64(ty: TensorType, data: &[f64]) -> HostTensor {
        let float = |x: &f64| if is_narrower_than_stored(ty.dtype) { ty.dtype.round(*x) as f32 } else { *x as f32 };
        let integer = |x: &f64| integer_from_f64(*x, ty.dtype);
        let data = match Class::of(ty.dtype) {
            Class::F32 => HostData::F32(data.iter().map(float).collect()),
            Class::F16 => HostData::F16(data.iter().map(|x| f16::from_f32(float(x))).collect()),
            Class::BF16 => HostData::BF16(data.iter().map(|x| bf16::from_f32(float(x))).collect()),
            Class::I32 => HostData::I32(data.iter().map(|x| integer(x) as i32).collect()),
            Class::I64 => HostData::I64(data.iter().map(integer).collect()),
            Class::Bool => HostData::Bool(data.iter().map(|x| (*x != 0.0) as u8).collect()),
        };
        HostTensor { ty, data }
    }

    pub fn to_f64(&self) -> Vec<f64> {
        let dtype = self.ty.dtype;
        match &self.data {
            HostData::F32(v) => v.iter().map(|&x| x as f64).collect(),
            HostData::F16(v) => v.iter().map(|x| x.to_f64()).collect(),
            HostData::BF16(v) => v.iter().map(|x| x.to_f64()).collect(),
            HostData::I32(v) => v.iter().map(|&x| x as f64).collect(),
            HostData::I64(v) => v.iter().map(|&x| integer_to_f64(x, dtype)).collect(),
            HostData::Bool(v) => v.iter().map(|&x| (x != 0) as u8 as f64).collect(),
        }
    }

    pub fn to_reference(&self) -> Tensor {
        Tensor { ty: self.ty.clone(), data: self.to_f64() }
    }

    /// The elements at the cross product of index lists, one list per dimension, in row-major order.
    pub fn at(&self, indices: &[Vec<u64>]) -> HostTensor {
        fn read<T: bytemuck::Pod>(selection: &Selection, from: &[T]) -> Vec<T> {
            let mut to = vec![T::zeroed(); selection.elements()];
            selection.read(from, &mut to);
            to
        }
        let shape: Vec<usize> = self.ty.shape.iter().map(|&d| d as usize).collect();
        let selection = Selection::new(&shape, indices);
        let data = match &self.data {
            HostData::F32(v) => HostData::F32(read(&selection, v)),
            HostData::F16(v) => HostData::F16(read(&selection, v)),
            HostData::BF16(v) => HostData::BF16(read(&selection, v)),
            HostData::I32(v) => HostData::I32(read(&selection, v)),
            HostData::I64(v) => HostData::I64(read(&selection, v)),
            HostData::Bool(v) => HostData::Bool(read(&selection, v)),
        };
        let shape: Vec<u64> = indices.iter().map(|list| list.len() as u64).collect();
        HostTensor { ty: self.ty.with_shape(shape), data }
    }

    /// The same values in another element type, rounded or wrapped to it.
    pub fn cast(&self, dtype: DType) -> HostTensor {
        if dtype == self.ty.dtype {
            return self.clone();
        }
        if let (HostData::F32(v), Class::F16) = (&self.data, Class::of(dtype)) {
            let data = v.iter().map(|&x| <f16 as Element>::from_f32(x)).collect();
            return HostTensor { ty: self.ty.with_dtype(dtype), data: HostData::F16(data) };
        }
        HostTensor::from_f64(self.ty.with_dtype(dtype), &self.to_f64())
    }

    /// Pads the tensor with zeros to the size of a buffer, if the buffer is padded.
    pub(crate) fn as_in<'a>(&'a self, buffer: &Buffer) -> Cow<'a, HostTensor> {
        match &buffer.extents {
            Some(extents) if extents.shape() == self.ty.shape => {
                let mut larger = HostTensor::zeros(self.ty.with_shape(extents.padded_shape()));
                move_runs(extents, &self.data, &mut larger.data, false);
                Cow::Owned(larger)
            }
            _ => Cow::Borrowed(self),
        }
    }

    /// Removes a buffer's padding from the tensor.
    pub fn out_of(self, buffer: &Buffer) -> HostTensor {
        let Some(extents) = &buffer.extents else { return self };
        let mut own = HostTensor::zeros(self.ty.with_shape(extents.shape()));
        move_runs(extents, &self.data, &mut own.data, true);
        own
    }

    /// A tensor of zeros.
    pub fn zeros(ty: TensorType) -> HostTensor {
        let n = ty.elements() as usize;
        let data = match Class::of(ty.dtype) {
            Class::F32 => HostData::F32(vec![0.0; n]),
            Class::F16 => HostData::F16(vec![f16::ZERO; n]),
            Class::BF16 => HostData::BF16(vec![bf16::ZERO; n]),
            Class::I32 => HostData::I32(vec![0; n]),
            Class::I64 => HostData::I64(vec![0; n]),
            Class::Bool => HostData::Bool(vec![0; n]),
        };
        HostTensor { ty, data }
    }
}

/// Copies elements between a tensor and its padded form: out of the padded form, or into it.
fn move_runs(extents: &Extents, from: &HostData, to: &mut HostData, out: bool) {
    fn typed<T: Copy>(extents: &Extents, from: &[T], to: &mut [T], out: bool) {
        let mut own = 0;
        for (at, count) in extents.runs() {
            let (at, count) = (at as usize, count as usize);
            let (source, target) = if out { (at, own) } else { (own, at) };
            to[target..target + count].copy_from_slice(&from[source..source + count]);
            own += count;
        }
    }
    match (from, to) {
        (HostData::F32(from), HostData::F32(to)) => typed(extents, from, to, out),
        (HostData::F16(from), HostData::F16(to)) => typed(extents, from, to, out),
        (HostData::BF16(from), HostData::BF16(to)) => typed(extents, from, to, out),
        (HostData::I32(from), HostData::I32(to)) => typed(extents, from, to, out),
        (HostData::I64(from), HostData::I64(to)) => typed(extents, from, to, out),
        (HostData::Bool(from), HostData::Bool(to)) => typed(extents, from, to, out),
        _ => {}
    }
}

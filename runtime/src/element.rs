//! Storage formats of element types. The types of the IR share six formats: `f64` is kept as `f32` (the runtime trains
//! in at most single precision), eight-bit floats as `bf16`, which holds each of their numbers exactly, narrow integers
//! as `i32`, wide and unsigned ones as `i64`.

use altiplano_ir::dtype::DType;
use bytemuck::Pod;
use half::{bf16, f16};

pub use altiplano_ir::storage::Class;

/// An element format, with conversions to and from the two formats that kernels compute in.
pub(crate) trait Element: Pod + Send + Sync + PartialEq {
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
    fn to_i64(self) -> i64;
    fn from_i64(x: i64) -> Self;
}

macro_rules! number {
    ($t:ty) => {
        impl Element for $t {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self as f32
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                x as $t
            }
            #[inline(always)]
            fn to_i64(self) -> i64 {
                self as i64
            }
            #[inline(always)]
            fn from_i64(x: i64) -> Self {
                x as $t
            }
        }
    };
}
number!(f32);
number!(i32);
number!(i64);
number!(u8);

macro_rules! half_number {
    ($t:ty) => {
        impl Element for $t {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                <$t>::to_f32(self)
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                <$t>::from_f32(x)
            }
            #[inline(always)]
            fn to_i64(self) -> i64 {
                <$t>::to_f32(self) as i64
            }
            #[inline(always)]
            fn from_i64(x: i64) -> Self {
                <$t>::from_f32(x as f32)
            }
        }
    };
}
half_number!(f16);
half_number!(bf16);

/// Runs `$body` with `$t` as the Rust type of a [`Class`].
macro_rules! with_class {
    ($class:expr, $t:ident => $body:expr) => {
        match $class {
            $crate::element::Class::F32 => {
                type $t = f32;
                $body
            }
            $crate::element::Class::F16 => {
                type $t = half::f16;
                $body
            }
            $crate::element::Class::BF16 => {
                type $t = half::bf16;
                $body
            }
            $crate::element::Class::I32 => {
                type $t = i32;
                $body
            }
            $crate::element::Class::I64 => {
                type $t = i64;
                $body
            }
            $crate::element::Class::Bool => {
                type $t = u8;
                $body
            }
        }
    };
}

/// Runs `$body` with `$t` as an unsigned integer as wide as a [`Class`], for kernels that only move data.
macro_rules! with_width {
    ($class:expr, $t:ident => $body:expr) => {
        match $class.bytes() {
            8 => {
                type $t = u64;
                $body
            }
            4 => {
                type $t = u32;
                $body
            }
            2 => {
                type $t = u16;
                $body
            }
            _ => {
                type $t = u8;
                $body
            }
        }
    };
}
pub(crate) use {with_class, with_width};

/// Wraps an integer into the range of `dtype`, as two's complement hardware does. 64-bit types keep all bits.
#[inline(always)]
pub(crate) fn wrap(x: i64, dtype: DType) -> i64 {
    match dtype {
        DType::I32 => x as i32 as i64,
        DType::I16 => x as i16 as i64,
        DType::I8 => x as i8 as i64,
        DType::I4 => x << 60 >> 60,
        DType::I2 => x << 62 >> 62,
        DType::U32 => x as u32 as i64,
        DType::U16 => x as u16 as i64,
        DType::U8 => x as u8 as i64,
        DType::U4 => x & 15,
        DType::U2 => x & 3,
        DType::Bool => (x != 0) as i64,
        _ => x,
    }
}

/// Converts a value of the reference semantics to a stored integer of `dtype`; `u64` keeps its bits. The greatest `u64`
/// rounds to 2^64 in an `f64`, one too many, so positive numbers saturate there instead of wrapping.
pub(crate) fn integer_from_f64(x: f64, dtype: DType) -> i64 {
    match dtype {
        DType::U64 if x > 0.0 => x as u64 as i64,
        DType::U64 => x as i128 as u64 as i64,
        _ => wrap(x as i64, dtype),
    }
}

/// Returns whether the storage format holds numbers that the type lacks, so that results must be rounded or wrapped.
pub(crate) fn is_narrower_than_stored(dtype: DType) -> bool {
    dtype == DType::Bool || dtype.width() < 8 * Class::of(dtype).bytes() as u32
}

/// Rounds to the numbers of a type of at most 32 bits.
#[inline(always)]
pub(crate) fn round_float(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F64 | DType::F32 => x,
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
        _ => dtype.round(f64::from(x)) as f32,
    }
}

/// The inverse of [`integer_from_f64`].
pub(crate) fn integer_to_f64(x: i64, dtype: DType) -> f64 {
    if dtype == DType::U64 { x as u64 as f64 } else { x as f64 }
}

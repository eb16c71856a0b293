//! Element types. Sizes are those in memory. Arithmetic rules are with the ops.

use crate::float::{FloatFormat, Specials};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a tensor, written as in StableHLO (`f32`, `i32`, but `i1` is `bool` here).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3FN,
    F8E5M2,
    F8E4M3,
    F8E3M4,
    F8E4M3FNUZ,
    F8E5M2FNUZ,
    F8E4M3B11FNUZ,
    F8E8M0FNU,
    I64,
    I32,
    I16,
    I8,
    I4,
    I2,
    U64,
    U32,
    U16,
    U8,
    U4,
    U2,
    Bool,
}

impl DType {
    /// All element types, widest first within each kind.
    pub const ALL: [DType; 25] = [
        DType::F64,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F8E4M3FN,
        DType::F8E5M2,
        DType::F8E4M3,
        DType::F8E3M4,
        DType::F8E4M3FNUZ,
        DType::F8E5M2FNUZ,
        DType::F8E4M3B11FNUZ,
        DType::F8E8M0FNU,
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::I4,
        DType::I2,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
        DType::U4,
        DType::U2,
        DType::Bool,
    ];

    /// The bytes of one element in memory. Types narrower than a byte take one, because tensors are not packed.
    pub fn bytes(self) -> u64 {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            _ => 1,
        }
    }

    /// The bits of one element, as programs count them when they inspect an integer's bits or cast bits.
    pub fn width(self) -> u32 {
        match self {
            DType::I4 | DType::U4 => 4,
            DType::I2 | DType::U2 => 2,
            _ => 8 * self.bytes() as u32,
        }
    }

    /// The format of a float type.
    pub fn float_format(self) -> Option<FloatFormat> {
        Some(match self {
            DType::F64 => FloatFormat::ieee(11, 52),
            DType::F32 => FloatFormat::ieee(8, 23),
            DType::F16 => FloatFormat::ieee(5, 10),
            DType::BF16 => FloatFormat::ieee(8, 7),
            DType::F8E5M2 => FloatFormat::ieee(5, 2),
            DType::F8E4M3 => FloatFormat::ieee(4, 3),
            DType::F8E3M4 => FloatFormat::ieee(3, 4),
            DType::F8E4M3FN => FloatFormat { specials: Specials::Finite, ..FloatFormat::ieee(4, 3) },
            DType::F8E4M3FNUZ => FloatFormat { bias: 8, specials: Specials::UnsignedZero, ..FloatFormat::ieee(4, 3) },
            DType::F8E5M2FNUZ => FloatFormat { bias: 16, specials: Specials::UnsignedZero, ..FloatFormat::ieee(5, 2) },
            DType::F8E4M3B11FNUZ => {
                FloatFormat { bias: 11, specials: Specials::UnsignedZero, ..FloatFormat::ieee(4, 3) }
            }
            DType::F8E8M0FNU => FloatFormat { specials: Specials::Scale, ..FloatFormat::ieee(8, 0) },
            _ => return None,
        })
    }

    pub fn is_float(self) -> bool {
        self.float_format().is_some()
    }

    /// Returns true for floats of at most 16 bits, for which training keeps f32 master weights and state.
    pub fn is_half(self) -> bool {
        self.is_float() && self.bytes() <= 2
    }

    /// Returns true for floats of 8 bits. Products of such floats give [`DType::PRODUCT_OF_8_BITS`].
    pub fn is_eight_bit_float(self) -> bool {
        self.is_float() && self.bytes() == 1
    }

    /// The type in which products of 8-bit floats are given: no hardware sums them in 8 bits.
    pub const PRODUCT_OF_8_BITS: DType = DType::BF16;

    /// The type of the cotangents of values of this type: their own, but that of products for floats of 8 bits. Gradients
    /// are sums, for which 8 bits are too few.
    pub fn cotangent(self) -> DType {
        if self.is_eight_bit_float() { DType::PRODUCT_OF_8_BITS } else { self }
    }

    pub fn is_signed_integer(self) -> bool {
        matches!(self, DType::I64 | DType::I32 | DType::I16 | DType::I8 | DType::I4 | DType::I2)
    }

    pub fn is_unsigned_integer(self) -> bool {
        matches!(self, DType::U64 | DType::U32 | DType::U16 | DType::U8 | DType::U4 | DType::U2)
    }

    pub fn is_integer(self) -> bool {
        self.is_signed_integer() || self.is_unsigned_integer()
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F8E4M3FN => "f8e4m3fn",
            DType::F8E5M2 => "f8e5m2",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E3M4 => "f8e3m4",
            DType::F8E4M3FNUZ => "f8e4m3fnuz",
            DType::F8E5M2FNUZ => "f8e5m2fnuz",
            DType::F8E4M3B11FNUZ => "f8e4m3b11fnuz",
            DType::F8E8M0FNU => "f8e8m0fnu",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I16 => "i16",
            DType::I8 => "i8",
            DType::I4 => "i4",
            DType::I2 => "i2",
            DType::U64 => "u64",
            DType::U32 => "u32",
            DType::U16 => "u16",
            DType::U8 => "u8",
            DType::U4 => "u4",
            DType::U2 => "u2",
            DType::Bool => "bool",
        }
    }

    /// Parses a name. The inverse of [`DType::name`].
    pub(crate) fn parse(text: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == text)
    }

    /// Wraps an exact integer value to this type's range, as two's complement hardware does. Floats pass unchanged,
    /// because the reference semantics are those of real numbers in f64.
    pub fn wrap(self, value: f64) -> f64 {
        match self {
            DType::I64 => value as i64 as f64,
            // The greatest `u64` is 2^64 in an `f64`, which is one too many. So positive numbers saturate there instead
            // of wrapping.
            DType::U64 if value > 0.0 => value as u64 as f64,
            DType::U64 => value as i128 as u64 as f64,
            DType::Bool => (value != 0.0) as u8 as f64,
            _ if self.is_float() => value,
            _ => self.from_bits(value as i64 as u64),
        }
    }

    /// The integer that an element of an integer type represents. The greatest `u64` is 2^64 in an `f64`, which is one
    /// too many.
    pub fn to_integer(self, value: f64) -> i128 {
        if self == DType::U64 { i128::from(value as u64) } else { i128::from(value as i64) }
    }

    /// The integer of this type with the lowest bits of `value`, as in two's complement arithmetic of full width.
    pub(crate) fn narrow_integer(self, value: i128) -> i128 {
        let unused = 128 - self.width();
        if self.is_signed_integer() { value << unused >> unused } else { ((value as u128) << unused >> unused) as i128 }
    }

    /// [`DType::narrow_integer`] as an element, which is exact up to 2^53.
    pub(crate) fn wrap_integer(self, value: i128) -> f64 {
        self.narrow_integer(value) as f64
    }

    /// Converts `value` to this type: floats are rounded, integers wrap.
    pub fn round(self, value: f64) -> f64 {
        self.float_format().map_or_else(|| self.wrap(value), |format| format.round(value))
    }

    /// The bits of an element, in the lowest [`DType::width`] bits.
    pub fn to_bits(self, value: f64) -> u64 {
        match self.float_format() {
            Some(format) => format.to_bits(value),
            // 2^64 - 1 is 2^64 in an `f64`, which is one too many.
            None if self == DType::U64 => value as u64,
            None => value as i64 as u64 & (u64::MAX >> (64 - self.width())),
        }
    }

    /// The element with these bits. Bits above [`DType::width`] are ignored.
    pub fn from_bits(self, bits: u64) -> f64 {
        let unused = 64 - self.width();
        match self.float_format() {
            Some(format) => format.from_bits(bits),
            None if self == DType::Bool => (bits as u8 != 0) as u8 as f64,
            None if self.is_signed_integer() => ((bits << unused) as i64 >> unused) as f64,
            None => (bits << unused >> unused) as f64,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

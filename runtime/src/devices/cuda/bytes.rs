//! Converts elements to and from the bytes that a GPU stores, and reduces such bytes on the host.

use altiplano_ir::dtype::DType;
use altiplano_ir::op::Reducer;

/// Encodes elements in the type's own format.
pub(crate) fn encode(dtype: DType, values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    let width = dtype.bytes() as usize;
    let element = |value: f64| dtype.to_bits(dtype.round(value)).to_le_bytes().into_iter().take(width);
    values.into_iter().flat_map(element).collect()
}

/// Decodes elements from the type's own format.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(dtype.bytes() as usize).map(|chunk| element(dtype, chunk)).collect()
}

/// Reduces the elements of several members, in their order.
pub(crate) fn reduced(dtype: DType, reducer: Reducer, members: &[&[u8]]) -> Vec<u8> {
    let size = dtype.bytes() as usize;
    let length = members.first().map_or(0, |first| first.len());
    let mut result = Vec::with_capacity(length);
    for at in (0..length).step_by(size) {
        let elements = members.iter().map(|member| &member[at..at + size]);
        if dtype.is_float() {
            let values = elements.map(|bytes| element(dtype, bytes));
            let value = values.reduce(|a, b| match reducer {
                Reducer::Sum => a + b,
                Reducer::Product => a * b,
                // A NaN is propagated, as everywhere else.
                Reducer::Max if a.is_nan() || b.is_nan() => f64::NAN,
                Reducer::Min if a.is_nan() || b.is_nan() => f64::NAN,
                Reducer::Max => a.max(b),
                Reducer::Min => a.min(b),
                Reducer::And | Reducer::Or => f64::NAN,
            });
            result.extend(encode(dtype, value));
            continue;
        }
        let logical = dtype == DType::Bool;
        let value = elements.map(|element| integer(dtype, element)).reduce(|a, b| match reducer {
            Reducer::Sum if logical => a | b,
            Reducer::Product if logical => a & b,
            Reducer::Sum => a.wrapping_add(b),
            Reducer::Product => a.wrapping_mul(b),
            Reducer::Max => a.max(b),
            Reducer::Min => a.min(b),
            Reducer::And => a & b,
            Reducer::Or => a | b,
        });
        result.extend(value.iter().flat_map(|value| value.to_le_bytes().into_iter().take(size)));
    }
    result
}

fn element(dtype: DType, bytes: &[u8]) -> f64 {
    let mut bits = [0; 8];
    bits[..bytes.len()].copy_from_slice(bytes);
    dtype.from_bits(u64::from_le_bytes(bits))
}

/// An integer of up to eight bytes, sign-extended.
fn integer(dtype: DType, bytes: &[u8]) -> i128 {
    let negative = dtype.is_signed_integer() && bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let mut all = if negative { [0xff; 16] } else { [0; 16] };
    all[..bytes.len()].copy_from_slice(bytes);
    i128::from_le_bytes(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let check = |dtype: DType, values: &[f64]| {
            let bytes = encode(dtype, values.iter().copied());
            assert_eq!(bytes.len() as u64, dtype.bytes() * values.len() as u64, "{dtype}");
            assert_eq!(decode(dtype, &bytes), values, "{dtype}");
        };
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::I16, DType::I8] {
            check(dtype, &[0.0, 1.0, -3.0, 96.0, -128.0]);
        }
        for dtype in [DType::U64, DType::U32, DType::U16, DType::U8] {
            check(dtype, &[0.0, 1.0, 200.0, 255.0]);
        }
        check(DType::Bool, &[0.0, 1.0]);
        // The value 1 as a GPU stores it.
        assert_eq!(encode(DType::BF16, [1.0]), [0x80, 0x3f]);
        assert_eq!(encode(DType::I32, [-2.0]), [0xfe, 0xff, 0xff, 0xff]);
    }

    #[test]
    fn reductions_are_element_by_element() {
        let check = |dtype: DType, reducer: Reducer, members: [&[f64]; 3], expected: &[f64]| {
            let members = members.map(|member| encode(dtype, member.iter().copied()));
            let got = reduced(dtype, reducer, &[&members[0], &members[1], &members[2]]);
            assert_eq!(decode(dtype, &got), expected, "{dtype} {reducer:?}");
        };
        let three: [&[f64]; 3] = [&[1.0, -2.0], &[3.0, 5.0], &[0.5, 4.0]];
        check(DType::F32, Reducer::Sum, three, &[4.5, 7.0]);
        check(DType::BF16, Reducer::Max, three, &[3.0, 5.0]);
        check(DType::F64, Reducer::Product, three, &[1.5, -40.0]);
        let whole: [&[f64]; 3] = [&[1.0, -100.0], &[3.0, -100.0], &[6.0, -100.0]];
        check(DType::I8, Reducer::Sum, whole, &[10.0, -44.0]);
        check(DType::I32, Reducer::Min, whole, &[1.0, -100.0]);
        check(DType::I32, Reducer::And, [&[7.0], &[3.0], &[6.0]], &[2.0]);
        check(DType::Bool, Reducer::Sum, [&[0.0, 0.0], &[1.0, 0.0], &[1.0, 0.0]], &[1.0, 0.0]);
    }
}

//! Bitcasts that change the number of elements. Chains do the others, with the functions at the end.

use crate::arena::Storage;
use crate::element::{Class, Element, integer_from_f64, integer_to_f64, with_class};
use crate::kernel::rows::for_each_row;
use altiplano_ir::dtype::DType;

/// Elements that a thread processes at a time.
pub(crate) const PART: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bitcast {
    pub from: DType,
    pub to: DType,
}

impl Bitcast {
    pub fn run(&self, input: &Storage, output: &mut Storage, threads: usize) {
        let (from, to) = (self.from.width(), self.to.width());
        // Number of result elements in an operand element, and the reverse; one of them is 1.
        let (parts, joined) = ((from / to).max(1) as usize, (to / from).max(1) as usize);
        with_class!(Class::of(self.from), F => with_class!(Class::of(self.to), T => {
            let input = input.slice::<F>();
            for_each_row(output.slice_mut::<T>(), PART, 1, threads, |number, row| {
                for (i, out) in row.iter_mut().enumerate() {
                    let at = number * PART + i;
                    let first = at / parts * joined;
                    let whole = input[first..first + joined].iter().rev();
                    let bits = whole.fold(0, |all, &x| shifted(all, from) | bits_of(x, self.from));
                    *out = element_of(bits >> (at % parts * to as usize), self.to);
                }
            });
        }));
    }
}

/// Shifts bits up by the width of an element; a shift by a whole word gives zero.
fn shifted(bits: u64, width: u32) -> u64 {
    bits.checked_shl(width).unwrap_or(0)
}

/// The bits of a stored element, in the lowest bits. Double-precision numbers are stored in single precision.
#[inline(always)]
pub(crate) fn bits_of<T: Element>(x: T, dtype: DType) -> u64 {
    match dtype {
        DType::F32 => u64::from(x.to_f32().to_bits()),
        DType::U64 | DType::I64 => x.to_i64() as u64,
        _ if dtype.is_float() => dtype.to_bits(f64::from(x.to_f32())),
        _ => dtype.to_bits(integer_to_f64(x.to_i64(), dtype)),
    }
}

/// The stored element that has these bits; bits above the type's width are ignored.
#[inline(always)]
pub(crate) fn element_of<T: Element>(bits: u64, dtype: DType) -> T {
    match dtype {
        DType::F32 => T::from_f32(f32::from_bits(bits as u32)),
        DType::U64 | DType::I64 => T::from_i64(bits as i64),
        _ if dtype.is_float() => T::from_f32(dtype.from_bits(bits) as f32),
        _ => T::from_i64(integer_from_f64(dtype.from_bits(bits), dtype)),
    }
}

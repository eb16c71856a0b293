//! Random tensors for the tests of the ops, and comparison of results.

use crate::dtype::DType;
use crate::mesh::Mesh;
use crate::op::Reducer;
use crate::sharding::Sharding;
use crate::tensor::Tensor;
use crate::types::TensorType;

/// A small pseudorandom number generator (splitmix64), the same on every machine.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// A generator for each case of a test.
    pub fn sequence(seed: u64) -> impl Iterator<Item = Rng> {
        (0..).map(move |i| Rng(seed.wrapping_mul(0x1_0000_0001).wrapping_add(i * 7919)))
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
    }

    /// Uniform between `low` and `high`.
    pub fn real(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn choose<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize].clone()
    }
}

/// Random elements. Floats lie in `reals` but not close to zero, where functions such as `abs` have a kink. Integers
/// lie in `integers`, as far as the type has them.
pub fn random(ty: &TensorType, reals: (f64, f64), integers: (i64, i64), rng: &mut Rng) -> Tensor {
    Tensor::from_fn(ty.clone(), |_| match ty.dtype {
        DType::Bool => rng.below(2) as f64,
        d if d.is_float() => loop {
            let x = rng.real(reals.0, reals.1);
            if x.abs() > 0.05 {
                break x;
            }
        },
        d => {
            let low = if d.is_unsigned_integer() { integers.0.max(0) } else { integers.0 };
            (low + rng.below((integers.1 - low) as u64) as i64) as f64
        }
    })
}

/// `n` tensors that combine to `whole`. None of them is `whole` or neutral by construction.
fn summands(whole: &Tensor, n: u64, reducer: Reducer, rng: &mut Rng) -> Vec<Tensor> {
    let dtype = whole.ty.dtype;
    let mut parts = vec![Tensor::splat(whole.ty.clone(), reducer.neutral(dtype)); n as usize];
    for (i, &value) in whole.data.iter().enumerate() {
        let holder = rng.below(n) as usize;
        let mut rest = value;
        for (p, part) in parts.iter_mut().enumerate() {
            if p == holder {
                continue;
            }
            part.data[i] = match reducer {
                // For booleans, the sum is `or` and the product is `and`.
                Reducer::Sum | Reducer::Or | Reducer::Max if dtype == DType::Bool => value * rng.below(2) as f64,
                Reducer::Product | Reducer::And | Reducer::Min if dtype == DType::Bool => {
                    value.max(rng.below(2) as f64)
                }
                Reducer::Sum if dtype.is_float() => rng.real(-2.0, 2.0),
                Reducer::Sum => dtype.wrap(rng.below(7) as f64 - 3.0),
                Reducer::Product if dtype.is_float() => rng.real(0.5, 2.0),
                Reducer::Max if dtype.is_float() => value - rng.real(0.0, 3.0),
                Reducer::Min if dtype.is_float() => value + rng.real(0.0, 3.0),
                Reducer::Max => value.min(dtype.wrap(rng.below(5) as f64)),
                Reducer::Min => value.max(dtype.wrap(rng.below(5) as f64)),
                Reducer::Product => 1.0,
                Reducer::And => dtype.wrap((value as i64 | rng.below(64) as i64) as f64),
                Reducer::Or => dtype.wrap((value as i64 & rng.below(64) as i64) as f64),
            };
            match reducer {
                Reducer::Sum if dtype != DType::Bool => rest = dtype.wrap(rest - part.data[i]),
                Reducer::Product if dtype.is_float() => rest /= part.data[i],
                _ => {}
            }
        }
        parts[holder].data[i] = rest;
    }
    parts
}

/// Every device's part of `whole`, with random summands along the partial axes.
pub fn shard_randomly(whole: &Tensor, sharding: &Sharding, mesh: &Mesh, rng: &mut Rng) -> Vec<Tensor> {
    let axes: Vec<_> = sharding.partial.iter().map(|p| p.0).collect();
    let parts = match sharding.partial.first() {
        None => vec![whole.clone()],
        Some(&(_, reducer)) => summands(whole, mesh.product(&axes), reducer, rng),
    };
    let layout = sharding.reduced();
    let device_part = |device: u32| {
        let which = mesh.index_along(&axes, &mesh.coordinates(device));
        crate::interpret::shard(&parts[which as usize], &layout, mesh, device)
    };
    (0..mesh.num_devices()).map(device_part).collect()
}

/// Returns true if two numbers agree within `tolerance`, relative to the larger one or to 1. NaN equals NaN.
pub fn close(a: f64, b: f64, tolerance: f64) -> bool {
    a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= tolerance * a.abs().max(b.abs()).max(1.0)
}

/// The first element in which two tensors differ, or the difference of their types.
pub fn difference(a: &Tensor, b: &Tensor, tolerance: f64) -> Option<String> {
    if a.ty != b.ty {
        return Some(format!("types {} and {}", a.ty, b.ty));
    }
    let at = a.data.iter().zip(&b.data).position(|(&x, &y)| !close(x, y, tolerance))?;
    Some(format!("element {at}: {} and {}", a.data[at], b.data[at]))
}

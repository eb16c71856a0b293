//! Defines the meaning of loop programs: runs every launch element by element, in order, in double precision.
//!
//! It is the reference for a device's text of the same program. It also verifies, without a device, that a program
//! computes the nodes of its kernel.

use super::{Launch, Phase, Running, Scalar, Source, Strip, Var};
use altiplano_ir::dtype::DType;
use altiplano_ir::float::reduce_precision;
use altiplano_ir::op::Reducer;
use std::collections::BTreeMap;

/// Values in memory, row major.
pub type Memory = BTreeMap<Source, Vec<f64>>;

/// Runs a launch with these [`Launch::coordinates`].
///
/// # Panics
/// Panics if a parameter that is read is not in memory, or if an index is out of bounds. Both are errors in the launch.
pub fn run(launch: &Launch, coordinates: &[u64], memory: &mut Memory) {
    for param in launch.params.iter().filter(|p| p.written) {
        memory.entry(param.source.clone()).or_insert_with(|| vec![f64::NAN; param.elements as usize]);
    }
    let needed: Vec<Vec<Var>> = launch.phases.iter().map(|p| launch.needs(p)).collect();
    let mut values = vec![f64::NAN; launch.scalars.all.len()];
    for row in 0..launch.rows {
        let mut slots = Slots::default();
        for (phase, needed) in launch.phases.iter().zip(&needed) {
            let at = At { row, step: 0, coordinates };
            run_phase(launch, phase, needed, at, &mut slots, &mut values, memory);
        }
    }
}

/// A place in a launch.
#[derive(Clone, Copy)]
struct At<'a> {
    row: u64,
    step: u64,
    coordinates: &'a [u64],
}

/// The results of a row's phases.
#[derive(Default)]
struct Slots {
    single: BTreeMap<u32, f64>,
    /// The elements of each [`Outer`], indexed by the iteration of a later phase.
    wide: BTreeMap<u32, Vec<f64>>,
}

fn run_phase(
    launch: &Launch,
    phase: &Phase,
    needed: &[Var],
    at: At<'_>,
    slots: &mut Slots,
    values: &mut [f64],
    memory: &mut Memory,
) {
    let mut folded: Vec<(u32, f64)> = phase.folds.iter().map(|f| (f.slot, f.reducer.neutral(f.dtype))).collect();
    let mut summed: Vec<Vec<f64>> = phase.outer.iter().map(|o| vec![0.0; o.of_step.length as usize]).collect();
    let strip = |memory: &Memory, strip: &Strip, values: &[f64]| -> Vec<f64> {
        let (from, base) = (&memory[&launch.params[strip.param as usize].source], values[strip.base.0 as usize]);
        (0..strip.length).map(|i| from[base as usize + (i * strip.stride) as usize]).collect()
    };
    if phase.running.is_some() {
        slots.single.extend(phase.folds.iter().map(|f| (f.slot, 1.0)));
    }
    for step in 0..phase.length {
        let compute = |slots: &Slots, values: &mut [f64], memory: &Memory| {
            for &var in needed {
                values[var.0 as usize] = value(launch, var, At { step, ..at }, slots, values, memory);
            }
        };
        if !phase.inner.is_empty() {
            // The positions of strips depend on no product.
            slots.single.extend(phase.inner.iter().map(|i| (i.slot, 0.0)));
            compute(slots, values, memory);
            for inner in &phase.inner {
                let (a, b) = (strip(memory, &inner.of_row, values), strip(memory, &inner.of_step, values));
                slots.single.insert(inner.slot, a.iter().zip(&b).map(|(a, b)| a * b).sum());
            }
        }
        compute(slots, values, memory);
        if let Some(Running { most, scaled }) = &phase.running {
            let fold = phase.folds.iter().position(|f| f.slot == *most).expect("the maximum is a fold of the phase");
            let before = folded[fold].1;
            let after = Reducer::Max.combine().apply(before, values[phase.folds[fold].value.0 as usize], DType::F64);
            let factor = if before == f64::NEG_INFINITY { 0.0 } else { (before - after).exp() };
            for slot in scaled {
                folded.iter_mut().filter(|f| f.0 == *slot).for_each(|f| f.1 *= factor);
                let sums = phase.outer.iter().zip(&mut summed).filter(|(o, _)| o.slot == *slot);
                sums.for_each(|(_, sum)| sum.iter_mut().for_each(|x| *x *= factor));
            }
            // If the maximum is negative infinity, nothing is subtracted.
            slots.single.insert(*most, if after == f64::NEG_INFINITY { 0.0 } else { after });
            compute(slots, values, memory);
        }
        for (fold, (_, sum)) in phase.folds.iter().zip(&mut folded) {
            *sum = fold.reducer.combine().apply(*sum, values[fold.value.0 as usize], fold.dtype);
        }
        for (outer, sum) in phase.outer.iter().zip(&mut summed) {
            let by = values[outer.value.0 as usize];
            sum.iter_mut().zip(strip(memory, &outer.of_step, values)).for_each(|(sum, x)| *sum += by * x);
        }
        for store in &phase.stores {
            if store.guard.is_some_and(|g| values[g.0 as usize] == 0.0) {
                continue;
            }
            let param = &launch.params[store.param as usize];
            let new = values[store.value.0 as usize];
            let index = values[store.index.0 as usize] as usize;
            let place = &mut memory.get_mut(&param.source).expect("what is written has a place")[index];
            *place = store.combines.map_or(new, |reducer| reducer.combine().apply(*place, new, param.dtype));
        }
    }
    slots.single.extend(folded);
    for (outer, mut sum) in phase.outer.iter().zip(summed) {
        if let Some(by) = outer.divided {
            sum.iter_mut().for_each(|x| *x /= slots.single[&by]);
        }
        slots.wide.insert(outer.slot, sum);
    }
}

fn value(launch: &Launch, var: Var, at: At<'_>, slots: &Slots, values: &[f64], memory: &Memory) -> f64 {
    let of = |v: &Var| values[v.0 as usize];
    let whole = |v: &Var| of(v) as i64;
    let truth = |b: bool| f64::from(u8::from(b));
    match launch.scalars.get(var) {
        Scalar::Row => at.row as f64,
        Scalar::Step => at.step as f64,
        Scalar::Slot(slot, _) => slots.wide.get(slot).map_or_else(|| slots.single[slot], |all| all[at.step as usize]),
        Scalar::Coordinate(i) => at.coordinates[*i as usize] as f64,
        Scalar::Index(value) => *value as f64,
        Scalar::Number(bits, _) => f64::from_bits(*bits),
        Scalar::Load { guard: Some(guard), .. } if of(guard) == 0.0 => 0.0,
        Scalar::Load { param, index, .. } => {
            let param = &launch.params[*param as usize];
            memory.get(&param.source).unwrap_or_else(|| panic!("{:?} is not in memory", param.source))
                [of(index) as usize]
        }
        Scalar::Add(a, b) => (whole(a) + whole(b)) as f64,
        Scalar::Times(a, by) => (whole(a) * by) as f64,
        Scalar::Quotient(a, by) => whole(a).div_euclid(*by) as f64,
        Scalar::Remainder(a, by) => whole(a).rem_euclid(*by) as f64,
        Scalar::Within(a, n) => truth((0..*n).contains(&whole(a))),
        Scalar::Clamp(a, most) => whole(a).clamp(0, *most) as f64,
        Scalar::AsElement(a, dtype) => dtype.round(of(a)),
        Scalar::AsIndex(a, dtype) => dtype.to_integer(of(a)) as f64,
        Scalar::And(a, b) => truth(of(a) != 0.0 && of(b) != 0.0),
        Scalar::Unary(op, dtype, a) => op.apply(of(a), *dtype),
        Scalar::Binary(op, dtype, a, b) => op.apply(of(a), of(b), *dtype),
        Scalar::Compare(direction, dtype, a, b) => truth(direction.holds(dtype.round(of(a)), dtype.round(of(b)))),
        Scalar::Select(_, [predicate, a, b]) => {
            if of(predicate) != 0.0 {
                of(a)
            } else {
                of(b)
            }
        }
        Scalar::Convert { from, to, value } => convert(*from, *to, of(value)),
        Scalar::Bitcast { from, to, value } => to.from_bits(from.to_bits(of(value))),
        Scalar::ReducePrecision { exponent_bits, mantissa_bits, dtype, value } => match dtype.float_format() {
            Some(format) => reduce_precision(of(value), *exponent_bits, *mantissa_bits, format),
            None => of(value),
        },
        Scalar::Threefry(word, [k0, k1, c0, c1]) => {
            let bits = |v: &Var| of(v) as u32;
            f64::from(word.of([bits(k0), bits(k1)], [bits(c0), bits(c1)]))
        }
    }
}

fn convert(from: DType, to: DType, value: f64) -> f64 {
    match to {
        DType::Bool => f64::from(u8::from(value != 0.0)),
        to if to.is_integer() && from.is_float() => to.wrap(value.trunc()),
        to => to.wrap(value),
    }
}

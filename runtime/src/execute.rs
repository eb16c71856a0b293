//! Runs the kernel of one step on stored tensors. Collectives are elsewhere, since they need other devices.

use crate::arena::Storage;
use crate::element::{
    Class, Element, integer_from_f64, is_narrower_than_stored, round_float, with_class, with_width, wrap,
};
use crate::error::KernelError;
use crate::step::{Kernel, Step};
use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::Mesh;

/// Runs the kernel of a step. `position` is the device's mesh and its coordinates in it.
pub(crate) fn run_kernel(
    step: &Step,
    inputs: &[&Storage],
    outputs: &mut [Storage],
    position: (&Mesh, &[u32]),
    threads: usize,
) -> Result<(), KernelError> {
    if let Kernel::Chain(chain) = &step.kernel {
        chain.run(inputs, outputs, threads);
        return Ok(());
    }
    let (Some(output), Some(dtype)) = (outputs.first_mut(), step.outputs.first().map(|o| o.dtype)) else {
        return Ok(());
    };
    let class = Class::of(dtype);
    match &step.kernel {
        Kernel::Chain(_) | Kernel::Collective { .. } => {}
        Kernel::Copy(copy) => {
            with_width!(class, T => copy.run_parallel(inputs[0].slice::<T>(), output.slice_mut::<T>(), threads));
        }
        Kernel::Fill { value, dtype } => fill(output, *value, *dtype),
        Kernel::Dense(data) => output.slice_mut::<u8>().copy_from_slice(data.as_bytes()),
        Kernel::Iota(dtype) => with_class!(class, T => {
            for (i, x) in output.slice_mut::<T>().iter_mut().enumerate() {
                *x = if class.is_integer() { T::from_i64(wrap(i as i64, *dtype)) } else { T::from_f32(round_float(i as f32, *dtype)) };
            }
        }),
        Kernel::AxisIndex { axes, dtype } => {
            let (mesh, coordinates) = position;
            fill(output, mesh.index_along(axes, coordinates) as f64, *dtype);
        }
        Kernel::Dot(dot) => dot.run(inputs[0], inputs[1], output, threads)?,
        Kernel::Convolution(conv) => conv.run(inputs[0], inputs[1], output, threads)?,
        Kernel::ReduceWindow { pooling, reducer } => pooling.reduce(*reducer, inputs[0], output, threads),
        Kernel::SelectAndScatter { pooling, select } => {
            pooling.scatter(*select, inputs[0], inputs[1], output, threads);
        }
        Kernel::Reduce(reduction) => reduction.run(inputs[0], output, threads),
        Kernel::Concatenate(copies) => with_width!(class, T => {
            for (copy, input) in copies.iter().zip(inputs) {
                copy.run(input.slice::<T>(), output.slice_mut::<T>());
            }
        }),
        Kernel::Pad(copy) => with_width!(class, T => {
            output.slice_mut::<T>().fill(inputs[1].slice::<T>()[0]);
            copy.run(inputs[0].slice::<T>(), output.slice_mut::<T>());
        }),
        Kernel::Gather { lookup, index, clamp } => {
            lookup.gather(class, *index, *clamp, inputs[0], inputs[1], output);
        }
        Kernel::ScatterAdd { lookup, index, dtype } => {
            lookup.scatter_add(*dtype, *index, inputs[0], inputs[1], output)?;
        }
        Kernel::Scatter { lookup, index, dtype, combine } => {
            if step.in_place.is_empty() {
                output.slice_mut::<u8>().copy_from_slice(inputs[0].slice::<u8>());
            }
            lookup.scatter(*dtype, *index, *combine, inputs[1], inputs[2], output);
        }
        Kernel::GroupedDot(grouped) => grouped.dot(inputs, output, threads)?,
        Kernel::GroupedOuter(grouped) => grouped.outer(inputs, output, threads)?,
        Kernel::Bitcast(bitcast) => bitcast.run(inputs[0], output, threads),
        Kernel::Reverse(reversal) => reversal.run(class, inputs[0], output, threads),
        Kernel::Cumulative(scan) => scan.run(inputs[0], output, threads),
        Kernel::ArgSort(order) => order.run(inputs, output, threads),
    }
    if step.kernel.adds_or_multiplies() {
        round_stored(output, dtype);
    }
    Ok(())
}

/// Rounds floats and wraps integers to their type, if it is narrower than the format in which kernels compute. Wrapping
/// once at the end is exact, since arithmetic modulo a power of two can be reduced to a smaller one.
pub(crate) fn round_stored(storage: &mut Storage, dtype: DType) {
    if is_narrower_than_stored(dtype) {
        let class = Class::of(dtype);
        with_class!(class, T => {
            let elements = storage.slice_mut::<T>().iter_mut();
            if class.is_integer() {
                elements.for_each(|x| *x = T::from_i64(wrap(x.to_i64(), dtype)));
            } else {
                elements.for_each(|x| *x = T::from_f32(round_float(x.to_f32(), dtype)));
            }
        });
    }
}

/// Sets all elements to a value of the reference semantics.
pub(crate) fn fill(storage: &mut Storage, value: f64, dtype: DType) {
    let class = Class::of(dtype);
    with_class!(class, T => {
        let element = match class {
            Class::Bool => T::from_i64((value != 0.0) as i64),
            Class::I32 | Class::I64 => T::from_i64(integer_from_f64(value, dtype)),
            _ => T::from_f32(round_float(value as f32, dtype)),
        };
        storage.slice_mut::<T>().fill(element);
    });
}

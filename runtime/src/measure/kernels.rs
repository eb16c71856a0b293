//! Measures kernels other than chains: matrix products, copies, reductions, lookups, windows and the gathers of
//! convolutions.

use super::{Harness, RING_BYTES, Ring, Run, floats};
use crate::arena::{Arena, Storage};
use crate::element::Class;
use crate::execute::run_kernel;
use crate::kernel::convolution::Conv;
use crate::kernel::copy::Copy;
use crate::kernel::dot::Dot;
use crate::kernel::gather::Lookup;
use crate::kernel::reduce::Reduction;
use crate::kernel::rows::{RowOrder, RowScan};
use crate::kernel::window::Pooling;
use crate::layout::Selection;
use crate::step::{Kernel, Step};
use crate::view::{View, row_major};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{Convolution, DotGeneral, Extremum, GatherDims, ImageDims, KernelDims, Reducer, WindowDim};
use altiplano_ir::storage::Output;
use rayon::prelude::*;

/// Size of a core's private caches.
const NEAR_BYTES: usize = 256 << 10;

/// A run of a kernel with inputs and an output of these sizes.
fn run(kernel: Kernel, inputs: &[(Class, usize)], output: (Class, usize), threads: usize) -> Run {
    run_on(RING_BYTES, kernel, inputs, output, threads)
}

/// The same on small operands in the cache, as if an earlier kernel had just made them.
fn run_near(kernel: Kernel, inputs: &[(Class, usize)], output: (Class, usize), threads: usize) -> Run {
    let bytes = |(class, elements): &(Class, usize)| class.bytes() * elements;
    let all_bytes = inputs.iter().chain([&output]).map(bytes).sum::<usize>();
    let ring_bytes = if all_bytes < NEAR_BYTES { NEAR_BYTES } else { RING_BYTES };
    run_on(ring_bytes, kernel, inputs, output, threads)
}

/// A run on copies of `ring_bytes` bytes in total.
fn run_on(ring_bytes: usize, kernel: Kernel, inputs: &[(Class, usize)], output: (Class, usize), threads: usize) -> Run {
    let (class, elements) = output;
    let arena = Arena::new(None);
    let step = Step {
        node: ValueId(0),
        members: Vec::new(),
        kernel,
        inputs: Vec::new(),
        outputs: vec![Output::new(ValueId(0), class.dtype(), elements)],
        workspace_bytes: 0,
        replaceable: Vec::new(),
        in_place: Vec::new(),
        dies: Vec::new(),
    };
    let bytes = inputs.iter().map(|(c, n)| c.bytes() * n).sum::<usize>() + class.bytes() * elements;
    let sorts = matches!(step.kernel, Kernel::ArgSort(_));
    let mut random = 1_u32;
    let mut filled = |&(class, elements): &(Class, usize)| -> Option<Storage> {
        let mut storage = arena.allocate(class, elements).ok()?;
        // Bytes that are ordinary numbers as floats, small ones as integers.
        let is_float = !class.is_integer();
        storage.slice_mut::<u8>().fill(if is_float { 1 } else { 0 });
        // Sorting sorted data would take no time.
        if sorts && class == Class::F32 {
            for x in storage.slice_mut::<f32>() {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *x = (random >> 8) as f32;
            }
        }
        Some(storage)
    };
    let make = || {
        let inputs: Vec<Storage> = inputs.iter().filter_map(&mut filled).collect();
        (inputs, filled(&(class, elements)).into_iter().collect::<Vec<Storage>>())
    };
    let mut ring = Ring::of(ring_bytes, bytes, make);
    let mesh = Mesh::new(&[]);
    Box::new(move || {
        let (inputs, outputs) = ring.next();
        let inputs: Vec<&Storage> = inputs.iter().collect();
        // The operands fit the kernel, so only an allocation can fail, and that succeeded before.
        let _ = run_kernel(&step, &inputs, outputs, (&mesh, &[]), threads);
    })
}

/// A run of a step that makes one tensor.
pub(crate) fn of_step(step: &Step, inputs: &[(Class, usize)]) -> Run {
    let output = step.outputs.first().map_or((Class::F32, 0), |o| (o.class(), o.elements));
    run_near(step.kernel.clone(), inputs, output, 1)
}

/// Short runs of several kernels in sequence, as in a step.
pub(crate) fn of_a_step() -> Vec<Run> {
    let side = 24;
    let view = |i| View::whole(ValueId(i), vec![side, side]);
    let op = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![1], rhs_contract: vec![1] };
    let dot = Dot::new(&op, Class::F32, &view(0), &view(1), &row_major(&[side, side]));
    let reduction = Reduction::new(&view(0), &[0], Reducer::Sum, DType::F32);
    let all = (Class::F32, side * side);
    vec![
        run(Kernel::Dot(dot), &[all, all], all, 1),
        run(Kernel::Copy(Copy::new(0, 0, [(side, 1, side), (side, side, 1)])), &[all], all, 1),
        run(Kernel::Reduce(reduction), &[all], (Class::F32, side), 1),
        run(Kernel::Iota(DType::I32), &[], (Class::I32, side * side), 1),
    ]
}

/// Measures matrix products of all layouts of the operands, each on `threads` threads.
pub(crate) fn products(harness: &mut Harness, threads: usize) {
    let axis: &[usize] = if harness.quick { &[8, 64, 256] } else { &[1, 8, 32, 128, 512, 2048] };
    let load = harness.load;
    if threads > 1 {
        harness.load = 1;
    }
    for (family, lhs, rhs) in [("matmul_nn", 1, 0), ("matmul_nt", 1, 1), ("matmul_tn", 0, 0), ("matmul_tt", 0, 1)] {
        let (lhs_contract, rhs_contract) = (vec![lhs], vec![rhs]);
        let op = DotGeneral { lhs_batch: Vec::new(), rhs_batch: Vec::new(), lhs_contract, rhs_contract };
        let mut seconds = Vec::new();
        for &m in axis {
            for &n in axis {
                for &k in axis {
                    let left = View::whole(ValueId(0), if lhs == 1 { vec![m, k] } else { vec![k, m] });
                    let right = View::whole(ValueId(1), if rhs == 0 { vec![k, n] } else { vec![n, k] });
                    let dot = Dot::new(&op, Class::F32, &left, &right, &row_major(&[m, n]));
                    let make = || {
                        let inputs = [(Class::F32, m * k), (Class::F32, k * n)];
                        run_near(Kernel::Dot(dot.clone()), &inputs, (Class::F32, m * n), threads)
                    };
                    seconds.push(harness.time_among_others(&make));
                }
            }
        }
        harness.grid(family, DType::F32, threads, vec![floats(axis, 1.0); 3], seconds);
    }
    harness.load = load;
}

pub(crate) fn measure(harness: &mut Harness, cores: usize) {
    copies(harness);
    reductions(harness);
    lookups(harness);
    windows(harness);
    convolutions(harness);
    rows(harness);
    if harness.load == 1 && cores > 1 {
        // Each thread works for a while. The extra time of the slowest is the cost of waking them.
        let work = || (0..1u32 << 15).map(std::hint::black_box).sum::<u32>();
        let alone = || -> Run {
            Box::new(move || {
                std::hint::black_box(work());
            })
        };
        let together = || -> Run {
            Box::new(move || {
                (0..cores).into_par_iter().for_each(|_| {
                    std::hint::black_box(work());
                })
            })
        };
        let seconds = vec![harness.time(&together) - harness.time(&alone)];
        harness.add("fork", DType::F32, &[cores as f64], seconds);
    }
}

fn copies(harness: &mut Harness) {
    type Dims<'a> = &'a (dyn Fn(usize) -> (Copy, usize) + Sync);
    let all = harness.sizes(&[1, 16, 512, 1 << 13, 1 << 17, 1 << 20, 1 << 22]);
    let time = |harness: &mut Harness, sizes: &[usize], class: Class, dims: Dims<'_>| -> Vec<f64> {
        let one = |&n: &usize| {
            let (copy, from) = dims(n);
            harness.time(&|| run(Kernel::Copy(copy.clone()), &[(class, from)], (class, n), 1))
        };
        sizes.iter().map(one).collect()
    };
    let straight = time(harness, &all, Class::F32, &|n| (Copy::new(0, 0, [(n, 1, 1)]), n));
    harness.add("copy", DType::F32, &floats(&all, 4.0), straight.clone());
    let filled = time(harness, &all, Class::F32, &|n| (Copy::new(0, 0, [(n, 0, 1)]), 1));
    harness.add("fill", DType::F32, &floats(&all, 4.0), filled);
    // All but the first are rows of eight.
    let sizes = &all[1..];
    let rows = time(harness, sizes, Class::F32, &|n| (Copy::new(0, 0, [(n / 8, 9, 8), (8, 1, 1)]), 2 * n));
    let runs = rows.iter().zip(&straight[1..]).map(|(r, s)| r - s).collect();
    harness.add("copy_run", DType::F32, &floats(sizes, 0.125), runs);
    for class in [Class::F32, Class::F16, Class::I32, Class::I64, Class::Bool] {
        let strided = time(harness, &all, class, &|n| (Copy::new(0, 0, [(n, 3, 1)]), 3 * n));
        harness.add("copy_strided", class.dtype(), &floats(&all, 1.0), strided);
        let transposed = time(harness, sizes, class, &|n| {
            let rows = 1 << (n.ilog2() / 2);
            (Copy::new(0, 0, [(rows, 1, n / rows), (n / rows, rows, 1)]), n)
        });
        harness.add("transpose", class.dtype(), &floats(sizes, 1.0), transposed);
    }
    // Parts that are sent, row by row.
    let whole = |n: usize| (vec![n / 16, 16], vec![(0..n as u64 / 16).collect::<Vec<u64>>(), (0..8).collect()]);
    let send = |&n: &usize| {
        let (shape, indices) = whole(n);
        let make = || -> Run {
            let (tensor, shape, indices) = (vec![1.0f32; n], shape.clone(), indices.clone());
            Box::new(move || {
                let selection = Selection::new(&shape, &indices);
                let mut words = vec![0u64; selection.elements().div_ceil(2)];
                let target = &mut bytemuck::cast_slice_mut::<u64, f32>(&mut words)[..selection.elements()];
                selection.read(&tensor, target);
                std::hint::black_box(&words);
            })
        };
        harness.time(&make)
    };
    let sent: Vec<f64> = sizes.iter().map(send).collect();
    harness.add("send", DType::F32, &floats(sizes, 2.0), sent);
    let receive = |&n: &usize| {
        let (shape, indices) = whole(n);
        let make = || -> Run {
            let (mut tensor, shape, indices) = (vec![1.0f32; n], shape.clone(), indices.clone());
            let words = vec![0u64; n / 4];
            Box::new(move || {
                let selection = Selection::new(&shape, &indices);
                let source = &bytemuck::cast_slice::<u64, f32>(&words)[..selection.elements()];
                selection.write(source, &mut tensor);
            })
        };
        harness.time(&make)
    };
    let received: Vec<f64> = sizes.iter().map(receive).collect();
    harness.add("receive", DType::F32, &floats(sizes, 2.0), received);
}

fn reductions(harness: &mut Harness) {
    let sizes = harness.sizes(&[1, 64, 1 << 12, 1 << 16, 1 << 20, 1 << 22]);
    for class in [Class::F32, Class::F16, Class::BF16, Class::I32, Class::I64, Class::Bool] {
        for (family, dim) in [("reduce_columns", 0), ("reduce_strided", 1)] {
            let time = |&n: &usize| {
                let rows = 1usize << (n.ilog2() / 2);
                let view = View::whole(ValueId(0), vec![rows, n / rows]);
                let reduction = Reduction::new(&view, &[dim], Reducer::Sum, class.dtype());
                let kept = if dim == 0 { n / rows } else { rows };
                harness.time(&|| run(Kernel::Reduce(reduction.clone()), &[(class, n)], (class, kept), 1))
            };
            let seconds = sizes.iter().map(time).collect();
            harness.add(family, class.dtype(), &floats(&sizes, 1.0), seconds);
        }
    }
}

fn lookups(harness: &mut Harness) {
    let counts = harness.sizes(&[1, 16, 1 << 10, 1 << 14]);
    let lookup = |count: usize, width: usize| {
        let dims = GatherDims::rows(&[64, width as u64], 1);
        Lookup::new(&dims, &[64, width], &[count, 1], &[count, width])
    };
    let index = Class::I32;
    let gather = |&count: &usize| {
        let kernel = Kernel::Gather { lookup: lookup(count, 1), index, clamp: true };
        harness.time(&|| run(kernel.clone(), &[(Class::F32, 64), (index, count)], (Class::F32, count), 1))
    };
    let seconds: Vec<f64> = counts.iter().map(gather).collect();
    harness.add("index", DType::I32, &floats(&counts, 1.0), seconds.clone());
    const WIDTH: usize = 64;
    for class in [Class::F32, Class::F16, Class::BF16, Class::I32, Class::I64, Class::Bool] {
        let scatter = |(i, &count): (usize, &usize)| {
            let kernel = Kernel::ScatterAdd { lookup: lookup(count, WIDTH), index, dtype: class.dtype() };
            let inputs = [(index, count), (class, count * WIDTH)];
            harness.time(&|| run(kernel.clone(), &inputs, (class, 64 * WIDTH), 1)) - seconds[i]
        };
        let added = counts.iter().enumerate().map(scatter).collect();
        harness.add("scatter", class.dtype(), &floats(&counts, WIDTH as f64), added);
    }
}

fn windows(harness: &mut Harness) {
    let sides = harness.sizes(&[4, 16, 64]);
    const WIDTH: usize = 32;
    let window = WindowDim { size: 2, stride: 2, ..WindowDim::one() };
    let time = |harness: &mut Harness, side: usize, inner: usize, scatters: bool| {
        let of = |n: usize| vec![1, n, n, inner];
        let windows = [WindowDim::one(), window, window, WindowDim::one()];
        let pooling = Pooling::new(DType::F32, &windows, &of(side), &of(side / 2));
        let (all, pooled) = ((Class::F32, side * side * inner), (Class::F32, side * side * inner / 4));
        match scatters {
            true => harness.time(&|| {
                let kernel = Kernel::SelectAndScatter { pooling: pooling.clone(), select: Extremum::Max };
                run(kernel, &[all, pooled], all, 1)
            }),
            false => harness.time(&|| {
                let kernel = Kernel::ReduceWindow { pooling: pooling.clone(), reducer: Reducer::Max };
                run(kernel, &[all], pooled, 1)
            }),
        }
    };
    let (mut positions, mut reduced, mut scattered) = (Vec::new(), Vec::new(), Vec::new());
    for &side in &sides {
        let (one, many) = (time(harness, side, 1, false), time(harness, side, WIDTH, false));
        let each = ((many - one) / (WIDTH as f64 - 1.0)).max(one / 64.0);
        let at = (one - each).max(one / 16.0);
        positions.push(at);
        reduced.push(each * WIDTH as f64);
        scattered.push(time(harness, side, WIDTH, true) - at);
    }
    let elements: Vec<f64> = sides.iter().map(|&s| (s * s) as f64).collect();
    harness.add("window", DType::F32, &elements, positions);
    let all: Vec<f64> = elements.iter().map(|n| n * WIDTH as f64).collect();
    harness.add("reduce_window", DType::F32, &all, reduced);
    harness.add("select_and_scatter", DType::F32, &all, scattered);
}

/// A convolution with a window of three in both directions, over images with their features last.
fn convolution(images: usize, side: usize, features: usize, groups: usize) -> (Conv, [usize; 3]) {
    let dims = ImageDims { batch: 0, feature: 3, spatial: vec![1, 2] };
    let window = WindowDim { size: 3, pad_low: 1, pad_high: 1, ..WindowDim::one() };
    let op = Convolution {
        lhs: dims.clone(),
        rhs: KernelDims { input: 2, output: 3, spatial: vec![0, 1] },
        result: dims,
        window: vec![window, window],
        feature_groups: groups as u64,
        batch_groups: 1,
    };
    let image = vec![images, side, side, features];
    let kernel = vec![3, 3, features / groups, features];
    let (lhs, rhs) = (View::whole(ValueId(0), image.clone()), View::whole(ValueId(1), kernel.clone()));
    let conv = Conv::new(&op, Class::F32, &lhs, &rhs, &image, &row_major(&image));
    (conv, [image, kernel.clone(), vec![256, 9 * features]].map(|shape| shape.iter().product()))
}

fn convolutions(harness: &mut Harness) {
    // One tile. With few features, runs dominate.
    const FEATURES: usize = 4;
    let gathers = |harness: &mut Harness, features: usize| {
        harness.time_among_others(&|| {
            let (conv, [lhs, _, tile]) = convolution(4, 16, features, 1);
            let (lhs, mut tile) = (vec![1.0f32; lhs], vec![0.0f32; tile]);
            Box::new(move || conv.gather_tile(&lhs, &mut tile))
        })
    };
    let (few, many) = (gathers(harness, FEATURES), gathers(harness, 16 * FEATURES));
    let runs = 256.0 * 9.0;
    // The larger tile copies sixteen times as many elements in as many runs.
    let each = (few - (many - few) / 15.0).max(few / 8.0);
    harness.add("gather_run", DType::F32, &[1.0, runs, 16.0 * runs], vec![each / runs, each, 16.0 * each]);
    let depthwise = |harness: &mut Harness, groups: usize| {
        harness.time_among_others(&|| {
            let (conv, [lhs, rhs, _]) = convolution(1, 16, groups, groups);
            run_near(Kernel::Convolution(conv), &[(Class::F32, lhs), (Class::F32, rhs)], (Class::F32, lhs), 1)
        })
    };
    let (few, many) = (depthwise(harness, 4), depthwise(harness, 64));
    let visited = 16.0 * 16.0 * 9.0;
    let each = ((many - few) / 60.0).max(many / 128.0);
    let position = (few - 4.0 * each).max(few / 8.0);
    let scaled = |seconds: f64| vec![seconds / visited, seconds, 16.0 * seconds];
    harness.add("conv_position", DType::F32, &[1.0, visited, 16.0 * visited], scaled(position));
    let n = 64.0 * visited;
    harness.add("multiply_add", DType::F32, &[n / visited, n, 16.0 * n], scaled(64.0 * each));
}

fn rows(harness: &mut Harness) {
    let sizes = harness.sizes(&[64, 1 << 12, 1 << 16, 1 << 20]);
    const ROW: usize = 64;
    for class in [Class::F32, Class::I32, Class::I64] {
        let (reducer, reverse, dtype) = (Reducer::Sum, false, class.dtype());
        let scan = |&n: &usize| {
            let kernel = Kernel::Cumulative(RowScan { row: ROW, reducer, reverse, dtype });
            harness.time(&|| run(kernel.clone(), &[(class, n)], (class, n), 1))
        };
        let seconds = sizes.iter().map(scan).collect();
        harness.add("cumulative", dtype, &floats(&sizes, 1.0), seconds);
        let iota = |&n: &usize| harness.time(&|| run(Kernel::Iota(dtype), &[], (class, n), 1));
        let seconds = sizes.iter().map(iota).collect();
        harness.add("iota", dtype, &floats(&sizes, 1.0), seconds);
    }
    let sort = |&n: &usize| {
        let kernel = Kernel::ArgSort(RowOrder { row: ROW, keys: vec![(DType::F32, false)] });
        harness.time(&|| run(kernel.clone(), &[(Class::F32, n)], (Class::I32, n), 1))
    };
    let seconds = sizes.iter().map(sort).collect();
    harness.add("argsort", DType::F32, &floats(&sizes, (ROW as f64).log2()), seconds);
}

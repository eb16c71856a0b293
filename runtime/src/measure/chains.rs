//! Measures chains: the time that an instruction, a load, a store and a row's reduction add to a pass over memory.

use super::{Harness, Ring, Run};
use crate::arena::{Arena, Storage};
use crate::element::Class;
use crate::kernel::chain::{Chain, Load, RowReduction, Source, Store};
use crate::kernel::instruction::{Code, Instruction};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Binary, Direction, ReducePrecision, Reducer, ThreefryWord, Unary};

/// Repetitions of an instruction, load or store, so that its time stands out.
const REPEATS: usize = 4;
const CLASSES: [Class; 6] = [Class::F32, Class::F16, Class::BF16, Class::I32, Class::I64, Class::Bool];

/// A chain over `elements` with four registers of each kind that hold constants.
fn empty(elements: usize, row: usize) -> Chain {
    Chain {
        elements,
        row,
        float_registers: 5,
        integer_registers: 5,
        float_constants: (0..4).map(|r| (r, 0.75)).collect(),
        integer_constants: (0..4).map(|r| (r, 3)).collect(),
        ..Chain::default()
    }
}

/// A run of a chain on its own operands.
fn run(chain: &Chain, input_elements: usize) -> Run {
    let chain = chain.clone();
    let arena = Arena::new(None);
    let filled = |class: Class, elements: usize| -> Option<Storage> {
        let mut storage = arena.allocate(class, elements).ok()?;
        // A constant byte is an ordinary number in every format.
        storage.slice_mut::<u8>().fill(1);
        Some(storage)
    };
    let make = || {
        let inputs: Vec<Storage> = chain.loads.iter().filter_map(|l| filled(l.class, input_elements)).collect();
        let stores = chain.stores.iter().map(|s| (s.class, chain.elements));
        let reductions = chain.reductions.iter().map(|r| (r.class, chain.elements / chain.row));
        let outputs: Vec<Storage> = stores.chain(reductions).filter_map(|(c, n)| filled(c, n)).collect();
        (inputs, outputs)
    };
    let bytes = |c: Class| c.bytes() * input_elements.max(chain.elements);
    let classes = chain.loads.iter().map(|l| l.class).chain(chain.stores.iter().map(|s| s.class));
    let mut ring = Ring::new(classes.map(bytes).sum(), make);
    Box::new(move || {
        let (inputs, outputs) = ring.next();
        let inputs: Vec<&Storage> = inputs.iter().collect();
        chain.run(&inputs, outputs, 1);
    })
}

fn codes() -> Vec<Code> {
    let of_floats = |op: &Unary| !matches!(op, Unary::PopulationCount | Unary::CountLeadingZeros);
    let mut codes: Vec<Code> = Unary::ALL.into_iter().filter(of_floats).map(Code::FUnary).collect();
    let shifts = [Binary::ShiftLeft, Binary::ShiftRightLogical, Binary::ShiftRightArithmetic];
    codes.extend(Binary::ALL.into_iter().filter(|op| !shifts.contains(op)).map(Code::FBinary));
    codes.extend([DType::F16, DType::BF16].map(Code::FRound));
    codes.extend([Code::FCompare(Direction::Lt), Code::FSelect, Code::ISelect, Code::FToI(DType::I32)]);
    codes.push(Code::FReduce(ReducePrecision { exponent_bits: 8, mantissa_bits: 7 }, DType::F32));
    codes.extend([Code::IUnary(Unary::Negate, DType::I32), Code::ICompare(Direction::Lt, DType::I32)]);
    codes.extend([Binary::Add, Binary::Maximum].map(|op| Code::IBinary(op, DType::I32)));
    codes.extend([Code::IToF(DType::I32), Code::IWrap(DType::I32), Code::IThreefry(ThreefryWord::First)]);
    codes.extend([Code::FToIBits(DType::F32, DType::U32), Code::IToFBits(DType::U32, DType::F32)]);
    codes
}

pub(crate) fn measure(harness: &mut Harness) {
    let sizes = harness.sizes(&[1, 64, 512, 1 << 14, 1 << 17, 1 << 20]);
    let axis: Vec<f64> = sizes.iter().map(|&n| n as f64).collect();
    let base: Vec<f64> = sizes.iter().map(|&n| harness.time(&|| run(&empty(n, 1), 0))).collect();
    let added =
        |harness: &mut Harness, change: &(dyn Fn(&mut Chain) + Sync), inputs: &(dyn Fn(usize) -> usize + Sync)| {
            let time = |(i, &n): (usize, &usize)| {
                let mut chain = empty(n, 1);
                change(&mut chain);
                (harness.time(&|| run(&chain, inputs(n))) - base[i]) / REPEATS as f64
            };
            sizes.iter().enumerate().map(time).collect::<Vec<f64>>()
        };
    for code in codes() {
        let instruction = Instruction { code, target: 4, a: 0, b: 1, c: 2, d: 3 };
        let seconds = added(harness, &|chain| chain.instructions = vec![instruction; REPEATS], &|_| 0);
        let (family, dtype) = code.family();
        harness.add(family, dtype, &axis, seconds);
    }
    let loads = |class: Class, runs: Vec<(usize, usize)>| -> Vec<Load> {
        let load = |i| Load { source: Source::Input(i), class, register: 4, offset: 0, runs: runs.clone() };
        (0..REPEATS).map(load).collect()
    };
    for class in CLASSES {
        let dtype = class.dtype();
        let bytes: Vec<f64> = axis.iter().map(|n| n * class.bytes() as f64).collect();
        let contiguous = added(harness, &|c| c.loads = loads(class, vec![(c.elements, 1)]), &|n| n);
        harness.add("load", dtype, &bytes, contiguous.clone());
        let seconds = added(harness, &|c| c.loads = loads(class, Vec::new()), &|_| 1);
        harness.add("load_repeated", dtype, &axis, seconds);
        let seconds = added(harness, &|c| c.loads = loads(class, vec![(c.elements, 2)]), &|n| 2 * n);
        harness.add("load_strided", dtype, &axis, seconds);
        let stores = |c: &mut Chain| {
            c.stores = (0..REPEATS).map(|output| Store { output, class, register: 0 }).collect();
        };
        let seconds = added(harness, &stores, &|_| 0);
        harness.add("store", dtype, &bytes, seconds);
        // Rows of 8 elements with gaps between them.
        let rows =
            added(harness, &|c| c.loads = loads(class, vec![(c.elements.div_ceil(8), 9), (8, 1)]), &|n| 2 * n + 9);
        let runs: Vec<f64> = axis.iter().map(|n| (n / 8.0).ceil()).collect();
        let overhead: Vec<f64> = rows.iter().zip(&contiguous).map(|(r, c)| r - c).collect();
        // The first size is less than a row.
        harness.add("run", dtype, &runs[1..], overhead[1..].to_vec());
    }
    for class in CLASSES {
        let reduce = |harness: &mut Harness, row: usize| {
            let time = |(i, &n): (usize, &usize)| {
                let mut chain = empty(n.max(row), row);
                let dtype = class.dtype();
                chain.reductions = (0..REPEATS)
                    .map(|output| RowReduction { output, class, dtype, reducer: Reducer::Sum, register: 0 })
                    .collect();
                (harness.time(&|| run(&chain, 0)) - base[i]) / REPEATS as f64
            };
            sizes.iter().enumerate().skip(1).map(time).collect::<Vec<f64>>()
        };
        let (long, short) = (reduce(harness, 64), reduce(harness, 4));
        let n = &axis[1..];
        // Two lengths of rows separate the cost of an element from that of a row.
        let rows: Vec<f64> = n.iter().map(|n| n / 4.0 - n / 64.0).collect();
        let each_row: Vec<f64> =
            short.iter().zip(&long).zip(&rows).map(|((s, l), r)| ((s - l) / r).max(1e-10)).collect();
        let elements: Vec<f64> =
            long.iter().zip(&each_row).zip(n).map(|((l, r), n)| (l - r * n / 64.0).max(l / 4.0)).collect();
        harness.add("reduce_row", class.dtype(), n, elements);
        let mut rows: Vec<f64> = n.iter().map(|n| n / 4.0).collect();
        let mut seconds: Vec<f64> = each_row.iter().zip(&rows).map(|(t, r)| t * r).collect();
        rows.insert(0, 1.0);
        seconds.insert(0, each_row[0]);
        harness.add("row", class.dtype(), &rows, seconds);
    }
    registers(harness);
}

/// Measures chains from a few registers of one element to many of whole blocks.
fn registers(harness: &mut Harness) {
    let registers = [(1usize, 2usize), (1, 8), (64, 8), (512, 8), (512, 32), (512, 128)];
    let time = |&(elements, r): &(usize, usize)| {
        let chain = Chain { elements, row: 1, float_registers: r, ..Chain::default() };
        harness.time(&|| run(&chain, 0))
    };
    let seconds: Vec<f64> = registers.iter().map(time).collect();
    harness.add("registers", DType::F32, &registers.map(|(n, r)| (4 * n * r) as f64), seconds);
}

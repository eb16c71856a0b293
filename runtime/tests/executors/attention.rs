//! Compares attention as launches over tiles with the reference semantics of its nodes.

use altiplano_ir::array::{attention_of_heads, causal_mask};
use altiplano_ir::autodiff::differentiate;
use altiplano_ir::dtype::DType;
use altiplano_ir::expand::expand;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::run_all;
use altiplano_ir::kernels::{Kernel, KernelKind, kernels};
use altiplano_ir::op::*;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use altiplano_runtime::devices::cuda::{Argument, Compiler, Context, Driver, Search};
use altiplano_runtime::loops::cuda::text;
use altiplano_runtime::loops::interpret::{Memory, run};
use altiplano_runtime::loops::{Launch, Source, launches};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

include!("attention/cases.rs");

/// All values of a graph with synthetic leaves.
fn known(graph: &Graph) -> Vec<Tensor> {
    run_all(graph, |v| values(graph.ty(v), u64::from(v.0) + 1))
}

/// The memory that a launch reads.
fn before(launch: &Launch, known: &[Tensor]) -> Memory {
    let read = launch.params.iter().filter(|p| !p.written).map(|p| &p.source);
    let of = |source: &Source| {
        let (Source::Value(v) | Source::Constant(v) | Source::Selected(v)) = *source;
        (source.clone(), known[v.index()].data.clone())
    };
    read.map(of).collect()
}

/// Runs the launches of a kernel on the values that it reads, and compares the values that it writes.
fn agrees(graph: &Graph, known: &[Tensor], kernel: &Kernel, made: &[Launch]) {
    let mut memory = Memory::new();
    for launch in made {
        // Values that one launch writes are not replaced for the others.
        for (source, data) in before(launch, known) {
            memory.entry(source).or_insert(data);
        }
        run(launch, &[], &mut memory);
    }
    for &w in &kernel.writes {
        let (expected, got) = (&known[w.index()].data, &memory[&Source::Value(w)]);
        let most = expected.iter().fold(1.0f64, |m, x| m.max(x.abs()));
        let near = |(a, b): (&f64, &f64)| a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-5 * most;
        let wrong = expected.iter().zip(got).position(|pair| !near(pair));
        assert!(wrong.is_none() && expected.len() == got.len(), "{w} [{wrong:?}] of {}", graph.name);
    }
}

#[test]
fn attention_is_launches_over_tiles() {
    for case in cases(DType::F32) {
        let (graph, written) = case.graph();
        let all = kernels(&graph, &written, true);
        let fused: Vec<&Kernel> = all.iter().filter(|k| matches!(k.kind, KernelKind::Attention(_))).collect();
        assert!(!fused.is_empty(), "{}: {all:?}", case.name);
        let (mut count, known) = (0, known(&graph));
        for kernel in fused {
            let made = launches(&graph, kernel).unwrap_or_else(|why| panic!("{}: {why}", case.name));
            count += made.len();
            agrees(&graph, &known, kernel, &made);
        }
        assert_eq!(count, if case.backward { 3 } else { 1 }, "{}", case.name);
    }
}

/// The emulator of a GPU in its own folder. Without g++ it prints a notice and returns `None`.
fn emulator(test: &str) -> Option<(Search, PathBuf)> {
    let folder = std::env::temp_dir().join(format!("altiplano-attention-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/emulated.cpp");
    let library = folder.join("libcuda.so.1");
    let options = ["-w", "-std=c++17", "-O1", "-shared", "-fPIC", "-o"];
    match Command::new("g++").args(options).arg(&library).arg(&source).status() {
        Ok(status) => assert!(status.success(), "{} compiles", source.display()),
        Err(error) => {
            eprintln!("SKIPPED: there is no g++: {error}");
            return None;
        }
    }
    let link = folder.join("libnvrtc.so.13");
    if !link.exists() {
        std::os::unix::fs::symlink(&library, link).expect("a link");
    }
    Some((Search { folders: vec![folder.clone()] }, folder))
}

fn to_bytes(dtype: DType, data: &[f64]) -> Vec<u8> {
    data.iter().flat_map(|&x| dtype.to_bits(dtype.round(x)).to_le_bytes()[..dtype.bytes() as usize].to_vec()).collect()
}

fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let element = |chunk: &[u8]| {
        let mut bits = [0; 8];
        bits[..chunk.len()].copy_from_slice(chunk);
        dtype.from_bits(u64::from_le_bytes(bits))
    };
    bytes.chunks_exact(dtype.bytes() as usize).map(element).collect()
}

/// The text itself, run by the threads of a block, computes what the launch means. Sums are in single precision, and
/// tensor cores round their operands to their type. If sums cancel, that is a few roundings of the largest term.
#[test]
fn texts_of_attention_compute_what_launches_mean() {
    texts("some", |dtype, name| match dtype {
        DType::F32 => name == "gradients where rows see nothing",
        DType::BF16 => ["crossed with a bias", "gradients in groups"].contains(&name),
        _ => name == "causal",
    });
}

/// All cases in every type. This takes minutes; `tests/oracle/run kernels` runs it.
#[test]
#[ignore = "compiles a hundred kernels with g++"]
fn texts_of_all_attention_compute_what_launches_mean() {
    texts("all", |_, _| true);
}

fn texts(test: &str, wanted: impl Fn(DType, &str) -> bool) {
    let Some((search, folder)) = emulator(test) else { return };
    let driver = Driver::open(&search).expect("the emulator");
    let gpu = driver.gpus().expect("a GPU").remove(0);
    let context = Context::new(&driver, &gpu).expect("a context");
    context.make_current().expect("a context");
    let stream = context.stream().expect("a stream");
    let compiler = Compiler::open(&search, None).expect("a compiler");
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::BF16, 4.0 / 256.0), (DType::F16, 4.0 / 2048.0)] {
        for case in cases(dtype).iter().filter(|c| wanted(dtype, c.name)) {
            let (graph, written) = case.graph();
            let known = known(&graph);
            for kernel in kernels(&graph, &written, true) {
                if !matches!(kernel.kind, KernelKind::Attention(_)) {
                    continue;
                }
                let made = launches(&graph, &kernel).unwrap_or_else(|why| panic!("{}: {why}", case.name));
                for launch in &made {
                    // Values that other launches write are synthetic too, so that each launch is compared alone.
                    let memory = before(launch, &known);
                    let mut expected = memory.clone();
                    run(launch, &[], &mut expected);
                    let text = text(launch).expect("a text");
                    // Tiles that a causal mask hides are skipped.
                    let hides = matches!(case.mask, Mask::Causal | Mask::Late);
                    assert_eq!(text.source.contains("__syncthreads_or"), hides, "{}", case.name);
                    let images = compiler.compile([&text], gpu.architecture).expect("it compiles").images;
                    let function = context.function(&text.name, &images[&text.name], text.shared_bytes);
                    let function = function.expect("it is loaded");
                    let mut places = Vec::new();
                    for param in &launch.params {
                        let data = memory.get(&param.source).cloned();
                        let data = data.unwrap_or_else(|| vec![f64::NAN; param.elements as usize]);
                        let bytes = to_bytes(param.dtype, &data);
                        let place = context.allocate("a parameter", bytes.len() as u64).expect("memory");
                        let address = place.range(0, bytes.len() as u64).expect("it is that large");
                        // SAFETY: both stay allocated until the stream is done.
                        unsafe { stream.upload(address, bytes.as_ptr(), bytes.len() as u64) }.expect("an upload");
                        stream.synchronize().expect("it is there");
                        places.push((place, address));
                    }
                    let arguments: Vec<Argument> = places.iter().map(|p| Argument::Address(p.1)).collect();
                    // SAFETY: the arguments are the kernel's parameters, and stay allocated until the stream is done.
                    unsafe { stream.launch(&function, 2, text.threads, &arguments) }.expect("a launch");
                    stream.synchronize().expect("it is done");
                    for (param, (_, address)) in launch.params.iter().zip(&places).filter(|(p, _)| p.written) {
                        let mut bytes = vec![0; (param.elements * param.dtype.bytes()) as usize];
                        // SAFETY: as above.
                        unsafe { stream.download(bytes.as_mut_ptr(), *address, bytes.len() as u64) }
                            .expect("a download");
                        stream.synchronize().expect("it is here");
                        let (got, wanted) = (from_bytes(param.dtype, &bytes), &expected[&param.source]);
                        let most = wanted.iter().fold(0.0f64, |m, x| m.max(x.abs()));
                        let off = got.iter().zip(wanted).map(|(a, b)| (a - b).abs());
                        let worst = off.fold(0.0, |m: f64, x| if x > m || x.is_nan() { x } else { m });
                        println!("{dtype} {}: {worst:e} of {most:e}, {} bytes", case.name, text.shared_bytes);
                        assert!(worst <= tolerance * most, "{dtype} {}: {worst:e} of {most:e}", case.name);
                    }
                }
            }
        }
    }
    std::fs::remove_dir_all(folder).expect("the folder goes");
}

//! The command line's way of each kind of file, as far as its target goes. Each function panics where the project is at
//! fault, and returns whether the input has the target's format. Tests go the same ways with the inputs that are kept.

use altiplano::cost_models::profile::Profile;
use altiplano::cost_models::{probe, toml_file};
use altiplano::fidelity::{Recomputation, calibrate, fidelity, read_kernel_table};
use altiplano::import::{onnx::held, torch_export::weights};
use altiplano::ir::cluster::Cluster;
use altiplano::ir::graph::Graph;
use altiplano::ir::plan::graph_hash;
use altiplano::measured_costs::plan_by;
use altiplano::planner::Silent;
use altiplano::runtime::array_file::ArrayFile;
use altiplano::runtime::data;
use altiplano::stacks::judge::{How, judge_text};
use altiplano::training::checkpoint::{MANIFEST, Manifest, verify};
use altiplano::training::{Training, train};
use altiplano::{
    Error, Format, ImportOptions, Model, cluster_of, load_cluster, model_of, plan, plan_of, programs, report, request,
};
use serde::Deserialize;
use serde_json::Value;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use zip::write::{SimpleFileOptions, ZipWriter};

/// Reads a model of this format. What is refused must be the file's fault; what is accepted must print. Where the command
/// line advises options, they are given: which argument is trained, and what a model without a loss gets for one.
pub fn model(bytes: &[u8], format: Format) -> bool {
    if Format::of(bytes) != format {
        return false;
    }
    let mut options = ImportOptions::default();
    loop {
        match model_of(Path::new("model"), bytes, &options) {
            Ok(model) => {
                assert_eq!(model.graph.verify(), [], "what was imported is no valid graph");
                let _ = model.graph.to_string();
                let has_loss = model.graph.outputs.iter().all(|v| model.graph.ty(*v).rank() == 0);
                if has_loss || options.loss.is_some() {
                    return true;
                }
                options.loss = Some("cross-entropy".to_string());
            }
            Err(error) => {
                refused(&error);
                match error {
                    Error::Arguments { .. } if options.params.is_empty() => options.params.push("0".to_string()),
                    Error::Attach { .. } => options.loss = Some("none".to_string()),
                    _ => return true,
                }
            }
        }
    }
}

pub fn onnx(bytes: &[u8]) -> bool {
    let _ = held(bytes, &|_, _| None);
    model(bytes, Format::Onnx)
}

/// An archive, or the program in one: what changes text must not have to keep the archive's sums right.
pub fn torch_export(bytes: &[u8]) -> bool {
    if bytes.starts_with(b"{") {
        return model(&archive(bytes), Format::TorchExport);
    }
    let _ = weights(bytes);
    model(bytes, Format::TorchExport)
}

/// An archive of this program. Whatever else an archive holds is read by name, and has seeds of its own.
fn archive(program: &[u8]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let entry = zip.start_file("m/models/model.json", stored).and_then(|()| Ok(zip.write_all(program)?));
    entry.expect("a zip file of one entry");
    zip.finish().expect("a zip file of one entry").into_inner()
}

/// A plan file as it is, and with the hash that belongs to its graph.
pub fn plan_file(bytes: &[u8]) -> bool {
    if Format::of(bytes) != Format::PlanJson {
        return false;
    }
    read_plan(bytes);
    if let Some(text) = forged(bytes) {
        read_plan(text.as_bytes());
    }
    true
}

/// The document with the hash that belongs to the graph in it: whoever forges a plan forges the hash too, and behind it
/// there is more to reach.
fn forged(bytes: &[u8]) -> Option<String> {
    let mut document: Value = serde_json::from_slice(bytes).ok()?;
    let graph = Graph::deserialize(document.get("graph")?).ok()?;
    *document.get_mut("graph_hash")? = Value::String(graph_hash(&graph));
    Some(document.to_string())
}

fn read_plan(bytes: &[u8]) {
    match plan_of(Path::new("plan.json"), bytes) {
        Ok(plan) => {
            let _ = report(&plan);
            if let Err(error) = programs(&plan) {
                panic!("a plan that was read has no programs: {error}");
            }
        }
        Err(error) => refused(&error),
    }
}

/// Limits of [`plan_and_step`], so that a step takes milliseconds.
const MOST_NODES: usize = 300;
const MOST_ELEMENTS: u64 = 100_000;
const MOST_WORK: u64 = 50_000_000;

fn is_small(graph: &Graph) -> bool {
    let mut work = 0u64;
    graph.nodes.len() <= MOST_NODES
        && graph.values().all(|value| {
            work = work.saturating_add(graph.work(value));
            graph.ty(value).elements() <= MOST_ELEMENTS && work <= MOST_WORK
        })
}

/// Four bytes of options, then a model: it is planned for four workers, the plan is written and read back, and one step of
/// it runs.
pub fn plan_and_step(bytes: &[u8]) -> bool {
    let Some((options, text)) = bytes.split_at_checked(4) else { return false };
    if ![Format::StableHlo, Format::GraphJson].contains(&Format::of(text)) {
        return false;
    }
    let Ok(model) = model_of(Path::new("model"), text, &ImportOptions::default()) else { return false };
    if !is_small(&model.graph) {
        return false;
    }
    let mut asked = request(&model, load_cluster("local:4").expect("a preset"));
    let degree = |byte: u8| [None, Some(1), Some(2), Some(4)][usize::from(byte % 4)];
    asked.degrees.dp = degree(options[0]);
    asked.degrees.tp = degree(options[0] / 4);
    asked.degrees.pp = degree(options[0] / 16);
    asked.degrees.zero = [None, Some(1), Some(2), Some(3)][usize::from(options[1] % 4)];
    asked.batch.num_microbatches = [None, Some(1), Some(2), Some(4)][usize::from(options[2] % 4)];
    asked.allow_microbatch_semantics = options[3] % 2 == 1;
    asked.pad = options[3] & 2 != 0;
    let found = match plan(&asked, &Silent) {
        Ok(found) => found,
        // That there is no plan is an answer too.
        Err(error) => {
            let _ = error.to_string();
            return true;
        }
    };
    let read = match plan_of(Path::new("plan.json"), found.to_json().as_bytes()) {
        Ok(read) => read,
        Err(error) => panic!("a plan that was written is not read: {error}"),
    };
    let training = Training { steps: 1, learning_rate: 1e-3, ..Training::default() };
    match train(&read, &training, |_| Ok(())) {
        Ok(_) | Err(Error::Diverged { .. } | Error::NaN { .. }) => {}
        Err(error) => refused(&error),
    }
    true
}

/// A step that every machine can hold, for the machines of cluster files.
const STEP: &str = "func.func @main(%w: tensor<8x8xf32>, %x: tensor<8x8xf32>) -> tensor<f32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.constant dense<0.0> : tensor<f32>
  %2 = stablehlo.reduce(%0 init: %1) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x8xf32>, tensor<f32>) -> tensor<f32>
  return %2 : tensor<f32>
}";

/// A search on more devices than these takes longer than a fuzzer should wait for.
const MOST_DEVICES: u32 = 64;

/// A letter for the kind of file, then a file that is neither a model nor a plan.
pub fn other_file(bytes: &[u8]) -> bool {
    let Some((kind, content)) = bytes.split_first() else { return false };
    let text = String::from_utf8_lossy(content);
    match kind {
        b'c' => cluster(&text),
        b'd' => drop(toml_file::parse_devices(&text)),
        b'g' => listing(&text),
        b'm' => manifest(&text),
        b'n' => with_file(content, "npy", array),
        b's' => with_file(content, "safetensors", array),
        b't' => with_file(content, "csv", |file| {
            let _ = fidelity(file, Recomputation::Inferred, Default::default());
        }),
        b'k' => with_file(content, "csv", |file| {
            if let Ok(Some(table)) = read_kernel_table(file, &Default::default()) {
                let _ = table.errors();
            }
        }),
        b'j' => judged(&text),
        b'p' => profile(&text),
        b'r' => with_file(content, "json", |file| drop(calibrate(&[file.to_path_buf()]))),
        _ => return false,
    }
    true
}

/// Calls a function with a file of this content, which is removed afterwards.
fn with_file(content: &[u8], extension: &str, read: impl FnOnce(&Path)) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = format!("altiplano-fuzz-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let file: PathBuf = std::env::temp_dir().join(name).with_extension(extension);
    std::fs::write(&file, content).expect("a file among the temporary ones");
    read(&file);
    std::fs::remove_file(&file).expect("a file that can be removed");
}

/// A cluster that is read can be written and read again, and a step can be planned on it.
fn cluster(text: &str) {
    let Ok(read) = cluster_of(Path::new("cluster.toml"), text) else { return };
    written_and_read(&read);
    if read.num_devices() <= MOST_DEVICES
        && let Ok(found) = plan(&request(&step(), read), &Silent)
    {
        let _ = report(&found);
        let _ = programs(&found).expect("the programs of a plan");
    }
}

fn step() -> Model {
    let options = ImportOptions { params: vec!["0".to_string()], ..ImportOptions::default() };
    model_of(Path::new("model"), STEP.as_bytes(), &options).expect("a model")
}

fn written_and_read(cluster: &Cluster) {
    let text = toml_file::print(cluster);
    if let Err(error) = cluster_of(Path::new("cluster.toml"), &text) {
        panic!("a cluster that was written is not read: {error}\n{text}");
    }
}

/// A configuration of a training stack, as far as its prediction: the search for changes is many such.
fn judged(text: &str) {
    let how = How { only_predict: true, ..How::default() };
    if let Ok(judgement) = judge_text(Path::new("config"), text, &how) {
        let _ = judgement.text(None);
    }
}

/// A profile, and a plan by it.
fn profile(text: &str) {
    let Ok(profile) = Profile::from_json(text) else { return };
    let request = request(&step(), load_cluster("local:2").expect("a preset"));
    if let Ok(found) = plan_by(&request, Some(&profile), &Silent) {
        let _ = report(&found);
    }
}

/// The output of NVIDIA's tools: GPUs, their connections, a log of collectives. One text is tried as all of them.
fn listing(text: &str) {
    let connections = probe::parse_topology(text).ok();
    let measured = probe::parse_nccl_tests(text).ok();
    let a100 = probe::Gpu { name: "NVIDIA A100-SXM4-80GB".to_string(), memory_bytes: 80 << 30 };
    let gpus = probe::parse_gpus(text).unwrap_or(vec![a100; 8]);
    if let Ok(mut group) = probe::gpu_group(2, &gpus, connections.as_ref(), &[]) {
        if let Some(measured) = &measured {
            let _ = probe::fit(&mut group, measured);
        }
        written_and_read(&Cluster {
            name: "probed".to_string(),
            groups: vec![group],
            between_groups: None,
            storage: None,
        });
    }
    let _ = (probe::parse_rate(text), probe::parse_cores(text), probe::parse_memory(text));
}

/// A manifest as it is, and with the checksum that belongs to it; then a folder that has it and none of its files.
fn manifest(text: &str) {
    let _ = Manifest::from_json(text);
    let Ok(value) = serde_json::from_str::<Manifest>(text) else { return };
    let sealed = value.to_json();
    let _ = Manifest::from_json(&sealed);
    with_file(&[], "folder", |beside| {
        let folder = beside.with_extension("checkpoint");
        std::fs::create_dir(&folder).expect("a folder among the temporary ones");
        std::fs::write(folder.join(MANIFEST), sealed).expect("a manifest");
        assert!(value.files.is_empty() || verify(&folder).is_err(), "files that are not there were verified");
        std::fs::remove_dir_all(&folder).expect("a folder that can be removed");
    });
}

/// Tensors read at once and in parts are the same.
fn array(file: &Path) {
    let whole = data::read(file);
    let parts = match file.extension().and_then(|e| e.to_str()) {
        Some("npy") => ArrayFile::npy(file).map(|array| vec![array]),
        _ => ArrayFile::safetensors(file).map(|arrays| arrays.into_values().collect()),
    };
    let (whole, parts) = match (whole, parts) {
        (Ok(whole), Ok(parts)) => (whole, parts),
        (Err(_), Err(_)) => return,
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => panic!("one reader takes what the other refuses: {error}"),
    };
    for (tensor, part) in whole.values().zip(parts) {
        assert_eq!(tensor.ty, part.ty);
        let read = part.read(0, part.ty.elements()).expect("elements of a file that was opened");
        assert_eq!(read.as_bytes(), tensor.data.as_bytes());
    }
}

/// An error must be one that the command line explains as a mistake in the file.
fn refused(error: &Error) {
    assert!(error.is_usage(), "{error}");
    let _ = error.to_string();
}

//! The command line's way of each kind of file, as far as its target goes. Each function panics where the project is at
//! fault, and returns whether the input has the target's format. Tests go the same ways with the inputs that are kept.

use altiplano::import::{onnx::held, torch_export::weights};
use altiplano::ir::graph::Graph;
use altiplano::ir::plan::graph_hash;
use altiplano::planner::Silent;
use altiplano::training::{Training, train};
use altiplano::{Error, Format, ImportOptions, load_cluster, model_of, plan, plan_of, programs, report, request};
use serde::Deserialize;
use serde_json::Value;
use std::io::{Cursor, Write};
use std::path::Path;
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
const MOST_FLOP: u64 = 20_000_000;

fn is_small(graph: &Graph) -> bool {
    let mut flop = 0u64;
    graph.nodes.len() <= MOST_NODES
        && graph.values().all(|value| {
            flop = flop.saturating_add(graph.flop(value));
            graph.ty(value).elements() <= MOST_ELEMENTS && flop <= MOST_FLOP
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

/// An error must be one that the command line explains as a mistake in the file.
fn refused(error: &Error) {
    assert!(error.is_usage(), "{error}");
    let _ = error.to_string();
}

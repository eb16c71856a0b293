//! Predicts the step of one row: builds its model from a config, plans it with the row's degrees, and predicts the
//! plan.

use super::table::{MicroBatch, Row, RowModel, TableError};
use crate::{Error, ImportOptions, Model, load_cluster, model_of, read_bytes, request};
use altiplano_cost_models::pipeline::Order;
use altiplano_cost_models::{CostModel, Costs, Devices, Roofline, Rooflines};
use altiplano_ir::batch::rebatch;
use altiplano_ir::cluster::{Architecture, Device};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Graph;
use altiplano_ir::plan::{AttentionKernels, Execution, Plan, Schedule, Target};
use altiplano_ir::recompute::Recompute;
use altiplano_planner::features::target::execution;
use altiplano_planner::lower::{DedupedPrograms, TrainingGraphs, lower_deduped};
use altiplano_planner::predict::timing::BodyWork;
use altiplano_planner::search::fixed_degrees::{Degrees, fixed};
use altiplano_planner::search::layout::Layout;
use altiplano_planner::search::stated::{Stated, predict_stated};
use altiplano_planner::{PlanFailure, Request, pin_positions, predict};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Alignment to which Megatron-LM and similar software pad the vocabulary of each tensor-parallel device
/// (`--make-vocab-size-divisible-by`).
const VOCABULARY_BLOCK: u64 = 128;

/// Cached models by config, and devices that override the catalogue.
#[derive(Default)]
pub struct RowPredictor {
    models: Mutex<HashMap<String, Arc<Model>>>,
    devices: Devices,
}

impl RowPredictor {
    pub fn new(devices: Devices) -> RowPredictor {
        RowPredictor { devices, ..RowPredictor::default() }
    }

    fn model(&self, row: &Row) -> Result<Arc<Model>, Error> {
        let config = config(row)?;
        let key = format!("{config} {} {:?}", row.seq, row.capacity);
        if let Some(model) = self.models.lock().ok().and_then(|m| m.get(&key).cloned()) {
            return Ok(model);
        }
        let options = ImportOptions {
            sequence: Some(row.seq),
            precision: dtype(row),
            capacity_factor: row.capacity,
            ..ImportOptions::default()
        };
        let model = Arc::new(model_of(Path::new(&row.model.name()), config.as_bytes(), &options)?);
        if let Ok(mut models) = self.models.lock() {
            models.insert(key, model.clone());
        }
        Ok(model)
    }
}

fn dtype(row: &Row) -> Option<DType> {
    match row.dtype.as_str() {
        "f16" => Some(DType::F16),
        "bf16" => Some(DType::BF16),
        _ => None,
    }
}

/// The config of a row's model, as text. A table's own config has another number of layers if the row states one.
/// Otherwise the model's name tells the family: Llama-like models have gated MLPs, rotary positions and an untied head;
/// Nemotron has squared ReLUs. All others are GPTs with learned positions and a tied head.
fn config(row: &Row) -> Result<String, Error> {
    let (name, layers, hidden, heads, kv_heads, ffn, vocab) = match &row.model {
        RowModel::Config { file, layers } => {
            let bytes = read_bytes(file)?;
            let parsed = serde_json::from_slice(&bytes).ok();
            return Ok(match (parsed, layers) {
                (Some(serde_json::Value::Object(mut config)), Some(layers)) => {
                    config.insert("num_hidden_layers".into(), json!(layers));
                    serde_json::Value::Object(config).to_string()
                }
                // The importer says what is wrong with a text that is no object.
                _ => String::from_utf8_lossy(&bytes).into_owned(),
            });
        }
        RowModel::Sizes { name, layers, hidden, heads, kv_heads, ffn, vocab } => {
            (name.to_lowercase(), layers, hidden, heads, kv_heads.unwrap_or(*heads), ffn.unwrap_or(4 * hidden), *vocab)
        }
    };
    let block = VOCABULARY_BLOCK * u64::from(row.tp);
    let vocabulary = if row.tp > 1 { vocab.div_ceil(block) * block } else { vocab };
    let gated = ["llama", "mistral", "qwen"].iter().any(|family| name.contains(family));
    Ok(match gated || name.contains("nemotron") {
        true => json!({
            "model_type": if gated { "llama" } else { "nemotron" }, "num_hidden_layers": layers, "hidden_size": hidden,
            "vocab_size": vocabulary, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "intermediate_size": ffn, "max_position_embeddings": row.seq,
        }),
        false => json!({
            "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": row.seq,
            "vocab_size": vocabulary, "n_inner": ffn,
        }),
    }
    .to_string())
}

/// A row prepared for prediction under any constants: the work of its devices, without the graphs from which it came.
pub struct Prepared {
    /// The microbatch sizes that the row may stand for; the fastest counts.
    sizes: Vec<Size>,
}

struct Size {
    plan: Plan,
    deduped: DedupedPrograms<'static>,
    work: Vec<Vec<BodyWork>>,
    order: Order,
}

impl Prepared {
    /// `recompute` overrides the recomputation that the row states.
    pub fn new(row: &Row, predictor: &RowPredictor, recompute: Recompute) -> Result<Prepared, TableError> {
        let sizes = match row.micro_batch {
            MicroBatch::Of(size) => vec![size],
            MicroBatch::Best => {
                let per_replica = row.global_batch / u64::from(row.dp);
                let fills = |size: &u64| per_replica % size == 0 && size * u64::from(row.pp) <= per_replica;
                let sizes: Vec<u64> = (0..=5).map(|i| 1 << i).filter(fills).collect();
                if sizes.is_empty() { vec![1] } else { sizes }
            }
        };
        let sizes = sizes.into_iter().map(|size| prepare(row, size, predictor, recompute)).collect::<Result<_, _>>()?;
        Ok(Prepared { sizes })
    }

    /// The device of the row's machine.
    pub fn device(&self) -> &Device {
        &self.sizes[0].plan.cluster.groups[0].device
    }

    /// Predicted seconds of a step.
    pub fn step_s(&self, costs: &dyn Costs) -> f64 {
        let seconds = |size: &Size| {
            let timings = predict::timings_of(&size.plan, &size.deduped, &size.work, costs);
            predict::played_alone(&timings, &size.order, &mut |_, _, _, _| {}).step_s
        };
        self.sizes.iter().map(seconds).fold(f64::INFINITY, f64::min)
    }
}

fn prepare(row: &Row, micro_batch: u64, predictor: &RowPredictor, recompute: Recompute) -> Result<Size, TableError> {
    let boxed = |error: Error| TableError::Model(Box::new(error));
    let failed = |failure: PlanFailure| boxed(failure.into());
    let model = predictor.model(row).map_err(boxed)?;
    let together = micro_batch * u64::from(row.dp);
    let mut cluster = load_cluster(&row.cluster).map_err(boxed)?;
    let _ = predictor.devices.apply(&mut cluster);
    // The framework's choices must not depend on the constants under test.
    let cost = Roofline::new(Device { constants: None, ..cluster.groups[0].device.clone() });
    let mut wanted = request(&model, cluster);
    wanted.execution = execution_of(row, &wanted, cost.device());
    wanted.schedule = Some(if row.schedule == "gpipe" { Schedule::GPipe } else { Schedule::OneFOneB });
    let num_microbatches = (row.global_batch / together) as u32;
    let degrees = Degrees {
        dp: row.dp,
        tp: row.tp,
        cp: row.cp,
        stages: row.pp * row.virtual_stages,
        virtual_stages: row.virtual_stages,
        num_microbatches,
        zero: row.zero,
        recompute,
        layout: Layout::Even,
        experts: if row.dp.is_multiple_of(row.ep.max(1)) { row.ep.max(1) } else { 1 },
        groups: 1,
        // Megatron-LM demands sequence parallelism where experts and tensor parallelism meet.
        sequence: row.tp > 1 && row.ep > 1,
    };
    let mut plan = match row.model {
        RowModel::Sizes { .. } => {
            let mut graph = rebatch(&model.graph, together)
                .map_err(|value| boxed(Error::rebatch(&model.graph, together, value)))?;
            pin_positions(&mut graph, row.cp);
            let wanted = Request { graph: graph.with_free_pins().into(), ..wanted };
            fixed(&wanted, &degrees, &cost).map_err(failed)?
        }
        RowModel::Config { .. } => {
            wanted.batch.global = Some(row.global_batch);
            let stated = Stated {
                degrees,
                ep: row.ep,
                etp: Some(row.tp),
                blocks: None,
                full_blocks: None,
                splits_positions: true,
            };
            predict_stated(&wanted, &stated, &Rooflines::of(&wanted.cluster)).map_err(failed)?
        }
    };
    let derived = TrainingGraphs::of(&plan);
    let mut deduped = lower_deduped(&plan, &derived.map_err(|e| failed(e.into()))?, &cost, true);
    let work = predict::work_of(&plan, &deduped, &cost);
    // The graphs are no longer needed.
    plan.graph = Graph::new("").into();
    plan.stages.iter_mut().for_each(|s| s.shardings.clear());
    deduped.programs.to_mut().programs.iter_mut().for_each(|p| p.bodies.clear());
    let order = Order::of(&plan);
    Ok(Size { plan, deduped, work, order })
}

/// How software runs a row: PyTorch's FSDP where replicas share parameters, and Megatron-LM elsewhere.
fn execution_of(row: &Row, request: &Request, device: &Device) -> Execution {
    let fused_attention = row.fused_attention.unwrap_or_else(|| fused_when_new(device));
    match row.zero {
        3 => Execution {
            fused_attention,
            // Published rows run TransformerEngine's kernels.
            attention: AttentionKernels::Newest,
            ..execution(Target::Fsdp, &request.cluster, &request.graph, Some(3))
        },
        zero => Execution {
            bucket_bytes: u64::MAX,
            overlap: zero > 0,
            fused_attention,
            fused_loss: false,
            gradients: dtype(row),
            ..Execution::default()
        },
    }
}

/// For rows that do not say: true if software had fused attention when a device was new. Tables of measured steps date
/// from that time. Those of A100 come from Megatron-LM in 2021 to 2023, which wrote scores. Those of H100 come from
/// software after FlashAttention (2022).
fn fused_when_new(device: &Device) -> bool {
    match device.generation() {
        Some(Architecture::Nvidia(capability)) => capability >= 89,
        Some(Architecture::Amd(number)) => number >= 0x940,
        None => false,
    }
}

//! Altiplano plans how the training of a large model is split over devices, explains the plan, and runs it.
//!
//! A model is a file that a framework exported, a cluster a preset or a TOML file. [`plan`] searches for the fastest
//! way to train the one on the other. [`report`] describes the plan in words, and the [`runtime`] executes it on CPU
//! workers.
//!
//! ```
//! use altiplano::{ImportOptions, load_cluster, load_model, plan, report, request};
//! use altiplano::planner::Silent;
//!
//! let model = load_model("examples/models/gpt-small-demo.mlir".as_ref(), &ImportOptions::default())?;
//! let mut request = request(&model, load_cluster("local:4")?);
//! request.degrees.pp = Some(2);
//! let plan = plan(&request, &Silent)?;
//! assert_eq!(plan.num_lanes(), 2);
//! assert!(report(&plan).contains("stage1"));
//! # Ok::<(), altiplano::Error>(())
//! ```
//!
//! The crates behind it are re-exported under short names: [`ir`] (graphs, shardings, plans, programs),
//! [`import`], [`transforms`], [`cost_models`], [`planner`] and [`runtime`].

#![forbid(unsafe_code)]

pub mod advice;
pub mod arguments;
pub mod certify;
mod cluster;
pub mod compare;
mod error;
pub mod export;
pub mod fidelity;
pub mod inference;
mod loss;
pub mod measured_costs;
mod model;
pub mod pairs;
pub mod pins;
mod plan_diff;
mod plan_file;
pub mod precision;
mod printable;
pub mod prove;
mod report;
pub mod rounding;
pub mod scale;
pub mod simulate;
pub mod stacks;
pub mod suggestions;
pub mod survive;
pub mod training;
pub mod trials;
pub mod units;
pub mod verify;

pub use altiplano_cost_models as cost_models;
pub use altiplano_import as import;
pub use altiplano_ir as ir;
pub use altiplano_planner as planner;
pub use altiplano_runtime as runtime;
pub use altiplano_transforms as transforms;

pub use cluster::{cluster_of, load_cluster, load_devices};
pub use error::{DataProblem, Error, Names, OptionsProblem};
pub use model::{Format, GivenStep, ImportOptions, Model, Warning, load_all_results, load_model, model_of, read_bytes};
pub use plan_diff::moved;
pub use plan_file::{by_cluster, expect_writable, load_plan, open_cache, plan_of, write_file};
pub use planner::{plan, programs};
pub use printable::printable;
pub use report::{
    Asked, Look, answer, answer_as, figures, frontier_json, frontier_text, held, kernels_text, one_line, page_html,
    plan_dot, programs as programs_text, report, report_as, side_by_side, tape_text, why_stage, why_text,
};

use altiplano_ir::cluster::Cluster;
use altiplano_ir::plan::Schedule;
use altiplano_planner::Request;

/// A planning request in which everything is searched; set its fields to fix choices.
pub fn request(model: &Model, cluster: Cluster) -> Request {
    let mut request = Request::new(model.name.clone(), model.graph.clone(), model.loss, cluster);
    request.stop_gradients = model.stop_gradients.clone();
    request.schedule = model.inference.then_some(Schedule::Forward);
    request.reduction = model.reduction;
    if let Some(fitted) = model.optimizer {
        request.training.optimizer = fitted.optimizer;
        request.training.clip_norm = fitted.clip_norm;
    }
    request
}

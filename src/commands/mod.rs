//! The subcommands, and the writing to stdout that they share.

pub mod advise;
pub mod bench_input;
pub mod calibrate;
pub mod checkpoint;
pub mod clusters;
pub mod compare;
pub mod completions;
pub mod config;
pub mod demo;
pub mod devices;
pub mod fidelity;
pub mod import;
pub mod inspect;
pub mod man;
pub mod options;
pub mod plan;
pub mod probe;
pub mod profile;
pub mod ranks;
pub mod rate;
pub mod run;
pub mod scale;
pub mod show;
pub mod simulate;
pub mod verify;
pub mod why;
pub mod why_not;

use crate::progress::Bar;
use altiplano::ir::plan::Plan;
use altiplano::planner::{PlanFailure, Request};
use altiplano::remedies::{Explained, failure_json, fixes, shortage};
use altiplano::{Error, Model, by_cluster, load_plan};
use std::fmt::Display;
use std::io::Write;
use std::path::Path;

/// Keeps what a search learned for later ones, if it was asked to. Where that fails nothing is lost but time.
pub fn keep_searches(request: &Request) {
    let Some(cache) = &request.cache else { return };
    if let Err(error) = cache.save() {
        eprintln!("warning: {}: {error}; what the search found is not kept", cache.file().display());
    }
}

/// Writes a line to stdout; a reader that has gone away is an error like any other, which `main` takes for the end.
fn say(text: impl Display) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Error::Output)
}

/// Says on stderr what was odd about a model.
fn warn(model: &Model) {
    for warning in &model.warnings {
        eprintln!("{}: {warning}", if warning.is_note() { "note" } else { "warning" });
    }
}

/// A plan that other plans are set beside, which no profile can judge alike: it is judged by the figures of its cluster, as they are.
fn load_to_ask(file: &Path) -> Result<Plan, Error> {
    let plan = load_plan(file)?;
    if let Some(measured) = &plan.profile {
        eprintln!(
            "note: the plan was judged by the {measured}; here it is by the cluster's figures, as all that is set beside it"
        );
    }
    by_cluster(plan)
}

/// Says on stderr, after a search that failed, what is short or in conflict, and which changes were planned and do work; as one JSON
/// document on stdout where that is asked for.
fn explain_failure(request: &Request, error: &Error, bar: &Bar, json: bool) -> Result<(), Error> {
    let Error::Plan(failure) = error else { return Ok(()) };
    let explained = match **failure {
        PlanFailure::Memory { required_bytes, .. } => {
            shortage(request, required_bytes, bar).ok().map(Explained::Memory)
        }
        _ => Some(Explained::Choices(fixes(request, bar))),
    };
    if json {
        return bar.suspend(|| say(failure_json(error, explained.as_ref())));
    }
    match explained {
        Some(Explained::Memory(shortage)) => bar.suspend(|| eprintln!("{shortage}")),
        Some(Explained::Choices(fixes)) if !fixes.is_empty() => {
            let lines: Vec<String> = fixes.iter().map(|fix| format!("\n  {fix}")).collect();
            bar.suspend(|| eprintln!("what has a plan instead, fastest first:{}", lines.concat()));
        }
        _ => {}
    }
    Ok(())
}

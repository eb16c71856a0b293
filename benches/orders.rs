//! Orders of calls that are found for pipelines, beside named schedules of the same stages, all predicted the same way.
//!
//!     cargo bench --bench orders -- PLAN.json...

use altiplano::cost_models::Rooflines;
use altiplano::ir::plan::{Plan, Schedule};
use altiplano::load_plan;
use altiplano::planner::lower::TrainingGraphs;
use altiplano::planner::search::ordered::ordered;
use altiplano::planner::{fits, predict_plan};
use std::path::Path;
use std::time::Instant;

fn main() {
    println!("| plan | stages x microbatches | schedule | s/step | of the named | GB of the fullest device |");
    println!("|---|--:|---|--:|--:|--:|");
    for file in std::env::args().skip(1).filter(|argument| !argument.starts_with("--")) {
        match load_plan(Path::new(&file)) {
            Ok(plan) => rows(&file, &plan),
            Err(error) => eprintln!("{file}: {error}"),
        }
    }
}

fn rows(file: &str, plan: &Plan) {
    let costs = Rooflines::of(&plan.cluster);
    let under = |schedule: Schedule| {
        let plan = predict_plan(Plan { schedule, order: None, ..plan.clone() }, &costs).ok()?;
        plan.verify().is_empty().then_some(plan)
    };
    let named: Vec<Plan> = match plan.virtual_stages {
        1 => [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1].into_iter().filter_map(under).collect(),
        _ => vec![plan.clone()],
    };
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let least_s = named.iter().filter(|plan| fits(plan)).map(step_s).fold(f64::INFINITY, f64::min);
    let row = |plan: &Plan, how: String| {
        let bytes = plan.predicted.peak_bytes.iter().copied().max().unwrap_or(0) as f64 / 1e9;
        let fits = if fits(plan) { "" } else { " (does not fit)" };
        let ratio = step_s(plan) / least_s;
        println!(
            "| {file} | {} x {} | {how} | {:.4} | {ratio:.4} | {bytes:.2}{fits} |",
            plan.stages.len(),
            plan.num_microbatches,
            step_s(plan)
        );
    };
    named.iter().for_each(|plan| row(plan, plan.schedule.to_string()));
    let Ok(graphs) = TrainingGraphs::of(plan) else { return };
    let start = Instant::now();
    let Some(found) = ordered(plan, &graphs, &costs) else {
        println!("| {file} | | none found | | | |");
        return;
    };
    let apart = (0..plan.stages.len()).filter(|&stage| found.plan.splits(stage)).count();
    let (bound, seconds) = (found.bound_s / least_s, start.elapsed().as_secs_f64());
    let how = format!("found in {seconds:.1} s, {apart} stages with weights apart, bound {bound:.4}");
    row(&found.plan, how);
}

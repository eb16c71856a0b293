//! Prints the Pareto frontier of plans as a table, and as JSON.

use super::Grid;
use crate::units::{digits, percent};
use altiplano_planner::explain::alternatives::shape;
use altiplano_planner::search::pareto::Point;
use serde_json::json;

/// A line per plan, fastest first.
pub fn frontier_text(points: &[Point]) -> String {
    let priced = points.iter().any(|p| p.price.is_some());
    let mut columns = vec!["plan", "s/step", "samples/s", "MFU", "GB/device", "devices", "how"];
    if priced {
        columns.insert(6, "price/step");
    }
    let mut table = Grid::new(&columns);
    for (i, point) in (1..).zip(points) {
        let p = &point.plan.predicted;
        let mut cells = vec![
            i.to_string(),
            digits(p.step_time_s),
            digits(p.samples_per_s),
            percent(p.mfu),
            digits(point.peak_bytes as f64 / 1e9),
            point.devices.to_string(),
            shape(&point.plan),
        ];
        if priced {
            cells.insert(6, point.price.map_or("-".to_string(), digits));
        }
        table.row(cells);
    }
    format!("{}\n  no plan that was found beats one of these in all columns at once", table.right_but_last())
}

/// An array with an object per plan.
pub fn frontier_json(points: &[Point]) -> String {
    let object = |point: &Point| {
        json!({
            "step_time_s": point.plan.predicted.step_time_s,
            "samples_per_s": point.plan.predicted.samples_per_s,
            "mfu": point.plan.predicted.mfu,
            "peak_bytes": point.peak_bytes,
            "devices": point.devices,
            "price_per_step": point.price,
            "cluster": point.plan.cluster.name,
            "how": shape(&point.plan),
        })
    };
    let all: Vec<_> = points.iter().map(object).collect();
    serde_json::to_string_pretty(&all).unwrap_or_default()
}

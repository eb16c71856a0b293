//! The dynamic program over stages on the inputs of real Alpa searches: the cost and memory of each compiled and
//! profiled (layers, submesh, configuration), and the plan that Alpa chose.

use altiplano::ir::plan::Schedule;
use altiplano::planner::inter_op::dynamic::{Candidate, Query, Room, StageTable, Stages, plan_stages};
use altiplano::planner::inter_op::submesh::{Block, SubmeshShape};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The unit of memory: a stage that allows `n` later stages takes 1/(n + 1) of it per microbatch.
const MEMORY: u64 = 1 << 40;

struct Run {
    devices: u32,
    num_microbatches: u32,
    /// Seconds of the logged plan, and of the best plan in the table.
    logged_s: f64,
    best_s: f64,
    /// Layers and devices of each stage, as logged.
    logged: Vec<(usize, usize, u64)>,
    table: StageTable,
}

/// `[('0-3', 4, '4x1'), ...]` as (first layer, end, devices).
fn stages(text: &str) -> Vec<(usize, usize, u64)> {
    let parts = text.split('(').skip(1).map(|part| {
        let mut fields = part.split([',', '\'']).map(str::trim).filter(|field| !field.is_empty());
        let (first, last) = fields.next().and_then(|range| range.split_once('-')).expect("a range of layers");
        let devices = fields.next().and_then(|n| n.parse().ok()).expect("devices");
        (first.parse().expect("a layer"), last.parse::<usize>().expect("a layer") + 1, devices)
    });
    parts.collect()
}

fn runs(folder: &std::path::Path) -> BTreeMap<u32, Run> {
    let rows = |name: &str| -> Vec<BTreeMap<String, String>> {
        let mut reader = csv::Reader::from_path(folder.join(name)).expect("a table");
        reader.deserialize().collect::<Result<_, _>>().expect("rows of named fields")
    };
    fn number<T: std::str::FromStr>(row: &BTreeMap<String, String>, name: &str) -> T {
        row[name].parse().ok().unwrap_or_else(|| panic!("{name} is {}", row[name]))
    }
    let block =
        |devices: u32| Block { group: 0, shape: SubmeshShape { nodes: devices.div_ceil(8), devices: devices.min(8) } };
    let mut runs: BTreeMap<u32, Run> = BTreeMap::new();
    for row in rows("dp_replay.csv") {
        let devices: u32 = number(&row, "gpus");
        let blocks = (0..).map(|n| 1_u32 << n).take_while(|&n| n <= devices).map(block).collect();
        let run = Run {
            devices,
            num_microbatches: number(&row, "B"),
            logged_s: number(&row, "predicted_s_of_logged_plan"),
            best_s: number(&row, "replayed_dp_optimum_s"),
            logged: stages(&row["logged_plan"]),
            table: StageTable::new(number(&row, "L"), blocks),
        };
        runs.insert(number(&row, "run"), run);
    }
    for row in rows("stage_cost_tables.csv") {
        let run = runs.get_mut(&number(&row, "run")).expect("a run that was replayed");
        let after: i64 = number(&row, "max_n_succ_stages");
        let devices = number::<u32>(&row, "submesh_hosts") * number::<u32>(&row, "submesh_devs");
        let blocks = &run.table.blocks;
        let at = blocks.iter().position(|b| b.shape.num_devices() == u64::from(devices)).expect("a submesh");
        // If it allows not even zero later stages, the configuration did not fit.
        if let Ok(after) = u64::try_from(after) {
            let candidate = Candidate {
                microbatch_s: number(&row, "cost_s"),
                step_s: 0.0,
                static_bytes: 0,
                bytes_per_inflight_microbatch: MEMORY / (after + 1),
                transient_bytes: 0,
                id: number(&row, "config_id"),
            };
            let end: usize = number(&row, "end_layer");
            run.table.push(number(&row, "start_layer"), end + 1, at, candidate);
        }
    }
    runs
}

fn solved(run: &Run) -> Stages {
    let room =
        Room { nodes: run.devices.div_ceil(8), devices_per_node: run.devices.min(8), device_memory_bytes: MEMORY };
    let query = Query {
        rooms: vec![room],
        num_microbatches: run.num_microbatches,
        schedule: Schedule::OneFOneB,
        num_stages: None,
        devices: Vec::new(),
        all_devices: true,
        relative_tolerance: 0.0,
    };
    plan_stages(&run.table, &query).expect("a plan, since one was run")
}

#[test]
fn the_plans_of_real_searches_are_found() {
    let Some(file) = crate::common::shared("reference/alpa/stage_cost_tables.csv") else { return };
    let runs = runs(file.parent().expect("a folder"));
    assert_eq!(runs.len(), 9);
    let mut spent = Duration::ZERO;
    let mut as_logged = 0;
    for (number, run) in &runs {
        let start = Instant::now();
        let found = solved(run);
        spent += start.elapsed();
        // The tables are in milliseconds, and a stage counts once per microbatch.
        assert!(found.step_s <= run.best_s + 5e-4, "run {number}: {} s, the best is {} s", found.step_s, run.best_s);
        assert!(found.step_s <= run.logged_s + 5e-4, "run {number}");
        let devices = |block: usize| run.table.blocks[block].shape.num_devices();
        let stages: Vec<(usize, usize, u64)> =
            found.stages.iter().map(|(layers, b, _)| (layers.start, layers.end, devices(*b))).collect();
        as_logged += u32::from(stages == run.logged);
    }
    println!("nine tables in {:.1} ms, {as_logged} plans as they were chosen", spent.as_secs_f64() * 1e3);
    assert!(as_logged >= 8, "{as_logged} plans as they were chosen");
}

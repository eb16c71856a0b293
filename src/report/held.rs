//! Compares the memory that workers held while running a plan with the prediction.

use super::Grid;
use crate::error::Error;
use crate::units::bytes;
use altiplano_ir::plan::Plan;
use altiplano_planner::predict::memory::cpu_peaks;
use altiplano_planner::programs;

/// The peak bytes of each worker, by device, beside the prediction for this machine's runtime, whatever devices the
/// plan is for. Adjacent workers with equal peaks share a line if their stages do.
pub fn held(plan: &Plan, peaks: &[u64]) -> Result<String, Error> {
    let mut lines: Vec<(u32, u32, usize, u64)> = Vec::new();
    let programs = programs(plan)?;
    let predicted = cpu_peaks(&programs);
    for (i, program) in programs.programs.iter().enumerate() {
        for &device in &program.devices {
            let held = peaks.get(device as usize).copied().unwrap_or(0);
            match lines.last_mut() {
                Some((_, last, s, h)) if *last + 1 == device && (*s, *h) == (i, held) => *last = device,
                _ => lines.push((device, device, i, held)),
            }
        }
    }
    let mut table = Grid::new(&["workers", "stage", "held", "predicted"]);
    for (first, last, lane, held) in lines {
        let workers = if first == last { first.to_string() } else { format!("{first}-{last}") };
        table.row([workers, plan.program_name(lane), bytes(held), bytes(predicted[lane])]);
    }
    Ok(format!("peak memory\n{}", table.right()))
}

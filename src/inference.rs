//! Runs a plan without training: batches in, results out.

use crate::error::Error;
use crate::simulate::Recorded;
use crate::training::team::Team;
use crate::training::{Batch, Ran, Training, at_step, start};
use altiplano_ir::plan::{Goal, Plan};
use altiplano_runtime::{HostData, HostTensor, Session};
use std::collections::BTreeMap;

/// A model's results for a batch, as `result/0`, `result/1` and so on.
pub type Results = BTreeMap<String, HostTensor>;

/// Timing of one batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pass {
    /// Number of the batch, from 1.
    pub number: u64,
    pub seconds: f64,
    pub samples_per_s: f64,
}

/// Runs `training.steps` batches and calls `on_pass` for each. Returns the run's records and the results of the last
/// batch.
pub fn infer(
    plan: &Plan,
    training: &Training,
    mut on_pass: impl FnMut(&Pass) -> Result<(), Error>,
) -> Result<(Ran, Results), Error> {
    let mut session = Team::Alone.session(plan, training)?;
    let mut recorded = Recorded::default();
    let (weights, mut batches) = start(plan, training)?;
    for (name, weights) in weights {
        session.load_parameter(&name, &weights)?;
    }
    let mut last = Results::new();
    // For throughput, enough batches are in flight to keep every stage busy.
    let ahead = match plan.goal {
        Goal::Latency => 1,
        Goal::Throughput => 1 + (plan.num_lanes() as u64 - 1).div_ceil(u64::from(plan.num_microbatches)),
    };
    let mut begun = 0;
    for number in 1..=training.steps {
        while begun < training.steps.min(number - 1 + ahead) {
            begun += 1;
            session.begin_evaluation(&batches.take()?).map_err(|error| at_step(begun, error))?;
        }
        let (report, parts) = session.end_evaluation().map_err(|error| at_step(number, error))?;
        let seconds = report.seconds;
        on_pass(&Pass { number, seconds, samples_per_s: plan.global_batch as f64 / seconds })?;
        last = results(plan, parts);
        recorded = Recorded { seconds, recordings: report.recordings };
    }
    Ok((Ran { peak_bytes: session.peak_bytes(), last: recorded, noise: None }, last))
}

/// The results of one batch with these weights, on a plan's devices.
pub(crate) fn results_on(
    session: &mut Session,
    plan: &Plan,
    weights: &BTreeMap<String, HostTensor>,
    batch: &Batch,
) -> Result<Results, Error> {
    for (name, tensor) in weights {
        session.load_parameter(name, tensor)?;
    }
    Ok(results(plan, session.evaluate(batch)?.1))
}

/// Results by name, with microbatches concatenated along the batch dimension.
fn results(plan: &Plan, parts: BTreeMap<u32, Vec<HostTensor>>) -> Results {
    let whole = |(index, parts): (u32, Vec<HostTensor>)| {
        // Without a batch dimension, the result of the last microbatch stands for all.
        let dim = plan.graph.node(plan.graph.outputs[index as usize]).batch_dims.trailing_zeros() as usize;
        joined(&parts, dim).map(|tensor| (format!("result/{index}"), tensor))
    };
    parts.into_iter().filter_map(whole).collect()
}

/// Concatenates tensors of one type along `dim`; returns the last one if they have no such dimension.
fn joined(parts: &[HostTensor], dim: usize) -> Option<HostTensor> {
    let last = parts.last()?;
    if parts.len() == 1 || dim >= last.ty.rank() {
        return Some(last.clone());
    }
    let class = last.data.class();
    let row = last.ty.shape[dim..].iter().product::<u64>() as usize * class.bytes();
    let rows = last.ty.shape[..dim].iter().product::<u64>() as usize;
    let of_part = |part: &HostTensor, r: usize| part.data.as_bytes()[r * row..(r + 1) * row].to_vec();
    let bytes: Vec<u8> = (0..rows).flat_map(|r| parts.iter().flat_map(move |part| of_part(part, r))).collect();
    let mut shape = last.ty.shape.clone();
    shape[dim] *= parts.len() as u64;
    Some(HostTensor { ty: last.ty.with_shape(shape), data: HostData::from_bytes(class, &bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::types::TensorType;

    #[test]
    fn parts_are_joined_along_any_dimension() {
        let part = |values: &[f64]| HostTensor::from_f64(TensorType::new(DType::F32, [2, 1, 2]), values);
        let parts = [part(&[1.0, 2.0, 3.0, 4.0]), part(&[5.0, 6.0, 7.0, 8.0])];
        let check = |dim: usize, shape: &[u64], expected: &[f64]| {
            let whole = joined(&parts, dim).unwrap();
            assert_eq!((whole.ty.shape.as_slice(), whole.to_f64().as_slice()), (shape, expected));
        };
        check(0, &[4, 1, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        check(1, &[2, 2, 2], &[1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]);
        check(2, &[2, 1, 4], &[1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]);
        check(32, &[2, 1, 2], &[5.0, 6.0, 7.0, 8.0]);
        assert_eq!(joined(&[], 0), None);
    }
}

//! Plans with offloading, and their results and memory when they run.

use altiplano::ImportOptions;
use altiplano::ir::plan::{Offload, Plan};
use altiplano::planner::{predict_plan, programs};
use altiplano::runtime::{HostTensor, Options, Session};
use altiplano::training::{Training, scalars, start};
use altiplano_cost_models::Rooflines;

/// Eight samples of 16 positions.
pub fn import() -> ImportOptions {
    ImportOptions { batch: Some(8), sequence: Some(16), ..ImportOptions::default() }
}

/// The same plan with offloading.
pub fn offloaded(plan: &Plan, what: Offload) -> Plan {
    let mut plan = plan.clone();
    plan.stages.iter_mut().for_each(|stage| stage.offload = what);
    let costs = Rooflines::of(&plan.cluster);
    predict_plan(plan, &costs).expect("a prediction")
}

/// The results of several steps of a plan, and the peak memory of devices and hosts.
pub struct Ran {
    pub losses: Vec<f64>,
    pub held: Vec<(String, String, HostTensor)>,
    pub own: Vec<u64>,
    pub host: Vec<u64>,
}

pub fn ran(plan: &Plan) -> Ran {
    let training = Training { steps: 3, learning_rate: 1e-2, ..Training::default() };
    let programs = programs(plan).expect("programs");
    let (weights, mut batches) = start(plan, &training).expect("weights and batches");
    let mut session = Session::new(&programs, &Options::default()).expect("the programs run");
    weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
    let mut losses = Vec::new();
    for number in 1..=training.steps {
        let batch = batches.take().expect("a batch");
        losses.push(session.step(&batch, &scalars(training.learning_rate, number)).expect("a step").loss);
    }
    session.flush().expect("the last step ends");
    let parameters = session.parameters().into_iter().map(|name| (name, String::new()));
    let names: Vec<(String, String)> = parameters.chain(session.states()).collect();
    let mut held = Vec::new();
    for (name, slot) in names {
        let tensor = if slot.is_empty() { session.parameter(&name) } else { session.state(&name, &slot) };
        held.push((name, slot, tensor.expect("it is held")));
    }
    Ran { losses, held, own: session.peak_bytes(), host: session.host_peak_bytes() }
}

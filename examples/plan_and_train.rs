//! Plans a model, prints the report, and trains it for a few steps: everything that a Rust program needs.
//!
//!     cargo run --release --example plan_and_train -- examples/models/gpt-small-demo.mlir local:4

use altiplano::planner::Silent;
use altiplano::training::{Training, train};
use altiplano::{Error, ImportOptions, load_cluster, load_model, one_line, plan, request};

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().unwrap_or("examples/models/gpt-small-demo.mlir".to_string());
    let cluster = arguments.next().unwrap_or("local:4".to_string());

    let model = load_model(model.as_ref(), &ImportOptions::default())?;
    let mut request = request(&model, load_cluster(&cluster)?);
    request.batch.num_microbatches = Some(2);
    let plan = plan(&request, &Silent)?;
    println!("{}: {}", plan.model, one_line(&plan));

    let training = Training { steps: 5, learning_rate: 1e-3, ..Training::default() };
    train(&plan, &training, |step| {
        println!("step {}: loss {:.4} in {:.3} s", step.number, step.loss, step.seconds);
        Ok(())
    })?;
    Ok(())
}

//! Proofs that a plan's programs compute what one device computes.

use crate::error::Error;
use crate::units::plural;
use altiplano_ir::plan::Plan;
use altiplano_planner::programs;
use altiplano_prover::{Gap, Kind, Proof};

/// The answer: a proof, or the place where it ends.
pub type Answer = Result<Proof, Gap>;

/// Proves a plan's programs at full size.
pub fn prove(plan: &Plan) -> Result<Answer, Error> {
    Ok(altiplano_prover::prove(plan, &programs(plan)?))
}

/// A proof in words: the results that it covers, and the assumptions that it rests on.
pub fn proof_text(plan: &Plan, proof: &Proof) -> String {
    let results = match plan.schedule.trains() {
        true => format!(
            "the loss, {} and {}",
            plural(proof.parameters as u64, "updated parameter"),
            plural(proof.states as u64, "tensor") + " of optimizer state",
        ),
        false => "all outputs".to_string(),
    };
    let mut lines = vec![
        format!("proved: {results} are those of one device, for all inputs, over the reals, in any order of additions"),
        format!(
            "  {} in {} and {} were related to {} of one device",
            plural(proof.values as u64, "local value"),
            plural(proof.bodies as u64, "body").replace("bodys", "bodies"),
            plural(proof.transfers as u64, "transfer"),
            plural(proof.reference_values as u64, "value"),
        ),
        format!(
            "  one device: {} of the plan's graph in a row, their gradients added, one update",
            plural(u64::from(plan.num_microbatches), "microbatch").replace("microbatchs", "microbatches")
        ),
        "assumed: the sharding rules and derivatives of single ops, and that executors run programs as written".into(),
    ];
    lines.push("not covered: rounding, and the division of the batch into microbatches".into());
    if plan.padding.is_some() {
        lines.push("not covered: the padded graph equals the model".into());
    }
    lines.join("\n")
}

/// The reason why there is no proof, in words.
pub fn gap_text(gap: &Gap) -> String {
    match gap.kind {
        Kind::Differs => format!("not what one device computes: {gap}"),
        Kind::NoRule => format!("not proved: {gap}"),
    }
}

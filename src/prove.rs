//! Proofs that a plan's programs compute what one device computes, and the certificate that a plan file keeps.

use crate::error::Error;
use crate::rounding::Rounding;
use crate::units::{plural, seconds};
use altiplano_ir::certificate::{ProofCertificate, plan_hash, programs_hash};
use altiplano_ir::plan::Plan;
use altiplano_planner::programs;
use altiplano_prover::{Gap, Kind, VERSION};
use std::time::Instant;

/// A proof, and the rounding of sums, which it does not cover.
#[derive(Clone, Debug, PartialEq)]
pub struct Proved {
    pub certificate: ProofCertificate,
    pub rounding: Rounding,
}

/// The answer: a proof, or the place where it ends.
pub type Answer = Result<Proved, Gap>;

/// Proves a plan's programs at full size.
pub fn prove(plan: &Plan) -> Result<Answer, Error> {
    let programs = programs(plan)?;
    let start = Instant::now();
    Ok(altiplano_prover::prove(plan, &programs).map(|proof| {
        let certificate = ProofCertificate {
            program: env!("CARGO_PKG_VERSION").to_string(),
            rules: VERSION,
            plan_hash: plan_hash(plan),
            programs_hash: programs_hash(&programs),
            values: proof.values as u64,
            bodies: proof.bodies as u64,
            transfers: proof.transfers as u64,
            parameters: proof.parameters as u64,
            states: proof.states as u64,
            seconds: start.elapsed().as_secs_f64(),
        };
        Proved { certificate, rounding: Rounding::of(&programs) }
    }))
}

/// Removes the proof of a plan that has changed since, or of another version of this program.
pub fn drop_stale_proof(plan: &mut Plan) {
    plan.drop_stale_proof(env!("CARGO_PKG_VERSION"), VERSION);
}

/// A proof in words: the results that it covers, and the assumptions that it rests on.
pub fn proof_text(plan: &Plan, proof: &ProofCertificate) -> String {
    let results = match plan.schedule.trains() {
        true => format!(
            "the loss, the new values of {} and {}",
            plural(proof.parameters, "parameter"),
            plural(proof.states, "tensor") + " of optimizer state",
        ),
        false => "all outputs".to_string(),
    };
    let bodies = if proof.bodies == 1 { "1 body".to_string() } else { format!("{} bodies", proof.bodies) };
    let mut lines = vec![
        format!("proved in {}: {results} are those of one device", seconds(proof.seconds)),
        "for all inputs, over the reals and in any order of additions, at full size".to_string(),
        format!(
            "  from {} of {bodies} and {}; rules of version {}",
            plural(proof.values, "local value"),
            plural(proof.transfers, "transfer"),
            proof.rules,
        ),
        "  assumed: the sharding rule, the local form and the derivative of single ops; executors that run programs as written".into(),
        "  not covered: rounding and overflow; the division of the batch into microbatches".into(),
    ];
    if plan.padding.is_some() {
        lines.push("  not covered: the padded graph computes what the model computes".into());
    }
    lines.join("\n")
}

/// The reason why there is no proof, in words.
pub fn gap_text(gap: &Gap) -> String {
    match gap.kind {
        Kind::Differs => format!("not proved, a value is not what one device computes: {gap}"),
        Kind::Unrelated => {
            format!("not proved; at this value the plan is wrong, or a rule of the prover is missing: {gap}")
        }
        Kind::NoRule => format!("not proved: {gap}"),
    }
}

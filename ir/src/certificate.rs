//! A compiler's figures for a plan on devices that are not at hand, and the proof of a plan. A plan file keeps both as
//! long as the plan stays the same.

use crate::plan::{Plan, fingerprint};
use crate::program::Programs;
use serde::{Deserialize, Serialize};

/// A compiler's figures for all stages of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Certificate {
    /// The compiler's version, in its own words.
    pub compiler: String,
    /// The device that the plan was compiled for: `cuda:H100`.
    pub target: String,
    /// Bytes of the device's memory.
    pub device_bytes: u64,
    /// The plan that was compiled, as [`plan_hash`] knows it.
    pub plan_hash: String,
    pub stages: Vec<CertifiedStage>,
}

/// The figures of the stages on one submesh. All bytes are those of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CertifiedStage {
    pub stages: Vec<u32>,
    /// Most bytes at a time: those that last, those that are held, and those of the fullest body, compiled to hold little.
    pub peak_bytes: u64,
    /// As [`CertifiedStage::peak_bytes`], compiled to start communication early, for which more values are held. Runs take
    /// this order where it fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlapped_bytes: Option<u64>,
    /// Parameters, optimizer state and sums of gradients.
    pub lasting_bytes: u64,
    /// Values that other bodies have left when the fullest body begins.
    pub held_bytes: u64,
    /// Bytes that the compiler allocates for the fullest body beside its arguments.
    pub body_bytes: u64,
    /// The fullest body.
    pub fullest: String,
    /// Bytes that the stage was expected to take on XLA.
    pub predicted_bytes: u64,
    /// Collectives of a step by kind.
    pub collectives: Vec<CertifiedCollectives>,
    /// Seconds of compiling. Bodies that equal those of an earlier stage take none.
    pub seconds: f64,
}

/// The collectives of one kind in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CertifiedCollectives {
    pub kind: String,
    pub planned: Traffic,
    pub compiled: Traffic,
}

/// Collectives, and the bytes of a device's operands or, for all-gathers, results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Traffic {
    pub count: u64,
    pub bytes: u64,
}

/// A proof that the programs of a plan compute what one device computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProofCertificate {
    /// The version of the program that made the programs and the proof.
    pub program: String,
    /// The version of the rules of the proof.
    pub rules: u32,
    /// The plan that was proved, as [`plan_hash`] knows it.
    pub plan_hash: String,
    /// The programs that were proved, as [`programs_hash`] knows them.
    pub programs_hash: String,
    /// Local values that were related to values of one device.
    pub values: u64,
    pub bodies: u64,
    pub transfers: u64,
    /// Copies of parameters and of tensors of optimizer state whose new values are proved.
    pub parameters: u64,
    pub states: u64,
    /// Seconds that the proof took.
    pub seconds: f64,
}

impl CertifiedStage {
    /// Returns whether the stage fits into so many bytes.
    pub fn fits(&self, device_bytes: u64) -> bool {
        self.peak_bytes <= device_bytes
    }
}

/// A fingerprint of everything in a plan that decides what devices execute and what is predicted. Its alternatives, its
/// origin and certificates do not count.
pub fn plan_hash(plan: &Plan) -> String {
    let plan = Plan { certificate: None, proof: None, made_by: None, alternatives: Vec::new(), ..plan.clone() };
    fingerprint(&serde_json::to_string(&plan).unwrap_or_default())
}

/// A fingerprint of programs.
pub fn programs_hash(programs: &Programs) -> String {
    fingerprint(&serde_json::to_string(programs).unwrap_or_default())
}

impl Plan {
    /// Removes the proof of a plan that has changed since, or of other versions of the program or the rules. Returns
    /// whether there was one.
    pub fn drop_stale_proof(&mut self, program: &str, rules: u32) -> bool {
        let of_now = |proof: &ProofCertificate| proof.program == program && proof.rules == rules;
        let stale = self.proof.as_ref().is_some_and(|proof| !of_now(proof) || proof.plan_hash != plan_hash(self));
        if stale {
            self.proof = None;
        }
        stale
    }

    /// Removes the certificate of a plan that has changed since. Returns whether there was one.
    pub fn drop_stale_certificate(&mut self) -> bool {
        let stale = self.certificate.as_ref().is_some_and(|of| of.plan_hash != plan_hash(self));
        if stale {
            self.certificate = None;
        }
        stale
    }
}

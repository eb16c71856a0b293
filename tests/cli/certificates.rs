//! Certificates in plan files, and what `certify` refuses. The compiler itself runs in `tests/oracle/run certify`.

use crate::common::{DEMO, Scratch, altiplano, altiplano_with, succeeds};
use altiplano::ir::certificate::{Certificate, CertifiedCollectives, CertifiedStage, Traffic, plan_hash};
use altiplano::ir::plan::Plan;

/// A plan of the demo with a certificate, as text.
pub fn certified(file: &str) -> Plan {
    succeeds(&["plan", DEMO, "--cluster", "local:2", "--pp", "1", "-o", file]);
    let mut plan = Plan::from_json(&std::fs::read_to_string(file).expect("a plan")).expect("a plan");
    let row = |count: u64, bytes: u64| Traffic { count, bytes };
    let stage = CertifiedStage {
        stages: vec![0],
        peak_bytes: 6_000_000_000,
        lasting_bytes: 1_000_000_000,
        held_bytes: 2_000_000_000,
        body_bytes: 3_000_000_000,
        fullest: "backward".into(),
        predicted_bytes: 5_000_000_000,
        collectives: vec![CertifiedCollectives {
            kind: "all-reduce".into(),
            planned: row(7, 70_000_000),
            compiled: row(2, 70_000_000),
        }],
        seconds: 1.5,
    };
    plan.certificate = Some(Certificate {
        compiler: "some-compiler 1.2".into(),
        target: "cuda:H100".into(),
        device_bytes: 84_942_979_072,
        plan_hash: plan_hash(&plan),
        stages: vec![stage],
    });
    plan
}

#[test]
fn a_plan_keeps_its_certificate_until_it_changes() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let plan = certified(&file);
    std::fs::write(&file, plan.to_json()).expect("a file");
    let text = succeeds(&["inspect", &file]);
    for part in
        ["compiled for cuda:H100 (84.9 GB) by some-compiler 1.2", "fits", "6.00 GB", "7 with 70.0 MB", "2 with 70.0 MB"]
    {
        assert!(text.contains(part), "'{part}' is missing:\n{text}");
    }
    // Nothing that the program predicts follows from the name.
    let other = Plan { model: "another".into(), ..plan };
    assert_ne!(plan_hash(&other), other.certificate.as_ref().expect("a certificate").plan_hash);
    std::fs::write(&file, other.to_json()).expect("a file");
    let text = succeeds(&["inspect", &file]);
    assert!(!text.contains("some-compiler"), "{text}");
    assert!(!succeeds(&["inspect", &file, "--json"]).contains("\"certificate\""));
}

#[test]
fn targets_and_plugins_that_are_none_are_refused_with_one_message() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--cluster", "local:2", "-o", &file]);
    let before = std::fs::read(&file).expect("a plan");
    let refused = |arguments: &[&str], said: &str| {
        let all = [&["certify", &file, "-o", &file], arguments].concat();
        let output = altiplano_with(&[("ALTIPLANO_PJRT_PLUGIN", ""), ("VIRTUAL_ENV", "")], &all);
        assert_eq!(output.code, Some(2), "{}{}", output.stdout, output.stderr);
        assert!(output.stderr.starts_with(&format!("error: {said}")), "{}", output.stderr);
        assert_eq!(output.stderr.trim_end().lines().count(), 1, "{}", output.stderr);
    };
    refused(&["--for", "cuda:H1000"], "--for: there is no target 'cuda:H1000'; the targets are cuda:A100, ");
    refused(&["--for", "cuda:H100"], "there is no PJRT plugin for cuda: name one with --plugin FILE ");
    refused(
        &["--for", "tpu:v5e", "--plugin", "no.so"],
        "no.so: cannot be opened as a PJRT plugin: there is no such file",
    );
    assert_eq!(std::fs::read(&file).expect("a plan"), before);
    assert_eq!(altiplano(&["certify", &file]).code, Some(2));
}

//! Certificates in plan files, and what `certify` refuses. The compiler itself runs in `tests/oracle/run certify`.

use crate::common::{DEMO, Scratch, altiplano, altiplano_with, succeeds};
use altiplano::certify::search_and_certify;
use altiplano::cost_models::Rooflines;
use altiplano::ir::certificate::{Certificate, CertifiedCollectives, CertifiedStage, Traffic, plan_hash};
use altiplano::ir::plan::{Plan, Stage, Target};
use altiplano::planner::predict::peaks_on_xla;
use altiplano::planner::{Request, Silent};
use altiplano::{Error, ImportOptions, load_cluster, load_model, plan, request};
use std::cell::{Cell, RefCell};

/// A plan of the demo with a certificate, as text.
pub fn certified(file: &str) -> Plan {
    succeeds(&["plan", DEMO, "--cluster", "local:2", "--pp", "1", "-o", file]);
    let mut plan = Plan::from_json(&std::fs::read_to_string(file).expect("a plan")).expect("a plan");
    let row = |count: u64, bytes: u64| Traffic { count, bytes };
    let stage = CertifiedStage {
        stages: vec![0],
        peak_bytes: 6_000_000_000,
        overlapped_bytes: Some(7_500_000_000),
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
    for part in [
        "compiled for cuda:H100 (84.9 GB) by some-compiler 1.2",
        "fits",
        "6.00 GB",
        "7.50 GB",
        "7 with 70.0 MB",
        "2 with 70.0 MB",
    ] {
        assert!(text.contains(part), "'{part}' is missing:\n{text}");
    }
    let page = scratch.path("plan.html");
    succeeds(&["inspect", &file, "--html", &page.display().to_string()]);
    let page = std::fs::read_to_string(&page).expect("a page");
    assert!(
        page.contains(
            r#""certificate":{"compiler":"some-compiler 1.2","target":"cuda:H100","device_bytes":84942979072"#
        )
    );
    // Nothing that the program predicts follows from the name.
    let other = Plan { model: "another".into(), ..plan };
    assert_ne!(plan_hash(&other), other.certificate.as_ref().expect("a certificate").plan_hash);
    std::fs::write(&file, other.to_json()).expect("a file");
    let text = succeeds(&["inspect", &file]);
    assert!(!text.contains("some-compiler"), "{text}");
    assert!(!succeeds(&["inspect", &file, "--json"]).contains("\"certificate\""));
}

/// The certificate of a compiler that needs some times what a plan predicts, for a device with so many bytes.
fn compiled(plan: &Plan, times: f64, device_bytes: u64) -> Certificate {
    let stage = |(s, stage): (usize, &Stage)| CertifiedStage {
        stages: vec![s as u32],
        peak_bytes: (times * stage.predicted.peak_bytes as f64) as u64,
        overlapped_bytes: None,
        lasting_bytes: 0,
        held_bytes: 0,
        body_bytes: 0,
        fullest: "forward".into(),
        predicted_bytes: stage.predicted.peak_bytes,
        collectives: Vec::new(),
        seconds: 0.0,
    };
    Certificate {
        compiler: "some-compiler 1.2".into(),
        target: "cuda:H100".into(),
        device_bytes,
        plan_hash: plan_hash(plan),
        stages: plan.stages.iter().enumerate().map(stage).collect(),
    }
}

#[test]
fn a_search_goes_on_until_the_compiler_finds_that_a_plan_fits() {
    let model = load_model(DEMO.as_ref(), &ImportOptions::default()).expect("a model");
    let mut request = request(&model, load_cluster("dgx-h100:1/2").expect("a cluster"));
    request.batch.global = Some(4096);
    let searches = Cell::new(0);
    let search = |request: &Request| {
        searches.set(searches.get() + 1);
        Ok(plan(request, &Silent)?)
    };
    let fastest = plan(&request, &Silent).expect("a plan");
    let peak = |plan: &Plan| plan.stages.iter().map(|stage| stage.predicted.peak_bytes).max().expect("a stage");
    // The compiler needs a quarter more for it than there is.
    let device_bytes = (1.2 * peak(&fastest) as f64) as u64;
    let said = RefCell::new(Vec::new());
    let again = |why: &Error| said.borrow_mut().push(why.to_string());
    let certify = |plan: &Plan| Ok(compiled(plan, 1.5, device_bytes));
    let (found, why) = search_and_certify(&request, &search, &certify, &again).expect("a plan");
    assert!(why.is_none(), "{why:?}");
    assert!(peak(&found) as f64 <= 0.8 * peak(&fastest) as f64, "{} of {}", peak(&found), peak(&fastest));
    assert!(found.predicted.step_time_s >= fastest.predicted.step_time_s);
    assert_eq!(found.cluster, request.cluster);
    let certificate = found.certificate.as_ref().expect("a certificate");
    assert_eq!(certificate.plan_hash, plan_hash(&found));
    assert!(certificate.stages.iter().all(|stage| stage.fits(device_bytes)));
    assert_eq!(searches.get(), 2);
    assert_eq!(said.borrow().len(), 1);
    assert!(said.borrow()[0].starts_with("the compiled plan does not fit: up to "), "{said:?}");

    // A plan that fits at first is the fastest.
    let (found, why) =
        search_and_certify(&request, &search, &|plan| Ok(compiled(plan, 1.1, device_bytes)), &again).expect("a plan");
    assert!(why.is_none() && found.stages == fastest.stages);
    // If none fits, the fastest comes back, with what it needs.
    let (found, why) =
        search_and_certify(&request, &search, &|plan| Ok(compiled(plan, 1e6, device_bytes)), &again).expect("a plan");
    assert!(found.stages == fastest.stages && found.certificate.is_some());
    assert!(matches!(why, Some(Error::CertifiedMemory { .. })), "{why:?}");
    // A plan that does not compile is not lost either.
    let refuse = |_: &Plan| Err(Error::Uncompiled { target: "cuda:H100".into(), refusals: Vec::new() });
    let (found, why) = search_and_certify(&request, &search, &refuse, &again).expect("a plan");
    assert!(found.stages == fastest.stages && found.certificate.is_none());
    assert!(matches!(why, Some(Error::Uncompiled { .. })), "{why:?}");
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

#[test]
fn memory_on_xla_is_expected_of_plans_for_other_software_too() {
    let model = load_model(DEMO.as_ref(), &ImportOptions::default()).expect("a model");
    let mut request = request(&model, load_cluster("dgx-h100:1/4").expect("a cluster"));
    let expected = |plan: &Plan| peaks_on_xla(plan, &Rooflines::of(&plan.cluster)).expect("a prediction");
    request.degrees.pp = Some(2);
    let pipeline = plan(&request, &Silent).expect("a plan");
    let lanes: Vec<u64> = pipeline.lanes().iter().map(|stage| stage.predicted.peak_bytes).collect();
    // Arguments of a body last to its end there.
    let on_xla = expected(&pipeline);
    assert!(
        on_xla.len() == lanes.len() && on_xla.iter().zip(&lanes).all(|(xla, own)| xla >= own),
        "{on_xla:?} {lanes:?}"
    );
    (request.degrees.pp, request.target) = (Some(1), Target::Xla);
    let alone = plan(&request, &Silent).expect("a plan");
    assert_eq!(expected(&alone), [alone.stages[0].predicted.peak_bytes]);
}

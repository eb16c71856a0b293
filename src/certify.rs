//! Certificates of plans: XLA compiles a plan's programs for devices that are not at hand, and says what they take.

use crate::error::Error;
use crate::units::{bytes, plural, seconds};
use altiplano_cost_models::Rooflines;
use altiplano_ir::certificate::{Certificate, CertifiedCollectives, CertifiedStage, Traffic, plan_hash};
use altiplano_ir::cluster::Cluster;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{Program, Programs};
use altiplano_planner::predict::peaks_on_xla;
use altiplano_planner::{Progress, Request, programs};
use altiplano_xla::certify::{self, Certifier, Target, add, calls, peak_of, planned};
use altiplano_xla::hlo::{Collectives, Kind};
use altiplano_xla::join::joined;
use altiplano_xla::pjrt::{Order, Plugin, find};
use comfy_table::{CellAlignment, Table, presets};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

/// A body that the compiler refuses.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub stage: u32,
    pub body: &'static str,
    pub message: String,
}

/// XLA's compiler for a target.
pub struct Compiler {
    target: Target,
    plugin: Arc<Plugin>,
}

impl Compiler {
    /// Opens a plugin for a target (`cuda:H100`): the one that is named, or the one that is found.
    pub fn open(target: &str, plugin: Option<&Path>) -> Result<Compiler, Error> {
        let target = Target::named(target)?;
        let plugin = Plugin::open_without_devices(&find(plugin, target.platform)?)?;
        Ok(Compiler { target, plugin })
    }

    /// Compiles all bodies of a plan's programs.
    pub fn certify(&self, plan: &Plan, progress: &dyn Progress) -> Result<Certificate, Error> {
        certify(plan, self.target, self.plugin.clone(), progress)
    }
}

fn certify(plan: &Plan, target: Target, plugin: Arc<Plugin>, progress: &dyn Progress) -> Result<Certificate, Error> {
    if plan.servers.is_some() {
        return Err(Error::Option { option: "certify", problem: "plans with parameter servers are not compiled" });
    }
    let expected = peaks_on_xla(plan, &Rooflines::of(&plan.cluster))?;
    let mut certifier = Certifier::new(plugin, target);
    let mut programs = programs(plan)?;
    programs.programs.iter_mut().for_each(|program| *program = joined(program));
    let total: usize = programs.programs.iter().map(|program| program.bodies.len()).sum();
    let done = Cell::new(0);
    let (mut stages, mut refusals) = (Vec::new(), Vec::new());
    for (lane, program) in programs.programs.iter().enumerate() {
        let of_lane: Vec<u32> = plan.stages_of(lane).map(|stage| stage as u32).collect();
        let size = plan.stages.get(lane).map_or((1, program.mesh.num_devices()), |stage| stage.submesh);
        let stage = certifier.stage(program, size, &|body| {
            progress.step(&format!("compiling {} of stage {}", body.phase.name(), body.stage), done.get(), total);
        })?;
        done.set(done.get() + program.bodies.len());
        for (body, certified) in program.bodies.iter().zip(&stage.bodies) {
            if let Err(error) = certified {
                refusals.push(Refusal { stage: body.stage, body: body.phase.name(), message: error.to_string() });
            }
        }
        stages.extend(certified(&programs, lane, &stage, of_lane, expected[lane]));
    }
    let (target, device_bytes) = (target.to_string(), target.memory_bytes);
    if !refusals.is_empty() {
        return Err(Error::Uncompiled { target, refusals });
    }
    let compiler = certifier.version()?;
    Ok(Certificate { compiler, target, device_bytes, plan_hash: plan_hash(plan), stages })
}

/// The most searches for a plan that a compiler finds to fit.
const SEARCHES: usize = 5;

/// Searches for a plan and certifies it. While a stage needs more memory by the compiler than the target has, the next
/// search gives the devices of that stage less, by the ratio of the two; `again` hears why. If no plan fits, this
/// returns the first one with its certificate and the reason, as it does with a plan that does not compile.
pub fn search_and_certify(
    request: &Request,
    search: &dyn Fn(&Request) -> Result<Plan, Error>,
    certify: &dyn Fn(&Plan) -> Result<Certificate, Error>,
    again: &dyn Fn(&Error),
) -> Result<(Plan, Option<Error>), Error> {
    let attempt = |tight: &Request| -> Result<(Plan, Option<Error>), Error> {
        let mut plan = search(tight)?;
        // The plan is one for the devices as they are.
        for (group, given) in plan.cluster.groups.iter_mut().zip(&request.cluster.groups) {
            group.device.memory_bytes = given.device.memory_bytes;
        }
        match certify(&plan) {
            Ok(certificate) => {
                let over = too_large(&certificate);
                plan.certificate = Some(certificate);
                Ok((plan, over))
            }
            Err(error) => Ok((plan, Some(error))),
        }
    };
    let (first, why) = attempt(request)?;
    let Some(why) = why else { return Ok((first, None)) };
    let (mut tight, mut refused) = (request.clone(), first.clone());
    for _ in 1..SEARCHES {
        // Less memory helps no plan that does not compile.
        let Some(certificate) = &refused.certificate else { break };
        too_large(certificate).iter().for_each(again);
        tighten(&mut tight.cluster, &refused, certificate);
        match attempt(&tight) {
            Ok((plan, None)) => return Ok((plan, None)),
            Ok((plan, Some(_))) => refused = plan,
            Err(_) => break,
        }
    }
    Ok((first, Some(why)))
}

/// Leaves the devices of each stage that is too large what its prediction would need to be, for the compiler to need
/// what the target has.
fn tighten(cluster: &mut Cluster, plan: &Plan, certificate: &Certificate) {
    for stage in certificate.stages.iter().filter(|stage| !stage.fits(certificate.device_bytes)) {
        let ratio = certificate.device_bytes as f64 / stage.peak_bytes as f64;
        for &of in &stage.stages {
            let planned = &plan.stages[of as usize];
            let usable_bytes = (planned.predicted.peak_bytes as f64 * ratio) as u64;
            let group = planned.group as usize;
            let taken_bytes: u64 = cluster.taken_bytes(&cluster.groups[group]).iter().sum();
            let memory_bytes = &mut cluster.groups[group].device.memory_bytes;
            *memory_bytes = (*memory_bytes).min(usable_bytes + taken_bytes);
        }
    }
}

/// The figures of one program, if all its bodies compile.
fn certified(
    programs: &Programs,
    lane: usize,
    stage: &certify::Stage,
    stages: Vec<u32>,
    predicted_bytes: u64,
) -> Option<CertifiedStage> {
    let program: &Program = &programs.programs[lane];
    let peak = peak_of(programs, lane, stage, Order::Memory)?;
    let overlapped = peak_of(programs, lane, stage, Order::Overlap)?;
    let (mut ours, mut theirs) = (Collectives::new(), Collectives::new());
    let mut seconds = 0.0;
    for ((body, certified), times) in program.bodies.iter().zip(&stage.bodies).zip(calls(program)) {
        let certified = certified.as_ref().ok()?;
        add(&mut ours, &planned(body, &program.mesh), times);
        add(&mut theirs, &certified.collectives, times);
        seconds += if certified.again { 0.0 } else { certified.seconds };
    }
    Some(CertifiedStage {
        stages,
        peak_bytes: peak.bytes,
        overlapped_bytes: Some(overlapped.bytes),
        lasting_bytes: peak.lasting_bytes,
        held_bytes: peak.held_bytes,
        body_bytes: peak.body_bytes,
        fullest: program.bodies.get(peak.body).map_or("", |body| body.phase.name()).to_string(),
        predicted_bytes,
        collectives: beside(&ours, &theirs),
        seconds,
    })
}

/// Two lists of collectives, kind by kind.
fn beside(ours: &Collectives, theirs: &Collectives) -> Vec<CertifiedCollectives> {
    let mut kinds: Vec<Kind> = ours.keys().chain(theirs.keys()).copied().collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of = |all: &Collectives, kind: Kind| {
        let found = all.get(&kind).copied().unwrap_or_default();
        Traffic { count: found.count, bytes: found.bytes }
    };
    let row = |kind: Kind| CertifiedCollectives {
        kind: kind.name().to_string(),
        planned: of(ours, kind),
        compiled: of(theirs, kind),
    };
    kinds.into_iter().map(row).collect()
}

/// A certificate in words: a line for each stage, and its collectives.
pub fn certificate_text(certificate: &Certificate) -> String {
    let Certificate { compiler, target, device_bytes, stages, .. } = certificate;
    let mut lines = vec![format!("compiled for {target} ({}) by {compiler}", bytes(*device_bytes))];
    lines.push(memory(stages, *device_bytes).to_string());
    lines.push("peak = lasting + held + body: parameters, optimizer state and sums of gradients; values between bodies; what the fullest body takes beside its arguments".into());
    lines.push("overlapped: the peak if communication starts early; runs take that order where it fits".into());
    lines.push(String::new());
    lines.push("Collectives of a step on each device".into());
    lines.push(collectives(stages).to_string());
    lines.join("\n")
}

fn memory(stages: &[CertifiedStage], device_bytes: u64) -> Table {
    let mut table = table(&[
        "stage",
        "verdict",
        "peak",
        "predicted",
        "overlapped",
        "lasting",
        "held",
        "body",
        "fullest",
        "compiling",
    ]);
    for stage in stages {
        let verdict = if stage.fits(device_bytes) { "fits" } else { "DOES NOT FIT" };
        table.add_row([
            numbers(&stage.stages),
            verdict.to_string(),
            bytes(stage.peak_bytes),
            bytes(stage.predicted_bytes),
            stage.overlapped_bytes.map_or_else(String::new, bytes),
            bytes(stage.lasting_bytes),
            bytes(stage.held_bytes),
            bytes(stage.body_bytes),
            stage.fullest.clone(),
            seconds(stage.seconds),
        ]);
    }
    right_aligned(table, 2..8)
}

fn collectives(stages: &[CertifiedStage]) -> Table {
    let mut table = table(&["stage", "kind", "of the plan", "compiled"]);
    let shown = |traffic: &Traffic| format!("{} with {}", traffic.count, bytes(traffic.bytes));
    for stage in stages {
        for row in &stage.collectives {
            table.add_row([numbers(&stage.stages), row.kind.clone(), shown(&row.planned), shown(&row.compiled)]);
        }
        if stage.collectives.is_empty() {
            table.add_row([numbers(&stage.stages), "none".into(), String::new(), String::new()]);
        }
    }
    table
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    table
}

fn right_aligned(mut table: Table, columns: std::ops::Range<usize>) -> Table {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn numbers(stages: &[u32]) -> String {
    stages.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// The reason why a certified plan cannot run on its target, if there is one.
pub fn too_large(certificate: &Certificate) -> Option<Error> {
    let over: Vec<&CertifiedStage> =
        certificate.stages.iter().filter(|stage| !stage.fits(certificate.device_bytes)).collect();
    let fullest = over.iter().max_by_key(|stage| stage.peak_bytes)?;
    Some(Error::CertifiedMemory {
        stages: plural(over.len() as u64, "stage"),
        needed: bytes(fullest.peak_bytes),
        target: certificate.target.clone(),
        there: bytes(certificate.device_bytes),
    })
}

//! Writes plans as files of stacks, with the price of what a stack rounds.

use super::predict::{Prediction, Predictor};
use super::{Configuration, Stack, StackProblem, Unsayable, bare, of_plan};
use crate::error::Error;
use crate::units::{bytes, seconds};
use altiplano_ir::plan::{Plan, Schedule};
use altiplano_ir::recompute::{Modules, Recompute};
use altiplano_planner::Request;
use altiplano_planner::features::stacks::splits_tokens_beside_experts;
use serde_json::Value;
use std::fmt::Write;

/// A written plan.
#[derive(Clone, Debug)]
pub struct Written {
    pub text: String,
    /// The choices of the plan that the file leaves out or rounds, each with its price where it has one.
    pub notes: Vec<String>,
    /// The configuration that the file states.
    pub configuration: Configuration,
    /// The prediction of that configuration.
    pub prediction: Prediction,
}

/// A file of a stack before it is written.
pub struct Page<'a> {
    pub stack: &'a Stack,
    /// The plan as the stack runs it.
    pub plan: &'a Plan,
    pub configuration: &'a Configuration,
    pub settings: Vec<(&'static str, Value)>,
    pub num_microbatches: u32,
    /// Lines about the plan and its hash.
    pub origin: Vec<String>,
}

/// Relative difference of step times from which on a note states it.
const SAME: f64 = 1e-9;

/// Writes a plan as a file of a stack.
///
/// # Errors
/// [`StackProblem::Unsayable`] names what the stack cannot say and the option that changes it.
pub fn export(plan: &Plan, stack: &'static Stack) -> Result<Written, Error> {
    let refused = |problem| Error::StackExport { to: stack.name, problem: Box::new(problem) };
    let exact = of_plan::configuration(plan).map_err(refused)?;
    let mut configuration = exact.clone();
    if configuration.tp() > 1 && splits_tokens_beside_experts(stack.target, &plan.graph) {
        configuration.sequence_parallel = Some(true);
    }
    (stack.round)(&mut configuration);
    if !stack.settings(&configuration).iter().any(|(name, _)| name.contains("expert") && name.contains("tensor")) {
        configuration.etp = None;
    }
    if let Some(Unsayable { problem, option }) = (stack.limit)(&configuration) {
        return Err(refused(StackProblem::Unsayable { problem, option }));
    }
    let settings = |eight_bit| stack.settings(&Configuration { eight_bit, ..configuration.clone() });
    if configuration.eight_bit && settings(true) == settings(false) {
        let problem = "this project knows no setting of it for products in 8 bits";
        return Err(refused(StackProblem::Unsayable { problem, option: "--precision bf16" }));
    }
    let mut request = Request::of_plan(plan);
    request.cluster = used_part(plan);
    // The stack's own kernels.
    request.fused_attention = None;
    let predictor = Predictor::new(stack, request);
    let prediction = predictor.predict(&configuration).map_err(|error| match error {
        Error::Stack { problem, .. } => refused(match *problem {
            StackProblem::Misfit(misfit) => StackProblem::Unsettled { misfit },
            other => other,
        }),
        other => other,
    })?;
    let notes = notes(plan, stack, [&exact, &configuration], &prediction);
    let origin = vec![
        format!("Altiplano {}, plan {}", env!("CARGO_PKG_VERSION"), crate::export::fingerprint(&plan.to_json())),
        format!("'{}' on {}", plan.model, plan.cluster.name),
        format!("Written for {}", stack.version),
        format!(
            "Predicted: {} a step of {} samples, {} on a device",
            seconds(prediction.step_s()),
            plan.global_batch,
            bytes(prediction.peak_bytes())
        ),
    ];
    let mut page = Page {
        stack,
        plan: &prediction.plan,
        configuration: &configuration,
        settings: stack.settings(&configuration),
        num_microbatches: plan.num_microbatches,
        origin,
    };
    page.origin.push(format!("Start: {}", (stack.start)(&page)));
    page.origin.extend(notes.iter().map(|note| format!("Note: {note}")));
    let text = (stack.text)(&page);
    Ok(Written { text, notes, configuration, prediction })
}

/// The cluster with as many devices as the plan uses. Stacks start on devices that they use.
fn used_part(plan: &Plan) -> altiplano_ir::cluster::Cluster {
    let mut cluster = plan.cluster.clone();
    let used = plan.num_devices();
    if let [group] = cluster.groups.as_mut_slice()
        && used < group.nodes.saturating_mul(group.devices_per_node)
        && used > 0
    {
        if used <= group.devices_per_node {
            (group.nodes, group.devices_per_node) = (1, used);
        } else if used % group.devices_per_node == 0 {
            group.nodes = used / group.devices_per_node;
        }
    }
    cluster
}

/// Notes on the differences of a written configuration to the plan, with their price together.
fn notes(plan: &Plan, stack: &Stack, [exact, written]: [&Configuration; 2], prediction: &Prediction) -> Vec<String> {
    let mut rounded: Vec<String> = Vec::new();
    let mut differ = |what: &str, a: String, b: String| {
        if a != b {
            rounded.push(format!("{what} {a} to {b}"));
        }
    };
    let level = |zero: Option<u8>| zero.map_or("none".to_string(), |zero| zero.to_string());
    differ("ZeRO level", level(exact.zero), level(written.zero));
    if written.zero != Some(0) {
        let groups = |c: &Configuration| c.replicate.unwrap_or(1).to_string();
        differ("groups of replicas that each hold all state", groups(exact), groups(written));
    }
    let recompute = |c: &Configuration, run: &Plan| {
        let modules = run.execution.recompute_modules;
        let level = match c.recompute.unwrap_or_default() {
            Recompute::Selective if modules != Modules::default() => format!("selective ({modules})"),
            level => level.to_string(),
        };
        c.recomputed_layers.map_or(level.clone(), |n| format!("{level} in {n} layers of each stage"))
    };
    differ("recomputation", recompute(exact, plan), recompute(written, &prediction.plan));
    let optimizer = |c: &Configuration| c.optimizer.clone().unwrap_or_default();
    differ("optimizer", optimizer(exact), optimizer(written));
    let schedule = exact.schedule.unwrap_or(Schedule::OneFOneB);
    differ("schedule", schedule.name().to_string(), written.order().name().to_string());
    let clip = |c: &Configuration| c.clip_norm.map_or("none".to_string(), |norm| norm.to_string());
    if written.clip_norm.is_some() {
        differ("clipping of the gradient's norm at", clip(exact), clip(written));
    }
    let mut notes = Vec::new();
    let meshes: std::collections::BTreeSet<String> = plan.stages.iter().map(|s| s.mesh.to_string()).collect();
    if meshes.len() > 1 {
        rounded.push(format!("{} meshes to one", meshes.len()));
    }
    let offloads: Vec<_> = plan.stages.iter().map(|stage| stage.offload).collect();
    if offloads.windows(2).any(|pair| pair[0] != pair[1]) {
        rounded.push("offloading by stage to that of the first".into());
    }
    if !has_recomputation(stack, written) && exact.recompute.is_some_and(|level| level != Recompute::None) {
        notes.push(format!(
            "{} has no setting for recomputation: the model's code asks for it (here: {})",
            stack.name,
            recompute(exact, plan)
        ));
    }
    let [planned, as_run] = [plan.predicted.step_time_s, prediction.step_s()];
    let peak = plan.predicted.peak_bytes.iter().copied().max().unwrap_or(0);
    let changes = (as_run / planned - 1.0).abs() > SAME || peak != prediction.peak_bytes();
    if changes || !rounded.is_empty() {
        let what = match rounded.is_empty() {
            true => format!("layouts of values are {}'s, and it runs them in its own way", stack.name),
            false => format!("rounded: {}", rounded.join(", ")),
        };
        notes.push(format!(
            "{what}; {} a step in place of {}, {} on a device in place of {}",
            seconds(as_run),
            seconds(planned),
            bytes(prediction.peak_bytes()),
            bytes(peak)
        ));
    }
    if !prediction.fits() {
        notes.push(format!("it does not fit: tensors can use {} of a device", bytes(prediction.usable_bytes())));
    }
    if plan.loss_scale.is_some() {
        notes.push("the scale of the loss (f16) is the stack's own".into());
    }
    let has_clip = stack.knobs.iter().any(|knob| {
        (knob.write)(&Configuration { clip_norm: Some(0.5), ..Configuration::default() })
            != (knob.write)(&Configuration { clip_norm: Some(0.25), ..Configuration::default() })
    });
    if let Some(norm) = plan.clip_norm.filter(|_| !has_clip) {
        notes.push(format!("clipping of the gradient's norm at {norm} is the program's"));
    }
    notes
}

/// True if a stack's file of this configuration states recomputation. Accelerate's does in the options of FSDP.
pub(super) fn has_recomputation(stack: &Stack, c: &Configuration) -> bool {
    match stack.name {
        "deepspeed" => false,
        "accelerate" => c.zero.is_some_and(|level| level > 0),
        _ => true,
    }
}

impl Page<'_> {
    /// Lines about the origin of the file, each behind a mark of comments.
    pub fn heading(&self, mark: &str) -> String {
        self.origin.iter().map(|line| format!("{mark}{line}\n")).collect()
    }

    /// Nodes and devices of each, as launchers take them.
    fn nodes(&self) -> [u32; 2] {
        let devices = self.configuration.devices.unwrap_or(1);
        let each = self.configuration.devices_per_node.unwrap_or(devices).min(devices).max(1);
        [devices.div_ceil(each), each]
    }

    pub fn torchrun(&self) -> String {
        self.launcher("--nnodes", "--nproc-per-node")
    }

    pub fn launcher(&self, nodes: &str, each: &str) -> String {
        let [count, devices] = self.nodes();
        format!("{nodes} {count} {each} {devices}")
    }
}

/// A value as a Python literal.
pub fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Array(values) => format!("[{}]", values.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let entries = map.iter().map(|(name, value)| format!("{name:?}: {}", python(value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// Settings as options of a shell script, in an array.
pub fn shell(page: &Page<'_>, name: &str) -> String {
    let mut text = format!("{}\n{name}=(\n", page.heading("# "));
    for (name, value) in &page.settings {
        // Writing to a string does not fail.
        let _ = writeln!(text, "    {}", page.stack.set(name, value));
    }
    text + ")\n"
}

/// Settings as assignments of a Python program, one a line.
pub fn assignments(page: &Page<'_>, start: &str, literal: fn(&Value) -> String) -> String {
    page.settings.iter().map(|(name, value)| format!("{start}{name} = {}\n", literal(value))).collect()
}

/// A value as YAML. Texts that YAML reads as a truth, a number or nothing are in quotes.
pub(super) fn scalar(value: &Value) -> String {
    const OTHERS: [&str; 11] = ["", "~", "null", "y", "n", "yes", "no", "on", "off", "true", "false"];
    match value.as_str() {
        Some(text) if text.parse::<f64>().is_ok() => format!("'{text}'"),
        Some(text) if OTHERS.iter().any(|other| text.eq_ignore_ascii_case(other)) => format!("'{text}'"),
        _ => bare(value),
    }
}

/// Settings as YAML, with mappings for names with dots.
pub fn yaml(page: &Page<'_>) -> String {
    let mut text = page.heading("# ") + "\n";
    let mut written: Vec<&str> = Vec::new();
    for (name, value) in &page.settings {
        let Some((outer, _)) = name.split_once('.') else {
            let _ = writeln!(text, "{name}: {}", scalar(value));
            continue;
        };
        if written.contains(&outer) {
            continue;
        }
        written.push(outer);
        let _ = writeln!(text, "{outer}:");
        for (name, value) in &page.settings {
            if let Some(inner) = name.strip_prefix(outer).and_then(|rest| rest.strip_prefix('.')) {
                let _ = writeln!(text, "  {inner}: {}", scalar(value));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_yaml_stay_texts() {
        for text in ["no", "Off", "true", "null", "12", "1e3", ""] {
            assert_eq!(scalar(&Value::from(text)), format!("'{text}'"));
        }
        assert_eq!(scalar(&Value::from("bf16")), "bf16");
        assert_eq!([scalar(&Value::Bool(false)), scalar(&Value::from(2))], ["false", "2"]);
    }
}

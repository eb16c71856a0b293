//! The short answer of a plan, in the words of people who set degrees by hand: degrees, batch sizes and predictions. It
//! is the first part of every report and fits on a screen of 80 columns and 24 lines.

use crate::report::words::level_of_most;
use crate::units::{bytes, digits, gibibytes, plural, seconds};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Alternative, Plan, Stage, Target};
use altiplano_ir::recompute::Recompute;
use altiplano_planner::features::one_device::{ENOUGH, FASTER};
use altiplano_planner::features::parallelism::{Parallelism, parallelism};

/// Fraction of a stage's work that an axis must treat alike for the stage to have a single degree.
const ALIKE: f64 = 0.9;
/// Maximum number of stages whose degrees are listed one by one.
const TOLD: usize = 4;

/// `DP 16 (FSDP) x TP 1 x PP 1 x CP 1 x EP 1, micro-batch 2 a GPU, 4 accumulation steps, recompute none: 5.56 s, 23.6k tokens/s/GPU,
/// 612 TFLOP/s/GPU, 69.3 GB (64.5 GiB) of 80.0 GB`.
pub fn answer(plan: &Plan) -> String {
    answer_of(plan, &parallelism(plan))
}

/// [`answer`] of a plan whose degrees are known.
pub(super) fn answer_of(plan: &Plan, all: &[Parallelism]) -> String {
    let Some(first) = all.first() else { return String::new() };
    format!("{}, {}: {}", degrees(plan, all), batches(plan, first), predicted(plan))
}

/// The intended user of the plan.
pub(crate) fn audience(plan: &Plan) -> String {
    match plan.target {
        Target::Altiplano => {
            "for Altiplano's own runtime (--target fsdp, megatron or xla plans what those can run)".to_string()
        }
        target => format!("for {}, as its options configure it (--target {})", software(target), target.name()),
    }
}

/// The plan on more devices whose advantage is within the prediction error, if there is one.
pub(crate) fn faster(plan: &Plan) -> Option<&Alternative> {
    plan.alternatives.iter().find(|line| line.name == FASTER)
}

/// Says that one device is enough, if so, and what more devices would gain.
pub(crate) fn enough(plan: &Plan) -> Option<String> {
    let more = faster(plan)?;
    let most = 100.0 * (ENOUGH - 1.0);
    Some(format!(
        "one {} is enough: {}, less than the {most:.0} % that a prediction may be off by (--prefer fastest takes it)",
        device(plan),
        more.detail
    ))
}

/// The degree of sharded storage, in the words of the software that runs the plan.
pub(crate) fn sharded(target: Target, level: u8) -> String {
    match level {
        0 if target.is_fsdp() => "DDP".to_string(),
        1 | 2 if target.is_fsdp() => "SHARD_GRAD_OP".to_string(),
        _ if target.is_fsdp() => "FULL_SHARD".to_string(),
        level => format!("ZeRO-{level}"),
    }
}

/// The usual name of a target.
fn software(target: Target) -> &'static str {
    match target {
        Target::Altiplano => "Altiplano",
        Target::Megatron => "Megatron-LM",
        Target::Fsdp => "PyTorch FSDP",
        Target::Xla => "JAX on XLA",
        Target::Torchtitan => "torchtitan",
        Target::Deepspeed => "DeepSpeed",
    }
}

fn degrees(plan: &Plan, all: &[Parallelism]) -> String {
    let lanes = plan.num_lanes();
    let mut pipeline = format!("PP {lanes}");
    if plan.virtual_stages > 1 {
        pipeline += &format!(" ({} virtual stages)", plan.virtual_stages);
    }
    // Stages of one lane have one mesh, but may use it differently.
    let users = plan.graph.users();
    let text = |(stage, of): (&Stage, &Parallelism)| of_stage(plan, stage, level_of_most(plan, stage, &users), of);
    let texts: Vec<String> = plan.stages.iter().zip(all).map(text).collect();
    let mut used = match (plan.num_devices(), plan.cluster.num_devices()) {
        (used, has) if used < has => format!(", {used} of {has} {}s", device(plan)),
        _ => String::new(),
    };
    if let Some(over) = &plan.servers {
        let how = if over.asynchronous { "asynchronous " } else { "" };
        let servers = over.servers.len();
        used = format!(
            ", {} and {}",
            plural(over.workers.len() as u64, "worker"),
            plural(servers as u64, &format!("{how}server"))
        );
    }
    if all.iter().any(|of| of.agreement < ALIKE) {
        used = format!(" (some ops otherwise){used}");
    }
    if texts.iter().all(|text| *text == texts[0]) {
        // Puts the pipeline degree in its customary position.
        return match texts[0].split_once(" x CP ") {
            Some((before, after)) => format!("{before} x {pipeline} x CP {after}{used}"),
            None => format!("{} x {pipeline}{used}", texts[0]),
        };
    }
    let mut runs: Vec<(usize, usize, &str)> = Vec::new();
    for (i, text) in texts.iter().enumerate() {
        match runs.last_mut() {
            Some((_, last, same)) if same == text => *last = i,
            _ => runs.push((i, i, text)),
        }
    }
    let told = runs.iter().take(TOLD).map(|&(first, last, text)| match first == last {
        true => format!("stage{first} {text}"),
        false => format!("stage{first} to stage{last} {text}"),
    });
    let told = told.collect::<Vec<_>>().join("; ");
    let more = if runs.len() > TOLD { format!("; and {} more", runs.len() - TOLD) } else { String::new() };
    format!("{pipeline}, stages that differ: {told}{more}{used}")
}

/// `DP 16 (FSDP) x TP 1 x CP 1 x EP 1`, or `DP 16 (FSDP, in 2 groups) x ...`.
fn of_stage(plan: &Plan, stage: &Stage, level: u8, of: &Parallelism) -> String {
    let Parallelism { data, tensor, context, expert, repeated, .. } = *of;
    let data = data * plan.servers.as_ref().map_or(1, |over| over.workers.len() as u32);
    let sharded = match (level, plan.target) {
        _ if stage.mesh.num_devices() == 1 => String::new(),
        (0, target) if !target.is_fsdp() => String::new(),
        (2.., target) if target.is_fsdp() => format!(" (FSDP, {})", sharded(target, level)),
        (3, Target::Deepspeed) => " (ZeRO-3)".to_string(),
        (3, _) => " (FSDP)".to_string(),
        (level, target) => format!(" ({})", sharded(target, level)),
    };
    let sharded = match sharded.strip_suffix(')') {
        Some(how) if of.groups > 1 => format!("{how}, in {} groups)", of.groups),
        _ => sharded,
    };
    let mut text = format!("DP {data}{sharded} x TP {tensor} x CP {context} x EP {expert}");
    if repeated > 1 {
        text += &format!(" x {repeated} that repeat work");
    }
    text
}

/// `micro-batch 2 a GPU, 4 accumulation steps, recompute none`.
fn batches(plan: &Plan, of: &Parallelism) -> String {
    let steps = u64::from(plan.microbatches_of_worker());
    let times = match (plan.num_lanes(), plan.schedule.trains()) {
        (1, true) => plural(steps, "accumulation step"),
        _ => plural(steps, "microbatch"),
    };
    let whose = if of.tensor * of.context * of.repeated > 1 { "replica".to_string() } else { device(plan).to_string() };
    let size = match plan.graph.batch {
        0 => "micro-batch as traced".to_string(),
        _ => {
            let (samples, data) = (plan.microbatch, u64::from(of.data.max(1)));
            let each =
                if samples % data == 0 { (samples / data).to_string() } else { digits(samples as f64 / data as f64) };
            format!("micro-batch {each} a {whose}")
        }
    };
    let recompute = if plan.schedule.trains() { format!(", recompute {}", recomputed(plan)) } else { String::new() };
    format!("{size}, {times}{recompute}")
}

/// The recomputation: `none`, `full`, `selective`, or the number of layers of each level.
fn recomputed(plan: &Plan) -> String {
    let levels: Vec<Recompute> =
        plan.stages.iter().flat_map(|stage| stage.layers.clone().map(|layer| stage.recomputes(layer))).collect();
    let of = |level: Recompute| levels.iter().filter(|&&l| l == level).count();
    let (none, selective, full, all) =
        (of(Recompute::None), of(Recompute::Selective), of(Recompute::Full), levels.len());
    match (none, selective, full) {
        (_, 0, 0) => "none".to_string(),
        (0, _, 0) => "selective".to_string(),
        (0, 0, _) => "full".to_string(),
        (_, 0, n) => format!("full in {n} of {all} layers"),
        (_, n, 0) => format!("selective in {n} of {all} layers"),
        (_, n, m) => format!("full in {m} and selective in {n} of {all} layers"),
    }
}

/// `5.56 s, 23.6k tokens/s/GPU, 612 TFLOP/s/GPU, 69.3 GB (64.5 GiB) of 80.0 GB`.
fn predicted(plan: &Plan) -> String {
    let p = &plan.predicted;
    let (devices, what) = (f64::from(plan.num_devices().max(1)), device(plan));
    let rate = match tokens_of_sample(&plan.graph) {
        Some(tokens) => format!("{} tokens/s/{what}", thousands(p.samples_per_s * tokens as f64 / devices)),
        None => format!("{} samples/s", thousands(p.samples_per_s)),
    };
    let flops = p.model_flop / p.step_time_s.max(f64::MIN_POSITIVE) / devices;
    let flops = match flops {
        f if f >= 1e11 => format!("{} TFLOP/s/{what}", digits(f / 1e12)),
        f => format!("{} GFLOP/s/{what}", digits(f / 1e9)),
    };
    // The stage that uses the largest fraction of its memory.
    let part = |s: &&Stage| s.predicted.peak_bytes as f64 / plan.group_of(s).device.memory_bytes.max(1) as f64;
    let fullest = plan.stages.iter().max_by(|a, b| part(a).total_cmp(&part(b)));
    let memory = fullest.map_or(String::new(), |stage| {
        let (held, has) = (stage.predicted.peak_bytes, plan.group_of(stage).device.memory_bytes);
        format!(", {} ({}) of {}", bytes(held), gibibytes(held), bytes(has))
    });
    format!("{}, {rate}, {flops}{memory}", seconds(p.step_time_s))
}

/// `23.6k`.
fn thousands(value: f64) -> String {
    match value {
        v if v < 1e3 => digits(v),
        v if v < 1e6 => format!("{}k", digits(v / 1e3)),
        v => format!("{}M", digits(v / 1e6)),
    }
}

/// The name of a device.
fn device(plan: &Plan) -> &'static str {
    use altiplano_ir::cluster::DeviceKind;
    match plan.cluster.groups.iter().all(|group| group.device.kind == DeviceKind::Gpu) {
        true => "GPU",
        false => "worker",
    }
}

/// Tokens per sample: integers of an input, each of which looks up a row of a parameter.
fn tokens_of_sample(graph: &Graph) -> Option<u64> {
    // For each value, the integer input from which it is looked up.
    let mut of_ids: Vec<Option<ValueId>> = vec![None; graph.len()];
    let mut tokens: Option<u64> = None;
    for v in graph.values() {
        let node = graph.node(v);
        match &node.op {
            Op::Input(_) if node.ty.dtype.is_integer() && node.ty.rank() >= 2 && node.batch_dims != 0 => {
                of_ids[v.index()] = Some(v);
            }
            Op::Gather(_) if node.operands.len() > 1 => {
                if let Some(input) = of_ids[node.operands[1].index()]
                    && is_parameter(graph, node.operands[0])
                {
                    let node = graph.node(input);
                    let dims = node.ty.shape.iter().enumerate().filter(|(d, _)| node.batch_dims >> d & 1 == 0);
                    let each: u64 = dims.map(|(_, &size)| size).product();
                    tokens = Some(tokens.unwrap_or(0).max(each));
                }
            }
            _ if node.ty.dtype.is_integer() => {
                of_ids[v.index()] = node.operands.iter().find_map(|o| of_ids[o.index()]);
            }
            _ => {}
        }
    }
    tokens
}

fn is_parameter(graph: &Graph, value: ValueId) -> bool {
    let node = graph.node(value);
    match &node.op {
        Op::Parameter(_) => true,
        Op::Convert(_) | Op::Transpose(_) | Op::Reshape(_) => is_parameter(graph, node.operands[0]),
        _ => false,
    }
}

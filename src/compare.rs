//! Compares a plan with another one, or with a configuration in use today.
//!
//! Users state such a configuration in their own terms (`tp=4 pp=2 mbs=1 recompute`). It becomes a plan on the same
//! cluster, and the same cost model predicts it. If its step time was measured, the prediction error also corrects the
//! plan's prediction.

use crate::error::Error;
use crate::plan_diff::{Moves, layouts, layouts_table, posed_differently, stages};
use crate::report::{side_by_side, side_by_side_json};
use crate::simulate::Simulation;
use crate::units::{digits, seconds};
use altiplano_cost_models::Rooflines;
use altiplano_ir::plan::{Execution, Plan, Schedule, Target, Update};
use altiplano_ir::recompute::Recompute;
use altiplano_planner::features::scaled_products::as_run_by;
use altiplano_planner::features::stacks::stack;
use altiplano_planner::features::target::execution;
use altiplano_planner::search::fixed_degrees::Degrees;
use altiplano_planner::search::layout::Layout;
use altiplano_planner::search::sweep::configured;
use altiplano_planner::{PlanFailure, Request};
use serde_json::{Value, json};
use std::fmt::Write;
use std::str::FromStr;

/// A configuration in the user's terms. Omitted degrees follow from the cluster; omitted features are off.
#[derive(Clone, Debug, PartialEq)]
pub struct Baseline {
    pub target: Target,
    pub tp: u32,
    pub pp: u32,
    /// Default: the devices that remain after tensor and pipeline parallelism.
    pub dp: Option<u32>,
    /// Samples per replica and microbatch.
    pub micro_batch: u64,
    pub zero: u8,
    pub recompute: Recompute,
}

impl FromStr for Baseline {
    type Err = String;

    /// Parses `tp=4 pp=2 dp=8 mbs=1 zero=1 recompute target=megatron`, in any order, separated by spaces or commas.
    fn from_str(text: &str) -> Result<Baseline, String> {
        let target = Target::Megatron;
        let recompute = Recompute::None;
        let mut baseline = Baseline { target, tp: 1, pp: 1, dp: None, micro_batch: 1, zero: 0, recompute };
        let mut seen: Vec<&str> = Vec::new();
        for word in text.split([' ', ',']).filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            if seen.contains(&name) {
                return Err(format!("{word}: {name} is given twice"));
            }
            seen.push(name);
            let number = || match value.parse::<u32>() {
                Ok(0) if name != "zero" => Err(format!("{word}: must be at least 1")),
                Ok(number) => Ok(number),
                Err(_) => Err(format!("{word}: expected {name}=N with a whole number")),
            };
            match name {
                "tp" => baseline.tp = number()?,
                "pp" => baseline.pp = number()?,
                "dp" => baseline.dp = Some(number()?),
                "mbs" => baseline.micro_batch = u64::from(number()?),
                "zero" => {
                    baseline.zero = number().and_then(|z| match u8::try_from(z) {
                        Ok(z @ 0..=3) => Ok(z),
                        _ => Err(format!("{word}: must be 0, 1, 2 or 3")),
                    })?
                }
                "recompute" => {
                    baseline.recompute = match value {
                        "" | "full" => Recompute::Full,
                        "selective" => Recompute::Selective,
                        "none" => Recompute::None,
                        _ => {
                            return Err(format!(
                                "{word}: expected recompute=full, recompute=selective or recompute=none"
                            ));
                        }
                    }
                }
                "target" => {
                    let known = Target::ALL.into_iter().find(|t| t.name() == value);
                    let names = || Target::ALL.map(Target::name).join(", ");
                    baseline.target = known.ok_or_else(|| format!("{word}: expected one of {}", names()))?;
                }
                _ => return Err(format!("{word}: not one of tp, pp, dp, mbs, zero, recompute, target")),
            }
        }
        let Baseline { target, tp, pp, zero, .. } = baseline;
        let stack = stack(target);
        match target.name() {
            _ if seen.is_empty() => Err("expected degrees such as tp=4 pp=2".into()),
            name if tp > 1 && !stack.tensor => Err(format!("tp={tp}: {name} runs no tensor parallelism")),
            name if pp > 1 && !stack.pipelines => Err(format!("pp={pp}: {name} runs no pipelines")),
            name if !stack.shards(zero, tp, pp) => Err(format!("zero={zero}: {name} runs no such storage here")),
            _ => Ok(baseline),
        }
    }
}

impl Baseline {
    /// Builds the plan of this configuration for the model, batch and cluster of another plan.
    ///
    /// # Errors
    /// Fails if the degrees do not fit the cluster or the batch, or if there is no such plan.
    pub fn plan(&self, like: &Plan) -> Result<Plan, Error> {
        let option = |problem| Error::Option { option: "--baseline", problem };
        let devices = like.cluster.num_devices();
        let each = u64::from(self.tp) * u64::from(self.pp);
        let dp = self.dp.map_or(u64::from(devices) / each.max(1), u64::from);
        if dp == 0 || each.saturating_mul(dp) > u64::from(devices) {
            return Err(option("has more devices than the plan's cluster: tp x pp x dp is too large"));
        }
        if self.dp.is_none() && each * dp != u64::from(devices) {
            return Err(option("does not divide the plan's cluster: tp x pp must divide its devices, or give dp"));
        }
        let together = self.micro_batch.saturating_mul(dp);
        if like.graph.batch == 0 {
            return Err(option("cannot be planned: the plan's graph keeps to the batch it was traced at"));
        }
        if like.global_batch % together != 0 {
            return Err(option("does not divide the global batch: mbs x dp must"));
        }
        let num_microbatches = u32::try_from(like.global_batch / together).unwrap_or(u32::MAX);
        let mut request = Request::of_plan(like);
        // The software in use today is synchronous.
        let is_late = matches!(like.schedule, Schedule::PipeDream | Schedule::Found);
        request.schedule = Some(if is_late { Schedule::OneFOneB } else { like.schedule });
        request.training.update = Update::Synchronous;
        request.servers = None;
        request.allow_microbatch_semantics = true;
        request.target = self.target;
        if self.target != Target::Altiplano {
            request = as_run_by(self.target, &request).into_owned();
        }
        request.execution = Execution {
            scales_factors: request.execution.scales_factors,
            ..execution(self.target, &like.cluster, &like.graph, Some(self.zero))
        };
        request.fused_attention = None;
        let degrees = Degrees {
            dp: dp as u32,
            tp: self.tp,
            cp: 1,
            stages: self.pp,
            virtual_stages: 1,
            num_microbatches,
            zero: self.zero,
            recompute: self.recompute,
            layout: Layout::Even,
            experts: 1,
            groups: 1,
            sequence: false,
        };
        configured(&request, &degrees, &Rooflines::of(&request.cluster)).map_err(|failure| match failure {
            PlanFailure::NoCombination => {
                option("has no plan: a stage's devices must be within a node, or whole nodes")
            }
            failure => failure.into(),
        })
    }
}

/// Two plans side by side, each under a name.
pub struct Comparison<'a> {
    pub names: [&'a str; 2],
    pub simulations: [Simulation; 2],
}

impl<'a> Comparison<'a> {
    /// # Errors
    /// Fails if one of the plans cannot be lowered.
    pub fn new(names: [&'a str; 2], one: &Plan, other: &Plan) -> Result<Self, Error> {
        let simulations = [Simulation::new(one.clone(), None)?, Simulation::new(other.clone(), None)?];
        Ok(Comparison { names, simulations })
    }

    fn plans(&self) -> [&Plan; 2] {
        self.simulations.each_ref().map(Simulation::plan)
    }

    /// Returns whether parameters can move from one plan to the other, because the same devices hold them.
    fn share_devices(&self) -> bool {
        let [one, other] = self.plans();
        one.cluster == other.cluster && one.model == other.model
    }

    /// Describes the differences in words: in the problem, in predicted times and their causes, and in the placement of
    /// tensors.
    pub fn text(&self) -> String {
        let (mut out, names, [one, other]) = (String::new(), self.names, self.plans());
        let posed = posed_differently(one, other);
        if !posed.is_empty() {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "They are not for the same, and what they take differs for that too:");
            posed.iter().for_each(|(what, [a, b])| {
                let _ = writeln!(out, "  {what}: {a} and {b}");
            });
            let _ = writeln!(out);
        }
        let _ = writeln!(out, "{}", side_by_side(names, self.simulations.each_ref()));
        let differ = layouts_table(names, &layouts(one, other));
        let tables = [("Stages", stages(names, one, other)), ("Layouts that differ", differ)];
        for (title, table) in tables.iter().filter(|(_, table)| !table.is_empty()) {
            let _ = writeln!(out, "\n{title}\n{table}");
        }
        if self.share_devices() {
            let _ = write!(out, "\nParameters, from {} to {}\n{}", names[0], names[1], Moves::new(one, other));
        }
        out.trim_end().to_string()
    }

    /// The comparison as JSON (`docs/comparison.schema.json`).
    pub fn json(&self) -> Value {
        let [one, other] = self.plans();
        let mut json = side_by_side_json(self.names, self.simulations.each_ref());
        json["format"] = json!("altiplano.comparison");
        json["version"] = json!(1);
        let posed = posed_differently(one, other);
        json["posed_differently"] = posed.into_iter().map(|(what, of)| json!({"what": what, "values": of})).collect();
        json["layouts"] = json!(layouts(one, other));
        if self.share_devices() {
            json["parameters"] = json!(Moves::new(one, other));
        }
        json
    }

    /// Describes the plan beside a configuration in use today; `measured_s` is the measured step time of that
    /// configuration.
    pub fn text_of_baseline(&self, measured_s: Option<f64>) -> String {
        let [plan, baseline] = self.plans();
        let mut out = side_by_side(self.names, self.simulations.each_ref());
        let (ours, theirs) = (plan.predicted.step_time_s, baseline.predicted.step_time_s);
        let _ = writeln!(out, "\n\nthe baseline is for {}", baseline.target.name());
        let _ = writeln!(out, "the plan is predicted {} times as fast", digits(theirs / ours));
        if let Some(measured_s) = measured_s {
            let _ = writeln!(
                out,
                "the baseline takes {} a step measured and {} predicted; off by as much, the plan takes {}",
                seconds(measured_s),
                seconds(theirs),
                seconds(ours * measured_s / theirs)
            );
        }
        out.trim_end().to_string()
    }

    /// As [`Comparison::json`], with the measured step time, and the plan's prediction corrected by the same error.
    pub fn json_of_baseline(&self, measured_s: Option<f64>) -> Value {
        let mut json = self.json();
        if let Some(measured_s) = measured_s {
            let [ours, theirs] = self.plans().map(|p| p.predicted.step_time_s);
            json["measured_s"] = json!(measured_s);
            json["expected_s"] = json!(ours * measured_s / theirs);
        }
        json
    }
}

/// Parses seconds as people write them: `5.3`, `5.3s`, `830ms`.
pub fn duration(text: &str) -> Result<f64, &'static str> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1000.0),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let value: f64 = number.trim().parse().map_err(|_| "expected seconds such as 5.3s or 830ms")?;
    let seconds = value / unit;
    if seconds.is_finite() && seconds > 0.0 { Ok(seconds) } else { Err("must be more than 0") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn baselines_are_read_in_any_order() {
        let read: Baseline = "pp=2, tp=4 recompute mbs=8 zero=1 target=altiplano".parse().unwrap();
        let target = Target::Altiplano;
        assert_eq!(
            read,
            Baseline { target, tp: 4, pp: 2, dp: None, micro_batch: 8, zero: 1, recompute: Recompute::Full }
        );
    }

    #[test]
    fn what_a_baseline_lacks_is_said() {
        let said = |text: &str| text.parse::<Baseline>().unwrap_err();
        assert_eq!(said("tp=x"), "tp=x: expected tp=N with a whole number");
        assert_eq!(said("tp=0"), "tp=0: must be at least 1");
        assert_eq!(said("zero=4"), "zero=4: must be 0, 1, 2 or 3");
        assert_eq!(said("tp=2 tp=2"), "tp=2: tp is given twice");
        assert_eq!(said("target=fsdp tp=2"), "tp=2: fsdp runs no tensor parallelism");
        assert_eq!(said("target=xla pp=2"), "pp=2: xla runs no pipelines");
        assert_eq!(said(""), "expected degrees such as tp=4 pp=2");
        assert_eq!(said("ep=2"), "ep=2: not one of tp, pp, dp, mbs, zero, recompute, target");
    }

    #[test]
    fn durations() {
        assert_eq!(duration("5.3s"), Ok(5.3));
        assert_eq!(duration("830ms"), Ok(0.83));
        assert!(duration("-1").is_err() && duration("soon").is_err() && duration("inf").is_err());
    }
}

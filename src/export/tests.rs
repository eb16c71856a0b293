use super::*;
use crate::{load_cluster, model_of, plan, request};
use altiplano_ir::plan::Offload;
use altiplano_ir::types::TensorType;
use altiplano_planner::{Request, Silent};
use std::path::Path;

const MODEL: &str = "examples/models/gpt-small-demo.mlir";

fn planned(fix: impl Fn(&mut Request)) -> Plan {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL);
    let model = model_of(&file, &std::fs::read(&file).expect("the demo"), &Default::default()).expect("a model");
    let mut request = request(&model, load_cluster("local:4").expect("a cluster"));
    (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(2), Some(2), Some(1));
    fix(&mut request);
    plan(&request, &Silent).expect("a plan")
}

fn refusal(plan: &Plan) -> String {
    let error = export(plan, Stack::Jax).expect_err("no target can say the plan");
    assert_eq!(error.exit_code(), 2);
    error.to_string()
}

#[test]
fn what_no_module_can_say_is_refused_by_name() {
    let one = planned(|_| ());
    assert!(export(&one, Stack::Jax).is_ok());
    let changed = |change: fn(&mut Plan)| {
        let mut plan = one.clone();
        change(&mut plan);
        refusal(&plan)
    };
    assert!(changed(|plan| plan.update = Update::Stale).contains("--update stale"));
    assert!(changed(|plan| plan.schedule = Schedule::PipeDream).contains("--schedule pipedream"));
    assert!(changed(|plan| plan.schedule = Schedule::Forward).contains("trains nothing"));
    assert!(changed(|plan| plan.servers = Some(Default::default())).contains("parameter servers"));
    assert!(changed(|plan| plan.stages[0].offload = Offload::OPTIMIZER).contains("optimizer state in host memory"));
    let several = |plan: &mut Plan| (plan.num_microbatches, plan.loss) = (2, LossKind::Other);
    assert!(changed(several).contains("--num-microbatches 1"));
}

/// The lines of a table of the module.
fn table<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let lines = text.lines().skip_while(|line| *line != format!("{name} = {{"));
    lines.skip(1).take_while(|line| *line != "}").map(str::trim).collect()
}

#[test]
fn parameters_gradients_and_state_have_their_own_layouts() {
    let plan = planned(|request| request.degrees.zero = Some(1));
    let exported = export(&plan, Stack::Jax).expect("a module");
    let entry = |name: &str| {
        let lines = table(&exported.text, name);
        assert_eq!(lines.len(), plan.stages[0].parameters.len());
        lines.into_iter().find(|line| line.contains("['h0']['fc']['w']")).expect("the parameter").to_string()
    };
    let name = r#""params['h0']['fc']['w']": "#;
    assert_eq!(entry("PARAMETERS"), format!(r#"{name}P(None, "tensor"),"#));
    assert_eq!(entry("STATE"), format!(r#"{name}P(None, ("tensor", "data")),"#));
    assert_eq!(table(&exported.text, "MESH"), [r#""data": 2,"#, r#""tensor": 2,"#]);
    assert_eq!(table(&exported.text, "BATCH_DIMS"), [r#""labels": (0, 1),"#, r#""tokens": (0, 1),"#]);
    assert!(exported.text.contains(&fingerprint(&plan.to_json())));
}

#[test]
fn interleaved_parts_are_stored_whole_and_priced() {
    let mut plan = planned(|_| ());
    let mesh = plan.stages[0].mesh.clone();
    let split = Sharding::parse("[{3, 128: tensor}]", &[384], &mesh).expect("a layout");
    let storage = plan.stages[0].parameters.get_mut("params['h0']['qkv']['b']").expect("the parameter");
    (storage.parameter, storage.gradient, storage.state) = (split.clone(), split.clone(), split);
    let exported = export(&plan, Stack::Jax).expect("a module");
    assert!(table(&exported.text, "PARAMETERS").contains(&r#""params['h0']['qkv']['b']": P(None),"#));
    let note = exported.notes.iter().find(|note| note.contains("contiguous blocks")).expect("a note");
    assert!(note.contains("'params['h0']['qkv']['b']'") && note.contains("more on each device"), "{note}");
    // The header repeats what stderr says.
    assert!(exported.text.contains("contiguous blocks"));
}

#[test]
fn recomputation_is_priced() {
    let full = export(&planned(|request| request.recompute = Some(Recompute::Full)), Stack::Jax).expect("a module");
    let note = full.notes.iter().find(|note| note.starts_with("recomputation (full")).expect("a note");
    assert!(!note.contains(" 0 B more"), "{note}");
    assert!(full.text.contains("recomputation (full"));
    // The plan's own model keeps less than without recomputation.
    let kept = |text: &str| text.matches("keep(").count();
    let plain = export(&planned(|request| request.recompute = Some(Recompute::None)), Stack::Jax).expect("a module");
    assert!(kept(&full.text) < kept(&plain.text), "{} and {}", kept(&full.text), kept(&plain.text));
}

#[test]
fn layers_state_layouts_and_share_functions() {
    let plan = planned(|request| (request.degrees.dp, request.degrees.tp) = (Some(1), Some(4)));
    let text = export(&plan, Stack::Jax).expect("a module").text;
    // Four equal blocks, the embedding and the head.
    assert_eq!(text.matches("\ndef _layer").count() - 1, 3, "the functions of layers and the one that calls them");
    assert_eq!(text.matches("_layer(_layer1, at, ").count(), 4);
    assert!(text.contains("_layer(_layer0, at, "));
    assert!(text.lines().any(|line| line.contains("lax.dot_general") && line.contains("\"tensor\"")), "{text}");
    assert!(text.contains("return {\"loss\": "));
    assert!(!text.contains("RECEIVES"));
}

#[test]
fn pipelines_name_what_stages_exchange_and_the_order_of_their_calls() {
    let plan = planned(|request| {
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(1), Some(2), Some(2));
        request.batch.num_microbatches = Some(2);
        request.schedule = Some(Schedule::ZbH1);
    });
    let text = export(&plan, Stack::Jax).expect("a module").text;
    assert!(text.contains("DEVICES = [\n    [0, 1],\n    [2, 3],\n]"));
    assert!(text.contains("\"F0:0 F0:1 B0:0 W0:0 B0:1 W0:1\","), "the first stage runs ahead");
    assert!(text.contains("\"F1:0 B1:0 F1:1 B1:1 W1:0 W1:1\","), "weights wait");
    assert!(text.contains("LOSS_STAGE = 1"));
    // The residual stream goes forward, and its gradient back.
    let receives = text.split("RECEIVES = [").nth(1).expect("the table").split("\n]").next().expect("its end");
    assert_eq!(receives.matches("True)").count(), 1, "{receives}");
    assert!(receives.contains("\": (0, P("), "{receives}");
    // The embedding is the head's matrix too.
    let parameters = text.split("PARAMETERS = [").nth(1).expect("the table").split("\n]").next().expect("its end");
    assert_eq!(parameters.matches("\"params['wte']\"").count(), 2, "{parameters}");
}

#[test]
fn nothing_in_a_plan_ends_the_docstring() {
    let mut plan = planned(|_| ());
    plan.model = "\"\"\"\nimport os # \\".to_string();
    let text = export(&plan, Stack::Jax).expect("a module").text;
    assert!(text.starts_with("\"\"\"The plan of 'import os # ' on local:4"), "{}", &text[..200]);
    assert_eq!(text.split("import difflib").next().expect("a header").matches("\"\"\"").count(), 2);
}

#[test]
fn fingerprints_are_fnv_1a() {
    assert_eq!(fingerprint(""), "6c62272e07bb014262b821756295c58d");
    assert_eq!(fingerprint("a"), "d228cb696f1a8caf78912b704e4a8964");
}

/// The module is read back: a graph with the plan's layouts as pins, whose loss has the value of the plan's graph.
#[test]
fn a_stablehlo_module_has_the_layouts_and_the_values_of_the_plan() {
    use altiplano_ir::graph::Graph;
    use altiplano_ir::op::{Input, Op, Parameter};
    use altiplano_runtime::{HostTensor, evaluate};
    let plan = planned(|request| request.degrees.zero = Some(3));
    let exported = export(&plan, Stack::StableHlo).expect("a module");
    let imported = altiplano_import::stablehlo::import(&exported.text).expect("it is read back");
    let mesh = "mesh<data=2, tensor=2";
    let name = "['h0']['fc']['w']";
    let argument = imported.arguments.iter().find(|a| a.name.as_deref().is_some_and(|n| n.contains(name)));
    let value = argument.expect("the parameter").value;
    let pin = imported.graph.pins_of(value)[0].to_string();
    assert!(pin.contains(mesh) && pin.contains("data") && pin.contains("{tensor"), "{pin}");
    assert_eq!(imported.results[0].as_deref(), Some("loss"));
    assert_eq!(imported.results.len(), 1 + plan.graph.trained_parameters().count());
    // Weights of 13 values, so that each op of the graph changes the loss.
    let leaf = |ty: &TensorType| {
        let (modulus, middle, unit) = if ty.dtype.is_float() { (13, 6, 0.01) } else { (11, 0, 1.0) };
        let values: Vec<f64> = (1..=ty.elements()).map(|at| (at % modulus) as f64 - f64::from(middle)).collect();
        HostTensor::from_f64(ty.clone(), &values.iter().map(|value| value * unit).collect::<Vec<_>>())
    };
    let mut forward = (*plan.graph).clone();
    forward.outputs.truncate(1);
    let mut found = imported.graph.clone();
    found.outputs.truncate(1);
    let value = |graph: &Graph| {
        let leaves = graph.values().filter_map(|v| match &graph.node(v).op {
            Op::Parameter(Parameter { name, .. }) | Op::Input(Input { name, .. }) => {
                Some((name.clone(), leaf(graph.ty(v))))
            }
            _ => None,
        });
        evaluate(graph, &leaves.collect()).expect("its values")[0].to_f64()[0]
    };
    let (expected, found) = (value(&forward), value(&found));
    assert_eq!(found, expected, "the same ops in the same order have the same bits");
}

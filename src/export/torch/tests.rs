use super::Torch;
use crate::export::{Stack, export};
use crate::{load_cluster, model_of, plan, request};
use altiplano_ir::plan::{Plan, Schedule};
use altiplano_ir::recompute::Recompute;
use altiplano_planner::{Request, Silent};
use std::path::Path;

/// A decoder of four blocks, with the names of Transformers.
const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16}"#;

fn asked(cluster: &str, fix: impl Fn(&mut Request)) -> Result<Plan, crate::Error> {
    let model = model_of(Path::new("config.json"), CONFIG.as_bytes(), &Default::default())?;
    let mut request = request(&model, load_cluster(cluster)?);
    request.batch.global = Some(8);
    fix(&mut request);
    Ok(plan(&request, &Silent)?)
}

fn planned(cluster: &str, fix: impl Fn(&mut Request)) -> Plan {
    asked(cluster, fix).expect("a plan")
}

fn pipeline(fix: impl Fn(&mut Request)) -> Plan {
    planned("local:2", |request| {
        (request.degrees.pp, request.batch.num_microbatches) = (Some(2), Some(4));
        fix(request);
    })
}

/// The lines of a table or of a long string of the module.
fn lines<'a>(text: &'a str, first: &str, last: &str) -> Vec<&'a str> {
    let lines = text.lines().skip_while(|line| *line != first).skip(1);
    lines.take_while(|line| *line != last).map(str::trim).collect()
}

fn line<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines().find_map(|line| line.strip_prefix(&format!("{name} = "))).expect("the line")
}

#[test]
fn parameters_lie_as_planned_over_data_and_tensor_axes() {
    let plan = planned("local:4", |request| {
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(2), Some(2), Some(1));
        request.degrees.zero = Some(3);
    });
    let text = export(&plan, Stack::Torch).expect("a module").text;
    assert_eq!((line(&text, "DATA"), line(&text, "TENSOR")), (r#"["data"]"#, r#"["tensor"]"#));
    let parameters = lines(&text, "PARAMETERS = {", "}");
    assert_eq!(parameters.len(), plan.stages[0].parameters.len());
    // Column-parallel, and each part in two parts.
    assert!(parameters.contains(&r#""model.layers.0.mlp.up_proj.weight": (Shard(0), Shard(0)),"#), "{parameters:?}");
    assert_eq!((line(&text, "RESHARD"), line(&text, "STAGES")), ("True", "1"));
    assert_eq!(line(&text, "BLOCKS").matches("model.layers.").count(), 4);
    assert_eq!(line(&text, "RECOMPUTED"), "[]");
}

#[test]
fn blocks_are_recomputed_and_parts_of_them_are_priced() {
    let with = |level: Recompute| {
        let one = planned("local:2", |request| {
            (request.degrees.dp, request.degrees.pp, request.recompute) = (Some(2), Some(1), Some(level));
        });
        export(&one, Stack::Torch).expect("a module")
    };
    let full = with(Recompute::Full);
    assert!(line(&full.text, "RECOMPUTED").contains("model.layers.3"));
    let selective = with(Recompute::Selective);
    assert_eq!(line(&selective.text, "RECOMPUTED"), "[]");
    let note = selective.notes.iter().find(|note| note.starts_with("only whole blocks")).expect("a note");
    assert!(note.contains("more on each device"), "{note}");
}

#[test]
fn a_pipeline_has_its_cuts_and_every_action_once() {
    for (schedule, backward) in
        [(Schedule::OneFOneB, &["B"][..]), (Schedule::GPipe, &["B"]), (Schedule::ZbH1, &["I", "W"])]
    {
        let plan = pipeline(|request| request.schedule = Some(schedule));
        let text = export(&plan, Stack::Torch).expect("a module").text;
        assert_eq!(line(&text, "SPLITS"), r#"["model.layers.2"]"#);
        assert_eq!(line(&text, "TARGET"), r#""labels""#);
        let rows = lines(&text, "SCHEDULE = \"\"\"\\", "\"\"\"");
        assert_eq!(rows.len(), 2);
        for (stage, row) in rows.iter().enumerate() {
            let mut found: Vec<&str> = row.split(',').collect();
            found.sort_unstable();
            let passes = ["F"].iter().chain(backward);
            let mut all: Vec<String> =
                passes.flat_map(|pass| (0..4).map(move |microbatch| format!("{stage}{pass}{microbatch}"))).collect();
            all.sort_unstable();
            assert_eq!(found, all);
        }
    }
}

#[test]
fn what_a_module_cannot_say_is_refused_by_name() {
    let refusal = |plan: &Plan| export(plan, Stack::Torch).expect_err("a refusal").to_string();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/gpt-small-demo.mlir");
    let model = model_of(&file, &std::fs::read(&file).expect("the demo"), &Default::default()).expect("a model");
    let of_jax = plan(&request(&model, load_cluster("local:1").expect("a cluster")), &Silent).expect("a plan");
    assert!(refusal(&of_jax).contains("must come from torch.export"), "{}", refusal(&of_jax));

    let two = pipeline(|_| ());
    let mut meshes = two.clone();
    meshes.stages[1].mesh.axes[0].name = "other".to_string();
    assert!(
        Torch::of(&meshes).err().expect("a refusal").to_string().starts_with("stages 0 and 1 have different meshes")
    );
    let mut devices = two.clone();
    devices.stages[1].devices = devices.stages[0].devices.clone();
    assert!(Torch::of(&devices).err().expect("a refusal").to_string().contains("share some of their devices"));

    // The second stage begins after the norm of its first block.
    let mut inside = two.clone();
    let (v, moved) = inside.stages[1].shardings.pop_first().expect("a value");
    inside.stages[0].shardings.insert(v, moved);
    let problem = Torch::of(&inside).expect("stages").splits().expect_err("a refusal").to_string();
    assert!(problem.starts_with("stage 1 begins inside the block 'model.layers.2'"), "{problem}");
}

#[test]
fn plans_of_any_options_are_exported_or_refused_in_a_sentence() {
    let mut state = 7u64;
    let mut pick = |count: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % count
    };
    let (mut exported, mut refused) = (0, 0);
    for _ in 0..40 {
        let chosen: Vec<u64> = (0..9).map(|_| pick(4)).collect();
        let degree = |i: usize| [None, Some(1), Some(2), Some(2)][chosen[i] as usize];
        let plan = asked(["local:2", "local:4", "local:4", "local:8"][chosen[0] as usize], |request| {
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (degree(1), degree(2), degree(3));
            request.degrees.zero = [None, Some(0), Some(1), Some(3)][chosen[4] as usize];
            request.batch.num_microbatches = [None, Some(1), Some(2), Some(4)][chosen[5] as usize];
            request.recompute = [None, None, Some(Recompute::Selective), Some(Recompute::Full)][chosen[6] as usize];
            let schedules = [None, Some(Schedule::GPipe), Some(Schedule::ZbH1), Some(Schedule::PipeDream)];
            request.schedule = schedules[chosen[7] as usize];
            request.degrees.virtual_stages = [None, None, None, Some(2)][chosen[8] as usize];
        });
        let Ok(plan) = plan else { continue };
        match export(&plan, Stack::Torch) {
            Ok(module) => {
                exported += 1;
                assert_eq!(module.text.matches("\"\"\"\\\n").count(), 1);
            }
            Err(error) => {
                refused += 1;
                assert_eq!(error.exit_code(), 2);
                assert!(error.to_string().starts_with("--to torch: ") && !error.to_string().contains('\n'), "{error}");
            }
        }
    }
    assert!(exported > 5 && refused > 0, "{exported} exported, {refused} refused");
}

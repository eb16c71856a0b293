//! `altiplano serve --stdio`: its protocol, its failures, and answers that equal the command line's.

use crate::common::{DEMO, Scratch, succeeds};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running server and the pipes to it.
struct Server {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    next: u64,
}

impl Server {
    fn start() -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_altiplano"))
            .args(["serve", "--stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Server { input: child.stdin.take(), child, output, next: 1 }
    }

    fn send(&mut self, line: impl AsRef<[u8]>) {
        let input = self.input.as_mut().expect("an open pipe");
        input.write_all(line.as_ref()).and_then(|()| input.write_all(b"\n")).expect("the server reads");
    }

    /// The next message that is no progress.
    fn receive(&mut self) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).expect("a readable pipe") > 0, "the server has ended");
            let message: Value = serde_json::from_str(&line).expect("a line is JSON");
            assert_eq!(message["jsonrpc"], "2.0");
            if message["method"] != "progress" {
                return message;
            }
        }
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.next;
        self.next += 1;
        self.send(json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string());
        let answer = self.receive();
        assert_eq!(answer["id"], id);
        answer
    }

    /// The result of a question that has one.
    fn result(&mut self, method: &str, params: Value) -> Value {
        let mut answer = self.ask(method, params);
        assert_eq!(answer["error"], Value::Null, "{method}");
        answer["result"].take()
    }

    /// The data of a question's failure.
    fn failure(&mut self, method: &str, params: Value) -> Value {
        let mut answer = self.ask(method, params);
        assert_eq!(answer["result"], Value::Null, "{method}");
        answer["error"]["data"].take()
    }

    /// Ends the input, and expects the process to end.
    fn end(mut self) {
        self.input = None;
        assert!(self.child.wait().expect("the process can be waited for").success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect("the command prints JSON")
}

#[test]
fn answers_are_those_of_the_command_line() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--cluster", "local:4", "--pp", "2", "--global-batch", "16", "-o", &file]);
    let mut server = Server::start();
    let model = server.result("load_model", json!({"model": DEMO}))["model"].clone();
    let planned = server.result("plan", json!({"model": model, "cluster": "local:4", "pp": 2, "global_batch": 16}));
    let plan = planned["plan"].clone();
    let saved = scratch.path("saved.json").display().to_string();
    server.result("save", json!({"plan": plan, "output": saved}));
    let read = |file: &str| parsed(&std::fs::read_to_string(file).expect("a file"));
    // Plans say which command finds them; values may be spelled differently there.
    let without_maker = |mut plan: Value| {
        plan.as_object_mut().expect("an object").remove("made_by");
        plan
    };
    assert_eq!(without_maker(read(&saved)), without_maker(read(&file)));
    let command = read(&saved)["made_by"]["command"].as_str().expect("a command").to_string();
    assert_eq!(command, format!("altiplano plan {DEMO} --cluster=local:4 --global-batch=16 --pp=2"));

    let comparison = parsed(&succeeds(&["why-not", &file, "--tp", "4", "--json"]));
    assert_eq!(server.result("why_not", json!({"plan": plan, "tp": 4})), comparison);
    let advice = parsed(&succeeds(&["advise", &file, "--json", "--within", "1000"]));
    assert_eq!(server.result("advise", json!({"plan": plan, "within": 1000})), advice);
    let simulation = parsed(&succeeds(&["simulate", &file, "--json"]));
    assert_eq!(server.result("simulate", json!({"plan": plan})), simulation);
    let beside = parsed(&succeeds(&["compare", &file, "--baseline", "tp=2 mbs=2", "--json"]));
    assert_eq!(server.result("compare", json!({"plan": plan, "baseline": "tp=2 mbs=2"})), beside);
    for (params, command) in [
        (json!({"plan": plan, "op": "attention"}), ["why", &file, "--op", "attention"].as_slice()),
        (json!({"plan": plan, "stage": 1}), &["why", &file, "--stage", "1"]),
        (json!({"plan": plan, "param": "*fc*", "layer": 2}), &["why", &file, "--param", "*fc*", "--layer", "2"]),
    ] {
        let text = server.result("why", params)["text"].take();
        assert_eq!(text.as_str().map(str::trim_end), Some(succeeds(command).trim_end()));
    }
    let report = server.result("inspect", json!({"plan": plan}))["text"].take();
    assert_eq!(report.as_str().map(str::trim_end), Some(succeeds(&["inspect", &file]).trim_end()));
    server.end();
}

#[test]
fn a_judgement_is_the_plan_that_software_of_fixed_degrees_has() {
    let scratch = Scratch::new();
    // A vocabulary that GPUs pad.
    let config =
        r#"{"model_type": "gpt2", "vocab_size": 509, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 8}"#;
    let config = scratch.file("gpt.json", config);
    let mut server = Server::start();
    let model = server.result("load_model", json!({"model": config, "seq": 64}))["model"].clone();
    let mut fitting = 0;
    for (i, (tp, pp)) in [(1, 1), (2, 2), (1, 4), (4, 1), (2, 1), (1, 2), (3, 1), (8, 1)].into_iter().enumerate() {
        let (zero, micro) = (i % 2, 1 + i % 3);
        let recompute = ["none", "full"][i / 2 % 2];
        let options = json!({
            "model": model, "cluster": "dgx-a100:1", "global_batch": 48, "target": "megatron", "tp": tp, "pp": pp,
            "virtual_stages": 1, "zero": zero, "recompute": recompute, "micro_batch_size": micro,
        });
        let judged = server.result("judge", options.clone());
        let mut options = options;
        options["dp"] = json!((8 / (tp * pp)).max(1));
        options["remedies"] = json!(false);
        let planned = server.ask("plan", options);
        match planned.get("result") {
            Some(plan) => {
                fitting += 1;
                assert_eq!(judged["fits"], true, "{judged}");
                for figure in ["step_time_s", "peak_bytes", "mfu", "how", "of_stages", "lower_bound_s"] {
                    assert_eq!(judged[figure], plan[figure], "{figure} of tp {tp} pp {pp}");
                }
            }
            None => assert_eq!(judged["fits"], false, "tp {tp} pp {pp}: {judged}"),
        }
    }
    assert!(fitting >= 6, "{fitting} configurations fit");
    // A configuration of which the options alone say that it cannot be.
    let odd = json!({"model": model, "cluster": "dgx-a100:1", "global_batch": 48, "dp": 8, "micro_batch_size": 4});
    let judged = server.result("judge", odd);
    assert_eq!(judged["fits"], false, "{judged}");
    assert!(judged["reason"].as_str().is_some_and(|reason| reason.contains("--micro-batch-size: 4")), "{judged}");
    server.end();
}

#[test]
fn failures_have_the_fields_of_the_command_line() {
    let scratch = Scratch::new();
    let config =
        r#"{"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 8192, "n_layer": 2, "n_head": 64}"#;
    let config = scratch.file("large.json", config);
    let arguments = ["plan", &config, "--cluster", "local:2", "--seq", "64", "--global-batch", "2", "--json"];
    let printed = crate::common::altiplano(&arguments);
    let expected = parsed(&printed.stdout);
    let mut server = Server::start();
    let found = server.failure("plan", json!({"model": config, "cluster": "local:2", "seq": 64, "global_batch": 2}));
    for field in ["error", "shortage", "changes"] {
        assert_eq!(found[field], expected[field], "{field}");
    }
    assert_eq!((&found["kind"], &found["exit_code"]), (&json!("memory"), &json!(1)));
    for (method, params, kind, place) in [
        ("plan", json!({"model": "none.json"}), "file", json!("none.json")),
        ("plan", json!({"model": DEMO, "tp": "many"}), "option", json!("tp")),
        ("plan", json!({"model": DEMO, "tensors": 2}), "option", json!("tensors")),
        ("plan", json!({"model": DEMO, "frontier": true}), "option", json!("frontier")),
        ("plan", json!({"model": DEMO, "prove": true}), "option", json!("prove")),
        ("frontier", json!({"model": DEMO, "survive": 1}), "option", json!("survive")),
        ("trials", json!({"models": [DEMO, DEMO], "count": [1, 2, 3]}), "option", json!("--count")),
        ("trials", json!({"models": [DEMO, 3], "count": 1}), "option", json!("models")),
        ("plan", json!({"model": DEMO, "cluster": "none:3"}), "cluster", Value::Null),
        ("plan", json!({"model": "model:7"}), "option", json!("model:7")),
        ("why", json!({"plan": "plan:7", "op": "x"}), "option", json!("plan:7")),
        ("load_plan", json!({"file": DEMO}), "model", json!(DEMO)),
        ("judge", json!({"model": DEMO, "pin": "x"}), "option", json!("pin")),
        ("nothing", json!({}), "protocol", Value::Null),
    ] {
        let found = server.failure(method, params.clone());
        assert_eq!((&found["kind"], &found["place"]), (&json!(kind), &place), "{method} {params}: {found}");
        assert_eq!(found["exit_code"], 2);
    }
    server.end();
}

#[test]
fn bad_lines_are_answered_and_end_nothing() {
    let mut server = Server::start();
    for (line, code, id) in [
        ("{".to_string(), -32700, Value::Null),
        ("[]".to_string(), -32600, Value::Null),
        ("3".to_string(), -32600, Value::Null),
        (r#"{"id": 1}"#.to_string(), -32600, json!(1)),
        (r#"{"id": 2, "method": 3}"#.to_string(), -32600, json!(2)),
        (r#"{"id": {}, "method": "ping"}"#.to_string(), -32600, Value::Null),
        (r#"{"id": 3, "method": "plan", "params": [1]}"#.to_string(), -32600, json!(3)),
        (r#"{"id": 4, "method": "plan"}"#.to_string(), -32602, json!(4)),
        (r#"{"id": 5, "method": "no"}"#.to_string(), -32601, json!(5)),
        ("x".repeat((1 << 20) + 1), -32700, Value::Null),
        ("[".repeat(100_000), -32700, Value::Null),
    ] {
        server.send(&line);
        let answer = server.receive();
        let shown = &line[..line.len().min(60)];
        assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!(code), &id), "{shown}");
    }
    server.send([0xff, 0xfe]);
    assert_eq!(server.receive()["error"]["code"], -32700);
    // No answer is due to these.
    server.send("");
    server.send(r#"{"method": "cancel", "params": {"id": 9}}"#);
    server.send(r#"{"method": "anything"}"#);
    server.send(r#"{"id": 6, "result": {}}"#);
    assert_eq!(server.result("ping", json!({})), json!({}));
    server.end();
}

#[test]
fn a_cancelled_search_answers_with_what_it_has_and_others_go_on() {
    let scratch = Scratch::new();
    let config = r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 2048, "n_layer": 32, "n_head": 16}"#;
    let config = scratch.file("gpt.json", config);
    let mut server = Server::start();
    let params =
        json!({"model": config, "seq": 1024, "precision": "bf16", "cluster": "dgx-a100:4", "global_batch": 512});
    server.send(json!({"id": "long", "method": "plan", "params": params}).to_string());
    // Another call may not have its id.
    server.send(json!({"id": "long", "method": "plan", "params": params}).to_string());
    assert_eq!(server.receive()["error"]["code"], -32600);
    assert_eq!(server.result("ping", json!({})), json!({}));
    assert_eq!(server.result("cancel", json!({"id": "none"})), json!({"cancelled": false}));
    assert_eq!(server.result("cancel", json!({"id": "long"})), json!({"cancelled": true}));
    let answer = server.receive();
    assert_eq!(answer["id"], "long");
    assert_eq!(answer["result"]["stopped"], true, "{}", answer["error"]);
    server.end();
}

#[test]
fn agents_find_the_methods_as_tools() {
    let mut server = Server::start();
    let hello = server.result("initialize", json!({"protocolVersion": "2025-03-26", "capabilities": {}}));
    assert_eq!((&hello["protocolVersion"], &hello["serverInfo"]["name"]), (&json!("2025-03-26"), &json!("altiplano")));
    server.send(r#"{"jsonrpc": "2.0", "method": "notifications/initialized"}"#);
    let tools = server.result("tools/list", json!({}))["tools"].take();
    let tools = tools.as_array().expect("a list");
    let tool = |name: &str| tools.iter().find(|tool| tool["name"] == name).expect("a tool");
    assert_eq!(tool("plan")["inputSchema"]["properties"]["tp"]["type"], "integer");
    assert!(tools.iter().all(|tool| tool["description"].as_str().is_some_and(|words| !words.is_empty())));
    let called = server.result("tools/call", json!({"name": "load_model", "arguments": {"model": DEMO}}));
    assert_eq!(called["isError"], false);
    let model = called["structuredContent"]["model"].clone();
    let judged = json!({"model": model, "cluster": "local:4", "tp": 2});
    let same = server.result("judge", judged.clone());
    let called = server.result("tools/call", json!({"name": "judge", "arguments": judged}));
    assert_eq!(called["structuredContent"], same);
    assert_eq!(parsed(called["content"][0]["text"].as_str().expect("text")), same);
    let called = server.result("tools/call", json!({"name": "judge", "arguments": {"model": "none.json"}}));
    assert_eq!((&called["isError"], &called["structuredContent"]["kind"]), (&json!(true), &json!("file")));
    assert_eq!(server.ask("tools/call", json!({"name": "none"}))["error"]["code"], -32601);
    assert_eq!(server.ask("tools/call", json!({}))["error"]["code"], -32602);
    server.end();
}

/// A small generator, so that questions are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}

#[test]
fn a_thousand_random_questions_get_an_answer_each_and_the_same_one_again() {
    let mut server = Server::start();
    let model = server.result("load_model", json!({"model": DEMO}))["model"].clone();
    let plan = server.result("plan", json!({"model": model, "cluster": "local:4", "pp": 2}))["plan"].clone();
    let mut random = Random(7);
    let mut known: std::collections::BTreeMap<String, Value> = Default::default();
    let (mut results, mut repeated) = (0, 0);
    for _ in 0..1000 {
        let (method, params) = match random.below(20) {
            0 => ("why", json!({"plan": plan, "param": random.one(&["*fc*", "params*", "none", "*"])})),
            1 => ("why", json!({"plan": plan, "stage": random.below(4)})),
            2 => ("inspect", json!({"plan": plan, "dot": true})),
            3 => (*random.one(&["nothing", "judge", "why"]), json!({"model": 3, "plan": null})),
            _ => {
                let mut params = json!({"model": model, "cluster": random.one(&["local:2", "local:4", "local:8"])});
                for (name, values) in [
                    ("tp", [0, 1, 2, 4, 7]),
                    ("pp", [1, 1, 2, 3, 4]),
                    ("dp", [1, 2, 4, 8, 9]),
                    ("zero", [0, 1, 2, 3, 4]),
                    ("cp", [0, 1, 1, 2, 4]),
                    ("microbatch", [0, 1, 2, 4, 1000]),
                    ("num_microbatches", [0, 1, 2, 4, 1000]),
                    ("virtual_stages", [0, 1, 2, 2, 3]),
                    ("global_batch", [0, 8, 16, 24, 7]),
                ] {
                    if random.below(4) == 0 {
                        params[name] = json!(random.one(&values));
                    }
                }
                ("judge", params)
            }
        };
        let mut answer = server.ask(method, params.clone());
        answer.as_object_mut().expect("an object").remove("id");
        assert_ne!(answer["error"]["code"], -32603, "{method} {params}");
        results += usize::from(answer["result"]["fits"] == true);
        if let Some(earlier) = known.insert(format!("{method} {params}"), answer.clone()) {
            repeated += 1;
            assert_eq!(earlier, answer, "{method} {params}");
        }
    }
    assert!(results > 100 && repeated > 20, "{results} judgements fit, {repeated} questions came again");
    server.end();
}

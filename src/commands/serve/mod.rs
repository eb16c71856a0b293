//! `altiplano serve --stdio`: a resident process that answers questions, a JSON-RPC message a line. Models and plans stay
//! loaded between questions, and with them what questions share. The same lines are MCP's, for agents (docs/serve.md).

mod answers;
mod arguments;
mod calls;
mod failure;
mod judging;
mod lines;
mod mcp;
mod methods;
mod session;

use crate::commands::serve::calls::{Call, Calls, Notify};
use crate::commands::serve::failure::Failure;
use crate::commands::serve::lines::{Line, Output, read_line};
use crate::commands::serve::methods::Methods;
use crate::commands::serve::session::Session;
use altiplano::Error;
use clap::Args;
use serde_json::{Map, Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Answer questions about plans in a resident process, one JSON message a line (docs/serve.md)
#[derive(Args)]
pub struct Serve {
    /// Read questions from stdin and answer on stdout: JSON-RPC 2.0, or MCP; nothing listens on a network
    #[arg(long, required = true)]
    stdio: bool,
}

impl Serve {
    pub fn run(self) -> Result<(), Error> {
        let server = Arc::new(Server {
            methods: Methods::new(),
            session: Session::new(),
            calls: Calls::default(),
            output: Output::default(),
        });
        let mut input = std::io::stdin().lock();
        loop {
            match read_line(&mut input) {
                Line::Text(line) if line.trim_ascii().is_empty() => {}
                Line::Text(line) => Server::receive(&server, &line),
                Line::TooLong => server.output.failure(&Value::Null, &Failure::line_too_long()),
                Line::End => break,
            }
        }
        // Questions that were asked are answered, unless nobody reads the answers.
        server.calls.finish();
        Ok(())
    }
}

/// The state that all calls share.
struct Server {
    methods: Methods,
    session: Session,
    calls: Calls,
    output: Output,
}

impl Server {
    /// Takes one line: starts its call, or answers it at once.
    fn receive(server: &Arc<Server>, line: &[u8]) {
        let message = match serde_json::from_slice(line) {
            Ok(Value::Object(message)) => message,
            Ok(_) => return server.output.failure(&Value::Null, &Failure::invalid("expected one object a line")),
            Err(error) => return server.output.failure(&Value::Null, &Failure::not_json(&error)),
        };
        let id = message.get("id").cloned();
        let Some(method) = message.get("method").and_then(Value::as_str).map(String::from) else {
            // An answer: this side asks nothing.
            if message.contains_key("result") || message.contains_key("error") {
                return;
            }
            let failure = Failure::invalid("`method` must be a string");
            return server.output.failure(&id.unwrap_or_default(), &failure);
        };
        let params = match message.get("params") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(params)) => params.clone(),
            Some(_) => {
                let failure = Failure::invalid("`params` must be an object");
                return server.output.failure(&id.unwrap_or_default(), &failure);
            }
        };
        match id {
            None => server.notified(&method, &params),
            Some(id @ (Value::String(_) | Value::Number(_))) => Server::start(server, id, method, params),
            Some(_) => {
                server.output.failure(&Value::Null, &Failure::invalid("`id` must be a string or a number"));
            }
        }
    }

    /// Takes a message that wants no answer. Unknown ones are ignored, as the protocol says.
    fn notified(&self, method: &str, params: &Map<String, Value>) {
        let id = match method {
            "cancel" => params.get("id"),
            "notifications/cancelled" => params.get("requestId"),
            _ => None,
        };
        if let Some(id) = id {
            self.calls.cancel(id);
        }
        if let ("release", Some(handle)) = (method, params.get("handle").and_then(Value::as_str)) {
            self.session.release(handle);
        }
    }

    /// Answers a question, on a thread of its own if it takes longer than looking something up.
    fn start(server: &Arc<Server>, id: Value, method: String, params: Map<String, Value>) {
        let at_once = match method.as_str() {
            "ping" => Some(json!({})),
            "initialize" => Some(mcp::initialize(&params)),
            "tools/list" => Some(json!({"tools": server.methods.tools()})),
            "methods" => Some(json!({"methods": server.methods.tools()})),
            "cancel" => Some(json!({"cancelled": params.get("id").is_some_and(|id| server.calls.cancel(id))})),
            _ => None,
        };
        if let Some(result) = at_once {
            return server.output.result(&id, &result);
        }
        let notify = match method.as_str() {
            "tools/call" => mcp::progress_token(&params).map_or(Notify::Nobody, Notify::Token),
            _ => Notify::Id,
        };
        let (of_call, answered) = (server.clone(), id.clone());
        let work = move |call: &Call| {
            let answer = || of_call.answer(&method, &params, call);
            // A defect must not end the process, which holds the state of other questions.
            let answer = catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|_| Err(Failure::internal()));
            match answer {
                Ok(result) => of_call.output.result(&answered, &result),
                Err(failure) => of_call.output.failure(&answered, &failure),
            }
        };
        let call = Call::new(id.clone(), notify, server.output.clone());
        if let Err(failure) = server.calls.start(call, work) {
            server.output.failure(&id, &failure);
        }
    }

    fn answer(&self, method: &str, params: &Map<String, Value>, call: &Call) -> Result<Value, Failure> {
        match method {
            "tools/call" => {
                mcp::call(params, |name, arguments| self.methods.answer(&self.session, name, arguments, call))
            }
            _ => self.methods.answer(&self.session, method, params, call),
        }
    }
}

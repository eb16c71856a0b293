//! The methods: commands by their names, whose plans and models may be handles, and a few of handles alone.

use crate::commands::options::ModelOptions;
use crate::commands::serve::answers;
use crate::commands::serve::arguments::{self, command_line, definition, has, matches};
use crate::commands::serve::calls::Call;
use crate::commands::serve::failure::Failure;
use crate::commands::serve::judging::{self, Judge};
use crate::commands::serve::session::{Found, Session, Source};
use crate::commands::{
    advise, compare, explained, export, inspect, plan, scale, simulate, trials, verify, why, why_not,
};
use altiplano::cost_models::Rooflines;
use altiplano::ir::plan::{MadeBy, Plan};
use altiplano::planner::{Progress, Request, plan_or_closest};
use altiplano::trials::trials as pack;
use altiplano::{
    Error, ImportOptions, Warning, expect_writable, figures, frontier_json, load_plan, page_html, report, write_file,
};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Read a model once; later questions name it by the handle
#[derive(Args)]
struct LoadModel {
    /// A model file, as for `altiplano plan`
    model: PathBuf,
    #[command(flatten)]
    options: ModelOptions,
}

/// Read a plan file once; later questions name it by the handle
#[derive(Args)]
struct LoadPlan {
    /// A plan file, written by `altiplano plan -o`
    file: PathBuf,
}

/// Write a plan to a file
#[derive(Args)]
struct Save {
    /// A handle of a plan
    plan: PathBuf,
    /// The file
    #[arg(long)]
    output: PathBuf,
}

/// Forget a model or a plan
#[derive(Args)]
struct Release {
    /// The handle
    handle: String,
}

/// The parameters and the context of a method.
struct Question<'a> {
    session: &'a Session,
    call: &'a Call,
    matches: &'a ArgMatches,
    line: &'a [String],
    /// Keep plans that are found on the way, and return their handles.
    keeps: bool,
    /// Plan changes with which there is a plan, where there is none.
    has_remedies: bool,
    /// The text by which the answer may be kept.
    key: Option<&'a str>,
}

impl Question<'_> {
    /// The options of a command.
    fn options<T: FromArgMatches>(&self) -> Result<T, Failure> {
        T::from_arg_matches(self.matches).map_err(|error| Failure::params(error.to_string()))
    }

    /// The result that an equal question found before, or that of a search, which is kept unless it was stopped.
    fn search(&self, search: impl FnOnce() -> Result<Found, Failure>) -> Result<Arc<Found>, Failure> {
        let searches = &self.session.searches;
        if let Some(known) = self.key.and_then(|key| searches.get(key)) {
            return Ok(known);
        }
        let found = Arc::new(search()?);
        if let Some(key) = self.key.filter(|_| !self.call.stopped()) {
            searches.keep(key.to_string(), found.clone(), found.weight());
        }
        Ok(found)
    }

    /// The failure of a search, with changes that help.
    fn failure(&self, request: &Request, error: &Error) -> Failure {
        let searched = matches!(error, Error::Plan(_)) && !error.is_usage() && self.has_remedies;
        let explained = if searched { explained(request, error, self.call) } else { None };
        Failure::explained(error, explained.as_ref())
    }

    /// Says where a plan comes from: the command line that finds it.
    fn made_by(&self, command: &str, source: Option<&Source>) -> MadeBy {
        let (options, files) = self.line.split_at(self.line.iter().position(|a| a == "--").unwrap_or(self.line.len()));
        let files: Vec<String> = match source {
            Some(source) => vec![source.file.display().to_string()],
            None => files.iter().skip(1).cloned().collect(),
        };
        let of_source = source.into_iter().flat_map(|source| source.line.iter().cloned());
        let words = [command.to_string()].into_iter().chain(files).chain(of_source).chain(options.iter().cloned());
        let command = crate::commands::command_line(crate::commands::what_decides(words).into_iter());
        MadeBy { version: env!("CARGO_PKG_VERSION").to_string(), command }
    }
}

/// A method and its parameters.
struct Method {
    name: &'static str,
    definition: Definition,
    /// Options of the command that the method has not.
    without: &'static [&'static str],
    answer: Answer,
    /// True if the answer takes milliseconds, and must not wait for the work of searches.
    is_quick: bool,
}

/// Options of `plan` that answers to questions do not have.
const WITHOUT: [&str; 8] = ["frontier", "from", "json", "prove", "certify", "plugin", "survive", "timings"];
const WITHOUT_FILES: [&str; 10] =
    ["frontier", "from", "json", "prove", "certify", "plugin", "survive", "timings", "html", "output"];

const METHODS: [Method; 17] = [
    slow("load_model", definition::<LoadModel>, &[], load_model),
    quick("load_plan", definition::<LoadPlan>, &[], load),
    slow("plan", definition::<plan::Plan>, &WITHOUT, planned),
    quick("judge", definition::<Judge>, &judging::WITHOUT, judged),
    quick("why", definition::<why::Why>, &[], why),
    slow("why_not", definition::<why_not::WhyNot>, &[], why_not),
    slow("advise", definition::<advise::Advise>, &[], advise),
    quick("compare", definition::<compare::Compare>, &[], compare),
    slow("simulate", definition::<simulate::Simulate>, &[], simulate),
    slow("frontier", definition::<plan::Plan>, &WITHOUT_FILES, frontier),
    slow("scale", definition::<scale::Scale>, &[], scale),
    slow("trials", definition::<trials::Trials>, &[], packed),
    quick("inspect", definition::<inspect::Inspect>, &[], inspect),
    slow("export", definition::<export::Export>, &[], export),
    slow("verify", definition::<verify::Verify>, &["device"], verify),
    quick("save", definition::<Save>, &[], save),
    quick("release", definition::<Release>, &[], release),
];

type Definition = fn(&'static str) -> Command;
type Answer = fn(&Question<'_>) -> Result<Value, Failure>;

const fn quick(name: &'static str, definition: Definition, without: &'static [&'static str], answer: Answer) -> Method {
    Method { name, definition, without, answer, is_quick: true }
}

const fn slow(name: &'static str, definition: Definition, without: &'static [&'static str], answer: Answer) -> Method {
    Method { name, definition, without, answer, is_quick: false }
}

/// Parameters beside those of a command, with the methods that have them.
const KEEP: (&str, [&str; 2], &str) =
    ("keep", ["why_not", "frontier"], "Keep the plans that are found, and return their handles");
const REMEDIES: (&str, [&str; 3], &str) = (
    "remedies",
    ["plan", "why_not", "scale"],
    "Where there is no plan, find changes with which there is one [default: true]",
);

/// Methods whose answers are words and figures alone, which are kept for equal questions.
const VALUES: [&str; 4] = ["judge", "why", "advise", "compare"];

/// The methods with their parsed definitions.
pub struct Methods {
    all: Vec<(Method, Command)>,
    /// Threads of quick methods, which the work of searches does not occupy.
    quick: Option<ThreadPool>,
}

impl Methods {
    pub fn new() -> Methods {
        let all = METHODS.into_iter().map(|method| {
            let command = (method.definition)(method.name);
            (method, command)
        });
        Methods { all: all.collect(), quick: ThreadPoolBuilder::new().build().ok() }
    }

    /// The methods as tools of MCP.
    pub fn tools(&self) -> Value {
        let tool = |(method, command): &(Method, Command)| {
            let mut schema = arguments::schema(command, method.without);
            for (name, of, words) in [(KEEP.0, &KEEP.1[..], KEEP.2), (REMEDIES.0, &REMEDIES.1[..], REMEDIES.2)] {
                if of.contains(&method.name) {
                    schema["properties"][name] = json!({"type": "boolean", "description": words});
                }
            }
            let about = match method.name {
                "frontier" => "The plans that no other beats in seconds, bytes, devices and price at once".to_string(),
                _ => command.get_about().map(ToString::to_string).unwrap_or_default(),
            };
            json!({"name": method.name, "description": about, "inputSchema": schema})
        };
        self.all.iter().map(tool).collect()
    }

    /// Answers a question.
    pub fn answer(
        &self,
        session: &Session,
        name: &str,
        params: &Map<String, Value>,
        call: &Call,
    ) -> Result<Value, Failure> {
        let found = self.all.iter().find(|(method, _)| method.name == name);
        let (method, command) = found.ok_or_else(|| Failure::no_method(name))?;
        let mut params = params.clone();
        let mut flag = |of: &str, methods: &[&str], default: bool| match params.remove(of) {
            _ if !methods.contains(&name) => Ok(default),
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(given)) => Ok(given),
            Some(_) => Err(Failure::params(format!("{of}: expected true or false")).with("place", of)),
        };
        let keeps = flag(KEEP.0, &KEEP.1, false)?;
        let has_remedies = flag(REMEDIES.0, &REMEDIES.1, true)?;
        if let Some(other) = method.without.iter().find(|other| params.contains_key(**other)) {
            return Err(Failure::params(format!("{other}: `{name}` has no such parameter")).with("place", *other));
        }
        // A command's JSON is its answer, unless the question is for words.
        const WORDS: [&str; 2] = ["explain", "memory"];
        let is_words = |word: &&str| params.get(*word).is_some_and(|value| !value.is_null() && *value != json!(false));
        if has(command, "json") && !method.without.contains(&"json") && name != "inspect" && !WORDS.iter().any(is_words)
        {
            params.entry("json").or_insert(json!(true));
        }
        let line = command_line(command, &params)?;
        let key = answers::question(name, &line, [keeps, has_remedies]);
        let is_value = VALUES.contains(&name);
        if let Some(known) = key.as_deref().filter(|_| is_value).and_then(|key| session.answers.get(key)) {
            return Ok(known);
        }
        let matches = matches(command, &line)?;
        let key_of = key.as_deref();
        let question = Question { session, call, matches: &matches, line: &line, keeps, has_remedies, key: key_of };
        let answer = match &self.quick {
            Some(threads) if method.is_quick => threads.install(|| (method.answer)(&question)),
            _ => (method.answer)(&question),
        }?;
        if let Some(key) = key.filter(|_| is_value && !call.stopped()) {
            session.answers.keep(key, answer.clone(), answers::weight(&answer));
        }
        Ok(answer)
    }
}

/// The answer of a command: its JSON, or its words.
fn answered(text: &str) -> Value {
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Value::Object(fields),
        _ => json!({"text": text.trim_end()}),
    }
}

fn notes(warnings: &[Warning]) -> Value {
    warnings.iter().map(|w| json!({"note": w.to_string(), "is_warning": !w.is_note()})).collect()
}

/// Holds a plan, and returns its figures with its handle.
fn held(session: &Session, plan: Plan) -> Result<Value, Failure> {
    let mut figures = figures(&plan);
    figures["plan"] = json!(session.add_plan(plan)?);
    Ok(figures)
}

fn load_model(q: &Question<'_>) -> Result<Value, Failure> {
    let LoadModel { model, options } = q.options()?;
    let import = options.import();
    let mut source = Source::read(&model, options)?;
    source.line = q.line.iter().take_while(|word| *word != "--").cloned().collect();
    let read = source.model(&ImportOptions { batch: None, ..import })?;
    let graph = &read.graph;
    let (count, elements) = graph.parameters().fold((0, 0), |(n, all), (p, _)| (n + 1, all + graph.ty(p).elements()));
    let bytes: u64 = graph.parameters().map(|(p, _)| graph.ty(p).bytes()).sum();
    Ok(json!({
        "name": read.name,
        "batch": graph.batch,
        "parameter_tensors": count,
        "parameters": elements,
        "parameter_bytes": bytes,
        "ops": graph.len(),
        "trains": !read.inference,
        "notes": notes(&read.warnings),
        "model": q.session.add_model(source)?,
    }))
}

fn load(q: &Question<'_>) -> Result<Value, Failure> {
    let LoadPlan { file } = q.options()?;
    held(q.session, load_plan(&file)?)
}

fn planned(q: &Question<'_>) -> Result<Value, Failure> {
    let plan::Plan { model, options, plan, output, html, .. } = q.options()?;
    [&output, &html].into_iter().flatten().try_for_each(|file| expect_writable(file))?;
    let source = q.session.source(&model, &options)?;
    let (request, warnings) = q.session.request(&source, &plan)?;
    let found = q.search(|| {
        let mut found = plan.plan(&request, q.call).map_err(|error| q.failure(&request, &error))?;
        found.made_by = Some(q.made_by("plan", Some(&source)));
        Ok(Found { plan: found, answer: notes(&warnings) })
    })?;
    if let Some(file) = &output {
        write_file(file, &found.plan.to_json())?;
    }
    if let Some(file) = &html {
        write_file(file, &page_html(&found.plan)?)?;
    }
    let mut answer = held(q.session, found.plan.clone())?;
    answer["notes"] = found.answer.clone();
    answer["stopped"] = json!(q.call.stopped());
    Ok(answer)
}

fn judged(q: &Question<'_>) -> Result<Value, Failure> {
    q.options::<Judge>()?.answer(q.session)
}

fn frontier(q: &Question<'_>) -> Result<Value, Failure> {
    let plan::Plan { model, options, plan, .. } = q.options()?;
    let source = q.session.source(&model, &options)?;
    let (request, warnings) = q.session.request(&source, &plan)?;
    let mut points = plan.frontier(&request, q.call).map_err(|error| q.failure(&request, &error))?;
    points.iter_mut().for_each(|point| point.plan.made_by = Some(q.made_by("plan", Some(&source))));
    let mut plans: Vec<Value> = serde_json::from_str(&frontier_json(&points)).unwrap_or_default();
    if q.keeps {
        for (shown, point) in plans.iter_mut().zip(points) {
            let price = shown["price_per_step"].take();
            *shown = held(q.session, point.plan)?;
            shown["price_per_step"] = price;
        }
    }
    Ok(json!({"plans": plans, "notes": notes(&warnings), "stopped": q.call.stopped()}))
}

fn why(q: &Question<'_>) -> Result<Value, Failure> {
    let question: why::Why = q.options()?;
    let plan = q.session.plan_to_ask(&question.plan)?;
    Ok(json!({"text": question.answer(&plan)?}))
}

fn why_not(q: &Question<'_>) -> Result<Value, Failure> {
    let question: why_not::WhyNot = q.options()?;
    let chosen = q.session.plan_to_ask(&question.plan)?;
    let mut request = question.request(&chosen)?;
    q.session.share(&mut request);
    let found = q.search(|| {
        let asked = plan_or_closest(&request, &Rooflines::of(&request.cluster), q.call).map_err(Error::from);
        let mut plan = asked.map_err(|error| q.failure(&request, &error))?;
        plan.made_by = Some(q.made_by("why-not", None));
        let answer = answered(&question.answer(&chosen, &plan)?);
        Ok(Found { plan, answer })
    })?;
    let mut answer = found.answer.clone();
    if q.keeps {
        answer["kept"] = held(q.session, found.plan.clone())?;
    }
    Ok(answer)
}

fn advise(q: &Question<'_>) -> Result<Value, Failure> {
    let question: advise::Advise = q.options()?;
    let plan = q.session.plan_to_ask(&question.plan)?;
    Ok(answered(&question.answer(&plan, q.call)?))
}

fn compare(q: &Question<'_>) -> Result<Value, Failure> {
    let question: compare::Compare = q.options()?;
    // Handles are looked up first, since a missing one is no failure of a command.
    let files: Vec<&Path> = q.line.iter().skip_while(|word| *word != "--").skip(1).map(Path::new).collect();
    let plans: Vec<_> = files.iter().map(|file| q.session.plan_to_ask(file)).collect::<Result<_, _>>()?;
    let load = |file: &Path| {
        let at = files.iter().position(|known| *known == file).unwrap_or(0);
        Ok(plans[at].clone())
    };
    Ok(answered(&question.answer(load)?))
}

fn simulate(q: &Question<'_>) -> Result<Value, Failure> {
    let question: simulate::Simulate = q.options()?;
    let plan = q.session.plan(&question.plan)?;
    Ok(answered(&question.answer(Plan::clone(&plan))?))
}

fn scale(q: &Question<'_>) -> Result<Value, Failure> {
    let question: scale::Scale = q.options()?;
    let nodes = question.checked()?;
    let source = q.session.source(&question.model, &question.options)?;
    let (request, warnings) = q.session.request(&source, &question.plan)?;
    let asked = question.question(nodes, &request)?;
    let found = question.found(&request, &asked, q.call)?;
    let found = found.map_err(|(largest, error)| q.failure(&largest, &error))?;
    let mut answer = answered(&question.answer(&found)?);
    answer["notes"] = notes(&warnings);
    Ok(answer)
}

fn packed(q: &Question<'_>) -> Result<Value, Failure> {
    let question: trials::Trials = q.options()?;
    let (mut requests, mut warnings) = (Vec::new(), Vec::new());
    for model in &question.models {
        let source = q.session.source(model, &question.options)?;
        let (request, more) = q.session.request(&source, &question.plan)?;
        requests.push(request);
        warnings.extend(more);
    }
    let found = pack(question.asked(requests)?, &|request| question.plan.plan(request, q.call))?;
    let mut answer = answered(&question.answer(&found)?);
    answer["notes"] = notes(&warnings);
    Ok(answer)
}

fn inspect(q: &Question<'_>) -> Result<Value, Failure> {
    let question: inspect::Inspect = q.options()?;
    question.html.as_deref().map_or(Ok(()), expect_writable)?;
    let plan = q.session.plan(&question.plan)?;
    Ok(match question.answer(&plan)? {
        Some(text) => answered(&text),
        None => json!({"text": report(&plan)}),
    })
}

fn export(q: &Question<'_>) -> Result<Value, Failure> {
    let question: export::Export = q.options()?;
    expect_writable(&question.output)?;
    let plan = q.session.plan(&question.plan)?;
    Ok(json!({"output": question.output, "notes": question.write(&plan)?.notes}))
}

fn verify(q: &Question<'_>) -> Result<Value, Failure> {
    let question: verify::Verify = q.options()?;
    let (plan, given) = match q.session.held_plan(&question.plan.file)? {
        Some(plan) => (plan, None),
        None => {
            let (plan, given) = question.plan.plan_and_step()?;
            (plan.into(), given)
        }
    };
    let (text, verdict) = question.answer(&plan, given.as_ref(), q.call)?;
    match verdict {
        Ok(()) => Ok(json!({"agrees": true, "text": text})),
        Err(error) => Err(Failure::from_error(&error).with("text", text)),
    }
}

fn save(q: &Question<'_>) -> Result<Value, Failure> {
    let Save { plan, output } = q.options()?;
    expect_writable(&output)?;
    write_file(&output, &q.session.plan(&plan)?.to_json())?;
    Ok(json!({"output": output}))
}

fn release(q: &Question<'_>) -> Result<Value, Failure> {
    let Release { handle } = q.options()?;
    Ok(json!({"released": q.session.release(&handle)}))
}

//! The state of the process: models and plans by handle, and what questions about them share.

use crate::commands::options::{ModelOptions, PlanOptions};
use crate::commands::serve::answers::Answers;
use crate::commands::serve::failure::Failure;
use altiplano::ir::plan::Plan;
use altiplano::planner::Request;
use altiplano::planner::cache::Cache;
use altiplano::planner::lower::KnownComposites;
use altiplano::planner::search::judge::Judge;
use altiplano::{Error, Format, ImportOptions, Model, Warning, by_cluster, load_plan, model_of, read_bytes};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// Most models, and most plans, that are held.
const MOST_HELD: usize = 1024;
/// Most imports, and most judges, that a model keeps. The oldest goes first.
const MOST_KEPT: usize = 8;
/// Half of the bytes of answers that are kept, and of plans that searches found.
const ANSWER_BYTES: usize = 8 << 20;
const SEARCH_BYTES: usize = 48 << 20;

/// Values by handle, such as `plan:3`.
struct Handles<T> {
    prefix: &'static str,
    next: AtomicU64,
    held: Mutex<BTreeMap<u64, Arc<T>>>,
}

impl<T> Handles<T> {
    fn new(prefix: &'static str) -> Self {
        Handles { prefix, next: AtomicU64::new(1), held: Mutex::default() }
    }

    /// The number in a handle; `None` if the name is none of these handles.
    fn number(&self, name: &str) -> Option<u64> {
        name.strip_prefix(self.prefix)?.strip_prefix(':')?.parse().ok()
    }

    fn add(&self, value: Arc<T>) -> Result<String, Failure> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.len() >= MOST_HELD {
            let what = self.prefix;
            return Err(Failure::params(format!("{MOST_HELD} {what}s are held; `release` some that are not needed")));
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        held.insert(number, value);
        Ok(format!("{}:{number}", self.prefix))
    }

    /// The value of a handle; `None` if the name is no handle.
    fn get(&self, name: &str) -> Result<Option<Arc<T>>, Failure> {
        let Some(number) = self.number(name) else { return Ok(None) };
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let found = held.get(&number).cloned();
        found
            .map(Some)
            .ok_or_else(|| Failure::params(format!("{name}: no such handle; it was released or never given")))
    }

    fn release(&self, name: &str) -> bool {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        self.number(name).is_some_and(|number| held.remove(&number).is_some())
    }
}

pub struct Session {
    models: Handles<Source>,
    plans: Handles<Plan>,
    cache: Arc<Cache>,
    composites: Arc<KnownComposites>,
    /// Answers without plans of their own.
    pub answers: Answers<Value>,
    /// Searches, by question.
    pub searches: Answers<Arc<Found>>,
}

/// The result of a search.
pub struct Found {
    pub plan: Plan,
    /// The rest of the answer, without the plan's handle.
    pub answer: Value,
}

impl Found {
    /// About how many bytes it has in memory.
    pub fn weight(&self) -> usize {
        const EACH_NODE: usize = 1024;
        EACH_NODE * self.plan.graph.len() + super::answers::weight(&self.answer)
    }
}

impl Session {
    pub fn new() -> Session {
        Session {
            models: Handles::new("model"),
            plans: Handles::new("plan"),
            cache: Arc::new(Cache::in_memory()),
            composites: Arc::default(),
            answers: Answers::new(ANSWER_BYTES),
            searches: Answers::new(SEARCH_BYTES),
        }
    }

    pub fn add_model(&self, source: Source) -> Result<String, Failure> {
        self.models.add(Arc::new(source))
    }

    pub fn add_plan(&self, plan: Plan) -> Result<String, Failure> {
        self.plans.add(Arc::new(plan))
    }

    /// Forgets a model or a plan. False if there is none of the handle.
    pub fn release(&self, handle: &str) -> bool {
        self.models.release(handle) || self.plans.release(handle)
    }

    /// A held model, or one that is read from a file for this question.
    pub fn source(&self, name: &Path, options: &ModelOptions) -> Result<Arc<Source>, Failure> {
        match self.models.get(&name.to_string_lossy())? {
            Some(_) if *options != ModelOptions::default() => {
                let problem = "options of reading a model belong to `load_model`, which gave this handle";
                Err(Failure::params(format!("{}: {problem}", name.display())).with("place", "model"))
            }
            Some(source) => Ok(source),
            None => Ok(Arc::new(Source::read(name, options.clone())?)),
        }
    }

    /// A held plan; `None` if the name is that of a file.
    pub fn held_plan(&self, name: &Path) -> Result<Option<Arc<Plan>>, Failure> {
        self.plans.get(&name.to_string_lossy())
    }

    /// A held plan, or one from a file.
    pub fn plan(&self, name: &Path) -> Result<Arc<Plan>, Failure> {
        match self.held_plan(name)? {
            Some(plan) => Ok(plan),
            None => Ok(Arc::new(load_plan(name)?)),
        }
    }

    /// As [`Self::plan`], predicted by the figures of its cluster, as other plans are.
    pub fn plan_to_ask(&self, name: &Path) -> Result<Arc<Plan>, Failure> {
        let plan = self.plan(name)?;
        if plan.profile.is_none() { Ok(plan) } else { Ok(Arc::new(by_cluster(Plan::clone(&plan))?)) }
    }

    /// The planning request of a model with these options. Searches share what they find.
    pub fn request(&self, source: &Source, options: &PlanOptions) -> Result<(Request, Vec<Warning>), Failure> {
        let read = |import: &ImportOptions| source.model(import);
        let (mut request, _, warnings) = options.request_by(&source.file, source.format, &source.options, read)?;
        self.share(&mut request);
        Ok((request, warnings))
    }

    /// Lets a request use what earlier searches found.
    pub fn share(&self, request: &mut Request) {
        if request.cache.is_none() {
            request.cache = Some(self.cache.clone());
        }
        request.composites = self.composites.clone();
    }
}

/// A model file in memory, with its models by the options that they were imported with.
pub struct Source {
    pub file: PathBuf,
    pub format: Format,
    bytes: Vec<u8>,
    pub options: ModelOptions,
    /// The options as a command line.
    pub line: Vec<String>,
    models: Kept<ImportOptions, Model>,
    judges: Kept<(PlanOptions, Option<u64>, Vec<(PathBuf, Option<SystemTime>)>), Judge>,
}

impl Source {
    pub fn read(file: &Path, options: ModelOptions) -> Result<Source, Error> {
        let bytes = read_bytes(file)?;
        let (models, judges) = (Kept::default(), Kept::default());
        Ok(Source {
            file: file.to_path_buf(),
            format: Format::of(&bytes),
            bytes,
            options,
            line: Vec::new(),
            models,
            judges,
        })
    }

    /// The model as imported with these options.
    pub fn model(&self, import: &ImportOptions) -> Result<Arc<Model>, Error> {
        self.models.get(import, || model_of(&self.file, &self.bytes, import))
    }

    /// The judge of configurations with these options, all but the fixed choices.
    pub fn judge(&self, options: &PlanOptions) -> Result<Arc<Judge>, Error> {
        let batch = options.batch_of_model(self.format);
        let open = options.with_open_choices();
        self.judges.get(&(open.clone(), batch, open.files()), || {
            let read = |import: &ImportOptions| self.model(&ImportOptions { batch, ..import.clone() });
            let (mut request, ..) = open.request_by(&self.file, self.format, &self.options, read)?;
            // Judging is faster than looking up an earlier answer.
            request.cache = None;
            Ok(Judge::new(&request)?)
        })
    }
}

/// The last few values that were made from keys.
struct Kept<K, V>(Mutex<Vec<(K, Arc<V>)>>);

impl<K, V> Default for Kept<K, V> {
    fn default() -> Self {
        Kept(Mutex::default())
    }
}

impl<K: PartialEq + Clone, V> Kept<K, V> {
    fn get(&self, key: &K, make: impl FnOnce() -> Result<V, Error>) -> Result<Arc<V>, Error> {
        let find = || {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let at = kept.iter().position(|(known, _)| known == key)?;
            let found = kept.remove(at);
            kept.push(found.clone());
            Some(found.1)
        };
        if let Some(known) = find() {
            return Ok(known);
        }
        let new = Arc::new(make()?);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= MOST_KEPT {
            kept.remove(0);
        }
        kept.push((key.clone(), new.clone()));
        Ok(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_given_once_and_end() {
        let handles: Handles<u8> = Handles::new("plan");
        let one = handles.add(Arc::new(1)).expect("room");
        let two = handles.add(Arc::new(2)).expect("room");
        assert_eq!((one.as_str(), two.as_str()), ("plan:1", "plan:2"));
        assert!(handles.release(&one) && !handles.release(&one));
        assert!(handles.get(&one).is_err());
        assert_eq!(handles.get(&two).expect("held").as_deref(), Some(&2));
        assert_eq!(handles.get("plan.json").expect("a file"), None);
    }

    #[test]
    fn the_value_that_was_asked_for_longest_ago_goes() {
        let kept: Kept<usize, usize> = Kept::default();
        let mut made = 0;
        let mut get = |key: usize| {
            kept.get(&key, || {
                made += 1;
                Ok(key)
            })
            .map(|value| *value)
            .expect("a value")
        };
        (0..MOST_KEPT).for_each(|key| assert_eq!(get(key), key));
        get(0);
        get(MOST_KEPT);
        get(0);
        get(1);
        assert_eq!(made, MOST_KEPT + 2);
    }
}

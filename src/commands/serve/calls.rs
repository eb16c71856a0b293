//! Calls that run: each has a thread, its progress, and a flag that stops it.

use crate::commands::serve::failure::Failure;
use crate::commands::serve::lines::Output;
use altiplano::planner::Progress;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most calls that run at the same time. All cores are busy with far fewer.
const MOST_CALLS: usize = 64;
/// Time between two notifications of a call's progress, and before the first.
const INTERVAL: Duration = Duration::from_millis(200);
/// Planning a deep model recurses deeper than a thread's default stack allows.
const STACK_BYTES: usize = 32 << 20;

/// The receiver of notifications about a call's progress.
pub enum Notify {
    Nobody,
    /// By the id of the call.
    Id,
    /// By the token that an MCP client gave.
    Token(Value),
}

/// A call that runs.
pub struct Call {
    id: Value,
    notify: Notify,
    output: Output,
    stopped: Arc<AtomicBool>,
    told: Mutex<Instant>,
    /// Step time of the best plan so far, and a lower bound for all plans.
    best: Mutex<Option<(f64, f64)>>,
}

impl Call {
    pub fn new(id: Value, notify: Notify, output: Output) -> Call {
        let told = Mutex::new(Instant::now());
        Call { id, notify, output, stopped: Arc::default(), told, best: Mutex::default() }
    }
}

impl Progress for Call {
    fn step(&self, what: &str, done: usize, total: usize) {
        {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            if told.elapsed() < INTERVAL {
                return;
            }
            *told = Instant::now();
        }
        let best = *self.best.lock().unwrap_or_else(PoisonError::into_inner);
        let mut params = Map::new();
        let method = match &self.notify {
            Notify::Nobody => return,
            Notify::Id => {
                params.insert("id".into(), self.id.clone());
                params.insert("what".into(), json!(what));
                params.insert("done".into(), json!(done));
                params.insert("total".into(), json!(total));
                if let Some((step_s, bound_s)) = best {
                    params.insert("best_step_s".into(), json!(step_s));
                    params.insert("lower_bound_s".into(), json!(bound_s));
                }
                "progress"
            }
            Notify::Token(token) => {
                params.insert("progressToken".into(), token.clone());
                params.insert("progress".into(), json!(done));
                params.insert("total".into(), json!(total));
                params.insert("message".into(), json!(what));
                "notifications/progress"
            }
        };
        self.output.notification(method, &Value::Object(params));
    }

    fn best(&self, step_s: f64, bound_s: f64) {
        let mut best = self.best.lock().unwrap_or_else(PoisonError::into_inner);
        if best.is_none_or(|(known_s, _)| step_s < known_s) {
            *best = Some((step_s, bound_s));
        }
    }

    fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || self.output.is_closed()
    }
}

/// The calls that run, by their ids as JSON text, so that `1` and `"1"` differ.
#[derive(Default)]
pub struct Calls {
    running: Arc<Mutex<BTreeMap<String, Arc<AtomicBool>>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Calls {
    /// Starts a call on a thread.
    ///
    /// # Errors
    /// If another call has its id, or too many run.
    pub fn start(&self, call: Call, work: impl FnOnce(&Call) + Send + 'static) -> Result<(), Failure> {
        let key = call.id.to_string();
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if running.contains_key(&key) {
            return Err(Failure::invalid("a call with this `id` still runs"));
        }
        if running.len() >= MOST_CALLS {
            return Err(Failure::busy(MOST_CALLS));
        }
        running.insert(key.clone(), call.stopped.clone());
        drop(running);
        let done = Done { running: self.running.clone(), key };
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
            let _done = done;
            work(&call);
        });
        let thread = thread.map_err(|_| Failure::busy(MOST_CALLS))?;
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Stops a call, which then answers with what it has. False if no call has the id.
    pub fn cancel(&self, id: &Value) -> bool {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let found = running.get(&id.to_string());
        found.map(|stopped| stopped.store(true, Ordering::Relaxed)).is_some()
    }

    /// Waits for all calls.
    pub fn finish(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A panic was answered where it happened.
            let _ = thread.join();
        }
    }
}

/// Removes a call from those that run, however it ends.
struct Done {
    running: Arc<Mutex<BTreeMap<String, Arc<AtomicBool>>>>,
    key: String,
}

impl Drop for Done {
    fn drop(&mut self) {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

//! The devices of a session, and those that are threads.

use crate::device::{Command, Reply};
use crate::error::{KernelError, RuntimeError};
use crate::ranks::World;
use crate::roster::Roster;
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// The devices of a session in this process, by rank, and their connection to those of other processes.
pub(crate) trait Devices {
    /// Ranks of this process's devices, in order.
    fn ranks(&self) -> Vec<usize>;

    /// Gives a command to a device. A device with a thread of its own executes it in the background.
    fn send(&mut self, rank: usize, command: Command) -> Result<(), RuntimeError>;

    /// Waits for the oldest outstanding reply of each device, in order of rank. If several fail, returns the error that
    /// caused the others.
    fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError>;

    /// Peak bytes that each of [`Devices::ranks`] holds in its own memory and in that of its host.
    fn peak_bytes(&self) -> Vec<[u64; 2]>;

    /// Tells the programs of an evaluation, before each device has its [`Command::Prepare`].
    fn will_evaluate(&mut self, _roster: &Roster) {}

    /// The processes that run the devices, if there are several.
    fn world(&self) -> Option<&World> {
        None
    }

    /// Ends all devices, in all processes.
    fn finish(self: Box<Self>) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Gives each process the words of all, at a point at which no messages between devices are in flight.
    fn tell(&mut self, words: &[u64]) -> Result<Vec<Vec<u64>>, RuntimeError> {
        self.world().map_or_else(|| Ok(vec![words.to_vec()]), |world| world.tell(words))
    }

    /// Sends this process's report on a step to the others, without waiting, if steps overlap.
    fn tell_ahead(&mut self, _report: &[u64]) {}

    /// The reports of all processes on the oldest step in progress; `report` is this process's.
    fn hear(&mut self, report: &[u64]) -> Result<Vec<Vec<u64>>, RuntimeError> {
        self.tell(report)
    }

    /// Returns whether steps can be queued, so that devices start the next one at once without a wake-up.
    fn queues(&self) -> bool {
        false
    }

    /// Returns whether devices communicate through NCCL.
    fn uses_nccl(&self) -> bool {
        false
    }
}

/// A device's rank, and its reply to a command.
pub(crate) type Answer = (usize, Result<Reply, RuntimeError>);

/// Devices that are threads. Dropping them ends the threads.
pub(crate) struct Workers {
    commands: BTreeMap<usize, Sender<Command>>,
    replies: Receiver<Answer>,
    /// Replies that arrived before they were asked for, by rank.
    early: BTreeMap<usize, VecDeque<Result<Reply, RuntimeError>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts a thread for each device, given by its rank, its number for messages, and the function that serves its
    /// commands.
    pub(crate) fn start<F>(devices: Vec<(usize, u32, F)>) -> Result<Workers, RuntimeError>
    where
        F: FnOnce(Receiver<Command>, Sender<Answer>) + Send + 'static,
    {
        let (reply, replies) = channel();
        let mut workers = Workers { commands: BTreeMap::new(), replies, early: BTreeMap::new(), threads: Vec::new() };
        for (rank, device, serve) in devices {
            let (command, commands) = channel();
            let reply = reply.clone();
            let thread = std::thread::Builder::new()
                .name(format!("device {device}"))
                .spawn(move || serve(commands, reply))
                .map_err(|error| RuntimeError::Thread { device, error })?;
            workers.commands.insert(rank, command);
            workers.early.insert(rank, VecDeque::new());
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    pub(crate) fn ranks(&self) -> Vec<usize> {
        self.commands.keys().copied().collect()
    }

    pub(crate) fn send(&self, rank: usize, command: Command) -> Result<(), RuntimeError> {
        let sent = self.commands.get(&rank).is_some_and(|device| device.send(command).is_ok());
        if sent { Ok(()) } else { Err(RuntimeError::Stopped) }
    }

    /// See [`Devices::collect`].
    pub(crate) fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        let mut answers = Vec::with_capacity(ranks.len());
        let mut failure: Option<RuntimeError> = None;
        for &rank in ranks {
            match self.next(rank) {
                Ok(reply) => answers.push((rank, reply)),
                Err(error) if failure.is_none() || !is_consequence(&error) => failure = Some(error),
                Err(_) => {}
            }
        }
        failure.map_or(Ok(answers), Err)
    }

    /// Waits for the next reply of a device.
    fn next(&mut self, rank: usize) -> Result<Reply, RuntimeError> {
        loop {
            if let Some(reply) = self.early.get_mut(&rank).and_then(VecDeque::pop_front) {
                return reply;
            }
            let (from, reply) = self.replies.recv().map_err(|_| RuntimeError::Stopped)?;
            self.early.entry(from).or_default().push_back(reply);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        // Devices end when their command channel closes.
        self.commands.clear();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing more to report.
            let _ = thread.join();
        }
    }
}

/// Returns whether a device failed only because another did.
fn is_consequence(error: &RuntimeError) -> bool {
    match error {
        RuntimeError::Device { error, .. } => *error == KernelError::Disconnected,
        RuntimeError::Executor(error) => error.is_consequence(),
        _ => false,
    }
}

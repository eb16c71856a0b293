//! NCCL: direct communication between devices on several GPUs. A member of a group is a thread with its own GPU, in
//! this process or in another one.
//!
//! NCCL operations may wait forever if another member is gone. So a watchdog polls every communicator for errors. It
//! aborts all of them if one has an error or takes too long, and blocked calls then return.

use super::context::Stream;
use super::error::CudaError;
use super::functions::NcclFunctions;
use super::library::{Kind, Search};
use crate::tape::{CollectiveKind, Communicator};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::Reducer;
use cudarc::nccl::sys::{self, ncclDataType_t as Data, ncclRedOp_t as Reduction};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// NCCL, and all communicators of this process, so that all can be aborted.
#[derive(Clone, Debug)]
pub struct Nccl {
    functions: NcclFunctions,
    members: Arc<Mutex<Vec<Arc<Member>>>>,
}

/// The id by which the members of a group find each other; one member creates it for all.
#[derive(Clone, Copy)]
pub struct GroupId(sys::ncclUniqueId);

/// This process's end of a group, for one member.
#[derive(Debug)]
struct Member {
    raw: Mutex<Option<Handle>>,
    rank: u32,
    group: Communicator,
    /// The operation in progress and its start time.
    busy: Mutex<Option<(Instant, &'static str)>>,
}

#[derive(Clone, Copy, Debug)]
struct Handle(sys::ncclComm_t);

// SAFETY: any thread may use a communicator, one at a time, which the lock around it ensures.
unsafe impl Send for Handle {}

/// A member of a group, destroyed with its value.
#[derive(Debug)]
pub struct Channel {
    nccl: Nccl,
    member: Arc<Member>,
}

/// A thread that monitors communicators and aborts all of them if one is in trouble.
#[derive(Debug)]
pub struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    found: Arc<Mutex<Option<CudaError>>>,
}

impl GroupId {
    /// The id as words for other processes.
    pub fn words(&self) -> [u64; GroupId::WORDS] {
        let mut words = [0; GroupId::WORDS];
        for (word, bytes) in words.iter_mut().zip(self.0.internal.chunks_exact(8)) {
            let byte = |(at, &byte): (usize, &c_char)| u64::from(byte as u8) << (8 * at);
            *word = bytes.iter().enumerate().map(byte).sum();
        }
        words
    }

    pub(crate) fn of_words(words: &[u64; GroupId::WORDS]) -> GroupId {
        // SAFETY: it is plain bytes.
        let mut id: sys::ncclUniqueId = unsafe { std::mem::zeroed() };
        for (bytes, word) in id.internal.chunks_exact_mut(8).zip(words) {
            bytes.iter_mut().zip(word.to_le_bytes()).for_each(|(to, byte)| *to = byte as c_char);
        }
        GroupId(id)
    }

    pub(crate) const WORDS: usize = size_of::<sys::ncclUniqueId>() / 8;
}

impl Nccl {
    pub fn open(search: &Search) -> Result<Nccl, CudaError> {
        let functions = NcclFunctions::of(&search.open(Kind::Nccl)?)?;
        Ok(Nccl { functions, members: Arc::default() })
    }

    pub(crate) fn group_id(&self) -> Result<GroupId, CudaError> {
        // SAFETY: it is plain bytes.
        let mut id: sys::ncclUniqueId = unsafe { std::mem::zeroed() };
        // SAFETY: the call writes an id.
        let status = unsafe { (self.functions.ncclGetUniqueId)(&mut id) };
        self.done(status, "ncclGetUniqueId").map(|()| GroupId(id))
    }

    /// Joins a group; all its members must do so at once. The context of the member's GPU must be current.
    pub fn join(&self, id: GroupId, group: &Communicator, rank: u32) -> Result<Channel, CudaError> {
        let member = group.ranks.iter().position(|&r| r == rank).unwrap_or(0) as c_int;
        let mut raw = null_mut();
        // SAFETY: the call writes a handle; the id belongs to this group.
        let status = unsafe { (self.functions.ncclCommInitRank)(&mut raw, group.ranks.len() as c_int, id.0, member) };
        self.done(status, "ncclCommInitRank")?;
        let raw = Mutex::new(Some(Handle(raw)));
        let member = Arc::new(Member { raw, rank, group: group.clone(), busy: Mutex::default() });
        lock(&self.members).push(member.clone());
        Ok(Channel { nccl: self.clone(), member })
    }

    /// Aborts all communicators, which unblocks all waits for them.
    pub(crate) fn abort_all(&self) {
        for member in lock(&self.members).iter() {
            if let Some(Handle(raw)) = lock(&member.raw).take() {
                // SAFETY: it is taken, so that it is not used again.
                unsafe { (self.functions.ncclCommAbort)(raw) };
            }
        }
    }

    /// The first member that has an error, or whose operation takes longer than `limit`. The watchdog calls it
    /// periodically.
    fn trouble(&self, limit: Duration) -> Option<CudaError> {
        for member in lock(&self.members).iter() {
            let busy = *lock(&member.busy);
            let op = busy.map_or("nothing", |(_, op)| op);
            let problem = match *lock(&member.raw) {
                Some(Handle(raw)) => {
                    let mut status = 0;
                    // SAFETY: the communicator exists; the call writes a number.
                    let asked = unsafe { (self.functions.ncclCommGetAsyncError)(raw, &mut status) };
                    let status = if asked != 0 { asked } else { status };
                    let is_fine = status == sys::ncclResult_t::ncclSuccess as u32
                        || status == sys::ncclResult_t::ncclInProgress as u32;
                    (!is_fine).then(|| self.text_of(status))
                }
                None => None,
            };
            let late = busy.filter(|(since, _)| since.elapsed() > limit);
            let late = late.map(|_| format!("it took longer than {} s", limit.as_secs()));
            if let Some(problem) = problem.or(late) {
                let ranks = member.group.ranks.clone();
                return Some(CudaError::Group { rank: member.rank, ranks, op, problem });
            }
        }
        None
    }

    /// The operations in progress of this process's members, in words: `all-reduce among ranks 0, 1`.
    pub(crate) fn under_way(&self) -> Option<String> {
        let members = lock(&self.members);
        let busy = members.iter().filter_map(|member| Some((member, (*lock(&member.busy))?)));
        let (member, (_, op)) = busy.min_by_key(|(_, (since, _))| *since)?;
        const SHOWN: usize = 8;
        let ranks: Vec<String> = member.group.ranks.iter().take(SHOWN).map(u32::to_string).collect();
        let more = if member.group.ranks.len() > SHOWN { ", ..." } else { "" };
        Some(format!("{op} among devices {}{more}", ranks.join(", ")))
    }

    /// Monitors all communicators until the returned value is dropped.
    pub fn watch(&self, limit: Duration) -> Watchdog {
        let (stop, stopped) = channel::<()>();
        let (nccl, found) = (self.clone(), Arc::new(Mutex::new(None)));
        let trouble = found.clone();
        let thread = std::thread::spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(Duration::from_millis(100)) {
                if let Some(error) = nccl.trouble(limit) {
                    *lock(&trouble) = Some(error);
                    nccl.abort_all();
                    return;
                }
            }
        });
        Watchdog { stop: Some(stop), thread: Some(thread), found }
    }

    fn done(&self, status: u32, call: &'static str) -> Result<(), CudaError> {
        match status {
            0 => Ok(()),
            status => Err(CudaError::Call { call, name: self.text_of(status), text: String::new() }),
        }
    }

    fn text_of(&self, status: u32) -> String {
        // SAFETY: the call returns a text that lasts as long as the library, for any number.
        let text = unsafe { (self.functions.ncclGetErrorString)(status) };
        match text.is_null() {
            true => format!("code {status}"),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        }
    }
}

impl Watchdog {
    /// The reason why all communicators were aborted, if they were.
    pub fn found(&self) -> Option<CudaError> {
        lock(&self.found).clone()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop = None;
        // A thread that panicked has nothing more to report.
        let _ = self.thread.take().map(|thread| thread.join());
    }
}

impl Channel {
    /// Enqueues a collective in a stream, with `elements` as [`CollectiveKind`] counts them.
    ///
    /// # Safety
    /// The addresses must be of regions as long as the collective needs, which stay allocated until it is done.
    pub unsafe fn collective(
        &self,
        stream: &Stream,
        kind: CollectiveKind,
        dtype: DType,
        elements: u64,
        from: u64,
        to: u64,
    ) -> Result<(), CudaError> {
        let (from, to, count) = (from as *const c_void, to as *mut c_void, elements as usize);
        let data = self.data(dtype)?;
        let f = &self.nccl.functions;
        let stream = stream.raw().cast();
        match kind {
            CollectiveKind::AllReduce(reducer) => {
                let reduction = self.reduction(reducer, dtype)?;
                // SAFETY: guaranteed by the caller.
                self.call("all-reduce", |raw| unsafe {
                    (f.ncclAllReduce)(from, to, count, data, reduction, raw, stream)
                })
            }
            CollectiveKind::ReduceScatter(reducer) => {
                let reduction = self.reduction(reducer, dtype)?;
                // SAFETY: guaranteed by the caller.
                self.call("reduce-scatter", |raw| unsafe {
                    (f.ncclReduceScatter)(from, to, count, data, reduction, raw, stream)
                })
            }
            CollectiveKind::AllGather => {
                // SAFETY: guaranteed by the caller.
                self.call("all-gather", |raw| unsafe { (f.ncclAllGather)(from, to, count, data, raw, stream) })
            }
        }
    }

    /// Enqueues messages to and from members (member, address, elements) in a stream; they run concurrently.
    ///
    /// # Safety
    /// The addresses must be of this many elements, which stay allocated until all messages are done.
    pub unsafe fn exchange(
        &self,
        stream: &Stream,
        dtype: DType,
        sends: &[(u32, u64, u64)],
        receives: &[(u32, u64, u64)],
    ) -> Result<(), CudaError> {
        let data = self.data(dtype)?;
        let f = &self.nccl.functions;
        let stream = stream.raw().cast();
        self.call("exchange", |raw| {
            // SAFETY: this starts a group, which is ended below in any case.
            let mut status = unsafe { (f.ncclGroupStart)() };
            for &(member, from, elements) in sends {
                if status == 0 {
                    // SAFETY: guaranteed by the caller.
                    status = unsafe {
                        (f.ncclSend)(from as *const c_void, elements as usize, data, member as c_int, raw, stream)
                    };
                }
            }
            for &(member, to, elements) in receives {
                if status == 0 {
                    // SAFETY: guaranteed by the caller.
                    status = unsafe {
                        (f.ncclRecv)(to as *mut c_void, elements as usize, data, member as c_int, raw, stream)
                    };
                }
            }
            // SAFETY: the group was started above.
            let ended = unsafe { (f.ncclGroupEnd)() };
            if status == 0 { ended } else { status }
        })
    }

    /// See [`Nccl::abort_all`].
    pub(crate) fn abort_all(&self) {
        self.nccl.abort_all();
    }

    /// Marks the started operations as done, once the stream has completed them; the watchdog then ignores them.
    pub fn finished(&self) {
        *lock(&self.member.busy) = None;
    }

    fn call(&self, op: &'static str, call: impl FnOnce(sys::ncclComm_t) -> u32) -> Result<(), CudaError> {
        let Member { raw, rank, group, busy } = &*self.member;
        let failed = |problem: String| Err(CudaError::Group { rank: *rank, ranks: group.ranks.clone(), op, problem });
        // The lock is released before the call, which may block until the watchdog aborts it.
        let handle = *lock(raw);
        let Some(Handle(raw)) = handle else { return failed("the group was aborted".to_string()) };
        lock(busy).get_or_insert((Instant::now(), op));
        match call(raw) {
            0 => Ok(()),
            status => failed(self.nccl.text_of(status)),
        }
    }

    fn data(&self, dtype: DType) -> Result<Data, CudaError> {
        data(dtype).ok_or_else(|| CudaError::UnsupportedExchange { what: dtype.to_string() })
    }

    fn reduction(&self, reducer: Reducer, dtype: DType) -> Result<Reduction, CudaError> {
        let unsupported = || CudaError::UnsupportedExchange { what: format!("{reducer:?} of {dtype}") };
        reduction(reducer, dtype).ok_or_else(unsupported)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let Some(Handle(raw)) = lock(&self.member.raw).take() {
            // SAFETY: it is taken, so that it is not used again. Aborting, unlike destroying, does not wait for other
            // members.
            unsafe { (self.nccl.functions.ncclCommAbort)(raw) };
        }
        lock(&self.nccl.members).retain(|member| !Arc::ptr_eq(member, &self.member));
    }
}

/// Ignores poisoning: the protected handles and times are always consistent.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// NCCL's name of a type. Data that is only moved may use any type of the same size.
fn data(dtype: DType) -> Option<Data> {
    Some(match dtype {
        DType::F64 => Data::ncclFloat64,
        DType::F32 => Data::ncclFloat32,
        DType::F16 => Data::ncclFloat16,
        DType::BF16 => Data::ncclBfloat16,
        DType::I64 => Data::ncclInt64,
        DType::I32 => Data::ncclInt32,
        DType::I8 => Data::ncclInt8,
        DType::U64 => Data::ncclUint64,
        DType::U32 => Data::ncclUint32,
        DType::U8 | DType::Bool => Data::ncclUint8,
        _ => return None,
    })
}

/// NCCL's name of a reduction. Booleans are bytes of 0 and 1: `or` is their maximum, `and` their minimum.
fn reduction(reducer: Reducer, dtype: DType) -> Option<Reduction> {
    let logical = dtype == DType::Bool;
    Some(match reducer {
        Reducer::Sum | Reducer::Or | Reducer::Max if logical => Reduction::ncclMax,
        Reducer::Product | Reducer::And | Reducer::Min if logical => Reduction::ncclMin,
        Reducer::Sum => Reduction::ncclSum,
        Reducer::Product => Reduction::ncclProd,
        Reducer::Max => Reduction::ncclMax,
        Reducer::Min => Reduction::ncclMin,
        Reducer::And | Reducer::Or => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_as_words() {
        let words: [u64; GroupId::WORDS] = std::array::from_fn(|i| (i as u64 + 1).wrapping_mul(0xfedc_ba98_7654_3210));
        assert_eq!(GroupId::of_words(&words).words(), words);
    }

    #[test]
    fn reductions_of_truth_values_stay_truth_values() {
        assert_eq!(reduction(Reducer::Sum, DType::Bool), Some(Reduction::ncclMax));
        assert_eq!(reduction(Reducer::And, DType::Bool), Some(Reduction::ncclMin));
        assert_eq!(reduction(Reducer::Sum, DType::BF16), Some(Reduction::ncclSum));
        assert_eq!(reduction(Reducer::Or, DType::I32), None);
        assert_eq!((data(DType::Bool), data(DType::I16)), (Some(Data::ncclUint8), None));
    }
}

//! Bindings to MPI: a communicator and its operations, with checked sizes and types. All calls come from the thread
//! that initialised MPI. Errors are returned; the watch handles calls that a lost rank blocks.

use crate::error::KernelError;
use crate::ranks::Carrier;
use mpi::environment::Universe;
use mpi::ffi;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

/// A group of ranks, and this rank's position in it.
pub struct Communicator {
    raw: ffi::MPI_Comm,
    pub rank: usize,
    pub size: usize,
}

/// Words in transit to another rank; they must not move until they are sent.
pub struct Sending {
    request: ffi::MPI_Request,
    _words: Vec<u64>,
}

// SAFETY: communicators are created and used only through a `World`, which stays on the thread that initialised MPI.
// The impl is needed because devices, which may be threads, must be movable and shareable.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}
// SAFETY: as above; the words belong to the value.
unsafe impl Send for Sending {}
// SAFETY: as above.
unsafe impl Send for Receiving {}

/// Words in transit from another rank.
pub(crate) struct Receiving {
    /// `None` once they have arrived.
    request: Option<ffi::MPI_Request>,
    words: Vec<u64>,
}

/// The MPI tag of a message. Messages of one stream keep their order and do not wait for other streams. The message
/// itself says what it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Main = 0,
    /// Messages of asynchronous collectives.
    AsyncCollectives = 2,
}

/// The tag by which members of a new group communicate. The standard keeps it apart from messages. Open MPI 4 confuses
/// it with messages of the same tag, and hangs.
const GROUP_TAG: c_int = 1;

/// Turns a return code into a result.
fn checked(call: &'static str, code: c_int) -> Result<(), KernelError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length: c_int = 0;
    // SAFETY: the buffer has room for the longest text.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    text.truncate(length.max(0) as usize);
    Err(KernelError::Carrier { call: call.to_string(), message: String::from_utf8_lossy(&text).into_owned() })
}

/// A count as MPI takes it.
fn count(call: &'static str, elements: usize) -> Result<c_int, KernelError> {
    c_int::try_from(elements).map_err(|_| KernelError::Carrier {
        call: call.to_string(),
        message: format!("{elements} elements are too many for one call"),
    })
}

/// Returns whether a number of elements fits in one call.
pub(crate) fn fits(elements: usize) -> bool {
    c_int::try_from(elements).is_ok()
}

impl Communicator {
    /// All ranks that were started together.
    pub(crate) fn world(_universe: &Universe) -> Result<Communicator, KernelError> {
        // SAFETY: `Universe` proves that MPI is initialised.
        unsafe { Communicator::of(ffi::RSMPI_COMM_WORLD) }
    }

    /// # Safety
    /// `raw` must be a communicator of this process, and MPI must be initialised.
    unsafe fn of(raw: ffi::MPI_Comm) -> Result<Communicator, KernelError> {
        let (mut rank, mut size): (c_int, c_int) = (0, 0);
        // SAFETY: the communicator is valid, by this function's contract.
        unsafe {
            checked("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN))?;
            checked("MPI_Comm_rank", ffi::MPI_Comm_rank(raw, &mut rank))?;
            checked("MPI_Comm_size", ffi::MPI_Comm_size(raw, &mut size))?;
        }
        Ok(Communicator { raw, rank: rank as usize, size: size as usize })
    }

    /// The same ranks, ordered by `key`.
    pub fn ordered(&self, key: usize) -> Result<Communicator, KernelError> {
        let mut raw = self.raw;
        // SAFETY: the communicator is valid, and so is the target of the new one.
        unsafe {
            checked("MPI_Comm_split", ffi::MPI_Comm_split(self.raw, 0, key as c_int, &mut raw))?;
            Communicator::of(raw)
        }
    }

    /// The ranks that share memory with this one.
    pub fn node(&self) -> Result<Communicator, KernelError> {
        let (key, mut raw) = (self.rank as c_int, self.raw);
        // SAFETY: the communicator is valid, no info is given, and the target of the new one is valid.
        unsafe {
            let (kind, info) = (ffi::RSMPI_COMM_TYPE_SHARED, ffi::RSMPI_INFO_NULL);
            checked("MPI_Comm_split_type", ffi::MPI_Comm_split_type(self.raw, kind, key, info, &mut raw))?;
            Communicator::of(raw)
        }
    }

    /// Creates the communicator of a group of ranks, in its order; only its members take part.
    pub fn group(&self, ranks: &[usize]) -> Result<Communicator, KernelError> {
        let list: Vec<c_int> = ranks.iter().map(|&rank| rank as c_int).collect();
        let (mut all, mut group) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        let mut raw = self.raw;
        // SAFETY: groups are written before they are read, and freed once.
        unsafe {
            checked("MPI_Comm_group", ffi::MPI_Comm_group(self.raw, all.as_mut_ptr()))?;
            let (mut all, length) = (all.assume_init(), list.len() as c_int);
            checked("MPI_Group_incl", ffi::MPI_Group_incl(all, length, list.as_ptr(), group.as_mut_ptr()))?;
            let mut group = group.assume_init();
            checked("MPI_Comm_create_group", ffi::MPI_Comm_create_group(self.raw, group, GROUP_TAG, &mut raw))?;
            checked("MPI_Group_free", ffi::MPI_Group_free(&mut group))?;
            checked("MPI_Group_free", ffi::MPI_Group_free(&mut all))?;
            Communicator::of(raw)
        }
    }

    /// Starts to send words to a rank.
    pub fn send(&self, to: usize, words: Vec<u64>, stream: Stream) -> Result<Sending, KernelError> {
        let length = count("MPI_Isend", words.len())?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the words are kept with the request until it is done; a vector's elements do not move with it.
        unsafe {
            let (data, kind) = (words.as_ptr().cast::<c_void>(), ffi::RSMPI_UINT64_T);
            let code = ffi::MPI_Isend(data, length, kind, to as c_int, stream as c_int, self.raw, request.as_mut_ptr());
            checked("MPI_Isend", code)?;
            Ok(Sending { request: request.assume_init(), _words: words })
        }
    }

    /// Receives the next words that a rank sent to this one.
    pub fn receive(&self, from: usize) -> Result<Vec<u64>, KernelError> {
        let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the probe writes message and status before they are read, and the vector has room for the whole
        // message.
        unsafe {
            let code = ffi::MPI_Mprobe(
                from as c_int,
                Stream::Main as c_int,
                self.raw,
                message.as_mut_ptr(),
                status.as_mut_ptr(),
            );
            checked("MPI_Mprobe", code)?;
            let (mut message, status) = (message.assume_init(), status.assume_init());
            let mut length: c_int = 0;
            checked("MPI_Get_count", ffi::MPI_Get_count(&status, ffi::RSMPI_UINT64_T, &mut length))?;
            let mut words = vec![0u64; length.max(0) as usize];
            let (data, kind) = (words.as_mut_ptr().cast::<c_void>(), ffi::RSMPI_UINT64_T);
            checked("MPI_Mrecv", ffi::MPI_Mrecv(data, length, kind, &mut message, ffi::RSMPI_STATUS_IGNORE))?;
            Ok(words)
        }
    }

    /// Starts to receive the next words of an asynchronous collective from a rank, if it has begun to send them.
    pub(crate) fn begin_receive(&self, from: usize) -> Result<Option<Receiving>, KernelError> {
        let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        let mut found: c_int = 0;
        // SAFETY: a successful probe writes message and status, which are read only then. The vector has room for the
        // whole message, and its elements do not move while the request lives.
        unsafe {
            let (tag, message, status) = (Stream::AsyncCollectives as c_int, message.as_mut_ptr(), status.as_mut_ptr());
            let code = ffi::MPI_Improbe(from as c_int, tag, self.raw, &mut found, message, status);
            checked("MPI_Improbe", code)?;
            if found == 0 {
                return Ok(None);
            }
            let mut length: c_int = 0;
            checked("MPI_Get_count", ffi::MPI_Get_count(status, ffi::RSMPI_UINT64_T, &mut length))?;
            let mut words = vec![0u64; length.max(0) as usize];
            let (data, mut request) = (words.as_mut_ptr().cast::<c_void>(), MaybeUninit::uninit());
            let code = ffi::MPI_Imrecv(data, length, ffi::RSMPI_UINT64_T, message, request.as_mut_ptr());
            checked("MPI_Imrecv", code)?;
            Ok(Some(Receiving { request: Some(request.assume_init()), words }))
        }
    }

    /// Each element of `target` becomes the sum of the ranks' elements in `source`, in an order that MPI chooses.
    pub(crate) fn all_reduce_sum(&self, source: &[f32], target: &mut [f32]) -> Result<(), KernelError> {
        let length = count("MPI_Allreduce", source.len().min(target.len()))?;
        let (from, to) = (source.as_ptr().cast::<c_void>(), target.as_mut_ptr().cast::<c_void>());
        // SAFETY: both slices have `length` elements, and do not overlap.
        let code = unsafe { ffi::MPI_Allreduce(from, to, length, ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, self.raw) };
        checked("MPI_Allreduce", code)
    }

    /// As [`Self::all_reduce_sum`], but this rank gets only its part; `source` has one part per rank.
    pub(crate) fn reduce_scatter_sum(&self, source: &[f32], target: &mut [f32]) -> Result<(), KernelError> {
        let length = count("MPI_Reduce_scatter_block", target.len())?;
        expect("MPI_Reduce_scatter_block", source.len() == target.len() * self.size)?;
        let (from, to) = (source.as_ptr().cast::<c_void>(), target.as_mut_ptr().cast::<c_void>());
        // SAFETY: the source has `length` elements for each rank, the target as many, and they do not overlap.
        let code =
            unsafe { ffi::MPI_Reduce_scatter_block(from, to, length, ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, self.raw) };
        checked("MPI_Reduce_scatter_block", code)
    }

    /// Concatenates the bytes of all ranks.
    pub fn all_gather(&self, source: &[u8], target: &mut [u8]) -> Result<(), KernelError> {
        let length = count("MPI_Allgather", source.len())?;
        expect("MPI_Allgather", target.len() == source.len() * self.size)?;
        let (from, to) = (source.as_ptr().cast::<c_void>(), target.as_mut_ptr().cast::<c_void>());
        // SAFETY: the target has `length` bytes for each rank and does not overlap the source.
        let code = unsafe {
            let kind = ffi::RSMPI_UINT8_T;
            ffi::MPI_Allgather(from, length, kind, to, length, kind, self.raw)
        };
        checked("MPI_Allgather", code)
    }

    /// Sends one part of the source to each rank, and receives one from each.
    pub fn all_to_all(&self, source: &[u8], target: &mut [u8]) -> Result<(), KernelError> {
        let length = count("MPI_Alltoall", source.len() / self.size)?;
        expect("MPI_Alltoall", source.len() == target.len() && source.len() % self.size == 0)?;
        let (from, to) = (source.as_ptr().cast::<c_void>(), target.as_mut_ptr().cast::<c_void>());
        // SAFETY: both have `length` bytes for each rank, and do not overlap.
        let code = unsafe {
            let kind = ffi::RSMPI_UINT8_T;
            ffi::MPI_Alltoall(from, length, kind, to, length, kind, self.raw)
        };
        checked("MPI_Alltoall", code)
    }

    pub fn barrier(&self) -> Result<(), KernelError> {
        // SAFETY: the communicator is valid.
        checked("MPI_Barrier", unsafe { ffi::MPI_Barrier(self.raw) })
    }

    /// Waits for all ranks without using a core that others need.
    pub(crate) fn barrier_asleep(&self) -> Result<(), KernelError> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the communicator is valid, and the request is written before it is read.
        let mut request = unsafe {
            checked("MPI_Ibarrier", ffi::MPI_Ibarrier(self.raw, request.as_mut_ptr()))?;
            request.assume_init()
        };
        loop {
            let mut done: c_int = 0;
            // SAFETY: the request is valid until it is done, and is not tested afterwards.
            checked("MPI_Test", unsafe { ffi::MPI_Test(&mut request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
            if done != 0 {
                return Ok(());
            }
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }
}

impl Carrier for Communicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn tell(&self, words: &[u64]) -> Result<Vec<Vec<u64>>, KernelError> {
        let mut lengths = vec![0u64; self.size];
        self.all_gather(bytemuck::cast_slice(&[words.len() as u64]), bytemuck::cast_slice_mut(&mut lengths))?;
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let mut own = words.to_vec();
        own.resize(longest, 0);
        let mut all = vec![0u64; longest * self.size];
        self.all_gather(bytemuck::cast_slice(&own), bytemuck::cast_slice_mut(&mut all))?;
        let part = |(rank, &length): (usize, &u64)| all[rank * longest..][..length as usize].to_vec();
        Ok(lengths.iter().enumerate().map(part).collect())
    }

    fn gather(&self, words: Vec<u64>) -> Result<Option<Vec<Vec<u64>>>, KernelError> {
        if self.rank > 0 {
            self.send(0, words, Stream::Main)?.is_done(true)?;
            return Ok(None);
        }
        let others = (1..self.size).map(|rank| self.receive(rank));
        std::iter::once(Ok(words)).chain(others).collect::<Result<_, _>>().map(Some)
    }
}

fn expect(call: &'static str, holds: bool) -> Result<(), KernelError> {
    let message = || "the ranks do not agree on sizes".to_string();
    if holds { Ok(()) } else { Err(KernelError::Carrier { call: call.to_string(), message: message() }) }
}

impl Sending {
    /// Returns whether the words have been sent; waits for it if `wait`.
    pub(crate) fn is_done(&mut self, wait: bool) -> Result<bool, KernelError> {
        let mut done: c_int = 1;
        // SAFETY: the request was started, or is the null request that remains of it; both may be tested.
        unsafe {
            match wait {
                true => checked("MPI_Wait", ffi::MPI_Wait(&mut self.request, ffi::RSMPI_STATUS_IGNORE))?,
                false => checked("MPI_Test", ffi::MPI_Test(&mut self.request, &mut done, ffi::RSMPI_STATUS_IGNORE))?,
            }
        }
        Ok(done != 0)
    }
}

impl Receiving {
    /// Returns the words if all of them have arrived, and the receive itself otherwise.
    pub(crate) fn done(mut self) -> Result<Result<Vec<u64>, Receiving>, KernelError> {
        let Some(request) = &mut self.request else { return Ok(Ok(std::mem::take(&mut self.words))) };
        let mut done: c_int = 0;
        // SAFETY: the request was started and is not done.
        checked("MPI_Test", unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        if done == 0 {
            return Ok(Err(self));
        }
        self.request = None;
        Ok(Ok(std::mem::take(&mut self.words)))
    }
}

impl Drop for Receiving {
    /// The words must outlive MPI's writes. If a rank exits with a receive in progress, it takes all ranks down.
    fn drop(&mut self) {
        if let Some(mut request) = self.request.take() {
            // SAFETY: the request was started and is not done.
            let _ = checked("MPI_Wait", unsafe { ffi::MPI_Wait(&mut request, ffi::RSMPI_STATUS_IGNORE) });
        }
    }
}

impl Drop for Sending {
    /// The words must outlive MPI's reads.
    fn drop(&mut self) {
        let _ = self.is_done(true);
    }
}

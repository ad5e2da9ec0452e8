//! The host engine. Its device memory is ordinary memory of this process (CPU engines). It is the reference for the
//! other engines.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::{Error, ErrorKind, Result};

use crate::batch::{CopyBatch, CopyOp, Direction, GroupSink};
use crate::on_use::Pools;
use crate::{CopyEngine, PoolRegistration, stream};

/// Bytes that one thread takes at a time: enough that the hand-over costs nothing compared with the copy.
const PIECE_BYTES: usize = 1 << 20;
/// Batches below this size are copied by their caller alone.
const HELP_BYTES_MIN: u64 = 4 << 20;
/// Largest number of threads chosen automatically: memory gets no faster with more.
const CHOSEN_THREADS_MAX: usize = 4;
/// Largest number of threads of one engine.
const THREADS_MAX: usize = 64;

/// Copies with the calling thread and helpers. Large batches bypass the cache, which the C library would do only for
/// single copies larger than any shard (figures in docs/benchmarks.md).
pub struct HostEngine {
    helpers: Vec<JoinHandle<()>>,
    /// Number of helpers for a dump.
    dump_helpers: usize,
    work: Option<Sender<Arc<Work>>>,
    pools: Arc<Pools>,
}

/// A batch cut into pieces, which threads take in turn.
struct Work {
    batch: CopyBatch,
    pools: Arc<Pools>,
    streamed: bool,
    /// Group, first op, and one past the last op.
    pieces: Vec<(usize, usize, usize)>,
    next: AtomicUsize,
    /// Number of remaining pieces of each group. The thread that takes it to zero reports the group.
    left: Vec<AtomicUsize>,
    pieces_left: AtomicUsize,
    done: parking_lot::Mutex<bool>,
    wake: parking_lot::Condvar,
    sink: Arc<dyn GroupSink>,
}

impl HostEngine {
    /// Makes an engine of `threads` threads, the caller included. 0 = the number of processors for loads, which compute
    /// waits for, and half of them for dumps, which run alongside compute; 4 at most.
    pub fn new(threads: usize) -> Result<Self> {
        let available = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let chosen = |share: usize| if threads == 0 { share.clamp(1, CHOSEN_THREADS_MAX) } else { threads };
        let (threads, dump_threads) = (chosen(available), chosen(available / 2));
        if threads > THREADS_MAX {
            return Err(Error::new(ErrorKind::Config, "too many copy threads")
                .with("copy_threads", threads)
                .with("copy_threads_max", THREADS_MAX));
        }
        let mut helpers = Vec::new();
        let mut work = None;
        if threads > 1 {
            let (sender, receiver) = crossbeam_channel::unbounded::<Arc<Work>>();
            for index in 1..threads {
                helpers.push(spawn_helper(index, receiver.clone())?);
            }
            work = Some(sender);
        }
        Ok(Self { helpers, dump_helpers: dump_threads - 1, work, pools: Arc::default() })
    }
}

fn spawn_helper(index: usize, receiver: Receiver<Arc<Work>>) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(format!("kvdepot-copy{index}"))
        .spawn(move || {
            for work in receiver {
                work.take_pieces();
            }
        })
        .map_err(|e| Error::io("cannot start a copy thread", e))
}

impl Work {
    fn new(batch: CopyBatch, sink: Arc<dyn GroupSink>, pools: Arc<Pools>) -> Self {
        let mut pieces = Vec::new();
        let mut left = Vec::with_capacity(batch.ends.len());
        let mut start = 0;
        for (group, &end) in batch.ends.iter().enumerate() {
            let before = pieces.len();
            let (mut first, mut bytes) = (start, 0);
            for index in start..end {
                bytes += batch.ops[index].len;
                if bytes >= PIECE_BYTES || index + 1 == end {
                    pieces.push((group, first, index + 1));
                    (first, bytes) = (index + 1, 0);
                }
            }
            if pieces.len() == before {
                pieces.push((group, end, end));
            }
            left.push(AtomicUsize::new(pieces.len() - before));
            start = end;
        }
        Self {
            pieces_left: AtomicUsize::new(pieces.len()),
            streamed: batch.bytes() >= stream::STREAM_BYTES_MIN,
            batch,
            pools,
            pieces,
            next: AtomicUsize::new(0),
            left,
            done: parking_lot::Mutex::new(false),
            wake: parking_lot::Condvar::new(),
            sink,
        }
    }

    fn take_pieces(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(&(group, first, last)) = self.pieces.get(index) else { return };
            let ops = &self.batch.ops[first..last];
            self.pools.about_to_copy(ops.iter().map(|op| (op.host.addr(), op.len)));
            for op in ops {
                copy_one(self.batch.direction, op, self.streamed);
            }
            if self.streamed {
                stream::fence();
            }
            // AcqRel pairs with the other threads' decrements: the reporting thread sees all bytes of the group.
            if self.left[group].fetch_sub(1, Ordering::AcqRel) == 1 {
                self.sink.group_ended(group, Ok(()));
            }
            if self.pieces_left.fetch_sub(1, Ordering::AcqRel) == 1 {
                *self.done.lock() = true;
                self.wake.notify_all();
            }
        }
    }
}

fn copy_one(direction: Direction, op: &CopyOp, streamed: bool) {
    let device = op.device as *mut u8;
    let (from, to) = match direction {
        Direction::ToHost => (device.cast_const(), op.host),
        Direction::ToDevice => (op.host.cast_const(), device),
    };
    // SAFETY: the caller of `CopyEngine::run` guarantees both ranges until the group was reported, and no overlap of a
    // written range with anything else.
    unsafe {
        if streamed {
            stream::copy(from, to, op.len);
        } else {
            std::ptr::copy_nonoverlapping(from, to, op.len);
        }
    }
}

impl CopyEngine for HostEngine {
    fn name(&self) -> &'static str {
        "host"
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        if batch.wait_event != 0 {
            return Err(Error::new(ErrorKind::Unsupported, "the host engine knows no device events"));
        }
        batch.check()?;
        let large = batch.bytes() >= HELP_BYTES_MIN;
        let work = Arc::new(Work::new(batch, sink, Arc::clone(&self.pools)));
        if work.pieces.is_empty() {
            return Ok(());
        }
        if let (Some(sender), true) = (&self.work, large) {
            let helpers = match work.batch.direction {
                Direction::ToHost => self.dump_helpers,
                Direction::ToDevice => self.helpers.len(),
            };
            for _ in 0..helpers.min(work.pieces.len() - 1) {
                let _ = sender.send(Arc::clone(&work));
            }
        }
        work.take_pieces();
        // The caller gets the ops' memory back only when the helpers have finished their pieces.
        let mut done = work.done.lock();
        while !*done {
            work.wake.wait(&mut done);
        }
        Ok(())
    }

    unsafe fn register_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        Ok(PoolRegistration::new(Box::new(unsafe { self.pools.add(base, len) })))
    }
}

impl Drop for HostEngine {
    fn drop(&mut self) {
        self.work = None;
        for helper in self.helpers.drain(..) {
            let _ = helper.join();
        }
    }
}

impl fmt::Debug for HostEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostEngine({} threads)", self.helpers.len() + 1)
    }
}

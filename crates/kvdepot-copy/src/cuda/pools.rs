//! Host memory that is registered with the device, and its registration in the background.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, POOL_EXTENT_BYTES};
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::cuda::context::Context;
use crate::cuda::types::{ALREADY_REGISTERED, HOST_REGISTER_PORTABLE_DEVICEMAP};
use crate::pool::Registration;

/// What is registered as one: an extent of the pool, which no slot's run crosses.
pub(crate) const PIECE_BYTES: usize = POOL_EXTENT_BYTES as usize;

/// A range that is or will be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) base: usize,
    pub(crate) len: usize,
    /// Its address on the device, once it is registered.
    pub(crate) device: Option<u64>,
}

/// Pieces of one device's pools, ascending. Readers take a snapshot, so that no copy waits for a registration. Pieces
/// are in it before they are registered: a copy must not span the end of a piece that is registered a moment later.
#[derive(Debug, Default)]
pub(crate) struct Pools(Mutex<Arc<Vec<Piece>>>);

impl Pools {
    pub(crate) fn snapshot(&self) -> Arc<Vec<Piece>> {
        Arc::clone(&self.0.lock())
    }

    /// Adds pieces that are not registered yet; `false` if one of them touches a piece that is there.
    fn plan(&self, base: usize, len: usize, piece_bytes: usize) -> bool {
        let mut pieces = self.0.lock();
        if pieces.iter().any(|piece| piece.base < base + len && base < piece.base + piece.len) {
            return false;
        }
        let at = pieces.partition_point(|piece| piece.base < base);
        let planned = (0..len).step_by(piece_bytes).map(|start| Piece {
            base: base + start,
            len: piece_bytes.min(len - start),
            device: None,
        });
        Arc::make_mut(&mut pieces).splice(at..at, planned);
        true
    }

    fn registered(&self, base: usize, device: u64) {
        let mut pieces = self.0.lock();
        if let Some(piece) = Arc::make_mut(&mut pieces).iter_mut().find(|piece| piece.base == base) {
            piece.device = Some(device);
        }
    }

    fn remove(&self, base: usize, len: usize) {
        Arc::make_mut(&mut self.0.lock()).retain(|piece| piece.base < base || base + len <= piece.base);
    }
}

/// How far a registration is.
struct Progress {
    context: Arc<Context>,
    pools: Arc<Pools>,
    /// First addresses of what was registered, to be undone.
    ours: Mutex<Vec<usize>>,
    bytes: AtomicU64,
    stop: AtomicBool,
    ended: Mutex<Option<Result<()>>>,
    wake: Condvar,
}

/// Registers a range piece by piece, in a thread of its own.
pub(crate) struct PoolThread {
    base: usize,
    len: usize,
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

impl PoolThread {
    /// # Safety
    /// The range stays mapped until this is dropped.
    pub(crate) unsafe fn start(
        context: &Arc<Context>,
        pools: &Arc<Pools>,
        base: *mut u8,
        len: usize,
        piece_bytes: usize,
    ) -> Result<Self> {
        let base = base as usize;
        let page = BLOCK_ALIGN_BYTES as usize;
        if len == 0 || !(base | len | piece_bytes).is_multiple_of(page) || base.checked_add(len).is_none() {
            return Err(Error::new(ErrorKind::Config, "memory to be registered must consist of whole pages")
                .with("address", format!("{base:#x}"))
                .with("bytes", len));
        }
        if !pools.plan(base, len, piece_bytes) {
            return Err(Error::new(ErrorKind::Config, "a part of this memory is being registered already")
                .with("address", format!("{base:#x}"))
                .with("bytes", len));
        }
        let progress = Arc::new(Progress {
            context: Arc::clone(context),
            pools: Arc::clone(pools),
            ours: Mutex::default(),
            bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            ended: Mutex::default(),
            wake: Condvar::new(),
        });
        let shared = Arc::clone(&progress);
        // Undoes the plan if the thread cannot be started.
        let mut this = Self { base, len, progress, thread: None };
        let started = std::thread::Builder::new()
            .name("kvdepot-register".into())
            .spawn(move || {
                let outcome = shared.register(base, len, piece_bytes);
                if let Err(error) = &outcome {
                    tracing::warn!("copies of a part of the pool go the slow way: {error}");
                }
                *shared.ended.lock() = Some(outcome);
                shared.wake.notify_all();
            })
            .map_err(|e| Error::io("cannot start a registration thread", e))?;
        this.thread = Some(started);
        Ok(this)
    }
}

impl Progress {
    fn register(&self, base: usize, len: usize, piece_bytes: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        let begun = Instant::now();
        for start in (0..len).step_by(piece_bytes) {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let bytes = piece_bytes.min(len - start);
            self.register_piece(base + start, bytes)
                .map_err(|e| e.with("registered_bytes", start).with("pool_bytes", len))?;
            self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        tracing::debug!("registered {len} bytes with {:?} in {:?}", self.context, begun.elapsed());
        Ok(())
    }

    fn register_piece(&self, base: usize, len: usize) -> Result<()> {
        let table = self.context.table();
        let address = base as *mut c_void;
        // SAFETY: the range stays mapped (`PoolThread::start`).
        let code = unsafe { (table.mem_host_register)(address, len, HOST_REGISTER_PORTABLE_DEVICEMAP) };
        if code == ALREADY_REGISTERED {
            // By somebody who may undo it at any time, so it counts as not registered: the driver still knows it, and
            // copies by plain calls are as quick.
            return Ok(());
        }
        self.context.check("cuMemHostRegister_v2", code)?;
        self.ours.lock().push(base);
        let mut device = 0;
        // SAFETY: the pointer lives during the call.
        let code = unsafe { (table.mem_host_get_device_pointer)(&raw mut device, address, 0) };
        self.context.check("cuMemHostGetDevicePointer_v2", code)?;
        self.pools.registered(base, device);
        Ok(())
    }
}

impl Registration for PoolThread {
    fn registered_bytes(&self) -> u64 {
        self.progress.bytes.load(Ordering::Relaxed)
    }

    fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut ended = self.progress.ended.lock();
        while ended.is_none() {
            if self.progress.wake.wait_until(&mut ended, deadline).timed_out() {
                return ended.is_some();
            }
        }
        true
    }

    fn failure(&self) -> Option<Error> {
        self.progress.ended.lock().as_ref().and_then(|ended| ended.as_ref().err().cloned())
    }
}

impl Drop for PoolThread {
    fn drop(&mut self) {
        self.progress.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.progress.pools.remove(self.base, self.len);
        let entered = self.progress.context.enter();
        for base in self.progress.ours.lock().drain(..) {
            if entered.is_ok() {
                // SAFETY: registered by us; no copy names it any more (`CopyEngine::register_pool`).
                let code =
                    unsafe { (self.progress.context.table().mem_host_unregister)(base as *mut c_void) };
                if let Err(error) = self.progress.context.check("cuMemHostUnregister", code) {
                    tracing::warn!("{error}");
                }
            }
        }
    }
}

impl fmt::Debug for PoolThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolThread({} bytes registered)", self.registered_bytes())
    }
}

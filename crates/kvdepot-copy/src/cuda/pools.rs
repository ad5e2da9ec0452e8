//! Host memory registered with the device, and its registration in the background.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, POOL_EXTENT_BYTES};
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::background::{Background, Progress};
use crate::cuda::context::Context;
use crate::cuda::types::{ALREADY_REGISTERED, HOST_REGISTER_PORTABLE_DEVICEMAP};
use crate::paced::{self, Range};
use crate::pool::Registration;

/// Size of one registration: other driver calls wait while it runs, some 10 ms. A copy across the end of a piece is cut
/// there.
pub(crate) const PIECE_BYTES: usize = 64 << 20;
/// No slot's run crosses the end of an extent, so pieces that end there cut no run.
const _: () = assert!(POOL_EXTENT_BYTES.is_multiple_of(PIECE_BYTES as u64));

/// A range that is or will be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) base: usize,
    pub(crate) len: usize,
    /// Its address on the device, once it is registered.
    pub(crate) device: Option<u64>,
}

/// The pieces of one device's pools, ascending. Readers take a snapshot, so that no copy waits for a registration.
/// Pieces are listed before they are registered: a copy must not cross the end of a piece that is registered a moment
/// later.
#[derive(Debug, Default)]
pub(crate) struct Pools(Mutex<Arc<Vec<Piece>>>);

impl Pools {
    pub(crate) fn snapshot(&self) -> Arc<Vec<Piece>> {
        Arc::clone(&self.0.lock())
    }

    /// Adds pieces that are not registered yet. Returns `false` if one of them overlaps an existing piece.
    fn plan(&self, range: Range) -> bool {
        let Range { base, len, .. } = range;
        let mut pieces = self.0.lock();
        if pieces.iter().any(|piece| piece.base < base + len && base < piece.base + piece.len) {
            return false;
        }
        let at = pieces.partition_point(|piece| piece.base < base);
        let planned = range.pieces().map(|(base, len)| Piece { base, len, device: None });
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

/// The registered pieces of a pool.
struct Registered {
    context: Arc<Context>,
    pools: Arc<Pools>,
    /// First addresses of our registrations, to be undone.
    ours: Mutex<Vec<usize>>,
}

/// Registers a range piece by piece in a thread.
pub(crate) struct PoolThread {
    base: usize,
    len: usize,
    registered: Arc<Registered>,
    /// `None` only while it is being started.
    thread: Option<Background>,
}

impl PoolThread {
    /// # Safety
    /// The range stays mapped until this is dropped.
    pub(crate) unsafe fn start(context: &Arc<Context>, pools: &Arc<Pools>, range: Range) -> Result<Self> {
        let Range { base, len, piece_bytes, .. } = range;
        let page = BLOCK_ALIGN_BYTES as usize;
        if len == 0 || !(base | len | piece_bytes).is_multiple_of(page) || base.checked_add(len).is_none() {
            return Err(Error::new(ErrorKind::Config, "memory to be registered must consist of whole pages")
                .with("address", format!("{base:#x}"))
                .with("bytes", len));
        }
        if !pools.plan(range) {
            return Err(Error::new(ErrorKind::Config, "a part of this memory is being registered already")
                .with("address", format!("{base:#x}"))
                .with("bytes", len));
        }
        let registered = Arc::new(Registered {
            context: Arc::clone(context),
            pools: Arc::clone(pools),
            ours: Mutex::default(),
        });
        let shared = Arc::clone(&registered);
        // Dropping it undoes the plan if the thread cannot be started.
        let mut this = Self { base, len, registered, thread: None };
        this.thread = Some(Background::start("kvdepot-register", move |progress| {
            shared.register(range, progress).inspect_err(|error| {
                tracing::warn!("copies of a part of the pool use the slow path: {error}");
            })
        })?);
        Ok(this)
    }
}

impl Registered {
    fn register(&self, range: Range, progress: &Progress) -> Result<()> {
        let _entered = self.context.enter()?;
        let begun = Instant::now();
        let piece = |base, len| {
            self.register_piece(base, len)
                .map_err(|e| e.with("registered_bytes", progress.bytes()).with("pool_bytes", range.len))
        };
        // SAFETY: the range stays mapped (`PoolThread::start`).
        unsafe { paced::register(range, progress, piece) }?;
        tracing::debug!(
            "registered {} bytes with {:?} in {:?}",
            progress.bytes(),
            self.context,
            begun.elapsed()
        );
        Ok(())
    }

    fn register_piece(&self, base: usize, len: usize) -> Result<()> {
        let table = self.context.table();
        let address = base as *mut c_void;
        // SAFETY: the range stays mapped (`PoolThread::start`).
        let code = unsafe { (table.mem_host_register)(address, len, HOST_REGISTER_PORTABLE_DEVICEMAP) };
        if code == ALREADY_REGISTERED {
            // Registered by other code, which may undo it at any time, so it counts as not registered. The driver still
            // knows it, and plain copies are as fast.
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
        self.thread.as_ref().map_or(0, Background::bytes)
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.thread.as_ref().is_none_or(|thread| thread.wait(timeout))
    }

    fn failure(&self) -> Option<Error> {
        self.thread.as_ref().and_then(Background::failure)
    }
}

impl Drop for PoolThread {
    fn drop(&mut self) {
        // Waits for the thread: nothing is registered from here on.
        self.thread = None;
        self.registered.pools.remove(self.base, self.len);
        let entered = self.registered.context.enter();
        for base in self.registered.ours.lock().drain(..) {
            if entered.is_ok() {
                // SAFETY: registered by us; no copy uses it any more (`CopyEngine::register_pool`).
                let code =
                    unsafe { (self.registered.context.table().mem_host_unregister)(base as *mut c_void) };
                if let Err(error) = self.registered.context.check("cuMemHostUnregister", code) {
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

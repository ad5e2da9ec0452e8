//! The GPUDirect RDMA engine: a device's primary context, an adapter, a lane for each direction.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{Mr, Pd, Port, PortChoice, Verbs};
use parking_lot::Mutex;

use crate::CopyEngine;
use crate::background::{Background, Progress};
use crate::batch::{CopyBatch, Direction, GroupSink};
use crate::cuda::Driver;
use crate::cuda::context::{Context, DeviceBuffer};
use crate::gdr::choice;
use crate::gdr::config::GdrConfig;
use crate::gdr::lane::{Lane, LaneParts};
use crate::gdr::mutation::Mutation;
use crate::gdr::regions::{self, Regions};
use crate::paced::{self, Range};
use crate::pool::{DeviceMemory, KeptRegistration, PoolRegistration, Registration};

/// Size of the device memory that is registered to test whether the adapter can reach any. Drivers allocate such a size
/// in pages of its own.
const PROBE_BYTES: usize = 2 << 20;

/// Copies through an RDMA adapter.
pub struct GdrEngine {
    /// Lanes are dropped first: their queue pairs use regions.
    load: Lane,
    dump: Lane,
    regions: Arc<Regions>,
    nic: String,
    piece_bytes: usize,
    locked_bytes_max: Option<u64>,
    unusable: Unusable,
}

/// Why the adapter cannot serve any more, once that is known. It is still used: only its user knows another way.
pub(crate) type Unusable = Arc<OnceLock<Error>>;

/// Keeps a range of device memory registered. Drop it before the memory is freed, and when no copy of it is in flight.
#[derive(Debug)]
pub struct DeviceRegistration {
    regions: Arc<Regions>,
    mrs: Vec<Arc<Mr>>,
}

impl Drop for DeviceRegistration {
    fn drop(&mut self) {
        self.mrs.iter().for_each(|mr| self.regions.release(mr));
    }
}

impl KeptRegistration for DeviceRegistration {}

impl GdrEngine {
    /// Attaches to a device and its adapter. The error names whatever is missing: the adapter, its port, or peer
    /// memory.
    pub fn attach(driver: &'static Driver, verbs: &Verbs, config: &GdrConfig) -> Result<Self> {
        Self::attach_with(driver, verbs, config, Mutation::default())
    }

    pub(crate) fn attach_with(
        driver: &'static Driver,
        verbs: &Verbs,
        config: &GdrConfig,
        mutation: Mutation,
    ) -> Result<Self> {
        config.check()?;
        let device = config.device.find(driver)?;
        let candidates = choice::candidates(verbs, config, device.ordinal, &device.pci_bus_id)?;
        let (nic, verbs_context, port) = first_up(verbs, config, candidates)?;
        let connection = config.connection.within(&verbs_context.limits()?);
        let pd = Pd::new(&verbs_context)?;
        let context = Context::retain(driver, device)?;
        let regions = Regions::new(&pd, &context, config.page_bytes);
        probe(&regions)?;
        let unusable = Unusable::default();
        let parts = Arc::new(LaneParts {
            context,
            regions: Arc::clone(&regions),
            port,
            config: GdrConfig { connection, ..config.clone() },
            mutation,
            unusable: Unusable::clone(&unusable),
        });
        Ok(Self {
            load: Lane::start(Direction::ToDevice, &parts)?,
            dump: Lane::start(Direction::ToHost, &parts)?,
            regions,
            nic,
            piece_bytes: config.registration_piece_bytes,
            locked_bytes_max: config.locked_bytes_max,
            unusable,
        })
    }

    /// Returns why the adapter cannot serve any more, once that is known.
    pub(crate) fn unusable(&self) -> Option<&Error> {
        self.unusable.get()
    }

    /// Returns the adapter's name.
    pub fn nic(&self) -> &str {
        &self.nic
    }

    /// Fails at once if the process may not lock the pool. Other refusals show in the background.
    ///
    /// # Safety
    /// As for `CopyEngine::register_pool`.
    unsafe fn keep_pool(&self, base: *mut u8, len: usize, reserved: bool) -> Result<PoolRegistration> {
        kvdepot_verbs::check_locked(len, self.locked_bytes_max)?;
        let pool = Arc::new(Pool { regions: Arc::clone(&self.regions), pieces: Mutex::default() });
        let for_thread = Arc::clone(&pool);
        let range = Range { base: base.expose_provenance(), len, piece_bytes: self.piece_bytes, reserved };
        let unusable = Arc::clone(&self.unusable);
        let work = move |progress: &Progress| {
            // SAFETY: the caller's contract; the registration waits for the thread before it ends.
            unsafe { for_thread.register_all(range, progress) }.inspect_err(|error| {
                tracing::warn!("the RDMA adapter reaches only a part of the pool: {error}");
                let _ = unusable.set(error.clone());
            })
        };
        let thread = Background::start("kvdepot-gdr-pin", work)?;
        Ok(PoolRegistration::new(Box::new(PoolThread { pool, thread })))
    }

    /// # Safety
    /// As for `CopyEngine::register_device`.
    unsafe fn keep_device(&self, address: u64, len: usize) -> Result<DeviceRegistration> {
        let _entered = self.regions.context.enter()?;
        // SAFETY: the caller's contract.
        let mrs = unsafe { self.regions.keep(address, len) }?;
        Ok(DeviceRegistration { regions: Arc::clone(&self.regions), mrs })
    }
}

/// Returns the first of these adapters with a port that is up. The error is that of the first adapter.
fn first_up(
    verbs: &Verbs,
    config: &GdrConfig,
    candidates: Vec<String>,
) -> Result<(String, kvdepot_verbs::Context, Port)> {
    let mut first_error = None;
    for name in candidates {
        let (port, gid_index) = (config.port, config.gid_index);
        let choice = PortChoice { device: Some(name.clone()), port, gid_index, link: None };
        match choice.open(verbs) {
            Ok((context, port)) => return Ok((name, context, port)),
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    Err(first_error.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "there is no RDMA device")))
}

/// Checks whether the adapter can reach the device's memory at all.
fn probe(regions: &Regions) -> Result<()> {
    let buffer = DeviceBuffer::new(&regions.context, PROBE_BYTES)?;
    let _entered = regions.context.enter()?;
    // SAFETY: the region is dropped before the buffer.
    let region = unsafe { regions.register_device(buffer.address(), PROBE_BYTES) };
    region.map(drop)
}

impl CopyEngine for GdrEngine {
    fn name(&self) -> &'static str {
        "gdr"
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        batch.check()?;
        let lane = match batch.direction {
            Direction::ToHost => &self.dump,
            Direction::ToDevice => &self.load,
        };
        // SAFETY: the caller's contract.
        unsafe { lane.run(batch, sink) }
    }

    fn numa_node(&self) -> Option<u32> {
        self.regions.context.device().numa_node(Path::new("/sys"))
    }

    unsafe fn register_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.keep_pool(base, len, false) }
    }

    unsafe fn register_reserved_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.keep_pool(base, len, true) }
    }

    /// Memory without a registration is registered for the duration of each batch that uses it, which costs more than
    /// the copy.
    unsafe fn register_device(&self, address: u64, len: usize) -> Result<DeviceMemory> {
        // SAFETY: the caller's contract.
        Ok(DeviceMemory::new(Box::new(unsafe { self.keep_device(address, len) }?)))
    }
}

impl fmt::Debug for GdrEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GdrEngine({} by {})", self.regions.context.device().ordinal, self.nic)
    }
}

/// A pool and its registered pieces.
struct Pool {
    regions: Arc<Regions>,
    pieces: Mutex<Vec<Arc<Mr>>>,
}

impl Pool {
    /// # Safety
    /// As for `CopyEngine::register_pool`.
    unsafe fn register_all(&self, range: Range, progress: &Progress) -> Result<()> {
        let piece = |base: usize, len| {
            // SAFETY: the caller's contract.
            let mr = unsafe { self.regions.register_host(base as u64, len) }
                .map_err(|e| e.with("registered_bytes", progress.bytes()).with("pool_bytes", range.len))?;
            regions::add(&self.regions.host, &mr);
            self.pieces.lock().push(mr);
            Ok(())
        };
        // SAFETY: the caller's contract.
        unsafe { paced::register(range, progress, piece) }
    }
}

struct PoolThread {
    pool: Arc<Pool>,
    thread: Background,
}

impl Registration for PoolThread {
    fn registered_bytes(&self) -> u64 {
        self.thread.bytes()
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.thread.wait(timeout)
    }

    fn failure(&self) -> Option<Error> {
        self.thread.failure()
    }
}

impl Drop for PoolThread {
    fn drop(&mut self) {
        self.thread.stop();
        for mr in self.pool.pieces.lock().drain(..) {
            regions::remove(&self.pool.regions.host, &mr);
        }
    }
}

impl fmt::Debug for PoolThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolThread({} bytes)", self.registered_bytes())
    }
}

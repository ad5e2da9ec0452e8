//! The CUDA engine: a device's primary context, a lane for each direction, and a copy method.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::batch::{CopyBatch, Direction, GroupSink};
use crate::cuda::context::{Context, Priority, Stream};
use crate::cuda::device::{DeviceInfo, DeviceSelector};
use crate::cuda::driver::Driver;
use crate::cuda::events::EventPool;
use crate::cuda::kernel::{CopyKernel, TILE_BYTES};
use crate::cuda::lane::{Choose, Lane, LaneParts, PIECES_IN_FLIGHT};
use crate::cuda::mutation::Mutation;
use crate::cuda::pools::{PIECE_BYTES, PoolThread, Pools};
use crate::cuda::submit::{Method, Submitter};
use crate::limit::MEASURE_WAIT;
use crate::paced::Range;
use crate::pool::PoolRegistration;
use crate::{CopyEngine, cuda};

/// Largest number of blocks of 256 threads that the kernel takes from the device's multiprocessors: as much as the
/// fastest link between host and device can use.
pub const KERNEL_BLOCKS_DEFAULT: u32 = 64;
/// Dump bytes on the device at a time. An engine's own small copies (sampled tokens) may have to wait behind them, for
/// about a millisecond.
pub const DUMP_BYTES_IN_FLIGHT_DEFAULT: u64 = 32 << 20;
/// Load bytes on the device at a time. The inputs of an engine's step may have to wait behind them.
pub const LOAD_BYTES_IN_FLIGHT_DEFAULT: u64 = 32 << 20;

/// How an engine chooses the copy method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Always the same method.
    Fixed(Method),
    /// The method measured to be fastest for a group's sizes and count.
    Auto,
}

/// The configuration of an engine.
#[derive(Clone, Debug)]
pub struct CudaConfig {
    /// The device whose memory is copied.
    pub device: DeviceSelector,
    /// The choice of the method.
    pub mode: Mode,
    /// Methods that must not be used, even if they are fastest. Plain calls cannot be forbidden: they are the only way
    /// for memory that is not registered.
    pub forbidden: Vec<Method>,
    /// Largest number of blocks of 256 threads that the kernel runs on; fewer while the engine decodes.
    pub kernel_blocks_max: u32,
    /// Largest number of dump bytes on the device at a time.
    pub dump_bytes_in_flight_max: u64,
    /// Largest number of load bytes on the device at a time.
    pub load_bytes_in_flight_max: u64,
    /// Directory of measurements, kept between processes; `None` keeps them only in this process.
    pub cache_dir: Option<PathBuf>,
    /// The longest time for the measurement at attach. After that a rule of thumb decides.
    pub measure_wait: Duration,
    /// Size of one registration, in whole pages.
    pub registration_piece_bytes: usize,
}

impl CudaConfig {
    /// The default configuration for a device.
    pub fn new(device: DeviceSelector, mode: Mode) -> Self {
        Self {
            device,
            mode,
            forbidden: Vec::new(),
            kernel_blocks_max: KERNEL_BLOCKS_DEFAULT,
            dump_bytes_in_flight_max: DUMP_BYTES_IN_FLIGHT_DEFAULT,
            load_bytes_in_flight_max: LOAD_BYTES_IN_FLIGHT_DEFAULT,
            cache_dir: None,
            measure_wait: MEASURE_WAIT,
            registration_piece_bytes: PIECE_BYTES,
        }
    }

    fn check(&self) -> Result<()> {
        let too_small = |what: &'static str, least: u64| {
            Err(Error::new(ErrorKind::Config, "a limit of the copy engine is too small").with(what, least))
        };
        if self.forbidden.contains(&Method::Memcpy) {
            return Err(Error::new(
                ErrorKind::Config,
                "the copy engine memcpy cannot be forbidden: memory that is not registered goes no other way",
            ));
        }
        if let Mode::Fixed(method) = self.mode
            && self.forbidden.contains(&method)
        {
            return Err(Error::new(
                ErrorKind::Config,
                "this copy engine is both requested and forbidden: write auto, or allow it",
            )
            .with("copy_engine", method.as_str()));
        }
        if self.kernel_blocks_max == 0 {
            return too_small("kernel_blocks_min", 1);
        }
        let least = (PIECES_IN_FLIGHT * TILE_BYTES) as u64;
        if self.dump_bytes_in_flight_max < least {
            return too_small("dump_bytes_in_flight_min", least);
        }
        if self.load_bytes_in_flight_max < least {
            return too_small("load_bytes_in_flight_min", least);
        }
        if self.registration_piece_bytes == 0 {
            return too_small("registration_piece_bytes_min", 4096);
        }
        Ok(())
    }
}

/// Copies between a device's memory and host memory.
pub struct CudaEngine {
    // Declared in drop order: lanes end before the things that they use.
    load: Lane,
    dump: Lane,
    pools: Arc<Pools>,
    context: Arc<Context>,
    mode: Mode,
    calibration: Option<Arc<cuda::calibration::Calibration>>,
    registration_piece_bytes: usize,
}

impl CudaEngine {
    /// Attaches to a device. Its primary context is retained until the engine is dropped.
    pub fn attach(driver: &'static Driver, config: &CudaConfig) -> Result<Self> {
        Self::attach_with(driver, config, Mutation::default())
    }

    pub(crate) fn attach_with(
        driver: &'static Driver,
        config: &CudaConfig,
        mutation: Mutation,
    ) -> Result<Self> {
        config.check()?;
        let context = Context::retain(driver, config.device.find(driver)?)?;
        let kernel = match config.mode {
            Mode::Fixed(Method::Kernel) => Some(CopyKernel::load(&context, config.kernel_blocks_max)?),
            Mode::Fixed(Method::Batch) if !driver.has_batch() => {
                let text = "this CUDA driver copies no batches: update it to one for CUDA 12.8 or later";
                return Err(Error::new(ErrorKind::Unsupported, text).with("version", driver.version_text()));
            }
            Mode::Fixed(_) => None,
            Mode::Auto if config.forbidden.contains(&Method::Kernel) => None,
            // An old device still has the other methods.
            Mode::Auto => CopyKernel::load(&context, config.kernel_blocks_max)
                .inspect_err(|error| tracing::info!("the copy kernel is off: {error}"))
                .ok(),
        };
        let submitter = Arc::new(Submitter { context: Arc::clone(&context), kernel, mutation });
        let (choose, calibration): (Choose, _) = match config.mode {
            Mode::Fixed(method) => (Arc::new(move |_, _: &[_], _| method), None),
            Mode::Auto => {
                let (forbidden, cache_dir) = (&config.forbidden, config.cache_dir.as_deref());
                let calibration =
                    cuda::calibration::of(&submitter, forbidden, cache_dir, config.measure_wait)?;
                let chosen = Arc::clone(&calibration);
                let choose: Choose = Arc::new(move |direction, ranges: &[_], decoding| {
                    chosen.choose_for(direction, ranges, decoding)
                });
                (choose, Some(calibration))
            }
        };
        let events = EventPool::new(&context);
        let parts =
            Arc::new(LaneParts { context: Arc::clone(&context), submitter, events, choose, mutation });
        let copies_only = matches!(config.mode, Mode::Fixed(Method::Memcpy | Method::Batch));
        // Kernels for loads must not delay the engine's own kernels; copies delay none.
        let load_priority = if copies_only { Priority::Greatest } else { Priority::Least };
        let stream = Stream::new(&context, load_priority)?;
        let budget = config.load_bytes_in_flight_max;
        let load = Lane::start(Direction::ToDevice, Arc::clone(&parts), stream, budget)?;
        let stream = Stream::new(&context, Priority::Least)?;
        let dump = Lane::start(Direction::ToHost, parts, stream, config.dump_bytes_in_flight_max)?;
        Ok(Self {
            load,
            dump,
            pools: Arc::default(),
            context,
            mode: config.mode,
            calibration,
            registration_piece_bytes: config.registration_piece_bytes,
        })
    }

    /// # Safety
    /// As for `CopyEngine::register_pool`.
    unsafe fn register(&self, base: *mut u8, len: usize, reserved: bool) -> Result<PoolRegistration> {
        let base = base.expose_provenance();
        let range = Range { base, len, piece_bytes: self.registration_piece_bytes, reserved };
        // SAFETY: the caller's contract.
        let thread = unsafe { PoolThread::start(&self.context, &self.pools, range) }?;
        Ok(PoolRegistration::new(Box::new(thread)))
    }

    /// Returns the device.
    pub fn device(&self) -> &DeviceInfo {
        self.context.device()
    }

    /// Returns the measurements, for engines in mode `Auto`.
    pub fn calibration(&self) -> Option<&cuda::calibration::Calibration> {
        self.calibration.as_deref()
    }

    /// Returns the largest number of load bytes that were on the device at a time.
    pub fn load_bytes_in_flight_most(&self) -> u64 {
        self.load.bytes_in_flight_most()
    }

    /// Returns the largest number of dump bytes that were on the device at a time.
    pub fn dump_bytes_in_flight_most(&self) -> u64 {
        self.dump.bytes_in_flight_most()
    }
}

impl CopyEngine for CudaEngine {
    fn name(&self) -> &'static str {
        match self.mode {
            Mode::Fixed(method) => method.as_str(),
            Mode::Auto => "auto",
        }
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        batch.check()?;
        let lane = match batch.direction {
            Direction::ToHost => &self.dump,
            Direction::ToDevice => &self.load,
        };
        // SAFETY: the caller's contract.
        unsafe { lane.run(&batch, sink, &self.pools.snapshot()) }
    }

    fn numa_node(&self) -> Option<u32> {
        self.device().numa_node(Path::new("/sys"))
    }

    unsafe fn register_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.register(base, len, false) }
    }

    unsafe fn register_reserved_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.register(base, len, true) }
    }
}

impl fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEngine({}, device {})", self.name(), self.context.device().ordinal)
    }
}

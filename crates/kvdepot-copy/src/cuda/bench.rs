//! Measures the speed of each engine on this machine, and how much it slows down a decoding kernel.
//!
//! All copies go through [`CudaEngine`] as the depot's client uses it: pages in different orders on the device and in
//! the pool, with groups, budget and reports.

use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::Verbs;
use serde::Serialize;

use crate::batch::{CopyBatch, CopyOp, Direction, GroupSink};
use crate::bounded::late;
use crate::conformance::Collect;
use crate::cuda::context::{Context, DeviceBuffer, Priority, Stream};
use crate::cuda::device::{DeviceInfo, DeviceSelector};
use crate::cuda::driver::Driver;
use crate::cuda::engine::{CudaConfig, CudaEngine, Mode};
use crate::cuda::kernel::Module;
use crate::cuda::submit::Method;
use crate::cuda::types::Handle;
use crate::gdr::{self, GdrConfig, GdrEngine};
use crate::pages::{PAGE, Pages};
use crate::{Bounded, CopyEngine, DeviceMemory, PoolRegistration};

/// Number of groups in a transfer, like the layers of a block.
const GROUPS: usize = 8;
/// Number of threads in a block of the decoding kernel.
const BURN_THREADS: u32 = 512;
/// Number of blocks of the decoding kernel for each multiprocessor.
const BURN_BLOCKS: u32 = 4;
/// Prefix of the names of the test driver's devices.
const STANDIN_NAME: &str = "stand-in";

/// The configuration of a benchmark.
#[derive(Clone, Debug)]
pub struct BenchConfig {
    /// Engines, limits and device.
    pub engine: CudaConfig,
    /// Sizes of a single copy in bytes.
    pub op_bytes: Vec<usize>,
    /// Bytes of one transfer. Each direction has this much memory on either side.
    pub transfer_bytes: usize,
    /// Number of transfers, of which the median counts.
    pub runs: usize,
    /// Bytes of device memory that the decoding kernel reads and writes.
    pub decode_bytes: usize,
    /// Approximate run time of the decoding kernel alone.
    pub decode_time: Duration,
    /// The longest time for registration.
    pub registration_timeout: Duration,
    /// The longest time for one transfer (P2).
    pub transfer_timeout: Duration,
    /// The RDMA library for `gdr`; `None` for the machine's.
    pub verbs_library: Option<PathBuf>,
    /// The configuration of `gdr`.
    pub gdr: GdrConfig,
}

impl BenchConfig {
    /// The sizes of real models, on one device. Takes about half a minute.
    pub fn new(device: DeviceSelector) -> Self {
        Self {
            gdr: GdrConfig::new(device.clone()),
            verbs_library: None,
            engine: CudaConfig::new(device, Mode::Auto),
            op_bytes: vec![4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20],
            transfer_bytes: 256 << 20,
            runs: 5,
            decode_bytes: 1 << 30,
            decode_time: Duration::from_millis(20),
            registration_timeout: Duration::from_secs(60),
            transfer_timeout: Duration::from_secs(60),
        }
    }

    /// Small sizes and one run, to check that everything works. The measured rates mean nothing.
    #[must_use]
    pub fn smoke(self) -> Self {
        Self {
            op_bytes: vec![4 << 10, 64 << 10],
            transfer_bytes: 256 << 10,
            runs: 1,
            decode_bytes: 1 << 20,
            decode_time: Duration::from_millis(1),
            ..self
        }
    }

    fn check(&self) -> Result<()> {
        let whole = |&bytes: &usize| bytes > 0 && self.transfer_bytes.is_multiple_of(bytes);
        if self.runs > 0 && self.transfer_bytes.is_multiple_of(PAGE) && self.op_bytes.iter().all(whole) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Config,
            "transfers must consist of whole pages and whole copies, and be run",
        )
        .with("transfer_bytes", self.transfer_bytes)
        .with("op_bytes", format!("{:?}", self.op_bytes))
        .with("runs", self.runs))
    }
}

/// The result of one engine for one size of copies. Rates are in 10^9 bytes per second.
#[derive(Clone, Debug, Serialize)]
pub struct BenchRow {
    /// `memcpy`, `batch`, `kernel`, `auto`, `gdr`.
    pub engine: String,
    /// Bytes of one copy.
    pub op_bytes: usize,
    /// Loads alone.
    pub load_gb_per_s: f64,
    /// Dumps alone.
    pub dump_gb_per_s: f64,
    /// Both directions at the same time, added up.
    pub both_gb_per_s: f64,
    /// By which share the decoding kernel takes longer during loads: 0.1 is a tenth.
    pub decode_slowdown_by_load: f64,
    /// The same during dumps.
    pub decode_slowdown_by_dump: f64,
}

/// The result of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct BenchResult {
    /// The newest CUDA version that the driver supports.
    pub driver: String,
    /// The device.
    pub device: DeviceInfo,
    /// A remark about the figures.
    pub note: Option<String>,
    /// Bytes of one transfer.
    pub transfer_bytes: usize,
    /// Time to register the memory of both directions, which is about the same for every engine.
    pub registration_ms: f64,
    /// Time of the decoding kernel alone.
    pub decode_ms: f64,
    /// One row for each engine and size.
    pub rows: Vec<BenchRow>,
    /// Engines that are not available on this machine.
    pub missing: Vec<MissingEngine>,
}

/// An engine that could not be measured.
#[derive(Clone, Debug, Serialize)]
pub struct MissingEngine {
    /// Its name.
    pub engine: String,
    /// The reason, as the start of the engine would report it.
    pub reason: String,
}

/// Measures every available engine. Calls `row` with each row as soon as it is measured.
pub fn run(
    driver: &'static Driver,
    config: &BenchConfig,
    mut row: impl FnMut(&BenchRow),
) -> Result<BenchResult> {
    config.check()?;
    let device = config.engine.device.find(driver)?;
    let context = Context::retain(driver, device.clone())?;
    let decode = Decode::new(&context, config)?;
    let standin = device.name.starts_with(STANDIN_NAME);
    let note =
        standin.then(|| "measured on a stand-in driver: the figures say nothing about any device".into());
    let mut result = BenchResult {
        driver: driver.version_text(),
        device,
        note,
        transfer_bytes: config.transfer_bytes,
        registration_ms: 0.0,
        decode_ms: decode.alone.as_secs_f64() * 1e3,
        rows: Vec::new(),
        missing: Vec::new(),
    };
    for mode in modes(driver, &context) {
        let engine = CudaEngine::attach(driver, &CudaConfig { mode, ..config.engine.clone() })?;
        let engine = Bounded::new(Arc::new(engine))?;
        result.registration_ms = measure_all(&engine, &context, &decode, config, &mut result.rows, &mut row)?;
    }
    // A problem with an adapter does not affect the other rows.
    let by_adapter = gdr(driver, config)
        .and_then(|engine| Bounded::new(Arc::new(engine)))
        .and_then(|engine| measure_all(&engine, &context, &decode, config, &mut result.rows, &mut row));
    if let Err(error) = by_adapter {
        result.missing.push(MissingEngine { engine: "gdr".into(), reason: error.to_string() });
    }
    Ok(result)
}

/// Starts the engine `gdr`, or returns the error that a store requesting it would get.
fn gdr(driver: &'static Driver, config: &BenchConfig) -> Result<GdrEngine> {
    let verbs = config.verbs_library.as_deref().map_or_else(Verbs::load, Verbs::load_from);
    verbs.and_then(|verbs| GdrEngine::attach(driver, &verbs, &config.gdr)).map_err(gdr::asked_for)
}

/// Measures one engine with each size. Returns the time that registering the memory of both directions took, in
/// milliseconds.
fn measure_all(
    engine: &dyn CopyEngine,
    context: &Arc<Context>,
    decode: &Decode,
    config: &BenchConfig,
    rows: &mut Vec<BenchRow>,
    row: &mut impl FnMut(&BenchRow),
) -> Result<f64> {
    let begun = Instant::now();
    let sides = [Side::new(context, engine, config)?, Side::new(context, engine, config)?];
    let registration_ms = begun.elapsed().as_secs_f64() * 1e3;
    for &op_bytes in &config.op_bytes {
        let measured = measure(engine, &sides, decode, op_bytes, config.runs)?;
        row(&measured);
        rows.push(measured);
    }
    Ok(registration_ms)
}

fn modes(driver: &Driver, context: &Arc<Context>) -> Vec<Mode> {
    let mut modes = vec![Mode::Fixed(Method::Memcpy)];
    modes.extend(driver.has_batch().then_some(Mode::Fixed(Method::Batch)));
    modes.extend(Module::load(context).is_ok().then_some(Mode::Fixed(Method::Kernel)));
    modes.push(Mode::Auto);
    modes
}

/// The memory of one direction. Every transfer holds it too, so memory that a hung device may still touch is not freed.
struct Side {
    memory: Arc<SideMemory>,
    timeout: Duration,
}

/// Dropped in this order: unregistered before it is freed.
struct SideMemory {
    _registration: PoolRegistration,
    _device_registration: DeviceMemory,
    host: Pages,
    device: DeviceBuffer,
}

/// Keeps the memory of a transfer alive.
struct Transfer {
    collect: Arc<Collect>,
    _memory: Arc<SideMemory>,
}

impl GroupSink for Transfer {
    fn group_ended(&self, group: usize, outcome: Result<()>) {
        self.collect.group_ended(group, outcome);
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transfer")
    }
}

impl Side {
    fn new(context: &Arc<Context>, engine: &dyn CopyEngine, config: &BenchConfig) -> Result<Self> {
        let host = Pages::new(&vec![1; config.transfer_bytes]);
        // SAFETY: `host` is dropped after the registration, and every transfer is waited for.
        let registration = unsafe { engine.register_pool(host.address(), host.len()) }?;
        if !registration.wait(config.registration_timeout) {
            return Err(Error::new(ErrorKind::Timeout, "the host memory was not registered in time")
                .with("bytes", host.len()));
        }
        if let Some(failure) = registration.failure() {
            return Err(failure);
        }
        let device = DeviceBuffer::new(context, config.transfer_bytes)?;
        // SAFETY: the buffer is dropped after the registration, which is dropped after the last transfer.
        let of_device = unsafe { engine.register_device(device.address(), config.transfer_bytes) }?;
        let memory =
            SideMemory { _registration: registration, _device_registration: of_device, host, device };
        Ok(Self { memory: Arc::new(memory), timeout: config.transfer_timeout })
    }

    /// Makes a transfer of all memory. Copies adjacent on the device are not adjacent on the host.
    fn batch(&self, direction: Direction, op_bytes: usize) -> CopyBatch {
        let memory = &self.memory;
        let ops = memory.host.len() / op_bytes;
        let mut batch = CopyBatch::new(direction);
        batch.deadline = Some(Instant::now() + self.timeout);
        for index in 0..ops {
            let device = memory.device.address() + (index * op_bytes) as u64;
            let host = memory.host.address().wrapping_add((ops - 1 - index) * op_bytes);
            batch.ops.push(CopyOp { device, host, len: op_bytes });
            if (index + 1) % ops.div_ceil(GROUPS) == 0 {
                batch.end_group();
            }
        }
        if batch.ends.last() != Some(&ops) {
            batch.end_group();
        }
        batch
    }

    /// Returns the time of a transfer, from the call to the last report.
    fn transfer(&self, engine: &dyn CopyEngine, direction: Direction, op_bytes: usize) -> Result<Duration> {
        let batch = self.batch(direction, op_bytes);
        let collect = Collect::new(batch.ends.len());
        let sink = Transfer { collect: Arc::clone(&collect), _memory: Arc::clone(&self.memory) };
        let begun = Instant::now();
        // SAFETY: the sink keeps the memory, which nothing else uses.
        unsafe { engine.run(batch, Arc::new(sink)) }?;
        let outcomes = collect.wait_for(self.timeout).ok_or_else(late)?;
        outcomes.into_iter().collect::<Result<()>>()?;
        Ok(begun.elapsed())
    }
}

fn measure(
    engine: &dyn CopyEngine,
    sides: &[Side; 2],
    decode: &Decode,
    op_bytes: usize,
    runs: usize,
) -> Result<BenchRow> {
    let bytes = sides[0].memory.host.len() as f64;
    let [load, dump] = [(&sides[0], Direction::ToDevice), (&sides[1], Direction::ToHost)];
    let one = |(side, direction): (&Side, Direction)| side.transfer(engine, direction, op_bytes);
    let both = || {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| one(dump));
            let here = one(load);
            let there =
                other.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "a transfer panicked")));
            here.and(there)
        })?;
        Ok(begun.elapsed())
    };
    let rate = |bytes: f64, took: Duration| bytes / took.as_secs_f64().max(1e-9) / 1e9;
    one(load)?;
    one(dump)?;
    Ok(BenchRow {
        engine: engine.name().into(),
        op_bytes,
        load_gb_per_s: rate(bytes, median(runs, || one(load))?),
        dump_gb_per_s: rate(bytes, median(runs, || one(dump))?),
        both_gb_per_s: rate(2.0 * bytes, median(runs, both)?),
        decode_slowdown_by_load: decode.slowdown(runs, || one(load))?,
        decode_slowdown_by_dump: decode.slowdown(runs, || one(dump))?,
    })
}

fn median(runs: usize, mut run: impl FnMut() -> Result<Duration>) -> Result<Duration> {
    let mut took = (0..runs).map(|_| run()).collect::<Result<Vec<_>>>()?;
    took.sort_unstable();
    Ok(took[took.len() / 2])
}

/// A kernel bound by device memory, like decoding.
struct Decode {
    context: Arc<Context>,
    _module: Module,
    function: Handle,
    stream: Stream,
    memory: DeviceBuffer,
    words: u64,
    rounds: u32,
    alone: Duration,
}

impl Decode {
    fn new(context: &Arc<Context>, config: &BenchConfig) -> Result<Self> {
        let module = Module::load(context)?;
        let mut this = Self {
            context: Arc::clone(context),
            function: module.function(c"kvdepot_burn")?,
            _module: module,
            stream: Stream::new(context, Priority::Least)?,
            memory: DeviceBuffer::new(context, config.decode_bytes.max(PAGE))?,
            words: (config.decode_bytes.max(PAGE) / 4) as u64,
            rounds: 1,
            alone: Duration::ZERO,
        };
        this.step()?;
        let once = this.step()?.max(Duration::from_micros(1));
        let rounds = (config.decode_time.as_secs_f64() / once.as_secs_f64()).clamp(1.0, 10_000.0);
        this.rounds = rounds as u32;
        this.alone = median(config.runs, || this.step())?;
        Ok(this)
    }

    /// Runs the kernel once to completion.
    fn step(&self) -> Result<Duration> {
        let _entered = self.context.enter()?;
        let (mut words, mut count, mut rounds) = (self.memory.address(), self.words, self.rounds);
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut words).cast(), (&raw mut count).cast(), (&raw mut rounds).cast()];
        let blocks = (self.context.device().multiprocessors * BURN_BLOCKS).max(1);
        let (stream, extra) = (self.stream.handle(), std::ptr::null_mut());
        let (function, arguments) = (self.function, arguments.as_mut_ptr());
        let launch = self.context.table().launch_kernel;
        let begun = Instant::now();
        // SAFETY: the kernel's own arguments, over its own memory, which lives until the stream was waited for.
        let code = unsafe { launch(function, blocks, 1, 1, BURN_THREADS, 1, 1, 0, stream, arguments, extra) };
        self.context.check("cuLaunchKernel", code)?;
        self.stream.synchronize()?;
        Ok(begun.elapsed())
    }

    /// Returns by which share the kernel takes longer while transfers run continuously.
    fn slowdown(&self, runs: usize, transfer: impl Fn() -> Result<Duration> + Sync) -> Result<f64> {
        let (running, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        let beside = std::thread::scope(|scope| {
            let copying = scope.spawn(|| -> Result<()> {
                loop {
                    running.store(true, Ordering::Release);
                    transfer()?;
                    if stop.load(Ordering::Acquire) {
                        return Ok(());
                    }
                }
            });
            while !running.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let beside = median(runs, || self.step());
            stop.store(true, Ordering::Release);
            let copied =
                copying.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "a transfer panicked")));
            copied.and(beside)
        })?;
        Ok(beside.as_secs_f64() / self.alone.as_secs_f64().max(1e-9) - 1.0)
    }
}

/// Formats the result as a table.
impl fmt::Display for BenchResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, CUDA driver {}, {} MiB a transfer",
            self.device.name,
            self.driver,
            self.transfer_bytes >> 20
        )?;
        if let Some(note) = &self.note {
            writeln!(f, "{note}")?;
        }
        writeln!(f, "decoding kernel alone: {:.3} ms", self.decode_ms)?;
        writeln!(f, "engine   KiB/copy   load GB/s   dump GB/s   both GB/s   decode beside load, dump")?;
        for row in &self.rows {
            writeln!(
                f,
                "{:<8} {:>8} {:>11.2} {:>11.2} {:>11.2} {:>+13.1} % {:>+8.1} %",
                row.engine,
                row.op_bytes >> 10,
                row.load_gb_per_s,
                row.dump_gb_per_s,
                row.both_gb_per_s,
                row.decode_slowdown_by_load * 100.0,
                row.decode_slowdown_by_dump * 100.0
            )?;
        }
        for MissingEngine { engine, reason } in &self.missing {
            writeln!(f, "{engine:<8} not measured: {reason}")?;
        }
        Ok(())
    }
}

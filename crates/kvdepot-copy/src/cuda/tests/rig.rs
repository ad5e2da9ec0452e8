//! A driver and a device, with the compute work of an engine on it.

use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use kvdepot_standin_cuda::{Control, library_path};
use parking_lot::Mutex;

use crate::conformance::{DeviceMemory, StreamDevice};
use crate::cuda::context::{Context, DeviceBuffer, Pinned, Priority, Stream};
use crate::cuda::engine::{CudaConfig, CudaEngine, Mode};
use crate::cuda::events::{Event, EventPool};
use crate::cuda::kernel::Module;
use crate::cuda::mutation::Mutation;
use crate::cuda::types::Handle;
use crate::cuda::{DeviceSelector, Driver};

static CONTROL: LazyLock<Control> = LazyLock::new(|| Control::load(&library_path()).unwrap());
static NEXT_DEVICE: AtomicU32 = AtomicU32::new(0);
static LOADING: Mutex<()> = Mutex::new(());

/// Number of words and rounds of the delaying kernel on a real device: about a millisecond.
const DELAY_WORDS: u64 = 16 << 20;
const DELAY_ROUNDS: u32 = 16;

/// A driver and a device for one test alone.
pub(crate) struct Rig {
    pub(crate) driver: &'static Driver,
    pub(crate) device: u32,
    pub(crate) control: Option<&'static Control>,
}

impl Rig {
    /// Loads the stand-in with some driver version.
    pub(crate) fn standin(version: i32) -> Self {
        let _one = LOADING.lock();
        CONTROL.set_driver_version(version);
        let driver = Driver::load_from(&library_path()).unwrap();
        let device = NEXT_DEVICE.fetch_add(1, Ordering::Relaxed);
        assert!((device as usize) < kvdepot_standin_cuda::DEVICE_COUNT, "more rigs than devices");
        Self { driver, device, control: Some(&CONTROL) }
    }

    /// Loads the machine's own driver, if this run should use it.
    pub(crate) fn real() -> Option<Self> {
        if std::env::var("KVDEPOT_TEST_GPU").as_deref() != Ok("1") {
            eprintln!("SKIPPED: this test needs a CUDA device: set KVDEPOT_TEST_GPU=1 on a machine with one");
            return None;
        }
        let driver = Driver::load_from(Path::new("libcuda.so.1")).unwrap();
        Some(Self { driver, device: 0, control: None })
    }

    /// Starts a session whose schedule follows this seed.
    pub(crate) fn session(&self, seed: u64) -> Session {
        if let Some(control) = self.control {
            control.reset(self.device, seed);
        }
        let info = DeviceSelector::Ordinal(self.device).find(self.driver).unwrap();
        let context = Context::retain(self.driver, info).unwrap();
        let module = Module::load(&context).unwrap();
        let delay =
            self.control.is_none().then(|| DeviceBuffer::new(&context, DELAY_WORDS as usize * 4).unwrap());
        Session {
            driver: self.driver,
            device: self.device,
            control: self.control,
            burn: module.function(c"kvdepot_burn").unwrap(),
            delay,
            events: EventPool::new(&context),
            state: Mutex::default(),
            _module: module,
            context,
        }
    }
}

/// One use of a device, from reset to the final checks.
pub(crate) struct Session {
    pub(crate) driver: &'static Driver,
    pub(crate) device: u32,
    pub(crate) control: Option<&'static Control>,
    burn: Handle,
    delay: Option<DeviceBuffer>,
    events: Arc<EventPool>,
    state: Mutex<State>,
    _module: Module,
    pub(crate) context: Arc<Context>,
}

#[derive(Default)]
struct State {
    streams: Vec<Stream>,
    held: Vec<Arc<Event>>,
    staged: Vec<Pinned>,
    readings: Vec<(u64, Pinned, usize)>,
    planned: Option<(String, u64, u64, i32)>,
}

impl Session {
    pub(crate) fn config(&self, mode: Mode) -> CudaConfig {
        CudaConfig {
            // Small, so that little memory is enough for several pieces of dumps and registrations.
            dump_bytes_in_flight_max: 128 << 10,
            load_bytes_in_flight_max: 128 << 10,
            registration_piece_bytes: 16 << 10,
            ..CudaConfig::new(DeviceSelector::Ordinal(self.device), mode)
        }
    }

    pub(crate) fn engine(&self, mode: Mode, mutation: Mutation) -> CudaEngine {
        CudaEngine::attach_with(self.driver, &self.config(mode), mutation).unwrap()
    }

    /// Makes a call of the stand-in fail; see `Control::fail`.
    pub(crate) fn fail(&self, call: &str, after: u64, times: u64, code: i32) {
        self.control.expect("failures are planned on the stand-in").fail(
            self.device,
            call,
            after,
            times,
            code,
        );
    }

    /// Plans a failure for the time when everything is prepared; see `fail_planned`.
    pub(crate) fn plan_failure(&self, call: &str, after: u64, times: u64, code: i32) {
        self.state.lock().planned = Some((call.into(), after, times, code));
    }

    pub(crate) fn fail_planned(&self) {
        let planned = self.state.lock().planned.take();
        if let Some((call, after, times, code)) = planned {
            self.fail(&call, after, times, code);
        }
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.control.map(|control| control.violations(self.device)).unwrap_or_default()
    }

    /// Ends the session and checks that everything was released and nothing was misused.
    pub(crate) fn end(self) -> Result<(), String> {
        self.settle();
        let (control, device) = (self.control, self.device);
        drop(self);
        let Some(control) = control else { return Ok(()) };
        let (violations, left) = (control.violations(device), control.left(device));
        if !violations.is_empty() {
            return Err(format!("the driver was used wrongly: {}", violations.join("; ")));
        }
        if left != kvdepot_standin_cuda::Left::default() {
            return Err(format!("left behind: {left:?}"));
        }
        Ok(())
    }

    /// Writes device memory that no `Memory` owns.
    pub(crate) fn write_at(&self, address: u64, bytes: &[u8]) {
        let (stream, pinned) = (self.stream(), Pinned::new(&self.context, bytes.len()).unwrap());
        let _entered = self.context.enter().unwrap();
        // SAFETY: both sides have the length, and the stream is waited for.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned.address(), bytes.len());
            let from = pinned.address().cast::<c_void>().cast_const();
            let code = (self.context.table().memcpy_to_device)(address, from, bytes.len(), stream as Handle);
            assert_eq!(code, 0, "writing device memory");
        }
        self.wait(stream);
    }

    /// Frees device memory that no `Memory` owns.
    pub(crate) fn free(&self, address: u64) {
        let _entered = self.context.enter().unwrap();
        // SAFETY: owned by the caller, and no work that uses it is left.
        assert_eq!(unsafe { (self.context.table().mem_free)(address) }, 0, "freeing device memory");
    }

    /// Keeps a real device busy for a moment; the stand-in is late in any case.
    fn delay(&self, stream: u64) {
        let Some(buffer) = &self.delay else { return };
        let (mut words, mut count, mut rounds) = (buffer.address(), DELAY_WORDS, DELAY_ROUNDS);
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut words).cast(), (&raw mut count).cast(), (&raw mut rounds).cast()];
        let table = self.context.table();
        let extra = std::ptr::null_mut();
        // SAFETY: the kernel's own arguments, over its own memory.
        let code = unsafe {
            (table.launch_kernel)(
                self.burn,
                64,
                1,
                1,
                512,
                1,
                1,
                0,
                stream as Handle,
                arguments.as_mut_ptr(),
                extra,
            )
        };
        assert_eq!(code, 0, "the delaying kernel");
    }

    fn wait(&self, stream: u64) {
        // SAFETY: the driver checks the stream. A lost context shows in the comparison, so the result is not needed.
        let _ = unsafe { (self.context.table().stream_synchronize)(stream as Handle) };
    }
}

impl StreamDevice for Session {
    type Memory = Memory;

    fn memory(&self, len: usize) -> Memory {
        Memory {
            buffer: DeviceBuffer::new(&self.context, len).unwrap(),
            context: Arc::clone(&self.context),
            len,
        }
    }

    fn stream(&self) -> u64 {
        let stream = Stream::new(&self.context, Priority::Least).unwrap();
        let handle = stream.handle() as u64;
        self.state.lock().streams.push(stream);
        handle
    }

    fn write_on(&self, stream: u64, memory: &Memory, bytes: &[u8]) {
        let Ok(staged) = Pinned::new(&self.context, bytes.len()) else { return };
        let _entered = self.context.enter().unwrap();
        self.delay(stream);
        // SAFETY: both sides have the length, and live until the session ends.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), staged.address(), bytes.len());
            let from = staged.address().cast::<c_void>().cast_const();
            let to = memory.buffer.address();
            let _ = (self.context.table().memcpy_to_device)(to, from, bytes.len(), stream as Handle);
        }
        self.state.lock().staged.push(staged);
    }

    fn read_on(&self, stream: u64, memory: &Memory, offset: usize, len: usize) {
        let Ok(pinned) = Pinned::new(&self.context, len) else { return };
        let _entered = self.context.enter().unwrap();
        self.delay(stream);
        // SAFETY: both sides have the length, and live until the session ends.
        unsafe {
            let (to, from) = (pinned.address().cast(), memory.buffer.address() + offset as u64);
            let _ = (self.context.table().memcpy_to_host)(to, from, len, stream as Handle);
        }
        self.state.lock().readings.push((stream, pinned, len));
    }

    fn readings(&self, stream: u64) -> Vec<Vec<u8>> {
        let _entered = self.context.enter().unwrap();
        self.wait(stream);
        let state = self.state.lock();
        let of_stream = state.readings.iter().filter(|(on, ..)| *on == stream);
        // SAFETY: the stream has completed the reads, so nothing writes the memory.
        of_stream.map(|(_, pinned, len)| unsafe { bytes_of(pinned, *len) }).collect()
    }

    fn record(&self, stream: u64) -> u64 {
        let _entered = self.context.enter().unwrap();
        let event = self.events.take().unwrap();
        let handle = event.handle();
        // SAFETY: both live.
        let code = unsafe { (self.context.table().event_record)(handle as Handle, stream as Handle) };
        assert_eq!(code, 0, "recording an event");
        self.state.lock().held.push(event);
        handle
    }

    fn settle(&self) {
        let _entered = self.context.enter().unwrap();
        let library = if self.control.is_some() { library_path() } else { "libcuda.so.1".into() };
        // SAFETY: the type is the one of cuda.h; the library is loaded already.
        unsafe {
            let library = libloading::Library::new(library).unwrap();
            let synchronize = library.get::<unsafe extern "C" fn() -> i32>(b"cuCtxSynchronize\0").unwrap();
            let _ = synchronize();
        }
    }
}

/// # Safety
/// `len` is at most the memory's length, and nothing writes it.
unsafe fn bytes_of(pinned: &Pinned, len: usize) -> Vec<u8> {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(pinned.address(), len) }.to_vec()
}

/// Device memory, read and written through separate streams.
pub(crate) struct Memory {
    buffer: DeviceBuffer,
    context: Arc<Context>,
    len: usize,
}

impl DeviceMemory for Memory {
    fn address(&self) -> u64 {
        self.buffer.address()
    }

    fn read(&self) -> Vec<u8> {
        let stream = Stream::new(&self.context, Priority::Least);
        let (Ok(stream), Ok(pinned)) = (stream, Pinned::new(&self.context, self.len)) else {
            return vec![0; self.len];
        };
        let _entered = self.context.enter().unwrap();
        // SAFETY: both sides have the length, and the stream is waited for.
        unsafe {
            let to = pinned.address().cast();
            let _ = (self.context.table().memcpy_to_host)(to, self.address(), self.len, stream.handle());
            let _ = stream.synchronize();
            bytes_of(&pinned, self.len)
        }
    }

    fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        let stream = Stream::new(&self.context, Priority::Least);
        let (Ok(stream), Ok(pinned)) = (stream, Pinned::new(&self.context, self.len)) else { return };
        let _entered = self.context.enter().unwrap();
        // SAFETY: both sides have the length, and the stream is waited for.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned.address(), self.len);
            let from = pinned.address().cast::<c_void>().cast_const();
            let _ = (self.context.table().memcpy_to_device)(self.address(), from, self.len, stream.handle());
            let _ = stream.synchronize();
        }
    }
}

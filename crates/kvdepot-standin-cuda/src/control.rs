//! Control of the stand-in by tests, through symbols of the loaded library: the test's own copy of this crate has other
//! worlds.

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use crate::abi::DRIVER_VERSION;
use crate::schedule::Maker;
use crate::world::world;

pub use crate::world::EVERY_STREAM;

/// Number of devices. Each is a separate world: a test uses one.
pub const DEVICE_COUNT: usize = 128;
/// Maximum length of a log that a test reads.
const LOG_BYTES_MAX: usize = 64 << 10;

#[unsafe(no_mangle)]
extern "C" fn standin_reset(device: u32, seed: u64) {
    if let Some(world) = world(device as usize) {
        world.state.lock().reset(seed);
    }
}

#[unsafe(no_mangle)]
extern "C" fn standin_driver_version(version: c_int) {
    DRIVER_VERSION.store(version, Ordering::Relaxed);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn standin_fail(device: u32, name: *const c_char, after: u64, times: u64, code: c_int) {
    if let Some(world) = world(device as usize) {
        // SAFETY: a text that ends with a zero, from `Control`.
        let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy();
        world.state.lock().faults.plan(&name, after, times, code);
    }
}

#[unsafe(no_mangle)]
extern "C" fn standin_hang(device: u32, stream: u64, hung: bool) {
    let Some(world) = world(device as usize) else { return };
    let mut state = world.state.lock();
    if hung {
        state.hung.insert(stream);
    } else if stream == EVERY_STREAM {
        state.hung.clear();
    } else {
        state.hung.remove(&stream);
    }
    drop(state);
    world.progress.notify_all();
}

#[unsafe(no_mangle)]
unsafe extern "C" fn standin_calls(device: u32, name: *const c_char) -> u64 {
    // SAFETY: a text that ends with a zero, from `Control`.
    let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy();
    world(device as usize).map_or(0, |world| world.state.lock().faults.calls(&name))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn standin_log(device: u32, to: *mut u8, len: usize) -> usize {
    let Some(world) = world(device as usize) else { return 0 };
    let text = world.state.lock().log.join("\n");
    let len = text.len().min(len);
    // SAFETY: `to` has room for `len` bytes, from `Control`.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to, len) };
    len
}

#[unsafe(no_mangle)]
unsafe extern "C" fn standin_left(device: u32, to: *mut [u64; 6]) {
    let Some(world) = world(device as usize) else { return };
    let state = world.state.lock();
    let (memory, pinned, registered) = state.memory.counts();
    let left = [
        memory as u64,
        pinned as u64,
        registered as u64,
        state.streams.len() as u64 - 1,
        state.events.len() as u64,
        u64::from(state.retained),
    ];
    // SAFETY: from `Control`.
    unsafe { to.write(left) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn standin_allocate_touching(
    device: u32,
    lens: *const [u64; 2],
    to: *mut [u64; 2],
) -> bool {
    let Some(world) = world(device as usize) else { return false };
    // SAFETY: from `Control`.
    unsafe {
        let [first, second] = *lens;
        to.write(world.state.lock().memory.allocate_touching(first as usize, second as usize));
    }
    true
}

#[unsafe(no_mangle)]
extern "C" fn standin_remap(device: u32, address: u64) -> bool {
    world(device as usize).is_some_and(|world| world.state.lock().memory.remap(address))
}

#[unsafe(no_mangle)]
extern "C" fn standin_unmap(device: u32, address: u64) -> bool {
    world(device as usize).is_some_and(|world| world.state.lock().memory.unmap(address))
}

#[unsafe(no_mangle)]
extern "C" fn standin_page_bytes(device: u32, page: u64) {
    if let Some(world) = world(device as usize) {
        world.state.lock().memory.set_page_bytes(page as usize);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn standin_corrupt(device: u32, name: *const c_char) {
    if let Some(world) = world(device as usize) {
        // SAFETY: a text that ends with a zero, from `Control`.
        let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy();
        world.state.lock().corrupts = Maker::named(&name);
    }
}

#[unsafe(no_mangle)]
extern "C" fn standin_copy_engine_ns(device: u32, to_device: bool) -> u64 {
    world(device as usize).map_or(0, |world| world.state.lock().copy_engines.take_most_ns(to_device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn standin_largest_launch(device: u32, to: *mut [u64; 2]) {
    let Some(world) = world(device as usize) else { return };
    // SAFETY: from `Control`.
    unsafe { to.write(world.state.lock().largest_launch) };
}

#[unsafe(no_mangle)]
extern "C" fn standin_longest_registration(device: u32) -> u64 {
    world(device as usize).map_or(0, |world| world.state.lock().longest_registration)
}

/// Objects that a world still has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Allocations on the device.
    pub device: u64,
    /// Allocations of pinned memory.
    pub pinned: u64,
    /// Registered ranges.
    pub registered: u64,
    /// Streams other than the default one.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Number of times that the context is retained.
    pub retained: u64,
}

type Reset = extern "C" fn(u32, u64);
type Version = extern "C" fn(c_int);
type Fail = unsafe extern "C" fn(u32, *const c_char, u64, u64, c_int);
type Hang = extern "C" fn(u32, u64, bool);
type Calls = unsafe extern "C" fn(u32, *const c_char) -> u64;
type Log = unsafe extern "C" fn(u32, *mut u8, usize) -> usize;
type LeftOver = unsafe extern "C" fn(u32, *mut [u64; 6]);
type AllocateTouching = unsafe extern "C" fn(u32, *const [u64; 2], *mut [u64; 2]) -> bool;
type Map = extern "C" fn(u32, u64) -> bool;
type PageBytes = extern "C" fn(u32, u64);
type Corrupt = unsafe extern "C" fn(u32, *const c_char);
type CopyEngineNs = extern "C" fn(u32, bool) -> u64;
type Largest = unsafe extern "C" fn(u32, *mut [u64; 2]);
type Longest = extern "C" fn(u32) -> u64;

/// The loaded library's control symbols.
#[derive(Debug)]
pub struct Control {
    _library: libloading::Library,
    reset: Reset,
    version: Version,
    fail: Fail,
    hang: Hang,
    calls: Calls,
    log: Log,
    left: LeftOver,
    allocate_touching: AllocateTouching,
    remap: Map,
    unmap: Map,
    page_bytes: PageBytes,
    corrupt: Corrupt,
    copy_engine_ns: CopyEngineNs,
    longest_registration: Longest,
    largest_launch: Largest,
}

/// Returns the path of the stand-in that cargo built for the running test: next to it, or in `deps` next to it.
pub fn library_path() -> PathBuf {
    let name =
        format!("{}kvdepot_standin_cuda{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let exe = std::env::current_exe().unwrap_or_default();
    let folder = exe.parent().unwrap_or(Path::new("."));
    let beside = folder.join(&name);
    if beside.exists() { beside } else { folder.join("deps").join(name) }
}

impl Control {
    /// Loads the stand-in.
    pub fn load(path: &Path) -> Result<Self, String> {
        // SAFETY: our own library, whose initialisers do nothing, and whose symbols have the types named here.
        unsafe {
            let library =
                libloading::Library::new(path).map_err(|e| format!("cannot load {}: {e}", path.display()))?;
            let missing = |e: libloading::Error| e.to_string();
            Ok(Self {
                reset: *library.get::<Reset>(b"standin_reset\0").map_err(missing)?,
                version: *library.get::<Version>(b"standin_driver_version\0").map_err(missing)?,
                fail: *library.get::<Fail>(b"standin_fail\0").map_err(missing)?,
                hang: *library.get::<Hang>(b"standin_hang\0").map_err(missing)?,
                calls: *library.get::<Calls>(b"standin_calls\0").map_err(missing)?,
                log: *library.get::<Log>(b"standin_log\0").map_err(missing)?,
                left: *library.get::<LeftOver>(b"standin_left\0").map_err(missing)?,
                allocate_touching: *library
                    .get::<AllocateTouching>(b"standin_allocate_touching\0")
                    .map_err(missing)?,
                remap: *library.get::<Map>(b"standin_remap\0").map_err(missing)?,
                unmap: *library.get::<Map>(b"standin_unmap\0").map_err(missing)?,
                page_bytes: *library.get::<PageBytes>(b"standin_page_bytes\0").map_err(missing)?,
                corrupt: *library.get::<Corrupt>(b"standin_corrupt\0").map_err(missing)?,
                copy_engine_ns: *library.get::<CopyEngineNs>(b"standin_copy_engine_ns\0").map_err(missing)?,
                largest_launch: *library.get::<Largest>(b"standin_largest_launch\0").map_err(missing)?,
                longest_registration: *library
                    .get::<Longest>(b"standin_longest_registration\0")
                    .map_err(missing)?,
                _library: library,
            })
        }
    }

    /// Empties a world and sets its seed.
    pub fn reset(&self, device: u32, seed: u64) {
        (self.reset)(device, seed);
    }

    /// Sets the driver version for tables made from now on: 12000 has no batch copies, 12080 the first ABI, 13000 both.
    pub fn set_driver_version(&self, version: i32) {
        (self.version)(version);
    }

    /// Lets `after` calls with that name pass and makes the next `times` fail with `code`. The name `execution` means a
    /// copy's execution; its failure loses the context.
    pub fn fail(&self, device: u32, name: &str, after: u64, times: u64, code: i32) {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the text lives during the call.
        unsafe { (self.fail)(device, name.as_ptr(), after, times, code) };
    }

    /// Stops a stream or lets it continue; everything that waits for it waits. `EVERY_STREAM` means all streams.
    pub fn hang(&self, device: u32, stream: u64, hung: bool) {
        (self.hang)(device, stream, hung);
    }

    /// Returns the number of calls with that name.
    pub fn calls(&self, device: u32, name: &str) -> u64 {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the text lives during the call.
        unsafe { (self.calls)(device, name.as_ptr()) }
    }

    /// Returns the callers' violations, one line each.
    pub fn violations(&self, device: u32) -> Vec<String> {
        let mut bytes = vec![0; LOG_BYTES_MAX];
        // SAFETY: the buffer has the room that is named.
        let len = unsafe { (self.log)(device, bytes.as_mut_ptr(), bytes.len()) };
        bytes.truncate(len);
        String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
    }

    /// Returns what is still allocated.
    pub fn left(&self, device: u32) -> Left {
        let mut left = [0; 6];
        // SAFETY: an array of the length that the symbol writes.
        unsafe { (self.left)(device, &mut left) };
        let [device, pinned, registered, streams, events, retained] = left;
        Left { device, pinned, registered, streams, events, retained }
    }

    /// Makes two allocations of device memory, the second of which begins where the first ends. The first has whole
    /// pages.
    pub fn allocate_touching(&self, device: u32, lens: [u64; 2]) -> [u64; 2] {
        let mut made = [0; 2];
        // SAFETY: arrays of the lengths that the symbol reads and writes.
        unsafe { (self.allocate_touching)(device, &raw const lens, &raw mut made) };
        made
    }

    /// Gives an allocation's addresses other memory; exports of it keep the old one. Returns false if there is no such
    /// allocation.
    pub fn remap(&self, device: u32, address: u64) -> bool {
        (self.remap)(device, address)
    }

    /// Removes an allocation's memory until `remap`. Returns false if there is no such allocation.
    pub fn unmap(&self, device: u32, address: u64) -> bool {
        (self.unmap)(device, address)
    }

    /// Makes memory that is allocated from now on be exported in pages of this size, as kernels with larger pages do.
    pub fn set_page_bytes(&self, device: u32, page: u64) {
        (self.page_bytes)(device, page);
    }

    /// Makes every copy by `cuMemcpyAsync` (either direction), `cuMemcpyBatchAsync` or `cuLaunchKernel` transfer a
    /// wrong byte. Any other name ends that.
    pub fn corrupt(&self, device: u32, name: &str) {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the text lives during the call.
        unsafe { (self.corrupt)(device, name.as_ptr()) };
    }

    /// Returns the longest time that a copy in this direction would have waited in the copy engine's queue since the
    /// last call, in nanoseconds of the device's own time, which no clock measures.
    pub fn copy_engine_ns(&self, device: u32, to_device: bool) -> u64 {
        (self.copy_engine_ns)(device, to_device)
    }

    /// Returns the number of blocks, and of threads per block, of the copy kernel's launch with the most blocks.
    pub fn largest_launch(&self, device: u32) -> [u64; 2] {
        let mut largest = [0; 2];
        // SAFETY: an array of the length that the symbol writes.
        unsafe { (self.largest_launch)(device, &mut largest) };
        largest
    }

    /// Returns the largest number of bytes registered by one call.
    pub fn longest_registration(&self, device: u32) -> u64 {
        (self.longest_registration)(device)
    }
}

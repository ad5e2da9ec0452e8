//! The stand-in sees what callers do wrong, runs late what it may run late, and fails what it is told to.

use std::ffi::{c_int, c_void};

use kvdepot_standin_cuda::{Control, Left, code, library_path};

/// A device of the loaded library, with its context current in this thread.
struct World {
    library: libloading::Library,
    control: Control,
    device: u32,
}

impl World {
    fn new(device: u32, seed: u64) -> Self {
        let control = Control::load(&library_path()).expect("the stand-in");
        control.reset(device, seed);
        // SAFETY: the stand-in's initialisers do nothing.
        let library = unsafe { libloading::Library::new(library_path()) }.expect("the stand-in");
        let world = Self { library, control, device };
        let (mut context, mut relaxed) = (0u64, 2i32);
        assert_eq!(world.two("cuDevicePrimaryCtxRetain", (&raw mut context) as u64, u64::from(device)), 0);
        assert_eq!(world.one("cuThreadExchangeStreamCaptureMode", (&raw mut relaxed) as u64), 0);
        assert_eq!(world.one("cuCtxPushCurrent_v2", context), 0);
        world
    }

    /// # Safety
    /// `T` is the type of the named function.
    unsafe fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the caller's contract.
        unsafe { *self.library.get::<T>(name.as_bytes()).expect("a function of the stand-in") }
    }

    /// Calls a function of one handle, address or number.
    fn one(&self, name: &str, a: u64) -> c_int {
        // SAFETY: the name is one of such a function.
        unsafe { self.symbol::<unsafe extern "C" fn(u64) -> c_int>(name)(a) }
    }

    /// Calls a function of two of them.
    fn two(&self, name: &str, a: u64, b: u64) -> c_int {
        // SAFETY: the name is one of such a function.
        unsafe { self.symbol::<unsafe extern "C" fn(u64, u64) -> c_int>(name)(a, b) }
    }

    /// Calls a function of three of them.
    fn three(&self, name: &str, a: u64, b: u64, c: u64) -> c_int {
        // SAFETY: the name is one of such a function.
        unsafe { self.symbol::<unsafe extern "C" fn(u64, u64, u64) -> c_int>(name)(a, b, c) }
    }

    /// Calls a function of four of them.
    fn four(&self, name: &str, a: u64, b: u64, c: u64, d: u64) -> c_int {
        // SAFETY: the name is one of such a function.
        unsafe { self.symbol::<unsafe extern "C" fn(u64, u64, u64, u64) -> c_int>(name)(a, b, c, d) }
    }

    /// What a function writes into its first argument.
    fn made(&self, name: &str, b: u64, c: u64) -> u64 {
        let mut made = 0u64;
        assert_eq!(self.three(name, (&raw mut made) as u64, b, c), code::SUCCESS, "{name}");
        made
    }

    fn stream(&self) -> u64 {
        self.made("cuStreamCreateWithPriority", 1, 0)
    }

    fn seen(&self, wrong: &str) {
        let seen = self.control.violations(self.device);
        assert!(seen.iter().any(|line| line.contains(wrong)), "{wrong}: {seen:?}");
    }
}

#[test]
fn copies_run_late_and_in_stream_order() {
    let mut late = 0;
    for seed in 0..50 {
        let world = World::new(0, seed);
        let (stream, device) = (world.stream(), world.made("cuMemAlloc_v2", 64, 0));
        let (from, to) = (world.made("cuMemHostAlloc", 64, 0), world.made("cuMemHostAlloc", 64, 0));
        let at = |address: u64| address as *mut u8;
        // SAFETY: both are 64 bytes of the stand-in's host memory.
        unsafe { at(from).write(7) };
        assert_eq!(world.four("cuMemcpyHtoDAsync_v2", device, from, 64, stream), 0);
        assert_eq!(world.four("cuMemcpyDtoHAsync_v2", to, device, 64, stream), 0);
        // SAFETY: as above.
        late += u64::from(unsafe { at(to).read() } != 7);
        assert_eq!(world.one("cuStreamSynchronize", stream), 0);
        // SAFETY: as above.
        assert_eq!(unsafe { at(to).read() }, 7, "seed {seed}");
        assert!(world.control.violations(0).is_empty());
    }
    assert!(late > 25, "only {late} of 50 schedules were late");
}

#[test]
fn freed_memory_must_not_be_used() {
    let world = World::new(1, 3);
    let (stream, device) = (world.stream(), world.made("cuMemAlloc_v2", 64, 0));
    let host = world.made("cuMemHostAlloc", 64, 0);
    assert_eq!(world.one("cuMemFree_v2", device), 0);
    assert_eq!(world.four("cuMemcpyHtoDAsync_v2", device, host, 64, stream), code::INVALID_VALUE);
    world.seen("is Wrong");
    assert_eq!(world.one("cuMemFree_v2", device), code::INVALID_VALUE);
    world.seen("freed that is not there");
}

/// Sleeping engines take the memory away and leave the addresses.
#[test]
fn a_copy_that_meets_memory_taken_away_loses_the_context() {
    let world = World::new(9, 3);
    let (stream, device) = (world.stream(), world.made("cuMemAlloc_v2", 64, 0));
    let host = world.made("cuMemHostAlloc", 64, 0);
    assert!(world.control.unmap(9, device));
    assert_eq!(world.four("cuMemcpyHtoDAsync_v2", device, host, 64, stream), code::INVALID_VALUE);
    assert!(world.control.remap(9, device));
    assert_eq!(world.one("cuStreamSynchronize", stream), code::SUCCESS);
    world.control.hang(9, stream, true);
    assert_eq!(world.four("cuMemcpyHtoDAsync_v2", device, host, 64, stream), code::SUCCESS);
    assert!(world.control.unmap(9, device));
    world.control.hang(9, stream, false);
    assert_eq!(world.one("cuStreamSynchronize", stream), code::ILLEGAL_ADDRESS);
    assert_eq!(world.one("cuStreamSynchronize", stream), code::ILLEGAL_ADDRESS, "for good");
}

/// One copy of 50 GB takes a second of the device's own time, and waits for nobody's clock.
#[test]
fn copies_wait_behind_those_of_their_direction() {
    const LEN: u64 = 5 << 20;
    let world = World::new(10, 3);
    let (stream, device) = (world.stream(), world.made("cuMemAlloc_v2", LEN, 0));
    let host = world.made("cuMemHostAlloc", LEN, 0);
    world.control.hang(10, stream, true);
    for _ in 0..2 {
        assert_eq!(world.four("cuMemcpyHtoDAsync_v2", device, host, LEN, stream), code::SUCCESS);
    }
    assert_eq!(world.control.copy_engine_ns(10, false), 0);
    assert_eq!(world.control.copy_engine_ns(10, true), 2 * (LEN / 50 + 800));
    world.control.hang(10, stream, false);
    assert_eq!(world.one("cuStreamSynchronize", stream), code::SUCCESS);
    world.control.copy_engine_ns(10, true);
    assert_eq!(world.control.copy_engine_ns(10, true), 0);
}

#[test]
fn a_stream_that_takes_more_calls_than_a_device_is_seen() {
    let world = World::new(11, 3);
    let (stream, event) = (world.stream(), world.made("cuEventCreate", 0, 0));
    world.control.hang(11, stream, true);
    (0..1024).for_each(|_| assert_eq!(world.two("cuEventRecord", event, stream), code::SUCCESS));
    assert!(world.control.violations(11).is_empty());
    assert_eq!(world.two("cuEventRecord", event, stream), code::SUCCESS);
    world.seen("would block inside the driver");
    world.control.hang(11, stream, false);
}

#[test]
fn memory_that_is_freed_before_its_copy_runs_is_seen() {
    // Seeds differ in how early work runs; in some the copy has run before the memory is freed, which is no mistake.
    let seen = (0..20).any(|seed| {
        let world = World::new(2, seed);
        let (stream, device) = (world.stream(), world.made("cuMemAlloc_v2", 64, 0));
        let host = world.made("cuMemHostAlloc", 64, 0);
        assert_eq!(world.four("cuMemcpyHtoDAsync_v2", device, host, 64, stream), 0);
        world.one("cuMemFree_v2", device);
        let ended = world.one("cuStreamSynchronize", stream);
        let seen = world.control.violations(2).iter().any(|line| line.contains("not there when it runs"));
        assert_eq!(ended != 0, seen);
        seen
    });
    assert!(seen);
}

#[test]
fn registrations_are_checked() {
    let world = World::new(3, 1);
    let pages = vec![0u8; 3 * 4096];
    let base = (pages.as_ptr() as u64).next_multiple_of(4096);
    assert_eq!(world.three("cuMemHostRegister_v2", base + 1, 4096, 3), code::INVALID_VALUE);
    assert_eq!(world.three("cuMemHostRegister_v2", base, 4096, 0), code::INVALID_VALUE);
    assert_eq!(world.control.violations(3).len(), 2);
    assert_eq!(world.three("cuMemHostRegister_v2", base, 4096, 3), code::SUCCESS);
    assert_eq!(world.three("cuMemHostRegister_v2", base, 8192, 3), code::ALREADY_REGISTERED);
    let (stream, device) = (world.stream(), world.made("cuMemAlloc_v2", 8192, 0));
    assert_eq!(world.four("cuMemcpyHtoDAsync_v2", device, base, 8192, stream), code::INVALID_VALUE);
    world.seen("is Wrong");
    assert_eq!(world.one("cuMemHostUnregister", base), code::SUCCESS);
    assert_eq!(world.one("cuMemHostUnregister", base), code::NOT_REGISTERED);
    world.seen("unregistered that is not");
}

#[test]
fn handles_of_another_context_are_refused() {
    let first = World::new(4, 1);
    let (stream, event) = (first.stream(), first.made("cuEventCreate", 0, 0));
    let second = World::new(5, 1);
    assert_eq!(second.one("cuStreamSynchronize", stream), code::INVALID_HANDLE);
    second.seen("another context");
    let own = second.stream();
    assert_eq!(second.two("cuEventRecord", event, own), code::INVALID_HANDLE);
    second.seen("event that is not there, or of another context");
    assert_eq!(second.one("cuEventDestroy_v2", event), code::INVALID_HANDLE);
    let mut blocking = 0u64;
    let made = second.three("cuStreamCreateWithPriority", (&raw mut blocking) as u64, 0, 0);
    assert_eq!(made, code::INVALID_VALUE);
    second.seen("waits for the default stream");
}

#[test]
fn a_call_in_the_default_capture_mode_is_seen() {
    let world = World::new(6, 1);
    let mut mode: c_int = 0;
    assert_eq!(world.one("cuThreadExchangeStreamCaptureMode", (&raw mut mode) as u64), 0);
    assert_eq!(mode, 2);
    world.made("cuMemAlloc_v2", 64, 0);
    world.seen("capture");
}

#[test]
fn planned_failures_come_when_planned() {
    let world = World::new(7, 1);
    world.control.fail(7, "cuEventCreate", 1, 2, code::OUT_OF_MEMORY);
    let mut event = 0u64;
    let mut create = || world.two("cuEventCreate", (&raw mut event) as u64, 0);
    assert_eq!([create(), create(), create(), create()], [0, 2, 2, 0]);
    assert_eq!(world.control.calls(7, "cuEventCreate"), 4);
    assert_eq!(world.control.left(7), Left { events: 2, retained: 1, ..Left::default() });
}

#[test]
fn both_abis_of_batches_are_found_by_version() {
    let world = World::new(8, 1);
    type Find = unsafe extern "C" fn(*const u8, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let find = unsafe { world.symbol::<Find>("cuGetProcAddress_v2") };
    let found = |version| {
        let (mut address, mut status) = (std::ptr::null_mut(), 0);
        // SAFETY: the pointers live during the call.
        unsafe { find(c"cuMemcpyBatchAsync".as_ptr().cast(), &raw mut address, version, 0, &raw mut status) };
        address as usize
    };
    assert_eq!(found(12_000), 0);
    assert!(found(12_080) != 0 && found(13_000) != 0 && found(12_080) != found(13_000));
    let first = found(12_080);
    world.control.set_driver_version(12_090);
    assert_eq!(found(13_000), first, "a driver of CUDA 12 answers with the ABI that it has");
    world.control.set_driver_version(12_000);
    assert_eq!(found(13_000), 0);
    world.control.set_driver_version(13_000);
    assert_eq!(found(13_010), 0, "from 13.0 on a version beyond the driver's is refused");
}

//! Turns SIGBUS for lost pages of a mapping into an error.
//!
//! The kernel sends SIGBUS to a thread that touches a mapped page without backing: the device was unbound, its memory
//! is bad, or a file was truncated. The handler replaces the complete mapping by zeroed memory, marks it as lost and
//! returns; the access is retried and succeeds. Copying code checks the mark after the copy ([`Guard::is_lost`]) and
//! reports an error. Other faults go to the previous handler.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::fs::MemfdFlags;
use rustix::process::{Resource, getrlimit};

use crate::fork::{OfProcess, Private};

/// The largest number of guarded mappings at a time.
const REGIONS_MAX: usize = 64;
/// The largest number of faults in a mapping that are handled: more than there are threads that touch it at the moment of its
/// loss. Beyond that its replacement faults, too.
const FAULTS_MAX: usize = 4096;
/// No descriptor.
const NONE: i32 = -1;

/// A sequence lock, written by one guard at a time. No other lock is involved: another thread could hold it while the
/// process forks, and the child would wait for it forever.
struct Region {
    is_taken: AtomicBool,
    /// Counts the changes of `start` and `bytes`. Odd during a change.
    version: AtomicUsize,
    /// 0 = free.
    start: AtomicUsize,
    bytes: AtomicUsize,
    /// Whether its owner writes there.
    is_writable: AtomicBool,
    /// What replaces it: a file of zeros in memory, or `NONE` for memory of no file.
    zeros: AtomicI32,
    lost: AtomicBool,
    faults: AtomicUsize,
}

impl Region {
    const fn free() -> Self {
        Self {
            is_taken: AtomicBool::new(false),
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            is_writable: AtomicBool::new(false),
            zeros: AtomicI32::new(NONE),
            lost: AtomicBool::new(false),
            faults: AtomicUsize::new(0),
        }
    }

    /// Returns start and length of the mapping, or nothing if the entry is free or changes at this moment. Never waits,
    /// because a signal handler calls it.
    fn range(&self) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::SeqCst);
        let start = self.start.load(Ordering::SeqCst);
        let bytes = self.bytes.load(Ordering::SeqCst);
        let is_stable = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        (is_stable && start != 0).then_some((start, bytes))
    }

    fn set(&self, start: usize, bytes: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.bytes.store(bytes, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }
}

static REGIONS: [Region; REGIONS_MAX] = [const { Region::free() }; REGIONS_MAX];

/// Frees the table in a child of `fork`, which has none of the mappings: other memory may lie there by the time of a
/// SIGBUS. Async-signal-safe. The child has one thread, and no guard of its own yet.
extern "C" fn forget_in_child() {
    for region in &REGIONS {
        region.start.store(0, Ordering::SeqCst);
        region.bytes.store(0, Ordering::SeqCst);
        // Even, although the parent may have been changing it.
        region.version.store(0, Ordering::SeqCst);
        region.zeros.store(NONE, Ordering::SeqCst);
        region.lost.store(false, Ordering::SeqCst);
        region.is_taken.store(false, Ordering::SeqCst);
    }
}

/// The previous handler; written once, before ours is installed.
static mut BEFORE: MaybeUninit<libc::sigaction> = MaybeUninit::uninit();
/// The process that installs the handlers, `NOBODY`, or `INSTALLED`. Not a lock: one that is held while the process forks
/// stays locked in the child.
static INSTALLER: AtomicI32 = AtomicI32::new(NOBODY);
const NOBODY: i32 = 0;
const INSTALLED: i32 = -1;
/// Code of a signal that warns of bad memory which nobody has touched.
const BUS_MCEERR_AO: i32 = 5;

/// A sparse file of zeros in memory.
#[derive(Debug)]
struct Zeros {
    // Declared before the descriptor: see `Private`.
    _private: Private,
    file: OwnedFd,
}

impl Zeros {
    /// Makes a file of this length. It takes memory for the pages that are touched only.
    fn new(bytes: usize) -> Result<Self> {
        let failed = |error: rustix::io::Errno| {
            Error::io("cannot make a file in memory", error.into()).with("bytes", bytes)
        };
        // The signal for a file that is too long would end the process.
        if getrlimit(Resource::Fsize).current.is_some_and(|most| most < bytes as u64) {
            return Err(failed(rustix::io::Errno::FBIG));
        }
        let file = rustix::fs::memfd_create(c"kvdepot-lost", MemfdFlags::CLOEXEC).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(failed)?;
        Ok(Self { _private: Private::of(file.as_fd()), file })
    }
}

/// A guarded mapping. Drop it before its memory is unmapped.
#[derive(Debug)]
pub(super) struct Guard {
    // In a child of `fork` the region is not this guard's any more.
    region: OfProcess<usize>,
    /// Closed after the region is free.
    zeros: Option<Zeros>,
}

impl Guard {
    /// Guards `bytes` of memory from `start` on: a shared mapping of whole pages owned by the caller, who only reads it
    /// unless `is_writable`.
    pub(super) fn new(start: usize, bytes: usize, is_writable: bool) -> Result<Self> {
        install()?;
        let take = |region: &Region| !region.is_taken.swap(true, Ordering::SeqCst);
        if let Some(number) = REGIONS.iter().position(take) {
            let zeros = is_writable.then(|| Zeros::new(bytes)).and_then(|zeros| {
                let complain = |error: &Error| {
                    tracing::warn!(
                        %error,
                        "if a mapped medium loses pages, the process ends unless it may allocate as much memory"
                    );
                };
                zeros.inspect_err(complain).ok()
            });
            let region = &REGIONS[number];
            region.lost.store(false, Ordering::SeqCst);
            region.faults.store(0, Ordering::SeqCst);
            region.is_writable.store(is_writable, Ordering::SeqCst);
            region.zeros.store(zeros.as_ref().map_or(NONE, |zeros| zeros.file.as_raw_fd()), Ordering::SeqCst);
            region.set(start, bytes);
            return Ok(Self { region: OfProcess::new(number), zeros });
        }
        Err(Error::new(ErrorKind::Unsupported, "a process maps at most 64 media")
            .with("regions_max", REGIONS_MAX))
    }

    /// Returns whether pages were lost. If not after an access, the bytes read are those of the medium.
    pub(super) fn is_lost(&self) -> bool {
        // A child of `fork` has no mapping.
        self.region.get().is_none_or(|&number| REGIONS[number].lost.load(Ordering::SeqCst))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(&number) = self.region.get() {
            REGIONS[number].set(0, 0);
            REGIONS[number].zeros.store(NONE, Ordering::SeqCst);
            drop(self.zeros.take());
            REGIONS[number].is_taken.store(false, Ordering::SeqCst);
        }
    }
}

fn install() -> Result<()> {
    let own = std::process::id().cast_signed();
    loop {
        let installer = INSTALLER.load(Ordering::Acquire);
        if installer == INSTALLED {
            return Ok(());
        }
        if installer == own {
            // Another thread does it now.
            std::thread::yield_now();
            continue;
        }
        // If another process was about to, this one was forked from it meanwhile.
        if INSTALLER.compare_exchange(installer, own, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let outcome = install_handlers();
            INSTALLER.store(if outcome.is_ok() { INSTALLED } else { NOBODY }, Ordering::Release);
            return outcome;
        }
    }
}

/// Only one thread at a time may call it.
fn install_handlers() -> Result<()> {
    // SAFETY: the handler is a function of this library, which is never unloaded, and it only stores atomics.
    let outcome = unsafe { libc::pthread_atfork(None, None, Some(forget_in_child)) };
    if outcome != 0 {
        return Err(Error::io("cannot register a fork handler", std::io::Error::from_raw_os_error(outcome)));
    }
    // SAFETY: plain system calls on structures of this function; only one thread writes `BEFORE`, before
    // the second call installs the handler that reads it.
    let outcome = unsafe {
        let mut before = std::mem::zeroed::<libc::sigaction>();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) == 0 {
            // A parent may have got that far before it forked.
            if before.sa_sigaction != on_sigbus as *const () as usize {
                (&raw mut BEFORE).write(MaybeUninit::new(before));
            }
            let mut ours = std::mem::zeroed::<libc::sigaction>();
            ours.sa_sigaction = on_sigbus as *const () as usize;
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigemptyset(&raw mut ours.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut())
        } else {
            -1
        }
    };
    if outcome != 0 {
        return Err(Error::io("cannot handle SIGBUS", std::io::Error::last_os_error()));
    }
    Ok(())
}

/// Async-signal-safe: only atomics and system calls.
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler, and SIGBUS carries an address.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    for region in &REGIONS {
        // The touched mapping stays guarded meanwhile, so its entry is stable.
        let Some((start, bytes)) = region.range() else { continue };
        // Codes above 0 are the kernel's. A signal sent by a process carries no address.
        if code <= 0 || address < start || address - start >= bytes {
            continue;
        }
        if code == BUS_MCEERR_AO {
            // Whoever touches that memory gets another signal.
            return;
        }
        // Set before the pages are replaced, so that every reader of the new zeros finds the mark.
        region.lost.store(true, Ordering::SeqCst);
        if region.faults.fetch_add(1, Ordering::SeqCst) >= FAULTS_MAX {
            break;
        }
        // Neither a file nor memory that nobody writes is charged to the process as a whole, whose limits may be lower than the
        // medium's size.
        let write = if region.is_writable.load(Ordering::SeqCst) { libc::PROT_WRITE } else { 0 };
        let zeros = region.zeros.load(Ordering::SeqCst);
        let kind = match zeros {
            NONE => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            _ => libc::MAP_SHARED,
        };
        // SAFETY: replaces a mapping that its owner guards and does not unmap before the guard is dropped. It replaces
        // all of it, because a device's mapping cannot be split at any page.
        let replaced = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                bytes,
                libc::PROT_READ | write,
                kind | libc::MAP_FIXED,
                zeros,
                0,
            )
        };
        if replaced != libc::MAP_FAILED {
            return;
        }
    }
    // SAFETY: written before this handler was installed, and never after.
    let before = unsafe { (&raw const BEFORE).read().assume_init() };
    if before.sa_sigaction == libc::SIG_DFL || before.sa_sigaction == libc::SIG_IGN {
        // SAFETY: the access is retried and meets the default action, which ends the process.
        unsafe { libc::sigaction(signal, &raw const before, std::ptr::null_mut()) };
        if code <= 0 {
            // SAFETY: the signal was sent and not caused by an access, so it does not recur without this.
            unsafe { libc::raise(signal) };
        }
    } else if before.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: the previous owner installed it with SA_SIGINFO, so it is a function of three arguments.
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(before.sa_sigaction) };
        handler(signal, info, context);
    } else {
        // SAFETY: installed without SA_SIGINFO, so it is a function of one argument.
        let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(before.sa_sigaction) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a failing test panics

    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::fork::testing::{Child, ONE_AT_A_TIME};

    /// The child has none of its parent's mappings, so the handler must not put zeros where they were.
    #[test]
    fn a_forked_child_guards_only_its_own_mappings() {
        let _alone = ONE_AT_A_TIME.lock();
        let mut parents = Some(Guard::new(0x20_0000_0000, 0x1000, true).unwrap());
        let mut child = Child::fork(|| {
            let has_none = REGIONS.iter().all(|region| region.range().is_none());
            let Ok(own) = Guard::new(0x30_0000_0000, 0x2000, true) else { return 0 };
            let is_lost = parents.as_ref().is_some_and(Guard::is_lost);
            // What it has inherited takes nothing away from it.
            parents = None;
            let ranges = || REGIONS.iter().filter_map(Region::range);
            let has_own = ranges().eq([(0x30_0000_0000, 0x2000)]);
            drop(own);
            u8::from(has_none)
                + 2 * u8::from(is_lost)
                + 4 * u8::from(has_own)
                + 8 * u8::from(ranges().next().is_none())
        });
        assert_eq!(
            child.said(),
            15,
            "1: none inherited, 2: inherited is lost, 4: its own, 8: none after its end"
        );
        assert!(REGIONS.iter().filter_map(Region::range).any(|range| range == (0x20_0000_0000, 0x1000)));
        assert!(!parents.unwrap().is_lost());
    }

    /// A thread of the parent was installing the handlers when it forked, and does not exist in the child.
    #[test]
    fn a_child_that_was_forked_during_an_installation_can_guard_mappings() {
        let _alone = ONE_AT_A_TIME.lock();
        drop(Guard::new(0x40_0000_0000, 0x1000, true).unwrap());
        let parent = std::process::id().cast_signed();
        let mut child = Child::fork(|| {
            INSTALLER.store(parent, Ordering::Release);
            let can_guard = Guard::new(0x30_0000_0000, 0x2000, true).is_ok();
            // SAFETY: written by the parent, before it installed its handler.
            let before = unsafe { (&raw const BEFORE).read().assume_init() };
            let is_other = before.sa_sigaction != on_sigbus as *const () as usize;
            u8::from(can_guard) + 2 * u8::from(is_other)
        });
        assert_eq!(child.said(), 3, "1: it can, 2: the handler before ours is not ours");
    }

    #[test]
    fn a_warning_of_bad_memory_that_nobody_has_touched_is_no_loss() {
        let guard = Guard::new(0x50_0000_0000, 0x1000, true).unwrap();
        // SAFETY: plain data, and the address of a SIGBUS is the first field behind the three numbers.
        let mut info = unsafe { std::mem::zeroed::<libc::siginfo_t>() };
        info.si_code = BUS_MCEERR_AO;
        // SAFETY: within the structure, and aligned as an address is.
        unsafe { (&raw mut info).cast::<usize>().add(2).write(0x50_0000_0800) };
        // SAFETY: reads the field that was just written.
        assert_eq!(unsafe { info.si_addr() } as usize, 0x50_0000_0800);
        on_sigbus(libc::SIGBUS, &raw mut info, std::ptr::null_mut());
        assert!(!guard.is_lost());
    }

    /// As with `vm.overcommit_memory=2`: a medium may be larger than what its user may allocate.
    #[test]
    fn lost_pages_of_a_reader_are_replaced_although_it_may_allocate_no_memory() {
        check_without_memory(false);
    }

    #[test]
    fn lost_pages_of_a_writer_are_replaced_although_it_may_allocate_no_memory() {
        check_without_memory(true);
    }

    fn check_without_memory(is_writable: bool) {
        let _alone = ONE_AT_A_TIME.lock();
        let bytes = 1 << 20;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes as u64).unwrap();
        let mut child = Child::fork(|| {
            let limit = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            let is_limited = rustix::process::setrlimit(rustix::process::Resource::Data, limit).is_ok();
            let Some((start, guard)) = guarded(file.as_file(), bytes, is_writable) else { return 0 };
            if !is_limited || file.as_file().set_len(0).is_err() {
                return 0;
            }
            // SAFETY: `guarded` has mapped it, to be written if `is_writable`. The handler replaces its lost pages, or ends
            // this child.
            let (first, last) = unsafe {
                if is_writable {
                    start.add(bytes - 1).write_volatile(7);
                }
                (start.read_volatile(), start.add(bytes - 1).read_volatile())
            };
            u8::from(first == 0 && (last == 7) == is_writable && guard.is_lost())
        });
        assert_eq!(child.said(), 1);
    }

    /// Maps a file and guards it. Allocates nothing.
    fn guarded(file: &std::fs::File, bytes: usize, is_writable: bool) -> Option<(*mut u8, Guard)> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let write = if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | write, MapFlags::SHARED, file, 0).ok()?
        };
        Some((start.cast(), Guard::new(start as usize, bytes, is_writable).ok()?))
    }

    /// As if no memory were left for the pages of the replacement: the handler must not replace them for ever.
    #[test]
    fn a_replacement_that_faults_ends_the_process() {
        let _alone = ONE_AT_A_TIME.lock();
        let bytes = 1 << 20;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes as u64).unwrap();
        let mut child = Child::fork(|| {
            // SAFETY: ends this child if it hangs.
            unsafe { libc::alarm(60) };
            let Some((start, guard)) = guarded(file.as_file(), bytes, true) else { return 0 };
            let cut = |zeros: &Zeros| rustix::fs::ftruncate(&zeros.file, 0).is_ok();
            if !guard.zeros.as_ref().is_some_and(cut) || file.as_file().set_len(0).is_err() {
                return 0;
            }
            // SAFETY: mapped above. The handler ends this child.
            unsafe { start.read_volatile() }
        });
        assert_eq!(child.killed_by(), Some(libc::SIGBUS));
    }

    #[test]
    fn a_guard_that_is_dropped_leaves_no_descriptor() {
        let guard = Guard::new(0x60_0000_0000, 0x1000, true).unwrap();
        let number = guard.zeros.as_ref().unwrap().file.as_raw_fd();
        let of = |fd: &str| {
            std::fs::metadata(format!("/proc/self/fd/{fd}")).map(|meta| (meta.dev(), meta.ino())).ok()
        };
        let zeros = of(&number.to_string());
        let is_open = || {
            let mut all = std::fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().file_name());
            all.any(|fd| of(fd.to_str().unwrap()) == zeros)
        };
        assert!(zeros.is_some() && is_open());
        drop(guard);
        assert!(!is_open());
    }

    /// With the length of another mapping at this start, the handler would replace memory of strangers.
    #[test]
    fn a_start_goes_with_its_own_length() {
        const RANGES: [(usize, usize); 2] = [(0x1000, 0x1000), (0x10_0000_0000, 0x7000_0000)];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..200_000 {
                    let (start, bytes) = RANGES[n % 2];
                    drop(Guard::new(start, bytes, false).unwrap());
                }
                is_over.store(true, Ordering::SeqCst);
            });
            while !is_over.load(Ordering::SeqCst) {
                for (start, bytes) in REGIONS.iter().filter_map(Region::range) {
                    let mine = RANGES.iter().find(|range| range.0 == start);
                    assert!(mine.is_none_or(|range| range.1 == bytes), "{start:#x} with {bytes:#x}");
                }
            }
        });
    }
}

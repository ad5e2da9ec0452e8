//! Turns SIGBUS for lost pages of a mapping into an error.
//!
//! The kernel sends SIGBUS to a thread that touches a mapped page without backing: the device was unbound, its memory
//! is bad, or a file was truncated. The handler replaces the complete mapping by zeroed memory, marks it as lost and
//! returns; the access is retried and succeeds. Copying code checks the mark after the copy ([`Guard::is_lost`]) and
//! reports an error. Other faults go to the previous handler.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// The largest number of guarded mappings at a time.
const REGIONS_MAX: usize = 64;

/// A sequence lock. Writers hold [`WRITERS`].
struct Region {
    /// Counts the changes of `start` and `bytes`. Odd during a change.
    version: AtomicUsize,
    /// 0 = free.
    start: AtomicUsize,
    bytes: AtomicUsize,
    lost: AtomicBool,
}

impl Region {
    const fn free() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
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
/// Held during a change of [`REGIONS`].
static WRITERS: Mutex<()> = Mutex::new(());
/// The previous handler; written once, before ours is installed.
static mut BEFORE: MaybeUninit<libc::sigaction> = MaybeUninit::uninit();
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// A guarded mapping. Drop it before its memory is unmapped.
#[derive(Debug)]
pub(super) struct Guard {
    region: usize,
}

impl Guard {
    /// Guards `bytes` of memory from `start` on: a shared mapping of whole pages owned by the caller.
    pub(super) fn new(start: usize, bytes: usize) -> Result<Self> {
        install()?;
        let _writer = WRITERS.lock();
        let is_free = |region: &Region| region.start.load(Ordering::SeqCst) == 0;
        if let Some(number) = REGIONS.iter().position(is_free) {
            REGIONS[number].lost.store(false, Ordering::SeqCst);
            REGIONS[number].set(start, bytes);
            return Ok(Self { region: number });
        }
        Err(Error::new(ErrorKind::Unsupported, "a process maps at most 64 media")
            .with("regions_max", REGIONS_MAX))
    }

    /// Returns whether pages were lost. If not after an access, the bytes read are those of the medium.
    pub(super) fn is_lost(&self) -> bool {
        REGIONS[self.region].lost.load(Ordering::SeqCst)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _writer = WRITERS.lock();
        REGIONS[self.region].set(0, 0);
    }
}

fn install() -> Result<()> {
    let mut installed = INSTALLED.lock();
    if *installed {
        return Ok(());
    }
    // SAFETY: plain system calls on structures of this function; `BEFORE` is written under the lock, and before the
    // second call installs the handler that reads it.
    let outcome = unsafe {
        let mut before = std::mem::zeroed::<libc::sigaction>();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) == 0 {
            (&raw mut BEFORE).write(MaybeUninit::new(before));
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
    *installed = true;
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
        // Set before the pages are replaced, so that every reader of the new zeros finds the mark.
        region.lost.store(true, Ordering::SeqCst);
        // SAFETY: replaces a mapping that its owner guards and does not unmap before the guard is dropped. It replaces
        // all of it, because a device's mapping cannot be split at any page.
        let replaced = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
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

    use super::*;

    /// With the length of another mapping at this start, the handler would replace memory of strangers.
    #[test]
    fn a_start_goes_with_its_own_length() {
        const RANGES: [(usize, usize); 2] = [(0x1000, 0x1000), (0x10_0000_0000, 0x7000_0000)];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..200_000 {
                    let (start, bytes) = RANGES[n % 2];
                    drop(Guard::new(start, bytes).unwrap());
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

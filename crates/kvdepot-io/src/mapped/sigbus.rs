//! Pages of a mapping that are taken away are an error and not the end of the process.
//!
//! The kernel sends SIGBUS to a thread that touches a mapped page that cannot be had: the device was unbound, its memory is
//! bad, or a file was truncated. The handler puts zeroed memory in place of the whole mapping, marks it as lost and returns;
//! the access is done again and goes on. Whoever copies looks at the mark after the copy ([`Guard::is_lost`]) and reports an
//! error. Other faults go to the handler that was there before.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// Mappings that are guarded at a time.
const REGIONS_MAX: usize = 64;

struct Region {
    /// 0 = free.
    start: AtomicUsize,
    bytes: AtomicUsize,
    lost: AtomicBool,
}

impl Region {
    /// Start and length, as they were together at one moment: another thread may give the place to another mapping meanwhile.
    fn range(&self) -> Option<(usize, usize)> {
        let start = self.start.load(Ordering::SeqCst);
        let bytes = self.bytes.load(Ordering::SeqCst);
        (start != 0 && self.start.load(Ordering::SeqCst) == start).then_some((start, bytes))
    }
}

static REGIONS: [Region; REGIONS_MAX] = [const {
    Region { start: AtomicUsize::new(0), bytes: AtomicUsize::new(0), lost: AtomicBool::new(false) }
}; REGIONS_MAX];
/// The handler of before; written once, before ours is installed.
static mut BEFORE: MaybeUninit<libc::sigaction> = MaybeUninit::uninit();
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// A guarded mapping. Dropped before its memory is unmapped.
#[derive(Debug)]
pub(super) struct Guard {
    region: usize,
}

impl Guard {
    /// Guards `bytes` of memory from `start` on, which is a shared mapping of whole pages that is the caller's own.
    pub(super) fn new(start: usize, bytes: usize) -> Result<Self> {
        install()?;
        for (number, region) in REGIONS.iter().enumerate() {
            if region.bytes.compare_exchange(0, bytes, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                region.lost.store(false, Ordering::SeqCst);
                region.start.store(start, Ordering::SeqCst);
                return Ok(Self { region: number });
            }
        }
        Err(Error::new(ErrorKind::Unsupported, "a process maps at most 64 media")
            .with("regions_max", REGIONS_MAX))
    }

    /// Whether pages were taken away. Asked after an access: if not, what was read is what the medium held.
    pub(super) fn is_lost(&self) -> bool {
        REGIONS[self.region].lost.load(Ordering::SeqCst)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let region = &REGIONS[self.region];
        region.start.store(0, Ordering::SeqCst);
        region.bytes.store(0, Ordering::SeqCst);
    }
}

fn install() -> Result<()> {
    let mut installed = INSTALLED.lock();
    if *installed {
        return Ok(());
    }
    // SAFETY: plain system calls on structures of this function; `BEFORE` is written under the lock and only before the
    // handler that reads it is installed by the second call.
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

/// Async-signal-safe: atomics and system calls.
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler, and SIGBUS carries an address.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    for region in &REGIONS {
        // The mapping that was touched is guarded for as long, so its place does not change.
        let Some((start, bytes)) = region.range() else { continue };
        // Codes above 0 are the kernel's: a signal that somebody sent carries no address.
        if code <= 0 || address < start || address - start >= bytes {
            continue;
        }
        // Before the pages are replaced: whoever reads one of the new zeros finds the mark.
        region.lost.store(true, Ordering::SeqCst);
        // SAFETY: replaces a mapping that its owner guards and does not unmap before the guard is dropped. The whole of it,
        // because a device's mapping cannot be cut at any page.
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
        // SAFETY: the access is done again and meets the default, which ends the process.
        unsafe { libc::sigaction(signal, &raw const before, std::ptr::null_mut()) };
        if code <= 0 {
            // SAFETY: it was sent and not caused: it does not come again by itself.
            unsafe { libc::raise(signal) };
        }
    } else if before.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: installed with SA_SIGINFO by whoever had the signal before, so it is a function of three arguments.
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
    #![allow(clippy::unwrap_used)] // a test that cannot go on shall panic

    use super::*;

    /// Another mapping's length at this start would have the handler replace memory that is nobody's to replace.
    #[test]
    fn a_start_goes_with_its_own_length() {
        const RANGES: [(usize, usize); 2] = [(0x1000, 0x1000), (0x10_0000_0000, 0x7000_0000)];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..2_000_000 {
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

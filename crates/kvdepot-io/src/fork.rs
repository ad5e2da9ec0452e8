//! Keeps a process's resources away from its forked children.
//!
//! A child of `fork` has a copy of all memory and all descriptors, but only one thread. A lock that another thread held
//! stays locked, a thread cannot be joined, and a copied socket keeps the parent's connection open. [`OfProcess`]
//! refuses access to such a value in the child, and leaks it there instead of dropping it. [`Private`] replaces a
//! descriptor in the child by `/dev/null`.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use kvdepot_core::{Error, ErrorKind, Result};

/// Capacity of the table of private descriptors. Further ones are shared with children like any other descriptor.
const PRIVATE_MAX: usize = 4096;
/// No descriptor.
const FREE: i32 = -1;

/// Number of forks between this process and its first ancestor that called [`watch`].
static FORKS: AtomicU64 = AtomicU64::new(0);
static WATCHED: AtomicBool = AtomicBool::new(false);
/// Read by the handler in the child, where no lock can be taken: the thread that holds it may not exist there.
static PRIVATE: [AtomicI32; PRIVATE_MAX] = [const { AtomicI32::new(FREE) }; PRIVATE_MAX];

/// Starts to count forks.
pub fn watch() {
    if WATCHED.swap(true, Ordering::AcqRel) {
        return;
    }
    // SAFETY: the handler is a function of this library, which is never unloaded, and it calls only what a forked child
    // may call.
    let outcome = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if outcome != 0 {
        WATCHED.store(false, Ordering::Release);
        tracing::warn!(
            "cannot register the fork handler, so forked children will not notice the fork: {}",
            std::io::Error::from_raw_os_error(outcome)
        );
    }
}

/// Runs in the child's only thread before `fork` returns there. Async-signal-safe: only atomics and system calls.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Release);
    let mut null = FREE;
    for slot in &PRIVATE {
        let fd = slot.load(Ordering::Acquire);
        if fd == FREE {
            continue;
        }
        // SAFETY: plain system calls on a static path and on descriptors that this process owns. A private descriptor
        // keeps its number, so that its owner closes nothing else if it is dropped.
        unsafe {
            if null == FREE {
                null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            }
            if null == FREE || libc::dup3(null, fd, libc::O_CLOEXEC) == FREE {
                libc::close(fd);
            }
        }
    }
    if null != FREE {
        // SAFETY: opened above, and owned by no other code.
        unsafe { libc::close(null) };
    }
}

/// A descriptor that is not shared with children: in them it is `/dev/null`. Drop it before the descriptor is closed.
pub struct Private {
    slot: Option<&'static AtomicI32>,
}

impl Private {
    /// Hides the descriptor from children that are forked from now on.
    pub fn of(fd: BorrowedFd<'_>) -> Self {
        watch();
        let free = |slot: &&AtomicI32| {
            slot.compare_exchange(FREE, fd.as_raw_fd(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        Self { slot: PRIVATE.iter().find(free) }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            slot.store(FREE, Ordering::Release);
        }
    }
}

impl fmt::Debug for Private {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Private({})", self.slot.map_or(FREE, |slot| slot.load(Ordering::Relaxed)))
    }
}

/// A value for the process that made it. A forked child gets an error instead, and leaks its copy.
pub struct OfProcess<T> {
    forks: u64,
    pid: u32,
    /// `None` only after the drop.
    value: Option<T>,
}

impl<T> OfProcess<T> {
    /// Binds a value to this process.
    pub fn new(value: T) -> Self {
        watch();
        Self { forks: FORKS.load(Ordering::Acquire), pid: std::process::id(), value: Some(value) }
    }

    /// Returns the value, or `None` in a forked child.
    pub fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| !self.is_inherited())
    }

    /// Returns the value, or the error for the user of a forked child.
    pub fn or_inherited(&self) -> Result<&T> {
        self.get().ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                "opened before this process was forked from another: open a store of its own in each process",
            )
            .with("opened_by_pid", self.pid)
            .with("pid", std::process::id())
        })
    }

    fn is_inherited(&self) -> bool {
        self.forks != FORKS.load(Ordering::Acquire)
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.is_inherited() {
            std::mem::forget(self.value.take());
        }
    }
}

impl<T> fmt::Debug for OfProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OfProcess({}, inherited: {})", self.pid, self.is_inherited())
    }
}

/// Forked children for the tests of this module and of private descriptors.
#[cfg(test)]
pub(crate) mod testing {
    use std::io::{PipeReader, PipeWriter, Read, Write};

    /// Held while a test forks: two tests that fork at once would leave copies of their pipes in each other's children.
    pub(crate) static ONE_AT_A_TIME: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

    /// A forked child. It lives until `hold` is dropped, and exits with the status that `check` returned.
    pub(crate) struct Child {
        pid: libc::pid_t,
        hold: Option<PipeWriter>,
        /// The output of the child before it waits.
        said: PipeReader,
    }

    impl Child {
        /// Runs `check` in a child of a process with threads, so `check` must not allocate or lock.
        pub(crate) fn fork(check: impl FnOnce() -> u8) -> Self {
            let (mut held, hold) = std::io::pipe().unwrap();
            let (said, mut say) = std::io::pipe().unwrap();
            // SAFETY: the child allocates nothing, takes no lock, and ends by `_exit`.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0);
            if pid == 0 {
                drop(hold);
                drop(said);
                let _ = say.write_all(&[check()]);
                let _ = held.read(&mut [0]);
                // SAFETY: ends the process without running any destructors.
                unsafe { libc::_exit(0) };
            }
            Self { pid, hold: Some(hold), said }
        }

        /// Returns the signal that ended the child, which is told to end by itself.
        pub(crate) fn killed_by(&mut self) -> Option<i32> {
            self.hold = None;
            let mut status = 0;
            // SAFETY: waits for the child that this object forked.
            let waited = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
            assert_eq!(waited, self.pid);
            libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
        }

        pub(crate) fn said(&mut self) -> u8 {
            let mut byte = [0];
            self.said.read_exact(&mut byte).unwrap();
            byte[0]
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            self.hold = None;
            let mut status = 0;
            // SAFETY: waits for the child that this object forked.
            unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::testing::{Child, ONE_AT_A_TIME};
    use super::*;

    #[test]
    fn a_child_does_not_keep_a_private_socket_open() {
        let _alone = ONE_AT_A_TIME.lock();
        let (here, mut there) = UnixStream::pair().unwrap();
        let private = Private::of(here.as_fd());
        let mut child = Child::fork(|| 1);
        assert_eq!(child.said(), 1);
        drop(private);
        drop(here);
        there.set_nonblocking(true).unwrap();
        let outcome = there.read(&mut [0]);
        assert!(matches!(outcome, Ok(0)), "the child holds the socket: {outcome:?}");
    }

    #[test]
    fn a_descriptor_is_shared_again_when_it_is_private_no_more() {
        let _alone = ONE_AT_A_TIME.lock();
        let (here, mut there) = UnixStream::pair().unwrap();
        drop(Private::of(here.as_fd()));
        let child = Child::fork(|| 1);
        drop(here);
        there.set_nonblocking(true).unwrap();
        let outcome = there.read(&mut [0]);
        assert_eq!(outcome.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        drop(child);
        assert_eq!(there.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_child_gets_no_value_and_drops_none() {
        struct Loud<'a>(&'a AtomicBool);
        impl Drop for Loud<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let _alone = ONE_AT_A_TIME.lock();
        let dropped = AtomicBool::new(false);
        let value = OfProcess::new(Loud(&dropped));
        let mut value = Some(value);
        let mut child = Child::fork(|| {
            let refused = value.as_ref().is_some_and(|value| value.get().is_none());
            value = None;
            u8::from(refused) + 2 * u8::from(!dropped.load(Ordering::Acquire))
        });
        assert_eq!(child.said(), 3, "1: refused, 2: not dropped");
        assert!(value.as_ref().is_some_and(|value| value.get().is_some()));
        drop(value);
        assert!(dropped.load(Ordering::Acquire));
    }

    #[test]
    fn the_error_says_what_to_do() {
        let value = OfProcess { forks: u64::MAX, pid: 7, value: Some(()) };
        let error = value.or_inherited().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("open a store") && text.contains("opened_by_pid"), "{text}");
    }
}

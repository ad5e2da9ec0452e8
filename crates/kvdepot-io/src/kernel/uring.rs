//! io_uring: one ring for each thread. One system call submits operations and waits for completions, and operations can
//! be cancelled.

use std::io;
use std::time::Duration;

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use super::{Completion, Entry, KernelQueue, Work};

/// The token of operations whose completion is ignored.
const NOBODY: u64 = u64::MAX;

/// A ring.
pub struct UringQueue {
    ring: IoUring,
}

impl std::fmt::Debug for UringQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UringQueue")
    }
}

impl UringQueue {
    /// Creates a ring for this number of concurrent operations, and as many cancellations. It belongs to the calling
    /// thread.
    pub fn new(operations: usize) -> io::Result<Self> {
        let entries = u32::try_from(operations.saturating_mul(2)).unwrap_or(u32::MAX).next_power_of_two();
        // Completions run only when this thread asks for them, and never interrupt a checksum: Linux 6.1.
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().dontfork().build(entries);
        let ring = match ring {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::builder().dontfork().build(entries),
            ring => ring,
        }?;
        // Without these features a wait has no timeout (5.11), completions are lost (5.5), or the list of pieces must
        // not move (5.5).
        let params = ring.params();
        if !(params.is_feature_ext_arg() && params.is_feature_nodrop() && params.is_feature_submit_stable()) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring of this kernel is too old"));
        }
        Ok(Self { ring })
    }

    fn add(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: everything that the entry names stays valid until its completion, as the caller of `push`
            // promised; a cancellation names nothing.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.enter(0, Duration::ZERO)?;
        }
    }

    fn enter(&mut self, want: usize, timeout: Duration) -> io::Result<()> {
        let time = Timespec::from(timeout);
        let submitter = self.ring.submitter();
        let entered = if want == 0 {
            submitter.submit()
        } else {
            submitter.submit_with_args(want, &SubmitArgs::new().timespec(&time))
        };
        match entered {
            Ok(_) => Ok(()),
            // Timed out, interrupted, or short of memory or space for completions: the next call takes what was not
            // taken.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => Ok(()),
            Err(e) => Err(e),
        }
    }
}

/// The longest wait before the queue checks whether something was not taken.
const WAIT_MAX: Duration = Duration::from_secs(60);

impl KernelQueue for UringQueue {
    unsafe fn push(&mut self, entry: Entry<'_>) -> io::Result<()> {
        let Entry { token, fd, work, pieces, offset } = entry;
        let (fd, count) = (Fd(fd), u32::try_from(pieces.len()).unwrap_or(u32::MAX));
        let made = match work {
            Work::Read => opcode::Readv::new(fd, pieces.as_ptr(), count).offset(offset).build(),
            Work::Write => opcode::Writev::new(fd, pieces.as_ptr(), count).offset(offset).build(),
            Work::SyncData => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Work::Readable => opcode::PollAdd::new(fd, u32::from(libc::POLLIN.cast_unsigned())).build(),
        };
        self.add(&made.user_data(token))
    }

    fn submit(&mut self) -> io::Result<()> {
        self.enter(0, Duration::ZERO)
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        let entered = self.enter(1, timeout.unwrap_or(WAIT_MAX).min(WAIT_MAX));
        // Also after the ring broke: its completions are in our memory.
        let completions = self.ring.completion();
        out.extend(
            completions
                .map(|completion| Completion {
                    token: completion.user_data(),
                    result: completion.result().into(),
                    // io_uring cannot tell. All operations that it is given are older than the features that `new`
                    // requires.
                    is_refused: false,
                })
                .filter(|completion| completion.token != NOBODY),
        );
        entered
    }

    fn cancel(&mut self, token: u64) {
        // A ring that takes no more is broken, and the next `wait` reports that.
        let _ = self.add(&opcode::AsyncCancel::new(token).build().user_data(NOBODY));
    }

    fn takes_buffered_reads(&self) -> bool {
        true
    }
}

//! A queue of the kernel that injects faults by a plan, such as late completions.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use super::plan::{Drawn, Fault, FaultOp, Faults};
use crate::kernel::{Completion, Entry, KernelQueue, Work};

/// The longest delay before a released completion is noticed.
const LOOK: Duration = Duration::from_millis(1);

/// Forwards operations to another queue. Operations that the plan makes slow or hang do reach it, and the kernel moves
/// their bytes; their completions are held back.
#[derive(Debug)]
pub struct FaultQueue {
    inner: Box<dyn KernelQueue>,
    faults: Faults,
    struck: HashMap<u64, Struck>,
    ready: Vec<Completion>,
    held: Vec<(Until, Completion)>,
}

#[derive(Debug)]
struct Struck {
    fault: Fault,
    /// For reads, the memory as address and length.
    pieces: Vec<(usize, usize)>,
}

#[derive(Debug)]
enum Until {
    Time(Instant),
    Release(u64),
}

impl FaultQueue {
    /// Wraps a queue.
    pub fn new(inner: Box<dyn KernelQueue>, faults: Faults) -> Self {
        Self { inner, faults, struck: HashMap::new(), ready: Vec::new(), held: Vec::new() }
    }

    /// Returns the changed completion, or `None` if it is held back.
    fn pass(&mut self, mut completion: Completion) -> Option<Completion> {
        let Some(Struck { fault, pieces }) = self.struck.remove(&completion.token) else {
            return Some(completion);
        };
        let count = usize::try_from(completion.result).unwrap_or(0);
        match fault {
            Fault::Short if count > 1 => {
                completion.result = i64::try_from(1 + self.faults.pick(count - 1)).unwrap_or(1);
            }
            Fault::Flip if count > 0 => {
                let mut at = self.faults.pick(count);
                for (address, len) in pieces {
                    if at < len {
                        let bit = 1_u8 << self.faults.pick(8);
                        // SAFETY: the piece was handed to `push` to be read into, and its completion has not been passed on.
                        unsafe { *(address as *mut u8).add(at) ^= bit };
                        break;
                    }
                    at -= len;
                }
            }
            Fault::Slow(time) => {
                self.held.push((Until::Time(Instant::now() + time), completion));
                return None;
            }
            Fault::Hang => {
                self.held.push((Until::Release(self.faults.begin_hang()), completion));
                return None;
            }
            _ => {}
        }
        Some(completion)
    }

    fn let_go(&mut self, out: &mut Vec<Completion>) {
        let (now, releases) = (Instant::now(), self.faults.releases());
        let goes = |until: &Until| match until {
            Until::Time(at) => *at <= now,
            Until::Release(before) => *before != releases,
        };
        let (free, held): (Vec<_>, Vec<_>) = self.held.drain(..).partition(|(until, _)| goes(until));
        self.held = held;
        out.extend(free.into_iter().map(|(_, completion)| completion));
    }
}

impl KernelQueue for FaultQueue {
    unsafe fn push(&mut self, entry: Entry<'_>) -> io::Result<()> {
        let op = match entry.work {
            Work::Read => Some(FaultOp::Read),
            Work::Write => Some(FaultOp::Write),
            Work::SyncData => Some(FaultOp::Meta),
            Work::Readable => None,
        };
        let drawn = op.and_then(|op| self.faults.draw_for_queue(op));
        match drawn {
            Some(Drawn::Break) => return Err(io::Error::from_raw_os_error(libc::EBADF)),
            Some(Drawn::Errno(errno)) => {
                let result = -i64::from(errno);
                self.ready.push(Completion { token: entry.token, result, is_refused: false });
                return Ok(());
            }
            Some(Drawn::Fault(fault)) => {
                let pieces = entry.pieces.iter().map(|piece| (piece.iov_base as usize, piece.iov_len));
                self.struck.insert(entry.token, Struck { fault, pieces: pieces.collect() });
            }
            None => {}
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.push(entry) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.inner.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let before = out.len();
        loop {
            out.append(&mut self.ready);
            self.let_go(out);
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let look = if out.len() > before {
                Some(Duration::ZERO)
            } else if self.held.is_empty() {
                left
            } else {
                Some(left.map_or(LOOK, |left| left.min(LOOK)))
            };
            let mut came = Vec::new();
            let waited = self.inner.wait(look, &mut came);
            for completion in came {
                out.extend(self.pass(completion));
            }
            waited?;
            if out.len() > before || left.is_some_and(|left| left.is_zero()) {
                return Ok(());
            }
        }
    }

    fn cancel(&mut self, token: u64) {
        if self.faults.is_cancelling() {
            let (given_up, held) = self.held.drain(..).partition(|(_, completion)| completion.token == token);
            self.held = held;
            let given_up: Vec<(Until, Completion)> = given_up;
            let result = -i64::from(libc::ECANCELED);
            self.ready.extend(given_up.into_iter().map(|_| Completion { token, result, is_refused: false }));
        }
        self.inner.cancel(token);
    }

    fn takes_buffered_reads(&self) -> bool {
        self.inner.takes_buffered_reads()
    }
}

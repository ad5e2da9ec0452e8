//! Queued work, and the order in which it runs.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::MutexGuard;

use crate::code;
use crate::kernels::{self, Kernel};
use crate::memory::Place;
use crate::world::{State, World};

/// How long a wait lasts if no work can run and none is queued.
const STUCK: Duration = Duration::from_secs(60);
/// Maximum number of pieces that one call runs early.
const EARLY_MAX: u64 = 12;

/// Source of a copy's bytes.
pub(crate) enum Source {
    Address(u64),
    /// Read during the call.
    Taken(Vec<u8>),
}

pub(crate) struct Part {
    pub(crate) to: u64,
    pub(crate) from: Source,
    pub(crate) len: u64,
    pub(crate) by: Maker,
}

/// Kind of a copy's origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maker {
    Memcpy,
    Batch,
    Kernel,
}

impl Maker {
    /// Returns the kind for the name of a driver's call.
    pub(crate) fn named(call: &str) -> Option<Self> {
        match call {
            "cuMemcpyAsync" => Some(Self::Memcpy),
            "cuMemcpyBatchAsync" => Some(Self::Batch),
            "cuLaunchKernel" => Some(Self::Kernel),
            _ => None,
        }
    }
}

pub(crate) enum Op {
    /// Copies that run in any order.
    Copies(Vec<Part>),
    /// A kernel that has not begun: its arguments are read, but the memory they point to is read when it runs.
    Launch {
        kernel: Kernel,
        arguments: Vec<u64>,
    },
    Record {
        event: u64,
        number: u64,
    },
    Wait {
        event: u64,
        number: u64,
    },
}

pub(crate) struct Stream {
    /// Weight with which it is picked.
    pub(crate) weight: u64,
    pub(crate) queue: VecDeque<Op>,
}

impl State {
    pub(crate) fn new_stream(&mut self) -> u64 {
        let handle = self.handle();
        let weight = [1, 4, 16, 256][self.rng.below(4) as usize];
        self.streams.insert(handle, Stream { weight, queue: VecDeque::new() });
        handle
    }

    /// Returns whether a record has been reached. A destroyed event counts as reached, as in the real driver.
    pub(crate) fn reached(&self, event: u64, number: u64) -> bool {
        self.events.get(&event).is_none_or(|event| event.completed >= number)
    }

    /// Returns whether a stream is waiting for an event that has not occurred.
    pub(crate) fn waits_for_an_event(&self, stream: u64) -> bool {
        let waits = |op: &Op| matches!(op, Op::Wait { event, number } if !self.reached(*event, *number));
        self.streams.get(&stream).is_some_and(|stream| stream.queue.iter().any(waits))
    }

    /// Runs some work before a call returns, depending on the seed.
    pub(crate) fn some_early(&mut self) {
        if self.rng.percent(self.eagerness) {
            for _ in 0..self.rng.below(EARLY_MAX) {
                self.step();
            }
        }
    }

    /// Runs one piece of one stream. Returns false if no stream may run.
    pub(crate) fn step(&mut self) -> bool {
        let mut ready: Vec<(u64, u64)> = self
            .streams
            .iter()
            .filter(|&(&handle, _)| !self.is_hung(handle))
            .filter(|(_, stream)| match stream.queue.front() {
                None => false,
                Some(Op::Wait { event, number }) => self.reached(*event, *number),
                Some(_) => true,
            })
            .map(|(&handle, stream)| (handle, stream.weight))
            .collect();
        if ready.is_empty() {
            return false;
        }
        ready.sort_unstable();
        let mut ticket = self.rng.below(ready.iter().map(|&(_, weight)| weight).sum());
        let mut picked = ready[0].0;
        for &(handle, weight) in &ready {
            picked = handle;
            if ticket < weight {
                break;
            }
            ticket -= weight;
        }
        let Some(op) = self.streams.get_mut(&picked).and_then(|stream| stream.queue.pop_front()) else {
            return false;
        };
        if let Some(rest) = self.run_piece(op)
            && let Some(stream) = self.streams.get_mut(&picked)
        {
            stream.queue.push_front(rest);
        }
        true
    }

    /// Runs a piece of an operation and returns the rest of it.
    fn run_piece(&mut self, op: Op) -> Option<Op> {
        match op {
            Op::Wait { .. } => None,
            Op::Record { event, number } => {
                if let Some(event) = self.events.get_mut(&event) {
                    event.completed = event.completed.max(number);
                }
                None
            }
            Op::Launch { kernel, arguments } => kernels::begin(self, kernel, &arguments).map(Op::Copies),
            Op::Copies(mut parts) => {
                let index = self.rng.below(parts.len().max(1) as u64) as usize;
                if index < parts.len() {
                    let part = parts.swap_remove(index);
                    self.copy(&part);
                }
                (!parts.is_empty()).then_some(Op::Copies(parts))
            }
        }
    }

    fn copy(&mut self, part: &Part) {
        self.copy_engines.ran(part);
        if let Some(code) = self.faults.called("execution") {
            self.lost = code;
            return;
        }
        if !self.check(part.to, part.len, "a copy's target") {
            return;
        }
        let from = match &part.from {
            Source::Taken(bytes) => bytes.as_ptr(),
            Source::Address(from) => {
                if !self.check(*from, part.len, "a copy's source") {
                    return;
                }
                self.memory.pointer(*from).cast_const()
            }
        };
        // SAFETY: both ranges were found in memory that lives: what the world keeps, or what the caller answers for
        // until it has seen the copy's end. `copy`, because a test may well name overlapping ranges by mistake.
        unsafe {
            std::ptr::copy(from, self.memory.pointer(part.to), part.len as usize);
            if self.corrupts == Some(part.by) && part.len > 0 {
                let last = self.memory.pointer(part.to).add(part.len as usize - 1);
                last.write(!last.read());
            }
        }
    }

    /// Returns whether a range may still be accessed; if not, the context is lost as on a device.
    pub(crate) fn check(&mut self, address: u64, len: u64, what: &str) -> bool {
        if self.memory.place(address, len) != Place::Wrong {
            return true;
        }
        self.violation(format!("{what} is not there when it runs: {address:#x}, {len} bytes"));
        self.lost = code::ILLEGAL_ADDRESS;
        false
    }
}

impl World {
    /// Runs work until `done`, and yields to other threads periodically.
    pub(crate) fn run_until(
        &self,
        state: &mut MutexGuard<'_, State>,
        done: impl Fn(&State) -> bool,
    ) -> Result<(), i32> {
        loop {
            if state.lost != code::SUCCESS {
                return Err(state.lost);
            }
            if done(state) {
                return Ok(());
            }
            if state.step() {
                self.progress.notify_all();
                if state.rng.percent(20) {
                    MutexGuard::bump(state);
                }
            } else if !state.hung.is_empty() {
                // As long as the test wants.
                self.progress.wait(state);
            } else if self.progress.wait_for(state, STUCK).timed_out() && !done(state) {
                state.violation("a wait for work that cannot run".into());
                return Err(code::LAUNCH_TIMEOUT);
            }
        }
    }
}

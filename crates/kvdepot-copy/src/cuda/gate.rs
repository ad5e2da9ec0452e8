//! Limits how much of a lane's work is on the device at a time.

use std::ops::{AddAssign, SubAssign};

use parking_lot::{Condvar, Mutex};

/// Largest number of pieces of one lane on the device at a time (P7).
const PIECES_MAX: usize = 1024;

/// The device resources that a piece of work takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) bytes: u64,
    /// Number of copies for the device's copy engine. Other copies wait behind these, however short they are.
    pub(crate) copies: usize,
    /// Number of driver calls. A stream accepts a bounded number of them and then blocks its caller inside the driver,
    /// while holding a lock that other threads need.
    pub(crate) calls: usize,
}

impl Amount {
    /// Returns whether `more` still fits into `max`.
    fn has_room_for(&self, more: Self, max: Self) -> bool {
        self.bytes.saturating_add(more.bytes) <= max.bytes
            && self.copies.saturating_add(more.copies) <= max.copies
            && self.calls.saturating_add(more.calls) <= max.calls
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, more: Self) {
        self.bytes += more.bytes;
        self.copies += more.copies;
        self.calls += more.calls;
    }
}

impl SubAssign for Amount {
    fn sub_assign(&mut self, less: Self) {
        self.bytes -= less.bytes;
        self.copies -= less.copies;
        self.calls -= less.calls;
    }
}

/// Counts the work in flight.
#[derive(Debug)]
pub(crate) struct Gate {
    max: Amount,
    now: Mutex<InFlight>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct InFlight {
    amount: Amount,
    pieces: usize,
    /// Largest number of bytes at a time so far.
    bytes_most: u64,
}

impl InFlight {
    fn add(&mut self, more: Amount) {
        self.amount += more;
        self.pieces += 1;
        self.bytes_most = self.bytes_most.max(self.amount.bytes);
    }
}

impl Gate {
    pub(crate) fn new(max: Amount) -> Self {
        Self { max, now: Mutex::default(), freed: Condvar::new() }
    }

    /// Waits until there is capacity. A piece larger than the limit goes alone.
    pub(crate) fn enter(&self, more: Amount) {
        let mut now = self.now.lock();
        while now.pieces > 0 && (now.pieces >= PIECES_MAX || !now.amount.has_room_for(more, self.max)) {
            self.freed.wait(&mut now);
        }
        now.add(more);
    }

    /// Counts without waiting.
    pub(crate) fn count(&self, more: Amount) {
        self.now.lock().add(more);
    }

    pub(crate) fn leave(&self, less: Amount) {
        let mut now = self.now.lock();
        now.amount -= less;
        now.pieces -= 1;
        drop(now);
        self.freed.notify_all();
    }

    /// Returns the largest number of bytes that were in flight at a time.
    pub(crate) fn bytes_most(&self) -> u64 {
        self.now.lock().bytes_most
    }
}

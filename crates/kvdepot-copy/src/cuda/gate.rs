//! How much of a lane's work may be on the device at a time.

use parking_lot::{Condvar, Mutex};

/// Most pieces of one lane that are on the device at a time (P7).
const PIECES_MAX: usize = 1024;

/// Counts bytes and pieces in flight.
#[derive(Debug)]
pub(crate) struct Gate {
    bytes_max: u64,
    now: Mutex<InFlight>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct InFlight {
    bytes: u64,
    pieces: usize,
    /// Most bytes at a time so far.
    bytes_most: u64,
}

impl InFlight {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.pieces += 1;
        self.bytes_most = self.bytes_most.max(self.bytes);
    }
}

impl Gate {
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, now: Mutex::default(), freed: Condvar::new() }
    }

    /// Waits until there is room for `bytes`; a piece that is larger than all the room goes alone.
    pub(crate) fn enter(&self, bytes: u64) {
        let mut now = self.now.lock();
        while now.pieces > 0 && (now.pieces >= PIECES_MAX || now.bytes.saturating_add(bytes) > self.bytes_max)
        {
            self.freed.wait(&mut now);
        }
        now.add(bytes);
    }

    /// Counts without waiting.
    pub(crate) fn count(&self, bytes: u64) {
        self.now.lock().add(bytes);
    }

    pub(crate) fn leave(&self, bytes: u64) {
        let mut now = self.now.lock();
        now.bytes -= bytes;
        now.pieces -= 1;
        drop(now);
        self.freed.notify_all();
    }

    /// Most bytes that were in flight at a time.
    pub(crate) fn bytes_most(&self) -> u64 {
        self.now.lock().bytes_most
    }
}

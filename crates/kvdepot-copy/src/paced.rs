//! Registering a pool beside an engine that serves: in pieces, with pauses, and only what is in memory.
//!
//! Pinning holds locks of the driver and of the kernel, so other calls of this and of other processes wait meanwhile. And it
//! makes what it pins resident for good, which is more than a pool may have that is to grow later (P5).

use std::time::{Duration, Instant};

use kvdepot_core::Result;

use crate::background::Progress;
use crate::resident::is_resident;

/// The pause before what was not in memory is looked at again; twice as long each time that nothing has come, up to the
/// other one.
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LONGEST_LOOK: Duration = Duration::from_secs(5);

/// Memory to be registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) base: usize,
    pub(crate) len: usize,
    /// What is registered as one.
    pub(crate) piece_bytes: usize,
    /// Whether its pages are set aside already, touched or not.
    pub(crate) reserved: bool,
}

impl Range {
    /// First address and length of each piece.
    pub(crate) fn pieces(self) -> impl Iterator<Item = (usize, usize)> {
        let piece = self.piece_bytes.max(1);
        (0..self.len).step_by(piece).map(move |at| (self.base + at, piece.min(self.len - at)))
    }
}

/// Calls `register` for every piece once it is in memory, with pauses as long as the calls, until all are registered or the
/// work is to end.
///
/// # Safety
/// The range is mapped until this returns.
pub(crate) unsafe fn register(
    range: Range,
    progress: &Progress,
    mut register: impl FnMut(usize, usize) -> Result<()>,
) -> Result<()> {
    let mut left: Vec<(usize, usize)> = range.pieces().collect();
    let mut look = FIRST_LOOK;
    loop {
        let before = left.len();
        let mut missing = Vec::new();
        for (base, len) in left {
            if !progress.goes_on() {
                return Ok(());
            }
            // SAFETY: the caller's contract.
            if !(range.reserved || unsafe { is_resident(base, len) }) {
                missing.push((base, len));
                continue;
            }
            let begun = Instant::now();
            register(base, len)?;
            progress.add(len);
            // As long as the call, so that others have at least half of the time.
            if !progress.pause(begun.elapsed()) {
                return Ok(());
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        progress.caught_up();
        look = if missing.len() < before { FIRST_LOOK } else { (look * 2).min(LONGEST_LOOK) };
        if !progress.pause(look) {
            return Ok(());
        }
        left = missing;
    }
}

//! Registers a pool while the engine serves: in pieces, with pauses, and only resident memory.
//!
//! Pinning holds locks of the driver and of the kernel, so other calls of this and of other processes wait meanwhile.
//! It also makes the pinned memory resident for good, which can be more than a pool that grows later may have (P5).

use std::time::{Duration, Instant};

use kvdepot_core::Result;

use crate::background::Progress;
use crate::resident::is_resident;

/// The first and the longest pause before memory that was not resident is checked again. The pause doubles each time
/// that nothing new is resident.
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LONGEST_LOOK: Duration = Duration::from_secs(5);

/// A range of memory to be registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) base: usize,
    pub(crate) len: usize,
    /// Size of one registration.
    pub(crate) piece_bytes: usize,
    /// Whether its pages are reserved already, touched or not.
    pub(crate) reserved: bool,
}

impl Range {
    /// Iterates over the pieces: first address and length.
    pub(crate) fn pieces(self) -> impl Iterator<Item = (usize, usize)> {
        let piece = self.piece_bytes.max(1);
        (0..self.len).step_by(piece).map(move |at| (self.base + at, piece.min(self.len - at)))
    }
}

/// Calls `register` for every piece once it is resident, with pauses as long as the calls, until all are registered or
/// the work is stopped.
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
            // Pause as long as the call took, so that others have at least half of the time.
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

//! Spare buffers for receiving. A connection has memory only while it receives, and the connections of a thread pass it
//! on, so that thousands of idle ones have none and a busy one does not allocate for each request.

use std::cell::RefCell;

use kvdepot_wire::limits::READ_BYTES;
use kvdepot_wire::{FrameBuffer, Spare};

/// Number of buffers that a thread keeps.
const SPARES_MAX: usize = 16;

thread_local! {
    static SPARES: RefCell<Vec<Spare>> = const { RefCell::new(Vec::new()) };
}

/// Gives a buffer memory if it has none and there is some to spare.
pub(super) fn lend(buffer: &mut FrameBuffer) {
    if buffer.is_released()
        && let Some(spare) = SPARES.with_borrow_mut(Vec::pop)
    {
        buffer.reuse(spare);
    }
}

/// Takes the memory of an empty buffer before a wait.
pub(super) fn take_back(buffer: &mut FrameBuffer) {
    let Some(spare) = buffer.release() else { return };
    // A buffer that grew for a long request is freed.
    if spare.len() <= READ_BYTES {
        SPARES.with_borrow_mut(|spares| {
            if spares.len() < SPARES_MAX {
                spares.push(spare);
            }
        });
    }
}

//! Memory for what arrives: a connection has it only while something arrives, and a thread's connections hand it on, so that
//! thousands of idle ones have none and a busy one does not ask for it at each request.

use std::cell::RefCell;

use kvdepot_wire::limits::READ_BYTES;
use kvdepot_wire::{FrameBuffer, Spare};

/// Most pieces that a thread keeps.
const SPARES_MAX: usize = 16;

thread_local! {
    static SPARES: RefCell<Vec<Spare>> = const { RefCell::new(Vec::new()) };
}

/// Gives a buffer memory, if it has none and some is at hand.
pub(super) fn lend(buffer: &mut FrameBuffer) {
    if buffer.is_released()
        && let Some(spare) = SPARES.with_borrow_mut(Vec::pop)
    {
        buffer.reuse(spare);
    }
}

/// Takes the memory of a buffer that is to wait with nothing in it.
pub(super) fn take_back(buffer: &mut FrameBuffer) {
    let Some(spare) = buffer.release() else { return };
    // What grew for a long request is given back.
    if spare.len() <= READ_BYTES {
        SPARES.with_borrow_mut(|spares| {
            if spares.len() < SPARES_MAX {
                spares.push(spare);
            }
        });
    }
}

//! Splits one slot into many pieces, as a fragmented pool would lend it. For tests of code that takes slots.

use std::sync::Arc;

use crate::buf::{MemRun, SlotBuf};

/// Returns the memory of `slot`, which must be one run, in runs of these lengths with their addresses in reverse order.
///
/// # Panics
/// If the slot is in more than one run or the lengths do not add up to its own.
pub fn in_runs(slot: &SlotBuf, lengths: &[usize]) -> SlotBuf {
    assert_eq!(slot.runs().len(), 1, "cut a slot that is in one piece");
    assert_eq!(lengths.iter().sum::<usize>(), slot.len(), "pieces that make up the slot");
    let mut end = slot.len();
    let runs: Vec<MemRun> = lengths
        .iter()
        .filter(|&&len| len > 0)
        .map(|&len| {
            end -= len;
            slot.slice(end, end + len)[0]
        })
        .collect();
    // SAFETY: the runs lie in `slot`'s one run without overlap, `slot` is kept, and who may access it when is what its
    // own lender promised.
    unsafe { SlotBuf::new(runs, Arc::new(slot.clone())) }
}

//! Allocator of the pool's space. Free bytes are never lost to external fragmentation.
//!
//! A slot is a list of runs. Free runs are indexed twice, by offset (to coalesce) and by length (to choose). Both
//! indexes always describe the same set. No two free runs of one extent touch, and no run crosses an extent, because
//! extents are mapped and registered one by one.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::limits::{BLOCK_ALIGN_BYTES, SLOT_RUNS_MAX};

/// Offset of the first byte of a tier's memory, in which blocks are leased where they lie. Smaller offsets are the
/// pool's.
pub const IN_PLACE_AT: u64 = 1 << 43;

/// Contiguous bytes of the pool, inside one extent, or of a tier's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// Offset of the first byte from the pool's start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Run {
    /// Returns the offset after the last byte.
    pub const fn end(self) -> u64 {
        self.offset + self.len
    }

    /// Returns the offset in the tier's memory, if that is where it lies.
    pub const fn in_place(self) -> Option<u64> {
        self.offset.checked_sub(IN_PLACE_AT)
    }
}

/// A slot's memory: its bytes are in the runs one after another, in this order.
pub type Runs = SmallVec<[Run; 2]>;

/// Allocator of the pool's bytes. All operations are O(log n) in the number of free runs.
#[derive(Debug)]
pub struct RunAllocator {
    extent_bytes: u64,
    /// Offset to length of every free run.
    free_by_offset: BTreeMap<u64, u64>,
    /// (length, offset) of every free run.
    free_by_len: BTreeSet<(u64, u64)>,
    /// Offset to length of the space that was added; neighbours are merged across extents.
    space: BTreeMap<u64, u64>,
    free_bytes: u64,
    total_bytes: u64,
}

impl RunAllocator {
    /// Makes an allocator without space. Its runs never cross a multiple of `extent_bytes`.
    pub fn new(extent_bytes: u64) -> Self {
        assert!(
            extent_bytes > 0 && extent_bytes.is_multiple_of(BLOCK_ALIGN_BYTES),
            "extents are whole pages"
        );
        Self {
            extent_bytes,
            free_by_offset: BTreeMap::new(),
            free_by_len: BTreeSet::new(),
            space: BTreeMap::new(),
            free_bytes: 0,
            total_bytes: 0,
        }
    }

    /// Adds free space, which may be a part of an extent or span several.
    pub fn add_extent(&mut self, offset: u64, len: u64) {
        debug_assert!(offset.is_multiple_of(BLOCK_ALIGN_BYTES) && len.is_multiple_of(BLOCK_ALIGN_BYTES));
        if len == 0 {
            return;
        }
        let end = offset.checked_add(len).expect("the pool fits into 64 bits");
        let mut space = Run { offset, len };
        if let Some((&before, &before_len)) = self.space.range(..end).next_back() {
            assert!(before + before_len <= offset, "space was added twice");
            if before + before_len == offset {
                space = Run { offset: before, len: before_len + len };
            }
        }
        if let Some(after_len) = self.space.remove(&end) {
            space.len += after_len;
        }
        self.space.insert(space.offset, space.len);
        self.total_bytes += len;
        let mut start = offset;
        while start < end {
            let stop = end.min((start / self.extent_bytes + 1) * self.extent_bytes);
            self.release(Run { offset: start, len: stop - start });
            start = stop;
        }
    }

    /// Allocates `len` bytes: the tightest single run that holds them, otherwise the fewest pieces.
    ///
    /// Returns `None`, and takes nothing, if there is not enough free space, or if it is so scattered that more than
    /// `SLOT_RUNS_MAX` runs would be needed.
    pub fn alloc(&mut self, len: u64) -> Option<Runs> {
        debug_assert!(
            len > 0 && len.is_multiple_of(BLOCK_ALIGN_BYTES),
            "the caller rounds up to whole pages"
        );
        if len == 0 || len > self.free_bytes {
            return None;
        }
        let pieces = self.largest_pieces_below(len)?;
        let mut runs = Runs::new();
        let mut rest = len;
        for piece in pieces {
            self.take_front(piece, piece.len);
            runs.push(piece);
            rest -= piece.len;
        }
        let &(fit_len, offset) =
            self.free_by_len.range((rest, 0)..).next().expect("the plan left a last run");
        self.take_front(Run { offset, len: fit_len }, rest);
        runs.push(Run { offset, len: rest });
        debug_assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), len);
        Some(runs)
    }

    /// Takes exactly these runs. Returns false, and takes nothing, if one of them is not free, is empty, or crosses an
    /// extent.
    pub fn take(&mut self, runs: &[Run]) -> bool {
        for (taken, &run) in runs.iter().enumerate() {
            let sound = run.len > 0
                && run.offset.checked_add(run.len).is_some()
                && run.offset.is_multiple_of(BLOCK_ALIGN_BYTES)
                && run.len.is_multiple_of(BLOCK_ALIGN_BYTES);
            let free = self.free_by_offset.range(..=run.offset).next_back();
            let free = free.map(|(&offset, &len)| Run { offset, len });
            let Some(free) = free.filter(|free| sound && run.end() <= free.end()) else {
                self.free(&runs[..taken]);
                return false;
            };
            self.unlink(free);
            if free.offset < run.offset {
                self.link(Run { offset: free.offset, len: run.offset - free.offset });
            }
            if run.end() < free.end() {
                self.link(Run { offset: run.end(), len: free.end() - run.end() });
            }
            self.free_bytes -= run.len;
        }
        true
    }

    /// Frees runs that `alloc` returned. Freeing a byte twice, or one that was never added, is a bug and would give one
    /// slot to two blocks (P1), so it panics in every build.
    pub fn free(&mut self, runs: &[Run]) {
        for &run in runs {
            assert!(
                run.len > 0 && self.same_extent(run.offset, run.end() - 1),
                "not a run of this pool: {run:?}"
            );
            let space = self.space.range(..=run.offset).next_back();
            assert!(space.is_some_and(|(&o, &l)| run.end() <= o + l), "run outside of the pool: {run:?}");
            let before = self.free_by_offset.range(..run.end()).next_back();
            assert!(before.is_none_or(|(&o, &l)| o + l <= run.offset), "run freed twice: {run:?}");
            self.release(run);
        }
    }

    /// Returns the number of free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Returns the number of all bytes that were added.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Returns the length of the longest free run.
    pub fn largest_run_bytes(&self) -> u64 {
        self.free_by_len.last().map_or(0, |&(len, _)| len)
    }

    /// Returns the largest runs to use up completely until a single other run holds the rest of `len`.
    fn largest_pieces_below(&self, len: u64) -> Option<Runs> {
        let mut pieces = Runs::new();
        let mut rest = len;
        for &(piece_len, offset) in self.free_by_len.iter().rev() {
            if piece_len >= rest {
                return Some(pieces);
            }
            // The caller takes the last run of the slot.
            if pieces.len() + 1 == SLOT_RUNS_MAX {
                return None;
            }
            pieces.push(Run { offset, len: piece_len });
            rest -= piece_len;
        }
        None
    }

    /// Takes the first `len` bytes of a free run.
    fn take_front(&mut self, free: Run, len: u64) {
        self.unlink(free);
        if len < free.len {
            self.link(Run { offset: free.offset + len, len: free.len - len });
        }
        self.free_bytes -= len;
    }

    /// Frees a run and joins it with its free neighbours of the same extent.
    fn release(&mut self, run: Run) {
        let mut whole = run;
        if let Some((&offset, &len)) = self.free_by_offset.range(..run.offset).next_back()
            && offset + len == run.offset
            && self.same_extent(offset, run.offset)
        {
            self.unlink(Run { offset, len });
            whole = Run { offset, len: len + run.len };
        }
        if let Some(&len) = self.free_by_offset.get(&run.end())
            && self.same_extent(run.offset, run.end())
        {
            self.unlink(Run { offset: run.end(), len });
            whole.len += len;
        }
        self.link(whole);
        self.free_bytes += run.len;
        debug_assert!(self.free_bytes <= self.total_bytes);
    }

    fn same_extent(&self, a: u64, b: u64) -> bool {
        a / self.extent_bytes == b / self.extent_bytes
    }

    fn link(&mut self, run: Run) {
        self.free_by_offset.insert(run.offset, run.len);
        self.free_by_len.insert((run.len, run.offset));
    }

    fn unlink(&mut self, run: Run) {
        let by_offset = self.free_by_offset.remove(&run.offset);
        let by_len = self.free_by_len.remove(&(run.len, run.offset));
        debug_assert!(by_offset == Some(run.len) && by_len, "the two indexes differ at {run:?}");
    }
}

//! The memory of one file: header pages, the payload in a slot, and a padded last page.

use std::io::{IoSlice, IoSliceMut};

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, IO_VECTORS_MAX};
use smallvec::SmallVec;

use crate::aligned::AlignedBuf;
use crate::buf::{MemRun, SlotBuf};
use crate::device::DirectAlign;

type Runs = SmallVec<[MemRun; 8]>;

/// A file's bytes in memory, in file order: `head`, then `body_bytes` of `body`, then `tail`.
#[derive(Debug)]
pub struct IoBuf {
    head: AlignedBuf,
    body: SlotBuf,
    body_bytes: usize,
    tail: AlignedBuf,
    /// Bytes that a read has brought.
    filled: usize,
}

impl IoBuf {
    /// Makes a buffer for reading header pages and `body_bytes` of payload. Returns `None` if the slot is shorter.
    pub fn for_read(head_bytes: usize, body: SlotBuf, body_bytes: usize) -> Option<Self> {
        (body_bytes <= body.len()).then(|| Self {
            head: AlignedBuf::zeroed(head_bytes),
            body,
            body_bytes,
            tail: AlignedBuf::zeroed(0),
            filled: head_bytes + body_bytes,
        })
    }

    /// Makes a buffer of exactly the first `body_bytes` of a slot, to send or receive. Returns `None` if the slot is
    /// shorter.
    pub fn payload(body: SlotBuf, body_bytes: usize) -> Option<Self> {
        Self::for_read(0, body, body_bytes)
    }

    /// Makes a buffer for writing a header and `used_bytes` of payload, padded to whole pages with zeros.
    ///
    /// The slot's bytes after the payload belong to an earlier block and never reach a file (P8): the last, partly
    /// used page is copied.
    pub fn for_write(head: AlignedBuf, body: SlotBuf, used_bytes: usize) -> Option<Self> {
        let page = BLOCK_ALIGN_BYTES as usize;
        if used_bytes > body.len() {
            return None;
        }
        let rest = used_bytes % page;
        let body_bytes = used_bytes - rest;
        let mut tail = AlignedBuf::zeroed(if rest == 0 { 0 } else { page });
        if rest > 0 {
            body.read_at(body_bytes, &mut tail[..rest]);
        }
        let filled = head.len() + used_bytes;
        Some(Self { head, body, body_bytes, tail, filled })
    }

    /// Makes a buffer for writing a header and a payload of its own, in whole pages.
    pub fn for_write_owned(head: AlignedBuf, payload: AlignedBuf) -> Self {
        let filled = head.len() + payload.len();
        Self { head, body: SlotBuf::anonymous(0), body_bytes: 0, tail: payload, filled }
    }

    /// Returns the header pages.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Returns the slot of the payload.
    pub const fn body(&self) -> &SlotBuf {
        &self.body
    }

    /// Returns the total number of bytes.
    pub fn len(&self) -> usize {
        self.head.len() + self.body_bytes + self.tail.len()
    }

    /// Returns how many bytes of the file a read has brought: all, unless the file is shorter.
    pub const fn filled(&self) -> usize {
        self.filled
    }

    /// Notes how many bytes a read has brought.
    pub fn set_filled(&mut self, bytes: usize) {
        self.filled = bytes.min(self.len());
    }

    /// Returns whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether every piece meets the alignment of O_DIRECT.
    pub fn fits(&self, align: DirectAlign) -> bool {
        self.runs_from(0).iter().all(|run| {
            (run.ptr as usize).is_multiple_of(align.memory_bytes)
                && run.len.is_multiple_of(align.offset_bytes)
        })
    }

    /// Returns the pieces from byte `skip` on, for one vectored read.
    pub fn slices_mut(&mut self, skip: usize) -> SmallVec<[IoSliceMut<'_>; 8]> {
        self.runs_from(skip)
            .into_iter()
            // SAFETY: head and tail are ours, borrowed exclusively; the body is writable by this holder by the
            // contract of `SlotBuf::new`; the pieces do not overlap.
            .map(|run| IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(run.ptr, run.len) }))
            .collect()
    }

    /// Returns the pieces from byte `skip` on, for one vectored write.
    pub fn slices(&self, skip: usize) -> SmallVec<[IoSlice<'_>; 8]> {
        self.runs_from(skip)
            .into_iter()
            // SAFETY: as in `slices_mut`, and only read.
            .map(|run| IoSlice::new(unsafe { std::slice::from_raw_parts(run.ptr, run.len) }))
            .collect()
    }

    /// Returns the pieces from byte `skip` on, for a queue of the kernel that reads into or writes them while this
    /// buffer lives.
    pub(crate) fn pieces(&self, skip: usize) -> Vec<libc::iovec> {
        let piece = |run: MemRun| libc::iovec { iov_base: run.ptr.cast(), iov_len: run.len };
        self.runs_from(skip).into_iter().map(piece).collect()
    }

    /// Inverts one bit, with which `faults` simulates bit rot. Bits past the end are ignored.
    pub fn flip_bit(&mut self, bit: usize) {
        if let Some(run) = self.runs_from(bit / 8).first() {
            // SAFETY: `run` has at least one byte, writable as in `slices_mut`.
            unsafe { *run.ptr ^= 1 << (bit % 8) };
        }
    }

    fn runs_from(&self, skip: usize) -> Runs {
        let mut runs = Runs::new();
        let mut at = 0;
        let head = MemRun { ptr: self.head.as_ptr().cast_mut(), len: self.head.len() };
        let tail = MemRun { ptr: self.tail.as_ptr().cast_mut(), len: self.tail.len() };
        for run in [head].into_iter().chain(self.body.slice(0, self.body_bytes)).chain([tail]) {
            let cut = skip.saturating_sub(at).min(run.len);
            at += run.len;
            if cut < run.len && runs.len() < IO_VECTORS_MAX {
                // SAFETY: `cut < run.len`, so the address stays inside the run.
                runs.push(MemRun { ptr: unsafe { run.ptr.add(cut) }, len: run.len - cut });
            }
        }
        runs
    }
}

// SAFETY: owned memory and a `SlotBuf`, both Send; the raw pointers of the runs are made anew at each call.
unsafe impl Send for IoBuf {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_never_carries_old_bytes() {
        let slot = SlotBuf::anonymous(8192);
        slot.write_at(0, &[7; 8192]);
        let buf = IoBuf::for_write(AlignedBuf::zeroed(4096), slot, 5000).unwrap();
        assert_eq!(buf.len(), 12288);
        let bytes: Vec<u8> = buf.slices(0).iter().flat_map(|s| s.to_vec()).collect();
        assert!(bytes[..4096].iter().all(|&b| b == 0));
        assert!(bytes[4096..9096].iter().all(|&b| b == 7));
        assert!(bytes[9096..].iter().all(|&b| b == 0));
        let rest: usize = buf.slices(4100).iter().map(|s| s.len()).sum();
        assert_eq!(rest, 12288 - 4100);
    }

    #[test]
    fn an_owned_payload_follows_its_header() {
        let mut payload = AlignedBuf::zeroed(3 * 4096);
        payload.fill(7);
        payload.truncate(4096);
        let buf = IoBuf::for_write_owned(AlignedBuf::zeroed(4096), payload);
        assert_eq!((buf.len(), buf.filled()), (8192, 8192));
        let bytes: Vec<u8> = buf.slices(0).iter().flat_map(|s| s.to_vec()).collect();
        assert!(bytes[..4096].iter().all(|&b| b == 0) && bytes[4096..].iter().all(|&b| b == 7));
        assert!(buf.fits(DirectAlign { memory_bytes: 4096, offset_bytes: 4096 }));
    }

    #[test]
    fn a_short_slot_is_refused() {
        assert!(IoBuf::for_read(4096, SlotBuf::anonymous(4096), 4097).is_none());
        assert!(IoBuf::for_write(AlignedBuf::zeroed(0), SlotBuf::anonymous(4096), 4097).is_none());
    }
}

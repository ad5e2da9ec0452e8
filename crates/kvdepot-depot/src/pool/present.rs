//! Tracks which huge pages of a pool exist.
//!
//! An untouched huge page is charged to the process that touches it first: if that process's cgroup or cpuset refuses
//! it, it dies of SIGBUS. So the depot touches a slot's pages before it gives the slot to a client, and remembers that.

use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_core::Result;
use kvdepot_core::runs::Run;

/// A bit for each page, set when the page certainly exists. Pages of a pool never disappear.
#[derive(Debug)]
pub(crate) struct PresentPages {
    words: Box<[AtomicU64]>,
    page_bytes: u64,
    pool_bytes: u64,
}

impl PresentPages {
    /// Makes the bitmap of a pool of which nothing is known.
    pub(crate) fn unknown(pool_bytes: u64, page_bytes: u64) -> Self {
        let words = pool_bytes.div_ceil(page_bytes).div_ceil(64);
        Self { words: (0..words).map(|_| AtomicU64::new(0)).collect(), page_bytes, pool_bytes }
    }

    fn bit(&self, page: u64) -> (&AtomicU64, u64) {
        (&self.words[(page / 64) as usize], 1 << (page % 64))
    }

    fn has(&self, page: u64) -> bool {
        let (word, bit) = self.bit(page);
        word.load(Ordering::Acquire) & bit != 0
    }

    /// Notes that every byte of this range of the pool was touched, so all of its pages exist.
    pub(crate) fn touched(&self, start: u64, len: u64) {
        for page in start / self.page_bytes..(start + len).div_ceil(self.page_bytes) {
            let (word, bit) = self.bit(page);
            word.fetch_or(bit, Ordering::Release);
        }
    }

    /// Populates every page of a run that may be missing. The run lies in the pool. `populate` gets the first byte and
    /// the length of the range to touch.
    pub(crate) fn ensure(&self, run: Run, mut populate: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
        for page in run.offset / self.page_bytes..run.end().div_ceil(self.page_bytes) {
            if !self.has(page) {
                let start = page * self.page_bytes;
                let len = self.page_bytes.min(self.pool_bytes - start);
                populate(start, len)?;
                self.touched(start, len);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::{Error, ErrorKind};

    use super::*;

    const PAGE: u64 = 2 << 20;

    /// Returns the ranges that a run has touched.
    fn ensured(pages: &PresentPages, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let mut touched = Vec::new();
        let populate = |start, len| {
            touched.push((start, len));
            Ok(())
        };
        pages.ensure(Run { offset, len }, populate).unwrap();
        touched
    }

    #[test]
    fn every_page_of_a_run_is_touched_once() {
        let pages = PresentPages::unknown(100 * PAGE + 4096, PAGE);
        assert_eq!(ensured(&pages, 4096, 4096), [(0, PAGE)]);
        assert_eq!(ensured(&pages, 0, PAGE), []);
        assert_eq!(ensured(&pages, PAGE - 4096, 2 * PAGE), [(PAGE, PAGE), (2 * PAGE, PAGE)]);
        assert_eq!(ensured(&pages, 0, 3 * PAGE), []);
        assert_eq!(
            ensured(&pages, 100 * PAGE, 4096),
            [(100 * PAGE, 4096)],
            "the pool ends within its last page"
        );
        pages.touched(63 * PAGE, 2 * PAGE);
        assert_eq!(ensured(&pages, 62 * PAGE, 4 * PAGE), [(62 * PAGE, PAGE), (65 * PAGE, PAGE)]);
    }

    #[test]
    fn a_page_that_could_not_be_populated_is_tried_again() {
        let pages = PresentPages::unknown(4 * PAGE, PAGE);
        let refused = pages.ensure(Run { offset: 0, len: 2 * PAGE }, |start, _| match start {
            0 => Ok(()),
            _ => Err(Error::new(ErrorKind::NoSpace, "refused for a test")),
        });
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(ensured(&pages, 0, 2 * PAGE), [(PAGE, PAGE)]);
    }
}

//! The pool's memory: one tag per page in place of its bytes, and the current users of each page.

use std::collections::BTreeMap;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::runs::Run;

use crate::fail::{Fail, Rule, fail};

/// Content of a page that was never filled.
pub(crate) const POISON: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Page {
    tag: u64,
    writer: Option<u64>,
    readers: u32,
}

/// All pages of a pool, and those of a tier's memory in which blocks are leased.
#[derive(Debug)]
pub(crate) struct Memory {
    pool: Vec<Page>,
    lent: BTreeMap<usize, Page>,
}

/// Returns the pages of a slot, in the order of its bytes.
pub(crate) fn pages(runs: &[Run]) -> Vec<usize> {
    let page = |bytes: u64| (bytes / BLOCK_ALIGN_BYTES) as usize;
    runs.iter().flat_map(|run| page(run.offset)..page(run.end())).collect()
}

impl Memory {
    pub(crate) fn new(pages: usize) -> Self {
        Self { pool: vec![Page { tag: POISON, writer: None, readers: 0 }; pages], lent: BTreeMap::new() }
    }

    fn page(&self, number: usize) -> Page {
        self.pool.get(number).or_else(|| self.lent.get(&number)).copied().expect("bounds are checked")
    }

    fn page_mut(&mut self, number: usize) -> &mut Page {
        let page = self.pool.get_mut(number).or_else(|| self.lent.get_mut(&number));
        page.expect("bounds are checked")
    }

    /// Adds a page in which a tier has leased a part of a block.
    pub(crate) fn lend(&mut self, number: usize, tag: u64) {
        self.lent.insert(number, Page { tag, writer: None, readers: 0 });
    }

    /// The tier uses these pages for something else: nobody may read them.
    pub(crate) fn overwrite(&mut self, runs: &[Run]) -> Result<(), Fail> {
        for number in pages(runs) {
            let readers = self.page(number).readers;
            if readers > 0 {
                return fail(
                    Rule::Owners,
                    format!("page {number} of a tier is used again while {readers} read it"),
                );
            }
            self.lent.remove(&number);
        }
        Ok(())
    }

    /// Forgets all pages of tiers.
    pub(crate) fn forget_lent(&mut self) {
        self.lent.clear();
    }

    fn check_bounds(&self, runs: &[Run]) -> Result<(), Fail> {
        match pages(runs).iter().find(|&&page| page >= self.pool.len() && !self.lent.contains_key(&page)) {
            Some(page) => fail(Rule::Caps, format!("page {page} is outside of the pool")),
            None => Ok(()),
        }
    }

    /// Begins to fill these pages: no other user may access them.
    pub(crate) fn begin_write(&mut self, runs: &[Run], user: u64) -> Result<(), Fail> {
        self.check_bounds(runs)?;
        for number in pages(runs) {
            let page = self.page_mut(number);
            if page.writer.is_some() || page.readers > 0 {
                let (writer, readers) = (page.writer, page.readers);
                return fail(
                    Rule::Owners,
                    format!(
                        "page {number} is given to {user:#x} while {writer:x?} fills and {readers} read it"
                    ),
                );
            }
            page.writer = Some(user);
            page.tag = POISON;
        }
        Ok(())
    }

    pub(crate) fn end_write(&mut self, runs: &[Run], user: u64) {
        for number in pages(runs) {
            let page = self.page_mut(number);
            if page.writer == Some(user) {
                page.writer = None;
            }
        }
    }

    /// Begins to read these pages: nobody may fill them.
    pub(crate) fn begin_read(&mut self, runs: &[Run]) -> Result<(), Fail> {
        self.check_bounds(runs)?;
        for number in pages(runs) {
            let page = self.page_mut(number);
            if let Some(writer) = page.writer {
                return fail(Rule::Owners, format!("page {number} is read while {writer:#x} fills it"));
            }
            page.readers += 1;
        }
        Ok(())
    }

    pub(crate) fn end_read(&mut self, runs: &[Run]) {
        for number in pages(runs) {
            self.page_mut(number).readers -= 1;
        }
    }

    /// Writes like a device, whichever process owns the page.
    pub(crate) fn put(&mut self, page: usize, tag: u64) {
        self.page_mut(page).tag = tag;
    }

    pub(crate) fn tags(&self, runs: &[Run]) -> Vec<u64> {
        pages(runs).into_iter().map(|page| self.page(page).tag).collect()
    }

    pub(crate) fn is_in_use(&self, page: usize) -> bool {
        self.page(page).writer.is_some() || self.page(page).readers > 0
    }

    /// Returns the number of pages in use.
    pub(crate) fn in_use(&self) -> usize {
        self.pool
            .iter()
            .chain(self.lent.values())
            .filter(|page| page.writer.is_some() || page.readers > 0)
            .count()
    }
}

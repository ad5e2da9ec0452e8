//! The pool's memory: one tag per page in place of its bytes, and the current users of each page.

use std::collections::BTreeMap;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::runs::{IN_PLACE_AT, Run};

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
    /// The number of pages of each lease, by its place in the tier's memory.
    leases: BTreeMap<u64, usize>,
    /// Places of leased blocks that the tier has found damaged, or lost, since, and the number of leases granted before.
    damaged: BTreeMap<u64, u64>,
    /// Pages of all leases so far.
    lent_ever: usize,
}

/// Returns the runs of a block that a tier has leased.
fn runs_at(place: u64, pages: usize) -> [Run; 1] {
    [Run { offset: IN_PLACE_AT + place, len: pages as u64 * BLOCK_ALIGN_BYTES }]
}

/// Returns the pages of a slot, in the order of its bytes.
pub(crate) fn pages(runs: &[Run]) -> Vec<usize> {
    let page = |bytes: u64| (bytes / BLOCK_ALIGN_BYTES) as usize;
    runs.iter().flat_map(|run| page(run.offset)..page(run.end())).collect()
}

impl Memory {
    pub(crate) fn new(pages: usize) -> Self {
        let pool = vec![Page { tag: POISON, writer: None, readers: 0 }; pages];
        let (lent, leases) = (BTreeMap::new(), BTreeMap::new());
        Self { pool, lent, leases, damaged: BTreeMap::new(), lent_ever: 0 }
    }

    fn page(&self, number: usize) -> Page {
        self.pool.get(number).or_else(|| self.lent.get(&number)).copied().expect("bounds are checked")
    }

    fn page_mut(&mut self, number: usize) -> &mut Page {
        let page = self.pool.get_mut(number).or_else(|| self.lent.get_mut(&number));
        page.expect("bounds are checked")
    }

    /// A tier leases a block with this content. Returns its place, which no lease had before.
    pub(crate) fn lend(&mut self, tags: Vec<u64>) -> u64 {
        // No block lies at the very beginning of a tier's memory.
        let place = (1 + self.lent_ever) as u64 * BLOCK_ALIGN_BYTES;
        self.lent_ever += tags.len();
        self.leases.insert(place, tags.len());
        let numbers = pages(&runs_at(place, tags.len()));
        let page = |tag| Page { tag, writer: None, readers: 0 };
        self.lent.extend(numbers.into_iter().zip(tags.into_iter().map(page)));
        place
    }

    /// A lease ends, and the tier uses its pages for something else: nobody may read them.
    pub(crate) fn end_lease(&mut self, place: u64) -> Result<(), Fail> {
        let Some(count) = self.leases.remove(&place) else {
            return fail(Rule::Leaks, format!("a lease at {place} ends that was not given, or has ended"));
        };
        for number in pages(&runs_at(place, count)) {
            let readers = self.page(number).readers;
            if readers > 0 {
                return fail(
                    Rule::Owners,
                    format!("page {number} of a tier is used again while {readers} read it"),
                );
            }
            self.lent.remove(&number);
        }
        self.damaged.remove(&place);
        Ok(())
    }

    /// Returns the tag of the first page of every leased block, and its place.
    pub(crate) fn lent(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.leases.keys().map(|&place| (self.page(pages(&runs_at(place, 1))[0]).tag, place))
    }

    /// The tier has found what it leased at these places damaged, after `leases` were granted.
    pub(crate) fn damage(&mut self, places: Vec<u64>, leases: u64) {
        for place in places {
            self.damaged.entry(place).or_insert(leases);
        }
    }

    /// Returns whether the tier had found what it leased there damaged before this lease was granted.
    pub(crate) fn is_damaged(&self, runs: &[Run], lease: u64) -> bool {
        let damaged = |place| self.damaged.get(&place).is_some_and(|&leases| lease > leases);
        runs.iter().filter_map(|run| run.in_place()).any(damaged)
    }

    /// Returns the place of each leased block, and its number of pages.
    pub(crate) fn leased_places(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        self.leases.iter().map(|(&place, &pages)| (place, pages))
    }

    /// Returns the number of leases that a tier has given and that have not ended.
    pub(crate) fn leases(&self) -> usize {
        self.leases.len()
    }

    /// Forgets all leases, with their pages.
    pub(crate) fn forget_lent(&mut self) {
        self.lent.clear();
        self.leases.clear();
        self.damaged.clear();
        self.lent_ever = 0;
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

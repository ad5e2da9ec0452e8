//! The ledger: a depot's record of its pool, written while it serves, in memory that outlives it together with the
//! pool.
//!
//! A record is cleared before its block's disappearance can be noticed or its place reused, and a namespace's new epoch
//! is written before its reset is answered: the runner applies a step's changes under the machine's lock (P1). A record
//! is written when the block's checksum is known; a separate thread computes missing ones (`crate::prover`). The next
//! depot reads it with [`left`].

mod layout;
pub(crate) mod left;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_core::machine::{NamespaceHandle, Opened, Proof, Whole};
use kvdepot_core::{BlockKey, Result};
use parking_lot::{Condvar, Mutex};

use crate::pool::{PoolRegion, SharedWords, region_bytes};
use layout::{
    HEAD_CHECKSUM, HEAD_CLIENTS, HEAD_HOLDS, HEAD_MAGIC, HEAD_NAMESPACES, HEAD_POOL_BYTES, HEAD_RECORDS,
    HEAD_RECORDS_MAX, HEAD_REGIONS, HEAD_REGIONS_CHECKSUM, HEAD_SALT, HEAD_VERSION, MAGIC, NAMESPACE_BYTES,
    NAMESPACE_CHECKSUM, NAMESPACE_EPOCH, NAMESPACE_TEXT, REGIONS_NUMBER, VERSION, checksum, clients_word,
    epoch_word, namespace_at, record_at, record_words, records_max, region_at, region_words, text_checksum,
};

/// Number of blocks that may wait for their checksum. Beyond that the oldest get no record.
const WANTED_MAX: usize = 1 << 20;

/// A ledger being written.
#[derive(Debug)]
pub(crate) struct Ledger {
    words: SharedWords,
    salt: u64,
    records_max: usize,
    numbers: Mutex<Numbers>,
    /// Blocks whose checksum should be computed.
    wanted: Mutex<VecDeque<BlockKey>>,
    bell: Condvar,
    /// Number of blocks taken by the thread that computes checksums.
    in_hand: AtomicUsize,
}

/// The place of each namespace. Handles are not reused, places are.
#[derive(Debug, Default)]
struct Numbers {
    by_handle: HashMap<NamespaceHandle, usize>,
    free: Vec<usize>,
    /// Number of places that were ever used.
    used: usize,
}

impl Numbers {
    /// Returns the place of a namespace, and whether it is new; `None` if all are used.
    fn of(&mut self, handle: NamespaceHandle) -> Option<(usize, bool)> {
        if let Some(&number) = self.by_handle.get(&handle) {
            return Some((number, false));
        }
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.used < NAMESPACES_MAX => {
                self.used += 1;
                self.used - 1
            }
            None => return None,
        };
        self.by_handle.insert(handle, number);
        Some((number, true))
    }

    fn free(&mut self, handle: NamespaceHandle) -> Option<usize> {
        let number = self.by_handle.remove(&handle)?;
        self.free.push(number);
        Some(number)
    }
}

impl Ledger {
    /// Makes an empty ledger for a pool of these regions.
    pub(crate) fn create(regions: &[PoolRegion]) -> Result<Self> {
        let pool_bytes = region_bytes(regions)?;
        let records_max = records_max(pool_bytes);
        let words = SharedWords::create("kvdepot-ledger", record_at(records_max))?;
        let this = Self {
            words,
            salt: kvdepot_io::random::number(),
            records_max,
            numbers: Mutex::default(),
            wanted: Mutex::default(),
            bell: Condvar::new(),
            in_hand: AtomicUsize::new(0),
        };
        let head = [MAGIC, VERSION, pool_bytes, this.salt, records_max as u64];
        for (at, word) in
            [HEAD_MAGIC, HEAD_VERSION, HEAD_POOL_BYTES, HEAD_SALT, HEAD_RECORDS_MAX].into_iter().zip(head)
        {
            this.set(at, word);
        }
        this.set(HEAD_CHECKSUM, checksum(this.salt, 0, &head));
        let regions: Vec<u64> = regions.iter().flat_map(region_words).collect();
        regions.iter().enumerate().for_each(|(n, &word)| this.set(region_at(0) + n, word));
        this.set(HEAD_REGIONS, regions.len() as u64 / 2);
        this.set(HEAD_REGIONS_CHECKSUM, checksum(this.salt, REGIONS_NUMBER, &regions));
        this.set(HEAD_HOLDS, 1);
        Ok(this)
    }

    /// Returns the descriptor, for the keeper.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.words.fd()
    }

    /// Invalidates the ledger, so that nothing can be taken over by it any more.
    pub(crate) fn close(&self) {
        self.set(HEAD_HOLDS, 0);
    }

    fn set(&self, at: usize, word: u64) {
        self.words.words()[at].store(word, Ordering::Release);
    }

    /// Records the number of clients that may copy into or out of the pool.
    pub(crate) fn set_clients(&self, clients: u32) {
        self.set(HEAD_CLIENTS, clients_word(self.salt, clients));
    }

    /// Records a namespace that is new or in another epoch. Call it before the change is visible.
    pub(crate) fn opened(&self, opened: &Opened) {
        let mut numbers = self.numbers.lock();
        let Some((number, is_new)) = numbers.of(opened.handle) else { return };
        let at = namespace_at(number);
        if is_new {
            let text = opened.spec.canonical().as_bytes();
            let words: Vec<u64> = text
                .chunks(8)
                .map(|chunk| {
                    let mut word = [0; 8];
                    word[..chunk.len()].copy_from_slice(chunk);
                    u64::from_le_bytes(word)
                })
                .collect();
            words.iter().enumerate().for_each(|(n, &word)| self.set(at + NAMESPACE_TEXT + n, word));
            self.set(at + NAMESPACE_BYTES, text.len() as u64);
            self.set(at + NAMESPACE_EPOCH, epoch_word(self.salt, number, opened.epoch));
            self.set(at + NAMESPACE_CHECKSUM, text_checksum(self.salt, number, text.len(), &words));
            self.set(HEAD_NAMESPACES, numbers.used as u64);
        } else {
            self.set(at + NAMESPACE_EPOCH, epoch_word(self.salt, number, opened.epoch));
        }
    }

    /// Frees the place of a forgotten namespace for another one. Call it before that one is opened.
    pub(crate) fn forgotten(&self, handle: NamespaceHandle) {
        if let Some(number) = self.numbers.lock().free(handle) {
            self.set(namespace_at(number) + NAMESPACE_CHECKSUM, 0);
        }
    }

    /// Applies a step's changes, under the machine's lock.
    pub(crate) fn apply(&self, proof: Proof) {
        match proof {
            Proof::Gone(slot) => {
                let slot = slot as usize;
                if slot < self.records_max {
                    self.set(record_at(slot), 0);
                }
            }
            Proof::Whole(block) => self.record(&block),
            Proof::Wanted(key) => {
                let mut wanted = self.wanted.lock();
                if wanted.len() >= WANTED_MAX {
                    wanted.pop_front();
                }
                wanted.push_back(key);
                drop(wanted);
                self.bell.notify_one();
            }
        }
    }

    fn record(&self, block: &Whole) {
        let slot = block.slot as usize;
        if slot >= self.records_max {
            return;
        }
        let at = record_at(slot);
        self.set(at, 0);
        let Some(words) = record_words(block) else { return };
        words.iter().enumerate().for_each(|(n, &word)| self.set(at + 1 + n, word));
        let used = &self.words.words()[HEAD_RECORDS];
        if used.load(Ordering::Relaxed) <= slot as u64 {
            used.store(slot as u64 + 1, Ordering::Release);
        }
        self.set(at, checksum(self.salt, slot, &words));
    }

    /// Returns the number of blocks that should get a record and have none yet.
    pub(crate) fn unproven(&self) -> usize {
        let wanted = self.wanted.lock();
        wanted.len() + self.in_hand.load(Ordering::Acquire)
    }

    /// Returns the next blocks whose checksum is wanted, within `wait`. The previous ones are done.
    pub(crate) fn next(&self, count: usize, wait: Duration) -> Vec<BlockKey> {
        let mut wanted = self.wanted.lock();
        self.in_hand.store(0, Ordering::Release);
        if wanted.is_empty() {
            self.bell.wait_for(&mut wanted, wait);
        }
        let count = count.min(wanted.len());
        self.in_hand.store(count, Ordering::Release);
        wanted.drain(..count).collect()
    }

    /// Returns blocks to the queue that could not be done now.
    pub(crate) fn put_back(&self, keys: Vec<BlockKey>) {
        let mut wanted = self.wanted.lock();
        keys.into_iter().rev().for_each(|key| wanted.push_front(key));
        self.in_hand.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;

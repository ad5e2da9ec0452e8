//! What the tier knows of its files, in order of last use.
//!
//! Ordered by time of use and not by a list's links, because files found by the scan bring their recency from disk and
//! must fall between those used since. One map over all namespaces: the cap is common (P5).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hashbrown::HashMap;
use kvdepot_core::BlockKey;

use super::space::Space;

/// Microseconds since 1970, then a number that makes it unique.
type Recency = (u64, u64);

/// One file.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) space: Arc<Space>,
    /// Bytes charged for it.
    pub(super) bytes: u64,
    /// Which of the tier's directories holds it.
    pub(super) directory: usize,
    /// Grows with every insertion: tells a file from its successor of the same key.
    pub(super) generation: u64,
    /// The scan that saw it last.
    pub(super) seen: u64,
    /// When its recency last went to the disk, in milliseconds since 1970.
    pub(super) persisted_ms: u64,
    recency: Recency,
}

impl Entry {
    /// When it was last used.
    pub(super) fn used(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_micros(self.recency.0)
    }
}

/// All files known.
#[derive(Debug, Default)]
pub(super) struct Index {
    entries: HashMap<BlockKey, Entry>,
    order: BTreeMap<Recency, BlockKey>,
    numbers: u64,
    newest_us: u64,
}

impl Index {
    pub(super) fn get(&self, key: &BlockKey) -> Option<&Entry> {
        self.entries.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &BlockKey) -> Option<&mut Entry> {
        self.entries.get_mut(key)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// A number larger than every generation so far.
    pub(super) const fn next_generation(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Adds a file that was not known; `used` of `None` is now.
    pub(super) fn insert(
        &mut self,
        key: BlockKey,
        space: Arc<Space>,
        directory: usize,
        bytes: u64,
        used: Option<SystemTime>,
    ) {
        let generation = self.next_generation();
        let now_us = self.now_us();
        let used_us = used.map_or(now_us, |time| micros(time).min(now_us));
        let recency = (used_us, generation);
        let entry =
            Entry { space, bytes, directory, generation, seen: 0, persisted_ms: used_us / 1000, recency };
        let before = self.entries.insert(key, entry);
        assert!(before.is_none(), "a file was indexed twice: its bytes would be charged twice (P5)");
        self.order.insert(recency, key);
    }

    /// Takes a file out; its bytes stay charged until the caller releases them.
    pub(super) fn remove(&mut self, key: &BlockKey) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.order.remove(&entry.recency);
        Some(entry)
    }

    /// Notes a use, now or at `used`; never makes a file older.
    pub(super) fn touch(&mut self, key: &BlockKey, used: Option<SystemTime>) -> Option<&mut Entry> {
        let now_us = self.now_us();
        let number = self.next_generation();
        let entry = self.entries.get_mut(key)?;
        let used_us = used.map_or(now_us, |time| micros(time).min(now_us));
        if used_us >= entry.recency.0 {
            self.order.remove(&entry.recency);
            entry.recency = (used_us, number);
            self.order.insert(entry.recency, *key);
        }
        Some(entry)
    }

    /// The file that was used longest ago.
    pub(super) fn coldest(&self) -> Option<BlockKey> {
        self.order.first_key_value().map(|(_, key)| *key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&BlockKey, &Entry)> {
        self.entries.iter()
    }

    /// The clock, which never goes back here even if the system's does.
    fn now_us(&mut self) -> u64 {
        self.newest_us = self.newest_us.max(micros(SystemTime::now()));
        self.newest_us
    }
}

fn micros(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

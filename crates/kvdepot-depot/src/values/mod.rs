//! Values of any length under keys of any bytes, in slots of fixed size: one namespace for each size class.
//!
//! There is no directory that could be lost or grow forever. A key's hash is looked up in the classes that hold values:
//! one index lookup each in the pool, and in tiers by what they know. So values are found again after a restart,
//! through any depot with the same tiers. Storing a key again replaces its value in whichever class that was.

mod class;
mod moves;
mod slot;
mod stamps;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use hashbrown::HashSet;
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, Result};
use sha2::{Digest, Sha256};

use crate::direct::{Direct, Now, ReadSlot, Removed};
use crate::locate::Locator;
use crate::message::NamespaceHandle;
use moves::{Moves, Since};

pub use class::VALUE_BYTES_MAX;
pub use slot::{Value, ValueSlot};

/// The prefix of a key when it is hashed.
const KEY_DOMAIN: &[u8] = b"kvdepot value key v1\0";

/// Number of values that a prefix lookup queries at a time.
const PREFIX_BATCH_MAX: usize = 64;

#[derive(Debug)]
struct Class {
    bytes: u64,
    handle: NamespaceHandle,
}

#[derive(Debug)]
struct Shared {
    classes: Vec<Class>,
    /// Knows the current ids of the classes' namespaces, which change with a purge, here or by another depot with the
    /// same tiers.
    locator: Arc<Locator>,
    value_bytes_min: u64,
    has_tiers: bool,
    /// A bit for each class that may have values in this process's pool.
    used: AtomicU64,
    moves: Moves,
    stamp: AtomicU64,
}

impl Shared {
    /// Returns the key in each class of the mask.
    fn keys(&self, hash: BlockHash, mask: u64) -> Vec<BlockKey> {
        let classes = self.classes.iter().enumerate().filter(|(i, _)| mask & 1 << i != 0);
        let ids = self.locator.directory.ids(classes.map(|(_, class)| class.handle));
        ids.into_iter().map(|namespace| BlockKey { namespace, hash }).collect()
    }

    /// Returns the class of keys in this namespace.
    fn index_of(&self, namespace: NamespaceId) -> Option<usize> {
        let handle = self.locator.directory.by_id(namespace)?.handle;
        self.classes.iter().position(|class| class.handle == handle)
    }

    /// Returns the classes that may contain a value: those of the pool, or all if there are tiers.
    fn classes_to_ask(&self) -> u64 {
        if self.has_tiers { u64::MAX } else { self.used.load(Ordering::Acquire) }
    }
}

/// All values of a depot. Clones share them; only [`Values::for_owner`] makes a separate owner.
#[derive(Clone, Debug)]
pub struct Values {
    direct: Direct,
    shared: Arc<Shared>,
}

/// What is known about a value without waiting.
#[derive(Debug)]
pub enum Found {
    /// It is in the pool, and is now leased.
    Here(Value),
    /// It does not exist.
    Absent,
    /// A tier has it or may have it: [`Values::get`] finds out.
    Ask,
}

impl Values {
    /// Opens the classes that fit into the pool. A value takes a slot of at least `value_bytes_min`.
    pub fn open(direct: Direct, pool_bytes: u64, value_bytes_min: u64) -> Result<Self> {
        Self::open_at(direct, pool_bytes, value_bytes_min, SystemTime::now())
    }

    /// Like [`open`](Self::open), at a given time: for tests of clocks that go back.
    pub fn open_at(direct: Direct, pool_bytes: u64, value_bytes_min: u64, now: SystemTime) -> Result<Self> {
        let (mut sizes, mut specs) = (Vec::new(), Vec::new());
        for bytes in class::class_sizes() {
            let spec = class::spec(bytes)?;
            if spec.layout().slot_bytes() > pool_bytes {
                break;
            }
            sizes.push(bytes);
            specs.push(spec.canonical().to_owned());
        }
        let opened = direct.open_namespaces(&specs)?;
        let classes: Vec<Class> =
            sizes.into_iter().zip(opened).map(|(bytes, open)| Class { bytes, handle: open.handle }).collect();
        if classes.is_empty() || classes.len() > 64 {
            return Err(Error::new(ErrorKind::Config, "the pool is too small for values")
                .with("pool_bytes", pool_bytes));
        }
        let since_1970 = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let shared = Shared {
            classes,
            locator: direct.locator(),
            value_bytes_min,
            has_tiers: direct.has_tiers(),
            used: AtomicU64::new(0),
            moves: Moves::default(),
            stamp: AtomicU64::new(stamps::first(&direct, since_1970)),
        };
        Ok(Self { direct, shared: Arc::new(shared) })
    }

    /// Returns the same values for another owner of slots.
    pub fn for_owner(&self, direct: Direct) -> Self {
        Self { direct, shared: Arc::clone(&self.shared) }
    }

    /// Returns a key's hash, under which its value is stored. It is 128 bits of SHA-256, because keys are made by
    /// strangers.
    pub fn hash(key: &[u8]) -> BlockHash {
        let mut hasher = Sha256::new();
        hasher.update(KEY_DOMAIN);
        hasher.update(key);
        let mut hash = [0; 16];
        hash.copy_from_slice(&hasher.finalize()[..16]);
        BlockHash(hash)
    }

    /// Reserves a slot for a value of this length, to be filled and published.
    pub fn reserve(&self, hash: BlockHash, value_bytes: u64) -> Result<ValueSlot> {
        let wanted = value_bytes.max(self.shared.value_bytes_min);
        let index = self.shared.classes.partition_point(|class| class.bytes < wanted);
        let class = self.shared.classes.get(index).or_else(|| {
            // The minimum slot may be larger than the pool allows; the value itself may still fit.
            self.shared.classes.last().filter(|class| class.bytes >= value_bytes)
        });
        let class = class.ok_or_else(|| {
            Error::new(ErrorKind::NoSpace, "a value is larger than the pool can hold")
                .with("value_bytes", value_bytes)
                .with("value_bytes_max", self.value_bytes_max())
        })?;
        let slot = self.direct.reserve_value(class.handle, hash)?;
        // Before the value is visible, so that neither readers nor writers skip its class.
        let bit = self.shared.classes.iter().position(|other| other.bytes == class.bytes).unwrap_or(0);
        self.shared.used.fetch_or(1 << bit, Ordering::Release);
        let stamp = self.shared.stamp.fetch_add(1, Ordering::Relaxed);
        let end = class::End { value_bytes, stamp, hash: hash.0 };
        Ok(ValueSlot::new(slot, bit, end, Arc::clone(&self.shared)))
    }

    /// Returns the size of the largest value that fits.
    pub fn value_bytes_max(&self) -> u64 {
        self.shared.classes.last().map_or(0, |class| class.bytes)
    }

    fn keys(&self, hash: BlockHash, mask: u64) -> Vec<BlockKey> {
        self.shared.keys(hash, mask)
    }

    fn keys_to_ask(&self, hash: BlockHash) -> Vec<BlockKey> {
        self.shared.keys(hash, self.shared.classes_to_ask())
    }

    fn class_of(&self, key: &BlockKey) -> Option<&Class> {
        self.shared.index_of(key.namespace).and_then(|index| self.shared.classes.get(index))
    }

    /// Returns what is known about a value without waiting, leased if it is in the pool.
    pub fn get_now(&self, hash: BlockHash) -> Found {
        let since = self.shared.moves.now();
        if let Some(value) = self.get_in_pool(hash) {
            return Found::Here(value);
        }
        if !self.shared.has_tiers {
            return Found::Absent;
        }
        let all = self.keys(hash, u64::MAX);
        let mut ask = false;
        for (key, now) in all.iter().zip(self.direct.read_now(&all)) {
            match now {
                Now::Here(slot) => {
                    if let Some(value) = self.whole(key, slot) {
                        return Found::Here(value);
                    }
                }
                Now::Ask => ask = true,
                Now::Absent => {}
            }
        }
        if ask {
            return Found::Ask;
        }
        self.get_if_moved(hash, since).map_or(Found::Absent, Found::Here)
    }

    /// Returns a value that was not found, if it may have moved from one class to another since then and is in the
    /// pool.
    fn get_if_moved(&self, hash: BlockHash, since: Since) -> Option<Value> {
        if self.shared.moves.none_since(since) { None } else { self.get_in_pool(hash) }
    }

    /// Returns a value, leased, if it is in the pool.
    fn get_in_pool(&self, hash: BlockHash) -> Option<Value> {
        let used = || self.shared.used.load(Ordering::Acquire);
        let mut mask = used();
        loop {
            let keys = self.keys(hash, mask);
            // One step searches all of these classes: a value moves from one to another before it or after it.
            let slots = self.direct.read_pool(&keys);
            let value = slots.into_iter().find_map(|(index, slot)| self.whole(&keys[index], slot));
            // It may have moved to a class that was empty when this began.
            let now = used();
            if value.is_some() || now == mask {
                return value;
            }
            mask = now;
        }
    }

    /// Returns a value with a valid end record. Any other is removed, and a miss (P1).
    fn whole(&self, key: &BlockKey, slot: ReadSlot) -> Option<Value> {
        let class = self.class_of(key)?;
        match Value::new(slot, class.bytes, key.hash) {
            Ok(value) => Some(value),
            Err(error) => {
                tracing::warn!("a value was dropped: {error}");
                self.direct.remove(&[*key]);
                None
            }
        }
    }

    /// Returns a value, read from tiers within `wait`. Blocks.
    pub fn get(&self, hash: BlockHash, wait: Duration) -> Result<Option<Value>> {
        let deadline = Instant::now() + wait;
        match self.get_now(hash) {
            Found::Here(value) => return Ok(Some(value)),
            Found::Absent => return Ok(None),
            Found::Ask => {}
        }
        let since = self.shared.moves.now();
        let keys = self.keys(hash, u64::MAX);
        let there = self.direct.exist(&keys);
        let mut best: Option<(BlockKey, Value)> = None;
        for (key, _) in keys.into_iter().zip(there).filter(|(_, there)| *there) {
            let Some(class) = self.class_of(&key) else { continue };
            let left = deadline.saturating_duration_since(Instant::now());
            let slot = self.direct.read(class.handle, key.namespace, &[hash], left)?.pop();
            let slot = match slot {
                Some(Ok(slot)) => slot,
                Some(Err(kind)) if kind != ErrorKind::NotFound => {
                    return Err(Error::new(kind, "a value could not be brought up from a tier"));
                }
                _ => continue,
            };
            self.note_used(&key);
            let Some(value) = self.whole(&key, slot) else { continue };
            // Two classes have the key if a crash came between a value and the removal of its predecessor, or if the
            // value was stored again meanwhile: then the content of the older one's class may now be the latest.
            let older = match &best {
                Some((_, other)) if other.stamp() > value.stamp() => Some(key),
                _ => best.replace((key, value)).map(|(older, _)| older),
            };
            if let Some(older) = older.filter(|_| self.shared.moves.none_since(since)) {
                self.direct.remove(&[older]);
            }
        }
        Ok(best.map(|(_, value)| value).or_else(|| self.get_if_moved(hash, since)))
    }

    fn note_used(&self, key: &BlockKey) {
        if let Some(index) = self.shared.index_of(key.namespace) {
            self.shared.used.fetch_or(1 << index, Ordering::Release);
        }
    }

    /// Returns which of these exist, if that is known without waiting.
    pub fn exist_now(&self, hashes: &[BlockHash]) -> Option<Vec<bool>> {
        self.look_for(hashes, |keys| self.direct.exist_now(keys))
    }

    /// Returns which of these exist. Waits for tiers that cannot tell without I/O, within limits.
    pub fn exist(&self, hashes: &[BlockHash]) -> Vec<bool> {
        let there = self.look_for(hashes, |keys| Some(self.direct.exist(keys)));
        there.unwrap_or_else(|| vec![false; hashes.len()])
    }

    /// Returns which of these are in one of their classes, according to `exist` for each class.
    fn look_for(
        &self,
        hashes: &[BlockHash],
        exist: impl FnOnce(&[BlockKey]) -> Option<Vec<bool>>,
    ) -> Option<Vec<bool>> {
        let since = self.shared.moves.now();
        let keys: Vec<Vec<BlockKey>> = hashes.iter().map(|&hash| self.keys_to_ask(hash)).collect();
        let flat: Vec<BlockKey> = keys.iter().flatten().copied().collect();
        let mut there = any_of_each(&keys, &exist(&flat)?);
        if !self.shared.moves.none_since(since) {
            for (there, &hash) in there.iter_mut().zip(hashes) {
                *there = *there || self.get_in_pool(hash).is_some();
            }
        }
        Some(there)
    }

    /// Returns how many leading ones exist. Waits like `exist`. Queries a few at a time, because tiers that cannot tell
    /// without I/O would otherwise be asked about everything after the first miss.
    pub fn prefix(&self, hashes: &[BlockHash]) -> usize {
        let (mut done, mut at_a_time) = (0, 1);
        while done < hashes.len() {
            let next = &hashes[done..hashes.len().min(done + at_a_time)];
            match self.exist(next).iter().position(|there| !there) {
                Some(first) => return done + first,
                None => done += next.len(),
            }
            at_a_time = (at_a_time * 2).min(PREFIX_BATCH_MAX);
        }
        done
    }

    /// Returns whether [`Self::remove`] waits for no other machine.
    pub fn removes_at_once(&self) -> bool {
        self.direct.removes_at_once()
    }

    /// Removes values. Returns how many existed and are gone; those that a tier could not remove do not count.
    pub fn remove(&self, hashes: &[BlockHash]) -> usize {
        let mut seen = HashSet::with_capacity(hashes.len());
        let once = hashes.iter().filter(|&&hash| seen.insert(hash));
        let keys: Vec<Vec<BlockKey>> = once.map(|&hash| self.keys_to_ask(hash)).collect();
        let is_gone = |removed: &Removed| removed.left == 0 && removed.was_there.contains(&true);
        self.direct.remove_each(&keys).iter().filter(|&removed| is_gone(removed)).count()
    }

    /// Returns the number of values in pool and tiers. Walks all of them: for administrators.
    pub fn count(&self) -> Result<u64> {
        let handles: Vec<NamespaceHandle> = self.shared.classes.iter().map(|class| class.handle).collect();
        self.direct.count(&handles)
    }

    /// Makes all values unreachable immediately, in pool and tiers. Returns how many there were.
    pub fn purge(&self) -> Result<u64> {
        let count = self.count()?;
        let handles: Vec<NamespaceHandle> = self.shared.classes.iter().map(|class| class.handle).collect();
        self.direct.reset(&handles)?;
        Ok(count)
    }
}

fn any_of_each(keys: &[Vec<BlockKey>], there: &[bool]) -> Vec<bool> {
    let mut rest = there;
    let each = keys.iter().map(|keys| {
        let (mine, others) = rest.split_at(keys.len());
        rest = others;
        mine.contains(&true)
    });
    each.collect()
}

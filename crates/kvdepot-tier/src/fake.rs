//! A tier in this process's memory, for tests and for users of the library: real bytes, a cap, and no threads.

use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;
use hashlink::LruCache;
use kvdepot_core::limits::SNAPSHOT_HASHES_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result, next_epoch};
use kvdepot_io::SlotBuf;
use parking_lot::Mutex;
use serde_json::Value;

use crate::entry::TierEntry;
use crate::settings::{Fields, Kind, Setting};
use crate::{Done, Fetched, Presence, ReadItem, Tier, TierUsage, WriteItem, Written};

/// The registry's entry of this tier.
pub const ENTRY: TierEntry =
    TierEntry { name: "Fake", open, guards_itself: false, settings: &SETTINGS, for_users: false };

const SETTINGS: [Setting; 1] =
    [Setting { name: "capacity_bytes", kind: Kind::Bytes { max: u64::MAX }, key: None }];

fn open(config: &Value) -> Result<Arc<dyn Tier>> {
    let mut capacity_bytes = 0;
    Fields::new(ENTRY.name, config, &SETTINGS)?.u64("capacity_bytes", &mut capacity_bytes)?;
    Ok(Arc::new(FakeTier::new(capacity_bytes)))
}

#[derive(Debug)]
struct Memory {
    epochs: HashMap<NamespaceId, u32>,
    spaces: HashMap<NamespaceId, Arc<NamespaceSpec>>,
    blocks: LruCache<BlockKey, Block>,
    bytes: u64,
    /// Number of blocks stored so far.
    stored: u64,
}

#[derive(Clone, Debug)]
struct Block {
    bytes: Arc<[u8]>,
    /// How many blocks were stored before it: its position in the list of keys, which no use changes.
    number: u64,
}

/// Keeps blocks in a bounded map. Calls complete before they return.
#[derive(Debug)]
pub struct FakeTier {
    capacity_bytes: u64,
    memory: Mutex<Memory>,
}

impl FakeTier {
    /// Makes a tier for at most `capacity_bytes` of blocks; 0 = no cap.
    pub fn new(capacity_bytes: u64) -> Self {
        let memory = Memory {
            epochs: HashMap::new(),
            spaces: HashMap::new(),
            blocks: LruCache::new_unbounded(),
            bytes: 0,
            stored: 0,
        };
        Self { capacity_bytes, memory: Mutex::new(memory) }
    }

    fn write_now(&self, key: BlockKey, src: &SlotBuf) -> Result<Written> {
        let mut memory = self.memory.lock();
        let block_bytes = memory.block_bytes(&key).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "a block's namespace is not open, or its epoch has passed")
                .with("key", key)
        })?;
        if memory.blocks.get(&key).is_some() {
            return Ok(Written::AlreadyThere);
        }
        if src.len() < block_bytes {
            return Err(small_slot(src));
        }
        let bytes = block_bytes as u64;
        if self.capacity_bytes > 0 && bytes > self.capacity_bytes {
            return Err(Error::new(ErrorKind::Config, "a block is larger than the tier's cap")
                .with("block_bytes", bytes)
                .with("capacity_bytes", self.capacity_bytes));
        }
        while self.capacity_bytes > 0 && memory.bytes + bytes > self.capacity_bytes {
            let Some((_, evicted)) = memory.blocks.remove_lru() else { break };
            memory.bytes -= evicted.bytes.len() as u64;
        }
        let mut copy = vec![0; block_bytes];
        src.read_at(0, &mut copy);
        let number = memory.stored;
        memory.blocks.insert(key, Block { bytes: copy.into(), number });
        memory.bytes += bytes;
        memory.stored += 1;
        Ok(Written::New)
    }
}

fn small_slot(slot: &SlotBuf) -> Error {
    Error::new(ErrorKind::Config, "a slot is smaller than its block").with("slot_bytes", slot.len())
}

fn in_time(deadline: Instant) -> Result<()> {
    if deadline > Instant::now() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Timeout, "the deadline had passed when the call came"))
}

impl Memory {
    /// Returns the length of a block, if its namespace is open in this epoch.
    fn block_bytes(&self, key: &BlockKey) -> Option<usize> {
        let spec = self.spaces.get(&key.namespace)?;
        Some(usize::try_from(spec.layout().block_bytes()).expect("BLOCK_BYTES_MAX fits an address"))
    }

    /// Returns a block's bytes; `None` is a miss.
    fn find(&mut self, key: &BlockKey, dst: &SlotBuf) -> Result<Option<Arc<[u8]>>> {
        match self.block_bytes(key) {
            None => Ok(None),
            Some(block_bytes) if dst.len() < block_bytes => Err(small_slot(dst)),
            Some(_) => Ok(self.blocks.get(key).map(|block| Arc::clone(&block.bytes))),
        }
    }

    fn epoch(&self, spec: &NamespaceSpec) -> u32 {
        self.epochs.get(&spec.root()).copied().unwrap_or(0)
    }

    /// Makes `epoch` the current one and drops the blocks of the one before.
    fn enter(&mut self, spec: &Arc<NamespaceSpec>, epoch: u32) {
        let (old, new) = (spec.id(self.epoch(spec)), spec.id(epoch));
        if old != new {
            let gone: Vec<BlockKey> =
                self.blocks.iter().map(|(key, _)| *key).filter(|key| key.namespace == old).collect();
            for key in gone {
                self.forget(&key);
            }
            self.spaces.remove(&old);
        }
        self.epochs.insert(spec.root(), epoch);
        self.spaces.insert(new, Arc::clone(spec));
    }

    fn forget(&mut self, key: &BlockKey) {
        if let Some(block) = self.blocks.remove(key) {
            self.bytes -= block.bytes.len() as u64;
        }
    }
}

impl Tier for FakeTier {
    fn name(&self) -> &str {
        "fake"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, _deadline: Instant, done: Done<u32>) {
        let mut memory = self.memory.lock();
        let epoch = memory.epoch(spec).max(at_least);
        memory.enter(spec, epoch);
        drop(memory);
        done(Ok(epoch));
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, _deadline: Instant, done: Done<u32>) {
        let mut memory = self.memory.lock();
        let epoch = next_epoch(memory.epoch(spec), at_least);
        if let Ok(epoch) = epoch {
            memory.enter(spec, epoch);
        }
        drop(memory);
        done(epoch);
    }

    /// The blocks stay, but are unreachable.
    fn close_namespace(&self, root: NamespaceId) {
        let mut memory = self.memory.lock();
        memory.spaces.retain(|_, spec| spec.root() != root);
        if memory.epochs.get(&root) == Some(&0) {
            memory.epochs.remove(&root);
        }
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        let memory = self.memory.lock();
        let presence =
            |key| if memory.blocks.contains_key(key) { Presence::Present } else { Presence::Absent };
        out.clear();
        out.extend(keys.iter().map(presence));
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        let count = in_time(deadline).map(|()| {
            let memory = self.memory.lock();
            keys.iter().take_while(|key| memory.blocks.contains_key(*key)).count()
        });
        done(count);
    }

    /// Locks the map once for the batch, and copies the bytes after that.
    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        if let Err(late) = in_time(deadline) {
            return reads.into_iter().for_each(|read| read.end(Err(late.clone())));
        }
        let found: Vec<_> = {
            let mut memory = self.memory.lock();
            reads.iter().map(|read| memory.find(&read.key, &read.dst)).collect()
        };
        for (read, found) in reads.into_iter().zip(found) {
            let outcome = found.map(|bytes| match bytes {
                Some(bytes) => {
                    read.dst.write_at(0, &bytes);
                    Fetched::Whole
                }
                None => Fetched::Miss,
            });
            read.end(outcome);
        }
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        if let Err(late) = in_time(deadline) {
            return writes.into_iter().for_each(|write| write.end(Err(late.clone())));
        }
        for write in writes {
            let outcome = self.write_now(write.key, &write.src);
            write.end(outcome);
        }
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        {
            let mut memory = self.memory.lock();
            keys.iter().for_each(|key| memory.forget(key));
        }
        done(Ok(()));
    }

    fn touch(&self, keys: &[BlockKey]) {
        let mut memory = self.memory.lock();
        for key in keys {
            memory.blocks.get(key);
        }
    }

    fn usage(&self) -> TierUsage {
        let memory = self.memory.lock();
        TierUsage { blocks: memory.blocks.len() as u64, bytes: memory.bytes, bytes_max: self.capacity_bytes }
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        let memory = self.memory.lock();
        let numbered = memory.blocks.iter().map(|(key, block)| (block.number, *key));
        let mut rest: Vec<_> =
            numbered.filter(|(number, key)| *number >= from && key.namespace == namespace).collect();
        drop(memory);
        rest.sort_unstable_by_key(|(number, _)| *number);
        let next = rest.get(SNAPSHOT_HASHES_MAX).map(|(number, _)| *number);
        (rest.into_iter().take(SNAPSHOT_HASHES_MAX).map(|(_, key)| key).collect(), next)
    }

    fn drain(&self, _deadline: Instant) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockLayout;

    use super::*;
    use crate::conformance::{Bench, spec};

    /// The answer to a follower of events has room for one piece, and no more.
    #[test]
    fn keys_come_in_pieces_that_uses_do_not_reorder() {
        const COUNT: u64 = SNAPSHOT_HASHES_MAX as u64 + 10;
        let layout = BlockLayout::new(vec![vec![1]]).unwrap();
        let bench = Bench::with(Arc::new(FakeTier::new(0)), spec("pieces", layout));
        bench.write_all(COUNT);
        let id = bench.spec.id(bench.epoch);
        let (first, next) = bench.tier.keys_from(id, 0);
        assert_eq!(first, bench.keys(SNAPSHOT_HASHES_MAX as u64));
        bench.tier.touch(&bench.keys(1));
        bench.remove(COUNT - 1).unwrap();
        let rest = bench.tier.keys_from(id, next.unwrap());
        assert_eq!(rest, ((COUNT - 10..COUNT - 1).map(|n| bench.key(n)).collect(), None));
    }
}

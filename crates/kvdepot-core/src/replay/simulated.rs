//! A cache without bytes: the depot's eviction order over as many slots as it would have.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::eviction::{EvictionPolicy, Search, SlotId, by_name};

/// Number of slots that one call of a search may examine.
const LOOKS: usize = 1 << 16;

/// The set of blocks that a cache of a given number of slots would hold.
#[derive(Debug)]
pub struct SimulatedCache {
    policy: Box<dyn EvictionPolicy>,
    slots: HashMap<u64, SlotId, FixedState>,
    /// The block in each slot used so far.
    blocks: Vec<u64>,
    free: Vec<SlotId>,
    capacity: usize,
}

impl SimulatedCache {
    /// Makes an empty cache. It takes about 60 bytes of memory for each block that it holds, and none for its capacity.
    pub fn new(policy: &str, capacity: u64) -> Result<Self> {
        let too_large = || {
            Error::new(ErrorKind::Config, "a simulated cache has 1 to 4294967294 blocks")
                .with("blocks", capacity)
        };
        if capacity == 0 || capacity >= u64::from(SlotId::MAX) {
            return Err(too_large());
        }
        Ok(Self {
            policy: by_name(policy)?,
            slots: HashMap::with_hasher(FixedState::default()),
            blocks: Vec::new(),
            free: Vec::new(),
            capacity: usize::try_from(capacity).map_err(|_| too_large())?,
        })
    }

    /// Begins a request, whose blocks are used and stored from the first to the last.
    pub fn begin_request(&mut self) {
        self.policy.begin_row();
    }

    /// Returns whether the block is present.
    pub fn contains(&self, block: u64) -> bool {
        self.slots.contains_key(&block)
    }

    /// Uses a block. Returns whether it is present.
    pub fn touch(&mut self, block: u64) -> bool {
        let slot = self.slots.get(&block).copied();
        if let Some(slot) = slot {
            self.policy.touch(slot);
        }
        slot.is_some()
    }

    /// Stores a block that is not present. Returns the block that was evicted for it.
    pub fn insert(&mut self, block: u64) -> Option<u64> {
        debug_assert!(!self.contains(block), "the block is there already");
        let evicted = if self.slots.len() < self.capacity { None } else { self.evict() };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.blocks.push(block);
            (self.blocks.len() - 1) as SlotId
        });
        self.blocks[slot as usize] = block;
        self.slots.insert(block, slot);
        self.policy.insert(slot, block);
        evicted
    }

    fn evict(&mut self) -> Option<u64> {
        let slot = loop {
            let mut looks = LOOKS;
            match self.policy.victim(&mut looks, &mut |_| true) {
                Search::Found(slot) => break slot,
                Search::Later => {}
                Search::Nothing => return None,
            }
        };
        let block = self.blocks[slot as usize];
        self.forget(block);
        Some(block)
    }

    fn forget(&mut self, block: u64) {
        if let Some(slot) = self.slots.remove(&block) {
            self.policy.remove(slot);
            self.free.push(slot);
        }
    }

    /// Removes all blocks for which this is true.
    pub fn remove(&mut self, is_past: impl Fn(u64) -> bool) {
        let past: Vec<u64> = self.slots.keys().copied().filter(|&block| is_past(block)).collect();
        for block in past {
            self.forget(block);
        }
    }

    /// Returns the capacity in blocks.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of blocks present.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns whether no block is present.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

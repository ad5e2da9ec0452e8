//! Slots by number. They live in chunks, so that adding one never moves the others.

use crate::block::{Block, Phase};
use crate::eviction::SlotId;
use crate::limits::BLOCK_ALIGN_BYTES;
use crate::runs::{Run, Runs};

use super::names::PoolKey;

/// Slots in one chunk.
const CHUNK: usize = 4096;
/// No second at which tiers were told.
pub(crate) const NEVER: u32 = u32::MAX;
/// End of the list of free numbers.
const NIL: SlotId = SlotId::MAX;

/// A set of tiers, one bit for each. A pipeline has at most eight.
pub(crate) type TierMask = u8;

/// Who waits for a block that a tier is reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// A claim, and which of its places.
    Claim { id: u64, place: u32 },
    /// A load, and which of its blocks.
    Load { token: u64, place: u32 },
}

/// A slot's place in the pool. One run, the usual case, takes no memory of its own.
#[derive(Clone, Debug)]
enum Place {
    One { first_page: u32, pages: u32 },
    Many(Box<[Run]>),
}

impl Place {
    fn new(runs: &Runs) -> Self {
        let page = |bytes: u64| u32::try_from(bytes / BLOCK_ALIGN_BYTES).ok();
        if let [run] = runs.as_slice()
            && let (Some(first_page), Some(pages)) = (page(run.offset), page(run.len))
        {
            return Self::One { first_page, pages };
        }
        Self::Many(runs.as_slice().into())
    }

    fn runs(&self) -> Runs {
        match self {
            Self::One { first_page, pages } => {
                let offset = u64::from(*first_page) * BLOCK_ALIGN_BYTES;
                Runs::from_slice(&[Run { offset, len: u64::from(*pages) * BLOCK_ALIGN_BYTES }])
            }
            Self::Many(runs) => runs.iter().copied().collect(),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::One { pages, .. } => u64::from(*pages) * BLOCK_ALIGN_BYTES,
            Self::Many(runs) => runs.iter().map(|run| run.len).sum(),
        }
    }
}

/// One block in the pool.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) key: PoolKey,
    pub(crate) block: Block,
    place: Place,
    /// Tells this use of the slot's number from earlier and later ones.
    pub(crate) serial: u32,
    /// Whether the index names this slot for its key.
    pub(crate) indexed: bool,
    /// Whether a tier fills it, not a client.
    pub(crate) from_tier: bool,
    /// Tiers that are to have the block and have not ended writing it.
    pub(crate) to_write: TierMask,
    /// Tiers that are writing it now.
    pub(crate) writing: TierMask,
    /// Tiers that hold it, as far as they have told.
    pub(crate) saved: TierMask,
    /// Tiers among `to_write` that may do without: their writes do not make the block dirty.
    pub(crate) late: TierMask,
    /// Tiers that could not write it late. They are not asked again before its next use.
    pub(crate) refused: TierMask,
    /// Uses in the pool since it was dumped, the dump itself one of them, or fetched; counted up to two.
    pub(crate) uses: u8,
    /// Whether a tier may have an earlier one under the same key: it is a value, or what was there is being removed.
    pub(crate) value: bool,
    /// Whether a tier could not write it in place of the value before, which that tier may still have.
    pub(crate) unreplaced: bool,
    #[expect(clippy::box_collection, reason = "eight bytes in a slot that nobody waits for")]
    waiters: Option<Box<Vec<Waiter>>>,
    /// When tiers were told last that the block is in use, in seconds.
    pub(crate) touched_s: u32,
    /// CRC-64/NVME of the block's bytes, where somebody computed it already.
    pub(crate) crc64: Option<u64>,
}

/// What a slot counts as. The pool compares it before and after every change, so its totals cannot drift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// A client fills it.
    pub(crate) filling: bool,
    /// A tier fills it.
    pub(crate) fetching: bool,
    /// Sealed, and a tier is still to have it.
    pub(crate) dirty: bool,
    /// At least one reader leases it.
    pub(crate) leased: bool,
    /// No eviction can free it now.
    pub(crate) pinned: bool,
    /// Lookups find it.
    pub(crate) visible: bool,
    /// The eviction policy orders it.
    pub(crate) listed: bool,
}

impl Standing {
    /// What a slot that does not exist counts as.
    pub(crate) const NONE: Self = Self {
        filling: false,
        fetching: false,
        dirty: false,
        leased: false,
        pinned: false,
        visible: false,
        listed: false,
    };
}

impl Slot {
    pub(crate) fn new(key: PoolKey, block: Block, runs: &Runs, serial: u32, indexed: bool) -> Self {
        let from_tier = block.phase() == Phase::Fetching;
        Self {
            key,
            block,
            place: Place::new(runs),
            serial,
            indexed,
            from_tier,
            to_write: 0,
            writing: 0,
            saved: 0,
            late: 0,
            refused: 0,
            uses: u8::from(!from_tier),
            value: false,
            unreplaced: false,
            waiters: None,
            touched_s: NEVER,
            crc64: None,
        }
    }

    pub(crate) fn runs(&self) -> Runs {
        self.place.runs()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.place.bytes()
    }

    pub(crate) fn add_waiter(&mut self, waiter: Waiter) {
        self.waiters.get_or_insert_default().push(waiter);
    }

    pub(crate) fn take_waiters(&mut self) -> Vec<Waiter> {
        self.waiters.take().map_or_else(Vec::new, |waiters| *waiters)
    }

    /// Whether one of these tiers is to have the block before it is evicted, and may still come to it.
    pub(crate) fn owes(&self, tiers: TierMask) -> bool {
        !self.value && tiers & !self.saved & !self.refused != 0
    }

    /// Whether a tier that is to have the block now has not ended writing it.
    pub(crate) fn is_pressing(&self) -> bool {
        self.to_write & !self.late != 0
    }

    /// What the end of a write makes of the block: tiers that may write it late do not keep it dirty.
    pub(crate) fn settle_writes(&mut self) {
        if self.writing == 0 && self.block.is_writing() {
            self.block.write_ended(self.saved != 0);
            if self.is_pressing() {
                self.block.dirty_again();
            }
        } else if self.block.is_dirty() && !self.is_pressing() {
            self.block.seal_clean();
        }
    }

    pub(crate) fn standing(&self) -> Standing {
        let phase = self.block.phase();
        let unsealed = phase != Phase::Sealed;
        Standing {
            filling: unsealed && !self.from_tier,
            fetching: unsealed && self.from_tier,
            dirty: self.block.is_dirty(),
            leased: self.block.leases() > 0,
            pinned: !self.block.is_evictable(),
            visible: self.indexed && self.block.is_readable(),
            listed: !unsealed,
        }
    }
}

#[derive(Clone, Debug)]
enum Entry {
    Free { next: SlotId },
    Used(Slot),
}

/// All slots, by number.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    chunks: Vec<Vec<Entry>>,
    free: SlotId,
    /// Numbers in use or free.
    numbers: usize,
}

impl Slots {
    pub(crate) const fn new() -> Self {
        Self { chunks: Vec::new(), free: NIL, numbers: 0 }
    }

    /// Numbers given out so far, freed ones included: the end of a walk over all slots.
    pub(crate) const fn numbers(&self) -> usize {
        self.numbers
    }

    fn entry(&mut self, id: SlotId) -> &mut Entry {
        &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    /// None when every number is in use.
    pub(crate) fn insert(&mut self, slot: Slot) -> Option<SlotId> {
        let id = if self.free == NIL {
            let id = SlotId::try_from(self.numbers).ok().filter(|&id| id != NIL)?;
            if self.numbers.is_multiple_of(CHUNK) {
                self.chunks.push(Vec::with_capacity(CHUNK));
            }
            self.chunks[id as usize / CHUNK].push(Entry::Used(slot));
            self.numbers += 1;
            id
        } else {
            let id = self.free;
            match std::mem::replace(self.entry(id), Entry::Used(slot)) {
                Entry::Free { next } => self.free = next,
                Entry::Used(_) => unreachable!("the list of free slots names free slots"),
            }
            id
        };
        Some(id)
    }

    pub(crate) fn remove(&mut self, id: SlotId) -> Slot {
        let next = self.free;
        match std::mem::replace(self.entry(id), Entry::Free { next }) {
            Entry::Used(slot) => {
                self.free = id;
                slot
            }
            Entry::Free { .. } => unreachable!("a slot is freed once"),
        }
    }

    pub(crate) fn get(&self, id: SlotId) -> Option<&Slot> {
        match self.chunks.get(id as usize / CHUNK)?.get(id as usize % CHUNK)? {
            Entry::Used(slot) => Some(slot),
            Entry::Free { .. } => None,
        }
    }

    pub(crate) fn at(&self, id: SlotId) -> &Slot {
        self.get(id).expect("a slot id in use names a slot")
    }

    pub(crate) fn at_mut(&mut self, id: SlotId) -> &mut Slot {
        match self.entry(id) {
            Entry::Used(slot) => slot,
            Entry::Free { .. } => unreachable!("a slot id in use names a slot"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::names::SpaceId;
    use super::*;
    use crate::key::BlockHash;

    fn slot(hash: u8) -> Slot {
        let key = PoolKey { space: SpaceId(0), hash: BlockHash([hash; 16]) };
        let runs = Runs::from_slice(&[Run { offset: 4096 * u64::from(hash), len: 8192 }]);
        Slot::new(key, Block::dumping(1), &runs, 0, true)
    }

    #[test]
    fn numbers_are_used_again_and_name_one_slot() {
        let mut slots = Slots::new();
        let ids: Vec<SlotId> = (0..4).map(|hash| slots.insert(slot(hash)).unwrap()).collect();
        assert_eq!(slots.remove(ids[1]).key.hash, BlockHash([1; 16]));
        assert!(slots.get(ids[1]).is_none());
        assert_eq!(slots.insert(slot(9)), Some(ids[1]));
        assert_eq!((slots.at(ids[1]).key.hash.0[0], slots.numbers()), (9, 4));
    }

    #[test]
    fn a_slot_of_one_run_keeps_it_exactly() {
        let one = slot(3);
        assert_eq!(one.runs().as_slice(), &[Run { offset: 12288, len: 8192 }]);
        assert_eq!(one.bytes(), 8192);
        let runs = Runs::from_slice(&[Run { offset: 0, len: 4096 }, Run { offset: 1 << 40, len: 4096 }]);
        let many = Slot::new(one.key, Block::fetching(), &runs, 1, true);
        assert_eq!((many.runs(), many.bytes()), (runs, 8192));
    }
}

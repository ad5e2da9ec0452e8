//! Slots by number. They are stored in chunks, so adding one never moves the others.

use std::num::NonZeroU64;

use crate::block::{Block, Phase};
use crate::eviction::SlotId;
use crate::limits::BLOCK_ALIGN_BYTES;
use crate::runs::{IN_PLACE_AT, Run, Runs};

use super::names::PoolKey;
use super::tiers::{TierIndex, TierMask, TierSet};

/// Slots in one chunk.
const CHUNK: usize = 4096;
/// No time of a report. Seconds count up to it and wrap around.
const NEVER: u16 = u16::MAX;
/// End of the list of free numbers.
const NIL: SlotId = SlotId::MAX;

/// A waiter for a block that a tier is reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// A claim, the index of its place, and where its blocks may come from.
    Claim { id: u64, place: u32, tiers: TierSet },
    /// A load, and the index of its block.
    Load { token: u64, place: u32 },
}

impl Waiter {
    /// Returns the tiers that may deliver the block.
    const fn tiers(&self) -> TierSet {
        match self {
            Self::Claim { tiers, .. } => *tiers,
            Self::Load { .. } => TierSet::ALL,
        }
    }
}

/// One block in the pool. There are millions of them, so rarely used fields are in `Rare`.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) key: PoolKey,
    /// Distinguishes this use of the slot's number from earlier and later ones.
    pub(crate) serial: u32,
    pub(crate) block: Block,
    rare: Option<Box<Rare>>,
    /// CRC-64/NVME of the block's bytes, if it was computed. A checksum of 0 counts as unknown.
    crc64: Option<NonZeroU64>,
    /// The slot's memory in the pool, if it is one run that these two fields can express; otherwise it is in `rare`.
    first_page: u32,
    pages: u32,
    /// Time at which tiers last learned that the block is in use, in seconds below `NEVER`.
    touched_s: u16,
    /// Tiers that should get the block and have not completed writing it.
    pub(crate) to_write: TierMask,
    /// Tiers that are writing it.
    pub(crate) writing: TierMask,
    /// Tiers that have it, as far as they have reported.
    pub(crate) saved: TierMask,
    /// Tiers in `to_write` with late writes, which do not make the block dirty.
    pub(crate) late: TierMask,
    /// Tiers that failed to write it late. They are not asked again before its next use.
    pub(crate) refused: TierMask,
    /// Bit set of `INDEXED` and the other marks.
    marks: u8,
}

/// Fields that few slots need.
#[derive(Clone, Debug, Default)]
struct Rare {
    waiters: Vec<Waiter>,
    /// The memory of a slot with several runs.
    runs: Box<[Run]>,
}

/// The index names this slot for its key.
const INDEXED: u8 = 1;
/// A tier fills it, not a client.
const FROM_TIER: u8 = 2;
/// It is a value, and a tier may have an earlier one under the same key.
const VALUE: u8 = 4;
/// A tier failed to write it in place of the earlier value, which that tier may still have.
const UNREPLACED: u8 = 8;
/// It was used in the pool: a dump is a use, a fetch is not.
const USED: u8 = 16;
/// It was used again since.
const USED_AGAIN: u8 = 32;
/// It takes no memory of the pool: a tier leases the block where it lies.
const IN_PLACE: u8 = 64;
/// It was leased there ahead of a load, and nobody has used it since.
const AHEAD: u8 = 128;

/// How a slot counts. The pool compares it before and after every change, so its totals cannot drift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// A client fills it.
    pub(crate) filling: bool,
    /// A tier fills it.
    pub(crate) fetching: bool,
    /// Sealed, and a tier has yet to get it.
    pub(crate) dirty: bool,
    /// Leased by at least one reader.
    pub(crate) leased: bool,
    /// It cannot be evicted at the moment.
    pub(crate) pinned: bool,
    /// Lookups find it.
    pub(crate) visible: bool,
    /// The eviction policy orders it.
    pub(crate) listed: bool,
}

impl Standing {
    /// The counts of a slot that does not exist.
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
        let page = |bytes: u64| u32::try_from(bytes / BLOCK_ALIGN_BYTES).ok();
        let one = match runs.as_slice() {
            [run] => page(run.offset).zip(page(run.len)).filter(|(_, pages)| *pages > 0),
            _ => None,
        };
        let rare = one.is_none().then(|| Box::new(Rare { runs: runs.as_slice().into(), ..Rare::default() }));
        let (first_page, pages) = one.unwrap_or_default();
        let mut slot = Self {
            key,
            serial,
            rare,
            crc64: None,
            first_page,
            pages,
            touched_s: NEVER,
            to_write: 0,
            writing: 0,
            saved: 0,
            late: 0,
            refused: 0,
            marks: 0,
            block,
        };
        slot.mark(INDEXED, indexed);
        let from_tier = slot.block.phase() == Phase::Fetching;
        slot.mark(FROM_TIER, from_tier);
        slot.mark(USED, !from_tier);
        slot
    }

    const fn has(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    const fn mark(&mut self, mark: u8, on: bool) {
        self.marks = if on { self.marks | mark } else { self.marks & !mark };
    }

    /// Returns whether the index names this slot for its key.
    pub(crate) const fn is_indexed(&self) -> bool {
        self.has(INDEXED)
    }

    pub(crate) const fn set_indexed(&mut self, indexed: bool) {
        self.mark(INDEXED, indexed);
    }

    /// Returns whether a tier fills it, not a client.
    pub(crate) const fn is_from_tier(&self) -> bool {
        self.has(FROM_TIER)
    }

    /// Returns whether it is a value; a tier may have an earlier one under the same key.
    pub(crate) const fn is_value(&self) -> bool {
        self.has(VALUE)
    }

    pub(crate) const fn set_value(&mut self, value: bool) {
        self.mark(VALUE, value);
    }

    /// Returns whether a tier failed to write it in place of the earlier value, which that tier may still have.
    pub(crate) const fn is_unreplaced(&self) -> bool {
        self.has(UNREPLACED)
    }

    pub(crate) const fn set_unreplaced(&mut self, unreplaced: bool) {
        self.mark(UNREPLACED, unreplaced);
    }

    /// Makes a slot of `bytes` for a block that a tier is to lease where it lies.
    pub(crate) fn in_place(key: PoolKey, bytes: u64, serial: u32, indexed: bool) -> Self {
        // Offset 0 of a tier's memory holds no block: this one has no place yet.
        let nowhere = Runs::from_slice(&[Run { offset: IN_PLACE_AT, len: bytes }]);
        let mut slot = Self::new(key, Block::fetching(), &nowhere, serial, indexed);
        slot.mark(IN_PLACE, true);
        slot
    }

    /// Returns whether it takes no memory of the pool, because a tier leases the block where it lies.
    pub(crate) const fn is_in_place(&self) -> bool {
        self.has(IN_PLACE)
    }

    /// Returns whether it was leased in place ahead of a load, and nobody has used it since.
    pub(crate) const fn is_ahead(&self) -> bool {
        self.has(AHEAD)
    }

    pub(crate) const fn set_ahead(&mut self, ahead: bool) {
        self.mark(AHEAD, ahead);
    }

    /// Sets where its block lies: in the memory of a tier, or in the pool.
    pub(crate) fn set_place(&mut self, runs: &Runs, in_place: bool) {
        let moved = Self::new(self.key, Block::fetching(), runs, self.serial, false);
        (self.first_page, self.pages) = (moved.first_page, moved.pages);
        match (moved.rare, &mut self.rare) {
            (Some(moved), Some(rare)) => rare.runs = moved.runs,
            (None, Some(rare)) => rare.runs = Box::default(),
            (moved, rare @ None) => *rare = moved,
        }
        self.mark(IN_PLACE, in_place);
    }

    /// Returns the offset at which a tier has leased the block, if it has.
    pub(crate) fn leased_at(&self) -> Option<u64> {
        let at = self.is_in_place().then(|| self.first_byte() - IN_PLACE_AT);
        at.filter(|&at| at > 0)
    }

    /// Returns the number of bytes of the pool that it takes.
    pub(crate) fn pool_bytes(&self) -> u64 {
        if self.is_in_place() { 0 } else { self.bytes() }
    }

    /// Counts a use. Returns whether it is the second one.
    pub(crate) const fn count_use(&mut self) -> bool {
        let second = self.has(USED) && !self.has(USED_AGAIN);
        self.mark(USED_AGAIN, self.has(USED));
        self.mark(USED, true);
        second
    }

    /// Makes its dump not count as a use.
    pub(crate) const fn set_unused(&mut self) {
        self.mark(USED, false);
    }

    /// Returns whether it was used at least twice since it was dumped (the dump counts) or fetched.
    pub(crate) const fn is_used_again(&self) -> bool {
        self.has(USED_AGAIN)
    }

    /// Records that tiers learn, or know, of its use now.
    pub(crate) const fn tell_use(&mut self, now_s: u32) {
        self.touched_s = (now_s % NEVER as u32) as u16;
    }

    /// Returns whether tiers learned of a use less than `interval_s` ago. After 18 hours it may wrongly return true
    /// again, for as long.
    pub(crate) const fn was_told(&self, now_s: u32, interval_s: u32) -> bool {
        let period = NEVER as u32;
        let ago = (now_s % period + period - self.touched_s as u32) % period;
        self.touched_s != NEVER && ago < interval_s
    }

    /// Returns the CRC-64/NVME of the block's bytes, if known.
    pub(crate) fn crc64(&self) -> Option<u64> {
        self.crc64.map(NonZeroU64::get)
    }

    pub(crate) const fn set_crc64(&mut self, crc64: u64) {
        self.crc64 = NonZeroU64::new(crc64);
    }

    fn rare_runs(&self) -> &[Run] {
        self.rare.as_ref().map_or(&[], |rare| &rare.runs)
    }

    pub(crate) fn runs(&self) -> Runs {
        if self.pages == 0 {
            return self.rare_runs().iter().copied().collect();
        }
        let offset = u64::from(self.first_page) * BLOCK_ALIGN_BYTES;
        Runs::from_slice(&[Run { offset, len: self.bytes() }])
    }

    /// Returns the offset of its first byte, which determines the slot's region.
    pub(crate) fn first_byte(&self) -> u64 {
        match self.rare_runs().first() {
            Some(run) if self.pages == 0 => run.offset,
            _ => u64::from(self.first_page) * BLOCK_ALIGN_BYTES,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        if self.pages == 0 {
            return self.rare_runs().iter().map(|run| run.len).sum();
        }
        u64::from(self.pages) * BLOCK_ALIGN_BYTES
    }

    pub(crate) fn add_waiter(&mut self, waiter: Waiter) {
        self.rare.get_or_insert_default().waiters.push(waiter);
    }

    pub(crate) fn has_waiters(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| !rare.waiters.is_empty())
    }

    /// Returns the tiers that may deliver the block to one of its waiters.
    pub(crate) fn waited_for_from(&self) -> TierSet {
        let waiters = self.rare.iter().flat_map(|rare| &rare.waiters);
        waiters.fold(TierSet::NONE, |tiers, waiter| tiers.or(waiter.tiers()))
    }

    /// Takes the waiters to which this tier may not deliver the block.
    pub(crate) fn take_waiters_without(&mut self, tier: TierIndex) -> Vec<Waiter> {
        let Some(rare) = &mut self.rare else { return Vec::new() };
        rare.waiters.extract_if(.., |waiter| !waiter.tiers().has(tier)).collect()
    }

    pub(crate) fn take_waiters(&mut self) -> Vec<Waiter> {
        let waiters = self.rare.as_mut().map_or_else(Vec::new, |rare| std::mem::take(&mut rare.waiters));
        self.rare.take_if(|rare| rare.runs.is_empty());
        waiters
    }

    /// Returns whether one of these tiers should get the block before it is evicted, and still can.
    pub(crate) fn owes(&self, tiers: TierMask) -> bool {
        !self.is_value() && tiers & !self.saved & !self.refused != 0
    }

    /// Returns whether a tier that must get the block now, not late, has not completed writing it.
    pub(crate) fn is_pressing(&self) -> bool {
        self.to_write & !self.late != 0
    }

    /// Updates the block after the end of a write: tiers with late writes do not keep it dirty.
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
            filling: unsealed && !self.is_from_tier(),
            fetching: unsealed && self.is_from_tier(),
            dirty: self.block.is_dirty(),
            leased: self.block.leases() > 0,
            pinned: !self.block.is_evictable(),
            visible: self.is_indexed() && self.block.is_readable(),
            listed: !unsealed && !self.is_in_place(),
        }
    }
}

#[derive(Clone, Debug)]
enum Entry {
    Free { next: SlotId },
    Used(Slot),
}

// Together with index, eviction order and presence index this makes up the 128 bytes per block of `tests/index_size`.
const _: () = assert!(size_of::<Entry>() == 72);

/// All slots, by number.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    chunks: Vec<Vec<Entry>>,
    free: SlotId,
    /// Number of numbers, in use or free.
    numbers: usize,
    /// Number of slot accesses.
    #[cfg(test)]
    looks: std::cell::Cell<u64>,
}

impl Slots {
    pub(crate) const fn new() -> Self {
        Self {
            chunks: Vec::new(),
            free: NIL,
            numbers: 0,
            #[cfg(test)]
            looks: std::cell::Cell::new(0),
        }
    }

    /// Returns the count of numbers handed out so far, including freed ones: the end of a walk over all slots.
    pub(crate) const fn numbers(&self) -> usize {
        self.numbers
    }

    fn looked(&self) {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
        let _ = self;
    }

    #[cfg(test)]
    pub(crate) const fn looks(&self) -> u64 {
        self.looks.get()
    }

    fn entry(&mut self, id: SlotId) -> &mut Entry {
        self.looked();
        &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    /// Returns `None` if every number is in use.
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
        self.looked();
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
        assert_eq!((many.runs(), many.bytes()), (runs.clone(), 8192));
        let far = Runs::from_slice(&[Run { offset: 1 << 50, len: 8192 }]);
        let far = Slot::new(one.key, Block::fetching(), &far, 2, true);
        assert_eq!((far.runs().as_slice(), far.bytes()), (&[Run { offset: 1 << 50, len: 8192 }][..], 8192));
    }

    #[test]
    fn who_waits_for_a_slot_does_not_cost_it_its_place() {
        let many = Runs::from_slice(&[Run { offset: 0, len: 4096 }, Run { offset: 1 << 20, len: 4096 }]);
        let many = Slot::new(slot(1).key, Block::fetching(), &many, 1, true);
        for mut slot in [slot(3), many] {
            let runs = slot.runs();
            let (load, tiers) = (Waiter::Load { token: 1, place: 2 }, TierSet::ALL);
            let waiters = [load, Waiter::Claim { id: 3, place: 4, tiers }];
            waiters.iter().for_each(|&waiter| slot.add_waiter(waiter));
            assert_eq!((slot.runs(), slot.take_waiters()), (runs.clone(), waiters.to_vec()));
            assert_eq!((slot.runs(), slot.take_waiters()), (runs, Vec::new()));
        }
    }
}

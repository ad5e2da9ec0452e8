//! Dumps: slots reserved, filled and sealed, and values that take the place of others.

use smallvec::SmallVec;

use super::batch::REQUEST_BLOCKS;
use super::event::{Effects, Leased, NamespaceHandle, Outcome, Owner, Reply, Reserve, ShardSet};
use super::flaw::Flaw;
use super::names::PoolKey;
use super::pool::NoRoom;
use super::{Location, Machine, Namespace};
use crate::block::Block;
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;
use crate::key::{BlockKey, NamespaceId};
use crate::lease::LeaseId;
use crate::misses::Fate;
use crate::priority::Priority;

/// Seconds after which a block that a client is filling may be dumped by another one: longer than a task of a client in order
/// takes, so that only one of them copies it.
const FILL_PATIENCE_S: u32 = 60;

/// Whether the pool has a block that a client would dump.
enum Had {
    No,
    Yes,
    /// A client has been filling this slot with it for so long that it may never complete it.
    FilledLate(SlotId),
}

impl Machine {
    #[expect(clippy::too_many_arguments, reason = "the fields of the request")]
    pub(super) fn reserve(
        &mut self,
        owner: Owner,
        namespace: NamespaceHandle,
        id: Option<NamespaceId>,
        hashes: &[crate::BlockHash],
        how: Reserve,
        runs_max: usize,
        out: &mut Effects,
    ) -> Result<Reply> {
        self.note_near(owner, namespace);
        let namespace = self.catalog.get_as(namespace, id)?.clone();
        if how.is_value() && namespace.provisional {
            // A tier may have an earlier value, which would be found again when the namespace moves to its epoch (P1).
            return Err(Error::new(
                ErrorKind::Unavailable,
                "a tier has not answered about a namespace of values yet",
            ));
        }
        self.pool.seen(owner);
        let mut runs_left = runs_max;
        let mut outcomes = Vec::with_capacity(hashes.len());
        // Blocks of a namespace are of one size: where one finds no room, the next does not either.
        let mut full = None;
        let mut filling = 0;
        let keys: SmallVec<[(PoolKey, u64); REQUEST_BLOCKS]> = hashes
            .iter()
            .map(|&hash| {
                let key = namespace.pool_key(hash);
                (key, self.pool.hash(&key))
            })
            .collect();
        self.pool.prefetch(keys.iter().map(|&(_, hash)| hash));
        for (key, hash) in keys {
            let had =
                if how.is_value() { Had::No } else { self.has_for_dump(&key, hash, how.priority(), out) };
            if matches!(had, Had::Yes) {
                self.counters.dump_blocks_had += 1;
                outcomes.push(Outcome::Have);
                continue;
            }
            // Where the answer is full, the client asks for the rest again.
            let is_final = runs_left > 0;
            if let Some(kind) = full {
                self.counters.dump_blocks_dropped += 1;
                if is_final {
                    self.pool.went(key, Fate::Dropped, None);
                }
                outcomes.push(Outcome::Refused(kind));
                continue;
            }
            if let Had::FilledLate(slot) = had {
                self.pool.unname(slot);
            }
            let reserved = self.reserve_one(owner, &namespace, (key, hash), how, runs_left);
            if let Had::FilledLate(slot) = had {
                if reserved.is_ok() {
                    self.pool.supersede(slot);
                } else {
                    // Nobody has it otherwise.
                    self.pool.name(slot);
                }
            }
            outcomes.push(match reserved {
                Ok(leased) => {
                    filling += namespace.slot_bytes();
                    runs_left -= leased.runs.len().min(runs_left);
                    Outcome::Leased(leased)
                }
                Err(NoRoom::Later) => break,
                Err(NoRoom::Full(error)) => {
                    full = Some(error.kind());
                    self.counters.dump_blocks_dropped += 1;
                    if is_final {
                        self.pool.went(key, Fate::Dropped, None);
                    }
                    self.counters.failed("dump", &error);
                    Outcome::Refused(error.kind())
                }
            });
        }
        self.pool.filling_begun(owner, filling);
        self.counters.dump_blocks += outcomes.len() as u64;
        Ok(Reply::Slots(outcomes))
    }

    /// Returns whether a block need not be dumped. If a tier or another client is late with it, it is not waited for: the caller
    /// has it.
    fn has_for_dump(&mut self, key: &PoolKey, hash: u64, priority: Priority, out: &mut Effects) -> Had {
        let Some(slot) = self.pool.find_kept_hashed(key, hash) else { return Had::No };
        if self.is_filled_late(slot) {
            return Had::FilledLate(slot);
        }
        let Some(tier) = self.flow.late_reader(&self.pool, slot) else {
            self.pool.raise_priority(slot, priority);
            return Had::Yes;
        };
        self.give_up_read(tier, slot, out);
        // It may have been a copy of a block that lies in a tier's memory.
        if self.pool.find_kept_hashed(key, hash).is_some() { Had::Yes } else { Had::No }
    }

    /// Returns whether a client has been filling a slot for so long that it may never complete it.
    fn is_filled_late(&self, slot: SlotId) -> bool {
        self.pool.slot(slot).standing().filling
            && self.pool.age_s(slot).is_none_or(|age_s| age_s > FILL_PATIENCE_S)
    }

    fn reserve_one(
        &mut self,
        owner: Owner,
        namespace: &Namespace,
        key: (PoolKey, u64),
        how: Reserve,
        runs_left: usize,
    ) -> std::result::Result<Leased, NoRoom> {
        let layout = namespace.spec.layout();
        let bytes = layout.slot_bytes();
        if runs_left == 0 {
            return Err(NoRoom::Full(Error::new(
                ErrorKind::Busy,
                "too many pieces for one answer: ask for the rest again",
            )));
        }
        if how.is_limited() {
            self.pool.may_fill(bytes).map_err(NoRoom::Full)?;
        }
        if self.flow.has_tiers() {
            self.pool.may_dirty(bytes).map_err(NoRoom::Full)?;
        }
        let shards = if how.is_value() { 1 } else { layout.shard_count() };
        let (indexed, near) = (!how.is_value(), namespace.near);
        let slot = self.pool.insert_hashed(key, Block::dumping(shards), bytes, indexed, near)?;
        if how.is_value() {
            self.pool.edit(slot, |slot| slot.set_value(true));
        }
        self.pool.set_priority(slot, how.priority());
        match self.pool.lease_for_filling(owner, slot) {
            Ok(lease) => {
                let (runs, block_bytes) = (self.pool.slot(slot).runs(), layout.block_bytes());
                Ok(Leased { lease, slot, runs, block_bytes, crc64: None })
            }
            Err(error) => {
                self.pool.abandon(slot);
                Err(NoRoom::Full(error))
            }
        }
    }

    pub(super) fn commit(
        &mut self,
        owner: Owner,
        leases: &[LeaseId],
        shards: &ShardSet,
        crc64: Option<u64>,
    ) -> Result<()> {
        let mut filled = 0;
        let outcome =
            leases.iter().try_for_each(|&lease| self.commit_one(owner, lease, shards, crc64, &mut filled));
        self.pool.filling_ended(owner, filled);
        outcome
    }

    /// Commits shards of one block. Adds its bytes to `filled` if that seals it.
    fn commit_one(
        &mut self,
        owner: Owner,
        lease: LeaseId,
        shards: &ShardSet,
        crc64: Option<u64>,
        filled: &mut u64,
    ) -> Result<()> {
        let slot = self.pool.leased_slot(owner, lease)?;
        let has_tiers = self.flow.has_tiers();
        let (sealed, outcome) = self.pool.edit(slot, |slot| {
            if let Some(crc64) = crc64 {
                slot.set_crc64(crc64);
            }
            let mut sealed = false;
            let outcome = match shards {
                ShardSet::All => slot.block.all_filled().map(|last| sealed = last),
                ShardSet::Some(some) => some.iter().try_for_each(|&shard| {
                    sealed |= slot.block.shard_filled(shard as usize)?;
                    Ok(())
                }),
            };
            if sealed && !has_tiers {
                slot.block.seal_clean();
            }
            (sealed, outcome)
        });
        if sealed {
            *filled += self.pool.forget_lease(owner, lease)?;
            self.counters.dump_blocks_sealed += 1;
            if has_tiers {
                self.sealed(slot, false);
            } else {
                self.pool.free_if_over(slot);
            }
        }
        // A shard that does not exist may follow the one that sealed the block.
        outcome
    }

    /// A block's last shard came: visible from now on, and queued for the tiers.
    fn sealed(&mut self, slot: SlotId, replaces: bool) {
        let (readable, space) = (self.pool.slot(slot).block.is_readable(), self.pool.slot(slot).key.space);
        let is_low = self.pool.priority(slot) == Priority::Low && !self.pool.slot(slot).is_value();
        if is_low && !self.flow.flaws.has(Flaw::LowPriorityWritten) {
            // No tier is asked before its first use, except one that gets what another evicts: the other has the block
            // from somebody else.
            let tiers = self.flow.all() & !self.flow.placements.demotion;
            self.pool.edit(slot, |slot| {
                slot.refused = tiers;
                slot.set_unused();
            });
        }
        if readable && self.flow.has_tiers() && !self.catalog.stays_in_pool(space) {
            self.flow.write(&mut self.pool, slot, replaces);
        } else {
            self.pool.edit(slot, |slot| slot.block.seal_clean());
        }
        self.pool.free_if_over(slot);
    }

    pub(super) fn publish(
        &mut self,
        owner: Owner,
        lease: LeaseId,
        others: &[BlockKey],
        out: &mut Effects,
    ) -> Result<Reply> {
        let slot = self.pool.leased_slot(owner, lease)?;
        let sealed = self.pool.edit(slot, |slot| slot.block.all_filled());
        let filled = self.pool.forget_lease(owner, lease)?;
        self.pool.filling_ended(owner, filled);
        let space = self.pool.slot(slot).key.space;
        // A tier that has not answered may have an earlier value, which would come back with the namespace's epoch.
        let live = self.catalog.is_live(space) && !self.catalog.is_provisional(space);
        if !sealed? || !live || !self.pool.slot(slot).block.is_readable() {
            self.pool.doom(slot);
            return Err(Error::new(
                ErrorKind::NotFound,
                "the namespace of a value was reset, or a tier has not answered about it",
            ));
        }
        for other in others {
            if let Some(key) = self.catalog.pool_key(other) {
                let tell = self.forget(key, Location::Unknown);
                if tell {
                    self.flow.remove(&self.catalog, key, None, out);
                }
            }
        }
        if let Some(old) = self.pool.name(slot) {
            self.flow.displace(&mut self.pool, old);
        }
        // Whatever it was reserved as: no tier may keep what was under its key.
        self.pool.edit(slot, |slot| slot.set_value(true));
        self.counters.dump_blocks_sealed += 1;
        self.sealed(slot, true);
        Ok(Reply::Done)
    }
}

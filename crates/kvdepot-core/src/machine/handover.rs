//! Handover of a pool: how one depot's machine describes its slots, and how the machine of another depot adopts them.
//!
//! The old machine is frozen and has settled: no tier reads into a slot, no key waits for a tier, and every lease
//! belongs to a client that is named as a holder. A holder may still copy, so its slots stay leased at the new machine
//! until its copies have ended (P4). Only sealed blocks that lookups found are handed over as blocks (P1), under the
//! namespace id that they were sealed under. The new machine adopts those whose id is current there.

use hashbrown::HashSet;

use super::Machine;
use super::flaw::Flaw;
use super::held::{HeldBy, HeldFrom, Hold};
use super::names::{PoolKey, SpaceId};
use super::records::{Adopt, Handed, HandedState, Owner};
use super::tiers::TierMask;
use crate::block::Block;
use crate::eviction::SlotId;
use crate::key::{BlockHash, NamespaceId};
use crate::lease::LeaseId;
use crate::priority::Priority;

/// A key that belongs to no block: no namespace's space has this number.
const NOBODYS: PoolKey = PoolKey { space: SpaceId(0), hash: BlockHash([0; 16]) };

impl Machine {
    /// Returns why a frozen machine cannot be handed over yet, if so. `holders` are the connections that may still
    /// copy.
    pub fn unsettled(&self, holders: &[Owner]) -> Option<&'static str> {
        if let Some(why) = self.closed_somewhere() {
            return Some(why);
        }
        if self.flow.is_unsettled() {
            return Some("a tier has not ended a read or a removal");
        }
        let named: HashSet<Owner> = holders.iter().copied().collect();
        let expected = named.into_iter().filter(|&owner| self.pool.holds(owner)).count();
        if self.pool.holders() > expected {
            return Some("a connection has not given its slots back");
        }
        None
    }

    /// Returns why a machine cannot be handed over until namespaces are reset, if so.
    pub fn closed_somewhere(&self) -> Option<&'static str> {
        let closed = self.flow.places_closed() > 0;
        closed.then_some("a tier owes so many removals that namespaces are closed there: reset them")
    }

    /// Returns whether any connection has leases.
    pub fn is_leased(&self) -> bool {
        self.pool.holders() > 0
    }

    /// Returns `count` leases of the holders from a place on, and where to resume. The machine is frozen, so leases can
    /// only end between two calls: a slot is then reported as held by a connection that has just released it.
    pub fn held(&self, holders: &[Owner], from: HeldFrom, count: usize) -> (Vec<Hold>, Option<HeldFrom>) {
        let mut held = Vec::with_capacity(count);
        let mut from = Some(from);
        while let Some(HeldFrom { holder, lease }) = from {
            let Some(&owner) = holders.get(holder) else { return (held, None) };
            let place = u32::try_from(holder).unwrap_or(u32::MAX);
            from = Some(HeldFrom { holder: holder + 1, lease: LeaseId(0) });
            for (lease, slot) in self.pool.leases_of(owner, lease) {
                if held.len() >= count {
                    return (held, Some(HeldFrom { holder, lease }));
                }
                held.push(Hold { slot, holder: place });
            }
        }
        (held, None)
    }

    /// Returns the descriptions of `count` slot numbers from `from` on, and where to resume. The machine is frozen.
    pub fn handed(&self, held_by: &HeldBy, from: usize, count: usize) -> (Vec<Handed>, Option<usize>) {
        let end = from.saturating_add(count).min(self.pool.numbers());
        let handed = (from..end).filter_map(|id| self.handed_one(id as SlotId, held_by)).collect();
        (handed, (end < self.pool.numbers()).then_some(end))
    }

    fn handed_one(&self, id: SlotId, held_by: &HeldBy) -> Option<Handed> {
        // The tier has what lies in its memory.
        let slot = self.pool.get(id).filter(|slot| !slot.is_in_place())?;
        let holders = held_by.of(id);
        let is_whole =
            slot.block.is_readable() || (self.flaws.has(Flaw::HandOverFilling) && slot.standing().filling);
        let is_block = is_whole && slot.is_indexed() && self.catalog.is_live(slot.key.space);
        if !is_block {
            return (!holders.is_empty()).then(|| Handed {
                runs: slot.runs(),
                state: HandedState::Busy,
                holders,
            });
        }
        // For a value that a tier could not replace, and for a block whose writes wait for something, all tiers get the
        // write again.
        let unwritten_value = slot.is_value() && slot.saved == 0;
        let everywhere =
            unwritten_value || slot.is_unreplaced() || (slot.block.is_dirty() && slot.to_write == 0);
        // Late writes are decided again by the tiers' placements.
        // A write that hangs is made again.
        let unwritten = slot.to_write | slot.writing;
        let to_write = if everywhere { TierMask::MAX } else { unwritten & !slot.late };
        let state = HandedState::Block {
            key: self.catalog.block_key(&slot.key),
            saved: slot.saved & !to_write,
            to_write,
            value: slot.is_value(),
            crc64: slot.crc64(),
            priority: self.pool.priority(id),
        };
        Some(Handed { runs: slot.runs(), state, holders })
    }

    /// Adopts a slot. A block whose namespace is not open here in the epoch of its key is dropped.
    pub(super) fn adopt(&mut self, slot: &Adopt) {
        let tiers = if self.flow.has_tiers() { self.flow.all() } else { 0 };
        if let HandedState::Block { key, saved, to_write, value, crc64, priority } = slot.handed.state
            && let Some(bytes) = self.catalog.by_id(key.namespace).map(super::Namespace::slot_bytes)
            && slot.handed.runs.iter().map(|run| run.len).sum::<u64>() == bytes
            && let Some(pool_key) = self.catalog.pool_key(&key)
            && let Some(id) =
                self.pool.adopt(pool_key, Block::handed_over(saved & tiers != 0), &slot.handed.runs, true)
        {
            let (to_write, saved) = (to_write & tiers, saved & tiers);
            self.pool.edit(id, |slot| {
                slot.saved = saved;
                slot.set_value(value);
                crc64.into_iter().for_each(|crc64| slot.set_crc64(crc64));
            });
            self.lease_for(id, &slot.owners);
            if self.pool.keeps() {
                self.pool.rank(id, priority);
            }
            if to_write != 0 {
                // Tiers with late writes get the block late again: on its second use here, or when it is cold.
                let to_write = to_write & self.flow.to_write_again(&self.pool, id);
                if to_write != 0 {
                    self.flow.write_again(&mut self.pool, id, to_write);
                }
            }
            // Those that do not get it now may at its next use: what the last depot could not write, they lack.
            let is_low = self.pool.priority(id) == Priority::Low && !value;
            let placements = &self.flow.placements;
            let later = if is_low { !placements.demotion } else { placements.through } & tiers;
            self.pool.edit(id, |slot| {
                slot.refused = later & !slot.saved & !slot.to_write;
                if is_low {
                    slot.set_unused();
                }
            });
            self.pool.free_if_over(id);
        } else if !slot.owners.is_empty()
            && let Some(id) = self.pool.adopt(NOBODYS, Block::handed_over(false), &slot.handed.runs, false)
        {
            self.lease_for(id, &slot.owners);
            // It is free when the last of them has ended.
            self.pool.doom(id);
        }
    }

    fn lease_for(&mut self, id: SlotId, owners: &[Owner]) {
        for &owner in owners {
            if self.pool.lease(owner, id).is_err() {
                // The owner has too many leases. A slot that is never freed is better than one that is freed too early.
                self.pool.pin(id);
            }
        }
    }

    /// Returns the namespaces to hand over: the fingerprinted specification, the epoch and the id.
    pub fn namespaces(&self) -> Vec<(std::sync::Arc<crate::key::NamespaceSpec>, u32, NamespaceId)> {
        self.catalog
            .all()
            .into_iter()
            .map(|namespace| (std::sync::Arc::clone(&namespace.spec), namespace.epoch, namespace.id))
            .collect()
    }
}

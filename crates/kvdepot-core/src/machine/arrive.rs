//! Tells the requests that wait for a block that it has arrived from a tier, or that it could not be read.
//!
//! Any number of claims and loads may wait for one block. They learn of it a few at a time. Until the last of them does,
//! the block is pinned, so that it stays in its slot whatever the others do with their leases.

use super::arrivals::{Arrival, Arrivals, Come};
use super::event::{Discarded, Effects, Job};
use super::flaw::Flaw;
use super::rooms::Rooms;
use super::slots::Waiter;
use super::{Machine, split};
use crate::eviction::SlotId;

impl Machine {
    /// Returns whether a block is whole and still current: its namespace may have been reset while it was in flight, or
    /// the block removed since it arrived.
    pub(super) fn is_current(&self, slot: SlotId) -> bool {
        self.is_live(slot) && self.pool.is_shown(slot)
    }

    /// Returns whether clients may still request blocks of the slot's space.
    pub(super) fn is_live(&self, slot: SlotId) -> bool {
        let space = self.pool.slot(slot).key.space;
        self.catalog.is_live(space) || self.flaws.has(Flaw::LeaseAfterReset)
    }

    /// Gives requests their leases on a block that has arrived, or tells them that it could not be read. `answer` must
    /// follow: a waiter that is answered may release its lease, and that may free the slot, so all get their leases first
    /// (P4).
    pub(super) fn lease_to(&mut self, waiters: &[Waiter], come: Option<Come>) {
        let Self { catalog, pool, flow, counters, loads, claims, .. } = self;
        let mut rooms = Rooms { catalog, pool, flow, counters };
        for waiter in waiters {
            match *waiter {
                Waiter::Claim { id, place, .. } => claims.arrived(&mut rooms, id, place, come),
                Waiter::Load { token, place } => {
                    loads.arrived(&mut rooms, token, place, come.map(|come| come.slot))
                }
            }
        }
    }

    /// Answers those of the requests that wait for nothing any more.
    pub(super) fn answer(&mut self, waiters: &[Waiter], out: &mut Effects) {
        for waiter in waiters {
            match *waiter {
                Waiter::Claim { id, .. } => {
                    let (claims, mut rooms) = split(self);
                    claims.settle_if_full(&mut rooms, id, out);
                }
                Waiter::Load { token, .. } => {
                    let Self { catalog, pool, flow, counters, loads, .. } = self;
                    let mut rooms = Rooms { catalog, pool, flow, counters };
                    loads.finish_if_over(&mut rooms, token, out);
                }
            }
        }
    }

    /// Keeps a block in its slot until [`Self::tell_later`] has told all requests of it.
    pub(super) fn keep_arrived(&mut self, come: Option<Come>) {
        if let Some(come) = come.filter(|_| !self.flaws.has(Flaw::ArrivalNotPinned)) {
            self.pool.pin(come.slot);
        }
    }

    /// Tells requests of a block in steps to come; the first of them have been told.
    pub(super) fn tell_later(
        &mut self,
        come: Option<Come>,
        waiters: Vec<Waiter>,
        told: usize,
        out: &mut Effects,
    ) {
        let Arrivals { map, ever } = &mut self.arrivals;
        *ever += 1;
        map.insert(*ever, Arrival { come, waiters, told });
        out.again.push(Job::Arrival(*ever));
    }

    /// Tells the next requests of a block.
    pub(super) fn tell_waiters(&mut self, number: u64, out: &mut Effects) {
        let Some(mut arrival) = self.arrivals.map.remove(&number) else { return };
        let still = |come: &Come| self.flaws.has(Flaw::ArrivalNotLookedAt) || self.is_current(come.slot);
        let come = arrival.come.filter(still);
        let end = arrival.waiters.len().min(arrival.told + self.pace.waiters);
        let next = &arrival.waiters[arrival.told..end];
        self.lease_to(next, come);
        self.answer(next, out);
        arrival.told = end;
        if end < arrival.waiters.len() {
            self.arrivals.map.insert(number, arrival);
            out.again.push(Job::Arrival(number));
            return;
        }
        if let Some(come) = arrival.come.filter(|_| !self.flaws.has(Flaw::ArrivalNotPinned)) {
            self.pool.unpin(come.slot);
        }
        out.discarded.push(Discarded::new(Box::new(arrival.waiters)));
    }
}

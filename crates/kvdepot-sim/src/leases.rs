//! Blocks that a tier leases in its memory. Every lease has pages of its own there; when it ends, they are overwritten.
//!
//! Some clients can read there and others cannot. A client that still reads when its depot has ended finds out that the
//! memory has another owner, and throws away what it has read.

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::machine::{Event, Leased, Nanos, Request};
use kvdepot_core::runs::Run;
use kvdepot_core::{BlockKey, SlotId};

use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::plan::Feature;
use crate::replies::Asked;
use crate::world::World;

fn is_in_place(runs: &[Run]) -> bool {
    runs.iter().any(|run| run.in_place().is_some())
}

impl World {
    /// Returns the tier that leases blocks, and the size of its memory.
    pub(crate) fn lender(&self) -> Option<(usize, u64)> {
        let lender = self.plan.shape.lender.filter(|_| self.has(Feature::Leases))?;
        Some((lender.tier, lender.pages as u64 * BLOCK_ALIGN_BYTES))
    }

    /// Returns whether a client can read in a tier's memory.
    pub(crate) fn reads_in_place(&self, client: usize) -> bool {
        self.lender().is_some() && !self.clients[client].owner.is_multiple_of(4)
    }

    pub(crate) fn begin_lending(&mut self) -> Result<(), Fail> {
        match self.lender() {
            Some((tier, memory_bytes)) => self.feed(Event::InPlace { tier, memory_bytes }),
            None => Ok(()),
        }
    }

    /// Ends a lease command as reads end.
    pub(crate) fn end_lease(
        &mut self,
        tier: usize,
        slot: SlotId,
        key: BlockKey,
        deadline: Nanos,
        begun: Option<Vec<u64>>,
    ) -> Result<(), Fail> {
        let (outcome, tags) = self.tier_reads(tier, &key, deadline, begun);
        let place = tags.map(|tags| self.memory.lend(tags));
        if place.is_some() {
            self.reached.insert("leased in place");
        }
        self.feed_and_answer(Event::LeaseEnded { tier, slot, outcome: outcome.map(|_| place) })
    }

    /// Ends leases: what lay there is overwritten at once.
    pub(crate) fn end_leases(&mut self, places: &[u64]) -> Result<(), Fail> {
        for &place in places {
            self.memory.end_lease(place)?;
            self.reached.insert("lease in place ended");
        }
        Ok(())
    }

    /// Checks that a client can read where a block was leased to it.
    pub(crate) fn check_place(
        &self,
        client: usize,
        key: &BlockKey,
        leased: &Leased,
        in_pool: bool,
    ) -> Result<(), Fail> {
        if is_in_place(&leased.runs) && (in_pool || !self.reads_in_place(client)) {
            return fail(
                Rule::Bytes,
                format!("{} was leased in memory that its reader does not have", name(key)),
            );
        }
        Ok(())
    }

    /// The depot has ended, and the tier's memory belongs to the next one: what clients read there does not count.
    pub(crate) fn take_memory_away(&mut self) {
        for client in &mut self.clients {
            client.readings.retain(|reading| !is_in_place(&reading.runs));
        }
        self.memory.forget_lent();
    }

    /// Checks that every lease of the tier is one that the machine knows.
    pub(crate) fn check_leases(&self) -> Result<(), Fail> {
        let (given, known) = (self.memory.leases(), self.machine.gauges().in_place.blocks);
        if given as u64 == known {
            return Ok(());
        }
        fail(Rule::Leaks, format!("the tier has {given} blocks leased, and the depot {known}"))
    }

    /// Leases blocks of current epochs for a client that can read them everywhere.
    pub(crate) fn lease_everywhere(&mut self, client: usize, keys: &[BlockKey]) -> Result<(), Fail> {
        for key in keys {
            let Some(space) = self.live_space(key) else { continue };
            let request = Request::Load {
                namespace: self.spaces[space].handle,
                id: None,
                hashes: vec![key.hash],
                fetch_deadline: self.now + (1 << 40),
                last: true,
                runs_max: usize::MAX,
                in_place: true,
            };
            self.request_of(Some(client), request, Asked::Load { keys: vec![*key] })?;
        }
        self.settle_down()
    }
}

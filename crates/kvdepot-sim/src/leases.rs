//! Blocks that a tier leases in its memory. Every lease has pages of its own there; when it ends, they are overwritten.
//!
//! Some clients can read there and others cannot. A client that still reads when its depot has ended finds out that the
//! memory has another owner, and throws away what it has read.

use std::collections::BTreeMap;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::machine::{Event, Fetched, Leased, Nanos, Request};
use kvdepot_core::runs::{IN_PLACE_AT, Run};
use kvdepot_core::{BlockKey, Error, ErrorKind, Result, SlotId};

use crate::fail::{Fail, Rule, fail};
use crate::memory::pages;
use crate::model::name;
use crate::plan::Feature;
use crate::replies::Asked;
use crate::world::World;

/// The leases that a tier has given, by their places: the number of pages of each.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    by_place: BTreeMap<u64, usize>,
    ever_pages: usize,
}

impl Leases {
    /// Returns a place for so many pages that no lease had before.
    fn give(&mut self, pages: usize) -> u64 {
        // No block lies at the very beginning of a tier's memory.
        let place = (1 + self.ever_pages) as u64 * BLOCK_ALIGN_BYTES;
        self.ever_pages += pages;
        self.by_place.insert(place, pages);
        place
    }

    pub(crate) fn count(&self) -> usize {
        self.by_place.len()
    }
}

fn runs_at(place: u64, pages: usize) -> [Run; 1] {
    [Run { offset: IN_PLACE_AT + place, len: pages as u64 * BLOCK_ALIGN_BYTES }]
}

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

    pub(crate) fn begin_lending(&mut self) -> std::result::Result<(), Fail> {
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
    ) -> std::result::Result<(), Fail> {
        let late = self.now > deadline && self.rng.chance(50);
        let (outcome, tags): (Result<Fetched>, _) = if late {
            (Err(Error::new(ErrorKind::Timeout, "a lease took too long")), None)
        } else if self.luck(Feature::ReadErrors, 8) {
            (Err(Error::new(ErrorKind::Io, "a lease failed")), None)
        } else {
            let read = self.tiers[tier].read(&key, begun, &mut self.rng);
            if read.0.is_err() {
                self.forgotten.push((tier, vec![key], true));
            }
            read
        };
        let tags = tags.filter(|_| outcome.is_ok());
        let place = tags.map(|tags| {
            let place = self.leases.give(tags.len());
            for (page, tag) in pages(&runs_at(place, tags.len())).into_iter().zip(tags) {
                self.memory.lend(page, tag);
            }
            place
        });
        if place.is_some() {
            self.reached.insert("leased in place");
        }
        self.feed_and_answer(Event::LeaseEnded { tier, slot, outcome: outcome.map(|_| place) })
    }

    /// Ends leases: what lay there is overwritten at once.
    pub(crate) fn end_leases(&mut self, places: &[u64]) -> std::result::Result<(), Fail> {
        for &place in places {
            let Some(pages) = self.leases.by_place.remove(&place) else {
                return fail(
                    Rule::Leaks,
                    format!("a lease at {place} ends that was not given, or has ended"),
                );
            };
            self.memory.overwrite(&runs_at(place, pages))?;
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
    ) -> std::result::Result<(), Fail> {
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
        self.leases = Leases::default();
    }

    /// Checks that every lease of the tier is one that the machine knows.
    pub(crate) fn check_leases(&self) -> std::result::Result<(), Fail> {
        let (given, known) = (self.leases.count(), self.machine.gauges().in_place.blocks);
        if given as u64 == known {
            return Ok(());
        }
        fail(Rule::Leaks, format!("the tier has {given} blocks leased, and the depot {known}"))
    }

    /// Leases blocks of current epochs for a client that can read them everywhere.
    pub(crate) fn lease_everywhere(
        &mut self,
        client: usize,
        keys: &[BlockKey],
    ) -> std::result::Result<(), Fail> {
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

//! Blocks leased in place: clients of the depot map the medium and read them where they lie.
//!
//! A block is pinned, its checksum is compared, and only then is it leased. Its place is used again only when the lease
//! has ended, whatever happens to the block (P1, P4). A client that still reads after another depot has taken the
//! medium finds out by the medium's head, which holds the owner's word.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::{Call, Class, IoEngine, Op, Request};

use super::layout::{OWNER_AT, OWNER_BYTES};
use super::restore::Wanted;
use super::slots::Found;
use super::state::Shared;
use crate::{LeaseItem, TierMemory};

/// Leases ended while the lock is held once.
const PIECE: usize = 256;
/// Bytes of the blocks whose checksums one worker computes before the next batch gets its turn; one block may be larger.
const CALL_BYTES: u64 = 1 << 20;
/// Length of a medium's head: the superblock, and the word of its owner.
const HEAD_BYTES: usize = OWNER_AT as usize + OWNER_BYTES;

/// Some blocks that are pinned and are to be leased.
struct Leasing {
    shared: Arc<Shared>,
    items: Vec<(LeaseItem, Found)>,
    deadline: Instant,
}

impl Shared {
    /// Returns the medium as memory for other processes, if it may be leased.
    pub(super) fn memory(&self) -> Result<Option<TierMemory>> {
        if !self.config.lease_in_place.unwrap_or_else(|| self.medium.is_memory()) {
            return Ok(None);
        }
        let Some(file) = self.medium.lend()? else { return Ok(None) };
        let mut head = vec![0; HEAD_BYTES];
        self.medium.read(0, &mut head)?;
        self.check_owner()?;
        let memory = TierMemory::new(file, self.medium.bytes(), head);
        Ok(Some(memory.with_units(self.units_max.into(), self.geometry.unit_bytes)))
    }

    /// Begins to lease blocks. What cannot be leased ends here.
    pub(super) fn begin_leases(
        self: &Arc<Self>,
        engine: &Arc<dyn IoEngine>,
        leases: Vec<LeaseItem>,
        deadline: Instant,
    ) {
        if deadline <= Instant::now() {
            let late = Request::expired();
            return leases.into_iter().for_each(|lease| (lease.done)(Err(late.clone())));
        }
        let (mut wrong, mut calls, mut call, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
        // Nothing is read into a slot that could be too small.
        let wanted = |lease: &LeaseItem| Wanted { key: lease.key, slot_bytes: usize::MAX, is_use: true };
        for (lease, found) in self.find_each(leases, wanted, &mut wrong) {
            match found {
                Ok(Some(found)) => {
                    bytes += u64::from(found.header.bytes);
                    call.push((lease, found));
                    if bytes >= CALL_BYTES {
                        calls.push(std::mem::take(&mut call));
                        bytes = 0;
                    }
                }
                Ok(None) => (lease.done)(Ok(None)),
                Err(error) => (lease.done)(Err(error)),
            }
        }
        calls.extend((!call.is_empty()).then_some(call));
        if !wrong.is_empty() {
            self.clear_wrong(&**engine, wrong);
        }
        let requests = calls.into_iter().map(|items| {
            let leasing = Leasing { shared: Arc::clone(self), items, deadline };
            let run = Box::new(move |begun| leasing.run(&begun));
            Request { class: Class::Read, deadline, op: Op::Call(Call { run }) }
        });
        engine.submit(requests.collect());
    }

    /// Ends the leases on blocks at these places.
    pub(super) fn end_leases(&self, places: &[u64]) {
        for places in places.chunks(PIECE) {
            let mut state = self.lock();
            let units = places.iter().filter_map(|place| self.geometry.unit_at(*place));
            units.for_each(|unit| state.slots.end_lease(unit));
        }
    }
}

impl Leasing {
    /// Compares the checksums on a worker, or ends with the reason why they cannot be compared.
    fn run(self, begun: &Result<()>) {
        for (lease, found) in self.items {
            let outcome = begun.clone().and_then(|()| verify(&self.shared, found, self.deadline));
            if outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
                self.shared.put_aside(lease.key, found);
            }
            let mut state = self.shared.lock();
            match &outcome {
                Ok(()) => {
                    state.slots.checked(found.unit);
                    state.slots.lease(found.unit);
                }
                Err(_) => state.slots.unpin(found.unit),
            }
            drop(state);
            let place = self.shared.geometry.payload_at(found.unit);
            (lease.done)(outcome.map(|()| Some(place)).map_err(|error| error.with("key", lease.key)));
        }
        self.shared.deliver_events();
    }
}

/// Compares a pinned block's checksum, and makes sure that the medium is still ours.
fn verify(shared: &Shared, found: Found, deadline: Instant) -> Result<()> {
    if shared.clock.is_stopping() {
        return Err(Request::closed());
    }
    if deadline <= Instant::now() {
        return Err(Request::expired());
    }
    if shared.trusts(&found) {
        return shared.check_owner();
    }
    let at = shared.geometry.payload_at(found.unit);
    let sum = shared.medium.checksum(at, found.header.bytes as usize)?;
    shared.check_owner()?;
    if sum == found.header.checksum { Ok(()) } else { Err(wrong_checksum(found.unit)) }
}

pub(super) fn wrong_checksum(unit: u32) -> Error {
    Error::new(ErrorKind::Corrupt, "a block on a medium does not match its checksum").with("unit", unit)
}

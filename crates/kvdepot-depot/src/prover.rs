//! Computes missing checksums of blocks, under leases, so that the blocks get a record in the ledger.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvdepot_core::lease::LeaseId;
use kvdepot_core::machine::Owner;
use kvdepot_core::machine::{Leased, Now, Reply, Request};
use kvdepot_core::{BlockKey, Result};
use kvdepot_io::checksum::crc64_slot;

use crate::ledger::Ledger;
use crate::runner::Runner;

/// Number of blocks leased at a time.
const TOGETHER: usize = 8;
/// How often to check whether the depot is terminating, and how long blocks wait that cannot be leased now.
const TICK: Duration = Duration::from_millis(100);

/// Runs until the depot stops.
pub(crate) fn run(runner: &Arc<Runner>, ledger: &Ledger) {
    let owner = runner.next_owner();
    while !runner.stopping.load(Ordering::Acquire) {
        let keys = ledger.next(TOGETHER, TICK);
        if keys.is_empty() {
            continue;
        }
        if let Err(error) = prove(runner, owner, &keys) {
            // The pool is being handed over, or the depot is dead.
            tracing::debug!("blocks get no record now: {error}");
            ledger.put_back(keys);
            std::thread::park_timeout(TICK);
        }
    }
}

fn prove(runner: &Arc<Runner>, owner: Owner, keys: &[BlockKey]) -> Result<()> {
    let Reply::Leased(now) = runner.ask(owner, Request::Inspect { keys: keys.to_vec() })? else {
        return Ok(());
    };
    let leased: Vec<Leased> = now
        .into_iter()
        .filter_map(|now| match now {
            Now::Leased(leased) => Some(leased),
            Now::Arriving | Now::Absent => None,
        })
        .collect();
    let leases: Vec<LeaseId> = leased.iter().map(|leased| leased.lease).collect();
    let proved = leased.iter().try_for_each(|leased| prove_one(runner, owner, leased));
    let released = runner.ask(owner, Request::Release { leases }).map(drop);
    proved.and(released)
}

fn prove_one(runner: &Arc<Runner>, owner: Owner, leased: &Leased) -> Result<()> {
    let slot = runner.pool.slot(&leased.runs)?;
    let crc64 = usize::try_from(leased.block_bytes).ok().and_then(|bytes| crc64_slot(&slot, 0, bytes));
    if let (None, Some(crc64)) = (leased.crc64, crc64) {
        runner.ask(owner, Request::SetChecksum { lease: leased.lease, crc64 })?;
    }
    Ok(())
}

//! Recovery of a crashed depot's pool: the next depot takes in every block that is proven by its checksum, and no
//! other.
//!
//! Clients of the crashed depot may have outlived it, and may still copy out of any slot and into any that is not a
//! proven block. Until all of them have finished, the complete pool is held: proven blocks can be read and are not
//! evicted, and no other slot is given out (P1, P4).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvdepot_core::machine::{Adopt, Handed, HandedState, Location, Owner, Whole};
use kvdepot_core::runs::Runs;
use kvdepot_core::{BlockKey, Priority};

use crate::depot::Depot;
use crate::ledger::left;
use crate::pool::region_sizes;
use crate::session::Session;
use crate::taking_in::TakingIn;

pub use crate::ledger::left::LeftLedger;

/// Number of slots adopted under one hold of the lock.
const PIECE_SLOTS: usize = 128;
/// Number of slots that one session holds.
const SESSION_SLOTS: usize = 1 << 19;
/// Number of blocks read between two log lines.
const LOG_BLOCKS: usize = 1 << 16;

/// The result of a recovery.
#[derive(Debug)]
pub struct Recovered {
    /// Number of blocks that are visible now.
    pub blocks: usize,
    /// Number of recorded blocks that were not recovered.
    pub left_out: usize,
    /// Sessions that hold the pool for clients of the crashed depot; empty if there are none. Drop them when all of
    /// these clients' copies have ended.
    pub holds: Vec<Session>,
}

impl Depot {
    /// Takes in the blocks that a crashed depot left in this one's pool, before there is any request for its space.
    /// `held`: clients of that depot may still copy.
    pub fn recover(&self, left: &LeftLedger, held: bool) -> Recovered {
        let (runner, begun) = (&self.runner, Instant::now());
        let taking = TakingIn::begin(self, runner.config.pool_bytes, &left.namespaces());
        let records = left.records();
        let recorded = records.len();
        let current: Vec<Whole> = records.into_iter().filter(|block| taking.is_current(&block.key)).collect();
        let logged = AtomicUsize::new(LOG_BLOCKS);
        let mut proved = left::prove(current, &runner.pool, &|read| {
            let due = logged.load(Ordering::Relaxed);
            let is_due = read >= due
                && logged
                    .compare_exchange(due, read + LOG_BLOCKS, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if is_due {
                tracing::info!("{read} of {recorded} blocks that a crashed depot left have been read");
            }
        });
        let regions = region_sizes(runner.pool.regions(), runner.pool.bytes());
        let gaps = left::places(&mut proved, &regions);
        let mut holds = Holds { depot: self, held, sessions: Vec::new(), slots: 0 };
        for piece in proved.chunks(PIECE_SLOTS) {
            let keys: Vec<BlockKey> = piece.iter().map(|block| block.key).collect();
            let locations = runner.locator.locate(&keys);
            let slots = piece.iter().zip(locations).map(|(block, location)| {
                // If only I/O can tell, the block is written again where blocks are written through: a tier that has it
                // already reports that.
                let saved = match location {
                    Location::Tier(tier) => 1 << tier,
                    Location::Unknown | Location::Absent => 0,
                };
                let state = HandedState::Block {
                    key: block.key,
                    saved,
                    to_write: !saved,
                    value: false,
                    crc64: Some(block.crc64),
                    priority: Priority::Normal,
                };
                Adopt {
                    handed: Handed { runs: block.runs.clone(), state, holders: Vec::new() },
                    owners: holds.next(),
                }
            });
            taking.take(slots.collect());
        }
        if held {
            for piece in gaps.chunks(PIECE_SLOTS) {
                let slots = piece.iter().map(|&run| {
                    let runs = Runs::from_slice(&[run]);
                    Adopt {
                        handed: Handed { runs, state: HandedState::Busy, holders: Vec::new() },
                        owners: holds.next(),
                    }
                });
                taking.take(slots.collect());
            }
        }
        let blocks = taking.blocks();
        let left_out = recorded.saturating_sub(blocks);
        tracing::info!(
            "{blocks} blocks that a crashed depot left were recovered in {} ms, {left_out} could not be proved or have been reset",
            begun.elapsed().as_millis()
        );
        Recovered { blocks, left_out, holds: holds.sessions }
    }

    /// Returns the ledger's descriptor, if there is a ledger.
    pub fn ledger_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.runner.ledger.as_ref().map(|ledger| ledger.fd())
    }

    /// Records how many clients may copy now, for the depot that takes over the pool after a crash.
    pub fn set_ledger_clients(&self, clients: u32) {
        if let Some(ledger) = &self.runner.ledger {
            ledger.set_clients(clients);
        }
    }

    /// Invalidates the ledger, so that no depot can take over the pool by it any more.
    pub fn close_ledger(&self) {
        if let Some(ledger) = &self.runner.ledger {
            ledger.close();
        }
    }
}

/// Sessions that hold slots, each as many as one may lease.
struct Holds<'a> {
    depot: &'a Depot,
    held: bool,
    sessions: Vec<Session>,
    slots: usize,
}

impl Holds<'_> {
    /// Returns the holder of the next slot.
    fn next(&mut self) -> Vec<Owner> {
        if !self.held {
            return Vec::new();
        }
        if self.slots.is_multiple_of(SESSION_SLOTS) {
            self.sessions.push(self.depot.session());
        }
        self.slots += 1;
        self.sessions.last().map(Session::owner).into_iter().collect()
    }
}

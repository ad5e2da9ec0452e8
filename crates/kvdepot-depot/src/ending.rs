//! Terminates a depot: ends waits of clients, writes dirty blocks, and logs what could not be written.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdepot_core::machine::{Event, Reply, Request};

use crate::runner::Runner;

/// Interval of log lines while the last blocks are written.
const PROGRESS: Duration = Duration::from_secs(5);
/// How much longer than for the last block termination waits for other work of tiers: removals, scans, operations that
/// hang.
const TIERS_WAIT: Duration = Duration::from_secs(5);

/// How long a drain waits for a tier before it checks whether the depot is terminating.
const TIER_DRAIN_TICK: Duration = Duration::from_millis(100);
/// The owner of the depot's own requests, which leases nothing.
const NOBODY: u64 = 0;

/// Blocks that no tier had when a depot terminated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unwritten {
    /// Number of blocks still unwritten at the deadline.
    pub blocks: u64,
    /// Their size.
    pub bytes: u64,
    /// Number of blocks that the tiers refused since termination began.
    pub refused: u64,
}

impl Runner {
    /// Immediately answers all requests that wait for writes, now and from now on: their connections are about to end.
    pub(crate) fn end_waits(self: &Arc<Self>) {
        // The flag ends waits for tiers, the event ends those in the machine.
        self.ending.store(true, Ordering::Release);
        self.tell_and_leave(Event::Ending);
    }

    /// Writes dirty blocks for at most `drain_timeout_ms`, and logs progress and losses. Only the first call has an
    /// effect. Dropping the depot without it does the same.
    pub(crate) fn finish(self: &Arc<Self>) -> Unwritten {
        self.end_waits();
        if self.finished.swap(true, Ordering::AcqRel) || self.life.is_dead() {
            return Unwritten::default();
        }
        let timeout = Duration::from_millis(self.config.drain_timeout_ms);
        let end = Instant::now() + timeout;
        let refused_before = self.refused();
        let (blocks, bytes) = self.dirty();
        if blocks > 0 {
            tracing::info!(
                "{blocks} blocks ({bytes} bytes) are written before the depot ends, for {timeout:?} at most"
            );
        }
        let mut written = None;
        loop {
            let now = Instant::now();
            if self.drain(end.min(now + PROGRESS), Waits::BeyondTheEnd)
                || Instant::now() >= end
                || self.life.is_dead()
            {
                break;
            }
            let (blocks, bytes) = self.dirty();
            if blocks == 0 {
                if written.get_or_insert_with(Instant::now).elapsed() >= TIERS_WAIT {
                    break;
                }
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            tracing::info!(
                "{blocks} blocks ({bytes} bytes) are still to be written, {} s are left",
                left.as_secs()
            );
        }
        let (blocks, bytes) = self.dirty();
        let refused = self.refused() - refused_before;
        if blocks > 0 || refused > 0 {
            tracing::warn!(
                "the depot shuts down and loses {blocks} blocks ({bytes} bytes) that it could not write within {timeout:?} \
                 (--drain-timeout, drain_timeout_s), and {refused} blocks that the tiers refused"
            );
        }
        Unwritten { blocks, bytes, refused }
    }

    /// Returns the number of blocks being written, and of bytes that no tier has.
    fn dirty(&self) -> (u64, u64) {
        let gauges = self.look(kvdepot_core::machine::Machine::gauges);
        (gauges.dirty_blocks, gauges.held.dirty)
    }

    /// Returns the number of blocks that the tiers refused.
    fn refused(&self) -> u64 {
        self.look(|machine| machine.counters().write_blocks_dropped)
    }
}

/// The limit of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// Until the depot is terminated.
    UntilTheEnd,
    /// Until its deadline, because this is the termination.
    BeyondTheEnd,
}

impl Runner {
    /// Waits until every block sealed before this call has been written or abandoned, and the tiers have completed
    /// their work. Returns `false` if the deadline passed first, or the depot is dead or terminating.
    pub(crate) fn drain(self: &Arc<Self>, deadline: Instant, waits: Waits) -> bool {
        let is_over =
            || self.life.is_dead() || (waits == Waits::UntilTheEnd && self.ending.load(Ordering::Acquire));
        if is_over() {
            return false;
        }
        if !matches!(
            self.ask_within(NOBODY, Request::Drain { last: waits == Waits::BeyondTheEnd }, deadline),
            Ok(Reply::Drained(true))
        ) {
            return false;
        }
        self.locator.tiers.iter().all(|tier| {
            loop {
                if tier.drain(deadline.min(Instant::now() + TIER_DRAIN_TICK)) {
                    return true;
                }
                if is_over() || Instant::now() >= deadline {
                    return false;
                }
            }
        })
    }
}

//! Tracks how much of the pool each client is filling, and which clients have stopped.
//!
//! Bytes that clients are filling count against the shares that dumps may take. A client that was stopped in the middle
//! of its dumps, by a debugger or SIGSTOP, keeps its slots, because it may resume and write them (P4). But it must not
//! keep all others from dumping into the rest, so after a while its bytes no longer count.

use hashbrown::HashMap;

/// Seconds without a dump request after which an owner that is filling slots counts as stopped.
pub(crate) const STOPPED_AFTER_S: u32 = 10;

#[derive(Clone, Copy, Debug)]
struct Fill {
    bytes: u64,
    seen_s: u32,
}

/// Filled bytes by owner; see the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fills {
    by_owner: HashMap<u64, Fill>,
    stopped_bytes: u64,
}

impl Fills {
    /// Records that an owner requests slots: it has not stopped.
    pub(crate) fn seen(&mut self, owner: u64, now_s: u32) {
        if let Some(fill) = self.by_owner.get_mut(&owner) {
            fill.seen_s = now_s;
            self.look_again(now_s);
        }
    }

    /// Records that an owner got a slot to fill.
    pub(crate) fn begun(&mut self, owner: u64, bytes: u64, now_s: u32) {
        let fill = self.by_owner.entry(owner).or_insert(Fill { bytes: 0, seen_s: now_s });
        fill.bytes += bytes;
        fill.seen_s = now_s;
    }

    /// Records that an owner has filled or abandoned a slot.
    pub(crate) fn ended(&mut self, owner: u64, bytes: u64, now_s: u32) {
        let Some(fill) = self.by_owner.get_mut(&owner) else { return };
        fill.bytes = fill.bytes.saturating_sub(bytes);
        fill.seen_s = now_s;
        if fill.bytes == 0 {
            self.by_owner.remove(&owner);
        }
        self.look_again(now_s);
    }

    /// An owner that counted as stopped may have resumed.
    fn look_again(&mut self, now_s: u32) {
        if self.stopped_bytes > 0 {
            self.look(now_s);
        }
    }

    /// Finds the owners that have stopped. It takes as many steps as there are owners that fill slots: at most one per
    /// connection.
    pub(crate) fn look(&mut self, now_s: u32) {
        let stopped = |fill: &&Fill| now_s.saturating_sub(fill.seen_s) >= STOPPED_AFTER_S;
        self.stopped_bytes = self.by_owner.values().filter(stopped).map(|fill| fill.bytes).sum();
    }

    /// Returns the number of bytes held by stopped owners.
    pub(crate) const fn stopped_bytes(&self) -> u64 {
        self.stopped_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_without_a_request_has_stopped_until_its_next() {
        let mut fills = Fills::default();
        fills.begun(1, 100, 0);
        fills.begun(2, 10, STOPPED_AFTER_S - 1);
        fills.look(STOPPED_AFTER_S - 1);
        assert_eq!(fills.stopped_bytes(), 0);
        fills.look(STOPPED_AFTER_S);
        assert_eq!(fills.stopped_bytes(), 100);
        fills.ended(1, 40, STOPPED_AFTER_S);
        assert_eq!(fills.stopped_bytes(), 0, "it goes on");
        fills.look(2 * STOPPED_AFTER_S);
        assert_eq!(fills.stopped_bytes(), 70);
        fills.ended(1, 60, 2 * STOPPED_AFTER_S);
        assert_eq!(fills.stopped_bytes(), 10);
        assert_eq!(fills.by_owner.len(), 1, "who fills nothing takes no memory");
    }
}

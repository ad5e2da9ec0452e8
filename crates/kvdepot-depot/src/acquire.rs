//! Leasing blocks for reading, filled from a tier where they are not in the pool.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::block::Phase;
use kvdepot_core::{BlockKey, ErrorKind, NamespaceSpec, Result};

use crate::depot::Shared;
use crate::io_queue;
use crate::message::{Grant, Hashes, NamespaceHandle};
use crate::ops::keys;
use crate::resolver::Known;
use crate::state::State;
use crate::stats::Stats;

/// How one block of an `acquire` stands.
enum Wanted {
    Leased(Grant),
    Waiting,
    Missed(ErrorKind),
}

/// Blocks that one `acquire` is after.
struct Acquire<'a> {
    shared: &'a Arc<Shared>,
    owner: u64,
    spec: Arc<NamespaceSpec>,
    keys: Vec<BlockKey>,
    wanted: Vec<Wanted>,
    /// Blocks whose fetch was seen: if one is gone then, the fetch failed.
    asked: Vec<bool>,
    deadline: Instant,
    /// Whoever asks again finds what has come since, so fetches are not bound to this call's wait.
    fetch_deadline: Instant,
}

/// Leases blocks for reading. Blocks in a tier are fetched, each at most once; when the pool has no room for more
/// while some are leased, the answer comes at once and the rest is refused with `no_space`: asked again after the
/// first were copied, they find room. Fetches go on when the wait is over; their blocks are refused with `timeout` then, and
/// may be asked for again.
pub(crate) fn acquire(
    shared: &Arc<Shared>,
    owner: u64,
    namespace: NamespaceHandle,
    hashes: &Hashes<'_>,
    wait: Duration,
    last: bool,
) -> Result<Vec<Grant>> {
    let deadline = Instant::now() + wait.min(Duration::from_millis(shared.config.timeout_ms));
    let fetch_deadline = shared.config.deadline();
    let mut state = shared.state.lock();
    let keys = keys(&state, namespace, hashes)?;
    let spec = Arc::clone(&state.namespaces.get(namespace)?.spec);
    let wanted = keys.iter().map(|_| Wanted::Waiting).collect();
    let asked = vec![false; keys.len()];
    let mut acquire = Acquire { shared, owner, spec, keys, wanted, asked, deadline, fetch_deadline };
    loop {
        acquire.lease_readable(&mut state);
        let (full, begun) = acquire.fetch_missing(&mut state);
        // Before the time is looked at: what was begun and not handed to a tier would wait for somebody else's turn.
        if begun {
            drop(state);
            io_queue::pump(shared);
            state = shared.state.lock();
            continue;
        }
        let waiting = acquire.wanted.iter().any(|w| matches!(w, Wanted::Waiting));
        let have = acquire.wanted.iter().any(|w| matches!(w, Wanted::Leased(_)));
        if !waiting || (full && have) || Instant::now() >= deadline {
            break;
        }
        shared.changed.wait_until(&mut state, deadline);
    }
    drop(state);
    Ok(acquire.grants(last))
}

impl Acquire<'_> {
    fn waiting(&self) -> Vec<usize> {
        (0..self.keys.len()).filter(|&i| matches!(self.wanted[i], Wanted::Waiting)).collect()
    }

    /// First of all, so that no fetch of this call evicts a block that it wants, too.
    fn lease_readable(&mut self, state: &mut State) {
        for i in self.waiting() {
            let Some(id) = state.readable(&self.keys[i]) else { continue };
            let runs = state.slot(id).runs.clone();
            // Loads are what recency is made of: a claim before the load is the same use.
            state.policy.touch(id);
            self.wanted[i] = match state.lease(self.owner, id) {
                Ok(lease) => Wanted::Leased(Grant::Leased { lease: lease.0, runs }),
                Err(error) => Wanted::Missed(error.kind()),
            };
        }
    }

    /// Starts fetches as far as the pool has room: whether it had too little, and whether any began.
    fn fetch_missing(&mut self, state: &mut State) -> (bool, bool) {
        let (mut full, mut begun) = (false, false);
        let waiting = self.waiting();
        let absent = waiting.iter().map(|&i| self.keys[i]).filter(|key| !state.index.contains_key(key));
        let known = Known::peek(self.shared, absent.collect::<Vec<_>>().into_iter());
        for i in waiting {
            let key = self.keys[i];
            match state.index.get(&key).map(|&id| state.slot(id).block.phase()) {
                Some(Phase::Fetching) => self.asked[i] = true,
                // Being dumped, or of an epoch that has passed: not to be had now.
                Some(_) => self.wanted[i] = Wanted::Missed(ErrorKind::NotFound),
                None if self.asked[i] || state.is_leaving(&key) => {
                    self.wanted[i] = Wanted::Missed(ErrorKind::NotFound)
                }
                None if full => {}
                None => match known.tier_of(&key).or_else(|| known.is_unknown(&key).then_some(0)) {
                    None => self.wanted[i] = Wanted::Missed(ErrorKind::NotFound),
                    Some(tier) => match io_queue::fetch(state, key, &self.spec, tier, self.fetch_deadline) {
                        Ok(_) => (self.asked[i], begun) = (true, true),
                        Err(_) => full = true,
                    },
                },
            }
        }
        (full, begun)
    }

    /// Each block is counted once, however often it is asked for: when it is leased or missed.
    fn grants(self, last: bool) -> Vec<Grant> {
        let late = Instant::now() >= self.deadline;
        let (mut leased, mut missed) = (0, 0);
        let grants = self.wanted.into_iter().map(|wanted| {
            let (kind, is_missed) = match wanted {
                Wanted::Leased(grant) => {
                    leased += 1;
                    return grant;
                }
                Wanted::Missed(kind) => (kind, true),
                Wanted::Waiting if late => (ErrorKind::Timeout, last),
                Wanted::Waiting => (ErrorKind::NoSpace, false),
            };
            missed += usize::from(is_missed);
            Grant::Refused { kind: kind.as_str().into() }
        });
        let grants = grants.collect();
        Stats::add(&self.shared.stats.load_blocks, leased + missed);
        Stats::add(&self.shared.stats.load_blocks_missed, missed);
        grants
    }
}

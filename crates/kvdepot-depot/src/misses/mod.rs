//! Why requests missed: blocks that went are remembered, misses are counted by reason, and the last ones are kept for who asks.
//!
//! Nothing here is behind the machine's lock, and a lookup that finds all its blocks does not come here.

mod explain;
mod record;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hashbrown::HashMap;
use kvdepot_core::machine::{Owner, TierIndex};
use kvdepot_core::misses::{Ghost, Ghosts, Gone, Missed, Reason};
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, Result};
use kvdepot_tier::Presence as InTier;
use parking_lot::{Mutex, MutexGuard};

use crate::locate::Locator;
use crate::random::random;
use record::{Last, Miss};

/// Other namespaces in which a block that was missed is looked for, at most: a bound on what a miss costs.
const NAMESPACES_LOOKED_AT: usize = 256;
/// Questions about given blocks that are answered at a time: each may have tiers search their media (P7).
const EXPLAINED_AT_A_TIME: usize = 2;

/// What is known of misses.
#[derive(Debug)]
pub(crate) struct Misses {
    ghosts: Mutex<Ghosts>,
    counts: [AtomicU64; Reason::ALL.len()],
    last: Mutex<Last>,
    /// Processes of connections, where they are known.
    clients: Mutex<HashMap<Owner, u32>>,
    /// Explanations under way.
    explaining: AtomicUsize,
    began: Instant,
}

/// What a request did not find, before it is known why.
pub(crate) struct Unfound<'a> {
    pub(crate) owner: Owner,
    /// The first block that it did not find.
    pub(crate) key: BlockKey,
    /// What keys of all its namespaces carry.
    pub(crate) namespaces: &'a [NamespaceId],
    /// Blocks, or hash units, that it asked for.
    pub(crate) asked: usize,
    /// Leading ones of them that it found.
    pub(crate) hit: usize,
    /// Whether a tier did not answer about that block.
    pub(crate) untold: bool,
}

/// The table of lost blocks, locked.
pub(crate) struct Noting<'a> {
    now_s: u32,
    ghosts: MutexGuard<'a, Ghosts>,
}

impl Noting<'_> {
    /// Adds lost blocks.
    pub(crate) fn note(mut self, gone: &[Gone]) {
        self.ghosts.note_all(self.now_s, gone);
    }
}

/// An explanation under way.
#[derive(Debug)]
struct Explaining<'a>(&'a AtomicUsize);

impl Drop for Explaining<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Misses {
    /// Remembers so many blocks that went.
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            ghosts: Mutex::new(Ghosts::new(blocks, random())),
            counts: Default::default(),
            last: Mutex::default(),
            clients: Mutex::default(),
            explaining: AtomicUsize::new(0),
            began: Instant::now(),
        }
    }

    fn now_s(&self) -> u32 {
        u32::try_from(self.began.elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    /// Locks the table until [`Noting::note`] has added the blocks that a step lost. Call it before other threads can see
    /// that step. The lock is held for a shorter time than the machine's, and is never taken before that one.
    pub(crate) fn begin_noting(&self) -> Noting<'_> {
        Noting { now_s: self.now_s(), ghosts: self.ghosts.lock() }
    }

    /// Records the process of a connection.
    pub(crate) fn client(&self, owner: Owner, pid: u32) {
        self.clients.lock().insert(owner, pid);
    }

    /// Records the end of a connection.
    pub(crate) fn client_went(&self, owner: Owner) {
        self.clients.lock().remove(&owner);
    }

    /// Misses by reason.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let counts = Reason::ALL.iter().zip(&self.counts);
        counts
            .map(|(reason, count)| (reason.as_str().to_owned(), count.load(Ordering::Relaxed)))
            .collect::<serde_json::Value>()
    }

    /// Counts one more question that is being answered. Fails if there are too many.
    fn begin_to_explain(&self) -> Result<Explaining<'_>> {
        let explaining = Explaining(&self.explaining);
        if self.explaining.fetch_add(1, Ordering::AcqRel) >= EXPLAINED_AT_A_TIME {
            return Err(Error::new(ErrorKind::Busy, "too many questions are being answered: ask again"));
        }
        Ok(explaining)
    }

    fn find(&self, key: &BlockKey) -> Option<Ghost> {
        self.ghosts.lock().find(self.now_s(), key)
    }
}

/// Why a block is not there.
#[derive(Clone, Copy, Debug)]
struct Cause {
    reason: Reason,
    ghost: Option<Ghost>,
    /// The tier that is down.
    down: Option<TierIndex>,
}

/// As [`Cause`], and where the block is instead.
struct Why {
    cause: Cause,
    /// What keys of another namespace carry that has the same hash.
    elsewhere: Option<NamespaceId>,
}

impl From<Reason> for Why {
    fn from(reason: Reason) -> Self {
        Self { cause: Cause { reason, ghost: None, down: None }, elsewhere: None }
    }
}

impl From<Ghost> for Why {
    fn from(ghost: Ghost) -> Self {
        Self { cause: Cause { reason: ghost.fate.into(), ghost: Some(ghost), down: None }, elsewhere: None }
    }
}

impl Locator {
    /// A claim found less than it asked for.
    pub(crate) fn claim_missed(&self, missed: Missed) {
        let Missed { owner, label, key, namespaces, asked, hit, short } = missed;
        let unfound = Unfound { owner, key, namespaces: &namespaces, asked, hit, untold: false };
        let why =
            Reason::of_claim(short).map_or_else(|| self.why(&key, &namespaces, unfound.untold), Why::from);
        self.missed(&unfound, label, "claim", &why);
    }

    /// A lookup found less than it asked for.
    pub(crate) fn lookup_missed(&self, unfound: &Unfound<'_>) {
        let why = self.why(&unfound.key, unfound.namespaces, unfound.untold);
        self.missed(unfound, None, "lookup", &why);
    }

    fn missed(&self, unfound: &Unfound<'_>, label: Option<Box<str>>, by: &'static str, why: &Why) {
        let misses = &self.misses;
        misses.counts[why.cause.reason as usize].fetch_add(1, Ordering::Relaxed);
        let namespace = self.directory.by_id(unfound.key.namespace);
        if let Some(namespace) = &namespace {
            self.usage.missed(namespace.handle);
        }
        let spec_of = |id: NamespaceId| self.directory.by_id(id).map(|opened| opened.spec);
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let miss = Miss {
            at_ms: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            client: misses.clients.lock().get(&unfound.owner).copied(),
            label,
            by,
            namespace: namespace.map(|opened| opened.spec),
            hash: unfound.key.hash,
            asked: unfound.asked,
            hit: unfound.hit,
            cause: why.cause,
            elsewhere: why.elsewhere.and_then(spec_of),
        };
        misses.last.lock().push(miss);
    }

    /// Why a block of this key is not there, for a request of these namespaces. `untold`: a tier did not answer about it.
    fn why(&self, key: &BlockKey, namespaces: &[NamespaceId], untold: bool) -> Why {
        if untold {
            return Reason::TooSlow.into();
        }
        let ghost = self.misses.find(key);
        // A tier that is down cannot say whether it has the block. Only what is remembered of that tier says more.
        let down = self.tiers.iter().position(|tier| tier.is_down(key));
        if let Some(tier) = down.filter(|&tier| ghost.is_none_or(|ghost| ghost.tier != Some(tier))) {
            let cause = Cause { reason: Reason::Unavailable, ghost: None, down: Some(tier) };
            return Why { cause, elsewhere: None };
        }
        if let Some(ghost) = ghost {
            return ghost.into();
        }
        if let Some(why) = self.why_of_reset(key) {
            return why;
        }
        let elsewhere = self.elsewhere(key.hash, namespaces).into_iter().next();
        let reason = if elsewhere.is_some() { Reason::OtherNamespace } else { Reason::NeverStored };
        Why { elsewhere, ..reason.into() }
    }

    /// Whether a block went in a reset of its namespace.
    fn why_of_reset(&self, key: &BlockKey) -> Option<Why> {
        let opened = self.directory.by_id(key.namespace).filter(|opened| opened.epoch > 0)?;
        // Looked for in this order: what the sweep takes from the pool it has noted before.
        let before = self.directory.before_reset(opened.handle);
        let unswept = before.map(|namespace| BlockKey { namespace, hash: key.hash });
        if unswept.is_some_and(|key| self.presence.contains(&key)) {
            return Some(Reason::Reset.into());
        }
        // What went in a reset is remembered by what no epoch changes.
        self.misses.find(&BlockKey { namespace: opened.spec.root(), hash: key.hash }).map(Why::from)
    }

    /// Other namespaces that have a block of this hash, as far as that is known without I/O.
    fn elsewhere(&self, hash: BlockHash, but: &[NamespaceId]) -> Vec<NamespaceId> {
        let ids = self.directory.current_ids(NAMESPACES_LOOKED_AT, but);
        let keys: Vec<BlockKey> = ids.into_iter().map(|namespace| BlockKey { namespace, hash }).collect();
        if keys.is_empty() {
            return Vec::new();
        }
        let mut there: Vec<bool> = self.presence.contain(&keys).collect();
        let mut answers = Vec::new();
        for tier in &self.tiers {
            tier.peek(&keys, &mut answers);
            for (there, answer) in there.iter_mut().zip(&answers) {
                *there |= matches!(answer, InTier::Present);
            }
        }
        keys.iter().zip(there).filter(|(_, there)| *there).map(|(key, _)| key.namespace).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use kvdepot_core::machine::Opened;
    use kvdepot_core::{BlockLayout, NamespaceSpec};

    use super::*;

    #[test]
    fn a_block_that_a_reset_has_not_swept_yet_is_told_as_reset() {
        let locator = Locator::new(Vec::new(), Duration::from_secs(60), 64);
        let layout = BlockLayout::uniform(1, &[4096]).expect("a layout");
        let spec = Arc::new(NamespaceSpec::new("{}", layout).expect("a description"));
        let open = |epoch| Opened { handle: 0, id: spec.id(epoch), epoch, spec: Arc::clone(&spec) };
        let key = |epoch, number| BlockKey { namespace: spec.id(epoch), hash: BlockHash([number; 16]) };
        let reason = |key: BlockKey| {
            let spaces = [key.namespace];
            let (asked, hit, untold) = (1, 0, false);
            locator.lookup_missed(&Unfound { owner: 1, key, namespaces: &spaces, asked, hit, untold });
            locator.misses.last.lock().newest(1, |_| true)[0].cause.reason
        };
        locator.directory.apply(open(0));
        locator.presence.set(&[(key(0, 1), true)]);
        assert_eq!(reason(key(0, 2)), Reason::NeverStored);
        // An epoch may be any higher one.
        locator.directory.apply(open(7));
        assert_eq!(reason(key(7, 1)), Reason::Reset);
        assert_eq!(reason(key(7, 2)), Reason::NeverStored);
    }

    #[test]
    fn few_are_explained_to_at_a_time() {
        let misses = Misses::new(0);
        let under_way: Vec<Explaining<'_>> =
            (0..EXPLAINED_AT_A_TIME).map(|_| misses.begin_to_explain().expect("a place")).collect();
        assert_eq!(misses.begin_to_explain().expect_err("none left").kind(), ErrorKind::Busy);
        drop(under_way);
        assert!(misses.begin_to_explain().is_ok());
    }
}

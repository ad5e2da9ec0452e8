//! Why requests missed: blocks that went are remembered, misses are counted by reason, and the last ones are kept for who asks.
//!
//! Nothing here is behind the machine's lock, and a lookup that finds all its blocks does not come here.

mod explain;
mod record;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hashbrown::HashMap;
use kvdepot_core::machine::Owner;
use kvdepot_core::misses::{Ghost, Ghosts, Gone, Missed, Reason};
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};
use kvdepot_tier::Presence as InTier;
use parking_lot::{Mutex, MutexGuard};

use crate::locate::Locator;
use crate::random::random;
use record::{Last, Miss};

/// Other namespaces in which a block that was missed is looked for, at most: a bound on what a miss costs.
const NAMESPACES_LOOKED_AT: usize = 256;

/// What is known of misses.
#[derive(Debug)]
pub(crate) struct Misses {
    ghosts: Mutex<Ghosts>,
    counts: [AtomicU64; Reason::ALL.len()],
    last: Mutex<Last>,
    /// Processes of connections, where they are known.
    clients: Mutex<HashMap<Owner, u32>>,
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
}

/// The table of lost blocks, locked.
pub(crate) struct Noting<'a> {
    now_s: u32,
    ghosts: MutexGuard<'a, Ghosts>,
}

impl Noting<'_> {
    /// Adds lost blocks.
    pub(crate) fn note(mut self, gone: &[Gone]) {
        gone.iter().for_each(|gone| self.ghosts.note(self.now_s, gone));
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
            began: Instant::now(),
        }
    }

    fn now_s(&self) -> u32 {
        u32::try_from(self.began.elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    /// Locks the table, so that nobody reads it before [`Noting::note`] has added the blocks that a step lost. To be called
    /// before others can see that step; it is shorter than the machine's lock and never taken before it.
    pub(crate) fn begin_noting(&self) -> Noting<'_> {
        Noting { now_s: self.now_s(), ghosts: self.ghosts.lock() }
    }

    /// A connection is of this process.
    pub(crate) fn client(&self, owner: Owner, pid: u32) {
        self.clients.lock().insert(owner, pid);
    }

    /// A connection ended.
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

    fn find(&self, key: &BlockKey) -> Option<Ghost> {
        self.ghosts.lock().find(self.now_s(), key)
    }
}

/// Why a block is not there.
struct Why {
    reason: Reason,
    ghost: Option<Ghost>,
    /// What keys of another namespace carry that has the same hash.
    elsewhere: Option<NamespaceId>,
}

impl Locator {
    /// A claim found less than it asked for.
    pub(crate) fn claim_missed(&self, missed: Missed) {
        let Missed { owner, label, key, namespaces, asked, hit, short } = missed;
        let unfound = Unfound { owner, key, namespaces: &namespaces, asked, hit };
        let why = match Reason::of_claim(short) {
            Some(reason) => Why { reason, ghost: None, elsewhere: None },
            None => self.why(&key, &namespaces),
        };
        self.missed(&unfound, label, "claim", &why);
    }

    /// A lookup found less than it asked for.
    pub(crate) fn lookup_missed(&self, unfound: &Unfound<'_>) {
        let why = self.why(&unfound.key, unfound.namespaces);
        self.missed(unfound, None, "lookup", &why);
    }

    fn missed(&self, unfound: &Unfound<'_>, label: Option<Box<str>>, by: &'static str, why: &Why) {
        let misses = &self.misses;
        misses.counts[why.reason as usize].fetch_add(1, Ordering::Relaxed);
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
            reason: why.reason,
            ghost: why.ghost,
            elsewhere: why.elsewhere.and_then(spec_of),
        };
        misses.last.lock().push(miss);
    }

    /// Why a block of this key is not there, for a request of these namespaces.
    fn why(&self, key: &BlockKey, namespaces: &[NamespaceId]) -> Why {
        let of_ghost = |ghost: Ghost| Why { reason: ghost.fate.into(), ghost: Some(ghost), elsewhere: None };
        if let Some(ghost) = self.misses.find(key) {
            return of_ghost(ghost);
        }
        // What went in a reset is remembered by what no epoch changes.
        let reset = self.directory.by_id(key.namespace).filter(|opened| opened.epoch > 0);
        let before = reset.map(|opened| BlockKey { namespace: opened.spec.root(), hash: key.hash });
        if let Some(ghost) = before.and_then(|key| self.misses.find(&key)) {
            return of_ghost(ghost);
        }
        let elsewhere = self.elsewhere(key.hash, namespaces).into_iter().next();
        let reason = if elsewhere.is_some() { Reason::OtherNamespace } else { Reason::NeverStored };
        Why { reason, ghost: None, elsewhere }
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

//! Finds out why a request missed, and records it.

use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use kvdepot_core::machine::{Opened, TierSet};
use kvdepot_core::misses::{Ghost, Missed, Reason};
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};
use kvdepot_tier::Presence as InTier;

use super::Unfound;
use super::explain::hex;
use super::record::{Cause, Miss};
use crate::locate::Locator;

/// Other namespaces in which a block that was missed is looked for, at most: a bound on what a miss costs.
const NAMESPACES_LOOKED_AT: usize = 256;

/// As [`Cause`], and where the block is instead.
pub(super) struct Why {
    pub(super) cause: Cause,
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

/// Logs a miss or partial hit: one line each, however many blocks it missed.
fn log(unfound: &Unfound<'_>, label: Option<&str>, by: &str, reason: Reason) {
    let Unfound { key, asked, hit, .. } = unfound;
    let (missed, reason, label) = (asked - hit, reason.as_str(), label.unwrap_or("without a name"));
    tracing::debug!(
        "{by} {label}: {hit} of {asked} blocks were hits; of the other {missed} the first one is missing: {reason} \
         (namespace {:.8}, block {:.8})",
        hex(&key.namespace.0),
        hex(&key.hash.0)
    );
}

impl Locator {
    /// A claim found less than it asked for.
    pub(crate) fn claim_missed(&self, missed: Missed) {
        let Missed { owner, label, key, namespaces, asked, hit, short, tiers } = missed;
        let unfound = Unfound { owner, key, namespaces: &namespaces, asked, hit, untold: false };
        let why = Reason::of_claim(short)
            .map_or_else(|| self.why(&key, &namespaces, tiers, unfound.untold), Why::from);
        self.missed(&unfound, label, "claim", &why);
    }

    /// A lookup found less than it asked for.
    pub(crate) fn lookup_missed(&self, unfound: &Unfound<'_>) {
        let why = self.why(&unfound.key, unfound.namespaces, TierSet::ALL, unfound.untold);
        self.missed(unfound, None, "lookup", &why);
    }

    fn missed(&self, unfound: &Unfound<'_>, label: Option<Box<str>>, by: &'static str, why: &Why) {
        let misses = &self.misses;
        misses.counts[why.cause.reason as usize].fetch_add(1, Ordering::Relaxed);
        let namespace = self.directory.by_id(unfound.key.namespace);
        if let Some(tally) = self.directory.tally_of(unfound.key.namespace) {
            tally.missed();
        }
        let spec_of = |id: NamespaceId| self.directory.by_id(id).map(|opened| opened.spec);
        log(unfound, label.as_deref(), by, why.cause.reason);
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

    /// Why a block of this key is not there, for a request of these namespaces and tiers. `untold`: a tier did not answer
    /// about it.
    pub(super) fn why(
        &self,
        key: &BlockKey,
        namespaces: &[NamespaceId],
        among: TierSet,
        untold: bool,
    ) -> Why {
        if untold {
            return Reason::TooSlow.into();
        }
        // What another tier has lost, it has lost for others.
        let is_of_request = |ghost: &Ghost| ghost.tier.is_none_or(|tier| among.has(tier));
        let ghost = self.misses.find(key).filter(is_of_request);
        // A tier that is down cannot say whether it has the block. Only what is remembered of that tier says more.
        let mut tiers = self.tiers.iter().enumerate();
        let down = tiers.find(|(index, tier)| among.has(*index) && tier.is_down(key)).map(|(index, _)| index);
        if let Some(tier) = down.filter(|&tier| ghost.is_none_or(|ghost| ghost.tier != Some(tier))) {
            let cause = Cause { reason: Reason::Unavailable, ghost: None, down: Some(tier) };
            return Why { cause, elsewhere: None };
        }
        if let Some(ghost) = ghost {
            return ghost.into();
        }
        let is_provisional = |opened: Opened| !opened.has_epoch_id;
        if among != TierSet::NONE && self.directory.by_id(key.namespace).is_some_and(is_provisional) {
            // Tiers are not asked for it, because one of them has not answered about the namespace.
            return Reason::TooSlow.into();
        }
        if let Some(why) = self.why_of_reset(key) {
            return why;
        }
        if !among.has_all(self.tiers.len()) {
            return Reason::Excluded.into();
        }
        let elsewhere = self.elsewhere(key.hash, namespaces).into_iter().next();
        let reason = if elsewhere.is_some() { Reason::OtherNamespace } else { Reason::NeverStored };
        Why { elsewhere, ..reason.into() }
    }

    /// Whether a block went in a reset of its namespace.
    fn why_of_reset(&self, key: &BlockKey) -> Option<Why> {
        let opened = self.directory.by_id(key.namespace)?;
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
    pub(super) fn elsewhere(&self, hash: BlockHash, but: &[NamespaceId]) -> Vec<NamespaceId> {
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

    use kvdepot_core::{BlockLayout, NamespaceSpec};

    use super::*;

    #[test]
    fn a_block_that_a_reset_has_not_swept_yet_is_told_as_reset() {
        let locator = Locator::new(Vec::new(), Duration::from_secs(60), 64);
        let layout = BlockLayout::uniform(1, &[4096]).expect("a layout");
        let spec = Arc::new(NamespaceSpec::new("{}", layout).expect("a description"));
        let open = |epoch| Opened {
            handle: 0,
            id: spec.id(epoch),
            epoch,
            has_epoch_id: true,
            spec: Arc::clone(&spec),
        };
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
}

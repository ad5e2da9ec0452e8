//! The reference: which dumps may be served under which key.
//!
//! Every dump has its own content, a *version*, even if an engine would dump the same bytes twice. So the simulation
//! sees which dump a client got.

use std::collections::BTreeMap;

use kvdepot_core::{BlockKey, NamespaceId};

use crate::fail::{Fail, Rule, fail};
use crate::memory::POISON;

/// One dump.
#[derive(Clone, Debug)]
pub(crate) struct Version {
    pub(crate) key: BlockKey,
    pub(crate) pages: usize,
    /// Whether all of it was committed.
    pub(crate) sealed: bool,
    /// Number of leases granted when it was removed or replaced: no later one may show it.
    pub(crate) gone: Option<u64>,
    /// Whether a client was told that all tiers have removed it.
    pub(crate) removed: bool,
}

/// All dumps of a run.
#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) versions: Vec<Version>,
    by_key: BTreeMap<BlockKey, Vec<usize>>,
    /// Operation in which each key was last removed or replaced.
    changed: BTreeMap<BlockKey, usize>,
}

/// Returns the content of a page of a version.
pub(crate) const fn tag(version: usize, page: usize) -> u64 {
    (version as u64) << 8 | page as u64
}

/// Returns a version's checksum.
pub(crate) const fn crc_of(version: usize) -> u64 {
    0xC0DE_0000_0000_0000 | version as u64
}

const fn version_of(tag: u64) -> usize {
    (tag >> 8) as usize
}

impl Model {
    pub(crate) fn reserve(&mut self, key: BlockKey, pages: usize) -> usize {
        self.versions.push(Version { key, pages, sealed: false, gone: None, removed: false });
        let version = self.versions.len() - 1;
        self.by_key.entry(key).or_default().push(version);
        version
    }

    pub(crate) fn seal(&mut self, version: usize) {
        self.versions[version].sealed = true;
    }

    /// Records that a key was removed or replaced: leases after number `leases` must not show what was sealed under it.
    pub(crate) fn forget(&mut self, key: BlockKey, leases: u64, at: usize) -> Vec<usize> {
        self.changed.insert(key, at);
        let mut gone = Vec::new();
        for &version in self.by_key.get(&key).into_iter().flatten() {
            let entry = &mut self.versions[version];
            if entry.sealed && entry.gone.is_none() {
                entry.gone = Some(leases);
                gone.push(version);
            }
        }
        gone
    }

    /// Records that a tier found a block damaged that claims may have leased in its memory: nobody is shown it any more.
    pub(crate) fn damaged(&mut self, key: BlockKey, at: usize) {
        self.changed.insert(key, at);
    }

    /// Returns the key of a page with this tag.
    pub(crate) fn key_of(&self, tag: u64) -> Option<BlockKey> {
        self.versions.get(version_of(tag)).map(|version| version.key)
    }

    /// Records that leases after number `leases` must not show anything that was sealed under keys of this namespace
    /// id.
    pub(crate) fn forget_namespace(&mut self, id: NamespaceId, leases: u64) {
        let sealed = |entry: &&mut Version| entry.key.namespace == id && entry.gone.is_none();
        self.versions.iter_mut().filter(sealed).for_each(|entry| entry.gone = Some(leases));
    }

    /// Returns whether a key was removed or replaced at or after an operation.
    pub(crate) fn changed_since(&self, key: &BlockKey, at: usize) -> bool {
        self.changed.get(key).is_some_and(|&changed| changed >= at)
    }

    /// Returns the version of a complete block, if the tags are those of one.
    pub(crate) fn version(&self, key: &BlockKey, tags: &[u64]) -> Result<usize, Fail> {
        let Some(&first) = tags.first().filter(|&&first| first != POISON) else {
            return fail(Rule::Bytes, format!("{} shows bytes that nobody dumped", name(key)));
        };
        let version = version_of(first);
        let whole: Vec<u64> = (0..tags.len()).map(|page| tag(version, page)).collect();
        let Some(entry) = self.versions.get(version) else {
            return fail(Rule::Bytes, format!("{} shows an unknown version", name(key)));
        };
        if tags != whole || entry.pages != tags.len() {
            let shown: Vec<String> = tags.iter().map(|&t| shown(t)).collect();
            return fail(Rule::Bytes, format!("{} is torn: {}", name(key), shown.join(" ")));
        }
        if entry.key != *key || !entry.sealed {
            let (of, sealed) = (name(&entry.key), entry.sealed);
            return fail(
                Rule::Bytes,
                format!("{} shows version {version} of {of}, sealed {sealed}", name(key)),
            );
        }
        Ok(version)
    }

    /// Checks that a lease may show a block. Returns its version.
    pub(crate) fn shown(&self, key: &BlockKey, tags: &[u64], lease: u64) -> Result<usize, Fail> {
        let version = self.version(key, tags)?;
        if self.versions[version].gone.is_some_and(|leases| lease > leases) {
            return fail(
                Rule::Stale,
                format!("{} shows version {version}, which was removed or replaced", name(key)),
            );
        }
        Ok(version)
    }

    /// Returns whether a version was removed or replaced.
    pub(crate) fn is_gone(&self, version: usize) -> bool {
        self.versions[version].gone.is_some()
    }

    /// Records that a depot took over the pool and restarts the numbers of leases: no lease may show earlier removed
    /// versions.
    pub(crate) fn leases_begin_anew(&mut self) {
        self.versions.iter_mut().filter(|entry| entry.gone.is_some()).for_each(|entry| entry.gone = Some(0));
    }

    /// Records that a client was told that a version is removed.
    pub(crate) fn removed(&mut self, version: usize) {
        self.versions[version].removed = true;
    }

    /// Records that after a crash a version that a tier still has may come back, unless a client was told that it is
    /// removed.
    pub(crate) fn come_back(&mut self, version: usize) {
        if let Some(entry) = self.versions.get_mut(version).filter(|entry| !entry.removed) {
            entry.gone = None;
        }
    }
}

fn shown(tag: u64) -> String {
    if tag == POISON { "?".to_owned() } else { format!("{}.{}", version_of(tag), tag & 0xff) }
}

/// Returns a key as traces show it.
pub(crate) fn name(key: &BlockKey) -> String {
    let (space, hash) = (key.namespace.0, key.hash.0);
    format!("{:02x}{:02x}/{}.{}", space[0], space[1], hash[0], hash[1])
}

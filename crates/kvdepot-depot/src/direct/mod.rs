//! Direct use of a depot in its own process, slot by slot, as by the wire door. Bytes go straight between a socket and
//! a slot. Nothing here waits, except for the calls that say so.

mod slots;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::machine::{
    self, Leased, Location, Opened, Outcome, REMOVE_BLOCKS, Reply, Request, Reserve,
};
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

use crate::epochs::Unanswered;
use crate::locate::Locator;
use crate::message::{Hashes, NamespaceHandle};
use crate::session::LoadHow;
use crate::stats::Stats;
use crate::{Depot, Session};

pub use slots::{ReadSlot, WriteSlot};

/// A namespace of this depot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenNamespace {
    /// The number at this depot.
    pub handle: NamespaceHandle,
    /// The current id in keys.
    pub id: NamespaceId,
    /// The epoch.
    pub epoch: u32,
    /// Size of one of its blocks in bytes.
    pub block_bytes: u64,
}

/// What is known about a block without waiting.
#[derive(Debug)]
pub enum Now {
    /// It is in the pool, and is now leased.
    Here(ReadSlot),
    /// Neither pool nor tiers have it.
    Absent,
    /// A tier has it or may have it, or it is in flight: [`Direct::read`] finds out.
    Ask,
}

/// An owner of slots, such as a connection. Clones are the same owner.
#[derive(Clone, Debug)]
pub struct Direct {
    session: Arc<Session>,
    /// Longest wait of a call for tiers, if it is shorter than the depot's own.
    most: Option<Duration>,
}

impl Depot {
    /// Makes a new owner of slots in this process.
    pub fn direct(&self) -> Direct {
        Direct { session: Arc::new(self.session()), most: None }
    }
}

/// How long a removal waits for the tiers.
const REMOVE_WAIT: Duration = Duration::from_secs(2);
/// Sets of blocks that are removed at a time.
const REMOVALS_AT_ONCE: usize = 32;

/// The outcome of a removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Whether each block existed, as far as that is known without I/O.
    pub was_there: Vec<bool>,
    /// Number of blocks that a tier may still have, because it failed or has not answered in time.
    pub left: usize,
}

impl Removed {
    /// Fails with `Unavailable` if a tier may still have some of the blocks.
    pub fn into_result(self) -> Result<Vec<bool>> {
        if self.left == 0 {
            return Ok(self.was_there);
        }
        let what = "a tier could not remove blocks: they are not served from it, and it is asked again while this depot runs";
        Err(Error::new(ErrorKind::Unavailable, what)
            .with("blocks_left", self.left)
            .with("blocks", self.was_there.len()))
    }
}

impl From<Opened> for OpenNamespace {
    fn from(opened: Opened) -> Self {
        let Opened { handle, id, epoch, spec, .. } = opened;
        Self { handle, id, epoch, block_bytes: spec.layout().block_bytes() }
    }
}

impl Direct {
    /// The same owner, for a caller that waits no longer than `most` for the answer to an opening, a lookup, a removal or a
    /// new epoch: a tier that has not answered by then counts as one that does not.
    #[must_use]
    pub fn within(self, most: Duration) -> Self {
        Self { most: Some(most), ..self }
    }

    /// Returns when a call that begins now must be answered, if that is limited.
    fn by(&self) -> Option<Instant> {
        self.most.map(|most| Instant::now() + most)
    }

    /// Opens a namespace. May wait for a tier's disk. Fails if one of several tiers does not answer.
    pub fn open_namespace(&self, canonical: &str) -> Result<OpenNamespace> {
        let (runner, user) = (self.session.runner(), self.session.user());
        runner.open_namespace(user, canonical, Unanswered::Refused, self.most).map(OpenNamespace::from)
    }

    /// Ends this owner's use of a namespace, if it uses it. The depot forgets namespaces without users when it needs room
    /// for others.
    pub fn close_namespace(&self, canonical: &str) -> Result<()> {
        let spec = NamespaceSpec::from_canonical(canonical)?;
        match self.session.runner().locator.directory.find(&spec) {
            Some(known) => self.session.close_namespace(known.handle),
            None => Ok(()),
        }
    }

    /// Opens namespaces, all at the same time. May wait for a tier's disk, and no longer than for one namespace.
    pub fn open_namespaces(&self, canonical: &[String]) -> Result<Vec<OpenNamespace>> {
        let session = &self.session;
        let opened =
            session.runner().open_namespaces(session.user(), canonical, Unanswered::Refused, self.most)?;
        Ok(opened.into_iter().map(OpenNamespace::from).collect())
    }

    /// Returns the namespace with the current id `id`; `NotFound` if it was not opened here or its epoch has passed.
    pub fn namespace(&self, id: NamespaceId) -> Result<OpenNamespace> {
        let opened = self.session.runner().locator.directory.by_id(id).ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                "the namespace is not open here, or its epoch has passed: open it",
            )
        })?;
        self.session.use_namespace(opened.handle);
        Ok(opened.into())
    }

    /// Returns the locator, which knows the current ids in keys.
    pub(crate) fn locator(&self) -> Arc<Locator> {
        Arc::clone(&self.session.runner().locator)
    }

    /// Advances a namespace to an epoch, never back. May wait for a tier's disk.
    pub fn set_epoch(&self, handle: NamespaceHandle, epoch: u32) -> Result<OpenNamespace> {
        self.session.runner().set_epoch(handle, epoch, self.most).map(OpenNamespace::from)
    }

    /// Advances a namespace to its next epoch, which no other depot has. May wait for a tier's disk.
    pub fn advance(&self, handle: NamespaceHandle) -> Result<OpenNamespace> {
        self.session.runner().advance(handle).map(OpenNamespace::from)
    }

    /// Advances namespaces to their next epochs. May wait for a tier's disk.
    pub fn reset(&self, handles: &[NamespaceHandle]) -> Result<()> {
        self.session.runner().reset(handles).map(drop)
    }

    /// Returns which blocks exist, if that is known without waiting.
    pub fn exist_now(&self, keys: &[BlockKey]) -> Option<Vec<bool>> {
        self.session.runner().locator.exist_now(keys)
    }

    /// Returns which blocks exist. Waits for tiers that cannot tell without I/O, within limits.
    pub fn exist(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.session.runner().locator.exist(keys, self.by())
    }

    /// Returns how many leading blocks exist. Waits like `exist`.
    pub fn prefix(&self, handle: NamespaceHandle, hashes: &[u8]) -> Result<u32> {
        let (locator, owner) = (&self.session.runner().locator, self.session.owner());
        let prefix = locator.prefix(owner, &[handle], &Hashes(hashes.into()), self.by())?;
        Ok(u32::try_from(prefix).unwrap_or(u32::MAX))
    }

    /// Returns what is known about each block without waiting. Blocks in the pool are leased.
    pub fn read_now(&self, keys: &[BlockKey]) -> Vec<Now> {
        let runner = self.session.runner();
        let mut out: Vec<Now> = Vec::with_capacity(keys.len());
        let mut missed = Vec::new();
        for now in self.lease_now(keys) {
            out.push(match now {
                machine::Now::Leased(leased) => Now::Here(self.read_slot(leased)),
                machine::Now::Arriving => Now::Ask,
                machine::Now::Absent => {
                    missed.push(out.len());
                    Now::Absent
                }
            });
        }
        if !runner.locator.tiers.is_empty() && !missed.is_empty() {
            let asked: Vec<BlockKey> = missed.iter().map(|&i| keys[i]).collect();
            for (&i, location) in missed.iter().zip(runner.locator.locate(&asked)) {
                if location != Location::Absent {
                    out[i] = Now::Ask;
                }
            }
        }
        let count = |is_meant: fn(&Now) -> bool| out.iter().filter(|now| is_meant(now)).count();
        // Others are counted by the read that the caller makes of them.
        Stats::add(&runner.locator.stats.load_blocks, count(|now| !matches!(now, Now::Ask)));
        Stats::add(&runner.locator.stats.load_blocks_missed, count(|now| matches!(now, Now::Absent)));
        out
    }

    /// Leases those blocks that are in the pool, with their index in `keys`.
    pub(crate) fn read_pool(&self, keys: &[BlockKey]) -> Vec<(usize, ReadSlot)> {
        let leased = self.lease_now(keys).into_iter().enumerate().filter_map(|(index, now)| match now {
            machine::Now::Leased(leased) => Some((index, self.read_slot(leased))),
            machine::Now::Arriving | machine::Now::Absent => None,
        });
        leased.collect()
    }

    fn lease_now(&self, keys: &[BlockKey]) -> Vec<machine::Now> {
        let request = Request::LeaseNow { keys: keys.to_vec() };
        match self.session.runner().ask(self.session.owner(), request) {
            Ok(Reply::Leased(nows)) => nows,
            _ => vec![machine::Now::Absent; keys.len()],
        }
    }

    fn read_slot(&self, leased: Leased) -> ReadSlot {
        let runner = self.session.runner();
        let buf = runner.pool.slot(&leased.runs).expect("the allocator hands out runs inside of the pool");
        let (session, block_bytes) = (Arc::clone(&self.session), leased.block_bytes as usize);
        // SAFETY: the machine leases only sealed slots for reading, and this owner has the lease.
        unsafe { ReadSlot::new(session, leased.lease, buf, block_bytes, leased.crc64) }
    }

    /// Leases blocks, reading them from tiers where needed; waits up to `wait`. Blocks that found no space while others
    /// were leased are `NoSpace`; a retry after those leases have ended finds space. `NotFound` if `id` is not the
    /// namespace's current id any more.
    pub fn read(
        &self,
        handle: NamespaceHandle,
        id: NamespaceId,
        hashes: &[BlockHash],
        wait: Duration,
    ) -> Result<Vec<Result<ReadSlot, ErrorKind>>> {
        // Whoever reads through this door has the pool's memory only.
        let how = LoadHow { wait, last: true, runs_max: usize::MAX, in_place: false };
        let outcomes = self.session.load(handle, Some(id), hashes.to_vec(), how)?;
        let slots = outcomes.into_iter().map(|outcome| match outcome {
            Outcome::Leased(leased) => Ok(self.read_slot(leased)),
            Outcome::Have => Err(ErrorKind::NotFound),
            Outcome::Refused(kind) => Err(kind),
        });
        Ok(slots.collect())
    }

    /// Reserves a slot for a block. Returns `None` if the depot has the block already or it is being stored, and
    /// `NotFound` if the namespace has left the epoch in which it was opened.
    pub fn reserve(&self, namespace: OpenNamespace, hash: BlockHash) -> Result<Option<WriteSlot>> {
        self.reserve_for(namespace, hash, Reserve::RemoteBlock)
    }

    /// Reserves a slot for a value that replaces the one under its key.
    pub(crate) fn reserve_value(&self, handle: NamespaceHandle, hash: BlockHash) -> Result<WriteSlot> {
        let opened = self.session.runner().locator.directory.get(handle)?;
        let slot = self.reserve_for(opened.into(), hash, Reserve::Value)?;
        slot.ok_or_else(|| Error::new(ErrorKind::Busy, "the block is being stored"))
    }

    fn reserve_for(&self, opened: OpenNamespace, hash: BlockHash, how: Reserve) -> Result<Option<WriteSlot>> {
        let runner = self.session.runner();
        let (namespace, id) = (opened.handle, Some(opened.id));
        let request = Request::Reserve { namespace, id, hashes: vec![hash], how, runs_max: usize::MAX };
        let Reply::Slots(mut outcomes) = runner.ask(self.session.owner(), request)? else {
            return Err(Error::new(ErrorKind::Protocol, "the machine gave another reply"));
        };
        let leased = match outcomes.pop() {
            Some(Outcome::Leased(leased)) => leased,
            Some(Outcome::Have) => return Ok(None),
            Some(Outcome::Refused(kind)) => {
                return Err(Error::new(kind, "the pool has no room for a block now")
                    .with("block_bytes", opened.block_bytes)
                    .with("pool_bytes", runner.config.pool_bytes));
            }
            None => return Err(Error::new(ErrorKind::Protocol, "the machine gave another reply")),
        };
        let buf = runner.pool.fresh_slot(&leased.runs).inspect_err(|_| {
            let request = Request::Release { leases: vec![leased.lease] };
            let _ = runner.ask(self.session.owner(), request);
        })?;
        let key = BlockKey { namespace: opened.id, hash };
        let (session, block_bytes) = (Arc::clone(&self.session), leased.block_bytes as usize);
        // SAFETY: the machine just made the slot for filling, and leased it to this owner.
        Ok(Some(unsafe { WriteSlot::new(session, leased.lease, key, buf, block_bytes) }))
    }

    /// Returns whether [`Self::remove`] waits for no other machine.
    pub fn removes_at_once(&self) -> bool {
        self.session.runner().locator.tiers.iter().all(|tier| tier.name() != "remote")
    }

    /// Removes blocks. Those that a tier could not remove in time are retried, and not read from tiers meanwhile.
    pub fn remove(&self, keys: &[BlockKey]) -> Removed {
        let sets: Vec<&[BlockKey]> = keys.chunks(REMOVE_BLOCKS).collect();
        let mut removed = Removed { was_there: Vec::with_capacity(keys.len()), left: 0 };
        for of_set in self.remove_each(&sets) {
            removed.was_there.extend(of_set.was_there);
            removed.left += of_set.left;
        }
        removed
    }

    /// Removes sets of at most [`REMOVE_BLOCKS`] blocks each. Several sets are removed at a time, so that a tier on another
    /// machine does not cost a round trip for each of them; a block in two sets may count twice.
    pub fn remove_each<S: AsRef<[BlockKey]>>(&self, sets: &[S]) -> Vec<Removed> {
        let runner = self.session.runner();
        let mut all = Vec::with_capacity(sets.len());
        let by = self.by();
        for sets in sets.chunks(REMOVALS_AT_ONCE) {
            let deadline = by.unwrap_or_else(|| Instant::now() + REMOVE_WAIT);
            let begun: Vec<_> = sets
                .iter()
                .map(|set| {
                    let (keys, locations) = (set.as_ref(), runner.locator.locate(set.as_ref()));
                    let absent = keys.iter().zip(&locations).filter(|(_, at)| **at == Location::Absent);
                    let absent: Vec<BlockKey> = absent.map(|(key, _)| *key).collect();
                    let request = Request::Remove { keys: keys.to_vec(), locations };
                    (runner.begin_within(self.session.owner(), request, deadline), keys.len(), absent)
                })
                .collect();
            for (asked, count, absent) in begun {
                all.push(match runner.answer_within(asked) {
                    Ok(Reply::Removed { was_there, left }) => Removed { was_there, left },
                    _ => Removed { was_there: vec![false; count], left: count },
                });
                self.remove_late(&absent, by);
            }
        }
        all
    }

    /// Removes blocks again that no tier had before they were removed and one has now, because their write completed in
    /// between.
    fn remove_late(&self, keys: &[BlockKey], by: Option<Instant>) {
        let runner = self.session.runner();
        if runner.locator.tiers.is_empty() || keys.is_empty() {
            return;
        }
        let found = keys.iter().zip(runner.locator.locate(keys));
        let (keys, locations): (Vec<_>, Vec<_>) = found
            .filter(|(_, location)| matches!(location, Location::Tier(_)))
            .map(|(key, location)| (*key, location))
            .unzip();
        if !keys.is_empty() {
            let deadline = by.unwrap_or_else(|| Instant::now() + REMOVE_WAIT);
            let request = Request::Remove { keys, locations };
            let _ = runner.ask_within(self.session.owner(), request, deadline);
        }
    }

    /// Evicts cold blocks until no more than `percent` of the pool is in use. Returns the number of evicted blocks.
    pub fn evict_to_percent(&self, percent: f64) -> u64 {
        let runner = self.session.runner();
        let mut gone = 0;
        loop {
            let pool_bytes = runner.look(|machine| machine.gauges().pool_bytes);
            let bytes = (pool_bytes as f64 * percent / 100.0) as u64;
            let reply = runner.ask(self.session.owner(), Request::EvictTo { bytes });
            let Ok(Reply::Evicted(now, more)) = reply else { return gone };
            gone += now as u64;
            if !more {
                return gone;
            }
        }
    }

    /// Returns the used share of the pool, in percent.
    pub fn used_percent(&self) -> f64 {
        let gauges = self.session.runner().look(machine::Machine::gauges);
        let used = gauges.pool_bytes - gauges.pool_free_bytes;
        used as f64 * 100.0 / gauges.pool_bytes.max(1) as f64
    }

    /// Returns the number of blocks of these namespaces in pool and tiers, each counted once. Walks all of them: for
    /// administrators.
    pub fn count(&self, handles: &[NamespaceHandle]) -> Result<u64> {
        let runner = self.session.runner();
        let mut keys = hashbrown::HashSet::<BlockKey>::new();
        let mut from = Some(0);
        while let Some(start) = from {
            let request = Request::Keys { namespaces: handles.to_vec(), from: start };
            let Reply::Keys(some, next) = runner.ask(self.session.owner(), request)? else { break };
            keys.extend(some);
            from = next;
        }
        for &handle in handles {
            let id = runner.locator.directory.get(handle)?.id;
            for tier in &runner.locator.tiers {
                keys.extend(tier.keys(id));
            }
        }
        Ok(keys.len() as u64)
    }

    /// Returns counters and gauges, as clients read them by `Request::Stats`. Reading changes none of them.
    pub fn stats(&self) -> serde_json::Value {
        self.session.stats()
    }

    /// Forgets the longest holds of the depot's lock, before a measurement.
    pub fn forget_holds(&self) {
        self.session.runner().forget_holds();
    }

    /// Returns what was counted in each minute of the last hour: `interval_s`, and the `intervals`, the oldest first. The last
    /// one is not over.
    pub fn history(&self) -> serde_json::Value {
        self.session.runner().history()
    }

    /// Returns the last requests that found less than they asked for, newest first: at most `count`, and with `request` only
    /// those whose label begins with it.
    pub fn last_misses(&self, count: usize, request: Option<&str>) -> serde_json::Value {
        self.locator().last_misses(count, request)
    }

    /// Returns where blocks are, and why missing ones are missing. Waits, within limits, for tiers that need I/O to tell.
    ///
    /// # Errors
    /// `NotFound` if no known namespace's name begins with `namespace`; `Config` if several do, or a hash is malformed; `Busy`
    /// while two others are answered.
    pub fn explain(&self, namespace: &str, hashes: &[&str]) -> Result<serde_json::Value> {
        self.locator().explain(namespace, hashes)
    }

    /// Returns the namespaces that the depot knows whose names begin with `prefix`, with their complete descriptions: a limited
    /// number of them, after the number `after`, and `next`, after which the next answer begins.
    pub fn describe_namespaces(&self, prefix: &str, after: Option<NamespaceHandle>) -> serde_json::Value {
        self.session.describe_namespaces(prefix, after)
    }

    /// Returns whether the depot has tiers below its pool.
    pub fn has_tiers(&self) -> bool {
        !self.session.runner().locator.tiers.is_empty()
    }
}

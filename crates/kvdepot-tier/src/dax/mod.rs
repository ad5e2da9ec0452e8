//! The tier of blocks on a DAX medium: a device of persistent memory, or a plain file that stands in for one.
//!
//! Blocks lie in extents; a header of one cache line, written last, makes each of them visible (P1). The contents of
//! the medium are read into an index when it is opened. `layout`, `space`, `slots`, `epochs`, `recover` and `plan`
//! decide and do no I/O; `format`, `writer`, `restore`, `leases`, `removal` and `namespaces` carry out what they decide.

mod ahead;
mod clock;
mod config;
mod epochs;
mod format;
mod later;
pub mod layout;
mod leases;
mod namespaces;
mod owner;
mod plan;
mod recover;
mod removal;
mod restore;
mod settings;
mod slots;
mod source;
mod space;
mod state;
#[cfg(test)]
mod tests;
mod writer;

use std::sync::{Arc, Weak};
use std::time::Instant;

use kvdepot_core::limits::{IO_QUEUE_MAX, NAMESPACES_MAX, SNAPSHOT_HASHES_MAX};
use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::mapped::{self, Medium};
use kvdepot_io::{IoEngine, PsyncConfig, PsyncEngine, Request, random};

use crate::entry::TierEntry;
use crate::media::{MediumFacts, MediumKind};
use crate::{
    BlockingCalls, BlockingConfig, Done, LeaseItem, Presence, ReadItem, Tier, TierEvents, TierMemory,
    TierUsage, WriteItem,
};
pub use config::DaxConfig;
pub(crate) use source::DaxSource;
use state::Shared;

/// The registry's entry for this tier.
pub const ENTRY: TierEntry = TierEntry {
    name: "Dax",
    open: |config| Ok(Arc::new(DaxTier::open(DaxConfig::from_json(config)?)?)),
    guards_itself: false,
    settings: &settings::SETTINGS,
    for_users: true,
};

/// Keys looked up while the lock is held once.
const PIECE: usize = 256;
/// Namespaces opened or moved at a time: one writes, the others wait for it.
const OPENING_MAX: usize = 8;

/// Blocks on a DAX medium.
#[derive(Debug)]
pub struct DaxTier {
    shared: Arc<Shared>,
    // Owned here rather than by what its callbacks hold.
    engine: Arc<dyn IoEngine>,
    /// Opens namespaces and moves them to other epochs.
    calls: BlockingCalls,
}

impl DaxTier {
    /// Opens the medium for this process alone; an empty medium is formatted.
    pub fn open(config: DaxConfig) -> Result<Self> {
        config.check()?;
        let medium = mapped::open(&config.device_path, config.max_bytes, config.access, config.lock_wait)?;
        Self::open_on(config, medium)
    }

    /// Like `open`, on the caller's own medium: `config.device_path` is ignored.
    pub fn open_on(config: DaxConfig, medium: Arc<dyn Medium>) -> Result<Self> {
        config.check_on(&*medium)?;
        let owner = owner::Owner::new(random::bytes()?);
        let opened =
            format::open(&*medium, config.max_bytes, config.capacity_bytes, random::bytes()?, &owner)?;
        let engine = PsyncConfig {
            read_threads: config.restore_workers,
            write_threads: config.put_workers,
            queue_depth: IO_QUEUE_MAX,
            name: "kvd-dax".to_owned(),
            memory_outlives: false,
        };
        let calls = BlockingCalls::new(BlockingConfig {
            name: "kvd-dax-ns".to_owned(),
            threads_max: OPENING_MAX,
            queue_max: NAMESPACES_MAX,
        });
        let format::Opened { geometry, epochs, recovered, units_max } = opened;
        let engine = Arc::new(PsyncEngine::new(engine)?);
        let shared = Shared::new(config, medium, owner, geometry, units_max, recovered.slots, epochs);
        Ok(Self { shared: Arc::new(shared), engine, calls })
    }

    /// Looks at the medium of a tier and changes nothing. Fails where `open` would, except for errors of the medium.
    pub fn inspect(config: &DaxConfig) -> Result<MediumFacts> {
        config.check()?;
        let medium = mapped::open(&config.device_path, config.max_bytes, config.access, config.lock_wait)?;
        config.check_on(&*medium)?;
        let geometry = format::look(&*medium)?;
        Ok(MediumFacts {
            kind: if medium.is_memory() { MediumKind::DaxDevice } else { MediumKind::File },
            bytes: medium.bytes(),
            formatted_bytes: geometry.map(|geometry| geometry.medium_bytes),
        })
    }

    /// The layout of the medium.
    pub fn geometry(&self) -> layout::Geometry {
        self.shared.geometry
    }

    fn opening<'a>(
        &'a self,
        spec: &'a Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) -> namespaces::Opening<'a> {
        let (shared, engine, calls) = (&self.shared, &self.engine, &self.calls);
        namespaces::Opening { shared, engine, calls, spec, at_least, deadline, done }
    }
}

impl Tier for DaxTier {
    fn name(&self) -> &str {
        "dax"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.opening(spec, at_least, deadline, done).open();
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.opening(spec, at_least, deadline, done).advance();
    }

    fn close_namespace(&self, root: NamespaceId) {
        self.shared.close_namespace(root);
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        for keys in keys.chunks(PIECE) {
            let is_ours = !self.shared.owner.is_lost();
            let state = self.shared.lock();
            out.extend(keys.iter().map(|key| {
                let is_there =
                    is_ours && state.spaces.contains_key(&key.namespace) && state.slots.contains(key);
                if is_there { Presence::Present } else { Presence::Absent }
            }));
        }
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        if deadline <= Instant::now() {
            return done(Err(Request::expired()));
        }
        let mut found = Vec::new();
        self.peek(&keys, &mut found);
        done(Ok(found.iter().take_while(|presence| **presence == Presence::Present).count()));
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        self.shared.begin_reads(&self.engine, reads, deadline);
    }

    fn memory(&self) -> Result<Option<TierMemory>> {
        self.shared.memory()
    }

    fn lease(&self, leases: Vec<LeaseItem>, deadline: Instant) {
        self.shared.begin_leases(&self.engine, leases, deadline);
    }

    fn end_leases(&self, places: &[u64]) {
        self.shared.end_leases(places);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        self.engine.submit(self.shared.begin_writes(writes, deadline));
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.shared.remove(&*self.engine, &keys, done);
    }

    fn touch(&self, keys: &[BlockKey]) {
        for keys in keys.chunks(PIECE) {
            let mut state = self.shared.lock();
            keys.iter().for_each(|key| state.slots.touch(key));
        }
    }

    fn attach(&self, events: Weak<dyn TierEvents>) {
        self.shared.attach(events);
    }

    fn usage(&self) -> TierUsage {
        let (config, geometry) = (&self.shared.config, &self.shared.geometry);
        let state = self.shared.lock();
        let most = u64::from(self.shared.units_max) * geometry.unit_bytes;
        TierUsage {
            blocks: state.slots.len() as u64,
            bytes: u64::from(state.slots.units_used()) * geometry.unit_bytes,
            bytes_max: if config.capacity_bytes > 0 { config.capacity_bytes } else { most },
        }
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        let from = u32::try_from(from).unwrap_or(u32::MAX);
        let state = self.shared.lock();
        if !state.spaces.contains_key(&namespace) || self.shared.owner.is_lost() {
            return (Vec::new(), None);
        }
        let (keys, next) = state.slots.keys_from(namespace, from, SNAPSHOT_HASHES_MAX);
        (keys, next.map(u64::from))
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.engine.drain(deadline)
    }
}

impl Drop for DaxTier {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

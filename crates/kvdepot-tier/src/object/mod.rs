//! Blocks as objects of a bucket: of S3 and stores with its protocol, Google Cloud Storage, Azure Blob Storage.
//!
//! There is one object per block, or per pack of several small blocks (`packs`), with the bytes of block files
//! (`crate::format`), so nothing of it is trusted before its checksums were compared (P1). All requests run on a few
//! threads of the tier. The tier knows about the bucket what it wrote and what it was answered, for a limited time: no
//! lookup, read or write waits for a list of the bucket. An unreachable store gets no requests for a while (`gate`), and
//! costs misses (P2). The tier has no cap: a lifecycle rule of the bucket evicts objects.

mod address;
mod aws;
mod aws_profile;
mod azure;
mod bill;
mod cloud;
mod config;
mod connection_string;
mod epochs;
mod gate;
mod google;
mod link;
mod meter;
mod names;
mod packs;
mod probe;
mod reads;
mod removal;
mod settings;
mod shared;
mod store;
mod transport;
mod writes;

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvdepot_core::limits::{OBJECT_PACKS_IN_FLIGHT, OBJECT_THREADS};
use kvdepot_core::{BlockKey, Error, NamespaceId, NamespaceSpec, Result};
use object_store::ObjectStore;
use tokio::runtime::{Builder, Handle, Runtime};

pub use address::Account;
pub use cloud::Cloud;
pub use config::ObjectConfig;

use crate::entry::TierEntry;
use crate::known::PARTS;
use crate::{Done, Presence, ReadItem, Tier, TierEvents, TierServer, TierUsage, WriteItem};
use link::Link;
use meter::Meter;
use shared::Shared;

/// The registry's entry of this tier.
pub const ENTRY: TierEntry = TierEntry {
    name: "Object",
    open: |config| Ok(Arc::new(ObjectTier::open(ObjectConfig::from_json(config)?)?)),
    guards_itself: true,
    settings: &settings::SETTINGS,
    for_users: true,
};

/// Blocks in a bucket.
pub struct ObjectTier {
    shared: Arc<Shared>,
    /// Taken when the tier is dropped.
    runtime: Option<Runtime>,
}

impl ObjectTier {
    /// Makes the client. The store gets its first request when a namespace is opened, and need not exist before.
    pub fn open(config: ObjectConfig) -> Result<Self> {
        let meter = Arc::new(Meter::default());
        let store = store::open(&config, &meter)?;
        Self::start(config, store, meter)
    }

    /// Opens the tier on the caller's store, whose requests are not counted.
    pub fn open_on(config: ObjectConfig, store: Arc<dyn ObjectStore>) -> Result<Self> {
        Self::start(config, store, Arc::new(Meter::default()))
    }

    fn start(config: ObjectConfig, store: Arc<dyn ObjectStore>, meter: Arc<Meter>) -> Result<Self> {
        config.check()?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(OBJECT_THREADS)
            .max_blocking_threads(OBJECT_THREADS)
            .thread_name("kvd-object")
            .enable_all()
            .build()
            .map_err(|e| Error::io("cannot start the threads of an Object tier", e))?;
        let address = shown_address(&config);
        let link = Link::new(store, meter, config.timeout, config.requests, address);
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let shared = Arc::new(Shared::new(config, link, host.trim().to_owned(), runtime.handle().clone()));
        if shared.config.sweep {
            runtime.spawn(Arc::clone(&shared).sweep_forever());
        }
        Ok(Self { shared, runtime: Some(runtime) })
    }
}

impl Tier for ObjectTier {
    fn name(&self) -> &str {
        "object"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.shared.open_namespace(spec, at_least, deadline, done);
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.shared.advance_epoch(spec, at_least, deadline, done);
    }

    fn close_namespace(&self, root: NamespaceId) {
        let closed = self.shared.spaces.lock().close(root);
        if let Some(id) = closed {
            self.shared.forget_namespace(id);
        }
    }

    fn is_down(&self, _key: &BlockKey) -> bool {
        self.shared.link.is_off()
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        self.shared.peek(keys, out);
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        self.shared.probe(keys, deadline, done);
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        self.shared.read(reads, deadline);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        writes.into_iter().for_each(|write| self.shared.write(write, deadline));
    }

    fn write_window_bytes(&self) -> u64 {
        self.shared.config.pack_bytes * OBJECT_PACKS_IN_FLIGHT
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.shared.remove(keys, done);
    }

    /// A bucket does not track recency: its lifecycle rules go by age.
    fn touch(&self, _keys: &[BlockKey]) {}

    fn attach(&self, events: Weak<dyn TierEvents>) {
        *self.shared.link.listener.lock() = Some(events);
    }

    /// The blocks that this tier knows; the bucket may hold more or fewer.
    fn usage(&self) -> TierUsage {
        let known = self.shared.beliefs.known.lock().usage();
        let (blocks, bytes) = self.shared.packs.usage();
        TierUsage { blocks: known.blocks + blocks, bytes: known.bytes + bytes, ..known }
    }

    fn servers(&self) -> Vec<TierServer> {
        vec![self.shared.link.describe()]
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        self.shared.link.meter.figures().into_iter().chain(self.shared.transform.figures()).collect()
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        // The parts of what is known of single objects, and then packs by their time.
        let parts = PARTS as u64;
        if let Some(time_ms) = from.checked_sub(parts) {
            let (keys, next) = self.shared.packs.keys_from(namespace, time_ms);
            return (keys, next.map(|time_ms| time_ms + parts));
        }
        let (keys, next) = self.shared.beliefs.known.lock().present_from(namespace, from);
        (keys, next.or_else(|| self.shared.packs.has(namespace).then_some(parts)))
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.shared.owed.drain(deadline)
    }
}

/// Returns the bucket's address as people see it.
fn shown_address(config: &ObjectConfig) -> String {
    let of_account = config.account.as_ref().map(|account| account.endpoint.as_str());
    let provider = match config.cloud {
        Cloud::Aws => "s3:/",
        Cloud::Google => "gs:/",
        Cloud::Azure => "az:/",
    };
    format!("{}/{}", config.endpoint.as_deref().or(of_account).unwrap_or(provider), config.bucket)
}

impl fmt::Debug for ObjectTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectTier").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        // Not from one of its own threads, which requests in flight may need.
        if Handle::try_current().is_err() {
            self.shared.owed.drain(Instant::now() + self.shared.config.timeout);
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        // Nobody writes them any more: their callers hear that the tier is closing.
        self.shared.packs.abandon_waiting();
    }
}

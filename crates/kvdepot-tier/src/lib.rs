//! Places below the pool, their file format and their conformance suite.
//!
//! A new tier is one file, one line in [`registry`] and a test that runs [`conformance`]. The format of block files is
//! drawn byte by byte in `docs/format.md`.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod empty;
pub mod fake;
pub mod format;
pub mod guard;
pub mod posix;
pub mod registry;
pub mod remote;
mod shared_tier;

use std::fmt::Debug;
use std::time::Instant;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::SlotBuf;

pub use empty::EmptyTier;
pub use fake::FakeTier;
pub use guard::{GuardConfig, Guarded};
pub use posix::{PosixConfig, PosixTier};
pub use remote::{RemoteConfig, RemoteProtocol, RemoteTier, RemoteTls};

/// Called once, from any thread, when an operation has ended, possibly before the call that began it returns; must
/// not block.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// What a tier knows about a block without I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The tier holds it (as far as it knows: a read may still miss).
    Present,
    /// The tier does not hold it.
    Absent,
    /// Only I/O can tell: ask `probe`.
    Unknown,
}

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The block was written now.
    New,
    /// The tier had it already; nothing was written.
    AlreadyThere,
}

/// What a tier holds and what it may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUsage {
    /// Blocks held.
    pub blocks: u64,
    /// Physical bytes held or reserved for writes under way.
    pub bytes: u64,
    /// Cap in bytes; 0 = none (P5).
    pub bytes_max: u64,
}

/// How one server of a tier that has servers is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierServer {
    /// As the configuration names it.
    pub address: String,
    /// Whether it is used now; its blocks are misses while it is not.
    pub up: bool,
    /// Connections to it.
    pub connections: usize,
    /// Connections that broke or did not come about.
    pub failures: u64,
    /// Why the last of these did.
    pub last_error: Option<String>,
}

/// A place below the pool. Every tier passes `conformance::check` (P1, P2, P5, P8).
///
/// Calls return at once; I/O runs on the tier's own threads and ends in a `Done`. `deadline` is when the caller stops
/// caring: a tier gives up work that it has not begun by then with `Timeout`; work that has begun may end later, and
/// the buffer stays alive until its `Done` was called.
pub trait Tier: Send + Sync + Debug {
    /// Short name for logs, metrics and `stat`: `posix`, `fake`…
    fn name(&self) -> &str;

    /// Makes a namespace known and returns its current epoch (0 for a new one).
    fn open_namespace(&self, spec: &NamespaceSpec) -> Result<u32>;

    /// Moves a namespace to `epoch` for good: bytes of earlier epochs are unreachable when this returns, and their
    /// space is given back in the background.
    fn set_epoch(&self, spec: &NamespaceSpec, epoch: u32) -> Result<()>;

    /// What is known without I/O, one answer a key, into `out` (cleared first).
    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>);

    /// How many leading keys the tier holds, found out by I/O where needed; later `peek`s know the outcome.
    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>);

    /// Reads a block into `dst` and verifies it: `NotFound` or `Corrupt` are misses, and a corrupt block is put out of
    /// the way so that it is not served again (P1). On failure the content of `dst` is undefined.
    fn read(&self, key: BlockKey, dst: SlotBuf, deadline: Instant, done: Done<()>);

    /// Writes a block, visible only when whole (P1); room is reserved before the first byte (P5).
    fn write(&self, key: BlockKey, src: SlotBuf, deadline: Instant, done: Done<Written>);

    /// Forgets a block.
    fn remove(&self, key: BlockKey);

    /// Says that these blocks were used now: recency for the tier's own eviction.
    fn touch(&self, keys: &[BlockKey]);

    /// What is held now.
    fn usage(&self) -> TierUsage;

    /// How its servers are, if it has any.
    fn servers(&self) -> Vec<TierServer> {
        Vec::new()
    }

    /// Keys of a namespace (of its current epoch) that the tier knows; for `ls`, `verify` and tests.
    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey>;

    /// Waits until everything accepted so far has ended, or the deadline passes (`false`).
    fn drain(&self, deadline: Instant) -> bool;
}

//! Places below the pool, their file format and their conformance suite.
//!
//! A new tier is one folder, one line in [`registry`] and a test that runs [`conformance`]. The format of block files is
//! drawn byte by byte in `docs/format.md`.
#![forbid(unsafe_code)]

mod blocking;
pub mod conformance;
pub mod dax;
pub mod empty;
pub mod fake;
pub mod format;
pub mod guard;
mod known;
pub mod object;
pub mod posix;
pub mod registry;
pub mod remote;
pub mod settings;
mod shared_tier;
pub mod slab;
mod writing;

use std::fmt::{self, Debug};
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::SlotBuf;

pub use blocking::{BlockingCalls, BlockingConfig};
pub use dax::{DaxConfig, DaxTier};
pub use empty::EmptyTier;
pub use fake::FakeTier;
pub use guard::{GuardConfig, Guarded};
pub use kvdepot_core::machine::Fetched;
pub use object::{ObjectConfig, ObjectTier};
pub use posix::{PosixConfig, PosixTier};
pub use remote::{RemoteConfig, RemoteProtocol, RemoteTier, RemoteTls};
pub use slab::{SlabConfig, SlabStats, SlabTier};

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

/// One block of a batch that is read.
pub struct ReadItem {
    /// Which block.
    pub key: BlockKey,
    /// Where it goes.
    pub dst: SlotBuf,
    /// Told how this block ended.
    pub done: Done<Fetched>,
}

impl ReadItem {
    /// Ends it. The buffer is let go first: whoever is told may use its memory at once.
    pub fn end(self, outcome: Result<Fetched>) {
        drop(self.dst);
        (self.done)(outcome);
    }
}

impl Debug for ReadItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadItem({}, {} bytes)", self.key, self.dst.len())
    }
}

/// One block of a batch that is written.
pub struct WriteItem {
    /// Which block.
    pub key: BlockKey,
    /// Its bytes.
    pub src: SlotBuf,
    /// Told how this block ended.
    pub done: Done<Written>,
}

impl WriteItem {
    /// Ends it. The buffer is let go first: whoever is told may use its memory at once.
    pub fn end(self, outcome: Result<Written>) {
        drop(self.src);
        (self.done)(outcome);
    }
}

impl Debug for WriteItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteItem({}, {} bytes)", self.key, self.src.len())
    }
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

/// What a tier tells the depot above it without being asked. Called from the tier's own threads or from a caller's, while
/// the tier holds no lock; must not block. A tier may tell less than happened, never more.
pub trait TierEvents: Send + Sync {
    /// The tier gave these blocks up to make room.
    fn evicted(&self, keys: &[BlockKey]);

    /// These blocks turned out to be missing or corrupt.
    fn lost(&self, keys: &[BlockKey]);

    /// The tier is switched off for a while: reads miss and nothing is written.
    fn went_down(&self);

    /// The tier works again.
    fn came_back(&self);
}

/// A place below the pool. Every tier passes `conformance::check` (P1, P2, P5, P8).
///
/// Calls return at once; I/O runs on the tier's own threads (or on those of [`BlockingCalls`], where its calls block) and
/// ends in a `Done`. `deadline` is when the caller stops caring: a tier gives up work that it has not begun by then with
/// `Timeout`; work that has begun may end later, and the buffer stays alive until its `Done` was called.
///
/// Batches save locks, frames and system calls and mean nothing else: each item ends as it would alone, in any order. An
/// empty batch does nothing. A read and a write of one key that overlap are not ordered; a removal is ordered before what
/// begins after its `Done`.
pub trait Tier: Send + Sync + Debug {
    /// Short name for logs, metrics and `stat`: `posix`, `fake`…
    fn name(&self) -> &str;

    /// Makes a namespace known and tells its current epoch (0 for a new one), which may be one that somebody else has
    /// moved it to. If the stored epoch is below `at_least`, stores `at_least` first. Called again for a namespace that is
    /// open, it follows what is stored. Ends by `deadline`, also if it has begun: with `Timeout`, and possibly open later.
    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>);

    /// Moves a namespace to a new epoch, the higher of `at_least` and the stored epoch + 1, and tells it. An epoch never
    /// goes back, and of several callers at a time each gets one of its own where the store can tell them apart. Ends by
    /// `deadline` as `open_namespace` does.
    ///
    /// When the call returns, before its `Done` and however that turns out, bytes of earlier epochs that this tier knows
    /// are out of reach; those of epochs that somebody else has begun are when it is done. Their space is given back in
    /// the background. On failure the tier neither reads nor writes this namespace until the advance is stored, which it
    /// tries again by itself, and after a restart where the store can be told at all.
    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>);

    /// The depot does not know a namespace any more, and has nothing under way in it: the tier may let go of what it keeps
    /// in memory for it. What is stored stays, counted (P5) and evictable, and a later opening finds it again, in an epoch
    /// that is not before this one. An advance that is not stored yet is still stored. Returns at once.
    fn close_namespace(&self, root: NamespaceId) {
        let _ = root;
    }

    /// What is known without I/O, one answer a key, into `out` (cleared first).
    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>);

    /// How many leading keys the tier holds, found out by I/O where needed; later `peek`s know the outcome.
    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>);

    /// Reads blocks and verifies them. What is not there, or not in an epoch that is open, is a `Miss` and no error.
    /// `Corrupt` is an error once: the block is put out of the way so that it is not served again (P1). Without `Whole` the
    /// content of the item's `dst` is undefined.
    fn read(&self, reads: Vec<ReadItem>, deadline: Instant);

    /// Writes blocks, each visible only when whole (P1); room is reserved before its first byte (P5).
    fn write(&self, writes: Vec<WriteItem>, deadline: Instant);

    /// Forgets blocks. Done when none of them is found by a read or a peek any more, and each may be written again; an
    /// error says that one may come back.
    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>);

    /// The part of the tier that a block lies in, such as a server. Removals in different parts are asked for in different
    /// calls, so that one does not wait for another's part, and those that fail count for their part alone. Always the same
    /// one for a block, and quick: it is called under the depot's lock.
    fn part(&self, key: &BlockKey) -> usize {
        let _ = key;
        0
    }

    /// Says that these blocks were used now: recency for the tier's own eviction. Cheap: no I/O on the caller's thread.
    fn touch(&self, keys: &[BlockKey]);

    /// Has the tier tell `events` what happens to its blocks, in place of an earlier listener. A tier that has nothing to
    /// tell ignores it.
    fn attach(&self, events: Weak<dyn TierEvents>) {
        drop(events);
    }

    /// What is held now.
    fn usage(&self) -> TierUsage;

    /// How its servers are, if it has any.
    fn servers(&self) -> Vec<TierServer> {
        Vec::new()
    }

    /// What moves its blocks, if there is a choice: for `stat`.
    fn engine(&self) -> &'static str {
        ""
    }

    /// Counters of its own since it was opened, for `stat`: names and values.
    fn figures(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Keys of a namespace (of its current epoch) that the tier knows; for `ls`, `verify` and tests.
    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey>;

    /// The same in pieces of a few thousand at most: those from `from` on (0 at first), and where to go on. A block that is
    /// there from the first call to the last is in one of the pieces. `None`: the tier lists them only all at once.
    fn keys_from(&self, namespace: NamespaceId, from: u64) -> Option<(Vec<BlockKey>, Option<u64>)> {
        let _ = (namespace, from);
        None
    }

    /// Waits until everything accepted so far has ended, or the deadline passes (`false`).
    fn drain(&self, deadline: Instant) -> bool;
}

//! Tiers below the pool, their file format and their conformance suite.
//!
//! A new tier is one folder, one line in [`registry`] and a test that runs [`conformance`]. `docs/format.md` draws the
//! format of block files byte by byte.
#![forbid(unsafe_code)]

mod beliefs;
mod blank;
mod blocking;
mod compression;
pub mod conformance;
mod cooling;
pub mod dax;
pub mod empty;
pub mod encoding;
pub mod entry;
pub mod fake;
pub mod format;
pub mod guard;
mod known;
pub mod media;
pub mod mooncake;
pub mod object;
mod owed;
pub mod posix;
pub mod registry;
pub mod remote;
pub mod scan;
mod served;
pub mod settings;
mod shared_tier;
pub mod slab;
mod spaces;
pub mod stored;
mod writing;

use std::fmt::{self, Debug};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::SlotBuf;
use kvdepot_io::fork::Private;

pub use blocking::{BlockingCalls, BlockingConfig};
pub use compression::Compression;
pub use dax::{DaxConfig, DaxTier};
pub use empty::EmptyTier;
pub use fake::FakeTier;
pub use guard::{GuardConfig, Guarded};
pub use kvdepot_core::machine::Fetched;
pub use mooncake::{MooncakeConfig, MooncakeTier};
pub use object::{ObjectConfig, ObjectTier};
pub use posix::{PosixConfig, PosixTier};
pub use remote::{RemoteConfig, RemoteProtocol, RemoteTier, RemoteTls};
pub use slab::{SlabConfig, SlabStats, SlabTier};

/// Called once, from any thread, when an operation has completed, possibly before the call that began it returns. It
/// must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// What a tier knows about a block without I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The tier has it (as far as it knows: a read may still miss).
    Present,
    /// The tier does not have it.
    Absent,
    /// Only I/O can tell: call `probe`.
    Unknown,
}

/// Outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The block was written now.
    New,
    /// The tier already had it; nothing was written.
    AlreadyThere,
}

/// One block of a batch of reads.
pub struct ReadItem {
    /// Key of the block.
    pub key: BlockKey,
    /// Destination of its bytes.
    pub dst: SlotBuf,
    /// Called with the result of this block.
    pub done: Done<Fetched>,
    /// Whether the block counts as used, which lets a tier evict it later. Reads for demotion do not count.
    pub is_use: bool,
}

impl ReadItem {
    /// Makes a read that counts as a use.
    pub fn new(key: BlockKey, dst: SlotBuf, done: Done<Fetched>) -> Self {
        Self { key, dst, done, is_use: true }
    }

    /// Completes the item. The buffer is released first, because the caller may use its memory immediately.
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

/// One block of a batch of leases.
pub struct LeaseItem {
    /// Key of the block.
    pub key: BlockKey,
    /// Called with the offset of the block's first byte in the tier's memory; `None` if the tier does not have it.
    pub done: Done<Option<u64>>,
}

impl Debug for LeaseItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseItem({})", self.key)
    }
}

/// Memory of a tier that other processes map to read blocks where they lie.
#[derive(Debug)]
pub struct TierMemory {
    // Declared before the descriptor: see `Private`.
    _private: Private,
    /// What they map, read-only.
    pub file: OwnedFd,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes of it that hold blocks.
    pub blocks_bytes: u64,
    /// The unit in which it allocates those.
    pub unit_bytes: u64,
    /// What it begins with for as long as it belongs to this tier. Whoever has read a block and then finds another head
    /// must not use what was read.
    pub head: Vec<u8>,
}

impl TierMemory {
    /// Describes memory that may hold blocks everywhere. A child of `fork` does not keep the descriptor.
    pub fn new(file: OwnedFd, bytes: u64, head: Vec<u8>) -> Self {
        let (blocks_bytes, unit_bytes) = (bytes, 1);
        Self { _private: Private::of(file.as_fd()), file, bytes, blocks_bytes, unit_bytes, head }
    }

    /// Returns it with its number of units that hold blocks, and the size of one.
    #[must_use]
    pub fn with_units(self, units: u64, unit_bytes: u64) -> Self {
        Self { blocks_bytes: units * unit_bytes, unit_bytes, ..self }
    }
}

/// One block of a batch of writes.
pub struct WriteItem {
    /// Key of the block.
    pub key: BlockKey,
    /// Its bytes.
    pub src: SlotBuf,
    /// Called with the result of this block.
    pub done: Done<Written>,
}

impl WriteItem {
    /// Completes the item. The buffer is released first, because the caller may use its memory immediately.
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

/// Size of a tier's content, and its cap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUsage {
    /// Blocks held.
    pub blocks: u64,
    /// Physical bytes held, or reserved for writes in flight.
    pub bytes: u64,
    /// Cap in bytes; 0 = none (P5).
    pub bytes_max: u64,
}

/// State of one server, for tiers that have servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierServer {
    /// Its address as configured.
    pub address: String,
    /// Whether it is used now; otherwise its blocks are misses.
    pub up: bool,
    /// Number of connections to it.
    pub connections: usize,
    /// Number of connections that broke or could not be made.
    pub failures: u64,
    /// The reason of the last of these.
    pub last_error: Option<String>,
}

/// Notifications from a tier to the depot above it. They are called from the tier's own threads or from a caller's,
/// while the tier holds no lock, and must not block. A tier may report less than happened, but never more.
pub trait TierEvents: Send + Sync {
    /// The tier evicted these blocks to free space.
    fn evicted(&self, keys: &[BlockKey]);

    /// Returns whether the depot asks which blocks the tier will evict next. The answer stays the same.
    fn asks_for_cooling(&self) -> bool {
        false
    }

    /// The tier will evict these blocks next. It may evict them earlier than they can be read, or not at all.
    fn cooling(&self, keys: &[BlockKey]) {
        let _ = keys;
    }

    /// These blocks turned out to be missing or corrupt.
    fn lost(&self, keys: &[BlockKey]);

    /// The tier is disabled for a while: reads miss, and nothing is written or leased. What it has leased can still be
    /// read.
    fn went_down(&self);

    /// The tier works again.
    fn came_back(&self);

    /// The tier has lost its memory, for good: nothing that it has leased can be read any more.
    fn lost_memory(&self);
}

/// A store below the pool. Every tier passes `conformance::check` (P1, P2, P5, P8).
///
/// Calls return immediately. I/O runs on the tier's own threads (or on those of [`BlockingCalls`], if its calls block)
/// and completes in a `Done`. The caller waits until `deadline`: a tier ends work that it has not begun by then with
/// `Timeout`. Work that has begun may end later, and the buffer stays alive until its `Done` was called.
///
/// Batches save locks, frames and system calls, and have no other meaning: each item ends as it would alone, in any
/// order. An empty batch does nothing. A read and a write of one key that overlap are not ordered. A removal is ordered
/// before operations that begin after its `Done`.
pub trait Tier: Send + Sync + Debug {
    /// Short name for logs, metrics and `stat`: `posix`, `fake`…
    fn name(&self) -> &str;

    /// Opens a namespace and returns its current epoch (0 for a new one), which another client may have advanced. If
    /// the stored epoch is below `at_least`, it stores `at_least` first. For an open namespace it follows the stored
    /// epoch. It ends by `deadline` even if it has begun: with `Timeout`, and the namespace may be opened later.
    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>);

    /// Advances a namespace to a new epoch, the higher of `at_least` and the stored epoch + 1, and returns it. An epoch
    /// never goes back, and of several concurrent callers each gets its own one if the store can distinguish them. It
    /// ends by `deadline` like `open_namespace`.
    ///
    /// When the call returns, before its `Done` and whatever the outcome, bytes of earlier epochs that this tier knows
    /// are unreachable; those of epochs that others have begun are unreachable when it is done. Their space is freed in
    /// the background. On failure the tier neither reads nor writes this namespace until the advance is stored. It
    /// retries that automatically, also after a restart if the store can record it at all.
    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>);

    /// Tells the tier that the depot no longer knows a namespace and has nothing in flight in it: the tier may free the
    /// memory that it keeps for it. Stored blocks stay, counted (P5) and evictable, and a later opening finds them
    /// again, in an epoch that is not before this one. An advance that is not stored yet is still stored. Returns
    /// immediately.
    fn close_namespace(&self, root: NamespaceId) {
        let _ = root;
    }

    /// Whether the place of this block is switched off or out of reach now, so that `Absent` from `peek` and 0 from `probe`
    /// do not mean that the tier lacks it. Without I/O. A tier that is never down need not implement it.
    fn is_down(&self, key: &BlockKey) -> bool {
        let _ = key;
        false
    }

    /// What is known without I/O, one answer a key, into `out` (cleared first).
    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>);

    /// Returns how many leading keys the tier has, using I/O if needed. Later calls of `peek` know the result.
    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>);

    /// Reads blocks and verifies them. A block that is missing, or not in an open epoch, is a `Miss` and no error.
    /// `Corrupt` is an error once: the block is set aside and not served again (P1). If the result is not `Whole`, the
    /// content of the item's `dst` is undefined.
    fn read(&self, reads: Vec<ReadItem>, deadline: Instant);

    /// Returns its memory, if its blocks can be leased where they lie.
    fn memory(&self) -> Result<Option<TierMemory>> {
        Ok(None)
    }

    /// Leases blocks in its memory, and verifies them; results are those of `read`. Until the lease has ended, the
    /// block's bytes stay as they are (P1, P4), even if it is removed, evicted or reset; its place is not used for
    /// anything else. A block may be leased any number of times.
    fn lease(&self, leases: Vec<LeaseItem>, deadline: Instant) {
        let _ = deadline;
        leases.into_iter().for_each(|lease| (lease.done)(Ok(None)));
    }

    /// Ends one lease on each of the blocks at these offsets of its memory. Returns immediately; does no I/O.
    fn end_leases(&self, places: &[u64]) {
        let _ = places;
    }

    /// Writes blocks. Each becomes visible only when it is complete (P1); space is reserved before its first byte (P5).
    fn write(&self, writes: Vec<WriteItem>, deadline: Instant);

    /// Returns the bytes up to which it should be given more writes at a time than usual, because it combines small ones;
    /// 0 = the usual number.
    fn write_window_bytes(&self) -> u64 {
        0
    }

    /// Removes blocks. It is done when no read or peek finds any of them, and each may be written again. After an
    /// error, a block may come back.
    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>);

    /// Returns the part of the tier that a block belongs to, such as a server. Removals in different parts are separate
    /// calls, so that one part does not wait for another, and failures count only for their part. It always returns the
    /// same part for a block, and it is fast, because it is called under the depot's lock.
    fn part(&self, key: &BlockKey) -> usize {
        let _ = key;
        0
    }

    /// Records that these blocks were used now, for the tier's own eviction. It is cheap: no I/O on the caller's
    /// thread.
    fn touch(&self, keys: &[BlockKey]);

    /// Makes the tier report to `events`, in place of an earlier listener. A tier without notifications ignores it.
    fn attach(&self, events: Weak<dyn TierEvents>) {
        drop(events);
    }

    /// Returns the size of the content.
    fn usage(&self) -> TierUsage;

    /// Returns the state of its servers, if it has any.
    fn servers(&self) -> Vec<TierServer> {
        Vec::new()
    }

    /// Returns its I/O engine, if there is a choice: for `stat`.
    fn engine(&self) -> &'static str {
        ""
    }

    /// Returns its own counters since it was opened, for `stat`: names and values.
    fn figures(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns a piece of the keys of a namespace (of its current epoch) that the tier knows: at most
    /// `SNAPSHOT_HASHES_MAX` from the position `from` on (0 at first), and the position of the next piece. A block that is
    /// present from the first call to the last is in one of the pieces. A block that was removed before a call is not in
    /// its piece.
    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>);

    /// Returns all of these keys; for `ls`, `verify` and tests.
    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        let (mut keys, mut cursor) = (Vec::new(), Some(0));
        while let Some(from) = cursor {
            let (piece, next) = self.keys_from(namespace, from);
            keys.extend(piece);
            cursor = next;
        }
        keys
    }

    /// Some time has passed: notices what has hung meanwhile. Called several times a second; must not block.
    fn tick(&self) {}

    /// Waits until everything accepted so far has completed. Returns `false` if the deadline passes.
    fn drain(&self, deadline: Instant) -> bool;
}

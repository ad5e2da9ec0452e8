//! Inputs and outputs of the machine. All of it is plain data: nothing here calls anything.

use std::any::Any;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::Result;
use crate::eviction::SlotId;
use crate::hit::GroupShape;
use crate::key::{BlockHash, BlockKey, NamespaceId, NamespaceSpec};
use crate::lease::LeaseId;
use crate::misses::{Gone, Missed};
use crate::priority::Priority;
use crate::regions::RegionIndex;
use crate::runs::Runs;

use super::records::{Adopt, Proof};

pub(crate) use super::outcomes::Want;

pub use super::catalog::NamespaceHandle;
pub use super::outcomes::{Leased, Loaded, Outcome};
pub use super::records::Owner;
pub use super::tiers::{TierIndex, TierSet};

/// Time in nanoseconds since a moment of the caller's choice. It never decreases.
pub type Nanos = u64;
/// Identifies a request, so that its reply reaches the caller. Never reused.
pub type Token = u64;
/// A claim's number.
pub type ClaimId = u64;
/// A removal's number, the same for all tiers that get it. Never reused.
pub type RemovalId = u64;

/// An input of the machine.
#[derive(Debug)]
#[expect(missing_docs, reason = "fields are named for what they carry")]
pub enum Event {
    /// A client's request. Its reply may come with this step or with a later one.
    Request { token: Token, owner: Owner, request: Request },
    /// The time limit of a request has passed: its reply is what is known by now.
    Expire { token: Token },
    /// A connection ended, and no copy of its client can access a slot any more (P4).
    OwnerEnded { owner: Owner },
    /// A tier has completed a `Command::Read`.
    ReadEnded { tier: TierIndex, slot: SlotId, outcome: Result<Fetched> },
    /// A tier has completed a `Command::Lease`: where in its memory the block lies, if the tier has it.
    LeaseEnded { tier: TierIndex, slot: SlotId, outcome: Result<Option<u64>> },
    /// A tier has completed a `Command::Write`.
    WriteEnded { tier: TierIndex, slot: SlotId, outcome: Result<Stored> },
    /// A tier has completed a `Command::Remove`: it has removed the block, or may still have it. A repeated report
    /// counts once.
    Removed { id: RemovalId, tier: TierIndex, key: BlockKey, outcome: Result<()> },
    /// The answer to a [`Question`], one location per key.
    Located { ask: Ask, locations: Vec<Location> },
    /// A tier has completed a `Command::Probe`: how many leading keys it has.
    Probed { ask: Ask, outcome: Result<usize> },
    /// A tier no longer has these blocks: it evicted them, or (`lost`) found them damaged or missing.
    TierForgot { tier: TierIndex, keys: Vec<BlockKey>, lost: bool },
    /// A tier is about to evict these blocks.
    TierCooling { tier: TierIndex, keys: Vec<BlockKey> },
    /// Continues work that was cut into pieces.
    Continue(Job),
    /// The pool's memory is populated up to this byte.
    Populated { upto_bytes: u64 },
    /// Blocks of this tier are leased where they lie from now on. Its memory has this size, and is allocated in such units.
    /// It comes at most once.
    InPlace { tier: TierIndex, memory_bytes: u64, unit_bytes: u64 },
    /// This tier is switched off for a while: it leases nothing, and what it has leased can still be read.
    WentDown { tier: TierIndex },
    /// This tier works again.
    CameBack { tier: TierIndex },
    /// The memory of this tier is lost, for good: what it has leased cannot be read any more.
    LostMemory { tier: TierIndex },
    /// The depot is shutting down: waits for a drain end.
    Ending,
    /// The depot hands over its pool to another one: from now on nothing is reserved, leased, fetched, written or
    /// evicted. Copies in flight can still be committed.
    Freeze,
    /// The hand-over failed: everything continues.
    Thaw,
    /// Slots that another depot, whose pool had this size, has handed over in the pool's memory. Their namespaces must
    /// be open.
    Adopt { pool_bytes: u64, slots: Vec<Adopt> },
    /// Some time has passed: expired claims end, delayed writes are retried.
    Tick,
}

/// Outcome of a read that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// The block is in the slot, and its checksum was correct.
    Whole,
    /// The tier does not have it.
    Miss,
}

/// Outcome of a write that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The block was written now.
    New,
    /// The tier already had it; nothing was written.
    AlreadyThere,
}

/// Location of a block, as far as it is known without I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// This tier has it.
    Tier(TierIndex),
    /// At least one tier cannot tell without I/O, and no tier is known to have it.
    Unknown,
    /// No tier has it.
    Absent,
}

/// Origin of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// A load.
    Load(Token),
    /// A claim, and the number of its question.
    Claim(ClaimId, u32),
}

/// A question which tiers have these blocks. It must be answered without I/O, by [`Event::Located`].
#[derive(Debug)]
pub struct Question {
    /// Origin of the question.
    pub ask: Ask,
    /// The blocks.
    pub keys: Vec<BlockKey>,
    /// The tiers that it is about.
    pub tiers: TierSet,
}

/// Work that continues in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// A claim's next places.
    Claim(ClaimId),
    /// A load's next blocks.
    Load(Token),
    /// The next slots, some of them of namespaces that were reset or forgotten.
    Sweep,
    /// The next blocks leased in place by a tier that went down.
    DoomLent,
    /// The next leases of a connection that ended.
    EndOwner(Owner),
    /// The next claims of a connection that ended.
    EndClaims(Owner),
    /// The next loads of a connection that ended.
    EndLoads(Owner),
    /// The next requests that waited for a block that has arrived, or that could not be read.
    Arrival(u64),
    /// The next queued commands, and whoever waits for room that came with the last ones.
    Emit,
    /// A read of a tier that is closed for the block.
    #[expect(missing_docs, reason = "fields are named for what they carry")]
    Miss { tier: TierIndex, slot: SlotId },
    /// The end of a read that a tier was not asked for, because too many of its reads hang.
    #[expect(missing_docs, reason = "fields are named for what they carry")]
    ReadHeldBack { tier: TierIndex, slot: SlotId },
}

/// Shards of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardSet {
    /// All of them.
    All,
    /// These.
    Some(Vec<u32>),
}

/// One KV-cache group of a claim.
#[derive(Clone, Debug)]
pub struct ClaimGroup {
    /// Namespaces of all ranks whose blocks are needed.
    pub namespaces: Vec<NamespaceHandle>,
    /// The group's block and window sizes.
    pub shape: GroupShape,
}

/// Kind of slot for a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// A block that never changes: refused if it is present or in flight.
    Block,
    /// Like `Block`, with a priority. One that the pool has gets it if it is higher.
    Ranked(Priority),
    /// Like `Block`, for a remote client: the total size that all of them fill is limited.
    RemoteBlock,
    /// A value that will replace the current one.
    Value,
}

impl Reserve {
    /// Returns whether the slot is for a value that will replace the current one.
    pub const fn is_value(self) -> bool {
        matches!(self, Self::Value)
    }

    /// Returns whether the total size that all such slots fill is limited.
    pub(super) const fn is_limited(self) -> bool {
        matches!(self, Self::RemoteBlock | Self::Value)
    }

    /// Returns the block's priority.
    pub const fn priority(self) -> Priority {
        match self {
            Self::Ranked(priority) => priority,
            Self::Block | Self::RemoteBlock | Self::Value => Priority::Normal,
        }
    }
}

/// A client's request.
#[derive(Debug)]
#[expect(missing_docs, reason = "fields are named for what they carry")]
pub enum Request {
    /// Makes a namespace known, at this epoch or later. The owner, if it is not 0, uses it until it ends. If too many
    /// are known, an unused one is forgotten. Reply: `Namespace`.
    OpenNamespace { spec: Arc<NamespaceSpec>, epoch: u32 },
    /// As `OpenNamespace`, for a namespace about which a tier has not answered; `epoch` is the highest that others told. An
    /// unknown one becomes provisional: its keys carry `provisional`, which no epoch has, and it has the pool only until an
    /// `OpenNamespace`, or a `FollowEpoch` whose epoch is `stored`, tells that all tiers have answered. What was dumped
    /// meanwhile is lost then. A known one stays what it is. Reply: `Namespace`.
    OpenProvisionally { spec: Arc<NamespaceSpec>, epoch: u32, provisional: NamespaceId },
    /// The owner uses a known namespace until it ends. Reply: `Namespace`.
    UseNamespace { namespace: NamespaceHandle },
    /// The owner does not use a namespace any more. What it has in flight there goes on. Reply: `Done`.
    CloseNamespace { namespace: NamespaceHandle },
    /// Moves a namespace to an epoch, but never back. Reply: `Namespace`.
    EnterEpoch { namespace: NamespaceHandle, epoch: u32 },
    /// Begins to move a namespace to an epoch that no tier had: from now on keys carry `provisional`, which no epoch
    /// has, so nothing old is served, and nothing new too early. Reply: `Namespace`.
    BeginAdvance { namespace: NamespaceHandle, provisional: NamespaceId },
    /// Completes that move, to this epoch or later. Until every tier has `stored` it, which a `FollowEpoch` may report,
    /// the namespace is not forgotten. Reply: `Namespace`.
    EndAdvance { namespace: NamespaceHandle, epoch: u32, stored: bool },
    /// Moves a namespace to this epoch or later; `stored`: every tier has stored it. Reply: `Namespace`.
    FollowEpoch { namespace: NamespaceHandle, epoch: u32, stored: bool },
    /// Sets the preferred region of the pool for the owner's blocks, used while it has space; `None` resets it. A
    /// namespace for which the owner reserves or loads keeps the preference for callers without their own, such as a
    /// scheduler's claim. Reply: `Done`.
    Near { region: Option<RegionIndex> },
    /// Notes that a reader of the namespace can read blocks in a tier's memory: claims lease them there. A load that says so
    /// does the same. Reply: `Done`.
    ReadsInPlace { namespace: NamespaceHandle },
    /// Reserves slots for blocks that will be dumped; more than `runs_max` runs in total are refused. With an `id`, the
    /// namespace's keys must still carry it. Reply: `Slots`, for the first ones.
    Reserve {
        namespace: NamespaceHandle,
        id: Option<NamespaceId>,
        hashes: Vec<BlockHash>,
        how: Reserve,
        runs_max: usize,
    },
    /// Commits shards of reserved blocks that are in their slots. Reply: `Took`.
    Commit { leases: Vec<LeaseId>, shards: ShardSet, crc64: Option<u64> },
    /// Makes a filled slot the value of its key, in place of the values under it and under `others`. Reply: `Done`.
    Publish { lease: LeaseId, others: Vec<BlockKey> },
    /// Ends leases. Reply: `Took`.
    Release { leases: Vec<LeaseId> },
    /// Leases blocks for reading. Blocks in a tier are fetched until `fetch_deadline`. `last`: the caller will not ask
    /// again for late blocks, so they count as missed. With an `id`, the namespace's keys must still carry it. `in_place`:
    /// the caller can read blocks in a tier's memory; claims and prefetches for the namespace count on that from then on.
    /// Reply: `Slots`.
    Load {
        namespace: NamespaceHandle,
        id: Option<NamespaceId>,
        hashes: Vec<BlockHash>,
        fetch_deadline: Nanos,
        last: bool,
        runs_max: usize,
        in_place: bool,
    },
    /// Leases the blocks that are in the pool. Reply: `Leased`, for the first ones.
    LeaseNow { keys: Vec<BlockKey> },
    /// Leases the blocks that are in the pool to examine their bytes, which does not count as a use. Reply: `Leased`,
    /// for the first ones.
    Inspect { keys: Vec<BlockKey> },
    /// Notes the checksum of a leased block.
    SetChecksum { lease: LeaseId, crc64: u64 },
    /// Fetches blocks of which a tier is known. Reply: `Took`.
    Prefetch { namespace: NamespaceHandle, blocks: Vec<(BlockHash, TierIndex)>, deadline: Nanos },
    /// Forgets at most [`super::REMOVE_BLOCKS`] blocks, in the pool and in the tiers that have them by `locations`. Reply:
    /// `Removed`, when tiers have forgotten those that are not being written, or could not.
    Remove { keys: Vec<BlockKey>, locations: Vec<Location> },
    /// Finds and leases the longest hit. `tiers`: those that its blocks may come from; the pool's always may. `label`: what
    /// its client calls it. Reply: `Claim`, when tiers have said what they hold.
    ClaimOpen {
        groups: Vec<ClaimGroup>,
        hashes: Vec<BlockHash>,
        skip: usize,
        limit: usize,
        tiers: TierSet,
        deadline: Nanos,
        patience: Nanos,
        label: Option<Box<str>>,
    },
    /// How far a claim is; `settle` takes what has come. Reply: `Claim`.
    ClaimPoll { claim: ClaimId, settle: bool },
    /// Takes what has come, because computing the rest is faster than waiting for it. Reply: `Claim`.
    ClaimDecline { claim: ClaimId },
    /// When a claim got how far. This is no use of it. Reply: `ClaimTimes`.
    ClaimTimes { claim: ClaimId },
    /// Ends a claim and its leases. Reply: `Done`.
    ClaimRelease { claim: ClaimId },
    /// Ends all claims of the connection. A claim's leases only keep blocks in the pool: a client copies under leases of its
    /// own, so claims may end while copies are under way. Reply: `Holds`.
    EndClaims,
    /// Evicts what is cold until at most `bytes` are in use. Reply: `Evicted`.
    EvictTo { bytes: u64 },
    /// Waits until all that is queued for the tiers now has been written or given up. Once the depot is to end, only the
    /// last one waits. Reply: `Drained`.
    Drain { last: bool },
    /// Readable blocks of the namespaces among the next slots from `from` on. Reply: `Keys`.
    Keys { namespaces: Vec<NamespaceHandle>, from: usize },
}

/// State of a block of a `LeaseNow`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Now {
    /// Leased.
    Leased(Leased),
    /// Being fetched into the pool.
    Arriving,
    /// Not in the pool.
    Absent,
}

/// A claim that is not settled, whose hit's blocks are all leased or being fetched, and none has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arriving {
    /// The hit if all of them arrive, in hash units.
    pub units: usize,
    /// The minimum hit if the claim were settled now, in hash units.
    pub units_now: usize,
    /// Units of the hit that come from below the pool.
    pub units_from_tier: usize,
    /// Number of blocks that have arrived from a tier.
    pub blocks_come: usize,
    /// Number of blocks that have not.
    pub blocks_left: usize,
}

/// Progress of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Its number.
    pub claim: ClaimId,
    /// Whether the hit is final.
    pub settled: bool,
    /// The hit so far, in hash units.
    pub units: usize,
    /// Units of it that came from below the pool.
    pub units_from_tier: usize,
    /// The blocks that may still arrive.
    pub arriving: Option<Arriving>,
}

/// A claim whose hit is final, for who counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// Its namespaces: a reset does not change these numbers.
    pub namespaces: Arc<[NamespaceHandle]>,
    /// Hash units that it asked for in each of them.
    pub asked: usize,
    /// Leading ones of them that are its hit.
    pub hit: usize,
    /// Time from its opening until it was known what the hit would be and there was room for it; None: that was never so.
    pub admitted_after: Option<Nanos>,
    /// Time from its opening until the hit was final.
    pub took: Nanos,
}

/// When a claim got how far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimTimes {
    /// It was opened.
    pub opened: Nanos,
    /// It was known what the hit would be, and there was room for all of it; None: not yet.
    pub admitted: Option<Nanos>,
    /// The hit was final; None: not yet.
    pub settled: Option<Nanos>,
    /// Whether it has waited for room.
    pub queued: bool,
    /// What came for it from each tier, in the order of their first blocks.
    pub tiers: SmallVec<[CameFrom; 2]>,
}

/// Blocks that came from a tier for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CameFrom {
    /// The tier.
    pub tier: TierIndex,
    /// Number of blocks.
    pub blocks: usize,
    /// When the first one was there.
    pub first: Nanos,
    /// When the last one was there.
    pub last: Nanos,
}

/// A namespace in its current state.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Its number at this depot.
    pub handle: NamespaceHandle,
    /// The id that its keys carry now.
    pub id: NamespaceId,
    /// Its epoch.
    pub epoch: u32,
    /// Whether that is the id of its epoch; not while it is provisional or its epoch is moving.
    pub has_epoch_id: bool,
    /// Its fingerprinted specification.
    pub spec: Arc<NamespaceSpec>,
}

/// A namespace that is no longer known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// Its number, which is never reused.
    pub handle: NamespaceHandle,
    /// Its name at the tiers, which may free its memory.
    pub root: NamespaceId,
}

/// Reply to a request. If the entire request fails, an error takes its place.
#[derive(Clone, Debug)]
pub enum Reply {
    /// To all requests about namespaces and epochs.
    Namespace(Opened),
    /// To `Load`; [`Self::listed`] makes `Slots` of it.
    Loaded(Loaded),
    /// To `Load`, one for each hash. To `Reserve`, one for each of the first hashes: the caller must submit the rest
    /// again.
    Slots(Vec<Outcome>),
    /// To `LeaseNow` and `Inspect`, one for each of the first keys: the caller must submit the rest again.
    Leased(Vec<Now>),
    /// To `Commit`, `Release` and `Prefetch`: how many of the first ones were taken. The caller must submit the rest
    /// again.
    Took(usize),
    /// To `Remove`.
    Removed {
        /// Whether each was present.
        was_there: Vec<bool>,
        /// Number of blocks that a tier may still have: it failed, has not answered, or was not asked because it owes
        /// too many removals. They are not read from it before it has removed them; the depot forgets that when it
        /// ends.
        left: usize,
    },
    /// To the claim requests.
    Claim(Progress),
    /// To `ClaimTimes`.
    ClaimTimes(ClaimTimes),
    /// To `EndClaims`: whether the connection still holds leases.
    Holds(bool),
    /// To `EvictTo`: how many blocks were evicted, and whether to submit it again.
    Evicted(usize, bool),
    /// To `Drain`: whether it has completed.
    Drained(bool),
    /// To `Keys`: the keys, and where to continue, unless it is the end.
    Keys(Vec<BlockKey>, Option<usize>),
    /// Done.
    Done,
}

impl Reply {
    /// Lists what a load has got. That takes long for many blocks, so call it after unlocking.
    #[must_use]
    pub fn listed(self) -> Self {
        match self {
            Self::Loaded(load) => Self::Slots(load.outcomes()),
            other => other,
        }
    }
}

/// A command to a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields are named for what they carry")]
pub enum Command {
    /// Read a block into a slot. `is_use`: for the tier's eviction, the block counts as used.
    Read { tier: TierIndex, slot: SlotId, key: BlockKey, runs: Runs, deadline: Nanos, is_use: bool },
    /// Lease a block where it lies in the tier's memory.
    Lease { tier: TierIndex, slot: SlotId, key: BlockKey, deadline: Nanos },
    /// End leases on blocks at these places. Not answered.
    EndLeases { tier: TierIndex, places: Vec<u64> },
    /// Write a block from a slot.
    Write { tier: TierIndex, slot: SlotId, key: BlockKey, runs: Runs },
    /// Remove a block.
    Remove { id: RemovalId, tier: TierIndex, key: BlockKey },
    /// Determine by I/O how many leading blocks of these the tier has.
    Probe { tier: TierIndex, ask: Ask, keys: Vec<BlockKey> },
    /// Record that these blocks are in use. For every tier.
    Touch { keys: Vec<BlockKey> },
}

/// A tier, or a part of one, that owes too many removals to be used for a namespace until that is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// The tier.
    pub tier: TierIndex,
    /// Its part, such as a server.
    pub part: usize,
    /// The id that the namespace's keys carry.
    pub namespace: NamespaceId,
}

/// Memory to be freed by dropping it.
#[derive(Debug)]
pub struct Discarded(#[expect(dead_code, reason = "see there")] Box<dyn Any + Send>);

impl Discarded {
    pub(super) fn new(what: Box<impl Any + Send>) -> Self {
        Self(what)
    }
}

/// Effects of a step, for its caller to carry out. The order inside each list matters.
#[derive(Debug, Default)]
pub struct Effects {
    /// Replies, each to one caller.
    pub replies: Vec<(Token, Result<Reply>)>,
    /// Blocks that lookups find from now on, or no longer find. Apply them before the next step.
    pub visible: Vec<(BlockKey, bool)>,
    /// Changes for the ledger, in this order; empty if none is kept. Apply them before the next step, and before
    /// replies and commands leave.
    pub proofs: Vec<Proof>,
    /// Namespaces that are no longer known. Apply them before the next step, and before `namespaces`.
    pub forgotten: Vec<Forgotten>,
    /// Namespaces whose epoch changed, or that are new. To be applied before the next step, and before replies leave.
    pub namespaces: Vec<Opened>,
    /// For the tiers, first in first out.
    pub commands: Vec<Command>,
    /// To be answered at once.
    pub questions: Vec<Question>,
    /// To be continued soon, with other steps in between.
    pub again: Vec<Job>,
    /// Tiers that are not used for a namespace from now on. For logs.
    pub closed: Vec<Closed>,
    /// Blocks that went, for who remembers them. To be noted before `missed` is looked at.
    pub gone: Vec<Gone>,
    /// Claims that found less than they asked for.
    pub missed: Vec<Missed>,
    /// Claims whose hit is final, each once.
    pub settled: Vec<Settled>,
    /// To be dropped after unlocking: giving much memory back takes long.
    pub discarded: Vec<Discarded>,
}

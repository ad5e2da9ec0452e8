//! What goes into the machine and what comes out of it. All of it is data: nothing here calls anything.

use std::any::Any;
use std::sync::Arc;

use crate::error::{ErrorKind, Result};
use crate::eviction::SlotId;
use crate::hit::GroupShape;
use crate::key::{BlockHash, BlockKey, NamespaceId, NamespaceSpec};
use crate::lease::LeaseId;
use crate::misses::{Gone, Missed};
use crate::regions::RegionIndex;
use crate::runs::Runs;

use super::records::{Adopt, Proof};

pub use super::catalog::NamespaceHandle;
pub use super::records::Owner;
pub use super::tiers::TierIndex;

/// Time in nanoseconds since a moment of the caller's choice. It never goes back.
pub type Nanos = u64;
/// Names a request, so that its reply finds the one who waits for it. Never used twice.
pub type Token = u64;
/// A claim's number.
pub type ClaimId = u64;
/// A removal's number, one for all tiers that are told of it. Never used twice.
pub type RemovalId = u64;

/// Something that happened.
#[derive(Debug)]
#[expect(missing_docs, reason = "fields are named for what they carry")]
pub enum Event {
    /// A client asks for something. Its reply may come with this step or with a later one.
    Request { token: Token, owner: Owner, request: Request },
    /// The time that a request may wait is over: what is known by now is its reply.
    Expire { token: Token },
    /// A connection ended, and no copy of its client can touch a slot any more (P4).
    OwnerEnded { owner: Owner },
    /// A tier has ended a `Command::Read`.
    ReadEnded { tier: TierIndex, slot: SlotId, outcome: Result<Fetched> },
    /// A tier has ended a `Command::Write`.
    WriteEnded { tier: TierIndex, slot: SlotId, outcome: Result<Stored> },
    /// A tier has ended a `Command::Remove`: it has forgotten the block, or may still have it. One that is told twice counts
    /// once.
    Removed { id: RemovalId, tier: TierIndex, key: BlockKey, outcome: Result<()> },
    /// The answer to a [`Question`], one location a key.
    Located { ask: Ask, locations: Vec<Location> },
    /// A tier has ended a `Command::Probe`: how many leading keys it holds.
    Probed { ask: Ask, outcome: Result<usize> },
    /// A tier does not hold these blocks any more: it made room, or (`lost`) found them damaged or gone.
    TierForgot { tier: TierIndex, keys: Vec<BlockKey>, lost: bool },
    /// Goes on with work that was cut into pieces.
    Continue(Job),
    /// The pool's memory is populated up to this byte.
    Populated { upto_bytes: u64 },
    /// The depot is to end: who waits for a drain waits no longer.
    Ending,
    /// The depot hands its pool over to another one: from now on nothing is reserved, leased, fetched, written or evicted.
    /// Copies under way can still be committed.
    Freeze,
    /// The hand-over came to nothing: all goes on.
    Thaw,
    /// Slots that another depot, whose pool had this size, has handed over in the pool's memory. Their namespaces are to be
    /// open.
    Adopt { pool_bytes: u64, slots: Vec<Adopt> },
    /// Some time has passed: expired claims end, delayed writes are tried again.
    Tick,
}

/// How a read that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// The block is in the slot, and its checksum was right.
    Whole,
    /// The tier does not hold it.
    Miss,
}

/// How a write that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The block was written now.
    New,
    /// The tier had it already; nothing was written.
    AlreadyThere,
}

/// What is known without I/O about which tier holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// This tier does.
    Tier(TierIndex),
    /// At least one tier cannot tell without I/O, and no tier is known to hold it.
    Unknown,
    /// None does.
    Absent,
}

/// Who asked a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// A load.
    Load(Token),
    /// A claim, and which of its questions.
    Claim(ClaimId, u32),
}

/// Which tiers hold these blocks? To be answered without I/O, by [`Event::Located`].
#[derive(Debug)]
pub struct Question {
    /// Who asks.
    pub ask: Ask,
    /// The blocks.
    pub keys: Vec<BlockKey>,
}

/// Work that goes on in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// A claim's next places.
    Claim(ClaimId),
    /// A load's next blocks.
    Load(Token),
    /// The next slots, some of them of namespaces that were reset or forgotten.
    Sweep,
    /// The next leases of a connection that ended.
    EndOwner(Owner),
    /// The next queued commands.
    Emit,
    /// A read of a tier that is closed for the block.
    #[expect(missing_docs, reason = "fields are named for what they carry")]
    Miss { tier: TierIndex, slot: SlotId },
}

/// Which shards a commit speaks of.
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
    /// How the group cuts a prompt.
    pub shape: GroupShape,
}

/// How a slot for a dump is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// A block that never changes: refused when it is there, or on its way.
    Block,
    /// As `Block`, for a remote client: what all of them may be filling is bounded.
    RemoteBlock,
    /// A value that will take the place of what is there.
    Value,
}

/// What a client asks.
#[derive(Debug)]
#[expect(missing_docs, reason = "fields are named for what they carry")]
pub enum Request {
    /// Makes a namespace known, at this epoch at least; the owner, if it is not 0, uses it until it ends. Where too many are
    /// known, one that nobody uses is forgotten for it. Reply: `Namespace`.
    OpenNamespace { spec: Arc<NamespaceSpec>, epoch: u32 },
    /// The owner uses a namespace that is known, until it ends. Reply: `Namespace`.
    UseNamespace { namespace: NamespaceHandle },
    /// Moves a namespace to an epoch, never back. Reply: `Namespace`.
    EnterEpoch { namespace: NamespaceHandle, epoch: u32 },
    /// Begins to move a namespace to an epoch that no tier had: from now on keys carry `provisional`, which no epoch has, so
    /// nothing old is served and nothing is served too early. Reply: `Namespace`.
    BeginAdvance { namespace: NamespaceHandle, provisional: NamespaceId },
    /// Ends that, in at least this epoch. Until every tier has `stored` it, which a `FollowEpoch` may tell, the namespace is
    /// not forgotten. Reply: `Namespace`.
    EndAdvance { namespace: NamespaceHandle, epoch: u32, stored: bool },
    /// Moves a namespace to at least this epoch, which every tier has `stored` or not yet. Reply: `Namespace`.
    FollowEpoch { namespace: NamespaceHandle, epoch: u32, stored: bool },
    /// Blocks for the owner are to lie in this region of the pool from now on, where there is room; none takes the wish back.
    /// A namespace for which it reserves or loads keeps the wish for who has none of its own, such as a scheduler's claim.
    /// Reply: `Done`.
    Near { region: Option<RegionIndex> },
    /// Slots for blocks about to be dumped; more than `runs_max` runs in all are refused. With an `id`, the namespace's keys
    /// must still carry it. Reply: `Slots`, of the first ones.
    Reserve {
        namespace: NamespaceHandle,
        id: Option<NamespaceId>,
        hashes: Vec<BlockHash>,
        how: Reserve,
        runs_max: usize,
    },
    /// Shards of reserved blocks are in their slots. Reply: `Took`.
    Commit { leases: Vec<LeaseId>, shards: ShardSet, crc64: Option<u64> },
    /// A filled slot becomes the value of its key, in place of what is under it and under `others`. Reply: `Done`.
    Publish { lease: LeaseId, others: Vec<BlockKey> },
    /// Ends leases. Reply: `Took`.
    Release { leases: Vec<LeaseId> },
    /// Leases blocks for reading; blocks in a tier are fetched until `fetch_deadline`. `last`: the caller asks for what
    /// is late no more, so it counts as missed. With an `id`, the namespace's keys must still carry it. Reply: `Slots`.
    Load {
        namespace: NamespaceHandle,
        id: Option<NamespaceId>,
        hashes: Vec<BlockHash>,
        fetch_deadline: Nanos,
        last: bool,
        runs_max: usize,
    },
    /// Leases what is in the pool. Reply: `Leased`, of the first ones.
    LeaseNow { keys: Vec<BlockKey> },
    /// Leases what is in the pool to look at its bytes, which is no use of it. Reply: `Leased`, of the first ones.
    Inspect { keys: Vec<BlockKey> },
    /// Notes the checksum of a leased block.
    SetChecksum { lease: LeaseId, crc64: u64 },
    /// Fetches blocks of which a tier is known. Reply: `Took`.
    Prefetch { namespace: NamespaceHandle, blocks: Vec<(BlockHash, TierIndex)>, deadline: Nanos },
    /// Forgets at most [`super::REMOVE_BLOCKS`] blocks, in the pool and in the tiers that have them by `locations`. Reply:
    /// `Removed`, when tiers have forgotten those that are not being written, or could not.
    Remove { keys: Vec<BlockKey>, locations: Vec<Location> },
    /// Finds and leases the longest hit. `label`: what its client calls it. Reply: `Claim`, when tiers have said what they hold.
    ClaimOpen {
        groups: Vec<ClaimGroup>,
        hashes: Vec<BlockHash>,
        skip: usize,
        limit: usize,
        deadline: Nanos,
        patience: Nanos,
        label: Option<Box<str>>,
    },
    /// How far a claim is; `settle` takes what has come. Reply: `Claim`.
    ClaimPoll { claim: ClaimId, settle: bool },
    /// Takes what has come, because computing the rest is faster than waiting for it. Reply: `Claim`.
    ClaimDecline { claim: ClaimId },
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

/// A slot in a client's hands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// The lease on it.
    pub lease: LeaseId,
    /// Its number.
    pub slot: SlotId,
    /// Its place in the pool.
    pub runs: Runs,
    /// Bytes of the block in it.
    pub block_bytes: u64,
    /// The block's CRC-64/NVME, where it is known.
    pub crc64: Option<u64>,
}

/// How one block of a request fared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The slot is leased: for writing, or for reading.
    Leased(Leased),
    /// The depot has the block already, or somebody else is dumping it.
    Have,
    /// No: why.
    Refused(ErrorKind),
}

/// How a block of a `LeaseNow` stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Now {
    /// Leased.
    Leased(Leased),
    /// On its way into the pool.
    Arriving,
    /// Not in the pool.
    Absent,
}

/// A claim that is not settled, of whose hit every block is leased or on its way from a tier, and none has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arriving {
    /// The hit if all of them come, in hash units.
    pub units: usize,
    /// The hit if the claim were settled now, in hash units: at least that.
    pub units_now: usize,
    /// Units of it that come from below the pool.
    pub units_from_tier: usize,
    /// Blocks that have come from a tier.
    pub blocks_come: usize,
    /// Blocks that have not.
    pub blocks_left: usize,
}

/// How far a claim is.
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
    /// What may still come.
    pub arriving: Option<Arriving>,
}

/// A namespace as it stands now.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Its number at this depot.
    pub handle: NamespaceHandle,
    /// What keys carry now.
    pub id: NamespaceId,
    /// Its epoch.
    pub epoch: u32,
    /// What was fingerprinted.
    pub spec: Arc<NamespaceSpec>,
}

/// A namespace that is not known any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// Its number, which no namespace will have again.
    pub handle: NamespaceHandle,
    /// What it is known by to tiers, which may let go of it.
    pub root: NamespaceId,
}

/// What a request comes to. A request that fails as a whole is an error in its place.
#[derive(Clone, Debug)]
pub enum Reply {
    /// To all requests about namespaces and epochs.
    Namespace(Opened),
    /// To `Load`, one for each hash. To `Reserve`, one for each of the first hashes: the rest is to be asked for again.
    Slots(Vec<Outcome>),
    /// To `LeaseNow` and `Inspect`, one for each of the first keys: the rest is to be asked for again.
    Leased(Vec<Now>),
    /// To `Commit`, `Release` and `Prefetch`: how many of the first ones were taken. The rest is to be asked for again.
    Took(usize),
    /// To `Remove`.
    Removed {
        /// Whether each was there.
        was_there: Vec<bool>,
        /// Blocks that a tier may still have: it failed, has not answered, or was not asked because it owes too much. They are
        /// not read from it before it has removed them; the depot's end forgets that.
        left: usize,
    },
    /// To the claim requests.
    Claim(Progress),
    /// To `EndClaims`: whether the connection still holds leases.
    Holds(bool),
    /// To `EvictTo`: how many blocks went, and whether it is to be asked again.
    Evicted(usize, bool),
    /// To `Drain`: whether it is over.
    Drained(bool),
    /// To `Keys`: the keys, and where to go on, if not at the end.
    Keys(Vec<BlockKey>, Option<usize>),
    /// Done.
    Done,
}

/// What a tier is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields are named for what they carry")]
pub enum Command {
    /// Read a block into a slot.
    Read { tier: TierIndex, slot: SlotId, key: BlockKey, runs: Runs, deadline: Nanos },
    /// Write a block from a slot.
    Write { tier: TierIndex, slot: SlotId, key: BlockKey, runs: Runs },
    /// Forget a block.
    Remove { id: RemovalId, tier: TierIndex, key: BlockKey },
    /// Find out by I/O how many leading ones of these blocks it holds.
    Probe { tier: TierIndex, ask: Ask, keys: Vec<BlockKey> },
    /// Note that these blocks are in use. For every tier.
    Touch { keys: Vec<BlockKey> },
}

/// A tier, or a part of one, that owes too many removals to be used for a namespace before that is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// The tier.
    pub tier: TierIndex,
    /// Its part, such as a server.
    pub part: usize,
    /// What the namespace's keys carry.
    pub namespace: NamespaceId,
}

/// Memory that is to be given back. It is only dropped.
#[derive(Debug)]
pub struct Discarded(#[expect(dead_code, reason = "see there")] Box<dyn Any + Send>);

impl Discarded {
    pub(super) fn new(what: impl Any + Send) -> Self {
        Self(Box::new(what))
    }
}

/// What a step asks of its caller. Order matters inside each list.
#[derive(Debug, Default)]
pub struct Effects {
    /// Replies, each to one waiter.
    pub replies: Vec<(Token, Result<Reply>)>,
    /// Blocks that lookups find from now on, or do not find any more. To be applied before the next step.
    pub visible: Vec<(BlockKey, bool)>,
    /// For the ledger, in this order; empty where none is kept. To be applied before the next step, and before replies and
    /// commands leave.
    pub proofs: Vec<Proof>,
    /// Namespaces that are not known any more. To be applied before the next step, and before `namespaces`.
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
    /// To be dropped after unlocking: giving much memory back takes long.
    pub discarded: Vec<Discarded>,
}

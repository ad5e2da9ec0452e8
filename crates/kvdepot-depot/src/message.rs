//! The messages of the local door: requests, responses, and their bytes (postcard). A depot embedded in the process
//! uses the same values without the bytes.

use std::borrow::Cow;

use kvdepot_core::limits::{BATCH_HASHES_MAX, FRAME_BYTES_MAX};
use kvdepot_core::runs::Runs;
use kvdepot_core::{BlockHash, Error, ErrorKind, Priority, Result};
use serde::{Deserialize, Serialize};

use crate::pool::PoolRegion;

/// Version of the local door; both sides must have the same.
pub const PROTOCOL_VERSION: u32 = 13;
/// First field of the first frame. Other values do not come from a client of ours.
pub const HELLO_MAGIC: u64 = 0x3154_4f50_4544_564b;
/// The id of a frame that answers no request.
pub const ANNOUNCEMENT_ID: u64 = 0;

/// The block hashes of a batch, 16 bytes each. They are borrowed from the frame, so decoding copies nothing.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hashes<'a>(
    #[serde(borrow)]
    #[serde(with = "serde_bytes")]
    pub Cow<'a, [u8]>,
);

impl Hashes<'_> {
    /// Returns the number of hashes. Fails if the bytes are not a whole number of hashes, or too many (P7).
    pub fn count(&self) -> Result<usize> {
        let count = self.0.len() / 16;
        if !self.0.len().is_multiple_of(16) || count > BATCH_HASHES_MAX {
            return Err(Error::new(
                ErrorKind::Protocol,
                "a batch of hashes must hold whole hashes and not too many",
            )
            .with("bytes", self.0.len())
            .with("hashes_max", BATCH_HASHES_MAX));
        }
        Ok(count)
    }

    /// Iterates over the hashes in order.
    pub fn iter(&self) -> impl Iterator<Item = BlockHash> + '_ {
        self.0.as_chunks::<16>().0.iter().map(|bytes| BlockHash(*bytes))
    }
}

/// Returns the bytes of hashes in a frame.
pub(crate) fn hash_bytes<'a>(hashes: impl IntoIterator<Item = &'a BlockHash>) -> Vec<u8> {
    let hashes = hashes.into_iter();
    let mut bytes = Vec::with_capacity(hashes.size_hint().0 * size_of::<BlockHash>());
    hashes.for_each(|hash| bytes.extend_from_slice(&hash.0));
    bytes
}

/// A namespace's number at this depot, valid until the depot terminates.
pub type NamespaceHandle = u64;
/// A lease's number, valid on the connection that got it.
pub type LeaseNumber = u64;

/// One KV-cache group of a claim.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClaimGroup {
    /// Namespaces of all ranks whose blocks are required.
    pub namespaces: Vec<NamespaceHandle>,
    /// How many of the last blocks the group needs; 0 = all.
    pub window_blocks: u32,
    /// Hash units per block.
    pub hashes_per_block: u32,
}

/// A client's request.
#[expect(missing_docs, reason = "fields are named for what they carry")]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request<'a> {
    /// First frame of a connection.
    Hello { magic: u64, version: u32, pid: u32 },
    /// Opens a namespace.
    OpenNamespace { canonical: Cow<'a, str> },
    /// The client does not use a namespace any more. What it has in flight there goes on.
    CloseNamespace { namespace: NamespaceHandle },
    /// Finds out which blocks exist, in pool or tier.
    Lookup {
        namespace: NamespaceHandle,
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// Counts the leading blocks that exist in all of the namespaces.
    LookupPrefix {
        namespaces: Vec<NamespaceHandle>,
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// Read blocks into the pool.
    Prefetch {
        namespace: NamespaceHandle,
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// Find and lease the longest hit. The claim is over the hashes of the `ClaimHashes` frames directly before it,
    /// then these. `tiers`: names of those that its blocks may come from; `None` = all, empty = the pool alone. `label`: what
    /// the client calls the request, for who asks why it was a miss.
    ClaimOpen {
        groups: Vec<ClaimGroup>,
        #[serde(borrow)]
        hashes: Hashes<'a>,
        skip: u32,
        limit: u32,
        tiers: Option<Vec<String>>,
        label: Cow<'a, str>,
    },
    /// The state of a claim; `settle` settles it with the blocks that have arrived.
    ClaimPoll { claim: u64, settle: bool },
    /// Settle with the blocks that have arrived, because computing the rest is faster than waiting for it.
    ClaimDecline { claim: u64 },
    /// Release a claim's leases. `tell_times`: the answer says when it got how far.
    ClaimRelease { claim: u64, tell_times: bool },
    /// Reserve slots for blocks that the client is about to dump.
    Reserve {
        namespace: NamespaceHandle,
        #[serde(borrow)]
        hashes: Hashes<'a>,
        priority: Priority,
    },
    /// Shards of reserved blocks were written. A block with all its shards is sealed, and its lease ends.
    Commit { leases: Vec<LeaseNumber>, shards: Shards },
    /// Reserved blocks will not be written, or leases are no longer needed.
    Release { leases: Vec<LeaseNumber> },
    /// Lease blocks for reading, fetched from a tier where needed, within `wait_ms`. Blocks still in flight then are
    /// refused with `timeout`, and their fetches continue. `last`: the caller will not retry, so they count as missed.
    /// `in_place`: the caller can read blocks in the tier's memory (`Memory`); their runs begin at `IN_PLACE_AT`.
    Acquire {
        namespace: NamespaceHandle,
        #[serde(borrow)]
        hashes: Hashes<'a>,
        wait_ms: u32,
        last: bool,
        in_place: bool,
    },
    /// Advance namespaces to their next epoch.
    Reset { namespaces: Vec<NamespaceHandle> },
    /// Wait until dirty blocks have been written to the tiers.
    Drain { wait_ms: u32 },
    /// Counters and gauges as JSON.
    Stats,
    /// The first hashes of the `ClaimOpen` that follows, which has more than fit one frame. Not answered.
    ClaimHashes {
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// Whether the depot answers at all.
    Ping,
    /// Last frame of a connection: no copy into or out of slots leased on it is in flight, so its leases end
    /// immediately. Not answered. A connection that ends without it may belong to a process that was killed, whose
    /// devices may still copy.
    Goodbye,
    /// A new depot requests the pool. Only `TakenOver` may follow on this connection.
    HandOver { version: u32, pool_bytes: u64 },
    /// The new depot has received everything, and waits for the old depot's exit.
    TakenOver,
    /// This process has no pool of an earlier depot mapped: its copies into and out of them have ended.
    CopiesEnded,
    /// From now on, place blocks requested on this connection near this NUMA node where there is space; `None` clears
    /// the request. Not answered.
    Near { node: Option<u32> },
    /// This process reads blocks of the namespace in the tier's memory (`Memory`). Not answered.
    ReadsInPlace { namespace: NamespaceHandle },
    /// List the depot's namespaces by their numbers, after this one.
    Namespaces { after: Option<NamespaceHandle> },
    /// Read the events of namespaces after a sequence number. `None` begins: from then on, until the connection ends, the
    /// depot records events.
    Events { namespaces: Vec<NamespaceHandle>, after: Option<u64> },
    /// A piece of what a place (0 = the pool, `n` = the `n`-th tier) holds of a namespace: from 0 on, then from where the
    /// answer says.
    Snapshot { namespace: NamespaceHandle, place: u8, from: u64 },
    /// Pass the memory of a tier in which blocks are leased where they lie.
    Memory,
}

impl Request<'_> {
    /// Returns whether the request is not answered.
    pub const fn is_one_way(&self) -> bool {
        matches!(
            self,
            Self::ClaimHashes { .. } | Self::Goodbye | Self::Near { .. } | Self::ReadsInPlace { .. }
        )
    }

    /// Returns the namespaces whose events or content the request asks for, by their numbers. Following a namespace does
    /// not count as using it.
    pub(crate) fn followed(&self) -> Vec<NamespaceHandle> {
        match self {
            Self::Events { namespaces, .. } => namespaces.clone(),
            Self::Snapshot { namespace, .. } => vec![*namespace],
            _ => Vec::new(),
        }
    }

    /// Returns the namespaces that the request names by their numbers.
    pub fn namespaces(&self) -> Vec<NamespaceHandle> {
        match self {
            Self::Lookup { namespace, .. }
            | Self::Prefetch { namespace, .. }
            | Self::Reserve { namespace, .. }
            | Self::Acquire { namespace, .. } => vec![*namespace],
            Self::LookupPrefix { namespaces, .. } | Self::Reset { namespaces } => namespaces.clone(),
            Self::ClaimOpen { groups, .. } => {
                groups.iter().flat_map(|group| group.namespaces.iter().copied()).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// The shards of a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shards {
    /// All of them.
    All,
    /// These.
    Some(Vec<u32>),
}

/// The outcome for one block of a `Reserve` or `Acquire`.
#[expect(missing_docs, reason = "fields are named for what they carry")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grant {
    /// The slot is leased: for writing (`Reserve`) or reading (`Acquire`).
    Leased { lease: LeaseNumber, runs: Runs },
    /// The depot has the block already, or another client is dumping it: nothing to do.
    Have,
    /// Refused, with the name of the error kind.
    Refused { kind: Cow<'static, str> },
}

/// An unsettled claim whose blocks are all leased or in flight from a tier, without a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arriving {
    /// The hit if all of them arrive, in hash units.
    pub units: u32,
    /// The hit if the claim were settled now, in hash units, as a lower bound.
    pub units_now: u32,
    /// Units of it that come from tiers.
    pub units_from_tier: u32,
    /// Number of blocks that have arrived from a tier.
    pub blocks_come: u32,
    /// Number of blocks that have not.
    pub blocks_left: u32,
}

/// How far a claim has got, and how many nanoseconds before the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimTimes {
    /// It was opened.
    pub opened_ns: u64,
    /// Its hit was known, and room for all of it; `None` = not yet.
    pub admitted_ns: Option<u64>,
    /// Its hit was final; `None` = not yet.
    pub settled_ns: Option<u64>,
    /// Whether it has waited for room.
    pub queued: bool,
    /// What came for it from each tier.
    pub tiers: Vec<CameFrom>,
}

/// Blocks that came from a tier for a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CameFrom {
    /// Name of the tier.
    pub tier: String,
    /// Number of blocks.
    pub blocks: u32,
    /// How many nanoseconds before the answer the first one was there.
    pub first_ns: u64,
    /// The same for the last one.
    pub last_ns: u64,
}

/// A depot's response.
#[expect(missing_docs, reason = "fields are named for what they carry")]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Response {
    /// To `Hello`; the pool's descriptor, number 0, comes with the frame.
    Welcome {
        version: u32,
        depot: u64,
        pid: u32,
        regions: Vec<PoolRegion>,
        timeout_ms: u64,
        waiting_queue_depth: u64,
        running_queue_depth: u64,
        /// Whether `Memory` has an answer.
        has_memory: bool,
    },
    /// To `OpenNamespace`.
    Namespace { handle: NamespaceHandle, id: [u8; 16], epoch: u32 },
    /// To `Lookup`: one byte for each hash, 1 = present.
    Present(#[serde(with = "serde_bytes")] Vec<u8>),
    /// To `LookupPrefix`.
    Prefix(u32),
    /// To the claim requests.
    Claim { claim: u64, settled: bool, units: u32, units_from_tier: u32, arriving: Option<Arriving> },
    /// To `ClaimRelease`, if it asks for them.
    ClaimTimes(ClaimTimes),
    /// To `Reserve` and `Acquire`, one for each hash.
    Grants(Vec<Grant>),
    /// To `Drain`.
    Drained(bool),
    /// To `Reset`: the new ids, one for each namespace.
    Epochs(Vec<[u8; 16]>),
    /// To `Stats`.
    Stats(String),
    /// Success.
    Ok,
    /// The complete request failed.
    Failed { kind: String, message: String },
    /// To `HandOver`; the list of blocks comes with the frame. An `Ok` with the lock's descriptor follows, then one for
    /// each of the `holders` connections whose clients may still copy, with their pidfds where there are any.
    HandOver { holders: u32 },
    /// An announcement: another depot takes the pool over. Nothing new begins here, and the connection is closed soon.
    HandsOver,
    /// To `Namespaces`; empty after the last one.
    Namespaces(Vec<KnownNamespace>),
    /// To `Events` that begins: the sequence number of now, and the names of the places.
    Followed { upto: u64, places: Vec<String> },
    /// To `Events`: up to which sequence number; whether events before it are missing, so that a snapshot is needed;
    /// whether there are more; the namespaces' current ids, which a reset changes; and packed events (`events::packed`).
    Events {
        upto: u64,
        is_gap: bool,
        has_more: bool,
        ids: Vec<[u8; 16]>,
        #[serde(with = "serde_bytes")]
        events: Vec<u8>,
    },
    /// To `Memory`; its descriptor comes with the frame. `head` is what it begins with for as long as it is this depot's:
    /// what was read before another head is seen must not be used.
    Memory {
        bytes: u64,
        #[serde(with = "serde_bytes")]
        head: Vec<u8>,
    },
    /// To `Snapshot`: the namespace's id, hashes of 16 bytes each, and where to go on.
    Snapshot {
        id: [u8; 16],
        #[serde(with = "serde_bytes")]
        hashes: Vec<u8>,
        next: Option<u64>,
    },
}

/// A namespace that a depot knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownNamespace {
    /// Its number at this depot.
    pub handle: NamespaceHandle,
    /// Its name, the same through all resets.
    pub root: [u8; 16],
    /// What its blocks' keys carry now.
    pub id: [u8; 16],
}

impl Response {
    /// Converts a `Failed` into its error.
    pub fn into_result(self) -> Result<Self> {
        match self {
            Self::Failed { kind, message } => {
                Err(Error::new(ErrorKind::from_name(&kind).unwrap_or(ErrorKind::Protocol), message))
            }
            other => Ok(other),
        }
    }

    /// Converts an error into a response.
    pub fn from_error(error: &Error) -> Self {
        Self::Failed { kind: error.kind().as_str().to_owned(), message: error.to_string() }
    }
}

/// Encodes one frame: request id, then the message.
pub fn encode<T: Serialize>(request_id: u64, message: &T) -> Result<Vec<u8>> {
    let mut frame = Vec::with_capacity(512);
    frame.extend_from_slice(&request_id.to_le_bytes());
    let frame = postcard::to_extend(message, frame)
        .map_err(|e| Error::new(ErrorKind::Protocol, "a message cannot be written").with_source(e))?;
    if frame.len() > FRAME_BYTES_MAX {
        return Err(Error::new(ErrorKind::Protocol, "a frame is too long")
            .with("bytes", frame.len())
            .with("bytes_max", FRAME_BYTES_MAX));
    }
    Ok(frame)
}

/// Decodes a frame written by `encode`. Never panics, whatever the bytes.
pub fn decode<'a, T: Deserialize<'a>>(frame: &'a [u8]) -> Result<(u64, T)> {
    let bad = || Error::new(ErrorKind::Protocol, "a frame cannot be read").with("bytes", frame.len());
    let (id, body) = frame.split_first_chunk::<8>().ok_or_else(bad)?;
    let (message, rest) = postcard::take_from_bytes(body).map_err(|e| bad().with_source(e))?;
    if !rest.is_empty() {
        return Err(bad().with("trailing_bytes", rest.len()));
    }
    Ok((u64::from_le_bytes(*id), message))
}

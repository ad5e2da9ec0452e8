//! What goes over the local door: requests, responses, and their bytes (postcard). The same values serve a depot
//! embedded in the process, without the bytes.

use std::borrow::Cow;

use kvdepot_core::limits::{BATCH_HASHES_MAX, FRAME_BYTES_MAX};
use kvdepot_core::runs::Runs;
use kvdepot_core::{BlockHash, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::pool::PoolRegion;

/// Version of the local door; both sides must speak the same.
pub const PROTOCOL_VERSION: u32 = 7;
/// First field of the first frame: whoever sends something else is not a client of ours.
pub const HELLO_MAGIC: u64 = 0x3154_4f50_4544_564b;

/// Block hashes of a batch, 16 bytes each, one after another: borrowed from the frame, so decoding copies nothing.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hashes<'a>(
    #[serde(borrow)]
    #[serde(with = "serde_bytes")]
    pub Cow<'a, [u8]>,
);

impl Hashes<'_> {
    /// How many hashes; an error if the bytes are no whole number of hashes, or too many (P7).
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

    /// The hashes in order.
    pub fn iter(&self) -> impl Iterator<Item = BlockHash> + '_ {
        self.0.as_chunks::<16>().0.iter().map(|bytes| BlockHash(*bytes))
    }
}

/// A namespace's number at this depot, good until the depot ends.
pub type NamespaceHandle = u64;
/// A lease's number, good on the connection that got it.
pub type LeaseNumber = u64;

/// One KV-cache group of a claim.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClaimGroup {
    /// Namespaces of all ranks whose blocks are needed.
    pub namespaces: Vec<NamespaceHandle>,
    /// How many last blocks the group needs; 0 = all.
    pub window_blocks: u32,
    /// Hash units per block.
    pub hashes_per_block: u32,
}

/// What a client asks.
#[expect(missing_docs, reason = "fields are named for what they carry")]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request<'a> {
    /// First frame of a connection.
    Hello { magic: u64, version: u32, pid: u32 },
    /// Makes a namespace known.
    OpenNamespace { canonical: Cow<'a, str> },
    /// Which blocks are there, in pool or tier.
    Lookup {
        namespace: NamespaceHandle,
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// How many leading blocks are there in all of the namespaces.
    LookupPrefix {
        namespaces: Vec<NamespaceHandle>,
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// Bring blocks into the pool.
    Prefetch {
        namespace: NamespaceHandle,
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// Find and lease the longest hit. The claim is over the hashes of the `ClaimHashes` frames directly before it,
    /// then these. `label`: what the client calls the request, for who asks why it was a miss.
    ClaimOpen {
        groups: Vec<ClaimGroup>,
        #[serde(borrow)]
        hashes: Hashes<'a>,
        skip: u32,
        limit: u32,
        label: Cow<'a, str>,
    },
    /// How far a claim is; `settle` takes what has come.
    ClaimPoll { claim: u64, settle: bool },
    /// Take what has come, because computing the rest is faster than waiting for it.
    ClaimDecline { claim: u64 },
    /// Drop a claim's leases.
    ClaimRelease { claim: u64 },
    /// Slots for blocks that the client is about to dump.
    Reserve {
        namespace: NamespaceHandle,
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// Shards of reserved blocks have been written; a block with all its shards is sealed, and its lease ends.
    Commit { leases: Vec<LeaseNumber>, shards: Shards },
    /// Reserved blocks will not come, or leases are no longer needed.
    Release { leases: Vec<LeaseNumber> },
    /// Lease blocks for reading, filled from a tier where needed, within `wait_ms`; what is still on its way then is
    /// refused with `timeout`, and goes on coming. `last`: the caller asks for that no more, so it counts as missed.
    Acquire {
        namespace: NamespaceHandle,
        #[serde(borrow)]
        hashes: Hashes<'a>,
        wait_ms: u32,
        last: bool,
    },
    /// Move namespaces to their next epoch.
    Reset { namespaces: Vec<NamespaceHandle> },
    /// Wait until what is dirty has been written to the tiers.
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
    /// Last frame of a connection: no copy into or out of slots leased on it is under way, so its leases end at once.
    /// Not answered. A connection that ends without it may belong to a process that was killed, whose devices may still
    /// copy.
    Goodbye,
    /// A new depot asks for the pool. Nothing else follows on this connection but `TakenOver`.
    HandOver { version: u32, pool_bytes: u64 },
    /// It has what it needs, and waits for the old depot's exit.
    TakenOver,
    /// This process has no pool mapped of any depot before: its copies into and out of them have ended.
    CopiesEnded,
    /// Blocks asked for on this connection are to lie near this NUMA node from now on, where there is room; none takes the
    /// wish back. Not answered.
    Near { node: Option<u32> },
}

impl Request<'_> {
    /// Whether no answer is sent.
    pub const fn is_one_way(&self) -> bool {
        matches!(self, Self::ClaimHashes { .. } | Self::Goodbye | Self::Near { .. })
    }

    /// Namespaces that it names by their numbers.
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

/// Which shards a commit speaks of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shards {
    /// All of them.
    All,
    /// These.
    Some(Vec<u32>),
}

/// How one block of a `Reserve` or `Acquire` fared.
#[expect(missing_docs, reason = "fields are named for what they carry")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grant {
    /// The slot is leased: for writing (`Reserve`) or reading (`Acquire`).
    Leased { lease: LeaseNumber, runs: Runs },
    /// The depot has the block already, or somebody else is dumping it: nothing to do.
    Have,
    /// No: by the kind's name.
    Refused { kind: Cow<'static, str> },
}

/// A claim that is not settled, of whose hit every block is leased or on its way from a tier, and none has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arriving {
    /// The hit if all of them come, in hash units.
    pub units: u32,
    /// The hit if the claim were settled now, in hash units: at least that.
    pub units_now: u32,
    /// Units of it that come from below the pool.
    pub units_from_tier: u32,
    /// Blocks that have come from a tier.
    pub blocks_come: u32,
    /// Blocks that have not.
    pub blocks_left: u32,
}

/// What a depot answers.
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
    },
    /// To `OpenNamespace`.
    Namespace { handle: NamespaceHandle, id: [u8; 16], epoch: u32 },
    /// To `Lookup`: one byte a hash, 1 = there.
    Present(#[serde(with = "serde_bytes")] Vec<u8>),
    /// To `LookupPrefix`.
    Prefix(u32),
    /// To the claim requests.
    Claim { claim: u64, settled: bool, units: u32, units_from_tier: u32, arriving: Option<Arriving> },
    /// To `Reserve` and `Acquire`, one a hash.
    Grants(Vec<Grant>),
    /// To `Drain`.
    Drained(bool),
    /// To `Reset`: the new ids, one a namespace.
    Epochs(Vec<[u8; 16]>),
    /// To `Stats`.
    Stats(String),
    /// Done.
    Ok,
    /// The request failed as a whole.
    Failed { kind: String, message: String },
    /// To `HandOver`; the list of blocks comes with the frame. An `Ok` with the lock's descriptor follows, and one for each
    /// of so many connections whose clients may still copy, with their pidfds where there are any.
    HandOver { holders: u32 },
}

impl Response {
    /// The failure that a `Failed` carries.
    pub fn into_result(self) -> Result<Self> {
        match self {
            Self::Failed { kind, message } => {
                Err(Error::new(ErrorKind::from_name(&kind).unwrap_or(ErrorKind::Protocol), message))
            }
            other => Ok(other),
        }
    }

    /// The frame's form of an error.
    pub fn from_error(error: &Error) -> Self {
        Self::Failed { kind: error.kind().as_str().to_owned(), message: error.to_string() }
    }
}

/// One frame: request id, then the message.
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

/// What `encode` wrote. Never panics, whatever the bytes.
pub fn decode<'a, T: Deserialize<'a>>(frame: &'a [u8]) -> Result<(u64, T)> {
    let bad = || Error::new(ErrorKind::Protocol, "a frame cannot be read").with("bytes", frame.len());
    let (id, body) = frame.split_first_chunk::<8>().ok_or_else(bad)?;
    let (message, rest) = postcard::take_from_bytes(body).map_err(|e| bad().with_source(e))?;
    if !rest.is_empty() {
        return Err(bad().with("trailing_bytes", rest.len()));
    }
    Ok((u64::from_le_bytes(*id), message))
}

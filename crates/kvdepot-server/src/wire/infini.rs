//! Requests of InfiniStore clients, served one at a time and answered in order.

use kvdepot_core::{BlockHash, ErrorKind, Result};
use kvdepot_depot::values::{Found, Values};
use kvdepot_wire::infini::{ConnInfo, Reply, Request, TcpOp, code};
use kvdepot_wire::{Frame, FrameBuffer};

use super::config::GET_WAIT;
use super::connection::Connection;

/// Number of values removed before other connections get a turn. More are removed on another thread, in pieces.
const REMOVED_AT_ONCE_MAX: usize = 16;
/// Number of values that the other thread removes at a time.
const REMOVED_APART_MAX: usize = 256;

/// Number of keys whose longest prefix is found without leaving this thread. More are looked up on another thread.
const MATCHED_AT_ONCE_MAX: usize = 64;

/// A request with hashed keys.
#[derive(Debug)]
pub(super) enum Command {
    Exchange(ConnInfo),
    Exists(Option<BlockHash>),
    Match(Vec<BlockHash>),
    Delete(Vec<BlockHash>),
    Put(BlockHash, u32),
    Get(BlockHash),
    RdmaOnly,
}

impl Command {
    pub(super) fn decode(frame: Frame<'_>) -> Result<Self> {
        let all = |keys: Vec<&[u8]>| keys.into_iter().map(Values::hash).collect();
        Ok(match Request::decode(frame)? {
            Request::Exchange(info) => Self::Exchange(info),
            // No value can have this key.
            Request::Exists([]) => Self::Exists(None),
            Request::Exists(key) => Self::Exists(Some(Values::hash(key))),
            Request::Match(keys) => Self::Match(all(keys)),
            Request::Delete(keys) => Self::Delete(all(keys)),
            Request::Tcp { key, op: TcpOp::Put(bytes) } => Self::Put(Values::hash(key), bytes),
            Request::Tcp { key, op: TcpOp::Get } => Self::Get(Values::hash(key)),
            Request::RdmaOnly(_) => Self::RdmaOnly,
        })
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Exchange(_) => "infini_exchange",
            Self::Exists(_) => "infini_exists",
            Self::Match(_) => "infini_match",
            Self::Delete(_) => "infini_delete",
            Self::Put(..) => "infini_put",
            Self::Get(_) => "infini_get",
            Self::RdmaOnly => "infini_rdma",
        }
    }
}

impl Connection {
    pub(super) async fn serve_infini(&mut self, command: Command, buffer: &mut FrameBuffer) -> Result<()> {
        match command {
            Command::Exists(None) => self.answer(Reply::Number(1)).await,
            Command::Exists(Some(hash)) => {
                let there = match self.values.exist_now(&[hash]) {
                    Some(there) => there == [true],
                    None => self.apart(move |values| values.exist(&[hash]) == [true]).await?,
                };
                self.answer(Reply::Number(i32::from(!there))).await
            }
            Command::Match(hashes) => {
                // Each is looked up in every size class, under the lock of all users of the depot.
                let now =
                    if hashes.len() <= MATCHED_AT_ONCE_MAX { self.values.exist_now(&hashes) } else { None };
                let leading = match now {
                    Some(there) => there.iter().take_while(|there| **there).count(),
                    None => self.apart(move |values| values.prefix(&hashes)).await?,
                };
                self.answer(Reply::Number(leading as i32 - 1)).await
            }
            Command::Delete(hashes) => {
                let mut gone = 0;
                if hashes.len() <= REMOVED_AT_ONCE_MAX && self.values.removes_at_once() {
                    gone = self.values.remove(&hashes);
                } else {
                    // In between, requests that wait for a thread or for the depot's lock get their turn.
                    for piece in hashes.chunks(REMOVED_APART_MAX) {
                        let piece = piece.to_vec();
                        gone += self.apart(move |values| values.remove(&piece)).await?;
                        tokio::task::yield_now().await;
                    }
                }
                self.answer(Reply::Number(gone as i32)).await
            }
            Command::Put(hash, bytes) => self.put_value(hash, bytes, buffer).await,
            Command::Get(hash) => self.send_value(hash).await,
            Command::Exchange(info) => self.exchange(info).await,
            Command::RdmaOnly => self.refuse(code::INVALID, ErrorKind::Protocol).await,
        }
    }

    async fn answer(&self, reply: Reply) -> Result<()> {
        let mut bytes = Vec::with_capacity(40);
        reply.encode(&mut bytes);
        self.stream.send(&bytes, None).await
    }

    /// A four-byte answer that is not 200.
    pub(super) async fn refuse(&self, code: i32, kind: ErrorKind) -> Result<()> {
        self.door.counters.failed(kind);
        self.answer(Reply::Code(code)).await
    }

    /// Receives the value into its slot, and makes it visible after its last byte (P1). If the peer leaves earlier, or
    /// there is no space for the value, nothing changes.
    async fn put_value(&self, hash: BlockHash, bytes: u32, buffer: &mut FrameBuffer) -> Result<()> {
        if bytes == 0 {
            return self.refuse(code::INVALID, ErrorKind::Protocol).await;
        }
        let reserved = self.patiently(self.room_deadline(), || self.values.reserve(hash, bytes.into())).await;
        let mut slot = match reserved {
            Ok(slot) => slot,
            Err(error) => {
                tracing::debug!("a value was not stored: {error}");
                // Refused immediately, so that a client that checks need not send the rest; most clients send it
                // anyway.
                self.refuse(code::OUT_OF_MEMORY, error.kind()).await?;
                return self.stream.discard(buffer, bytes.into()).await;
            }
        };
        self.stream.receive(buffer, &mut slot, bytes as usize, |_, _, _| {}).await?;
        match slot.publish() {
            Ok(()) => self.answer(Reply::Code(code::FINISH)).await,
            Err(error) => {
                tracing::warn!("a value was not stored: {error}");
                self.refuse(code::INTERNAL, error.kind()).await
            }
        }
    }

    /// A miss is the four-byte 404. The real client handles every other answer worse, and none of them well: it waits
    /// for four more bytes, so a careful user asks `check_exist` first.
    async fn send_value(&self, hash: BlockHash) -> Result<()> {
        let found = match self.values.get_now(hash) {
            Found::Here(value) => Some(value),
            Found::Absent => None,
            Found::Ask => {
                let outcome = self.apart(move |values| values.get(hash, GET_WAIT)).await?;
                outcome.unwrap_or_else(|error| {
                    self.door.counters.failed(error.kind());
                    tracing::debug!("a value could not be read: {error}");
                    None
                })
            }
        };
        let Some(value) = found else { return self.answer(Reply::Code(code::NOT_FOUND)).await };
        let mut head = Vec::with_capacity(8);
        Reply::Value(value.len() as u32).encode(&mut head);
        self.stream.send(&head, Some(&value)).await
    }

    async fn exchange(&mut self, info: ConnInfo) -> Result<()> {
        let Some(rdma) = self.door.rdma.clone() else {
            tracing::warn!(
                "a client asked for RDMA, which is not open here (--dev-name opens it): connect by TCP"
            );
            return self.refuse(code::SYSTEM, ErrorKind::Unsupported).await;
        };
        match self.apart(move |values| rdma.exchange(info, values.clone())).await? {
            Ok((info, queue_pair)) => {
                self.rdma = Some(queue_pair);
                self.answer(Reply::Exchange(info)).await
            }
            Err(error) => {
                tracing::warn!("an RDMA connection could not be made: {error}");
                self.refuse(code::SYSTEM, error.kind()).await
            }
        }
    }
}

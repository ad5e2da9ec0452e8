//! Requests of our own clients: with ids, in batches, verified by CRC-64/NVME on both sides.

use std::sync::Arc;
use std::time::Duration;

use crc_fast::{CrcAlgorithm, Digest};
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, Result};
use kvdepot_depot::direct::{Direct, Now, OpenNamespace, ReadSlot};
use kvdepot_wire::own::{Request, Response, Status};
use kvdepot_wire::{Frame, FrameBuffer};
use tokio::time::Instant;

use super::connection::Connection;
use super::counters::Timed;
use super::stream::{Answer, Source, Stream};

/// Number of blocks leased at a time by one get, which a slow peer keeps in the pool.
const LEASES_AT_A_TIME: usize = 16;
/// Number of blocks removed without leaving this thread. More are removed on another thread.
const REMOVED_AT_ONCE_MAX: usize = 256;
/// Number of bytes of blocks that are sent together.
const TOGETHER_BYTES: u64 = 256 << 10;
/// The longest wait for tiers.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// How long a get waits before it retries blocks that found no space in the pool.
const ROOM_TICK: Duration = Duration::from_millis(5);

/// A request that owns its data.
#[derive(Debug)]
pub(super) enum Command {
    /// A `Hello` or `Auth`, as received.
    Greeting(Greeting),
    Open(String),
    Exists(NamespaceId, Vec<BlockHash>),
    Prefix(NamespaceId, Vec<BlockHash>),
    Get(NamespaceId, Duration, Vec<BlockHash>),
    Put(NamespaceId, u32, Vec<(BlockHash, u64)>),
    SetEpoch(NamespaceId, u32),
    Remove(NamespaceId, Vec<BlockHash>),
    Stat,
    Close(String),
}

#[derive(Debug)]
pub(super) enum Greeting {
    Hello { version: u32, features: u64, nonce: [u8; 32] },
    Auth { proof: [u8; 32] },
}

impl Greeting {
    pub(super) const fn request(&self) -> Request<'static> {
        match *self {
            Self::Hello { version, features, nonce } => Request::Hello { version, features, nonce },
            Self::Auth { proof } => Request::Auth { proof },
        }
    }
}

impl Command {
    pub(super) fn decode(frame: Frame<'_>) -> Result<(u64, Self)> {
        let (id, request) = Request::decode(frame)?;
        let command = match request {
            Request::Hello { version, features, nonce } => {
                Self::Greeting(Greeting::Hello { version, features, nonce })
            }
            Request::Auth { proof } => Self::Greeting(Greeting::Auth { proof }),
            Request::Open { canonical } => Self::Open(canonical.to_owned()),
            Request::Exists { namespace, hashes } => Self::Exists(namespace, hashes.iter().collect()),
            Request::Prefix { namespace, hashes } => Self::Prefix(namespace, hashes.iter().collect()),
            Request::Get { namespace, wait_ms, hashes } => {
                let wait = Duration::from_millis(wait_ms.into()).min(WAIT_MAX);
                Self::Get(namespace, wait, hashes.iter().collect())
            }
            Request::Put { namespace, block_bytes, blocks } => {
                Self::Put(namespace, block_bytes, blocks.iter().collect())
            }
            Request::SetEpoch { namespace, epoch } => Self::SetEpoch(namespace, epoch),
            Request::Remove { namespace, hashes } => Self::Remove(namespace, hashes.iter().collect()),
            Request::Stat => Self::Stat,
            Request::Close { canonical } => Self::Close(canonical.to_owned()),
        };
        Ok((id, command))
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Greeting(_) => "hello",
            Self::Open(_) => "open",
            Self::Exists(..) => "exists",
            Self::Prefix(..) => "prefix",
            Self::Get(..) => "get",
            Self::Put(..) => "put",
            Self::SetEpoch(..) => "set_epoch",
            Self::Remove(..) => "remove",
            Self::Stat => "stat",
            Self::Close(_) => "close",
        }
    }
}

async fn respond(stream: &Stream, id: u64, response: &Response<'_>) -> Result<()> {
    let mut head = Vec::with_capacity(64);
    response.encode(id, &mut head)?;
    stream.send(&head, None).await
}

fn keys_in(open: &OpenNamespace, hashes: &[BlockHash]) -> Vec<BlockKey> {
    hashes.iter().map(|&hash| BlockKey { namespace: open.id, hash }).collect()
}

fn described(open: &OpenNamespace) -> Result<Response<'static>> {
    let block_bytes = u32::try_from(open.block_bytes)
        .map_err(|_| Error::new(ErrorKind::Unsupported, "blocks of this size do not travel"))?;
    Ok(Response::Namespace { namespace: open.id, epoch: open.epoch, block_bytes })
}

impl Connection {
    /// Serves a request. A failed request is reported, and the connection continues. An error ends the connection.
    pub(super) async fn serve_own(
        &mut self,
        id: u64,
        command: Command,
        timed: Timed,
        buffer: &mut FrameBuffer,
    ) -> Result<()> {
        let outcome = match command {
            Command::Put(namespace, block_bytes, blocks) => {
                return self.put_blocks(id, namespace, block_bytes, &blocks, buffer).await;
            }
            Command::Get(namespace, wait, hashes) => {
                return self.get_blocks(id, namespace, wait, hashes, timed).await;
            }
            other => self.try_serve(id, other).await,
        };
        match outcome {
            Err(error) if error.kind() != ErrorKind::Closed => self.fail(id, &error).await,
            other => other,
        }
    }

    /// Reports that a complete request failed.
    pub(super) async fn fail(&self, id: u64, error: &Error) -> Result<()> {
        self.door.counters.failed(error.kind());
        let message = error.to_string();
        respond(&self.stream, id, &Response::Failed { kind: error.kind(), message: &message }).await
    }

    async fn try_serve(&self, id: u64, command: Command) -> Result<()> {
        let response = match command {
            Command::Open(canonical) => {
                let open = self.wait_for(move |direct| direct.open_namespace(&canonical)).await??;
                described(&open)?
            }
            Command::SetEpoch(namespace, epoch) => {
                let handle = self.direct.namespace(namespace)?.handle;
                let open = self.wait_for(move |direct| direct.set_epoch(handle, epoch)).await??;
                described(&open)?
            }
            Command::Exists(namespace, hashes) => {
                let there = self.exist(namespace, &hashes).await?;
                let bytes: Vec<u8> = there.into_iter().map(u8::from).collect();
                return respond(&self.stream, id, &Response::Present(&bytes)).await;
            }
            Command::Prefix(namespace, hashes) => {
                let open = self.direct.namespace(namespace)?;
                let leading = match self.direct.exist_now(&keys_in(&open, &hashes)) {
                    Some(there) => there.iter().take_while(|there| **there).count() as u32,
                    None => {
                        let flat: Vec<u8> = hashes.iter().flat_map(|hash| hash.0).collect();
                        self.wait_for(move |direct| direct.prefix(open.handle, &flat)).await??
                    }
                };
                Response::Leading(leading)
            }
            Command::Remove(namespace, hashes) => {
                let keys = keys_in(&self.direct.namespace(namespace)?, &hashes);
                if keys.len() <= REMOVED_AT_ONCE_MAX && self.direct.removes_at_once() {
                    self.direct.remove(&keys)
                } else {
                    self.wait_for(move |direct| direct.remove(&keys)).await?
                }
                .into_result()?;
                Response::Done
            }
            Command::Close(canonical) => {
                self.direct.close_namespace(&canonical)?;
                Response::Done
            }
            Command::Stat => {
                let text = self.direct.stats().to_string();
                return respond(&self.stream, id, &Response::Stats(&text)).await;
            }
            Command::Greeting(_) | Command::Get(..) | Command::Put(..) => {
                return Err(Error::new(ErrorKind::Protocol, "this request does not belong here"));
            }
        };
        respond(&self.stream, id, &response).await
    }

    async fn exist(&self, namespace: NamespaceId, hashes: &[BlockHash]) -> Result<Vec<bool>> {
        let keys = keys_in(&self.direct.namespace(namespace)?, hashes);
        match self.direct.exist_now(&keys) {
            Some(there) => Ok(there),
            None => self.wait_for(move |direct| direct.exist(&keys)).await,
        }
    }

    /// Receives each block into its slot, verifies it, and makes it visible after its last byte (P1).
    async fn put_blocks(
        &self,
        id: u64,
        namespace: NamespaceId,
        block_bytes: u32,
        blocks: &[(BlockHash, u64)],
        buffer: &mut FrameBuffer,
    ) -> Result<()> {
        let open = self.direct.namespace(namespace).and_then(|open| {
            if open.block_bytes == u64::from(block_bytes) {
                return Ok(open);
            }
            Err(Error::new(ErrorKind::Config, "blocks of this namespace have another size")
                .with("block_bytes", open.block_bytes)
                .with("sent_bytes", block_bytes))
        });
        let open = match open {
            Ok(open) => open,
            Err(error) => {
                self.stream.discard(buffer, u64::from(block_bytes) * blocks.len() as u64).await?;
                return self.fail(id, &error).await;
            }
        };
        let bytes = block_bytes as usize;
        let deadline = self.room_deadline();
        let mut statuses = Vec::with_capacity(blocks.len());
        for &(hash, crc64) in blocks {
            let status = match self.patiently(deadline, || self.direct.reserve(open, hash)).await {
                Ok(Some(mut slot)) => {
                    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
                    let digested = |slot: &kvdepot_depot::direct::WriteSlot, start, end| {
                        slot.slices(start, end).into_iter().for_each(|piece| digest.update(piece));
                    };
                    self.stream.receive(buffer, &mut slot, bytes, digested).await?;
                    if digest.finalize() == crc64 {
                        slot.seal(Some(crc64)).map(|()| Status::Ok)
                    } else {
                        Ok(Status::Failed(ErrorKind::Corrupt))
                    }
                }
                Ok(None) => self.stream.discard(buffer, block_bytes.into()).await.map(|()| Status::Had),
                Err(error) => {
                    self.stream.discard(buffer, block_bytes.into()).await?;
                    Err(error)
                }
            };
            let status = status.unwrap_or_else(|error| Status::Failed(error.kind()));
            if let Status::Failed(kind) = status {
                self.door.counters.failed(kind);
            }
            statuses.push(status);
        }
        respond(&self.stream, id, &Response::Stored(statuses)).await
    }

    /// Sends the blocks in the pool now, and the rest in a separate task, so that later requests do not wait for a
    /// tier.
    async fn get_blocks(
        &mut self,
        id: u64,
        namespace: NamespaceId,
        wait: Duration,
        hashes: Vec<BlockHash>,
        timed: Timed,
    ) -> Result<()> {
        let open = match self.direct.namespace(namespace) {
            Ok(open) => open,
            Err(error) => return self.fail(id, &error).await,
        };
        let deadline = Instant::now() + wait;
        let mut asked = Vec::new();
        for (chunk, part) in hashes.chunks(LEASES_AT_A_TIME).enumerate() {
            let first = chunk * LEASES_AT_A_TIME;
            let mut found = Vec::new();
            for (i, now) in self.direct.read_now(&keys_in(&open, part)).into_iter().enumerate() {
                let index = (first + i) as u32;
                match now {
                    Now::Here(slot) => found.push((index, Ok(slot))),
                    Now::Absent => found.push((index, Err(ErrorKind::NotFound))),
                    Now::Ask => asked.push((index, part[i])),
                }
            }
            // Small blocks are sent together; between large ones other answers get their turn.
            let together = (TOGETHER_BYTES / open.block_bytes).max(1) as usize;
            while !found.is_empty() {
                let some: Vec<_> = found.drain(..found.len().min(together)).collect();
                send_blocks(&self.stream, id, &some).await?;
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let permit = Arc::clone(&self.in_flight).acquire_owned().await;
        let permit = permit.map_err(|_| Error::new(ErrorKind::Closed, "the connection ends"))?;
        let (stream, direct) = (Arc::clone(&self.stream), self.direct.clone());
        self.tasks.spawn(async move {
            let _ends_with_it = (permit, timed);
            if let Err(error) = fetch_blocks(&stream, &direct, id, open, asked, deadline).await {
                tracing::debug!("a get was not answered: {error}");
            }
        });
        while self.tasks.try_join_next().is_some() {}
        Ok(())
    }
}

/// A block's index in its get, and the block or the reason why it is missing.
type Found = (u32, Result<ReadSlot, ErrorKind>);

async fn send_blocks(stream: &Stream, id: u64, blocks: &[Found]) -> Result<()> {
    let mut heads = Vec::with_capacity(blocks.len() * 64);
    let mut ends = Vec::with_capacity(blocks.len());
    for (index, block) in blocks {
        let (status, block_bytes, crc64) = match block {
            Ok(slot) => (Status::Ok, slot.block_bytes() as u32, slot.crc64()),
            Err(kind) => (Status::Failed(*kind), 0, 0),
        };
        Response::Block { index: *index, status, block_bytes, crc64 }.encode(id, &mut heads)?;
        ends.push(heads.len());
    }
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let heads = starts.zip(&ends).map(|(start, end)| &heads[start..*end]);
    let payloads = blocks.iter().map(|(_, block)| block.as_ref().ok().map(|slot| slot as &dyn Source));
    let answers: Vec<Answer<'_>> =
        heads.zip(payloads).map(|(head, payload)| Answer { head, payload }).collect();
    stream.send_all(&answers).await
}

/// Sends blocks that tiers have, or may have.
async fn fetch_blocks(
    stream: &Stream,
    direct: &Direct,
    id: u64,
    open: OpenNamespace,
    mut asked: Vec<(u32, BlockHash)>,
    deadline: Instant,
) -> Result<()> {
    while !asked.is_empty() {
        let late = Instant::now() >= deadline;
        let part: Vec<(u32, BlockHash)> = asked.drain(..asked.len().min(LEASES_AT_A_TIME)).collect();
        let hashes: Vec<BlockHash> = part.iter().map(|(_, hash)| *hash).collect();
        let (direct, left) = (direct.clone(), deadline.saturating_duration_since(Instant::now()));
        let outcome =
            tokio::task::spawn_blocking(move || direct.read(open.handle, open.id, &hashes, left)).await;
        let slots = outcome.map_err(|e| Error::new(ErrorKind::Io, "a read ended early").with_source(e))?;
        let slots = slots.unwrap_or_else(|error| part.iter().map(|_| Err(error.kind())).collect());
        let mut found_room = false;
        for ((index, hash), slot) in part.into_iter().zip(slots) {
            match slot {
                // Space is freed when leases end: those of this get's own blocks, or of others.
                Err(ErrorKind::NoSpace) if !late => asked.push((index, hash)),
                slot => {
                    found_room = true;
                    send_blocks(stream, id, &[(index, slot)]).await?;
                }
            }
        }
        if !found_room {
            tokio::time::sleep(ROOM_TICK).await;
        }
    }
    Ok(())
}

//! Writes of packs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvdepot_core::limits::OBJECT_PACK_LEAST_MS;
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId};
use kvdepot_io::SlotBuf;
use tokio::task::block_in_place;
use tokio::time::{Instant as TokioInstant, timeout_at};

use super::codec::{self, Entry, PackName};
use super::gather::Next;
use super::now_ms;
use crate::format::Writer;
use crate::object::epochs::no_bucket;
use crate::object::link::{Fault, Lane};
use crate::object::meter::one_more;
use crate::object::shared::{Shared, late};
use crate::object::writes::{There, copy};
use crate::owed::Answer;
use crate::spaces::Space;
use crate::{Compression, Written};

/// A block that waits for its pack.
pub(in crate::object) struct Waiting {
    pub(in crate::object) key: BlockKey,
    pub(in crate::object) space: Space,
    pub(in crate::object) src: SlotBuf,
    pub(in crate::object) deadline: Instant,
    pub(in crate::object) answer: Answer<Written>,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Waiting({})", self.key)
    }
}

/// A pack in memory.
struct Sealed {
    body: Bytes,
    entries: Vec<Entry>,
}

impl Shared {
    /// Puts a block into the next pack of its namespace.
    pub(in crate::object) fn gather(self: &Arc<Self>, block: Waiting) {
        let linger = self.config.pack_linger;
        let id = block.key.namespace;
        if block.deadline < Instant::now() + linger + Duration::from_millis(OBJECT_PACK_LEAST_MS) {
            // It has no time to wait for others, and its deadline would be theirs.
            return self.store_own(block);
        }
        let bytes = block.space.spec.layout().slot_bytes();
        let next = self.packs.waiting.lock().add(id, block, bytes);
        let shared = Arc::clone(self);
        match next {
            Next::Wait => {}
            Next::Write(blocks) => {
                drop(self.runtime.spawn(async move { shared.store_pack(id, blocks).await }))
            }
            Next::Timer(number) => drop(self.runtime.spawn(async move {
                tokio::time::sleep(linger).await;
                let blocks = shared.packs.waiting.lock().take(id, number);
                shared.store_pack(id, blocks).await;
            })),
        }
    }

    async fn store_pack(self: Arc<Self>, id: NamespaceId, blocks: Vec<Waiting>) {
        let is_served = self.spaces.lock().has_id(&id);
        if !is_served {
            // A reset came while they waited: nobody may name them any more.
            for Waiting { key, src, answer, .. } in blocks {
                drop(src);
                let what = "a block's namespace was reset or closed before the block was written";
                answer.end(Err(Error::new(ErrorKind::NotFound, what).with("key", key)));
            }
            return;
        }
        if blocks.len() < self.config.pack_blocks_min {
            for block in blocks {
                self.store_own(block);
            }
            return;
        }
        let Some(deadline) = blocks.iter().map(|block| block.deadline).min() else { return };
        let blocks = self.not_in_packs(blocks, deadline).await;
        if blocks.is_empty() {
            return;
        }
        let keys: Vec<BlockKey> = blocks.iter().map(|block| block.key).collect();
        // Set while the store may carry out a request that was not answered.
        let is_open = AtomicBool::new(false);
        let mut answers = Vec::new();
        let work = self.put_pack(id, blocks, &mut answers, deadline, &is_open);
        let outcome = timeout_at(TokioInstant::from_std(deadline), work).await;
        if is_open.into_inner() {
            self.doubt(keys);
        }
        let outcome = match outcome {
            Err(_) => Err(late()),
            Ok(Ok(())) => Ok(Written::New),
            Ok(Err(Fault::Missing(error))) => Err(no_bucket(error)),
            Ok(Err(fault)) => Err(fault.into_error()),
        };
        for answer in answers.into_iter().flatten() {
            answer.end(outcome.clone());
        }
    }

    /// Answers those blocks that lie in packs which are still in the bucket. Returns the others.
    async fn not_in_packs(&self, blocks: Vec<Waiting>, deadline: Instant) -> Vec<Waiting> {
        let mut others = Vec::with_capacity(blocks.len());
        for block in blocks {
            let asked = self.is_in_a_pack(&block.key, &block.space, deadline);
            let is_there = timeout_at(TokioInstant::from_std(deadline), asked).await;
            if matches!(is_there, Ok(Ok(true))) {
                drop(block.src);
                block.answer.end(Ok(Written::AlreadyThere));
            } else {
                others.push(block);
            }
        }
        others
    }

    /// Writes a pack, and records it before anyone hears of it: a removal that waits for these writes finds it.
    async fn put_pack(
        &self,
        id: NamespaceId,
        blocks: Vec<Waiting>,
        answers: &mut Vec<Option<Answer<Written>>>,
        deadline: Instant,
        is_open: &AtomicBool,
    ) -> Result<(), Fault> {
        let Some(space) = blocks.first().map(|block| block.space.clone()) else { return Ok(()) };
        // They are answered by the caller from here on, whatever happens.
        let (blocks, all): (Vec<_>, Vec<_>) =
            blocks.into_iter().map(|block| ((block.key, block.src), Some(block.answer))).unzip();
        *answers = all;
        let mut turn = self.link.turn(Lane::Writes, deadline).await?;
        // Compression takes its time, in which this thread's other requests go on elsewhere.
        let is_long = self.config.compression != Compression::Off;
        let codec = if is_long { self.codecs.acquire().await.ok() } else { None };
        let seal = || self.seal_pack(id, &space, blocks, answers);
        let sealed = if is_long { block_in_place(seal) } else { seal() }?;
        drop(codec);
        if sealed.entries.is_empty() {
            return Ok(());
        }
        let name = self.new_name(sealed.entries.len());
        let path = self.names.pack(space.spec.root(), space.epoch, &name.to_string());
        match self.put_new(&mut turn, &path, &sealed.body.into(), is_open).await? {
            None => {}
            // Nobody else uses the name: an earlier try wrote it. If there was only one without an answer, it is over.
            Some(There { unanswered }) if unanswered > 0 => is_open.store(unanswered > 1, Ordering::Relaxed),
            Some(There { .. }) => {
                let what = "another object has the name of a new pack";
                return Err(Fault::Conflict(Error::new(ErrorKind::Busy, what).with("pack", name)));
            }
        }
        one_more(&self.link.meter.packs);
        self.link.meter.packed.fetch_add(sealed.entries.len() as u64, Ordering::Relaxed);
        let _ = self.note_pack(id, name, sealed.entries);
        Ok(())
    }

    fn new_name(&self, blocks: usize) -> PackName {
        PackName {
            time_ms: now_ms(),
            random: kvdepot_io::random::number(),
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
        }
    }

    /// Encodes the blocks and releases their memory. A block that cannot be encoded is answered now.
    fn seal_pack(
        &self,
        id: NamespaceId,
        space: &Space,
        blocks: Vec<(BlockKey, SlotBuf)>,
        answers: &mut [Option<Answer<Written>>],
    ) -> Result<Sealed, Fault> {
        let (root, layout) = (space.spec.root(), space.spec.layout());
        let mut lengths: Vec<(BlockHash, u64)> = Vec::with_capacity(blocks.len());
        let mut files = Vec::new();
        for ((key, src), answer) in blocks.into_iter().zip(answers) {
            let sealed = self.transform.seal(root, key, layout, &src, Writer::now(&self.host));
            match sealed {
                Ok(file) => {
                    lengths.push((key.hash, file.len() as u64));
                    copy(&file, 0, file.len(), &mut files);
                }
                Err(error) => {
                    drop(src);
                    if let Some(answer) = answer.take() {
                        answer.end(Err(error));
                    }
                }
            }
        }
        let (mut body, entries) = codec::encode(id, &lengths).map_err(Fault::Refused)?;
        body.append(&mut files);
        Ok(Sealed { body: body.into(), entries })
    }
}

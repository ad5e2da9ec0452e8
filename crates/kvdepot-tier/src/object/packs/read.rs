//! Reads of blocks from packs: adjacent ones with one request.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, OBJECT_PACK_READ_BYTES_MAX, OBJECT_PACK_READ_LINGER_MS};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId};
use kvdepot_io::IoBuf;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore};
use tokio::time::{Instant as TokioInstant, timeout_at};

use super::codec::{Entry, PackName};
use super::index::Found;
use crate::Fetched;
use crate::object::link::{Fault, Lane};
use crate::object::reads::{Asked, Wanted, scatter};
use crate::object::shared::{Shared, late};
use crate::owed::Answer;
use crate::spaces::Space;

/// A block to read, and where it lies.
pub(in crate::object) struct Packed {
    pub(in crate::object) found: Found,
    pub(in crate::object) block: Wanted,
    pub(in crate::object) deadline: Instant,
}

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Packed({})", self.block.key)
    }
}

impl Packed {
    /// Returns whether one request may end at the deadline of either.
    fn ends_with(&self, other: &Self, now: Instant) -> bool {
        let (one, two) = (self.deadline.min(other.deadline), self.deadline.max(other.deadline));
        // An eighth of the time left is not missed.
        two - one <= two.saturating_duration_since(now) / 8
    }
}

/// Divides blocks into runs of adjacent ones of one pack.
fn runs(mut blocks: Vec<Packed>, now: Instant) -> Vec<Vec<Packed>> {
    blocks.sort_by_key(|block| (block.block.key.namespace.0, block.found.pack, block.found.entry.offset));
    let mut runs: Vec<Vec<Packed>> = Vec::new();
    let mut bytes = 0;
    for block in blocks {
        let follows = runs.last().and_then(|run| run.last()).is_some_and(|last| {
            last.block.key.namespace == block.block.key.namespace
                && last.found.pack == block.found.pack
                && last.found.entry.offset + last.found.entry.bytes == block.found.entry.offset
                && bytes + block.found.entry.bytes <= OBJECT_PACK_READ_BYTES_MAX
                && last.ends_with(&block, now)
        });
        bytes = if follows { bytes + block.found.entry.bytes } else { block.found.entry.bytes };
        match runs.last_mut().filter(|_| follows) {
            Some(run) => run.push(block),
            None => runs.push(vec![block]),
        }
    }
    runs
}

impl Shared {
    /// Asks whether the pack of a block is still in the bucket, if it is known to have been in one.
    pub(in crate::object) async fn is_in_a_pack(
        &self,
        key: &BlockKey,
        space: &Space,
        deadline: Instant,
    ) -> Result<bool, Fault> {
        while let Some(found) = self.packs.find(key, Instant::now()) {
            let (id, name) = (key.namespace, found.pack);
            let path = self.names.pack(space.spec.root(), space.epoch, &name.to_string());
            if self.head(&path, deadline).await?.is_some() {
                self.packs.index.lock().seen(id, name, Instant::now());
                return Ok(true);
            }
            self.pack_is_gone(id, name, &[]);
        }
        Ok(false)
    }

    /// Reads blocks from packs. They wait a moment for others: when a request has brought several blocks, the depot above
    /// asks for the next ones one by one.
    pub(in crate::object) fn read_packed(self: &Arc<Self>, blocks: Vec<Packed>) {
        if blocks.is_empty() {
            return;
        }
        let is_first = {
            let mut waiting = self.packs.reading.lock();
            let is_first = waiting.is_empty();
            waiting.extend(blocks);
            is_first
        };
        if is_first {
            let shared = Arc::clone(self);
            self.runtime.spawn(async move {
                tokio::time::sleep(Duration::from_millis(OBJECT_PACK_READ_LINGER_MS)).await;
                let blocks = std::mem::take(&mut *shared.packs.reading.lock());
                for run in runs(blocks, Instant::now()) {
                    let shared = Arc::clone(&shared);
                    tokio::spawn(async move { shared.read_run(run).await });
                }
            });
        }
    }

    async fn read_run(self: Arc<Self>, run: Vec<Packed>) {
        let Some(Packed { found, block, .. }) = run.first() else { return };
        let Some(deadline) = run.iter().map(|block| block.deadline).min() else { return };
        let (pack, id) = (found.pack, block.key.namespace);
        let path = self.names.pack(block.space.spec.root(), block.space.epoch, &pack.to_string());
        let mut answers: Vec<(BlockKey, Answer<Fetched>)> = Vec::with_capacity(run.len());
        let mut blocks = Vec::with_capacity(run.len());
        for Packed { found, block: Wanted { key, space, into, answer, .. }, .. } in run {
            answers.push((key, answer));
            blocks.push((key, space, found.entry, into));
        }
        let fetch = self.fetch_run(&path, blocks, deadline);
        let outcome = timeout_at(TokioInstant::from_std(deadline), fetch).await;
        let outcomes = match outcome {
            Err(_) => Err(Fault::Away(late())),
            Ok(outcome) => outcome,
        };
        match outcomes {
            Ok(outcomes) => {
                self.packs.index.lock().seen(id, pack, Instant::now());
                let mut corrupt = Vec::new();
                let outcomes = outcomes.into_iter().zip(&answers).map(|(outcome, (key, _))| match outcome {
                    Err(Fault::Corrupt(error)) => {
                        corrupt.push(*key);
                        Err(Fault::Refused(error))
                    }
                    Err(Fault::Missing(error)) => {
                        // A later version's block: another place may have one for this version.
                        self.packs.index.lock().skip(key, pack);
                        Err(Fault::Missing(error))
                    }
                    other => other,
                });
                let outcomes: Vec<_> = outcomes.collect();
                if !corrupt.is_empty() {
                    self.pack_is_corrupt(id, pack, &path, &corrupt);
                }
                for ((key, answer), outcome) in answers.into_iter().zip(outcomes) {
                    self.end_read(key, answer, outcome, Asked::Packed);
                }
            }
            Err(Fault::Missing(_)) => {
                let keys: Vec<BlockKey> = answers.iter().map(|(key, _)| *key).collect();
                self.pack_is_gone(id, pack, &keys);
                for (key, answer) in answers {
                    // Perhaps another pack has it: a later lookup asks.
                    let error = Error::new(ErrorKind::NotFound, "a pack is not in the bucket any more");
                    self.end_read(key, answer, Err(Fault::Missing(error)), Asked::Packed);
                }
            }
            Err(fault) => {
                if matches!(fault, Fault::Corrupt(_)) {
                    let keys: Vec<BlockKey> = answers.iter().map(|(key, _)| *key).collect();
                    self.pack_is_corrupt(id, pack, &path, &keys);
                }
                let error = fault.into_error();
                for (key, answer) in answers {
                    self.end_read(key, answer, Err(Fault::Refused(error.clone())), Asked::Packed);
                }
            }
        }
    }

    /// Deletes a pack because of these blocks of it. It is unreachable immediately.
    fn pack_is_corrupt(self: &Arc<Self>, id: NamespaceId, name: PackName, path: &Path, keys: &[BlockKey]) {
        self.link.meter.corrupt.fetch_add(keys.len() as u64, Ordering::Relaxed);
        tracing::warn!(%path, blocks = keys.len(), "a pack with corrupt blocks is deleted");
        if self.doom_pack(id, name, &[]).is_err() {
            // Too many packs could not be deleted: it is only forgotten.
            self.packs.index.lock().drop_pack(id, name);
        }
        let (shared, path) = (Arc::clone(self), path.clone());
        self.runtime.spawn(async move {
            match shared.delete(std::slice::from_ref(&path), shared.patience()).await {
                Ok(()) => shared.pack_is_gone(id, name, &[]),
                Err(fault) => {
                    tracing::debug!(error = %fault.into_error(), %path, "a corrupt pack is not deleted yet");
                }
            }
        });
    }

    /// Reads a run, and verifies each block. Fails if the store did not give all its bytes.
    async fn fetch_run(
        &self,
        path: &Path,
        mut blocks: Vec<(BlockKey, Space, Entry, IoBuf)>,
        deadline: Instant,
    ) -> Result<Vec<Result<u64, Fault>>, Fault> {
        let mut turn = self.link.turn(Lane::Reads, deadline).await?;
        loop {
            match self.fill_run(path, &mut blocks).await {
                Ok(()) => break,
                Err(fault) => turn.again(fault).await?,
            }
        }
        turn.good();
        let mut outcomes = Vec::with_capacity(blocks.len());
        for (key, space, _, into) in blocks {
            outcomes.push(self.verified(&key, space.spec.layout(), into).await);
        }
        Ok(outcomes)
    }

    async fn fill_run(
        &self,
        path: &Path,
        blocks: &mut [(BlockKey, Space, Entry, IoBuf)],
    ) -> Result<(), Fault> {
        let (Some((.., first, _)), Some((.., last, _))) = (blocks.first(), blocks.last()) else {
            return Ok(());
        };
        let range = first.offset..last.offset + last.bytes;
        let wanted = range.end - range.start;
        let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
        let got = self.link.within(self.link.store.get_opts(path, options)).await?;
        if got.range.end - got.range.start != wanted {
            let error = Error::new(ErrorKind::Corrupt, "a pack ends before its last block");
            return Err(Fault::Corrupt(error.with("bytes", got.meta.size)));
        }
        let broken = |bytes: u64| {
            let error =
                Error::new(ErrorKind::Io, "a store's answer does not have the length that was asked for");
            Fault::Away(error.with("bytes", bytes).with("bytes_expected", wanted))
        };
        let (mut pieces, mut done) = (got.into_stream(), 0);
        let (mut number, mut at) = (0, 0);
        while let Some(piece) = self.link.within(async { pieces.next().await.transpose() }).await? {
            let mut piece = &piece[..];
            while !piece.is_empty() {
                let Some((.., entry, into)) = blocks.get_mut(number) else { return Err(broken(done + 1)) };
                let length = usize::try_from(entry.bytes).unwrap_or(usize::MAX);
                let least = into.head().len() + BLOCK_ALIGN_BYTES as usize;
                if !(least..=into.len()).contains(&length) {
                    let error = Error::new(ErrorKind::Corrupt, "a block of a pack has another length");
                    return Err(Fault::Corrupt(
                        error.with("bytes", length).with("bytes_expected", into.len()),
                    ));
                }
                let now = piece.len().min(length - at);
                if !scatter(into, at, &piece[..now]) {
                    return Err(broken(done));
                }
                (at, piece, done) = (at + now, &piece[now..], done + now as u64);
                if at == length {
                    into.set_filled(length);
                    (number, at) = (number + 1, 0);
                }
            }
        }
        if done == wanted { Ok(()) } else { Err(broken(done)) }
    }
}

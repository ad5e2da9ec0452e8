//! Reads of blocks from a bucket into their slots, where they are verified.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_util::StreamExt;
use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{BlockKey, BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::{IoBuf, SlotBuf};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tokio::task::block_in_place;
use tokio::time::{Instant as TokioInstant, timeout_at};

use super::link::{Fault, Lane};
use super::meter::one_more;
use super::packs::Packed;
use super::shared::{Shared, in_time, late};
use crate::owed::Answer;
use crate::spaces::Space;
use crate::{Fetched, Presence, ReadItem, format};

/// Returns the memory for a block's object.
fn buffer(dst: SlotBuf, layout: &BlockLayout) -> Result<IoBuf> {
    let held = dst.len();
    let bytes = usize::try_from(layout.slot_bytes()).expect("BLOCK_BYTES_MAX fits an address");
    IoBuf::for_read(format::header_bytes(layout.shard_count()), dst, bytes).ok_or_else(|| {
        Error::new(ErrorKind::Config, "a slot is smaller than its block").with("slot_bytes", held)
    })
}

/// Copies a piece to its place. Returns `false` if it does not fit.
pub(super) fn scatter(into: &mut IoBuf, mut at: usize, mut piece: &[u8]) -> bool {
    while !piece.is_empty() {
        let before = piece.len();
        for mut slice in into.slices_mut(at) {
            let now = slice.len().min(piece.len());
            slice[..now].copy_from_slice(&piece[..now]);
            (at, piece) = (at + now, &piece[now..]);
        }
        if piece.len() == before {
            return false;
        }
    }
    true
}

/// A block to read, and what is needed for its answer.
pub(super) struct Wanted {
    pub(super) key: BlockKey,
    pub(super) space: Space,
    pub(super) into: IoBuf,
    pub(super) answer: Answer<Fetched>,
    asked: Asked,
}

/// What the tier believed when it asked the store.
#[derive(Clone, Copy)]
pub(super) enum Asked {
    /// A block in a pack, which was in the bucket.
    Packed,
    /// A block with an object of its own.
    Own {
        /// Whether it was believed to be there.
        was_sure: bool,
        /// See [`crate::beliefs::Beliefs::removals`].
        removals: u64,
    },
}

impl Shared {
    /// See [`crate::Tier::read`].
    pub(super) fn read(self: &Arc<Self>, reads: Vec<ReadItem>, deadline: Instant) {
        let mut packed = Vec::new();
        for block in reads.into_iter().filter_map(|read| self.begin_read(read, deadline)) {
            match self.packs.find(&block.key, Instant::now()) {
                Some(found) => packed.push(Packed { found, block, deadline }),
                None => self.read_own(block, deadline),
            }
        }
        self.read_packed(packed);
    }

    /// Returns a block to read, unless it is answered already.
    fn begin_read(self: &Arc<Self>, read: ReadItem, deadline: Instant) -> Option<Wanted> {
        let ReadItem { key, dst, done, .. } = read;
        if let Err(error) = in_time(deadline) {
            drop(dst);
            done(Err(error));
            return None;
        }
        let removals = self.beliefs.removals();
        // A block that is being written or removed is not present, so reading it is a miss.
        let is_busy = self.beliefs.writing.lock().holds(&key);
        let space = self.spaces.lock().of(&key).ok().cloned();
        let Some(space) = space.filter(|_| !is_busy) else {
            drop(dst);
            done(Ok(Fetched::Miss));
            return None;
        };
        let into = match buffer(dst, space.spec.layout()) {
            Ok(into) => into,
            Err(error) => {
                done(Err(error));
                return None;
            }
        };
        let was_sure = self.beliefs.known.lock().presence(&key, Instant::now()) == Presence::Present;
        let asked = Asked::Own { was_sure, removals };
        Some(Wanted { key, space, into, answer: self.owed.answer(done), asked })
    }

    fn read_own(self: &Arc<Self>, block: Wanted, deadline: Instant) {
        let Wanted { key, space, into, answer, asked } = block;
        let path = self.names.block(space.spec.root(), space.epoch, key.hash);
        let shared = Arc::clone(self);
        self.runtime.spawn(async move {
            let fetch = shared.fetch(&key, &path, space.spec.layout(), into, deadline);
            // Its memory is released with it, before anyone is notified.
            let outcome = timeout_at(TokioInstant::from_std(deadline), fetch).await;
            let outcome = outcome.unwrap_or_else(|_| Err(Fault::Refused(late())));
            shared.end_read(key, answer, outcome, asked);
        });
    }

    /// Ends a read with its file's length or the reason why there is none.
    pub(super) fn end_read(
        self: &Arc<Self>,
        key: BlockKey,
        answer: Answer<Fetched>,
        outcome: Result<u64, Fault>,
        asked: Asked,
    ) {
        let outcome = match outcome {
            Ok(bytes) => {
                if let Asked::Own { removals, .. } = asked {
                    self.note_present(key, bytes, removals);
                }
                Ok(Fetched::Whole)
            }
            Err(Fault::Missing(_)) => {
                self.beliefs.note_absent(key);
                if matches!(asked, Asked::Packed | Asked::Own { was_sure: true, .. }) {
                    self.tell_lost(&[key]);
                }
                Ok(Fetched::Miss)
            }
            Err(Fault::Corrupt(error)) => {
                one_more(&self.link.meter.corrupt);
                tracing::warn!(%key, %error, "a corrupt object is deleted");
                // It is unreachable immediately; the object itself is deleted in the background.
                self.remove(vec![key], Box::new(|_| {}));
                self.tell_lost(&[key]);
                Err(error)
            }
            Err(fault) => Err(fault.into_error()),
        };
        // A reset that began in the meantime has hidden it.
        let is_open = self.spaces.lock().of(&key).is_ok();
        answer.end(if is_open { outcome } else { outcome.map(|_| Fetched::Miss) });
    }

    /// Reports blocks that were there and are not any more.
    pub(super) fn tell_lost(&self, keys: &[BlockKey]) {
        self.link.meter.lost.fetch_add(keys.len() as u64, Ordering::Relaxed);
        if let Some(listener) = self.link.listener() {
            listener.lost(keys);
        }
    }

    async fn fetch(
        &self,
        key: &BlockKey,
        path: &Path,
        layout: &BlockLayout,
        mut into: IoBuf,
        deadline: Instant,
    ) -> Result<u64, Fault> {
        let mut turn = self.link.turn(Lane::Reads, deadline).await?;
        loop {
            match self.fill(path, &mut into).await {
                Ok(()) => {
                    turn.good();
                    return self.verified(key, layout, into).await;
                }
                Err(fault) => turn.again(fault).await?,
            }
        }
    }

    /// Verifies a block that was read, and decodes it. Returns the length of its file.
    pub(super) async fn verified(
        &self,
        key: &BlockKey,
        layout: &BlockLayout,
        into: IoBuf,
    ) -> Result<u64, Fault> {
        let verify = || self.transform.verify(*key, layout, &into);
        // Decompression takes its time, in which this thread's other requests go on elsewhere.
        let is_long = into.filled() < into.len();
        let _codec = if is_long { self.codecs.acquire().await.ok() } else { None };
        let header = if is_long { block_in_place(verify) } else { verify() };
        match header {
            Ok(header) => Ok(header.file_bytes()),
            // A later version's block: it is another depot's, and stays.
            Err(error) if error.kind() == ErrorKind::Unsupported => Err(Fault::Missing(error)),
            Err(error) => Err(Fault::Corrupt(error)),
        }
    }

    async fn fill(&self, path: &Path, into: &mut IoBuf) -> Result<(), Fault> {
        let got = self.link.within(self.link.store.get(path)).await?;
        let (wanted, plain) = (got.meta.size, into.len() as u64);
        // An encoded block is shorter, by whole pages.
        let least = into.head().len() as u64 + BLOCK_ALIGN_BYTES;
        if !(least..=plain).contains(&wanted) || !wanted.is_multiple_of(BLOCK_ALIGN_BYTES) {
            let error = Error::new(ErrorKind::Corrupt, "a block's object has another length");
            return Err(Fault::Corrupt(error.with("bytes", wanted).with("bytes_expected", plain)));
        }
        let broken = |at: usize| {
            let error = Error::new(ErrorKind::Io, "a store's answer does not have the length in its header");
            Fault::Away(error.with("bytes", at).with("bytes_expected", wanted))
        };
        let (mut pieces, mut at) = (got.into_stream(), 0);
        while let Some(piece) = self.link.within(async { pieces.next().await.transpose() }).await? {
            if at + piece.len() > wanted as usize || !scatter(into, at, &piece) {
                return Err(broken(at + piece.len()));
            }
            at += piece.len();
        }
        if at as u64 != wanted {
            return Err(broken(at));
        }
        into.set_filled(at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_length_come_together() {
        let bytes: Vec<u8> = (0..3 * 4096_usize).map(|n| (n % 251) as u8).collect();
        for length in [1, 7, 4096, 5000, 12_288] {
            let mut into = IoBuf::for_read(4096, SlotBuf::anonymous(8192), 8192).unwrap();
            let mut at = 0;
            for piece in bytes.chunks(length) {
                assert!(scatter(&mut into, at, piece));
                at += piece.len();
            }
            let read: Vec<u8> = into.slices(0).iter().flat_map(|slice| slice.to_vec()).collect();
            assert!(read == bytes, "pieces of {length}");
            assert!(!scatter(&mut into, at, &[1]) && !scatter(&mut into, at - 1, &[1, 2]));
        }
    }
}

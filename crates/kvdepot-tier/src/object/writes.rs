//! Writes of blocks to a bucket: one object each, with a block file's bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvdepot_core::limits::OBJECT_DOUBT_S;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::{IoBuf, SlotBuf};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, MultipartUpload, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions,
    PutPayload,
};
use tokio::task::block_in_place;
use tokio::time::{Instant as TokioInstant, timeout_at};

use super::epochs::no_bucket;
use super::link::{Fault, Lane, Turn};
use super::packs::Waiting;
use super::shared::{Shared, in_time, late};
use crate::format::Writer;
use crate::spaces::Space;
use crate::{Compression, Done, Presence, WriteItem, Written};

/// Appends up to `max` bytes from `at` on.
pub(super) fn copy(from: &IoBuf, at: usize, max: usize, out: &mut Vec<u8>) {
    let end = out.len() + max.min(from.len() - at);
    let start = out.len();
    out.reserve(end - start);
    while out.len() < end {
        let before = out.len();
        for slice in from.slices(at + before - start) {
            let now = slice.len().min(end - out.len());
            out.extend_from_slice(&slice[..now]);
        }
        if out.len() == before {
            break;
        }
    }
}

/// Returns up to `max` bytes from `at` on. They are copied, because a store's client may keep them for any time.
fn part(from: &IoBuf, at: usize, max: usize) -> Bytes {
    let mut out = Vec::new();
    copy(from, at, max, &mut out);
    out.into()
}

/// An object that was there already.
pub(super) struct There {
    /// Number of earlier tries without an answer: one of them may have written it.
    pub(super) unanswered: u32,
}

impl Shared {
    /// See [`crate::Tier::write`].
    pub(super) fn write(self: &Arc<Self>, write: WriteItem, deadline: Instant) {
        let WriteItem { key, src, done } = write;
        let ready = in_time(deadline).and_then(|()| self.spaces.lock().of(&key).cloned());
        let space = match ready {
            Ok(space) => space,
            Err(error) => {
                drop(src);
                return done(Err(error));
            }
        };
        let entered = {
            let mut writing = self.beliefs.writing.lock();
            // A later writer may find the block written, unless it is being removed.
            if !writing.holds(&key) && self.presence(&key, Instant::now()) == Presence::Present {
                drop((writing, src));
                return done(Ok(Written::AlreadyThere));
            }
            writing.enter(key, done)
        };
        let done = match entered {
            None => return,
            Some(Ok(done)) => done,
            Some(Err((done, error))) => {
                drop(src);
                return done(Err(error));
            }
        };
        let answer = self.owed.answer(self.for_all(key, done));
        let block = Waiting { key, space, src, deadline, answer };
        if self.is_packed(&block.space.spec) { self.gather(block) } else { self.store_own(block) }
    }

    /// Writes a block to an object of its own.
    pub(super) fn store_own(self: &Arc<Self>, block: Waiting) {
        let Waiting { key, space, src, deadline, answer } = block;
        let path = self.names.block(space.spec.root(), space.epoch, key.hash);
        let shared = Arc::clone(self);
        self.runtime.spawn(async move {
            let outcome = shared.store(key, &space, &path, src, deadline).await;
            if let Ok((_, bytes)) = outcome {
                let is_open = shared.spaces.lock().of(&key).is_ok();
                let writing = shared.beliefs.writing.lock();
                if is_open && !writing.is_leaving(&key) {
                    shared.beliefs.known.lock().note(key, true, bytes);
                }
            }
            answer.end(outcome.map(|(written, _)| written));
        });
    }

    /// Returns a `Done` that completes the write of a key for all callers that wait for it.
    fn for_all(self: &Arc<Self>, key: BlockKey, done: Done<Written>) -> Done<Written> {
        let shared = Arc::clone(self);
        Box::new(move |outcome: Result<Written>| {
            let waiting = shared.beliefs.writing.lock().written(&key);
            shared.written.notify_waiters();
            let rest = outcome.clone().map(|_| Written::AlreadyThere);
            done(outcome);
            waiting.into_iter().for_each(|done| done(rest.clone()));
        })
    }

    async fn store(
        self: &Arc<Self>,
        key: BlockKey,
        space: &Space,
        path: &Path,
        src: SlotBuf,
        deadline: Instant,
    ) -> Result<(Written, u64)> {
        // Set while the store may carry out a request that was not answered.
        let is_open = AtomicBool::new(false);
        let work = self.put(key, space, path, src, deadline, &is_open);
        let outcome = timeout_at(TokioInstant::from_std(deadline), work).await;
        if is_open.into_inner() {
            self.doubt(vec![key]);
        }
        match outcome {
            Err(_) => Err(late()),
            Ok(Ok(outcome)) => Ok(outcome),
            Ok(Err(Fault::Missing(error))) => Err(no_bucket(error)),
            Ok(Err(fault)) => Err(fault.into_error()),
        }
    }

    /// The blocks cannot be removed for good as long as the store may still carry out an unanswered write.
    pub(super) fn doubt(self: &Arc<Self>, keys: Vec<BlockKey>) {
        self.beliefs.writing.lock().doubt(&keys);
        let shared = Arc::downgrade(self);
        self.runtime.spawn(async move {
            tokio::time::sleep(Duration::from_secs(OBJECT_DOUBT_S)).await;
            if let Some(shared) = shared.upgrade() {
                shared.beliefs.writing.lock().settle(&keys);
            }
        });
    }

    async fn put(
        &self,
        key: BlockKey,
        space: &Space,
        path: &Path,
        src: SlotBuf,
        deadline: Instant,
        is_open: &AtomicBool,
    ) -> Result<(Written, u64), Fault> {
        let mut turn = self.link.turn(Lane::Writes, deadline).await?;
        let (root, layout, writer) = (space.spec.root(), space.spec.layout(), Writer::now(&self.host));
        let seal = || self.transform.seal(root, key, layout, &src, writer).map_err(Fault::Corrupt);
        // Compression takes its time, in which this thread's other requests go on elsewhere.
        let is_long = self.config.compression != Compression::Off;
        let codec = if is_long { self.codecs.acquire().await.ok() } else { None };
        let file = if is_long { block_in_place(seal) } else { seal() }?;
        drop((src, codec));
        let bytes = file.len() as u64;
        // Parts are completed without a condition: an earlier write of the block could replace this one.
        if file.len() > self.config.part_bytes && self.beliefs.writing.lock().is_doubtful(&key) {
            let what = "a store may still make an earlier write of the block";
            return Err(Fault::Refused(Error::new(ErrorKind::Busy, what).with("key", key)));
        }
        while file.len() > self.config.part_bytes {
            match self.put_parts(path, &file, is_open).await {
                Ok(written) => {
                    turn.good();
                    return Ok((written, bytes));
                }
                Err(fault) => turn.again(fault).await?,
            }
        }
        let whole = part(&file, 0, file.len());
        let header = whole.slice(..file.head().len());
        let payload = PutPayload::from(whole);
        drop(file);
        let There { unanswered } = match self.put_new(&mut turn, path, &payload, is_open).await? {
            None => return Ok((Written::New, bytes)),
            Some(there) => there,
        };
        if unanswered > 0 && self.begins_with(path, &header).await {
            // By an earlier try. If there was only one without an answer, it is over.
            is_open.store(unanswered > 1, Ordering::Relaxed);
            return Ok((Written::New, bytes));
        }
        // Perhaps with another value.
        Ok((Written::AlreadyThere, bytes))
    }

    /// Writes an object if there is none with its name, as often as that is worth it. `None` if this wrote it.
    pub(super) async fn put_new(
        &self,
        turn: &mut Turn<'_>,
        path: &Path,
        payload: &PutPayload,
        is_open: &AtomicBool,
    ) -> Result<Option<There>, Fault> {
        // It never goes down: a later try's answer says nothing about earlier ones without an answer.
        let mut unanswered = 0_u32;
        loop {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            is_open.store(true, Ordering::Relaxed);
            let put = self.link.within(self.link.store.put_opts(path, payload.clone(), options)).await;
            unanswered += u32::from(matches!(put, Err(Fault::Away(_))));
            is_open.store(unanswered > 0, Ordering::Relaxed);
            match put {
                Ok(_) => {
                    turn.good();
                    return Ok(None);
                }
                Err(Fault::Conflict(_)) => {
                    turn.good();
                    return Ok(Some(There { unanswered }));
                }
                Err(fault) => turn.again(fault).await?,
            }
        }
    }

    /// Returns whether an object begins with this header. It names the writer and has the checksums of the block, so the
    /// object is then the one that was written. `false` if the store does not tell.
    async fn begins_with(&self, path: &Path, header: &Bytes) -> bool {
        let range = Some(GetRange::Bounded(0..header.len() as u64));
        let options = GetOptions { range, ..GetOptions::default() };
        let got = self.link.within(async { self.link.store.get_opts(path, options).await?.bytes().await });
        got.await.is_ok_and(|got| got == header)
    }

    /// Writes a large block in parts. It is not visible before all are complete.
    async fn put_parts(&self, path: &Path, file: &IoBuf, is_open: &AtomicBool) -> Result<Written, Fault> {
        match self.link.within(self.link.store.head(path)).await {
            Ok(_) => return Ok(Written::AlreadyThere),
            Err(Fault::Missing(_)) => {}
            Err(fault) => return Err(fault),
        }
        let begin = self.link.store.put_multipart_opts(path, PutMultipartOptions::default());
        let mut upload = Upload {
            inner: Some(self.link.within(begin).await?),
            runtime: &self.runtime,
            limit: self.link.timeout,
        };
        let mut at = 0;
        while at < file.len() {
            let bytes = part(file, at, self.config.part_bytes);
            at += bytes.len();
            let Some(inner) = upload.inner.as_mut() else { break };
            // Each part has its own number, so a retried part would be another one; the entire block is retried
            // instead.
            self.link.within(inner.put_part(bytes.into())).await?;
        }
        let was_open = is_open.swap(true, Ordering::Relaxed);
        let Some(inner) = upload.inner.as_mut() else { return Ok(Written::New) };
        let completed = self.link.within(inner.complete()).await;
        if !matches!(completed, Err(Fault::Away(_))) {
            is_open.store(was_open, Ordering::Relaxed);
        }
        // Any other outcome discards the parts.
        completed?;
        upload.inner = None;
        Ok(Written::New)
    }
}

/// Parts that are discarded unless they become an object.
struct Upload<'a> {
    inner: Option<Box<dyn MultipartUpload>>,
    runtime: &'a tokio::runtime::Handle,
    limit: Duration,
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if let Some(mut inner) = self.inner.take() {
            let limit = self.limit;
            self.runtime.spawn(async move {
                if !matches!(tokio::time::timeout(limit, inner.abort()).await, Ok(Ok(()))) {
                    tracing::debug!(
                        "parts of an object stay in the bucket until its lifecycle rule removes them"
                    );
                }
            });
        }
    }
}

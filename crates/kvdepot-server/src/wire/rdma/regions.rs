//! The pool's registration with the device: done once, piece by piece, in the background.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::runs::Run;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::Depot;
use kvdepot_depot::pool::PoolMapping;
use kvdepot_io::SlotBuf;
use kvdepot_verbs::{Mr, Pd, Sge};
use smallvec::SmallVec;

/// The pieces of local memory in one work request.
pub(super) type Sges = SmallVec<[Sge; 4]>;

/// The regions of the pool. The initial pool is registered at the start. Memory that it may grow to is registered only
/// when a value lies there, because registered memory is taken for good (P5).
#[derive(Debug)]
pub(super) struct Regions {
    pool: Arc<PoolMapping>,
    pd: Pd,
    base: usize,
    piece_bytes: usize,
    /// `None` if the registration failed.
    pieces: Vec<OnceLock<Option<Mr>>>,
    wanted: Sender<usize>,
    stopping: AtomicBool,
}

impl Regions {
    /// Registers the first piece, so that a machine that cannot do it reports that now. Returns the queue for
    /// [`Regions::register_all`].
    pub(super) fn open(pd: &Pd, depot: &Depot, piece_bytes: u64) -> Result<(Arc<Self>, Receiver<usize>)> {
        let pool = depot.pool();
        let whole = pool.resolve(Run { offset: 0, len: pool.bytes() })?;
        let piece_bytes = usize::try_from(piece_bytes.min(pool.bytes()))
            .map_err(|_| Error::new(ErrorKind::Config, "a region is too large for this machine"))?;
        let (wanted, receiver) = crossbeam_channel::unbounded();
        let regions = Self {
            base: whole.ptr as usize,
            piece_bytes,
            pieces: (0..whole.len.div_ceil(piece_bytes)).map(|_| OnceLock::new()).collect(),
            pool,
            pd: pd.clone(),
            wanted,
            stopping: AtomicBool::new(false),
        };
        let first = regions.register(0)?;
        regions.pieces[0].get_or_init(|| Some(first));
        Ok((Arc::new(regions), receiver))
    }

    /// Registers the first `bytes` of the pool, then requested pieces, until [`Regions::stop`]. Calls `each` after
    /// every piece.
    pub(super) fn register_all(&self, bytes: u64, wanted: &Receiver<usize>, each: impl Fn()) {
        let mut rest = 0..self.pieces.len().min((bytes as usize).div_ceil(self.piece_bytes));
        while !self.stopping.load(Ordering::Acquire) {
            let next = wanted.try_recv().ok().or_else(|| rest.next()).or_else(|| wanted.recv().ok());
            let Some(piece) = next.and_then(|index| Some((index, self.pieces.get(index)?))) else { continue };
            if piece.1.get().is_some() {
                continue;
            }
            let region = self.register(piece.0).inspect_err(|error| {
                tracing::error!(
                    "a part of the pool cannot be reached by RDMA; values there are refused: {error}"
                );
            });
            piece.1.get_or_init(|| region.ok());
            each();
        }
    }

    fn register(&self, index: usize) -> Result<Mr> {
        let offset = (index * self.piece_bytes) as u64;
        let len = (self.piece_bytes as u64).min(self.pool.bytes() - offset);
        Mr::register_lent(&self.pd, &self.pool.slot(&[Run { offset, len }])?)
    }

    /// Ends `register_all`.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the thread; there is no piece with this number.
        let _ = self.wanted.send(usize::MAX);
    }

    /// Returns local memory for one work request on bytes `start..end` of a slot: as much as fits. Returns `None` while
    /// a piece of it is being registered, and an error if it cannot be.
    pub(super) fn reach(
        &self,
        memory: &SlotBuf,
        start: usize,
        end: usize,
        sges_max: usize,
        bytes_max: usize,
    ) -> Result<Option<(Sges, usize)>> {
        let (mut sges, mut bytes) = (Sges::new(), 0);
        for run in memory.slice(start, end.min(start.saturating_add(bytes_max))) {
            let mut at = 0;
            while at < run.len && sges.len() < sges_max {
                let offset = run.ptr as usize + at - self.base;
                let (index, within) = (offset / self.piece_bytes, offset % self.piece_bytes);
                let len = (run.len - at).min(self.piece_bytes - within);
                let region = match self.pieces[index].get() {
                    Some(Some(region)) => region,
                    Some(None) => {
                        return Err(Error::new(
                            ErrorKind::Unavailable,
                            "this part of the pool cannot be reached by RDMA",
                        )
                        .with("piece", index));
                    }
                    None => {
                        let _ = self.wanted.send(index);
                        return Ok(None);
                    }
                };
                sges.push(region.sge(within, len as u32));
                (at, bytes) = (at + len, bytes + len);
            }
        }
        Ok(Some((sges, bytes)))
    }
}

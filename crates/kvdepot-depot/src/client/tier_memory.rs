//! A tier's memory, in which a depot leases blocks where they lie, as this process maps it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::runs::Run;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::MemRun;
use kvdepot_io::mapped::LentMedium;
use kvdepot_tier::TierMemory;

use crate::client::devices::unmap;
use crate::client::lane::Lane;
use crate::depot::Depot;

/// The mapped memory of one life of a depot; `None` if blocks come through the pool only.
pub(crate) type Lent = Option<Arc<Mapped>>;

/// A mapped medium. Whoever drops it last, an engine's scheduler for one, does not wait until it is unmapped.
#[derive(Debug)]
pub(crate) struct Mapped(Option<LentMedium>);

impl Deref for Mapped {
    type Target = LentMedium;

    fn deref(&self) -> &LentMedium {
        self.0.as_ref().expect("it is mapped until it is dropped")
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        unmap(self.0.take());
    }
}

/// Maps the memory that a depot offers on a lane. If it cannot be mapped, blocks come through the pool. After an error the
/// lane may be out of step.
pub(super) fn ask(lane: &mut Lane, deadline: Instant) -> Result<Lent> {
    lane.memory(deadline).map(|memory| noted(map(&memory)))
}

/// Maps the memory of a depot in this process, if it has any.
pub(super) fn of(depot: &Depot) -> Lent {
    depot.memory().and_then(|memory| noted(map(memory)))
}

fn map(memory: &TierMemory) -> Result<LentMedium> {
    LentMedium::map(&memory.file, memory.bytes, memory.head.clone())
}

fn noted(lent: Result<LentMedium>) -> Lent {
    let warn = |error: &Error| tracing::warn!("blocks of the depot's medium come through its pool: {error}");
    lent.inspect_err(warn).ok().map(|lent| Arc::new(Mapped(Some(lent))))
}

/// Returns the memory of a run that is leased in place.
pub(super) fn resolve(lent: Option<&Arc<Mapped>>, run: Run, at: u64) -> Result<MemRun> {
    let not_asked = || {
        Error::new(ErrorKind::Protocol, "the depot leased a block in memory that is not mapped here")
            .with("offset_bytes", run.offset)
            .with("bytes", run.len)
    };
    lent.ok_or_else(not_asked)?.resolve(at, run.len)
}

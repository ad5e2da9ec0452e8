//! Closing of namespaces. The depot is told in the background, because a depot that hangs must not delay the caller that
//! closes one. Until then the namespace can be opened again without a call.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, NamespaceSpec, Result};
use parking_lot::Mutex;

use crate::client::attach::{Attachment, Known, Target};
use crate::client::attaching::WATCH;
use crate::client::generation::Generation;
use crate::client::lane::unexpected;
use crate::client::lane_guard::LaneGuard;
use crate::message::{NamespaceHandle, Request, Response};

impl Attachment {
    /// Forgets a namespace here. In a moment the depot learns that this process does not use it any more. Never waits for
    /// another process.
    ///
    /// Call it when no store or claim of this attachment uses the namespace. Another attachment of this process may: if
    /// the depot forgets the namespace, that one opens it again, and misses its blocks until then.
    pub fn close_namespace(self: &Arc<Self>, spec: &NamespaceSpec) {
        let mut namespaces = self.namespaces.lock();
        namespaces.retain(|known| known.spec.canonical() != spec.canonical());
        let Ok(generation) = self.generation() else { return };
        generation.leave(spec.canonical());
        drop(namespaces);
        self.tend_embedded(&generation);
    }

    /// Leaves a namespace that was closed while it was being opened.
    pub(super) fn leave_if_closed(self: &Arc<Self>, generation: &Arc<Generation>, canonical: &str) {
        let namespaces = self.namespaces.lock();
        if namespaces.iter().any(|known| known.spec.canonical() == canonical) {
            return;
        }
        generation.leave(canonical);
        drop(namespaces);
        self.tend_embedded(generation);
    }

    /// Reports closed namespaces to an embedded depot, which has no thread that keeps it attached. If another namespace
    /// is being opened, or if some could not be opened, a thread does the rest.
    pub(super) fn tend_embedded(self: &Arc<Self>, generation: &Arc<Generation>) {
        if !matches!(self.target, Target::Embedded(..)) {
            return;
        }
        self.tell_closed(generation);
        if !self.has_work(generation) || self.tended.swap(true, Ordering::AcqRel) {
            return;
        }
        let (weak, turn) = (Arc::downgrade(self), Arc::clone(&self.tending));
        let started =
            std::thread::Builder::new().name("kvdepot-names".to_owned()).spawn(move || tend(&weak, &turn));
        if started.is_err() {
            self.tended.store(false, Ordering::Release);
        }
    }

    /// Reports closed namespaces, and opens those that are not open yet, as far as that works now.
    pub(super) fn tend_namespaces(self: &Arc<Self>, generation: &Arc<Generation>) {
        self.tell_closed(generation);
        if let Err(error) = self.open_missing(generation) {
            tracing::debug!("a namespace cannot be opened and is retried: {error}");
        }
    }

    /// Returns whether closed namespaces are not reported, or known ones not open.
    fn has_work(&self, generation: &Generation) -> bool {
        let opened = |known: &Known| generation.handles.read().contains_key(known.spec.canonical());
        !generation.closed.lock().is_empty() || !self.namespaces.lock().iter().all(opened)
    }

    /// Tells the depot which namespaces are closed, if none is being opened. A namespace whose closing could not be
    /// reported counts until this process ends.
    fn tell_closed(self: &Arc<Self>, generation: &Arc<Generation>) {
        if generation.closed.lock().is_empty() {
            return;
        }
        // A writer that waits keeps readers out, so waiting here would delay those that open a namespace.
        let Some(_naming) = generation.naming.try_write() else { return };
        let Ok(mut lane) = self.lane(generation, self.background_wait()) else { return };
        if tell_closed(&mut lane, generation).is_ok() {
            lane.finish();
        }
    }
}

impl Generation {
    /// Moves a namespace to those that are closed.
    fn leave(&self, canonical: &str) {
        let mut closed = self.closed.lock();
        if let Some(handle) = self.handles.write().remove(canonical) {
            closed.insert(canonical.to_owned(), handle);
        }
    }

    /// Opens a namespace. If there is no room for it, the depot is told first which ones are closed.
    pub(super) fn open_namespace(&self, lane: &mut LaneGuard, canonical: &str) -> Result<NamespaceHandle> {
        let opened = self.open_once(lane, canonical);
        let is_full = opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace);
        if !is_full || self.closed.lock().is_empty() {
            return opened;
        }
        let wait = lane.background_wait();
        let naming = self.naming.try_write_for(wait).ok_or_else(|| late(wait))?;
        tell_closed(lane, self)?;
        drop(naming);
        self.open_once(lane, canonical)
    }

    fn open_once(&self, lane: &mut LaneGuard, canonical: &str) -> Result<NamespaceHandle> {
        let wait = lane.background_wait();
        let _naming = self.naming.try_read_for(wait).ok_or_else(|| late(wait))?;
        if let Some(handle) = self.closed.lock().remove(canonical) {
            return Ok(handle);
        }
        // The time is that of the call, however long another one took.
        let deadline = Instant::now() + wait;
        match lane.call_late(Request::OpenNamespace { canonical: canonical.into() }, deadline)? {
            Response::Namespace { handle, .. } => Ok(handle),
            _ => Err(unexpected()),
        }
    }
}

/// Reports what is closed, and opens what is not open, until nothing is left to do. `turn` is held while the attachment
/// is, so that whoever closes that can wait for it: its depot is not to end on this thread.
fn tend(weak: &Weak<Attachment>, turn: &Mutex<()>) {
    loop {
        let working = turn.lock();
        let Some(attachment) = weak.upgrade().filter(|it| !it.stopping.load(Ordering::Acquire)) else {
            return;
        };
        if let Ok(generation) = attachment.generation() {
            attachment.tend_namespaces(&generation);
            if !attachment.has_work(&generation) {
                attachment.tended.store(false, Ordering::Release);
                // Something may have come before that was seen.
                if !attachment.has_work(&generation) || attachment.tended.swap(true, Ordering::AcqRel) {
                    return;
                }
            }
        }
        drop(attachment);
        drop(working);
        std::thread::sleep(WATCH);
    }
}

fn late(wait: Duration) -> Error {
    Error::new(ErrorKind::Timeout, "other namespaces are still being closed at the depot")
        .with("wait_s", wait.as_secs())
}

/// Tells the depot which namespaces are closed. `naming` is locked for writing, so that none of them is being opened.
fn tell_closed(lane: &mut LaneGuard, generation: &Generation) -> Result<()> {
    let closed = std::mem::take(&mut *generation.closed.lock());
    for namespace in closed.into_values() {
        generation.told_in_place.lock().remove(&namespace);
        let deadline = Instant::now() + lane.background_wait();
        lane.call(Request::CloseNamespace { namespace }, deadline)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockLayout;

    use super::*;
    use crate::config::DepotConfig;
    use crate::depot::Depot;

    fn spec(name: &str) -> Arc<NamespaceSpec> {
        let layout = BlockLayout::uniform(1, &[4096]).expect("a layout");
        Arc::new(NamespaceSpec::new(&format!("{{\"model\":\"{name}\"}}"), layout).expect("a description"))
    }

    #[test]
    fn an_opening_that_takes_long_delays_neither_other_openings_nor_whoever_closes() {
        let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": 1 << 20}).to_string();
        let depot =
            Depot::start_private(DepotConfig::from_json(&config).expect("a configuration")).expect("a depot");
        let attachment = Attachment::embedded(depot).expect("an attachment");
        let generation = attachment.generation().expect("a depot");
        let opening = generation.naming.read();
        attachment.register(&spec("a")).expect("it is opened");
        assert!(generation.handles.read().contains_key(spec("a").canonical()));
        attachment.close_namespace(&spec("a"));
        assert_eq!(generation.closed.lock().len(), 1, "the depot is not told yet");
        attachment.register(&spec("a")).expect("it is opened");
        assert!(generation.closed.lock().is_empty(), "it was taken back");
        attachment.close_namespace(&spec("a"));
        drop(opening);
        let end = Instant::now() + Duration::from_secs(60);
        while !generation.closed.lock().is_empty() {
            assert!(Instant::now() < end, "the depot is told in the background");
            std::thread::yield_now();
        }
    }
}

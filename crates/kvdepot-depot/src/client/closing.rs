//! Closing of namespaces. The depot is told in the background, because a depot that hangs must not delay whoever closes
//! one. Until then the namespace can be opened again without a call.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, NamespaceSpec, Result};

use crate::client::attach::{Attachment, Target};
use crate::client::generation::Generation;
use crate::client::lane::unexpected;
use crate::client::lane_guard::{HANDSHAKE_WAIT, LaneGuard};
use crate::message::{NamespaceHandle, Request, Response};

impl Attachment {
    /// Forgets a namespace here. In a moment the depot learns that this process does not use it any more. Never waits for
    /// another process.
    ///
    /// Call it when no store or claim of this attachment uses the namespace. Another attachment of this process may: if
    /// the depot forgets the namespace, that one opens it again, and misses its blocks until then.
    pub fn close_namespace(self: &Arc<Self>, spec: &NamespaceSpec) {
        let Ok(generation) = self.generation() else {
            self.namespaces.lock().retain(|known| known.spec.canonical() != spec.canonical());
            return;
        };
        let mut namespaces = self.namespaces.lock();
        namespaces.retain(|known| known.spec.canonical() != spec.canonical());
        generation.leave(spec.canonical());
        drop(namespaces);
        // No thread tells a depot in this process, or opens what had no room. While a namespace is being opened, neither
        // is done: the next one that is closed does it.
        if matches!(self.target, Target::Embedded(..)) && self.tell_closed(&generation) {
            let _ = self.open_missing(&generation);
        }
    }

    /// Leaves a namespace that was closed while it was being opened.
    pub(super) fn leave_if_closed(&self, generation: &Generation, canonical: &str) {
        let namespaces = self.namespaces.lock();
        if !namespaces.iter().any(|known| known.spec.canonical() == canonical) {
            generation.leave(canonical);
        }
    }

    /// Tells the depot which namespaces are closed, if none is being opened. Returns whether it did. One of which the depot
    /// cannot be told counts until this process ends.
    pub(super) fn tell_closed(self: &Arc<Self>, generation: &Arc<Generation>) -> bool {
        if generation.closed.lock().is_empty() {
            return false;
        }
        // A writer that waits keeps readers out, so waiting here would delay those that open a namespace.
        let Some(_naming) = generation.naming.try_write() else { return false };
        let Ok(mut lane) = self.lane(generation, HANDSHAKE_WAIT) else { return false };
        let told = tell_closed(&mut lane, generation).is_ok();
        if told {
            lane.finish();
        }
        told
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
        let naming = self.naming.try_write_for(HANDSHAKE_WAIT).ok_or_else(late)?;
        tell_closed(lane, self)?;
        drop(naming);
        self.open_once(lane, canonical)
    }

    fn open_once(&self, lane: &mut LaneGuard, canonical: &str) -> Result<NamespaceHandle> {
        let _naming = self.naming.try_read_for(HANDSHAKE_WAIT).ok_or_else(late)?;
        if let Some(handle) = self.closed.lock().remove(canonical) {
            return Ok(handle);
        }
        // The time is that of the call, however long another one took.
        let deadline = Instant::now() + HANDSHAKE_WAIT;
        match lane.call(Request::OpenNamespace { canonical: canonical.into() }, deadline)? {
            Response::Namespace { handle, .. } => Ok(handle),
            _ => Err(unexpected()),
        }
    }
}

fn late() -> Error {
    Error::new(ErrorKind::Timeout, "the depot is still being told of other namespaces")
        .with("wait_s", HANDSHAKE_WAIT.as_secs())
}

/// Tells the depot which namespaces are closed. `naming` is locked for writing, so that none of them is being opened.
fn tell_closed(lane: &mut LaneGuard, generation: &Generation) -> Result<()> {
    let closed = std::mem::take(&mut *generation.closed.lock());
    for namespace in closed.into_values() {
        generation.told_in_place.lock().remove(&namespace);
        lane.call(Request::CloseNamespace { namespace }, Instant::now() + HANDSHAKE_WAIT)?;
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
        attachment.register(&spec("b")).expect("it is opened");
        attachment.close_namespace(&spec("b"));
        assert!(generation.closed.lock().is_empty(), "the depot is told of both");
    }
}

//! Closing of namespaces. The depot is told in the background, because a depot that hangs must not delay whoever closes
//! one. Until then the namespace can be opened again without a call.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{ErrorKind, NamespaceSpec, Result};

use crate::client::attach::{Attachment, Target};
use crate::client::generation::Generation;
use crate::client::lane::unexpected;
use crate::client::lane_guard::{HANDSHAKE_WAIT, LaneGuard};
use crate::message::{NamespaceHandle, Request, Response};

impl Attachment {
    /// Forgets a namespace here. In a moment the depot learns that this process does not use it any more. Never waits.
    ///
    /// Call it when no store or claim of this attachment uses the namespace. Another attachment of this process may: if
    /// the depot forgets the namespace, that one opens it again, and misses its blocks until then.
    pub fn close_namespace(self: &Arc<Self>, spec: &NamespaceSpec) {
        self.namespaces.lock().retain(|known| known.spec.canonical() != spec.canonical());
        if let Ok(generation) = self.generation() {
            self.leave_namespace(&generation, spec.canonical());
        }
    }

    /// Moves a namespace to those that are closed.
    pub(super) fn leave_namespace(self: &Arc<Self>, generation: &Arc<Generation>, canonical: &str) {
        let mut closed = generation.closed.lock();
        if let Some(handle) = generation.handles.write().remove(canonical) {
            closed.insert(canonical.to_owned(), handle);
        }
        drop(closed);
        // No thread does it for a depot in this process, which answers at once.
        if matches!(self.target, Target::Embedded(..)) {
            self.tell_closed(generation);
        }
    }

    /// Tells the depot which namespaces are closed. One of which it cannot be told counts until this process ends.
    pub(super) fn tell_closed(self: &Arc<Self>, generation: &Arc<Generation>) {
        if generation.closed.lock().is_empty() {
            return;
        }
        let deadline = Instant::now() + HANDSHAKE_WAIT;
        let Ok(mut lane) = self.lane(generation, HANDSHAKE_WAIT) else { return };
        let naming = generation.naming.lock();
        if tell_closed(&mut lane, generation, deadline).is_ok() {
            lane.finish();
        }
        drop(naming);
    }
}

/// Opens a namespace. If there is no room for it, the depot is told first which ones are closed.
pub(super) fn open_namespace(
    lane: &mut LaneGuard,
    generation: &Generation,
    canonical: &str,
    deadline: Instant,
) -> Result<NamespaceHandle> {
    let _naming = generation.naming.lock();
    if let Some(handle) = generation.closed.lock().remove(canonical) {
        return Ok(handle);
    }
    let open = |lane: &mut LaneGuard| match lane
        .call(Request::OpenNamespace { canonical: canonical.into() }, deadline)?
    {
        Response::Namespace { handle, .. } => Ok(handle),
        _ => Err(unexpected()),
    };
    let opened = open(lane);
    let is_full = opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace);
    if !is_full || generation.closed.lock().is_empty() {
        return opened;
    }
    tell_closed(lane, generation, deadline)?;
    open(lane)
}

/// Tells the depot which namespaces are closed; `naming` is held.
fn tell_closed(lane: &mut LaneGuard, generation: &Generation, deadline: Instant) -> Result<()> {
    let closed = std::mem::take(&mut *generation.closed.lock());
    for namespace in closed.into_values() {
        generation.told_in_place.lock().remove(&namespace);
        lane.call(Request::CloseNamespace { namespace }, deadline)?;
    }
    Ok(())
}

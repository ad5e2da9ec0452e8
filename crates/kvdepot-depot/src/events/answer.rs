//! A session's answers to clients that follow events.

use kvdepot_core::limits::EVENTS_LOOKS;
use kvdepot_core::machine::{Reply, Request as Ask};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};

use super::packed::pack;
use crate::message::{KnownNamespace, NamespaceHandle, Response, hash_bytes};
use crate::session::Session;

/// Maximum number of namespaces per answer.
const NAMESPACES_PER_ANSWER: usize = 1024;

impl Session {
    /// Lists namespaces by their numbers, after this one.
    pub(crate) fn list_namespaces(&self, after: Option<NamespaceHandle>) -> Response {
        let known = self.runner().locator.directory.list(after, NAMESPACES_PER_ANSWER);
        let entries = known.into_iter().map(|opened| KnownNamespace {
            handle: opened.handle,
            root: opened.spec.root().0,
            id: opened.id.0,
        });
        Response::Namespaces(entries.collect())
    }

    /// Reads the events after a sequence number, or begins to follow.
    pub(crate) fn events(&self, namespaces: &[NamespaceHandle], after: Option<u64>) -> Result<Response> {
        let runner = self.runner();
        let Some(after) = after else {
            self.following().begin(runner);
            let upto = runner.locator.events.ring.lock().head();
            let tiers = runner.locator.tiers.iter().map(|tier| tier.name().to_owned());
            let places = std::iter::once("pool".to_owned()).chain(tiers).collect();
            return Ok(Response::Followed { upto, places });
        };
        // Before the events are read: a reader that sees a new id drops what it has under the old one, and reads a snapshot.
        let ids: Vec<NamespaceId> = namespaces
            .iter()
            .map(|&handle| runner.locator.directory.get(handle).map(|opened| opened.id))
            .collect::<Result<_>>()?;
        let space =
            |id: &NamespaceId| ids.iter().position(|other| other == id).and_then(|at| u16::try_from(at).ok());
        let reading = match ids.len() {
            0..=8 => runner.locator.events.ring.lock().read(after, EVENTS_LOOKS, space),
            _ => {
                let numbered = ids.iter().zip(0..);
                let by_id: hashbrown::HashMap<NamespaceId, u16> =
                    numbered.map(|(id, at)| (*id, at)).collect();
                runner.locator.events.ring.lock().read(after, EVENTS_LOOKS, |id| by_id.get(id).copied())
            }
        };
        Ok(Response::Events {
            upto: reading.upto,
            is_gap: reading.is_gap,
            has_more: reading.has_more,
            ids: ids.iter().map(|id| id.0).collect(),
            events: pack(&reading.events),
        })
    }

    /// Returns a piece of the list of a namespace's blocks in a place. It is at least as new as all events recorded before
    /// the request.
    pub(crate) fn snapshot(&self, namespace: NamespaceHandle, place: u8, from: u64) -> Result<Response> {
        let runner = self.runner();
        let id = runner.locator.directory.get(namespace)?.id;
        let (keys, next) = match place.checked_sub(1) {
            None => self.snapshot_of_pool(namespace, from)?,
            Some(tier) => {
                let Some(tier) = runner.locator.tiers.get(usize::from(tier)) else {
                    return Err(
                        Error::new(ErrorKind::Protocol, "the depot has no such place").with("place", place)
                    );
                };
                tier.keys_from(id, from)
            }
        };
        let hashes = keys.iter().filter(|key| key.namespace == id).map(|key| &key.hash);
        Ok(Response::Snapshot { id: id.0, hashes: hash_bytes(hashes), next })
    }

    fn snapshot_of_pool(
        &self,
        namespace: NamespaceHandle,
        from: u64,
    ) -> Result<(Vec<BlockKey>, Option<u64>)> {
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        match self.runner().ask(self.owner(), Ask::Keys { namespaces: vec![namespace], from })? {
            Reply::Keys(keys, next) => Ok((keys, next.map(|next| next as u64))),
            _ => Err(Error::new(ErrorKind::Protocol, "the machine gave another reply")),
        }
    }
}

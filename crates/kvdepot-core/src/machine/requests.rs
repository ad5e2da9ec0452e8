//! Clients' requests: passes each to the module that answers it.

use std::sync::Arc;

use super::catalog::Namespace;
use super::claims::Open;
use super::event::{Effects, Leased, NamespaceHandle, Now, Opened, Owner, Reply, Request, Token};
use super::loads::LoadLimits;
use super::names::SpaceId;
use super::proofs::Change;
use super::rooms::Rooms;
use super::{Machine, split};
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;
use crate::key::{BlockKey, NamespaceId, NamespaceSpec};

/// Returns whether a request may take slots or need a tier. Requests that end leases, and those about epochs, continue
/// during a handover.
const fn begins_something(request: &Request) -> bool {
    !matches!(
        request,
        Request::OpenNamespace { .. }
            | Request::OpenProvisionally { .. }
            | Request::UseNamespace { .. }
            | Request::CloseNamespace { .. }
            | Request::EnterEpoch { .. }
            | Request::FollowEpoch { .. }
            | Request::BeginAdvance { .. }
            | Request::EndAdvance { .. }
            | Request::Near { .. }
            | Request::ReadsInPlace { .. }
            | Request::Commit { .. }
            | Request::Release { .. }
            | Request::SetChecksum { .. }
            | Request::ClaimTimes { .. }
            | Request::ClaimRelease { .. }
            | Request::EndClaims
            | Request::Drain { .. }
            | Request::Keys { .. }
    )
}

impl Machine {
    pub(super) fn request(
        &mut self,
        token: Token,
        owner: Owner,
        request: Request,
        out: &mut Effects,
    ) -> Result<()> {
        if self.frozen && begins_something(&request) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the depot is handing its pool over to another one, which will answer in a moment",
            ));
        }
        let blocks_max = self.pace.request_blocks;
        let reply = match request {
            Request::OpenNamespace { spec, epoch } => self.open_namespace(owner, &spec, epoch, None, out)?,
            Request::OpenProvisionally { spec, epoch, provisional } => {
                self.open_namespace(owner, &spec, epoch, Some(provisional), out)?
            }
            Request::UseNamespace { namespace } => {
                self.begin_use(owner, namespace)?;
                self.namespace_moved(namespace, None, out)?
            }
            Request::CloseNamespace { namespace } => {
                self.users.end(owner, namespace);
                Reply::Done
            }
            Request::FollowEpoch { namespace, epoch, stored } => {
                let left = self.catalog.follow(namespace, epoch, stored)?;
                self.namespace_moved(namespace, left, out)?
            }
            Request::EnterEpoch { namespace, epoch } => {
                let left = self.catalog.enter(namespace, epoch)?;
                self.namespace_moved(namespace, left, out)?
            }
            Request::BeginAdvance { namespace, provisional } => {
                let left = self.catalog.begin_advance(namespace, provisional)?;
                self.namespace_moved(namespace, Some(left), out)?
            }
            Request::EndAdvance { namespace, epoch, stored } => {
                let left = self.catalog.end_advance(namespace, epoch, stored)?;
                self.namespace_moved(namespace, left, out)?
            }
            Request::Near { region } => {
                self.pool.set_near(owner, region);
                Reply::Done
            }
            Request::ReadsInPlace { namespace } => {
                self.catalog.reads_in_place(namespace);
                Reply::Done
            }
            Request::Reserve { namespace, id, hashes, how, runs_max } => {
                self.users.touch(namespace);
                let hashes = &hashes[..hashes.len().min(blocks_max)];
                self.reserve(owner, namespace, id, hashes, how, runs_max, out)?
            }
            Request::Commit { leases, shards, crc64 } => {
                let leases = &leases[..leases.len().min(blocks_max)];
                self.commit(owner, leases, &shards, crc64)?;
                Reply::Took(leases.len())
            }
            Request::Publish { lease, others } => self.publish(owner, lease, &others, out)?,
            Request::Release { leases } => {
                let leases = &leases[..leases.len().min(blocks_max)];
                leases.iter().try_for_each(|&lease| self.pool.release(owner, lease))?;
                Reply::Took(leases.len())
            }
            Request::Load { namespace, id, hashes, fetch_deadline, last, runs_max, in_place } => {
                self.users.touch(namespace);
                self.note_near(owner, namespace);
                if in_place {
                    self.catalog.reads_in_place(namespace);
                }
                let namespace = self.catalog.get_as(namespace, id)?.clone();
                let Self { catalog, pool, flow, counters, loads, .. } = self;
                let mut rooms = Rooms { catalog, pool, flow, counters };
                let limits = LoadLimits { fetch_deadline, last, runs_max, in_place };
                loads.begin(&mut rooms, (token, owner), namespace, hashes, limits, out);
                return Ok(());
            }
            Request::LeaseNow { keys } => {
                Reply::Leased(self.lease_now(owner, &keys[..keys.len().min(blocks_max)]))
            }
            Request::Inspect { keys } => {
                Reply::Leased(self.inspect(owner, &keys[..keys.len().min(blocks_max)]))
            }
            Request::SetChecksum { lease, crc64 } => {
                let slot = self.pool.leased_slot(owner, lease)?;
                self.pool.edit(slot, |slot| slot.set_crc64(crc64));
                self.pool.proofs.note(slot, Change::Proven, self.flaws);
                Reply::Done
            }
            Request::Prefetch { namespace, blocks, deadline } => {
                let blocks = &blocks[..blocks.len().min(blocks_max)];
                self.note_near(owner, namespace);
                Reply::Took(self.prefetch(namespace, blocks, deadline)?)
            }
            Request::Remove { keys, locations } => {
                self.remove(token, &keys, &locations, out);
                return Ok(());
            }
            Request::ClaimOpen { groups, hashes, skip, limit, tiers, deadline, patience, label } => {
                let now = self.now;
                let named = groups.iter().flat_map(|group| &group.namespaces);
                named.for_each(|&namespace| self.users.touch(namespace));
                let (claims, mut rooms) = split(self);
                let open =
                    Open { token, owner, groups, hashes, skip, limit, tiers, now, deadline, patience, label };
                return claims.open(&mut rooms, open, out);
            }
            Request::ClaimPoll { claim, settle } => {
                let now = self.now;
                let (claims, mut rooms) = split(self);
                return claims.poll(&mut rooms, now, (token, owner), claim, settle, out);
            }
            Request::ClaimDecline { claim } => {
                let now = self.now;
                let (claims, mut rooms) = split(self);
                claims.decline(owner, claim)?;
                return claims.poll(&mut rooms, now, (token, owner), claim, true, out);
            }
            Request::ClaimTimes { claim } => Reply::ClaimTimes(self.claims.times(owner, claim)?),
            Request::ClaimRelease { claim } => {
                let (claims, mut rooms) = split(self);
                claims.release(&mut rooms, owner, claim, out)?;
                Reply::Done
            }
            Request::EndClaims => {
                let (claims, mut rooms) = split(self);
                claims.end_owner(&mut rooms, owner, out);
                Reply::Holds(self.pool.holds(owner))
            }
            Request::EvictTo { bytes } => {
                let (gone, more) = self.pool.evict_to(bytes, blocks_max);
                Reply::Evicted(gone, more)
            }
            Request::Drain { last } => {
                if self.ending && !last {
                    Reply::Drained(false)
                } else if self.flow.begin_drain(token) {
                    Reply::Drained(true)
                } else {
                    return Ok(());
                }
            }
            Request::Keys { namespaces, from } => self.keys(&namespaces, from)?,
        };
        out.replies.push((token, Ok(reply)));
        Ok(())
    }

    fn namespace_moved(
        &mut self,
        handle: NamespaceHandle,
        left: Option<SpaceId>,
        out: &mut Effects,
    ) -> Result<Reply> {
        if let Some(space) = left {
            self.leave(space, out);
        }
        let namespace = self.catalog.get(handle)?;
        let has_epoch_id = namespace.has_epoch_id();
        let Namespace { id, epoch, spec, .. } = namespace.clone();
        let opened = Opened { handle, id, epoch, has_epoch_id, spec };
        out.namespaces.push(opened.clone());
        Ok(Reply::Namespace(opened))
    }

    fn open_namespace(
        &mut self,
        owner: Owner,
        spec: &Arc<NamespaceSpec>,
        epoch: u32,
        provisional: Option<NamespaceId>,
        out: &mut Effects,
    ) -> Result<Reply> {
        let (handle, left) = match self.catalog.find(spec) {
            Some(handle) => {
                self.begin_use(owner, handle)?;
                let known = self.catalog.get(handle)?;
                let left = if known.provisional && provisional.is_none() {
                    self.catalog.follow(handle, epoch, true)?
                } else if known.epoch < epoch {
                    self.catalog.enter(handle, epoch)?
                } else {
                    None
                };
                (handle, left)
            }
            None => {
                self.make_room(owner, out)?;
                let handle = self.catalog.open(spec, epoch, provisional);
                self.users.came(handle);
                self.begin_use(owner, handle)?;
                (handle, None)
            }
        };
        self.note_near(owner, handle);
        self.namespace_moved(handle, left, out)
    }

    /// Leases blocks to examine their bytes. This is not a use: it changes neither the eviction order nor which tiers
    /// get them.
    fn inspect(&mut self, owner: Owner, keys: &[BlockKey]) -> Vec<Now> {
        let mut lease = |key: &BlockKey| {
            let namespace = self.catalog.by_id(key.namespace)?;
            let block_bytes = namespace.spec.layout().block_bytes();
            let slot = self.pool.readable(&namespace.pool_key(key.hash))?;
            if self.pool.slot(slot).is_in_place() {
                return None;
            }
            let lease = self.pool.lease(owner, slot).ok()?;
            let (runs, crc64) = (self.pool.slot(slot).runs(), self.pool.slot(slot).crc64());
            Some(Now::Leased(Leased { lease, slot, runs, block_bytes, crc64 }))
        };
        keys.iter().map(|key| lease(key).unwrap_or(Now::Absent)).collect()
    }

    /// Returns readable blocks of some namespaces, for administrators: one piece of a walk over all slots.
    fn keys(&self, namespaces: &[NamespaceHandle], from: usize) -> Result<Reply> {
        let mut spaces = Vec::with_capacity(namespaces.len());
        for &handle in namespaces {
            spaces.push(self.catalog.get(handle)?.space);
        }
        let end = from.saturating_add(self.pace.walk_slots).min(self.pool.numbers());
        let mut keys = Vec::new();
        for slot in (from..end).filter_map(|id| self.pool.get(id as SlotId)) {
            if slot.is_indexed() && slot.block.is_readable() && spaces.contains(&slot.key.space) {
                keys.push(self.catalog.block_key(&slot.key));
            }
        }
        Ok(Reply::Keys(keys, (end < self.pool.numbers()).then_some(end)))
    }
}

//! One owner's conversation with a depot: a connection of the local door, or a lane of an embedded client.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::hit::{GroupShape, whole_blocks};
use kvdepot_core::limits::{BATCH_HASHES_MAX, CLAIM_NAMESPACES_MAX};
use kvdepot_core::{Error, ErrorKind, Result};

use crate::depot::Shared;
use crate::message::{ClaimGroup, HELLO_MAGIC, Hashes, PROTOCOL_VERSION, Request, Response};
use crate::{acquire, claim, io_queue, ops};

/// How long opening a claim waits for tiers that answer quickly, so that most claims need no second call.
const CLAIM_GRACE: Duration = Duration::from_micros(1500);

/// Everything leased through a session ends with it (P4).
pub struct Session {
    shared: Arc<Shared>,
    owner: u64,
}

impl Session {
    pub(crate) const fn new(shared: Arc<Shared>, owner: u64) -> Self {
        Self { shared, owner }
    }

    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) const fn owner(&self) -> u64 {
        self.owner
    }

    /// Answers a request. Failures are answers too.
    pub fn handle(&self, request: Request<'_>) -> Response {
        self.try_handle(request).unwrap_or_else(|error| Response::from_error(&error))
    }

    fn try_handle(&self, request: Request<'_>) -> Result<Response> {
        let shared = &self.shared;
        Ok(match request {
            Request::Hello { magic, version, .. } => self.welcome(magic, version)?,
            Request::OpenNamespace { canonical } => {
                let (handle, id, epoch) = ops::open_namespace(shared, &canonical)?;
                Response::Namespace { handle, id, epoch }
            }
            Request::Lookup { namespace, hashes } => {
                Response::Present(ops::lookup(shared, namespace, &hashes)?)
            }
            Request::LookupPrefix { namespaces, hashes } => {
                Response::Prefix(ops::lookup_prefix(shared, &namespaces, &hashes)?)
            }
            Request::Prefetch { namespace, hashes } => {
                ops::prefetch(shared, namespace, &hashes)?;
                Response::Ok
            }
            Request::ClaimOpen { groups, hashes, skip, limit } => {
                self.open_claim(&groups, &hashes, skip, limit)?
            }
            Request::ClaimPoll { claim, settle } => self.poll_claim(claim, settle)?,
            Request::ClaimRelease { claim } => {
                let mut state = shared.state.lock();
                claim::release(&mut state, self.owner, claim)?;
                claim::admit_queued(shared, &mut state);
                drop(state);
                shared.changed.notify_all();
                shared.kick();
                Response::Ok
            }
            Request::Reserve { namespace, hashes } => {
                Response::Grants(ops::reserve(shared, self.owner, namespace, &hashes)?)
            }
            Request::Commit { leases, shards } => {
                ops::commit(shared, self.owner, &leases, &shards)?;
                Response::Ok
            }
            Request::Release { leases } => {
                ops::release(shared, self.owner, &leases)?;
                Response::Ok
            }
            Request::Acquire { namespace, hashes, wait_ms, last } => {
                let wait = Duration::from_millis(wait_ms.into());
                Response::Grants(acquire::acquire(shared, self.owner, namespace, &hashes, wait, last)?)
            }
            Request::Reset { namespaces } => Response::Epochs(ops::reset(shared, &namespaces)?),
            Request::Drain { wait_ms } => {
                let deadline = Instant::now() + Duration::from_millis(wait_ms.into());
                Response::Drained(io_queue::drain(shared, deadline))
            }
            Request::Stats => Response::Stats(self.stats().to_string()),
        })
    }

    fn welcome(&self, magic: u64, version: u32) -> Result<Response> {
        if magic != HELLO_MAGIC {
            return Err(Error::new(
                ErrorKind::Protocol,
                "this is a kvdepot: the first frame must be its hello",
            ));
        }
        if version != PROTOCOL_VERSION {
            return Err(Error::new(
                ErrorKind::Version,
                "client and depot speak different versions: install the same kvdepot in both and restart the depot",
            )
            .with("client_version", version)
            .with("depot_version", PROTOCOL_VERSION));
        }
        Ok(Response::Welcome {
            version: PROTOCOL_VERSION,
            depot: self.shared.id,
            pid: std::process::id(),
            pool_bytes: self.shared.pool.bytes(),
            timeout_ms: self.shared.config.timeout_ms,
            waiting_queue_depth: self.shared.config.waiting_queue_depth as u64,
            running_queue_depth: self.shared.config.running_queue_depth as u64,
        })
    }

    fn open_claim(
        &self,
        groups: &[ClaimGroup],
        hashes: &Hashes<'_>,
        skip: u32,
        limit: u32,
    ) -> Result<Response> {
        let bad = |what: &str| Error::new(ErrorKind::Protocol, what.to_owned());
        let count = hashes.count()?;
        let (skip, limit) = (skip as usize, (limit as usize).min(count));
        let namespaces: usize = groups.iter().map(|group| group.namespaces.len()).sum();
        if namespaces == 0
            || namespaces > CLAIM_NAMESPACES_MAX
            || groups.iter().any(|g| g.namespaces.is_empty())
        {
            return Err(bad("a claim spans 1 to 512 namespaces").with("namespaces", namespaces));
        }
        if let Some(group) = groups.iter().find(|g| {
            !(1..=BATCH_HASHES_MAX).contains(&(g.hashes_per_block as usize))
                || skip % g.hashes_per_block as usize != 0
        }) {
            return Err(bad("a claim begins at a block's border")
                .with("skip", skip)
                .with("hashes_per_block", group.hashes_per_block));
        }
        let groups: Vec<_> = groups
            .iter()
            .map(|group| claim::Group {
                namespaces: group.namespaces.clone(),
                shape: GroupShape {
                    window_blocks: group.window_blocks as usize,
                    units_per_block: group.hashes_per_block as usize,
                },
            })
            .collect();
        // A hit ends at a border of every group's blocks, so what is beyond the last one is nobody's question.
        let shapes: Vec<_> = groups.iter().map(|group| group.shape).collect();
        let limit = whole_blocks(&shapes, limit).max(skip);
        let id = claim::open(&self.shared, self.owner, groups, hashes.iter().collect(), skip, limit)?;
        let grace = Instant::now() + CLAIM_GRACE;
        let mut state = self.shared.state.lock();
        // Worth a short wait only while tiers are asked: to fetch blocks takes longer than an engine may wait here.
        while claim::is_probing(&state, id) {
            if self.shared.changed.wait_until(&mut state, grace).timed_out() {
                break;
            }
        }
        Ok(answer(id, claim::poll(&mut state, self.owner, id, false)?))
    }

    fn poll_claim(&self, id: u64, settle: bool) -> Result<Response> {
        let mut state = self.shared.state.lock();
        let progress = claim::poll(&mut state, self.owner, id, settle)?;
        drop(state);
        if settle {
            self.shared.changed.notify_all();
        }
        Ok(answer(id, progress))
    }

    pub(crate) fn stats(&self) -> serde_json::Value {
        let mut map = self.shared.stats.to_json();
        let state = self.shared.state.lock();
        let gauges = [
            ("pool_bytes", state.pool_bytes()),
            ("pool_free_bytes", state.free_bytes()),
            ("pool_filling_bytes", state.held.filling),
            ("pool_fetching_bytes", state.held.fetching),
            ("pool_dirty_bytes", state.held.dirty),
            ("pool_leased_bytes", state.held.leased),
            ("pool_blocks", state.index.len() as u64),
            ("namespaces", state.namespaces.len() as u64),
            ("claims_open", state.claims.len() as u64),
            ("claims_queued", state.claims.queued() as u64),
            ("fetches_queued", (state.fetches.len() + state.fetches_in_flight) as u64),
            ("writes_queued", state.writes_left() as u64),
        ];
        map.insert("evict_blocks".to_owned(), state.evicted.into());
        drop(state);
        for (name, value) in gauges {
            map.insert(name.to_owned(), value.into());
        }
        let tiers = self.shared.tiers.iter().map(|tier| {
            let usage = tier.usage();
            let mut entry = serde_json::json!({"name": tier.name(), "blocks": usage.blocks, "bytes": usage.bytes, "bytes_max": usage.bytes_max});
            let servers = tier.servers().into_iter().map(|server| {
                serde_json::json!({"address": server.address, "up": server.up, "connections": server.connections, "failures": server.failures, "last_error": server.last_error})
            });
            let servers: Vec<serde_json::Value> = servers.collect();
            if !servers.is_empty() {
                entry["servers"] = servers.into();
            }
            entry
        });
        map.insert("tiers".to_owned(), tiers.collect::<Vec<_>>().into());
        map.insert("pipeline".to_owned(), self.shared.config.pipeline.clone().into());
        map.insert("pid".to_owned(), std::process::id().into());
        map.into()
    }
}

fn answer(claim: u64, progress: claim::Progress) -> Response {
    Response::Claim {
        claim,
        settled: progress.settled,
        units: u32::try_from(progress.units).unwrap_or(u32::MAX),
        units_from_tier: u32::try_from(progress.units_from_tier).unwrap_or(u32::MAX),
        arriving: progress.arriving,
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        ops::end_owner(&self.shared, self.owner);
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({})", self.owner)
    }
}

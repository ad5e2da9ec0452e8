//! One owner's conversation with a depot: a connection of the local door, or a lane of an embedded client.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hashbrown::HashSet;
use kvdepot_core::hit::GroupShape;
use kvdepot_core::lease::LeaseId;
use kvdepot_core::limits::{
    BATCH_HASHES_MAX, CLAIM_HASHES_MAX, CLAIM_LABEL_CHARS_MAX, CLAIM_NAMESPACES_MAX, DRAIN_WAIT_MS_MAX,
    NAMESPACES_MAX,
};
use kvdepot_core::machine::{
    self, Event, Location, Opened, Outcome, Progress, Reply, Request as Ask, Reserve, ShardSet, TierSet,
};
use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceId, Result};
use parking_lot::{Mutex, MutexGuard};

use crate::copies::Copies;
use crate::death::DeathGuard;
use crate::ending::Waits;
use crate::epochs::Unanswered;
use crate::events::Following;
use crate::message::{
    Arriving, CameFrom, ClaimGroup, ClaimTimes, Grant, HELLO_MAGIC, Hashes, NamespaceHandle,
    PROTOCOL_VERSION, Request, Response, Shards,
};
use crate::runner::Runner;
use crate::stats::Now;
use crate::user::User;

/// How long a call about a claim waits for tiers and threads that answer quickly, so that most claims need no second call.
const CLAIM_GRACE: Duration = Duration::from_micros(1500);
/// Number of runs in one answer, so that it fits into a frame (P7). Blocks beyond that are refused and requested again.
const RUNS_PER_ANSWER_MAX: usize = 4096;

/// How a session loads blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadHow {
    /// How long blocks are waited for that are not in the pool.
    pub(crate) wait: Duration,
    /// Whether the caller will not ask again for late blocks.
    pub(crate) last: bool,
    pub(crate) runs_max: usize,
    /// Whether the caller can read blocks in a tier's memory.
    pub(crate) in_place: bool,
}

/// A session. Everything leased through it ends with it (P4).
pub struct Session {
    runner: Arc<Runner>,
    owner: u64,
    /// The user of the namespaces opened here; `None` for the session itself.
    user: Option<User>,
    /// Namespaces used here by their ids.
    used: Mutex<HashSet<NamespaceHandle>>,
    ahead: Mutex<Ahead>,
    following: Mutex<Following>,
    /// Values that end with the session, after its leases. Dropped after `drop`.
    companions: Mutex<Vec<Box<dyn Send>>>,
    copies: Mutex<Copies>,
}

/// Hashes of the next claim that have arrived so far.
#[derive(Default)]
struct Ahead {
    hashes: Vec<BlockHash>,
    /// Why they were refused, which is reported to the claim.
    refused: Option<Error>,
}

impl Ahead {
    fn push(&mut self, hashes: &Hashes<'_>) -> Result<()> {
        let count = hashes.count()?;
        if self.hashes.len() + count > CLAIM_HASHES_MAX {
            return Err(Error::new(ErrorKind::Protocol, "a claim has too many hashes")
                .with("hashes_max", CLAIM_HASHES_MAX));
        }
        self.hashes.extend(hashes.iter());
        Ok(())
    }
}

impl Session {
    pub(crate) fn new(runner: Arc<Runner>, owner: u64) -> Self {
        Self {
            runner,
            owner,
            user: None,
            used: Mutex::default(),
            ahead: Mutex::default(),
            following: Mutex::default(),
            companions: Mutex::default(),
            copies: Mutex::default(),
        }
    }

    /// Keeps a value until the session has ended.
    pub fn accompany(&self, companion: impl Send + 'static) {
        self.companions.lock().push(Box::new(companion));
    }

    /// Tells whose connection this is, for who asks which client missed.
    #[must_use]
    pub fn of_process(self, pid: u32) -> Self {
        self.runner.locator.misses.client(self.owner, pid);
        self
    }

    pub(crate) fn with_user(mut self, user: User) -> Self {
        self.user = Some(user);
        self
    }

    /// Returns the user of the namespaces opened here.
    pub(crate) fn user(&self) -> u64 {
        self.user.as_ref().map_or(self.owner, User::owner)
    }

    /// Opens a namespace, which this session's user uses from now on.
    pub(crate) fn open_namespace(&self, canonical: &str, unanswered: Unanswered) -> Result<Opened> {
        self.runner.open_namespace(self.user(), canonical, unanswered, None)
    }

    /// Ends this user's use of a namespace.
    pub(crate) fn close_namespace(&self, namespace: NamespaceHandle) -> Result<()> {
        self.used.lock().remove(&namespace);
        self.runner.ask(self.user(), Ask::CloseNamespace { namespace }).map(drop)
    }

    /// Notes that this session's user uses a namespace that another user has opened, within its quota.
    pub(crate) fn use_namespace(&self, namespace: NamespaceHandle) {
        let mut used = self.used.lock();
        // Includes numbers of namespaces that were forgotten meanwhile.
        if used.len() >= NAMESPACES_MAX {
            used.clear();
        }
        let is_first = used.insert(namespace);
        drop(used);
        if is_first {
            let _ = self.runner.ask(self.user(), Ask::UseNamespace { namespace });
        }
    }

    pub(crate) const fn runner(&self) -> &Arc<Runner> {
        &self.runner
    }

    pub(crate) fn following(&self) -> MutexGuard<'_, Following> {
        self.following.lock()
    }

    pub(crate) const fn owner(&self) -> u64 {
        self.owner
    }

    /// Answers a request. Failures are answers too.
    pub fn handle(&self, request: Request<'_>) -> Response {
        self.try_handle(request).unwrap_or_else(|error| Response::from_error(&error))
    }

    fn try_handle(&self, request: Request<'_>) -> Result<Response> {
        let runner = &self.runner;
        let _guard = DeathGuard(&runner.life);
        runner.life.ensure_alive()?;
        if let Request::ClaimHashes { hashes } = &request {
            let mut ahead = self.ahead.lock();
            if ahead.refused.is_none()
                && let Err(error) = ahead.push(hashes)
            {
                *ahead = Ahead { hashes: Vec::new(), refused: Some(error) };
            }
            return Ok(Response::Ok);
        }
        let ahead = std::mem::take(&mut *self.ahead.lock());
        Ok(match request {
            Request::ClaimHashes { .. } | Request::Ping | Request::Goodbye | Request::CopiesEnded => {
                // Answers only if the depot's calls get the lock.
                runner.look(|_| ());
                Response::Ok
            }
            Request::Near { node } => self.wish_near(node)?,
            Request::ReadsInPlace { namespace } => {
                self.runner.ask(self.owner, Ask::ReadsInPlace { namespace }).map(|_| Response::Ok)?
            }
            Request::Hello { magic, version, .. } => self.welcome(magic, version)?,
            Request::OpenNamespace { canonical } => {
                let opened = self.open_namespace(&canonical, Unanswered::Provisional)?;
                Response::Namespace { handle: opened.handle, id: opened.id.0, epoch: opened.epoch }
            }
            Request::CloseNamespace { namespace } => {
                self.close_namespace(namespace)?;
                Response::Ok
            }
            Request::Lookup { namespace, hashes } => {
                let keys = runner.locator.directory.keys(namespace, checked(&hashes)?)?;
                Response::Present(
                    runner.locator.look_up(self.owner, &keys).into_iter().map(u8::from).collect(),
                )
            }
            Request::LookupPrefix { namespaces, hashes } => {
                let prefix = runner.locator.prefix(self.owner, &namespaces, &hashes, None)?;
                Response::Prefix(u32::try_from(prefix).unwrap_or(u32::MAX))
            }
            Request::Prefetch { namespace, hashes } => {
                self.prefetch(namespace, &hashes)?;
                Response::Ok
            }
            Request::ClaimOpen { groups, hashes, skip, limit, tiers, label } => {
                let tiers = self.tiers_named(tiers.as_deref())?;
                self.open_claim(&groups, (ahead, &hashes), (skip, limit), tiers, &label)?
            }
            Request::ClaimPoll { claim, settle } => self.settle_claim(Ask::ClaimPoll { claim, settle })?,
            Request::ClaimDecline { claim } => self.settle_claim(Ask::ClaimDecline { claim })?,
            Request::ClaimRelease { claim, tell_times } => {
                let times = if tell_times { self.claim_times(claim).ok() } else { None };
                let done = self.done(Ask::ClaimRelease { claim })?;
                times.map_or(done, Response::ClaimTimes)
            }
            Request::Reserve { namespace, hashes, priority } => {
                let hashes = checked(&hashes)?.collect();
                let (how, runs_max) = (Reserve::Ranked(priority), RUNS_PER_ANSWER_MAX);
                // One id for all pieces: a reset between two of them refuses the rest.
                let opened = runner.locator.directory.get(namespace)?;
                let (id, shards) = (Some(opened.id), opened.spec.layout().shard_count());
                let reply = runner.ask(self.owner, Ask::Reserve { namespace, id, hashes, how, runs_max })?;
                let Reply::Slots(outcomes) = reply else { return Err(other_reply()) };
                if let Some(tally) = runner.locator.directory.tally(namespace) {
                    tally.stored();
                }
                self.ensure_present(&outcomes)?;
                self.copies.lock().dump_began(Instant::now(), &outcomes, shards);
                Response::Grants(outcomes.into_iter().map(grant).collect())
            }
            Request::Commit { leases, shards } => {
                let count = match &shards {
                    Shards::All => None,
                    Shards::Some(shards) => Some(shards.len()),
                };
                let copied = self.copies.lock().committed(Instant::now(), &leases, count);
                let leases = leases.into_iter().map(LeaseId).collect();
                let shards = match shards {
                    Shards::All => ShardSet::All,
                    Shards::Some(shards) => ShardSet::Some(shards),
                };
                let done = self.done(Ask::Commit { leases, shards, crc64: None })?;
                copied.iter().for_each(|copy| runner.locator.flows.dumps.took(copy.took, copy.bytes));
                done
            }
            Request::Release { leases } => {
                let copied = self.copies.lock().released(Instant::now(), &leases);
                copied.iter().for_each(|copy| runner.locator.flows.loads.took(copy.took, copy.bytes));
                self.done(Ask::Release { leases: leases.into_iter().map(LeaseId).collect() })?
            }
            Request::Acquire { namespace, hashes, wait_ms, last, in_place } => {
                let hashes = checked(&hashes)?.collect();
                let wait = Duration::from_millis(wait_ms.into());
                let how = LoadHow { wait, last, runs_max: RUNS_PER_ANSWER_MAX, in_place };
                let outcomes = self.load(namespace, None, hashes, how)?;
                self.copies.lock().load_began(Instant::now(), &outcomes);
                Response::Grants(outcomes.into_iter().map(grant).collect())
            }
            Request::Reset { namespaces } => Response::Epochs(runner.reset(&namespaces)?),
            Request::Drain { wait_ms } => {
                let wait = Duration::from_millis(wait_ms.min(DRAIN_WAIT_MS_MAX).into());
                Response::Drained(runner.drain(Instant::now() + wait, Waits::UntilTheEnd))
            }
            Request::HandOver { .. } | Request::TakenOver => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "only the local door of a depot process hands a pool over",
                ));
            }
            Request::Memory => {
                let memory = runner.memory.as_ref().ok_or_else(|| {
                    Error::new(ErrorKind::NotFound, "no tier of this depot leases blocks in its memory")
                })?;
                Response::Memory { bytes: memory.bytes, head: memory.head.clone() }
            }
            Request::Stats => Response::Stats(self.stats().to_string()),
            Request::Namespaces { after } => self.list_namespaces(after),
            Request::Events { namespaces, after } => self.events(&namespaces, after)?,
            Request::Snapshot { namespace, place, from } => self.snapshot(namespace, place, from)?,
        })
    }

    /// Makes blocks be placed near a NUMA node, including those that others fetch for namespaces used from here.
    fn wish_near(&self, node: Option<u32>) -> Result<Response> {
        let region = node.and_then(|node| self.runner.pool.near(node));
        let (owner, user) = (self.owner, self.user());
        self.runner.ask(owner, Ask::Near { region })?;
        if user == owner {
            Ok(Response::Ok)
        } else {
            self.runner.ask(user, Ask::Near { region }).map(|_| Response::Ok)
        }
    }

    /// Populates slots before they are given to a client, as they may be untouched: the client's own cgroup or cpuset
    /// may refuse it a huge page, which would kill it. Slots that cannot be populated are freed again.
    fn ensure_present(&self, outcomes: &[Outcome]) -> Result<()> {
        let leased = || {
            outcomes.iter().filter_map(|outcome| match outcome {
                Outcome::Leased(leased) => Some(leased),
                Outcome::Have | Outcome::Refused(_) => None,
            })
        };
        let present = leased().try_for_each(|leased| self.runner.pool.ensure_present(&leased.runs));
        if present.is_err() {
            let leases = leased().map(|leased| leased.lease).collect();
            self.runner.ask(self.owner, Ask::Release { leases })?;
        }
        present
    }

    fn claim_times(&self, claim: u64) -> Result<ClaimTimes> {
        let runner = &self.runner;
        let Reply::ClaimTimes(times) = runner.ask(self.owner, Ask::ClaimTimes { claim })? else {
            return Err(other_reply());
        };
        let now = runner.nanos(Instant::now());
        let ago = |then: u64| now.saturating_sub(then);
        let tiers = times.tiers.iter().map(|came| CameFrom {
            tier: runner.locator.tiers[came.tier].name().to_owned(),
            blocks: u32::try_from(came.blocks).unwrap_or(u32::MAX),
            first_ns: ago(came.first),
            last_ns: ago(came.last),
        });
        Ok(ClaimTimes {
            opened_ns: ago(times.opened),
            admitted_ns: times.admitted.map(ago),
            settled_ns: times.settled.map(ago),
            queued: times.queued,
            tiers: tiers.collect(),
        })
    }

    fn done(&self, request: Ask) -> Result<Response> {
        self.runner.ask(self.owner, request).map(|_| Response::Ok)
    }

    /// Leases blocks for reading. Blocks in a tier are fetched, each at most once. If the pool has no space for more
    /// while some are leased, the answer comes immediately and the rest is refused with `no_space`; a retry after the
    /// first were copied finds space. Fetches continue after the wait is over; their blocks are refused with `timeout`
    /// then, and may be requested again.
    pub(crate) fn load(
        &self,
        namespace: NamespaceHandle,
        id: Option<NamespaceId>,
        hashes: Vec<BlockHash>,
        how: LoadHow,
    ) -> Result<Vec<Outcome>> {
        let runner = &self.runner;
        let LoadHow { wait, last, runs_max, in_place } = how;
        let deadline = Instant::now() + wait.min(Duration::from_millis(runner.config.timeout_ms));
        // A retry finds what has arrived since, so fetches are not bound to this call's wait.
        let fetch_deadline = runner.deadline();
        let request = Ask::Load { namespace, id, hashes, fetch_deadline, last, runs_max, in_place };
        match runner.ask_within(self.owner, request, deadline)? {
            Reply::Slots(outcomes) => {
                self.count_load(namespace, &outcomes, last);
                Ok(outcomes)
            }
            _ => Err(other_reply()),
        }
    }

    /// Counts each block once, when it is leased or missed, however often it is requested.
    fn count_load(&self, namespace: NamespaceHandle, outcomes: &[Outcome], last: bool) {
        let (mut blocks, mut bytes, mut missed) = (0, 0, 0);
        for outcome in outcomes {
            match outcome {
                Outcome::Leased(leased) => {
                    blocks += 1;
                    bytes += leased.block_bytes;
                }
                Outcome::Refused(ErrorKind::NoSpace) | Outcome::Have => {}
                Outcome::Refused(ErrorKind::Timeout) if !last => {}
                Outcome::Refused(_) => missed += 1,
            }
        }
        if let Some(tally) = self.runner.locator.directory.tally(namespace) {
            tally.loaded(blocks, bytes, missed);
        }
    }

    /// Requests that blocks be read into the pool. If only I/O can tell where they are, another thread finds out.
    fn prefetch(&self, namespace: NamespaceHandle, hashes: &Hashes<'_>) -> Result<()> {
        let keys = self.runner.locator.directory.keys(namespace, checked(hashes)?)?;
        if self.runner.locator.tiers.is_empty() || keys.is_empty() {
            return Ok(());
        }
        let (runner, owner) = (Arc::clone(&self.runner), self.owner);
        self.runner.probers.run(move || {
            let _guard = DeathGuard(&runner.life);
            let keys: Vec<_> =
                keys.into_iter().filter(|key| !runner.locator.presence.contains(key)).collect();
            let mut locations = runner.locator.locate(&keys);
            runner.locator.probe_run(&keys, &mut locations, None);
            let known = keys.iter().zip(&locations).map_while(|(key, location)| match location {
                Location::Tier(tier) => Some((key.hash, *tier)),
                Location::Unknown | Location::Absent => None,
            });
            let (blocks, deadline) = (known.collect(), runner.deadline());
            // The namespace may have been reset meanwhile: then there is nothing to fetch.
            let _ = runner.ask(owner, Ask::Prefetch { namespace, blocks, deadline });
            runner.execute_queued();
        })
    }

    fn welcome(&self, magic: u64, version: u32) -> Result<Response> {
        if magic != HELLO_MAGIC {
            return Err(Error::new(
                ErrorKind::Protocol,
                "this is a kvdepot socket: the first frame must be a hello",
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
            depot: self.runner.id,
            pid: std::process::id(),
            regions: self.runner.pool.regions().to_vec(),
            timeout_ms: self.runner.config.timeout_ms,
            waiting_queue_depth: self.runner.config.waiting_queue_depth as u64,
            running_queue_depth: self.runner.config.running_queue_depth as u64,
            has_memory: self.runner.memory.is_some(),
        })
    }

    /// Returns the tiers of these names, as a pipeline spells them; `None` = all.
    fn tiers_named(&self, names: Option<&[String]>) -> Result<TierSet> {
        let Some(names) = names else { return Ok(TierSet::ALL) };
        let tiers = &self.runner.locator.tiers;
        names.iter().try_fold(TierSet::NONE, |set, name| {
            let index = tiers.iter().position(|tier| tier.name().eq_ignore_ascii_case(name));
            index.map(|index| set.with(index)).ok_or_else(|| {
                Error::new(ErrorKind::Config, "the depot's pipeline has no such tier")
                    .with("tier", name)
                    .with("pipeline", &self.runner.config.pipeline)
            })
        })
    }

    fn open_claim(
        &self,
        groups: &[ClaimGroup],
        (mut ahead, hashes): (Ahead, &Hashes<'_>),
        (skip, limit): (u32, u32),
        tiers: TierSet,
        label: &str,
    ) -> Result<Response> {
        let bad = |what: &str| Error::new(ErrorKind::Protocol, what.to_owned());
        if let Some(refused) = ahead.refused.take() {
            return Err(refused);
        }
        ahead.push(hashes)?;
        let hashes = ahead.hashes;
        let (skip, limit) = (skip as usize, (limit as usize).min(hashes.len()));
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
            .map(|group| machine::ClaimGroup {
                namespaces: group.namespaces.clone(),
                shape: GroupShape {
                    window_blocks: group.window_blocks as usize,
                    units_per_block: group.hashes_per_block as usize,
                },
            })
            .collect();
        let runner = &self.runner;
        let (deadline, patience) = (runner.deadline(), runner.config.timeout_ms * 1_000_000);
        let label = (!label.is_empty()).then(|| label.chars().take(CLAIM_LABEL_CHARS_MAX).collect());
        let request = Ask::ClaimOpen { groups, hashes, skip, limit, tiers, deadline, patience, label };
        answer(self.runner.ask_within(self.owner, request, Instant::now() + CLAIM_GRACE)?)
    }

    /// Makes a request that may settle a claim with what has come, in work of this thread or another one. An answer before the
    /// end of it would be a miss of what is there: the client limits the wait.
    fn settle_claim(&self, request: Ask) -> Result<Response> {
        let limit = Duration::from_millis(self.runner.config.timeout_ms);
        answer(self.runner.ask_within(self.owner, request, Instant::now() + limit)?)
    }

    /// Ends the session's claims. Returns whether it still holds leases. A claim's leases only keep blocks in the pool:
    /// a client copies under its own leases, so claims may end while copies are in flight.
    pub fn end_claims(&self) -> bool {
        // A depot that cannot answer is treated as if something were held.
        matches!(self.runner.ask(self.owner, Ask::EndClaims), Ok(Reply::Holds(true)) | Err(_))
    }

    /// Returns counters and gauges. Changes none of them.
    pub(crate) fn stats(&self) -> serde_json::Value {
        let runner = &self.runner;
        let Now { numbers: mut map, counters, gauges, regions } = runner.numbers();
        for (name, value) in crate::pool::describe(&runner.pool, &runner.config) {
            map.insert(name.to_owned(), value);
        }
        map.insert("misses".to_owned(), runner.locator.misses.to_json());
        for (name, value) in runner.locator.flows.to_json() {
            map.insert(name.to_owned(), value);
        }
        let held = |handles: &[u64]| runner.look(|machine| machine.namespaces_hold(handles));
        map.insert("top_namespaces".to_owned(), runner.locator.top_namespaces(held));
        map.insert("evict_ages".to_owned(), crate::stats::ages(&gauges.evict_ages));
        let regions = crate::pool::describe_regions(runner.pool.regions(), &regions);
        map.insert("pool_regions".to_owned(), regions);
        if let Some(ledger) = &runner.ledger {
            map.insert("ledger_unproven_blocks".to_owned(), ledger.unproven().into());
        }
        let stall_max_us = runner.locator.stats.stall_max_us.load(Ordering::Relaxed);
        map.insert("stall_max_us".to_owned(), stall_max_us.into());
        let holds = runner.longest_holds();
        for (name, (ns, event)) in [("lock_hold", holds.real), ("lock_hold_cpu", holds.processor)] {
            map.insert(format!("{name}_max_us"), (ns / 1000).into());
            map.insert(format!("{name}_max_event"), event.into());
        }
        let tiers = self.runner.locator.tiers.iter().enumerate().map(|(index, tier)| {
            let usage = tier.usage();
            let most = (usage.bytes_max > 0).then_some(usage.bytes_max);
            let mut entry = serde_json::json!({"name": tier.name(), "blocks": usage.blocks, "bytes": usage.bytes, "bytes_max": most});
            let servers = tier.servers().into_iter().map(|server| {
                serde_json::json!({"address": server.address, "up": server.up, "connections": server.connections, "failures": server.failures, "last_error": server.last_error})
            });
            if !tier.engine().is_empty() {
                entry["engine"] = tier.engine().into();
            }
            let servers: Vec<serde_json::Value> = servers.collect();
            if !servers.is_empty() {
                entry["servers"] = servers.into();
            }
            for (name, value) in tier.figures() {
                entry[name] = value.into();
            }
            let hits = counters.tier_hit_blocks.get(index).copied().unwrap_or(0);
            entry["hit_blocks"] = (hits + runner.locator.tier_hits(index)).into();
            // Those with a limit of their own report what they evict.
            if usage.bytes_max > 0 {
                entry["evict_blocks"] = counters.tier_evict_blocks.get(index).copied().unwrap_or(0).into();
            }
            for (name, value) in runner.commands.moved(index) {
                entry[name] = value;
            }
            entry
        });
        map.insert("tiers".to_owned(), tiers.collect::<Vec<_>>().into());
        map.insert("pipeline".to_owned(), self.runner.config.pipeline.clone().into());
        map.insert("pid".to_owned(), std::process::id().into());
        map.insert("uptime_s".to_owned(), (runner.uptime_ms() / 1000).into());
        map.into()
    }
}

/// Returns the hashes of a batch after checking its length.
fn checked<'a>(hashes: &'a Hashes<'_>) -> Result<impl Iterator<Item = BlockHash> + 'a> {
    hashes.count()?;
    Ok(hashes.iter())
}

fn other_reply() -> Error {
    Error::new(ErrorKind::Protocol, "the machine gave another reply")
}

fn grant(outcome: Outcome) -> Grant {
    match outcome {
        Outcome::Leased(leased) => Grant::Leased { lease: leased.lease.0, runs: leased.runs },
        Outcome::Have => Grant::Have,
        Outcome::Refused(kind) => Grant::Refused { kind: kind.as_str().into() },
    }
}

fn answer(reply: Reply) -> Result<Response> {
    let Reply::Claim(progress) = reply else { return Err(other_reply()) };
    let Progress { claim, settled, units, units_from_tier, arriving } = progress;
    let short = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let arriving = arriving.map(|arriving| Arriving {
        units: short(arriving.units),
        units_now: short(arriving.units_now),
        units_from_tier: short(arriving.units_from_tier),
        blocks_come: short(arriving.blocks_come),
        blocks_left: short(arriving.blocks_left),
    });
    Ok(Response::Claim {
        claim,
        settled,
        units: short(units),
        units_from_tier: short(units_from_tier),
        arriving,
    })
}

impl Drop for Session {
    fn drop(&mut self) {
        self.runner.locator.misses.client_went(self.owner);
        if !self.runner.life.is_dead() {
            let _guard = DeathGuard(&self.runner.life);
            self.runner.tell_and_leave(Event::OwnerEnded { owner: self.owner });
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({})", self.owner)
    }
}

//! Memory pools of other machines, over the wire door: kvdepot's own, or InfiniStore's.
//!
//! Each block is stored on one of the servers ([`place`]). Each server has its own health: while it is unreachable its
//! blocks are immediate misses, and nothing waits for it (P2), so this tier needs no circuit breaker around it.
//! Connections are shared by all requests. Answers come in any order, directly into their slots, and are verified (P1).

mod config;
mod conn;
mod connect;
mod epochs;
mod everyone;
mod infini;
mod job;
mod lookup;
mod own;
mod parting;
mod pending;
mod probing;
mod receive;
mod removal;
mod retry;
mod sending;
mod server;
mod serving;
mod settings;
mod shared;
mod socket;
mod spaces;
mod tcp;
mod tls;
mod turns;
mod value;

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{NAMESPACES_MAX, NAMESPACES_OPENING_MAX, REMOTE_TICK_MS};
use kvdepot_core::rendezvous::Places;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::{IoBuf, SlotBuf};
use parking_lot::{Condvar, Mutex};

pub use config::{RemoteConfig, RemoteProtocol};
pub use tls::RemoteTls;

use crate::beliefs::Beliefs;
use crate::entry::TierEntry;
use crate::{
    BlockingCalls, BlockingConfig, Done, Fetched, Presence, ReadItem, Tier, TierEvents, TierServer,
    TierUsage, WriteItem, Written,
};
use everyone::Everyone;
use job::{Job, What};
use lookup::{Addresses, Lookup};
use server::{Health, Server};
use shared::Shared;
use spaces::Space;
use turns::Turns;

/// The registry's entry of this tier.
pub const ENTRY: TierEntry = TierEntry {
    name: "Remote",
    open: |config| Ok(Arc::new(RemoteTier::open(RemoteConfig::from_json(config)?)?)),
    guards_itself: true,
    settings: &settings::SETTINGS,
    for_users: true,
};

/// Blocks on remote servers.
pub struct RemoteTier {
    shared: Arc<Shared>,
    servers: Arc<[Arc<Server>]>,
    threads: Vec<JoinHandle<()>>,
    /// Runs openings and moves of namespaces, which wait for servers.
    calls: BlockingCalls,
}

impl RemoteTier {
    /// Starts to connect in the background; servers need not be reachable yet.
    pub fn open(config: RemoteConfig) -> Result<Self> {
        Self::start(config, &lookup::of_the_system())
    }

    /// Like [`RemoteTier::open`], with `lookup` to resolve servers that are configured by name. It may hang.
    pub fn open_with_lookup(
        config: RemoteConfig,
        lookup: impl Fn(&str) -> std::io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Result<Self> {
        let lookup: Lookup = Arc::new(lookup);
        Self::start(config, &lookup)
    }

    fn start(config: RemoteConfig, lookup: &Lookup) -> Result<Self> {
        config.check()?;
        let shared = Arc::new(Shared {
            places: Places::new(&config.servers),
            spaces: Mutex::default(),
            answers: Condvar::new(),
            turns: Turns::default(),
            beliefs: Beliefs::new(config.present_ttl, config.absent_ttl),
            listener: Mutex::new(None),
            under_way: Mutex::new(0),
            at_rest: Condvar::new(),
            stopping: AtomicBool::new(false),
            config,
        });
        let servers: Arc<[Arc<Server>]> = shared
            .config
            .servers
            .iter()
            .enumerate()
            .map(|(index, address)| {
                let addresses = Addresses::new(Arc::clone(lookup));
                Arc::new(Server::new(index, address.clone(), addresses, Arc::clone(&shared)))
            })
            .collect();
        let calls = BlockingCalls::new(BlockingConfig {
            name: "kvd-remote-ns".to_owned(),
            threads_max: NAMESPACES_OPENING_MAX,
            queue_max: NAMESPACES_MAX,
        });
        let mut tier = Self { shared, servers, threads: Vec::new(), calls };
        for server in &*tier.servers {
            tier.threads.extend(serving::spawn(server)?);
        }
        let timed = tier.everyone();
        tier.spawn("kvdepot-remote-t", move || watch_deadlines(&timed.shared, &timed.servers))?;
        for index in 0..tier.servers.len() {
            let owing = tier.everyone();
            tier.spawn("kvdepot-remote-e", move || owing.retry_owed(index))?;
        }
        Ok(tier)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        self.threads.push(thread.map_err(|e| Error::io("cannot start a thread", e))?);
        Ok(())
    }

    fn everyone(&self) -> Everyone {
        Everyone { shared: Arc::clone(&self.shared), servers: Arc::clone(&self.servers) }
    }

    /// Returns the servers of a batch's keys and their namespaces, under one lock.
    fn spaces<'a>(&self, keys: impl Iterator<Item = &'a BlockKey>) -> Vec<Result<(usize, Space)>> {
        let spaces = self.shared.spaces.lock();
        let found = |key| {
            let server = self.shared.places.of(key);
            Ok((server, spaces.at(key, server)?.clone()))
        };
        keys.map(found).collect()
    }

    /// Passes each server its part of a batch at once.
    fn submit(&self, jobs: Vec<(usize, Job)>) {
        let mut rest = jobs;
        while let Some(&(server, _)) = rest.first() {
            let (mine, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|(index, _)| *index == server);
            self.servers[server].submit_all(mine.into_iter().map(|(_, job)| job));
            rest = others;
        }
    }
}

/// Returns the part of a slot that a block takes.
fn payload(slot: SlotBuf, space: &Space) -> Result<IoBuf> {
    let slot_bytes = slot.len();
    IoBuf::payload(slot, space.block_bytes()).ok_or_else(|| {
        Error::new(ErrorKind::Config, "a slot is smaller than its block").with("slot_bytes", slot_bytes)
    })
}

fn in_time(deadline: Instant) -> Result<()> {
    if deadline > Instant::now() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Timeout, "the deadline had passed when the call came"))
}

/// Fails overdue requests, as long as any are in flight.
fn watch_deadlines(shared: &Shared, servers: &[Arc<Server>]) {
    while !shared.is_stopping() {
        std::thread::park_timeout(Duration::from_millis(REMOTE_TICK_MS));
        if *shared.under_way.lock() > 0 {
            let now = Instant::now();
            servers.iter().for_each(|server| server.expire(now));
        }
        servers.iter().for_each(|server| server.look_at_parting());
    }
}

impl Tier for RemoteTier {
    fn name(&self) -> &str {
        "remote"
    }

    /// Asks every reachable server. The others are moved when they come back.
    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        let (all, spec) = (self.everyone(), Arc::clone(spec));
        self.calls.run(deadline, move || Ok(all.open(&spec, at_least, deadline)), done);
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        let (all, spec) = (self.everyone(), Arc::clone(spec));
        match all.leave_epoch(&spec, at_least) {
            Ok(()) => self.calls.run(deadline, move || all.advance(&spec, at_least, deadline), done),
            Err(error) => done(Err(error)),
        }
    }

    fn close_namespace(&self, root: NamespaceId) {
        let mut spaces = self.shared.spaces.lock();
        let spec = spaces.get(root).map(|space| Arc::clone(&space.spec));
        let closed = spaces.close(root);
        drop(spaces);
        if let Some(id) = closed {
            self.shared.beliefs.forget_namespace(id);
        }
        if let Some(spec) = spec {
            self.servers.iter().for_each(|server| server.close_namespace(&spec));
        }
    }

    fn attach(&self, events: Weak<dyn TierEvents>) {
        *self.shared.listener.lock() = Some(events);
    }

    fn is_down(&self, key: &BlockKey) -> bool {
        self.servers[self.shared.places.of(key)].health() == Health::Down
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        let healths: Vec<Health> = self.servers.iter().map(|server| server.health()).collect();
        let now = Instant::now();
        let writing = self.shared.beliefs.writing.lock();
        let spaces = self.shared.spaces.lock();
        let known = self.shared.beliefs.known.lock();
        out.clear();
        out.extend(keys.iter().map(|key| {
            let server = self.shared.places.of(key);
            if healths[server] == Health::Down || writing.is_leaving(key) || spaces.at(key, server).is_err() {
                return Presence::Absent;
            }
            known.presence(key, now)
        }));
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        if let Err(error) = in_time(deadline) {
            return done(Err(error));
        }
        self.begin_probe(keys, deadline, done);
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        if let Err(late) = in_time(deadline) {
            return reads.into_iter().for_each(|read| read.end(Err(late.clone())));
        }
        let spaces = self.spaces(reads.iter().map(|read| &read.key));
        let busy: Vec<bool> = {
            let writing = self.shared.beliefs.writing.lock();
            reads.iter().map(|read| writing.holds(&read.key)).collect()
        };
        let sure: Vec<bool> = {
            let (known, now) = (self.shared.beliefs.known.lock(), Instant::now());
            reads.iter().map(|read| known.presence(&read.key, now) == Presence::Present).collect()
        };
        let mut jobs = Vec::with_capacity(reads.len());
        for (((read, space), busy), sure) in reads.into_iter().zip(spaces).zip(busy).zip(sure) {
            let Ok((server, space)) = space else {
                read.end(Ok(Fetched::Miss));
                continue;
            };
            let ReadItem { key, dst, done, .. } = read;
            match payload(dst, &space) {
                Ok(into) if busy => {
                    drop(into);
                    done(Ok(Fetched::Miss));
                }
                Ok(into) => {
                    let job = self.get(key, into, &space, sure, deadline, done);
                    jobs.push((server, job));
                }
                Err(error) => done(Err(error)),
            }
        }
        self.submit(jobs);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        if let Err(late) = in_time(deadline) {
            return writes.into_iter().for_each(|write| write.end(Err(late.clone())));
        }
        let spaces = self.spaces(writes.iter().map(|write| &write.key));
        let mut jobs = Vec::with_capacity(writes.len());
        for (write, space) in writes.into_iter().zip(spaces) {
            let WriteItem { key, src, done } = write;
            match space.and_then(|(server, space)| Ok((payload(src, &space)?, server, space))) {
                Ok((from, server, space)) => {
                    jobs.extend(self.put(key, from, &space, deadline, done).map(|job| (server, job)));
                }
                Err(error) => done(Err(error)),
            }
        }
        self.submit(jobs);
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.everyone().remove(keys, done);
    }

    fn part(&self, key: &BlockKey) -> usize {
        self.shared.places.of(key)
    }

    /// A server tracks recency by the reads that reach it.
    fn touch(&self, _keys: &[BlockKey]) {}

    /// The blocks that this client knows; the servers may hold more or fewer.
    fn usage(&self) -> TierUsage {
        self.shared.beliefs.known.lock().usage()
    }

    fn servers(&self) -> Vec<TierServer> {
        self.servers.iter().map(|server| server.describe()).collect()
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        self.shared.beliefs.known.lock().present_from(namespace, from)
    }

    fn drain(&self, deadline: Instant) -> bool {
        let mut under_way = self.shared.under_way.lock();
        while *under_way > 0 {
            if self.shared.at_rest.wait_until(&mut under_way, deadline).timed_out() {
                return *under_way == 0;
            }
        }
        true
    }
}

impl RemoteTier {
    /// Makes the request for a block.
    fn get(
        &self,
        key: BlockKey,
        into: IoBuf,
        space: &Space,
        sure: bool,
        deadline: Instant,
        done: Done<Fetched>,
    ) -> Job {
        self.shared.begun();
        let (all, bytes) = (self.everyone(), space.block_bytes() as u64);
        let removals = all.shared.beliefs.removals();
        let done = move |outcome: Result<()>| {
            let outcome = match outcome {
                Ok(()) => Ok(Fetched::Whole),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(Fetched::Miss),
                Err(error) => Err(error),
            };
            match &outcome {
                Ok(Fetched::Whole) => all.shared.beliefs.note_present(key, bytes, removals),
                Ok(Fetched::Miss) => all.shared.beliefs.note_absent(key),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::warn!(%key, %error, "a corrupt remote block is removed");
                    all.remove(vec![key], Box::new(|_| {}));
                }
                Err(_) => {}
            }
            done(outcome);
            all.shared.ended();
        };
        Job { deadline, what: What::Get { key, into, sure, done: Box::new(done) } }
    }

    /// Makes the request that stores a block; `None` if the write completes with another one, or here.
    fn put(
        &self,
        key: BlockKey,
        from: IoBuf,
        space: &Space,
        deadline: Instant,
        done: Done<Written>,
    ) -> Option<Job> {
        let entered = self.shared.beliefs.writing.lock().enter(key, done)?;
        let done = match entered {
            Ok(done) => done,
            Err((done, error)) => {
                drop(from);
                done(Err(error));
                return None;
            }
        };
        self.shared.begun();
        let (shared, bytes) = (Arc::clone(&self.shared), space.block_bytes() as u64);
        let done = move |outcome: Result<Written>| {
            if outcome.is_ok() && shared.spaces.lock().is_open(&key) {
                shared.beliefs.known.lock().note(key, true, bytes);
            }
            let waiting = shared.beliefs.writing.lock().written(&key);
            let rest = outcome.clone().map(|_| Written::AlreadyThere);
            done(outcome);
            waiting.into_iter().for_each(|done| done(rest.clone()));
            shared.ended();
        };
        Some(Job { deadline, what: What::Put { key, from, done: Box::new(done) } })
    }
}

impl fmt::Debug for RemoteTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteTier").field("servers", &self.shared.config.servers).finish_non_exhaustive()
    }
}

impl Drop for RemoteTier {
    fn drop(&mut self) {
        // An InfiniStore server does not survive a client that disconnects in the middle of a value.
        self.drain(Instant::now() + self.shared.config.timeout);
        self.shared.stopping.store(true, Ordering::Release);
        for server in &*self.servers {
            server.stop();
        }
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

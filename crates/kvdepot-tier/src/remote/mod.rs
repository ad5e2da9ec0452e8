//! Memory pools of other machines, over the wire door: kvdepot's own, or InfiniStore's.
//!
//! A block lives at one of the servers ([`place`]). Each server has its own health: while it is away its blocks are
//! misses at once, and nothing waits for it (P2), so this tier needs no circuit breaker around it. Connections are
//! shared by all requests; answers come in any order, straight into their slots, and are verified (P1).

mod config;
mod connect;
mod infini;
mod job;
mod known;
mod lookup;
mod own;
mod pending;
mod place;
mod receive;
mod sending;
mod server;
mod socket;
mod spaces;
mod tell;
mod tls;
mod value;
mod writing;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use kvdepot_core::limits::{BATCH_HASHES_MAX, REMOTE_TICK_MS};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::{IoBuf, SlotBuf};
use parking_lot::{Condvar, Mutex};

pub use config::{RemoteConfig, RemoteProtocol};
pub use tls::RemoteTls;

use crate::{Done, Presence, Tier, TierServer, TierUsage, Written};
use job::{Job, What};
use known::Known;
use lookup::{Addresses, Lookup};
use place::Places;
use server::{Health, Server};
use spaces::{Space, Spaces};
use writing::Writing;

/// What the tier, its servers and their connections share.
#[derive(Debug)]
struct Shared {
    config: RemoteConfig,
    places: Places,
    spaces: Mutex<Spaces>,
    known: Mutex<Known>,
    writing: Mutex<Writing>,
    /// Operations whose `done` was not called yet.
    under_way: Mutex<usize>,
    at_rest: Condvar,
    stopping: AtomicBool,
}

impl Shared {
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn spaces(&self) -> Vec<Space> {
        self.spaces.lock().all()
    }

    /// Nothing is certain any more of what this server holds.
    fn forget_server(&self, address: &str) {
        let Some(index) = self.config.servers.iter().position(|server| server == address) else { return };
        self.known.lock().forget_if(|key| self.places.of(key) == index);
    }

    fn begun(&self) {
        *self.under_way.lock() += 1;
    }

    fn ended(&self) {
        let mut under_way = self.under_way.lock();
        *under_way -= 1;
        if *under_way == 0 {
            self.at_rest.notify_all();
        }
    }
}

/// Runs an interrupted system call again.
fn again<T>(mut call: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Blocks at remote servers.
pub struct RemoteTier {
    shared: Arc<Shared>,
    servers: Vec<Arc<Server>>,
    threads: Vec<JoinHandle<()>>,
}

impl RemoteTier {
    /// Starts to connect in the background: servers need not be there yet.
    pub fn open(config: RemoteConfig) -> Result<Self> {
        Self::start(config, &lookup::of_the_system())
    }

    /// As [`RemoteTier::open`], with `lookup` to find the addresses of servers that are named `host:port` without an
    /// address. It may hang.
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
            known: Mutex::new(Known::new(config.present_ttl, config.absent_ttl)),
            writing: Mutex::default(),
            under_way: Mutex::new(0),
            at_rest: Condvar::new(),
            stopping: AtomicBool::new(false),
            config,
        });
        let servers: Vec<Arc<Server>> = shared
            .config
            .servers
            .iter()
            .map(|address| {
                let addresses = Addresses::new(Arc::clone(lookup));
                Arc::new(Server::new(address.clone(), addresses, Arc::clone(&shared)))
            })
            .collect();
        let mut tier = Self { shared, servers, threads: Vec::new() };
        for server in &tier.servers {
            tier.threads.extend(server::spawn(server)?);
        }
        let (shared, servers) = (Arc::clone(&tier.shared), tier.servers.clone());
        let timer = std::thread::Builder::new().name("kvdepot-remote-t".to_owned());
        let timer = timer.spawn(move || watch_deadlines(&shared, &servers));
        tier.threads.push(timer.map_err(|e| Error::io("cannot start a thread", e))?);
        Ok(tier)
    }

    fn server(&self, key: &BlockKey) -> &Arc<Server> {
        &self.servers[self.shared.places.of(key)]
    }

    /// Checks what can be told without the server: a deadline ahead, an open namespace, a slot that is large enough.
    fn admit(&self, key: &BlockKey, slot: SlotBuf, deadline: Instant) -> Result<(IoBuf, Space)> {
        in_time(deadline)?;
        let space = self.shared.spaces.lock().of(key)?;
        let slot_bytes = slot.len();
        let buf = IoBuf::payload(slot, space.block_bytes()).ok_or_else(|| {
            Error::new(ErrorKind::Config, "a slot is smaller than its block").with("slot_bytes", slot_bytes)
        })?;
        Ok((buf, space))
    }
}

fn in_time(deadline: Instant) -> Result<()> {
    if deadline > Instant::now() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Timeout, "the deadline had passed when the call came"))
}

/// Fails what is late, while anything is under way.
fn watch_deadlines(shared: &Shared, servers: &[Arc<Server>]) {
    while !shared.is_stopping() {
        std::thread::park_timeout(Duration::from_millis(REMOTE_TICK_MS));
        if *shared.under_way.lock() > 0 {
            let now = Instant::now();
            servers.iter().for_each(|server| server.expire(now));
        }
    }
}

impl Tier for RemoteTier {
    fn name(&self) -> &str {
        "remote"
    }

    /// Asks every server that is there; those that are not are told when they come back.
    fn open_namespace(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        Ok(self.open_everywhere(spec, at_least))
    }

    fn advance_epoch(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        self.advance_everywhere(spec, at_least)
    }

    fn close_namespace(&self, root: NamespaceId) {
        let closed = self.shared.spaces.lock().close(root);
        if let Some(id) = closed {
            self.shared.known.lock().forget_namespace(id);
        }
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        let healths: Vec<Health> = self.servers.iter().map(|server| server.health()).collect();
        let now = Instant::now();
        let writing = self.shared.writing.lock();
        let spaces = self.shared.spaces.lock();
        let known = self.shared.known.lock();
        out.clear();
        out.extend(keys.iter().map(|key| {
            if healths[self.shared.places.of(key)] == Health::Down
                || writing.is_leaving(key)
                || !spaces.is_open(key)
            {
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

    fn read(&self, key: BlockKey, dst: SlotBuf, deadline: Instant, done: Done<()>) {
        let (into, space) = match self.admit(&key, dst, deadline) {
            Ok(admitted) => admitted,
            Err(error) => return done(Err(error)),
        };
        if self.shared.writing.lock().holds(&key) {
            let error =
                Error::new(ErrorKind::NotFound, "the block is being written or removed").with("key", key);
            drop(into);
            return done(Err(error));
        }
        self.shared.begun();
        let sure = self.shared.known.lock().presence(&key, Instant::now()) == Presence::Present;
        let (shared, server) = (Arc::clone(&self.shared), Arc::clone(self.server(&key)));
        let bytes = space.block_bytes() as u64;
        let done = move |outcome: Result<()>| {
            match &outcome {
                Ok(()) => shared.known.lock().note(key, true, bytes),
                Err(error) if error.kind() == ErrorKind::NotFound => shared.known.lock().note(key, false, 0),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::warn!(%key, %error, "a corrupt remote block is removed");
                    tell::remove(&shared, &server, key);
                }
                Err(_) => {}
            }
            done(outcome);
            shared.ended();
        };
        let what = What::Get { key, into, sure, done: Box::new(done) };
        self.server(&key).submit(Job { deadline, what });
    }

    fn write(&self, key: BlockKey, src: SlotBuf, deadline: Instant, done: Done<Written>) {
        let (from, space) = match self.admit(&key, src, deadline) {
            Ok(admitted) => admitted,
            Err(error) => return done(Err(error)),
        };
        let Some(done) = self.shared.writing.lock().enter(key, done) else { return };
        let done = match done {
            Ok(done) => done,
            Err((done, error)) => {
                drop(from);
                return done(Err(error));
            }
        };
        self.shared.begun();
        let shared = Arc::clone(&self.shared);
        let bytes = space.block_bytes() as u64;
        let done = move |outcome: Result<Written>| {
            if outcome.is_ok() && shared.spaces.lock().is_open(&key) {
                shared.known.lock().note(key, true, bytes);
            }
            let waiting = shared.writing.lock().written(&key);
            let rest = outcome.clone().map(|_| Written::AlreadyThere);
            done(outcome);
            waiting.into_iter().for_each(|done| done(rest.clone()));
            shared.ended();
        };
        let what = What::Put { key, from, done: Box::new(done) };
        self.server(&key).submit(Job { deadline, what });
    }

    fn remove(&self, key: BlockKey) {
        tell::remove(&self.shared, self.server(&key), key);
    }

    /// A server's own recency comes from the reads that reach it.
    fn touch(&self, _keys: &[BlockKey]) {}

    /// What this client knows of; the servers may hold more, and less.
    fn usage(&self) -> TierUsage {
        self.shared.known.lock().usage()
    }

    fn servers(&self) -> Vec<TierServer> {
        self.servers.iter().map(|server| server.describe()).collect()
    }

    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        self.shared.known.lock().present(namespace)
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
    /// Asks each server about its keys, all at once, and counts from the front.
    fn begin_probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        let mut answers = Vec::new();
        self.peek(&keys, &mut answers);
        let mut asks: HashMap<(usize, NamespaceId), Vec<BlockKey>> = HashMap::new();
        for (key, answer) in keys.iter().zip(&answers) {
            match answer {
                Presence::Present => {}
                // Nothing behind it counts.
                Presence::Absent => break,
                Presence::Unknown => {
                    asks.entry((self.shared.places.of(key), key.namespace)).or_default().push(*key);
                }
            }
        }
        let asks: Vec<(usize, Vec<BlockKey>)> = asks
            .into_iter()
            .flat_map(|((server, _), keys)| {
                keys.chunks(BATCH_HASHES_MAX).map(|some| (server, some.to_vec())).collect::<Vec<_>>()
            })
            .collect();
        self.shared.begun();
        let there = keys.iter().zip(answers).filter(|(_, answer)| *answer == Presence::Present);
        let there = there.map(|(key, _)| *key).collect();
        let probe = Arc::new(tell::Probe::new(Arc::clone(&self.shared), keys, there, asks.len(), done));
        if asks.is_empty() {
            return probe.end();
        }
        for (server, keys) in asks {
            let (probe, asked) = (Arc::clone(&probe), keys.clone());
            let done = move |outcome: Result<Vec<bool>>| probe.answered(&asked, outcome);
            self.servers[server].submit(Job { deadline, what: What::Exists { keys, done: Box::new(done) } });
        }
    }
}

impl fmt::Debug for RemoteTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteTier").field("servers", &self.shared.config.servers).finish_non_exhaustive()
    }
}

impl Drop for RemoteTier {
    fn drop(&mut self) {
        // A server of InfiniStore's does not survive a client that leaves amid a value.
        self.drain(Instant::now() + self.shared.config.timeout);
        self.shared.stopping.store(true, Ordering::Release);
        for server in &self.servers {
            server.stop();
        }
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

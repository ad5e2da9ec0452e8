//! All decisions of a depot, as one state machine: `step(now, event) -> effects`.
//!
//! It reads no clock, takes no lock, starts no thread and calls no tier, so it can be model-tested and simulated. No
//! step examines more than a bounded number of blocks: longer work ends with a [`Job`] to continue.
//!
//! ```text
//!   claims, loads ──▶ flow ──▶ pool            arrows: who looks at whom
//!         └─────────────┴──▶ catalog
//! ```
//!
//! - *catalog*: namespaces and their epochs; *users*: who uses which.
//! - *pool*: slots, their space, leases, the order of eviction, and what every byte counts as.
//! - *flow*: for each tier, queues of reads and writes and the order of what happens to one key.
//! - *claims* and *loads*: what requests still need, woken by the arrival of a block or by room.
//!
//! A module returns what happened to this file, which notifies the modules above it.

mod arrivals;
mod batch;
pub(crate) mod budget;
mod catalog;
mod claims;
mod counters;
mod dumps;
mod event;
mod fetches;
mod fills;
mod flaw;
mod flow;
mod forgetting;
mod handover;
mod held;
mod index;
mod labels;
mod loads;
mod names;
mod outcomes;
mod owed;
mod pace;
pub(crate) mod placement;
mod pool;
pub mod probe;
mod proofs;
mod queue;
mod records;
mod removal;
mod requests;
mod rooms;
mod slots;
#[cfg(test)]
mod step_claim_tests;
#[cfg(test)]
mod step_load_tests;
#[cfg(test)]
mod step_search_tests;
#[cfg(test)]
mod step_tests;
pub(crate) mod tiers;
mod users;
mod uses;

use hashbrown::HashMap;

use crate::error::Result;
use crate::key::BlockKey;
use crate::limits::NAMESPACES_MAX;
use crate::misses::{Fate, Gone};
use crate::regions::RegionGauge;

use arrivals::Arrivals;
use catalog::Catalog;
use claims::Claims;
use flaw::Flaws;
use flow::Flow;
use forgetting::Sweep;
use loads::Loads;
use names::SpaceId;
use pool::{GoneHere, Pool};
use removal::Removal;
use rooms::Rooms;
use users::Users;

pub use batch::{Batch, REMOVE_BLOCKS, REQUEST_BLOCKS};
pub use catalog::Namespace;
pub use counters::Counters;
pub use event::*;
pub use flaw::Flaw;
pub use held::{HeldBy, HeldFrom, Hold};
pub use owed::PartOf;
pub use pace::Pace;
pub use placement::{Placement, WriteWhen};
pub use pool::{GROW_BYTES, Held, PoolConfig};
pub use records::{Adopt, Handed, HandedState, Proof, Whole};

/// Gauges of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Size of the pool in bytes.
    pub pool_bytes: u64,
    /// Bytes that hold no block.
    pub pool_free_bytes: u64,
    /// Bytes by use.
    pub held: Held,
    /// Bytes that clients are filling that have requested nothing for a while; dumps of other clients do not wait for
    /// them.
    pub stopped_bytes: u64,
    /// Blocks that lookups can find, and those being fetched.
    pub pool_blocks: usize,
    /// Sealed blocks that are not yet in every tier that should have them.
    pub dirty_blocks: u64,
    /// Known namespaces.
    pub namespaces: usize,
    /// Epochs of namespaces of which something is left, including the current ones.
    pub spaces: usize,
    /// Claims that have not ended.
    pub claims_open: usize,
    /// Claims that wait for space.
    pub claims_queued: usize,
    /// Loads that have not been answered.
    pub loads_open: usize,
    /// Reads that have not completed.
    pub reads_queued: usize,
    /// Writes that have not completed.
    pub writes_queued: usize,
    /// Removals that a tier failed and that are retried.
    pub removals_owed: usize,
    /// Namespaces that are closed in a tier, or in a part of one, because it owes too many removals.
    pub removals_closed: usize,
    /// Blocks evicted from the pool.
    pub evicted: u64,
    /// Evicted blocks that a tier should have got before, but did not.
    pub evicted_unwritten: u64,
}

/// The state and the decisions of a depot.
#[derive(Debug)]
pub struct Machine {
    catalog: Catalog,
    pool: Pool,
    flow: Flow,
    claims: Claims,
    loads: Loads,
    /// Blocks that not all of their waiters know of.
    arrivals: Arrivals,
    counters: Counters,
    users: Users,
    /// Maximum number of namespaces, and of those that one owner may use.
    namespaces_max: usize,
    removals: HashMap<Token, Removal>,
    /// Slots that must be checked for blocks of spaces that can no longer be requested, and the position of the check.
    sweep: Sweep,
    /// Spaces that were left and that may not be named any more.
    left: Vec<SpaceId>,
    /// Whether the depot is shutting down.
    ending: bool,
    /// Whether the depot is handing over its pool: nothing new begins.
    frozen: bool,
    now: Nanos,
    pace: Pace,
    flaws: Flaws,
}

impl Machine {
    /// Makes a machine over `tiers` tiers, with an empty pool.
    pub fn new(pool: PoolConfig, tiers: usize) -> Self {
        Self {
            catalog: Catalog::new(tiers == 0),
            pool: Pool::new(pool),
            flow: Flow::new(tiers),
            claims: Claims::default(),
            loads: Loads::default(),
            arrivals: Arrivals::default(),
            counters: Counters::default(),
            users: Users::default(),
            namespaces_max: NAMESPACES_MAX,
            removals: HashMap::new(),
            sweep: Sweep::default(),
            left: Vec::new(),
            ending: false,
            frozen: false,
            now: 0,
            pace: Pace::default(),
            flaws: Flaws::default(),
        }
    }

    /// Makes failed removals count for each part of a tier, such as a server; by default a tier is one part. Call it
    /// before the first event.
    #[must_use]
    pub fn with_parts(mut self, part_of: PartOf) -> Self {
        self.flow.parts = owed::Parts(Some(part_of));
        self
    }

    /// Divides the pool into regions of these sizes, one after another: multiples of `BLOCK_ALIGN_BYTES`, in total the
    /// maximum size of the pool. Call it before the first event.
    #[must_use]
    pub fn with_regions(mut self, sizes: &[u64]) -> Self {
        self.pool.divide(sizes);
        self
    }

    /// Cuts work into smaller pieces, so that a simulation sees what happens between them.
    #[cfg(any(test, feature = "model"))]
    pub const fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
        self.flow.pace = pace;
        self.claims.pace = pace;
        self.loads.pace = pace;
    }

    /// Plants a mistake.
    #[cfg(any(test, feature = "model"))]
    pub const fn set_flaw(&mut self, flaw: Flaw) {
        self.flaws = Flaws::of(flaw);
        self.flow.flaws = self.flaws;
        self.flow.budgets.flaws = self.flaws;
        self.claims.flaws = self.flaws;
        self.loads.flaws = self.flaws;
        self.pool.flaws = self.flaws;
        self.catalog.flaws = self.flaws;
    }

    /// Returns the number of leases granted so far: later leases have larger numbers.
    #[cfg(any(test, feature = "model"))]
    pub const fn leases_granted(&self) -> u64 {
        self.pool.leases_granted()
    }

    /// Processes an event, and adds its effects to `out`.
    pub fn step(&mut self, now: Nanos, event: Event, out: &mut Effects) {
        self.now = self.now.max(now);
        self.flow.now = self.now;
        self.pool.begin_step(self.pace.eviction_looks);
        self.pool.set_now(u32::try_from(self.now / 1_000_000_000).unwrap_or(u32::MAX));
        match event {
            Event::Request { token, owner, request } => {
                if let Err(error) = self.request(token, owner, request, out) {
                    out.replies.push((token, Err(error)));
                }
            }
            Event::Expire { token } => self.expire(token, out),
            Event::OwnerEnded { owner } => self.owner_ended(owner, out),
            Event::ReadEnded { tier, slot, outcome } => self.read_ended(tier, slot, &outcome, out),
            Event::WriteEnded { tier, slot, outcome } => {
                let Self { flow, pool, catalog, counters, .. } = self;
                flow.write_ended(pool, catalog, counters, tier, slot, &outcome, out);
            }
            Event::Removed { id, tier, key, outcome } => {
                if let Err(error) = &outcome {
                    self.counters.failed("remove", error);
                }
                if let Some(key) = self.catalog.any_pool_key(&key) {
                    let Self { flow, pool, catalog, .. } = self;
                    flow.removal_ended(pool, catalog, tier, id, key, &outcome, out);
                }
            }
            Event::Located { ask, locations } => self.located(ask, locations, out),
            Event::Probed { ask, outcome } => self.probed(ask, outcome, out),
            Event::TierForgot { tier, keys, lost } => self.tier_forgot(tier, &keys, lost, out),
            Event::Continue(job) => self.go_on(job, out),
            Event::Populated { upto_bytes } => self.pool.populated(upto_bytes),
            Event::Ending => {
                self.ending = true;
                for token in self.flow.end_drains() {
                    out.replies.push((token, Ok(Reply::Drained(false))));
                }
            }
            Event::Freeze => self.frozen = true,
            Event::Thaw => {
                (self.frozen, self.ending) = (false, false);
                // A load whose turn came in the meantime was answered without passing the turn on.
                self.loads.retry_oldest(out);
            }
            Event::Adopt { pool_bytes, slots } => {
                self.pool.enlarge_to(pool_bytes);
                slots.iter().for_each(|slot| self.adopt(slot));
            }
            Event::Tick => {
                self.flow.tick(&self.catalog, out);
                self.pool.look_who_stopped();
                let (claims, mut rooms) = split(self);
                claims.tick(&mut rooms, now, out);
            }
        }
        self.follow_up(out);
    }

    /// Does what may follow any event: space for waiting requests, commands, and replies to completed removals and
    /// drains.
    fn follow_up(&mut self, out: &mut Effects) {
        if !self.frozen {
            self.go_on_with_room(out);
        }
        self.tell_uses(out);
        if !self.frozen {
            self.flow.demote(&mut self.pool, &mut self.counters);
            self.flow.emit(&mut self.pool, &self.catalog, &mut self.counters, out);
            if self.pool.has_room_come() {
                // A write that a tier does not get keeps its block no longer.
                out.again.push(Job::Emit);
            }
        }
        for (token, failed) in self.flow.take_removed() {
            self.removal_ended(token, failed, out);
        }
        for token in self.flow.take_drained() {
            out.replies.push((token, Ok(Reply::Drained(true))));
        }
        self.tell_visible(&mut out.visible);
        self.tell_gone(&mut out.gone);
        self.prove(&mut out.proofs);
        self.forget_spaces();
    }

    /// Tells which blocks lookups find from now on, or no longer find, by the names that they know.
    fn tell_visible(&mut self, out: &mut Vec<(BlockKey, bool)>) {
        let mut block_key = self.catalog.block_keys();
        out.extend(self.pool.take_changes().map(|(key, visible)| (block_key(&key), visible)));
    }

    /// Tells what went in this step, by the names that lookups know.
    fn tell_gone(&mut self, out: &mut Vec<Gone>) {
        let mut block_key = self.catalog.block_keys();
        out.reserve(self.pool.gone.len());
        for gone in self.pool.gone.drain(..) {
            let GoneHere { key, mut fate, tier, kept_s } = gone;
            let mut name = block_key(&key);
            if fate == Fate::Reset {
                match self.catalog.root(key.space) {
                    // Whoever asks has another epoch's key.
                    Some((root, true)) => name.namespace = root,
                    _ => fate = Fate::Forgotten,
                }
            }
            out.push(Gone { key: name, fate, tier, kept_s });
        }
    }

    /// Who waits for room, or for its turn, gets it.
    fn go_on_with_room(&mut self, out: &mut Effects) {
        let (room, turn) = (self.pool.take_room(), self.claims.take_turn());
        if room || turn {
            let Self { catalog, pool, flow, counters, loads, claims, .. } = self;
            let mut rooms = Rooms { catalog, pool, flow, counters };
            if room {
                loads.room_came(&mut rooms, out);
            }
            claims.room_came(&mut rooms, out);
        }
    }

    /// Expires a request.
    fn expire(&mut self, token: Token, out: &mut Effects) {
        if self.claims.expire_waiter(token, out) {
            return;
        }
        if let Some(removal) = self.removals.remove(&token) {
            out.replies.push((token, Ok(removal.reply())));
            return;
        }
        let Self { catalog, pool, flow, counters, loads, .. } = self;
        let mut rooms = Rooms { catalog, pool, flow, counters };
        if !loads.expire(&mut rooms, token, out) && self.flow.forget_token(token) {
            out.replies.push((token, Ok(Reply::Drained(false))));
        }
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
        let Namespace { id, epoch, spec, .. } = self.catalog.get(handle)?.clone();
        let opened = Opened { handle, id, epoch, spec };
        out.namespaces.push(opened.clone());
        Ok(Reply::Namespace(opened))
    }

    fn go_on(&mut self, job: Job, out: &mut Effects) {
        match job {
            Job::Claim(id) => {
                let (claims, mut rooms) = split(self);
                claims.go_on(&mut rooms, id, out);
            }
            // A request that waits while the pool is handed over is answered with what is known.
            Job::Load(token) if self.frozen => self.expire(token, out),
            Job::Load(token) => {
                let Self { catalog, pool, flow, counters, loads, .. } = self;
                loads.go_on(&mut Rooms { catalog, pool, flow, counters }, token, out);
            }
            Job::Sweep => self.sweep(out),
            Job::EndOwner(owner) => {
                if !self.pool.end_owner(owner, self.pace.owner_leases).1 {
                    out.again.push(Job::EndOwner(owner));
                }
            }
            Job::EndClaims(owner) => {
                let (claims, mut rooms) = split(self);
                claims.release_ended(&mut rooms, owner, out);
            }
            Job::EndLoads(owner) => self.loads.close_ended(&mut self.pool, owner, out),
            Job::Arrival(arrival) => self.tell_waiters(arrival, out),
            // Every step emits.
            Job::Emit => {}
            Job::Miss { tier, slot } => self.read_ended(tier, slot, &Ok(Fetched::Miss), out),
        }
    }

    /// Ends all leases, claims and loads of an owner (P4).
    fn owner_ended(&mut self, owner: Owner, out: &mut Effects) {
        self.users.end_owner(owner);
        self.pool.forget_near(owner);
        self.loads.end_owner(&mut self.pool, owner, out);
        let (claims, mut rooms) = split(self);
        let claims = claims.end_owner(&mut rooms, owner, out);
        let (ended, all) = self.pool.end_owner(owner, self.pace.owner_leases);
        if !all {
            out.again.push(Job::EndOwner(owner));
        }
        self.counters.owners_ended_holding += u64::from(claims || ended > 0);
    }

    fn located(&mut self, ask: Ask, locations: Vec<Location>, out: &mut Effects) {
        let Self { catalog, pool, flow, counters, loads, claims, .. } = self;
        let mut rooms = Rooms { catalog, pool, flow, counters };
        match ask {
            Ask::Load(token) if self.frozen => self.expire(token, out),
            Ask::Load(token) => loads.located(&mut rooms, token, locations, out),
            Ask::Claim(id, part) => claims.located(&mut rooms, id, part, &locations, out),
        }
    }

    fn probed(&mut self, ask: Ask, outcome: Result<usize>, out: &mut Effects) {
        let count = outcome.inspect_err(|error| self.counters.failed("probe", error)).ok();
        let (claims, mut rooms) = split(self);
        if let Ask::Claim(id, run) = ask {
            claims.probed(&mut rooms, id, run, count, out);
        }
    }

    /// Returns a namespace by its number.
    pub fn namespace(&self, handle: NamespaceHandle) -> Result<&Namespace> {
        self.catalog.get(handle)
    }

    /// Returns the counters.
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the gauges of each region of the pool, in the order of the pool's bytes.
    pub fn regions(&self) -> Vec<RegionGauge> {
        self.pool.region_gauges()
    }

    /// Blocks and bytes that the pool holds of each of these namespaces, those among them that are on their way. As many
    /// looks as there are numbers.
    pub fn namespaces_hold(&self, handles: &[NamespaceHandle]) -> Vec<(u64, u64)> {
        let held = |handle: &NamespaceHandle| {
            let namespace = self.catalog.get(*handle).ok()?;
            let blocks = u64::from(self.pool.uses.slots(namespace.space));
            Some((blocks, blocks * namespace.slot_bytes()))
        };
        handles.iter().map(|handle| held(handle).unwrap_or_default()).collect()
    }

    /// What is held now.
    pub fn gauges(&self) -> Gauges {
        Gauges {
            pool_bytes: self.pool.bytes(),
            pool_free_bytes: self.pool.free_bytes(),
            held: self.pool.held(),
            stopped_bytes: self.pool.stopped_bytes(),
            pool_blocks: self.pool.blocks(),
            dirty_blocks: self.pool.dirty_blocks(),
            namespaces: self.catalog.len(),
            spaces: self.catalog.spaces_len(),
            claims_open: self.claims.len(),
            claims_queued: self.claims.queued(),
            loads_open: self.loads.len(),
            reads_queued: self.flow.reads_left(),
            writes_queued: self.flow.writes_left(),
            removals_owed: self.flow.removals_owed(),
            removals_closed: self.flow.places_closed(),
            evicted: self.pool.evicted(),
            evicted_unwritten: self.pool.evicted_unwritten(),
        }
    }

    /// Checks the invariants after a step, by examining every slot: for tests. Returns the first violation.
    #[cfg(any(test, feature = "model"))]
    pub fn check(&self) -> std::result::Result<(), String> {
        let (held, used) = self.pool.recount();
        if held != self.pool.held() {
            return Err(format!("counted {:?}, but the slots hold {held:?}", self.pool.held()));
        }
        if used + self.pool.free_bytes() != self.pool.bytes() {
            return Err(format!(
                "{used} bytes used and {} free of {}",
                self.pool.free_bytes(),
                self.pool.bytes()
            ));
        }
        for (region, (gauge, used)) in
            self.pool.region_gauges().iter().zip(self.pool.recount_regions()).enumerate()
        {
            if used + gauge.free_bytes != gauge.bytes {
                return Err(format!("region {region}: the slots hold {used} bytes, but it is {gauge:?}"));
            }
        }
        self.check_spaces()
    }
}

/// Returns the claims, and the other modules' state that they need.
const fn split(machine: &mut Machine) -> (&mut Claims, Rooms<'_>) {
    let Machine { catalog, pool, flow, counters, claims, .. } = machine;
    (claims, Rooms { catalog, pool, flow, counters })
}

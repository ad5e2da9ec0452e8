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
//! None of these modules knows `Machine`, which consists of them. The files with its steps do: *step* takes an event,
//! and passes it on, also by way of *requests*, *dumps*, *fetches*, *demotion*, *arrive*, *remove*, *forgetting*, *handover* and
//! *prove*. A module returns what happened to the step that called it, which notifies the modules above it.

mod arrivals;
mod arrive;
mod batch;
pub(crate) mod budget;
mod catalog;
#[cfg(any(test, feature = "model"))]
mod check;
mod claims;
mod configure;
mod counters;
mod demotion;
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
mod prove;
mod queue;
mod records;
mod removal;
mod remove;
mod requests;
mod rooms;
mod slots;
mod step;
#[cfg(test)]
mod step_claim_tests;
#[cfg(test)]
mod step_load_tests;
#[cfg(test)]
mod step_search_tests;
#[cfg(test)]
mod step_tests;
mod sweep;
pub(crate) mod tiers;
mod users;
mod uses;

use hashbrown::HashMap;

use crate::error::Result;
use crate::limits::NAMESPACES_MAX;
use crate::regions::RegionGauge;

use arrivals::Arrivals;
use catalog::Catalog;
use claims::Claims;
use demotion::Demotions;
use flaw::Flaws;
use flow::Flow;
use loads::Loads;
use names::SpaceId;
use pool::Pool;
use removal::Removal;
use rooms::Rooms;
use sweep::Sweep;
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
pub use pool::{EVICT_AGE_BOUNDS_S, EvictAges, GROW_BYTES, Held, LeasedInPlace, PoolConfig};
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
    /// Blocks that a tier has leased in its own memory.
    pub in_place: LeasedInPlace,
    /// Blocks that lookups can find, and those being fetched.
    pub pool_blocks: usize,
    /// Sealed blocks of low priority that nobody has used.
    pub low_priority_blocks: usize,
    /// Sealed blocks of high priority.
    pub high_priority_blocks: usize,
    /// Sealed blocks that are not yet in every tier that should have them.
    pub dirty_blocks: u64,
    /// Known namespaces.
    pub namespaces: usize,
    /// Those about which a tier has not answered since they were opened, so that they have the pool only.
    pub namespaces_provisional: usize,
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
    /// Reads and leases that have not ended long after their deadline, and count as failed.
    pub reads_hung: usize,
    /// The same for writes.
    pub writes_hung: usize,
    /// Blocks that a tier is about to evict and that have not been given to the one below it.
    pub demotions_queued: usize,
    /// Removals that a tier failed and that are retried.
    pub removals_owed: usize,
    /// Namespaces that are closed in a tier, or in a part of one, because it owes too many removals.
    pub removals_closed: usize,
    /// Blocks evicted from the pool.
    pub evicted: u64,
    /// Evicted blocks that a tier should have got before, but did not.
    pub evicted_unwritten: u64,
    /// Evicted blocks by the time that they were in the pool, if that is known.
    pub evict_ages: EvictAges,
    /// Leases of clients.
    pub leases: u64,
    /// Age of the oldest lease in seconds, about; 0 without leases.
    pub lease_age_max_s: u32,
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
    demotions: Demotions,
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
            demotions: Demotions::default(),
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

    /// Returns the number of leases granted so far: later leases have larger numbers.
    #[cfg(any(test, feature = "model"))]
    pub const fn leases_granted(&self) -> u64 {
        self.pool.leases_granted()
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

    /// Returns whether the pool keeps blocks that tiers have, or need not get.
    pub const fn keeps(&self) -> bool {
        self.pool.keeps()
    }

    /// What is held now.
    pub fn gauges(&self) -> Gauges {
        let (leases, lease_age_max_s) = self.pool.lease_gauges();
        let (reads_hung, writes_hung) = self.flow.hung();
        let (low_priority_blocks, high_priority_blocks) = self.pool.blocks_by_priority();
        Gauges {
            pool_bytes: self.pool.bytes(),
            pool_free_bytes: self.pool.free_bytes(),
            held: self.pool.held(),
            stopped_bytes: self.pool.stopped_bytes(),
            in_place: self.pool.leased_in_place(),
            pool_blocks: self.pool.blocks(),
            low_priority_blocks,
            high_priority_blocks,
            dirty_blocks: self.pool.dirty_blocks(),
            namespaces: self.catalog.len(),
            namespaces_provisional: self.catalog.provisional_len(),
            spaces: self.catalog.spaces_len(),
            claims_open: self.claims.len(),
            claims_queued: self.claims.queued(),
            loads_open: self.loads.len(),
            reads_queued: self.flow.reads_left(),
            writes_queued: self.flow.writes_left(),
            reads_hung,
            writes_hung,
            demotions_queued: self.demotions.len(),
            removals_owed: self.flow.removals_owed(),
            removals_closed: self.flow.places_closed(),
            evicted: self.pool.evicted(),
            evicted_unwritten: self.pool.evicted_unwritten(),
            evict_ages: self.pool.evict_ages(),
            leases,
            lease_age_max_s,
        }
    }
}

/// Returns the claims, and the other modules' state that they need.
const fn split(machine: &mut Machine) -> (&mut Claims, Rooms<'_>) {
    let Machine { catalog, pool, flow, counters, claims, .. } = machine;
    (claims, Rooms { catalog, pool, flow, counters })
}

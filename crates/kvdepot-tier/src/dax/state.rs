//! What all calls of a DAX tier share: the medium, and what is known about it, under one lock. No I/O under the lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use hashbrown::hash_map::Entry;
use hashbrown::{HashMap, HashSet};
use kvdepot_core::limits::TIER_EVENTS_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::mapped::Medium;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::ahead::{Ahead, Extent};
use super::clock::Clock;
use super::config::DaxConfig;
use super::epochs::Epochs;
use super::later::Removal;
use super::layout::{Geometry, HEADER_BYTES, Header};
use super::owner::Owner;
use super::slots::Slots;
use crate::cooling::{AHEAD, Cooling};
use crate::{Done, TierEvents, Written};

/// A write in flight, and what waits for its end.
#[derive(Default)]
pub(super) struct InFlight {
    /// The writing call, then those that came in the meantime.
    pub(super) dones: Vec<Done<Written>>,
    /// The block was removed in the meantime: it must not be found.
    pub(super) cancelled: bool,
    /// Each of these removals ends when its last reference is dropped.
    pub(super) removals: Vec<Arc<Removal>>,
}

/// An epoch that must be stored before a namespace is opened again.
#[derive(Clone)]
pub(super) struct Wanted {
    pub(super) spec: Arc<NamespaceSpec>,
    pub(super) at_least: u32,
    /// Changes with every request: the end of an earlier request does not open the namespace.
    pub(super) request: u64,
}

/// An open namespace.
pub(super) struct Space {
    pub(super) spec: Arc<NamespaceSpec>,
    pub(super) epoch: u32,
}

#[derive(Default)]
struct Events {
    listener: Option<Weak<dyn TierEvents>>,
    /// If the depot asks which blocks are evicted next.
    cooling: Option<Cooling>,
    evicted: Vec<BlockKey>,
    lost: Vec<BlockKey>,
}

/// The state under the lock.
pub(super) struct State {
    pub(super) slots: Slots,
    /// Open namespaces by the id of their current epoch.
    pub(super) spaces: HashMap<NamespaceId, Space>,
    /// The ids of those, by root.
    pub(super) roots: HashMap<NamespaceId, NamespaceId>,
    pub(super) writing: HashMap<BlockKey, InFlight>,
    /// Removals that end when a slot's headers have been cleared, or could not be.
    waiting: HashMap<u32, Vec<Arc<Removal>>>,
    pub(super) wanted: HashMap<NamespaceId, Wanted>,
    pub(super) requests: u64,
    /// Number of calls for each namespace that open or move it and may still have an effect.
    calls: HashMap<NamespaceId, usize>,
    /// Namespaces that were closed since the last of those calls began, or since the reset that is still to be stored.
    closed: HashSet<NamespaceId>,
    pub(super) is_retrying: bool,
    pub(super) is_stopping: bool,
    events: Events,
}

/// Shared by the tier and its callbacks.
pub(super) struct Shared {
    pub(super) config: DaxConfig,
    pub(super) medium: Arc<dyn Medium>,
    pub(super) owner: Owner,
    pub(super) geometry: Geometry,
    /// Units that may be used.
    pub(super) units_max: u32,
    state: Mutex<State>,
    /// Held while an epoch is written, by one thread at a time. Taken before the state.
    pub(super) epochs: Mutex<Epochs>,
    /// Signalled when the tier closes.
    pub(super) changed: Condvar,
    /// Ends those parts of a restore that are in no queue.
    pub(super) clock: Arc<Clock>,
    /// Maps pages before they are read.
    pub(super) ahead: Ahead,
    /// Whether the listener knows that the medium is lost.
    is_loss_told: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({:?})", self.medium)
    }
}

impl Shared {
    pub(super) fn new(
        config: DaxConfig,
        medium: Arc<dyn Medium>,
        owner: Owner,
        geometry: Geometry,
        units_max: u32,
        slots: Slots,
        epochs: Epochs,
    ) -> Self {
        let extent = |(unit, header): (u32, Header)| {
            (header.generation, Extent { at: geometry.payload_at(unit), bytes: header.bytes as usize })
        };
        let ahead = Ahead::begin(&medium, slots.live().map(extent));
        let state = State {
            slots,
            spaces: HashMap::new(),
            roots: HashMap::new(),
            writing: HashMap::new(),
            waiting: HashMap::new(),
            wanted: HashMap::new(),
            requests: 0,
            calls: HashMap::new(),
            closed: HashSet::new(),
            is_retrying: false,
            is_stopping: false,
            events: Events::default(),
        };
        Self {
            config,
            medium,
            owner,
            geometry,
            units_max,
            state: Mutex::new(state),
            epochs: Mutex::new(epochs),
            changed: Condvar::new(),
            clock: Arc::default(),
            ahead,
            is_loss_told: AtomicBool::new(false),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Makes what was written survive a power loss, unless the configuration says that nobody waits for that. Nothing
    /// counts that was written to a medium that another depot has taken.
    pub(super) fn persist(&self) -> Result<()> {
        if !self.config.async_put || self.medium.is_memory() {
            self.medium.persist()?;
        }
        self.check_owner()
    }

    /// Fails if another depot has opened the medium since.
    pub(super) fn check_owner(&self) -> Result<()> {
        self.owner.check(&*self.medium, &self.geometry)
    }

    /// Clears the headers that may name these slots, so that a later tier does not find what they name. Each slot
    /// separately: one bad page of the medium must not hold up the others.
    pub(super) fn clear(&self, units: &[u32]) -> Vec<Result<()>> {
        let headers: Vec<Vec<u32>> = {
            let state = self.lock();
            units.iter().map(|unit| state.slots.headers(*unit)).collect()
        };
        if headers.iter().all(Vec::is_empty) {
            return vec![Ok(()); units.len()];
        }
        let mut whole = self.check_owner();
        let mut outcomes = Vec::with_capacity(units.len());
        for headers in &headers {
            let mut outcome = whole.clone();
            if whole.is_ok() {
                for unit in headers {
                    let written = self.medium.write(self.geometry.header_at(*unit), &[0; HEADER_BYTES]);
                    outcome = outcome.and(written);
                }
            }
            outcomes.push(outcome);
        }
        if outcomes.iter().any(Result::is_ok) {
            whole = self.persist();
        }
        outcomes.into_iter().map(|outcome| outcome.and_then(|()| whole.clone())).collect()
    }

    /// Clears the headers of leaving slots, and gives their space back.
    pub(super) fn clear_slots(&self, units: &[u32]) -> Vec<Result<()>> {
        let outcomes = self.clear(units);
        let mut ended = Vec::new();
        {
            let mut state = self.lock();
            for (unit, outcome) in units.iter().zip(&outcomes) {
                if outcome.is_ok() {
                    state.slots.cleared(*unit)
                } else {
                    state.slots.not_cleared(*unit)
                }
                ended.extend(state.end_waiting(*unit, outcome));
            }
        }
        outcomes
    }

    /// For slots whose headers nobody got to clear: they are cleared later.
    pub(super) fn put_off(&self, units: &[u32], error: &Error) {
        let mut ended = Vec::new();
        let mut state = self.lock();
        for unit in units {
            state.slots.not_cleared(*unit);
            ended.extend(state.end_waiting(*unit, &Err(error.clone())));
        }
        drop(state);
    }

    /// Retries to clear what could not be cleared.
    pub(super) fn clear_left_over(&self) {
        let units = self.lock().slots.take_uncleared();
        if let Some(error) = self.clear_slots(&units).into_iter().find_map(Result::err) {
            tracing::debug!(%error, "headers of blocks that went are still on the medium");
        }
    }

    pub(super) fn attach(&self, listener: Weak<dyn TierEvents>) {
        let cooling = Cooling::for_listener(&listener);
        let mut state = self.lock();
        (state.events.listener, state.events.cooling) = (Some(listener), cooling);
        drop(state);
        // The medium may have been lost before.
        self.deliver_events();
    }

    fn has_loss_to_tell(&self) -> bool {
        (self.owner.is_lost() || self.medium.is_lost()) && !self.is_loss_told.load(Ordering::Acquire)
    }

    /// Reports collected events to the listener. The caller must not hold the lock.
    pub(super) fn deliver_events(&self) {
        let (evicted, lost, listener) = {
            let mut state = self.lock();
            let events = &mut state.events;
            if events.evicted.is_empty() && events.lost.is_empty() && !self.has_loss_to_tell() {
                return;
            }
            (std::mem::take(&mut events.evicted), std::mem::take(&mut events.lost), events.listener.clone())
        };
        let Some(listener) = listener.as_ref().and_then(Weak::upgrade) else { return };
        if self.has_loss_to_tell() && !self.is_loss_told.swap(true, Ordering::AcqRel) {
            listener.lost_memory();
        }
        if !evicted.is_empty() {
            listener.evicted(&evicted);
            self.tell_cooling(&*listener, evicted.len());
        }
        if !lost.is_empty() {
            listener.lost(&lost);
        }
    }

    /// Reports what is evicted next, after some evictions.
    fn tell_cooling(&self, listener: &dyn TierEvents, evicted: usize) {
        let keys = {
            let state = &mut *self.lock();
            let Some(cooling) = &mut state.events.cooling else { return };
            cooling.evicted(evicted);
            if !cooling.is_due() {
                return;
            }
            let spaces = &state.spaces;
            cooling
                .report(state.slots.coldest().take(AHEAD).filter(|key| spaces.contains_key(&key.namespace)))
        };
        if !keys.is_empty() {
            listener.cooling(&keys);
        }
    }
}

impl State {
    /// Closes a namespace until a new epoch is stored for this request, or for a later one.
    pub(super) fn want(&mut self, spec: &Arc<NamespaceSpec>, at_least: u32, request: u64) {
        let root = spec.root();
        self.take_out(root);
        let new = || Wanted { spec: Arc::clone(spec), at_least, request };
        let wanted = self.wanted.entry(root).or_insert_with(new);
        wanted.at_least = wanted.at_least.max(at_least);
        wanted.request = wanted.request.max(request);
    }

    /// Opens a namespace in the epoch that is stored, unless it was closed meanwhile.
    pub(super) fn open(&mut self, spec: &Arc<NamespaceSpec>, epoch: u32) {
        let (root, id) = (spec.root(), spec.id(epoch));
        if !self.closed.contains(&root) {
            self.roots.insert(root, id);
            self.spaces.insert(id, Space { spec: Arc::clone(spec), epoch });
        }
        self.forget_close(root);
    }

    /// Closes a namespace, also for calls that have not ended.
    pub(super) fn close(&mut self, root: NamespaceId) {
        self.take_out(root);
        self.closed.insert(root);
        self.forget_close(root);
    }

    /// Takes a namespace out of those that are open.
    pub(super) fn take_out(&mut self, root: NamespaceId) {
        if let Some(id) = self.roots.remove(&root) {
            self.spaces.remove(&id);
        }
    }

    /// Notes that a call begins that opens a namespace or moves it.
    pub(super) fn begin_call(&mut self, root: NamespaceId) {
        *self.calls.entry(root).or_default() += 1;
        self.closed.remove(&root);
    }

    /// Notes that such a call has no effect any more.
    pub(super) fn end_call(&mut self, root: NamespaceId) {
        if let Entry::Occupied(mut calls) = self.calls.entry(root) {
            *calls.get_mut() -= 1;
            if *calls.get() == 0 {
                calls.remove();
            }
        }
        self.forget_close(root);
    }

    /// Forgets that a namespace was closed if nothing could open it.
    fn forget_close(&mut self, root: NamespaceId) {
        if !self.calls.contains_key(&root) && !self.wanted.contains_key(&root) {
            self.closed.remove(&root);
        }
    }

    /// Makes a removal end when nothing on the medium names the block any more. Returns whether something names it now.
    pub(super) fn wait_cleared(&mut self, key: &BlockKey, removal: &Arc<Removal>) -> bool {
        let units = self.slots.naming(key);
        for unit in &units {
            self.waiting.entry(*unit).or_default().push(Arc::clone(removal));
        }
        !units.is_empty()
    }

    /// Returns the removals that end with a slot. They must be dropped while the lock is not held.
    #[must_use]
    pub(super) fn end_waiting(&mut self, unit: u32, outcome: &Result<()>) -> Vec<Arc<Removal>> {
        let ended = self.waiting.remove(&unit).unwrap_or_default();
        if let Err(error) = outcome {
            ended.iter().for_each(|removal| removal.fail(error.clone()));
        }
        ended
    }

    pub(super) fn note_evicted(&mut self, key: BlockKey) {
        // The loss of blocks that nobody may read is not reported.
        let is_open = self.spaces.contains_key(&key.namespace);
        if is_open && self.events.listener.is_some() && self.events.evicted.len() < TIER_EVENTS_MAX {
            self.events.evicted.push(key);
        }
    }

    pub(super) fn note_lost(&mut self, key: BlockKey) {
        if self.events.listener.is_some() && self.events.lost.len() < TIER_EVENTS_MAX {
            self.events.lost.push(key);
        }
    }
}

pub(super) fn no_namespace(key: &BlockKey) -> Error {
    Error::new(ErrorKind::NotFound, "a block's namespace is not open, or its epoch has passed")
        .with("key", key)
}

pub(super) fn small_slot(slot_bytes: usize, block_bytes: u64) -> Error {
    Error::new(ErrorKind::Config, "a slot is smaller than its block")
        .with("slot_bytes", slot_bytes)
        .with("block_bytes", block_bytes)
}

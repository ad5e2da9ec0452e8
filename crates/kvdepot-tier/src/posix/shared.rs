//! What the tier's calls, its I/O threads and its background threads share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind};
use kvdepot_io::Device;
use kvdepot_io::boot_time::boot_time;
use parking_lot::{Condvar, Mutex};

use super::config::PosixConfig;
use super::free_space::FreeSpace;
use super::held::Held;
use super::identity::host_name;
use super::ledger::terms::open_purse;
use super::namespaces::Namespaces;
use super::state::{Prior, State};
use crate::TierEvents;
use crate::compression::Transform;

/// A tier without its I/O engine.
pub(super) struct Shared {
    pub(super) config: PosixConfig,
    /// Cap in bytes; 0 = none.
    pub(super) cap: u64,
    pub(super) devices: Vec<Arc<dyn Device>>,
    pub(super) free_space: FreeSpace,
    pub(super) transform: Transform,
    /// Host name as block headers carry it.
    pub(super) host: String,
    /// How far each device's clock is ahead of ours, in seconds.
    pub(super) skew_s: Vec<i64>,
    /// Namespaces that are being opened or moved, or must be.
    pub(super) namespaces: Namespaces,
    /// Identifies the directories that belong together, in the recorded totals.
    pub(super) total_set: BlockHash,
    /// Held while the recorded total is written.
    pub(super) total_writer: Mutex<()>,
    pub(super) listener: Mutex<Option<Weak<dyn TierEvents>>>,
    state: Mutex<State>,
    hold_max_ns: AtomicU64,
    /// Wakes callers that wait for space, unlinks or idleness.
    pub(super) changed: Condvar,
    /// Wakes the maintenance thread.
    pub(super) work: Condvar,
    /// Wakes the unlink thread.
    pub(super) unlinks: Condvar,
    /// Wakes the ledger's thread.
    pub(super) ledger: Condvar,
    /// By `boot_time`.
    opened: Duration,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("config", &self.config)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(
        config: PosixConfig,
        devices: Vec<Arc<dyn Device>>,
        skew_s: Vec<i64>,
        cap: u64,
        prior: Prior,
    ) -> Self {
        let purse = open_purse(&config, cap);
        let state = State::new(devices.len(), prior, cap, purse);
        Self {
            cap,
            free_space: FreeSpace::new(config.free_floor_percent, devices.len()),
            transform: Transform::new(config.compression),
            config,
            devices,
            host: host_name(),
            skew_s,
            namespaces: Namespaces::default(),
            total_set: prior.set,
            total_writer: Mutex::new(()),
            listener: Mutex::new(None),
            state: Mutex::new(state),
            hold_max_ns: AtomicU64::new(0),
            changed: Condvar::new(),
            work: Condvar::new(),
            unlinks: Condvar::new(),
            ledger: Condvar::new(),
            opened: boot_time(),
        }
    }

    pub(super) fn lock(&self) -> Held<'_, State> {
        Held::new(self.state.lock(), &self.hold_max_ns)
    }

    /// The longest time that the lock was held since the last call.
    pub(super) fn take_hold_max(&self) -> Duration {
        // Relaxed: a figure that orders nothing.
        Duration::from_nanos(self.hold_max_ns.swap(0, Ordering::Relaxed))
    }

    /// Milliseconds since the tier was opened, those included in which the machine was suspended: other nodes count
    /// them, too.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(boot_time().saturating_sub(self.opened).as_millis()).unwrap_or(u64::MAX)
    }

    /// The cap in force: another depot that shares the directories may have a smaller one.
    pub(super) fn cap_in(&self, state: &State) -> u64 {
        state.purse.as_ref().map_or(self.cap, |purse| purse.cap().min(self.cap))
    }

    /// Has a write wait until something changes; `true` if the deadline passed first.
    pub(super) fn wait_for_change(&self, state: &mut Held<'_, State>, deadline: Instant) -> bool {
        state.writes_waiting += 1;
        let is_late = state.wait_until(&self.changed, deadline);
        state.writes_waiting -= 1;
        is_late
    }

    /// Wakes the background threads and every waiting caller.
    pub(super) fn wake_all(&self) {
        self.work.notify_all();
        self.unlinks.notify_all();
        self.ledger.notify_all();
        self.changed.notify_all();
    }

    pub(super) fn device(&self, directory: usize) -> &Arc<dyn Device> {
        &self.devices[directory]
    }

    /// The error for a key whose namespace is not open here, or not in this epoch.
    pub(super) fn no_namespace(key: &BlockKey) -> Error {
        Error::new(ErrorKind::NotFound, "a block's namespace is not open, or its epoch has passed")
            .with("key", key)
    }
}

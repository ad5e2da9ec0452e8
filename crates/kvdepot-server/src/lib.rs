//! The doors of a depot process: local, a unix socket for the engines of the node; and wire, for other machines.

mod descriptors;
pub mod local;
pub mod lock;
mod log_limit;
pub mod logging;
mod panics;
mod peer;
pub mod place;
mod quarantine;
mod refusal;
pub mod wire;

pub use local::LocalDoor;
pub use lock::DoorLock;
pub use place::Place;
pub use wire::{WireConfig, WireDoor};

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::Result;
use kvdepot_core::limits::CONNECTIONS_MAX;
use kvdepot_depot::{Depot, DepotConfig};

/// How a `serve` ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Asked to.
    Stopped,
    /// Nobody was attached for as long as agreed.
    Idle,
    /// Another depot serves this socket already.
    AlreadyServed,
    /// The lock file was deleted, and another depot has taken the socket over.
    Replaced,
}

/// Runs a depot with its local door at `socket` until `keep_on` says no (asked about ten times a second), or nobody was
/// attached for `idle_exit`. What is dirty is written before it returns, within `drain_timeout_ms`. A panic in any of
/// the depot's threads aborts the process.
pub fn serve(
    config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    serve_doors(config, socket, idle_exit, None, keep_on)
}

/// As [`serve`], with a wire door beside the local one where `wire` says so. A depot with a wire door is never idle.
pub fn serve_doors(
    config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    let lock = match Place::take(socket, place::ANSWER_WAIT, keep_on)? {
        Place::Free(lock) => lock,
        Place::Served => {
            tracing::info!("another depot serves {} already", socket.display());
            return Ok(Ended::AlreadyServed);
        }
        Place::Stopped => return Ok(Ended::Stopped),
    };
    // Before the depot opens files.
    let connections = descriptors::reserve(CONNECTIONS_MAX, wire.as_ref());
    let wire = wire.map(|wire| WireConfig { connections_max: connections.wire, ..wire });
    let depot = Depot::start(config)?;
    serve_depot(&lock, depot, connections.local, idle_exit, wire, keep_on)
}

/// Serves a depot that has been started; the lock is held until it has ended.
pub fn serve_depot(
    lock: &DoorLock,
    depot: Depot,
    connections_max: usize,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    let depot = Arc::new(depot);
    let mut door = LocalDoor::open(lock)?.with_connections_max(connections_max);
    let idle_exit = idle_exit.filter(|_| wire.is_none());
    let wire = wire.map(|wire| WireDoor::open(wire, &depot)).transpose()?;
    tracing::info!(
        "serving {} at {} (pid {})",
        depot.config().pipeline,
        lock.socket().display(),
        std::process::id()
    );
    let ended = door.run(&depot, idle_exit, keep_on);
    if let Some(wire) = wire {
        wire.close();
    }
    // Clients miss from here on, instead of waiting for a depot that only writes.
    drop(door);
    depot.finish();
    ended
}

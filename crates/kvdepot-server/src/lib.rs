//! The doors of a depot process: local, a unix socket for the engines of the node; and wire, for other machines.

pub mod local;
pub mod lock;
pub mod logging;
pub mod wire;

pub use local::LocalDoor;
pub use lock::DoorLock;
pub use wire::{WireConfig, WireDoor};

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::Result;
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
}

/// Runs a depot with its local door at `socket` until `keep_on` says no (asked ten times a second), or nobody was
/// attached for `idle_exit`. What is dirty is written before it returns, within bounds.
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
    let Some(lock) = DoorLock::take(socket)? else { return Ok(Ended::AlreadyServed) };
    let depot = Arc::new(Depot::start(config)?);
    let door = LocalDoor::open(&lock)?;
    let idle_exit = idle_exit.filter(|_| wire.is_none());
    let wire = wire.map(|wire| WireDoor::open(wire, &depot)).transpose()?;
    tracing::info!(
        "serving {} at {} (pid {})",
        depot.config().pipeline,
        socket.display(),
        std::process::id()
    );
    let ended = door.run(&depot, idle_exit, keep_on);
    if let Some(wire) = wire {
        wire.close();
    }
    drop(door);
    drop(depot);
    drop(lock);
    ended
}

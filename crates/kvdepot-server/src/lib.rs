//! The doors of a depot process: local, a unix socket for engines on the same node, and wire, for other machines.

mod descriptors;
mod handover;
pub mod http;
pub mod keeper;
pub mod local;
pub mod lock;
mod log_limit;
pub mod logging;
mod panics;
mod peer;
pub mod place;
mod quarantine;
mod refusal;
mod systemd;
mod users;
pub mod wire;

pub use http::StatusDoor;
pub use local::LocalDoor;
pub use lock::DoorLock;
pub use place::Place;
pub use wire::{WireConfig, WireDoor};

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Result;
use kvdepot_core::limits::CONNECTIONS_MAX;
use kvdepot_depot::{Depot, DepotConfig};

use crate::keeper::Keeper;
use crate::keeper::start::Started;

/// How long to retry opening a wire door.
const REOPEN_WAIT: Duration = Duration::from_secs(5);
/// Pause between attempts.
const REOPEN_TICK: Duration = Duration::from_millis(100);

/// Why `serve` returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// `keep_on` returned `false`.
    Stopped,
    /// No client was attached for the configured time.
    Idle,
    /// Another depot serves this socket already.
    AlreadyServed,
    /// Another depot has taken the pool over.
    HandedOver,
    /// The lock file was deleted, and another depot owns the socket now.
    Replaced,
}

/// Runs a depot with its local door at `socket` until `keep_on` returns `false` (called about ten times a second), or
/// no client was attached for `idle_exit`. Dirty blocks are written before it returns, within `drain_timeout_ms`. A
/// panic in any of the depot's threads aborts the process.
pub fn serve(
    config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    serve_doors(config, socket, idle_exit, None, keep_on)
}

/// Like [`serve`], with an additional wire door if `wire` is given. A depot with a wire door is never idle.
pub fn serve_doors(
    config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    let place = Place::take(socket, place::ANSWER_WAIT, keep_on)?;
    serve_place(place, config, socket, idle_exit, wire, keep_on)
}

/// Like [`serve_doors`], but waits while another depot serves the socket, without a limit.
pub fn serve_in_turn(
    config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    // Checked now, and not after the other one has ended.
    ensure_can_serve(&config, wire.as_ref())?;
    let place = Place::wait(socket, keep_on)?;
    serve_place(place, config, socket, idle_exit, wire, keep_on)
}

/// Reports configuration mistakes while another depot still serves the socket.
fn ensure_can_serve(config: &DepotConfig, wire: Option<&WireConfig>) -> Result<()> {
    config.ensure_can_start()?;
    wire.map_or(Ok(()), WireDoor::check)
}

fn serve_place(
    place: Place,
    config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let lock = match place {
        Place::Free(lock) => lock,
        Place::Served => {
            tracing::info!("another depot serves {} already", socket.display());
            return Ok(Ended::AlreadyServed);
        }
        Place::Stopped => return Ok(Ended::Stopped),
    };
    let (connections, wire) = reserve_descriptors(wire);
    let started = keeper::start::start(socket, config, keep_on)?;
    serve_held(&lock, started, connections, idle_exit, wire, keep_on)
}

/// Like [`serve_doors`], with the pool and all blocks of the depot that serves `socket` now. That depot terminates
/// after it has handed them over. It keeps serving if it cannot hand over, or if this one cannot take over. If no depot
/// answers, this is [`serve_doors`].
pub fn serve_taking_over(
    mut config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    // While the running depot can still continue.
    ensure_can_serve(&config, wire.as_ref())?;
    let (connections, wire) = reserve_descriptors(wire);
    let Some(inheritance) = handover::ask(socket, &mut config)? else {
        tracing::info!("no depot serves {}: there is nothing to take over", socket.display());
        return serve_doors(config, socket, idle_exit, wire, keep_on);
    };
    let Some(inherited) = inheritance.wait_for_exit(keep_on)? else { return Ok(Ended::Stopped) };
    // The content of a keeper is older than what was handed over.
    keeper::start::dismiss_any(socket);
    let (lock, depot, held) = inherited.start(config)?;
    let started = keeper::start::over(socket, depot)?;
    if let Some(keeper) = &started.keeper {
        // If this depot crashes, the next one must know about them.
        held.iter().for_each(|(session, peer)| session.accompany(keeper.client(&**peer)));
    }
    serve_held(&lock, Started { held, ..started }, connections, idle_exit, wire, keep_on)
}

/// Reopens the wire door after a failed hand-over. Returns `None` if it cannot be opened, since the local door must not
/// wait for it for long.
fn reopened(config: &WireConfig, depot: &Arc<Depot>) -> Option<WireDoor> {
    let end = Instant::now() + REOPEN_WAIT;
    loop {
        match WireDoor::open(config.clone(), depot) {
            Ok(wire) => return Some(wire),
            Err(_) if Instant::now() < end => std::thread::sleep(REOPEN_TICK),
            Err(error) => {
                tracing::error!(
                    "the wire door cannot be opened again; local engines are served, restart the depot for the others: \
                     {error}"
                );
                return None;
            }
        }
    }
}

/// Reserves descriptors before the depot opens files. Returns the limit of local connections, and the wire door's
/// configuration with its limit.
fn reserve_descriptors(wire: Option<WireConfig>) -> (usize, Option<WireConfig>) {
    let connections = descriptors::reserve(CONNECTIONS_MAX, wire.as_ref());
    let wire = wire.map(|wire| WireConfig { connections_max: connections.wire, ..wire });
    (connections.local, wire)
}

/// Serves a depot that was started. The lock is held until the depot has ended.
pub fn serve_depot(
    lock: &DoorLock,
    depot: Depot,
    connections_max: usize,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let started = Started { depot: Arc::new(depot), held: Vec::new(), keeper: None };
    serve_held(lock, started, connections_max, idle_exit, wire, keep_on)
}

/// Tells the keeper of a terminating depot not to take the ends of sessions for the ends of copies.
struct Ending(Option<Arc<Keeper>>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.iter().for_each(|keeper| keeper.end());
    }
}

/// Like [`serve_depot`], for a depot whose slots may still be used by copies of an earlier depot's clients.
fn serve_held(
    lock: &DoorLock,
    Started { depot, held, keeper }: Started,
    connections_max: usize,
    idle_exit: Option<Duration>,
    wire_config: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    // Dropped before `held`, and the second one before the door: both end sessions whose clients may still copy.
    let _ending = Ending(keeper.clone());
    let mut door = LocalDoor::open(lock)?.with_connections_max(connections_max).with_keeper(keeper.clone());
    let _ending_with_door = Ending(keeper.clone());
    door.quarantine.hold_all(held);
    let idle_exit = idle_exit.filter(|_| wire_config.is_none());
    let mut wire = wire_config.clone().map(|wire| WireDoor::open(wire, &depot)).transpose()?;
    let status = StatusDoor::open(lock.socket(), depot.config().metrics_port, &depot);
    systemd::notify("READY=1");
    systemd::notify("STATUS=Serving");
    loop {
        tracing::info!(
            "serving {} at {} (pid {})",
            depot.config().pipeline,
            lock.socket().display(),
            std::process::id()
        );
        let ended = door.run(&depot, idle_exit, keep_on);
        if let Some(wire) = wire.take() {
            wire.close();
        }
        if let (Ok(Ended::HandedOver), Some(asking)) = (&ended, door.take_asking()) {
            match asking.hand_over(&depot, &mut door, lock) {
                Ok(heir) => {
                    keeper.iter().for_each(|keeper| keeper.end());
                    drop(door);
                    // The other depot has its own keeper.
                    keeper.iter().for_each(|keeper| keeper.dismiss());
                    drop(keeper);
                    depot.leave();
                    drop(status);
                    drop(depot);
                    // The exit of this process tells the other depot that nothing of it touches the pool.
                    drop(heir);
                    return ended;
                }
                Err(error) => {
                    tracing::error!("the hand-over failed, and this depot continues to serve: {error}");
                    depot.thaw();
                    wire = wire_config.as_ref().and_then(|wire| reopened(wire, &depot));
                    continue;
                }
            }
        }
        systemd::notify("STOPPING=1");
        keeper.iter().for_each(|keeper| keeper.end());
        // From here on clients miss, instead of waiting for a depot that only writes.
        drop(door);
        depot.finish();
        if ended.is_ok() {
            keeper.iter().for_each(|keeper| keeper.dismiss());
        }
        return ended;
    }
}

//! The doors of a depot process: local, a unix socket for the engines of the node; and wire, for other machines.

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

/// How long a wire door is tried to be opened again.
const REOPEN_WAIT: Duration = Duration::from_secs(5);
/// Between two tries.
const REOPEN_TICK: Duration = Duration::from_millis(100);

/// How a `serve` ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Asked to.
    Stopped,
    /// Nobody was attached for as long as agreed.
    Idle,
    /// Another depot serves this socket already.
    AlreadyServed,
    /// Another depot has taken the pool over.
    HandedOver,
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
    let place = Place::take(socket, place::ANSWER_WAIT, keep_on)?;
    serve_place(place, config, socket, idle_exit, wire, keep_on)
}

/// As [`serve_doors`], but while another depot serves the socket this one waits for that one's end, however long it takes.
pub fn serve_in_turn(
    config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    // Now, and not when the other one has ended.
    ensure_can_serve(&config, wire.as_ref())?;
    let place = Place::wait(socket, keep_on)?;
    serve_place(place, config, socket, idle_exit, wire, keep_on)
}

/// Finds the mistakes of a configuration while another depot still serves the socket.
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

/// As [`serve_doors`], with the pool of the depot that serves `socket` now, and all blocks in it. That depot ends, once
/// it has handed them over; it goes on serving when it cannot, or when this one cannot take them. Where no depot answers,
/// this is [`serve_doors`].
pub fn serve_taking_over(
    mut config: DepotConfig,
    socket: &Path,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    // While the running depot still can go on.
    ensure_can_serve(&config, wire.as_ref())?;
    let (connections, wire) = reserve_descriptors(wire);
    let Some(inheritance) = handover::ask(socket, &mut config)? else {
        tracing::info!("no depot serves {}: there is nothing to take over", socket.display());
        return serve_doors(config, socket, idle_exit, wire, keep_on);
    };
    let Some(inherited) = inheritance.wait_for_exit(keep_on)? else { return Ok(Ended::Stopped) };
    // What a keeper has is older than what was handed over.
    keeper::start::dismiss_any(socket);
    let (lock, depot, held) = inherited.start(config)?;
    let started = keeper::start::over(socket, depot)?;
    if let Some(keeper) = &started.keeper {
        // Should this depot crash, the next one is to know of them.
        held.iter().for_each(|(session, peer)| session.accompany(keeper.client(&**peer)));
    }
    serve_held(&lock, Started { held, ..started }, connections, idle_exit, wire, keep_on)
}

/// The wire door again, after a hand-over that came to nothing. The local door must not wait for it for long: None when it
/// cannot be opened.
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

/// Before the depot opens files: how many local connections there may be, and the wire door's configuration with how many
/// of its own.
fn reserve_descriptors(wire: Option<WireConfig>) -> (usize, Option<WireConfig>) {
    let connections = descriptors::reserve(CONNECTIONS_MAX, wire.as_ref());
    let wire = wire.map(|wire| WireConfig { connections_max: connections.wire, ..wire });
    (connections.local, wire)
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
    let started = Started { depot: Arc::new(depot), held: Vec::new(), keeper: None };
    serve_held(lock, started, connections_max, idle_exit, wire, keep_on)
}

/// Tells the keeper of a depot that ends not to take the ends of sessions for the ends of copies.
struct Ending(Option<Arc<Keeper>>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.iter().for_each(|keeper| keeper.end());
    }
}

/// As [`serve_depot`], of a depot some of whose slots clients of the one before may still copy into or out of.
fn serve_held(
    lock: &DoorLock,
    Started { depot, held, keeper }: Started,
    connections_max: usize,
    idle_exit: Option<Duration>,
    wire_config: Option<WireConfig>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let _serving = panics::abort_on_panic();
    // Dropped before `held`, and the second one before the door: with either end sessions whose clients may still copy.
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
                    // The other depot has a keeper of its own.
                    keeper.iter().for_each(|keeper| keeper.dismiss());
                    drop(keeper);
                    depot.leave();
                    drop(status);
                    drop(depot);
                    // The other depot learns from the end of this process that nothing of it touches the pool.
                    drop(heir);
                    return ended;
                }
                Err(error) => {
                    tracing::error!("the pool was not handed over, and this depot goes on: {error}");
                    depot.thaw();
                    wire = wire_config.as_ref().and_then(|wire| reopened(wire, &depot));
                    continue;
                }
            }
        }
        systemd::notify("STOPPING=1");
        keeper.iter().for_each(|keeper| keeper.end());
        // Clients miss from here on, instead of waiting for a depot that only writes.
        drop(door);
        depot.finish();
        if ended.is_ok() {
            keeper.iter().for_each(|keeper| keeper.dismiss());
        }
        return ended;
    }
}

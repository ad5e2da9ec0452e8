//! Serves a depot to its end: takes the place at the socket, or another depot's pool, opens the doors, and ends in an
//! orderly way or hands the pool over.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Result;
use kvdepot_core::limits::CONNECTIONS_MAX;
use kvdepot_depot::{Depot, DepotConfig};

use crate::ended::Ended;
use crate::http::StatusDoor;
use crate::keeper::Keeper;
use crate::keeper::start::Started;
use crate::local::LocalDoor;
use crate::lock::DoorLock;
use crate::place::{self, Place};
use crate::wire::{WireConfig, WireDoor};
use crate::{descriptors, handover, keeper, neighbours, panics, systemd};

/// How long to retry opening a wire door.
const REOPEN_WAIT: Duration = Duration::from_secs(5);
/// Pause between attempts.
const REOPEN_TICK: Duration = Duration::from_millis(100);

/// A depot to be served: its configuration and its doors. A panic in any of the depot's threads aborts the process.
///
/// Each way to serve it calls `keep_on` about ten times a second, and returns after that was `false`, or after no
/// client was attached for `idle_exit`. Dirty blocks are written before it returns, within `drain_timeout_ms`.
#[derive(Clone, Debug)]
pub struct Serving<'a> {
    /// The depot's configuration.
    pub config: DepotConfig,
    /// The socket of the local door.
    pub socket: &'a Path,
    /// How long the depot may be without a client before it terminates; `None` = for ever.
    pub idle_exit: Option<Duration>,
    /// The wire door, if any. A depot with a wire door is never idle.
    pub wire: Option<WireConfig>,
}

impl<'a> Serving<'a> {
    /// A depot with a local door only, which terminates only when it is stopped.
    pub const fn new(config: DepotConfig, socket: &'a Path) -> Self {
        Self { config, socket, idle_exit: None, wire: None }
    }

    /// Serves the depot, unless another one serves the socket already.
    pub fn serve(self, keep_on: &mut dyn FnMut() -> bool) -> Result<Ended> {
        let _serving = panics::abort_on_panic();
        let place = Place::take(self.socket, place::ANSWER_WAIT, keep_on)?;
        self.serve_at(place, keep_on)
    }

    /// Like [`Serving::serve`], but waits while another depot serves the socket, without a limit.
    pub fn serve_in_turn(self, keep_on: &mut dyn FnMut() -> bool) -> Result<Ended> {
        let _serving = panics::abort_on_panic();
        // Checked now, and not after the other one has ended.
        self.ensure_can_serve()?;
        let place = Place::wait(self.socket, keep_on)?;
        self.serve_at(place, keep_on)
    }

    /// Like [`Serving::serve`], with the pool and all blocks of the depot that serves the socket now. That depot
    /// terminates after it has handed them over. It keeps serving if it cannot hand over, or if this one cannot take
    /// over. If no depot answers, this is [`Serving::serve`].
    pub fn serve_taking_over(mut self, keep_on: &mut dyn FnMut() -> bool) -> Result<Ended> {
        let _serving = panics::abort_on_panic();
        // While the running depot can still continue.
        self.ensure_can_serve()?;
        let connections_max = self.reserve_descriptors();
        let Some(inheritance) = handover::ask(self.socket, &mut self.config)? else {
            tracing::info!("no depot serves {}: there is nothing to take over", self.socket.display());
            return self.serve(keep_on);
        };
        let Some(inherited) = inheritance.wait_for_exit(keep_on)? else { return Ok(Ended::Stopped) };
        // The content of a keeper is older than what was handed over.
        keeper::start::dismiss_any(self.socket);
        let (lock, depot, held) = inherited.start(self.config)?;
        let started = keeper::start::over(self.socket, depot)?;
        if let Some(keeper) = &started.keeper {
            // If this depot crashes, the next one must know about them.
            held.iter().for_each(|(session, peer)| session.accompany(keeper.client(&**peer)));
        }
        let doors = Doors { connections_max, idle_exit: self.idle_exit, wire: self.wire };
        doors.serve(&lock, Started { held, ..started }, keep_on)
    }

    /// Reports configuration mistakes while another depot still serves the socket.
    fn ensure_can_serve(&self) -> Result<()> {
        self.config.ensure_can_start()?;
        self.wire.as_ref().map_or(Ok(()), WireDoor::check)
    }

    /// Reserves descriptors before the depot opens files, and limits the wire door's connections to them. Returns the
    /// limit of local connections.
    fn reserve_descriptors(&mut self) -> usize {
        let connections = descriptors::reserve(CONNECTIONS_MAX, self.wire.as_ref());
        if let Some(wire) = &mut self.wire {
            wire.connections_max = connections.wire;
        }
        connections.local
    }

    fn serve_at(mut self, place: Place, keep_on: &mut dyn FnMut() -> bool) -> Result<Ended> {
        let lock = match place {
            Place::Free(lock) => lock,
            Place::Served => {
                tracing::info!("another depot serves {} already", self.socket.display());
                return Ok(Ended::AlreadyServed);
            }
            Place::Stopped => return Ok(Ended::Stopped),
        };
        let connections_max = self.reserve_descriptors();
        let started = keeper::start::start(self.socket, self.config, keep_on)?;
        let doors = Doors { connections_max, idle_exit: self.idle_exit, wire: self.wire };
        doors.serve(&lock, started, keep_on)
    }
}

/// Serves a depot that was started, at a local door only. The lock is held until the depot has ended.
pub fn serve_depot(
    lock: &DoorLock,
    depot: Depot,
    connections_max: usize,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Ended> {
    let started = Started { depot: Arc::new(depot), held: Vec::new(), keeper: None };
    Doors { connections_max, idle_exit: None, wire: None }.serve(lock, started, keep_on)
}

/// Tells the keeper of a terminating depot not to take the ends of sessions for the ends of copies.
struct Ending(Option<Arc<Keeper>>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.iter().for_each(|keeper| keeper.end());
    }
}

/// The doors of a depot that was started.
struct Doors {
    /// Limit of local connections.
    connections_max: usize,
    idle_exit: Option<Duration>,
    wire: Option<WireConfig>,
}

impl Doors {
    /// Opens the doors and serves the depot to its end. Its slots may still be used by copies of an earlier depot's
    /// clients.
    fn serve(
        self,
        lock: &DoorLock,
        Started { depot, held, keeper }: Started,
        keep_on: &mut dyn FnMut() -> bool,
    ) -> Result<Ended> {
        let _serving = panics::abort_on_panic();
        // Dropped before `held`, and the second one before the door: both end sessions whose clients may still copy.
        let _ending = Ending(keeper.clone());
        let mut door =
            LocalDoor::open(lock)?.with_connections_max(self.connections_max).with_keeper(keeper.clone());
        let _ending_with_door = Ending(keeper.clone());
        door.quarantine.hold_all(held);
        let idle_exit = self.idle_exit.filter(|_| self.wire.is_none());
        let mut wire = self.wire.clone().map(|wire| WireDoor::open(wire, &depot)).transpose()?;
        let status = StatusDoor::open(lock.socket(), &depot);
        status.show_listener(wire.as_ref().map(WireDoor::series));
        systemd::notify("READY=1");
        systemd::notify("STATUS=Serving");
        neighbours::look(lock.socket(), depot.config());
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
                let held = door.take_held();
                match held.and_then(|held| asking.hand_over(&depot, held, &door.quarantine, lock)) {
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
                        wire = self.wire.as_ref().and_then(|wire| reopened(wire, &depot));
                        status.show_listener(wire.as_ref().map(WireDoor::series));
                        continue;
                    }
                }
            }
            systemd::notify("STOPPING=1");
            keeper.iter().for_each(|keeper| keeper.end());
            // From here on clients miss, instead of waiting for a depot that only writes.
            drop(door);
            let unwritten = depot.finish();
            if unwritten.blocks == 0 && unwritten.refused == 0 {
                tracing::info!(
                    "the depot at {} shuts down (pid {}): no write is pending",
                    lock.socket().display(),
                    std::process::id()
                );
            }
            if ended.is_ok() {
                keeper.iter().for_each(|keeper| keeper.dismiss());
            }
            return ended;
        }
    }
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
                    "cannot reopen the network listener; the depot still serves local engines; restart it to serve remote \
                     clients: {error}"
                );
                return None;
            }
        }
    }
}

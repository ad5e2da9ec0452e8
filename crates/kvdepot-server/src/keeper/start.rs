//! Starts a depot with the content of a keeper, if there is one.

use std::path::Path;
use std::sync::Arc;

use kvdepot_core::Result;
use kvdepot_depot::handover::other_size;
use kvdepot_depot::recover::LeftLedger;
use kvdepot_depot::{Depot, DepotConfig, PoolMapping, Session};

use super::link::{EarlierPeer, Keeper, ask, dismiss_at};
use super::message::path;
use super::store::{self, Found};
use crate::peer::{Peer, Process};

/// A depot, sessions of clients that may still copy, and the keeper.
pub(crate) struct Started {
    pub(crate) depot: Arc<Depot>,
    pub(crate) held: Vec<(Session, Box<dyn Peer>)>,
    pub(crate) keeper: Option<Arc<Keeper>>,
}

/// Dismisses a keeper at this socket, whatever it has. The caller must own the place.
pub(crate) fn dismiss_any(socket: &Path) {
    dismiss_at(&path(socket));
}

/// Starts a depot at a place that the caller owns, in the pool left by a crashed depot.
pub(crate) fn start(
    socket: &Path,
    mut config: DepotConfig,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Started> {
    if config.pool_keep_ms == 0 {
        dismiss_any(socket);
        store::forget_all();
        return Ok(Started { depot: Arc::new(Depot::start(config)?), held: Vec::new(), keeper: None });
    }
    let found = store::found().map_or_else(|| ask(socket, keep_on), |found| Ok(Some(found)));
    match found {
        Ok(Some(found)) => match open(&found, &mut config) {
            Ok((left, pool)) => return recover(socket, config, found, &left, pool),
            Err(error) => {
                tracing::error!(
                    "the pool of a crashed depot is not taken over, this one starts with an empty pool: {error}"
                );
                found.store.dismiss();
            }
        },
        Ok(None) => {}
        Err(error) => {
            tracing::error!("the keeper cannot be asked, this depot starts with an empty pool: {error}")
        }
    }
    over(socket, Depot::start(config)?)
}

/// Gives a depot's pool to a new keeper.
pub(crate) fn over(socket: &Path, depot: Depot) -> Result<Started> {
    let depot = Arc::new(depot);
    let is_kept = depot.ledger_fd().is_some();
    let keeper = is_kept.then(|| Keeper::start(socket, &depot)).transpose()?;
    Ok(Started { depot, held: Vec::new(), keeper })
}

fn open(found: &Found, config: &mut DepotConfig) -> Result<(LeftLedger, PoolMapping)> {
    let duplicate = |fd: &std::os::fd::OwnedFd| {
        fd.try_clone()
            .map_err(|e| kvdepot_core::Error::io("no descriptor is free for the pool that was left", e))
    };
    let left = LeftLedger::open(duplicate(&found.ledger)?)?;
    let (bytes, configured) = (left.pool_bytes(), config.mapped_bytes());
    if !(config.pool_bytes..=configured).contains(&bytes) {
        return Err(other_size(bytes, configured));
    }
    let pool = PoolMapping::map_regions(duplicate(&found.pool)?, left.regions().to_vec())?;
    if bytes < configured {
        tracing::warn!("the pool that was left may grow to {bytes} bytes, not to {configured}");
        config.pool_bytes_max = bytes;
    }
    Ok((left, pool))
}

fn recover(
    socket: &Path,
    config: DepotConfig,
    found: Found,
    left: &LeftLedger,
    pool: PoolMapping,
) -> Result<Started> {
    let Found { mut clients, store, .. } = found;
    // If not all of them could be kept, the missing ones are treated as clients whose exit cannot be watched.
    for _ in clients.len()..left.clients() as usize {
        let next = clients.iter().map(|(number, _)| number + 1).max().unwrap_or(0);
        clients.push((next, None));
    }
    let count = u32::try_from(clients.len()).unwrap_or(u32::MAX);
    let depot = Arc::new(Depot::start_on(config, pool)?);
    let clients: Vec<_> =
        clients.into_iter().map(|(number, pidfd)| (number, Process::watched(pidfd))).collect();
    let next = clients.iter().map(|(number, _)| number + 1).max().unwrap_or(0);
    let (gone, copying): (Vec<_>, Vec<_>) =
        clients.into_iter().partition(|(_, process)| process.has_exited());
    let recovered = depot.recover(left, !copying.is_empty());
    if !copying.is_empty() {
        tracing::info!(
            "{} connections of clients that may still copy: until they have ended no memory of the pool is handed out",
            copying.len()
        );
    }
    let keeper = Keeper::go_on(store, socket, &depot, count, next)?;
    gone.iter().for_each(|&(number, _)| drop(keeper.known(number)));
    // The last of them ends the hold.
    let holds = Arc::new(recovered.holds);
    let held = copying.into_iter().map(|(number, process)| {
        let session = depot.session();
        let client = keeper.add_earlier(number, process.pid_of_pidfd(), &holds);
        session.accompany(Arc::clone(&client));
        (session, Box::new(EarlierPeer { process, client }) as Box<dyn Peer>)
    });
    let held = held.collect();
    Ok(Started { depot, held, keeper: Some(keeper) })
}

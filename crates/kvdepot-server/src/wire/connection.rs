//! The state of a connection, and the ways in which its requests wait.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::direct::Direct;
use kvdepot_depot::values::Values;
use kvdepot_wire::own::ServerHandshake;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::rdma::QueuePair;
use super::shared::Door;
use super::stream::Stream;

/// How often a put that found no space is retried.
const ROOM_TICK: Duration = Duration::from_millis(5);

/// The state of a connection. Its leases and partly filled slots end with it (P4).
pub(super) struct Connection {
    pub(super) door: Arc<Door>,
    pub(super) stream: Arc<Stream>,
    pub(super) direct: Direct,
    pub(super) values: Values,
    /// Gets that wait for tiers.
    pub(super) tasks: JoinSet<()>,
    pub(super) in_flight: Arc<Semaphore>,
    /// The queue pair of this connection, if any.
    pub(super) rdma: Option<QueuePair>,
    pub(super) handshake: ServerHandshake,
}

impl Connection {
    /// Returns the deadline for a put that begins now to find space in the pool, however many blocks it has: its client
    /// waits for an answer, and takes a longer silence for the server's death (P2).
    pub(super) fn room_deadline(&self) -> Instant {
        Instant::now() + Duration::from_millis(self.door.config.put_wait_ms)
    }

    /// Retries while the pool has no space, until the deadline; tries at least once.
    pub(super) async fn patiently<T>(
        &self,
        deadline: Instant,
        mut attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        loop {
            match attempt() {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                    tokio::time::sleep(ROOM_TICK).await;
                }
                other => return other,
            }
        }
    }

    /// Runs blocking work on a thread for it.
    pub(super) async fn apart<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Values) -> T + Send + 'static,
    ) -> Result<T> {
        let values = self.values.clone();
        join(tokio::task::spawn_blocking(move || work(&values))).await
    }

    /// Runs blocking work on a thread for it.
    pub(super) async fn wait_for<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Direct) -> T + Send + 'static,
    ) -> Result<T> {
        let direct = self.direct.clone();
        join(tokio::task::spawn_blocking(move || work(&direct))).await
    }
}

async fn join<T>(task: tokio::task::JoinHandle<T>) -> Result<T> {
    task.await.map_err(|e| Error::new(ErrorKind::Io, "a request's work ended early").with_source(e))
}

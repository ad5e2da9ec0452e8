//! A connection with our own protocol: its socket, and the requests in flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_core::{Error, NamespaceSpec};
use parking_lot::{Condvar, Mutex};

use super::pending::Pending;
use super::shared::Shared;
use super::socket::Socket;

/// The server of a connection, as far as the connection knows it.
pub(super) trait Host {
    fn shared(&self) -> &Shared;

    /// Wakes the threads that wait for requests, so that they check whether their connection is over.
    fn wake(&self);

    /// Returns the error of a request that was not answered in time.
    fn too_late(&self) -> Error;
}

/// A connection.
pub(super) struct Conn {
    pub(super) stream: Arc<Socket>,
    pub(super) pending: Mutex<Pending>,
    /// Signalled when a request was answered.
    room: Condvar,
    in_flight_max: usize,
    /// The depot at the other end.
    pub(super) depot: Option<u64>,
    /// Whether the server can be told that a namespace is not used any more.
    can_close: bool,
    /// Namespaces that it is to be told of.
    closing: Mutex<VecDeque<Arc<NamespaceSpec>>>,
    born: Instant,
    /// Time when bytes last moved, in microseconds since `born`.
    progress_us: AtomicU64,
}

impl std::fmt::Debug for Conn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Conn").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Conn {
    pub(super) fn new(stream: Socket, in_flight_max: u32, depot: Option<u64>, can_close: bool) -> Self {
        Self {
            stream: Arc::new(stream),
            pending: Mutex::new(Pending::default()),
            room: Condvar::new(),
            in_flight_max: usize::try_from(in_flight_max).unwrap_or(usize::MAX).max(1),
            depot,
            can_close,
            closing: Mutex::default(),
            born: Instant::now(),
            progress_us: AtomicU64::new(0),
        }
    }

    /// Records that bytes moved.
    pub(super) fn progressed(&self) {
        let us = u64::try_from(self.born.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.progress_us.store(us, Ordering::Relaxed);
    }

    /// Records that a request was answered completely.
    pub(super) fn answered(&self) {
        self.room.notify_all();
    }

    /// Queues a namespace that is not used any more.
    pub(super) fn close_namespace(&self, spec: &Arc<NamespaceSpec>) {
        let mut closing = self.closing.lock();
        // More than a server has places for need not be kept for one that does not read.
        if self.can_close && closing.len() < NAMESPACES_MAX {
            closing.push_back(Arc::clone(spec));
        }
    }

    /// Returns whether the server is to be told of a namespace that is not used any more.
    pub(super) fn has_closing(&self) -> bool {
        !self.closing.lock().is_empty()
    }

    /// Takes the next one.
    pub(super) fn next_closing(&self) -> Option<Arc<NamespaceSpec>> {
        self.closing.lock().pop_front()
    }

    /// Waits until one more request may be in flight, or the connection is over.
    pub(super) fn wait_for_room(&self) {
        let mut pending = self.pending.lock();
        while pending.len() >= self.in_flight_max && pending.closed.is_none() {
            self.room.wait(&mut pending);
        }
    }

    /// Ends the connection, and fails all requests that it has not answered.
    pub(super) fn close(&self, server: &impl Host, error: &Error) {
        // The reason is set first: a thread that finds the socket shut down reads it.
        let (lost, is_parting) = {
            let mut pending = self.pending.lock();
            let lost = pending.close(error);
            pending.tell_doubts(&server.shared().beliefs.writing);
            (lost, pending.is_parting)
        };
        // A connection that is already lost cannot be shut down.
        let _ = if is_parting && !server.shared().is_stopping() {
            self.stream.end_sending()
        } else {
            self.stream.shutdown()
        };
        self.room.notify_all();
        server.wake();
        lost.into_iter().for_each(|end| end());
    }

    /// Returns whether no byte has moved for longer than a server may be silent.
    fn is_quiet(&self, server: &impl Host, now: Instant) -> bool {
        let since = self.born + Duration::from_micros(self.progress_us.load(Ordering::Relaxed));
        now.saturating_duration_since(since) > server.shared().config.timeout
    }

    /// Fails overdue requests, and ends the connection if it was silent for too long. Returns whether it was.
    pub(super) fn expire(&self, server: &impl Host, now: Instant) -> bool {
        let mut pending = self.pending.lock();
        if self.is_quiet(server, now) && pending.owes() && pending.closed.is_none() {
            drop(pending);
            self.close(server, &server.too_late());
            return true;
        }
        let late = pending.expire(now, &server.too_late());
        drop(pending);
        late.into_iter().for_each(|end| end());
        false
    }

    /// Ends the connection unless bytes have moved on it recently.
    pub(super) fn close_if_quiet(&self, server: &impl Host, now: Instant) {
        if self.is_quiet(server, now) {
            self.close(server, &server.too_late());
        }
    }
}

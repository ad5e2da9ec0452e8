//! Places of HTTP connections. When all are taken, the oldest connection without a complete request is closed, so that
//! clients which connect and send nothing do not delay a health check.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// The connections being served.
pub(crate) struct Visitors {
    places: Arc<Semaphore>,
    /// Oldest first.
    present: Arc<Mutex<Vec<Arc<Visitor>>>>,
}

/// One connection.
#[derive(Default)]
pub(crate) struct Visitor {
    /// Whether one of its requests is being answered.
    busy: AtomicBool,
    task: Mutex<Option<AbortHandle>>,
}

/// The place of a connection, freed by its drop.
pub(crate) struct Place {
    pub(crate) visitor: Arc<Visitor>,
    present: Arc<Mutex<Vec<Arc<Visitor>>>>,
    _permit: OwnedSemaphorePermit,
}

impl Visitors {
    pub(crate) fn new(places: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(places)), present: Arc::default() }
    }

    /// Returns a place for an accepted connection. Waits only while all others are being answered.
    pub(crate) async fn admit(&self) -> Place {
        if self.places.available_permits() == 0 {
            self.displace();
        }
        let permit = Arc::clone(&self.places).acquire_owned().await.expect("the semaphore is never closed");
        let visitor = Arc::new(Visitor::default());
        self.present.lock().push(Arc::clone(&visitor));
        Place { visitor, present: Arc::clone(&self.present), _permit: permit }
    }

    fn displace(&self) {
        let present = self.present.lock();
        let idle = present.iter().find(|visitor| !visitor.busy.load(Ordering::Acquire));
        if let Some(task) = idle.and_then(|visitor| visitor.task.lock().take()) {
            task.abort();
        }
    }
}

impl Visitor {
    /// Sets the task that serves this connection.
    pub(crate) fn served_by(&self, task: AbortHandle) {
        *self.task.lock() = Some(task);
    }

    /// Marks the connection busy until the guard is dropped.
    pub(crate) fn answering(self: &Arc<Self>) -> Answering {
        self.busy.store(true, Ordering::Release);
        Answering(Arc::clone(self))
    }
}

/// See [`Visitor::answering`].
pub(crate) struct Answering(Arc<Visitor>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.present.lock().retain(|visitor| !Arc::ptr_eq(visitor, &self.visitor));
    }
}

//! References to Python objects that core threads hold while copies touch their memory.
//!
//! A core thread never takes the interpreter lock: at the interpreter's shutdown that could block or end the thread. So
//! it only hands back the reference, and the next call of the store or one of its tasks releases it.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;

/// References that no copy needs any more.
#[derive(Default)]
pub(crate) struct Spent(Mutex<Vec<Py<PyAny>>>);

impl Spent {
    /// Wraps an object so that it returns here when the last copy drops it.
    pub(crate) fn hold(self: &Arc<Self>, object: Option<Py<PyAny>>) -> Option<kvdepot_depot::client::Kept> {
        let held = Held { object: Some(object?), spent: Arc::clone(self) };
        Some(Arc::new(held))
    }

    /// Releases the returned references.
    pub(crate) fn release(&self, py: Python<'_>) {
        let objects = std::mem::take(&mut *self.0.lock());
        // After unlocking: an object's destructor may call us again.
        for object in objects {
            drop(object.into_bound(py));
        }
    }
}

struct Held {
    /// `None` only after the drop.
    object: Option<Py<PyAny>>,
    spent: Arc<Spent>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.spent.0.lock().extend(self.object.take());
    }
}

//! `Claim`.

use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Claim {
    inner: Mutex<kvdepot_depot::client::Claim>,
}

impl Claim {
    pub(crate) const fn new(claim: kvdepot_depot::client::Claim) -> Self {
        Self { inner: Mutex::new(claim) }
    }
}

#[pymethods]
impl Claim {
    fn poll(&self, py: Python<'_>) -> (bool, u32, u32) {
        py.detach(|| self.inner.lock().poll())
    }

    fn wait(&self, py: Python<'_>, timeout_ms: u64) -> (bool, u32, u32) {
        py.detach(|| self.inner.lock().wait(Duration::from_millis(timeout_ms)))
    }

    fn arriving(&self) -> Option<(u32, u32, u32, u32)> {
        let arriving = self.inner.lock().arriving()?;
        Some((arriving.units, arriving.units_from_tier, arriving.blocks_come, arriving.blocks_left))
    }

    fn settle_now(&self, py: Python<'_>) -> (bool, u32, u32) {
        py.detach(|| self.inner.lock().settle_now())
    }

    fn release(&self, py: Python<'_>) {
        py.detach(|| self.inner.lock().release());
    }
}

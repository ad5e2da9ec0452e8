//! `Claim`.

use std::time::Duration;

use kvdepot_depot::client::Claim as CoreClaim;
use kvdepot_io::fork::OfProcess;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors::OrRaise;

/// Units, units available now, units from tiers, blocks that have arrived, blocks that have not.
type ArrivingParts = (u32, u32, u32, u32, u32);

/// Opened, admitted, settled, whether it was queued; and for each tier its name, blocks, first and last one.
type TimesParts = (u64, Option<u64>, Option<u64>, bool, Vec<(String, u32, u64, u64)>);

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Claim {
    inner: OfProcess<Mutex<CoreClaim>>,
}

impl Claim {
    pub(crate) fn new(claim: CoreClaim) -> Self {
        Self { inner: OfProcess::new(Mutex::new(claim)) }
    }

    fn with<T: Send>(&self, py: Python<'_>, ask: impl FnOnce(&mut CoreClaim) -> T + Send) -> PyResult<T> {
        let inner = self.inner.or_inherited().or_raise()?;
        Ok(py.detach(|| ask(&mut inner.lock())))
    }
}

#[pymethods]
impl Claim {
    fn poll(&self, py: Python<'_>) -> PyResult<(bool, u32, u32)> {
        self.with(py, CoreClaim::poll)
    }

    fn wait(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<(bool, u32, u32)> {
        self.with(py, |claim| claim.wait(Duration::from_millis(timeout_ms)))
    }

    #[getter]
    fn openings(&self, py: Python<'_>) -> PyResult<u32> {
        self.with(py, |claim| claim.openings())
    }

    fn arriving(&self, py: Python<'_>) -> PyResult<Option<ArrivingParts>> {
        let arriving = self.with(py, |claim| claim.arriving())?;
        Ok(arriving.map(|it| (it.units, it.units_now, it.units_from_tier, it.blocks_come, it.blocks_left)))
    }

    fn settle_now(&self, py: Python<'_>) -> PyResult<(bool, u32, u32)> {
        self.with(py, CoreClaim::settle_now)
    }

    fn decline(&self, py: Python<'_>) -> PyResult<(bool, u32, u32)> {
        self.with(py, CoreClaim::decline)
    }

    #[pyo3(signature = (*, tell_times = false))]
    fn release(&self, py: Python<'_>, tell_times: bool) -> Option<TimesParts> {
        // A forked child has nothing to release: the leases are the parent's.
        let inner = self.inner.get()?;
        let times = py.detach(|| inner.lock().end(tell_times))?;
        let tiers = times.tiers.into_iter().map(|came| (came.tier, came.blocks, came.first_ns, came.last_ns));
        Some((times.opened_ns, times.admitted_ns, times.settled_ns, times.queued, tiers.collect()))
    }
}

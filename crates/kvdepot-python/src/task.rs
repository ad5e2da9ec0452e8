//! `Task`.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind};
use kvdepot_depot::client::{LayerDump, TaskState};
use kvdepot_io::fork::OfProcess;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{OrRaise, raise};
use crate::spent::Spent;

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Task {
    inner: OfProcess<Inner>,
}

struct Inner {
    state: Arc<TaskState>,
    layers: Option<LayerDump>,
    spent: Arc<Spent>,
}

impl Inner {
    /// Returns the indices of failed blocks, ascending, where `rows_per_block` rows of the task are one block.
    fn failed(&self, rows_per_block: usize) -> Vec<(usize, ErrorKind)> {
        let mut failed = self.state.failed();
        failed.iter_mut().for_each(|(row, _)| *row /= rows_per_block.max(1));
        failed.dedup_by_key(|&mut (block, _)| block);
        failed
    }
}

impl Task {
    pub(crate) fn whole(state: Arc<TaskState>, spent: &Arc<Spent>) -> Self {
        let spent = Arc::clone(spent);
        Self { inner: OfProcess::new(Inner { state, layers: None, spent }) }
    }

    pub(crate) fn layered(layers: LayerDump, spent: &Arc<Spent>) -> Self {
        let (state, spent) = (Arc::clone(layers.state()), Arc::clone(spent));
        Self { inner: OfProcess::new(Inner { state, layers: Some(layers), spent }) }
    }

    fn inner(&self) -> PyResult<&Inner> {
        self.inner.or_inherited().or_raise()
    }

    /// Runs a blocking call without the interpreter lock.
    fn waiting<T: Send>(
        &self,
        py: Python<'_>,
        wait: impl FnOnce(&TaskState) -> kvdepot_core::Result<T> + Send,
    ) -> PyResult<T> {
        let Inner { state, spent, .. } = self.inner()?;
        let outcome = py.detach(|| wait(state));
        spent.release(py);
        outcome.or_raise()
    }
}

#[pymethods]
impl Task {
    #[getter]
    fn id(&self) -> PyResult<u64> {
        Ok(self.inner()?.state.id())
    }

    #[getter]
    fn block_count(&self) -> PyResult<usize> {
        Ok(self.inner()?.state.block_count())
    }

    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let inner = self.inner()?;
        let done = inner.state.done();
        inner.spent.release(py);
        Ok(done)
    }

    #[pyo3(signature = (timeout_ms = None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> PyResult<bool> {
        self.waiting(py, |state| Ok(state.wait(timeout_ms.map(Duration::from_millis))))
    }

    #[pyo3(signature = (shard, *, timeout_ms = None))]
    fn wait_shard(&self, py: Python<'_>, shard: usize, timeout_ms: Option<u64>) -> PyResult<bool> {
        self.waiting(py, |state| Ok(state.wait_shard(shard, timeout_ms.map(Duration::from_millis))))
    }

    #[pyo3(signature = (shard, *, stream, timeout_ms = None))]
    fn wait_shard_on(
        &self,
        py: Python<'_>,
        shard: usize,
        stream: u64,
        timeout_ms: Option<u64>,
    ) -> PyResult<bool> {
        let timeout = timeout_ms.map(Duration::from_millis);
        self.waiting(py, |state| state.wait_shard_on(shard, stream, timeout))
    }

    #[pyo3(signature = (rows_per_block = 1))]
    fn failed<'py>(&self, py: Python<'py>, rows_per_block: usize) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let failed = self.inner()?.failed(rows_per_block);
        Ok(PyArray1::from_iter(py, failed.into_iter().map(|(block, _)| block as i64)))
    }

    #[pyo3(signature = (rows_per_block = 1))]
    fn failures<'py>(&self, py: Python<'py>, rows_per_block: usize) -> PyResult<Bound<'py, PyDict>> {
        let counts = PyDict::new(py);
        for (_, kind) in self.inner()?.failed(rows_per_block) {
            let before: u64 = counts.get_item(kind.as_str())?.map_or(Ok(0), |count| count.extract())?;
            counts.set_item(kind.as_str(), before + 1)?;
        }
        Ok(counts)
    }

    #[pyo3(signature = (shard, *, wait_event = 0, keep = None))]
    fn submit_shard(
        &self,
        py: Python<'_>,
        shard: usize,
        wait_event: u64,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let Inner { layers, spent, .. } = self.inner()?;
        let layers = layers.as_ref().ok_or_else(|| {
            raise(&Error::new(ErrorKind::Config, "only a task of begin_dump_pages takes shards one by one"))
        })?;
        let kept = spent.hold(keep);
        let outcome = py.detach(|| layers.submit_shard_keeping(shard, wait_event, kept));
        spent.release(py);
        outcome.or_raise()
    }

    fn fileno(&self) -> PyResult<i32> {
        let missing = || raise(&Error::new(ErrorKind::Io, "no descriptor could be made for the task"));
        Ok(self.inner()?.state.event().ok_or_else(missing)?.as_raw_fd())
    }
}

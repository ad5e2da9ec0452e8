//! `Task`.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind};
use kvdepot_depot::client::{LayerDump, TaskState};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{OrRaise, raise};

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Task {
    state: Arc<TaskState>,
    layers: Option<LayerDump>,
}

impl Task {
    pub(crate) const fn whole(state: Arc<TaskState>) -> Self {
        Self { state, layers: None }
    }

    pub(crate) fn layered(layers: LayerDump) -> Self {
        Self { state: Arc::clone(layers.state()), layers: Some(layers) }
    }
}

#[pymethods]
impl Task {
    #[getter]
    fn id(&self) -> u64 {
        self.state.id()
    }

    #[getter]
    fn block_count(&self) -> usize {
        self.state.block_count()
    }

    fn done(&self) -> bool {
        self.state.done()
    }

    #[pyo3(signature = (timeout_ms = None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> bool {
        py.detach(|| self.state.wait(timeout_ms.map(Duration::from_millis)))
    }

    #[pyo3(signature = (shard, timeout_ms = None))]
    fn wait_shard(&self, py: Python<'_>, shard: usize, timeout_ms: Option<u64>) -> bool {
        py.detach(|| self.state.wait_shard(shard, timeout_ms.map(Duration::from_millis)))
    }

    #[pyo3(signature = (shard, stream, timeout_ms = None))]
    fn wait_shard_on(
        &self,
        py: Python<'_>,
        shard: usize,
        stream: u64,
        timeout_ms: Option<u64>,
    ) -> PyResult<bool> {
        let timeout = timeout_ms.map(Duration::from_millis);
        py.detach(|| self.state.wait_shard_on(shard, stream, timeout)).or_raise()
    }

    fn failed<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        PyArray1::from_iter(py, self.state.failed().into_iter().map(|(block, _)| block as i64))
    }

    fn failures<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = PyDict::new(py);
        for (_, kind) in self.state.failed() {
            let before: u64 = counts.get_item(kind.as_str())?.map_or(Ok(0), |count| count.extract())?;
            counts.set_item(kind.as_str(), before + 1)?;
        }
        Ok(counts)
    }

    #[pyo3(signature = (shard, wait_event = 0))]
    fn submit_shard(&self, py: Python<'_>, shard: usize, wait_event: u64) -> PyResult<()> {
        let layers = self.layers.as_ref().ok_or_else(|| {
            raise(&Error::new(ErrorKind::Config, "only a task of begin_dump_pages takes shards one by one"))
        })?;
        py.detach(|| layers.submit_shard(shard, wait_event)).or_raise()
    }

    fn fileno(&self) -> PyResult<i32> {
        let missing = || raise(&Error::new(ErrorKind::Io, "no descriptor could be made for the task"));
        Ok(self.state.event().ok_or_else(missing)?.as_raw_fd())
    }
}

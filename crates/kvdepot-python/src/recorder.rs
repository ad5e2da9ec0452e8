//! `Recorder`: writes requests into the files of a trace.

use std::path::PathBuf;
use std::time::Duration;

use kvdepot_core::replay::Record;
use kvdepot_io::recording::{Recording, RecordingConfig};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::convert::hashes;
use crate::errors::OrRaise;

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Recorder {
    /// `None` after it was closed.
    inner: Mutex<Option<Recording>>,
    block_tokens: u32,
}

#[pymethods]
impl Recorder {
    #[new]
    #[pyo3(signature = (directory, name, *, block_tokens, file_bytes, files_max))]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        name: String,
        block_tokens: u32,
        file_bytes: u64,
        files_max: usize,
    ) -> PyResult<Self> {
        let config = RecordingConfig { directory, name, file_bytes, files_max };
        let recording = py.detach(|| Recording::start(config)).or_raise()?;
        Ok(Self { inner: Mutex::new(Some(recording)), block_tokens })
    }

    #[pyo3(signature = (block_hashes, *, timestamp_ms, input_length, output_length))]
    fn record(
        &self,
        block_hashes: &Bound<'_, PyAny>,
        timestamp_ms: u64,
        input_length: u64,
        output_length: u64,
    ) -> PyResult<bool> {
        let hashes = hashes(block_hashes)?;
        let record =
            Record { timestamp_ms, input_length, output_length, block_tokens: self.block_tokens, hashes };
        Ok(self.inner.lock().as_ref().is_some_and(|recording| recording.offer(record)))
    }

    fn counters(&self) -> (u64, u64, u64) {
        let counters = self.inner.lock().as_ref().map(Recording::counters).unwrap_or_default();
        (counters.written, counters.dropped, counters.failed)
    }

    #[pyo3(signature = (wait_ms = 2000))]
    fn close(&self, py: Python<'_>, wait_ms: u64) -> bool {
        let recording = self.inner.lock().take();
        py.detach(|| recording.is_none_or(|recording| recording.close(Duration::from_millis(wait_ms))))
    }
}

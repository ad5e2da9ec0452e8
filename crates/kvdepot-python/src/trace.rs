//! `Trace`: traces in memory, and simulations of caches with them.

use kvdepot_core::replay::{self, Level};
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors::OrRaise;
use crate::fleet;
use crate::level::LevelJson;

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Trace {
    inner: Mutex<replay::Trace>,
}

fn run(trace: &replay::Trace, levels_json: &str) -> Result<String> {
    let levels: Vec<LevelJson> = serde_json::from_str(levels_json).map_err(|e| {
        Error::new(ErrorKind::Config, "the levels of a replay are not valid JSON of levels").with_source(e)
    })?;
    let levels: Result<Vec<Level>> = levels.into_iter().map(LevelJson::level).collect();
    let report = replay::replay(trace, &levels?)?;
    let levels: Vec<serde_json::Value> = report
        .levels
        .iter()
        .map(|level| {
            serde_json::json!({
                "hits": level.hits, "written": level.written, "evicted": level.evicted, "over_budget": level.over_budget,
            })
        })
        .collect();
    let hits = report.hits();
    Ok(serde_json::json!({"references": report.references, "hits": hits, "levels": levels}).to_string())
}

type Row = (u64, u64, u64, Vec<u64>);

#[pymethods]
impl Trace {
    #[new]
    fn new() -> Self {
        Self { inner: Mutex::default() }
    }

    #[pyo3(signature = (line, *, later_ms = 0))]
    fn push_json(&self, line: &str, later_ms: u64) -> PyResult<()> {
        self.inner.lock().push_json_later(line, later_ms).or_raise()
    }

    fn sort(&self) {
        self.inner.lock().sort();
    }

    fn counts(&self, py: Python<'_>) -> (usize, u64, u64) {
        py.detach(|| {
            let trace = self.inner.lock();
            (trace.requests().len(), trace.references(), trace.distinct())
        })
    }

    fn requests(&self) -> Vec<Row> {
        let trace = self.inner.lock();
        let mut numbers = std::collections::HashMap::new();
        let mut rows = Vec::with_capacity(trace.requests().len());
        for request in trace.requests() {
            let mut blocks = Vec::with_capacity(trace.blocks(request).len());
            for &block in trace.blocks(request) {
                let next = numbers.len() as u64;
                blocks.push(*numbers.entry(block).or_insert(next));
            }
            rows.push((request.timestamp_ms, request.input_length, request.output_length, blocks));
        }
        rows
    }

    fn replay(&self, py: Python<'_>, levels_json: &str) -> PyResult<String> {
        py.detach(|| run(&self.inner.lock(), levels_json)).or_raise()
    }

    fn fleet(&self, py: Python<'_>, fleet_json: &str) -> PyResult<String> {
        py.detach(|| fleet::run(&self.inner.lock(), fleet_json)).or_raise()
    }

    fn belady(&self, py: Python<'_>, capacity: u64) -> u64 {
        py.detach(|| replay::belady(&self.inner.lock(), capacity))
    }
}

//! `serve` and `init_logging`.

use std::path::Path;
use std::time::Duration;

use kvdepot_depot::DepotConfig;
use kvdepot_server::logging::{self, Form, Settings};
use kvdepot_server::{Serving, WireConfig};
use pyo3::prelude::*;

use crate::errors::OrRaise;

#[pyfunction]
#[pyo3(signature = (config_json, socket_path, *, idle_exit_ms = 0, wire_json = None, take_over = false, wait_for_lock = false))]
pub(crate) fn serve(
    py: Python<'_>,
    config_json: &str,
    socket_path: &str,
    idle_exit_ms: u64,
    wire_json: Option<&str>,
    take_over: bool,
    wait_for_lock: bool,
) -> PyResult<()> {
    let config = DepotConfig::from_json(config_json).or_raise()?;
    let wire = wire_json.map(WireConfig::from_json).transpose().or_raise()?;
    let idle_exit = (idle_exit_ms > 0).then(|| Duration::from_millis(idle_exit_ms));
    let serving = Serving { config, socket: Path::new(socket_path), idle_exit, wire };
    let mut interrupted = None;
    let ended = py.detach(|| {
        let mut keep_on = || {
            // Python's own signal handlers decide: SIGINT raises KeyboardInterrupt, SIGTERM what the command line set.
            interrupted = Python::attach(|py| py.check_signals()).err();
            interrupted.is_none()
        };
        match (take_over, wait_for_lock) {
            (true, _) => serving.serve_taking_over(&mut keep_on),
            (false, true) => serving.serve_in_turn(&mut keep_on),
            (false, false) => serving.serve(&mut keep_on),
        }
    });
    ended.or_raise()?;
    interrupted.map_or(Ok(()), Err)
}

/// The code of the process that keeps a depot's pool. The depot starts that process.
#[pyfunction]
pub(crate) fn keep_pool(py: Python<'_>) -> PyResult<()> {
    py.detach(kvdepot_server::keeper::run).or_raise()
}

#[pyfunction]
#[pyo3(signature = (level, path = None, *, json = false, max_bytes = 0, max_files = 1, burst_lines = 0))]
pub(crate) fn init_logging(
    level: &str,
    path: Option<&str>,
    json: bool,
    max_bytes: u64,
    max_files: u32,
    burst_lines: u32,
) -> PyResult<()> {
    let form = if json { Form::Json } else { Form::Text };
    let path = path.map(Path::new);
    logging::init_with(level, &Settings { path, form, max_bytes, max_files, burst_lines })
        .or_raise()
        .map(|_| ())
}

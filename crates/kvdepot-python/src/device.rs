//! The devices of this machine, and the speed of copies on one of them.

use std::path::Path;

use kvdepot_copy::cuda::bench::{self, BenchConfig};
use kvdepot_copy::cuda::{Driver, describe};
use kvdepot_core::{Error, ErrorKind, Result};
use pyo3::prelude::*;

use crate::errors::OrRaise;

#[pyfunction]
pub(crate) fn describe_devices(py: Python<'_>, cache_dir: &str) -> PyResult<String> {
    py.detach(|| json(&describe(Some(Path::new(cache_dir))))).or_raise()
}

#[pyfunction]
#[pyo3(signature = (device = "0", cache_dir = None, *, smoke = false, kernel_blocks = None))]
pub(crate) fn bench_copies(
    py: Python<'_>,
    device: &str,
    cache_dir: Option<&str>,
    smoke: bool,
    kernel_blocks: Option<u32>,
) -> PyResult<String> {
    py.detach(|| {
        let mut config = BenchConfig::new(device.parse()?);
        config.engine.cache_dir = cache_dir.map(Into::into);
        if let Some(blocks) = kernel_blocks {
            config.engine.kernel_blocks_max = blocks;
        }
        if smoke {
            config = config.smoke();
        }
        json(&bench::run(Driver::load()?, &config, |_| {})?)
    })
    .or_raise()
}

fn json<T: serde::Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|e| Error::new(ErrorKind::Io, "a report cannot be written as JSON").with_source(e))
}

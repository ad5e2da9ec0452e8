//! `Namespace`.

use std::sync::Arc;

use kvdepot_core::NamespaceSpec;
use pyo3::prelude::*;

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Namespace {
    pub(crate) spec: Arc<NamespaceSpec>,
}

#[pymethods]
impl Namespace {
    #[getter]
    fn canonical(&self) -> &str {
        self.spec.canonical()
    }

    #[getter]
    fn id(&self) -> String {
        self.spec.root().to_string()
    }

    #[getter]
    fn block_bytes(&self) -> u64 {
        self.spec.layout().block_bytes()
    }

    #[getter]
    fn shard_count(&self) -> usize {
        self.spec.layout().shard_count()
    }
}

//! `Store`.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{BlockHash, Error, ErrorKind};
use kvdepot_depot::client::Store as CoreStore;
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::convert::hashes;
use crate::errors::OrRaise;
use crate::namespace::Namespace;
use crate::task::Task;

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Store {
    inner: Mutex<Option<CoreStore>>,
    namespace: Arc<kvdepot_core::NamespaceSpec>,
}

impl Store {
    pub(crate) fn new(store: CoreStore) -> Self {
        let namespace = Arc::clone(store.spec());
        Self { inner: Mutex::new(Some(store)), namespace }
    }

    fn store(&self) -> PyResult<CoreStore> {
        let closed = || Error::new(ErrorKind::Closed, "the store was closed");
        self.inner.lock().clone().ok_or_else(closed).or_raise()
    }
}

impl Store {
    /// Runs a call that takes pages, without the interpreter lock.
    fn with_pages<T: Send>(
        &self,
        py: Python<'_>,
        pages: &PyReadonlyArray1<'_, i64>,
        run: impl FnOnce(&CoreStore, &[i64]) -> kvdepot_core::Result<T> + Send,
    ) -> PyResult<T> {
        let (store, pages) = (self.store()?, contiguous(pages, "pages")?.to_vec());
        py.detach(|| run(&store, &pages)).or_raise()
    }

    /// Runs a call that takes shards and rows of addresses, without the interpreter lock.
    fn with_addresses<T: Send>(
        &self,
        py: Python<'_>,
        shards: &PyReadonlyArray1<'_, i64>,
        addresses: &PyReadonlyArray2<'_, u64>,
        run: impl FnOnce(&CoreStore, &[i64], &[u64]) -> kvdepot_core::Result<T> + Send,
    ) -> PyResult<T> {
        let store = self.store()?;
        let (shards, addresses) = (contiguous(shards, "shards")?.to_vec(), rows(addresses)?.to_vec());
        py.detach(|| run(&store, &shards, &addresses)).or_raise()
    }
}

/// A numpy argument as a slice; strided views are refused rather than read wrongly.
fn contiguous<'a, T: numpy::Element>(array: &'a PyReadonlyArray1<'_, T>, name: &str) -> PyResult<&'a [T]> {
    array.as_slice().map_err(|_| {
        let message = format!("{name} must be a contiguous array: pass numpy.ascontiguousarray({name})");
        crate::errors::raise(&Error::new(ErrorKind::Config, message))
    })
}

fn rows<'a>(array: &'a PyReadonlyArray2<'_, u64>) -> PyResult<&'a [u64]> {
    array.as_slice().map_err(|_| {
        let shape = format!("{:?}", array.shape());
        crate::errors::raise(
            &Error::new(ErrorKind::Config, "addresses must be a contiguous array").with("shape", shape),
        )
    })
}

#[pymethods]
impl Store {
    #[getter]
    fn namespace(&self) -> Namespace {
        Namespace { spec: Arc::clone(&self.namespace) }
    }

    fn register_pages(
        &self,
        py: Python<'_>,
        bases: PyReadonlyArray1<'_, u64>,
        strides: PyReadonlyArray1<'_, i64>,
        page_count: u64,
    ) -> PyResult<()> {
        let (bases, strides) =
            (contiguous(&bases, "bases")?.to_vec(), contiguous(&strides, "strides")?.to_vec());
        let store = self.store()?;
        // SAFETY: the stub's contract: the memory stays mapped until the store is closed.
        py.detach(|| unsafe { store.register_pages(bases, strides, page_count) }).or_raise()
    }

    fn set_decoding(&self, decoding: bool) -> PyResult<()> {
        self.store()?.set_decoding(decoding);
        Ok(())
    }

    #[pyo3(signature = (hashes, pages, wait_event = 0))]
    fn dump_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        pages: PyReadonlyArray1<'_, i64>,
        wait_event: u64,
    ) -> PyResult<Task> {
        // SAFETY: the stub's contract: registered pages stay mapped, and are left alone until the task is done.
        let run = |store: &CoreStore, pages: &[i64]| unsafe { store.dump_pages(hashes, pages, wait_event) };
        self.with_pages(py, &pages, run).map(Task::whole)
    }

    fn begin_dump_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        pages: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<Task> {
        // SAFETY: as for `dump_pages`, from each shard's submission on.
        let run = |store: &CoreStore, pages: &[i64]| unsafe { store.begin_dump_pages(hashes, pages) };
        self.with_pages(py, &pages, run).map(Task::layered)
    }

    #[pyo3(signature = (hashes, pages, wait_event = 0, patience_ms = None))]
    fn load_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        pages: PyReadonlyArray1<'_, i64>,
        wait_event: u64,
        patience_ms: Option<u64>,
    ) -> PyResult<Task> {
        let patience = patience_ms.map(Duration::from_millis);
        // SAFETY: as for `dump_pages`; the caller owns the pages until the task is done.
        let run = |store: &CoreStore, pages: &[i64]| unsafe {
            store.load_pages_within(hashes, pages, wait_event, patience)
        };
        self.with_pages(py, &pages, run).map(Task::whole)
    }

    fn dump(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        shards: PyReadonlyArray1<'_, i64>,
        addresses: PyReadonlyArray2<'_, u64>,
    ) -> PyResult<Task> {
        // SAFETY: the caller vouches for its addresses until the task is done.
        let run = |store: &CoreStore, shards: &[i64], addresses: &[u64]| unsafe {
            store.dump(hashes, shards, addresses)
        };
        self.with_addresses(py, &shards, &addresses, run).map(Task::whole)
    }

    fn load(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        shards: PyReadonlyArray1<'_, i64>,
        addresses: PyReadonlyArray2<'_, u64>,
    ) -> PyResult<Task> {
        // SAFETY: the caller vouches for its addresses until the task is done.
        let run = |store: &CoreStore, shards: &[i64], addresses: &[u64]| unsafe {
            store.load(hashes, shards, addresses)
        };
        self.with_addresses(py, &shards, &addresses, run).map(Task::whole)
    }

    fn lookup<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
    ) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let store = self.store()?;
        let present = py.detach(|| store.lookup(&hashes));
        Ok(PyArray1::from_iter(py, present.into_iter().map(|byte| byte != 0)))
    }

    fn lookup_on_prefix(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
    ) -> PyResult<usize> {
        let store = self.store()?;
        Ok(py.detach(|| store.lookup_on_prefix(&hashes)))
    }

    fn prefetch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
    ) -> PyResult<()> {
        let store = self.store()?;
        py.detach(|| store.prefetch(&hashes));
        Ok(())
    }

    fn close(&self, py: Python<'_>) {
        let store = self.inner.lock().take();
        py.detach(|| drop(store));
    }
}

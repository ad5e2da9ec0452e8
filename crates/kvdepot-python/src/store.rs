//! `Store`.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{BlockHash, Error, ErrorKind, Priority};
use kvdepot_depot::client::Store as CoreStore;
use kvdepot_io::fork::OfProcess;
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::convert::hashes;
use crate::errors::OrRaise;
use crate::namespace::Namespace;
use crate::spent::Spent;
use crate::task::Task;

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Store {
    inner: OfProcess<Inner>,
    namespace: Arc<kvdepot_core::NamespaceSpec>,
}

struct Inner {
    /// `None` after it was closed.
    store: Mutex<Option<CoreStore>>,
    /// The closed store, while copies of it may be under way.
    closing: Mutex<Option<CoreStore>>,
    spent: Arc<Spent>,
}

impl Store {
    pub(crate) fn new(store: CoreStore) -> Self {
        let namespace = Arc::clone(store.spec());
        let inner =
            Inner { store: Mutex::new(Some(store)), closing: Mutex::default(), spent: Arc::default() };
        Self { inner: OfProcess::new(inner), namespace }
    }

    fn opened(&self) -> PyResult<(CoreStore, &Arc<Spent>)> {
        let Inner { store, spent, .. } = self.inner.or_inherited().or_raise()?;
        let closed = || Error::new(ErrorKind::Closed, "the store was closed");
        let store = store.lock().clone().ok_or_else(closed).or_raise()?;
        Ok((store, spent))
    }

    /// Runs a call without the interpreter lock, through a handle whose tasks hold `keep` (see `CoreStore::keeping`).
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        keep: Option<Py<PyAny>>,
        run: impl FnOnce(&CoreStore) -> kvdepot_core::Result<T> + Send,
    ) -> PyResult<(T, &Arc<Spent>)> {
        let (store, spent) = self.opened()?;
        let kept = spent.hold(keep);
        let outcome = py.detach(|| {
            // The last handle of a store joins its threads, which must not happen with the interpreter lock.
            let store = store;
            run(&store.keeping(kept))
        });
        spent.release(py);
        Ok((outcome.or_raise()?, spent))
    }
}

/// Returns a numpy argument as a slice. Strided views are refused, because they would be read wrongly.
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

    #[pyo3(signature = (bases, strides, page_count, keep = None, *, sizes = None))]
    fn register_pages(
        &self,
        py: Python<'_>,
        bases: PyReadonlyArray1<'_, u64>,
        strides: PyReadonlyArray1<'_, i64>,
        page_count: u64,
        keep: Option<Py<PyAny>>,
        sizes: Option<PyReadonlyArray1<'_, u64>>,
    ) -> PyResult<()> {
        let (bases, strides) =
            (contiguous(&bases, "bases")?.to_vec(), contiguous(&strides, "strides")?.to_vec());
        let sizes = match &sizes {
            Some(sizes) => Some(contiguous(sizes, "sizes")?.to_vec()),
            None => None,
        };
        // SAFETY: the stub's contract: the memory stays mapped until the store is closed, or belongs to `keep`.
        let run = |store: &CoreStore| unsafe { store.register_pieces(bases, strides, page_count, sizes) };
        self.with(py, keep, run).map(|_| ())
    }

    fn set_decoding(&self, decoding: bool) -> PyResult<()> {
        self.opened()?.0.set_decoding(decoding);
        Ok(())
    }

    #[pyo3(signature = (hashes, pages, *, wait_event = 0, priority = "normal", keep = None))]
    fn dump_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        pages: PyReadonlyArray1<'_, i64>,
        wait_event: u64,
        priority: &str,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Task> {
        let (pages, priority) =
            (contiguous(&pages, "pages")?.to_vec(), Priority::from_name(priority).or_raise()?);
        let run = |store: &CoreStore| {
            // SAFETY: the stub's contract: registered pages stay mapped, and are left alone until the task is done.
            unsafe { store.with_priority(priority).dump_pages(hashes, &pages, wait_event) }
        };
        self.with(py, keep, run).map(|(state, spent)| Task::whole(state, spent))
    }

    #[pyo3(signature = (hashes, pages, *, priority = "normal"))]
    fn begin_dump_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        pages: PyReadonlyArray1<'_, i64>,
        priority: &str,
    ) -> PyResult<Task> {
        let (pages, priority) =
            (contiguous(&pages, "pages")?.to_vec(), Priority::from_name(priority).or_raise()?);
        let run = |store: &CoreStore| {
            // SAFETY: as for `dump_pages`, from each shard's submission on.
            unsafe { store.with_priority(priority).begin_dump_pages(hashes, &pages) }
        };
        self.with(py, None, run).map(|(layers, spent)| Task::layered(layers, spent))
    }

    #[pyo3(signature = (hashes, pages, *, wait_event = 0, patience_ms = None, keep = None))]
    fn load_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        pages: PyReadonlyArray1<'_, i64>,
        wait_event: u64,
        patience_ms: Option<u64>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Task> {
        let (pages, patience) =
            (contiguous(&pages, "pages")?.to_vec(), patience_ms.map(Duration::from_millis));
        // SAFETY: as for `dump_pages`; the caller owns the pages until the task is done.
        let run =
            |store: &CoreStore| unsafe { store.load_pages_within(hashes, &pages, wait_event, patience) };
        self.with(py, keep, run).map(|(state, spent)| Task::whole(state, spent))
    }

    #[pyo3(signature = (hashes, shards, addresses, keep = None, *, wait_event = 0, priority = "normal"))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python call")]
    fn dump(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        shards: PyReadonlyArray1<'_, i64>,
        addresses: PyReadonlyArray2<'_, u64>,
        keep: Option<Py<PyAny>>,
        wait_event: u64,
        priority: &str,
    ) -> PyResult<Task> {
        let (shards, addresses) = (contiguous(&shards, "shards")?.to_vec(), rows(&addresses)?.to_vec());
        let priority = Priority::from_name(priority).or_raise()?;
        let run = |store: &CoreStore| {
            // SAFETY: the memory belongs to `keep`, or the caller guarantees it until the task is done.
            unsafe { store.with_priority(priority).dump(hashes, &shards, &addresses, wait_event) }
        };
        self.with(py, keep, run).map(|(state, spent)| Task::whole(state, spent))
    }

    #[pyo3(signature = (hashes, shards, addresses, keep = None, *, wait_event = 0))]
    fn load(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
        shards: PyReadonlyArray1<'_, i64>,
        addresses: PyReadonlyArray2<'_, u64>,
        keep: Option<Py<PyAny>>,
        wait_event: u64,
    ) -> PyResult<Task> {
        let (shards, addresses) = (contiguous(&shards, "shards")?.to_vec(), rows(&addresses)?.to_vec());
        // SAFETY: as for `dump`.
        let run = |store: &CoreStore| unsafe { store.load(hashes, &shards, &addresses, wait_event) };
        self.with(py, keep, run).map(|(state, spent)| Task::whole(state, spent))
    }

    fn lookup<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
    ) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let (present, _) = self.with(py, None, |store| Ok(store.lookup(&hashes)))?;
        Ok(PyArray1::from_iter(py, present.into_iter().map(|byte| byte != 0)))
    }

    fn lookup_on_prefix(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
    ) -> PyResult<usize> {
        Ok(self.with(py, None, |store| Ok(store.lookup_on_prefix(&hashes)))?.0)
    }

    fn prefetch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<BlockHash>,
    ) -> PyResult<()> {
        self.with(py, None, |store| {
            store.prefetch(&hashes);
            Ok(())
        })
        .map(|_| ())
    }

    #[pyo3(signature = (wait_ms = 0))]
    fn close(&self, py: Python<'_>, wait_ms: u64) -> bool {
        // A forked child has nothing to close: threads and tasks are the parent's.
        let Some(Inner { store, closing, spent }) = self.inner.get() else { return true };
        let wait = Duration::from_millis(wait_ms);
        let ended = py.detach(|| {
            let store = {
                let mut closing = closing.lock();
                if let Some(store) = store.lock().take() {
                    *closing = Some(store);
                }
                closing.clone()
            };
            let ended = store.is_none_or(|store| store.close(wait));
            if ended {
                let closed = closing.lock().take();
                drop(closed);
            }
            ended
        });
        spent.release(py);
        ended
    }
}

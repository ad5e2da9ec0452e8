//! `Follower`.

use std::sync::Arc;

use kvdepot_depot::client::{Delta, Followed, Follower as CoreFollower};
use kvdepot_io::fork::OfProcess;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::OrRaise;
use crate::namespace::Namespace;

/// Group, place, whether the blocks are stored, their hashes.
type Changes<'py> = (u32, u8, bool, Vec<Bound<'py, PyBytes>>);

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Follower {
    inner: OfProcess<Arc<CoreFollower>>,
}

impl Follower {
    pub(crate) fn new(follower: Arc<CoreFollower>) -> Self {
        Self { inner: OfProcess::new(follower) }
    }

    fn inner(&self) -> PyResult<&Arc<CoreFollower>> {
        self.inner.or_inherited().or_raise()
    }
}

#[pymethods]
impl Follower {
    #[pyo3(signature = (most = 1024))]
    fn take<'py>(&self, py: Python<'py>, most: usize) -> PyResult<Vec<Changes<'py>>> {
        let inner = self.inner()?;
        let taken = py.detach(|| inner.take(most));
        let same = |a: &Delta, b: &Delta| (a.group, a.place, a.is_stored) == (b.group, b.place, b.is_stored);
        let runs = taken.chunk_by(same).map(|run| {
            let hashes = run.iter().map(|delta| PyBytes::new(py, &delta.hash.0)).collect();
            (run[0].group, run[0].place, run[0].is_stored, hashes)
        });
        Ok(runs.collect())
    }

    fn follow(&self, groups: Vec<Vec<PyRef<'_, Namespace>>>) -> PyResult<()> {
        let specs = |group: &Vec<PyRef<'_, Namespace>>| group.iter().map(|it| Arc::clone(&it.spec)).collect();
        self.inner()?.follow(Followed::Groups(groups.iter().map(specs).collect()));
        Ok(())
    }

    #[getter]
    fn places(&self) -> PyResult<Vec<String>> {
        Ok(self.inner()?.places())
    }

    #[getter]
    fn namespaces(&self) -> PyResult<Vec<String>> {
        Ok(self.inner()?.names().iter().map(ToString::to_string).collect())
    }

    #[getter]
    fn in_step(&self) -> PyResult<bool> {
        Ok(self.inner()?.state().is_in_step)
    }

    fn counters(&self) -> PyResult<Vec<(&'static str, u64)>> {
        let state = self.inner()?.state();
        Ok(vec![
            ("blocks", state.blocks),
            ("left_out", state.left_out),
            ("gaps", state.gaps),
            ("walks", state.walks),
        ])
    }

    fn close(&self, py: Python<'_>) {
        // A forked child has nothing to close: the thread is the parent's.
        if let Some(inner) = self.inner.get() {
            py.detach(|| inner.close());
        }
    }
}

//! `MediumReader` and `MediumCheck`: what lies on the medium of a tier.

use std::path::PathBuf;
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::fork::OfProcess;
use kvdepot_tier::scan::Scan;
use kvdepot_tier::stored::{Check, Finding, Stored, StoredBlock, StoredNamespace};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors::OrRaise;

/// Root, epoch, blocks, bytes, problem.
type NamespaceRow = (String, u32, u64, u64, Option<&'static str>);
/// Hash, offset, bytes, order.
type BlockRow = (String, u64, u64, u64);
/// Root, hash, offset, reason.
type FindingRow = (Option<String>, Option<String>, u64, String);
/// Blocks, their bytes, bytes that were read, findings.
type CheckedRow = (u64, u64, u64, Vec<FindingRow>);

#[derive(Debug)]
struct Listed {
    scan: Scan,
    stored: Stored,
}

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct MediumReader {
    inner: OfProcess<Arc<Listed>>,
}

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct MediumCheck {
    inner: OfProcess<Mutex<Check>>,
}

fn root_of(text: &str) -> Result<NamespaceId> {
    NamespaceId::from_hex(text).ok_or_else(|| {
        Error::new(ErrorKind::Config, "a namespace's name has 32 lower-case hex digits").with("name", text)
    })
}

impl MediumReader {
    fn inner(&self) -> PyResult<&Arc<Listed>> {
        self.inner.or_inherited().or_raise()
    }
}

#[pymethods]
impl MediumReader {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let listed = || {
            let scan = Scan::open(&path)?;
            let stored = scan.list()?;
            Ok(Listed { scan, stored })
        };
        Ok(Self { inner: OfProcess::new(Arc::new(py.detach(listed).or_raise()?)) })
    }

    #[getter]
    fn tier(&self) -> PyResult<&'static str> {
        Ok(self.inner()?.scan.tier())
    }

    #[getter]
    fn problem(&self) -> PyResult<Option<&'static str>> {
        Ok(self.inner()?.stored.problem)
    }

    fn namespaces(&self) -> PyResult<Vec<NamespaceRow>> {
        let row = |found: &StoredNamespace| {
            (found.root.to_string(), found.epoch, found.blocks, found.bytes, found.problem)
        };
        Ok(self.inner()?.stored.namespaces.iter().map(row).collect())
    }

    #[pyo3(signature = (namespace, *, start = 0, most = 4096))]
    fn blocks(
        &self,
        py: Python<'_>,
        namespace: &str,
        start: usize,
        most: usize,
    ) -> PyResult<(Vec<BlockRow>, Option<usize>)> {
        let (root, inner) = (root_of(namespace).or_raise()?, self.inner()?);
        Ok(py.detach(|| {
            let of_it = |(_, block): &(usize, &StoredBlock)| block.root == root;
            let mut left = inner.stored.blocks.iter().enumerate().skip(start).filter(of_it);
            let row = |(_, block): (usize, &StoredBlock)| {
                (block.key.hash.to_string(), block.offset_bytes, block.bytes, block.order)
            };
            let rows = left.by_ref().take(most).map(row).collect();
            (rows, left.next().map(|(number, _)| number))
        }))
    }

    #[pyo3(signature = (namespace = None))]
    fn check(&self, py: Python<'_>, namespace: Option<&str>) -> PyResult<MediumCheck> {
        let (root, inner) = (namespace.map(root_of).transpose().or_raise()?, self.inner()?);
        let check = py.detach(|| inner.scan.check(&inner.stored, root));
        Ok(MediumCheck { inner: OfProcess::new(Mutex::new(check)) })
    }
}

#[pymethods]
impl MediumCheck {
    fn next(&self, py: Python<'_>, limit_bytes: u64) -> PyResult<Option<CheckedRow>> {
        let inner = self.inner.or_inherited().or_raise()?;
        let checked = py.detach(|| inner.lock().next(limit_bytes)).or_raise()?;
        Ok(checked.map(|checked| {
            let row = |found: Finding| {
                let (root, hash) =
                    (found.root.map(|root| root.to_string()), found.hash.map(|hash| hash.to_string()));
                (root, hash, found.offset_bytes, found.reason)
            };
            let findings = checked.findings.into_iter().map(row).collect();
            (checked.blocks, checked.bytes, checked.read_bytes, findings)
        }))
    }
}

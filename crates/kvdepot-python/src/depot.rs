//! `Depot`: this process's attachment.

use std::sync::{Arc, Weak};
use std::time::Duration;

use kvdepot_copy::EngineSpec;
use kvdepot_core::NamespaceSpec;
use kvdepot_depot::client::{
    Attachment, Claim as CoreClaim, ClaimGroupSpec, DeviceEngine, Followed, Follower as CoreFollower,
    QueueDepths, Store as CoreStore,
};
use kvdepot_depot::{Depot as CoreDepot, DepotConfig};
use kvdepot_io::fork::OfProcess;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::claim::Claim;
use crate::convert::{hashes, spec};
use crate::errors::OrRaise;
use crate::follower::Follower;
use crate::namespace::Namespace;
use crate::store::Store;

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Depot {
    inner: OfProcess<Inner>,
}

struct Inner {
    attachment: Mutex<Option<Arc<Attachment>>>,
    /// Copy engines, shared by the stores of this attachment.
    engines: Mutex<Vec<(EngineSpec, Arc<DeviceEngine>)>>,
    /// Ended with the attachment, which they would keep.
    followers: Mutex<Vec<Weak<CoreFollower>>>,
}

impl Depot {
    fn new(attachment: Arc<Attachment>) -> Self {
        let inner = Inner {
            attachment: Mutex::new(Some(attachment)),
            engines: Mutex::default(),
            followers: Mutex::default(),
        };
        Self { inner: OfProcess::new(inner) }
    }

    fn inner(&self) -> PyResult<&Inner> {
        self.inner.or_inherited().or_raise()
    }

    fn attachment(&self) -> PyResult<Arc<Attachment>> {
        let closed = || kvdepot_core::Error::new(kvdepot_core::ErrorKind::Closed, "the depot was closed");
        self.inner()?.attachment.lock().clone().ok_or_else(closed).or_raise()
    }

    fn open(&self, py: Python<'_>, spec: NamespaceSpec) -> PyResult<Namespace> {
        let spec = Arc::new(spec);
        let attachment = self.attachment()?;
        // Opened here, so that a description refused by the depot is an error at attach and not a silent miss.
        py.detach(|| attachment.register(&spec)).or_raise()?;
        Ok(Namespace { spec })
    }
}

impl Inner {
    fn engine(&self, spec: EngineSpec) -> kvdepot_core::Result<Arc<DeviceEngine>> {
        let mut engines = self.engines.lock();
        if let Some((_, engine)) = engines.iter().find(|(have, _)| *have == spec) {
            return Ok(Arc::clone(engine));
        }
        let engine = DeviceEngine::new(spec.open()?);
        engines.push((spec, Arc::clone(&engine)));
        Ok(engine)
    }
}

#[pymethods]
impl Depot {
    #[staticmethod]
    fn embedded(py: Python<'_>, config_json: &str) -> PyResult<Self> {
        let attachment = py
            .detach(|| Attachment::embedded(CoreDepot::start_private(DepotConfig::from_json(config_json)?)?));
        Ok(Self::new(attachment.or_raise()?))
    }

    #[staticmethod]
    #[pyo3(signature = (socket_path, spawn = None, *, wait_ms = 10_000, call_timeout_ms = 8, queue_depths = None, passes_through = false))]
    fn connect(
        py: Python<'_>,
        socket_path: &str,
        spawn: Option<Vec<String>>,
        wait_ms: u64,
        call_timeout_ms: u64,
        queue_depths: Option<(u64, u64)>,
        passes_through: bool,
    ) -> PyResult<Self> {
        let (wait, call_timeout) =
            (Duration::from_millis(wait_ms), Duration::from_millis(call_timeout_ms.max(1)));
        let attachment = py.detach(|| Attachment::connect(socket_path.into(), spawn, wait, call_timeout));
        let attachment = attachment.or_raise()?;
        attachment.set_passes_through(passes_through);
        if let Some((waiting, running)) = queue_depths {
            attachment.set_queue_depths(QueueDepths { waiting, running });
        }
        Ok(Self::new(attachment))
    }

    #[getter]
    fn attached(&self) -> bool {
        let is_attached = |inner: &Inner| inner.attachment.lock().as_ref().is_some_and(|it| it.attached());
        self.inner.get().is_some_and(is_attached)
    }

    #[getter]
    fn trouble(&self) -> String {
        let why = |inner: &Inner| inner.attachment.lock().as_ref().map(|it| it.trouble());
        self.inner.get().and_then(why).unwrap_or_default()
    }

    fn open_namespace(&self, py: Python<'_>, facts_json: &str, layout_json: &str) -> PyResult<Namespace> {
        self.open(py, spec(facts_json, layout_json).or_raise()?)
    }

    fn open_canonical(&self, py: Python<'_>, canonical: &str) -> PyResult<Namespace> {
        self.open(py, NamespaceSpec::from_canonical(canonical).or_raise()?)
    }

    fn close_namespace(&self, py: Python<'_>, namespace: &Namespace) -> PyResult<()> {
        let (attachment, spec) = (self.attachment()?, &namespace.spec);
        py.detach(|| attachment.close_namespace(spec));
        Ok(())
    }

    #[pyo3(signature = (namespace, *, timeout_ms = 30_000, copy_json = "{}"))]
    fn store(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        timeout_ms: u64,
        copy_json: &str,
    ) -> PyResult<Store> {
        let (attachment, spec) = (self.attachment()?, Arc::clone(&namespace.spec));
        let (timeout, inner) = (Duration::from_millis(timeout_ms.max(1)), self.inner()?);
        let store = py.detach(|| {
            let device = inner.engine(EngineSpec::from_json(copy_json)?)?;
            CoreStore::new(&attachment, spec, device, timeout)
        });
        Ok(Store::new(store.or_raise()?))
    }

    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    #[pyo3(signature = (groups, hashes, *, skip, limit, tiers = None, label = ""))]
    fn claim(
        &self,
        py: Python<'_>,
        groups: Vec<(Vec<PyRef<'_, Namespace>>, u32, u32)>,
        #[pyo3(from_py_with = hashes)] hashes: Vec<kvdepot_core::BlockHash>,
        skip: u32,
        limit: u32,
        tiers: Option<Vec<String>>,
        label: &str,
    ) -> PyResult<Claim> {
        let attachment = self.attachment()?;
        let groups: Vec<ClaimGroupSpec> = groups
            .into_iter()
            .map(|(namespaces, window_blocks, hashes_per_block)| ClaimGroupSpec {
                namespaces: namespaces.iter().map(|namespace| Arc::clone(&namespace.spec)).collect(),
                window_blocks,
                hashes_per_block,
            })
            .collect();
        let (range, tiers) = ((skip, limit), tiers.as_deref());
        let claim = py.detach(|| CoreClaim::open_from(&attachment, &groups, &hashes, range, tiers, label));
        Ok(Claim::new(claim.or_raise()?))
    }

    fn reset(&self, py: Python<'_>, namespaces: Vec<PyRef<'_, Namespace>>) -> PyResult<()> {
        let attachment = self.attachment()?;
        let specs: Vec<Arc<NamespaceSpec>> =
            namespaces.iter().map(|namespace| Arc::clone(&namespace.spec)).collect();
        py.detach(|| attachment.reset(&specs)).or_raise()
    }

    #[pyo3(signature = (groups = None))]
    fn follow(&self, py: Python<'_>, groups: Option<Vec<Vec<PyRef<'_, Namespace>>>>) -> PyResult<Follower> {
        let (attachment, inner) = (self.attachment()?, self.inner()?);
        let specs = |group: &Vec<PyRef<'_, Namespace>>| group.iter().map(|it| Arc::clone(&it.spec)).collect();
        let followed =
            groups.map_or(Followed::All, |groups| Followed::Groups(groups.iter().map(specs).collect()));
        let follower = Arc::new(py.detach(|| CoreFollower::start(&attachment, followed)).or_raise()?);
        let mut followers = inner.followers.lock();
        followers.retain(|other| other.strong_count() > 0);
        followers.push(Arc::downgrade(&follower));
        Ok(Follower::new(follower))
    }

    fn drain(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<bool> {
        let attachment = self.attachment()?;
        py.detach(|| attachment.drain(Duration::from_millis(timeout_ms))).or_raise()
    }

    fn stats_json(&self, py: Python<'_>) -> PyResult<String> {
        let attachment = self.attachment()?;
        Ok(py.detach(|| attachment.stats().to_string()))
    }

    fn close(&self, py: Python<'_>) {
        // A forked child has nothing to close: the attachment is the parent's.
        let Some(inner) = self.inner.get() else { return };
        let attachment = inner.attachment.lock().take();
        py.detach(|| {
            let followers = std::mem::take(&mut *inner.followers.lock());
            followers.iter().filter_map(Weak::upgrade).for_each(|follower| follower.close());
            if let Some(attachment) = attachment {
                attachment.close();
            }
            // Engines that no store uses any more are closed here, without the interpreter lock, since a thread that
            // opens an engine under the engines' lock may be waiting for the interpreter lock.
            let engines = std::mem::take(&mut *inner.engines.lock());
            drop(engines);
        });
    }
}

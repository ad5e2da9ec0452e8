//! Shared by the tests of the doors: a depot served on a thread, and memory pages like an engine's.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

pub(crate) mod roles;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_copy::{CopyEngine, HostEngine};
use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_depot::client::{Attachment, DeviceEngine, Store};
use kvdepot_depot::{Depot, DepotConfig};
use kvdepot_server::Ended;

pub(crate) const LONG: Duration = Duration::from_secs(120);

/// Makes a configuration without tiers, with the additions of `more`.
pub(crate) fn config(pool_bytes: u64, more: serde_json::Value) -> DepotConfig {
    let mut value = serde_json::json!({"pipeline": "Cache", "pool_bytes": pool_bytes, "timeout_ms": 60_000, "eviction": "lru"});
    for (key, entry) in more.as_object().unwrap() {
        value[key] = entry.clone();
    }
    DepotConfig::from_json(&value.to_string()).unwrap()
}

/// A depot served at a socket in its own directory.
pub(crate) struct Served {
    pub(crate) socket: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Ended>>,
    _directory: tempfile::TempDir,
}

impl Served {
    pub(crate) fn start(config: DepotConfig) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("depot.sock");
        let stop = Arc::new(AtomicBool::new(false));
        let (path, flag) = (socket.clone(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            kvdepot_server::Serving::new(config, &path).serve(&mut || !flag.load(Ordering::Acquire)).unwrap()
        });
        Self { socket, stop, thread: Some(thread), _directory: directory }
    }

    pub(crate) fn attach(&self) -> Arc<Attachment> {
        let attachment = Attachment::connect(self.socket.clone(), None, LONG, LONG).unwrap();
        assert!(attachment.attached());
        attachment
    }

    pub(crate) fn stop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Asks a depot until what it answers holds; again only if the client could not ask, because the depot is lost or does not
/// know the namespace yet.
pub(crate) fn once_open(attachment: &Arc<Attachment>, operation: &str, holds: impl Fn() -> bool) {
    let unanswered = || {
        let kinds = attachment.stats()["failures"][operation].clone();
        kinds.as_object().map_or(0, |kinds| kinds.values().filter_map(serde_json::Value::as_u64).sum::<u64>())
    };
    let end = Instant::now() + LONG;
    loop {
        let before = unanswered();
        if holds() {
            return;
        }
        assert!(unanswered() > before, "a {operation} was answered otherwise");
        assert!(Instant::now() < end, "no {operation} is answered");
        std::thread::yield_now();
    }
}

pub(crate) fn embedded(config: DepotConfig) -> Arc<Attachment> {
    Attachment::embedded(Depot::start_private(config).unwrap()).unwrap()
}

pub(crate) fn spec(name: &str, layout: BlockLayout) -> Arc<NamespaceSpec> {
    Arc::new(NamespaceSpec::new(&format!("{{\"model\":\"{name}\"}}"), layout).unwrap())
}

pub(crate) fn hash(n: u64) -> BlockHash {
    BlockHash::from_engine(&n.to_le_bytes()).unwrap()
}

/// The memory of an engine: `pages` pages of each tensor, filled with bytes that depend on page, tensor and `seed`.
pub(crate) struct Engine {
    pub(crate) store: Store,
    tensors: Vec<Vec<u8>>,
    sizes: Vec<usize>,
    pages: usize,
}

impl Engine {
    pub(crate) fn new(attachment: &Arc<Attachment>, spec: &Arc<NamespaceSpec>, pages: usize) -> Self {
        Self::within(attachment, spec, pages, LONG)
    }

    /// Makes one whose tasks have this timeout.
    pub(crate) fn within(
        attachment: &Arc<Attachment>,
        spec: &Arc<NamespaceSpec>,
        pages: usize,
        timeout: Duration,
    ) -> Self {
        Self::copied_by(Arc::new(HostEngine::new(2).unwrap()), attachment, spec, pages, timeout)
    }

    /// Makes one whose bytes are copied by this engine.
    pub(crate) fn copied_by(
        engine: Arc<dyn CopyEngine>,
        attachment: &Arc<Attachment>,
        spec: &Arc<NamespaceSpec>,
        pages: usize,
        timeout: Duration,
    ) -> Self {
        let layout = spec.layout();
        let sizes: Vec<usize> = (0..layout.shard_count())
            .flat_map(|s| layout.tensor_sizes(s).iter().map(|&b| b as usize))
            .collect();
        let tensors: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; size * pages]).collect();
        let engine = DeviceEngine::new(engine);
        let store = Store::new(attachment, Arc::clone(spec), engine, timeout).unwrap();
        let bases = tensors.iter().map(|tensor| tensor.as_ptr() as u64).collect();
        let strides = sizes.iter().map(|&size| size as i64).collect();
        // SAFETY: the tensors live in the engine beside the store.
        unsafe { store.register_pages(bases, strides, pages as u64) }.unwrap();
        Self { store, tensors, sizes, pages }
    }

    fn byte(page: usize, tensor: usize, at: usize, seed: u8) -> u8 {
        (page as u8).wrapping_mul(31)
            ^ (tensor as u8).wrapping_mul(97)
            ^ (at as u8).wrapping_add((at >> 8) as u8)
            ^ seed
    }

    pub(crate) fn fill(&mut self, seed: u8) {
        for (t, tensor) in self.tensors.iter_mut().enumerate() {
            let size = self.sizes[t];
            for (i, byte) in tensor.iter_mut().enumerate() {
                *byte = Self::byte(i / size, t, i % size, seed);
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        self.tensors.iter_mut().for_each(|tensor| tensor.fill(0));
    }

    /// Returns whether page `page` holds what page `source` held after `fill(seed)`.
    pub(crate) fn holds(&self, page: usize, source: usize, seed: u8) -> bool {
        self.tensors.iter().enumerate().all(|(t, tensor)| {
            let size = self.sizes[t];
            tensor[page * size..(page + 1) * size]
                .iter()
                .enumerate()
                .all(|(i, &b)| b == Self::byte(source, t, i, seed))
        })
    }

    pub(crate) fn dump(&self, hashes: &[u64], pages: &[i64]) -> Vec<usize> {
        self.try_dump(hashes, pages).into_iter().map(|(block, _)| block).collect()
    }

    /// Dumps blocks; again only while the depot is lost or does not know the namespace yet. A namespace that a busy depot
    /// opens too late is opened again in the background.
    pub(crate) fn dump_once_open(&self, hashes: &[u64], pages: &[i64]) {
        let end = Instant::now() + LONG;
        loop {
            let failed = self.try_dump(hashes, pages);
            if failed.is_empty() {
                return;
            }
            let is_late =
                |kind| matches!(kind, ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::Closed);
            assert!(failed.iter().all(|&(_, kind)| is_late(kind)) && Instant::now() < end, "{failed:?}");
            std::thread::yield_now();
        }
    }

    fn try_dump(&self, hashes: &[u64], pages: &[i64]) -> Vec<(usize, ErrorKind)> {
        let hashes = hashes.iter().map(|&n| hash(n)).collect();
        // SAFETY: the tensors live in `self`, and the test waits before it touches them.
        let task = unsafe { self.store.dump_pages(hashes, pages, 0) }.unwrap();
        assert!(task.wait(Some(LONG)));
        task.failed()
    }

    pub(crate) fn load(&self, hashes: &[u64], pages: &[i64]) -> Vec<usize> {
        let hashes = hashes.iter().map(|&n| hash(n)).collect();
        // SAFETY: as for `dump`.
        let task = unsafe { self.store.load_pages(hashes, pages, 0) }.unwrap();
        assert!(task.wait(Some(LONG)));
        task.failed().into_iter().map(|(block, _)| block).collect()
    }

    pub(crate) fn all_pages(&self) -> Vec<i64> {
        (0..self.pages as i64).collect()
    }
}

//! Dumps and loads blocks of one namespace between this process's memory and a depot.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use kvdepot_copy::DeviceMemory;
use kvdepot_core::{BlockHash, BlockLayout, Error, ErrorKind, NamespaceSpec, Priority, Result};
use parking_lot::{Mutex, RwLock};

use crate::client::attach::Attachment;
use crate::client::device::DeviceEngine;
use crate::client::executor::Executor;
use crate::client::layer_dump::Layers;
use crate::client::partial::Partial;
use crate::client::plan::{Item, PageTable, Source};
use crate::client::task::{TaskState, UnderWay};
use crate::client::work::{Base, Kept, Work};
use crate::client::{dump, load};
use crate::task_line::{self, Operation, TaskLine};

/// Number of tasks that may be queued until a depot sets another limit.
const WAITING_QUEUE_DEPTH: u64 = 8192;

/// A store; see the module. Cheap to clone. Every method may be called from any number of threads at a time.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
    kept: Option<Kept>,
    priority: Priority,
}

struct Inner {
    // Dropped before the engine, with which it is registered.
    device_memory: Mutex<Vec<DeviceMemory>>,
    base: Arc<Base>,
    /// The page table, and the owner of its memory.
    registered: RwLock<Option<(Arc<PageTable>, Option<Kept>)>>,
    under_way: Arc<UnderWay>,
    partial: Arc<Mutex<Partial>>,
    executor: Executor,
    timeout: Duration,
}

impl Store {
    /// Makes a store that uses the copy engine of the device with the caller's pages. `timeout` limits each task (P2).
    pub fn new(
        attachment: &Arc<Attachment>,
        spec: Arc<NamespaceSpec>,
        device: Arc<DeviceEngine>,
        timeout: Duration,
    ) -> Result<Self> {
        attachment.register_for(&spec, !device.engine().may_hang())?;
        attachment.devices.add(&device);
        if let Ok(generation) = attachment.generation() {
            // Begun now, so that much of it is done before the first copies.
            match device.pool(&generation.pool) {
                // The depot died just now: the store waits for the next one, as without a depot.
                Err(_) if generation.pool.mapping().is_err() => {}
                outcome => drop(outcome?),
            }
        }
        let depth = attachment.waiting_queue_depth().unwrap_or(WAITING_QUEUE_DEPTH);
        let depth = usize::try_from(depth).unwrap_or(usize::MAX).clamp(1, 1 << 20);
        let inner = Inner {
            device_memory: Mutex::default(),
            base: Arc::new(Base { attachment: Arc::clone(attachment), spec, device }),
            registered: RwLock::new(None),
            under_way: Arc::default(),
            partial: Arc::default(),
            executor: Executor::start(depth)?,
            timeout,
        };
        Ok(Self { inner: Arc::new(inner), kept: None, priority: Priority::Normal })
    }

    /// Returns the same store. Tasks and registrations made through the returned value hold `kept` until the last copy
    /// that touches their memory has ended, even if a task has timed out or nothing waits for it.
    pub fn keeping(&self, kept: Option<Kept>) -> Self {
        Self { inner: Arc::clone(&self.inner), kept, priority: self.priority }
    }

    /// Returns the same store. Dumps made through the returned value give their blocks this priority.
    pub fn with_priority(&self, priority: Priority) -> Self {
        Self { priority, ..self.clone() }
    }

    /// Forgets the registered pages, and waits up to `wait` until no task is in flight, nor a copy that a device has not
    /// finished by its task's deadline. Returns whether none is. After that the engine has none of the pages registered,
    /// even if tasks of the store are still held: their memory may be freed or replaced. Remaining tasks continue, and
    /// hold the memory that they touch. A layered dump is in flight until all of its shards have ended.
    pub fn close(&self, wait: Duration) -> bool {
        let registered = self.inner.registered.write().take();
        drop(registered);
        let ended = self.inner.under_way.wait(wait);
        if ended {
            let device_memory = std::mem::take(&mut *self.inner.device_memory.lock());
            drop(device_memory);
        }
        ended
    }

    /// Returns the namespace's description.
    pub fn spec(&self) -> &Arc<NamespaceSpec> {
        &self.inner.base.spec
    }

    /// Sets whether the engine decodes in the following steps: device copies then avoid its multiprocessors, even if
    /// they get slower. Applies to all stores of the device.
    pub fn set_decoding(&self, decoding: bool) {
        self.inner.base.device.set_decoding(decoding);
    }

    /// Sets the location of the engine's pages, for the `…_pages` calls.
    ///
    /// # Safety
    /// The pages must stay allocated until the last clone of the store was dropped.
    pub unsafe fn register_pages(&self, bases: Vec<u64>, strides: Vec<i64>, page_count: u64) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.register_pieces(bases, strides, page_count, None) }
    }

    /// Like `register_pages`, for pages that are cut differently from the layout: into pieces of these sizes, shard by
    /// shard.
    ///
    /// # Safety
    /// As for `register_pages`.
    pub unsafe fn register_pieces(
        &self,
        bases: Vec<u64>,
        strides: Vec<i64>,
        page_count: u64,
        sizes: Option<Vec<u64>>,
    ) -> Result<()> {
        let pages = PageTable::new(self.inner.base.spec.layout(), bases, strides, page_count, sizes)?;
        let engine = self.inner.base.device.engine();
        let mut kept = Vec::new();
        for (address, len) in pages.memory() {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            // SAFETY: the caller's contract; tasks hold the store, so copies end before the kept registrations.
            kept.push(unsafe { engine.register_device(address, len) }?);
        }
        *self.inner.device_memory.lock() = kept;
        *self.inner.registered.write() = Some((Arc::new(pages), self.kept.clone()));
        Ok(())
    }

    /// Stores page `pages[i]` as block `hashes[i]`, after the device's event (0 = none).
    ///
    /// # Safety
    /// The registered pages must be readable, and not written by other code, from the event until the task is done. The
    /// event must stay valid, and not be recorded again, until then.
    pub unsafe fn dump_pages(
        &self,
        hashes: Vec<BlockHash>,
        pages: &[i64],
        wait_event: u64,
    ) -> Result<Arc<TaskState>> {
        let work = self.page_work(Operation::Dump, hashes, pages, wait_event)?;
        self.run_dump(work)
    }

    /// Loads block `hashes[i]` into page `pages[i]`, shard by shard, after the device's event (0 = none).
    ///
    /// # Safety
    /// The registered pages must be writable, and not touched by other code, from the event until the task is done. For
    /// the event see `dump_pages`.
    pub unsafe fn load_pages(
        &self,
        hashes: Vec<BlockHash>,
        pages: &[i64],
        wait_event: u64,
    ) -> Result<Arc<TaskState>> {
        // SAFETY: the caller's contract.
        unsafe { self.load_pages_within(hashes, pages, wait_event, None) }
    }

    /// Like `load_pages`, but waits for blocks that are not in the pool no longer than `patience` after those in the
    /// pool have been copied.
    ///
    /// # Safety
    /// As for `load_pages`.
    pub unsafe fn load_pages_within(
        &self,
        hashes: Vec<BlockHash>,
        pages: &[i64],
        wait_event: u64,
        patience: Option<Duration>,
    ) -> Result<Arc<TaskState>> {
        let work = self.page_work(Operation::Load, hashes, pages, wait_event)?;
        self.run(Operation::Load, Work { patience, ..work }, load::run)
    }

    /// Like `dump_pages`, but a shard is read only after `LayerDump::submit_shard`.
    ///
    /// # Safety
    /// From its submission until the task is done, a shard's memory must be readable and not written by other code.
    pub unsafe fn begin_dump_pages(&self, hashes: Vec<BlockHash>, pages: &[i64]) -> Result<LayerDump> {
        let mut work = self.page_work(Operation::Dump, hashes, pages, 0)?;
        if work.items.is_empty() {
            work.kept.clear();
            work.state.finish();
        }
        // The task's user may hold the dump for long, but the memory's owner is held only until the dump has ended.
        let kept = Arc::new(Mutex::new(std::mem::take(&mut work.kept)));
        let layers = Arc::new(Layers::new(Arc::clone(&kept)));
        Ok(LayerDump { work, store: Arc::clone(&self.inner), kept, layers })
    }

    /// Stores shard `shards[i]` of block `hashes[i]` from `addresses[i][t]`, after the device's event (0 = none).
    ///
    /// # Safety
    /// The addressed memory must be readable, and not written by other code, from the event until the task is done. For the
    /// event see `dump_pages`.
    pub unsafe fn dump(
        &self,
        hashes: Vec<BlockHash>,
        shards: &[i64],
        addresses: &[u64],
        wait_event: u64,
    ) -> Result<Arc<TaskState>> {
        let work = self.address_work(Operation::Dump, hashes, shards, addresses, wait_event)?;
        self.run_dump(work)
    }

    /// Loads shard `shards[i]` of block `hashes[i]` to `addresses[i][t]`, after the device's event (0 = none).
    ///
    /// # Safety
    /// The addressed memory must be writable, and not touched by other code, from the event until the task is done. For the
    /// event see `dump_pages`.
    pub unsafe fn load(
        &self,
        hashes: Vec<BlockHash>,
        shards: &[i64],
        addresses: &[u64],
        wait_event: u64,
    ) -> Result<Arc<TaskState>> {
        let work = self.address_work(Operation::Load, hashes, shards, addresses, wait_event)?;
        self.run(Operation::Load, work, load::run)
    }

    /// Returns which blocks the depot has. All are absent if no depot answers.
    pub fn lookup(&self, hashes: &[BlockHash]) -> Vec<u8> {
        let inner = &self.inner;
        inner.base.attachment.lookup(&inner.base.spec, hashes, inner.timeout).unwrap_or_else(|error| {
            inner.base.attachment.stats.failed("lookup", &error);
            vec![0; hashes.len()]
        })
    }

    /// Returns how many leading blocks the depot has; 0 if no depot answers.
    pub fn lookup_on_prefix(&self, hashes: &[BlockHash]) -> usize {
        let inner = &self.inner;
        inner.base.attachment.lookup_prefix(&inner.base.spec, hashes, inner.timeout).unwrap_or_else(|error| {
            inner.base.attachment.stats.failed("lookup", &error);
            0
        })
    }

    /// Requests that blocks be read into the pool.
    pub fn prefetch(&self, hashes: &[BlockHash]) {
        let inner = &self.inner;
        if let Err(error) = inner.base.attachment.prefetch(&inner.base.spec, hashes) {
            inner.base.attachment.stats.failed("prefetch", &error);
        }
    }

    fn run_dump(&self, work: Work) -> Result<Arc<TaskState>> {
        let partial = Arc::clone(&self.inner.partial);
        self.run(Operation::Dump, work, move |work| dump::run(work, &partial))
    }

    fn run(
        &self,
        operation: Operation,
        work: Work,
        body: impl FnOnce(Work) + Send + 'static,
    ) -> Result<Arc<TaskState>> {
        let state = Arc::clone(&work.state);
        if work.items.is_empty() {
            state.finish();
            return Ok(state);
        }
        let refused = work.clone();
        if let Err(error) = self.inner.executor.submit(operation, Box::new(move || body(work))) {
            refused.fail_all(&error);
        }
        Ok(state)
    }

    fn page_work(
        &self,
        operation: Operation,
        hashes: Vec<BlockHash>,
        pages: &[i64],
        wait_event: u64,
    ) -> Result<Work> {
        let registered = self.inner.registered.read().clone();
        let none = || Error::new(ErrorKind::Config, "no pages are registered");
        let (table, owner) = registered.ok_or_else(none)?;
        if hashes.len() != pages.len() {
            return Err(Error::new(ErrorKind::Config, "each block needs one page")
                .with("hashes", hashes.len())
                .with("pages", pages.len()));
        }
        pages.iter().try_for_each(|&page| table.check(page))?;
        let items: Vec<Item> = hashes
            .into_iter()
            .zip(pages)
            .map(|(hash, &page)| Item { hash, source: Source::Page(page) })
            .collect();
        let layout = self.inner.base.spec.layout();
        let left = vec![items.len(); layout.shard_count()];
        let (count, bytes) = (items.len(), items.len() as u64 * layout.block_bytes());
        let mut work = self.work(operation, items, Some(table), left, count, bytes);
        work.wait_event = wait_event;
        work.kept.extend(owner);
        Ok(work)
    }

    fn address_work(
        &self,
        operation: Operation,
        hashes: Vec<BlockHash>,
        shards: &[i64],
        addresses: &[u64],
        wait_event: u64,
    ) -> Result<Work> {
        let layout = self.inner.base.spec.layout();
        let columns = if hashes.is_empty() { 0 } else { addresses.len() / hashes.len() };
        if hashes.len() != shards.len() || columns * hashes.len() != addresses.len() {
            return Err(Error::new(
                ErrorKind::Config,
                "each entry needs a hash, a shard and a row of addresses",
            )
            .with("hashes", hashes.len())
            .with("shards", shards.len())
            .with("addresses", addresses.len()));
        }
        let (count, mut bytes) = (hashes.len(), 0);
        let mut left = vec![0; layout.shard_count()];
        let mut by_hash: HashMap<BlockHash, usize> = HashMap::new();
        let mut items: Vec<Item> = Vec::new();
        for (entry, hash) in hashes.into_iter().enumerate() {
            let shard = check_shard(layout, shards[entry], columns)?;
            let range = layout.shard_range(shard);
            bytes += range.end - range.start;
            left[shard] += 1;
            let at = *by_hash.entry(hash).or_insert_with(|| {
                items.push(Item { hash, source: Source::Shards(Vec::new()) });
                items.len() - 1
            });
            if let Source::Shards(have) = &mut items[at].source {
                if have.iter().any(|&(other, ..)| other == shard) {
                    return Err(Error::new(ErrorKind::Config, "a shard of a block comes twice in one task")
                        .with("shard", shard));
                }
                have.push((shard, entry, addresses[entry * columns..(entry + 1) * columns].to_vec()));
            }
        }
        let work = self.work(operation, items, None, left, count, bytes);
        Ok(Work { wait_event, ..work })
    }

    fn work(
        &self,
        operation: Operation,
        items: Vec<Item>,
        pages: Option<Arc<PageTable>>,
        left: Vec<usize>,
        count: usize,
        bytes: u64,
    ) -> Work {
        let id = self.inner.executor.next_task();
        let inner = &self.inner;
        let store = if inner.base.attachment.passes_through() {
            task_line::Store::PassThrough
        } else {
            task_line::Store::Cache
        };
        let line = TaskLine { id, operation, store, subtasks: left.iter().sum(), bytes };
        let state = TaskState::new(line, left, count, inner.timeout, &inner.under_way);
        Work {
            _store: Arc::clone(&self.inner) as Kept,
            base: Arc::clone(&self.inner.base),
            state: Arc::new(state),
            items: Arc::new(items),
            pages,
            wait_event: 0,
            priority: self.priority,
            patience: None,
            kept: self.kept.iter().cloned().collect(),
        }
    }
}

fn check_shard(layout: &BlockLayout, shard: i64, columns: usize) -> Result<usize> {
    let known = usize::try_from(shard).ok().filter(|&shard| shard < layout.shard_count());
    let shard = known.ok_or_else(|| {
        Error::new(ErrorKind::Config, "no such shard")
            .with("shard", shard)
            .with("shards", layout.shard_count())
    })?;
    let tensors = layout.tensor_sizes(shard).len();
    if tensors != columns {
        return Err(Error::new(ErrorKind::Config, "a shard needs one address for each of its tensors")
            .with("shard", shard)
            .with("tensors", tensors)
            .with("addresses", columns));
    }
    Ok(shard)
}

/// A dump whose shards are submitted one by one, as layers are computed.
pub struct LayerDump {
    work: Work,
    store: Arc<Inner>,
    /// The owners of its memory, until it has ended.
    kept: Arc<Mutex<Vec<Kept>>>,
    layers: Arc<Layers>,
}

impl LayerDump {
    /// Returns the task's progress.
    pub fn state(&self) -> &Arc<TaskState> {
        &self.work.state
    }

    /// Allows shard `shard` of every block to be read after the device's event (0 = now). A shard submitted twice is
    /// copied once. The event must stay valid, and not be recorded again, until the task is done.
    pub fn submit_shard(&self, shard: usize, wait_event: u64) -> Result<()> {
        self.submit_shard_keeping(shard, wait_event, None)
    }

    /// Like `submit_shard`, and holds `event_owner` until no copy waits for the event any more.
    pub fn submit_shard_keeping(
        &self,
        shard: usize,
        wait_event: u64,
        event_owner: Option<Kept>,
    ) -> Result<()> {
        if shard >= self.work.layout().shard_count() {
            return Err(Error::new(ErrorKind::Config, "no such shard").with("shard", shard));
        }
        if self.work.state.done() {
            return Ok(());
        }
        let mut kept = self.kept.lock().clone();
        kept.extend(event_owner);
        let (work, layers) = (Work { wait_event, kept, ..self.work.clone() }, Arc::clone(&self.layers));
        let job = move || layers.run_shard(work, shard);
        if let Err(error) = self.store.executor.submit(Operation::Dump, Box::new(job)) {
            self.layers.give_up(self.work.clone(), error);
        }
        Ok(())
    }
}

impl fmt::Debug for LayerDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayerDump({:?})", self.work.state)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.inner.base.spec.root())
    }
}

//! The pool's memory: one memfd, mapped once by the depot and once by every client process.

mod cgroup;
mod lent;
mod make;
mod nodes;
mod numa;
mod pages;
mod populate;
mod present;
mod regions;
mod words;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use kvdepot_copy::{CopyEngine, PoolRegistration};
use kvdepot_core::regions::RegionIndex;
use kvdepot_core::runs::Run;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::fork::Private;
use kvdepot_io::{MemRun, SlotBuf};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

pub(crate) use lent::{Readable, Writable};
pub(crate) use make::{Reach, describe, lock, make};
pub(crate) use nodes::own_node;
pub(crate) use numa::NumaPlacement;
pub(crate) use populate::{Population, THREADS_MAX as POPULATE_THREADS_MAX, threads as populate_threads};
pub use regions::{PoolRegion, RegionKind};
pub(crate) use regions::{describe as describe_regions, sizes as region_sizes, total_bytes as region_bytes};
pub(crate) use words::SharedWords;

use pages::{HUGE_PAGE_BYTES, Pages};
use present::PresentPages;

fn length(bytes: u64) -> Result<usize> {
    let bad =
        || Error::new(ErrorKind::Config, "a pool of this size cannot be mapped").with("pool_bytes", bytes);
    usize::try_from(bytes).ok().filter(|&len| len > 0).ok_or_else(bad)
}

/// Rounds up to whole huge pages, which the kernel maps and unmaps. If a pool ends within one, the rest of it is mapped
/// and unused.
const fn mapped_len(len: usize, pages: Pages) -> usize {
    match pages {
        Pages::Huge => len.next_multiple_of(HUGE_PAGE_BYTES as usize),
        Pages::Transparent | Pages::Small => len,
    }
}

/// A mapping of the pool, unmapped by the last holder: copies in flight keep it alive, even if the depot is dead.
#[derive(Debug)]
pub struct PoolMapping {
    base: NonNull<u8>,
    bytes: u64,
    pages: Pages,
    regions: Vec<PoolRegion>,
    /// If the first touch of a page can kill a process: the pages for which it no longer can.
    present: Option<PresentPages>,
    /// A forked child must not keep the memory of a pool whose depot has ended. Dropped before the descriptor.
    _private: Option<Private>,
    /// `None` for memory of this process only.
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping is plain shared memory; who may touch which slot is decided by the depot's block states (P1).
unsafe impl Send for PoolMapping {}
// SAFETY: as for Send.
unsafe impl Sync for PoolMapping {}

impl PoolMapping {
    /// Makes memory that other processes can map. It is untouched: pages come with `populate` or first use. Huge pages
    /// are used if the machine has enough of them reserved and nothing can take them away; otherwise ordinary ones are.
    pub fn create(bytes: u64) -> Result<Self> {
        Self::create_trying(bytes, pages::are_huge_pages_sure(bytes, Path::new("/")))
    }

    fn create_trying(bytes: u64, sure: Result<(), String>) -> Result<Self> {
        let huge = sure.and_then(|()| Self::create_of(bytes, true).map_err(|error| error.to_string()));
        huge.or_else(|why| {
            tracing::info!("the pool has no huge pages: {why}");
            Self::create_of(bytes, false)
        })
    }

    /// Makes the memory. Mapping reserves all huge pages for the pool, or fails: they are available when they are
    /// touched.
    fn create_of(bytes: u64, huge: bool) -> Result<Self> {
        let whole = bytes.checked_next_multiple_of(HUGE_PAGE_BYTES).filter(|_| huge).unwrap_or(bytes);
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        flags.set(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, huge);
        let fd = rustix::fs::memfd_create("kvdepot-pool", flags)
            .map_err(|e| Error::io("cannot make the pool's memory", e.into()))?;
        rustix::fs::ftruncate(&fd, whole)
            .map_err(|e| Error::io("cannot size the pool", e.into()).with("pool_bytes", bytes))?;
        // A client that shrank it would kill every process that maps it by SIGBUS.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| Error::io("cannot seal the pool's size", e.into()))?;
        Self::map(fd, bytes)
    }

    /// Makes memory for this process only, for an embedded depot. Huge pages are available for it on most systems, and
    /// for shared memory on few.
    pub fn create_private(bytes: u64) -> Result<Self> {
        let len = length(bytes)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                access,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        Self::mapped(base, bytes, Pages::of_private(Path::new("/")), None)
    }

    /// Maps a pool made by another process, which also named the regions.
    pub fn map_regions(fd: OwnedFd, regions: Vec<PoolRegion>) -> Result<Self> {
        Self::map(fd, regions::total_bytes(&regions)?)?.divided(regions)
    }

    /// Sets the regions of the memory, whose sizes add up to all of it.
    pub fn divided(mut self, regions: Vec<PoolRegion>) -> Result<Self> {
        let bytes = regions::total_bytes(&regions)?;
        if bytes != self.bytes {
            return Err(Error::new(ErrorKind::Protocol, "the regions of the pool are not the pool")
                .with("regions_bytes", bytes)
                .with("pool_bytes", self.bytes));
        }
        self.regions = regions;
        Ok(self)
    }

    /// Returns the regions of the memory, in order.
    pub fn regions(&self) -> &[PoolRegion] {
        &self.regions
    }

    /// Returns the region nearest to a NUMA node.
    pub(crate) fn near(&self, node: u32) -> Option<RegionIndex> {
        regions::nearest(&self.regions, node, || nodes::distances(Path::new("/"), node))
    }

    /// Maps a pool of one region made by another process, which also named its size `bytes`.
    pub fn map(fd: OwnedFd, bytes: u64) -> Result<Self> {
        let len = length(bytes)?;
        let real =
            rustix::fs::fstat(&fd).map_err(|e| Error::io("cannot look at the pool", e.into()))?.st_size;
        if u64::try_from(real).unwrap_or(0) < bytes {
            // Access past the end of the file would raise SIGBUS.
            return Err(Error::new(ErrorKind::Protocol, "the pool is smaller than the depot reported")
                .with("pool_bytes", bytes)
                .with("real_bytes", real));
        }
        let pages = Pages::of(fd.as_fd(), Path::new("/"));
        let len = mapped_len(len, pages);
        // SAFETY: a fresh shared mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        };
        Self::mapped(base, bytes, pages, Some(fd))
    }

    fn mapped(
        base: rustix::io::Result<*mut std::ffi::c_void>,
        bytes: u64,
        pages: Pages,
        fd: Option<OwnedFd>,
    ) -> Result<Self> {
        let base = base.map_err(|e| Error::io("cannot map the pool", e.into()).with("pool_bytes", bytes))?;
        let base: NonNull<u8> = NonNull::new(base.cast())
            .ok_or_else(|| Error::new(ErrorKind::Io, "the pool was mapped at address 0"))?;
        let len = mapped_len(length(bytes)?, pages);
        // Huge pages only where the system allows them; a refusal only costs speed.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        // SAFETY: as above. A forked child must not keep (or copy) the pool's page tables.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxDontFork) };
        let private = fd.as_ref().map(|fd| Private::of(fd.as_fd()));
        let is_charged = pages == Pages::Huge && fd.is_some();
        let present = is_charged.then(|| PresentPages::unknown(bytes, HUGE_PAGE_BYTES));
        let regions = vec![PoolRegion::memory(bytes, None)];
        Ok(Self { base, bytes, pages, regions, present, _private: private, fd })
    }

    /// Returns the size in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of mapped bytes, in whole pages.
    const fn mapped_len(&self) -> usize {
        // `bytes` fitted a usize when it was mapped.
        mapped_len(self.bytes as usize, self.pages)
    }

    /// Returns the kind of its pages.
    pub(crate) const fn pages(&self) -> Pages {
        self.pages
    }

    /// Returns the descriptor to pass to clients; `None` for private memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Touches `start..start + len`, so that later copies incur no page faults.
    pub fn populate(&self, start: u64, len: u64) -> Result<()> {
        let run = self.resolve(Run { offset: start, len })?;
        // SAFETY: `resolve` checked that the range lies in the mapping.
        unsafe { rustix::mm::madvise(run.ptr.cast(), run.len, Advice::LinuxPopulateWrite) }.map_err(|e| {
            Error::io("cannot populate the pool", e.into()).with("offset_bytes", start).with("bytes", len)
        })?;
        self.present.iter().for_each(|present| present.touched(start, len));
        Ok(())
    }

    /// Makes sure that another process can touch a slot: populates its huge pages, which are then charged to this
    /// process's cgroup. Pages of other sizes are not charged in a way that could kill the process that touches them.
    pub(crate) fn ensure_present(&self, runs: &[Run]) -> Result<()> {
        let Some(present) = &self.present else { return Ok(()) };
        for &run in runs {
            self.resolve(run)?;
            present.ensure(run, |start, len| self.populate(start, len))?;
        }
        Ok(())
    }

    /// Like [`Self::slot`], for memory that this process is about to write and that may be untouched: an unavailable
    /// huge page is an error here, and not a SIGBUS later.
    pub(crate) fn fresh_slot(self: &Arc<Self>, runs: &[Run]) -> Result<SlotBuf> {
        self.ensure_present(runs)?;
        self.slot(runs)
    }

    /// Maps memory as if it had huge pages, for tests on machines without them: a memfd that the test can truncate,
    /// which behaves like a refused huge page.
    #[cfg(test)]
    pub(crate) fn as_of_huge_pages(fd: OwnedFd, bytes: u64) -> Self {
        let mut pool = Self::map(fd, bytes).expect("memory for a test");
        pool.present = Some(PresentPages::unknown(bytes, HUGE_PAGE_BYTES));
        pool
    }

    /// Returns the memory of a run. Fails if a peer names bytes outside of the pool.
    pub fn resolve(&self, run: Run) -> Result<MemRun> {
        let inside = run.offset.checked_add(run.len).is_some_and(|end| end <= self.bytes);
        let len = usize::try_from(run.len).ok().filter(|_| inside).ok_or_else(|| {
            Error::new(ErrorKind::Protocol, "a slot lies outside of the pool")
                .with("offset_bytes", run.offset)
                .with("bytes", run.len)
                .with("pool_bytes", self.bytes)
        })?;
        // SAFETY: `offset + len <= bytes`, so the address lies in the mapping (`bytes` fitted a usize in `map`).
        let ptr = unsafe { self.base.as_ptr().add(run.offset as usize) };
        Ok(MemRun { ptr, len })
    }

    /// Registers the pool with an engine, for faster copies.
    pub fn register_with(self: &Arc<Self>, engine: &dyn CopyEngine) -> Result<PoolRegistration> {
        let len = length(self.bytes)?;
        let base = self.base.as_ptr();
        // SAFETY: the range is this mapping, which the holder of the registration keeps alive (`RegisteredPool`).
        unsafe {
            match self.pages {
                Pages::Huge => engine.register_reserved_pool(base, len),
                Pages::Transparent | Pages::Small => engine.register_pool(base, len),
            }
        }
    }

    /// Returns the memory of a slot, which keeps the mapping alive.
    pub fn slot(self: &Arc<Self>, runs: &[Run]) -> Result<SlotBuf> {
        let runs: Vec<MemRun> = runs.iter().map(|&run| self.resolve(run)).collect::<Result<_>>()?;
        let keep: Arc<Self> = Arc::clone(self);
        // SAFETY: the runs lie in this mapping, which `keep` holds. The depot gives a slot to one writer or to readers,
        // never to both (P1), and takes it back only when they have released it (P4).
        Ok(unsafe { SlotBuf::new(runs, keep) })
    }
}

impl Drop for PoolMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; no SlotBuf is left, because each holds an Arc of this value.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_share_bytes_and_refuse_what_lies_outside() {
        let ours = Arc::new(PoolMapping::create(1 << 20).unwrap());
        let fd = ours.fd().unwrap().try_clone_to_owned().unwrap();
        let theirs = Arc::new(PoolMapping::map(fd.try_clone().unwrap(), 1 << 20).unwrap());
        ours.populate(0, 1 << 16).unwrap();
        ours.slot(&[Run { offset: 4096, len: 4096 }]).unwrap().write_at(0, b"hello");
        let mut out = [0; 5];
        theirs.slot(&[Run { offset: 4096, len: 4096 }]).unwrap().read_at(0, &mut out);
        assert_eq!(&out, b"hello");
        for (offset, len) in [(1 << 20, 1), (0, (1 << 20) + 1), (u64::MAX, 2)] {
            assert_eq!(ours.resolve(Run { offset, len }).unwrap_err().kind(), ErrorKind::Protocol);
        }
        // Also across a huge page.
        assert_eq!(PoolMapping::map(fd, 1 << 22).unwrap_err().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn a_pool_that_gets_no_huge_pages_has_ordinary_ones_and_all_of_it_can_be_touched() {
        // No machine has that many of them free; if some are, the smaller pool has huge pages.
        for bytes in [1 << 40, (6 << 20) + 4096] {
            let pool = PoolMapping::create_trying(bytes, Ok(())).unwrap();
            assert!(bytes < 1 << 40 || pool.pages() != Pages::Huge);
            assert_eq!(pool.bytes(), bytes);
            pool.populate(0, 4096).unwrap();
            pool.populate(bytes - 4096, 4096).unwrap();
            assert!(pool.resolve(Run { offset: bytes, len: 1 }).is_err());
            let fd = pool.fd().unwrap().try_clone_to_owned().unwrap();
            let theirs = PoolMapping::map(fd, bytes).unwrap();
            assert_eq!(theirs.pages(), pool.pages());
        }
    }

    #[test]
    fn a_mapping_covers_whole_huge_pages() {
        assert_eq!(mapped_len((2 << 20) + 4096, Pages::Huge), 4 << 20);
        assert_eq!(mapped_len(4 << 20, Pages::Huge), 4 << 20);
        assert_eq!(mapped_len((2 << 20) + 4096, Pages::Small), (2 << 20) + 4096);
    }

    #[test]
    fn nobody_who_has_the_descriptor_can_resize_the_pool() {
        let pool = PoolMapping::create(4 << 20).unwrap();
        let fd = pool.fd().unwrap().try_clone_to_owned().unwrap();
        // Whole huge pages: other sizes are refused for another reason.
        for bytes in [0, 2 << 20, 8 << 20] {
            assert_eq!(rustix::fs::ftruncate(&fd, bytes), Err(rustix::io::Errno::PERM), "to {bytes} bytes");
        }
        assert_eq!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE), Err(rustix::io::Errno::PERM));
    }
}

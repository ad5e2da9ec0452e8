use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvdepot_io::aligned::page_bytes;

use super::*;
use crate::batch::{CopyBatch, CopyOp, Direction, GroupSink};
use crate::{CopyEngine, HostEngine};

/// Many times what one page of page tables covers.
const LEN: usize = 64 << 20;

/// Shared memory mapped twice, as by a depot and its client.
struct Twice {
    depot: *mut u8,
    client: *mut u8,
    _fd: OwnedFd,
}

impl Twice {
    fn new() -> Self {
        // SAFETY: a name that ends in zero; the descriptor is checked.
        let fd = unsafe { libc::memfd_create(c"kvdepot-test".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: just made, and owned by no other code.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: a descriptor of ours.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), LEN as i64) }, 0);
        let map = || {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            let base =
                unsafe { libc::mmap(std::ptr::null_mut(), LEN, access, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
            assert_ne!(base, libc::MAP_FAILED);
            base.cast::<u8>()
        };
        Self { depot: map(), client: map(), _fd: fd }
    }

    fn populate(&self, at: usize, len: usize) {
        // SAFETY: inside of the mapping.
        let done = unsafe { libc::madvise(self.depot.add(at).cast(), len, libc::MADV_POPULATE_WRITE) };
        assert_eq!(done, 0);
    }

    /// Returns the bytes of the client's mapping that are in its page tables.
    fn mapped(&self) -> usize {
        self.mapped_in(0..LEN)
    }

    fn mapped_in(&self, range: Range<usize>) -> usize {
        const PRESENT: u64 = 1 << 63;
        let mut map = File::open("/proc/self/pagemap").unwrap();
        map.seek(SeekFrom::Start((self.client.addr() / page_bytes() * 8) as u64)).unwrap();
        let mut entries = vec![0; LEN / page_bytes() * 8];
        map.read_exact(&mut entries).unwrap();
        let present = |entry: &&[u8]| u64::from_le_bytes((*entry).try_into().unwrap()) & PRESENT != 0;
        let pages = range.start / page_bytes()..range.end / page_bytes();
        entries.chunks_exact(8).take(pages.end).skip(pages.start).filter(present).count() * page_bytes()
    }

    /// Returns the number of resident bytes of the memory, whichever process maps them.
    fn resident(&self) -> usize {
        let mut pages = vec![0u8; LEN / page_bytes()];
        // SAFETY: inside of the mapping, a byte for each page.
        assert_eq!(unsafe { libc::mincore(self.client.cast(), LEN, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|page| **page & 1 == 1).count() * page_bytes()
    }
}

impl Drop for Twice {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no registration is left.
        unsafe {
            libc::munmap(self.depot.cast(), LEN);
            libc::munmap(self.client.cast(), LEN);
        }
    }
}

#[derive(Debug)]
struct Deaf;

impl GroupSink for Deaf {
    fn group_ended(&self, _group: usize, outcome: kvdepot_core::Result<()>) {
        outcome.unwrap();
    }
}

fn dump(engine: &HostEngine, memory: &Twice, at: usize, bytes: &[u8]) {
    let mut batch = CopyBatch::new(Direction::ToHost);
    let host = memory.client.wrapping_add(at);
    batch.ops.push(CopyOp { device: bytes.as_ptr().expose_provenance() as u64, host, len: bytes.len() });
    batch.end_group();
    // SAFETY: both ranges are valid for the call, and the host engine has finished when it returns.
    unsafe { engine.run(batch, Arc::new(Deaf)) }.unwrap();
}

#[test]
fn telling_an_engine_of_a_resident_pool_maps_nothing_of_it() {
    let memory = Twice::new();
    memory.populate(0, LEN);
    let engine = HostEngine::new(1).unwrap();
    // SAFETY: `memory` outlives it.
    let known = unsafe { engine.register_pool(memory.client, LEN) }.unwrap();
    // After the wait everything that the registration has begun is finished.
    assert!(known.wait(Duration::from_secs(30)));
    assert_eq!(memory.mapped(), 0, "attaching costs page tables of what is used only");
}

#[test]
fn a_copy_maps_the_resident_windows_that_it_touches_and_no_others() {
    let memory = Twice::new();
    memory.populate(0, LEN);
    let engine = HostEngine::new(1).unwrap();
    // SAFETY: `memory` outlives it.
    let _known = unsafe { engine.register_pool(memory.client, LEN) }.unwrap();
    dump(&engine, &memory, 3 * WINDOW_BYTES - 4096, &[7; 8192]);
    let touched = 2 * WINDOW_BYTES..4 * WINDOW_BYTES;
    // The kernel maps up to 64 KiB around a page, aligned by address and not by window.
    let others = memory.mapped_in(0..touched.start) + memory.mapped_in(touched.end..LEN);
    assert!(others <= 2 * (64 << 10), "{others} bytes of other windows");
    // Faults alone would map far less.
    let mapped = memory.mapped_in(touched);
    assert!(mapped >= WINDOW_BYTES, "{mapped} bytes of the two windows that the copy touches");
    // SAFETY: inside of the mapping, and nothing writes it.
    assert_eq!(unsafe { memory.depot.add(3 * WINDOW_BYTES).read() }, 7);
}

#[test]
fn a_copy_makes_nothing_resident_but_its_own_pages() {
    let memory = Twice::new();
    memory.populate(WINDOW_BYTES, WINDOW_BYTES / 2);
    let engine = HostEngine::new(1).unwrap();
    // SAFETY: `memory` outlives it.
    let _known = unsafe { engine.register_pool(memory.client, LEN) }.unwrap();
    for _ in 0..2 * LOOKS_MAX {
        dump(&engine, &memory, WINDOW_BYTES, &[1; 4096]);
        dump(&engine, &memory, 5 * WINDOW_BYTES, &[1; 4096]);
    }
    assert_eq!(memory.resident(), WINDOW_BYTES / 2 + 4096);
}

#[test]
fn a_pool_that_was_given_up_is_not_looked_at_any_more() {
    let memory = Twice::new();
    memory.populate(0, LEN);
    let pools = Arc::new(Pools::default());
    // SAFETY: `memory` outlives it.
    let known = unsafe { pools.add(memory.client, LEN) };
    drop(known);
    pools.about_to_copy(std::iter::once((memory.client.addr(), 4096)));
    assert_eq!(memory.mapped(), 0);
}

#[test]
fn ranges_that_leave_a_pool_are_not_its_own() {
    let windows = Windows { base: 1 << 30, len: LEN, looks: Box::default(), mapped: AtomicUsize::new(0) };
    assert!(windows.contains(1 << 30, LEN) && windows.contains((1 << 30) + LEN - 1, 1));
    for (address, len) in [((1 << 30) - 1, 2), ((1 << 30) + LEN, 1), ((1 << 30) + 1, LEN), (usize::MAX, 2)] {
        assert!(!windows.contains(address, len), "{address} {len}");
    }
}

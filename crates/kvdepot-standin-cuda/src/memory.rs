//! Known ranges: device memory, the driver's host memory, and registered host memory.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Added to the backing address of device memory, so that its addresses are invalid in this process.
const DEVICE_OFFSET: u64 = 0x2000_0000_0000_0000;
/// Added to the address of registered host memory to get its address on the device.
const MAPPED_OFFSET: u64 = 0x4000_0000_0000_0000;
/// Page size of exports, unless a test sets another one.
const PAGE_BYTES: usize = 4096;
/// Content of new device memory.
const DEVICE_FILL: u8 = 0xDD;

/// Memory of this process.
struct Backing {
    bytes: Vec<u8>,
    offset: usize,
}

impl Backing {
    /// Allocates whole pages, so that no other memory is in the last one.
    fn new(len: usize, fill: u8, page: usize) -> Arc<Self> {
        let bytes = vec![fill; len.next_multiple_of(page) + page];
        let offset = bytes.as_ptr().align_offset(page);
        Arc::new(Self { bytes, offset })
    }

    fn address(&self) -> u64 {
        self.bytes.as_ptr() as u64 + self.offset as u64
    }
}

/// Memory that the driver allocated.
struct Block {
    backing: Arc<Backing>,
    /// Its offset in the backing.
    start: u64,
    len: usize,
    /// Whether its addresses have memory. Sleeping engines remove it for a while.
    mapped: bool,
}

impl Block {
    fn new(len: usize, fill: u8, page: usize) -> Self {
        Self { backing: Backing::new(len, fill, page), start: 0, len, mapped: true }
    }

    fn address(&self) -> u64 {
        self.backing.address() + self.start
    }
}

/// Kind of a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Inside one allocation on the device.
    Device,
    /// Inside one range of host memory that the driver allocated or that was registered.
    Pinned,
    /// The same, by its address on the device.
    Mapped,
    /// Host memory that the driver does not know.
    Pageable,
    /// Partly known, out of bounds, or freed.
    Wrong,
}

/// All ranges of one world, by their first address.
pub(crate) struct Memory {
    device: BTreeMap<u64, Block>,
    pinned: BTreeMap<u64, Block>,
    registered: BTreeMap<u64, u64>,
    /// Memory that no address refers to any more, but exports of it do.
    replaced: Vec<Arc<Backing>>,
    page: usize,
}

impl Default for Memory {
    fn default() -> Self {
        let (device, pinned) = (BTreeMap::new(), BTreeMap::new());
        Self { device, pinned, registered: BTreeMap::new(), replaced: Vec::new(), page: PAGE_BYTES }
    }
}

fn within<T>(ranges: &BTreeMap<u64, T>, len_of: impl Fn(&T) -> u64, address: u64, len: u64) -> bool {
    let Some((&base, range)) = ranges.range(..=address).next_back() else { return false };
    address.checked_add(len).is_some_and(|end| end <= base + len_of(range))
}

fn touches<T>(ranges: &BTreeMap<u64, T>, len_of: impl Fn(&T) -> u64, address: u64, len: u64) -> bool {
    let Some((&base, range)) = ranges.range(..address.saturating_add(len)).next_back() else { return false };
    base + len_of(range) > address
}

impl Memory {
    pub(crate) fn allocate_device(&mut self, len: usize) -> u64 {
        let block = Block::new(len, DEVICE_FILL, self.page);
        let address = block.address() + DEVICE_OFFSET;
        self.device.insert(address, block);
        address
    }

    /// Makes two allocations, the second of which begins where the first ends, like those of neighbouring layers. The
    /// first has whole pages.
    pub(crate) fn allocate_touching(&mut self, first: usize, second: usize) -> [u64; 2] {
        let backing = Backing::new(first + second, DEVICE_FILL, self.page);
        [(0, first), (first as u64, second)].map(|(start, len)| {
            let block = Block { backing: Arc::clone(&backing), start, len, mapped: true };
            let address = block.address() + DEVICE_OFFSET;
            self.device.insert(address, block);
            address
        })
    }

    /// Gives an allocation's addresses other memory, like an engine that wakes up. Exports keep the old memory.
    pub(crate) fn remap(&mut self, address: u64) -> bool {
        let page = self.page;
        let Some(block) = self.device.get_mut(&address) else { return false };
        let fresh = Backing::new(block.len, DEVICE_FILL, page);
        self.replaced.push(std::mem::replace(&mut block.backing, fresh));
        (block.start, block.mapped) = (0, true);
        true
    }

    /// Removes an allocation's memory; its addresses stay reserved.
    pub(crate) fn unmap(&mut self, address: u64) -> bool {
        self.device.get_mut(&address).map(|block| block.mapped = false).is_some()
    }

    /// Sets the page size of exports and the alignment of allocations.
    pub(crate) fn set_page_bytes(&mut self, page: usize) {
        self.page = page;
    }

    /// Returns whether a range can be exported: whole pages of one allocation.
    pub(crate) fn can_export(&self, address: u64, len: u64) -> bool {
        let page = self.page as u64;
        let Some((&base, block)) = self.device.range(..=address).next_back() else { return false };
        let end = (base + block.len as u64).next_multiple_of(page);
        let others = self.device.range(base + 1..).next().map_or(u64::MAX, |(&next, _)| next);
        block.mapped
            && len > 0
            && (address | len).is_multiple_of(page)
            && address.checked_add(len).is_some_and(|last| last <= end.min(others))
    }

    pub(crate) fn free_device(&mut self, address: u64) -> bool {
        self.device.remove(&address).is_some()
    }

    /// Returns the base and length of the allocation that contains an address.
    pub(crate) fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (&base, block) = self.device.range(..=address).next_back()?;
        (address < base + block.len as u64).then_some((base, block.len as u64))
    }

    pub(crate) fn allocate_pinned(&mut self, len: usize) -> u64 {
        let block = Block::new(len, 0, PAGE_BYTES);
        let address = block.address();
        self.pinned.insert(address, block);
        address
    }

    pub(crate) fn free_pinned(&mut self, address: u64) -> bool {
        self.pinned.remove(&address).is_some()
    }

    /// Registers a range. Returns false if a part of it was registered before.
    pub(crate) fn register(&mut self, address: u64, len: u64) -> bool {
        if touches(&self.registered, |&len| len, address, len) {
            return false;
        }
        self.registered.insert(address, len);
        true
    }

    pub(crate) fn unregister(&mut self, address: u64) -> bool {
        self.registered.remove(&address).is_some()
    }

    /// Returns the device's address of host memory that was registered or allocated.
    pub(crate) fn mapped(&self, address: u64) -> Option<u64> {
        if within(&self.registered, |&len| len, address, 1) {
            return Some(address + MAPPED_OFFSET);
        }
        within(&self.pinned, |block| block.len as u64, address, 1).then_some(address)
    }

    /// Returns the numbers of remaining ranges: `(device, pinned, registered)`.
    pub(crate) fn counts(&self) -> (usize, usize, usize) {
        (self.device.len(), self.pinned.len(), self.registered.len())
    }

    /// Returns the kind of a range.
    pub(crate) fn place(&self, address: u64, len: u64) -> Place {
        if address >= MAPPED_OFFSET {
            let inside = within(&self.registered, |&len| len, address - MAPPED_OFFSET, len);
            return if inside { Place::Mapped } else { Place::Wrong };
        }
        if address >= DEVICE_OFFSET {
            let mapped = |block: &Block| if block.mapped { block.len as u64 } else { 0 };
            let inside = within(&self.device, mapped, address, len);
            return if inside { Place::Device } else { Place::Wrong };
        }
        if within(&self.registered, |&len| len, address, len)
            || within(&self.pinned, |block| block.len as u64, address, len)
        {
            return Place::Pinned;
        }
        let partly = touches(&self.registered, |&len| len, address, len)
            || touches(&self.pinned, |block| block.len as u64, address, len);
        if partly || address == 0 { Place::Wrong } else { Place::Pageable }
    }

    /// Returns whether an address is in device memory.
    pub(crate) fn is_device(address: u64) -> bool {
        (DEVICE_OFFSET..MAPPED_OFFSET).contains(&address)
    }

    /// Returns the address in this process for an address that `place` accepted.
    pub(crate) fn pointer(&self, address: u64) -> *mut u8 {
        let here = if address >= MAPPED_OFFSET {
            address - MAPPED_OFFSET
        } else if address >= DEVICE_OFFSET {
            let block = self.device.range(..=address).next_back();
            block.map_or(address - DEVICE_OFFSET, |(&base, block)| block.address() + (address - base))
        } else {
            address
        };
        here as *mut u8
    }
}

//! Ranges that exist: device memory, host memory of the driver, host memory that was registered.

use std::collections::BTreeMap;

/// Added to what backs device memory, so that its addresses are none of this process.
const DEVICE_OFFSET: u64 = 0x2000_0000_0000_0000;
/// Added to registered host memory for its address on the device.
const MAPPED_OFFSET: u64 = 0x4000_0000_0000_0000;
/// Alignment of what is allocated.
const ALIGN: usize = 256;

/// Memory that the driver allocated.
struct Block {
    bytes: Vec<u8>,
    offset: usize,
    len: usize,
}

impl Block {
    fn new(len: usize, fill: u8) -> Self {
        let bytes = vec![fill; len + ALIGN];
        let offset = bytes.as_ptr().align_offset(ALIGN);
        Self { bytes, offset, len }
    }

    fn address(&self) -> u64 {
        self.bytes.as_ptr() as u64 + self.offset as u64
    }
}

/// What a range of addresses is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Inside one allocation on the device.
    Device,
    /// Inside one range of host memory that the driver allocated or that was registered.
    Pinned,
    /// The same by its address on the device.
    Mapped,
    /// Host memory that the driver does not know.
    Pageable,
    /// Partly known, out of bounds, or gone.
    Wrong,
}

/// All ranges of one world, by their first address.
#[derive(Default)]
pub(crate) struct Memory {
    device: BTreeMap<u64, Block>,
    pinned: BTreeMap<u64, Block>,
    registered: BTreeMap<u64, u64>,
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
        let block = Block::new(len, 0xDD);
        let address = block.address() + DEVICE_OFFSET;
        self.device.insert(address, block);
        address
    }

    pub(crate) fn free_device(&mut self, address: u64) -> bool {
        self.device.remove(&address).is_some()
    }

    /// Base and length of the allocation that an address lies in.
    pub(crate) fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (&base, block) = self.device.range(..=address).next_back()?;
        (address < base + block.len as u64).then_some((base, block.len as u64))
    }

    pub(crate) fn allocate_pinned(&mut self, len: usize) -> u64 {
        let block = Block::new(len, 0);
        let address = block.address();
        self.pinned.insert(address, block);
        address
    }

    pub(crate) fn free_pinned(&mut self, address: u64) -> bool {
        self.pinned.remove(&address).is_some()
    }

    /// Whether no part of the range was registered before.
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

    /// The device's address of host memory that was registered or allocated.
    pub(crate) fn mapped(&self, address: u64) -> Option<u64> {
        if within(&self.registered, |&len| len, address, 1) {
            return Some(address + MAPPED_OFFSET);
        }
        within(&self.pinned, |block| block.len as u64, address, 1).then_some(address)
    }

    /// Regions left over: `(device, pinned, registered)`.
    pub(crate) fn counts(&self) -> (usize, usize, usize) {
        (self.device.len(), self.pinned.len(), self.registered.len())
    }

    /// What a range is.
    pub(crate) fn place(&self, address: u64, len: u64) -> Place {
        if address >= MAPPED_OFFSET {
            let inside = within(&self.registered, |&len| len, address - MAPPED_OFFSET, len);
            return if inside { Place::Mapped } else { Place::Wrong };
        }
        if address >= DEVICE_OFFSET {
            let inside = within(&self.device, |block| block.len as u64, address, len);
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

    /// The address in this process behind an address that `place` found good.
    pub(crate) fn pointer(address: u64) -> *mut u8 {
        let base = if address >= MAPPED_OFFSET {
            address - MAPPED_OFFSET
        } else if address >= DEVICE_OFFSET {
            address - DEVICE_OFFSET
        } else {
            address
        };
        base as *mut u8
    }
}

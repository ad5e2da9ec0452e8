//! The kernels of `kvdepot-copy`, by name, with the same arguments.

use crate::code;
use crate::memory::Place;
use crate::schedule::{Maker, Part, Source};
use crate::world::State;

/// Maximum number of descriptors of one launch.
const DESCRIPTORS_MAX: u64 = 1 << 20;

/// The kernel of a function handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// `kvdepot_copy(const Descriptor* descriptors, u32 count)`.
    Copy,
    /// `kvdepot_burn(u32* words, u64 count, u32 rounds)`: keeps the device's memory busy, changes nothing.
    Burn,
}

impl Kernel {
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "kvdepot_copy" => Some(Self::Copy),
            "kvdepot_burn" => Some(Self::Burn),
            _ => None,
        }
    }

    /// Returns the sizes of its arguments.
    pub(crate) fn argument_bytes(self) -> &'static [usize] {
        match self {
            Self::Copy => &[8, 4],
            Self::Burn => &[8, 8, 4],
        }
    }
}

/// A piece of work as the copy kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    from: u64,
    to: u64,
    len: u64,
    unused: u64,
}

/// Begins a kernel. Returns the copies that it makes, in any order.
pub(crate) fn begin(state: &mut State, kernel: Kernel, arguments: &[u64]) -> Option<Vec<Part>> {
    let (&[first, second, ..], Kernel::Copy) = (arguments, kernel) else { return None };
    let bytes = second * size_of::<Descriptor>() as u64;
    if second > DESCRIPTORS_MAX || !reachable(state, first, bytes, "a kernel's descriptors") {
        return None;
    }
    let mut parts = Vec::new();
    for index in 0..second as usize {
        // SAFETY: `reachable` found the whole array in memory that the world keeps alive or that was registered.
        let descriptor =
            unsafe { state.memory.pointer(first).cast::<Descriptor>().add(index).read_unaligned() };
        let Descriptor { from, to, len, .. } = descriptor;
        if len > 0
            && (!reachable(state, from, len, "a kernel's source")
                || !reachable(state, to, len, "a kernel's target"))
        {
            return None;
        }
        parts.push(Part { to, from: Source::Address(from), len, by: Maker::Kernel });
    }
    (!parts.is_empty()).then_some(parts)
}

/// Returns whether a kernel can access a range: device memory, or host memory by its address on the device.
fn reachable(state: &mut State, address: u64, len: u64, what: &str) -> bool {
    let allocated = |state: &State| state.memory.mapped(address) == Some(address);
    let good = match state.memory.place(address, len) {
        Place::Device | Place::Mapped => true,
        Place::Pinned => allocated(state),
        Place::Pageable | Place::Wrong => false,
    };
    if !good {
        state.violation(format!("{what} cannot be reached by a kernel: {address:#x}, {len} bytes"));
        state.lost = code::ILLEGAL_ADDRESS;
    }
    good
}

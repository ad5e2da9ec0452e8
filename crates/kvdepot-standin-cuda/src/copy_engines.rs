//! The device's copy engines: one queue for each direction, in a time of their own that no clock measures.

use crate::memory::Memory;
use crate::schedule::{Maker, Op, Part};

/// What a copy costs whatever its length: about what a device of today needs.
const COPY_NS: u64 = 800;
/// Bytes that go over the bus in a nanosecond.
const BYTES_PER_NS: u64 = 50;

/// What a copy that is queued now waits for.
#[derive(Default)]
pub(crate) struct CopyEngines {
    /// To the host, to the device.
    queued_ns: [u64; 2],
    most_ns: [u64; 2],
}

impl CopyEngines {
    pub(crate) fn queued(&mut self, op: &Op) {
        let Op::Copies(parts) = op else { return };
        for part in parts.iter().filter(|part| part.by != Maker::Kernel) {
            let way = direction(part);
            self.queued_ns[way] += cost(part);
            self.most_ns[way] = self.most_ns[way].max(self.queued_ns[way]);
        }
    }

    pub(crate) fn ran(&mut self, part: &Part) {
        if part.by != Maker::Kernel {
            let queued = &mut self.queued_ns[direction(part)];
            *queued = queued.saturating_sub(cost(part));
        }
    }

    /// The longest queue of a direction since this was asked last.
    pub(crate) fn take_most_ns(&mut self, to_device: bool) -> u64 {
        let way = usize::from(to_device);
        std::mem::replace(&mut self.most_ns[way], self.queued_ns[way])
    }
}

fn direction(part: &Part) -> usize {
    usize::from(Memory::is_device(part.to))
}

fn cost(part: &Part) -> u64 {
    COPY_NS + part.len / BYTES_PER_NS
}

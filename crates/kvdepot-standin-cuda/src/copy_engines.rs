//! The device's copy engines: one queue per direction, in their own time, which no clock measures.

use crate::memory::Memory;
use crate::schedule::{Maker, Op, Part};

/// Fixed cost of a copy of any length, similar to that of a current device.
const COPY_NS: u64 = 800;
/// Bytes transferred over the bus per nanosecond.
const BYTES_PER_NS: u64 = 50;

/// Work that a copy queued now would wait for.
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

    /// Returns the longest queue of a direction since the last call.
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

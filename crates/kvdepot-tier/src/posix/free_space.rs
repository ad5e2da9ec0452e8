//! Free space of the directories' file systems: queried at most once a second, estimated in between.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_io::{Device, DeviceSpace};
use parking_lot::Mutex;

/// For how long an answer of the file system is used.
const FRESH: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
struct Estimate {
    space: DeviceSpace,
    asked: Instant,
}

/// One estimate per directory; `None` if unknown.
#[derive(Debug)]
pub(super) struct FreeSpace {
    percent: u64,
    estimates: Mutex<Vec<Option<Estimate>>>,
}

impl FreeSpace {
    /// `percent` of each file system shall stay free; 0 = not checked.
    pub(super) fn new(percent: u64, directories: usize) -> Self {
        Self { percent, estimates: Mutex::new(vec![None; directories]) }
    }

    /// Bytes missing to the floor when `bytes` more are written; 0 if the file system cannot tell.
    pub(super) fn shortage(&self, device: &Arc<dyn Device>, directory: usize, bytes: u64) -> u64 {
        if self.percent == 0 {
            return 0;
        }
        let known = self.estimates.lock()[directory].filter(|known| known.asked.elapsed() < FRESH);
        let space = match known {
            Some(known) => known.space,
            // Not under the lock: a hung mount must not block the others.
            None => {
                let Ok(space) = device.space() else { return 0 };
                self.estimates.lock()[directory] = Some(Estimate { space, asked: Instant::now() });
                space
            }
        };
        let floor = space.total_bytes / 100 * self.percent;
        (floor + bytes).saturating_sub(space.free_bytes)
    }

    /// Notes bytes that are about to be written.
    pub(super) fn debit(&self, directory: usize, bytes: u64) {
        if let Some(known) = &mut self.estimates.lock()[directory] {
            known.space.free_bytes = known.space.free_bytes.saturating_sub(bytes);
        }
    }

    /// Notes bytes that were freed.
    pub(super) fn credit(&self, directory: usize, bytes: u64) {
        if let Some(known) = &mut self.estimates.lock()[directory] {
            known.space.free_bytes += bytes;
        }
    }

    /// Forces a new query at the next use.
    pub(super) fn expire(&self, directory: usize) {
        self.estimates.lock()[directory] = None;
    }
}

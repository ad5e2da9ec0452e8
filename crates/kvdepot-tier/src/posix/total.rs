//! The recorded total: an upper bound of the bytes that a tier's directories hold, so that the next start keeps the cap
//! from its first write on (P5), before the files have been counted.
//!
//! Raised in steps before the bytes are written that need it; exact after a clean shutdown. Recorded only for
//! directories to which no other node writes.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockHash, Result};
use kvdepot_io::Device;
use kvdepot_io::checksum::crc64;

use super::identity::temporary_name;
use super::shared::Shared;

/// Its name in each directory.
pub(super) const TOTAL_NAME: &str = ".kvdepot-total";
const MAGIC: &[u8; 8] = b"KVDTOTAL";
const VERSION: u32 = 1;
const BYTES: usize = 56;
/// Steps from nothing to the cap.
const STEPS: u64 = 16;

/// Encodes a total of `count` directories for the one at `position`; `set` is the same in all of them.
fn encode(total: u64, set: BlockHash, count: usize, position: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(BYTES);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(count as u16).to_le_bytes());
    out.extend_from_slice(&(position as u16).to_le_bytes());
    out.extend_from_slice(&set.0);
    out.extend_from_slice(&total.to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    let crc = crc64(&out);
    out.extend_from_slice(&crc.to_le_bytes());
    out
}

/// Returns total and set of a file that lies in the right one of `count` directories.
fn decode(bytes: &[u8], count: usize, position: usize) -> Option<(u64, BlockHash)> {
    let set = BlockHash(bytes.get(16..32)?.try_into().ok()?);
    let total = u64::from_le_bytes(bytes.get(32..40)?.try_into().ok()?);
    (bytes == encode(total, set, count, position)).then_some((total, set))
}

/// Returns the total that the directories record; `None` unless all of them have one of the same set.
pub(super) fn read(devices: &[Arc<dyn Device>]) -> Option<(u64, BlockHash)> {
    let read = |(position, device): (usize, &Arc<dyn Device>)| {
        let bytes = device.read_small(Path::new(TOTAL_NAME), 4096).ok()??;
        decode(&bytes, devices.len(), position)
    };
    let all: Vec<_> = devices.iter().enumerate().map(read).collect::<Option<_>>()?;
    let set = all.first()?.1;
    // A depot that died between two writes has left the newer one either higher, or lower, in which case the older one
    // is still a bound.
    all.iter().all(|found| found.1 == set).then(|| (all.iter().map(|found| found.0).max().unwrap_or(0), set))
}

/// Removes it, for a tier that does not keep it accurate.
pub(super) fn remove(devices: &[Arc<dyn Device>]) -> Result<()> {
    devices.iter().try_for_each(|device| device.unlink(Path::new(TOTAL_NAME)).map(drop))
}

impl Shared {
    /// Records that the directories may hold `needed` bytes, rounded up to a step. If that fails nothing is recorded
    /// any more, so that the next start counts.
    pub(super) fn raise_total(&self, needed: u64) {
        let _one_at_a_time = self.total_writer.lock();
        if self.lock().total.is_none_or(|total| needed <= total) {
            return;
        }
        let step = (self.cap / STEPS).max(1);
        let total = needed.div_ceil(step).saturating_mul(step).min(self.cap).max(needed);
        self.record(total);
    }

    /// At the end: records what is there now. The next write would raise it again.
    pub(super) fn settle_total(&self) {
        let _one_at_a_time = self.total_writer.lock();
        let now = {
            let mut state = self.lock();
            let (now, recorded) = (state.bytes, state.total);
            // Writes in flight reach this bound before the directories do.
            state.total = recorded.map(|_| now);
            recorded.map(|_| now)
        };
        if let Some(now) = now {
            self.record(now);
        }
    }

    fn record(&self, total: u64) {
        let written = self.devices.iter().enumerate().try_for_each(|(position, device)| {
            let bytes = encode(total, self.total_set, self.devices.len(), position);
            device.write_small(Path::new(TOTAL_NAME), Path::new(&temporary_name()), &bytes)?;
            device.sync_dir(Path::new(""))
        });
        let mut recorded = Some(total);
        if let Err(error) = written {
            tracing::warn!(%error, "the bytes of a tier cannot be recorded; the next start counts them first");
            recorded = None;
            if let Err(error) = remove(&self.devices) {
                tracing::error!(%error, "a wrong total stays recorded; remove the file by hand");
            }
        }
        self.lock().total = recorded;
    }

    /// Writes the checkpoint and the total when the tier is closed.
    pub(super) fn save_at_end(&self) {
        let (counted, until) = {
            let state = self.lock();
            (state.counted, state.chores.stop_at)
        };
        if !counted {
            return;
        }
        if let Err(error) = self.save(until) {
            tracing::warn!(%error, "no checkpoint was written at shutdown; the next start scans");
        }
        // After that the tier's owner no longer waits, and the next tier may raise the total.
        if until.is_none_or(|until| Instant::now() < until) {
            self.settle_total();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_total_is_read_only_where_it_was_written() {
        let bytes = encode(1 << 40, BlockHash([7; 16]), 3, 1);
        assert_eq!(bytes.len(), BYTES);
        assert_eq!(decode(&bytes, 3, 1), Some((1 << 40, BlockHash([7; 16]))));
        assert_eq!(decode(&bytes, 3, 2), None, "directories in another order");
        assert_eq!(decode(&bytes, 4, 1), None, "another number of directories");
        assert_eq!(decode(&bytes[..BYTES - 1], 3, 1), None);
        for bit in 0..BYTES * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&bytes, 3, 1), None, "bit {bit}");
        }
    }
}

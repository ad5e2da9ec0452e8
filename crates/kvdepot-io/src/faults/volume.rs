//! A volume that injects faults by a plan, and one in memory that records every write for tests of crashes.

use std::path::Path;
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::plan::{Fault, FaultOp, Faults};
use crate::device::DirectAlign;
use crate::iobuf::IoBuf;
use crate::volume::Volume;

/// Wraps a volume. `Read` and `Write` strike its transfers, `Flush` its syncs.
#[derive(Debug)]
pub struct FaultVolume {
    inner: Arc<dyn Volume>,
    faults: Faults,
}

impl FaultVolume {
    /// Wraps a volume.
    pub fn new(inner: Arc<dyn Volume>, faults: Faults) -> Self {
        Self { inner, faults }
    }
}

impl Volume for FaultVolume {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn can_grow(&self) -> bool {
        self.inner.can_grow()
    }

    fn allocate(&self, bytes: u64) -> Result<()> {
        self.faults.strike(FaultOp::Grow)?;
        self.inner.allocate(bytes)
    }

    fn direct(&self) -> Option<DirectAlign> {
        self.inner.direct()
    }

    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()> {
        let fault = self.faults.strike(FaultOp::Read)?;
        self.inner.read_at(buf, offset)?;
        if fault == Some(Fault::Flip) && !buf.is_empty() {
            buf.flip_bit(self.faults.pick(buf.len()) * 8 + self.faults.pick(8));
        }
        Ok(())
    }

    /// A short write fails after it has written some of its buffers.
    fn write_at(&self, bufs: &[IoBuf], offset: u64) -> Result<()> {
        if self.faults.strike(FaultOp::Write)? == Some(Fault::Short) {
            self.inner.write_at(&bufs[..self.faults.pick(bufs.len())], offset)?;
            return Err(Error::new(ErrorKind::Io, "injected fault: a write ended early"));
        }
        self.inner.write_at(bufs, offset)
    }

    fn sync(&self) -> Result<()> {
        self.faults.strike(FaultOp::Flush)?;
        self.inner.sync()
    }
}

/// An operation on a volume in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeOp {
    /// Bytes were written.
    Write {
        /// Where.
        offset: u64,
        /// Which.
        bytes: Arc<[u8]>,
    },
    /// Everything before it was synced.
    Sync,
}

/// What a power loss leaves of a write without a later sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// All of its bytes.
    All,
    /// None of its bytes.
    Nothing,
    /// This number of bytes at its start.
    First(usize),
    /// All bytes but this number at its start.
    Last(usize),
}

#[derive(Debug, Default)]
struct Medium {
    begin: Vec<u8>,
    now: Vec<u8>,
    log: Vec<VolumeOp>,
}

/// A volume of a fixed length in memory. Clones share its content.
#[derive(Clone, Debug, Default)]
pub struct MemoryVolume {
    medium: Arc<Mutex<Medium>>,
}

impl MemoryVolume {
    /// Makes a volume with these bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        let medium = Medium { begin: bytes.clone(), now: bytes, log: Vec::new() };
        Self { medium: Arc::new(Mutex::new(medium)) }
    }

    /// Returns the number of operations so far.
    pub fn operations(&self) -> usize {
        self.medium.lock().log.len()
    }

    /// Returns the operation with this number.
    pub fn operation(&self, number: usize) -> Option<VolumeOp> {
        self.medium.lock().log.get(number).cloned()
    }

    /// Returns the bytes after a crash that follows the first `at` operations. `kept` says what is left of each write
    /// that was not synced by then.
    pub fn crash(&self, at: usize, mut kept: impl FnMut(usize) -> Kept) -> Vec<u8> {
        let medium = self.medium.lock();
        let mut image = medium.begin.clone();
        let log = &medium.log[..at];
        let synced = log.iter().rposition(|op| *op == VolumeOp::Sync).unwrap_or(0);
        for (number, op) in log.iter().enumerate() {
            let VolumeOp::Write { offset, bytes } = op else { continue };
            let kept = if number < synced { Kept::All } else { kept(number) };
            let range = match kept {
                Kept::All => 0..bytes.len(),
                Kept::Nothing => 0..0,
                Kept::First(count) => 0..count.min(bytes.len()),
                Kept::Last(from) => from.min(bytes.len())..bytes.len(),
            };
            let at = usize::try_from(*offset).expect("an offset in memory");
            image[at + range.start..at + range.end].copy_from_slice(&bytes[range]);
        }
        image
    }

    fn outside(&self, offset: u64) -> Error {
        Error::new(ErrorKind::Corrupt, "a tier's file ends early").with("offset_bytes", offset)
    }
}

impl Volume for MemoryVolume {
    fn path(&self) -> &Path {
        Path::new("memory")
    }

    fn bytes(&self) -> u64 {
        self.medium.lock().now.len() as u64
    }

    fn can_grow(&self) -> bool {
        false
    }

    fn allocate(&self, bytes: u64) -> Result<()> {
        Err(Error::new(ErrorKind::Config, "a volume in memory cannot be resized").with("bytes", bytes))
    }

    fn direct(&self) -> Option<DirectAlign> {
        None
    }

    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()> {
        let medium = self.medium.lock();
        let mut at = usize::try_from(offset).map_err(|_| self.outside(offset))?;
        for mut slice in buf.slices_mut(0) {
            let from = medium.now.get(at..at + slice.len()).ok_or_else(|| self.outside(offset))?;
            slice.copy_from_slice(from);
            at += from.len();
        }
        Ok(())
    }

    fn write_at(&self, bufs: &[IoBuf], offset: u64) -> Result<()> {
        let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.slices(0)).flat_map(|s| s.to_vec()).collect();
        let mut medium = self.medium.lock();
        let at = usize::try_from(offset).map_err(|_| self.outside(offset))?;
        let to = medium.now.get_mut(at..at + bytes.len()).ok_or_else(|| self.outside(offset))?;
        to.copy_from_slice(&bytes);
        medium.log.push(VolumeOp::Write { offset, bytes: bytes.into() });
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.medium.lock().log.push(VolumeOp::Sync);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SlotBuf;

    fn page(byte: u8) -> IoBuf {
        let slot = SlotBuf::anonymous(8);
        slot.write_at(0, &[byte; 8]);
        IoBuf::payload(slot, 8).unwrap()
    }

    #[test]
    fn a_crash_takes_what_was_not_synced() {
        let volume = MemoryVolume::new(vec![0; 24]);
        volume.write_at(&[page(1)], 0).unwrap();
        volume.sync().unwrap();
        volume.write_at(&[page(2), page(3)], 8).unwrap();
        assert_eq!(volume.crash(3, |_| Kept::Nothing), [[1; 8], [0; 8], [0; 8]].concat());
        assert_eq!(volume.crash(3, |_| Kept::First(8)), [[1; 8], [2; 8], [0; 8]].concat());
        assert_eq!(volume.crash(3, |_| Kept::Last(8)), [[1; 8], [0; 8], [3; 8]].concat());
        assert_eq!(volume.crash(1, |_| Kept::Nothing), [0; 24]);
        assert!(volume.write_at(&[page(1)], 20).is_err() && volume.operations() == 3);
    }

    #[test]
    fn a_volume_fails_by_plan() {
        let (memory, faults) = (MemoryVolume::new(vec![0; 24]), Faults::default());
        let volume = FaultVolume::new(Arc::new(memory.clone()), faults.clone());
        faults.at(FaultOp::Write, 0, Fault::NoSpace).at(FaultOp::Flush, 0, Fault::Eio);
        assert_eq!(volume.write_at(&[page(1)], 0).unwrap_err().kind(), ErrorKind::NoSpace);
        assert!(volume.sync().is_err() && memory.operations() == 0);
        volume.write_at(&[page(1)], 0).unwrap();
        faults.at(FaultOp::Read, 0, Fault::Flip);
        let (mut flipped, mut right) = (page(0), page(0));
        volume.read_at(&mut flipped, 0).unwrap();
        volume.read_at(&mut right, 0).unwrap();
        assert_eq!(right.slices(0)[0][..], [1; 8]);
        assert_ne!(flipped.slices(0)[0][..], [1; 8]);
    }
}

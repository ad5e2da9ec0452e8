//! A device that follows a plan of faults.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use kvdepot_core::Result;

use super::plan::{Fault, FaultOp, Faults};
use crate::device::{Device, DeviceFile, DirectAlign, FileStat, ListEntry};
use crate::iobuf::IoBuf;

/// Passes everything on to another device, save what its plan says.
#[derive(Debug)]
pub struct FaultDevice {
    inner: Arc<dyn Device>,
    faults: Faults,
}

impl FaultDevice {
    /// Wraps a device.
    pub fn new(inner: Arc<dyn Device>, faults: Faults) -> Self {
        Self { inner, faults }
    }

    fn strike(&self, op: FaultOp, path: &Path) -> Result<()> {
        let struck = self.faults.strike(op);
        struck.map(drop).map_err(|e| e.with("path", self.inner.root().join(path).display()))
    }

    fn wrap(&self, file: Box<dyn DeviceFile>) -> Box<dyn DeviceFile> {
        Box::new(FaultFile { inner: file, faults: self.faults.clone() })
    }
}

#[derive(Debug)]
struct FaultFile {
    inner: Box<dyn DeviceFile>,
    faults: Faults,
}

impl DeviceFile for FaultFile {
    fn read_at(&self, buf: &mut IoBuf, skip: usize, offset: u64) -> Result<usize> {
        let fault = self.faults.strike(FaultOp::Read)?;
        let came = self.inner.read_at(buf, skip, offset)?;
        match fault {
            // The bytes behind a short count do not matter: the caller reads them again.
            Some(Fault::Short) if came > 1 => Ok(1 + self.faults.pick(came - 1)),
            Some(Fault::Flip) if came > 0 => {
                buf.flip_bit((skip + self.faults.pick(came)) * 8 + self.faults.pick(8));
                Ok(came)
            }
            _ => Ok(came),
        }
    }

    fn write_at(&self, buf: &IoBuf, skip: usize, offset: u64) -> Result<usize> {
        let fault = self.faults.strike(FaultOp::Write)?;
        let went = self.inner.write_at(buf, skip, offset)?;
        match fault {
            Some(Fault::Short) if went > 1 => Ok(1 + self.faults.pick(went - 1)),
            _ => Ok(went),
        }
    }

    fn sync_data(&self) -> Result<()> {
        self.faults.strike(FaultOp::Meta)?;
        self.inner.sync_data()
    }

    fn go_direct_if_cold(&self, bytes: u64) -> bool {
        self.inner.go_direct_if_cold(bytes)
    }

    /// `None`: faults strike only through the calls above.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Device for FaultDevice {
    fn root(&self) -> &Path {
        self.inner.root()
    }

    fn direct(&self) -> Option<DirectAlign> {
        self.inner.direct()
    }

    fn direct_when_cold(&self) -> Option<DirectAlign> {
        self.inner.direct_when_cold()
    }

    fn open(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>> {
        self.strike(FaultOp::Open, path)?;
        self.inner.open(path, direct).map(|file| self.wrap(file))
    }

    fn create(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>> {
        self.strike(FaultOp::Create, path)?;
        self.inner.create(path, direct).map(|file| self.wrap(file))
    }

    fn publish(&self, from: &Path, to: &Path) -> Result<()> {
        self.strike(FaultOp::Publish, to)?;
        self.inner.publish(from, to)
    }

    fn unlink(&self, path: &Path) -> Result<bool> {
        self.strike(FaultOp::Unlink, path)?;
        self.inner.unlink(path)
    }

    fn stat(&self, path: &Path) -> Result<Option<FileStat>> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.stat(path)
    }

    fn list(&self, path: &Path, each: &mut dyn FnMut(ListEntry)) -> Result<()> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.list(path, each)
    }

    fn make_dir(&self, path: &Path) -> Result<()> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.make_dir(path)
    }

    fn remove_dir(&self, path: &Path) -> Result<bool> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.remove_dir(path)
    }

    fn set_modified(&self, path: &Path, time: SystemTime) -> Result<()> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.set_modified(path, time)
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.sync_dir(path)
    }

    fn free_bytes(&self) -> Result<u64> {
        self.inner.free_bytes()
    }

    fn read_small(&self, path: &Path, bytes_max: usize) -> Result<Option<Vec<u8>>> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.read_small(path, bytes_max)
    }

    fn write_small(&self, path: &Path, temporary: &Path, bytes: &[u8]) -> Result<()> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.write_small(path, temporary, bytes)
    }
}

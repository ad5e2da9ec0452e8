//! A device that injects faults by a plan.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use kvdepot_core::{Error, ErrorKind, Result};

use super::plan::{Fault, FaultOp, Faults};
use crate::device::{Device, DeviceFile, DeviceSpace, DirectAlign, FileStat, ListEntry};
use crate::iobuf::IoBuf;

/// Forwards everything to another device, except where its plan injects a fault.
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

    fn strike(&self, op: FaultOp, path: &Path) -> Result<Option<Fault>> {
        let struck = self.faults.strike_at(op, path);
        struck.map_err(|e| e.with("path", self.inner.root().join(path).display()))
    }

    fn wrap(&self, file: Box<dyn DeviceFile>) -> Box<dyn DeviceFile> {
        let root = self.inner.root().to_owned();
        Box::new(FaultFile { inner: file, faults: self.faults.clone(), root })
    }
}

/// Returns the bytes of all files below a directory, each rounded up to whole pages. For tests, whose directories are
/// small.
fn bytes_below(directory: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    let bytes = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => bytes_below(&entry.path()),
        Ok(meta) => meta.len().next_multiple_of(kvdepot_core::limits::BLOCK_ALIGN_BYTES),
        Err(_) => 0,
    };
    entries.filter_map(std::result::Result::ok).map(bytes).sum()
}

#[derive(Debug)]
struct FaultFile {
    inner: Box<dyn DeviceFile>,
    faults: Faults,
    root: std::path::PathBuf,
}

impl DeviceFile for FaultFile {
    fn read_at(&self, buf: &mut IoBuf, skip: usize, offset: u64) -> Result<usize> {
        let fault = self.faults.strike(FaultOp::Read)?;
        let came = self.inner.read_at(buf, skip, offset)?;
        match fault {
            // The bytes after a short count do not matter: the caller reads them again.
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
        if self.faults.disk_bytes().is_some_and(|disk| bytes_below(&self.root) + buf.len() as u64 > disk) {
            return Err(Faults::no_space());
        }
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

    fn finish(self: Box<Self>) -> Result<()> {
        self.faults.strike(FaultOp::Flush)?;
        self.inner.finish()
    }

    fn go_direct_if_cold(&self, bytes: u64) -> bool {
        self.inner.go_direct_if_cold(bytes)
    }

    /// Returns `None` unless the plan strikes in queues and simulates no disk size, which is checked by the calls
    /// above.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let in_queue = self.faults.is_striking_in_queue() && self.faults.disk_bytes().is_none();
        self.inner.descriptor().filter(|_| in_queue)
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

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn open(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>> {
        self.strike(FaultOp::Open, path)?;
        self.inner.open(path, direct).map(|file| self.wrap(file))
    }

    fn create(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>> {
        self.strike(FaultOp::Create, path)?;
        self.inner.create(path, direct).map(|file| self.wrap(file))
    }

    fn overwrites(&self) -> bool {
        self.inner.overwrites() && !self.faults.is_overwriting_forbidden()
    }

    fn take_over(
        &self,
        from: &Path,
        to: &Path,
        bytes: u64,
        direct: bool,
    ) -> Result<Option<Box<dyn DeviceFile>>> {
        self.strike(FaultOp::Publish, to)?;
        self.strike(FaultOp::Create, to)?;
        self.inner.take_over(from, to, bytes, direct).map(|file| file.map(|file| self.wrap(file)))
    }

    fn publish(&self, from: &Path, to: &Path) -> Result<()> {
        let fault = self.strike(FaultOp::Publish, to)?;
        self.inner.publish(from, to)?;
        if fault == Some(Fault::Late) { Err(Faults::lost_answer()) } else { Ok(()) }
    }

    fn rename_new(&self, from: &Path, to: &Path) -> Result<bool> {
        self.strike(FaultOp::Publish, to)?;
        self.inner.rename_new(from, to)
    }

    fn link_new(&self, from: &Path, to: &Path) -> Result<bool> {
        self.strike(FaultOp::Publish, to)?;
        if self.faults.are_links_forbidden() {
            return Err(Error::new(ErrorKind::Unsupported, "injected fault: no hard links"));
        }
        self.inner.link_new(from, to)
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
        self.strike(FaultOp::Grow, path)?;
        self.inner.make_dir(path)
    }

    fn create_dir(&self, path: &Path) -> Result<bool> {
        self.strike(FaultOp::Meta, path)?;
        self.strike(FaultOp::Grow, path)?;
        self.inner.create_dir(path)
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

    fn space(&self) -> Result<DeviceSpace> {
        match self.faults.disk_bytes() {
            Some(total_bytes) => {
                let used_bytes = bytes_below(self.inner.root());
                let free_bytes = total_bytes.saturating_sub(used_bytes);
                Ok(DeviceSpace { file_system: 0, total_bytes, used_bytes, free_bytes })
            }
            None => self.inner.space(),
        }
    }

    fn read_small(&self, path: &Path, bytes_max: usize) -> Result<Option<Vec<u8>>> {
        self.strike(FaultOp::Meta, path)?;
        self.inner.read_small(path, bytes_max)
    }

    fn write_small(&self, path: &Path, temporary: &Path, bytes: &[u8]) -> Result<()> {
        self.strike(FaultOp::Meta, path)?;
        self.strike(FaultOp::Grow, path)?;
        self.inner.write_small(path, temporary, bytes)
    }
}

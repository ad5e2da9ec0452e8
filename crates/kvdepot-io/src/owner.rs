//! Whether another process owns a file or device: holds the lock that a tier takes on its medium.

use std::path::Path;

use kvdepot_core::{Error, Result};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::io::Errno;

/// Returns whether somebody holds the lock of a file or device, or has claimed it as a block device. If nobody does, it
/// is locked for a moment, which a depot that starts meanwhile waits for.
pub fn has_owner(path: &Path) -> Result<bool> {
    let said = |what: &'static str, error: Errno| Error::io(what, error.into()).with("path", path.display());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = open(path, flags, Mode::empty()).map_err(|error| said("cannot open a medium", error))?;
    let stat = fstat(&file).map_err(|error| said("cannot look at a medium", error))?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        // A device can have many nodes, each with its own lock.
        match open(path, flags | OFlags::EXCL, Mode::empty()) {
            Ok(claimed) => drop(claimed),
            Err(Errno::BUSY) => return Ok(true),
            Err(error) => return Err(said("cannot look at a block device", error)),
        }
    }
    loop {
        // Closing the file ends the lock.
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => return Ok(false),
            Err(Errno::WOULDBLOCK) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(error) => return Err(said("cannot look at the lock of a medium", error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::FileVolume;

    #[test]
    fn a_volume_has_an_owner_while_it_is_open_and_readers_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("medium");
        assert!(has_owner(&path).is_err());
        let owner = FileVolume::open(&path, Duration::ZERO).unwrap();
        let reader = FileVolume::open_to_read(&path).unwrap();
        assert!(has_owner(&path).unwrap());
        drop(owner);
        assert!(!has_owner(&path).unwrap());
        assert!(FileVolume::open(&path, Duration::ZERO).is_ok(), "neither a reader nor a look stays");
        drop(reader);
    }
}

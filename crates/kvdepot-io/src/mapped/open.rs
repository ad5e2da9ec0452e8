//! Opens a medium: determines its kind and size, and locks it against other users.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, major, minor};

use super::device::Use;
use super::{FileMedium, MappedMedium, Medium, flush, in_memory};

/// Pause between attempts to take a lock held by another process.
const LOCK_TRY: Duration = Duration::from_millis(10);

/// How a medium is accessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// As it is fast and safe: a device is mapped, and so is a file in memory for reads. A file on a disk is accessed with
    /// positional calls.
    #[default]
    Auto,
    /// A file is accessed with positional calls. A device has none.
    Pread,
    /// A device is mapped, and every file is for reads.
    Mapped,
    /// A file, too, is mapped for reads and writes: for tests and measurements without a device.
    AsDevice,
}

/// What is done to a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Positional calls.
    Calls,
    /// Positional calls, and blocks are read from a mapping; `or_calls`: without one if there can be none.
    Reads { or_calls: bool },
    /// All through a mapping.
    Device,
}

/// Chooses how a medium is accessed; `None`: not as was asked for.
const fn way(access: Access, is_device: bool, is_in_memory: bool) -> Option<Way> {
    match (access, is_device) {
        (Access::Pread, true) => None,
        (_, true) | (Access::AsDevice, false) => Some(Way::Device),
        (Access::Mapped, false) => Some(Way::Reads { or_calls: false }),
        // An error of a disk is one of the read call, but the end of a mapping.
        (Access::Auto, false) if is_in_memory => Some(Way::Reads { or_calls: true }),
        (Access::Auto | Access::Pread, false) => Some(Way::Calls),
    }
}

/// A file that may be a medium, and what it is.
struct Found {
    file: OwnedFd,
    size: u64,
    align: u64,
    is_device: bool,
}

/// Opens a medium for this process alone, and waits up to `lock_wait` until another process releases it. `bytes_max`
/// bounds the part of it that is used; 0 = all. Creates and extends nothing.
pub fn open(path: &Path, bytes_max: u64, access: Access, lock_wait: Duration) -> Result<Arc<dyn Medium>> {
    let said = |error: Error| error.with("path", path.display());
    let Found { file, size, align, is_device } = find(path, OFlags::RDWR)?;
    let wanted = if bytes_max == 0 { size } else { bytes_max };
    if wanted > size {
        return Err(said(Error::new(
            ErrorKind::Config,
            "the medium is smaller than configured: lower the configured size, or extend the file with `truncate -s`",
        )
        .with("bytes", size)
        .with("bytes_wanted", wanted)));
    }
    let bytes = wanted / align * align;
    if is_device && bytes == 0 {
        return Err(said(Error::new(
            ErrorKind::Config,
            "a DAX device is mapped in multiples of its alignment, and less than one was asked for: raise the size",
        )
        .with("bytes_wanted", wanted)
        .with("alignment_bytes", align)));
    }
    lock(&file, lock_wait).map_err(said)?;
    if is_device && !flush::IS_KNOWN {
        return Err(said(Error::new(
            ErrorKind::Unsupported,
            "this build cannot flush the caches of this processor, so it cannot use a DAX device",
        )));
    }
    let way = way(access, is_device, in_memory::holds(&file)).ok_or_else(|| {
        said(Error::new(
            ErrorKind::Config,
            "a DAX device has no read calls, so it is mapped: remove dax_access: pread, or name a file",
        ))
    })?;
    Ok(match way {
        Way::Device => Arc::new(MappedMedium::new(path, file, bytes, Use::Write)?),
        Way::Calls => Arc::new(FileMedium::new(path, file, bytes)),
        Way::Reads { or_calls } => {
            let mut medium = FileMedium::new(path, file, bytes);
            match medium.map() {
                Err(error) if or_calls => {
                    tracing::warn!(%error, "a medium in memory cannot be mapped, so it is read with system calls");
                }
                outcome => outcome?,
            }
            Arc::new(medium)
        }
    })
}

/// Opens all of a medium only to read it, whoever owns it: it is not locked, and writes fail.
pub fn open_to_read(path: &Path) -> Result<Arc<dyn Medium>> {
    let Found { file, size, align, is_device } = find(path, OFlags::RDONLY)?;
    let bytes = size / align * align;
    if is_device {
        return Ok(Arc::new(MappedMedium::new(path, file, bytes, Use::Read)?));
    }
    Ok(Arc::new(FileMedium::new(path, file, bytes)))
}

/// Opens a file, and determines what it is.
fn find(path: &Path, access: OFlags) -> Result<Found> {
    let said = |error: Error| error.with("path", path.display());
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
        said(Error::io(
            "cannot open a medium: it is a DAX device or a file that exists, such as one made by `truncate -s 64G`",
            error.into(),
        ))
    })?;
    let stat = fstat(&file).map_err(|error| said(Error::io("cannot look at a medium", error.into())))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            Ok(Found { file, size, align: 4096, is_device: false })
        }
        FileType::CharacterDevice => {
            let (size, align) = dax_size(&stat).map_err(said)?;
            Ok(Found { file, size, align, is_device: true })
        }
        _ => Err(said(Error::new(
            ErrorKind::Config,
            "a medium is a DAX character device or a plain file; put a file system on a block device, and a file into it",
        ))),
    }
}

/// Locks a medium for this process. The kernel releases the lock when the process ends.
fn lock(file: &OwnedFd, wait: Duration) -> Result<()> {
    let end = Instant::now() + wait;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(LOCK_TRY),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    "another depot uses this medium: each depot needs its own",
                ));
            }
            Err(error) => return Err(Error::io("cannot lock a medium", error.into())),
        }
    }
}

/// Returns size and alignment of a DAX device, from sysfs because `stat` reports neither.
fn dax_size(stat: &Stat) -> Result<(u64, u64)> {
    let directory = format!("/sys/dev/char/{}:{}", major(stat.st_rdev), minor(stat.st_rdev));
    let subsystem = std::fs::read_link(format!("{directory}/subsystem")).unwrap_or_default();
    if subsystem.file_name().is_none_or(|name| name != "dax") {
        return Err(Error::new(ErrorKind::Config, "a character device must be a DAX device to be a medium")
            .with("sysfs", directory));
    }
    let number = |name: &str| {
        let text = std::fs::read_to_string(format!("{directory}/{name}"))
            .map_err(|error| Error::io("cannot read a DAX device's attribute", error).with("name", name))?;
        let wrong = |_| {
            Error::new(ErrorKind::Io, "a DAX device's attribute is not a number").with("value", text.trim())
        };
        text.trim().parse::<u64>().map_err(wrong)
    };
    Ok((number("size")?, number("device/align").or_else(|_| number("align")).unwrap_or(2 << 20).max(4096)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_follows_from_what_was_asked_for_and_what_it_is() {
        for (access, device, in_memory, on_disk) in [
            (Access::Auto, Some(Way::Device), Way::Reads { or_calls: true }, Way::Calls),
            (Access::Pread, None, Way::Calls, Way::Calls),
            (
                Access::Mapped,
                Some(Way::Device),
                Way::Reads { or_calls: false },
                Way::Reads { or_calls: false },
            ),
            (Access::AsDevice, Some(Way::Device), Way::Device, Way::Device),
        ] {
            assert_eq!(way(access, true, false), device, "{access:?}");
            assert_eq!(way(access, false, true), Some(in_memory), "{access:?}");
            assert_eq!(way(access, false, false), Some(on_disk), "{access:?}");
        }
    }
}

//! Moving whole files with plain calls: what a thread of the psync engine does with one request.

use std::path::Path;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::device::{Device, DeviceFile};
use crate::engine::{FileWritten, Op, Prepared, Request, WriteFile};
use crate::iobuf::IoBuf;

/// Runs a request to its end on this thread.
pub fn run(request: Request) {
    match request.op {
        Op::Read(mut read) => {
            let outcome = read_file(&*read.device, &read.path, &mut read.buf).map(|()| read.buf);
            (read.done)(outcome);
        }
        Op::Write(write) => write_and_tell(write),
        Op::Call(call) => (call.run)(Ok(())),
    }
}

/// Fills `buf` with a file's first bytes; `Corrupt` if the file is shorter.
pub fn read_file(device: &dyn Device, path: &Path, buf: &mut IoBuf) -> Result<()> {
    let always = device.direct().filter(|align| buf.fits(*align));
    let when_cold = device.direct_when_cold().filter(|align| buf.fits(*align));
    let mut file = device.open(path, always.is_some())?;
    let (mut done, whole) = (0, buf.len());
    let mut direct = always.is_some() || (when_cold.is_some() && file.go_direct_if_cold(whole as u64));
    let align = always.or(when_cold);
    while done < whole {
        let came = file.read_at(buf, done, done as u64)?;
        if came == 0 {
            return Err(Error::new(ErrorKind::Corrupt, "a block file ends early")
                .with("path", device.root().join(path).display())
                .with("bytes", done)
                .with("bytes_expected", whole));
        }
        done += came;
        if direct && align.is_some_and(|align| !done.is_multiple_of(align.offset_bytes)) {
            // O_DIRECT goes on only at aligned offsets; the rest of this one file is read without it.
            direct = false;
            file = device.open(path, false)?;
        }
    }
    Ok(())
}

fn write_and_tell(write: WriteFile) {
    let WriteFile { device, temporary, target, durable, prepare, make_room, done } = write;
    let attempt = |buf: &IoBuf, over: Option<Box<dyn DeviceFile>>| {
        let published = write_file(&*device, &temporary, buf, durable, over)
            .and_then(|()| device.publish(&temporary, &target))
            .map(|()| FileWritten::Published);
        if published.is_err() {
            // Best effort: the sweep finds what stays (P4).
            let _ = device.unlink(&temporary);
        }
        published
    };
    let first = match prepare() {
        Ok(Prepared::Skip) => return done(Ok(FileWritten::Skipped)),
        Ok(Prepared::Buf(buf)) => Ok((attempt(&buf, None), buf)),
        Ok(Prepared::Over(buf, file)) => Ok((attempt(&buf, Some(file)), buf)),
        Err(error) => Err(error),
    };
    let outcome = first.and_then(|(first, buf)| match first {
        Err(error) if error.kind() == ErrorKind::NoSpace && make_room() => attempt(&buf, None),
        first => first,
    });
    done(outcome);
}

fn write_file(
    device: &dyn Device,
    path: &Path,
    buf: &IoBuf,
    durable: bool,
    over: Option<Box<dyn DeviceFile>>,
) -> Result<()> {
    let direct = device.direct().filter(|align| buf.fits(*align));
    let file = over.map_or_else(|| device.create(path, direct.is_some()), Ok)?;
    write_whole(&*file, buf, direct.map_or(1, |align| align.offset_bytes)).map_err(|e| match e.kind() {
        ErrorKind::NoSpace => e.with("free_bytes", device.free_bytes().unwrap_or(0)),
        _ => e,
    })?;
    if durable {
        file.sync_data()?;
    }
    // The rename that follows publishes the file: an error that the system kept for later must come first.
    file.finish()
}

fn write_whole(file: &dyn DeviceFile, buf: &IoBuf, step: usize) -> Result<()> {
    let (mut done, whole) = (0, buf.len());
    while done < whole {
        let went = file.write_at(buf, done, done as u64)?;
        let next = (done + went) / step * step;
        if went == 0 || (next <= done && done + went < whole) {
            return Err(Error::new(ErrorKind::Io, "the system took no more of a block file")
                .with("bytes", done)
                .with("bytes_expected", whole));
        }
        done = if done + went >= whole { whole } else { next };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::buf::SlotBuf;
    use crate::cached::cached_bytes;
    use crate::device::DirectUse;
    use crate::directory::DirDevice;

    const BYTES: usize = 1 << 20;

    fn read(device: &DirDevice) -> Vec<u8> {
        let slot = SlotBuf::anonymous(BYTES);
        let mut buf = IoBuf::payload(slot.clone(), BYTES).unwrap();
        read_file(device, Path::new("block"), &mut buf).unwrap();
        let mut bytes = vec![0; BYTES];
        slot.read_at(0, &mut bytes);
        bytes
    }

    /// A cold read that went through the page cache would leave the file there.
    #[test]
    fn a_file_that_is_not_cached_is_read_past_the_cache_and_one_that_is_from_it() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let bytes: Vec<u8> = (0..BYTES).map(|i| (i / 4096 + i) as u8).collect();
        std::fs::write(dir.path().join("block"), &bytes).unwrap();
        let file = File::open(dir.path().join("block")).unwrap();
        let cached = || cached_bytes(file.as_fd(), BYTES as u64);
        let drop_from_cache = || {
            file.sync_all().unwrap();
            // SAFETY: advice about a file touches no memory.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        };
        let when_cold = DirDevice::open(dir.path(), DirectUse::ColdReads).unwrap();
        let never = DirDevice::open(dir.path(), DirectUse::Never).unwrap();
        drop_from_cache();
        if when_cold.direct_when_cold().is_none() || cached() != Some(0) {
            // No O_DIRECT, no cachestat(2), or a file system that is nothing but cache: then reads are plain ones.
            assert!(read(&when_cold) == bytes);
            return;
        }
        assert!(read(&when_cold) == bytes);
        assert_eq!(cached(), Some(0), "the read went through the page cache");
        assert!(read(&never) == bytes);
        // Not all of it: the system may take pages back at any time.
        assert_ne!(cached(), Some(0), "the read went past the page cache");
        assert!(read(&when_cold) == bytes);
    }
}

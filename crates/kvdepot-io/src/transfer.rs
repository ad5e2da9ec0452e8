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
    let align = device.direct().filter(|align| buf.fits(*align));
    let mut direct = align.is_some();
    let mut file = device.open(path, direct)?;
    let (mut done, whole) = (0, buf.len());
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
    let WriteFile { device, temporary, target, durable, prepare, done } = write;
    let outcome = match prepare() {
        Ok(Prepared::Skip) => Ok(FileWritten::Skipped),
        Ok(Prepared::Buf(buf)) => {
            let published = write_file(&*device, &temporary, &buf, durable)
                .and_then(|()| device.publish(&temporary, &target))
                .map(|()| FileWritten::Published);
            if published.is_err() {
                // Best effort: the sweep finds what stays (P4).
                let _ = device.unlink(&temporary);
            }
            published
        }
        Err(error) => Err(error),
    };
    done(outcome);
}

fn write_file(device: &dyn Device, path: &Path, buf: &IoBuf, durable: bool) -> Result<()> {
    let direct = device.direct().filter(|align| buf.fits(*align));
    let file = device.create(path, direct.is_some())?;
    write_whole(&*file, buf, direct.map_or(1, |align| align.offset_bytes)).map_err(|e| match e.kind() {
        ErrorKind::NoSpace => e.with("free_bytes", device.free_bytes().unwrap_or(0)),
        _ => e,
    })?;
    if durable { file.sync_data() } else { Ok(()) }
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

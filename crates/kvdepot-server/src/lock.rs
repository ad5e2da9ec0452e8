//! One depot a socket: whoever holds the lock beside the socket may listen on it. The kernel drops the lock with its
//! holder, so a depot that was killed leaves a stale socket but never a stale lock (P4).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::fs::FlockOperation;

/// The right to serve a socket.
#[derive(Debug)]
pub struct DoorLock {
    socket: PathBuf,
    _file: File,
}

impl DoorLock {
    /// Takes the lock; None when another process holds it. Refuses a directory in which others could replace the
    /// socket.
    pub fn take(socket: &Path) -> Result<Option<Self>> {
        let directory = socket.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let refuse = |what: &str| {
            Error::new(ErrorKind::Permission, what.to_owned()).with("directory", directory.display())
        };
        let meta = std::fs::metadata(directory).map_err(|e| {
            Error::io("the socket's directory cannot be used: create it first", e)
                .with("directory", directory.display())
        })?;
        let (others_write, sticky) = (meta.mode() & 0o022 != 0, meta.mode() & 0o1000 != 0);
        if others_write && !sticky {
            return Err(refuse(
                "others may write to the socket's directory: chmod 0700 it or choose another",
            ));
        }
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path).map_err(
                |e| {
                    Error::io("cannot open the lock beside the socket", e)
                        .with("path", Path::new(&path).display())
                },
            )?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { socket: socket.to_owned(), _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(Error::io("cannot lock the socket", e.into()).with("path", socket.display())),
        }
    }

    /// The socket that the holder may serve.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

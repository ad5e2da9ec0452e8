//! One depot for each socket: only the process that holds the lock next to the socket may listen on it. The kernel
//! releases the lock with its holder, so a killed depot leaves a stale socket but never a stale lock (P4).

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, OFlags};

/// How often a lock file that is deleted while it is being locked is opened again.
const OPENS_MAX: usize = 16;

/// Identifies a file by device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    fn of(meta: &Metadata) -> Self {
        Self { device: meta.dev(), inode: meta.ino() }
    }

    /// Returns the file at a path without following links; `None` if there is none.
    pub(crate) fn at(path: &Path) -> io::Result<Option<Self>> {
        match std::fs::symlink_metadata(path) {
            Ok(meta) => Ok(Some(Self::of(&meta))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Whether a lock still grants its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The lock file is where it was.
    Held,
    /// The lock file was deleted or replaced, and the new file is locked instead.
    Renewed,
    /// Another process holds the lock file at the path.
    Lost,
}

/// The right to serve a socket.
#[derive(Debug)]
pub struct DoorLock {
    socket: PathBuf,
    path: PathBuf,
    file: Mutex<File>,
}

impl DoorLock {
    /// Takes the lock. Returns `None` if another process holds it. Refuses a directory in which others could replace
    /// the socket, and a lock file that is a link, not a regular file, or another user's.
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
        let path = PathBuf::from(path);
        let file = lock(&path)?;
        Ok(file.map(|file| Self { socket: socket.to_owned(), path, file: Mutex::new(file) }))
    }

    /// Inherits the lock from another process through its descriptor, so that no third process gets it in between.
    pub(crate) fn inherit(socket: &Path, file: OwnedFd) -> Result<Self> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let this =
            Self { socket: socket.to_owned(), path: PathBuf::from(path), file: Mutex::new(File::from(file)) };
        let not_ours = |e: rustix::io::Errno| {
            Error::io("the running depot has not handed its lock over", e.into())
                .with("path", this.path.display())
        };
        // The lock belongs to the open file, which both processes share.
        rustix::fs::flock(&*this.file.lock(), FlockOperation::NonBlockingLockExclusive).map_err(not_ours)?;
        match this.renew()? {
            // The lock file was deleted meanwhile: the new one is locked instead.
            Standing::Held | Standing::Renewed => Ok(this),
            Standing::Lost => Err(Error::new(
                ErrorKind::Unavailable,
                "the running depot holds another lock than the one beside its socket",
            )
            .with("path", this.path.display())),
        }
    }

    /// Returns the lock's descriptor, for the process that takes over.
    pub(crate) fn descriptor(&self) -> Result<OwnedFd> {
        let file = self.file.lock().try_clone();
        file.map(OwnedFd::from).map_err(|e| Error::io("cannot hand the lock over", e))
    }

    /// Returns the socket that the holder may serve.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Checks that the lock file is still the locked one. If not, locks the file that is there now.
    pub(crate) fn renew(&self) -> Result<Standing> {
        let mut file = self.file.lock();
        let unreadable =
            |e| Error::io("cannot check the lock beside the socket", e).with("path", self.path.display());
        let held = FileId::of(&file.metadata().map_err(unreadable)?);
        if FileId::at(&self.path).map_err(unreadable)? == Some(held) {
            return Ok(Standing::Held);
        }
        Ok(match lock(&self.path)? {
            Some(renewed) => {
                *file = renewed;
                Standing::Renewed
            }
            None => Standing::Lost,
        })
    }
}

/// Locks the file at `path`, creating it if missing. Returns `None` if another process holds it.
fn lock(path: &Path) -> Result<Option<File>> {
    for _ in 0..OPENS_MAX {
        let file = open(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => {
                return Err(Error::io("cannot lock the file beside the socket", e.into())
                    .with("path", path.display()));
            }
        }
        let failed = |e| Error::io("cannot check the lock beside the socket", e).with("path", path.display());
        // It was deleted after it was opened: another process would lock a new file next to it.
        if FileId::at(path).map_err(failed)? == Some(FileId::of(&file.metadata().map_err(failed)?)) {
            return Ok(Some(file));
        }
    }
    Err(Error::new(ErrorKind::Busy, "the lock beside the socket is deleted again and again")
        .with("path", path.display()))
}

/// Opens a lock file. Does not wait for the other end of a FIFO, and refuses files that another user could keep locked.
fn open(path: &Path) -> Result<File> {
    let context = |e: Error| e.with("path", path.display());
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let opened = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(flags)
        .open(path);
    let file = opened.map_err(|e| match e.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::LOOP) => context(not_a_lock("a symbolic link")),
        Some(rustix::io::Errno::NXIO) => context(not_a_lock("a FIFO or a socket")),
        _ => context(Error::io("cannot open the lock beside the socket", e)),
    })?;
    let meta =
        file.metadata().map_err(|e| context(Error::io("cannot check the lock beside the socket", e)))?;
    if !meta.is_file() {
        return Err(context(not_a_lock("not a regular file")));
    }
    let own = rustix::process::geteuid().as_raw();
    if meta.uid() != own {
        return Err(context(
            Error::new(
                ErrorKind::Permission,
                "the lock beside the socket belongs to another user: remove it, or choose another socket",
            )
            .with("owner", meta.uid())
            .with("user", own),
        ));
    }
    // A user who can open the file can lock it.
    if meta.mode() & 0o077 != 0 {
        file.set_permissions(std::fs::Permissions::from_mode(0o600))
            .map_err(|e| context(Error::io("cannot restrict the lock beside the socket to its user", e)))?;
    }
    Ok(file)
}

fn not_a_lock(what: &str) -> Error {
    Error::new(
        ErrorKind::Config,
        format!("the lock beside the socket is {what}: remove it, or choose another socket"),
    )
}

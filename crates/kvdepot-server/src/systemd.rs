//! The service manager: it is notified when the depot serves and when it ends, and stores descriptors that should
//! outlive the process. The protocol is systemd's, `sd_notify(3)`: datagrams of lines, with descriptors attached.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use kvdepot_core::{Error, Result};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};

/// The longest time for the manager to accept a datagram.
const SEND_WAIT: Duration = Duration::from_secs(1);

/// The manager's socket.
#[derive(Debug)]
pub(crate) struct Manager(OwnedFd);

impl Manager {
    /// Returns the manager that started this process, if it wants notifications.
    pub(crate) fn of_this_process() -> Option<Self> {
        let address = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty())?;
        Self::at(&address)
            .inspect_err(|error| tracing::warn!("the service manager cannot be reached: {error}"))
            .ok()
    }

    /// Returns the manager that started this process, if it stores descriptors.
    pub(crate) fn with_store() -> Option<Self> {
        (store_size() > 0).then(Self::of_this_process).flatten()
    }

    pub(crate) fn at(address: &OsStr) -> Result<Self> {
        let failed = |e: rustix::io::Errno| {
            Error::io("cannot reach the service manager (NOTIFY_SOCKET)", e.into())
                .with("address", address.display())
        };
        let to = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name),
            path => SocketAddrUnix::new(path),
        };
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
        set_socket_timeout(&fd, Timeout::Send, Some(SEND_WAIT)).map_err(failed)?;
        rustix::net::connect(&fd, &to.map_err(failed)?).map_err(failed)?;
        Ok(Self(fd))
    }

    /// Sends a message, with an optional descriptor.
    pub(crate) fn say(&self, what: &str, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            let _ = ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        loop {
            let said = rustix::net::sendmsg(
                self.0.as_fd(),
                &[IoSlice::new(what.as_bytes())],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            );
            match said {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    return Err(Error::io("the service manager does not accept a notification", e.into()));
                }
            }
        }
    }

    /// Stores a descriptor under a name, next to others of that name. The manager does not report whether it had space.
    pub(crate) fn store(&self, name: &str, fd: BorrowedFd<'_>) -> Result<()> {
        // FDPOLL=0: it must not be dropped when it becomes readable, as a pidfd does, because the next depot checks it.
        self.say(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), Some(fd))
    }

    /// Removes everything stored under a name.
    pub(crate) fn forget(&self, name: &str) -> Result<()> {
        self.say(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None)
    }
}

/// Notifies the service manager of a state, if there is one.
pub(crate) fn notify(state: &str) {
    if let Some(manager) = Manager::of_this_process()
        && let Err(error) = manager.say(state, None)
    {
        tracing::warn!("{error}");
    }
}

/// Returns the largest number of descriptors that the manager stores for this service. It reports it since systemd 254.
fn store_size() -> usize {
    std::env::var("FDSTORE").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_is_told_lines_and_given_descriptors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        let manager = Manager::at(path.as_os_str()).unwrap();
        manager.say("READY=1", None).unwrap();
        manager.store("kvdepot-pool", directory_fd(directory.path()).as_fd()).unwrap();
        manager.forget("kvdepot-pool").unwrap();
        let next = || {
            let mut bytes = [0; 256];
            let count = socket.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..count]).into_owned()
        };
        assert_eq!(next(), "READY=1");
        assert_eq!(next(), "FDSTORE=1\nFDPOLL=0\nFDNAME=kvdepot-pool");
        assert_eq!(next(), "FDSTOREREMOVE=1\nFDNAME=kvdepot-pool");
        assert!(Manager::at(directory.path().join("nobody").as_os_str()).is_err());
    }

    fn directory_fd(path: &std::path::Path) -> OwnedFd {
        std::fs::File::open(path).unwrap().into()
    }
}

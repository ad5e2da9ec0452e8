//! Unix SEQPACKET sockets: whole frames, descriptors beside them, deadlines.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_core::limits::FRAME_BYTES_MAX;
use kvdepot_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::sockopt::{
    Timeout, set_socket_recv_buffer_size, set_socket_send_buffer_size, set_socket_timeout,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// A connected or listening socket.
#[derive(Debug)]
pub struct SeqPacket {
    fd: OwnedFd,
    recv_timeout: Option<Duration>,
}

fn socket() -> Result<OwnedFd> {
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|e| Error::io("cannot make a socket", e.into()))?;
    // A frame must fit the buffers whole; the kernel's defaults are near our largest frame.
    let _ = set_socket_send_buffer_size(&fd, 4 * FRAME_BYTES_MAX);
    let _ = set_socket_recv_buffer_size(&fd, 4 * FRAME_BYTES_MAX);
    Ok(fd)
}

fn address(path: &Path) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|e| {
        Error::io("not a path for a unix socket (107 bytes at most)", e.into()).with("path", path.display())
    })
}

impl SeqPacket {
    /// Wraps an accepted socket.
    pub const fn from_fd(fd: OwnedFd) -> Self {
        Self { fd, recv_timeout: None }
    }

    /// Connects; `Unavailable` when nobody listens.
    pub fn connect(path: &Path) -> Result<Self> {
        let fd = socket()?;
        // A full backlog must not block the caller: a send time-out bounds connect, too (P6).
        let _ = set_socket_timeout(&fd, Timeout::Send, Some(Duration::from_millis(100)));
        rustix::net::connect(&fd, &address(path)?).map_err(|e| {
            Error::new(ErrorKind::Unavailable, "no depot answers").with("path", path.display()).with_source(e)
        })?;
        Ok(Self::from_fd(fd))
    }

    /// Listens at `path`, which must not exist.
    pub fn listen(path: &Path, backlog: i32) -> Result<Self> {
        let fd = socket()?;
        let failed = |e: rustix::io::Errno| Error::io("cannot listen", e.into()).with("path", path.display());
        rustix::net::bind(&fd, &address(path)?).map_err(failed)?;
        rustix::net::listen(&fd, backlog).map_err(failed)?;
        Ok(Self::from_fd(fd))
    }

    /// Sends one frame, with a descriptor where given.
    pub fn send(&self, frame: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds
            && !ancillary.push(SendAncillaryMessage::ScmRights(fds))
        {
            return Err(Error::new(ErrorKind::Protocol, "no room for a descriptor beside the frame"));
        }
        loop {
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(frame)], &mut ancillary, SendFlags::NOSIGNAL)
            {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(lost("cannot send to the other side of the local door", e)),
            }
        }
    }

    /// Receives one frame into `buffer` (its length is the frame's), with a descriptor where one came. `Timeout` when
    /// none came by the deadline, `Closed` at the other side's end.
    pub fn recv(&mut self, buffer: &mut Vec<u8>, deadline: Option<Instant>) -> Result<Option<OwnedFd>> {
        buffer.resize(FRAME_BYTES_MAX, 0);
        loop {
            self.set_recv_timeout(deadline)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(buffer)];
            match rustix::net::recvmsg(&self.fd, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) => {
                    let mut fd = None;
                    for item in ancillary.drain() {
                        if let RecvAncillaryMessage::ScmRights(mut fds) = item {
                            fd = fds.next();
                        }
                    }
                    if message.flags.contains(ReturnFlags::TRUNC) {
                        return Err(Error::new(ErrorKind::Protocol, "a frame is too long")
                            .with("bytes_max", FRAME_BYTES_MAX));
                    }
                    if message.bytes == 0 {
                        return Err(Error::new(
                            ErrorKind::Closed,
                            "the other side of the local door has gone",
                        ));
                    }
                    buffer.truncate(message.bytes);
                    return Ok(fd);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        "the other side of the local door did not answer in time",
                    ));
                }
                Err(e) => return Err(lost("cannot receive from the other side of the local door", e)),
            }
        }
    }

    /// Whether the other side has gone. Takes no frame and never waits.
    pub fn hung_up(&self) -> bool {
        let mut polled = [PollFd::new(&self.fd, PollFlags::empty())];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&none)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
    }

    fn set_recv_timeout(&mut self, deadline: Option<Instant>) -> Result<()> {
        // Zero would mean for ever; a passed deadline still takes what has come already.
        let exact =
            deadline.map(|at| at.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        // A time-out that is close enough stays: most frames then need no system call for it.
        let same = match (self.recv_timeout, exact) {
            (None, None) => true,
            (Some(now), Some(exact)) => now >= exact && now <= exact + exact / 4 + Duration::from_millis(1),
            _ => false,
        };
        if !same {
            set_socket_timeout(&self.fd, Timeout::Recv, exact)
                .map_err(|e| lost("cannot set a deadline", e))?;
            self.recv_timeout = exact;
        }
        Ok(())
    }
}

fn lost(what: &str, errno: rustix::io::Errno) -> Error {
    let kind = match errno {
        rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET | rustix::io::Errno::NOTCONN => {
            ErrorKind::Closed
        }
        rustix::io::Errno::AGAIN => ErrorKind::Timeout,
        _ => ErrorKind::Io,
    };
    Error::new(kind, what.to_owned()).with_source(errno)
}

impl AsFd for SeqPacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

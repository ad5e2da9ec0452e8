//! Unix SEQPACKET sockets: complete frames, attached descriptors, deadlines.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_core::limits::FRAME_BYTES_MAX;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::fork::Private;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::sockopt::{
    Timeout, set_socket_recv_buffer_size, set_socket_send_buffer_size, set_socket_timeout,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};

/// The last received frame. Its memory has the size of the largest frame and is zeroed once, when it is made: a
/// received frame overwrites only its own length.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    len: usize,
}

impl FrameBuffer {
    fn space(&mut self) -> &mut [u8] {
        self.len = 0;
        if self.bytes.is_empty() {
            self.bytes = vec![0; FRAME_BYTES_MAX];
        }
        &mut self.bytes
    }
}

impl std::ops::Deref for FrameBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A connected or listening socket.
#[derive(Debug)]
pub struct SeqPacket {
    /// For a client's connection: a forked child must not keep its leases alive. Dropped before the descriptor.
    private: Option<Private>,
    fd: OwnedFd,
    recv_timeout: Option<Duration>,
}

fn socket() -> Result<OwnedFd> {
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|e| Error::io("cannot make a socket", e.into()))?;
    // The buffers must fit a complete frame; the kernel's defaults are close to our largest frame.
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
        Self { private: None, fd, recv_timeout: None }
    }

    /// Connects. `Unavailable` if no process listens.
    pub fn connect(path: &Path) -> Result<Self> {
        let fd = socket()?;
        // A full backlog must not block the caller: a send timeout bounds connect, too (P6).
        let _ = set_socket_timeout(&fd, Timeout::Send, Some(Duration::from_millis(100)));
        rustix::net::connect(&fd, &address(path)?).map_err(|e| {
            // A listener whose queue is full is slow or stopped, but it exists.
            let (kind, what) = match e {
                rustix::io::Errno::AGAIN => (ErrorKind::Timeout, "the depot does not accept connections"),
                _ => (ErrorKind::Unavailable, "no depot answers"),
            };
            Error::new(kind, what).with("path", path.display()).with_source(e)
        })?;
        let private = Some(Private::of(fd.as_fd()));
        Ok(Self { private, fd, recv_timeout: None })
    }

    /// Listens at `path`, which must not exist.
    pub fn listen(path: &Path, backlog: i32) -> Result<Self> {
        let fd = socket()?;
        let failed = |e: rustix::io::Errno| Error::io("cannot listen", e.into()).with("path", path.display());
        rustix::net::bind(&fd, &address(path)?).map_err(failed)?;
        rustix::net::listen(&fd, backlog).map_err(failed)?;
        Ok(Self::from_fd(fd))
    }

    /// Sends one frame, with an optional descriptor.
    pub fn send(&self, frame: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.send_with(frame, fd, SendFlags::empty())
    }

    /// Sends one frame by the deadline. `Timeout` if the other side does not make space for it.
    pub fn send_by(&self, frame: &[u8], deadline: Instant) -> Result<()> {
        loop {
            match self.send_now(frame) {
                Err(error) if error.kind() == ErrorKind::Timeout => {}
                outcome => return outcome,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut polled = [PollFd::new(&self.fd, PollFlags::OUT)];
            match rustix::event::poll(&mut polled, Some(&wait)) {
                Ok(0) => return self.send_now(frame),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(lost("cannot wait for room to send", e)),
            }
        }
    }

    /// Sends one frame without waiting. `Timeout` if there is no space for it.
    pub fn send_now(&self, frame: &[u8]) -> Result<()> {
        self.send_with(frame, None, SendFlags::DONTWAIT)
    }

    fn send_with(&self, frame: &[u8], fd: Option<BorrowedFd<'_>>, flags: SendFlags) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds
            && !ancillary.push(SendAncillaryMessage::ScmRights(fds))
        {
            return Err(Error::new(ErrorKind::Protocol, "a frame has no room for its descriptors"));
        }
        loop {
            let slices = [IoSlice::new(frame)];
            match rustix::net::sendmsg(&self.fd, &slices, &mut ancillary, flags | SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(lost("cannot send to the other side of the local door", e)),
            }
        }
    }

    /// Receives one frame into `buffer`, and a descriptor if one came with it. `Timeout` if none arrived by the
    /// deadline, `Closed` if the other side has closed.
    pub fn recv(&mut self, buffer: &mut FrameBuffer, deadline: Option<Instant>) -> Result<Option<OwnedFd>> {
        loop {
            self.set_recv_timeout(deadline)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(buffer.space())];
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
                    if message.flags.contains(ReturnFlags::CTRUNC) {
                        return Err(Error::new(
                            ErrorKind::Busy,
                            "no descriptor was free for one that came over the local door: raise ulimit -n",
                        ));
                    }
                    if message.bytes == 0 {
                        return Err(Error::new(
                            ErrorKind::Closed,
                            "the other side of the local door has disconnected",
                        ));
                    }
                    buffer.len = message.bytes;
                    return Ok(fd);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        "the peer on the depot's Unix socket did not answer in time",
                    ));
                }
                Err(e) => return Err(lost("cannot receive from the other side of the local door", e)),
            }
        }
    }

    /// Returns whether `recv` would not wait: there is a frame, or the other side has closed.
    pub fn is_readable(&self) -> bool {
        let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut polled, Some(&none)), Ok(1..))
    }

    /// Returns whether the other side has closed. Takes no frame and never waits.
    pub fn hung_up(&self) -> bool {
        let mut polled = [PollFd::new(&self.fd, PollFlags::empty())];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&none)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
    }

    fn set_recv_timeout(&mut self, deadline: Option<Instant>) -> Result<()> {
        // Zero would mean forever; with a passed deadline, frames that have arrived already are still taken.
        let exact =
            deadline.map(|at| at.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        // A timeout that is close enough stays: most frames then need no system call for it.
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

impl Drop for SeqPacket {
    fn drop(&mut self) {
        // Ends the connection even if a forked child holds a copy, because the fork came while the socket was made or
        // dropped.
        if self.private.is_some() {
            let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
        }
    }
}

impl AsFd for SeqPacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (SeqPacket, SeqPacket) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pair.sock");
        let listener = SeqPacket::listen(&path, 1).unwrap();
        let here = SeqPacket::connect(&path).unwrap();
        let there = rustix::net::accept(listener.as_fd()).unwrap();
        (here, SeqPacket::from_fd(there))
    }

    #[test]
    fn a_frame_overwrites_only_as_many_bytes_as_it_has() {
        let (here, mut there) = pair();
        let mut buffer = FrameBuffer::default();
        here.send(b"a long frame", None).unwrap();
        there.recv(&mut buffer, None).unwrap();
        assert_eq!(&*buffer, b"a long frame");
        here.send(b"one", None).unwrap();
        there.recv(&mut buffer, None).unwrap();
        assert_eq!(&*buffer, b"one");
        assert_eq!(&buffer.bytes[..12], b"oneong frame", "the rest was written again");
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused() {
        let (here, mut there) = pair();
        let mut buffer = FrameBuffer::default();
        here.send(b"fits", None).unwrap();
        there.recv(&mut buffer, None).unwrap();
        here.send(&vec![1; FRAME_BYTES_MAX + 1], None).unwrap();
        assert_eq!(there.recv(&mut buffer, None).unwrap_err().kind(), ErrorKind::Protocol);
        assert!(buffer.is_empty());
    }

    #[test]
    fn a_peer_that_takes_nothing_costs_no_more_than_the_deadline() {
        let (here, mut there) = pair();
        let frame = vec![7; FRAME_BYTES_MAX];
        let mut sent = 0;
        while here.send_now(&frame).is_ok() {
            sent += 1;
            assert!(sent < 1000, "a socket takes any number of frames");
        }
        assert_eq!(here.send_by(&frame, Instant::now()).unwrap_err().kind(), ErrorKind::Timeout);
        let reader = std::thread::spawn(move || {
            let mut buffer = FrameBuffer::default();
            (0..=sent).for_each(|_| drop(there.recv(&mut buffer, None).unwrap()));
        });
        here.send_by(&frame, Instant::now() + Duration::from_secs(60)).unwrap();
        reader.join().unwrap();
    }
}

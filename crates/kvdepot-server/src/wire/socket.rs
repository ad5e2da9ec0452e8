//! The socket of a connection, and its options.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use kvdepot_core::{Error, Result};
use kvdepot_io::socket::set_low_water;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use tokio::net::{TcpStream, UnixStream};

/// Number of payload bytes that wake the reader. A reader that takes every packet as it arrives makes both sides slower
/// than if they took turns. Copying this much takes little time compared with its way through a network.
const WAKE_BYTES_MAX: usize = 256 << 10;
/// How long a thread stays awake for the next bytes of a payload: a wake-up takes as long.
const AWAKE: Duration = Duration::from_micros(30);
/// Send buffer for a peer on this machine: bytes in flight to it stay in the processor's caches. Linux doubles it.
const LOCAL_SEND_BYTES: usize = 208 << 10;

/// The socket of a connection.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    /// The inner end of a TLS connection.
    Inside(UnixStream),
}

impl Socket {
    /// Prepares it for messages that are sent with one call each.
    pub(super) fn prepare(&self) -> Result<()> {
        let Self::Tcp(tcp) = self else { return Ok(()) };
        // No answer may wait for the acknowledgement of the previous one (Nagle).
        tcp.set_nodelay(true).map_err(|e| Error::io("cannot prepare a connection", e))?;
        let ends = (tcp.peer_addr(), tcp.local_addr());
        if matches!(ends, (Ok(peer), Ok(local)) if peer.ip() == local.ip())
            && let Err(error) = sockopt::set_socket_send_buffer_size(tcp, LOCAL_SEND_BYTES)
        {
            tracing::debug!("a connection on this machine keeps its send buffer: {error}");
        }
        Ok(())
    }

    pub(super) fn try_read(&self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(tcp) => tcp.try_read(room),
            Self::Inside(unix) => unix.try_read(room),
        }
    }

    pub(super) fn try_read_vectored(&self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(tcp) => tcp.try_read_vectored(pieces),
            Self::Inside(unix) => unix.try_read_vectored(pieces),
        }
    }

    /// Reads available bytes without waiting for the runtime's notification.
    pub(super) fn read_untold(&self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(rustix::io::readv(self, pieces)?)
    }

    pub(super) fn try_write_vectored(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(tcp) => tcp.try_write_vectored(pieces),
            Self::Inside(unix) => unix.try_write_vectored(pieces),
        }
    }

    pub(super) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => tcp.readable().await,
            Self::Inside(unix) => unix.readable().await,
        }
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => tcp.writable().await,
            Self::Inside(unix) => unix.writable().await,
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(tcp) => tcp.as_fd(),
            Self::Inside(unix) => unix.as_fd(),
        }
    }
}

/// The number of bytes that wakes the reader (SO_RCVLOWAT). Dropping it restores 1.
#[derive(Debug)]
pub(super) struct Wake<'a> {
    socket: &'a Socket,
    bytes: usize,
}

impl<'a> Wake<'a> {
    pub(super) const fn any(socket: &'a Socket) -> Self {
        Self { socket, bytes: 1 }
    }

    /// From now on the reader wakes when the rest of the payload has arrived, or `WAKE_BYTES_MAX` of it.
    pub(super) fn at(&mut self, left: usize) {
        let bytes = left.clamp(1, WAKE_BYTES_MAX);
        // Only TCP supports the option.
        if let Socket::Tcp(tcp) = self.socket
            && bytes != self.bytes
        {
            match set_low_water(tcp.as_fd(), bytes) {
                Ok(()) => self.bytes = bytes,
                Err(error) => tracing::debug!("a connection keeps the bytes that wake it: {error}"),
            }
        }
    }

    /// Returns whether that many bytes arrive within the next moment. The socket is not read meanwhile, which would
    /// stop the sender.
    pub(super) fn comes_soon(&self) -> bool {
        let begun = Instant::now();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        while begun.elapsed() < AWAKE {
            match poll(&mut [PollFd::new(self.socket, PollFlags::IN)], Some(&now)) {
                Ok(0) => std::thread::yield_now(),
                outcome => return outcome.is_ok(),
            }
        }
        false
    }
}

impl Drop for Wake<'_> {
    fn drop(&mut self) {
        self.at(1);
    }
}

/// Enables keep-alive probes, so that the kernel notices a dead host and its connection's leases end (P4).
pub(super) fn keep_alive(tcp: &TcpStream) {
    let kept = sockopt::set_socket_keepalive(tcp, true)
        .and_then(|()| sockopt::set_tcp_keepidle(tcp, Duration::from_secs(60)))
        .and_then(|()| sockopt::set_tcp_keepintvl(tcp, Duration::from_secs(10)))
        .and_then(|()| sockopt::set_tcp_keepcnt(tcp, 6));
    if let Err(error) = kept {
        tracing::debug!("a dead host behind this connection will be noticed late: {error}");
    }
}

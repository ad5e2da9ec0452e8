//! A connection's bytes: plain TCP, or TLS over it. One thread may send while another receives.

use std::io::{IoSlice, IoSliceMut, Read, Result, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::tcp::{bound, set_timeouts};
use super::tls::TlsSocket;

/// A connected socket.
#[derive(Debug)]
pub(super) enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsSocket>),
}

impl Socket {
    pub(super) const fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.tcp(),
        }
    }

    /// Shuts the connection down for all threads that are sending or receiving on it.
    pub(super) fn shutdown(&self) -> Result<()> {
        self.tcp().shutdown(Shutdown::Both)
    }

    /// Ends the sending side: the server reads what it was sent, and then the end.
    pub(super) fn end_sending(&self) -> Result<()> {
        self.tcp().shutdown(Shutdown::Write)
    }

    /// Sets how long a read waits before it reports that nothing arrived.
    pub(super) fn set_read_patience(&self, patience: Duration) -> Result<()> {
        self.tcp().set_read_timeout(Some(patience))
    }

    /// Returns whether the connection cannot take requests any more, if none is in flight: the server has closed it, or
    /// has sent bytes that were not requested.
    pub(super) fn is_over(&self) -> bool {
        let events = match self {
            Self::Plain(_) => PollFlags::IN | PollFlags::RDHUP,
            // Some unrequested bytes belong to TLS itself.
            Self::Tls(_) => PollFlags::RDHUP,
        };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(self.tcp(), events)], Some(&now)).is_ok_and(|count| count > 0)
    }

    /// Makes the next call end by `deadline`.
    pub(super) fn bound(&self, deadline: Instant) -> Result<()> {
        bound(self.tcp(), deadline)
    }

    /// Sets how long a single call may wait for bytes or for space to send; `None`: forever.
    pub(super) fn set_timeouts(&self, timeout: Option<Duration>) -> Result<()> {
        set_timeouts(self.tcp(), timeout)
    }
}

impl Read for &Socket {
    fn read(&mut self, buf: &mut [u8]) -> Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(buf)])
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> Result<usize> {
        match self {
            Socket::Plain(tcp) => (&*tcp).read_vectored(bufs),
            Socket::Tls(tls) => tls.receive(bufs),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, buf: &[u8]) -> Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> Result<usize> {
        match self {
            Socket::Plain(tcp) => (&*tcp).write_vectored(bufs),
            Socket::Tls(tls) => tls.send(bufs),
        }
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

//! System calls on a socket of TCP.

use std::io::Result;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Repeats a system call that was interrupted.
pub(super) fn again<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Sets how long a single call may wait for bytes or for space to send; `None`: forever.
pub(super) fn set_timeouts(tcp: &TcpStream, timeout: Option<Duration>) -> Result<()> {
    tcp.set_read_timeout(timeout)?;
    tcp.set_write_timeout(timeout)
}

/// Makes the next call on a socket end by `deadline`.
pub(super) fn bound(tcp: &TcpStream, deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(std::io::ErrorKind::TimedOut.into());
    }
    set_timeouts(tcp, Some(left))
}

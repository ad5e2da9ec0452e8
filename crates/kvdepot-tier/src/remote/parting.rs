//! Connections that ended amid a write. Their server may still take what was sent: a block that is removed meanwhile could
//! come back (P1). So the server is let read what it was sent, to the end, and until it closes the connection in turn the
//! blocks are in doubt: they are not removed, which is tried again.

use std::io::{self, Read};
use std::sync::Arc;

use kvdepot_core::BlockKey;

use super::again;
use super::own::Conn;
use super::socket::Socket;

/// What is read at a time only to see the end.
const SCRATCH_BYTES: usize = 16 << 10;
/// Reads at a look: a server that sends without end holds up nobody else's look.
const READS_MAX: usize = 32;

/// Keeps a socket open.
#[derive(Debug)]
pub(super) enum Held {
    Own(Arc<Conn>),
    Infini(Socket),
}

impl Held {
    fn socket(&self) -> &Socket {
        match self {
            Self::Own(conn) => &conn.stream,
            Self::Infini(socket) => socket,
        }
    }
}

/// A connection of which only the server's end is waited for.
#[derive(Debug)]
pub(super) struct Parting {
    held: Held,
    /// Blocks that the server may store yet.
    pub(super) keys: Vec<BlockKey>,
}

impl Parting {
    pub(super) fn new(held: Held, keys: Vec<BlockKey>) -> Self {
        // If the socket cannot be told not to wait, it is dead, and a read says so at once.
        let _ = held.socket().tcp().set_nonblocking(true);
        Self { held, keys }
    }

    /// Whether the server has closed it, as far as a few reads tell.
    pub(super) fn is_over(&self) -> bool {
        let mut scratch = [0; SCRATCH_BYTES];
        is_at_end(|| again(|| self.held.socket().tcp().read(&mut scratch)))
    }
}

fn is_at_end(mut read: impl FnMut() -> io::Result<usize>) -> bool {
    for _ in 0..READS_MAX {
        match read() {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => return e.kind() != io::ErrorKind::WouldBlock,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_at_a_connection_ends_although_the_server_never_stops_sending() {
        let mut reads = 0;
        let is_over = is_at_end(|| {
            reads += 1;
            assert!(reads <= 1_000, "a look reads without end");
            Ok(SCRATCH_BYTES)
        });
        assert!(!is_over);
    }
}

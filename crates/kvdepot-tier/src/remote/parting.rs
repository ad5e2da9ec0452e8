//! Connections that ended amid a write. Their server may still take what was sent: a block that is removed meanwhile could
//! come back (P1). So the server is let read what it was sent, to the end, and until it closes the connection in turn the
//! blocks are in doubt: they are not removed, which is tried again.

use std::io::Read;
use std::sync::Arc;

use kvdepot_core::BlockKey;

use super::again;
use super::own::Conn;
use super::socket::Socket;

/// What is read at a time only to see the end.
const SCRATCH_BYTES: usize = 16 << 10;

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

    /// Whether the server has closed it.
    pub(super) fn is_over(&self) -> bool {
        let mut scratch = [0; SCRATCH_BYTES];
        loop {
            match again(|| self.held.socket().tcp().read(&mut scratch)) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => return e.kind() != std::io::ErrorKind::WouldBlock,
            }
        }
    }
}

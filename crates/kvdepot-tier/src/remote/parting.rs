//! Connections that ended in the middle of a write. Their server may still take what was sent, so a block that is
//! removed in the meantime could come back (P1). Therefore the server may read what it was sent to the end. Until it
//! closes the connection in turn, the blocks are in doubt: they are not removed, and the removal is retried.

use std::io::{self, Read};
use std::sync::Arc;

use kvdepot_core::BlockKey;

use super::socket::Socket;
use super::tcp::again;

/// Bytes read at a time, only to detect the end.
const SCRATCH_BYTES: usize = 16 << 10;
/// Maximum number of reads per check, so that a server that sends endlessly does not delay the check of others.
const READS_MAX: usize = 32;

/// A connection that only waits for the server's end.
#[derive(Debug)]
pub(super) struct Parting {
    socket: Arc<Socket>,
    /// Blocks that the server may still store.
    pub(super) keys: Vec<BlockKey>,
}

impl Parting {
    pub(super) fn new(socket: Arc<Socket>, keys: Vec<BlockKey>) -> Self {
        // If the socket cannot be made non-blocking, it is dead, and a read returns immediately.
        let _ = socket.tcp().set_nonblocking(true);
        Self { socket, keys }
    }

    /// Returns whether the server has closed it, as far as a few reads show.
    pub(super) fn is_over(&self) -> bool {
        let mut scratch = [0; SCRATCH_BYTES];
        is_at_end(|| again(|| self.socket.tcp().read(&mut scratch)))
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

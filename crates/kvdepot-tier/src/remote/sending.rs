//! Writes bytes to a socket: frames from our memory, blocks directly from their slots.

use std::io::{IoSlice, Write};

use kvdepot_core::limits::{IO_VECTORS_MAX, REMOTE_SEND_BYTES_MAX};
use kvdepot_io::IoBuf;
use smallvec::SmallVec;

use super::socket::Socket;
use super::tcp::again;

type Pieces<'a> = SmallVec<[IoSlice<'a>; 32]>;

/// Sends `front` and then all `bodies`, calling `progressed` after each piece.
pub(super) fn send_all(
    mut stream: &Socket,
    front: &[u8],
    bodies: &[IoBuf],
    progressed: impl Fn() -> std::io::Result<()>,
) -> std::io::Result<()> {
    let (mut front_sent, mut body, mut body_sent) = (0, 0, 0);
    while front_sent < front.len() || body < bodies.len() {
        let next = next_pieces(&bodies[body..], body_sent);
        let mut pieces = Pieces::new();
        pieces.push(IoSlice::new(&front[front_sent..]));
        let mut room = REMOTE_SEND_BYTES_MAX;
        for piece in next.iter().take(IO_VECTORS_MAX - 1) {
            if room == 0 {
                break;
            }
            let count = piece.len().min(room);
            pieces.push(IoSlice::new(&piece[..count]));
            room -= count;
        }
        let count = again(|| stream.write_vectored(&pieces))?;
        if count == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        let of_front = count.min(front.len() - front_sent);
        front_sent += of_front;
        body_sent += count - of_front;
        while let Some(sending) = bodies.get(body).filter(|sending| sending.len() <= body_sent) {
            (body, body_sent) = (body + 1, body_sent - sending.len());
        }
        progressed()?;
    }
    Ok(())
}

/// Returns the blocks' bytes for one call: few enough to see progress.
fn next_pieces(bodies: &[IoBuf], sent: usize) -> Pieces<'_> {
    let (mut pieces, mut bytes, mut skip) = (Pieces::new(), 0, sent);
    for body in bodies {
        if bytes >= REMOTE_SEND_BYTES_MAX || pieces.len() >= IO_VECTORS_MAX - 1 {
            break;
        }
        pieces.extend(body.slices(skip));
        bytes += body.len() - skip;
        skip = 0;
    }
    pieces
}

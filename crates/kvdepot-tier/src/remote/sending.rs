//! Bytes into a socket: frames from memory of ours, blocks straight from their slots.

use std::io::{IoSlice, Write};

use kvdepot_core::limits::REMOTE_SEND_BYTES_MAX;
use kvdepot_io::IoBuf;
use smallvec::SmallVec;

use super::again;
use super::socket::Socket;

/// Sends `front` and then all `bodies`, calling `progressed` after each piece.
pub(super) fn send_all(
    mut stream: &Socket,
    front: &[u8],
    bodies: &[IoBuf],
    progressed: impl Fn(),
) -> std::io::Result<()> {
    let (mut front_sent, mut body, mut body_sent) = (0, 0, 0);
    while front_sent < front.len() || body < bodies.len() {
        let slices = bodies.get(body).map(|body| body.slices(body_sent)).unwrap_or_default();
        let mut pieces: SmallVec<[IoSlice<'_>; 8]> = SmallVec::new();
        pieces.push(IoSlice::new(&front[front_sent..]));
        let mut room = REMOTE_SEND_BYTES_MAX;
        for slice in &slices {
            let count = slice.len().min(room);
            pieces.push(IoSlice::new(&slice[..count]));
            room -= count;
            if room == 0 {
                break;
            }
        }
        let count = again(|| stream.write_vectored(&pieces))?;
        if count == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        let of_front = count.min(front.len() - front_sent);
        front_sent += of_front;
        body_sent += count - of_front;
        if bodies.get(body).is_some_and(|sending| sending.len() == body_sent) {
            (body, body_sent) = (body + 1, 0);
        }
        progressed();
    }
    Ok(())
}

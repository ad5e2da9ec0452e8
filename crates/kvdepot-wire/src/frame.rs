//! Cutting a byte stream into frames, without trusting what a header announces: memory grows with what has arrived.

use kvdepot_core::{Error, ErrorKind, Result};

use crate::header::{HEADER_BYTES, Header, request_bytes_max, response_bytes_max};
use crate::limits::READ_BYTES;

/// One frame: what it is, and its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The operation.
    pub op: u8,
    /// The body, without header and payload.
    pub body: &'a [u8],
}

/// Bytes that came from a socket and are not used up yet.
///
/// Holds no memory while it is empty and [`release`](Self::release)d, so an idle connection costs none.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    body_bytes_max: fn(u8) -> Option<usize>,
}

/// Memory of a buffer that waits: nobody sees what was in it.
#[derive(Debug)]
pub struct Spare(Vec<u8>);

impl Spare {
    /// Its size.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has no size.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FrameBuffer {
    /// For the side that takes requests.
    pub const fn requests() -> Self {
        Self { bytes: Vec::new(), start: 0, end: 0, body_bytes_max: request_bytes_max }
    }

    /// For the side that takes answers of our own protocol.
    pub const fn responses() -> Self {
        Self { bytes: Vec::new(), start: 0, end: 0, body_bytes_max: response_bytes_max }
    }

    /// Bytes that have arrived and are not used up.
    pub const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether all that has arrived is used up: no half frame waits for its rest.
    pub const fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Gives its memory up while nothing is in it; call it before a long wait. Keeps what has arrived.
    pub fn release(&mut self) -> Option<Spare> {
        if !self.is_empty() || self.bytes.is_empty() {
            return None;
        }
        (self.start, self.end) = (0, 0);
        Some(Spare(std::mem::take(&mut self.bytes)))
    }

    /// Whether it has no memory now.
    pub const fn is_released(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes memory that another buffer gave up, unless it has its own.
    pub fn reuse(&mut self, spare: Spare) {
        if self.is_released() {
            self.bytes = spare.0;
        }
    }

    /// Has `read` put bytes behind those that have arrived; it says how many.
    pub fn read_with<E>(&mut self, read: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<usize, E> {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < READ_BYTES / 2 {
            // Doubles what has arrived: a peer pays for memory here with bytes of its own.
            self.bytes.resize((self.end * 2).max(READ_BYTES), 0);
        }
        let count = read(&mut self.bytes[self.end..])?;
        assert!(count <= self.bytes.len() - self.end, "a read says that it filled more than it was given");
        self.end += count;
        Ok(count)
    }

    /// Appends bytes, as if they had been read.
    pub fn extend(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let count = self.read_with(|room| {
                let count = room.len().min(bytes.len());
                room[..count].copy_from_slice(&bytes[..count]);
                Ok::<_, Error>(count)
            });
            bytes = &bytes[count.unwrap_or(0)..];
        }
    }

    /// The next frame, if all of it has arrived. After an error the stream is out of step and must be closed.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>> {
        let Some((header, _)) = self.bytes[self.start..self.end].split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::decode(header)?;
        let bad = |what: &str| {
            Error::new(ErrorKind::Protocol, what.to_owned())
                .with("op", header.op)
                .with("body_bytes", header.body_bytes)
        };
        let body_bytes_max = (self.body_bytes_max)(header.op)
            .ok_or_else(|| bad("a frame has an operation that is not known here"))?;
        let body_bytes = header.body_bytes as usize;
        if body_bytes > body_bytes_max {
            return Err(bad("a frame is too long").with("body_bytes_max", body_bytes_max));
        }
        let body_start = self.start + HEADER_BYTES;
        if self.end - body_start < body_bytes {
            return Ok(None);
        }
        self.start = body_start + body_bytes;
        Ok(Some(Frame { op: header.op, body: &self.bytes[body_start..self.start] }))
    }

    /// Moves payload that came along with frames into `into`; how many bytes. The rest is to be read straight from
    /// the socket.
    pub fn take_payload(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.len());
        into[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
        self.start += count;
        count
    }

    /// Drops up to `count` bytes of payload that came along with frames; how many were dropped.
    pub fn skip_payload(&mut self, count: u64) -> u64 {
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(self.len());
        self.start += count;
        count as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::own::op;

    fn frame(op: u8, body: &[u8]) -> Vec<u8> {
        let mut out = Header { op, body_bytes: body.len() as u32 }.encode().to_vec();
        out.extend_from_slice(body);
        out
    }

    #[test]
    fn frames_are_cut_alike_however_they_arrive() {
        let stream = [frame(op::STAT, &[1; 8]), frame(op::OPEN, &[2; 50_000]), frame(op::STAT, b"")].concat();
        for step in [1, 7, 4096, stream.len()] {
            let mut buffer = FrameBuffer::requests();
            let mut seen = Vec::new();
            for piece in stream.chunks(step) {
                buffer.extend(piece);
                while let Some(frame) = buffer.next_frame().unwrap() {
                    seen.push((frame.op, frame.body.len()));
                }
            }
            assert_eq!(seen, [(op::STAT, 8), (op::OPEN, 50_000), (op::STAT, 0)], "in steps of {step}");
            assert!(buffer.is_empty());
        }
    }

    #[test]
    fn an_announced_length_costs_no_memory() {
        let mut buffer = FrameBuffer::requests();
        buffer.extend(&Header { op: crate::infini::op::DELETE, body_bytes: 4 << 20 }.encode());
        assert_eq!(buffer.next_frame().unwrap(), None);
        assert!(buffer.bytes.capacity() <= 2 * READ_BYTES);
        buffer.start = buffer.end;
        let spare = buffer.release().unwrap();
        assert_eq!(buffer.bytes.capacity(), 0);
        assert!(buffer.is_released() && buffer.release().is_none());
        // Another buffer's bytes are none of its own.
        buffer.reuse(spare);
        assert!(buffer.is_empty() && !buffer.is_released());
        buffer.extend(&frame(op::STAT, b"own"));
        assert_eq!(buffer.next_frame().unwrap().unwrap().body, b"own");
        assert_eq!(buffer.next_frame().unwrap(), None);
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        for (bytes, why) in [
            (b"GET / HTTP/1.1\r\n".to_vec(), "magic"),
            (frame(0, b""), "not known"),
            (frame(op::WELCOME, b""), "not known"),
            (Header { op: op::STAT, body_bytes: u32::MAX }.encode().to_vec(), "too long"),
            (Header { op: b'E', body_bytes: 31 }.encode().to_vec(), "too long"),
        ] {
            let mut buffer = FrameBuffer::requests();
            buffer.extend(&bytes);
            let error = buffer.next_frame().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn payload_that_came_along_is_handed_over() {
        let mut buffer = FrameBuffer::requests();
        buffer.extend(&[frame(op::STAT, &[0; 8]), b"payload".to_vec(), frame(op::STAT, b"")].concat());
        assert_eq!(buffer.next_frame().unwrap().unwrap().body.len(), 8);
        let mut out = [0; 4];
        assert_eq!(buffer.take_payload(&mut out), 4);
        assert_eq!((&out, buffer.skip_payload(3)), (b"payl", 3));
        assert!(buffer.next_frame().unwrap().unwrap().body.is_empty());
        assert_eq!((buffer.take_payload(&mut out), buffer.skip_payload(9)), (0, 0));
    }
}

//! Splits a byte stream into frames without trusting the lengths in headers: memory only grows with received bytes.

use kvdepot_core::{Error, ErrorKind, Result};

use crate::header::{HEADER_BYTES, Header, request_bytes_max, response_bytes_max};
use crate::limits::READ_BYTES;

/// A frame: operation and body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The operation.
    pub op: u8,
    /// The body, without header and payload.
    pub body: &'a [u8],
}

/// Bytes received from a socket and not consumed yet.
///
/// Holds no memory while it is empty and [`release`](Self::release)d, so an idle connection costs none.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    body_bytes_max: fn(u8) -> Option<usize>,
}

/// The memory of a released buffer. Its old content is not accessible.
#[derive(Debug)]
pub struct Spare(Vec<u8>);

impl Spare {
    /// Returns its size.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether its size is zero.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FrameBuffer {
    /// Makes a buffer for the side that receives requests.
    pub const fn requests() -> Self {
        Self { bytes: Vec::new(), start: 0, end: 0, body_bytes_max: request_bytes_max }
    }

    /// Makes a buffer for the side that receives answers of our own protocol.
    pub const fn responses() -> Self {
        Self { bytes: Vec::new(), start: 0, end: 0, body_bytes_max: response_bytes_max }
    }

    /// Returns the number of unconsumed bytes.
    pub const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns whether the unconsumed bytes begin with these.
    pub fn begins_with(&self, bytes: &[u8]) -> bool {
        self.bytes[self.start..self.end].starts_with(bytes)
    }

    /// Returns whether all received bytes are consumed, so that no partial frame waits for its rest.
    pub const fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Releases its memory if it is empty; call it before a long wait. Keeps unconsumed bytes.
    pub fn release(&mut self) -> Option<Spare> {
        if !self.is_empty() || self.bytes.is_empty() {
            return None;
        }
        (self.start, self.end) = (0, 0);
        Some(Spare(std::mem::take(&mut self.bytes)))
    }

    /// Returns whether it has no memory.
    pub const fn is_released(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes the memory of another buffer, unless it has its own.
    pub fn reuse(&mut self, spare: Spare) {
        if self.is_released() {
            self.bytes = spare.0;
        }
    }

    /// Lets `read` append received bytes; `read` returns their number.
    pub fn read_with<E>(&mut self, read: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<usize, E> {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < READ_BYTES / 2 {
            // Grows to double of what has arrived: to make this side allocate memory, a peer has to send bytes.
            self.bytes.resize((self.end * 2).max(READ_BYTES), 0);
        }
        let count = read(&mut self.bytes[self.end..])?;
        assert!(count <= self.bytes.len() - self.end, "a read says that it filled more than it was given");
        self.end += count;
        Ok(count)
    }

    /// Appends bytes as if they had been read.
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

    /// Returns the next frame, if it has arrived completely. After an error the stream is out of step and must be
    /// closed.
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

    /// Returns the header of the next frame as soon as it has arrived, before its body, if it is one.
    pub fn next_header(&self) -> Option<Header> {
        let (header, _) = self.bytes[self.start..self.end].split_first_chunk::<HEADER_BYTES>()?;
        Header::decode(header).ok()
    }

    /// Moves payload that was received together with frames into `into`. Returns its size; the rest should be read
    /// straight from the socket.
    pub fn take_payload(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.len());
        into[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
        self.start += count;
        count
    }

    /// Drops up to `count` bytes of payload that were received together with frames. Returns the number of dropped
    /// bytes.
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
        // The old bytes of another buffer do not appear.
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

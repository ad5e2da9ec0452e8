//! The nine bytes before every request of both protocols, and before every answer of ours.

use kvdepot_core::{Error, ErrorKind, Result};

use crate::infini::op as infini;
use crate::limits::{INFINI_BODY_BYTES_MAX, REQUEST_BODY_BYTES_MAX, RESPONSE_BODY_BYTES_MAX};
use crate::own::op as own;

/// The first bytes of every frame.
pub const MAGIC: u32 = 0xdead_beef;
/// Length of a header.
pub const HEADER_BYTES: usize = 9;

/// Operation and length of the body that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The operation of the request or answer.
    pub op: u8,
    /// Length of the body, without payload.
    pub body_bytes: u32,
}

impl Header {
    /// Encodes the header.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = self.op;
        out[5..].copy_from_slice(&self.body_bytes.to_le_bytes());
        out
    }

    /// Decodes a header without checking operation and length.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        let [a, b, c, d, op, e, f, g, h] = *bytes;
        let magic = u32::from_le_bytes([a, b, c, d]);
        if magic != MAGIC {
            return Err(Error::new(ErrorKind::Protocol, "a frame does not begin with the magic number")
                .with("found", format_args!("{magic:#010x}")));
        }
        Ok(Self { op, body_bytes: u32::from_le_bytes([e, f, g, h]) })
    }
}

/// Returns the length limit of a request's body; `None` for an unknown operation.
pub fn request_bytes_max(op: u8) -> Option<usize> {
    match op {
        infini::EXCHANGE => Some(crate::infini::ConnInfo::BYTES),
        infini::EXISTS => Some(crate::limits::KEY_BYTES_MAX),
        infini::MATCH | infini::DELETE | infini::TCP | infini::RDMA_WRITE | infini::RDMA_READ => {
            Some(INFINI_BODY_BYTES_MAX)
        }
        own::HELLO..=own::CLOSE => Some(REQUEST_BODY_BYTES_MAX),
        _ => None,
    }
}

/// Returns the length limit of an answer's body; `None` for an unknown operation.
pub fn response_bytes_max(op: u8) -> Option<usize> {
    match op {
        own::WELCOME..=own::STATS | own::FAILED => Some(RESPONSE_BODY_BYTES_MAX),
        _ => None,
    }
}

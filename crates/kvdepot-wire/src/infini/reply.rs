//! Answers: raw numbers whose meaning depends on the request.

use kvdepot_core::{Error, ErrorKind, Result};

use super::{ConnInfo, code, op};

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Only a code: the end of a put, or a refusal.
    Code(i32),
    /// Answer to `Exists` (0 = present), `Match` (-1 = none) and `Delete` (number of deleted keys).
    Number(i32),
    /// The length of the value that follows.
    Value(u32),
    /// The server's RDMA connection data.
    Exchange(ConnInfo),
}

impl Reply {
    /// Appends the answer's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Code(code) => out.extend_from_slice(&code.to_le_bytes()),
            Self::Number(number) => {
                out.extend_from_slice(&code::FINISH.to_le_bytes());
                out.extend_from_slice(&number.to_le_bytes());
            }
            Self::Value(bytes) => {
                out.extend_from_slice(&code::FINISH.to_le_bytes());
                out.extend_from_slice(&bytes.to_le_bytes());
            }
            Self::Exchange(info) => {
                out.extend_from_slice(&code::FINISH.to_le_bytes());
                out.extend_from_slice(&info.encode());
            }
        }
    }
}

/// Reads one answer of a server. Feed it bytes until it returns the answer. A value's bytes follow and are not part of
/// it.
#[derive(Debug)]
pub struct ReplyReader {
    op: u8,
    is_get: bool,
    bytes: [u8; 4 + ConnInfo::BYTES],
    filled: usize,
}

impl ReplyReader {
    /// Makes a reader for the answer to this request.
    pub const fn new(request: &super::Request<'_>) -> Self {
        let is_get = matches!(request, super::Request::Tcp { op: super::TcpOp::Get, .. });
        Self { op: request.op(), is_get, bytes: [0; 4 + ConnInfo::BYTES], filled: 0 }
    }

    /// Returns the buffer for the next bytes; read no more than that. Never empty before the answer is complete.
    pub fn room(&mut self) -> &mut [u8] {
        let wanted = self.wanted();
        &mut self.bytes[self.filled..wanted]
    }

    /// Notes that `count` bytes were put into the buffer. Returns the answer once it is complete.
    pub fn advance(&mut self, count: usize) -> Result<Option<Reply>> {
        self.filled = (self.filled + count).min(self.bytes.len());
        if self.filled < self.wanted() {
            return Ok(None);
        }
        let number = |at: usize| {
            let mut four = [0; 4];
            four.copy_from_slice(&self.bytes[at..at + 4]);
            i32::from_le_bytes(four)
        };
        let first = number(0);
        if first != code::FINISH || (self.op == op::TCP && !self.is_get) {
            return Ok(Some(Reply::Code(first)));
        }
        Ok(Some(match self.op {
            op::EXCHANGE => Reply::Exchange(ConnInfo::decode(&self.bytes[4..])?),
            op::TCP => Reply::Value(u32::try_from(number(4)).map_err(|_| {
                Error::new(ErrorKind::Protocol, "a server announced a value of negative length")
                    .with("bytes", number(4))
            })?),
            _ => Reply::Number(number(4)),
        }))
    }

    /// Returns the length of the answer, as far as it is known.
    fn wanted(&self) -> usize {
        let finished = self.filled >= 4 && self.bytes[..4] == code::FINISH.to_le_bytes();
        match self.op {
            // A refusal is four bytes long, whatever the request was.
            _ if !finished => 4,
            op::EXCHANGE => 4 + ConnInfo::BYTES,
            op::TCP if !self.is_get => 4,
            _ => 8,
        }
    }
}

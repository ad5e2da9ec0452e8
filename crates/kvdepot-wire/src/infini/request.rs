//! Requests over TCP.

use kvdepot_core::{Error, ErrorKind, Result};

use super::flat::{Field, Table, encode};
use super::{ConnInfo, op};
use crate::frame::Frame;
use crate::header::{HEADER_BYTES, Header};
use crate::limits::{INFINI_BODY_BYTES_MAX, KEY_BYTES_MAX, KEYS_MAX, VALUE_BYTES_MAX};

/// The direction of a request for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpOp {
    /// The length of the value that follows the frame.
    Put(u32),
    /// Send the value.
    Get,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// RDMA connection data of the client.
    Exchange(ConnInfo),
    /// Whether this key exists. Any bytes, possibly none.
    Exists(&'a [u8]),
    /// The last of the leading keys that exist.
    Match(Vec<&'a [u8]>),
    /// Delete these keys.
    Delete(Vec<&'a [u8]>),
    /// Puts or gets a value.
    Tcp {
        /// The key; at least one byte.
        key: &'a [u8],
        /// The direction.
        op: TcpOp,
    },
    /// An operation that is only valid inside of an RDMA SEND.
    RdmaOnly(u8),
}

fn bad(why: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("an InfiniStore request cannot be served: {why}"))
}

impl<'a> Request<'a> {
    /// Returns the operation of the header.
    pub const fn op(&self) -> u8 {
        match self {
            Self::Exchange(_) => op::EXCHANGE,
            Self::Exists(_) => op::EXISTS,
            Self::Match(_) => op::MATCH,
            Self::Delete(_) => op::DELETE,
            Self::Tcp { .. } => op::TCP,
            Self::RdmaOnly(op) => *op,
        }
    }

    /// Appends the frame. The caller sends the value of a `Put` after it.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<()> {
        let body = match self {
            Self::Exchange(info) => info.encode().to_vec(),
            Self::Exists(key) => key.to_vec(),
            Self::Match(keys) | Self::Delete(keys) => encode(&[Field::Strings(keys)]),
            Self::Tcp { key, op } => {
                let (value_bytes, op) = match op {
                    TcpOp::Put(bytes) => (*bytes, b'P'),
                    TcpOp::Get => (0, b'G'),
                };
                let value_bytes = i32::try_from(value_bytes)
                    .map_err(|_| bad("a value is too large").with("bytes", value_bytes))?;
                encode(&[Field::String(key), Field::I32(value_bytes), Field::I8(op)])
            }
            Self::RdmaOnly(_) => return Err(bad("W and A travel by RDMA only")),
        };
        let keys: &[&[u8]] = match self {
            Self::Match(keys) | Self::Delete(keys) => keys,
            Self::Exists(key) | Self::Tcp { key, .. } => &[key],
            _ => &[],
        };
        let long = keys.iter().any(|key| key.len() > KEY_BYTES_MAX);
        if long || keys.len() > KEYS_MAX || body.len() > INFINI_BODY_BYTES_MAX {
            return Err(bad("too many keys, or one too long").with("keys", keys.len()));
        }
        out.reserve(HEADER_BYTES + body.len());
        out.extend_from_slice(&Header { op: self.op(), body_bytes: body.len() as u32 }.encode());
        out.extend_from_slice(&body);
        Ok(())
    }

    /// Decodes a frame returned by [`FrameBuffer::requests`](crate::FrameBuffer::requests).
    pub fn decode(frame: Frame<'a>) -> Result<Self> {
        let body = frame.body;
        Ok(match frame.op {
            op::EXCHANGE => Self::Exchange(ConnInfo::decode(body)?),
            op::EXISTS if body.len() <= KEY_BYTES_MAX => Self::Exists(body),
            op::MATCH => Self::Match(Table::root(body)?.strings(0)?),
            op::DELETE => Self::Delete(Table::root(body)?.strings(0)?),
            op::TCP => {
                let table = Table::root(body)?;
                let key = table.string(0)?;
                if key.is_empty() {
                    return Err(bad("a value needs a key"));
                }
                let value_bytes = table.i32(1)?;
                let op = match table.i8(2)? {
                    b'P' => TcpOp::Put(
                        u32::try_from(value_bytes)
                            .ok()
                            .filter(|&bytes| u64::from(bytes) <= VALUE_BYTES_MAX)
                            .ok_or_else(|| {
                                bad("its value's length is negative").with("bytes", value_bytes)
                            })?,
                    ),
                    b'G' => TcpOp::Get,
                    other => return Err(bad("a value is put by P or got by G").with("op", other)),
                };
                Self::Tcp { key, op }
            }
            op::RDMA_WRITE | op::RDMA_READ => Self::RdmaOnly(frame.op),
            _ => return Err(bad("no such operation, or a key too long").with("op", frame.op)),
        })
    }
}

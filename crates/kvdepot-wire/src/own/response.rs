//! Answers of a server. An answer carries the id of its request, and answers may come in any order.

use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};

use super::status::{kind_code, kind_of};
use super::{NONCE_BYTES, PROOF_BYTES, Status, op};
use crate::bytes::{Reader, put_list};
use crate::frame::Frame;
use crate::header::{HEADER_BYTES, Header};
use crate::limits::{BATCH_BLOCKS_MAX, MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX, RESPONSE_BODY_BYTES_MAX};

/// An answer.
#[expect(missing_docs, reason = "fields are named for what they carry")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response<'a> {
    /// Answer to `Hello`: the common version, the common features, and whether an `Auth` must follow.
    Welcome {
        version: u32,
        features: u64,
        auth_wanted: bool,
        requests_in_flight_max: u32,
        depot: u64,
        nonce: [u8; NONCE_BYTES],
    },
    /// Answer to `Auth`: the server knows the token, too.
    Authentic { proof: [u8; PROOF_BYTES] },
    /// Answer to `Open` and `SetEpoch`: the current namespace id of keys, and the size of a block.
    Namespace { namespace: NamespaceId, epoch: u32, block_bytes: u32 },
    /// Answer to `Exists`: one byte for each hash, 1 = present.
    Present(&'a [u8]),
    /// Answer to `Prefix`.
    Leading(u32),
    /// One block of a `Get`, by its index in the request. `block_bytes` of payload follow; 0 unless the status is `Ok`.
    Block { index: u32, status: Status, block_bytes: u32, crc64: u64 },
    /// Answer to `Put`: the outcome for each block.
    Stored(Vec<Status>),
    /// Answer to `Remove` and `Close`.
    Done,
    /// Answer to `Stat`: JSON.
    Stats(&'a str),
    /// The complete request failed.
    Failed { kind: ErrorKind, message: &'a str },
}

impl<'a> Response<'a> {
    /// Returns the operation of the header.
    pub const fn op(&self) -> u8 {
        match self {
            Self::Welcome { .. } => op::WELCOME,
            Self::Authentic { .. } => op::AUTHENTIC,
            Self::Namespace { .. } => op::NAMESPACE,
            Self::Present(_) => op::PRESENT,
            Self::Leading(_) => op::LEADING,
            Self::Block { .. } => op::BLOCK,
            Self::Stored(_) => op::STORED,
            Self::Done => op::DONE,
            Self::Stats(_) => op::STATS,
            Self::Failed { .. } => op::FAILED,
        }
    }

    /// Returns the number of payload bytes after the frame.
    pub const fn payload_bytes(&self) -> u64 {
        match self {
            Self::Block { block_bytes, .. } => *block_bytes as u64,
            _ => 0,
        }
    }

    /// Appends the frame. The caller sends the payload after it.
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) -> Result<()> {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_BYTES]);
        out.extend_from_slice(&id.to_le_bytes());
        match self {
            Self::Welcome { version, features, auth_wanted, requests_in_flight_max, depot, nonce } => {
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&features.to_le_bytes());
                out.push(u8::from(*auth_wanted));
                out.extend_from_slice(&requests_in_flight_max.to_le_bytes());
                out.extend_from_slice(&depot.to_le_bytes());
                out.extend_from_slice(nonce);
            }
            Self::Authentic { proof } => out.extend_from_slice(proof),
            Self::Namespace { namespace, epoch, block_bytes } => {
                out.extend_from_slice(&namespace.0);
                out.extend_from_slice(&epoch.to_le_bytes());
                out.extend_from_slice(&block_bytes.to_le_bytes());
            }
            Self::Present(bytes) => put_list(out, bytes, 1),
            Self::Leading(count) => out.extend_from_slice(&count.to_le_bytes()),
            Self::Block { index, status, block_bytes, crc64 } => {
                out.extend_from_slice(&index.to_le_bytes());
                out.push(status.code());
                out.extend_from_slice(&block_bytes.to_le_bytes());
                out.extend_from_slice(&crc64.to_le_bytes());
            }
            Self::Stored(statuses) => {
                let codes: Vec<u8> = statuses.iter().map(|status| status.code()).collect();
                put_list(out, &codes, 1);
            }
            Self::Done => {}
            Self::Stats(text) => put_list(out, text.as_bytes(), 1),
            Self::Failed { kind, message } => {
                out.push(kind_code(*kind));
                let cut = message.floor_char_boundary(MESSAGE_BYTES_MAX);
                put_list(out, &message.as_bytes()[..cut], 1);
            }
        }
        let body_bytes = out.len() - start - HEADER_BYTES;
        if body_bytes > RESPONSE_BODY_BYTES_MAX {
            return Err(Error::new(ErrorKind::Protocol, "an answer is too long").with("bytes", body_bytes));
        }
        let header = Header { op: self.op(), body_bytes: body_bytes as u32 };
        out[start..start + HEADER_BYTES].copy_from_slice(&header.encode());
        Ok(())
    }

    /// Decodes a frame returned by [`FrameBuffer::responses`](crate::FrameBuffer::responses) into its request's id and
    /// the answer.
    pub fn decode(frame: Frame<'a>) -> Result<(u64, Self)> {
        let mut reader = Reader::new(frame.body, "answer");
        let id = reader.u64()?;
        let response = match frame.op {
            op::WELCOME => Self::Welcome {
                version: reader.u32()?,
                features: reader.u64()?,
                auth_wanted: match reader.u8()? {
                    0 => false,
                    1 => true,
                    other => return Err(reader.bad("a flag is neither 0 nor 1").with("flag", other)),
                },
                requests_in_flight_max: reader.u32()?,
                depot: reader.u64()?,
                nonce: reader.array()?,
            },
            op::AUTHENTIC => Self::Authentic { proof: reader.array()? },
            op::NAMESPACE => Self::Namespace {
                namespace: NamespaceId(reader.array()?),
                epoch: reader.u32()?,
                block_bytes: reader.u32()?,
            },
            op::PRESENT => Self::Present(reader.list(1, BATCH_BLOCKS_MAX)?),
            op::LEADING => Self::Leading(reader.u32()?),
            op::BLOCK => block(&mut reader)?,
            op::STORED => {
                let codes = reader.list(1, BATCH_BLOCKS_MAX)?;
                Self::Stored(codes.iter().map(|&code| Status::from_code(code)).collect::<Result<_>>()?)
            }
            op::DONE => Self::Done,
            op::STATS => Self::Stats(reader.text(RESPONSE_BODY_BYTES_MAX)?),
            op::FAILED => {
                Self::Failed { kind: kind_of(reader.u8()?)?, message: reader.text(MESSAGE_BYTES_MAX)? }
            }
            _ => return Err(reader.bad("no such operation").with("op", frame.op)),
        };
        reader.end()?;
        Ok((id, response))
    }

    /// Converts a `Failed` into its error.
    pub fn into_result(self) -> Result<Self> {
        match self {
            Self::Failed { kind, message } => Err(Error::new(kind, message)),
            other => Ok(other),
        }
    }
}

fn block<'a>(reader: &mut Reader<'_>) -> Result<Response<'a>> {
    let (index, status) = (reader.u32()?, Status::from_code(reader.u8()?)?);
    let (block_bytes, crc64) = (reader.u32()?, reader.u64()?);
    if u64::from(block_bytes) > PAYLOAD_BYTES_MAX || (status != Status::Ok && block_bytes > 0) {
        return Err(reader.bad("a block's length cannot be").with("block_bytes", block_bytes));
    }
    Ok(Response::Block { index, status, block_bytes, crc64 })
}

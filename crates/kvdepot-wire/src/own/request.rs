//! Requests of a client.

use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceId, Result};

use super::{NONCE_BYTES, PROOF_BYTES, op};
use crate::bytes::{Reader, put_list};
use crate::frame::Frame;
use crate::header::{HEADER_BYTES, Header};
use crate::limits::{BATCH_BLOCKS_MAX, PAYLOAD_BYTES_MAX, REQUEST_BODY_BYTES_MAX};

/// The block hashes of a batch, 16 bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hashes<'a>(&'a [u8]);

impl<'a> Hashes<'a> {
    /// Takes the hashes' bytes. Fails if they are not a whole number of hashes, or too many.
    pub fn new(bytes: &'a [u8]) -> Result<Self> {
        check_batch(bytes, 16)?;
        Ok(Self(bytes))
    }

    /// Returns the number of hashes.
    pub const fn len(&self) -> usize {
        self.0.len() / 16
    }

    /// Returns whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the hashes in order.
    pub fn iter(&self) -> impl Iterator<Item = BlockHash> + use<'a> {
        self.0.as_chunks::<16>().0.iter().map(|bytes| BlockHash(*bytes))
    }

    /// Returns their bytes.
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.0
    }
}

/// The blocks of a put: hash and CRC-64/NVME of each, 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutBlocks<'a>(&'a [u8]);

impl<'a> PutBlocks<'a> {
    /// Takes the blocks' bytes, as made by [`PutBlocks::push`].
    pub fn new(bytes: &'a [u8]) -> Result<Self> {
        check_batch(bytes, 24)?;
        Ok(Self(bytes))
    }

    /// Appends one block.
    pub fn push(bytes: &mut Vec<u8>, hash: BlockHash, crc64: u64) {
        bytes.extend_from_slice(&hash.0);
        bytes.extend_from_slice(&crc64.to_le_bytes());
    }

    /// Returns the number of blocks.
    pub const fn len(&self) -> usize {
        self.0.len() / 24
    }

    /// Returns whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over hash and checksum of each block, in order.
    pub fn iter(&self) -> impl Iterator<Item = (BlockHash, u64)> + use<'a> {
        self.0.as_chunks::<24>().0.iter().map(|item| {
            let (mut hash, mut crc64) = ([0; 16], [0; 8]);
            hash.copy_from_slice(&item[..16]);
            crc64.copy_from_slice(&item[16..]);
            (BlockHash(hash), u64::from_le_bytes(crc64))
        })
    }
}

fn check_batch(bytes: &[u8], item_bytes: usize) -> Result<()> {
    if bytes.len().is_multiple_of(item_bytes) && bytes.len() / item_bytes <= BATCH_BLOCKS_MAX {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Protocol, "a batch must hold whole items and not too many")
        .with("bytes", bytes.len())
        .with("items_max", BATCH_BLOCKS_MAX))
}

/// A request. Keys are the 32 bytes of a block key: the namespace once, then hashes (P8).
#[expect(missing_docs, reason = "fields are named for what they carry")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// First frame of a connection.
    Hello { version: u32, features: u64, nonce: [u8; NONCE_BYTES] },
    /// Second frame, if the welcome requires it.
    Auth { proof: [u8; PROOF_BYTES] },
    /// Opens a namespace by its canonical description.
    Open { canonical: &'a str },
    /// Ends the connection's use of a namespace: the server may forget it when others need its place.
    Close { canonical: &'a str },
    /// Asks which blocks exist.
    Exists { namespace: NamespaceId, hashes: Hashes<'a> },
    /// Asks how many leading blocks exist.
    Prefix { namespace: NamespaceId, hashes: Hashes<'a> },
    /// Send blocks, read from tiers within `wait_ms` where needed. Answered by one `Block` for each, in any order.
    Get { namespace: NamespaceId, wait_ms: u32, hashes: Hashes<'a> },
    /// Blocks of `block_bytes` each follow the frame, in order.
    Put { namespace: NamespaceId, block_bytes: u32, blocks: PutBlocks<'a> },
    /// Move a namespace to this epoch permanently. An epoch never goes back.
    SetEpoch { namespace: NamespaceId, epoch: u32 },
    /// Remove blocks.
    Remove { namespace: NamespaceId, hashes: Hashes<'a> },
    /// Counters and gauges.
    Stat,
}

impl<'a> Request<'a> {
    /// Returns the operation of the header.
    pub const fn op(&self) -> u8 {
        match self {
            Self::Hello { .. } => op::HELLO,
            Self::Auth { .. } => op::AUTH,
            Self::Open { .. } => op::OPEN,
            Self::Exists { .. } => op::EXISTS,
            Self::Prefix { .. } => op::PREFIX,
            Self::Get { .. } => op::GET,
            Self::Put { .. } => op::PUT,
            Self::SetEpoch { .. } => op::SET_EPOCH,
            Self::Remove { .. } => op::REMOVE,
            Self::Stat => op::STAT,
            Self::Close { .. } => op::CLOSE,
        }
    }

    /// Returns the number of payload bytes after the frame.
    pub const fn payload_bytes(&self) -> u64 {
        match self {
            Self::Put { block_bytes, blocks, .. } => *block_bytes as u64 * blocks.len() as u64,
            _ => 0,
        }
    }

    /// Appends the frame. The caller sends the payload after it.
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) -> Result<()> {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_BYTES]);
        out.extend_from_slice(&id.to_le_bytes());
        match self {
            Self::Hello { version, features, nonce } => {
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&features.to_le_bytes());
                out.extend_from_slice(nonce);
            }
            Self::Auth { proof } => out.extend_from_slice(proof),
            Self::Open { canonical } | Self::Close { canonical } => put_list(out, canonical.as_bytes(), 1),
            Self::Exists { namespace, hashes }
            | Self::Prefix { namespace, hashes }
            | Self::Remove { namespace, hashes } => {
                out.extend_from_slice(&namespace.0);
                put_list(out, hashes.0, 16);
            }
            Self::Get { namespace, wait_ms, hashes } => {
                out.extend_from_slice(&namespace.0);
                out.extend_from_slice(&wait_ms.to_le_bytes());
                put_list(out, hashes.0, 16);
            }
            Self::Put { namespace, block_bytes, blocks } => {
                check_payload(*block_bytes, blocks)?;
                out.extend_from_slice(&namespace.0);
                out.extend_from_slice(&block_bytes.to_le_bytes());
                put_list(out, blocks.0, 24);
            }
            Self::SetEpoch { namespace, epoch } => {
                out.extend_from_slice(&namespace.0);
                out.extend_from_slice(&epoch.to_le_bytes());
            }
            Self::Stat => {}
        }
        let body_bytes = out.len() - start - HEADER_BYTES;
        if body_bytes > REQUEST_BODY_BYTES_MAX {
            return Err(Error::new(ErrorKind::Protocol, "a request is too long").with("bytes", body_bytes));
        }
        let header = Header { op: self.op(), body_bytes: body_bytes as u32 };
        out[start..start + HEADER_BYTES].copy_from_slice(&header.encode());
        Ok(())
    }

    /// Decodes a frame returned by [`FrameBuffer::requests`](crate::FrameBuffer::requests) into its id and the request.
    pub fn decode(frame: Frame<'a>) -> Result<(u64, Self)> {
        let mut reader = Reader::new(frame.body, "request");
        let id = reader.u64()?;
        let request = match frame.op {
            op::HELLO => {
                Self::Hello { version: reader.u32()?, features: reader.u64()?, nonce: reader.array()? }
            }
            op::AUTH => Self::Auth { proof: reader.array()? },
            op::OPEN => Self::Open { canonical: reader.text(REQUEST_BODY_BYTES_MAX)? },
            op::EXISTS => Self::Exists { namespace: namespace(&mut reader)?, hashes: hashes(&mut reader)? },
            op::PREFIX => Self::Prefix { namespace: namespace(&mut reader)?, hashes: hashes(&mut reader)? },
            op::GET => Self::Get {
                namespace: namespace(&mut reader)?,
                wait_ms: reader.u32()?,
                hashes: hashes(&mut reader)?,
            },
            op::PUT => {
                let (namespace, block_bytes) = (namespace(&mut reader)?, reader.u32()?);
                let blocks = PutBlocks(reader.list(24, BATCH_BLOCKS_MAX)?);
                check_payload(block_bytes, &blocks)?;
                Self::Put { namespace, block_bytes, blocks }
            }
            op::SET_EPOCH => Self::SetEpoch { namespace: namespace(&mut reader)?, epoch: reader.u32()? },
            op::REMOVE => Self::Remove { namespace: namespace(&mut reader)?, hashes: hashes(&mut reader)? },
            op::STAT => Self::Stat,
            op::CLOSE => Self::Close { canonical: reader.text(REQUEST_BODY_BYTES_MAX)? },
            _ => return Err(reader.bad("no such operation").with("op", frame.op)),
        };
        if frame.op == op::HELLO {
            // A later version's hello may be longer; the fields of this version come first in all of them.
            reader.rest();
        } else {
            reader.end()?;
        }
        Ok((id, request))
    }

    /// Returns the id of a frame that cannot be decoded, so that its failure can be reported.
    pub fn id_of(frame: Frame<'_>) -> u64 {
        Reader::new(frame.body, "request").u64().unwrap_or(0)
    }
}

fn namespace(reader: &mut Reader<'_>) -> Result<NamespaceId> {
    Ok(NamespaceId(reader.array()?))
}

fn hashes<'a>(reader: &mut Reader<'a>) -> Result<Hashes<'a>> {
    Ok(Hashes(reader.list(16, BATCH_BLOCKS_MAX)?))
}

fn check_payload(block_bytes: u32, blocks: &PutBlocks<'_>) -> Result<()> {
    let payload_bytes = u64::from(block_bytes) * blocks.len() as u64;
    if block_bytes > 0 && payload_bytes <= PAYLOAD_BYTES_MAX {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Protocol,
        "a put must carry blocks of some size, and not too many bytes in all",
    )
    .with("payload_bytes", payload_bytes)
    .with("payload_bytes_max", PAYLOAD_BYTES_MAX))
}

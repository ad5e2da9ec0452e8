//! RDMA messages: connection data over TCP, and the requests inside of SENDs.

use kvdepot_core::{Error, ErrorKind, Result};

use super::flat::{Field, Table, encode};
use super::op;
use crate::bytes::Reader;
use crate::limits::INFINI_BODY_BYTES_MAX;

/// The connection data of one side's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnInfo {
    /// Queue pair number.
    pub qpn: u32,
    /// First packet sequence number.
    pub psn: u32,
    /// RoCE address.
    pub gid: [u8; 16],
    /// InfiniBand address.
    pub lid: u16,
    /// Path MTU, with the numbers of `enum ibv_mtu`.
    pub mtu: u32,
}

impl ConnInfo {
    /// Length on the wire.
    pub const BYTES: usize = 30;

    /// Encodes the 30 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..4].copy_from_slice(&self.qpn.to_le_bytes());
        out[4..8].copy_from_slice(&self.psn.to_le_bytes());
        out[8..24].copy_from_slice(&self.gid);
        out[24..26].copy_from_slice(&self.lid.to_le_bytes());
        out[26..].copy_from_slice(&self.mtu.to_le_bytes());
        out
    }

    /// Decodes exactly 30 bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(bytes, "rdma_conn_info");
        let info = Self {
            qpn: reader.u32()?,
            psn: reader.u32()?,
            gid: reader.array()?,
            lid: u16::from_le_bytes(reader.array()?),
            mtu: reader.u32()?,
        };
        reader.end()?;
        Ok(info)
    }
}

/// A batch that the server moves by RDMA: the body of a SEND, without a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteMeta<'a> {
    /// [`op::RDMA_WRITE`] (the server reads the client's memory) or [`op::RDMA_READ`] (it writes it).
    pub op: u8,
    /// One key for each block.
    pub keys: Vec<&'a [u8]>,
    /// Bytes of each block.
    pub block_bytes: u32,
    /// Key of the client's memory region.
    pub rkey: u32,
    /// The address of each block in the client's memory, in the order of the keys.
    pub addresses: Vec<u64>,
}

impl<'a> RemoteMeta<'a> {
    /// Encodes the bytes of the SEND.
    pub fn encode(&self) -> Vec<u8> {
        encode(&[
            Field::Strings(&self.keys),
            Field::I32(self.block_bytes.cast_signed()),
            Field::I32(self.rkey.cast_signed()),
            Field::U64s(&self.addresses),
            Field::I8(self.op),
        ])
    }

    /// Decodes the bytes of a SEND.
    pub fn decode(bytes: &'a [u8]) -> Result<Self> {
        let bad =
            |why: &str| Error::new(ErrorKind::Protocol, format!("an RDMA request cannot be served: {why}"));
        if bytes.len() > INFINI_BODY_BYTES_MAX {
            return Err(bad("it is too long").with("bytes", bytes.len()));
        }
        let table = Table::root(bytes)?;
        let meta = Self {
            keys: table.strings(0)?,
            block_bytes: u32::try_from(table.i32(1)?).map_err(|_| bad("its block size is negative"))?,
            rkey: table.i32(2)?.cast_unsigned(),
            addresses: table.u64s(3)?,
            op: table.i8(4)?,
        };
        if !matches!(meta.op, op::RDMA_WRITE | op::RDMA_READ) {
            return Err(bad("its operation is neither W nor A").with("op", meta.op));
        }
        if meta.keys.len() != meta.addresses.len() || meta.keys.is_empty() || meta.block_bytes == 0 {
            return Err(bad("it needs a block size, and an address for each of its keys")
                .with("keys", meta.keys.len())
                .with("addresses", meta.addresses.len())
                .with("block_bytes", meta.block_bytes));
        }
        if meta.keys.iter().any(|key| key.is_empty()) {
            return Err(bad("a key is empty"));
        }
        Ok(meta)
    }
}

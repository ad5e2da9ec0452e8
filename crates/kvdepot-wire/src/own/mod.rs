//! Our own protocol: ids, batches, checksums, namespaces, a token. Drawn in `docs/wire.md`.

mod handshake;
mod request;
mod response;
mod status;

pub use handshake::{
    ClientHandshake, NONCE_BYTES, Offer, PROOF_BYTES, ServerHandshake, Token, VERSION, Welcomed,
};
pub use request::{Hashes, PutBlocks, Request};
pub use response::Response;
pub use status::Status;

/// Operations: the header's fifth byte. Requests have bit 7 set, answers bits 7 and 6.
pub mod op {
    /// First frame of a connection.
    pub const HELLO: u8 = 0x80;
    /// Proof that the client knows the token.
    pub const AUTH: u8 = 0x81;
    /// Makes a namespace known.
    pub const OPEN: u8 = 0x82;
    /// Which blocks are there.
    pub const EXISTS: u8 = 0x83;
    /// How many leading blocks are there.
    pub const PREFIX: u8 = 0x84;
    /// Send blocks.
    pub const GET: u8 = 0x85;
    /// Blocks follow.
    pub const PUT: u8 = 0x86;
    /// Move a namespace to an epoch.
    pub const SET_EPOCH: u8 = 0x87;
    /// Forget blocks.
    pub const REMOVE: u8 = 0x88;
    /// Counters and gauges.
    pub const STAT: u8 = 0x89;

    /// To `HELLO`.
    pub const WELCOME: u8 = 0xc0;
    /// To `AUTH`.
    pub const AUTHENTIC: u8 = 0xc1;
    /// To `OPEN` and `SET_EPOCH`.
    pub const NAMESPACE: u8 = 0xc2;
    /// To `EXISTS`.
    pub const PRESENT: u8 = 0xc3;
    /// To `PREFIX`.
    pub const LEADING: u8 = 0xc4;
    /// One block of a `GET`; its bytes follow.
    pub const BLOCK: u8 = 0xc5;
    /// To `PUT`: how each block fared.
    pub const STORED: u8 = 0xc6;
    /// To `REMOVE`.
    pub const DONE: u8 = 0xc7;
    /// To `STAT`.
    pub const STATS: u8 = 0xc8;
    /// The request failed as a whole.
    pub const FAILED: u8 = 0xcf;
}

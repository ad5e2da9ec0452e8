//! Our own protocol: ids, batches, checksums, namespaces, a token. See `docs/wire.md`.

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

/// Optional features: bits of hello and welcome. A client uses what both sides have.
pub mod feature {
    /// `CLOSE` is understood.
    pub const CLOSE: u64 = 1;
}

/// Operations: the header's fifth byte. Requests have bit 7 set, answers bits 7 and 6.
pub mod op {
    /// First frame of a connection.
    pub const HELLO: u8 = 0x80;
    /// Proof that the client knows the token.
    pub const AUTH: u8 = 0x81;
    /// Opens a namespace.
    pub const OPEN: u8 = 0x82;
    /// Which blocks exist.
    pub const EXISTS: u8 = 0x83;
    /// How many leading blocks exist.
    pub const PREFIX: u8 = 0x84;
    /// Send blocks.
    pub const GET: u8 = 0x85;
    /// Store blocks, which follow.
    pub const PUT: u8 = 0x86;
    /// Moves a namespace to an epoch.
    pub const SET_EPOCH: u8 = 0x87;
    /// Removes blocks.
    pub const REMOVE: u8 = 0x88;
    /// Counters and gauges.
    pub const STAT: u8 = 0x89;
    /// Ends the connection's use of a namespace.
    pub const CLOSE: u8 = 0x8a;

    /// Answer to `HELLO`.
    pub const WELCOME: u8 = 0xc0;
    /// Answer to `AUTH`.
    pub const AUTHENTIC: u8 = 0xc1;
    /// Answer to `OPEN` and `SET_EPOCH`.
    pub const NAMESPACE: u8 = 0xc2;
    /// Answer to `EXISTS`.
    pub const PRESENT: u8 = 0xc3;
    /// Answer to `PREFIX`.
    pub const LEADING: u8 = 0xc4;
    /// One block of a `GET`, followed by its bytes.
    pub const BLOCK: u8 = 0xc5;
    /// Answer to `PUT`: the outcome for each block.
    pub const STORED: u8 = 0xc6;
    /// Answer to `REMOVE` and `CLOSE`.
    pub const DONE: u8 = 0xc7;
    /// Answer to `STAT`.
    pub const STATS: u8 = 0xc8;
    /// The complete request failed.
    pub const FAILED: u8 = 0xcf;
}

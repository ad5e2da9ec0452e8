//! InfiniStore's protocol, as its client and its server use it: no ids, one request at a time, raw answers.

mod flat;
mod rdma;
mod reply;
mod request;

pub use rdma::{ConnInfo, RemoteMeta};
pub use reply::{Reply, ReplyReader};
pub use request::{Request, TcpOp};

/// Operations: the header's fifth byte.
pub mod op {
    /// Exchange of RDMA connection data.
    pub const EXCHANGE: u8 = b'E';
    /// Does this key exist?
    pub const EXISTS: u8 = b'C';
    /// The last of the leading keys that exist.
    pub const MATCH: u8 = b'M';
    /// Delete keys.
    pub const DELETE: u8 = b'X';
    /// A value over TCP, in either direction.
    pub const TCP: u8 = b'L';
    /// Values by RDMA into the server; sent in a SEND.
    pub const RDMA_WRITE: u8 = b'W';
    /// Values by RDMA out of the server; sent in a SEND.
    pub const RDMA_READ: u8 = b'A';
}

/// Status codes of answers.
pub mod code {
    /// Success.
    pub const FINISH: i32 = 200;
    /// The request is invalid.
    pub const INVALID: i32 = 400;
    /// No such key.
    pub const NOT_FOUND: i32 = 404;
    /// The server failed.
    pub const INTERNAL: i32 = 500;
    /// The machine failed, or lacks something that the request needs.
    pub const SYSTEM: i32 = 503;
    /// No space.
    pub const OUT_OF_MEMORY: i32 = 507;
}

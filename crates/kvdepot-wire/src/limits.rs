//! P7: every length that a peer may announce over the wire door, with its bound.

use kvdepot_core::limits::{BATCH_HASHES_MAX, BLOCK_BYTES_MAX, NAMESPACE_SPEC_BYTES_MAX};

/// Longest body of an InfiniStore request: what its own client can send.
pub const INFINI_BODY_BYTES_MAX: usize = 4 << 20;
/// Longest key of an InfiniStore request.
pub const KEY_BYTES_MAX: usize = 4096;
/// Most keys of one InfiniStore request.
pub const KEYS_MAX: usize = 65_536;
/// Largest value that an InfiniStore request may announce; what follows a larger one cannot be told from requests.
pub const VALUE_BYTES_MAX: u64 = i32::MAX as u64;
/// Most blocks of one batch of our own protocol.
pub const BATCH_BLOCKS_MAX: usize = BATCH_HASHES_MAX;
/// Longest body of a request of our own protocol.
pub const REQUEST_BODY_BYTES_MAX: usize = 128 << 10;
/// Longest body of an answer of our own protocol.
pub const RESPONSE_BODY_BYTES_MAX: usize = 1 << 20;
/// Most payload bytes behind one frame.
pub const PAYLOAD_BYTES_MAX: u64 = BLOCK_BYTES_MAX;
/// Longest message of a failure.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Requests that a client may have under way on one connection.
pub const REQUESTS_IN_FLIGHT_MAX: u32 = 128;
/// What a frame's buffer takes from a socket at a time.
pub const READ_BYTES: usize = 16 << 10;

const _: () = assert!(BATCH_BLOCKS_MAX * 24 + 64 <= REQUEST_BODY_BYTES_MAX);
const _: () = assert!(NAMESPACE_SPEC_BYTES_MAX + 64 <= REQUEST_BODY_BYTES_MAX);
const _: () = assert!(BATCH_BLOCKS_MAX + 64 <= RESPONSE_BODY_BYTES_MAX);
const _: () = assert!(PAYLOAD_BYTES_MAX <= u32::MAX as u64);

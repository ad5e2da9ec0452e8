//! P7: limits of all lengths that a peer may send over the wire door.

use kvdepot_core::limits::{BATCH_HASHES_MAX, BLOCK_BYTES_MAX, NAMESPACE_SPEC_BYTES_MAX};

/// Longest body of an InfiniStore request: what its own client can send.
pub const INFINI_BODY_BYTES_MAX: usize = 4 << 20;
/// Longest key of an InfiniStore request.
pub const KEY_BYTES_MAX: usize = 4096;
/// Largest number of keys in one InfiniStore request.
pub const KEYS_MAX: usize = 65_536;
/// Largest value in an InfiniStore request. After a longer one the stream would be out of step.
pub const VALUE_BYTES_MAX: u64 = i32::MAX as u64;
/// Largest number of blocks in one batch of our own protocol.
pub const BATCH_BLOCKS_MAX: usize = BATCH_HASHES_MAX;
/// Longest body of a request of our own protocol.
pub const REQUEST_BODY_BYTES_MAX: usize = 128 << 10;
/// Longest body of a request of our own protocol before the end of the handshake, if a token is required: whoever cannot
/// prove it must cost no more memory.
pub const GREETING_BODY_BYTES_MAX: usize = 1 << 10;
/// Longest body of an answer of our own protocol.
pub const RESPONSE_BODY_BYTES_MAX: usize = 1 << 20;
/// Largest payload that follows one frame.
pub const PAYLOAD_BYTES_MAX: u64 = BLOCK_BYTES_MAX;
/// Longest error message of a failure.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Number of requests that a client may have in flight on one connection.
pub const REQUESTS_IN_FLIGHT_MAX: u32 = 128;
/// Bytes that a frame buffer reads from a socket at a time.
pub const READ_BYTES: usize = 16 << 10;

const _: () = assert!(BATCH_BLOCKS_MAX * 24 + 64 <= REQUEST_BODY_BYTES_MAX);
const _: () = assert!(NAMESPACE_SPEC_BYTES_MAX + 64 <= REQUEST_BODY_BYTES_MAX);
const _: () = assert!(BATCH_BLOCKS_MAX + 64 <= RESPONSE_BODY_BYTES_MAX);
const _: () = assert!(PAYLOAD_BYTES_MAX <= u32::MAX as u64);

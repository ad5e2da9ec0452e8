//! The codec of the wire door's frames: bytes in, values out, on both sides. No sockets, no clock, no threads. No
//! length sent by a peer is trusted.
//!
//! Two protocols share one frame, shown in `docs/wire.md`: InfiniStore's ([`infini`]), whose requests are answered in
//! order, and ours ([`own`]), whose requests carry ids. Payloads follow their frame and are not part of it, so they can
//! be received straight into their final memory.
//!
//! A client of our own protocol uses [`own::ClientHandshake`], [`own::Request`], [`own::Response`] and
//! [`FrameBuffer::responses`]. A client of an InfiniStore server uses [`infini::Request`] and [`infini::ReplyReader`].
#![forbid(unsafe_code)]

mod bytes;
mod frame;
#[doc(hidden)]
pub mod fuzz;
pub mod header;
pub mod infini;
pub mod limits;
pub mod own;

pub use frame::{Frame, FrameBuffer, Spare};
pub use header::{HEADER_BYTES, Header};

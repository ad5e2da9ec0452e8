//! Frames of the wire door: bytes in, values out, on both sides. No sockets, no clock, no threads; nothing here trusts
//! a length that a peer sent.
//!
//! Two protocols share one frame, drawn in `docs/wire.md`: InfiniStore's ([`infini`]), whose requests are answered one
//! after another, and ours ([`own`]), whose requests carry ids. Payloads follow their frame and are not part of it, so
//! that they can be received straight into the memory that is to hold them.
//!
//! A client of our own protocol uses [`own::ClientHandshake`], [`own::Request`], [`own::Response`] and
//! [`FrameBuffer::responses`]; a client of an InfiniStore server uses [`infini::Request`] and [`infini::ReplyReader`].
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

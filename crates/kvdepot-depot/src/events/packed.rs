//! Events as bytes. An event has one byte for place and kind, two for the namespace, and sixteen for the hash.

use kvdepot_core::limits::{EVENTS_LOOKS, FRAME_BYTES_MAX, NAMESPACES_MAX};
use kvdepot_core::{BlockHash, Error, ErrorKind, Result};

use super::Event;

const BYTES: usize = 19;
// An answer has these events, and an id of 16 bytes for each followed namespace.
const _: () = assert!(EVENTS_LOOKS * BYTES + NAMESPACES_MAX * 16 + 1024 < FRAME_BYTES_MAX);
/// Flag in the first byte; the other bits are the place.
const STORED: u8 = 0x80;

/// Packs events.
pub(crate) fn pack(events: &[Event]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(events.len() * BYTES);
    for event in events {
        bytes.push(event.place | if event.is_stored { STORED } else { 0 });
        bytes.extend_from_slice(&event.space.to_le_bytes());
        bytes.extend_from_slice(&event.hash.0);
    }
    bytes
}

/// Unpacks the result of `pack`. Fails if the number of bytes is not a multiple of an event's.
pub(crate) fn unpack(bytes: &[u8]) -> Result<Vec<Event>> {
    let (events, rest) = bytes.as_chunks::<BYTES>();
    if !rest.is_empty() {
        return Err(Error::new(ErrorKind::Protocol, "packed events end in the middle of an event")
            .with("trailing_bytes", rest.len()));
    }
    let unpacked = events.iter().map(|[kind, low, high, hash @ ..]| Event {
        space: u16::from_le_bytes([*low, *high]),
        place: kind & !STORED,
        is_stored: kind & STORED != 0,
        hash: BlockHash(*hash),
    });
    Ok(unpacked.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_back_as_they_were() {
        let event = |n: u8, is_stored| Event {
            space: 500 + u16::from(n),
            place: n,
            is_stored,
            hash: BlockHash([n; 16]),
        };
        let events = [event(0, true), event(8, false), event(127, true)];
        assert_eq!(unpack(&pack(&events)).unwrap(), events);
        assert!(unpack(&pack(&events)[1..]).is_err());
    }
}

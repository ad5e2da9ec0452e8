//! Measures encodings on pieces of a block.

use std::time::Duration;

use kvdepot_core::Result;

use crate::encoding::{CHUNK_BYTES, Encoder, Encoding, decode};

/// Pieces of a block that are measured, spread evenly over it.
const PIECES_MAX: usize = 4;

/// What an encoding did with a piece of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Bytes after encoding.
    pub(super) stored_bytes: u64,
    /// Processor time of encoding.
    pub(super) encode: Duration,
    /// Processor time of decoding.
    pub(super) decode: Duration,
}

/// What each encoding did with the same pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Measured {
    /// Bytes of the pieces.
    pub(super) plain_bytes: u64,
    /// By encoding, in the order of [`Encoding::ALL`].
    pub(super) outcomes: [Outcome; Encoding::ALL.len()],
}

/// Encodes and decodes pieces of a block that `read` copies, with each encoding. `clock` is the processor time of this
/// thread.
pub(super) fn measure(
    block_bytes: usize,
    mut read: impl FnMut(usize, &mut [u8]),
    clock: impl Fn() -> Duration,
) -> Result<Measured> {
    let mut measured = Measured::default();
    let chunks = block_bytes.div_ceil(CHUNK_BYTES).max(1);
    let pieces = chunks.min(PIECES_MAX);
    let mut encoders = Vec::with_capacity(Encoding::ALL.len());
    for encoding in Encoding::ALL {
        encoders.push(Encoder::new(encoding)?);
    }
    let mut piece = vec![0; block_bytes.min(CHUNK_BYTES)];
    let mut out = vec![0; piece.len() * 2 + 64];
    for number in 0..pieces {
        let at = chunks * number / pieces * CHUNK_BYTES;
        let bytes = (block_bytes - at).min(CHUNK_BYTES);
        let piece = &mut piece[..bytes];
        read(at, piece);
        measured.plain_bytes += bytes as u64;
        for (encoder, outcome) in encoders.iter_mut().zip(&mut measured.outcomes) {
            let began = clock();
            let stored = encoder.chunk(piece, &mut out).unwrap_or(out.len());
            let encoded = clock();
            decode(encoder.encoding(), &out[..stored], bytes, |_, _| {})?;
            outcome.stored_bytes += stored as u64;
            outcome.encode += encoded.saturating_sub(began);
            outcome.decode += clock().saturating_sub(encoded);
        }
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_piece_is_encoded_and_decoded_in_each_encoding() {
        let block_bytes = 6 * CHUNK_BYTES + 5;
        let ticks = std::cell::Cell::new(0);
        let clock = || {
            ticks.set(ticks.get() + 1);
            Duration::from_micros(ticks.get())
        };
        let mut read = Vec::new();
        let measured = measure(block_bytes, |at, piece| read.push((at, piece.len())), clock).unwrap();
        let expected: Vec<_> = [0, 1, 3, 5].map(|chunk| (chunk * CHUNK_BYTES, CHUNK_BYTES)).into();
        assert_eq!(read, expected);
        assert_eq!(measured.plain_bytes, 4 * CHUNK_BYTES as u64);
        for outcome in measured.outcomes {
            assert!(outcome.stored_bytes < 4096, "zeros: {outcome:?}");
            let four = Duration::from_micros(4);
            assert_eq!((outcome.encode, outcome.decode), (four, four));
        }
    }
}

//! Lossless encodings of a block's payload, as `docs/format.md` draws them.
//!
//! A block is encoded in chunks, each independently: `planes` splits a chunk of two-byte elements into the bytes that
//! hold the exponents, which repeat, and those that hold mantissas, which do not; then each plane is compressed with
//! zstd, or stored as it is if that does not make it smaller. The checksums in a block's header are those of the plain
//! block, so a decoded block is verified like any other (P1). `crate::compression` decides what is encoded.

mod planes;

use kvdepot_core::{Error, ErrorKind, Result};
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::CParameter;

/// Bytes of a block that are encoded together. A plane of two-byte elements is then as long as a block of zstd, whose
/// table of codes it has for itself.
pub const CHUNK_BYTES: usize = 256 << 10;

/// zstd's fastest level that still codes bytes by their frequency.
const LEVEL: i32 = 1;
/// Bytes of the shortest repetition that is looked for, and the logarithm of the places that are remembered. Exponents
/// repeat by chance all the time: finding these repetitions costs three times as long and makes the result no smaller.
const MATCH_BYTES_MIN: u32 = 7;
const HASH_LOG: u32 = 6;
/// Set in the length of a plane that is stored as it is.
const RAW: u32 = 1 << 31;
const LENGTH_BYTES: usize = 4;
/// The smallest part of a plane that compressing it must save: one in this many bytes.
const PLANE_SAVING: usize = 64;
/// After a plane that did not get smaller, the planes at its place in this many chunks are not tried.
const CHUNKS_SKIPPED: u32 = 7;
/// Chunks after which a block is given up if it has not become smaller by then.
const CHUNKS_TRIED: usize = 4;

/// An encoding of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Chunks of bytes, compressed.
    Bytes,
    /// Chunks of two-byte floating-point numbers, split into planes, then compressed.
    Halves,
}

impl Encoding {
    /// All encodings that this build writes and reads.
    pub const ALL: [Self; 2] = [Self::Bytes, Self::Halves];

    /// Returns the encoding with this number in a header.
    pub const fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Bytes),
            2 => Some(Self::Halves),
            _ => None,
        }
    }

    /// Returns its number in a header.
    pub const fn number(self) -> u32 {
        match self {
            Self::Bytes => 1,
            Self::Halves => 2,
        }
    }

    /// Returns the lengths of the planes of a chunk.
    fn planes(self, chunk_bytes: usize) -> [usize; 2] {
        match self {
            Self::Bytes => [chunk_bytes, 0],
            // An odd byte at the end belongs to the second plane.
            Self::Halves => [chunk_bytes / 2, chunk_bytes - chunk_bytes / 2],
        }
    }
}

fn corrupt(what: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

/// Encodes chunks, one after another, with memory for one of them.
pub struct Encoder {
    encoding: Encoding,
    zstd: Compressor<'static>,
    split: Vec<u8>,
    /// By plane: chunks in which it is not tried.
    skip: [u32; 2],
}

impl Encoder {
    /// Makes an encoder.
    pub fn new(encoding: Encoding) -> Result<Self> {
        let start = || {
            let mut zstd = Compressor::new(LEVEL)?;
            zstd.set_parameter(CParameter::MinMatch(MATCH_BYTES_MIN))?;
            zstd.set_parameter(CParameter::HashLog(HASH_LOG))?;
            Ok(zstd)
        };
        let zstd = start().map_err(|e| Error::io("cannot start a compressor", e))?;
        Ok(Self { encoding, zstd, split: Vec::new(), skip: [0; 2] })
    }

    pub(crate) const fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Encodes a chunk into the beginning of `out` and returns the length; `None` if it does not fit.
    pub(crate) fn chunk(&mut self, chunk: &[u8], out: &mut [u8]) -> Option<usize> {
        let planes = self.encoding.planes(chunk.len());
        let whole: &[u8] = if self.encoding == Encoding::Halves {
            self.split.resize(chunk.len(), 0);
            let (high, low) = self.split.split_at_mut(planes[0]);
            planes::split(chunk, high, low);
            &self.split
        } else {
            chunk
        };
        let (mut at, mut from) = (0, 0);
        for (length, skip) in planes.into_iter().zip(&mut self.skip) {
            if length == 0 {
                continue;
            }
            let plane = &whole[from..from + length];
            from += length;
            let body = out.get_mut(at + LENGTH_BYTES..)?;
            let most = length - length / PLANE_SAVING - 1;
            let most = most.min(body.len());
            let small = if *skip == 0 {
                // It fails if the result does not fit.
                let small = self.zstd.compress_to_buffer(plane, &mut body[..most]).ok();
                *skip = if small.is_none() { CHUNKS_SKIPPED } else { 0 };
                small
            } else {
                *skip -= 1;
                None
            };
            let (stored, word) = if let Some(stored) = small {
                (stored, stored as u32)
            } else {
                body.get_mut(..length)?.copy_from_slice(plane);
                (length, length as u32 | RAW)
            };
            out[at..at + LENGTH_BYTES].copy_from_slice(&word.to_le_bytes());
            at += LENGTH_BYTES + stored;
        }
        Some(at)
    }

    /// Encodes a block of `block_bytes` that `read` copies piece by piece, into `out`. Returns the length; `None` if it
    /// is longer than `out`, or if its first chunks do not get smaller.
    pub fn block(
        &mut self,
        block_bytes: usize,
        mut read: impl FnMut(usize, &mut [u8]),
        out: &mut [u8],
    ) -> Option<usize> {
        let mut chunk = vec![0; block_bytes.min(CHUNK_BYTES)];
        let (mut done, mut stored) = (0, 0);
        while done < block_bytes {
            let bytes = (block_bytes - done).min(CHUNK_BYTES);
            read(done, &mut chunk[..bytes]);
            stored += self.chunk(&chunk[..bytes], &mut out[stored..])?;
            done += bytes;
            if done == CHUNKS_TRIED * CHUNK_BYTES && stored >= done {
                return None;
            }
        }
        Some(stored)
    }
}

/// Decodes a payload of `block_bytes`, which `write` receives piece by piece. Memory is taken for one chunk.
///
/// # Errors
///
/// `Corrupt` if it is not an encoded block of exactly this length.
pub fn decode(
    encoding: Encoding,
    mut payload: &[u8],
    block_bytes: usize,
    mut write: impl FnMut(usize, &[u8]),
) -> Result<()> {
    let mut zstd = Decompressor::new().map_err(|e| Error::io("cannot start a decompressor", e))?;
    let mut whole = vec![0; block_bytes.min(CHUNK_BYTES)];
    let mut chunk = vec![0; if encoding == Encoding::Halves { whole.len() } else { 0 }];
    let mut done = 0;
    while done < block_bytes {
        let bytes = (block_bytes - done).min(CHUNK_BYTES);
        let planes = encoding.planes(bytes);
        let mut at = 0;
        for length in planes.into_iter().filter(|length| *length > 0) {
            payload = plane(&mut zstd, payload, &mut whole[at..at + length])?;
            at += length;
        }
        if encoding == Encoding::Halves {
            let (high, low) = whole[..bytes].split_at(planes[0]);
            planes::join(high, low, &mut chunk[..bytes]);
            write(done, &chunk[..bytes]);
        } else {
            write(done, &whole[..bytes]);
        }
        done += bytes;
    }
    if payload.is_empty() { Ok(()) } else { Err(corrupt("an encoded block has bytes behind its end")) }
}

/// Decodes a plane to fill `out`, and returns what follows it.
fn plane<'a>(zstd: &mut Decompressor<'_>, payload: &'a [u8], out: &mut [u8]) -> Result<&'a [u8]> {
    let short = || corrupt("an encoded block ends early");
    let (word, rest) = payload.split_first_chunk::<LENGTH_BYTES>().ok_or_else(short)?;
    let word = u32::from_le_bytes(*word);
    let (stored, rest) = rest.split_at_checked((word & !RAW) as usize).ok_or_else(short)?;
    if word & RAW != 0 {
        if stored.len() != out.len() {
            return Err(corrupt("a plain part of an encoded block has another length"));
        }
        out.copy_from_slice(stored);
    } else {
        let came = zstd
            .decompress_to_buffer(stored, out)
            .map_err(|e| corrupt("a part of an encoded block cannot be decompressed").with_source(e))?;
        if came != out.len() {
            return Err(corrupt("a part of an encoded block has another length").with("bytes", came));
        }
    }
    Ok(rest)
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("encoding", &self.encoding).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

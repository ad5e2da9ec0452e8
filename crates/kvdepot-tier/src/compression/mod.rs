//! Compression between the pool and a tier: encodes blocks as they are written, decodes them as they are read, and
//! counts both.
//!
//! `choice` decides by namespace, from what `measure` found on some of its blocks. The work is done on the threads on
//! which a tier writes and reads, without a lock, and with memory for the blocks that these threads handle.

mod choice;
mod measure;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hashlink::LruCache;
use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, NAMESPACES_MAX};
use kvdepot_core::{BlockKey, BlockLayout, NamespaceId, Result};
use kvdepot_io::thread_time::thread_time;
use kvdepot_io::{AlignedBuf, IoBuf, SlotBuf};
use parking_lot::Mutex;

pub use choice::Compression;
use choice::{Choice, Plan};
use measure::measure;

use crate::encoding::{Encoder, Encoding};
use crate::format::{self, BlockHeader, Encoded, Writer};
use crate::settings::Switch;

/// What the key `…_compression` of each tier means.
pub(crate) const MEANING: &str = "Compress blocks losslessly before writing them, so that they take less space. `auto` samples some \
     blocks of each namespace, and compresses the namespace if that saves 10 % and is fast. `true` \
     compresses every block that shrinks by a page or more. The tier reads both forms with any \
     setting.";

/// An encoded block must be smaller by one in this many bytes, and take fewer pages.
const BLOCK_SAVING: usize = 32;

impl Compression {
    pub(crate) const fn of(switch: Switch) -> Self {
        match switch {
            Switch::On => Self::On,
            Switch::Off => Self::Off,
            Switch::Auto => Self::Auto,
        }
    }
}

/// Counters since the tier was opened.
#[derive(Debug, Default)]
struct Meter {
    encoded_blocks: AtomicU64,
    plain_blocks: AtomicU64,
    before_bytes: AtomicU64,
    after_bytes: AtomicU64,
    encode_ns: AtomicU64,
    decoded_blocks: AtomicU64,
    decoded_bytes: AtomicU64,
    decode_ns: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    // Relaxed: figures that order nothing.
    counter.fetch_add(count, Ordering::Relaxed);
}

fn add_time(counter: &AtomicU64, since: Duration) {
    let took = thread_time().saturating_sub(since);
    add(counter, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
}

/// Encodes and decodes the blocks of one tier.
#[derive(Debug)]
pub(crate) struct Transform {
    mode: Compression,
    /// By namespace root.
    choices: Mutex<LruCache<NamespaceId, Choice>>,
    meter: Meter,
}

impl Transform {
    pub(crate) fn new(mode: Compression) -> Self {
        Self { mode, choices: Mutex::new(LruCache::new(NAMESPACES_MAX)), meter: Meter::default() }
    }

    /// Makes a block's file like [`format::seal`], encoded if that pays.
    pub(crate) fn seal(
        &self,
        root: NamespaceId,
        key: BlockKey,
        layout: &BlockLayout,
        src: &SlotBuf,
        writer: Writer,
    ) -> Result<IoBuf> {
        let block_bytes = usize::try_from(layout.block_bytes()).unwrap_or(usize::MAX);
        if self.mode == Compression::Off || src.len() < block_bytes {
            return format::seal(key, layout, src, writer);
        }
        let encode = || {
            let began = thread_time();
            let encoding = self.plan(root, block_bytes, src);
            let encoded = encoding.and_then(|encoding| {
                let encoded = encode(encoding, block_bytes, src);
                self.with(root, |choice| choice.encoded(encoded.is_some()));
                encoded
            });
            add_time(&self.meter.encode_ns, began);
            encoded
        };
        let sealed = format::seal_as(key, layout, src, writer, encode)?;
        let payload_bytes = (sealed.len() - sealed.head().len()) as u64;
        let is_encoded = payload_bytes < layout.slot_bytes();
        add(if is_encoded { &self.meter.encoded_blocks } else { &self.meter.plain_blocks }, 1);
        add(&self.meter.before_bytes, layout.slot_bytes());
        add(&self.meter.after_bytes, payload_bytes);
        Ok(sealed)
    }

    /// Returns how to encode a block, which is measured if its namespace needs that.
    fn plan(&self, root: NamespaceId, block_bytes: usize, src: &SlotBuf) -> Option<Encoding> {
        let mut plan = self.with(root, Choice::next);
        if plan == Plan::Measure {
            // A failure leaves the sample out.
            let measured = measure(block_bytes, |at, piece| src.read_at(at, piece), thread_time).ok()?;
            let (before, now) = self.with(root, |choice| {
                let before = choice.decided();
                plan = choice.measured(&measured);
                (before, choice.decided())
            });
            if before != now {
                tracing::info!(namespace = %root, encoding = ?now, "the compression of a namespace is decided");
            }
        }
        match plan {
            Plan::Encode(encoding) => Some(encoding),
            Plan::Plain | Plan::Measure => None,
        }
    }

    fn with<T>(&self, root: NamespaceId, act: impl FnOnce(&mut Choice) -> T) -> T {
        let mut choices = self.choices.lock();
        act(choices.entry(root).or_insert_with(|| Choice::new(self.mode == Compression::On)))
    }

    /// Verifies a file like [`format::verify`]. Blocks of every encoding are read, whatever is written.
    pub(crate) fn verify(&self, key: BlockKey, layout: &BlockLayout, read: &IoBuf) -> Result<BlockHeader> {
        format::verify_with(key, layout, read, |encoding, header, slot| {
            let began = thread_time();
            let decoded = format::decode_in_place(encoding, header, slot);
            add_time(&self.meter.decode_ns, began);
            add(&self.meter.decoded_blocks, 1);
            add(&self.meter.decoded_bytes, header.slot_bytes);
            decoded
        })
    }

    /// Returns the counters for `stat` and metrics; none for a tier that has neither encoded nor decoded a block, and
    /// does not encode any.
    pub(crate) fn figures(&self) -> Vec<(&'static str, u64)> {
        let meter = &self.meter;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        if self.mode == Compression::Off && get(&meter.decoded_blocks) == 0 {
            return Vec::new();
        }
        vec![
            ("compressed_blocks", get(&meter.encoded_blocks)),
            ("uncompressed_blocks", get(&meter.plain_blocks)),
            ("compression_input_bytes", get(&meter.before_bytes)),
            ("compression_output_bytes", get(&meter.after_bytes)),
            ("compression_cpu_us", get(&meter.encode_ns) / 1000),
            ("decompressed_blocks", get(&meter.decoded_blocks)),
            ("decompressed_bytes", get(&meter.decoded_bytes)),
            ("decompression_cpu_us", get(&meter.decode_ns) / 1000),
        ]
    }
}

/// Encodes a block; `None` if that does not make it smaller by enough.
fn encode(encoding: Encoding, block_bytes: usize, src: &SlotBuf) -> Option<Encoded> {
    // At least a byte, by `BlockLayout`.
    let page = BLOCK_ALIGN_BYTES as usize;
    let fewer_pages = (block_bytes - 1) / page * page;
    let most = fewer_pages.min(block_bytes - block_bytes / BLOCK_SAVING);
    let mut pages = AlignedBuf::zeroed(most.next_multiple_of(page));
    let mut encoder = Encoder::new(encoding).ok()?;
    let stored_bytes = encoder.block(block_bytes, |at, piece| src.read_at(at, piece), &mut pages[..most])?;
    pages.truncate(stored_bytes.next_multiple_of(page));
    // The compressor may have used what follows as scratch memory.
    pages[stored_bytes..].fill(0);
    // Blocks that wait for a medium are counted by their length.
    Some(Encoded { encoding, stored_bytes, pages: pages.compact() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue of encoded blocks takes about as much memory as its bound says, which counts lengths.
    #[test]
    fn an_encoded_block_holds_little_more_memory_than_its_length() {
        for zeros in [0, 1 << 19, 1 << 20] {
            let slot = SlotBuf::anonymous(1 << 20);
            let mut state = 1_u64;
            let noise: Vec<u8> = std::iter::repeat_with(|| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .take((1 << 20) - zeros)
            .collect();
            slot.write_at(zeros, &noise);
            match encode(Encoding::Bytes, 1 << 20, &slot) {
                None => assert_eq!(zeros, 0, "noise does not shrink"),
                Some(encoded) => {
                    let (length, held) = (encoded.pages.len(), encoded.pages.capacity());
                    assert!(zeros > 0 && held <= length + length / 2, "{held} bytes for {length}");
                }
            }
        }
    }
}

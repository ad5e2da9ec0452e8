//! Size classes of values, and the last bytes of a value's slot.
//!
//! ```text
//!   slot of class C:  value (L bytes) | zeros | end record (64 bytes, at C)
//! ```

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, BLOCK_BYTES_MAX};
use kvdepot_core::{BlockLayout, Error, ErrorKind, NamespaceSpec, Result, VALUES_KIND};

/// The smallest class.
const CLASS_BYTES_MIN: u64 = 16 << 10;
/// Number of classes for each power of two, so that at most a quarter of a slot is wasted.
const STEPS: u64 = 4;
/// Length of the end record.
pub(super) const END_BYTES: u64 = 64;
/// The largest value.
pub const VALUE_BYTES_MAX: u64 = BLOCK_BYTES_MAX - BLOCK_ALIGN_BYTES;
const MAGIC: [u8; 8] = *b"KVDVALUE";

/// Returns the sizes of all classes, ascending. They are constant, so that values written under one configuration are
/// found under every other.
pub(super) fn class_sizes() -> Vec<u64> {
    let mut sizes = Vec::new();
    let mut step = CLASS_BYTES_MIN;
    let mut size = CLASS_BYTES_MIN;
    while size < VALUE_BYTES_MAX {
        sizes.push(size);
        if size >= step * 2 * STEPS {
            step *= 2;
        }
        size += step;
    }
    sizes.push(VALUE_BYTES_MAX);
    sizes
}

/// Returns the namespace of a class.
pub(super) fn spec(class_bytes: u64) -> Result<NamespaceSpec> {
    let facts = serde_json::json!({"kind": VALUES_KIND, "format": 1, "value_bytes_max": class_bytes});
    NamespaceSpec::new(&facts.to_string(), BlockLayout::new(vec![vec![class_bytes + END_BYTES]])?)
}

/// The end record of a value: its exact length, and when it was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) value_bytes: u64,
    /// Increases with every stored value. If a crash leaves two values under one key, the larger one counts.
    pub(super) stamp: u64,
    pub(super) hash: [u8; 16],
}

impl End {
    pub(super) fn encode(&self) -> [u8; END_BYTES as usize] {
        let mut out = [0; END_BYTES as usize];
        out[..8].copy_from_slice(&MAGIC);
        out[8..16].copy_from_slice(&self.value_bytes.to_le_bytes());
        out[16..24].copy_from_slice(&self.stamp.to_le_bytes());
        out[24..40].copy_from_slice(&self.hash);
        let crc64 = kvdepot_io::checksum::crc64(&out[..56]);
        out[56..].copy_from_slice(&crc64.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; END_BYTES as usize], class_bytes: u64, hash: [u8; 16]) -> Result<Self> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let end = Self { value_bytes: word(8), stamp: word(16), hash };
        let whole = bytes[..8] == MAGIC && word(56) == kvdepot_io::checksum::crc64(&bytes[..56]);
        if whole && bytes[24..40] == hash && end.value_bytes <= class_bytes {
            return Ok(end);
        }
        Err(Error::new(ErrorKind::Corrupt, "the end of a value's slot does not belong to it")
            .with("class_bytes", class_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_a_quarter_at_most_and_fit_a_mask() {
        let sizes = class_sizes();
        assert!(sizes.len() <= 64, "{}", sizes.len());
        assert_eq!(
            sizes[..9].iter().map(|s| s >> 10).collect::<Vec<_>>(),
            [16, 32, 48, 64, 80, 96, 112, 128, 160]
        );
        assert!(sizes.windows(2).all(|w| w[0] < w[1]));
        assert!(sizes.windows(2).skip(4).all(|w| (w[1] - w[0]) * 4 <= w[1]), "{sizes:?}");
        assert_eq!(sizes.last(), Some(&VALUE_BYTES_MAX));
        assert!(sizes.iter().all(|&s| spec(s).is_ok() && s.is_multiple_of(BLOCK_ALIGN_BYTES)));
    }

    #[test]
    fn an_end_record_belongs_to_one_value() {
        let end = End { value_bytes: 5, stamp: 6, hash: [7; 16] };
        let bytes = end.encode();
        assert_eq!(End::decode(&bytes, 16, [7; 16]).unwrap(), end);
        assert!(End::decode(&bytes, 16, [8; 16]).is_err() && End::decode(&bytes, 4, [7; 16]).is_err());
        for at in 0..bytes.len() {
            let mut rotten = bytes;
            rotten[at] ^= 1;
            assert!(End::decode(&rotten, 16, [7; 16]).is_err(), "bit at {at}");
        }
        assert!(End::decode(&[0; 64], 16, [0; 16]).is_err());
    }
}

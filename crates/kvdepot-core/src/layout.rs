//! Layout of a block: shards that move as one, each made of tensors, one after another without gaps.

use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{BLOCK_ALIGN_BYTES, BLOCK_BYTES_MAX, SHARDS_MAX, TENSORS_MAX};

/// Sizes of a block's tensors in bytes, shard by shard. Offsets count from the block's first byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// `shards[s][t]` = bytes of tensor `t` of shard `s`.
    shards: Vec<Vec<u64>>,
    /// `shard_starts[s]` = offset of shard `s`; one more entry than shards.
    shard_starts: Vec<u64>,
}

impl BlockLayout {
    /// Makes a layout from the tensor sizes of each shard, in bytes.
    pub fn new(shards: Vec<Vec<u64>>) -> Result<Self> {
        let bad = |what: &str| Error::new(ErrorKind::Config, what.to_owned());
        if shards.is_empty() || shards.len() > SHARDS_MAX {
            return Err(bad("a block must have 1 to 4096 shards").with("shards", shards.len()));
        }
        let tensors: usize = shards.iter().map(Vec::len).sum();
        if tensors > TENSORS_MAX {
            return Err(bad("a block has too many tensors")
                .with("tensors", tensors)
                .with("tensors_max", TENSORS_MAX));
        }
        let mut shard_starts = Vec::with_capacity(shards.len() + 1);
        let mut offset = 0u64;
        for (index, shard) in shards.iter().enumerate() {
            shard_starts.push(offset);
            if shard.is_empty() || shard.contains(&0) {
                return Err(
                    bad("a shard needs at least one tensor, each of at least one byte").with("shard", index)
                );
            }
            for &size in shard {
                offset = offset.checked_add(size).filter(|&o| o <= BLOCK_BYTES_MAX).ok_or_else(|| {
                    bad("a block is too large").with("bytes_max", BLOCK_BYTES_MAX).with("shard", index)
                })?;
            }
        }
        shard_starts.push(offset);
        Ok(Self { shards, shard_starts })
    }

    /// Makes a layout of equal shards, as the seeds spell it: `tensor_size_list` for each of `shard_count` shards.
    pub fn uniform(shard_count: usize, tensor_sizes_bytes: &[u64]) -> Result<Self> {
        if shard_count > SHARDS_MAX {
            return Err(Error::new(ErrorKind::Config, "a block must have 1 to 4096 shards")
                .with("shards", shard_count));
        }
        Self::new(vec![tensor_sizes_bytes.to_vec(); shard_count])
    }

    /// Returns the number of shards.
    pub fn shard_count(&self) -> usize {
        self.shards.len()
    }

    /// Returns the sizes of a shard's tensors, in bytes.
    pub fn tensor_sizes(&self, shard: usize) -> &[u64] {
        &self.shards[shard]
    }

    /// Returns the range of a shard's bytes in the block.
    pub fn shard_range(&self, shard: usize) -> Range<u64> {
        self.shard_starts[shard]..self.shard_starts[shard + 1]
    }

    /// Returns the number of bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        self.shard_starts[self.shards.len()]
    }

    /// Returns the number of bytes that a block takes in the pool and as payload of a file: whole pages.
    pub fn slot_bytes(&self) -> u64 {
        self.block_bytes().next_multiple_of(BLOCK_ALIGN_BYTES)
    }

    /// Returns the layout as a namespace spells it: runs of equal shards as `[count, [sizes…]]`.
    pub fn to_json(&self) -> serde_json::Value {
        let mut runs: Vec<(u64, &Vec<u64>)> = Vec::new();
        for shard in &self.shards {
            match runs.last_mut() {
                Some((count, sizes)) if *sizes == shard => *count += 1,
                _ => runs.push((1, shard)),
            }
        }
        serde_json::json!(runs)
    }

    /// Reads a layout that `to_json` wrote.
    pub fn from_json(value: &serde_json::Value) -> Result<Self> {
        let bad =
            || Error::new(ErrorKind::Config, "a layout is a list of [shard count, [tensor sizes in bytes]]");
        let mut shards = Vec::new();
        for run in value.as_array().ok_or_else(bad)? {
            let count = run.get(0).and_then(serde_json::Value::as_u64).ok_or_else(bad)?;
            let sizes = run.get(1).and_then(serde_json::Value::as_array).ok_or_else(bad)?;
            let sizes: Vec<u64> = sizes.iter().map(|s| s.as_u64()).collect::<Option<_>>().ok_or_else(bad)?;
            if count == 0 || count > (SHARDS_MAX - shards.len()) as u64 {
                return Err(bad().with("shards", count));
            }
            let count = usize::try_from(count).map_err(|_| bad())?;
            if sizes.len().saturating_mul(count) > TENSORS_MAX {
                return Err(bad().with("tensors_max", TENSORS_MAX));
            }
            shards.extend(std::iter::repeat_n(sizes, count));
        }
        Self::new(shards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_follow_sizes() {
        let layout = BlockLayout::new(vec![vec![100, 28], vec![4000]]).unwrap();
        assert_eq!(layout.shard_range(0), 0..128);
        assert_eq!(layout.shard_range(1), 128..4128);
        assert_eq!((layout.block_bytes(), layout.slot_bytes()), (4128, 8192));
        assert_eq!(BlockLayout::from_json(&layout.to_json()).unwrap(), layout);
    }

    #[test]
    fn nonsense_is_refused() {
        for shards in
            [vec![], vec![vec![]], vec![vec![0]], vec![vec![u64::MAX, 1]], vec![vec![1]; SHARDS_MAX + 1]]
        {
            assert_eq!(BlockLayout::new(shards).unwrap_err().kind(), ErrorKind::Config);
        }
        for text in ["[[0,[1]]]", "[[18446744073709551615,[1]]]", "{}", "[[1,[1.5]]]", "[[1,[\"1\"]]]"] {
            let value = serde_json::from_str(text).unwrap();
            assert!(BlockLayout::from_json(&value).is_err(), "{text}");
        }
    }
}

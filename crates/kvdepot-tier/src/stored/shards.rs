//! The lengths of shards, which the medium does not know: found by the checksums of a complete block.

use kvdepot_core::BlockLayout;
use kvdepot_io::checksum::prefix_with;

/// Returns the layout, a tensor for each shard, in which all shards of a block have these checksums. Only one has, except
/// for a chance of about 1 in 2^64 for each byte. `None`: none has, because the block is damaged.
pub(crate) fn divide(block: &[u8], checksums: &[u64]) -> Option<BlockLayout> {
    let (mut rest, mut shards) = (block, Vec::with_capacity(checksums.len()));
    for &checksum in checksums {
        let bytes = prefix_with(rest, checksum)?;
        rest = &rest[bytes..];
        shards.push(vec![bytes as u64]);
    }
    rest.is_empty().then(|| BlockLayout::new(shards).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use kvdepot_io::checksum::crc64;

    use super::*;

    #[test]
    fn shards_are_found_by_their_checksums() {
        let block: Vec<u8> = (0..9000).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for (block, sizes) in [
            (&block, vec![9000]),
            (&block, vec![3000, 3000, 3000]),
            (&block, vec![1, 8000, 999]),
            (&vec![0; 9000], vec![4096, 4096, 808]),
        ] {
            let mut at = 0;
            let piece = |size: &usize| {
                at += size;
                crc64(&block[at - size..at])
            };
            let mut checksums: Vec<u64> = sizes.iter().map(piece).collect();
            let layout = divide(block, &checksums).unwrap();
            let found: Vec<usize> = (0..layout.shard_count())
                .map(|shard| layout.tensor_sizes(shard).iter().sum::<u64>() as usize)
                .collect();
            assert_eq!(found, sizes);
            let mut damaged = block.clone();
            damaged[8500] ^= 1;
            assert_eq!(divide(&damaged, &checksums), None);
            checksums.push(crc64(b""));
            assert_eq!(divide(block, &checksums), None);
            checksums.truncate(sizes.len() - 1);
            assert_eq!(divide(block, &checksums), None);
        }
    }
}

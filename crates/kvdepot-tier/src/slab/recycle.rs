//! Decides which blocks of the oldest segment are written again before it is recycled: those used since they were
//! written, most recently used first, up to half a segment, so that space is always gained.

use kvdepot_core::BlockKey;

use super::index::Known;
use super::shape::Shape;

/// Returns the blocks to keep, out of all that lie in a segment.
pub(super) fn keep(shape: &Shape, mut blocks: Vec<(BlockKey, Known)>) -> Vec<(BlockKey, Known)> {
    blocks.retain(|(_, known)| known.used > 0);
    blocks.sort_unstable_by_key(|(_, known)| std::cmp::Reverse(known.used));
    let (mut left, budget) = (shape.segment_bytes / 2, shape.record_bytes_max());
    blocks.retain(|(_, known)| {
        let bytes = known.place.bytes();
        let fits = bytes <= left && bytes <= budget;
        left -= if fits { bytes } else { 0 };
        fits
    });
    blocks
}

#[cfg(test)]
mod tests {
    use kvdepot_core::{BlockHash, NamespaceId};

    use super::super::codec::PAGE;
    use super::super::index::Place;
    use super::*;

    #[test]
    fn the_last_used_are_kept_up_to_half_a_segment() {
        let shape = Shape { segment_bytes: 40 * PAGE, segments: 3, table_bytes: PAGE };
        let block = |n: u8, used: u32, pages: u32| {
            let key = BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash([n; 16]) };
            let place = Place { segment: 0, page: 0, pages, tag: 0 };
            (key, Known { place, used, unproven: false })
        };
        let kept = keep(
            &shape,
            vec![block(1, 3, 8), block(2, 0, 1), block(3, 9, 8), block(4, 7, 8), block(5, 1, 4)],
        );
        let kept: Vec<u8> = kept.iter().map(|(key, _)| key.hash.0[0]).collect();
        assert_eq!(kept, [3, 4, 5]);
    }
}

//! Turns ops into ranges: merges neighbours, and cuts at the ends of allocations and at the borders of memory that is or
//! will be registered.

use crate::CopyOp;
use crate::cuda::pools::Piece;

/// A contiguous copy whose host side is either completely registered or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) device: u64,
    pub(crate) host: usize,
    pub(crate) len: usize,
    /// The device address of the host side, if it is registered.
    pub(crate) mapped: Option<u64>,
}

/// Merges ops that are adjacent on both sides, and cuts where an allocation of device memory ends: the driver refuses a
/// copy that spans two, even if they are adjacent. `end_of(address)` returns the end of an address's allocation; an op
/// in an unknown one stays as it is.
pub(crate) fn merge(ops: &[CopyOp], mut end_of: impl FnMut(u64) -> Option<u64>) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    // Of the last range's allocation.
    let mut end = None;
    for op in ops {
        let mut rest = Range { device: op.device, host: op.host as usize, len: op.len, mapped: None };
        while rest.len > 0 {
            let follows = |last: &Range| {
                last.device + last.len as u64 == rest.device && last.host + last.len == rest.host
            };
            let grows = end.is_some_and(|end| rest.device < end) && ranges.last().is_some_and(follows);
            if !grows {
                end = end_of(rest.device).filter(|&end| rest.device < end);
            }
            let room = end.map_or(usize::MAX, |end| usize::try_from(end - rest.device).unwrap_or(usize::MAX));
            let (part, left) = cut(rest, room);
            match ranges.last_mut().filter(|_| grows) {
                Some(last) => last.len += part.len,
                None => ranges.push(part),
            }
            rest = left;
        }
    }
    ranges
}

/// Cuts ranges at the borders of pieces (ascending), and marks the registered parts.
pub(crate) fn split(ranges: &[Range], pieces: &[Piece]) -> Vec<Range> {
    let mut parts = Vec::with_capacity(ranges.len());
    for range in ranges {
        let mut rest = *range;
        while rest.len > 0 {
            let next = pieces.partition_point(|piece| piece.base <= rest.host);
            let covering = next.checked_sub(1).map(|at| pieces[at]);
            let covering = covering.filter(|piece| rest.host < piece.base + piece.len);
            let end = match covering {
                Some(piece) => piece.base + piece.len,
                None => pieces.get(next).map_or(usize::MAX, |piece| piece.base),
            };
            let mapped = covering.and_then(|piece| Some(piece.device? + (rest.host - piece.base) as u64));
            let (part, left) = cut(rest, end - rest.host);
            parts.push(Range { mapped, ..part });
            rest = left;
        }
    }
    parts
}

/// Returns the first `len` bytes of a range, and the rest.
fn cut(range: Range, len: usize) -> (Range, Range) {
    let len = len.min(range.len);
    let rest = Range {
        device: range.device + len as u64,
        host: range.host + len,
        len: range.len - len,
        mapped: range.mapped.map(|mapped| mapped + len as u64),
    };
    (Range { len, ..range }, rest)
}

/// The limits of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceLimits {
    pub(crate) bytes: usize,
    pub(crate) ranges: usize,
    pub(crate) tiles: usize,
    /// Size of a tile in bytes.
    pub(crate) tile_bytes: usize,
}

/// Cuts ranges into pieces within limits. Each piece has at least one range.
pub(crate) fn pieces(ranges: &[Range], limits: &PieceLimits) -> Vec<Vec<Range>> {
    let mut pieces = Vec::new();
    let (mut piece, mut bytes, mut tiles) = (Vec::new(), 0, 0);
    for range in ranges {
        let mut rest = *range;
        while rest.len > 0 {
            let room = (limits.bytes - bytes).min((limits.tiles - tiles) * limits.tile_bytes);
            let room = if piece.len() < limits.ranges { room } else { 0 };
            // Cut at the end of a tile, or not at all: bad alignment would cost more than an additional piece.
            let room = if rest.len <= room { rest.len } else { room - room % limits.tile_bytes };
            let (part, left) = cut(rest, room);
            if part.len > 0 {
                piece.push(part);
                bytes += part.len;
                tiles += part.len.div_ceil(limits.tile_bytes);
            }
            if left.len > 0 {
                pieces.push(std::mem::take(&mut piece));
                (bytes, tiles) = (0, 0);
            }
            rest = left;
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(ranges: &[Range]) -> Vec<(u64, usize)> {
        let bytes = |r: &Range| (0..r.len).map(|i| (r.device + i as u64, r.host + i)).collect::<Vec<_>>();
        ranges.iter().flat_map(bytes).collect()
    }

    fn op(device: u64, host: usize, len: usize) -> CopyOp {
        CopyOp { device, host: host as *mut u8, len }
    }

    #[test]
    fn neighbours_merge_inside_of_one_allocation_only() {
        let ops = [op(100, 1000, 10), op(110, 1010, 10), op(120, 1020, 10), op(130, 1031, 10)];
        let lens = |ranges: Vec<Range>| ranges.iter().map(|range| range.len).collect::<Vec<_>>();
        assert_eq!(lens(merge(&ops, |_| Some(1000))), [30, 10]);
        assert_eq!(lens(merge(&ops, |address| Some(if address < 120 { 120 } else { 140 }))), [20, 10, 10]);
        assert_eq!(lens(merge(&ops, |_| None)), [10; 4]);
    }

    #[test]
    fn an_op_over_several_allocations_is_cut_where_they_end() {
        let ends = |address: u64| Some(if address < 115 { 115 } else { 118 }).filter(|&end| address < end);
        let cut = merge(&[op(100, 1000, 10), op(110, 1010, 30)], ends);
        let pairs: Vec<_> = cut.iter().map(|range| (range.device, range.host, range.len)).collect();
        // Behind 118 there is none that the driver knows.
        assert_eq!(pairs, [(100, 1000, 15), (115, 1015, 3), (118, 1018, 22)]);
    }

    proptest! {
        /// However ranges are merged, split and cut, each byte still has the same target, once and in order.
        #[test]
        fn every_byte_is_kept(
            ops in prop::collection::vec((0u64..4, 0usize..60, 0usize..50), 0..20),
            gaps in prop::collection::vec((1usize..40, 1usize..60), 0..6),
            bytes_max in 16usize..100,
            tiles_max in 1usize..5,
            ranges_max in 1usize..6,
            allocation in 1u64..200,
        ) {
            let (mut device, mut host) = (1 << 20, 4096);
            let ops: Vec<CopyOp> = ops.into_iter().map(|(skip, hole, len)| {
                device += skip % 2;
                host += if hole % 3 == 0 { 0 } else { hole };
                let op = op(device, host, len);
                device += len as u64;
                host += len;
                op
            }).collect();
            let mut at = 4000;
            let registered: Vec<Piece> = gaps.into_iter().map(|(gap, len)| {
                let device = (gap % 3 > 0).then_some(1 << 40 | (at + gap) as u64);
                let piece = Piece { base: at + gap, len, device };
                at += gap + len;
                piece
            }).collect();
            let wanted = bytes_of(&merge(&ops, |_| None));
            let merged = merge(&ops, |address| Some(address - address % allocation + allocation));
            for range in &merged {
                prop_assert!(range.device % allocation + range.len as u64 <= allocation);
            }
            let split = split(&merged, &registered);
            prop_assert_eq!(&bytes_of(&split), &wanted);
            let limits = PieceLimits { bytes: bytes_max, ranges: ranges_max, tiles: tiles_max, tile_bytes: 16 };
            let cut = pieces(&split, &limits);
            prop_assert_eq!(&bytes_of(&cut.concat()), &wanted);
            for piece in &cut {
                prop_assert!(piece.iter().map(|r| r.len).sum::<usize>() <= bytes_max);
                prop_assert!(piece.iter().map(|r| r.len.div_ceil(16)).sum::<usize>() <= tiles_max);
                prop_assert!(piece.len() <= ranges_max);
            }
            for range in cut.iter().flatten() {
                let covering = |at: usize| registered.iter().find(|p| p.base <= at && at < p.base + p.len);
                for at in range.host..range.host + range.len {
                    let here = covering(at);
                    prop_assert_eq!(here.map(|p| p.base), covering(range.host).map(|p| p.base));
                    let mapped = here.and_then(|piece| Some(piece.device? + (at - piece.base) as u64));
                    prop_assert_eq!(mapped, range.mapped.map(|m| m + (at - range.host) as u64));
                }
            }
        }
    }
}

//! Plans the copies of blocks: where each tensor lies in the engine's memory and in the block's slot.

use std::ops::Range;

use kvdepot_copy::{CopyBatch, CopyOp};
use kvdepot_core::limits::PAGE_PIECES_MAX;
use kvdepot_core::{BlockHash, BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::MemRun;

/// The location of the engine's pages: piece `i` of page `p` is at `bases[i] + p * strides[i]`, with pieces counted
/// over all shards.
///
/// A page's pieces are the layout's tensors, unless the engine's memory is cut differently. The block's bytes are the
/// same for every cut, because a shard is the concatenation of its pieces.
#[derive(Clone, Debug)]
pub struct PageTable {
    bases: Vec<u64>,
    strides: Vec<i64>,
    sizes: Vec<u64>,
    /// `shard_starts[s]` is the first piece of shard `s`; one more entry than shards.
    shard_starts: Vec<usize>,
    page_count: u64,
}

impl PageTable {
    /// Checks that there is a base and a stride for each piece. `sizes` are the sizes of the pieces in bytes, which add
    /// up to the layout's shards in order; `None` for the layout's tensors.
    pub fn new(
        layout: &BlockLayout,
        bases: Vec<u64>,
        strides: Vec<i64>,
        page_count: u64,
        sizes: Option<Vec<u64>>,
    ) -> Result<Self> {
        let (sizes, shard_starts) = match sizes {
            Some(sizes) => {
                let starts = shard_starts(layout, &sizes)?;
                (sizes, starts)
            }
            None => tensors(layout),
        };
        if bases.len() != sizes.len() || strides.len() != sizes.len() {
            return Err(Error::new(
                ErrorKind::Config,
                "pages need one base and one stride for each piece: a tensor of the layout, or a size that was given",
            )
            .with("pieces", sizes.len())
            .with("bases", bases.len())
            .with("strides", strides.len()));
        }
        Ok(Self { bases, strides, sizes, shard_starts, page_count })
    }

    /// Fails for a page that the engine does not have.
    pub fn check(&self, page: i64) -> Result<()> {
        if u64::try_from(page).is_ok_and(|page| page < self.page_count) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Config, "no such page")
            .with("page", page)
            .with("page_count", self.page_count))
    }

    /// Returns the runs of memory that hold the pages: address and length, disjoint and ascending.
    pub(crate) fn memory(&self) -> Vec<(u64, u64)> {
        let last = i64::try_from(self.page_count.saturating_sub(1)).unwrap_or(i64::MAX);
        let mut runs: Vec<(u64, u64)> = self
            .sizes
            .iter()
            .enumerate()
            .map(|(piece, &size)| {
                let ends = [self.address(piece, 0), self.address(piece, last)];
                (ends[0].min(ends[1]), ends[0].max(ends[1]).saturating_add(size))
            })
            .collect();
        runs.sort_unstable();
        let mut apart: Vec<(u64, u64)> = Vec::new();
        for (start, end) in runs {
            match apart.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => apart.push((start, end)),
            }
        }
        apart.into_iter().map(|(start, end)| (start, end - start)).collect()
    }

    fn address(&self, piece: usize, page: i64) -> u64 {
        self.bases[piece].wrapping_add_signed(page.wrapping_mul(self.strides[piece]))
    }

    fn pieces(&self, shard: usize) -> Range<usize> {
        self.shard_starts[shard]..self.shard_starts[shard + 1]
    }
}

/// Returns the layout's tensors as pieces, and the first piece of each shard.
fn tensors(layout: &BlockLayout) -> (Vec<u64>, Vec<usize>) {
    let (mut sizes, mut starts) = (Vec::new(), vec![0]);
    for shard in 0..layout.shard_count() {
        sizes.extend_from_slice(layout.tensor_sizes(shard));
        starts.push(sizes.len());
    }
    (sizes, starts)
}

/// Returns the first piece of each shard. Pieces of these sizes fill the layout's shards one after another.
fn shard_starts(layout: &BlockLayout, sizes: &[u64]) -> Result<Vec<usize>> {
    let bad = |why: &str| Error::new(ErrorKind::Config, why.to_owned());
    if sizes.len() > PAGE_PIECES_MAX {
        return Err(bad("a page is in too many pieces")
            .with("pieces", sizes.len())
            .with("pieces_max", PAGE_PIECES_MAX));
    }
    let (mut starts, mut piece) = (vec![0], 0);
    for shard in 0..layout.shard_count() {
        let range = layout.shard_range(shard);
        let mut left = range.end - range.start;
        while left > 0 {
            let size =
                sizes.get(piece).copied().filter(|&size| size > 0 && size <= left).ok_or_else(|| {
                    bad("the pieces of a page do not add up to its shards")
                        .with("shard", shard)
                        .with("bytes_left", left)
                        .with("piece", piece)
                })?;
            left -= size;
            piece += 1;
        }
        starts.push(piece);
    }
    if piece < sizes.len() {
        return Err(bad("a page has more pieces than its shards have bytes")
            .with("pieces", sizes.len())
            .with("used", piece));
    }
    Ok(starts)
}

/// One block of a task.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) hash: BlockHash,
    pub(crate) source: Source,
}

/// The location of a block's bytes in the engine.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// All shards in one page.
    Page(i64),
    /// Some shards: shard, index of the caller's entry, address of each tensor.
    Shards(Vec<(usize, usize, Vec<u64>)>),
}

impl Item {
    /// Returns the shards of this block that the task moves.
    pub(crate) fn shards(&self, layout: &BlockLayout) -> Vec<usize> {
        match &self.source {
            Source::Page(_) => (0..layout.shard_count()).collect(),
            Source::Shards(shards) => shards.iter().map(|&(shard, ..)| shard).collect(),
        }
    }

    /// Returns whether the task moves all shards of this block.
    pub(crate) fn is_whole(&self, layout: &BlockLayout) -> bool {
        match &self.source {
            Source::Page(_) => true,
            Source::Shards(shards) => shards.len() == layout.shard_count(),
        }
    }

    /// Appends the copies of one shard to the batch's current group. Returns `false` if the task does not move it.
    pub(crate) fn plan(
        &self,
        layout: &BlockLayout,
        pages: Option<&PageTable>,
        shard: usize,
        slot: &[MemRun],
        batch: &mut CopyBatch,
    ) -> bool {
        let mut offset = layout.shard_range(shard).start as usize;
        let mut copy = |mut device: u64, size: u64| {
            let end = offset + size as usize;
            for run in pieces_of(slot, offset..end) {
                push(batch, CopyOp { device, host: run.ptr, len: run.len });
                device += run.len as u64;
            }
            offset = end;
        };
        match &self.source {
            Source::Page(page) => {
                let Some(pages) = pages else { return false };
                for piece in pages.pieces(shard) {
                    copy(pages.address(piece, *page), pages.sizes[piece]);
                }
            }
            Source::Shards(shards) => {
                let Some((.., addresses)) = shards.iter().find(|(have, ..)| *have == shard) else {
                    return false;
                };
                for (&address, &size) in addresses.iter().zip(layout.tensor_sizes(shard)) {
                    copy(address, size);
                }
            }
        }
        true
    }
}

/// Returns the memory of some bytes of a slot, whose runs hold its bytes in order.
fn pieces_of(slot: &[MemRun], bytes: Range<usize>) -> impl Iterator<Item = MemRun> + '_ {
    let mut end = 0;
    slot.iter().filter_map(move |run| {
        let start = end;
        end += run.len;
        let (from, to) = (bytes.start.max(start), bytes.end.min(end));
        (from < to).then(|| MemRun { ptr: run.ptr.wrapping_add(from - start), len: to - from })
    })
}

/// Appends a copy, merged with the previous one of the group if both sides are adjacent.
fn push(batch: &mut CopyBatch, op: CopyOp) {
    let group_start = batch.ends.last().copied().unwrap_or(0);
    if batch.ops.len() > group_start
        && let Some(last) = batch.ops.last_mut()
        && last.device + last.len as u64 == op.device
        && last.host.wrapping_add(last.len) == op.host
    {
        last.len += op.len;
        return;
    }
    batch.ops.push(op);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(shards: &[&[u64]]) -> BlockLayout {
        BlockLayout::new(shards.iter().map(|sizes| sizes.to_vec()).collect()).unwrap()
    }

    fn table(layout: &BlockLayout, sizes: &[u64]) -> Result<PageTable> {
        let (bases, strides) = (vec![4096; sizes.len()], vec![1024; sizes.len()]);
        PageTable::new(layout, bases, strides, 2, Some(sizes.to_vec()))
    }

    #[test]
    fn pieces_are_the_layouts_tensors_unless_sizes_are_given() {
        let layout = layout(&[&[64, 32], &[96]]);
        let whole = PageTable::new(&layout, vec![0; 3], vec![0; 3], 1, None).unwrap();
        assert_eq!((whole.pieces(0), whole.pieces(1)), (0..2, 2..3));
        let cut = table(&layout, &[16, 80, 32, 32, 32]).unwrap();
        assert_eq!((cut.pieces(0), cut.pieces(1)), (0..2, 2..5));
        assert_eq!(cut.memory(), vec![(4096, 1024 + 80)]);
    }

    #[test]
    fn a_slot_s_bytes_lie_in_its_runs_one_after_another() {
        let mut memory = [0_u8; 100];
        let base = memory.as_mut_ptr();
        let slot = [(40, 10), (0, 5), (90, 10)].map(|(at, len)| MemRun { ptr: base.wrapping_add(at), len });
        let pieces = |bytes: Range<usize>| {
            let pieces = pieces_of(&slot, bytes).map(|run| (run.ptr.addr() - base.addr(), run.len));
            pieces.collect::<Vec<_>>()
        };
        assert_eq!(pieces(0..25), [(40, 10), (0, 5), (90, 10)]);
        assert_eq!(pieces(8..12), [(48, 2), (0, 2)]);
        assert_eq!(pieces(10..15), [(0, 5)]);
        assert_eq!(pieces(15..16), [(90, 1)]);
        assert_eq!(pieces(3..3), []);
    }

    #[test]
    fn pieces_that_do_not_fill_the_shards_exactly_are_refused() {
        let layout = layout(&[&[64, 32], &[96]]);
        for sizes in [&[96, 95][..], &[97, 95], &[96, 96, 1], &[64, 64, 64], &[96, 0, 96], &[96], &[]] {
            assert_eq!(table(&layout, sizes).unwrap_err().kind(), ErrorKind::Config, "{sizes:?}");
        }
        let many = vec![1; PAGE_PIECES_MAX + 1];
        let large = BlockLayout::new(vec![vec![many.len() as u64]]).unwrap();
        assert_eq!(table(&large, &many).unwrap_err().kind(), ErrorKind::Config);
        let unequal = PageTable::new(&layout, vec![0; 2], vec![0; 3], 1, None);
        assert_eq!(unequal.unwrap_err().kind(), ErrorKind::Config);
    }
}

//! From blocks to copies: where each tensor lies in the engine's memory and in the block's slot.

use kvdepot_copy::{CopyBatch, CopyOp};
use kvdepot_core::{BlockHash, BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::SlotBuf;

/// Where the engine's pages lie: tensor `t` of page `p` at `bases[t] + p * strides[t]`, tensors counted over all shards.
#[derive(Clone, Debug)]
pub struct PageTable {
    bases: Vec<u64>,
    strides: Vec<i64>,
    /// The first tensor of each shard.
    firsts: Vec<usize>,
    page_count: u64,
}

impl PageTable {
    /// Checks that there is a base and a stride for each tensor of the layout.
    pub fn new(layout: &BlockLayout, bases: Vec<u64>, strides: Vec<i64>, page_count: u64) -> Result<Self> {
        let mut tensors = 0;
        let firsts = (0..layout.shard_count())
            .map(|shard| {
                let first = tensors;
                tensors += layout.tensor_sizes(shard).len();
                first
            })
            .collect();
        if bases.len() != tensors || strides.len() != tensors {
            return Err(Error::new(
                ErrorKind::Config,
                "pages need one base and one stride for each tensor of the layout",
            )
            .with("tensors", tensors)
            .with("bases", bases.len())
            .with("strides", strides.len()));
        }
        Ok(Self { bases, strides, firsts, page_count })
    }

    /// Refuses a page that the engine does not have.
    pub fn check(&self, page: i64) -> Result<()> {
        if u64::try_from(page).is_ok_and(|page| page < self.page_count) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Config, "no such page")
            .with("page", page)
            .with("page_count", self.page_count))
    }

    /// Runs of memory that hold the pages: address and length, apart from each other, ascending.
    pub(crate) fn memory(&self, layout: &BlockLayout) -> Vec<(u64, u64)> {
        let sizes = (0..layout.shard_count()).flat_map(|shard| layout.tensor_sizes(shard).iter().copied());
        let last = i64::try_from(self.page_count.saturating_sub(1)).unwrap_or(i64::MAX);
        let mut runs: Vec<(u64, u64)> = sizes
            .enumerate()
            .map(|(tensor, size)| {
                let ends = [self.address(tensor, 0), self.address(tensor, last)];
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

    fn address(&self, tensor: usize, page: i64) -> u64 {
        self.bases[tensor].wrapping_add_signed(page.wrapping_mul(self.strides[tensor]))
    }
}

/// One block of a task.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) hash: BlockHash,
    pub(crate) source: Source,
}

/// Where a block's bytes are in the engine.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// All shards in one page.
    Page(i64),
    /// Some shards: `(shard, index of the caller's entry, address of each tensor)`.
    Shards(Vec<(usize, usize, Vec<u64>)>),
}

impl Item {
    /// Shards that the task moves of this block.
    pub(crate) fn shards(&self, layout: &BlockLayout) -> Vec<usize> {
        match &self.source {
            Source::Page(_) => (0..layout.shard_count()).collect(),
            Source::Shards(shards) => shards.iter().map(|&(shard, ..)| shard).collect(),
        }
    }

    /// Appends the copies of one shard to the batch's current group; nothing if the task does not move it.
    pub(crate) fn plan(
        &self,
        layout: &BlockLayout,
        pages: Option<&PageTable>,
        shard: usize,
        slot: &SlotBuf,
        batch: &mut CopyBatch,
    ) -> bool {
        let sizes = layout.tensor_sizes(shard);
        let mut offset = layout.shard_range(shard).start as usize;
        let addresses: &mut dyn FnMut(usize) -> u64 = match &self.source {
            Source::Page(page) => {
                let Some(pages) = pages else { return false };
                let first = pages.firsts[shard];
                &mut move |tensor| pages.address(first + tensor, *page)
            }
            Source::Shards(shards) => {
                let Some((.., addresses)) = shards.iter().find(|(have, ..)| *have == shard) else {
                    return false;
                };
                &mut move |tensor| addresses[tensor]
            }
        };
        for (tensor, &size) in sizes.iter().enumerate() {
            let mut device = addresses(tensor);
            for run in slot.slice(offset, offset + size as usize) {
                push(batch, CopyOp { device, host: run.ptr, len: run.len });
                device += run.len as u64;
            }
            offset += size as usize;
        }
        true
    }
}

/// Appends a copy, merged into the one before where both sides go on without a gap and the group is the same.
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

//! A ledger left behind by a depot: finds the blocks that are proven by their checksums against the pool's memory.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvdepot_core::limits::{NAMESPACE_SPEC_BYTES_MAX, NAMESPACES_MAX, POOL_EXTENT_BYTES, POOL_REGIONS_MAX};
use kvdepot_core::machine::Whole;
use kvdepot_core::runs::Run;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::checksum::crc64_slot;

use super::layout::{
    HEAD_CHECKSUM, HEAD_CLIENTS, HEAD_HOLDS, HEAD_MAGIC, HEAD_NAMESPACES, HEAD_POOL_BYTES, HEAD_RECORDS,
    HEAD_RECORDS_MAX, HEAD_REGIONS, HEAD_REGIONS_CHECKSUM, HEAD_SALT, HEAD_VERSION, MAGIC, NAMESPACE_BYTES,
    NAMESPACE_CHECKSUM, NAMESPACE_EPOCH, NAMESPACE_TEXT, RECORD_WORDS, REGIONS_NUMBER, VERSION, block_of,
    checksum, clients_of, epoch_of, namespace_at, record_at, records_max, region_at, region_of,
    text_checksum,
};
use crate::pool::{PoolMapping, PoolRegion, SharedWords, region_bytes};

/// Largest number of threads that read the pool.
const THREADS_MAX: usize = 8;
/// Number of blocks that a thread takes at a time.
const PIECE: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct LeftLedger {
    words: SharedWords,
    pool_bytes: u64,
    regions: Vec<PoolRegion>,
    salt: u64,
}

impl LeftLedger {
    /// Opens the ledger. Refuses one of another version, and one that is not valid any more.
    pub fn open(fd: OwnedFd) -> Result<Self> {
        let words = SharedWords::map(fd)?;
        let bad = |what: &'static str| Error::new(ErrorKind::Corrupt, what);
        if words.words().len() < record_at(0) {
            return Err(bad("the ledger is cut off").with("words", words.words().len()));
        }
        let get = |at: usize| words.words()[at].load(Ordering::Acquire);
        let (magic, version, salt) = (get(HEAD_MAGIC), get(HEAD_VERSION), get(HEAD_SALT));
        if magic != MAGIC || version != VERSION {
            return Err(Error::new(ErrorKind::Version, "the ledger of the depot before has another version")
                .with("version", version)
                .with("known", VERSION));
        }
        let (of_bytes, records) = (get(HEAD_POOL_BYTES), get(HEAD_RECORDS_MAX));
        if get(HEAD_CHECKSUM) != checksum(salt, 0, &[magic, version, of_bytes, salt, records]) {
            return Err(bad("the head of the ledger is damaged"));
        }
        if words.words().len() < record_at(records_max(of_bytes)) {
            return Err(bad("the ledger is cut off").with("words", words.words().len()));
        }
        if get(HEAD_HOLDS) != 1 {
            return Err(bad("the ledger was closed before its depot ended"));
        }
        let count = usize::try_from(get(HEAD_REGIONS)).unwrap_or(usize::MAX).min(POOL_REGIONS_MAX);
        let said: Vec<u64> = (region_at(0)..region_at(count)).map(get).collect();
        let regions: Option<Vec<_>> = said.as_chunks::<2>().0.iter().map(|&words| region_of(words)).collect();
        let is_right = get(HEAD_REGIONS_CHECKSUM) == checksum(salt, REGIONS_NUMBER, &said);
        let regions = regions.filter(|regions| is_right && region_bytes(regions).ok() == Some(of_bytes));
        let regions =
            regions.ok_or_else(|| bad("the list of the pool's regions in the ledger is damaged"))?;
        Ok(Self { words, pool_bytes: of_bytes, regions, salt })
    }

    /// Returns the size of its pool in bytes.
    pub const fn pool_bytes(&self) -> u64 {
        self.pool_bytes
    }

    /// Returns the regions of that pool.
    pub fn regions(&self) -> &[PoolRegion] {
        &self.regions
    }

    /// Returns the number of clients that could copy when it was left.
    pub fn clients(&self) -> u32 {
        clients_of(self.salt, self.get(HEAD_CLIENTS))
    }

    fn get(&self, at: usize) -> u64 {
        self.words.words()[at].load(Ordering::Acquire)
    }

    fn count(&self, at: usize, max: usize) -> usize {
        usize::try_from(self.get(at)).unwrap_or(usize::MAX).min(max)
    }

    /// Returns the fingerprinted text and the epoch of each namespace with a valid entry.
    pub(crate) fn namespaces(&self) -> Vec<(String, u32)> {
        (0..self.count(HEAD_NAMESPACES, NAMESPACES_MAX)).filter_map(|number| self.namespace(number)).collect()
    }

    fn namespace(&self, number: usize) -> Option<(String, u32)> {
        let at = namespace_at(number);
        let bytes = self.count(at + NAMESPACE_BYTES, NAMESPACE_SPEC_BYTES_MAX);
        let words: Vec<u64> = (0..bytes.div_ceil(8)).map(|n| self.get(at + NAMESPACE_TEXT + n)).collect();
        if self.get(at + NAMESPACE_CHECKSUM) != text_checksum(self.salt, number, bytes, &words) {
            return None;
        }
        let epoch = epoch_of(self.salt, number, self.get(at + NAMESPACE_EPOCH))?;
        let mut text: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        text.truncate(bytes);
        Some((String::from_utf8(text).ok()?, epoch))
    }

    /// Returns the blocks with valid records, whatever their bytes in the pool.
    pub(crate) fn records(&self) -> Vec<Whole> {
        (0..self.count(HEAD_RECORDS, records_max(self.pool_bytes)))
            .filter_map(|slot| self.record(slot))
            .collect()
    }

    fn record(&self, slot: usize) -> Option<Whole> {
        let at = record_at(slot);
        let sum = self.get(at);
        if sum == 0 {
            return None;
        }
        let mut words = [0; RECORD_WORDS - 1];
        words.iter_mut().enumerate().for_each(|(n, word)| *word = self.get(at + 1 + n));
        (checksum(self.salt, slot, &words) == sum).then(|| block_of(slot, &words, self.pool_bytes)).flatten()
    }
}

/// Returns those of the blocks whose bytes in the pool match the recorded checksum. `progress` is called with the
/// number of blocks read.
pub(crate) fn prove(
    blocks: Vec<Whole>,
    pool: &std::sync::Arc<PoolMapping>,
    progress: &(dyn Fn(usize) + Sync),
) -> Vec<Whole> {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let work = || {
        let mut proved = Vec::new();
        loop {
            let from = next.fetch_add(PIECE, Ordering::Relaxed);
            let Some(piece) = blocks.get(from..(from + PIECE).min(blocks.len())).filter(|it| !it.is_empty())
            else {
                return proved;
            };
            proved
                .extend(piece.iter().enumerate().filter(|(_, it)| is_right(it, pool)).map(|(n, _)| from + n));
            progress(from + piece.len());
        }
    };
    let mut proved: Vec<usize> = std::thread::scope(|scope| {
        // If no thread can be started, the work is done here.
        let others: Vec<_> = (1..threads)
            .filter_map(|_| {
                let thread = std::thread::Builder::new().name("kvdepot-recover".to_owned());
                thread.spawn_scoped(scope, work).ok()
            })
            .collect();
        let mut proved = work();
        for thread in others {
            proved.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        proved
    });
    proved.sort_unstable();
    proved.into_iter().map(|at| blocks[at].clone()).collect()
}

fn is_right(block: &Whole, pool: &std::sync::Arc<PoolMapping>) -> bool {
    let Ok(slot) = pool.slot(&block.runs) else { return false };
    usize::try_from(block.block_bytes).ok().and_then(|bytes| crc64_slot(&slot, 0, bytes)) == Some(block.crc64)
}

/// Removes blocks whose places overlap with an earlier block's. Returns the parts of the pool without a block, in
/// pieces that lie in one extent and one region each.
pub(crate) fn places(blocks: &mut Vec<Whole>, regions: &[u64]) -> Vec<Run> {
    let mut ends = Vec::with_capacity(regions.len());
    let mut pool_bytes = 0;
    for bytes in regions {
        pool_bytes += bytes;
        ends.push(pool_bytes);
    }
    let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
    blocks.retain(|block| {
        let mut own: Vec<Run> = Vec::new();
        for &run in &block.runs {
            let before = taken.range(..run.end()).next_back();
            if before.is_some_and(|(_, &end)| end > run.offset)
                || own.iter().any(|it| it.offset < run.end() && run.offset < it.end())
            {
                return false;
            }
            own.push(run);
        }
        taken.extend(own.iter().map(|run| (run.offset, run.end())));
        true
    });
    let mut gaps = Vec::new();
    let mut from = 0;
    for (start, end) in taken.into_iter().chain([(pool_bytes, pool_bytes)]) {
        while from < start {
            let region_end = ends[ends.partition_point(|&end| end <= from)];
            let stop = start.min(region_end).min((from / POOL_EXTENT_BYTES + 1) * POOL_EXTENT_BYTES);
            gaps.push(Run { offset: from, len: stop - from });
            from = stop;
        }
        from = from.max(end);
    }
    gaps
}

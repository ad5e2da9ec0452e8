//! P1: a write-back that fails leaves a file's bytes in the page cache only, where they count as clean. What a later tier
//! takes from there must not be undone by a power loss.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::mapped::{Medium, MemoryMedium, Piece, Recorded};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{DaxConfig, DaxTier, Tier};

const BYTES: usize = 1 << 20;

/// A file as the kernel keeps it: writes go to the cache, and a flush takes them to the disk, or fails and forgets them.
#[derive(Clone, Debug)]
struct CachedFile {
    cache: MemoryMedium,
    disk: MemoryMedium,
    fails: Arc<AtomicBool>,
}

impl CachedFile {
    fn new() -> Self {
        let medium = || MemoryMedium::new(vec![0; BYTES]);
        Self { cache: medium(), disk: medium(), fails: Arc::default() }
    }

    fn open(&self) -> Bench {
        let config =
            DaxConfig { put_workers: 1, open_wait: crate::dax_media::HANG, ..DaxConfig::new("memory") };
        Bench::new(Arc::new(DaxTier::open_on(config, Arc::new(self.clone())).unwrap()) as Arc<dyn Tier>)
    }

    /// The machine loses its power and is started again.
    fn without_cache(&self) -> Self {
        let medium = || MemoryMedium::new(self.disk.content());
        Self { cache: medium(), disk: medium(), fails: Arc::default() }
    }
}

impl Medium for CachedFile {
    fn path(&self) -> &Path {
        Path::new("file")
    }

    fn bytes(&self) -> u64 {
        BYTES as u64
    }

    fn is_memory(&self) -> bool {
        false
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.cache.read(at, out)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.cache.write(at, bytes)
    }

    fn read_pieces(&self, at: u64, pieces: &[Piece<'_>], checksums: Option<&mut Vec<u64>>) -> Result<()> {
        self.cache.read_pieces(at, pieces, checksums)
    }

    fn write_piece(&self, at: u64, piece: Piece<'_>) -> Result<u64> {
        self.cache.write_piece(at, piece)
    }

    fn persist(&self) -> Result<()> {
        let log = self.cache.log();
        let flushed = log.iter().rposition(|record| *record == Recorded::Persist).map_or(0, |last| last + 1);
        // From here on these pages are clean, whatever became of them.
        self.cache.persist()?;
        if self.fails.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Io, "the disk does not take it"));
        }
        for record in &log[flushed..] {
            if let Recorded::Write { at, bytes } = record {
                self.disk.write(*at, bytes)?;
            }
        }
        Ok(())
    }
}

#[test]
fn a_reset_that_is_in_the_page_cache_only_is_not_undone() {
    let file = CachedFile::new();
    let mut bench = file.open();
    bench.write_all(4);
    let before = bench.epoch;
    file.fails.store(true, Ordering::SeqCst);
    assert!(bench.tier.advance_and_wait(&bench.spec, 0).is_err());
    drop(bench);
    // The depot is restarted, the machine is not: it finds the reset in the cache.
    file.fails.store(false, Ordering::SeqCst);
    bench = file.open();
    let epoch = bench.epoch;
    assert!(epoch > before);
    assert!((0..4).all(|n| bench.read(n).is_err()));
    drop(bench);
    bench = file.without_cache().open();
    assert!(bench.epoch >= epoch, "epoch {} came back from before {epoch}", bench.epoch);
    assert!((0..4).all(|n| bench.read(n).is_err()), "a block from before the reset");
}

//! The Slab tier compared with one file per block and with bare O_DIRECT on the same disk, in turns, with the processor
//! time of each; and how long a start takes with many blocks: `cargo run --release -p kvdepot-tier --example slab_rates
//! -- [directory] [MiB in total] [rounds] [blocks of the start]`.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Instant;

use kvdepot_core::{BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::{AlignedBuf, FileVolume, SlotBuf, Volume};
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::{Fetched, PosixConfig, PosixTier, ReadItem, SlabConfig, SlabTier, Tier, WriteItem};

const MIB: u64 = 1 << 20;
/// Bytes of blocks in flight.
const AHEAD_BYTES: u64 = 64 * MIB;
/// The most blocks in flight: fewer than an engine's queue takes.
const AHEAD_MAX: u64 = 2048;
const THREADS: u64 = 4;
/// The most that the Slab tier writes at once.
const LARGE_BYTES: u64 = 16 * MIB;

/// Rate in MB/s, and processor seconds per GB.
#[derive(Clone, Copy, Debug)]
struct Speed(f64, f64);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |at: usize, default: u64| arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(default);
    let parent = arguments.first().map_or_else(std::env::temp_dir, PathBuf::from);
    let (total, rounds, blocks) = (number(1, 1024) * MIB, number(2, 3), number(3, 0));
    let dir = parent.join(format!("slab-rates-{}", std::process::id()));
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{} MiB a round, {rounds} rounds, load {}", total / MIB, load.trim());
    let broken = |e| Error::io("cannot use the directory", e);
    std::fs::create_dir_all(&dir).map_err(broken)?;
    let mut outcome = Ok(());
    for block_bytes in [64 << 10, MIB] {
        outcome = outcome.and_then(|()| measure(&dir, block_bytes, total / block_bytes, rounds));
    }
    if blocks > 0 {
        outcome = outcome.and_then(|()| restart(&dir, blocks));
    }
    std::fs::remove_dir_all(&dir).map_err(broken)?;
    outcome
}

fn measure(dir: &Path, block_bytes: u64, count: u64, rounds: u64) -> Result<()> {
    let mut all: [Vec<Speed>; 7] = Default::default();
    for round in 0..rounds {
        let path = |name: &str| dir.join(format!("{name}-{round}"));
        let total = count * block_bytes;
        let (bare, slab, posix) = (path("bare"), path("slab"), path("posix"));
        // Every contender gets newly allocated files.
        FileVolume::open(&bare, std::time::Duration::ZERO)?.allocate(total)?;
        all[0].push(bare_transfer(&bare, total, LARGE_BYTES, 1, true)?);
        all[1].push(bare_transfer(&bare, total, block_bytes, THREADS, true)?);
        let bench = bench(
            Arc::new(SlabTier::open(SlabConfig {
                capacity_bytes: 2 * total + 1024 * MIB,
                read_threads: THREADS as usize,
                ..SlabConfig::new(&slab)
            })?),
            block_bytes,
        )?;
        all[2].push(write(&bench, count)?);
        all[4].push(bare_transfer(&bare, total, block_bytes, THREADS, false)?);
        all[5].push(read(&bench, count)?);
        drop(bench);
        std::fs::create_dir_all(&posix).map_err(|e| Error::io("cannot make a directory", e))?;
        let tier = PosixConfig { shared: false, read_threads: THREADS as usize, ..PosixConfig::new(&posix) };
        let bench = self::bench(Arc::new(PosixTier::open(tier)?), block_bytes)?;
        all[3].push(write(&bench, count)?);
        all[6].push(read(&bench, count)?);
        drop(bench);
        for path in [&bare, &slab] {
            let _ = std::fs::remove_file(path);
        }
        let _ = std::fs::remove_dir_all(&posix);
    }
    let medians = all.map(median);
    let names = [
        "bare writes of 16 MiB, 1 thread, synced",
        "bare writes of a block, 4 threads, synced",
        "Slab writes, synced",
        "Posix writes, through the page cache",
        "bare reads of a block, 4 threads",
        "Slab reads, verified",
        "Posix reads, verified",
    ];
    println!("blocks of {} KiB, medians:", block_bytes >> 10);
    for (name, Speed(rate, cpu)) in names.iter().zip(&medians) {
        println!("  {name:42} {rate:6.0} MB/s, {cpu:.2} CPU s/GB");
    }
    let ratio = |a: usize, b: usize| medians[a].0 / medians[b].0;
    println!(
        "  Slab writes: {:.2} of bare 16 MiB, {:.2} of bare blocks, {:.2} of Posix; reads: {:.2} of bare, {:.2} of Posix",
        ratio(2, 0),
        ratio(2, 1),
        ratio(2, 3),
        ratio(5, 4),
        ratio(5, 6)
    );
    Ok(())
}

fn median(mut values: Vec<Speed>) -> Speed {
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    values[values.len() / 2]
}

fn bench(tier: Arc<dyn Tier>, block_bytes: u64) -> Result<Bench> {
    Ok(Bench::with(tier, spec("rates", BlockLayout::new(vec![vec![block_bytes]])?)))
}

/// Processor seconds of this process, in hundredths.
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = |at: usize| after.split_whitespace().nth(at).and_then(|text| text.parse::<f64>().ok());
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

fn timed(bytes: u64, work: impl FnOnce() -> Result<()>) -> Result<Speed> {
    let (began, processor) = (Instant::now(), processor_s());
    work()?;
    let rate = bytes as f64 / 1e6 / began.elapsed().as_secs_f64();
    Ok(Speed(rate, (processor_s() - processor) * 1e9 / bytes as f64))
}

/// Reads or writes a file from beginning to end, in pieces that threads take in turns.
fn bare_transfer(path: &Path, total: u64, piece: u64, threads: u64, writes: bool) -> Result<Speed> {
    let failed = |e| Error::io("a bare transfer failed", e);
    let file = File::options().read(true).write(true).custom_flags(0o40000).open(path).map_err(failed)?;
    let next = AtomicU64::new(0);
    let worker = || -> std::io::Result<()> {
        let mut buf = AlignedBuf::zeroed(piece as usize);
        buf.fill(0x5a);
        loop {
            // Relaxed: only the number is shared.
            let at = next.fetch_add(1, Ordering::Relaxed) * piece;
            if at + piece > total {
                return Ok(());
            }
            if writes { file.write_all_at(&buf, at)? } else { file.read_exact_at(&mut buf, at)? }
        }
    };
    timed(total, || {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
        })
        .and_then(|()| if writes { file.sync_data() } else { Ok(()) })
        .map_err(failed)
    })
}

fn slots(bench: &Bench, count: u64) -> Vec<SlotBuf> {
    let ahead = (AHEAD_BYTES / bench.spec.layout().block_bytes()).clamp(1, count.min(AHEAD_MAX));
    let filled = |n| {
        let slot = bench.slot();
        slot.write_at(0, &[n as u8; 4096]);
        slot
    };
    (0..ahead).map(filled).collect()
}

fn write(bench: &Bench, count: u64) -> Result<Speed> {
    each(bench, count, |n, slot, ended| {
        let (done, src) = (Box::new(move |outcome: Result<_>| ended(outcome.map(drop))), slot);
        bench.tier.write(vec![WriteItem { key: bench.key(n), src, done }], Bench::soon());
    })
}

fn read(bench: &Bench, count: u64) -> Result<Speed> {
    bench.drain();
    each(bench, count, |n, dst, ended| {
        let done = Box::new(move |outcome: Result<Fetched>| {
            ended(match outcome {
                Ok(Fetched::Miss) => {
                    Err(Error::new(ErrorKind::NotFound, "a block that was written is a miss"))
                }
                other => other.map(drop),
            });
        });
        bench.tier.read(vec![ReadItem::new(bench.key(n), dst, done)], Bench::soon());
    })
}

type Ended = Box<dyn FnOnce(Result<()>) + Send>;

/// Begins one operation per block, as many at a time as there are slots, and waits for all.
fn each(bench: &Bench, count: u64, begin: impl Fn(u64, SlotBuf, Ended)) -> Result<Speed> {
    let slots = slots(bench, count);
    let (send, ended) = channel::<(SlotBuf, Result<()>)>();
    let begin = |n: u64, slot: SlotBuf| {
        let (send, kept) = (send.clone(), slot.clone());
        begin(n, slot, Box::new(move |outcome| drop(send.send((kept, outcome)))));
    };
    timed(count * bench.spec.layout().block_bytes(), || {
        let ahead = slots.len() as u64;
        (0..).zip(slots).for_each(|(n, slot)| begin(n, slot));
        for n in ahead..count + ahead {
            let (slot, outcome) =
                ended.recv().map_err(|_| Error::new(ErrorKind::Closed, "the tier has gone"))?;
            outcome?;
            if n < count {
                begin(n, slot);
            }
        }
        Ok(())
    })
}

/// A start with many small blocks.
fn restart(dir: &Path, blocks: u64) -> Result<()> {
    let path = dir.join("many");
    let capacity_bytes = (blocks * 8400).next_multiple_of(MIB) + 1024 * MIB;
    let config = || SlabConfig { capacity_bytes, ..SlabConfig::new(&path) };
    let tier = Arc::new(SlabTier::open(config())?);
    let bench = bench(Arc::clone(&tier) as _, 4096)?;
    let began = Instant::now();
    write(&bench, blocks)?;
    println!("{} blocks of 4 KiB written in {:.1} s", tier.usage().blocks, began.elapsed().as_secs_f64());
    drop((tier, bench));
    for _ in 0..3 {
        let began = Instant::now();
        let tier = SlabTier::open(config())?;
        println!("a start with {} blocks takes {:.2} s", tier.usage().blocks, began.elapsed().as_secs_f64());
    }
    Ok(())
}

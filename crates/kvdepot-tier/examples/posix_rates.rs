//! Read rates of a Posix tier compared with a plain O_DIRECT read loop on the same threads, in the same minute, without
//! and with a checksum over what was read, so that the tier's own cost can be told from the checksum's: `cargo run
//! --release -p kvdepot-tier --example posix_rates -- [directory] [MiB in total] [threads] [rounds]`.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::checksum::crc64;
use kvdepot_io::{AlignedBuf, SlotBuf};
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::{Fetched, PosixConfig, PosixTier, ReadItem};

const MIB: u64 = 1 << 20;
/// Reads in flight per thread: a load asks for many blocks at once.
const AHEAD_PER_THREAD: u64 = 4;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |at: usize, default: u64| arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(default);
    let parent = arguments.first().map_or_else(std::env::temp_dir, PathBuf::from);
    let (total_mib, threads, rounds) = (number(1, 512), number(2, 4) as usize, number(3, 5));
    let dir = parent.join(format!("posix-rates-{}", std::process::id()));
    let broken = |e| Error::io("cannot use the directory", e);
    println!("{total_mib} MiB, {threads} threads, medians of {rounds} rounds, MB/s");
    for block_bytes in [256 << 10, MIB, 4 * MIB] {
        std::fs::create_dir_all(&dir).map_err(broken)?;
        let outcome = measure(&dir, block_bytes, total_mib * MIB / block_bytes, threads, rounds);
        std::fs::remove_dir_all(&dir).map_err(broken)?;
        outcome?;
    }
    Ok(())
}

fn measure(dir: &Path, block_bytes: u64, count: u64, threads: usize, rounds: u64) -> Result<()> {
    let config =
        PosixConfig { read_threads: threads - 1, write_threads: 1, shared: false, ..PosixConfig::new(dir) };
    let layout = BlockLayout::uniform(32, &[block_bytes / 32])?;
    let bench = Bench::with(Arc::new(PosixTier::open(config)?), spec("rates", layout));
    let src = bench.filled(0);
    let began = Instant::now();
    for n in 0..count {
        Bench::answer(&bench.begin_write(n, src.clone(), Bench::soon()))?;
    }
    let write_rate = rate(count * block_bytes, began.elapsed());
    bench.drain();
    // Created before the clock starts: the pool's memory exists when a load begins.
    let ahead = count.min(threads as u64 * AHEAD_PER_THREAD);
    let slots: Vec<SlotBuf> = (0..ahead).map(|_| bench.slot()).collect();
    let files = block_files(dir);
    let (mut raw, mut summed, mut tier) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        raw.push(rate(count * block_bytes, read_raw(&files, block_bytes, threads, false)?));
        summed.push(rate(count * block_bytes, read_raw(&files, block_bytes, threads, true)?));
        tier.push(rate(count * block_bytes, read_tier(&bench, count, &slots)?));
    }
    let (raw, summed, tier) = (median(raw), median(summed), median(tier));
    println!(
        "{:5} KiB: tier {tier:5.0}, plain {raw:5.0} (ratio {:.2}), with checksum {summed:5.0} (ratio {:.2}); \
         writes, one at a time {write_rate:5.0}",
        block_bytes >> 10,
        tier / raw,
        tier / summed
    );
    Ok(())
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / 1e6 / time.as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn block_files(dir: &Path) -> Vec<PathBuf> {
    let (mut out, mut todo) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = todo.pop() {
        for path in std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|suffix| suffix == "kvb") {
                out.push(path);
            }
        }
    }
    out
}

/// Opens a file, reads it in one read, closes it; each thread has its own buffer.
fn read_raw(files: &[PathBuf], block_bytes: u64, threads: usize, sum: bool) -> Result<Duration> {
    let next = AtomicUsize::new(0);
    let began = Instant::now();
    let worker = || -> std::io::Result<()> {
        let mut buf = AlignedBuf::zeroed(block_bytes as usize + 4096);
        // Relaxed: only the number is shared.
        while let Some(path) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            let file = File::options().read(true).custom_flags(0o40000).open(path)?;
            if file.read_at(&mut buf, 0)? != buf.len() {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            if sum {
                std::hint::black_box(crc64(&buf));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a reader does not panic"))
    })
    .map_err(|e| Error::io("a plain read failed", e))?;
    Ok(began.elapsed())
}

/// Several reads in flight per thread, into slots that are reused.
fn read_tier(bench: &Bench, count: u64, slots: &[SlotBuf]) -> Result<Duration> {
    let (send, ended) = channel::<(SlotBuf, Result<Fetched>)>();
    let began = Instant::now();
    let begin = |n: u64, slot: SlotBuf| {
        let (send, kept) = (send.clone(), slot.clone());
        let done = Box::new(move |outcome| drop(send.send((kept, outcome))));
        bench.tier.read(vec![ReadItem::new(bench.key(n), slot, done)], Bench::soon());
    };
    let ahead = slots.len() as u64;
    (0..).zip(slots).for_each(|(n, slot)| begin(n, slot.clone()));
    for n in ahead..count + ahead {
        let closed = |_| Error::new(ErrorKind::Closed, "the tier has gone");
        let (slot, outcome) = ended.recv().map_err(closed)?;
        if outcome? == Fetched::Miss {
            return Err(Error::new(ErrorKind::NotFound, "a block that was written is a miss"));
        }
        if n < count {
            begin(n, slot);
        }
    }
    Ok(began.elapsed())
}

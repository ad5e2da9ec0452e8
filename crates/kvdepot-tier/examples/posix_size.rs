//! A Posix tier with many small files: the time until they are usable after a restart, memory per file, the slowest
//! `peek` during a sweep, the longest time that the tier's lock is held (in processor time), and write rates below and
//! at the cap, in alternation: `cargo run --release -p kvdepot-tier --example posix_size -- [directory] [files]
//! [writes] [block_bytes]`.
//!
//! The files are sparse, so a million of them take inodes and little else; for the rates, as many files as `writes` are
//! full. Everything is removed at the end.

mod common;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{HEADER_BYTES, PATIENCE};
use kvdepot_core::{Error, Result};
use kvdepot_io::SlotBuf;
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{PosixConfig, PosixTier, Tier, WriteItem};

/// Writes in flight.
const AHEAD: u64 = 64;
const ROUNDS: u64 = 7;

fn main() -> Result<()> {
    let (dir, [files, writes, block_bytes]) = common::arguments("posix-size", [100_000, 20_000, 4096]);
    let broken = |e| Error::io("cannot use the directory", e);
    std::fs::create_dir_all(&dir).map_err(broken)?;
    let outcome = measure(&dir, files, writes, block_bytes);
    std::fs::remove_dir_all(&dir).map_err(broken)?;
    outcome
}

fn open(dir: &Path, block_bytes: u64, capacity_bytes: u64) -> Result<(Arc<PosixTier>, Bench)> {
    let config = PosixConfig { shared: false, capacity_bytes, ..PosixConfig::new(dir) };
    common::open(config, block_bytes)
}

fn measure(dir: &Path, files: u64, writes: u64, block_bytes: u64) -> Result<()> {
    // More than the headroom that the tier keeps free; otherwise it would evict some of the files.
    let room = (files + files / 100 + 2 * writes) * (HEADER_BYTES + block_bytes);
    drop(open(dir, block_bytes, room)?);
    let began = Instant::now();
    generate(dir, files, block_bytes, true)?;
    for record in [".kvdepot-index", ".kvdepot-total"] {
        // They do not know the files that were created behind the tier's back.
        let _ = std::fs::remove_file(dir.join(record));
    }
    println!("{files} files made in {:.1} s", began.elapsed().as_secs_f64());
    PosixTier::measure_lock_by_processor(true);
    restart(dir, files, block_bytes, room, "first start")?;
    restart(dir, files, block_bytes, room, "restart")?;
    reset(dir, block_bytes)?;
    PosixTier::measure_lock_by_processor(false);
    rates(dir, writes, block_bytes)
}

/// Creates files where the tier puts blocks `0..files`: filled with zeros, or sparse.
fn generate(dir: &Path, files: u64, block_bytes: u64, sparse: bool) -> Result<()> {
    let (_tier, bench) = open(dir, block_bytes, 0)?;
    let bytes = vec![0; (HEADER_BYTES + block_bytes) as usize];
    let epoch = dir.join(bench.spec.root().to_string()).join("e0");
    let broken = |e| Error::io("cannot make a file", e);
    for shard in 0..256 {
        std::fs::create_dir_all(epoch.join(format!("{shard:02x}"))).map_err(broken)?;
    }
    let next = AtomicU64::new(0);
    let worker = || -> std::io::Result<()> {
        loop {
            // Relaxed: only the number is shared.
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= files {
                return Ok(());
            }
            let hash = bench.key(n).hash;
            let path = epoch.join(format!("{:02x}", hash.0[0])).join(format!("{hash}.kvb"));
            let file = std::fs::File::create_new(path)?;
            if sparse { file.set_len(bytes.len() as u64)? } else { (&file).write_all(&bytes)? }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a writer does not panic"))
    })
    .map_err(broken)
}

fn restart(dir: &Path, files: u64, block_bytes: u64, capacity_bytes: u64, what: &str) -> Result<()> {
    let before = resident_bytes();
    let began = Instant::now();
    let (tier, bench) = open(dir, block_bytes, capacity_bytes)?;
    let opened = began.elapsed();
    let write = bench.begin_write(u64::MAX, bench.filled(0), began + PATIENCE);
    let (mut usable, mut written) = (None, None);
    while usable.is_none() || written.is_none() {
        if usable.is_none() && tier.usage().blocks >= files {
            usable = Some(began.elapsed());
        }
        if written.is_none() && write.try_recv().is_ok_and(|outcome| outcome.is_ok()) {
            written = Some(began.elapsed());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let (usable, written) = (usable.unwrap_or_default(), written.unwrap_or_default());
    tier.wait_scanned(began + PATIENCE);
    let scanned = began.elapsed();
    let hold = |what: &str| println!("  longest hold of the lock in {what}: {:?}", tier.take_lock_hold_max());
    hold("a start with its scan");
    let memory = (resident_bytes().saturating_sub(before)) as f64 / files as f64;
    let slowest = slowest_peek(&bench, || {
        tier.sweep(began + PATIENCE);
    });
    hold("a sweep");
    tier.checkpoint()?;
    hold("a checkpoint");
    bench.remove(u64::MAX)?;
    tier.drain(began + PATIENCE);
    let began = Instant::now();
    drop(bench);
    drop(tier);
    println!(
        "{what}: open {:.3} s, files known {:.3} s, first write {:.3} s, scan ended {:.3} s, {memory:.0} bytes a file, \
         slowest peek during a sweep {:.2} ms, close {:.3} s",
        opened.as_secs_f64(),
        usable.as_secs_f64(),
        written.as_secs_f64(),
        scanned.as_secs_f64(),
        slowest.as_secs_f64() * 1e3,
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

/// The longest of many calls of `peek` while `work` runs; on a busy machine this includes the scheduler's delays.
fn slowest_peek(bench: &Bench, work: impl FnOnce()) -> Duration {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let observer = scope.spawn(|| {
            let (mut slowest, mut out, keys) = (Duration::ZERO, Vec::new(), [bench.key(0)]);
            while !done.load(Ordering::Acquire) {
                let began = Instant::now();
                bench.tier.peek(&keys, &mut out);
                slowest = slowest.max(began.elapsed());
                std::thread::sleep(Duration::from_micros(100));
            }
            slowest
        });
        work();
        // Release pairs with the Acquire above.
        done.store(true, Ordering::Release);
        observer.join().expect("an observer does not panic")
    })
}

fn reset(dir: &Path, block_bytes: u64) -> Result<()> {
    let (tier, bench) = open(dir, block_bytes, 0)?;
    tier.wait_scanned(Instant::now() + PATIENCE);
    tier.take_lock_hold_max();
    let began = Instant::now();
    tier.advance_and_wait(&bench.spec, 1)?;
    tier.drain(began + PATIENCE);
    println!("reset: {:.1} s until all files were gone", began.elapsed().as_secs_f64());
    println!("  longest hold of the lock in a reset: {:?}", tier.take_lock_hold_max());
    Ok(())
}

/// Alternating rounds of writes, below the cap in one directory and at the cap in another.
fn rates(dir: &Path, writes: u64, block_bytes: u64) -> Result<()> {
    let dirs = ["below", "at"].map(|name| dir.join(name));
    for dir in &dirs {
        std::fs::create_dir(dir).map_err(|e| Error::io("cannot make a directory", e))?;
        generate(dir, writes, block_bytes, false)?;
    }
    let cap = writes * (HEADER_BYTES + block_bytes);
    let (below, below_bench) = open(&dirs[0], block_bytes, 0)?;
    let (at_cap, at_cap_bench) = open(&dirs[1], block_bytes, cap)?;
    for tier in [&below, &at_cap] {
        tier.wait_scanned(Instant::now() + PATIENCE);
    }
    let (mut ratios, mut costs) = (Vec::new(), [0.0; 2]);
    for round in 0..ROUNDS {
        let (first, count) = ((1 + round) * writes, writes);
        let began = cpu_seconds();
        let low = write_rate(&below_bench, first, count)?;
        let between = cpu_seconds();
        let high = write_rate(&at_cap_bench, first, count)?;
        costs[0] += between - began;
        costs[1] += cpu_seconds() - between;
        println!("round {round}: {low:.0} writes a second below the cap, {high:.0} at it");
        ratios.push(high / low);
    }
    ratios.sort_by(f64::total_cmp);
    let (least, median, most) = (ratios[0], ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
    println!("at the cap a write goes at {median:.2} of the rate below it ({least:.2} to {most:.2})");
    let each = |seconds: f64| seconds * 1e6 / (ROUNDS * writes) as f64;
    let [low, high] = costs.map(each);
    println!("processor time of a write, unlinks included: {low:.0} us below the cap, {high:.0} us at it");
    assert!(at_cap.usage().bytes <= cap, "the cap was passed (P5)");
    Ok(())
}

fn write_rate(bench: &Bench, first: u64, count: u64) -> Result<f64> {
    let slots: Vec<SlotBuf> = (0..AHEAD.min(count)).map(|n| bench.filled(n)).collect();
    let (send, ended) = channel();
    let begin = |n: u64, slot: SlotBuf| {
        let (send, kept) = (send.clone(), slot.clone());
        let done = Box::new(move |outcome: Result<_>| drop(send.send((kept, outcome.map(drop)))));
        bench.tier.write(vec![WriteItem { key: bench.key(n), src: slot, done }], Bench::soon());
    };
    let began = Instant::now();
    let ahead = slots.len() as u64;
    (first..).zip(slots).for_each(|(n, slot)| begin(n, slot));
    for n in first + ahead..first + count + ahead {
        let (slot, outcome): (SlotBuf, Result<()>) = ended.recv().expect("this function holds a sender");
        outcome?;
        if n < first + count {
            begin(n, slot);
        }
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// Processor time of this process, from ticks of 10 ms.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    let ticks = after.split_ascii_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok());
    ticks.sum::<f64>() / 100.0
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

//! What `posix_capacity_shared` costs a single depot: the time until a directory with many files is usable, and write
//! rates below and at the cap, with and without it in alternation: `cargo run --release -p kvdepot-tier --example
//! posix_shared -- [directory] [files] [writes] [block_bytes]`.
//!
//! The files are sparse except those of the rates. Everything is removed at the end.

mod common;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use common::{HEADER_BYTES, PATIENCE};
use kvdepot_core::{Error, Result};
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{PosixConfig, PosixTier, Tier, Written};

/// Writes in flight.
const AHEAD: usize = 64;
const ROUNDS: u64 = 15;

fn main() -> Result<()> {
    let (dir, [files, writes, block_bytes]) = common::arguments("posix-shared", [100_000, 5_000, 65_536]);
    let outcome = starts(&dir, files, block_bytes).and_then(|()| rates(&dir, writes, block_bytes));
    std::fs::remove_dir_all(&dir).map_err(|e| Error::io("cannot remove the directory", e))?;
    outcome
}

fn open(dir: &Path, block_bytes: u64, blocks: u64, is_for_all: bool) -> Result<(Arc<PosixTier>, Bench)> {
    std::fs::create_dir_all(dir).map_err(|e| Error::io("cannot make a directory", e))?;
    let capacity_bytes = blocks * (HEADER_BYTES + block_bytes);
    let config = PosixConfig { capacity_bytes, capacity_shared: is_for_all, ..PosixConfig::new(dir) };
    common::open(config, block_bytes)
}

/// The first block that is stored in a directory with many files, of which no ledger and no checkpoint tells.
fn starts(dir: &Path, files: u64, block_bytes: u64) -> Result<()> {
    let dir = dir.join("starts");
    {
        let (_tier, bench) = open(&dir, block_bytes, 0, false)?;
        let epoch = dir.join(bench.spec.root().to_string()).join("e0");
        let make = |n: u64| -> std::io::Result<()> {
            let hash = bench.key(n).hash;
            let below = epoch.join(format!("{:02x}", hash.0[0]));
            std::fs::create_dir_all(&below)?;
            let file = std::fs::File::create_new(below.join(format!("{hash}.kvb")))?;
            file.set_len(HEADER_BYTES + block_bytes)
        };
        (0..files).try_for_each(make).map_err(|e| Error::io("cannot make a file", e))?;
    }
    for round in 0..3 {
        for is_for_all in [false, true] {
            for (name, what) in [(Some(".kvdepot-index"), "first start"), (None, "restart")] {
                if name.is_some() {
                    for record in [".kvdepot-index", ".kvdepot-total"] {
                        let _ = std::fs::remove_file(dir.join(record));
                    }
                    let _ = std::fs::remove_dir_all(dir.join(".kvdepot-ledger"));
                }
                let began = Instant::now();
                let (tier, bench) = open(&dir, block_bytes, 2 * files, is_for_all)?;
                let opened = began.elapsed().as_secs_f64();
                let key = files + round;
                let write = bench.begin_write(key, bench.filled(key), began + PATIENCE);
                Bench::answer(&write)?;
                let stored = began.elapsed().as_secs_f64();
                bench.remove(key)?;
                tier.drain(began + PATIENCE);
                println!(
                    "{what}, shared cap {is_for_all}: open {opened:.3} s, first block stored {stored:.3} s"
                );
            }
        }
    }
    Ok(())
}

/// Alternating rounds of writes, below and at the cap.
fn rates(dir: &Path, writes: u64, block_bytes: u64) -> Result<()> {
    for (what, blocks) in [("below", (ROUNDS + 1) * writes * 2), ("at", writes / 2)] {
        let benches = [false, true].map(|is_for_all| {
            let dir = dir.join(format!("{what}-{is_for_all}"));
            let (tier, bench) = open(&dir, block_bytes, blocks, is_for_all)?;
            tier.wait_scanned(Instant::now() + PATIENCE);
            Ok::<Bench, Error>(bench)
        });
        let [each, all] = benches;
        let (each, all) = (each?, all?);
        // Fills the directories that are to be at the cap.
        write_rate(&each, 0, writes)?;
        write_rate(&all, 0, writes)?;
        let (mut ratios, mut costs) = (Vec::new(), [0.0; 2]);
        for round in 1..=ROUNDS {
            let began = cpu_seconds();
            let without = write_rate(&each, round * writes, writes)?;
            let between = cpu_seconds();
            let with = write_rate(&all, round * writes, writes)?;
            costs[0] += between - began;
            costs[1] += cpu_seconds() - between;
            println!("{what} the cap: {without:.0} writes a second without a shared cap, {with:.0} with it");
            ratios.push(with / without);
        }
        ratios.sort_by(f64::total_cmp);
        let (least, median, most) = (ratios[0], ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
        println!("{what} the cap, a shared cap keeps {median:.2} of the rate ({least:.2} to {most:.2})");
        let [without, with] = costs.map(|seconds| seconds * 1e6 / (ROUNDS * writes) as f64);
        println!("processor time of a write: {without:.0} us without a shared cap, {with:.0} us with it");
    }
    Ok(())
}

fn write_rate(bench: &Bench, first: u64, count: u64) -> Result<f64> {
    let began = Instant::now();
    let mut waiting: VecDeque<Receiver<Result<Written>>> = VecDeque::new();
    for n in first..first + count {
        if waiting.len() >= AHEAD {
            Bench::answer(&waiting.pop_front().expect("some wait"))?;
        }
        waiting.push_back(bench.begin_write(n, bench.filled(n), began + PATIENCE));
    }
    waiting.iter().try_for_each(|one| Bench::answer(one).map(drop))?;
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// Processor time of this process, from ticks of 10 ms.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    let ticks = after.split_ascii_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok());
    ticks.sum::<f64>() / 100.0
}

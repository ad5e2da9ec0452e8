//! Restore rates of a DAX tier compared with a bare memcpy on as many threads, alternating in one run.
//!
//! `dax_rates FILE [auto|pread|mapped|device] [THREADS] [BLOCK_KIB] [TOTAL_MIB] [ROUNDS]`; FILE is created anew, for example on
//! /dev/shm.
#![allow(clippy::unwrap_used)] // a failing benchmark panics

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvdepot_core::BlockLayout;
use kvdepot_io::SlotBuf;
use kvdepot_io::checksum::crc64_slot;
use kvdepot_io::mapped::Access;
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::{DaxConfig, DaxTier, ReadItem, Tier};

const PIECE: usize = 128 << 10;

/// Copies `from` into the slots on several threads, each handling its share; with `sum`, also computes the checksum of
/// each piece.
fn copy(from: &[u8], slots: &[SlotBuf], threads: usize, sum: bool) -> Duration {
    let block = from.len() / slots.len();
    let share = slots.len().div_ceil(threads);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for (from, slots) in from.chunks(share * block).zip(slots.chunks(share)) {
            scope.spawn(move || {
                for (from, slot) in from.chunks(block).zip(slots) {
                    for (number, piece) in from.chunks(PIECE).enumerate() {
                        let at = number * PIECE;
                        slot.write_at(at, piece);
                        if sum {
                            std::hint::black_box(crc64_slot(slot, at, at + piece.len()));
                        }
                    }
                }
            });
        }
    });
    begin.elapsed()
}

fn restore(bench: &Bench, slots: &[SlotBuf]) -> Duration {
    let (send, receive) = channel();
    let items = (0..).zip(slots).map(|(n, slot)| {
        let send = send.clone();
        let done = Box::new(move |outcome| drop(send.send(outcome)));
        ReadItem::new(bench.key(n), slot.clone(), done)
    });
    let items: Vec<ReadItem> = items.collect();
    let begin = Instant::now();
    bench.tier.read(items, begin + Duration::from_secs(60));
    for _ in slots {
        assert_eq!(receive.recv().unwrap().unwrap(), kvdepot_tier::Fetched::Whole);
    }
    begin.elapsed()
}

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("a file");
    let access = match args.next().as_deref() {
        Some("pread") => Access::Pread,
        Some("mapped") => Access::Mapped,
        Some("device") => Access::AsDevice,
        _ => Access::Auto,
    };
    let mut number = |default: usize| args.next().map_or(default, |text| text.parse().unwrap());
    let (threads, block_kib, total_mib, rounds) = (number(2), number(2048), number(512), number(9));
    let (block, total) = (block_kib << 10, total_mib << 20);
    let count = total / block;
    std::fs::File::create(&path).unwrap().set_len((total + total / 8 + (16 << 20)) as u64).unwrap();
    let config = DaxConfig { access, restore_workers: threads, async_put: true, ..DaxConfig::new(&path) };
    let tier = Arc::new(DaxTier::open(config).unwrap());
    let layout = BlockLayout::new(vec![vec![block as u64]]).unwrap();
    let bench = Bench::with(tier as Arc<dyn Tier>, spec("rates", layout));
    bench.write_all(count as u64);
    let slots: Vec<SlotBuf> = (0..count).map(|_| bench.slot()).collect();
    let from: Vec<u8> = (0..count * block).map(|n| (n >> 7) as u8).collect();
    let mut times: [Vec<Duration>; 3] = Default::default();
    for _ in 0..rounds {
        times[0].push(copy(&from, &slots, threads, false));
        times[1].push(restore(&bench, &slots));
        times[2].push(copy(&from, &slots, threads, true));
    }
    assert!((0..count as u64).all(|n| bench.read_is_right(n)));
    let rate = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        total as f64 / times[times.len() / 2].as_secs_f64() / 1e9
    };
    let [memcpy, restore, summed] = times.each_mut().map(rate);
    println!(
        "{access:?}, {threads} threads, {count} blocks of {block_kib} KiB, medians of {rounds}: memcpy {memcpy:.2} GB/s, \
         memcpy with checksum {summed:.2}, restore {restore:.2}: {:.2} of memcpy, {:.2} of memcpy with checksum",
        restore / memcpy,
        restore / summed
    );
    drop(bench);
    std::fs::remove_file(path).unwrap();
}

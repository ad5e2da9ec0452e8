//! Rates of our own client against one server, many blocks under way at a time, over TCP:
//! `cargo run --release -p kvdepot-tier --example remote_rates -- host:port [MiB in all] [blocks under way] [rounds]`.
//! Prints a line of JSON for each size of block; `benches.wire.throughput` takes the same sizes by InfiniStore's client.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::SlotBuf;
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::{Fetched, ReadItem, RemoteConfig, RemoteTier, WriteItem};

const KIB: u64 = 1 << 10;
const SIZES: [u64; 5] = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB];
/// Most blocks of one size: small ones would take long to say the same.
const BLOCKS_MAX: u64 = 8192;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |at: usize, default: u64| arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(default);
    let server = arguments.first().cloned().ok_or_else(|| {
        Error::new(ErrorKind::Config, "name a server: host:port [MiB] [blocks under way] [rounds]")
    })?;
    let (total_mib, ahead, rounds) = (number(1, 256), number(2, 64), number(3, 5));
    for block_bytes in SIZES {
        let count = (total_mib * 1024 * KIB / block_bytes).min(BLOCKS_MAX);
        measure(&server, block_bytes, count, ahead.min(count), rounds)?;
    }
    Ok(())
}

fn measure(server: &str, block_bytes: u64, count: u64, ahead: u64, rounds: u64) -> Result<()> {
    let config = RemoteConfig { servers: vec![server.to_owned()], ..RemoteConfig::default() };
    let layout = BlockLayout::uniform(1, &[block_bytes])?;
    let bench =
        Bench::with(Arc::new(RemoteTier::open(config)?), spec(&format!("rates-{block_bytes}"), layout));
    let slots: Vec<SlotBuf> = (0..ahead).map(|n| bench.filled(n)).collect();
    let (mut put, mut get) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        // Keys of their own: a block that is there already is not sent again.
        let keys = round * count..(round + 1) * count;
        put.push(pass(&bench, keys.clone(), &slots, true)?);
        get.push(pass(&bench, keys.clone(), &slots, false)?);
        keys.clone().try_for_each(|n| bench.remove(n))?;
        // More removals than the tier keeps in mind would be refused.
        bench.tier.drain(Bench::soon());
    }
    let rate = |times: Vec<Duration>| (count * block_bytes) as f64 / median(times).as_secs_f64();
    println!(
        "{{\"nbytes\": {block_bytes}, \"blocks\": {count}, \"under_way\": {ahead}, \"put_bytes_per_s\": {:.0}, \
         \"get_bytes_per_s\": {:.0}}}",
        rate(put),
        rate(get)
    );
    Ok(())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Puts or gets all blocks, as many at a time as there are slots.
fn pass(bench: &Bench, keys: std::ops::Range<u64>, slots: &[SlotBuf], put: bool) -> Result<Duration> {
    let (send, ended) = channel::<(SlotBuf, Result<()>)>();
    let begin = |n: u64, slot: SlotBuf| {
        let (send, kept) = (send.clone(), slot.clone());
        if put {
            let done = Box::new(move |outcome: Result<_>| drop(send.send((kept, outcome.map(drop)))));
            bench.tier.write(vec![WriteItem { key: bench.key(n), src: slot, done }], Bench::soon());
        } else {
            let done = Box::new(move |outcome: Result<Fetched>| {
                let whole = outcome.and_then(|fetched| match fetched {
                    Fetched::Whole => Ok(()),
                    Fetched::Miss => {
                        Err(Error::new(ErrorKind::NotFound, "a block that was written is a miss"))
                    }
                });
                drop(send.send((kept, whole)));
            });
            bench.tier.read(vec![ReadItem::new(bench.key(n), slot, done)], Bench::soon());
        }
    };
    let began = Instant::now();
    let mut next = keys.clone();
    for slot in slots {
        if let Some(n) = next.next() {
            begin(n, slot.clone());
        }
    }
    for _ in keys {
        let closed = |_| Error::new(ErrorKind::Closed, "the tier has gone");
        let (slot, outcome) = ended.recv().map_err(closed)?;
        outcome?;
        if let Some(n) = next.next() {
            begin(n, slot);
        }
    }
    Ok(began.elapsed())
}

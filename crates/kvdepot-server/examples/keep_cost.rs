//! The cost for a dump of a pool that outlives a crash (`pool_keep_s`). Dumps go alternately into two depots, one that
//! keeps its pool and one that does not, in separate processes over the local door. Each round gives one ratio; the
//! median counts.
//!
//! `cargo run --release -p kvdepot-server --example keep_cost -- [ROUNDS [MIB_A_ROUND]]`
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement that cannot go on has failed")]

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use kvdepot_copy::HostEngine;
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec};
use kvdepot_depot::DepotConfig;
use kvdepot_depot::client::{Attachment, DeviceEngine, Store};
use kvdepot_server::{Serving, keeper};

const WAIT: Duration = Duration::from_secs(600);
const SIZES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
const CLIENTS: [usize; 2] = [1, 8];

/// A depot process.
struct Depot(Child);

impl Depot {
    fn start(socket: &Path, pool_bytes: usize, keeps: bool) -> Self {
        let exe = std::env::current_exe().unwrap();
        let mut command = Command::new(exe);
        command.arg("depot").arg(socket).arg(pool_bytes.to_string()).arg(keeps.to_string());
        Self(command.stdin(Stdio::piped()).spawn().unwrap())
    }
}

impl Drop for Depot {
    fn drop(&mut self) {
        // Closing its standard input shuts it down in an orderly way, and it dismisses its keeper.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn serve_until_told(socket: &str, pool_bytes: &str, keeps: &str) {
    let keep_ms = if keeps == "true" { 600_000 } else { 0 };
    let config = serde_json::json!({
        "pipeline": "Cache", "pool_bytes": pool_bytes.parse::<u64>().unwrap(), "timeout_ms": 60_000,
        "pool_keep_ms": keep_ms, "pool_keeper": [std::env::current_exe().unwrap(), "keeper"],
    });
    let (end, ended) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        drop(end);
    });
    let mut keep_on = || ended.try_recv() != Err(std::sync::mpsc::TryRecvError::Disconnected);
    Serving::new(DepotConfig::from_json(&config.to_string()).unwrap(), Path::new(socket))
        .serve(&mut keep_on)
        .unwrap();
}

/// A client with pages to dump.
struct Client {
    store: Store,
    /// The memory of the store's pages, which are registered once.
    _memory: Vec<u8>,
    pages: usize,
}

impl Client {
    fn new(attachment: &Arc<Attachment>, block: usize, pages: usize) -> Self {
        let layout = BlockLayout::uniform(1, &[block as u64]).unwrap();
        let spec = NamespaceSpec::new("{\"model\":\"keep_cost\"}", layout).unwrap();
        let engine = DeviceEngine::new(Arc::new(HostEngine::new(2).unwrap()));
        let store = Store::new(attachment, Arc::new(spec), engine, WAIT).unwrap();
        let mut memory = vec![0_u8; block * pages];
        memory.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at ^ (at >> 9)) as u8);
        // SAFETY: the memory lives beside the store, and nothing writes it.
        unsafe { store.register_pages(vec![memory.as_ptr() as u64], vec![block as i64], pages as u64) }
            .unwrap();
        Self { store, _memory: memory, pages }
    }

    fn dump(&self, first: u64) {
        let name = |n: u64| BlockHash::from_engine(&(first + n).to_le_bytes()).unwrap();
        let pages: Vec<i64> = (0..self.pages as i64).collect();
        // SAFETY: as for `register_pages`; the task has completed before this returns.
        let task =
            unsafe { self.store.dump_pages((0..self.pages as u64).map(name).collect(), &pages, 0) }.unwrap();
        assert!(task.wait(Some(WAIT)));
        assert!(task.failed().is_empty(), "{} blocks were not dumped", task.failed().len());
    }
}

fn attach(socket: &Path) -> Arc<Attachment> {
    let attachment = Attachment::connect(socket.to_owned(), None, WAIT, WAIT).unwrap();
    while !attachment.attached() {
        std::thread::sleep(Duration::from_millis(10));
    }
    attachment
}

/// Returns the seconds that a round of dumps takes, and those until all checksums are computed.
fn round(attachment: &Arc<Attachment>, clients: &[Client], first: u64) -> (f64, f64) {
    let barrier = Barrier::new(clients.len() + 1);
    let dumped = std::thread::scope(|scope| {
        let threads: Vec<_> = (0_u64..)
            .zip(clients)
            .map(|(number, client)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    client.dump(first + number * 1_000_000);
                })
            })
            .collect();
        barrier.wait();
        let begun = Instant::now();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        begun.elapsed()
    });
    let begun = Instant::now();
    // A depot without a kept pool has no such figure.
    while attachment.stats()["depot"]["ledger_unproven_blocks"].as_u64().is_some_and(|left| left > 0) {
        std::thread::sleep(Duration::from_millis(1));
    }
    (dumped.as_secs_f64(), begun.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["keeper"] => return keeper::run().unwrap(),
        ["depot", socket, pool_bytes, keeps] => return serve_until_told(socket, pool_bytes, keeps),
        _ => {}
    }
    let number = |at: usize, default: usize| arguments.get(at).map_or(default, |text| text.parse().unwrap());
    let (rounds, bytes) = (number(0, 15).max(1), number(1, 256) << 20);
    // Two rounds fit, so that evicted blocks were proven long before.
    let pool_bytes = bytes * 2 + (64 << 20);
    println!(
        "{rounds} rounds of {} MiB, by turns into a depot that keeps its pool and one that does not",
        bytes >> 20
    );
    println!("block KiB  clients  off GB/s   on GB/s  ratio of times (min .. max)   checksums behind by ms");
    for block in SIZES {
        for count in CLIENTS {
            let directory = tempfile::tempdir().unwrap();
            let pages = (bytes / block / count).max(1);
            let kinds = [false, true].map(|keeps| {
                let socket = directory.path().join(if keeps { "on.sock" } else { "off.sock" });
                let depot = Depot::start(&socket, pool_bytes, keeps);
                let attachment = attach(&socket);
                let clients: Vec<Client> =
                    (0..count).map(|_| Client::new(&attachment, block, pages)).collect();
                (clients, attachment, depot)
            });
            let (mut times, mut behind) = ([Vec::new(), Vec::new()], Vec::new());
            for number in 0..rounds + 1 {
                // The order alternates, and the first round populates the pools.
                for kind in if number % 2 == 0 { [0, 1] } else { [1, 0] } {
                    let (clients, attachment, _) = &kinds[kind];
                    let (dumped, proved) = round(attachment, clients, number as u64 * 100_000_000);
                    if number > 0 {
                        times[kind].push(dumped);
                        behind.extend((kind == 1).then_some(proved * 1e3));
                    }
                }
            }
            let ratios: Vec<f64> = times[0].iter().zip(&times[1]).map(|(off, on)| on / off).collect();
            let bounds =
                ratios.iter().fold((f64::MAX, 0_f64), |(low, high), &it| (low.min(it), high.max(it)));
            let speed = |times: &Vec<f64>| (pages * count * block) as f64 / median(times.clone()) / 1e9;
            println!(
                "{:9}  {count:7}  {:8.2}  {:8.2}  {:.3} ({:.3} .. {:.3}) {:25.1}",
                block >> 10,
                speed(&times[0]),
                speed(&times[1]),
                median(ratios.clone()),
                bounds.0,
                bounds.1,
                median(behind)
            );
            for (clients, attachment, depot) in kinds {
                drop(clients);
                attachment.close();
                drop(depot);
            }
        }
    }
}

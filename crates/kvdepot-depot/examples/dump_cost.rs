//! Measures the processor time of dumps into a warm pool in this process, of a store's tasks and of the requests alone.
//!
//! `cargo run --release -p kvdepot-depot --example dump_cost -- [MODE] [BLOCK_BYTES] [SHARDS] [TASK_BLOCKS] [TASKS]`.
//! Mode `store` dumps tasks of blocks from this process's memory, `requests` reserves and commits the same blocks
//! without a copy. Every block evicts another one. The time is the process's (user and system), so other load on the
//! machine disturbs it little. Prints one JSON object.
#![allow(clippy::unwrap_used, reason = "a measurement stops where it cannot go on")]

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_copy::HostEngine;
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::client::{Attachment, DeviceEngine, Store};
use kvdepot_depot::message::{Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Tasks before the measurement, which touch the pool's pages and make every later block evict one.
const WARM_TASKS: u64 = 4;

fn hashes(task: u64, count: u64) -> Vec<BlockHash> {
    let hash = |n: u64| {
        let mut hash = [0; 16];
        // Spread as an engine's hashes are.
        hash[..8].copy_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        hash[8..].copy_from_slice(&n.to_le_bytes());
        BlockHash(hash)
    };
    (task * count..(task + 1) * count).map(hash).collect()
}

/// Returns user and system time of this process, which the kernel counts in steps of 10 ms.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |at: usize| fields[at].parse::<f64>().unwrap();
    (ticks(11) + ticks(12)) / 100.0
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| args.get(at).map_or(default, |arg| arg.parse().unwrap());
    let mode = args.first().map_or("store", String::as_str).to_owned();
    let (block, shards, blocks, tasks) = (number(1, 65_536), number(2, 1), number(3, 2048), number(4, 20));
    let layout = BlockLayout::uniform(shards as usize, &[block / shards]).unwrap();
    let spec = Arc::new(NamespaceSpec::new("{\"bench\":\"dump\"}", layout).unwrap());
    let pool_bytes = 3 * blocks * block + (64 << 20);
    let config = format!("{{\"pipeline\":\"Cache\",\"pool_bytes\":{pool_bytes},\"eviction\":\"lru\"}}");
    let depot = Depot::start_private(DepotConfig::from_json(&config).unwrap()).unwrap();
    let now = || (Instant::now(), cpu());
    let (mut begun, mut ended) = (now(), now());
    let mut measure = |task: u64, run: &mut dyn FnMut(u64)| {
        if task == WARM_TASKS {
            begun = now();
        }
        run(task);
        ended = now();
    };
    match mode.as_str() {
        "requests" => {
            let session = depot.session();
            let canonical = spec.canonical().into();
            let Response::Namespace { handle, .. } = session.handle(Request::OpenNamespace { canonical })
            else {
                panic!("no namespace")
            };
            for task in 0..WARM_TASKS + tasks {
                let hashes = hashes(task, blocks);
                measure(task, &mut |_| {
                    for chunk in hashes.chunks(512) {
                        let bytes: Vec<u8> = chunk.iter().flat_map(|hash| hash.0).collect();
                        let hashes = Hashes(Cow::Owned(bytes));
                        let Response::Grants(grants) = session.handle(Request::Reserve {
                            namespace: handle,
                            hashes,
                            priority: Priority::Normal,
                        }) else {
                            panic!("no grants")
                        };
                        let leased = grants.iter().filter_map(|grant| match grant {
                            Grant::Leased { lease, .. } => Some(*lease),
                            _ => None,
                        });
                        let leases: Vec<u64> = leased.collect();
                        assert_eq!(leases.len(), chunk.len());
                        let answer = session.handle(Request::Commit { leases, shards: Shards::All });
                        assert!(matches!(answer, Response::Ok), "{answer:?}");
                    }
                });
            }
        }
        "store" => {
            let attachment = Attachment::embedded(depot).unwrap();
            let engine = DeviceEngine::new(Arc::new(HostEngine::new(1).unwrap()));
            let memory = vec![1_u8; (blocks * block) as usize];
            let store = Store::new(&attachment, Arc::clone(&spec), engine, TIMEOUT).unwrap();
            let shard = block / shards;
            let base = memory.as_ptr() as u64;
            let bases = (0..shards).map(|layer| base + layer * blocks * shard).collect();
            // SAFETY: the memory outlives the store.
            unsafe { store.register_pages(bases, vec![shard as i64; shards as usize], blocks) }.unwrap();
            let pages: Vec<i64> = (0..blocks as i64).collect();
            for task in 0..WARM_TASKS + tasks {
                let hashes = hashes(task, blocks);
                measure(task, &mut |_| {
                    // SAFETY: nothing writes the memory.
                    let task = unsafe { store.dump_pages(hashes.clone(), &pages, 0) }.unwrap();
                    assert!(task.wait(Some(TIMEOUT)));
                    assert!(task.failed().is_empty(), "{:?}", task.failed());
                });
            }
            drop(store);
            drop(memory);
        }
        other => panic!("no mode {other}: store or requests"),
    }
    let (wall, cpu) = ((ended.0 - begun.0).as_secs_f64(), ended.1 - begun.1);
    let per_block = 1e6 / (blocks * tasks) as f64;
    println!(
        "{{\"mode\":\"{mode}\",\"block_bytes\":{block},\"shards\":{shards},\"task_blocks\":{blocks},\
         \"cpu_us_per_block\":{:.3},\"wall_us_per_block\":{:.3}}}",
        cpu * per_block,
        wall * per_block
    );
}

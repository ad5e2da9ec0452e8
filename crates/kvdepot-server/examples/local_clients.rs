//! Measures lookups of many client processes over the local door, and the cost of attaching for each of them.
//!
//! `cargo run --release -p kvdepot-server --example local_clients -- [POOL_MIB] [BLOCKS] [SECONDS] [TRAFFIC]` (512 MiB,
//! 100,000 blocks, 3 s and no traffic by default). A lookup asks for 128 hashes that all exist. The depot is a separate
//! process that holds unfilled blocks of 4 KiB. 1, 8, 16 and 64 clients attach at the same time, wait for each other, and
//! send lookups as fast as they are answered. With traffic (1), each of these runs is repeated while another process
//! attaches and detaches as fast as it can, and once more while another process dumps and loads as fast as it can. The
//! yardstick is a bare round trip of a frame of the same size between two processes. Prints one JSON object per line.
#![allow(clippy::unwrap_used, reason = "a measurement stops where it cannot go on")]

use std::borrow::Cow;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_copy::HostEngine;
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::client::{Attachment, DeviceEngine, Store};
use kvdepot_depot::message::{Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_depot::{Depot, DepotConfig};
use kvdepot_server::{Place, serve_depot};
use serde_json::{Value, json};

const BLOCK: u64 = 4096;
const BATCH: u64 = 1024;
const PREFIX: u64 = 128;
const WAIT: Duration = Duration::from_secs(60);

fn spec() -> Arc<NamespaceSpec> {
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    Arc::new(NamespaceSpec::new("{\"model\":\"clients\"}", layout).unwrap())
}

fn hash(n: u64) -> BlockHash {
    let mut bytes = [0; 16];
    // Distributed like an engine's hashes.
    bytes[..8].copy_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    bytes[8..].copy_from_slice(&n.to_le_bytes());
    BlockHash(bytes)
}

/// Runs a depot with the first `blocks` blocks until its standard input is closed.
fn depot(socket: &Path, pool_mib: u64, blocks: u64) {
    let config = json!({"pipeline": "Cache", "pool_bytes": pool_mib << 20, "populate": false});
    let depot = Depot::start(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let session = depot.session();
    let Response::Namespace { handle, .. } =
        session.handle(Request::OpenNamespace { canonical: spec().canonical().into() })
    else {
        panic!("no namespace")
    };
    for first in (0..blocks).step_by(BATCH as usize) {
        let hashes: Vec<u8> = (first..blocks.min(first + BATCH)).flat_map(|n| hash(n).0).collect();
        let hashes = Hashes(Cow::Owned(hashes));
        let Response::Grants(grants) =
            session.handle(Request::Reserve { namespace: handle, hashes, priority: Priority::Normal })
        else {
            panic!("no grants")
        };
        let leases = grants.iter().filter_map(|grant| match grant {
            Grant::Leased { lease, .. } => Some(*lease),
            _ => None,
        });
        session.handle(Request::Commit { leases: leases.collect(), shards: Shards::All });
    }
    drop(session);
    let Place::Free(lock) = Place::take(socket, WAIT, &mut || true).unwrap() else { panic!("no place") };
    let (end, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().lines().count();
        let _ = end.send(());
    });
    println!("ready");
    serve_depot(&lock, depot, 512, &mut || ended.try_recv().is_err()).unwrap();
}

/// Returns the microseconds of each call until the time is over, sorted.
fn time_calls(seconds: u64, mut call: impl FnMut()) -> Vec<f64> {
    let (begun, mut took) = (Instant::now(), Vec::new());
    while begun.elapsed() < Duration::from_secs(seconds) {
        let asked = Instant::now();
        call();
        took.push(asked.elapsed().as_secs_f64() * 1e6);
    }
    took.sort_by(f64::total_cmp);
    took
}

fn at(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

/// Returns a field of `/proc/self/status`, in KiB.
fn status_kib(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0");
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0)
}

/// Attaches, waits for a line, then sends lookups.
fn client(socket: &Path, blocks: u64, seconds: u64) {
    let (before, begun) = (own_processor_ms(), Instant::now());
    let attachment = Attachment::connect(socket.to_owned(), None, WAIT, WAIT).unwrap();
    let engine = DeviceEngine::new(Arc::new(HostEngine::new(1).unwrap()));
    let store = Store::new(&attachment, spec(), engine, WAIT).unwrap();
    assert!(attachment.attached());
    let attach = json!({
        "attach_ms": begun.elapsed().as_secs_f64() * 1e3,
        "attach_cpu_ms": own_processor_ms() - before,
        "page_tables_kib": status_kib("VmPTE:"),
    });
    println!("{attach}");
    std::io::stdin().lines().next();
    let mut seed = u64::from(std::process::id()).wrapping_mul(0x2545_F491_4F6C_DD1D) | 1;
    let mut short = 0;
    let begun = Instant::now();
    let took = time_calls(seconds, || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let first = (seed >> 33) % (blocks - PREFIX);
        let hashes: Vec<BlockHash> = (first..first + PREFIX).map(hash).collect();
        short += u64::from(store.lookup_on_prefix(&hashes) != PREFIX as usize);
    });
    let per_s = took.len() as f64 / begun.elapsed().as_secs_f64();
    println!("{}", json!({"per_s": per_s, "not_full": short, "took_us": took}));
}

/// Dumps new blocks and loads them again until it is killed.
fn traffic(socket: &Path, first: u64) {
    let attachment = Attachment::connect(socket.to_owned(), None, WAIT, WAIT).unwrap();
    let engine = DeviceEngine::new(Arc::new(HostEngine::new(1).unwrap()));
    let store = Store::new(&attachment, spec(), engine, WAIT).unwrap();
    let memory = vec![1_u8; (2 * BATCH * BLOCK) as usize];
    // SAFETY: the memory lives as long as the process, and nobody reads it.
    unsafe { store.register_pages(vec![memory.as_ptr() as u64], vec![BLOCK as i64], 2 * BATCH) }.unwrap();
    println!("ready");
    let pages: Vec<i64> = (0..2 * BATCH as i64).collect();
    let (from, to) = pages.split_at(BATCH as usize);
    for round in 0.. {
        let names = |round: u64| (0..BATCH).map(|n| hash(first + round * BATCH + n)).collect::<Vec<_>>();
        // SAFETY: as for `register_pages`.
        let dump = unsafe { store.dump_pages(names(round), from, 0) }.unwrap();
        // SAFETY: as for `register_pages`.
        let load = (round > 0).then(|| unsafe { store.load_pages(names(round - 1), to, 0) }.unwrap());
        assert!(dump.wait(Some(WAIT)) && load.is_none_or(|load| load.wait(Some(WAIT))));
    }
}

/// Attaches anew until it is killed, each time with the pool's memory and a namespace, and prints a line each time.
fn attach_anew(socket: &Path) {
    loop {
        let attachment = Attachment::connect(socket.to_owned(), None, WAIT, WAIT).unwrap();
        let engine = DeviceEngine::new(Arc::new(HostEngine::new(1).unwrap()));
        let _store = Store::new(&attachment, spec(), engine, WAIT).unwrap();
        assert!(attachment.attached());
        println!("attached");
    }
}

/// Answers frames with 64 bytes until the other side closes.
fn echo(socket: &Path) {
    let listener = SeqPacket::listen(socket, 1).unwrap();
    println!("ready");
    let mut peer = SeqPacket::from_fd(rustix::net::accept(&listener).unwrap());
    let mut buffer = FrameBuffer::default();
    while peer.recv(&mut buffer, None).is_ok() && peer.send(&[0; 64], None).is_ok() {}
}

struct Role(Child);

impl Role {
    fn start(role: &str, arguments: &[String]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(role).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn lines(&mut self) -> impl Iterator<Item = String> + use<> {
        BufReader::new(self.0.stdout.take().unwrap()).lines().map(Result::unwrap)
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the processor time of a process, including finished threads, in ticks of 10 ms.
fn processor_ms_of(process: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // Behind the name, which may contain spaces: user and system time are the 12th and 13th.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() * 10.0
}

/// Returns the exact processor time of this process's live threads.
fn own_processor_ms() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let texts = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("schedstat")).ok());
    texts.filter_map(|text| text.split_whitespace().next()?.parse::<f64>().ok()).sum::<f64>() / 1e6
}

fn measure(socket: &str, depot: u32, clients: usize, blocks: u64, seconds: u64) -> Value {
    let arguments = [socket.to_owned(), blocks.to_string(), seconds.to_string()];
    let begun = Instant::now();
    let mut running: Vec<Role> = (0..clients).map(|_| Role::start("client", &arguments)).collect();
    let mut outputs: Vec<_> = running.iter_mut().map(Role::lines).collect();
    let parse = |line: String| serde_json::from_str::<Value>(&line).unwrap();
    let attached: Vec<Value> = outputs.iter_mut().map(|lines| parse(lines.next().unwrap())).collect();
    let all_attached_s = begun.elapsed().as_secs_f64();
    let before = processor_ms_of(depot);
    for role in &mut running {
        role.0.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }
    let found: Vec<Value> = outputs.iter_mut().map(|lines| parse(lines.next().unwrap())).collect();
    let depot_ms = processor_ms_of(depot) - before;
    let numbers = |value: &Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let mut took: Vec<f64> = found.iter().flat_map(|one| numbers(&one["took_us"])).collect();
    took.sort_by(f64::total_cmp);
    let column = |name: &str| -> Vec<f64> {
        let mut all: Vec<f64> = attached.iter().map(|one| one[name].as_f64().unwrap()).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    json!({
        "clients": clients,
        "all_attached_s": all_attached_s,
        "attach_ms_median": at(&column("attach_ms"), 0.5),
        "attach_ms_most": at(&column("attach_ms"), 1.0),
        "attach_cpu_ms_median": at(&column("attach_cpu_ms"), 0.5),
        "page_tables_kib": at(&column("page_tables_kib"), 0.5),
        "lookups_per_s": found.iter().map(|one| one["per_s"].as_f64().unwrap()).sum::<f64>() as u64,
        "p50_us": at(&took, 0.5),
        "p99_us": at(&took, 0.99),
        "most_us": at(&took, 1.0),
        "not_full": found.iter().map(|one| one["not_full"].as_u64().unwrap()).sum::<u64>(),
        "depot_us_per_lookup": depot_ms * 1e3 / took.len() as f64,
    })
}

fn yardstick(directory: &Path, seconds: u64) -> Value {
    let path = directory.join("echo.sock");
    let mut role = Role::start("echo", &[path.to_str().unwrap().to_owned()]);
    assert_eq!(role.lines().next().as_deref(), Some("ready"));
    let mut peer = SeqPacket::connect(&path).unwrap();
    let (frame, mut buffer) = (vec![0; 2100], FrameBuffer::default());
    let took = time_calls(seconds, || {
        peer.send(&frame, None).unwrap();
        peer.recv(&mut buffer, None).unwrap();
    });
    json!({"what": "bare round trip", "p50_us": at(&took, 0.5), "p99_us": at(&took, 0.99)})
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |n: usize, usual: u64| arguments.get(n).map_or(usual, |text| text.parse().unwrap());
    let path = |n: usize| PathBuf::from(&arguments[n]);
    match arguments.first().map(String::as_str) {
        Some("depot") => return depot(&path(1), number(2, 0), number(3, 0)),
        Some("client") => return client(&path(1), number(2, 0), number(3, 0)),
        Some("traffic") => return traffic(&path(1), number(2, 0)),
        Some("attach") => return attach_anew(&path(1)),
        Some("echo") => return echo(&path(1)),
        _ => {}
    }
    let (pool_mib, blocks, seconds) = (number(0, 512), number(1, 100_000), number(2, 3));
    assert!(blocks > PREFIX && blocks * BLOCK < pool_mib << 20, "the blocks do not fit the pool");
    let directory = tempfile::tempdir().unwrap();
    println!("{}", yardstick(directory.path(), seconds));
    let socket = directory.path().join("depot.sock").to_str().unwrap().to_owned();
    let mut served = Role::start("depot", &[socket.clone(), pool_mib.to_string(), blocks.to_string()]);
    assert_eq!(served.lines().next().as_deref(), Some("ready"));
    while SeqPacket::connect(Path::new(&socket)).is_err() {
        std::thread::yield_now();
    }
    for clients in [1, 8, 16, 64] {
        println!("{}", measure(&socket, served.0.id(), clients, blocks, seconds));
    }
    if number(3, 0) == 0 {
        return;
    }
    for clients in [1, 16, 64] {
        let mut role = Role::start("attach", std::slice::from_ref(&socket));
        let mut lines = role.lines();
        assert_eq!(lines.next().as_deref(), Some("attached"));
        let begun = Instant::now();
        let mut line = measure(&socket, served.0.id(), clients, blocks, seconds);
        let took_s = begun.elapsed().as_secs_f64();
        drop(role);
        line["beside"] = "attaching".into();
        line["attached_anew_per_s"] = (lines.count() as f64 / took_s).into();
        println!("{line}");
    }
    for clients in [1_u64, 16, 64] {
        let first = blocks + clients * 1_000_000_000;
        let mut role = Role::start("traffic", &[socket.clone(), first.to_string()]);
        assert_eq!(role.lines().next().as_deref(), Some("ready"));
        let mut line = measure(&socket, served.0.id(), clients as usize, blocks, seconds);
        line["beside"] = "dumps and loads".into();
        println!("{line}");
    }
}

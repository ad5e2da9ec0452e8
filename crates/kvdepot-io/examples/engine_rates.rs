//! Throughput of the I/O engines compared with plain calls of two threads: `engine_rates DIRECTORY [ROUNDS]`.
//!
//! In every round each engine writes the same files, drops them from the page cache, and reads them. Rows are medians:
//! GB/s, its ratio to the yardstick of the same round, and processor time per GB.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // a failing measurement panics, and results go to stdout

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use kvdepot_io::{
    AlignedBuf, Class, Device, DirDevice, DirectUse, EngineKind, IoBuf, IoEngine, Op, Prepared, PsyncConfig,
    ReadFile, Request, SlotBuf, WriteFile, open_engine,
};

/// Bytes of all files of a round: 1,024 of the smallest.
const fn total(bytes: usize) -> usize {
    if bytes < 1 << 20 { bytes << 10 } else { 256 << 20 }
}

const SIZES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
const THREADS: usize = 2;

fn path(number: usize) -> PathBuf {
    PathBuf::from(format!("file{number}"))
}

fn cpu() -> Duration {
    // SAFETY: the call fills a structure of plain numbers, which outlives it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn drop_from_cache(dir: &Path, files: usize) {
    for number in 0..files {
        let file = File::open(dir.join(path(number))).unwrap();
        file.sync_all().unwrap();
        // SAFETY: advice about a file touches no memory.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
}

/// The code that moves the files.
enum Mover {
    /// Open, one call, close, on a few threads: no checks, no temporary names.
    Bare {
        direct: bool,
    },
    Engine(Arc<dyn IoEngine>, Arc<dyn Device>),
}

fn bare(dir: &Path, slots: &[SlotBuf], direct: bool, write: bool) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    // Relaxed: only the number is shared.
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(slot) = slots.get(number) else { return };
                    let mut options = File::options();
                    options.read(!write).write(write).create_new(write);
                    options.custom_flags(if direct { libc::O_DIRECT } else { 0 });
                    let file = options.open(dir.join(path(number))).unwrap();
                    let run = slot.runs()[0];
                    // SAFETY: the slot's one run, which only this thread uses now.
                    let memory = unsafe { std::slice::from_raw_parts_mut(run.ptr, run.len) };
                    if write {
                        file.write_all_at(memory, 0).unwrap();
                    } else {
                        file.read_exact_at(memory, 0).unwrap();
                    }
                }
            });
        }
    });
}

fn by_engine(engine: &dyn IoEngine, device: &Arc<dyn Device>, slots: &[SlotBuf], write: bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    let (tell, told) = unbounded();
    let request = |(number, slot): (usize, &SlotBuf)| {
        let (device, slot, tell, bytes) = (Arc::clone(device), slot.clone(), tell.clone(), slot.len());
        if write {
            let prepare =
                move || Ok(Prepared::Buf(IoBuf::for_write(AlignedBuf::zeroed(0), slot, bytes).unwrap()));
            let op = Op::Write(WriteFile {
                device,
                temporary: PathBuf::from(format!(".tmp{number}")),
                target: path(number),
                durable: false,
                prepare: Box::new(prepare),
                make_room: Box::new(|| Ok(false)),
                done: Box::new(move |outcome| tell.send(outcome.is_ok()).unwrap()),
            });
            return Request { class: Class::Write, deadline, op };
        }
        let buf = IoBuf::payload(slot, bytes).unwrap();
        let done = Box::new(move |outcome: kvdepot_core::Result<IoBuf>| tell.send(outcome.is_ok()).unwrap());
        Request {
            class: Class::Read,
            deadline,
            op: Op::Read(ReadFile { device, path: path(number), buf, fewest_bytes: bytes, done }),
        }
    };
    engine.submit(slots.iter().enumerate().map(request).collect());
    slots.iter().for_each(|_| assert!(told.recv().unwrap()));
}

impl Mover {
    fn go(&self, dir: &Path, slots: &[SlotBuf], write: bool) {
        match self {
            Self::Bare { direct } => bare(dir, slots, *direct, write),
            Self::Engine(engine, device) => by_engine(&**engine, device, slots, write),
        }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().expect("a directory"));
    let rounds: usize = arguments.next().map_or(5, |rounds| rounds.parse().expect("a number of rounds"));
    let config = PsyncConfig { queue_depth: 65_536, ..PsyncConfig::default() };
    for bytes in SIZES {
        for (how, direct_use) in [("direct", DirectUse::Always), ("buffered", DirectUse::Never)] {
            let direct = direct_use == DirectUse::Always;
            let device: Arc<dyn Device> = Arc::new(DirDevice::open(&dir, direct_use).unwrap());
            let mut movers = vec![("bare", Mover::Bare { direct })];
            for kind in [EngineKind::Psync, EngineKind::Aio, EngineKind::IoUring] {
                let engine = open_engine(kind, &config, &[], None).unwrap();
                movers.push((engine.name(), Mover::Engine(engine, Arc::clone(&device))));
            }
            let slots: Vec<SlotBuf> = (0..total(bytes) / bytes).map(|_| SlotBuf::anonymous(bytes)).collect();
            for slot in &slots {
                slot.write_at(0, &vec![7; bytes]);
            }
            // By name and direction: rate, ratio to the yardstick, processor time per GB.
            let mut found: BTreeMap<(&str, bool), [Vec<f64>; 3]> = BTreeMap::new();
            for _ in 0..rounds {
                let mut yardstick = [0.0; 2];
                for (name, mover) in &movers {
                    for write in [true, false] {
                        if !write {
                            drop_from_cache(&dir, slots.len());
                        }
                        let (began, before) = (Instant::now(), cpu());
                        mover.go(&dir, &slots, write);
                        let (time, used) = (began.elapsed().as_secs_f64(), (cpu() - before).as_secs_f64());
                        let gigabytes = total(bytes) as f64 / 1e9;
                        let rate = gigabytes / time;
                        if *name == "bare" {
                            yardstick[usize::from(write)] = rate;
                        }
                        let row = found.entry((name, write)).or_default();
                        row[0].push(rate);
                        row[1].push(rate / yardstick[usize::from(write)]);
                        row[2].push(used / gigabytes);
                    }
                    (0..slots.len()).for_each(|number| std::fs::remove_file(dir.join(path(number))).unwrap());
                }
            }
            for ((name, write), [rates, ratios, used]) in &mut found {
                let what = if *write { "write" } else { "read" };
                println!(
                    "{:>6} KiB {how:<8} {what:<5} {name:<8} {:6.2} GB/s  ratio {:5.2}  {:6.3} s/GB",
                    bytes >> 10,
                    median(rates),
                    median(ratios),
                    median(used)
                );
            }
        }
    }
}

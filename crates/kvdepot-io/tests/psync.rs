//! P2 and P7 of the psync engine: everything ends, in bounded time, and a stuck thread stops nobody else.
#![allow(clippy::unwrap_used)] // a test that cannot go on shall panic

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use kvdepot_core::{ErrorKind, Result};
use kvdepot_io::faults::{Fault, FaultDevice, FaultOp, Faults};
use kvdepot_io::{
    AlignedBuf, Call, Class, Device, DirDevice, DirectUse, FileWritten, IoBuf, IoEngine, Op, Prepared,
    PsyncConfig, PsyncEngine, ReadFile, Request, SlotBuf, WriteFile,
};

const LONG: Duration = Duration::from_secs(120);

fn engine(read_threads: usize, write_threads: usize, queue_depth: usize) -> PsyncEngine {
    PsyncEngine::new(PsyncConfig { read_threads, write_threads, queue_depth, ..PsyncConfig::default() })
        .unwrap()
}

fn call(class: Class, timeout: Duration, run: impl FnOnce(Result<()>) + Send + 'static) -> Request {
    Request { class, deadline: Instant::now() + timeout, op: Op::Call(Call { run: Box::new(run) }) }
}

/// A request that keeps its thread until the returned sender is dropped.
fn plug(class: Class, timeout: Duration, began: &Sender<()>) -> (Request, Sender<()>) {
    let (release, held) = unbounded::<()>();
    let began = began.clone();
    let request = call(class, timeout, move |outcome| {
        outcome.unwrap();
        began.send(()).unwrap();
        let _ = held.recv();
    });
    (request, release)
}

fn tell<T: Send + 'static>(to: &Sender<T>) -> impl FnOnce(T) + Send + 'static {
    let to = to.clone();
    move |value| to.send(value).unwrap()
}

fn next<T>(from: &Receiver<T>) -> T {
    from.recv_timeout(LONG).expect("a request ended without saying so")
}

#[test]
fn reads_find_a_thread_while_all_writers_are_busy() {
    let engine = engine(1, 2, 64);
    let (began, begun) = unbounded();
    let (plugs, releases): (Vec<_>, Vec<_>) = (0..3).map(|_| plug(Class::Write, LONG, &began)).unzip();
    engine.submit(plugs);
    next(&begun);
    next(&begun);
    let (ended, end) = unbounded();
    engine.submit(vec![call(Class::Read, LONG, tell(&ended))]);
    next(&end).unwrap();
    assert!(begun.try_recv().is_err(), "a third write began though only two may");
    drop(releases);
    assert!(engine.drain(Instant::now() + LONG));
}

#[test]
fn a_full_queue_is_busy_and_a_waiting_request_times_out() {
    let engine = engine(1, 1, 1);
    let (began, begun) = unbounded();
    let (first, release_first) = plug(Class::Read, LONG, &began);
    let (second, release_second) = plug(Class::Read, LONG, &began);
    engine.submit(vec![first]);
    next(&begun);
    engine.submit(vec![second]);
    next(&begun);
    let (ended, end) = unbounded();
    engine.submit(vec![
        call(Class::Read, Duration::from_secs(1), tell(&ended)),
        call(Class::Read, LONG, tell(&ended)),
        call(Class::Read, Duration::ZERO, tell(&ended)),
    ]);
    let mut kinds: Vec<ErrorKind> = (0..3).map(|_| next(&end).unwrap_err().kind()).collect();
    assert_eq!(kinds.pop(), Some(ErrorKind::Timeout));
    kinds.sort_by_key(|kind| kind.as_str());
    assert_eq!(kinds, [ErrorKind::Busy, ErrorKind::Timeout]);
    assert!(!engine.drain(Instant::now()));
    drop((release_first, release_second));
    assert!(engine.drain(Instant::now() + LONG));
}

#[test]
fn stuck_threads_are_replaced_and_end_when_let_go() {
    let engine = engine(1, 1, 64);
    let (began, begun) = unbounded();
    let mut releases = Vec::new();
    for class in [Class::Read, Class::Write] {
        let (request, release) = plug(class, Duration::from_secs(5), &began);
        engine.submit(vec![request]);
        next(&begun);
        releases.push(release);
    }
    let (ended, end) = unbounded();
    engine.submit(vec![call(Class::Read, LONG, tell(&ended)), call(Class::Write, LONG, tell(&ended))]);
    next(&end).unwrap();
    next(&end).unwrap();
    assert_eq!(engine.stats().written_off, 2);
    drop(releases);
    assert!(engine.drain(Instant::now() + LONG));
    assert_eq!((engine.stats().written_off, engine.stats().running), (0, 0));
}

#[test]
fn a_panic_in_a_callback_costs_no_thread() {
    let engine = engine(1, 1, 64);
    for _ in 0..4 {
        engine.submit(vec![call(Class::Read, LONG, |_| panic!("a callback's own fault"))]);
    }
    let (ended, end) = unbounded();
    engine.submit(vec![call(Class::Read, LONG, tell(&ended))]);
    next(&end).unwrap();
}

#[test]
fn shutdown_ends_what_waits() {
    let engine = engine(1, 1, 64);
    let (began, begun) = unbounded();
    let mut releases = Vec::new();
    for _ in 0..2 {
        let (request, release) = plug(Class::Read, LONG, &began);
        engine.submit(vec![request]);
        next(&begun);
        releases.push(release);
    }
    let (ended, end) = unbounded();
    engine.submit(vec![call(Class::Read, LONG, tell(&ended))]);
    let closing = std::thread::spawn(move || drop(engine));
    assert_eq!(next(&end).unwrap_err().kind(), ErrorKind::Closed);
    drop(releases);
    closing.join().unwrap();
}

fn write_then_read(device: &Arc<dyn Device>, engine: &dyn IoEngine, used_bytes: usize) -> Result<()> {
    let body = SlotBuf::anonymous(used_bytes.next_multiple_of(4096));
    body.write_at(0, &(0..used_bytes).map(|i| i as u8).collect::<Vec<_>>());
    let deadline = Instant::now() + LONG;
    let (ended, end) = unbounded();
    let prepare = move || {
        let mut head = AlignedBuf::zeroed(4096);
        head[..4].copy_from_slice(b"head");
        Ok(Prepared::Buf(IoBuf::for_write(head, body, used_bytes).unwrap()))
    };
    let (temporary, target) = (PathBuf::from("d/.tmp"), PathBuf::from("d/file"));
    let write = WriteFile {
        device: Arc::clone(device),
        temporary,
        target: target.clone(),
        durable: true,
        prepare: Box::new(prepare),
        make_room: Box::new(|| false),
        done: Box::new(tell(&ended)),
    };
    engine.submit(vec![Request { class: Class::Write, deadline, op: Op::Write(write) }]);
    assert_eq!(next(&end)?, FileWritten::Published);
    let slot = SlotBuf::anonymous(used_bytes.next_multiple_of(4096));
    let buf = IoBuf::for_read(4096, slot.clone(), slot.len()).unwrap();
    let (ended, end) = unbounded();
    let read = ReadFile { device: Arc::clone(device), path: target, buf, done: Box::new(tell(&ended)) };
    engine.submit(vec![Request { class: Class::Read, deadline, op: Op::Read(read) }]);
    let buf = next(&end)?;
    assert_eq!(&buf.head()[..4], b"head");
    let mut out = vec![0; slot.len()];
    slot.read_at(0, &mut out);
    assert!(out.iter().enumerate().all(|(i, &b)| b == if i < used_bytes { i as u8 } else { 0 }));
    Ok(())
}

#[test]
fn files_come_back_whole_also_through_short_calls() {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let engine = engine(2, 2, 64);
    for direct in [DirectUse::Never, DirectUse::Always, DirectUse::ColdReads] {
        let plain: Arc<dyn Device> = Arc::new(DirDevice::open(dir.path(), direct).unwrap());
        let faults = Faults::seeded(3);
        faults.chance(FaultOp::Read, Fault::Short, 0.5).chance(FaultOp::Write, Fault::Short, 0.5);
        let short: Arc<dyn Device> = Arc::new(FaultDevice::new(Arc::clone(&plain), faults));
        for used_bytes in [1, 4096, 5000, 300_000] {
            write_then_read(&plain, &engine, used_bytes).unwrap();
            if direct != DirectUse::Always {
                write_then_read(&short, &engine, used_bytes).unwrap();
            }
        }
    }
}

#[test]
fn a_failed_write_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(1, 1, 64);
    for (op, kind) in [(FaultOp::Write, ErrorKind::NoSpace), (FaultOp::Publish, ErrorKind::Io)] {
        let faults = Faults::default();
        faults.at(op, 0, if kind == ErrorKind::Io { Fault::Eio } else { Fault::NoSpace });
        let plain: Arc<dyn Device> = Arc::new(DirDevice::open(dir.path(), DirectUse::Never).unwrap());
        let device: Arc<dyn Device> = Arc::new(FaultDevice::new(plain, faults));
        assert_eq!(write_then_read(&device, &engine, 5000).unwrap_err().kind(), kind);
        assert_eq!(std::fs::read_dir(dir.path().join("d")).unwrap().count(), 0);
    }
}

//! P1, P2, P4 and P7 of every I/O engine: every request completes in bounded time, files are complete, a stuck thread
//! blocks no other, and memory is not returned while it can still be written.
#![allow(clippy::unwrap_used)] // a failing test panics

mod common;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use common::{
    Kind, LONG, Place, call, has_direct, is_right, next, plug, read, read_now, tell, write, write_now,
};
use crossbeam_channel::{Receiver, unbounded};
use kvdepot_core::limits::IO_FLIGHTS_MAX;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_io::kernel::{AioQueue, Completion, Entry, KernelQueue};
use kvdepot_io::{
    AlignedBuf, Class, DirectUse, FileWritten, IoBuf, IoEngine, Op, PsyncConfig, QueuedEngine, Request,
};

/// Runs each test on every engine that this system has.
macro_rules! on_every_engine {
    ($($test:ident)*) => {
        on_engine! { psync Psync $($test)* }
        on_engine! { aio Aio $($test)* }
        on_engine! { io_uring IoUring $($test)* }
    };
}
macro_rules! on_queues {
    ($($test:ident)*) => {
        mod queues { use super::*;
            mod aio { $(#[test] fn $test() { super::super::$test(super::Kind::Aio); })* }
            mod io_uring { $(#[test] fn $test() { super::super::$test(super::Kind::IoUring); })* }
        }
    };
}
macro_rules! on_engine {
    ($name:ident $kind:ident $($test:ident)*) => {
        mod $name { $(#[test] fn $test() { super::$test(super::Kind::$kind); })* }
    };
}

on_every_engine! {
    reads_find_a_thread_while_all_writers_are_busy
    a_full_queue_is_busy_and_a_waiting_request_times_out
    stuck_threads_are_replaced_and_end_when_let_go
    a_panic_in_a_callback_costs_no_thread
    shutdown_ends_what_waits
    files_come_back_whole_also_through_short_calls
    many_files_at_once
    a_failed_write_leaves_nothing
    a_full_disk_is_tried_once_more_when_room_was_made
    what_cannot_be_read_says_so
    a_read_says_how_long_a_shorter_file_is
    a_late_request_keeps_its_memory_until_the_system_is_through
    shutdown_leaves_memory_to_what_is_under_way
}

on_queues! {
    a_request_that_the_kernel_gives_up_is_late_and_leaves_nothing
    a_thread_full_of_late_requests_is_replaced
    a_queue_that_breaks_frees_nothing_and_is_replaced
    completions_are_heard_of_while_others_keep_coming
    a_sync_that_failed_is_not_tried_again
}

fn reads_find_a_thread_while_all_writers_are_busy(kind: Kind) {
    let Some(engine) = kind.open(1, 2, 64, &Faults::default()) else { return };
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

fn a_full_queue_is_busy_and_a_waiting_request_times_out(kind: Kind) {
    let Some(engine) = kind.open(1, 1, 1, &Faults::default()) else { return };
    let (began, begun) = unbounded();
    let mut releases = Vec::new();
    for _ in 0..kind.readers(1, 1) {
        let (request, release) = plug(Class::Read, LONG, &began);
        engine.submit(vec![request]);
        next(&begun);
        releases.push(release);
    }
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
    drop(releases);
    assert!(engine.drain(Instant::now() + LONG));
}

fn stuck_threads_are_replaced_and_end_when_let_go(kind: Kind) {
    let Some(engine) = kind.open(1, 1, 64, &Faults::default()) else { return };
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
    assert_eq!(engine.stats().running, 0);
    let until = Instant::now() + LONG;
    while engine.stats().written_off > 0 {
        assert!(Instant::now() < until, "a thread that was let go did not end");
        std::thread::yield_now();
    }
}

fn a_panic_in_a_callback_costs_no_thread(kind: Kind) {
    let Some(engine) = kind.open(1, 1, 64, &Faults::default()) else { return };
    for _ in 0..4 {
        engine.submit(vec![call(Class::Read, LONG, |_| panic!("a callback's own fault"))]);
    }
    let (ended, end) = unbounded();
    engine.submit(vec![call(Class::Read, LONG, tell(&ended))]);
    next(&end).unwrap();
}

fn shutdown_ends_what_waits(kind: Kind) {
    let Some(engine) = kind.open(1, 1, 64, &Faults::default()) else { return };
    let (began, begun) = unbounded();
    let mut releases = Vec::new();
    for _ in 0..kind.readers(1, 1) {
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

fn files_come_back_whole_also_through_short_calls(kind: Kind) {
    for direct in [DirectUse::Never, DirectUse::Always, DirectUse::ColdReads] {
        for short in [false, true] {
            let place = Place::new(kind, direct);
            let Some(engine) = kind.open(2, 2, 64, &place.faults) else { return };
            if short {
                place.faults.chance(FaultOp::Read, Fault::Short, 0.5);
                // O_DIRECT allows no short write that ends within a step.
                let odd = if direct == DirectUse::Always { 0.0 } else { 0.5 };
                place.faults.chance(FaultOp::Write, Fault::Short, odd);
            }
            for (number, used_bytes) in [1, 4096, 5000, 300_000].into_iter().enumerate() {
                write_now(&place, &*engine, number, used_bytes).unwrap();
                read_now(&place, &*engine, number, used_bytes).unwrap();
            }
        }
    }
}

fn many_files_at_once(kind: Kind) {
    const FILES: usize = 120;
    for direct in [DirectUse::Never, DirectUse::Always] {
        let place = Place::new(kind, direct);
        let Some(engine) = kind.open(2, 2, 4096, &place.faults) else { return };
        let bytes = |number: usize| 1 + number * 2999;
        let (ended, end) = unbounded();
        let writes =
            (0..FILES).map(|number| write(&place.device, number, bytes(number), LONG, &ended).0).collect();
        engine.submit(writes);
        for _ in 0..FILES {
            assert!(matches!(next(&end).unwrap(), FileWritten::Published));
        }
        assert_eq!(place.names().len(), FILES, "something else than the files stayed");
        // Each with its own channel, to tell them apart.
        let mut ends = Vec::new();
        let mut reads = Vec::new();
        for number in 0..FILES {
            let (ended, end) = unbounded();
            reads.push(read(&place.device, number, bytes(number), LONG, &ended).0);
            ends.push(end);
        }
        engine.submit(reads);
        for (number, end) in ends.iter().enumerate() {
            assert!(is_right(&next(end).unwrap(), number, bytes(number)), "file {number}");
        }
        assert!(engine.drain(Instant::now() + LONG));
        assert_eq!((engine.stats().running, engine.stats().ended), (0, 2 * FILES as u64));
    }
}

fn a_failed_write_leaves_nothing(kind: Kind) {
    for (op, fault, error) in [
        (FaultOp::Write, Fault::NoSpace, ErrorKind::NoSpace),
        (FaultOp::Write, Fault::Eio, ErrorKind::Io),
        (FaultOp::Meta, Fault::Eio, ErrorKind::Io),
        (FaultOp::Flush, Fault::Eio, ErrorKind::Io),
        (FaultOp::Publish, Fault::Eio, ErrorKind::Io),
    ] {
        for direct in [DirectUse::Never, DirectUse::Always] {
            let place = Place::new(kind, direct);
            let Some(engine) = kind.open(1, 1, 64, &place.faults) else { return };
            place.faults.at(op, 0, fault);
            // Number 0 is durable, so it is synced.
            let failed = write_now(&place, &*engine, 0, 5000).unwrap_err();
            assert_eq!(failed.kind(), error, "{op:?}");
            if kind.is_queued() && direct == DirectUse::Always && matches!(op, FaultOp::Write | FaultOp::Meta)
            {
                assert!(failed.to_string().contains(".tmp0"), "{failed}");
            }
            assert!(place.names().is_empty(), "{op:?} left {:?}", place.names());
            write_now(&place, &*engine, 0, 5000).unwrap();
            read_now(&place, &*engine, 0, 5000).unwrap();
        }
    }
}

fn a_full_disk_is_tried_once_more_when_room_was_made(kind: Kind) {
    for (times, room, ends) in [
        (1, Some(true), None),
        (2, Some(true), Some(ErrorKind::NoSpace)),
        (1, Some(false), Some(ErrorKind::NoSpace)),
        (1, None, Some(ErrorKind::Busy)),
    ] {
        let place = Place::new(kind, DirectUse::Always);
        let Some(engine) = kind.open(1, 1, 64, &place.faults) else { return };
        for nth in 0..times {
            place.faults.at(FaultOp::Write, nth, Fault::NoSpace);
        }
        let (ended, end) = unbounded();
        let (mut request, _) = write(&place.device, 1, 5000, LONG, &ended);
        if let Op::Write(write) = &mut request.op {
            let busy = || Error::new(ErrorKind::Busy, "what takes up the room is being read");
            write.make_room = Box::new(move || room.ok_or_else(busy));
        }
        engine.submit(vec![request]);
        assert_eq!(next(&end).err().map(|error| error.kind()), ends);
        assert_eq!(place.names().len(), usize::from(ends.is_none()));
    }
}

fn what_cannot_be_read_says_so(kind: Kind) {
    for direct in [DirectUse::Never, DirectUse::Always] {
        let place = Place::new(kind, direct);
        let Some(engine) = kind.open(1, 1, 64, &place.faults) else { return };
        write_now(&place, &*engine, 0, 9000).unwrap();
        let kind_of = |number, bytes| read_now(&place, &*engine, number, bytes).unwrap_err().kind();
        assert_eq!(kind_of(1, 9000), ErrorKind::NotFound);
        assert_eq!(kind_of(0, 90_000), ErrorKind::Corrupt, "the file is shorter");
        place.faults.at(FaultOp::Read, 0, Fault::Eio);
        assert_eq!(kind_of(0, 9000), ErrorKind::Io);
        place.faults.at(FaultOp::Open, 0, Fault::Eio);
        assert_eq!(kind_of(0, 9000), ErrorKind::Io);
        read_now(&place, &*engine, 0, 9000).unwrap();
    }
}

fn a_read_says_how_long_a_shorter_file_is(kind: Kind) {
    for direct in [DirectUse::Never, DirectUse::Always] {
        let place = Place::new(kind, direct);
        let Some(engine) = kind.open(1, 1, 64, &place.faults) else { return };
        write_now(&place, &*engine, 0, 9000).unwrap();
        let length = 4096 + 12_288;
        for (fewest, outcome) in [(length, Ok(length)), (length + 1, Err(ErrorKind::Corrupt))] {
            let (ended, end) = unbounded();
            let (mut request, _held) = read(&place.device, 0, 90_000, LONG, &ended);
            let Op::Read(read) = &mut request.op else { unreachable!("it is a read") };
            read.fewest_bytes = fewest;
            engine.submit(vec![request]);
            let came = next(&end);
            if let Ok(buf) = &came {
                let mut bytes = vec![0; 9000];
                buf.body().read_at(0, &mut bytes);
                assert!(bytes == common::bytes_of(0, 9000));
            }
            assert_eq!(came.map(|buf| buf.filled()).map_err(|error| error.kind()), outcome);
        }
    }
}

/// A read of file 1 and a write of file 3 that hang in the system before their deadlines.
struct Late {
    place: Place,
    engine: Arc<dyn IoEngine>,
    soon: Duration,
    end: Receiver<Result<IoBuf>>,
    writing: Receiver<Result<FileWritten>>,
    read_held: Weak<AlignedBuf>,
    write_held: Weak<AlignedBuf>,
}

impl Late {
    fn begin(make: impl Fn() -> Option<(Place, Arc<dyn IoEngine>)>) -> Option<Self> {
        // On a busy machine or disk, deadlines may pass before requests have come that far.
        for soon in [3, 12, 48].map(Duration::from_secs) {
            let (place, engine) = make()?;
            write_now(&place, &*engine, 1, 9000).unwrap();
            place.faults.hang(FaultOp::Read).hang(FaultOp::Write);
            let ((ended, end), (written, writing)) = (unbounded(), unbounded());
            let (late_read, read_held) = read(&place.device, 1, 9000, soon, &ended);
            let (late_write, write_held) = write(&place.device, 3, 9000, soon, &written);
            engine.submit(vec![late_read, late_write]);
            if place.faults.wait_hung(2, Instant::now() + soon) {
                return Some(Self { place, engine, soon, end, writing, read_held, write_held });
            }
            place.faults.release();
        }
        panic!("requests never reach the system before their deadlines");
    }
}

fn a_late_request_keeps_its_memory_until_the_system_is_through(kind: Kind) {
    let begun = Late::begin(|| {
        let place = Place::new(kind, DirectUse::Always);
        let engine = kind.open(1, 1, 64, &place.faults)?;
        Some((place, engine))
    });
    let Some(Late { place, engine, soon, end, writing, read_held, write_held }) = begun else { return };
    // Past the deadline: by then the engine has handled the late requests and served others.
    let (others, other) = unbounded();
    engine.submit(vec![call(Class::Read, LONG, tell(&others)), call(Class::Write, LONG, tell(&others))]);
    next(&other).unwrap();
    next(&other).unwrap();
    std::thread::sleep(soon + Duration::from_millis(50));
    assert!(
        end.try_recv().is_err() && writing.try_recv().is_err(),
        "it ended while the system had its memory"
    );
    assert!(read_held.strong_count() > 0 && write_held.strong_count() > 0);
    assert_eq!(engine.stats().running, 2);
    place.faults.release();
    assert!(is_right(&next(&end).unwrap(), 1, 9000));
    assert!(matches!(next(&writing).unwrap(), FileWritten::Published));
    assert!(engine.drain(Instant::now() + LONG));
    assert_eq!((read_held.strong_count(), write_held.strong_count()), (0, 0));
}

fn shutdown_leaves_memory_to_what_is_under_way(kind: Kind) {
    let place = Place::new(kind, DirectUse::Always);
    let Some(engine) = kind.open(1, 1, 64, &place.faults) else { return };
    write_now(&place, &*engine, 1, 9000).unwrap();
    place.faults.hang(FaultOp::Read);
    let (ended, end) = unbounded();
    let (request, held) = read(&place.device, 1, 9000, LONG, &ended);
    engine.submit(vec![request]);
    assert!(place.faults.wait_hung(1, Instant::now() + LONG));
    drop(engine);
    assert!(end.try_recv().is_err());
    assert!(held.strong_count() > 0, "memory went while the system may write into it");
    place.faults.release();
    assert!(is_right(&next(&end).unwrap(), 1, 9000));
    let until = Instant::now() + LONG;
    while held.strong_count() > 0 {
        assert!(Instant::now() < until, "memory stayed for ever");
        std::thread::yield_now();
    }
}

/// Returns a place and an engine of one thread for reads and one for writes, if both bypass the page cache here.
fn direct(kind: Kind) -> Option<(Place, Arc<dyn IoEngine>)> {
    let place = Place::new(kind, DirectUse::Always);
    let engine = kind.open(1, 1, 64, &place.faults)?;
    if !has_direct(place.dir.path()) {
        eprintln!("not tested: no O_DIRECT here");
        return None;
    }
    Some((place, engine))
}

fn a_request_that_the_kernel_gives_up_is_late_and_leaves_nothing(kind: Kind) {
    let begun = Late::begin(|| {
        let (place, engine) = direct(kind)?;
        place.faults.let_cancel();
        Some((place, engine))
    });
    let Some(Late { place, engine, end, writing, read_held, write_held, .. }) = begun else { return };
    assert_eq!(next(&end).unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(next(&writing).unwrap_err().kind(), ErrorKind::Timeout);
    assert!(engine.drain(Instant::now() + LONG));
    assert_eq!((read_held.strong_count(), write_held.strong_count()), (0, 0));
    assert_eq!(place.names(), ["file1"]);
    place.faults.release();
    read_now(&place, &*engine, 1, 9000).unwrap();
}

fn a_thread_full_of_late_requests_is_replaced(kind: Kind) {
    let Some((place, engine)) = direct(kind) else { return };
    write_now(&place, &*engine, 1, 9000).unwrap();
    place.faults.hang(FaultOp::Read);
    let (ended, end) = unbounded();
    let soon = Duration::from_secs(5);
    let reads = (0..IO_FLIGHTS_MAX).map(|_| read(&place.device, 1, 9000, soon, &ended).0).collect();
    engine.submit(reads);
    assert!(place.faults.wait_hung(IO_FLIGHTS_MAX, Instant::now() + LONG));
    let (others, other) = unbounded();
    engine.submit(vec![call(Class::Read, LONG, tell(&others))]);
    next(&other).unwrap();
    assert_eq!(engine.stats().written_off, 1);
    // The callback runs before its thread reports the end.
    let until = Instant::now() + LONG;
    while engine.stats().running > IO_FLIGHTS_MAX {
        assert!(Instant::now() < until, "a call did not end");
        std::thread::yield_now();
    }
    assert_eq!(engine.stats().running, IO_FLIGHTS_MAX);
    place.faults.release();
    (0..IO_FLIGHTS_MAX).for_each(|_| assert!(is_right(&next(&end).unwrap(), 1, 9000)));
    assert!(engine.drain(Instant::now() + LONG));
    read_now(&place, &*engine, 1, 9000).unwrap();
}

fn a_queue_that_breaks_frees_nothing_and_is_replaced(kind: Kind) {
    let Some((place, engine)) = direct(kind) else { return };
    write_now(&place, &*engine, 1, 9000).unwrap();
    place.faults.hang(FaultOp::Read);
    let (lost, loss) = unbounded();
    let (request, held) = read(&place.device, 1, 9000, LONG, &lost);
    engine.submit(vec![request]);
    assert!(place.faults.wait_hung(1, Instant::now() + LONG));
    place.faults.at(FaultOp::Queue, 0, Fault::Eio);
    let (ended, end) = unbounded();
    engine.submit(vec![read(&place.device, 1, 9000, LONG, &ended).0]);
    assert_eq!(next(&end).unwrap_err().kind(), ErrorKind::Io, "the kernel had not seen this one");
    // By another thread: the one whose queue broke no longer checks for completions.
    let (others, other) = unbounded();
    engine.submit(vec![call(Class::Read, LONG, tell(&others))]);
    next(&other).unwrap();
    place.faults.release();
    read_now(&place, &*engine, 1, 9000).unwrap();
    drop(engine);
    assert!(loss.try_recv().is_err(), "nobody knows whether the kernel is through with it");
    assert!(held.strong_count() > 0, "memory went that the kernel may write into");
}

fn completions_are_heard_of_while_others_keep_coming(kind: Kind) {
    let Some((place, engine)) = direct(kind) else { return };
    write_now(&place, &*engine, 1, 9000).unwrap();
    // One that the kernel completes, and one that it cancels on request.
    place.faults.let_cancel().at(FaultOp::Read, 1, Fault::Hang);
    let (ended, end) = unbounded();
    let (lost, late) = unbounded();
    let mut batch = vec![
        read(&place.device, 1, 9000, LONG, &ended).0,
        read(&place.device, 1, 9000, Duration::from_secs(2), &lost).0,
    ];
    // Each queues the next one before it completes.
    fn chain(engine: &Weak<dyn IoEngine>, until: Instant, on: &Arc<AtomicBool>) -> Request {
        let (engine, on) = (Weak::clone(engine), Arc::clone(on));
        call(Class::Read, LONG, move |_| {
            let goes_on = on.load(Ordering::Relaxed) && Instant::now() < until;
            on.store(goes_on, Ordering::Relaxed);
            if let Some(to) = engine.upgrade().filter(|_| goes_on) {
                to.submit(vec![chain(&engine, until, &on)]);
            }
        })
    }
    let on = Arc::new(AtomicBool::new(true));
    batch.push(chain(&Arc::downgrade(&engine), Instant::now() + LONG / 4, &on));
    engine.submit(batch);
    assert!(is_right(&next(&end).unwrap(), 1, 9000));
    assert_eq!(next(&late).unwrap_err().kind(), ErrorKind::Timeout);
    assert!(on.swap(false, Ordering::Relaxed), "they ended only when nothing else came");
    assert!(engine.drain(Instant::now() + LONG));
}

fn a_sync_that_failed_is_not_tried_again(kind: Kind) {
    let Some((place, engine)) = direct(kind) else { return };
    // The system reports a write-back error once: another sync would succeed.
    place.faults.at(FaultOp::Meta, 0, Fault::NoMemory);
    write_now(&place, &*engine, 0, 5000).unwrap_err();
    assert!(place.names().is_empty(), "a file was published whose bytes are lost: {:?}", place.names());
    write_now(&place, &*engine, 0, 5000).unwrap();
}

/// A queue that breaks and is replaced as a test decides.
#[derive(Debug, Default)]
struct Whims {
    /// Number of queues made.
    made: AtomicUsize,
    /// No more queues can be made.
    none: AtomicBool,
    /// The next wait for a wake-up fails.
    deaf: AtomicBool,
    /// The next wait breaks the queue after something has completed.
    breaks: AtomicBool,
}

#[derive(Debug)]
struct Whimsical(AioQueue, Arc<Whims>);

impl KernelQueue for Whimsical {
    unsafe fn push(&mut self, entry: Entry<'_>) -> io::Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.push(entry) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.0.submit()
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        self.0.wait(timeout, out)?;
        for completion in out.iter_mut().filter(|completion| completion.token == 0) {
            if self.1.deaf.swap(false, Ordering::Relaxed) {
                completion.result = -i64::from(libc::EINVAL);
            }
        }
        let broken = out.iter().any(|completion| completion.token != 0);
        if broken && self.1.breaks.swap(false, Ordering::Relaxed) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(())
    }

    fn cancel(&mut self, token: u64) {
        self.0.cancel(token);
    }

    fn takes_buffered_reads(&self) -> bool {
        self.0.takes_buffered_reads()
    }
}

fn whimsical() -> Option<(Arc<Whims>, Arc<dyn IoEngine>, Place)> {
    let place = Place::new(Kind::Aio, DirectUse::Always);
    if AioQueue::new(8).is_err() || !has_direct(place.dir.path()) {
        eprintln!("not tested: no aio or no O_DIRECT here");
        return None;
    }
    let whims = Arc::new(Whims::default());
    let mine = Arc::clone(&whims);
    let make = move |operations| match mine.none.load(Ordering::Relaxed) {
        true => Err(io::Error::from_raw_os_error(libc::EMFILE)),
        false => {
            mine.made.fetch_add(1, Ordering::Relaxed);
            Ok(Box::new(Whimsical(AioQueue::new(operations)?, Arc::clone(&mine))) as Box<dyn KernelQueue>)
        }
    };
    let config = PsyncConfig { read_threads: 1, write_threads: 1, ..PsyncConfig::default() };
    let engine = QueuedEngine::with("whimsical", config, None, make).unwrap();
    write_now(&place, &engine, 1, 9000).unwrap();
    Some((whims, Arc::new(engine), place))
}

#[test]
fn what_completed_before_a_queue_broke_is_told() {
    let Some((whims, engine, place)) = whimsical() else { return };
    whims.breaks.store(true, Ordering::Relaxed);
    read_now(&place, &*engine, 1, 9000).unwrap();
    assert!(!whims.breaks.load(Ordering::Relaxed));
    read_now(&place, &*engine, 1, 9000).unwrap();
    assert!(engine.drain(Instant::now() + LONG));
}

#[test]
fn a_thread_that_cannot_be_woken_is_replaced() {
    let Some((whims, engine, place)) = whimsical() else { return };
    whims.deaf.store(true, Ordering::Relaxed);
    let until = Instant::now() + LONG;
    while whims.deaf.load(Ordering::Relaxed) {
        assert!(Instant::now() < until);
        read_now(&place, &*engine, 1, 9000).unwrap();
    }
    assert_eq!(
        whims.made.load(Ordering::Relaxed),
        3,
        "one for each thread, and one for the one in its place"
    );
    write_now(&place, &*engine, 2, 9000).unwrap();
    assert!(engine.drain(Instant::now() + LONG));
}

#[test]
fn where_no_queue_can_be_made_any_more_plain_calls_serve() {
    let Some((whims, engine, place)) = whimsical() else { return };
    whims.none.store(true, Ordering::Relaxed);
    whims.breaks.store(true, Ordering::Relaxed);
    read_now(&place, &*engine, 1, 9000).unwrap();
    read_now(&place, &*engine, 1, 9000).unwrap();
    whims.none.store(false, Ordering::Relaxed);
    whims.breaks.store(true, Ordering::Relaxed);
    let until = Instant::now() + LONG;
    while whims.breaks.load(Ordering::Relaxed) {
        assert!(Instant::now() < until, "a queue was not asked for again");
        read_now(&place, &*engine, 1, 9000).unwrap();
    }
    assert!(engine.drain(Instant::now() + LONG));
}

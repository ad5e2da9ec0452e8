//! Tools shared by the tests of I/O engines.
#![allow(dead_code, clippy::unwrap_used)] // each test uses a part; a failing test panics

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use kvdepot_core::{ErrorKind, Result};
use kvdepot_io::faults::{FaultDevice, Faults};
use kvdepot_io::{
    AlignedBuf, Call, Class, Device, DirDevice, DirectUse, FileWritten, IoBuf, IoEngine, MemRun, Op,
    Prepared, PsyncConfig, PsyncEngine, QueuedEngine, ReadFile, Request, SlotBuf, WriteFile,
};

/// Reached only when something hangs.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// An engine under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Psync,
    Aio,
    IoUring,
}

impl Kind {
    /// Starts the engine. Returns `None` where this system lacks or forbids it.
    pub(crate) fn open(
        self,
        read_threads: usize,
        write_threads: usize,
        queue_depth: usize,
        faults: &Faults,
    ) -> Option<Arc<dyn IoEngine>> {
        let config = PsyncConfig { read_threads, write_threads, queue_depth, ..PsyncConfig::default() };
        let faults = Some(faults.clone());
        let queued = match self {
            Self::Psync => return Some(Arc::new(PsyncEngine::new(config).unwrap())),
            Self::Aio => QueuedEngine::aio(config, faults),
            Self::IoUring => QueuedEngine::io_uring(config, faults),
        };
        match queued {
            Ok(engine) => Some(Arc::new(engine)),
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                eprintln!("not tested: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Returns the number of requests of one class that keep all its threads busy.
    pub(crate) const fn readers(self, read_threads: usize, write_threads: usize) -> usize {
        match self {
            Self::Psync => read_threads + write_threads,
            Self::Aio | Self::IoUring => read_threads,
        }
    }

    pub(crate) const fn is_queued(self) -> bool {
        !matches!(self, Self::Psync)
    }
}

pub(crate) fn call(
    class: Class,
    timeout: Duration,
    run: impl FnOnce(Result<()>) + Send + 'static,
) -> Request {
    Request { class, deadline: Instant::now() + timeout, op: Op::Call(Call { run: Box::new(run) }) }
}

/// Makes a request that occupies its thread until the returned sender is dropped.
pub(crate) fn plug(class: Class, timeout: Duration, began: &Sender<()>) -> (Request, Sender<()>) {
    let (release, held) = unbounded::<()>();
    let began = began.clone();
    let request = call(class, timeout, move |outcome| {
        outcome.unwrap();
        began.send(()).unwrap();
        let _ = held.recv();
    });
    (request, release)
}

pub(crate) fn tell<T: Send + 'static>(to: &Sender<T>) -> impl FnOnce(T) + Send + use<T> {
    let to = to.clone();
    move |value| drop(to.send(value))
}

pub(crate) fn next<T>(from: &Receiver<T>) -> T {
    from.recv_timeout(LONG).expect("a request ended without saying so")
}

/// Makes a slot, with a weak reference that tells whether it is still held.
pub(crate) fn slot(bytes: usize) -> (SlotBuf, Weak<AlignedBuf>) {
    let memory = Arc::new(AlignedBuf::zeroed(bytes));
    let run = MemRun { ptr: memory.as_ptr().cast_mut(), len: bytes };
    let held = Arc::downgrade(&memory);
    // SAFETY: the memory stays while `memory` does, and no other code touches it.
    (unsafe { SlotBuf::new([run], memory) }, held)
}

/// A directory on a disk that supports O_DIRECT, and a device on it. The device leaves faults of transfers to the
/// engine's queue, if it has one.
pub(crate) struct Place {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) faults: Faults,
    pub(crate) device: Arc<dyn Device>,
}

impl Place {
    pub(crate) fn new(kind: Kind, direct: DirectUse) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let faults = Faults::seeded(3);
        if kind.is_queued() {
            faults.strike_in_queue();
        }
        let plain: Arc<dyn Device> = Arc::new(DirDevice::open(dir.path(), direct).unwrap());
        let device: Arc<dyn Device> = Arc::new(FaultDevice::new(plain, faults.clone()));
        Self { dir, faults, device }
    }

    /// Returns all file names in the directory, final and temporary.
    pub(crate) fn names(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.dir.path().join("d")) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

/// Returns the bytes of file `number`.
pub(crate) fn bytes_of(number: usize, used_bytes: usize) -> Vec<u8> {
    (0..used_bytes).map(|i| (i / 4096 + i * 7 + number * 31) as u8).collect()
}

pub(crate) fn path(number: usize) -> PathBuf {
    PathBuf::from(format!("d/file{number}"))
}

/// Makes a write of file `number`, with a weak reference to the memory of its bytes.
pub(crate) fn write(
    device: &Arc<dyn Device>,
    number: usize,
    used_bytes: usize,
    timeout: Duration,
    ended: &Sender<Result<FileWritten>>,
) -> (Request, Weak<AlignedBuf>) {
    let (body, held) = slot(used_bytes.next_multiple_of(4096));
    body.write_at(0, &bytes_of(number, used_bytes));
    let prepare = move || {
        let mut head = AlignedBuf::zeroed(4096);
        head[..4].copy_from_slice(b"head");
        Ok(Prepared::Buf(IoBuf::for_write(head, body, used_bytes).unwrap()))
    };
    let write = WriteFile {
        device: Arc::clone(device),
        temporary: PathBuf::from(format!("d/.tmp{number}")),
        target: path(number),
        durable: number.is_multiple_of(2),
        prepare: Box::new(prepare),
        make_room: Box::new(|| Ok(false)),
        done: Box::new(tell(ended)),
    };
    (Request { class: Class::Write, deadline: Instant::now() + timeout, op: Op::Write(write) }, held)
}

/// Makes a read of file `number`.
pub(crate) fn read(
    device: &Arc<dyn Device>,
    number: usize,
    used_bytes: usize,
    timeout: Duration,
    ended: &Sender<Result<IoBuf>>,
) -> (Request, Weak<AlignedBuf>) {
    let (body, held) = slot(used_bytes.next_multiple_of(4096));
    let body_bytes = body.len();
    let buf = IoBuf::for_read(4096, body, body_bytes).unwrap();
    let done = Box::new(tell(ended));
    let fewest_bytes = buf.len();
    let read = ReadFile { device: Arc::clone(device), path: path(number), buf, fewest_bytes, done };
    (Request { class: Class::Read, deadline: Instant::now() + timeout, op: Op::Read(read) }, held)
}

/// Returns whether the bytes read are exactly those of file `number`.
pub(crate) fn is_right(buf: &IoBuf, number: usize, used_bytes: usize) -> bool {
    let mut out = vec![0; buf.body().len()];
    buf.body().read_at(0, &mut out);
    buf.head().starts_with(b"head")
        && out[..used_bytes] == bytes_of(number, used_bytes)
        && out[used_bytes..].iter().all(|&byte| byte == 0)
}

pub(crate) fn write_now(
    place: &Place,
    engine: &dyn IoEngine,
    number: usize,
    used_bytes: usize,
) -> Result<()> {
    let (ended, end) = unbounded();
    engine.submit(vec![write(&place.device, number, used_bytes, LONG, &ended).0]);
    assert!(matches!(next(&end)?, FileWritten::Published));
    Ok(())
}

pub(crate) fn read_now(place: &Place, engine: &dyn IoEngine, number: usize, used_bytes: usize) -> Result<()> {
    let (ended, end) = unbounded();
    engine.submit(vec![read(&place.device, number, used_bytes, LONG, &ended).0]);
    let buf = next(&end)?;
    assert!(is_right(&buf, number, used_bytes), "file {number} of {used_bytes} bytes came back wrong");
    Ok(())
}

/// Returns whether a directory supports O_DIRECT, without which no queue is used for writes.
pub(crate) fn has_direct(dir: &Path) -> bool {
    DirDevice::open(dir, DirectUse::Always).unwrap().direct().is_some()
}

//! A request in flight: what its thread submits next as completions arrive.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::device::{Device, DeviceFile};
use crate::engine::{Ended, FileWritten, Op, Request};
use crate::iobuf::IoBuf;
use crate::kernel::{Completion, Work};
use crate::progress::{ReadNext, ReadProgress, WriteNext, WriteProgress};
use crate::transfer::{self, Over, Writing};

/// The next action of a thread for a request.
pub(super) enum Step {
    /// Push this to the kernel.
    Submit(Box<Flight>),
    /// The request has completed.
    Ended,
}

/// A request whose file is open. It must not be dropped while the kernel holds it.
pub(super) struct Flight {
    pub(super) deadline: Instant,
    /// Whether the kernel was asked to cancel it.
    pub(super) cancelled: bool,
    pub(super) work: Work,
    pub(super) offset: u64,
    /// The memory of the operation that the kernel holds.
    pub(super) pieces: Vec<libc::iovec>,
    file: Box<dyn DeviceFile>,
    fd: RawFd,
    job: Job,
}

enum Job {
    Read {
        device: Arc<dyn Device>,
        path: PathBuf,
        buf: IoBuf,
        fewest_bytes: usize,
        done: Ended<IoBuf>,
        progress: ReadProgress,
    },
    Write {
        writing: Writing,
        progress: WriteProgress,
    },
}

/// Runs a request up to its first operation for the kernel, or to completion where the kernel's queue is of no use.
pub(super) fn start(request: Request, takes_buffered_reads: bool) -> Step {
    let deadline = request.deadline;
    match request.op {
        Op::Read(read) => {
            let crate::engine::ReadFile { device, path, mut buf, fewest_bytes, done } = read;
            let (file, progress) = match transfer::open_for_read(&*device, &path, &buf) {
                Ok(opened) => opened,
                Err(error) => {
                    drop(buf);
                    done(Err(error));
                    return Step::Ended;
                }
            };
            let queued = (progress.is_direct() || takes_buffered_reads) && progress.whole() > 0;
            let Some(fd) = descriptor(&*file).filter(|_| queued) else {
                let read = transfer::read_rest(&*device, &path, &mut buf, file, progress, fewest_bytes);
                done(read.map(|()| buf));
                return Step::Ended;
            };
            let job = Job::Read { device, path, buf, fewest_bytes, done, progress };
            Flight::new(deadline, file, fd, Work::Read, job).submit()
        }
        Op::Write(write) => match Writing::prepare(write) {
            Some((writing, over)) => start_write(deadline, writing, over),
            None => Step::Ended,
        },
        Op::Call(call) => {
            (call.run)(Ok(()));
            Step::Ended
        }
    }
}

fn descriptor(file: &dyn DeviceFile) -> Option<RawFd> {
    file.descriptor().map(|fd| fd.as_raw_fd())
}

fn start_write(deadline: Instant, mut writing: Writing, mut over: Over) -> Step {
    loop {
        let attempt = writing.open(over.take()).and_then(|(file, progress)| {
            let queued = writing.is_direct() && progress.whole() > 0;
            match descriptor(&*file).filter(|_| queued) {
                Some(fd) => Ok(Some((file, fd, progress))),
                None => writing.complete(file, progress).map(|()| None),
            }
        });
        match attempt {
            Ok(Some((file, fd, progress))) => {
                let job = Job::Write { writing, progress };
                return Flight::new(deadline, file, fd, Work::Write, job).submit();
            }
            Ok(None) => {
                writing.end(Ok(FileWritten::Published));
                return Step::Ended;
            }
            Err(error) => match writing.failed(error) {
                Some(again) => writing = again,
                None => return Step::Ended,
            },
        }
    }
}

/// The error of a request whose I/O had not completed by its deadline.
fn late() -> Error {
    Error::new(
        ErrorKind::Timeout,
        "an I/O request was abandoned at its deadline: the device is slower than its load",
    )
}

/// Returns whether the queue, and not the file, refused an operation: then plain calls make it.
fn is_refusal(errno: i32) -> bool {
    matches!(errno, libc::EAGAIN | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS | libc::ENOMEM)
}

impl Flight {
    fn new(deadline: Instant, file: Box<dyn DeviceFile>, fd: RawFd, work: Work, job: Job) -> Box<Self> {
        let (cancelled, offset, pieces) = (false, 0, Vec::new());
        Box::new(Self { deadline, cancelled, work, offset, pieces, file, fd, job })
    }

    pub(super) const fn fd(&self) -> RawFd {
        self.fd
    }

    pub(super) fn bytes(&self) -> usize {
        match &self.job {
            Job::Read { progress, .. } => progress.whole(),
            Job::Write { progress, .. } => progress.whole(),
        }
    }

    /// Returns the next operation of this flight, for the remaining bytes.
    fn submit(mut self: Box<Self>) -> Step {
        let (buf, done) = match &self.job {
            Job::Read { buf, progress, .. } => (buf, progress.done()),
            Job::Write { writing, progress } => (&writing.buf, progress.done()),
        };
        self.offset = done as u64;
        self.pieces = if self.work == Work::SyncData { Vec::new() } else { buf.pieces(done) };
        Step::Submit(self)
    }

    /// Continues after the kernel has completed the operation.
    pub(super) fn advance(self: Box<Self>, completion: Completion, now: Instant) -> Step {
        let outcome = completion.outcome();
        // A sync that ran has reported lost writes, and another one would not: whatever its error, it is the file's.
        let may_refuse = self.work != Work::SyncData || completion.is_refused;
        match (outcome, &self.job) {
            (Err(libc::ECANCELED), _) => self.fail(late()),
            (Err(libc::EINTR), _) if self.cancelled => self.fail(late()),
            (Err(libc::EINTR), _) => self.submit(),
            (Err(errno), _) if may_refuse && is_refusal(errno) => self.go_on_plainly(),
            (Err(errno), Job::Read { .. }) => self.fail_with("cannot read a block file", errno),
            (Err(errno), _) if self.work == Work::SyncData => {
                self.fail_with("cannot sync a block file", errno)
            }
            (Err(errno), _) => self.fail_with("cannot write a block file", errno),
            (Ok(count), Job::Read { .. }) => self.came(count, now),
            (Ok(_), _) if self.work == Work::SyncData => self.publish(),
            (Ok(count), _) => self.went(count, now),
        }
    }

    fn came(mut self: Box<Self>, count: usize, now: Instant) -> Step {
        let Job::Read { device, path, buf, progress, fewest_bytes, .. } = &mut self.job else {
            return self.fail(late());
        };
        match progress.came(count) {
            ReadNext::Whole => self.end_read(Ok(())),
            ReadNext::EndsEarly => {
                let outcome = transfer::end_early(&**device, path, buf, *progress, *fewest_bytes);
                self.end_read(outcome)
            }
            _ if now >= self.deadline => self.fail(late()),
            ReadNext::More => self.submit(),
            ReadNext::MoreBuffered => match device.open(path, false) {
                Ok(file) => {
                    self.file = file;
                    self.go_on_plainly()
                }
                Err(error) => self.fail(error),
            },
        }
    }

    fn went(mut self: Box<Self>, count: usize, now: Instant) -> Step {
        let Job::Write { writing, progress } = &mut self.job else { return self.fail(late()) };
        match progress.went(count) {
            WriteNext::Stuck => {
                let error = Writing::stuck(*progress);
                self.fail(error)
            }
            WriteNext::Whole if writing.durable => {
                self.work = Work::SyncData;
                self.submit()
            }
            WriteNext::Whole => self.publish(),
            WriteNext::More if now >= self.deadline => self.fail(late()),
            WriteNext::More => self.submit(),
        }
    }

    /// Completes the request by plain calls.
    fn go_on_plainly(self: Box<Self>) -> Step {
        let Self { deadline, file, job, work, .. } = *self;
        match job {
            Job::Read { device, path, mut buf, fewest_bytes, done, progress } => {
                let read = transfer::read_rest(&*device, &path, &mut buf, file, progress, fewest_bytes);
                done(read.map(|()| buf));
                Step::Ended
            }
            Job::Write { writing, progress } => {
                let synced = if work == Work::SyncData { file.sync_data() } else { Ok(()) };
                let written = synced.and_then(|()| match work {
                    Work::SyncData => writing.publish(file),
                    _ => writing.complete(file, progress),
                });
                end_write(deadline, writing, written)
            }
        }
    }

    fn publish(self: Box<Self>) -> Step {
        let Self { deadline, file, job, .. } = *self;
        let Job::Write { writing, .. } = job else { return Step::Ended };
        let published = writing.publish(file);
        end_write(deadline, writing, published)
    }

    fn fail_with(self: Box<Self>, what: &str, errno: i32) -> Step {
        let source = io::Error::from_raw_os_error(errno);
        let error = match &self.job {
            Job::Read { device, path, .. } => crate::directory::fail(what, &device.root().join(path), source),
            Job::Write { writing, .. } => writing.error(what, source),
        };
        let error = error.with("offset_bytes", self.offset);
        self.fail(error)
    }

    /// Fails a request of which the kernel holds nothing.
    pub(super) fn abandon(self: Box<Self>, error: Error) {
        let Self { file, job, .. } = *self;
        drop(file);
        match job {
            Job::Read { buf, done, .. } => {
                drop(buf);
                done(Err(error));
            }
            // Without a retry, even if the error is a full disk.
            Job::Write { writing, .. } => writing.abandon(error),
        }
    }

    fn fail(self: Box<Self>, error: Error) -> Step {
        let Self { deadline, file, job, .. } = *self;
        drop(file);
        match job {
            Job::Read { buf, done, .. } => {
                drop(buf);
                done(Err(error));
                Step::Ended
            }
            Job::Write { writing, .. } => end_write(deadline, writing, Err(error)),
        }
    }

    fn end_read(self: Box<Self>, outcome: Result<()>) -> Step {
        if let Job::Read { buf, done, .. } = self.job {
            drop(self.file);
            done(outcome.map(|()| buf));
        }
        Step::Ended
    }
}

fn end_write(deadline: Instant, writing: Writing, outcome: Result<()>) -> Step {
    match outcome {
        Ok(()) => writing.end(Ok(FileWritten::Published)),
        Err(error) => {
            if let Some(again) = writing.failed(error) {
                return start_write(deadline, again, None);
            }
        }
    }
    Step::Ended
}

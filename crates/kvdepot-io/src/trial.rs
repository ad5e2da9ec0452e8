//! The measurement of `auto`: how long each engine takes to read files of a directory.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, unbounded};
use kvdepot_core::Result;

use crate::aligned::AlignedBuf;
use crate::buf::SlotBuf;
use crate::cached::cached_bytes;
use crate::device::Device;
use crate::engine::{Call, Class, FileWritten, IoEngine, Op, Prepared, ReadFile, Request, WriteFile};
use crate::iobuf::IoBuf;

/// Prefix of the files of the measurement. They are removed immediately, unless their process dies in that moment.
const TRIAL_PREFIX: &str = ".probe-trial-";

/// The number of files in a trial, and the size of each.
const FILES: usize = 24;
const FILE_BYTES: usize = 512 << 10;
const ROUNDS: usize = 3;
/// No round begins after this time. A directory that has not completed all rounds by then uses plain calls.
const ROUNDS_MAX: Duration = Duration::from_secs(if cfg!(test) { 20 } else { 2 });
/// The longest time for one step: writing the files, one engine's reads, or removing the files.
const STEP_MAX: Duration = Duration::from_secs(if cfg!(test) { 20 } else { 2 });

/// Returns the best time of each engine for reading files that are not in the page cache. All are `None` if there was
/// no time, if the trial failed, or if the files stay cached: then plain calls are as good. The first engine, that of
/// plain calls, writes and removes the files, so a directory that hangs blocks the caller only briefly.
pub(crate) fn measure(device: &Arc<dyn Device>, engines: &[Arc<dyn IoEngine>]) -> Vec<Option<Duration>> {
    let Some(plain) = engines.first() else { return Vec::new() };
    let trial = Trial::new(device);
    let times = trial.rounds(plain, engines);
    trial.remove(plain);
    times.unwrap_or_else(|| vec![None; engines.len()])
}

/// Files with names that no other trial uses, in this container or in another one.
struct Trial {
    device: Arc<dyn Device>,
    tag: u64,
}

impl Trial {
    fn new(device: &Arc<dyn Device>) -> Self {
        Self { device: Arc::clone(device), tag: crate::random::number() }
    }

    fn name(&self, number: usize, part: &str) -> PathBuf {
        PathBuf::from(format!("{TRIAL_PREFIX}{:016x}-{number}{part}", self.tag))
    }

    fn rounds(
        &self,
        plain: &Arc<dyn IoEngine>,
        engines: &[Arc<dyn IoEngine>],
    ) -> Option<Vec<Option<Duration>>> {
        self.write(&**plain)?;
        let mut best: Vec<Option<Duration>> = vec![None; engines.len()];
        let began = Instant::now();
        for _ in 0..ROUNDS {
            for (engine, best) in engines.iter().zip(&mut best) {
                if began.elapsed() >= ROUNDS_MAX || !self.forget(&**plain) {
                    return None;
                }
                let time = self.read(&**engine)?;
                *best = Some(best.map_or(time, |before| before.min(time)));
            }
        }
        Some(best)
    }

    /// Writes the files to the disk, because dirty pages cannot leave the page cache.
    fn write(&self, engine: &dyn IoEngine) -> Option<()> {
        let deadline = Instant::now() + STEP_MAX;
        let (tell, told) = unbounded();
        let write = |number: usize| {
            let (tell, body) = (tell.clone(), SlotBuf::anonymous(FILE_BYTES));
            let bytes = move || IoBuf::for_write(AlignedBuf::zeroed(0), body, FILE_BYTES).map(Prepared::Buf);
            let op = Op::Write(WriteFile {
                device: Arc::clone(&self.device),
                temporary: self.name(number, "t"),
                target: self.name(number, ""),
                durable: true,
                prepare: Box::new(move || bytes().ok_or_else(Request::closed)),
                make_room: Box::new(|| Ok(false)),
                done: Box::new(move |outcome| {
                    let _ = tell.send(matches!(outcome, Ok(FileWritten::Published)));
                }),
            });
            Request { class: Class::Write, deadline, op }
        };
        engine.submit((0..FILES).map(write).collect());
        (0..FILES).all(|_| told.recv_deadline(deadline) == Ok(true)).then_some(())
    }

    /// Drops the files from the page cache. Returns `false` if that fails or the system does not tell.
    fn forget(&self, plain: &dyn IoEngine) -> bool {
        if self.device.direct().is_some() {
            // All transfers bypass the cache anyway.
            return true;
        }
        let device = Arc::clone(&self.device);
        let paths: Vec<PathBuf> = (0..FILES).map(|number| self.name(number, "")).collect();
        let forgotten = move || paths.iter().all(|path| is_forgotten(&*device, path));
        run(plain, forgotten) == Some(true)
    }

    /// Returns the time that an engine takes to read all files.
    fn read(&self, engine: &dyn IoEngine) -> Option<Duration> {
        let bodies: Vec<SlotBuf> = (0..FILES).map(|_| SlotBuf::anonymous(FILE_BYTES)).collect();
        let began = Instant::now();
        let deadline = began + STEP_MAX;
        let (tell, told) = unbounded();
        let read = |(number, body): (usize, SlotBuf)| {
            let tell = tell.clone();
            let done = Box::new(move |outcome: Result<IoBuf>| {
                let _ = tell.send(outcome.is_ok());
            });
            let (device, path) = (Arc::clone(&self.device), self.name(number, ""));
            let buf = IoBuf::payload(body, FILE_BYTES)?;
            let op = Op::Read(ReadFile { device, path, buf, fewest_bytes: FILE_BYTES, done });
            Some(Request { class: Class::Read, deadline, op })
        };
        engine.submit(bodies.into_iter().enumerate().filter_map(read).collect());
        (0..FILES).all(|_| told.recv_deadline(deadline) == Ok(true)).then(|| began.elapsed())
    }

    fn remove(&self, plain: &Arc<dyn IoEngine>) {
        let device = Arc::clone(&self.device);
        let names: Vec<PathBuf> =
            (0..FILES).flat_map(|number| ["", "t"].map(|part| self.name(number, part))).collect();
        let removed = move || {
            for name in names {
                // Best effort: the tier's sweep finds leftovers.
                let _ = device.unlink(&name);
            }
        };
        if run(&**plain, removed).is_none() {
            tracing::warn!(
                path = %self.device.root().display(),
                "files of the I/O engines' measurement could not be removed in time: the tier's sweep will find them"
            );
        }
    }
}

/// Runs a function on an engine's thread. Returns `None` if it takes too long.
fn run<T: Send + 'static>(engine: &dyn IoEngine, what: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let deadline = Instant::now() + STEP_MAX;
    let (tell, told) = bounded(1);
    let run = Box::new(move |allowed: Result<()>| {
        if allowed.is_ok() {
            let _ = tell.send(what());
        }
    });
    engine.submit(vec![Request { class: Class::Write, deadline, op: Op::Call(Call { run }) }]);
    told.recv_deadline(deadline).ok()
}

fn is_forgotten(device: &dyn Device, path: &Path) -> bool {
    let forgotten = |fd: BorrowedFd<'_>| {
        rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::DontNeed).is_ok()
            && cached_bytes(fd, FILE_BYTES as u64) == Some(0)
    };
    device.open(path, false).is_ok_and(|file| file.descriptor().is_some_and(forgotten))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DirectUse;
    use crate::directory::DirDevice;
    use crate::faults::{FaultDevice, FaultOp, Faults};
    use crate::psync::{PsyncConfig, PsyncEngine};

    fn engines() -> [Arc<dyn IoEngine>; 2] {
        let config = PsyncConfig { read_threads: 1, write_threads: 1, ..PsyncConfig::default() };
        [(); 2].map(|()| Arc::new(PsyncEngine::new(config.clone()).unwrap()) as _)
    }

    fn place() -> (tempfile::TempDir, Arc<dyn Device>) {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let device = Arc::new(DirDevice::open(dir.path(), DirectUse::ColdReads).unwrap());
        (dir, device)
    }

    #[test]
    fn trials_of_one_process_number_do_not_meet() {
        let (_dir, device) = place();
        let names = [(); 2].map(|()| Trial::new(&device).name(0, "t"));
        assert_ne!(names[0], names[1]);
        assert!(names.iter().all(|name| name.to_str().unwrap().starts_with(TRIAL_PREFIX)));
    }

    #[test]
    fn what_is_read_is_not_cached_and_what_stays_cached_is_not_measured() {
        let (dir, device) = place();
        let engines = engines();
        let trial = Trial::new(&device);
        trial.write(&*engines[0]).unwrap();
        let cached = || {
            let file = std::fs::File::open(dir.path().join(trial.name(0, ""))).unwrap();
            cached_bytes(std::os::fd::AsFd::as_fd(&file), FILE_BYTES as u64)
        };
        if device.direct_when_cold().is_none() || cached().is_none() {
            return eprintln!("not tested: no O_DIRECT or no cachestat here");
        }
        // Another process's read brings it into the cache.
        std::fs::read(dir.path().join(trial.name(0, ""))).unwrap();
        assert_ne!(cached(), Some(0));
        assert!(trial.forget(&*engines[0]));
        assert_eq!(cached(), Some(0));
        trial.remove(&engines[0]);
        assert!(measure(&device, &engines).iter().all(Option::is_some));
        // A device that hands out no descriptors, so what is cached is unknown.
        let opaque: Arc<dyn Device> = Arc::new(FaultDevice::new(device, Faults::default()));
        assert_eq!(measure(&opaque, &engines), [None, None]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_does_not_let_go_of_the_files_holds_nobody_up() {
        let (_dir, device) = place();
        let (engines, faults) = (engines(), Faults::default());
        faults.strike_in_queue().hang(FaultOp::Unlink);
        let device: Arc<dyn Device> = Arc::new(FaultDevice::new(device, faults.clone()));
        let (tell, told) = bounded(1);
        let thread = std::thread::spawn(move || tell.send(measure(&device, &engines).len()));
        let measured = told.recv_timeout(Duration::from_secs(60));
        faults.release();
        thread.join().unwrap().unwrap();
        assert_eq!(measured, Ok(2));
    }
}

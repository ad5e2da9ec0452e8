//! Which engine moves block files: what was asked for, as far as this system has it, or what a short measurement prefers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use kvdepot_core::{Error, ErrorKind, Result};

use crate::aligned::AlignedBuf;
use crate::buf::SlotBuf;
use crate::device::Device;
use crate::engine::{Class, FileWritten, IoEngine, Op, Prepared, ReadFile, Request, WriteFile};
use crate::faults::Faults;
use crate::iobuf::IoBuf;
use crate::psync::{PsyncConfig, PsyncEngine};
use crate::queued::QueuedEngine;

/// Prefix of the files that `auto` measures with: gone at once, unless their process died in that moment.
pub const TRIAL_PREFIX: &str = ".probe-trial-";

/// What can be asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// Plain calls.
    #[default]
    Psync,
    /// Linux aio.
    Aio,
    /// io_uring.
    IoUring,
    /// What a short measurement in each directory prefers.
    Auto,
}

impl EngineKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Psync, Self::Aio, Self::IoUring, Self::Auto];

    /// As the configuration spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Psync => "psync",
            Self::Aio => "aio",
            Self::IoUring => "io_uring",
            Self::Auto => "auto",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn open(self, config: &PsyncConfig, faults: Option<&Faults>) -> Result<Arc<dyn IoEngine>> {
        let (config, faults) = (config.clone(), faults.cloned());
        Ok(match self {
            Self::Aio => Arc::new(QueuedEngine::aio(config, faults)?),
            Self::IoUring => Arc::new(QueuedEngine::io_uring(config, faults)?),
            Self::Psync | Self::Auto => Arc::new(PsyncEngine::new(config)?),
        })
    }
}

/// Opens the engine that was asked for, or the next one that this system has, with one line in the log that says so. `faults` strike
/// in its queues, if they are left to them.
pub fn open_engine(
    kind: EngineKind,
    config: &PsyncConfig,
    devices: &[Arc<dyn Device>],
    faults: Option<&Faults>,
) -> Result<Arc<dyn IoEngine>> {
    let order: &[EngineKind] = match kind {
        EngineKind::Psync => &[],
        EngineKind::Aio => &[EngineKind::Aio],
        EngineKind::IoUring => &[EngineKind::IoUring, EngineKind::Aio],
        EngineKind::Auto => return measured(config, devices, faults),
    };
    let mut why = None;
    for &candidate in order {
        match candidate.open(config, faults) {
            Ok(engine) => {
                if let Some(error) = why {
                    fell_back(kind, candidate, &error);
                }
                return Ok(engine);
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => why = why.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    if let Some(error) = why {
        fell_back(kind, EngineKind::Psync, &error);
    }
    EngineKind::Psync.open(config, faults)
}

fn fell_back(asked: EngineKind, instead: EngineKind, error: &Error) {
    tracing::warn!(
        asked = asked.name(), instead = instead.name(), %error,
        "this system lacks or forbids the I/O engine that was asked for (containers often forbid io_uring): using another one"
    );
}

/// A trial's files, and the bytes of each.
const TRIAL_FILES: usize = 24;
const TRIAL_BYTES: usize = 512 << 10;
const TRIAL_ROUNDS: usize = 3;
/// No trial begins after this time, whose directory has not had all rounds: then plain calls are used.
const TRIALS_MAX: Duration = Duration::from_secs(2);
/// How long one trial may take.
const TRIAL_MAX: Duration = Duration::from_secs(2);
/// What another engine must save to be preferred to plain calls.
const WORTH_PERCENT: u32 = 10;

fn measured(
    config: &PsyncConfig,
    devices: &[Arc<dyn Device>],
    faults: Option<&Faults>,
) -> Result<Arc<dyn IoEngine>> {
    let plain = EngineKind::Psync.open(config, faults)?;
    // What does not go past the page cache anywhere is no work for a queue.
    let direct = |device: &Arc<dyn Device>| device.direct().is_some() || device.direct_when_cold().is_some();
    if !devices.iter().any(direct) || devices.iter().any(|device| device.is_read_only()) {
        tracing::info!(
            engine = "psync",
            "I/O engine chosen: nothing here goes past the page cache, or can be measured"
        );
        return Ok(plain);
    }
    let (mut engines, mut missing) = (vec![plain], Vec::new());
    for kind in [EngineKind::Aio, EngineKind::IoUring] {
        match kind.open(config, faults) {
            Ok(engine) => engines.push(engine),
            Err(_) => missing.push(kind.name()),
        }
    }
    let mut preferred: Option<usize> = None;
    let mut told = Vec::new();
    for device in devices {
        let times = measure(device, &engines);
        let of = times.iter().zip(&engines).map(|(time, engine)| match time {
            Some(time) => format!("{} {:.1} ms", engine.name(), time.as_secs_f64() * 1000.0),
            None => format!("{} -", engine.name()),
        });
        told.push(format!("{}: {}", device.root().display(), of.collect::<Vec<_>>().join(", ")));
        let best = best(&times);
        // An engine that not all directories prefer could be slower than plain calls in one of them.
        preferred = Some(preferred.map_or(best, |before| if before == best { best } else { 0 }));
    }
    let engine = engines.swap_remove(preferred.unwrap_or(0));
    let (measured, missing) = (told.join("; "), missing.join(", "));
    tracing::info!(engine = engine.name(), measured, missing, "I/O engine chosen by measurement");
    Ok(engine)
}

/// Which engine is preferred by these times, the first of which is that of plain calls.
fn best(times: &[Option<Duration>]) -> usize {
    let Some(Some(plain)) = times.first().copied() else { return 0 };
    let worth = plain * (100 - WORTH_PERCENT) / 100;
    let others = times.iter().enumerate().skip(1).filter_map(|(i, time)| time.map(|time| (time, i)));
    others.min().filter(|(time, _)| *time <= worth).map_or(0, |(_, i)| i)
}

/// The best time of each engine to write and read some files; `None` for all if there was no time for that, or if it failed.
fn measure(device: &Arc<dyn Device>, engines: &[Arc<dyn IoEngine>]) -> Vec<Option<Duration>> {
    let mut best = vec![None; engines.len()];
    let began = Instant::now();
    for _ in 0..TRIAL_ROUNDS {
        for (engine, best) in engines.iter().zip(&mut best) {
            let outcome = if began.elapsed() < TRIALS_MAX { trial(device, &**engine) } else { None };
            sweep(&**device);
            let Some(time) = outcome else { return vec![None; engines.len()] };
            *best = Some(best.map_or(time, |before: Duration| before.min(time)));
        }
    }
    best
}

fn name(number: usize, part: &str) -> PathBuf {
    PathBuf::from(format!("{TRIAL_PREFIX}{}-{number}{part}", std::process::id()))
}

fn sweep(device: &dyn Device) {
    for number in 0..TRIAL_FILES {
        for part in ["", "t"] {
            // Best effort: the tier's sweep finds what stays.
            let _ = device.unlink(&name(number, part));
        }
    }
}

fn trial(device: &Arc<dyn Device>, engine: &dyn IoEngine) -> Option<Duration> {
    let deadline = Instant::now() + TRIAL_MAX;
    let bodies: Vec<SlotBuf> = (0..TRIAL_FILES).map(|_| SlotBuf::anonymous(TRIAL_BYTES)).collect();
    let wait = |ended: crossbeam_channel::Receiver<bool>| {
        (0..TRIAL_FILES).all(|_| ended.recv_deadline(deadline) == Ok(true))
    };
    let began = Instant::now();
    let (tell, told) = unbounded();
    let write = |(number, body): (usize, &SlotBuf)| {
        let (tell, body) = (tell.clone(), body.clone());
        let bytes = move || IoBuf::for_write(AlignedBuf::zeroed(0), body, TRIAL_BYTES).map(Prepared::Buf);
        let op = Op::Write(WriteFile {
            device: Arc::clone(device),
            temporary: name(number, "t"),
            target: name(number, ""),
            durable: false,
            prepare: Box::new(move || bytes().ok_or_else(Request::closed)),
            make_room: Box::new(|| false),
            done: Box::new(move |outcome| {
                let _ = tell.send(matches!(outcome, Ok(FileWritten::Published)));
            }),
        });
        Request { class: Class::Write, deadline, op }
    };
    engine.submit(bodies.iter().enumerate().map(write).collect());
    if !wait(told) {
        return None;
    }
    let (tell, told) = unbounded();
    let read = |(number, body): (usize, SlotBuf)| {
        let tell = tell.clone();
        let path: &Path = &name(number, "");
        let buf = IoBuf::payload(body, TRIAL_BYTES)?;
        let done = Box::new(move |outcome: Result<IoBuf>| {
            let _ = tell.send(outcome.is_ok());
        });
        let op = Op::Read(ReadFile { device: Arc::clone(device), path: path.to_owned(), buf, done });
        Some(Request { class: Class::Read, deadline, op })
    };
    engine.submit(bodies.into_iter().enumerate().filter_map(read).collect());
    wait(told).then(|| began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_calls_stay_unless_another_engine_is_worth_it() {
        let times = |times: [Option<u64>; 3]| best(&times.map(|time| time.map(Duration::from_millis)));
        assert_eq!(times([Some(100), Some(91), Some(95)]), 0);
        assert_eq!(times([Some(100), Some(90), Some(95)]), 1);
        assert_eq!(times([Some(100), Some(90), Some(50)]), 2);
        assert_eq!(times([Some(100), None, None]), 0);
        assert_eq!(times([None, Some(1), Some(1)]), 0);
    }
}

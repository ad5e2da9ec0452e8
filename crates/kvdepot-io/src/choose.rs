//! Which engine moves block files: what was asked for, as far as this system has it, or what a short measurement prefers.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::device::Device;
use crate::engine::IoEngine;
use crate::faults::Faults;
use crate::psync::{PsyncConfig, PsyncEngine};
use crate::queued::QueuedEngine;
use crate::trial::measure;

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

    /// Why it is not to be used for these requests.
    fn ensure_allowed(self, config: &PsyncConfig) -> Result<()> {
        if self == Self::IoUring && config.memory_outlives {
            // The kernel ends a process with direct reads of its rings under way; with those of aio and of plain calls it waits.
            return Err(Error::new(
                ErrorKind::Unsupported,
                "io_uring is not used for a pool that outlives its process (pool_keep_s): reads of a killed depot could \
                 still arrive in the next one's blocks",
            ));
        }
        Ok(())
    }

    fn open(self, config: &PsyncConfig, faults: Option<&Faults>) -> Result<Arc<dyn IoEngine>> {
        self.ensure_allowed(config)?;
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
        "the I/O engine that was asked for cannot be used, as this system lacks or forbids it (containers often forbid io_uring) or \
         pool_keep_s rules it out: using another one"
    );
}

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
            Err(_) if kind.ensure_allowed(config).is_err() => {
                missing.push(format!("{} (pool_keep_s)", kind.name()));
            }
            Err(_) => missing.push(kind.name().to_owned()),
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

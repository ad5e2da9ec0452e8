//! Chooses the engine for block files: the requested one if this system has it, or the winner of a short measurement.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::device::Device;
use crate::engine::IoEngine;
use crate::faults::Faults;
use crate::psync::{PsyncConfig, PsyncEngine};
use crate::queued::QueuedEngine;
use crate::trial::measure;

/// The engines that can be requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// Threads with blocking system calls.
    #[default]
    Psync,
    /// Linux aio.
    Aio,
    /// io_uring.
    IoUring,
    /// The winner of a short measurement in each directory.
    Auto,
}

impl EngineKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Psync, Self::Aio, Self::IoUring, Self::Auto];

    /// Returns the name in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Psync => "psync",
            Self::Aio => "aio",
            Self::IoUring => "io_uring",
            Self::Auto => "auto",
        }
    }

    /// Returns the kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Fails with the reason why this engine must not be used for these requests.
    fn ensure_allowed(self, config: &PsyncConfig) -> Result<()> {
        if self == Self::IoUring && config.memory_outlives {
            // With io_uring the kernel ends a process while its direct reads are in flight; with aio and plain calls it
            // waits.
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

/// Opens the requested engine, or the next one that this system has, and logs one line about the fallback. `faults`
/// strike in the engine's queues if they are left to them.
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
        "the configured I/O engine cannot be used, because this system lacks or forbids it (containers often forbid io_uring) or \
         pool_keep_s excludes it: using another one"
    );
}

/// The percentage of time that another engine must save to be preferred to plain calls.
const WORTH_PERCENT: u32 = 10;

fn measured(
    config: &PsyncConfig,
    devices: &[Arc<dyn Device>],
    faults: Option<&Faults>,
) -> Result<Arc<dyn IoEngine>> {
    let plain = EngineKind::Psync.open(config, faults)?;
    // Transfers that all go through the page cache gain nothing from a queue.
    let direct = |device: &Arc<dyn Device>| device.direct().is_some() || device.direct_when_cold().is_some();
    if !devices.iter().any(direct) || devices.iter().any(|device| device.is_read_only()) {
        tracing::info!(
            engine = "psync",
            "I/O engine chosen: no I/O here bypasses the page cache, or it cannot be measured"
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
        // An engine that only some directories prefer could be slower than plain calls in the others.
        preferred = Some(preferred.map_or(best, |before| if before == best { best } else { 0 }));
    }
    let engine = engines.swap_remove(preferred.unwrap_or(0));
    let (measured, missing) = (told.join("; "), missing.join(", "));
    tracing::info!(engine = engine.name(), measured, missing, "I/O engine chosen by measurement");
    Ok(engine)
}

/// Returns the index of the preferred engine. The first of the times is that of plain calls.
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

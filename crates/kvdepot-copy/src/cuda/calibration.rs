//! Finds the fastest copy method on this machine: measured once, cached, and looked up for every group.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::Direction;
use crate::cuda::measure;
use crate::cuda::plan::Range;
use crate::cuda::submit::{Method, Submitter};
use crate::cuda::trust::{self, Distrusted};
use crate::limit::within;

/// Version of the file. Files of another version are ignored and measured again.
const FORMAT: u32 = 5;
/// Size limit of the file.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// How much faster than the device's copy engines the kernel must be to be chosen: it takes multiprocessors away from
/// the engine's own work, and copy engines do not.
const KERNEL_ADVANTAGE_MIN: f64 = 1.25;
/// The same while the engine decodes: the kernel was measured with more multiprocessors than it gets then.
const KERNEL_ADVANTAGE_MIN_DECODING: f64 = 2.0;
/// While the engine decodes the kernel is only used below this size: copy engines are good enough from here on.
const KERNEL_BYTES_MAX_DECODING: u64 = 28 << 10;
/// Without measurements: from this size on one call for each copy is as good as any other method.
const MEMCPY_BYTES_MIN: u64 = 128 << 10;

/// A measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Whether the direction is from host to device.
    pub to_device: bool,
    /// Bytes of one copy.
    pub op_bytes: u64,
    /// Number of concurrent copies.
    pub ops: u64,
    /// The method.
    pub method: Method,
    /// 10^9 bytes per second when nothing else is queued, submission included.
    pub gb_per_s: f64,
    /// 10^9 bytes per second behind other copies: their submission costs time only if it is slower than the copies.
    pub queued_gb_per_s: f64,
}

impl Point {
    /// Returns the seconds that `bytes` take: as many as were measured alone, and the rest queued behind them.
    fn seconds(&self, bytes: u64) -> f64 {
        let alone = bytes.min(self.op_bytes.saturating_mul(self.ops));
        let seconds = |bytes: u64, gb_per_s: f64| bytes as f64 / (gb_per_s.max(1e-9) * 1e9);
        seconds(alone, self.gb_per_s) + seconds(bytes - alone, self.queued_gb_per_s)
    }
}

/// The measurements of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    format: u32,
    /// UUID of the device.
    pub device: String,
    /// Version of the driver that was used.
    pub driver_version: i32,
    /// Largest number of thread blocks of the kernel.
    pub kernel_blocks_max: u32,
    /// The usable methods: available, allowed and tested.
    pub methods: Vec<Method>,
    /// Methods that failed their test.
    pub distrusted: Vec<Distrusted>,
    /// Time of the measurement, in seconds since 1970.
    pub measured_unix_s: u64,
    /// Duration of the measurement.
    pub elapsed_ms: f64,
    /// Why there are no measurements, if there are none: then a rule of thumb decides.
    pub problem: Option<String>,
    /// The measurements.
    pub points: Vec<Point>,
}

static MEASURED: LazyLock<Mutex<HashMap<String, Arc<Calibration>>>> = LazyLock::new(Mutex::default);

/// Returns the calibration of the submitter's device: from this process, from the cache, or measured now. Every method
/// was tested in this process. Without measurements a rule of thumb decides. An error means that not even plain copies
/// are correct.
pub(crate) fn of(
    submitter: &Arc<Submitter>,
    forbidden: &[Method],
    cache_dir: Option<&Path>,
    wait: Duration,
) -> Result<Arc<Calibration>> {
    let mut wanted = Calibration::empty(submitter, forbidden);
    let blocks = wanted.kernel_blocks_max;
    let key = format!("{} {} {blocks} {:?}", wanted.device, wanted.driver_version, wanted.methods);
    // Held while measuring: two concurrent measurements would disturb each other.
    let mut measured = MEASURED.lock();
    if let Some(known) = measured.get(&key) {
        return Ok(Arc::clone(known));
    }
    let (tested, methods) = (Arc::clone(submitter), wanted.methods.clone());
    let tested = within("testing copy engines", wait, move || trust::check(&tested, &methods)).flatten();
    match tested {
        Ok(distrusted) => {
            trust::useless(&distrusted)?;
            wanted.methods.retain(|&method| distrusted.iter().all(|one| one.method != method));
            wanted.distrusted = distrusted;
        }
        // A test that failed now, for lack of memory for example, may succeed at the next attach. Until then only plain
        // copies are used (P1).
        Err(error) => {
            tracing::warn!("the copy engines were not tested, so only plain copies are used: {error}");
            let methods = vec![Method::Memcpy];
            return Ok(Arc::new(Calibration { problem: Some(error.to_string()), methods, ..wanted }));
        }
    }
    let path = cache_dir.map(|dir| file(dir, &wanted.device));
    let kept = path.as_deref().and_then(|path| read(path).ok()).filter(|kept| kept.fits(&wanted));
    let kept = kept.map(|kept| Calibration { distrusted: wanted.distrusted.clone(), ..kept });
    let calibration = kept.unwrap_or_else(|| {
        let (submitter, empty) = (Arc::clone(submitter), wanted.clone());
        let measured = within("measuring copy engines", wait, move || {
            measure::all(&submitter, empty, measure::TIME_MAX)
        });
        let calibration =
            measured.unwrap_or_else(|error| Calibration { problem: Some(error.to_string()), ..wanted });
        if let Some(path) = &path
            && calibration.problem.is_none()
            && let Err(error) = write(path, &calibration)
        {
            tracing::info!("the measurements of the copy engines were not kept: {error}");
        }
        calibration
    });
    let calibration = Arc::new(calibration);
    // A measurement that failed now, for lack of memory for example, may succeed at the next attach.
    if calibration.problem.is_none() {
        measured.insert(key, Arc::clone(&calibration));
    }
    Ok(calibration)
}

/// Returns the path of a device's measurements.
pub(crate) fn file(dir: &Path, device: &str) -> PathBuf {
    dir.join(format!("copy-calibration-{device}.json"))
}

/// Reads the file that `write` wrote.
pub(crate) fn read(path: &Path) -> Result<Calibration> {
    let name = |e: Error| e.with("path", path.display());
    let io = |e| name(Error::io("cannot read the measurements of the copy engines", e));
    if std::fs::metadata(path).map_err(io)?.len() > FILE_BYTES_MAX {
        return Err(name(Error::new(ErrorKind::Corrupt, "no file of ours: it is too large")));
    }
    let text = std::fs::read(path).map_err(io)?;
    serde_json::from_slice(&text).map_err(|e| {
        name(Error::new(ErrorKind::Corrupt, "not the measurements of copy engines").with_source(e))
    })
}

/// Writes the file atomically, since another process may read it at any time.
pub(crate) fn write(path: &Path, calibration: &Calibration) -> Result<()> {
    let io =
        |e| Error::io("cannot write the measurements of the copy engines", e).with("path", path.display());
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(io)?;
    }
    let text = serde_json::to_vec_pretty(calibration).map_err(|e| io(e.into()))?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(|e| {
        let _ = std::fs::remove_file(&temporary);
        io(e)
    })
}

impl Calibration {
    /// Makes a calibration without measurements for the methods that a submitter has and is allowed.
    pub(crate) fn empty(submitter: &Submitter, forbidden: &[Method]) -> Self {
        let driver = submitter.context.driver();
        let mut methods = vec![Method::Memcpy];
        methods.extend(driver.has_batch().then_some(Method::Batch));
        methods.extend(submitter.kernel.is_some().then_some(Method::Kernel));
        methods.retain(|method| !forbidden.contains(method));
        Self {
            format: FORMAT,
            device: submitter.context.device().uuid.clone(),
            driver_version: driver.version(),
            kernel_blocks_max: submitter.kernel.as_ref().map_or(0, |kernel| kernel.blocks_max()),
            methods,
            distrusted: Vec::new(),
            measured_unix_s: 0,
            elapsed_ms: 0.0,
            problem: None,
            points: Vec::new(),
        }
    }

    /// Returns whether it was measured for the same device, driver and methods.
    fn fits(&self, wanted: &Self) -> bool {
        self.format == FORMAT
            && self.device == wanted.device
            && self.driver_version == wanted.driver_version
            && self.kernel_blocks_max == wanted.kernel_blocks_max
            && self.methods == wanted.methods
            && self.points.iter().all(|point| wanted.methods.contains(&point.method))
    }

    pub(crate) fn choose_for(&self, direction: Direction, ranges: &[Range], decoding: bool) -> Method {
        let count = ranges.len().max(1) as u64;
        let bytes: u64 = ranges.iter().map(|range| range.len as u64).sum();
        self.choose(direction, bytes / count, count, decoding)
    }

    /// Returns the method for `ops` copies of about `op_bytes` bytes: the fastest one by the nearest measurement. While
    /// the engine decodes, the kernel is only chosen for copies so small that the others are several times slower.
    pub fn choose(&self, direction: Direction, op_bytes: u64, ops: u64, decoding: bool) -> Method {
        let to_device = direction == Direction::ToDevice;
        let allowed =
            |method: Method| method != Method::Kernel || !decoding || op_bytes < KERNEL_BYTES_MAX_DECODING;
        let advantage = if decoding { KERNEL_ADVANTAGE_MIN_DECODING } else { KERNEL_ADVANTAGE_MIN };
        let here = || self.points.iter().filter(|p| p.to_device == to_device && allowed(p.method));
        let distance = |p: &Point| {
            let apart = |a: u64, b: u64| (a.max(1) as f64 / b.max(1) as f64).log2().abs();
            // Of more copies than were measured, the rest is queued behind them.
            let of_size = here().filter(|other| other.op_bytes == p.op_bytes);
            let ops_max = of_size.map(|other| other.ops).max().unwrap_or(p.ops);
            apart(p.op_bytes, op_bytes) + apart(p.ops, ops.min(ops_max))
        };
        // Called for every group, so each distance is computed once.
        let distances = here().map(|p| (distance(p), p));
        let Some((_, nearest)) = distances.min_by(|(a, _), (b, _)| a.total_cmp(b)) else {
            return self.rule_of_thumb(op_bytes, decoding);
        };
        let seconds = |p: &Point| {
            p.seconds(op_bytes.max(1) * ops) * if p.method == Method::Kernel { advantage } else { 1.0 }
        };
        here()
            .filter(|p| (p.op_bytes, p.ops) == (nearest.op_bytes, nearest.ops))
            .min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
            .map_or(Method::Memcpy, |point| point.method)
    }

    fn rule_of_thumb(&self, op_bytes: u64, decoding: bool) -> Method {
        if op_bytes >= MEMCPY_BYTES_MIN {
            return Method::Memcpy;
        }
        if self.methods.contains(&Method::Batch) {
            return Method::Batch;
        }
        let small = !decoding || op_bytes < KERNEL_BYTES_MAX_DECODING;
        if self.methods.contains(&Method::Kernel) && small { Method::Kernel } else { Method::Memcpy }
    }
}

/// Size of a large group, such as a layer of a long prompt.
const LARGE_BYTES: u64 = 32 << 20;

/// The measurements for one size, count and direction, and the choice of `auto`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// Whether the direction is from host to device.
    pub to_device: bool,
    /// Bytes of one copy.
    pub op_bytes: u64,
    /// Number of concurrent copies.
    pub ops: u64,
    /// 10^9 bytes per second of each measured method, when nothing else is queued.
    pub gb_per_s: BTreeMap<Method, f64>,
    /// The same behind other copies.
    pub queued_gb_per_s: BTreeMap<Method, f64>,
    /// The method that `auto` chooses.
    pub auto: Method,
    /// The method that `auto` chooses for 32 MiB of copies of this size.
    pub auto_large: Method,
    /// The method that `auto` chooses while the engine decodes.
    pub auto_decoding: Method,
}

impl Calibration {
    /// Returns the choice for each measured direction, size and count.
    pub fn choices(&self) -> Vec<Choice> {
        let mut cells: Vec<_> = self.points.iter().map(|p| (!p.to_device, p.ops, p.op_bytes)).collect();
        cells.sort_unstable();
        cells.dedup();
        let choice = |(to_host, ops, op_bytes): (bool, u64, u64)| {
            let to_device = !to_host;
            let direction = if to_device { Direction::ToDevice } else { Direction::ToHost };
            let here = |p: &&Point| (p.to_device, p.ops, p.op_bytes) == (to_device, ops, op_bytes);
            let points = || self.points.iter().filter(here);
            let auto = |ops, decoding| self.choose(direction, op_bytes, ops, decoding);
            Choice {
                to_device,
                op_bytes,
                ops,
                gb_per_s: points().map(|p| (p.method, p.gb_per_s)).collect(),
                queued_gb_per_s: points().map(|p| (p.method, p.queued_gb_per_s)).collect(),
                auto: auto(ops, false),
                auto_large: auto(ops.max(LARGE_BYTES / op_bytes.max(1)), false),
                auto_decoding: auto(ops, true),
            }
        };
        cells.into_iter().map(choice).collect()
    }
}

/// Formats a table: one line for each direction, size and count.
impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, CUDA driver {}, measured in {:.1} ms",
            self.device, self.driver_version, self.elapsed_ms
        )?;
        if let Some(problem) = &self.problem {
            writeln!(f, "not measured: {problem}")?;
        }
        for Distrusted { method, reason } in &self.distrusted {
            writeln!(f, "{} is not used: {reason}", method.as_str())?;
        }
        for choice in self.choices() {
            let name = if choice.to_device { "load" } else { "dump" };
            write!(f, "{name} {:>4} x {:>5} KiB:", choice.ops, choice.op_bytes >> 10)?;
            for ((method, rate), queued) in choice.gb_per_s.iter().zip(choice.queued_gb_per_s.values()) {
                write!(f, " {} {rate:.2} GB/s ({queued:.2} queued)", method.as_str())?;
            }
            writeln!(f, " -> {} ({} for 32 MiB)", choice.auto.as_str(), choice.auto_large.as_str())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calibration(points: &[(u64, u64, Method, f64)]) -> Calibration {
        let queued = points.iter().map(|&(bytes, ops, method, rate)| (bytes, ops, method, rate, rate));
        queueing(&queued.collect::<Vec<_>>())
    }

    fn queueing(points: &[(u64, u64, Method, f64, f64)]) -> Calibration {
        let point = |&(op_bytes, ops, method, gb_per_s, queued_gb_per_s): &(u64, u64, Method, f64, f64)| {
            Point { to_device: true, op_bytes, ops, method, gb_per_s, queued_gb_per_s }
        };
        Calibration {
            format: FORMAT,
            device: "GPU-1".into(),
            driver_version: 13_000,
            kernel_blocks_max: 16,
            methods: vec![Method::Memcpy, Method::Batch, Method::Kernel],
            distrusted: Vec::new(),
            measured_unix_s: 1_700_000_000,
            elapsed_ms: 1.0,
            problem: None,
            points: points.iter().map(point).collect(),
        }
    }

    #[test]
    fn the_quickest_of_the_nearest_measurement_is_chosen() {
        let known = calibration(&[
            (4096, 128, Method::Memcpy, 1.0),
            (4096, 128, Method::Batch, 8.0),
            (4096, 128, Method::Kernel, 30.0),
            (64 << 10, 128, Method::Batch, 45.0),
            (64 << 10, 128, Method::Kernel, 95.0),
            (1 << 20, 8, Method::Memcpy, 49.0),
            (1 << 20, 8, Method::Batch, 48.0),
            (1 << 20, 8, Method::Kernel, 50.0),
        ]);
        let choose = |bytes, ops, decoding| known.choose(Direction::ToDevice, bytes, ops, decoding);
        assert_eq!(choose(4096, 128, false), Method::Kernel);
        assert_eq!(choose(9000, 300, false), Method::Kernel);
        assert_eq!(choose(4096, 128, true), Method::Kernel, "copy engines are several times slower");
        assert_eq!(choose(20 << 10, 128, true), Method::Kernel);
        assert_eq!(choose(64 << 10, 128, false), Method::Kernel);
        assert_eq!(
            choose(64 << 10, 128, true),
            Method::Batch,
            "copy engines are good enough during decoding"
        );
        let near = calibration(&[(4096, 128, Method::Batch, 16.0), (4096, 128, Method::Kernel, 30.0)]);
        assert_eq!(near.choose(Direction::ToDevice, 4096, 128, false), Method::Kernel);
        assert_eq!(
            near.choose(Direction::ToDevice, 4096, 128, true),
            Method::Batch,
            "less than twice as quick"
        );
        assert_eq!(choose(900_000, 3, false), Method::Memcpy, "a small advantage of the kernel is none");
        assert_eq!(known.choose(Direction::ToHost, 4096, 1, false), Method::Batch, "rule of thumb");
    }

    /// One call for a batch takes a while, during which nothing is copied; behind other copies that costs nothing.
    #[test]
    fn large_groups_are_judged_by_the_rate_behind_other_copies() {
        let known = queueing(&[
            (24 << 10, 256, Method::Batch, 10.0, 11.0),
            (24 << 10, 256, Method::Kernel, 44.0, 48.0),
            (64 << 10, 128, Method::Batch, 30.0, 52.0),
            (64 << 10, 128, Method::Kernel, 44.0, 48.0),
            (64 << 10, 8, Method::Batch, 12.0, 40.0),
            (64 << 10, 8, Method::Kernel, 20.0, 45.0),
        ]);
        let choose = |bytes, ops| known.choose(Direction::ToDevice, bytes, ops, false);
        assert_eq!(choose(64 << 10, 128), Method::Kernel, "the whole of a small group waits for the call");
        assert_eq!(choose(64 << 10, 512), Method::Batch);
        assert_eq!(choose(64 << 10, 100_000), Method::Batch, "the nearest size counts, however many copies");
        assert_eq!(choose(24 << 10, 100_000), Method::Kernel);
        assert_eq!(choose(64 << 10, 8), Method::Kernel);
        let shown: Vec<_> =
            known.choices().iter().map(|c| (c.ops, c.op_bytes >> 10, c.auto, c.auto_large)).collect();
        let (batch, kernel) = (Method::Batch, Method::Kernel);
        assert_eq!(
            shown,
            [(8, 64, kernel, batch), (128, 64, kernel, batch), (256, 24, kernel, kernel)],
            "{known}"
        );
    }

    #[test]
    fn only_what_was_measured_for_the_same_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(dir.path(), "GPU-1");
        assert!(read(&path).is_err());
        let known = calibration(&[(4096, 8, Method::Batch, 2.0)]);
        write(&path, &known).unwrap();
        let kept = read(&path).unwrap();
        assert_eq!(kept, known);
        assert!(kept.fits(&known));
        let updated = Calibration { driver_version: 13_010, ..known.clone() };
        assert!(!kept.fits(&updated));
        let older = Calibration { methods: vec![Method::Memcpy], ..known.clone() };
        assert!(!kept.fits(&older));
        std::fs::write(&path, b"{\"format\": ").unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

//! The short measurement at attach.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvdepot_core::Result;

use crate::Direction;
use crate::cuda::calibration::{Calibration, Point};
use crate::cuda::context::{DeviceBuffer, Pinned, Priority, Stream};
use crate::cuda::kernel::Buffers;
use crate::cuda::plan::Range;
use crate::cuda::submit::{Method, Submitter};

/// The time limit of the measurement at attach.
pub(crate) const TIME_MAX: Duration = Duration::from_millis(400);
/// Number of runs, of which the fastest counts: other processes, such as other ranks, can only slow one down.
const RUNS: usize = 5;
/// The same for copies that are queued behind each other, which take longer and vary less.
const QUEUED_RUNS: usize = 3;
/// Number of times that the same copies are queued.
const QUEUED: u32 = 3;
/// The least time of queued copies, as a share of their time alone: less is noise.
const QUEUED_SHARE_MIN: f64 = 0.125;
/// Size of the memory on either side.
const SCRATCH_BYTES: usize = 8 << 20;
/// Bytes of a copy, and number of copies; no product exceeds the scratch memory. One call makes 256 copies at most.
/// Between 24 and 32 KiB batches become several times faster on some devices.
const CELLS: [(usize, usize); 11] = [
    (4 << 10, 256),
    (16 << 10, 256),
    (24 << 10, 256),
    (32 << 10, 128),
    (64 << 10, 128),
    (256 << 10, 32),
    (1 << 20, 8),
    (4 << 10, 8),
    (16 << 10, 8),
    (64 << 10, 8),
    (256 << 10, 2),
];

/// Measures each method in both directions. Cells that cannot be measured are left out, with the reason. Except for the
/// first, no size, count and direction is begun after `time_max`; once begun it is measured for every method, since a
/// choice between only some of them would be wrong.
pub(crate) fn all(submitter: &Submitter, mut calibration: Calibration, time_max: Duration) -> Calibration {
    let begun = Instant::now();
    if let Err(error) = measure(submitter, &mut calibration, begun + time_max) {
        tracing::info!("the copy engines were not measured completely: {error}");
        calibration.problem = Some(error.to_string());
    }
    calibration.measured_unix_s =
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    calibration.elapsed_ms = hundredths(begun.elapsed().as_secs_f64() * 1e3);
    tracing::debug!("copy engines: {calibration}");
    calibration
}

/// Rounds to two decimals, so that a value survives being written and read.
fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn measure(submitter: &Submitter, calibration: &mut Calibration, until: Instant) -> Result<()> {
    let context = &submitter.context;
    let _entered = context.enter()?;
    let device = DeviceBuffer::new(context, SCRATCH_BYTES)?;
    let host = Pinned::new(context, SCRATCH_BYTES)?;
    // Declared last, so that it is drained and dropped before the memory that its work uses.
    let bench =
        Bench { submitter, stream: Stream::new(context, Priority::Least)?, buffers: Buffers::new(context) };
    for (op_bytes, ops) in CELLS {
        // Neighbours on one side are not neighbours on the other, as with pages.
        let ranges: Vec<Range> = (0..ops)
            .map(|index| {
                let (there, here) = (index * op_bytes, (ops - 1 - index) * op_bytes);
                let mapped = Some(host.device() + here as u64);
                let device = device.address() + there as u64;
                Range { device, host: host.address() as usize + here, len: op_bytes, mapped }
            })
            .collect();
        for direction in [Direction::ToDevice, Direction::ToHost] {
            if Instant::now() >= until && !calibration.points.is_empty() {
                return Ok(());
            }
            for method in calibration.methods.clone() {
                let best = |times: u32, runs: usize| -> Result<Duration> {
                    // The first run includes the driver's own preparations.
                    let mut least = bench.run(method, direction, &ranges, times)?;
                    for _ in 0..runs {
                        least = least.min(bench.run(method, direction, &ranges, times)?);
                    }
                    Ok(least)
                };
                let (alone, together) = (best(1, RUNS)?, best(QUEUED, QUEUED_RUNS)?);
                let queued = together.saturating_sub(alone) / (QUEUED - 1);
                let rate =
                    |took: Duration| hundredths((op_bytes * ops) as f64 / took.as_secs_f64().max(1e-9) / 1e9);
                calibration.points.push(Point {
                    to_device: direction == Direction::ToDevice,
                    op_bytes: op_bytes as u64,
                    ops: ops as u64,
                    method,
                    gb_per_s: rate(alone),
                    queued_gb_per_s: rate(queued.clamp(alone.mul_f64(QUEUED_SHARE_MIN), alone)),
                });
            }
        }
    }
    Ok(())
}

struct Bench<'a> {
    submitter: &'a Submitter,
    buffers: Buffers,
    stream: Stream,
}

impl Bench<'_> {
    /// Returns the time of some copies that are submitted `times` times in a row, submission included.
    fn run(&self, method: Method, direction: Direction, ranges: &[Range], times: u32) -> Result<Duration> {
        let count = if method == Method::Kernel { times } else { 0 };
        let mut buffers = (0..count).map(|_| self.buffers.take()).collect::<Result<Vec<_>>>()?;
        let begun = Instant::now();
        let submitted = (0..times as usize).try_for_each(|index| {
            let buffer = buffers.get_mut(index);
            // SAFETY: both sides live until the stream was waited for; no other code knows them.
            unsafe { self.submitter.submit(method, direction, &self.stream, ranges, buffer, false) }
        });
        let ended = self.stream.synchronize();
        let took = begun.elapsed();
        buffers.into_iter().for_each(|buffer| self.buffers.give_back(buffer));
        submitted.and(ended)?;
        Ok(took)
    }
}
